"""Batches shared out among ranks, and what becomes of them put together.

Data that every rank has in whole is taken in turns: of each round of as many batches as there are ranks, each rank
takes one. What is left over in the end is cut, where a batch may be, so that no rank is idle for it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .batches import Batch
from .comm import World
from .reducers import Mean, Reducer

Pieces = list[tuple[Tensor, Tensor]]  # (total, weight) of each
R = TypeVar("R", bound=Reducer)


@dataclass(frozen=True)
class Turn:
    """A batch, or a piece of one, that falls to this rank."""

    place: int  # of the batch in the walk
    piece: int
    batch: Batch


def turns(batches: Iterable[Batch], world: World, cut: bool, in_step: bool = False) -> Iterator[list[Turn]]:
    """The turns of this rank, round by round; `batches` and so the number of rounds are the same on all ranks.

    Ranks that go `in_step` have as many turns each: where there is nothing for one, it walks along idly.

    Example:
        >>> from ritz.comm import SELF
        >>> batch = Batch((torch.zeros(3, 1),), 0, 0, 3)
        >>> [turn.place for round_ in turns([batch, batch], SELF, cut=True) for turn in round_]
        [0, 1]
    """
    first, together = 0, []
    for batch in batches:
        together.append(batch)
        if len(together) == world.size:
            yield [Turn(first + world.rank, 0, together[world.rank])]
            first, together = first + world.size, []
    if together:
        yield list(_left_over(together, first, world, cut, in_step))


def _left_over(batches: list[Batch], first: int, world: World, cut: bool, in_step: bool) -> Iterator[Turn]:
    """Fewer batches than ranks: a piece of each, or one of them for some of the ranks."""
    if not cut:
        if world.rank < len(batches):
            yield Turn(first + world.rank, 0, batches[world.rank])
        elif in_step:
            yield Turn(first, 0, replace(batches[0], idle=True))
        return
    for place, batch in enumerate(batches):
        pieces = batch.pieces(-(-batch.size // world.size))
        if world.rank < len(pieces):
            yield Turn(first + place, world.rank, pieces[world.rank])
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


class Walk:
    """A walk over the data by several ranks.

    Args:
        world: The ranks.
        work: A batch to its pieces' (total, weight).
        piece: The most samples at a time for which memory was enough; the least of all ranks is taken over by all.
        adopt: Takes that.
        device: Where the results are to be, also on a rank that has no batch.
        name: What the walk is for: ranks that walk for different things have come apart.
    """

    def __init__(
        self,
        world: World,
        work: Callable[[Batch], Pieces],
        piece: Callable[[], int | None],
        adopt: Callable[[int | None], None],
        device: torch.device,
        name: str,
    ) -> None:
        self.world, self.work, self.piece, self.adopt, self.device = world, work, piece, adopt, device
        self.name = name

    def into(self, reducer: Reducer, rounds: Iterable[Iterable[Turn]], done: Callable[[int], None]) -> Any:
        """What the reducer makes of all batches, on every rank."""
        if isinstance(reducer, Mean):
            self._summed(reducer, rounds, done)
        else:
            self._in_order(reducer, rounds, done)
        return reducer.result()

    def _summed(self, reducer: Mean, rounds: Iterable[Iterable[Turn]], done: Callable[[int], None]) -> None:
        """Sums need no order: each rank adds up its own, and one sum over ranks ends the walk."""
        own, error, place = Mean(), None, 0
        try:
            for round_ in rounds:
                for turn in round_:
                    place = turn.place
                    pieces = self.work(turn.batch)
                    if not turn.batch.idle:
                        own.add(*own.join(pieces))
                    done(place)
        except Exception as caught:
            error = caught
        total, weight = own.total, own.weight
        kind = None if total is None or weight is None else (total.shape, total.dtype, _numbers(weight))
        told = self._agree(error, kind, place)
        known = [each for each in told if each is not None]
        if not known:
            return
        if total is None:
            total = torch.zeros(known[0][0], dtype=known[0][1], device=self.device)
        whole = sum((_weight(each[2]) for each in known[1:]), _weight(known[0][2]))  # in the order of ranks
        reducer.add(self.world.sum(total), whole.to(total.device))

    def _in_order(self, reducer: Reducer, rounds: Iterable[Iterable[Turn]], done: Callable[[int], None]) -> None:
        """What depends on the order: every rank is given all batches of a round and adds them in the order of data."""
        walk, over = iter(rounds), False
        while not over:
            mine: list[tuple[int, int, Tensor, Tensor]] = []
            error, place, turn_list = None, 0, None
            try:
                turn_list = next(walk, None)
                for turn in turn_list or ():
                    place = turn.place
                    pieces = self.work(turn.batch)
                    if not turn.batch.idle:
                        mine.append((turn.place, turn.piece, *reducer.join(pieces)))
                    done(place)
            except Exception as caught:
                error = caught
            keys = [(where, piece, _numbers(weight)) for where, piece, _, weight in mine]
            told = self._agree(error, (turn_list is None, keys), place)
            over = all(ended for ended, _ in told)
            parts = self.world.cat([total for _, _, total, _ in mine], self.device)
            _add_in_order(reducer, [keys for _, keys in told], parts)

    def _agree(self, error: Exception | None, note: Any, place: int) -> list[Any]:
        """Notes of all ranks; from here on all take pieces that fit the rank with the least memory."""
        told = self.world.agree(self.name, error, (self.piece(), note), place)
        sizes = [size for size, _ in told if size is not None]
        self.adopt(min(sizes) if sizes else None)
        return [own for _, own in told]


def _numbers(weight: Tensor) -> Any:
    """A weight, one number mostly, as plain ones."""
    return weight.detach().double().tolist()


def _weight(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _add_in_order(reducer: Reducer, keys: list[list[tuple[int, int, Any]]], parts: list[list[Tensor]]) -> None:
    """Pieces of all ranks, put together to batches and added in the order of the data."""
    found: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
    for own, tensors in zip(keys, parts, strict=True):
        for (place, piece, weight), total in zip(own, tensors, strict=True):
            found.setdefault(place, []).append((piece, total, _weight(weight).to(total.device)))
    for place in sorted(found):
        pieces = sorted(found[place], key=lambda each: each[0])
        reducer.add(*reducer.join([(total, weight) for _, total, weight in pieces]))
