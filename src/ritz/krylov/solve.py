"""Linear systems by preconditioned conjugate gradients, all right-hand sides in lock-step.

    A x = b,   A symmetric positive definite

(Hestenes and Stiefel 1952). A direction of negative curvature, p'Ap <= 0, proves that A is not positive definite: the
column stops there. The residual of the recurrence drifts from the true one, so b - A x is computed anew once in a while
and at the end, and the iteration resumes from it as long as that helps. If the two residuals of a column have nothing
in common any more, the column stagnates: the precision of the products allows no better x (Greenbaum 1997). In both
cases round-off may have carried x far along a direction in which A vanishes, so the column returns the step with the
smallest residual.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import stopping
from ..checkpoint import Checkpoint, Saved, State
from ..errors import NonFiniteError, NumericalWarning, StoppedError, callers_level
from ..fingerprints import mark, of_operator, resumable
from ..operators.algebra import Metered
from ..operators.base import Operator, full_precision
from ..space import row_dots, row_norms
from .head import Progress, refuse_non_finite

Preconditioner = Operator | Callable[[Tensor], Tensor]

_LOOK = 8  # steps between checks whether all columns are done: each check waits for the device
_ROUNDS = 3  # rounds of the iteration, each of which starts from a true residual
_TRUE = 64  # steps between computations of the true residual, which cost a product each
_PARTED = 0.9  # relative error from which on the residual of the recurrence says nothing about the true one


class Solution(Tensor):
    """The solution x of A x = b: a tensor of the shape of b, with its residuals and the reason why the run ended.

    Attributes:
        residuals: |b - A x| / |b|, recomputed, one per column (a scalar tensor for one vector), float64.
        converged: Which columns are within tolerance, bool.
        negative_curvature: Which columns met p'Ap <= 0, bool: A is not positive definite, and x is the step with the
            smallest residual.
        num_steps: Steps of the recurrence.
        products: Matrix-vector products spent.
        stop: "converged", or a reason of `ritz.stopping`: "negative curvature", "stagnation", "max_steps" or "noise
            floor". If the run was stopped, or a product was not finite, it says so, and x is the last step before that.
        convention: Which matrix.
    """

    # results of operations on it are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    residuals: Tensor
    converged: Tensor
    negative_curvature: Tensor
    num_steps: int
    products: int
    stop: str
    convention: str

    @property
    def x(self) -> Tensor:
        """The plain tensor."""
        return self.as_subclass(Tensor)


@full_precision()
def solve(
    op: Operator,
    b: Tensor,
    *,
    tol: float = 1e-6,
    max_steps: int | None = None,
    preconditioner: Preconditioner | None = None,
    progress: Progress | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Solution:
    """The solution of A x = b by preconditioned conjugate gradients: a tensor with its residuals.

    Args:
        op: A, symmetric positive definite: `H + damping` for a Hessian.
        b: One right-hand side (dim,), or columns (dim, k).
        tol: Relative residual |b - A x| / |b| required for every column.
        max_steps: Largest number of steps; default min(10 dim, 1000).
        preconditioner: M^-1, an approximate inverse of A, symmetric positive definite: an operator, or a function of
            columns (dim, k) -> (dim, k).
        progress: Called as progress(steps done, most steps) every few steps.
        checkpoint: A folder, or a `ritz.Checkpoint`, for the state of the run. After a kill, the same call resumes, and
            on a CPU the result is bitwise the same. A preconditioner that is a function is identified by its name.

    Raises:
        ValueError: If an argument does not fit, the preconditioner is not positive definite, or the checkpoint is that
            of another call.
        NonFiniteError: If the first product is NaN or infinite.
        StoppedError: If the run is stopped (`ritz.stoppable`) before the first step.

    Warns:
        NumericalWarning: If a column has not converged, or met negative curvature or a non-finite product.

    Example:
        >>> from ritz.operators.algebra import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64)))
        >>> solve(A + 1.0, torch.tensor([2.0, 8.0], dtype=torch.float64)).tolist()
        [1.0, 2.0]
    """
    steps = _check(op, b, tol, max_steps)
    metered = Metered(op)
    inverse = _inverse(op, preconditioner)
    rows = b.reshape(op.dim, -1).T.to(op.device, op.dtype).contiguous()  # (k, dim)
    exponents = _exponents(rows)
    rows = torch.ldexp(rows, -exponents)
    settings = {"tol": tol, "max_steps": steps, "b": mark([b]), "preconditioner": _named(preconditioner)}
    with resumable(checkpoint, op, "solve", settings) as saved:
        run = _Run(metered, inverse, rows, tol, steps, progress, saved)
        if saved.latest is not None:
            run.restore(saved.latest)
        if saved.result is None:
            run.solve()
        if saved.result is None and not run.cut:
            saved.write({**run.state()[0], "result": "done"})
    return _report(metered, run, exponents, tol, steps, b)


class _Run:
    """The recurrence of all columns in lock-step; columns that are done are masked and do not change any more."""

    _KEPT = (
        "x", "residual", "direction", "size", "active", "negative", "unfit", "broken", "stalled", "relative", "best_x",
        "best", "least_x", "least",
    )  # fmt: skip
    _NUMBERS = ("steps", "round", "checked")

    def __init__(
        self,
        op: Metered,
        inverse: Callable[[Tensor], Tensor],
        rows: Tensor,
        tol: float,
        max_steps: int,
        progress: Progress | None,
        saved: Saved,
    ) -> None:
        self.op, self.inverse, self.rows, self.tol, self.max_steps = op, inverse, rows, tol, max_steps
        self.progress, self.saved = progress, saved
        self.sizes = row_norms(rows)
        self.goals = 0.5 * tol * self.sizes
        self.relative = torch.ones_like(self.sizes)  # true residuals, when last computed
        self.x = torch.zeros_like(rows)
        self.best_x, self.best = self.x, torch.full_like(self.sizes, torch.inf)  # at the end of the round before
        self.steps, self.round, self.checked = 0, 0, 0  # steps and rounds done; step of the last true residual
        self.cut = ""  # why the run was cut short
        self.negative = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        self.unfit = self.negative.clone()  # met r'M^-1 r <= 0
        self.broken = self.negative.clone()  # met NaN
        self.stalled = self.negative.clone()  # drifted away from the true residual
        self.resume(rows, row_norms(rows) > 0)

    def state(self) -> State:
        """All that a resumed run needs."""
        kept = {name: getattr(self, name) for name in (*self._NUMBERS, *self._KEPT)}
        return {"products": self.op.products, **kept}, {}

    def restore(self, latest: dict[str, Any]) -> None:
        """Continue from the saved state. Tensors are copied, since kernels may round differently at other addresses."""
        self.op.products = latest["products"]
        for name in self._NUMBERS:
            setattr(self, name, latest[name])
        for name in self._KEPT:
            setattr(self, name, latest[name].to(self.rows.device, copy=True))

    def solve(self) -> None:
        """Rounds of the recurrence, each from the true residual of the last one, as long as residuals fall."""
        while True:
            self.iterate()
            self.x = torch.where((self.negative | self.stalled)[:, None], self.least_x, self.x)
            residual = self.rows - self.op.rows(self.x)
            before, self.relative = self.relative, _relative(row_norms(residual), self.sizes)
            open_ = (self.relative > self.tol) & ~self.negative & (self.relative < 0.5 * before)
            self.round += 1
            if not bool(open_.any()) or self.round == _ROUNDS or self.steps >= self.max_steps or self.cut:
                break
            self.best_x, self.best = self.x, self.relative
            self.resume(residual, open_)
        worse = (self.relative > self.best) & ~self.negative  # the last round made these columns worse
        self.x = torch.where(worse[:, None], self.best_x, self.x)
        self.relative = torch.where(worse, self.best, self.relative)

    def resume(self, residual: Tensor, active: Tensor) -> None:
        """Restart the columns that are `active` from x and its true residual."""
        self.residual, self.active, self.checked = residual, active, self.steps
        self.least_x, self.least = self.x, torch.full_like(self.sizes, torch.inf)  # among the steps to come
        preconditioned = self.inverse(residual)
        self.direction = preconditioned
        self.size = row_dots(residual, preconditioned)  # r'M^-1 r
        self._see_preconditioner()

    def iterate(self) -> None:
        """Steps until no column is active, or max_steps is reached; reads from the device once in a while.

        A resumed run does so after the same steps as a run that was not interrupted.
        """
        wish = ""
        while True:
            spent = self.steps >= self.max_steps
            if (wish or spent or self.steps % _LOOK == 0) and (not self._look() or spent):
                return
            for _ in range(min(_LOOK - self.steps % _LOOK, self.max_steps - self.steps)):
                self._step()
                if wish := self.saved.offer(self.state):
                    break

    def _step(self) -> None:
        image = self.op.rows(self.direction)
        curvature = row_dots(self.direction, image)  # (k,)
        self.broken |= self.active & curvature.isnan()
        self.negative |= self.active & (curvature <= 0)
        self.active = self.active & (curvature > 0)
        image = image.masked_fill(~self.active[:, None], 0.0)  # NaN and infinities must not spread
        length = torch.where(self.active, self.size / curvature, 0.0)
        self.x = _add(self.x, length, self.direction)
        self.residual = _add(self.residual, -length, image)
        norms = row_norms(self.residual)
        closer = self.active & (norms < self.least)
        self.least_x = torch.where(closer[:, None], self.x, self.least_x)
        self.least = torch.where(closer, norms, self.least)
        self.active = self.active & (norms > self.goals)
        preconditioned = self.inverse(self.residual)
        before, self.size = self.size, row_dots(self.residual, preconditioned)
        self._see_preconditioner()
        turn = torch.where(self.active, self.size / before, 0.0)
        self.direction = _add(preconditioned, turn, self.direction)
        self.steps += 1

    def _check_residuals(self) -> None:
        """Stop columns whose recurrence has drifted from b - A x: its residual could fall for ever while x stays."""
        self.checked = self.steps
        true = self.rows - self.op.rows(self.x)
        parted = row_norms(true - self.residual) >= _PARTED * row_norms(true)
        self.stalled = self.stalled | (self.active & parted)
        self.active = self.active & ~parted

    def _see_preconditioner(self) -> None:
        self.unfit |= self.active & (self.size <= 0)
        self.broken |= self.active & self.size.isnan()
        self.active = self.active & (self.size > 0)

    def _look(self) -> bool:
        """Whether to go on: waits for the device, checks for errors, reports progress and offers a checkpoint."""
        if self.checked + _TRUE <= self.steps < self.max_steps and bool(self.active.any()):
            self._check_residuals()
        active, unfit, broken = torch.stack([self.active.any(), self.unfit.any(), self.broken.any()]).tolist()
        if broken:
            self._cut_short()
        if unfit:
            raise ValueError(
                "the preconditioner is not positive definite: it gave r'M^-1 r <= 0; damp it, or leave it out"
            )
        if self.progress is not None:
            self.progress(self.steps, self.max_steps)
        if active and (wish := self.saved.offer(self.state)):
            if not self.steps:
                raise StoppedError(wish)
            self.cut = wish
        return bool(active) and not self.cut

    def _cut_short(self) -> None:
        """A product was not finite: end with the x of the step before, or raise if there was none."""
        try:
            refuse_non_finite(self.op)
        except NonFiniteError as error:
            if not bool(self.x.any()):
                raise
            self.cut = f"not finite: {error}"


def _report(op: Metered, run: _Run, exponents: Tensor, tol: float, max_steps: int, b: Tensor) -> Solution:
    """The result, and a warning with a remedy if not all columns have converged."""
    x = torch.ldexp(run.x, exponents)
    relative, negative = run.relative.cpu(), run.negative.cpu()
    if not bool(relative.isfinite().all()) and not run.cut:
        refuse_non_finite(op)
    if bool(exponents.any()):
        relative = torch.maximum(relative, _lost(run.x, x, exponents).cpu())
    converged = relative <= tol
    negative = negative & ~converged
    if bool(converged.all()):
        stop = "converged"
    elif run.cut:
        stop = run.cut
    elif bool(negative.any()):
        stop = stopping.NEGATIVE_CURVATURE
    elif bool((run.stalled.cpu() & ~converged).any()):
        stop = stopping.STAGNATION
    else:
        stop = stopping.MAX_STEPS if run.steps >= max_steps else stopping.NOISE_FLOOR
    if stop != "converged":
        warnings.warn(
            f"{int((~converged).sum())} of {len(converged)} systems not solved to tol={tol:g}, largest relative "
            f"residual {float(relative.max()):.2g}; {stopping.remedy(stop, taken=run.steps) or stop}",
            NumericalWarning,
            stacklevel=callers_level(),
        )
    shape = b.shape[1:]
    found = x.T.reshape(b.shape).contiguous().as_subclass(Solution)
    found.residuals, found.converged = relative.reshape(shape), converged.reshape(shape)
    found.negative_curvature = negative.reshape(shape)
    found.num_steps, found.products, found.stop, found.convention = run.steps, op.products, stop, op.convention()
    return found


def _check(op: Operator, b: Tensor, tol: float, max_steps: int | None) -> int:
    """Check the arguments before any product is spent; returns the largest number of steps."""
    if not isinstance(b, Tensor) or not b.is_floating_point():
        raise TypeError(
            f"b must be a floating-point tensor, got {b.dtype if isinstance(b, Tensor) else type(b).__name__}"
        )
    if b.ndim not in (1, 2) or b.shape[0] != op.dim or not b.numel():
        raise ValueError(f"expected b of shape (dim={op.dim},) or (dim, k), got {tuple(b.shape)}")
    if not bool(b.isfinite().all()):
        raise ValueError("b has NaN or infinite entries; check where it came from")
    if not 0 < tol < 1:
        raise ValueError(f"tol must lie between 0 and 1, got {tol}")
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}")
    return max_steps if max_steps is not None else min(10 * op.dim, 1000)


def _named(preconditioner: Preconditioner | None) -> Any:
    """What identifies the preconditioner in the fingerprint of the run."""
    if isinstance(preconditioner, Operator):
        return of_operator(preconditioner)
    return None if preconditioner is None else getattr(preconditioner, "__qualname__", type(preconditioner).__name__)


def _inverse(op: Operator, preconditioner: Preconditioner | None) -> Callable[[Tensor], Tensor]:
    """M^-1 as a function of rows."""
    if preconditioner is None:
        return lambda rows: rows
    if isinstance(preconditioner, Operator):
        if preconditioner.dim != op.dim:
            raise ValueError(f"the preconditioner has dim={preconditioner.dim}, but the matrix has dim={op.dim}")
        operator = preconditioner
        return lambda rows: operator.rows(rows).to(rows)
    function = preconditioner

    def apply(rows: Tensor) -> Tensor:
        image = function(rows.T)
        if not isinstance(image, Tensor):
            raise TypeError(f"the preconditioner must return a tensor, got a {type(image).__name__}")
        if image.shape != rows.T.shape:
            raise ValueError(
                f"the preconditioner must return columns of the given shape {tuple(rows.T.shape)}, "
                f"got {tuple(image.shape)}"
            )
        return image.T.to(rows).contiguous()

    return apply


def _exponents(rows: Tensor) -> Tensor:
    """Exponents (k, 1) of 2 by which to scale rows whose squares would under- or overflow; 0 for all other rows."""
    info, largest = torch.finfo(rows.dtype), rows.abs().amax(1, keepdim=True)
    small, large = largest < (info.tiny / info.eps) ** 0.5, largest > (info.max * info.eps) ** 0.5
    return torch.where((largest > 0) & (small | large), torch.frexp(largest).exponent, 0)


def _lost(rows: Tensor, x: Tensor, exponents: Tensor) -> Tensor:
    """Relative error (k,) of scaling each row back; infinite if the result leaves the range of its dtype."""
    apart = (torch.ldexp(x, -exponents) - rows).double()
    return _relative(row_norms(apart), row_norms(rows.double())).nan_to_num(torch.inf)


def _relative(norms: Tensor, sizes: Tensor) -> Tensor:
    """norms / sizes, and 0 for a zero right-hand side."""
    return torch.where(sizes > 0, norms / torch.where(sizes > 0, sizes, 1.0), 0.0)


def _add(rows: Tensor, factors: Tensor, others: Tensor) -> Tensor:
    """rows + factors * others, one factor (k,) for each row."""
    return torch.addcmul(rows, factors.to(rows.dtype)[:, None], others)
