"""Figure 1c of seed 002, test error beside the norm of the weights, by another network than the paper's.

The paper has WideResNet-28-10 on CIFAR-100 at weight decay 0 and 5e-4: with it the norm falls and so does the test
error. Here the MLP of table 1 is trained on MNIST in its place, at eight weight decays, from none to one that is too
strong, at equal seeds. The metric of the paper, in which the norm is, is about the gap between test and training error
(section 4.1), so that the gap is judged beside the test error: far beyond the paper's weight decays the one goes on
falling with the norm and the other does not. Training is that of `mnist_mlp`, 50 epochs.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..measures.study.correlation import spearman
from . import mnist_mlp
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .mnist_mlp import Trained
from .over_seeds import correlation, difference, ratio
from .pieces import Pieces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECAYS = (0.0, 1e-5, 1e-4, 5e-4, 1e-3, 3e-3, 1e-2, 3e-2)
PAPERS_OWN = 5e-4  # the largest weight decay of the figure
NAMES = {"weight_norm": "|w|", "test_error": "test error", "gap": "gap of test and training error"}
PLACE = "the MLP on MNIST in place of WideResNet on CIFAR-100"


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train every seed at every weight decay, all at once; then norms and errors."""
    train, _, test = mnist_mlp.load_mnist(setting.data, setting.device)
    most = setting.pick(128, len(train[0]), len(train[0]))
    train, test = ((X[:most], y[:most]) for X, y in (train, test))
    epochs, seeds = setting.pick(1, 10, 50), setting.seed_range(2, 4, 8)
    trained = mnist_mlp.train_many(
        train, seeds, DECAYS, epochs=epochs, checkpoint=Pieces(setting, "weight-norms").training(seeds),
        progress=partial(progress, "epochs"),
    )  # fmt: skip
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
            "weight_norm": short(torch.cat([p.flatten() for p in params.values()]).double().norm()),
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
    return short(100 * wrong.double().mean())


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Norm, test error and gap from weight decay 0 to 5e-4; and, as questions of ours, along all weight decays.

    Example:
        >>> rows = [
        ...     {"seed": s, "weight_decay": d, "weight_norm": 9.0 - 1000 * d, "test_error": 5.0 + s - 1000 * d,
        ...      "train_error": 1.0, "images": 55_000, "epochs": 50}
        ...     for s in (0, 1) for d in (0.0, 1e-4, 5e-4)
        ... ]
        >>> [(claim.verdict, claim.ours) for claim in claims(rows)]
        [('holds', False), ('holds', False), ('holds', False), ('holds', True), ('holds', True)]
    """
    decays = list(dict.fromkeys(row["weight_decay"] for row in rows))
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    rows = [{**row, "gap": row["test_error"] - row["train_error"]} for row in rows]
    start, end = (
        {key: {row["seed"]: row[key] for row in rows if row["weight_decay"] == decay} for key in NAMES}
        for decay in (0.0, PAPERS_OWN)
    )
    seen = f"{PLACE}, {rows[0]['images']:,} images, {rows[0]['epochs']} epochs, {len(seeds)} seeds"
    figure, section = f"figure 1c, by {PLACE}", f"section 4.1, by {PLACE}"
    claim = partial(Claim, paper="seed 002")

    def evidence(key: str) -> str:
        means = [statistics.fmean(row[key] for row in rows if row["weight_decay"] == decay) for decay in decays]
        told = ", ".join(f"{decay:g}: {value:.2f}" for decay, value in zip(decays, means, strict=True))
        fits = [statistics.fmean(row["train_error"] for row in rows if row["weight_decay"] == d) for d in decays]
        more = f"; training error from {fits[0]:.2f} to {fits[-1]:.2f}" if key == "gap" else ""
        return f"{seen}; mean {NAMES[key]} by weight decay {told}{more}"

    found = [
        claim(
            where=figure, text="|w| falls from weight decay 0 to 5e-4: ratio", expected=1.0, relation="<=",
            measured=ratio(start["weight_norm"], end["weight_norm"]), evidence=evidence("weight_norm"),
        )
    ]  # fmt: skip
    for key, where in (("test_error", figure), ("gap", section)):
        found.append(
            claim(
                where=where, text=f"{NAMES[key]} falls from weight decay 0 to 5e-4: percentage points", expected=0.0,
                relation="<=", measured=difference(start[key], end[key]), evidence=evidence(key),
            )
        )  # fmt: skip
    for key, where in (("test_error", "figure 1c"), ("gap", "section 4.1")):
        ranks = correlation(_ranks([row for row in rows if row["seed"] == seed], key) for seed in seeds)
        found.append(
            claim(
                where=f"{where}, beyond its weight decays", ours=True, expected=0.0,
                text=f"the smaller |w|, the smaller the {NAMES[key]}, over all weight decays: rank correlation",
                relation=">=", measured=ranks, evidence=evidence(key),
            )
        )  # fmt: skip
    return found


def _ranks(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """The rank correlation of |w| and another number over the weight decays of one seed."""
    norms, others = ([row[name] for row in rows] for name in ("weight_norm", key))
    return float(spearman(_row(norms), _row(others), resamples=1).value)


def _row(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
