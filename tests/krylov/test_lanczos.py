"""The lock-step recurrence: its identities, its breakdowns, its saved state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import matrix
from torch import Tensor

from ritz.krylov.lanczos import LanczosState, extend, lanczos, start
from ritz.krylov.tridiagonal import Tridiagonal
from ritz.operators.algebra import DenseOperator, FunctionOperator, Projected
from ritz.storage import load

f64 = torch.float64


def rows(k: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(k, dim, generator=torch.Generator().manual_seed(1000 + seed), dtype=f64)


def outliers(dim: int = 300, seed: int = 0) -> Tensor:
    """A bulk in [-0.1, 0.4] and eleven outliers, one of them negative."""
    top = torch.tensor([10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, -3.0])
    return matrix(torch.cat([top, torch.linspace(-0.1, 0.4, dim - 11)]), seed)


def test_the_locked_space_does_not_come_back_where_the_rest_of_the_spectrum_is_away_from_zero():
    """Round-off in the locked space is an eigenvector of QAQ for 0, which grows when 0 lies outside what is left."""
    eigenvalues = torch.cat([torch.tensor([50.0, 30.0, 20.0]), torch.linspace(5, 6, 97)]).double()
    basis, _ = torch.linalg.qr(torch.randn(100, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    A = DenseOperator((basis * eigenvalues) @ basis.T)
    state = lanczos(A, A.probes(range(4), 0, "normal"), 60, locked=basis[:, :3].T.contiguous())
    ends = state.tridiagonal().extremes()
    assert float(ends.smallest.min()) > 5 - 1e-9
    assert float(ends.largest.max()) < 6 + 1e-9
    assert float((state.rows @ basis[:, :3]).abs().max()) < 1e-12


def test_the_recurrence_holds_for_every_probe():
    A, m = matrix(torch.linspace(-1, 3, 30)), 7
    state = lanczos(DenseOperator(A), rows(3, 30), m, reorthogonalize="full")
    assert state.basis is not None
    for i in range(3):
        Q = state.basis[:, i]  # (m, dim)
        torch.testing.assert_close(Q @ Q.T, torch.eye(m, dtype=f64), rtol=0, atol=1e-14)
        off = state.beta[i, :-1]
        T = torch.diag(state.alpha[i]) + torch.diag(off, 1) + torch.diag(off, -1)
        last = torch.zeros(m, dtype=f64)
        last[-1] = 1.0
        residual = torch.outer(state.beta[i, -1] * state.rows[i], last)
        torch.testing.assert_close(A @ Q.T, Q.T @ T + residual, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mode", ["none", "full", "locked"])
def test_each_probe_has_exact_moments_up_to_2m_minus_1_and_not_2m(mode):
    A, V, m = matrix(torch.linspace(-1, 2, 20)), rows(4, 20), 4
    T = lanczos(DenseOperator(A), V, m, reorthogonalize=mode).tridiagonal()
    for k in range(2 * m + 1):
        truth = ((V @ torch.linalg.matrix_power(A, k)) * V).sum(1)
        found = T.quadratic_form(lambda t, k=k: t**k)
        if k < 2 * m:
            torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)
        else:
            assert ((found - truth).abs() > 1e-4 * truth).all()


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), dim=st.integers(1, 12))
def test_full_depth_recovers_the_spectrum(seed, dim):
    A = matrix(rows(1, dim, seed)[0], seed)
    T = lanczos(DenseOperator(A), rows(2, dim, seed), dim, reorthogonalize="full").tridiagonal()
    truth = torch.linalg.eigvalsh(A)
    for nodes in T.gauss().nodes:
        torch.testing.assert_close(nodes, truth, rtol=1e-8, atol=1e-8)
    assert (T.beta[:, -1] < 1e-9).all()


def test_a_probe_alone_gives_what_it_gives_in_company():
    op, V = DenseOperator(outliers(80)), rows(5, 80)
    together = lanczos(op, V, 8, reorthogonalize="full")
    for i in range(5):
        alone = lanczos(op, V[i : i + 1], 8, reorthogonalize="full")
        torch.testing.assert_close(alone.alpha[0], together.alpha[i], rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------- exhausted Krylov spaces


@pytest.mark.parametrize("mode", ["none", "full", "locked"])
@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_the_identity_is_exhausted_after_one_step(mode, dtype):
    op = DenseOperator(3 * torch.eye(50, dtype=dtype))
    state = lanczos(op, rows(2, 50).to(dtype), 5, reorthogonalize=mode)
    assert (state.beta == 0).all()
    assert (state.alpha[:, 1:] == 0).all()
    assert (state.rows == 0).all()
    extremes = state.tridiagonal().extremes()
    for value in (extremes.smallest, extremes.largest):
        torch.testing.assert_close(value, torch.full((2,), 3.0, dtype=f64), rtol=1e-5, atol=0)
    assert (extremes.largest_residual == 0).all()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_zero_matrix_is_exhausted_after_one_step(mode):
    state = lanczos(DenseOperator(torch.zeros(9, 9, dtype=f64)), rows(2, 9), 4, reorthogonalize=mode)
    assert (state.alpha == 0).all()
    assert (state.beta == 0).all()
    T = state.tridiagonal()
    torch.testing.assert_close(T.quadratic_form(lambda t: t + 1), T.norms2)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_low_rank_matrix_leaves_an_exact_leading_block(mode):
    spectrum = torch.zeros(40, dtype=f64)
    spectrum[:3] = torch.tensor([5.0, 2.0, -1.0])
    A, V = matrix(spectrum), rows(3, 40)
    state = lanczos(DenseOperator(A), V, 10, reorthogonalize=mode)
    assert (state.beta[:, 3] == 0).all()  # three eigenvalues and zero: four steps
    assert (state.beta[:, :3] > 0).all()
    T = state.tridiagonal()
    shifted = A + 2 * torch.eye(40, dtype=f64)
    truth = (V @ torch.linalg.inv(shifted) * V).sum(1)
    torch.testing.assert_close(T.quadratic_form(lambda t: 1 / (t + 2)), truth, rtol=1e-10, atol=0)
    lower, upper = T.mass_bounds(1.0)
    torch.testing.assert_close(lower, upper)
    extremes = T.extremes()
    torch.testing.assert_close(extremes.smallest, torch.full((3,), -1.0, dtype=f64))
    torch.testing.assert_close(extremes.largest, torch.full((3,), 5.0, dtype=f64))


def test_padded_nodes_are_no_ritz_values():
    A = torch.diag(torch.tensor([4.0, 4.0, 6.0, 6.0], dtype=f64))  # zero is no eigenvalue
    T = lanczos(DenseOperator(A), rows(2, 4), 4).tridiagonal()
    assert (T.gauss().nodes > 3.9).all()
    extremes = T.extremes()
    torch.testing.assert_close(extremes.smallest, torch.full((2,), 4.0, dtype=f64))
    torch.testing.assert_close(extremes.largest, torch.full((2,), 6.0, dtype=f64))
    torch.testing.assert_close(T.quadratic_form(torch.log), (rows(2, 4) ** 2) @ torch.log(A.diagonal()))


def test_one_probe_may_break_down_while_the_others_go_on():
    A, V = matrix(torch.linspace(1, 2, 20)), rows(3, 20)
    values, vectors = torch.linalg.eigh(A)
    V[1] = 7 * vectors[:, 4]
    state = lanczos(DenseOperator(A), V, 6, reorthogonalize="full")
    assert state.alive().tolist() == [True, False, True]
    torch.testing.assert_close(state.alpha[1, 0], values[4])
    torch.testing.assert_close(state.tridiagonal().quadratic_form(torch.exp)[1], 49 * values[4].exp())


def test_a_product_that_is_nan_on_a_zero_row_does_no_harm():
    def difference(V: Tensor) -> Tensor:  # divides by the norm of each column, as difference quotients do
        return V * (V.norm(dim=0) / V.norm(dim=0))

    images = []
    op = FunctionOperator(difference, 10, f64)
    state = lanczos(op, rows(2, 10), 3, observe=lambda step, q, image: images.append(image))
    assert state.alpha.isfinite().all()
    assert all(image.isfinite().all() for image in images)


def test_a_product_that_is_nan_is_found_by_the_rule():
    op = FunctionOperator(lambda V: V * float("nan"), 10, f64)
    with pytest.raises(ValueError, match="not finite"):
        lanczos(op, rows(2, 10), 3).tridiagonal().gauss()


# ---------------------------------------------------------------------------------------- locked basis


def test_locked_rows_leave_the_measure_of_the_projected_matrix():
    A, V = outliers(120), rows(4, 120)
    U = torch.linalg.eigh(A)[1][:, -5:].T.contiguous()
    op = DenseOperator(A)
    T = lanczos(op, V, 12, locked=U).tridiagonal()
    inside = Projected(op, U).dense()
    W = V - V @ U.T @ U
    torch.testing.assert_close(T.norms2, (W**2).sum(1))
    for k in (1, 2, 5):
        truth = (W @ torch.linalg.matrix_power(inside, k) * W).sum(1)
        torch.testing.assert_close(T.quadratic_form(lambda t, k=k: t**k), truth, rtol=1e-10, atol=1e-10)
    assert (T.extremes().largest < 6.01).all()  # 10, 9, 8, 7, 6 are locked: 5 is next


@pytest.mark.parametrize("mode", ["locked", "full"])
def test_rows_stay_orthogonal_to_the_locked_ones(mode):
    A = outliers(200).float()
    U = torch.linalg.eigh(A.double())[1][:, -10:].T.float().contiguous()
    seen = []
    lanczos(
        DenseOperator(A),
        rows(2, 200).float(),
        40,
        locked=U,
        reorthogonalize=mode,
        observe=lambda step, q, image: seen.append(max(float((q @ U.T).abs().max()), float((image @ U.T).abs().max()))),
    )
    assert max(seen) < 3e-6


def test_a_start_inside_the_locked_space_has_no_measure():
    A = matrix(torch.linspace(1, 2, 20))
    U = torch.linalg.eigh(A)[1][:, :3].T.contiguous()
    V = torch.stack([U[0] + 2 * U[1], rows(1, 20)[0]])
    T = lanczos(DenseOperator(A), V, 4, locked=U).tridiagonal()
    assert T.norms2[0] == 0
    assert T.norms2[1] > 1
    assert T.quadratic_form(torch.log)[0] == 0
    extremes = T.extremes()
    assert extremes.smallest[0] == torch.inf
    assert extremes.largest[0] == -torch.inf
    assert extremes.largest[1].isfinite()


def test_the_noise_of_a_product_tells_round_off_from_a_small_matrix():
    spectrum = torch.zeros(60, dtype=f64)
    spectrum[:2] = torch.tensor([100.0, 50.0])
    A = matrix(spectrum)
    U = torch.linalg.eigh(A)[1][:, -2:].T.contiguous()
    state = lanczos(DenseOperator(A), rows(2, 60), 5, locked=U, noise=100.0 * torch.finfo(f64).eps)
    assert (state.beta == 0).all()
    assert (state.alpha.abs() < 1e-12).all()


def test_a_bulk_just_above_the_noise_of_a_product_is_not_taken_for_round_off():
    spectrum = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=f64)
    spectrum[0] = 1e6
    A = matrix(spectrum).float()  # whose products are off by 0.1 or less
    U = torch.linalg.eigh(A.double())[1][:, -1:].T.contiguous().float()
    state = lanczos(DenseOperator(A), rows(2, 60).float(), 5, locked=U, noise=1e6 * torch.finfo(torch.float32).eps)
    assert (state.beta > 0.3).all()


def test_ghosts_appear_without_reorthogonalisation_and_leave_the_integrals_alone():
    A, V, m = outliers(400), rows(2, 400), 100
    op = DenseOperator(A.float())
    full, none = (lanczos(op, V.float(), m, reorthogonalize=mode).tridiagonal().gauss() for mode in ("full", "none"))
    counted = lambda rule: (rule.nodes > 1.0).sum(1)  # noqa: E731
    assert (counted(full) == 10).all()
    assert (counted(none) > 20).all()
    for f in (torch.square, lambda t: torch.log(t + 4), lambda t: torch.exp(-(t**2))):
        torch.testing.assert_close(none.integrate(f), full.integrate(f), rtol=2e-6, atol=1e-7)


# ------------------------------------------------------------------------------------ bounds per probe


def test_mass_bounds_hold_for_every_probe_at_many_levels():
    A, V = outliers(60, seed=3), rows(6, 60)
    values, vectors = torch.linalg.eigh(A)
    weights = (V @ vectors) ** 2
    weights = weights / weights.sum(1, keepdim=True)
    for m in (3, 10, 25):
        T = lanczos(DenseOperator(A), V, m, reorthogonalize="full").tridiagonal()
        for level in torch.cat([torch.linspace(-4, 11, 31, dtype=f64), values[::7]]):
            lower, upper = T.mass_bounds(float(level))
            assert (lower <= weights[:, values < level - 1e-12].sum(1) + 1e-9).all()
            assert (upper >= weights[:, values <= level + 1e-12].sum(1) - 1e-9).all()


def test_the_bracket_of_a_log_determinant_holds_for_every_probe():
    A, V = outliers(60), rows(6, 60)
    A = A @ A + 1e-2 * torch.eye(60, dtype=f64)
    values, vectors = torch.linalg.eigh(A)
    truth = ((V @ vectors) ** 2) @ values.log() / (V**2).sum(1)
    for m in (2, 5, 15, 30):
        T = lanczos(DenseOperator(A), V, m, reorthogonalize="full").tridiagonal()
        low, high = T.bounds(torch.log, 0.9 * float(values[0]))
        assert (low <= truth + 1e-11).all()
        assert (truth <= high + 1e-11).all()


def test_residuals_of_extreme_ritz_values_reach_an_eigenvalue():
    A = outliers(100)
    truth = torch.linalg.eigvalsh(A)
    for m in (3, 8, 20):
        ends = lanczos(DenseOperator(A), rows(4, 100), m, reorthogonalize="full").tridiagonal().extremes()
        for theta, residual in ((ends.smallest, ends.smallest_residual), (ends.largest, ends.largest_residual)):
            away = (truth[None] - theta[:, None]).abs().min(1).values
            assert (away <= residual + 1e-12).all()


# ---------------------------------------------------------------------------------------- saved states


@pytest.mark.parametrize("mode", ["none", "locked", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_a_run_saved_after_any_step_continues_bit_equal(mode, dtype, tmp_path):
    A, V = outliers(101).to(dtype), rows(3, 101).to(dtype)
    locked = torch.linalg.eigh(A)[1][:, -3:].T.contiguous() if mode != "none" else None
    op = DenseOperator(A)
    whole = lanczos(op, V, 9, locked=locked, reorthogonalize=mode)
    state = start(V, locked=locked, reorthogonalize=mode)
    for step in range(9):
        state = extend(op, state, 1)
        state.save(tmp_path / "state")
        loaded = load(tmp_path / "state")
        assert isinstance(loaded, LanczosState)
        assert loaded == state
        state = loaded
        assert state.num_steps == step + 1
    assert state == whole


def test_a_checkpoint_sees_every_state_and_an_older_one_stays_what_it_was():
    op, V, states = DenseOperator(outliers(50)), rows(2, 50), []
    last = extend(op, start(V, reorthogonalize="full"), 6, checkpoint=states.append)
    assert [state.num_steps for state in states] == [1, 2, 3, 4, 5, 6]
    assert states[-1] == last
    assert extend(op, states[2], 3) == last
    assert states[2].basis.shape == (3, 2, 50)


def test_a_tridiagonal_loads_equal(tmp_path):
    T = lanczos(DenseOperator(outliers(50)), rows(2, 50), 4).tridiagonal()
    T.save(tmp_path / "T")
    assert load(tmp_path / "T") == T
    assert Tridiagonal(T.alpha, T.beta, T.norms2 + 1) != T


def test_the_observer_sees_unit_rows_and_their_images():
    A, alphas = outliers(50), []

    def observe(step: int, q: Tensor, image: Tensor) -> None:
        torch.testing.assert_close(q @ A, image)
        torch.testing.assert_close((q**2).sum(1), torch.ones(2, dtype=f64))
        alphas.append((q * image).sum(1))
        assert step == len(alphas) - 1

    state = lanczos(DenseOperator(A), rows(2, 50), 5, observe=observe)
    torch.testing.assert_close(torch.stack(alphas, 1), state.alpha)


def test_moving_to_a_device_changes_nothing_else():
    state = lanczos(DenseOperator(outliers(50)), rows(2, 50), 3, reorthogonalize="full", offload=True)
    assert state.to("cpu", offload=True) == state


# ------------------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused():
    op = DenseOperator(torch.eye(4, dtype=f64))
    with pytest.raises(ValueError, match=r"expected floating-point start rows .* got \(4,\)"):
        start(torch.ones(4))
    with pytest.raises(ValueError, match="must be 'locked', 'full' or 'none', got 'some'"):
        start(torch.ones(1, 4), reorthogonalize="some")
    with pytest.raises(ValueError, match=r"expected locked rows \(r, dim=4\), got \(2, 3\)"):
        start(torch.ones(1, 4), locked=torch.ones(2, 3))
    with pytest.raises(ValueError, match="'none' takes no locked rows"):
        start(torch.ones(1, 4), locked=torch.eye(4)[:1], reorthogonalize="none")
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        lanczos(op, torch.ones(1, 4), 0)
    with pytest.raises(ValueError, match="the operator has dim=4, but the rows of the state have 5 entries"):
        lanczos(op, torch.ones(1, 5), 1)
    with pytest.raises(ValueError, match="no step has been taken"):
        start(torch.ones(1, 4)).tridiagonal()


# --------------------------------------------------------------------------------------- on a device


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "locked", "full"])
def test_no_step_waits_for_the_device(mode):
    op = DenseOperator(outliers(200).float().cuda())
    locked = torch.linalg.eigh(outliers(200))[1][:, -3:].T.float().cuda().contiguous() if mode == "locked" else None
    first = extend(op, start(rows(3, 200).float().cuda(), locked=locked, reorthogonalize=mode), 1)  # kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = extend(op, first, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.tridiagonal().alpha.isfinite().all()


@pytest.mark.gpu
def test_a_basis_on_the_host_gives_what_one_on_the_device_gives():
    op, V = DenseOperator(outliers(300).cuda()), rows(3, 300).cuda()
    here = lanczos(op, V, 20, reorthogonalize="full")
    there = lanczos(op, V, 20, reorthogonalize="full", offload=True)
    assert here.basis.is_cuda
    assert there.basis.is_pinned()  # so that copies do not wait for the host
    torch.testing.assert_close(there.basis, here.basis.cpu(), rtol=0, atol=1e-9)
    torch.testing.assert_close(there.alpha, here.alpha, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_a_basis_on_the_host_is_fetched_while_what_is_there_is_worked_on():
    from torch.profiler import ProfilerActivity, profile

    V = rows(2, 500_000).cuda()
    op = FunctionOperator(lambda x: x * torch.linspace(0, 1, len(x), device="cuda")[:, None], V.shape[1], f64, "cuda")
    state = lanczos(op, V, 64, reorthogonalize="full", offload=True)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        extend(op, state, 1)
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in seen.events() if e.time_range.elapsed_us() > 0]
    copies = [(start, end) for start, end, name in spans if "HtoD" in name and "Pinned" in name]
    work = [(start, end) for start, end, name in spans if not name.startswith(("Memcpy", "Memset", "cuda"))]
    hidden = sum(max(0, min(end, to) - max(begin, since)) for begin, end in work for since, to in copies)
    assert hidden > 0.5 * sum(end - begin for begin, end in work)  # the last of nine pieces has no copy beside it
