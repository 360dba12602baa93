"""The layers of a network as linear maps.

A convolution is a linear map of images, and its spectral norm is not that of its kernel as a matrix R of shape
(out, in k k). It is at least ||R|| if a whole window fits into the image (take an image that is 0 outside of one
window), and at most sqrt(k k) ||R|| (Tsuzuku, Sato and Sugiyama 2018). So convolutions are measured as maps of images
of the size that they get in a forward pass.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from ...errors import UnsupportedError
from ...krylov.eigen import top_eigenpairs
from ...operators.algebra import FunctionOperator
from ...results import Estimate
from ...risk import Risk
from ...space import row_norms

Convolutions = Literal["operator", "matrix"]  # as maps of images, or their kernels reshaped to (out, rest)

_TRANSPOSED: dict[type, Callable[..., Tensor]] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Layer:
    """A linear map of the network: a weight of two or more dimensions, or the scales of BatchNorm."""

    name: str
    weight: Tensor  # (out, in, ...), or the scales of BatchNorm, (channels,)
    module: nn.Module  # the module with this weight
    shape: tuple[int, ...]  # of one input (channels, ...) of a convolution or BatchNorm; () for a plain matrix

    @property
    def matrix(self) -> Tensor:
        """A weight as a matrix (out, rest), float64."""
        weight = self.weight.double()
        return (weight.transpose(0, 1) if isinstance(self.module, _ConvTransposeNd) else weight).flatten(1)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (k, *shape) convolved with a weight, without bias; a call of the module itself would run its hooks."""
        module: Any = self.module
        fn = _TRANSPOSED.get(type(module))
        if fn is None:
            image: Tensor = module._conv_forward(x, weight, None)
            return image
        options = module.stride, module.padding, module.output_padding, module.groups, module.dilation
        return fn(x, weight, None, *options)

    def spectral_norm(self, tol: float, seed: int) -> Estimate:
        """The largest singular value of the map; for a convolution, with that of the reshaped kernel as a part."""
        name = f"spectral norm of {self.name}"
        if self.weight.ndim < 2:
            text, largest = "max |gamma| / sqrt(var + eps)", float(self.weight.abs().max())
            return Estimate(name=name, value=largest, exact=True, convention=text)
        flat = float(torch.linalg.matrix_norm(self.matrix, 2))
        matrix = Estimate(name=name, value=flat, exact=True, convention="of the weight as a matrix (out, rest)")
        return self._operator_norm(matrix, tol, seed) if self.shape else matrix

    def _operator_norm(self, matrix: Estimate, tol: float, seed: int) -> Estimate:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        weight = self.weight.to(dtype)

        def gram(columns: Tensor) -> Tensor:  # A'A
            x = columns.T.reshape(-1, *self.shape)
            image, pull_back = torch.func.vjp(lambda x: self.convolve(x, weight), x)[:2]
            pulled: Tensor = pull_back(image)[0]
            return pulled.reshape(len(x), -1).T

        square = FunctionOperator(gram, math.prod(self.shape), dtype, weight.device)
        pairs = top_eigenpairs(square, 1, tol=tol, seed=seed)
        low, high = (math.sqrt(max(float(end), 0.0)) for end in pairs.extreme.interval())
        return Estimate(
            name=matrix.name, value=low, bracket=(low, high),
            exact=pairs.stop == "exact", products=pairs.products, seed=seed, stop=pairs.stop,
            convention=f"of the convolution of images {self.shape}", parts={"matrix": matrix},
        )  # fmt: skip

    def row_norms(self, weight: Tensor) -> Tensor:
        """l2 norms of the rows of the map with this weight.

        If padding makes several kernel entries meet one pixel, their squares are added, not their sum squared.
        """
        if weight.ndim < 2:
            return weight.double().abs().repeat_interleave(math.prod(self.shape[1:]))
        if not self.shape:
            return row_norms(Layer(self.name, weight, self.module, ()).matrix)
        ones = torch.ones(1, *self.shape, dtype=torch.float64, device=weight.device)
        return self.convolve(ones, weight.double().square()).flatten().sqrt()


def linear_layers(risk: Risk, convolutions: Convolutions) -> list[Layer]:
    """The layers of a risk that are linear maps, in the order of its modules.

    They are the chosen weights of two or more dimensions, with shared ones counted once, and BatchNorm in evaluation
    mode.

    Raises:
        UnsupportedError: If weights are computed from others, or if the map of a convolution is not known.
        ValueError: If there are no such layers.
    """
    if convolutions not in ("operator", "matrix"):
        raise ValueError(f"convolutions must be 'operator' or 'matrix', got {convolutions!r}")
    modules = dict(risk.model.named_modules())
    refuse_computed_weights(modules)
    shapes = _input_shapes(risk, modules) if convolutions == "operator" else {}
    state = risk.state()
    names = {id(p): name for name, p in risk.model.named_parameters()}  # shared weights have one name
    found: dict[str, Layer] = {}
    for place, module in modules.items():
        for name in (names[id(p)] for p in module.parameters(recurse=False)):
            if name in risk.names and state[name].ndim > 1 and name not in found:
                if isinstance(module, _ConvNd) and convolutions == "operator":
                    _refuse_unknown_map(place, module, shapes)
                found[name] = Layer(name, state[name], module, shapes.get(place, ()))
        variance = within(place, "running_var")
        if isinstance(module, _NORMS) and risk.mode == "eval" and variance in state:
            name = (place or type(module).__name__) if module.weight is None else names[id(module.weight)]
            gamma = 1.0 if module.weight is None else state[name]
            if module.weight is None or name in risk.names:
                scale = gamma * (state[variance] + module.eps).rsqrt()
                found[name] = Layer(name, scale, module, shapes.get(place, ()))
    if not found:
        raise ValueError(
            "there are no layers to measure: no chosen parameter has two or more dimensions or belongs to a BatchNorm"
        )
    return list(found.values())


def weight_matrices(risk: Risk) -> list[Layer]:
    """The chosen weights of two or more dimensions, to be taken as matrices (out, rest).

    Raises:
        UnsupportedError: If weights are computed from others.
        ValueError: If there are no such weights.
    """
    layers = [layer for layer in linear_layers(risk, "matrix") if layer.weight.ndim > 1]
    if not layers:
        raise ValueError("there is no weight matrix: no chosen parameter has two or more dimensions")
    return layers


def within(place: str, name: str) -> str:
    """The full name of a parameter or buffer of the module at `place`; the place of the model itself is "".

    Example:
        >>> within("norm", "running_var"), within("", "running_var")
        ('norm.running_var', 'running_var')
    """
    return f"{place}.{name}" if place else name


def refuse_computed_weights(modules: Mapping[str, nn.Module]) -> None:
    """Refuse weights that are computed from other parameters, which are not the weights of any layer.

    Raises:
        UnsupportedError: If a weight is computed by `torch.nn.utils.parametrize`, or by a hook, as in weight
            normalisation and pruning.
    """
    for place, module in modules.items():
        held = {name for name, value in vars(module).items() if isinstance(value, Tensor)}
        by_hook = any(f"{name}{suffix}" in module._parameters for name in held for suffix in ("_v", "_orig"))
        if is_parametrized(module) or by_hook:
            raise UnsupportedError(
                f"the weights of {place or 'the model'} are computed from other parameters; use a copy of the model "
                "after torch.nn.utils.parametrize.remove_parametrizations (remove_weight_norm, prune.remove)"
            )


def _refuse_unknown_map(place: str, module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    reason = None
    if type(module) not in _CONVS or "forward" in vars(module):
        reason = f"is a {type(module).__name__}, which may be more than a convolution"
    elif place not in shapes:
        reason = "is not called in a forward pass, so the size of its input is not known"
    if reason is not None:
        raise UnsupportedError(f"{place or 'the model'} {reason}; use convolutions='matrix'")


def _input_shapes(risk: Risk, modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """The shape of one sample of the largest input to every convolution and BatchNorm, from one forward pass."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(place: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][:1]
            for x in given:
                spatial = len(module.kernel_size) if isinstance(module, _ConvNd) else x.ndim - 2
                shape = tuple(x.shape[-1 - spatial :])
                if math.prod(shape) > math.prod(shapes.get(place, (0,))):
                    shapes[place] = shape

        return hook

    batch = next(iter(risk.batches))
    batch = batch.head(1) if risk.splittable else batch
    handles: list[RemovableHandle] = []
    try:
        for place, module in modules.items():
            if isinstance(module, (_ConvNd, *_NORMS)):
                handles.append(module.register_forward_pre_hook(note(place), with_kwargs=True))
        with risk.session():
            risk.total_and_weight(risk.params(), batch)
    finally:
        for handle in handles:
            handle.remove()
    return shapes
