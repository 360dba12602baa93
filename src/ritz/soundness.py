"""Whether a risk is one: looked at before any product is taken.

A curvature matrix is a mean over items of what each gives. So weights and losses must be finite, the loss must add up
over the items of a batch, a forward pass must repeat itself, and nothing may reach the loss beside the outputs.
"""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batches import Batch
from .diagnoses import origin
from .errors import NonFiniteError, RitzError, UnsupportedError
from .memory import is_shortage
from .modes import ForwardWatch
from .reducers import Mean

if TYPE_CHECKING:
    from .risk import Params, Risk

log = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
_MATH_KERNEL = "attention by the math kernel"
_WEIGHTLESS = "items of class weight 0 counted, by label smoothing, in sums and not in numbers of single items"


def examine(risk: "Risk") -> tuple[tuple[str, ...], float, torch.dtype, bool]:
    """Refuse a risk that is not sound; costs one forward pass over the data.

    Returns:
        What is to be said with every number of it, the weight of all its items, the dtype of fewest digits, and whether
        some of the items have no weight.

    Raises:
        NonFiniteError: If a weight or the loss of a batch is not finite.
        UnsupportedError: If a forward pass is random or writes to weights, or the loss reads weights by itself.
        ValueError: If the loss does not add up, or all weights of samples are 0.
    """
    _refuse_other_weights(risk)
    masks = {name for name, _ in risk.model.named_buffers() if not name.endswith(("running_mean", "running_var"))}
    for name, tensor in risk.state().items():
        # a buffer may well be infinite, as a causal mask is, but not the statistics of a normalisation
        if bool(tensor.isnan().any() if name in masks else (~tensor.isfinite()).any()):
            raise NonFiniteError(f"{name} is not finite; the network has diverged, load other weights")
    if risk.mode == "train" and not _is_settled(risk):
        raise UnsupportedError(
            "mode='train' with a shuffling loader: with batch statistics the batches are part of the function; "
            "fix them with data=list(loader)"
        )
    look, mean = _Look(risk), Mean()
    risk.fold(look.total, mean)
    if mean.weight is None or not float(mean.weight) > 0:
        raise ValueError("the weights of the samples add up to 0: every target is ignored")
    notes = dict.fromkeys((*look.notes, *([_WEIGHTLESS] if risk.world.any(look.weightless) else [])))
    partly = risk.world.any(look.partly)
    return risk.world.first((tuple(notes), float(mean.weight), look.coarsest, partly))


def _refuse_other_weights(risk: "Risk") -> None:
    """Ranks are to be at one point."""
    if risk.world.size == 1:
        return
    state = risk.state()
    sums = risk.world.gather([float(t.double().abs().sum()) for t in state.values()])
    for rank, own in enumerate(sums):
        for name, here, there in zip(state, sums[0], own, strict=True):
            if abs(here - there) > 1e-9 * abs(here):
                raise ValueError(
                    f"rank {rank} and rank 0 have different weights, first in {name}; load the same on every rank, or "
                    "give group='self' if each rank studies its own network"
                )


def _is_settled(risk: "Risk") -> bool:
    """Whether the order of the data is known to be the same on every walk (counts and caches on first use)."""
    if not risk.batches.ordered:
        risk.batches.prepare()
    return bool(risk.batches.ordered)


class _Look:
    """A walk over the batches with a look at each, and a closer one at the first."""

    def __init__(self, risk: "Risk") -> None:
        self.risk, self.notes, self.coarsest = risk, risk.notes, risk.dtype
        self.weightless = self.partly = False

    def total(self, params: "Params", batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and weight of a batch, or of a piece of one, after a look at them."""
        first = batch.start == 0 and not self.risk.sharded  # whose ranks go in step: one look each
        total, weight = self._watched(params, batch) if first else self._summed(params, batch)
        total = total.detach()
        if total.ndim:
            raise ValueError(f"the loss of a batch must be one number, got shape {tuple(total.shape)}")
        if not bool(torch.isfinite(total)):
            raise NonFiniteError(
                f"the loss of batch {batch.index} (samples {batch.start} to {batch.start + batch.size - 1}) is "
                f"{float(total)}: {origin(self.risk, params, batch)}; fix the data, load other weights, or use a "
                "wider dtype"
            )
        if not float(weight) >= 0:
            raise ValueError(f"the weight of batch {batch.index}, a count of items, must be >= 0, got {float(weight)}")
        if first:
            self._check_repeats(params, batch, total, weight)
            if self.risk.splittable and batch.size > 1:
                self._check_halves(params, batch, total, weight)
        return total, weight

    def _summed(self, params: "Params", batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and weight, and a look at values that products do not repeat: labels that are no class."""
        if self.risk.opaque:
            return self.risk.total_and_weight(params, batch)
        out, loss = self.risk.output(params, batch), self.risk.output_loss
        if hasattr(loss, "check"):
            loss.check(out, batch.data)
        if hasattr(loss, "weightless"):
            self.weightless = self.weightless or loss.weightless(out, batch.data)
        if hasattr(loss, "leaves_out"):
            self.partly = self.partly or loss.leaves_out(out, batch.data)
        return loss.total(out, batch.data), loss.weight(out, batch.data)

    def _watched(self, params: "Params", batch: Batch) -> tuple[Tensor, Tensor]:
        """The first batch, watched: fused attention, casts to fewer digits, and writes to weights, which are copies."""
        state = self.risk.state()
        copies = {name: state[name].clone() for name, _ in self.risk.model.named_parameters()}
        with ForwardWatch(self.risk.dtype) as watch:
            result = self._summed(copies, batch)
        self.coarsest = watch.coarsest
        for name, copy in copies.items():
            if not torch.equal(copy, state[name]):
                raise UnsupportedError(
                    f"the forward pass writes to {name}, but a measurement must not change weights; constrain them "
                    "after the steps of the optimiser, or with torch.nn.utils.parametrize"
                )
        self._refuse_other_paths(copies, batch)
        if watch.attends and not self.notes:
            self.notes = (_MATH_KERNEL,)
            log.info("attention runs through the math kernel inside products: fused ones have no second derivative")
        return result

    def _refuse_other_paths(self, params: "Params", batch: Batch) -> None:
        """Refuse a loss that reads the weights by itself: that part of it would be a constant in every product.

        And outputs that do not depend on the weights as far as derivatives go: all products would be 0.
        """
        if self.risk.opaque:
            return
        leaves = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in params.items()}
        try:
            with torch.enable_grad():
                out = self.risk.output(leaves, batch)
        except RuntimeError:  # one that cannot be differentiated has outputs all the same; products say why
            out = self.risk.output(params, batch)
        else:
            if not out.requires_grad:
                raise UnsupportedError(
                    "the outputs have no derivative with respect to any parameter, so every curvature would be 0; look "
                    "in the forward pass for torch.no_grad, inference_mode, .detach(), .data, argmax or NumPy"
                )
        with torch.enable_grad():
            total = self.risk.output_loss.total(out.detach(), batch.data)
        if total.requires_grad:
            raise UnsupportedError(
                "the loss uses weights besides the outputs (a penalty, for example), and products would miss this "
                "part; give batch_loss=lambda model, batch: (sum, weight), with the penalty computed from that model"
            )

    def _check_repeats(self, params: "Params", batch: Batch, total: Tensor, weight: Tensor) -> None:
        again = self.risk.total(params, batch).detach()
        if abs(float(again - total)) > self._slack(1.0, weight, float(total)):
            raise UnsupportedError(
                f"the same batch gave loss {float(total):.8g}, then {float(again):.8g}: the forward pass is random; "
                "dropout modules are switched off, so look for noise or functional dropout with training=True; with "
                "dropout=True, a batch has the same random numbers in all products"
            )

    def _check_halves(self, params: "Params", batch: Batch, total: Tensor, weight: Tensor) -> None:
        try:
            halves = [self.risk.total_and_weight(params, half) for half in batch.pieces((batch.size + 1) // 2)]
        except (RuntimeError, LookupError, TypeError, ValueError, AssertionError) as error:
            if is_shortage(error) or isinstance(error, RitzError):
                raise
            raise ValueError(
                f"the model takes a batch of {batch.size} samples, but not half of it ({str(error)[:160]}). If it "
                "couples the samples of a batch, for example by edges, there is no mean over samples: give batch_loss= "
                "(sum, weight). If only its inputs cannot be cut, like nodes and edges of several graphs, use "
                "mode='train', which keeps batches whole. If torch.export made it for this size, export it with a "
                "dynamic batch dimension"
            ) from error
        totals = [float(t.detach()) for t, _ in halves]
        parts = sum(totals)
        if abs(parts - float(total)) <= self._slack(1e3, weight, float(total), *totals):
            return
        if all(float(w) == float(weight) for _, w in halves):
            raise ValueError(
                f"half of a batch has the same weight as all of its {batch.size} samples, {float(weight):g}: the first "
                "dimension of the outputs, whose length is the weight, seems not to be the samples; put samples first "
                "in forward=lambda model, batch: ..., and transpose the outputs inside the loss"
            )
        means = [t / float(w) if w else 0.0 for t, (_, w) in zip(totals, halves, strict=True)]
        if abs(sum(means) - float(total / weight)) <= 1e-3 * abs(float(total / weight)):
            raise ValueError(
                "the loss looks like a sum over the batch; return the mean, ritz weights batches by their size"
            )
        raise ValueError(
            f"the loss does not add up over samples: a batch of {batch.size} gives {float(total):.8g}, its two halves "
            f"{parts:.8g}. A loss or model that couples the samples of a batch has no mean over samples; give it as "
            "batch_loss= (sum, weight), or use mode='train' if BatchNorm couples them"
        )

    def _slack(self, factor: float, weight: Tensor, *totals: float) -> float:
        """Round-off between two ways to the same sum; an item of a fitted network may be all round-off."""
        dtype, sizes = self.coarsest, sum(abs(t) for t in totals)
        return factor * _TOLERANCE.get(dtype, 1e-2) * sizes + 16 * torch.finfo(dtype).eps * float(weight)
