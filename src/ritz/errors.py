"""The few exception and warning classes of ritz, and the line that a warning points at."""

import sys

_WRAPPERS = ("ritz", "torch", "contextlib")  # between a user's line and what it calls


class RitzError(Exception):
    """Base of every error that ritz raises on its own account."""


class UnsupportedError(RitzError):
    """The quantity does not exist for this model, loss or data; the message says why and what does."""


class NonFiniteError(RitzError):
    """A loss, gradient or product is NaN or infinite; the message names the batch."""


class IndefiniteError(RitzError, ValueError):
    """What only a positive definite matrix has was asked of another; `partial` is the result that was asked."""

    partial: object = None


class WeightsMovedError(RitzError):
    """The weights changed while a run was under way, so its numbers would belong to no single matrix."""


class RankError(RitzError):
    """A rank of a distributed run has died, stands still or has gone another way; the message names it."""


class StateError(RitzError):
    """The saved state of a run cannot be read or written, or is that of another run; ValueError or OSError besides."""


class StoppedError(RitzError):
    """A run was asked to stop before there was anything to return; what was saved of it can be gone on with."""


class NumericalWarning(UserWarning):
    """A result is usable but weaker than asked for; the message names the remedy."""


def callers_level() -> int:
    """The stacklevel of a warning that is to point at the user's line, past all calls of ours, of torch's and wrappers.

    Example:
        >>> callers_level()  # called by nobody between
        1
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WRAPPERS:
        frame, level = frame.f_back, level + 1
    return level
