"""`ritz spectrum`: what is typed, shown and written; the run is in ritz.estimators."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import StoppedError
from . import screen, study
from .measure import number
from .session import Answer, Session, execute
from .specs import SpectrumSpec

if TYPE_CHECKING:
    from ..estimators.quantities import Spectrum
    from ..results import Estimate
    from ..tables import Table

FIRST_LOOK = 10  # the first look has one product in so many
ROWS, BAR = 24, 40  # of the density on the screen
SHOWN_OUTLIERS = 10
READINGS = {
    "gradient_norm": "near 0 at a minimum",
    "trace": "sum of the eigenvalues",
    "frobenius_norm": "root of the sum of their squares",
    "spectral_norm": "the largest in size",
    "lambda_max": "the sharpest direction",
    "lambda_min": "below 0: not a minimum",
    "negative_trace": "sum of those below 0",
}
_POSITIVE = {"lambda_min": "0 but for round-off", "negative_trace": "0 but for round-off"}  # of a Gauss-Newton matrix


def run(spec: SpectrumSpec) -> int:
    """The whole command; returns the exit status."""
    return execute("spectrum", spec, lambda session: work(session, spec))


def work(session: Session, spec: SpectrumSpec) -> Answer:
    """Loss and gradient, a first look at a tenth of the cost, and the run itself: each is kept when it is there."""
    from .. import GGN, Hessian, spectrum

    spec.check()
    risk = session.solution(spec.weights)
    if spec.params != "*":
        risk = risk.restrict(spec.params)
    operator = Hessian(risk) if spec.matrix == "hessian" else GGN(risk)
    weights = {} if spec.weights is None else {spec.weights.stem: spec.weights}
    run = session.start(risk, weights, {"solution": study.identity_of(risk)})
    if session.again:
        return answer(run.results)
    session.report("loss and gradient", 0.0)
    run.keep(**_slope(risk))
    sized: dict[str, Any] = {"num_steps": spec.num_steps, "num_probes": spec.num_probes, "seed": spec.seed}
    expected = spec.products or spec.num_steps * spec.num_probes
    share = 1 / (FIRST_LOOK + 1)
    try:
        with session.stoppable() as state:
            # read back where it is done, which also makes its choices again
            found = spectrum(
                operator, **{**sized, "products": max(expected // FIRST_LOOK, 16)},
                checkpoint=state.within("first look"), progress=session.counted("first look", 0.0, share),
            )  # fmt: skip
            if "spectrum" not in run.results:
                run.keep(spectrum=found)
            found = spectrum(
                operator, **sized, products=spec.products, tol=spec.tol, checkpoint=state.within("spectrum"),
                progress=session.counted("Lanczos run", share, 1.0),
            )  # fmt: skip
            run.keep(spectrum=found)
    except StoppedError as error:
        if "spectrum" not in run.results:
            raise
        session.partial(f"{str(error).partition(';')[0]} at a first look")
        return answer(run.results)
    if session.partial(found.stop):
        return answer(run.results)
    with contextlib.suppress(ImportError), screen.quiet_fonts():  # the figure needs matplotlib; the numbers do not
        figure: Any = found.plot().figure
        figure.savefig(run.folder / "spectrum.png", dpi=110)
    return answer(run.results)


def _slope(risk: Any) -> "dict[str, Estimate]":
    """Where on the landscape the matrix is taken."""
    from ..results import Estimate
    from ..space import row_norms

    fields: dict[str, Any] = {"exact": True, "convention": risk.convention()}
    loss = Estimate(name="loss", value=risk.loss(), **fields)
    return {
        "loss": loss,
        "gradient_norm": Estimate(name="gradient norm", value=float(row_norms(risk.gradient()[None])), **fields),
    }


def answer(results: Mapping[str, Any]) -> Answer:
    """The numbers, the outliers and the density."""
    import torch

    found: Spectrum = results["spectrum"]
    numbers = {
        "loss": results["loss"], "gradient_norm": results["gradient_norm"], "trace": found.trace,
        "frobenius_norm": found.frobenius_norm, "spectral_norm": found.spectral_norm, "lambda_max": found.lambda_max,
        "lambda_min": found.lambda_min, "negative_trace": found.negative_trace,
    }  # fmt: skip
    grid = found.default_grid()
    density = torch.as_tensor(found.density(grid).value)
    tree = {
        "numbers": {key: {**number(e), "convention": e.convention} for key, e in numbers.items()},
        "outliers": found.head.tolist(), "outlier_residuals": found.head_residuals.tolist(),
        "density": {"eigenvalue": grid.tolist(), "density": density.tolist()},
        "dim": found.dim, "products": found.products, "stop": found.stop, "convention": found.convention,
    }  # fmt: skip
    return Answer([_table(found, numbers), picture(found)], tree)


def _table(found: "Spectrum", numbers: "Mapping[str, Estimate]") -> "Table":
    """Values with errors and intervals."""
    from ..measures.measure import Measurement

    outliers = ", ".join(f"{value:.4g}" for value in found.head[:SHOWN_OUTLIERS].tolist())
    more = f" and {len(found.head) - SHOWN_OUTLIERS} more" if len(found.head) > SHOWN_OUTLIERS else ""
    notes = [f"locked eigenvalues, largest first: {outliers}{more}"] if len(found.head) else []
    shown = Measurement(
        estimates=numbers, conventions={key: e.convention.partition(";")[0] for key, e in numbers.items()},
        readings={**READINGS, **(_POSITIVE if found.convention.startswith("GGN") else {})},
        model=f"matrix of order {found.dim}", convention=found.convention, spectrum=found,
    )  # fmt: skip
    return replace(shown.table(), notes=(*notes, f"{found.products} products; {found.stop}"))


def picture(found: "Spectrum") -> "Table":
    """The density as bars, on a logarithmic scale down to less than one eigenvalue."""
    import torch

    from ..tables import Table

    grid = found.default_grid(ROWS)
    least = (found.range()[1] - found.range()[0]) / found.num_steps if found.num_steps else 0.0
    width = max(0.5 * float(grid[1] - grid[0]), least)  # so wide that nothing falls between two rows
    values = torch.as_tensor(found.density(grid, width).value).tolist()
    top = max(values)
    floor = 0.1 / found.dim / (float(grid[-1] - grid[0]) or 1.0)
    scale = math.log(top / floor) if top > floor else 1.0
    bars = ["█" * round(BAR * max(math.log(max(v, floor) / floor), 0.0) / scale) for v in values]
    rows = [(f"{float(x):.3g}", f"{v:.2e}", bar) for x, v, bar in zip(grid, values, bars, strict=True)]
    return Table(
        ("eigenvalue", "density", "logarithmic"),
        rows[::-1],
        title=f"spectral density, smoothed over {width:.2g}",
        numeric=(0, 1),
    )
