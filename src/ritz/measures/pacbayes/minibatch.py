"""The metric of seed 002 from one mini-batch, with an error bar, which a single probe would not give."""

import torch
from torch import Tensor

from ...batches import Batch
from ...errors import UnsupportedError
from ...estimators.squares import SquaredNorms, sample_weights
from ...linearity import multi_affine
from ...losses import Loss
from ...operators.base import full_precision
from ...reducers import Concat
from ...results import Estimate
from ...risk import Params, Risk
from ...space import random_uniform, row_norms
from ..gap import bootstrapped
from .laplace import MetricConvention, check_convention, metric_a

_MOST_ROOTS = 1 << 30  # elements of all cotangents of a batch; above this, labels are drawn instead


@full_precision()
def minibatch_metric(
    risk: Risk, batch_size: int = 128, seed: int = 0, *, convention: MetricConvention = "table"
) -> Estimate:
    """The metric `a` of seed 002 from one mini-batch, at the cost of about one step of training, with an error bar.

    One Hutchinson probe gives no variance. Samples do: for a network that is affine in each single weight, let the
    Hessian of a sample's loss in its outputs be sum_c r_c r_c', with roots r_c, and let s_c be random signs. Then

        Tr H = E_i E_s | sum_c s_c J_i' r_c |^2

    is a mean over samples, without bias, that takes one backward pass for a whole batch (equation 11). Labels drawn
    from the model instead of signs have the same mean, but if the network is sure, it comes from labels so rare that a
    batch of 128 hardly contains one (for a network fitted to handwritten digits, the 95 % interval from labels covers
    11 % of the time, that from signs 92 %). They are used if a sample has too many outputs for signs. For a network
    that is not affine in each single weight, the trace is that of the GGN.

    Args:
        risk: The solution; its data is sampled without replacement.
        batch_size: Number of samples; all samples if there are fewer.
        seed: Seed of the batch and of the signs.
        convention: See `metric_a`.

    Raises:
        UnsupportedError: If single samples have no curvature (batch statistics, dropout, an opaque loss).

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> X, y = torch.tensor([[1.0, 2.0], [2.0, 1.0], [-1.0, 2.0]]), torch.zeros(3, 1)
        >>> a = minibatch_metric(ritz.Risk(model, torch.nn.MSELoss(), (X, y)), convention="eq7")
        >>> round(a.value, 4), a.parts["trace"].value  # Tr H = 2 |x|^2, the same for all three
        (11.0, 10.0)
    """
    check_convention(convention)
    loss = risk.output_loss
    if not risk.splittable:
        raise UnsupportedError(
            "with batch statistics or dropout a single sample has no curvature; use mode='eval' and no dropout"
        )
    size = min(batch_size, risk.num_samples)
    if size < 2:
        raise ValueError(f"an error bar needs at least 2 samples, got batch_size={batch_size} and {size} samples")
    with torch.inference_mode(False):  # derivatives of single samples are needed
        part = risk.on([risk.batches.sample(1, size, seed)[0].data])
    part.check()
    squares, how = SquaredNorms(part), ""

    def forms(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        def cotangents(out: Tensor) -> list[Tensor]:
            nonlocal how
            cotangent, how = _random_root(loss, out, batch, seed)
            return [cotangent[None]]

        found, out = squares(params, batch, cotangents)
        weight = sample_weights(loss, out, batch).double()
        return torch.stack([found.sum(1), weight], dim=1), weight.sum()

    totals, weight = part.fold(forms, Concat()).cpu().unbind(1)
    trace = float(totals.sum() / weight.sum())
    # the influence of each sample on the ratio: their mean is the trace, their spread its error
    samples = trace + size * (totals - trace * weight) / weight.sum()
    with torch.inference_mode(False):
        linearity = multi_affine(part)
    matrix = "Tr H = Tr GGN" if linearity.holds else f"Tr GGN, not Tr H ({linearity.reason})"
    text = f"{matrix}, one backward pass with {how}, {size} of the samples; {risk.convention()}"
    estimate = bootstrapped("trace", samples, seed=seed, convention=text)
    norm = float(row_norms(risk.space.join(risk.params())[None].double()))
    told = {"seed": seed, "products": 1, "parts": {"trace": estimate}}
    return metric_a(estimate, norm, risk.dim, convention=convention, **told)


def _random_root(loss: Loss, out: Tensor, batch: Batch, seed: int) -> tuple[Tensor, str]:
    """A cotangent c (*out.shape), independent between samples, with E[c c'] the loss Hessian; and its description."""

    def uniforms(count: int, stream: str) -> Tensor:
        start = batch.start * (count // batch.size)  # keyed by position: the same however a batch is split
        return random_uniform(count, ("random root", seed, stream), out.device, start)

    num = loss.num_roots(out, batch.data)
    if num * out.numel() > _MOST_ROOTS:
        return loss.draw(out, batch.data, uniforms), "drawn labels"
    signs = torch.where(uniforms(num * len(out), "sign") < 0.5, -1.0, 1.0).reshape(len(out), num).T.to(out)
    total, done = torch.zeros_like(out), 0
    for stack in loss.roots(out, batch.data, 64):
        own = signs[done : done + len(stack)]
        total += (own.reshape(*own.shape, *[1] * (out.ndim - 1)) * stack).sum(0)
        done += len(stack)
    return total, "random signs"
