"""`ritz measure`: what is typed, shown and written; the measures are in ritz.measures."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import screen, study
from .session import Answer, Session, execute
from .specs import MeasureSpec

if TYPE_CHECKING:
    from ..measures.measure import Measurement
    from ..results import Estimate

AUDIT_SHARE = 0.4  # of the bar that the measurement has where an audit comes after it


def run(spec: MeasureSpec) -> int:
    """The whole command; returns the exit status."""
    return execute("measure", spec, lambda session: work(session, spec))


def work(session: Session, spec: MeasureSpec) -> Answer:
    """Measure, audit, sample traces; each is kept as soon as it is there."""
    from .. import audit, measure, sample_traces
    from ..measures.registry import resolve
    from ..measures.subject import Settings
    from .keeping import Keeper

    rows = resolve(spec.chosen)
    settings = Settings(num_steps=spec.num_steps, num_probes=spec.num_probes, seed=spec.seed)
    risk = session.solution(spec.weights)
    test = session.held_out(spec.test, risk)
    init = None if spec.init is None else study.fit_weights(risk.model, study.read_weights(spec.init), spec.init)
    identity = {"solution": study.identity_of(risk), **marks(spec, test)}
    run = session.start(risk, {} if spec.weights is None else {spec.weights.stem: spec.weights}, identity)
    if session.again:
        return answer(run.results)
    known = {"": run.results["measurement"]} if "measurement" in run.results else {}
    keeper = Keeper(run, {"": risk}, rows, settings, known)
    sized: dict[str, Any] = {"num_steps": spec.num_steps, "num_probes": spec.num_probes, "seed": spec.seed}
    share = AUDIT_SHARE if spec.audit else 1.0
    try:
        found = measure(
            risk,
            test,
            init,
            measures=keeper.rows,
            **sized,
            progress=lambda text, part: session.report(text, share * part),
        )
    except BaseException:
        keeper.save()
        raise
    run.keep(measurement=keeper.whole("", found))
    if spec.audit:
        with session.optional("the audit"):
            run.keep(
                audit=audit(
                    risk, test, init, measures=keeper.rows, **sized,
                    progress=lambda text, part: session.report(f"audit, {text}", share + (1 - share) * part),
                )
            )  # fmt: skip
    if spec.sample_traces:
        session.report("traces of samples", 1.0)
        with session.optional("the traces of samples"):
            run.keep(sample_traces=sample_traces(risk, seed=spec.seed))
    return answer(run.results)


def marks(spec: Any, test: Any) -> dict[str, Any]:
    """What else makes a run of measures the one that it is: the test data and the start."""
    from ..runs import sha256

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
        "failures": dict(found.failures),
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
