"""Weights and operations that the theory counts, against closed forms and draws."""

import math

import pytest
import torch
from torch import nn

from ritz.papers import theory_counts as counts
from ritz.papers.theory_networks import classify, dense_hessian, labels, mlp, normal


def test_a_gradient_of_a_single_layer_is_two_products_of_matrices():
    """x W' and the gradient of W; the inputs need no gradient."""
    assert counts._operations((5, 3), 4, "gradient") == 2 * (2 * 4 * 5 * 3)


def test_each_layer_more_costs_a_gradient_three_products_of_matrices():
    two, three = (counts._operations((6,) * depth, 4, "gradient") for depth in (3, 4))
    assert three - two == 3 * (2 * 4 * 6 * 6)


@pytest.mark.parametrize("what", ["gradient", "product", "ggn"])
def test_operations_go_with_the_number_of_samples(what):
    assert counts._operations((6, 6, 3), 16, what) == 2 * counts._operations((6, 6, 3), 8, what)


def test_weights_are_those_of_the_layers_and_their_biases():
    assert counts._weights(nn.Linear(7, 3)) == 7 * 3 + 3
    assert counts._size((7, 4, 3)) == 7 * 4 + 4 * 3


def test_the_printed_number_of_weights_is_that_of_two_hidden_layers_and_not_of_one():
    found = {claim.measured: claim.verdict for claim in counts.parameters()}
    assert found[784 * 100 + 100 + 100 * 10 + 10] == "refuted"
    assert found[784 * 10 + 10 + 10 * 100 + 100 + 100 * 10 + 10] == "holds"


def test_the_number_of_vectors_is_what_random_signs_need():
    H = dense_hessian(classify(mlp((4, 6, 5, 3), 11), normal((10, 4), 11), labels(10, 3, 11)))
    signs = normal((50_000, len(H)), seed=1, name="signs").sign()
    spread = float(((signs @ H) * signs).sum(1).std() / H.trace())
    _, tens, exact = counts.vectors()
    assert tens.measured == pytest.approx((spread / 0.1) ** 2, rel=0.05)
    assert exact.measured == pytest.approx((spread / 0.01) ** 2, rel=0.05)


def test_the_cost_of_reorthogonalisation_is_that_of_the_products_with_its_basis():
    """At step j a vector is multiplied by j others and these by j numbers: 4 P j operations."""
    m, dim = 10, 50
    basis = torch.zeros(dim, 0)
    done = 0
    for _ in range(m):
        done += 2 * 2 * basis.numel()
        basis = torch.cat([basis, torch.zeros(dim, 1)], 1)
    assert done == pytest.approx(2 * dim * m**2, rel=1.1 / m)
    _, claim = counts.products()
    assert math.isclose(claim.measured, 2 * counts.STEPS / (14.72 * counts.IMAGES), rel_tol=1e-3)
