"""PAC-Bayes with a quadratic loss: the metric and equations 6 to 9 of seed 002 as printed, and the correct Laplace KL.

Everything here is a closed form of a spectrum, a weight norm and a few numbers. The prior is N(0, sigma^2 I). The
Laplace posterior for N items with mean loss L and curvature H is N(w, (N H + I / sigma^2)^-1), so with c = N sigma^2

    2 KL            =  |w|^2 / sigma^2  +  sum_i [ log(1 + c l_i) - c l_i / (1 + c l_i) ]
    2 log evidence  =  - 2 N L  -  |w|^2 / sigma^2  -  sum_i log(1 + c l_i)

Seed 002 uses N(w, H^-1) instead, without N and without the prior's term, and has Tr H in place of Tr H^-1.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...estimators.quantities import Spectrum
from ...results import Estimate, affine

MetricConvention = Literal["table", "eq7"]


def metric_a(
    trace: Estimate, weight_norm: float, dim: int, *, convention: MetricConvention = "table", **fields: Any
) -> Estimate:
    """The approximate metric `a` of seed 002, in one of two conventions that rank solutions differently.

        table    a = |w| / 2 + Tr H / P          as in the tables of seed 002
        eq7      a = Tr H + |w|^2 / 2            equation 7

    For the MLP of seed 002, half the weight norm, not squared, gives the printed column to its last digit; Tr H / P (at
    most 0.02) is too small to tell whether it was added. Equation 7 with the tables' traces and |w| = 2 a ranks weight
    decay 5e-4 behind 1e-4 in three of four tables.

    Args:
        trace: Tr H, not divided by P.
        weight_norm: |w|, not squared.
        dim: P.
        convention: "table" or "eq7".
        fields: Fields of the returned `Estimate` to replace.

    Example:
        >>> trace = Estimate(name="trace", value=181.0, stderr=5.0)
        >>> round(metric_a(trace, 15.2, 9960).value, 2), round(metric_a(trace, 15.2, 9960, convention="eq7").value, 1)
        (7.62, 296.5)
    """
    check_convention(convention)
    _check(weight_norm=weight_norm, dim=dim)
    if convention == "table":
        scale, offset, text = 1 / dim, weight_norm / 2, "||w|| / 2 + Tr H / P, as in the tables of seed 002"
    else:
        scale, offset, text = 1.0, weight_norm**2 / 2, "Tr H + ||w||^2 / 2, equation 7 of seed 002"
    told = f"{text}; {trace.convention}" if trace.convention else text
    return affine(trace, scale, offset, **{"name": "metric a", "convention": told, **fields})


def check_convention(convention: str) -> None:
    """Refuse anything but a convention of the metric.

    Example:
        >>> check_convention("eq6")
        Traceback (most recent call last):
        ValueError: convention must be 'table' or 'eq7', got 'eq6'
    """
    if convention not in get_args(MetricConvention):
        raise ValueError(f"convention must be 'table' or 'eq7', got {convention!r}")


# ------------------------------------------------------------------------------- the equations as printed


def kl_eq6(spectrum: Spectrum, weight_norm: float, sigma: float = 1.0, *, shift: float) -> Estimate:
    """Equation 6 of seed 002 as printed, [Tr H + |w|^2] / (2 sigma^2) + log|H + shift I| / 2, constants dropped.

    It is not a Kullback-Leibler divergence. For q = N(w, H^-1) and p = N(0, sigma^2 I) the first term is Tr H^-1, which
    grows as the posterior widens; Tr H does not. Even with the dropped constants added, the value is negative for
    H = h I, w = 0, sigma = 1 and any h < 1: P (h - 1 + log h) / 2. See `laplace_kl`.

    Args:
        spectrum: Spectrum of H.
        weight_norm: |w|, not squared.
        sigma: Standard deviation of the prior.
        shift: Added to H in the logarithm, because a network's H is singular and log|H| is -infinity.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> s = ritz.spectrum(DenseOperator(0.5 * torch.eye(2, dtype=torch.float64)))
        >>> round(kl_eq6(s, 0.0, shift=1e-9).value, 4)  # (2 * 0.5) / 2 + log 0.5
        -0.1931
    """
    _check(weight_norm=weight_norm, sigma=sigma)
    text = f"(Tr H + ||w||^2) / (2 sigma^2) + log|H + {shift:g} I| / 2, sigma = {sigma:g}, equation 6 of seed 002"
    scales = 0.5 / sigma**2, 0.5
    return _combined("KL, equation 6", scales, shift, weight_norm**2 / (2 * sigma**2), text, spectrum)


def empirical_risk_eq8(spectrum: Spectrum, loss: float, num_samples: int, *, shift: float) -> Estimate:
    """Equation 8 of seed 002 as printed: sum_i log p(y_i | x_i, w) + (P / 2) log 2 pi - log|H + shift I| / 2.

    Seed 002 uses it for E_q sum_i log p, but it is the logarithm of the integral of the likelihood over a quadratic
    valley. The expectation itself, by sampling, is -N times `expected_loss`.

    Args:
        spectrum: Spectrum of H.
        loss: L, the mean of -log p over the items.
        num_samples: N.
        shift: See `kl_eq6`.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> s = ritz.spectrum(DenseOperator(2 * torch.eye(1, dtype=torch.float64)))
        >>> round(empirical_risk_eq8(s, 0.5, 10, shift=1e-9).value, 4)  # -5 + log(2 pi) / 2 - log(2) / 2
        -4.4276
    """
    _check(loss=loss, num_samples=num_samples)
    text = f"-N L + (P / 2) log 2 pi - log|H + {shift:g} I| / 2, equation 8 of seed 002"
    offset = -num_samples * loss + spectrum.dim / 2 * math.log(2 * math.pi)
    return _combined("empirical risk, equation 8", (0.0, -0.5), shift, offset, text, spectrum)


def metric_g_eq9(
    spectrum: Spectrum, loss: float, weight_norm: float, num_samples: int, sigma: float = 1.0, *, shift: float
) -> Estimate:
    """The metric `g`, equation 9 of seed 002; larger is better. The paper prints no value of it.

        g = sum_i log p(y_i | x_i, w) - (1 + 1/N) log|H + shift I| / 2 - [Tr H + |w|^2] / (2 sigma^2 N)

    It is equation 8 minus 1/N times equation 6, whose Tr H is as wrong here as there. The last term, whose symbols are
    damaged in print, is read by that rule.

    Args:
        spectrum: Spectrum of H.
        loss: L, the mean of -log p over the items.
        weight_norm: |w|, not squared.
        num_samples: N.
        sigma: Standard deviation of the prior.
        shift: See `kl_eq6`.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> s = ritz.spectrum(DenseOperator(torch.eye(2, dtype=torch.float64)))
        >>> round(metric_g_eq9(s, 0.5, 2.0, 10, shift=1e-9).value, 4)  # -5 - 0 - (2 + 4) / 20
        -5.3
    """
    _check(loss=loss, weight_norm=weight_norm, num_samples=num_samples, sigma=sigma)
    text = (
        f"-N L - (1 + 1/N) log|H + {shift:g} I| / 2 - (Tr H + ||w||^2) / (2 sigma^2 N), sigma = {sigma:g}, equation 9 "
        "of seed 002"
    )
    share = 1 / (2 * sigma**2 * num_samples)
    scales = -share, -0.5 * (1 + 1 / num_samples)
    return _combined("metric g", scales, shift, -num_samples * loss - share * weight_norm**2, text, spectrum)


def _combined(
    name: str, scales: tuple[float, float], shift: float, offset: float, text: str, spectrum: Spectrum
) -> Estimate:
    """offset + a Tr H + b log|H + shift I|, (a, b) = scales, probe by probe: errors of one run are correlated."""
    a, b = scales
    moved = [affine(estimate, scale) for scale, estimate in ((a, spectrum.trace), (b, spectrum.logdet(shift))) if scale]
    value = offset + sum(float(e.value) for e in moved)
    ends = [e.bracket or (e.value, e.value) for e in moved]
    low, high = (offset + sum(float(pair[side]) for pair in ends) for side in (0, 1))
    about = {"bracket": (low, high) if any(e.bracket for e in moved) else None, **spectrum._cost(text)}
    if spectrum.tail is None:
        return Estimate(name=name, value=value, exact=True, **about)
    each = [torch.as_tensor(e.samples).double() for e in moved]
    samples = offset + torch.stack(each).sum(0)
    # the error of a bracketed estimate is the larger of those of its ends, which its samples do not show
    beyond = sum(float(e.stderr) - _spread(own) for e, own in zip(moved, each, strict=True))
    stderr, rule = _spread(samples) + beyond, spectrum.skewed_t(lambda t: a * t + b * (t + shift).log())
    return Estimate(name=name, value=value, stderr=stderr, samples=samples, rule=rule, **about)


# -------------------------------------------------------------------------------------------- Laplace


def laplace_kl(spectrum: Spectrum, weight_norm: float, num_samples: int, sigma: float = 1.0) -> Estimate:
    """KL(q || p) of the Laplace posterior q = N(w, (N H + I / sigma^2)^-1) and the prior p = N(0, sigma^2 I).

        KL = ( |w|^2 / sigma^2 + sum_i [ log(1 + c l_i) - c l_i / (1 + c l_i) ] ) / 2,    c = N sigma^2

    It is never negative, and is what equation 6 of seed 002 should say. For a prior around other weights, such as the
    initial ones, give the distance from them in place of |w|.

    Eigenvalues near 0 count little, (c l)^2 / 2, so a matrix whose c l_1 is too large for `Spectrum.logdet` poses no
    problem: the bracket includes how far round-off may move the sum.

    Args:
        spectrum: Spectrum of a positive matrix, the GGN.
        weight_norm: |w|, not squared.
        num_samples: N, the number of items that the loss averages over.
        sigma: Standard deviation of the prior.

    Raises:
        ValueError: If the matrix is not known to be positive semi-definite.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> s = ritz.spectrum(DenseOperator(torch.eye(1, dtype=torch.float64)))  # q = N(1, 1/10)
        >>> round(laplace_kl(s, 1.0, 9).value, 4)  # (1/10 + 1 - 1 + log 10) / 2
        1.2013
    """
    _check(weight_norm=weight_norm, num_samples=num_samples, sigma=sigma)
    offset = weight_norm**2 / (2 * sigma**2)
    text = (
        f"KL(N(w, (N H + I / sigma^2)^-1) || N(0, sigma^2 I)) in nats, N = {num_samples}, sigma = {sigma:g}, "
        f"||w||^2 = {weight_norm**2:.6g}"
    )
    found = _log_sum(spectrum, num_samples * sigma**2, less_rank=True)
    return _total("Laplace KL", 0.5, found, offset, text, spectrum, support=(offset, math.inf))


def laplace_evidence(
    spectrum: Spectrum, loss: float, weight_norm: float, num_samples: int, sigma: float = 1.0
) -> Estimate:
    """The logarithm of the evidence by Laplace's method, with a prior N(0, sigma^2 I); larger is better.

        log Z = - N L(w) - |w|^2 / (2 sigma^2) - sum_i log(1 + N sigma^2 l_i) / 2

    Exact for a linear network with squared error at the minimum of the regularised loss, if exp(-N L) is the
    likelihood. With nn.MSELoss and D outputs it is the likelihood of noise of variance D/2, except for its constant
    -(N D / 2) log(pi D).

    Args:
        spectrum: Spectrum of a positive matrix, the GGN.
        loss: L, the mean of -log p over the items.
        weight_norm: |w|, not squared.
        num_samples: N, the number of items that the loss averages over.
        sigma: Standard deviation of the prior.

    Raises:
        ValueError: If the matrix is not known to be positive semi-definite.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> s = ritz.spectrum(DenseOperator(torch.eye(1, dtype=torch.float64)))
        >>> round(laplace_evidence(s, 0.1, 1.0, 9).value, 4)  # -0.9 - 0.5 - log(10) / 2
        -2.5513
    """
    _check(loss=loss, weight_norm=weight_norm, num_samples=num_samples, sigma=sigma)
    offset = -num_samples * loss - weight_norm**2 / (2 * sigma**2)
    text = f"-N L - ||w||^2 / (2 sigma^2) - log|I + N sigma^2 H| / 2, N = {num_samples}, sigma = {sigma:g}"
    found = _log_sum(spectrum, num_samples * sigma**2, less_rank=False)
    return _total("Laplace evidence", -0.5, found, offset, text, spectrum, support=(-math.inf, offset))


class _Sum(NamedTuple):
    """A sum of f over eigenvalues by each probe (K,): its value and bounds on it."""

    f: Callable[[Tensor], Tensor]
    value: Tensor
    low: Tensor
    high: Tensor


def _log_sum(spectrum: Spectrum, scale: float, less_rank: bool) -> _Sum:
    """sum_i f(l_i) for f = log(1 + c l), or for log(1 + c l) - c l / (1 + c l).

    Gauss quadrature bounds both terms from above and Gauss-Radau from below.
    """
    _refuse_indefinite(spectrum)

    def log(t: Tensor) -> Tensor:
        return (scale * t.clamp(min=0)).log1p()  # values below 0 are round-off

    def rank(t: Tensor) -> Tensor:
        return 1 - 1 / (1 + scale * t.clamp(min=0)) if less_rank else torch.zeros_like(t)

    def f(t: Tensor) -> Tensor:
        return log(t) - rank(t)

    # f rises, and by Weyl round-off moves no eigenvalue by more than the norm of the round-off
    noise = spectrum.noise * float(spectrum.spectral_norm.value)

    def fall(t: Tensor) -> Tensor:
        return f(t) - f(t - noise)

    def rise(t: Tensor) -> Tensor:
        return f(t.clamp(min=0) + noise) - f(t)

    head = f(spectrum.head).sum()
    # products in low precision: |sum_i f(l_i(H + E)) - f(l_i)| <= max f' ||E||_*, and f' is at most c, or c / 4
    moved = (scale / 4 if less_rank else scale) * spectrum._moved.nuclear_error
    down, up = head - fall(spectrum.head).sum() - moved, head + rise(spectrum.head).sum() + moved
    if spectrum.tail is None:
        return _Sum(f, head[None], down[None], up[None])
    gauss, radau = spectrum.tail.gauss(), spectrum.tail.radau(min(0.0, float(spectrum.lambda_min.value)))
    left = spectrum.dim - len(spectrum.head)
    lost, gained = _coupling(spectrum, scale, less_rank)
    low = left * (radau.integrate(log) - gauss.integrate(rank) - gauss.integrate(fall)) - lost
    high = left * (gauss.integrate(log) - radau.integrate(rank) + gauss.integrate(rise)) + gained
    return _Sum(f, head + left * gauss.integrate(f), down + low, up + high)


def _coupling(spectrum: Spectrum, scale: float, less_rank: bool) -> tuple[float, float]:
    """How far below and above the sum of the separate parts, locked pairs and rest, the whole sum may be.

    For positive H with residual rows r_i of locked values t_i: leaving the coupling out raises log det(I + c H) by at
    most sum_i log(1 + c^2 |r_i|^2 / (1 + c t_i)) (Schur complement, Hadamard), and the soft rank by no more than the
    number of locked pairs (interlacing). For their difference f, |f''| <= 1 bounds the change by c^2 sum_i |r_i|^2.
    """
    squares = scale**2 * spectrum.head_residuals.square()
    lost = float((squares / (1 + scale * spectrum.head.clamp(min=0))).log1p().sum())
    return lost, min(float(len(spectrum.head)), float(squares.sum())) if less_rank else 0.0


def _total(
    name: str, factor: float, found: _Sum, offset: float, text: str, spectrum: Spectrum, support: tuple[float, float]
) -> Estimate:  # fmt: skip
    """offset + factor * the sum."""
    # each eigenvalue's term is at least 0 up to round-off
    samples, *sides = (offset + factor * each.clamp(min=0) for each in (found.value, found.low, found.high))
    low, high = sorted(float(side.mean()) for side in sides)
    about = {"bracket": (low, high), "support": support, **spectrum._cost(text)}
    if spectrum.tail is None:
        return Estimate(name=name, value=float(samples), exact=True, **about)
    rule = spectrum.rule_by_moments(lambda t: factor * found.f(t))
    stderr = max(_spread(each) for each in (samples, *sides))
    return Estimate(name=name, value=float(samples.mean()), stderr=stderr, samples=samples, rule=rule, **about)


# --------------------------------------------------------------------------------------------- within


def _spread(samples: Tensor) -> float:
    """Standard error of the mean over probes; NaN for one probe."""
    return float(samples.std() / math.sqrt(len(samples))) if len(samples) > 1 else math.nan


def _refuse_indefinite(spectrum: Spectrum) -> None:
    """Refuse a matrix unless it is positive by construction or its full spectrum is."""
    low, norm = float(spectrum.lambda_min.value), float(spectrum.spectral_norm.value)
    if spectrum.positive or (spectrum.tail is None and low >= -64 * spectrum.noise * norm):
        return
    raise ValueError(
        f"a Laplace posterior needs a positive semi-definite matrix, which this one is not known to be: its smallest "
        f"Ritz value is {low:.3g} ({spectrum.convention}); use ritz.spectrum(ritz.GGN(risk))"
    )


def _check(**numbers: float) -> None:
    """Refuse numbers outside of the range that their names allow."""
    for name, value in numbers.items():
        if name in ("dim", "num_samples"):
            good, wanted = value >= 1, "at least 1"
        elif name == "sigma":
            good, wanted = 0 < value < math.inf, "positive and finite"
        elif name == "weight_norm":
            good, wanted = 0 <= value < math.inf, "not negative and finite"
        else:
            good, wanted = math.isfinite(value), "finite"
        if not good:
            raise ValueError(f"{name} must be {wanted}, got {value}")
