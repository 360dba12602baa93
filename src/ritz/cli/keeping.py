"""What is known of each solution as soon as it is known: for events.jsonl, for Ctrl-C, and for a run that goes on."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import stopping
from ..measures.measure import Measurement
from ..measures.row import Measure
from ..measures.subject import FORWARD_PASS, HESSIAN_RUN, Settings, Subject

if TYPE_CHECKING:
    from ..results import Estimate
    from ..risk import Risk
    from ..runs import Run

_SAVE_EVERY = 20.0  # seconds between two writes of what is known


class Keeper:
    """Measures that tell of themselves when they are computed, and are not computed again where they are known.

    Args:
        run: Where events go.
        risks: The solutions by name.
        rows: The measures that are asked for.
        settings: Settings of the measurement.
        known: What an earlier part of the same run had found.
    """

    def __init__(
        self, run: "Run", risks: "Mapping[str, Risk]", rows: Sequence[Measure], settings: Settings,
        known: Mapping[str, Measurement],
    ) -> None:  # fmt: skip
        self.run, self.risks, self.asked, self.settings = run, dict(risks), list(rows), settings
        self.known: dict[str, dict[str, Estimate]] = {name: {} for name in risks}
        self.before = {name: known[name] for name in risks if name in known}
        for name, measurement in self.before.items():
            self.known[name].update(measurement)
        self.subjects: dict[str, Subject] = {}
        self.rows = [replace(row, compute=partial(self._compute, row)) for row in rows]
        self._saved = time.perf_counter()

    def _compute(self, row: Measure, subject: Subject) -> "Estimate":
        name = next(name for name, risk in self.risks.items() if risk is subject.risk)
        self.subjects[name] = subject
        if row.key in self.known[name]:
            return self.known[name][row.key]
        found = row.compute(subject)
        if not (hasattr(found, "value") and hasattr(found, "many")):  # no Estimate: `measure` refuses it
            return found
        if stopping.asked():  # by a run that was cut, maybe
            return found
        self.known[name][row.key] = found
        which = {"solution": name} if name else {}
        value = {} if found.many else {"value": float(found.value), "stderr": float(found.stderr)}
        self.run.event("measure", key=row.key, **which, **value)
        if time.perf_counter() - self._saved > _SAVE_EVERY:
            self.save()
        return found

    def save(self) -> None:
        """Write what is known so far."""
        found = self.so_far()
        if found:
            self.run.keep(**({"measurement": found[""]} if "" in found else {"measurements": found}))
        self._saved = time.perf_counter()

    def whole(self, name: str, found: Measurement) -> Measurement:
        """A measurement with the shared runs of an earlier part, where they were not needed again."""
        before = self.before.get(name)
        if before is None:
            return found
        return replace(found, spectrum=found.spectrum or before.spectrum, outputs=found.outputs or before.outputs)

    def so_far(self) -> dict[str, Measurement]:
        """A measurement of each solution of which anything is known; one without a name is the only one."""
        return {name: self._measurement(name) for name, known in self.known.items() if known}

    def _measurement(self, name: str) -> Measurement:
        risk, subject, before = self.risks[name], self.subjects.get(name), self.before.get(name)
        rows = {row.key: row for row in self.asked if row.key in self.known[name]}
        estimates = {
            key: replace(e, convention=e.convention or f"{rows[key].convention}; {risk.convention()}")
            for key, e in self.known[name].items()
        }
        runs = {"spectrum": HESSIAN_RUN, "outputs": FORWARD_PASS}
        shared: dict[str, Any] = {
            key: (None if subject is None else subject.peek(run)) or getattr(before, key, None)
            for key, run in runs.items()
        }
        return Measurement(
            estimates=estimates, readings={key: row.reading for key, row in rows.items()},
            conventions={key: row.convention for key, row in rows.items()},
            model=f"{type(risk.model).__name__}, {risk.dim:,} parameters", convention=risk.convention(),
            settings=self.settings, seconds={} if subject is None else dict(subject.seconds), **shared,
        )  # fmt: skip
