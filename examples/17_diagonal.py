# %% [markdown]
# # The diagonal of the Hessian, exactly
# The outputs of a ReLU network have no second derivative in any single weight. Its Hessian therefore has the diagonal
# of its Gauss-Newton matrix, which is a sum of squares from one backward pass per class, without probes. Probes need
# many products for the same accuracy, because the whole row contributes noise to each entry.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float64), torch.tensor(labels)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(150):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X), y).backward()
    optimizer.step()

# %%
risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
H = ritz.Hessian(risk)
exact = ritz.diagonal(H)
print(f"{H.dim} entries from {exact.products} backward passes, exact: {exact.exact}")

# %% [markdown]
# An application is pruning: to second order, removing weight j raises the loss by H_jj w_j^2 / 2 (LeCun, Denker and
# Solla 1990). The table shows the loss after removing weights in that order and by magnitude.

# %%
weights = risk.space.join(risk.params())
saliency = exact.value * weights.square() / 2
print(f"\n{'removed':>9} {'by saliency':>12} {'by size':>9}")
for share in (0.1, 0.2, 0.3, 0.4):
    num = int(share * H.dim)
    losses = []
    for order in (saliency, weights.abs()):
        kept = weights.clone()
        kept[order.argsort()[:num]] = 0
        losses.append(risk.at(kept).loss())
    print(f"{share:>9.0%} {losses[0]:>12.4f} {losses[1]:>9.4f}")

# %% [markdown]
# The truth, from one product per entry, compared with the exact diagonal and with those from 30 probes, with intervals.

# %%
truth = H.dense().diagonal()
print(f"\nexact: relative error {float((exact.value - truth).norm() / truth.norm()):.1e}")
for method in ("hutchinson", "hutch++"):
    found = ritz.diagonal(H, num_probes=30, method=method)
    low, high = found.interval()
    error = float((found.value - truth).norm() / truth.norm())
    inside = float(((low <= truth) & (truth <= high)).double().mean())
    print(f"{method:>10}, 30 products: relative error {error:.2f}, {100 * inside:.0f} % of entries in their intervals")
