"""Conjugate gradients against a dense solve."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import matrix
from torch import Tensor

from ritz.errors import NonFiniteError, NumericalWarning
from ritz.krylov.solve import solve
from ritz.operators.algebra import DenseOperator, FunctionOperator, Metered

f64 = torch.float64


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), dim=st.integers(1, 40), k=st.integers(0, 4), log_condition=st.floats(0, 4))
def test_the_solution_is_that_of_a_dense_solve(seed, dim, k, log_condition):
    A = matrix(torch.logspace(-log_condition, 0, dim, dtype=f64), seed)
    b = vectors(dim, k, seed=seed) if k else vectors(dim, seed=seed)
    found = solve(DenseOperator(A), b, tol=1e-11)
    assert found.x.shape == b.shape
    assert found.converged.shape == found.residuals.shape == found.negative_curvature.shape == b.shape[1:]
    torch.testing.assert_close(found.x, torch.linalg.solve(A, b), rtol=1e-6, atol=1e-6)
    assert found.converged.all()
    assert not found.negative_curvature.any()
    assert found.stop == "converged"


def test_residuals_are_the_true_ones():
    A, b = matrix(torch.linspace(0.1, 3, 50)), vectors(50, 3)
    found = solve(DenseOperator(A), b, tol=1e-4)
    true = (b - A @ found.x).norm(dim=0) / b.norm(dim=0)
    torch.testing.assert_close(found.residuals, true, rtol=1e-8, atol=0)
    assert (found.residuals <= 1e-4).all()
    assert (found.residuals > 1e-9).all()  # it stopped when it was there


def test_damping_is_written_as_a_sum():
    A, b = matrix(torch.linspace(0, 3, 50)), vectors(50)
    found = solve(DenseOperator(A) + 0.1, b, tol=1e-10)
    torch.testing.assert_close(found.x, torch.linalg.solve(A + 0.1 * torch.eye(50, dtype=f64), b))
    assert "0.1 I" in found.convention


def test_columns_do_not_disturb_each_other():
    A, b = matrix(torch.linspace(0.1, 3, 50)), vectors(50, 4)
    b[:, 1] *= 1e-8
    b[:, 2] = 0.0
    b[:, 3] = torch.linalg.eigh(A)[1][:, 7]  # done after one step
    together = solve(DenseOperator(A), b, tol=1e-8)
    for i in range(4):
        torch.testing.assert_close(
            together.x[:, i], solve(DenseOperator(A), b[:, i], tol=1e-8).x, rtol=1e-6, atol=1e-12
        )
    assert (together.x[:, 2] == 0).all()
    assert together.residuals[2] == 0


def test_the_steps_of_a_matrix_with_few_eigenvalues_are_few():
    spectrum = torch.cat([torch.ones(40), torch.full((30,), 5.0), torch.full((30,), 20.0)])
    found = solve(DenseOperator(matrix(spectrum)), vectors(100), tol=1e-9)
    assert found.num_steps <= 8  # three would do; it looks every eight
    assert found.products == found.num_steps + 1


def test_a_preconditioner_saves_steps_as_an_operator_and_as_a_function():
    scale = torch.logspace(-2, 2, 200, dtype=f64)
    A = torch.diag(scale) + 0.01 * matrix(torch.linspace(0, 1, 200))
    b = vectors(200, 2)
    plain = solve(DenseOperator(A), b, tol=1e-8)
    by_operator = solve(DenseOperator(A), b, tol=1e-8, preconditioner=DenseOperator(torch.diag(1 / scale)))
    by_function = solve(DenseOperator(A), b, tol=1e-8, preconditioner=lambda R: R / scale[:, None])
    assert by_operator.num_steps < plain.num_steps / 3
    assert by_operator.num_steps == by_function.num_steps
    for found in (by_operator, by_function):
        torch.testing.assert_close(found.x, torch.linalg.solve(A, b), rtol=1e-4, atol=1e-4)


def test_float32_solves_to_what_float32_allows():
    A, b = matrix(torch.logspace(-3, 0, 300, dtype=f64)).float(), vectors(300).float()
    found = solve(DenseOperator(A), b, tol=5e-5)
    assert found.x.dtype == torch.float32
    assert found.converged
    assert (b.double() - A.double() @ found.x.double()).norm() / b.double().norm() < 6e-5


def test_the_iteration_is_resumed_where_the_recurrence_has_drifted_from_the_truth():
    A, b = matrix(torch.logspace(-3, 0, 300, dtype=f64)), vectors(300)
    calls = []

    def drifting(V: Tensor) -> Tensor:  # exact but for the early products
        calls.append(1)
        return A @ V * (1 + 1e-5 * (len(calls) < 20))

    found = solve(FunctionOperator(drifting, 300, f64), b, tol=1e-9)
    assert found.converged
    torch.testing.assert_close(A @ found.x, b, rtol=0, atol=1e-7)


def test_the_noise_floor_is_named_when_the_tolerance_is_below_it():
    A, b = matrix(torch.logspace(-1, 0, 100, dtype=f64)).float(), vectors(100).float()
    with pytest.warns(NumericalWarning, match="1 of 1 systems not solved to tol=1e-12.*not precise enough"):
        found = solve(DenseOperator(A), b, tol=1e-12)
    assert found.stop == "noise floor"
    assert not found.converged
    assert found.residuals < 1e-5
    torch.testing.assert_close(found.x, torch.linalg.solve(A.double(), b.double()).float(), rtol=1e-2, atol=1e-3)


# --------------------------------------------------------------------------------- negative curvature


def test_negative_curvature_stops_its_column_and_keeps_the_last_good_x():
    A = torch.diag(torch.tensor([-1.0, 1.0, 2.0, 3.0], dtype=f64))
    b = torch.tensor([[0.5, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=f64)
    with pytest.warns(NumericalWarning, match=r"not positive definite: add damping, solve\(A \+ damping, b\)"):
        found = solve(DenseOperator(A), b)
    assert found.stop == "negative curvature"
    assert found.negative_curvature.tolist() == [True, False]
    assert found.converged.tolist() == [False, True]
    torch.testing.assert_close(found.x[:, 1], torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=f64))
    x = found.x[:, 0]
    assert x.isfinite().all()
    assert x.abs().max() > 0  # steps were taken before it was met
    assert 0.5 * x @ A @ x - b[:, 0] @ x < 0  # and they lowered the quadratic


@pytest.mark.parametrize("seed", range(4))  # some meet p'Ap <= 0 by round-off, and some stagnate
def test_what_no_x_solves_leaves_the_x_of_the_least_residual_not_one_that_round_off_carried_away(seed):
    """b has a part where A vanishes: there p'Ap is round-off, and the step as long as its inverse."""
    J, b = vectors(25, 40, seed=seed), vectors(40, seed=100 + seed)
    with pytest.warns(NumericalWarning, match="1 of 1 systems not solved"):
        found = solve(FunctionOperator(lambda V: J.T @ (J @ V), 40, f64), b)
    assert found.stop in ("negative curvature", "stagnation")
    assert 0 < found.x.norm() < 10
    assert found.residuals < 3


def test_a_negative_matrix_gives_nothing_but_says_so():
    with pytest.warns(NumericalWarning, match="add damping"):
        found = solve(DenseOperator(-torch.eye(3, dtype=f64)), torch.ones(3, dtype=f64))
    assert (found.x == 0).all()
    assert found.residuals == 1
    assert found.negative_curvature


def test_the_zero_matrix_has_no_solution():
    with pytest.warns(NumericalWarning, match="not positive definite"):
        assert solve(DenseOperator(torch.zeros(3, 3, dtype=f64)), torch.ones(3, dtype=f64)).negative_curvature


def test_a_semidefinite_matrix_with_b_in_its_range_is_solved():
    spectrum = torch.cat([torch.zeros(10), torch.linspace(1, 2, 20)])
    A = matrix(spectrum)
    b = A @ vectors(30)
    found = solve(DenseOperator(A), b, tol=1e-8)
    torch.testing.assert_close(A @ found.x, b, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------ the rest


def test_spent_steps_are_said():
    op = Metered(DenseOperator(matrix(torch.logspace(-6, 0, 200, dtype=f64))))
    with pytest.warns(NumericalWarning, match=r"raise max_steps \(taken: 10\)"):
        found = solve(op, vectors(200, 2), max_steps=10)
    assert found.stop == "max_steps"
    assert found.num_steps == 10
    assert found.products == op.products == 22
    assert not found.converged.any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e20), (f64, 1e200), (f64, 1e-200)])
def test_a_right_hand_side_whose_square_is_no_number_is_solved(dtype, size):
    A = matrix(torch.linspace(1.0, 3.0, 20)).to(dtype)
    b = size * vectors(20).to(dtype)
    torch.testing.assert_close(
        solve(DenseOperator(A), b, tol=1e-5).x / size, torch.linalg.solve(A, b / size), rtol=1e-4, atol=1e-4
    )


def test_a_zero_right_hand_side_has_the_zero_solution():
    found = solve(DenseOperator(torch.eye(4, dtype=f64)), torch.zeros(4, dtype=f64))
    assert (found.x == 0).all()
    assert found.converged
    assert found.num_steps == 0


def test_a_solution_is_a_tensor_and_what_comes_of_it_a_plain_one():
    A, b = DenseOperator(matrix(torch.linspace(1, 2, 9))), vectors(9, 2)
    found = solve(A, b)
    torch.testing.assert_close(A @ found, b, rtol=1e-5, atol=1e-5)
    for plain in (found.x, found + 1, 2 * found, found[:, 0], found.clone(), torch.cat([found, found])):
        assert type(plain) is Tensor


def test_progress_is_told_in_steps():
    seen = []
    found = solve(
        DenseOperator(matrix(torch.linspace(0.01, 2, 90))),
        vectors(90),
        max_steps=200,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[0] == (0, 200)
    assert seen[-1] == (found.num_steps, 200)


def test_bad_input_is_refused():
    op = DenseOperator(torch.eye(4, dtype=f64))
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.int64"):
        solve(op, torch.ones(4, dtype=torch.long))
    with pytest.raises(TypeError, match="floating-point tensor, got list"):
        solve(op, [1.0] * 4)
    with pytest.raises(ValueError, match=r"expected b of shape \(dim=4,\) or \(dim, k\), got \(5,\)"):
        solve(op, torch.ones(5, dtype=f64))
    with pytest.raises(ValueError, match="b has NaN or infinite entries"):
        solve(op, torch.tensor([1.0, float("nan"), 0.0, 0.0]))
    with pytest.raises(ValueError, match="tol must lie between 0 and 1, got 2"):
        solve(op, torch.ones(4, dtype=f64), tol=2.0)
    with pytest.raises(ValueError, match="max_steps must be at least 1, got 0"):
        solve(op, torch.ones(4, dtype=f64), max_steps=0)
    with pytest.raises(ValueError, match="the preconditioner has dim=3, but the matrix has dim=4"):
        solve(op, torch.ones(4, dtype=f64), preconditioner=DenseOperator(torch.eye(3, dtype=f64)))
    with pytest.raises(TypeError, match="the preconditioner must return a tensor, got a ndarray"):
        solve(op, torch.ones(4, dtype=f64), preconditioner=lambda V: V.numpy())
    with pytest.raises(ValueError, match="the preconditioner must return columns"):
        solve(op, torch.ones(4, dtype=f64), preconditioner=lambda R: R.sum())
    with pytest.raises(ValueError, match="the preconditioner is not positive definite"):
        solve(op, torch.ones(4, dtype=f64), preconditioner=-op)


def test_a_product_that_is_not_finite_is_refused():
    with pytest.raises(NonFiniteError, match="a product with the function is not finite"):
        solve(FunctionOperator(lambda V: V * float("nan"), 4, f64), torch.ones(4, dtype=f64))


@pytest.mark.parametrize(("size", "given"), [(1e-25, 1e30), (1e25, 1e-30)], ids=["too large", "too small"])
def test_a_solution_out_of_the_range_of_the_numbers_has_not_converged(size, given):
    """Of float32 1e55 is infinite and 1e-55 is 0; the iteration itself, which is scaled, saw neither."""
    A = DenseOperator(size * torch.diag(torch.linspace(1, 2, 9, dtype=torch.float32)))
    b = torch.stack([torch.full((9,), given), torch.full((9,), size)], dim=1).float()
    with pytest.warns(NumericalWarning, match="1 of 2 systems not solved.*use dtype=torch.float64"):
        x = solve(A, b, tol=1e-4)
    assert x.converged.tolist() == [False, True]
    assert float(x.residuals[0]) >= 1.0
    assert bool(((A @ x.x)[:, 1] - b[:, 1]).norm() <= 1e-4 * b[:, 1].norm())
