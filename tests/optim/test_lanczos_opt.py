"""LanczosOpt against equation 9 with dense eigenpairs, and against Newton's step."""

import copy
import math
import warnings
from typing import Any

import cases
import pytest
import torch
from torch import Tensor, nn

import ritz
from ritz.errors import NumericalWarning
from ritz.operators.algebra import DenseOperator
from ritz.optim.damping import AutoDamping
from ritz.optim.lanczos_opt import LanczosOpt, ritz_pairs


class Quadratic(nn.Module):
    """w'H w / 2 - b'w, as one batch of one matrix."""

    def __init__(self, H: Tensor, b: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(len(H)))
        self.register_buffer("b", b)

    def forward(self, H: Tensor) -> Tensor:
        return (H @ self.w) @ self.w / 2 - self.b @ self.w


def mean_output(out: Tensor, target: Tensor) -> Tensor:
    return out.mean()


def quadratic(values: Tensor, seed: int = 0) -> tuple[Tensor, Quadratic, ritz.Risk]:
    H = cases.symmetric(values, seed)
    model = Quadratic(H, torch.randn(len(H), generator=torch.Generator().manual_seed(seed)))
    return H, model, ritz.Risk(model, mean_output, (H[None], torch.zeros(1)), plan=ritz.Plan(route="reverse"))


def take_step(model: Quadratic, optimizer: torch.optim.Optimizer, H: Tensor) -> Tensor:
    """One step of the user's loop; the gradient it was made with."""
    optimizer.zero_grad()
    model(H[None]).mean().backward()
    gradient = model.w.grad.clone()
    optimizer.step()
    return gradient


def equation_9(H: Tensor, g: Tensor, damping: float, eta: float, k: int) -> Tensor:
    """The bracket of equation 9, from the dense eigenpairs, the k largest by size."""
    values, vectors = torch.linalg.eigh(H)
    order = values.abs().argsort(descending=True)
    values, vectors = values[order].abs(), vectors[:, order]
    rates = torch.full_like(values, 1 / damping)
    rates[:k] = 1 / (eta * (values[:k] + damping))
    return vectors @ (rates * (vectors.T @ g))


SPIKED = torch.cat([torch.tensor([50.0, 40.0, 30.0, 20.0]), torch.linspace(0.0, 0.01, 26)])


@pytest.mark.parametrize("start", ["random", "grad"])
@pytest.mark.parametrize("eta", [1.0, 3.0, 10.0])
def test_a_step_is_that_of_equation_9(start, eta):
    """Four outliers above a bulk that is flat: after 8 steps the outliers have converged, the bulk has not."""
    H, model, risk = quadratic(SPIKED)
    optimizer = LanczosOpt(model.parameters(), risk, lr=0.5, damping=2.0, eta=eta, k=7, tol=1e-6, start=start)
    g = take_step(model, optimizer, H)
    assert optimizer.last["pairs"] == 4
    assert optimizer.last["products"] == 7
    torch.testing.assert_close(model.w.detach(), -0.5 * equation_9(H, g, 2.0, eta, 4), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("start", ["random", "grad"])
def test_with_all_pairs_it_is_a_damped_newton_step(start):
    H, model, risk = quadratic(torch.linspace(0.1, 9.0, 25))
    optimizer = LanczosOpt(model.parameters(), risk, lr=0.7, damping=0.3, k=25, start=start)
    g = take_step(model, optimizer, H)
    newton = torch.linalg.solve(H + 0.3 * torch.eye(25), g)
    torch.testing.assert_close(model.w.detach(), -0.7 * newton, rtol=1e-8, atol=1e-10)


def test_k_beyond_the_dimension_is_the_dimension():
    H, model, risk = quadratic(torch.tensor([1.0, 2.0, 5.0]))
    optimizer = LanczosOpt(model.parameters(), risk, lr=1.0, damping=0.5, k=50)
    g = take_step(model, optimizer, H)
    assert optimizer.last["products"] == 3
    torch.testing.assert_close(model.w.detach(), -torch.linalg.solve(H + 0.5 * torch.eye(3), g))


def test_each_direction_converges_at_its_known_rate():
    """The error along an eigenvector shrinks by 1 - alpha lambda / (eta (lambda + delta)) a step."""
    values = torch.linspace(0.5, 6.0, 10)
    H, model, risk = quadratic(values)
    optimizer = LanczosOpt(model.parameters(), risk, lr=0.5, damping=1.0, eta=2.0, k=10)
    _, vectors = torch.linalg.eigh(H)
    solution = torch.linalg.solve(H, model.b)
    before = vectors.T @ (model.w.detach() - solution)
    for _ in range(6):
        take_step(model, optimizer, H)
    after = vectors.T @ (model.w.detach() - solution)
    torch.testing.assert_close(after, before * (1 - 0.5 * values / (2.0 * (values + 1.0))) ** 6, rtol=1e-6, atol=1e-9)


def test_negative_curvature_counts_by_its_size():
    H, model, risk = quadratic(torch.tensor([-4.0, -1.0, 0.5, 3.0, 8.0]))
    optimizer = LanczosOpt(model.parameters(), risk, lr=1.0, damping=0.1, k=5)
    g = take_step(model, optimizer, H)
    torch.testing.assert_close(model.w.detach(), -equation_9(H, g, 0.1, 1.0, 5), rtol=1e-7, atol=1e-9)
    assert float(g @ model.w.detach()) < 0  # downhill, where Newton's step is not


def test_the_gauss_newton_matrix_can_take_the_place_of_the_hessian():
    problem = cases.make("mlp_weighted")
    risk = problem.risk()
    G, g = cases.dense_ggn(problem), cases.dense_gradient(problem)
    before = risk.space.join(risk.params()).clone()
    optimizer = LanczosOpt(
        problem.model.parameters(), risk, lr=1.0, damping=0.2, k=risk.dim, curvature="ggn", start="grad"
    )
    for p, part in zip(problem.model.parameters(), risk.space.split(g).values(), strict=True):
        p.grad = part.clone()
    optimizer.step()
    moved = risk.space.join(risk.params()) - before
    torch.testing.assert_close(moved, -torch.linalg.solve(G + 0.2 * torch.eye(risk.dim), g), rtol=1e-6, atol=1e-9)


def test_a_pair_that_has_not_converged_is_flat_and_tol_decides():
    H, model, risk = quadratic(torch.linspace(0.0, 10.0, 40))
    kept = []
    for tol in (0.0, 0.1, math.inf):
        optimizer = LanczosOpt(model.parameters(), risk, lr=0.0, damping=1.0, k=10, tol=tol)
        take_step(model, optimizer, H)
        kept.append(optimizer.last["pairs"])
    assert kept[0] == 0
    assert 0 < kept[1] < 10
    assert kept[2] == 10


def test_only_converged_pairs_are_kept_and_their_residuals_are_true():
    H = cases.symmetric(SPIKED)
    operator = DenseOperator(H)
    values, vectors, residuals = ritz_pairs(operator, operator.probes([0], 0, "normal"), 12)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(12), rtol=0, atol=1e-10)  # no ghosts
    true = (vectors @ H - values[:, None] * vectors).norm(dim=1)
    torch.testing.assert_close(residuals, true, rtol=1e-6, atol=1e-10)


def test_an_exhausted_space_gives_as_many_pairs_as_it_has():
    operator = DenseOperator(torch.diag(torch.tensor([2.0, 2.0, 2.0, 5.0])))
    values, vectors, residuals = ritz_pairs(operator, operator.probes([0], 0, "normal"), 4)
    torch.testing.assert_close(values, torch.tensor([2.0, 5.0]))
    assert vectors.shape == (2, 4)
    assert float(residuals.max()) < 1e-12


def test_a_zero_matrix_is_gradient_descent_at_the_rate_of_the_damping():
    H, model, risk = quadratic(torch.zeros(6))
    optimizer = LanczosOpt(model.parameters(), risk, lr=0.1, damping=0.5)
    g = take_step(model, optimizer, H)
    torch.testing.assert_close(model.w.detach(), -0.2 * g)


def test_heavy_damping_is_gradient_descent():
    H, model, risk = quadratic(torch.linspace(0.1, 9.0, 12))
    optimizer = LanczosOpt(model.parameters(), risk, lr=1e6 * 0.01, damping=1e6)
    g = take_step(model, optimizer, H)
    torch.testing.assert_close(model.w.detach(), -0.01 * g, rtol=1e-4, atol=0)


def test_a_step_within_autocast_is_the_step_without():
    """Loops that have all of a step in autocast: products with eigenvectors are not to be rounded to bfloat16."""
    found = []
    for within in (False, True):
        model, X, y = network()
        model, X = model.float(), X.float()
        risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
        optimizer = LanczosOpt(model.parameters(), risk, lr=0.1, damping=0.1, k=5, tol=math.inf)
        nn.functional.cross_entropy(model(X), y).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=within):
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(found[0], found[1])


# ------------------------------------------------------------------------------------- torch's conventions


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(24, 3), torch.randint(2, (24,))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, X: Tensor, y: Tensor, steps: int) -> list[Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def make(model: nn.Module, X: Tensor, y: Tensor, **options: Any) -> LanczosOpt:
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), plan=ritz.Plan(route="reverse"))
    return LanczosOpt(model.parameters(), risk, **{"lr": 0.3, "damping": 0.5, "k": 6, **options})


def test_a_resumed_run_goes_on_bit_for_bit():
    model, X, y = network()
    whole = trained(model, make(model, X, y), X, y, 6)
    model, _, _ = network()
    first = make(model, X, y)
    trained(model, first, X, y, 3)
    states = copy.deepcopy((model.state_dict(), first.state_dict()))
    model, _, _ = network()
    second = make(model, X, y)
    model.load_state_dict(states[0])
    second.load_state_dict(states[1])
    assert all(torch.equal(p, q) for p, q in zip(whole, trained(model, second, X, y, 3), strict=True))


def test_a_deep_copy_of_model_and_optimiser_trains_on_its_own():
    model, X, y = network()
    optimizer = make(model, X, y)
    other, copied = copy.deepcopy((model, optimizer))
    one, two = trained(model, optimizer, X, y, 2), trained(other, copied, X, y, 2)
    assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))
    assert copied.risk.model is other


def test_a_scheduler_and_a_closure_work_as_in_torch():
    model, X, y = network()
    optimizer = make(model, X, y)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), y)
        loss.backward()
        return loss

    for _ in range(3):
        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses[0] > losses[1] > losses[2]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 / 8)


def test_auto_damping_writes_its_damping():
    model, X, y = network()
    optimizer = make(model, X, y)
    damping = AutoDamping(optimizer, optimizer.risk, every=1, num_batches=4)
    trained(model, optimizer, X, y, 1)
    damping.step()
    assert optimizer.param_groups[0]["damping"] > 0.5


def test_frozen_and_unused_parameters_stay():
    problem = cases.make("frozen")
    risk = problem.risk()
    optimizer = LanczosOpt(problem.model.parameters(), risk, lr=1.0, damping=1.0, k=5)
    before = copy.deepcopy(problem.model.state_dict())
    X, y = problem.data
    problem.loss(problem.model(X), y).backward()
    optimizer.step()
    after = problem.model.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["2.weight"], after["2.weight"])
    problem = cases.make("unused")
    optimizer = LanczosOpt(problem.model.parameters(), problem.risk(), lr=1.0, damping=1.0, k=5)
    problem.loss(problem.model(problem.data[0]), problem.data[1]).backward()
    optimizer.step()
    assert torch.equal(problem.model.unused.detach(), torch.ones(3))


def test_without_a_gradient_nothing_is_done_and_a_zero_one_moves_nothing():
    model, X, y = network()
    optimizer = make(model, X, y)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_told():
    model, X, y = network()
    optimizer = make(model, X, y)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    for count in (1, 2):
        with pytest.warns(NumericalWarning, match=rf"the step is skipped \({count} so far\)") as told:
            optimizer.step()
        assert optimizer.skipped == count
        assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # the third is counted in silence: a run that is lost skips all its steps
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    again = make(model, X, y)
    again.load_state_dict(optimizer.state_dict())
    assert again.skipped == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "expected lr >= 0, damping > 0"),
        ({"eta": -1.0}, "eta > 0"),
        ({"k": 0}, "k >= 1"),
        ({"curvature": "fisher"}, "curvature must be 'hessian' or 'ggn'"),
        ({"start": "zero"}, "start must be 'random' or 'grad'"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    model, X, y = network()
    with pytest.raises(ValueError, match=message):
        make(model, X, y, **options)


def test_parameters_that_do_not_fit_the_risk_are_refused():
    model, X, y = network()
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
    with pytest.raises(ValueError, match=r"1 parameters are not parameters of the risk; the first has shape \(7,\)"):
        LanczosOpt([*model.parameters(), nn.Parameter(torch.ones(7))], risk)
    with pytest.raises(ValueError, match="expected one group, got 2"):
        LanczosOpt([{"params": model[0].parameters()}, {"params": model[2].parameters()}], risk)
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Sequential"):
        LanczosOpt(model.parameters(), model)
