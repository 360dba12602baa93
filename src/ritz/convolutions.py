"""Convolutions that are cheap to differentiate many times.

With weight w, input x and output gradient g a convolution has three bilinear forms, tied by one number <g, C(x, w)>:

    C(x, w)   the convolution           D(g, w)   gradient in x           W(g, x)   gradient in w

so that the derivatives of each are the two others, to any order: D along e gives C(e, w) and W(g, e), W along v gives
C(x, v) and D(g, v). torch takes the derivative of D in w as a convolution whose kernel is as large as the image, for
which no fast algorithm is at hand; as W(g, e) it is the one that every training step uses.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}  # spatial dimensions


class Geometry(NamedTuple):
    """How the kernel moves."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The convolution of torch, differentiable to any order by the three forms.

    Example:
        >>> x, w = torch.ones(1, 1, 3), torch.ones(1, 1, 2)
        >>> convolution(x, w, None, Geometry((1,), (0,), (1,), 1)).flatten().tolist()
        [2.0, 2.0]
    """
    out = _apply(_Forward, x, weight, geometry)
    return out if bias is None else out + bias.view(-1, *[1] * len(geometry.stride))


class _Forward(torch.autograd.Function):
    """C(x, w)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        fn = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(geometry.stride)]
        return fn(x, weight, None, *geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (
            _apply(_InInput, grad, weight, x, ctx.geometry) if ctx.needs_input_grad[0] else None,
            _apply(_InWeight, grad, x, weight, ctx.geometry) if ctx.needs_input_grad[1] else None,
            None,
        )


class _InInput(torch.autograd.Function):
    """D(g, w), of the shape of `like`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, weight: Tensor, like: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(grad, weight)
        ctx.geometry = geometry
        return _backward(grad, like, weight, geometry, 0)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        grad, weight = ctx.saved_tensors
        return (
            _apply(_Forward, along, weight, ctx.geometry) if ctx.needs_input_grad[0] else None,
            _apply(_InWeight, grad, along, weight, ctx.geometry) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


class _InWeight(torch.autograd.Function):
    """W(g, x), of the shape of `like`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, like: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(grad, x)
        ctx.geometry = geometry
        return _backward(grad, x, like, geometry, 1)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        grad, x = ctx.saved_tensors
        return (
            _apply(_Forward, x, along, ctx.geometry) if ctx.needs_input_grad[0] else None,
            _apply(_InInput, grad, along, x, ctx.geometry) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def _apply(form: type[torch.autograd.Function], *args: Any) -> Tensor:
    out: Tensor = form.apply(*args)
    return out


def _backward(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, which: int) -> Tensor:
    """The gradient in x (0) or in the weight (1)."""
    stride, padding, dilation, groups = geometry
    wanted = [which == 0, which == 1, False]
    found: Tensor = torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, wanted
    )[which]
    return found


class SmoothConvolutions(TorchFunctionMode):
    """Inside, convolutions of batches with zero padding are those of this module.

    Others, all of them under autocast and those inside torch.func stay torch's. On a GPU images are laid out with
    channels last, in which cuDNN's kernels work: else it turns every operand around before each of them. A `view` that
    this stands in the way of is a copy.

    Example:
        >>> layer = torch.nn.Conv2d(1, 1, 2)
        >>> with SmoothConvolutions():
        ...     out = layer(torch.ones(1, 1, 3, 3))
        >>> out.grad_fn.next_functions[0][0].name()
        '_ForwardBackward'
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            read = _read(_CONVOLUTIONS[func], *args, **kwargs)
            if read is not None:
                return convolution(*read)
        if func is Tensor.view:
            with contextlib.suppress(RuntimeError):  # the strides are not those that the model counts on
                return func(*args, **kwargs)
            func = Tensor.reshape
        return func(*args, **kwargs)


def _read(
    spatial: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Geometry] | None:
    """The arguments of torch's function as those of `convolution`; None where it is not for us."""
    if isinstance(padding, str) or input.ndim != spatial + 2 or input.is_complex():
        return None
    if torch.is_autocast_enabled(input.device.type) or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if input.device.type == "cuda" and spatial == 2:
        input, weight = (x.contiguous(memory_format=torch.channels_last) for x in (input, weight))
    geometry = Geometry(_tuple(stride, spatial), _tuple(padding, spatial), _tuple(dilation, spatial), groups)
    return input, weight, bias, geometry


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    values = (value,) * length if isinstance(value, int) else tuple(value)
    return values * length if len(values) == 1 else values
