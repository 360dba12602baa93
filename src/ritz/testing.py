"""Conformance checks for operators and estimators, of ritz or of your own.

`check_operator` asks whether something behaves as one symmetric matrix, whichever way it is used; `check_estimator`
whether the error bars of a number mean what they say. Both raise an AssertionError that names what failed and by how
much, so they can stand in any test-suite.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .operators.base import Operator
from .results import Estimate
from .storage import load

DENSE_LIMIT = 600  # the largest matrix that is formed in full
_RTOL = {torch.float64: 1e-9, torch.float32: 1e-3}


# ---------------------------------------------------------------------------------------------- operators


def check_operator(operator: Operator, *, seed: int = 0, rtol: float | None = None) -> None:
    """Hold an operator to its contract: one real symmetric matrix, the same however it is asked.

    Looked at: shape, dtype and device of products; linearity; symmetry, u'Av = v'Au; A @ V against its columns one by
    one; two products of the same vectors; probes keyed by seed and index; the algebra 2 A + 0.1; the SciPy form; and,
    where the matrix is small enough to be formed, its symmetry, its blocks against sub-matrices, and its smallest
    eigenvalue where it is positive by construction.

    Args:
        operator: What is checked.
        seed: Of the vectors it is checked with.
        rtol: Largest relative error; by default 1e-9 in float64 and 1e-3 below. Give more for central differences.

    Raises:
        AssertionError: Naming the first thing that does not hold, with its size.

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
        kept, version = columns.clone(), A.version()
        image = A @ columns
        self.require(torch.equal(columns, kept), "the product changed its input")
        self.close(A @ columns, image, "two products of the same vectors differ", 1e-2 * self.rtol)
        self.require(A.version() == version, "version() changed, though no weight did")
        single = torch.stack([A @ column for column in rows], dim=1)
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


# --------------------------------------------------------------------------------------------- estimators


def check_estimator(
    estimate_fn: Callable[[int], Estimate],
    truth: float | Tensor,
    *,
    num_seeds: int = 300,
    level: float = 0.95,
    low: float = 0.91,
    high: float = 0.99,
    unbiased: bool = True,
    rtol: float = 1e-8,
) -> float:
    """Hold an estimator to its error bars, over many seeds, against a known truth.

    An exact estimate must equal the truth and have no standard error. A sampled one must be right on average, to four
    standard errors of the mean over seeds (and the width of its bracket, where it has one), and its interval must hold
    the truth neither too seldom nor too often. In both cases the same seed must give the same result, a saved one must
    load equal to itself, and products, seed and convention must be filled in.

    Args:
        estimate_fn: From a seed to an `Estimate`.
        truth: The number that is estimated, or a tensor of them; coverage is then the mean over its entries.
        num_seeds: Seeds 0 ... num_seeds - 1.
        level: Of the interval.
        low: Smallest coverage allowed.
        high: Largest; 1.0 for quantities with one-sided bounds or brackets, which hold every time.
        unbiased: Ask for the right mean; False where the value is a bound, as a Ritz value is of an eigenvalue.
        rtol: Relative error that counts as none, for exact estimates.

    Returns:
        The coverage, 1.0 for exact estimates.

    Raises:
        AssertionError: Naming the first thing that does not hold, with its size.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> side = torch.diag(torch.ones(49, dtype=torch.float64), 1)
        >>> A = DenseOperator(side + side.T + 2 * torch.eye(50, dtype=torch.float64))
        >>> coverage = check_estimator(lambda seed: ritz.trace(A, "hutchinson", 8, seed), 100.0)
        >>> 0.91 <= coverage <= 0.99
        True
    """
    if num_seeds < 2:
        raise ValueError(f"num_seeds must be at least 2, got {num_seeds}")
    goal = torch.as_tensor(truth).double().cpu()
    estimates = [estimate_fn(seed) for seed in range(num_seeds)]
    for estimate in (estimates[0], estimates[-1]):
        _check_record(estimate, goal)
        _check_nesting(estimate, level)
    name = estimates[0].name
    _require(estimate_fn(0) == estimates[0], f"{name}: the same seed gives another result")
    _check_storage(estimates[0])
    values = torch.stack([torch.as_tensor(e.value).double().cpu() for e in estimates])  # (seeds, ...)
    errors = torch.stack([torch.as_tensor(e.stderr).double().cpu().expand(goal.shape) for e in estimates])
    exact = [e.exact for e in estimates]
    if any(exact):
        _check_exact(name, values[exact], errors[exact], goal, rtol)
    if all(exact) or (not bool(errors.any()) and _error(values, goal) <= rtol):  # sampled, and yet nothing was random
        return 1.0
    _require(bool((values != values[0]).any()), f"{name}: every seed gives {values[0].flatten()[0]:.6g}; is it used?")
    if unbiased:
        _check_mean(estimates, values, goal)
    return _check_coverage(estimates, goal, level, low, high)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _error(values: Tensor, goal: Tensor) -> float:
    """The largest error, relative to the largest entry of the truth."""
    apart, size = float((values - goal).abs().max()), float(goal.abs().max())
    return apart / size if size else apart


def _check_record(estimate: Estimate, goal: Tensor) -> None:
    """What a number must say of itself."""
    name = estimate.name
    _require(isinstance(estimate, Estimate), f"expected an Estimate, got {type(estimate).__name__}")
    shape = torch.as_tensor(estimate.value).shape
    _require(shape == goal.shape, f"{name}: the value has shape {tuple(shape)}, the truth {tuple(goal.shape)}")
    _require(bool(estimate.convention), f"{name}: convention is empty: say which matrix, divided by what")
    stderr = torch.as_tensor(estimate.stderr)
    _require(bool((stderr >= 0).all()), f"{name}: stderr {stderr.flatten()[0]:.3g} is not a size")
    if not estimate.exact:
        _require(estimate.products > 0, f"{name}: products is {estimate.products}: say what it cost")
        _require(estimate.seed is not None, f"{name}: seed is None, though probes were drawn")


def _check_nesting(estimate: Estimate, level: float) -> None:
    """An interval at a lower level lies inside one at a higher."""
    outer, inner = (_ends(estimate, at) for at in (level, level / 2))
    _require(bool((outer[0] <= outer[1]).all()), f"{estimate.name}: the interval ends before it begins")
    nested = bool((outer[0] <= inner[0]).all() and (inner[1] <= outer[1]).all())
    _require(nested, f"{estimate.name}: the {level / 2:.0%} interval is not inside the {level:.0%} one")


def _check_storage(estimate: Estimate) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            loaded = load(estimate.save(Path(folder) / "estimate"))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{estimate.name}: cannot be saved and loaded: {error}") from error
    _require(loaded == estimate, f"{estimate.name}: what is loaded is not what was saved")


def _check_exact(name: str, values: Tensor, errors: Tensor, goal: Tensor, rtol: float) -> None:
    worst = float(errors.abs().max())
    _require(worst == 0, f"{name}: exact, but with stderr {worst:.3g}")
    off = _error(values, goal)
    _require(off <= rtol, f"{name}: exact, but with a relative error of {off:.2g}, more than {rtol:.2g}")


def _check_mean(estimates: Sequence[Estimate], values: Tensor, goal: Tensor) -> None:
    """The mean over seeds against the truth; of squares where the value is the root of an averaged square."""
    power = estimates[0].power
    raw, aim = values ** (1 / power), goal ** (1 / power)
    slack = torch.zeros_like(goal)
    for e in estimates:
        ends = [torch.as_tensor(end).double().cpu() ** (1 / power) for end in e.bracket or (e.value, e.value)]
        slack = slack + (ends[1] - ends[0]) / len(estimates)
    spread = raw.std(0) / math.sqrt(len(raw))
    # among n entries the largest deviate is expected at sqrt(2 log n)
    limit = 4 + math.sqrt(2 * math.log(goal.numel()))
    floor = 1e-9 * aim.abs()  # round-off
    excess = ((raw.mean(0) - aim).abs() - slack - floor).clamp(min=0) / spread.clamp(min=1e-300)
    worst = int(excess.argmax())
    _require(
        float(excess.max()) <= limit,
        f"{estimates[0].name}: biased: the mean over {len(raw)} seeds is {raw.mean(0).flatten()[worst]:.6g}, the truth "
        f"{aim.flatten()[worst]:.6g}, {float(excess.max()):.1f} standard errors away",
    )


def _check_coverage(estimates: Sequence[Estimate], goal: Tensor, level: float, low: float, high: float) -> float:
    hits = []
    for estimate in estimates:
        lower, upper = _ends(estimate, level)
        hits.append(((lower <= goal) & (goal <= upper)).double().mean())
    coverage = float(torch.stack(hits).mean())
    what = f"{estimates[0].name}: the {level:.0%} interval covers the truth {coverage:.1%} of {len(hits)} times"
    _require(coverage >= low, f"{what}, less than {low:.0%}: the error bars are too small")
    _require(coverage <= high, f"{what}, more than {high:.0%}: the error bars are too large")
    return coverage


def _ends(estimate: Estimate, level: float) -> tuple[Tensor, Tensor]:
    lower, upper = (torch.as_tensor(end).double().cpu() for end in estimate.interval(level))
    return lower, upper
