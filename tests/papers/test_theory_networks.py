"""The small networks of the theory: keyed, float64, and with derivatives that autograd gives another way."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import ritz
from ritz.papers import theory_networks as networks


def by_rows(f, flat):
    """The Hessian of a scalar function, a row of a second backward pass at a time."""
    flat = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(flat), flat, create_graph=True)
    return torch.stack([torch.autograd.grad(g, flat, retain_graph=True, allow_unused=True)[0] for g in gradient])


@pytest.fixture
def risk():
    X, y = networks.normal((5, 3), seed=0), networks.labels(5, 3, seed=0)
    return networks.classify(networks.mlp((3, 4, 3), seed=0, activation=nn.Tanh), X, y)


def test_a_network_is_drawn_by_its_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, same, other = (list(networks.mlp((3, 4, 2), seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert {p.dtype for p in one} == {torch.float64}


def test_the_layers_of_a_network_are_as_asked():
    model = networks.mlp((3, 4, 2), seed=0, bias=False, activation=nn.Tanh, rectified=True)
    assert [type(layer).__name__ for layer in model] == ["Linear", "Tanh", "Linear", "Tanh"]
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "2.weight"]


def test_normal_numbers_are_normal():
    values = networks.normal((20_000,), seed=0)
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.std()) - 1) < 0.03
    assert not torch.equal(networks.normal((3,), 0, "a"), networks.normal((3,), 0, "b"))


def test_derivatives_of_the_outputs_are_those_of_two_backward_passes(risk):
    x = networks.normal((3,), seed=1)
    flat = risk.space.join(risk.params())
    f, J, K = networks.derivatives(risk, x)
    for k in range(3):

        def output(w, k=k):
            return functional_call(risk.model, risk.space.split(w), (x[None],))[0, k]

        torch.testing.assert_close(f[k], output(flat).detach())
        torch.testing.assert_close(J[k], torch.func.grad(output)(flat))
        torch.testing.assert_close(K[k], by_rows(output, flat))


def test_sizes_are_those_of_a_krylov_run(risk):
    found = ritz.spectrum(ritz.Hessian(risk))
    sizes = networks.sizes_of(risk)
    assert sizes.trace == pytest.approx(float(found.trace.value), rel=1e-9)
    assert sizes.frobenius == pytest.approx(float(found.frobenius_norm.value), rel=1e-9)
    assert sizes.spectral == pytest.approx(float(found.spectral_norm.value), rel=1e-9)


def test_the_last_layer_scales_the_outputs_and_leaves_the_model_alone(risk):
    X = networks.normal((4, 3), seed=2)
    before = [p.clone() for p in risk.model.parameters()]
    moved = networks.outputs_of(networks.last_layer(risk, 7.0), X)
    torch.testing.assert_close(moved, 7 * networks.outputs_of(risk, X))
    assert all(torch.equal(a, b) for a, b in zip(before, risk.model.parameters(), strict=True))
