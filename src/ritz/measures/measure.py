"""`ritz.measure`: all measures of one solution, from shared runs."""

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, overload

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, Saved, as_checkpoint
from ..errors import (
    NonFiniteError,
    NumericalWarning,
    RankError,
    StateError,
    StoppedError,
    UnsupportedError,
    callers_level,
)
from ..estimators.quantities import Spectrum
from ..fingerprints import resumable
from ..results import Estimate, to_digits, told_apart
from ..risk import Risk
from ..storage import Result
from ..tables import Table
from .finished import Known, at_hand, marks
from .outputs import Outputs
from .registry import resolve
from .row import Cost, Measure
from .subject import FORWARD_PASS, HESSIAN_RUN, Settings, Subject, as_vector

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Progress = Callable[[str, float], None]  # (current work, fraction of the whole that is done)

# about how many gradients over the data a run takes; a product is about two
_PRODUCT = 2.0
_FORWARD = 0.4
_COSTS = get_args(Cost)  # from cheap to expensive


@dataclass(frozen=True, eq=False, kw_only=True)
class Measurement(Result, Mapping[str, Estimate]):
    """The measures of one solution: `m["trace"]` is an `Estimate`.

    Attributes:
        estimates: The estimates, by key of the table of measures.
        failures: Why a requested measure is missing, by key.
        readings: A line on how to read each measure.
        conventions: What each is divided by, in short; `m[key].convention` is the full convention.
        layer_names: Parameters and modules of the model.
        model: Which model, with how many parameters.
        convention: Which data and which mode.
        settings: Probes, steps, seed.
        seconds: Time of each shared run.
        spectrum: The spectrum of the Hessian, if it was computed.
        outputs: Outputs for the training data, item by item, if they were computed.
        stop: Why it ended: "completed", or what stopped it; measures missing for this reason are among `failures`.

    Example:
        >>> data = torch.eye(2), torch.tensor([0, 1])
        >>> m = measure(ritz.Risk(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), data), measures=["trace"])
        >>> list(m), m["trace"].exact
        (['trace'], True)
        >>> m["metric_a"]
        Traceback (most recent call last):
        KeyError: 'metric_a was not asked for; there are: trace'
    """

    estimates: Mapping[str, Estimate]
    failures: Mapping[str, str] = field(default_factory=dict)
    readings: Mapping[str, str] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=dict)
    layer_names: tuple[str, ...] = ()
    model: str = ""
    convention: str = ""
    settings: Settings = field(default_factory=Settings)
    seconds: Mapping[str, float] = field(default_factory=dict)
    spectrum: Spectrum | None = None
    outputs: Outputs | None = None
    stop: str = "completed"

    def __getitem__(self, key: str) -> Estimate:
        if key in self.estimates:
            return self.estimates[key]
        why = f"failed: {self.failures[key]}" if key in self.failures else "was not asked for"
        raise KeyError(f"{key} {why}; there are: {', '.join(self.estimates)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.estimates)

    def __len__(self) -> int:
        return len(self.estimates)

    def table(self) -> Table:
        """Value, error, 95 % interval, convention and reading of each measure; below, the failures, by reason."""
        header = ("measure", "value", "95 % interval", "convention", "reading")
        rows = [(key, *_cells(e), self.conventions.get(key, ""), self.reading(key)) for key, e in self.items()]
        reasons: dict[str, list[str]] = {}
        for key, why in self.failures.items():
            reasons.setdefault(why, []).append(key)
        notes = [f"not measured: {', '.join(keys)}: {why}" for why, keys in reasons.items()]
        notes += [] if self.stop == "completed" else [self.stop]
        ended = "complete" if self.spectrum is None else self.spectrum.stop
        notes += [] if ended.startswith("complete") else [f"the Lanczos run: {ended}"]
        return Table(header, rows, title=f"{self.model}; {self.convention}", notes=notes, numeric=(1, 2))

    def reading(self, key: str) -> str:
        """How to read a measure, and how its run ended if that was unusual."""
        stop = self[key].stop
        usual = stop.startswith("complete") or stop == getattr(self.spectrum, "stop", None)
        return "; ".join(part for part in (self.readings.get(key, ""), "" if usual else stop) if part)

    def layers(self, measures: Sequence[str] | None = None) -> Table:
        """The values for each parameter or layer, of some measures or of all that have such values."""
        names = list(self if measures is None else measures)
        parts = {key: {n: e for n, e in self[key].parts.items() if n in self.layer_names} for key in names}
        split = {key: known for key, known in parts.items() if known}
        layers = [name for name in self.layer_names if any(name in known for known in split.values())]
        rows = [(name, *(_short(known[name]) if name in known else "" for known in split.values())) for name in layers]
        return Table(("layer", *split), rows, title=self.model, numeric=range(1, len(split) + 1))

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page: the measures, the spectrum, the margins; see `ritz.report`."""
        from ..report import build

        return build(self).write(path)

    @overload
    def plot(self, ax: None = None) -> "Figure": ...
    @overload
    def plot(self, ax: "Axes") -> "Axes": ...
    def plot(self, ax: "Axes | None" = None) -> "Figure | Axes":
        """The spectral density and the distribution of margins, if measured; a given ax shows the first of them."""
        from ..report.figures import row_of_axes
        from .margins import margin_distribution

        panels: list[Callable[..., Any]] = [] if self.spectrum is None else [self.spectrum.plot]
        if self.outputs is not None:
            with contextlib.suppress(UnsupportedError, NonFiniteError):  # no margins, or none of single items
                panels.append(margin_distribution(self.outputs).plot)
        if not panels:
            raise ValueError("there is nothing to draw: neither the spectrum of the Hessian nor margins were measured")
        if ax is not None:
            panels[0](ax)
            return ax
        figure, axes = row_of_axes(len(panels))
        for draw, panel in zip(panels, axes, strict=True):
            draw(panel)
        return figure


def measure(
    risk: Risk,
    test: Any = None,
    init: Mapping[str, Tensor] | Tensor | None = None,
    *,
    measures: str | Sequence[str | Measure] = "standard",
    num_steps: int = 100,
    num_probes: int = 8,
    seed: int = 0,
    sigma: float = 1.0,
    progress: Progress | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Measurement:
    """Generalisation measures of a solution, each with its error bar, convention and reading.

    The standard set needs one Krylov run on the Hessian and one forward pass. `measures="all"` adds those of the
    Gauss-Newton matrix, those of each layer, and those that search over weights; an estimate of the time is given
    first. A measure that fails does not stop the others: `failures` gives the reason.

    Args:
        risk: The solution on its training data.
        test: Test data, or a risk of the same solution on it; needed for the gaps.
        init: The initial weights of training: named tensors, a state dict or a flat vector.
        measures: "standard", "all", or a list of keys of `ritz.measures.MEASURES` and of your own `Measure`s, in which
            "standard" stands for its measures.
        num_steps, num_probes, seed: Settings of the spectrum; see `ritz.spectrum`.
        sigma: Standard deviation of the prior of the Laplace measures.
        progress: Called with (current work, fraction done); the first call has the expected time.
        checkpoint: A folder, or a `ritz.Checkpoint`, for finished measures and the state of the runs. After a kill, the
            same call resumes, and on a CPU the result is bitwise the same.

    Raises:
        ValueError: If an argument is wrong, before any work is done, or the checkpoint is that of another call.
        NonFiniteError: If the weights or losses are not finite.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> X, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
        >>> m = ritz.measure(ritz.Risk(model, torch.nn.MSELoss(), (X, y)), test=(X, y + 1))
        >>> m["trace"].value, m["lambda_max"].value, m["train_loss"].value, m["gap_loss"].value  # H = diag(1, 4)
        (5.0, 4.0, 22.5, -8.0)
        >>> m.failures["margin_q10"]
        'this needs classes and labels, which this risk does not have'
    """
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    rows = resolve(measures)
    settings = Settings(num_steps=num_steps, num_probes=num_probes, seed=seed, sigma=sigma)
    start = None if init is None else as_vector(risk, init)
    kept = as_checkpoint(checkpoint)
    subject = Subject(risk, on_test(risk, test), start, settings, checkpoint=kept)
    risk.check()
    _check_test(subject.test)
    if start is not None and torch.equal(start, subject.weights):
        warnings.warn(
            "init is the same as the weights: if it is meant to be the start of training, clone it before training",
            NumericalWarning,
            stacklevel=callers_level(),
        )
    with resumable(kept, risk, "measure", asdict(settings), **marks(subject, rows)) as saved:
        if saved.result is not None:
            return saved.result  # type: ignore[no-any-return]
        found = _measured(subject, rows, saved, progress)
        if found.stop == "completed":
            saved.finish(found)
            subject.forget()
    return found


def _measured(subject: Subject, rows: Sequence[Measure], saved: Saved, progress: Progress | None) -> Measurement:
    """The rows one by one, cheap ones first, except those that were finished before a kill."""
    clock = _Clock(subject, rows, progress, saved.wish)
    known = Known.of(saved.latest)
    after: dict[str, Estimate | str] = {}  # the results of the rest when a stop was requested
    stop = saved.wish()
    for row in sorted(rows, key=lambda row: _COSTS.index(row.cost)):
        clock.start(row)
        if row.key not in known.found:
            outcome = stop if stop and not at_hand(row, subject) else _computed(row, subject)
            stop = stop or saved.wish()
            (after if stop else known.found)[row.key] = outcome
        known.add(subject)
        stop = saved.offer(known.state) or stop
    if not stop:
        known.complete(subject, rows)
    clock.done()
    found = {row.key: {**known.found, **after}[row.key] for row in rows}
    estimates = {key: outcome for key, outcome in found.items() if isinstance(outcome, Estimate)}
    named = {row.key: row for row in rows if row.key in estimates}
    risk = subject.risk
    return Measurement(
        estimates=estimates, failures={key: outcome for key, outcome in found.items() if isinstance(outcome, str)},
        readings={key: row.reading for key, row in named.items()},
        conventions={key: row.convention for key, row in named.items()}, layer_names=_layer_names(risk),
        model=f"{type(risk.model).__name__}, {risk.dim:,} parameters", convention=risk.convention(),
        settings=subject.settings, seconds={**known.seconds, **subject.seconds}, spectrum=subject.peek(HESSIAN_RUN),
        outputs=subject.peek(FORWARD_PASS), stop=stop or "completed",
    )  # fmt: skip


def _computed(row: Measure, subject: Subject) -> Estimate | str:
    """One measure, or why there is none: an error in one measure does not stop the others."""
    given = {"test": subject.test, "init": subject.init}
    if absent := [name for name in sorted(row.needs) if given[name] is None]:
        return f"needs {' and '.join(f'{name}=' for name in absent)}"
    try:
        searches = row.cost == "search" and row.gradients > 0
        found = subject.searched(row.key, lambda: row.compute(subject)) if searches else row.compute(subject)
        if not isinstance(found, Estimate):
            raise TypeError(f"compute must return a ritz.Estimate, got {type(found).__name__}")
        values = torch.as_tensor(found.value)
        if not bool(values.isfinite().any()):
            what = f"the value is {float(values.flatten()[0]) if values.numel() else 'empty'}"
            return what if found.stop.startswith("complete") else f"{what}: {found.stop}"
        text = found.convention or f"{row.convention}; {subject.risk.convention()}"
        return replace(found, convention=text)
    except (StateError, RankError, BlockingIOError):  # these concern the whole run: another process may have its folder
        raise
    except (ValueError, UnsupportedError, NonFiniteError) as error:  # the messages of ritz are clear without the type
        return str(error) or type(error).__name__
    except StoppedError as error:
        return str(error).partition(";")[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _layer_names(risk: Risk) -> tuple[str, ...]:
    """The names that parts of a measure can have: parameters and modules."""
    modules = (name for name, _ in risk.model.named_modules() if name)
    return ("input", *dict.fromkeys([*risk.names, *modules, "root"]))


def _check_test(test: Risk | None) -> None:
    if test is None:
        return
    try:
        test.check()
    except ValueError as error:
        raise ValueError(f"the test data: {error}") from error


def on_test(risk: Risk, test: Any) -> Risk | None:
    """The same solution on test data, which are given as data or as a risk.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(2, 1), torch.ones(2, 1)))
        >>> on_test(risk, (torch.ones(5, 1), torch.ones(5, 1))).num_samples
        5
    """
    if test is None or not isinstance(test, Risk):
        return None if test is None else risk.on(test)
    ours, theirs = risk.state(), test.state()  # frozen parameters and buffers are part of the solution too
    same = ours.keys() == theirs.keys() and all(
        p.shape == theirs[name].shape and torch.equal(p, theirs[name].to(p)) for name, p in ours.items()
    )
    if not same:
        raise ValueError("test= is a risk at other weights than risk; give test data, or risk.on(test_data)")
    return test


class _Clock:
    """Reports the current work and progress, by the expected cost of each row in gradients over the data.

    `wish` is the reason of a requested stop, or "", the same on all ranks.
    """

    def __init__(
        self, subject: Subject, rows: Sequence[Measure], progress: Progress | None, wish: Callable[[], str]
    ) -> None:
        self.progress, self.wish = progress, wish
        s = subject.settings
        run = _PRODUCT * (s.num_probes * s.num_steps + 100)
        first: set[str] = set()
        self.costs: dict[str, float] = {}
        for row in rows:
            shared = {"forward": _FORWARD, "Hessian": run, "GGN": run}.get(row.cost, 0.0)
            self.costs[row.key] = row.gradients + (shared if row.cost not in first else 0.0)
            first.add(row.cost)
        self.total = sum(self.costs.values()) or 1.0
        self.before, self.current, self.shown = 0.0, "", 0.0
        subject.tell, subject.report = self.within, self.checked
        if progress is not None:
            progress(f"{len(rows)} measure{'s' * (len(rows) != 1)}{self._expected(subject.risk)}", 0.0)

    def _expected(self, risk: Risk) -> str:
        """The expected time, from that of one gradient; empty if there is no gradient, which a measure will report."""
        begin = time.perf_counter()
        try:
            risk.gradient()
        except RankError:
            raise
        except Exception:
            return ""
        return f", about {duration((time.perf_counter() - begin) * self.total)}"

    def start(self, row: Measure) -> None:
        self.before += self.costs.get(self.current, 0.0)
        self.current = row.key
        self.within(0, 1)

    def within(self, done: int, total: int) -> None:
        part = (self.before + self.costs[self.current] * min(done / max(total, 1), 1.0)) / self.total
        self.shown = max(self.shown, part)  # a run inside another starts again at 0
        if self.progress is not None:
            self.progress(self.current, self.shown)

    def checked(self, done: int, total: int) -> None:
        """A progress function for runs without a stop of their own: it raises to stop them."""
        if wish := self.wish():
            raise StoppedError(wish)
        self.within(done, total)

    def done(self) -> None:
        if self.progress is not None:
            self.progress("done", 1.0)


def duration(seconds: float) -> str:
    """A time with a unit.

    Example:
        >>> duration(0.2), duration(75), duration(7300)
        ('1 s', '75 s', '2.0 h')
    """
    if seconds < 120:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _short(estimate: Estimate) -> str:
    return estimate.shown() if estimate.many else f"{float(estimate.value):.4g}"


def _cells(estimate: Estimate) -> tuple[str, str]:
    """The value with its error, and the interval with as many digits as its width needs."""
    if estimate.many:
        return estimate.shown(), "exact" if estimate.exact else "one for each"
    low, high = (float(end) for end in estimate.interval())
    if low == high:
        return estimate.shown(), "exact"
    if math.isnan(low) or math.isnan(high):
        return estimate.shown(), "not known"
    digits = told_apart(low, high)
    return estimate.shown(), f"{to_digits(low, digits)} to {to_digits(high, digits)}"
