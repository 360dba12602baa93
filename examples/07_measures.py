# %% [markdown]
# # All measures of a network, and which of them to believe
#
# Two solutions of one problem, one trained with weight decay and one without. What do sharpness, margin and PAC-Bayes
# measures say about them, and can they tell which generalises better? Then the same network at other weights that
# compute the same function: which measures change although the function does not?

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16).float(), torch.tensor(labels)
train, test = (X[:900], y[:900]), (X[900:], y[900:])


def trained(weight_decay: float) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A network after 150 full-batch steps, and where it began."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    start = {name: p.clone() for name, p in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=weight_decay)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train[0]), train[1]).backward()
        optimizer.step()
    return model, start


(plain, start), (decayed, _) = trained(0.0), trained(1e-3)
risks = {name: ritz.Risk(m, nn.CrossEntropyLoss(), train) for name, m in (("plain", plain), ("decayed", decayed))}

# %% [markdown]
# The standard set needs one Krylov run and one forward pass. Each row has its error bar and its convention.

# %%
m = ritz.measure(risks["plain"], test=test, init=start, num_steps=40)
print(m.table())
print(m["trace"].value, m["trace"].interval(), m["gap_loss"].interval())
m.to_html("measures.html")

# %% [markdown]
# Both solutions, with the same probes and the same test digits. There is a verdict only where the error bars allow one.

# %%
comparison = ritz.compare(risks, test=test, num_steps=40)
print(comparison.table())
print(comparison.change("gap_loss", "plain", "decayed"))

# %% [markdown]
# Flatness is a false friend: the same function, or the same predictions, at other weights.

# %%
audit = ritz.audit(risks["plain"], test=test, num_steps=40)
print(audit.table())
print("\n".join(audit.findings()))
audit.plot().figure.savefig("audit.png")

# %% [markdown]
# A measure that does not change: sharpness in units of each weight, with normalised logits.

# %%
robust = ["train_error", "worst_case_adaptive", "normalised_sharpness", "layer_margin", "path_norm"]
print(ritz.audit(risks["plain"], measures=robust).table())

# %% [markdown]
# The trace of the first table compared with the truth: for a ReLU network it has a closed form, without probes.

# %%
low, high = m["trace"].interval()
exact = ritz.sample_traces(risks["plain"]).value.mean()
print(f"\ntrace by probes {m['trace'].shown()}, in [{low:.3f}, {high:.3f}]; truth {exact:.3f}")
