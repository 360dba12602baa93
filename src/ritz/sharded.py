"""Models whose parameters are sharded over ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Such a model gathers its weights layer by layer as it goes, and adds up gradients over ranks as they come. Its
parameters are never part of a graph, so there is neither a second derivative in them nor a forward one; what there is,
is the output at any weights, and an ordinary backward pass. That is enough for differences: central differences of the
gradient for the Hessian, and for J' M J central differences of the outputs and one backward pass.

Weights are set in place for it, shard by shard, and put back as they were, by a copy. Vectors are in the memory of the
host, whole: where the weights do not fit on one device, a vector of their size does not either.

A pass is the work of all ranks: one that runs out of memory in the midst of it, or fails otherwise, leaves the others
waiting for its weights. It goes on with one sample, without the collectives that were made already, until all are
through (`in_step`); then all try again with less, or raise its error.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .batches import Batch
from .comm import World
from .errors import UnsupportedError
from .memory import is_shortage, make_room
from .space import ParamSpace

Params = Mapping[str, Tensor]
T = TypeVar("T")


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
        world: The ranks, whose mean of gradients FSDP2 takes.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.roots = _roots(model)

    def version(self) -> Hashable:
        """Changes when a weight does."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return tuple((_local(t).data_ptr(), _local(t)._version) for t in tensors)

    def full(self, tensor: Tensor) -> Tensor:
        """A tensor in whole, in the memory of the host; every rank takes part."""
        own: Any = tensor.detach()
        with self.world.watched():
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
            self._set_back()
            for name, local in locals_.items():
                local.data.copy_(held[name])
            for buffer, value in buffers:
                buffer.data.copy_(value)
            for p, grad in grads:
                p.grad = grad

    def constant_at(self, weights: Params) -> contextlib.AbstractContextManager[None]:
        """The same for outputs alone.

        Raises:
            UnsupportedError: If they are to be differentiated in the weights.
        """
        if any(p.requires_grad or is_functorch_wrapped_tensor(p) for p in weights.values()):
            raise UnsupportedError(
                "the outputs of a model sharded by FSDP2 are not a function of weights that torch can differentiate; "
                "use its gradient, or products with ritz.Hessian, GGN and the Fishers"
            )
        return self.at(weights)

    def _forget(self) -> None:
        """Drop what was gathered: the root keeps its weights after a forward pass, and would not see others."""
        for module in self.model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()

    def _set_back(self) -> None:
        """Have FSDP2 forget the pass, how far it came and in which order: what it fetches ahead depends on that."""
        for root in self.roots:
            with contextlib.suppress(AttributeError):  # before its first pass it has no state
                root.reset_iter_state()

    def gradient(self, space: ParamSpace) -> Tensor:
        """The gradient that a backward pass left, summed over ranks, as one vector (dim,) on the host."""
        own = dict(self.model.named_parameters())
        parts = []
        for name in space.names:
            grad = own[name].grad
            if grad is None:
                parts.append(torch.zeros(own[name].shape, dtype=own[name].dtype))
            else:
                parts.append(self.full(grad) * self.world.size)
        return torch.cat([part.flatten() for part in parts])

    def pullback(
        self, weights: Params, space: ParamSpace, run: Callable[[], tuple[Tensor, Tensor, Any]]
    ) -> tuple[Tensor, Any]:
        """J'c, summed over ranks, for `run()` -> (outputs, cotangent, anything), and the last of these."""
        with self.at(weights), torch.enable_grad():
            out, cotangent, note = run()
            out.backward(cotangent)
            return self.gradient(space), note

    def in_step(self, work: Callable[[Batch], T], pieces: Sequence[Batch], world: World) -> list[T] | None:
        """`work` on each piece, of which all ranks have as many; None on all ranks where one ran out of memory.

        Raises:
            Exception: Of any rank, on all of them; on that one alone where FSDP2 cannot be set back, or fails with one
                sample too.
        """
        results = []
        for piece in pieces:
            made, error = Collectives(), None
            try:
                with made, world.watched():
                    results.append(work(piece))
            except Exception as caught:
                error = caught.with_traceback(None)  # which would hold the memory
            if error is not None:
                self._catch_up(work, piece, made.done, error)
            short = error is not None and is_shortage(error)
            if any(world.agree("a pass of a sharded model", None if short else error, short)):
                return None
        return results

    def _catch_up(self, work: Callable[[Batch], T], piece: Batch, done: int, error: Exception) -> None:
        """Take part in the rest of a pass that failed, so that the others can end theirs; what it gives is nothing."""
        if not self.roots:
            raise error
        make_room(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            with Collectives(skipped=done), self.world.watched():
                work(piece.head(1))
        except Exception:
            raise error from None


class Collectives(TorchDispatchMode):
    """Counts the collectives that are made inside it; the first `skipped` are not made, and give zeros.

    Example:
        >>> with Collectives() as made:
        ...     _ = torch.ones(2) + 1
        >>> made.done
        0
    """

    def __init__(self, skipped: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done, self.skipped = 0, skipped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        collective = func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in func.__name__
        if not collective or self.done >= self.skipped:
            result = func(*args, **(kwargs or {}))
            self.done += collective
            return result
        self.done += 1
        return _functional_zeros(func, args) if func.namespace == "_c10d_functional" else _zeros(args)


def _roots(model: nn.Module) -> list[Any]:
    """The outermost modules that FSDP2 can set back; PyTorch 2.13 can, and older ones cannot."""
    if hasattr(model, "reset_iter_state"):
        return [model]
    return [root for child in model.children() for root in _roots(child)]


def _zeros(args: Any) -> tuple[Any, Any]:
    """What a collective in place gives, which was not made: its own output, and work that is done."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    for tensor in args[0] if isinstance(args[0], list) else [args[0]]:
        tensor.zero_()
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(None)
    work: Any = _create_work_from_future(done)
    return args[0], work.boxed()


def _functional_zeros(func: Any, args: Any) -> Tensor:
    """What a collective that returns a tensor gives, which was not made."""
    tensor: Tensor = args[0]
    first, rest = tensor.shape[0], tensor.shape[1:]
    if "all_gather_into_tensor" in func.__name__:
        return tensor.new_zeros((first * args[1], *rest))
    if "reduce_scatter_tensor" in func.__name__:
        return tensor.new_zeros((first // args[2], *rest))
    return torch.zeros_like(tensor)


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
