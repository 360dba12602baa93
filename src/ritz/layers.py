"""One table of layer rules: what a layer's input and output gradient say about its parameters, sample by sample.

A layer y = W a + b that is called once has, for sample i and output gradient g, the parameter gradient

    dW_i = sum_t g_t a_t',    db_i = sum_t g_t        (t over the positions that share W: tokens, pixels)

so its squared norm needs no per-sample gradient to be stored: ||g||^2 ||a||^2 at one position (Goodfellow 2015), and
for T positions the cheaper of the product itself and the Gram matrices, sum_{t,t'} (g_t . g_t') (a_t . a_t'). Nor do
the squares of its entries, summed over samples: at one position they are sum_i g_i^2 (a_i^2)', squares entry by entry.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .captures import Capture, owners
from .errors import UnsupportedError

# elements of a workspace of the direct product; larger ones fall out of the cache and cost twice the time
_WORKSPACE = {"cpu": 1 << 21}


# ------------------------------------------------------------------------------ gradients of single samples


class SampleGradients(Protocol):
    """The gradients of one parameter, one for each sample and cotangent, by what their squares add up to."""

    def norms(self) -> Tensor:
        """Over entries and cotangents: (size,)."""

    def entries(self) -> Tensor:
        """Over samples and cotangents: of the parameter's shape."""


@dataclass(frozen=True)
class Plain:
    """Gradients that are there as they are."""

    each: Tensor  # (size, r, *shape)

    def norms(self) -> Tensor:
        """Over entries and cotangents."""
        return _sum_squares(self.each)

    def entries(self) -> Tensor:
        """Over samples and cotangents."""
        return self.each.square().sum((0, 1))


@dataclass(frozen=True)
class Outer:
    """sum_t g_t a_t' of a matrix in groups, without the gradients; some samples at a time, for patches take room."""

    pieces: Callable[[], Iterable[tuple[Tensor, Tensor]]]  # g (B, G, r, out, T) and a (B, G, in, T)
    shape: torch.Size  # of the parameter, (G out, in, ...)

    def norms(self) -> Tensor:
        """Over entries and cotangents."""
        return torch.cat([_outer_norms(g.flatten(2, 3), a) for g, a in self.pieces()])

    def entries(self) -> Tensor:
        """Over samples and cotangents."""
        return torch.stack([_outer_entries(g, a) for g, a in self.pieces()]).sum(0).reshape(self.shape)


@dataclass(frozen=True)
class Rows:
    """Gradients of some rows of a table, and nothing elsewhere."""

    each: Tensor  # (size, r, T, d)
    index: Tensor  # of the rows, (size, T)
    num: int  # of all rows

    def norms(self) -> Tensor:
        """Over entries and cotangents."""
        return _sum_squares(self.each)

    def entries(self) -> Tensor:
        """Over samples and cotangents."""
        squares = self.each.square().sum(1).flatten(0, 1)
        return squares.new_zeros(self.num, squares.shape[-1]).index_add(0, self.index.flatten(), squares)


Gradients = dict[str, SampleGradients]  # by attribute
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class LayerRule:
    """What is known of a module type."""

    params: frozenset[str]  # the parameters it explains
    gradients: Callable[[Capture, int], Gradients]
    applies: Callable[[Any], bool] = lambda module: True


def sample_gradients(capture: Capture, size: int) -> Gradients:
    """dloss_i / dparam for each of `size` samples and of r cotangents, by parameter name.

    The first dimension of input and output must hold the samples, or a whole number of rows of each in turn.

    Raises:
        UnsupportedError: If the module has no rule, or its input is not laid out by samples.

    Example:
        >>> layer, a, g = torch.nn.Linear(2, 1), torch.tensor([[3.0, 4.0]]), torch.tensor([[[2.0]]])
        >>> names = {"weight": "fc.weight", "bias": "fc.bias"}
        >>> found = sample_gradients(Capture("fc", layer, a, g, names, {}), size=1)
        >>> {name: each.norms() for name, each in found.items()}  # 2^2 5^2 and 2^2
        {'fc.weight': tensor([100.]), 'fc.bias': tensor([4.])}
        >>> found["fc.weight"].entries()  # 2^2 3^2 and 2^2 4^2
        tensor([[36., 64.]])
    """
    rule = rule_of(capture.module)
    if rule is None:
        raise UnsupportedError(f"{type(capture.module).__name__} has no layer rule")
    rows = capture.grad.shape[1] if capture.grad.ndim > 1 else 0
    if capture.input.ndim == 0 or len(capture.input) != rows or rows % size or not rows:
        raise UnsupportedError(f"the input {tuple(capture.input.shape)} of {capture.name} does not hold {size} samples")
    found = rule.gradients(_in_one_precision(capture), size)
    return {capture.params[own]: found[own] for own in capture.params}


def _in_one_precision(capture: Capture) -> Capture:
    """Under autocast a layer takes float32 and gives bfloat16; of 16-bit numbers squares would lose their digits."""
    x, dtype = capture.input, torch.promote_types(capture.grad.dtype, torch.float32)
    if x.is_floating_point():
        dtype = torch.promote_types(dtype, x.dtype)
        x = x.to(dtype)
    buffers = {name: own.to(dtype) if own.is_floating_point() else own for name, own in capture.buffers.items()}
    return replace(capture, input=x, grad=capture.grad.to(dtype), buffers=buffers)


def _by_sample(x: Tensor, size: int, dim: int = 0) -> Tensor:
    """(size * k, ...) as (size, k, ...) at dimension `dim`."""
    split: Tensor = x.unflatten(dim, (size, -1))
    return split


def _sum_squares(x: Tensor) -> Tensor:
    """Sum of squares over all but the first dimension."""
    return x.flatten(1).square().sum(1)


def _outer_norms(g: Tensor, a: Tensor) -> Tensor:
    """sum over rows R and groups of ||g a'||_F^2 for g (B, G, R, T) and a (B, G, F, T): (B,)."""
    groups, rows, positions, features = *g.shape[1:], a.shape[2]
    if positions == 1:
        return (_sum_groups(g) * _sum_groups(a)).sum(1)
    gram = positions * positions * (rows + features) < rows * positions * features
    step = _samples_at_once(groups * (positions * positions if gram else rows * features), g.device)
    by = _by_gram if gram else _by_product
    return torch.cat([by(gs, xs) for gs, xs in zip(g.split(step), a.split(step), strict=True)])


def _by_gram(g: Tensor, a: Tensor) -> Tensor:
    """(g'g) . (a'a), the sum over cotangents taken inside."""
    return ((g.mT @ g) * (a.mT @ a)).flatten(1).sum(1)


def _by_product(g: Tensor, a: Tensor) -> Tensor:
    return _sum_squares(g @ a.mT)


def _outer_entries(g: Tensor, a: Tensor) -> Tensor:
    """Squares of g a', entry by entry, summed over samples and cotangents, g (B, G, r, R, T), a (B, G, F, T)."""
    groups, cotangents, rows, positions = g.shape[1:]
    if positions == 1:
        both: Tensor = g[..., 0].square().sum(2).permute(1, 2, 0) @ a[..., 0].square().transpose(0, 1)
        return both
    step = _samples_at_once(groups * cotangents * rows * a.shape[2], g.device)
    pairs = zip(g.flatten(2, 3).split(step), a.split(step), strict=True)
    squares = torch.stack([(gs @ xs.mT).square().sum(0) for gs, xs in pairs]).sum(0)  # (G, r R, F)
    summed: Tensor = squares.unflatten(1, (cotangents, rows)).sum(1)
    return summed


def _samples_at_once(each: int, device: torch.device) -> int:
    """How many samples fit in the workspace, at so many elements for each."""
    return max(1, _WORKSPACE.get(device.type, 1 << 27) // max(each, 1))


def _sum_groups(x: Tensor) -> Tensor:
    """(B, G, ...) -> (B, G) sums of squares."""
    return x.flatten(2).square().sum(2)


# --------------------------------------------------------------------------------------------- the rules


def _linear(capture: Capture, size: int) -> Gradients:
    linear = _module(capture, nn.Linear)
    a = capture.input.detach().reshape(size, -1, capture.input.shape[-1])  # (B, T, in)
    g = capture.grad.reshape(len(capture.grad), size, -1, capture.grad.shape[-1])  # (r, B, T, out)
    rows = g.permute(1, 0, 3, 2)[:, None]  # (B, 1, r, out, T)
    found: Gradients = {"weight": Outer(lambda: [(rows, a.mT[:, None])], linear.weight.shape)}
    if "bias" in capture.params:
        found["bias"] = Plain(g.sum(2).transpose(0, 1))
    return found


def _conv(capture: Capture, size: int) -> Gradients:
    conv: Any = capture.module
    spatial = len(conv.kernel_size)
    if capture.input.ndim != spatial + 2:
        raise UnsupportedError(f"{capture.name} was called without a batch dimension")
    # (B, r, k, out, T): positions last; for k rows of one sample they are positions too
    g = _by_sample(capture.grad.flatten(3).transpose(0, 1), size).permute(0, 2, 1, 3, 4)
    found: Gradients = {}
    if "bias" in capture.params:
        found["bias"] = Plain(g.sum((2, 4)))
    if "weight" in capture.params:
        rows = g.transpose(2, 3).flatten(3)  # (B, r, out, k T)
        x = _by_sample(padded(conv, capture.input.detach()), size)
        found["weight"] = Outer(partial(_patches, conv, x, rows), conv.weight.shape)
    return found


def _patches(conv: Any, x: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients and patches by groups, from gradients (B, r, out, k T) and padded inputs (B, k, C, *space)."""
    patch = conv.in_channels * math.prod(conv.kernel_size)
    step = _samples_at_once((patch + g.shape[1] * g.shape[2]) * g.shape[-1], g.device)
    grouped = g.unflatten(2, (conv.groups, -1)).transpose(1, 2)  # (B, groups, r, out / groups, k T)
    for xs, gs in zip(x.split(step), grouped.split(step), strict=True):
        yield gs, _unfolded(conv, xs)


def _unfolded(conv: Any, x: Tensor) -> Tensor:
    """What each place sees of padded inputs (B, k, C, *space): (B, groups, C / groups prod(kernel), k T)."""
    for dim, (kernel, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), 3):
        x = x.unfold(dim, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    spatial = len(conv.kernel_size)
    windows = list(range(3 + spatial, 3 + 2 * spatial))
    places = list(range(3, 3 + spatial))
    patches = x.permute(0, 2, *windows, 1, *places)  # (B, C, *kernel, k, *places)
    return patches.reshape(len(x), conv.groups, conv.in_channels // conv.groups * math.prod(conv.kernel_size), -1)


def padded(conv: Any, x: Tensor) -> Tensor:
    """The input with the padding of the convolution, in its mode, made explicit."""
    if conv.padding == "valid":
        return x
    if conv.padding == "same":
        totals = [dilation * (kernel - 1) for dilation, kernel in zip(conv.dilation, conv.kernel_size, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(pad, pad) for pad in conv.padding]
    if not any(map(sum, sides)):
        return x
    flat = [pad for pair in reversed(sides) for pad in pair]
    return F.pad(x, flat, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)


def _affine(normalised: Tensor, capture: Capture, size: int, keep: tuple[int, ...]) -> Gradients:
    """y = weight * normalised + bias, the parameters along dimensions `keep` of the input and shared over the rest."""
    share = [dim + 1 for dim in range(1, normalised.ndim) if dim not in keep]

    def over_places(x: Tensor) -> Plain:  # (r, B k, ...) -> (B, r, ...)
        x = x.sum(share) if share else x
        return Plain(_by_sample(x, size, dim=1).sum(2).transpose(0, 1))

    found: Gradients = {"bias": over_places(capture.grad)} if "bias" in capture.params else {}
    if "weight" in capture.params:
        found["weight"] = over_places(capture.grad * normalised)
    return found


def _normalisation(capture: Capture, size: int) -> Gradients:
    x, norm = capture.input.detach(), capture.module
    if _by_batch(capture):
        raise UnsupportedError(f"{capture.name} normalises by the batch, so its samples have no gradients of their own")
    last = len(norm.normalized_shape) if isinstance(norm, nn.LayerNorm) else 0
    keep = tuple(range(x.ndim - last, x.ndim)) if last else (1,)
    return _affine(standardised(capture, x), capture, size, keep)


def standardised(capture: Capture, x: Tensor) -> Tensor:
    """What a normalisation of layers, groups or batches makes of an input before its weight and bias.

    Example:
        >>> norm = Capture("", nn.LayerNorm(2), torch.tensor([[0.0, 2.0]]), torch.empty(0), {}, {})
        >>> [round(number, 3) for number in standardised(norm, norm.input)[0].tolist()]
        [-1.0, 1.0]
    """
    norm: Any = capture.module
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, eps=norm.eps)
    if _by_batch(capture):
        return F.batch_norm(x, None, None, training=True, eps=norm.eps)
    mean, variance = (capture.buffers[name].to(x) for name in _RUNNING)
    return F.batch_norm(x, mean, variance, eps=norm.eps)


def _by_batch(capture: Capture) -> bool:
    """Whether a normalisation takes the statistics of the batch."""
    kept = all(capture.buffers.get(name) is not None for name in _RUNNING)
    return isinstance(capture.module, nn.modules.batchnorm._BatchNorm) and (capture.module.training or not kept)


def _embedding(capture: Capture, size: int) -> Gradients:
    """Gradients of equal tokens add up before they are squared."""
    token = capture.input.reshape(size, -1)  # (B, T)
    g = capture.grad.reshape(len(capture.grad), *token.shape, -1)  # (r, B, T, d)
    ranked, order = token.sort(1)
    slot = F.pad((ranked[:, 1:] != ranked[:, :-1]).cumsum(1), (1, 0))  # equal tokens, equal slot
    slot = torch.empty_like(slot).scatter(1, order, slot)
    sums = torch.zeros_like(g).scatter_add(2, slot[..., None].expand_as(g), g)
    index = torch.zeros_like(token).scatter(1, slot, token)  # slots that are left over hold nothing, for token 0
    return {"weight": Rows(sums.transpose(0, 1), index, _module(capture, nn.Embedding).num_embeddings)}


def _module(capture: Capture, kind: type[M]) -> M:
    assert isinstance(capture.module, kind)
    return capture.module


_BOTH = frozenset({"weight", "bias"})
_CONV = LayerRule(_BOTH, _conv)
_NORM = LayerRule(_BOTH, _normalisation)
_RUNNING = ("running_mean", "running_var")
# exact types: a subclass may do anything with its parameters
RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LayerRule(_BOTH, _linear),
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
    nn.Conv3d: _CONV,
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.BatchNorm3d: _NORM,
    nn.LayerNorm: _NORM,
    nn.GroupNorm: _NORM,
    nn.Embedding: LayerRule(
        frozenset({"weight"}), _embedding, lambda table: table.max_norm is None and not table.scale_grad_by_freq
    ),
}


def rule_of(module: nn.Module) -> LayerRule | None:
    """The rule for a module, or None; a module whose `forward` was replaced has none."""
    rule = RULES.get(type(module))
    return rule if rule is not None and "forward" not in vars(module) and rule.applies(module) else None


def without_rule(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """Why the layer rules do not explain every chosen parameter, or None where they do.

    Example:
        >>> without_rule(torch.nn.PReLU(), ("weight",))
        'PReLU has no layer rule'
    """
    seen: Counter[str] = Counter()
    modules = dict(model.named_modules())
    for name, own in owners(model, names).items():
        rule = rule_of(modules[name])
        if rule is None or not rule.params.issuperset(own):
            return f"{type(modules[name]).__name__} has no layer rule"
        seen.update(own.values())
    shared = [name for name, count in seen.items() if count > 1]
    return f"{shared[0]} is shared between modules" if shared else None
