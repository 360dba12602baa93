"""Where the bulk of the noise ends, with the error that follows from that of the noise level.

Every result is a multiple of sqrt(s2), s2 = Tr X^2 / P. s2 is a number, or the `Estimate` of `ritz.curvature_noise`,
whose interval is then carried over to the result. The formulas hold for noise with independent entries; `fit` tests
whether the noise is of this kind.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..intervals import Affine, ChiSquare, CountedChiSquare, Hull, IntervalRule, MatchedT, StudentT
from ..results import Estimate, affine
from .laws import Semicircle
from .tracy_widom import DEVIATION, tracy_widom_quantile

Noise = float | Tensor | Estimate
_MANY = 1e9  # degrees of freedom of a known value


def bulk_edge(s2: Noise) -> Estimate:
    """lambda_+ = 2 sqrt(s2), the upper end of the semicircle of the noise; the lower end lambda_- is -lambda_+.

    Section 4 of seed 004 puts the edge at sqrt(s2) = sigma sqrt(P / B), which is in fact the `bbp_threshold`.

    Example:
        >>> bulk_edge(0.25).value
        1.0
        >>> noise = ritz.Estimate(name="noise", value=0.25, stderr=0.1, rule=ChiSquare(12.5))
        >>> print(bulk_edge(noise))
        bulk edge 1.00 +- 0.20
    """
    return _root(noise_level(s2), 2.0, "bulk edge", "2 sqrt(s2)")


def bbp_threshold(s2: Noise) -> Estimate:
    """sqrt(s2): a spike of H below it leaves no trace in the spectrum of H + X (Baik, Ben Arous and Péché 2005).

    Example:
        >>> bbp_threshold(0.25).value
        0.5
    """
    return _root(noise_level(s2), 1.0, "BBP threshold", "sqrt(s2)")


def edge_quantile(s2: Noise, dim: int, level: float = 0.99) -> Estimate:
    """The `level` quantile of the largest eigenvalue of the noise, at finite P = `dim`.

        sqrt(s2) (2 + P^(-2/3) q),    q the quantile of the law of Tracy and Widom

    `parts["width"]` is the standard deviation of the largest eigenvalue, 1.27 sqrt(s2) P^(-2/3).

    Example:
        >>> edge = edge_quantile(1.0, dim=1000)
        >>> round(edge.value, 4), round(edge.parts["width"].value, 5)
        (2.0202, 0.01268)
    """
    noise = noise_level(s2)
    unit = Semicircle(1.0).edge_scale(dim)
    far = 2 + unit * tracy_widom_quantile(level)
    if far <= 0:
        raise ValueError(
            f"the law of Tracy and Widom does not hold at dim = {dim}, level = {level}: give a larger dim or level"
        )
    width = _root(noise, unit * DEVIATION, "edge width", "standard deviation of the largest eigenvalue of the noise")
    text = f"{level:g} quantile of the largest eigenvalue of noise of order {dim}"
    return _root(noise, far, "edge quantile", text, parts={"width": width})


def noise_level(s2: Noise) -> Estimate:
    """s2 as an `Estimate`, after checking its value; exact if a number was given."""
    if not isinstance(s2, Estimate):
        s2 = Estimate(name="s2", value=float(s2), exact=True)
    value = float(s2.value)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"the noise level s2 = Tr X^2 / P must be finite and not negative, got {value}")
    return s2


def degrees(rule: IntervalRule) -> float:
    """Degrees of freedom of Student's t for a number that follows from an estimate with this rule."""
    if isinstance(rule, Affine):
        return degrees(rule.rule)
    if isinstance(rule, Hull):
        return min(map(degrees, rule.rules))
    if isinstance(rule, CountedChiSquare):
        return max(float(rule.seen), rule.least)
    return float(rule.dof) if isinstance(rule, StudentT | MatchedT | ChiSquare) else _MANY


def cost(noise: Estimate, text: str) -> dict[str, Any]:
    """Cost, seed, stop and convention of a number that follows from the noise level."""
    known = f"s2 from {noise.name}" + (f": {noise.convention}" if noise.convention else "")
    return {
        "products": noise.products,
        "seed": noise.seed,
        "stop": noise.stop,
        "convention": f"{text}; {known}",
    }


def _root(noise: Estimate, scale: float, name: str, text: str, **fields: Any) -> Estimate:
    """scale sqrt(s2), with the interval of s2 mapped by the same function."""
    square = affine(noise, scale**2, parts={})
    value = math.sqrt(float(square.value))
    ends = None if square.bracket is None else tuple(math.sqrt(max(float(end), 0.0)) for end in square.bracket)
    return Estimate(
        name=name,
        value=value,
        stderr=float(square.stderr) / (2 * value) if value else 0.0,
        bracket=None if ends is None else (ends[0], ends[1]),
        samples=None if square.samples is None else torch.as_tensor(square.samples),
        power=0.5,
        exact=noise.exact,
        rule=square.rule,
        support=(0.0, math.inf),
        **cost(noise, text),
        **fields,
    )
