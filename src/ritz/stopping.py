"""A wish to stop, heard between products: by Ctrl-C, by `kill`, or by a program that has had enough."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from .errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_wish = ""  # why to stop; "" to go on
_listeners = 0  # nested `stoppable`


def asked() -> str:
    """Why the runs of this process are to stop, as "stopped by SIGTERM"; "" where they are not.

    Example:
        >>> asked()
        ''
    """
    return _wish


def listening() -> bool:
    """Whether the runs of this process can be asked to stop."""
    return _listeners > 0


def check() -> None:
    """Raise if the runs of this process are to stop.

    Raises:
        StoppedError: If they are.
    """
    if _wish:
        raise StoppedError(_wish)


@contextlib.contextmanager
def stoppable(tell: Callable[[int], None] | None = None) -> Iterator[Callable[[], int]]:
    """The first SIGINT or SIGTERM inside lets the product in hand finish; a second one ends the process at once.

    What runs inside then saves its state where it has a checkpoint, and returns what it has so far, which says in
    `stop` that it was stopped; with nothing to return it raises `StoppedError`. In another thread than the main one,
    which alone hears signals, nothing is changed.

    Args:
        tell: Called with the number of the first signal when it comes, from within the handler.

    Yields:
        A function that returns the number of the signal that came, 0 for none.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> H = DenseOperator(torch.diag(torch.linspace(0, 1, 200)))
        >>> with stoppable() as signal_number:
        ...     s = ritz.spectrum(H, 50, 4, progress=lambda done, total: done > 150 and signal.raise_signal(15))
        >>> signal_number(), s.stop
        (15, 'stopped by SIGTERM after 13 of 50 steps')
    """
    global _wish, _listeners
    came = [0]

    def hear(number: int, frame: FrameType | None) -> None:
        global _wish
        came[0], _wish = number, f"stopped by {signal.Signals(number).name}"
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if tell is not None:
            tell(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, hear) for number in SIGNALS}
    outer, process = _wish, os.getpid()
    _listeners += 1
    try:
        yield lambda: came[0]
    finally:
        _listeners -= 1
        _wish = outer
        if os.getpid() == process:
            for number, handler in before.items():
                signal.signal(number, handler)
