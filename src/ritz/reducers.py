"""Reducers: what becomes of the batches of one walk over the data.

Each is a monoid: `add` takes one batch, `merge` takes another reducer of its kind, so that pieces of a batch, ranks and
resumed runs are put together by the same rule.
"""

from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", bound="Reducer")


class Reducer(Protocol):
    """Takes (total, weight) of each batch; gives the result."""

    def join(self, pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The pieces of one batch as the batch."""

    def add(self, total: Tensor, weight: Tensor) -> None:
        """One batch: a SUM over its items, and their weight."""

    def merge(self: R, other: R) -> None:
        """All that another reducer has seen."""

    def result(self) -> Any:
        """What was asked for."""


def sum_pieces(pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Totals and weights added up."""
    total, weight = pieces[0]
    for more, heavier in pieces[1:]:
        total, weight = total + more, weight + heavier
    return total, weight


def wide(x: Tensor) -> Tensor:
    """In a precision in which many of its kind can be added up: at least float32, and float64 for a single number.

    A sum in bfloat16 does not grow any more after 256 terms of one size.

    Example:
        >>> wide(torch.ones(2, dtype=torch.bfloat16)).dtype, wide(torch.tensor(1.0)).dtype
        (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32 if x.ndim else torch.float64))


class Mean:
    """sum of totals / sum of weights, see `wide`.

    Example:
        >>> mean = Mean()
        >>> mean.add(torch.tensor(6.0), torch.tensor(2.0)), mean.add(torch.tensor(2.0), torch.tensor(2.0))
        (None, None)
        >>> mean.result().item()
        2.0
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.weight: Tensor | None = None

    join = staticmethod(sum_pieces)

    def add(self, total: Tensor, weight: Tensor) -> None:
        """One batch."""
        if self.total is None or self.weight is None:
            self.total, self.weight = wide(total.detach()).clone(), weight.detach().double()
        else:
            self.total.add_(total)
            self.weight = self.weight + weight  # not in place: it may still be the caller's

    def merge(self, other: "Mean") -> None:
        """Another mean."""
        if other.total is not None and other.weight is not None:
            self.add(other.total, other.weight)

    def result(self) -> Tensor:
        """The weighted mean."""
        assert self.total is not None and self.weight is not None, "no batch was added"
        return self.total / self.weight.to(self.total.dtype)


class Moments:
    """Mean and variance of per-batch means, each batch one observation (Welford 1962; Chan, Golub and LeVeque 1979).

    For rows (k, dim) per batch h_b, the squared increment (b - 1) / b |h_b - mean of those before|^2 has the variance
    between batches as its mean, whatever b; increments are uncorrelated (Helmert), so their spread is its error. One
    pass, no cancellation, memory of two rows each.

    Example:
        >>> seen = Moments()
        >>> for value in (1.0, 2.0, 3.0):
        ...     seen.add(torch.tensor([[value]]), torch.tensor(1.0))
        >>> mean, variance = seen.result()
        >>> mean.item(), variance.item()
        (2.0, 1.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: list[Tensor] = []  # (k,) each

    join = staticmethod(sum_pieces)

    def add(self, total: Tensor, weight: Tensor) -> None:
        """One batch, as its mean."""
        one = Moments()
        one.count, one.mean = 1, total / weight.to(total.dtype)
        self.merge(one)

    def merge(self, other: "Moments") -> None:
        """Batches seen by another."""
        if other.mean is None:
            return
        self.squares += other.squares
        if self.mean is None:
            self.count, self.mean = other.count, other.mean
            return
        count = self.count + other.count
        apart = other.mean - self.mean
        self.squares.append(apart.square().sum(-1).double() * (self.count * other.count / count))
        self.mean = self.mean + apart * (other.count / count)
        self.count = count

    def increments(self) -> Tensor:
        """Squared increments (count - 1, k), each with the variance between batches as its mean."""
        if self.count < 2:
            raise ValueError(f"a variance between batches needs at least 2 batches, got {self.count}")
        return torch.stack(self.squares)

    def result(self) -> tuple[Tensor, Tensor]:
        """The mean (k, dim) and the unbiased variance (k,), summed over elements."""
        squares = self.increments()
        assert self.mean is not None
        return self.mean, squares.mean(0)


class Concat:
    """Per-sample values, in data order.

    Example:
        >>> seen = Concat()
        >>> seen.add(torch.tensor([1.0, 2.0]), torch.tensor(2.0))
        >>> seen.result().tolist()
        [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def join(self, pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Pieces of a batch, end to end."""
        return torch.cat([values for values, _ in pieces]), sum_pieces([(w, w) for _, w in pieces])[0]

    def add(self, total: Tensor, weight: Tensor) -> None:
        """One batch."""
        self.parts.append(total.detach())

    def merge(self, other: "Concat") -> None:
        """Batches that come after these."""
        self.parts.extend(other.parts)

    def result(self) -> Tensor:
        """All values (N, ...)."""
        return torch.cat(self.parts)
