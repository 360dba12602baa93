"""The protocol of a loss, the target of a batch, and functions that losses share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Kind = Literal["ggn", "fisher", "empirical"]
Uniforms = Callable[[int, str], Tensor]  # (how many, stream name) -> that many uniform numbers, keyed, not streamed
Target = Callable[[Any], Tensor]

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Items:
    """Per-item quantities (n items, in data order)."""

    loss: Tensor  # (n,) the item's own loss; if its weight is 0, its contribution to the sum
    weight: Tensor  # (n,) its share in the mean
    margin: Tensor | None = None  # (n,) f_y - max_{j != y} f_j
    probabilities: Tensor | None = None  # (n, classes)
    logits: Tensor | None = None  # (n, classes)
    label: Tensor | None = None  # (n,) the class; arbitrary if the weight is 0


@runtime_checkable
class Loss(Protocol):
    """The protocol of a loss. `batch` is the user's batch, `out` the output of the model for it.

    Example:
        >>> isinstance(ritz.losses.CrossEntropy(), Loss)
        True
    """

    separable: bool  # may a batch be split?
    convex: bool  # is the loss Hessian positive semi-definite in the outputs?

    def weight(self, out: Tensor, batch: Any) -> Tensor:
        """The divisor of the sum over this batch: the number of samples or unmasked tokens, or their class weights."""

    def total(self, out: Tensor, batch: Any) -> Tensor:
        """The SUM over items, never the mean."""

    def middle(self, kind: Kind, out: Tensor, batch: Any, u: Tensor, draws: Tensor | None = None) -> Tensor:
        """M u for the matrix between the Jacobians, summed over items; `draws` (S, *out.shape) for "fisher"."""

    def roots(self, out: Tensor, batch: Any, chunk: int) -> Iterator[Tensor]:
        """Cotangents (<= chunk, *out.shape), each on one item of every sample, with sum_c s_c s_c' = M."""

    def num_roots(self, out: Tensor, batch: Any) -> int:
        """The total number of cotangents of `roots`."""

    def draw(self, out: Tensor, batch: Any, uniforms: Uniforms) -> Tensor:
        """One cotangent (*out.shape) per item, of a label drawn from the model: E[c c'] = M."""

    def items(self, out: Tensor, batch: Any) -> Items:
        """Loss and weight of every item; margins and probabilities if the loss has them."""


def default_target(batch: Any) -> Tensor:
    """The last entry of a tuple, or the entry of a dictionary that is named like a label."""
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return batch[key]  # type: ignore[no-any-return]
        raise ValueError(f"no target in a batch with keys {list(batch)}; pass target=lambda batch: ...")
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return batch[-1]  # type: ignore[no-any-return]
    raise ValueError(
        f"expected batches (inputs, targets) or a dictionary with one of {TARGET_KEYS}, got {type(batch).__name__}; "
        "pass target=lambda batch: ..., and note that data given as tensors is a tuple (X, y)"
    )


# ------------------------------------------------------------------------------- shared by the losses of ritz


def gradient(total: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
    """Gradient of a sum over items in the outputs; the part of each item is the gradient of the item's own loss."""
    _, pullback = torch.func.vjp(total, out)[:2]
    grad: Tensor = pullback(out.new_ones(()))[0]
    return grad


def signed_margin(logits: Tensor, label: Tensor) -> Tensor:
    """f_y - max_{j != y} f_j of every item, (n,); infinite if there is no other class."""
    own = label[:, None]
    return logits.gather(1, own)[:, 0] - logits.scatter(1, own, -torch.inf).amax(-1)


def outer_mean(draws: Tensor | None, u: Tensor, over: tuple[int, ...]) -> Tensor:
    """mean over draws of c (c . u), the dot product over the dimensions of one item."""
    if draws is None:
        raise ValueError("the Monte Carlo Fisher needs drawn cotangents")
    return (draws * dot(draws, u, tuple(d + 1 for d in over))).mean(0)


def counted(out: Tensor) -> Tensor:
    """The number of samples as a tensor made on the device: a copy from the host could not be recorded.

    Example:
        >>> counted(torch.zeros(3, 2))
        tensor(3., dtype=torch.float64)
    """
    return torch.full((), float(len(out)), dtype=torch.float64, device=out.device)


def summed(items: Tensor) -> Tensor:
    """The sum over items; 16-bit numbers are summed in float32, since the largest float16 is 65504.

    Example:
        >>> summed(torch.full((70_000,), 1.0, dtype=torch.float16)).item()
        70000.0
    """
    return items.sum(dtype=torch.promote_types(items.dtype, torch.float32))


def dot(a: Tensor, b: Tensor, over: tuple[int, ...]) -> Tensor:
    """a . b over some dimensions, which are kept with size 1; over none if an item is a single number."""
    return (a * b).sum(over, keepdim=True) if over else a * b
