# %% [markdown]
# # Any batch, any loss
# Three ways to define a risk, from the most structure to the least. All three have a Hessian. The first two also have a
# Gauss-Newton matrix, because they specify the outputs.

# %%
import torch
from torch import Tensor, nn

import ritz

torch.manual_seed(0)
x = torch.linspace(0, 3, 90, dtype=torch.float64)[:, None]
batches = [{"inputs": part, "labels": part.sin()} for part in x.split(40)]  # dictionaries, the last one shorter
model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(500):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.sin()).backward()
    optimizer.step()


def dense_hessian(loss: Tensor) -> Tensor:
    """The truth: reverse mode twice, row by row."""
    params = list(model.parameters())
    first = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
    gradient = torch.cat([g.flatten() for g in first])
    rows = [torch.autograd.grad(g, params, retain_graph=True, materialize_grads=True) for g in gradient]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def report(name: str, operator: ritz.Operator, truth: Tensor) -> None:
    dense = operator.dense()
    apart = float((dense - truth).norm() / truth.norm())
    print(
        f"{name:<32} trace {float(dense.trace()):9.5f}, truth {float(truth.trace()):9.5f}, matrices apart {apart:.0e}"
    )


# %% [markdown]
# 1. A `forward` for batches that are not (inputs, target), with a loss that ritz knows.


# %%
def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["inputs"])


squared = ritz.Risk(model, nn.MSELoss(), batches, forward=forward)
report("Hessian, squared error", ritz.Hessian(squared), dense_hessian((model(x) - x.sin()).square().mean()))

# %% [markdown]
# 2. A loss of your own, `callable(output, target)`, which returns the mean over the batch. Autograd computes its second
# derivative in the outputs, so there is a Gauss-Newton matrix, too.

# %%
huber = ritz.Risk(model, lambda out, target: (1 + (out - target) ** 2).sqrt().mean(), batches, forward=forward)
report("Hessian, pseudo-Huber", ritz.Hessian(huber), dense_hessian((1 + (model(x) - x.sin()) ** 2).sqrt().mean()))
print(f"{'GGN, pseudo-Huber':<32} trace {float(ritz.GGN(huber).dense().trace()):9.5f} (positive semi-definite)")


# %% [markdown]
# 3. `batch_loss` returns (sum over items, weight), for a loss that is not a function of the outputs: here how far the
# network is from solving u' = cos. It has a Hessian but no Gauss-Newton matrix, and ritz says so.


# %%
def residual(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    t = batch["inputs"].detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model(t).sum(), t, create_graph=True)
    return (slope - t.cos()).square().sum(), len(t)


physics = ritz.Risk(model, data=batches, batch_loss=residual)
total, weight = residual(model, {"inputs": x})
report("Hessian, residual of u' = cos", ritz.Hessian(physics), dense_hessian(total / weight))
