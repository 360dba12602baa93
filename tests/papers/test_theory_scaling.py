"""T_alpha: its limits for right answers and wrong ones, against autograd of the composed function."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from ritz.papers import theory_scaling as scaling
from ritz.papers.theory_networks import (
    classify,
    dense_hessian,
    labels,
    last_layer,
    mlp,
    normal,
    outputs_of,
    sizes_of,
)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_the_composed_hessian_is_that_of_alpha_times_the_outputs(activation):
    alpha, X, y = 3.0, normal((4, 3), seed=0), labels(4, 3, seed=0)
    risk = classify(mlp((3, 4, 3), seed=0, activation=activation), X, y)
    flat = risk.space.join(risk.params()).requires_grad_()
    loss = nn.functional.cross_entropy(alpha * functional_call(risk.model, risk.space.split(flat), (X,)), y)
    (gradient,) = torch.autograd.grad(loss, flat, create_graph=True)
    truth = torch.stack([torch.autograd.grad(g, flat, retain_graph=True)[0] for g in gradient])
    torch.testing.assert_close(scaling.composed_hessian(risk, alpha), truth)


def test_a_right_point_becomes_flat_and_a_wrong_one_only_in_trace():
    (right, _, margin), (wrong, _, same) = (scaling._one_point(right=answer) for answer in (True, False))
    assert margin == same
    at = [sizes_of(last_layer(risk, 40 / margin)) for risk in (right, wrong)]
    assert max(at[0]) < 1e-12
    assert at[1].trace < 1e-12
    assert at[1].spectral > 10


def test_with_two_layers_the_curvature_of_a_wrong_point_tends_to_a_constant():
    """d2 f couples the layers: alpha in f, 1 / alpha from the last layer's own scale."""
    model, x = mlp((3, 4, 3), seed=2), normal((1, 3), seed=2)
    with torch.no_grad():
        order = model(x)[0].argsort(descending=True)
    wrong = classify(model, x, order[1:2])
    first, second = (dense_hessian(last_layer(wrong, alpha)) for alpha in (400.0, 800.0))
    torch.testing.assert_close(first, second)
    assert float(second.norm()) > 0.1
    assert abs(float(second.trace())) < 1e-12


def test_the_network_of_the_corollary_has_every_label_right():
    risk, least = scaling._all_right()
    assert risk.num_samples >= 5
    X, y = next(iter(risk.batches)).data
    outputs = outputs_of(risk, X)
    assert torch.equal(outputs.argmax(1), y)
    top = outputs.topk(2, dim=1).values
    assert float((top[:, 0] - top[:, 1]).min()) == pytest.approx(least)


def test_uniform_scaling_of_layers_is_right_without_biases():
    X = normal((5, 3), seed=3)
    risk = classify(mlp((3, 4, 4, 3), seed=3, bias=False), X, labels(5, 3, seed=3))
    moved = risk.at({name: 1.5 * p for name, p in risk.params().items()})
    torch.testing.assert_close(outputs_of(moved, X), 1.5**3 * outputs_of(risk, X))
    printed, mended = scaling.layerwise()  # with biases
    assert printed.measured > 0.01
    assert mended.measured < 1e-14
