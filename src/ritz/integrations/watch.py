"""The common part of all trainers' callbacks: what they do with a tracker."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..loggers import LoggerLike, as_logger
from ..risk import Risk
from .track import DEFAULT, Tracker, check

MakeRisk = Callable[[nn.Module], Risk]


class Watch:
    """A tracker that starts when training starts, and looks every so many steps or epochs.

    Args:
        risk: The risk, or a function of the trained module that makes it. The function is called when training starts,
            after the trainer has moved the module to its device.
        every: Steps between two looks.
        every_epochs: Epochs between two looks, instead of steps.
        logger: A logger for the rows, in addition to the trainer's own loggers.
        settings: Further arguments of `ritz.track`.

    Example:
        >>> X, y = torch.diag(torch.tensor([1.0, 2.0])), torch.zeros(2, 1)
        >>> watch = Watch(lambda module: ritz.Risk(module, torch.nn.MSELoss(), (X, y)), every=1, budget=1.0)
        >>> watch.begin(torch.nn.Linear(2, 1, bias=False), lambda scalars, step: None)
        >>> watch.step(1)
        >>> watch.tracker.last["trace"].value  # of diag(1, 4)
        5.0
    """

    def __init__(
        self,
        risk: Risk | MakeRisk,
        every: int = 100,
        *,
        every_epochs: int | None = None,
        logger: LoggerLike | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(risk, Risk) and (isinstance(risk, nn.Module) or not callable(risk)):
            raise TypeError(
                f"risk must be a ritz.Risk, or a function of the trained module that makes one, got "
                f"{type(risk).__name__}"
            )
        if every_epochs is not None and every_epochs < 1:
            raise ValueError(f"every_epochs must be at least 1, got {every_epochs}")
        check(every=every, budget=settings.get("budget", 1.0), measures=settings.get("measures", DEFAULT))
        self.risk, self.every, self.every_epochs, self.settings = risk, every, every_epochs, settings
        self.logger = None if logger is None else as_logger(logger)
        self.tracker: Tracker | None = None
        self._module: nn.Module | None = None  # the module of the tracker
        self._epochs = 0  # epochs done at the last look
        self._waiting: Mapping[str, Any] | None = None  # a state that was loaded before training started

    def begin(self, module: nn.Module, host: LoggerLike, first: bool = True, step: int = 0) -> None:
        """Make the tracker, and start its clock; to be called by every rank that trains.

        Args:
            module: The trained module.
            host: The trainer's own loggers.
            first: Whether this is the trainer's first process. Only the first writes to `logger`. Only the first looks
                if the risk belongs to one process: made before there was a process group, or with group="self".
            step: The number of steps already done; in a resumed run, the trainer's count.
        """
        if self.tracker is None or module is not self._module:
            self._module, self._epochs, self.tracker = module, 0, None
            risk = self.risk if isinstance(self.risk, Risk) else self.risk(module)
            if risk.world.size == 1 and not first:
                return
            self.tracker = Tracker(risk, self.every, **self.settings)
        if self._waiting is not None:
            self.tracker.load_state_dict(self._waiting)
            self._waiting = None
        else:
            self.tracker.count = step
        self.tracker.logger = as_logger([host, self.logger] if self.logger is not None and first else host)
        self.tracker.start()

    def step(self, step: int) -> None:
        """To be called after a step of the optimiser."""
        if self.tracker is None:  # another process looks
            return
        if self.every_epochs is None:
            self.tracker.step(step)
        else:
            self.tracker.count = step

    def epoch(self, epochs: int) -> None:
        """To be called after an epoch, with the number of epochs done; one that was cut short does not count."""
        if self.tracker is None:
            return
        if self.every_epochs is not None and epochs % self.every_epochs == 0 and epochs > self._epochs:
            self._epochs = epochs
            self.tracker.offer()

    def end(self) -> None:
        """Stop the clock."""
        if self.tracker is not None:
            self.tracker.stop()

    def state(self) -> dict[str, Any]:
        """The state of the tracker; empty before training starts."""
        return {} if self.tracker is None else self.tracker.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, now or when training starts."""
        if not state:
            return
        if self.tracker is None:
            self._waiting = dict(state)
        else:
            self.tracker.load_state_dict(state)


class Watching:
    """The common base of all trainers' callbacks: a `Watch` and its tracker.

    Example:
        >>> Watching(lambda module: None).tracker is None
        True
    """

    def __init__(self, risk: Risk | MakeRisk, every: int = 100, **settings: Any) -> None:
        super().__init__()  # of the trainer's own class
        self.watch = Watch(risk, every, **settings)

    @property
    def tracker(self) -> Any:
        """The tracker, once training has started."""
        return self.watch.tracker


def each_step(calls: tuple[Callable[[], Any], ...]) -> tuple[Callable[[], Any], ...]:
    """The functions without arguments to call after each step, after checking that they are functions.

    Example:
        >>> each_step((3,))
        Traceback (most recent call last):
        TypeError: expected functions to call after each step, such as damping.step, got int
    """
    for call in calls:
        if not callable(call):
            raise TypeError(
                f"expected functions to call after each step, such as damping.step, got {type(call).__name__}"
            )
    return calls


def made(name: str, hooks: type, host: Any, module: str) -> type:
    """A class with the hooks of ritz and the callback class of a host as bases, under a name that pickle finds."""
    return type(name, (hooks, host), {"__module__": module, "__qualname__": name, "__doc__": hooks.__doc__})
