"""Curvature along a training loop, for a bounded share of its time."""

import logging
import math
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import NumericalWarning, RitzError, callers_level
from ..loggers import Fanout, Logger, LoggerLike, Memory, as_logger
from ..measures.measure import Measurement, measure
from ..measures.registry import resolve
from ..measures.row import Measure
from ..measures.subject import Settings
from ..results import Estimate, new_axes, show
from ..risk import Risk
from ..storage import save
from ..tables import Table
from .forecast import forecast
from .ranks import at_first, meet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measures = str | Sequence[str | Measure]

DEFAULT = ("train_loss", "lambda_max", "lambda_min", "trace")  # one run on the Hessian and one forward pass
FORMAT = 1  # of the saved state

log = logging.getLogger(__name__)
clock = time.perf_counter


def track(
    risk: Risk,
    every: int = 100,
    *,
    measures: Measures = DEFAULT,
    logger: LoggerLike | None = None,
    budget: float = 0.05,
    test: Any = None,
    init: Mapping[str, Tensor] | Tensor | None = None,
    num_steps: int = 10,
    num_probes: int = 4,
    seed: int = 0,
    layers: bool = False,
) -> "Tracker":
    """Curvature along any training loop; nothing of the loop, the model or its generators changes.

        with ritz.track(risk, every=100, logger=wandb.run) as tracker:
            for batch in loader:
                ...
                optimizer.step()
                tracker.step()
        print(tracker.table())

    Every `every` steps, the measures are computed at the current weights (a "look"), if this keeps the total time of
    looks within `budget` of the time since the start. Otherwise the look is skipped and counted, and `table` reports
    it. The time of the first look is forecast from a few products on one batch: on a CPU, forecasts were 0.74 to 1.42
    times the time of a look at curvature, and 1.01 to 3.88 times that of a search (`benchmarks/results/forecast.json`).
    All looks share probes, so that differences during training are not differences of the probes.

    Each look sends a row of numbers to the logger: `curvature/hessian/NAME` for results of the Hessian,
    `curvature/ggn/NAME` for the Gauss-Newton matrix, `measures/NAME` for the rest. NAME/stderr is the standard error, 0
    if nothing was sampled. `track/seconds`, `track/products`, `track/share` and `track/skipped` report the cost. If a
    logger fails, a warning names it once; training continues, and the row is in `tracker.record`.

    A look takes about 140 products with the Hessian, each of which costs two to three gradients over the data of the
    risk. Use a fixed part of the training data to keep this small: some batches, and more of them if the curvature of a
    batch is noisy (`ritz.curvature_noise`).

    Ranks that train together (`torchrun`, DDP) call it in step and share each look: each processes its part of the
    data, at the common weights and with the running statistics of the first rank. The clock of the first rank counts
    for the budget. All ranks have the rows; the first writes them to the logger.

    Args:
        risk: The risk to measure: the model being trained, its loss, and data without augmentation.
        every: Steps between two looks.
        measures: "standard", "all", or a list of keys of `ritz.measures.MEASURES` and of your own `Measure`s.
        logger: Anything that `ritz.loggers.as_logger` accepts; rows are also stored in `tracker.record`.
        budget: The largest share of the time, above 0; 1 for no limit.
        test, init: As in `ritz.measure`, for measures that need them.
        num_steps, num_probes, seed: Settings of the spectrum, as in `ritz.spectrum`.
        layers: Also log the per-parameter results: `curvature/hessian/trace/NAME`.

    Raises:
        ValueError: If an argument is wrong, before any work is done.
        NonFiniteError: On entering, if the weights or losses are not finite.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> X, y = torch.diag(torch.tensor([1.0, 2.0])), torch.zeros(2, 1)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (X, y))  # H = diag(1, 4), wherever the weights are
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with track(risk, every=2, budget=1.0) as tracker:
        ...     for _ in range(4):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(X), y).backward()
        ...         optimizer.step()
        ...         _ = tracker.step()
        >>> tracker.record.column("curvature/hessian/lambda_max")
        ([2, 4], [4.0, 4.0])
    """
    return Tracker(
        risk, every, measures=measures, logger=logger, budget=budget, test=test, init=init, num_steps=num_steps,
        num_probes=num_probes, seed=seed, layers=layers,
    )  # fmt: skip


class Tracker:
    """The context manager returned by `ritz.track`: it counts steps, measures, and stores the results.

    Attributes:
        record: All rows, as a `ritz.loggers.Memory`; `ritz.report.build(tracker.record)` makes a page from it.
        last: The `Measurement` of the last look, with brackets and conventions.
        count: Number of steps so far.
        skipped: Number of looks that were skipped because they would have exceeded the budget.
        failures: Why a look failed, by step.

    Example:
        >>> data = torch.eye(2), torch.zeros(2, 1)
        >>> risk = ritz.Risk(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), data)
        >>> tracker = Tracker(risk, measures=["trace"])
        >>> tracker.look()["trace"].value
        2.0
        >>> Tracker(risk, budget=0.0)
        Traceback (most recent call last):
        ValueError: budget, a share of the time, must be above 0 and at most 1, got 0.0
    """

    def __init__(
        self,
        risk: Risk,
        every: int = 100,
        *,
        measures: Measures = DEFAULT,
        logger: LoggerLike | None = None,
        budget: float = 0.05,
        test: Any = None,
        init: Mapping[str, Tensor] | Tensor | None = None,
        num_steps: int = 10,
        num_probes: int = 4,
        seed: int = 0,
        layers: bool = False,
    ) -> None:
        if not isinstance(risk, Risk):
            raise TypeError(f"risk must be a ritz.Risk, got {type(risk).__name__}")
        self.rows = check(every=every, budget=budget, measures=measures)
        Settings(num_steps=num_steps, num_probes=num_probes, seed=seed)  # refuses what is out of range
        self.risk, self.every, self.budget, self.layers = risk, every, budget, layers
        self.test, self.init = test, init
        self.settings: dict[str, int] = {"num_steps": num_steps, "num_probes": num_probes, "seed": seed}
        self.logger = None if logger is None else as_logger(logger)
        if risk.world.rank:
            self.logger = None
        self.record = Memory()
        self.last: Measurement | None = None
        self.count, self.skipped, self.failures = 0, 0, dict[int, str]()
        self._failed = list[Logger]()  # loggers that raised an error
        self.spent = 0.0  # seconds of all looks
        self._expected: float | None = None  # seconds of a look: of the last one, or a forecast before the first
        self._before, self._begun = 0.0, None  # type: float, float | None

    # ------------------------------------------------------------------------------------------ the clock

    @property
    def elapsed(self) -> float:
        """Seconds of training since the start, including looks and, in a resumed run, its earlier parts."""
        return self._before + (0.0 if self._begun is None else clock() - self._begun)

    @property
    def share(self) -> float:
        """The share of the time that looks took."""
        return self.spent / self.elapsed if self.elapsed else 0.0

    def start(self) -> "Tracker":
        """Check the risk, and start the clock, as `with` does."""
        meet(self.risk.world)
        at_first(self.risk)[0].check()
        self._begun = clock() if self._begun is None else self._begun
        return self

    def stop(self) -> None:
        """Stop the clock, as leaving `with` does; `start` continues it."""
        self._before, self._begun = self.elapsed, None
        for note in self._notes():
            log.info("%s", note)
        if self.skipped and not self.record.rows:
            warnings.warn(f"there was no look: {self._notes()[1]}", NumericalWarning, stacklevel=callers_level())

    def __enter__(self) -> "Tracker":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------ looking

    def step(self, step: int | None = None) -> Measurement | None:
        """To be called after each step of the optimiser; returns the measurement if there was a look.

        Args:
            step: The number of the step, if the loop has its own; a repeated number does not count.
        """
        self._begun = clock() if self._begun is None else self._begun
        before, self.count = self.count, self.count + 1 if step is None else int(step)
        due = self.count // self.every > before // self.every  # a trainer with two optimisers counts two at a time
        return self.offer() if due else None

    def offer(self) -> Measurement | None:
        """Look now if the budget allows it; if the look fails, `failures` gets the reason, and training continues."""
        self._begun = clock() if self._begun is None else self._begun
        try:
            meet(self.risk.world)
            if self._affordable():
                return self.look()
        except (RitzError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            if reason not in self.failures.values():
                warnings.warn(
                    f"the look at step {self.count} failed: {reason}", NumericalWarning, stacklevel=callers_level()
                )
            self.failures[self.count] = reason
            return None
        self.skipped += 1
        log.info("no look at step %d: it would take about %s, over the budget", self.count, _seconds(self._expected))
        return None

    def _affordable(self) -> bool:
        """Whether a look keeps within the budget. Before the first look its cost is forecast, which also takes time."""
        if self.budget == 1:
            return True
        if self._expected is None:
            self._wait()
            begin = clock()
            risk, _ = at_first(self.risk)
            self._expected = forecast(risk, self.rows, self.settings["num_steps"], self.settings["num_probes"])
            self.spent += clock() - begin
        # ranks that train together decide by the clock of the first
        return self.risk.world.first(self.spent + self._expected <= self.budget * (self.elapsed + self._expected))

    def look(self) -> Measurement:
        """Measure now, regardless of the budget, to which the time is charged.

        Raises:
            RitzError: If the network has diverged, or none of the measures can be computed for it.
        """
        meet(self.risk.world)
        self._wait()
        begin = clock()
        try:
            risk, test = at_first(self.risk, self.test)
            found = measure(risk, test, self.init, measures=self.rows, **self.settings)  # type: ignore[arg-type]
            self._wait()
        finally:
            seconds = clock() - begin
            self.spent += seconds
            self._expected = seconds
        if not found.estimates:
            raise RitzError("; ".join(dict.fromkeys(found.failures.values())))
        self.last = found
        seconds, share = self.risk.world.first((seconds, self.share))
        row = self._row(found) | {"track/seconds": seconds, "track/share": share}
        row["track/skipped"] = float(self.skipped)
        self.record.log(row, self.count)
        self._tell(row)
        return found

    def _tell(self, row: dict[str, float]) -> None:
        """Send a row to each logger. A logger that fails is named in a warning once; all else continues."""
        for logger in _single(self.logger):
            try:
                logger.log(dict(row), self.count)
            except Exception as error:  # whatever another package raises
                if any(logger is known for known in self._failed):
                    continue
                self._failed.append(logger)
                why = " ".join(f"{type(error).__name__}: {error}".split())
                warnings.warn(
                    f"the logger {_title(logger)} failed at the row of step {self.count}, which is in "
                    f"tracker.record: {why}; its further failures are not reported",
                    NumericalWarning,
                    stacklevel=callers_level(),
                )

    def _wait(self) -> None:
        """Wait for the GPU's pending work, so that it does not count as time of a look."""
        if self.risk.device.type == "cuda":
            torch.cuda.synchronize(self.risk.device)

    def _row(self, found: Measurement) -> dict[str, float]:
        """Plain numbers by name."""
        row: dict[str, float] = {}
        for measured in self.rows:
            estimate = found.estimates.get(measured.key)
            if estimate is None or estimate.many:
                continue
            name = _name(measured)
            row |= _pair(name, estimate)
            if self.layers:
                for part in self.risk.names:
                    row |= _pair(f"{name}/{part}", estimate.parts[part]) if part in estimate.parts else {}
        return row | {"track/products": float(max(e.products for e in found.values()))}

    # ------------------------------------------------------------------------------------------ results

    @property
    def names(self) -> list[str]:
        """Names of all measured numbers, without errors and costs."""
        return [name for name in self.record.names if not name.startswith("track/") and not name.endswith("/stderr")]

    def table(self, *names: str) -> Table:
        """All measured numbers, or those named, with errors: one row for each look, and notes on the cost."""
        columns = names or tuple(self.names)
        for name in columns:
            self.record.column(name)  # raises an error for an unknown name
        cells = [(str(row["step"]), *(_cell(row, name) for name in columns)) for row in self.record.rows]
        short = [name.removeprefix("curvature/").removeprefix("measures/") for name in columns]
        return Table(("step", *short), cells, notes=self._notes(), numeric=range(len(columns) + 1))

    def _notes(self) -> list[str]:
        """The cost of the looks, and which looks were left out."""
        looks, ranks = len(self.record.rows), self.risk.world.size
        notes = [f"{looks} look{'s' * (looks != 1)} took {_seconds(self.spent)}, {self.share:.1%} of the time"]
        notes[0] += f"; each was shared by {ranks} processes, over all {self.risk.num_samples} samples" * (ranks > 1)
        if self.skipped:
            notes.append(
                f"{self.skipped} {'more' if looks else 'looks'} were due and left out: with about "
                f"{_seconds(self._expected or 0)} each they would have exceeded the budget, {self.budget:.3g} of the "
                "time; give the risk fewer samples or raise the budget"
            )
        return notes + [f"the look at step {step} failed: {reason}" for step, reason in self.failures.items()]

    def plot(self, *names: str, ax: "Axes | None" = None) -> "Axes":
        """Numbers along the steps with bands of two standard errors: those of the curvature, or those named."""
        chosen = names or [name for name in self.names if name.startswith("curvature/")] or self.names
        ax = ax or new_axes()
        for name in chosen:
            steps, values = self.record.column(name)
            (line,) = ax.plot(steps, values, marker="o", markersize=3, label=name)
            errors = [row.get(f"{name}/stderr", 0.0) for row in self.record.rows if name in row]
            if any(errors):
                low, high = ([v + side * 2 * e for v, e in zip(values, errors, strict=True)] for side in (-1, 1))
                ax.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        ax.set(xlabel="step")
        ax.legend()
        return ax

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain numbers."""
        return {
            "format": FORMAT, "count": self.count, "skipped": self.skipped, "failures": dict(self.failures),
            "elapsed": self.elapsed, "spent": self.spent, "expected": self._expected,
            "rows": [dict(row) for row in self.record.rows],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; the time in between does not count."""
        if state.get("format") != FORMAT:
            raise ValueError(
                f"the state of a tracker must have format {FORMAT}, got {state.get('format')!r}; use the version "
                "of ritz that saved it"
            )
        self.count, self.skipped = state["count"], state["skipped"]
        self.failures = {int(step): reason for step, reason in state["failures"].items()}
        self.spent, self._expected = state["spent"], state["expected"]
        self._before, self._begun = state["elapsed"], None if self._begun is None else clock()
        self.record.rows[:] = [dict(row) for row in state["rows"]]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the state to `path`.json; `tracker.load_state_dict(ritz.load(path))` continues from it."""
        return save(self.state_dict(), path)


def check(*, every: int, budget: float, measures: Measures) -> list[Measure]:
    """The measures by their keys, after checking all three arguments.

    Example:
        >>> [row.key for row in check(every=1, budget=0.05, measures=["trace"])]
        ['trace']
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be at least 1 step, got {every!r}")
    if not 0 < budget <= 1:
        raise ValueError(f"budget, a share of the time, must be above 0 and at most 1, got {budget}")
    return resolve(measures)


def _name(row: Measure) -> str:
    """The name of a measure's numbers in the log."""
    if row.cost == "Hessian":
        return f"curvature/hessian/{row.key}"
    if row.cost == "GGN" or row.key.startswith("ggn_"):
        return f"curvature/ggn/{row.key.removeprefix('ggn_')}"
    return f"measures/{row.key}"


def _pair(name: str, estimate: Estimate) -> dict[str, float]:
    """A value, and its error if that is known."""
    stderr = float(torch.as_tensor(estimate.stderr))
    return {name: float(estimate.value)} | ({} if math.isnan(stderr) else {f"{name}/stderr": stderr})


def _single(logger: Logger | None) -> list[Logger]:
    """All single loggers in a nested list of them."""
    if isinstance(logger, Fanout):
        return [one for part in logger.loggers for one in _single(part)]
    return [] if logger is None else [logger]


def _title(logger: Logger) -> str:
    """The name of a logger function, or of the logger's class."""
    function = getattr(logger, "function", logger)
    return str(getattr(function, "__qualname__", type(function).__name__))


def _seconds(time: float | None) -> str:
    return f"{time or 0.0:,.0f} s" if time and time >= 100 else f"{time or 0.0:.2g} s"


def _cell(row: Mapping[str, float], name: str) -> str:
    return show(row[name], row.get(f"{name}/stderr", 0.0)).replace("+-", "±") if name in row else ""
