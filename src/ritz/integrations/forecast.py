"""The time of a look, forecast before the first one."""

from collections.abc import Sequence

from ..doctor import costs
from ..measures.row import Measure
from ..operators.gauss_newton import GGN
from ..operators.hessian import Hessian
from ..operators.risk_operator import RiskOperator
from ..risk import Risk


def forecast(risk: Risk, rows: Sequence[Measure], num_steps: int, num_probes: int) -> float:
    """Seconds that the measures will take, from a few products on the first batch of the data.

    This is the projection of `ritz doctor`, but each product is timed once, since a forecast must take much less time
    than a look.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)))
        >>> rows = [ritz.measures.MEASURES["trace"]]
        >>> 0 < forecast(risk, rows, num_steps=10, num_probes=4) < 60
        True
    """
    first = next(iter(risk.batches))
    one = risk.on([first.data])
    one.notes = risk.notes  # findings about the risk hold for its first batch too
    scale = risk.num_samples / first.size
    needs = {row.cost for row in rows}
    nothing = costs.Products(0.0, 0.0, 1, scale)
    H = Hessian(one)
    seen = costs.Measured(
        hessian=_products(H, scale) if "Hessian" in needs else nothing,
        ggn=_products(GGN(one), scale) if "GGN" in needs and not risk.opaque else None,
        gradient=scale * costs.seconds_once(one.gradient, risk.device),
        projection=costs.time_projection(H), product_bytes=0.0, batch_size=first.size,
    )  # fmt: skip
    _, whole = costs.project(risk, seen, list(rows), num_steps, num_probes)
    return whole.seconds


def _products(operator: RiskOperator, scale: float) -> costs.Products:
    """The times of products with one vector, and with as many as are taken at once, on the operator's only batch."""
    chunk = operator.risk.plan.chunk
    probes = operator.probes(range(chunk), seed=0, distribution="normal")
    operator.rows(probes[:1])  # not timed: the first product also tries routes and loads kernels
    full = costs.seconds_once(lambda: operator.rows(probes), operator.device)
    single = costs.seconds_once(lambda: operator.rows(probes[:1]), operator.device)
    return costs.Products(min(full, single), full, chunk, scale)
