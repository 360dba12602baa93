"""How much memory a device has left, and errors for want of it."""

import gc
import os

import torch

from .errors import RitzError


class NoRoomError(RitzError, torch.OutOfMemoryError):
    """Memory has run out where nothing more may be cut; the message says what would fit."""


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
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> float | None:
    """Bytes that are free on a device, that which torch keeps at hand counted in; None where the system does not tell.

    Example:
        >>> free_memory(torch.device("cpu")) is None or free_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        at_hand = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + at_hand)
    try:
        with open("/proc/meminfo", encoding="utf8") as file:  # the cache of files counts as free there
            lines = (line.split() for line in file)
            return 1024.0 * next(float(words[1]) for words in lines if words[0] == "MemAvailable:")
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None
