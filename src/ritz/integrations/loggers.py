"""Loggers of other packages with one method, log(scalars, step). A package is imported when its logger is made.

A run of Weights & Biases or Trackio, or the function mlflow.log_metrics, can be used as a logger directly
(`ritz.loggers`). The adapters here also open a run if none is open, and handle the differences: TensorBoard takes one
number at a time, and Weights & Biases drops a row whose step is before the last one, which happens if a run has two
sources of rows.

    ritz.track(risk, logger=TensorBoard("runs/curvature"))
    ritz.track(risk, logger=[WeightsAndBiases(project="mine"), MLflow()])
"""

import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

STEP = "ritz/step"  # the horizontal axis of our rows in Weights & Biases


class TensorBoard:
    """Scalars for TensorBoard.

    Args:
        target: A folder, or a SummaryWriter.

    Example:
        >>> class Writer:
        ...     def add_scalar(self, name, value, step):
        ...         print(step, name, value)
        >>> TensorBoard(Writer()).log({"loss": 2.0}, 10)
        10 loss 2.0
    """

    def __init__(self, target: str | os.PathLike[str] | Any) -> None:
        self.writer: Any = target
        if hasattr(target, "add_scalar"):
            return
        if not isinstance(target, str | os.PathLike):
            raise TypeError(f"target must be a folder or a SummaryWriter, got {type(target).__name__}")
        writers = _needed("torch.utils.tensorboard", "TensorBoard", "tensorboard")
        self.writer = writers.SummaryWriter(os.fspath(target))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write a row, to disk at once."""
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        if hasattr(self.writer, "flush"):
            self.writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self.writer.close()


class WeightsAndBiases:
    """Rows for a run of Weights & Biases, with their own step axis, so that none is dropped because of its step.

    Args:
        run: A run; None uses the open run, or opens one with `settings`.
        settings: Settings of `wandb.init`.

    Example:
        >>> class Run:
        ...     def define_metric(self, name, step_metric):
        ...         print(name, "over", step_metric)
        ...     def log(self, row):
        ...         print(row)
        >>> WeightsAndBiases(Run()).log({"loss": 2.0}, 10)
        loss over ritz/step
        {'loss': 2.0, 'ritz/step': 10}
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        self.run = _opened("wandb", "Weights & Biases", settings) if run is None else run
        self._known: set[str] = set()

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write a row."""
        for name in scalars:
            if name not in self._known:
                self.run.define_metric(name, step_metric=STEP)
                self._known.add(name)
        self.run.log({**scalars, STEP: step})

    def close(self) -> None:
        """End the run."""
        self.run.finish()


class Trackio:
    """Rows for a run of Trackio.

    Args:
        run: A run; None opens one with `settings`.
        settings: Settings of `trackio.init`; `project` is required.

    Example:
        >>> class Run:
        ...     def log(self, row, step):
        ...         print(step, row)
        >>> Trackio(Run()).log({"loss": 2.0}, 10)
        10 {'loss': 2.0}
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        self.run = _opened("trackio", "Trackio", settings) if run is None else run

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write a row."""
        self.run.log(dict(scalars), step=step)

    def close(self) -> None:
        """End the run."""
        self.run.finish()


class MLflow:
    """Rows for a run of MLflow.

    Args:
        run_id: Id of the run; None uses the run that is active when a row arrives.
        module: A replacement for the package, with `log_metrics` and `end_run`; None imports mlflow.

    Example:
        >>> class Stand:
        ...     def log_metrics(self, row, step, run_id):
        ...         print(step, row)
        >>> MLflow(module=Stand()).log({"loss": 2.0}, 10)
        10 {'loss': 2.0}
    """

    def __init__(self, run_id: str | None = None, *, module: Any = None) -> None:
        self.mlflow = _needed("mlflow", "MLflow", "mlflow") if module is None else module
        self.run_id = run_id

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write a row."""
        self.mlflow.log_metrics(dict(scalars), step=step, run_id=self.run_id)

    def close(self) -> None:
        """End the active run."""
        self.mlflow.end_run()


def _opened(module: str, title: str, settings: Mapping[str, Any]) -> Any:
    """The open run, or a new one."""
    package = _needed(module, title, module)
    current = getattr(package, "run", None)
    if settings or current is None or isinstance(current, ModuleType):  # trackio.run is a module of trackio
        return package.init(**settings)
    return current


def _needed(module: str, title: str, package: str) -> Any:
    """A module of a package that may not be installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{title} is not installed here: pip install {package}") from error
