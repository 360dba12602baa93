"""Symmetric linear operators, the input of every estimator.

A subclass defines how the matrix acts on rows; everything else (columns, algebra, dense form, SciPy) is here.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..comm import SELF, World
from ..errors import NonFiniteError
from ..space import Distribution, ParamSpace
from .pages import as_rows

if TYPE_CHECKING:
    import scipy.sparse.linalg


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Switch off autocast, so that operations on vectors are computed in the precision of the vectors."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Operator(ABC):
    """A real symmetric matrix A, accessed through its products.

    Inside ritz, vectors are rows: `rows(V)` maps (k, dim) to (k, dim), where row i is A v_i. Users write `A @ v` for
    one vector (dim,) or `A @ V` for columns (dim, k).

    Attributes:
        space: Names and shapes of the parameters that the matrix acts on.
        dtype: Dtype of the input and output vectors.
        device: Device of the computation.
        matrix: The name of the matrix, in a word or two, for conventions and tables.
        positive: Whether it is positive semi-definite by construction.

    Example:
        >>> from ritz.space import ParamSpace
        >>> class Twice(ritz.Operator):
        ...     space = ParamSpace(("w",), (torch.Size([3]),))
        ...     dtype, device = torch.float32, torch.device("cpu")
        ...
        ...     def _rows(self, rows):
        ...         return 2 * rows
        >>> A = Twice()
        >>> (A @ torch.ones(3)).tolist(), (A + 0.5).dense().diagonal().tolist()
        ([2.0, 2.0, 2.0], [2.5, 2.5, 2.5])
    """

    space: ParamSpace
    dtype: torch.dtype
    device: torch.device
    matrix: str = "operator"
    positive: bool = False  # positive semi-definite by construction
    world: World = SELF  # the ranks that compute products together, and share stored vectors
    __array_ufunc__ = None  # so that `number * A` with a number of NumPy calls the operator's __rmul__

    @abstractmethod
    def _rows(self, rows: Tensor) -> Tensor:
        """A applied to each row of a (k, dim) tensor of the operator's dtype and device."""

    def version(self) -> Hashable:
        """Changes when the matrix does; long runs compare it after every product."""
        return None

    def convention(self) -> str:
        """The convention of the numbers of this matrix: which matrix, divided by what, in which mode."""
        return self.matrix

    def diagnose(self) -> None:
        """Raise an error that explains a NaN or infinite product."""
        raise NonFiniteError(
            f"a product with the {self.matrix} is not finite, or so large that its squares overflow in "
            f"{str(self.dtype).removeprefix('torch.')}; scale the loss or the data, or compute in a wider dtype"
        )

    def expect(self, products: int) -> None:
        """Announce how many products with single vectors will follow; most matrices ignore this."""
        if products < 0:
            raise ValueError(f"products must not be negative, got {products}")

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """A context in which products are computed without preparation, for the few products beside a run."""
        return contextlib.nullcontext()

    @property
    def dim(self) -> int:
        """The order of the matrix, P."""
        return self.space.dim

    @property
    def shape(self) -> tuple[int, int]:
        """(dim, dim)."""
        return self.dim, self.dim

    def rows(self, rows: Tensor) -> Tensor:
        """A v for each row v of a (k, dim) tensor; an empty input gives an empty output, without work."""
        if not isinstance(rows, Tensor) or rows.is_complex():
            raise TypeError(f"expected a real tensor of rows, got {_kind(rows)}")
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"expected rows of shape (k, dim={self.dim}), got {tuple(rows.shape)}")
        rows = rows.to(self.device, self.dtype)
        return self._rows(rows) if len(rows) else rows

    def __matmul__(self, other: Any) -> Tensor:
        """A @ v for v (dim,), or A @ V for V (dim, k)."""
        if not isinstance(other, Tensor) or other.is_complex():
            raise TypeError(f"expected a real tensor on the right of @, got {_kind(other)}")
        if other.ndim not in (1, 2) or other.shape[0] != self.dim:
            raise ValueError(f"expected a vector (dim={self.dim},) or columns (dim, k), got {tuple(other.shape)}")
        image = self.rows(other[None] if other.ndim == 1 else as_rows(other))
        # a finite sum proves that all entries are finite, without extra memory; an infinite sum may be an overflow
        if not bool(image.sum().isfinite()) and bool(other.isfinite().all()) and not bool(image.isfinite().all()):
            self.diagnose()
        return image[0] if other.ndim == 1 else image.T

    def dense(self) -> Tensor:
        """The whole matrix, by dim products; for small cases and tests."""
        return self.rows(torch.eye(self.dim, dtype=self.dtype, device=self.device)).T

    def probes(self, indices: Sequence[int], seed: int, distribution: Distribution = "rademacher") -> Tensor:
        """Random rows on the operator's device; see `ParamSpace.probes`."""
        return self.space.probes(indices, seed, distribution, dtype=self.dtype, device=self.device)

    def block(self, pattern: str | Sequence[str]) -> "Operator":
        """The principal sub-matrix of the parameters whose names match."""
        from .algebra import Block

        return Block(self, pattern)

    def to_scipy(self) -> "scipy.sparse.linalg.LinearOperator":
        """As a SciPy LinearOperator, with the vectors on the CPU."""
        from .algebra import to_scipy

        return to_scipy(self)

    @overload
    def __add__(self, other: float) -> "Operator": ...
    @overload
    def __add__(self, other: "Operator") -> "Operator": ...
    def __add__(self, other: "float | Operator") -> "Operator":
        from .algebra import Shifted, Sum

        return Sum(self, other) if isinstance(other, Operator) else Shifted(self, _number(other, "added to"))

    __radd__ = __add__

    def __mul__(self, factor: float) -> "Operator":
        from .algebra import Scaled

        return Scaled(self, _number(factor, "multiplied with"))

    __rmul__ = __mul__

    def __neg__(self) -> "Operator":
        return self * -1.0

    def __sub__(self, other: "float | Operator") -> "Operator":
        return self + (other * -1.0 if isinstance(other, Operator) else -_number(other, "taken from"))

    def __rsub__(self, other: float) -> "Operator":
        return self * -1.0 + _number(other, "added to")

    def __truediv__(self, divisor: float) -> "Operator":
        return self * (1.0 / _number(divisor, "a divisor of"))

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}(dim={self.dim}, {self.convention().removeprefix(f'{kind}, ')})"


def _kind(value: object) -> str:
    """The type or dtype of an argument, for a message."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _number(value: object, role: str) -> float:
    """The given number, or one-element tensor, as a float; everything else, and what is not finite, is refused."""
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
        if not math.isfinite(number := float(value)):
            raise ValueError(f"only a finite number can be {role} an operator, got {number}; check where it came from")
        return number
    wanted = "a number or an operator" if role == "added to" else "a number"
    raise TypeError(f"only {wanted} can be {role} an operator, got {type(value).__name__}; for products write A @ V")
