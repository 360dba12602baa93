# %% [markdown]
# # The spectrum of a Hessian
# A small network is trained on scikit-learn's digits, and one Lanczos run computes its spectrum. The network has 397
# parameters, so the full matrix can be formed, too, and every estimate is compared with the truth.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float64), torch.tensor(labels)

torch.manual_seed(0)
model = nn.Sequential(nn.AvgPool1d(2), nn.Linear(32, 9), nn.ReLU(), nn.Linear(9, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for _ in range(150):  # full batch
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X), y).backward()
    optimizer.step()

# %% [markdown]
# A risk is a model, a loss and data. Its Hessian is accessed through products, H @ v, and never formed.

# %%
risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
H = ritz.Hessian(risk)
spectrum = ritz.spectrum(H, num_steps=40, num_probes=8, seed=0)
print(spectrum)
print(f"\nloss {risk.loss():.4f}, {H.dim} parameters, {spectrum.products} products")

# %% [markdown]
# The truth, from as many products as there are parameters. Each interval covers it with probability 95 %.

# %%
eigenvalues = torch.linalg.eigvalsh(H.dense())
shift = 0.01 - 2 * float(eigenvalues[0])
rows = [
    (spectrum.trace, eigenvalues.sum()),
    (spectrum.moment(2), eigenvalues.square().sum()),
    (spectrum.frobenius_norm, eigenvalues.norm()),
    (spectrum.lambda_max, eigenvalues[-1]),
    (spectrum.lambda_min, eigenvalues[0]),
    (spectrum.negative_trace, eigenvalues.clamp(max=0).sum()),
    (spectrum.mass(below=0.01), (eigenvalues <= 0.01).double().mean()),
    (spectrum.logdet(shift), (eigenvalues + shift).log().sum()),
]
print(f"\n{'':<18}{'estimate':>12}{'95 % interval':>28}{'truth':>12}")
for estimate, truth in rows:
    low, high = estimate.interval()
    interval = f"[{float(low):.5g}, {float(high):.5g}]"
    print(f"{estimate.name:<18}{float(estimate.value):>12.5g}{interval:>28}{float(truth):>12.5g}")
