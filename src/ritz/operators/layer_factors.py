"""Kronecker factors of layers, from the inputs of the layers and the gradients of their outputs.

A layer with inputs a_nt and output gradients g_nt (sample n, position t that shares the weight) has parameter gradients
sum_t g_nt a_nt', and its block of the Gauss-Newton matrix (1/W) sum_n vec(.) vec(.)' is approximated by G (x) A:

    expand   A = mean over n, t of a a'            G = (1/W) sum over n, t of g g'           (Grosse and Martens 2016)
    reduce   A = mean over n of (mean_t a)(..)'    G = (1/W) sum over n of (sum_t g)(..)'    (Eschenhagen et al. 2023)

W is the weight by which the sum of losses is divided, so G (x) A has the units of the Hessian of the mean loss. The
bias is a last input that is always 1. Means are over the positions that count. Padding, which the loss ignores and
which gets no gradient, does not count. Everything here is a sum over samples, to be added up over batches.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..captures import Capture
from ..errors import UnsupportedError
from ..layers import padded, standardised
from ..losses import BinaryCrossEntropy, CallableLoss, CrossEntropy, Loss, SquaredError
from ..space import ParamSpace
from .units import Unit

Sharing = Literal["expand", "reduce"]
FisherKind = Literal["mc", "type2", "empirical"]
Statistics = dict[str, Tensor]  # "unit|what" -> a sum over samples
Bases = Mapping[str, tuple[Tensor | None, Tensor | None]]  # unit -> eigenvectors of G and of A; None is the identity
Reached = dict[str, Tensor]  # unit -> which positions (samples, t) get a gradient

_WORKSPACE = 1 << 25  # elements of patches, or of per-sample gradients, held at once


# ------------------------------------------------------------------------------------------- sums over samples


@dataclass(frozen=True)
class Collector:
    """The sums that factors are made of, from the recorded calls of one pass.

    Keys are "unit|input" (sum of a a'), "unit|rows" (how many), "unit|grad" (sum of g g'), "unit|scale" (squares of
    per-sample gradients in given bases, for EKFAC) and "unit|square" (of a diagonal block).

    Attributes:
        units: The blocks.
        sharing: How positions that share a weight are treated.
        most: A factor with more rows than this is diagonal.
        surely: If the rows of each sample are needed, refuse rows that mix samples, such as the nodes of a graph.
            Otherwise, if there are as many rows as samples, each counts as the row of one sample; other rows count
            together as those of one sample, which is right on average over the signs of cotangents.
    """

    units: Mapping[str, Unit]
    sharing: Sharing = "expand"
    most: int = 10_000
    surely: bool = True

    def __post_init__(self) -> None:
        if self.sharing not in get_args(Sharing):
            raise ValueError(f"sharing must be one of {', '.join(get_args(Sharing))}, got {self.sharing!r}")

    def layout(self, bases: Bases | None = None) -> ParamSpace:
        """The shapes of all possible sums, in a fixed order.

        A pass that does not call some layer, such as an expert without inputs, has only some of these sums.

        Example:
            >>> from ritz.operators.units import units_of
            >>> net = torch.nn.Linear(2, 3)
            >>> Collector(units_of(net, ("weight", "bias"))).layout().names
            ('|input', '|rows', '|grad')
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, unit in self.units.items():
            if unit.kind == "diagonal":
                shapes[f"{name}|square"] = (1, unit.outputs, 1)
                continue
            shapes[f"{name}|input"] = (1, unit.inputs) if unit.kind == "table" else self._square(unit, unit.inputs)
            shapes[f"{name}|rows"] = ()
            shapes[f"{name}|grad"] = self._square(unit, unit.outputs)
            if bases is not None and name in bases:
                shapes[f"{name}|scale"] = (unit.groups, unit.outputs, unit.inputs)
        return ParamSpace(tuple(shapes), tuple(map(torch.Size, shapes.values())))

    def _square(self, unit: Unit, width: int) -> tuple[int, ...]:
        """The shape of a factor, or of its diagonal."""
        return (unit.groups, width) if width > self.most else (unit.groups, width, width)

    def inputs(self, captures: Sequence[Capture], size: int, reached: Reached | None = None) -> Statistics:
        """The sums that do not depend on the cotangents; if `reached` is given, over these positions only."""
        found: Statistics = {}
        for unit, calls in self._called(captures, size):
            if unit.kind == "layer":
                for some, a in self._rows(unit, calls, self._samples(calls, size)):
                    counted = a.new_ones(len(a), a.shape[2])  # (b, t)
                    if reached is not None:
                        counted = reached[unit.name][some].to(a)
                        a = a * counted[:, None, :, None]
                    if self.sharing == "reduce":  # the mean over a sample's positions, if it has any
                        places = counted.sum(1, keepdim=True)
                        a = a.sum(2, keepdim=True) / places.clamp(min=1)[:, None, :, None]
                        counted = places.clamp(max=1)
                    _add(found, f"{unit.name}|input", self._input_moment(a, counted, unit))
                    _add(found, f"{unit.name}|rows", counted.sum())
            elif unit.kind == "table":
                for call in calls:
                    token, kept = _tokens(call)
                    counts = torch.bincount(token[kept], minlength=unit.inputs).to(_precise(call.grad))
                    _add(found, f"{unit.name}|input", counts[None])
                    _add(found, f"{unit.name}|rows", counts.sum())
        return found

    def reached(self, captures: Sequence[Capture], size: int) -> Reached:
        """Which positions (samples, t) of each layer get a gradient."""
        found = {}
        for unit, calls in self._called(captures, size):
            if unit.kind == "layer":
                g = _joined([_gradients(unit, call, self._samples(calls, size)) for call in calls], dim=3)
                found[unit.name] = (g != 0).any(-1).any(2).any(0)
        return found

    def gradients(self, captures: Sequence[Capture], size: int, bases: Bases | None = None) -> Statistics:
        """The sums of one stack of cotangents; with "unit|scale" for the blocks whose `bases` are given."""
        found: Statistics = {}
        for unit, calls in self._called(captures, size, bases or ()):
            if unit.kind == "diagonal":
                own = next(iter(unit.params))
                total = _summed([_norm_gradient(call, own, size) for call in calls])
                _add(found, f"{unit.name}|square", total.square().sum((0, 1)).reshape(1, -1, 1))
            elif unit.kind == "table":
                for call in calls:
                    kept = call.grad.flatten(1, -2)[:, _tokens(call)[1]].to(_precise(call.grad))  # (r, n, outputs)
                    _add(found, f"{unit.name}|grad", self._moment(kept.flatten(0, 1)[:, None, None], unit.outputs))
            else:
                g = _joined([_gradients(unit, call, self._samples(calls, size)) for call in calls], dim=3)
                shared = g if self.sharing == "expand" else g.sum(-2, keepdim=True)
                shared = shared.flatten(0, 1)  # (r b, groups, t, outputs)
                _add(found, f"{unit.name}|grad", self._moment(shared, unit.outputs))
                if bases is not None and unit.name in bases:
                    samples = size if self.surely else self._samples(calls, size)
                    for call in calls:
                        _by_sample(call, samples)  # raises an error for rows that belong to no sample
                    g = _joined([_gradients(unit, call, samples) for call in calls], dim=3)
                    for some, a in self._rows(unit, calls, samples):
                        _add(found, f"{unit.name}|scale", _scale(_with_bias(a, unit), g[:, some], *bases[unit.name]))
        return found

    def _called(
        self, captures: Sequence[Capture], size: int, scaled: Collection[str] = ()
    ) -> Iterator[tuple[Unit, list[Capture]]]:
        """Each block with the calls of its module, with samples first if the block needs the rows of each sample."""
        for unit in self.units.values():
            # a call without rows, as of an expert without work, is none
            calls = [call for call in captures if call.name == unit.module and call.grad.numel()]
            if unit.kind == "layer" and (self.sharing == "reduce" or unit.name in scaled):
                calls = [call.samples_first(size, self.surely) for call in calls]
                if self.surely:
                    _refuse_mixed(calls, size)
            elif unit.kind == "diagonal":
                # rows of a LayerNorm may not be samples, even if there are as many rows as samples
                calls = [
                    call.samples_first(size, self.surely and isinstance(call.module, nn.LayerNorm)) for call in calls
                ]
            if calls:
                yield unit, calls

    def _moment(self, rows: Tensor, width: int) -> Tensor:
        """Sum of x x' over rows (b, groups, t, width), or of its diagonal."""
        x = rows.transpose(0, 1).flatten(1, 2)  # (groups, b t, width)
        return x.square().sum(1) if width > self.most else x.mT @ x

    def _input_moment(self, a: Tensor, counted: Tensor, unit: Unit) -> Tensor:
        """Sum of a a' over rows (b, groups, t, features) with the 1 of the bias appended, without copying the rows.

        Rows that are not `counted` (b, t) are zero.
        """
        if "bias" not in unit.params:
            return self._moment(a, unit.inputs)
        moment, sums = self._moment(a, unit.inputs), a.sum((0, 2))[:, None]  # (groups, 1, features)
        count = counted.sum().expand(unit.groups, 1, 1)
        if moment.ndim == 2:
            return torch.cat([moment, count[:, 0]], dim=1)
        return torch.cat([torch.cat([moment, sums.mT], dim=2), torch.cat([sums, count], dim=2)], dim=1)

    def _samples(self, calls: list[Capture], size: int) -> int:
        """The number of samples; 1 if rows belong to no sample (nodes of a graph), so that all are positions of one."""
        mixed = any(_num_rows(call) % size or not call.apart for call in calls)
        return 1 if mixed and (self.sharing == "expand" or not self.surely) else size

    def _rows(self, unit: Unit, calls: list[Capture], size: int) -> Iterator[tuple[slice, Tensor]]:
        """Inputs (b, groups, t, features) of some samples at a time, with the slice of these samples."""
        placed = [_by_sample(call, size) for call in calls]
        each = unit.inputs * unit.groups * sum(_num_places(call) for call in calls) // size
        step = max(1, _WORKSPACE // max(each, 1))
        for start in range(0, size, step):
            some = slice(start, start + step)
            rows = [_features(unit, call, x[some]) for call, x in zip(calls, placed, strict=True)]
            yield some, _joined(rows, dim=2)


def _add(into: Statistics, key: str, value: Tensor) -> None:
    into[key] = into[key] + value if key in into else value


def add_up(into: Statistics, more: Statistics) -> None:
    """Add the sums of another pass."""
    for key, value in more.items():
        _add(into, key, value)


def _precise(x: Tensor) -> torch.dtype:
    """At least float32: sums of half-precision squares lose their digits."""
    return torch.promote_types(x.dtype, torch.float32)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """The positions of several calls side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _summed(gradients: list[Tensor]) -> Tensor:
    """The sum over calls of gradients (r, size, *shape); if those of one call count as one sample's, all do."""
    if len({g.shape[1] for g in gradients}) > 1:
        gradients = [g.sum(1, keepdim=True) for g in gradients]
    return torch.stack(gradients).sum(0)


def _num_rows(call: Capture) -> int:
    """Rows of a linear layer's input, samples of a convolution's."""
    lead = call.input.shape[:-1] if isinstance(call.module, nn.Linear) else call.input.shape[:1]
    return lead.numel()


def _num_places(call: Capture) -> int:
    """Number of positions of all samples together."""
    places = call.grad.shape[1:-1] if isinstance(call.module, nn.Linear) else call.grad[:, :, 0].shape[1:]
    return places.numel()


def _refuse_mixed(calls: Sequence[Capture], size: int) -> None:
    """Raise an error if the rows of a call are not those of single samples."""
    for call in calls:
        if not call.apart:
            raise UnsupportedError(
                f"the rows of {call.name} are not those of the {size} samples in their order: they mix samples, or the "
                "samples are in a third dimension; EKFAC and sharing='reduce' need the rows of each sample, so use "
                "KFAC with 'expand'"
            )


def _by_sample(call: Capture, size: int) -> Tensor:
    """The input of a call as (size, k, ...)."""
    x = call.input.detach()
    if isinstance(call.module, nn.Linear):
        x = x.reshape(-1, x.shape[-1])
    elif x.ndim != len(call.module.kernel_size) + 2:  # type: ignore[arg-type]
        raise UnsupportedError(f"{call.name} was called without a batch dimension")
    if len(x) % size:
        raise UnsupportedError(f"the input {tuple(call.input.shape)} of {call.name} does not hold {size} samples")
    split: Tensor = x.unflatten(0, (size, -1))
    return split


def _gradients(unit: Unit, call: Capture, size: int) -> Tensor:
    """The gradients of a call as (r, size, groups, t, outputs)."""
    g = call.grad if isinstance(call.module, nn.Linear) else call.grad.flatten(3).mT  # outputs last
    g = g.reshape(len(g), size, -1, unit.groups, unit.outputs).to(_precise(g))
    return g.transpose(2, 3)


def _features(unit: Unit, call: Capture, x: Tensor) -> Tensor:
    """The factors of the weight at every position, (b, groups, t, features); no features if the weight is frozen."""
    x = x.to(_precise(call.grad))
    a = x[:, None] if isinstance(call.module, nn.Linear) else _patches(call.module, x)
    return a if "weight" in unit.params else a[..., :0]


def _with_bias(a: Tensor, unit: Unit) -> Tensor:
    """The features, with the 1 that multiplies the bias appended."""
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1) if "bias" in unit.params else a


def _patches(conv: Any, x: Tensor) -> Tensor:
    """Windows of the inputs (b, k, channels, *space) of a convolution: (b, groups, k places, features)."""
    spatial = len(conv.kernel_size)
    x = padded(conv, x.flatten(0, 1)).unflatten(0, x.shape[:2])
    for dim, (kernel, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), 3):
        x = x.unfold(dim, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    places, windows = range(3, 3 + spatial), range(3 + spatial, 3 + 2 * spatial)
    x = x.permute(0, 1, *places, 2, *windows).flatten(1, 1 + spatial).flatten(2)  # (b, k places, features)
    windows_by_group: Tensor = x.unflatten(-1, (conv.groups, -1)).transpose(1, 2)
    return windows_by_group


def _scale(a: Tensor, g: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Squares of per-sample gradients in the basis of left (x) right, summed: (groups, outputs, inputs)."""
    a = a if right is None else a @ right  # (b, groups, t, inputs)
    g = g if left is None else g @ left  # (r, b, groups, t, outputs)
    if a.shape[2] == 1:
        return torch.einsum("bgo,bgi->goi", g.square().sum((0, 3)), a.square().sum(2))
    step = max(1, _WORKSPACE // (a.shape[1] * a.shape[3] * g.shape[-1]))
    total = a.new_zeros(a.shape[1], g.shape[-1], a.shape[3])
    for one in g:
        for some, inputs in zip(one.split(step), a.split(step), strict=True):
            total += (some.mT @ inputs).square().sum(0)
    return total


def _tokens(call: Capture) -> tuple[Tensor, Tensor]:
    """Tokens (n,), and which of them have a gradient: all but the padding."""
    token = call.input.flatten()
    padding: Any = call.module.padding_idx
    return token, token.ne(-1 if padding is None else padding)


def _norm_gradient(call: Capture, own: str, size: int) -> Tensor:
    """Per-sample gradients (r, size, *shape) of weight or bias in y = weight * normalised + bias.

    Rows of no sample, or of all samples, count together as one (r, 1, *shape): random signs separate the samples.
    """
    dtype, norm = _precise(call.grad), call.module
    x, g = call.input.detach().to(dtype), call.grad.to(dtype)
    g = g * standardised(call, x) if own == "weight" else g
    if isinstance(norm, nn.LayerNorm):
        g = g.reshape(len(g), -1, *norm.normalized_shape)
    elif g.ndim > 3:
        g = g.flatten(3).sum(3)
    samples = size if call.apart and g.shape[1] % size == 0 else 1
    by_sample: Tensor = g.unflatten(1, (samples, -1)).sum(2)
    return by_sample


# ------------------------------------------------------------------------------------------- cotangents


def item_cotangents(loss: Loss, out: Tensor, batch: Any) -> Tensor:
    """sqrt(w_j) times the gradient of item j's own loss, all items at once (*out.shape): the empirical Fisher's root.

    Example:
        >>> item_cotangents(ritz.losses.SquaredError(), torch.tensor([[3.0]]), (None, torch.tensor([[1.0]]))).tolist()
        [[4.0]]
    """
    if isinstance(loss, CallableLoss):  # its items are evaluated one by one, with weight 1
        return _gradient(lambda o: loss.total(o, batch), out, out.new_ones(()))
    weight = loss.items(out, batch).weight
    return _gradient(lambda o: loss.items(o, batch).loss, out, weight.sqrt())


def _gradient(fn: Callable[[Tensor], Tensor], out: Tensor, cotangent: Tensor) -> Tensor:
    with torch.enable_grad():
        held = out.detach().requires_grad_()
        (found,) = torch.autograd.grad(fn(held), held, cotangent)
    return found


def leaves_out(loss: Loss, out: Tensor, batch: Any) -> bool:
    """Whether the loss ignores some of the items, such as padding.

    Example:
        >>> leaves_out(ritz.losses.CrossEntropy(), torch.ones(2, 3), (None, torch.tensor([1, -100])))
        True
    """
    if isinstance(loss, CallableLoss | SquaredError | BinaryCrossEntropy):  # in these losses every item counts
        return False
    if isinstance(loss, CrossEntropy):
        return loss.leaves_out(out, batch)
    return bool((loss.items(out, batch).weight == 0).any())


def collect(
    collector: Collector, stacks: Iterator[list[Capture]], size: int, bases: Bases | None = None, partly: bool = False
) -> Statistics:
    """All sums of one pass: inputs once, gradients of every stack of cotangents.

    If the loss ignores some items, only inputs at positions that get a gradient are summed, so that the matrix does not
    depend on the amount of padding.

    Args:
        collector: The sums to compute.
        stacks: The recorded calls for each stack of cotangents.
        size: Number of samples.
        bases: Bases of EKFAC.
        partly: Whether the loss ignores some items, see `leaves_out`.
    """
    found: Statistics = {}
    captures: list[Capture] = []
    reached: Reached = {}
    for captures in stacks:
        add_up(found, collector.gradients(captures, size, bases))
        for name, places in collector.reached(captures, size).items() if partly else ():
            reached[name] = reached[name] | places if name in reached else places
    add_up(found, collector.inputs(captures, size, reached if partly else None))
    return found
