"""Other weights, the same function: on networks of every make, and what becomes of their curvature."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import Problem, dense_hessian, split
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ritz.errors import UnsupportedError
from ritz.measures.transforms import (
    TRANSFORMS,
    joints,
    permute,
    rescale,
    rescale_batchnorm,
    scale_layers,
    scale_output,
)
from ritz.risk import Risk

torch.set_default_dtype(torch.float64)


# ------------------------------------------------------------------------------------------------ networks


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


class LeNet(nn.Module):
    """Convolutions, max-pooling, flattening, linear layers."""

    def __init__(self, activation=F.relu):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 3)
        self.fc1, self.fc2 = nn.Linear(16, 6), nn.Linear(6, 3)
        self.activation = activation

    def forward(self, x):
        x = F.max_pool2d(self.activation(self.conv1(x)), 2, ceil_mode=True)
        x = self.activation(self.conv2(F.pad(x, (1, 0, 1, 0))))
        return self.fc2(self.activation(self.fc1(x.flatten(1))))


class Block(nn.Module):
    """Convolution and BatchNorm twice, around a skip connection."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.block, self.head = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), Block(), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.block(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class AllConvolutional(nn.Module):
    """ReLU after the last convolution too, then the mean over the picture: outputs are never negative."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU()),
            *(nn.Conv2d(4, 3, 1), nn.ReLU()),
        )
        nn.init.constant_(self.layers[5].bias, 0.5)

    def forward(self, x):
        return self.layers(x).mean((2, 3))


class Functional(nn.Module):
    """No layer is a module."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))
        self.w2, self.b2 = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.linear((x @ self.w1 + self.b1).clamp(min=0), self.w2) + self.b2


class Slopes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 3)
        nn.init.uniform_(self.act.weight)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Concatenated(nn.Module):
    """Each activation with both signs, side by side."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(torch.cat([h, -h], 1).relu())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


PICTURES, POINTS = (1, 6, 6), (4,)
NETWORKS = {
    "mlp": (lambda: mlp(4, 6, 5, 3), POINTS),
    "lenet": (LeNet, PICTURES),
    "residual": (Residual, PICTURES),
    "all convolutional": (AllConvolutional, PICTURES),
    "functional": (Functional, POINTS),
    "slopes": (Slopes, POINTS),
    "concatenated": (Concatenated, POINTS),
}


def problem(name: str, make=None, shape=POINTS, seed: int = 0) -> Problem:
    """A network with statistics as after some training, and ragged batches."""
    make, shape = NETWORKS.get(name, (make, shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for m in model.modules():
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) and m.track_running_stats:
                m.running_mean.normal_()
                m.running_var.uniform_(0.01, 2.0)
                if m.affine:
                    nn.init.normal_(m.weight, 1.0, 0.3)
                    nn.init.normal_(m.bias, 0.0, 0.3)
        return Problem(model, nn.CrossEntropyLoss(), split(torch.randn(11, *shape), torch.randint(0, 3, (11,))))


def outputs(risk: Risk) -> Tensor:
    """Over all data, not only the batch that a transform looks at."""
    with risk.session():
        return torch.cat([risk.output(risk.params(), batch).detach() for batch in risk.batches])


def placed(risk: Risk, problem: Problem) -> Problem:
    """The problem with a model that has the weights of a risk, for dense matrices without ritz."""
    model = copy.deepcopy(problem.model)
    state = model.state_dict()
    state.update({name: t for name, t in risk.state().items() if name in state})
    model.load_state_dict(state)
    return Problem(model, problem.loss, problem.batches)


def same_function(before: Risk, after: Risk, scale: float = 1.0) -> None:
    torch.testing.assert_close(outputs(after), scale * outputs(before), rtol=1e-11, atol=1e-11 * scale)
    assert any(not torch.equal(before.params()[name], after.params()[name]) for name in before.names), "nothing moved"


# ----------------------------------------------------------------------------------------------- rescaling


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", ["0 -> 2", "2 -> 4"]),
        ("lenet", ["conv1 -> conv2", "conv2 -> fc1", "fc1 -> fc2"]),
        ("residual", ["block.norm1 -> block.conv2"]),
        ("all convolutional", ["layers.0 -> layers.3", "layers.3 -> layers.5"]),
        ("functional", ["w1 -> w2"]),
        ("slopes", ["fc1 -> fc2"]),
        ("concatenated", ["fc1 -> fc2"]),
    ],
)
def test_rescaling_any_joint_leaves_the_function_as_it_is(name, expected):
    risk = problem(name).risk()
    found = joints(risk)
    assert [str(joint) for joint in found] == expected
    for joint in found:
        for c in (1e-3, 0.5, 7.0):
            after = rescale(risk, c, joint)
            same_function(risk, after)
            assert after.loss() == pytest.approx(risk.loss(), rel=1e-12)
            for p in joint.up:
                torch.testing.assert_close(after.params()[p], risk.params()[p] * c)


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    log=st.floats(-6, 6),
    seed=st.integers(0, 99),
    which=st.integers(0, 2),
)
def test_a_factor_and_its_inverse_lead_back(sizes, log, seed, which):
    risk = problem("", lambda: mlp(4, *sizes, 3), seed=seed).risk()
    joint = which % len(joints(risk))
    there = rescale(risk, 10.0**log, joint)
    same_function(risk, rescale(there, 2.0, joint))
    back = rescale(there, 10.0**-log, joint)
    torch.testing.assert_close(risk.space.join(back.params()), risk.space.join(risk.params()))


@pytest.mark.parametrize("name", ["mlp", "slopes", "residual"])
def test_blocks_of_the_hessian_scale_by_the_inverse_square(name):
    """H(D w) = D^-1 H(w) D^-1 for the diagonal D of factors: exact, block by block."""
    case = problem(name)
    risk, c = case.risk(), 3.0
    joint = joints(risk)[-1]
    factors = {**dict.fromkeys(joint.up, c), **dict.fromkeys(joint.down, 1 / c)}
    D = torch.cat([torch.full((p.numel(),), factors.get(n, 1.0)) for n, p in risk.params().items()])
    before, after = dense_hessian(case), dense_hessian(placed(rescale(risk, c, joint), case))
    torch.testing.assert_close(after, before / D[:, None] / D[None, :], rtol=1e-8, atol=1e-11)
    traces = {
        n: (before.diagonal()[s].sum(), after.diagonal()[s].sum()) for n, s in risk.space.slices.items() if n in factors
    }
    for n, (was, now) in traces.items():
        torch.testing.assert_close(now, was / factors[n] ** 2, rtol=1e-9, atol=1e-12)


def test_the_largest_eigenvalue_grows_without_bound_while_the_function_stands():
    case = problem("mlp")
    risk = case.risk()
    tops = [torch.linalg.eigvalsh(dense_hessian(placed(rescale(risk, c), case)))[-1] for c in (1, 10, 100, 1000)]
    assert all(later > 50 * earlier for earlier, later in itertools.pairwise(tops[1:]))
    assert tops[-1] > 1e4 * tops[0]


def test_frozen_and_unchosen_parameters_move_along():
    case = problem("mlp")
    case.model[2].weight.requires_grad_(False)
    risk = case.risk(params=["0.*"])
    after = rescale(risk, 5.0)
    assert after.names == risk.names == ("0.weight", "0.bias")
    same_function(risk, after)
    torch.testing.assert_close(after.state()["2.weight"], case.model[2].weight / 5)


def test_transforms_can_follow_one_another():
    risk = problem("residual").risk()
    after = permute(rescale_batchnorm(rescale(risk, 3.0), 0.2), 1)
    same_function(risk, after)
    same_function(risk, scale_output(after, 2.0), 2.0)


def test_another_precision_is_used_where_the_risk_has_one():
    case = problem("lenet")
    model = copy.deepcopy(case.model).float()
    coarse = Risk(model, case.loss, [(x.float(), y) for x, y in case.batches])
    fine = Risk(model, case.loss, case.batches, dtype=torch.float64)
    assert rescale(coarse, 3.0).params()["conv1.weight"].dtype == torch.float32
    same_function(fine, rescale(fine, 3.0))


def test_a_factor_that_the_precision_does_not_hold_is_refused():
    case = problem("mlp")
    risk = Risk(copy.deepcopy(case.model).float(), case.loss, [(x.float(), y) for x, y in case.batches])
    rescale(risk, 1e12)  # large, and harmless
    for transform, c in [
        (rescale, 1e39),
        (rescale, 1e17),
        (rescale, 1e-17),
        (scale_output, 1e17),
        (scale_layers, 1e17),
    ]:
        with pytest.raises(UnsupportedError, match=r"square, which leaves the range of torch.float32.*or dtype="):
            transform(risk, c)
    small = risk.at({"2.weight": 1e-20 * risk.params()["2.weight"]})
    with pytest.raises(UnsupportedError, match=r"2.weight times 1e-15 would leave the range of torch.float32"):
        rescale(small, 1e15)


def test_an_overflow_inside_the_network_is_refused():
    """The weights are in range, what they make of the data is not."""
    case = problem("mlp")
    risk = Risk(copy.deepcopy(case.model).float(), case.loss, [(1e25 * x.float(), y) for x, y in case.batches])
    with pytest.raises(UnsupportedError, match=r"has moved the outputs by (nan|inf).*too coarse"):
        rescale(risk, 1e15)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "2", None, True])
def test_a_factor_must_be_a_positive_number(bad):
    risk = problem("mlp").risk()
    for name, argument in [("rescale", "factor"), ("batchnorm", "factor"), ("scale_output", "alpha")]:
        with pytest.raises(ValueError, match=f"{argument} must be a finite number larger than 0, got {bad!r}"):
            TRANSFORMS[name](risk, bad)
    with pytest.raises(ValueError, match="alpha must be"):
        scale_layers(risk, bad)


def test_what_the_trace_does_not_see_the_check_does():
    """A number that leaves torch on its way."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.a(x).relu()
            return self.c(h * torch.from_numpy(h.detach().numpy()).tanh())

    with pytest.raises(UnsupportedError, match=r"rescaling a -> c by 2 has moved the outputs by .* does not show"):
        rescale(problem("", Hidden).risk(), 2.0)


@pytest.mark.parametrize("activation", [nn.GELU, nn.Softplus])
def test_smooth_activations_have_no_joint(activation):
    risk = problem("", lambda: mlp(4, 5, 3, activation=activation)).risk()
    assert joints(risk) == ()
    with pytest.raises(UnsupportedError, match="no two layers are joined by a positively homogeneous path: 0: aten::"):
        rescale(risk, 2.0)


def test_tied_weights_are_not_rescaled():
    risk = problem("", Tied).risk()
    assert joints(risk) == ()
    with pytest.raises(UnsupportedError, match="a: it acts more than once"):
        rescale(risk, 2.0)


# --------------------------------------------------------------------------------------------------- alpha


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("alpha", [0.25, 3.0])
def test_scaling_the_last_layer_scales_the_outputs(name, alpha):
    risk = problem(name).risk()
    after = scale_output(risk, alpha)
    same_function(risk, after, alpha)
    moved = [n for n in risk.names if not torch.equal(risk.params()[n], after.params()[n])]
    last = {"all convolutional": "layers.5", "mlp": "4", "functional": "w2", "residual": "head"}.get(name, "fc2")
    assert moved == (["w2", "b2"] if name == "functional" else [f"{last}.weight", f"{last}.bias"])


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "residual"])
@pytest.mark.parametrize("alpha", [0.25, 3.0])
def test_scaling_all_layers_scales_the_outputs(name, alpha):
    risk = problem(name).risk()
    same_function(risk, scale_layers(risk, alpha), alpha)


def test_biases_scale_cumulatively():
    risk = problem("mlp").risk()
    after = scale_layers(risk, 8.0)
    for place, layer in enumerate(("0", "2", "4"), start=1):
        ratio = {n: after.params()[n] / risk.params()[n] for n in (f"{layer}.weight", f"{layer}.bias")}
        torch.testing.assert_close(ratio[f"{layer}.weight"], torch.full_like(ratio[f"{layer}.weight"], 2.0))
        torch.testing.assert_close(ratio[f"{layer}.bias"], torch.full_like(ratio[f"{layer}.bias"], 2.0**place))


def test_a_network_that_is_no_chain_has_no_layerwise_scaling():
    with pytest.raises(UnsupportedError, match=r"batch_norm is not positively homogeneous: T_alpha by layers needs"):
        scale_layers(problem("residual").risk(), 2.0)

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.a(x).relu()
            return self.c(h + self.b(h).relu())

    with pytest.raises(
        UnsupportedError, match=r"aten::add joins tensors that scale by c\^1 and c\^2.*use scale_output"
    ):
        scale_layers(problem("", Skip).risk(), 2.0)

    class Normalised(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out / out.norm(dim=1, keepdim=True)

    with pytest.raises(UnsupportedError, match="do not grow with the weights"):
        scale_layers(problem("", lambda: Normalised(4, 3)).risk(), 2.0)


def test_outputs_that_no_layer_scales_are_refused():
    risk = problem("", lambda: nn.Sequential(mlp(4, 3), nn.LogSoftmax(-1))).risk()
    with pytest.raises(UnsupportedError, match=r"in any one layer: 0.0: aten::_log_softmax is not"):
        scale_output(risk, 2.0)


def test_a_risk_without_outputs_cannot_scale_them_but_can_be_rescaled():
    case = problem("mlp")
    risk = Risk(
        case.model, data=case.batches, batch_loss=lambda m, b: (F.cross_entropy(m(b[0]), b[1]) * len(b[1]), len(b[1]))
    )
    for transform in (scale_output, scale_layers):
        with pytest.raises(UnsupportedError, match="batch_loss="):
            transform(risk, 2.0)
    assert rescale(risk, 3.0).loss() == pytest.approx(risk.loss(), rel=1e-12)
    assert permute(risk).loss() == pytest.approx(risk.loss(), rel=1e-12)


def along_alpha(case: Problem, transform) -> tuple[list[float], list[float], list[float]]:
    """Loss, trace and largest |eigenvalue| for growing alpha, from dense matrices."""
    risks = [transform(case.risk(), alpha) for alpha in (1.0, 30.0, 1000.0)]
    dense = [dense_hessian(placed(risk, case)) for risk in risks]
    tops = [float(torch.linalg.eigvalsh(H).abs().max()) for H in dense]
    return [risk.loss() for risk in risks], [float(H.trace()) for H in dense], tops


def labelled(activation: type[nn.Module], wrong: int) -> Problem:
    """Labels that the network predicts, but for some."""
    case = problem("", lambda: mlp(4, 6, 3, activation=activation), seed=2)
    x = case.data[0]
    values, labels = case.model(x).detach().sort(-1)
    clear = (values[:, -1] - values[:, -2]) > 0.05  # ties would need a larger alpha
    x, labels = x[clear], labels[clear]
    y = torch.cat([labels[:wrong, 0], labels[wrong:, -1]])
    return Problem(case.model, case.loss, [(x, y)])


@pytest.mark.parametrize("transform", [scale_output, scale_layers])
def test_loss_and_curvature_vanish_as_alpha_grows_if_every_point_is_right(transform):
    losses, traces, tops = along_alpha(labelled(nn.ReLU, wrong=0), transform)
    assert losses[2] < 1e-12
    assert abs(traces[2]) < 1e-9 * traces[0]
    assert tops[2] < 1e-9 * tops[0]


def test_they_do_not_if_one_point_is_wrong():
    losses, traces, tops = along_alpha(labelled(nn.Tanh, wrong=1), scale_output)
    assert losses[2] > 10 * losses[1] > 10 * losses[0]
    assert abs(traces[2]) > 10 * abs(traces[1])
    assert tops[2] > 10 * tops[1]


def test_the_trace_of_a_piecewise_linear_network_vanishes_even_so():
    """It is that of the Gauss-Newton matrix, which vanishes with the softmax; the spectral norm does not vanish."""
    losses, traces, tops = along_alpha(labelled(nn.ReLU, wrong=1), scale_output)
    assert losses[2] > 10 * losses[1]
    assert abs(traces[2]) < 1e-9 * traces[0]
    assert tops[2] > 0.1 * tops[0]


# ----------------------------------------------------------------------------------------------- BatchNorm


def test_rescaling_before_batchnorm_leaves_the_function_as_it_is():
    risk = problem("residual").risk()
    for layer in ("stem", "block.conv1", "block.conv2"):
        for c in (1e-2, 7.0):
            after = rescale_batchnorm(risk, c, layer)
            same_function(risk, after)
            torch.testing.assert_close(after.params()[f"{layer}.weight"], c * risk.params()[f"{layer}.weight"])
    first = rescale_batchnorm(risk, 7.0)
    torch.testing.assert_close(first.params()["stem.bias"], 7 * risk.params()["stem.bias"])
    torch.testing.assert_close(first.state()["norm.running_var"], 49 * risk.model.norm.running_var)


def test_eps_is_made_up_for_in_gamma():
    """With a large eps the plain rescaling would move the function a lot."""

    def make():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=1.0), nn.ReLU(), nn.Linear(5, 3))

    risk = problem("", make).risk()
    after = rescale_batchnorm(risk, 0.1)
    same_function(risk, after)
    v = risk.model[1].running_var
    expected = risk.model[1].weight * (0.01 * v + 1).sqrt() / (0.1 * (v + 1).sqrt())
    torch.testing.assert_close(after.params()["1.weight"], expected.detach())
    plain = after.at({"1.weight": risk.params()["1.weight"]})
    assert float((outputs(plain) - outputs(risk)).abs().max()) > 0.1


def test_batchnorm_without_gamma_will_do_only_where_eps_is_nothing():
    def make(eps):
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=eps, affine=False), nn.ReLU(), nn.Linear(5, 3))

    risk = problem("", lambda: make(0.0)).risk()
    same_function(risk, rescale_batchnorm(risk, 3.0))
    with pytest.raises(UnsupportedError, match=r"1 has no gamma to compensate eps = 1e-05.*affine=True"):
        rescale_batchnorm(problem("", lambda: make(1e-5)).risk(), 3.0)


def test_batch_statistics_are_refused():
    with pytest.raises(UnsupportedError, match="mode='train' BatchNorm uses the statistics of each batch"):
        rescale_batchnorm(problem("residual").risk(mode="train"), 2.0)
    untracked = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    batches = problem("", lambda: untracked).batches
    with pytest.raises(
        UnsupportedError, match="no layer is followed by BatchNorm with running statistics: 0: aten::nat"
    ):
        rescale_batchnorm(Risk(untracked, nn.CrossEntropyLoss(), batches), 2.0)


def test_other_normalisations_and_layers_without_one_are_refused():
    with pytest.raises(
        UnsupportedError, match=r"no layer is followed.*0: the outputs|no layer is followed.*0: it does"
    ):
        rescale_batchnorm(problem("mlp").risk(), 2.0)
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))  # noqa: E731
    with pytest.raises(UnsupportedError, match="aten::native_layer_norm is not positively homogeneous"):
        rescale_batchnorm(problem("", make).risk(), 2.0)
    with pytest.raises(UnsupportedError, match="'head' is not followed by BatchNorm"):
        rescale_batchnorm(problem("residual").risk(), 2.0, "head")
    with pytest.raises(UnsupportedError, match=r"'nowhere' is not followed by BatchNorm.*no chosen weight"):
        rescale_batchnorm(problem("residual").risk(), 2.0, "nowhere")


# --------------------------------------------------------------------------------------------- permutations


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mlp", ["0", "2"]),
        ("lenet", ["conv1", "conv2", "fc1"]),
        ("residual", ["block.conv1", "block.norm1"]),
        ("all convolutional", ["layers.0", "layers.3"]),
        ("functional", ["w1"]),
        ("slopes", ["fc1"]),
    ],
)
def test_permuting_hidden_units_leaves_the_function_as_it_is(name, layers):
    risk = problem(name).risk()
    same_function(risk, permute(risk))
    for seed, layer in enumerate(layers):
        after = permute(risk, seed, layer)
        same_function(risk, after)
        for n, p in risk.params().items():  # the same numbers elsewhere
            torch.testing.assert_close(after.params()[n].flatten().sort().values, p.flatten().sort().values)


def test_a_permutation_permutes_the_hessian():
    case = problem("mlp")
    before, after = dense_hessian(case), dense_hessian(placed(permute(case.risk(), 3), case))
    torch.testing.assert_close(torch.linalg.eigvalsh(after), torch.linalg.eigvalsh(before), rtol=1e-8, atol=1e-11)
    assert float((after - before).abs().max()) > 1e-3


def test_statistics_of_batchnorm_go_along():
    risk = problem("residual").risk()
    after = permute(risk, 0, "block.conv1").state()
    model = risk.model.block
    order = [int((model.norm1.running_var == v).nonzero()) for v in after["block.norm1.running_var"]]
    assert sorted(order) == [0, 1, 2, 3] != order
    torch.testing.assert_close(after["block.conv1.weight"], model.conv1.weight[order])
    torch.testing.assert_close(after["block.norm1.running_mean"], model.norm1.running_mean[order])
    torch.testing.assert_close(after["block.norm1.weight"], model.norm1.weight[order])
    torch.testing.assert_close(after["block.conv2.weight"], model.conv2.weight[:, order])


def test_any_activation_that_acts_unit_by_unit_will_do():
    for activation in (nn.GELU, nn.Tanh, nn.Softplus):
        risk = problem("", lambda a=activation: mlp(4, 5, 3, activation=a)).risk()
        same_function(risk, permute(risk))
    make = lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3))  # noqa: E731
    same_function(risk := problem("", make).risk(), permute(risk))


@given(seed=st.integers(-5, 10_000))
@settings(max_examples=10)
def test_a_permutation_is_never_the_identity(seed):
    risk = problem("", lambda: mlp(4, 2, 3)).risk()
    same_function(risk, permute(risk, seed))


def test_seeds_name_permutations():
    risk = problem("lenet").risk()
    flat = [risk.space.join(permute(risk, seed).params()) for seed in (0, 0, 1)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


def test_a_joint_or_its_index_names_the_units_of_its_first_layer():
    risk = problem("lenet").risk()
    by_name = permute(risk, 4, "conv2").params()
    for joint in (1, joints(risk)[1]):
        after = permute(risk, 4, joint).params()
        assert all(torch.equal(after[n], by_name[n]) for n in by_name)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.relu(self.b(F.relu(self.a(x)))).mean((2, 3)))


def test_units_that_cannot_be_permuted_are_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="stem: aten::add joins its units with those of another branch"):
        permute(problem("residual").risk(), 0, "stem")
    with pytest.raises(UnsupportedError, match="4: its units are the outputs of the network"):
        permute(problem("mlp").risk(), 0, "4")
    with pytest.raises(UnsupportedError, match="no layer 'nowhere' takes part in the outputs"):
        permute(problem("mlp").risk(), 0, "nowhere")
    with pytest.raises(UnsupportedError, match="0: it has one unit only"):
        permute(problem("", lambda: mlp(4, 1, 3)).risk())
    grouped = problem("", Grouped, PICTURES).risk()
    with pytest.raises(UnsupportedError, match=r"a: b.weight is that of a grouped convolution.*b: it is a grouped"):
        permute(grouped)
    assert len(joints(grouped)) == 2  # which is no obstacle to a rescaling
    same_function(grouped, rescale(grouped, 3.0, 1))


def test_a_layout_that_is_not_by_blocks_is_refused_by_the_check():
    with pytest.raises(UnsupportedError, match="permuting the units of fc1 has moved the outputs") as refused:
        permute(problem("concatenated").risk())
    assert "factor" not in str(refused.value)  # a permutation has none
    assert "too coarse" not in str(refused.value)  # float64 is not


def test_the_next_layer_is_permuted_where_the_check_refuses_the_first():
    grouped = problem("", lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), *mlp(6, 5, 3))).risk()
    with pytest.raises(UnsupportedError, match="0: permuting the units of 0 has moved the outputs"):
        permute(grouped, 1, "0")  # units of one group with those of another
    same_function(grouped, permute(grouped, 1))


def test_a_weight_that_reads_its_own_units_is_not_permuted():
    with pytest.raises(UnsupportedError, match="a: it reads its own units"):
        permute(problem("", Tied).risk(), 0, "a")


# --------------------------------------------------------------------------------------------------- table


def test_the_table_holds_every_transform_and_what_it_keeps():
    risk = problem("residual").risk()
    assert set(TRANSFORMS) == {"rescale", "scale_output", "scale_layers", "batchnorm", "permute"}
    for name, transform in TRANSFORMS.items():
        assert transform.text
        if name != "scale_layers":
            scale = 2.0 if transform.keeps == "prediction" else 1.0
            same_function(risk, transform(risk, 2), scale)
    assert [t.keeps for t in TRANSFORMS.values()].count("prediction") == 2
    with pytest.raises(TypeError, match="does not support item assignment"):
        TRANSFORMS["rescale"] = None


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nothing_of_the_model_changes(name):
    case = problem("residual" if name == "batchnorm" else "lenet")
    case.model.train()
    F.cross_entropy(case.model(case.batches[0][0]), case.batches[0][1]).backward()
    before = copy.deepcopy(case.model)
    grads = [p.grad.clone() for p in case.model.parameters()]
    generator = torch.get_rng_state()
    TRANSFORMS[name](case.risk(), 3)
    with pytest.raises((UnsupportedError, ValueError)):
        TRANSFORMS[name](problem("", lambda: nn.Sequential(nn.Softmax(-1), nn.Linear(4, 3), nn.Softmax(-1))).risk(), 3)
    assert all(m.training for m in case.model.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    for was, now in zip(before.state_dict().values(), case.model.state_dict().values(), strict=True):
        assert torch.equal(was, now)
    assert all(torch.equal(was, p.grad) for was, p in zip(grads, case.model.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in case.model.modules())
    torch.ones(2).tanh()  # no trace is listening
