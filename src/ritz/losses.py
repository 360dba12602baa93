"""Losses: all that is known from a model's outputs alone.

Every loss is a SUM over items (samples, or tokens) together with the weight it is to be divided by, so that any split
of the data adds up to the same mean. Beside the sum a loss knows its second-order structure in closed form:

    middle   M u, for the matrix M between the Jacobians: J' M J is the Gauss-Newton or one of the Fisher matrices
    roots    s_c with sum_c s_c s_c' = M, for exact traces
    draw     cotangents of labels drawn from the model: E[c c'] = M

For cross-entropy M = diag(p) - p p', for the squared error 2/D I, for binary cross-entropy diag(p (1 - p)) / D.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UnsupportedError

Kind = Literal["ggn", "fisher", "empirical"]
Uniforms = Callable[[int, str], Tensor]  # (how many, stream name) -> that many uniform numbers, keyed, not streamed
Target = Callable[[Any], Tensor]

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Items:
    """What is known item by item (n of them, in data order)."""

    loss: Tensor  # (n,) the item's own loss
    weight: Tensor  # (n,) its share in the mean
    margin: Tensor | None = None  # (n,) f_y - max_{j != y} f_j
    probabilities: Tensor | None = None  # (n, classes)


@runtime_checkable
class Loss(Protocol):
    """A loss as ritz needs it. `batch` is the user's batch, `out` what the model gave for it.

    Example:
        >>> isinstance(CrossEntropy(), Loss)
        True
    """

    separable: bool  # may a batch be split?
    convex: bool  # is the loss Hessian positive semi-definite in the outputs?

    def weight(self, out: Tensor, batch: Any) -> Tensor:
        """What the sum over this batch is divided by: samples, unmasked tokens, or their class weights."""

    def total(self, out: Tensor, batch: Any) -> Tensor:
        """The SUM over items, never the mean."""

    def middle(self, kind: Kind, out: Tensor, batch: Any, u: Tensor, draws: Tensor | None = None) -> Tensor:
        """M u for the matrix between the Jacobians, summed over items; `draws` (S, *out.shape) for "fisher"."""

    def roots(self, out: Tensor, batch: Any, chunk: int) -> Iterator[Tensor]:
        """Cotangents (<= chunk, *out.shape), each on one item of every sample, with sum_c s_c s_c' = M."""

    def num_roots(self, out: Tensor, batch: Any) -> int:
        """How many cotangents `roots` gives in all."""

    def draw(self, out: Tensor, batch: Any, uniforms: Uniforms) -> Tensor:
        """One cotangent (*out.shape) per item, of a label drawn from the model: E[c c'] = M."""

    def items(self, out: Tensor, batch: Any) -> Items:
        """Loss and weight of every item, margins and probabilities where the loss has them."""


def default_target(batch: Any) -> Tensor:
    """The last entry of a tuple, or the entry of a dictionary that is named like a label."""
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return batch[key]  # type: ignore[no-any-return]
        raise ValueError(f"no target in a batch with keys {list(batch)}; pass target=lambda batch: ...")
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return batch[-1]  # type: ignore[no-any-return]
    raise ValueError(
        f"expected batches (inputs, targets) or a dictionary with one of {TARGET_KEYS}, got {type(batch).__name__}; "
        "pass target=lambda batch: ..., and note that data given as tensors is a tuple (X, y)"
    )


def as_loss(loss: Any, target: Target | None = None) -> Loss:
    """A `Loss` from what users have: a torch loss module or function, a callable(output, target), or a `Loss`.

    Raises:
        ValueError: If the reduction is not the mean; ritz sums over items and divides by their weight itself.
    """
    aim = target or default_target
    if isinstance(loss, Loss):
        return loss
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise ValueError(
            f"{type(loss).__name__}(reduction={reduction!r}): ritz studies the mean over the data; use "
            "reduction='mean', and multiply the operator (N * H) if the curvature of the sum is wanted"
        )
    if type(loss) is nn.CrossEntropyLoss:
        return CrossEntropy(loss.weight, loss.ignore_index, loss.label_smoothing, target=aim)
    if type(loss) is nn.BCEWithLogitsLoss:
        return BinaryCrossEntropy(loss.weight, loss.pos_weight, target=aim)
    if type(loss) is nn.MSELoss or loss is F.mse_loss:
        return SquaredError(target=aim)
    if loss is F.cross_entropy:
        return CrossEntropy(target=aim)
    if loss is F.binary_cross_entropy_with_logits:
        return BinaryCrossEntropy(target=aim)
    if getattr(loss, "weight", None) is not None:
        raise ValueError(f"{type(loss).__name__} with class weights is not known; write its sum as batch_loss=")
    if not callable(loss):
        raise TypeError(f"loss must be a torch loss, a callable(output, target) or a ritz.Loss, got {loss!r}")
    return CallableLoss(loss, target=aim)


# ---------------------------------------------------------------------------------------- cross-entropy


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """Softmax cross-entropy, as nn.CrossEntropyLoss: class weights, ignore_index, label smoothing, soft targets.

    Item i has loss w_i (-log p_y) and weight w_i = weight[y_i], 0 where y_i is `ignore_index`. Its Hessian in the
    logits is s_i (diag(p) - p p') with s_i the sum of its (smoothed, weighted) target.

    Args:
        class_dim: Where the classes are. None takes torch's place, 1, for (B, C, ...), or the last, for language
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

    def _layout(self, out: Tensor, batch: Any) -> tuple[int, Tensor]:
        """The class dimension of `out` and the target of the batch, checked against each other."""
        y = self.target(batch)
        if out.ndim < 2:
            raise ValueError(f"cross-entropy needs outputs (batch, classes, ...), got {tuple(out.shape)}")
        if y.is_floating_point():  # soft targets have the shape of the output
            if y.shape != out.shape:
                raise ValueError(f"soft targets {tuple(y.shape)} must have the shape of the outputs {tuple(out.shape)}")
            return (1 if self.class_dim is None else self.class_dim % out.ndim), y
        fits = [d for d in range(1, out.ndim) if out.shape[:d] + out.shape[d + 1 :] == y.shape]
        if self.class_dim is not None:
            fits = [d for d in fits if d == self.class_dim % out.ndim]
        fits = [d for d in fits if d in (1, out.ndim - 1)]
        if not fits:
            raise ValueError(f"targets {tuple(y.shape)} do not fit outputs {tuple(out.shape)}")
        if len(fits) > 1:
            raise ValueError(
                f"targets {tuple(y.shape)} fit outputs {tuple(out.shape)} with classes in dimension 1 or {out.ndim - 1}; "
                "say which: ritz.losses.CrossEntropy(class_dim=...)"
            )
        return fits[0], y

    def _flat(self, x: Tensor, dim: int) -> Tensor:
        """(batch, ..., classes, ...) as (items, classes), items in sample order."""
        return x.movedim(dim, -1).flatten(0, -2)

    def _unflat(self, rows: Tensor, like: Tensor, dim: int) -> Tensor:
        """The inverse of `_flat`."""
        shape = like.movedim(dim, -1).shape
        return rows.reshape(shape).movedim(-1, dim)

    def _weights(self, out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Per item (n,): its weight w_i and the scale s_i of its Hessian."""
        dim, y = self._layout(out, batch)
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
        dim, y = self._layout(out, batch)
        logp = self._flat(out, dim).log_softmax(-1)
        cw = None if self.class_weight is None else self.class_weight.to(out)
        weighted = logp if cw is None else logp * cw
        if y.is_floating_point():
            soft = self._flat(y, dim).to(out) * (1 - self.label_smoothing) + self.label_smoothing / out.shape[dim]
            return -(soft * weighted).sum(-1)
        y = y.flatten()
        seen = (y != self.ignore_index).to(out.dtype)
        picked = weighted.gather(1, y.clamp(0, out.shape[dim] - 1)[:, None])[:, 0]
        total = (1 - self.label_smoothing) * picked
        if self.label_smoothing:
            total = total + self.label_smoothing * weighted.mean(-1)
        return -total * seen

    def check(self, out: Tensor, batch: Any) -> None:
        """Refuse labels that are no class; a value check, so it is done once and not in every product."""
        dim, y = self._layout(out, batch)
        if not y.is_floating_point():
            bad = ((y < 0) | (y >= out.shape[dim])) & (y != self.ignore_index)
            if bad.any():
                raise ValueError(f"label {int(y[bad][0])} is not one of the {out.shape[dim]} classes of the output")

    def weight(self, out: Tensor, batch: Any) -> Tensor:
        """Number of items, or the sum of the class weights of those that are not ignored."""
        return self._weights(out, batch)[0].sum()

    def total(self, out: Tensor, batch: Any) -> Tensor:
        """sum_i w_i (-log p_{y_i})."""
        return self._item_totals(out, batch).sum()

    def middle(self, kind: Kind, out: Tensor, batch: Any, u: Tensor, draws: Tensor | None = None) -> Tensor:
        """s (p * u - p (p . u)) for "ggn"; c (c . u) for the others, averaged over draws for "fisher"."""
        dim, _ = self._layout(out, batch)
        if kind == "fisher":
            return _outer_mean(draws, u, (dim,))
        weight, scale = self._weights(out, batch)
        p, flat_u = self._flat(out, dim).softmax(-1), self._flat(u, dim)
        if kind == "ggn":
            image = scale[:, None] * (p * flat_u - p * (p * flat_u).sum(-1, keepdim=True))
        else:
            g = self._gradient(out, batch)
            image = g * ((g * flat_u).sum(-1) / weight.where(weight != 0, 1.0))[:, None]
        return self._unflat(image, out, dim)

    def _gradient(self, out: Tensor, batch: Any) -> Tensor:
        """Gradient of every item's total in its logits, (n, classes): s p - weighted target."""
        dim, _ = self._layout(out, batch)
        _, pullback = torch.func.vjp(lambda o: self._item_totals(o, batch).sum(), out)
        return self._flat(pullback(out.new_ones(()))[0], dim)

    def num_roots(self, out: Tensor, batch: Any) -> int:
        """Classes times items per sample."""
        return math.prod(out.shape[1:])

    def roots(self, out: Tensor, batch: Any, chunk: int) -> Iterator[Tensor]:
        """sqrt(s p_c) (e_c - p), class by class, item by item of each sample."""
        dim, _ = self._layout(out, batch)
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
        dim, _ = self._layout(out, batch)
        scale, p = self._weights(out, batch)[1], self._flat(out, dim).softmax(-1)
        level = uniforms(len(p), "label").to(p)
        label = (p.cumsum(-1) < level[:, None]).sum(-1).clamp(max=p.shape[1] - 1)
        rows = scale.sqrt()[:, None] * (p - F.one_hot(label, p.shape[1]).to(p))
        return self._unflat(rows, out, dim)

    def items(self, out: Tensor, batch: Any) -> Items:
        """Loss, weight, signed margin f_y - max f_j and probabilities of every item."""
        dim, y = self._layout(out, batch)
        weight, _ = self._weights(out, batch)
        totals, logits = self._item_totals(out, batch), self._flat(out, dim)
        loss = totals / weight.where(weight != 0, 1.0)
        if y.is_floating_point():
            return Items(loss, weight, None, logits.softmax(-1))
        label = y.flatten().clamp(0, logits.shape[1] - 1)[:, None]
        others = logits.scatter(1, label, -math.inf).amax(-1)
        return Items(loss, weight, logits.gather(1, label)[:, 0] - others, logits.softmax(-1))


# ------------------------------------------------------------------- squared error and binary cross-entropy


def _elementwise(out: Tensor, y: Tensor, name: str) -> tuple[Tensor, Tensor, int]:
    """Outputs and targets as (batch, D), after checking that they have one shape."""
    if out.shape != y.shape:
        raise ValueError(f"{name}: targets {tuple(y.shape)} must have the shape of the outputs {tuple(out.shape)}")
    rows = out.reshape(len(out), -1)
    return rows, y.to(out).reshape(rows.shape), rows.shape[1]


def _outer_mean(draws: Tensor | None, u: Tensor, over: tuple[int, ...]) -> Tensor:
    """mean over draws of c (c . u), the dot product over the dimensions of one item."""
    if draws is None:
        raise ValueError("the Monte Carlo Fisher needs drawn cotangents")
    return (draws * _dot(draws, u, tuple(d + 1 for d in over))).mean(0)


def _dot(a: Tensor, b: Tensor, over: tuple[int, ...]) -> Tensor:
    """a . b over some dimensions, kept; over none of them where an item is a single number."""
    return (a * b).sum(over, keepdim=True) if over else a * b


def _unit_roots(out: Tensor, size: Tensor, chunk: int) -> Iterator[Tensor]:
    """size_d e_d for each of the D outputs; `size` is (batch, D)."""
    for places in torch.arange(size.shape[1], device=out.device).split(chunk):
        one_hot = F.one_hot(places, size.shape[1]).to(out)  # (chunk, D)
        yield (one_hot[:, None] * size).reshape(len(places), *out.shape)


class _Elementwise(ABC):
    """Losses that are a mean over D outputs of a function of one output: a diagonal Hessian. The item is the sample."""

    target: Target
    separable = True
    convex = True

    def _rows(self, out: Tensor, batch: Any) -> tuple[Tensor, Tensor, int]:
        return _elementwise(out, self.target(batch), type(self).__name__)

    @abstractmethod
    def _loss(self, out: Tensor, batch: Any) -> Tensor:
        """Loss of every sample, (batch,)."""

    @abstractmethod
    def _curvature(self, out: Tensor, batch: Any) -> Tensor:
        """Diagonal of the loss Hessian, (batch, D)."""

    def weight(self, out: Tensor, batch: Any) -> Tensor:
        """The number of samples."""
        return out.new_tensor(float(len(out)))

    def total(self, out: Tensor, batch: Any) -> Tensor:
        """Sum over samples of the mean over outputs."""
        return self._loss(out, batch).sum()

    def middle(self, kind: Kind, out: Tensor, batch: Any, u: Tensor, draws: Tensor | None = None) -> Tensor:
        """The diagonal times u for "ggn"; c (c . u) for the others."""
        if kind == "ggn":
            return (self._curvature(out, batch) * u.reshape(len(out), -1)).reshape(out.shape)
        over = tuple(range(1, out.ndim))
        if kind == "fisher":
            return _outer_mean(draws, u, over)
        _, pullback = torch.func.vjp(lambda o: self.total(o, batch), out)
        g = pullback(out.new_ones(()))[0]
        return g * _dot(g, u, over)

    def num_roots(self, out: Tensor, batch: Any) -> int:
        """The number of outputs, D."""
        return math.prod(out.shape[1:])

    def roots(self, out: Tensor, batch: Any, chunk: int) -> Iterator[Tensor]:
        """The root of the diagonal, one output at a time."""
        return _unit_roots(out, self._curvature(out, batch).sqrt(), chunk)

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
    """nn.BCEWithLogitsLoss, element weights and `pos_weight` included; Hessian w (1 + (pos - 1) y) p (1 - p) / D.

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
        w = out.new_ones(out.shape) if self.element_weight is None else self.element_weight.to(out).expand(out.shape)
        pos = out.new_ones(out.shape) if self.pos_weight is None else self.pos_weight.to(out).expand(out.shape)
        w, pos = w.reshape(rows.shape) / num, pos.reshape(rows.shape)
        return w * pos * y, w * (1 - y)

    def _loss(self, out: Tensor, batch: Any) -> Tensor:
        positive, negative = self._sides(out, batch)
        rows = out.reshape(len(out), -1)
        return (positive * F.softplus(-rows) + negative * F.softplus(rows)).sum(-1)

    def _curvature(self, out: Tensor, batch: Any) -> Tensor:
        positive, negative = self._sides(out, batch)
        p = out.reshape(len(out), -1).sigmoid()
        return (positive + negative) * p * (1 - p)

    def draw(self, out: Tensor, batch: Any, uniforms: Uniforms) -> Tensor:
        """sqrt(weight / D) (p - y) with y drawn from p."""
        positive, negative = self._sides(out, batch)
        p = out.reshape(len(out), -1).sigmoid()
        label = (uniforms(p.numel(), "label").reshape(p.shape).to(p) < p).to(p)
        return ((positive + negative).sqrt() * (p - label)).reshape(out.shape)


# -------------------------------------------------------------------------------------------- any callable


@dataclass(frozen=True, eq=False)
class CallableLoss:
    """Any callable(output, target) that gives the mean over samples; derivatives in the outputs by autograd.

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
        return out.new_tensor(float(len(out)))

    def total(self, out: Tensor, batch: Any) -> Tensor:
        """The mean times the number of samples."""
        y = self.target(batch)
        value = self.function(out, y)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the loss must return one number, the mean over the batch; it returned {got}")
        ignore = getattr(self.function, "ignore_index", None)
        if ignore is not None and not y.is_floating_point() and bool((y == ignore).any()):
            raise ValueError("ignored targets are only weighted right by nn.CrossEntropyLoss; use that on the logits")
        return value.reshape(()) * len(out)

    def _gradient(self, out: Tensor, batch: Any) -> Tensor:
        """Gradient of the total in the outputs; row i is that of sample i alone, because the total is a sum."""
        _, pullback = torch.func.vjp(lambda o: self.total(o, batch), out)
        return pullback(out.new_ones(()))[0]  # type: ignore[no-any-return]

    def middle(self, kind: Kind, out: Tensor, batch: Any, u: Tensor, draws: Tensor | None = None) -> Tensor:
        """The loss Hessian by forward over reverse for "ggn"; g (g . u) for "empirical"."""
        if isinstance(self.function, nn.NLLLoss) and kind == "ggn":
            raise UnsupportedError(
                "NLLLoss is linear in its input, so its Gauss-Newton matrix is zero; take log_softmax out of the model "
                "and use nn.CrossEntropyLoss"
            )
        if kind == "ggn":
            return torch.func.jvp(lambda o: self._gradient(o, batch), (out,), (u,))[1]  # type: ignore[no-any-return]
        if kind == "empirical":
            g = self._gradient(out, batch)
            return g * _dot(g, u, tuple(range(1, out.ndim)))
        raise UnsupportedError(_NO_LIKELIHOOD)

    def num_roots(self, out: Tensor, batch: Any) -> int:
        """The number of outputs, D."""
        return math.prod(out.shape[1:])

    def roots(self, out: Tensor, batch: Any, chunk: int) -> Iterator[Tensor]:
        """Scaled eigenvectors of every sample's D x D loss Hessian."""
        num = math.prod(out.shape[1:])
        eye = torch.eye(num, dtype=out.dtype, device=out.device)
        units = eye[:, None].expand(num, len(out), num).reshape(num, *out.shape)
        columns = torch.stack([self.middle("ggn", out, batch, unit) for unit in units])
        hessians = columns.reshape(num, len(out), num).permute(1, 2, 0)
        values, vectors = torch.linalg.eigh((hessians + hessians.mT) / 2)
        if bool((values < -1e-6 * values.abs().amax()).any()):
            raise UnsupportedError("this loss is not convex in the outputs, so its Hessian has no real roots; use probes")
        scaled = vectors * values.clamp(min=0).sqrt()[:, None]  # (batch, D, roots)
        for part in scaled.permute(2, 0, 1).split(chunk):
            yield part.reshape(len(part), *out.shape)

    def draw(self, out: Tensor, batch: Any, uniforms: Uniforms) -> Tensor:
        """Not known: a callable is not a likelihood."""
        raise UnsupportedError(_NO_LIKELIHOOD)

    def items(self, out: Tensor, batch: Any) -> Items:
        """Not known item by item without calling the function on each."""
        y = self.target(batch)
        loss = torch.stack([self.function(out[i : i + 1], y[i : i + 1]).reshape(()) for i in range(len(out))])
        return Items(loss, torch.ones_like(loss))


_NO_LIKELIHOOD = (
    "the Fisher matrix needs a likelihood to draw labels from: cross-entropy, squared error or binary cross-entropy; "
    "for any other loss use ritz.GGN or ritz.EmpiricalFisher"
)
