"""Extreme eigenpairs by block thick-restart Lanczos, with true residuals and the noise floor of the product.

A block Krylov space is grown to a window of rows, fully re-orthogonalised; Rayleigh-Ritz picks the wanted pairs; the
space is cut back to those, a few more, and the residual block, and grown again (thick restart, Wu and Simon 2000, in
blocks). At the end each pair is multiplied once more: the residuals reported are those of the product, not of the
recurrence.
"""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from ..errors import NumericalWarning
from ..operators.algebra import Metered
from ..operators.base import Operator, full_precision
from ..results import new_axes
from ..space import row_norms
from ..storage import equal, save
from .head import BlockSpace, Progress, dense_eigenpairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Which = Literal["largest", "smallest", "both", "magnitude"]

_LOOK = 4  # block steps between looks at the Ritz values: each look waits for the device
_NOISE_PRODUCTS = 3  # what measuring the noise of the product costs
_DENSE = 4096  # up to this order a slow search gives way to the dense matrix
_ATTEMPTS = 3  # verifications by true residual before the recurrence is believed to be at the noise of the product


@dataclass(frozen=True, eq=False, kw_only=True)
class EigenPairs:
    """Eigenvalues, eigenvectors and how good they are.

    Attributes:
        values: Rayleigh quotients (k,), float64: "largest" and "both" descending, "smallest" ascending, "magnitude" by
            descending |value|.
        vectors: Orthonormal columns (dim, k), on the operator's device.
        residuals: |A u - value u| (k,), float64, each from a product of its own; [value - residual, value + residual]
            holds an eigenvalue.
        converged: Which residuals are within tolerance (k,), bool.
        which: Which end was asked for.
        products: Matrix-vector products spent.
        seed: Of the start block.
        stop: "converged", "exact" (the whole matrix was diagonalised), "noise floor" or "max_products".
        noise: Measured relative error of one product, as a part of the spectral norm; None where it was not measured.
        convention: Which matrix.
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

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and equal(self, other)

    def __len__(self) -> int:
        return len(self.values)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `path`.json and `path`.safetensors; see `ritz.load`."""
        return save(self, path)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The eigenvalues by rank, with their residuals as error bars."""
        ax = ax or new_axes()
        ranks = range(1, len(self.values) + 1)
        ax.errorbar(ranks, self.values.numpy(), yerr=self.residuals.numpy(), fmt="o", capsize=3)
        ax.set(xlabel="rank", ylabel=f"eigenvalue of {self.convention}")
        return ax


@full_precision()
def top_eigenpairs(
    op: Operator,
    k: int = 10,
    which: Which = "largest",
    *,
    tol: float = 1e-6,
    max_products: int | None = None,
    block: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> EigenPairs:
    """k extreme eigenpairs of a symmetric matrix.

    A matrix that fits the window is diagonalised in full, and so is a small one (up to order 4096) on which the search
    has spent as many products as it has rows, where the budget allows.

    Args:
        op: The matrix.
        k: How many pairs in all; for "both" ceil(k / 2) from the upper end and floor(k / 2) from the lower.
        which: "largest" or "smallest" (by value), "both" ends, or largest in "magnitude".
        tol: Residual allowed, relative to the spectral norm; not below 16 eps of the operator's dtype.
        max_products: Most products to spend; default 50 windows of 2 k + 16 block rows. The window is also what is held
            in memory.
        block: Rows multiplied at a time. An eigenvalue is found with up to this multiplicity; wider blocks need more
            products.
        seed: Of the start block.
        progress: Called as progress(products done, most products).

    Raises:
        ValueError: If an argument is out of range.
        NonFiniteError: If a product is NaN or infinite.

    Warns:
        NumericalWarning: If a pair has not converged; the pairs found are returned all the same.

    Example:
        >>> from ritz.operators.algebra import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.arange(-50.0, 151.0, dtype=torch.float64)))
        >>> pairs = top_eigenpairs(A, k=3, which="both")
        >>> [round(value, 4) for value in pairs.values.tolist()], tuple(pairs.vectors.shape)
        ([150.0, 149.0, -50.0], (201, 3))
    """
    width = min(block, op.dim)
    _check(op, k, which, tol, max_products, width)
    window = 2 * k + 16 * width
    budget = max_products if max_products is not None else 50 * window
    metered = Metered(op)
    if op.dim <= window and op.dim <= budget:
        pairs = _whole(metered, k, which, tol, seed)
    else:
        search = _Search(metered, k, which, tol, budget, width, min(window, op.dim), seed, progress)
        pairs = search.run()
    if progress is not None:
        progress(metered.products, budget)
    _warn(pairs, tol)
    return pairs


class _Search:
    """One run of the restarted method."""

    def __init__(
        self,
        op: Metered,
        k: int,
        which: Which,
        tol: float,
        budget: int,
        block: int,
        window: int,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.op, self.k, self.which, self.tol, self.seed = op, k, which, _tolerance(tol, op.dtype), seed
        self.budget, self.block, self.window, self.progress = budget, block, window, progress
        self.space = BlockSpace(op, window, vanishing=0.01 * self.tol)  # true residuals are computed in the end
        self.drawn = 0  # random rows so far; they use the probe indices -1, -2, ...
        self.noise: float | None = None
        self.at_refill: Tensor | None = None  # wanted values when random rows were last put into an exhausted space
        self.at_full: Tensor | None = None  # wanted values when the window was last full, since then

    def run(self) -> EigenPairs:
        """Cycles until converged, out of products, or at the noise of the product."""
        self.space.append(self._draw(self.block), floor=0.0)
        target, attempts = self.tol, 0
        while True:
            full = self._grow()
            values, coefficients, residuals = self.space.ritz()
            enough = len(values) >= self.k
            wanted = select(values, min(self.k, len(values)), self.which)
            norm = float(values.abs().max())
            if enough and self.noise is None:
                self.noise = self._measure_noise(coefficients[:, values.abs().argmax()], norm)
                target = max(target, 2 * self.noise)  # the recurrence sees the noise too, and cannot fall below it
            done = enough and bool((residuals[wanted] <= target * norm).all()) and self._settled(values[wanted], full)
            if done or (enough and self._spent()):
                pairs = self._verified(coefficients[:, wanted], norm)
                attempts += 1
                noisy = attempts == _ATTEMPTS or (self.noise or 0.0) >= self.tol
                if bool(pairs.converged.all()) or noisy or self._spent():
                    return pairs
                target /= 10  # the recurrence was too kind; ask more of it
            if self.op.dim <= min(self.op.products, self.budget - self.op.products, _DENSE):
                return _whole(self.op, self.k, self.which, self.tol, self.seed)
            if full or not bool(self.space.alive[: self.space.size].all()):
                self._restart(values, coefficients)
            else:
                self.space.append(self.space.residual)

    def _spent(self, extra: int = 0) -> bool:
        """Would one more block leave too little for the true residuals?"""
        return self.op.products + self.block + self.k + extra > self.budget

    def _grow(self) -> bool:
        """A few block steps, fewer at the end of the window or of the budget; whether the window is full."""
        for step in range(_LOOK):
            if step:
                self.space.append(self.space.residual)
            self.space.expand()
            if self.progress is not None:
                self.progress(self.op.products, self.budget)
            if self.space.size + self.block > self.window:
                return True
            if self.space.size >= self.k and self._spent(_NOISE_PRODUCTS * (self.noise is None)):
                return False
        return False

    def _restart(self, values: Tensor, coefficients: Tensor) -> None:
        """Keep the wanted half and the residual block, its vanished rows replaced by random ones."""
        # half the window, more than is wanted: measured, it saves up to half the products on a spectrum without gaps
        keep = min(max(self.k + self.block, self.window // 2), max(self.window - 2 * self.block, self.k))
        kept = select(values, min(keep, len(values), self.window - self.block), self.which)
        self.space.restart(coefficients[:, kept], values[kept])
        new = slice(self.space.known, self.space.size)
        dead = (~self.space.alive[new]).nonzero()[:, 0]
        if len(dead):
            self.at_refill, self.at_full = values[select(values, min(self.k, len(values)), self.which)], None
            rows = self.space.rows[new].clone()
            fresh = self._draw(len(dead))
            rows[dead] = fresh / row_norms(fresh).to(fresh.dtype)[:, None]
            self.space.append(rows, floor=torch.finfo(rows.dtype).eps ** 0.5)

    def _settled(self, wanted: Tensor, full: bool) -> bool:
        """Whether converged pairs may be taken for the wanted ones.

        An exhausted space may have missed copies of an eigenvalue, so fresh rows are put in, and the pairs are believed
        when those, run until exhausted in turn or to the end of a window, have changed nothing.
        """
        alive = self.space.alive[: self.space.size]
        if not bool(alive.all()):
            return int(alive.sum()) == self.op.dim or self._same(wanted, self.at_refill)
        if self.at_refill is None or not full:
            return self.at_refill is None
        before, self.at_full = self.at_full, wanted
        return self._same(wanted, self.at_refill if before is None else before)

    def _same(self, wanted: Tensor, before: Tensor | None) -> bool:
        """Equal to what was wanted before, to tolerance."""
        if before is None or len(before) != len(wanted):
            return False
        return bool(((wanted - before).abs() <= self.tol * wanted.abs().max()).all())

    def _draw(self, count: int) -> Tensor:
        """Random rows not drawn before."""
        indices = range(-self.drawn - 1, -self.drawn - count - 1, -1)
        self.drawn += count
        return self.op.probes(indices, self.seed, "normal")

    def _measure_noise(self, coefficients: Tensor, norm: float) -> float:
        """|A(u + y) - A u - A y| / |A| for the leading Ritz vector u and a random unit y: two calls, three products."""
        other = self._draw(1)
        other = other / row_norms(other).to(other.dtype)[:, None]
        pair = torch.cat([self.space.combine(coefficients[:, None]), other])
        apart = self.op.rows(pair).sum(0)
        together = self.op.rows(pair.sum(0, keepdim=True))[0]
        return float(row_norms(together - apart)) / norm if norm else 0.0

    def _verified(self, coefficients: Tensor, norm: float) -> EigenPairs:
        """The pairs with values and residuals from one product each."""
        rows = self.space.combine(coefficients)
        images = self.op.rows(rows)
        projected = (rows @ images.T).double().cpu()
        values, axes = torch.linalg.eigh((projected + projected.T) / 2)
        order = select(values, self.k, self.which)
        turn = axes[:, order].T.to(rows)
        return _report(
            self.op, values[order], turn @ rows, turn @ images, which=self.which, tol=self.tol, norm=norm,
            seed=self.seed, noise=self.noise, stops=("converged", "max_products" if self._spent() else "noise floor"),
        )  # fmt: skip


def select(values: Tensor, k: int, which: Which) -> Tensor:
    """Indices of the k wanted among ascending values, in the order in which they are reported.

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


def _whole(op: Metered, k: int, which: Which, tol: float, seed: int) -> EigenPairs:
    """The pairs of a small matrix, from its dense form."""
    values, rows, images = dense_eigenpairs(op)
    order = select(values, k, which)
    place = order.to(rows.device)
    limit, norm = _tolerance(tol, op.dtype), float(values.abs().max())
    return _report(
        op, values[order], rows[place], images[place], which=which, tol=limit, norm=norm,
        seed=seed, noise=None, stops=("exact", "noise floor"),
    )  # fmt: skip


def _report(
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
) -> EigenPairs:
    """The result, its residuals taken from the images; `stops` says how a converged run ends and how another."""
    residuals = row_norms(images - values.to(rows)[:, None] * rows).cpu()
    converged = residuals <= tol * norm
    return EigenPairs(
        values=values,
        vectors=rows.T,
        residuals=residuals,
        converged=converged,
        which=which,
        products=op.products,
        seed=seed,
        stop=stops[0] if bool(converged.all()) else stops[1],
        noise=noise,
        convention=op.convention(),
    )


def _check(op: Operator, k: int, which: str, tol: float, max_products: int | None, block: int) -> None:
    """Refuse what cannot be done before any product is spent."""
    if not 1 <= k <= op.dim:
        raise ValueError(f"k must lie between 1 and the dimension, got k={k} for dim={op.dim}")
    if which not in get_args(Which):
        raise ValueError(f"which must be one of {', '.join(map(repr, get_args(Which)))}, got {which!r}")
    if not tol > 0 or block < 1:
        raise ValueError(f"tol must be positive and block at least 1, got tol={tol}, block={block}")
    need = min(-(-k // block) * block + k + _NOISE_PRODUCTS, op.dim)  # the rows, their noise, their residuals
    if max_products is not None and max_products < need:
        raise ValueError(
            f"k={k} pairs in blocks of {block} need at least {need} products, got max_products={max_products}"
        )


def _warn(pairs: EigenPairs, tol: float) -> None:
    """Say so, with the remedy, when a pair has not converged."""
    if bool(pairs.converged.all()):
        return
    remedy = {
        "max_products": f"raise max_products (spent: {pairs.products}) or tol",
        "noise floor": "the products themselves are no better: raise tol, or use a float64 risk",
    }[pairs.stop]
    warnings.warn(
        f"{int((~pairs.converged).sum())} of {len(pairs)} eigenpairs have residuals above tol={tol:g} of the spectral "
        f"norm, the largest {float(pairs.residuals.max()):.2g}; {remedy}",
        NumericalWarning,
        stacklevel=3,
    )


def _tolerance(tol: float, dtype: torch.dtype) -> float:
    """The tolerance asked for, or what the precision allows."""
    return max(tol, 16 * torch.finfo(dtype).eps)
