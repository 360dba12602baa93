"""What a trace penalty knows of its loss: its sum, random roots of its Hessian, and what its mean divides by."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["cross_entropy", "mse", "bce"]

IGNORED = -100  # torch's label of an item that does not count


@dataclass(frozen=True)
class OutputLoss:
    """A loss of torch's by its name, as a function of outputs that can be differentiated any number of times.

    Attributes:
        name: Which loss.
        class_dim: Where an output has its classes; None where nothing was said of it.

    Example:
        >>> OutputLoss("mse").total(torch.zeros(2), torch.ones(2)).item()
        2.0
    """

    name: LossName
    class_dim: int | None = None

    @property
    def classes(self) -> int:
        """Where an output has its classes, if it has some."""
        return 1 if self.class_dim is None else self.class_dim

    def labels(self, y: Tensor | None) -> Tensor | None:
        """Targets that tell which items count; all others are of no use to the GGN."""
        return y if y is not None and self.name == "cross_entropy" and not y.is_floating_point() else None

    def num_items(self, like: Tensor) -> Tensor | float:
        """What torch's mean divides by, from the targets or from the outputs of a batch."""
        if self.name != "cross_entropy":
            return float(like.numel())
        if not like.is_floating_point():
            return (like != IGNORED).sum().clamp(min=1)
        return like.numel() / like.shape[self.classes]

    def check_output(self, out: Tensor, labels: Tensor | None) -> None:
        """Refuse outputs of which it is not known where their classes are, or that have none."""
        if self.name != "cross_entropy":
            return
        if out.ndim < 2:
            raise ValueError(f"cross-entropy needs outputs (batch, classes, ...), got {tuple(out.shape)}")
        if self.class_dim is None and labels is None and out.ndim > 2:
            raise ValueError(
                f"without labels, the dimension of the classes in outputs {tuple(out.shape)} is unknown: give labels, "
                "or TracePenalty(..., class_dim=-1) for (batch, tokens, classes), class_dim=1 for images"
            )
        if not -out.ndim <= self.classes < out.ndim:
            raise ValueError(f"outputs {tuple(out.shape)} have no dimension {self.classes}; give another class_dim=")
        if out.shape[self.classes] == 1:
            raise ValueError("cross-entropy of one class has no curvature; a binary network has loss='bce'")

    def random_root(self, out: Tensor, signs: Tensor, labels: Tensor | None = None) -> Tensor:
        """r (*out.shape) with E[r r'] the Hessian of the SUM over items in the outputs; differentiable, also at p = 0.

        Cross-entropy: sum_c s_c sqrt(p_c) (e_c - p); squared error: sqrt(2) s; binary: s sqrt(p (1 - p)). Roots of
        probabilities come from their logarithms: the derivative of a square root at 0 is infinite, that of exp is not.
        """
        root = self._root(wide(out), signs)
        if labels is None:
            return root
        self._check_labels(labels, out)
        return root * (labels != IGNORED).unsqueeze(self.classes)

    def _root(self, f: Tensor, signs: Tensor) -> Tensor:
        signs = signs.to(f)
        if self.name == "mse":
            return math.sqrt(2) * signs
        if self.name == "bce":
            return signs * ((F.logsigmoid(f) + F.logsigmoid(-f)) / 2).exp()
        log_p = f.log_softmax(self.classes)
        pulled = signs * (log_p / 2).exp()
        return pulled - log_p.exp() * pulled.sum(self.classes, keepdim=True)

    def total(self, out: Tensor, y: Tensor) -> Tensor:
        """The loss summed over items, at least float32."""
        out = wide(out)
        if y.is_floating_point() or self.name != "cross_entropy":
            if y.shape != out.shape:
                raise ValueError(f"targets {tuple(y.shape)} must have the shape of the outputs {tuple(out.shape)}")
        else:
            self._check_labels(y, out)
        if self.name == "mse":
            return F.mse_loss(out, y.to(out), reduction="sum")
        if self.name == "bce":
            return F.binary_cross_entropy_with_logits(out, y.to(out), reduction="sum")
        target = y.movedim(self.classes, 1).to(out) if y.is_floating_point() else y.long()
        return F.cross_entropy(out.movedim(self.classes, 1), target, ignore_index=IGNORED, reduction="sum")

    def _check_labels(self, labels: Tensor, out: Tensor) -> None:
        if labels.shape != out.select(self.classes, 0).shape:
            raise ValueError(
                f"labels {tuple(labels.shape)} do not fit outputs {tuple(out.shape)} with classes in dimension "
                f"{self.classes}; give the right one: TracePenalty(..., class_dim=...)"
            )


def wide(x: Tensor) -> Tensor:
    """At least float32.

    Example:
        >>> wide(torch.ones(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
