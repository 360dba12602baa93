"""Normalisations against torch's own, right up to the second derivative, and the third against differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradgradcheck

from ritz.normalisations import SmoothNormalisations

torch.set_default_dtype(torch.float64)

KNOWN = {"running_mean": None, "running_var": None, "momentum": 0.1, "eps": 0.1, "cudnn_enabled": False}
CASES = {
    "layer": (lambda x, w, b: F.layer_norm(x, (3,), w, b), (2, 2, 3), 3),
    "layer, of two dimensions": (lambda x, w, b: F.layer_norm(x, (2, 3), w.view(2, 3), b.view(2, 3)), (2, 2, 3), 6),
    "layer, torch's name": (lambda x, w, b: torch.layer_norm(x, (3,), w, b, 0.1), (2, 3), 3),
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (3, 2), 2),
    "batch, of images": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, 0.1), (2, 2, 1, 2), 2),
    "batch, torch's name": (lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 0.1, False), (3, 2), 2),
    "instance, torch's name": (
        lambda x, w, b: torch.instance_norm(x, w, b, None, None, True, 0.1, 0.1, False),
        (2, 2, 3),
        2,
    ),
    "instance": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (2, 2, 3), 2),
    "batch, by torch's keywords": (lambda x, w, b: torch.batch_norm(x, w, b, **KNOWN, training=True), (3, 2), 2),
    "instance, by torch's keywords": (
        lambda x, w, b: torch.instance_norm(x, w, b, **KNOWN, use_input_stats=True),
        (2, 2, 3),
        2,
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    fn, shape, width = CASES[request.param]
    g = torch.Generator().manual_seed(0)
    return fn, [torch.randn(s, generator=g, requires_grad=True) for s in (shape, (width,), (width,))]


def smooth(fn):
    def run(*tensors):
        with SmoothNormalisations():
            return fn(*tensors)

    return run


def gradients(fn, tensors):
    total = (fn(*tensors).exp()).sum()
    return torch.autograd.grad(total, tensors, create_graph=True)


def test_values_and_two_derivatives_are_those_of_torch(case):
    fn, tensors = case
    torch.testing.assert_close(smooth(fn)(*tensors), fn(*tensors))
    for ours, known in zip(gradients(smooth(fn), tensors), gradients(fn, tensors), strict=True):
        torch.testing.assert_close(ours, known)
    assert gradgradcheck(smooth(fn), tensors)


def test_the_third_derivative_is_that_of_differences_and_torchs_is_not(case):
    fn, tensors = case
    assert gradgradcheck(lambda *t: gradients(smooth(fn), t), tensors)
    assert not gradgradcheck(lambda *t: gradients(fn, t), tensors, raise_exception=False)


def test_inside_the_mode_layers_use_them_and_outside_not():
    layer, x = nn.LayerNorm(3), torch.randn(2, 3)
    with SmoothNormalisations():
        inside = layer(x)
    assert "LayerNorm" not in inside.grad_fn.name()
    assert "LayerNorm" in layer(x).grad_fn.name()
    torch.testing.assert_close(inside, layer(x))


def test_few_bits_are_widened_as_torch_does():
    layer, x = nn.LayerNorm(64).to(torch.bfloat16), (torch.randn(4, 64) + 100).to(torch.bfloat16)
    with SmoothNormalisations():
        inside = layer(x)
    assert inside.dtype == torch.bfloat16
    torch.testing.assert_close(inside, layer(x), rtol=0.01, atol=0.01)


def test_statistics_that_are_given_and_what_torch_refuses_are_torchs():
    norm, x = nn.BatchNorm1d(2).eval(), torch.randn(3, 2)
    with SmoothNormalisations():
        assert "BatchNorm" in norm(x).grad_fn.name()
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            norm.train()(x[:1])
        with pytest.raises(ValueError, match="more than 1 spatial element"):
            F.instance_norm(torch.randn(2, 2, 1))
        with pytest.raises(RuntimeError, match="normalized_shape"):
            F.layer_norm(x, (5,))
