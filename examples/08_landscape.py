# %% [markdown]
# # The loss along lines and planes
# Pictures of the loss around a solution and between two solutions. They show the loss along the plotted directions, and
# nothing about other directions: a minimum in a picture can be a saddle.

# %%
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import ritz
from ritz import landscape

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels[:500] / 16, dtype=torch.float64), torch.tensor(labels[:500])


def trained(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model


first, second, third = trained(0), trained(1), trained(2)
risk = ritz.Risk(first, nn.CrossEntropyLoss(), (X, y), batch_size=500)

# %% [markdown]
# Along a random direction, the curvature is an average over the spectrum, about Tr H / P. Along the extreme
# eigenvectors it is lambda_max and lambda_min. The latter is negative, which no picture along random directions shows.

# %%
H = ritz.Hessian(risk)
top, bottom = landscape.eigenvector_directions(H, 2, which="both")
lines = {
    "random": landscape.line(risk, landscape.random_direction(risk)),
    "filter-normalised": landscape.line(risk, landscape.filter_normalised(risk)),
    "top eigenvector": landscape.line(risk, top),
    "bottom eigenvector": landscape.line(risk, bottom),
}
print(f"{risk.dim} parameters, loss {risk.loss():.4f}, Tr H / P = {float(ritz.trace(H)) / risk.dim:.4f}\n")
print(f"{'direction':<20}{'length':>8}{'d.Hd / d.d':>12}{'loss at -1':>12}{'loss at 1':>12}")
for name, line in lines.items():
    curvature = float(line.curvature) / line.norm**2
    print(f"{name:<20}{line.norm:>8.2f}{curvature:>12.4f}{line.losses[0]:>12.4f}{line.losses[-1]:>12.4f}")

# %% [markdown]
# Between two solutions there is a barrier, though both fit the data.

# %%
between = landscape.interpolate(risk, second.state_dict(), over=0.25)
print(f"\n{between.distance:.1f} apart, {between.barrier}, {between.barrier.parts['error']}")

# %% [markdown]
# The plane through three solutions, and one around the first along filter-normalised directions.

# %%
through = landscape.plane_through(risk, second.state_dict(), third.state_dict())
around = landscape.plane(risk, *(landscape.filter_normalised(risk, seed) for seed in (0, 1)))

figure = Figure(figsize=(11, 8), layout="constrained")
for picture, ax in zip((lines["filter-normalised"], between, around, through), figure.subplots(2, 2).flat, strict=True):
    picture.plot(ax)
figure.savefig("landscape.png", dpi=80)

# %% [markdown]
# The curvature along the two eigenvectors, compared with all eigenvalues of the dense matrix.

# %%
truth = torch.linalg.eigvalsh(H.dense())
for name, value in (("top eigenvector", truth[-1]), ("bottom eigenvector", truth[0])):
    print(f"{name:<20}{float(lines[name].curvature) / lines[name].norm ** 2:>12.6f}, truth {float(value):.6f}")
