# %% [markdown]
# # How much the curvature of a mini-batch is noise
# A batch has curvature H_b = H + X. The size of the noise, Tr X^2 / P, falls as one over the batch size. A second-order
# method that trusts one batch fits X as well as H.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz
from ritz.estimators.noise import minibatch_moment

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float64), torch.tensor(labels)

torch.manual_seed(0)
model = nn.Sequential(nn.AvgPool1d(4), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X), y).backward()
    optimizer.step()

risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
H = ritz.Hessian(risk).dense()  # P = 145: small enough to know

# %% [markdown]
# The truth for a batch of B: the variance of a single sample's Hessian, over B. All 1,797 Hessians, by torch.func.


# %%
def sample_loss(flat: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    out = torch.func.functional_call(model, risk.space.split(flat), (x[None],))
    return nn.functional.cross_entropy(out, target[None])


point = risk.space.join(risk.params())
each = torch.func.vmap(torch.func.hessian(sample_loss), in_dims=(None, 0, 0), chunk_size=100)(point, X, y)  # (N, P, P)
single = float((each - H).square().sum((1, 2)).mean()) / risk.dim

print(f"{'batch':>6}{'Tr X^2 / P':>24}{'truth':>14}{'Tr H^2 / P':>22}{'truth':>10}")
for batch_size in (16, 64, 256):
    noise = ritz.curvature_noise(risk, num_batches=min(32, len(X) // batch_size), batch_size=batch_size, num_probes=8)
    square = noise.parts["second moment"]
    print(
        f"{batch_size:>6}{noise.value:>14.5f} ± {noise.stderr:<7.5f}{single / batch_size:>14.5f}"
        f"{square.value:>12.5f} ± {square.stderr:<7.5f}{float(H.square().sum()) / risk.dim:>10.5f}"
    )

# %% [markdown]
# The square of a batch's curvature is therefore too large, because it contains the noise. The product of two
# independent batches does not.

# %%
moment = minibatch_moment(risk, num_pairs=100, batch_size=8)
print(f"\nTr H^2 from batches of 8: {moment}")
print(f"from one batch at a time: {moment.parts['naive']}  (biased upwards)")
print(f"truth:                    {float(H.square().sum()):.3f}")
