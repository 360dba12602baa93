"""What tests of per-sample curvature share: dense truth, taken by differentiating twice, and networks to take it of."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_default_dtype(torch.float64)

CE = nn.CrossEntropyLoss()


def dense_hessian(scalar: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Reverse mode twice, row by row; slow and obvious on purpose."""
    grads = torch.autograd.grad(scalar, inputs, create_graph=True, allow_unused=True, materialize_grads=True)
    flat = torch.cat([g.flatten() for g in grads])
    rows = []
    for entry in flat:
        if not entry.requires_grad:
            rows.append(torch.zeros(len(flat)))
            continue
        row = torch.autograd.grad(entry, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([r.flatten() for r in row]))
    return torch.stack(rows)


def chosen(model: nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def true_traces(model: nn.Module, loss, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Trace of the dense Hessian of torch's own mean loss on each sample by itself."""
    return torch.stack([H.trace() for H in true_hessians(model, loss, X, y)])


def true_hessians(model: nn.Module, loss, X: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        losses = [loss(model.eval()(X[i : i + 1]), y[i : i + 1]) for i in range(len(X))]
        return [dense_hessian(value, chosen(model)).detach() for value in losses]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def labels(*shape: int, classes: int = 3) -> torch.Tensor:
    return torch.randint(0, classes, shape, generator=seeded(2))


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    g = seeded(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g) * 0.5
    for name, b in model.named_buffers():
        if b.is_floating_point():
            b.data = torch.rand(b.shape, generator=g) + (0.5 if "var" in name else 0.0)
    return model.eval()


# ------------------------------------------------------------------------------------------- networks


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut, in-place activations."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv2, self.norm2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        x = F.relu_(x + self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Outside(nn.Module):
    """A scale that belongs to no layer, and a weight used without its module."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return F.linear(F.relu(self.a(x)) * self.scale, self.b.weight)


class Twice(nn.Module):
    """One layer, called for each half of the input: affine in every weight, since the calls are added."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(F.relu(self.a(x[:, :2])) + F.relu(self.a(x[:, 2:])))


class TimeFirst(nn.Module):
    """Time before samples; with as many steps as samples the shapes do not tell."""

    def __init__(self, steps=2):
        super().__init__()
        self.a, self.b, self.steps = nn.Linear(2, 3), nn.Linear(3, 3), steps

    def forward(self, x):
        x = x.reshape(len(x), -1, 2)[:, : self.steps].transpose(0, 1)
        return self.b(F.relu(self.a(x))).sum(0)


class Rows(nn.Module):
    """Tokens of all samples as rows of one matrix."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(F.relu(self.a(x.reshape(-1, 2)))).reshape(len(x), 2, 3).mean(1)


class Stubborn(nn.Module):
    """Looks at values, which cannot be vectorised over samples."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 3), nn.Linear(3, 3), nn.Parameter(torch.ones(()))

    def forward(self, x):
        h = self.a(x)
        assert float(h.detach().abs().max()) < 1e6
        return self.b(F.relu(h)) * self.scale


class Tokens(nn.Module):
    """A small token model, (B, T) -> (B, T, C); piecewise linear."""

    def __init__(self, classes=3):
        super().__init__()
        self.table, self.mix = nn.Embedding(5, 3), nn.Conv1d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, classes)

    def forward(self, x):
        h = self.table(x)
        return self.head(h + F.relu(self.mix(h.mT).mT))


def mlp(*sizes, activation=nn.ReLU):
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


CURVED = {
    "tanh": mlp(4, 5, 3, activation=nn.Tanh),
    "GELU": mlp(4, 5, 3, activation=nn.GELU),
    "LayerNorm": nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)),
    "attention": nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.TransformerEncoderLayer(2, 1, 3, batch_first=True), nn.Flatten(), nn.Linear(4, 3)
    ),
}
