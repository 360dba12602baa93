"""Operators made of operators, of matrices, of functions and of SciPy's."""

import cases
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

import ritz
from ritz.errors import WeightsMovedError
from ritz.operators import DenseOperator, FunctionOperator, Metered, Projected, from_scipy
from ritz.testing import check_operator

M = cases.symmetric(torch.tensor([5.0, 2.0, 0.5, 0.0, -1.0, -3.0]), seed=1)
N = cases.symmetric(torch.tensor([1.0, 1.0, 4.0, 0.0, 2.0, 0.0]), seed=2)
EYE = torch.eye(6)


def hessian(name: str = "attention", **keywords) -> ritz.Hessian:
    return ritz.Hessian(cases.problem(name).risk(plan=ritz.Plan(chunk=200)), **keywords)


@given(a=st.floats(-3, 3), b=st.floats(-3, 3), c=st.floats(-3, 3))
def test_expressions_are_those_of_matrices(a, b, c):
    A, B = DenseOperator(M), DenseOperator(N)
    dense = (a * A - B * b + c).dense()
    torch.testing.assert_close(dense, a * M - b * N + c * EYE, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((c - A / 4).dense(), c * EYE - M / 4, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda H: 2 * H,
        lambda H: H + 0.1,
        lambda H: H - 0.1,
        lambda H: H + H,
        lambda H: -H,
        lambda H: H.block("attention.*"),
        lambda H: (H + 1.0).block(["norm.*", "head.*"]),
        lambda H: Metered(H),
        lambda H: Projected(H, torch.linalg.qr(H.probes(range(3), seed=0).T).Q.T),
    ],
)
def test_what_is_made_of_an_operator_is_an_operator(make):
    check_operator(make(hessian()))


@pytest.mark.parametrize(
    "make", [lambda: DenseOperator(M), lambda: FunctionOperator(lambda V: M @ V, 6, torch.float64)]
)
def test_matrices_and_functions_are_operators(make):
    check_operator(make())


def test_positive_survives_only_what_keeps_it():
    G = ritz.GGN(cases.problem("mlp_mse").risk())
    assert all(A.positive for A in (G, 2 * G, G + 0.1, G + G, G.block("0.*"), (2 * G).block("0.*"), Metered(G)))
    assert not any(A.positive for A in (-G, G - 0.1, G - G, ritz.Hessian(G.risk) + G))


def test_a_block_of_a_combination_is_the_combination_of_blocks():
    H = hessian()
    place = H.space.slices["attention.in_proj_weight"]
    truth = (2 * cases.truth("attention", "Hessian") + torch.eye(H.dim))[place, place]
    assert cases.relative((2 * H + 1.0).block("attention.in_proj_weight").dense(), truth) < 1e-10


def test_a_block_of_parameters_that_do_not_exist_is_refused():
    for operator in (hessian(), 2 * hessian()):
        with pytest.raises(ValueError, match=r"no parameter matches 'layer9\.\*'; there are: norm\.weight"):
            operator.block("layer9.*")


def test_a_sum_has_the_dtype_that_torch_promotes_to_whichever_comes_first():
    A, B = DenseOperator(torch.eye(3).float()), DenseOperator(torch.full((3, 3), 1 / 3, dtype=torch.float64))
    wanted = torch.eye(3).double() + torch.full((3, 3), 1 / 3, dtype=torch.float64)
    for total in (A + B, B + A):
        assert total.dtype == torch.float64
        assert torch.equal(total.dense(), wanted)


def test_operators_of_different_order_cannot_be_added():
    with pytest.raises(ValueError, match="cannot add operators of dimension 6 and 3"):
        DenseOperator(M) + DenseOperator(torch.eye(3))


# ---------------------------------------------------------------------------------------------- projection


def test_projection_takes_directions_out_on_both_sides():
    basis = torch.linalg.qr(torch.randn(6, 2, generator=torch.Generator().manual_seed(0))).Q.T
    Q = EYE - basis.T @ basis
    torch.testing.assert_close(Projected(DenseOperator(M), basis).dense(), Q @ M @ Q)


def test_projecting_out_eigenvectors_leaves_the_other_eigenvalues():
    values, vectors = torch.linalg.eigh(M)
    left = torch.linalg.eigvalsh(Projected(DenseOperator(M), vectors[:, [0, 5]].T).dense())
    truth = torch.cat([values[1:5], torch.zeros(2)]).sort().values
    torch.testing.assert_close(left, truth, rtol=1e-12, atol=1e-12)


def test_projecting_nothing_out_changes_nothing():
    torch.testing.assert_close(Projected(DenseOperator(M), torch.zeros(0, 6)).dense(), M)


def test_a_basis_that_is_not_orthonormal_is_refused():
    with pytest.raises(ValueError, match=r"not orthonormal \(off by 1.*take a QR first"):
        Projected(DenseOperator(M), torch.eye(6)[:2] * 2**0.5)
    with pytest.raises(ValueError, match=r"expected basis rows of shape \(r, dim=6\), got \(6, 2\)"):
        Projected(DenseOperator(M), torch.eye(6)[:, :2])


# ------------------------------------------------------------------------------------------------- metering


def test_a_meter_counts_vectors():
    meter = Metered(DenseOperator(M))
    meter @ torch.ones(6)
    meter @ torch.ones(6, 4)
    meter @ torch.ones(6, 0)
    assert meter.products == 5


def test_a_meter_stops_a_run_when_the_weights_move():
    problem = cases.make("mlp_mse")
    meter = Metered(ritz.Hessian(problem.risk(), route="reverse"))
    meter @ torch.ones(meter.dim)
    with torch.no_grad():
        problem.model[0].weight.add_(1e-3)
    with pytest.raises(WeightsMovedError, match="the weights changed while the run was under way"):
        meter @ torch.ones(meter.dim)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.ones(2, 3), r"expected a square floating-point matrix, got \(2, 3\)"),
        (torch.ones(2, 2, dtype=torch.int64), r"got \(2, 2\) torch\.int64"),
        (torch.zeros(0, 0), r"got \(0, 0\)"),
        (torch.tensor([[1.0, 1.0], [0.0, 1.0]]), "not symmetric: A and A' differ by 1"),
        (torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]]), "entries that are NaN or infinite"),
    ],
)
def test_what_is_no_symmetric_matrix_is_refused(matrix, message):
    with pytest.raises(ValueError, match=message):
        DenseOperator(matrix)


def test_a_function_must_keep_the_shape():
    with pytest.raises(ValueError, match=r"the function must return columns of the given shape \(3, 1\), got \(2, 1\)"):
        FunctionOperator(lambda V: V[:2], 3) @ torch.ones(3)
    with pytest.raises(ValueError, match="dim must be positive, got 0"):
        FunctionOperator(lambda V: V, 0)


# --------------------------------------------------------------------------------------------------- SciPy


def test_scipy_finds_the_dense_eigenvalues_of_a_network():
    values = torch.linalg.eigvalsh(cases.truth("attention", "Hessian"))
    found = scipy.sparse.linalg.eigsh(hessian().to_scipy(), k=2, which="BE", return_eigenvectors=False)
    np.testing.assert_allclose(found, [values[0], values[-1]], rtol=1e-8)


def test_scipy_sees_the_precision_of_the_operator():
    single = ritz.Hessian(cases.problem("mlp_mse").risk(dtype=torch.float32)).to_scipy()
    assert single.dtype == np.float32
    assert (single @ np.ones(32)).dtype == np.float32
    assert hessian().to_scipy().dtype == np.float64


def test_scipy_may_multiply_complex_vectors():
    """The imaginary part was left out: a resolvent by GMRES is that of b + 0 i."""
    A = DenseOperator(torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    b = np.array([1.0 + 2.0j, 2.0, -1.0j])
    np.testing.assert_allclose(A.to_scipy() @ b, np.array([1.0, 2.0, 3.0]) * b)
    np.testing.assert_allclose(A.to_scipy() @ b[:, None], (np.array([1.0, 2.0, 3.0]) * b)[:, None])
    shifted = A.to_scipy() - 1.0j * scipy.sparse.linalg.aslinearoperator(np.eye(3))
    found, info = scipy.sparse.linalg.gmres(shifted, b, rtol=1e-12)
    assert info == 0
    np.testing.assert_allclose(found, b / np.array([1.0 - 1.0j, 2.0 - 1.0j, 3.0 - 1.0j]))


def test_what_is_no_tensor_is_refused_by_name():
    with pytest.raises(TypeError, match=r"expected a tensor, got ndarray; write torch.as_tensor\(matrix\)"):
        DenseOperator(np.eye(3))
    with pytest.raises(TypeError, match="must return a tensor, got a ndarray; for NumPy arrays see from_scipy"):
        FunctionOperator(lambda V: V.numpy(), dim=3) @ torch.ones(3)


def test_a_matrix_of_scipy_becomes_an_operator_and_comes_back():
    sparse = scipy.sparse.diags_array([[1.0, 2.0, 3.0], [0.5, 0.5], [0.5, 0.5]], offsets=[0, 1, -1])
    A = from_scipy(sparse)
    check_operator(A)
    np.testing.assert_allclose(A.dense().numpy(), sparse.toarray())
    np.testing.assert_allclose(A.to_scipy() @ np.eye(3), sparse.toarray())


def test_a_scipy_operator_that_is_not_square_is_refused():
    with pytest.raises(ValueError, match=r"expected a square operator, got \(2, 3\)"):
        from_scipy(np.ones((2, 3)))
