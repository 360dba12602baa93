"""Whether something behaves as one symmetric matrix, whichever way it is used."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..operators.base import Operator
from .trial import generators

DENSE_LIMIT = 600  # the largest matrix that is formed in full
_RTOL = {torch.float64: 1e-9, torch.float32: 1e-3}


def check_operator(operator: Operator, *, seed: int = 0, rtol: float | None = None) -> None:
    """Check the contract of an operator: one real symmetric matrix, the same in every form.

    Checked are: shape, dtype and device of products; linearity; symmetry, u'Av = v'Au; A @ V against its columns one by
    one; two products of the same vectors; that products carry no graph and draw from no global generator; probes keyed
    by seed and index; the algebra 2 A + 0.1; the SciPy form; and, where the matrix is small enough to be formed, its
    symmetry, its blocks against sub-matrices, and its smallest eigenvalue where it is positive by construction.

    Args:
        operator: The operator to check.
        seed: Seed of the test vectors.
        rtol: Largest relative error; by default 1e-9 in float64 and 1e-3 below. Give more for central differences.

    Raises:
        AssertionError: Names the first check that fails, with the size of the error.

    Example:
        >>> from ritz.operators import DenseOperator, FunctionOperator
        >>> check_operator(DenseOperator(torch.diag(torch.tensor([1.0, 2.0, 3.0]))))
        >>> shear = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
        >>> check_operator(FunctionOperator(lambda V: shear @ V, dim=2))
        Traceback (most recent call last):
        AssertionError: FunctionOperator(dim=2, function): not symmetric, u'Av and v'Au: relative error ...
    """
    check = _OperatorCheck(operator, seed, _RTOL.get(operator.dtype, 5e-2) if rtol is None else rtol)
    check.form()
    check.probes()
    check.products()
    check.algebra()
    check.scipy()
    if operator.dim <= DENSE_LIMIT:
        check.dense()


class _OperatorCheck:
    """The vectors and tolerances of one check."""

    def __init__(self, operator: Operator, seed: int, rtol: float) -> None:
        self.A, self.seed, self.rtol = operator, seed, rtol

    def fail(self, what: str) -> None:
        raise AssertionError(f"{self.A!r}: {what}")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    def close(self, a: Tensor, b: Tensor, what: str, rtol: float | None = None, scale: float = 0.0) -> None:
        """Compare in norm, relative to the larger of the two (or to `scale`, where both may vanish)."""
        rtol = self.rtol if rtol is None else rtol
        self.require(a.shape == b.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
        a, b = a.double().cpu(), b.double().cpu()
        apart, size = float((a - b).norm()), max(float(a.norm()), float(b.norm()), scale)
        if not apart <= rtol * size:  # a NaN fails too
            self.fail(f"{what}: relative error {apart / size if size else math.nan:.2g}, more than {rtol:.2g}")

    def form(self) -> None:
        """Attributes, and the shape, dtype and device of what comes back."""
        A, dim = self.A, self.A.dim
        self.require(dim >= 1 and A.shape == (dim, dim), f"shape {A.shape} with dim {dim}")
        self.require(len(set(A.space.names)) == len(A.space.names), "two parameters have one name")
        self.require(bool(A.convention()), "convention() is empty: say which matrix, divided by what")
        hash(A.version())
        vector = A.probes([0], self.seed)[0]
        for given in (vector, vector[:, None], vector[:, None].repeat(1, 3), vector[:, None][:, :0]):
            image = A @ given
            self.require(image.shape == given.shape, f"A @ {tuple(given.shape)} has shape {tuple(image.shape)}")
            self.require(image.dtype == A.dtype, f"A @ v is {image.dtype}, where the operator says {A.dtype}")
            self.require(image.device == vector.device, f"A @ v is on {image.device}, probes are on {vector.device}")
            self.require(bool(image.isfinite().all()), "A @ v is not finite")
            self.require(not image.requires_grad, "A @ v carries the graph that made it: detach it")

    def probes(self) -> None:
        """Keyed, not streamed: a probe depends on seed and index alone."""
        A = self.A
        for distribution in ("rademacher", "normal"):
            both = A.probes([3, 5], self.seed, distribution)
            again = A.probes([5], self.seed, distribution)
            self.require(torch.equal(both[1:], again), f"{distribution} probes depend on which others are drawn")
        both = A.probes([0, 1, 2, 3, 4, 5, 6, 7], self.seed)
        self.require(bool((both.abs() == 1).all()), "rademacher probes are not signs")
        if A.dim >= 8:
            self.require(not torch.equal(both[0], both[1]), "two probes are the same")
            self.require(not torch.equal(both, A.probes(range(8), self.seed + 1)), "another seed gives the same probes")

    def products(self) -> None:
        """Deterministic, pure, linear, symmetric, the same by columns."""
        A = self.A
        rows = A.probes(range(5), self.seed, "normal")
        columns = rows.T.contiguous()
        kept, version, drawn = columns.clone(), A.version(), generators()
        image = A @ columns
        for whose, state in generators().items():
            self.require(state == drawn[whose], f"the product draws from {whose}'s global generator")
        self.require(torch.equal(columns, kept), "the product changed its input")
        self.close(A @ columns, image, "two products of the same vectors differ", 1e-2 * self.rtol)
        self.require(A.version() == version, "version() changed, though no weight did")
        single = torch.stack([A @ column for column in rows], dim=1)
        self.require(torch.equal(rows.T, kept), "the product changed its input, a vector")
        self.close(single, image, "A @ V is not A @ v column by column")
        u, v = columns[:, 0], columns[:, 1]
        self.close(A @ (2 * u - 3 * v), 2 * image[:, 0] - 3 * image[:, 1], "not linear, A(2u - 3v)")
        form = rows.double() @ image.double()  # u'Av for every pair
        scale = float(rows.double().norm() * image.double().norm()) / len(rows)
        self.close(form, form.T, "not symmetric, u'Av and v'Au", scale=scale)
        if A.positive:
            low = float(form.diagonal().min())
            self.require(low >= -self.rtol * scale, f"positive by construction, but v'Av = {low:.3g}")

    def algebra(self) -> None:
        """Sums, multiples and shifts act as those of matrices do."""
        A = self.A
        v = A.probes([7], self.seed, "normal")[0]
        image = A @ v
        scale = float(image.double().norm())
        self.close((2 * A + 0.1) @ v, 2 * image + 0.1 * v, "(2 A + 0.1) v")
        self.close((-A / 4 - 1.0) @ v, -image / 4 - v, "(-A / 4 - 1) v")
        self.close((A + A) @ v, 2 * image, "(A + A) v")
        self.close((A - A) @ v, torch.zeros_like(v), "(A - A) v", scale=scale)

    def scipy(self) -> None:
        """The SciPy form is the same matrix."""
        A = self.A
        columns = A.probes([8, 9], self.seed, "normal").T
        image, other = A @ columns, A.to_scipy()
        self.require(other.shape == A.shape, f"to_scipy() has shape {other.shape}")
        given = columns.double().cpu().numpy()
        self.close(torch.as_tensor(other.matmat(given)), image, "to_scipy().matmat")
        self.close(torch.as_tensor(other.matvec(given[:, 0])), image[:, 0], "to_scipy().matvec")
        self.close(torch.as_tensor(other.rmatvec(given[:, 0])), image[:, 0], "to_scipy().rmatvec")

    def dense(self) -> None:
        """The whole matrix: symmetric, its own products, its blocks, its smallest eigenvalue."""
        A = self.A
        dense = A.dense()
        self.close(dense, dense.T, "dense() is not symmetric")
        v = A.probes([10], self.seed, "normal")[0]
        self.close(dense @ v, A @ v, "dense() v is not A v")
        names = A.space.names
        for chosen in {names[:1], names[-1:], names[::2]}:
            self._block(dense, chosen)
        if A.positive:
            values = torch.linalg.eigvalsh(dense.double().cpu())
            low, high = float(values[0]), float(values[-1].abs())
            self.require(
                low >= -self.rtol * high,
                f"positive by construction, but with an eigenvalue {low:.3g} (the largest is {high:.3g})",
            )

    def _block(self, dense: Tensor, names: Sequence[str]) -> None:
        places = torch.cat([torch.arange(self.A.dim)[self.A.space.slices[name]] for name in names]).to(dense.device)
        block = self.A.block(list(names))
        what = f"block({list(names)})"
        self.require(block.space.names == tuple(names), f"{what} has parameters {block.space.names}")
        scale = float(dense.double().norm())  # a block may vanish
        self.close(block.dense(), dense[places][:, places], f"{what} is not the sub-matrix", scale=scale)
        whole, part = self.A.probes([0], self.seed), block.probes([0], self.seed)
        self.require(torch.equal(whole[:, places], part), f"probes of {what} are not those of the whole, restricted")
