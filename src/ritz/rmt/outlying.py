"""Outliers: the eigenvalues that noise of a given level does not explain, their count, and the spikes behind them."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..intervals import RandomStart, StudentT
from ..results import Estimate, affine
from ..storage import Result
from .edges import Noise, edge_quantile, noise_level
from .measured import check_source
from .spikes import debias

if TYPE_CHECKING:
    from ..estimators.quantities import Spectrum

_SURE = 0.975  # probability, on each side, of the bound on eigenvalues that the probes of a run have missed


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Outliers(Result):
    """The eigenvalues that noise of a given level does not explain.

    Attributes:
        threshold: Bound on the absolute eigenvalues of the noise, with the requested probability.
        count: How many eigenvalues lie beyond it; with parts "above" and "below".
        eigenvalues: The ones among them that the run resolved (k,), in descending order.
        spikes: The eigenvalues of the true curvature behind them (k,), see `debias`; with parts["overlap"].
    """

    threshold: Estimate
    count: Estimate
    eigenvalues: Tensor
    spikes: Estimate


def outliers(source: "Spectrum | Tensor", s2: Noise, *, level: float = 0.99) -> Outliers:
    """The eigenvalues outside of the bulk of noise of level s2, at finite P, and the spikes behind them.

    With probability `level`, independent noise of that level has no eigenvalue beyond the threshold on either side (see
    `edge_quantile`). The bracket of the count includes the counts at both ends of the threshold's 95 % interval, and
    the eigenvalues that a run could not resolve. Correlated noise has eigenvalues far beyond the threshold itself:
    check with `fit`.

    Args:
        source: The `ritz.spectrum` of a batch's curvature, or all of its eigenvalues (P,).
        s2: Tr X^2 / P, a number or the `Estimate` of `ritz.curvature_noise` at that batch size.
        level: Probability that noise alone gives no outlier.

    Example:
        >>> found = outliers(torch.linalg.eigvalsh(ritz.rmt.wigner(300, spikes=[3.0, -2.0])), s2=1.0)
        >>> found.count.value, found.count.parts["below"].value
        (2.0, 1.0)
    """
    noise = noise_level(s2)
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    values, residuals, dim = _resolved(source)
    threshold = edge_quantile(noise, dim, (1 + level) / 2)  # half of the error probability on each side
    near, far = (float(end) for end in threshold.interval())
    levels = (near, float(threshold.value), far)
    parts = {name: _count(source, values, sign, levels) for name, sign in (("above", 1.0), ("below", -1.0))}
    beyond = values.abs() > levels[1]
    order = values[beyond].argsort(descending=True)
    values, residuals = values[beyond][order], residuals[beyond][order]
    ends = values - residuals, values + residuals
    pairs = Estimate(name="eigenvalue", value=values, stderr=torch.zeros_like(values), bracket=ends, exact=True)
    return Outliers(threshold=threshold, count=_sum(parts), eigenvalues=values, spikes=debias(pairs, noise, dim))


def _resolved(source: "Spectrum | Tensor") -> tuple[Tensor, Tensor, int]:
    """Eigenvalues that are known one by one, their residuals, and the order of the matrix."""
    check_source(source)
    if not isinstance(source, Tensor):
        return source.head.double(), source.head_residuals.double(), source.dim
    if source.ndim != 1 or not len(source) or not bool(source.isfinite().all()):
        raise ValueError(
            f"expected all eigenvalues as one finite tensor (P,), got shape {tuple(source.shape)}; for a matrix, pass "
            "torch.linalg.eigvalsh(matrix), for an operator ritz.spectrum(operator)"
        )
    values = source.detach().double().cpu()
    return values, torch.zeros_like(values), len(values)


def _count(source: "Spectrum | Tensor", values: Tensor, sign: float, levels: tuple[float, float, float]) -> Estimate:
    """Eigenvalues beyond the middle level on one side; the outer levels are the ends of its interval."""
    most, value, least = (float((sign * values > level).sum()) for level in levels)
    fields: dict[str, Any] = {"convention": f"eigenvalues {'above' if sign > 0 else 'below'} {sign * levels[1]:.4g}"}
    bracket = (least, most) if least < most else None
    if isinstance(source, Tensor) or source.tail is None:
        return Estimate(name="outliers", value=value, bracket=bracket, exact=bracket is None, **fields)
    fields |= {"products": source.products, "seed": source.seed, "stop": source.stop}
    rule = (source.lambda_max if sign > 0 else source.lambda_min).rule
    assert isinstance(rule, RandomStart)
    if sign * replace(rule, locked=-sign * math.inf).bound(_SURE) <= levels[0]:  # every outlier has been locked
        return Estimate(name="outliers", value=value, bracket=bracket, **fields)
    masses = [source.mass(below=sign * level) for level in levels]
    counts = [affine(e, -source.dim, source.dim) if sign > 0 else affine(e, source.dim) for e in masses]
    low = max(least, _end(counts[2], 0))
    high = max(low, _end(counts[0], 1))
    return Estimate(
        name="outliers", value=min(max(float(counts[1].value), low), high), bracket=(low, high),
        stderr=max(float(e.stderr) for e in counts), rule=StudentT(source.num_probes - 1),
        support=(least, float(source.dim)), **fields,
    )  # fmt: skip


def _sum(parts: dict[str, Estimate]) -> Estimate:
    """Sum of both sides. The errors of both sides may be correlated, so they are added."""
    above, below = parts.values()
    low, high = (_end(above, side) + _end(below, side) for side in (0, 1))
    rule = below.rule if isinstance(below.rule, StudentT) else above.rule
    return Estimate(
        name="outliers", value=float(above.value) + float(below.value), bracket=(low, high) if low < high else None,
        stderr=float(above.stderr) + float(below.stderr), exact=above.exact and below.exact, products=above.products,
        seed=above.seed, stop=above.stop, convention=f"{above.convention}, and {below.convention}",
        support=(0.0, math.inf), parts=parts, rule=rule,
    )  # fmt: skip


def _end(estimate: Estimate, side: int) -> float:
    """One end of the bracket, or the value if there is none."""
    return float(estimate.value if estimate.bracket is None else estimate.bracket[side])
