"""One forward pass, recorded layer by layer: what went into each layer, and the gradients of what came out.

Which rows of a layer belong to which sample is seen in gradients: outputs of half of the samples have none in rows of
the others. That is one backward pass more, for all layers; a caller that can do without certainty is spared it where
the number of rows leaves one answer, as long as samples do not mix. Numbers of single samples need all of them told
apart, in some more passes.
"""

import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .errors import UnsupportedError
from .space import random_permutation, random_uniform

Place = Literal["first", "in turn", "second"]


def _first(size: int, surely: bool) -> Place:
    return "first"


@dataclass(frozen=True)
class Capture:
    """One call of a layer: what went in, and the gradients of what came out."""

    name: str  # of the module
    module: nn.Module
    input: Tensor
    grad: Tensor  # (r, *output.shape), one for each of r cotangents
    params: Mapping[str, str]  # the module's own chosen parameters: attribute -> parameter name
    buffers: Mapping[str, Tensor]  # as they were in the call
    place: Callable[[int, bool], Place | None] = _first  # of the samples, given their number; see `samples_first`
    apart: bool = True  # whether its rows are those of the samples, in their order, as far as was looked

    def samples_first(self, size: int, surely: bool = True) -> "Capture":
        """With the rows of each of `size` samples side by side in the first dimension, in the order of the samples.

        Args:
            size: Samples.
            surely: Look also where their number tells whose the rows are unless they mix samples, as a graph's nodes.

        Returns:
            The capture, which says `apart=False` if its rows are those of no sample.
        """
        place = self.place(size, surely)
        if place == "second":
            return replace(self, input=self.input.transpose(0, 1), grad=self.grad.transpose(1, 2), place=_first)
        if place == "in turn":
            x, grad = _side_by_side(self.input, size, 0), _side_by_side(self.grad, size, 1)
            return replace(self, input=x, grad=grad, place=_first)
        return replace(self, apart=place is not None)


def _side_by_side(x: Tensor, size: int, dim: int) -> Tensor:
    """Rows of samples in turn, (k size, ...) at dimension `dim`, as (size k, ...)."""
    turned: Tensor = x.unflatten(dim, (-1, size)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    return turned


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


_BY_ROWS = nn.Linear | nn.LayerNorm | nn.Embedding  # samples may be in any dimension but the last of what they give


def told_apart(size: int, device: torch.device) -> list[Tensor]:
    """Sets of samples (size,) bool, so few that of any two samples each is in one of them without the other.

    Every sample has its own choice of n / 2 of n sets, and none of these choices has another in it.

    Example:
        >>> [asked.int().tolist() for asked in told_apart(3, torch.device("cpu"))]
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
        >>> len(told_apart(252, torch.device("cpu")))
        10
    """
    num = next(n for n in itertools.count(1) if math.comb(n, n // 2) >= size)
    chosen = list(itertools.islice(itertools.combinations(range(num), num // 2), size))
    return [torch.tensor([number in own for own in chosen], device=device) for number in range(num)]


def asking(out: Tensor, asked: Tensor) -> Tensor:
    """One cotangent (1, *out.shape) on the outputs of the samples `asked` (size,) alone, without zeros in it."""
    noise = random_uniform(out.numel(), ("layout",), out.device).to(out.dtype).reshape(out.shape) + 0.5
    mask = asked.repeat_interleave(len(out) // len(asked)).reshape(-1, *[1] * (out.ndim - 1))
    return (noise * mask)[None]


def places_of_samples(module: nn.Module, grad: Tensor, asked: Tensor) -> list[Place]:
    """Where a layer's output (*shape) may have the samples, if no other rows have a gradient than those asked for.

        first     a whole number of rows of each sample, side by side
        in turn   a row of every sample, and again, as of two views in one batch
        second    in the second dimension, as of steps before samples

    Args:
        module: The layer.
        grad: Of outputs of some samples.
        asked: Which these are, (size,) bool.

    Example:
        >>> layer, asked = torch.nn.Linear(1, 1), torch.tensor([True, False])
        >>> [places_of_samples(layer, torch.tensor(rows)[:, None], asked) for rows in ([1, 0, 1, 0], [1, 1, 0, 0])]
        [['in turn'], ['first']]
    """
    size, touched = len(asked), grad != 0
    by_place: dict[Place, Tensor] = {}
    if grad.ndim and len(grad) % size == 0:
        by_place["first"] = touched.reshape(size, -1)
        if len(grad) > size:
            by_place["in turn"] = touched.reshape(len(grad) // size, size, -1).transpose(0, 1)
    if _may_be_second(module, grad, size):
        by_place["second"] = touched.transpose(0, 1)
    return [place for place, rows in by_place.items() if not bool(rows[~asked].any())]


def _place_by_shape(module: nn.Module, x: Tensor, size: int) -> Place | None:
    """The same where the number of rows leaves one answer, if there is one; None where it does not."""
    second, first = _may_be_second(module, x, size), bool(x.ndim) and len(x) == size
    if second and len(x) % size and len(x) > 1:  # (1, size, features) may be queries that belong to all samples
        return "second"
    rows = x.shape[: -_features(module)] if isinstance(module, _BY_ROWS) else x.shape[:1]
    return "first" if not second and (first or rows.numel() % size) else None


def _may_be_second(module: nn.Module, x: Tensor, size: int) -> bool:
    return isinstance(module, _BY_ROWS) and x.ndim - _features(module) >= 2 and x.shape[1] == size


def _features(module: nn.Module) -> int:
    """Dimensions of a row."""
    return len(getattr(module, "normalized_shape", (1,)))


@contextlib.contextmanager
def _through_batch_norms(out: Tensor) -> Iterator[None]:
    """Backward passes go through batch normalisations sample by sample, as if these did not mix them."""

    def through(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        grad = outputs[0]
        return tuple(x if x is None or grad is None or x.shape != grad.shape else grad.to(x) for x in inputs)

    handles = [node.register_hook(through) for node in reachable(out) if "BatchNorm" in node.name()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
        self._places: list[Place | None] | None = None  # of the samples in each call, once looked at
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
        return [self._capture(out, number, grad) for number, grad in enumerate(grads)]

    def _capture(self, out: Tensor, number: int, grad: Tensor) -> Capture:
        call, place = self.calls[number], partial(self._place, out, number)
        return Capture(call.name, call.module, call.input, grad, call.params, call.buffers, place)

    def _place(self, out: Tensor, number: int, size: int, surely: bool) -> Place | None:
        """Where a call has the samples; by one backward pass more, for all calls, where the shapes do not tell."""
        call = self.calls[number]
        told: Place | None = "first" if size == 1 else None
        if told is None and not surely:
            told = _place_by_shape(call.module, call.input, size)
        if told is not None:
            return told
        if self._places is None:
            self._places = self._looked(out, size)
        return self._places[number]

    def _looked(self, out: Tensor, size: int) -> list[Place | None]:
        """Outputs of half of the samples have no gradient in rows of the others; of the other half, where need be."""
        if len(out) % size:
            return [None] * len(self.calls)
        half = random_permutation(size, ("half",), out.device) < size // 2
        found: list[list[Place]] = [["first", "in turn", "second"] for _ in self.calls]
        for asked in (half, ~half):
            with _through_batch_norms(out):
                grads = _pull_back(out, [call.edge for call in self.calls], asking(out, asked))
            for call, grad, places in zip(self.calls, grads, found, strict=True):
                places[:] = [place for place in places_of_samples(call.module, grad[0], asked) if place in places]
            if all(len(places) < 2 for places in found):
                break
        return [places[0] if places else None for places in found]


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled modules run as they are from here on, to the exit of what is given; where nothing was compiled, no more.

    Python that runs amid compiled code can not ask for it, and needs not: modules that it calls run as they are.
    """
    if "torch._dynamo" in sys.modules:  # whose import takes a second
        with contextlib.suppress(RuntimeError):
            stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return stance
    return contextlib.nullcontext()


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
