"""The theory of seed 004, *A Random Matrix Theory Approach to Damping in Deep Learning*: shrinkage, spikes and rates.

Equations 5, 8, 13, 15 and 17 to 20 and algorithm 1, on small matrices; equation 7 and appendix A are in `theory_noise`.
What batch Hessians of networks do is measured in `noise_spectrum`; here X is what the paper assumes. Every function
returns claims: what is printed, and beside what does not hold as printed, what does.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

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
MOMENTUM = 0.9


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


def steps() -> tuple[Claim, ...]:
    """Sections 2.1, 3.1, 3.2, 6 and 7.3: what a damped step is, and what Adam's is.

        section 2.1   printed   Adam's B has the diagonal sqrt(<g^2> + e) / <g>
                      true      sqrt(<g^2>) + e, applied to <g>, both averages divided by what they lack at first
        section 6     - (H + delta)^-1 g lowers a quadratic loss more than any other step of its length

    Example:
        >>> [claim.verdict for claim in steps()]
        ['refuted', 'holds', 'holds', 'holds', 'holds', 'holds', 'holds']
    """
    gradients = list(normal((6, 12), seed=5, name="gradients"))
    own = _adam_step(gradients)
    first, second = _averages(gradients)
    printed = 1e-3 * gradients[-1] * first / (second + 1e-8).sqrt()
    decayed = {kind: _decayed(kind, gradients) for kind in (torch.optim.SGD, torch.optim.Adam)}
    values = torch.logspace(-8, -0.01, 50, dtype=torch.float64)
    return (
        _exact(
            where="section 2.1", text="Adam's step is - alpha B^-1 g with the diagonal sqrt(<g^2> + e) / <g>: relative "
            "error", measured=deviation(-printed, own), evidence="The sixth step on random gradients, against "
            "torch.optim.Adam. <g> belongs in the place of g: as printed B changes sign with <g>.",
        ),
        _exact(
            where="section 2.1, corrected", text="Adam's step is - alpha <g> / (sqrt(<g^2>) + e): relative error",
            measured=deviation(-1e-3 * first / (second.sqrt() + 1e-8), own),
            evidence="The same step; <.> are averages divided by 1 - beta^k.",
        ),
        _claim(
            where="section 3.1",
            text="the largest rate of Adam, alpha / delta, can be orders of magnitude above SGD's: "
            "log10 of 0.0004 / 1e-8 over 0.01", expected=2.0, relation=">=", measured=math.log10(4e-4 / 1e-8 / 0.01),
            evidence="Rates and damping as in section 6.3 and table 1. It is reached where the curvature is 0.",
        ),
        _exact(
            where="section 3.2", text="for SGD L2 regularisation and weight decay are the same: relative difference of "
            "the weights after six steps", measured=decayed[torch.optim.SGD],
            evidence="Decay 0.1, w <- (1 - alpha decay) w before each step, without momentum.",
        ),
        _claim(
            where="section 3.2", text="for Adam L2 regularisation and weight decay differ: relative difference of the "
            "weights after six steps", expected=1e-4, relation=">=", measured=decayed[torch.optim.Adam],
            evidence="The same, torch.optim.Adam and AdamW. Which generalises better is not a question of algebra.",
        ),
        _claim(
            where="section 6", text="damping is a trust region: least change of a quadratic loss over 20,000 steps of "
            "the length of the damped one, less that of the damped one", expected=0.0, relation=">=",
            measured=_trust_region(), evidence="P = 6, H positive definite, delta = 0.3, random directions.",
        ),
        _claim(
            where="section 7.3", text="a square root reduces the impact of small eigenvalues: largest ratio of the "
            "rates 1 / (sqrt(lambda) + delta) and 1 / (lambda + delta) for lambda below 1", expected=1.0, relation="<=",
            measured=float(((values + 1e-4) / (values.sqrt() + 1e-4)).max()),
            evidence="lambda from 1e-8, delta = 1e-4.",
        ),
    )  # fmt: skip


def _averages(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Adam's averages of g and g^2 (decay rates 0.9 and 0.999), divided by what they lack at first."""
    found = []
    for rate, values in ((0.9, gradients), (0.999, [g.square() for g in gradients])):
        average = torch.zeros_like(values[0])
        for value in values:
            average = rate * average + (1 - rate) * value
        found.append(average / (1 - rate ** len(values)))
    return found[0], found[1]


def _adam_step(gradients: Sequence[Tensor]) -> Tensor:
    """The last step of torch.optim.Adam at rate 1e-3 on such gradients."""
    w = nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = torch.optim.Adam([w], lr=1e-3)
    for g in gradients:
        before, w.grad = w.detach().clone(), g.clone()
        optimizer.step()
    return w.detach() - before


def _decayed(kind: type[torch.optim.Optimizer], gradients: Sequence[Tensor]) -> float:
    """How far weights by L2 regularisation and by weight decay are apart, relative."""
    rate, decay = 1e-2, 0.1
    ends = []
    for coupled in (True, False):
        w = nn.Parameter(torch.ones_like(gradients[0]))
        optimizer = kind([w], lr=rate)  # type: ignore[call-arg]
        for g in gradients:
            w.grad = g + decay * w.detach() if coupled else g.clone()
            if not coupled:
                w.data.mul_(1 - rate * decay)
            optimizer.step()
        ends.append(w.detach())
    return deviation(ends[0], ends[1])


def _trust_region() -> float:
    """The least of g'd + d'Hd / 2 over random d of the length of the damped step, less that at the damped step."""
    H, g = _positive(6, seed=7), normal((6,), seed=7, name="gradient")
    step = -torch.linalg.solve(H + 0.3 * torch.eye(6, dtype=H.dtype), g)
    others = normal((20_000, 6), seed=8, name="steps")
    others = others / others.norm(dim=1, keepdim=True) * step.norm()
    changes = others @ g + ((others @ H) * others).sum(1) / 2
    return float(changes.min() - (step @ g + step @ H @ step / 2))


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


# --------------------------------------------------------------------------------------------------- section 8


def largest_rate() -> tuple[Claim, ...]:
    """Equations 17 to 19: the loss after a step of a preconditioned method, and the largest stable rate.

        printed   |B^-1/2 H B^-1/2| = max_i |phi_i'H phi_i| / eta_i          eta_i, phi_i the eigenpairs of B
        true      >=, with equality where B and H commute; so equation 19 is an upper bound all the same

    Example:
        >>> [claim.verdict for claim in largest_rate()]
        ['holds', 'refuted', 'refuted', 'holds', 'holds', 'refuted']
    """
    dim, alpha = 20, 0.1
    H, B = _positive(dim, seed=0), _positive(dim, seed=1)
    g = normal((dim,), seed=2, name="gradient")
    step = alpha * torch.linalg.solve(B, g)
    change = {sign: float(sign * step @ g + step @ H @ step / 2) for sign in (-1, 1)}
    half = _power(B, -0.5)
    inner = torch.eye(dim, dtype=torch.float64) - alpha / 2 * half @ H @ half
    printed = -alpha * float((half @ g) @ inner @ (half @ g))
    ratios = [_largest(_positive(dim, seed), _positive(dim, seed + 100)) for seed in range(20)]
    commuting = [_largest(_positive(dim, seed), _power(_positive(dim, seed), 0.5)) for seed in range(20)]
    text = "|B^-1/2 H B^-1/2| = max |phi'H phi| / eta: right side over left, {}"
    return (
        _exact(
            where="equation 17", text="the change of a quadratic loss under - alpha B^-1 grad L: relative error",
            measured=deviation(printed, change[-1]), evidence=f"P = {dim}, random positive definite H and B.",
        ),
        _exact(
            where="section 8, after equation 18", text="with delta w = alpha B^-1 grad L equation 17 follows: relative "
            "error", measured=deviation(printed, change[1]), evidence="The sign of the step is lost: the change that "
            "is printed there is that of a step uphill. With delta w = - alpha B^-1 grad L it follows.",
        ),
        _ratio(
            where="section 8, before equation 19", text=text.format("the largest of 20 draws"), tolerance=ROUND_OFF,
            measured=max(ratios), evidence=f"P = {dim}, from {min(ratios):.2f} to {max(ratios):.2f}. The right side "
            "takes the diagonal of a matrix, in the basis of B, for its norm.",
        ),
        _ratio(
            where="section 8, before equation 19, corrected",
            text=text.format("where B = H^1/2, the least of 20 draws"),
            tolerance=1e-9, measured=min(commuting), evidence="Where B and H commute the matrix is diagonal in that "
            "basis.",
        ),
        _claim(
            where="equation 19", text="the largest stable rate is bounded above by 2 / max (|phi'H phi| / eta): rate "
            "over bound, the largest of 20 draws", expected=1.0, relation="<=", measured=max(ratios),
            evidence="An entry on the diagonal is never larger than the norm, so the bound holds without the equality; "
            "how far the rate is below it depends on H and B.",
        ),
        _ratio(
            where="section 8", text="without a preconditioner, m <- 0.9 m + 0.1 g as in Adam has the largest stable "
            "rate of m <- 0.9 m + g as in SGD: ratio", tolerance=0.1, ours=True,
            measured=momentum_limit(1 - MOMENTUM) / momentum_limit(1.0), evidence="2 (1 + rho) / lambda_1 for a sum of "
            "gradients, 1 / (1 - rho) times as much for an average. So at damping 1 the printed 0.12 of Adam is 1.2 "
            "times, not 12 times, the 0.01 of SGD.",
        ),
    )  # fmt: skip


def _positive(dim: int, seed: int) -> Tensor:
    """Positive definite, with eigenvalues that differ."""
    A = normal((dim, 2 * dim), seed, name="factor")
    return A @ A.T / (2 * dim)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    power: Tensor = (vectors * values**exponent) @ vectors.T
    return power


def _largest(H: Tensor, B: Tensor) -> float:
    """max |phi'H phi| / eta over the norm of B^-1/2 H B^-1/2."""
    values, vectors = torch.linalg.eigh(B)
    half = _power(B, -0.5)
    forms = (vectors * (H @ vectors)).sum(0).abs() / values
    return float(forms.max() / _norm(half @ H @ half))


def _norm(H: Tensor) -> float:
    """The largest |eigenvalue|."""
    return float(torch.linalg.eigvalsh(H).abs().max())


def momentum_limit(share: float) -> float:
    """The largest stable rate of m <- 0.9 m + share g, w <- w - alpha m for the loss w^2 / 2, by bisection.

    Example:
        >>> round(momentum_limit(1.0), 6)  # 2 (1 + 0.9)
        3.8
    """
    low, high = 0.0, 100.0
    for _ in range(60):
        alpha = (low + high) / 2
        matrix = torch.tensor([[1 - alpha * share, -alpha * MOMENTUM], [share, MOMENTUM]], dtype=torch.float64)
        stable = float(torch.linalg.eigvals(matrix).abs().max()) < 1
        low, high = (alpha, high) if stable else (low, alpha)
    return low


def general_position() -> tuple[Claim, ...]:
    """Equation 20 and what follows: the diagonal of H in another basis beside its norm.

        printed   |H| / P <= max_i |phi_i'H phi_i| <= |H|, and of the order of |H| in general position
        true      the lower bound for H >= 0 alone; in general position the diagonal has o(|H|)

    Example:
        >>> [claim.verdict for claim in general_position()]
        ['holds', 'refuted', 'holds', 'refuted']
    """
    basis = torch.linalg.qr(normal((30, 30), seed=3, name="basis"))[0]
    H = wigner(30, seed=4)
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    positive = [_diagonal(_positive(30, seed)) * 30 for seed in range(20)]
    ratios = {dim: [_diagonal(wigner(dim, seed=seed)) for seed in range(8)] for dim in (100, 900)}
    small, large = (math.fsum(ratios[dim]) / 8 for dim in (100, 900))
    return (
        _exact(
            where="equation 20", text="sum_i phi_i'H phi_i = Tr H in any orthonormal basis: relative error",
            measured=deviation((basis * (H @ basis)).sum(), H.trace()), evidence="P = 30, a random basis.",
        ),
        _claim(
            where="equation 20", text="max_i |phi_i'H phi_i| >= |H| / P: ratio for H = [[0, 1], [1, 0]]", expected=1.0,
            relation=">=", measured=2 * _diagonal(swap), evidence="The sign <= is missing in print. The trace bounds "
            "the norm for H >= 0 alone; this H has the trace 0, and so has a symmetric random matrix in the mean.",
        ),
        _claim(
            where="equation 20, corrected", text="max_i |phi_i'H phi_i| >= |H| / P for H >= 0: the least ratio of 20 "
            "draws", expected=1.0, relation=">=", measured=min(positive), evidence="P = 30: the largest entry of the "
            "diagonal is Tr H / P or more, and Tr H is |H| or more.",
        ),
        _ratio(
            where="section 8, after equation 20", text="in general position max_i |phi_i'H phi_i| = xi |H| + o(1) with "
            "xi not 0: xi at P = 900 over xi at P = 100", tolerance=0.25, measured=large / small,
            evidence=f"Symmetric matrices of normal entries, 8 draws: {small:.3f} and {large:.3f}. Entries of the "
            "order of 1 beside a norm of 2 sqrt(P): xi falls as sqrt(log(P) / P). The diagonal tracks the norm where B "
            "knows the sharp directions, not in general position.",
        ),
    )  # fmt: skip


def _diagonal(H: Tensor) -> float:
    """The largest |entry| of the diagonal over the norm."""
    return float(H.diagonal().abs().max() / _norm(H))
