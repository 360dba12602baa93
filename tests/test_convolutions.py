"""The three forms of a convolution against torch's own, to third order, for every geometry."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ritz.convolutions import Geometry, SmoothConvolutions, convolution

CASES = {
    "strided, dilated, grouped": (F.conv2d, (2, 4, 6, 7), (6, 2, 3, 2), Geometry((2, 1), (1, 2), (1, 2), 2)),
    "depthwise": (F.conv2d, (3, 3, 5, 5), (3, 1, 3, 3), Geometry((1, 1), (1, 1), (1, 1), 3)),
    "one dimension": (F.conv1d, (2, 2, 6), (3, 2, 3), Geometry((1,), (1,), (1,), 1)),
    "three dimensions": (F.conv3d, (1, 1, 4, 4, 4), (2, 1, 2, 2, 2), Geometry((1, 1, 2), (0, 1, 0), (1, 1, 1), 1)),
    "stride leaves a rest": (F.conv2d, (1, 1, 6, 6), (1, 1, 3, 3), Geometry((2, 2), (0, 0), (1, 1), 1)),
}


@pytest.fixture(params=CASES)
def case(request):
    fn, x_shape, w_shape, geometry = CASES[request.param]
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=g, requires_grad=True) for shape in (x_shape, w_shape, w_shape[:1])]
    return tensors, geometry, lambda x, w, b: fn(x, w, b, *geometry)


def test_derivatives_up_to_the_third_are_those_of_torch(case):
    tensors, geometry, plain = case
    for known, ours in zip(
        derivatives(plain, tensors), derivatives(lambda *t: convolution(*t, geometry), tensors), strict=True
    ):
        torch.testing.assert_close(ours, known, rtol=1e-10, atol=1e-10)


def derivatives(fn, tensors):
    """The value, and gradients of functions of the gradients before them."""
    total = fn(*tensors).tanh().sum()
    found = [total]
    for power in (3, 2, 1):
        grads = torch.autograd.grad(total, tensors, create_graph=True)
        found += grads
        total = sum((g**power).sum() for g in grads)
    return found


def test_derivatives_are_those_of_differences(case):
    tensors, geometry, _ = case
    assert torch.autograd.gradgradcheck(lambda *t: convolution(*t, geometry), tensors)


def test_inside_the_mode_layers_use_them_and_outside_not():
    layer, x = nn.Conv2d(2, 3, 3, padding=1, bias=False), torch.randn(1, 2, 4, 4)
    with SmoothConvolutions():
        inside = layer(x)
    assert inside.grad_fn.name() == "_ForwardBackward"
    assert layer(x).grad_fn.name() == "ConvolutionBackward0"
    torch.testing.assert_close(inside, layer(x))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(2, 3, 3, padding="same"), (1, 2, 4, 4)),
        (nn.Conv2d(2, 3, 3), (2, 4, 4)),  # no batch
        (nn.ConvTranspose2d(2, 3, 3), (1, 2, 4, 4)),
    ],
    ids=["padding by name", "one sample", "transposed"],
)
def test_what_is_not_known_stays_with_torch(layer, shape):
    x = torch.randn(shape)
    with SmoothConvolutions():
        out = layer(x)
    assert not out.grad_fn.name().startswith("_")
    torch.testing.assert_close(out, layer(x))


def test_circular_padding_is_done_before_the_convolution():
    layer, x = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), torch.randn(1, 2, 4, 4)
    with SmoothConvolutions():
        out = layer(x)
    torch.testing.assert_close(out, layer(x))


def test_under_autocast_torch_chooses_the_precision():
    layer, x = nn.Conv2d(2, 3, 3).float(), torch.randn(1, 2, 4, 4).float()
    with SmoothConvolutions(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_a_view_that_other_strides_stand_in_the_way_of_is_a_copy():
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    with SmoothConvolutions():
        assert torch.equal(x.view(2, -1), x.flatten(1))
        assert x.view(2, 3, 16).data_ptr() == x.data_ptr()
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            x.view(5, 5)


def test_inside_torch_func_and_for_complex_numbers_they_are_those_of_torch():
    w, x = torch.randn(2, 1, 3), torch.randn(4, 1, 1, 6)
    with SmoothConvolutions():
        found = torch.func.vmap(lambda one: F.conv1d(one, w))(x)
        F.conv1d(x[0].to(torch.complex128), w.to(torch.complex128).requires_grad_()).abs().sum().backward()
    torch.testing.assert_close(found[:, 0], F.conv1d(x[:, 0], w))


def test_a_frozen_weight_and_one_used_twice_have_the_gradients_of_torch():
    layer, x = nn.Conv2d(2, 2, 3, padding=1), torch.randn(2, 2, 5, 5, requires_grad=True)

    def gradients(inputs):
        total = layer(layer(x).tanh()).square().sum()
        first = torch.autograd.grad(total, inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    for frozen, inputs in ((False, (x, layer.weight)), (True, (x,))):
        layer.weight.requires_grad_(not frozen)
        known = gradients(inputs)
        with SmoothConvolutions():
            torch.testing.assert_close(gradients(inputs), known, rtol=1e-9, atol=1e-9)
