"""Extreme eigenpairs against a dense decomposition."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import matrix
from torch import Tensor

from ritz.errors import NonFiniteError, NumericalWarning
from ritz.krylov.eigen import EigenPairs, top_eigenpairs
from ritz.operators.algebra import DenseOperator, FunctionOperator, Metered
from ritz.storage import load

f64 = torch.float64
WHICH = ["largest", "smallest", "both", "magnitude"]


def truth(A: Tensor, k: int, which: str) -> Tensor:
    """The wanted eigenvalues in the order of the report."""
    values = torch.linalg.eigvalsh(A.double())
    if which == "largest":
        return values.flip(0)[:k]
    if which == "smallest":
        return values[:k]
    if which == "magnitude":
        return values[values.abs().argsort(descending=True)][:k]
    upper = (k + 1) // 2
    ends = torch.cat([values[len(values) - upper :], values[: k - upper]])
    return ends.sort(descending=True).values


def check(pairs: EigenPairs, A: Tensor, k: int, which: str, rtol: float = 1e-6) -> None:
    """Right values, orthonormal vectors, residuals that are what they say."""
    A, V = A.double(), pairs.vectors.double()
    norm = float(torch.linalg.matrix_norm(A, 2))
    torch.testing.assert_close(pairs.values, truth(A, k, which), rtol=0, atol=rtol * norm)
    assert V.shape == (len(A), k)
    torch.testing.assert_close(V.T @ V, torch.eye(k, dtype=f64), rtol=0, atol=rtol)
    residuals = torch.linalg.vector_norm(A @ V - V * pairs.values, dim=0)
    torch.testing.assert_close(pairs.residuals, residuals, rtol=1e-3, atol=0.3 * rtol * norm + 1e-300)
    assert pairs.converged.all()


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("dim", [12, 60, 300])
def test_every_end_of_an_indefinite_matrix_is_found(which, k, dim):
    g = torch.Generator().manual_seed(1)
    A = matrix(torch.randn(dim, generator=g, dtype=f64))
    pairs = top_eigenpairs(DenseOperator(A), k, which)
    check(pairs, A, k, which)
    assert pairs.which == which


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), dim=st.integers(1, 120), which=st.sampled_from(WHICH), data=st.data())
def test_any_matrix_any_k(seed, dim, which, data):
    k = data.draw(st.integers(1, min(dim, 9)))
    g = torch.Generator().manual_seed(seed)
    A = matrix(torch.randn(dim, generator=g, dtype=f64) ** 3, seed)
    check(top_eigenpairs(DenseOperator(A), k, which, seed=seed), A, k, which)


def test_all_pairs_of_a_small_matrix_are_exact():
    A = matrix(torch.linspace(-1, 2, 20))
    op = Metered(DenseOperator(A))
    pairs = top_eigenpairs(op, 20)
    check(pairs, A, 20, "largest", rtol=1e-13)
    assert pairs.stop == "exact"
    assert pairs.products == op.products == 20


def test_clustered_eigenvalues_are_told_apart():
    spectrum = torch.cat([1 + 1e-3 * torch.arange(10, dtype=f64), torch.linspace(0, 0.9, 290, dtype=f64)])
    A = matrix(spectrum)
    pairs = top_eigenpairs(DenseOperator(A), 10, tol=1e-10)
    torch.testing.assert_close(pairs.values, 1 + 1e-3 * torch.arange(9, -1, -1, dtype=f64), rtol=0, atol=1e-10)
    check(pairs, A, 10, "largest", rtol=1e-9)


@pytest.mark.parametrize("block", [4, 8])
def test_a_repeated_eigenvalue_is_found_as_often_as_the_block_is_wide(block):
    spectrum = torch.cat([torch.full((block,), 2.0), torch.linspace(-1, 1, 300 - block)])
    A = matrix(spectrum)
    pairs = top_eigenpairs(DenseOperator(A), block + 2, block=block)
    assert int((pairs.values > 1.9).sum()) == block
    check(pairs, A, block + 2, "largest")


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("kind", ["zero", "identity", "low rank", "few values"])
def test_exhausted_spaces_are_refilled(kind, which):
    spectrum = torch.zeros(400, dtype=f64)
    if kind == "identity":
        spectrum += 1.0
    if kind == "low rank":
        spectrum[:5] = torch.tensor([4.0, -3.0, 2.0, 1.0, 1.0])
    if kind == "few values":  # more copies than the block is wide
        spectrum[:20], spectrum[20:35] = 3.0, -2.0
    A = matrix(spectrum)
    check(top_eigenpairs(DenseOperator(A), 12, which), A, 12, which)


def test_more_copies_than_the_block_is_wide_are_found_where_the_space_is_exhausted():
    g = torch.Generator().manual_seed(0)
    spectrum = torch.randint(-6, 7, (300,), generator=g).double()  # thirteen values, some twenty copies of each
    A = matrix(spectrum)
    for which in ("largest", "smallest", "both"):
        check(top_eigenpairs(DenseOperator(A), 11, which), A, 11, which)


def test_float32_converges_to_what_float32_can_give():
    A = matrix(torch.cat([torch.tensor([9.0, 8.0, 7.5, -6.0]), torch.linspace(-1, 1, 396)])).float()
    for which in WHICH:
        pairs = top_eigenpairs(DenseOperator(A), 4, which, tol=1e-12)
        assert pairs.vectors.dtype == torch.float32
        assert pairs.values.dtype == f64
        check(pairs, A, 4, which, rtol=3e-6)
        assert pairs.residuals.max() <= 16 * torch.finfo(torch.float32).eps * 9.01


def test_the_noise_of_a_product_is_measured_and_stops_the_run():
    A = matrix(torch.cat([torch.tensor([5.0, 4.0]), torch.linspace(0, 1, 298)]))
    g = torch.Generator().manual_seed(0)

    def noisy(V: Tensor) -> Tensor:
        error = torch.randn(V.shape, generator=g, dtype=f64)
        return A @ V + 1e-5 * 5 * error / error.norm(dim=0)

    op = FunctionOperator(noisy, 300, f64)
    with pytest.warns(
        NumericalWarning, match="2 of 2 eigenpairs .* products are not precise enough for this tol: raise tol"
    ):
        pairs = top_eigenpairs(op, 2, tol=1e-9)
    assert pairs.stop == "noise floor"
    assert 0.3e-5 < pairs.noise < 5e-5
    assert not pairs.converged.any()
    assert pairs.residuals.max() < 1e-3  # good pairs all the same
    torch.testing.assert_close(pairs.values, torch.tensor([5.0, 4.0], dtype=f64), rtol=1e-4, atol=0)
    assert pairs.products < 500


def test_a_clean_product_has_the_noise_of_round_off():
    pairs = top_eigenpairs(DenseOperator(matrix(torch.linspace(-1, 3, 200))), 2)
    assert pairs.noise < 1e-14


@pytest.mark.parametrize("limit", [30, 60, 100])
def test_a_spent_budget_is_kept_and_said(limit):
    op = Metered(DenseOperator(matrix(torch.linspace(0, 1, 500))))
    with pytest.warns(NumericalWarning, match=r"raise max_products \(spent: \d+\) or tol"):
        pairs = top_eigenpairs(op, 5, tol=1e-10, max_products=limit)
    assert pairs.stop == "max_products"
    assert pairs.products == op.products <= limit
    assert limit - op.products < 16
    assert not pairs.converged.all()
    assert ((pairs.values > 0.7) & (pairs.values <= 1)).all()


EDGES = {  # what the end of a spectrum may look like: one eigenvalue in 3000 beyond a bulk is the hardest to see
    "flat": torch.linspace(-1.2, 1, 3000, dtype=f64),
    "one": torch.cat([torch.linspace(-0.9, 0.9, 2999, dtype=f64), torch.ones(1, dtype=f64)]),
    "power": -1 / torch.arange(1, 3001, dtype=f64),
}


@pytest.mark.filterwarnings("ignore::ritz.errors.NumericalWarning")
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("edge", EDGES)
def test_the_extreme_eigenvalue_of_a_search_that_was_cut_lies_in_its_interval(edge, which):
    """Its residual told of an eigenvalue near the Ritz value, which is not the last one."""
    spectrum = EDGES[edge]
    op = FunctionOperator(lambda V: spectrum[:, None] * V, len(spectrum), f64)
    true = float({"largest": spectrum.max(), "smallest": spectrum.min(), "magnitude": spectrum.abs().max()}[which])
    for limit in (8, 20, 40, 80):
        for seed in range(10):
            pairs = top_eigenpairs(op, 1, which, max_products=limit, seed=seed)
            low, high = pairs.extreme.interval(0.95)
            assert low - 1e-12 <= true <= high + 1e-12, (limit, seed)
            assert pairs.cut == (pairs.stop == "max_products")
        if limit >= 40:  # and says something
            assert high - low < 0.5


# one end stands alone and converges first, the other is that of a bulk and lies further out
OPPOSED = torch.cat([torch.ones(1, dtype=f64), torch.linspace(-1.005, 0.5, 399, dtype=f64)])


@pytest.mark.parametrize("k", [1, 2])
def test_the_largest_in_magnitude_is_not_the_end_that_converges_first(k):
    """Up to a tolerance of 1e-3 the search found 1 in seven of ten runs."""
    true = OPPOSED[OPPOSED.abs().argsort(descending=True)][:k]
    for seed in range(10):
        pairs = top_eigenpairs(DenseOperator(torch.diag(OPPOSED)), k, "magnitude", tol=1e-3, seed=seed)
        assert pairs.stop == "converged"
        assert float((pairs.values - true).abs().max()) < 1e-3


def test_a_search_in_magnitude_that_was_cut_says_that_it_may_have_missed_the_other_end():
    """The pair at 1 has converged after 70 products, and that at -1.0001 after 200."""
    spectrum = torch.cat([torch.ones(20, dtype=f64), torch.linspace(-1.0001, 0.5, 380, dtype=f64)])
    for seed in range(10):
        with pytest.warns(
            NumericalWarning, match="converged, but some of the other sign may be larger .* max_products"
        ):
            pairs = top_eigenpairs(DenseOperator(torch.diag(spectrum)), 1, "magnitude", max_products=80, seed=seed)
        low, high = pairs.extreme.interval()
        assert bool(pairs.converged.all())
        assert (pairs.stop, low <= 1.0001 <= high) == ("max_products", True)


def test_the_interval_of_a_converged_pair_is_its_residual():
    pairs = top_eigenpairs(DenseOperator(matrix(torch.linspace(-2, 2, 200))), 2, "smallest", tol=1e-4)
    top, residual = pairs.extreme, float(pairs.residuals[0])
    assert (top.value, top.interval(), pairs.cut) == (pairs.values[0], (top.value - residual, top.value), False)
    assert top.interval()[0] <= -2 <= top.interval()[1] + 1e-12


@pytest.mark.filterwarnings("ignore::ritz.errors.NumericalWarning")
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("limit", [8, 12, 16, 20])
def test_few_steps_bound_what_they_missed_and_call_their_value_a_bound(limit, which):
    """An outlier that few random starts see little of; the residual alone told of eigenvalues of the bulk."""
    spectrum = torch.cat([torch.linspace(-1, 1, 400, dtype=f64), torch.tensor([-9.0, 9.0], dtype=f64)])
    op = FunctionOperator(lambda V: spectrum[:, None] * V, len(spectrum), f64)
    held, side = 0, "upper" if which == "smallest" else "lower"
    for seed in range(100):
        top = top_eigenpairs(op, 1, which, max_products=limit, seed=seed).extreme
        low, high = top.interval()
        held += low <= (-9 if which == "smallest" else 9) <= high + 1e-12
        assert 9 < high - low + abs(top.value) < 1000
        assert top.convention.startswith(f"{side} bound of the {top.name}")
    assert held >= 93


def test_a_small_matrix_on_a_smaller_budget_is_searched():
    A = matrix(torch.cat([torch.tensor([9.0]), torch.linspace(0, 0.01, 23)]))
    pairs = top_eigenpairs(DenseOperator(A), 1, block=2, max_products=14)
    assert pairs.products <= 14
    torch.testing.assert_close(pairs.values, torch.tensor([9.0], dtype=f64))


def test_results_do_not_depend_on_the_seed_and_repeat_with_it():
    op = DenseOperator(matrix(torch.linspace(-2, 2, 200)))
    one, two = top_eigenpairs(op, 3, seed=1), top_eigenpairs(op, 3, seed=2)
    assert one == top_eigenpairs(op, 3, seed=1)
    torch.testing.assert_close(one.values, two.values, rtol=1e-9, atol=0)


def test_progress_ends_with_the_products_spent():
    seen = []
    pairs = top_eigenpairs(
        DenseOperator(matrix(torch.linspace(-2, 2, 200))), 3, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1][0] == pairs.products
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_pairs_load_equal_and_plot(tmp_path):
    op = DenseOperator(matrix(torch.linspace(-2, 2, 100)))
    pairs = top_eigenpairs(op, 3)
    pairs.save(tmp_path / "pairs")
    assert load(tmp_path / "pairs") == pairs
    with pytest.warns(NumericalWarning):
        cut = top_eigenpairs(op, 3, max_products=20)
    assert load(cut.save(tmp_path / "cut")).extreme.interval() == cut.extreme.interval()
    assert len(pairs) == 3
    pytest.importorskip("matplotlib")
    ax = pairs.plot()
    assert ax.get_xlabel() == "rank (largest first)"
    assert (ax.get_ylabel(), ax.get_title()) == ("eigenvalue", pairs.convention)  # which has no room beside it


def test_bad_input_is_refused():
    op = DenseOperator(torch.eye(5, dtype=f64))
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"got k={k} for dim=5"):
            top_eigenpairs(op, k)
    with pytest.raises(ValueError, match=r"which must be one of 'largest'.*got 'LM'"):
        top_eigenpairs(op, 1, "LM")
    with pytest.raises(ValueError, match=r"got tol=0\.0, block=4"):
        top_eigenpairs(op, 1, tol=0.0)
    with pytest.raises(ValueError, match="got tol=1e-06, block=0"):
        top_eigenpairs(op, 1, block=0)
    with pytest.raises(ValueError, match="need at least 5 products, got max_products=4"):
        top_eigenpairs(op, 3, max_products=4)


def test_a_product_that_is_not_finite_is_refused():
    for dim in (10, 200):
        with pytest.raises(NonFiniteError, match="a product with the function is not finite"):
            top_eigenpairs(FunctionOperator(lambda V: V / 0.0, dim, f64), 2)


@pytest.mark.parametrize(
    ("which", "others"), [("largest", "may be further out"), ("magnitude", "of the other sign may be larger")]
)
def test_a_search_that_is_cut_with_small_residuals_says_what_it_does_not_know(which, others):
    """The space is exhausted, but copies of the eigenvalue may be missing: random rows are put in, and fail."""
    A, calls = torch.diag(torch.cat([torch.tensor([9.0, -5.0]), torch.zeros(160)])).double(), itertools.count()
    op = FunctionOperator(lambda V: A @ V if next(calls) < 3 else V / 0.0, 162, f64)
    with pytest.warns(NumericalWarning, match=f"the eigenpairs have converged, but some {others}.*not finite"):
        pairs = top_eigenpairs(op, 1, which)
    assert bool(pairs.converged.all())
    assert pairs.cut
    assert pairs.values.tolist() == pytest.approx([9.0])
