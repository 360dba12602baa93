"""One Krylov run, many answers: locked head, short tail.

Block Lanczos finds the outliers and locks them (`krylov.head`); then K probes, uniform on the sphere of what is left,
run m Lanczos steps in lock-step, each step one batched product (`krylov.lanczos`). What follows is in `Spectrum`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ..krylov.head import Head, find_head
from ..krylov.lanczos import Reorthogonalize, Tridiagonal, lanczos
from ..operators.algebra import Metered
from ..operators.base import Operator, full_precision
from .quantities import Spectrum

Progress = Callable[[int, int], None]  # (products done, products expected)

# width, steps and most pairs of the head; benchmarks/krylov.py compares them with the alternatives
HEAD_BLOCK, HEAD_STEPS, HEAD_LOCKED = 8, 12, 32
NOISE_PRODUCTS = 3  # measure the round-off of a product
MOST_ROUNDS = 16  # with a tolerance: rounds of probes before giving up


@full_precision()
def spectrum(
    operator: Operator,
    num_steps: int = 100,
    num_probes: int = 8,
    *,
    seed: int = 0,
    products: int | None = None,
    tol: float | None = None,
    reorthogonalize: Reorthogonalize = "locked",
    offload: bool = False,
    progress: Progress | None = None,
) -> Spectrum:
    """The spectrum of a symmetric matrix: trace, norms, extremes, masses, log-determinant and density from one run.

    Args:
        operator: The matrix.
        num_steps: Lanczos steps of each probe, m: how finely the spectrum is resolved.
        num_probes: Probes, K: how well averages over it are known.
        seed: Of the probes. Two matrices over the same parameters get the same probes, so differences are paired.
        products: Spend at most this many matrix-vector products: the head takes a quarter or less, more than enough for
            `num_probes` probes of `num_steps` goes into more probes, less into fewer steps.
        tol: Add rounds of `num_probes` probes until the 95 % intervals of Tr H and Tr H^2 are within +- tol, relative.
        reorthogonalize: "locked" (the default run), "full" (no head; every probe keeps its basis, K m vectors of
            memory) or "none" (no head, three vectors a probe; integrals stay right, outliers are counted many times).
        offload: Keep the basis of "full" in host memory.
        progress: Called as progress(products done, products expected).

    Raises:
        ValueError: If an argument is out of range.
        NonFiniteError: If a product is NaN or infinite, naming the batch.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.cat([torch.tensor([9.0]), torch.linspace(0, 1, 199)])).double())
        >>> s = spectrum(A, num_steps=30, num_probes=4)
        >>> round(float(s.lambda_max.value), 6), s.products
        (9.0, 219)
        >>> low, high = s.trace.interval()
        >>> low < 9.0 + 99.5 < high
        True
    """
    if num_steps < 1 or num_probes < 1:
        raise ValueError(f"num_steps and num_probes must be at least 1, got {num_steps} and {num_probes}")
    if reorthogonalize not in get_args(Reorthogonalize):
        raise ValueError(f"reorthogonalize must be 'locked', 'full' or 'none', got {reorthogonalize!r}")
    if products is not None and products < 8:
        raise ValueError(f"products must be at least 8, got {products}")
    if tol is not None and not tol > 0:
        raise ValueError(f"tol must be positive, got {tol}")
    run = _Run(Metered(operator), seed, reorthogonalize, offload, progress)
    budget = _share_out(operator.dim, num_steps, num_probes, products, tol, reorthogonalize)
    run.expected = budget.total
    head = run.find_head(budget.head_steps)
    if head is not None and head.complete:
        return _complete(operator, head, run)
    noise = run.noise(head)
    steps = min(budget.num_steps, operator.dim - (len(head.values) if head else 0))
    tails: list[Tridiagonal] = []
    layers: list[Tensor] = []
    stop = "completed"
    for round_ in range(1 if tol is None else MOST_ROUNDS):
        tails.append(run.tail(head, range(round_ * budget.num_probes, (round_ + 1) * budget.num_probes), steps, layers))
        found = _assemble(operator, head, tails, layers, noise, run, stop)
        if tol is None:
            return found
        if _widest(found) <= tol:
            return _assemble(operator, head, tails, layers, noise, run, f"intervals within {tol:g}")
        if products is not None and run.meter.products + steps * budget.num_probes > products:
            stop = f"{products} products spent before the intervals were within {tol:g}"
            break
        stop = f"intervals not within {tol:g} after {MOST_ROUNDS} rounds of probes"
    return _assemble(operator, head, tails, layers, noise, run, stop)


@dataclass(frozen=True)
class _Budget:
    """How products are spent."""

    head_steps: int  # block steps; 0 for no head
    num_probes: int
    num_steps: int

    @property
    def total(self) -> int:
        return self.head_steps * HEAD_BLOCK + NOISE_PRODUCTS + self.num_probes * self.num_steps


def _share_out(
    dim: int, num_steps: int, num_probes: int, products: int | None, tol: float | None, reorthogonalize: str
) -> _Budget:
    """Head steps, probes and steps for a number of products, or for what was asked."""
    head = HEAD_STEPS if reorthogonalize == "locked" else 0
    if products is None:
        return _Budget(head, num_probes, min(num_steps, dim))
    products -= NOISE_PRODUCTS
    if dim > HEAD_BLOCK * head or products < dim:  # else the head diagonalises the matrix for less
        head = min(head, products // 4 // HEAD_BLOCK)
    left = products - head * HEAD_BLOCK
    probes = num_probes if tol is not None else max(num_probes, left // num_steps)
    probes = min(probes, left)
    return _Budget(head, probes, max(1, min(num_steps, dim, left // probes)))


@dataclass
class _Run:
    """The operator under measurement and what every part of the run shares."""

    meter: Metered
    seed: int
    reorthogonalize: Reorthogonalize
    offload: bool
    progress: Progress | None
    expected: int = 0

    def report(self) -> None:
        if self.progress is not None:
            self.progress(self.meter.products, max(self.expected, self.meter.products))

    def find_head(self, num_steps: int) -> Head | None:
        """The locked outliers, or None where the mode or the budget has no head."""
        if num_steps == 0:
            return None
        return find_head(
            self.meter, block=HEAD_BLOCK, num_steps=num_steps, max_locked=HEAD_LOCKED, seed=self.seed,
            progress=lambda done, total: self.report(),
        )  # fmt: skip

    def noise(self, head: Head | None) -> float:
        """Round-off of a product relative to the largest eigenvalue: how far A(x + y) is from A x + A y."""
        x = self.meter.probes([-1000], self.seed, "normal")
        x = x / x.norm()
        y = head.vectors[:1] if head is not None and len(head.values) else x.flip(-1)
        image = self.meter.rows(torch.cat([x, y, x + y]))
        scale = image[:2].norm(dim=1).max()
        return max(float((image[2] - image[0] - image[1]).norm() / scale), torch.finfo(x.dtype).eps) if scale else 0.0

    def head_layers(self, head: Head) -> Tensor:
        """The head's share of each parameter's trace and squared norm, (2, 1, len(layers)).

        theta |u_l|^2 + 2 u_l . r_l and |theta u_l + r_l|^2, summed over the pairs.
        """
        image = head.values.to(head.vectors)[:, None] * head.vectors + head.residual_rows
        traces = head.vectors * (image + head.residual_rows)
        return self._segments(traces, image.square()).sum(1, keepdim=True)

    def _segments(self, *rows: Tensor) -> Tensor:
        """Sums over each parameter, (len(rows), k, len(layers)), float64 on the host."""
        return torch.stack([self.meter.space.segment(each) for each in rows]).double().cpu()

    def tail(self, head: Head | None, indices: range, num_steps: int, layers: list[Tensor]) -> Tridiagonal:
        """Probes in lock-step; their first products also give what each parameter has of the trace and of Tr H^2."""
        locked = head.vectors if head is not None and len(head.values) else None
        left = self.meter.dim - (len(locked) if locked is not None else 0)

        def observe(step: int, rows: Tensor, image: Tensor) -> None:
            if step == 0:
                # H Q v = Q H Q v + U U'H Q v, and U'H Q is the residual rows of the head
                full = image if head is None else image + (rows @ head.residual_rows.T) @ head.vectors
                layers.append(left * self._segments(rows * image, full.square()))
            self.report()

        state = lanczos(
            self.meter, self.meter.probes(indices, self.seed, "normal"), num_steps, locked=locked,
            reorthogonalize=self.reorthogonalize, offload=self.offload,
            scale=float(head.values.abs().max()) if locked is not None and head is not None else 0.0, observe=observe,
        )  # fmt: skip
        tail = state.tridiagonal()
        if not bool(tail.alpha.isfinite().all() and tail.beta.isfinite().all()):
            self.meter.base.diagnose()
        return tail


def _complete(operator: Operator, head: Head, run: _Run) -> Spectrum:
    """The whole spectrum by Rayleigh-Ritz: nothing is left to sample."""
    return Spectrum(
        dim=operator.dim, head=head.values, head_residuals=head.residuals, coupling=0.0, ends=(), tail=None,
        layers=operator.space.names, layer_samples=run.head_layers(head), positive=operator.positive,
        noise=torch.finfo(operator.dtype).eps, products=run.meter.products, seed=run.seed,
        stop="complete: every eigenvalue was found", convention=operator.convention(),
    )  # fmt: skip


def _assemble(
    operator: Operator, head: Head | None, tails: list[Tridiagonal], layers: list[Tensor], noise: float, run: _Run,
    stop: str,
) -> Spectrum:  # fmt: skip
    tail = Tridiagonal(
        torch.cat([t.alpha for t in tails]), torch.cat([t.beta for t in tails]), torch.cat([t.norms2 for t in tails]),
        tails[0].eps,
    )  # fmt: skip
    none = torch.empty(0, dtype=torch.float64)
    return Spectrum(
        dim=operator.dim,
        head=none if head is None else head.values,
        head_residuals=none if head is None else head.residuals,
        coupling=0.0 if head is None else head.coupling,
        ends=() if head is None else (head.theta_min, head.theta_min_residual, head.theta_max, head.theta_max_residual),
        tail=tail,
        layers=operator.space.names,
        layer_samples=torch.cat(layers, dim=1) + (0.0 if head is None else run.head_layers(head)),
        positive=operator.positive,
        noise=noise,
        products=run.meter.products,
        seed=run.seed,
        stop=stop,
        convention=operator.convention(),
    )


def _widest(found: Spectrum) -> float:
    """Half-width of the wider relative interval of Tr H and Tr H^2."""
    widths = []
    for estimate in (found.trace, found.moment(2)):
        low, high = (float(end) for end in estimate.interval())
        size = abs(float(estimate.value))
        widths.append((high - low) / 2 / size if size else (math.inf if high > low else 0.0))
    return max(widths)
