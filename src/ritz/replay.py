"""Functions of tensors, recorded once as a CUDA graph and replayed.

A host starts the kernels of a network one by one, some ten microseconds each. Those of a small network are shorter than
that: the device waits, most of all in second derivatives, which are thousands of kernels. A graph starts all of them at
once. What is recorded is the sequence of kernels and the addresses that they read and write, so a function can be
replayed only where each call is the same sequence and its tensors stay where they were (`sameness`).
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .memory import free_memory, whole_memory
from .switches import switches

log = logging.getLogger(__name__)

Function = Callable[..., tuple[Tensor, ...]]
_Replay = Callable[[], tuple[Tensor, ...]]
_REMEMBERED = 256  # functions that are not to be recorded


@dataclass(frozen=True)
class _Recording:
    """A recorded function."""

    own: list[Tensor]  # what it reads
    replay: _Replay
    size: float = 0.0  # bytes of the device that it holds, whether it runs or not


class Recordings:
    """Functions of tensors by key; a function is recorded when its key comes for the second time.

    The first call runs the function as it is: libraries choose their algorithms then, and what is asked for once is not
    worth a recording. Where recording fails, as with a function that reads a number from the device, or would leave
    less than half of the device's memory for everything else, the function is run as it is from then on.

    Args:
        most: Recordings that are kept, the ones used last; each holds the memory of its intermediate results. One that
            others pushed out is not made again: where there are more kinds of calls, all would be, over and over.

    Example:
        >>> recordings = Recordings()
        >>> for x in (1.0, 2.0, 3.0):  # on a CPU the function is called again
        ...     (y,) = recordings.run("square", lambda x: (x * x,), [torch.tensor([x])])
        >>> y.item(), len(recordings)
        (9.0, 1)
    """

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, _Recording | None] = OrderedDict()  # None: seen once
        self._refused: dict[Hashable, None] = {}  # the last of them

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
        key = _whole(key, inputs)
        if key in self._refused or _is_inside_another(inputs[0].device):
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
        with torch.no_grad():  # an input's graph is not the recording's
            torch._foreach_copy_(made.own, list(inputs))
        results = made.replay()
        return results if lend else _copied(results)

    def forget(self, key: Hashable, inputs: Sequence[Tensor]) -> None:
        """Give the memory of a recording back, in whose place something else is run from here on.

        Example:
            >>> recordings, x = Recordings(), torch.ones(1)
            >>> for _ in range(2):
            ...     _ = recordings.run("same", lambda x: (x,), [x])
            >>> recordings.forget("same", [x])
            >>> len(recordings)
            0
        """
        self._kept.pop(_whole(key, inputs), None)

    def let_go(self) -> bool:
        """Give the memory of all recordings back: what they are of is run as it is from here on.

        Returns:
            Whether there was any.

        Example:
            >>> recordings, x = Recordings(), torch.ones(1)
            >>> for _ in range(2):
            ...     _ = recordings.run("same", lambda x: (x,), [x])
            >>> recordings.let_go(), recordings.let_go()
            (True, False)
        """
        held = [key for key, made in self._kept.items() if made is not None]
        for key in held:
            del self._kept[key]
            self._refuse(key)
        return bool(held)

    @property
    def size(self) -> float:
        """Bytes of the device that all of them hold."""
        return sum(made.size for made in self._kept.values() if made is not None)

    def _record(self, key: Hashable, fn: Function, inputs: Sequence[Tensor]) -> _Recording | None:
        own = [x.detach().clone() for x in inputs]
        device = own[0].device
        try:
            if not _has_room(device, self.size):
                raise RuntimeError("less than half of the device's memory is free")
            with _same_draws(device):
                made = _recorded(fn, own)
            if not _has_room(device, self.size + made.size):
                raise RuntimeError(f"it would hold {made.size / 2**30:.3g} GiB, and leave less than half of the memory")
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            log.info("not recorded, run as it is: %s", str(error).splitlines()[0][:200])
            self._refuse(key)
            del self._kept[key]
            return None
        self._keep(key, made)
        return made

    def _keep(self, key: Hashable, made: _Recording | None) -> None:
        self._kept[key] = made
        while len(self._kept) > max(self.most, 1) * 4 or len(self) > self.most:
            old, pushed = self._kept.popitem(last=False)
            if pushed is not None:
                self._refuse(old)

    def _refuse(self, key: Hashable) -> None:
        """Run as it is from here on."""
        self._refused[key] = None
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]

    def __getstate__(self) -> dict[str, int]:  # recordings belong to this process
        return {"most": self.most}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(state["most"])  # type: ignore[misc]


def _whole(key: Hashable, inputs: Sequence[Tensor]) -> Hashable:
    """A key with all that the kernels depend on beside values."""
    return key, *((x.shape, x.dtype, x.device) for x in inputs), switches()


def _recorded(fn: Function, own: list[Tensor]) -> _Recording:
    """The function of these very tensors, as a graph; on a CPU, which needs none, as it is."""
    if own[0].device.type != "cuda":
        return _Recording(own, lambda: fn(*own))
    with torch.cuda.device(own[0].device):
        before = _reserved()
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # once before, so that nothing is made for the first time while recording
            fn(*own)
        current.wait_stream(aside)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                results = fn(*own)
        except RuntimeError:
            torch.cuda.set_stream(current)  # where recording fails torch leaves the other one,
            with torch.cuda.graph(torch.cuda.CUDAGraph()):  # and the generator waiting for a recording to end
                own[0].clone()
            _give_up(own[0].device, pool)
            raise
        size = _reserved() - before

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return _Recording(own, replay, size)


def _give_up(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the allocator that a recording that failed has ended.

    torch up to 2.11 does not (pytorch/pytorch#180395), and gives no memory back from then on. Where it does, the first
    call is refused, and the pool is torch's to release.
    """
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        torch._C._cuda_releasePool(device.index or 0, pool)


def _reserved() -> int:
    """Bytes that torch holds on the current GPU when it has given back all it can, memory of recordings apart."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@contextlib.contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """The generator put back after: a function that draws, as dropout does, draws the same whether it is recorded."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


def _is_inside_another(device: torch.device) -> bool:
    """Whether the user is recording, all of a training step say."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _copied(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies, by one call where all are numbers of one kind."""
    if all(x.is_floating_point() for x in tensors):
        return tuple(torch._foreach_mul(list(tensors), 1.0))
    return tuple(x.clone() for x in tensors)


def _has_room(device: torch.device, held: float) -> bool:
    """Whether half of the device's memory that this process may take is free.

    What torch keeps at hand is counted in, but for the bytes that recordings `held`, which are theirs alone.
    """
    if device.type != "cuda":
        return True
    free = free_memory(device)
    return free is not None and free - held > whole_memory(device) / 2
