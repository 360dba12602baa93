# %% [markdown]
# # The Hessian trace of every sample
# For a network that is affine in each single weight (ReLU, pooling, convolutions), the trace of a sample's Hessian
# equals that of its Gauss-Newton matrix. It is exact, from one backward pass per class and without probes. Here a small
# LeNet on scikit-learn's digits: the traces of all 1,797 samples.

# %%
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz

pixels, labels = load_digits(return_X_y=True)
X, y = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(6, 10, 3), nn.ReLU(), nn.Flatten(),
    nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(8):
    for index in torch.randperm(len(X)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[index]), y[index]).backward()
        optimizer.step()

# %%
risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
start = time.perf_counter()
traces = ritz.sample_traces(risk)  # in the order of the data
print(f"{len(traces.value)} traces in {time.perf_counter() - start:.1f} s, exact: {traces.exact}")

hardest = traces.value.topk(5)
for value, place in zip(hardest.values.tolist(), hardest.indices.tolist(), strict=True):
    guess = int(model(X[place : place + 1]).argmax())
    print(f"digit {place:>4}: trace {value:8.1f}, a {int(y[place])} taken for a {guess}")

# %% [markdown]
# Two comparisons with the truth. The mean of the traces is the trace of the full Hessian, here estimated from probes
# with an interval. The trace of one sample is the sum of the diagonal of its Hessian, computed by reverse over reverse
# mode.

# %%
whole = ritz.trace(ritz.Hessian(risk), method="hutch++", num_probes=60, seed=0)
low, high = whole.interval()
mean = float(traces.value.mean())
print(f"\nmean of the traces {mean:.2f}; Tr H by probes {whole.value:.2f}, in [{low:.2f}, {high:.2f}]")

place = int(hardest.indices[0])
params = list(model.parameters())
loss = nn.functional.cross_entropy(model(X[place : place + 1]), y[place : place + 1])
truth = 0.0
for p, g in zip(params, torch.autograd.grad(loss, params, create_graph=True), strict=True):
    for number, entry in enumerate(g.flatten()):
        (row,) = torch.autograd.grad(entry, p, retain_graph=True, materialize_grads=True)
        truth += float(row.flatten()[number])
print(f"digit {place}: {float(traces.value[place]):.4f}, by its diagonal {truth:.4f}")
