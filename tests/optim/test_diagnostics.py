"""Rates and stability of preconditioned methods, against dense algebra and against runs that do or do not diverge."""

import math
from collections.abc import Callable

import cases
import pytest
import torch
from torch import Tensor, nn

import ritz
from ritz.errors import NumericalWarning
from ritz.operators.algebra import DenseOperator, FunctionOperator
from ritz.optim.diagnostics import (
    Preconditioned,
    bulk_share,
    direction_rates,
    rate_ratio,
    reduction_ratio,
    sgd_rate,
    stable_rate,
)
from ritz.optim.directions import adam_inverse_root

VALUES = torch.tensor([0.0, 0.1, 0.5, 1.0, 4.0, 9.0])


# ------------------------------------------------------------------------------------------ rates


def test_the_ratio_is_that_of_the_fastest_and_the_slowest_direction():
    ratio = rate_ratio(VALUES, damping=0.3)
    rates = direction_rates(VALUES, lr=0.7, damping=0.3).value
    assert float(ratio) == pytest.approx(float(rates.max() / rates.min()))
    assert ratio.exact
    assert float(rate_ratio(VALUES, damping=1e9)) == pytest.approx(1.0)


def test_rates_are_what_the_damped_inverse_does_to_an_eigenvector():
    H = cases.symmetric(VALUES)
    values, vectors = torch.linalg.eigh(H)
    steps = 0.2 * torch.linalg.solve(H + 0.3 * torch.eye(6), vectors)
    torch.testing.assert_close(direction_rates(values, 0.2, 0.3).value, (vectors * steps).sum(0))


def test_equation_9_divides_the_rates_of_the_sharpest_directions():
    rates = direction_rates(VALUES.flip(0), lr=1.0, damping=1.0, eta=10.0, k=2).value
    torch.testing.assert_close(rates, torch.tensor([0.01, 0.02, 0.5, 1 / 1.5, 1 / 1.1, 1.0]))


def test_the_ratio_of_a_spectrum_has_the_bracket_of_its_ends():
    H = DenseOperator(cases.symmetric(torch.linspace(1.0, 20.0, 300)))
    ratio = rate_ratio(ritz.spectrum(H, num_steps=30, num_probes=4), damping=2.0)
    low, high = ratio.interval()
    assert low <= 22 / 3 <= high
    assert float(ratio) == pytest.approx(22 / 3, rel=0.1)


def test_heavy_damping_is_gradient_descent_at_the_equivalent_rate():
    rates = direction_rates(VALUES, lr=1e4, damping=1e6).value
    torch.testing.assert_close(rates, torch.full((6,), float(sgd_rate(1e4, 1e6))), rtol=1e-4, atol=0)


def test_the_share_in_the_bulk_is_that_of_the_step_projected_on_it():
    H = cases.symmetric(VALUES)
    values, vectors = torch.linalg.eigh(H)
    g = torch.randn(6, generator=torch.Generator().manual_seed(0))
    step = torch.linalg.solve(H + 0.2 * torch.eye(6), g)
    flat = vectors[:, values <= 0.6]
    truth = float((flat.T @ step).square().sum() / step.square().sum())
    assert float(bulk_share(values, vectors.T @ g, damping=0.2, edge=0.6)) == pytest.approx(truth)
    assert math.isnan(float(bulk_share(values, torch.zeros(6), damping=0.2, edge=0.6)))


# ------------------------------------------------------------------------------------------ stability


def gradient_descent(H: Tensor, solve: Callable[[Tensor], Tensor], lr: float, rho: float) -> float:
    """|w| after many steps from ones."""
    w = torch.ones(len(H))
    for _ in range(400):
        w = w - lr * solve(H @ w)
    return float(w.norm())


def heavy_ball(H: Tensor, solve: Callable[[Tensor], Tensor], lr: float, rho: float) -> float:
    w, m = torch.ones(len(H)), torch.zeros(len(H))
    for _ in range(2000):
        m = rho * m + solve(H @ w)
        w = w - lr * m
    return float(w.norm())


def nesterov(H: Tensor, solve: Callable[[Tensor], Tensor], lr: float, rho: float) -> float:
    w, m = torch.ones(len(H)), torch.zeros(len(H))
    for _ in range(2000):
        g = solve(H @ w)
        m = rho * m + g
        w = w - lr * (g + rho * m)
    return float(w.norm())


def average(H: Tensor, solve: Callable[[Tensor], Tensor], lr: float, rho: float) -> float:
    """Adam's first moment before a preconditioner that stands still."""
    w, m = torch.ones(len(H)), torch.zeros(len(H))
    for _ in range(2000):
        m = rho * m + (1 - rho) * (H @ w)
        w = w - lr * solve(m)
    return float(w.norm())


@pytest.mark.parametrize(
    ("run", "kind", "rho"),
    [
        (gradient_descent, "heavy_ball", 0.0),
        (heavy_ball, "heavy_ball", 0.9),
        (nesterov, "nesterov", 0.9),
        (average, "average", 0.9),
    ],
)
def test_runs_converge_below_the_stable_rate_and_diverge_above_it(run, kind, rho):
    """B and H do not commute, so that the bound by the diagonal of H in the basis of B would not do."""
    H, B = cases.symmetric(torch.linspace(0.5, 6.0, 8), 1), cases.symmetric(torch.linspace(0.2, 3.0, 8), 2)
    values, vectors = torch.linalg.eigh(B)
    root = (vectors * values.rsqrt()) @ vectors.T
    rate = stable_rate(DenseOperator(H), lambda rows: rows @ root, momentum=rho, kind=kind, tol=1e-8)
    assert run(H, lambda g: torch.linalg.solve(B, g), 0.98 * float(rate), rho) < 1e-2
    assert run(H, lambda g: torch.linalg.solve(B, g), 1.02 * float(rate), rho) > 1e2


def test_equation_19_is_an_upper_bound_only():
    H, B = cases.symmetric(torch.linspace(0.5, 6.0, 8), 1), cases.symmetric(torch.linspace(1.0, 1.5, 8), 2)
    values, vectors = torch.linalg.eigh(B)
    root = (vectors * values.rsqrt()) @ vectors.T
    paper = 2 / float(((vectors * (H @ vectors)).sum(0) / values).max())
    rate = float(stable_rate(DenseOperator(H), lambda rows: rows @ root))
    assert rate < 0.9 * paper
    commuting = float(stable_rate(DenseOperator(B @ B), lambda rows: rows @ root))  # B^-1/2 B^2 B^-1/2 = B
    assert commuting == pytest.approx(2 / 1.5, rel=1e-6)


def test_the_stable_rate_of_a_large_matrix_lies_in_its_bracket():
    H = DenseOperator(cases.symmetric(cases.spiked(300)))
    rate = stable_rate(H, momentum=0.9)
    assert float(rate) == pytest.approx(3.8 / 300, rel=1e-5)
    low, high = rate.interval()
    assert low <= 3.8 / 300 * (1 + 1e-12)
    assert high >= 3.8 / 300 * (1 - 1e-12)
    assert rate.products > 0


@pytest.mark.parametrize("num_steps", [4, 8, 30])
def test_the_ratio_of_a_short_run_lies_in_its_interval(num_steps):
    """The extreme Ritz values are within the spectrum; what they have not reached counts."""
    eigenvalues = torch.cat([torch.linspace(0.1, 0.9, 1998), torch.tensor([0.01, 1.0])]).double()
    A = FunctionOperator(lambda V: eigenvalues[:, None] * V, 2000, torch.float64)
    A.positive = True
    for seed in range(10):
        s = ritz.spectrum(A, num_steps, 2, seed=seed, reorthogonalize="none")
        low, high = rate_ratio(s, damping=0.01).interval()
        assert low <= 1.01 / 0.02 <= high
    assert high < math.inf or num_steps == 4


@pytest.mark.parametrize("max_products", [8, 20, 40])
def test_the_stable_rate_of_a_search_that_was_cut_lies_in_its_interval(max_products):
    """The value is too large, which is the dangerous side; the interval knows."""
    eigenvalues = torch.cat([torch.linspace(-0.9, 0.9, 2999), torch.ones(1)]).double()
    H = FunctionOperator(lambda V: eigenvalues[:, None] * V, 3000, torch.float64)
    for seed in range(10):
        with pytest.warns(NumericalWarning, match="raise max_products"):
            rate = stable_rate(H, momentum=0.5, max_products=max_products, seed=seed)
        low, high = rate.interval()
        assert low <= 2 * 1.5 <= float(rate) <= high
    assert rate.stop == "max_products"
    assert low > 2 if max_products == 40 else low >= 0


def test_without_positive_curvature_every_rate_is_stable():
    assert float(stable_rate(DenseOperator(-torch.eye(3)))) == math.inf
    assert float(stable_rate(DenseOperator(torch.zeros(3, 3)))) == math.inf


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adams_preconditioner_is_the_one_that_its_step_divides_by(amsgrad):
    """A step with b1 = 0 is -lr g / B."""
    problem = cases.make("mlp_weighted")
    risk = problem.risk()
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=1e-3, betas=(0.0, 0.9), eps=0.01, amsgrad=amsgrad)
    X, y = problem.data
    for _ in range(3):
        optimizer.zero_grad()
        problem.loss(problem.model(X), y).backward()
        before = risk.space.join(risk.params()).clone()
        optimizer.step()
    g = torch.cat([p.grad.flatten() for p in problem.model.parameters()])
    moved = risk.space.join(risk.params()) - before
    torch.testing.assert_close(moved, -1e-3 * g * adam_inverse_root(optimizer, risk) ** 2)


def test_the_stable_rate_under_adam_is_that_of_the_dense_matrix():
    problem = cases.make("mlp_weighted")
    risk = problem.risk()
    optimizer = torch.optim.Adam(problem.model.parameters(), eps=0.1)
    X, y = problem.data
    problem.loss(problem.model(X), y).backward()
    optimizer.step()
    root = adam_inverse_root(optimizer, risk)
    H = cases.dense_hessian(problem)
    truth = 2 * 1.9 / 0.1 / float(torch.linalg.eigvalsh(root[:, None] * H * root)[-1])
    rate = stable_rate(ritz.Hessian(risk), root, momentum=0.9, kind="average")
    assert float(rate) == pytest.approx(truth, rel=1e-5)


def test_preconditioned_operators_pass_the_conformance_checks():
    A = DenseOperator(cases.symmetric(torch.linspace(0.5, 6.0, 8)))
    ritz.testing.check_operator(Preconditioned(A, torch.linspace(0.5, 2.0, 8)))


# ------------------------------------------------------------------------------------------ reduction ratio


def test_a_quadratic_loss_goes_as_foretold_and_a_step_uphill_has_no_ratio():
    problem = cases.make("mlp_mse")
    model = nn.Linear(3, 2)
    risk = ritz.Risk(model, nn.MSELoss(), problem.data)
    before = risk.space.join(risk.params()).clone()
    g = risk.gradient()
    for lr in (0.1, 0.5):
        assert float(reduction_ratio(risk.at(before - lr * g), before)) == pytest.approx(1.0)
    assert math.isnan(float(reduction_ratio(risk.at(before + 0.1 * g), before)))
    assert math.isnan(float(reduction_ratio(risk, before)))


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_the_ratio_is_change_over_foretold_change(curvature):
    problem = cases.make("mlp_weighted")
    risk = problem.risk()
    M = {"ggn": cases.dense_ggn, "hessian": cases.dense_hessian}[curvature](problem)
    g = cases.dense_gradient(problem)
    before = risk.space.join(risk.params()).clone()
    for lr in (0.1, 3.0):
        d = -lr * g
        foretold = float(g @ d + d @ (M + 0.2 * torch.eye(len(d))) @ d / 2)
        after = risk.at(before + d)
        ratio = float(reduction_ratio(after, risk.space.split(before), damping=0.2, curvature=curvature))
        if foretold < 0:
            assert ratio == pytest.approx((after.loss() - risk.loss()) / foretold)
        else:
            assert math.isnan(ratio)


def test_a_step_that_goes_up_where_down_was_foretold_has_a_negative_ratio():
    """The loss log(1 + exp(-w)) + w^4: the Gauss-Newton model at 0 knows nothing of the fourth power."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return (nn.functional.softplus(-out) + out**4).mean()

    risk = ritz.Risk(model, loss, (torch.ones(1, 1), torch.zeros(1, 1)))
    assert float(reduction_ratio(risk.at(torch.tensor([1.5])), torch.tensor([0.0]))) < 0


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rate_ratio(torch.tensor([-1.0, 2.0]), 0.5), "does not lift the smallest eigenvalue, -1, above 0"),
        (lambda: direction_rates(torch.zeros(2), 0.1, 0.0), "does not lift the smallest eigenvalue"),
        (lambda: sgd_rate(0.1, 0.0), "does not lift"),
        (lambda: bulk_share(torch.ones(3), torch.ones(2), 1.0, 1.0), r"of one shape \(r,\), got \(3,\) and \(2,\)"),
        (lambda: stable_rate(DenseOperator(torch.eye(2)), momentum=1.0), r"momentum must lie in \[0, 1\), got 1.0"),
        (lambda: stable_rate(DenseOperator(torch.eye(2)), kind="adam"), "kind must be one of heavy_ball"),
        (lambda: stable_rate(DenseOperator(torch.eye(2)), torch.ones(3)), r"the diagonal of B\^-1/2, \(dim=2,\)"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_adam_without_a_step_is_refused():
    model = nn.Linear(2, 1)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 1)))
    with pytest.raises(ValueError, match=r"Adam holds no squared gradients of weight; take a step first"):
        adam_inverse_root(torch.optim.Adam(model.parameters()), risk)
