"""Curvature in Lightning: `CurvatureCallback` and `EachStep`, for lightning.pytorch and for pytorch_lightning.

    from ritz.integrations.lightning import CurvatureCallback

    watch = CurvatureCallback(lambda module: ritz.Risk(module.net, nn.CrossEntropyLoss(), (X, y)), every=100)
    lightning.Trainer(callbacks=[watch]).fit(module, loader)
    print(watch.tracker.table())

The classes are made on first access, from the package that is loaded; nothing is imported before. Return the optimisers
of ritz from `configure_optimizers` like any other.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..loggers import Log
from .watch import Watching, each_step, made

_HOSTS = ("lightning.pytorch", "pytorch_lightning")


class CurvatureHooks(Watching):
    """A callback that measures every so many steps or epochs of Lightning's training, as `ritz.track` does.

    The trainer's loggers get the rows, at the steps of the looks, and the numbers can be monitored by name
    (`ModelCheckpoint(monitor="curvature/hessian/lambda_max")`). Processes that train together share a look if the risk
    is made by a function; if it was made before the trainer started the processes, only the first one looks. The state
    is part of Lightning's checkpoints. Weights that are sharded over processes by FSDP1 or DeepSpeed cannot be
    measured.

    Args:
        risk: The risk, or a function of the LightningModule that makes it. The function is called on every process when
            training starts, after the module has been moved to its device. All processes must have the same data; if
            the trainer has made a loader distributed, ritz reads the whole data set.
        every: Steps of the optimiser between two looks.
        every_epochs: Epochs between two looks, instead of steps.
        logger: An additional logger for the rows, as in `ritz.track`.
        settings: Further arguments of `ritz.track`: measures, budget, ...

    Attributes:
        tracker: The `Tracker`, once training has started: `.table()`, `.plot()`, `.record`.

    Example:
        >>> hooks = CurvatureHooks(lambda module: ritz.Risk(module, torch.nn.MSELoss(), (torch.eye(2), torch.eye(2))))
        >>> hooks.state_dict()
        {}
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the tracker, and start its clock."""
        host = _host(trainer, pl_module, self.watch.every_epochs is not None)
        self.watch.begin(pl_module, host, trainer.is_global_zero, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look if one is due."""
        self.watch.step(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Look if one is due by epochs."""
        self.watch.epoch(trainer.current_epoch + 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock."""
        self.watch.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop the clock."""
        self.watch.end()

    def state_dict(self) -> dict[str, Any]:
        """The state for Lightning's checkpoints."""
        return self.watch.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state from Lightning's checkpoints."""
        self.watch.load_state(state_dict)


class EachStepHooks:
    """A callback that calls functions after each step of the optimiser: `EachStep(damping.step, average.step)`.

    With accumulation of gradients, they are called once for each step, not for each batch.

    Example:
        >>> EachStepHooks(print).calls == (print,)
        True
    """

    def __init__(self, *calls: Callable[[], Any]) -> None:
        super().__init__()
        self.calls, self._steps = each_step(calls), 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Store the step at which training starts or resumes."""
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call the functions if this batch completed a step."""
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            for call in self.calls:
                call()


def _host(trainer: Any, pl_module: Any, by_epoch: bool) -> list[Log]:
    """Functions that take a row: Lightning's loggers, and one that makes the numbers visible to its callbacks."""

    def monitored(scalars: dict[str, float], step: int) -> None:
        pl_module.log_dict(scalars, logger=False, on_step=not by_epoch, on_epoch=by_epoch)

    loggers = trainer.loggers if trainer.is_global_zero else ()
    # log_dict would pass on only the rows at multiples of log_every_n_steps
    return [*(logger.log_metrics for logger in loggers), monitored]


_HOOKS = {"CurvatureCallback": CurvatureHooks, "EachStep": EachStepHooks}


def __getattr__(name: str) -> Any:
    """The callbacks, made from the package that is loaded."""
    if name not in _HOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOOKS)}", name=name)
    globals()[name] = made(name, _HOOKS[name], _loaded().Callback, __name__)
    return globals()[name]


def _loaded() -> Any:
    """lightning.pytorch or pytorch_lightning: the one that is in use, otherwise the first that is installed."""
    for host in sorted(_HOSTS, key=lambda host: host not in sys.modules):
        try:
            return importlib.import_module(host)
        except ImportError:
            continue
    raise ImportError("Lightning is not installed here: pip install 'ritz[lightning]'")
