"""Work, counted: operations, multiplications, looks from the host and bytes, none of which depend on the machine."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ritz.operators.risk_operator import RiskOperator
from ritz.risk import Risk


@dataclass
class Work:
    """What was done inside `counted`."""

    multiplications: int = 0  # of matrix products and convolutions
    forwards: int = 0  # calls of the model
    batch_products: int = 0  # products of one batch, with however many vectors
    vectors: int = 0  # of these products
    looks: int = 0  # numbers read by the host, each of which waits for the device
    sent: int = 0  # numbers of the host made tensors, which on a GPU are copied there and cannot be recorded
    moved: int = 0  # bytes that operations read and wrote, each tensor of theirs once
    peak: int = 0  # bytes made inside and alive at once
    operations: Counter = field(default_factory=Counter)


class _Meter(TorchDispatchMode):
    """Counts below autograd and torch.func, where every operation is one of plain tensors."""

    def __init__(self, work: Work, memory: bool) -> None:
        super().__init__()
        self.work, self.memory, self.live = work, memory, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.work.operations[name] += 1
        self.work.looks += name == "_local_scalar_dense"
        self.work.sent += name == "lift_fresh"
        if not func.is_view:
            self.work.moved += sum(
                x.numel() * x.element_size() for x in tree_leaves((args, out)) if isinstance(x, Tensor)
            )
        if name in _FACTORS:
            left, right = args[_FACTORS[name] : _FACTORS[name] + 2]
            if not (left._is_zerotensor() or right._is_zerotensor()):  # torch does not multiply with those
                self.work.multiplications += left.numel() * right.shape[-1]
        elif name in ("convolution", "convolution_backward"):
            self.work.multiplications += _convolved(name, args, out)
        if self.memory and not func.is_view:
            self._weigh(args, out)
        return out

    def _weigh(self, args: Any, out: Any) -> None:
        given = {StorageWeakRef(x.untyped_storage()).cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x._is_zerotensor():
                ref = StorageWeakRef(x.untyped_storage())
                if ref.cdata not in given:
                    self.live[ref.cdata] = ref, x.untyped_storage().nbytes()
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        self.work.peak = max(self.work.peak, sum(size for _, size in self.live.values()))


_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addmm_": 1, "baddbmm_": 1}  # where the two matrices stand


def _convolved(name: str, args: Any, out: Any) -> int:
    """Multiplications of a convolution, or of the gradients of one that were asked for."""
    if name == "convolution":
        image, weight, transposed = args[0], args[1], args[6]
        return (image if transposed else out).numel() * weight[0].numel()
    grad, image, weight, transposed, asked = args[0], args[1], args[2], args[7], args[10]
    return (image if transposed else grad).numel() * weight[0].numel() * sum(asked[:2])


@contextmanager
def counted(monkeypatch: Any, memory: bool = False) -> Iterator[Work]:
    """Counts what is done inside, bytes if asked to; the monkeypatch is that of the test."""
    work = Work()
    call, product = Risk._call, RiskOperator._product

    def called(self: Risk, *args: Any) -> Any:
        work.forwards += 1
        return call(self, *args)

    def produced(self: RiskOperator, params: Any, batch: Any, rows: Tensor) -> Any:
        work.batch_products, work.vectors = work.batch_products + 1, work.vectors + len(rows)
        return product(self, params, batch, rows)

    with monkeypatch.context() as patch, _Meter(work, memory):
        patch.setattr(Risk, "_call", called)
        patch.setattr(RiskOperator, "_product", produced)
        yield work
