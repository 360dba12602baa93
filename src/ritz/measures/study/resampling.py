"""Permutation tests and bootstrap of correlations, on plain rows of numbers.

Intervals come from points resampled with replacement. P-values come from all orders of the points, or many random
ones. Random numbers are keyed, so a seed gives the same numbers on every machine.
"""

import itertools
import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from ...intervals import Bootstrap
from ...space import random_uniform

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Method = Literal["pearson", "spearman", "kendall"]

ENUMERATED = 7  # up to so many points all orders are tried, 7! = 5,040
LARGE = 500  # with more points: the limiting law instead of permutations, and a scaled bootstrap of a part of them
BOOTSTRAP = 999  # resamples for an interval
CHUNK = 2_000_000  # random numbers drawn at once
ROUND_OFF = 1e-10  # statistics closer than this, relative to the largest possible, count as equal


def why_none(method: Method, a: "Array", b: "Array") -> str:
    """Why these points have no correlation; empty if they have one.

    Example:
        >>> why_none("kendall", np.ones(3), np.arange(3.0))
        'x is constant'
    """
    if len(a) < 2:
        return "one point" if len(a) else "no points"
    for name, row in (("x", a), ("y", b)):
        if (row == row[0]).all():
            return f"{name} is constant"
        if method == "pearson" and not np.isfinite(row).all():
            return f"{name} is infinite somewhere; a rank correlation allows that"
    return ""


def ranks(row: "Array") -> "Array":
    """Ranks 1 ... n along the last axis, with mean ranks for ties.

    Example:
        >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
        [2.5, 1.0, 2.5]
    """
    from scipy.stats import rankdata

    ranked: Array = rankdata(row, axis=-1)
    return ranked


def value_of(method: Method, a: "Array", b: "Array") -> float:
    """The correlation of two rows, which must already be ranks except for Pearson.

    Example:
        >>> value_of("kendall", np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]))
        1.0
    """
    if method == "pearson":
        return float(_cosine(a, b))
    if method == "spearman":
        value = float(_cosine(a, b))
    else:
        from scipy.stats import kendalltau

        value = float(kendalltau(a, b).statistic)
    return math.copysign(1.0, value) if abs(value) > 1 - ROUND_OFF else value  # rounding must not separate equal orders


def _cosine(a: "Array", b: "Array") -> "Array":
    """Pearson's r along the last axis; NaN where a row is constant."""
    a, b = (row - row.mean(-1, keepdims=True) for row in (a, b))
    norms = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        r: Array = np.clip((a * b).sum(-1) / norms, -1.0, 1.0)
    return r


# ---------------------------------------------------------------------------------------------------------- p-values


def p_value_of(
    method: Method, a: "Array", b: "Array", value: float, resamples: int, seed: int
) -> tuple[float, str, float]:
    """(p, method, smallest possible p) of the two-sided permutation test of |correlation|.

    Example:
        >>> x = np.arange(4.0)
        >>> p, how, smallest = p_value_of("kendall", x, x, 1.0, resamples=99, seed=0)
        >>> round(p, 4), how, p == smallest  # two of 24 orders are as extreme
        (0.0833, 'exact', True)
    """
    n = len(a)
    if n > LARGE:
        return _limit_p(method, a, b, value), "limit", 0.0
    a, b = a - a.mean(), b - b.mean()
    up = np.argsort(b)[np.argsort(np.argsort(a))]  # puts y in the order of x; no order is further from none than
    down = np.argsort(-b)[np.argsort(np.argsort(a))]  # this one or its reverse
    seen, *ends = np.abs(_statistics(method, a, b, np.stack([np.arange(n), up, down])))
    exact = n <= ENUMERATED
    null = np.abs(_all_orders(method, a, b) if exact else _random_orders(method, a, b, resamples, seed))
    given = 0 if exact else 1  # with random orders the observed one is counted too
    slack = ROUND_OFF * max(ends)
    p, smallest = (((null >= t - slack).sum() + given) / (len(null) + given) for t in (seen, max(ends)))
    return float(p), "exact" if exact else "monte carlo", float(smallest)


def _all_orders(method: Method, a: "Array", b: "Array") -> "Array":
    return _statistics(method, a, b, np.array(list(itertools.permutations(range(len(a))))))


def _random_orders(method: Method, a: "Array", b: "Array", resamples: int, seed: int) -> "Array":
    n = len(a)
    rows = max(CHUNK // n, 1)
    return np.concatenate([
        _statistics(method, a, b, _orders(n, min(rows, resamples - start), seed, start))
        for start in range(0, resamples, rows)
    ])  # fmt: skip


def _orders(n: int, rows: int, seed: int, start: int) -> "NDArray[np.intp]":
    """Random orders number start ... start + rows - 1 of n things, (rows, n)."""
    uniform = random_uniform(rows * n, ("order", seed, n), start=start * n).view(rows, n)
    return uniform.argsort(1).numpy()


def _statistics(method: Method, a: "Array", b: "Array", orders: "NDArray[np.intp]") -> "Array":
    """The statistic for y in each of these orders (rows,): a . b, or concordant minus discordant pairs."""
    if method != "kendall":
        product: Array = b[orders] @ a
        return product
    by_x = np.argsort(a, kind="stable")
    after = np.searchsorted(a[by_x], a[by_x], side="right")  # first place with a larger x
    order = np.unique(b, return_inverse=True)[1].astype(np.int16)  # the order is all that matters
    y = np.ascontiguousarray(order[orders][:, by_x].T)  # (n, rows)
    total = np.zeros(len(orders))
    for i, first in enumerate(after):
        total += (y[first:] > y[i]).sum(0) - (y[first:] < y[i]).sum(0)
    return total


def _limit_p(method: Method, a: "Array", b: "Array", value: float) -> float:
    """The two-sided p-value for many points."""
    from scipy import stats

    if method == "kendall":
        return float(stats.kendalltau(a, b, method="asymptotic").pvalue)
    dof = len(a) - 2
    return float(2 * stats.t.sf(abs(value) * math.sqrt(dof / max(1 - value**2, 1e-300)), dof))


# --------------------------------------------------------------------------------------------------------- intervals


def bootstrap(method: Method, a: "Array", b: "Array", value: float, seed: int) -> Bootstrap | None:
    """The correlations of points drawn with replacement; with more than `LARGE` points, of a part of them, scaled.

    Resampled points repeat, which biases the rho of a resample towards 0; plain percentiles would then miss a strong
    relation. The bias is corrected by the share of draws below the value; the skewness is not corrected. If all pairs
    agree, no resample differs, so the nearest other order is resampled, with one pair of neighbours exchanged.

    Example:
        >>> x = np.arange(1.0, 9.0)
        >>> draws = bootstrap("kendall", x, x, 1.0, seed=0)
        >>> len(draws.means), float(draws.means.max())
        (999, 1.0)
    """
    if abs(value) == 1.0:
        b = _one_turned(a, b)
        value = value_of(method, a, b)
    n, center = len(a), value
    if n > LARGE:  # the spread falls as 1 / sqrt(n), so a part of the points is enough
        part = _orders(n, 1, seed, 0)[0, :LARGE]
        a, b = a[part], b[part]
        if why_none(method, a, b):
            return None
        center = value_of(method, a, b)
    size = len(a)  # (BOOTSTRAP, size) below
    uniform = random_uniform(BOOTSTRAP * size, ("bootstrap", seed, n)).view(BOOTSTRAP, size)
    drawn = (uniform * size).long().numpy()
    draws = _resampled_tau(a, b, drawn) if method == "kendall" else _cosine(ranks(a[drawn]), ranks(b[drawn]))
    draws = draws[~np.isnan(draws)]  # a resample may consist of a single repeated point
    if not len(draws):
        return None
    draws = np.sort(np.clip(value + (draws - center) * math.sqrt(size / n), -1.0, 1.0))
    equal_to = np.isclose(draws, value, rtol=0.0, atol=ROUND_OFF)
    below = float(((draws < value) & ~equal_to).mean() + equal_to.mean() / 2)
    edge = 1 / len(draws)
    return Bootstrap(torch.from_numpy(draws), _normal(min(max(below, edge), 1 - edge)), 0.0)


def _one_turned(a: "Array", b: "Array") -> "Array":
    """y with two values exchanged that are neighbours in the order of x, near the middle if possible."""
    by_x = np.argsort(a, kind="stable")
    different = np.flatnonzero(np.diff(b[by_x]))
    place = different[len(different) // 2]
    turned, pair = b.copy(), by_x[place : place + 2]
    turned[pair] = b[pair[::-1]]
    return turned


def _resampled_tau(a: "Array", b: "Array", drawn: "NDArray[np.intp]") -> "Array":
    """tau-b of each resample (rows,): if point i was drawn c_i times, every sum over pairs is c' M c."""
    rows, size = drawn.shape
    counts = np.bincount((drawn + size * np.arange(rows)[:, None]).ravel(), minlength=rows * size)
    c = counts.reshape(rows, size).astype(np.float64)
    x, y = (np.sign(row[:, None] - row) for row in (a, b))  # (size, size)
    agree, in_x, in_y = (((c @ pairs) * c).sum(1) for pairs in (x * y, x * x, y * y))
    with np.errstate(invalid="ignore", divide="ignore"):
        tau: Array = agree / np.sqrt(in_x * in_y)
    return tau


def fisher(value: float, n: int, level: float) -> tuple[float, float]:
    """tanh(artanh r -/+ z / sqrt(n - 3)) (Fisher 1921); all of [-1, 1] for three points or fewer.

    Example:
        >>> [round(end, 4) for end in fisher(0.5, 28, 0.95)]
        [0.156, 0.7358]
    """
    if n <= 3:
        return -1.0, 1.0
    if abs(value) == 1.0:
        return value, value
    width = _normal(0.5 + level / 2) / math.sqrt(n - 3)
    return math.tanh(math.atanh(value) - width), math.tanh(math.atanh(value) + width)


def _normal(q: float) -> float:
    """The q-quantile of the standard normal law."""
    return NormalDist().inv_cdf(q)
