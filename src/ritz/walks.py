"""THE loop over mini-batches: walks over the data of a risk, by one process or by ranks that divide the work.

When memory runs out, everything that is held only for speed is released. If a batch still does not fit, it is processed
in pieces, and so are the batches after it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .batches import Batch, Batches
from .comm import World
from .diagnoses import no_room
from .memory import NoRoomError, is_shortage, make_room
from .reducers import Mean, Reducer
from .sharded import ShardedModel
from .shares import Turn, leader_of, padded, turns
from .shortcuts import Shortcuts
from .weights import Params

Summed = tuple[Tensor, Tensor]  # (total, weight) of a batch, or of a piece of one

log = logging.getLogger(__name__)


class Walked(Protocol):
    """What a walk needs of a risk. It changes only `_piece`, and releases `shortcuts`, if memory runs out."""

    world: World
    device: torch.device  # of the results, also on a rank that has no batch
    batches: Batches
    _sharded: ShardedModel | None
    _piece: int | None  # most samples at a time, smaller after memory has run out; None for whole batches
    shortcuts: Shortcuts  # their memory is released before a batch is cut

    @property
    def splittable(self) -> bool:
        """Whether a batch may be cut without changing the sum."""

    def params(self) -> Params:
        """The parameters that are passed to `fn`."""

    def session(self) -> AbstractContextManager[None]:
        """The model as the risk sees it."""


def fold(
    risk: Walked,
    fn: Callable[[Params, Batch], Summed],
    into: Reducer,
    progress: Callable[[int, int], None] | None = None,
    batches: Sequence[Batch] | None = None,
) -> Any:
    """Walk once over the data of a risk, or over the given batches; see `Risk.fold`.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(5, 1), torch.zeros(5, 1)), batch_size=2)
        >>> float(fold(risk, lambda params, batch: (torch.tensor(batch.size**2), torch.tensor(batch.size)), Mean()))
        1.8
    """
    batches = batches if batches is None or isinstance(batches, Sequence) else list(batches)

    def done(place: int) -> None:
        if progress is not None:
            progress(place + 1, len(batches) if batches is not None else 0)

    if risk.world.size > 1:
        name = f"a walk for {getattr(fn, '__qualname__', type(fn).__name__)} into {type(into).__name__}"
        return _Together(risk, partial(fn, risk.params()), name).fold(into, batches, done)
    with risk.session():
        work = partial(fn, risk.params())
        for place, batch in enumerate(risk.batches if batches is None else batches):
            into.add(*into.join(pieces(risk, work, batch)))
            done(place)
    return into.result()


# --------------------------------------------------------------------------------------------------- memory


def pieces(risk: Walked, work: Callable[[Batch], Summed], batch: Batch) -> list[Summed]:
    """Apply `work` to a batch, whole or in pieces that fit in memory.

    Raises:
        torch.OutOfMemoryError: If the batch cannot be cut further.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(5, 1), torch.zeros(5, 1)))
        >>> def work(batch):
        ...     if batch.size > 2:
        ...         raise torch.OutOfMemoryError
        ...     return torch.tensor(batch.size), torch.tensor(batch.size)
        >>> [int(total) for total, _ in pieces(risk, work, next(iter(risk.batches)))]
        [2, 2, 1]
    """
    if risk._sharded is not None:
        return _pieces_in_step(risk, risk._sharded, work, batch)
    while True:
        most = min(risk._piece or batch.size, batch.size)
        try:
            return [work(piece) for piece in batch.pieces(most)]
        except Exception as error:
            if not is_shortage(error) or isinstance(error, NoRoomError):  # counted, or known of a part of this work
                raise
            why = str(error).partition("\n")[0][:160]
        held = risk.shortcuts.let_go()  # outside the except block, whose traceback would hold the memory
        make_room(risk.device)
        if held:
            continue
        if most == 1 or not risk.splittable:
            raise NoRoomError(no_room(work, batch, risk.splittable, why))
        risk._piece = most // 2
        log.warning("out of memory: batches are now taken in pieces of %d samples", risk._piece)


def _pieces_in_step(risk: Walked, model: ShardedModel, work: Callable[[Batch], Summed], batch: Batch) -> list[Summed]:
    """The same for a model whose passes involve all ranks: all cut into equally many pieces, and retry together."""
    sizes = risk.world.gather(batch.size)
    while True:
        number = min(max(-(-size // (risk._piece or size)) for size in sizes), *sizes)
        found = model.in_step(work, batch.parts(number), risk.world)
        if found is not None:
            return found
        largest = max(-(-size // number) for size in sizes)
        if largest == 1 or not risk.splittable or number == min(sizes):
            raise torch.OutOfMemoryError(
                f"a rank runs out of memory with {largest} samples at a time, and they cannot be cut further; use "
                "more ranks, or activation checkpointing"
            )
        risk._piece = largest // 2
        log.warning("out of memory on a rank: batches are now taken in pieces of %d samples", risk._piece)


# ---------------------------------------------------------------------------------------------------- ranks


class _Together:
    """A walk by several ranks, which all get the result.

    Args:
        risk: The risk whose data is walked. All ranks adopt the smallest `_piece` of any rank.
        work: Gives the (total, weight) of a batch.
        name: What the walk is for. If the names of two ranks differ, the ranks have come apart.
    """

    def __init__(self, risk: Walked, work: Callable[[Batch], Summed], name: str) -> None:
        self.risk, self.work, self.name = risk, work, name

    def fold(self, reducer: Reducer, batches: Sequence[Batch] | None, done: Callable[[int], None]) -> Any:
        """The result of the reducer over all batches, on every rank."""
        self.risk.batches.prepare()
        with self.risk.session():
            if isinstance(reducer, Mean):
                self._summed(reducer, self._rounds(batches, apart=False), done)
            else:
                self._in_order(reducer, self._rounds(batches, apart=self.risk._sharded is not None), done)
            return reducer.result()

    def _rounds(self, batches: Sequence[Batch] | None, apart: bool) -> Iterable[Iterable[Turn]]:
        """The work of this rank: its share of the data, or its turns if all ranks have the same batches.

        A pass of a sharded model sums over ranks, whichever batches they have: `apart` if each batch needs its own
        result.
        """
        risk, own, in_step = self.risk, self.risk.batches, self.risk._sharded is not None
        if batches is None and own.share:
            most = max(number for number, _ in own._held)
            return [padded(own.own(), next(iter(own)) if in_step else None, most)]
        every = own.own() if batches is None else batches
        return turns(every, risk.world, risk.splittable, in_step, apart, leader_of(own))

    def _summed(self, reducer: Mean, rounds: Iterable[Iterable[Turn]], done: Callable[[int], None]) -> None:
        """A mean does not depend on the order: each rank sums its own batches, and one sum over ranks ends the walk."""
        own, error, place = Mean(), None, 0
        try:
            for round_ in rounds:
                for turn in round_:
                    place = turn.place
                    found = pieces(self.risk, self.work, turn.batch)
                    if not turn.batch.idle:
                        own.add(*own.join(found))
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
            total = torch.zeros(known[0][0], dtype=known[0][1], device=self.risk.device)
        whole = sum((_weight(each[2]) for each in known[1:]), _weight(known[0][2]))  # in the order of ranks
        reducer.add(self.risk.world.sum(total), whole.to(total.device))

    def _in_order(self, reducer: Reducer, rounds: Iterable[Iterable[Turn]], done: Callable[[int], None]) -> None:
        """Other reducers depend on the order: every rank gets the results of all ranks and adds them in data order."""
        walk, over = iter(rounds), False
        while not over:
            mine: list[tuple[int, int, Tensor, Tensor]] = []
            error, place, turn_list = None, 0, None
            try:
                turn_list = next(walk, None)
                for turn in turn_list or ():
                    place = turn.place
                    found = pieces(self.risk, self.work, turn.batch)
                    if not turn.batch.idle:
                        mine.append((turn.place, turn.piece, *reducer.join(found)))
                    done(place)
            except Exception as caught:
                error = caught
            keys = [(where, piece, _numbers(weight)) for where, piece, _, weight in mine]
            told = self._agree(error, (turn_list is None, keys), place)
            over = all(ended for ended, _ in told)
            parts = self.risk.world.cat([total for _, _, total, _ in mine], self.risk.device)
            _add_in_order(reducer, [keys for _, keys in told], parts)

    def _agree(self, error: Exception | None, note: Any, place: int) -> list[Any]:
        """The notes of all ranks; from now on, all use pieces that fit the rank with the least memory."""
        told = self.risk.world.agree(self.name, error, (self.risk._piece, note), place)
        sizes = [size for size, _ in told if size is not None]
        self.risk._piece = min(sizes) if sizes else None
        return [own for _, own in told]


def _numbers(weight: Tensor) -> Any:
    """A weight, which is mostly one number, as plain Python numbers."""
    return weight.detach().double().tolist()


def _weight(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _add_in_order(reducer: Reducer, keys: list[list[tuple[int, int, Any]]], parts: list[list[Tensor]]) -> None:
    """Join the pieces of all ranks to batches, and add these in the order of the data."""
    found: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
    for own, tensors in zip(keys, parts, strict=True):
        for (place, piece, weight), total in zip(own, tensors, strict=True):
            found.setdefault(place, []).append((piece, total, _weight(weight).to(total.device)))
    for place in sorted(found):
        in_order = sorted(found[place], key=lambda each: each[0])
        reducer.add(*reducer.join([(total, weight) for _, total, weight in in_order]))
