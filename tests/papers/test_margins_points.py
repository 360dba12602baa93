"""Traces beside margins: correlations are those of dense Hessians, and PyHessian's rule does what it does."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ritz.measures.outputs import sample_outputs
from ritz.papers.base import Claim
from ritz.papers.margins_hutchinson import MOST_PROBES, by_package, one_by_one
from ritz.papers.margins_points import correlations, drawn, load_grey, mean, paired, risk_of


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def images(num: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num, 1, 2, 2, generator=g), torch.randint(3, (num,), generator=g)


def dense_hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Row by row, by double autograd."""
    params = list(model.parameters())
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradient])
    rows = [torch.autograd.grad(entry, params, retain_graph=True, materialize_grads=True) for entry in flat]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def test_correlations_are_those_of_dense_traces_right_and_wrong_points_apart():
    model, (X, y) = network(), images()
    outputs = sample_outputs(risk_of(model, (X, y)))
    found = correlations(model, (X, y), outputs, num=len(X))
    with torch.no_grad():
        f = model(X)
    S, right = f.softmax(1), f.argmax(1) == y
    aceht = (X.flatten(1).square().sum(1) + 1) * (1 - S.square().sum(1))
    traces = torch.stack([dense_hessian(model, x[None], t[None]).trace() for x, t in zip(X, y, strict=True)])
    for word, kind in (("correct", right), ("incorrect", ~right)):
        truth = np.corrcoef(traces[kind], aceht[kind])[0, 1]
        assert found["aceht"][word]["r"] == pytest.approx(truth, abs=1e-5)
        assert found["aceht"][word]["n"] == found[word] == int(kind.sum())
    assert found["everywrong"]["aceht"]["r"] == pytest.approx(found["aceht"]["incorrect"]["r"], abs=1e-5)


def test_wrong_points_are_drawn_from_all_data():
    model, data = network(), images(200)
    found = correlations(model, data, sample_outputs(risk_of(model, data)), num=30)
    assert found["correct"] + found["incorrect"] == 30
    assert found["everywrong"]["n"] > 60
    assert found["everywrong"]["margin"]["n"] == 30


def test_where_no_point_is_wrong_there_is_no_correlation():
    model, (X, _) = network(), images()
    data = X, model(X).argmax(1)
    found = correlations(model, data, sample_outputs(risk_of(model, data)))
    assert found["incorrect"] == found["everywrong"]["n"] == 0
    assert math.isnan(found["everywrong"]["aceht"]["r"])
    assert math.isnan(found["bound"]["incorrect"]["rho"])


def test_points_of_a_seed_are_the_same_and_no_more_than_there_are():
    data = images()
    assert torch.equal(drawn(data, 5, 1)[0], drawn(data, 5, 1)[0])
    assert not torch.equal(drawn(data, 5, 1)[0], drawn(data, 5, 2)[0])
    assert len(drawn(data, 100, 0)[0]) == 40


def test_a_mean_over_no_seed_decides_nothing():
    claim = Claim(paper="seed 003", where="", text="", expected=0.0, measured=mean("r", [math.nan, math.nan]))
    assert claim.verdict == "not decidable"


def test_differences_are_taken_where_both_have_the_seed():
    rows = [{"seed": 0, "kind": "a", "x": 1.0}, {"seed": 1, "kind": "a", "x": 5.0}, {"seed": 1, "kind": "b", "x": 2.0}]
    assert paired(rows, "x", {"kind": "a"}, {"kind": "b"}).tolist() == [-3.0]


def test_pixels_lie_between_0_and_1(data_root):
    from ritz.papers.experiment import Setting

    X, y = load_grey("MNIST", Setting("smoke", data=data_root), 50, 10)["train"]
    assert X.shape == (50, 1, 28, 28)
    assert (float(X.min()), float(X.max()), len(y)) == (0.0, 1.0, 50)


# ------------------------------------------------------------------------------------------ PyHessian's rule


class Bowl(nn.Module):
    """Outputs (w'Aw x, 0) at w = 0: the Hessian of the loss is -A for label 0 and A for label 1, x = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        A = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
        f = (self.w @ A @ self.w) * x
        return torch.cat([f, torch.zeros_like(f)], dim=1)


def test_the_rule_averages_quadratic_forms_until_they_settle():
    traces, probes = one_by_one(Bowl(), (torch.ones(60, 1), torch.ones(60, dtype=torch.long)))
    assert probes.min() == 2  # two equal forms leave the mean as it is
    assert 10 < probes.mean() < probes.max() <= MOST_PROBES
    assert abs(float(traces.mean()) - 2) < 0.8  # the forms are 3.8 and 0.2, each half of the time


def test_a_negative_mean_stops_the_rule_at_once():
    traces, probes = one_by_one(Bowl(), (torch.ones(50, 1), torch.zeros(50, dtype=torch.long)))
    assert probes.tolist() == [2.0] * 50
    assert len(traces.unique()) > 1  # though the forms still differ


@pytest.mark.oracle("pyhessian")
def test_our_loop_is_pyhessians():
    """Other random vectors may be drawn; where the forms do not depend on them, both give the same."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.w * x, torch.zeros_like(x)], dim=1)

    X, y = torch.tensor([[1.0], [2.0], [-3.0]]), torch.tensor([0, 1, 0])
    p = (0.3 * X).sigmoid()
    truth = (X.square() * p * (1 - p)).flatten()
    before = torch.get_rng_state()
    model = One()
    torch.testing.assert_close(one_by_one(model, (X, y))[0], truth.detach())
    torch.testing.assert_close(by_package(model, (X, y)), truth.detach())
    assert model.w.grad is None
    assert torch.equal(before, torch.get_rng_state())
