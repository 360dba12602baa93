"""Normalisations that can be differentiated three times.

    y = weight (x - mean) / sqrt(variance + eps) + bias

with mean and variance over the features of a sample (LayerNorm), over its places (InstanceNorm) or over the batch
(BatchNorm). The third derivative of torch's own kernels takes mean and variance for constants, which is wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SmoothNormalisations(TorchFunctionMode):
    """Inside, layer, batch and instance normalisation are those of this module.

    Those by statistics that are given are linear, and stay torch's; so do all that torch refuses.

    Example:
        >>> x = torch.ones(1, 2, requires_grad=True)
        >>> with SmoothNormalisations():
        ...     torch.nn.functional.layer_norm(x, (2,)).grad_fn.name()
        'MulBackward0'
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = _OURS[func](*args, **(kwargs or {})) if func in _OURS else None
        return func(*args, **(kwargs or {})) if found is None else found


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor | None:
    last = len(normalized_shape)
    if not last or input.shape[-last:] != torch.Size(normalized_shape):
        return None
    return _normalised(input, tuple(range(-last, 0)), weight, bias, eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Running statistics are left as they are: whoever differentiates three times keeps copies of them."""
    if not training or input.ndim < 2 or input.numel() <= input.shape[1]:
        return None
    return _by_channel(input, (0, *range(2, input.ndim)), weight, bias, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not use_input_stats or input.ndim < 3 or input[0, 0].numel() == 1:
        return None
    return _by_channel(input, tuple(range(2, input.ndim)), weight, bias, eps)


def _batch_norm_of_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor | None:
    """In the order, and by the names, that `torch` has for what torch.nn.functional takes."""
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm_of_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor | None:
    return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _by_channel(x: Tensor, over: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    places = [1] * (x.ndim - 2)
    weight, bias = (None if own is None else own.view(-1, *places) for own in (weight, bias))
    return _normalised(x, over, weight, bias, eps)


def _normalised(x: Tensor, over: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By mean and variance over some dimensions, in at least float32 as torch's kernels are."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(over, keepdim=True)
    y = centred * (centred.square().mean(over, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


_OURS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    torch.batch_norm: _batch_norm_of_torch,
    torch.instance_norm: _instance_norm_of_torch,
}
