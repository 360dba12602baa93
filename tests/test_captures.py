"""Recorded forward passes: who owns a parameter, what went into its layer, which gradients came out."""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from sample_truth import data, randomised
from torch import nn

from ritz import captures
from ritz.captures import owners, uses
from ritz.errors import UnsupportedError
from ritz.layers import without_rule
from ritz.risk import Risk

torch.set_default_dtype(torch.float64)


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
    assert [[c.name for c in calls] for calls in stacks] == [["a", "b"], ["a", "b"]]
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
    monkeypatch.setattr(captures, "_in_turn", captures._batched)
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
