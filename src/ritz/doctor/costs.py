"""What a run will take: measured on one batch, and scaled.

time     products: t(k) = a + b k seconds for k vectors on one batch, from k = 1 and a full chunk, times the samples
         over those of the batch, times the calls that a run makes; vector work: one projection of 8 rows against 8,
         times how often the run does the like
memory   the tensors that live during one product on that batch, counted, and the vectors that the run holds
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..estimators.krylov_run import HEAD_BLOCK, HEAD_LOCKED, HEAD_STEPS, NOISE_PRODUCTS
from ..measures.elsewhere import TURNING, VECTORS, steps_elsewhere
from ..measures.registry import resolve
from ..measures.row import Measure
from ..operators.footprint import LiveBytes
from ..operators.risk_operator import RiskOperator
from ..risk import Risk
from .checkup import Projection, count

_ENOUGH = 0.2  # seconds after which a timing is not repeated
_MOST = 5  # repeats of a timing
_LONG = 2.0  # seconds of a first call, which loads and traces as well, that are not worth repeating
_FORWARD = 0.4  # of a gradient


def seconds_of(fn: Callable[[], Any], device: torch.device) -> float:
    """The median of a few calls after a first one; that one itself where it takes long."""
    first = seconds_once(fn, device)
    if first > _LONG:
        return first
    times: list[float] = []
    while len(times) < _MOST and sum(times) < _ENOUGH:
        times.append(seconds_once(fn, device))
    return sorted(times)[len(times) // 2]


def seconds_once(fn: Callable[[], Any], device: torch.device) -> float:
    """Of one call."""
    start = _now(device)
    fn()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


clock = time.perf_counter  # a test on a busy machine takes the time of the process


@dataclass(frozen=True)
class Products:
    """Seconds of products on one batch, as a function of how many vectors there are."""

    one: float
    full: float
    chunk: int
    scale: float  # samples in all over those of the batch

    def seconds(self, rows: int) -> float:
        """For `rows` vectors over all data."""
        each = (self.full - self.one) / (self.chunk - 1) if self.chunk > 1 else self.one
        pieces, left = divmod(rows, self.chunk)
        return self.scale * (pieces * self.full + (max(self.one + each * (left - 1), 0.0) if left else 0.0))


def time_products(operator: RiskOperator, scale: float) -> Products:
    """By a product of one vector, and one of a chunk of them, on the one batch of the operator's risk."""
    chunk = operator.risk.plan.chunk
    rows = operator.probes(range(chunk), seed=0, distribution="normal")
    one = seconds_of(lambda: operator.rows(rows[:1]), operator.device)
    full = one if chunk == 1 else seconds_of(lambda: operator.rows(rows), operator.device)
    return Products(one, max(full, one), chunk, scale)


def time_projection(operator: RiskOperator) -> float:
    """Seconds of projecting 8 rows against 8."""
    rows = operator.probes(range(8), seed=0, distribution="normal")
    return seconds_of(lambda: rows - (rows @ rows.T) @ rows, operator.device)


def spectrum_seconds(products: Products, projection: float, dim: int, num_steps: int, num_probes: int) -> float:
    """Of `ritz.spectrum` with its defaults."""
    if _small(dim):
        return products.seconds(dim)
    head = HEAD_STEPS * products.seconds(HEAD_BLOCK) + products.seconds(NOISE_PRODUCTS)
    tail = min(num_steps, dim) * products.seconds(num_probes)
    # a head step projects its block six times against all rows so far; a tail step its rows three times against those
    # that are locked
    units = 6 * HEAD_STEPS * (HEAD_STEPS + 2) / 2 + num_steps * num_probes / 8 * (3 * HEAD_LOCKED / 8 + 2)
    return head + tail + units * projection


def _small(dim: int) -> bool:
    """Whether the matrix is diagonalised in full."""
    return dim <= HEAD_BLOCK * HEAD_STEPS


def spectrum_rows(dim: int, num_probes: int) -> int:
    """How many vectors of length dim `ritz.spectrum` holds at most, those inside a product left out."""
    if _small(dim):
        return 3 * dim
    filled = HEAD_BLOCK * HEAD_STEPS
    return max(filled + 5 * HEAD_BLOCK, filled + HEAD_BLOCK + 2 * HEAD_LOCKED, 2 * HEAD_LOCKED + 6 * num_probes)


def product_bytes(operator: RiskOperator) -> float:
    """The most that lives at once during a product of a chunk of vectors, by the allocator or by counting tensors."""
    rows = operator.probes(range(operator.risk.plan.chunk), seed=0, distribution="normal")
    if operator.device.type == "cuda":
        before = torch.cuda.memory_allocated(operator.device)
        torch.cuda.reset_peak_memory_stats(operator.device)
        operator.rows(rows)
        return float(torch.cuda.max_memory_allocated(operator.device) - before)
    with LiveBytes() as live:
        operator.rows(rows)
    return float(live.peak)


# ------------------------------------------------------------------------------------------------ projections


@dataclass(frozen=True)
class Measured:
    """What was measured on one batch."""

    hessian: Products
    ggn: Products | None
    gradient: float  # seconds over all data
    projection: float
    product_bytes: float
    batch_size: int


def project(risk: Risk, seen: Measured, measures: Any, num_steps: int, num_probes: int) -> tuple[Projection, ...]:
    """What `ritz spectrum` and `ritz measure` will take."""
    dim, row = risk.dim, risk.dim * torch.finfo(risk.dtype).bits / 8
    memory = seen.product_bytes + spectrum_rows(dim, num_probes) * row
    run = spectrum_seconds(seen.hessian, seen.projection, dim, num_steps, num_probes)
    many = f"{count(seen.hessian.chunk, 'product')} on a batch of {seen.batch_size}"
    total = HEAD_BLOCK * HEAD_STEPS + NOISE_PRODUCTS + min(num_steps, dim) * num_probes
    how = (
        f"{many} took {1e3 * seen.hessian.full:.3g} ms; scaled to {dim if _small(dim) else total} products, "
        f"{seen.hessian.scale:.3g} such batch{'' if seen.hessian.scale == 1 else 'es'}, and the work on vectors"
    )
    rows = resolve(measures)
    needs = {r.cost for r in rows}
    seconds = (run if "Hessian" in needs else 0.0) + _beside(rows, seen, dim, num_steps, num_probes)
    what = f"{count(len(rows), 'measure')}: {', '.join(sorted(needs))}"
    of = f"{what}; a gradient over the data takes {seen.gradient:.2g} s"
    return (
        Projection("spectrum", run, memory, how),
        Projection("measure", seconds, memory if needs & {"Hessian", "GGN", "search"} else seen.product_bytes, of),
    )


def _beside(rows: Sequence[Measure], seen: Measured, dim: int, num_steps: int, num_probes: int) -> float:
    """Seconds of all that is not the run on the Hessian."""
    seconds = sum(row.gradients for row in rows) * seen.gradient + (2 + _FORWARD) * seen.gradient
    if seen.ggn is not None and any(row.cost == "GGN" for row in rows):
        seconds += spectrum_seconds(seen.ggn, seen.projection, dim, num_steps, num_probes)
    return seconds


def project_audit(
    whole: Projection, moves: Sequence[str], dim: int, seen: Measured, measures: Any, num_steps: int, num_probes: int
) -> Projection:
    """What `ritz measure --audit` will take: the measurement, and what `ritz.measures.elsewhere` says for each move."""
    rows = resolve(measures)
    steps = steps_elsewhere(rows, num_steps)
    beside = _beside(rows, seen, dim, num_steps, num_probes)
    run = turned = 0.0
    if any(row.cost == "Hessian" for row in rows):
        run = spectrum_seconds(seen.hessian, seen.projection, dim, steps, num_probes)
        turned = 2 * seen.hessian.seconds(VECTORS)
    seconds = whole.seconds + sum(beside + (turned if name in TURNING else run) for name in moves)
    each = "1 move" if len(moves) == 1 else f"each of {len(moves)} moves"
    how = f"the same, and once more with {steps} steps for {each}: {', '.join(moves)}"
    return Projection("measure --audit", seconds, whole.memory, how)
