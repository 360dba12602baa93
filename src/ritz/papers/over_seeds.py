"""Numbers of several seeds as one estimate: means, and differences and ratios at equal seed, with Student's t interval.

One seed has no interval, and what is judged by it is not decidable; of no seed at all, and where a number is NaN, the
estimate is NaN. The interval of a correlation ends at -1 and 1, and that of a share of runs is by their counts. Numbers
that are paired are given by seed, and only seeds that both have are counted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..intervals import Binomial, StudentT
from ..results import Estimate, from_samples

HALF = 0.5  # of the runs: what more of them do has the direction of what all do


def mean(values: Iterable[float], **fields: Any) -> Estimate:
    """The mean over seeds; `fields` replace those of the estimate.

    Example:
        >>> mean([1.0, 3.0]).value, mean([]).value
        (2.0, nan)
    """
    return from_samples(**{"name": "mean over seeds", "samples": _row(values)} | fields)


def correlation(values: Iterable[float], **fields: Any) -> Estimate:
    """The mean over seeds of a correlation, which is at most 1.

    Example:
        >>> [round(end, 2) for end in correlation([0.9, 0.93]).interval()]
        [0.72, 1.0]
    """
    return mean(values, support=(-1.0, 1.0), **fields)


def share(found: Iterable[bool], **fields: Any) -> Estimate:
    """The share of runs of which something is true, with the interval of Clopper and Pearson.

    Example:
        >>> lost = share([True] * 6)
        >>> lost.value, [round(end, 2) for end in lost.interval()]
        (1.0, [0.54, 1.0])
    """
    hits = [bool(one) for one in found]
    if not hits:
        return mean([])
    about = {"name": "share of runs", "rule": Binomial(sum(hits), len(hits)), "support": (0.0, 1.0)}
    return mean(map(float, hits), **about | fields)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate:
    """The mean over seeds of second - first.

    Example:
        >>> difference({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.5, 2: 9.0}).value
        0.5
    """
    return mean(second[seed] - first[seed] for seed in first if seed in second)


def welch(
    first: tuple[float, float], second: tuple[float, float], num: int, *, name: str = "difference", convention: str = ""
) -> Estimate:
    """The difference of two printed means, each with the spread of so many runs, with the error of Welch's test.

    Example:
        >>> found = welch((65.5, 0.7), (61.9, 0.4), num=5)
        >>> round(found.value, 2), [round(end, 2) for end in found.interval()]
        (3.6, [2.73, 4.47])
    """
    squares = [spread**2 / num for _, spread in (first, second)]
    dof = sum(squares) ** 2 / sum(square**2 / (num - 1) for square in squares)
    return Estimate(
        name=name, value=round(first[0] - second[0], 4), stderr=math.sqrt(sum(squares)), rule=StudentT(dof),
        convention=convention,
    )  # fmt: skip


def geometric_mean(values: Iterable[float]) -> Estimate:
    """exp of the mean logarithm and of the ends of its 95 % interval, at any level; NaN where a number is not positive.

    Example:
        >>> found = geometric_mean([2.0, 8.0, 4.0])
        >>> round(found.value, 6), [round(end, 3) for end in found.interval()]
        (4.0, [0.715, 22.38])
    """
    values = list(values)
    found = mean(math.log(x) if x > 0 else math.nan for x in values)
    center, low, high = _row(float(x) for x in (found.value, *found.interval())).exp().tolist()
    return Estimate(
        name="geometric mean over seeds", value=center, stderr=center * float(found.stderr), bracket=(low, high),
        samples=_row(values),
    )  # fmt: skip


def ratio(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate:
    """The geometric mean over seeds of second / first; NaN where one is not positive, as a trace may be.

    Example:
        >>> round(ratio({0: 1.0, 1: 2.0}, {0: 2.0, 1: 16.0}).value, 6)
        4.0
    """
    pairs = [(first[seed], second[seed]) for seed in first if seed in second]
    return geometric_mean(b / a if a > 0 and b > 0 else math.nan for a, b in pairs)


def quotient(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """second / first of two numbers [value, lower, upper], and all that they leave open; the first is positive.

    Example:
        >>> [quotient([2.0, low, 2.0], [4.0, 4.0, 5.0]).interval() for low in (1.0, -1.0)]
        [(2.0, 5.0), (2.0, inf)]
        >>> quotient([2.0, 1.0, 3.0], [-4.0, -5.0, -3.0]).interval()
        (-5.0, -1.0)
    """
    low = _over(second[1], first[2] if second[1] >= 0 else first[1])
    high = _over(second[2], first[1] if second[2] >= 0 else first[2])
    return Estimate(name="ratio", value=second[0] / first[0], bracket=(low, high))


def _over(number: float, divisor: float) -> float:
    """number / divisor; beyond all bounds where the divisor may be 0."""
    return number / divisor if divisor > 0 else math.copysign(math.inf, number)


def _row(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
