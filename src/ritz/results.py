"""Estimates: numbers with their error, their cost and their convention.

An `Estimate` keeps two kinds of error apart. `stderr` is sampling error: other probes would have given another value.
`bracket` is an error that all probes have in common and their spread cannot show: that of a quadrature rule that was
stopped early, or of a Ritz value that has not converged. `interval` combines both by a rule that covers this quantity.
"""

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .intervals import Affine, Exact, IntervalRule, Number, Pair, StudentT
from .storage import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WRAPPED = 64  # characters of a convention in a line above a figure
_HIDDEN = 100  # standard errors in an interval that is wide for another reason


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimate(Result):
    """A number with its error bar, its cost and its convention.

    Attributes:
        name: The name of the quantity.
        value: The number, or a tensor with one number per sample or parameter.
        stderr: Sampling error of `value`, one standard error; 0 if nothing was averaged (exact and Ritz values), NaN
            if it cannot be estimated from one probe.
        bracket: (lower, upper) bounds of the quadrature or residual error; None if there is no error beyond round-off.
        samples: The result of each probe, (num_probes,); `value` is their mean to the power `power`.
        power: 0.5 for a norm that is the root of an averaged square, otherwise 1.
        exact: Whether no sampling was done.
        products: Number of matrix-vector products used.
        seed: Seed of the probes.
        stop: Why the run ended.
        convention: Which matrix, divided by what, in which mode.
        rule: How `interval` is computed.
        support: The range of possible values; the interval is clipped to it.
        parts: Additional results at no extra cost: per-layer values, or the other moments of one run.

    Example:
        >>> e = Estimate(name="trace", value=3.0, stderr=0.1, rule=StudentT(7))
        >>> print(e)
        trace 3.00 +- 0.10
        >>> low, high = e.interval(0.95)
        >>> round(low, 3), round(high, 3)
        (2.764, 3.236)
    """

    name: str
    value: Number
    stderr: Number = 0.0
    bracket: Pair | None = None
    samples: Tensor | None = None
    power: float = 1.0
    exact: bool = False
    products: int = 0
    seed: int | None = None
    stop: str = "completed"
    convention: str = ""
    rule: IntervalRule = field(default_factory=Exact)
    support: tuple[float, float] = (-math.inf, math.inf)
    parts: Mapping[str, "Estimate"] = field(default_factory=dict)

    def interval(self, level: float = 0.95) -> Pair:
        """(lower, upper) that covers the true value with probability `level`, including sampling and depth error."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        if self.power == 1.0:
            low, high = self.rule.interval(self.value, self.stderr, self.bracket or (self.value, self.value), level)
            return _clip(low, self.support), _clip(high, self.support)
        # the rule is for the mean before the root; the delta method, inverted, gives its standard error
        mean, *bracket = (
            float(x) ** (1 / self.power) for x in (self.value, *(self.bracket or (self.value, self.value)))
        )
        stderr = float(self.stderr) * mean / (self.power * float(self.value)) if self.value else 0.0
        low, high = self.rule.interval(mean, stderr, (bracket[0], bracket[1]), level)
        low, high = (max(float(end), 0.0) ** self.power for end in (low, high))
        return _clip(low, self.support), _clip(high, self.support)

    @property
    def many(self) -> bool:
        """Whether the value consists of several numbers, such as one for each sample."""
        return isinstance(self.value, Tensor) and self.value.numel() != 1

    def __float__(self) -> float:
        return float(self.value)

    def shown(self) -> str:
        """Value and error as in a table, `3.14 ± 0.02`; for several values, their number and range.

        If nothing was averaged, the width of the interval determines the number of digits.
        """
        if self.many:
            values = torch.as_tensor(self.value)
            lie = f", {float(values.min()):.4g} to {float(values.max()):.4g}" if values.numel() else ""
            return f"{values.numel()} values{lie}"
        return self._digits().replace("+-", "±")

    def _digits(self) -> str:
        """The value, to the digits that its larger error leaves: the sampling error or the bracket."""
        value, stderr = float(self.value), float(self.stderr)
        low, high = (float(end) for end in self.interval())
        digits = told_apart(low, high)
        if not stderr:
            return to_digits(value, digits) if low < high else f"{value:.{digits}g}"
        if _HIDDEN * stderr < high - low < math.inf:
            return f"{to_digits(value, digits)} +- {stderr:.1e}"
        return show(value, stderr)

    def __str__(self) -> str:
        if isinstance(self.value, Tensor) and self.many:
            how = "exact" if self.exact else f"median stderr {torch.as_tensor(self.stderr).median():.2g}"
            return f"{self.name} {tuple(self.value.shape)}, mean {self.value.mean():.4g}, {how}"
        value, stderr = float(self.value), float(self.stderr)
        if self._unseen() <= stderr:
            return f"{self.name} {show(value, stderr)}"
        low, high = (float(end) for end in self.interval())
        ends = (to_digits(end, told_apart(low, high)) for end in (low, high))
        return f"{self.name} {self._digits()} (95 %: {' to '.join(ends)})"

    def _unseen(self) -> float:
        """The width of the bracket of a single number; 0 if there is none."""
        low, high = (torch.as_tensor(end) for end in self.bracket or (0.0, 0.0))
        return float(high - low) if low.numel() == high.numel() == 1 else 0.0

    __repr__ = __str__  # parts and samples would fill a screen

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The value with its 95 % interval; for several values, a histogram of the finite ones."""
        ax = ax or new_axes()
        if isinstance(self.value, Tensor) and self.many:
            values = self.value.flatten().double().cpu()
            finite = values[values.isfinite()]
            ax.hist(finite.numpy(), bins=50)
            left = f", {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
            ax.set(xlabel=f"{self.name}{left}", ylabel="count")
            return ax
        value = float(self.value)
        low, high = (float(end) for end in self.interval())
        down, up = reach(self)
        ax.errorbar([self.name], [value], yerr=[[down], [up]], fmt="o", capsize=4)
        for end, edge in ((low, 0.0), (high, 1.0)):
            if math.isinf(end) and math.isfinite(value):  # on that side nothing is known
                ax.plot([self.name] * 2, [0.5, edge], ":", color="0.5", transform=ax.get_xaxis_transform(), zorder=0)
        if not math.isfinite(value):
            ax.text(0.5, 0.5, f"{value}", transform=ax.transAxes, ha="center", va="center")
        ax.ticklabel_format(axis="y", useOffset=False)
        entitle(ax, self.convention)
        return ax


def _clip(end: Number, support: tuple[float, float]) -> Number:
    """An end of an interval, clipped to the range of possible values."""
    return end.clamp(*support) if isinstance(end, Tensor) else min(max(float(end), support[0]), support[1])


def from_samples(
    name: str, samples: Tensor, *, offset: float = 0.0, power: float = 1.0, spread: float = 1.0, **fields: Any
) -> Estimate:
    """The mean of per-probe samples (K,) plus an exactly known `offset`, with a Student t interval.

    `spread` widens the standard error of samples that are known not to be independent.

    Example:
        >>> e = from_samples("trace", torch.tensor([1.0, 3.0], dtype=torch.float64), offset=10.0)
        >>> e.value, e.stderr
        (12.0, 1.0)
    """
    samples = samples.double() + offset
    num = len(samples)
    mean = float(samples.mean())
    stderr = spread * float(samples.std() / math.sqrt(num)) if num > 1 else math.nan
    if power != 1.0:
        mean = max(mean, 0.0)
        stderr = stderr * power * mean ** (power - 1) if mean else 0.0
        mean = mean**power
    fields = {"rule": StudentT(num - 1), **fields}
    return Estimate(name=name, value=mean, stderr=stderr, samples=samples.cpu(), power=power, **fields)


def affine(estimate: Estimate, scale: float, offset: float = 0.0, **fields: Any) -> Estimate:
    """scale * x + offset for an estimate x, error bars included; `fields` replace those of x, such as the name.

    Example:
        >>> e = affine(from_samples("trace", torch.tensor([1.0, 3.0])), 2.0, 10.0, name="twice and ten")
        >>> print(e)
        twice and ten 14.0 +- 2.0
    """
    if estimate.power != 1.0 or not math.isfinite(scale) or scale == 0:
        raise ValueError(f"expected an estimate of power 1 and a scale that is not 0, got {estimate.power} and {scale}")

    def move(x: Number) -> Number:
        return x * scale + offset

    order = 1 if scale > 0 else -1
    bracket, support = (
        None if ends is None else tuple(map(move, ends[::order])) for ends in (estimate.bracket, estimate.support)
    )
    moves_along = isinstance(estimate.rule, StudentT | Exact)
    moved: dict[str, Any] = {
        "value": move(estimate.value),
        "stderr": estimate.stderr * abs(scale),
        "bracket": bracket,
        "support": support,
        "samples": None if estimate.samples is None else move(estimate.samples),
        "rule": estimate.rule if moves_along else Affine(estimate.rule, scale, offset),
        "parts": {} if offset else {part: affine(e, scale) for part, e in estimate.parts.items()},
    }
    return replace(estimate, **{**moved, **fields})


def derived(name: str, fn: Callable[..., float], *estimates: Estimate, **fields: Any) -> Estimate:
    """A smooth function of estimates that share their probes, with the error of the jackknife.

    With theta_k the function without probe k, the pseudo-values K theta - (K - 1) theta_k take the place of samples
    (Tukey 1958), shifted so that their mean is the value. Exact estimates enter as constants; brackets are ignored.

    Example:
        >>> a, b = (from_samples(name, torch.tensor(x)) for name, x in (("a", [1.0, 3.0]), ("b", [2.0, 6.0])))
        >>> print(derived("ratio", lambda a, b: b / a, a, b))  # they err together
        ratio 2
    """
    values = [float(e.value) for e in estimates]
    sampled = [e for e in estimates if not e.exact]
    first = (sampled or estimates)[0]
    cost = {
        "products": max(e.products for e in estimates), "seed": first.seed, "stop": first.stop, "exact": not sampled
    }  # fmt: skip
    if not sampled:
        return Estimate(name=name, value=float(fn(*values)), **{**cost, **fields})
    num = {0 if e.samples is None else len(e.samples) for e in sampled}
    if len(num) > 1 or num == {0}:
        raise ValueError(f"{name} needs estimates of common probes, got {sorted(num)} samples")
    count = num.pop()
    value = float(fn(*values))
    if count == 1:
        return Estimate(name=name, value=value, stderr=math.nan, rule=StudentT(0), **{**cost, **fields})
    without = [value if e.exact else _leave_one_out(e) for e, value in zip(estimates, values, strict=True)]
    thetas = torch.tensor(
        [float(fn(*(float(w[k]) if isinstance(w, Tensor) else w for w in without))) for k in range(count)],
        dtype=torch.float64,
    )
    pseudo = value + (count - 1) * (thetas.mean() - thetas)
    return from_samples(name, pseudo, **{**cost, **fields})


def _leave_one_out(estimate: Estimate) -> Tensor:
    """The value without each of the samples, (K,)."""
    samples = estimate.samples
    assert samples is not None
    means = (samples.sum() - samples) / (len(samples) - 1)
    return means if estimate.power == 1.0 else means.clamp(min=0.0) ** estimate.power


def show(value: float, stderr: float = 0.0) -> str:
    """A number with the digits that its error allows, at most ten: `3.14 +- 0.02`.

    Example:
        >>> show(1234.567, 8.9), show(0.001234), show(1.5e-7, 2e-9), show(4.27756842837193751, 3.1e-16)
        ('1234.6 +- 8.9', '0.001234', '1.500e-07 +- 2.0e-09', '4.277568428 +- 3.1e-16')
    """
    if not stderr or not math.isfinite(stderr) or not math.isfinite(value):
        return f"{value:.4g}"
    if abs(stderr) < 1e-9 * abs(value):
        return f"{to_digits(value, 10)} +- {stderr:.1e}"
    digits = 1 - math.floor(math.log10(abs(stderr)))
    size = math.floor(math.log10(max(abs(value), stderr)))
    if abs(value) < 1e-3 or max(abs(value), stderr) >= 1e5:
        return f"{value:.{max(digits + size, 0)}e} +- {stderr:.1e}"
    return f"{value:.{max(digits, 0)}f} +- {stderr:.{max(digits, 0)}f}"


def told_apart(low: float, high: float) -> int:
    """The number of digits, 3 to 10, that shows two digits of the difference between the ends of an interval.

    Example:
        >>> told_apart(1.0, 2.0), told_apart(0.112907, 0.112912), told_apart(1.0, 1.0 + 1e-12), told_apart(2.0, 2.0)
        (3, 7, 10, 4)
    """
    size, width = max(abs(low), abs(high)), high - low
    if not math.isfinite(size) or not width > 0:
        return 4
    return min(max(math.ceil(math.log10(size) - math.log10(width)) + 2, 3), 10)


def to_digits(value: float, digits: int) -> str:
    """A number with that many digits, trailing zeros included; powers of ten as in `show`; whole numbers plain.

    Example:
        >>> to_digits(0.9343, 5), to_digits(9.0, 3), to_digits(0.0, 3), to_digits(0.0002, 3)
        ('0.93430', '9', '0', '2.00e-04')
    """
    if not math.isfinite(value) or (value.is_integer() and abs(value) < 1e5):
        return f"{value:.0f}" if value else "0"
    return f"{value:.{digits - 1}e}" if not 1e-3 <= abs(value) < 1e5 else f"{value:#.{digits}g}".rstrip(".")


def reach(estimate: Estimate) -> tuple[float, float]:
    """How far the 95 % interval reaches below and above the value; 0 if it is infinite or the value is not finite.

    Example:
        >>> reach(Estimate(name="logdet", value=1.0, bracket=(-math.inf, 3.0)))
        (0.0, 2.0)
    """
    value = float(estimate.value)
    low, high = (float(end) for end in estimate.interval())
    down, up = (max(x, 0.0) if math.isfinite(x) else 0.0 for x in (value - low, high - value))
    return down, up


def entitle(ax: "Axes", convention: str) -> None:
    """Write a convention above a figure, in as many lines as it needs."""
    ax.set_title("\n".join(textwrap.wrap(convention, _WRAPPED)), fontsize="small")


def new_axes() -> "Axes":
    """Axes of a new figure, or a message about what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'ritz[plot]'") from error
    axes: Axes = Figure(figsize=(6, 4), layout="constrained").subplots()
    return axes
