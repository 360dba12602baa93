"""The random matrices of seed 004: equation 7 and appendix A, on matrices that are what the paper assumes.

What the noise of networks is instead is measured in `noise_spectrum`. Every function returns claims: what is printed,
and beside what does not hold as printed, what does.
"""

import math
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from ..rmt import wigner
from .base import Claim
from .over_seeds import mean
from .theory_networks import ROUND_OFF, classify, dense_hessian, deviation, labels, mlp, normal

_claim = partial(Claim, paper="seed 004")
_exact = partial(_claim, expected=0.0, tolerance=ROUND_OFF)  # of a relative error


def semicircle() -> tuple[Claim, ...]:
    """Equation 7 and theorem 4: where the semicircle of a matrix of independent entries of variance s^2 ends.

        printed   equation 7, at sqrt(2) P; theorem 4, at 2 s            true   at 2 s sqrt(P), 2 s for X / sqrt(P)

    Example:
        >>> [claim.verdict for claim in semicircle()]
        ['refuted', 'refuted', 'holds', 'holds']
    """
    dim, draws = 400, 6
    spectra = [torch.linalg.eigvalsh(wigner(dim, seed=seed)) for seed in range(draws)]  # X / sqrt(P) for s = 1
    edges = [math.sqrt(dim) * float(values[-1]) for values in spectra]
    seen = f"{draws} symmetric matrices of independent normal entries of variance 1, P = {dim}."
    ratio = partial(_claim, expected=1.0, tolerance=0.1)
    return (
        ratio(
            where="equation 7", text="the density is as sqrt(2 P^2 - x^2): largest eigenvalue over sqrt(2) P",
            measured=mean(edge / (math.sqrt(2) * dim) for edge in edges),
            evidence=f"{seen} The edge is 2 sqrt(P) = {2 * math.sqrt(dim):g}; sqrt(2) P has entries of variance P / 2.",
        ),
        ratio(
            where="theorem 4", text="the density is sqrt(4 s^2 - x^2) / (2 pi s^2), s^2 the variance of an entry: "
            "largest eigenvalue over 2 s", measured=mean(edge / 2 for edge in edges),
            evidence=f"{seen} The law is that of X / sqrt(P), as section 4.1 has it: printed is X.",
        ),
        _claim(
            where="theorem 4, corrected",
            text="the density is that of X / sqrt(P): distance of the distribution functions",
            expected=0.02, relation="<=", measured=mean(map(_distance, spectra)), evidence=seen,
        ),
        _claim(
            where="section 4.1", text="the Tracy-Widom region is much narrower than the bulk, read as a tenth of it or "
            "less: distance of the largest eigenvalue from the edge, over the width of the bulk", expected=0.1,
            relation="<=", measured=mean(abs(float(values[-1]) - 2) / 4 for values in spectra),
            evidence=f"{seen} It goes as P^(-2/3).",
        ),
    )  # fmt: skip


def _distance(values: Tensor) -> float:
    """The largest distance of the distribution function of values (P,), ascending, from that of a semicircle on +-2."""
    x = values.clamp(-2, 2)
    law = 0.5 + x * (4 - x**2).clamp(min=0).sqrt() / (4 * math.pi) + (x / 2).asin() / math.pi
    steps = torch.arange(len(x) + 1, dtype=x.dtype) / len(x)
    return float(torch.maximum((steps[1:] - law).abs(), (law - steps[:-1]).abs()).max())


def convergence() -> tuple[Claim, ...]:
    """Lemma 3 and the end of appendix A: in which sense entries become normal, and what full dependence does.

        printed   X_jk / sqrt(1/B - 1/N) converges almost surely to a normal number
        true      in law: a sum over 4 B samples, over 2 sqrt(B), is as far from one over B as two such sums can be

    Where all entries are the same number g, E(X_ij^2 | the others) is g^2, and condition (i) has E |g^2 - 1| at any P.

    Example:
        >>> [claim.verdict for claim in convergence()]
        ['refuted', 'holds', 'holds', 'holds']
    """
    draws, size = 2000, 256
    samples = (normal((draws, 4 * size), seed=13, name="samples").square() - 1) / math.sqrt(2)  # skewed, variance 1
    small, large = (samples[:, :num].sum(1) / math.sqrt(num) for num in (size, 4 * size))
    law = torch.special.ndtr(large.sort().values)
    steps = torch.arange(draws + 1, dtype=law.dtype) / draws
    distance = float(torch.maximum((steps[1:] - law).abs(), (law - steps[:-1]).abs()).max())
    dim = 400
    entries = math.sqrt(dim) * wigner(dim, seed=15)
    lindeberg = float(entries[entries.abs() >= 0.2 * math.sqrt(dim)].square().sum()) / dim**2
    seen = f"{draws:,} entries, each a sum over B samples of a skewed law of variance 1, over sqrt(B)"
    return (
        _claim(
            where="lemma 3",
            text=f"entries converge almost surely: root mean square of the change from B = {size} to B "
            f"= {4 * size}", expected=0.0, tolerance=0.1, measured=float((large - small).square().mean().sqrt()),
            evidence=f"{seen}. The change does not get smaller: 1 at any B.",
        ),
        _claim(
            where="lemma 3, corrected", text=f"entries converge in law: distance of their distribution function from "
            f"the normal one at B = {4 * size}", expected=0.05, relation="<=", measured=distance,
            evidence=f"{seen}. That of as many normal numbers is {0.87 / math.sqrt(draws):.2f} on average.",
        ),
        _claim(
            where="appendix A",
            text="condition (i) cannot be met where all entries depend on each other completely: its "
            "left side where all are one number", expected=0.5, relation=">=",
            measured=float((normal((20_000,), seed=14).square() - 1).abs().mean()),
            evidence="E |g^2 - 1| for a normal g, 0.97, does not depend on P; the condition wants it to go to 0.",
        ),
        _claim(
            where="theorem 4, proof", text="normal entries meet condition (ii), Lindeberg's ratio goes to 0: its value "
            f"at P = {dim} and tau = 0.2", expected=0.0, tolerance=0.01, measured=lindeberg,
            evidence="Entries of variance 1, of which those beyond 0.2 sqrt(P) are counted. The closing words of the "
            "appendix take (ii) for (iii), and (iii) for (iv).",
        ),
    )  # fmt: skip


def fluctuations() -> tuple[Claim, ...]:
    """Equation A.3 and lemma 2: the noise of a batch of B out of N samples from their Hessians H_i, and its bound.

        (A.3)     X = (1/B - 1/N) sum of H_i in the batch - (1/N) sum of the others,
                  E X_jk^2 = (1/B - 1/N) Var, the variance of samples having N - 1 in its denominator
        lemma 2   printed   |X_jk| <= sqrt(P) L, L of the gradient of the empirical risk
                  true      |X_jk| <= 2 (1 - B/N) L, L of the gradient of every sample

    In the mean over samples curvature of either sign cancels, so its L bounds that of no batch; and the difference of
    two functions with constant L has the constant 2 L. By A.3, X = (1 - B/N) (H_batch - H_others).

    Example:
        >>> [claim.verdict for claim in fluctuations()]
        ['holds', 'holds', 'refuted', 'refuted', 'holds']
    """
    num, size = 6, 2
    X, y = normal((num, 2), seed=9), labels(num, 3, seed=9)
    risk = classify(mlp((2, 3, 3), seed=9), X, y)
    each = torch.stack([dense_hessian(risk.on((X[i : i + 1], y[i : i + 1]))) for i in range(num)])
    batches = [list(batch) for batch in combinations(range(num), size)]
    noise = torch.stack([dense_hessian(risk.on((X[b], y[b]))) for b in batches]) - dense_hessian(risk)
    inside = torch.stack([torch.tensor([float(i in b) for i in range(num)]).to(X) for b in batches])
    printed = torch.einsum("bi,ijk->bjk", (1 / size - 1 / num) * inside - (1 - inside) / num, each)
    variance = (1 / size - 1 / num) * each.var(0)
    largest = float(torch.linalg.eigvalsh(each).abs().max())
    seen = f"All {len(batches)} batches of {size} out of {num} samples, a ReLU network 2-3-3."
    dim, small = 9, 0.01  # Hessians (small +- 1) I: three of either sign
    one_sign = torch.eye(dim, dtype=torch.float64)
    at_most = partial(_claim, expected=1.0, relation="<=")
    return (
        _exact(
            where="equation A.3", text="the noise of a batch from the Hessians of samples: largest relative error",
            measured=deviation(printed, noise), evidence=seen,
        ),
        _exact(
            where="equation A.3", text="E X_jk^2 = (1/B - 1/N) Var: largest relative error of an entry",
            measured=deviation(noise.square().mean(0), variance),
            evidence=f"{seen} Var has N - 1 in its denominator; with N it would be {num / (num - 1):g} times less.",
        ),
        at_most(
            where="lemma 2, with the L of its proof", text="|X_jk| <= sqrt(P) L, L of the gradient of the empirical "
            "risk: ratio",
            measured=float(one_sign.max()) / (math.sqrt(dim) * small),
            evidence=f"P = {dim}, six samples with Hessians {small:g} I + I and {small:g} I - I, three of each, the "
            f"first three as a batch: X = I, and L = {small:g}, for the signs cancel in the mean.",
        ),
        at_most(
            where="lemma 2, proof", text="the difference of two gradients with constant L has the constant L: ratio",
            measured=float(torch.linalg.matrix_norm(one_sign - -one_sign, 2)),
            evidence="Hessians I and -I: the constant is 2 L.",
        ),
        at_most(
            where="lemma 2, corrected",
            text="|X_jk| <= 2 (1 - B/N) L, L of the gradient of every sample: largest ratio",
            measured=float(noise.abs().max()) / (2 * (1 - size / num) * largest), tolerance=ROUND_OFF, evidence=seen,
        ),
    )  # fmt: skip
