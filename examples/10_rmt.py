# %% [markdown]
# # Random matrix theory of a batch's curvature, and where it fails
# A batch has the curvature H + X. If X had independent entries, s2 = Tr X^2 / P would determine which eigenvalues are
# signal, how large they truly are, and how accurate their directions are. First, a matrix for which this holds.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz
from ritz import rmt
from ritz.operators import BatchNoise

spikes = torch.tensor([5.0, 2.0, 0.8], dtype=torch.float64)
drawn = rmt.wigner(500, s2=1.0, spikes=spikes.tolist(), seed=1)
values, vectors = torch.linalg.eigh(drawn)
found = rmt.outliers(values, s2=1.0)
low, high = found.spikes.interval()
print(f"threshold {found.threshold.value:.3f}, {found.count.value:.0f} outliers; the spike of 0.8 leaves none\n")
print(f"{'outlier':>8}{'spike':>8}{'95 % interval':>18}{'truth':>7}{'overlap':>9}{'truth':>7}")
for i, value in enumerate(found.eigenvalues):
    overlap, truth = found.spikes.parts["overlap"].value[i], vectors[i, -1 - i] ** 2
    ends = f"{low[i]:.2f} to {high[i]:.2f}"
    print(f"{value:>8.3f}{found.spikes.value[i]:>8.3f}{ends:>18}{spikes[i]:>7.1f}{overlap:>9.3f}{truth:>7.3f}")

# %% [markdown]
# Second, a trained network that is small enough to compute H and X as dense matrices.

# %%
pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float64), torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.AvgPool1d(4), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X), y).backward()
    optimizer.step()
order = torch.randperm(len(X))
risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X[order], y[order]), batch_size=128)
H = ritz.Hessian(risk)
noise = BatchNoise(H, 0).dense()
fit = rmt.fit(torch.linalg.eigvalsh(noise))
ideal = rmt.fit(torch.linalg.eigvalsh(rmt.wigner(risk.dim, fit.law.s2)))

print(f"\nnoise of one batch of 128, P = {risk.dim}\n{'':<28}{'network':>9}{'random matrix of that size':>28}")
for name in ("distance", "kurtosis", "outside"):
    print(f"{name:<28}{getattr(fit, name).value:>9.3f}{getattr(ideal, name).value:>28.3f}")
median = rmt.fit(torch.linalg.eigvalsh(noise), by="median").law.s2
print(f"{'s2 by median / by moments':<28}{median / fit.law.s2:>9.1e}{1.0:>28.1f}")

# %% [markdown]
# A few directions contain nearly all of the noise, and they are those of the large eigenvalues. The formulas are
# therefore far too optimistic: the space of the outliers is about as accurate as they predict, but its single
# directions are not.

# %%
level = ritz.curvature_noise(risk, num_batches=14, batch_size=128, num_probes=8)
truth, directions = torch.linalg.eigh(H.dense())
batch, noisy = torch.linalg.eigh(H.dense() + noise)
found = rmt.outliers(batch, level)
top = len(found.eigenvalues)
squares = (noisy.T @ directions).square().flip(0, 1)[:top, :top]
shrunk = rmt.shrinkage(level)
print(f"\nbest linear shrinkage: {shrunk.beta}, that is {shrunk.damping} in units of curvature")
print(f"{level}, {rmt.bulk_edge(level)}, {found.count}; beside them the truth, from all data\n")
print(f"{'batch':>7}{'spike':>8}{'H':>8}{'overlap':>10}{'measured':>10}{'with all outliers of H':>24}")
for i in range(0, top, 2):
    print(
        f"{found.eigenvalues[i]:>7.3f}{found.spikes.value[i]:>8.3f}{truth.flip(0)[i]:>8.3f}"
        f"{found.spikes.parts['overlap'].value[i]:>10.4f}{squares[i, i]:>10.4f}{squares[i].sum():>24.4f}"
    )
