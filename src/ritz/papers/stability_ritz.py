"""Theorem 2 of seed 000 on the Hessians of trained networks: how near the extreme Ritz values are after m steps.

With theta_1 the largest Ritz value after m steps from a unit vector q, phi the angle between q and the eigenvector z_1
(Golub and Van Loan, theorem 10.1.2; the paper's theta_1 in tan is this angle, its k the m),

    lambda_1 >= theta_1 >= lambda_1 - (lambda_1 - lambda_n) tan(phi)^2 / c_{m-1}(1 + 2 rho)^2
    rho = (lambda_1 - lambda_2) / (lambda_2 - lambda_n),    c_k Chebyshev's polynomial

For the smallest the theorem holds with the other end's angle and gap ("smallest"). Equation 17 has those of lambda_1
there too, and lambda_m, the m-th largest, in place of lambda_n. As printed it holds for every matrix, for Ritz values
interlace: theta_m <= lambda_m (`theory_sharpness.extreme_ritz_value`). With lambda_n for lambda_m it is a statement
that can fail ("smallest as printed", the name that the files have). The truth is from eigenpairs whose residual is far
below all differences.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..krylov.eigen import top_eigenpairs
from ..krylov.lanczos import lanczos
from ..operators.base import Operator
from ..operators.hessian import Hessian
from ..risk import Risk
from . import mnist_mlp, softmax
from .data.images import Data
from .experiment import Rows

ROUND_OFF = 1e-9  # of lambda_1: what counts as a breach is beyond it
TOLERANCE = 1e-8  # residual of the true eigenpairs, of lambda_1: their values err by its square
NUM_STARTS = 4


def study(data: Data, seeds: Sequence[int], num_steps: int, epochs: int, num_images: int = 1000) -> Rows:
    """Theorem 2 on a trained MLP and softmax regression of every seed, in float64."""
    X, y = data[0][:num_images].double(), data[1][:num_images]
    rows: Rows = []
    for network, make in (("MLP", mnist_mlp.make_network), ("softmax", softmax.make_network)):
        trained = mnist_mlp.train_many((X, y), seeds, (0.0,), epochs=epochs, lr=0.02, make=make)
        risk = Risk(make(0, X.dtype).to(X.device), nn.CrossEntropyLoss(), (X, y), batch_size=1000)
        for seed in seeds:
            singular = network == "softmax"  # a shift of all logits changes nothing
            found = extremes(Hessian(risk.at(trained.params(seed, 0.0))), num_steps, singular=singular)
            rows.append({"kind": "ritz", "network": network, "seed": seed, "images": len(X), **found})
    return rows


def extremes(
    operator: Operator, num_steps: int, num_starts: int = NUM_STARTS, *, singular: bool = False
) -> dict[str, Any]:
    """Ritz values of `num_starts` random vectors after 1 to `num_steps` steps, beside their bounds.

    Args:
        operator: The matrix.
        num_steps, num_starts: As said.
        singular: The matrix is known to have no negative eigenvalue, and 0 more than once: theorem 2 says nothing of
            the smallest Ritz value then, and nothing is counted.

    Returns:
        The breaches counted over all vectors and steps, and the curves of the first vector, errors over lambda_1.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([9.0, 4.0, 2.0, 1.0, 0.5, -3.0])).double())
        >>> found = extremes(A, num_steps=4)
        >>> found["above"], found["below"], found["lambda"][0]
        (0, 0, 9.0)
    """
    top = top_eigenpairs(operator, 2, which="largest", tol=TOLERANCE)
    bottom = None if singular else top_eigenpairs(operator, 2, which="smallest", tol=TOLERANCE)
    lowest = (0.0, 0.0) if bottom is None else bottom.values.flip(0).tolist()
    ends = [*top.values.tolist(), *lowest]  # lambda_1, lambda_2, lambda_{n-1}, lambda_n
    starts = operator.probes(range(num_starts), seed=0, distribution="normal")
    T = lanczos(operator, starts, num_steps, reorthogonalize="full").tridiagonal()
    blocks = [_eigenvalues(T.alpha[:, :m], T.beta[:, : m - 1]) for m in range(1, num_steps + 1)]
    largest = torch.stack([values[:, -1] for values in blocks], 1)  # (starts, steps)
    smallest = torch.stack([values[:, 0] for values in blocks], 1)
    unit = starts / starts.norm(dim=1, keepdim=True)
    up = bound((unit @ top.vectors[:, 0]).cpu(), ends[0], ends[1], ends[3], num_steps)
    slack = ROUND_OFF * abs(ends[0])
    found: dict[str, Any] = {
        "lambda": [float(f"{x:.7g}") for x in ends], "residual": float(top.residuals.max()),
        "checks": largest.numel(),
        "above": int((largest > ends[0] + slack).sum()),
        "below": int((largest < ends[0] - up - slack).sum()),
        "error": _shown((ends[0] - largest[0]) / ends[0]), "allowed": _shown(up[0] / ends[0]),
        "steps to 1 %": _first((ends[0] - largest) / ends[0]), "steps to 1 %, allowed": _first(up / ends[0]),
    }  # fmt: skip
    if bottom is not None:
        down = bound((unit @ bottom.vectors[:, 0]).cpu(), ends[3], ends[2], ends[0], num_steps)
        own = (smallest < ends[3] - slack) | (smallest > ends[3] + down + slack)
        found |= {"smallest": int(own.sum()), "smallest as printed": int((smallest > ends[3] + up + slack).sum())}
    return found


def bound(cosine: Tensor, end: float, next_: float, other: float, num_steps: int) -> Tensor:
    """|end - other| tan(phi)^2 / c_{m-1}(1 + 2 rho)^2 for m = 1 to `num_steps`, (starts, steps).

    Example:
        >>> bound(torch.tensor([0.6]), end=3.0, next_=2.0, other=0.0, num_steps=2)  # 3 (4 / 3)^2, then / 2^2
        tensor([[5.3333, 1.3333]])
    """
    tangent = (1 - cosine.square()).clamp(min=0) / cosine.square()
    gap = abs(next_ - other)
    rho = abs(end - next_) / gap if gap > 0 else math.inf
    powers = torch.arange(num_steps, dtype=cosine.dtype, device=cosine.device)
    growth = torch.cosh(powers * math.acosh(1 + 2 * rho)) if math.isfinite(rho) else torch.pow(math.inf, powers)
    found: Tensor = abs(end - other) * tangent[:, None] / growth.square()
    return found


def _eigenvalues(alpha: Tensor, beta: Tensor) -> Tensor:
    """Of tridiagonal matrices (starts, m), ascending."""
    if alpha.shape[1] == 1:
        return alpha
    T = torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    values: Tensor = torch.linalg.eigvalsh(T)
    return values


def _first(errors: Tensor, level: float = 0.01) -> int:
    """After how many steps all vectors are within `level`; one more than there are where they never are."""
    within = (errors <= level).all(0)
    return int(within.int().argmax()) + 1 if bool(within.any()) else len(within) + 1


def _shown(values: Tensor) -> list[float]:
    """Four digits, and nothing below round-off."""
    return [float(f"{max(x, 1e-16):.4g}") for x in values.tolist()]
