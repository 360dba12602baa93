"""The result of Lanczos steps: a tridiagonal for each probe, and its quadrature rules, bounds and Ritz values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..storage import Result
from . import quadrature
from .quadrature import Quadrature


class Extremes(NamedTuple):
    """Smallest and largest Ritz value of each probe, and how far from an eigenvalue each can be; all (k,)."""

    smallest: Tensor
    smallest_residual: Tensor
    largest: Tensor
    largest_residual: Tensor


@dataclass(frozen=True, eq=False)
class Tridiagonal(Result):
    """The result of m steps for each probe: the tridiagonal, its residual and the length of the start row.

    The rules and bounds are those of the unit probe; multiply by `norms2` for a quadratic form of the probe itself.

    Attributes:
        alpha: Diagonals (k, m).
        beta: Off-diagonals and, in the last place, the residual (k, m).
        norms2: Squared norms of the start rows after projection (k,); 0 for a probe inside the locked space.
        eps: Precision of the rows of the run.

    Example:
        >>> one = torch.ones(1, 1)
        >>> T = Tridiagonal(alpha=2 * one, beta=one, norms2=4 * one[0])
        >>> T.quadratic_form(lambda t: t).tolist(), T.extremes().largest_residual.tolist()
        ([8.0], [1.0])
    """

    alpha: Tensor
    beta: Tensor
    norms2: Tensor
    eps: float = torch.finfo(torch.float64).eps

    def gauss(self) -> Quadrature:
        """The m-point Gauss rule of each unit probe."""
        return quadrature.gauss(self.alpha, self.beta[:, :-1])

    def radau(self, end: float | Tensor) -> Quadrature:
        """The Gauss-Radau rule of each unit probe with a node at `end`."""
        return quadrature.radau(self.alpha, self.beta, end)

    def mass_bounds(self, level: float | Tensor) -> tuple[Tensor, Tensor]:
        """Chebyshev-Markov-Stieltjes bounds on each unit probe's measure of (-inf, level], (k,) and (k,)."""
        return quadrature.mass_bounds(self.alpha, self.beta, level, eps=self.eps)

    def bounds(self, f: Callable[[Tensor], Tensor], lower_end: float | Tensor) -> tuple[Tensor, Tensor]:
        """Gauss-Radau (lower) and Gauss (upper) bounds on f like the logarithm; see `quadrature.bounds`."""
        return quadrature.bounds(self.alpha, self.beta, f, lower_end)

    def quadratic_form(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """|v|^2 sum_j w_j f(t_j), the estimate of v' f(A) v for each probe v, (k,); 0 for a zero probe."""
        return torch.where(self.norms2 > 0, self.norms2 * self.gauss().integrate(f), 0.0)

    def extremes(self) -> Extremes:
        """Extreme Ritz values with their residual norms beta_m |s_m|, s_m the last component of the eigenvector of T.

        [theta - residual, theta + residual] holds an eigenvalue. A zero probe has no Ritz value: its smallest is +inf
        and its largest -inf, so that it does not affect minima and maxima over probes.
        """
        nodes, vectors = quadrature.eigen_system(self.alpha, self.beta[:, :-1])
        exhausted = (self.beta == 0).any(-1)
        residual = torch.where(exhausted, 0.0, self.beta[:, -1].double())[:, None] * vectors[:, -1].abs()
        empty = self.norms2 == 0
        return Extremes(
            torch.where(empty, torch.inf, nodes[:, 0]),
            torch.where(empty, 0.0, residual[:, 0]),
            torch.where(empty, -torch.inf, nodes[:, -1]),
            torch.where(empty, 0.0, residual[:, -1]),
        )
