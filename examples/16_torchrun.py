# %% [markdown]
# # Many devices
# The same program with one process, `python 16_torchrun.py`, and with several,
#
#     torchrun --nproc-per-node 2 16_torchrun.py
#
# One line makes the ranks work together; the rest of the program does not change. Each rank processes its share of the
# data, and every rank gets the numbers for all the data.

# %%
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import ritz

if "RANK" in os.environ:  # torchrun says so
    dist.init_process_group()

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float64), torch.tensor(labels)

torch.manual_seed(0)  # the same weights on every rank; a model in DistributedDataParallel has them by itself
model = nn.Sequential(nn.AvgPool1d(4), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10)).double()
risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))  # all of the data on every rank: the work is shared out
H = ritz.Hessian(risk)


def say(text: str) -> None:
    """Once, not by every rank."""
    if risk.world.rank == 0:
        print(text)


say(f"{risk.world}: {risk.num_samples} samples, {risk.dim} parameters")

# %% [markdown]
# All ranks make every call below, because each does a part of the work. A rank that calls alone would wait for the
# others, and raise an error after RITZ_PATIENCE seconds.

# %%
s = ritz.spectrum(H, num_steps=40, num_probes=8, seed=0)
top = ritz.top_eigenpairs(H, k=3)
say(f"largest eigenvalues: {', '.join(f'{value:.4f}' for value in top.values.tolist())}")

# %% [markdown]
# If each rank has read its own part of the data, pass `share=True`. The parts may have any size.

# %%
part = slice(risk.world.rank, None, risk.world.size)
shared = ritz.Risk(model, nn.CrossEntropyLoss(), (X[part], y[part]), share=True)
say(f"loss: {risk.loss():.12f} by sharing out, {shared.loss():.12f} from parts")

# %% [markdown]
# Work that only one rank does uses a separate risk.

# %%
alone = risk.alone()
truth = float(torch.trace(ritz.Hessian(alone).dense()))  # P = 226: small enough to know
say(f"\ntrace: {s.trace}\ntruth: {truth:.4f}, by one rank with all the data")

if dist.is_initialized():
    dist.destroy_process_group()
