"""`ritz measure`: what is typed, shown and written; the measures are in ritz.measures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import screen, study
from .session import Answer, Session, execute
from .specs import MeasureSpec
from .words import typed

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..measures.measure import Measurement
    from ..measures.row import Measure
    from ..measures.subject import Settings
    from ..results import Estimate

AUDITED = 3  # other weights at which an audit has to run anew, as a rule


def run(spec: MeasureSpec) -> int:
    """The whole command; returns the exit status."""
    return execute("measure", spec, lambda session: work(session, spec))


def work(session: Session, spec: MeasureSpec) -> Answer:
    """Measure, audit, sample traces; each is kept as soon as it is there."""
    from .. import measure
    from ..measures.registry import resolve
    from ..measures.subject import Settings
    from .keeping import Keeper

    rows = resolve(spec.chosen)
    settings = Settings(num_steps=spec.num_steps, num_probes=spec.num_probes, seed=spec.seed)
    risk = session.solution(spec.weights)
    test = session.held_out(spec.test, risk)
    init = study.start(risk, spec.init)
    identity = {"solution": study.identity_of(risk), **marks(spec, test)}
    run = session.start(risk, {} if spec.weights is None else {spec.weights.stem: spec.weights}, identity)
    if session.again:
        return answer(run.results)
    before = run.results.get("measurement")  # one that was cut is gone on with from its state
    known = {"": before} if before is not None and before.stop == "completed" else {}
    keeper = Keeper(run, {"": risk}, rows, settings, known)
    sized: dict[str, Any] = {"num_steps": spec.num_steps, "num_probes": spec.num_probes, "seed": spec.seed}
    share = _share(rows, settings) if spec.audit else 1.0
    with session.stoppable() as state:
        try:
            found = measure(
                risk, test, init, measures=keeper.rows, **sized, checkpoint=state.within("measurement"),
                progress=lambda text, part: session.report(text, share * part),
            )  # fmt: skip
        except BaseException:
            keeper.save()
            raise
        found = keeper.whole("", found)
        run.keep(measurement=found)
        if found.stop == "completed":
            _more(session, spec, found, risk, test, init, rows, share, state)
    session.partial(found.stop)
    return answer(run.results)


def _more(
    session: Session, spec: MeasureSpec, found: "Measurement", risk: Any, test: Any, init: Any,
    rows: "Sequence[Measure]", share: float, state: "Checkpoint",
) -> None:  # fmt: skip
    """What was asked for beside the measures; stopped, it is not there, and gone on with when the run is."""
    from .. import audit, sample_traces

    assert session.run is not None

    def report(text: str, part: float) -> None:
        session.report(f"audit, {text}", share + (1 - share) * part)

    sized: dict[str, Any] = {"num_steps": spec.num_steps, "num_probes": spec.num_probes, "seed": spec.seed}
    if spec.audit:
        with session.optional("the audit"):
            kept = state.within("audit")
            session.run.keep(
                audit=audit(risk, test, init, measures=rows, **sized, before=found, progress=report, checkpoint=kept)
            )
    if spec.sample_traces:
        session.report("traces of samples", 1.0)
        with session.optional("the traces of samples"):
            kept = state.within("sample traces")
            session.run.keep(sample_traces=sample_traces(risk, seed=spec.seed, checkpoint=kept))


def _share(rows: "Sequence[Measure]", settings: "Settings") -> float:
    """The part of the bar that the measurement has where an audit comes after it."""
    from ..measures.elsewhere import cost_of, steps_elsewhere

    first, there = (
        cost_of(rows, steps, settings.num_probes)
        for steps in (settings.num_steps, steps_elsewhere(rows, settings.num_steps))
    )
    return first / (first + AUDITED * there)


def marks(spec: Any, test: Any) -> dict[str, Any]:
    """What else makes a run of measures the one that it is: the test data and the start."""
    from ..provenance import sha256

    return {
        "test": None if test is None else study.identity_of(test)["data"],
        "init": None if spec.init is None else sha256(spec.init),
    }


def answer(results: Mapping[str, Any]) -> Answer:
    """The table of measures and what came with it."""
    found: Measurement = results["measurement"]
    shown: list[Any] = [found.table()]
    tree: dict[str, Any] = measured(found)
    if "audit" in results:
        audited = results["audit"]
        shown += [audited.table(), *audited.findings()]
        shifts = audited.shifts.items()
        tree["audit"] = {
            name: {key: {"verdict": s.verdict, "factor": s.factor} for (key, at), s in shifts if at == name}
            for name in audited.after
        }
    if "sample_traces" in results:
        traces = results["sample_traces"]
        shown.append(str(traces))
        tree["sample_traces"] = {**number(traces), "convention": traces.convention}
    return Answer(shown, tree, screen.DONE if len(found) else screen.FAILED)


def measured(found: "Measurement") -> dict[str, Any]:
    """A measurement as a tree of plain numbers."""
    return {
        "measures": {
            key: {**number(e), "convention": e.convention, "reading": found.readings.get(key, ""), "stop": e.stop}
            for key, e in found.items()
        },
        "failures": {key: typed(why) for key, why in found.failures.items()},
        "seconds": dict(found.seconds),
    }


def number(estimate: "Estimate") -> dict[str, Any]:
    """Value, error and 95 % interval; of many values, how many and where they lie."""
    import torch

    if estimate.many:
        values = torch.as_tensor(estimate.value)
        ends = [float(values.min()), float(values.max())] if values.numel() else []
        return {"values": values.numel(), "range": ends, "exact": estimate.exact}
    ends = [float(end) for end in estimate.interval()]
    return {
        "value": float(estimate.value), "stderr": float(estimate.stderr), "interval": ends, "exact": estimate.exact
    }  # fmt: skip
