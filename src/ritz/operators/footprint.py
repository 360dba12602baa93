"""How many samples a CPU takes at once: as many as have small intermediate results.

K vectors at a time are K tangents of every activation. Blocks of memory over some 32 MiB are asked of the system anew
each time and given back after, and a page that is new costs more than the arithmetic on it: on a small convolutional
network at batch 128, K = 8, pieces of 32 samples took 0.5 to 0.65 of the time of the whole batch (docs/speed.md).
"""

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..batches import Batch, tensors_of
from ..risk import Params, Risk

LARGEST = 1 << 24  # bytes of one intermediate result, tangents counted in
_LOOKED_AT = 2  # samples; a model may treat a single one in a way of its own

_known: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, int]]" = weakref.WeakKeyDictionary()


def fitting_piece(risk: Risk, params: Params, batch: Batch, num_vectors: int) -> int:
    """The most samples whose largest activation, once for each vector, takes `LARGEST` bytes; at least one.

    By count, not by the clock: the same data is cut in the same way each time. To be called inside `session`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1 << 16), torch.nn.Linear(1 << 16, 1))
        >>> risk = Risk(model, torch.nn.MSELoss(), (torch.zeros(64, 1), torch.zeros(64, 1)))
        >>> with risk.session():
        ...     [fitting_piece(risk, risk.params(), next(iter(risk.batches)), k) for k in (1, 8)]
        [64, 8]
    """
    if batch.size <= _LOOKED_AT:
        return batch.size
    known = _known.setdefault(risk.model, {})
    key = (risk.dtype, *((x.shape[1:], x.dtype) for x in tensors_of(batch.data)))
    if key not in known:
        with _Largest() as seen, torch.no_grad():
            risk.output(params, batch.head(_LOOKED_AT))
        known[key] = -(-seen.size // _LOOKED_AT)
    return max(1, min(batch.size, LARGEST // max(1, known[key] * num_vectors)))


class _Largest(TorchDispatchMode):
    """Notes the size in bytes of the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:  # as the transpose of a weight
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.size = max(self.size, x.numel() * x.element_size())
        return out
