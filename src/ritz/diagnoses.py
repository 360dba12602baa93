"""What is said of a batch that does not fit in memory, or whose numbers are not finite: how much would fit, and where.

A diagnosis is made after the fact, by passes over the one batch at fault.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .batches import Batch, tensors_of
from .errors import NonFiniteError
from .memory import is_shortage, make_room
from .reducers import Mean

if TYPE_CHECKING:
    from .risk import Params, Risk


# --------------------------------------------------------------------------------------------------- memory


def no_room(work: Callable[[Batch], object], batch: Batch, splittable: bool, why: str) -> str:
    """What to say of a batch that may not be cut further; half of it, a quarter and so on are tried.

    Args:
        work: What ran out of memory, a function of the batch.
        batch: As it was given.
        splittable: Whether it was taken sample by sample already.
        why: The error of the device, in a line.

    Example:
        >>> no_room(lambda batch: None, Batch((torch.zeros(8, 1),), 0, 0, 8), True, "no room")[:53]
        'one sample at a time does not fit in memory (no room)'
    """
    if splittable:
        return (
            f"one sample at a time does not fit in memory ({why}); take fewer parameters with params=, "
            "shorter samples, a narrower dtype, or a device with more memory"
        )
    sizes = [batch.size >> k for k in range(1, batch.size.bit_length())]
    fits = next((size for size in sizes if _fits(work, batch.head(size))), 0)
    text = (
        f"a batch of {batch.size} samples does not fit in memory ({why}) and is not cut, since with batch statistics, "
        "dropout or an opaque loss it is part of the function; "
    )
    if not fits:
        return text + "nor does a part of it: use mode='eval' with a separable loss, or a device with more memory"
    return text + f"{fits} would fit: give data in batches of {fits}, another function, or use mode='eval'"


def _fits(work: Callable[[Batch], object], piece: Batch) -> bool:
    """Whether there is memory for a piece; one that the model refuses is none to advise."""
    try:
        work(piece)
    except Exception as error:
        if not is_shortage(error):
            return False
    else:
        return True
    make_room(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # outside the block: a traceback holds it
    return False


# --------------------------------------------------------------------------------------------- what is not finite


def refuse_gradient(risk: "Risk") -> None:
    """Raise for a gradient that is not finite: the first batch, parameter and dtype.

    Raises:
        NonFiniteError: In any case.
    """

    def look(params: "Params", batch: Batch) -> tuple[Tensor, Tensor]:
        grad, weight = risk.batch_gradient(params, batch)
        if not bool(grad.isfinite().all()):
            name = risk.space.names[int((~risk.space.segment(grad[None])[0].isfinite()).int().argmax())]
            raise NonFiniteError(
                f"the gradient of batch {batch.index} is not finite, first in {name} ({_kind(grad)}), though its loss "
                "is; try dtype=torch.float64, and look for a square root or a norm at zero"
            )
        return grad, weight

    risk.fold(look, Mean())
    raise NonFiniteError("the gradient is not finite, though that of each batch is; use dtype=torch.float64")


def origin(risk: "Risk", params: "Params", batch: Batch) -> str:
    """Where, in the forward pass of a batch, the first number comes up that is not finite; with its dtype."""
    if (bad := _first(batch.data)) is not None:
        return f"it is in the data that numbers are not finite ({_kind(bad)})"
    if risk.sharded:  # whose pass is the work of all ranks
        return "the data is finite"
    with _watched(risk.model) as seen:
        risk.total(params, batch)
    if not seen:
        return "the outputs of all layers are finite, so that it is the loss that is not"
    found = seen[0]
    what = "what goes into" if found.entered else "the output of"
    return f"first not finite is {what} {found.name or 'the model'} ({found.layer}, {_kind(found.value)})"


@dataclass(frozen=True)
class _Seen:
    """The call of a module whose output is not finite."""

    name: str
    layer: str
    value: Tensor
    entered: bool  # whether its inputs were not finite already


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[_Seen]]:
    """The first call inside whose output is not finite, in a list; the hooks are gone after."""
    seen: list[_Seen] = []

    def look(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not seen and (bad := _first(output)) is not None:
            entered = _first(args)
            seen.append(_Seen(name, type(module).__name__, bad if entered is None else entered, entered is not None))

    hooks = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _first(tree: Any) -> Tensor | None:
    """The first tensor that is not finite."""
    floats = (t for t in tensors_of(tree) if t.is_floating_point())
    return next((t for t in floats if not bool(t.isfinite().all())), None)


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
