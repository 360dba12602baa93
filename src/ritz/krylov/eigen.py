"""Extreme eigenpairs by block thick-restart Lanczos, with true residuals and the noise floor of the product.

A block Krylov space with full re-orthogonalisation grows to a window of rows. Rayleigh-Ritz selects the wanted pairs;
the space is cut back to those, a few more, and the residual block, and grows again (thick restart, Wu and Simon 2000,
in blocks). At the end each pair is multiplied once more, so that the reported residuals are those of the product, not
of the recurrence. If the two differ, the recurrence has reached the noise of the products and the search ends; it also
ends if residuals stop falling.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor

from .. import stopping
from ..checkpoint import Checkpoint, Saved, State
from ..errors import NonFiniteError, NumericalWarning, StoppedError, callers_level
from ..fingerprints import resumable
from ..intervals import IntervalRule
from ..operators.algebra import Metered, project_out
from ..operators.base import Operator, full_precision
from ..space import row_norms, row_products
from .head import BlockSpace, Progress, dense_eigenpairs
from .pairs import EigenPairs as EigenPairs
from .pairs import Which as Which
from .pairs import from_random_rows, powers, reported, select, tolerance

Seen: TypeAlias = tuple[Tensor, Tensor, Tensor]  # Ritz values, coefficients on the rows, residuals

# reasons for which a run ends by itself, so that its result is final
STOPS = (
    "converged", "exact", stopping.NOISE_FLOOR, stopping.STAGNATION, stopping.UNDERFLOW, stopping.MAX_PRODUCTS,
)  # fmt: skip

_LOOK = 4  # block steps between computations of the Ritz values, which wait for the device
_NOISE_PRODUCTS = 3  # products that measuring their noise takes
_DENSE = 4096  # up to this order a slow search is replaced by the dense matrix
_STATE = (
    "drawn", "noise", "at_refill", "at_full", "target", "attempts", "looked", "restarts", "kept", "best", "stale",
    "first",
)  # fmt: skip
_ATTEMPTS = 3  # failed verifications by true residuals after which noise of the products is taken as the reason
_STALE = 8  # full windows without a fall of the residual after which the recurrence is compared with the product
_FALL = 0.9  # the residual has fallen if it is below this many times the least so far
_PARTED = 0.5  # relative error from which on the residual of the recurrence says nothing about the true one


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
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> EigenPairs:
    """k extreme eigenpairs of a symmetric matrix.

    A matrix that fits into the window is diagonalised completely. So is a small matrix (up to order 4096) once the
    search has used as many products as it has rows, if the budget allows.

    Args:
        op: The matrix.
        k: How many pairs in all; for "both" ceil(k / 2) from the upper end and floor(k / 2) from the lower.
        which: "largest" or "smallest" (by value), "both" ends, or largest in "magnitude".
        tol: Largest allowed residual, relative to the spectral norm; not below 16 eps of the operator's dtype.
        max_products: Largest number of products; default 50 windows of 2 k + 16 block rows. The window is also what is
            stored in memory.
        block: Number of rows multiplied at a time. An eigenvalue is found with up to this multiplicity; wider blocks
            need more products.
        seed: Seed of the start block.
        progress: Called as progress(products done, most products).
        checkpoint: A folder, or a `ritz.Checkpoint`, for the state of the run. After a kill, the same call resumes.

    Raises:
        ValueError: If an argument is out of range, or the checkpoint is that of another run.
        NonFiniteError: If a product is NaN or infinite before k pairs are known.
        StoppedError: If the run is stopped (`ritz.stoppable`) before that.

    Warns:
        NumericalWarning: If a pair has not converged, if others may lie further out because the search was cut, or if a
            product is not finite. The pairs found are still returned, and `stop` gives the reason.

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
    settings = {"k": k, "which": which, "tol": tol, "max_products": max_products, "block": block, "seed": seed}
    with resumable(checkpoint, op, "top_eigenpairs", settings) as saved:
        pairs: EigenPairs | None = saved.result
        if pairs is None:
            op.expect(min(budget, window // 2, op.dim))  # at least so many; the rest depends on the convergence
            search = _Search(metered, saved, k, which, tol, budget, width, min(window, op.dim), seed, progress)
            pairs = search.whole() if op.dim <= window and op.dim <= budget else search.run()
            if pairs.stop in STOPS:
                saved.finish(pairs)
        if pairs.vectors.device != op.device:  # loaded from a checkpoint
            pairs = replace(pairs, vectors=pairs.vectors.to(op.device))
    if progress is not None:
        progress(pairs.products, budget)
    _warn(pairs, tol)
    return pairs


class _Search:
    """One run of the restarted method."""

    def __init__(
        self,
        op: Metered,
        saved: Saved,
        k: int,
        which: Which,
        tol: float,
        budget: int,
        block: int,
        window: int,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.op, self.saved = op, saved
        self.k, self.which, self.tol, self.seed = k, which, tolerance(tol, op.dtype), seed
        self.budget, self.block, self.window, self.progress = budget, block, window, progress
        self.space = BlockSpace(op, window, vanishing=0.01 * self.tol)  # true residuals are computed in the end
        self.drawn = 0  # random rows so far; they use the probe indices -1, -2, ...
        self.noise: float | None = None
        self.at_refill: Tensor | None = None  # wanted values when random rows were last added to an exhausted space
        self.at_full: Tensor | None = None  # wanted values when, after that, the window was last full
        self.target, self.attempts = self.tol, 0  # residual required of the recurrence; verifications so far
        self.looked = 0  # block steps since the last Ritz values
        self.restarts = self.kept = 0  # restarts so far; rows that the last one kept
        self.best, self.stale = float("inf"), 0  # least residual at the end of a window; windows since it last fell
        self.seen: Seen | None = None  # the last Ritz values
        # block steps, extreme Ritz values and powers of the first block at the last look before any restart
        self.first: tuple[Any, ...] = (0, 0.0, 0.0)

    def run(self) -> EigenPairs:
        """Cycles until converged, out of products, or at the noise of the product; what is known if they are cut."""
        try:
            if self.saved.latest is not None:
                self._restore(self.saved.latest)
            else:
                self.space.append(self._draw(self.block), floor=0.0)
            return self._cycles()
        except (StoppedError, NonFiniteError) as error:
            if self.seen is None or len(self.seen[0]) < self.k:
                raise
            return self._unverified(*self.seen, _cut(error))

    def _cycles(self) -> EigenPairs:
        if self.saved.latest is not None and "dense" in self.saved.latest:
            return self.whole()
        while True:
            full = self._grow()
            values, coefficients, residuals = self.seen = self.space.ritz()
            enough = len(values) >= self.k
            wanted = select(values, min(self.k, len(values)), self.which)
            norm = float(values.abs().max())
            if not self.restarts:
                ends = float(values[0]), float(values[-1])
                self.first = (self.space.known // self.block, *ends, *powers(*self.seen, self.block))
            if enough and self.noise is None:
                self.noise = self._measure_noise(coefficients[:, values.abs().argmax()], norm)
                # the noise is also in the recurrence, whose residuals cannot fall below it
                self.target = max(self.target, 2 * self.noise)
            foremost = enough and self._foremost(values, residuals, wanted, norm)
            near = foremost and bool((residuals[wanted] <= self.target * norm).all())
            if (near and self._settled(values[wanted], full)) or (enough and self._spent()):
                pairs = self._verified(coefficients[:, wanted], norm, foremost=foremost)
                self.attempts += 1
                noisy = self.attempts == _ATTEMPTS or (self.noise or 0.0) >= self.tol
                if bool(pairs.converged.all()) or noisy or self._spent():
                    return pairs
                self.target /= 10  # the residual of the recurrence was too small, so require less
            if enough and full and self._stagnates(float(residuals[wanted].max())):
                pairs = self._verified(coefficients[:, wanted], norm, by_noise=True)
                if pairs.stop == stopping.STAGNATION:
                    return pairs
            if self.op.dim <= min(self.op.products, self.budget - self.op.products, _DENSE):
                return self.whole()
            if full or not bool(self.space.alive[: self.space.size].all()):
                self._restart(values, coefficients)
            else:
                self.space.append(self.space.residual)

    def _foremost(self, values: Tensor, residuals: Tensor, wanted: Tensor, norm: float) -> bool:
        """Whether no eigenvalue at the other end, which may converge later, is larger than the last wanted one."""
        last, left = values[wanted[-1]], torch.ones_like(values, dtype=torch.bool)
        left[wanted] = False
        left &= values * last < 0
        if self.which != "magnitude" or not bool(left.any()):
            return True
        next_ = int(torch.where(left, values.abs(), -1.0).argmax())
        residual = float(residuals[next_])
        return residual <= self.target * norm or float(values[next_].abs()) + residual <= float(last.abs())

    def _stagnates(self, residual: float) -> bool:
        """Whether the residual has not fallen for many windows; if so, the count starts again."""
        if residual < _FALL * self.best:
            self.best, self.stale = residual, 0
        else:
            self.stale += 1
        if self.stale < _STALE or self._spent(self.k):
            return False
        self.stale = 0
        return True

    def _spent(self, extra: int = 0) -> bool:
        """Whether one more block would leave too few products for the true residuals."""
        return self.op.products + self.block + self.k + extra > self.budget

    def _grow(self) -> bool:
        """Take a few block steps, fewer at the end of window or budget; returns whether the window is full."""
        while True:
            self.saved.point(self._state)
            self.space.expand()
            self.looked += 1
            if self.progress is not None:
                self.progress(self.op.products, self.budget)
            full = self.space.size + self.block > self.window
            spent = self.space.size >= self.k and self._spent(_NOISE_PRODUCTS * (self.noise is None))
            if full or spent or self.looked == _LOOK:
                self.looked = 0
                return full
            self.space.append(self.space.residual)

    def _restart(self, values: Tensor, coefficients: Tensor) -> None:
        """Keep the wanted half and the residual block, whose vanished rows are replaced by random ones."""
        # measured: to keep half the window, and not only the wanted pairs, saves up to half the products on a spectrum
        # without gaps
        keep = min(max(self.k + self.block, self.window // 2), max(self.window - 2 * self.block, self.k))
        kept = select(values, min(keep, len(values), self.window - self.block), self.which)
        self.space.restart(coefficients[:, kept], values[kept])
        self.restarts, self.kept = self.restarts + 1, len(kept)
        if self.seen is not None:  # the same pairs, whose vectors are now rows of the space
            order = values[kept].argsort()
            self.seen = (
                values[kept][order],
                torch.eye(len(kept), dtype=values.dtype)[:, order],
                self.seen[2][kept][order],
            )
        new = slice(self.space.known, self.space.size)
        dead = (~self.space.alive[new]).nonzero()[:, 0]
        if len(dead):
            self.at_refill, self.at_full = values[select(values, min(self.k, len(values)), self.which)], None
            rows = self.space.rows[new].clone()
            fresh = self._draw(len(dead))
            rows[dead] = self.space.shard.part(fresh / row_norms(fresh).to(fresh.dtype)[:, None])
            self.space.append(rows, floor=torch.finfo(rows.dtype).eps ** 0.5)

    def _settled(self, wanted: Tensor, full: bool) -> bool:
        """Whether the converged pairs can be accepted as the wanted ones.

        An exhausted space may have missed copies of an eigenvalue, so random rows are added to it. The pairs are
        accepted if they are the same once the space is exhausted again, or its window is full.
        """
        alive = self.space.alive[: self.space.size]
        if not bool(alive.all()):
            return int(alive.sum()) == self.op.dim or self._same(wanted, self.at_refill)
        if self.at_refill is None or not full:
            return self.at_refill is None
        before, self.at_full = self.at_full, wanted
        return self._same(wanted, self.at_refill if before is None else before)

    def _same(self, wanted: Tensor, before: Tensor | None) -> bool:
        """Whether the wanted values are as before, to tolerance."""
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
        pair = torch.cat([self.space.shard.whole(self.space.combine(coefficients[:, None])), other])
        with self.op.aside():
            apart = self.op.rows(pair).sum(0)
            together = self.op.rows(pair.sum(0, keepdim=True))[0]
        return float(row_norms(together - apart)) / norm if norm else 0.0

    # ------------------------------------------------------------------------------------------ on the disk

    def _state(self) -> State:
        """All that a resumed run needs; rows, which do not change until the next restart, are written once."""
        latest = {name: getattr(self, name) for name in _STATE}
        latest |= {"products": self.op.products, "space": self.space.state(), "seen": self.seen}
        settled = {self._rows(at): rows for at, rows in self.space.blocks(self.block, self.kept)}
        if self.kept:
            settled[self._rows(0)] = self.space.rows[: self.kept]
        return latest, settled

    def _rows(self, at: int) -> str:
        return f"rows-{self.restarts}-{at}"

    def _restore(self, latest: Mapping[str, Any]) -> None:
        """Continue from the saved state."""
        self.op.products = latest["products"]
        if "dense" in latest:
            return
        for name in (*_STATE, "seen"):
            setattr(self, name, latest[name])
        starts = [*([0] if self.kept else []), *range(self.kept, latest["space"]["size"], self.block)]
        blocks = [self.saved.settled(self._rows(at)) for at in starts]
        self.space = BlockSpace.restored(self.op, self.window, latest["space"], blocks, vanishing=0.01 * self.tol)

    # --------------------------------------------------------------------------------------------- the pairs

    def whole(self) -> EigenPairs:
        """The pairs of a small matrix, from its dense form."""
        latest, before = self.saved.latest or {}, []
        if "dense" in latest:  # otherwise it is the last state of the search before the dense matrix
            before = [self.saved.settled(_dense(i)).to(self.op.device) for i in range(latest["dense"])]
            self.op.products = latest["products"]

        def keep(blocks: list[Tensor]) -> None:
            settled = {_dense(i): rows for i, rows in enumerate(blocks)}
            self.saved.point(lambda: ({"dense": len(blocks), "products": self.op.products}, settled))

        values, rows, images = dense_eigenpairs(self.op, before, keep)
        order = select(values, self.k, self.which)
        place = order.to(rows.device)
        return reported(
            self.op, values[order], rows[place], images[place], which=self.which, tol=self.tol,
            norm=float(values.abs().max()), seed=self.seed, noise=None, stops=("exact", stopping.NOISE_FLOOR),
        )  # fmt: skip

    def _unverified(self, values: Tensor, coefficients: Tensor, residuals: Tensor, stop: str) -> EigenPairs:
        """The last Ritz pairs, with the residuals of the recurrence: no product is spent."""
        wanted = select(values, self.k, self.which)
        parts = coefficients[:, wanted].T.to(self.space.rows) @ self.space.rows[: len(coefficients)]
        rows = self.space.shard.whole(parts)
        return EigenPairs(
            values=values[wanted], vectors=rows.T, residuals=residuals[wanted],
            converged=residuals[wanted] <= self.tol * float(values.abs().max()), which=self.which,
            products=self.op.products, seed=self.seed, stop=stop, noise=self.noise, convention=self.op.convention(),
            rule=self._bounds(),
        )  # fmt: skip

    def _verified(self, coefficients: Tensor, norm: float, by_noise: bool = False, foremost: bool = True) -> EigenPairs:
        """The pairs with values and residuals from one product each; converged only if they are `foremost` too.

        With `by_noise`, also decides whether residuals do not fall because of noise: then recurrence and product
        disagree on the image of the worst pair. If the two agree, the search is only slow.
        """
        rows = self.space.shard.whole(self.space.combine(coefficients))
        images = self.op.rows(rows)
        other = stopping.MAX_PRODUCTS if self._spent() else stopping.NOISE_FLOOR
        if by_noise and self._parted(coefficients, rows, images):
            other = stopping.STAGNATION
        projected = row_products(rows, images).cpu()
        values, axes = torch.linalg.eigh((projected + projected.T) / 2)
        order = select(values, self.k, self.which)
        turn = axes[:, order].T.to(rows)
        return reported(
            self.op, values[order], turn @ rows, turn @ images, which=self.which, tol=self.tol, norm=norm,
            seed=self.seed, noise=self.noise, stops=("converged" if foremost else other, other), cut=self._bounds(),
        )  # fmt: skip

    def _bounds(self) -> IntervalRule:
        """The interval's rule for eigenvalues that the search has not found, from its random start."""
        return from_random_rows(self.which, self.op.dim, self.block, *self.first)

    def _parted(self, coefficients: Tensor, rows: Tensor, images: Tensor) -> bool:
        """Whether recurrence and product differ by half of the residual on the pair that is furthest from converged."""
        residuals = self.space.shard.whole(self.space.residual_rows(coefficients))
        across = project_out(images, rows)  # both are orthogonal to the pairs
        sizes = row_norms(across)
        worst = int(sizes.argmax())
        return float(row_norms(across - residuals)[worst]) >= _PARTED * float(sizes[worst])


def _dense(number: int) -> str:
    return f"dense-{number}"


def _cut(error: Exception) -> str:
    """The reason for which a run was cut, as its `stop`."""
    return str(error).partition(";")[0] if isinstance(error, StoppedError) else f"not finite: {error}"


def _check(op: Operator, k: int, which: str, tol: float, max_products: int | None, block: int) -> None:
    """Check the arguments before any product is spent."""
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
    """Warn, with a remedy, if a pair has not converged or the search was cut."""
    found = bool(pairs.converged.all())
    if found and not pairs.cut:
        return
    what = (
        f"{int((~pairs.converged).sum())} of {len(pairs)} eigenpairs have residuals above tol={tol:g} of the spectral "
        f"norm, the largest {float(pairs.residuals.max()):.2g}"
    )
    if found:
        others = "of the other sign may be larger in magnitude" if pairs.which == "magnitude" else "may be further out"
        what = f"the eigenpairs have converged, but some {others}"
    remedy = stopping.remedy(pairs.stop, spent=pairs.products) or pairs.stop
    warnings.warn(f"{what}; {remedy}", NumericalWarning, stacklevel=callers_level())
