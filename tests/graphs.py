"""A CUDA graph on a CPU, for tests: operations and the tensors they read and write, played again without Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ritz.replay import _Recording


class _Tape(TorchDispatchMode):
    """Every operation, with its tensors as they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        here = tree_map_only(Tensor, torch.ops.aten.detach.default, (args, kwargs or {}, out))
        self.operations.append((func, *here))
        return out

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, out in self.operations:
            for new, place in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(out), strict=True):
                if isinstance(new, Tensor) and new.data_ptr() != place.data_ptr():
                    place.copy_(new)


def taped(fn: Callable[..., Any], own: list[Tensor]) -> _Recording:
    """In the place of `ritz.replay._recorded`: what is neither an input nor at its old place stays as it was."""
    with _Tape() as tape:
        results = fn(*own)

    def play() -> Any:
        tape.play()
        return results

    return _Recording(own, play)
