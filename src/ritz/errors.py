"""The few exception and warning classes of ritz."""


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
