"""Losses: everything that depends on a model's outputs only.

Every loss is a SUM over items (samples, or tokens), together with the weight by which the sum is divided, so that any
split of the data gives the same mean. Besides the sum, a loss has its second-order structure in closed form:

    middle   M u, for the matrix M between the Jacobians: J' M J is the Gauss-Newton or one of the Fisher matrices
    roots    s_c with sum_c s_c s_c' = M, for exact traces
    draw     cotangents of labels drawn from the model: E[c c'] = M

For cross-entropy M = diag(p) - p p', for the squared error 2/D I, for binary cross-entropy diag(p (1 - p)) / D.
"""

import dataclasses
import inspect
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from .base import Items, Kind, Loss, Target, Uniforms, default_target
from .cross_entropy import CrossEntropy
from .elementwise import BinaryCrossEntropy, SquaredError
from .function import CallableLoss

__all__ = [
    "BinaryCrossEntropy",
    "CallableLoss",
    "CrossEntropy",
    "Items",
    "Kind",
    "Loss",
    "SquaredError",
    "Target",
    "Uniforms",
    "as_loss",
    "default_target",
]


def as_loss(loss: Any, target: Target | None = None) -> Loss:
    """Make a `Loss` from a torch loss module or function, a callable(output, target), or a `Loss`.

    Raises:
        ValueError: If the reduction is not the mean; ritz sums over items and divides by their weight itself.
    """
    if isinstance(loss, type):
        raise TypeError(f"loss is the class {loss.__name__}; give an instance: {loss.__name__}()")
    if isinstance(loss, Loss):
        return loss if target is None else _aimed(loss, target)
    aim = target or default_target
    loss = _module_of(loss)
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise ValueError(
            f"ritz studies the mean over the data, got {type(loss).__name__}(reduction={reduction!r}); use "
            "reduction='mean', and for the curvature of the sum multiply the operator (N * H)"
        )
    if type(loss) is nn.CrossEntropyLoss:
        return CrossEntropy(loss.weight, loss.ignore_index, loss.label_smoothing, target=aim)
    if type(loss) is nn.BCEWithLogitsLoss:
        return BinaryCrossEntropy(loss.weight, loss.pos_weight, target=aim)
    if type(loss) is nn.MSELoss:
        return SquaredError(target=aim)
    if getattr(loss, "weight", None) is not None:
        raise ValueError(f"{type(loss).__name__} with class weights is not supported; give its sum as batch_loss=")
    if not callable(loss):
        got = repr(loss) if isinstance(loss, str) else type(loss).__name__
        raise TypeError(f"loss must be a torch loss, a callable(output, target) or a ritz.Loss, got {got}")
    return CallableLoss(loss, target=aim)


_MODULES: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.mse_loss: nn.MSELoss,
}


def _module_of(loss: Any) -> Any:
    """The module of a loss function of torch, or of its `functools.partial` with keywords; any other loss unchanged."""
    called, keywords = (loss.func, loss.keywords) if isinstance(loss, partial) and not loss.args else (loss, {})
    module = next((module for function, module in _MODULES.items() if called is function), None)
    known = module is not None and keywords.keys() <= inspect.signature(module).parameters.keys()
    return module(**keywords) if module is not None and known else loss


def _aimed(loss: Loss, target: Target) -> Loss:
    """The same loss with another target."""
    if not dataclasses.is_dataclass(loss) or not hasattr(loss, "target"):
        raise ValueError(f"target= is for torch losses and callables; {type(loss).__name__} finds its own target")
    return dataclasses.replace(loss, target=target)
