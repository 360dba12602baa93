"""What the experiments of seed 003 share: images, Hessian traces of single samples beside margins, means over seeds.

The paper takes 1,000 random training points, estimates the trace of each one's Hessian with PyHessian, and correlates
it with what a forward pass gives: ACEHT, (|x|^2 + 1) (1 - sum_j S_j^2), and the margin bound on it. Points that are
classified correctly and those that are not are taken apart, outliers removed by LocalOutlierFactor. Here the traces are
exact, r is given with and without the outliers, and x is the image with pixels in [0, 1]; the paper does not say how it
scaled them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..estimators.samples import sample_traces
from ..measures.margins.summaries import sample_aceht, sample_margin_bound, sample_margins
from ..measures.outputs import Outputs, sample_outputs
from ..measures.study.correlation import pearson, without_outliers
from ..measures.study.resampling import ranks
from ..results import Estimate
from ..risk import Risk
from ..space import random_permutation
from . import over_seeds
from .data.images import Data, load_images
from .experiment import Setting, short

NUM_POINTS = 1000  # of a correlation, as in the paper
NUM_DRAWN = 400  # of them kept for a figure
AXES = ("aceht", "bound", "margin")
BOUND = "the bound is (|x|^2 + 1) (1 - margin^2), where the paper prints |x| for |x|^2 + 1"


def load_grey(name: str, setting: Setting, most: int, most_test: int = 10_000) -> dict[str, Data]:
    """The first `most` training and `most_test` test images of MNIST's kind, (N, 1, 28, 28) with pixels in [0, 1]."""
    parts = load_images(name, setting.data, setting.device)
    sizes = (most, most_test)
    found = [((X[:num].unflatten(1, (1, 28, 28)) + 1) / 2, y[:num]) for (X, y), num in zip(parts, sizes, strict=True)]
    return dict(zip(("train", "test"), found, strict=True))


def drawn(data: Data, num: int, seed: int) -> Data:
    """`num` random samples, or all where there are no more; the same for every network of a seed.

    Example:
        >>> X, y = drawn((torch.arange(6.0), torch.arange(6)), 4, seed=0)
        >>> len(y.unique()), bool((X == y).all())
        (4, True)
    """
    rows = random_permutation(len(data[0]), ("points", seed), data[0].device)[:num]
    return data[0][rows], data[1][rows]


def risk_of(model: nn.Module, data: Data, batch_size: int = 1000) -> Risk:
    """Mean cross-entropy in evaluation mode, BatchNorm with its running statistics, as PyHessian has it."""
    return Risk(model, nn.CrossEntropyLoss(), data, batch_size=batch_size)


# --------------------------------------------------------------------------------- traces beside margins


def correlations(
    model: nn.Module, data: Data, outputs: Outputs, num: int = NUM_POINTS, seed: int = 0
) -> dict[str, Any]:
    """r of exact Hessian traces with ACEHT, margin bound and output margin over `num` random points, as plain data.

    Args:
        model: The network.
        data: All that points are drawn from.
        outputs: `sample_outputs` of all of them.
        num: Points; and wrong ones in `everywrong`, drawn from all that there are in `data`, for among 1,000 points of
            a trained network there are few.
        seed: Of the draw.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> data = torch.arange(40.0).reshape(10, 1, 2, 2).sin(), torch.arange(10) % 3
        >>> found = correlations(model, data, sample_outputs(risk_of(model, data)))
        >>> found["aceht"]["incorrect"]["r"], found["correct"] + found["incorrect"]  # an affine network
        (1.0, 10)
    """
    some, columns = _measure(model, drawn(data, num, seed))
    right = some.correct
    wrong = ~outputs.correct.to(data[0].device)
    found: dict[str, Any] = {"correct": int(right.sum()), "incorrect": int((~right).sum())}
    for axis in AXES:
        found[axis] = {
            word: _related(columns, axis, kind) for word, kind in (("correct", right), ("incorrect", ~right))
        }
    found["everywrong"] = {"n": int(wrong.sum())} | dict.fromkeys(AXES, _related({}, "", torch.zeros(0)))
    if bool(wrong.any()):
        others, own = _measure(model, drawn((data[0][wrong], data[1][wrong]), num, seed))
        found["everywrong"] |= {axis: _related(own, axis, ~others.correct) for axis in AXES}
    kept = {name: [short(x) for x in columns[name][:NUM_DRAWN].tolist()] for name in ("trace", "aceht", "margin")}
    return found | {"points": kept | {"correct": right[:NUM_DRAWN].int().tolist()}}


def _measure(model: nn.Module, data: Data) -> tuple[Outputs, dict[str, Tensor]]:
    """Of every sample: what a forward pass gives, and the exact trace."""
    risk = risk_of(model, data)
    found = sample_outputs(risk)
    columns = {"aceht": sample_aceht(found), "bound": sample_margin_bound(found), "margin": sample_margins(found)}
    return found, columns | {"trace": torch.as_tensor(sample_traces(risk, method="exact").value).to(columns["aceht"])}


def _related(columns: Mapping[str, Tensor], axis: str, kind: Tensor) -> dict[str, float]:
    """Pearson's r with and without outliers and Spearman's rho over one kind of points; NaN for fewer than three."""
    count = int(kind.sum())
    if count < 3:
        return {"r": math.nan, "filtered": math.nan, "rho": math.nan, "n": count, "removed": 0}
    x, y = columns[axis][kind], columns["trace"][kind]
    some_x, some_y, kept = without_outliers(x, y)
    first, second = (torch.from_numpy(ranks(part.numpy())) for part in (x, y))  # without the bootstrap of `spearman`
    parts = {"r": (x, y), "filtered": (some_x, some_y), "rho": (first, second)}
    values = {name: short(pearson(*pair, resamples=1).value) for name, pair in parts.items()}
    return {**values, "n": count, "removed": int((~kept).sum())}


def fit(train: Outputs, test: Outputs) -> dict[str, float]:
    """Loss, and accuracy in percent, on both."""
    parts = {"train": train, "test": test}
    losses = {f"{name}_loss": short(part.mean(part.loss)) for name, part in parts.items()}
    return losses | {f"{name}_accuracy": short(100 * part.mean(part.correct.double())) for name, part in parts.items()}


# ---------------------------------------------------------------------------------------- over seeds


def mean(name: str, values: Sequence[float], over: Callable[..., Estimate] = over_seeds.mean) -> Estimate:
    """The mean over seeds with its Student t interval; those that have no such number (NaN) are left out.

    Example:
        >>> mean("trace", [0.9, float("nan"), 0.8]).value
        0.85
    """
    known = [value for value in values if not math.isnan(value)]
    return over(known, name=name, convention=f"mean over {len(known)} seeds")


mean_r = partial(mean, over=over_seeds.correlation)


def paired(rows: Sequence[Mapping[str, Any]], key: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Tensor:
    """Number `key` of the rows like `second` less that of those like `first`, seed by seed: (seeds,).

    Example:
        >>> rows = [{"seed": s, "batch": b, "error": s + b} for s in (0, 1) for b in (2, 8)]
        >>> paired(rows, "error", {"batch": 2}, {"batch": 8}).tolist()
        [6.0, 6.0]
    """

    def column(like: Mapping[str, Any]) -> dict[int, float]:
        return {row["seed"]: row[key] for row in rows if all(row.get(name) == value for name, value in like.items())}

    start, end = column(first), column(second)
    return torch.tensor([end[seed] - start[seed] for seed in start if seed in end], dtype=torch.float64)
