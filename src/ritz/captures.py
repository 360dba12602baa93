"""One forward pass, recorded layer by layer: what went into each layer, and the gradients of what came out."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .errors import UnsupportedError
from .space import random_uniform


@dataclass(frozen=True)
class Capture:
    """One call of a layer: what went in, and the gradients of what came out."""

    name: str  # of the module
    module: nn.Module
    input: Tensor
    grad: Tensor  # (r, *output.shape), one for each of r cotangents
    params: Mapping[str, str]  # the module's own chosen parameters: attribute -> parameter name
    buffers: Mapping[str, Tensor]  # as they were in the call
    apart: bool = True  # whether its rows are those of the samples, in their order, as far as was looked


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


# ----------------------------------------------------------------------------------- which rows are whose


def half(out: Tensor, asked: Tensor) -> Tensor:
    """One cotangent on the samples that are `asked` (size,) alone, without zeros in it: (1, *out.shape)."""
    noise = random_uniform(out.numel(), ("layout",), out.device).to(out.dtype).reshape(out.shape) + 0.5
    return (noise * asked.reshape(-1, *[1] * (out.ndim - 1)))[None]


def sample_dim(capture: Capture, asked: Tensor) -> int | None:
    """Which dimension of a layer's output has the samples, or a whole number of rows of each; None if neither of two.

    Args:
        capture: With the gradient for `half`: that of a sample that was not asked for must be zero in its own rows.
        asked: Which samples were, (size,) bool.

    Example:
        >>> x, grad = torch.ones(3, 2, 1), torch.tensor([0.0, 1.0]).expand(1, 3, 2)[..., None]
        >>> sample_dim(Capture("", torch.nn.Linear(1, 1), x, grad, {}, {}), torch.tensor([False, True]))  # time first
        1
    """
    grad, size = capture.grad[0], len(asked)
    if grad.ndim and len(grad) % size == 0 and not bool(grad.reshape(size, -1)[~asked].any()):
        return 0
    rows = isinstance(
        capture.module, nn.Linear | nn.LayerNorm | nn.Embedding
    )  # all but the last dimension may be these
    return 1 if rows and grad.ndim > 2 and grad.shape[1] == size and not bool(grad[:, ~asked].any()) else None


def samples_first(captures: Sequence[Capture], dims: Sequence[int | None]) -> list[Capture]:
    """The same calls turned round where the samples are second, and marked where rows are those of no sample."""
    return [
        replace(capture, input=capture.input.transpose(0, 1), grad=capture.grad.transpose(1, 2)) if dim == 1
        else replace(capture, apart=dim == 0)
        for capture, dim in zip(captures, dims, strict=True)
    ]  # fmt: skip


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
