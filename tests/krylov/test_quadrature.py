"""Rules from tridiagonals, against the dense matrix function of the same matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ritz.krylov.quadrature import Quadrature, bounds, gauss, mass_bounds, radau

f64 = torch.float64


def recurrence(A: Tensor, v: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The textbook recurrence with full re-orthogonalisation; slow and obvious on purpose. beta holds the residual."""
    basis, alpha, beta = [v / v.norm()], [], []
    for _ in range(m):
        w = A @ basis[-1]
        alpha.append(basis[-1] @ w)
        Q = torch.stack(basis)
        w = w - Q.T @ (Q @ w)
        w = w - Q.T @ (Q @ w)
        beta.append(w.norm())
        basis.append(w / w.norm())
    return torch.stack(alpha), torch.stack(beta)


def symmetric(seed: int, dim: int = 14) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(dim, dim, generator=g, dtype=f64)
    v = torch.randn(dim, generator=g, dtype=f64)
    return (A + A.T) / 2, v / v.norm()


def measure(A: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and the weight of v on each."""
    values, vectors = torch.linalg.eigh(A)
    return values, (vectors.T @ v) ** 2


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 6))
def test_gauss_integrates_degree_2m_minus_1_exactly(seed: int, m: int):
    A, v = symmetric(seed)
    alpha, beta = recurrence(A, v, m)
    rule = gauss(alpha, beta[:-1])
    for k in range(2 * m):
        truth = v @ torch.linalg.matrix_power(A, k) @ v
        torch.testing.assert_close(rule.integrate(lambda t, k=k: t**k), truth, rtol=1e-9, atol=1e-8)


def test_gauss_does_not_integrate_degree_2m():  # else the test above could not fail
    A, v = symmetric(0)
    alpha, beta = recurrence(A, v, 3)
    truth = v @ torch.linalg.matrix_power(A, 6) @ v
    assert abs(gauss(alpha, beta[:-1]).integrate(lambda t: t**6) - truth) > 1e-3 * abs(truth)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 6), where=st.floats(-8, 8))
def test_radau_has_its_node_and_integrates_degree_2m(seed: int, m: int, where: float):
    A, v = symmetric(seed)
    alpha, beta = recurrence(A, v, m)
    rule = radau(alpha, beta, where)
    assert float((rule.nodes - where).abs().min()) < 1e-10
    assert (rule.weights >= 0).all()
    placed = float(rule.nodes.max()) < 100 and len(rule.nodes) == m + 1 and (rule.weights > 0).all()
    for k in range(2 * m + 1 if placed else 2 * m - 1):
        truth = v @ torch.linalg.matrix_power(A, k) @ v
        torch.testing.assert_close(rule.integrate(lambda t, k=k: t**k), truth, rtol=1e-7, atol=1e-6)


def test_radau_at_a_ritz_value_keeps_the_node_and_loses_no_digits():
    A, v = symmetric(3)
    alpha, beta = recurrence(A, v, 5)
    for theta in gauss(alpha, beta[:-1]).nodes:
        for shift in (0.0, 1e-15, -1e-13, 1e-9, -1e-5):
            rule = radau(alpha, beta, theta + shift)
            assert float((rule.nodes - theta - shift).abs().min()) < 1e-12
            for k in range(9):  # degree 2m - 2 at the least
                truth = v @ torch.linalg.matrix_power(A, k) @ v
                torch.testing.assert_close(rule.integrate(lambda t, k=k: t**k), truth, rtol=1e-9, atol=1e-9)


def test_weights_are_a_probability_measure_for_every_probe_of_a_batch():
    A, _ = symmetric(1)
    runs = [recurrence(A, symmetric(seed)[1], 5) for seed in range(4)]
    alpha, beta = (torch.stack(parts) for parts in zip(*runs, strict=True))
    for rule in (gauss(alpha, beta[:, :-1]), radau(alpha, beta, -9.0)):
        assert (rule.weights >= 0).all()
        assert (rule.nodes.diff(dim=-1) >= 0).all()
        torch.testing.assert_close(rule.weights.sum(-1), torch.ones(4, dtype=f64))
    for i, (a, b) in enumerate(runs):
        torch.testing.assert_close(gauss(alpha, beta[:, :-1]).nodes[i], gauss(a, b[:-1]).nodes)


def test_float32_tridiagonals_are_treated_in_float64():
    assert gauss(torch.ones(3), torch.ones(2)).nodes.dtype == f64
    assert radau(torch.ones(3), torch.ones(3), 0.0).weights.dtype == f64


def test_what_follows_a_zero_off_diagonal_is_ignored():
    rule = gauss(torch.tensor([2.0, 2.0, 77.0, 0.0]), torch.tensor([1.0, 0.0, 5.0]))
    live = rule.weights > 1e-12
    torch.testing.assert_close(rule.nodes[live], torch.tensor([1.0, 3.0], dtype=f64))
    # log(0) would be 0 * -inf if padded nodes sat at zero
    torch.testing.assert_close(rule.integrate(torch.log), torch.log(torch.tensor(3.0, dtype=f64)) / 2)


def test_an_infinite_value_at_a_node_of_weight_zero_counts_nothing():
    rule = Quadrature(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert rule.integrate(torch.log) == 0


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 10))
def test_mass_bounds_hold_at_every_level(seed: int, m: int):
    A, v = symmetric(seed, dim=10)
    values, weights = measure(A, v)
    alpha, beta = recurrence(A, v, m)
    if m == 10:
        beta[-1] = 0.0  # full depth
    levels = torch.cat([torch.linspace(-7, 7, 41, dtype=f64), values, gauss(alpha, beta[:-1]).nodes])
    lower, upper = mass_bounds(alpha, beta, levels)
    for level, low, high in zip(levels, lower, upper, strict=True):
        strictly = weights[values < level - 1e-12].sum()
        at_most = weights[values <= level + 1e-12].sum()
        assert low <= strictly + 1e-9
        assert high >= at_most - 1e-9


def test_mass_bounds_tighten_with_depth_and_are_not_trivial():
    A, v = symmetric(5, dim=60)
    widths = []
    for m in (2, 8, 20):
        lower, upper = mass_bounds(*recurrence(A, v, m), 0.3)
        widths.append(float(upper - lower))
    assert widths[0] > 1.5 * widths[1] > 1.5**2 * widths[2] > 0


def test_mass_of_an_exact_rule_is_exact_on_both_sides_of_an_atom():
    alpha, beta = torch.tensor([2.0, 2.0], dtype=f64), torch.tensor([1.0, 0.0], dtype=f64)  # atoms 1 and 3, half each
    levels = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0], dtype=f64)
    lower, upper = mass_bounds(alpha, beta, levels)
    torch.testing.assert_close(lower, torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0], dtype=f64))
    torch.testing.assert_close(upper, torch.tensor([0.0, 0.5, 0.5, 1.0, 1.0], dtype=f64))


def test_the_zero_matrix_has_its_mass_at_zero():
    zero = torch.zeros(3, 4, dtype=f64)
    for level, low, high in ((-1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0)):
        lower, upper = mass_bounds(zero, zero, level)
        assert lower.tolist() == [low] * 3
        assert upper.tolist() == [high] * 3


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 11), below=st.floats(0.0, 1.0))
def test_gauss_and_radau_bracket_log_and_root(seed: int, m: int, below: float):
    A, v = symmetric(seed)
    A = A @ A + 1e-3 * torch.eye(14, dtype=f64)
    values, weights = measure(A, v)
    end = float(values[0]) * (1 - 0.999 * below)
    for f in (torch.log, torch.sqrt):
        low, high = bounds(*recurrence(A, v, m), f, end)
        truth = weights @ f(values)
        assert low - 1e-10 <= truth <= high + 1e-10
        if m < 6:
            assert low < high


def test_an_end_above_a_ritz_value_is_refused():
    with pytest.raises(ValueError, match=r"lower_end must be .* got 1\.5, but a Ritz value is 1; pass a smaller"):
        bounds(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.5]), torch.log, 1.5)


def test_a_broken_run_is_refused():
    with pytest.raises(ValueError, match="not finite: a product returned NaN"):
        gauss(torch.tensor([1.0, float("nan")]), torch.tensor([0.5]))


def test_an_infinite_level_is_refused():
    with pytest.raises(ValueError, match="level must be finite, got inf"):
        mass_bounds(torch.ones(2), torch.ones(2), float("inf"))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"got \(3,\) and \(3,\)"):
        gauss(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"residual as the last entry of beta, got \(3,\) and \(2,\)"):
        radau(torch.zeros(3), torch.zeros(2), 0.0)
    with pytest.raises(ValueError, match=r"got \(0,\) and \(0,\)"):
        gauss(torch.zeros(0), torch.zeros(0))
