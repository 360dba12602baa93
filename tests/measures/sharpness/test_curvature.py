"""Flatness from curvature and outputs: against dense matrices, closed forms and invariances."""

import itertools
import math
from dataclasses import replace

import cases
import pytest
import torch
from torch import nn

import ritz
from ritz.errors import NumericalWarning, UnsupportedError
from ritz.measures.sharpness.curvature import (
    epsilon_sharpness_quadratic,
    fisher_rao_norm,
    layer_spectral_norms,
    relative_flatness,
    stability_limit,
    taylor_shift,
    top_log_product,
)
from ritz.operators import DenseOperator, FunctionOperator
from ritz.results import Estimate
from ritz.space import ParamSpace

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def dense(*eigenvalues: float) -> DenseOperator:
    return DenseOperator(cases.symmetric(torch.tensor(eigenvalues)))


def bias_free(*sizes: int, seed: int = 0) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A ReLU network without biases, homogeneous of its depth in the weights, and data for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b, bias=False), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), torch.randn(13, sizes[0]), torch.randint(sizes[-1], (13,))


def rescaled(risk: ritz.Risk, c: float) -> ritz.Risk:
    """The same function of a two-layer ReLU network at other weights (Dinh et al. 2017)."""
    w = risk.params()
    first = {name: c * w[name] for name in w if name.startswith("0.")}
    return risk.at({**first, "2.weight": w["2.weight"] / c})


# ----------------------------------------------------------------------------------- from a known spectrum


def test_the_quadratic_form_of_epsilon_sharpness_carries_the_interval_of_lambda_max():
    top = ritz.spectrum(DenseOperator(cases.symmetric(cases.spiked(200))), num_steps=10, num_probes=2).lambda_max
    found, factor = epsilon_sharpness_quadratic(top, loss=3.0, epsilon=0.2), 0.04 / 8
    assert found.value == pytest.approx(top.value * factor)
    assert found.interval() == pytest.approx(tuple(factor * end for end in top.interval()))
    assert found.bracket == pytest.approx(tuple(factor * end for end in top.bracket))
    assert "eps = 0.2" in found.convention


def test_at_a_minimum_the_quadratic_form_is_the_search_in_a_small_ball():
    from ritz.measures.sharpness.perturbed import worst_case_sharpness

    g = torch.Generator().manual_seed(0)
    X = torch.randn(9, 3, generator=g)
    model = nn.Linear(3, 1, bias=False)
    risk = ritz.Risk(model, MSE, (X, X @ model.weight.detach().T))  # loss 0
    top = ritz.spectrum(ritz.Hessian(risk)).lambda_max
    quadratic = epsilon_sharpness_quadratic(top, risk.loss(), epsilon=0.1)
    assert worst_case_sharpness(risk, 0.1, steps=60).value == pytest.approx(quadratic.value, rel=1e-6)


def test_the_taylor_shift_has_the_half_that_the_seeds_leave_out():
    problem = cases.problem("mlp_mse")
    H = cases.truth("mlp_mse", "Hessian")
    found = taylor_shift(ritz.spectrum(ritz.Hessian(problem.risk()), num_steps=60), rho=0.3)
    g = torch.Generator().manual_seed(0)
    d = torch.randn(20_000, len(H), generator=g)
    d = 0.3 * d / d.norm(dim=1, keepdim=True)
    forms = ((d @ H) * d).sum(1) / 2
    assert found.value == pytest.approx(float(forms.mean()), rel=0.05)
    assert found.value == pytest.approx(0.09 * float(H.trace()) / len(H) / 2, rel=1e-8)
    worst = found.parts["worst"]
    assert worst.value == pytest.approx(0.045 * float(torch.linalg.eigvalsh(H)[-1]), rel=1e-8)
    assert float(forms.max()) < worst.value
    assert "rho^2 Tr H / (2 P)" in found.convention


def test_a_sampled_trace_keeps_its_error_in_the_taylor_shift():
    s = ritz.spectrum(DenseOperator(cases.symmetric(cases.spiked(200))), num_steps=10, num_probes=3)
    found = taylor_shift(s, rho=2.0)
    assert found.stderr == pytest.approx(s.trace.stderr * 4 / 400)
    assert found.interval() == pytest.approx(tuple(end * 4 / 400 for end in s.trace.interval()))


def test_gradient_descent_diverges_just_above_the_stability_limit_and_not_below():
    H = cases.symmetric(torch.tensor([0.1, 1.0, 4.0]))
    limit = stability_limit(ritz.spectrum(DenseOperator(H)).lambda_max)
    assert limit.value == pytest.approx(0.5)
    sizes = []
    for rate in (0.98 * limit.value, 1.02 * limit.value):
        w = torch.ones(3)
        for _ in range(400):
            w = w - rate * H @ w
        sizes.append(float(w.norm()))
    assert sizes[0] < 1 < 1e3 < sizes[1]


def test_the_stability_limit_turns_the_interval_over():
    top = ritz.spectrum(DenseOperator(cases.symmetric(cases.spiked(200))), num_steps=12, num_probes=2).lambda_max
    for level in (0.95, 0.999):
        low, high = top.interval(level)
        assert stability_limit(top).interval(level) == pytest.approx((2 / high, 2 / low))
    assert stability_limit(top).value == pytest.approx(2 / top.value)


def test_without_a_positive_eigenvalue_every_learning_rate_is_below_the_limit():
    limit = stability_limit(ritz.spectrum(dense(-1.0, -2.0)).lambda_max)
    assert limit.value == math.inf
    assert limit.exact
    assert limit.interval() == (math.inf, math.inf)
    assert limit.stop == "no eigenvalue is positive: there is no limit"


# ---------------------------------------------------------------------------------- eigenvalues and blocks


def test_the_log_product_of_the_top_k_is_the_sum_of_logarithms():
    values = cases.spiked(60)
    found = top_log_product(DenseOperator(cases.symmetric(values)), k=5)
    truth = float(values.sort(descending=True).values[:5].log().sum())
    assert found.value == pytest.approx(truth, rel=1e-8)
    assert found.bracket[0] <= truth <= found.bracket[1]
    assert "5 largest eigenvalues, 0 of them left out" in found.convention


def test_what_is_not_positive_is_left_out_and_counted():
    found = top_log_product(dense(8.0, 2.0, 0.0, -5.0), k=4)
    assert found.value == pytest.approx(math.log(16), rel=1e-9)
    assert "4 largest eigenvalues, 2 of them left out" in found.convention
    assert top_log_product(dense(8.0, 2.0), k=10).convention.startswith("sum of log lambda_i over the 2 largest")


def test_what_a_search_that_was_cut_does_not_know_is_not_called_round_off():
    pairs = replace(ritz.top_eigenpairs(dense(8.0, 2.0), 1), residuals=torch.tensor([9.0]))
    with pytest.raises(UnsupportedError, match="its own residual, the largest is 8, known to 9"):
        top_log_product(pairs, k=1)


def test_a_matrix_of_fewer_eigenvalues_than_k_gives_all_it_has():
    pairs = ritz.top_eigenpairs(dense(4.0, 2.0), 2)
    assert top_log_product(pairs).value == pytest.approx(math.log(8))
    with pytest.raises(ValueError, match="expected the 10 largest eigenpairs, got 2"):
        top_log_product(ritz.top_eigenpairs(dense(4.0, 2.0, 1.0), 2))


def test_known_eigenpairs_are_not_searched_again():
    pairs = ritz.top_eigenpairs(DenseOperator(cases.symmetric(cases.spiked(60))), k=6)
    found = top_log_product(pairs, k=2)
    assert found.value == pytest.approx(float(pairs.values[:2].log().sum()))
    assert found.products == pairs.products


def test_the_log_product_moves_with_a_factor_as_it_must():
    A = DenseOperator(cases.symmetric(cases.spiked(60)))
    assert top_log_product(3.0 * A, k=4).value - top_log_product(A, k=4).value == pytest.approx(4 * math.log(3))


@pytest.mark.parametrize("name", ["mlp_relu", "residual", "frozen", "language", "unused"])
def test_every_module_has_the_spectral_norm_of_its_block(name):
    problem = cases.problem(name)
    risk = problem.risk()
    H = cases.truth(name, "Hessian")
    found = layer_spectral_norms(ritz.Hessian(risk), tol=1e-8)
    places: dict[str, list[int]] = {}
    for parameter, place in risk.space.slices.items():
        places.setdefault(parameter.rpartition(".")[0] or "root", []).extend(range(place.start, place.stop))
    truth = {module: float(torch.linalg.eigvalsh(H[rows][:, rows]).abs().max()) for module, rows in places.items()}
    assert list(found.parts) == list(truth)
    for module, value in truth.items():
        assert found.parts[module].value == pytest.approx(value, rel=1e-6, abs=1e-12)
    assert found.value == pytest.approx(max(truth.values()), rel=1e-6)
    assert found.value <= float(torch.linalg.eigvalsh(H).abs().max()) * (1 + 1e-9)
    assert found.products == sum(part.products for part in found.parts.values())


@pytest.mark.filterwarnings("ignore::ritz.errors.NumericalWarning")
@pytest.mark.parametrize("max_products", [8, 20, 40])
def test_the_norms_of_searches_that_were_cut_lie_in_their_intervals(max_products):
    """The residual tells how near an eigenvalue is, which need not be the largest; nor the part that looks largest."""
    flat, spiked = torch.linspace(-1, 0.9, 600), torch.cat([torch.linspace(-0.8, 0.8, 599), torch.tensor([1.1])])
    A = DenseOperator(torch.block_diag(cases.symmetric(flat), cases.symmetric(spiked)).double())
    A.space = ParamSpace(("0.weight", "1.weight"), (torch.Size([600]), torch.Size([600])))
    for seed in range(10):
        found = layer_spectral_norms(A, max_products=max_products, seed=seed)
        for estimate, truth in ((found.parts["0"], 1.0), (found.parts["1"], 1.1), (found, 1.1)):
            low, high = estimate.interval()
            assert low - 1e-6 <= truth <= high + 1e-6
        assert found.stop == "max_products"
        assert found.convention.startswith("lower bound of the largest")
    assert high < 1.5 if max_products == 40 else 1.5 < high < 100


def test_the_log_product_of_pairs_of_a_search_that_was_cut_has_no_upper_end():
    eigenvalues = torch.cat([torch.linspace(0.1, 0.9, 2995), torch.linspace(0.99, 1.0, 5)]).double()
    A = FunctionOperator(lambda V: eigenvalues[:, None] * V, 3000, torch.float64)
    for seed in range(10):
        with pytest.warns(NumericalWarning, match="raise max_products"):
            product = top_log_product(ritz.top_eigenpairs(A, 5, max_products=32, seed=seed), 5)
        low, high = product.interval()
        assert low <= float(eigenvalues[-5:].log().sum()) <= high == math.inf


def test_a_matrix_of_no_network_is_one_block():
    seen = []
    found = layer_spectral_norms(dense(1.0, -3.0), progress=lambda done, total: seen.append((done, total)))
    assert found.value == pytest.approx(3.0)
    assert list(found.parts) == ["root"]
    assert seen == [(1, 1)]


# ---------------------------------------------------------------------------------------- relative flatness


def relative_by_hand(H: torch.Tensor, weight: torch.Tensor) -> float:
    """sum_{s,s'} <w_s, w_s'> Tr H_ss', block by block."""
    rows, size = weight.flatten(1), weight[0].numel()
    total = 0.0
    for s in range(len(rows)):
        for t in range(len(rows)):
            block = H[s * size : (s + 1) * size, t * size : (t + 1) * size]
            total += float(rows[s] @ rows[t]) * float(block.trace())
    return total


@pytest.mark.parametrize(
    ("name", "layer", "parameter"),
    [
        ("mlp_relu", None, "2.weight"),
        ("mlp_relu", "0", "0.weight"),
        ("mlp_mse", "0.weight", "0.weight"),
        ("conv", "0", "0.weight"),
        ("residual", None, "head.weight"),
        ("language", "output", "embedding.weight"),  # tied: the parameter goes by its first name
        ("language", None, "embedding.weight"),
        ("attention", "attention.out_proj", "attention.out_proj.weight"),
        ("frozen", None, "4.weight"),
    ],
)
def test_relative_flatness_is_the_weighted_trace_of_the_blocks(name, layer, parameter):
    problem = cases.problem(name)
    risk = problem.risk()
    place, weight = risk.space.slices[parameter], risk.params()[parameter]
    H = cases.truth(name, "Hessian")[place, place]
    found = relative_flatness(risk, layer, num_probes=len(H))
    assert found.value == pytest.approx(relative_by_hand(H, weight), rel=1e-7, abs=1e-12)
    assert found.exact
    assert not found.parts
    assert parameter in found.convention


def test_probes_of_relative_flatness_are_right_within_their_error():
    risk = cases.problem("conv").risk()
    truth = relative_flatness(risk, num_probes=36).value
    for seed in range(4):
        found = relative_flatness(risk, num_probes=12, seed=seed)
        assert 0 < abs(found.value - truth) < 5 * found.stderr
        assert found.products == 12


def test_a_wide_layer_and_a_tall_one_are_both_factored_by_their_shorter_side():
    for sizes in ((6, 2), (2, 6)):
        model, X, Y = bias_free(*sizes)
        risk = ritz.Risk(model, CE, (X, Y))
        W = model[0].weight.detach()
        p = model(X).detach().softmax(1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        truth = float((X.square().sum(1) * (middle * (W @ W.T)).sum((1, 2))).mean())  # E |h|^2 Tr W W'(diag p - p p')
        assert relative_flatness(risk, num_probes=12).value == pytest.approx(truth, rel=1e-9)


def test_relative_flatness_is_invariant_to_the_rescaling_of_layers_and_the_trace_is_not():
    risk = ritz.Risk(cases.make("mlp_relu").model, CE, cases.problem("mlp_relu").data)
    other = rescaled(risk, 3.0)
    for layer in ("0", "2"):
        same = [relative_flatness(r, layer, num_probes=24).value for r in (risk, other)]
        assert same[0] == pytest.approx(same[1], rel=1e-8)
        moved = [ritz.trace(ritz.Hessian(r.restrict(f"{layer}.weight")), num_probes=24).value for r in (risk, other)]
        assert abs(math.log(moved[1] / moved[0])) > 1


def test_weights_of_zero_are_flat():
    model, X, Y = bias_free(3, 2)
    nn.init.zeros_(model[0].weight)
    assert relative_flatness(ritz.Risk(model, CE, (X, Y)), num_probes=4).value == 0


# ------------------------------------------------------------------------------------------------ Fisher-Rao


@pytest.mark.parametrize("sizes", [(4, 3), (4, 5, 3), (4, 5, 5, 3)])
def test_the_fisher_rao_norm_of_a_homogeneous_network_is_a_form_of_its_fisher_matrix(sizes):
    model, X, Y = bias_free(*sizes)
    risk = ritz.Risk(model, CE, (X, Y), batch_size=5)
    w = risk.space.join(risk.params())
    found = fisher_rao_norm(risk)
    assert found.value == pytest.approx(float(w @ (ritz.EmpiricalFisher(risk) @ w)), rel=1e-9)
    assert found.parts["model labels"].value == pytest.approx(float(w @ (ritz.GGN(risk) @ w)), rel=1e-9)
    assert found.exact
    assert f"depth = {len(sizes) - 1}," in found.convention


@pytest.mark.parametrize("name", ["mlp_weighted", "mlp_smoothed", "mlp_soft", "pixels", "language"])
def test_the_fisher_rao_norm_counts_items_as_the_loss_does(name):
    problem = cases.problem(name)
    out, y, _ = cases.outputs_and_target(problem)
    held = out.detach().requires_grad_()
    loss = problem.loss
    each = nn.CrossEntropyLoss(loss.weight, None, loss.ignore_index, None, "none", loss.label_smoothing)(held, y)
    weight = torch.ones(len(out))
    if not y.is_floating_point():
        table = torch.ones(out.shape[-1]) if loss.weight is None else loss.weight
        weight = torch.where(y == loss.ignore_index, 0.0, table[y.clamp(min=0)])
    forms = (torch.autograd.grad(each.sum(), held)[0] * held).sum(-1).detach()
    truth = float((forms[weight > 0].square() / weight[weight > 0]).sum() / weight.sum())
    assert fisher_rao_norm(problem.risk(), depth=1).value == pytest.approx(truth, rel=1e-9)
    assert fisher_rao_norm(problem.risk(), depth=3).value == pytest.approx(9 * truth, rel=1e-9)


def test_the_fisher_rao_norm_sees_the_function_only():
    risk = ritz.Risk(cases.make("mlp_relu").model, CE, cases.problem("mlp_relu").data)
    assert fisher_rao_norm(rescaled(risk, 7.0)).value == pytest.approx(fisher_rao_norm(risk).value, rel=1e-9)


def test_depth_counts_linear_and_convolutional_modules():
    assert "depth = 2," in fisher_rao_norm(cases.problem("conv").risk()).convention
    assert "depth = 3," in fisher_rao_norm(cases.problem("residual").risk()).convention


# ----------------------------------------------------------------------------------------------- all of them

TOP = Estimate(name="lambda max", value=1.0, exact=True)


class Table(nn.Module):
    """A network with parameters but without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.logits.expand(len(x), 3)


def table() -> ritz.Risk:
    return ritz.Risk(Table(), CE, (torch.zeros(2, 1), torch.tensor([0, 1])))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: epsilon_sharpness_quadratic(TOP, 1.0, -1.0), ValueError, "epsilon must be a positive number, got -1"),
        (lambda: epsilon_sharpness_quadratic(TOP, -1.0), ValueError, r"divides by 1 \+ L, and L is -1"),
        (lambda: epsilon_sharpness_quadratic(TOP, math.nan), ValueError, "and L is nan"),
        (lambda: taylor_shift(TOP, 1.0), TypeError, "expected the result of ritz.spectrum, got Estimate"),
        (lambda: taylor_shift(ritz.spectrum(dense(1.0)), 0.0), ValueError, "rho must be a positive number, got 0.0"),
        (lambda: top_log_product(TOP), TypeError, "expected an operator or its eigenpairs, got Estimate"),
        (lambda: top_log_product(dense(1.0), k=0), ValueError, "k must be at least 1, got 0"),
        (lambda: top_log_product(dense(0.0, 0.0)), UnsupportedError, "none of the 2 largest .* the largest is 0"),
        (lambda: top_log_product(dense(-1.0, -2.0)), UnsupportedError, "their log-product does not exist"),
        (
            lambda: top_log_product(ritz.top_eigenpairs(dense(1.0, 2.0), 1), k=2),
            ValueError,
            "expected the 2 largest eigenpairs, got 1 of which='largest'",
        ),
        (
            lambda: top_log_product(ritz.top_eigenpairs(dense(1.0, 2.0), 1, "smallest"), k=1),
            ValueError,
            "got 1 of which='smallest'",
        ),
        (lambda: layer_spectral_norms(TOP), TypeError, r"expected an operator such as ritz.Hessian.*got Estimate"),
        (lambda: relative_flatness(TOP), TypeError, "expected a ritz.Risk, got Estimate"),
        (lambda: relative_flatness(table(), num_probes=0), ValueError, "num_probes must be at least 1, got 0"),
        (lambda: relative_flatness(table()), ValueError, "no nn.Linear has a chosen weight; .* there is no matrix"),
        (
            lambda: relative_flatness(cases.problem("frozen").risk(), "0"),
            ValueError,
            "'0' has no chosen weight matrix; name a layer by one of: 2.weight, 4.weight",
        ),
        (
            lambda: relative_flatness(cases.problem("mlp_relu").risk(), "0.bias"),
            ValueError,
            "'0.bias' has no chosen weight matrix",
        ),
        (
            lambda: relative_flatness(cases.problem("mlp_relu").risk(), "head"),
            ValueError,
            "'head' has no chosen weight",
        ),
        (lambda: fisher_rao_norm(TOP), TypeError, "expected a ritz.Risk, got Estimate"),
        (
            lambda: fisher_rao_norm(cases.problem("mlp_mse").risk()),
            UnsupportedError,
            "the Fisher-Rao norm is for cross",
        ),
        (lambda: fisher_rao_norm(table()), ValueError, "no linear or convolutional module to count: give depth="),
        (lambda: fisher_rao_norm(table(), depth=0), ValueError, "depth must be at least 1, got 0$"),
    ],
)
def test_bad_input_is_refused_with_what_came_and_what_was_wanted(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_every_result_can_be_saved(tmp_path):
    risk = cases.problem("mlp_relu").risk()
    s = ritz.spectrum(ritz.Hessian(risk), num_steps=4, num_probes=2, reorthogonalize="none")
    results = [
        epsilon_sharpness_quadratic(s.lambda_max, 1.0),
        taylor_shift(s, 0.1),
        stability_limit(s.lambda_max),
        top_log_product(ritz.Hessian(risk), 3),
        layer_spectral_norms(ritz.Hessian(risk)),
        relative_flatness(risk, num_probes=6),
        fisher_rao_norm(risk),
    ]
    for result in results:
        assert ritz.load(result.save(tmp_path / "result")) == result
