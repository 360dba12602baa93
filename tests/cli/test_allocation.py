"""A command keeps the memory that it has had, and a user who has said how memory is kept is left to it."""

import ctypes
import os
import subprocess
import sys

import pytest

from ritz.cli import allocation

LARGE = """
import resource, sys
{begin}
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def block(size=1 << 26):
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    libc.free(place)
block()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
KEEPS = "from ritz.cli.allocation import keep_freed; keep_freed() or sys.exit('not kept')"
PAGES = 10 * (1 << 26) // os.sysconf("SC_PAGE_SIZE")
glibc = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallopt")), reason="no mallopt: not glibc"
)


def faults(begin: str, **variables: str) -> int:
    """New pages of ten blocks of 64 MiB, one after the other, after a first one."""
    env = {name: value for name, value in os.environ.items() if name not in allocation.VARIABLES} | variables
    program = [sys.executable, "-c", LARGE.format(begin=begin)]
    return int(subprocess.run(program, env=env, capture_output=True, text=True, check=True).stdout)


@glibc
def test_blocks_are_used_again_and_not_asked_for_anew():
    assert faults(KEEPS) < PAGES / 100
    assert faults("pass", **allocation.VARIABLES) < PAGES / 100  # what processes that a command starts find


@glibc
def test_a_process_as_it_is_asks_for_them_anew():
    """Which is why; large pages of the system make them fewer."""
    assert faults("pass") >= 10


@pytest.mark.parametrize("name", allocation.VARIABLES)
def test_who_has_said_how_is_left_to_it(name, monkeypatch):
    for other in allocation.VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "65536")
    assert not allocation.keep_freed()
    assert [key for key in allocation.VARIABLES if key in os.environ] == [name]


def test_another_system_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    for other in allocation.VARIABLES:
        monkeypatch.delenv(other, raising=False)
    assert not allocation.keep_freed()
    assert not any(key in os.environ for key in allocation.VARIABLES)
