# %% [markdown]
# # Averaged iterates, and the trace as a penalty
# Two tools for any training loop: the mean of late iterates, and a term eta Tr G in the loss. Data: scikit-learn's
# digits.

# %%
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import ritz
from ritz import optim

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
train, test = order[:600], order[600:]
EPOCHS, BATCH = 40, 50


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, penalty=None) -> None:
    model.train()
    shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(number))]
    for rows in shuffled.split(BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]), y[rows])
        (loss if penalty is None else loss + penalty(model, X[rows])).backward()
        optimizer.step()


def shown(name: str, model: nn.Module) -> None:
    risk = ritz.Risk(model.eval(), nn.CrossEntropyLoss(), (X[train], y[train]))
    loss, error = risk.on((X[test], y[test])).loss(), (model(X[test]).argmax(-1) != y[test]).float().mean()
    print(f"{name:<28} test loss {loss:.3f}  test error {error:6.2%}  Tr G {ritz.trace(ritz.GGN(risk)).value:8.2f}")


# %% [markdown]
# ## Averaging over any optimiser
# The learning rate falls to half (`averaging_decay`). From epoch 20 on, the weights after each epoch are averaged.
# `refresh` recomputes BatchNorm's statistics for the averaged weights. `optim.Gadam` is AdamW with a built-in average.

# %%
model = network()
sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
schedule = LambdaLR(sgd, optim.averaging_decay(20))
average = optim.IterateAverage(model, start=20)
for number in range(EPOCHS):
    epoch(model, sgd, number)
    schedule.step()
    average.step()
average.refresh((X[train], y[train]))
shown("SGD, last iterate", model)
shown(f"SGD, mean of {average.num_averaged} iterates", average.model)

# %% [markdown]
# ## The trace in the loss
# One probe on a quarter of each batch is enough for an unbiased penalty. The trace falls as intended. Whether the test
# loss follows is another question; here it does not.

# %%
for eta in (0.0, 1e-3, 1e-2):
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    penalty = optim.TracePenalty(eta) if eta else None
    for number in range(EPOCHS):
        epoch(model, sgd, number, penalty)
    shown(f"SGD with eta = {eta:g}", model)

# %%
truth = ritz.trace(ritz.GGN(ritz.Risk(model, nn.CrossEntropyLoss(), (X[train], y[train]))))
draws = torch.stack([penalty(model, X[train]).detach() for _ in range(400)]) / eta
print(f"penalty / eta, mean of 400 draws: {draws.mean():.3f} ± {draws.std() / 20:.3f}; truth {truth.value:.3f}")
