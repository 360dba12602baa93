"""Random matrices with spikes, to check how well the laws of large matrices hold at a given size."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def wigner(dim: int, s2: float = 1.0, *, spikes: Sequence[float] = (), seed: int = 0) -> Tensor:
    """diag(spikes, 0, ..., 0) + X (dim, dim): X has normal entries of variance s2 / dim, 2 s2 / dim on the diagonal.

    X has no preferred direction, so spikes along the first unit vectors are as good as any others: the squared overlap
    of spike i with an eigenvector is the square of the eigenvector's i-th entry.

    Example:
        >>> H = wigner(400, spikes=[3.0])
        >>> bool(torch.linalg.eigvalsh(H)[-1] > 3), H.shape  # near 3 + 1 / 3
        (True, torch.Size([400, 400]))
    """
    if not s2 >= 0:
        raise ValueError(f"s2 must not be negative, got {s2}")
    diagonal = _with_spikes(dim, spikes, 0.0)
    normal = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (normal + normal.T) * math.sqrt(s2 / (2 * dim)) + diagonal.diag()


def wishart(
    dim: int, num_samples: int, variance: float = 1.0, *, spikes: Sequence[float] = (), seed: int = 0
) -> Tensor:
    """Z'Z / n (dim, dim) of n = num_samples normal rows with covariance diag(spikes, v, ..., v), v = variance.

    Example:
        >>> S = wishart(100, 400)
        >>> S.shape, round(float(S.trace()) / 100, 1)
        (torch.Size([100, 100]), 1.0)
    """
    if num_samples < 1 or not variance > 0:
        raise ValueError(f"expected num_samples >= 1 and variance > 0, got {num_samples} and {variance}")
    covariance = _with_spikes(dim, spikes, variance)
    if not bool((covariance >= 0).all()):
        raise ValueError(f"spikes, eigenvalues of the covariance, must not be negative, got {list(spikes)}")
    normal = torch.randn(num_samples, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = normal * covariance.sqrt()
    return rows.T @ rows / num_samples


def _with_spikes(dim: int, spikes: Sequence[float], rest: float) -> Tensor:
    if dim < 1 or len(spikes) > dim:
        raise ValueError(f"expected dim >= 1 and at most dim spikes, got dim = {dim} and {len(spikes)} spikes")
    diagonal = torch.full((dim,), rest, dtype=torch.float64)
    diagonal[: len(spikes)] = torch.as_tensor(spikes, dtype=torch.float64)
    return diagonal
