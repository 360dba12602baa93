# %% [markdown]
# # Which measures predict the gap?
# One pair of solutions shows nothing: of two numbers, one is always larger. Here 24 networks are trained on
# scikit-learn's digits, with two widths, three weight decays, two step sizes and two seeds each. Every network is
# measured, and each measure is tested: does it order the networks as their gaps do?

# %%
import itertools

import torch
from scipy.stats import kendalltau
from sklearn.datasets import load_digits
from torch import nn

import ritz

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
train, test = order[:300], order[300:]  # few enough to have a gap


def trained(width: int, weight_decay: float, lr: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[train]), y[train]).backward()
        optimizer.step()
    return model


# %% [markdown]
# Each run is a row with its hyper-parameters and its measures.

# %%
KEYS = ["gap_loss", "train_loss", "weight_norm", "trace", "scaled_sharpness", "margin_median", "aceht"]
rows = []
for width, weight_decay, lr, seed in itertools.product([8, 24], [0.0, 1e-3, 1e-2], [0.05, 0.2], range(2)):
    model = trained(width, weight_decay, lr, seed)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X[train], y[train]))
    measured = ritz.measure(risk, test=(X[test], y[test]), measures=KEYS, num_steps=20, num_probes=4)
    rows.append({"width": width, "weight_decay": weight_decay, "lr": lr, "seed": seed, **measured})

# %% [markdown]
# tau is over all runs. Psi compares only runs that differ in one hyper-parameter, so that a measure cannot score well
# merely by following the strongest hyper-parameter. The p-value is corrected for the number of measures.

# %%
found = ritz.study(rows, target="gap_loss", axes=["width", "weight_decay", "lr"], environments="values")
print(found)

# %% [markdown]
# Where the order fails, and along which hyper-parameter:

# %%
print()
for name, row in found.items():
    along = ", ".join(f"{axis} {psi:+.2f}" for axis, psi in row.granulated.axes.items())
    print(f"{name:<18}{along};  worst move {row.sign_error.where}, wrong in {row.sign_error.worst:.0%}")

# %% [markdown]
# Repeats of one setting are not independent runs, so the careful answer uses their mean. And three runs decide nothing,
# however well they are ordered:

# %%
careful = ritz.study(rows, axes=["width", "weight_decay", "lr"], average=True)
print()
print({name: row.verdict for name, row in careful.items()})
print(ritz.study(rows[::8], measures=KEYS[1:]).notes[0])
found.plot()[0].figure.savefig("study.png", dpi=100)

# %%
values, gaps = ([float(row[key]) for row in rows] for key in ("trace", "gap_loss"))
print(f"tau of the trace {found['trace'].kendall.value:+.4f}, truth by SciPy {kendalltau(values, gaps).statistic:+.4f}")
