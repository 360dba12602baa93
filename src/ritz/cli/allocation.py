"""Memory that the C library keeps.

A product of vectors with a network makes and drops blocks of many megabytes. glibc gives such blocks back to the system
and asks for them anew, and on a CPU a page that is new costs more than the arithmetic on it (`benchmarks/allocation.py`
has by how much). A command has its process to itself, so here they are kept; in a program of the user's that is for the
user to say, by the variables below (docs/howto.md).
"""

import ctypes
import os
import sys

MMAP_MAX, TRIM_THRESHOLD = -4, -1  # the numbers that mallopt knows them by: malloc.h of glibc
# the same, for processes that begin later
VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 62)}


def keep_freed() -> bool:
    """No block apart from the heap, and no end of the heap given back, in this process and in those that it starts.

    Whoever has set one of the variables is left to it.

    Returns:
        Whether that is so: only glibc has it.

    Example:
        >>> os.environ["MALLOC_MMAP_MAX_"] = "65536"
        >>> keep_freed()
        False
        >>> del os.environ["MALLOC_MMAP_MAX_"]
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    os.environ.update(VARIABLES)
    return all(mallopt(*setting) == 1 for setting in ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1)))
