"""The conformance checks pass what is right and name what is wrong: each fault below is one that they must find."""

import contextlib
import gc
import math
import random
from dataclasses import replace

import cases
import pytest
import torch
from torch import Tensor

import ritz
from ritz.intervals import ChiSquare, StudentT, matched_dof
from ritz.operators import DenseOperator, FunctionOperator
from ritz.operators.algebra import Scaled
from ritz.results import Estimate, affine, from_samples
from ritz.space import ParamSpace
from ritz.testing import CHECKS, check_estimator, check_operator, check_optimizer

M = cases.symmetric(torch.linspace(-1.0, 3.0, 10))


class Matrix(DenseOperator):
    """A matrix over two named parameters, to be spoiled by a subclass."""

    def __init__(self, matrix: Tensor = M) -> None:
        super().__init__(matrix)
        self.space = ParamSpace(("a", "b"), (torch.Size([2, 3]), torch.Size([4])))


# ---------------------------------------------------------------------------------------------- operators


def test_a_right_operator_passes():
    check_operator(Matrix())
    check_operator(DenseOperator(torch.zeros(3, 3)))
    check_operator(DenseOperator(torch.ones(1, 1)))
    check_operator(DenseOperator(M.float()))


def test_a_large_operator_is_checked_by_products_alone():
    big = FunctionOperator(lambda V: 3.0 * V, dim=5000, dtype=torch.float64)
    big.dense = None  # would be called and fail
    check_operator(big)


def spoiled(fault: str) -> Matrix:
    """A matrix with one fault."""
    A = Matrix()
    noise = torch.Generator().manual_seed(0)
    acts = {
        "asymmetric": lambda rows: rows @ (M + torch.diag(torch.ones(9), 1)),
        "nonlinear": lambda rows: rows @ M + 0.01 * rows**2,
        "random": lambda rows: rows @ M + 1e-6 * torch.randn(rows.shape, generator=noise),
        "coupled": lambda rows: rows @ M * (1 + 0.01 * len(rows)),
        "in place": lambda rows: rows.mul_(2.0) @ M,
        "drawing": lambda rows: rows @ M + 0 * torch.rand(1),
        "attached": lambda rows: rows @ M.clone().requires_grad_(),
        "single": lambda rows: (rows @ M).float(),
        "not finite": lambda rows: rows * torch.nan,
    }
    A._rows = acts[fault]
    return A


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("asymmetric", r"not symmetric, u'Av and v'Au: relative error 0\.\d+, more than 1e-09"),
        ("nonlinear", r"not linear, A\(2u - 3v\): relative error 0\.0"),
        ("random", "two products of the same vectors differ: relative error"),
        ("coupled", "A @ V is not A @ v column by column: relative error 0"),
        ("single", r"A @ v is torch\.float32, where the operator says torch\.float64"),
        ("in place", "the product changed its input"),
        ("drawing", "the product draws from torch's global generator"),
        ("attached", "A @ v carries the graph that made it"),
    ],
)
def test_a_fault_of_the_product_is_named_with_its_size(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_operator(spoiled(fault))


def test_a_product_that_changes_its_input_is_found():
    A = Matrix()
    A.__class__ = type("InPlace", (Matrix,), {"__matmul__": lambda self, V: (M @ V.mul_(2.0)) / 2})
    with pytest.raises(AssertionError, match="the product changed its input"):
        check_operator(A)


def test_a_product_that_is_not_finite_is_found():
    with pytest.raises(ritz.errors.NonFiniteError, match="not finite"):
        check_operator(spoiled("not finite"))


class WrongBlock(Matrix):
    """Gives the block of one parameter a tenth too large."""

    def block(self, pattern):
        right = super().block(pattern)
        return right if len(right.space.names) > 1 else Scaled(right, 1.1)


class WrongDense(Matrix):
    """Forms another matrix than it multiplies with."""

    def dense(self):
        return super().dense() + torch.eye(10)


class WrongSign(Matrix):
    """Says that it is positive, and is not."""

    positive = True


class WrongAlgebra(Matrix):
    """Forgets the factor."""

    def __rmul__(self, factor):
        return self


class WrongScipy(Matrix):
    """Exports another matrix."""

    def to_scipy(self):
        return (self * 2.0).to_scipy()


class StreamedProbes(Matrix):
    """Draws probes one after the other, so that each depends on those before."""

    def probes(self, indices, seed, distribution="rademacher"):
        g = torch.Generator().manual_seed(seed)
        return torch.randn(len(indices), self.dim, generator=g).sign()


class SeedlessProbes(Matrix):
    """Does not look at the seed."""

    def probes(self, indices, seed, distribution="rademacher"):
        return super().probes(indices, 0, distribution)


class Nameless(Matrix):
    """Does not say what it is."""

    def convention(self):
        return ""


class Restless(Matrix):
    """Says that its weights have moved at every look."""

    looks = 0

    def version(self):
        self.looks += 1
        return self.looks


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WrongBlock, r"block\(\['[ab]'\]\) is not the sub-matrix: relative error"),
        (WrongDense, r"dense\(\) v is not A v: relative error"),
        (WrongSign, r"positive by construction, but (v'Av = -|with an eigenvalue -1)"),
        (WrongAlgebra, r"\(2 A \+ 0\.1\) v: relative error"),
        (WrongScipy, r"to_scipy\(\)\.matmat: relative error 0\.5, more than 1e-09"),
        (StreamedProbes, "rademacher probes depend on which others are drawn"),
        (SeedlessProbes, "another seed gives the same probes"),
        (Nameless, r"convention\(\) is empty"),
        (Restless, r"version\(\) changed, though no weight did"),
    ],
)
def test_a_fault_around_the_product_is_named(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_operator(kind())


def test_a_small_negative_eigenvalue_is_found_though_no_probe_sees_it():
    values = torch.linspace(1.0, 2.0, 10)
    values[0] = -1e-6
    nearly = Matrix(cases.symmetric(values))
    nearly.positive = True
    with pytest.raises(AssertionError, match="positive by construction, but with an eigenvalue -1e-06"):
        check_operator(nearly)
    nearly.positive = False
    check_operator(nearly)


def test_the_tolerance_is_the_callers():
    H = ritz.Hessian(cases.problem("mlp_mse").risk(), route="difference")
    with pytest.raises(AssertionError, match="more than 1e-14"):
        check_operator(H, rtol=1e-14)
    check_operator(H, rtol=1e-6)


# --------------------------------------------------------------------------------------------- estimators

DIM, PROBES = 60, 8
SMOOTH = cases.symmetric(torch.linspace(0.5, 1.5, DIM))
SPIKED = cases.symmetric(cases.spiked(DIM, num_spikes=1))


def forms(matrix: Tensor, seed: int) -> Tensor:
    """v'Av of a few normal probes."""
    v = torch.randn(PROBES, DIM, generator=torch.Generator().manual_seed(seed))
    return ((v @ matrix) * v).sum(1)


def honest(seed: int, matrix: Tensor = SMOOTH, **fields) -> Estimate:
    """A trace with a Student t interval, which holds where no eigenvalue stands out."""
    record = {"products": PROBES, "seed": seed, "convention": "Tr of a test matrix", **fields}
    return from_samples("trace", forms(matrix, seed), **record)


def test_an_honest_estimator_passes_and_its_coverage_is_returned():
    coverage = check_estimator(honest, float(SMOOTH.trace()))
    assert 0.91 <= coverage <= 0.99


def test_z_intervals_from_eight_probes_of_a_spiked_matrix_are_found_out():
    """The interval of most packages: right for many probes, wrong for a few of a skewed form."""
    with pytest.raises(AssertionError, match=r"covers the truth [78]\d\.\d% of 300 times, less than 91%.*too small"):
        check_estimator(lambda seed: honest(seed, SPIKED, rule=StudentT(1e9)), float(SPIKED.trace()))


def test_the_same_probes_pass_with_an_interval_made_for_skewed_forms():
    def estimate(seed: int) -> Estimate:
        samples = forms(SPIKED, seed)
        dof = matched_dof(PROBES, 1.0, 1.0, DIM)  # one eigenvalue is nearly all
        return from_samples(
            "trace", samples, rule=ChiSquare(dof, 20.0), products=PROBES, seed=seed, convention="Tr of a test matrix"
        )

    assert 0.91 <= check_estimator(estimate, float(SPIKED.trace())) <= 0.99


def test_an_interval_that_is_too_wide_is_found():
    def timid(seed: int) -> Estimate:
        e = honest(seed)
        return replace(e, stderr=3 * e.stderr)

    with pytest.raises(AssertionError, match=r"more than 99%: the error bars are too large"):
        check_estimator(timid, float(SMOOTH.trace()))
    assert check_estimator(timid, float(SMOOTH.trace()), high=1.0) > 0.99


@pytest.mark.parametrize(("factor", "word"), [(0.0, "small"), (0.01, "small"), (0.3, "small"), (4.0, "large")])
def test_a_false_standard_error_is_found_where_the_interval_does_without_it(factor, word):
    truth = float(SMOOTH.trace())
    dof = PROBES * truth**2 / float(SMOOTH.square().sum())  # Satterthwaite's

    def claimed(seed: int, factor: float = factor) -> Estimate:
        e = honest(seed, rule=ChiSquare(dof))
        return replace(e, stderr=factor * e.stderr)

    assert 0.91 <= check_estimator(lambda seed: claimed(seed, 1.0), truth) <= 0.99
    wanted = rf"the standard error is \S+ times the spread of the values over 300 seeds: it is too {word}"
    with pytest.raises(AssertionError, match=wanted):
        check_estimator(claimed, truth)


def test_a_few_seeds_say_little_of_a_standard_error():
    loose = {"num_seeds": 2, "low": 0.0, "high": 1.0, "unbiased": False}
    for first in range(0, 400, 2):
        check_estimator(lambda seed, first=first: honest(first + seed), float(SMOOTH.trace()), **loose)


def test_one_false_standard_error_among_those_of_many_numbers_is_found():
    A = DenseOperator(SMOOTH)

    def estimate(seed: int) -> Estimate:
        e = ritz.diagonal(A, 12, seed)
        return replace(e, stderr=torch.where(torch.arange(DIM) == 7, 0.01, 1.0) * e.stderr)

    with pytest.raises(AssertionError, match=r"the standard error is 0\.0\d+ times the spread .* too small"):
        check_estimator(estimate, SMOOTH.diagonal(), num_seeds=60)


def test_a_bias_well_inside_the_error_bar_is_found():
    truth = float(SMOOTH.trace())
    shift = 0.4 * honest(0).stderr

    def shifted(seed: int) -> Estimate:
        return affine(honest(seed), 1.0, shift)

    with pytest.raises(AssertionError, match=r"biased: the mean over 300 seeds is .* standard errors away"):
        check_estimator(shifted, truth, low=0.5)
    check_estimator(shifted, truth, low=0.5, unbiased=False)


def test_samples_that_are_not_those_of_the_value_are_found():
    with pytest.raises(AssertionError, match=r"trace: the value is \S+, its samples say \S+"):
        check_estimator(lambda seed: replace(honest(seed), samples=2 * honest(seed).samples), float(SMOOTH.trace()))


def test_a_norm_is_judged_by_the_square_that_is_averaged():
    """The root of an unbiased square is biased, and that is no fault."""
    one = torch.zeros(DIM, DIM)
    one[0, 0] = 1.0

    def root(seed: int) -> Estimate:
        return from_samples(
            "norm", forms(one, seed), power=0.5, products=PROBES, seed=seed, convention="root of a trace"
        )

    check_estimator(root, 1.0, low=0.7)
    with pytest.raises(AssertionError, match="biased"):
        check_estimator(lambda seed: replace(root(seed), power=1.0, samples=None), 1.0, low=0.0, num_seeds=3000)


def test_a_bracket_is_allowed_for():
    truth = float(SMOOTH.trace())

    def bracketed(seed: int) -> Estimate:
        e = honest(seed)
        return replace(e, value=e.value - 1.0, bracket=(e.value - 1.5, e.value + 0.5))

    assert check_estimator(bracketed, truth, high=1.0) > 0.91


def exact(seed: int) -> Estimate:
    return Estimate(name="trace", value=60.0, exact=True, products=1, convention="Tr of a test matrix")


def test_an_exact_estimate_passes():
    assert check_estimator(exact, 60.0, num_seeds=3) == 1.0


def test_probes_that_happen_to_be_exact_pass():
    A = DenseOperator(torch.diag(torch.arange(1.0, 51.0)))
    assert check_estimator(lambda s: ritz.trace(A, "hutchinson", 4, s), 1275.0, num_seeds=5) == 1.0


def test_an_estimate_of_many_numbers_is_judged_entry_by_entry():
    A = DenseOperator(SMOOTH)
    coverage = check_estimator(lambda s: ritz.diagonal(A, 12, s), SMOOTH.diagonal(), num_seeds=60)
    assert 0.91 <= coverage <= 0.99


drawn = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("estimate", "message"),
    [
        (lambda s: replace(exact(s), value=60.1), "exact, but with a relative error of 0.0017, more than 1e-08"),
        (lambda s: replace(exact(s), stderr=0.1), "exact, but with stderr 0.1"),
        (lambda s: honest(int(torch.randint(0, 1000, (), generator=drawn))), "the same seed gives another result"),
        (lambda s: replace(honest(0), seed=s), r"every seed gives 6\d.*; is it used"),
        (lambda s: honest(s, convention=""), "convention is empty"),
        (lambda s: honest(s, products=0), "products is 0: say what it cost"),
        (lambda s: replace(honest(s), seed=None), "seed is None, though probes were drawn"),
        (lambda s: replace(honest(s), stderr=math.nan), "stderr nan is not a size"),
        (lambda s: replace(honest(s), stderr=-1.0), "stderr -1 is not a size"),
        (lambda s: replace(honest(s), value=torch.ones(2)), r"the value has shape \(2,\), the truth \(\)"),
        (lambda s: honest(s, rule=Backwards()), "the interval ends before it begins"),
        (lambda s: honest(s, rule=Wider()), "the 48% interval is not inside the 95% one"),
        (lambda s: honest(s, rule=Private()), "cannot be saved and loaded: .*Private cannot be saved"),
    ],
)
def test_a_fault_of_an_estimate_is_named(estimate, message):
    with pytest.raises(AssertionError, match=message):
        check_estimator(estimate, 60.0, num_seeds=20)


class Backwards(StudentT):
    """An interval with its ends exchanged."""

    def __init__(self) -> None:
        super().__init__(7)

    def interval(self, value, stderr, bracket, level):
        return super().interval(value, stderr, bracket, level)[::-1]


class Wider(Backwards):
    """An interval that shrinks as the level grows."""

    def interval(self, value, stderr, bracket, level):
        return StudentT.interval(self, value, stderr, bracket, 1 - level)


class Private(Backwards):
    """A right rule of which no file may speak."""

    def interval(self, value, stderr, bracket, level):
        return StudentT.interval(self, value, stderr, bracket, level)


def test_coverage_needs_more_than_one_seed():
    with pytest.raises(ValueError, match="num_seeds must be at least 2, got 1"):
        check_estimator(honest, 60.0, num_seeds=1)


def test_the_estimators_of_ritz_pass_on_a_matrix_with_outliers():
    A = DenseOperator(cases.symmetric(cases.spiked(80, num_spikes=3)))
    A.positive = True
    truth = float(cases.spiked(80, num_spikes=3).sum())
    for method in ("hutchinson", "hutch++"):
        check_estimator(lambda s, m=method: ritz.trace(A, m, 12, s), truth, num_seeds=100, high=1.0)


# --------------------------------------------------------------------------------------------- optimisers
# tests/optim/test_conformance.py has an optimiser for every fault; here is how the check itself behaves.


def only(*checks: str) -> dict[str, str]:
    """All others left out."""
    return {name: "not looked at" for name in CHECKS if name not in checks}


class Stubborn(torch.optim.SGD):
    """Refuses gradients that are not finite, with words of the caller's."""

    words = "a gradient is not finite"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)

    def step(self, closure=None):
        if any(bool(p.grad.isnan().any()) for p in self.param_groups[0]["params"] if p.grad is not None):
            raise ValueError(self.words)
        return super().step(closure)


class Unclear(Stubborn):
    words = "something went wrong"


def test_a_report_lists_what_holds_and_what_was_left_out():
    report = check_optimizer(Stubborn, skip=only("closure", "frozen"))
    assert report.name == "Stubborn"
    assert report.passed == ("closure", "frozen")
    assert report.skipped == only("closure", "frozen")
    lines = str(report).splitlines()
    assert lines[0] == f"Stubborn: 2 of {len(CHECKS)} checks hold"
    assert "frozen: A parameter that is frozen stays, and gets no gradient" in lines
    assert "memory: left out, not looked at" in lines


def test_a_gradient_that_is_not_finite_may_be_refused():
    check_optimizer(Stubborn, nonfinite="raise", skip=only("nonfinite"))
    with pytest.raises(AssertionError, match="a gradient with a NaN raises ValueError: a gradient is not finite"):
        check_optimizer(Stubborn, skip=only("nonfinite"))
    with pytest.raises(AssertionError, match="not reported, 'something went wrong': say that it is not finite"):
        check_optimizer(Unclear, nonfinite="raise", skip=only("nonfinite"))


def test_a_step_that_should_be_refused_and_is_skipped_is_a_fault():
    class Skips(Stubborn):
        def step(self, closure=None):
            try:
                super().step(closure)
            except ValueError:
                return

    with pytest.raises(AssertionError, match="Skips: nonfinite: a gradient with a NaN does not raise"):
        check_optimizer(Skips, nonfinite="raise", skip=only("nonfinite"))


def test_the_error_of_an_optimiser_is_kept_as_the_cause():
    class Fails(Stubborn):
        def step(self, closure=None):
            raise KeyError("momentum")

    with pytest.raises(AssertionError, match="Fails: descent: raised KeyError: 'momentum'") as caught:
        check_optimizer(Fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_round_off_is_measured_by_the_tolerance():
    class Rounds(Stubborn):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.copy_((p * 1e4).round() / 1e4)

    with pytest.raises(AssertionError, match=r"scheduler: with half the rate .* the first step is off from half by"):
        check_optimizer(Rounds, skip=only("scheduler"))
    check_optimizer(Rounds, skip=only("scheduler"), rtol=0.1)


@pytest.mark.parametrize("kind", [Stubborn, lambda model: Stubborn(model).undefined])
def test_a_check_leaves_the_generators_and_the_collector_as_they_were(kind):
    torch_state, python_state, frozen = torch.get_rng_state(), random.getstate(), gc.get_freeze_count()
    with contextlib.suppress(AttributeError):
        check_optimizer(kind, skip=only("rng", "memory", "copy"))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert gc.get_freeze_count() == frozen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": {"closures": "none"}}, "there is no check 'closures' to skip; there are descent, closure, "),
        ({"skip": {"closure": ""}}, "say why 'closure' is left out: skip={'closure': reason}"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'skip' or 'raise', got 'ignore'"),
    ],
)
def test_bad_options_of_a_check_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_optimizer(Stubborn, **options)


def test_what_makes_no_optimiser_is_refused():
    with pytest.raises(TypeError, match=r"make must return a torch\.optim\.Optimizer, got list"):
        check_optimizer(lambda model: list(model.parameters()))
