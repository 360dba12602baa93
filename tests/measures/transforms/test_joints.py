"""Which layers are joined, by what the forward pass does; each answer against the network itself, scaled by hand."""

import re
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from ritz.errors import UnsupportedError
from ritz.measures.transforms.degrees import Conflict, Step, Tape, Weight, solve
from ritz.measures.transforms.joints import Joint, joints, pick
from ritz.measures.transforms.tape import trace
from ritz.risk import Risk

torch.set_default_dtype(torch.float64)

# said by torch when oneDNN is switched off for a recurrent layer
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")


class Custom(nn.Module):
    """Layers a, b, c and more, for any forward pass from (n, 4) to (n, 2)."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.wide = nn.Linear(8, 2)
        self.conv = nn.Conv2d(4, 3, 1)
        self.norm, self.batch_norm, self.slope = nn.LayerNorm(4), nn.BatchNorm1d(4), nn.PReLU(4)
        self.matrix, self.gain = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self.act = forward
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            for p in self.parameters():
                nn.init.normal_(p)
            for module in (self.norm, self.batch_norm):
                nn.init.uniform_(module.weight, 0.5, 2.0)
            self.batch_norm.running_mean.normal_()
            self.batch_norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        return self.act(self, x)


def written(m, x):
    """A buffer filled in place, in two parts and back to front."""
    h = m.a(x)
    out = torch.zeros(len(x), 4)
    out[:, :2] = h[:, 2:]
    out[:, 2:].copy_(h[:, :2])
    return m.c(out.clamp_(min=0).mul_(3))


def half_written(m, x):
    out = m.a(x)
    out[:, :2] = x[:, :2]
    return m.c(out)


def overwritten(m, x):
    h = m.a(x)
    h.copy_(m.b(x))
    return m.c(h)


# what lies between the layers a and c and lets the scale through
PASS = {
    "nothing": lambda m, x: m.c(m.a(x)),
    "relu": lambda m, x: m.c(F.relu(m.a(x))),
    "relu in place": lambda m, x: m.c(F.relu_(m.a(x))),
    "relu by clamp": lambda m, x: m.c(m.a(x).clamp(min=0)),
    "relu by a mask": lambda m, x: m.c((h := m.a(x)) * (h > 0)),
    "relu by where": lambda m, x: m.c(torch.where((h := m.a(x)) > 0, h, 0.0)),
    "relu by where, whole numbers": lambda m, x: m.c(torch.where((h := m.a(x)) > 0, h, torch.tensor(0))),
    "relu by maximum": lambda m, x: m.c(torch.maximum(h := m.a(x), torch.zeros_like(h))),
    "relu by threshold": lambda m, x: m.c(F.threshold(m.a(x), 0.0, 0.0)),
    "leaky relu": lambda m, x: m.c(F.leaky_relu(m.a(x), 0.2)),
    "prelu": lambda m, x: m.c(m.slope(m.a(x))),
    "abs": lambda m, x: m.c(m.a(x).abs()),
    "dropout": lambda m, x: m.c(F.dropout(m.a(x), 0.5, m.training)),
    "max-pool": lambda m, x: m.c(F.max_pool1d(m.a(x)[:, None], 3, 1, 1).flatten(1)),
    "average-pool": lambda m, x: m.c(F.avg_pool1d(m.a(x)[:, None], 3, 1, 1).flatten(1)),
    "padding": lambda m, x: m.c(F.pad(m.a(x)[:, 1:], (0, 1))),
    "views": lambda m, x: m.c(m.a(x).view(-1, 2, 2).permute(0, 2, 1).reshape(-1, 4).flip(1)),
    "written in place": written,
    "masked": lambda m, x: m.c(m.a(x).masked_fill(x > 0, 0.0)),
    "a constant factor": lambda m, x: m.c(m.a(x) * x / (1 + x.square().sum())),
    "a constant matrix": lambda m, x: m.c(m.a(x) @ (x.T @ x)),
    "a mask on the weight": lambda m, x: m.c(F.linear(x, m.a.weight * m.mask, m.a.bias)),
    "a mask on the weight that reads": lambda m, x: F.linear(m.a(x).relu(), m.c.weight * m.mask, m.c.bias),
    "both signs side by side": lambda m, x: F.linear(F.relu(torch.cat([h := m.a(x), -h], 1)), m.wide.weight),
    "sorted": lambda m, x: m.c(m.a(x).sort(-1).values.cumsum(-1)),
    "chosen by argmax": lambda m, x: m.c((h := m.a(x)) * F.one_hot(h.argmax(-1), 4)),
    "sum with itself": lambda m, x: m.c((h := m.a(x)) + F.relu(h) - h.mean(1, keepdim=True)),
    "square and root": lambda m, x: m.c((m.a(x).square() + m.a(x) ** 2).sqrt()),
    "norm": lambda m, x: m.c((h := m.a(x)) * (h / h.norm(dim=1, keepdim=True)).tanh()),
    "counted": lambda m, x: m.c((h := m.a(x).relu()) * torch.linalg.vector_norm(h, 0, dim=1, keepdim=True)),
    "signs": lambda m, x: m.c((h := m.a(x)) * h.sign() * h.std(1, keepdim=True) / h.var(1, keepdim=True).sqrt()),
    "einsum": lambda m, x: m.c(torch.einsum("bi,ji->bj", x, m.a.weight) + m.a.bias),
    "called twice side by side": lambda m, x: m.c(m.a(x).relu() + m.a(2 * x).relu()),
    "attention over values": lambda m, x: m.c((m.b(x) @ x.T).softmax(-1) @ m.a(x)),
    "a learned table": lambda m, x: m.c(F.embedding((x[:, 0] > 0).long(), m.a.weight) + m.a.bias),
}

# what does not
BLOCK = {
    "gelu": (lambda m, x: m.c(F.gelu(m.a(x))), "aten::gelu is not positively homogeneous"),
    "softplus": (lambda m, x: m.c(F.softplus(m.a(x))), "aten::softplus"),
    "elu": (lambda m, x: m.c(F.elu(m.a(x))), "aten::elu"),
    "sigmoid gate": (lambda m, x: m.c((h := m.a(x)) * h.sigmoid()), "aten::sigmoid"),
    "silu": (lambda m, x: m.c(F.silu(m.a(x))), "aten::silu"),
    "softmax": (lambda m, x: m.c(m.a(x).softmax(-1)), "aten::_softmax"),
    "relu6": (lambda m, x: m.c(F.relu6(m.a(x))), r"aten::hardtanh joins tensors that scale by c\^0 and c\^1"),
    "hardtanh": (lambda m, x: m.c(F.hardtanh(m.a(x))), "aten::hardtanh"),
    "threshold": (lambda m, x: m.c(F.threshold(m.a(x), 0.5, 0.0)), "aten::threshold"),
    "softshrink": (lambda m, x: m.c(F.softshrink(m.a(x))), "aten::softshrink"),
    "hardsigmoid": (lambda m, x: m.c(F.hardsigmoid(m.a(x))), "aten::hardsigmoid"),
    "an added constant": (lambda m, x: m.c(m.a(x) + 1), "aten::add"),
    "subtracted from one": (lambda m, x: m.c(1 - m.a(x)), "aten::rsub"),
    "added whole numbers": (lambda m, x: m.c(m.a(x) + torch.arange(4)), "aten::add"),
    "added data": (lambda m, x: m.c(m.a(x) + x), "aten::add"),
    "compared with one": (lambda m, x: m.c((h := m.a(x)) * (h > 1)), "aten::gt"),
    "compared with data": (lambda m, x: m.c((h := m.a(x)) * (h > 5 * x)), "aten::gt"),
    "padded with ones": (lambda m, x: m.c(F.pad(m.a(x)[:, 1:], (0, 1), value=1.0)), "aten::constant_pad_nd"),
    "masked with ones": (lambda m, x: m.c(m.a(x).masked_fill(x > 0, 1.0)), "aten::masked_fill"),
    "rounded": (lambda m, x: m.c(m.a(x).round()), "aten::round"),
    "whole numbers": (lambda m, x: m.c(m.a(x).long().double()), "aten::_to_copy"),
    "a Python number": (lambda m, x: m.c(m.a(x) * float(m.a(x).max())), "aten::_local_scalar_dense|scale by"),
    "a residual join": (lambda m, x: m.c((h := m.a(x)) + m.b(h).relu()), r"aten::add.* c\^0 and c\^1"),
    "two branches": (lambda m, x: m.c(m.a(x) + m.b(x)), "aten::add"),
    "concatenation with another layer": (
        lambda m, x: F.linear(torch.cat([m.a(x), m.b(x)], 1), m.wide.weight),
        "aten::cat",
    ),
    "half written in place": (half_written, "a write in place"),
    "layer norm": (lambda m, x: m.c(m.norm(m.a(x))), "aten::native_layer_norm"),
    "batch norm": (lambda m, x: m.c(m.batch_norm(m.a(x))), "aten::native_batch_norm"),
    "a norm with eps": (lambda m, x: m.c(F.normalize(m.a(x))), "aten::clamp_min"),
    "squared": (lambda m, x: m.c(m.a(x).square()), "the outputs scale with it"),
    "a gate of its own": (lambda m, x: m.c((h := m.a(x)) * h), "the outputs scale with it"),
    "tied to the layer that reads": (lambda m, x: m.c(F.linear(m.a(x).relu(), m.a.weight.T)), "the outputs scale"),
    "called twice in a row": (lambda m, x: m.c(m.a(m.a(x).relu())), "aten::addmm joins"),
    "read by a layer that reads another": (lambda m, x: m.c(m.a(x).relu()) + m.c(x), "aten::add"),
    "also an output": (lambda m, x: m.c(h := m.a(x)) + h[:, :2], "aten::add"),
    "complex numbers": (lambda m, x: m.c((m.a(x) * (1 + 1j)).abs()), "not positively homogeneous"),
    "overwritten": (overwritten, None),
}


def risk_of(forward, **keywords) -> Risk:
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(5, 4, generator=g), torch.tensor([0, 1, 1, 0, 1])
    model = forward if isinstance(forward, nn.Module) else Custom(forward)
    return Risk(model, nn.CrossEntropyLoss(), (X, y), **keywords)


def outputs(risk: Risk) -> torch.Tensor:
    with risk.session():
        return torch.cat([risk.output(risk.params(), batch).detach() for batch in risk.batches])


def scaled_by_hand(risk: Risk, up, down, c=1.5) -> torch.Tensor:
    own = dict(risk.model.named_parameters())
    return outputs(risk.at({**{name: own[name] * c for name in up}, **{name: own[name] / c for name in down}}))


def first_is_a(risk: Risk) -> list[Joint]:
    return [joint for joint in joints(risk) if joint.first == "a"]


@pytest.mark.parametrize("name", PASS)
def test_what_is_positively_homogeneous_joins_two_layers(name):
    risk = risk_of(PASS[name])
    (joint,) = first_is_a(risk)
    torch.testing.assert_close(scaled_by_hand(risk, joint.up, joint.down), outputs(risk))
    assert "a.weight" in joint.up
    assert {*joint.down} <= {"c.weight", "wide.weight"}


@pytest.mark.parametrize("name", BLOCK)
def test_what_is_not_does_not_join_them(name):
    forward, reason = BLOCK[name]
    risk = risk_of(forward)
    assert not first_is_a(risk)
    if reason is not None:
        with pytest.raises(UnsupportedError) as error:
            pick(risk, "a")
        assert re.search(reason, str(error.value)), error.value


@pytest.mark.parametrize("name", [name for name in BLOCK if name not in ("overwritten", "complex numbers")])
def test_the_function_moves_where_no_joint_is_found(name):  # else the trace could refuse everything
    risk = risk_of(BLOCK[name][0])
    down = ["wide.weight"] if name.startswith("concatenation") else ["c.weight"]
    moved = scaled_by_hand(risk, ["a.weight", "a.bias"], down, c=30.0)
    assert float((moved - outputs(risk)).abs().max()) > 1e-3


def test_a_bias_goes_with_its_layer_and_that_of_the_next_stays():
    (joint,) = joints(risk_of(PASS["relu"]))
    assert joint == Joint("a", ("c",), ("a.weight", "a.bias"), ("c.weight",))


def test_several_readers_are_all_divided():
    risk = risk_of(lambda m, x: m.c((h := m.a(x).relu()) * 2) + m.wide(torch.cat([h, 3 * h], 1)))
    (joint,) = joints(risk)
    assert joint.second == ("c", "wide")
    assert joint.down == ("c.weight", "wide.weight")
    torch.testing.assert_close(scaled_by_hand(risk, joint.up, joint.down), outputs(risk))


def test_parameters_added_on_the_way_go_along():
    (joint,) = joints(risk_of(lambda m, x: m.c((m.a(x) + m.gain).relu())))
    assert joint.up == ("gain", "a.weight", "a.bias")


def test_a_parameter_that_multiplies_is_a_layer():
    risk = risk_of(lambda m, x: m.c((m.a(x) * m.gain).relu()))
    assert [str(joint) for joint in joints(risk)] == ["a -> gain", "gain -> c"]
    risk = risk_of(lambda m, x: m.c((m.a(x).relu() @ m.matrix).relu()))
    assert [str(joint) for joint in joints(risk)] == ["a -> matrix", "matrix -> c"]


def test_a_normalisation_blocks_what_comes_before_and_is_a_first_layer_itself():
    for name in ("norm", "batch_norm"):
        (joint,) = joints(risk_of(lambda m, x, name=name: m.c(getattr(m, name)(m.a(x)).relu())))
        assert joint == Joint(name, ("c",), (f"{name}.weight", f"{name}.bias"), ("c.weight",))
    risk = risk_of(lambda m, x: m.c(m.batch_norm(m.a(x)).relu()), mode="train")
    assert [joint.first for joint in joints(risk)] == ["batch_norm"]


def test_residual_joins_are_respected():
    """Inside a branch there are joints, across the sum there are none."""
    risk = risk_of(lambda m, x: m.c((h := F.relu(x @ m.matrix)) + m.b(m.a(h).relu())))
    assert [str(joint) for joint in joints(risk)] == ["a -> b"]


def test_a_recurrent_network_has_no_joint_into_or_out_of_the_loop():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(1, 3, nonlinearity="relu", batch_first=True), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.rnn(x[..., None])[0][:, -1])

    assert joints(risk_of(Recurrent())) == ()


def test_weights_that_share_memory_but_not_values_are_two_layers():
    model = Custom(PASS["relu"])
    both = torch.randn(6, 4)
    model.a.weight.data, model.c.weight.data = both[:4], both[4:]
    assert [str(joint) for joint in joints(risk_of(model))] == ["a -> c"]


def test_joints_without_a_chosen_parameter_are_left_out():
    chain = risk_of(lambda m, x: m.c(m.b(m.a(x).relu()).relu()))
    assert [str(joint) for joint in joints(chain)] == ["a -> b", "b -> c"]
    assert [str(joint) for joint in joints(chain.restrict("a.*"))] == ["a -> b"]
    assert [str(joint) for joint in joints(chain.restrict("c.weight"))] == ["b -> c"]
    assert joints(chain.restrict("c.bias")) == ()


def test_dictionary_batches_and_opaque_losses_are_traced_alike():
    model = Custom(PASS["relu"])
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])
    batches = [{"x": x, "labels": y}]
    forward = Risk(model, nn.CrossEntropyLoss(), batches, forward=lambda m, batch: m(batch["x"]))
    opaque = Risk(
        model, data=batches, batch_loss=lambda m, b: (F.cross_entropy(m(b["x"]), b["labels"], reduction="sum"), 4)
    )
    assert joints(forward) == joints(opaque) != ()


def test_weights_in_another_parametrisation_are_layers_too():
    """Magnitude and direction: the magnitude is what scales. A mask on a weight changes nothing."""
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.ReLU(), weight_norm(nn.Linear(4, 2)))
    (joint,) = joints(risk := risk_of(model))
    assert joint.up == ("0.bias", "0.parametrizations.weight.original0")
    torch.testing.assert_close(scaled_by_hand(risk, joint.up, joint.down), outputs(risk))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.5)
    assert [str(joint) for joint in joints(risk_of(model))] == ["0.weight_orig -> 2.weight_orig"]


def test_a_transformer_has_joints_inside_its_blocks():
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True)

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.layer(x[:, None] * torch.ones(1, 3, 1)).mean(1))

    risk = risk_of(Transformer())
    found = joints(risk)
    expected = ["norm1 -> layer.self_attn.in_proj_weight", "norm2 -> layer.linear1", "linear1 -> layer.linear2"]
    assert [str(joint) for joint in found] == [f"layer.{name}" for name in expected]
    for joint in found:
        torch.testing.assert_close(scaled_by_hand(risk, joint.up, joint.down), outputs(risk))


def test_dropout_with_frozen_masks_keeps_a_joint():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU(), nn.Linear(4, 2))
    assert [str(joint) for joint in joints(risk_of(model, dropout=True))] == ["0 -> 3"]


def test_a_joint_is_picked_by_itself_index_or_name():
    risk = risk_of(lambda m, x: m.c(m.b(m.a(x).relu()).relu()))
    first, second = joints(risk)
    assert pick(risk, None) == pick(risk, 0) == pick(risk, "a") == pick(risk, first) == first
    assert pick(risk, 1) == pick(risk, "b") == second
    with pytest.raises(ValueError, match=r"joint must be from 0 to 1, an index into joints\(risk\); got 2"):
        pick(risk, 2)
    with pytest.raises(ValueError, match="got -1"):
        pick(risk, -1)
    with pytest.raises(UnsupportedError, match=r"'c' is not the first layer of a joint: the outputs scale .*; a, b"):
        pick(risk, "c")
    with pytest.raises(UnsupportedError, match="no such weight"):
        pick(risk, "nowhere")
    with pytest.raises(UnsupportedError, match="a -> c is no joint of this network; there are a -> b, b -> c"):
        pick(risk, Joint("a", ("c",), (), ()))


def test_a_network_without_joints_says_why():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    with pytest.raises(UnsupportedError, match=r"no two layers .*: 0: aten::softplus is not .*; 2: aten::gelu"):
        pick(risk_of(model), None)
    with pytest.raises(UnsupportedError, match="no chosen weight takes part"):
        pick(risk_of(lambda m, x: x[:, :2] + m.gain[:2]), None)


# ------------------------------------------------------------------------------------------ tapes by hand


def test_operations_that_keep_a_degree_leave_no_step():
    tape = trace(risk_of(lambda m, x: m.c(F.max_pool1d(F.relu(m.a(x))[:, None], 3, 1, 1).flatten(1))))
    assert [step.op for step in tape.steps] == ["aten::addmm", "aten::addmm"]
    assert tape.weights == (Weight("a.weight", 1, 0), Weight("c.weight", 1, 0))


def test_axes_of_a_weight_are_found_through_its_views():
    tape = trace(risk_of(lambda m, x: (m.b.weight @ (x @ m.matrix).T).T @ m.c.weight.T))
    assert tape.weights == (Weight("matrix", 0, 1), Weight("b.weight", 1, 0), Weight("c.weight", 1, 0))


def test_a_weight_that_is_read_unscaled_first_does_not_close_a_scale_later():
    early = Step("early", 5, (((3, 1),),), weights=(Weight("second"),))
    layer = Step("layer", 6, (((2, 1),),), weights=(Weight("first"),))
    outer = Step("outer", 7, (((6, 1), (3, 1)),), weights=(Weight("second"),))
    total = Step("total", 8, (((5, 1),), ((7, 1),)))
    names = {2: "first", 3: "second"}
    assert solve(Tape((layer, outer), names, {}, output=7), {"first": 1}, lambda d: -d).output == 0
    with pytest.raises(Conflict, match=r"total joins tensors that scale by c\^0 and c\^1"):
        solve(Tape((early, layer, outer, total), names, {}, output=8), {"first": 1}, lambda d: -d)


def test_powers_and_repeated_factors_count():
    square = Step("square", 4, (((2, 1), (2, 1)),), weights=(Weight("w"), Weight("w")))
    root = Step("root", 5, (((4, Fraction(1, 2)),),))
    quotient = Step("quotient", 6, (((5, 1), (3, -1)),), weights=(Weight("v"),))
    tape = Tape((square, root, quotient), {2: "w", 3: "v"}, {}, output=6)
    assert solve(tape, {"w": 1}, lambda d: 0).output == 1
    assert solve(tape, {"w": 1}, lambda d: -d).exponents == {"w": 1, "v": 1}
