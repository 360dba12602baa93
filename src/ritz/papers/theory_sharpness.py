"""Sharpness as seed 000 measures it: equation 2, after Keskar et al.; the penalty, section 4; Lanczos, appendix B.

Every function returns claims, as in `theory_flatness`.
"""

from functools import partial

import torch
from torch import Tensor, nn

from ..risk import Risk
from .base import Claim
from .stability_ritz import bound
from .theory_networks import (
    ROUND_OFF,
    classify,
    dense_hessian,
    deviation,
    labels,
    mlp,
    normal,
    sizes_of,
)

_claim = partial(Claim, paper="seed 000")


def _minimum(seed: int) -> Risk:
    """Softmax regression with nine weights at its minimum, by Newton's method; labels know nothing of the inputs."""
    risk = classify(mlp((2, 3), seed), normal((20, 2), seed), labels(20, 3, seed))
    risk = risk.at(torch.zeros(risk.dim, dtype=torch.float64))
    for _ in range(8):
        step = torch.linalg.pinv(dense_hessian(risk), rtol=1e-10) @ risk.gradient()
        risk = risk.at(risk.space.join(risk.params()) - step)
    return risk


def _rise(risk: Risk, radius: float) -> float:
    """The largest L(w + d) - L(w) over |d| <= radius, by ascent from both ends of the first eigenvector."""
    flat, loss = risk.space.join(risk.params()), risk.loss()
    first = torch.linalg.eigh(dense_hessian(risk))[1][:, -1]
    highest = loss
    for d in (radius * first, -radius * first):
        for _ in range(5):
            slope = risk.at(flat + d).gradient()
            d = radius * slope / slope.norm()
        highest = max(highest, risk.at(flat + d).loss())
    return highest - loss


def keskar() -> tuple[Claim, ...]:
    """Equation 2: the sharpness of Keskar et al. (2016) is at most k(e) lambda_1, and proportional to lambda_1.

        phi = max of L(w + d) - L(w), over 1 + L(w)
        in a ball |d| <= e                 phi ~ lambda_1 e^2 / (2 (1 + L)), Dinh et al. (2017), at a minimum
        in a box |d_i| <= e (|w_i| + 1)    phi ~ max over signs s of s'BHBs e^2 / (2 (1 + L)), B = diag(|w_i| + 1)
                                               <= k(e) lambda_1,   k = e^2 Tr B^2 / (2 (1 + L))

    The box is that of Keskar et al., with all directions. There phi is no multiple of lambda_1: it depends on how the
    eigenvectors lie to the corners. And where the gradient is not 0 it leads: phi is of the order e.

    Example:
        >>> [claim.verdict for claim in keskar()]
        ['holds', 'refuted', 'holds', 'refuted']
    """
    radius, minima = 1e-3, [_minimum(seed) for seed in range(3)]
    away = classify(mlp((2, 3), seed=0), normal((20, 2), seed=0), labels(20, 3, seed=0))
    balls = [2 * _rise(risk, radius) / (sizes_of(risk).spectral * radius**2) for risk in (*minima, away)]
    boxes = [_box(risk) for risk in minima]
    seen = f"Softmax regression with {away.dim} weights at the minima of 3 data sets"
    told = ", ".join(f"{x:.3f}" for x in boxes)
    ball = partial(_claim, where="equation 2, after Dinh et al.", expected=1.0, tolerance=0.01)
    return (
        ball(
            text="phi ~ lambda_1 e^2 / (2 (1 + L)) in a ball, at a minimum: smallest ratio of the two",
            measured=min(balls[:-1]), evidence=f"{seen}, e = {radius:g}; the largest is {max(balls[:-1]):.4f}.",
        ),
        ball(
            text="phi ~ lambda_1 e^2 / (2 (1 + L)) in a ball, where the gradient is not 0: ratio of the two",
            measured=balls[-1], ours=True,
            evidence=f"At random weights, e = {radius:g}: phi is of the order e |g|, far above e^2.",
        ),
        _claim(
            where="equation 2", text="phi <= k(e) lambda_1, k = e^2 sum (|w_i| + 1)^2 / (2 (1 + L)), in a box: largest "
            "ratio", expected=1.0, relation="<=", measured=max(boxes), tolerance=ROUND_OFF,
            evidence=f"{seen}, to second order: {told}.",
        ),
        _claim(
            where="section 1", text="phi is proportional to lambda_1, in a box: largest over smallest phi / k lambda_1",
            expected=1.0, measured=max(boxes) / min(boxes), tolerance=0.05,
            evidence=f"{seen}: {told}. It is in a ball; to the corners of a box eigenvectors lie as they may.",
        ),
    )  # fmt: skip


def _box(risk: Risk) -> float:
    """phi over k(e) lambda_1 in the box, to second order: a convex form is largest at a corner."""
    widths = risk.space.join(risk.params()).abs() + 1
    corners = widths * (2 * torch.cartesian_prod(*[torch.arange(2)] * risk.dim).double() - 1)  # (2^P, P)
    H = dense_hessian(risk)
    return float(((corners @ H) * corners).sum(1).max() / (widths.square().sum() * torch.linalg.eigvalsh(H)[-1]))


def penalised() -> tuple[Claim, ...]:
    """Section 4: L2 regularisation adds g to each eigenvalue, H -> H + g I, so that H is taken without it.

    So it is for the penalty g |w|^2 / 2 at the same weights, on all of them.

    Example:
        >>> [claim.verdict for claim in penalised()]
        ['holds']
    """
    decay = 5e-4
    model, data = mlp((4, 5, 3), seed=0), (normal((20, 4), seed=1), labels(20, 3, seed=2))

    def with_penalty(network: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        square = torch.stack([p.square().sum() for p in network.parameters()]).sum()
        num = float(len(batch[0]))
        loss = nn.functional.cross_entropy(network(batch[0]), batch[1], reduction="sum")
        return loss + num * decay / 2 * square, num

    plain, shifted = (
        torch.linalg.eigvalsh(dense_hessian(risk))
        for risk in (classify(model, *data), Risk(model, data=data, batch_loss=with_penalty))
    )
    return (
        _claim(
            where="section 4",
            text="L2 regularisation adds g to every eigenvalue, H -> H + g I: largest relative error of an "
            "eigenvalue", expected=0.0,
            tolerance=ROUND_OFF, measured=deviation(shifted, plain + decay),
            evidence=f"A ReLU network with {len(plain)} weights, g = {decay:g}, lambda_1 = {float(plain[-1]):.3g}.",
        ),
    )  # fmt: skip


def extreme_ritz_value() -> tuple[Claim, ...]:
    """Equation 17: how near the smallest Ritz value is to the smallest eigenvalue after m Lanczos steps.

        printed   theta_m <= lambda_m + (lambda_1 - lambda_n) (tan phi / c_{m-1}(1 + 2 rho))^2
        true      theta_m <= lambda_n + the same, phi and rho those of lambda_n in place of lambda_1

    lambda_m is the m-th largest eigenvalue, and theta_m <= lambda_m for every matrix: Ritz values interlace. So the
    printed bound holds with or without its second term, and says nothing of lambda_n. (Printed, too, is the tangent of
    theta_1, which is a Ritz value; it is read as that of the angle.)

    Example:
        >>> [claim.verdict for claim in extreme_ritz_value()]
        ['holds', 'holds', 'holds']
    """
    risk = classify(mlp((4, 5, 3), seed=0, activation=nn.Tanh), normal((20, 4), seed=1), labels(20, 3, seed=2))
    H, steps = dense_hessian(risk), 12
    values, vectors = torch.linalg.eigh(H)
    values, vectors = values.flip(0), vectors.flip(1)  # the largest first
    starts = normal((20, risk.dim), seed=8, name="starts")
    starts = starts / starts.norm(dim=1, keepdim=True)
    smallest = torch.stack([_smallest_ritz_values(H, start, steps) for start in starts])  # (starts, steps)
    one, two, last_but_one, last = (float(values[place]) for place in (0, 1, -2, -1))
    top = bound(starts @ vectors[:, 0], one, two, last, steps)
    bottom = bound(starts @ vectors[:, -1], last, last_but_one, one, steps)
    slack = ROUND_OFF * one
    told = f"{smallest.numel()} Ritz values of a tanh network with {risk.dim} weights, 20 starts, 1 to {steps} steps."
    breaches = {
        "printed": smallest > values[:steps] + top + slack,
        "bare": smallest > values[:steps] + slack,
        "mended": (smallest < last - slack) | (smallest > last + bottom + slack),
    }
    count = {key: float(where.sum()) for key, where in breaches.items()}
    claim = partial(_claim, expected=0.0)
    return (
        claim(
            where="equation 17", text="theta_m <= lambda_m + (lambda_1 - lambda_n) tan^2 / c^2: how often violated",
            measured=count["printed"], evidence=f"{told} It holds for every matrix, and says nothing.",
        ),
        claim(
            where="equation 17", text="theta_m <= lambda_m, without the second term: how often violated",
            measured=count["bare"], ours=True, evidence=f"{told} Ritz values interlace.",
        ),
        claim(
            where="equation 17, corrected", measured=count["mended"], evidence=told,
            text="lambda_n <= theta_m <= lambda_n + (lambda_1 - lambda_n) tan^2 / c^2, angle and gap of lambda_n: how "
            "often violated",
        ),
    )  # fmt: skip


def quadrature() -> tuple[Claim, ...]:
    """Theorem 3 and equations 16 and 18: Ritz values as nodes of a Gauss rule, and moments by random vectors.

        (16)  v'f(H)v = sum_j rho_j f(t_j) + R[f], R[f] = 0 for polynomials: of degree m, 2 m - 1 in truth
        (18)  printed: E v'H^m v = Tr H^m = sum_i lambda_i           true: sum_i lambda_i^m

    Example:
        >>> [claim.verdict for claim in quadrature()]
        ['holds', 'holds', 'refuted', 'holds', 'refuted']
    """
    risk = classify(mlp((2, 3), seed=3), normal((20, 2), seed=3), labels(20, 3, seed=3))
    H, steps = dense_hessian(risk), 3
    v = normal((risk.dim,), seed=9, name="start")
    nodes, weights = _gauss_rule(H, v / v.norm(), steps)
    errors = []
    for power in range(2 * steps + 1):
        truth = v @ torch.linalg.matrix_power(H, power) @ v / (v @ v)
        errors.append(deviation((weights * nodes**power).sum(), truth))
    signs = 2 * torch.cartesian_prod(*[torch.arange(2)] * risk.dim).double() - 1  # every one, (2^P, P)
    means = {m: float(((signs @ torch.linalg.matrix_power(H, m)) * signs).sum(1).mean()) for m in (1, 2, 3)}
    values = torch.linalg.eigvalsh(H)
    powers = {m: float((values**m).sum()) for m in means}
    told = f"Softmax regression with {risk.dim} weights"
    rule, mean = f"{told}, {steps} Lanczos steps from one vector.", f"{told}, all {len(signs)} vectors of signs."
    exact = partial(_claim, expected=0.0, tolerance=ROUND_OFF)
    return (
        exact(
            where="theorem 3", text="nodes and weights from T_m match the moments v'H^k v, k up to m: largest relative "
            "error", measured=max(errors[: steps + 1]), evidence=rule,
        ),
        exact(
            where="theorem 3", text="nodes and weights from T_m match the moments v'H^k v, k up to 2 m - 1, as a Gauss "
            "rule does: largest relative error", ours=True,
            measured=max(errors[:-1]), evidence=rule,
        ),
        exact(
            where="equation 16", text="nodes and weights from T_m match the moment v'H^k v, k = 2 m: relative error",
            measured=errors[-1], ours=True,
            evidence=f"{rule} There R[f] begins.",
        ),
        exact(
            where="equation 18", text="E v'H^m v = Tr H^m for random signs v, m = 1, 2, 3: largest relative error",
            measured=max(deviation(means[m], powers[m]) for m in means), evidence=mean,
        ),
        exact(
            where="equation 18", text="Tr H^m = sum of lambda_i: relative error at m = 2",
            measured=deviation(powers[1], powers[2]), evidence=f"{mean} lambda_i stands for lambda_i^m: it is so at "
            "m = 1 alone.",
        ),
    )  # fmt: skip


def _gauss_rule(H: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues of T_m and squares of the first entries of its eigenvectors, T_m from an orthonormal Krylov basis."""
    basis = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(H, k) @ start for k in range(steps)], 1))[0]
    nodes, vectors = torch.linalg.eigh(basis.T @ H @ basis)
    return nodes, vectors[0].square()


def _smallest_ritz_values(H: Tensor, start: Tensor, steps: int) -> Tensor:
    """Of the Krylov spaces of 1 to `steps` vectors, each orthogonalised against all before it."""
    basis = start[:, None]
    found = []
    for _ in range(steps):
        found.append(torch.linalg.eigvalsh(basis.T @ H @ basis)[0])
        new = H @ basis[:, -1]
        for _ in range(2):
            new = new - basis @ (basis.T @ new)
        basis = torch.cat([basis, (new / new.norm())[:, None]], 1)
    return torch.stack(found)
