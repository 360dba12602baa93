"""Small networks with losses and data, and their curvature matrices in full, made another way than ritz makes them.

A `Problem` is what a user has: a model, a torch loss and batches. The dense matrices below call that model and that
loss directly and differentiate by plain autograd, row by row; nothing of ritz takes part.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ritz

Batch = tuple[Tensor, Tensor]


class Calls(list[int]):
    """What a module notes of its calls, those of measurements too: a plain list is put back after these."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, a torch loss and batches; `smooth` where no kink spoils a difference of gradients."""

    model: nn.Module
    loss: Any
    batches: list[Batch]
    mode: str = "eval"
    smooth: bool = True
    likelihood: bool = True  # whether labels can be drawn
    convex: bool = True  # whether the loss is convex in the outputs

    def risk(self, data: Any = None, **keywords: Any) -> ritz.Risk:
        """The same as ritz sees it."""
        keywords = {"mode": self.mode, **keywords}
        return ritz.Risk(self.model, self.loss, self.batches if data is None else data, **keywords)

    @property
    def data(self) -> Batch:
        """All samples as one pair of tensors."""
        return torch.cat([x for x, _ in self.batches]), torch.cat([y for _, y in self.batches])

    @property
    def params(self) -> list[Tensor]:
        """What is not frozen, in order."""
        return [p for p in self.model.parameters() if p.requires_grad]


# ------------------------------------------------------------------------------------------------ networks


class Residual(nn.Module):
    """Convolution, BatchNorm and a skip connection; running statistics as after some training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.stem(x)))
        return self.head(torch.tanh(x + self.norm2(self.conv(x))).mean((2, 3)))


class Attention(nn.Module):
    """LayerNorm and nn.MultiheadAttention over a short sequence, one label per sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.head((x + self.attention(h, h, h, need_weights=False)[0]).mean(1))


class Language(nn.Module):
    """A causal language model with scaled_dot_product_attention whose embedding is its output matrix too."""

    def __init__(self, vocabulary: int = 5, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return self.output(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Unused(nn.Module):
    """One parameter never takes part, another reaches the output linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What `build` gives for a seed; torch's own generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def mlp(sizes: Sequence[int], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [nn.Linear(inner, outer), activation()]
    return nn.Sequential(*layers[:-1])


def charbonnier(out: Tensor, y: Tensor) -> Tensor:
    """A custom loss whose Hessian couples the outputs of a sample: mean of sqrt(1 + |out - y|^2)."""
    return (1 + (out - y).square().sum(-1)).sqrt().mean()


# ------------------------------------------------------------------------------------------------ problems


def split(x: Tensor, y: Tensor, sizes: Sequence[int] = (5, 4, 2)) -> list[Batch]:
    """Ragged batches: the mean over samples is not the mean of their means."""
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def _classes(*shape: int, num: int = 3) -> list[Batch]:
    return split(torch.randn(11, *shape), torch.randint(0, num, (11,)))


def _mlp_relu() -> Problem:
    return Problem(mlp([4, 6, 3], nn.ReLU), nn.CrossEntropyLoss(), _classes(4), smooth=False)


def _mlp_weighted() -> Problem:
    return Problem(mlp([4, 5, 3]), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])), _classes(4))


def _mlp_smoothed() -> Problem:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]), label_smoothing=0.2)
    return Problem(mlp([4, 5, 3], nn.GELU), loss, _classes(4))


def _mlp_soft() -> Problem:
    batches = split(torch.randn(11, 4), torch.randn(11, 3).softmax(-1))
    return Problem(mlp([4, 5, 3]), nn.CrossEntropyLoss(), batches)


def _mlp_mse() -> Problem:
    return Problem(mlp([3, 5, 2]), nn.MSELoss(), split(torch.randn(11, 3), torch.randn(11, 2)))


def _mlp_bce() -> Problem:
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 4.0]))
    return Problem(mlp([3, 5, 2]), loss, split(torch.randn(11, 3), torch.randint(0, 2, (11, 2)).double()))


def _mlp_custom() -> Problem:
    batches = split(torch.randn(11, 3), torch.randn(11, 2))
    return Problem(mlp([3, 5, 2], nn.SiLU), charbonnier, batches, likelihood=False)


def _conv() -> Problem:
    layers = (nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    return Problem(nn.Sequential(*layers), nn.CrossEntropyLoss(), _classes(1, 6, 6), smooth=False)


def _pixels() -> Problem:
    """A class for every pixel, some ignored, classes weighted, GroupNorm on the way."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 1))
    y = torch.randint(0, 3, (6, 3, 2))
    y[torch.rand(y.shape) < 0.3] = -1
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]), ignore_index=-1)
    return Problem(model, loss, split(torch.randn(6, 1, 3, 2), y, (3, 2, 1)))


def _residual(mode: str = "eval") -> Problem:
    model = Residual()
    for norm in (model.norm, model.norm2):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.3, 2.0)
        nn.init.normal_(norm.weight, 1.0, 0.3)
        nn.init.normal_(norm.bias, 0.0, 0.3)
    return Problem(model, nn.CrossEntropyLoss(), _classes(1, 5, 5), mode=mode)


def _attention() -> Problem:
    return Problem(Attention(), nn.CrossEntropyLoss(label_smoothing=0.1), _classes(3, 4))


def _language() -> Problem:
    """Tied weights; padding differs from batch to batch, so that the weight of a batch is not its size."""
    tokens = torch.randint(0, 5, (6, 5))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    for row, length in enumerate((4, 1, 3, 2, 4, 1)):
        targets[row, length:] = -100
    return Problem(Language(), nn.CrossEntropyLoss(), split(inputs, targets, (3, 2, 1)))


def _frozen() -> Problem:
    model = mlp([4, 5, 5, 3])
    model[0].requires_grad_(False)
    return Problem(model, nn.CrossEntropyLoss(), _classes(4))


def _unused() -> Problem:
    return Problem(Unused(), nn.CrossEntropyLoss(), _classes(4))


_MAKERS: dict[str, Callable[[], Problem]] = {
    "mlp_relu": _mlp_relu,
    "mlp_weighted": _mlp_weighted,
    "mlp_smoothed": _mlp_smoothed,
    "mlp_soft": _mlp_soft,
    "mlp_mse": _mlp_mse,
    "mlp_bce": _mlp_bce,
    "mlp_custom": _mlp_custom,
    "conv": _conv,
    "pixels": _pixels,
    "residual": _residual,
    "residual_train": functools.partial(_residual, "train"),
    "attention": _attention,
    "language": _language,
    "frozen": _frozen,
    "unused": _unused,
}
NAMES = tuple(_MAKERS)


def make(name: str, seed: int = 0) -> Problem:
    """A fresh problem of that name; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MAKERS[name]()


@functools.cache
def problem(name: str) -> Problem:
    """The problem of that name, made once: for tests that do not change it."""
    return make(name)


# ------------------------------------------------------------------------------------------ dense matrices


def outputs_and_target(problem: Problem) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs of all batches with classes last where there are classes, the targets, and the parameters behind them."""
    model = copy.deepcopy(problem.model).train(problem.mode == "train")  # a copy: buffers move in train mode
    with sdpa_kernel(SDPBackend.MATH):  # fused kernels cannot be differentiated twice
        out = torch.cat([model(x) for x, _ in problem.batches])
    params = [p for p in model.parameters() if p.requires_grad]
    y = problem.data[1]
    if isinstance(problem.loss, nn.CrossEntropyLoss) and not y.is_floating_point():
        classes = 1 if out.shape[2:] == y.shape[1:] else out.ndim - 1
        out, y = out.movedim(classes, -1).flatten(0, -2), y.flatten()
    return out, y, params


def rows_of(values: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """The Jacobian of flat `values` in `inputs`, one backward pass for each row."""
    return torch.stack(
        [
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(
                        value, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
                    )
                ]
            )
            for value in values.flatten()
        ]
    )


def hessian_of(value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """The Hessian of a number, by two backward passes for each row."""
    gradient = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True, materialize_grads=True)
    rows = []
    for g, p in zip(gradient, inputs, strict=True):
        if g.requires_grad:
            rows.append(rows_of(g, inputs))
        else:  # unused, or linear in everything
            rows.append(torch.zeros(p.numel(), sum(q.numel() for q in inputs), dtype=p.dtype))
    return torch.cat(rows)


def dense_hessian(problem: Problem) -> Tensor:
    """d^2 L / dw^2 of torch's own mean loss over all samples at once."""
    out, y, params = outputs_and_target(problem)
    return hessian_of(problem.loss(out, y), params)


def dense_gradient(problem: Problem) -> Tensor:
    """dL / dw."""
    out, y, params = outputs_and_target(problem)
    return rows_of(problem.loss(out, y), params)[0]


def dense_ggn(problem: Problem) -> Tensor:
    """J' M J with the whole Jacobian J and the Hessian M of torch's mean loss in all outputs."""
    out, y, params = outputs_and_target(problem)
    jacobian = rows_of(out, params)
    held = out.detach().requires_grad_()
    middle = hessian_of(problem.loss(held, y), [held])
    return jacobian.T @ middle @ jacobian


def items(problem: Problem) -> tuple[Tensor, Tensor]:
    """Gradients g_i of every item's own loss (n, dim) and the weights w_i; the loss is sum w_i l_i / sum w_i."""
    out, y, params = outputs_and_target(problem)
    loss = problem.loss
    if not isinstance(loss, nn.CrossEntropyLoss):
        each = torch.stack([loss(out[i : i + 1], y[i : i + 1]) for i in range(len(out))])
        return rows_of(each, params), torch.ones(len(out))
    each = nn.CrossEntropyLoss(loss.weight, None, loss.ignore_index, None, "none", loss.label_smoothing)(out, y)
    weight = torch.ones(len(out))
    if not y.is_floating_point():
        table = torch.ones(out.shape[-1]) if loss.weight is None else loss.weight
        weight = torch.where(y == loss.ignore_index, 0.0, table[y.clamp(min=0)])
    seen = weight > 0
    return rows_of(each[seen], params) / weight[seen, None], weight[seen]


def dense_empirical_fisher(problem: Problem) -> Tensor:
    """sum_i w_i g_i g_i' / sum_i w_i."""
    g, w = items(problem)
    return g.T @ (w[:, None] * g) / w.sum()


def dense_gradient_covariance(problem: Problem) -> Tensor:
    """sum_i w_i (g_i - g)(g_i - g)' / sum_i w_i with g the gradient of torch's mean loss."""
    g, w = items(problem)
    centred = g - dense_gradient(problem)
    return centred.T @ (w[:, None] * centred) / w.sum()


DENSE: dict[str, Callable[[Problem], Tensor]] = {
    "Hessian": dense_hessian,
    "GGN": dense_ggn,
    "EmpiricalFisher": dense_empirical_fisher,
    "GradientCovariance": dense_gradient_covariance,
}


@functools.cache
def truth(name: str, matrix: str) -> Tensor:
    """A dense matrix of a named problem, made once."""
    return DENSE[matrix](problem(name))


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, Frobenius."""
    return float((a - b).norm() / b.norm())


# ------------------------------------------------------------------------------ matrices of no network


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A dense matrix with these eigenvalues and random eigenvectors."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=g)).Q
    return (q * eigenvalues) @ q.T


def spiked(dim: int = 200, num_spikes: int = 3, size: float = 100.0) -> Tensor:
    """Eigenvalues with strong outliers above a bulk in (0, 1)."""
    values = torch.linspace(0.01, 1.0, dim)
    values[-num_spikes:] = size * torch.arange(num_spikes, 0, -1)
    return values


def partitions(total: int) -> Iterator[tuple[int, ...]]:
    """Some ways to cut `total` samples into batches, all at once and one by one among them."""
    yield (total,)
    yield (1,) * total
    yield (total - 1, 1)
    yield (1, total // 2, total - 1 - total // 2)
    third = math.ceil(total / 3)
    yield tuple(min(third, total - start) for start in range(0, total, third))
