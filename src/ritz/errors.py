"""The few exception and warning classes of ritz, and the line that a warning points at."""

import sys

_WRAPPERS = ("ritz", "torch", "contextlib")  # between a user's line and what it calls


class RitzError(Exception):
    """Base class of the errors of ritz."""


class UnsupportedError(RitzError):
    """The quantity does not exist for this model, loss or data; the message gives the reason and an alternative."""


class NonFiniteError(RitzError):
    """A loss, gradient or product is NaN or infinite; the message names the batch."""


class IndefiniteError(RitzError, ValueError):
    """A quantity needs a positive definite matrix, and this one is not; `partial` is the result without it."""

    partial: object = None


class WeightsMovedError(RitzError):
    """The weights changed during a run, so its numbers would not belong to a single matrix."""


class RankError(RitzError):
    """A rank of a distributed run has died, is frozen or took another path; the message names it."""


class StateError(RitzError):
    """The saved state of a run cannot be read or written, or belongs to another run; also a ValueError or OSError."""


class StoppedError(RitzError):
    """A run was stopped before there was any result to return; it can be resumed from its saved state."""


class NumericalWarning(UserWarning):
    """A result is usable but less accurate than requested; the message names the remedy."""


def callers_level() -> int:
    """The stacklevel of a warning that is to point at the user's line, past all calls of ours, of torch's and wrappers.

    Example:
        >>> exec("level = level_of()", user := {"__name__": "study", "level_of": callers_level})
        >>> user["level"]  # called by a line of the user's
        1
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WRAPPERS:
        frame, level = frame.f_back, level + 1
    return level
