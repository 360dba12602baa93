"""Results that depend on weights and data alone, kept on the device while those stay as they are."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from .replay import place_of

T = TypeVar("T")

SMALL = 1 << 20  # entries of a tensor that is compared together with others,
PACKED_ON = ("cuda",)  # on these kinds of devices


class Snapshot:
    """The values of tensors, to hold later ones against: what is written to `weight.data` is not counted by torch.

    Example:
        >>> weights = [torch.ones(2), torch.arange(3)]
        >>> taken = Snapshot(weights)
        >>> taken.compare(weights)()
        True
        >>> weights[0].data.zero_()
        tensor([0., 0.])
        >>> taken.compare(weights)()
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._last: Sequence[Tensor] = ()  # what was asked for,
        self._parts: list[list[Tensor]] = []  # as it is compared
        self._packs = [x.clone() for x in self._packed(tensors)]

    def compare(self, tensors: Sequence[Tensor]) -> Callable[[], bool]:
        """Ask whether tensors have these values; the answer is waited for when it is called for.

        A GPU goes on meanwhile with whatever it is given after the question.
        """
        now = self._packed(tensors)
        pairs = list(zip(self._packs, now, strict=False))
        alike = len(now) == len(self._packs) and all(a.shape == b.shape and a.device == b.device for a, b in pairs)
        if not (alike and now and now[0].device.type == "cuda"):
            same = alike and all(torch.equal(a, b) for a, b in pairs)
            return lambda: same
        answer = torch.stack([(a == b).all() for a, b in pairs]).all().to("cpu", non_blocking=True)
        asked = torch.cuda.current_stream(now[0].device).record_event()

        def waited() -> bool:
            asked.synchronize()
            return bool(answer)

        return waited

    def _packed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """On a GPU, which is given each by a call of its own, the small ones of a kind as one; others as they are."""
        if not _are(tensors, self._last):
            parts: dict[Hashable, list[Tensor]] = {}
            for x in tensors:
                kind = (x.dtype, x.device) if x.numel() < SMALL and x.device.type in PACKED_ON else id(x)
                parts.setdefault(kind, []).append(x)
            self._last, self._parts = list(tensors), list(parts.values())
        return [part[0] if len(part) == 1 else torch.cat([x.reshape(-1) for x in part]) for part in self._parts]


class Results(tuple[Tensor, ...]):
    """Tensors that stay where they are.

    Example:
        >>> x = torch.ones(2)
        >>> Results([x]).place == place_of([x])
        True
    """

    @cached_property
    def place(self) -> tuple[Hashable, ...]:
        """Where they lie."""
        return place_of(self)


@dataclass
class _Entry:
    tensors: Sequence[Tensor]  # as long as they are here, no others lie where they do
    versions: tuple[int, ...]  # of the data
    results: Results
    size: int
    fresh: bool = True  # no value has changed since


class Held:
    """Results of functions of weights and data, by the function and where those tensors lie.

    When weights have changed the next results are written where the last ones were: recordings read them there. Where
    room runs out, those that were not asked for longest go.

    Example:
        >>> held, weights, data = Held(), [torch.ones(1)], [torch.ones(2)]
        >>> held.refresh(weights)
        >>> make = lambda: (weights[0] * data[0],)
        >>> times = lambda: held.use("times", weights, data, make, lambda: 100, lambda results: results)
        >>> times() is times()
        True
        >>> weights[0].data.zero_()
        tensor([0.])
        >>> held.refresh(weights)
        >>> times()
        (tensor([0., 0.]),)
    """

    def __init__(self) -> None:
        self.keeps = True
        self._found: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._state: Snapshot | None = None  # of weights and buffers
        self._last: Sequence[Tensor] = ()  # those themselves, at the beginning of the walk
        self._where: Hashable = None  # they lie
        self._same: Callable[[], bool] | None = None  # whether they still have their values, where it is not known yet

    def __len__(self) -> int:
        return len(self._found)

    @property
    def size(self) -> int:
        """Bytes of all results."""
        return sum(entry.size for entry in self._found.values())

    def let_go(self) -> bool:
        """Give the memory back, and keep nothing from here on; whether there was any."""
        had = bool(self._found)
        self._found.clear()
        self._state = self._same = None
        self.keeps = self.keeps and not had
        return had

    def refresh(self, state: Sequence[Tensor]) -> None:
        """Before a walk: no result holds any more where a value has changed, be it written to `weight.data`.

        Those that were not asked for since the last change go.
        """
        new = not _are(state, self._last)
        if new:
            self._last, self._where = list(state), place_of(state)
        self._same = self._state.compare(state) if self._found and self._state is not None else None
        if new:  # most likely they have changed, and to wait is better than to work for nothing
            self._stands()

    def _stands(self) -> bool:
        """Whether weights had not changed before this walk; nothing is fresh where they had."""
        same, self._same = self._same, None
        if same is None or same():
            return True
        for place in [place for place, entry in self._found.items() if not entry.fresh]:
            del self._found[place]
        for entry in self._found.values():
            entry.fresh = False
        self._state = None
        return False

    def use(
        self,
        key: Hashable,
        state: Sequence[Tensor],
        data: Sequence[Tensor],
        make: Callable[[], Sequence[Tensor]],
        room: Callable[[], float],
        work: Callable[[Results], T],
    ) -> T:
        """`work` of what `make` gave for these weights and this data, or gives now; kept in `room` bytes at most.

        The work is begun before it is known whether the results still hold, so that no device waits for the answer,
        and done again where they did not.

        Args:
            key: Names the function.
            state: Weights and buffers. Of others than those of the last `refresh` nothing is kept.
            data: Of a batch.
            make: The function.
            room: How many bytes there are for all results, asked when there is one more.
            work: With the results.
        """
        if not _are(state, self._last):
            return work(Results(make()))
        place = key, self._where, place_of(data)
        versions = tuple(0 if x.is_inference() else x._version for x in data)
        entry = self._found.get(place)
        if entry is not None and entry.fresh and entry.versions == versions:
            self._found.move_to_end(place)
            done = work(entry.results)
            if self._stands():
                return done
        self._stands()
        results, entry = Results(make()), self._found.get(place)
        size = sum(x.numel() * x.element_size() for x in results)
        if entry is not None:
            for old, new in zip(entry.results, results, strict=True):
                old.copy_(new)
            entry.versions, entry.fresh = versions, True
            self._found.move_to_end(place)
        elif self.keeps and size <= (most := room()):
            self._found[place] = entry = _Entry([*state, *data], versions, results, size)
            while self.size > most:
                self._found.popitem(last=False)
        if entry is None:
            return work(results)
        self._state = self._state or Snapshot(state)
        return work(entry.results)

    def __getstate__(self) -> dict[str, object]:  # they belong to this process
        return {}

    def __setstate__(self, _: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]


def _are(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are these very ones."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))
