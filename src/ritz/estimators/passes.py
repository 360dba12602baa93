"""How many samples go through a network at once, and which passes are recorded: what a device likes.

A CPU wants pieces of a batch whose intermediate results stay small. On a GPU the host starts every kernel, so there
small batches of kept data are joined, and the pass of one batch is recorded and replayed (`ritz.replay`). Numbers
depend on none of it beyond round-off.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..batches import Batch, only_tensors, skeleton, tensors_of
from ..operators.footprint import fitting_piece
from ..risk import Params, Risk


def fitting_pieces(risk: Risk, params: Params, batch: Batch, num_cotangents: int) -> list[Batch]:
    """A batch in equal pieces whose gradients, so many cotangents at a time, a CPU holds well; whole elsewhere.

    To be called inside `session`.
    """
    if risk.device.type != "cpu" or risk.plan.micro_batch is not None or not risk.splittable:
        return [batch]
    most = fitting_piece(risk, params, batch, num_cotangents)
    return batch.pieces(-(-batch.size // -(-batch.size // most)))


def room(device: torch.device) -> int:
    """How many of a CPU's pieces a GPU takes at once: their largest gradient is a 128th of its memory; 0 elsewhere.

    The whole memory counts, not what is free, so that two runs on one kind of device are alike.

    Example:
        >>> room(torch.device("cpu"))
        0
    """
    return max(1, torch.cuda.get_device_properties(device).total_memory >> 31) if device.type == "cuda" else 0


def joined(risk: Risk, num_cotangents: int) -> Risk:
    """The same risk in batches as large as a GPU takes well, so many cotangents at a time.

    Itself where its own are large enough, may not be joined, are not kept on the device or fill much of its memory.

    Example:
        >>> data = torch.ones(4, 3), torch.ones(4, 1)
        >>> risk = Risk(torch.nn.Linear(3, 1), torch.nn.MSELoss(), data, batch_size=2)
        >>> joined(risk, 1) is risk  # on a CPU
        True
    """
    times = room(risk.device)
    if not times or not risk.splittable or risk.plan.micro_batch is not None or risk.world.size > 1:
        return risk
    if not risk.batches.cached:
        return risk
    own = list(risk.batches)
    size = max(batch.size for batch in own)
    held = sum(x.nbytes for batch in own for x in tensors_of(batch.data))
    pool = risk.batches.pool() if len(own) > 1 and held <= times << 27 else None  # a 16th of the memory
    if pool is None:
        return risk
    with risk.session():
        most = times * fitting_piece(risk, risk.params(), pool, num_cotangents)
    if most < 2 * size:
        return risk
    return risk.on([piece.data for piece in pool.pieces(most // size * size)])


def replayed(
    risk: Risk, name: Hashable, fn: Callable[[Batch], tuple[Tensor, Tensor]], batch: Batch
) -> tuple[Tensor, Tensor]:
    """`fn(batch)`, recorded and replayed where the plan says so.

    Args:
        risk: What the function is of; its weights and the settings of its modules are looked at here.
        name: Name of the function, with what else it depends on.
        fn: A batch to two tensors, by operations that depend on the shapes of the batch alone.
        batch: The batch.

    Example:
        >>> risk = Risk(torch.nn.Linear(3, 1), torch.nn.MSELoss(), (torch.ones(4, 3), torch.ones(4, 1)))
        >>> replayed(risk, "sums", lambda batch: tuple(x.sum() for x in batch.data), next(iter(risk.batches)))
        (tensor(12.), tensor(4.))
    """
    if not (risk.replays and only_tensors(batch.data)):
        return fn(batch)

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return fn(batch.holding(tensors))

    key = (name, risk.place(), batch.size, skeleton(batch.data))
    total, weight = risk.shortcuts.recordings.run(key, of_tensors, tensors_of(batch.data))
    return total, weight
