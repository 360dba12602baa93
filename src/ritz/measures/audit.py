"""`ritz.audit`: which measures change when the function does not.

A network is moved to other weights with which it computes the same function, or predicts the same labels, and is
measured again. A measure of generalisation that changes says something about the weights and not about the function:
this is "flatness is a false friend" (seed 000, after Dinh et al. 2017) on your own network.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..checkpoint import Checkpoint, Saved, as_checkpoint
from ..errors import StoppedError, UnsupportedError
from ..estimators.quantities import Spectrum
from ..fingerprints import resumable
from ..intervals import Exact
from ..results import Estimate
from ..risk import Risk
from ..storage import Result, equal
from ..tables import Table
from .differences import as_found, difference
from .elsewhere import TURNING, Shares, places_of, short_run, steps_elsewhere, tolerance, turning, with_spectrum
from .finished import marks
from .measure import Measurement, Progress, measure, on_test
from .registry import MEASURES, resolve
from .row import Measure
from .subject import Settings, Subject, as_vector
from .transforms import TRANSFORMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Verdict = Literal["moved", "unchanged", "cannot tell"]

TOLERANCE = 0.01  # a measure that has changed by less than this, relative to its size, is called unchanged
# a loss or norm further off is that of something else: relative, and for losses that are all round-off absolute
_ALIKE, _ROUNDED = 1e-3, 1e-5


@dataclass(frozen=True, eq=False)
class Shift:
    """One measure before and after one transform.

    Example:
        >>> before, after = (Estimate(name="trace", value=value, exact=True) for value in (2.0, 8.0))
        >>> shift = Shift("trace", "rescale", before, after)
        >>> shift.factor, shift.verdict, str(shift)
        (4.0, 'moved', '×4')
    """

    key: str
    transform: str
    before: Estimate
    after: Estimate

    @property
    def factor(self) -> float:
        """The value after divided by the value before; NaN if both are 0."""
        a, b = float(self.before.value), float(self.after.value)
        return b / a if a else math.nan if b == 0 else math.copysign(math.inf, b)

    @property
    def verdict(self) -> Verdict:
        """Whether it moved by more than 1 % of its size and its error bar, stayed within 1 %, or neither is known.

        A search that finds the same value counts as unchanged, however much it may have missed. So does a value that
        comes from the same run before and after.
        """
        if _same_run(self.before, self.after):
            return "unchanged"
        size = max(abs(float(self.before.value)), abs(float(self.after.value)))
        change = difference(self.before, self.after)
        low, high = (float(end) for end in change.interval())
        if (abs(float(change.value)) if change.exact else max(-low, high)) <= TOLERANCE * size:
            return "unchanged"
        return "moved" if low > TOLERANCE * size or high < -TOLERANCE * size else "cannot tell"

    def __str__(self) -> str:
        if self.verdict != "moved":
            return "=" if self.verdict == "unchanged" else "?"
        if not math.isfinite(self.factor) or self.factor <= 0:
            return f"{float(self.before.value):.3g} → {float(self.after.value):.3g}"
        return f"×{self.factor:.3g}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Audit(Result):
    """Measures of one network, and of the same network at other weights.

    Attributes:
        before: The measurement of the network as given.
        after: The measurement after each transform, by name.
        refused: Why a transform does not apply, by name.
        strength: The factor of the rescalings.
        turned: Transforms after which the Hessian was found to be the same matrix in another order, with the relative
            error of that: the run from before then also serves after.
    """

    before: Measurement
    after: Mapping[str, Measurement]
    refused: Mapping[str, str] = field(default_factory=dict)
    strength: float = 0.0
    turned: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def shifts(self) -> dict[tuple[str, str], Shift]:
        """By (measure, transform), if it could be measured before and after; gaps are those on these test data."""
        return {
            (key, name): Shift(key, name, *(_on_this_data(key, e) for e in (estimate, found[key])))
            for name, found in self.after.items()
            for key, estimate in self.before.items()
            if key in found and not (estimate.many or found[key].many)
        }

    def moved(self, transform: str) -> list[str]:
        """The measures that moved under a transform."""
        return [key for (key, name), shift in self.shifts.items() if name == transform and shift.verdict == "moved"]

    def table(self) -> Table:
        """One row for each measure: its value, and what each transform did to it."""
        shifts = self.shifts
        rows = [
            (key, e.shown(), *(str(shifts[key, name]) if (key, name) in shifts else "-" for name in self.after))
            for key, e in self.before.items()
        ]
        kept = [f"{name}: {TRANSFORMS[name].text}; {self._same(name)}" for name in self.after]
        not_done = [f"{name}: not done, {why}" for name, why in self.refused.items()]
        signs = f"×c changed by that factor; = within {TOLERANCE:.0%}; ? unknown within the error bar; - not measured"
        title = f"{self.before.model}: what moves when the function does not (factor {self.strength:g})"
        return Table(
            ("measure", "as it is", *self.after), rows, title=title, notes=(*kept, *not_done, signs),
            numeric=range(1, len(self.after) + 2),
        )  # fmt: skip

    def _same(self, name: str) -> str:
        """What a transform leaves unchanged: the function or the prediction."""
        text = f"the {TRANSFORMS[name].keeps} is the same"
        if name not in self.turned:
            return text
        return f"{text}, and so is the spectrum: H is in another order, to {self.turned[name]:.0e} on random vectors"

    def findings(self) -> list[str]:
        """The result in words, one sentence for each transform."""
        lines = []
        for name in self.after:
            shifts = [shift for (_, transform), shift in self.shifts.items() if transform == name]
            moved = [shift for shift in shifts if shift.verdict == "moved"]
            most = sorted(moved, key=lambda shift: -abs(math.log(abs(shift.factor) or 1e-300)))[:3]
            shown = f", most of all {', '.join(f'{shift.key} ({shift})' for shift in most)}" if most else ""
            lines.append(
                f"{name}: the {TRANSFORMS[name].keeps} is the same, and {len(moved)} of {len(shifts)} measures "
                f"moved{shown}."
            )
        return lines

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """How far each measure moved: the logarithm of its factor, with a marker for each transform."""
        from ..report.figures import row_of_axes

        keys = [key for key in self.before if any((key, name) in self.shifts for name in self.after)][::-1]
        if ax is None:
            ax = row_of_axes(1, width=7.0, height=1.5 + 0.22 * len(keys))[1][0]
        for place, name in enumerate(self.after):
            offset = 0.16 * (place - (len(self.after) - 1) / 2)
            shown = [s for (_, transform), s in self.shifts.items() if transform == name and 0 < s.factor < math.inf]
            for known in (True, False):  # hollow if the error bars do not decide
                some = [s for s in shown if (s.verdict != "cannot tell") == known]
                ax.plot(
                    [math.log10(s.factor) for s in some], [keys.index(s.key) + offset for s in some],
                    "os^Dv"[place % 5], color=f"C{place}", mfc=None if known else "none", ms=5,
                    label=name if known else None,
                )  # fmt: skip
        ax.axvline(0.0, color="0.6", lw=1, zorder=0)
        ax.set(xlabel="log10 (after / before)", yticks=range(len(keys)), ylim=(-0.7, len(keys) - 0.3))
        ax.set_yticklabels(keys)
        ax.grid(axis="y", alpha=0.3)
        ax.legend(loc="best", fontsize="small")
        return ax

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page: what moved, and by how much; see `ritz.report`."""
        from ..report import build

        return build(self).write(path)

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *self.findings()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table().to_html()


def _same_run(before: Estimate, after: Estimate) -> bool:
    """Whether both are equal bit by bit, including error bars, so come from one run: two runs differ by round-off."""
    return all(
        equal(getattr(before, name), getattr(after, name)) for name in ("value", "stderr", "samples", "bracket", "seed")
    )


def _on_this_data(key: str, estimate: Estimate) -> Estimate:
    """A gap on these test data, which are the same before and after, not as an estimate for all data."""
    of_sample = key in MEASURES and MEASURES[key].family == "gap"
    return replace(estimate, stderr=0.0, samples=None, rule=Exact(), exact=True) if of_sample else as_found(estimate)


def audit(
    risk: Risk,
    test: Any = None,
    init: Mapping[str, Tensor] | Tensor | None = None,
    *,
    measures: str | Sequence[str | Measure] = "standard",
    transforms: str | Sequence[str] | None = None,
    strength: float = 4.0,
    num_steps: int = 100,
    num_probes: int = 8,
    seed: int = 0,
    before: Measurement | None = None,
    progress: Progress | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Audit:
    """Shows which measures change when the function of this network does not.

    Each transform of `ritz.transforms` that applies to the network is applied. The function, or the prediction, is
    checked to be unchanged, and everything is measured again with the same probes. This computes no more than the
    verdicts need: see `ritz.measures.elsewhere`.

    Args:
        risk: The solution.
        test: Test data, for the gaps; see `ritz.measure`.
        init: The initial weights of training; see `ritz.measure`.
        measures: See `ritz.measure`.
        transforms: Names of `ritz.transforms.TRANSFORMS`; all that apply by default.
        strength: The factor c or alpha of the rescalings; a permutation has none.
        num_steps, num_probes, seed: Settings of the spectrum.
        before: The result of `ritz.measure` for the same risk, test data, initial weights and settings, which is then
            not measured again.
        progress: See `ritz.measure`.
        checkpoint: A folder, or a `ritz.Checkpoint`, in which each measurement is saved separately; see `ritz.measure`.

    Raises:
        ValueError: For an unknown transform, a strength that is 1 or not positive, a `before` that does not fit, or the
            checkpoint of another call.
        UnsupportedError: If no transform applies.
        StoppedError: If the run is stopped (`ritz.stoppable`) before everything is measured.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.eye(2), torch.tensor([0, 1])))
        >>> found = ritz.audit(risk, measures=["train_loss", "weight_norm"], transforms=["rescale"])
        >>> found.moved("rescale"), found.shifts["train_loss", "rescale"].verdict
        (['weight_norm'], 'unchanged')
    """
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    names = _named(transforms)
    if not (math.isfinite(strength) and strength > 0) or strength == 1:
        raise ValueError(f"strength must be positive and not 1, got {strength}")
    rows, settings = resolve(measures), Settings(num_steps=num_steps, num_probes=num_probes, seed=seed)
    risk.check()
    if before is not None:
        before = _of_this(before, risk, rows, settings)
    places, refused = places_of(risk, names, strength, seed)
    if transforms is None and not _normalises(risk):
        refused.pop("batchnorm", None)  # the absence needs no explanation
    if not places:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise UnsupportedError(f"no transform applies to this network. {reasons}")
    start = None if init is None else as_vector(risk, init)
    subject = Subject(risk, on_test(risk, test), start, settings)  # refuses a test risk at other weights
    shares = Shares(settings, rows, places, progress, known=before is not None)
    kept = as_checkpoint(checkpoint)
    asked = {**asdict(settings), "strength": strength, "transforms": names}
    with resumable(kept, risk, "audit", asked, **marks(subject, rows)) as saved:
        found: Audit | None = saved.result
        if found is None:
            run = _Run(risk, test, init, rows, settings, shares, kept, saved)
            before = before or run.measure("before", risk, test, rows, shares.of(""))
            after = {name: run.at(name, place, before) for name, place in places.items()}
            found = Audit(before=before, after=after, refused=refused, strength=strength, turned=run.turned)
            saved.finish(found)
            run.forget()
    return found


class _Run:
    """What the measurements of an audit share."""

    def __init__(
        self, risk: Risk, test: Any, init: Any, rows: Sequence[Measure], settings: Settings, shares: Shares,
        kept: Checkpoint | None, saved: Saved,
    ) -> None:  # fmt: skip
        self.risk, self.test, self.init, self.rows, self.settings = risk, test, init, rows, settings
        self.shares, self.kept, self.saved = shares, kept, saved
        self.errors: dict[str, float] = dict((saved.latest or {}).get("errors", {}))  # of a permuted H
        self.turned: dict[str, float] = {}
        self.states: list[Checkpoint] = []

    def measure(
        self, name: str, place: Risk, test: Any, rows: Sequence[Measure], progress: Progress | None
    ) -> Measurement:  # fmt: skip
        """A measurement under a name, which is also the folder of its state."""
        s, state = self.settings, None if self.kept is None else self.kept.within(name)
        self.states += [] if state is None else [state]
        found = measure(
            place, test, self.init, measures=rows, num_steps=s.num_steps, num_probes=s.num_probes, seed=s.seed,
            progress=progress, checkpoint=state,
        )  # fmt: skip
        if found.stop != "completed":
            raise StoppedError(found.stop)
        return found

    def at(self, name: str, place: Risk, before: Measurement) -> Measurement:
        """The measurement at the weights of a transform."""
        there = self.test.at(place.state()) if isinstance(self.test, Risk) else self.test
        again = partial(self.measure, place=place, test=there, progress=self.shares.of(name))
        if name in TURNING and (known := before.spectrum) is not None:
            if name not in self.errors:
                move = partial(TRANSFORMS[name], strength=self.settings.seed)
                self.errors[name] = turning(self.risk, place, move, self.settings.seed)
                self.saved.point(lambda: ({"errors": self.errors}, {}))
            if self.errors[name] <= tolerance(self.risk.dtype):
                self.turned[name] = self.errors[name]
                return again(f"{name}, turned", rows=with_spectrum(self.rows, partial(_given, known)))
        return self._elsewhere(name, again, before)

    def _elsewhere(self, name: str, again: Callable[..., Measurement], before: Measurement) -> Measurement:
        """A measurement with few steps if that decides all verdicts, else with all steps."""
        steps = steps_elsewhere(self.rows, self.settings.num_steps)
        if steps == self.settings.num_steps:
            return again(name, rows=self.rows)
        found = again(f"{name}, short", rows=with_spectrum(self.rows, partial(short_run, num_steps=steps)))
        pairs = {key: (before[key], e) for key, e in found.items() if key in before and e.bracket is not None}
        run = [row for row in self.rows if row.cost == "Hessian"]
        if not any(
            row.key in pairs and Shift(row.key, "", *pairs[row.key]).verdict == "cannot tell" for row in run
        ):  # more steps only narrow brackets
            return found
        whole = again(name, rows=run)
        return replace(
            found, estimates={**found.estimates, **whole.estimates}, failures={**found.failures, **whole.failures},
            seconds={**found.seconds, **whole.seconds}, spectrum=whole.spectrum,
        )  # fmt: skip

    def forget(self) -> None:
        """Remove the states of the single measurements, once the whole is saved."""
        for state in self.states:
            state.remove()


def _given(known: Spectrum, subject: Subject) -> Spectrum:
    """An existing run, in the form of a function of a subject."""
    return known


def _named(transforms: str | Sequence[str] | None) -> list[str]:
    """The requested transforms; refuses unknown names."""
    names = [transforms] if isinstance(transforms, str) else list(TRANSFORMS if transforms is None else transforms)
    if not names:
        raise ValueError(f"transforms is empty; there are: {', '.join(TRANSFORMS)}")
    if unknown := [name for name in names if name not in TRANSFORMS]:
        raise ValueError(f"no transform is named {unknown[0]!r}; there are: {', '.join(TRANSFORMS)}")
    return names


def _normalises(risk: Risk) -> bool:
    """Whether there is a BatchNorm in the network."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in risk.model.modules())


def _of_this(before: Measurement, risk: Risk, rows: Sequence[Measure], settings: Settings) -> Measurement:
    """The requested part of an earlier measurement, checked to be one of this risk.

    Raises:
        ValueError: If it is of another model or loss, other weights, data or settings, or lacks a measure.
    """
    own = {
        "model": f"{type(risk.model).__name__}, {risk.dim:,} parameters",
        "convention": risk.convention(),
        "settings": settings,
    }
    for name, wanted in own.items():
        if (got := getattr(before, name)) != wanted:
            raise ValueError(
                f"before is a measurement of something else: its {name} is {got}, expected {wanted}; leave out before="
            )
    if known := [key for key in ("train_loss", "weight_norm") if key in before]:
        own_values = measure(risk, measures=known)
        for key in known:
            if not math.isclose(before[key].value, own_values[key].value, rel_tol=_ALIKE, abs_tol=_ROUNDED):
                raise ValueError(
                    f"before is a measurement of something else, such as other weights or another loss: its {key} is "
                    f"{before[key].value:.6g}, expected {own_values[key].value:.6g}; leave out before="
                )
    if missing := [row.key for row in rows if row.key not in before and row.key not in before.failures]:
        raise ValueError(f"before lacks {', '.join(missing)}; measure these too, or leave out before=")
    keys = {row.key for row in rows}
    parts = {
        name: {key: value for key, value in getattr(before, name).items() if key in keys}
        for name in ("estimates", "failures", "readings", "conventions")
    }
    return replace(before, **parts)  # type: ignore[arg-type]
