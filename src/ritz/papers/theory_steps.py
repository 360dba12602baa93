"""What seed 004 says of a step: that of a damped method, that of Adam, and how large the rate may be.

Sections 2.1, 3, 6 and 7.3, and section 8 with equations 17 to 20, on small matrices. Every function returns claims:
what is printed, and beside what does not hold as printed, what does.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..rmt import wigner
from .base import Claim
from .theory_networks import ROUND_OFF, deviation, normal

_claim = partial(Claim, paper="seed 004")
_exact = partial(_claim, expected=0.0, tolerance=ROUND_OFF)  # of a relative error
_ratio = partial(_claim, expected=1.0)

MOMENTUM = 0.9


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
