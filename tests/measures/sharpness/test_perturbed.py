"""Sharpness by displacement: against closed forms, and against what must not move it."""

import math

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ritz
from ritz.errors import UnsupportedError
from ritz.measures.sharpness.perturbed import (
    average_case_sharpness,
    epsilon_sharpness,
    logit_normalised,
    worst_case_sharpness,
)

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 4, generator=G), torch.randint(3, (20,), generator=G)
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def network(seed: int = 0) -> nn.Sequential:
    """A ReLU network with biases."""
    return cases.make("mlp_relu", seed).model


def diagonal_risk(*curvatures: float, weights: float = 0.0) -> ritz.Risk:
    """L = sum_i h_i w_i^2 / 2, at w_i = `weights`."""
    h = torch.tensor(curvatures)
    model = nn.Linear(len(h), 1, bias=False)
    nn.init.constant_(model.weight, weights)
    return ritz.Risk(model, MSE, (torch.diag((h * len(h) / 2).sqrt()), torch.zeros(len(h), 1)))


def rescaled(model: nn.Sequential, c: float) -> dict[str, torch.Tensor]:
    """The weights of the same function after Dinh's rescaling: first layer times c, second divided by it."""
    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"0.weight": c * w["0.weight"], "0.bias": c * w["0.bias"], "2.weight": w["2.weight"] / c}


class Scaled(nn.Module):
    """A network whose outputs are multiplied by a constant."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x):
        return self.factor * self.model(x) + 5.0


# -------------------------------------------------------------------------------------- epsilon-sharpness


def test_epsilon_sharpness_of_a_separable_quadratic_is_known():
    risk = diagonal_risk(1.0, 3.0, 0.5, weights=-2.0)
    loss, eps = 4.5 * 4 / 2, 0.05
    move = eps * (2 + 1)
    truth = 4.5 * ((2 + move) ** 2 - 4) / 2 / (1 + loss)
    found = epsilon_sharpness(risk, eps)
    assert found.value == pytest.approx(truth, rel=1e-9)
    assert found.bracket == (found.value, math.inf)
    assert found.stop == "stationary, a lower bound"


def test_epsilon_sharpness_at_an_exact_minimum_is_not_zero():
    risk, eps = diagonal_risk(1.0, 3.0), 0.1
    assert epsilon_sharpness(risk, eps).value == pytest.approx(4.0 * eps**2 / 2, rel=1e-9)
    assert epsilon_sharpness(risk, eps, num_starts=1).value == 0


def test_in_the_whole_space_as_a_subspace_the_box_is_that_of_the_coordinates():
    risk = diagonal_risk(1.0, 3.0, weights=1.0)
    A = risk.space.probes([0, 1], 7, "normal", dtype=torch.float64).T
    half = 0.1 * (torch.linalg.solve(A, torch.ones(2)).abs() + 1)
    vertices = torch.cartesian_prod(*([torch.tensor([-1.0, 1.0])] * 2)) * half
    points = 1 + vertices @ A.T
    truth = float(((points.square() @ torch.tensor([1.0, 3.0])) / 2).max()) - 2.0
    found = epsilon_sharpness(risk, 0.1, subspace=2, num_starts=6, seed=7)
    assert found.value == pytest.approx(truth / 3.0, rel=1e-8)


def test_a_random_subspace_holds_less_than_a_box_that_contains_it():
    risk = ritz.Risk(network(), CE, (X, Y))
    inside = epsilon_sharpness(risk, 1e-3, subspace=3)
    A = risk.space.probes(range(3), 0, "normal", dtype=torch.float64)
    w = risk.space.join(risk.params())
    half = 1e-3 * (torch.linalg.lstsq(A.T, w[:, None]).solution[:, 0].abs() + 1)
    reach = (A.abs() * half[:, None]).sum(0)  # |A y| stays below this, coordinate by coordinate
    factor = float((reach / (w.abs() + 1)).max())
    assert 0 < inside.value <= epsilon_sharpness(risk, factor, iterations=50).value
    assert "random subspace of 3" in inside.convention
    assert inside.value != epsilon_sharpness(risk, 1e-3, subspace=3, seed=1).value


def test_epsilon_sharpness_grows_with_the_box_and_states_its_convention():
    risk = ritz.Risk(network(), CE, (X, Y))
    small, large = (epsilon_sharpness(risk, eps) for eps in (1e-3, 2e-3))
    assert 0 < small.value < large.value
    for words in ("not times 100", "a lower bound of the maximum", "0.001", "20 samples"):
        assert words in small.convention
    assert small.products >= 4


def test_epsilon_sharpness_moves_under_a_rescaling_that_leaves_the_function():
    model = network()
    risk = ritz.Risk(model, CE, (X, Y))
    other = risk.at(rescaled(model, 4.0))
    assert other.loss() == pytest.approx(risk.loss(), rel=1e-12)
    assert epsilon_sharpness(other).value > 1.2 * epsilon_sharpness(risk).value


# ------------------------------------------------------------------------------------------ worst case


def test_one_step_is_that_of_sharpness_aware_minimisation():
    problem = cases.problem("mlp_mse")
    risk, g, rho = problem.risk(), cases.dense_gradient(problem), 0.1
    w = risk.space.join(risk.params())
    for scale, options in ((torch.ones_like(w), {}), (w.abs() + 0.01, {"adaptive": True, "eta": 0.01})):
        steps = {"l2": scale * (scale * g) / (scale * g).norm(), "linf": scale * g.sign()}
        for norm, d in steps.items():
            truth = risk.at(w + rho * d).loss() - risk.loss()
            found = worst_case_sharpness(risk, rho, norm=norm, steps=1, num_starts=9, **options)
            assert found.value == pytest.approx(truth, rel=1e-9)
            assert found.products == 2


def test_the_worst_case_at_a_minimum_is_the_largest_eigenvalue():
    risk, rho = diagonal_risk(1.0, 3.0, 0.1), 0.2
    assert worst_case_sharpness(risk, rho).value == pytest.approx(3.0 * rho**2 / 2, rel=1e-6)
    assert worst_case_sharpness(risk, rho, norm="linf").value == pytest.approx(4.1 * rho**2 / 2, rel=1e-9)


def test_the_adaptive_worst_case_measures_distance_in_units_of_the_weights():
    risk, rho = diagonal_risk(1.0, 3.0, weights=2.0), 0.1
    at = {"adaptive": True, "norm": "linf", "rho": rho}
    assert worst_case_sharpness(risk, **at).value == pytest.approx(4.0 * 4 * ((1 + rho) ** 2 - 1) / 2, rel=1e-9)
    wider = (2 + rho * 2.5) ** 2 - 4
    assert worst_case_sharpness(risk, **at, eta=0.5).value == pytest.approx(4.0 * wider / 2, rel=1e-9)


def test_weights_that_are_zero_do_not_move_adaptively_and_nothing_divides_by_them():
    risk = diagonal_risk(1.0, 3.0)
    assert worst_case_sharpness(risk, 0.1, adaptive=True).value == 0
    assert worst_case_sharpness(risk, 0.1, adaptive=True, eta=1.0).value > 0


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_adaptive_sharpness_is_invariant_to_the_rescaling_of_layers_and_plain_is_not(norm):
    model = network()
    risk = ritz.Risk(model, CE, (X, Y))
    other = risk.at(rescaled(model, 5.0))
    at = {"norm": norm, "rho": 0.3 if norm == "l2" else 0.02}
    for measure in (worst_case_sharpness, average_case_sharpness):
        same = [measure(r, adaptive=True, **at).value for r in (risk, other)]
        assert same[0] == pytest.approx(same[1], rel=1e-8)
        assert same[0] != 0
        moved = [measure(r, **at).value for r in (risk, other)]
        assert abs(moved[1] / moved[0] - 1) > 0.2


def test_the_worst_case_is_never_negative():
    # at the top of a hill every displacement lowers the loss
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    risk = ritz.Risk(model, lambda out, y: -(out - y).square().mean(), (torch.ones(2, 1), torch.zeros(2, 1)))
    found = worst_case_sharpness(risk, 0.5)
    assert found.value == 0
    assert average_case_sharpness(risk, 0.5).value < 0


def test_batches_of_one_sample_have_a_closed_form():
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(9, 3, generator=g), torch.randn(9, 1, generator=g)
    model = nn.Linear(3, 1, bias=False)
    risk, rho = ritz.Risk(model, MSE, (x, y)), 0.3
    r = (model(x) - y).detach()[:, 0].abs()
    rises = (r + rho * x.norm(dim=1)) ** 2 - r**2
    found = worst_case_sharpness(risk, rho, batch_size=1, steps=3)
    assert found.value == pytest.approx(float(rises.mean()), rel=1e-9)
    assert found.stderr == pytest.approx(float(rises.std()) / 3, rel=1e-9)
    torch.testing.assert_close(found.samples.sort().values, rises.sort().values)
    some = worst_case_sharpness(risk, rho, batch_size=1, num_batches=4, steps=3)
    assert len(some.samples) == 4
    assert set(some.samples.tolist()) <= set(found.samples.tolist())
    low, high = some.interval()
    assert 0 <= low < some.value
    assert high == math.inf  # a lower bound, however many batches


def test_smaller_batches_are_sharper():
    risk = ritz.Risk(network(), CE, (X, Y))
    values = [worst_case_sharpness(risk, 0.1, batch_size=m, steps=5).value for m in (4, 10, 20)]
    assert values[0] > values[1] > values[2]  # the mean of maxima is above the maximum of the mean
    assert values[2] == pytest.approx(worst_case_sharpness(risk, 0.1, steps=5).value, rel=1e-12)


def test_more_steps_never_find_less_than_the_first():
    risk = ritz.Risk(network(), CE, (X, Y))
    first = worst_case_sharpness(risk, 0.5, steps=1).value
    assert worst_case_sharpness(risk, 0.5, steps=10).value > first


@pytest.mark.parametrize("name", cases.NAMES)
def test_every_kind_of_network_has_a_worst_and_an_average_case(name):
    risk = cases.problem(name).risk()
    worst = worst_case_sharpness(risk, 0.1, steps=4)
    assert worst.value >= 0.1 * float(cases.dense_gradient(cases.problem(name)).norm()) * 0.5
    assert worst.value > average_case_sharpness(risk, 0.1 / math.sqrt(risk.dim), num_draws=2).value


def test_a_risk_without_outputs_and_one_in_float32_are_searched_all_the_same():
    def batch_loss(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

    x, y = torch.randn(8, 2, generator=G), torch.randn(8, 1, generator=G)
    model = nn.Linear(2, 1)
    truth = worst_case_sharpness(ritz.Risk(model, MSE, (x, y)), 0.2).value
    assert worst_case_sharpness(ritz.Risk(model, data=(x, y), batch_loss=batch_loss), 0.2).value == pytest.approx(truth)
    single = ritz.Risk(model, MSE, (x, y), dtype=torch.float32)
    assert worst_case_sharpness(single, 0.2).value == pytest.approx(truth, rel=1e-4)
    assert epsilon_sharpness(single, 0.1).value == pytest.approx(
        epsilon_sharpness(ritz.Risk(model, MSE, (x, y)), 0.1).value, rel=1e-3
    )


# ---------------------------------------------------------------------------------------- average case


@pytest.mark.parametrize(("norm", "factor"), [("l2", 1.0), ("linf", 1 / 3)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_average_case_of_a_quadratic_is_half_the_trace(norm, factor, adaptive):
    problem = cases.Problem(nn.Linear(3, 1), MSE, [(torch.randn(11, 3, generator=G), torch.zeros(11, 1))])
    risk, rho = problem.risk(), 0.3
    w = risk.space.join(risk.params())
    T = w.abs() + 0.1 if adaptive else torch.ones(4)
    H = T[:, None] * cases.dense_hessian(problem) * T
    options = {"adaptive": True, "eta": 0.1} if adaptive else {}
    found = average_case_sharpness(risk, rho, norm=norm, num_draws=200, **options)
    truth = factor * rho**2 * float(H.trace()) / 2
    assert abs(found.value - truth) < 4 * found.stderr < truth
    if norm == "l2":  # draw by draw: the gradient cancels
        z = risk.space.probes(range(200), 0, "normal", dtype=torch.float64)
        torch.testing.assert_close(found.samples, rho**2 * ((z @ H) * z).sum(1) / 2, rtol=1e-7, atol=1e-12)


def test_the_average_case_says_what_rho_is_and_pairs_checkpoints():
    risk = ritz.Risk(network(), CE, (X, Y))
    found = average_case_sharpness(risk, 0.02, num_draws=3)
    assert "normal with standard deviation 0.02" in found.convention
    assert "uniform with half-width 0.02" in average_case_sharpness(risk, 0.02, norm="linf", num_draws=1).convention
    assert found.products == 7
    assert found == average_case_sharpness(risk, 0.02, num_draws=3)
    assert found != average_case_sharpness(risk, 0.02, num_draws=3, seed=1)


def test_one_draw_has_no_error_of_its_own():
    found = average_case_sharpness(diagonal_risk(1.0), 0.1, num_draws=1)
    assert math.isnan(found.stderr)
    assert found.interval() == (-math.inf, math.inf)


# ---------------------------------------------------------------------------------- logit normalisation


def normalised_loss(out: torch.Tensor, y: torch.Tensor, **options) -> torch.Tensor:
    """By hand, classes in dimension 1."""
    centred = out - out.mean(1, keepdim=True)
    return F.cross_entropy(centred / centred.norm(dim=1, keepdim=True), y, **options)


def test_the_normalised_risk_has_the_loss_and_hessian_of_normalised_logits():
    problem = cases.make("mlp_weighted")
    risk = logit_normalised(problem.risk())
    x, y = problem.data
    truth = normalised_loss(problem.model(x), y, weight=problem.loss.weight)
    assert risk.loss() == pytest.approx(truth.item(), rel=1e-12)
    H = cases.hessian_of(truth, problem.params)
    torch.testing.assert_close(ritz.Hessian(risk).dense(), H, rtol=1e-8, atol=1e-10)
    assert "logits centred" in risk.convention()


def test_the_normalised_risk_of_a_piecewise_linear_network_has_no_exact_trace_by_roots():
    problem = cases.make("mlp_relu")
    risk = logit_normalised(problem.risk())
    x, y = problem.data
    H = cases.hessian_of(normalised_loss(problem.model(x), y), problem.params)
    found = ritz.trace(ritz.Hessian(risk), num_probes=30)
    assert not found.exact
    assert abs(found.value - float(H.trace())) < 4 * found.stderr


def test_classes_are_found_where_the_loss_has_them():
    problem = cases.problem("pixels")
    x, y = problem.data
    truth = normalised_loss(problem.model(x), y, weight=problem.loss.weight, ignore_index=-1)
    assert logit_normalised(problem.risk()).loss() == pytest.approx(truth.item(), rel=1e-12)
    problem = cases.problem("language")
    x, y = problem.data
    truth = normalised_loss(problem.model(x).movedim(-1, 1), y)
    assert logit_normalised(problem.risk()).loss() == pytest.approx(truth.item(), rel=1e-12)


def test_normalised_sharpness_does_not_see_the_scale_or_shift_of_the_outputs():
    model = network()
    risks = [ritz.Risk(m, CE, (X, Y)) for m in (Scaled(model, 1.0), Scaled(model, 7.0))]
    plain = [worst_case_sharpness(r, 0.1).value for r in risks]
    assert plain[1] > 1.5 * plain[0]
    for measure in (worst_case_sharpness, average_case_sharpness, epsilon_sharpness):
        values = [measure(logit_normalised(r)).value for r in risks]
        assert values[0] == pytest.approx(values[1], rel=1e-8)


def test_adaptive_and_normalised_together_do_not_see_the_scale_of_the_last_layer():
    risk = ritz.Risk(network(), CE, (X, Y))
    params = risk.params()
    scaled = risk.at({name: 3.0 * params[name] for name in ("2.weight", "2.bias")})
    values = [worst_case_sharpness(logit_normalised(r), 0.2, adaptive=True).value for r in (risk, scaled)]
    assert values[0] == pytest.approx(values[1], rel=1e-8)
    moved = [worst_case_sharpness(r, 0.2, adaptive=True).value for r in (risk, scaled)]
    assert abs(moved[1] / moved[0] - 1) > 0.2


def test_equal_logits_stay_zero_with_finite_derivatives():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    risk = logit_normalised(ritz.Risk(model, CE, (X, Y)))
    assert risk.loss() == pytest.approx(math.log(3))
    assert bool(risk.gradient().isfinite().all())


def test_the_risk_that_was_normalised_is_as_before():
    risk = ritz.Risk(network(), CE, (X, Y))
    before = risk.loss()
    other = logit_normalised(risk)
    assert other.loss() != pytest.approx(before)
    assert risk.loss() == before
    assert "logits" not in risk.convention()


# ------------------------------------------------------------------------------------------- all of them


def risk_of(loss=CE, **keywords) -> ritz.Risk:
    return ritz.Risk(network(), loss, (X, Y), **keywords)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: epsilon_sharpness(network()), TypeError, "expected a ritz.Risk, got Sequential"),
        (lambda: epsilon_sharpness(risk_of(), 0.0), ValueError, "epsilon must be a positive number, got 0.0"),
        (lambda: epsilon_sharpness(risk_of(), iterations=0), ValueError, "iterations and num_starts.* got 0 and 2"),
        (lambda: epsilon_sharpness(risk_of(), num_starts=0), ValueError, "iterations and num_starts.* got 10 and 0"),
        (lambda: epsilon_sharpness(risk_of(), subspace=0), ValueError, "subspace must lie between 1 and .* 51, got 0"),
        (lambda: epsilon_sharpness(risk_of(), subspace=99), ValueError, "between 1 and .* 51, got 99"),
        (lambda: worst_case_sharpness(None), TypeError, "expected a ritz.Risk, got NoneType"),
        (lambda: worst_case_sharpness(risk_of(), -1.0), ValueError, "rho must be a positive number, got -1.0"),
        (lambda: worst_case_sharpness(risk_of(), math.nan), ValueError, "rho must be a positive number, got nan"),
        (lambda: worst_case_sharpness(risk_of(), norm="l1"), ValueError, "norm must be 'l2' or 'linf', got 'l1'"),
        (lambda: worst_case_sharpness(risk_of(), steps=0), ValueError, "steps and num_starts .* got 0 and 8"),
        (lambda: worst_case_sharpness(risk_of(), eta=0.01), ValueError, "adaptive=True switches on"),
        (
            lambda: worst_case_sharpness(risk_of(), adaptive=True, eta=-1),
            ValueError,
            "eta must be finite and not negative",
        ),
        (lambda: worst_case_sharpness(risk_of(), num_batches=2), ValueError, "give batch_size= as well"),
        (lambda: worst_case_sharpness(risk_of(), batch_size=0), ValueError, "must be at least 1, got 20 and 0"),
        (lambda: worst_case_sharpness(risk_of(), batch_size=21), ValueError, "take fewer or smaller batches"),
        (lambda: average_case_sharpness(risk_of(), num_draws=0), ValueError, "num_draws must be at least 1, got 0"),
        (lambda: average_case_sharpness(risk_of(), math.inf), ValueError, "rho must be a positive number, got inf"),
        (lambda: logit_normalised(network()), TypeError, "expected a ritz.Risk, got Sequential"),
        (lambda: logit_normalised(diagonal_risk(1.0)), UnsupportedError, "is for cross-entropy, got SquaredError"),
    ],
)
def test_bad_input_is_refused_before_any_work(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_one_class_cannot_be_normalised():
    risk = ritz.Risk(nn.Linear(4, 1), CE, (X, torch.zeros(20, dtype=torch.long)))
    with pytest.raises(UnsupportedError, match="at least 2 classes"):
        logit_normalised(risk).loss()


def test_a_loss_below_minus_one_has_no_epsilon_sharpness():
    risk = ritz.Risk(nn.Linear(4, 1), lambda out, y: out.square().mean() - 100, (X, Y))
    with pytest.raises(ValueError, match=r"divides by 1 \+ L, and L is -"):
        epsilon_sharpness(risk)


MEASURES = {
    "epsilon": lambda risk, **k: epsilon_sharpness(risk, iterations=3, **k),
    "subspace": lambda risk, **k: epsilon_sharpness(risk, iterations=3, subspace=5, **k),
    "worst": lambda risk, **k: worst_case_sharpness(risk, steps=3, **k),
    "m-sharpness": lambda risk, **k: worst_case_sharpness(risk, steps=3, batch_size=5, **k),
    "average": lambda risk, **k: average_case_sharpness(risk, num_draws=3, **k),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_is_the_same_whatever_gradient_mode_it_is_called_in(name):
    risk = ritz.Risk(network(), CE, (X, Y))
    found = MEASURES[name](risk)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            assert MEASURES[name](risk).value == found.value


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_in_16_bits_is_moved_in_float32(name, dtype):
    model = network().to(dtype)  # a weight of 0.5 has its neighbours at +- 0.002 in bfloat16
    single = ritz.Risk(model, CE, (X.to(dtype), Y), dtype=torch.float32)
    found = MEASURES[name](ritz.Risk(model, CE, (X.to(dtype), Y)))
    assert found.value == MEASURES[name](single).value
    assert "float32" in found.convention
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_leaves_the_model_alone_repeats_itself_reports_progress_and_can_be_saved(name, tmp_path):
    model = network().train()
    model(X).sum().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    grads, rng = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    seen = []
    risk = ritz.Risk(model, CE, (X, Y))
    found = MEASURES[name](risk, progress=lambda done, total: seen.append((done, total)))
    assert found == MEASURES[name](risk)
    assert found == ritz.load(found.save(tmp_path / "result"))
    assert found.plot() is not None
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
