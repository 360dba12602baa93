"""How much memory a device has left, and errors for want of it."""

import contextlib
import gc
import math
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .errors import RitzError

idle: deque[mmap.mmap] = deque(maxlen=2)  # blocks on the host that were let go of, for the next of that size


class NoRoomError(RitzError, torch.OutOfMemoryError):
    """Memory has run out where nothing more may be cut; the message says what would fit."""


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Their size.

    Example:
        >>> bytes_of([torch.ones(2, 3, dtype=torch.float64)])
        48
    """
    return sum(x.numel() * x.element_size() for x in tensors)


def is_shortage(error: BaseException) -> bool:
    """Whether an error is for want of memory; on a CPU torch has no type of its own for it.

    Example:
        >>> is_shortage(torch.OutOfMemoryError("CUDA out of memory")), is_shortage(RuntimeError("no such kernel"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def make_room(device: torch.device) -> None:
    """Give back memory that nobody needs, before something is tried again in smaller parts.

    Objects that hold each other hold their tensors until the garbage is collected, and the collector does not know that
    a device runs short.

    Example:
        >>> import weakref
        >>> ring = [torch.ones(1)]
        >>> ring.append(ring)
        >>> seen = weakref.ref(ring[0])
        >>> del ring
        >>> make_room(torch.device("cpu"))
        >>> seen() is None
        True
    """
    gc.collect()
    idle.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> float | None:
    """Bytes that are free for this process on a device; None where the system does not tell.

    What torch keeps at hand is counted in. On a GPU no more than the share of its memory that the process may take
    (`torch.cuda.set_per_process_memory_fraction`), on a CPU no more than is left to its control group: containers and
    batch systems end a process that takes more.

    Example:
        >>> free_memory(torch.device("cpu")) is None or free_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
        most = max(0.0, min(free, whole_memory(device) - held))
        return float(most + held - torch.cuda.memory_allocated(device))
    known = [left for _, left in _host_memory()]
    return min(known) if known else None


def whole_memory(device: torch.device) -> float:
    """Bytes of a device that this process may take in all; infinite where the system does not tell.

    Example:
        >>> whole_memory(torch.device("cpu")) >= free_memory(torch.device("cpu"))
        True
    """
    if device.type != "cuda":
        return min((most for most, _ in _host_memory()), default=math.inf)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)  # not in torch 2.6
    return float(share * torch.cuda.mem_get_info(device)[1])


def whole_swap() -> float:
    """Bytes on the disk of a host that stand in for memory; infinite where the system does not tell.

    Example:
        >>> whole_swap() >= 0
        True
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="utf8").splitlines()
        return sum(1024 * float(line.split()[1]) for line in lines if line.startswith("SwapTotal:"))
    return math.inf


def _host_memory() -> list[tuple[float, float]]:
    """What the machine has and what is free of it, and the same of each control group with a limit."""
    return [*_system_memory(), *_group_memory()]


def _system_memory() -> Iterator[tuple[float, float]]:
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf8").splitlines()
        kibibytes = {words[0]: float(words[1]) for words in map(str.split, lines)}
        yield 1024 * kibibytes["MemTotal:"], 1024 * kibibytes["MemAvailable:"]  # the cache of files counts as free
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        page = float(os.sysconf("SC_PAGE_SIZE"))
        yield page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")


# Files of a control group, version 2 and 1: the limit, what is taken, and which line of memory.stat is cache of files.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _group_memory(root: Path = Path("/")) -> Iterator[tuple[float, float]]:
    """The limit, and what is left, of each of the control groups around this process that have one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):  # in a container the path may be that of the host: its top is there still
            for files in _GROUP_FILES:
                with contextlib.suppress(OSError, ValueError, KeyError):  # no such file; "max" is no limit
                    yield _left(folder, *files)
            if folder == top:
                break


def _left(folder: Path, limit: str, taken: str, cache: str) -> tuple[float, float]:
    most, used = (float((folder / name).read_text()) for name in (limit, taken))
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return most, max(0.0, most - used + float(stat[cache]))
