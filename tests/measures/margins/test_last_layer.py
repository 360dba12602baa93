"""The trace of the last layer from its features, against its block of a dense Hessian."""

import cases
import pytest
import torch
from torch import nn

import ritz
from ritz.errors import UnsupportedError
from ritz.measures.margins.last_layer import aceht_features, sample_aceht_features
from ritz.measures.margins.summaries import sample_aceht
from ritz.measures.outputs import sample_outputs

CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss


def dense_block(problem: cases.Problem, names: list[str]) -> float:
    """Trace of the Hessian block of some parameters, by double autograd."""
    out, y, params = cases.outputs_and_target(problem)
    own = [p for (name, _), p in zip(problem.model.named_parameters(), params, strict=True) if name in names]
    return float(cases.hessian_of(problem.loss(out, y), own).trace())


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("mlp_relu", "2"),
        ("mlp_weighted", "2"),
        ("conv", "4"),
        ("residual", "head"),
        ("attention", "head"),
        ("unused", "last"),
    ],
)
def test_on_features_aceht_is_the_trace_of_the_last_layers_block(name, layer):
    problem = cases.problem(name)
    found = aceht_features(problem.risk())
    assert found.value == pytest.approx(dense_block(problem, [f"{layer}.weight", f"{layer}.bias"]), rel=1e-10)
    assert found.exact
    assert layer in found.convention


@pytest.mark.parametrize("loss", [CE(), CE(label_smoothing=0.2), CE(weight=torch.tensor([1.0, 3.0]))])
def test_an_affine_network_is_all_last_layer(loss):
    x, y = torch.arange(12.0).reshape(4, 3) / 5, torch.tensor([0, 1, 1, 0])
    risk = ritz.Risk(nn.Linear(3, 2), loss, (x, y))
    torch.testing.assert_close(sample_aceht_features(risk), sample_aceht(sample_outputs(risk)), rtol=1e-12, atol=0)
    torch.testing.assert_close(sample_aceht_features(risk), ritz.sample_traces(risk).value, rtol=1e-9, atol=1e-12)
    even = loss.weight is None
    assert (aceht_features(risk).samples is not None) == even  # a plain mean


def test_tokens_have_a_last_layer_too():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5, bias=False))
        tokens, y = torch.randint(5, (6, 3)), torch.randint(5, (6, 3))
    y[0, 1:] = -100
    problem = cases.Problem(model, CE(), cases.split(tokens, y, (4, 2)))
    assert aceht_features(problem.risk()).value == pytest.approx(dense_block(problem, ["2.weight"]), rel=1e-10)
    assert len(sample_aceht_features(problem.risk())) == 16


def test_classes_moved_before_the_tokens_are_followed():
    class Moved(nn.Sequential):
        def forward(self, x):
            return super().forward(x).transpose(1, 2)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x, y = Moved(nn.Tanh(), nn.Linear(4, 3)), torch.randn(4, 5, 4), torch.randint(3, (4, 5))
    problem = cases.Problem(model, CE(), cases.split(x, y, (3, 1)))
    truth = dense_block(problem, ["1.weight", "1.bias"])
    assert aceht_features(problem.risk()).value == pytest.approx(truth, rel=1e-10)


def test_a_frozen_bias_is_left_out_of_the_block():
    problem = cases.make("mlp_relu")
    problem.model[2].bias.requires_grad_(False)
    own, with_bias = aceht_features(problem.risk()).value, aceht_features(cases.problem("mlp_relu").risk()).value
    assert own == pytest.approx(float(torch.trace(ritz.GGN(problem.risk(params="2.weight")).dense())), rel=1e-10)
    assert own < with_bias


def test_one_logit_squeezed_away_is_a_last_layer():
    class Squeezed(nn.Sequential):
        def forward(self, x):
            return super().forward(x)[:, 0]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = Squeezed(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(9, 3)
    problem = cases.Problem(model, BCE(), cases.split(x, (x[:, 0] > 0).double(), (5, 4)))
    truth = dense_block(problem, ["2.weight", "2.bias"])
    assert aceht_features(problem.risk()).value == pytest.approx(truth, rel=1e-10)


class Changed(nn.Module):
    """A linear layer whose outputs are not those of the network as they are."""

    def __init__(self, change):
        super().__init__()
        self.fc, self.change = nn.Linear(4, 3), change

    def forward(self, x):
        return self.change(self.fc, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fc, x: 2 * fc(x), "are not, as they are, those of an nn.Linear"),
        (lambda fc, x: fc(x).relu() + fc.bias, "other than through a call of its module"),
        (lambda fc, x: fc(x).flip(1), "are not, as they are, those of an nn.Linear"),
        (lambda fc, x: fc(x).relu(), "are not, as they are, those of an nn.Linear"),
        (lambda fc, x: fc(x) + fc(2 * x), "used 2 times"),
        (lambda fc, x: nn.functional.linear(x, fc.weight), "are not, as they are, those of an nn.Linear"),
    ],
    ids=["scaled", "bias again", "flipped", "relu", "twice", "functional"],
)
def test_outputs_that_are_not_a_linear_layers_own_are_refused(change, message):
    x, y = torch.arange(20.0).reshape(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(UnsupportedError, match=message):
        aceht_features(ritz.Risk(Changed(change), CE(), (x, y)))


def test_a_last_layer_that_is_tied_or_frozen_is_refused():
    with pytest.raises(UnsupportedError, match=r"used 2 times \(by embedding, output\)"):
        aceht_features(cases.problem("language").risk())
    with pytest.raises(UnsupportedError, match="whose weight is among the chosen parameters"):
        aceht_features(cases.problem("mlp_relu").risk(params="0.*"))
    with pytest.raises(UnsupportedError, match="whose weight is among the chosen parameters"):
        aceht_features(cases.problem("pixels").risk())  # ends in a convolution


def test_features_need_classes_and_samples_of_their_own():
    with pytest.raises(UnsupportedError, match="labels of two classes or more"):
        aceht_features(cases.problem("mlp_mse").risk())
    with pytest.raises(UnsupportedError, match=r"BatchNorm in train mode.*mode='eval'"):
        aceht_features(cases.problem("residual_train").risk())
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Linear"):
        aceht_features(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "loss",
    [CE(weight=torch.tensor([1.0, 3.0]), label_smoothing=0.1), BCE(pos_weight=torch.ones(1)), BCE(torch.ones(1))],
)
def test_a_loss_whose_hessian_is_weighted_otherwise_is_refused(loss):
    x, binary = torch.arange(12.0).reshape(4, 3) / 5, isinstance(loss, BCE)
    y = torch.tensor([0, 1, 1, 0])
    risk = ritz.Risk(nn.Linear(3, 1 if binary else 2), loss, (x, y.double()[:, None] if binary else y))
    with pytest.raises(UnsupportedError, match="has other weights than its mean"):
        aceht_features(risk)


def test_a_weight_that_two_layers_share_is_named_by_its_layers_though_neither_is_the_last():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    data = torch.ones(2, 3), torch.tensor([0, 1])
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data, params="0.weight")
    with pytest.raises(UnsupportedError, match=r"^the weight of 2 is used 2 times \(by 0, 2\)"):
        aceht_features(risk)
