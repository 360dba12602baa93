"""The diagonal: exact where squares of backward passes give it, elsewhere by probes, with sharp directions taken out.

Entry by entry against dense matrices, and against BackPACK, which has exact diagonals of its own; that exact ones
are those of the dense matrix for every network and loss is in test_squares.py, coverage in test_coverage.py.
"""

import signal
from functools import partial

import pytest
import torch
from cases import Calls
from matrices import operator, rotated
from sample_truth import CE, data, labels, mlp, randomised
from torch import nn

import ritz
from ritz import checkpoint
from ritz.errors import StoppedError, UnsupportedError

torch.set_default_dtype(torch.float64)


def risk_of(activation: nn.Module, dtype: torch.dtype = torch.float64) -> ritz.Risk:
    model = randomised(nn.Sequential(nn.Linear(4, 12), activation, nn.Linear(12, 3))).to(dtype)
    return ritz.Risk(model, CE, (data(20, 4).to(dtype), labels(20)), batch_size=8)


def test_the_hessian_of_a_piecewise_linear_network_has_the_diagonal_of_its_ggn():
    """d^2 f / d w_j^2 is 0 for every output f and single weight w_j; off the diagonal they differ."""
    risk = risk_of(nn.ReLU())
    H, G = ritz.Hessian(risk).dense(), ritz.GGN(risk).dense()
    torch.testing.assert_close(H.diagonal(), G.diagonal())
    assert float((H - G).abs().max()) > 0.01
    found = ritz.diagonal(ritz.Hessian(risk))
    assert found.exact
    assert found.products == 3  # a backward pass for each class
    torch.testing.assert_close(found.value, H.diagonal())
    assert float(found.stderr.abs().max()) == 0
    assert "exact, by backward passes" in found.convention


def test_a_curved_network_has_no_exact_diagonal_of_its_hessian_but_one_of_its_ggn():
    risk = risk_of(nn.Tanh())
    H, G = ritz.Hessian(risk), ritz.GGN(risk)
    assert not ritz.diagonal(H).exact
    torch.testing.assert_close(ritz.diagonal(G, method="exact").value, G.dense().diagonal())
    with pytest.raises(UnsupportedError, match="aten::tanh"):
        ritz.diagonal(H, method="exact")


def test_matrices_that_are_not_of_a_network_are_multiplied_out():
    A = rotated(torch.linspace(-1, 1, 50))
    found = ritz.diagonal(A, method="exact")
    assert found.exact
    assert found.products == 50
    torch.testing.assert_close(found.value, A.dense().diagonal())


def test_parts_are_sums_over_parameters():
    risk = risk_of(nn.ReLU())
    truth = risk.space.segment(ritz.GGN(risk).dense().diagonal()[None])[0]
    exact = ritz.diagonal(ritz.GGN(risk)).parts
    assert [float(exact[name].value) for name in risk.names] == pytest.approx(truth.tolist())
    probed = ritz.diagonal(ritz.GGN(risk), 30, method="hutch++")
    assert sum(float(part.value) for part in probed.parts.values()) == pytest.approx(float(probed.value.sum()))


def test_taking_the_sharp_directions_out_brings_the_diagonal_nearer():
    """By more than three times, for as many products, where few eigenvalues are far from the others."""
    A = rotated(torch.cat([torch.tensor([100.0, 50.0, 25.0]), torch.full((157,), 0.1)]))
    truth = A.dense().diagonal()
    error = {
        method: sum(float((ritz.diagonal(A, 30, seed, method=method).value - truth).norm()) for seed in range(10))
        for method in ("hutchinson", "hutch++")
    }
    assert 3 * error["hutch++"] < error["hutchinson"]


def test_the_range_of_a_matrix_of_low_rank_is_all_of_its_diagonal():
    A = rotated(torch.cat([torch.tensor([3.0, -2.0, 1.0]), torch.zeros(97)]))
    found = ritz.diagonal(A, 12, method="hutch++")
    torch.testing.assert_close(found.value, A.dense().diagonal(), rtol=1e-8, atol=1e-10)
    assert float(found.stderr.max()) < 1e-10


def test_the_way_is_chosen_by_what_it_costs():
    told = {num: ritz.diagonal(operator("flat"), num).convention for num in (11, 12)}
    assert "Hutchinson's estimator" in told[11]
    assert "Hutch++" in told[12]
    many = randomised(mlp(4, 5, 200))  # 200 backward passes against 30 products
    G = ritz.GGN(ritz.Risk(many, CE, (data(6, 4), labels(6))))
    assert not ritz.diagonal(G).exact
    assert ritz.diagonal(G, 60).exact


def test_in_float32_an_exact_diagonal_is_that_of_float64_to_round_off():
    found = ritz.diagonal(ritz.Hessian(risk_of(nn.ReLU(), torch.float32)))
    assert found.value.dtype == torch.float32
    wanted = ritz.Hessian(risk_of(nn.ReLU())).dense().diagonal()
    torch.testing.assert_close(found.value.double(), wanted, rtol=1e-5, atol=1e-7)


class Interrupted(nn.Module):
    """The network, and a signal to the process at one of its calls."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.calls, self.fatal = inner, Calls(), 0

    def forward(self, x):
        self.calls.append(len(x))
        if len(self.calls) == self.fatal:
            signal.raise_signal(signal.SIGTERM)
        return self.inner(x)


@pytest.mark.parametrize("method", ["exact", "hutch++", "hutchinson"])
def test_a_run_that_was_stopped_goes_on_and_ends_in_the_same_bits(method, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    model = Interrupted(randomised(mlp(4, 12, 3)))
    call = partial(ritz.diagonal, ritz.GGN(ritz.Risk(model, CE, (data(20, 4), labels(20)), batch_size=5)), 36)
    call(method=method)  # the risk is looked at once
    model.calls.clear()
    wanted = call(method=method)
    in_all, model.fatal = len(model.calls), 3 * len(model.calls) // 2  # half-way through the next run
    with ritz.stoppable(), pytest.raises(StoppedError):
        call(method=method, checkpoint=tmp_path)
    model.calls.clear()
    assert call(method=method, checkpoint=tmp_path) == wanted
    assert len(model.calls) < in_all  # what was done is not done again
    assert call(method=method, checkpoint=tmp_path) == wanted


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_probes": 0}, "num_probes must be at least 1, got 0"),
        ({"num_probes": 5, "method": "hutch++"}, r"hutch\+\+ needs at least 6 probes, got num_probes=5"),
        ({"method": "xdiag"}, r"method must be one of auto, hutchinson, hutch\+\+, exact, got 'xdiag'"),
    ],
)
def test_bad_arguments_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        ritz.diagonal(operator("flat"), **keywords)


@pytest.mark.oracle("backpack")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_exact_diagonals_are_those_of_backpack():
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact, DiagHessian

    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    X, y = data(9, 1, 4, 4), labels(9)
    own, loss = extend(randomised(model)), extend(nn.CrossEntropyLoss())
    with backpack(DiagGGNExact(), DiagHessian()):
        loss(own(X), y).backward()
    risk = ritz.Risk(model, CE, (X, y), batch_size=4)
    for matrix, theirs in ((ritz.GGN, "diag_ggn_exact"), (ritz.Hessian, "diag_h")):
        wanted = torch.cat([getattr(p, theirs).flatten() for p in own.parameters()])
        torch.testing.assert_close(ritz.diagonal(matrix(risk)).value, wanted)
