"""How many samples and vectors a CPU takes at once, so that intermediate results stay small and fit in memory.

K vectors at a time mean K tangents of every activation. The C library requests blocks of memory over some 32 MiB from
the system each time and gives them back afterwards, and a new page costs more than the arithmetic on it: on a small
convolutional network at batch 128, K = 8, pieces of 32 samples took 0.5 to 0.65 of the time of the whole batch
(docs/speed.md). A GPU that is out of memory raises an error, after which fewer vectors are taken at a time, but a
system that is out of memory kills the process: so the memory of a product is counted in advance.
"""

import logging
import math
import weakref
from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..batches import Batch, tensors_of
from ..memory import NoRoomError, bytes_of, whole_memory, whole_swap
from ..risk import Params, Risk

log = logging.getLogger(__name__)

LARGEST = 1 << 24  # bytes of one intermediate result, including its tangents
WORTH = 2  # bytes of all results of a piece, for each byte of the weights
SHARE = 0.5  # part of the machine's memory that a product may take
OWN, EACH = 3.0, 1.5  # memory of a product, and of each of its vectors, in units of all results of a forward pass
_LOOKED_AT = 2  # samples that are measured; a model may treat a single one differently


class Footprint(NamedTuple):
    """Bytes per sample of the largest result of a forward pass and of all its results, and bytes of the weights."""

    largest: int
    total: int
    weights: int

    @property
    def worth(self) -> int:
        """The least number of samples for which it is worth reading all weights."""
        return max(1, math.ceil(WORTH * self.weights / max(1, self.total)))


_known: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Footprint]]" = weakref.WeakKeyDictionary()


def fitting_piece(risk: Risk, params: Params, batch: Batch, num_vectors: int) -> int:
    """The largest number of samples whose largest activation, times the vectors, fits into `LARGEST` bytes; at least 1.

    On a CPU, it is at least so many that their activations are `WORTH` times the weights, if memory allows, because
    every piece reads all weights and vectors. It depends on sizes only, not on time, so that the same data is always
    cut in the same way. To be called inside `session`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1 << 16), torch.nn.Linear(1 << 16, 1))
        >>> risk = Risk(model, torch.nn.MSELoss(), (torch.zeros(64, 1), torch.zeros(64, 1)))
        >>> with risk.session():
        ...     [fitting_piece(risk, risk.params(), next(iter(risk.batches)), k) for k in (1, 8)]
        [64, 8]
    """
    if batch.size <= _LOOKED_AT:
        return batch.size
    seen = footprint(risk, params, batch)
    most = LARGEST // max(1, seen.largest * num_vectors)
    if risk.device.type == "cpu":
        most = min(max(most, seen.worth), int(room() / max(1.0, seen.total * _passes(num_vectors))))
    return max(1, min(batch.size, most))


def fitting_chunk(risk: Risk, params: Params, batch: Batch, most: int) -> int:
    """How many vectors, up to `most`, a CPU takes at once; at least one.

    With the smallest number of samples taken at once (a whole batch if it cannot be cut, else `Footprint.worth`), the
    largest activation must fit into `LARGEST` bytes, and the product into memory. The whole memory counts, not the free
    memory, so that two runs on one machine are alike. To be called inside `session`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1 << 16), torch.nn.Linear(1 << 16, 1))
        >>> risk = Risk(model, torch.nn.MSELoss(), (torch.zeros(64, 1), torch.zeros(64, 1)), mode="train")
        >>> with risk.session():  # 64 times 65,536 numbers of four bytes are LARGEST
        ...     fitting_chunk(risk, risk.params(), next(iter(risk.batches)), 8)
        1
    """
    if most == 1:
        return 1
    seen, piece = footprint(risk, params, batch), risk.plan.micro_batch
    least = min(batch.size, piece or seen.worth) if risk.splittable else batch.size
    if piece is None:
        most = min(most, LARGEST // max(1, least * seen.largest))
    return max(1, min(most, int((room() / max(1, least * seen.total) - OWN) / EACH)))


def product_bytes(risk: Risk, params: Params, batch: Batch, num_vectors: int) -> float:
    """About how many bytes a product of a whole batch takes with so many vectors. To be called inside `session`.

    Example:
        >>> risk = Risk(torch.nn.Linear(1, 4), torch.nn.MSELoss(), (torch.zeros(5, 1), torch.zeros(5, 4)))
        >>> risk.check()
        >>> with risk.session():  # five times four numbers of four bytes, 4.5 times
        ...     product_bytes(risk, risk.params(), next(iter(risk.batches)), 1)
        360.0
    """
    return batch.size * footprint(risk, params, batch).total * _passes(num_vectors)


def refuse_without_room(risk: Risk, params: Params, batch: Batch) -> None:
    """Refuse a batch that must stay whole and does not fit in a CPU's memory, since the system would kill the process.

    `product_bytes` overestimates, so it cannot decide alone. By any route a product holds at least what a forward pass
    keeps for the backward pass: if this alone exceeds the memory and swap of the host, the batch is refused. If only
    the estimate does, the product is tried, with a warning in the log. To be called inside `session`.

    Raises:
        NoRoomError: With the memory that is needed, the memory that exists, and how many samples would fit.

    Example:
        >>> risk = Risk(torch.nn.Linear(1, 4), torch.nn.MSELoss(), (torch.zeros(5, 1), torch.zeros(5, 4)), mode="train")
        >>> with risk.session():
        ...     refuse_without_room(risk, risk.params(), next(iter(risk.batches)))
    """
    there = whole_memory(risk.device) + whole_swap()
    try:
        wanted = product_bytes(risk, params, batch, 1)
    except Exception:  # an error of the model or the loss itself is raised again by the product
        return
    if wanted <= there:
        return
    each = kept_bytes(risk, params, batch)
    fits = int(room() / max(1.0, wanted / batch.size))
    if batch.size * each <= there:
        log.warning(
            "a product of %d samples may take %s of the %s in memory and swap; the system kills a process that takes "
            "more",
            batch.size, _told(wanted), _told(there),
        )  # fmt: skip
        return
    advice = (
        f"about {fits} would fit: give data in batches of {fits} (which is another function)"
        if fits
        else "not even one sample would fit: use a smaller model"
    )
    raise NoRoomError(
        f"a batch of {batch.size} samples does not fit in memory, and cannot be cut because of batch statistics, "
        f"dropout or an opaque loss; its forward pass keeps {_told(batch.size * each)} for the backward pass, "
        f"{_told(each)} per sample, a product takes about {_told(wanted)}, and the host has {_told(there)} with swap; "
        f"{advice}, or use mode='eval' with a separable loss"
    )


def _told(size: float) -> str:
    """Bytes for a message.

    Example:
        >>> _told(3.2e9), _told(1500)
        ('3.2 GB', '0.0015 MB')
    """
    return f"{size / 1e9:.2g} GB" if size >= 1e9 else f"{size / 1e6:.2g} MB"


def kept_bytes(risk: Risk, params: Params, batch: Batch) -> float:
    """Bytes that a forward pass keeps per sample for the backward pass; 0 if a part of the batch cannot be passed.

    It is the difference between passes of two and of four samples, so that the weights do not count. To be called
    inside `session`.

    Example:
        >>> risk = Risk(torch.nn.Linear(3, 4), torch.nn.MSELoss(), (torch.zeros(9, 3), torch.zeros(9, 4)))
        >>> risk.check()
        >>> with risk.session():  # four outputs; inputs are there anyway
        ...     kept_bytes(risk, risk.params(), next(iter(risk.batches)))
        16.0
    """
    few, more = (batch.head(size) for size in (_LOOKED_AT, 2 * _LOOKED_AT))
    if more.size <= few.size:
        return 0.0
    try:
        sizes = [_kept(risk, params, piece) for piece in (few, more)]
    except Exception as error:  # a model or a loss that accepts only whole batches
        log.info("what %d samples keep is not known: %s", more.size, " ".join(str(error).split())[:200])
        return 0.0
    return max(0.0, (sizes[1] - sizes[0]) / (more.size - few.size))


def _kept(risk: Risk, params: Params, batch: Batch) -> int:
    """Bytes of all tensors that the graph of a batch keeps alive."""
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    with LiveBytes() as live, torch.enable_grad():
        total = risk.total(leaves, batch)
        kept = live.bytes
    del total
    return int(kept)


def _passes(num_vectors: int) -> float:
    """The memory of a product, in units of all results of a forward pass."""
    return OWN + EACH * num_vectors


@cache  # it reads files of the system, and every product of a batch needs it
def room() -> float:
    """Bytes of the host's memory that a product may take.

    Example:
        >>> room() > 0
        True
    """
    return min(SHARE * whole_memory(torch.device("cpu")), 2.0**60)


def footprint(risk: Risk, params: Params, batch: Batch) -> Footprint:
    """Measured once for a model and a kind of batch: on two samples, or on a batch that must stay whole."""
    known = _known.setdefault(risk.model, {})
    looked = batch.head(_LOOKED_AT) if risk.splittable and batch.size > _LOOKED_AT else batch
    key = (risk.dtype, risk.mode, risk.names, looked.size, *((x.shape[1:], x.dtype) for x in tensors_of(batch.data)))
    if key not in known:
        with _Sizes() as seen, torch.no_grad():
            (risk.total if risk.opaque else risk.output)(params, looked)
        largest, total = (math.ceil(size / max(1, looked.size)) for size in (seen.largest, seen.total))
        known[key] = Footprint(largest, total, bytes_of(list(params.values())))
    return known[key]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are created inside it and still alive, and their peak.

    Example:
        >>> with LiveBytes() as live:
        ...     a = torch.ones(1000)
        ...     del a
        ...     b = torch.ones(500)
        >>> live.peak, live.bytes
        (4000, 2000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are still alive."""
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        return sum(number for _, number in self._alive.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_key(x) for x in tensors_of((args, kwargs))}
        result = func(*args, **kwargs)
        for x in tensors_of(result):
            if _key(x) not in given:  # a view of an argument takes no memory
                storage = x.untyped_storage()
                self._alive[_key(x)] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return result


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


class _Sizes(TorchDispatchMode):
    """Records the bytes of new tensors: of the largest, and of all together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:  # a transpose, for example, takes no memory
            sizes = [x.numel() * x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.largest, self.total = max([self.largest, *sizes]), self.total + sum(sizes)
        return out
