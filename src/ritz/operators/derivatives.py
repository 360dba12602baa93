"""Gradients, and the names of operations that cannot be differentiated twice.

torch reports such operations in many ways, and one kind not at all: `torch.autograd.grad(..., inputs)` silently leaves
out the backward of a custom function marked `once_differentiable`, because the node that would raise the error leads to
none of the inputs. The graph is searched for these functions.
"""

import re
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..errors import UnsupportedError

_PATTERNS = (
    r"derivative for '?(?P<name>[\w:]+)'? is not implemented",
    r"forward AD with (?P<name>[\w:]+) that does not support it",
    r"do not yet support (?P<name>aten::\w+)",
    r"vmap over (?P<name>\w+), but it does not have vmap support",
    r"must implement the jvp function for custom autograd.Function",
    r"use an autograd.Function with functorch transforms",
    r"don't yet support (?P<name>saved tensor hooks)",
    r"(?P<name>[\w:]+) (?:does not|doesn't) have a (?:derivative|double backward|forward)",
    r"differentiate twice a function",
    r"call (?P<name>Tensor\.requires_grad_\(\))",
    r"data pointer of Tensor that doesn't have storage",
)


def missing_operation(error: BaseException) -> str | None:
    """The operation that torch cannot differentiate, if this is what the error says.

    Example:
        >>> missing_operation(NotImplementedError("derivative for aten::_ctc_loss_backward is not implemented"))
        'aten::_ctc_loss_backward'
        >>> missing_operation(RuntimeError("shapes do not fit")) is None
        True
    """
    if isinstance(error, UnsupportedError):
        return None
    text = str(error)
    for pattern in _PATTERNS:
        if found := re.search(pattern, text):
            named = found.groupdict().get("name")
            return named or _called(error.__traceback__) or text.splitlines()[0][:120]
    return None


def _called(trace: TracebackType | None) -> str | None:
    """The name of the innermost torch.autograd.Function, or module, that was being called."""
    name = None
    while trace is not None:
        for key in ("cls", "autograd_function", "self"):  # its name in torch's own frames
            value = trace.tb_frame.f_locals.get(key)
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                name = value.__name__
            elif isinstance(value, torch.nn.Module):
                name = type(value).__name__
        trace = trace.tb_next
    return name


def gradients(total: Tensor, inputs: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    """The gradient of a number with respect to `inputs`; zero for those on which it does not depend."""
    if not total.requires_grad:
        return tuple(torch.zeros_like(x, requires_grad=False) for x in inputs)
    return torch.autograd.grad(total, inputs, create_graph=create_graph, materialize_grads=True)


def pull(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    *,
    batched: bool,
    keep_graph: bool = False,
) -> list[Tensor]:
    """Gradients (k, *shape) of `outputs` with respect to `inputs` for k stacked cotangents (k, *shape)."""
    count = len(vectors[0])
    if not batched:
        rows = [
            torch.autograd.grad(
                outputs,
                inputs,
                [v[i].clone() for v in vectors],
                retain_graph=keep_graph or i + 1 < count,
                materialize_grads=True,
            )
            for i in range(count)
        ]
        return [torch.stack(parts) for parts in zip(*rows, strict=True)]
    images = torch.autograd.grad(
        outputs, inputs, vectors, is_grads_batched=True, retain_graph=keep_graph, materialize_grads=True
    )
    # materialised zeros of unused inputs come without the batch dimension
    return [
        image if image.ndim > x.ndim else x.new_zeros(count, *x.shape) for image, x in zip(images, inputs, strict=True)
    ]


def refuse_once_differentiable(out: Tensor) -> None:
    """Raise if a custom function on the way to `out` has a backward that cannot itself be differentiated.

    Raises:
        NotImplementedError: With the name of the function, in the words that torch uses for other operations.
    """
    for node in _nodes(out):
        function = getattr(node, "_forward_cls", None)
        if isinstance(node, BackwardCFunction) and function is not None and _marked(function):
            raise NotImplementedError(f"derivative for {function.__name__} is not implemented (once_differentiable)")


def _marked(function: type) -> bool:
    """Whether `backward` is wrapped by torch's once_differentiable."""
    code = getattr(getattr(function, "backward", None), "__code__", None)
    return code is not None and code.co_filename == torch.autograd.function.__file__


def _nodes(out: Tensor) -> Iterator[object]:
    """Every node of the graph behind a tensor, once."""
    waiting, seen = [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(next_node for next_node, _ in node.next_functions)
        yield node
