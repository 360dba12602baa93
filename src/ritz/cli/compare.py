"""`ritz compare`: what is typed, shown and written; the comparison is in ritz.measures.compare."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import screen, study
from .measure import marks, measured
from .session import Answer, Session, checked, execute
from .specs import CompareSpec
from .words import typed

if TYPE_CHECKING:
    from ..measures.compare import Comparison
    from ..risk import Risk


def run(spec: CompareSpec) -> int:
    """The whole command; returns the exit status."""
    return execute("compare", spec, lambda session: work(session, spec))


def work(session: Session, spec: CompareSpec) -> Answer:
    """Measure each checkpoint with common probes, and rank them."""
    from .. import compare
    from ..measures.registry import resolve
    from ..measures.subject import Settings
    from .keeping import Keeper

    if len(spec.weights) < 2:
        given = spec.weights[0] if spec.weights else "no file"
        raise ValueError(f"--weights has {given} and nothing to compare with; give two or more files after it")
    rows = resolve(spec.chosen)
    settings = Settings(num_steps=spec.num_steps, num_probes=spec.num_probes, seed=spec.seed)
    files = dict(zip(study.names_of(spec.weights), spec.weights, strict=True))
    base = session.solution(check=False)
    risks = {name: checked(session.at(base, path), name) for name, path in files.items()}
    first = next(iter(risks.values()))
    held_out = session.held_out(spec.test, first)
    tests = None if held_out is None else {name: held_out.at(risk.state()) for name, risk in risks.items()}
    init = None if spec.init is None else study.fit_weights(base.model, study.read_weights(spec.init), spec.init)
    run = session.start(first, files, {"solutions": _marks(risks), **marks(spec, held_out)})
    if session.again:
        return answer(run.results)
    keeper = Keeper(run, risks, rows, settings, run.results.get("measurements", {}))
    with session.stoppable() as state:
        try:
            found = compare(
                risks, tests, init, measures=keeper.rows, num_steps=spec.num_steps, num_probes=spec.num_probes,
                seed=spec.seed, progress=session.report, checkpoint=state,
            )  # fmt: skip
        except BaseException:
            keeper.save()
            raise
    whole = {name: keeper.whole(name, measurement) for name, measurement in found.measurements.items()}
    run.keep(measurements=None, comparison=replace(found, measurements=whole))
    for measurement in whole.values():
        session.partial(measurement.stop)
    return answer(run.results)


def _marks(risks: "Mapping[str, Risk]") -> dict[str, Any]:
    """Of every solution; the data is common to them."""
    first, *others = risks.values()
    whole = study.identity_of(first)
    weights = [whole.pop("weights"), *(study.weights_mark(risk) for risk in others)]
    return {**whole, "weights": dict(zip(risks, weights, strict=True))}


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
