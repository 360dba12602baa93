"""The blocks of parameters in a Kronecker-factored matrix: layers, tables of embeddings, and the rest."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..captures import owners
from ..layers import rule_of

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class Unit:
    """Parameters that share one block of the matrix, and their layout in it as (groups, outputs, inputs).

    Example:
        >>> unit = units_of(torch.nn.Linear(3, 2), ("weight", "bias"))[""]
        >>> unit.gather({"weight": torch.zeros(2, 3), "bias": torch.ones(2)}).tolist()
        [[[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]]
    """

    name: str  # of the module, or for a diagonal block of the parameter
    kind: Literal["layer", "table", "diagonal"]  # a table of embeddings has one-hot inputs
    module: str | None  # the module whose calls give the statistics; None: gradients of the parameter itself
    params: Mapping[str, str]  # attribute -> parameter name
    shapes: Mapping[str, torch.Size]  # by attribute
    groups: int
    outputs: int
    inputs: int

    def gather(self, tensors: Mapping[str, Tensor], *more: Tensor) -> Tensor:
        """Named tensors (*lead, *shape) as one (*lead, groups, outputs, inputs), followed by the columns `more`."""
        parts = [*(self._matrix(own, tensors[name]) for own, name in self.params.items()), *more]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _matrix(self, own: str, x: Tensor) -> Tensor:
        lead = x.shape[: x.ndim - len(self.shapes[own])]
        if self.kind == "table":
            return x.mT.unsqueeze(-3)
        return x.reshape(*lead, self.groups, self.outputs, self._width(own))

    def _width(self, own: str) -> int:
        """Columns of a parameter; one if there are no rows."""
        rows = self.groups * self.outputs
        return self.shapes[own].numel() // rows if rows else 1

    @cached_property
    def _widths(self) -> list[int]:
        return [self._width(own) for own in self.shapes]

    def scatter(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `gather`."""
        lead, found = matrix.shape[:-3], {}
        for (own, name), part in zip(self.params.items(), matrix.split_with_sizes(self._widths, -1), strict=True):
            found[name] = part.squeeze(-3).mT if self.kind == "table" else part.reshape((*lead, *self.shapes[own]))
        return found


def units_of(model: nn.Module, names: tuple[str, ...], diagonal: Collection[str] = ()) -> dict[str, Unit]:
    """The blocks of the chosen parameters, by name.

    Linear layers, convolutions and embeddings that share no parameter with another module have Kronecker factors. Every
    other parameter, and each one named in `diagonal`, is a block with a diagonal of its own.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        >>> {name: unit.kind for name, unit in units_of(net, ("0.weight", "0.bias", "1.weight")).items()}
        {'0': 'layer', '1.weight': 'diagonal'}
    """
    held, modules = owners(model, names), dict(model.named_modules())
    holders = Counter(name for own in held.values() for name in own.values())
    units: dict[str, Unit] = {}
    for name, own in held.items():
        module, rule = modules[name], rule_of(modules[name])
        sole = all(holders[param] == 1 for param in own.values()) and not set(diagonal) & set(own.values())
        explained = rule is not None and sole and rule.params.issuperset(own)
        shapes = {attribute: getattr(module, attribute).shape for attribute in own}
        if explained and isinstance(module, (*_LAYERS, nn.Embedding)):
            units[name] = _kronecker_unit(name, module, own, shapes)
            continue
        source = name if explained and isinstance(module, _NORMS) else None
        for attribute, param in own.items():
            only, shape = {attribute: param}, {attribute: shapes[attribute]}
            units[param] = Unit(param, "diagonal", source, only, shape, 1, shapes[attribute].numel(), 1)
    return units


def _kronecker_unit(name: str, module: Any, own: Mapping[str, str], shapes: Mapping[str, torch.Size]) -> Unit:
    if isinstance(module, nn.Embedding):
        rows, width = module.weight.shape
        return Unit(name, "table", name, own, shapes, 1, width, rows)
    groups, outputs = getattr(module, "groups", 1), len(module.weight)
    inputs = sum(shape.numel() for shape in shapes.values()) // outputs
    return Unit(name, "layer", name, own, shapes, groups, outputs // groups, inputs)
