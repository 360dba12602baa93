"""PAC-Bayes bounds on a 0-1 error, and the complexity measures made from them: closed forms, no network.

Let P be a prior that does not depend on the n samples. With probability 1 - delta, for all posteriors Q at once, the
classifier that draws its weights from Q for every prediction satisfies

    kl( empirical error || error )  <=  ( KL(Q || P) + ln(2 sqrt(n) / delta) ) / n

(Seeger 2002, with the constant of Maurer 2004). Inverting kl gives the certificate; Pinsker's inequality gives
McAllester's bound, which is never better.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...results import Estimate

MAGNITUDE_FLOOR = 1e-3  # epsilon of Jiang et al. (2020)


def kl_bernoulli(q: float, p: float) -> float:
    """kl(q || p) = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p)), in nats.

    Infinite if p is 0 or 1 and q is not equal to it.

    Example:
        >>> kl_bernoulli(0.5, 0.5), round(kl_bernoulli(0.0, 0.5), 6), kl_bernoulli(0.5, 1.0)
        (0.0, 0.693147, inf)
    """
    _check(q=q, p=p)
    return max(0.0, _term(q, p) + _term(1 - q, 1 - p))


def kl_inverse(q: float, c: float, *, upper: bool = True) -> float:
    """The largest p with kl(q || p) <= c, or with upper=False the smallest.

    Found by bisection to the last bit, rounded outwards.

    Args:
        q: An observed share, in [0, 1].
        c: Largest divergence, in nats; may be infinite.
        upper: Whether to return the bound above q or the bound below it.

    Example:
        >>> round(kl_inverse(0.0, 0.1), 6), round(1 - math.exp(-0.1), 6)
        (0.095163, 0.095163)
        >>> round(kl_inverse(0.1, 0.05), 6), round(kl_inverse(0.1, 0.05, upper=False), 6)
        (0.220079, 0.031278)
    """
    _check(q=q)
    if not c >= 0:
        raise ValueError(f"c must not be negative, got {c}")
    if c == 0:
        return q
    inner, outer = q, 1.0 if upper else 0.0  # kl <= c at the inner end; the result lies between the two
    while True:
        middle = (inner + outer) / 2
        if middle in (inner, outer):
            return outer
        if kl_bernoulli(q, middle) <= c:
            inner = middle
        else:
            outer = middle


def mcallester(error: float, kl: float, num_samples: int, delta: float = 0.05) -> float:
    """McAllester's bound on the error: error + sqrt( (KL + ln(2 sqrt(n) / delta)) / (2 n) ); vacuous if 1 or more.

    McAllester (1999) with the constant of Maurer (2004). Holds with probability 1 - delta.

    Args:
        error: Empirical 0-1 error, averaged over the posterior.
        kl: KL(posterior || prior) in nats.
        num_samples: n.
        delta: Probability with which the bound may fail.

    Example:
        >>> round(mcallester(0.1, 0.0, 100, 0.05), 6)  # 0.1 + sqrt(ln(400) / 200)
        0.273082
    """
    return error + math.sqrt(_complexity(error, kl, num_samples, delta) / 2)


def seeger(error: float, kl: float, num_samples: int, delta: float = 0.05) -> float:
    """The kl-inverse bound on the error: the largest p with n kl(error || p) <= KL + ln(2 sqrt(n) / delta).

    Seeger (2002) with the constant of Maurer (2004). Holds with probability 1 - delta and is never above `mcallester`.

    Args:
        error: Empirical 0-1 error, averaged over the posterior.
        kl: KL(posterior || prior) in nats.
        num_samples: n.
        delta: Probability with which the bound may fail.

    Example:
        >>> round(seeger(0.0, 0.0, 100, 0.05), 6)  # 1 - exp(-ln(400) / 100)
        0.058155
    """
    return kl_inverse(error, _complexity(error, kl, num_samples, delta))


def _complexity(error: float, kl: float, num_samples: int, delta: float) -> float:
    """(KL + ln(2 sqrt(n) / delta)) / n."""
    _check(error=error)
    if not kl >= 0:
        raise ValueError(f"kl, a divergence, must not be negative, got {kl}")
    if not num_samples >= 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    check_delta(delta=delta)
    return (kl + math.log(2 * math.sqrt(num_samples) / delta)) / num_samples


# ------------------------------------------------------------------------------------------ a prior


class Prior(NamedTuple):
    """A prior N(init, variance I) from the grid variance = c exp(-j / b), and what it costs.

    Attributes:
        j: Place in the grid, counted from 1.
        variance: c exp(-j / b).
        kl: KL(N(w, sigma^2 I) || N(init, variance I)) in nats.
        penalty: ln(pi^2 j^2 / 6), to be added to ln(1 / delta): the bound must hold for every j at once, and each j
            gets a share 6 / (pi^2 j^2) of delta.
    """

    j: int
    variance: float
    kl: float
    penalty: float


def best_prior(distance: float, dim: int, sigma: float, *, scale: float = 0.1, precision: int = 100) -> Prior:
    """The best variance of an isotropic prior, chosen after seeing the data from a grid that was fixed before.

    (Dziugaite and Roy 2017.)

        2 KL = P (sigma^2 / v - 1 - ln(sigma^2 / v)) + |w - init|^2 / v,     least at v = sigma^2 + |w - init|^2 / P

    Args:
        distance: |w - init|.
        dim: P.
        sigma: Standard deviation of the posterior.
        scale: c, the largest variance; 0.1 in the paper.
        precision: b, number of grid points per factor of e; 100 in the paper.

    Example:
        >>> prior = best_prior(0.0, 10**6, math.sqrt(0.1 * math.exp(-0.5)))  # the posterior is itself on the grid
        >>> prior.j, round(prior.kl, 6), round(prior.penalty, 4)
        (50, 0.0, 8.3217)
    """
    if not distance >= 0 or not dim >= 1:
        raise ValueError(f"distance must not be negative and dim must be at least 1, got {distance} and {dim}")
    if not sigma > 0 or not scale > 0 or not precision >= 1:
        raise ValueError(
            f"sigma and scale must be positive and precision at least 1, got {sigma}, {scale} and {precision}"
        )
    ideal = precision * math.log(scale / (sigma**2 + distance**2 / dim))
    j = torch.arange(1, max(1, math.ceil(ideal)) + 1, dtype=torch.float64)  # beyond the ideal j both terms grow
    variance = scale * (-j / precision).exp()
    excess = sigma**2 / variance - 1
    kl = ((dim * (excess - excess.log1p()) + distance**2 / variance) / 2).clamp(min=0)
    penalty = (math.pi**2 / 6 * j.square()).log()
    best = int((kl + penalty).argmin())
    return Prior(best + 1, float(variance[best]), float(kl[best]), float(penalty[best]))


# ------------------------------------------------------------------------- complexity measures of sigma


def pacbayes_flatness(sigma: Estimate | float) -> Estimate:
    """1 / sigma^2 for the largest noise at which training accuracy holds (Jiang et al. 2020, equations 53 and 61).

    Args:
        sigma: From `sigma_search`; if that used adaptive=True, this is the magnitude-aware measure.

    Example:
        >>> pacbayes_flatness(0.5).value
        4.0
    """
    return _of_sigma("PAC-Bayes flatness", sigma, lambda s: s**-2, "1 / sigma^2")


def pacbayes_init(sigma: Estimate | float, weights: Tensor, init: Tensor, num_samples: int) -> Estimate:
    """sqrt( (|w - init|^2 / (4 sigma^2) + log(n / sigma) + 10) / n )  (Jiang et al. 2020, equation 48).

    Args:
        sigma: From `sigma_search`.
        weights: w, flat (P,).
        init: The initial weights, flat (P,).
        num_samples: n.

    Example:
        >>> w = torch.tensor([3.0, 4.0])
        >>> round(pacbayes_init(0.5, w, torch.zeros(2), 100).value, 4)  # sqrt((25 + log 200 + 10) / 100)
        0.6348
    """
    moved = _moved(weights, init)
    return _isotropic("PAC-Bayes init", "||w - init||^2", sigma, float(moved.norm()), num_samples)


def pacbayes_orig(sigma: Estimate | float, weights: Tensor, num_samples: int) -> Estimate:
    """sqrt( (|w|^2 / (4 sigma^2) + log(n / sigma) + 10) / n )  (Jiang et al. 2020, equation 49).

    Args:
        sigma: From `sigma_search`.
        weights: w, flat (P,).
        num_samples: n.

    Example:
        >>> round(pacbayes_orig(0.5, torch.tensor([3.0, 4.0]), 100).value, 4)
        0.6348
    """
    return _isotropic("PAC-Bayes orig", "||w||^2", sigma, float(weights.double().norm()), num_samples)


def pacbayes_mag_init(sigma: Estimate | float, weights: Tensor, init: Tensor, num_samples: int) -> Estimate:
    """The magnitude-aware `pacbayes_init` (Jiang et al. 2020, equation 56), with d = w - init and epsilon = 1e-3.

        sqrt( ( sum_i log[ (epsilon^2 + (sigma^2 + 1) |d|^2 / P) / (epsilon^2 + sigma^2 d_i^2) ] / 4
                + log(n / sigma) + 10 ) / n )

    The sum is twice the KL of N(w, diag(epsilon^2 + sigma^2 d_i^2)) and the best isotropic prior around init.

    Args:
        sigma: From `sigma_search` with adaptive=True.
        weights: w, flat (P,).
        init: The initial weights, flat (P,).
        num_samples: n.

    Example:
        >>> w = torch.tensor([1.0, 1.0])
        >>> round(pacbayes_mag_init(1.0, w, torch.zeros(2), 100).value, 4)  # sqrt((log(2) / 2 + log 100 + 10) / 100)
        0.3866
    """
    return _magnitude("PAC-Bayes magnitude init", "w - init", sigma, _moved(weights, init), num_samples)


def pacbayes_mag_orig(sigma: Estimate | float, weights: Tensor, num_samples: int) -> Estimate:
    """The magnitude-aware `pacbayes_orig` (Jiang et al. 2020, equation 57): `pacbayes_mag_init` with d = w.

    Equation 57 has |w_i - init_i| in its denominator. The KL from which it follows, with a prior around 0 and noise in
    proportion to |w_i|, has |w_i| there, and so does this function.

    Args:
        sigma: From `sigma_search` with adaptive=True.
        weights: w, flat (P,).
        num_samples: n.

    Example:
        >>> round(pacbayes_mag_orig(1.0, torch.tensor([1.0, 1.0]), 100).value, 4)
        0.3866
    """
    return _magnitude("PAC-Bayes magnitude orig", "w", sigma, weights.double(), num_samples)


def _isotropic(name: str, what: str, sigma: Estimate | float, norm: float, num_samples: int) -> Estimate:
    text = f"sqrt(({what} / (4 sigma^2) + log(n / sigma) + 10) / n), n = {num_samples}"
    return _of_sigma(name, sigma, _root(lambda s: (norm / s) ** 2 / 4, num_samples), text)


def _magnitude(name: str, what: str, sigma: Estimate | float, moved: Tensor, num_samples: int) -> Estimate:
    squares, floor = moved.square(), MAGNITUDE_FLOOR**2

    def divergence(s: float) -> float:
        top = math.log(floor + (s**2 + 1) * float(squares.mean()))
        return float((top - (floor + s**2 * squares).log()).sum()) / 4

    text = f"sqrt((sum_i log[..] / 4 + log(n / sigma) + 10) / n) with d = {what}, n = {num_samples}"
    return _of_sigma(name, sigma, _root(divergence, num_samples), text)


def _root(divergence: Callable[[float], float], num_samples: int) -> Callable[[float], float]:
    """sqrt((divergence + log(n / sigma) + 10) / n); 0 if sigma is so large that the sum is negative."""
    if not num_samples >= 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    return lambda s: math.sqrt(max(0.0, divergence(s) + math.log(num_samples / s) + 10) / num_samples)


def _of_sigma(name: str, sigma: Estimate | float, f: Callable[[float], float], text: str) -> Estimate:
    """f(sigma), with the bracket mapped by f and the error by the delta method."""
    given = sigma if isinstance(sigma, Estimate) else Estimate(name="sigma", value=float(sigma), exact=True)
    value = float(given.value)
    if not 0 < value < math.inf:
        why = f" ({given.stop})" if isinstance(sigma, Estimate) else ""
        raise ValueError(f"sigma must be positive and finite, got {value:g}{why}")
    step = 1e-4
    slope = (f(value * (1 + step)) - f(value * (1 - step))) / (2 * step * value)
    ends = sorted(f(float(end)) for end in given.bracket) if given.bracket else None
    about: dict[str, Any] = {
        "exact": given.exact, "products": given.products, "seed": given.seed, "stop": given.stop, "rule": given.rule,
        "convention": f"{text}; sigma: {given.convention}" if given.convention else text,
    }  # fmt: skip
    return Estimate(
        name=name, value=f(value), stderr=abs(slope) * float(given.stderr),
        bracket=(ends[0], ends[1]) if ends else None, support=(0.0, math.inf), **about,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- within


def _moved(weights: Tensor, init: Tensor) -> Tensor:
    if weights.shape != init.shape:
        raise ValueError(f"weights and init must have equal shapes, got {tuple(weights.shape)} and {tuple(init.shape)}")
    return weights.double() - init.to(weights.device).double()


def _term(a: float, b: float) -> float:
    """a ln(a / b), accurate to the last digits if a is near b."""
    if a == 0:
        return 0.0
    if b == 0:
        return math.inf
    return a * (math.log1p((a - b) / b) if b / 2 < a < 2 * b else math.log(a) - math.log(b))


def _check(**shares: float) -> None:
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {value}")


def check_delta(**deltas: float) -> None:
    """Refuse probabilities of failure that are not between 0 and 1.

    Example:
        >>> check_delta(delta=1.0)
        Traceback (most recent call last):
        ValueError: delta must lie strictly between 0 and 1, got 1.0
    """
    for name, value in deltas.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")
