"""The rules of some layers, and the table of all rules."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .rules import (
    _DIM,
    Bars,
    Dots,
    Expanded,
    Matrices,
    Other,
    Parts,
    Permuted,
    Pointwise,
    Reduced,
    Reshaped,
    Rule,
    Sinks,
    Step,
    Untaped,
    Value,
    aten,
    lower,
    sinks_of,
    tensor_of,
)  # fmt: skip
from .sinks import Sink


class Softmax(Rule):
    """softmax along one dimension; a row that is masked completely is zero, and so is its derivative."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        if not self.out.ndim:
            raise Untaped("a softmax of a single number")
        self.dim = step.args[1] % self.out.ndim + 1

    def _map(self, x: Tensor) -> Tensor:
        """y (x - y . x), which is its own transpose."""
        scaled: Tensor = x * self.out
        return scaled.addcmul_(self.out, scaled.sum(self.dim, keepdim=True), value=-1)

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        return (self._map(dots[self.step.inputs[0]]),)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        into[0].add(self._map(bars[0]), own=True)

    def bend(self, bars: Bars, dots: Dots, into: Sinks) -> None:
        (bar,) = bars
        dot = dots[self.step.outs[0]]  # type: ignore[index]
        into[0].add_times(dot, bar - (bar * self.out).sum(self.dim, keepdim=True))
        into[0].add_times((dot * bar).sum(self.dim, keepdim=True), -self.out)


class Norm(Rule):
    """Layer, group and batch norm: y = weight n + bias with n = r (x - m).

    The mean m and r = 1 / sqrt(variance + eps) are over `dims` of x, reshaped to `view`, or are constants. The map from
    x' to n' is symmetric, P x' = r (x' - <x'> - n <n x'>), and P g changes along x' by

        -r (<n x'> P g + n' <n g> + n <n' g>)
    """

    fresh = True

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        x, args, packet = tensor_of(step.args[0]), step.args, step.func.overloadpacket
        layer = packet is aten.native_layer_norm
        self.x, (self.weight, self.bias) = args[0], args[2:4] if layer else args[1:3]
        self.view = x.shape
        self.dims: tuple[int, ...] = ()
        if layer:
            self.scale, self.dims = tuple(args[1]), tuple(range(x.ndim - len(args[1]), x.ndim))
        elif packet is aten.native_group_norm:
            self.view = torch.Size((len(x), args[6], x.shape[1] // args[6], *x.shape[2:]))
            self.scale, self.dims = (*self.view[1:3], *(1,) * (x.ndim - 2)), tuple(range(2, x.ndim + 1))
        else:
            self.scale, self.dims = (x.shape[1], *(1,) * (x.ndim - 2)), (0, *range(2, x.ndim)) if args[5] else ()
        x = x.reshape(self.view)
        if self.dims:
            variance, mean = torch.var_mean(x, self.dims, correction=0, keepdim=True)
        else:
            mean, variance = (tensor_of(t).reshape(self.scale) for t in args[3:5])
        self.r = (variance + args[4 if layer else 7]).rsqrt()
        self.n = (x - mean) * self.r
        self.w = None if self.weight is None else tensor_of(self.weight).reshape(self.scale)

    def _mean(self, x: Tensor) -> Tensor:
        return x.mean([d + 1 for d in self.dims], keepdim=True)

    def _map(self, x: Tensor, along: Tensor | None = None) -> Tensor:
        """P x; `along` is <n x> if it is known."""
        if not self.dims:
            return torch.mul(x, self.r)
        along = self._mean(x * self.n) if along is None else along
        return (x - self._mean(x)).addcmul_(self.n, along, value=-1).mul_(self.r)

    def _see(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.view)

    def _scaling(self, dot: Tensor) -> Tensor:
        """Tangents of weight or bias, in a shape that broadcasts."""
        return dot.reshape(len(dot), *(1,) * (len(self.view) - len(self.scale)), *self.scale)

    def _gathered(self, x: Tensor, value: Value) -> Tensor:
        """The sum over all dimensions that share weight and bias."""
        return lower(x, torch.Size(self.scale)).reshape(len(x), *value.tensor.shape)

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor | None]:
        terms = []
        if isinstance(self.x, Value):
            ahead = self._map(self._see(dots[self.x]))
            terms.append(ahead if self.w is None else ahead.mul_(self.w))
        if isinstance(self.weight, Value):
            terms.append(self._scaling(dots[self.weight]) * self.n)
        if isinstance(self.bias, Value):
            terms.append(self._scaling(dots[self.bias]))
        total = terms[0] if terms[0].shape[1:] == self.view else terms[0].expand(-1, *self.view).clone()
        for more in terms[1:]:
            total += more
        return (total.reshape(len(total), *self.out.shape), *(None for _ in self.step.outs[1:]))

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        bar = self._see(bars[0])
        x, weight, bias = sinks_of(into, (self.x, self.weight, self.bias))
        if x is not None:
            x.add(self._map(bar if self.w is None else bar * self.w).reshape(len(bar), *self.x.tensor.shape), own=True)
        if weight is not None:
            weight.add(self._gathered(bar * self.n, self.weight))
        if bias is not None:
            bias.add(self._gathered(bar, self.bias))

    def bend(self, bars: Bars, dots: Dots, into: Sinks) -> None:
        x, weight, _ = sinks_of(into, (self.x, self.weight, self.bias))
        if x is None:
            return
        g, dot = self._see(bars[0]), self._see(dots[self.x])
        along = self._mean(dot * self.n) if self.dims else None
        ahead = self._map(dot, along)  # n'
        if weight is not None:
            weight.add(self._gathered(ahead * g, self.weight))
            x.add(self._map(g * self._scaling(dots[self.weight])).reshape(dots[self.x].shape), own=True)
        if along is not None:
            g = g if self.w is None else g * self.w
            change = (along * self._map(g)).addcmul_(ahead, self._mean(self.n * g))
            change.addcmul_(self.n, self._mean(ahead.mul_(g))).mul_(-self.r)
            x.add(change.reshape(dots[self.x].shape), own=True)


class Embedding(Rule):
    """Rows of a table."""

    fresh = True

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        table, places = dots[self.step.inputs[0]], self.step.args[1]
        return (table.index_select(1, places.flatten()).reshape(len(table), *self.out.shape),)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        (bar,), places = bars, self.step.args[1]
        k, size = len(bar), len(self.value)  # k tables as one
        first = torch.arange(k, device=bar.device).mul_(size).reshape(k, *(1,) * places.ndim)
        into[0].add(aten.embedding_dense_backward(bar, places + first, k * size, -1, False).reshape(k, size, -1))


FOLDS_ON = ("cuda",)  # kinds of devices; on a CPU one vector after another is faster, since its images fit the cache


class Convolution(Rule):
    """The three bilinear forms of a convolution (`ritz.convolutions`); the derivatives of each are the other two.

    If only one factor depends on the vector, K vectors take K convolutions, or one with K times the channels.
    """

    fresh = True

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.x, self.weight, self.bias, *self.how = step.args
        if self.out.ndim != tensor_of(self.weight).ndim:
            raise Untaped("a convolution of a single sample")
        stride, padding, dilation, transposed, _, groups = self.how
        self.folds = self.out.device.type in FOLDS_ON and groups == 1 and not transposed
        sizes = zip(
            tensor_of(self.x).shape[2:], padding, dilation, tensor_of(self.weight).shape[2:], stride, strict=True
        )
        left = [(n + 2 * p - d * (w - 1) - 1) % s for n, p, d, w, s in sizes]  # pixels that no window reaches
        self.turned = stride, padding, dilation, True, left, groups

    def _ahead(self, x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = aten.convolution(x, weight, None, *self.how)
        return out

    def _back(self, bar: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        """The gradient in x (0) or in the weight (1)."""
        wanted = [which == 0, which == 1, False]
        found: Tensor = aten.convolution_backward(bar, x, weight, None, *self.how, wanted)[which]
        return found

    def _in_x(self, bars: Tensor, weight: Tensor) -> Tensor:
        """The gradient in x of cotangents (n, ...); `convolution_backward` needs an x of as many images."""
        if self.folds:
            found: Tensor = aten.convolution(bars, weight, None, *self.turned)
            return found
        x = tensor_of(self.x)
        return self._back(bars, x.new_empty(1).expand(len(bars), *x.shape[1:]), weight, 0)  # only its shape is read

    def _ahead_by(self, weights: Tensor) -> Iterable[Tensor]:
        """The convolution of x with each of K weights."""
        x = tensor_of(self.x)
        if not self.folds:
            return (self._ahead(x, weight) for weight in weights)
        return apart(self._ahead(x, in_a_row(weights, x)), len(weights))

    def _in_weight(self, bars: Tensor) -> Iterable[Tensor]:
        """The gradient in the weight of each of K cotangents."""
        x, weight = tensor_of(self.x), tensor_of(self.weight)
        if not self.folds:
            return (self._back(bar, x, weight, 1) for bar in bars)
        found = self._back(side_by_side(bars, self.out), x, kernels(len(bars) * len(weight), x, weight), 1)
        return found.reshape(len(bars), *weight.shape)

    def _bent(self, bar: Tensor, dots: Tensor, weights: Tensor) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """The gradients of one cotangent in x by K weights, and in the weight by K tangents of x."""
        x, weight = tensor_of(self.x), tensor_of(self.weight)
        if not self.folds:
            return (self._back(bar, x, w, 0) for w in weights), (self._back(bar, dot, weight, 1) for dot in dots)
        images = side_by_side(dots, x)
        in_x = self._in_x(bar, side_by_side(weights, x))
        in_weight = self._back(bar, images, kernels(len(weight), images, weight), 1)
        return apart(in_x, len(dots)), apart(in_weight, len(dots))

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        x, weight = tensor_of(self.x), tensor_of(self.weight)
        total = Sink()
        if isinstance(self.x, Value):
            dot = dots[self.x]
            total.add(self._ahead(in_a_row(dot, x), weight).unflatten(0, (len(dot), -1)), own=True)
        if isinstance(self.weight, Value):
            add_all(total, self._ahead_by(dots[self.weight]))
        if isinstance(self.bias, Value):
            dot = dots[self.bias]
            total.add(dot.reshape(len(dot), 1, -1, *(1,) * (x.ndim - 2)).expand(len(dot), *self.out.shape))
        assert total.total is not None
        return (total.total if total.own else total.total.clone(),)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        (bar,) = bars
        x, weight, bias = sinks_of(into, (self.x, self.weight, self.bias))
        if x is not None:
            found = self._in_x(in_a_row(bar, self.out), tensor_of(self.weight))
            x.add(found.unflatten(0, (len(bar), -1)), own=True)
        if weight is not None:
            add_all(weight, self._in_weight(bar))
        if bias is not None:
            bias.add(bar.sum((1, *range(3, bar.ndim))))

    def bend(self, bars: Bars, dots: Dots, into: Sinks) -> None:
        x, weight, _ = sinks_of(into, (self.x, self.weight, self.bias))
        if x is None or weight is None:
            return
        bar = in_a_row(bars[0], self.out)  # shared by all vectors
        for sink, found in zip((x, weight), self._bent(bar, dots[self.x], dots[self.weight]), strict=True):
            add_all(sink, found)


def add_all(sink: Any, terms: Iterable[Tensor]) -> None:
    """Add the terms of K vectors, which the sink may overwrite: stacked, or one after another."""
    sink.add(terms, own=True) if isinstance(terms, Tensor) else sink.add_each(terms)


def has_channels_last(image: Tensor) -> bool:
    """Whether images (n, c, ...) have their channels last in memory, and not also first."""
    return image.ndim == 4 and not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)


def kernels(number: int, images: Tensor, weight: Tensor) -> Tensor:
    """A tensor with the shape and layout of so many kernels for images; its entries are never read."""
    last = images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return torch.empty(
        (number, images.shape[1], *weight.shape[2:]), dtype=weight.dtype, device=weight.device,
        memory_format=torch.channels_last if last else torch.contiguous_format,
    )  # fmt: skip


def in_a_row(images: Tensor, like: Tensor) -> Tensor:
    """(k, n, c, ...) as k n images, or kernels, with channels last in memory if `like` has them last.

    torch would convert them to that layout too, but again for each convolution and by a far slower kernel.

    Example:
        >>> last = torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)
        >>> [has_channels_last(in_a_row(torch.ones(2, 1, 2, 3, 3), like)) for like in (last, last.contiguous())]
        [True, False]
    """
    if has_channels_last(like):
        return images.permute(0, 1, 3, 4, 2).contiguous().flatten(0, 1).permute(0, 3, 1, 2)
    return images.flatten(0, 1)


def side_by_side(images: Tensor, like: Tensor) -> Tensor:
    """(k, n, c, ...) as n images, or kernels, of k c channels each; channels are last if `like` has them last.

    Example:
        >>> side_by_side(torch.arange(4.0).reshape(2, 1, 2, 1, 1), torch.ones(1, 2, 1, 1)).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    if has_channels_last(like):
        return images.permute(1, 3, 4, 0, 2).contiguous().flatten(3).permute(0, 3, 1, 2)
    return images.transpose(0, 1).flatten(1, 2)


def apart(image: Tensor, k: int) -> Tensor:
    """The inverse of `side_by_side`: (k, n, c, ...)."""
    return torch.unflatten(image, 1, (k, -1)).transpose(0, 1)


def laid_as(images: Tensor, like: Tensor) -> Tensor:
    """(k, n, c, ...) with channels last in memory if those of (n, c, ...) are."""
    return in_a_row(images, like).unflatten(0, images.shape[:2]) if has_channels_last(like) else images


class MaxPool(Rule):
    """The largest element of each window: a selection of elements of each plane."""

    fresh = True

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.chosen = step.results[1].flatten(-2)

    def _back(self, bar: Tensor) -> Tensor:
        """With torch's own kernel, where each element looks up its windows, instead of windows adding to elements."""
        how = [*self.step.args[1:], *([], 0, 1, False)[len(self.step.args) - 2 :]]
        like = self.value.new_empty(1).expand(len(bar) * len(self.value), *self.value.shape[1:])
        indices = self.step.results[1].expand(len(bar), *self.out.shape).flatten(0, 1)
        found: Tensor = aten.max_pool2d_with_indices_backward(bar.flatten(0, 1), like, *how, indices)
        return found.reshape(len(bar), *self.value.shape)

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor | None]:
        dot = dots[self.step.inputs[0]]
        found = dot.flatten(-2).gather(-1, self.chosen.expand(len(dot), *self.chosen.shape))
        return laid_as(found.reshape(len(dot), *self.out.shape), self.out), None

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        bar = bars[0]
        if self.value.device.type in FOLDS_ON and self.value.ndim == 4:
            into[0].add(laid_as(self._back(bar), self.value), own=True)
            return
        total = self.value.new_zeros(len(bar), *self.value.flatten(-2).shape)
        total.scatter_add_(-1, self.chosen.expand(len(bar), *self.chosen.shape), bar.flatten(-2))
        into[0].add(total.reshape(len(bar), *self.value.shape), own=True)


NORMS = (aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm)
RULES: dict[Any, type[Rule]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), Matrices),
    **dict.fromkeys((aten._softmax, aten._safe_softmax), Softmax),
    **dict.fromkeys(NORMS, Norm),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze), Reshaped),
    **dict.fromkeys((aten.t, aten.transpose, aten.permute), Permuted),
    **dict.fromkeys((aten.expand, aten.clone, aten.alias), Expanded),
    **dict.fromkeys((aten.sum, aten.mean), Reduced),
    **dict.fromkeys(_DIM, Parts),
    aten.embedding: Embedding,
    aten.convolution: Convolution,
    aten.max_pool2d_with_indices: MaxPool,
}
VIEWS = frozenset({aten.view, aten.unsqueeze, aten.squeeze, aten.t, aten.transpose, aten.permute, *_DIM})


def rule_of(step: Step) -> Rule:
    """The rule of an operation at its values."""
    known = RULES.get(step.func.overloadpacket)
    if known is Matrices and step.kwargs:  # scaled
        return Other(step)
    if known is not None:
        return known(step)
    return Pointwise(step) if torch.Tag.pointwise in step.func.tags else Other(step)
