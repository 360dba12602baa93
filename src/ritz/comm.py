"""Ranks that work together: the collectives of torch.distributed, each the identity where there is one rank.

Whoever uses ritz under torchrun writes the same program for every rank. Each rank walks its share of the data, sums are
taken over all ranks, and what follows is done by each rank alone from the same numbers. So that no rank takes another
turn than the others,

* a sum over ranks is the same to the last bit on all of them;
* what depends on the clock or on free memory is decided by rank 0, or by all (`first`, `all`);
* an error of one rank is raised by all of them (`agree`);
* a rank that dies or stands still is named to the others within a minute (`ritz.pulse`).
"""

import contextlib
import functools
import logging
import math
import os
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import RankError
from .pulse import abandoned, pulse

T = TypeVar("T")
log = logging.getLogger(__name__)
Group = Literal["world", "self"] | Any  # or a torch.distributed.ProcessGroup

_SMALL = 1024  # bytes that go round at once
_HEADER = 8
_NARROW = (torch.float16, torch.bfloat16)


class World:
    """The ranks of a process group, or this process alone.

    Attributes:
        rank: Rank of this process in the group, from 0.
        size: Ranks in the group.

    Example:
        >>> alone = World()
        >>> alone.size, alone.gather("a"), alone.sum(torch.ones(2)).tolist()
        (1, ['a'], [1.0, 1.0])
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.ranks = [0] if self.size == 1 else dist.get_process_group_ranks(group)  # in the default group
        if self.size > 1:
            pulse()

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "World":
        return self  # there is one, however many risks there are

    def __reduce__(self) -> tuple[Any, ...]:
        return World, ()  # elsewhere there is no group

    # ------------------------------------------------------------------------------------- decisions

    def gather(self, value: T) -> list[T]:
        """What each rank has, in the order of ranks; for small objects."""
        if self.size == 1:
            return [value]
        data = pickle.dumps(value)
        room = _SMALL - _HEADER
        lengths, parts = [], []
        for part in self._bytes(len(data).to_bytes(_HEADER, "little") + data[:room], _SMALL):
            lengths.append(int.from_bytes(part[:_HEADER], "little"))
            parts.append(part[_HEADER:])
        if max(lengths) > room:
            rest = self._bytes(data[room:], max(lengths) - room)
            parts = [part + more for part, more in zip(parts, rest, strict=True)]
        return [pickle.loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]

    def first(self, value: T) -> T:
        """What rank 0 has: for what depends on the clock."""
        return self.of(0, value)

    def of(self, rank: int, value: T) -> T:
        """What one rank has; the others' is not looked at."""
        if self.size == 1:
            return value
        data = pickle.dumps(value) if self.rank == rank else b""
        length = torch.tensor([len(data)], device=self._device())
        self._send(length, rank)
        own = torch.zeros(int(length), dtype=torch.uint8)
        if data:
            own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        own = self._send(own.to(self._device()), rank)
        return value if self.rank == rank else pickle.loads(own.cpu().numpy().tobytes())

    def _send(self, tensor: Tensor, rank: int) -> Tensor:
        """The tensor of one rank into that of the others."""
        self._done(dist.broadcast(tensor, src=self.ranks[rank], group=self.group, async_op=True), tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it holds on a rank."""
        return any(self.gather(bool(flag)))

    def all(self, flag: bool) -> bool:
        """Whether it holds on every rank."""
        return all(self.gather(bool(flag)))

    def agree(self, what: str, error: Exception | None, note: T, place: int = 0) -> list[T]:
        """Notes of all ranks, if all came through; else the error of the one that failed first, on every rank.

        Args:
            what: The piece of work that ends here: ranks that are at different ones have come apart.
            error: What went wrong on this rank.
            note: Anything small.
            place: Where this rank failed, in an order common to the ranks.

        Raises:
            RankError: If ranks have come apart, or the error of another cannot be passed on.
            Exception: The error of the rank that failed.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return [note]
        told = self.gather((what, _portable(error), place, note))
        if len({name for name, *_ in told}) > 1:
            where = ", ".join(f"rank {rank} at {name}" for rank, (name, *_) in enumerate(told))
            raise abandoned(
                f"the ranks have come apart: {where}. Every rank must make the same calls in the same order; for one "
                "rank by itself use Risk(..., group='self')"
            )
        failed = [(spot, rank, bad) for rank, (_, bad, spot, _) in enumerate(told) if bad is not None]
        if not failed:
            return [notes for *_, notes in told]
        _, rank, bad = min(failed, key=lambda each: each[:2])
        if error is not None and rank == self.rank:
            raise error
        raise _restored(bad, rank)

    # ------------------------------------------------------------------------------------- tensors

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks; half precision is summed in float32."""
        if self.size == 1:
            return tensor
        wide = tensor.to(torch.float32) if tensor.dtype in _NARROW else tensor
        own = wide.detach().to(self._device(tensor)).clone(memory_format=torch.contiguous_format)
        self._done(dist.all_reduce(own, group=self.group, async_op=True), own)
        return own.to(tensor)

    def cat(self, tensors: Sequence[Tensor], device: torch.device) -> list[list[Tensor]]:
        """The tensors of each rank, any number of any shapes, in the order of ranks, on the device."""
        tensors = [t.detach() for t in tensors]
        if self.size == 1:
            return [list(tensors)]
        kinds = self.gather([(tuple(t.shape), t.dtype) for t in tensors])
        dtypes = {dtype for each in kinds for _, dtype in each}
        if not dtypes:
            return [[] for _ in kinds]
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float64
        sizes = [sum(math.prod(shape) for shape, _ in each) for each in kinds]
        flat = torch.zeros(max(sizes), dtype=dtype, device=self._device(torch.empty(0, device=device)))
        if tensors:
            flat[: sizes[self.rank]] = torch.cat([t.reshape(-1).to(flat) for t in tensors])
        parts = [torch.empty_like(flat) for _ in kinds]
        self._done(dist.all_gather(parts, flat, group=self.group, async_op=True), flat)
        return [
            [
                piece.reshape(shape).to(device, own)
                for piece, (shape, own) in zip(part[:size].split([math.prod(s) for s, _ in each]), each, strict=True)
            ]
            for part, size, each in zip(parts, sizes, kinds, strict=True)
        ]

    def same(self, tensor: Tensor, note: T) -> tuple[Tensor, list[T]]:
        """The tensor of rank 0, where that of another rank differs from it in a bit; and the notes of all ranks."""
        if self.size == 1:
            return tensor, [note]
        marks, notes = zip(*self.gather((_mark(tensor), note)), strict=True)
        if len(set(marks)) == 1:
            return tensor, list(notes)
        own = tensor.detach().to(self._device(tensor)).clone(memory_format=torch.contiguous_format)
        return self._send(own, 0).to(tensor), list(notes)

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """While collectives of others are under way, FSDP2's: a rank that is lost ends this process with its name."""
        return contextlib.nullcontext() if self.size == 1 else pulse().watches(self.ranks)

    def _bytes(self, data: bytes, length: int) -> list[bytes]:
        """`length` bytes of each rank."""
        own = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8).to(self._device())
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._done(dist.all_gather(parts, own, group=self.group, async_op=True), own)
        return [part.cpu().numpy().tobytes() for part in parts]

    def _device(self, tensor: Tensor | None = None) -> torch.device:
        """Where the group's backend wants a tensor."""
        if tensor is not None and tensor.device.type in self._backends:
            return tensor.device
        return torch.device("cpu" if "cpu" in self._backends else f"cuda:{torch.cuda.current_device()}")

    @functools.cached_property
    def _backends(self) -> dict[str, str]:
        """The backend for each kind of device."""
        known = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        return {device: backend for device, backend in known.items() if device in ("cpu", "cuda") and backend != "fake"}

    def _done(self, work: Any, tensor: Tensor) -> None:
        """Wait for a collective, with an eye on the others."""
        heart, host = pulse(), self._backends[tensor.device.type] == "gloo"
        with heart.waits():
            try:
                while not (_waited(work, heart.interval) if host else _polled(work, heart.interval)):
                    heart.look(self.ranks)
            except RuntimeError as error:
                raise heart.missing(self.ranks, error) from error


def _waited(work: Any, seconds: float) -> bool:
    """Wait for a while; whether it is done."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():  # and has failed
            raise
        return False
    return True


def _polled(work: Any, seconds: float) -> bool:
    """The same where waiting is an order to the device, which does not stop the host."""
    end, pause = time.monotonic() + seconds, 2e-5
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    work.wait()
    return True


def _mark(tensor: Tensor) -> int:
    """The bits of a tensor, added up with other weights at each place; equal tensors have equal marks."""
    # a copy: one element may have any stride
    raw = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    raw = raw.view(torch.int32) if raw.numel() % 4 == 0 else raw
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for number, part in enumerate(raw.split(1 << 24)):  # int64 is wider than the numbers
        odd = torch.arange(1, 2 * part.numel(), 2, device=raw.device)
        total = total + (part.long() * odd).sum() * (2 * number + 1)  # modulo 2^64
    return int(total)


def _portable(error: Exception | None) -> bytes | str | None:
    """An error in a form that another process can raise."""
    if error is None:
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return f"{type(error).__name__}: {error}"
    return data


def _restored(bad: bytes | str, rank: int) -> Exception:
    """The error of another rank."""
    if isinstance(bad, str):
        return RankError(f"rank {rank} failed: {bad}")
    error: Exception = pickle.loads(bad)
    error.add_note(f"on rank {rank}")
    return error


# ------------------------------------------------------------------------------------------ which ranks

SELF = World()
_worlds: dict[int, tuple[Any, World]] = {}


def world(group: Group = "world") -> World:
    """The ranks that work together: those of the default process group where there is one.

    Args:
        group: "world", "self" for this process by itself, or a process group of torch.distributed.

    Example:
        >>> world()  # without torch.distributed.init_process_group
        World(rank 0 of 1)
    """
    if isinstance(group, World):
        return group
    if isinstance(group, str) and group not in ("world", "self"):
        raise ValueError(f"group must be 'world', 'self' or a process group of torch.distributed, got {group!r}")
    if isinstance(group, str):
        if group == "world" and launched_apart():
            _tell_once()
        if group == "self" or not (dist.is_available() and dist.is_initialized()):
            return SELF
        group = dist.group.WORLD
    if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not one of the ranks of the group; make the risk on those that are")
    if group is None or not hasattr(group, "size"):
        raise TypeError(
            f"group must be 'world', 'self' or a process group of torch.distributed, got {type(group).__name__}"
        )
    if dist.get_world_size(group) == 1:
        return SELF
    kept = _worlds.get(id(group))
    if kept is None or kept[0] is not group:
        _worlds[id(group)] = kept = group, World(group)
    return kept[1]


@functools.cache
def _tell_once() -> None:
    log.warning(
        "a launcher started several ranks, and torch.distributed is not initialised: each does all of the work by "
        "itself; call torch.distributed.init_process_group() for them to share it"
    )


def launched_apart() -> bool:
    """Whether a launcher started several ranks that were not made to work together.

    Example:
        >>> launched_apart()
        False
    """
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return several and not (dist.is_available() and dist.is_initialized())
