"""Gradients that are not finite: the step is skipped, counted and told of, and the run goes on unharmed."""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import NumericalWarning, callers_level

REMEDY = "lower the learning rate or raise the damping"


@torch.no_grad()
def finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all entries of all tensors are finite, by one look from the host for each device and precision.

    While a CUDA graph is captured the host cannot look, and they are taken to be.

    Example:
        >>> finite([torch.ones(2), torch.zeros(3)]), finite([torch.ones(2), torch.tensor([0.0, torch.nan])])
        (True, False)
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        x = x.coalesce().values() if x.is_sparse else x
        if x.numel():  # the largest of no numbers is not defined
            kinds.setdefault((x.device, x.dtype), []).append(x)
    if any(device.type == "cuda" for device, _ in kinds) and torch.cuda.is_current_stream_capturing():
        return True
    return all(
        bool(torch.stack(list(torch._foreach_norm(alike, torch.inf))).isfinite().all()) for alike in kinds.values()
    )


def tell_skipped(skipped: int, *, step: int | None = None, remedy: str = REMEDY) -> None:
    """Warn of a step that was not taken, the last of `skipped`; of each at first, then ever more rarely.

    Warns:
        NumericalWarning: At the first, second, fourth, eighth, ... of them: a run that is lost skips all its steps.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     tell_skipped(2, step=7)
        >>> print(caught[0].message)
        the gradient of step 7 is not finite: the step is skipped (2 so far); lower the learning rate or raise the ...
    """
    if skipped & (skipped - 1):
        return
    which = "" if step is None else f" of step {step}"
    warnings.warn(
        f"the gradient{which} is not finite: the step is skipped ({skipped} so far); {remedy}",
        NumericalWarning,
        stacklevel=callers_level(),
    )
