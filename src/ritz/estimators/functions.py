"""Sums over the eigenvalues of functions that are no polynomials: log-determinant, soft rank, negative trace, mass.

Tr f(H) ~ sum_i f(theta_i) + (P - r) mean_k sum_j w_kj f(t_kj), as in `quantities`, and here the quadrature of m steps
is not exact. What it is off by is common to all probes, and so is a bracket, of four parts: bounds of the quadrature,
probe by probe; what leaving out the coupling of head and tail does; how far the products may have moved the sum
(`rounding`); and what a probe that broke down took for round-off.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import IndefiniteError
from ..krylov.tridiagonal import Tridiagonal
from ..results import Estimate
from .rounding import around

if TYPE_CHECKING:
    from .quantities import Spectrum

NOISE_MARGIN = 10.0  # a shift below this many times the noise of a product is refused

_EVERYWHERE = (-math.inf, math.inf)


def negative_trace(s: "Spectrum") -> Estimate:
    """Sum of the negative eigenvalues, at most 0."""
    text = "sum of negative eigenvalues"
    head, moved = float(s.head.clamp(max=0).sum()), s._moved.nuclear_error
    if s.tail is None:
        bracket = around(head, moved)
        return Estimate(name="negative trace", value=head, bracket=bracket, exact=True, **s._cost(text))

    def negative(t: Tensor) -> Tensor:
        return t.clamp(max=0.0)

    samples = s._tail_samples(negative)
    low, high = _negative_bounds(s, s.tail)
    # min(t, 0) is concave, so leaving the coupling out can only raise its trace; by |r|^2 / |theta| to second order,
    # and by no more than |r| for each pair, half of the coupling's nuclear norm, however small theta is
    residuals = s.head_residuals
    slack = float(torch.minimum(residuals.square() / s.head.abs().clamp(min=1e-300), residuals).sum())
    ends = low - moved, high + moved
    support = (-math.inf, 0.0)
    return _bracketed(s, "negative trace", negative, samples, ends, (head - slack, head), text, support)


def _negative_bounds(s: "Spectrum", tail: Tridiagonal, num: int = 64) -> tuple[Tensor, Tensor]:
    """Bounds on (P - r) times the integral of min(t, 0): minus the area under the distribution function below 0."""
    # as far down as there may be eigenvalues: no further than the random-start bound, or half past the norm
    norm = math.sqrt(float(s._tail_samples(torch.square).mean()))
    bottom = max(float(s.lambda_min.interval()[0]), -1.5 * norm - s.coupling - float(s._blur.max()))
    if bottom >= 0:
        return torch.zeros(s.num_probes), torch.zeros(s.num_probes)
    levels = torch.linspace(bottom, 0.0, num + 1, dtype=torch.float64)[:, None]
    off = s._round_off + s._blur  # (K,)
    under, over = tail.mass_bounds(levels - off)[0], tail.mass_bounds(levels + off)[1]  # (num + 1, K)
    step = -bottom / num * (s.dim - len(s.head))
    return -step * over[1:].sum(0), -step * under[:-1].sum(0)


def mass(s: "Spectrum", below: float) -> Estimate:
    """The fraction of the eigenvalues that are at most `below`, between Chebyshev-Markov-Stieltjes bounds."""
    text = f"fraction of the {s.dim} eigenvalues <= {below:g}"
    if math.isnan(below):
        raise ValueError("below must be a number, got nan")
    if math.isinf(below):
        return Estimate(name="mass", value=float(below > 0), exact=True, **s._cost(text))
    # round-off decides on which side of the level an eigenvalue at it comes to lie
    near = 64 * s.noise * float(s.spectral_norm.value) + s.rounding
    if s.tail is None:
        under, over = (float((s.head <= below + side * near).double().mean()) for side in (-1, 1))
        bracket = (under, over) if under < over else None
        return Estimate(name="mass", value=over, bracket=bracket, exact=under == over, **s._cost(text))
    share = (s.dim - len(s.head)) / s.dim
    # by Weyl no eigenvalue of H is further than the coupling from one of the split matrix
    off = s.coupling + s.rounding + s._round_off + s._blur  # (K,)
    low, high = s.tail.mass_bounds(below - off)[0] * share, s.tail.mass_bounds(below + off)[1] * share
    reach = s.coupling + near
    under, over = (float((s.head <= below + side * reach).sum()) / s.dim for side in (-1, 1))

    def counted(t: Tensor) -> Tensor:
        return (t <= below).double() / s.dim

    return _bracketed(s, "mass", counted, (low + high) / 2, (low, high), (under, over), text, support=(0.0, 1.0))


def logdet(s: "Spectrum", shift: float) -> Estimate:
    """log det(H + shift I), between Gauss-Radau and Gauss quadrature."""
    floor = _check_shift(s, shift)

    def log(t: Tensor) -> Tensor:
        return (t + shift).clamp(min=0.1 * (floor + shift)).log()

    text = f"log det(H + {shift:g} I), natural logarithm"
    head = float((s.head + shift).log().sum())
    moved = s._moved.nuclear_error / (floor + shift)  # the derivative is (H + s)^-1
    if s.tail is None:
        bracket = around(head, moved)
        return Estimate(name="log-determinant", value=head, bracket=bracket, exact=True, **s._cost(text))
    left = s.dim - len(s.head)
    low, high = (side * left for side in s.tail.bounds(log, floor))
    off = moved + left * (s._hidden / (floor + shift)).square() / 2  # half the second derivative; see `_hidden`
    slack = _lost_volume(s, shift, floor)
    return _bracketed(s, "log-determinant", log, high, (low - off, high + off), (head - slack, head), text)


def _lost_volume(s: "Spectrum", shift: float, floor: float) -> float:
    """By how much leaving the coupling R out may raise log det(H + shift I): Fischer's inequality says it does.

    At most -log(1 - sum_i r_i^2 / ((theta_i + s) (floor + s))). For H >= 0 the rest T is at least R' Theta^-1 R, and
    then at most log det(s Theta + R R') - log det(s Theta) <= sum_i log(1 + r_i^2 / (s theta_i)), by Hadamard.
    """
    squares = s.head_residuals.square()
    lost = float((squares / (s.head + shift)).sum()) / (floor + shift)
    slack = -math.log1p(-lost) if lost < 1 else math.inf
    if s.positive and bool((s.head > 0).all()):
        slack = min(slack, float((squares / (shift * s.head)).log1p().sum()))
    return slack


def soft_rank(s: "Spectrum", shift: float) -> Estimate:
    """Tr H (H + shift I)^-1, between Gauss-Radau and Gauss quadrature."""
    floor = _check_shift(s, shift)

    def share(t: Tensor) -> Tensor:
        return t / (t + shift).clamp(min=0.1 * (floor + shift))

    text = f"Tr H (H + {shift:g} I)^-1"
    head = float(share(s.head).sum())
    slope = shift / (floor + shift) ** 2  # the derivative is s (H + s)^-2
    moved = s._moved.nuclear_error * slope
    if s.tail is None:
        bracket = around(head, moved)
        return Estimate(name="soft rank", value=head, bracket=bracket, exact=True, **s._cost(text))
    left = s.dim - len(s.head)
    low, high = (side * left for side in s.tail.bounds(share, floor))
    off = moved + left * s._hidden.square() * slope / (floor + shift)  # half the second derivative
    # leaving the coupling E out can only raise it, by at most s |(H + s)^-1| |E (D + s)^-1|_F^2, D without E; and, as E
    # has as many negative eigenvalues as locked pairs and the function is below 1, by less than their number
    least = floor + shift
    lost = (s.head_residuals.square() * ((s.head + shift) ** -2 + least**-2)).sum()
    slack = min(float(lost) * shift / least, float(len(s.head)) if s.positive else math.inf)
    ends, support = (low - off, high + off), (-math.inf, s.dim)
    return _bracketed(s, "soft rank", share, high, ends, (head - slack, head), text, support)


def _check_shift(s: "Spectrum", shift: float) -> float:
    """A lower bound on the spectrum that the shift covers."""
    # a Ritz value of a positive matrix may be negative by round-off, which the test of the shift below allows for
    floor = min(0.0, float(s.lambda_min.value)) if s.positive else float(s.lambda_min.interval(0.99)[0])
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    if floor + shift <= 0:
        error = IndefiniteError(_uncovered(s, shift, floor))
        error.partial = s  # the run is not lost
        raise error
    least = NOISE_MARGIN * max(s.noise * float(s.spectral_norm.value), s.rounding)
    if shift < least:
        raise ValueError(
            f"shift {shift:g} is lost in the round-off of the products; give at least {least:.2g} (to ritz.measure, "
            "which takes 1 / (N sigma^2), a smaller sigma=), or dtype=torch.float64"
        )
    return floor


def _uncovered(s: "Spectrum", shift: float, floor: float) -> str:
    """What is known of eigenvalues that a shift does not cover: those at Ritz values are there, others may be."""
    lowest, enough = float(s.lambda_min.value), f"take a shift above {-floor:.3g}"
    if lowest + shift <= 0 or s.tail is None:
        return (
            f"the matrix is indefinite, eigenvalues reach down to {lowest:.3g}, and log det of H + {shift:g} I does "
            f"not exist; {enough if math.isfinite(floor) else 'raise num_steps, which tell how large a shift it takes'}"
            ", or a positive matrix such as ritz.GGN"
        )
    down, also = (f"down to {floor:.3g}", f", or {enough}") if math.isfinite(floor) else ("of any size", "")
    return (
        f"the smallest Ritz value is {lowest:.3g}, but {s.num_steps} steps of each probe do not rule out "
        f"negative eigenvalues {down}, with which log det of H + {shift:g} I does not exist; raise num_steps{also}"
    )


def _bracketed(
    s: "Spectrum", name: str, f: Callable[[Tensor], Tensor], samples: Tensor, tail: tuple[Tensor, Tensor],
    head: tuple[float, float], text: str, support: tuple[float, float] = _EVERYWHERE,
) -> Estimate:  # fmt: skip
    """Tr f(H) between bounds, probe by probe: the bracket is their means, the error the largest of their errors.

    `tail` are the bounds of the probes, (K,) and (K,), and `head` those of the locked pairs' part. Large
    eigenvalues that are not locked make the mean of few probes skewed, which widens Student t.
    """
    low, high = tail
    root = math.sqrt(len(samples))
    stderr = max(float(x.std()) for x in (samples, low, high)) / root if len(samples) > 1 else math.nan
    samples = samples + head[1]
    least, most = float(low.mean()) + head[0], float(high.mean()) + head[1]
    return Estimate(
        name=name, value=float(samples.mean()), stderr=stderr, samples=samples,
        bracket=(min(least, most), max(least, most)),  # bounds that meet may cross by round-off
        rule=s.skewed_t(f),
        support=support, **s._cost(text),
    )  # fmt: skip
