"""Curvature matrices of a risk: a sum over batches, each of which acts on rows.

A subclass defines how one batch acts; the risk iterates over the data. This module contains what all have in common:
rows in chunks that share a forward pass, batches in pieces that fit, and products that are recorded and replayed, or
compiled.
"""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import compilation
from ..batches import Batch, only_tensors, skeleton, tensors_of
from ..compilation import Compiled, Prospect
from ..errors import NonFiniteError, UnsupportedError
from ..held import Results
from ..memory import free_memory, is_shortage, make_room
from ..reducers import Mean, wide
from ..risk import Params, Risk
from ..sameness import layout_of
from ..switches import multiplies_in_tf32, switches
from .base import Operator
from .footprint import fitting_chunk, fitting_piece, refuse_without_room

log = logging.getLogger(__name__)

TIMED_WALKS = 3  # the first walks, on which products are timed; for this, the host waits for the device
CHANNELS_LAST_ON = ("cuda",)  # kinds of devices whose convolutions are faster with channels last
KEPT_ON = ("cuda",)  # kinds of devices on which shared results of compiled products are kept; a CPU keeps tapes
FEW = 16  # shared results are kept for at most so many batches
TOGETHER = 2  # and for at most so many vectors at a time: with more, they are a small part of the work
SHARE = 0.25  # part of the free memory that shared results may take
_NOTHING = Results()
# two computations of one product count as equal up to this relative difference
_AGREE = {torch.float64: 1e-8, torch.float32: 1e-2}


def channels_last(x: Tensor) -> Tensor:
    """Images and kernels with their channels next to each other in memory; other tensors as they are.

    Example:
        >>> channels_last(torch.ones(1, 2, 3, 3)).stride(1), channels_last(torch.ones(2, 3)).stride(1)
        (1, 1)
    """
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 and x.is_floating_point() else x


def _kinds(batch: Batch) -> Hashable:
    """What batches of one data set have in common, whatever their sizes."""
    return skeleton(batch.data), tuple((x.shape[1:], x.dtype) for x in tensors_of(batch.data))


def rows_at_once(rows: Tensor) -> int:
    """How many rows (k, dim) are multiplied in one walk: their images take at most a sixteenth of a GPU's memory.

    A walk holds the images of all batches, of one batch and of its chunks. The whole memory counts, not the free
    memory, so that two runs on one kind of device are alike.

    Example:
        >>> rows_at_once(torch.ones(3, 5))
        3
    """
    if rows.device.type != "cuda":
        return max(1, len(rows))
    room = torch.cuda.get_device_properties(rows.device).total_memory // 16
    return max(1, min(len(rows), room // (rows.shape[1] * rows.element_size())))


class _Image(Mean):
    """The mean of images that no one else uses: the first becomes the sum, which is divided in place."""

    def add(self, total: Tensor, weight: Tensor) -> None:
        """One batch."""
        if self.total is None:
            self.total, self.weight = wide(total.detach()), weight.detach().double()
        else:
            super().add(total, weight)

    def result(self) -> Tensor:
        """The weighted mean; to be called once."""
        assert self.total is not None and self.weight is not None, "no batch was added"
        mean: Tensor = self.total.div_(self.weight.to(self.total.dtype))
        return mean


class RiskOperator(Operator):
    """A curvature matrix of a risk: a mean over items, computed as a sum over batches.

    A subclass defines how one batch acts on rows; the risk iterates over the data.
    """

    def __init__(self, risk: Risk) -> None:
        if not isinstance(risk, Risk):
            raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
        self.risk = risk
        self.space, self.dtype, self.device, self.world = risk.space, risk.dtype, risk.home, risk.world
        self._chunk = risk.plan.chunk  # shrinks when memory runs out
        self._last: bool | None = None  # whether the model accepts images with channels last; None before it is tried
        self._expected = 0  # announced products that are still to come
        self._walks, self._taken = 0, 0  # walks and products so far
        self._each = math.inf  # seconds of a product
        self._aside = False

    @abstractmethod
    def _batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The SUM over the items of a batch, applied to rows (k, dim), and the weight of the batch.

        The sum is a new tensor, to which other sums are added in place.
        """

    @abstractmethod
    def _like(self, risk: Risk) -> "RiskOperator":
        """The same matrix of another risk."""

    def settle(self, rows: Tensor) -> None:
        """Decide before the walk what one process decides on its first batch, so that all ranks decide alike."""

    def _rows(self, rows: Tensor) -> Tensor:
        self.risk.check()
        # round-off and free memory may differ between machines, so all ranks use the rows and the chunk of one
        rows, chunks = self.world.same(rows, self._chunk)
        self._chunk = min(chunks)
        self.settle(rows)
        timed = self._walks < TIMED_WALKS and self._may_compile_by_itself()
        start = compilation.clock(self.device) if timed else 0.0
        image = self._walked(rows)
        if timed:
            self._each = min(self._each, (compilation.clock(self.device) - start) / len(rows))
        self._walks, self._taken = self._walks + 1, self._taken + len(rows)
        self._expected = max(0, self._expected - len(rows))
        return image

    def _walked(self, rows: Tensor) -> Tensor:
        """One walk over the data, or several if the images of all rows would take too much memory."""
        image: Tensor
        groups = rows.split(rows_at_once(rows))
        if len(groups) == 1:
            image = self.risk.fold(lambda params, batch: self.batch_rows(params, batch, rows), _Image())
            return image.to(rows.dtype)
        image, done = torch.empty_like(rows), 0
        for group in groups:
            image[done : done + len(group)] = self._walked(group)
            done += len(group)
        return image

    def expect(self, products: int) -> None:
        """Announce how many products with single vectors will follow; `Plan(compile="auto")` depends on it.

        Estimators call this themselves. The number is not added to that of an earlier call whose products are still to
        come, so that a run inside a longer run is counted once.

        Example:
            >>> import ritz
            >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(2, 1), torch.ones(2, 1)))
            >>> H = ritz.Hessian(risk)
            >>> H.expect(800)
        """
        super().expect(products)
        self._expected = max(self._expected, products)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside this context, products are neither recorded nor compiled, whatever the plan.

        Example:
            >>> import ritz
            >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(2, 1), torch.ones(2, 1)))
            >>> H = ritz.Hessian(risk)
            >>> with H.aside():
            ...     (H @ torch.tensor([1.0, 0.0])).tolist()
            [2.0, 2.0]
        """
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`_batch_rows` chunk by chunk, each chunk one batched product that shares its forward pass.

        If memory runs out, what was kept for speed is released first, then the chunks are halved, down to one vector;
        after that the risk takes the batch in pieces.
        """
        while True:
            chunk = self._at_once(params, batch, rows)
            try:
                parts = [self._pieces(params, batch, part) for part in rows.split(chunk)]
                return parts[0] if len(parts) == 1 else (torch.cat([image for image, _ in parts]), parts[0][1])
            except RuntimeError as error:
                if not is_shortage(error) or (chunk == 1 and not self.risk.shortcuts.hold_memory):
                    raise
            if not self.risk.shortcuts.let_go():  # outside the except block, whose traceback would hold the memory
                self._chunk = chunk // 2
                log.warning("out of memory: vectors are now taken %d at a time", self._chunk)
            make_room(self.device)

    def _at_once(self, params: Params, batch: Batch, rows: Tensor) -> int:
        """The rows of a chunk. On a CPU, which raises no error when memory runs out, `fitting_chunk` decides.

        Raises:
            NoRoomError: On a CPU, if a batch that must stay whole does not fit in memory even with one row.
        """
        most = min(self._chunk, len(rows))
        if self.device.type != "cpu" or self.risk.sharded:
            return most
        if not self.risk.splittable:
            refuse_without_room(self.risk, params, batch)
        return fitting_chunk(self.risk, params, batch, most)

    def _pieces(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """One chunk. On a CPU, the batch is cut into pieces with small intermediate results, see `fitting_piece`."""
        most = batch.size
        whole = self.risk.sharded or not self.risk.splittable  # ranks that share a model make the same passes
        if self.device.type == "cpu" and self.risk.plan.micro_batch is None and not whole:
            most = fitting_piece(self.risk, params, batch, len(rows))
        first, *others = batch.pieces(most)
        image, weight = self._product(params, first, rows)
        for piece in others:
            more, heavier = self._product(params, piece, rows)
            image, weight = image.add_(more), weight + heavier
        return image, weight

    def _tolerance(self, by_digits: Mapping[torch.dtype, float] = _AGREE) -> float:
        """Two computations of one product count as equal up to this relative difference."""
        if self.dtype == torch.float32 and multiplies_in_tf32(self.device):
            return 0.5  # products of an untrained VGG-16 have an error of 0.16 by any route (docs/speed.md)
        return by_digits.get(self.risk.coarsest, 0.1)

    def _recipe(self) -> Hashable | None:
        """What determines the operations of a product, besides model and shapes; None if batches differ in them."""
        return None

    def _traced(self, params: Params, held: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`_batch_rows` from operations that can be compiled; `held` contains all other tensors of the model.

        Products of a matrix that does not define this are not compiled.
        """
        raise UnsupportedError(f"the {self.matrix} has no product that can be compiled")

    def _product(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`_batch_rows`, recorded and replayed, compiled or neither, depending on the plan."""
        rows = rows.contiguous().flatten().view(rows.shape)  # a compiled function accepts one layout only
        own = not self._aside and params is self.risk.params()  # recordings belong to the risk's own weights
        compiles = own and self._considers_compiling()
        prepares = compiles or (own and self.risk.replays)
        recipe = self._recipe() if prepares and only_tensors(batch.data) else None
        if recipe is None:
            return self._batch_rows(params, batch, rows)
        if not compiles:
            return self._replayed(recipe, params, batch, rows)
        store = self.risk.shortcuts.compilations
        family = (recipe, type(self), self.risk.names, self.risk.mode, len(rows), self.risk.settings())
        if not store.is_usual((family, _kinds(batch)), batch.size):
            return self._replayed(recipe, params, batch, rows)
        placed, data = self.risk._placed(), tensors_of(batch.data)
        state, tensors = self.risk.state(), placed.tensors
        last = self._takes_channels_last(state, batch)

        def traced(rows: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            tensors = tuple(map(channels_last, tensors)) if last else tensors
            given = dict(zip(state, tensors, strict=False))
            held = {name: given.pop(name) for name in state if name not in params}
            return self._traced(given, held, batch.holding(tensors[len(state) :]), rows)

        inputs = [rows, *tensors, *data]
        prospect = None
        if self.risk.plan.compile == "auto":
            left = self._expected / len(rows) * self.risk.num_samples / batch.size
            prospect = Prospect(self._taken * self._each, left, lambda: self.risk.static)
        key = family, skeleton(batch.data), switches(), placed.layout, layout_of([rows, *data])

        def exact() -> tuple[Tensor, Tensor]:  # with one vector, since images of several might not fit in memory
            return traced(*compilation.in_float64([rows[:1], *inputs[1:]]))

        def eager() -> tuple[Tensor, Tensor]:
            return self._replayed(recipe, params, batch, rows)

        found = store.find(key, eager, traced, inputs, prospect, exact, self._keeps(batch, len(rows)))
        if not isinstance(found, Compiled):
            image, weight = found
            return image, weight
        if self.risk.replays:
            self.risk.shortcuts.recordings.forget(self._recording(recipe, batch), [rows, *tensors_of(batch.data)])
        return self._run(found, (recipe, "compiled"), tensors, batch, rows)

    def _keeps(self, batch: Batch, vectors: int) -> Callable[[int], bool] | None:
        """A function that tells whether so many bytes of shared results per batch may be kept; None if never."""
        batches = -(-self.risk.num_samples // batch.size)
        cached = self.risk.plan.cache is not False and self.risk.batches.cached and self.risk.shortcuts.held.keeps
        if not cached or batches > FEW or vectors > TOGETHER or self.device.type not in KEPT_ON:
            return None
        return lambda size: batches * size <= self._room()

    def _room(self) -> float:
        """Bytes that shared results of products may take."""
        return SHARE * ((free_memory(self.device) or 0.0) + self.risk.shortcuts.held.size)

    def _recording(self, recipe: Hashable, batch: Batch, kept: Results = _NOTHING) -> Hashable:
        """All that a recorded product depends on, besides vectors and data."""
        return recipe, type(self), self.risk.place(), batch.size, skeleton(batch.data), kept.place

    def _replayed(self, recipe: Hashable, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`_batch_rows`, recorded and replayed if the plan says so."""
        inputs = [rows, *tensors_of(batch.data)]

        def product(rows: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return self._batch_rows(params, batch.holding(tensors), rows)

        if not self.risk.replays:
            return product(*inputs)
        image, weight = self.risk.shortcuts.recordings.run(self._recording(recipe, batch), product, inputs)
        return image, weight

    def _run(
        self, compiled: Compiled, recipe: Hashable, state: Sequence[Tensor], batch: Batch, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A compiled product, with the shared results of an earlier product of the batch if they were kept."""
        data, shared, held = tensors_of(batch.data), compiled.shared, self.risk.shortcuts.held

        def product(kept: Results) -> tuple[Tensor, Tensor]:
            def work(rows: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
                return compiled(rows, *state, *tensors, kept=kept)

            if not (self.risk.replays and compiled.waits):
                image, weight = work(rows, *data)
            else:
                image, weight = self.risk.shortcuts.recordings.run(
                    self._recording(recipe, batch, kept), work, [rows, *data]
                )
            return image, weight

        if shared is None:
            return product(_NOTHING)

        def make() -> tuple[Tensor, ...]:
            return tuple(shared(*state, *data))

        if self._keeps(batch, len(rows)) is None:
            return product(Results(make()))
        self.risk._once("held", lambda: held.refresh(state))
        return held.use(compiled, state, data, make, self._room, product)

    def _takes_channels_last(self, state: Params, batch: Batch) -> bool:
        """Whether the model convolves images and accepts them with channels last; tried once."""
        if self._last is None:
            convolves = any(isinstance(module, torch.nn.Conv2d) for module in self.risk.model.modules())
            self._last = convolves and self.device.type in CHANNELS_LAST_ON
            if self._last:
                turned = {name: channels_last(x) for name, x in state.items()}
                try:
                    self.risk.output(turned, batch.holding([channels_last(x) for x in tensors_of(batch.data)]))
                except RuntimeError:  # a view across channels
                    self._last = False
        return self._last

    def _considers_compiling(self) -> bool:
        """Whether compiling may pay; for short runs, "auto" finds out at no cost that it does not."""
        if self.risk.plan.compile != "auto" or self.risk.dropout:  # masks belong to the batch
            return self.risk.plan.compile is True and not self.risk.dropout
        if not self._taken or not self._may_compile_by_itself():
            return False
        return Prospect((self._taken + self._expected) * self._each).pays(compilation.START, each=0.0)

    def _may_compile_by_itself(self) -> bool:
        """Whether the plan is "auto" on a suitable device; only for one rank, because each rank has its own clock."""
        auto = self.risk.plan.compile == "auto" and self.device.type in compilation.AUTO_ON
        return auto and self.world.size == 1

    def version(self) -> Hashable:
        return self.risk.version()

    def convention(self) -> str:
        return f"{self.matrix}, {self.risk.convention()}"

    def block(self, pattern: str | Sequence[str]) -> Operator:
        """The principal sub-matrix of the parameters whose names match; its products cost less than those of all."""
        return self._like(self.risk.restrict(pattern))

    def diagnose(self) -> None:
        """Name the first batch whose product is not finite."""
        probe = self.probes([0], seed=0)

        def look(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
            image, weight = self.batch_rows(params, batch, probe)
            if not bool(image.isfinite().all()):
                name = self.space.names[int((~self.space.segment(image)[0].isfinite()).int().argmax())]
                kind = str(self.dtype).removeprefix("torch.")
                raise NonFiniteError(
                    f"the {self.matrix} product of batch {batch.index} is not finite, first in {name} ({kind}), though "
                    f"its loss is; try dtype=torch.float64, and look for a square root or a norm at zero"
                )
            return image, weight

        self.risk.fold(look, Mean())
        super().diagnose()
