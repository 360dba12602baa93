"""The noise of the curvature between mini-batches, and unbiased moments from them (seed 004; seed 002, section 5).

For batches b with curvature H_b = H + X_b, the noise is Tr X^2 / P (equation 15 of seed 004). Algorithm 1 as printed
there does not compute it: its sum is not divided by the number of batches, and it subtracts (v'Hv)^2 instead of |Hv|^2,
so it returns noise plus signal. Here, for unit v,

    E_v [ sum_b |(H_b - Hbar) v|^2 / (n - 1) ]  =  E Tr X^2 / P

without bias for n disjoint batches.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import UnsupportedError
from ..intervals import ChiSquare, StudentT
from ..operators.base import full_precision
from ..operators.gauss_newton import GGN
from ..operators.hessian import Hessian
from ..operators.risk_operator import RiskOperator
from ..reducers import Moments, sum_pieces
from ..results import Estimate, from_samples
from ..risk import Params, Risk
from ..space import random_uniform, row_dots, row_norms

Curvature = Literal["hessian", "ggn"]
Target = Literal["population", "empirical"]
Progress = Callable[[int, int], None]

MOST_GROUPS = 8  # of batches, whose images are kept apart: as many rows a probe


@full_precision()
def curvature_noise(
    risk: Risk,
    num_batches: int = 16,
    batch_size: int = 128,
    seed: int = 0,
    *,
    num_probes: int = 4,
    curvature: Curvature = "hessian",
    target: Target = "population",
    progress: Progress | None = None,
) -> Estimate:
    """Tr X^2 / P for X = H_batch - H at this batch size, unbiased (seed 004, equation 15 and Algorithm 1, corrected).

    Batches are disjoint; their samples are drawn without replacement, depending on the seed. `parts` contains results
    at no extra cost: "mean curvature" (Tr H / P), "second moment" (Tr H^2 / P, without the noise) and "gradient noise"
    (trace of the covariance of batch gradients).

    With two or more probes, standard errors include batches and probes. With num_probes=1, the standard error is that
    of the batches for this one probe. It leaves out the error from the alignment of the probe with the few directions
    that contain most of the noise, because no batch can show it. With few probes the standard error is itself poorly
    known, and the interval treats it as exact. If the noise lies in few directions, the interval then covers less than
    its level (docs/noise.md): use 8 or more probes if that matters. Images of batches are stored in up to 8 groups, 8
    rows per probe, to estimate how the parts vary between groups.

    Args:
        risk: Training data without augmentation.
        num_batches: n, at least 2.
        batch_size: Size of the batches whose noise is estimated; the noise falls as 1 / batch_size.
        seed: Seed of the batches and of the probes.
        num_probes: Number of probes, K; see above for one.
        curvature: "hessian" (the paper) or "ggn" (what KFAC approximates).
        target: X against the curvature of the distribution the data came from ("population"), or of the data themselves
            ("empirical", smaller by 1 - batch_size / N).
        progress: Called as progress(batches done, batches in all).

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> X = torch.tensor([1.0, 2.0, 3.0, 4.0]).sqrt()[:, None]
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (X, torch.zeros(4, 1)))
        >>> noise = curvature_noise(risk, num_batches=4, batch_size=1)  # curvatures 2, 4, 6, 8
        >>> round(noise.value, 4), round(noise.parts["mean curvature"].value, 4)
        (6.6667, 5.0)
    """
    operator = _matrix(risk, curvature)
    if num_batches < 2:
        raise ValueError(f"a variance between batches needs num_batches >= 2, got {num_batches}")
    if batch_size < 1 or num_probes < 1:
        raise ValueError(f"batch_size and num_probes must be at least 1, got {batch_size} and {num_probes}")
    if target not in ("population", "empirical"):
        raise ValueError(f"target must be 'population' or 'empirical', got {target!r}")
    risk.check()
    batches = risk.batches.sample(num_batches, batch_size, seed)
    rows = operator.probes(range(num_probes), seed, "normal")
    rows = rows / row_norms(rows).to(rows.dtype)[:, None]
    seen_batches = _walk(operator, rows, batches, progress)
    squares, mean = seen_batches.moments.increments().cpu(), seen_batches.mean
    increments, gradient = squares[:, :-1], squares[:, -1:]  # (n - 1, K), (n - 1, 1)
    # against the data themselves, drawing without replacement leaves less to chance: 1 / B - 1 / N for one batch, and
    # 1 / nB - 1 / N for the mean of all
    seen = batch_size / risk.num_samples if target == "empirical" else 0.0
    factor, left = 1 - seen, 1 - num_batches * seen

    def about(text: str) -> dict[str, Any]:
        which = f"batches of {batch_size}, about the {target} mean; {operator.convention()}"
        return {"products": num_batches * num_probes, "seed": seed, "convention": f"{text}; {which}"}

    noise = factor * increments.mean(0)  # (K,)
    forms = (rows * mean).sum(1).double().cpu()
    second = mean.square().sum(1).double().cpu() - left * increments.mean(0) / num_batches
    between = [(left * seen_batches.variance(slopes), seen_batches.dof) for slopes in (rows, 2 * mean)]
    parts = {
        "mean curvature": _mean("mean curvature", forms, *between[0], about("Tr H / P")),
        "second moment": _mean("second moment", second, *between[1], about("Tr H^2 / P, noise taken out")),
        "gradient noise": _variance(
            "gradient noise", factor * gradient, about("trace of the covariance of batch gradients, not divided by P")
        ),
    }
    text = about("Tr X^2 / P, X = H_batch - H")
    return _variance("curvature noise", factor * increments, text, samples=noise, parts=parts)


def _matrix(risk: Risk, curvature: str) -> RiskOperator:
    """The matrix whose noise is asked for."""
    if not isinstance(risk, Risk):
        raise TypeError(f"expected a ritz.Risk, got {type(risk).__name__}")
    if curvature not in ("hessian", "ggn"):
        raise ValueError(f"curvature must be 'hessian' or 'ggn', got {curvature!r}")
    return Hessian(risk) if curvature == "hessian" else GGN(risk)


def _walk(operator: RiskOperator, rows: Tensor, batches: list[Batch], progress: Progress | None) -> "_Groups":
    """What the batches make of the rows, and their gradients in one row more."""
    risk = operator.risk
    operator.settle(rows)

    def both(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        image, weight = operator.batch_rows(params, batch, rows)
        gradient, _ = risk.batch_gradient(params, batch)
        return torch.cat([image, gradient[None]]), weight

    seen = _Groups()
    risk.fold(both, seen, batches=batches, progress=progress)
    if not bool(seen.mean.isfinite().all()):
        operator.diagnose()
    return seen


class _Groups:
    """Moments of batches, and sums of the images of groups of them, batch b in group b modulo `MOST_GROUPS`.

    How much a function of the mean image varies with the batches is known only once the mean is; the groups keep what
    is needed for that, in less memory than all batches would (the delete-a-group jackknife, Kott 2001, to first order).
    """

    def __init__(self) -> None:
        self.moments = Moments()
        self.sums: list[Tensor] = []  # (K + 1, dim) each
        self.sizes: list[int] = []

    join = staticmethod(sum_pieces)

    def add(self, total: Tensor, weight: Tensor) -> None:
        """One batch."""
        self._put(self.moments.count % MOST_GROUPS, total / weight.to(total.dtype), 1)
        self.moments.add(total, weight)

    def merge(self, other: "_Groups") -> None:
        """Batches seen by another."""
        for group, (image, size) in enumerate(zip(other.sums, other.sizes, strict=True)):
            self._put(group, image, size)
        self.moments.merge(other.moments)

    def _put(self, group: int, image: Tensor, size: int) -> None:
        if group == len(self.sums):
            self.sums.append(torch.zeros_like(image))
            self.sizes.append(0)
        self.sums[group] += image
        self.sizes[group] += size

    def result(self) -> Tensor:
        """The mean of all batches (K + 1, dim)."""
        return self.moments.result()[0]

    @property
    def mean(self) -> Tensor:
        """The mean images (K, dim)."""
        return self.result()[:-1]

    @property
    def dof(self) -> int:
        """Degrees of freedom of what varies between groups."""
        return len(self.sums) - 1

    def variance(self, slopes: Tensor) -> float:
        """Of a mean over probes, from batches; `slopes` (K, dim) are its derivatives by the mean images, times K.

        sum_g (n_g / n) a_g^2 / (G - 1), with a_g what group g has of it beyond the mean of all.
        """
        mean, total = self.mean, 0.0
        for image, size in zip(self.sums, self.sizes, strict=True):
            apart = float(row_dots(slopes, image[:-1] / size - mean).mean())
            total += size / self.moments.count * apart**2
        return total / self.dof


def _mean(name: str, samples: Tensor, between: float, dof: int, about: dict[str, Any]) -> Estimate:
    """The mean over probes (K,), with their error and that of the batches; degrees of freedom by Welch."""
    found = from_samples(name, samples, **about)
    probes = float(found.stderr) ** 2
    if not probes + between > 0:  # one probe has no error, and identical ones of identical batches have none
        return found
    welch = (probes + between) ** 2 / (probes**2 / (len(samples) - 1) + between**2 / dof)
    return replace(found, stderr=math.sqrt(probes + between), rule=StudentT(welch))


def _variance(name: str, increments: Tensor, about: dict[str, Any], **fields: Any) -> Estimate:
    """The mean of squared increments (n - 1, K), with the error from batches and, beyond it, from probes."""
    per_batch, per_probe = increments.mean(1), increments.mean(0)
    value = float(per_batch.mean())
    error = float(per_batch.var() / len(per_batch)) if len(per_batch) > 1 else math.nan
    if len(per_probe) > 1:
        error += float(per_probe.var() / len(per_probe))
    # a variance is a sum of squares: chi-square with the degrees of freedom that its own error asks for
    dof = 2 * value**2 / error if error > 0 else 1e9
    rule = ChiSquare(min(dof, 1e9)) if math.isfinite(error) else StudentT(0)
    return Estimate(
        name=name,
        value=value,
        stderr=math.sqrt(error),
        rule=rule,
        support=(0.0, math.inf),
        **about,
        **fields,
    )


@full_precision()
def minibatch_moment(
    risk: Risk,
    num_pairs: int = 32,
    batch_size: int = 128,
    seed: int = 0,
    *,
    curvature: Curvature = "hessian",
) -> Estimate:
    """Tr H^2 of the whole data from mini-batches, unbiased: the mean of v' H_1 H_2 v over independent pairs of batches.

    The square of one batch is biased upwards by its noise, E Tr H_b^2 = Tr H^2 + Tr X^2 (seed 002, equation 12), and so
    is a pair of disjoint batches downwards; the two of a pair are drawn independently, with replacement.
    `parts["naive"]` is the biased estimate from the same products.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(8, 1), torch.zeros(8, 1)))  # H = 2 everywhere
        >>> round(minibatch_moment(risk, num_pairs=4, batch_size=2).value, 4)
        4.0
    """
    operator = _matrix(risk, curvature)
    if num_pairs < 2 or batch_size < 1:
        raise ValueError(f"num_pairs must be at least 2 and batch_size at least 1, got {num_pairs} and {batch_size}")
    risk.check()
    pool = risk.batches.pool()
    if pool is None:
        raise UnsupportedError(
            "pairs of batches are drawn from all samples, which this data does not allow; give tensors (X, y)"
        )
    draws = random_uniform(2 * num_pairs * batch_size, ("pairs", seed)).mul(risk.num_samples).long()
    both = [pool.take(rows.to(risk.device), index) for index, rows in enumerate(draws.split(batch_size))]
    operator.settle(operator.probes([0], seed))

    def image(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        return operator.batch_rows(params, batch, operator.probes([batch.index // 2], seed))

    values = risk.fold(image, _Pairs(), batches=both)
    about: dict[str, Any] = {
        "products": 2 * num_pairs,
        "seed": seed,
        "convention": f"Tr H^2 from pairs of batches of {batch_size}; {operator.convention()}",
    }
    naive = from_samples("moment 2, naive", values[:, 1], **about)
    return from_samples("moment 2", values[:, 0], parts={"naive": naive}, **about)


class _Pairs:
    """Dot products of the images of consecutive batches: (pairs, 2), of the two with each other and with themselves."""

    def __init__(self) -> None:
        self.first: Tensor | None = None  # waits for the second of its pair
        self.rows: list[Tensor] = []

    join = staticmethod(sum_pieces)

    def add(self, total: Tensor, weight: Tensor) -> None:
        """One batch."""
        image = total[0] / weight.to(total)
        if self.first is None:
            self.first = image
            return
        first, self.first = self.first, None
        pairs = (first, image), (first, first), (image, image)
        across, one, two = (row_dots(a[None], b[None])[0] for a, b in pairs)
        self.rows.append(torch.stack([across, (one + two) / 2]).cpu())

    def merge(self, other: "_Pairs") -> None:
        """Pairs that come after these."""
        self.rows += other.rows

    def result(self) -> Tensor:
        """One row for each pair."""
        return torch.stack(self.rows)
