"""Differences of estimates, paired if they share probes or items, and how certain their order is."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..intervals import (
    Affine,
    Binomial,
    Bootstrap,
    Exact,
    Hull,
    IntervalRule,
    MatchedT,
    Number,
    Pair,
    PairedShares,
    StudentT,
)
from ..results import Estimate, derived
from .gap import bootstrapped

MISS = 0.05  # how often a verdict may be wrong
# share of the maximum that a search may have missed: of 504 searches of balls around networks of 51 weights, 6 missed
# more of the maximum that far longer searches find (benchmarks/searches.py)
SHORT = 0.2
ROUND_OFF = 1e-6  # values that differ by less than this, relative to their size, are called equal
_RESAMPLED = 2**12  # items; for more, Student t alone covers the mean as often, at no cost
_MISSES = (0.2, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001)  # levels to try for an order if no law gives it


def difference(a: Estimate, b: Estimate) -> Estimate:
    """b - a: probe by probe or item by item if they share them, else from both errors or both intervals.

    Brackets, which probes do not reduce, add up, paired or not. If one matrix has a large eigenvalue that the other has
    not, few probes show too little of it: the standard error is then no less than that of one estimate less that of the
    other, as moments of the matrices tell them, for sd(y - x) >= |sd(y) - sd(x)|. For items, the interval is that of a
    mean: bootstrap and Student t for losses; for mistakes it is that of two shares of the same items, since a few zeros
    and ones have too little spread.

    Example:
        >>> from ritz.results import from_samples
        >>> a, b = (from_samples("trace", torch.tensor(x)) for x in ([1.0, 5.0, 9.0], [2.0, 6.0, 10.1]))
        >>> print(difference(a, b))
        change of trace 1.033 +- 0.033
    """
    about: dict[str, Any] = {"name": f"change of {a.name}", "convention": a.convention}
    value, known = _less(b.value, a.value), a.bracket is None and b.bracket is None
    bracket = None if known else _apart(a, b, _ends)
    if a.exact and b.exact:
        return Estimate(value=value, exact=True, bracket=bracket, **about)
    if _paired(a, b):
        change = derived(about["name"], _less, b, a, convention=a.convention)
        least = abs(_by_moments(a.rule) - _by_moments(b.rule))
        stderr = float(change.stderr) + _unseen(a) + _unseen(b)
        stderr = stderr if math.isnan(least) else max(stderr, least)
        return replace(change, stderr=stderr, bracket=bracket, rule=_paired_rule(a, b, change))
    if known and all(isinstance(e.rule, StudentT | Exact) for e in (a, b)):
        stderr = math.hypot(float(a.stderr), float(b.stderr))
        return Estimate(value=value, stderr=stderr, rule=StudentT(_dof(a, b)), **about)
    return Estimate(value=value, bracket=_apart(a, b, lambda e: e.interval(1 - MISS / 2)), **about)


def _less(x: Number, y: Number) -> float:
    """x - y; 0 if both are the same infinity."""
    return 0.0 if float(x) == float(y) else float(x) - float(y)


def _ends(estimate: Estimate) -> Pair:
    """Its bracket, or its value twice if it has none."""
    return estimate.bracket or (estimate.value, estimate.value)


def _apart(a: Estimate, b: Estimate, ends: Callable[[Estimate], Pair]) -> Pair:
    """The range of b - a if each is anywhere between its ends."""
    (low_a, high_a), (low_b, high_b) = ends(a), ends(b)
    return _less(low_b, high_a), _less(high_b, low_a)


def _unseen(estimate: Estimate) -> float:
    """By how much the error of the ends of a bracket exceeds that of the samples, which belong to one end."""
    samples = estimate.samples
    if estimate.bracket is None or samples is None or len(samples) < 2:
        return 0.0
    return max(float(estimate.stderr) - float(samples.std()) / math.sqrt(len(samples)), 0.0)


def _by_moments(rule: IntervalRule) -> float:
    """The standard error that moments of the matrix tell, NaN where a rule has none."""
    if isinstance(rule, Affine):
        return abs(rule.scale) * _by_moments(rule.rule)
    if isinstance(rule, Hull):
        return max((found for each in rule.rules if (found := _by_moments(each)) >= 0), default=math.nan)
    if isinstance(rule, MatchedT):
        return float(rule.stderr)
    return 0.0 if isinstance(rule, Exact) else math.nan


def as_found(estimate: Estimate) -> Estimate:
    """The result of a search, a lower bound of a maximum, with an upper end for what the search may have missed.

    A search cannot know what it missed. It is assumed to miss at most a fifth of the maximum; this held in 498 of 504
    searches, and the worst of the others found 19 % of it (benchmarks/searches.py). A mean over batches of one step
    each misses nothing, because that step is its definition.

    Example:
        >>> as_found(Estimate(name="worst case", value=2.0, bracket=(2.0, math.inf))).interval()
        (2.0, 2.5)
    """
    if estimate.bracket is None or not math.isinf(float(estimate.bracket[1])):
        return estimate
    if estimate.samples is not None:
        return replace(estimate, bracket=None, rule=StudentT(len(estimate.samples) - 1))
    value = float(estimate.value)
    missed = SHORT / (1 - SHORT) * abs(value)
    return replace(estimate, bracket=(value, value + missed), rule=Exact(), exact=True)


def _paired(a: Estimate, b: Estimate) -> bool:
    """Whether sample k of both came from the same probe or item."""
    if a.exact or b.exact:
        return (a.samples if b.exact else b.samples) is not None
    return a.samples is not None and b.samples is not None and len(a.samples) == len(b.samples) and a.seed == b.seed


def _paired_rule(a: Estimate, b: Estimate, change: Estimate) -> IntervalRule:
    """The rule that turns the mean of the differences into an interval."""
    own, other = _innermost(a.rule), _innermost(b.rule)
    if isinstance(own, Binomial) and isinstance(other, Binomial):
        assert a.samples is not None and b.samples is not None
        moved = [float(e.value) - share.hits / share.trials for e, share in ((a, own), (b, other))]  # of a gap
        apart = (b.samples - moved[1] - (a.samples - moved[0])).round()
        rule = PairedShares(int((apart > 0).sum()), int((apart < 0).sum()), len(apart))
        return Affine(rule, 1.0, moved[1] - moved[0])
    samples = change.samples
    if any(map(_of_items, (own, other))) and samples is not None and len(samples) <= _RESAMPLED:
        return bootstrapped(change.name, samples).rule
    return change.rule


def _of_items(rule: IntervalRule) -> bool:
    """Whether it is that of a mean of losses; a bootstrap of a few probes says less than Student t."""
    return isinstance(rule, Hull) and any(isinstance(each, Bootstrap) for each in rule.rules)


def _innermost(rule: IntervalRule) -> IntervalRule:
    while isinstance(rule, Affine):
        rule = rule.rule
    return rule


def _dof(a: Estimate, b: Estimate) -> float:
    """The smaller of the two degrees of freedom."""
    dofs = [e.rule.dof for e in (a, b) if not e.exact and isinstance(e.rule, StudentT)]
    return min(dofs, default=math.inf)


def probability(a: Estimate, b: Estimate) -> float:
    """The probability, by the error bars, that the true values are in the order of the estimates: 0.5 to 1.

    It is by Student's t from the distance of the paired difference and its bracket from 0. With another rule it is the
    highest level at which the interval of the paired difference excludes 0, or at which two intervals do not overlap.
    Values that differ by round-off give 0.5.

    Example:
        >>> a, b = (Estimate(name="x", value=value, exact=True) for value in (1.0, 2.0))
        >>> probability(a, b), probability(a, a)
        (1.0, 0.5)
    """
    from scipy.stats import t

    if same(a, b):
        return 0.5
    change = difference(a, b)
    low, high = (float(end) for end in _ends(change))
    clear = max(low, -high)  # distance from 0
    if change.exact:
        return 1.0 if clear > 0 else 0.5
    if isinstance(change.rule, StudentT):
        stderr, dof = float(change.stderr), change.rule.dof
        if not clear > 0 or not dof > 0 or math.isnan(stderr):
            return 0.5
        return float(t.cdf(clear / stderr, dof)) if stderr else 1.0
    if change.samples is not None:
        return max((1 - miss / 2 for miss in _MISSES if direction(change, 1 - miss)), default=0.5)
    below, above = (a, b) if float(a.value) <= float(b.value) else (b, a)
    found = 0.5
    for miss in _MISSES:  # of each interval: together at most twice that
        if float(below.interval(1 - miss)[1]) < float(above.interval(1 - miss)[0]):
            found = max(found, 1 - 2 * miss)
    return found


def same(a: Estimate, b: Estimate) -> bool:
    """Whether two values differ by no more than round-off.

    Example:
        >>> a, b = (Estimate(name="x", value=value) for value in (1.0, 1.0 + 1e-9))
        >>> same(a, b)
        True
    """
    x, y = float(a.value), float(b.value)
    return x == y or abs(x - y) <= ROUND_OFF * max(abs(x), abs(y)) < math.inf


def direction(change: Estimate, level: float = 1 - MISS) -> int:
    """1 for up, -1 for down, 0 if the interval of the change at this level contains 0.

    Example:
        >>> [direction(Estimate(name="change", value=x, stderr=1.0, rule=StudentT(100))) for x in (-3.0, 1.0, 3.0)]
        [-1, 0, 1]
    """
    low, high = (float(end) for end in change.interval(level))
    return (low > 0) - (high < 0)
