"""`ritz compare`: what is typed, shown and written; the comparison is in ritz.measures.compare."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import cluster, screen, study
from .measure import marks, measured
from .session import Answer, Session, checked, execute
from .specs import CompareSpec
from .words import typed

if TYPE_CHECKING:
    from pathlib import Path

    from ..checkpoint import Checkpoint
    from ..measures.compare import Comparison
    from ..measures.row import Measure
    from ..risk import Risk


def run(spec: CompareSpec) -> int:
    """The whole command; returns the exit status."""
    return execute("compare", spec, lambda session: work(session, spec))


def work(session: Session, spec: CompareSpec) -> Answer:
    """Measure each checkpoint with common probes, and rank them."""
    from ..measures.compare import check_solutions
    from ..measures.registry import resolve

    spec.check()
    rows = resolve(spec.chosen)
    files = dict(zip(study.names_of(spec.weights), spec.weights, strict=True))
    if spec.slurm is not None:
        cluster.check()
    base = session.solution(check=False, here=spec.slurm is None)
    risks = {name: session.at(base, path) for name, path in files.items()}
    if spec.slurm is None:  # else this machine need not be one to compute on
        for name, risk in risks.items():
            checked(risk, name)
    first = next(iter(risks.values()))
    held_out = session.held_out(spec.test, first, here=spec.slurm is None)
    init = study.start(base, spec.init)
    notes = check_solutions(risks)
    run = session.start(first, files, {"solutions": _marks(risks, spec), **marks(spec, held_out)})
    if session.again:
        return answer(run.results)
    with session.stoppable() as state:
        if spec.apart:
            found, stops = _apart(session, spec, files, rows, notes, state, base, held_out)
        else:
            found, stops = _here(session, spec, risks, rows, held_out, init, state)
    run.keep(measurements=None, comparison=found)
    for stop in stops:
        session.partial(stop)
    return answer(run.results)


def _here(
    session: Session, spec: CompareSpec, risks: "Mapping[str, Risk]", rows: "Sequence[Measure]",
    held_out: "Risk | None", init: Any, state: "Checkpoint",
) -> "tuple[Comparison, list[str]]":  # fmt: skip
    """One solution after another in this process; and why each measurement ended."""
    from .. import compare
    from ..measures.subject import Settings
    from .keeping import Keeper

    run = session.run
    assert run is not None
    settings = Settings(num_steps=spec.num_steps, num_probes=spec.num_probes, seed=spec.seed)
    tests = None if held_out is None else {name: held_out.at(risk.state()) for name, risk in risks.items()}
    keeper = Keeper(run, risks, rows, settings, run.results.get("measurements", {}))
    try:
        found = compare(
            risks, tests, init, measures=keeper.rows, num_steps=spec.num_steps, num_probes=spec.num_probes,
            seed=spec.seed, progress=session.report, checkpoint=state,
        )  # fmt: skip
    except BaseException:
        keeper.save()
        raise
    whole = {name: keeper.whole(name, measurement) for name, measurement in found.measurements.items()}
    return replace(found, measurements=whole), [measurement.stop for measurement in whole.values()]


def _apart(
    session: Session, spec: CompareSpec, files: "Mapping[str, Path]", rows: "Sequence[Measure]", notes: Sequence[str],
    state: "Checkpoint", base: "Risk", held_out: "Risk | None",
) -> "tuple[Comparison, list[str]]":  # fmt: skip
    """Each solution in a process of its own; what fails is named, and the others are measured."""
    from ..measures.compare import ranked
    from .sweep import Sweep, data_of

    sweep = Sweep(session, spec, files, rows)
    data = {place: data_of(risk) for place, risk in ((spec.risk, base), (spec.test, held_out)) if place and risk}
    sweep.measure(state, data)
    if sweep.failed and not sweep.stop:
        session.cut = "; ".join(f"{name} failed: {why}" for name, why in sweep.failed.items())
    return ranked(sweep.comparable(), rows, (*notes, *sweep.notes())), [sweep.stop]


def _marks(risks: "Mapping[str, Risk]", spec: CompareSpec) -> dict[str, Any]:
    """Of every solution; the data is common to them."""
    first, *others = risks.values()
    whole = study.identity_of(first)
    weights = [whole.pop("weights"), *(study.weights_mark(risk) for risk in others)]
    device = whole["device"] if spec.device is None else spec.device.partition(":")[0]  # that of the jobs
    return {**whole, "weights": dict(zip(risks, weights, strict=True)), "device": device}


def answer(results: Mapping[str, Any]) -> Answer:
    """The table of rankings."""
    found: Comparison = results["comparison"]
    tree = {
        "rankings": {
            key: {
                "order": ranking.order, "better": ranking.better, "verdict": ranking.verdict,
                "probability": ranking.probability, "steps": ranking.steps,
            }
            for key, ranking in found.items()
        },
        "solutions": {name: measured(measurement) for name, measurement in found.measurements.items()},
        "notes": [typed(note) for note in found.notes],
    }  # fmt: skip
    return Answer([found.table()], tree, screen.DONE if len(found) else screen.FAILED)
