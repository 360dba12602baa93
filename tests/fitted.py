"""Networks that fit their data so well that products in float32 are those of another matrix; and one that does not."""

import copy
from functools import cache

import torch
from torch import Tensor, nn

import ritz

f32, f64 = torch.float32, torch.float64


@cache
def trained(seed: int, width: int) -> tuple[nn.Module, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    X = torch.randn(240, 8, generator=draw)
    y = X[:, :3].argmax(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(250):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.to(f32), X.to(f32), y


def fitted(seed: int, scale: float, width: int = 12) -> ritz.Risk:
    """A network trained until it fits, its last layer then multiplied: the loss falls to 1e-7 and below."""
    model, *data = trained(seed, width)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model[2].parameters():
            p.mul_(scale)
    # one route for both precisions: in float64, too, forward and reverse differ where there is so little curvature
    return ritz.Risk(model, nn.CrossEntropyLoss(), tuple(data), batch_size=80, plan=ritz.Plan(route="reverse"))


def dense(operator: type[ritz.Operator], risk: ritz.Risk) -> Tensor:
    """All eigenvalues in float64."""
    matrix = operator(risk.to(dtype=f64)).dense()
    return torch.linalg.eigvalsh((matrix + matrix.T) / 2)


def healthy(dtype: torch.dtype = f32) -> ritz.Risk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)
    return ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randn(60, 8).to(dtype), torch.arange(60) % 3), batch_size=20)
