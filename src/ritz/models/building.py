"""What the builders of networks share: named layers, sizes, and where the first weights come from."""

import math
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ..batches import isolated_rng


class Residual(nn.Module):
    """body(x) + shortcut(x).

    Example:
        >>> Residual(torch.nn.ReLU(), torch.nn.Identity())(torch.tensor([-1.0, 1.0]))
        tensor([-1., 2.])
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


def named(**layers: nn.Module) -> nn.Sequential:
    """The layers one after another, under these names.

    Example:
        >>> [name for name, _ in named(fc=torch.nn.Linear(2, 1)).named_parameters()]
        ['fc.weight', 'fc.bias']
    """
    return nn.Sequential(OrderedDict(layers))


def weights_from(seed: int | None) -> AbstractContextManager[None]:
    """Inside, weights are drawn from the seed and torch's own generator stays as it was; None draws from that one.

    Example:
        >>> with weights_from(0):
        ...     first = torch.rand(1)
        >>> with weights_from(0):
        ...     first == torch.rand(1)
        tensor([True])
    """
    return nullcontext() if seed is None else isolated_rng(seed, torch.get_default_device())


def he_normal_(conv: nn.Conv2d) -> nn.Conv2d:
    """Weights from N(0, 2 / (k^2 C_out)), biases 0: He et al. 2015, equation 14, which keeps the backward signal.

    Example:
        >>> conv = he_normal_(torch.nn.Conv2d(8, 32, 3))
        >>> round(float(conv.weight.detach().std() * 12), 0), conv.bias.any().item()  # sqrt(2 / (9 * 32)) = 1 / 12
        (1.0, False)
    """
    height, width = conv.kernel_size
    nn.init.normal_(conv.weight, std=math.sqrt(2 / (height * width * conv.out_channels)))
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def glorot_normal_(conv: nn.Conv2d, bias: float) -> nn.Conv2d:
    """Weights from N(0, 2 / (k^2 (C_in + C_out))), all biases alike: Glorot and Bengio 2010, equation 12.

    Example:
        >>> conv = glorot_normal_(torch.nn.Conv2d(18, 14, 3), bias=0.5)
        >>> round(float(conv.weight.detach().std() * 12), 0), conv.bias.unique().tolist()
        (1.0, [0.5])
    """
    nn.init.xavier_normal_(conv.weight)
    if conv.bias is not None:
        nn.init.constant_(conv.bias, bias)
    return conv


def scaled(channels: int, width: float) -> int:
    """A number of channels times `width`, at least one.

    Example:
        >>> scaled(64, 1.0), scaled(64, 0.125), scaled(16, 0.01)
        (64, 8, 1)
    """
    if not (math.isfinite(width) and width > 0):
        raise ValueError(f"width multiplies all channels: it must be finite and positive, got {width!r}")
    return max(round(channels * width), 1)


def check_sizes(**sizes: int) -> None:
    """Refuse a network without classes or channels.

    Example:
        >>> check_sizes(num_classes=0)
        Traceback (most recent call last):
        ValueError: num_classes must be a whole number of at least 1, got 0
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
