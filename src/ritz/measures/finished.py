"""The finished part of a measurement, so that it is not repeated after a kill."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint import State
from ..fingerprints import mark, of_data
from ..results import Estimate
from .row import Measure
from .subject import FORWARD_PASS, HESSIAN_RUN, Subject


@dataclass
class Known:
    """What is finished: an estimate or the reason for its absence, by key; the runs that were made, and their times."""

    found: dict[str, Estimate | str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, latest: Mapping[str, Any] | None) -> "Known":
        """From a saved state; empty if there is none."""
        return cls() if latest is None else cls(latest["found"], latest["runs"], latest["seconds"])

    def add(self, subject: Subject) -> None:
        """Add the runs that a subject has made by now."""
        self.runs = list(dict.fromkeys([*self.runs, *subject.runs]))
        self.seconds |= subject.seconds

    def state(self) -> State:
        """The state to save."""
        return {"found": self.found, "runs": self.runs, "seconds": self.seconds}, {}

    def complete(self, subject: Subject, rows: Sequence[Measure]) -> None:
        """Make the runs whose results are part of the measurement: one is read back, the other is one forward pass.

        A measure that follows from a run is asked for first, because it knows which run that is, such as a short one.
        """
        for run, cost, name in ((HESSIAN_RUN, "Hessian", "spectrum"), (FORWARD_PASS, "forward", "outputs")):
            if run in self.runs and subject.peek(run) is None:
                with contextlib.suppress(Exception):
                    next(row for row in rows if row.cost == cost).compute(subject)
                getattr(subject, name)


def at_hand(row: Measure, subject: Subject) -> bool:
    """Whether a measure follows at once from runs that were already made."""
    needed = {"forward": FORWARD_PASS, "Hessian": HESSIAN_RUN}
    return row.cost == "weights" or (row.cost in needed and subject.peek(needed[row.cost]) is not None)


def marks(subject: Subject, rows: Sequence[Measure]) -> dict[str, Any]:
    """What a measurement depends on besides the solution and the settings."""
    test, init = subject.test, subject.init
    return {
        "measures": {row.key: getattr(row.compute, "__qualname__", "") for row in rows},
        "test": None if test is None else of_data(test.batches), "init": None if init is None else mark([init]),
    }  # fmt: skip
