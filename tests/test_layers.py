"""Layer rules against gradients taken one sample and one cotangent at a time."""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ritz import layers
from ritz.errors import UnsupportedError
from ritz.layers import Capture, owners, rule_of, squared_norms, uses, without_rule
from ritz.risk import Risk

torch.set_default_dtype(torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and buffer away from its default, so that none is 0 or 1 by chance."""
    g = seeded(seed)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=g)
    for name, b in module.named_buffers():
        if b.is_floating_point():
            b.data = torch.rand(b.shape, generator=g) + (0.5 if "var" in name else 0.0)
    return module.eval()


def captured(module: nn.Module, x: torch.Tensor, num: int = 3) -> Capture:
    out = module(x)
    grad = torch.randn(num, *out.shape, generator=seeded(1))
    names = {own: f"layer.{own}" for own, _ in module.named_parameters()}
    return Capture("layer", module, x, grad, names, dict(module.named_buffers()))


def truth(capture: Capture, size: int) -> dict[str, torch.Tensor]:
    """Per-sample gradients in full: all rows of the other samples are cut away."""
    rows = len(capture.input) // size
    found = {name: torch.zeros(size) for name in capture.params.values()}
    for i in range(size):
        own = slice(i * rows, (i + 1) * rows)
        for cotangent in capture.grad:
            capture.module.zero_grad()
            (capture.module(capture.input[own]) * cotangent[own]).sum().backward()
            for attribute, name in capture.params.items():
                found[name][i] += getattr(capture.module, attribute).grad.square().sum()
    return found


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 4, shape, generator=seeded(2))


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(3))


CASES = {
    "linear": (nn.Linear(3, 4), data(5, 3)),
    "linear without bias": (nn.Linear(3, 4, bias=False), data(5, 3)),
    "linear on few tokens, by Gram matrices": (nn.Linear(7, 8), data(5, 2, 7)),
    "linear on many tokens, directly": (nn.Linear(3, 2), data(5, 9, 3)),
    "linear on a grid": (nn.Linear(3, 2), data(5, 2, 3, 3)),
    "linear on one token": (nn.Linear(3, 2), data(5, 1, 3)),
    "conv1d": (nn.Conv1d(2, 3, 3), data(5, 2, 8)),
    "conv2d": (nn.Conv2d(2, 3, 3), data(5, 2, 6, 7)),
    "conv2d by Gram matrices": (nn.Conv2d(6, 8, 3), data(5, 6, 4, 4)),
    "conv2d to one pixel": (nn.Conv2d(2, 3, (4, 3)), data(5, 2, 4, 3)),
    "conv3d": (nn.Conv3d(2, 3, 2), data(5, 2, 3, 4, 3)),
    "conv with stride": (nn.Conv2d(2, 3, 3, stride=2), data(5, 2, 8, 7)),
    "conv with padding": (nn.Conv2d(2, 3, 3, padding=(2, 1)), data(5, 2, 4, 5)),
    "conv with dilation": (nn.Conv2d(2, 3, (3, 2), dilation=(2, 3)), data(5, 2, 7, 7)),
    "conv with groups": (nn.Conv2d(4, 6, 3, groups=2), data(5, 4, 5, 5)),
    "depthwise conv": (nn.Conv2d(4, 4, 3, groups=4, padding=1), data(5, 4, 5, 5)),
    "conv with everything": (nn.Conv2d(4, 6, (3, 2), (2, 1), (2, 1), (2, 1), 2), data(5, 4, 9, 6)),
    "conv padded to the same size": (nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), data(5, 2, 6, 6)),
    "conv not padded": (nn.Conv2d(2, 3, 3, padding="valid"), data(5, 2, 5, 5)),
    "conv padded by reflection": (nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), data(5, 2, 5, 5)),
    "conv padded in a circle": (nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"), data(5, 2, 6)),
    "batch norm on features": (nn.BatchNorm1d(3), data(5, 3)),
    "batch norm on images": (nn.BatchNorm2d(3), data(5, 3, 4, 2)),
    "layer norm": (nn.LayerNorm(3), data(5, 4, 3)),
    "layer norm of two dimensions": (nn.LayerNorm((4, 3)), data(5, 4, 3)),
    "layer norm without bias": (nn.LayerNorm(3, bias=False), data(5, 3)),
    "group norm": (nn.GroupNorm(2, 4), data(5, 4, 3, 3)),
    "embedding": (nn.Embedding(4, 3), tokens(5, 6)),
    "embedding of one token": (nn.Embedding(4, 3), tokens(5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's word on the cost
@pytest.mark.parametrize("name", CASES)
def test_squared_norms_are_those_of_per_sample_gradients(name):
    module, x = CASES[name]
    capture = captured(randomised(module), x)
    found, wanted = squared_norms(capture, len(x)), truth(capture, len(x))
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert wanted[key].min() > 0
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("embedding of one")])
def test_samples_may_have_several_rows_each(name):
    module, x = CASES[name]
    x = torch.cat([x, x.flip(0)])[:6]  # 3 samples of 2 rows
    capture = captured(randomised(module), x)
    found, wanted = squared_norms(capture, 3), truth(capture, 3)
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", CASES)
def test_a_small_workspace_changes_nothing(name, monkeypatch):
    module, x = CASES[name]
    capture = captured(randomised(module), x)
    whole = squared_norms(capture, len(x))
    monkeypatch.setitem(layers._WORKSPACE, "cpu", 100)
    for key, value in squared_norms(capture, len(x)).items():
        torch.testing.assert_close(value, whole[key])


def test_only_chosen_parameters_are_looked_at():
    capture = captured(nn.Linear(3, 4), data(5, 3))
    part = Capture("layer", capture.module, capture.input, capture.grad, {"bias": "b"}, {})
    assert squared_norms(part, 5).keys() == {"b"}
    torch.testing.assert_close(squared_norms(part, 5)["b"], squared_norms(capture, 5)["layer.bias"])


def test_rows_that_do_not_hold_the_samples_are_refused():
    with pytest.raises(UnsupportedError, match=r"the input \(5, 3\) of layer does not hold 2 samples"):
        squared_norms(captured(nn.Linear(3, 4), data(5, 3)), 2)
    image = captured(nn.Conv2d(2, 2, 3), data(2, 5, 5))
    with pytest.raises(UnsupportedError, match="without a batch dimension"):
        squared_norms(image, 2)


def test_normalisation_by_the_batch_is_refused():
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    with pytest.raises(UnsupportedError, match="normalises by the batch"):
        squared_norms(captured(norm, data(5, 3)), 5)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_subclasses_and_replaced_forwards_have_no_rule():
    assert rule_of(nn.Linear(1, 1)) is not None
    assert rule_of(Doubled(1, 1)) is None
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: x
    assert rule_of(layer) is None
    assert rule_of(nn.Embedding(2, 2, max_norm=1.0)) is None
    assert rule_of(nn.Bilinear(1, 1, 1)) is None
    with pytest.raises(UnsupportedError, match="PReLU has no layer rule"):
        squared_norms(captured(nn.PReLU(), data(5, 3)), 5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def test_a_tied_parameter_has_two_owners_and_one_name():
    model = Tied()
    names = tuple(name for name, _ in model.named_parameters())
    assert owners(model, names)["second"] == {"weight": "first.weight", "bias": "second.bias"}
    assert without_rule(model, names) == "first.weight is shared between modules"
    assert without_rule(model, ("first.bias", "second.bias")) is None
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert without_rule(normed, tuple(n for n, _ in normed.named_parameters())) is not None


def test_uses_counts_the_ways_of_a_leaf_into_the_graph():
    w = torch.ones(2, requires_grad=True)
    assert uses(w.exp(), {"w": w}) == {"w": 1}
    assert uses(w, {"w": w}) == {"w": 1}
    assert uses(w.detach(), {"w": w}) == {"w": 0}


# ------------------------------------------------------------------------------------------- Risk.captured


class Net(nn.Module):
    """In-place activation after a layer; a switch for each thing that may go wrong."""

    def __init__(self, trouble=""):
        super().__init__()
        self.trouble = trouble
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = F.relu(self.a(x), inplace=True)
        if self.trouble == "twice":
            h = F.relu(self.a(h))
        if self.trouble == "outside":
            h = h + self.a.bias
        if self.trouble == "unused":
            self.b(h)
            return h[:, :2].clone()
        if self.trouble == "fails":
            raise RuntimeError("half-way")
        return self.b(h)


def capture_all(model, cotangents):
    risk = Risk(model, nn.CrossEntropyLoss(), (data(4, 3), torch.tensor([0, 1, 0, 1])))
    with risk.session():
        out, stacks = risk.captured(risk.params(), next(iter(risk.batches)), cotangents)
        return out, list(stacks)


def units(out):
    """Two stacks, of one and of two cotangents."""
    eye = torch.eye(out[0].numel())[:, None].expand(-1, len(out), -1)
    yield eye[:1]
    yield torch.cat([eye[:1] * 2, eye[1:]])


def test_inputs_and_output_gradients_are_captured_for_every_stack():
    torch.manual_seed(0)
    model = Net()
    out, stacks = capture_all(model, units)
    assert [[c.name for c in captures] for captures in stacks] == [["a", "b"], ["a", "b"]]
    assert [c.grad.shape for c in stacks[1]] == [(2, 4, 3), (2, 4, 2)]
    x = data(4, 3)
    before = model.a(x)
    torch.testing.assert_close(out, model(x))
    assert not out.requires_grad
    first, last = stacks[1]
    torch.testing.assert_close(first.input, x)
    torch.testing.assert_close(last.input, before.relu())
    torch.testing.assert_close(last.grad[1], torch.tensor([0.0, 1.0]).expand(4, 2))
    torch.testing.assert_close(first.grad[0], 2 * model.b.weight[0] * (before > 0))
    torch.testing.assert_close(first.grad[0], 2 * stacks[0][0].grad[0])


def test_one_batched_backward_pass_gives_what_single_ones_give(monkeypatch):
    model = nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2, padding=1), nn.ReLU(inplace=True), nn.MaxPool1d(2),
        nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    _, singles = capture_all(randomised(model), units)
    monkeypatch.setattr(layers, "_in_turn", layers._batched)
    _, together = capture_all(model, units)
    for a, b in zip(chain(*singles), chain(*together), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_module_called_twice_is_captured_twice():
    _, stacks = capture_all(Net("twice"), units)
    assert [c.name for c in stacks[0]] == ["a", "a", "b"]


def test_a_parameter_used_outside_its_module_is_refused():
    with pytest.raises(UnsupportedError, match=r"a\.bias acts on the outputs other than"):
        capture_all(Net("outside"), units)


def test_a_call_that_does_not_reach_the_outputs_is_left_out():
    _, stacks = capture_all(Net("unused"), units)
    assert [c.name for c in stacks[0]] == ["a"]


@pytest.mark.parametrize("trouble", ["", "fails", "outside"])
def test_hooks_are_gone_afterwards_whatever_happened(trouble):
    model = Net(trouble)
    try:
        capture_all(model, units)
    except (RuntimeError, UnsupportedError):
        assert trouble
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_hooks_of_the_user_come_after_ours():
    model = Net()
    model.a.register_forward_hook(lambda module, args, output: 2 * output)
    _, stacks = capture_all(model, units)
    z = model.b.weight[0] * 2 * (nn.Linear.forward(model.a, data(4, 3)) > 0)
    torch.testing.assert_close(stacks[0][0].grad[0], z.detach())
