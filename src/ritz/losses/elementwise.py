"""Squared error and binary cross-entropy: functions of one output at a time, so their Hessians are diagonal."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import (
    Items,
    Kind,
    Target,
    Uniforms,
    counted,
    default_target,
    dot,
    gradient,
    outer_mean,
    signed_margin,
    summed,
)


class _Elementwise(ABC):
    """The mean over D outputs of a function of one output: a diagonal Hessian. Each sample is one item."""

    target: Target
    separable = True
    convex = True

    def _rows(self, out: Tensor, batch: Any) -> tuple[Tensor, Tensor, int]:
        """Outputs and targets as (batch, D), and D."""
        y = self.target(batch)
        if out.shape != y.shape:
            raise ValueError(
                f"{type(self).__name__}: targets {tuple(y.shape)} must have the shape of the outputs {tuple(out.shape)}"
            )
        rows = out.reshape(len(out), -1)
        return rows, y.to(out).reshape(rows.shape), rows.shape[1]

    @abstractmethod
    def _loss(self, out: Tensor, batch: Any) -> Tensor:
        """Loss of every sample, (batch,)."""

    @abstractmethod
    def _curvature(self, out: Tensor, batch: Any) -> Tensor:
        """Diagonal of the loss Hessian, (batch, D)."""

    def weight(self, out: Tensor, batch: Any) -> Tensor:
        """The number of samples."""
        return counted(out)

    def total(self, out: Tensor, batch: Any) -> Tensor:
        """Sum over samples of the mean over outputs."""
        return summed(self._loss(out, batch))

    def middle(self, kind: Kind, out: Tensor, batch: Any, u: Tensor, draws: Tensor | None = None) -> Tensor:
        """The diagonal times u for "ggn"; c (c . u) for the others."""
        if kind == "ggn":
            return (self._curvature(out, batch) * u.reshape(len(out), -1)).reshape(out.shape)
        over = tuple(range(1, out.ndim))
        if kind == "fisher":
            return outer_mean(draws, u, over)
        g = gradient(lambda o: self.total(o, batch), out)
        return g * dot(g, u, over)

    def num_roots(self, out: Tensor, batch: Any) -> int:
        """The number of outputs, D."""
        return math.prod(out.shape[1:])

    def roots(self, out: Tensor, batch: Any, chunk: int) -> Iterator[Tensor]:
        """The root of the diagonal, one output at a time."""
        size = self._curvature(out, batch).sqrt()
        for places in torch.arange(size.shape[1], device=out.device).split(chunk):
            one_hot = F.one_hot(places, size.shape[1]).to(out)  # (chunk, D)
            yield (one_hot[:, None] * size).reshape(len(places), *out.shape)

    def items(self, out: Tensor, batch: Any) -> Items:
        """Loss and weight of every sample."""
        loss = self._loss(out, batch)
        return Items(loss, torch.ones_like(loss))


@dataclass(frozen=True, eq=False)
class SquaredError(_Elementwise):
    """Mean squared error as nn.MSELoss: mean over the D outputs of a sample; Hessian 2/D I.

    Example:
        >>> loss, out = SquaredError(), torch.tensor([[1.0, 3.0]])
        >>> float(loss.total(out, (None, torch.zeros(1, 2)))), loss.middle("ggn", out, (None, out), out).tolist()
        (5.0, [[1.0, 3.0]])
    """

    target: Target = default_target

    def _loss(self, out: Tensor, batch: Any) -> Tensor:
        rows, y, _ = self._rows(out, batch)
        return (rows - y).square().mean(-1)

    def _curvature(self, out: Tensor, batch: Any) -> Tensor:
        rows, _, num = self._rows(out, batch)
        return torch.full_like(rows, 2 / num)

    def draw(self, out: Tensor, batch: Any, uniforms: Uniforms) -> Tensor:
        """sqrt(2/D) times a normal vector: the model is a normal distribution of variance D/2."""
        radius = uniforms(out.numel(), "radius").log().mul(-2).sqrt()
        normal = radius * uniforms(out.numel(), "angle").mul(2 * math.pi).cos()
        return normal.reshape(out.shape).to(out) * math.sqrt(2 * len(out) / out.numel())


@dataclass(frozen=True, eq=False)
class BinaryCrossEntropy(_Elementwise):
    """nn.BCEWithLogitsLoss with element weights and `pos_weight`; Hessian w (1 + (pos - 1) y) p (1 - p) / D.

    Example:
        >>> loss, out = BinaryCrossEntropy(), torch.zeros(1, 1)
        >>> loss.middle("ggn", out, (None, torch.ones(1, 1)), torch.ones(1, 1)).item()
        0.25
    """

    element_weight: Tensor | None = None
    pos_weight: Tensor | None = None
    target: Target = default_target

    def _sides(self, out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Weights of the positive and the negative side of each element, divided by D: (batch, D) each."""
        rows, y, num = self._rows(out, batch)
        w, pos = (self._spread(weight, out).reshape(rows.shape) for weight in (self.element_weight, self.pos_weight))
        return w * pos * y / num, w * (1 - y) / num

    def _spread(self, weight: Tensor | None, out: Tensor) -> Tensor:
        """A weight in the shape of the outputs; it must be the same for all samples, whose places may change."""
        if weight is None:
            return torch.ones_like(out)
        if weight.ndim > out.ndim or (weight.ndim == out.ndim and len(weight) != 1):
            raise ValueError(
                f"BCEWithLogitsLoss has weights {tuple(weight.shape)} for outputs {tuple(out.shape)}, which differ "
                "between the samples of a batch; put them into the data and give the loss as batch_loss="
            )
        return weight.to(out).expand(out.shape)

    def _loss(self, out: Tensor, batch: Any) -> Tensor:
        positive, negative = self._sides(out, batch)
        rows = out.reshape(len(out), -1)
        return (positive * F.softplus(-rows) + negative * F.softplus(rows)).sum(-1)

    def _curvature(self, out: Tensor, batch: Any) -> Tensor:
        positive, negative = self._sides(out, batch)
        p = out.reshape(len(out), -1).sigmoid()
        return (positive + negative) * p * (1 - p)

    def items(self, out: Tensor, batch: Any) -> Items:
        """Loss and weight; with one output and hard labels also two classes with logits (0, f), and their margins."""
        items = super().items(out, batch)
        rows, y, num = self._rows(out, batch)
        if num != 1 or not bool(((y == 0) | (y == 1)).all()):
            return items
        logits, label = torch.cat([torch.zeros_like(rows), rows], dim=1), y[:, 0].long()
        return Items(items.loss, items.weight, signed_margin(logits, label), logits.softmax(-1), logits, label)

    def draw(self, out: Tensor, batch: Any, uniforms: Uniforms) -> Tensor:
        """sqrt(weight / D) (p - y) with y drawn from p."""
        positive, negative = self._sides(out, batch)
        p = out.reshape(len(out), -1).sigmoid()
        label = (uniforms(p.numel(), "label").reshape(p.shape).to(p) < p).to(p)
        return ((positive + negative).sqrt() * (p - label)).reshape(out.shape)
