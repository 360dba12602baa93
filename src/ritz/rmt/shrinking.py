"""Linear shrinkage of a noisy curvature towards a multiple of the identity, and the damping that is equivalent to it.

Of all matrices beta H_batch + (1 - beta) c I, the nearest to H in mean square has

    beta = a^2 / (a^2 + b^2),    a^2 = Tr (H - c I)^2 / P,    b^2 = Tr X^2 / P = s2

and the best c is mu = Tr H / P (Ledoit and Wolf 2004). Since (beta lambda + (1 - beta) c)^-1 is
beta^-1 (lambda + delta)^-1 with delta = c b^2 / a^2, a step with the shrunk curvature is a damped step with 1 / beta
times the learning rate (seed 004, equation 13). The target I with a^2 = 1 gives equation 15 of seed 004, delta = s2,
which adds the square of a curvature to a curvature; but a^2 is 1 - 2 mu + Tr H^2 / P, which is near 1 only for a flat
loss. With the target mu I, delta is a curvature: if the loss is multiplied by a constant, so is the damping.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..intervals import StudentT
from ..results import Estimate, derived
from ..storage import Result
from .edges import Noise, cost, degrees, noise_level


@dataclass(frozen=True, eq=False, kw_only=True)
class Shrinkage(Result):
    """The best linear shrinkage beta H_batch + (1 - beta) c I, and the damping that is equivalent to it.

    Attributes:
        beta: Weight of the batch's curvature, between 0 and 1.
        damping: delta = c b^2 / a^2, to be added to the eigenvalues.
        target: c.
        error: The mean of Tr (estimate - H)^2 / P with shrinkage, a^2 b^2 / (a^2 + b^2); without shrinkage it is b^2.

    A few batches determine their noise poorly, and the intervals use its standard error without correction. On a
    softmax regression of 3 features, with batches of 32 and 4 or 16 probes, the interval of `error` covered 87 to 91 %
    of 600 draws with 3 or 4 batches and 94 to 97 % with 8 to 64; that of `damping` 92 % or more, that of `beta` 94
    (benchmarks/stated.py). With two batches there is no standard error at all.

    Example:
        >>> s = ritz.rmt.shrinkage(1.0, mean=1.0, second=4.0)  # a^2 = 3, b^2 = 1
        >>> s.beta.value, round(s.damping.value, 4), s.apply(torch.tensor([5.0, 0.0])).tolist()
        (0.75, 0.3333, [4.0, 0.25])
    """

    beta: Estimate
    damping: Estimate
    target: Estimate
    error: Estimate

    def apply(self, eigenvalues: Tensor) -> Tensor:
        """beta lambda + (1 - beta) c; the eigenvectors stay as they are."""
        beta = float(self.beta.value)
        return beta * eigenvalues + (1 - beta) * float(self.target.value)


def shrinkage(
    s2: Noise,
    *,
    mean: float | Estimate | None = None,
    second: float | Estimate | None = None,
    target: float | None = None,
    averaged: float = 1.0,
) -> Shrinkage:
    """The best linear shrinkage for noise of level s2, from what `ritz.curvature_noise` measures in one pass.

    Args:
        s2: b^2 = Tr X^2 / P at the batch size in use: a number, or the `Estimate` of `ritz.curvature_noise`, whose
            parts also hold `mean` and `second`.
        mean: mu = Tr H / P, if s2 is a number.
        second: Tr H^2 / P, if s2 is a number.
        target: c; None means mu (Ledoit and Wolf), and 1 is the identity of seed 004.
        averaged: The number of independent batches that the curvature is averaged over; b^2 is divided by it. For a
            moving average with decay rho it is (1 + rho) / (1 - rho).

    Raises:
        ValueError: If the target is not positive (take the Gauss-Newton matrix), a^2 is not positive, or `mean` or
            `second` is missing.

    Example:
        >>> round(shrinkage(0.5, mean=0.0, second=0.0, target=1.0).damping.value, 6)  # equation 15: delta = s2
        0.5
        >>> ours = shrinkage(0.5, mean=0.1, second=0.2).damping.value
        >>> round(shrinkage(50.0, mean=1.0, second=20.0).damping.value / ours, 6)  # ten times the loss
        10.0
    """
    noise = noise_level(s2)
    parts = dict(noise.parts)
    mean = parts.get("mean curvature") if mean is None else mean
    second = parts.get("second moment") if second is None else second
    if mean is None or second is None:
        raise ValueError(
            "shrinkage needs Tr H / P and Tr H^2 / P besides s2: give mean= and second=, or pass the result of "
            "ritz.curvature_noise, which contains both, as s2"
        )
    if not averaged >= 1:
        raise ValueError(f"averaged must be at least 1, got {averaged}")
    given = (mean, second)
    known = [e if isinstance(e, Estimate) else Estimate(name="given", value=float(e), exact=True) for e in given]

    def terms(b2: float, mu: float, m2: float) -> tuple[float, float, float]:
        c = mu if target is None else target
        return c, m2 - 2 * c * mu + c**2, b2 / averaged

    c, a2, _ = terms(float(noise.value), *(float(e.value) for e in known))
    _check(c, a2)

    def made(name: str, of: Callable[[float, float, float], float], text: str, **fields: Any) -> Estimate:
        return _carried(name, lambda *x: of(*terms(*x)), noise, *known, **cost(noise, text), **fields)

    positive = {"support": (0.0, math.inf)}
    which = "Tr H / P" if target is None else "given"
    return Shrinkage(
        beta=made("beta", lambda _, a2, b2: a2 / (a2 + b2), "a^2 / (a^2 + b^2)", support=(0.0, 1.0)),
        damping=made("damping", lambda c, a2, b2: c * b2 / a2, "c b^2 / a^2, in units of curvature", **positive),
        target=made("target", lambda c, *_: c, f"c, {which}"),
        error=made("error", lambda _, a2, b2: a2 * b2 / (a2 + b2), "Tr (estimate - H)^2 / P", **positive),
    )


def _check(target: float, a2: float) -> None:
    if not target > 0:
        raise ValueError(
            f"the target of the shrinkage must be positive, got {target:.4g}; if that is Tr H / P, take "
            "curvature_noise(..., curvature='ggn') or give target="
        )
    if not a2 > 0:
        raise ValueError(
            f"a^2 = Tr (H - {target:.4g} I)^2 / P must be positive, got {a2:.4g}: the curvature equals the target, or "
            "is lost in the noise, so there is no finite damping; measure it on more batches"
        )


def _carried(name: str, fn: Callable[..., float], *estimates: Estimate, **fields: Any) -> Estimate:
    """A function of estimates that share their probes and also vary between batches.

    The jackknife over probes does not see the variance between batches. So that part of each estimate's variance is
    added, times its squared slope, with degrees of freedom after Welch and Satterthwaite. With two batches the noise
    has no standard error, and neither has a function of it.
    """
    result = derived(name, fn, *estimates, **fields)
    shared = float(result.stderr) ** 2
    values = [float(e.value) for e in estimates]
    slopes = [_slope(fn, values, at) for at in range(len(estimates))]
    own = [slope**2 * _beyond(e) if slope else 0.0 for slope, e in zip(slopes, estimates, strict=True)]
    if math.isnan(sum(own)):
        return replace(result, stderr=math.nan, rule=StudentT(0))
    if not sum(own) > 0:
        return result
    total = shared + sum(own)
    parts = [(shared, result), *zip(own, estimates, strict=True)]
    dof = total**2 / sum(part**2 / max(degrees(e.rule), 1.0) for part, e in parts)
    return replace(result, stderr=math.sqrt(total), rule=StudentT(dof))


def _beyond(estimate: Estimate) -> float:
    """The part of an estimate's variance that does not come from its probes; nan if it is unknown."""
    if estimate.exact or estimate.samples is None or len(estimate.samples) < 2:
        return 0.0
    probes = float(estimate.samples.var()) / len(estimate.samples)
    beyond = float(estimate.stderr) ** 2 - probes
    return 0.0 if beyond < 0 else beyond


def _slope(fn: Callable[..., float], values: list[float], at: int) -> float:
    """The derivative with respect to one of the values, from a central difference."""
    step = 1e-4 * values[at]
    if not step:
        return 0.0
    up, down = (fn(*values[:at], values[at] + side, *values[at + 1 :]) for side in (step, -step))
    return (up - down) / (2 * step)
