"""Networks and data of the right shape, the same for every tool: noise, since products take as long on any values."""

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


@dataclass(frozen=True)
class Kind:
    """A network, and the shape of what it reads."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one sample
    classes: int
    batch: int  # samples
    tokens: bool = False  # whole numbers are read, and each has a label


def _conv() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *head)


class _Logits(nn.Module):
    """A language model of transformers, which returns more than its logits.

    It is told what each token sees: to find that out by itself it looks at numbers on the device at every call, for
    which a GPU waits, and which cannot be traced.
    """

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.ones(1, 1, context, context, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        size = tokens.shape[-1]
        logits: Tensor = self.model(tokens, attention_mask=self.seen[..., :size, :size], use_cache=False).logits
        return logits


def _hugging_face(width: int, num_layers: int, num_heads: int, context: int, kinds: int) -> nn.Module:
    """GPT-2 as transformers has it, without dropout, at its first weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": num_layers, "n_head": num_heads, "n_positions": context, "vocab_size": kinds}
    never = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": kinds - 1, "eos_token_id": kinds - 1}
    return _Logits(GPT2LMHeadModel(GPT2Config(**sizes, **never, **ends)), context)


def _gpt(width: int, num_layers: int, num_heads: int, context: int, kinds: int) -> nn.Module:
    """The same network as `ritz.models` has it."""
    return ritz.models.gpt(kinds, context=context, width=width, num_layers=num_layers, num_heads=num_heads, seed=0)


GPT2 = (768, 12, 12, 1024, 50257)
KINDS = {
    # the dense network of curvlinops' own benchmark
    "mlp": Kind(lambda: ritz.models.mlp(hidden=(1024, 512, 256, 128, 64, 32), seed=0), (784,), 10, 512),
    # that of the papers, whose layers have ten columns
    "narrow": Kind(lambda: ritz.models.mlp(seed=0), (784,), 10, 5000),
    "conv": Kind(_conv, (3, 32, 32), 10, 128),
    "transformer": Kind(lambda: _gpt(64, 2, 4, 64, 65), (64,), 65, 8, tokens=True),
    "lenet5": Kind(lambda: ritz.models.lenet5(seed=0), (1, 28, 28), 10, 256),
    "vgg16_bn": Kind(lambda: ritz.models.vgg16_bn(100, seed=0), (3, 32, 32), 100, 512),
    "wide_resnet28_10": Kind(lambda: ritz.models.wide_resnet28_10(100, seed=0), (3, 32, 32), 100, 128),
    "gpt2_small": Kind(lambda: _hugging_face(*GPT2), (1024,), 50257, 1, tokens=True),
    "gpt2_small_own": Kind(lambda: _gpt(*GPT2), (1024,), 50257, 1, tokens=True),
    # of the same kinds, for seconds
    "tiny": Kind(lambda: ritz.models.mlp(hidden=(8,), in_features=16, seed=0), (16,), 10, 32),
    "tiny_resnet": Kind(lambda: ritz.models.wide_resnet28_10(10, width=0.0125, seed=0), (3, 8, 8), 10, 4),
    "tiny_gpt2": Kind(lambda: _hugging_face(8, 1, 2, 8, 11), (8,), 11, 2, tokens=True),
}  # fmt: skip


def make(name: str, device: str, num_batches: int = 1, batch_size: int | None = None) -> Problem:
    """The problem of that name on that device, with so many batches of noise."""
    kind, draw = KINDS[name], torch.Generator().manual_seed(1)
    size = batch_size or kind.batch
    batches = []
    for _ in range(num_batches):
        if kind.tokens:
            x = torch.randint(kind.classes, (size, *kind.shape), generator=draw)
        else:
            x = torch.randn(size, *kind.shape, generator=draw)
        y = torch.randint(kind.classes, (size, *kind.shape) if kind.tokens else (size,), generator=draw)
        batches.append((x.to(device), y.to(device)))
    return Problem(name, _normalised(kind.build().to(device), batches[0][0]), batches)


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
