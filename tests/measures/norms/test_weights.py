"""Norms of weights and layers, against dense matrices of the layers and sums over paths written out."""

import copy
import itertools
import math

import pytest
import torch
from cases import make, mlp, problem, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import ritz
from ritz.measures.norms.paths import path_norm
from ritz.measures.norms.weights import (
    distance,
    log_spectral_product,
    spectral_complexity,
    spectral_norms,
    stable_ranks,
    weight_norm,
)


def risk_of(model: nn.Module, *shape: int, **options: object) -> ritz.Risk:
    """A model on random inputs of one shape."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(3, *shape, generator=generator)
    with torch.no_grad():
        y = torch.zeros_like(copy.deepcopy(model).eval()(X))
    return ritz.Risk(model, nn.MSELoss(), (X, y), **options)


def with_statistics(model: nn.Module) -> nn.Module:
    """BatchNorm as after some training."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.3, 2.0, generator=generator)
            if module.affine:
                module.weight.data.normal_(1.0, 0.5, generator=generator)
                module.bias.data.normal_(generator=generator)
    return model


def dense(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The matrix of a layer without its bias, column by column."""
    eye = torch.eye(math.prod(shape)).reshape(-1, *shape)
    with torch.no_grad():
        return (layer(eye) - layer(torch.zeros(1, *shape))).flatten(1).T


# ------------------------------------------------------------------------------------ size and distance


@pytest.mark.parametrize("name", ["mlp_relu", "residual", "language", "frozen"])
@pytest.mark.parametrize("order", [2, math.inf])
def test_the_weight_norm_is_that_of_all_chosen_parameters(name, order):
    case = problem(name)
    found = weight_norm(case.risk(), order)
    vector = torch.cat([p.detach().flatten() for p in case.params])
    assert float(found) == pytest.approx(float(torch.linalg.vector_norm(vector, order)))
    assert list(found.parts) == list(case.risk().names)
    parts = torch.tensor([float(e) for e in found.parts.values()])
    assert float(torch.linalg.vector_norm(parts, order)) == pytest.approx(float(found))
    assert found.exact


def test_the_distance_is_from_a_state_dict_or_a_vector():
    risk, start = make("residual").risk(), make("residual", 1)
    vector = risk.space.join({name: p.detach() for name, p in start.model.named_parameters()})
    expected = float((risk.space.join(risk.params()) - vector).norm())
    for init in (start.model.state_dict(), vector, dict(start.model.named_parameters())):
        assert float(distance(risk, init)) == pytest.approx(expected)
    assert float(distance(risk, risk.params())) == 0.0
    assert float(distance(risk, vector, math.inf)) <= expected


def test_a_distance_of_float32_weights_close_to_each_other_keeps_its_digits():
    model = nn.Linear(100, 100, dtype=torch.float32)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.ones(1, 100), torch.ones(1, 100)))
    start = {name: p * (1 + 1e-6) for name, p in risk.params().items()}
    truth = sum(float((p.double() - start[name].double()).square().sum()) for name, p in risk.params().items())
    assert float(distance(risk, start)) == pytest.approx(truth**0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: weight_norm(r, 1), "order must be 2 or math.inf, got 1"),
        (lambda r: distance(r, {"0.weight": torch.zeros(6, 4)}), "no '0.bias'"),
        (lambda r: distance(r, {name: p[None] for name, p in r.params().items()}), "0.weight has shape"),
        (lambda r: distance(r, torch.zeros(3)), "flat vector"),
        (lambda r: distance(r, torch.full((r.dim,), math.nan)), "init must be finite"),
        (lambda r: spectral_norms(r, convolutions="fft"), "must be 'operator' or 'matrix', got 'fft'"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(problem("mlp_relu").risk())


# --------------------------------------------------------------------------------------- spectral norms

CONVOLUTIONS = {
    "plain": (lambda: nn.Conv2d(2, 3, 3, bias=False), (2, 6, 5)),
    "padded": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 5)),
    "same": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same"), (2, 6, 5)),
    "strided": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 7, 6)),
    "dilated": (lambda: nn.Conv2d(2, 3, 2, dilation=2), (2, 6, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 4)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "reflected": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "one dimension": (lambda: nn.Conv1d(3, 2, 4, padding=2), (3, 9)),
    "three dimensions": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (4, 3, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_norm_of_a_convolution_is_that_of_its_matrix(name):
    make_layer, shape = CONVOLUTIONS[name]
    layer = seeded(make_layer)
    found = spectral_norms(risk_of(nn.Sequential(layer), *shape)).parts["0.weight"]
    truth = torch.linalg.matrix_norm(dense(layer, shape), 2)
    assert float(found) == pytest.approx(float(truth), rel=1e-9)
    low, high = found.interval()
    assert low * (1 - 1e-12) <= float(truth) <= high * (1 + 1e-12)


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), kernel=st.integers(1, 3), pad=st.integers(0, 2), size=st.integers(3, 6))
def test_the_norm_of_a_convolution_lies_between_those_that_its_kernel_as_a_matrix_gives(seed, kernel, pad, size):
    layer = seeded(lambda: nn.Conv2d(2, 3, kernel, padding=pad), seed)
    found = spectral_norms(risk_of(nn.Sequential(layer), 2, size, size)).parts["0.weight"]
    flat = float(found.parts["matrix"])
    assert flat == pytest.approx(float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)))
    assert flat * (1 - 1e-9) <= float(found) <= kernel * flat * (1 + 1e-9)


def test_a_large_convolution_is_searched_and_bracketed():
    layer = seeded(lambda: nn.Conv2d(3, 4, 3, padding=1))
    found = spectral_norms(risk_of(nn.Sequential(layer), 3, 16, 16)).parts["0.weight"]
    assert not found.exact
    assert 0 < found.products < 3 * 16 * 16
    truth = float(torch.linalg.matrix_norm(dense(layer, (3, 16, 16)), 2))
    assert found.interval()[0] <= truth * (1 + 1e-12)
    assert truth <= found.interval()[1]
    assert float(found) == pytest.approx(truth, rel=1e-5)


def test_batch_norm_is_a_layer_in_evaluation_mode_only():
    model = with_statistics(seeded(lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU())))
    found = spectral_norms(risk_of(model, 1, 4, 4))
    assert list(found.parts) == ["0.weight", "1.weight"]
    truth = torch.linalg.matrix_norm(dense(model.eval()[1], (3, 3, 3)), 2)
    assert float(found.parts["1.weight"]) == pytest.approx(float(truth))
    assert list(spectral_norms(risk_of(model, 1, 4, 4, mode="train")).parts) == ["0.weight"]


def test_batch_norm_without_weights_is_a_layer_too():
    model = with_statistics(seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))))
    found = spectral_norms(risk_of(model, 2))
    assert float(found.parts["1"]) == pytest.approx(float(model[1].running_var.add(1e-5).rsqrt().max()))


def test_a_shared_weight_is_one_layer_and_a_frozen_one_none():
    assert list(spectral_norms(problem("language").risk()).parts) == ["embedding.weight", "qkv.weight"]
    assert list(spectral_norms(problem("frozen").risk()).parts) == ["2.weight", "4.weight"]


def test_a_convolution_called_twice_is_measured_at_its_largest_input():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 2)

        def forward(self, x):
            return self.conv(self.conv(x))

    model = seeded(Twice)
    found = spectral_norms(risk_of(model, 1, 6, 6)).parts["conv.weight"]
    assert float(found) == pytest.approx(float(torch.linalg.matrix_norm(dense(model.conv, (1, 6, 6)), 2)))


def test_an_opaque_risk_has_layers_too():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 2)))
    risk = ritz.Risk(model, data=[torch.ones(2, 1, 3, 3)], batch_loss=lambda m, x: (m(x).square().sum(), len(x)))
    truth = torch.linalg.matrix_norm(dense(model, (1, 3, 3)), 2)
    assert float(spectral_norms(risk).parts["0.weight"]) == pytest.approx(float(truth))


def test_a_convolution_that_is_never_called_or_of_another_kind_is_refused_as_a_map():
    class Unused(nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.conv, self.last = conv, nn.Linear(2, 1)

        def forward(self, x):
            return self.last(x)

    class Own(nn.Conv2d):
        pass

    for conv, message in ((nn.Conv2d(1, 1, 2), "not called in a forward pass"), (Own(1, 1, 2), "is a Own, which")):
        risk = risk_of(Unused(conv), 2)
        with pytest.raises(ritz.errors.UnsupportedError, match=message):
            spectral_norms(risk)
        assert len(spectral_norms(risk, convolutions="matrix").parts) == 2


def test_a_computed_weight_is_refused():
    risk = risk_of(nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2))), 2)
    with pytest.raises(ritz.errors.UnsupportedError, match=r"weights of 0 are computed.*remove_parametrizations"):
        spectral_norms(risk)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "change",
    [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.random_unstructured(layer, "weight", 1)],
)
def test_a_weight_computed_by_a_hook_is_refused(change):
    model = nn.Sequential(change(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    risk = ritz.Risk(model, nn.MSELoss(), (torch.ones(2, 3), torch.ones(2, 2)))
    for measure in (spectral_norms, stable_ranks, spectral_complexity, path_norm):
        with pytest.raises(ritz.errors.UnsupportedError, match="the weights of 0 are computed from other parameters"):
            measure(risk)


def test_a_batch_norm_that_is_the_model_itself_is_a_layer():
    model = with_statistics(nn.BatchNorm1d(3))
    largest = float((model.weight.detach().abs() / (model.running_var + model.eps).sqrt()).max())
    assert spectral_norms(risk_of(model, 3)).value.tolist() == pytest.approx([largest])
    alone = path_norm(risk_of(nn.Sequential(copy.deepcopy(model)), 3))
    assert path_norm(risk_of(model, 3)).value == pytest.approx(alone.value)


def test_parameters_that_are_no_layer_have_no_layer_norms():
    risk = risk_of(nn.Linear(3, 2), 3, params="bias")
    for measure in (spectral_norms, log_spectral_product, stable_ranks, spectral_complexity):
        with pytest.raises(ValueError, match="no chosen parameter has two or more dimensions"):
            measure(risk)


def test_hooks_of_the_user_run_in_no_product_and_ours_are_gone():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 2)))
    calls = []
    model[0].register_forward_hook(lambda *args: calls.append(1))
    risk = risk_of(model, 1, 3, 3)
    calls.clear()
    spectral_norms(risk)
    assert len(calls) == 1  # one forward pass
    assert len(model[0]._forward_hooks) == 1
    assert not model[0]._forward_pre_hooks


def test_progress_counts_layers():
    seen = []
    spectral_norms(problem("mlp_relu").risk(), progress=lambda *args: seen.append(args))
    assert seen == [(1, 2), (2, 2)]


# --------------------------------------------------------------------------- what is made of spectral norms


def conv_net() -> nn.Module:
    return with_statistics(
        seeded(
            lambda: nn.Sequential(
                nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
            )
        )
    )


def test_the_log_product_is_a_sum_over_layers_and_bounds_the_function():
    model = conv_net()
    risk = risk_of(model, 1, 4, 4)
    found = log_spectral_product(risk)
    layers = [(model[0], (1, 4, 4)), (model.eval()[1], (3, 4, 4)), (model[4], (48,))]
    truth = sum(2 * math.log(float(torch.linalg.matrix_norm(dense(*layer), 2))) for layer in layers)
    assert float(found) == pytest.approx(truth)
    assert sum(float(e) for e in found.parts.values()) == pytest.approx(float(found))
    assert log_spectral_product(risk, spectral_norms(risk)) == found
    x, y = torch.randn(2, 50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stretch = (model(x) - model(y)).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert float(stretch.max()) <= math.exp(float(found) / 2)


def test_a_layer_of_zeros_has_norm_rank_and_complexity_that_are_defined():
    model = seeded(lambda: mlp([3, 4, 2], nn.ReLU))
    nn.init.zeros_(model[0].weight)
    risk = risk_of(model, 3)
    assert float(spectral_norms(risk).parts["0.weight"]) == 0.0
    assert float(log_spectral_product(risk)) == -math.inf
    assert float(stable_ranks(risk).parts["0.weight"]) == 0.0
    assert float(spectral_complexity(risk)) == 0.0
    start = {name: p + 1 for name, p in risk.params().items()}  # 4 rows of 3 ones away
    last = float(torch.linalg.matrix_norm(model[2].weight.detach(), 2))
    assert float(spectral_complexity(risk, start)) == pytest.approx(4 * 3**0.5 * last)


def test_stable_ranks_are_ratios_of_norms():
    risk = problem("conv").risk()
    found = stable_ranks(risk)
    for name, part in found.parts.items():
        W = risk.params()[name].flatten(1)
        assert float(part) == pytest.approx(float(W.square().sum() / torch.linalg.matrix_norm(W, 2) ** 2))
    assert float(found) == pytest.approx(sum(float(e) for e in found.parts.values()))


@pytest.mark.parametrize("convolutions", ["operator", "matrix"])
@pytest.mark.parametrize("reference", [False, True])
def test_the_spectral_complexity_is_that_of_the_matrices(convolutions, reference):
    model, start = conv_net(), conv_net()
    with torch.no_grad():
        for p in start.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    model.eval(), start.eval()
    shapes = [(0, (1, 4, 4)), (1, (3, 4, 4)), (4, (48,))]
    if convolutions == "operator":
        A, M = ([dense(m[i], shape) for i, shape in shapes] for m in (model, start))
    else:
        A, M = ([m[0].weight.detach().flatten(1), dense(m[1], (3, 1, 1)), m[4].weight.detach()] for m in (model, start))
    norms = [torch.linalg.matrix_norm(a, 2) for a in A]
    apart = [a - m if reference else a for a, m in zip(A, M, strict=True)]
    terms = [(b.norm(dim=1).sum() / s) ** (2 / 3) for b, s in zip(apart, norms, strict=True)]
    truth = math.prod(map(float, norms)) * float(sum(terms)) ** 1.5
    risk = risk_of(model, 1, 4, 4)
    found = spectral_complexity(risk, start.state_dict() if reference else None, convolutions=convolutions)
    assert float(found) == pytest.approx(truth)
    assert sum(float(e) ** (2 / 3) for e in found.parts.values()) ** 1.5 == pytest.approx(truth)


def test_rescaling_layers_against_each_other_moves_the_norm_and_not_the_product():
    model = seeded(lambda: mlp([3, 4, 2], nn.ReLU))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(10), other[0].bias.mul_(10), other[2].weight.div_(10)
    risks = [risk_of(m, 3) for m in (model, other)]
    for measure, same in (
        (log_spectral_product, True),
        (stable_ranks, True),
        (spectral_complexity, True),
        (path_norm, True),
        (weight_norm, False),
    ):
        first, second = (float(measure(risk)) for risk in risks)
        assert (first == pytest.approx(second)) is same


# ----------------------------------------------------------------------------------------------- path norm


def paths_of(model: nn.Sequential, inputs: int) -> float:
    """The sum over paths of squared weights of a chain of linear layers, path by path."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    sizes = [inputs] + [layer.out_features for layer in layers]
    total = 0.0
    for start in range(len(layers) + 1):  # from the inputs, or from the biases of layer start - 1
        for units in itertools.product(*(range(size) for size in sizes[start:])):
            weight = 1.0 if start == 0 else float(layers[start - 1].bias.detach()[units[0]])
            for layer, (a, b) in zip(layers[start:], itertools.pairwise(units), strict=True):
                weight *= float(layer.weight.detach()[b, a])
            total += weight**2
    return total


def test_the_path_norm_is_a_sum_over_paths():
    model = seeded(lambda: mlp([3, 4, 3, 2], nn.ReLU))
    found = path_norm(risk_of(model, 3))
    assert float(found) ** 2 == pytest.approx(paths_of(model, 3))
    assert float(found.parts["squared"]) == pytest.approx(paths_of(model, 3))


def test_batch_norm_is_folded_into_the_layer_before_it():
    model = with_statistics(
        seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)))
    )
    norm = model[1]
    folded = seeded(lambda: mlp([3, 4, 2], nn.ReLU))
    with torch.no_grad():
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        folded[0].weight.copy_(scale[:, None] * model[0].weight)
        folded[0].bias.copy_(scale * (model[0].bias - norm.running_mean) + norm.bias)
        folded[2].load_state_dict(model[3].state_dict())
    assert float(path_norm(risk_of(model, 3))) == pytest.approx(float(path_norm(risk_of(folded, 3))))


def test_the_path_norm_does_not_see_how_a_shift_is_shared_between_a_bias_and_a_running_mean():
    model = with_statistics(
        seeded(lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()))
    )
    before = float(path_norm(risk_of(model, 1, 3, 3)))
    with torch.no_grad():
        model[0].bias.add_(5.0), model[1].running_mean.add_(5.0)
    assert float(path_norm(risk_of(model, 1, 3, 3))) == pytest.approx(before)


@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_on_its_own_is_a_layer_of_paths(affine):
    model = with_statistics(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3, affine=affine)))
    if not affine:
        model.append(seeded(lambda: nn.Linear(3, 2)))  # a network without parameters has no risk
    norm = model[1]
    scale = (norm.running_var + norm.eps).rsqrt() * (norm.weight.detach() if affine else 1.0)
    shift = (norm.bias.detach() if affine else 0.0) - norm.running_mean * scale
    out = scale.square() + shift.square()
    if not affine:
        out = model[2].weight.detach().square() @ out + model[2].bias.detach().square()
    assert float(path_norm(risk_of(model, 3)).parts["squared"]) == pytest.approx(float(out.sum()))


class Join(nn.Module):
    """What goes into BatchNorm is used past it too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.relu(x + self.norm(x)))


def test_paths_add_up_where_branches_join():
    model = with_statistics(seeded(Join))
    scale = model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()
    shift = model.norm.bias - model.norm.running_mean * scale
    hidden = model.first.weight.square().sum(1) + model.first.bias.square()
    hidden = hidden + scale.square() * hidden + shift.square()
    total = (model.last.weight.square() @ hidden + model.last.bias.square()).sum()
    assert float(path_norm(risk_of(model, 3)).parts["squared"]) == pytest.approx(total.item())


@settings(max_examples=10)
@given(seed=st.integers(0, 100), factor=st.floats(0.01, 100))
def test_the_path_norm_stays_when_a_single_unit_is_rescaled(seed, factor):
    model = seeded(lambda: mlp([3, 4, 2], nn.ReLU), seed)
    before = float(path_norm(risk_of(model, 3)))
    with torch.no_grad():
        model[0].weight[1].mul_(factor), model[0].bias[1].mul_(factor), model[2].weight[:, 1].div_(factor)
    assert float(path_norm(risk_of(model, 3))) == pytest.approx(before)


def test_the_path_norm_of_circular_padding_does_not_depend_on_what_memory_held():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Flatten())
    squared = copy.deepcopy(model)
    with torch.no_grad():
        for p in squared.parameters():
            p.square_()
    truth = squared(torch.ones(1, 2, 4, 4)).sum().item()
    before = [torch.full((1, 2, 6, 6), -1.0) for _ in range(100)]  # the padded image is as large, and made empty
    del before
    assert float(path_norm(risk_of(model, 2, 4, 4)).parts["squared"]) == pytest.approx(truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_path_norm_of_a_network_in_16_bits_is_that_of_its_weights(dtype):
    risk = risk_of(seeded(lambda: mlp([3, 4, 2], nn.ReLU)), 3)
    assert float(path_norm(risk.to(dtype=dtype))) == pytest.approx(float(path_norm(risk)), rel=0.02)


def test_path_norms_of_convolutions_and_shared_weights_are_defined():
    assert float(path_norm(problem("conv").risk())) > 0
    model = seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    model[2].weight = model[0].weight
    W, a, b = (p.detach().square() for p in (model[0].weight, model[0].bias, model[2].bias))
    expected = (W @ (W.sum(1) + a) + b).sum()
    assert float(path_norm(risk_of(model, 2)).parts["squared"]) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp_mse", {}, "not positively homogeneous: with inputs and biases times"),
        ("mlp_smoothed", {}, "not positively homogeneous"),
        ("attention", {}, r"norm \(LayerNorm\) has weights"),
        ("language", {}, r"embedding \(Embedding\) has weights"),
        ("residual", {"mode": "train"}, "use mode='eval'"),
        ("mlp_relu", {"dropout": True}, "no dropout"),
    ],
)
def test_a_network_without_a_path_norm_is_refused(name, options, message):
    with pytest.raises(ritz.errors.UnsupportedError, match=message):
        path_norm(problem(name).risk(**options))


@pytest.mark.parametrize("activation", [nn.Hardtanh, nn.ReLU6, nn.Softplus, nn.Tanh])
def test_activations_that_saturate_are_found_whatever_the_size_of_the_inputs(activation):
    model = seeded(lambda: mlp([3, 4, 2], activation))
    for scale in (1e-2, 1.0):
        X = scale * torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        with pytest.raises(ritz.errors.UnsupportedError, match="not positively homogeneous"):
            path_norm(ritz.Risk(model, nn.MSELoss(), (X, torch.zeros(4, 2))))


class Signed(nn.Module):
    """Two layers, and something between them that has no weights."""

    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 4), nn.Linear(4, 2), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


@pytest.mark.parametrize(
    "between", [lambda h: (-h).relu(), lambda h: 3 * h.relu() - h.flip(1).relu(), lambda h: (-2 * h).relu()]
)
def test_a_network_that_subtracts_has_no_path_norm(between):
    risk = risk_of(seeded(lambda: Signed(between)), 3)
    with pytest.raises(ritz.errors.UnsupportedError, match="subtracts, so paths through it"):
        path_norm(risk)


def test_an_opaque_risk_has_no_path_norm():
    risk = ritz.Risk(nn.Linear(1, 1), data=[torch.ones(1, 1)], batch_loss=lambda m, x: (m(x).sum(), 1))
    with pytest.raises(ritz.errors.UnsupportedError, match="batch_loss="):
        path_norm(risk)


def test_batch_norm_without_statistics_has_no_path_norm():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    risk = ritz.Risk(model, nn.MSELoss(), (torch.randn(4, 2), torch.ones(4, 2)), mode="eval", batch_size=4)
    with pytest.raises(ritz.errors.UnsupportedError, match="1 normalises by the batch's statistics"):
        path_norm(risk)


def test_a_sum_over_paths_that_overflows_is_refused():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False, dtype=torch.float32) for _ in range(4)))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1e6)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.full((1, 1), 1e-12, dtype=torch.float32), torch.zeros(1, 1)))
    with pytest.raises(ritz.errors.NonFiniteError, match=r"dtype=torch\.float64"):
        path_norm(risk)


def test_the_model_is_left_as_it_was():
    model = conv_net().train()
    risk = risk_of(model, 1, 4, 4)
    before = copy.deepcopy(model.state_dict())
    for measure in (path_norm, spectral_norms, spectral_complexity, stable_ranks, weight_norm):
        measure(risk)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
