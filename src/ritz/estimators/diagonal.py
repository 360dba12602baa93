"""The diagonal of a symmetric matrix."""

import math
import os
from typing import Literal, get_args

import torch

from ..checkpoint import Checkpoint
from ..fingerprints import resumable
from ..intervals import StudentT
from ..operators.algebra import Metered
from ..operators.base import Operator, full_precision
from ..results import Estimate
from .exact import exact_cost, without_probes
from .forms import alike, untold
from .journal import Journal
from .probing import (
    about,
    blocks,
    cut_to_support,
    deflated,
    image_squares,
    known,
    require_finite,
    rounded,
)
from .trace import Progress, choose

Method = Literal["auto", "hutchinson", "hutch++", "exact"]

# Probes: fewer find no range. On two trained networks (benchmarks/stated.py) hutch++ was nearer than hutchinson from 8
# on (ReLU), and from 16 on, as near with 12 (tanh).
_WORTH = 12


@full_precision()
def diagonal(
    operator: Operator,
    num_probes: int = 30,
    seed: int = 0,
    *,
    method: Method = "auto",
    progress: Progress | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Estimate:
    """The diagonal (dim,), with an error for each entry; `parts` are the sums over single parameters.

    Parts have plain Student t intervals, as those of `trace`.

    Products that are far from those in float64 cause a warning and wider intervals, as for `trace`. All entries are
    widened equally, because the comparison says nothing about a single entry.

    Args:
        operator: The matrix.
        num_probes: Matrix-vector products to spend. As many as there are dimensions give the exact diagonal by hutch++.
        seed: Seed of the probes.
        method: "hutchinson": the mean of v * (A v) over random signs v (Bekas, Kokiopoulou and Saad 2007). Its variance
            at entry j is the sum of A_jk^2 over all other k, which exceeds the diagonal itself if few directions hold
            most of the curvature.
            "hutch++": those directions are found and removed first, as in `trace`.
            "exact": mean_i sum_c (J_i' s_c)_j^2 by backward passes over the roots s_c of the loss, for the GGN and
            Fishers of any network and the Hessian of a piecewise-linear one. The outputs of the latter have no second
            derivative in any single weight, so that diag H = diag GGN. By dim products for a matrix that is not of a
            network.
            "auto": exact if that is cheaper, otherwise hutch++, or hutchinson for fewer than 12 probes.
        progress: Called as progress(products done, products expected).
        checkpoint: A folder, or a `ritz.Checkpoint`, for the products, or for an exact diagonal the results of the
            batches. After a kill, the same call resumes.

    Raises:
        ValueError: If an argument is wrong, or the checkpoint is that of another call.
        StoppedError: If the run is stopped (`ritz.stoppable`) before its last product.
        UnsupportedError: For "exact", if there is no such form; the message gives the reason.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.zeros(2, 1)))
        >>> found = diagonal(ritz.Hessian(risk))
        >>> found.value.tolist(), found.exact, found.parts["weight"].value  # 2 (X^2 / N, 1)
        ([10.0, 4.0, 2.0], True, 14.0)
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    if method == "hutch++" and num_probes < 6:
        raise ValueError(f"hutch++ needs at least 6 probes, got num_probes={num_probes}")
    cost = exact_cost(operator) if method == "auto" else None
    how = choose(operator.dim, cost, num_probes, _WORTH) if method == "auto" else method
    if how == "hutch++" and operator.dim <= num_probes:  # no more products, and few signs may all be alike
        how = "exact"
    with resumable(checkpoint, operator, "diagonal", {"method": how, "num_probes": num_probes, "seed": seed}) as saved:
        estimate: Estimate | None = saved.result
        if estimate is None:
            journal = Journal(operator, saved)
            journal.expect(0 if how == "exact" else num_probes)
            if how == "exact":
                estimate, norm = _exact(journal, num_probes, looked=cost is not None)
            else:
                estimate, norm = _probed(journal, how, num_probes, seed)
            estimate = cut_to_support(operator, rounded(journal, estimate, norm))
            saved.finish(estimate)
    if progress is not None:
        progress(estimate.products, estimate.products)
    return estimate


def _exact(meter: Journal, num_probes: int, looked: bool) -> tuple[Estimate, float | None]:
    value, how, norm = without_probes(meter, "entry", num_probes, looked)
    told = about(meter, f"diagonal, {how}", None)
    parts = known(meter, "trace", meter.space.segment(value[None])[0], told)
    entries = value.to(meter.dtype).cpu()
    zero = torch.zeros_like(entries)
    return Estimate(name="diagonal", value=entries, stderr=zero, exact=True, parts=parts, **told), norm


def _probed(meter: Metered, how: str, num_probes: int, seed: int) -> tuple[Estimate, float]:
    if how == "hutch++":
        found = deflated(meter, num_probes, seed)
        each, head, norm = found.rows * found.tail, found.head, found.norm(meter)  # (K, dim), (dim,)
        dof = len(each) - 1
    else:
        rows = meter.probes(range(num_probes), seed)
        image = meter.rows(rows)
        require_finite(meter, image)
        each, head = rows * image, torch.zeros_like(rows[0])
        dof = 0 if alike(rows) else num_probes - 1
        norm = math.sqrt(image_squares(meter, rows, image) / num_probes)
    stderr = each.std(0) / math.sqrt(len(each)) if dof else torch.full_like(head, math.nan)
    sums = meter.space.segment(each).double() + meter.space.segment(head[None]).double()  # (K, parameters)
    rule = StudentT(dof)
    return Estimate(
        name="diagonal", value=(each.mean(0) + head).cpu(), stderr=stderr.cpu(), rule=rule,
        parts=blocks(meter, sums.cpu(), seed, **untold(rule)), **about(meter, f"diagonal by {_NAMES[how]}", seed),
    ), norm  # fmt: skip


_NAMES = {"hutchinson": "Hutchinson's estimator", "hutch++": "Hutch++"}
