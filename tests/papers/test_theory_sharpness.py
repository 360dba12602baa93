"""Equations 2 and 17 of seed 000, and the penalty: the parts of which the claims are made, against closed forms."""

import math

import pytest
import torch
from torch import nn

import ritz
from ritz.papers import theory_sharpness as sharpness
from ritz.papers.theory_networks import dense_hessian


def quadratic(H: torch.Tensor) -> ritz.Risk:
    """w'Hw / 2 at w = 0."""
    model = nn.utils.skip_init(nn.Linear, len(H), 1, bias=False)
    root = torch.linalg.cholesky(H).T * math.sqrt(len(H) / 2)
    data = (root, torch.zeros(len(H), 1))
    return ritz.Risk(model, nn.MSELoss(), data).at(torch.zeros(len(H)))


def test_newton_ends_at_a_minimum():
    risk = sharpness._minimum(seed=1)
    assert float(risk.gradient().norm()) < 1e-12
    values = torch.linalg.eigvalsh(dense_hessian(risk))
    assert values[0] > -1e-12
    assert values[-1] > 0.1


def test_the_rise_in_a_ball_and_in_a_box_are_those_of_a_quadratic():
    H = torch.tensor([[3.0, 1.0], [1.0, 2.0]])
    risk = quadratic(H)
    torch.testing.assert_close(dense_hessian(risk), H)
    top = float(torch.linalg.eigvalsh(H)[-1])
    assert sharpness._rise(risk, 0.1) == pytest.approx(top * 0.1**2 / 2, rel=1e-9)
    assert sharpness._box(risk) == pytest.approx((3 + 2 + 2 * 1) / (2 * top))  # at the corner (1, 1)


def test_in_a_box_one_lambda_1_has_many_sharpnesses():
    assert sharpness._box(quadratic(torch.eye(2))) == pytest.approx(1)
    assert sharpness._box(quadratic(torch.diag(torch.tensor([1.0, 1e-9])))) == pytest.approx(0.5)


def test_smallest_ritz_values_fall_to_the_smallest_eigenvalue():
    H = torch.diag(torch.tensor([5.0, 3.0, 1.0, -2.0]))
    start = torch.full((4,), 0.5)
    found = sharpness._smallest_ritz_values(H, start, 4)
    assert found[0] == pytest.approx(7 / 4)
    assert found[3] == pytest.approx(-2)
    assert bool((found.diff() < 0).all())


def test_a_matrix_of_its_own_breaks_the_bound_that_has_lambda_n_with_the_gap_of_lambda_1():
    """What equation 17 would be with lambda_n for lambda_m: as printed it cannot fail."""
    values = torch.cat([torch.tensor([100.0]), torch.linspace(1, 0, 60)])
    start = torch.ones(61) / math.sqrt(61)
    found = sharpness._smallest_ritz_values(torch.diag(values), start, 8)
    top = sharpness.bound(start[:1], 100.0, 1.0, 0.0, 8)[0]
    assert bool((found > values[-1] + top).any())
    assert not bool((found > values[:8] + 1e-9).any())


def test_a_gauss_rule_of_two_nodes_is_that_of_legendre():
    # the start has equal shares of many eigenvalues in [-1, 1]: nodes -+ 1 / sqrt(3), weights 1 / 2
    values = torch.linspace(-1, 1, 2001)
    nodes, weights = sharpness._gauss_rule(torch.diag(values), torch.full((2001,), 2001**-0.5), 2)
    torch.testing.assert_close(nodes, torch.tensor([-1.0, 1.0]) / math.sqrt(3), rtol=1e-3, atol=0)
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.5]))
