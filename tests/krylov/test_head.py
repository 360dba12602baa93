"""The locked head: true Ritz pairs, exact identities, and no matrix that breaks it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import matrix
from torch import Tensor

from ritz.errors import NonFiniteError
from ritz.krylov.head import Head, find_head, orthonormalised
from ritz.krylov.lanczos import lanczos
from ritz.operators.algebra import DenseOperator, FunctionOperator, Metered, Projected
from ritz.storage import load

f64 = torch.float64
OUTLIERS = torch.tensor([10.0, -8.0, 7.0, 6.0, 5.0, 4.0, 3.0], dtype=f64)


def outliers(dim: int = 250, seed: int = 0) -> Tensor:
    return matrix(torch.cat([OUTLIERS, torch.linspace(-0.5, 1.0, dim - len(OUTLIERS), dtype=f64)]), seed)


def check_pairs(head: Head, A: Tensor, atol: float = 1e-11) -> None:
    """The locked pairs are what they say: orthonormal, Galerkin, with true residuals."""
    U, R = head.vectors.double(), head.residual_rows.double()
    eye = torch.eye(len(U), dtype=f64)
    torch.testing.assert_close(U @ U.T, eye, rtol=0, atol=atol)
    torch.testing.assert_close(U @ A @ U.T, torch.diag(head.values), rtol=0, atol=atol)
    torch.testing.assert_close(U @ A - head.values[:, None] * U, R, rtol=0, atol=atol)
    torch.testing.assert_close(torch.linalg.vector_norm(R, dim=1), head.residuals, rtol=1e-6, atol=atol)
    assert head.coupling == pytest.approx(float(torch.linalg.matrix_norm(R, 2)) if len(R) else 0.0, abs=atol)


def check_split(head: Head, A: Tensor, rtol: float = 1e-11) -> None:
    """Trace and squared norm are the head's share and that of what is left."""
    U = head.vectors.double()
    Q = torch.eye(len(A), dtype=f64) - U.T @ U
    rest = Q @ A @ Q
    size = float(torch.linalg.matrix_norm(A)) + 1e-300
    assert head.trace + float(rest.trace()) == pytest.approx(float(A.trace()), abs=rtol * size)
    own = float((head.values.square() + 2 * head.residuals.square()).sum())  # 2 |HU|^2 - |U'HU|^2
    assert own + float(rest.square().sum()) == pytest.approx(float(A.square().sum()), rel=rtol)


def test_the_outliers_are_locked_largest_first():
    A = outliers()
    head = find_head(DenseOperator(A))
    torch.testing.assert_close(head.values[:7], OUTLIERS, rtol=1e-9, atol=0)
    assert (head.values.abs().diff() <= 0).all()
    assert (head.residuals <= 3e-3 * 10).all()
    assert not head.complete
    check_pairs(head, A)


def test_trace_and_norm_split_exactly_even_when_the_pairs_are_poor():
    A = outliers()
    for num_steps, tol in ((12, 3e-3), (2, 1.0)):
        head = find_head(DenseOperator(A), num_steps=num_steps, tol=tol)
        check_pairs(head, A)
        check_split(head, A)
    assert head.residuals.max() > 0.01  # the second was poor


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), dim=st.integers(1, 60), block=st.integers(1, 5), num_steps=st.integers(1, 6))
def test_the_split_is_exact_for_any_matrix_and_any_effort(seed, dim, block, num_steps):
    g = torch.Generator().manual_seed(seed)
    A = matrix(torch.randn(dim, generator=g, dtype=f64).exp() * torch.randint(-1, 2, (dim,), generator=g), seed)
    head = find_head(DenseOperator(A), block=block, num_steps=num_steps, tol=0.3, seed=seed)
    check_pairs(head, A)
    check_split(head, A)
    assert head.complete == (dim <= block * num_steps)


def test_the_ends_of_the_block_space_are_reported_with_their_residuals():
    A = matrix(torch.linspace(-1, 1, 300))
    head = find_head(DenseOperator(A), block=3, num_steps=5, tol=1e-9)  # nothing converges
    assert len(head.values) == 0
    assert head.coupling == 0
    truth = torch.linalg.eigvalsh(A)
    for theta, residual in ((head.theta_min, head.theta_min_residual), (head.theta_max, head.theta_max_residual)):
        assert 0.8 < abs(theta) <= 1
        assert 0 < float((truth - theta).abs().min()) <= residual
    assert head.theta_min < 0 < head.theta_max


def test_a_vector_near_the_null_space_is_no_outlier():
    """Before any large pair has converged those near 0 have the smallest residuals, larger than their values."""
    spectrum = torch.cat([torch.logspace(1, -0.5, 20), 0.0002 * torch.linspace(0, 1, 388)]).double()
    head = find_head(DenseOperator(matrix(spectrum)), num_steps=3)
    assert bool((head.values.abs() >= 0.99 * head.residuals).all())


def test_at_most_max_locked_pairs_are_kept():
    assert find_head(DenseOperator(outliers()), max_locked=3).values.tolist() == pytest.approx([10, -8, 7])
    assert len(find_head(DenseOperator(outliers()), max_locked=0).values) == 0


def test_residuals_tell_of_a_bulk_far_below_the_largest_eigenvalue():
    """In float32 a bulk of 8 eps times the norm is more than round-off: no pair in it is found by one block step."""
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(300, 300, generator=generator, dtype=torch.float64))
    values = torch.cat([torch.tensor([1e6]), torch.randn(299, generator=generator)]).double()
    dense = (basis * values) @ basis.T
    A = ((dense + dense.T) / 2).float()
    head = find_head(DenseOperator(A), num_steps=6)
    true = (head.vectors.double() @ A.double() - head.values[:, None] * head.vectors.double()).norm(dim=1)
    assert float(true[8:].max()) > 0.3
    torch.testing.assert_close(head.residuals, true, rtol=0.1, atol=0.2)


def test_the_tail_of_a_locked_head_integrates_what_is_left():
    A = outliers()
    op = DenseOperator(A)
    head = find_head(op, tol=0.5, num_steps=3)
    V = op.probes(range(4), 0)
    T = lanczos(op, V, 10, locked=head.vectors, noise=10.0 * torch.finfo(A.dtype).eps).tridiagonal()
    rest = Projected(op, head.vectors).dense()
    W = V - V @ head.vectors.T @ head.vectors
    truth = (W @ rest @ rest * W).sum(1)
    torch.testing.assert_close(T.quadratic_form(torch.square), truth, rtol=1e-10, atol=1e-10)


def test_no_eigenvalue_is_further_than_the_coupling_from_head_and_rest():
    A = outliers()
    head = find_head(DenseOperator(A), num_steps=2, tol=0.5)
    U = head.vectors
    joined = U.T @ torch.diag(head.values) @ U + Projected(DenseOperator(A), U).dense()
    apart = (torch.linalg.eigvalsh(joined) - torch.linalg.eigvalsh(A)).abs().max()
    assert 0 < apart <= head.coupling * (1 + 1e-9)


# ---------------------------------------------------------------------------------------- degenerate matrices


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("dim", [1, 5, 8, 20, 96, 97, 150])
@pytest.mark.parametrize("kind", ["zero", "identity", "low rank", "two values"])
def test_degenerate_matrices_of_any_size_split_exactly(kind, dim, dtype):
    spectrum = torch.zeros(dim, dtype=f64)
    if kind == "identity":
        spectrum += 2.0
    if kind == "low rank":
        spectrum[: min(dim, 11)] = torch.arange(-3.0, 8.0)[: min(dim, 11)]
    if kind == "two values":
        spectrum[: dim // 2] = 1.0
    A = matrix(spectrum).to(dtype)
    head = find_head(DenseOperator(A))
    loose = 1.0 if dtype == f64 else 1e9  # eps of float32 over that of float64
    check_pairs(head, A.double(), atol=2e-14 * loose)
    check_split(head, A.double(), rtol=4e-14 * loose)
    if dim <= 96:
        assert head.complete
        assert head.products == dim
        torch.testing.assert_close(head.values.sort().values, spectrum.sort().values, rtol=0, atol=1e-14 * loose)


def test_a_low_rank_matrix_is_locked_whole():
    spectrum = torch.zeros(300, dtype=f64)
    spectrum[:11] = torch.arange(1.0, 12.0)
    head = find_head(DenseOperator(matrix(spectrum)))
    torch.testing.assert_close(head.values[:11], torch.arange(11.0, 0.0, -1.0, dtype=f64))
    assert head.coupling < 1e-12
    assert (head.values[11:].abs() < 1e-12).all()


def test_a_repeated_eigenvalue_is_found_as_often_as_the_block_is_wide():
    spectrum = torch.cat([torch.full((8,), 5.0), torch.linspace(0, 1, 192)])
    head = find_head(DenseOperator(matrix(spectrum)))
    assert (head.values > 4).sum() == 8


def test_the_head_of_a_float32_matrix_keeps_orthonormal_rows():
    A = outliers(400)
    head = find_head(DenseOperator(A.float()))
    assert head.vectors.dtype == torch.float32
    assert head.values.dtype == f64
    torch.testing.assert_close(head.values[:7], OUTLIERS, rtol=1e-5, atol=0)
    check_pairs(head, A, atol=2e-5)
    check_split(head, A, rtol=1e-5)


def test_dependent_rows_are_dropped_and_the_others_made_orthonormal():
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(50, 4, generator=g, dtype=f64))[0].T.contiguous()
    a, b = torch.randn(2, 50, generator=g, dtype=f64)
    block = torch.stack([a, 1e-9 * b + a, a - 3 * basis[0], basis[1], torch.zeros(50, dtype=f64), 1e-12 * b])
    rows, alive = orthonormalised(block, basis, 1e-13)
    assert int(alive.sum()) == 2
    torch.testing.assert_close(rows @ rows.T, torch.diag(alive.double()), rtol=0, atol=1e-14)
    assert (rows @ basis.T).abs().max() < 1e-14
    for row in (a, b):  # both directions are spanned, however small the second was
        left = row - basis.T @ (basis @ row)
        assert torch.linalg.vector_norm(left - rows.T @ (rows @ left)) < 1e-5


# ----------------------------------------------------------------------------------------- the rest


def test_products_are_counted_and_progress_is_told():
    seen = []
    op = Metered(DenseOperator(outliers()))
    head = find_head(op, block=4, num_steps=5, progress=lambda done, total: seen.append((done, total)))
    assert head.products == op.products == 20
    assert seen == [(4, 20), (8, 20), (12, 20), (16, 20), (20, 20)]


def test_the_same_seed_gives_the_same_head_and_the_start_is_not_a_probe():
    op = DenseOperator(outliers())
    assert find_head(op, seed=3) == find_head(op, seed=3)
    assert find_head(op, seed=3) != find_head(op, seed=4)
    assert (op.probes([-1], 0, "normal") != op.probes([1], 0, "normal")).all()


def test_a_head_loads_equal(tmp_path):
    for dim in (20, 200):
        head = find_head(DenseOperator(outliers(dim)))
        head.save(tmp_path / "head")
        assert load(tmp_path / "head") == head


def test_a_product_that_is_not_finite_is_refused():
    for dim in (10, 200):
        op = FunctionOperator(lambda V: V * float("nan"), dim, f64)
        with pytest.raises(NonFiniteError, match="a product with the function is not finite"):
            find_head(op)


@pytest.mark.parametrize("bad", [{"block": 0}, {"num_steps": 0}, {"max_locked": -1}, {"tol": 0.0}])
def test_bad_arguments_are_refused(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=f"must be at least 1.*{name}={value}"):
        find_head(DenseOperator(torch.eye(3)), **bad)


@pytest.mark.gpu
def test_no_block_step_waits_for_the_device():
    op = DenseOperator(outliers(400).float().cuda())
    find_head(op)  # kernels are loaded
    seen = []

    def watch(done: int, total: int) -> None:  # from the first block step to the last
        torch.cuda.set_sync_debug_mode("error" if done < total else "default")
        seen.append(done)

    try:
        find_head(op, progress=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 12
