"""Sums of the gradients in a value, (k, *shape): of their own, or at the place of a parameter in the image."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..pages import in_large_pages

# Products with so many rows and so few columns are slow in CPU libraries (docs/speed.md, the network "narrow").
TALL, NARROW = 64, 16


class Sink:
    """Accumulates the gradients in one value.

    Example:
        >>> sink = Sink()
        >>> sink.add(torch.ones(1, 2))
        >>> sink.add_times(torch.ones(1, 2), torch.tensor([2.0, 3.0]))
        >>> sink.total.tolist()
        [[3.0, 4.0]]
    """

    __slots__ = ("own", "total")

    def __init__(self, total: Tensor | None = None) -> None:
        self.total = total
        self.own = False  # whether nothing else uses the tensor of the sum, so that terms can be added in place

    def add(self, x: Tensor, own: bool = False) -> None:
        """Add a term; with `own` this sink may later write to it."""
        if self.total is None:
            self.total, self.own = x, own
        elif self.own:
            self.total += x
        else:
            self.total, self.own = self.total + x, True

    def add_each(self, terms: Iterable[Tensor]) -> None:
        """Add the terms of the vectors one after another, so that an existing sum does not need all of them at once."""
        if self.total is None or not self.own:
            self.add(torch.stack(list(terms)), own=True)
            return
        for one, term in zip(self.total, terms, strict=True):
            one += term

    def add_times(self, x: Tensor, y: Tensor, spare: bool = False) -> None:
        """Add x * y, which is broadcast to the shape of the sum; if `spare`, x may be overwritten."""
        if self.total is None:
            self.total, self.own = (x.mul_(y) if spare else x * y), True
        elif self.own:
            self.total.addcmul_(x, y)
        else:
            self.total, self.own = torch.addcmul(self.total, x, y), True

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b, see `product`."""
        if self.own:
            product(a, b, self.total, beta=1.0)
        else:
            self.add(product(a, b), own=True)

    def part(self, cut: Callable[[Tensor], Tensor], k: int, like: Tensor) -> Tensor:
        """A view of a part of the sum, to which the caller adds."""
        if self.total is None:
            self.total = like.new_zeros(k, *like.shape)
        elif not self.own:
            self.total = self.total.clone()
        self.own = True
        return cut(self.total)


class Place(Sink):
    """The place of a parameter, or of a view of one, in the image.

    The image is not initialised: the first term overwrites it, and `close` clears places that got no term.

    Example:
        >>> place = Place(torch.full((1, 4), torch.nan))
        >>> Place(place.total[:, :2], place).add(torch.ones(1, 2))  # of a view
        >>> place.total.tolist()
        [[1.0, 1.0, 0.0, 0.0]]
    """

    __slots__ = ("filled", "whole")
    total: Tensor

    def __init__(self, total: Tensor, whole: "Place | None" = None) -> None:
        super().__init__(total)
        self.own, self.filled = True, False
        self.whole = whole  # what it is a view of

    @property
    def root(self) -> "Place":
        """The place of the parameter. It does not refer to itself: the cycle would hold the image for some time."""
        return self if self.whole is None else self.whole.root

    def _open(self) -> float:
        """0 if the next term overwrites the place, 1 if it is added."""
        root = self.root
        if root.filled:
            return 1.0
        root.filled = True
        if self.total.numel() == root.total.numel():
            return 0.0
        root.total.zero_()
        return 1.0

    def add(self, x: Tensor, own: bool = False) -> None:
        self.total.add_(x) if self._open() else self.total.copy_(x)

    def add_each(self, terms: Iterable[Tensor]) -> None:
        old = self._open()
        for one, term in zip(self.total, terms, strict=True):
            one.add_(term) if old else one.copy_(term)

    def add_times(self, x: Tensor, y: Tensor, spare: bool = False) -> None:
        self.total.addcmul_(x, y) if self._open() else torch.mul(x, y, out=self.total)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        product(a, b, self.total, beta=self._open())

    def part(self, cut: Callable[[Tensor], Tensor], k: int, like: Tensor) -> Tensor:
        if not self._open():
            self.total.zero_()
        return cut(self.total)

    def close(self) -> None:
        """To be called after the last term."""
        if not self.root.filled:
            self.total.zero_()


def product(a: Tensor, b: Tensor, out: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """beta out + a @ b of stacked matrices, (k or 1, ..., n, m) and (k or 1, ..., m, p), into `out` if it is given.

    A factor that all share is multiplied with all rows at once, or with all columns if the result is narrow, so that
    nothing large is copied.

    Example:
        >>> product(torch.ones(3, 2, 4), torch.ones(1, 4, 5)).shape
        torch.Size([3, 2, 5])
    """
    k = max(len(a), len(b))
    if out is None:
        out, beta = in_large_pages(a.new_empty(k, *a.shape[1:-1], b.shape[-1])), 0.0
    if out.stride(-1) != 1 and out.stride(-2) == 1:  # the place of a transposed weight
        return product(b.mT, a.mT, out.mT, beta).mT
    if len(a) == 1 and out.ndim == 3 and _is_narrow(out):
        columns = b.mT.reshape(-1, b.shape[-2])
        _put((columns @ a[0].mT).view(k, -1, a.shape[-2]).mT, out, beta)
        return out
    if a.ndim == 3 and len(b) == 1 and out.is_contiguous():
        _multiply(a.reshape(-1, a.shape[-1]), b[0], out.view(-1, out.shape[-1]), beta)
        return out
    a, b = (x.expand(k, *x.shape[1:]) for x in (a, b))
    if out.ndim == 3:
        _multiply(a, b, out, beta)
        return out
    for one, left, right in zip(out, a, b, strict=True):  # a single stack would copy the shared factor
        _multiply(left, right, one, beta)
    return out


def _multiply(a: Tensor, b: Tensor, out: Tensor, beta: float) -> None:
    """beta out + a @ b, of matrices or stacks of them, in place of `out`.

    With beta 0, `out` is overwritten: it may contain NaN, which compilers for a GPU would multiply with 0.
    """
    if _is_narrow(out):
        _put((b.mT @ a.mT).mT, out, beta)
    elif beta:
        out.addmm_(a, b, beta=beta) if out.ndim == 2 else out.baddbmm_(a, b, beta=beta)
    else:
        torch.mm(a, b, out=out) if out.ndim == 2 else torch.bmm(a, b, out=out)


def _is_narrow(out: Tensor) -> bool:
    """Whether a result is faster to compute as its transpose, (a b)' = b' a', which has few, long rows."""
    rows, columns = out.shape[-2:]
    return columns <= NARROW and rows >= TALL and out.stride(-1) == 1 and out.device.type == "cpu"


def _put(found: Tensor, out: Tensor, beta: float) -> None:
    out.add_(found) if beta else out.copy_(found)
