"""Weight normalisation that can be differentiated twice.

    w = g v / ||v||        with the norm over all dimensions of v but one (Salimans and Kingma, 2016)

The second derivative of torch's own kernel takes the norm for a constant, which is wrong, and a forward derivative it
has none.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.utils.weight_norm
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm

# who calls the kernel by this name: parametrizations.weight_norm, and the older hook, whose module hides behind it
_CALLERS: tuple[Any, ...] = (torch, sys.modules["torch.nn.utils.weight_norm"])
_OldHook = sys.modules["torch.nn.utils.weight_norm"].WeightNorm
KERNEL = torch._weight_norm  # one operation, by which a weight is known to be normalised


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ||v|| by plain operations, in the place of `torch._weight_norm`; dim=-1 is the norm over all dimensions.

    Example:
        >>> weight_norm(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[10.0], [1.0]])).tolist()
        [[6.0, 8.0], [0.0, 1.0]]
    """
    # the forward derivative of a norm over all dimensions is at fault in torch
    norm = torch.norm_except_dim(v[None], 2, 0)[0] if dim == -1 else torch.norm_except_dim(v, 2, dim)
    return v * (g / norm)


@contextlib.contextmanager
def smooth_weight_norms(by: Callable[..., Tensor] = weight_norm) -> Iterator[None]:
    """Inside, weights are normalised by `weight_norm`, or by torch's own kernel where that is given.

    Example:
        >>> layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 1))
        >>> with smooth_weight_norms():
        ...     layer.weight.grad_fn.name()
        'MulBackward0'
    """
    before = [caller._weight_norm for caller in _CALLERS]
    try:
        for caller in _CALLERS:
            caller._weight_norm = by
        yield
    finally:
        for caller, kernel in zip(_CALLERS, before, strict=True):
            caller._weight_norm = kernel


def normalises_weights(model: nn.Module) -> str | None:
    """The first module whose weight torch normalises from a v that is trained, by a parametrization or the older hook.

    None without any: the second derivative in g alone is right.

    Example:
        >>> layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 1))
        >>> normalises_weights(torch.nn.Sequential(torch.nn.Tanh(), layer)), normalises_weights(torch.nn.Tanh())
        ('1', None)
    """
    for name, module in model.named_modules():
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _OldHook)]
        parts: Any = module.parametrizations.values() if parametrize.is_parametrized(module) else ()
        directions = [getattr(module, f"{hook.name}_v") for hook in hooks]
        directions += [part.original1 for part in parts if any(isinstance(own, _WeightNorm) for own in part)]
        if any(v.requires_grad for v in directions):
            return str(name)
    return None
