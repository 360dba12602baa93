"""Augmentation: what a plain loop would do, drawn from a key, wherever the images are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ritz.papers.data import Norm, augment
from ritz.space import random_bits

CIFAR = Norm((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def some_images(num: int, channels: int = 3, height: int = 5, width: int = 7, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (num, channels, height, width), dtype=torch.uint8, generator=gen)


def by_a_loop(images: torch.Tensor, key: tuple, padding: int, flip: bool) -> torch.Tensor:
    """Pad, crop and mirror one pixel at a time; slow and obvious on purpose."""
    num, _, height, width = images.shape
    bits = random_bits(3 * num, ("augment", *key)).tolist()
    out = torch.zeros_like(images)
    for n in range(num):
        down, right = bits[n] % (2 * padding + 1), bits[num + n] % (2 * padding + 1)
        mirrored = flip and bits[2 * num + n] < 0
        for row in range(height):
            for column in range(width):
                from_row = row + down - padding
                from_column = (width - 1 - column if mirrored else column) + right - padding
                if 0 <= from_row < height and 0 <= from_column < width:
                    out[n, :, row, column] = images[n, :, from_row, from_column]
    return out


@given(
    num=st.integers(1, 4),
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    padding=st.integers(0, 6),
    flip=st.booleans(),
    step=st.integers(0, 10**9),
)
def test_it_is_what_a_plain_loop_gives(num, height, width, padding, flip, step):
    images = some_images(num, 2, height, width, seed=step)
    assert torch.equal(
        augment(images, (3, 1, step), padding=padding, flip=flip), by_a_loop(images, (3, 1, step), padding, flip)
    )


def test_every_move_and_its_mirror_image_come_equally_often():
    num = 81 * 2 * 200
    corner = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    corner[..., 4, 3] = 1  # not in the middle, so that its mirror image is at another place
    out = augment(corner.expand(num, -1, -1, -1), (0, 0, 0))
    places = out.flatten(1).argmax(1)
    places[out.flatten(1).sum(1) == 0] = 81  # moved out of sight
    # without mirroring the pixel is at column 3 - (right - 4) in -1 ... 7, with it at 8 - 3 + 4 - right in 1 ... 9
    rows, columns = places // 9, places % 9
    seen = places < 81
    assert abs(int((~seen).sum()) / num - 1 / 9) < 0.01
    expected = torch.tensor([1, 2, 2, 2, 2, 2, 2, 2, 1]) * num / 18
    chi2 = (columns[seen].bincount(minlength=9) - expected).square() / expected
    assert float(chi2.sum()) < 27.9  # the 0.9995 quantile with 8 degrees of freedom; the key is fixed
    chi2 = (rows[seen].bincount(minlength=9) - seen.sum() / 9).square() / (seen.sum() / 9)
    assert float(chi2.sum()) < 27.9


def test_the_same_key_gives_the_same_images_and_another_step_others():
    images = some_images(16)
    first = augment(images, (0, 2, 5))
    assert torch.equal(first, augment(images, (0, 2, 5)))
    for key in ((1, 2, 5), (0, 3, 5), (0, 2, 6)):
        assert not torch.equal(first, augment(images, key))


def test_the_global_generator_and_the_images_are_left_alone():
    images = some_images(4)
    before, state = images.clone(), torch.get_rng_state()
    augment(images, (0, 0, 0))
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_before_and_after_normalisation_give_equal_numbers(dtype):
    images = some_images(32)
    key = (0, 0, 1)
    after = augment(CIFAR(images, dtype), key, norm=CIFAR)
    assert after.dtype == dtype
    assert torch.equal(after, CIFAR(augment(images, key), dtype))
    assert not torch.equal(after, augment(CIFAR(images, dtype), key))  # 0 is not black there


def test_without_padding_and_mirror_nothing_moves():
    images = some_images(4)
    assert torch.equal(augment(images, (0, 0, 0), padding=0, flip=False), images)
    numbers = CIFAR(images)
    assert torch.equal(augment(numbers, (0, 0, 0), padding=0, flip=False, norm=CIFAR), numbers)
    assert augment(images[:0], (0, 0, 0)).shape == (0, 3, 5, 7)


def test_images_without_channels_and_a_negative_padding_are_refused():
    with pytest.raises(ValueError, match=r"expected images \(N, channels, height, width\) .* got \(3, 5, 7\) and 4"):
        augment(some_images(1)[0], (0, 0, 0))
    with pytest.raises(ValueError, match=r"padding >= 0, got \(1, 3, 5, 7\) and -1"):
        augment(some_images(1), (0, 0, 0), padding=-1)


def test_bytes_are_refused_where_images_are_said_to_be_normalised():
    with pytest.raises(ValueError, match=r"images of torch\.uint8 are not normalised yet: leave norm out"):
        augment(some_images(1), (0, 0, 0), norm=CIFAR)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_images_and_never_waits_for_the_host():
    images = some_images(64, 3, 32, 32)
    there = images.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = CIFAR(augment(there, (0, 0, 7)))
        same = augment(CIFAR(there), (0, 0, 7), norm=CIFAR)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.cpu(), CIFAR(augment(images, (0, 0, 7))))
    assert torch.equal(out, same)
