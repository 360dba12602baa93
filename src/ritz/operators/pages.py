"""Large blocks of memory on a CPU, and columns turned into rows.

The C library asks the system for a block over 32 MiB anew each time, and for many a smaller one that it gave back. It
comes page by page, and a page of 4 KiB takes longer to get than to write to; in pages of 2 MiB it takes a quarter of
the time. A product has two such blocks at least, its vectors as rows and their images.
"""

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

LEAST = 1 << 22  # bytes: two large pages
_BLOCK = 1 << 17  # elements that are turned at a time, so that they stay in the cache


def in_large_pages(x: Tensor) -> Tensor:
    """The same tensor, new and not yet written to, whose memory is to come in large pages where the system has them.

    Example:
        >>> x = torch.empty(1 << 24)
        >>> in_large_pages(x) is x
        True
    """
    size = x.numel() * x.element_size()
    advise = _madvise()
    if advise is not None and type(x) is Tensor and x.device.type == "cpu" and size >= LEAST:
        first = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        advise(first, x.data_ptr() + size - first, mmap.MADV_HUGEPAGE)  # advice: that it is not heeded is no error
    return x


@cache
def _madvise() -> Any:
    """The function of the C library; None where pages have one size."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise


def as_rows(columns: Tensor) -> Tensor:
    """Columns (dim, k) as rows (k, dim), contiguous.

    Example:
        >>> as_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """
    rows = columns.T
    if rows.is_contiguous() or columns.device.type != "cpu":
        return rows.contiguous()
    out = in_large_pages(columns.new_empty(rows.shape))
    size = max(1, _BLOCK // len(rows))
    for start in range(0, len(columns), size):
        out[:, start : start + size] = rows[:, start : start + size]
    return out
