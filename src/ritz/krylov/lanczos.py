"""Lanczos on K probes in lock-step: one batched product per step, float64 tridiagonals, plain-data state.

For each probe, with unit rows q_1, q_2, ... and q_1 the normalised start,

    A q_j = beta_{j-1} q_{j-1} + alpha_j q_j + beta_j q_{j+1}

(Lanczos 1950, in the order of operations of Paige 1972). Three ways to keep the rows orthogonal:

* "locked": project every image only against a shared orthonormal basis of locked eigenvectors. The rows of a probe lose
  orthogonality once a Ritz value converges, but quadrature stays right (Greenbaum 1989), and once the outliers are
  locked, few Ritz values converge.
* "none": the same without a locked basis.
* "full": also re-orthogonalise against every earlier row of the same probe, twice, as batched matrix products. This
  stores all rows: num_steps * K * dim numbers, on the device or on the host. It also measures how far each row is from
  being orthonormal to the earlier ones (`LanczosState.overlaps`).

A probe whose Krylov space is exhausted breaks down: beta_j is then set to exactly 0 and the next row to zero, so that
the leading block, whose quadrature is exact, stands alone. Nothing in the loop waits for the device.

If several ranks compute products together, each keeps its part of the locked rows and of the basis (`space.Shard`).
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..comm import SELF, World
from ..operators.base import Operator
from ..space import Shard, row_dots, row_products
from ..storage import Result
from .tridiagonal import Tridiagonal

Reorthogonalize = Literal["locked", "full", "none"]
Observer = Callable[[int, Tensor, Tensor], None]

BREAKDOWN = 32.0  # beta_j below this many eps times the scale of T is round-off
_CHUNK = 8  # steps of a host basis brought to the device at a time


@dataclass(frozen=True, eq=False, kw_only=True)
class LanczosState(Result):
    """A run after some steps: all that is needed to save it and to continue it as if it had not stopped.

    Attributes:
        alpha: Diagonals so far (k, m), float64.
        beta: Off-diagonals and the residual so far (k, m), float64.
        rows: The unit rows of the next step (k, dim); zero where the probe has broken down.
        previous: The unit rows of the last step (k, dim).
        norms: Norms of the start rows after projection (k,), float64.
        scale: The size of the matrix as each probe has seen it, or as it follows from the noise of the products (k,),
            float64. A beta is round-off (breakdown) if it is small relative to this.
        basis: The rows of all steps (m, k, dim), for "full" only, on the device or on the host.
        locked: Shared orthonormal rows (r, dim) to which every row is kept orthogonal. A rank keeps only its part of
            `basis` and `locked`.
        reorthogonalize: "locked", "full" or "none".
        overlaps: For "full": max_i |q_i . q_j - delta_ij| over i <= j for the row of each step (k, m), float64.
    """

    alpha: Tensor
    beta: Tensor
    rows: Tensor
    previous: Tensor
    norms: Tensor
    scale: Tensor
    basis: Tensor | None
    locked: Tensor | None
    reorthogonalize: str
    overlaps: Tensor | None = None

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return self.alpha.shape[1]

    @property
    def num_probes(self) -> int:
        """Probes in lock-step."""
        return self.rows.shape[0]

    def alive(self) -> Tensor:
        """Which probes have not broken down, (k,) bool on the device."""
        return (self.norms > 0) & (self.beta > 0).all(1)

    def lost(self) -> Tensor:
        """Which steps used a row whose overlaps are larger than sqrt(eps), (m,) bool on the device.

        Up to that, T equals that of exact arithmetic except for round-off (semi-orthogonality, Simon 1984).
        """
        if self.overlaps is None:
            return torch.zeros(self.num_steps, dtype=torch.bool, device=self.alpha.device)
        limit: float = torch.finfo(self.rows.dtype).eps ** 0.5
        return (self.overlaps > limit).any(0)

    def first(self, num_steps: int) -> "LanczosState":
        """The state with the tridiagonals and overlaps of the first steps only; the rows remain those of the last."""
        overlaps = None if self.overlaps is None else self.overlaps[:, :num_steps]
        return dataclasses.replace(
            self, alpha=self.alpha[:, :num_steps], beta=self.beta[:, :num_steps], overlaps=overlaps
        )

    def tridiagonal(self) -> Tridiagonal:
        """The tridiagonals, on the host."""
        if not self.num_steps:
            raise ValueError("no step has been taken yet; call extend or lanczos first")
        eps = torch.finfo(self.rows.dtype).eps
        return Tridiagonal(self.alpha.cpu(), self.beta.cpu(), self.norms.square().cpu(), eps)

    def to(self, device: torch.device | str, *, offload: bool = False) -> "LanczosState":
        """The state on another device; with `offload`, the basis of "full" is not moved."""
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor) and not (offload and name == "basis"):
                moved[name] = value.to(device)
        return LanczosState(**moved)


def start(
    rows: Tensor,
    *,
    locked: Tensor | None = None,
    reorthogonalize: Reorthogonalize = "locked",
    offload: bool = False,
    noise: float = 0.0,
    world: World = SELF,
) -> LanczosState:
    """The state before the first step: start rows projected against the locked ones and normalised.

    Args:
        rows: Start rows (k, dim), one for each probe, of any length.
        locked: Orthonormal rows (r, dim) or this rank's part of them, or None.
        reorthogonalize: See the module's text.
        offload: Keep the basis of "full" in host memory.
        noise: The norm of the round-off of a product, if it is known. Once the outliers are locked, the rest of the
            matrix may be nothing but their round-off, and only `noise` distinguishes this from a small matrix.
        world: The ranks that compute products together: those of the operator.

    Raises:
        ValueError: If the shapes do not fit, the mode is unknown, or "none" is given a locked basis.

    Example:
        >>> start(torch.tensor([[3.0, 4.0]])).norms.tolist()
        [5.0]
    """
    if rows.ndim != 2 or not len(rows) or not rows.is_floating_point():
        raise ValueError(
            f"expected floating-point start rows (k, dim) with k > 0, got {tuple(rows.shape)} {rows.dtype}"
        )
    if reorthogonalize not in get_args(Reorthogonalize):
        raise ValueError(f"reorthogonalize must be 'locked', 'full' or 'none', got {reorthogonalize!r}")
    shard = Shard(world, rows.shape[1])
    if locked is not None and (locked.ndim != 2 or locked.shape[1] not in (shard.dim, shard.width)):
        raise ValueError(f"expected locked rows (r, dim={rows.shape[1]}), got {tuple(locked.shape)}")
    if locked is not None and reorthogonalize == "none":
        raise ValueError("reorthogonalize='none' takes no locked rows; use 'locked', or 'full'")
    locked = shard.part(locked.to(rows)) if locked is not None and len(locked) else None
    own = shard.part(rows)
    before = shard.norms(own)
    own = own if locked is None else shard.project_out(own, locked, times=2)
    norms = shard.norms(own)
    # of a start row inside the locked space, only round-off is left
    norms = torch.where(norms <= BREAKDOWN * torch.finfo(rows.dtype).eps * before, 0.0, norms)
    rows = shard.whole(_divided(own, norms))
    basis = None
    if reorthogonalize == "full":
        basis = torch.empty(0, *own.shape, dtype=rows.dtype, device="cpu" if offload else rows.device)
    empty = norms.new_zeros(len(rows), 0)
    return LanczosState(
        alpha=empty, beta=empty, rows=rows, previous=torch.zeros_like(rows), norms=norms,
        scale=torch.full_like(norms, noise / (BREAKDOWN * torch.finfo(rows.dtype).eps)), basis=basis, locked=locked,
        reorthogonalize=reorthogonalize, overlaps=None if basis is None else empty,
    )  # fmt: skip


def lanczos(
    op: Operator,
    rows: Tensor,
    num_steps: int,
    *,
    locked: Tensor | None = None,
    reorthogonalize: Reorthogonalize = "locked",
    offload: bool = False,
    noise: float = 0.0,
    observe: Observer | None = None,
) -> LanczosState:
    """`num_steps` steps from the start rows: `start`, then `extend`.

    Example:
        >>> from ritz.operators.algebra import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)))
        >>> T = lanczos(A, torch.ones(1, 3, dtype=torch.float64), 3).tridiagonal()
        >>> [round(t, 6) for t in T.gauss().nodes[0].tolist()]
        [1.0, 2.0, 4.0]
    """
    first = start(rows, locked=locked, reorthogonalize=reorthogonalize, offload=offload, noise=noise, world=op.world)
    return extend(op, first, num_steps, observe=observe)


def extend(
    op: Operator,
    state: LanczosState,
    num_steps: int,
    *,
    observe: Observer | None = None,
    checkpoint: Callable[[LanczosState], None] | None = None,
) -> LanczosState:
    """`num_steps` more steps from any state, fresh or loaded; on one CPU the result does not depend on interruptions.

    Args:
        op: The matrix.
        state: The state to continue from.
        num_steps: How many steps.
        observe: Called as observe(step, rows, image) with the unit rows of the step, (k, dim), and their images after
            projection against the locked rows; both are zero for a probe that has broken down. It must not modify them.
            With several ranks, it gets this rank's parts.
        checkpoint: Called with the state after each step, and may save it.

    Raises:
        ValueError: If the operator's dimension is not that of the rows, or num_steps < 1.
    """
    if op.dim != state.rows.shape[1]:
        raise ValueError(f"the operator has dim={op.dim}, but the rows of the state have {state.rows.shape[1]} entries")
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    state = _aligned(state)
    room = _room(state, num_steps)
    for _ in range(num_steps):
        state = _step(op, state, room, observe)
        if checkpoint is not None:
            checkpoint(state)
    return state


def _step(op: Operator, state: LanczosState, room: Tensor | None, observe: Observer | None) -> LanczosState:
    """One step; `room` is the buffer for the basis of "full"."""
    step, rows, alive = state.num_steps, state.rows, state.alive()
    last = state.beta[:, -1] if step else torch.zeros_like(state.norms)
    # some products of a zero row are 0/0 (differences along it); a broken-down probe has image 0
    shard = Shard(op.world, op.dim)
    image = shard.part(op.rows(rows).masked_fill(~alive[:, None], 0.0))
    own = shard.part(rows)
    if state.locked is not None:
        image = shard.project_out(image, state.locked, times=2)
    if observe is not None:
        observe(step, own, image)
    new = image - last.to(rows.dtype)[:, None] * shard.part(state.previous)
    alpha = shard.sum(row_dots(own, new))
    new = new - alpha.to(rows.dtype)[:, None] * own
    if state.locked is not None:
        # round-off leaves a part of the rows in the locked space, where QAQ has the eigenvalue 0; the recurrence makes
        # this part grow if 0 lies outside the rest of the spectrum
        new = shard.project_out(new, state.locked)
    basis, overlaps = None, state.overlaps
    if room is not None:
        room[step].copy_(own, non_blocking=True)
        basis = room[: step + 1]
        for measured in (own, None):
            new, overlap = _reorthogonalised(new, basis, shard, measured)
            if overlap is not None and overlaps is not None:
                overlaps = torch.cat([overlaps, torch.where(alive, overlap, 0.0)[:, None]], dim=1)
            if state.locked is not None:
                new = shard.project_out(new, state.locked)
    beta = shard.norms(new)
    scale = torch.maximum(state.scale, alpha.abs() + last)
    beta = torch.where(beta <= BREAKDOWN * torch.finfo(rows.dtype).eps * scale, 0.0, beta)
    beta = torch.where(alive, beta, 0.0)
    return LanczosState(
        alpha=torch.cat([state.alpha, alpha[:, None]], dim=1), beta=torch.cat([state.beta, beta[:, None]], dim=1),
        rows=shard.whole(_divided(new, beta)), previous=rows, norms=state.norms, scale=torch.maximum(scale, beta),
        basis=basis, locked=state.locked, reorthogonalize=state.reorthogonalize, overlaps=overlaps,
    )  # fmt: skip


def _reorthogonalised(
    rows: Tensor, basis: Tensor, shard: Shard, measured: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Rows (k, dim) orthogonalised against the rows of the same probe in basis (m, k, dim); all are this rank's parts.

    Also how far `measured`, the last rows of the basis, are from being orthonormal to all of it, (k,) float64: this
    costs little here, because a basis on the host is brought to the device anyway.
    """
    products = []
    for piece in _brought(basis, rows.device):
        along = shard.sum(_along(piece, rows))  # (k, m)
        rows = torch.baddbmm(rows[:, None, :], along.to(rows.dtype)[:, None], piece.transpose(0, 1), alpha=-1)[:, 0]
        if measured is not None:
            products.append(shard.sum(_along(piece, measured)))
    if measured is None:
        return rows, None
    overlaps = torch.cat(products, dim=1)  # (k, m)
    overlaps[:, -1] -= 1.0
    return rows, overlaps.abs().amax(1)


def _along(basis: Tensor, rows: Tensor) -> Tensor:
    """Inner products of each of the rows (k, dim) with those of the same probe in basis (m, k, dim), (k, m) float64."""
    return torch.cat([row_products(rows[i : i + 1], basis[:, i]) for i in range(len(rows))])


def underflows(image: Tensor) -> bool:
    """Whether a product is so small that the squares of even its largest entries underflow, so that norms are wrong.

    Example:
        >>> underflows(torch.full((2,), 1e-20)), underflows(torch.full((2,), 1e-20, dtype=torch.float64))
        (True, False)
    """
    info = torch.finfo(image.dtype)
    least: float = (info.tiny / info.eps) ** 0.5
    return 0 < float(image.abs().max()) < least


def _brought(basis: Tensor, device: torch.device) -> Iterator[Tensor]:
    """The basis on the device: in one piece if it is there already, else in pieces from the host.

    The next piece is copied on a separate stream while the current one is in use.
    """
    if basis.device == device or device.type != "cuda":
        yield basis.to(device)
        return
    current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(current)  # the last rows may still be on their way to the host
    pieces = basis.split(_CHUNK)

    def fetched(number: int) -> Tensor | None:
        with torch.cuda.stream(aside):
            return pieces[number].to(device, non_blocking=True) if number < len(pieces) else None

    ahead = fetched(0)
    for number in range(len(pieces)):
        current.wait_stream(aside)
        piece, ahead = ahead, fetched(number + 1)
        assert piece is not None
        piece.record_stream(current)  # its memory is not reused before the current stream is done with it
        yield piece


def _room(state: LanczosState, num_steps: int) -> Tensor | None:
    """A buffer for the basis of the whole run, which starts with the rows so far."""
    if state.basis is None:
        return None
    done, pinned = state.num_steps, state.basis.device.type == "cpu" and state.rows.is_cuda
    room = torch.empty(
        done + num_steps, *state.basis.shape[1:], dtype=state.basis.dtype, device=state.basis.device, pin_memory=pinned
    )
    room[:done] = state.basis
    return room


def _aligned(state: LanczosState) -> LanczosState:
    """The state with its rows aligned as in fresh tensors: CPU kernels may round differently at other addresses."""

    def fresh(tensor: Tensor) -> Tensor:
        return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()

    locked = None if state.locked is None else fresh(state.locked)
    return dataclasses.replace(state, rows=fresh(state.rows), previous=fresh(state.previous), locked=locked)


def _divided(rows: Tensor, norms: Tensor) -> Tensor:
    """Rows over their norms; zero where the norm is zero."""
    dead = norms == 0
    return (rows / torch.where(dead, 1.0, norms).to(rows.dtype)[:, None]).masked_fill(dead[:, None], 0.0)
