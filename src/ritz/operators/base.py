"""Symmetric linear operators: the one thing that every estimator takes.

A subclass says how the matrix acts on rows; everything else (columns, algebra, dense form, SciPy) is here.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from .. import compilation
from ..batches import Batch, only_tensors, skeleton, tensors_of, with_tensors
from ..comm import SELF, World
from ..compilation import Prospect, compilations_of
from ..errors import NonFiniteError, UnsupportedError
from ..reducers import Mean
from ..replay import settings_of, switches
from ..risk import Params, Risk
from ..space import Distribution, ParamSpace
from .footprint import fitting_piece

if TYPE_CHECKING:
    import scipy.sparse.linalg


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No autocast from outside: what is done with vectors is done in their own precision."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Operator(ABC):
    """A real symmetric matrix A known by its products.

    Inside ritz vectors are rows: `rows(V)` maps (k, dim) to (k, dim), row i being A v_i. Users write `A @ v` for one
    vector (dim,) or `A @ V` for columns (dim, k).

    Attributes:
        space: Names and shapes of what the matrix acts on.
        dtype: Of the vectors it takes and gives.
        device: Where it computes.
        matrix: What it is, in a word or two, for conventions and tables.
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
    world: World = SELF  # the ranks that multiply together, and share what is kept of vectors
    __array_ufunc__ = None  # NumPy's numbers leave `number * A` to the operator

    @abstractmethod
    def _rows(self, rows: Tensor) -> Tensor:
        """A applied to each row of a (k, dim) tensor of the operator's dtype and device."""

    def version(self) -> Hashable:
        """Changes when the matrix does; long runs compare it after every product."""
        return None

    def convention(self) -> str:
        """What the numbers of this matrix mean: which matrix, divided by what, in which mode."""
        return self.matrix

    def diagnose(self) -> None:
        """Raise what is known about a product that came out NaN or infinite."""
        raise NonFiniteError(f"a product with the {self.matrix} is not finite")

    def expect(self, products: int) -> None:
        """Hear how many products with single vectors are to come; most matrices make nothing of it."""
        if products < 0:
            raise ValueError(f"products must not be negative, got {products}")

    @property
    def dim(self) -> int:
        """The order of the matrix, P."""
        return self.space.dim

    @property
    def shape(self) -> tuple[int, int]:
        """(dim, dim)."""
        return self.dim, self.dim

    def rows(self, rows: Tensor) -> Tensor:
        """A v for each row v of a (k, dim) tensor; no rows give no rows, without work."""
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
        image = self.rows(other[None] if other.ndim == 1 else other.T.contiguous())
        # a sum is finite only if all of it is, and asks for no memory; one that is not may still have overflowed
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
        return f"{type(self).__name__}(dim={self.dim}, {self.convention()})"


def _kind(value: object) -> str:
    """What was given, for a message."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _number(value: object, role: str) -> float:
    """A number, or a tensor of one; anything else is refused."""
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
        return float(value)
    wanted = "a number or an operator" if role == "added to" else "a number"
    raise TypeError(f"only {wanted} can be {role} an operator, got {type(value).__name__}; for products write A @ V")


def _with(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    """A batch with other tensors in the places of its own."""
    return replace(batch, data=with_tensors(batch.data, tensors))


def _kinds(batch: Batch) -> Hashable:
    """What batches of one data set have in common whatever their size."""
    return skeleton(batch.data), tuple((x.shape[1:], x.dtype) for x in tensors_of(batch.data))


def each_row(
    product: Callable[[Params], tuple[Params, Tensor]], space: ParamSpace, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """`product(v)` -> (image, weight) for all rows in one batched call; the weight is common to them.

    A single row is spared the batching, which costs the host as much again.
    """
    if len(rows) == 1:
        image, weight = product(space.split(rows[0]))
        return space.join(image)[None], weight
    out_dims: Any = (0, None)
    images, weight = torch.func.vmap(product, out_dims=out_dims, randomness="same")(space.split(rows))
    return space.join(images, lead=1), weight


def rows_at_once(rows: Tensor) -> int:
    """How many rows (k, dim) are multiplied in one walk: those whose images take a sixteenth of a GPU's memory.

    A walk holds the sum, that of the batch and those of its chunks. The whole memory counts, not what is free, so that
    two runs on one kind of device are alike.

    Example:
        >>> rows_at_once(torch.ones(3, 5))
        3
    """
    if rows.device.type != "cuda":
        return max(1, len(rows))
    room = torch.cuda.get_device_properties(rows.device).total_memory // 16
    return max(1, min(len(rows), room // (rows.shape[1] * rows.element_size())))


class _Image(Mean):
    """The mean of images, which are nobody else's: the first is taken over and the sum divided in its place."""

    def add(self, total: Tensor, weight: Tensor) -> None:
        """One batch."""
        if self.total is None:
            self.total, self.weight = total.detach(), weight.detach().double()
        else:
            super().add(total, weight)

    def result(self) -> Tensor:
        """The weighted mean; to be asked for once."""
        assert self.total is not None and self.weight is not None, "no batch was added"
        mean: Tensor = self.total.div_(self.weight.to(self.total.dtype))
        return mean


def difference_step(point: Tensor, row: Tensor, stretch: float = 1.0) -> Tensor:
    """The step of a central difference from `point` along a row: eps^(1/3), relative to |w| / |v|.

    The truncation error goes as step^2, that of rounding as eps / step; this is where the two are alike.

    Example:
        >>> step = difference_step(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 10.0]))
        >>> round(float(step), 6)  # (1.2e-7)^(1/3) * 5 / 10
        0.00246
    """
    length = row.norm()
    scale: Tensor = stretch * torch.finfo(point.dtype).eps ** (1 / 3) * point.norm().clamp(min=1.0)
    return scale / torch.where(length > 0, length, 1.0)


class RiskOperator(Operator):
    """A curvature matrix of a risk: a mean over items of what each batch gives.

    A subclass says how one batch acts on rows; the walk over the data is the risk's.
    """

    def __init__(self, risk: Risk) -> None:
        if not isinstance(risk, Risk):
            raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
        self.risk = risk
        self.space, self.dtype, self.device, self.world = risk.space, risk.dtype, risk.home, risk.world
        self._chunk = risk.plan.chunk  # shrinks when memory runs out
        self._expected = 0  # products that are known to come
        self._taken, self._spent = 0, 0.0  # products so far, and their seconds

    @abstractmethod
    def _batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The SUM over the items of a batch, applied to rows (k, dim), and the weight of the batch.

        The sum is a tensor of its own, which is added to in its place.
        """

    @abstractmethod
    def _like(self, risk: Risk) -> "RiskOperator":
        """The same matrix of another risk."""

    def settle(self, rows: Tensor) -> None:
        """Decide before the walk what a product decides on its first batch, where ranks must decide alike."""

    def _rows(self, rows: Tensor) -> Tensor:
        self.risk.check()
        # round-off may differ between machines, and so may free memory: all go on with the same
        rows, chunks = self.world.same(rows, self._chunk)
        self._chunk = min(chunks)
        self.settle(rows)
        start = time.perf_counter()
        image = self._walked(rows)
        self._spent += time.perf_counter() - start
        self._taken += len(rows)
        self._expected = max(0, self._expected - len(rows))
        return image

    def _walked(self, rows: Tensor) -> Tensor:
        """One walk over the data, or several where the images of all rows and of one batch would not fit together."""
        image: Tensor
        groups = rows.split(rows_at_once(rows))
        if len(groups) == 1:
            image = self.risk.fold(lambda params, batch: self.batch_rows(params, batch, rows), _Image())
            return image
        image, done = torch.empty_like(rows), 0
        for group in groups:
            image[done : done + len(group)] = self._walked(group)
            done += len(group)
        return image

    def expect(self, products: int) -> None:
        """Say how many products with single vectors are to come: what `Plan(compile="auto")` goes by.

        Estimators say it of themselves. What was said before and is not done yet is not added to: a run that is part of
        a longer one is counted once.

        Example:
            >>> import ritz
            >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(2, 1), torch.ones(2, 1)))
            >>> H = ritz.Hessian(risk)
            >>> H.expect(800)
        """
        super().expect(products)
        self._expected = max(self._expected, products)

    def batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`_batch_rows` chunk by chunk, each chunk one batched product that shares its forward pass.

        Where memory runs out the chunks are halved, down to one vector; after that the risk takes the batch in pieces.
        """
        while True:
            chunk = min(self._chunk, len(rows))
            try:
                parts = [self._pieces(params, batch, part) for part in rows.split(chunk)]
                return parts[0] if len(parts) == 1 else (torch.cat([image for image, _ in parts]), parts[0][1])
            except torch.OutOfMemoryError:
                if chunk == 1:
                    raise
            self._chunk = chunk // 2  # outside the except block, whose traceback would hold the memory
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _pieces(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """One chunk; on a CPU in pieces of the batch whose intermediate results stay small, see `fitting_piece`."""
        most = batch.size
        if self.device.type == "cpu" and self.risk.plan.micro_batch is None and self.risk.splittable:
            most = fitting_piece(self.risk, params, batch, len(rows))
        first, *others = batch.pieces(most)
        image, weight = self._product(params, first, rows)
        for piece in others:
            more, heavier = self._product(params, piece, rows)
            image, weight = image.add_(more), weight + heavier
        return image, weight

    def _recipe(self) -> Hashable | None:
        """What decides which operations a product is, beside model and shapes; None where they change by batch."""
        return None

    def _traced(self, params: Params, held: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`_batch_rows` by operations that can be compiled, all other tensors of the model given in `held`.

        A matrix without it is run as it is.
        """
        raise UnsupportedError(f"the {self.matrix} has no product that can be compiled")

    def _product(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`_batch_rows`, recorded and replayed, compiled or neither, as the plan says."""
        compiles = self._considers_compiling()
        recipe = self._recipe() if (self.risk.replays or compiles) and only_tensors(batch.data) else None
        if recipe is None:
            return self._batch_rows(params, batch, rows)
        if not compiles:
            return self._replayed(recipe, params, batch, rows)
        store, modules = compilations_of(self.risk.recordings), self.risk.model.modules()
        family = (recipe, type(self), self.risk.names, self.risk.mode, len(rows), *settings_of(modules))
        if not store.is_usual((family, _kinds(batch)), batch.size):
            return self._replayed(recipe, params, batch, rows)
        state = {**self.risk.state(), **params}

        def traced(rows: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            given = dict(zip(state, tensors, strict=False))
            held = {name: given.pop(name) for name in state if name not in params}
            return self._traced(given, held, _with(batch, tensors[len(state) :]), rows)

        inputs = [rows, *state.values(), *tensors_of(batch.data)]
        prospect = None
        if self.risk.plan.compile == "auto":
            left = self._expected / len(rows) * self.risk.num_samples / batch.size
            prospect = Prospect(self._spent, left, lambda: self.risk.static)
        key = (family, skeleton(batch.data), switches(), *((x.shape, x.dtype, x.device) for x in inputs))
        found = store.find(key, lambda: self._replayed(recipe, params, batch, rows), traced, inputs, prospect)
        if not callable(found):
            image, weight = found
            return image, weight
        return self._replayed((recipe, "compiled"), params, batch, rows, found)

    def _replayed(
        self, recipe: Hashable, params: Params, batch: Batch, rows: Tensor, compiled: Callable[..., Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """`_batch_rows` or what it was compiled to, recorded and replayed where the plan says so."""

        def product(rows: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            if compiled is None:
                return self._batch_rows(params, _with(batch, tensors), rows)
            image, weight = compiled(rows, *{**self.risk.state(), **params}.values(), *tensors)
            return image, weight

        inputs = [rows, *tensors_of(batch.data)]
        if not self.risk.replays:
            return product(*inputs)
        key = (recipe, type(self), self.risk.place(), batch.size, skeleton(batch.data))
        image, weight = self.risk.recordings.run(key, product, inputs)
        return image, weight

    def _considers_compiling(self) -> bool:
        """Whether it is time to look into it: "auto" leaves short runs alone, at no cost."""
        choice = self.risk.plan.compile
        if choice != "auto" or self.risk.dropout:  # masks belong to the batch
            return choice is True and not self.risk.dropout
        if self.device.type not in compilation.AUTO_ON or self.world.size > 1:  # each rank has a clock of its own
            return False
        to_come = self._expected * self._spent / max(1, self._taken)
        return Prospect(self._spent + to_come).pays(compilation.START, each=0.0)

    def version(self) -> Hashable:
        return self.risk.version()

    def convention(self) -> str:
        return f"{self.matrix}, {self.risk.convention()}"

    def block(self, pattern: str | Sequence[str]) -> Operator:
        """The principal sub-matrix of the parameters whose names match; as cheap as they are few."""
        return self._like(self.risk.restrict(pattern))

    def diagnose(self) -> None:
        """Name the first batch whose product is not finite."""
        probe = self.probes([0], seed=0)

        def look(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
            image, weight = self.batch_rows(params, batch, probe)
            if not bool(image.isfinite().all()):
                name = self.space.names[int((~self.space.segment(image)[0].isfinite()).int().argmax())]
                kind = str(self.dtype).removeprefix("torch.")
                raise NonFiniteError(
                    f"the {self.matrix} product of batch {batch.index} is not finite, first in {name} ({kind}), though "
                    f"its loss is; try dtype=torch.float64, and look for a square root or a norm at zero"
                )
            return image, weight

        self.risk.fold(look, Mean())
        super().diagnose()
