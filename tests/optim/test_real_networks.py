"""KFAC in the training loops of real small networks on real data: it trains them, quietly, and resumes to the bit.

Images are scikit-learn's digits; text is the description that comes with them, as characters.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from ritz.optim import KFAC

BATCH, STEPS, BREAK = 64, 24, 11  # steps in all, and after how many the run is saved and taken up again
PAD, WORDS, LONGEST = 0, 64, 24


@cache
def images() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 8 - 1).float().reshape(-1, 1, 8, 8), torch.tensor(labels)


@cache
def lines() -> tuple[Tensor, Tensor]:
    """Lines of text as tokens, padded, and the token that comes next; the padding is no target."""
    from sklearn.datasets import load_digits

    text = [line.encode()[: LONGEST + 1] for line in load_digits().DESCR.splitlines() if len(line) > 8]
    rows = torch.full((len(text), LONGEST + 1), PAD)
    for row, line in zip(rows, text, strict=True):
        row[: len(line)] = torch.tensor([1 + (byte - 32) % (WORDS - 1) for byte in line])
    return rows[:, :-1], rows[:, 1:]


def rows_of(data: tuple[Tensor, Tensor], number: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """The batch of a step: the same in every run."""
    chosen = torch.randint(len(data[0]), (size,), generator=torch.Generator().manual_seed(number))
    return data[0][chosen], data[1][chosen]


# ------------------------------------------------------------------------------------------- networks


class Block(nn.Module):
    """As in a residual network: two convolutions, an addition in place, and a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        Block(8, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def separable() -> nn.Module:
    def pair(inputs: int, outputs: int, **depthwise: Any) -> list[nn.Module]:
        deep, wide = nn.Conv2d(inputs, inputs, 3, groups=inputs, **depthwise), nn.Conv2d(inputs, outputs, 1)
        return [deep, wide, nn.GroupNorm(4, outputs), nn.ReLU6(inplace=True)]

    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU6(inplace=True), *pair(8, 12, stride=2, padding=1),
        *pair(12, 16, dilation=2, padding=2), *pair(16, 16, dilation=(1, 2), padding="same"),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Reads the characters before, tells the next: causal attention, padding, one matrix for words in and out."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width, padding_idx=PAD), nn.Embedding(LONGEST, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        ahead = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, key_padding_mask=tokens == PAD, attn_mask=ahead, need_weights=False)[0]
        x = x + self.back(F.gelu(self.up(self.norm2(x))))
        return self.out(self.norm3(x))


class Recurrent(nn.Module):
    """Reads an image row by row; no layer rule explains the cell."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x[:, 0])[0][:, -1])


class Wrapper(nn.Module):
    """What libraries put around a model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = net

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.module(*args, **keywords)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.net, self.reentrant = separable(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[:2](x)
        x = checkpoint(self.net[2:10], x, use_reentrant=self.reentrant)
        return self.net[10:](x)


# ------------------------------------------------------------------------------------------- loops


@dataclass(frozen=True)
class Case:
    """A network, what it is trained on, how, and how far the loss must fall."""

    build: Callable[[], nn.Module]
    falls: float  # the last losses are below this share of the first
    data: Callable[[], tuple[Tensor, Tensor]] = images
    settings: dict[str, Any] = field(default_factory=dict)
    loss: Any = field(default_factory=nn.CrossEntropyLoss)
    shown: bool = False  # outputs and targets are shown to the optimiser
    pieces: int = 1
    clip: float | None = None
    cast: bool = False


class Run:
    """A model, its optimiser and its schedule, in a user's loop."""

    def __init__(self, case: Case) -> None:
        self.case = case
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = case.build().float()
        settings = {"lr": 0.02, "damping": 0.1, "factor_every": 4, "inverse_every": 8, "loss": case.loss}
        self.opt = KFAC(self.model, **{**settings, **case.settings})
        self.schedule = LambdaLR(self.opt, lambda step: min(1.0, (step + 1) / 4) * (1 - 0.5 * step / STEPS))
        self.parts = {"model": self.model, "opt": self.opt, "schedule": self.schedule}

    def step(self, number: int) -> float:
        inputs, targets = rows_of(self.case.data(), number)
        self.opt.zero_grad()
        total, pieces = 0.0, self.case.pieces
        for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.case.cast):
                out = self.model(x)
                out = out.transpose(1, 2) if out.ndim == 3 else out  # classes second, as the loss looks for them
                if self.case.shown:
                    self.opt.observe(out, (x, y))
                loss = self.case.loss(out, y) / pieces
            loss.backward()
            total += loss.item()
        if self.case.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        self.opt.step()
        self.schedule.step()
        return total

    def steps(self, first: int, last: int) -> list[float]:
        return [self.step(number) for number in range(first, last)]

    def weights(self) -> Tensor:
        return torch.cat([x.detach().double().flatten() for x in self.model.state_dict().values()])


TEXT: dict[str, Any] = {"data": lines, "loss": nn.CrossEntropyLoss(ignore_index=PAD), "shown": True}
LOW = {"lr": 0.03, "damping": 0.1}
CASES = {
    "residual": Case(residual, 0.5),
    "residual, accumulated and clipped": Case(residual, 0.6, pieces=2, clip=1.0),
    "residual, type-2": Case(residual, 0.5, settings={"fisher": "type2"}),
    "residual, empirical, accumulated": Case(
        residual, 0.6, pieces=2, settings={"fisher": "empirical", "loss_scale": 1 / 2}
    ),
    "residual, bfloat16": Case(residual, 0.6, cast=True),
    "residual, bfloat16, accumulated, clipped": Case(residual, 0.7, cast=True, pieces=2, clip=1.0),
    "separable": Case(separable, 0.85, settings=LOW),
    "separable, EKFAC, reduce": Case(separable, 0.85, settings={**LOW, "ekfac": True, "sharing": "reduce"}),
    "separable, QR, staggered": Case(separable, 0.85, settings={**LOW, "refresh": "qr", "stagger": True}),
    "transformer": Case(Transformer, 0.6, **TEXT),
    "transformer, empirical, bfloat16": Case(Transformer, 0.6, settings={"fisher": "empirical"}, cast=True, **TEXT),
    "LSTM": Case(lambda: Recurrent(nn.LSTM), 0.7, settings={"damping": 0.01}),
    "GRU, type-2": Case(lambda: Recurrent(nn.GRU), 0.6, settings={"damping": 0.01, "fisher": "type2"}),
    "wrapped": Case(lambda: Wrapper(Wrapper(separable())), 0.85, settings=LOW),
    "checkpointed": Case(Checkpointed, 0.85, settings=LOW),
    "checkpointed, bfloat16": Case(Checkpointed, 0.85, settings=LOW, cast=True),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_resumes_to_the_bit(name, tmp_path, monkeypatch):
    if CASES[name].cast:  # oneDNN's bfloat16 kernels die on virtual machines that claim matrix units they lack
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    whole = Run(CASES[name])
    losses = whole.steps(0, BREAK)
    torch.save({key: part.state_dict() for key, part in whole.parts.items()}, tmp_path / "saved.pt")
    losses += whole.steps(BREAK, STEPS)
    start, end = (sum(part) / len(part) for part in (losses[:2], losses[-4:]))
    assert end < CASES[name].falls * start
    assert all(block.space() is not None for block in whole.opt.blocks.values())

    again = Run(CASES[name])
    again.step(99)  # what it has seen before it is loaded leaves no trace
    for key, state in torch.load(tmp_path / "saved.pt", weights_only=True).items():
        again.parts[key].load_state_dict(state)
    assert again.steps(BREAK, STEPS) == losses[BREAK:]
    assert torch.equal(again.weights(), whole.weights())


# --------------------------------------------------------------------------------- what these networks do to it


def test_parameters_without_a_layer_rule_have_a_diagonal_and_the_rest_their_factors():
    """Recurrent cells, attention's projections, tied words: nothing is refused, nothing is left behind."""
    cell = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    expected = {
        "LSTM": {**{f"cell.{name}": "diagonal" for name in cell}, "head": "layer"},
        "transformer": {
            "words.weight": "diagonal", "places": "table", "up": "layer", "back": "layer",
            **{f"norm{i}.{name}": "diagonal" for i in (1, 2, 3) for name in ("weight", "bias")},
            **{f"attention.in_proj_{name}": "diagonal" for name in ("weight", "bias")},
            **{f"attention.out_proj.{name}": "diagonal" for name in ("weight", "bias")},
        },
    }  # fmt: skip
    for name, kinds in expected.items():
        run = Run(CASES[name])
        before = {key: p.detach().clone() for key, p in run.model.named_parameters()}
        run.steps(0, 2)
        assert {key: block.unit.kind for key, block in run.opt.blocks.items()} == kinds
        assert not any(torch.equal(p, before[key]) for key, p in run.model.named_parameters()), name


def test_a_wrapper_and_checkpointing_change_no_bit_of_the_training():
    plain = Run(CASES["separable"])
    losses = plain.steps(0, 6)
    for name in ("wrapped", "checkpointed"):
        assert Run(CASES[name]).steps(0, 6) == losses, name


def test_the_model_inside_of_a_wrapper_may_be_the_one_that_is_given():
    """The optimiser sees passes of the module it was given, whoever calls that."""
    outside, inside = (Run(CASES["separable"]) for _ in range(2))
    inside.model = Wrapper(inside.model)
    assert inside.steps(0, 6) == outside.steps(0, 6)


def test_checkpointing_of_the_old_kind_is_refused_with_what_to_do():
    run = Run(dataclasses.replace(CASES["checkpointed"], build=lambda: Checkpointed(reentrant=True)))
    with pytest.raises(RuntimeError, match="set use_reentrant=False"):
        run.step(0)


def test_statistics_of_batch_normalisation_are_those_of_training_without_it():
    """Our passes go backward only: one update of the buffers for each pass of the user."""
    run = Run(CASES["residual, accumulated and clipped"])
    run.steps(0, 5)
    tracked = [x for key, x in run.model.state_dict().items() if key.endswith("num_batches_tracked")]
    assert {int(x) for x in tracked} == {10}
