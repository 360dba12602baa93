"""The example of seed 000 and its corrected Hessian, against autograd and closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ritz.models import vgg16_bn
from ritz.papers import theory_flatness as flatness
from ritz.papers.theory_networks import dense_hessian

numbers = st.floats(-1.5, 1.5)


@given(w=st.tuples(numbers, numbers, numbers), x=numbers)
def test_the_corrected_hessian_is_that_of_two_backward_passes(w, x):
    weights = torch.tensor(w, requires_grad=True)
    loss = torch.exp(weights[0] * weights[1] * weights[2] * x)
    (gradient,) = torch.autograd.grad(loss, weights, create_graph=True)
    truth = torch.stack([torch.autograd.grad(g, weights, retain_graph=True)[0] for g in gradient])
    torch.testing.assert_close(flatness.deep_linear_hessian(weights.detach(), x), truth, rtol=1e-10, atol=1e-12)


def test_the_risk_of_the_example_has_that_hessian():
    w = torch.tensor([0.3, -1.2, 2.0])
    risk = flatness.deep_linear_risk(w, x=0.7)
    assert risk.loss() == pytest.approx(math.exp(0.3 * -1.2 * 2.0 * 0.7), rel=1e-14)
    torch.testing.assert_close(dense_hessian(risk), flatness.deep_linear_hessian(w, 0.7))


def test_the_hessian_does_not_vanish_where_the_gradient_and_the_printed_matrix_do():
    w = torch.tensor([2.0, 0.0, 0.0])  # g = 0
    truth = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 2.0, 0.0]])
    assert torch.equal(flatness.deep_linear_hessian(w, 1.0), truth)
    torch.testing.assert_close(dense_hessian(flatness.deep_linear_risk(w, 1.0)), truth)


def test_the_trace_of_the_example_follows_its_closed_forms_along_both_paths():
    _, ray, skew = flatness.deep_linear_limit()
    assert ray.measured == pytest.approx(3 * 4**4 * math.exp(-(4**3)), rel=1e-9)
    z = 15.0
    assert skew.measured == pytest.approx((z**2 * math.exp(2 * z) + z**2 + math.exp(-2 * z)) * math.exp(-z), rel=1e-9)


def test_single_overlaps_follow_the_beta_law():
    *_, overlap, of_signs = flatness.random_shift()
    dim = 43
    assert overlap.measured == pytest.approx(math.sqrt(2 * (dim - 1) / (dim + 2)), rel=0.05)
    assert of_signs.measured == pytest.approx(math.sqrt(2), rel=0.05)  # less 2 sum phi_j^4, which is small


def test_a_relative_error_of_half_is_what_a_missing_factor_two_gives():
    printed, mended = flatness.taylor()
    assert printed.measured == mended.measured == pytest.approx(0.5, abs=1e-3)


def test_the_printed_norm_is_too_small_for_a_norm_and_not_for_the_mean_square_of_the_eigenvalues():
    assert sum(p.numel() for p in vgg16_bn(num_classes=10).parameters()) == flatness.VGG16_BN
    printed, mended = flatness.printed_norm()
    assert mended.measured == pytest.approx(printed.measured * math.sqrt(flatness.VGG16_BN / 1.43e-5))
    assert printed.measured < 1 < mended.measured


def test_one_rescaling_moves_the_trace_and_neither_the_function_nor_the_norm():
    *_, moved, kept = flatness.rescaling()
    assert moved.measured > 10
    assert kept.measured != pytest.approx(1, rel=0.02)


def test_descent_from_zero_ends_at_the_shortest_solution_and_from_elsewhere_at_another_one():
    at_zero, elsewhere = flatness.least_norm()
    assert at_zero.measured < 1e-12
    assert elsewhere.measured > 1


def test_the_function_of_the_footnote_is_largest_at_four_hundred():
    largest = max(range(100, 1000), key=lambda x: 10 * math.log(x) - math.sqrt(x))
    assert largest == 400
    assert 400**10 * math.exp(-20) == pytest.approx(2e17, rel=0.1)
