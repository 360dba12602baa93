"""Directions in weight space along which to evaluate the loss."""

import torch
from torch import Tensor, nn

from ..krylov.eigen import Which, top_eigenpairs
from ..operators.base import Operator
from ..risk import Progress, Risk
from ..space import row_norms


def random_direction(risk: Risk, seed: int = 0) -> Tensor:
    """A unit vector (dim,), uniform on the sphere; a coordinate along it is a distance in weight space.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.ones(1, 3), torch.ones(1, 2)))
        >>> round(float(random_direction(risk).norm()), 5)
        1.0
    """
    row = risk.space.probes([0], seed, "normal", dtype=risk.dtype, device=risk.device)
    return row[0] / row_norms(row).to(row)


def filter_normalised(risk: Risk, seed: int = 0, *, biases: bool = False) -> Tensor:
    """A random direction (dim,) with the size of the weights, filter by filter.

        d_f <- d_f ||w_f|| / ||d_f||

    (Li et al. 2018, section 4). A filter is the set of weights that lead to one output unit or channel. A tensor of one
    dimension (a bias, BatchNorm) has no filters: its part of the direction is 0, or with `biases` the whole tensor is
    one filter. Shared weights are one parameter and count once. A filter of zeros gets a direction of zeros.

    Raises:
        ValueError: If the whole direction would be zero.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.ones(1, 3), torch.ones(1, 2)))
        >>> d = risk.space.split(filter_normalised(risk))
        >>> torch.allclose(d["weight"].norm(dim=1), risk.params()["weight"].norm(dim=1)), d["bias"].tolist()
        (True, [0.0, 0.0])
    """
    space, params = risk.space, risk.params()
    noise = space.split(space.probes([0], seed, "normal", dtype=risk.dtype, device=risk.device)[0])
    # a transposed convolution holds its weights as (in, out / groups, ...), all others as (out, ...)
    groups = {
        f"{name}.weight".lstrip("."): module.groups
        for name, module in risk.model.named_modules()
        if isinstance(module, nn.modules.conv._ConvTransposeNd)
    }

    def scaled(name: str) -> Tensor:
        weight, d = params[name], noise[name]
        if weight.ndim < 2:
            return d * (_sizes(weight[None]) / _sizes(d[None]))[0] if biases else torch.zeros_like(d)
        if name not in groups:
            return d * _sizes(weight) / _sizes(d)
        by_output = [x.unflatten(0, (groups[name], -1)).transpose(1, 2).flatten(0, 1) for x in (weight, d)]
        ratio = (_sizes(by_output[0]) / _sizes(by_output[1])).reshape(groups[name], 1, -1, *[1] * (d.ndim - 2))
        moved: Tensor = (d.unflatten(0, (groups[name], -1)) * ratio).flatten(0, 1)
        return moved

    direction = space.join({name: scaled(name) for name in space.names})
    if not bool(direction.any()):
        raise ValueError(
            "no filter to normalise: every weight of two or more dimensions is zero or not among the chosen "
            "parameters; pass biases=True, or use random_direction"
        )
    return direction


def _sizes(x: Tensor) -> Tensor:
    """Norms over all dimensions but the first, with the dimensions kept."""
    return row_norms(x.reshape(len(x), -1)).to(x).reshape(-1, *[1] * (x.ndim - 1))


def eigenvector_directions(
    operator: Operator,
    k: int = 2,
    which: Which = "largest",
    *,
    tol: float = 1e-4,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """k eigenvectors as rows (k, dim) of unit length: the directions of extreme curvature.

    The sign of an eigenvector is arbitrary; it is chosen such that the largest entry is positive.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> first, second = eigenvector_directions(DenseOperator(torch.diag(torch.tensor([1.0, 5.0, 3.0]))), k=2)
        >>> first.round().tolist(), second.round().tolist()
        ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    """
    rows = top_eigenpairs(operator, k, which, tol=tol, seed=seed, progress=progress).vectors.T
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return rows * largest.sign()
