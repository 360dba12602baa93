"""What an optimiser sees of the training passes of its model, without a change to the user's loop.

A hook on the root module records the calls of layers and lays a second hook on the outputs. When the gradient of the
user's loss arrives there, the pass is known to be a training pass, and its statistics are taken by one more backward
pass from the outputs. A pass whose outputs get no gradient costs nothing and is forgotten with its graph.
"""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..captures import Capture, Recorder
from ..comm import SELF, World
from ..errors import UnsupportedError
from ..losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError, default_target
from ..modes import unwrapped
from ..operators.base import full_precision
from ..operators.layer_factors import (
    Bases,
    Collector,
    FisherKind,
    Statistics,
    add_up,
    collect,
    item_cotangents,
    leaves_out,
)
from ..space import random_signs, random_uniform
from ..switches import tensor_cores
from .skipping import finite

_UNSEEN = "ritz.unseen"
_STRANGE = (
    "the outputs that were shown do not come from the last forward pass, or are cut off from it: call opt.observe with "
    "the tensor that the loss is made of, not detached, between each model(...) and the next"
)
_SHOWN = (
    "outputs of the last forward pass have been shown already, and a second tensor would go unseen: where the loss is "
    "made of several show them as one, torch.cat([a, b], dim=1), with that loss: KFAC(..., loss=fn, fisher='type2')"
)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Backward passes inside are not the ones that any optimiser waits for, and leave it waiting.

    On a GPU hooks run in threads of autograd's own: torch takes its objects of a thread there, and a ContextVar stays
    behind.
    """
    before = _is_unseen()
    torch._C._stash_obj_in_tls(_UNSEEN, True)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_UNSEEN, before)


def _is_unseen() -> bool:
    return torch._C._is_key_in_tls(_UNSEEN) and bool(torch._C._get_obj_in_tls(_UNSEEN))


class Pass:
    """One forward pass: the calls of its layers, and what the model gave."""

    def __init__(self, recorder: Recorder, out: Any, obstacle: str = "") -> None:
        self.recorder: Recorder | None = recorder
        self.out = None if obstacle else out
        self.differentiated = False  # whether its gradient was, with create_graph=True
        self.obstacle = obstacle  # why its outputs and targets must be shown
        # samples, where the outputs tell; networks with time in the first dimension have them in the second
        self.sizes = out.shape[: min(2, max(1, out.ndim - 1))] if isinstance(out, Tensor) and out.ndim else None

    def take(self) -> Recorder | None:
        """The recorded calls, once."""
        recorder, self.recorder, self.out = self.recorder, None, None
        return recorder


class _Hook:
    """Calls a method of an object that it does not keep alive; in a copy of the model it does nothing."""

    def __init__(self, owner: object, method: str, *bound: object) -> None:
        self._owner, self._method, self._bound = weakref.ref(owner), method, bound

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        return None if owner is None else getattr(owner, self._method)(*self._bound, *args)

    def __reduce__(self) -> tuple[Any, ...]:  # deep copies and pickles
        return _Idle, ()


class _Idle:
    """A hook that does nothing."""

    def __call__(self, *args: Any) -> None:
        return None


class Watcher:
    """Takes the statistics of training passes while it is `active`.

    Args:
        model: The root module, which is called, in what torch.compile or DataParallel put around it; layers and
            parameters have the names of the one inside.
        collector: What is summed, and for which blocks.
        loss: The loss, for the matrix in the outputs.
        fisher: "mc" (labels drawn from the model), "type2" (all roots of the loss Hessian) or "empirical".
        num_samples: Drawn labels for each item.
        loss_scale: What the user's loss is multiplied by before `backward`; matters to "empirical" alone.
        tf32: Make factors in TF32 on a GPU.
        seed: Seed of drawn labels and signs.
        world: The ranks that train together. Draws belong to places in the batch that is theirs together, as long as
            all have as many samples.

    Example:
        >>> from ritz.operators.units import units_of
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> loss = ritz.losses.SquaredError()
        >>> watcher = Watcher(model, Collector(units_of(model, ("weight",))), loss, "type2")
        >>> model(torch.tensor([[1.0], [3.0]])).square().mean().backward()
        >>> stats, weight = watcher.take()
        >>> float(stats["|input"] / stats["|rows"]), float(stats["|grad"] / weight)  # mean of x^2, 2
        (5.0, 2.0)
    """

    def __init__(
        self,
        model: nn.Module,
        collector: Collector,
        loss: Loss,
        fisher: FisherKind,
        num_samples: int = 1,
        loss_scale: float | Callable[[], float] = 1.0,
        tf32: bool = False,
        seed: int = 0,
        world: World = SELF,
    ) -> None:
        self.model, self.collector, self.loss, self.fisher = unwrapped(model), collector, loss, fisher
        self.num_samples, self.loss_scale, self.tf32, self.seed = num_samples, loss_scale, tf32, seed
        self.active, self.paused, self.draws = True, False, 0
        self.world = world
        self.bases: Bases | None = None  # of EKFAC
        self.waiting: Pass | None = None  # whose outputs must be shown
        self.spoilt = False  # whether statistics were left out since the last call of `take`, for not being finite
        self._latest: Callable[[], Pass | None] = lambda: None
        self._seen = weakref.WeakSet[Pass]()
        self._shown = False  # whether the outputs of the last pass were
        self._recorder: Recorder | None = None
        self._stats: Statistics = {}
        self._weight: Tensor | float = 0.0
        self._own = dict(self.model.named_parameters())
        units = collector.units.values()
        self._layers = tuple(p for unit in units if unit.module is not None for p in unit.params.values())
        self._free = tuple(p for unit in units if unit.module is None for p in unit.params.values())
        before = model.register_forward_pre_hook(_Hook(self, "_before"))
        after = model.register_forward_hook(_Hook(self, "_after"), always_call=True)
        self.remove = weakref.finalize(self, lambda *handles: [h.remove() for h in handles], before, after)

    # --------------------------------------------------------------------------------------- the hooks

    def _before(self, module: nn.Module, args: object) -> None:
        """Start to record, if this can be a training pass."""
        self._shown = False
        if not self.active or self.paused or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if (
            getattr(module, "_compiled_call_impl", None) is not None
        ):  # by module.compile(), which has no place for hooks
            return
        if self._recorder is not None:  # the model calls itself
            return
        # under functional_call, as in a product with a curvature matrix, the model holds other tensors
        if any(self._own.get(name, p) is not p for name, p in self.model.named_parameters()):
            return
        # all that is trained is frozen for now, as a discriminator is while its generator takes a step
        if not any(self._own[name].requires_grad for name in (*self._layers, *self._free)):
            return
        self._recorder = Recorder(self.model, self._layers)
        self._recorder.__enter__()

    def _after(self, module: nn.Module, args: object, output: Any) -> Tensor | None:
        """Stop recording, also after a failure, and wait for the gradient of the outputs."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        recorder.__exit__()
        if output is None or (isinstance(output, Tensor) and not (output.requires_grad and output.numel())):
            return None
        _refuse_one_class(self.loss, output)
        obstacle = _obstacle(self.loss, self.fisher, output)
        if obstacle is not None:
            self.waiting = Pass(recorder, output, obstacle)
            return None
        seen = Pass(recorder, output)
        self._seen.add(seen)
        self._latest = weakref.ref(seen)
        # The gradient is awaited at a copy: a hook on the output itself would be part of the graph that it holds.
        # A copy, not a view: the user may go on in place.
        copy: Tensor = output.clone()
        copy.register_hook(_Hook(self, "_arrived", seen))
        return copy

    def _arrived(self, seen: Pass, grad: Tensor) -> None:
        """The gradient of the user's loss in the outputs."""
        if _is_unseen() or self.paused:
            return
        if torch.is_grad_enabled():  # this backward pass is itself to be differentiated: by itself it is no step
            seen.differentiated = True
            return
        if seen.differentiated and not self._accumulates():
            return
        out = seen.out
        recorder = seen.take()
        if out is None or recorder is None:
            return
        idle = _idle(self.loss, out, grad)
        if self.fisher == "empirical":
            scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
            items = _num_items(self.loss, out) - (0 if idle is None else int(idle.sum()))
            self._collect(recorder, out, [grad[None] * (items / scale)], float(items), idle is not None)
        else:
            loss, batch = _blank(self.loss, out, idle)  # type: ignore[misc]
            stacks = self._cotangents(loss, out, batch)
            self._collect(recorder, out, stacks, _weight(loss, out, batch), idle is not None)

    def _accumulates(self) -> bool:
        """Whether the backward pass that is under way is `backward()`, not torch.autograd.grad: what a step is made of.

        After a first derivative with create_graph=True one may be the training pass, of a loss with a gradient penalty
        in it, and the other a product with a second derivative.
        """
        trained = [p for name in (*self._layers, *self._free) if (p := self._own[name]).requires_grad]
        try:
            return any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in trained)
        except RuntimeError:  # which says so of a leaf whose gradient is asked for
            return False

    def observe(self, outputs: Tensor, batch: Any) -> None:
        """The statistics of the last pass, from the outputs and batch that are given.

        Raises:
            ValueError: If the outputs are not those of this pass, or some of them have been shown already.
        """
        seen = self.waiting or self._latest()
        if seen is None or seen.recorder is None:
            if self._shown and outputs.requires_grad:
                raise ValueError(_SHOWN)
            return
        if seen.sizes is not None and len(outputs) not in seen.sizes:
            raise ValueError(
                f"outputs of {len(outputs)} samples were given, but the model returned {seen.sizes[0]}: give them with "
                "samples first, as the model returned them, not flattened (classes second, or "
                "CrossEntropy(class_dim=...))"
            )
        if not outputs.requires_grad or not seen.recorder.reaches(outputs):
            raise ValueError(_STRANGE)
        recorder, self.waiting, self._shown = seen.recorder, None, True
        seen.take()
        if not outputs.numel():  # no samples, and no part in the statistics
            return
        stacks = self._cotangents(self.loss, outputs, batch)
        partly = leaves_out(self.loss, _held(outputs), batch)
        self._collect(recorder, outputs, stacks, _weight(self.loss, outputs, batch), partly)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No statistics inside."""
        was, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = was

    # --------------------------------------------------------------------------------------- statistics

    def take(self) -> tuple[Statistics, Tensor | float]:
        """The sums of all passes since the last call, and their weight."""
        found, self._stats, weight, self._weight = self._stats, {}, self._weight, 0.0
        self.spoilt = False
        return found, weight

    def _collect(
        self, recorder: Recorder, out: Tensor, stacks: Iterable[Tensor], weight: Tensor | float, partly: bool = False
    ) -> None:
        """Pull the cotangents back to every layer and add up; `partly` where the loss passes over some items."""
        live = {name: p for name, p in self._own.items() if p.requires_grad}
        try:
            recorder.check(out, {name: live[name] for name in self._layers if name in live})
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}{self._remedy(out)}") from None
        free = {name: live[name] for name in self._free if name in live}
        found: Statistics = {}

        def captured() -> Iterator[list[Capture]]:
            for stack in stacks:
                stack = stack.to(out)
                if self.fisher != "mc":
                    # Random signs part the samples where a gradient is a sum over them: in parameters without a layer
                    # rule, and in layers called once for all samples, as an embedding of positions is.
                    stack = stack * self._signs(stack)
                yield recorder.captures(out, stack)
                for cotangent in stack if free else ():
                    add_up(found, _squares(out, free, cotangent))

        with torch.no_grad(), full_precision(), tensor_cores(self.tf32), _kept_buffers(self.model):
            add_up(found, collect(self.collector, captured(), len(out), self.bases, partly))
        if not finite(found.values()):  # others of the step are none the worse for it
            self.spoilt = True
            return
        add_up(self._stats, found)
        self._weight = self._weight + weight

    def _remedy(self, out: Tensor) -> str:
        """What can be done where parameters reach the outputs other than by the calls of this pass."""
        others = [seen.recorder for seen in self._seen if seen.recorder is not None]
        if any(recorder.calls and recorder.reaches(out) for recorder in others):
            return (
                ": the model was called on outputs of its own; make all of these calls the forward pass of one module, "
                "and give KFAC that"
            )
        return "; name it in diagonal=[...], to do without Kronecker factors"

    def _cotangents(self, loss: Any, out: Tensor, batch: Any) -> Iterable[Tensor]:
        """Stacks (r, *out.shape) whose outer products add up to the matrix in the outputs."""
        held = _held(out)
        if self.fisher == "type2":
            return loss.roots(held, batch, 32)  # type: ignore[no-any-return]
        if self.fisher == "empirical":
            return [item_cotangents(loss, held, batch)[None]]
        drawn = [loss.draw(held, batch, self._uniforms(out.device)) for _ in range(self.num_samples)]
        return [torch.stack(drawn) / math.sqrt(self.num_samples)]

    def _uniforms(self, device: torch.device) -> Callable[[int, str], Tensor]:
        """The generator: numbers keyed by the seed and by how often labels were drawn before."""
        self.draws += 1
        key = ("kfac", self.seed, self.draws)
        return lambda count, stream: random_uniform(count, (*key, stream), device, self.world.rank * count)

    def _signs(self, stack: Tensor) -> Tensor:
        """A sign for each cotangent and sample."""
        self.draws += 1
        key = ("kfac", self.seed, self.draws, "sign")
        count, size = stack.shape[:2]
        signs = random_signs(count * size * self.world.size, key, stack.device).to(stack)
        own = signs.reshape(count, self.world.size, size)[:, self.world.rank]
        return own.reshape(count, size, *[1] * (stack.ndim - 2))


@contextlib.contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """What checkpointing recomputes in our passes would update the statistics of batch normalisations again."""
    held = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in held:
            buffer.data.copy_(value)  # of the data: the graph may hold this version of the buffer


def _squares(out: Tensor, params: Mapping[str, Tensor], cotangent: Tensor) -> Statistics:
    """Squared gradients of parameters that no layer rule explains."""
    grads = torch.autograd.grad(out, tuple(params.values()), cotangent, retain_graph=True, allow_unused=True)
    return {
        f"{name}|square": g.to(torch.promote_types(g.dtype, torch.float32)).square().reshape(1, -1, 1)
        for name, g in zip(params, grads, strict=True)
        if g is not None
    }


def _held(out: Tensor) -> Tensor:
    """Outputs apart from their graph, in a precision in which items can be counted."""
    return out.detach().to(torch.promote_types(out.dtype, torch.float32))


def _weight(loss: Loss, out: Tensor, batch: Any) -> Tensor:
    return loss.weight(_held(out), batch)


def _num_items(loss: Loss, out: Tensor) -> int:
    """What a mean over the outputs of a batch is divided by, if nothing is ignored or weighted."""
    if isinstance(loss, CrossEntropy):
        return out.numel() // out.shape[_class_dim(loss, out)]
    return len(out)


def _idle(loss: Loss, out: Tensor, grad: Tensor) -> Tensor | None:
    """Items of a cross-entropy that no gradient came to (*out.shape without classes), as to padding; None if to all.

    The largest entry of p - e_target, for an item that counts, is at least 1 - max p, whatever its target. Items so
    sure that this is lost in the precision of the gradient are no padding: they count, and have no curvature.
    """
    if not isinstance(loss, CrossEntropy) or out.ndim < 2:
        return None
    dim = _class_dim(loss, out)
    doubt = -torch.expm1(out.detach().float().log_softmax(dim).amax(dim))
    seen = doubt * grad.abs().max() > torch.finfo(grad.dtype).smallest_normal
    idle = (grad == 0).all(dim) & seen
    return idle if 0 < int(idle.sum()) < idle.numel() else None


def _class_dim(loss: CrossEntropy, out: Tensor) -> int:
    return 1 if loss.class_dim is None else loss.class_dim % out.ndim


def _refuse_one_class(loss: Loss, output: Any) -> None:
    known = isinstance(loss, CrossEntropy) and isinstance(output, Tensor) and output.ndim > 1
    if known and output.shape[_class_dim(loss, output)] == 1:  # type: ignore[arg-type]
        raise ValueError("cross-entropy of one class has no curvature; a binary network has KFAC(..., loss='bce')")


def _obstacle(loss: Loss, fisher: FisherKind, output: Any) -> str | None:
    """Why outputs and targets must be shown, or None where the outputs are enough."""
    if not isinstance(output, Tensor):
        return f"the model gives a {type(output).__name__}, not a tensor"
    if isinstance(loss, CrossEntropy) and output.ndim > 2 and loss.class_dim is None:
        return (
            f"where the classes are in outputs {tuple(output.shape)} is not known without targets; say "
            "loss=ritz.losses.CrossEntropy(class_dim=...), or"
        )
    if isinstance(loss, CrossEntropy) and loss.ignore_index >= 0:
        return f"which items are left out, those of class {loss.ignore_index}, is not known without targets"
    weighted = isinstance(loss, CrossEntropy) and loss.class_weight is not None
    if weighted or (fisher != "empirical" and _blank(loss, output) is None):
        return f"the curvature of {type(loss).__name__}, as it was given, depends on the targets"
    return None


def _blank(loss: Loss, out: Tensor, idle: Tensor | None = None) -> tuple[Loss, Any] | None:
    """The loss with a target made up, where the matrix in the outputs does not depend on it; else None.

    Items that are `idle` are left out.
    """
    target: Tensor
    if isinstance(loss, CrossEntropy) and loss.class_weight is None:
        dim = _class_dim(loss, out)
        target = torch.zeros(*out.shape[:dim], *out.shape[dim + 1 :], dtype=torch.long, device=out.device)
        if idle is not None:
            target[idle] = loss.ignore_index
        return dataclasses.replace(loss, class_dim=dim, target=default_target), (None, target)
    if isinstance(loss, SquaredError) or (isinstance(loss, BinaryCrossEntropy) and loss.pos_weight is None):
        return dataclasses.replace(loss, target=default_target), (None, torch.zeros_like(out))
    return None
