"""Spikes: the true eigenvalues behind the outliers of a noisy curvature, and how well their directions are known.

For H_batch = H + X, X noise of level s2 = Tr X^2 / P, where H has few large eigenvalues nu (seed 004, equation 6),

    lambda = nu + s2 / nu,    |theta'phi|^2 = 1 - s2 / nu^2        for |nu| > sqrt(s2)

(Benaych-Georges and Nadakuditi 2011; theorem 1 of seed 004). So the largest eigenvalues of a batch are too large.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..intervals import Number, Pair
from ..results import Estimate, affine
from ..storage import equal
from .edges import Noise, cost, degrees, noise_level
from .laws import spike_behind, spike_overlap
from .tracy_widom import tracy_widom_quantile

_SURE = 0.999  # a spike below the interval of the noise level at this probability counts as hidden for certain


def debias(eigenvalue: float | Tensor | Estimate, s2: Noise, dim: int | None = None) -> Estimate:
    """The spike of H behind an outlier of H + X: nu = (lambda + sqrt(lambda^2 - 4 s2)) / 2, with the sign of lambda.

    The standard error, to first order, comes from s2 and, if `dim` is given, from the outlier itself, which varies from
    batch to batch with variance 2 s2 (1 - s2 / nu^2) / P for normal noise (Capitaine, Donati-Martin and Féral 2009). A
    bracket of the eigenvalue is carried over. The interval comes from the ends of the interval of s2, so it widens if
    the outlier may belong to the bulk. For an eigenvalue in the bulk the value is 0, and the bracket is -/+ sqrt(s2),
    the spikes that could hide there. `parts["overlap"]` is 1 - s2 / nu^2, how well the direction is known.

    Args:
        eigenvalue: Eigenvalue of H + X: a number, a tensor of several, or an `Estimate`.
        s2: Tr X^2 / P, a number or the `Estimate` of `ritz.curvature_noise`.
        dim: P, to include the outlier's own variance.

    Example:
        >>> nu = debias(2.5, s2=1.0)
        >>> nu.value, nu.parts["overlap"].value
        (2.0, 0.75)
        >>> print(debias(2.5, s2=1.0, dim=600))  # sqrt(2 / 600 / 0.75)
        spike 2.000 +- 0.067
    """
    noise = noise_level(s2)
    if not isinstance(eigenvalue, Estimate):
        eigenvalue = Estimate(name="eigenvalue", value=eigenvalue, exact=True)
    level, given = float(noise.value), eigenvalue.value
    x, *ends = (_double(end) for end in (given, *(eigenvalue.bracket or (given, given))))
    if not bool(x.isfinite().all()):
        raise ValueError(f"eigenvalues must be finite, got {given}")
    if dim is not None and dim < 1:
        raise ValueError(f"dim, the order of the matrix, must be at least 1, got {dim}")
    nu = spike_behind(x, level)
    seen = nu != 0
    spike_error, overlap_error = _errors(nu, level, _double(eigenvalue.stderr), float(noise.stderr), dim)
    text = "of the true curvature, for independent noise" + ("" if dim else ", the outlier taken as known")
    known = noise.exact and eigenvalue.exact and dim is None

    def made(name: str, about: str, value: Tensor, stderr: Tensor, low: Tensor, high: Tensor, **more: Any) -> Estimate:
        """An estimate in the form of the given eigenvalue, with a bracket if its ends differ."""
        fields: dict[str, Any] = {"exact": True} if known else {"rule": Spiked(name, noise, eigenvalue, dim)}
        low, high = torch.minimum(low, high), torch.maximum(low, high)
        bracket = (_like(low, given), _like(high, given)) if bool((low < high).any()) else None
        value, stderr = (_like(t, given) for t in (value, torch.where(seen, stderr, 0.0)))
        return Estimate(name=name, value=value, stderr=stderr, bracket=bracket, **fields, **more, **cost(noise, about))

    spikes = [spike_behind(end, level) for end in ends]
    shares = [spike_overlap(end, level) for end in (nu, *spikes)]
    about = f"squared overlap of the eigenvectors {text}"
    share = made("overlap", about, shares[0], overlap_error, *shares[1:], support=(0.0, 1.0))
    hidden = (torch.where(seen, end, side * math.sqrt(level)) for end, side in zip(spikes, (-1, 1), strict=True))
    return made("spike", f"eigenvalue {text}", nu, spike_error, *hidden, parts={"overlap": share})


def overlap(nu: float, s2: Noise) -> Estimate:
    """|theta'phi|^2 = 1 - s2 / nu^2 for a known spike nu, 0 below the threshold (theorem 1 of seed 004).

    This is the limit for large P; at finite P the overlap of one batch deviates from it by about P^(-1/2). If s2 is an
    estimate, the interval allows for the spike being on the other side of the threshold.

    Example:
        >>> overlap(2.0, s2=1.0).value, overlap(1.0, s2=1.0).value
        (0.75, 0.0)
        >>> print(overlap(2.0, ritz.Estimate(name="noise", value=1.0, stderr=0.1)))
        overlap 0.750 +- 0.025
    """
    noise = noise_level(s2)
    if not math.isfinite(nu):
        raise ValueError(f"nu, the spike, must be finite, got {nu}")
    square = float(nu) ** 2
    least = float(noise.value if noise.exact else noise.interval(_SURE)[0])
    if square <= least:
        return Estimate(name="overlap", value=0.0, exact=noise.exact, **cost(noise, f"0, for |nu| = {abs(nu):g}"))
    text = f"1 - s2 / nu^2, nu = {nu:g}"
    found = affine(noise, -1 / square, 1.0, name="overlap", support=(0.0, 1.0), parts={}, **cost(noise, text))
    if square > float(noise.value):
        return found
    return replace(found, value=0.0, bracket=found.bracket or (found.value, found.value), samples=None)


def _errors(nu: Tensor, s2: float, own: Tensor, noise: float, dim: int | None) -> tuple[Tensor, Tensor]:
    """Standard errors of nu and of 1 - s2 / nu^2, from those of the eigenvalue and of s2, to first order."""
    size = torch.where(nu != 0, nu.abs(), math.inf)
    slack = 1 - s2 / size.square()  # d lambda / d nu at constant s2
    if dim is not None:
        own = torch.hypot(own, (2 * s2 * slack / dim).sqrt())
    spike = torch.hypot(own, noise / size) / slack
    share = torch.hypot(2 * s2 / size * own, (1 + s2 / size.square()) * noise) / (size.square() * slack)
    return spike, share


@dataclass(frozen=True, eq=False)
class Spiked:
    """The interval of a spike or an overlap, from the ends of the intervals of the noise level and of the outlier.

    Both quantities rise with |lambda| and fall with s2. So each interval is mapped by the formula, and the two
    distances from the value are combined as those of independent errors are (Zou and Donner 2008).
    """

    name: str  # "spike" or "overlap"
    noise: Estimate
    eigenvalue: Estimate
    dim: int | None

    def interval(self, value: Number, stderr: Number, bracket: Pair, level: float) -> Pair:
        """The bracket, widened."""
        x, s2 = _double(self.eigenvalue.value).abs(), float(self.noise.value)
        levels = [max(float(end), 0.0) for end in self.noise.interval(level)]
        moves = []
        for side in (-1.0, 1.0):
            here = self._at(x, s2, side)
            by_noise = torch.stack([side * (self._at(x, end, side) - here) for end in levels]).amax(0)
            reach = self._reach(x, s2, level, side)
            by_outlier = side * (self._at((x + side * reach).clamp(min=0.0), s2, side) - here)
            moves.append(torch.hypot(by_noise.clamp(min=0.0), by_outlier.clamp(min=0.0)))
        if self.name == "spike":  # the distances are those of |nu|
            negative = _double(self.eigenvalue.value) < 0
            moves = [torch.where(negative, other, own) for own, other in zip(moves, moves[::-1], strict=True)]
        low, high = _double(bracket[0]) - moves[0], _double(bracket[1]) + moves[1]
        return _like(low, value), _like(high, value)

    def _at(self, x: Tensor, s2: float, side: float) -> Tensor:
        """The quantity at |lambda| = x; in the bulk, the extreme spike that may hide there."""
        nu = spike_behind(x, s2)
        return spike_overlap(nu, s2) if self.name == "overlap" else torch.where(nu > 0, nu, side * math.sqrt(s2))

    def _reach(self, x: Tensor, s2: float, level: float, side: float) -> Tensor:
        """How far on one side the outlier may lie from its limit, because of its own error and of the noise.

        The deviation due to noise is normal far from the edge; near the edge it is at least that of Tracy and Widom.
        """
        from scipy.stats import norm, t

        both = 0.5 + level / 2
        own = _double(self.eigenvalue.stderr) * float(t.ppf(both, degrees(self.eigenvalue.rule)))
        if self.dim is None:
            return own.expand_as(x)
        normal = (2 * s2 * spike_overlap(spike_behind(x, s2), s2) / self.dim).sqrt() * float(norm.ppf(both))
        quantile = tracy_widom_quantile(both if side < 0 else 1 - both)  # an outlier that is too high is lowered
        least = abs(quantile) * math.sqrt(s2) * math.pow(self.dim, -2 / 3)
        return torch.hypot(own, normal.clamp(min=least))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spiked) and equal(self, other)

    __hash__ = None  # type: ignore[assignment]


def _double(x: Number) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def _like(x: Tensor, given: Number) -> Any:
    """x as a float if `given` is a number."""
    return x if isinstance(given, Tensor) else float(x)
