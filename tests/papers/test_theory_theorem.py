"""Theorem 1 of seed 000: where it holds, where it does not, and the bounds that hold instead."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ritz
from ritz.papers import theory_theorem as theorem
from ritz.papers.theory_networks import classify, derivatives, labels, mlp, normal, sizes_of


def test_along_the_scaling_the_loss_and_all_measures_vanish_while_weights_grow():
    path = theorem.scaling_path()
    losses, norms = [p.loss for p in path], [p.weight_norm for p in path]
    assert losses == sorted(losses, reverse=True)
    assert norms == sorted(norms)
    assert max(path[-1].sizes) < 1e-9
    assert path[1].sizes.trace > path[0].sizes.trace  # it rises before it falls


def test_on_the_unbalanced_path_the_trace_is_that_of_softplus():
    """softplus(-w1 w2), differentiated by hand."""
    for z, point in zip(theorem.HEIGHTS, theorem.unbalanced_path(), strict=True):
        first, second = z * math.exp(z), math.exp(-z)
        s = 1 / (1 + math.exp(-z))
        assert point.loss == pytest.approx(math.log1p(math.exp(-z)), rel=1e-8)
        assert point.sizes.trace == pytest.approx(s * (1 - s) * (first**2 + second**2), rel=1e-8)
        assert min(point.sizes) >= 0.9 * max(point.sizes)  # one eigenvalue


def test_the_counterexamples_get_sharper_at_every_step():
    for path in (theorem.unbalanced_path(), theorem.bounded_path()):
        assert [p.loss for p in path] == sorted((p.loss for p in path), reverse=True)
        for measure in ("trace", "frobenius", "spectral"):
            values = [getattr(p.sizes, measure) for p in path]
            assert values == sorted(values)


def test_a_krylov_run_sees_the_counterexample_too():
    z = 15.0
    risk = theorem._narrow(z * math.exp(z), (math.exp(-z), -1.0))
    found = ritz.spectrum(ritz.Hessian(risk, route="reverse"))
    assert float(found.trace.value) == pytest.approx(theorem.unbalanced_path()[-1].sizes.trace, rel=1e-6)
    assert float(found.spectral_norm.value) > 7e8
    assert risk.loss() < 1e-6


def test_on_the_bounded_path_no_weight_is_below_one():
    z = 10.0
    risk = theorem._narrow(math.exp(z), (1 + z * math.exp(-z), 1.0))
    assert float(risk.space.join(risk.params()).abs().min()) >= 1
    first, last = risk.params().values()
    margin = float(first[0, 0] * (last[0, 0] - last[1, 0]))
    assert margin == pytest.approx(z, rel=1e-9)


@given(seed=st.integers(0, 10_000), activation=st.sampled_from([nn.ReLU, nn.Tanh]))
def test_the_mended_bound_holds_for_any_network(seed, activation):
    x, y = normal((1, 3), seed), labels(1, 3, seed)
    risk = classify(mlp((3, 4, 3), seed, activation=activation), x, y)
    _, J, K = derivatives(risk, x[0])
    most = ((J - J[y]).square().sum(1) + (K - K[y]).flatten(1).norm(dim=1)).max()
    sizes = sizes_of(risk)
    assert max(sizes.frobenius, sizes.spectral) <= risk.loss() * float(most) * (1 + 1e-9) + 1e-14


def test_the_paths_of_a_network_add_up_to_its_outputs_and_bound_its_derivatives():
    x = normal((3,), seed=3)
    risk = classify(mlp((3, 4, 4, 3), seed=3, bias=False), x[None], torch.tensor([0]))
    terms = theorem._paths(list(risk.params().values()), x)
    f, J, _ = derivatives(risk, x)
    torch.testing.assert_close(terms.sum((1, 2, 3)), f)
    # a derivative by one weight of the last layer, from the paths through it
    weight = risk.params()["4.weight"][1, 2]
    through = terms[1, 2].sum() / weight
    torch.testing.assert_close(risk.space.split(J[1])["4.weight"][1, 2], through)


def test_equation_9_is_the_hessian_of_the_cross_entropy():
    f, target = normal((4,), seed=5), torch.tensor(0)
    identity = torch.eye(4)
    found = theorem._equation_9(f, identity, torch.zeros(4, 4, 4))
    truth = torch.autograd.functional.hessian(lambda out: F.cross_entropy(out, target), f)
    torch.testing.assert_close(found, truth)


def test_the_two_exponents_of_equation_12_part_along_the_scaling():
    printed, mended = theorem.exponent()
    assert printed.measured > 1e6 > mended.measured * 1e12
    assert (printed.verdict, mended.verdict) == ("refuted", "holds")


def test_derivatives_of_the_loss_in_the_outputs_are_those_of_autograd():
    f = normal((4,), seed=30)
    slope, bend = theorem._softmax(f, label=2)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs[None], torch.tensor([2]))

    torch.testing.assert_close(slope, torch.func.grad(loss)(f))
    torch.testing.assert_close(bend, torch.func.hessian(loss)(f))
