"""Curvature in Lightning: `CurvatureCallback` and `EachStep`, for lightning.pytorch and for pytorch_lightning.

    from ritz.integrations.lightning import CurvatureCallback

    watch = CurvatureCallback(lambda module: ritz.Risk(module.net, nn.CrossEntropyLoss(), (X, y)), every=100)
    lightning.Trainer(callbacks=[watch]).fit(module, loader)
    print(watch.tracker.table())

The classes are made when they are first asked for, of the package that is loaded: nothing is imported before. The
optimisers of ritz are returned from `configure_optimizers` as any other.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..loggers import Log
from .watch import Watching, each_step, made

_HOSTS = ("lightning.pytorch", "pytorch_lightning")


class CurvatureHooks(Watching):
    """Measures every so many steps or epochs of Lightning's training, as `ritz.track` does; a callback.

    Rows go to the loggers of the trainer, at the steps at which they are made, and the numbers can be monitored by name
    (`ModelCheckpoint(monitor="curvature/hessian/lambda_max")`). Processes that train together share a look, if the
    risk is made by a function; one made before the trainer has started them is looked at by the first alone. The state
    is part of Lightning's checkpoints. Weights that are sharded over processes by FSDP1 or DeepSpeed cannot be looked
    at.

    Args:
        risk: The risk, or a function of the LightningModule that makes it; called on every process when training
            begins, by when the module is on its device. All are to have the same data; of a loader that the trainer has
            made distributed the whole data set is walked.
        every: Steps of the optimiser between two looks.
        every_epochs: Epochs between two looks, instead.
        logger: Where rows go besides, as in `ritz.track`.
        settings: Further ones of `ritz.track`: measures, budget, ...

    Attributes:
        tracker: The `Tracker`, once training has begun: `.table()`, `.plot()`, `.record`.

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
        """Look, where it is due."""
        self.watch.step(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Look, where epochs count."""
        self.watch.epoch(trainer.current_epoch + 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock."""
        self.watch.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop the clock."""
        self.watch.end()

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints."""
        return self.watch.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """From Lightning's checkpoints."""
        self.watch.load_state(state_dict)


class EachStepHooks:
    """Calls functions after each step of the optimiser: `EachStep(damping.step, average.step)`; a callback.

    Under accumulation of gradients they are called once for each step, not for each batch.

    Example:
        >>> EachStepHooks(print).calls == (print,)
        True
    """

    def __init__(self, *calls: Callable[[], Any]) -> None:
        super().__init__()
        self.calls, self._steps = each_step(calls), 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Where training begins, or goes on."""
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch, which need not be a step."""
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            for call in self.calls:
                call()


def _host(trainer: Any, pl_module: Any, by_epoch: bool) -> list[Log]:
    """How Lightning takes a row: at once by its loggers, and as numbers that its callbacks can monitor."""

    def monitored(scalars: dict[str, float], step: int) -> None:
        pl_module.log_dict(scalars, logger=False, on_step=not by_epoch, on_epoch=by_epoch)

    loggers = trainer.loggers if trainer.is_global_zero else ()
    # log_dict would hand on only the rows that meet log_every_n_steps
    return [*(logger.log_metrics for logger in loggers), monitored]


_HOOKS = {"CurvatureCallback": CurvatureHooks, "EachStep": EachStepHooks}


def __getattr__(name: str) -> Any:
    """The callbacks, made of the package that is loaded."""
    if name not in _HOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOOKS)}", name=name)
    globals()[name] = made(name, _HOOKS[name], _loaded().Callback, __name__)
    return globals()[name]


def _loaded() -> Any:
    """lightning.pytorch or pytorch_lightning: the one in use, else the first that is installed."""
    for host in sorted(_HOSTS, key=lambda host: host not in sys.modules):
        try:
            return importlib.import_module(host)
        except ImportError:
            continue
    raise ImportError("Lightning is not installed here: pip install 'ritz[lightning]'")
