"""Operators made of other operators (sum, scale, shift, block, projection), of matrices, functions and SciPy's."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm import SELF
from ..errors import WeightsMovedError
from ..space import ParamSpace, Shard, row_products, select
from .base import Operator

if TYPE_CHECKING:
    import scipy.sparse.linalg


def _one_parameter(dim: int) -> ParamSpace:
    """The space of a matrix that belongs to no network."""
    return ParamSpace(("vector",), (torch.Size([dim]),))


class Derived(Operator):
    """An operator made of another one, from which it takes its space, dtype and device."""

    def __init__(self, base: Operator) -> None:
        if not isinstance(base, Operator):
            raise TypeError(
                f"expected an operator such as ritz.Hessian(risk) or ritz.GGN(risk), got {type(base).__name__}"
            )
        self.base = base
        self.space, self.dtype, self.device, self.world = base.space, base.dtype, base.device, base.world
        self.matrix = base.matrix

    def version(self) -> Hashable:
        return self.base.version()

    def convention(self) -> str:
        return self.base.convention()

    def diagnose(self) -> None:
        """Raise the error of the base operator."""
        self.base.diagnose()

    def expect(self, products: int) -> None:
        """Announce the products to the base operator."""
        self.base.expect(products)

    def aside(self) -> AbstractContextManager[None]:
        """The context of the base operator."""
        return self.base.aside()


class Scaled(Derived):
    """c A."""

    def __init__(self, base: Operator, factor: float) -> None:
        super().__init__(base)
        self.factor = factor
        self.positive = base.positive and factor >= 0

    def _rows(self, rows: Tensor) -> Tensor:
        return self.base.rows(rows) * self.factor

    def convention(self) -> str:
        return f"{self.factor:g} * ({self.base.convention()})"


class Shifted(Derived):
    """A + c I."""

    def __init__(self, base: Operator, shift: float) -> None:
        super().__init__(base)
        self.shift = shift
        self.positive = base.positive and shift >= 0

    def _rows(self, rows: Tensor) -> Tensor:
        return self.base.rows(rows).add(rows, alpha=self.shift)

    def convention(self) -> str:
        return f"({self.base.convention()}) + {self.shift:g} I"


class Sum(Derived):
    """A + B, in the dtype to which torch promotes the two dtypes, and on the device of A."""

    def __init__(self, left: Operator, right: Operator) -> None:
        if left.dim != right.dim:
            raise ValueError(f"cannot add operators of dimension {left.dim} and {right.dim}")
        super().__init__(left)
        self.right, self.dtype = right, torch.promote_types(left.dtype, right.dtype)
        self.positive = left.positive and right.positive

    def _rows(self, rows: Tensor) -> Tensor:
        return self.base.rows(rows).to(rows) + self.right.rows(rows).to(rows)

    def version(self) -> Hashable:
        return self.base.version(), self.right.version()

    def convention(self) -> str:
        return f"({self.base.convention()}) + ({self.right.convention()})"

    def expect(self, products: int) -> None:
        """Announce the products to both operators."""
        self.base.expect(products)
        self.right.expect(products)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The contexts of both operators."""
        with self.base.aside(), self.right.aside():
            yield

    def diagnose(self) -> None:
        """Raise the error of the operator whose product is not finite."""
        probe = self.probes([0], seed=0)
        (self.base if not bool(self.base.rows(probe).isfinite().all()) else self.right).diagnose()


class Block(Derived):
    """The principal sub-matrix of some parameters: pad with zeros, apply, cut."""

    def __init__(self, base: Operator, pattern: str | Sequence[str]) -> None:
        super().__init__(base)
        names = select(base.space.names, pattern)
        shapes = dict(zip(base.space.names, base.space.shapes, strict=True))
        self.space = ParamSpace(tuple(names), tuple(shapes[name] for name in names))
        self.positive = base.positive

    def _rows(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(len(rows), self.base.dim)
        for name, part in self.space.slices.items():
            padded[:, self.base.space.slices[name]] = rows[:, part]
        image = self.base.rows(padded)
        return torch.cat([image[:, self.base.space.slices[name]] for name in self.space.names], dim=1)

    def convention(self) -> str:
        return f"block of {len(self.space.names)} parameters of {self.base.convention()}"


class Projected(Derived):
    """Q A Q with Q = I - U'U for orthonormal rows U (r, dim)."""

    def __init__(self, base: Operator, basis: Tensor) -> None:
        super().__init__(base)
        if basis.ndim != 2 or basis.shape[1] != base.dim:
            raise ValueError(f"expected basis rows of shape (r, dim={base.dim}), got {tuple(basis.shape)}")
        self.basis = basis.to(base.device, base.dtype)
        off = row_products(self.basis, self.basis) - torch.eye(len(basis), dtype=torch.float64, device=base.device)
        if len(basis) and not float(off.abs().max()) <= torch.finfo(base.dtype).eps ** 0.5:
            raise ValueError(
                f"the basis rows are not orthonormal (off by {float(off.abs().max()):.2g}); take a QR first"
            )
        self.positive = base.positive

    def _rows(self, rows: Tensor) -> Tensor:
        return project_out(self.base.rows(project_out(rows, self.basis)), self.basis)

    def convention(self) -> str:
        return f"{self.base.convention()}, {len(self.basis)} directions projected out"


def project_out(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows minus their part in the span of orthonormal `basis` rows; done twice, because once leaves round-off."""
    return Shard(SELF, rows.shape[1]).project_out(rows, basis, times=2)


class Metered(Derived):
    """An operator that counts its products, and raises an error if the weights have changed since the first."""

    def __init__(self, base: Operator) -> None:
        super().__init__(base)
        self.positive = base.positive
        self.products = 0
        self._seen = base.version()

    def _rows(self, rows: Tensor) -> Tensor:
        image = self.base.rows(rows)
        self.products += len(rows)
        if self.base.version() != self._seen:
            raise WeightsMovedError(
                "the weights changed while the run was under way; finish it before the next optimiser step, "
                "or measure a copy of the model"
            )
        return image


class DenseOperator(Operator):
    """A symmetric matrix given as a tensor.

    Example:
        >>> A = DenseOperator(torch.diag(torch.tensor([1.0, 2.0])))
        >>> ((2 * A + 1.0) @ torch.ones(2)).tolist()
        [3.0, 5.0]
    """

    matrix = "dense matrix"

    def __init__(self, matrix: Tensor) -> None:
        if not isinstance(matrix, Tensor):
            raise TypeError(f"expected a tensor, got {type(matrix).__name__}; write torch.as_tensor(matrix)")
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
        if not square or not matrix.is_floating_point():
            raise ValueError(f"expected a square floating-point matrix, got {tuple(matrix.shape)} {matrix.dtype}")
        if not bool(matrix.isfinite().all()):
            raise ValueError("the matrix has entries that are NaN or infinite")
        if not torch.allclose(matrix, matrix.T, rtol=1e-4, atol=1e-5 * float(matrix.abs().max())):
            apart = float((matrix - matrix.T).abs().max())
            raise ValueError(f"the matrix is not symmetric: A and A' differ by {apart:.3g}; take (A + A') / 2")
        self._matrix = matrix
        self.space, self.dtype, self.device = _one_parameter(len(matrix)), matrix.dtype, matrix.device

    def _rows(self, rows: Tensor) -> Tensor:
        return rows @ self._matrix.T


class FunctionOperator(Operator):
    """A symmetric matrix given as a function of columns, (dim, k) -> (dim, k).

    Example:
        >>> A = FunctionOperator(lambda V: 3.0 * V, dim=4)
        >>> (A @ torch.ones(4)).tolist()
        [3.0, 3.0, 3.0, 3.0]
    """

    matrix = "function"

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if dim < 1:
            raise ValueError(f"dim must be positive, got {dim}")
        self.function = function
        self.space, self.dtype, self.device = _one_parameter(dim), dtype, torch.device(device)

    def _rows(self, rows: Tensor) -> Tensor:
        image = self.function(rows.T)
        if not isinstance(image, Tensor):
            raise TypeError(
                f"the function must return a tensor, got a {type(image).__name__}; for NumPy arrays see from_scipy"
            )
        if image.shape != rows.T.shape:
            raise ValueError(
                f"the function must return columns of the given shape {tuple(rows.T.shape)}, got {tuple(image.shape)}"
            )
        return image.T.to(rows)


def from_scipy(operator: "scipy.sparse.linalg.LinearOperator", dtype: torch.dtype = torch.float64) -> FunctionOperator:
    """A SciPy LinearOperator, or anything that `aslinearoperator` accepts, as an operator of ritz."""
    from scipy.sparse.linalg import aslinearoperator

    linear = aslinearoperator(operator)
    if linear.shape[0] != linear.shape[1]:
        raise ValueError(f"expected a square operator, got {linear.shape}")
    return FunctionOperator(lambda V: torch.as_tensor(linear.matmat(V.double().numpy())), linear.shape[0], dtype)


def to_scipy(operator: Operator) -> "scipy.sparse.linalg.LinearOperator":
    """An operator of ritz as a SciPy LinearOperator; its vectors are NumPy arrays of the operator's precision."""
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

    dtype = np.float64 if operator.dtype == torch.float64 else np.float32

    def matmat(columns: np.ndarray) -> np.ndarray:
        if np.iscomplexobj(columns):  # from an iteration for complex eigenvalues, or a resolvent
            return matmat(columns.real) + 1j * matmat(columns.imag)
        image = operator @ torch.as_tensor(np.ascontiguousarray(columns, dtype=dtype))
        return image.cpu().to(torch.float64 if dtype is np.float64 else torch.float32).numpy()

    return LinearOperator(
        operator.shape,
        matvec=lambda v: matmat(v.reshape(-1)),
        rmatvec=lambda v: matmat(v.reshape(-1)),
        matmat=matmat,
        rmatmat=matmat,
        dtype=dtype,
    )
