"""Switches of torch are put back, by the names that this torch has."""

import pytest
import torch

from ritz.switches import all_digits, convolution_precision, matmul_precision, tensor_cores, timed_convolutions


def test_switches_of_precision_are_as_before_even_where_the_body_fails():
    before = matmul_precision(), convolution_precision()

    def fail():
        assert (matmul_precision(), convolution_precision()) != before
        raise ArithmeticError

    for switched in (tensor_cores, all_digits):
        with pytest.raises(ArithmeticError), switched():
            fail()
        assert (matmul_precision(), convolution_precision()) == before
    with tensor_cores(allowed=False):
        assert (matmul_precision(), convolution_precision()) == before


def test_convolutions_are_timed_inside_alone_and_as_the_user_has_it():
    with timed_convolutions(allowed=False):
        assert not torch.backends.cudnn.benchmark

    def fail():
        with timed_convolutions(allowed=False):  # of one that is allowed
            assert torch.backends.cudnn.benchmark
        raise ArithmeticError

    with pytest.raises(ArithmeticError), timed_convolutions():
        fail()
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("tf32", [True, False])
def test_a_torch_that_has_the_old_names_alone_is_switched_by_them(monkeypatch, tf32):
    class Old:
        allow_tf32 = tf32

    cuda, cudnn = Old(), Old()
    cuda.matmul = Old()
    monkeypatch.setattr(torch.backends, "cuda", cuda)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    with tensor_cores():
        assert (matmul_precision(), convolution_precision()) == (True, tf32)
        with all_digits():
            assert (matmul_precision(), convolution_precision()) == (False, False)
    assert (matmul_precision(), convolution_precision()) == (tf32, tf32)
