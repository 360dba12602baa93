"""Hidden units, and the axes of all tensors along which they lie, which must be permuted together.

The outputs of a layer are followed through the steps of a tape to the weights that read them. In between are biases,
the parameters and statistics of normalisations and slopes of PReLU: each has one axis with an entry for every unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .degrees import Conflict, Step, Tape, Weight


@dataclass(frozen=True)
class Units:
    """The units that a weight produces. An axis may hold k entries for each unit, as after flattening k pixels.

    Example:
        >>> units = Units("conv", 2, {"conv": 0, "fc": 1})
        >>> units.permuted("fc", torch.arange(4)[None], torch.tensor([1, 0]))  # two pixels of each channel
        tensor([[2, 3, 0, 1]])
    """

    weight: str
    size: int
    axes: Mapping[str, int]  # parameter or buffer -> axis

    def permuted(self, name: str, tensor: Tensor, order: Tensor) -> Tensor:
        """The tensor of that name with its units in another order."""
        axis = self.axes[name]
        each = tensor.shape[axis] // self.size
        index = order[:, None] * each + torch.arange(each, device=order.device)
        return tensor.index_select(axis, index.flatten())


def units_of(tape: Tape, weight: Weight) -> Units:
    """The units that a weight produces, followed to the weights that read them.

    Raises:
        Conflict: If they are not hidden units that can be permuted.

    Example:
        >>> layer = Step("aten::mm", 4, (((2, 1),),), weights=(first := Weight("a", 1, 0),))
        >>> outer = Step("aten::mm", 5, (((4, 1), (3, 1)),), weights=(Weight("b", 1, 0),))
        >>> shapes = {"a": torch.Size([8, 2]), "b": torch.Size([1, 8])}
        >>> units_of(Tape((layer, outer), {2: "a", 3: "b"}, shapes, output=5), first)
        Units(weight='a', size=8, axes={'a': 0, 'b': 1})
    """
    if weight.out is None:
        raise Conflict("it makes no units of its own")
    if weight.groups > 1:
        raise Conflict("it is a grouped convolution, whose channels belong to their groups")
    size = tape.shapes[weight.name][weight.out]
    if size < 2:
        raise Conflict("it has one unit only")
    walk = _Walk(tape, weight, size)
    for step in tape.steps:
        walk.take(step)
    if tape.output in walk.open:
        raise Conflict("its units are the outputs of the network")
    return Units(weight.name, size, walk.axes)


class _Walk:
    """The values that hold the units of a weight, one step after another."""

    def __init__(self, tape: Tape, weight: Weight, size: int) -> None:
        self.tape, self.weight, self.size = tape, weight.name, size
        self.axes: dict[str, int] = {}
        self.open: set[int] = set()
        self._settle(weight.name, weight.out)

    def take(self, step: Step) -> None:
        """Follow the units through a step."""
        made = any(weight.name == self.weight for weight in step.weights)
        read = bool(step.reads & self.open)
        if made and read:
            raise Conflict("it reads its own units")
        readers = [weight for weight in step.weights if weight.into is not None]
        if made:
            self._beside(step)
            self.open.add(step.out)
        elif read and readers:
            for reader in readers:
                self._read(reader)
        elif read:
            self._beside(step)
            self.open.add(step.out)

    def _read(self, reader: Weight) -> None:
        if reader.groups > 1:
            raise Conflict(f"{reader.name} is that of a grouped convolution, whose channels belong to their groups")
        self._settle(reader.name, reader.into)

    def _beside(self, step: Step) -> None:
        """Tensors that act unit by unit: biases, normalisations, slopes."""
        names = {self.tape.names[value] for value in step.reads if value in self.tape.names} - {self.weight}
        others = {value for value in step.reads if value not in self.tape.names} - self.open
        if others and self.weight not in {weight.name for weight in step.weights}:
            raise Conflict(f"{step.op} joins its units with those of another branch")
        if step.norm is not None:
            names |= {step.norm.mean, step.norm.var}
        for name in sorted(names):
            axes = [axis for axis, size in enumerate(self.tape.shapes[name]) if size == self.size]
            if len(axes) == 1:
                self._settle(name, axes[0])
            elif self.tape.shapes[name].numel() > 1:
                raise Conflict(f"no axis of {name} has one entry for each unit")

    def _settle(self, name: str, axis: int | None) -> None:
        if axis is None or self.axes.setdefault(name, axis) != axis or self.tape.shapes[name][axis] % self.size:
            raise Conflict(f"no axis of {name} has entries for each unit")
