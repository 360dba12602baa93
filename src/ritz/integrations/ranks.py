"""Ranks that train together wait for each other before a look, and measure the same weights and buffers."""

from typing import Any

import torch
import torch.distributed as dist

from ..comm import World
from ..risk import Risk


def meet(world: World) -> None:
    """Wait for all ranks, up to the timeout of the process group: one may, for example, be saving a checkpoint.

    Example:
        >>> from ritz.comm import SELF
        >>> meet(SELF)
    """
    if world.size > 1:
        dist.barrier(group=world.group)


def at_first(risk: Risk, test: Any = None) -> tuple[Risk, Any]:
    """The risk, and a risk on test data, with the buffers of the first rank.

    Replicas have the same weights, but each has its own running statistics of BatchNorm, from its own batches.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1)))
        >>> at_first(risk) == (risk, None)
        True
    """
    if risk.world.size == 1 or risk.sharded:
        return risk, test
    state = risk.state()
    own = {name: state[name] for name, _ in risk.model.named_buffers() if state[name].is_floating_point()}
    if not own:
        return risk, test
    flat, _ = risk.world.same(torch.cat([t.flatten() for t in own.values()]), None)
    parts = flat.split([t.numel() for t in own.values()])
    first = {name: part.view(t.shape) for part, (name, t) in zip(parts, own.items(), strict=True)}
    return risk.at(first), test.at(first) if isinstance(test, Risk) else test
