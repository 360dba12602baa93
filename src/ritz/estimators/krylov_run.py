"""The run behind `ritz.spectrum`: head, noise, rounds of probes; it can be left after any product and gone on with."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import stopping
from ..checkpoint import Saved, State
from ..errors import NonFiniteError, NumericalWarning, StoppedError, callers_level
from ..krylov.head import BlockSpace, Head, find_head
from ..krylov.lanczos import LanczosState, Reorthogonalize, extend, start, underflows
from ..krylov.tridiagonal import Tridiagonal
from ..operators.algebra import Metered
from ..space import Shard, row_products
from .precision import Precision, compare_precisions

Progress = Callable[[int, int], None]  # (products done, products expected)

# width, steps and most pairs of the head; benchmarks/krylov.py compares them with the alternatives
HEAD_BLOCK, HEAD_STEPS, HEAD_LOCKED = 8, 12, 32
NOISE_PRODUCTS = 3  # measure the round-off of a product
LOOK = 8  # steps on an accelerator between looks at whether all is finite: each look waits for the device


class BrokenError(Exception):
    """The tail cannot be gone on with: a product was NaN or infinite, or rows are not orthonormal any more."""


@dataclass
class KrylovRun:
    """The operator under measurement, what every part of the run shares, and how far it is.

    Attributes:
        head: The locked outliers; None where the mode or the budget has none, or before they are found.
        noise: Round-off of a product, relative to the largest eigenvalue; None before it is measured.
        underflow: Whether products are too small for their precision.
        precision: What products are off by from those in float64; None where they were not compared.
        tails: Rounds of probes that are done.
        layers: What each probe, of the round under way too, says of each parameter.
        tail: The round under way.
    """

    meter: Metered
    saved: Saved
    seed: int
    reorthogonalize: Reorthogonalize
    offload: bool
    progress: Progress | None
    expected: int
    head: Head | None = None
    noise: float | None = None
    underflow: bool = False
    precision: Precision | None = None
    tails: list[Tridiagonal] = field(default_factory=list)
    layers: list[Tensor] = field(default_factory=list)
    tail: LanczosState | None = None
    _space: BlockSpace | None = None

    # ------------------------------------------------------------------------------------------- on the disk

    def restore(self, head_steps: int) -> None:
        """Go to where the saved state is; nothing where there is none."""
        saved, latest = self.saved, self.saved.latest
        if latest is None:
            return
        self.meter.products, self.noise, self.underflow = latest["products"], latest["noise"], latest["underflow"]
        self.precision = Precision(*latest["precision"]) if latest["precision"] else None
        self.tails, self.layers = latest["tails"], latest["layers"]
        if latest["space"] is not None:
            size = latest["space"]["size"]
            blocks = [saved.settled(_block(at)) for at in range(0, size, HEAD_BLOCK)]
            self._space = BlockSpace.restored(self.meter, HEAD_BLOCK * head_steps, latest["space"], blocks)
        if saved.has("head"):
            head: Head = saved.settled("head")
            vectors, residual_rows = self._placed(head.vectors), self._placed(head.residual_rows)
            self.head = dataclasses.replace(head, vectors=vectors, residual_rows=residual_rows)
        if latest["tail"] is not None:
            self.tail = self._with_rows(latest["tail"].to(self.meter.device))

    def _with_rows(self, state: LanczosState) -> LanczosState:
        """The round under way with what was not saved with it: the locked rows, and the basis of "full"."""
        basis = None
        if self.reorthogonalize == "full":
            names = [_basis(len(self.tails), step) for step in range(state.num_steps)]
            place = torch.device("cpu") if self.offload else self.meter.device
            basis = torch.stack([self.saved.settled(name) for name in names]).to(place)
        return dataclasses.replace(state, locked=self.locked, basis=basis)

    def _placed(self, rows: Tensor) -> Tensor:
        """On the device, at an address as fresh tensors have it: CPU kernels may round differently at others."""
        return rows.to(self.meter.device, copy=True)

    def _state(self) -> State:
        """What must be known to go on from here."""
        if self.tail is not None and not _sound(self.tail):
            raise BrokenError
        tail = None if self.tail is None else dataclasses.replace(self.tail, locked=None, basis=None)
        latest = {
            "products": self.meter.products, "noise": self.noise, "tails": self.tails, "layers": self.layers,
            "underflow": self.underflow, "tail": tail,
            "precision": dataclasses.astuple(self.precision) if self.precision else None,
            "space": None if self._space is None else self._space.state(),
        }  # fmt: skip
        return latest, dict(self._settled())

    def _settled(self) -> Iterator[tuple[str, Any]]:
        """What does not change any more."""
        if self._space is not None:
            for at, rows in self._space.blocks(HEAD_BLOCK):
                yield _block(at), rows
        if self.head is not None:
            yield "head", self.head
        if self.tail is not None and self.tail.basis is not None:
            for step, rows in enumerate(self.tail.basis):
                yield _basis(len(self.tails), step), rows

    # --------------------------------------------------------------------------------------- head and noise

    @property
    def shard(self) -> Shard:
        """Which part of every row is kept here."""
        return Shard(self.meter.world, self.meter.dim)

    @property
    def locked(self) -> Tensor | None:
        """The rows that the tail is kept orthogonal to."""
        return self.head.vectors if self.head is not None and len(self.head.values) else None

    def report(self) -> None:
        """Tell how far it is."""
        if self.progress is not None:
            self.progress(self.meter.products, max(self.expected, self.meter.products))

    def find_head(self, num_steps: int) -> None:
        """The locked outliers, unless the mode or the budget has no head, or they are known."""
        if num_steps == 0 or self.head is not None:
            return

        def keep(space: BlockSpace) -> None:
            self._space = space
            self.saved.point(self._state)

        self.head = find_head(
            self.meter, block=HEAD_BLOCK, num_steps=num_steps, max_locked=HEAD_LOCKED, seed=self.seed,
            progress=lambda done, total: self.report(), space=self._space, checkpoint=keep,
        )  # fmt: skip
        self._space = None
        if not self.head.complete:
            self.saved.point(self._state)

    def measure_noise(self) -> None:
        """Round-off of a product relative to the largest eigenvalue: how far A(x + y) is from A x + A y."""
        if self.noise is not None:
            return
        x = self.meter.probes([-1000], self.seed, "normal")
        x = x / x.norm()
        y = x.flip(-1) if self.locked is None else self.shard.whole(self.locked[:1])
        with self.meter.aside():
            image = self.meter.rows(torch.cat([x, y, x + y]))
        self.underflow = underflows(image)
        scale = image[:2].norm(dim=1).max()
        eps = torch.finfo(x.dtype).eps
        self.noise = max(float((image[2] - image[0] - image[1]).norm() / scale), eps) if scale else 0.0

    def compare_precisions(self) -> None:
        """What no product by itself can tell: how far it is from that in float64."""
        if self.precision is None:
            self.precision = compare_precisions(self.meter.base, self.seed)

    # --------------------------------------------------------------------------------------------- the tail

    def probe(self, num_probes: int, num_steps: int) -> None:
        """One more round of probes in lock-step, or the rest of the one under way.

        Their first products also give what each parameter has of the trace and of Tr H^2.

        Raises:
            StoppedError: If the run is to stop before the last step.
            BrokenError: If a product is NaN or infinite, or the rows of "full" are not orthonormal any more.
        """
        head, locked = self.head, self.locked
        left = self.meter.dim - (len(locked) if locked is not None else 0)

        shard = self.shard

        def observe(step: int, rows: Tensor, image: Tensor) -> None:
            if step == 0:
                # H Q v = Q H Q v + U U'H Q v, and U'H Q is the residual rows of the head
                full = image
                if head is not None:
                    full = image + shard.sum(row_products(rows, head.residual_rows)).to(image.dtype) @ head.vectors
                self.layers.append(left * self._segments(rows * image, full.square()))
            self.report()

        def keep(state: LanczosState) -> None:
            self.tail = state
            looks = state.rows.device.type == "cpu" or state.num_steps % LOOK == 0
            if looks and not _sound(state, last=LOOK):
                raise BrokenError
            try:
                self.saved.point(self._state)
            except StoppedError:
                if state.num_steps < num_steps:
                    raise

        if self.tail is None:
            first = len(self.tails) * num_probes
            rows = self.meter.probes(range(first, first + num_probes), self.seed, "normal")
            largest = float(head.values.abs().max()) if locked is not None and head is not None else 0.0
            noise = (self.noise or 0.0) * largest  # what is left of a matrix of low rank has a beta of less than that
            options: dict[str, Any] = {"reorthogonalize": self.reorthogonalize, "offload": self.offload, "noise": noise}
            self.tail = start(rows, locked=locked, world=self.meter.world, **options)
        if more := num_steps - self.tail.num_steps:
            self.tail = extend(self.meter, self.tail, more, observe=observe, checkpoint=keep)
        if not _sound(self.tail):
            raise BrokenError
        self.tails.append(self.tail.tridiagonal())
        self.tail = None

    def cut(self, num_steps: int, error: StoppedError | BrokenError) -> str:
        """Take what there is for the result, and say why it is not more.

        The round under way is taken as far as its numbers are sound; but where rounds before it are done, of which each
        has all steps, it is left out.

        Raises:
            StoppedError, NonFiniteError: If there is nothing.
        """
        broken = isinstance(error, BrokenError)
        steps = 0 if self.tail is None else _sound_steps(self.tail)
        lost = broken and self.tail is not None and bool(self.tail.lost()[: steps + 1].any())
        reason = stopping.LOST_ORTHOGONALITY if lost else "not finite" if broken else str(error).partition(";")[0]
        why = stopping.remedy(reason) if lost or not broken else _why(self.meter)
        if not steps and not self.tails:
            raise NonFiniteError(why) if broken else error
        text = f"{reason} {f'at step {steps + 1}' if broken else f'after {steps}'} of {num_steps} steps"
        if self.tails:
            text += f" of round {len(self.tails) + 1}"
            self.layers = self.layers[: len(self.tails)]
        else:
            assert self.tail is not None
            self.tails = [self.tail.first(steps).tridiagonal()]
        if broken:
            text += f": {why}"
            warnings.warn(f"the spectrum is from fewer steps: {text}", NumericalWarning, stacklevel=callers_level())
        return text

    # ------------------------------------------------------------------------------------------- parameters

    def head_layers(self, head: Head) -> Tensor:
        """The head's share of each parameter's trace and squared norm, (2, 1, len(layers)).

        theta |u_l|^2 + 2 u_l . r_l and |theta u_l + r_l|^2, summed over the pairs.
        """
        image = head.values.to(head.vectors)[:, None] * head.vectors + head.residual_rows
        traces = head.vectors * (image + head.residual_rows)
        return self._segments(traces, image.square()).sum(1, keepdim=True)

    def _segments(self, *rows: Tensor) -> Tensor:
        """Sums over each parameter, (len(rows), k, len(layers)), float64 on the host."""
        sums = torch.stack([self.meter.space.segment(each, self.shard.first) for each in rows])
        return self.shard.sum(sums.double()).cpu()


def _block(at: int) -> str:
    return f"block-{at}"


def _basis(round_: int, step: int) -> str:
    return f"rows-{round_}-{step}"


def _sound(state: LanczosState, last: int = 0) -> bool:
    """Whether the numbers of all steps, or of the last, are finite and of orthonormal rows; waits for the device."""
    return bool(_soundness(state)[-last:].all())


def _sound_steps(state: LanczosState) -> int:
    """Steps before the first that is not."""
    return int(_soundness(state).int().cumprod(0).sum())


def _soundness(state: LanczosState) -> Tensor:
    """Step by step, (m,)."""
    return (state.alpha.isfinite() & state.beta.isfinite()).all(0) & ~state.lost()


def _why(meter: Metered) -> str:
    """What is known about a product that came out NaN or infinite."""
    try:
        meter.diagnose()
    except NonFiniteError as error:
        return str(error)
    return f"a product with the {meter.matrix} is not finite"
