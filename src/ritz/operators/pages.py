"""Large blocks of memory on a CPU, and columns turned into rows.

The C library requests every block over 32 MiB, and many a smaller one, from the system anew. The system provides it
page by page, and a page of 4 KiB takes longer to get than to write to. In pages of 2 MiB it takes a quarter of the
time, unless memory is fragmented: then the system collects free pages first, which takes longer still. A product has at
least two such blocks: its vectors as rows, and their images. Two blocks are therefore kept for the next product.
"""

import ctypes
import mmap
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..memory import idle

LEAST = 1 << 22  # bytes: two large pages
KEPT = range(1 << 25, (1 << 27) + 1)  # bytes of a block that is kept for the next product
_BLOCK = 1 << 17  # elements that are transposed at a time, so that they stay in the cache


def in_large_pages(x: Tensor) -> Tensor:
    """The given new tensor, not yet written to, with large pages requested for it; or one like it in a kept block.

    Example:
        >>> in_large_pages(torch.empty(3, 1 << 22)).shape
        torch.Size([3, 4194304])
    """
    advise = _madvise()
    if advise is None or type(x) is not Tensor or x.device.type != "cpu" or x.nbytes < LEAST:
        return x
    if x.nbytes in KEPT and not torch._C._len_torch_dispatch_stack():  # a dispatch mode would not see this tensor
        x = _in_block(x)
    first = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    advise(first, x.data_ptr() + x.nbytes - first, mmap.MADV_HUGEPAGE)  # it is no error if the system ignores this
    return x


def _in_block(x: Tensor) -> Tensor:
    """A tensor like x in a kept block, which is idle again once its memory is not used any more."""
    try:
        block = idle.pop()
    except IndexError:
        block = None
    if block is None or len(block) != x.nbytes:  # a block of another size is given back to the system
        block = mmap.mmap(-1, x.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    lent = memoryview(block)
    weakref.finalize(lent, idle.append, block).atexit = False
    return torch.frombuffer(lent, dtype=x.dtype).view(x.shape)


@cache
def _madvise() -> Any:
    """The function of the C library; None if the system has pages of one size only."""
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
