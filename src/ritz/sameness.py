"""By what a call is known to be the same as the last: where tensors lie, and what modules are and are set to."""

import itertools
import operator
import types
from collections.abc import Hashable, Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn


def place_of(tensors: Iterable[Tensor]) -> tuple[Hashable, ...]:
    """Where tensors lie: a recording that reads them is right as long as this is the same.

    Example:
        >>> x = torch.ones(2)
        >>> here = place_of([x])
        >>> here == place_of([x.add_(1)]), here == place_of([x.clone()])
        (True, False)
    """
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def layout_of(tensors: Iterable[Tensor]) -> tuple[Hashable, ...]:
    """Of what shape and kind tensors are, wherever they lie.

    Example:
        >>> layout_of([torch.ones(2)]) == layout_of([torch.zeros(2)]), layout_of([torch.ones(2)]) == layout_of([])
        (True, False)
    """
    return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])


_INNER = frozenset(vars(nn.Module())) - {"training"}  # attributes of torch's own
_PLAIN = {bool, int, float, str, torch.dtype, types.NoneType, types.FunctionType, types.BuiltinFunctionType}


def settings_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """What modules are, their parameters and buffers apart: kinds, parts, modes, and the numbers that they read.

    A recording has them in it, the rate of a dropout as well as the slope of an activation.

    Example:
        >>> layer = torch.nn.Dropout(0.5)
        >>> before = settings_of([layer])
        >>> layer.p = 0.1
        >>> settings_of([layer]) == before
        False
    """
    return tuple(
        (type(m), *map(id, m._modules.values()), *((k, _setting(v)) for k, v in vars(m).items() if k not in _INNER))
        for m in modules
    )


class Settings:
    """`settings_of` the modules of a model, put together anew only where something was set: to look is faster.

    Example:
        >>> settings, layer = Settings(), torch.nn.Dropout(0.5)
        >>> before = settings.of([layer])
        >>> settings.of([layer]) is before
        True
        >>> layer.p = 0.1
        >>> settings.of([layer]) == before
        False
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []  # modules and all that was set: while it is here, nothing else has its identity
        self._parts: list[int] = []
        self._found: tuple[Any, ...] = ()

    def of(self, modules: Sequence[nn.Module]) -> tuple[Any, ...]:
        """The settings as they are now."""
        held = [part for m in modules for part in (vars(m).values(), m._modules.values())]
        seen, parts = [*modules, *itertools.chain.from_iterable(held)], list(map(len, held))
        same = parts == self._parts and len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if not same:
            self._found = settings_of(modules)
            fixed = not any(_is_mutable(v) for m in modules for k, v in vars(m).items() if k not in _INNER)
            self._seen, self._parts = (seen, parts) if fixed else ([], [])
        return self._found

    def __getstate__(self) -> dict[str, object]:  # identities belong to this process
        return {}

    def __setstate__(self, _: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]


def _is_mutable(value: Any) -> bool:
    """Whether what `_setting` says of it may change while it is the same object."""
    return isinstance(value, Tensor | list) or (isinstance(value, tuple) and any(map(_is_mutable, value)))


def _setting(value: Any) -> Hashable:
    """A value that can be compared: of a tensor its place, of what is not known its kind."""
    if type(value) in _PLAIN or isinstance(value, Number):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Tensor):
        return place_of([value])
    return tuple(map(_setting, value)) if isinstance(value, tuple | list) else type(value).__name__


def is_static(modules: Iterable[nn.Module]) -> bool:
    """Whether each call of a model is known to be the same sequence of operations: all its modules are torch.nn's own.

    A module of the user's may do other things at each call, as stochastic depth does, or count its calls; so may a
    hook, and a function that a module of torch.nn was given, as an activation. Those of this package do nothing in a
    functional call.

    Example:
        >>> is_static(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()).modules())
        True
        >>> class Net(torch.nn.Module): ...
        >>> is_static(Net().modules())
        False
        >>> is_static(torch.nn.TransformerEncoderLayer(2, 1, activation=lambda x: x.relu()).modules())
        False
    """
    return all(map(_is_known, modules))


def _is_known(module: nn.Module) -> bool:
    if not type(module).__module__.startswith(("torch.nn.", "ritz.models.")) or "forward" in vars(module):
        return False
    if not all(map(_is_own, filter(callable, vars(module).values()))):
        return False
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(kinds) or all(_is_harmless(hook) for held in kinds if held for hook in held.values())


def _is_harmless(hook: Any) -> bool:
    return type(hook).__module__.startswith("ritz.")


def _is_own(function: Any) -> bool:
    """Whether a callable is a function of torch or of this package: any other may read what nobody sees."""
    plain = isinstance(function, types.FunctionType | types.BuiltinFunctionType | type)
    return plain and f"{getattr(function, '__module__', '')}.".startswith(("torch.", "ritz.models."))
