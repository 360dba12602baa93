# %% [markdown]
# # Curvature layer by layer
# Any trace also gives the trace of the diagonal block of every parameter, at no extra cost: v_l . (H v)_l sums to v'Hv.
# A block can also be used as a separate matrix, at the cost of the products it needs.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float64), torch.tensor(labels)

torch.manual_seed(0)
model = nn.Sequential(
    nn.AvgPool1d(2), nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 10)
).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(200):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X), y).backward()
    optimizer.step()

# %% [markdown]
# One run over the full matrix: its trace has a part for every parameter.

# %%
H = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (X, y)))
whole = ritz.spectrum(H, num_steps=20, num_probes=16, seed=0)
diagonal = H.dense().diagonal()

print(f"{'parameter':<12}{'trace of its block':>22}{'truth':>10}")
for name, part in whole.trace.parts.items():
    truth = diagonal[H.space.slices[name]].sum()
    print(f"{name:<12}{part.value:>12.3f} ± {part.stderr:<7.3f}{truth:>10.3f}")

# %% [markdown]
# A block selected by a name pattern is an operator like any other. Its largest eigenvalue is at most that of the full
# matrix.

# %%
print(f"\n{'block':<12}{'largest eigenvalue':>20}{'truth':>10}")
for pattern in ("1.*", "3.*", "5.*", "*"):
    block = H.block(pattern)
    top = ritz.top_eigenpairs(block, k=1)
    truth = torch.linalg.eigvalsh(block.dense())[-1]
    print(f"{pattern:<12}{float(top.values[0]):>20.6f}{float(truth):>10.6f}")
