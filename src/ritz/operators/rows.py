"""Parts of the products of one batch with several rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..risk import Params
from ..space import ParamSpace
from .pages import in_large_pages


def each_row(
    product: Callable[[Params], tuple[Params, Tensor]], space: ParamSpace, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """`product(v)` -> (image, weight) for all rows in one batched call; the weight is the same for all.

    A single row is not batched, because batching doubles the work of the host.
    """
    if len(rows) == 1:
        image, weight = product(space.split(rows[0]))
        return space.join(image)[None], weight
    out_dims: Any = (0, None)
    images, weight = torch.func.vmap(product, out_dims=out_dims, randomness="same")(space.split(rows))
    return space.join(images, lead=1), weight


def gathered(space: ParamSpace, rows: Tensor, fill: Callable[[Params], None], apart: bool) -> Tensor:
    """Images (k, dim), into which `fill` writes the part of each parameter, (k, *shape) by name.

    The parts are views of the images, or with `apart` separate tensors that are joined at the end: compilers do not see
    that the views do not overlap, and would copy the whole image for each part.
    """
    if apart:
        parts = {
            name: torch.empty_like(part, memory_format=torch.contiguous_format)
            for name, part in space.split(rows).items()
        }
        fill(parts)
        return space.join(parts, lead=1)
    image = in_large_pages(rows.new_empty(rows.shape))
    fill(space.split(image))
    return image


def difference_step(point: Tensor, row: Tensor, dtype: torch.dtype, stretch: float = 1.0) -> Tensor:
    """The step of a central difference from `point` along a row: eps^(1/3), relative to |w| / |v|.

    The truncation error is proportional to step^2 and the rounding error to eps / step; at this step they are of equal
    size. eps is that of `dtype`, in which the model computes: it may have fewer digits than the weights.

    Example:
        >>> step = difference_step(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 10.0]), torch.float32)
        >>> round(float(step), 6)  # (1.2e-7)^(1/3) * 5 / 10
        0.00246
    """
    length = row.norm()
    scale: Tensor = stretch * torch.finfo(dtype).eps ** (1 / 3) * point.norm().clamp(min=1.0)
    return scale / torch.where(length > 0, length, 1.0)
