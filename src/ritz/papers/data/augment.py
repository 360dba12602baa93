"""Augmentation of a batch on the device that holds it, by keyed randomness.

What is drawn depends on its key alone, (seed, epoch, step) in training: a run that was killed goes on with the images
that it would have had, and a CPU and a GPU see the same ones. The host is not waited for.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...space import random_bits
from .catalogue import Norm


def augment(
    images: Tensor, key: tuple[object, ...], *, padding: int = 4, flip: bool = True, norm: Norm | None = None
) -> Tensor:
    """Each image moved by up to `padding` pixels each way, black coming in, and mirrored by a fair coin.

    As RandomCrop(32, padding=4) and RandomHorizontalFlip do with the papers' images before they are normalised. Images
    that are normalised already are given with their norm, which says what black is: both ways give the same numbers.
    For `Recipe.augment`: `functools.partial(augment, norm=norm)`.

    Args:
        images: (N, channels, height, width), bytes or numbers.
        key: Names the draw, as (seed, epoch, step).
        padding: 0 leaves images in place.
        flip: Whether to mirror.
        norm: By which the images were normalised; None where black is 0.

    Raises:
        ValueError: If there are not four dimensions, the padding is negative, or bytes are given with a norm.

    Example:
        >>> images = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 1, 3, 3)
        >>> augment(images, (0, 0, 11), padding=1).tolist()
        [[[[0, 3, 2], [0, 6, 5], [0, 9, 8]]]]
    """
    if images.ndim != 4 or padding < 0:
        raise ValueError(
            f"expected images (N, channels, height, width) and padding >= 0, got {tuple(images.shape)} and {padding}"
        )
    if norm is not None and not images.is_floating_point():
        raise ValueError(
            f"images of {images.dtype} are not normalised yet: leave norm out, and normalise what comes out"
        )
    num, channels, height, width = images.shape
    bits = random_bits(3 * num, ("augment", *key), images.device).reshape(3, num, 1)
    down, right = bits[:2].remainder(2 * padding + 1)  # (N, 1) each: where the crop begins in the padded image
    rows = down + torch.arange(height, device=images.device)  # (N, height)
    columns = torch.arange(width, device=images.device).expand(num, width)
    if flip:
        columns = torch.where(bits[2] < 0, columns.flip(1), columns)  # the sign is the coin
    columns = right + columns
    padded = F.pad(images, (padding,) * 4)
    cropped = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, width + 2 * padding))
    cropped = cropped.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))
    if norm is None or padding == 0:
        return cropped
    inside = _within(rows, padding, height)[:, None, :, None] & _within(columns, padding, width)[:, None, None, :]
    black = norm(images.new_zeros(1, channels, 1, 1), images.dtype)
    return torch.where(inside, cropped, black)


def _within(places: Tensor, start: int, size: int) -> Tensor:
    """Whether places of the padded image belong to the image."""
    return (places >= start) & (places < start + size)
