"""Figure 1c of seed 002, test error beside the norm of the weights, on the network of 9,960 parameters.

The paper has a WideResNet on CIFAR-100 at weight decay 0 and 5e-4: with it the norm falls and so does the test error.
Here the MLP of table 1 is trained on MNIST at eight weight decays, from none to one that is too strong, at equal seeds;
so it is seen where the two part. Training is that of `mnist_mlp`, 50 epochs.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..measures.study.correlation import spearman
from . import mnist_mlp
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting
from .mnist_mlp import Trained
from .over_seeds import mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECAYS = (0.0, 1e-5, 1e-4, 5e-4, 1e-3, 3e-3, 1e-2, 3e-2)
PAPERS_OWN = 5e-4  # the largest weight decay of the figure
ABOUT: dict[str, Any] = {"paper": "seed 002", "where": "figure 1c, on the network of table 1"}
BEYOND = {"where": f"{ABOUT['where']}, a control: the paper has no weight decay beyond {PAPERS_OWN:g}"}


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train every seed at every weight decay, all at once; then norms and errors."""
    train, _, test = mnist_mlp.load_mnist(setting.data, setting.device)
    most = setting.pick(128, len(train[0]), len(train[0]))
    train, test = ((X[:most], y[:most]) for X, y in (train, test))
    epochs = setting.pick(1, 10, 50)
    trained = mnist_mlp.train_many(
        train, range(setting.num_seeds(2, 4, 8)), DECAYS, epochs=epochs, progress=partial(progress, "epochs")
    )
    rows = [{**row, "images": len(train[0]), "epochs": epochs} for row in measure(trained, train, test)]
    return rows, claims(rows)


def measure(trained: Trained, train: Data, test: Data) -> Rows:
    """Norm of the weights, training error and test error of every network.

    Example:
        >>> data = torch.eye(784)[:4], torch.arange(4)
        >>> trained = mnist_mlp.train_many(data, [0], [0.0, 0.1], epochs=1)
        >>> [row["weight_decay"] for row in measure(trained, data, data)]
        [0.0, 0.1]
    """
    return [
        {
            "seed": seed, "weight_decay": decay,
            "weight_norm": _short(torch.cat([p.flatten() for p in params.values()]).double().norm()),
            "train_error": _error(params, train), "test_error": _error(params, test),
        }
        for seed in trained.seeds for decay in trained.weight_decays
        for params in [trained.params(seed, decay)]
    ]  # fmt: skip


def _error(params: Mapping[str, Tensor], data: Data) -> float:
    """Wrongly classified, in percent."""
    X, y = data
    model = mnist_mlp.make_network(0, X.dtype).to(X.device)
    wrong: Tensor = torch.func.functional_call(model, dict(params), (X,)).argmax(1) != y
    return _short(100 * wrong.double().mean())


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """The figure's two curves from weight decay 0 to 5e-4, and whether the one tells the other along all of them.

    Example:
        >>> rows = [
        ...     {"seed": s, "weight_decay": d, "weight_norm": 9.0 - 1000 * d, "test_error": 5.0 + s - 1000 * d,
        ...      "images": 55_000, "epochs": 50}
        ...     for s in (0, 1) for d in (0.0, 1e-4, 5e-4)
        ... ]
        >>> [claim.verdict for claim in claims(rows)]
        ['holds', 'holds', 'holds', 'holds']
    """
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    curves = {
        key: {seed: [row[key] for row in rows if row["seed"] == seed] for seed in seeds}
        for key in ("weight_decay", "weight_norm", "test_error")
    }
    decays = curves["weight_decay"][seeds[0]]
    at = decays.index(PAPERS_OWN)
    ratios = [curves["weight_norm"][seed][at] / curves["weight_norm"][seed][0] for seed in seeds]
    changes = [curves["test_error"][seed][at] - curves["test_error"][seed][0] for seed in seeds]
    norms = [curves["weight_norm"][seed] for seed in seeds]
    steady = sum(all(a > b for a, b in pairwise(one)) for one in norms)
    means = [statistics.fmean(curves["test_error"][seed][k] for seed in seeds) for k in range(len(decays))]
    ranks = [
        float(spearman(_row(curves["weight_norm"][s]), _row(curves["test_error"][s]), resamples=1).value) for s in seeds
    ]
    seen = f"{rows[0]['images']:,} images, {rows[0]['epochs']} epochs, {len(seeds)} seeds"
    evidence = f"MLP on MNIST, {seen}; mean test error by weight decay " + ", ".join(
        f"{decay:g}: {mean:.2f} %" for decay, mean in zip(decays, means, strict=True)
    )
    about = ABOUT | {"evidence": evidence}
    return [
        Claim(
            text="|w| falls from weight decay 0 to 5e-4: ratio", expected=1.0, relation="<=", measured=mean(ratios),
            **about,
        ),
        Claim(
            text="test error falls from weight decay 0 to 5e-4: percentage points", expected=0.0, relation="<=",
            measured=mean(changes), **about,
        ),
        Claim(
            text="|w| falls at every step of weight decay: how many seeds", expected=float(len(seeds)),
            measured=float(steady), **(about | BEYOND),
        ),
        Claim(
            text="the smaller |w|, the smaller the test error, over all weight decays: rank correlation",
            expected=0.0, relation=">=", measured=mean(ranks), **(about | BEYOND),
        ),
    ]  # fmt: skip


def _row(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _short(value: Tensor) -> float:
    return float(f"{float(value):.6g}")


def figure(rows: Rows) -> "Figure":
    """Test error and norm against weight decay, a line for each seed."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 3.4), layout="constrained", facecolor="white")
    for ax, (key, label) in zip(
        picture.subplots(1, 2), (("test_error", "test error, %"), ("weight_norm", "‖w‖")), strict=True
    ):
        for seed in dict.fromkeys(row["seed"] for row in rows):
            own = [row for row in rows if row["seed"] == seed]
            ax.plot([row["weight_decay"] for row in own], [row[key] for row in own], "o-", ms=3, lw=1)
        ax.set_xscale("symlog", linthresh=1e-5)
        ax.set_xlabel("weight decay")
        ax.set_ylabel(label)
    return picture
