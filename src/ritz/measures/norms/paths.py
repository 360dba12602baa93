"""The path norm: the products of weights along the paths from input to output."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ...batches import Batch, map_tensors, tensors_of
from ...errors import NonFiniteError, UnsupportedError
from ...linearity import packet_name
from ...results import Estimate
from ...risk import Risk
from .linear_maps import refuse_computed_weights, within

_WEIGHTED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATISTICS = ("running_mean", "running_var")

_CARRIED = ("aten::clone", "aten::detach", "aten::_to_copy")  # of statistics too, which may be negative

_FACTORS = (1.0, 1e-3, 1e3)  # of inputs and biases, to check whether the outputs are in proportion


def path_norm(risk: Risk) -> Estimate:
    """The l2 path norm of a positively homogeneous network, over all paths from an input or a bias to an output.

        phi^2 = sum over paths of the product of w^2 along it = sum_o f_o(1; w^2)

    (Neyshabur, Salakhutdinov and Srebro 2015.) It takes one forward pass of ones, with every weight and bias squared.
    The part "squared" is phi^2, which Jiang et al. 2020 report. BatchNorm in evaluation mode is a scale and a shift; it
    is folded into the layer whose output it takes, and squared with it. Layers without weights are used unchanged:
    max-pooling takes the largest of its paths, not their sum. All layers count, chosen or not. The path norm stays the
    same if the weights into a unit are multiplied by c and those out of it divided by c (Dinh et al. 2017).

    Raises:
        UnsupportedError: If layers other than linear ones, convolutions and BatchNorm have weights, if the outputs for
            a sample are not proportional to inputs and biases, or if the network subtracts.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1, bias=False))
        >>> with torch.no_grad():
        ...     for p, value in zip(model.parameters(), (-3.0, 4.0, 2.0)):
        ...         _ = p.fill_(value)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1)))
        >>> path_norm(risk).value  # two paths: -3 times 2 from the input, 4 times 2 from the bias
        10.0
    """
    _ = risk.output_loss  # refuses a risk without outputs
    if risk.mode != "eval" or risk.dropout:
        raise UnsupportedError("a path norm needs fixed weights: use mode='eval' and no dropout")
    _refuse_other_layers(risk.model)
    refuse_computed_weights(dict(risk.model.named_modules()))
    risk.check()
    if torch.finfo(risk.dtype).bits < 32:  # too few digits to check proportionality
        risk = risk.to(dtype=torch.float32)
    batch = next(iter(risk.batches)).head(1)
    network = _Network(risk, _feeds(risk, batch))
    truth = _output(risk, batch)
    if network.feeds and not _close(network.scaled(batch, 1.0), truth):  # such an output is used elsewhere too
        network = _Network(risk, {})
    for factor in _FACTORS:
        if not _close(network.scaled(batch, factor) / factor, truth):
            raise UnsupportedError(
                f"the network is not positively homogeneous: with inputs and biases times {factor:g} its outputs are "
                f"not {factor:g} times as large. Path norms are for ReLU networks; look for another activation, a "
                "softmax, a LayerNorm, or an added constant"
            )
    signs = _Signs()
    total = float(network.squared(batch, signs).double().sum())
    if signs.turned:
        raise UnsupportedError(
            f"{signs.turned} subtracts, so paths through it would not be added; path norms are for networks in which "
            "only weights change signs"
        )
    if not total < math.inf:
        raise NonFiniteError(f"the sum over paths is {total}; use dtype=torch.float64")
    squared = Estimate(name="squared path norm", value=total, exact=True, convention="sum over paths, no root taken")
    text = "root of the sum over paths of squared weights, biases as paths of their own"
    return Estimate(name="path norm", value=math.sqrt(total), exact=True, convention=text, parts={"squared": squared})


class _Signs(TorchDispatchMode):
    """Looks for operations that change signs: with squared inputs, weights and shifts, nothing else is negative."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.turned = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, floats = packet_name(func), [x for x in tensors_of(result) if x.is_floating_point()]
        if "empty" in name:  # uninitialised memory, which padding writes over
            return map_tensors(result, Tensor.zero_)
        turns = name in ("aten::sub", "aten::rsub") or any(bool((x < 0).any()) for x in floats)
        if floats and turns and name not in _CARRIED:
            self.turned = self.turned or name
        return result


class _Network:
    """A network of known layers as weights, which are multiplied, and shifts, which are added."""

    def __init__(self, risk: Risk, feeds: Mapping[str, str]) -> None:
        self.risk, self.feeds = risk, feeds
        self.names = {id(p): name for name, p in risk.model.named_parameters()}  # shared parameters have one name
        self.state = risk.state()
        modules = dict(risk.model.named_modules())
        self.layers = {name: module for name, module in modules.items() if isinstance(module, _WEIGHTED)}
        self.norms = {name: module for name, module in modules.items() if isinstance(module, _NORMS)}

    def scaled(self, batch: Batch, factor: float) -> Tensor:
        """The outputs with inputs and shifts times a factor."""
        inputs = map_tensors(batch.data, lambda x: x * factor if x.is_floating_point() else x)
        return self._run(batch, inputs, lambda weight: weight, lambda shift: shift * factor)

    def squared(self, batch: Batch, signs: _Signs) -> Tensor:
        """The outputs for ones, with weights and shifts squared, watched by `signs`."""
        inputs = map_tensors(batch.data, lambda x: torch.ones_like(x) if x.is_floating_point() else x)
        return self._run(batch, inputs, Tensor.square, Tensor.square, signs)

    def _run(
        self,
        batch: Batch,
        inputs: object,
        weight: Callable[[Tensor], Tensor],
        shift: Callable[[Tensor], Tensor],
        signs: _Signs | None = None,
    ) -> Tensor:
        changed: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            changed[self._name(layer.weight)] = weight(self._value(layer.weight))
            if layer.bias is not None:
                bias = shift(self._value(layer.bias))
                changed[self._name(layer.bias)] = torch.zeros_like(bias) if name in self.feeds.values() else bias
        for name, norm in self.norms.items():
            scale, offset = self._scale_and_shift(name, norm)
            changed |= self._as_norm(name, norm, weight(scale), shift(offset))
        with signs or contextlib.nullcontext():
            return _output(self.risk.at(changed), dataclasses.replace(batch, data=inputs))

    def _name(self, parameter: Tensor) -> str:
        return self.names[id(parameter)]

    def _value(self, parameter: Tensor) -> Tensor:
        return self.state[self._name(parameter)]

    def _scale_and_shift(self, name: str, norm: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
        """s and b of BatchNorm as s x + b, including the bias of the layer that feeds it."""
        mean, variance = (self.state[within(name, each)] for each in _STATISTICS)
        scale = (variance + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * self._value(norm.weight)
        feed = self.layers.get(self.feeds.get(name, ""))
        if feed is not None and feed.bias is not None:
            mean = mean - self._value(feed.bias)
        offset = -mean * scale
        return scale, offset if norm.bias is None else offset + self._value(norm.bias)

    def _as_norm(
        self, name: str, norm: nn.modules.batchnorm._BatchNorm, scale: Tensor, offset: Tensor
    ) -> dict[str, Tensor]:
        """Parameters and statistics with which BatchNorm is scale x + offset."""
        mean, variance = (within(name, each) for each in _STATISTICS)
        if norm.weight is None or norm.bias is None:
            return {mean: -offset / scale, variance: scale**-2 - norm.eps}
        return {
            self._name(norm.weight): scale,
            self._name(norm.bias): offset,
            mean: torch.zeros_like(scale),
            variance: torch.ones_like(scale) - norm.eps,
        }


def _refuse_other_layers(model: nn.Module) -> None:
    """Refuse weights with an unknown role in a path, and BatchNorm without statistics."""
    for name, module in model.named_modules():
        known = type(module) in (*_WEIGHTED, *_NORMS) and "forward" not in vars(module)
        if any(True for _ in module.parameters(recurse=False)) and not known:
            raise UnsupportedError(
                f"{name or 'the model'} ({type(module).__name__}) has weights, but path norms are only for weights of "
                "linear layers, convolutions and BatchNorm"
            )
        if isinstance(module, _NORMS) and module.running_var is None:
            raise UnsupportedError(f"path norms need fixed scales, but {name} normalises by the batch's statistics")


def _output(risk: Risk, batch: Batch) -> Tensor:
    with risk.session():
        return risk.output(risk.params(), batch).detach()


def _close(found: Tensor, truth: Tensor) -> bool:
    """Whether they agree to half of the digits."""
    found, truth = found.double(), truth.double()
    return bool((found - truth).norm() <= torch.finfo(torch.float32).eps ** 0.5 * truth.norm())


def _feeds(risk: Risk, batch: Batch) -> dict[str, str]:
    """For each BatchNorm the linear layer or convolution whose output is its input, if there is one."""
    made: list[tuple[Tensor, str]] = []  # kept alive, so that no address is used twice
    found: dict[str, str] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, output: made.append((output, name))

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found.update((name, layer) for output, layer in made if args and output is args[0])

        return hook

    handles: list[RemovableHandle] = []
    try:
        for name, module in risk.model.named_modules():
            if isinstance(module, _WEIGHTED):
                handles.append(module.register_forward_hook(note(name)))
            elif isinstance(module, _NORMS):
                handles.append(module.register_forward_pre_hook(look(name)))
        _output(risk, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found
