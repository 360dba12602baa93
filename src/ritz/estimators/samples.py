"""Curvature sample by sample.

For sample i with outputs f_i and loss Hessian M_i = sum_c s_c s_c' in the outputs,

    Tr GGN_i = sum_c ||J_i' s_c||^2,

C backward passes for all samples together, and for a network that is affine in each single weight Tr H_i = Tr GGN_i
(for cross-entropy sum_c p_c ||grad (f_c - sum_j p_j f_j)||^2). Where it is not, v' H_i v for random signs v has mean
Tr H_i, and one product gives it for every sample of a batch.
"""

import math
import os
from typing import Literal, get_args

import torch
from torch import Tensor

from ..batches import Batch
from ..checkpoint import Checkpoint
from ..errors import NonFiniteError, UnsupportedError
from ..fingerprints import resumable
from ..intervals import Exact, StudentT
from ..linearity import multi_affine
from ..reducers import Concat
from ..results import Estimate
from ..risk import Params, Progress, Risk
from .exact import num_roots, refuse_coupled, refuse_unreal, stack_size
from .passes import fitting_pieces, joined
from .sample_products import SampleProducts
from .squares import SquaredNorms, sample_weights
from .walks import Walks

Method = Literal["auto", "exact", "probes"]

_WORTH = 4  # one forward-over-forward probe costs about as much as this many backward passes


def sample_traces(
    risk: Risk,
    *,
    method: Method = "auto",
    num_probes: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Estimate:
    """Tr H_i, the trace of the Hessian of each sample's own loss, for all N samples in data order.

    A sample's own loss is its total divided by its weight; for tokens, the mean over unmasked tokens. The weighted mean
    of the result is the trace of the Hessian of the risk.

    Args:
        risk: The risk; its data must come in a fixed order.
        method: "exact" (C backward passes, for networks affine in each single weight), "probes" (any network, with
            standard errors), or "auto": exact if it applies and is not more expensive.
        num_probes: Number of random sign vectors. They are common to all samples, so errors of different samples are
            not independent.
        seed: Seed of the probes.
        progress: Called with (batches done, 0). On a GPU, small batches of cached data are joined, unless there is a
            checkpoint.
        checkpoint: A folder, or a `ritz.Checkpoint`, for the results of the batches. After a kill, the same call
            resumes, and on a CPU the result is bitwise the same.

    Raises:
        ValueError: If an argument is wrong, or the checkpoint is that of another call.
        StoppedError: If the run is stopped (`ritz.stoppable`) before the last batch.
        UnsupportedError: For BatchNorm in train mode, a `batch_loss` risk or a shuffling loader, where a sample has no
            trace or no position; and for "exact" if the network is not affine in each single weight.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> X, y = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.zeros(2, 1)
        >>> traces = sample_traces(ritz.Risk(model, torch.nn.MSELoss(), (X, y)))
        >>> traces.value.tolist(), traces.exact  # 2 ||x||^2
        ([10.0, 18.0], True)
    """
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    refuse_coupled(risk)
    risk.batches.prepare()
    if not risk.batches.ordered:
        raise UnsupportedError(
            "one number per sample needs data in a fixed order, and this loader shuffles; fix one order with "
            "data=list(loader), or switch shuffling off"
        )
    risk.check()
    passes, why_not = 0, None
    if method != "probes":
        passes, why_not = _exactness(risk, math.inf if method == "exact" else _WORTH * num_probes)
        if why_not is not None and method == "exact":
            raise UnsupportedError(f"no exact sample traces: {why_not}; use method='probes'")
    exact = method != "probes" and why_not is None
    settings = {"exact": exact, "num_probes": num_probes, "seed": seed}
    with resumable(checkpoint, risk, "sample_traces", settings) as saved:
        found: Estimate | None = saved.result
        if found is None:
            walks = Walks(saved)
            found = (
                _exact_samples(risk, passes, walks, progress, join=checkpoint is None) if exact
                else _probed_samples(risk, num_probes, seed, walks, progress)
            )  # fmt: skip
            saved.finish(found)
    return found


def _exactness(risk: Risk, most_roots: float) -> tuple[int, str | None]:
    """Backward passes for the GGN, and why its trace is not that of the Hessian, or too dear; None where it is fine."""
    linearity = multi_affine(risk)
    if not linearity.holds:
        return 0, linearity.reason
    try:
        refuse_unreal(risk)
    except UnsupportedError as error:
        return 0, str(error)
    num = num_roots(risk)
    return num, f"it would take {num} backward passes" if num > most_roots else None


def _exact_samples(risk: Risk, num: int, walks: Walks, progress: Progress | None, join: bool) -> Estimate:
    stack = stack_size(risk, num)
    walked = joined(risk, stack) if join else risk
    loss, squares = risk.output_loss, SquaredNorms(walked)

    def piece_traces(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        found, out = squares(params, batch, lambda out: loss.roots(out, batch.data, stack))
        weight = sample_weights(loss, out, batch).double()
        own = torch.where(weight != 0, found.sum(1) / weight.where(weight != 0, 1.0), 0.0)
        return torch.stack([own, weight], dim=1), weight.sum()

    each = squares.replayed(piece_traces, ("traces", stack))

    def traces(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        return Concat().join([each(params, own) for own in fitting_pieces(walked, params, batch, stack)])

    value, weight = walks.fold(walked, traces, Concat(), progress).cpu().unbind(1)
    _refuse_non_finite(value)
    how = f"exact, {num} backward passes"
    zero = torch.zeros_like(value)
    return Estimate(
        name="sample traces", value=value, stderr=zero, exact=True, products=num, rule=Exact(),
        convention=_convention(risk, how, weight),
    )  # fmt: skip


def _probed_samples(risk: Risk, num_probes: int, seed: int, walks: Walks, progress: Progress | None) -> Estimate:
    products = SampleProducts(risk)
    rows = risk.space.probes(range(num_probes), seed, dtype=risk.dtype, device=risk.device)
    products.settle(rows[:2])  # by the first batch, wherever the walk is gone on with

    def forms(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        weight = sample_weights(risk.output_loss, risk.output(params, batch), batch)
        return torch.cat([products(params, batch, rows).T, weight[:, None]], dim=1).double(), weight.sum()

    columns: Tensor = walks.fold(risk, forms, Concat(), progress).cpu()  # (N, probes + 1)
    samples, weight = columns[:, :-1].T.contiguous(), columns[:, -1]
    _refuse_non_finite(samples.sum(0))
    spread = samples.std(0) if num_probes > 1 else torch.full_like(weight, math.nan)
    how = f"{num_probes} probes of random signs, {products.route} route"
    return Estimate(
        name="sample traces", value=samples.mean(0), stderr=spread / math.sqrt(num_probes), samples=samples,
        products=num_probes, seed=seed, rule=StudentT(num_probes - 1), convention=_convention(risk, how, weight),
    )  # fmt: skip


def _convention(risk: Risk, how: str, weight: Tensor) -> str:
    """What the numbers mean, the samples without weight included."""
    empty = int((weight == 0).sum())
    note = f"; {empty} samples have weight 0 and get trace 0" if empty else ""
    mode = f"{risk.mode} mode, {str(risk.dtype).removeprefix('torch.')}"
    return f"trace of the Hessian of each sample's own loss (its total / its weight), {how}, {mode}{note}"


def _refuse_non_finite(values: Tensor) -> None:
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        raise NonFiniteError(
            f"the trace of sample {int(bad[0])} is not finite, though its loss is; try dtype=torch.float64, and look "
            "for a square root or a norm at zero"
        )
