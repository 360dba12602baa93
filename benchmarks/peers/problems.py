"""Networks and data of the right shape, the same for every tool: noise, since time does not depend on values."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ritz


@dataclass(frozen=True, eq=False)
class Problem:
    """A network in evaluation mode, cross-entropy, and batches of equal size."""

    name: str
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]

    @property
    def dim(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def loss(self) -> nn.CrossEntropyLoss:
        return nn.CrossEntropyLoss()

    def risk(self, **plan: Any) -> ritz.Risk:
        return ritz.Risk(self.model, self.loss, self.batches, plan=ritz.Plan(**plan))

    def flat(self) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        """For tools that know one label a sample: tokens as samples; a copy, since some leave traces on the model."""
        model = copy.deepcopy(self.model)
        if self.batches[0][1].ndim == 1:
            return model, self.batches
        return nn.Sequential(model, nn.Flatten(0, 1)), [(x, y.flatten()) for x, y in self.batches]

    def to(self, dtype: torch.dtype) -> "Problem":
        """In another precision."""
        batches = [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in self.batches]
        return Problem(self.name, copy.deepcopy(self.model).to(dtype), batches)


Maker = Callable[[], tuple[nn.Module, tuple[int, ...], int, int]]  # model, shape of an input, classes, batch size


def _dense() -> tuple[nn.Module, tuple[int, ...], int, int]:
    """The dense network of curvlinops' own benchmark: 784-1024-512-256-128-64-32-10, batch 512."""
    return ritz.models.mlp(hidden=(1024, 512, 256, 128, 64, 32), seed=0), (784,), 10, 512


def _conv() -> tuple[nn.Module, tuple[int, ...], int, int]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *head), (3, 32, 32), 10, 128


def _gpt(width: int, num_layers: int, num_heads: int, tokens: int, kinds: int, batch: int) -> Maker:
    def make() -> tuple[nn.Module, tuple[int, ...], int, int]:
        model = ritz.models.gpt(kinds, context=tokens, width=width, num_layers=num_layers, num_heads=num_heads, seed=0)
        return model, (tokens,), kinds, batch

    return make


MAKERS: dict[str, Maker] = {
    "mlp": _dense,
    "conv": _conv,
    "transformer": _gpt(64, 2, 4, tokens=64, kinds=65, batch=8),
    "lenet5": lambda: (ritz.models.lenet5(seed=0), (1, 28, 28), 10, 256),
    "vgg16_bn": lambda: (ritz.models.vgg16_bn(100, seed=0), (3, 32, 32), 100, 512),
    "wide_resnet28_10": lambda: (ritz.models.wide_resnet28_10(100, seed=0), (3, 32, 32), 100, 128),
    "gpt2_small": _gpt(768, 12, 12, tokens=1024, kinds=50257, batch=2),
    "tiny": lambda: (ritz.models.mlp(hidden=(8,), in_features=16, seed=0), (16,), 10, 32),
}


def make(name: str, device: str, num_batches: int = 1, batch_size: int | None = None) -> Problem:
    """The problem of that name on that device, with so many batches of noise."""
    model, shape, classes, size = MAKERS[name]()
    size, draw = batch_size or size, torch.Generator().manual_seed(1)
    tokens = len(shape) == 1 and name.startswith(("gpt", "transformer"))
    batches = []
    for _ in range(num_batches):
        x = (
            torch.randint(classes, (size, *shape), generator=draw)
            if tokens
            else torch.randn(size, *shape, generator=draw)
        )
        y = torch.randint(classes, (size, *shape) if tokens else (size,), generator=draw)
        batches.append((x.to(device), y.to(device)))
    return Problem(name, _normalised(model.to(device), batches[0][0]), batches)


@torch.no_grad()
def _normalised(model: nn.Module, x: Tensor) -> nn.Module:
    """In evaluation mode, BatchNorm's statistics those of a batch, as after training."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [module.momentum for module in norms]
    if norms:
        for module in norms:
            module.momentum = None  # the mean over all batches so far
        model.train()(x)
        for module, momentum in zip(norms, momenta, strict=True):
            module.momentum = momentum
    return model.eval()
