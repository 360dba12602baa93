# %% [markdown]
# # Training by curvature: KFAC in a loop that stays as it is
# KFAC divides the gradient by the curvature of the mean loss, layer by layer, plus a damping in the same units. An
# autoencoder of small digits is a problem on which that pays: its curvature spans many orders of magnitude.

# %%
import copy
import itertools

import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz

X = torch.tensor(load_digits().data / 16).float()
sizes = (64, 48, 24, 6, 24, 48, 64)

torch.manual_seed(0)
layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(sizes)]
start = nn.Sequential(*[module for pair in layers for module in pair][:-1])


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 200) -> str:
    """An ordinary training loop; the loss on all digits after every quarter of it."""
    draws, losses = torch.Generator().manual_seed(1), []
    for step in range(1, steps + 1):
        x = X[torch.randint(len(X), (256,), generator=draws)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        if step % (steps // 4) == 0:
            with torch.no_grad():
                losses.append(float(nn.functional.mse_loss(model(X), X)))
    return "".join(f"{loss:9.5f}" for loss in losses)


# %% [markdown]
# Far above the curvature, damping makes KFAC into SGD with rate lr / damping. Below it, the two part. The curvature of
# this network grows fast at first, so the factors are renewed often.

# %%
for lr in (0.3, 1.0, 3.0):
    model = copy.deepcopy(start)
    print(f"{f'SGD, lr {lr:g}':<30}", fit(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)))
for damping, lr in ((1e4, 1e4), (0.03, 0.1), (0.01, 0.1)):
    model = copy.deepcopy(start)
    optimizer = ritz.optim.KFAC(
        model, lr, damping, loss="mse", momentum=0.5, stat_decay=0.8, factor_every=1, inverse_every=5
    )  # fmt: skip
    print(f"{f'KFAC, damping {damping:g}, lr {lr:g}':<30}", fit(model, optimizer))

# %% [markdown]
# What the last run divides by: the eigenvalues of each layer, and the rates lr / (eigenvalue + damping) that they give.

# %%
for name, values in optimizer.eigenvalues().items():
    slow, fast = (lr / (float(value) + damping) for value in (values[0], values[-1]))
    print(f"layer {name:>2}: largest eigenvalue {float(values[0]):7.3f}, rates from {slow:.4f} to {fast:.4f}")

# %% [markdown]
# How good an approximation is it? The same factors as an operator, beside the Gauss-Newton blocks of two layers.

# %%
inputs = X[:300].double()
risk = ritz.Risk(model.double(), nn.MSELoss(), (inputs, inputs))
print(f"\n{'':<15}{'||C - G|| / ||G||':>20}{'trace of C':>14}{'trace of G':>14}")
for layer in ("4", "6"):
    G = ritz.GGN(risk).block(f"{layer}.*").dense()
    for ekfac in (False, True):
        C = ritz.KFACOperator(risk, ekfac=ekfac).block(f"{layer}.*").dense()
        off, name = float((C - G).norm() / G.norm()), "EKFAC" if ekfac else "KFAC"
        print(f"{f'{name}, layer {layer}':<15}{off:>20.3f}{float(C.trace()):>14.4f}{float(G.trace()):>14.4f}")
