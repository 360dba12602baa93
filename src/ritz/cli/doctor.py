"""`ritz doctor`: what is typed, shown and written; the examination is in ritz.doctor."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import screen
from .session import Answer, Session, execute
from .specs import DoctorSpec
from .words import typed


def run(spec: DoctorSpec) -> int:
    """The whole command; returns the exit status."""
    return execute("doctor", spec, lambda session: work(session, spec))


def work(session: Session, spec: DoctorSpec) -> Answer:
    """One examination; what is wrong with the loss or the data is part of it."""
    from ..doctor import examine
    from ..measures.registry import resolve
    from ..measures.subject import Settings
    from ..provenance import sha256

    resolve(spec.chosen)
    Settings(num_steps=spec.num_steps, num_probes=spec.num_probes)
    risk = session.solution(spec.weights, check=False)
    files = {} if spec.weights is None else {spec.weights.stem: spec.weights}
    run = session.start(risk, files, {"weights": {n: sha256(path) for n, path in files.items()}}, about=False)
    if not session.again:
        found = examine(
            risk, measures=spec.chosen, num_steps=spec.num_steps, num_probes=spec.num_probes, seed=spec.seed,
            progress=session.report, known=lambda checkup: run.keep(checkup=checkup.plain()),
        )  # fmt: skip
        run.header["subject"] = {
            "model": type(risk.model).__name__,
            "num_params": risk.dim,
            "convention": found.convention,
        }
        run.keep(checkup=found.plain())
    return answer(run.results)


def answer(results: Mapping[str, Any]) -> Answer:
    """Findings, what to do, what it takes; the status says whether anything failed."""
    from ..doctor import Checkup

    kept = Checkup.of(results["checkup"])
    findings = tuple(replace(one, text=typed(one.text), remedy=typed(one.remedy)) for one in kept.findings)
    found = replace(kept, findings=findings)
    tables = [found.table(), *([found.costs()] if found.trials else [])]
    return Answer([*tables, found.verdict], found.plain(), screen.DONE if found.healthy else screen.FAILED)
