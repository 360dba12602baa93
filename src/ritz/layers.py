"""One table of layer rules: what a layer's input and output gradient say about its parameters, sample by sample.

A layer y = W a + b that is called once has, for sample i and output gradient g, the parameter gradient

    dW_i = sum_t g_t a_t',    db_i = sum_t g_t        (t over the positions that share W: tokens, pixels)

so its squared norm needs no per-sample gradient to be stored: ||g||^2 ||a||^2 at one position (Goodfellow 2015), and
for T positions the cheaper of the product itself and the Gram matrices, sum_{t,t'} (g_t . g_t') (a_t . a_t').
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .errors import UnsupportedError

# elements of a workspace of the direct product; larger ones fall out of the cache and cost twice the time
_WORKSPACE = {"cpu": 1 << 21}


@dataclass(frozen=True)
class Capture:
    """One call of a layer: what went in, and the gradients of what came out."""

    name: str  # of the module
    module: nn.Module
    input: Tensor
    grad: Tensor  # (r, *output.shape), one for each of r cotangents
    params: Mapping[str, str]  # the module's own chosen parameters: attribute -> parameter name
    buffers: Mapping[str, Tensor]  # as they were in the call


# ------------------------------------------------------------------------------------------ squared norms

Squares = dict[str, Tensor]  # attribute -> (size,)
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class LayerRule:
    """What is known of a module type."""

    params: frozenset[str]  # the parameters it explains
    squares: Callable[[Capture, int], Squares]  # per-sample squared norms, summed over cotangents
    applies: Callable[[Any], bool] = lambda module: True


def squared_norms(capture: Capture, size: int) -> dict[str, Tensor]:
    """||dloss_i / dparam||^2 for each of `size` samples, summed over the r cotangents, by parameter name.

    The first dimension of input and output must hold the samples, or a whole number of rows of each in turn.

    Raises:
        UnsupportedError: If the module has no rule, or its input is not laid out by samples.

    Example:
        >>> layer, a, g = torch.nn.Linear(2, 1), torch.tensor([[3.0, 4.0]]), torch.tensor([[[2.0]]])
        >>> names = {"weight": "fc.weight", "bias": "fc.bias"}
        >>> squared_norms(Capture("fc", layer, a, g, names, {}), size=1)  # 2^2 5^2 and 2^2
        {'fc.weight': tensor([100.]), 'fc.bias': tensor([4.])}
    """
    rule = rule_of(capture.module)
    if rule is None:
        raise UnsupportedError(f"{type(capture.module).__name__} has no layer rule")
    rows = capture.grad.shape[1] if capture.grad.ndim > 1 else 0
    if capture.input.ndim == 0 or len(capture.input) != rows or rows % size or not rows:
        raise UnsupportedError(f"the input {tuple(capture.input.shape)} of {capture.name} does not hold {size} samples")
    found = rule.squares(capture, size)
    return {capture.params[own]: found[own] for own in capture.params}


def _by_sample(x: Tensor, size: int, dim: int = 0) -> Tensor:
    """(size * k, ...) as (size, k, ...) at dimension `dim`."""
    split: Tensor = x.unflatten(dim, (size, -1))
    return split


def _sum_squares(x: Tensor) -> Tensor:
    """Sum of squares over all but the first dimension."""
    return x.flatten(1).square().sum(1)


def _outer_squares(g: Tensor, a: Tensor) -> Tensor:
    """sum over rows r and groups of ||g a'||_F^2 for g (B, G, R, T) and a (B, G, F, T): (B,)."""
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


def _samples_at_once(each: int, device: torch.device) -> int:
    """How many samples fit in the workspace, at so many elements for each."""
    return max(1, _WORKSPACE.get(device.type, 1 << 27) // max(each, 1))


def _sum_groups(x: Tensor) -> Tensor:
    """(B, G, ...) -> (B, G) sums of squares."""
    return x.flatten(2).square().sum(2)


def _linear(capture: Capture, size: int) -> Squares:
    a = capture.input.detach().reshape(size, -1, capture.input.shape[-1])  # (B, T, in)
    g = capture.grad.reshape(len(capture.grad), size, -1, capture.grad.shape[-1])  # (r, B, T, out)
    found = {}
    if "bias" in capture.params:
        found["bias"] = _sum_squares(g.sum(2).transpose(0, 1))
    if "weight" in capture.params:
        rows = g.permute(1, 0, 3, 2).flatten(1, 2)  # (B, r out, T)
        found["weight"] = _outer_squares(rows[:, None], a.mT[:, None])
    return found


def _conv(capture: Capture, size: int) -> Squares:
    conv: Any = capture.module
    spatial = len(conv.kernel_size)
    if capture.input.ndim != spatial + 2:
        raise UnsupportedError(f"{capture.name} was called without a batch dimension")
    # (B, r, k, out, T): positions last; for k rows of one sample they are positions too
    g = _by_sample(capture.grad.flatten(3).transpose(0, 1), size).permute(0, 2, 1, 3, 4)
    found = {}
    if "bias" in capture.params:
        found["bias"] = _sum_squares(g.sum((2, 4)))
    if "weight" in capture.params:
        rows = g.transpose(2, 3).flatten(3)  # (B, r, out, k T)
        patch = conv.in_channels * math.prod(conv.kernel_size)
        step = _samples_at_once((patch + rows.shape[1] * rows.shape[2]) * rows.shape[-1], rows.device)
        x = _by_sample(padded(conv, capture.input.detach()), size)
        parts = [_conv_weight(conv, xs, gs) for xs, gs in zip(x.split(step), rows.split(step), strict=True)]
        found["weight"] = torch.cat(parts)
    return found


def _conv_weight(conv: Any, x: Tensor, g: Tensor) -> Tensor:
    """Squared norms of the weight gradients from padded inputs (B, k, C, *space) and gradients (B, r, out, k T)."""
    size, groups = len(x), conv.groups
    for dim, (kernel, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), 3):
        x = x.unfold(dim, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    spatial = len(conv.kernel_size)
    windows = list(range(3 + spatial, 3 + 2 * spatial))
    places = list(range(3, 3 + spatial))
    patches = x.permute(0, 2, *windows, 1, *places)  # (B, C, *kernel, k, *places)
    patches = patches.reshape(size, groups, conv.in_channels // groups * math.prod(conv.kernel_size), -1)
    g = g.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)  # (B, groups, r out / groups, k T)
    return _outer_squares(g, patches)


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


def _affine(normalised: Tensor, capture: Capture, size: int, keep: tuple[int, ...]) -> Squares:
    """y = weight * normalised + bias, the parameters along dimensions `keep` of the input and shared over the rest."""
    share = [dim + 1 for dim in range(1, normalised.ndim) if dim not in keep]

    def over_places(x: Tensor) -> Tensor:  # (r, B k, ...) -> (B, r ...)
        x = x.sum(share) if share else x
        return _by_sample(x, size, dim=1).sum(2).transpose(0, 1)

    found = {"bias": _sum_squares(over_places(capture.grad))} if "bias" in capture.params else {}
    if "weight" in capture.params:
        found["weight"] = _sum_squares(over_places(capture.grad * normalised))
    return found


def _layer_norm(capture: Capture, size: int) -> Squares:
    norm, x = _module(capture, nn.LayerNorm), capture.input.detach()
    keep = tuple(range(x.ndim - len(norm.normalized_shape), x.ndim))
    return _affine(F.layer_norm(x, norm.normalized_shape, eps=norm.eps), capture, size, keep)


def _group_norm(capture: Capture, size: int) -> Squares:
    norm = _module(capture, nn.GroupNorm)
    return _affine(F.group_norm(capture.input.detach(), norm.num_groups, eps=norm.eps), capture, size, (1,))


def _batch_norm(capture: Capture, size: int) -> Squares:
    norm = _module(capture, nn.modules.batchnorm._BatchNorm)
    mean, variance = capture.buffers.get("running_mean"), capture.buffers.get("running_var")
    if mean is None or variance is None or norm.training:
        raise UnsupportedError(f"{capture.name} normalises by the batch, which belongs to no sample")
    normalised = F.batch_norm(capture.input.detach(), mean, variance, eps=norm.eps)
    return _affine(normalised, capture, size, (1,))


def _embedding(capture: Capture, size: int) -> Squares:
    """Gradients of equal tokens add up before they are squared."""
    token = capture.input.reshape(size, -1)  # (B, T)
    g = capture.grad.reshape(len(capture.grad), *token.shape, -1)  # (r, B, T, d)
    ranked, order = token.sort(1)
    slot = F.pad((ranked[:, 1:] != ranked[:, :-1]).cumsum(1), (1, 0))  # equal tokens, equal slot
    slot = torch.empty_like(slot).scatter(1, order, slot)
    sums = torch.zeros_like(g).scatter_add(2, slot[..., None].expand_as(g), g)
    return {"weight": _sum_squares(sums.transpose(0, 1))}


def _module(capture: Capture, kind: type[M]) -> M:
    assert isinstance(capture.module, kind)
    return capture.module


_BOTH = frozenset({"weight", "bias"})
_CONV = LayerRule(_BOTH, _conv)
_NORM = LayerRule(_BOTH, _batch_norm)
# exact types: a subclass may do anything with its parameters
RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LayerRule(_BOTH, _linear),
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
    nn.Conv3d: _CONV,
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.BatchNorm3d: _NORM,
    nn.LayerNorm: LayerRule(_BOTH, _layer_norm),
    nn.GroupNorm: LayerRule(_BOTH, _group_norm),
    nn.Embedding: LayerRule(
        frozenset({"weight"}), _embedding, lambda table: table.max_norm is None and not table.scale_grad_by_freq
    ),
}


def rule_of(module: nn.Module) -> LayerRule | None:
    """The rule for a module, or None; a module whose `forward` was replaced has none."""
    rule = RULES.get(type(module))
    return rule if rule is not None and "forward" not in vars(module) and rule.applies(module) else None


# -------------------------------------------------------------------------------------- who owns what


def owners(model: nn.Module, names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The modules that hold chosen parameters: module name -> {attribute: parameter name}; tied ones come twice.

    Example:
        >>> owners(torch.nn.Sequential(torch.nn.Linear(1, 1)), ("0.weight",))
        {'0': {'weight': '0.weight'}}
    """
    known = {id(p): name for name, p in model.named_parameters() if name in names}
    held = {
        name: {own: known[id(p)] for own, p in module._parameters.items() if id(p) in known}
        for name, module in model.named_modules()
    }
    return {name: own for name, own in held.items() if own}


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


# ------------------------------------------------------------------------------ one recorded forward pass


@dataclass(frozen=True)
class _Call:
    name: str
    module: nn.Module
    input: Tensor
    version: int
    edge: GradientEdge  # of the output as it left the layer: an in-place operation after it does no harm
    params: Mapping[str, str]
    buffers: Mapping[str, Tensor]


class Recorder:
    """Notes the input and the output's place in the graph of every call of the modules that hold chosen parameters.

    Its hooks live as long as the `with` block.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        modules = dict(model.named_modules())
        self.held = {name: (modules[name], own) for name, own in owners(model, names).items()}
        self.calls: list[_Call] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Recorder":
        for name, (module, own) in self.held.items():
            hook = self._hook(name, own)
            # first in line: hooks of the user may replace the output
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str, own: Mapping[str, str]) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if isinstance(output, Tensor) and output.requires_grad and given:
                buffers = dict(module.named_buffers(recurse=False))
                edge = get_gradient_edge(output)
                self.calls.append(_Call(name, module, given[0], given[0]._version, edge, own, buffers))

        return note

    def check(self, out: Tensor, leaves: Mapping[str, Tensor]) -> None:
        """Refuse a parameter that reaches the outputs other than through the calls of its modules."""
        reached = reachable(out)
        self.calls = [call for call in self.calls if call.edge.node in reached]
        calls = Counter(name for call in self.calls for name in call.params.values())
        for name, times in uses(out, leaves).items():
            if times != calls[name]:
                raise UnsupportedError(f"{name} acts on the outputs other than through a call of its module")
        for call in self.calls:
            if call.input._version != call.version:
                raise UnsupportedError(f"the input of {call.name} was changed in place after the call")

    def captures(self, out: Tensor, cotangents: Tensor) -> list[Capture]:
        """The recorded calls with the gradients of their outputs for a stack of cotangents (r, *out.shape)."""
        edges = [call.edge for call in self.calls]
        grads = _pull_back(out, edges, cotangents) if edges else []
        return [
            Capture(call.name, call.module, call.input, grad, call.params, call.buffers)
            for call, grad in zip(self.calls, grads, strict=True)
        ]


def _pull_back(out: Tensor, edges: list[GradientEdge], cotangents: Tensor) -> list[Tensor]:
    """Gradients (r, ...) at each edge: batched on an accelerator, in turn on a CPU, where that is faster."""
    if out.device.type != "cpu" and len(cotangents) > 1:
        try:
            return _batched(out, edges, cotangents)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation whose backward pass cannot be batched
            pass
    return _in_turn(out, edges, cotangents)


def _batched(out: Tensor, edges: list[GradientEdge], cotangents: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, edges, cotangents, retain_graph=True, is_grads_batched=True))


def _in_turn(out: Tensor, edges: list[GradientEdge], cotangents: Tensor) -> list[Tensor]:
    passes = [torch.autograd.grad(out, edges, cotangent, retain_graph=True) for cotangent in cotangents]
    # samples first in memory, as the layer rules read it
    return [torch.stack(grads, dim=1).transpose(0, 1) for grads in zip(*passes, strict=True)]


def reachable(out: Tensor) -> set[Any]:
    """The nodes of the autograd graph behind an output."""
    seen: set[Any] = set()
    waiting = [get_gradient_edge(out).node] if out.requires_grad else []
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(after for after, _ in node.next_functions if after is not None)
    return seen


def uses(out: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, int]:
    """How often each leaf enters the graph behind an output.

    Example:
        >>> w, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> uses(w * w + 1, {"w": w, "b": b})
        {'w': 2, 'b': 0}
    """
    names: dict[Any, str] = {get_gradient_edge(leaf).node: name for name, leaf in leaves.items()}
    reached = reachable(out)
    counts = Counter(names[after] for node in reached for after, _ in node.next_functions if after in names)
    counts.update(names[node] for node in reached if node in names and not counts[names[node]])  # a leaf as the output
    return {name: counts[name] for name in leaves}
