# %% [markdown]
# # A training log of what the optimiser does
# `TrainingLog` writes plain numbers to any logger: the learning rate along the flattest and the sharpest direction, the
# share of the step that lies in the noise, how much of the stable learning rate is in use. Data: scikit-learn's digits.

# %%
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz
from ritz import optim
from ritz.loggers import JSONLines, Memory, read

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
STEPS, EVERY = 200, 40
file = Path(tempfile.mkdtemp(), "kfac.jsonl")


def trained(make, *loggers, damped: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, ritz.Risk]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer, risk = make(model), ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
    damping = optim.AutoDamping(optimizer, risk, every=EVERY) if damped else None
    log = optim.TrainingLog(optimizer, loggers, risk=risk, damping=damping, every=EVERY, curvature_every=2 * EVERY)
    draws = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        rows = torch.randint(len(X), (128,), generator=draws)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
        loss.backward()
        optimizer.step()
        if damping is not None:
            damping.step()
        log.step(loss)
    return model, optimizer, risk


# %% [markdown]
# Any logger works: the run of `wandb.init(...)`, a function of (scalars, step), or a list of loggers. Here rows go to
# memory and to a file of JSON lines, which stays readable after a kill.

# %%
memory = Memory()
model, optimizer, risk = trained(lambda m: optim.KFAC(m, lr=0.05, damping=0.03), memory, JSONLines(file), damped=True)
print(memory.table("loss", "damping", "seen/noise", "seen/noise/stderr", "rate_ratio", "rate/max", "bulk_share"))
print(f"\n{len(read(file).rows)} rows in {file.name}, equal to those in memory: {read(file).rows == memory.rows}\n")

# %% [markdown]
# Steps grow along the sharpest direction if `stable_rate/used` is above 1; it includes the preconditioner and the
# momentum of each optimiser. Quantities that are not defined for an optimiser are left out.

# %%
print(f"{'':<8}{'step':>6}{'loss':>10}{'largest eigenvalue':>20}{'stable rate':>14}{'in use':>10}{'products':>10}")
logs = {"KFAC": memory, "SGD": Memory(), "Adam": Memory()}
trained(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), logs["SGD"])
trained(lambda m: torch.optim.Adam(m.parameters(), lr=5e-3), logs["Adam"])
for name, log in logs.items():
    for row in (row for row in log.rows if "stable_rate" in row):
        step, loss, sharpest = row["step"], row["loss"], row["curvature/largest"]
        rate, used, spent = (row[f"stable_rate{end}"] for end in ("", "/used", "/products"))
        spent += row["curvature/products"]
        print(f"{name:<8}{step:>6}{loss:>10.4f}{sharpest:>20.3f}{rate:>14.4f}{used:>10.3f}{spent:>10.0f}")

# %% [markdown]
# The same number for KFAC from the dense matrix: B^-1/2 H B^-1/2 from products with each unit vector.

# %%
root = torch.stack([risk.space.join(optimizer.precondition(risk.space.split(e), -0.5)) for e in torch.eye(risk.dim)])
sharpest = torch.linalg.eigvalsh(root @ ritz.Hessian(risk).dense() @ root).max()
now = Memory()
optim.TrainingLog(optimizer, now, risk=risk, curvature_every=1, tol=1e-4).step()
print(f"\nstable rate of KFAC: {now.rows[0]['stable_rate']:.5f} logged, {2 * 1.9 / sharpest:.5f} from the dense matrix")
