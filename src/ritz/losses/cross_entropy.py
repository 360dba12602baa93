"""Softmax cross-entropy, in closed form."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Items, Kind, Target, Uniforms, default_target, gradient, outer_mean, signed_margin, summed

PIECE = 1 << 22  # logits in one piece, so that a product needs little memory besides its result


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """Softmax cross-entropy, as nn.CrossEntropyLoss: class weights, ignore_index, label smoothing, soft targets.

    Item i has loss w_i (-log p_y) and weight w_i = weight[y_i], 0 if y_i is `ignore_index`. Its Hessian in the logits
    is s_i (diag(p) - p p') with s_i the sum of its (smoothed, weighted) target. If a class has weight 0 and labels are
    smoothed, the loss of its items from smoothing is part of the sum, as in torch, but of no per-item number.

    Args:
        class_dim: Dimension of the classes. None uses torch's, 1, for (B, C, ...), or the last, for language
            models' (B, T, C) with targets (B, T).

    Example:
        >>> loss = CrossEntropy()
        >>> out, batch = torch.zeros(1, 2), (None, torch.tensor([0]))
        >>> round(float(loss.total(out, batch)), 4), loss.middle("ggn", out, batch, torch.tensor([[1.0, 0.0]])).tolist()
        (0.6931, [[0.25, -0.25]])
    """

    class_weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    class_dim: int | None = None
    target: Target = default_target
    separable = True
    convex = True

    def layout(self, out: Tensor, batch: Any) -> tuple[int, Tensor]:
        """The class dimension of `out` and the target of the batch, checked against each other."""
        dim, y = self._places(out, self.target(batch))
        if self.class_weight is not None and self.class_weight.shape != (out.shape[dim],):
            raise ValueError(
                f"class weights must have shape ({out.shape[dim]},), one for each class of the output, got "
                f"{tuple(self.class_weight.shape)}"
            )
        return dim, y

    def _places(self, out: Tensor, y: Tensor) -> tuple[int, Tensor]:
        """The dimension of the classes, and the target as labels or soft labels."""
        if out.ndim < 2:
            raise ValueError(
                f"cross-entropy needs outputs (batch, classes, ...), got {tuple(out.shape)}; give batches, not single "
                "samples, and for two classes with one logit use nn.BCEWithLogitsLoss()"
            )
        if y.is_floating_point():  # soft targets have the shape of the output
            if y.shape != out.shape:
                raise ValueError(
                    f"soft targets {tuple(y.shape)} must have the shape of the outputs {tuple(out.shape)}; if they are "
                    "labels, make them integers, y.long()"
                )
            return (1 if self.class_dim is None else self.class_dim % out.ndim), y
        fits = [d for d in range(1, out.ndim) if out.shape[:d] + out.shape[d + 1 :] == y.shape]
        if self.class_dim is not None:
            fits = [d for d in fits if d == self.class_dim % out.ndim]
        fits = [d for d in fits if d in (1, out.ndim - 1)]
        if not fits:
            raise ValueError(f"targets {tuple(y.shape)} do not fit outputs {tuple(out.shape)}; {self._wanted(out, y)}")
        if len(fits) > 1:
            raise ValueError(
                f"targets {tuple(y.shape)} fit outputs {tuple(out.shape)} with classes in dimension 1 and in the last; "
                "choose one: ritz.losses.CrossEntropy(class_dim=...)"
            )
        return fits[0], y.long()  # bytes would index as a mask

    def _wanted(self, out: Tensor, y: Tensor) -> str:
        """Which targets would fit."""
        if y.shape == out.shape:
            return "if they are one-hot, make them soft targets, y.float()"
        dims = {1, out.ndim - 1} if self.class_dim is None else {self.class_dim % out.ndim}
        shapes = " or ".join(str(tuple(out.shape[:d] + out.shape[d + 1 :])) for d in sorted(dims))
        return f"labels must have shape {shapes}, without a dimension for the classes"

    def _flat(self, x: Tensor, dim: int) -> Tensor:
        """(batch, ..., classes, ...) as (items, classes), items in sample order."""
        return x.movedim(dim, -1).flatten(0, -2)

    def _unflat(self, rows: Tensor, like: Tensor, dim: int) -> Tensor:
        """The inverse of `_flat`."""
        shape = like.movedim(dim, -1).shape
        return rows.reshape(shape).movedim(-1, dim)

    def _weights(self, out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Per item (n,): its weight w_i and the scale s_i of its Hessian."""
        dim, y = self.layout(out, batch)
        classes = out.shape[dim]
        cw = out.new_ones(classes) if self.class_weight is None else self.class_weight.to(out)
        if y.is_floating_point():
            soft = self._flat(y, dim).to(out) * (1 - self.label_smoothing) + self.label_smoothing / classes
            scale = soft @ cw
            return torch.ones_like(scale), scale
        y = y.flatten()
        seen = y != self.ignore_index
        weight = torch.where(seen, cw[y.clamp(0, classes - 1)], 0.0)
        scale = (1 - self.label_smoothing) * weight + self.label_smoothing * cw.mean() * seen
        return weight, scale

    def _item_totals(self, out: Tensor, batch: Any) -> Tensor:
        """w_i times the loss of item i, (n,)."""
        dim, y = self.layout(out, batch)
        logp = self._flat(out, dim).log_softmax(-1)
        cw = None if self.class_weight is None else self.class_weight.to(out)
        weighted = logp if cw is None else logp * cw
        if y.is_floating_point():
            soft = self._flat(y, dim).to(out) * (1 - self.label_smoothing) + self.label_smoothing / out.shape[dim]
            return -(soft * weighted).sum(-1)
        y = y.flatten()
        seen = y != self.ignore_index
        picked = weighted.gather(1, y.clamp(0, out.shape[dim] - 1)[:, None])[:, 0]
        total = (1 - self.label_smoothing) * picked
        if self.label_smoothing:
            total = total + self.label_smoothing * weighted.mean(-1)
        return torch.where(seen, -total, 0.0)  # 0 times the loss of a masked class would be NaN

    def check(self, out: Tensor, batch: Any) -> None:
        """Refuse labels that are not a class; this reads values, so it is done once and not in every product."""
        dim, y = self.layout(out, batch)
        if not y.is_floating_point():
            bad = ((y < 0) | (y >= out.shape[dim])) & (y != self.ignore_index)
            if bad.any():
                raise ValueError(
                    f"label {int(y[bad][0])} is not one of the {out.shape[dim]} classes of the output, 0 to "
                    f"{out.shape[dim] - 1}; widen the last layer, map the labels, or leave items out with ignore_index="
                )

    def leaves_out(self, out: Tensor, batch: Any) -> bool:
        """Whether the loss ignores some of the items, such as padding; this reads values too."""
        return bool((self._weights(out, batch)[0] == 0).any())

    def weightless(self, out: Tensor, batch: Any) -> bool:
        """Whether an item has a loss but no weight; this reads values too."""
        if self.class_weight is None or not self.label_smoothing:
            return False
        weight, scale = self._weights(out, batch)
        return bool(((weight == 0) & (scale > 0)).any())

    def weight(self, out: Tensor, batch: Any) -> Tensor:
        """Number of items, or the sum of the class weights of those that are not ignored."""
        return self._weights(out, batch)[0].sum(dtype=torch.float64)

    def total(self, out: Tensor, batch: Any) -> Tensor:
        """sum_i w_i (-log p_{y_i})."""
        return summed(self._item_totals(out, batch))

    def middle(self, kind: Kind, out: Tensor, batch: Any, u: Tensor, draws: Tensor | None = None) -> Tensor:
        """s (p * u - p (p . u)) for "ggn"; c (c . u) for the others, averaged over draws for "fisher"."""
        dim, _ = self.layout(out, batch)
        if kind == "fisher":
            return outer_mean(draws, u, (dim,))
        weight, scale = self._weights(out, batch)
        flat_u = self._flat(u, dim)
        if kind == "ggn":
            image = _hessian_product(self._flat(out, dim), flat_u, scale)
        else:
            g = self._gradient(out, batch)
            along = (g * flat_u).sum(-1) / weight.where(weight != 0, torch.inf)  # items of weight 0 do not count
            image = g * along[:, None]
        return self._unflat(image, out, dim)

    def _gradient(self, out: Tensor, batch: Any) -> Tensor:
        """Gradient of every item's total in its logits, (n, classes): s p - weighted target."""
        dim, _ = self.layout(out, batch)
        return self._flat(gradient(lambda o: self.total(o, batch), out), dim)

    def num_roots(self, out: Tensor, batch: Any) -> int:
        """Classes times items per sample."""
        return math.prod(out.shape[1:])

    def roots(self, out: Tensor, batch: Any, chunk: int) -> Iterator[Tensor]:
        """sqrt(s p_c) (e_c - p), class by class, item by item of each sample."""
        dim, _ = self.layout(out, batch)
        scale, p = self._weights(out, batch)[1], self._flat(out, dim).softmax(-1)
        per_sample = len(p) // len(out)
        places = torch.arange(len(p), device=out.device) % per_sample
        for place in range(per_sample):
            here = (places == place).to(out.dtype)
            for classes in torch.arange(p.shape[1], device=out.device).split(chunk):
                one_hot = F.one_hot(classes, p.shape[1]).to(p)
                size = (here * scale * p[:, classes].T).sqrt()  # (chunk, n)
                rows = size[..., None] * (one_hot[:, None] - p)
                yield torch.stack([self._unflat(row, out, dim) for row in rows])

    def draw(self, out: Tensor, batch: Any, uniforms: Uniforms) -> Tensor:
        """sqrt(s) (p - e_c) with c drawn from p by inversion."""
        dim, _ = self.layout(out, batch)
        scale, p = self._weights(out, batch)[1], self._flat(out, dim).softmax(-1)
        level = uniforms(len(p), "label").to(p)
        label = (p.cumsum(-1) < level[:, None]).sum(-1).clamp(max=p.shape[1] - 1)
        rows = scale.sqrt()[:, None] * (p - F.one_hot(label, p.shape[1]).to(p))
        return self._unflat(rows, out, dim)

    def items(self, out: Tensor, batch: Any) -> Items:
        """Loss, weight, signed margin f_y - max f_j, probabilities and logits of every item."""
        dim, y = self.layout(out, batch)
        weight, _ = self._weights(out, batch)
        totals, logits = self._item_totals(out, batch), self._flat(out, dim)
        loss = totals / weight.where(weight != 0, 1.0)
        if y.is_floating_point():
            return Items(loss, weight, None, logits.softmax(-1), logits)
        label = y.flatten().clamp(0, logits.shape[1] - 1)
        return Items(loss, weight, signed_margin(logits, label), logits.softmax(-1), logits, label)


def _hessian_product(logits: Tensor, u: Tensor, scale: Tensor) -> Tensor:
    """s (p * u - p (p . u)) for items (n, classes), in pieces of items.

    With a vocabulary of 50,000 and some thousand tokens, each tensor of this shape takes about a gigabyte: only the
    result exists as a whole, probabilities and other intermediate results only piece by piece.
    """
    step = max(1, PIECE // max(1, logits.shape[-1]))
    if len(logits) <= step:
        return _piece(logits, u, scale)
    image = torch.empty_like(u)
    for start in range(0, len(logits), step):
        here = slice(start, start + step)
        image[here] = _piece(logits[here], u[here], scale[here])
    return image


def _piece(logits: Tensor, u: Tensor, scale: Tensor) -> Tensor:
    p = logits.softmax(-1)
    mean = (p * u).sum(-1, keepdim=True)
    return (u - mean).mul_(p).mul_(scale[:, None])
