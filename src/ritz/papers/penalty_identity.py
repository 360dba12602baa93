"""Tr H beside Tr G as a penalty (seed 002, section 6): are they one number, with one gradient?

    H = G + sum_c (dl / df_c) D^2 f_c

A network of Linear layers with ReLU between them is affine in every single weight, almost everywhere: D^2 f_c has no
diagonal, so that every diagonal entry of H is that of G, Tr H = Tr G, and their gradients are the same too. What one
random vector says of the two differs all the same: its estimate of Tr G is a square, that of Tr H may be negative.
With a smooth activation, or with BatchNorm by the statistics of the batch, D^2 f_c has a diagonal.

Diagonals are made here without any of the package's own products, in double precision: H by the derivatives of its
gradient along single weights, one after another, and G from the whole Jacobian.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap

from ..batches import isolated_rng
from ..optim.penalty import Form, TracePenalty
from ..space import random_permutation
from .data.images import Data
from .recipe import Recipe, on_parameters
from .train import train

KINDS = ("tanh", "gelu", "batchnorm")
BATCH = 128  # of the draws
CHUNK = 120  # columns of H at a time


def network(kind: str) -> nn.Sequential:
    """784-10-100-10 with another activation, or with ReLU after BatchNorm by the statistics of the batch.

    Example:
        >>> [type(layer).__name__ for layer in network("batchnorm")][:4]
        ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
    """
    layers: list[nn.Module] = []
    for inputs, outputs in ((784, 10), (10, 100)):
        layers.append(nn.Linear(inputs, outputs))
        if kind == "batchnorm":
            layers.append(nn.BatchNorm1d(outputs, track_running_stats=False))
        layers.append({"tanh": nn.Tanh, "gelu": nn.GELU}.get(kind, nn.ReLU)())
    return nn.Sequential(*layers, nn.Linear(100, 10))


def trained(kind: str, data: Data, seed: int, epochs: int) -> nn.Module:
    """Such a network after SGD without penalty, at the rate and momentum of `mnist_mlp`."""
    sgd = partial(on_parameters, kind=torch.optim.SGD, lr=0.01, momentum=0.9)
    recipe = Recipe(name=kind, model=partial(network, kind), optimizer=sgd, epochs=epochs, seed=seed)
    return train(recipe, {"train": data}, evaluate_every=epochs, train_subset=1000).model


def compare(
    model: nn.Module, data: Data, seed: int, *, images: int, columns: int | None = None, draws: int = 200
) -> dict[str, Any]:
    """Both traces and their gradients on a few images, and the spread of one draw of the penalty on a batch.

    Args:
        model: In double precision a copy of it is differentiated.
        data: Images and labels to draw from.
        seed: Of images, columns and signs.
        images: The Hessian is of so many.
        columns: How many diagonal entries, drawn at random, stand for all; None for all.
        draws: Of the penalty in either form, each on the same batch.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
        >>> data = torch.rand(8, 2), torch.arange(8) % 2
        >>> row = compare(model, data, seed=0, images=8, draws=2)
        >>> row["columns"], row["trace_gap"] > 1e-3
        (17, True)
    """
    rows = random_permutation(len(data[0]), ("identity", seed), data[0].device)
    X, y = (part[rows] for part in data)
    few = X[:images].double(), y[:images]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    which = random_permutation(len(weights), ("columns", seed), weights.device)[:columns]
    outputs = partial(_outputs, model)
    (tr_h, grad_h), (tr_g, grad_g) = (
        form(outputs, weights, few, which) for form in (hessian_trace, gauss_newton_trace)
    )
    row: dict[str, Any] = {
        "seed": seed, "images": len(few[1]), "columns": len(which), "parameters": len(weights),
        "trace_hessian": _short(tr_h), "trace_ggn": _short(tr_g), "trace_gap": _short(abs(tr_h - tr_g) / abs(tr_g)),
        "gradient_gap": _short(float((grad_h - grad_g).norm() / grad_g.norm())),
    }  # fmt: skip
    for form in ("ggn", "hessian"):
        row |= _spread(model, (X[:BATCH], y[:BATCH]), form, seed, draws)
    return row


Outputs = Callable[[Tensor, Tensor], Tensor]  # weights as one row, and images


def _outputs(model: nn.Module, weights: Tensor, X: Tensor) -> Tensor:
    named = dict(model.named_parameters())
    parts = weights.split([p.numel() for p in named.values()])
    params = {name: part.view(p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}
    found: Tensor = functional_call(model, params, (X,))
    return found


def hessian_trace(outputs: Outputs, weights: Tensor, data: Data, which: Tensor) -> tuple[float, Tensor]:
    """The sum of diagonal entries of H of the mean cross-entropy, and its gradient in the weights.

    Example:
        >>> linear = lambda w, X: X * torch.stack([w[0], -w[0]])  # l = log(1 + exp(-2 w x)): 4 x^2 s (1 - s)
        >>> data = torch.ones(1, 1).double(), torch.tensor([0])
        >>> round(hessian_trace(linear, torch.zeros(1).double(), data, torch.tensor([0]))[0], 6)
        1.0
    """
    X, y = data

    def loss(w: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs(w, X), y)

    def some(w: Tensor, units: Tensor) -> Tensor:
        def entry(unit: Tensor) -> Tensor:
            along: Tensor = jvp(torch.func.grad(loss), (w,), (unit,))[1]
            return (along * unit).sum()

        total: Tensor = vmap(entry)(units).sum()
        return total

    value, gradient = 0.0, torch.zeros_like(weights)
    for part in which.split(CHUNK):
        units = nn.functional.one_hot(part, len(weights)).to(weights)
        grad, found = torch.func.grad_and_value(some)(weights, units)
        value, gradient = value + float(found), gradient + grad
    return value, gradient


def gauss_newton_trace(outputs: Outputs, weights: Tensor, data: Data, which: Tensor) -> tuple[float, Tensor]:
    """The same of G = J' M J / N, from the Jacobian in full and M = diag(p) - p p' of each image.

    Example:
        >>> linear = lambda w, X: X * torch.stack([w[0], -w[0]])
        >>> data = torch.ones(1, 1).double(), torch.tensor([0])
        >>> round(gauss_newton_trace(linear, torch.zeros(1).double(), data, torch.tensor([0]))[0], 6)
        1.0
    """
    X, y = data

    def trace(w: Tensor) -> Tensor:
        p = outputs(w, X).softmax(1)
        jacobian = jacrev(lambda at: outputs(at, X))(w)[..., which]  # (images, classes, columns)
        mean = torch.einsum("nc,ncp->np", p, jacobian)
        return (torch.einsum("nc,ncp->", p, jacobian.square()) - mean.square().sum()) / len(y)

    grad, value = torch.func.grad_and_value(trace)(weights)
    return float(value), grad


def _spread(model: nn.Module, batch: Data, form: Form, seed: int, draws: int) -> dict[str, float]:
    """The mean of draws of the penalty, their standard deviation over it, and how many are below 0."""
    penalty = TracePenalty(1.0, 1.0, form, seed=seed, force=True)
    with isolated_rng(seed), torch.no_grad():
        values = torch.stack([penalty(model, *batch) for _ in range(draws)]).double()
    spread = float(values.std() / values.mean().abs()) if draws > 1 else math.nan
    return {
        f"{form}_mean": _short(float(values.mean())), f"{form}_spread": _short(spread),
        f"{form}_negative": _short(float((values < 0).double().mean())),
    }  # fmt: skip


def _short(value: float) -> float:
    """Six digits."""
    return float(f"{value:.6g}")
