"""Equations 6 to 8 of seed 002 beside divergences from torch.distributions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal, kl_divergence

from ritz.papers import theory_pacbayes as pacbayes
from ritz.papers.theory_networks import normal


@given(seed=st.integers(0, 1000), variance=st.floats(0.1, 10))
def test_the_laplace_divergence_is_that_of_torch_and_never_negative(seed, variance):
    w, H = normal((8,), seed), pacbayes._positive(seed)
    found = pacbayes.laplace_kl(w, H, variance)
    truth = kl_divergence(
        MultivariateNormal(w, precision_matrix=H), MultivariateNormal(torch.zeros(8), variance * torch.eye(8))
    )
    assert found == pytest.approx(float(truth), rel=1e-8)
    assert found >= 0


def test_the_divergence_of_the_prior_from_itself_is_zero():
    assert pacbayes.laplace_kl(torch.zeros(5), torch.eye(5) / 3, variance=3.0) == pytest.approx(0, abs=1e-14)


def test_the_printed_expression_agrees_only_where_a_matrix_equals_its_inverse():
    w, reflection = normal((4,), seed=0), torch.eye(4)
    assert pacbayes.printed_kl(w, reflection) == pacbayes.laplace_kl(w, reflection)
    assert pacbayes.printed_kl(w, 2 * reflection) != pacbayes.laplace_kl(w, 2 * reflection)


@given(seed=st.integers(0, 1000))
def test_the_inequality_of_equation_7_holds_for_positive_definite_matrices(seed):
    H = pacbayes._positive(seed)
    assert float(torch.logdet(H)) <= float(H.trace()) - len(H)
    # so the metric bounds the printed expression, which is all that it bounds
    w = normal((8,), seed)
    assert pacbayes.printed_kl(w, H) <= pacbayes.metric_a(w, H) - len(w) + 1e-9


@pytest.mark.parametrize(("value", "breaks"), [(-0.27, False), (-0.29, True)])
def test_a_negative_eigenvalue_breaks_equation_7_below_its_threshold(value, breaks):
    value = torch.tensor(value)
    assert bool(value.abs().log() > value - 1) is breaks


def test_the_columns_of_the_tables_are_traces_over_the_number_of_weights():
    for table, rows in pacbayes.printed_columns().items():
        for _, squares, norm, _ in rows:
            assert squares < norm**2 <= pacbayes.SIZES[table] * squares


def test_equation_7_by_the_printed_columns_falls_at_each_step_in_table_1_alone(monkeypatch):
    headed, metric, falls = pacbayes.tables()
    assert (headed.verdict, metric.verdict, falls.verdict) == ("refuted",) * 3
    assert (metric.ours, falls.ours) == (False, True)
    assert "table 1 297, 270, 250; table 2 6,611, 5,615, 7,466" in falls.evidence
    flat = {table: [(0.0, 5.0, 2.0, a) for a in (3.0, 2.0, 1.0)] for table in pacbayes.SIZES}
    monkeypatch.setattr(pacbayes, "printed_columns", lambda: flat)
    assert {claim.verdict for claim in pacbayes.tables()} == {"holds"}


@pytest.mark.parametrize(("h", "bound"), [(10.0, True), (20.0, False)])
def test_equation_8_is_a_bound_below_2_pi_e_alone(h, bound):
    right = 4 * (torch.log(2 * torch.tensor(torch.pi)) - torch.log(torch.tensor(h)))
    assert bool(right >= -4) is bound


def test_the_metric_moves_under_a_rescaling_and_the_carried_divergence_does_not():
    metric, carried, held = pacbayes.invariance()
    assert metric.measured > 10
    assert abs(carried.measured - 1) < 1e-12
    assert held.measured > 10


def test_the_entropies_are_those_of_the_laws_with_variance_one():
    names = ["normal", "uniform", "Laplace", "exponential"]
    laws = [
        torch.distributions.Normal(0.0, 1.0),
        torch.distributions.Uniform(0.0, math.sqrt(12)),
        torch.distributions.Laplace(0.0, math.sqrt(0.5)),
        torch.distributions.Exponential(1.0),
    ]
    claim, _ = pacbayes.entropies()
    assert all(float(law.variance) == pytest.approx(1) for law in laws)
    assert all(f"{name} {float(law.entropy()):.3f}" in claim.evidence for name, law in zip(names, laws, strict=True))
