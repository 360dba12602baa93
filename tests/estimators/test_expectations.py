"""Estimators say at the start how many products are to come; who hears it, and that nothing is counted twice."""

import pytest
import torch
from matrices import operator
from torch import nn

import ritz
from ritz.operators import BatchNoise, DenseOperator
from ritz.operators.algebra import Block, Metered, Projected
from ritz.operators.blocks import PaddedBlocks
from ritz.operators.risk_operator import RiskOperator


class Listening(DenseOperator):
    """Notes what is said, and how many products had been asked for by then."""

    def __init__(self) -> None:
        super().__init__(operator("outliers").dense())
        self.heard: list[tuple[int, int]] = []
        self.products = 0

    def expect(self, products: int) -> None:
        self.heard.append((products, self.products))

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        self.products += len(rows)
        return super()._rows(rows)


RUNS = {
    "spectrum": lambda A: ritz.spectrum(A, 5, 4),
    "spectrum without a head": lambda A: ritz.spectrum(A, 5, 4, reorthogonalize="none"),
    "spectrum by products": lambda A: ritz.spectrum(A, products=120),
    "hutchinson": lambda A: ritz.trace(A, "hutchinson", 7),
    "hutch++": lambda A: ritz.trace(A, "hutch++", 10),
    "xtrace": lambda A: ritz.trace(A, "xtrace", 10),
    "frobenius_norm": lambda A: ritz.frobenius_norm(A, 9),
    "diagonal": lambda A: ritz.diagonal(A, 6),
    "block_spectra": lambda A: ritz.block_spectra(A, {"all": "*"}, num_steps=5, num_probes=3),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_estimator_says_before_its_first_product_how_many_are_to_come(name):
    A = Listening()
    RUNS[name](A)
    ((expected, before),) = A.heard
    assert before == 0
    assert expected >= A.products > 0
    if name != "spectrum":  # whose head ends when it has found what stands out
        assert expected == A.products


def test_a_search_for_eigenpairs_says_the_least_that_it_takes():
    A = Listening()
    ritz.top_eigenpairs(A, k=3)
    ((expected, before),) = A.heard
    assert before == 0
    assert 0 < expected <= A.products


def test_an_exact_trace_takes_no_probes():
    A = Listening()
    ritz.trace(A, "exact", num_probes=A.dim)
    assert A.heard == [(0, 0)]


def test_operators_made_of_operators_pass_it_on():
    A, B = Listening(), Listening()
    basis = torch.eye(A.dim, dtype=A.dtype)[:2]
    for made in (2 * A + 1.0, A + B, Block(A, "*"), Projected(A, basis), Metered(A)):
        made.expect(30)
        assert A.heard.pop() == (30, 0)
    assert B.heard == [(30, 0)]
    PaddedBlocks(A, {"one": ("vector",), "two": ()}).expect(30)
    assert A.heard == [(60, 0)]
    DenseOperator(torch.eye(2)).expect(5)  # of which nothing is made


def small_risk() -> ritz.Risk:
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    X, y = torch.randn(16, 6, generator=draw), torch.randint(3, (16,), generator=draw)
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=8)


def test_a_run_inside_a_longer_one_is_counted_once():
    H = ritz.Hessian(small_risk())
    H.expect(500)
    found = ritz.spectrum(H, 4, 2)
    assert H._expected == 500 - found.products
    ritz.trace(H, "hutchinson", 20)
    assert H._expected == 480 - found.products


def test_the_noise_of_a_batch_tells_both_matrices():
    H = ritz.Hessian(small_risk())
    X = BatchNoise(H, 1)
    X.expect(12)
    assert (X.base.base._expected, H._expected) == (12, 12)


def test_a_measurement_announces_its_spectrum_once(monkeypatch):
    said = []
    plain = RiskOperator.expect
    monkeypatch.setattr(RiskOperator, "expect", lambda self, n: (said.append((self, n)), plain(self, n))[1])
    found = ritz.measure(small_risk(), measures=["trace", "lambda_max", "frobenius_norm"], num_steps=4, num_probes=2)
    assert not found.failures
    ((H, expected),) = said
    assert 0 <= H._expected == expected - found.spectrum.products
