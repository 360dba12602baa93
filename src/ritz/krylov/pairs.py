"""Eigenpairs as a result: the order in which they are reported, their residuals and intervals."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .. import stopping
from ..intervals import Exact, IntervalRule, Magnitude, RandomStart
from ..operators.algebra import Metered
from ..results import Estimate, entitle, new_axes
from ..space import row_norms
from ..storage import Result
from .lanczos import underflows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Which = Literal["largest", "smallest", "both", "magnitude"]

_SHOWN = 6  # values in a repr
_EXACT = Exact()
_CUT = (stopping.MAX_PRODUCTS, stopping.STAGNATION, stopping.UNDERFLOW)  # the search ended before it had found all
_ORDERS = {
    "largest": "largest first", "smallest": "smallest first", "both": "from the largest, then to the smallest",
    "magnitude": "largest in size first",
}  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class EigenPairs(Result):
    """Eigenvalues and eigenvectors, with their residuals.

    Attributes:
        values: Rayleigh quotients (k,), float64: "largest" and "both" descending, "smallest" ascending, "magnitude" by
            descending |value|.
        vectors: Orthonormal columns (dim, k), on the operator's device.
        residuals: |A u - value u| (k,), float64, each from a product of its own; [value - residual, value + residual]
            holds an eigenvalue.
        converged: Which residuals are within tolerance (k,), bool.
        which: Which end was requested.
        products: Matrix-vector products spent.
        seed: Seed of the start block.
        stop: "converged", "exact" (the whole matrix was diagonalised), or a reason of `ritz.stopping`: "noise floor",
            "stagnation", "underflow", "max_products". If the run was stopped, or a product was not finite, it says so;
            the residuals are then those of the recurrence.
        noise: Measured error of one product relative to the spectral norm; None if it was not measured.
        convention: Which matrix.
        rule: The rule of the interval of `extreme` if the search was cut.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: Tensor
    which: str
    products: int
    seed: int
    stop: str
    noise: float | None
    convention: str
    rule: IntervalRule = field(default_factory=Exact)

    @property
    def cut(self) -> bool:
        """Whether the search ended before it had found all pairs, so that others may lie further out."""
        return not isinstance(self.rule, Exact)

    @property
    def extreme(self) -> Estimate:
        """The first of the values: the largest eigenvalue, the smallest, or with "magnitude" max |lambda|.

        If the pair has converged, or is as good as the products allow, the interval is that of the residual. If the
        search was cut, an eigenvalue lies within the residual, which is the bracket, but others may lie further out.
        The random start of the first window bounds them (`ritz.intervals.RandomStart`): the interval ends there, which
        is far away after a few steps, and the convention calls the value a lower bound. With "magnitude", the search
        may also have missed an eigenvalue of the other sign that is larger than a pair that has converged.
        """
        value, residual = float(self.values[0]), float(self.residuals[0])
        name = {"smallest": "smallest eigenvalue", "magnitude": "spectral norm"}.get(self.which, "largest eigenvalue")
        if self.which == "magnitude":
            value = abs(value)
        found = bool(self.converged[0]) and self.which != "magnitude"
        bound = f"{'upper' if self.which == 'smallest' else 'lower'} bound of the " if self.cut and not found else ""
        return Estimate(
            name=name, value=value, exact=self.stop == "exact", products=self.products, seed=self.seed, stop=self.stop,
            bracket=(value - residual, value) if self.which == "smallest" else (value, value + residual),
            support=(0.0 if self.which == "magnitude" else -math.inf, math.inf),
            rule=Exact() if found else self.rule, convention=f"{bound}{name}; {self.convention}",
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        shown = [f"{value:.4g}" for value in self.values[:_SHOWN].tolist()] + ["..."] * (len(self) > _SHOWN)
        return f"EigenPairs({self.which}: {', '.join(shown)}; {self.stop})"

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The eigenvalues by rank, with their residuals as error bars."""
        ax = ax or new_axes()
        ranks = range(1, len(self.values) + 1)
        ax.errorbar(ranks, self.values.numpy(), yerr=self.residuals.numpy(), fmt="o", capsize=3)
        ax.set(xlabel=f"rank ({_ORDERS[self.which]})", ylabel="eigenvalue")
        entitle(ax, self.convention)
        ax.locator_params(axis="x", integer=True)
        return ax


def powers(values: Tensor, coefficients: Tensor, residuals: Tensor, width: int) -> tuple[int, float]:
    """j and |A^j Q|_F^(1/j) for the first block Q of a Krylov space, from its Ritz pairs.

    A power of A less than the number of block steps stays in the space. After one step it is A Q, partly outside.

    Example:
        >>> powers(torch.tensor([3.0, 4.0]), torch.eye(2), torch.zeros(2), width=2)
        (1, 5.0)
    """
    power, scale = max(len(values) // width - 1, 1), float(values.abs().max())
    if not scale:
        return power, float(residuals.norm()) if len(values) <= width else 0.0
    square = ((values / scale) ** (2 * power) * coefficients[:width].square().sum(0)).sum()
    if len(values) <= width:
        square = square + (residuals / scale).square().sum()
    return power, scale * float(square) ** (0.5 / power)


def from_random_rows(
    which: Which, dim: int, width: int, num_steps: int, smallest: float, largest: float, power: int = 1,
    powered: float = math.inf,
) -> IntervalRule:  # fmt: skip
    """The interval of an extreme eigenvalue from the block of random rows before the first restart.

    The Krylov space of a block contains those of its rows, so it is at least as good as the best of `width` runs.

    Args:
        which: Which eigenvalue.
        dim: Order of the matrix.
        width: Rows of the block.
        num_steps: Block steps.
        smallest, largest: Extreme Ritz values.
        power, powered: Of the first block; see `powers`.
    """

    def bound(upper: bool) -> RandomStart:
        return RandomStart(
            dim=dim, num_steps=num_steps, num_probes=width, spread=largest - smallest, slack=0.0, largest=upper,
            reach=largest if upper else smallest, locked=-math.inf if upper else math.inf, power=power, powered=powered,
        )  # fmt: skip

    return Magnitude(bound(False), bound(True)) if which == "magnitude" else bound(which != "smallest")


def select(values: Tensor, k: int, which: Which) -> Tensor:
    """Indices of the k requested ones among ascending values, in the order in which they are reported.

    Example:
        >>> select(torch.tensor([-5.0, 0.0, 1.0, 2.0]), 3, "both").tolist()
        [3, 2, 0]
        >>> select(torch.tensor([-5.0, 0.0, 1.0, 2.0]), 2, "magnitude").tolist()
        [0, 3]
    """
    indices = torch.arange(len(values))
    if which == "largest":
        return indices.flip(0)[:k]
    if which == "smallest":
        return indices[:k]
    if which == "both":
        upper = (k + 1) // 2
        return torch.cat([indices.flip(0)[:upper], indices[: k - upper].flip(0)])
    return values.abs().argsort(descending=True, stable=True)[:k]


def reported(
    op: Metered,
    values: Tensor,
    rows: Tensor,
    images: Tensor,
    *,
    which: str,
    tol: float,
    norm: float,
    seed: int,
    noise: float | None,
    stops: tuple[str, str],
    cut: IntervalRule = _EXACT,
) -> EigenPairs:
    """The result, with residuals from the images.

    `stops` are the stop reasons of a converged run and of any other; `cut` is the rule of the interval if the run ends
    before it has found all pairs.
    """
    apart, small = images - values.to(rows)[:, None] * rows, underflows(images)
    residuals = row_norms(apart.double() if small else apart).cpu()
    converged = residuals <= tol * norm
    if small and stops[0] != "exact":  # norms in the recurrence are wrong, so it may have missed a pair
        converged, stops = torch.zeros_like(converged), (stops[0], stopping.UNDERFLOW)
    stop = stops[0] if bool(converged.all()) else stops[1]
    return EigenPairs(
        values=values,
        vectors=rows.T,
        residuals=residuals,
        converged=converged,
        which=which,
        products=op.products,
        seed=seed,
        stop=stop,
        noise=noise,
        convention=op.convention(),
        rule=cut if stop in _CUT else Exact(),
    )


def tolerance(tol: float, dtype: torch.dtype) -> float:
    """The requested tolerance, or the smallest that the precision allows."""
    return max(tol, 16 * torch.finfo(dtype).eps)
