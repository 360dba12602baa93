"""How well a law of noise fits a measured spectrum, in numbers that can reject the law.

The scale of a law can always be fitted. The evidence lies in the rest: the largest distance between the distribution
functions, the skewness and the kurtosis, and how much of Tr X^2 lies outside of the law's bulk.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..intervals import StudentT
from ..results import Estimate, affine, derived, new_axes
from ..storage import Result
from .edges import bulk_edge
from .laws import Law, MarchenkoPastur, Semicircle
from .measured import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..estimators.quantities import Spectrum

_LEVELS = 24  # distribution functions are compared at this many quantiles of the law, and of the spectrum
_ROUND_OFF = 1e-12  # of a share on which all probes agree


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LawFit(Result):
    """A law with the scale of a measured spectrum, and how far the spectrum is from it.

    Attributes:
        law: The law with the fitted scale.
        variance: That scale: s2 of a `Semicircle`, v of a `MarchenkoPastur`.
        edge: Upper end of the law's bulk.
        distance: Largest distance between the distribution functions (Kolmogorov), between 0 and 1. Independent noise
            of order P, with P some hundreds, has about 3 / P.
        skewness: Third central moment over variance^(3/2); 0 for a semicircle.
        kurtosis: Fourth central moment over variance^2; 2 for a semicircle, about P / k if k directions hold all noise.
        outside: Share of Tr X^2 from eigenvalues outside of the law's bulk; 0 for the law itself.
        nodes, weights: The measured spectrum.

    Example:
        >>> fit = ritz.rmt.fit(torch.linalg.eigvalsh(ritz.rmt.wigner(300, s2=2.0)))
        >>> f"{fit.law.s2:.1f} {fit.kurtosis.value:.1f} {fit.distance.value:.2f}"
        '2.0 2.0 0.01'
    """

    law: Law
    variance: Estimate
    edge: Estimate
    distance: Estimate
    skewness: Estimate
    kurtosis: Estimate
    outside: Estimate
    nodes: Tensor
    weights: Tensor

    def expected(self) -> dict[str, float]:
        """Skewness and kurtosis of the law itself."""
        ratio = self.law.ratio if isinstance(self.law, MarchenkoPastur) else 0.0  # the semicircle is the limit r = 0
        return {"skewness": math.sqrt(ratio), "kurtosis": 2 + ratio}

    def plot(self, ax: "Axes | None" = None, *, bins: int = 60) -> "Axes":
        """The spectrum as a histogram on a logarithmic scale, the law as a curve."""
        ax = ax or new_axes()
        low, high = self.law.edges
        low, high = min(low, float(self.nodes[0])), max(high, float(self.nodes[-1]))
        ax.hist(
            self.nodes, bins=bins, range=(low, high), weights=self.weights, density=True, alpha=0.5, label="eigenvalues"
        )
        grid = torch.linspace(*self.law.edges, 400, dtype=torch.float64)[1:-1]
        ax.plot(grid, self.law.density(grid), label=type(self.law).__name__)
        ax.set(yscale="log", xlabel="eigenvalue", ylabel="density")
        ax.legend()
        return ax

    def __str__(self) -> str:
        lines = [f"{self.law}", *map(str, (self.edge, self.distance, self.skewness, self.kurtosis, self.outside))]
        return "\n".join(lines)

    __repr__ = __str__


def fit(
    source: "Spectrum | Tensor",
    weights: Tensor | None = None,
    *,
    law: Literal["semicircle", "marchenko-pastur"] = "semicircle",
    ratio: float | None = None,
    by: Literal["moments", "median"] = "moments",
) -> LawFit:
    """Fits the scale of the semicircle, or of the law of Marchenko and Pastur, to a spectrum, and tests the fit.

    By moments, the scale is s2 = Tr X^2 / P, or v = Tr S / P, as in the theory of seed 004; a few outliers can decide
    it. By the median, the bulk decides it (as in Gavish and Donoho 2014): the median of |x| for a semicircle, and for
    the other law the median of all eigenvalues except those that are 0 because of the rank. The two agree for noise
    that follows the law.

    Args:
        source: `ritz.spectrum(ritz.operators.BatchNoise(H, index))`, all eigenvalues of a matrix, or nodes. The
            distance of a run has a bracket: m steps determine the distribution function only up to known bounds.
        weights: Weights of the nodes; equal if not given.
        law: "semicircle" for symmetric noise of mean 0; "marchenko-pastur" for an average of outer products.
        ratio: For "marchenko-pastur": order of the matrix over the number of outer products, P / n.
        by: Whether the scale is fitted to the moments or to the median.

    Raises:
        ValueError: If no scale can be fitted, or `ratio` is missing.

    Example:
        >>> S = torch.linalg.eigvalsh(ritz.rmt.wishart(200, 400))
        >>> f"{ritz.rmt.fit(S, law='marchenko-pastur', ratio=0.5).distance.value:.2f}"
        '0.01'
        >>> f"{ritz.rmt.fit(S - 1).skewness.value:.1f}"  # noise of an average of 400 is no semicircle: sqrt(0.5)
        '0.7'
    """
    _check(law, ratio, by)
    measured = Measured.of(source, weights)
    _check_spread(measured)
    unit = Semicircle(1.0) if ratio is None else MarchenkoPastur(ratio)
    variance = measured.moment(2 if ratio is None else 1) if by == "moments" else _by_median(measured, unit)
    if not float(variance.value) > 0:
        raise ValueError(
            f"the scale of a {law} law must be positive, this spectrum gives {float(variance.value):.3g}"
            + ("; half of it lies at 0: take by='moments'" if by == "median" else "")
        )
    value = float(variance.value)
    fitted = Semicircle(value) if ratio is None else MarchenkoPastur(ratio, value)
    edge = bulk_edge(variance) if ratio is None else affine(variance, unit.edges[1], name="bulk edge", parts={})
    raw = measured.standardised(4)
    return LawFit(
        law=fitted,
        variance=variance,
        edge=edge,
        distance=_distance(measured, fitted),
        skewness=derived("skewness", _skewness, *raw[:3], **_about(raw[0], "third central moment over variance^1.5")),
        kurtosis=derived("kurtosis", _kurtosis, *raw, **_about(raw[0], "fourth central moment over variance^2")),
        outside=_outside(measured, fitted),
        nodes=measured.nodes,
        weights=measured.weights,
    )


def _check(law: str, ratio: float | None, by: str) -> None:
    """Refuse unknown or contradictory options."""
    if law not in ("semicircle", "marchenko-pastur"):
        raise ValueError(f"law must be 'semicircle' or 'marchenko-pastur', got {law!r}")
    if by not in ("moments", "median"):
        raise ValueError(f"by must be 'moments' or 'median', got {by!r}")
    if (law == "marchenko-pastur") != (ratio is not None):
        raise ValueError(
            f"law='marchenko-pastur' needs ratio = P / n, and no other law has it, got law={law!r} and ratio={ratio}"
        )


def _check_spread(measured: Measured) -> None:
    """Refuse a spectrum of equal eigenvalues, and a run that is too short for a fourth moment."""
    low, high = float(measured.nodes[0]), float(measured.nodes[-1])
    if not high - low > 1e-12 * max(abs(low), abs(high)):
        raise ValueError(f"all eigenvalues are {high:.4g}: a law needs eigenvalues that differ")
    if measured.spectrum is not None and measured.spectrum.num_steps < 3:
        raise ValueError(
            f"the kurtosis needs at least 3 Lanczos steps, this spectrum has {measured.spectrum.num_steps}: "
            "give ritz.spectrum a larger num_steps"
        )


def _by_median(measured: Measured, unit: Law) -> Estimate:
    """The scale at which the medians agree; for a run, the bracket follows from its bounds on the median."""
    folded = isinstance(unit, Semicircle)
    power = 2 if folded else 1
    middle = (1 + unit.zeros) / 2  # half of the eigenvalues that are not 0 because of the rank
    known = float(unit.quantile(0.75 if folded else middle))
    levels = (measured.nodes.abs() if folded else measured.nodes.clamp(min=0.0)).unique().tolist()
    least = 1e-12 * levels[-1]  # -x counts as within x

    def share(level: float, bound: int) -> tuple[float, float]:
        """Share of eigenvalues up to a level: (lower bound, value, upper bound)[bound], and its standard error."""
        both = measured.cdf(torch.tensor([level, -level - least], dtype=torch.float64))
        found, error = float(both[bound][0]), float(both[3][0])
        return (found - float(both[2 - bound][1]), error + float(both[3][1])) if folded else (found, error)

    def crossing(bound: int) -> tuple[float, float]:
        """The last level that does not reach the middle, and the first that does."""
        low, high = 0, len(levels) - 1
        while low < high:
            mid = (low + high) // 2
            low, high = (low, mid) if share(levels[mid], bound)[0] >= middle * (1 - 1e-12) else (mid + 1, high)
        return levels[low - 1] if low else 0.0, levels[low]

    text = f"from the median of {'|x|' if folded else 'the eigenvalues'}"
    before, median = crossing(1)
    if measured.spectrum is None:
        return Estimate(name="variance", value=(median / known) ** power, exact=True, convention=text)
    (under, _), (over, error) = share(before, 1), share(median, 1)
    median = before + (median - before) * (middle - under) / (over - under) if over > under else median
    ends = min(crossing(2)[0], median), median, max(crossing(0)[1], median)
    low, value, high = ((x / known) ** power for x in ends)
    slope = float(unit.density(known)) * known * power  # d share / d log median
    return Estimate(
        name="variance", value=value, stderr=value * power * error / slope, bracket=(low, high),
        rule=StudentT(measured.spectrum.num_probes - 1), support=(0.0, math.inf), convention=text,
    )  # fmt: skip


def _distance(measured: Measured, law: Law) -> Estimate:
    """sup |F - F_law|; for a run, the bracket is the smallest and the largest value that its bounds on F allow."""
    text = "sup |F - F_law|"
    run = measured.spectrum
    if run is None:  # F jumps at the nodes, so both sides of each node count
        nodes = torch.where(measured.nodes.abs() <= _gap(law), 0.0, measured.nodes)
        sums = torch.cat([measured.weights.new_zeros(1), measured.weights.cumsum(0)])
        before, upto = (sums[torch.searchsorted(nodes, nodes, right=right)] for right in (False, True))
        truth = law.cdf(nodes)
        apart = torch.maximum((before - truth + law.zeros * (nodes == 0)).abs(), (upto - truth).abs())
        return Estimate(name="distance", value=float(apart.max()), exact=True, convention=text)
    levels = _levels(measured, law)
    low, value, high, stderr = measured.cdf(levels)
    truth = law.cdf(levels)
    forced = torch.maximum(low - truth, truth - high).clamp(min=0.0)
    allowed = torch.maximum(high - truth, truth - low)
    apart = (value - truth).abs()
    error = float(stderr[int(apart.argmax())])
    return Estimate(
        name="distance", value=float(apart.max()), stderr=0.0 if error < _ROUND_OFF else error,
        bracket=(float(forced.max()), float(allowed.max())), rule=StudentT(run.num_probes - 1), support=(0.0, 1.0),
        products=run.products, seed=run.seed, stop=run.stop, convention=text,
    )  # fmt: skip


def _levels(measured: Measured, law: Law) -> Tensor:
    """Where distribution functions are compared: at quantiles of both, and on both sides of the zeros of the law."""
    shares = (torch.arange(_LEVELS, dtype=torch.float64) + 0.5) / _LEVELS
    place = torch.searchsorted(measured.weights.cumsum(0), shares).clamp(max=len(measured.nodes) - 1)
    levels = torch.cat([law.quantile(shares), measured.nodes[place]])
    gap = _gap(law)
    return torch.cat([levels[levels.abs() > gap], shares.new_tensor([-gap, gap])]) if gap else levels


def _gap(law: Law) -> float:
    """Half way from the zeros of the law to its bulk; smaller eigenvalues are zeros up to round-off."""
    return law.edges[0] / 2 if law.zeros else 0.0


def _outside(measured: Measured, law: Law) -> Estimate:
    """The share of Tr X^2 beyond the edges."""
    low, high = law.edges

    def beyond(x: Tensor) -> Tensor:
        return torch.where((x < low) | (x > high), x.square(), 0.0)

    text = f"share of Tr X^2 from eigenvalues beyond {low:.4g} and {high:.4g}"
    parts = measured.mean(beyond, "beyond"), measured.mean(torch.square, "all")
    return derived("outside", lambda part, whole: part / whole, *parts, **_about(parts[0], text))


def _about(estimate: Estimate, text: str) -> dict[str, Any]:
    return {"convention": f"{text}; {estimate.convention}" if estimate.convention else text}


def _skewness(m1: float, m2: float, m3: float) -> float:
    """From moments about 0."""
    return (m3 - 3 * m1 * m2 + 2 * m1**3) / math.pow(m2 - m1**2, 1.5)


def _kurtosis(m1: float, m2: float, m3: float, m4: float) -> float:
    """From moments about 0."""
    return (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / (m2 - m1**2) ** 2
