"""Multi-affine or not, by what the forward pass does; and what that is worth, against dense Hessians."""

import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ritz.linearity import multi_affine
from ritz.risk import Risk

torch.set_default_dtype(torch.float64)

# said by torch when oneDNN is switched off for a recurrent layer
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")


class Custom(nn.Module):
    """Two layers and a picture, for any forward pass."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act = forward

    def forward(self, x):
        return self.act(self, x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class Recurrent(nn.Module):
    def __init__(self, nonlinearity="relu"):
        super().__init__()
        self.rnn = nn.RNN(1, 3, nonlinearity=nonlinearity, batch_first=True)
        self.c = nn.Linear(3, 2)

    def forward(self, x):
        return self.c(self.rnn(x[..., None])[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.MultiheadAttention(2, 1, batch_first=True)
        self.c = nn.Linear(4, 2)

    def forward(self, x):
        x = x.reshape(len(x), 2, 2)
        return self.c(self.mix(x, x, x, need_weights=False)[0].flatten(1))


class StraightThrough(torch.autograd.Function):
    """A step with the gradient of the identity: not what its operations say."""

    @staticmethod
    def forward(x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class Kernel(torch.autograd.Function):
    """A square that torch does not see, as of a kernel in another language."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.square(x.detach().numpy()))

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # which is how it is met

    @torch.jit.script
    def scripted(x):
        return torch.tanh(x)


class Surrogate(torch.autograd.Function):
    """A spike, with a smooth gradient, as networks of spiking neurons have it."""

    @staticmethod
    def forward(x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + ctx.saved_tensors[0].abs()) ** 2


def sliced(m, x):
    h = m.a(x)
    h[:, :2] = h[:, 2:] * 3
    return m.c(h[:, torch.tensor([3, 2, 1, 0])])


def written(m, x):
    """A buffer filled in place, and products of it with a constant."""
    h = torch.zeros(len(x), 4)
    h.copy_(m.a(x)).clamp_(min=0).mul_(x).add_(1)
    return m.c(h)


def by_sample(m, x):
    """One sample after another, each through an activation that is its own."""
    return m.c(torch.stack([m.a(row).relu() if row[0] > 0 else m.a(row).tanh() for row in x]))


YES = {
    "linear": nn.Linear(4, 2),
    "ReLU MLP": nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)),
    "other piecewise-linear activations": nn.Sequential(
        nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 5), nn.Hardtanh(), nn.Linear(5, 5), nn.ReLU6(), nn.Linear(5, 5),
        nn.Hardsigmoid(), nn.Linear(5, 5), nn.PReLU(), nn.Linear(5, 5), nn.Threshold(0.1, 0.0), nn.Linear(5, 2),
    ),
    "max-pool convnet": nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(), nn.Linear(4, 2),
    ),
    "transposed convolution": nn.Sequential(
        nn.Unflatten(1, (4, 1, 1)), nn.ConvTranspose2d(4, 3, 2), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        nn.Linear(3, 2),
    ),
    "residual": Custom(lambda m, x: m.c(x + m.b(F.relu(m.a(x))))),
    "in-place ReLU": Custom(lambda m, x: m.c(F.relu_(m.a(x)))),
    "ReLU by a mask": Custom(lambda m, x: m.c(m.a(x) * (m.a(x) > 0))),
    "ReLU by where": Custom(lambda m, x: m.c(torch.where((h := m.a(x)) > 0, h, 0.1 * h))),
    "product of two branches": Custom(lambda m, x: m.c(m.a(x) * m.b(x))),
    "maximum of two branches": Custom(lambda m, x: m.c(torch.maximum(m.a(x), m.b(x)).abs())),
    "slices written in place": Custom(sliced),
    "buffer written in place": Custom(written),
    "curved in the data only": Custom(lambda m, x: m.c(m.a(x.tanh() * x).relu() / (1 + x.square().sum()))),
    "sorted": Custom(lambda m, x: m.c(m.a(x).sort(-1).values + m.b(x).cumsum(-1).flip(0).flip(0))),
    "einsum": Custom(lambda m, x: m.c(torch.einsum("bi,bi->bi", m.a(x), m.b(x)))),
    "argmax": Custom(lambda m, x: m.c(x * (m.a(x).argmax(-1) == 1)[:, None])),
    "normalised data": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)),
    "nothing chosen reaches the outputs": Custom(lambda m, x: x[:, :2] * 1.0),
}  # fmt: skip

NO = {
    "tanh": (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), r"aten::tanh is not .* in 0\."),
    "GELU": (Custom(lambda m, x: m.c(F.gelu(m.a(x)))), "aten::gelu"),
    "x * x": (Custom(lambda m, x: m.c((h := m.a(x)) * h)), r"aten::mul multiplies two .* a\.bias"),
    "square": (Custom(lambda m, x: m.c(m.a(x).square())), "aten::pow"),
    "in-place product": (Custom(lambda m, x: m.c((h := m.a(x)).mul_(h))), "aten::mul"),
    "tied weights": (Tied(), r"both depend on a\.weight"),
    "a module called twice": (Custom(lambda m, x: m.c(m.a(F.relu(m.a(x))))), "both depend on a"),
    "gate with a common stem": (Custom(lambda m, x: m.c((h := m.a(x)) * m.b(h))), "both depend on a"),
    "sigmoid gate": (Custom(lambda m, x: m.c(m.a(x) * m.b(x).sigmoid())), "aten::sigmoid"),
    "attention": (Attention(), "depend on mix|aten::_?softmax|aten::_s"),
    "LayerNorm": (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), "aten::native_layer_norm"),
    "GroupNorm": (nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)), "aten::native_group_norm"),
    "RNN": (Recurrent(), r"both depend on rnn\."),
    "division": (Custom(lambda m, x: m.c(x / m.a(x))), "aten::div is not piecewise linear in a"),
    "softmax of the outputs": (Custom(lambda m, x: m.c(x).log_softmax(-1)), "aten::_log_softmax"),
    "norm": (Custom(lambda m, x: m.c(x) * m.a(x).norm()), "norm"),
    "complex numbers": (Custom(lambda m, x: m.c((m.a(x) * (1 + 1j)).abs())), "complex"),
    "a list of tensors": (Custom(lambda m, x: m.c(torch._foreach_exp([m.a(x)])[0])), "aten::_foreach_exp"),
    "straight-through gradient": (
        Custom(lambda m, x: m.c(StraightThrough.apply(m.a(x)))), "StraightThrough has its own gradient"
    ),
    "a kernel of one's own beside the identity": (Custom(lambda m, x: m.c((h := m.a(x)) + Kernel.apply(h))), "Kernel"),
    "TorchScript": (Custom(lambda m, x: m.c(scripted(m.a(x)))), "aten::tanh"),
    "spikes beside what they are taken from": (
        Custom(lambda m, x: m.c((h := m.a(x)) - Surrogate.apply(h))),
        "Surrogate has its own gradient, .*by operations of torch",
    ),
    "through a view": (Custom(lambda m, x: m.c((h := m.a(x)) * h.view(-1).view_as(h))), "aten::mul"),
    "through a write": (
        Custom(lambda m, x: m.c((h := m.a(x)) * torch.zeros(len(x), 4).index_copy_(1, torch.arange(4), h))),
        "aten::mul",
    ),
}  # fmt: skip


def risk_of(model: nn.Module, **keywords) -> Risk:
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(3, 4, generator=g), torch.tensor([0, 1, 1])
    return Risk(model, nn.CrossEntropyLoss(), (X, y), **keywords)


def curvature_of_outputs(risk: Risk) -> float:
    """The largest |d^2 f / dw^2| of any output and single weight: central differences along each coordinate."""
    with risk.session():
        batch = next(iter(risk.batches))
        point, step, largest = risk.space.join(risk.params()), 1e-4, 0.0
        middle = risk.output(risk.params(), batch)
        for unit in torch.eye(risk.dim):
            ends = [risk.output(risk.space.split(point + sign * step * unit), batch) for sign in (1, -1)]
            largest = max(largest, float((ends[0] + ends[1] - 2 * middle).abs().max()) / step**2)
    return largest


@pytest.fixture(autouse=True)
def _seeded():
    """Weights of the networks above, drawn once more for each test so that no kink is near."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for model in [*YES.values(), *(model for model, _ in NO.values())]:
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()


@pytest.mark.parametrize("name", YES)
def test_networks_affine_in_each_weight_are_found(name):
    risk = risk_of(YES[name])
    assert multi_affine(risk).holds, multi_affine(risk).reason
    assert curvature_of_outputs(risk) < 1e-5


@pytest.mark.parametrize("name", NO)
def test_networks_curved_in_a_weight_are_refused_with_the_operation(name):
    model, reason = NO[name]
    found = multi_affine(risk_of(model))
    assert not found.holds
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize(
    "name",
    [
        "tanh",
        "x * x",
        "a kernel of one's own beside the identity",
        "tied weights",
        "gate with a common stem",
        "RNN",
        "LayerNorm",
    ],
)
def test_the_refused_ones_are_curved_indeed(name):  # else the list could be empty
    assert curvature_of_outputs(risk_of(NO[name][0])) > 1e-3


def test_batch_norm_is_affine_by_running_statistics_and_not_by_those_of_the_batch():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert multi_affine(risk_of(model)).holds
    found = multi_affine(risk_of(model, mode="train"))
    assert not found.holds
    assert "batch_norm" in found.reason


def test_frozen_parameters_are_constants():
    model = Tied()
    assert not multi_affine(risk_of(model)).holds
    assert multi_affine(risk_of(model, params=["b.bias", "c.*"])).holds
    model.a.weight.requires_grad_(False)
    assert multi_affine(risk_of(model)).holds
    tanh = NO["tanh"][0]
    assert multi_affine(risk_of(tanh, params="2.*")).holds


def test_what_code_of_the_user_does_with_other_samples_is_seen():
    """The third sample goes through a tanh, within a batch and as one of its own."""
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(3, 4, generator=g), torch.tensor([0, 1, 1])
    X[:, 0] = torch.tensor([1.0, 1.0, -1.0])
    model = Custom(by_sample)
    for batch_size in (3, 2, 1):
        found = multi_affine(Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=batch_size))
        assert not found.holds
        assert "aten::tanh" in found.reason
    assert multi_affine(Risk(model, nn.CrossEntropyLoss(), (X[:2], y[:2]))).holds


def test_networks_of_torch_alone_are_known_by_two_samples(monkeypatch):
    def walk(*_, **__):
        raise AssertionError("a walk over all data")

    monkeypatch.setattr(Risk, "fold", walk)
    assert multi_affine(risk_of(YES["ReLU MLP"])).holds
    with pytest.raises(AssertionError, match="a walk"):
        multi_affine(risk_of(YES["residual"]))


def test_parameters_that_share_memory_are_still_two():
    model = Custom(lambda m, x: m.c(m.b(m.a(x))))
    both = torch.randn(8, 4)
    model.a.weight.data, model.b.weight.data = both[:4], both[4:]
    assert multi_affine(risk_of(model)).holds


def test_dropout_with_a_frozen_mask_is_linear():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU(), nn.Linear(4, 2))
    assert multi_affine(risk_of(model, dropout=True)).holds


def test_nothing_is_left_behind_by_a_trace_that_stops_half_way():
    model = NO["tanh"][0].train()
    before = torch.get_rng_state()
    multi_affine(risk_of(model))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    torch.ones(2, requires_grad=True).tanh()  # no trace is listening
