"""The theory of seed 004, *A Random Matrix Theory Approach to Damping in Deep Learning*: shrinkage and spikes.

Equations 5, 8, 13 and 15 and algorithm 1, on small matrices; what is said of steps and their rates is in
`theory_steps`, equation 7 and appendix A are in `theory_noise`.
What batch Hessians of networks do is measured in `noise_spectrum`; here X is what the paper assumes. Every function
returns claims: what is printed, and beside what does not hold as printed, what does.
"""

from functools import partial

import torch
from torch import Tensor

from ..results import Estimate
from ..rmt import wigner
from .base import Claim
from .over_seeds import mean
from .theory_networks import ROUND_OFF, deviation, normal

_claim = partial(Claim, paper="seed 004")
_exact = partial(_claim, expected=0.0, tolerance=ROUND_OFF)  # of a relative error
_ratio = partial(_claim, expected=1.0)

SPIKES = (10.0, 6.0, 4.0, 3.0, 2.0)  # of H_true, beside noise with Tr X^2 / P = 1
BATCHES = 8  # Hessians that algorithm 1 is given


def shrinkage() -> tuple[Claim, ...]:
    """Equations 5 and 13: damping sets the ratio of rates, and is shrinkage towards the identity and a smaller rate.

        section 6.1   R = alpha_flat / alpha_sharp = 1 + (lambda_1 - lambda_P) / delta, for lambda_P << delta;
                      always (lambda_1 + delta) / (lambda_P + delta)
        printed   1 / (lambda + delta) = beta / (beta lambda + 1 - beta),   beta = 1 / (1 + delta);
                  and before equation 15, beta^-1 = (1 + delta)^-1
        true      the first

    Example:
        >>> [claim.verdict for claim in shrinkage()]
        ['holds', 'holds', 'refuted', 'holds']
    """
    values = torch.logspace(-6, 3, 10, dtype=torch.float64)
    deltas = torch.logspace(-4, 1, 6, dtype=torch.float64)[:, None]
    beta = 1 / (1 + deltas)
    sides = 1 / (values + deltas), beta / (beta * values + 1 - beta)
    large, g = 1e3 * SPIKES[0], normal((len(SPIKES),), seed=0, name="gradient")
    step = g / (torch.tensor(SPIKES, dtype=torch.float64) + large)
    least = deltas / 1000  # lambda_P
    ratios = 1 + (SPIKES[0] - least) / deltas, (1 / (least + deltas)) / (1 / (SPIKES[0] + deltas))
    return (
        _claim(
            where="equation 5, section 6.1", text="R = 1 + (lambda_1 - lambda_P) / delta for lambda_P << delta: "
            "largest relative error at lambda_P = delta / 1000", expected=0.0, tolerance=2e-3,
            measured=float((ratios[0] / ratios[1] - 1).abs().max()), evidence="delta from 1e-4 to 10, lambda_1 = "
            f"{SPIKES[0]:g}. R is (lambda_1 + delta) / (lambda_P + delta), whatever lambda_P.",
        ),
        _exact(
            where="equation 13", text="1 / (lambda + delta) = beta / (beta lambda + 1 - beta), beta = 1 / (1 + delta): "
            "largest relative error", measured=float((sides[1] / sides[0] - 1).abs().max()),
            evidence="lambda from 1e-6 to 1000, delta from 1e-4 to 10. So damping delta at rate alpha is shrinkage at "
            "rate alpha beta, as the text says.",
        ),
        _exact(
            where="before equation 15", text="beta^-1 = (1 + delta)^-1: relative error at delta = 0.1",
            measured=deviation(1 / 1.1, 1.1), evidence="beta^-1 stands for beta: with beta = (1 + delta)^-1, as "
            "in equation 13, equation 15 follows.",
        ),
        _claim(
            where="section 7.2", text="at large delta the step is that of SGD with rate alpha / delta: |difference| / "
            "|step| at delta = 1000 lambda_1", expected=0.0, tolerance=1e-3, measured=deviation(step * large, g),
            evidence="The difference is lambda_1 / delta at most.",
        ),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- the best damping


def best_damping(true: Tensor, batch: Tensor) -> float:
    """The damping whose shrinkage beta H_batch + (1 - beta) I is nearest to H_true, in Tr of the squared difference.

    The difference is beta (H_batch - I) - (H_true - I), so beta is a projection, and delta = 1 / beta - 1.

    Example:
        >>> eye = torch.eye(2)
        >>> best_damping(0 * eye, torch.tensor([[0.5, 0.0], [0.0, -0.5]]))  # Tr X^2 / P is 0.25
        0.25
    """
    eye = torch.eye(len(true), dtype=true.dtype)
    M, T = batch - eye, true - eye
    return float((M * M).sum() / (M * T).sum()) - 1


def equation_15() -> tuple[Claim, ...]:
    """The best damping is Tr X^2 / P to leading order, for H_true of low rank; and it is in the units of its square.

        before    E(beta) = Tr (beta H_batch + (1 - beta) I - H_true)^2 / P ~ beta^2 Tr X^2 / P + (1 - beta)^2
        printed   delta = Tr X^2 / P
        true      delta = Tr X^2 / Tr (H_true - I)^2, which is that for low rank and large P

    Example:
        >>> [claim.verdict for claim in equation_15()]
        ['holds', 'holds', 'holds', 'holds', 'refuted', 'holds']
    """
    dim = 1600
    true, batch = _spiked(dim), wigner(dim, spikes=SPIKES)
    noise = float((batch - true).square().sum() / dim)
    best = best_damping(true, batch)
    off = [_shrunk_error(true, batch, beta) / (beta**2 * noise + (1 - beta) ** 2) - 1 for beta in (0.0, 0.25, 0.5, 1.0)]
    H = wigner(40, s2=0.01, seed=1) + torch.eye(40, dtype=torch.float64)  # positive definite
    g = normal((40,), seed=2, name="gradient")
    scales = (1.0, 10.0)  # a loss c times as large has c H, c g, and c^2 times the noise
    as_printed = [_newton(c * H, c * g, c**2 * 0.1) for c in scales]
    mended = [_newton(c * H, c * g, _towards_mean(c * H, c**2 * 0.1)) for c in scales]
    text = "in other units of the loss the step is the same, {}: |difference| / |step|, the loss times 10"
    beta, size = 0.5, 400
    X = wigner(size, seed=4)
    Y = beta * X + (1 - beta) * torch.eye(size, dtype=torch.float64)
    bulk, shifted = torch.linalg.eigvalsh(Y), torch.linalg.eigvalsh(Y + (beta - 1) * _spiked(size))
    moved = torch.searchsorted(shifted, bulk, right=True) - torch.arange(1, size + 1)
    return (
        _claim(
            where="before equation 14", text="an H_true of low rank leaves the bulk of (beta - 1) H_true + Y_beta as "
            "that of Y_beta: distance of the distribution functions", expected=0.0, tolerance=0.02,
            measured=float(moved.abs().max()) / size,
            evidence=f"P = {size}, rank {len(SPIKES)}, beta = {beta:g}. It is the rank over P at most.",
        ),
        _exact(
            where="after equation 14",
            text="the eigenvalues of Y_beta = beta X + (1 - beta) I are beta x + 1 - beta, as "
            "its density has it: largest relative error", measured=deviation(
                bulk, beta * torch.linalg.eigvalsh(X) + 1 - beta
            ), evidence=f"P = {size}, beta = {beta:g}, all eigenvalues x of X.",
        ),
        _claim(
            where="before equation 15", text="E(beta) = beta^2 Tr X^2 / P + (1 - beta)^2 for a spiked H_true: largest "
            "relative error", expected=0.0, tolerance=0.1, measured=max(map(abs, off)),
            evidence=f"P = {dim}, beta = 0, 1/4, 1/2 and 1. What is left out, (1 - beta)^2 (Tr H^2 - 2 Tr H) / P and a "
            "mean that is 0, goes to 0 for low rank and large P.",
        ),
        _ratio(
            where="equation 15", text="the best damping for a spiked H_true is Tr X^2 / P: ratio of this to the best",
            tolerance=0.1, measured=noise / best,
            evidence=f"P = {dim}, five spikes up to {SPIKES[0]:g}: {noise:.3f} and {best:.3f}. Exactly it is Tr X^2 / "
            "Tr (H_true - I)^2 in the mean over X; the denominator is P for low rank and large P.",
        ),
        _claim(
            where="equation 15", text=text.format("delta = Tr X^2 / P"), expected=0.0, tolerance=0.01, ours=True,
            measured=_between(*as_printed), evidence="delta goes with the square of the curvature that it is "
            "added to: for a loss ten times as large it damps ten times as much. The target I has no units either.",
        ),
        _exact(
            where="equation 15, corrected", text=text.format("delta = mu Tr X^2 / Tr (H - mu I)^2, mu = Tr H / P"),
            measured=_between(*mended), ours=True,
            evidence="The target mu I of Ledoit and Wolf has the units of H.",
        ),
    )  # fmt: skip


def _shrunk_error(true: Tensor, batch: Tensor, beta: float) -> float:
    """Tr of the squared difference of beta H_batch + (1 - beta) I from H_true, over P."""
    difference = beta * batch - true
    difference.diagonal().add_(1 - beta)
    return float(difference.square().sum() / len(true))


def _spiked(dim: int) -> Tensor:
    """H_true: spikes along the first unit vectors."""
    values = torch.zeros(dim, dtype=torch.float64)
    values[: len(SPIKES)] = torch.tensor(SPIKES, dtype=torch.float64)
    return values.diag()


def _towards_mean(H: Tensor, noise: float) -> float:
    """mu Tr X^2 / Tr (H - mu I)^2, mu = Tr H / P, from Tr X^2 / P."""
    mu = H.trace() / len(H)
    return float(mu * noise * len(H) / (H - mu * torch.eye(len(H), dtype=H.dtype)).square().sum())


def _newton(H: Tensor, g: Tensor, damping: float) -> Tensor:
    step: Tensor = torch.linalg.solve(H + damping * torch.eye(len(H), dtype=H.dtype), g)
    return step


def _between(step: Tensor, other: Tensor) -> float:
    return float((step - other).norm() / step.norm())


def algorithm_1() -> tuple[Claim, ...]:
    """Algorithm 1 estimates Tr X^2 / P from products of N batch Hessians with one random unit vector v.

        printed   sum_i |H_i v|^2 - (v'Hv)^2                        H the mean of the H_i
        true      (sum_i |H_i v|^2 - N |Hv|^2) / (N - 1)

    Example:
        >>> [claim.verdict for claim in algorithm_1()]
        ['refuted', 'refuted', 'holds']
    """
    dim, draws = 200, 24
    found: dict[str, list[float]] = {"printed": [], "divided": [], "mended": []}
    for draw in range(draws):
        v = normal((dim,), seed=draw, name="v")
        v = v / v.norm()
        products = torch.stack([wigner(dim, spikes=SPIKES, seed=BATCHES * draw + i) @ v for i in range(BATCHES)])
        squares, center = float(products.square().sum()), products.mean(0)
        found["printed"].append(squares - float(v @ center) ** 2)
        found["divided"].append(squares / BATCHES - float(v @ center) ** 2)
        found["mended"].append((squares - BATCHES * float(center @ center)) / (BATCHES - 1))
    signal = sum(spike**2 for spike in SPIKES) / dim
    seen = f"{draws} draws, N = {BATCHES}, P = {dim}, Tr X^2 / P = 1, Tr H^2 / P = {signal:.2f}."
    claim = partial(_ratio, tolerance=0.15)
    return (
        claim(
            where="algorithm 1", text="the algorithm as printed returns Tr X^2 / P: ratio",
            measured=_over(found["printed"]),
            evidence=f"{seen} The sum is not divided by N, and (v'Hv)^2 is of the order of 1 / P: it returns N times "
            "noise and signal together.",
        ),
        claim(
            where="algorithm 1", text="the algorithm with its sum divided by N returns Tr X^2 / P: ratio",
            measured=_over(found["divided"]),
            evidence=f"{seen} (v'Hv)^2 stands for |Hv|^2: the signal Tr H^2 / P is not subtracted.", ours=True,
        ),
        claim(
            where="algorithm 1, corrected", text="(sum |H_i v|^2 - N |Hv|^2) / (N - 1) is Tr X^2 / P: ratio",
            measured=_over(found["mended"]), evidence=f"{seen} Unbiased; the published code has 1 / N in place of "
            "1 / (N - 1).",
        ),
    )  # fmt: skip


def _over(values: list[float]) -> Estimate:
    return mean(values, name="mean over draws")


# --------------------------------------------------------------------------------------------------- theorem 1


def theorem_1() -> tuple[Claim, ...]:
    """Equation 8, the overlap of an eigenvector of a batch with that of H_true, and the edge that its proof names.

        printed   the semicircle ends roughly at sigma sqrt(P / B)       true   at 2 sigma sqrt(P / B)

    Where the first is the threshold of a spike, as equation 8 has it.

    Example:
        >>> [claim.verdict for claim in theorem_1()]
        ['refuted', 'holds', 'holds', 'holds']
    """
    dim, draws = 600, 6
    edges = [float(torch.linalg.eigvalsh(wigner(dim, seed=seed))[-1]) for seed in range(draws)]
    shares = {
        spike: [float(torch.linalg.eigh(wigner(dim, spikes=[spike], seed=seed))[1][0, -1].square())
                for seed in range(draws)]
        for spike in (2.0, 0.5)
    }  # fmt: skip
    seen = f"{draws} symmetric matrices of normal entries, P = {dim}, in units of sigma sqrt(P / B)."
    return (
        _ratio(
            where="theorem 1, proof", text="the semicircle ends at sigma sqrt(P / B): largest eigenvalue over that",
            tolerance=0.1, measured=_over(edges), evidence=f"{seen} That is the threshold above which a spike is seen.",
        ),
        _claim(
            where="theorem 1, proof, corrected",
            text="the semicircle ends at 2 sigma sqrt(P / B): largest eigenvalue, in "
            "units of sigma sqrt(P / B)", expected=2.0, tolerance=0.1, measured=_over(edges), evidence=seen,
        ),
        _claim(
            where="equation 8", text="|theta'phi|^2 = 1 - P sigma^2 / (B nu^2) at twice the threshold", expected=0.75,
            tolerance=0.05, measured=_over(shares[2.0]), evidence=seen,
        ),
        _claim(
            where="equation 8", text="|theta'phi|^2 = 0 at half the threshold", expected=0.0, tolerance=0.05,
            measured=_over(shares[0.5]), evidence=seen,
        ),
    )  # fmt: skip
