"""The searches for the largest loss: against vertices, trust regions and grids; and the surface they climb."""

import itertools
import math

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ritz
from ritz.errors import NonFiniteError, WeightsMovedError
from ritz.measures.sharpness.ascent import Ball, Chart, Surface, climb_ball, climb_box, random_point
from ritz.space import ParamSpace


def quiet(done: int) -> None:
    """No progress."""


def quadratic(seed: int, dim: int, at_minimum: bool = False) -> tuple[ritz.Risk, torch.Tensor, torch.Tensor]:
    """A linear model with squared error: the risk, its gradient and its Hessian, from their formulas."""
    g = torch.Generator().manual_seed(seed)
    X, y = torch.randn(dim + 4, dim, generator=g), torch.randn(dim + 4, 1, generator=g)
    model = nn.Linear(dim, 1, bias=False)
    w = torch.linalg.lstsq(X, y).solution if at_minimum else torch.randn(dim, 1, generator=g)
    with torch.no_grad():
        model.weight.copy_(w.T)
    gradient = 2 * X.T @ (X @ w - y) / len(X)
    return ritz.Risk(model, nn.MSELoss(), (X, y), batch_size=5), gradient[:, 0], 2 * X.T @ X / len(X)


def highest_vertex(gradient: torch.Tensor, H: torch.Tensor, half: torch.Tensor) -> float:
    """max of g'd + d'Hd/2 over |d_i| <= half_i: a convex function has its maximum at a vertex."""
    vertices = half * torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(half))))
    return float((vertices @ gradient + ((vertices @ H) * vertices).sum(1) / 2).max())


def trust_region(gradient: torch.Tensor, H: torch.Tensor, rho: float) -> float:
    """max of g'd + d'Hd/2 over |d| <= rho for H >= 0: d = (mu - H)^-1 g with |d| = rho and mu >= lambda_1."""
    values, vectors = torch.linalg.eigh(H)
    b = vectors.T @ gradient
    low, high = float(values[-1]), float(values[-1] + gradient.norm() / rho + 1.0)
    for _ in range(200):
        mu = (low + high) / 2
        low, high = (mu, high) if (b / (mu - values)).norm() > rho else (low, mu)
    d = b / (high - values)
    return float(b @ d + (values * d.square()).sum() / 2)


# -------------------------------------------------------------------------------------------- the surface


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_surface_has_loss_and_gradient_of_the_moved_network(name):
    moved = cases.make(name)
    risk = cases.problem(name).risk()
    surface = Surface(risk, Chart(0.3))
    z = random_point(risk.space, "l2", 0, 1, surface.origin)
    with torch.no_grad():
        for p, d in zip(moved.params, risk.space.split(0.3 * z).values(), strict=True):
            p.add_(d)
    out, y, _ = cases.outputs_and_target(moved)
    loss, slope = surface.slope(z)
    assert loss == pytest.approx(moved.loss(out, y).item(), rel=1e-10)
    assert surface.loss(z) == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(slope, 0.3 * cases.dense_gradient(moved), rtol=1e-8, atol=1e-10)
    assert surface.evaluations == 2


def test_a_subspace_has_the_gradient_of_its_coordinates():
    risk, gradient, H = quadratic(0, 6)
    basis = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    chart, z = Chart(torch.tensor([0.5, 2.0]), basis), torch.tensor([0.3, -0.2])
    d = 0.15 * basis[0] - 0.4 * basis[1]
    loss, slope = Surface(risk, chart).slope(z)
    assert loss - risk.loss() == pytest.approx(float(gradient @ d + d @ H @ d / 2), rel=1e-10)
    torch.testing.assert_close(slope, torch.tensor([0.5, 2.0]) * (basis @ (gradient + H @ d)))


def test_batches_have_a_surface_of_their_own():
    risk, _, _ = quadratic(0, 3)
    (batch,) = risk.batches.sample(1, 2, seed=0)
    X, y = batch.data
    surface = Surface(risk, Chart(1.0), [batch])
    assert surface.loss(torch.zeros(3)) == pytest.approx(float((X @ surface.origin - y[:, 0]).square().mean()))


def test_parameters_that_take_no_part_have_gradient_0():
    risk = cases.problem("unused").risk().restrict("unused")
    loss, slope = Surface(risk, Chart(1.0)).slope(torch.ones(3))
    assert loss == pytest.approx(risk.loss())
    assert slope.tolist() == [0, 0, 0]


def test_weights_that_move_during_a_search_are_noticed():
    risk, _, _ = quadratic(0, 3)
    surface = Surface(risk, Chart(1.0))
    surface.loss(torch.zeros(3))
    with torch.no_grad():
        risk.model.weight.add_(1.0)
    with pytest.raises(WeightsMovedError, match="while the search was under way; measure a copy"):
        surface.loss(torch.zeros(3))


class Exponential(nn.Module):
    """exp(w x), which overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.w * x).exp()


def test_an_infinite_loss_on_the_way_is_an_error_that_names_the_remedy():
    risk = ritz.Risk(Exponential(), nn.MSELoss(), (torch.ones(1, 1), torch.zeros(1, 1)))
    with pytest.raises(NonFiniteError, match=r"the loss is inf at a point.*smaller rho or epsilon"):
        climb_ball(Surface(risk, Chart(1.0)), Ball(1000.0, "l2"), 5, 1, 0, quiet)


# ------------------------------------------------------------------------------------------------ the box


def box_and_truth(seed: int, dim: int, at_minimum: bool, num_starts: int = 2) -> tuple[float, float]:
    """The rise that the search finds in a box of unequal sides, and the largest there is."""
    risk, gradient, H = quadratic(seed, dim, at_minimum)
    half = torch.rand(dim, generator=torch.Generator().manual_seed(seed)) + 0.1
    surface = Surface(risk, Chart(half))
    starts = [torch.zeros(dim)]
    starts += [random_point(risk.space, "linf", i, 0, surface.origin) / 2 for i in range(num_starts - 1)]
    found = max(climb_box(surface, start, 20, quiet)[0] for start in starts) - risk.loss()
    return found, highest_vertex(gradient, H, half)


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), dim=st.integers(1, 7), at_minimum=st.booleans())
def test_no_loss_met_in_the_box_is_above_the_highest_vertex(seed, dim, at_minimum):
    found, truth = box_and_truth(seed, dim, at_minimum)
    assert 0 < found <= truth * (1 + 1e-10)


def test_the_box_search_comes_near_the_highest_vertex():
    # a vertex higher than all its neighbours need not be the highest: more starts find more
    parts = [box_and_truth(seed, 6, at_minimum=seed % 2 == 0, num_starts=6) for seed in range(16)]
    assert sum(found / truth for found, truth in parts) / len(parts) > 0.95


def test_a_separable_quadratic_is_climbed_to_its_highest_vertex():
    dim = 6
    X = torch.diag(torch.arange(1.0, dim + 1))
    model = nn.Linear(dim, 1, bias=False)
    risk = ritz.Risk(model, nn.MSELoss(), (X, torch.zeros(dim, 1)))
    w, half = model.weight.detach()[0], torch.full((dim,), 0.2)
    truth = float((X.diagonal().square() * ((w.abs() + half).square() - w.square())).mean())
    found, rested = climb_box(Surface(risk, Chart(half)), torch.zeros(dim), 20, quiet)
    assert found - risk.loss() == pytest.approx(truth, rel=1e-10)
    assert rested


def test_the_box_search_does_not_depend_on_the_scale_of_the_loss():
    risk, _, _ = quadratic(3, 5)
    surface = Surface(risk, Chart(0.1))
    small = Surface(
        ritz.Risk(risk.model, lambda out, y: 1e-9 * (out - y).square().mean(), risk.batches.source), Chart(0.1)
    )
    start = torch.full((5,), 0.2)
    rises = [climb_box(s, start, 5, quiet)[0] - s.loss(torch.zeros(5)) for s in (surface, small)]
    assert rises[1] == pytest.approx(1e-9 * rises[0], rel=1e-6)


# ----------------------------------------------------------------------------------------------- the ball


@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), dim=st.integers(1, 8), rho=st.floats(0.01, 3.0))
def test_the_ball_search_solves_a_trust_region_problem(seed, dim, rho):
    risk, gradient, H = quadratic(seed, dim)
    truth = trust_region(gradient, H, rho)
    found = climb_ball(Surface(risk, Chart(1.0)), Ball(rho, "l2"), 40, 2, 0, quiet)
    assert 0.99 * truth < found <= truth * (1 + 1e-9)


def test_the_cube_search_comes_near_the_highest_vertex_and_never_above():
    parts = []
    for seed in range(6):
        risk, gradient, H = quadratic(seed, 6)
        truth = highest_vertex(gradient, H, torch.full((6,), 0.5))
        parts.append(climb_ball(Surface(risk, Chart(1.0)), Ball(0.5, "linf"), 20, 3, 0, quiet) / truth)
    assert max(parts) <= 1 + 1e-9
    assert sum(parts) / len(parts) > 0.95


def test_more_starts_find_what_more_steps_from_two_do_not():
    # at a minimum every vertex of the cube that is higher than its neighbours holds an ascent
    short = []
    for seed in (3, 4, 7, 8):
        risk, gradient, H = quadratic(seed, 6, at_minimum=True)
        truth, ball = highest_vertex(gradient, H, torch.full((6,), 0.5)), Ball(0.5, "linf")
        surface = Surface(risk, Chart(1.0))
        assert climb_ball(surface, ball, 20, 8, 0, quiet) > 0.84 * truth
        assert surface.evaluations == 8 * (1 + 3) + 17
        short.append(climb_ball(surface, ball, 80, 2, 0, quiet) / truth)
    assert min(short) < 0.8


def test_at_a_minimum_only_a_random_start_finds_the_worst_direction():
    X = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    risk = ritz.Risk(model, nn.MSELoss(), (X, torch.zeros(3, 1)))  # gradient exactly 0, H = 2/3 diag(1, 4, 9)
    surface, ball = Surface(risk, Chart(1.0)), Ball(0.5, "l2")
    assert climb_ball(surface, ball, 20, 1, 0, quiet) == 0
    assert climb_ball(surface, ball, 40, 2, 0, quiet) == pytest.approx(0.5 * 6 * 0.25, rel=1e-6)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_maximum_inside_the_ball_is_found_by_shorter_steps(norm):
    target = torch.tensor([0.13, -0.21, 0.08])
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = torch.eye(3), target[:, None]
    risk = ritz.Risk(model, lambda out, y: -(out - y).square().mean(), data)  # -|w - target|^2 / 3
    rise = climb_ball(Surface(risk, Chart(1.0)), Ball(1.0, norm), 60, 1, 0, quiet)
    assert rise == pytest.approx(float(target.square().mean()), rel=1e-3)
    assert rise <= float(target.square().mean())


class TwoWeights(nn.Module):
    """b tanh(a x): two weights, so that a grid sees everything."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.8)), nn.Parameter(torch.tensor(-1.1))

    def forward(self, x):
        return self.b * torch.tanh(self.a * x)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("rho", [0.1, 0.7, 2.0])
def test_the_search_agrees_with_a_grid_where_the_loss_is_neither_convex_nor_concave(norm, rho):
    x = torch.linspace(-2, 2, 7)[:, None]
    risk = ritz.Risk(TwoWeights(), nn.MSELoss(), (x, torch.sin(2 * x)))
    line = torch.linspace(-rho, rho, 161)
    a, b = torch.meshgrid(line, line, indexing="ij")
    inside = (a.square() + b.square() <= rho**2) if norm == "l2" else torch.ones_like(a, dtype=torch.bool)
    out = (b - 1.1)[..., None] * torch.tanh((a + 0.8)[..., None] * x[:, 0])
    losses = (out - torch.sin(2 * x[:, 0])).square().mean(-1)
    truth = float(losses[inside].max()) - risk.loss()
    found = climb_ball(Surface(risk, Chart(1.0)), Ball(rho, norm), 40, 3, 0, quiet)
    assert found == pytest.approx(truth, rel=2e-2)


def test_the_centre_and_a_zero_gradient_stay_where_they_are():
    ball = Ball(2.0, "l2")
    assert ball.project(torch.zeros(3)).tolist() == [0, 0, 0]
    assert ball.steepest(torch.zeros(3)).tolist() == [0, 0, 0]
    assert Ball(2.0, "linf").steepest(torch.tensor([0.3, -7.0, 0.0])).tolist() == [1, -1, 0]
    space = ParamSpace(("w",), (torch.Size([3]),))
    assert float(ball.start(space, 1, 0, torch.zeros(3)).norm()) == pytest.approx(2.0)


def test_random_points_are_keyed_by_seed_index_and_name():
    space = cases.problem("mlp_relu").risk().space
    like = torch.zeros(0)
    for norm, spread in (("l2", 1.0), ("linf", 1 / math.sqrt(3))):
        a = random_point(space, norm, 0, 0, like)
        assert torch.equal(a, random_point(space, norm, 0, 0, like))
        for other in (random_point(space, norm, 1, 0, like), random_point(space, norm, 0, 1, like)):
            assert not torch.equal(a, other)
        many = torch.stack([random_point(space, norm, i, 0, like) for i in range(200)])
        assert float(many.std()) == pytest.approx(spread, rel=0.03)
        assert abs(float(many.mean())) < 0.03
