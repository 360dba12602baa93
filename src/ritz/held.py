"""Results that depend on weights and data alone, kept on the device while those stay as they are."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .replay import place_of

Results = tuple[Tensor, ...]


@dataclass
class _Entry:
    tensors: Sequence[Tensor]  # as long as they are here, no others lie where they do
    versions: tuple[int, ...]
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
        >>> times = lambda: held.find("times", weights, data, lambda: (weights[0] * data[0],), room=lambda: 100)
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
        self._state: list[Tensor] = []  # copies of weights and buffers
        self._where: Hashable = None  # those lie

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
        self._state = []
        self.keeps = self.keeps and not had
        return had

    def refresh(self, state: Sequence[Tensor]) -> None:
        """Before a walk: no result holds any more where a value has changed, be it written to `weight.data`.

        Those that were not asked for since the last change go.
        """
        self._where = place_of(state)
        if self._found and not same_values(self._state, state):
            for place in [place for place, entry in self._found.items() if not entry.fresh]:
                del self._found[place]
            for entry in self._found.values():
                entry.fresh = False
            self._state = []

    def find(
        self,
        key: Hashable,
        state: Sequence[Tensor],
        data: Sequence[Tensor],
        make: Callable[[], Results],
        room: Callable[[], float],
    ) -> Results:
        """What `make` gave for these weights and this data, or gives now; kept in no more than `room` bytes in all.

        Args:
            key: Names the function.
            state: Weights and buffers. Of others than those of the last `refresh` nothing is kept.
            data: Of a batch.
            make: The function.
            room: How many bytes there are for all results, asked when there is one more.
        """
        if place_of(state) != self._where:
            return make()
        tensors = [*state, *data]
        place, versions = (key, place_of(tensors)), tuple(0 if x.is_inference() else x._version for x in tensors)
        entry = self._found.get(place)
        if entry is not None:
            self._found.move_to_end(place)
            if entry.fresh and entry.versions == versions:
                return entry.results
        results = make()
        size = sum(x.numel() * x.element_size() for x in results)
        if entry is not None:
            for old, new in zip(entry.results, results, strict=True):
                old.copy_(new)
            entry.versions, entry.fresh = versions, True
        elif self.keeps and size <= (most := room()):
            self._found[place] = entry = _Entry(tensors, versions, results, size)
            while self.size > most:
                self._found.popitem(last=False)
        if entry is None:
            return results
        self._state = self._state or [x.clone() for x in state]
        return entry.results

    def __getstate__(self) -> dict[str, object]:  # they belong to this process
        return {}

    def __setstate__(self, _: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]


def same_values(known: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Whether tensors have the values of others; a GPU is waited for once.

    Example:
        >>> same_values([torch.ones(2)], [torch.ones(2)]), same_values([torch.ones(2)], [torch.ones(1)])
        (True, False)
    """
    if len(known) != len(now) or any(
        a.shape != b.shape or a.device != b.device for a, b in zip(known, now, strict=True)
    ):
        return False
    if all(x.device.type == "cpu" for x in known):
        return all(map(torch.equal, known, now))
    return bool(torch.stack([(a == b).all() for a, b in zip(known, now, strict=True)]).all())
