"""Functions of tensors, recorded once as a CUDA graph and replayed.

A host starts the kernels of a network one by one, some ten microseconds each. Those of a small network are shorter than
that: the device waits, most of all in second derivatives, which are thousands of kernels. A graph starts all of them at
once. What is recorded is the sequence of kernels and the addresses that they read and write, so a function can be
replayed only where each call is the same sequence (`is_static`) and its tensors stay where they were (`place_of`).
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

Function = Callable[..., tuple[Tensor, ...]]
_Recorded = Callable[[], tuple[Tensor, ...]]  # reads and writes tensors of its own


class Recordings:
    """Functions of tensors by key; a function is recorded when its key comes for the second time.

    The first call runs the function as it is: libraries choose their algorithms then, and what is asked for once is not
    worth a recording. Where recording fails, as with a function that reads a number from the device, or memory does,
    the function is run as it is from then on.

    Args:
        most: Recordings that are kept, the ones used last; each holds the memory of its intermediate results.

    Example:
        >>> recordings = Recordings()
        >>> for x in (1.0, 2.0, 3.0):  # on a CPU the function is called again
        ...     (y,) = recordings.run("square", lambda x: (x * x,), [torch.tensor([x])])
        >>> y.item(), len(recordings)
        (9.0, 1)
    """

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, tuple[list[Tensor], _Recorded] | None] = OrderedDict()  # None: seen once
        self._refused: set[Hashable] = set()

    def __len__(self) -> int:
        return sum(made is not None for made in self._kept.values())

    def run(self, key: Hashable, fn: Function, inputs: Sequence[Tensor], *, lend: bool = False) -> tuple[Tensor, ...]:
        """fn(*inputs).

        Args:
            key: Names the function and all it depends on beside the values of its inputs and of the tensors that it
                finds at their old places; see `place_of`.
            fn: Tensors to tensors, without a look at them from the host.
            inputs: Copied to where the recording reads them.
            lend: Spare a copy of the results, for one who is done with them before the next call.

        Returns:
            Tensors of the caller's own, unless lent.
        """
        key = (key, *((x.shape, x.dtype, x.device) for x in inputs), _switches())
        if key in self._refused:
            return fn(*inputs)
        if key not in self._kept:
            self._keep(key, None)
            return fn(*inputs)
        self._kept.move_to_end(key)
        made = self._kept[key]
        if made is None:
            made = self._record(key, fn, inputs)
            if made is None:
                return fn(*inputs)
        own, recorded = made
        torch._foreach_copy_(own, list(inputs))
        results = recorded()
        return results if lend else _copied(results)

    def _record(self, key: Hashable, fn: Function, inputs: Sequence[Tensor]) -> tuple[list[Tensor], _Recorded] | None:
        own = [x.detach().clone() for x in inputs]
        try:
            if not _has_room(own[0].device):
                raise RuntimeError("less than half of the device's memory is free")
            made = own, _recorded(fn, own)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            log.info("not recorded, run as it is: %s", str(error).splitlines()[0][:200])
            self._refused.add(key)
            del self._kept[key]
            return None
        self._keep(key, made)
        return made

    def _keep(self, key: Hashable, made: tuple[list[Tensor], _Recorded] | None) -> None:
        self._kept[key] = made
        while len(self._kept) > max(self.most, 1) * 4 or len(self) > self.most:
            self._kept.popitem(last=False)

    def __getstate__(self) -> dict[str, int]:  # recordings belong to this process
        return {"most": self.most}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(state["most"])  # type: ignore[misc]


def _recorded(fn: Function, own: list[Tensor]) -> _Recorded:
    """The function of these very tensors, as a graph; on a CPU, which needs none, as it is."""
    if own[0].device.type != "cuda":
        return lambda: fn(*own)
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream(own[0].device)
    aside.wait_stream(current)
    with torch.cuda.stream(aside):  # once before, so that nothing is made for the first time while recording
        fn(*own)
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        results = fn(*own)

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


def _copied(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies, by one call where all are numbers of one kind."""
    if all(x.is_floating_point() for x in tensors):
        return tuple(torch._foreach_mul(list(tensors), 1.0))
    return tuple(x.clone() for x in tensors)


def _has_room(device: torch.device) -> bool:
    """Whether half of the device's memory is free, that which torch keeps at hand counted in."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > total / 2


def _switches() -> tuple[Hashable, ...]:
    """What decides which kernels torch takes."""
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, matmul_precision(), _precision(cudnn, "conv"),
        torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_grad_enabled(),
    )  # fmt: skip


def matmul_precision() -> Hashable:
    """How float32 matrices are multiplied on a GPU, as torch's switch has it."""
    return _precision(torch.backends.cuda, "matmul")


def _precision(backend: Any, name: str) -> Hashable:
    """torch's switch, by its new name where there is one: asking by the old one is an error once the new was used."""
    new = getattr(getattr(backend, name, None), "fp32_precision", None)
    return new if new is not None else getattr(getattr(backend, name, backend), "allow_tf32", None)


@contextlib.contextmanager
def tensor_cores(allowed: bool = True) -> Iterator[None]:
    """Float32 matrices on a GPU are multiplied in TF32: ten bits of mantissa, several times as fast.

    Example:
        >>> before = matmul_precision()
        >>> with tensor_cores():
        ...     matmul_precision() != before
        True
        >>> matmul_precision() == before
        True
    """
    matmul: Any = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    try:
        if allowed:
            setattr(matmul, name, value)
        yield
    finally:
        setattr(matmul, name, before)


def place_of(tensors: Iterable[Tensor]) -> tuple[Hashable, ...]:
    """Where tensors lie: a recording that reads them is right as long as this is the same.

    Example:
        >>> x = torch.ones(2)
        >>> here = place_of([x])
        >>> here == place_of([x.add_(1)]), here == place_of([x.clone()])
        (True, False)
    """
    return tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def modes_of(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    """Which modules are in training mode."""
    return tuple(m.training for m in modules)


def is_static(modules: Iterable[nn.Module]) -> bool:
    """Whether each call of a model is known to be the same sequence of operations: all its modules are torch.nn's own.

    A module of the user's may do other things at each call, as stochastic depth does, or count its calls; so may a
    hook. Those of this package do nothing in a functional call.

    Example:
        >>> is_static(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()).modules())
        True
        >>> class Net(torch.nn.Module): ...
        >>> is_static(Net().modules())
        False
    """
    return all(map(_is_known, modules))


def _is_known(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.nn.") or "forward" in vars(module):
        return False
    if not module._forward_hooks and not module._forward_pre_hooks:
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return all(type(hook).__module__.startswith("ritz.") for hook in hooks)
