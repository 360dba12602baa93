"""Any callable as a loss, with derivatives by autograd."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batches import Batch, num_samples, tensors_of
from ..errors import UnsupportedError
from ..memory import is_shortage
from .base import Items, Kind, Target, Uniforms, counted, default_target, dot, gradient

_NO_LIKELIHOOD = (
    "the Fisher matrix needs a likelihood to draw labels from: cross-entropy, squared error or binary cross-entropy; "
    "for any other loss use ritz.GGN or ritz.EmpiricalFisher"
)


@dataclass(frozen=True, eq=False)
class CallableLoss:
    """Any callable(output, target) that returns the mean over samples; derivatives in the outputs by autograd.

    Example:
        >>> loss = CallableLoss(lambda out, y: (out - y).abs().pow(3).mean())
        >>> out, batch = torch.tensor([[2.0]]), (None, torch.zeros(1, 1))
        >>> float(loss.total(out, batch)), float(loss.middle("ggn", out, batch, torch.ones(1, 1)))
        (8.0, 12.0)
    """

    function: Callable[[Tensor, Tensor], Tensor]
    target: Target = default_target
    separable = True
    convex = False  # unknown

    def weight(self, out: Tensor, batch: Any) -> Tensor:
        """The number of samples."""
        return counted(out)

    def check(self, out: Tensor, batch: Any) -> None:
        """Refuse outputs with time before samples, if shapes show it: a batch would weigh as much as it has steps.

        If the first dimension is neither samples nor time, such as all tokens in a row, there are as many targets.
        """
        size = num_samples(batch)
        if out.ndim < 2 or out.shape[1] != size or len(out) == size:
            return
        if not any(y.ndim and len(y) == len(out) for y in tensors_of(self.target(batch))):
            raise ValueError(
                f"outputs {tuple(out.shape)} for {size} samples seem to have the samples in the second dimension, but "
                "the mean over a batch is weighted by the length of the first; put samples first in forward=lambda "
                "model, batch: ..., and transpose the outputs inside the loss"
            )

    def total(self, out: Tensor, batch: Any) -> Tensor:
        """The mean times the number of samples."""
        y = self.target(batch)
        value = self.function(out, y)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the loss must return one number, the mean over the batch, got {got}")
        ignore = getattr(self.function, "ignore_index", getattr(self.function, "keywords", {}).get("ignore_index"))
        if ignore is not None and any(bool((x == ignore).any()) for x in tensors_of(y) if not x.is_floating_point()):
            raise ValueError(
                "this loss ignores some targets, which are weighted right only by nn.CrossEntropyLoss; use that on the "
                "logits"
            )
        return value.reshape(()) * len(out)

    def _gradient(self, out: Tensor, batch: Any) -> Tensor:
        """Gradient of the total in the outputs; row i is that of sample i alone, because the total is a sum."""
        return gradient(lambda o: self.total(o, batch), out)

    def middle(self, kind: Kind, out: Tensor, batch: Any, u: Tensor, draws: Tensor | None = None) -> Tensor:
        """The loss Hessian by autograd for "ggn"; g (g . u) for "empirical"."""
        if kind == "ggn" and (isinstance(self.function, nn.NLLLoss) or self.function is F.nll_loss):
            raise UnsupportedError(
                "NLLLoss is linear in its input, so its Gauss-Newton matrix is zero; take log_softmax out of the model "
                "and use nn.CrossEntropyLoss"
            )
        if kind == "ggn":
            # reverse mode twice works for more operations than forward over reverse (torch's Huber losses)
            image: Tensor = torch.func.vjp(lambda o: self._gradient(o, batch), out)[1](u)[0]
            return image
        if kind == "empirical":
            g = self._gradient(out, batch)
            return g * dot(g, u, tuple(range(1, out.ndim)))
        raise UnsupportedError(_NO_LIKELIHOOD)

    def num_roots(self, out: Tensor, batch: Any) -> int:
        """The number of outputs, D."""
        return math.prod(out.shape[1:])

    def roots(self, out: Tensor, batch: Any, chunk: int) -> Iterator[Tensor]:
        """Scaled eigenvectors of every sample's D x D loss Hessian."""
        num = math.prod(out.shape[1:])
        eye = torch.eye(num, dtype=out.dtype, device=out.device)
        units = eye[:, None].expand(num, len(out), num).reshape(num, *out.shape)
        columns = torch.stack([self._column(out, batch, unit) for unit in units])
        hessians = columns.reshape(num, len(out), num).permute(1, 2, 0)
        wide = torch.promote_types(out.dtype, torch.float32)  # eigh does not support 16-bit numbers
        values, vectors = torch.linalg.eigh(((hessians + hessians.mT) / 2).to(wide))
        round_off = max(1e-6, 8 * torch.finfo(out.dtype).eps)
        if bool((values < -round_off * values.abs().amax()).any()):
            raise UnsupportedError("this loss is not convex in the outputs: its Hessian has no real roots; use probes")
        scaled = vectors * values.clamp(min=0).sqrt()[:, None]  # (batch, D, roots)
        for part in scaled.permute(2, 0, 1).split(chunk):
            yield part.reshape(len(part), *out.shape).to(out.dtype)

    def _column(self, out: Tensor, batch: Any, unit: Tensor) -> Tensor:
        """One column of every sample's loss Hessian."""
        try:
            return self.middle("ggn", out, batch, unit)
        except RuntimeError as error:
            if is_shortage(error):
                raise
            why = str(error).partition("\n")[0][:200]
            raise UnsupportedError(
                f"this loss has no second derivative in the outputs ({why}), and therefore no roots; use probes for "
                "the Hessian, or the empirical Fisher matrix"
            ) from error

    def draw(self, out: Tensor, batch: Any, uniforms: Uniforms) -> Tensor:
        """Not supported: a callable is not a likelihood."""
        raise UnsupportedError(_NO_LIKELIHOOD)

    def items(self, out: Tensor, batch: Any) -> Items:
        """The loss of every item, from a call of the function for each."""
        each = Batch(self.target(batch), 0, 0, len(out)).pieces(1)
        loss = torch.stack(
            [self.function(row, own.data).reshape(()) for row, own in zip(out.split(1), each, strict=True)]
        )
        return Items(loss, torch.ones_like(loss))
