"""Hessian traces of single samples as PyHessian estimates them, one sample after another.

Its rule draws random signs v and stops when the mean of v'Hv changes by less than 1e-3 of itself, or after 100. Two
things follow. Var v'Hv = 2 sum_(s != t) H_st^2, and for a point that is wrong the off-diagonal part of H has all of the
network's own curvature, weighted by S - e_y: the trace does not see it, the estimate is ruled by it. And the change is
divided by the mean with its sign: after a negative mean any change is small enough, and the rule stops there.
"""

import copy
import importlib
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..batches import isolated_rng
from .data.images import Data

MOST_PROBES, TOLERANCE = 100, 1e-3  # PyHessian's own settings


def one_by_one(model: nn.Module, data: Data, seed: int = 0) -> Tensor:
    """Hutchinson's estimates as PyHessian makes them, and the number of random vectors of each: (2, N).

    v'Hv for random signs v, until the mean of all so far differs from the one before by less than 1e-3 of it, or 100.

    Example:
        >>> model = nn.Linear(1, 2)
        >>> _ = nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        >>> traces, probes = one_by_one(model, (torch.tensor([[3.0]]), torch.tensor([0])))
        >>> bool(0 <= float(traces) <= 10), 2 <= int(probes) <= 100  # Tr H = (9 + 1) / 2
        (True, True)
    """
    own = copy.deepcopy(model).eval()
    params = [p for p in own.parameters() if p.requires_grad]
    draws = torch.Generator(data[0].device).manual_seed(seed % 2**31)
    rows = []
    for x, y in zip(data[0].split(1), data[1].split(1), strict=True):
        gradient = torch.autograd.grad(nn.functional.cross_entropy(own(x), y), params, create_graph=True)
        rows.append(_hutchinson(gradient, params, draws))
    return torch.tensor(rows, dtype=torch.float64).T


def _hutchinson(gradient: Sequence[Tensor], params: Sequence[Tensor], draws: torch.Generator) -> tuple[float, int]:
    """The trace behind one gradient, and how many random vectors it took."""
    forms: list[float] = []
    before = 0.0
    for _ in range(MOST_PROBES):
        v = [2.0 * torch.randint(2, p.shape, generator=draws, device=p.device).to(p) - 1 for p in params]
        product = torch.autograd.grad(gradient, params, v, retain_graph=True)
        forms.append(float(sum((a * b).sum() for a, b in zip(product, v, strict=True))))
        now = sum(forms) / len(forms)
        if abs(now - before) / (before + 1e-6) < TOLERANCE:  # as it is there: a negative mean stops it at once
            break
        before = now
    return now, len(forms)


def by_package(model: nn.Module, data: Data, seed: int = 0) -> Tensor:
    """The same by PyHessian itself, (N,); it draws from torch's generator and leaves gradients behind."""
    hessian = importlib.import_module("pyhessian").hessian  # it has no types
    own = copy.deepcopy(model)
    found = []
    with isolated_rng(seed % 2**31, data[0].device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it makes reference cycles, which torch warns of
        for x, y in zip(data[0].split(1), data[1].split(1), strict=True):
            own.zero_grad()
            forms = hessian(own, nn.CrossEntropyLoss(), data=(x, y), cuda=x.is_cuda).trace()
            found.append(sum(forms) / len(forms))
    return torch.tensor(found, dtype=torch.float64)
