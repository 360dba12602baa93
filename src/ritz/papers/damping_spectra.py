"""Figures 2b and 2c of seed 004: the Hessian of VGG-16 on CIFAR-100 after SGD and after an adaptive method.

The paper shows two spectra at epoch 300, and says of them that the adaptive method has found the sharper solution, in
lambda_1 and in Frobenius norm, and yet the one that generalises better (section 3.3), and that after SGD a continuous
region is followed by some eigenvalues close to it and by several clear outliers (section 4.1). The caption has them on
CIFAR-10, the text on CIFAR-100, which is taken here. Rate and damping of Adam are not given; in table 2 Adam is behind
SGD with its default damping and ahead of it with a large one, so both are trained, as `damping_cifar` does, and both
are asked. Curvature is that of `cifar_spectra`: without dropout and crops, by Lanczos from one random vector; at paper
budget on 2,560 images in 30 steps, where the paper has 45,000 and 100: arms are compared on the same images.

What counts as an outlier is what `logistic_damping_claims` takes for one: the Ritz values before the largest drop among
the first, where the last of them is at least twice what follows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .base import Claim
from .cifar_spectra import NETWORKS, train_arms
from .cifar_spectra_claims import RISES, against
from .cifar_spectra_numbers import HELD_OUT, Row, short_of, told
from .damping_cifar import TABLE2, Arm, recipe
from .experiment import Progress, Rows, Setting
from .logistic_damping_claims import outlier_count
from .over_seeds import mean

PAPER, NETWORK = "seed 004", "vgg16"
ARMS: dict[str, Arm] = dict(zip(("SGD", "Adam-D", "Adam"), TABLE2, strict=True))
SEVERAL = 2


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """VGG-16 by SGD, Adam and damped Adam, its spectra, and what the paper says of them."""
    seeds = setting.seed_range(*NETWORKS[NETWORK].seeds)
    recipes = {(name, seed): recipe(arm, seed, setting) for seed in seeds for name, arm in ARMS.items()}
    about = {name: {"setting": arm.label} for name, arm in ARMS.items()}
    rows = train_arms(NETWORK, about, recipes, setting, progress, cut=True)
    return rows, claims(rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Sharper and better for either damping of Adam, at equal seed, and the outliers after SGD.

    Example:
        >>> claims([])
        []
    """
    there = {row["arm"] for row in rows}
    found = []
    for name in ARMS:
        if name != "SGD" and {"SGD", name} <= there:
            pair = partial(against, rows, ("SGD", name), PAPER, "section 3.3, figure 2", mode="eval")
            found += [pair(key, **RISES) for key in ("lambda_max", "frobenius_norm")]
            found += [pair(f"{held}_accuracy", expected=0.0, relation=">=") for held in HELD_OUT]
    return found + (_outliers(rows) if "SGD" in there else [])


def _outliers(rows: Sequence[Row]) -> list[Claim]:
    own: list[dict[str, Any]] = [row["eval"] for row in rows if row["arm"] == "SGD" and "eval" in row]
    counts = [outlier_count(torch.tensor(one["nodes"]).sort(descending=True).values) for one in own]
    return [
        Claim(
            paper=PAPER, where="section 4.1, figure 2b", text="outliers after SGD", expected=SEVERAL, relation=">=",
            measured=mean(map(float, counts)), short_of=short_of(rows, "lambda_max"),
            evidence=f"{', '.join(map(str, counts)) or 'none'} by seed; {told(rows, ['SGD'], 'eval')}",
        )
    ]  # fmt: skip
