"""Gauss and Gauss-Radau rules from Lanczos tridiagonals, and the bounds they give.

m Lanczos steps from a unit vector v give a tridiagonal T with diagonal alpha_1 ... alpha_m and off-diagonal beta_1 ...
beta_{m-1}, and a residual beta_m. Its eigenvalues are the nodes, the squared first components of its eigenvectors the
weights of the m-point Gauss rule for the spectral measure of v:

    v' f(A) v  ~  sum_j w_j f(t_j),        exact for polynomials of degree <= 2m - 1

(Golub and Welsch 1969; Golub and Meurant 1994). Extend T by beta_m and any last diagonal entry: the rule of the
(m+1) x (m+1) tridiagonal is exact to degree 2m. If the entry is chosen such that one node has a given place, it is the
Gauss-Radau rule.

All functions accept any leading batch shape. A zero off-diagonal splits T into blocks. The first unit vector lies in
the leading block, whose rule is then exact (the Krylov space is invariant); whatever follows the zero is ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_EPS = torch.finfo(torch.float64).eps
_FAR = 100.0  # eigensolvers are accurate relative to the largest entry, so no entry may be larger than _FAR * |T|


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights of a rule for each probe; weights sum to one.

    Example:
        >>> rule = Quadrature(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5]))
        >>> float(rule.integrate(torch.square))
        5.0
    """

    nodes: Tensor  # (..., m) ascending
    weights: Tensor  # (..., m)

    def integrate(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """sum_j w_j f(t_j) over the last dimension, the estimate of v' f(A) v for each unit probe v."""
        # a node of weight exactly 0 is no part of the measure, even where f is infinite
        return torch.where(self.weights > 0, self.weights * f(self.nodes), 0.0).sum(-1)


def gauss(alpha: Tensor, beta: Tensor) -> Quadrature:
    """The Gauss rule of each tridiagonal.

    Args:
        alpha: Diagonals, shape (..., m).
        beta: Off-diagonals, shape (..., m - 1). If one is zero, the rule of the leading block is exact. The remaining
            nodes get weight zero and are placed at alpha_1, inside the spectrum, where f is finite.

    Raises:
        ValueError: If the shapes do not fit or an entry is not finite.

    Example:
        >>> rule = gauss(torch.tensor([2.0, 2.0]), torch.tensor([1.0]))  # eigenvalues 1 and 3
        >>> rule.nodes.tolist(), round(float(rule.integrate(torch.square)), 6)
        ([1.0, 3.0], 5.0)
    """
    nodes, vectors = eigen_system(alpha, beta)
    return Quadrature(nodes, vectors[..., 0, :] ** 2)


def radau(alpha: Tensor, beta: Tensor, end: float | Tensor) -> Quadrature:
    """The Gauss-Radau rule with one node at `end`: m + 1 nodes, exact to degree 2m (Golub 1973).

    The last entry is end + beta_m^2 / d_m, where d_1 = alpha_1 - end, d_j = alpha_j - end - beta_{j-1}^2 / d_{j-1} are
    the pivots of T - end I. If `end` is so near an eigenvalue of T that this entry is far larger than T, the rule with
    one node less is used instead, with alpha_m - d_m as its last entry: it also has a node at `end`, and is exact to
    degree 2m - 2.

    Args:
        alpha: Diagonals, shape (..., m).
        beta: Off-diagonals and, last, the residual beta_m, shape (..., m). If a beta is zero, the Gauss rule is exact
            and no node is placed.
        end: The node, a number or a tensor that broadcasts against the batch shape (and may extend it).

    Example:
        >>> rule = radau(torch.tensor([2.0]), torch.tensor([1.0]), 1.0)  # the measure of mean 2 and variance 1
        >>> rule.nodes.tolist(), [round(w, 6) for w in rule.weights.tolist()]
        ([1.0, 3.0], [0.5, 0.5])
    """
    if alpha.ndim < 1 or beta.shape != alpha.shape:
        raise ValueError(
            "expected alpha and beta of the same shape (..., m), with the residual as the last entry of beta, "
            f"got {tuple(alpha.shape)} and {tuple(beta.shape)}"
        )
    alpha, beta, level = _with_level(alpha, beta, end)
    pivot = _last_pivot(alpha, beta, level)
    residual = beta[..., -1]
    square = residual.square()
    far = square > _FAR * torch.maximum(scale(alpha, beta), level.abs()) * pivot.abs()
    exact = (beta == 0).any(-1)
    # (..., m + 1); a zero in the last off-diagonal drops the last node
    last = torch.where(far & ~exact, alpha[..., -1] - pivot, alpha[..., -1])
    added = level + square / torch.where(far | exact, 1.0, pivot)
    diagonal = torch.cat([alpha[..., :-1], last[..., None], added[..., None]], dim=-1)
    coupling = torch.cat([beta[..., :-1], torch.where(far, 0.0, residual)[..., None]], dim=-1)
    return gauss(diagonal, coupling)


def mass_bounds(alpha: Tensor, beta: Tensor, level: float | Tensor, *, eps: float = _EPS) -> tuple[Tensor, Tensor]:
    """Chebyshev-Markov-Stieltjes bounds on the part of each probe's spectral measure that lies below `level`.

    For the rule with a node at t (nodes t_j, weights w_j, exact to degree 2n - 2 for n nodes),

        sum_{t_j < t} w_j  <=  mu((-inf, t))  <=  mu((-inf, t])  <=  sum_{t_j <= t} w_j

    (Akhiezer 1965, chapter 2). No better bounds follow from the 2m + 1 moments that m steps determine.

    Args:
        alpha: Diagonals, shape (..., m).
        beta: Off-diagonals and the residual, shape (..., m).
        level: A number or a tensor that broadcasts against the batch shape.
        eps: Precision of the run that made the tridiagonal: a node within 64 eps |T| of the level counts as at it.

    Returns:
        (lower, upper), each of the batch shape and in [0, 1], since the probes are unit vectors.

    Example:
        >>> low, high = mass_bounds(torch.tensor([2.0]), torch.tensor([1.0]), 1.0)  # mean 2, variance 1
        >>> round(float(low), 6), round(float(high), 6)
        (0.0, 0.5)
    """
    _, _, at = _with_level(alpha, beta, level)
    near = max(64 * eps, 1024 * _EPS) * scale(alpha.double(), beta.double())
    # an eigenvalue within round-off of the level may lie on either side of it: each bound takes its own worse case
    under, over = radau(alpha, beta, at - near), radau(alpha, beta, at + near)
    lower = torch.where(under.nodes < (at - 1.5 * near)[..., None], under.weights, 0.0).sum(-1)
    upper = torch.where(over.nodes <= (at + 1.5 * near)[..., None], over.weights, 0.0).sum(-1)
    return lower.clamp(0.0, 1.0), upper.clamp(0.0, 1.0)


def bounds(
    alpha: Tensor, beta: Tensor, f: Callable[[Tensor], Tensor], lower_end: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on v' f(A) v for f with negative even and positive odd derivatives: log, square root.

    The error of the m-point Gauss rule has the sign of f^(2m), so Gauss is an upper bound; that of the Gauss-Radau rule
    with a node at or below the smallest eigenvalue has the sign of f^(2m+1), so it is a lower bound (Golub and Meurant
    1994, section 3).

    Args:
        alpha: Diagonals, shape (..., m).
        beta: Off-diagonals and the residual, shape (..., m).
        f: Vectorised function.
        lower_end: A lower bound of the spectrum of A; f must be finite there for a finite bound.

    Raises:
        ValueError: If `lower_end` lies above a Ritz value, and so above an eigenvalue.

    Example:
        >>> low, high = bounds(torch.tensor([2.0]), torch.tensor([1.0]), torch.log, 1.0)  # truth: log(1)/2 + log(3)/2
        >>> round(float(low), 4), round(float(high), 4)
        (0.5493, 0.6931)
    """
    top = gauss(alpha, beta[..., :-1])
    _, _, end = _with_level(alpha, beta, lower_end)
    smallest = top.nodes[..., 0]
    if bool((end > smallest + 1024 * _EPS * scale(alpha.double(), beta.double())).any()):
        raise ValueError(
            f"lower_end must be a lower bound of the spectrum, got {float(end.max()):.6g}, but a Ritz value is "
            f"{float(smallest.min()):.6g}; pass a smaller lower_end"
        )
    upper = top.integrate(f)
    lower = radau(alpha, beta, end).integrate(f)
    return torch.minimum(lower, upper), torch.maximum(lower, upper)  # an exact rule may cross itself by round-off


def eigen_system(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., m), ascending, and eigenvectors (..., m, m) of tridiagonals, cut at the first zero of beta.

    The diagonal behind the cut is replaced by alpha_1. These nodes have weight zero and, since alpha_1 lies between the
    extreme Ritz values, do not change the smallest and the largest node.

    Example:
        >>> eigen_system(torch.tensor([2.0, 9.0]), torch.tensor([0.0]))[0].tolist()
        [2.0, 2.0]
    """
    size = alpha.shape[-1] if alpha.ndim else 0
    if size < 1 or beta.shape != (*alpha.shape[:-1], size - 1):
        raise ValueError(
            f"expected alpha (..., m) and beta (..., m - 1), got {tuple(alpha.shape)} and {tuple(beta.shape)}"
        )
    if not bool(alpha.isfinite().all() & beta.isfinite().all()):
        raise ValueError(
            "the tridiagonal is not finite: a product returned NaN or infinity; check the loss and weights"
        )
    # always float64: small weights depend on the last digits of T
    alpha, beta = alpha.double(), beta.double()
    alive = (beta != 0).cumprod(-1).bool()  # (..., m - 1)
    tail = torch.where(alive, alpha[..., 1:], alpha[..., :1])
    beta = torch.where(alive, beta, 0.0)
    diagonal = torch.cat([alpha[..., :1], tail], dim=-1)
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(beta, -1) + torch.diag_embed(beta, 1)
    nodes, vectors = torch.linalg.eigh(matrix)
    return nodes, vectors


def scale(alpha: Tensor, beta: Tensor) -> Tensor:
    """An upper bound on the norm of each tridiagonal (Gershgorin), (...,); thresholds are relative to it."""
    largest = beta.abs().amax(-1) if beta.shape[-1] else torch.zeros_like(alpha[..., 0])
    return alpha.abs().amax(-1) + 2 * largest


def _with_level(alpha: Tensor, beta: Tensor, level: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """alpha, beta (..., m) and level (...,) in float64, broadcast to one batch shape."""
    at = torch.as_tensor(level, dtype=torch.float64, device=alpha.device)
    if not bool(at.isfinite().all()):
        raise ValueError(f"the level must be finite, got {level}")
    batch = torch.broadcast_tensors(alpha[..., 0], at)[0].shape  # broadcast_shapes would import sympy
    size = alpha.shape[-1]
    return alpha.double().expand(*batch, size), beta.double().expand(*batch, size), at.expand(batch)


def _last_pivot(alpha: Tensor, beta: Tensor, level: Tensor) -> Tensor:
    """d_m of T - level I = L D L', (...,); a vanishing pivot is replaced by one of size eps^2 |T|."""
    floor = (_EPS**2 * scale(alpha, beta)).clamp_min(1e-290)
    pivot = alpha[..., 0] - level
    for j in range(1, alpha.shape[-1]):
        pivot = torch.where(pivot.abs() < floor, floor, pivot)
        pivot = alpha[..., j] - level - beta[..., j - 1].square() / pivot
    return torch.where(pivot.abs() < floor, floor, pivot)
