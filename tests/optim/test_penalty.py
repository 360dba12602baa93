"""The penalty against traces of dense matrices, and their gradients, made by plain autograd row by row."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import Attention, Language, mlp
from graphs import taped
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ritz import replay
from ritz.errors import UnsupportedError
from ritz.optim import KFAC, TracePenalty, penalty

LOSSES = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss, "bce": F.binary_cross_entropy_with_logits}


def network(seed: int = 0, sizes: tuple[int, ...] = (2, 3, 2)) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(sizes)


def data(size: int = 4, inputs: int = 2, classes: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, inputs, generator=g), torch.randint(0, classes, (size,), generator=g)


def target_for(loss: str, y: Tensor) -> Tensor:
    return y if loss == "cross_entropy" else F.one_hot(y, 2).to(torch.get_default_dtype())


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def dense_ggn_trace(model: nn.Module, x: Tensor, loss: str, y: Tensor) -> Tensor:
    """Tr J' M J with J row by row and M the Hessian of the mean loss in the outputs; differentiable."""
    params, out = trained(model), model(x)
    free = out.detach().clone().requires_grad_()
    M = torch.autograd.functional.hessian(lambda o: LOSSES[loss](o, y), free).reshape(out.numel(), -1)
    # M again as a function of the weights: differentiable, unlike the matrix above, which checks it
    live = _loss_hessian(loss, out)
    torch.testing.assert_close(live, M, rtol=1e-9, atol=1e-12)
    rows = [
        torch.autograd.grad(o, params, create_graph=True, allow_unused=True, materialize_grads=True)
        for o in out.flatten()
    ]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    return (J * (live @ J)).sum()


def _loss_hessian(loss: str, out: Tensor) -> Tensor:
    if loss == "mse":
        return torch.eye(out.numel()) * 2 / out.numel()
    if loss == "bce":
        p = out.flatten().sigmoid()
        return torch.diag(p * (1 - p)) / out.numel()
    p = out.softmax(-1)
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.block_diag(*blocks) / len(out)


def dense_hessian_trace(model: nn.Module, x: Tensor, loss: str, y: Tensor) -> Tensor:
    params = trained(model)
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(LOSSES[loss](model(x), y), params, create_graph=True)])
    total, place = flat.new_zeros(()), 0
    for p in params:
        for i in range(p.numel()):
            total = total + torch.autograd.grad(flat[place + i], p, create_graph=True)[0].flatten()[i]
        place += p.numel()
    return total


def gradient(value: Tensor, model: nn.Module) -> Tensor:
    params = trained(model)
    found = torch.autograd.grad(value, params, materialize_grads=True, retain_graph=True)
    return torch.cat([g.flatten() for g in found])


def orthogonal_signs(monkeypatch, order: int):
    """Signs taken from the rows of a Hadamard matrix: over all of them sum s s' = order I, so the mean is exact."""
    table, row = torch.tensor(hadamard(order)).double(), itertools.count()
    monkeypatch.setattr(penalty.ParamSpace, "signs", lambda space, origins: table[next(row) % order, : space.dim])


# ------------------------------------------------------------------------------------------------ against truth


@pytest.mark.parametrize("loss", LOSSES)
def test_the_mean_over_signs_is_the_dense_ggn_trace_and_its_gradient_the_gradient(monkeypatch, loss):
    model, (x, y) = network(), data()
    target = target_for(loss, y)
    truth = dense_ggn_trace(model, x, loss, target)
    orthogonal_signs(monkeypatch, 8)  # 4 samples of 2 outputs
    penalise = TracePenalty(0.3, 1.0, loss=loss)
    mean = sum(penalise(model, x) for _ in range(8)) / 8
    torch.testing.assert_close(mean, 0.3 * truth)
    torch.testing.assert_close(gradient(mean, model), 0.3 * gradient(truth, model))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_mean_over_signs_is_the_dense_hessian_trace_and_its_gradient_the_gradient(monkeypatch, loss):
    model, (x, y) = network(sizes=(2, 2, 2)), data()  # 12 parameters
    target = target_for(loss, y)
    truth = dense_hessian_trace(model, x, loss, target)
    orthogonal_signs(monkeypatch, 16)
    penalise = TracePenalty(0.3, 1.0, "hessian", loss=loss)
    mean = sum(penalise(model, x, target) for _ in range(16)) / 16
    torch.testing.assert_close(mean, 0.3 * truth)
    torch.testing.assert_close(gradient(mean, model), 0.3 * gradient(truth, model))


@pytest.mark.parametrize("form", ["ggn", "hessian"])
def test_random_signs_on_a_random_half_of_the_batch_have_the_dense_trace_and_gradient_as_mean(form):
    model, (x, y) = network(), data(size=6)
    dense = dense_ggn_trace if form == "ggn" else dense_hessian_trace
    truth = dense(model, x, "cross_entropy", y)
    truth_gradient = gradient(truth, model)
    penalise = TracePenalty(1.0, 0.5, form, seed=3)
    draws = [penalise(model, x, y) for _ in range(200)]
    seen = torch.stack([torch.cat([d.detach()[None], gradient(d, model)]) for d in draws])
    z = (seen.mean(0) - torch.cat([truth.detach()[None], truth_gradient])) / (seen.std(0) / len(seen) ** 0.5)
    assert seen.std(0).min() > 0
    assert z.abs().max() < 4


def test_labels_drawn_from_the_model_would_bias_the_gradient():
    """Their probabilities move with the weights: the mean over labels of the gradients is not that of the trace."""
    model, (x, y) = network(), data(size=1)
    truth = gradient(dense_ggn_trace(model, x, "cross_entropy", y), model)
    out = model(x)
    p = out.softmax(-1)
    by_label = []
    for label in range(2):
        cotangent = p - F.one_hot(torch.tensor([label]), 2)
        pulled = torch.autograd.grad(out, trained(model), cotangent, create_graph=True)
        by_label.append(gradient(sum(g.square().sum() for g in pulled), model))
    mean = p[0, 0].detach() * by_label[0] + p[0, 1].detach() * by_label[1]
    assert (mean - truth).norm() > 0.05 * truth.norm()


def test_outputs_of_the_pass_of_the_loss_serve_as_well():
    model, (x, y) = network(), data()
    alone, shared = TracePenalty(0.2, 1.0), TracePenalty(0.2, 1.0)
    torch.testing.assert_close(shared.on_outputs(model(x), model), alone(model, x))
    value = shared.on_outputs(model(x), model, y)
    torch.testing.assert_close(gradient(value, model), gradient(alone(model, x, y), model))


def test_eta_changes_the_gradient_and_descent_on_the_sum_lowers_the_trace():
    model, (x, y) = network(seed=2, sizes=(2, 8, 2)), data(size=16)
    start = copy.deepcopy(model)
    traces = {}
    for eta in (0.0, 0.5):
        model, penalise = copy.deepcopy(start), TracePenalty(eta)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(60):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + penalise(model, x)).backward()
            optimizer.step()
        traces[eta] = float(dense_ggn_trace(model, x, "cross_entropy", y).detach())
    assert traces[0.5] < 0.7 * traces[0.0]


@pytest.mark.parametrize("form", ["ggn", "hessian"])
def test_attention_and_layernorm_have_the_derivatives_of_plain_autograd(monkeypatch, form):
    """Two forward derivatives would be wrong here, and fused attention has no second one."""
    torch.manual_seed(0)
    model = Attention()
    for name, p in model.named_parameters():
        p.requires_grad_(name == "norm.weight" or name == "head.bias")  # 7 of them reach through all of it
    x, y = torch.randn(2, 3, 4), torch.tensor([0, 2])
    dense = dense_ggn_trace if form == "ggn" else dense_hessian_trace
    with sdpa_kernel(SDPBackend.MATH):
        truth = dense(model, x, "cross_entropy", y)
    orthogonal_signs(monkeypatch, 8)
    penalise = TracePenalty(1.0, 1.0, form)
    mean = sum(penalise(model, x, y) for _ in range(8)) / 8
    torch.testing.assert_close(mean, truth)
    torch.testing.assert_close(gradient(mean, model), gradient(truth, model))


class Recomputed(nn.Module):
    """A part of the network is recomputed in the backward pass, in torch's new way or the old."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(2, 4), nn.Linear(4, 2), reentrant
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.part = nn.Sequential(nn.Tanh(), nn.LayerNorm(4, eps=0.1), normed)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.part, self.first(x), use_reentrant=self.reentrant).tanh())


def layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), *between, nn.Tanh(), nn.Linear(4, 2))


# whose derivatives of some order are wrong in torch
DIFFICULT = {
    "LayerNorm": lambda: layers(nn.LayerNorm(4, eps=0.1)),
    "InstanceNorm": lambda: layers(nn.Unflatten(1, (1, 4)), nn.InstanceNorm1d(1, eps=0.1), nn.Flatten()),
    "BatchNorm": lambda: layers(nn.BatchNorm1d(4, eps=0.1)),
    "weight_norm": lambda: layers(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    "weight_norm, by a hook": lambda: layers(hooked_weight_norm(nn.Linear(4, 4))),
    "recomputed": lambda: Recomputed(False),
    "recomputed in the old way": lambda: Recomputed(True),
}


def hooked_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize("form", ["ggn", "hessian"])
@pytest.mark.parametrize("network", DIFFICULT)
def test_its_gradient_is_that_of_differences_of_its_value(network, form):
    """torch takes norms for constants: of weights in the second derivative, of activations in the third."""
    torch.manual_seed(0)
    model, (x, y) = DIFFICULT[network](), data()
    penalise = TracePenalty(1.0, 1.0, form, force=True)
    found, way = gradient(penalise(model, x, y), model), torch.randn(sum(p.numel() for p in trained(model)))
    start, slope = nn.utils.parameters_to_vector(trained(model)).detach(), 0.0
    for steps, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
        nn.utils.vector_to_parameters(start + 1e-4 * steps * way, trained(model))
        penalise.calls = 0
        slope += weight * float(penalise(model, x, y).detach()) / 12e-4
    assert float(found @ way) == pytest.approx(slope, rel=1e-6)


def test_outputs_of_normalised_weights_do_not_serve():
    for network in ("weight_norm", "weight_norm, by a hook"):
        model, (x, _) = DIFFICULT[network](), data()
        with pytest.raises(UnsupportedError, match=r"weight of 2 is normalised.*call penalty\(model, x\)"):
            TracePenalty(1.0).on_outputs(model(x), model)


@pytest.mark.parametrize("network", ["weight_norm", "weight_norm, by a hook"])
def test_outputs_of_normalised_weights_that_are_frozen_serve(network):
    """As in a part of the network that was trained before; the second derivative in g is right."""
    model, (x, _) = DIFFICULT[network](), data()
    for name, p in model[2].named_parameters():
        p.requires_grad_(not name.endswith(("original1", "_v")))
    shared = gradient(TracePenalty(1.0, 1.0).on_outputs(model(x), model), model)
    torch.testing.assert_close(shared, gradient(TracePenalty(1.0, 1.0)(model, x), model))


def test_tokens_that_are_ignored_do_not_count(monkeypatch):
    torch.manual_seed(0)
    model = Language(vocabulary=3)
    tokens = torch.randint(0, 3, (2, 3))
    y = torch.tensor([[1, -100, 2], [0, -100, -100]])
    orthogonal_signs(monkeypatch, 32)  # 2 * 3 * 3 outputs
    penalise = TracePenalty(1.0, 1.0, class_dim=-1)
    mean = sum(penalise(model, tokens, y) for _ in range(32)) / 32
    params, out = trained(model), model(tokens)
    J = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(o, params, retain_graph=True)])
            for o in out[y != -100].flatten()
        ]
    )
    M = _loss_hessian("cross_entropy", out[y != -100])
    torch.testing.assert_close(mean.detach(), (J * (M @ J)).sum().detach())


@pytest.mark.parametrize("form", ["ggn", "hessian"])
def test_a_part_of_a_batch_with_ignored_items_is_unbiased_too(form):
    """The divisor is that of the whole batch: a ratio within the part would be biased."""
    model, (x, y) = network(), data(size=4)
    y[0] = -100
    seen = y != -100
    dense = dense_ggn_trace if form == "ggn" else dense_hessian_trace
    truth = float(dense(model, x[seen], "cross_entropy", y[seen]).detach())
    penalise = TracePenalty(1.0, 0.25, form)
    draws = torch.stack([penalise(model, x, y).detach() for _ in range(300)])
    assert abs(draws.mean() - truth) < 4 * draws.std() / 300**0.5


def test_a_sure_network_has_a_finite_gradient():
    """sqrt(p) has an infinite derivative at p = 0, where exp(log(p) / 2) has none."""
    model = nn.Linear(1, 3, bias=False).float()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[400.0], [0.0], [-400.0]]))
    value = TracePenalty(1.0)(model, torch.ones(2, 1, dtype=torch.float32))
    assert value == 0
    assert gradient(value, model).isfinite().all()


# ---------------------------------------------------------------------------------------------------- BatchNorm


def scale_free(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3, eps=1e-12), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize("form", ["ggn", "hessian"])
def test_the_trace_before_batchnorm_grows_with_the_inverse_square_of_the_weights(form):
    model, (x, y) = scale_free(), data(size=6)
    model[1].requires_grad_(False)
    model[3].requires_grad_(False)
    penalise = TracePenalty(1.0, 1.0, form, force=True)
    before = penalise(model, x, y)
    with torch.no_grad():
        model[0].weight /= 10
    penalise.calls = 0
    torch.testing.assert_close(penalise(model, x, y), 100 * before)


def test_with_batch_statistics_the_hessian_form_runs_away_and_the_ggn_form_does_not():
    """Small weights before BatchNorm make a negative trace as negative as one likes: seed 002's divergence."""
    lowest = {}
    for form in ("ggn", "hessian"):
        model, (x, y) = scale_free(seed=4), data(size=8)
        penalise = TracePenalty(0.1, 1.0, form, force=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        values = []
        for _ in range(150):
            optimizer.zero_grad()
            objective = F.cross_entropy(model(x), y) + penalise(model, x, y)
            values.append(float(objective.detach()))
            objective.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        lowest[form] = min(values)
    assert lowest["ggn"] > 0
    assert lowest["hessian"] < -10


def test_the_hessian_form_refuses_batch_statistics_and_says_why():
    model, (x, y) = scale_free(), data()
    with pytest.raises(UnsupportedError, match=r"'1' normalises by batch statistics.*form='ggn'.*force=True"):
        TracePenalty(1.0, form="hessian")(model, x, y)
    TracePenalty(1.0, form="hessian")(model.eval(), x, y)
    TracePenalty(1.0, 0.5, form="ggn")(model.train(), x, y)


# ------------------------------------------------------------------------------------------- use in a training


def test_nothing_of_the_model_and_no_generator_changes():
    model, (x, y) = scale_free(), data(size=8)
    model.append(nn.Dropout(0.5))
    calls = []
    model.register_forward_hook(lambda module, args, out: calls.append(module[0].weight is own))
    own = model[0].weight
    model(x)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    TracePenalty(1.0)(model, x)
    TracePenalty(1.0, form="hessian", force=True)(model, x, y)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert calls == [True, False, False]  # a hook can tell the pass of the penalty by its weights
    with pytest.raises(ZeroDivisionError):
        TracePenalty(1.0, forward=lambda model, x: 1 / 0)(model, x)
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("form", ["ggn", "hessian"])
def test_kfac_does_not_take_the_pass_of_a_penalty_for_one_of_training(form):
    def trained(penalised: bool) -> Tensor:
        model, (x, y) = network(), data(size=8)
        optimizer, penalise = (
            KFAC(model, lr=0.05, damping=0.1, fisher="type2", factor_every=1),
            TracePenalty(0.0, 1.0, form),
        )
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss + penalise(model, x, y) if penalised else loss).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(trained(True), trained(False))


def test_a_scaled_loss_gives_a_scaled_gradient():
    model, (x, y) = network(), data(size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loss = F.cross_entropy(model(x), y) + TracePenalty(0.1)(model, x)
    expected = gradient(loss, model)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), expected)


def test_the_model_inside_a_wrapper_is_the_model():
    model, (x, _) = network(), data(size=8)
    assert torch.equal(TracePenalty(1.0)(nn.DataParallel(model), x), TracePenalty(1.0)(model, x))


def test_frozen_and_unused_parameters_have_no_part():
    model, (x, y) = network(), data()
    model[0].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    truth = dense_ggn_trace(model, x, "cross_entropy", y)
    penalise = TracePenalty(1.0, 1.0)
    draws = torch.stack([penalise(model, x).detach() for _ in range(300)])
    assert abs(draws.mean() - truth) < 4 * draws.std() / 300**0.5


def test_micro_batches_accumulate_to_the_mean_of_their_penalties():
    model, (x, y) = network(), data(size=8)
    penalise = TracePenalty(0.5)
    for part, label in zip(x.split(4), y.split(4), strict=True):
        ((F.cross_entropy(model(part), label) + penalise(model, part)) / 2).backward()
    summed = torch.cat([p.grad.flatten() for p in model.parameters()])
    penalise.load_state_dict({"calls": 0, "seed": 0})
    whole = F.cross_entropy(model(x), y) + sum(penalise(model, part) for part in x.split(4)) / 2
    torch.testing.assert_close(summed, gradient(whole, model))


def test_under_autocast_it_is_near_the_value_without():
    torch.manual_seed(0)
    model, x = mlp([4, 16, 3]).float(), torch.randn(32, 4, dtype=torch.float32)
    exact = TracePenalty(1.0)(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = TracePenalty(1.0)(model, x)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0)
    a, b = gradient(rough, model), gradient(exact, model)
    assert (a - b).norm() < 0.1 * b.norm()
    assert not torch.equal(a, b)


def test_bfloat16_weights_give_a_float32_penalty():
    torch.manual_seed(0)
    model, x = mlp([4, 16, 3]).bfloat16(), torch.randn(32, 4, dtype=torch.bfloat16)
    for form in ("ggn", "hessian"):
        value = TracePenalty(1.0, form=form)(model, x, torch.zeros(32).long())
        assert value.dtype == torch.float32
        assert gradient(value, model).isfinite().all()


def test_a_resumed_penalty_goes_on_with_the_same_draws():
    model, (x, _) = network(), data(size=8)
    first = TracePenalty(1.0, seed=5)
    first(model, x)
    resumed = TracePenalty(1.0)
    resumed.load_state_dict(first.state_dict())
    second = first(model, x)
    assert torch.equal(resumed(model, x), second)
    assert not torch.equal(first(model, x), second)


def test_without_a_graph_the_value_is_there_all_the_same():
    model, (x, y) = network(), data()
    for form in ("ggn", "hessian"):
        value = TracePenalty(1.0, form=form)(model, x, y)
        with torch.no_grad():
            bare = TracePenalty(1.0, form=form)(model, x, y)
        assert torch.equal(bare, value)
        assert not bare.requires_grad


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("form", ["ggn", "hessian"])
def test_under_inference_mode_the_value_is_there_too(form, fraction):
    model, (x, y) = network(), data()
    value = TracePenalty(1.0, fraction, form)(model, x, y)
    with torch.inference_mode():
        for inputs in ((x, y), (x.clone(), y.clone())):  # made before, and inside
            bare = TracePenalty(1.0, fraction, form)(model, *inputs)
            assert torch.equal(bare, value)
            assert not bare.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_without_a_graph_are_refused_with_what_to_do(mode):
    model, (x, _) = network(), data()
    with mode():
        out = model(x)
        with pytest.raises(
            ValueError, match=r"no graph .* made under torch\.no_grad\(\) or .* call penalty\(model, x\)"
        ):
            TracePenalty(1.0).on_outputs(out, model)


def test_a_look_at_the_value_leaves_the_graph_of_the_loss_alone():
    model, (x, y) = network(), data()
    out = model(x)
    with torch.no_grad():
        TracePenalty(1.0).on_outputs(out, model)
    F.cross_entropy(out, y).backward()
    alone = torch.autograd.grad(F.cross_entropy(model(x), y), tuple(model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), alone, strict=True))


def test_inputs_may_be_a_dictionary_or_several_and_outputs_picked():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(left + right)}

    model, (x, _) = Named(), data(size=8)
    plain = TracePenalty(1.0)(model.inner, 2 * x)
    named = TracePenalty(1.0, forward=lambda model, x: model(**x)["logits"])(model, {"left": x, "right": x})
    several = TracePenalty(1.0, forward=lambda model, x: model(*x)["logits"])(model, (x, x))
    assert torch.equal(plain, named)
    assert torch.equal(plain, several)
    with pytest.raises(TypeError, match="returned a dict, not a tensor; pick the outputs"):
        TracePenalty(1.0)(model, {"left": x, "right": x})


def test_a_linear_model_with_squared_error_has_a_trace_without_gradient():
    model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    ggn = TracePenalty(1.0, loss="mse")(model, x)
    hessian = TracePenalty(1.0, form="hessian", loss="mse")(model, x, torch.zeros(1, 1))
    assert float(ggn.detach()) == pytest.approx(50)  # 2 |x|^2
    assert min(abs(float(hessian.detach()) - form) for form in (98, 2)) < 1e-12  # 2 (+-3 +-4)^2
    loss = F.mse_loss(model(x), torch.zeros(1, 1))
    for value in (ggn, hessian):
        assert torch.equal(gradient(loss + value, model), gradient(loss, model))


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"eta": float("nan")}, "eta must be a finite number, got nan"),
        ({"eta": 1.0, "fraction": 0.0}, r"in \(0, 1\], got 0.0"),
        ({"eta": 1.0, "fraction": 1.5}, r"in \(0, 1\], got 1.5"),
        ({"eta": 1.0, "form": "fisher"}, "form must be one of 'ggn', 'hessian', got 'fisher'"),
        ({"eta": 1.0, "loss": "hinge"}, "loss must be one of 'cross_entropy', 'mse', 'bce', got 'hinge'"),
    ],
)
def test_bad_settings_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        TracePenalty(**keywords)


def test_bad_calls_are_refused():
    model, (x, _) = network(), data()
    with pytest.raises(ValueError, match=r"depends on the targets: penalty\(model, x, y\)"):
        TracePenalty(1.0, form="hessian")(model, x)
    with pytest.raises(ValueError, match="the batch is empty"):
        TracePenalty(1.0)(model, x[:0])
    with pytest.raises(ValueError, match=r"needs outputs \(batch, classes, ...\), got \(1,\)"):
        TracePenalty(1.0, forward=lambda model, x: model(x)[:, 0])(model, x)
    with pytest.raises(ValueError, match="do not depend on any parameter"):
        TracePenalty(1.0, forward=lambda model, x: model(x).detach())(model, x)
    with pytest.raises(ValueError, match="do not depend on any parameter of the model that is trained"):
        TracePenalty(1.0).on_outputs(network(seed=1)(x), model)
    with pytest.raises(ValueError, match="outputs determine only the GGN"):
        TracePenalty(1.0, form="hessian").on_outputs(model(x), model)
    with pytest.raises(ValueError, match=r"labels \(4, 2\) do not fit outputs \(4, 2\) with classes in dimension 1"):
        TracePenalty(1.0, 1.0)(model, x, torch.zeros(4, 2).long())
    with pytest.raises(ValueError, match=r"outputs \(1, 2\) have no dimension 4; give another class_dim="):
        TracePenalty(1.0, class_dim=4)(model, x)
    with pytest.raises(TypeError, match=r"the model comes first, penalty\(model, x\): expected a module, got Tensor"):
        TracePenalty(1.0)(x, model)
    with pytest.raises(ValueError, match=r"labels \(4, 2\) do not fit"):
        TracePenalty(1.0, 1.0, "hessian")(model, x, torch.zeros(4, 2).long())
    with pytest.raises(ValueError, match=r"targets \(4, 1\) must have the shape of the outputs \(4, 2\)"):
        TracePenalty(1.0, 1.0, "hessian", loss="mse")(model, x, torch.zeros(4, 1))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter of the model is frozen"):
        TracePenalty(1.0)(model, x)


# ---------------------------------------------------------------------------------------------------- replay


def images(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 2, 6, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def conv_network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 4, 2, groups=2))
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize("form", ["ggn", "hessian"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_replayed_penalty_and_its_gradient_are_the_eager_ones_as_weights_and_data_change(form, fraction):
    model, (x, y) = conv_network().eval(), images()
    replayed, eager = (TracePenalty(0.2, fraction, form, seed=1, replay=replay) for replay in (True, False))
    for step in range(4):  # the first call is eager, the second records
        values = [penalise(model, x * (1 + step), y) for penalise in (replayed, eager)]
        assert torch.equal(*values)
        torch.testing.assert_close(*(gradient(value, model) for value in values), rtol=1e-12, atol=1e-14)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    assert len(replayed._recordings) == 1


def test_a_recording_is_made_anew_when_modes_or_the_places_of_weights_change():
    model, (x, _) = conv_network(), images()
    replayed, eager = (TracePenalty(0.2, 1.0, replay=replay) for replay in (True, False))

    def same() -> bool:
        return torch.equal(replayed(model, x), eager(model, x))

    assert all(same() for _ in range(3))
    model.eval()
    assert all(same() for _ in range(3))
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
    assert all(same() for _ in range(3))
    x = x[:4]
    assert all(same() for _ in range(3))


def replaced(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight = nn.Parameter(2 * model[0].weight, requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        lambda model: setattr(model[1], "eps", 1.0),
        lambda model: setattr(model, "2", nn.Tanh().eval()),
        lambda model: model[5].weight.data.mul_(2),
        lambda model: model[1].running_var.mul_(2),
        lambda model: model[1].requires_grad_(False),
        lambda model: setattr(model[1], "running_mean", torch.ones(4)),
    ],
    ids=["frozen weight", "epsilon", "activation", "weight", "statistics", "freezing", "buffer"],
)
def test_a_graph_sees_every_change_of_the_model(change, monkeypatch):
    monkeypatch.setattr(replay, "_recorded", taped)
    model, (x, y) = conv_network().eval(), images()
    model[0].requires_grad_(False)
    replayed, eager = (TracePenalty(0.2, 1.0, replay=replay) for replay in (True, False))
    for step in range(6):  # recorded in the second and played in the third
        if step == 3:
            change(model)
        values = [penalise(model, x, y) for penalise in (replayed, eager)]
        torch.testing.assert_close(*values, rtol=1e-12, atol=0)
        torch.testing.assert_close(*(gradient(value, model) for value in values), rtol=1e-10, atol=1e-14)
    assert len(replayed._recordings) > 0


def test_a_graph_knows_inputs_by_their_names(monkeypatch):
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return self.layer(x) * gate.exp()

    monkeypatch.setattr(replay, "_recorded", taped)
    model, (x, _) = Gated(), data()
    replayed, eager = (TracePenalty(1.0, 1.0, replay=replay) for replay in (True, False))
    for inputs in [{"x": x, "gate": 0.1 * x}] * 3 + [{"gate": 0.1 * x, "x": x}]:
        torch.testing.assert_close(replayed(model, inputs), eager(model, inputs))


def test_inputs_that_want_a_gradient_get_it():
    torch.manual_seed(0)
    first, model, (x, _) = nn.Linear(2, 2), network(), data()
    replayed, eager = (TracePenalty(1.0, 1.0, replay=replay) for replay in (True, False))
    for _ in range(3):
        torch.testing.assert_close(*(gradient(penalise(model, first(x)), first) for penalise in (replayed, eager)))


def test_a_replayed_penalty_is_differentiated_once():
    model, (x, _) = network(), data()
    value = TracePenalty(1.0, replay=True)(model, x)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again .* TracePenalty\(..., replay=False\)"):
        value.backward(create_graph=True)
    value.backward()


def test_what_the_loss_is_scaled_by_keeps_its_precision_where_weights_have_less():
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    value = penalty._Known.apply(torch.tensor(1.0, dtype=torch.float32), [torch.full_like(p, 3.0).detach()], p)
    (0.3 * value).backward()
    assert p.grad.item() == torch.tensor(0.9, dtype=torch.bfloat16).item()  # 3 times 0.3 in bfloat16 is 0.9023


def test_two_replayed_penalties_before_one_backward_pass_keep_their_gradients():
    model, (x, _) = conv_network().eval(), images()
    replayed, eager = (TracePenalty(0.2, 1.0, replay=replay) for replay in (True, False))
    for penalise in (replayed, eager):
        for _ in range(2):
            penalise(model, x)
    grads = [gradient(3 * penalise(model, x) + penalise(model, 2 * x), model) for penalise in (replayed, eager)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


def test_replay_is_for_a_gpu_and_models_of_known_modules_unless_asked_for():
    class Own(nn.Sequential):
        pass

    model, (x, _) = conv_network(), images()
    penalise, forced = TracePenalty(0.2), TracePenalty(0.2, replay=True)
    for _ in range(2):
        penalise(model, x)
        forced(Own(*model), x)
    assert len(penalise._recordings) == 0  # this is a CPU
    assert len(forced._recordings) == 1
    with torch.no_grad():  # nothing to give out
        assert not forced(Own(*model), x).requires_grad


def test_with_kfac_the_penalty_on_shared_outputs_leaves_the_factors_as_they_are():
    """Its backward pass goes through the outputs that the optimiser waits at."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randint(3, (8,))
    eigenvalues = []
    for eta in (0.0, 0.1):
        torch.manual_seed(1)
        model = mlp([3, 4, 3])
        optimizer = KFAC(model, lr=0.1, damping=0.1, fisher="type2")
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss = loss + TracePenalty(eta).on_outputs(out, model) if eta else loss
        loss.backward()
        optimizer.step()
        eigenvalues.append(torch.cat(list(optimizer.eigenvalues().values())))
    torch.testing.assert_close(*eigenvalues)


@pytest.mark.gpu
def test_on_a_gpu_where_hooks_run_in_other_threads_kfac_waits_for_the_loss():
    model, (x, y) = network().cuda(), (t.cuda() for t in data(size=8))
    optimizer = KFAC(model, lr=0.1, damping=0.1)
    out = model(x)
    (F.cross_entropy(out, y) + TracePenalty(0.1).on_outputs(out, model)).backward()
    optimizer.step()
    assert all(block.count for block in optimizer.blocks.values())


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["ggn", "hessian"])
def test_on_a_gpu_a_model_may_count_on_the_strides_of_a_convolution(form):
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(2, 4, 3), nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.conv(x).tanh().view(len(x), -1))

    torch.manual_seed(0)
    model, (x, y) = Viewed(), images()
    here = TracePenalty(1.0, form=form)(model, x, y)
    there = TracePenalty(1.0, form=form)(model.cuda(), x.cuda(), y.cuda())
    torch.testing.assert_close(there.cpu(), here)


def test_where_the_classes_are_is_asked_for_if_labels_do_not_tell():
    out, model = torch.randn(2, 3, 4), nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"dimension of the classes in outputs \(\d, 3, 4\) is unknown"):
        TracePenalty(1.0)(model, out)
    assert TracePenalty(1.0, class_dim=-1)(model, out).item() > 0


def test_cross_entropy_of_one_class_is_refused():
    with pytest.raises(ValueError, match="one class has no curvature; a binary network has loss='bce'"):
        TracePenalty(1.0)(nn.Linear(4, 1), torch.randn(2, 4))
