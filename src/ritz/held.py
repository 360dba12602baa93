"""Results that depend on weights and data alone, kept while those stay as they are.

Whatever is kept asks the same question before it is used again: is all that it was computed from as it was? `Grounds`
answers it, and `Held` where a GPU is not to wait for the answer.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from .memory import bytes_of
from .sameness import place_of

T = TypeVar("T")

SMALL = 1 << 20  # entries of a tensor that is compared together with others,
PACKED_ON = ("cuda",)  # on these kinds of devices
LARGE = 1 << 14  # entries of a tensor on a CPU that NumPy compares, several times as fast as torch,
_COMPARED = {torch.float32, torch.float64, torch.int64}  # if it is of these kinds


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
            same = alike and all(_equal(a, b) for a, b in pairs)
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


class Grounds:
    """What results were computed from: settings that can be compared, a state, and data.

    Example:
        >>> slope, weights, data = 0.1, [torch.ones(2)], [torch.zeros(3)]
        >>> grounds = Grounds(slope, weights)
        >>> grounds.read(data)
        >>> grounds.hold(slope, weights), grounds.hold(0.2, weights)
        (True, False)
        >>> data[0].numpy()[0] = 1.0  # torch does not count it
        >>> grounds.hold(slope, weights)
        False
    """

    def __init__(self, settings: object, state: Sequence[Tensor]) -> None:
        self._settings, self._state = settings, Snapshot(state)
        self._read: list[tuple[Sequence[Tensor], Snapshot]] = []
        self._counted: list[tuple[Sequence[Tensor], tuple[int, ...]]] = []

    def read(self, data: Sequence[Tensor]) -> None:
        """Results depend on the values of this data as well; they are copied, and compared each time."""
        self._read.append((data, Snapshot(data)))

    def count(self, data: Sequence[Tensor]) -> None:
        """The same for data that is too large for that: how often it was written to, as far as torch counts it."""
        self._counted.append((data, versions_of(data)))

    def hold(self, settings: object, state: Sequence[Tensor]) -> bool:
        """Whether settings, state and data are as they were."""
        return (
            self._settings == settings
            and all(versions_of(data) == versions for data, versions in self._counted)
            and self._state.compare(state)()
            and all(taken.compare(data)() for data, taken in self._read)
        )

    def __getstate__(self) -> dict[str, object]:  # a copy is of another model, and holds for nothing
        return {}

    def __setstate__(self, _: dict[str, object]) -> None:
        self.__init__(object(), ())  # type: ignore[misc]


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
            data: Data of a batch.
            make: The function.
            room: How many bytes there are for all results, asked when there is one more.
            work: With the results.
        """
        if not _are(state, self._last):
            return work(Results(make()))
        place = key, self._where, place_of(data)
        versions = versions_of(data)
        entry = self._found.get(place)
        if entry is not None and entry.fresh and entry.versions == versions:
            self._found.move_to_end(place)
            done = work(entry.results)
            if self._stands():
                return done
        self._stands()
        results, entry = Results(make()), self._found.get(place)
        size = bytes_of(results)
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


def versions_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """How often tensors were written to; of those made in inference mode torch does not know.

    Example:
        >>> x = torch.ones(2)
        >>> before = versions_of([x])
        >>> versions_of([x.add_(1)]) == before
        False
    """
    return tuple([0 if x.is_inference() else x._version for x in tensors])


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one shape on one device have the same values."""
    if a.dtype != b.dtype or a.numel() < LARGE or a.device.type != "cpu" or a.dtype not in _COMPARED:
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool((a.numpy(force=True) == b.numpy(force=True)).all())


def _are(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are these very ones."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))
