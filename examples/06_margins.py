# %% [markdown]
# # What margins say, and whether flatness says the same
# One forward pass gives the margins of a network: how far the right class is ahead. According to seed 003, margins
# contain the same information as the Hessian trace, at a far lower cost. Here a small LeNet on scikit-learn's digits,
# early and late in training.

# %%
import time

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import ritz
from ritz.measures import aceht, aceht_features, layer_margins, margin_bound, margin_distribution, margin_study
from ritz.measures.outputs import sample_outputs

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(6, 10, 3), nn.ReLU(), nn.Flatten(),
    nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))


def train(epochs: int) -> None:
    for _ in range(epochs):
        for index in torch.randperm(len(X)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[index]), y[index]).backward()
            optimizer.step()


# %% [markdown]
# The trace of every sample is exact here, so probes do not disturb r. Right and wrong predictions are separated, and r
# is given with and without outliers, because it depends on them.

# %%
figure = Figure(figsize=(11, 4), layout="constrained")
axes = figure.subplots(1, 3)
for epochs, ax in ((2, axes[0]), (10, axes[1])):
    train(epochs)
    found = sample_outputs(risk)
    start = time.perf_counter()
    study = margin_study(risk, num_samples=1000, seed=0)
    print(f"error {1 - found.mean(found.correct.double()):.1%}; the study took {time.perf_counter() - start:.1f} s")
    print(study)
    study.plot(ax)

# %%
margins = margin_distribution(found)
quantiles = ", ".join(f"{margins.quantiles[q]:.2f}" for q in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0))
print(f"margins: {quantiles} (smallest, 10 %, quartiles, largest), skewness {margins.skewness:.2f}")
margins.plot(axes[2])
print("median distance to the boundary, in spreads of each layer's input:")
for layer, part in layer_margins(risk).median.parts.items():
    print(f"  {layer:>6} {part.value:.3f}")
figure.savefig("margins.png", dpi=120)

# %% [markdown]
# ACEHT is the trace of an affine network. On the features of the last layer it is exactly that layer's share of the
# true trace; it is compared with the diagonal of the dense matrix. On inputs, the margin bound lies above it.

# %%
G = ritz.GGN(risk)
print(f"\nACEHT on inputs {aceht(found).value:.3f} <= margin bound {margin_bound(found).value:.3f}")
last = G.block("8.*").dense().trace()
print(f"trace {ritz.trace(G).value:.3f}; of the last layer {aceht_features(risk).value:.4f}, truth {float(last):.4f}")
