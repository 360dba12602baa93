"""Intervals: how a value, its sampling error and its bracket become a range that holds the truth as often as it says.

No one rule is honest for every number. A mean of few samples wants Student's t; one of skewed quadratic forms a
chi-square; an extreme eigenvalue a bound from its random starts. tests/estimators/test_coverage.py shows them to hold.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .storage import equal

Number = float | Tensor  # a float, or a tensor of one number per sample or parameter
Pair = tuple[Number, Number]


class IntervalRule(Protocol):
    """How a value, its sampling error and its bracket become an interval."""

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """Lower and upper end at the given level."""


@dataclass(frozen=True)
class Exact:
    """No sampling error: the bracket is the interval (and the value, where there is no bracket)."""

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """The bracket."""
        return bracket


@dataclass(frozen=True)
class StudentT:
    """bracket -/+ t stderr, with `dof` degrees of freedom: right for means of K samples that are hardly skewed."""

    dof: float

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """Lower end of the bracket less t standard errors, upper end plus as many."""
        from scipy.stats import t

        width = (
            stderr * float(t.ppf(0.5 + level / 2, self.dof)) if self.dof > 0 else math.inf
        )  # one probe has no spread
        return bracket[0] - width, bracket[1] + width


@dataclass(frozen=True)
class ChiSquare:
    """Scaled chi-square with matched degrees of freedom: for a quadratic form of a positive matrix, K probes.

    v'Av summed over K normal probes has mean K Tr A and variance 2 K Tr A^2, as c chi^2(nu) has for
    nu = K (Tr A)^2 / Tr A^2 (Satterthwaite 1946). It covers where a few large eigenvalues make the mean skewed.
    `offset` is the part that takes no share in the sampling; above the value, where the form is skewed to the left.
    """

    dof: Number
    offset: Number = 0.0

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """offset + nu (value - offset) / chi^2 quantiles."""
        low, high = (self.dof / self._quantile(q) for q in (0.5 + level / 2, 0.5 - level / 2))
        ends = self.offset + (bracket[0] - self.offset) * low, self.offset + (bracket[1] - self.offset) * high
        if isinstance(ends[0], Tensor) or ends[0] <= ends[1]:
            return ends
        return ends[1], ends[0]  # skewed to the left

    def _quantile(self, q: float) -> Number:
        from scipy.stats import chi2

        if isinstance(self.dof, Tensor):
            return torch.as_tensor(chi2.ppf(q, self.dof.double().cpu().numpy())).to(self.dof)
        return float(chi2.ppf(q, self.dof))


@dataclass(frozen=True)
class MatchedT:
    """bracket -/+ t times a standard error of its own: for a variance that is known better than the spread tells it.

    The square of `stderr` varies as chi^2 with `dof` degrees of freedom does. Of few probes the spread has few degrees;
    moments of the matrix, which the same probes give, have more where many of its eigenvalues matter.
    """

    dof: Number
    stderr: Number

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """Lower end of the bracket less t of the rule's standard errors, upper end plus as many."""
        from scipy.special import stdtrit

        if not isinstance(self.dof, Tensor):
            return StudentT(self.dof).interval(value, self.stderr, bracket, level)
        width = self.stderr * torch.as_tensor(stdtrit(self.dof.numpy(), 0.5 + level / 2))
        return bracket[0] - width, bracket[1] + width


@dataclass(frozen=True)
class CountedChiSquare:
    """An offset and `seen` units of a chi-square, whose degrees of freedom nu are what is asked for.

    It is for a mean of K forms v'Av of a matrix with few large eigenvalues, all about c: that is c / K times a
    chi-square with K of them for each. The unit is known then, as a ratio of moments in which the luck of the probes
    cancels, and how many there are is not. The interval has all nu of which `seen` is neither too much nor too little,

        miss / 2  <=  P[chi^2(nu) <= seen]  <=  1 - miss / 2,        nu >= least

    and moves the value by unit (nu - seen). For many eigenvalues it is the normal one, of variance 2 unit^2 seen.

    Attributes:
        unit: c / K, with the sign of the eigenvalues.
        seen: How many units are in the value.
        least: The fewest degrees of freedom there can be: those of one eigenvalue, K.

    Example:
        >>> rule = CountedChiSquare(unit=0.5, seen=2.0, least=2.0)  # of one eigenvalue of 1, by two probes
        >>> [round(end, 2) for end in rule.interval(1.0, 0.0, (1.0, 1.0), 0.95)]
        [1.0, 3.82]
    """

    unit: Number
    seen: Number
    least: float

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """From the fewest degrees of freedom to the most."""
        ends = [self.unit * (self._degrees(q) - self.seen) for q in (0.5 + level / 2, 0.5 - level / 2)]
        return bracket[0] + _lower(*ends), bracket[1] - _lower(-ends[0], -ends[1])

    def _degrees(self, q: float) -> Number:
        """nu with P[chi^2(nu) <= seen] = q, by bisection; `least` where that is smaller."""
        import numpy as np
        from scipy.special import chdtr

        seen = np.asarray(self.seen, dtype=np.float64)
        few = np.full_like(seen, self.least)
        many = np.maximum(few, seen) + 10.0 * np.sqrt(2 * seen) + 40.0
        while (short := chdtr(many, seen) > q).any():
            many = np.where(short, 2 * many, many)
        fewest = chdtr(few, seen) <= q
        for _ in range(60):
            middle = (few + many) / 2
            short = chdtr(middle, seen) > q
            few, many = np.where(short, middle, few), np.where(short, many, middle)
        found = np.where(fewest, self.least, many)
        return torch.as_tensor(found) if isinstance(self.seen, Tensor) else float(found)


def _lower(a: Number, b: Number) -> Number:
    """The smaller of two numbers, or of each two of two tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.minimum(a, b)
    return min(float(a), float(b))


@dataclass(frozen=True)
class Hull:
    """The smallest interval that holds those of several rules, for what no one of them is honest about alone."""

    rules: tuple[IntervalRule, ...]

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """From the lowest end to the highest."""
        (low, high), *others = [rule.interval(value, stderr, bracket, level) for rule in self.rules]
        for lower, upper in others:
            low, high = _lower(low, lower), -_lower(-high, -upper)
        return low, high


@dataclass(frozen=True)
class Affine:
    """The interval of scale x + offset, from the rule of x."""

    rule: IntervalRule
    scale: float
    offset: float = 0.0

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """Back to x, its interval, and forth again."""
        own = [(end - self.offset) / self.scale for end in bracket]
        own = own if self.scale > 0 else own[::-1]
        back = (value - self.offset) / self.scale
        low, high = self.rule.interval(back, stderr / abs(self.scale), (own[0], own[1]), level)
        ends = self.scale * low + self.offset, self.scale * high + self.offset
        return ends if self.scale > 0 else ends[::-1]


@dataclass(frozen=True)
class Reciprocal:
    """The interval of scale / x for positive x and scale, from the rule of x; without an end where x may be 0.

    Example:
        >>> low, high = Reciprocal(Exact(), 2.0).interval(0.5, 0.0, (0.4, 0.5), 0.95)
        >>> round(low, 6), round(high, 6)
        (0.4, 0.5)
    """

    rule: IntervalRule
    scale: float = 1.0

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """Back to x, its interval, and forth again; the standard error by the delta method."""
        own = self.over(bracket[1]), self.over(bracket[0])
        slope = self.over(value) ** 2 / self.scale
        low, high = self.rule.interval(self.over(value), float(stderr) * slope if stderr else 0.0, own, level)
        return self.over(high), self.over(low)

    def over(self, x: Number) -> float:
        """scale / x, either way; infinite from 0 down."""
        return self.scale / float(x) if float(x) > 0 else math.inf


@dataclass(frozen=True)
class Binomial:
    """A share of `trials` of which `hits` came up, at least as often within as it says (Clopper and Pearson 1934).

    Example:
        >>> low, high = Binomial(0, 10).interval(0.0, 0.0, (0.0, 0.0), 0.95)
        >>> low, round(high, 4)  # 1 - 0.025^(1 / 10)
        (0.0, 0.3085)
    """

    hits: int
    trials: int

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """Quantiles of beta distributions."""
        from scipy.stats import beta

        miss = (1 - level) / 2
        low = float(beta.ppf(miss, self.hits, self.trials - self.hits + 1)) if self.hits else 0.0
        high = float(beta.ppf(1 - miss, self.hits + 1, self.trials - self.hits)) if self.hits < self.trials else 1.0
        return low, high


@dataclass(frozen=True)
class PairedShares:
    """The difference of two shares of the same `trials`: `more` came up the second time only, `fewer` the first only.

    All d that the score test does not refuse (Tango 1998), corrected as McNemar's test is for counts being whole:

        |more - fewer - n d| - 1  <=  z sqrt(n (2 q + d (1 - d)))

    for q the likeliest probability of `fewer` given d. Trials that came up alike both times leave it a width: that of a
    mean of differences is 0 where no trial differs, and where all differ alike.

    Example:
        >>> [round(end, 3) for end in PairedShares(0, 0, 20).interval(0.0, 0.0, (0.0, 0.0), 0.95)]
        [-0.236, 0.236]
        >>> [round(end, 3) for end in PairedShares(2, 0, 2).interval(1.0, 0.0, (1.0, 1.0), 0.95)]
        [-0.604, 1.0]
    """

    more: int
    fewer: int
    trials: int

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """By bisection between the difference that was seen and one of all trials."""
        from scipy.stats import norm

        z = float(norm.ppf(0.5 + level / 2))
        low, high = (self._end(side, z) for side in (-1.0, 1.0))
        return low, high

    def _end(self, side: float, z: float) -> float:
        inner, outer = (self.more - self.fewer) / self.trials, side
        if self._fits(outer, z):
            return outer
        for _ in range(60):
            middle = (inner + outer) / 2
            inner, outer = (middle, outer) if self._fits(middle, z) else (inner, middle)
        return outer

    def _fits(self, d: float, z: float) -> bool:
        """Whether the test does not refuse d; q is the larger root of 2 n q^2 + b q + c = 0."""
        n = self.trials
        b, c = (2 * n - self.more + self.fewer) * d - self.more - self.fewer, -self.fewer * d * (1 - d)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = max(n * (2 * q + d * (1 - d)), 0.0)
        return max(abs(self.more - self.fewer - n * d) - 1, 0.0) <= z * math.sqrt(variance)


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Quantiles of the means of resamples, corrected for bias and skewness (BCa; Efron 1987): for a skewed mean.

    Attributes:
        means: Means of the resamples (B,), ascending.
        bias: z_0, where the value itself lies among them, in standard deviations.
        skew: The acceleration, a sixth of the skewness of the mean.
    """

    means: Tensor
    bias: float
    skew: float

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """The two corrected quantiles."""
        from scipy.stats import norm

        ends = []
        for q in (0.5 - level / 2, 0.5 + level / 2):
            z = self.bias + float(norm.ppf(q))
            ends.append(float(norm.cdf(self.bias + z / (1 - self.skew * z))))
        low, high = self.means.quantile(self.means.new_tensor(ends)).tolist()
        return low, high

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bootstrap) and equal(self, other)


def matched_dof(num_probes: int, trace: float, square: float, dim: int) -> float:
    """Degrees of freedom of a mean of `num_probes` forms v'Av, A positive of order `dim`, v uniform on the sphere.

    nu = K (Tr A)^2 / Tr A^2 for normal probes; on the sphere the part along the identity has no variance, which divides
    by 1 - (Tr A)^2 / (n Tr A^2). At least K, since (Tr A)^2 >= Tr A^2; capped where the form hardly varies at all.

    Example:
        >>> matched_dof(8, trace=1.0, square=1.0, dim=1000) // 0.01 / 100  # one eigenvalue: chi^2 with K degrees
        8.0
    """
    ratio = trace / math.sqrt(max(square, 1e-300))
    ratio *= ratio  # infinite where a power would raise
    return num_probes * min(max(ratio / max(1 - ratio / dim, 1e-6), 1.0), 1e9)


@dataclass(frozen=True)
class RandomStart:
    """One-sided bound on an extreme eigenvalue from m Lanczos steps on K random starts.

    P[lambda_1 - theta > eps (lambda_1 - lambda_n)] <= 1.648 sqrt(n) exp(-(2m - 1) sqrt(eps)) for a start uniform on
    the sphere (Kuczynski and Wozniakowski 1992, theorem 4.2), to the power K for K independent starts. With pairs
    locked the starts run in what is left, and no eigenvalue lies further out than the further of `locked` and that
    bound, plus `slack`, the coupling between the two (Weyl). The other end is the Ritz value, which never overshoots.
    As many steps as there are dimensions reach all that there is.

    A few steps do not get that far, but powers of the matrix are bounded by one block Q of the starts, if they are
    orthonormal: |A|^j <= |A^j Q| / |Q'u|, where |Q'u|^2 of the eigenvector u is Beta(K / 2, (n - K) / 2).
    """

    dim: int
    num_steps: int
    num_probes: int
    spread: float  # largest less smallest Ritz value of the random starts
    reach: float  # the most extreme of them, on the side that is bounded
    locked: float  # the most extreme locked Ritz value on that side
    slack: float
    largest: bool  # bound the largest eigenvalue (else the smallest)
    power: int = 1  # j
    powered: float = math.inf  # |A^j Q|_F^(1/j); infinite if it is not known

    def bound(self, level: float) -> float:
        """What the eigenvalue exceeds with probability at most 1 - level."""
        log_odds = math.log(1.648 * math.sqrt(self.dim)) - math.log(1 - level) / self.num_probes
        eps = (log_odds / (2 * self.num_steps - 1)) ** 2 if self.num_steps < self.dim else 0.0
        if eps >= 0.5 and (self.spread or self.num_steps == 1):  # too few steps for the theorem
            return self._by_powers(level) if self.largest else -self._by_powers(level)
        over = self.spread * eps / (1 - 2 * eps) if self.spread else 0.0
        if self.largest:
            return max(self.locked, self.reach + over) + self.slack
        return min(self.locked, self.reach - over) - self.slack

    def _by_powers(self, level: float) -> float:
        """What |A| exceeds with probability at most 1 - level."""
        from scipy.stats import beta

        if not math.isfinite(self.powered):
            return math.inf
        least = float(beta.ppf(1 - level, self.num_probes / 2, (self.dim - self.num_probes) / 2))  # of |Q'u|^2
        return self.powered * least ** (-0.5 / self.power) if least else math.inf

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """From the Ritz value to the bound."""
        if self.largest:
            return bracket[0], max(float(bracket[1]), self.bound(level))
        return min(float(bracket[0]), self.bound(level)), bracket[1]


@dataclass(frozen=True)
class Magnitude:
    """The larger in size of the bounds at both ends of a spectrum."""

    low: RandomStart
    high: RandomStart

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """From the largest |Ritz value| to the further of the two bounds."""
        return bracket[0], max(float(bracket[1]), self.high.bound(level), -self.low.bound(level))
