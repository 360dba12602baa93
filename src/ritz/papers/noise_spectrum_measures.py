"""What is measured of the noise of batch Hessians: all of its eigenvalues, its entries, and what it does to spikes.

Blocks of samples have their Hessian in full, (blocks, P, P); that of a batch of several blocks is their mean, and
X = H_batch - H, H the mean of all (seed 004, equations 6 and A.3).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import cross_entropy

from .. import rmt
from ..operators.hessian import Hessian
from ..risk import Risk
from ..space import random_permutation, random_uniform
from .data.images import Data

TOP = 10  # eigenvalues whose share of Tr X^2 is told: one for each class
NINE = 9  # eigenvectors of H that stand out, one less than there are classes


def block_hessians(model: nn.Module, data: Data, size: int) -> Tensor:
    """The Hessian of every block of `size` samples in their order, (blocks, P, P), in float64.

    Example:
        >>> model = nn.Linear(1, 2, bias=False)
        >>> torch.nn.init.zeros_(model.weight).shape
        torch.Size([2, 1])
        >>> H = block_hessians(model, (torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])), size=1)
        >>> H.flatten().tolist()  # x^2 (diag p - p p') at p = 1 / 2
        [0.25, -0.25, -0.25, 0.25, 1.0, -1.0, -1.0, 1.0]
    """
    X, y = data
    model, X = _double(model), X.double()
    risk = Risk(model, nn.CrossEntropyLoss(), (X, y))
    parts = zip(X.split(size), y.split(size), strict=True)
    return torch.stack([Hessian(risk.on(part)).dense() for part in parts if len(part[1]) == size])


def spectra(blocks: Tensor, sizes: Sequence[int], block: int, most: int, key: object) -> list[dict[str, Any]]:
    """For every batch size the noise level, a mean over many draws, and of `most` batches how well a semicircle fits.

    Args:
        blocks: Hessians of blocks, (blocks, P, P).
        sizes: Of batches, multiples of `block`.
        block: Samples in a block.
        most: Batches whose eigenvalues are found.
        key: Of the order in which blocks are put together; each size has another.
    """
    full, gram = blocks.mean(0), _gram(blocks)
    nine = _largest(full, NINE)
    rows = []
    for size in sizes:
        each = size // block
        fits: list[dict[str, float]] = []
        shown: list[float] = []
        for picked in _groups(len(blocks), each, (key, size))[:most]:
            X = blocks[picked].mean(0) - full
            values = torch.linalg.eigvalsh(X).cpu()
            shown = shown or [float(f"{value:.4g}") for value in values.tolist()]
            fits.append(shape(values) | {"along": 1 - _rest(X, nine) / float(X.square().sum())})
        level = _level(gram, each, (key, size)) / len(full)
        rows.append({"size": size, "level": level, **{k: [fit[k] for fit in fits] for k in fits[0]}, "values": shown})
    return rows


def _groups(num: int, each: int, key: object) -> tuple[Tensor, ...]:
    """Numbers of the blocks of disjoint batches, in a drawn order."""
    order: Tensor = random_permutation(num, ("noise", key))
    return tuple(order[place : place + each] for place in range(0, num - each + 1, each))


def _gram(blocks: Tensor) -> Tensor:
    """<H_i - H, H_j - H>, from which Tr X^2 of every batch follows, (blocks, blocks)."""
    flat = (blocks - blocks.mean(0)).flatten(1)
    return (flat @ flat.T).cpu()


def _level(gram: Tensor, each: int, key: object, draws: int = 1000) -> float:
    """The mean of Tr X^2 over batches of so many blocks, from many orders: that of all pairs within a batch."""
    total = 0.0
    for draw in range(draws):
        rows = torch.stack(_groups(len(gram), each, (key, draw)))  # (batches, each)
        total += float(gram[rows[:, :, None], rows[:, None, :]].mean())
    return total / draws


def shape(values: Tensor) -> dict[str, float]:
    """Numbers that tell a spectrum from a semicircle, and how much of Tr X^2 a few eigenvalues have.

    Example:
        >>> found = shape(torch.linalg.eigvalsh(rmt.wigner(300)))
        >>> round(found["kurtosis"], 1), round(found["outside"], 1), found["top"] < 0.15
        (2.0, 0.0, True)
    """
    fit = rmt.fit(values)
    squares = values.square().sort(descending=True).values
    named = {name: float(getattr(fit, name).value) for name in ("distance", "skewness", "kurtosis", "outside")}
    edge = 2 * math.sqrt(float(fit.law.moment(2)))
    small = float((values.abs() < 0.01 * edge).double().mean())  # a semicircle has 1.3 % there
    return {**named, "top": float(squares[:TOP].sum() / squares.sum()), "near_zero": small, "norm": _norm(values)}


def bounds(blocks: Tensor, size: int, block: int) -> dict[str, float]:
    """What lemma 2 bounds: the largest entry of X, its largest eigenvalue, and the L of gradients at this point."""
    full = blocks.mean(0)
    largest, norms, lipschitz = 0.0, 0.0, _norm(torch.linalg.eigvalsh(full))
    for picked in _groups(len(blocks), size // block, ("bounds", size))[:8]:
        own = blocks[picked].mean(0)
        largest = max(largest, float((own - full).abs().max()))
        norms = max(norms, _norm(torch.linalg.eigvalsh(own - full)))
        lipschitz = max(lipschitz, _norm(torch.linalg.eigvalsh(own)))
    return {"entry": largest, "norm": norms, "lipschitz": lipschitz, "dim": len(full)}


def dependence(blocks: Tensor) -> dict[str, Any]:
    """Theorem 4's conditions on the variances of entries, and how Tr X^2 varies beside independent normal entries.

    Independent normal entries with the very variances that ours have would give Tr X^2 the variance
    2 sum_i v_ii^2 + 8 sum_(i<j) v_ij^2. "excess" is squared deviations of Tr X^2 over that, one for each block.
    """
    variances = blocks.var(0)  # (P, P), entry by entry
    rows = variances.mean(1)
    total = (blocks - blocks.mean(0)).square().sum((1, 2))  # (blocks,)
    diagonal = variances.diagonal().square().sum()
    independent = 2 * diagonal + 4 * (variances.square().sum() - diagonal)
    excess = (total - total.mean()).square() * len(total) / (len(total) - 1) / independent
    level = rows.mean()
    return {
        "row_spread": float((rows - level).abs().mean() / level),  # condition iii
        "row_largest": float(rows.max() / level),  # condition iv
        "excess": [float(f"{x:.5g}") for x in excess.tolist()],
        "relative_spread": float(total.std() / total.mean()),
    }


def spikes(blocks: Tensor, size: int, block: int, most: int, key: object) -> dict[str, Any]:
    """Theorem 1 on batches: eigenvalues and eigenvectors of the batch beside those of all samples.

    "band" are the ten directions of H below the threshold nu = sqrt(s2), of which theorem 1 says that no batch knows
    them: the share of the batch's eigenvectors of the same ranks within their span, 10 / P were they random.
    """
    full = blocks.mean(0)
    pairs = torch.linalg.eigh(full)
    nu, theta = pairs.eigenvalues.flip(0), pairs.eigenvectors.flip(1)
    groups = _groups(len(blocks), size // block, ("spikes", key, size))
    s2 = math.fsum(float((blocks[g].mean(0) - full).square().sum()) for g in groups) / len(groups) / len(full)
    first = int((nu > math.sqrt(s2)).sum())
    band = slice(first, first + 10)
    found: dict[str, Any] = {"values": [], "overlaps": [], "space": [], "band": []}
    for picked in groups[:most]:
        own = torch.linalg.eigh(blocks[picked].mean(0))
        values, phi = own.eigenvalues.flip(0), own.eigenvectors.flip(1)
        cosines = (theta.T @ phi).square()  # (P, P), of H by of the batch
        found["values"].append(values[:NINE].tolist())
        found["overlaps"].append(cosines.diagonal()[:NINE].tolist())
        found["space"].append(float(cosines[:NINE, :NINE].sum() / NINE))
        found["band"].append(float(cosines[band, band].sum() / 10))
    return {"size": size, "s2": s2, "nu": nu[:NINE].tolist(), "above": first, "dim": len(full), **found}


# ---------------------------------------------------------------------------------------- entries, sample by sample


def sample_columns(model: nn.Module, data: Data, columns: Sequence[int]) -> Tensor:
    """Columns of the Hessian of every sample, (N, columns, P), in float64.

    Example:
        >>> model, data = nn.Linear(1, 2, bias=False), (torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]))
        >>> columns = sample_columns(model, data, [0, 1])
        >>> bool((columns - block_hessians(model, data, size=1)).abs().max() < 1e-12)
        True
    """
    model = _double(model)
    named = {name: p.detach() for name, p in model.named_parameters()}
    flat = torch.cat([p.flatten() for p in named.values()])

    def loss(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = weights.split([p.numel() for p in named.values()])
        own = {key: part.view_as(p) for (key, p), part in zip(named.items(), parts, strict=True)}
        return cross_entropy(functional_call(model, own, (x[None],)), y[None])

    def product(x: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        image: Tensor = jvp(lambda w: grad(loss)(w, x, y), (flat,), (direction,))[1]
        return image

    every = vmap(product, in_dims=(0, 0, None))
    units = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)[list(columns)]
    with torch.no_grad():
        pieces = [
            torch.stack([every(x, y, unit) for unit in units], 1)
            for x, y in zip(data[0].double().split(512), data[1].split(512), strict=True)
        ]
    return torch.cat(pieces)


def normality(entries: Tensor, sizes: Sequence[int], num_batches: int, key: object) -> list[dict[str, Any]]:
    """How normal the entries of the noise of batches are, from their values on all samples, (N, entries).

    Batches are drawn with replacement, so that they are independent and have the samples as their distribution. Mean
    and variance of an entry are then known, the excess kurtosis is that of one sample over B, and Kolmogorov's test is
    exact for one entry; Bonferroni's level, 5 % over the number of entries, holds however entries depend on each other.

    Raises:
        ValueError: If no entry varies.

    Example:
        >>> x = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> [row["rejected"] for row in normality(x, (1, 16), 200, key=0)]
        [0.0, 0.0]
    """
    from scipy.stats import kstest

    centred = entries - entries.mean(0)
    spread = centred.square().mean(0).sqrt()
    live = spread > 1e-12 * spread.max()  # where a unit is dead, an entry is 0 for all samples
    if not bool(live.any()):
        raise ValueError(f"none of the {len(spread)} entries varies from sample to sample: draw others, or more")
    centred, spread = centred[:, live], spread[live]
    kurtosis = centred.pow(4).mean(0) / spread.pow(4) - 3
    quantiles = kurtosis.quantile(kurtosis.new_tensor([0.1, 0.5, 0.9])).tolist()
    weight = spread.square() / spread.square().sum()
    rows = []
    for size in sizes:
        rows_of = random_uniform(num_batches * size, ("entries", key, size)).mul(len(centred)).long()
        means = torch.cat([centred[rows].mean(1) for rows in rows_of.to(centred.device).view(-1, size).split(16)])
        scaled = (means * math.sqrt(size) / spread).cpu().numpy()
        p = torch.tensor([float(kstest(column, "norm").pvalue) for column in scaled.T], device=weight.device)
        refused = p < 0.05 / len(p)
        rows.append(
            {
                "size": size,
                "entries": len(p),
                "live": float(live.double().mean()),
                "batches": num_batches,
                "kurtosis": [q / size for q in quantiles],
                "singly": float((p < 0.05).double().mean()),
                "rejected": float(refused.double().mean()),
                "rejected_weight": float(weight[refused].sum()),
            }
        )
    return rows


def _double(model: nn.Module) -> nn.Module:
    """A copy in float64."""
    return copy.deepcopy(model).double().eval()


def _largest(matrix: Tensor, number: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(matrix).eigenvectors
    return vectors[:, -number:]


def _rest(X: Tensor, basis: Tensor) -> float:
    """Tr of the square of X with a space projected out."""
    left = X - basis @ (basis.T @ X)
    return float((left - (left @ basis) @ basis.T).square().sum())


def _norm(values: Tensor) -> float:
    return float(values.abs().max())


def summary(rows: Sequence[Mapping[str, Any]], **match: Any) -> list[Mapping[str, Any]]:
    """The rows that have these values.

    Example:
        >>> summary([{"kind": "gap", "seed": 0}, {"kind": "start", "seed": 0}], kind="gap")
        [{'kind': 'gap', 'seed': 0}]
    """
    return [row for row in rows if all(row.get(key) == value for key, value in match.items())]
