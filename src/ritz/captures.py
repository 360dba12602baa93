"""One forward pass, recorded layer by layer: what went into each layer, and the gradients of what came out."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .errors import UnsupportedError


def _first(size: int) -> int:
    return 0


@dataclass(frozen=True)
class Capture:
    """One call of a layer: what went in, and the gradients of what came out."""

    name: str  # of the module
    module: nn.Module
    input: Tensor
    grad: Tensor  # (r, *output.shape), one for each of r cotangents
    params: Mapping[str, str]  # the module's own chosen parameters: attribute -> parameter name
    buffers: Mapping[str, Tensor]  # as they were in the call
    samples: Callable[[int], int] = _first  # given their number, which dimension of the input they are in

    def samples_first(self, size: int) -> "Capture":
        """With the samples in the first dimension: torch's transformers and recurrent networks have time there."""
        if self.samples(size) == 0:
            return self
        return replace(self, input=self.input.transpose(0, 1), grad=self.grad.transpose(1, 2), samples=_first)


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

    Its hooks live as long as the `with` block. In it nothing that torch.compile made runs compiled: code that was made
    before knows nothing of the hooks.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        modules = dict(model.named_modules())
        self.held = {name: (modules[name], own) for name, own in owners(model, names).items()}
        self.calls: list[_Call] = []
        self._seconds: set[int] | None = None  # calls with the samples in the second dimension, once asked for
        self._handles: list[RemovableHandle] = []
        self._eager: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __enter__(self) -> "Recorder":
        self._eager = _eager()
        for name, (module, own) in self.held.items():
            hook = self._hook(name, own)
            # first in line: hooks of the user may replace the output
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._eager.__exit__(None, None, None)
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

    def reaches(self, out: Tensor) -> bool:
        """Whether outputs come from this pass; they do where none of its layers was called."""
        reached = reachable(out)
        return not self.calls or any(call.edge.node in reached for call in self.calls)

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
            Capture(
                call.name, call.module, call.input, grad, call.params, call.buffers, partial(self._place, out, number)
            )
            for number, (call, grad) in enumerate(zip(self.calls, grads, strict=True))
        ]

    def _place(self, out: Tensor, number: int, size: int) -> int:
        """Which dimension of the input of a call holds the samples: the second, if it is that or none."""
        if not self._may_be_second(self.calls[number], size):
            return 0
        if self.calls[number].input.shape[0] % size:
            return 1
        if self._seconds is None:
            self._seconds = self._found_second(out, size)
        return int(number in self._seconds)

    @staticmethod
    def _may_be_second(call: _Call, size: int) -> bool:
        features = len(getattr(call.module, "normalized_shape", (1,)))
        return size > 1 and call.input.ndim - features >= 2 and call.input.shape[1] == size

    def _found_second(self, out: Tensor, size: int) -> set[int]:
        """Where the shape does not tell, as that of T = B does not: outputs of some samples have no gradient in others.

        Of two halves of the samples each is asked by itself: rows without any gradient are those of no sample.
        """
        asked = [n for n, call in enumerate(self.calls) if self._may_be_second(call, size)]
        if len(out) % size:
            return set()
        half = torch.arange(len(out), device=out.device) // (len(out) // size) % 2 == 0
        dense = torch.arange(1, out.numel() + 1, device=out.device).sin().to(out.dtype).view_as(out)
        masks = torch.stack([half, ~half]).view(2, -1, *[1] * (out.ndim - 1))
        grads = _pull_back(out, [self.calls[n].edge for n in asked], dense * masks)
        return {n for n, g in zip(asked, grads, strict=True) if not _apart(g, size) and _apart(g.transpose(1, 2), size)}


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled modules run as they are from here on, to the exit of what is given; where nothing was compiled, no more.

    Python that runs amid compiled code can not ask for it, and needs not: modules that it calls run as they are.
    """
    if "torch._dynamo" in sys.modules:  # whose import takes a second
        with contextlib.suppress(RuntimeError):
            stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return stance
    return contextlib.nullcontext()


def _apart(halves: Tensor, size: int) -> bool:
    """Whether the gradients (2, *shape) of even and of odd samples lie in rows of their own, in order."""
    rows = halves.shape[1]
    if rows % size:
        return False
    own = halves.reshape(2, size, -1).any(-1)
    return not bool(own[0, 1::2].any() | own[1, ::2].any())


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
