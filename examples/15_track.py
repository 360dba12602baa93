# %% [markdown]
# # Curvature during training, within a bounded share of the training time
# `ritz.track` measures the Hessian (a "look") every so many steps of any training loop, and skips a look that would
# exceed its share of the time. The loop, the model, the gradients and the generators do not change. Data:
# scikit-learn's digits. The question: how does the learning rate affect the sharpness of the solution?

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
LOOK = (X[:512], y[:512])  # what is looked at: a fixed part of the data


def trained(lr: float, steps: int, budget: float):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), LOOK)
    with ritz.track(risk, every=100, budget=budget) as tracker:
        tracker.look()  # before the first step, whatever it costs
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[:512]), y[:512]).backward()  # full batch: no noise of batches
            optimizer.step()
            tracker.step()
    return model, tracker


# %% [markdown]
# All looks, whatever they cost. Steps along the sharpest direction shrink while lambda_max is below 2 / lr. lambda_max
# rises and then falls with the loss, because confident answers have little curvature, p (1 - p). The larger learning
# rate reaches flatter regions because it has made more progress. Compare sharpness at equal loss, not at equal steps.

# %%
runs = {lr: trained(lr, 400, budget=1.0) for lr in (1.0, 0.1)}
for lr, (_, tracker) in runs.items():
    print(f"learning rate {lr}, 2 / lr = {2 / lr:.0f}\n{tracker.table()}\n")

# %% [markdown]
# With the default budget, 5 % of the time, most looks at such a small network are skipped; the table says so. Pass a
# logger as `logger=`: a run of Weights & Biases, `ritz.integrations.loggers.TensorBoard(folder)`, or any function.

# %%
_, thrifty = trained(0.1, 400, budget=0.05)
print(thrifty.table())

# %% [markdown]
# A stopped run resumes from its state: plain numbers, saved with the rest of a checkpoint.

# %%
risk = ritz.Risk(runs[0.1][0], nn.CrossEntropyLoss(), LOOK)
again = ritz.track(risk, every=100)
again.load_state_dict(thrifty.state_dict())
print(f"\ngoes on after step {again.count}, {len(again.record.rows)} rows")

# %% [markdown]
# The last look compared with the dense matrix of the current network, the truth.

# %%
last = runs[0.1][1].last
eigenvalues = torch.linalg.eigvalsh(ritz.Hessian(risk).dense().double())
print(f"\n{'':<12}{'tracked':>20}{'dense matrix':>16}")
print(f"{'lambda_max':<12}{float(last['lambda_max']):>20.4f}{float(eigenvalues[-1]):>16.4f}")
print(f"{'trace':<12}{last['trace'].shown():>20}{float(eigenvalues.sum()):>16.4f}")
