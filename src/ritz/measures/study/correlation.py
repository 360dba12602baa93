"""Correlations with intervals and p-values: of a measure with a gap over runs, of a bound with a trace over samples.

Pearson's r measures how close the relation is to a straight line, Spearman's rho and Kendall's tau-b how similar the
orders are. Intervals are by Fisher's z for r (for normal data), and by the bias-corrected percentile bootstrap for rank
correlations (Efron 1981). P-values are those of the permutation test: with all orders of y for up to 7 points, with
random orders for up to 500, and by the limiting law for more.

A pair with a missing value (NaN) is left out and counted. If the correlation is undefined, because a column is constant
or there are no points, the value is NaN and `reason` says why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...batches import isolated_rng
from ...intervals import Bootstrap
from ...results import Estimate, new_axes
from ...storage import Result
from .resampling import Method, bootstrap, fisher, p_value_of, ranks, value_of, why_none

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Column = Estimate | Tensor | Array | Sequence[float]

SYMBOLS = {"pearson": "r", "spearman": "rho", "kendall": "tau"}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Correlation(Result):
    """A correlation with its interval, and its p-value under the hypothesis of no relation.

    Attributes:
        method: "pearson", "spearman" or "kendall" (tau-b).
        value: In [-1, 1]; NaN if it is undefined.
        p_value: Two-sided p-value of the permutation test; NaN if there is no value.
        p_method: "exact" (all orders), "monte carlo" ((b + 1) / (m + 1) of m random orders) or "limit" (Student t for r
            and rho, normal for tau).
        smallest_p: The smallest p-value that these points can give in any order.
        n: Number of pairs that were used.
        missing: Number of pairs left out because one of the two values is NaN.
        seed: Seed of permutations and bootstrap.
        bootstrap: The correlations of resampled points; None for Pearson, and if there is no value.
        reason: Why there is no value, or the convention by which there is one.

    Example:
        >>> c = kendall([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0])
        >>> print(c)
        tau 0.667 in [-1.000, 1.000], p = 0.333 (exact), n = 4
    """

    method: Method
    value: float
    p_value: float = math.nan
    p_method: str = "none"
    smallest_p: float = math.nan
    n: int = 0
    missing: int = 0
    seed: int = 0
    bootstrap: Bootstrap | None = None
    reason: str = ""

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """(lower, upper), which contains the correlation of the population with a probability of about `level`."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        if math.isnan(self.value) or self.n == 0:
            return math.nan, math.nan
        if self.method == "pearson":
            return fisher(self.value, self.n, level)
        if self.bootstrap is None:
            return -1.0, 1.0
        low, high = self.bootstrap.interval(self.value, 0.0, (self.value, self.value), level)
        return min(float(low), self.value), max(float(high), self.value)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        symbol = SYMBOLS[self.method]
        if not math.isfinite(self.p_value):
            return f"{symbol} {self.value:.3f} ({self.reason}), n = {self.n}"
        low, high = self.interval()
        p = f"p = {self.p_value:.3g} ({self.p_method})"
        return f"{symbol} {self.value:.3f} in [{low:.3f}, {high:.3f}], {p}, n = {self.n}"

    __repr__ = __str__

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The value with its 95 % interval."""
        ax = ax or new_axes()
        low, high = self.interval()
        ax.errorbar([SYMBOLS[self.method]], [self.value], yerr=[[self.value - low], [high - self.value]], fmt="o")
        ax.axhline(0.0, color="0.8", lw=0.8, zorder=0)
        ax.set(ylim=(-1.05, 1.05), ylabel=f"{self.method} correlation, n = {self.n}")
        return ax


def pearson(x: Column, y: Column, *, resamples: int = 1999, seed: int = 0) -> Correlation:
    """Pearson's r = cov(x, y) / (sd x sd y), with Fisher's interval tanh(artanh r -/+ z / sqrt(n - 3)).

    The interval assumes normal data. A few outliers can determine both r and the interval: see `without_outliers` and
    `spearman`.

    Args:
        x, y: Two columns of equal length; pairs with a NaN are left out and counted.
        resamples: Number of random orders for the p-value, if there are too many orders to try all.
        seed: Seed of the random orders.

    Example:
        >>> round(pearson([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]).value, 6)
        0.8
    """
    return _correlate("pearson", x, y, resamples, seed)


def spearman(x: Column, y: Column, *, resamples: int = 1999, seed: int = 0) -> Correlation:
    """Spearman's rho, Pearson's r of the ranks (mean ranks for ties). Arguments as for `pearson`.

    Example:
        >>> round(spearman([1.0, 2.0, 3.0, 4.0], [1.0, 9.0, 2.0, 99.0]).value, 6)
        0.8
    """
    return _correlate("spearman", x, y, resamples, seed)


def kendall(x: Column, y: Column, *, resamples: int = 1999, seed: int = 0) -> Correlation:
    """Kendall's tau-b = sum_{i<j} sgn(dx dy) / sqrt(pairs not tied in x * pairs not tied in y) (Kendall 1945).

    Arguments as for `pearson`.

    Example:
        >>> tau = kendall([1.0, 2.0, 3.0], [10.0, 20.0, 40.0])
        >>> tau.value, round(tau.p_value, 4)  # three runs in perfect order prove nothing
        (1.0, 0.3333)
        >>> kendall([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).reason
        'x is constant'
    """
    return _correlate("kendall", x, y, resamples, seed)


def _correlate(method: Method, x: Column, y: Column, resamples: int, seed: int) -> Correlation:
    """Value, p-value and bootstrap of one correlation."""
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    a, b = _paired(x, y)
    known = ~(np.isnan(a) | np.isnan(b))
    a, b = a[known], b[known]
    fields: dict[str, Any] = {"method": method, "n": len(a), "missing": int((~known).sum()), "seed": seed}
    reason = why_none(method, a, b)
    if reason:
        return Correlation(value=math.nan, reason=reason, **fields)
    if method == "pearson":
        a, b = a / np.abs(a).max(), b / np.abs(b).max()  # squares stay in range
    else:
        a, b = ranks(a), ranks(b)
    value = value_of(method, a, b)
    p_value, p_method, smallest = p_value_of(method, a, b, value, resamples, seed)
    draws = None if method == "pearson" else bootstrap(method, a, b, value, seed)
    return Correlation(
        value=value, p_value=p_value, p_method=p_method, smallest_p=smallest, bootstrap=draws, **fields
    )  # fmt: skip


def as_row(column: Column, name: str) -> Array:
    """A column as float64, (n,)."""
    values = column.value if isinstance(column, Estimate) else column
    row = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if row.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {row.shape}")
    return row.astype(np.float64)


def _paired(x: Column, y: Column, first: str = "x", second: str = "y") -> tuple[Array, Array]:
    """Two columns of equal length."""
    a, b = as_row(x, first), as_row(y, second)
    if len(a) != len(b):
        raise ValueError(f"{first} and {second} must have equal lengths, got {len(a)} and {len(b)}")
    return a, b


# --------------------------------------------------------------------------------- bounds against traces, seed 003


def without_outliers(x: Column, y: Column, *, num_neighbors: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """The points (x, y) that scikit-learn's LocalOutlierFactor keeps, and which they are: (x kept, y kept, kept).

    The factor is computed for the joint points, with each column scaled to mean 0 and standard deviation 1 (seed 003,
    section 3.2, which gives no settings: 20 neighbours and the threshold 1.5 are scikit-learn's defaults). The
    correlation depends on this filter, so report it with and without. Points with a NaN are not kept.

    Example:
        >>> x = torch.linspace(0, 1, 50)
        >>> y = 2 * x
        >>> y[10] = 40.0
        >>> kept = without_outliers(x, y)[2]
        >>> int((~kept).sum()), bool(kept[10])
        (1, False)
    """
    a, b = _paired(x, y)
    if num_neighbors < 1:
        raise ValueError(f"num_neighbors must be at least 1, got {num_neighbors}")
    kept = np.isfinite(a) & np.isfinite(b)
    if kept.sum() > 2:  # two points have no neighbourhood
        try:
            with isolated_rng():  # this import draws from Python's generator
                from sklearn.neighbors import LocalOutlierFactor
        except ImportError as error:
            raise ImportError("finding outliers needs scikit-learn: pip install 'ritz[study]'") from error
        points = np.stack([a[kept], b[kept]], axis=1)  # (n, 2)
        spread = points.std(0)
        points = (points - points.mean(0)) / np.where(spread > 0, spread, 1.0)
        neighbors = min(num_neighbors, len(points) - 1)
        kept[kept] = LocalOutlierFactor(n_neighbors=neighbors).fit_predict(points) == 1
    mask = torch.from_numpy(kept)
    return torch.from_numpy(a)[mask], torch.from_numpy(b)[mask], mask


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PointCorrelations(Result):
    """Correlations of a bound with the traces, over the correct or the incorrect points.

    Attributes:
        pearson: Pearson's r over all these points.
        filtered: Pearson's r without the outliers.
        spearman: Spearman's rho over all these points.
        removed: Number of outliers.

    Example:
        >>> found = margin_correlations([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], torch.tensor([True, True, True]))
        >>> found.correct.n, round(found.correct.spearman.value, 6), found.correct.removed
        (3, 0.5, 0)
    """

    pearson: Correlation
    filtered: Correlation
    spearman: Correlation
    removed: int

    @property
    def n(self) -> int:
        """Number of points, including outliers."""
        return self.pearson.n


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class MarginCorrelations(Result):
    """The study of seed 003: per-sample Hessian traces against a bound from a forward pass.

    Attributes:
        correct: Correlations over the points that are classified correctly.
        incorrect: Correlations over the other points.
        traces, bound: The coordinates of all points, (n,) each.
        is_correct: Whether each point is classified correctly, (n,) bool.
        outlier: Whether each point was left out of the filtered r, (n,) bool.
        reliability: The share of the variance of the traces that is not probe noise; 1 for exact traces. Because of
            probe noise, |r| is at most about its square root.

    Example:
        >>> noisy = Estimate(name="traces", value=torch.tensor([0.0, 1.0, 2.0]), stderr=torch.full((3,), 0.5))
        >>> margin_correlations(noisy, [0.0, 1.0, 2.0], torch.tensor([True, True, True])).reliability
        0.75
    """

    correct: PointCorrelations
    incorrect: PointCorrelations
    traces: Tensor
    bound: Tensor
    is_correct: Tensor
    outlier: Tensor
    reliability: float = 1.0

    def __str__(self) -> str:
        lines = []
        for name, group in (("correct", self.correct), ("incorrect", self.incorrect)):
            filtered = f"without outliers ({group.removed}) {group.filtered}"
            lines.append(f"{name}: {group.pearson}; {filtered}; {group.spearman}")
        if self.reliability < 1:
            lines.append(f"probe noise keeps r under {math.sqrt(self.reliability):.3f}")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """All points, trace against bound; outliers are hollow (figure 3 of seed 003)."""
        ax = ax or new_axes()
        right, x, y = self.is_correct, self.bound.numpy(), self.traces.numpy()
        for name, group, mask, color in (
            ("correct", self.correct, right, "C0"),
            ("incorrect", self.incorrect, ~right, "C1"),
        ):
            if not group.n:
                continue
            outliers = f" ({group.filtered.value:.3f} without {group.removed} outliers)" if group.removed else ""
            r = group.pearson.reason or f"r = {group.pearson.value:.3f}{outliers}"
            label = f"{group.n} {name}: {r}"
            inside, outside = (mask & ~self.outlier).numpy(), (mask & self.outlier).numpy()
            ax.scatter(x[inside], y[inside], s=8, color=color, lw=0, alpha=0.6, label=label)
            ax.scatter(x[outside], y[outside], s=12, facecolors="none", edgecolors=color, lw=0.6)
        ax.set(xlabel="bound", ylabel="Hessian trace of the sample")
        if len(x):
            ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize="small")
        return ax


def margin_correlations(
    traces: Column,
    bound: Column,
    correct: Tensor,
    *,
    num_neighbors: int = 20,
    zero_if_none: bool = False,
    resamples: int = 1999,
    seed: int = 0,
) -> MarginCorrelations:
    """Correlations of per-sample traces with a bound, separately for correct and incorrect points (seed 003, figure 3).

    Args:
        traces: The Hessian trace of each sample, from `ritz.sample_traces`.
        bound: A substitute for it, such as the affine trace (ACEHT) or the margin bound of each sample.
        correct: Whether each sample is classified correctly, (n,) bool.
        num_neighbors: Setting of LocalOutlierFactor; see `without_outliers`.
        zero_if_none: If there are no points of one kind, give r = 0 as the paper does, instead of NaN.
        resamples, seed: Settings of the p-values and intervals.

    Example:
        >>> bound = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> found = margin_correlations(2 * bound, bound, torch.ones(4, dtype=torch.bool))
        >>> round(found.correct.pearson.value, 6), found.incorrect.pearson.reason
        (1.0, 'no points')
    """
    x, y = _paired(bound, traces, "bound", "traces")
    right = torch.as_tensor(correct).cpu()
    if right.dtype != torch.bool or right.shape != x.shape:
        raise ValueError(
            f"correct must be {len(x)} booleans, one per sample, got {right.dtype} of shape {tuple(right.shape)}"
        )
    options: dict[str, Any] = {"resamples": resamples, "seed": seed}
    groups, outlier = [], torch.zeros_like(right)
    for mask in (right, ~right):
        own_x, own_y = x[mask.numpy()], y[mask.numpy()]
        some_x, some_y, kept = without_outliers(own_x, own_y, num_neighbors=num_neighbors)
        group = [
            pearson(own_x, own_y, **options),
            pearson(some_x, some_y, **options),
            spearman(own_x, own_y, **options),
        ]
        if zero_if_none and not len(own_x):
            group = [replace(c, value=0.0, reason="no points; 0 by the convention of seed 003") for c in group]
        outlier[mask] = ~kept
        groups.append(PointCorrelations(
            pearson=group[0], filtered=group[1], spearman=group[2], removed=int((~kept).sum())
        ))  # fmt: skip
    return MarginCorrelations(
        correct=groups[0], incorrect=groups[1], traces=torch.from_numpy(y), bound=torch.from_numpy(x), is_correct=right,
        outlier=outlier, reliability=_reliability(traces),
    )  # fmt: skip


def _reliability(traces: Column) -> float:
    """1 - mean(stderr^2) / variance of the values, within [0, 1]."""
    if not isinstance(traces, Estimate) or traces.exact:
        return 1.0
    noise = float(torch.as_tensor(traces.stderr).double().square().nan_to_num().mean())
    spread = float(torch.as_tensor(traces.value).double().var())
    return min(max(1 - noise / spread, 0.0), 1.0) if spread > 0 else 1.0
