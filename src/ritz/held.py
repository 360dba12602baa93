"""Results that depend on weights and data alone, kept on the device while those stay as they are."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .replay import place_of

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Entry:
    tensors: Sequence[Tensor]  # as long as they are here, no others lie where they do
    results: Results
    size: int


class Held:
    """Results of functions of weights and data, by the function and where those tensors lie.

    Where room runs out, those that were not asked for longest go.

    Example:
        >>> held, weights, data = Held(), [torch.ones(1)], [torch.ones(2)]
        >>> times = lambda: held.find("times", weights, data, lambda: (weights[0] * data[0],), room=lambda: 100)
        >>> times() is times()
        True
        >>> weights[0].data.zero_()
        tensor([0.])
        >>> held.refresh(weights)
        >>> len(held)
        0
    """

    def __init__(self) -> None:
        self.keeps = True
        self._found: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._state: list[Tensor] = []  # copies

    def __len__(self) -> int:
        return len(self._found)

    @property
    def size(self) -> int:
        """Bytes of all results."""
        return sum(entry.size for entry in self._found.values())

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()
        self._state = []

    def let_go(self) -> bool:
        """Give the memory back, and keep nothing from here on; whether there was any."""
        had = bool(self._found)
        self.clear()
        self.keeps = self.keeps and not had
        return had

    def refresh(self, state: Sequence[Tensor]) -> None:
        """Forget all where a value has changed: what is written to `weight.data` is not counted by torch."""
        if self._found and not _same(self._state, state):
            self.clear()

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
            state: Weights and buffers, those of `refresh`.
            data: Of a batch.
            make: The function.
            room: How many bytes there are for all results, asked when there is one more.
        """
        tensors = [*state, *data]
        place = key, place_of(tensors), tuple(0 if x.is_inference() else x._version for x in tensors)
        if place in self._found:
            self._found.move_to_end(place)
            return self._found[place].results
        results = make()
        size = sum(x.numel() * x.element_size() for x in results)
        if self.keeps and size <= (most := room()):
            self._state = self._state or [x.clone() for x in state]
            self._found[place] = _Entry(tensors, results, size)
            while self.size > most:
                self._found.popitem(last=False)
        return results

    def __getstate__(self) -> dict[str, object]:  # they belong to this process
        return {}

    def __setstate__(self, _: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]


def _same(known: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Whether all values are; the device is waited for once."""
    if len(known) != len(now) or any(
        a.shape != b.shape or a.device != b.device for a, b in zip(known, now, strict=True)
    ):
        return False
    return not known or bool(torch.stack([(a == b).all() for a, b in zip(known, now, strict=True)]).all())
