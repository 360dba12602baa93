"""How single operations are differentiated, for K tangents or cotangents at a time.

Tangents and cotangents have a leading dimension: k for those of k vectors, 1 for the gradient that they share. The most
frequent operations have a rule of their own. Functions of single elements share one rule, which gets their derivatives
from autograd. All other operations are differentiated by torch.func, one at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .sinks import product

aten = torch.ops.aten
Dots = Mapping["Value", Tensor]  # tangents (k, *shape)
Bars = Sequence[Any]  # cotangents (k, *shape) of the results of an operation; None for a result that has none
Sinks = Sequence[Any]  # of the arguments that are values; None for those whose gradient is not needed


class Untaped(RuntimeError):
    """A forward pass that cannot be recorded operation by operation."""


class Hidden(Untaped):
    """The model switches gradients off or computes them itself, so that only autograd knows the derivatives."""


class Value:
    """A tensor that depends on the parameters.

    Attributes:
        tensor: The tensor as it was when it was computed.
        placed: Whether it is a parameter or a view of one, so that it has a place in the image.
        stale: Whether its memory was written to through another tensor.
    """

    __slots__ = ("placed", "stale", "tensor")

    def __init__(self, tensor: Tensor, placed: bool = False) -> None:
        self.tensor, self.placed, self.stale = tensor, placed, False


class Step:
    """One operation.

    Attributes:
        func: The operation.
        args, kwargs: Its arguments, with a `Value` for each tensor that depends on the parameters.
        inputs: These values, in order.
        results: Its results.
        outs: The results as values; None for a result without a derivative.
    """

    __slots__ = ("args", "func", "inputs", "kwargs", "outs", "results")

    def __init__(self, func: Any, args: Any, kwargs: Any, inputs: list[Value], results: Any, outs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.inputs: list[Value] = inputs
        self.results: Sequence[Any] = results
        self.outs: list[Value | None] = outs


class Rule(ABC):
    """The derivatives of one operation at its values."""

    fresh = False  # whether `push` returns new tensors, which `bend` does not need

    def __init__(self, step: Step) -> None:
        self.step = step
        self.value: Tensor = step.inputs[0].tensor
        self.out: Tensor = step.results[0]

    @abstractmethod
    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor | None]:
        """Tangents of the results from those of the arguments; if `spare`, the latter may be overwritten."""

    @abstractmethod
    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        """Adds the gradients in the arguments, from cotangents of the results."""

    def bend(self, bars: Bars, dots: Dots, into: Sinks) -> None:  # noqa: B027  # most operations are linear
        """Adds the change of `pull` of the shared cotangents (1, ...) along the tangents; 0 for a linear operation."""


class View(Rule):
    """An operation that moves no element, so that a view of a parameter has a place in the image."""

    @abstractmethod
    def places(self, x: Tensor) -> Sequence[Tensor]:
        """The same view of each tensor of a stack."""


def tensor_of(x: Any) -> Tensor:
    """The tensor of an argument."""
    return x.tensor if isinstance(x, Value) else x


def lift(dots: Tensor, ndim: int) -> Tensor:
    """(k, *shape) with ones before the shape: `ndim` dimensions beside the first."""
    missing = ndim + 1 - dots.ndim
    return dots.reshape(len(dots), *(1,) * missing, *dots.shape[1:]) if missing else dots


def lower(x: Tensor, shape: torch.Size) -> Tensor:
    """The sum of (k, ...) over the dimensions that were broadcast from `shape`."""
    if x.shape[1:] == shape:
        return x
    return x.sum_to_size((len(x), *(1,) * (x.ndim - 1 - len(shape)), *shape)).reshape(len(x), *shape)


def sinks_of(into: Sinks, args: Sequence[Any]) -> list[Any]:
    """The sinks of arguments that are values in order, None for the others."""
    waiting = list(into)
    return [waiting.pop(0) if isinstance(x, Value) else None for x in args]


# ----------------------------------------------------------------------------------------- arithmetic


class Matrices(Rule):
    """mm, bmm, addmm and baddbmm: c + a @ b."""

    fresh = True

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        *first, self.a, self.b = step.args
        self.bias: Any = first[0] if first else None

    @property
    def walk(self) -> int:
        """Number of multiplications for the tangents of the arguments that are not parameters."""
        between = sum(isinstance(x, Value) and not x.placed for x in (self.a, self.b))
        return between * tensor_of(self.a).numel() * tensor_of(self.b).shape[-1]

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        out: Tensor | None = None
        if isinstance(self.a, Value):
            out = product(dots[self.a], tensor_of(self.b)[None])
        if isinstance(self.b, Value):
            out = product(tensor_of(self.a)[None], dots[self.b], out, beta=1.0)
        if isinstance(self.bias, Value):
            dot = lift(dots[self.bias], self.out.ndim)
            out = dot.expand(len(dot), *self.out.shape).clone() if out is None else out.add_(dot)
        assert out is not None
        return (out,)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        (bar,) = bars
        bias, a, b = sinks_of(into, (self.bias, self.a, self.b))
        if a is not None:
            a.add_product(bar, tensor_of(self.b).mT[None])
        if b is not None:
            b.add_product(tensor_of(self.a).mT[None], bar)
        if bias is not None:
            bias.add(lower(bar, self.bias.tensor.shape))

    def bend(self, bars: Bars, dots: Dots, into: Sinks) -> None:
        _, a, b = sinks_of(into, (self.bias, self.a, self.b))
        if a is not None and b is not None:
            a.add_product(bars[0], dots[self.b].mT)
            b.add_product(dots[self.a].mT, bars[0])


class Pointwise(Rule):
    """A function of single elements of its broadcast arguments: each derivative is one number for each element."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.shape = self.out.shape
        one = self.out.new_ones(()).expand(self.shape)
        # None stands for 1, and saves a multiplication
        self.firsts: list[Tensor | None] = [None] * len(step.inputs)
        self.seconds: list[Sequence[Tensor | None]] = []
        if step.func is aten.add.Tensor and not step.kwargs:
            return
        with torch.enable_grad():
            leaves = [v.tensor.detach().expand(self.shape).requires_grad_() for v in step.inputs]
            args, kwargs = filled(step, leaves)
            found = torch.autograd.grad(step.func(*args, **kwargs), leaves, one, create_graph=True)
        bent = step.func.overloadpacket not in _STRAIGHT
        self.seconds = [
            torch.autograd.grad(f, leaves, one, retain_graph=True, allow_unused=True)
            if bent and f.requires_grad
            else [None] * len(leaves)
            for f in found
        ]
        self.firsts = [None if f.data_ptr() == one.data_ptr() else f.detach() for f in found]

    @property
    def fresh(self) -> bool:  # type: ignore[override]
        return len(self.firsts) > 1 or self.firsts[0] is not None

    @property
    def straight(self) -> bool:
        """Whether `bend` does not need the tangents."""
        return all(curve is None for curves in self.seconds for curve in curves)

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        total: Tensor | None = None
        for value, slope in zip(self.step.inputs, self.firsts, strict=True):
            dot = lift(dots[value], len(self.shape))
            if total is None:
                spare = spare and dot.shape[1:] == self.shape
                total = dot if slope is None else dot.mul_(slope) if spare else dot * slope
            else:
                total = total + dot if slope is None else torch.addcmul(total, dot, slope)
        assert total is not None
        return (total.expand(len(total), *self.shape),)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        (bar,) = bars
        spare = spare and len(into) == 1
        for value, slope, sink in zip(self.step.inputs, self.firsts, into, strict=True):
            if sink is None:
                continue
            if value.tensor.shape != self.shape:
                sink.add(lower(bar if slope is None else bar * slope, value.tensor.shape))
            elif slope is None:
                sink.add(bar, own=spare)
            else:
                sink.add_times(bar, slope, spare)

    def bend(self, bars: Bars, dots: Dots, into: Sinks) -> None:
        for value, curves, sink in zip(self.step.inputs, self.seconds, into, strict=False):
            for other, curve in zip(self.step.inputs, curves, strict=True):
                if curve is None:
                    continue
                dot, factor = lift(dots[other], len(self.shape)), bars[0] * curve
                if value.tensor.shape == self.shape:
                    sink.add_times(factor, dot)
                else:
                    sink.add(lower(factor * dot, value.tensor.shape))


_STRAIGHT = {
    aten.relu, aten.leaky_relu, aten.threshold, aten.hardtanh, aten.clamp, aten.clamp_min, aten.clamp_max, aten.abs,
    aten.where, aten.masked_fill, aten.maximum, aten.minimum,
}  # fmt: skip


def filled(step: Step, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an operation, with tensors in place of its values."""
    waiting = list(tensors)

    def put(x: Any) -> Any:
        if isinstance(x, Value):
            return waiting.pop(0)
        return [put(y) for y in x] if isinstance(x, list) else x

    return [put(x) for x in step.args], {name: put(x) for name, x in step.kwargs.items()}


# ------------------------------------------------------------------------------------------ structure


class Reshaped(View):
    """The same elements in the same order."""

    def places(self, x: Tensor) -> Sequence[Tensor]:
        return (x.view(len(x), *self.out.shape),)

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        dot = dots[self.step.inputs[0]]
        return (dot.reshape(len(dot), *self.out.shape),)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        into[0].add(bars[0].reshape(len(bars[0]), *self.value.shape), own=spare)


class Permuted(View):
    """t, transpose and permute."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        ndim = self.value.ndim
        order = list(range(ndim))
        if step.func is aten.permute.default:
            order = [d % ndim for d in step.args[1]]
        elif ndim > 1:
            a, b = (d % ndim for d in step.args[1:]) if step.args[1:] else (0, 1)
            order[a], order[b] = b, a
        self.order = [0, *(d + 1 for d in order)]
        self.back = [self.order.index(d) for d in range(ndim + 1)]

    def places(self, x: Tensor) -> Sequence[Tensor]:
        return (x.permute(self.order),)

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        return self.places(dots[self.step.inputs[0]])

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        into[0].add(bars[0].permute(self.back), own=spare)


class Parts(View):
    """slice, select, split and unbind: some of the elements, in their order."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        place = _DIM[step.func.overloadpacket]
        self.how = list(step.args[1:]) + [0] * (place - len(step.args[1:]))
        dim = step.kwargs.get("dim", self.how[place - 1])
        self.how[place - 1] = dim + 1 if dim >= 0 else dim

    def places(self, x: Tensor) -> Sequence[Tensor]:
        found = self.step.func(x, *self.how)
        return (found,) if isinstance(found, Tensor) else found

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        return self.places(dots[self.step.inputs[0]])

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        for number, bar in enumerate(bars):
            if bar is not None:
                part = into[0].part(lambda x, number=number: self.places(x)[number], len(bar), self.value)
                part += bar


_DIM = {aten.slice: 1, aten.select: 1, aten.split: 2, aten.split_with_sizes: 2, aten.unbind: 1}  # position of `dim`


class Expanded(Rule):
    """expand, and copies: an element may occur in several places."""

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        dot = dots[self.step.inputs[0]]
        return (lift(dot, self.out.ndim).expand(len(dot), *self.out.shape),)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        into[0].add(lower(bars[0], self.value.shape))


class Reduced(Rule):
    """sum and mean."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        given = step.args[1] if len(step.args) > 1 else None
        ndim = self.value.ndim
        dims = [given] if isinstance(given, int) else given or range(ndim)
        self.dims = [d % ndim for d in dims] if ndim else []  # torch accepts dimension 0 for a single number, too
        number = max(1, self.value.numel())  # an expert may have no inputs
        self.scale = self.out.numel() / number if step.func.overloadpacket is aten.mean else 1.0

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        dot = dots[self.step.inputs[0]]
        total = dot.sum([d + 1 for d in self.dims]) if self.dims else dot
        return ((total * self.scale).reshape(len(dot), *self.out.shape),)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        kept = [1 if d in self.dims else size for d, size in enumerate(self.value.shape)]
        bar = (bars[0] * self.scale).reshape(len(bars[0]), *kept)
        into[0].add(bar.expand(len(bar), *self.value.shape))


# -------------------------------------------------------------------------------------------- the rest


class Other(Rule):
    """Any other operation, by torch.func."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.values = tuple(v.tensor.contiguous() for v in step.inputs)  # jvp writes tangents in their layout
        self.alive = [i for i, v in enumerate(step.outs) if v is not None]

    def _call(self, *values: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = filled(self.step, values)
        found = self.step.func(*args, **kwargs)
        return (found,) if isinstance(found, Tensor) else tuple(found[i] for i in self.alive)

    def _tangents(self, dots: Dots) -> tuple[Tensor, ...]:
        return tuple(dots[v] for v in self.step.inputs)

    def _bars(self, bars: Bars) -> tuple[Tensor, ...]:
        k = next(len(b) for b in bars if b is not None)
        given = [(bars[i], self.step.results[i]) for i in self.alive]
        return tuple(y.new_zeros(k, *y.shape) if b is None else b for b, y in given)

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor | None]:
        def along(*tangents: Tensor) -> tuple[Tensor, ...]:
            return torch.func.jvp(self._call, self.values, tangents)[1]  # type: ignore[no-any-return]

        found = dict(zip(self.alive, torch.func.vmap(along)(*self._tangents(dots)), strict=True))
        return [found.get(i) for i in range(len(self.step.outs))]

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        pullback = torch.func.vjp(self._call, *self.values)[1]
        for sink, found in zip(into, torch.func.vmap(pullback)(self._bars(bars)), strict=True):
            if sink is not None:
                sink.add(found)

    def bend(self, bars: Bars, dots: Dots, into: Sinks) -> None:
        shared = tuple(bar[0] for bar in self._bars(bars))

        def back(*values: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(self._call, *values)[1](shared)  # type: ignore[no-any-return]

        def along(*tangents: Tensor) -> tuple[Tensor, ...]:
            return torch.func.jvp(back, self.values, tangents)[1]  # type: ignore[no-any-return]

        with torch.enable_grad():  # without it, some backward passes (of solve, det) use formulas without a derivative
            bent = torch.func.vmap(along)(*self._tangents(dots))
        for sink, found in zip(into, bent, strict=True):
            sink.add(found)
