"""Operations that cannot be differentiated twice, by name.

torch says so in many ways, and in one case not at all: the backward of a custom function marked `once_differentiable`
is left out of `torch.autograd.grad(..., inputs)` in silence, because the node that would complain leads to none of the
inputs. That one is looked for in the graph.
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
    """The operation that torch says it cannot differentiate, if that is what the error is about.

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
        for key in ("cls", "autograd_function", "self"):  # what torch's own frames call it
            value = trace.tb_frame.f_locals.get(key)
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                name = value.__name__
            elif isinstance(value, torch.nn.Module):
                name = type(value).__name__
        trace = trace.tb_next
    return name


def gradients(total: Tensor, inputs: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    """The gradient of a number in `inputs`; zero where it does not depend on them, or on none of them."""
    if not total.requires_grad:
        return tuple(torch.zeros_like(x, requires_grad=False) for x in inputs)
    return torch.autograd.grad(total, inputs, create_graph=create_graph, materialize_grads=True)


def refuse_once_differentiable(out: Tensor) -> None:
    """Raise if a custom function on the way to `out` has a backward that cannot itself be differentiated.

    Raises:
        NotImplementedError: In torch's words for other operations, with the name of the function.
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
