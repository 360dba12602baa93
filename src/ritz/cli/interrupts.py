"""Ctrl-C that is not lost: Python drops a KeyboardInterrupt that comes inside a callback, as imports have many."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class _Listener:
    """A handler of SIGINT that remembers that it was called."""

    def __init__(self) -> None:
        self.called = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.called = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """While a command runs: `check` raises what was dropped, and nothing is printed where it was.

    Where SIGINT is ignored, as in a background job, or somebody else's, and outside the main thread, nothing changes.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    hook = sys.unraisablehook

    def unraisable(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            hook(dropped)

    signal.signal(signal.SIGINT, _Listener())
    sys.unraisablehook = unraisable
    try:
        yield
    except BaseException:
        check()  # an error that comes of half a module is not what happened
        raise
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check() -> None:
    """Raise a KeyboardInterrupt that was dropped.

    Example:
        >>> with listening():
        ...     check()
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Listener) and handler.called:
        raise KeyboardInterrupt
