"""Batches shared out among ranks: which of them takes which.

Data that every rank has in whole is taken in turns: of each round of as many batches as there are ranks, each rank
takes one. What is left over in the end is cut, where a batch may be, so that no rank is idle for it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .batches import Batch, Batches
from .comm import World


@dataclass(frozen=True)
class Turn:
    """A batch, or a piece of one, that falls to this rank."""

    place: int  # of the batch in the walk
    piece: int
    batch: Batch


def turns(
    batches: Iterable[Batch], world: World, cut: bool, in_step: bool = False, apart: bool = False, leader: int = 0
) -> Iterator[list[Turn]]:
    """The turns of this rank, round by round; `batches` and so the number of rounds are the same on all ranks.

    Ranks that go `in_step` have as many turns each: where there is nothing for one, it walks along idly, which the
    `leader` never does. With `apart` all ranks are at one batch at a time: what they sum in a pass is of this one.

    Example:
        >>> from ritz.comm import SELF
        >>> batch = Batch((torch.zeros(3, 1),), 0, 0, 3)
        >>> [turn.place for round_ in turns([batch, batch], SELF, cut=True) for turn in round_]
        [0, 1]
    """
    first, together, turn = 0, [], (world.rank - leader) % world.size
    for batch in batches:
        together.append(batch)
        if apart:
            yield list(_left_over(together, first, world.size, turn, cut, in_step))
            first, together = first + 1, []
        elif len(together) == world.size:
            yield [Turn(first + turn, 0, together[turn])]
            first, together = first + world.size, []
    if together:
        yield list(_left_over(together, first, world.size, turn, cut, in_step))


def _left_over(batches: list[Batch], first: int, size: int, turn: int, cut: bool, in_step: bool) -> Iterator[Turn]:
    """Fewer batches than ranks: a piece of each, or one of them for some of the ranks."""
    if not cut:
        if turn < len(batches):
            yield Turn(first + turn, 0, batches[turn])
        elif in_step:
            yield Turn(first, 0, replace(batches[0], idle=True))
        return
    for place, batch in enumerate(batches):
        pieces = batch.pieces(-(-batch.size // size))
        if turn < len(pieces):
            yield Turn(first + place, turn, pieces[turn])
        elif in_step:
            yield Turn(first + place, 0, replace(pieces[0], idle=True))


def padded(own: Iterable[Batch], idle: Batch | None, count: int) -> Iterator[Turn]:
    """The batches of a share as turns; for ranks that go in step with idle ones after them, up to `count`."""
    for batch in own:
        yield Turn(batch.index, 0, batch)
        count -= 1
    if idle is not None:
        for _ in range(count):
            yield Turn(idle.index, 0, replace(idle, idle=True))


def leader_of(batches: Batches) -> int:
    """Which rank speaks for all, where they have one result: the first of those that are never idle.

    Example:
        >>> leader_of(Batches((torch.zeros(3, 1),), batch_size=None, device=torch.device("cpu"), dtype=None))
        0
    """
    counts = [number for number, _ in batches._held] or [1]
    return counts.index(max(counts))
