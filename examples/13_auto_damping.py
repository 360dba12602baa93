# %% [markdown]
# # Damping that follows the noise of the curvature
# The damping of a second-order method (KFAC's damping, Adam's eps) decides how far it trusts directions that one batch
# cannot distinguish from noise. `AutoDamping` measures that noise during training and sets the damping; your training
# loop does not change. Here with Adam on scikit-learn's digits; KFAC works the same way.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz
from ritz.optim import AutoDamping, BulkEdge, LedoitWolf, NoiseVariance

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
train, test = order[:1200], order[1200:]
STEPS, EVERY = 240, 40


def trained(eps: float, how: str = "flat", rule: object = None) -> tuple[nn.Module, AutoDamping | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=eps)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X[train], y[train]))
    damping = None if how == "flat" else AutoDamping(optimizer, risk, every=EVERY, rule=rule)
    draws = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        rows = train[torch.randint(len(train), (128,), generator=draws)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
        optimizer.step()
        if damping is not None:
            damping.step((X[rows], y[rows]) if how == "streaming" else None)
    return model, damping


# %% [markdown]
# `damping.step()` draws 8 batches of the training data at every refresh. `damping.step(batch)` uses single products of
# the training batches instead. Both record their estimates with errors.

# %%
runs = {how: trained(1e-3, how) for how in ("fresh batches", "streaming")}
print(f"{'step':>6}" + "".join(f"{how + ': noise':>32}{'eps':>10}" for how in runs))
for entries in zip(*(damping.history for _, damping in runs.values()), strict=True):
    shown = (f"{e['noise']:>22.5f} ± {e['noise_stderr']:<7.5f}{e['damping']:>10.5f}" for e in entries)
    print(f"{entries[0]['step']:>6}" + "".join(shown))

# %% [markdown]
# The controls: Adam with a constant eps, at the initial value and at the mean of the learned values. A learned damping
# that is no better than the second control has found a good constant, but has not learned a schedule.

# %%
history = runs["streaming"][1].history
mean = sum(entry["damping"] for entry in history) / len(history)
runs["flat, start value"], runs["flat, learned mean"] = trained(1e-3), trained(mean)
runs["flat, torch's default"] = trained(1e-8)
print(f"\n{'':<24}{'train loss':>12}{'test loss':>12}{'test error':>12}")
for name, (model, _) in runs.items():
    losses = [ritz.Risk(model, nn.CrossEntropyLoss(), (X[part], y[part])).loss() for part in (train, test)]
    error = float((model(X[test]).argmax(1) != y[test]).float().mean())
    print(f"{name:<24}{losses[0]:>12.4f}{losses[1]:>12.4f}{error:>12.1%}")

# %% [markdown]
# Other rules compute a different damping from the same noise. Equation 15 of seed 004 is a squared curvature: multiply
# the loss by 10, and it grows by 100. The other two grow by 10, as the curvature itself does.

# %%
model = runs["flat, start value"][0]
print(f"\n{'rule':<16}{'damping':>12}{'with the loss times 10':>26}{'factor':>10}{'truth':>8}")
for rule, truth in ((NoiseVariance(start=0.0), 100), (LedoitWolf(start=0.0), 10), (BulkEdge(start=0.0), 10)):
    values = []
    for factor in (1.0, 10.0):
        risk = ritz.Risk(model, lambda out, t, c=factor: c * nn.functional.cross_entropy(out, t), (X[train], y[train]))
        optimizer = torch.optim.Adam(model.parameters())
        AutoDamping(optimizer, risk, every=1, rule=rule, curvature="ggn").step()
        values.append(optimizer.param_groups[0]["eps"])
    print(f"{type(rule).__name__:<16}{values[0]:>12.5f}{values[1]:>26.5f}{values[1] / values[0]:>10.3f}{truth:>8}")
