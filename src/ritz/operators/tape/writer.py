"""Records the operations of a forward pass that depend on the parameters.

It works below autograd, where all operations are on plain tensors, and records each pass anew, because what a model
does in Python may change with its data. Two kinds of code look the same at this level, and are refused: code that runs
with gradients switched off, which may be the inside of a custom autograd function, and models that compute gradients
themselves. Complex numbers are refused as well, since their derivatives have conventions of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .layers import NORMS, VIEWS
from .rules import Hidden, Step, Untaped, Value, aten

_SHAPES_ONLY = {
    *(f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn")),
    *(f"new_{kind}" for kind in ("zeros", "ones", "empty", "full", "empty_strided")),
}


class Writer(TorchDispatchMode):
    """A context that records operations on tensors that depend on the parameters.

    Example:
        >>> w = torch.ones(2)
        >>> with Writer({"w": w}) as writer:
        ...     y = (w * 3).sum() + torch.ones(2).sum()
        >>> [step.func.overloadpacket.__name__ for step in writer.steps]
        ['mul', 'sum', 'add']
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.leaves = {name: Value(p, placed=p.is_contiguous()) for name, p in params.items()}
        self.steps: list[Step] = []
        self._values: dict[int, Value] = {}  # by the identity of the tensor
        self._sharing: dict[int, list[Value]] = {}  # by storage
        self._read: list[tuple[Tensor, int]] = []  # constants, and their versions
        for value in self.leaves.values():
            self._enter(value)

    def _enter(self, value: Value) -> Value:
        self._values[id(value.tensor)] = value
        self._sharing.setdefault(value.tensor.untyped_storage()._cdata, []).append(value)
        return value

    def find(self, x: Tensor) -> Value | None:
        """The value of a tensor; None for a constant.

        Raises:
            Untaped: If it is not known which of the two it is.
        """
        value = self._values.get(id(x))
        if value is None:
            if x.untyped_storage()._cdata in self._sharing:
                raise Untaped("a tensor shares memory with one that depends on the parameters, by an unknown operation")
        elif value.stale:
            raise Untaped(
                "the memory of a tensor was written to through another tensor before it was read, or it is a statistic "
                "of a norm"
            )
        return value

    def check(self) -> None:
        """To be called at the end: refuse if a constant was written to after it was read."""
        if any(x._version != before for x, before in self._read):
            raise Untaped("a constant is written to after it was used")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        inputs: list[Value] = []
        constants: list[Tensor] = []
        own = self._known(args, inputs, constants)
        named = {name: self._known(x, inputs, constants) for name, x in kwargs.items()}
        if not inputs or func.overloadpacket.__name__ in _SHAPES_ONLY:
            return func(*args, **kwargs)
        self._refuse(func, inputs, constants)
        if func is aten.detach.default:
            return args[0].clone()  # a constant from here on
        if func._schema.is_mutable:
            before = self._before(func, args[0], own[0])
            func(*args, **kwargs)
            plain = getattr(getattr(aten, func.overloadpacket.__name__[:-1]), func._overloadname)
            self._write(plain, [before, *own[1:]], named, inputs, [x for x in constants if x is not args[0]], [args[0]])
            return args[0]
        out = func(*args, **kwargs)
        self._write(func, own, named, inputs, constants, [out] if isinstance(out, Tensor) else out)
        return out

    def _known(self, x: Any, inputs: list[Value], constants: list[Tensor]) -> Any:
        """An argument with values in the places of tensors that are followed; tensors are told apart by the way.

        It is a method, because a nested function that calls itself is a reference cycle, which would hold the tape.
        """
        if isinstance(x, list | tuple):
            return [self._known(y, inputs, constants) for y in x]
        if not isinstance(x, Tensor):
            return x
        value = self.find(x)
        if value is None:
            constants.append(x)
            return x
        inputs.append(value)
        return value

    def _refuse(self, func: Any, inputs: list[Value], constants: list[Tensor]) -> None:
        if not torch.is_grad_enabled():
            raise Hidden(f"{func} runs with gradients switched off, maybe in a custom autograd function")
        if any(v.tensor.requires_grad for v in inputs) or any(x.requires_grad for x in constants):
            raise Hidden(f"{func} is given a tensor that requires a gradient of its own")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Untaped(f"{func} draws random numbers")

    def _before(self, func: Any, target: Tensor, value: Any) -> Any:
        """A copy of the value that an operation in place will overwrite; other tensors with its memory become stale."""
        name = func.overloadpacket.__name__
        if not name.endswith("_") or not hasattr(getattr(aten, name[:-1], None), func._overloadname):
            raise Untaped(f"{name} writes to a tensor")
        for other in self._sharing.pop(target.untyped_storage()._cdata, []):
            if other.placed:
                raise Untaped(f"{name} writes to a parameter")
            other.tensor, other.stale = other.tensor.clone(), True
        return value if isinstance(value, Value) else target.clone()

    def _write(
        self, func: Any, args: list[Any], kwargs: Any, inputs: list[Value], constants: list[Tensor], out: Sequence[Any]
    ) -> None:
        if any(isinstance(x, Tensor) and x.is_complex() for x in out):
            raise Untaped(f"{func} gives complex numbers")
        smooth = [isinstance(x, Tensor) and x.is_floating_point() for x in out]
        if not any(smooth):
            return
        if func is aten.native_batch_norm.default and args[5]:  # running statistics are written, not read
            args[3:5], constants = (None, None), []
        placed = inputs[0].placed and func.overloadpacket in VIEWS
        outs = [self._enter(Value(x, placed)) if own else None for x, own in zip(out, smooth, strict=True)]
        if func.overloadpacket in NORMS:  # their mean and variance have no rule
            for value in filter(None, outs[1:]):
                value.stale = True
        self._read += [(x, x._version) for x in constants]
        self.steps.append(Step(func, args, kwargs, inputs, out, outs))
