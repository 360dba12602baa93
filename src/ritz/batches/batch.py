"""One batch with its place in the data, its parts, and checksums that identify its samples."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..space import random_uniform
from .trees import has_rows, map_tensors, take_rows, tensors_of, with_tensors


@dataclass(frozen=True)
class Batch:
    """One batch: the user's object with its tensors on the device, and its place in the data.

    Example:
        >>> batch = Batch((torch.arange(3), torch.tensor(0.5)), index=1, start=4, size=3)
        >>> [(piece.data[0].tolist(), piece.start) for piece in batch.pieces(2)]
        [([0, 1], 4), ([2], 6)]
        >>> batch.head(2).data[0].tolist()
        [0, 1]
    """

    data: Any
    index: int  # number of the batch
    start: int  # number of its first sample in the data
    size: int  # samples
    idle: bool = False  # processed only to keep step with other ranks, and not counted

    def pieces(self, most: int) -> "list[Batch]":
        """This batch in pieces of at most `most` samples."""
        if most >= self.size:
            return [self]
        return [self._piece(a, min(most, self.size - a)) for a in range(0, self.size, most)]

    def head(self, most: int) -> "Batch":
        """The first samples, at most `most`; to cut all of a large batch with `pieces` would take the host longer."""
        return self if most >= self.size else self._piece(0, most)

    def parts(self, number: int) -> "list[Batch]":
        """This batch in `number` pieces of equal size up to one sample; each must have at least one sample."""
        ends = [self.size * i // number for i in range(number + 1)]
        return [self] if number == 1 else [self._piece(a, b - a) for a, b in itertools.pairwise(ends)]

    def _piece(self, first: int, size: int) -> "Batch":
        data = map_tensors(self.data, lambda x: x[first : first + size], has_rows(self.size))
        return Batch(data, self.index, self.start + first, size, self.idle)

    def holding(self, tensors: Sequence[Tensor]) -> "Batch":
        """The same batch with other tensors in place of its own."""
        return replace(self, data=with_tensors(self.data, tensors))

    @torch.inference_mode(False)  # for a batch that can be differentiated through
    def take(self, rows: Tensor, index: int) -> "Batch":
        """A batch of some of the samples, in any order and with repeats."""
        data = map_tensors(self.data, lambda x: take_rows(x, rows), has_rows(self.size))
        return Batch(data, index, index * len(rows), len(rows))


def is_batched(x: Tensor, size: int) -> bool:
    """Whether a tensor has an entry for each of `size` samples."""
    return x.ndim > 0 and len(x) == size


def checksums(batch: Batch) -> Tensor:
    """One number per sample that changes when the sample does: a fixed random weighting of all its entries.

    Example:
        >>> one, same, other = checksums(Batch(torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]]), 0, 0, 3)).tolist()
        >>> one == same, one == other
        (True, False)
    """
    total = torch.zeros(batch.size, dtype=torch.float64)
    for number, x in enumerate(tensors_of(batch.data)):
        if is_batched(x, batch.size):
            flat = x.reshape(batch.size, math.prod(x.shape[1:])).double().cpu()
            total += flat @ random_uniform(flat.shape[1], ("checksum", number))
    return total


def mark_in_any_order(batches: Iterable[Batch]) -> float:
    """One number for a set of samples, independent of their order: the sum of the squares of their checksums.

    The sum of the checksums themselves would not change if the labels were permuted among the inputs.

    Example:
        >>> x, y = torch.tensor([1.0, 2.0]), torch.tensor([0, 1])
        >>> sets = (x, y), (x.flip(0), y.flip(0)), (x, y.flip(0))
        >>> one, same, other = (mark_in_any_order([Batch(data, 0, 0, 2)]) for data in sets)
        >>> one == same, one == other
        (True, False)
    """
    return sum(float(checksums(batch).nan_to_num().square().sum()) for batch in batches)


def same_sums(a: Tensor, b: Tensor) -> bool:
    """Whether checksums are equal up to the round-off of another order of summation."""
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if len(finite) else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12 * scale, equal_nan=True)
