"""Laws of the eigenvalues of a matrix: a power law for the largest, the law of Marchenko and Pastur for noise."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...rmt import MarchenkoPastur, tracy_widom_quantile

MIN_TAIL = 10  # least number of eigenvalues above a threshold that is tried


# ------------------------------------------------------------------------------------------------ the tail


@dataclass(frozen=True)
class PowerLaw:
    """p(x) = (alpha - 1) / x_min (x / x_min)^-alpha for x >= x_min, fitted to a tail.

    Attributes:
        alpha: The exponent.
        stderr: Its standard error for a given threshold, (alpha - 1) / sqrt(num_tail); a chosen threshold adds to it.
        x_min: Where the tail begins.
        num_tail: How many values are in it.
        distance: Largest distance between its distribution function and that of the values (Kolmogorov-Smirnov).
    """

    alpha: float
    stderr: float
    x_min: float
    num_tail: int
    distance: float


def fit_power_law(values: Tensor, *, min_tail: int = MIN_TAIL) -> PowerLaw:
    """The exponent by maximum likelihood, above the threshold at which the fit is best.

        alpha = 1 + n / sum_i log(x_i / x_min),    x_min = argmin sup_x |F_n(x) - F(x)|

    (Clauset, Shalizi and Newman 2009, equations 3.1 and 3.9). Every value is tried as a threshold that leaves at least
    `min_tail` values above it.

    Raises:
        ValueError: If there are fewer than `min_tail` values, if a value is not positive and finite, or all are equal.

    Example:
        >>> u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
        >>> fit = fit_power_law(u ** (-1 / 1.5))  # quantiles of the law with alpha = 2.5, x_min = 1
        >>> round(fit.alpha, 1), round(fit.x_min, 2)
        (2.5, 1.0)
    """
    x = values.detach().double().flatten().cpu().sort().values
    if len(x) < min_tail or not bool(((x > 0) & x.isfinite()).all()):
        raise ValueError(f"a power law needs at least {min_tail} values, all positive and finite, got {len(x)} values")
    if x[-1] <= x[0] * (1 + 1e-6):
        raise ValueError(f"all values are {float(x[0]):.4g}: there is no tail to fit")
    logs = x.log()
    best = PowerLaw(math.inf, math.inf, float(x[0]), len(x), math.inf)
    for first in range(len(x) - min_tail + 1):
        if first and x[first] == x[first - 1]:
            continue
        over = logs[first:] - logs[first]
        num, total = len(over), float(over.sum())
        if not total > 0:  # all equal
            continue
        alpha = 1 + num / total
        law = -torch.expm1((1 - alpha) * over)
        steps = torch.arange(num + 1, dtype=torch.float64) / num
        distance = max(float((law - steps[:-1]).max()), float((steps[1:] - law).max()))
        if distance < best.distance:
            best = PowerLaw(alpha, (alpha - 1) / math.sqrt(num), float(x[first]), num, distance)
    return best


# ------------------------------------------------------------------------------------------------ the bulk


@dataclass(frozen=True)
class Bulk:
    """The law of Marchenko and Pastur that fits the bulk of the eigenvalues of W'W.

    Attributes:
        variance: Variance of the entries of W, taken as noise.
        edge: lambda_+ = variance (sqrt(rows) + sqrt(columns))^2, with the rows and columns that remain without spikes.
        threshold: 99 % quantile of the largest eigenvalue of noise.
        num_spikes: Number of eigenvalues above it.
    """

    variance: float
    edge: float
    threshold: float
    num_spikes: int


def fit_bulk(eigenvalues: Tensor, shape: tuple[int, int]) -> Bulk:
    """The variance of the entries of W if they are noise, and the eigenvalues of W'W that are too large for noise.

    The variance makes the median of the law equal to that of the eigenvalues (Gavish and Donoho 2014, for an unknown
    noise level), since a few large eigenvalues hardly move a median. Eigenvalues above the threshold are removed, with
    a row and a column of W for each, and the fit is repeated until none is removed. The threshold is the 99 % quantile
    of the largest eigenvalue of noise, 2.02 of its scale above the edge (Johnstone 2001). A matrix with heavy tails has
    no such bulk: the fit then only describes the lower half.

    Args:
        eigenvalues: The min(shape) eigenvalues of W'W or WW', zeros included.
        shape: Shape of W.

    Raises:
        ValueError: If there are not min(shape) eigenvalues.

    Example:
        >>> W = torch.randn(400, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> bulk = fit_bulk(torch.linalg.svdvals(W).square(), (400, 200))
        >>> round(bulk.variance, 1), bulk.num_spikes
        (1.0, 0)
    """
    x = eigenvalues.detach().double().flatten().cpu().sort().values
    large, small = max(shape), min(shape)
    if len(x) != small:
        raise ValueError(f"a matrix of shape {shape} has min(shape) = {small} eigenvalues, got {len(x)}")
    num_spikes = 0
    while True:
        rows, columns = large - num_spikes, small - num_spikes
        law = MarchenkoPastur(columns / rows)  # of W'W / rows, for entries of variance 1
        variance = float(x[:columns].quantile(0.5)) / (rows * float(law.quantile(0.5)))
        edge, scale = (variance * rows * size for size in (law.edges[1], law.edge_scale(columns)))
        threshold = edge + tracy_widom_quantile(0.99) * scale
        above = min(int((x > threshold).sum()), small - 1)
        if above <= num_spikes:
            return Bulk(variance, edge, threshold, num_spikes)
        num_spikes = above
