"""One Krylov run for many quantities: locked head, short tail.

Block Lanczos finds the outliers and locks them (`krylov.head`). Then K probes, uniform on the sphere of the orthogonal
complement, run m Lanczos steps in lock-step, each step as one batched product (`krylov.lanczos`). `Spectrum` computes
the quantities.
"""

import math
import os
import warnings
from dataclasses import dataclass, replace
from typing import get_args

import torch

from .. import stopping
from ..checkpoint import Checkpoint
from ..errors import NumericalWarning, StoppedError, callers_level
from ..fingerprints import resumable
from ..krylov.head import Head
from ..krylov.lanczos import Reorthogonalize
from ..krylov.tridiagonal import Tridiagonal
from ..operators.algebra import Metered
from ..operators.base import Operator, full_precision
from .krylov_run import HEAD_BLOCK, HEAD_STEPS, NOISE_PRODUCTS, BrokenError, KrylovRun, Progress
from .quantities import Spectrum
from .rounding import widened

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
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Spectrum:
    """The spectrum of a symmetric matrix: trace, norms, extremes, masses, log-determinant and density from one run.

    Args:
        operator: The matrix.
        num_steps: Number of Lanczos steps per probe, m. Sets the resolution of the spectrum.
        num_probes: Number of probes, K. Sets the accuracy of averages over the spectrum.
        seed: Seed of the probes. Two matrices over the same parameters get the same probes, so differences are paired.
        products: Spend at most this many matrix-vector products. The head takes at most a quarter. If the rest is more
            than `num_probes` probes of `num_steps` need, there are more probes; if less, fewer steps.
        tol: Add rounds of `num_probes` probes until the 95 % intervals of Tr H and Tr H^2 are within +- tol, relative.
        reorthogonalize: "locked" (the default run), "full" (no head; every probe keeps its basis, K m vectors of
            memory) or "none" (no head, three vectors per probe; integrals are correct, but outliers are counted many
            times).
        offload: Keep the basis of "full" in host memory.
        progress: Called as progress(products done, products expected).
        checkpoint: A folder, or a `ritz.Checkpoint`, for the state of the run. After a kill, the same call resumes with
            the same routes and chunks; on a CPU the result is bitwise the same. Once the run is finished, the call
            reads the result back.

    Raises:
        ValueError: If an argument is out of range, or the checkpoint is that of another run.
        NonFiniteError: If a product is NaN or infinite before the first step of the tail is done, naming the batch.
        StoppedError: If the run is stopped (`ritz.stoppable`) before that.

    Warns:
        NumericalWarning: If a later product is NaN or infinite, or rows of "full" lose their orthogonality: the steps
            before are returned. If products underflow, or a matrix that is positive by construction turns out not to
            be; `stop` gives the reason. If products are far from those in float64: intervals are then widened
            accordingly.

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
    settings = {
        "num_steps": num_steps, "num_probes": num_probes, "seed": seed, "products": products, "tol": tol,
        "reorthogonalize": reorthogonalize, "offload": offload,
    }  # fmt: skip
    budget = _share_out(operator.dim, num_steps, num_probes, products, tol, reorthogonalize)
    with resumable(checkpoint, operator, "spectrum", settings) as saved:
        if saved.result is not None:
            return saved.result  # type: ignore[no-any-return]
        run = KrylovRun(Metered(operator), saved, seed, reorthogonalize, offload, progress, budget.total)
        run.restore(budget.head_steps)
        operator.expect(max(0, budget.total - run.meter.products))
        run.find_head(budget.head_steps)
        if run.head is not None and run.head.complete:
            run.compare_precisions()
            found = _complete(operator, run.head, run)
        else:
            steps = min(budget.num_steps, operator.dim - (len(run.head.values) if run.head else 0))
            try:
                run.measure_noise()
                run.compare_precisions()
                found = _sampled(operator, run, budget.num_probes, steps, products, tol)
            except (StoppedError, BrokenError) as error:
                return _rounded(operator, run, _assemble(operator, run, run.cut(steps, error)))
        found = _judged(run, _rounded(operator, run, found))
        saved.finish(found)
        return found


def _sampled(
    operator: Operator, run: KrylovRun, num_probes: int, steps: int, products: int | None, tol: float | None
) -> Spectrum:
    """Rounds of probes until there is reason to end."""
    while True:
        run.probe(num_probes, steps)
        if tol is None:
            return _assemble(operator, run, "completed")
        stop = ""
        if _widest(_assemble(operator, run, stop)) <= tol:
            stop = f"intervals within {tol:g}"
        elif products is not None and run.meter.products + steps * num_probes > products:
            stop = f"{products} products spent before the intervals were within {tol:g}: raise products, or tol"
        elif len(run.tails) == MOST_ROUNDS:
            stop = f"intervals not within {tol:g} after {MOST_ROUNDS} rounds of probes: raise num_probes, or tol"
        if stop:
            return _assemble(operator, run, stop)


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


def _complete(operator: Operator, head: Head, run: KrylovRun) -> Spectrum:
    """The whole spectrum by Rayleigh-Ritz: nothing is left to sample."""
    return Spectrum(
        dim=operator.dim, head=head.values, head_residuals=head.residuals, coupling=0.0, ends=(), tail=None,
        layers=operator.space.names, layer_samples=run.head_layers(head), positive=operator.positive,
        noise=torch.finfo(operator.dtype).eps, products=run.meter.products, seed=run.seed,
        stop="complete: every eigenvalue was found", convention=operator.convention(),
    )  # fmt: skip


def _assemble(operator: Operator, run: KrylovRun, stop: str) -> Spectrum:
    head, tails = run.head, run.tails
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
        layer_samples=torch.cat(run.layers, dim=1) + (0.0 if head is None else run.head_layers(head)),
        positive=operator.positive,
        noise=run.noise or 0.0,
        products=run.meter.products,
        seed=run.seed,
        stop=stop,
        convention=operator.convention(),
    )


def _rounded(operator: Operator, run: KrylovRun, found: Spectrum) -> Spectrum:
    """With intervals as wide as the products are wrong, where that is more than they leave out."""
    seen = run.precision
    if seen is None or not seen.rough:
        return found
    seen.tell(operator.dtype)
    return widened(found, seen)


def _judged(run: KrylovRun, found: Spectrum) -> Spectrum:
    """With a reason to doubt it, where there is one, in the place of how it ended."""
    reason = ""
    if run.underflow:
        reason = stopping.UNDERFLOW
    elif found.positive:
        # round-off, that of the forward pass too, may make a positive matrix negative by so much
        largest = float(found.spectral_norm.value)
        slack = max(64 * found.noise, torch.finfo(run.meter.dtype).eps ** 0.5) * largest
        slack += run.precision.errors(largest)[0] if run.precision else 0.0
        reason = stopping.INDEFINITE if float(found.lambda_min.value) < -slack else ""
    if not reason:
        return found
    stop = f"{reason}: {stopping.remedy(reason)}"
    warnings.warn(stop, NumericalWarning, stacklevel=callers_level())
    return replace(found, stop=stop, positive=found.positive and reason != stopping.INDEFINITE)


def _widest(found: Spectrum) -> float:
    """Half-width of the wider relative interval of Tr H and Tr H^2."""
    widths = []
    for estimate in (found.trace, found.moment(2)):
        low, high = (float(end) for end in estimate.interval())
        size = abs(float(estimate.value))
        widths.append((high - low) / 2 / size if size else (math.inf if high > low else 0.0))
    return max(widths)
