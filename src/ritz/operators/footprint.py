"""How much a CPU takes at once: samples whose intermediate results stay small, vectors that have room in memory.

K vectors at a time are K tangents of every activation. Blocks of memory over some 32 MiB are asked of the system anew
each time and given back after, and a page that is new costs more than the arithmetic on it: on a small convolutional
network at batch 128, K = 8, pieces of 32 samples took 0.5 to 0.65 of the time of the whole batch (docs/speed.md). And
where a GPU has an error for want of memory, after which vectors are taken fewer at a time, a system without memory ends
the process: what a product needs is counted before.
"""

import math
import weakref
from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..batches import Batch, tensors_of
from ..memory import bytes_of, whole_memory
from ..risk import Params, Risk

LARGEST = 1 << 24  # bytes of one intermediate result, tangents counted in
WORTH = 2  # bytes of all results of a piece, for each of the weights
SHARE = 0.5  # part of the machine's memory that a product may take
OWN, EACH = 3.0, 1.5  # times what a forward pass computes: held by a product, and for each of its vectors
_LOOKED_AT = 2  # samples; a model may treat a single one in a way of its own


class Footprint(NamedTuple):
    """Bytes of what a forward pass computes, for each sample: the largest result, and all of them; of the weights."""

    largest: int
    total: int
    weights: int

    @property
    def worth(self) -> int:
        """Samples of a piece, for which all weights are read."""
        return max(1, math.ceil(WORTH * self.weights / max(1, self.total)))


_known: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Footprint]]" = weakref.WeakKeyDictionary()


def fitting_piece(risk: Risk, params: Params, batch: Batch, num_vectors: int) -> int:
    """The most samples whose largest activation, once for each vector, takes `LARGEST` bytes; at least one.

    Of a CPU so many that their activations are `WORTH` times the weights, where there is room: every piece reads all
    weights and vectors. By count, not by the clock: the same data is cut in the same way each time. To be called inside
    `session`.

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
    """How many vectors, of `most`, a CPU takes at once; at least one.

    So many that with the least samples that are taken at once, those of a batch that stays whole or a piece that is
    worth it, the largest activation takes `LARGEST` bytes, and that there is room. The whole memory counts, not what is
    free, so that two runs on one machine are alike. To be called inside `session`.

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
    """What a product of a whole batch with so many vectors at once takes, about. To be called inside `session`.

    Example:
        >>> risk = Risk(torch.nn.Linear(1, 4), torch.nn.MSELoss(), (torch.zeros(5, 1), torch.zeros(5, 4)))
        >>> risk.check()
        >>> with risk.session():  # five times four numbers of four bytes, 4.5 times
        ...     product_bytes(risk, risk.params(), next(iter(risk.batches)), 1)
        360.0
    """
    return batch.size * footprint(risk, params, batch).total * _passes(num_vectors)


def _passes(num_vectors: int) -> float:
    """What a product holds, in results of forward passes."""
    return OWN + EACH * num_vectors


@cache  # a look into files of the system, for every product of a batch
def room() -> float:
    """Bytes of the host's memory that a product may take.

    Example:
        >>> room() > 0
        True
    """
    return min(SHARE * whole_memory(torch.device("cpu")), 2.0**60)


def footprint(risk: Risk, params: Params, batch: Batch) -> Footprint:
    """Looked at once for a model and a kind of batch: on two samples, or on a batch that stays whole."""
    known = _known.setdefault(risk.model, {})
    looked = batch.head(_LOOKED_AT) if risk.splittable and batch.size > _LOOKED_AT else batch
    key = (risk.dtype, risk.mode, risk.names, looked.size, *((x.shape[1:], x.dtype) for x in tensors_of(batch.data)))
    if key not in known:
        with _Sizes() as seen, torch.no_grad():
            (risk.total if risk.opaque else risk.output)(params, looked)
        largest, total = (math.ceil(size / max(1, looked.size)) for size in (seen.largest, seen.total))
        known[key] = Footprint(largest, total, bytes_of(list(params.values())))
    return known[key]


class _Sizes(TorchDispatchMode):
    """Notes the bytes of new tensors: of the largest and of all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:  # as the transpose of a weight
            sizes = [x.numel() * x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.largest, self.total = max([self.largest, *sizes]), self.total + sum(sizes)
        return out
