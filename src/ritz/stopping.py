"""Why a run ends: numerical reasons with their remedies, and requests to stop, which runs check between products.

A run that ends early returns the results so far, and their `stop` begins with the reason. A request to stop comes from
Ctrl-C, from `kill`, or from a program (`ask`).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from .errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)

MAX_PRODUCTS = "max_products"
MAX_STEPS = "max_steps"
NOISE_FLOOR = "noise floor"  # the recurrence has converged, and the true residual has not
STAGNATION = "stagnation"  # the recurrence has departed from the true residual, which has stopped falling
NEGATIVE_CURVATURE = "negative curvature"
INDEFINITE = "indefinite"
LOST_ORTHOGONALITY = "loss of orthogonality"
UNDERFLOW = "underflow"

_REMEDIES = {
    MAX_PRODUCTS: "raise max_products (spent: {spent}) or tol",
    MAX_STEPS: "raise max_steps (taken: {taken}), add damping or give a preconditioner",
    NOISE_FLOOR: "the products are not precise enough for this tol: raise tol, or use dtype=torch.float64",
    STAGNATION: "residuals have stopped falling at the noise of the products: use dtype=torch.float64, or raise tol; "
    "more steps do not help",
    NEGATIVE_CURVATURE: "the matrix is not positive definite: add damping, solve(A + damping, b)",
    INDEFINITE: "the matrix should be positive but has a negative eigenvalue: add a shift, A + shift, or check how it "
    "is made; intervals are those of a general symmetric matrix",
    LOST_ORTHOGONALITY: "the rows of the basis are orthonormal to fewer than half of the digits: use "
    "dtype=torch.float64 and, on a GPU, torch.set_float32_matmul_precision('highest')",
    UNDERFLOW: "the matrix is so small that squares of its products underflow: use dtype=torch.float64, or multiply "
    "it, 2.0**60 * A",
}

_wish = ""  # why to stop; "" to continue
_listeners = 0  # nested `stoppable`


def remedy(stop: str, **known: object) -> str:
    """What to do about the reason with which a `stop` begins; "" if there is nothing to do.

    Example:
        >>> remedy(MAX_PRODUCTS, spent=100), remedy("converged")
        ('raise max_products (spent: 100) or tol', '')
    """
    return next((text.format(**known) for reason, text in _REMEDIES.items() if stop.startswith(reason)), "")


def asked() -> str:
    """Why the runs of this process should stop, for example "stopped by SIGTERM"; "" if they should not.

    Example:
        >>> asked()
        ''
    """
    return _wish


def listening() -> bool:
    """Whether the runs of this process can be asked to stop."""
    return _listeners > 0


def check() -> None:
    """Raise an error if the runs of this process should stop.

    Raises:
        StoppedError: If they should.
    """
    if _wish:
        raise StoppedError(_wish)


def ask(why: str) -> None:
    """Request that the runs inside `stoppable` stop, as a signal does.

    Example:
        >>> with stoppable():
        ...     ask("stopped by the queue")
        ...     print(asked())
        stopped by the queue
    """
    global _wish
    _wish = _wish or why


@contextlib.contextmanager
def stoppable(tell: Callable[[int], None] | None = None, *, patient: bool = False) -> Iterator[Callable[[], int]]:
    """After the first SIGINT or SIGTERM inside, the current product is completed; a second one ends the process.

    A call inside then saves its state if it has a checkpoint, and returns the results so far, whose `stop` says that
    the run was stopped; with nothing to return it raises `StoppedError`. An ignored signal stays ignored, such as
    SIGINT in a background job of a script. Only the main thread receives signals, so in another thread this does
    nothing.

    Args:
        tell: Called with the number of the first signal when it comes, from within the handler.
        patient: Whether to ignore a second signal. A process that works for another one gets signals both from the
            terminal and from that process, which ends it if necessary.

    Yields:
        A function that returns the number of the received signal, 0 for none.

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
        if came[0]:
            return
        came[0], _wish = number, f"stopped by {signal.Signals(number).name}"
        for each in () if patient else heard:
            signal.signal(each, signal.SIG_DFL)
        if tell is not None:
            tell(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in heard}
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
