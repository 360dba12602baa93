"""The damped curvature matrix of a network, inverted block by block in the eigenbases of its factors."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..operators.kronecker import Function
from ..replay import Recordings
from ..sameness import place_of
from .factors import RunningBlock
from .groups import damping_of


class Preconditioner:
    """f(C + damping) of tensors by parameter name, C being block-diagonal; blocks without statistics are passed over.

    In the eigenbasis of a block a new damping costs nothing.

    Args:
        blocks: The blocks, by name.
        params: The parameters, by name.

    Attributes:
        replays: Whether inverses are recorded and replayed, as on a GPU: they are many small products.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        >>> opt = ritz.optim.KFAC(model, lr=0.1, damping=1.0, loss="mse", fisher="type2")
        >>> model(torch.ones(1, 1)).square().mean().backward()
        >>> opt.step()  # curvature 2
        >>> damped = Preconditioner(opt.blocks, dict(model.named_parameters()))
        >>> damped.inverse({"0.weight": torch.ones(1, 1)}, {"0": 2.0})
        {'0.weight': tensor([[0.2500]])}
    """

    def __init__(self, blocks: Mapping[str, RunningBlock], params: Mapping[str, Tensor]) -> None:
        self.blocks, self.params = blocks, params
        devices = {p.device for p in params.values()}
        self.replays = len(devices) == 1 and next(iter(devices)).type == "cuda"
        self.recordings = Recordings(most=1)

    def dampings(self, tensors: Collection[str], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """The damping of every block that has statistics and a part in these tensors, by its name.

        Args:
            tensors: Names of parameters.
            settings: The group of every parameter; a block has the damping of its first.
        """
        found = {}
        for name, block in self.blocks.items():
            params = block.unit.params.values()
            if any(own in tensors for own in params) and block.wide is not None:
                found[name] = damping_of(name, settings[next(iter(params))])
        return found

    def apply(
        self, tensors: Mapping[str, Tensor], dampings: Mapping[str, float | Tensor], function: Function
    ) -> dict[str, Tensor]:
        """A function of the damped matrix, block by block; what is not given of a block counts as zero."""
        found: dict[str, Tensor] = {}
        for name, damping in dampings.items():
            block = self.blocks[name]
            given = {
                own: tensors[own] if own in tensors else torch.zeros_like(self.params[own])
                for own in block.unit.params.values()
            }
            assert block.wide is not None
            image = block.apply(given, function(block.wide.values + damping))
            found.update({own: x.to(tensors[own].dtype) for own, x in image.items() if own in tensors})
        return found

    def inverse(self, grads: Mapping[str, Tensor], dampings: Mapping[str, float]) -> dict[str, Tensor]:
        """(C + damping)^-1 of gradients."""
        if not self.replays or not dampings:
            return self.apply(grads, dampings, Tensor.reciprocal_)
        spaces = [space for name in dampings if (space := self.blocks[name].wide) is not None]
        blocks = [self.blocks[name].unit.params.values() for name in dampings]
        names = [own for params in blocks for own in params if own in grads]

        def recorded(deltas: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            each = dict(zip(dampings, deltas.unbind(), strict=True))
            moves = self.apply(dict(zip(names, tensors, strict=True)), each, Tensor.reciprocal_)
            return tuple(moves[name].contiguous() for name in names)

        place = place_of(x for space in spaces for x in (space.values, space.left, space.right) if x is not None)
        deltas = torch.tensor(list(dampings.values()), dtype=torch.float64, device=spaces[0].values.device)
        inputs = [deltas, *(grads[name] for name in names)]
        moves = self.recordings.run((tuple(names), place), recorded, inputs, lend=True)
        return dict(zip(names, moves, strict=True))
