"""Solutions measured elsewhere: by processes side by side on this machine, or as jobs of a cluster.

Each process makes the risk from what was typed, as the command itself does, and measures its solution into the state
folder in which `ritz.compare` would: what is finished there is read back, and what was under way is gone on with, by as
many processes as there are now.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import stopping
from ..checkpoint import Checkpoint
from ..measures.measure import Measurement, measure
from ..measures.registry import resolve
from ..memory import is_shortage
from ..workers import Outcomes, RunFailed, Task, as_they_come, beside_others, submitted, tell
from . import cluster, study
from .pipes import lasting
from .session import Session, checked, heard
from .specs import CompareSpec

if TYPE_CHECKING:
    from ..measures.row import Measure
    from ..measures.subject import Subject
    from ..results import Estimate
    from ..risk import Risk

_SAVE_EVERY = 20.0  # seconds between two writes of all that has come
_TELL_EVERY = 0.2  # seconds between two words of a process about how far it is
_NO_ROOM = "no memory beside others"


@dataclass
class Sweep:
    """The solutions of one command, as they come from elsewhere.

    Attributes:
        found: What was measured, by name; where the work was stopped, of some only a part.
        failed: Why a solution could not be measured, by name.
        stop: Why the work was stopped, "" where it was not.
    """

    session: Session
    spec: CompareSpec
    files: Mapping[str, Path]
    rows: "Sequence[Measure]"
    found: dict[str, Measurement] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stop: str = ""
    _saved: float = field(default_factory=time.perf_counter)

    def measure(self, state: Checkpoint, data: "Mapping[str, Data]") -> None:
        """Measure all of which not everything is known."""
        run = self.session.run
        assert run is not None
        before = run.results.get("measurements") or getattr(run.results.get("comparison"), "measurements", {})
        self.found = {name: before[name] for name in self.files if name in before and self._whole(before[name])}
        parts = dict.fromkeys(self.files, 0.0) | dict.fromkeys(self.found, 1.0)

        def told(name: str, part: float) -> None:
            parts[name] = max(parts[name], part)
            known = len(self._finished())
            self.session.report(f"{known} of {len(parts)} solutions", sum(parts.values()) / len(parts))

        tasks: dict[str, Task] = {
            name: (measured_apart, (Given(self.spec, path.absolute(), state.within(name), data),))
            for name, path in self.files.items()
            if name not in self.found
        }
        try:
            for name, outcome in self._outcomes(tasks, run.folder, told):
                self._take(name, outcome)
                told(name, float(not stopping.asked()))  # else it may be cut
            self.stop = stopping.asked()
        finally:
            self._keep()

    def _outcomes(self, tasks: Mapping[str, Task], folder: Path, told: Any) -> Outcomes:
        if self.spec.slurm is not None:
            return submitted(tasks, cluster.executor(self.spec.slurm, folder / "slurm", self.spec.device))
        workers = min(self.spec.workers, max(len(tasks), 1))
        return as_they_come(tasks, workers, told=told, threads=max(torch.get_num_threads() // workers, 1))

    def _take(self, name: str, outcome: Any) -> None:
        """What came of one."""
        run = self.session.run
        assert run is not None
        if isinstance(outcome, RunFailed):
            if not stopping.asked():  # else its process did not hear it in time, and goes on from its state
                self.failed[name] = outcome.why.splitlines()[0]
                run.event("failed", solution=name, text=outcome.why)
            return
        found, notes = outcome
        if found.stop != "completed" and not stopping.asked():  # a job that was cut off
            self.failed[name] = found.stop
        self.found[name] = found
        for note in notes:
            self.session.warned(note, important=True)
        for key, e in found.items():
            value = {} if e.many else {"value": float(e.value), "stderr": float(e.stderr)}
            run.event("measure", key=key, solution=name, **value)
        if time.perf_counter() - self._saved > _SAVE_EVERY:
            self._keep()

    def _keep(self) -> None:
        """Write what is finished; what was cut is in its state, and its numbers are not those that it will have."""
        assert self.session.run is not None
        if whole := self._finished():
            self.session.run.keep(measurements=whole)
        self._saved = time.perf_counter()

    def _whole(self, found: Measurement) -> bool:
        """Whether everything was measured, or is known not to be measurable."""
        known = {*found, *found.failures}
        return found.stop == "completed" and all(row.key in known for row in self.rows)

    def _finished(self) -> dict[str, Measurement]:
        """Those of which all is known, in the order in which the files were given."""
        return {name: self.found[name] for name in self.files if name in self.found and self._whole(self.found[name])}

    def comparable(self) -> dict[str, Measurement]:
        """Those of which all is known; with fewer than two, those of which anything is."""
        whole = self._finished()
        return whole if len(whole) > 1 else {name: self.found[name] for name in self.files if self.found.get(name)}

    def notes(self) -> tuple[str, ...]:
        """What is missing, and why."""
        stopped = (f"{self.stop} before all solutions were measured",) if self.stop else ()
        return (*stopped, *(f"{name} failed: {why}" for name, why in self.failed.items()))


# --------------------------------------------------------------------------------------------- in the process

Data = tuple[int, float]  # samples, and their mark


@dataclass(frozen=True)
class Given:
    """What a process is told.

    Attributes:
        spec: What was typed.
        weights: Weights of its solution.
        state: Where it keeps its state.
        data: What the functions of the user gave to the process that asks, by their names.
    """

    spec: CompareSpec
    weights: Path
    state: Checkpoint
    data: Mapping[str, Data]


def measured_apart(given: Given) -> tuple[Measurement, list[str]]:
    """One solution, in a process that is not that of the command; and what is to be noted.

    Raises:
        torch.OutOfMemoryError: Where memory runs out beside others; what is known by then is in the state.
        ValueError: If the user's functions give other data here.
    """
    spec = given.spec
    session = _new_session(spec)
    told = [0.0]

    def report(text: str, part: float) -> None:
        if time.perf_counter() - told[0] > _TELL_EVERY:
            told[0] = time.perf_counter()
            tell(part)

    with lasting(), stopping.stoppable(patient=True), heard(session):
        base, held_out, init = _prepared(spec, Path.cwd())
        for place, risk in ((spec.risk, base), (spec.test, held_out)):
            if place is not None and risk is not None:
                _refuse_other_data(place, data_of(risk), given.data[place])
        risk = checked(session.at(base, given.weights))
        found = measure(
            risk, None if held_out is None else held_out.at(risk.state()), init, num_steps=spec.num_steps,
            measures=[replace(row, compute=partial(_computed, row)) for row in resolve(spec.chosen)],  # as in `Keeper`
            num_probes=spec.num_probes, seed=spec.seed, progress=report, checkpoint=given.state,
        )  # fmt: skip
        if stopping.asked() == _NO_ROOM:
            raise torch.OutOfMemoryError(_NO_ROOM)
    return found, session.notes


@lru_cache(maxsize=1)  # once for a process, and not for a solution
def _prepared(spec: CompareSpec, folder: Path) -> "tuple[Risk, Risk | None, dict[str, torch.Tensor] | None]":
    """The user's risk, the same on test data, and the start."""
    session = _new_session(spec)
    base = session.solution(check=False)
    return base, session.held_out(spec.test, base), study.start(base, spec.init)


def _new_session(spec: CompareSpec) -> Session:
    return Session("compare", spec, study.Code(spec.seed), lambda text, part: None, lambda text: None)


def _computed(row: "Measure", subject: "Subject") -> "Estimate":
    """One measure; for which there is no memory beside others, there may be by itself."""
    try:
        return row.compute(subject)
    except Exception as error:
        if is_shortage(error) and beside_others():
            stopping.ask(_NO_ROOM)
        raise


def data_of(risk: "Risk") -> Data:
    """By which data is known to be the same in another process."""
    return risk.num_samples, study.data_mark(risk)


def _refuse_other_data(place: str, here: Data, there: Data) -> None:
    if here[0] != there[0] or abs(here[1] - there[1]) > 1e-5 * max(abs(here[1]), abs(there[1])):  # round-off
        raise ValueError(
            f"{place} gives other data in each process: {here[0]} samples with checksum {here[1]:.9g} here, {there[0]} "
            f"with {there[1]:.9g} there; seed every generator that it draws from"
        )
