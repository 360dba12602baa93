"""The head of the spectrum: block Lanczos for the outliers, locked before the probes run.

A block of b rows is multiplied at once. Each image is orthogonalised twice against all rows so far, as matrix products
on one contiguous buffer. Rayleigh-Ritz on the projected matrix, in float64, gives the Ritz pairs, and the last block
gives their residuals without a further product.

The locked rows u_i form an orthonormal U with H u_i = theta_i u_i + r_i and U R' = 0. With Q = I - U'U,

    Tr H      = sum theta_i + Tr QHQ
    ||H||_F^2 = 2 ||HU||^2 - ||U'HU||^2 + ||QHQ||_F^2 = sum (theta_i^2 + 2 |r_i|^2) + ||QHQ||_F^2

hold exactly for pairs of any accuracy, because |H u_i|^2 = theta_i^2 + |r_i|^2. Probes then need not estimate the share
of the locked eigenvalues, which are the large ones (Chen and Hallman 2022, Krylov-aware deflation).

If several ranks compute products together, each keeps its part of every row (`space.Shard`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..comm import SELF
from ..errors import NonFiniteError
from ..operators.base import Operator
from ..space import Shard, row_norms, row_products
from ..storage import Result

Progress = Callable[[int, int], None]  # (products done, products expected)

_DENSE_BLOCK = 64  # rows of a dense matrix that are computed at a time
_ROUND_OFF = 2.0  # directions shorter than this many eps times the norm are dropped, and count in no residual


@dataclass(frozen=True, eq=False, kw_only=True)
class Head(Result):
    """Locked Ritz pairs, largest |theta| first, and the extreme Ritz values of the whole block space.

    Attributes:
        values: Ritz values theta_i (r,), float64, on the host.
        vectors: Orthonormal rows u_i (r, dim), on the operator's device; with several ranks, this rank's part.
        residuals: |r_i| = |H u_i - theta_i u_i| (r,), float64, on the host.
        residual_rows: r_i (r, dim), each orthogonal to all of the block space; with several ranks, this rank's part.
        coupling: ||R||_2, the spectral norm of the residual rows: by Weyl's inequality, each eigenvalue of H is at most
            this far from an eigenvalue of diag(theta) or of QHQ.
        theta_min: Smallest Ritz value of the block space, locked or not.
        theta_min_residual: |H u - theta_min u|.
        theta_max: Largest Ritz value of the block space, locked or not.
        theta_max_residual: |H u - theta_max u|.
        complete: The rows span the whole space: `values` is the whole spectrum, and nothing is left for probes.
        products: Matrix-vector products spent.
        seed: Seed of the start block.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    residual_rows: Tensor
    coupling: float
    theta_min: float
    theta_min_residual: float
    theta_max: float
    theta_max_residual: float
    complete: bool
    products: int
    seed: int

    @property
    def trace(self) -> float:
        """Tr U'HU, the head's share of Tr H."""
        return float(self.values.sum())


def find_head(
    op: Operator,
    *,
    block: int = 8,
    num_steps: int = 12,
    max_locked: int = 32,
    tol: float = 3e-3,
    seed: int = 0,
    progress: Progress | None = None,
    space: "BlockSpace | None" = None,
    checkpoint: "Callable[[BlockSpace], None] | None" = None,
) -> Head:
    """Lock up to `max_locked` Ritz pairs, largest |theta| first, with residuals up to tol * max |theta| and |theta|.

    This costs block * num_steps products and stores as many rows. A matrix of at most that order is diagonalised in
    full by dim products instead, and the head is then complete.

    Args:
        op: The matrix.
        block: Rows multiplied at a time; an eigenvalue is found with up to this multiplicity.
        num_steps: Block steps.
        max_locked: Largest number of pairs to lock; a complete head keeps all.
        tol: Residual relative to the largest |theta|.
        seed: Seed of the start block, whose probe indices are -1 ... -block: it shares no row with probes 0, 1, ...
        progress: Called as progress(products done, products in all).
        space: The block space of an earlier run, to continue from (`BlockSpace.restored`).
        checkpoint: Called with the block space before each batched product, and may save it.

    Raises:
        ValueError: If an argument is out of range.
        NonFiniteError: If a product is NaN or infinite.

    Example:
        >>> from ritz.operators.algebra import DenseOperator
        >>> spectrum = torch.cat([torch.tensor([10.0, -5.0]), torch.linspace(0, 0.1, 198)]).double()
        >>> head = find_head(DenseOperator(torch.diag(spectrum)), max_locked=2)
        >>> [round(value, 6) for value in head.values.tolist()], head.products
        ([10.0, -5.0], 96)
    """
    if min(block, num_steps) < 1 or max_locked < 0 or not tol > 0:
        raise ValueError(
            f"block and num_steps must be at least 1, max_locked at least 0 and tol positive, got block={block}, "
            f"num_steps={num_steps}, max_locked={max_locked}, tol={tol}"
        )
    if op.dim <= block * num_steps:
        return _whole(op, seed, progress)
    if space is None:
        space = BlockSpace(op, block * num_steps)
        space.append(op.probes(range(-1, -block - 1, -1), seed, "normal"), floor=0.0)
    while True:
        if checkpoint is not None:
            checkpoint(space)
        space.expand()
        if progress is not None:
            progress(space.known, num_steps * block)
        if space.known == block * num_steps:
            return _lock(space, max_locked, tol, seed)
        space.append(space.residual)


def _lock(space: "BlockSpace", max_locked: int, tol: float, seed: int) -> Head:
    """The head of a filled block space."""
    values, coefficients, norms = space.ritz()
    largest = values.abs().max()
    order = values.abs().argsort(descending=True)
    known = norms <= torch.minimum(tol * largest, values.abs())  # for a value near 0 a small residual says nothing
    chosen = order[known[order]][:max_locked]
    residual_rows = space.residual_rows(coefficients[:, chosen])
    return Head(
        values=values[chosen],
        vectors=space.combine(coefficients[:, chosen]),
        residuals=space.shard.norms(residual_rows).cpu(),
        residual_rows=residual_rows,
        coupling=_spectral_norm(space.op, residual_rows, space.shard),
        theta_min=float(values[0]),
        theta_min_residual=float(norms[0]),
        theta_max=float(values[-1]),
        theta_max_residual=float(norms[-1]),
        complete=False,
        products=space.size,
        seed=seed,
    )


def _whole(op: Operator, seed: int, progress: Progress | None) -> Head:
    """The complete head of a small matrix: every eigenpair, from its dense form."""
    values, vectors, images = dense_eigenpairs(op)
    if progress is not None:
        progress(op.dim, op.dim)
    order = values.abs().argsort(descending=True)
    values, vectors = values[order], vectors[order.to(op.device)]
    residual_rows = images[order.to(op.device)] - values.to(vectors)[:, None] * vectors
    residuals = row_norms(residual_rows).cpu()
    low, high = int(values.argmin()), int(values.argmax())
    shard = Shard(op.world, op.dim)
    return Head(
        values=values,
        vectors=shard.part(vectors),
        residuals=residuals,
        residual_rows=shard.part(residual_rows),
        coupling=_spectral_norm(op, residual_rows, Shard(SELF, op.dim)),
        theta_min=float(values[low]),
        theta_min_residual=float(residuals[low]),
        theta_max=float(values[high]),
        theta_max_residual=float(residuals[high]),
        complete=True,
        products=op.dim,
        seed=seed,
    )


class BlockSpace:
    """A growing block Krylov space: orthonormal rows, the projected matrix, the residual of the last block.

    With rows B, and W (b, dim) the last block's image after orthogonalisation, H B' = B' T + W' E', where E selects the
    last block. Directions of a block that vanish (an invariant subspace, or dim reached) are dropped: their rows become
    zero and `alive` false, so that no step waits for the device. A direction vanishes if its length is at most
    `vanishing` times the norm of the matrix; the least is round-off.
    """

    def __init__(self, op: Operator, capacity: int, vanishing: float = 0.0) -> None:
        self.op, self.shard = op, Shard(op.world, op.dim)
        self.rows = torch.zeros(capacity, self.shard.width, dtype=op.dtype, device=op.device)
        self.matrix = torch.zeros(capacity, capacity, dtype=torch.float64, device=op.device)  # lower triangle
        self.alive = torch.zeros(capacity, dtype=torch.bool, device=op.device)
        self.scale = torch.zeros((), dtype=torch.float64, device=op.device)  # largest |H q| seen
        self.vanishing = max(vanishing, _ROUND_OFF * torch.finfo(op.dtype).eps)
        self.residual = self.rows[:0]
        self.last = 0  # where the last expanded block begins
        self.known = 0  # rows whose images are in `matrix`
        self.size = 0  # rows in all

    def state(self) -> dict[str, Any]:
        """The state before a product, as plain data, without the rows: see `blocks`, which never change.

        The residual is not part of it, because the block to be multiplied next was made from it.
        """
        size = self.size
        return {
            "matrix": self.matrix[:size, :size].clone(), "alive": self.alive[:size].clone(), "scale": self.scale,
            "last": self.last, "known": self.known, "size": size,
        }  # fmt: skip

    def blocks(self, width: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """The rows from `first` on, in blocks of `width`, each with the number of its first row."""
        return ((at, self.rows[at : min(at + width, self.size)]) for at in range(first, self.size, width))

    @classmethod
    def restored(
        cls, op: Operator, capacity: int, state: Mapping[str, Any], blocks: Iterable[Tensor], vanishing: float = 0.0
    ) -> "BlockSpace":
        """The space from its saved `state` and `blocks`, on the device of the operator."""
        space, size = cls(op, capacity, vanishing), state["size"]
        space.rows[:size] = torch.cat(list(blocks)).to(space.rows)
        space.matrix[:size, :size] = state["matrix"].to(space.matrix)
        space.alive[:size] = state["alive"].to(space.alive)
        space.scale = state["scale"].to(space.scale)
        space.last, space.known, space.size = state["last"], state["known"], size
        return space

    def append(self, rows: Tensor, floor: float | Tensor | None = None) -> None:
        """Add a block, orthonormalised; directions of length at most `floor` (default: vanishing) are dropped.

        The rows are whole, or this rank's part of them.
        """
        if floor is None:
            floor = self.vanishing * self.scale
        block, alive = orthonormalised(self.shard.part(rows), self.rows[: self.known], floor, self.shard)
        self.size = self.known + len(rows)
        self.rows[self.known : self.size] = block
        self.alive[self.known : self.size] = alive

    def expand(self) -> None:
        """Multiply the block appended last, one batched product, and project the image against all rows, twice."""
        new = slice(self.known, self.size)
        basis = self.rows[: self.size]
        image = self.op.rows(self.shard.whole(self.rows[new])).masked_fill(~self.alive[new, None], 0.0)
        image = self.shard.part(image)
        entries = torch.zeros(len(image), self.size, dtype=torch.float64, device=image.device)
        for _ in range(2):
            part = self.shard.sum(row_products(image, basis))  # (b, size)
            image = torch.addmm(image, part.to(image.dtype), basis, alpha=-1)
            entries += part
        self.matrix[new, : self.size] = entries
        squares = entries.square().sum(1) + self.shard.norms(image).square()
        self.scale = torch.maximum(self.scale, squares.max().sqrt())
        self.residual, self.last, self.known = image, self.known, self.size

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values (n,), ascending, coefficients on the rows (known, n), residual norms (n,); float64, on the host.

        Raises:
            NonFiniteError: If a product was NaN or infinite.
        """
        alive = self.alive[: self.known].cpu()
        matrix = self.matrix[: self.known, : self.known].cpu()[alive][:, alive]
        gram = self.shard.sum(row_products(self.residual, self.residual)).cpu()
        if not bool(matrix.isfinite().all() & gram.isfinite().all()):
            refuse_non_finite(self.op)
        values, vectors = torch.linalg.eigh(matrix)  # reads the lower triangle
        coefficients = matrix.new_zeros(self.known, len(values))
        coefficients[alive] = vectors
        squares, axes = torch.linalg.eigh(gram)
        root = squares.clamp_min(0.0).sqrt()[:, None] * axes.T  # root' root = gram: small norms keep their digits
        return values, coefficients, torch.linalg.vector_norm(root @ coefficients[self.last :], dim=0)

    def combine(self, coefficients: Tensor) -> Tensor:
        """Rows (r, dim) from coefficients (known, r); this rank's part."""
        return coefficients.T.to(self.rows) @ self.rows[: self.known]

    def residual_rows(self, coefficients: Tensor) -> Tensor:
        """H u - theta u (r, dim), this rank's part, for Ritz vectors u of `coefficients` (known, r); no product."""
        return coefficients[self.last :].T.to(self.rows) @ self.residual

    def restart(self, coefficients: Tensor, values: Tensor) -> None:
        """Keep the given Ritz pairs and the residual block, drop the rest (thick restart, Wu and Simon 2000)."""
        kept = len(values)
        self.rows[:kept] = self.combine(coefficients)
        self.rows[kept:] = 0.0
        self.alive[:] = False
        self.alive[:kept] = True
        self.matrix.zero_()
        self.matrix[:kept, :kept] = torch.diag(values)
        self.known = self.size = self.last = kept
        self.append(self.residual)


def orthonormalised(
    rows: Tensor, basis: Tensor, floor: float | Tensor, shard: Shard | None = None
) -> tuple[Tensor, Tensor]:
    """Orthonormal rows (b, dim) that span `rows` projected off `basis`, and which of them are not zero, (b,) bool.

    Block projection against the basis, then Gram-Schmidt row by row within the block, each twice. All of this is done a
    second time, because division by a small norm magnifies what the projection has left. Rows of length at most `floor`
    become zero. A decomposition of the b x b Gram matrix would be shorter code, but waits for the device and squares
    the condition number. With a shard, rows and basis are this rank's parts.
    """
    shard = shard or Shard(SELF, rows.shape[1])
    for least in (floor, 0.5):  # the second time rows have length 1; one that loses half of it was round-off
        for _ in range(2):
            rows = shard.project_out(rows, basis)
        done = torch.zeros_like(rows)
        alive = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for i in range(len(rows)):
            row = rows[i : i + 1]
            for _ in range(2):
                row = shard.project_out(row, done[:i])
            norm = shard.norms(row)  # (1,)
            dead = norm <= least
            done[i : i + 1] = (row / torch.where(dead, 1.0, norm).to(row.dtype)[:, None]).masked_fill(
                dead[:, None], 0.0
            )
            alive[i : i + 1] = ~dead
        rows = done
    return rows, alive


def dense_eigenpairs(
    op: Operator, before: Sequence[Tensor] = (), checkpoint: Callable[[list[Tensor]], None] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """All eigenvalues (dim,) on the host, ascending, eigenvectors and their images as rows (dim, dim); dim products.

    Args:
        op: The matrix.
        before: Blocks of rows of the matrix that an earlier run has computed.
        checkpoint: Called with the blocks before each batched product, and may save them.

    Raises:
        NonFiniteError: If a product is NaN or infinite.
    """
    blocks = list(before)
    for rows in torch.eye(op.dim, dtype=op.dtype, device=op.device).split(_DENSE_BLOCK)[len(blocks) :]:
        if checkpoint is not None:
            checkpoint(blocks)
        blocks.append(op.rows(rows))
    matrix = torch.cat(blocks)
    double = matrix.double().cpu()
    if not bool(double.isfinite().all()):
        refuse_non_finite(op)
    values, vectors = torch.linalg.eigh((double + double.T) / 2)
    rows = vectors.T.to(matrix)
    return values, rows, rows @ matrix


def refuse_non_finite(op: Operator) -> NoReturn:
    """Raise an error about a product that is NaN or infinite; the operator of a network names the batch."""
    op.diagnose()
    raise NonFiniteError(f"a product with the {op.matrix} is not finite")


def _spectral_norm(op: Operator, rows: Tensor, shard: Shard) -> float:
    """||R||_2 from the Gram matrix of the rows, of which each rank gives its part; 0 if there are none."""
    if not len(rows):
        return 0.0
    gram = shard.sum(row_products(rows, rows)).cpu()
    if not bool(gram.isfinite().all()):
        refuse_non_finite(op)
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0.0).sqrt())
