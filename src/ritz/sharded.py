"""Models whose parameters are sharded over ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Such a model gathers its weights layer by layer as it goes, and adds up gradients over ranks as they come. Its
parameters are never part of a graph, so there is neither a second derivative in them nor a forward one; what there is,
is the output at any weights, and an ordinary backward pass. That is enough for differences: central differences of the
gradient for the Hessian, and for J' M J central differences of the outputs and one backward pass.

Weights are set in place for it, shard by shard, and put back as they were, by a copy. Vectors are in the memory of the
host, whole: where the weights do not fit on one device, a vector of their size does not either.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .space import ParamSpace

Params = Mapping[str, Tensor]


def is_sharded(model: nn.Module) -> bool:
    """Whether a parameter of the model is spread over ranks.

    Example:
        >>> is_sharded(torch.nn.Linear(1, 1))
        False
    """
    return any(type(p).__name__ == "DTensor" for p in model.parameters())


class ShardedModel:
    """A sharded model as a function of its weights.

    Args:
        model: With parameters that are `DTensor`s, and some that are not, maybe.
        size: Ranks, whose mean of gradients FSDP2 takes.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        self.model, self.size = model, size

    def version(self) -> Hashable:
        """Changes when a weight does."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return tuple((_local(t).data_ptr(), _local(t)._version) for t in tensors)

    def full(self, tensor: Tensor) -> Tensor:
        """A tensor in whole, in the memory of the host; every rank takes part."""
        own: Any = tensor.detach()
        whole: Tensor = own.full_tensor() if type(tensor).__name__ == "DTensor" else own
        return whole.cpu()

    @contextlib.contextmanager
    def at(self, weights: Params) -> Iterator[None]:
        """The model with other weights, given in whole; gradients and buffers aside. All is put back in the end."""
        own = dict(self.model.named_parameters())
        locals_ = {name: _local(own[name]) for name in weights}
        held = {name: local.clone() for name, local in locals_.items()}
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        grads = [(p, p.grad) for p in own.values()]
        self._forget()
        try:
            for p, _ in grads:
                p.grad = None
            for name, local in locals_.items():
                # of the data: a weight that is put back has not moved, and its version stays
                local.data.copy_(_part(weights[name], own[name]))
            yield
        finally:
            self._forget()
            for name, local in locals_.items():
                local.data.copy_(held[name])
            for buffer, value in buffers:
                buffer.data.copy_(value)
            for p, grad in grads:
                p.grad = grad

    def _forget(self) -> None:
        """Drop what was gathered: the root keeps its weights after a forward pass, and would not see others."""
        for module in self.model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()

    def gradient(self, space: ParamSpace) -> Tensor:
        """The gradient that a backward pass left, summed over ranks, as one vector (dim,) on the host."""
        own = dict(self.model.named_parameters())
        parts = []
        for name in space.names:
            grad = own[name].grad
            if grad is None:
                parts.append(torch.zeros(own[name].shape, dtype=own[name].dtype))
            else:
                parts.append(self.full(grad) * self.size)
        return torch.cat([part.flatten() for part in parts])

    def pullback(
        self, weights: Params, space: ParamSpace, run: Callable[[], tuple[Tensor, Tensor, Any]]
    ) -> tuple[Tensor, Any]:
        """J'c, summed over ranks, for `run()` -> (outputs, cotangent, anything), and the last of these."""
        with self.at(weights), torch.enable_grad():
            out, cotangent, note = run()
            out.backward(cotangent)
            return self.gradient(space), note


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    own: Any = tensor.detach()
    held: Tensor = own.to_local() if type(tensor).__name__ == "DTensor" else own
    return held


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank is to hold of a tensor that is given in whole."""
    if type(like).__name__ != "DTensor":
        return whole
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec: Any = like
    shape, start = compute_local_shape_and_global_offset(whole.shape, spec.device_mesh, spec.placements)
    if 0 in shape:
        return whole.new_empty(tuple(shape))
    return whole[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]
