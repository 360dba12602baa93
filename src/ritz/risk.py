"""The empirical risk: a model, a loss and data, and THE loop over mini-batches.

    L(w) = sum_i loss_i(w) / sum_i weight_i

Everything that ritz measures is a sum over items of something that one batch gives: the loss, its gradient, a product
with a curvature matrix, a per-sample number. `Risk.fold` walks the batches, and it alone.
"""

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .batches import Batch, Batches, isolated_rng
from .errors import NonFiniteError, UnsupportedError
from .layers import Capture, Recorder
from .losses import Loss, Target, as_loss
from .plan import Plan
from .reducers import Mean, Reducer
from .space import ParamSpace, select

Params = dict[str, Tensor]
Forward = Callable[[nn.Module, Any], Tensor]
BatchLoss = Callable[[nn.Module, Any], tuple[Tensor, Any]]
Progress = Callable[[int, int], None]  # (batches done, batches in all or 0 when not known)
Mode = Literal["eval", "train"]

log = logging.getLogger(__name__)


class Risk:
    """The mean loss of a model over data, as a function of its weights.

    Args:
        model: Any module. Its weights are read live; nothing of it is ever changed.
        loss: nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), a callable(output, target) that gives the
            mean over the batch, or a `ritz.Loss`.
        data: A tuple of tensors (X, y), a DataLoader, or a re-iterable of batches.
        forward: `forward(model, batch)` -> outputs, for batches that are not (inputs ..., target).
        target: `target(batch)`, where the target is not the last entry of a tuple or the "labels" of a dictionary.
        batch_loss: Instead of `loss`: `batch_loss(model, batch)` -> (sum over items, weight), for losses that are not a
            function of outputs (physics-informed ones). Such a risk has a Hessian but no Gauss-Newton matrix.
        params: Glob or globs of parameter names; frozen parameters are never among them.
        mode: "eval", or "train" for BatchNorm by batch statistics (its running buffers stay as they are).
        dropout: Keep dropout on, with one mask per batch frozen for all products.
        batch_size: For data given as tensors.
        dtype, device: Where to compute, if not where the model is.
        plan: How to compute.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> risk = Risk(model, torch.nn.MSELoss(), (X, torch.zeros(2, 1)))
        >>> risk.dim, risk.num_samples, risk.loss(), risk.gradient().tolist()
        (2, 2, 2.5, [1.0, 4.0])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any = None,
        data: Any = None,
        *,
        forward: Forward | None = None,
        target: Target | None = None,
        batch_loss: BatchLoss | None = None,
        params: str | Sequence[str] = "*",
        mode: Mode = "eval",
        dropout: bool = False,
        batch_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        plan: Plan | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if (loss is None) == (batch_loss is None):
            raise ValueError("give either loss= or batch_loss=, one of the two")
        if mode not in ("eval", "train"):
            raise ValueError(f"mode must be 'eval' or 'train', got {mode!r}")
        self.model = _unwrapped(model)
        self.names = _chosen(self.model, params)
        first = dict(self.model.named_parameters())[self.names[0]]
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        self.mode, self.dropout, self.plan = mode, dropout, plan or Plan()
        self._loss = None if loss is None else as_loss(loss, target)
        self._caller = _Caller(self.model, forward or _default_forward, batch_loss)
        self._data_dtype = dtype
        self.batches = self._batched(data, batch_size)
        self._override: Params | None = None
        self._state_key: Hashable = None
        self._state: tuple[Params, Params] = ({}, {})
        self._checked: Hashable = None
        self._piece: int | None = self.plan.micro_batch  # shrinks when memory runs out
        self.notes: tuple[str, ...] = ()

    # ------------------------------------------------------------------------------------- what it is

    @property
    def space(self) -> ParamSpace:
        """Names and shapes of the parameters, in the order of the flat vector."""
        own = dict(self.model.named_parameters())
        return ParamSpace(self.names, tuple(own[name].shape for name in self.names))

    @property
    def dim(self) -> int:
        """The number of parameters, P."""
        return self.space.dim

    @property
    def num_samples(self) -> int:
        """The number of samples, N."""
        return self.batches.num_samples

    @property
    def opaque(self) -> bool:
        """Whether the loss is not known as a function of outputs."""
        return self._loss is None

    @property
    def output_loss(self) -> Loss:
        """The loss as a function of outputs.

        Raises:
            UnsupportedError: For a `batch_loss` risk, which has none.
        """
        if self._loss is None:
            raise UnsupportedError(
                "this risk was given as batch_loss=, so its outputs are not known: Gauss-Newton and Fisher matrices, "
                "margins and per-sample numbers do not exist for it; give loss= and forward= instead, or use ritz.Hessian"
            )
        return self._loss

    @property
    def splittable(self) -> bool:
        """Whether a batch may be cut without changing the sum."""
        return self._loss is not None and self._loss.separable and self.mode == "eval" and not self.dropout

    def convention(self) -> str:
        """Which data, which mode: for the convention of every number."""
        parts = [f"mean over {self.num_samples} samples", f"{self.mode} mode", str(self.dtype).removeprefix("torch.")]
        return ", ".join(parts + list(self.notes))

    def version(self) -> Hashable:
        """Changes whenever a weight or buffer does."""
        if self._override is not None:
            return tuple((id(p), p._version) for p in self._override.values())
        return tuple((t.data_ptr(), t._version) for t in _tensors(self.model))

    def params(self) -> Params:
        """The chosen parameters as they are now, detached, in the precision and on the device of the risk."""
        return self._current()[0]

    # -------------------------------------------------------------------------------- other weights, data

    def at(self, params: Mapping[str, Tensor] | Tensor) -> "Risk":
        """The same risk at other weights: named tensors for some or all of the parameters, or a flat vector (dim,)."""
        if isinstance(params, Tensor):
            if params.shape != (self.dim,):
                raise ValueError(f"expected a flat vector (dim={self.dim},), got {tuple(params.shape)}")
            params = self.space.split(params)
        known = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"the model has no parameter or buffer named {name!r}")
            if value.shape != known[name].shape:
                raise ValueError(f"{name} has shape {tuple(known[name].shape)}, got {tuple(value.shape)}")
        moved = self._copy()
        moved._override = {**(self._override or {}), **{name: p.detach().clone() for name, p in params.items()}}
        return moved

    def on(self, data: Any, batch_size: int | None = None) -> "Risk":
        """The same risk on other data."""
        other = self._copy()
        if isinstance(data, Batches):
            other.batches = data
        else:
            other.batches = self._batched(data, batch_size)
        return other

    def restrict(self, params: str | Sequence[str]) -> "Risk":
        """The same risk as a function of some of its parameters; the others are held."""
        part = self._copy()
        part.names = tuple(select(self.names, params))
        return part

    def _batched(self, data: Any, batch_size: int | None) -> Batches:
        """Data as batches; with batch statistics the batch is part of the function: tensors are one, unless said."""
        if self.mode == "train" and batch_size is None and isinstance(data, tuple) and data:
            batch_size = len(data[0]) or None
        return Batches(
            data, batch_size=batch_size, device=self.device, dtype=self._data_dtype, cache=self.plan.cache
        )

    def _copy(self) -> "Risk":
        """A risk that shares model, loss and batches, and has its own caches."""
        other = object.__new__(Risk)
        other.__dict__.update(self.__dict__)
        other._state_key, other._checked = None, None
        return other

    # -------------------------------------------------------------------------------- one batch, as a function

    def output(self, params: Params, batch: Batch) -> Tensor:
        """What the model gives for a batch at the given parameters; to be called inside `session`."""
        return self._call(params, batch, self._caller.forward_only)  # type: ignore[no-any-return]

    def total(self, params: Params, batch: Batch) -> Tensor:
        """The SUM of the loss over a batch."""
        if self._loss is None:
            return self._call(params, batch, self._caller.whole)[0]  # type: ignore[no-any-return]
        return self._loss.total(self.output(params, batch), batch.data)

    def weight(self, params: Params, batch: Batch) -> Tensor:
        """What the sum over a batch is to be divided by."""
        return self.total_and_weight(params, batch)[1]

    def total_and_weight(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and weight from one forward pass."""
        if self._loss is None:
            total, weight = self._call(params, batch, self._caller.whole)
            return total, torch.as_tensor(weight, device=self.device, dtype=torch.float64)
        out = self.output(params, batch)
        return self._loss.total(out, batch.data), self._loss.weight(out, batch.data)

    def _call(self, params: Params, batch: Batch, module: nn.Module) -> Any:
        """One functional call of the model, with frozen dropout masks where dropout is on."""
        state = {f"model.{name}": p for name, p in {**self._current()[1], **params}.items()}
        if not self.dropout:
            return functional_call(module, state, (batch.data,))
        torch.manual_seed(batch.index)  # inside `session`, which puts the generator back
        return functional_call(module, state, (batch.data,))

    def captured(
        self, params: Params, batch: Batch, cotangents: Callable[[Tensor], Iterable[Tensor]]
    ) -> tuple[Tensor, Iterator[list[Capture]]]:
        """One forward pass, and for each stack of cotangents the input and output gradient of every layer.

        Only modules that hold chosen parameters are looked at; a module called twice is there twice. To be called
        inside `session`; the hooks are gone when this returns.

        Args:
            params: The chosen parameters.
            batch: The batch.
            cotangents: Given the outputs, stacks (r, *out.shape) of them, each one backward pass for r of them.

        Raises:
            UnsupportedError: If a chosen parameter reaches the outputs other than through a call of its module.

        Returns:
            The outputs, and one list of `Capture` for each stack.
        """
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad(), Recorder(self.model, self.names) as recorder:
            out = self.output(leaves, batch)
        recorder.check(out, leaves)
        held = out.detach()
        return held, (recorder.captures(out, stack) for stack in cotangents(held))

    def _current(self) -> tuple[Params, Params]:
        """(chosen parameters, everything else) as of now; cast copies are kept until a weight moves."""
        key = self.version()
        if key != self._state_key:
            own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
            own.update(self._override or {})
            placed = {name: self._placed(t) for name, t in own.items()}
            self._state = ({n: placed[n] for n in self.names}, {n: t for n, t in placed.items() if n not in self.names})
            self._state_key = key
        return self._state

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

    # ------------------------------------------------------------------------------------------ the loop

    def fold(
        self,
        fn: Callable[[Params, Batch], tuple[Tensor, Tensor]],
        into: Reducer,
        *,
        progress: Progress | None = None,
        batches: Sequence[Batch] | None = None,
    ) -> Any:
        """Walk the data once: `fn(params, batch)` -> (total, weight) for each batch, put together by a reducer.

        A batch that does not fit in memory is taken in halves, and so are those after it.
        """
        params = self.params()
        with self.session():
            for done, batch in enumerate(self.batches if batches is None else batches, 1):
                into.add(*into.join(self._pieces(fn, params, batch)))
                if progress is not None:
                    progress(done, len(batches) if batches is not None else 0)
        return into.result()

    def _pieces(
        self, fn: Callable[[Params, Batch], tuple[Tensor, Tensor]], params: Params, batch: Batch
    ) -> list[tuple[Tensor, Tensor]]:
        """`fn` on a batch, whole or in pieces as small as memory asks for."""
        if self._piece is not None and not self.splittable:
            raise UnsupportedError(
                "micro_batch cannot be used here: with batch statistics, dropout or an opaque loss a batch must stay whole"
            )
        while True:
            most = self._piece or batch.size
            try:
                return [fn(params, piece) for piece in batch.pieces(most)]
            except torch.OutOfMemoryError:
                smaller = min(most, batch.size) // 2
                if smaller < 1 or not self.splittable:
                    raise
            self._piece = smaller  # outside the except block, whose traceback would hold the memory
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            log.info("out of memory: batches are now taken in pieces of %d samples", smaller)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The model as this risk sees it: mode set, kernels differentiable twice, generators put back after."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(isolated_rng(device=self.device))
            stack.enter_context(_mode(self.model, self.mode, self.dropout))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_no_fused_layers(self.model, self.device))
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # each product switches on what it needs
            yield

    # ------------------------------------------------------------------------------------- loss, gradient

    def loss(self) -> float:
        """The mean loss over the data."""
        self.check()
        value: Tensor = self.fold(self.total_and_weight, Mean())
        return float(value)

    def gradient(self) -> Tensor:
        """The gradient of the mean loss, (dim,)."""
        self.check()
        value: Tensor = self.fold(self.batch_gradient, Mean())
        return value

    def batch_gradient(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradient of the sum over one batch (dim,), and the weight of the batch."""
        grads, weight = torch.func.grad(self.total_and_weight, has_aux=True)(params, batch)
        return self.space.join(grads), weight

    # ------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Before any work: finite weights and losses, a loss that adds up, a forward pass that repeats itself.

        Done once for the weights as they are; costs one forward pass over the data.
        """
        key = self.version()
        if key == self._checked:
            return
        for name, p in self.params().items():
            if not bool(p.isfinite().all()):
                raise NonFiniteError(f"parameter {name} is not finite; the network has diverged, load other weights")
        if self.mode == "train" and not self.batches.ordered and not self._settled():
            raise UnsupportedError(
                "mode='train' with a shuffling loader: with batch statistics the batches are part of the function; "
                "fix them with data=list(loader)"
            )
        with self.session():
            for batch in self.batches:
                self._check_batch(batch)
        self._checked = key

    def _settled(self) -> bool:
        """Whether the order of the data is known to be the same on every walk (counts and caches on first use)."""
        self.batches.prepare()
        return bool(self.batches.ordered)

    def _check_batch(self, batch: Batch) -> None:
        total, weight = self._watched(batch) if batch.index == 0 else self.total_and_weight(self.params(), batch)
        if total.ndim:
            raise ValueError(f"the loss of a batch must be one number, got shape {tuple(total.shape)}")
        if not bool(torch.isfinite(total)):
            raise NonFiniteError(
                f"the loss of batch {batch.index} (samples {batch.start} to {batch.start + batch.size - 1}) is "
                f"{float(total)}; look for NaN or infinite inputs there, or a model that has diverged"
            )
        if not float(weight) > 0 and batch.index == 0:
            raise ValueError(f"the weight of batch 0 is {float(weight)}: every target in it is ignored")
        if batch.index == 0:
            self._check_repeats(batch, total)
            if self.splittable and batch.size > 1:
                self._check_halves(batch, total, weight)

    def _watched(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The first batch: checks of values that are not repeated in products, and a look for fused attention."""
        with _AttentionWatch() as watch:
            result = self.total_and_weight(self.params(), batch)
            if self._loss is not None and hasattr(self._loss, "check"):
                self._loss.check(self.output(self.params(), batch), batch.data)
        if watch.seen and not self.notes:
            self.notes = ("attention by the math kernel",)
            log.info("attention runs through the math kernel inside products: fused ones have no second derivative")
        return result

    def _check_repeats(self, batch: Batch, total: Tensor) -> None:
        again = self.total(self.params(), batch)
        if not torch.allclose(again, total, rtol=_TOLERANCE.get(self.dtype, 1e-2), atol=0):
            raise UnsupportedError(
                f"the same batch gave loss {float(total):.8g}, then {float(again):.8g}: the forward pass is random; "
                "dropout modules are switched off, so look for noise or functional dropout with training=True"
            )

    def _check_halves(self, batch: Batch, total: Tensor, weight: Tensor) -> None:
        halves = [self.total_and_weight(self.params(), half) for half in batch.pieces((batch.size + 1) // 2)]
        parts = sum(float(t) for t, _ in halves)
        scale = abs(float(total)) + sum(abs(float(t)) for t, _ in halves)
        if abs(parts - float(total)) <= 1e3 * _TOLERANCE.get(self.dtype, 1e-2) * max(scale, 1e-30):
            return
        means = [float(t / w) for t, w in halves]
        if abs(sum(means) - float(total / weight)) <= 1e-3 * abs(float(total / weight)):
            raise ValueError(
                "the loss looks like a sum over the batch; return the mean, ritz weights batches by their size"
            )
        raise ValueError(
            f"the loss does not add up over samples: a batch of {batch.size} gives {float(total):.8g}, its two halves "
            f"{parts:.8g}. A loss or model that couples the samples of a batch has no mean over samples; give it as "
            "batch_loss= (sum, weight), or use mode='train' if BatchNorm couples them"
        )


_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


# ------------------------------------------------------------------------------------------- the model


class _Whole(nn.Module):
    """A module around the user's `fn(model, batch)`, so that `functional_call` reaches what it calls."""

    def __init__(self, model: nn.Module, fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self.fn = model, fn

    def forward(self, data: Any) -> Any:
        return self.fn(self.model, data)


class _Caller:
    """The two ways to call the model: for its outputs, and for an opaque loss."""

    def __init__(self, model: nn.Module, forward: Forward, batch_loss: BatchLoss | None) -> None:
        self.forward_only = _Whole(model, _checked_forward(forward))
        self.whole = _Whole(model, _checked_batch_loss(batch_loss)) if batch_loss is not None else self.forward_only


def _default_forward(model: nn.Module, batch: Any) -> Any:
    """model(*inputs) for a batch (inputs ..., target)."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return model(*batch[:-1])
    raise ValueError(
        f"a batch is a {type(batch).__name__}, not (inputs, target); say how the model reads it: "
        "forward=lambda model, batch: model(**batch).logits"
    )


def _checked_forward(forward: Forward) -> Forward:
    def call(model: nn.Module, batch: Any) -> Tensor:
        out = forward(model, batch)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"the model returned a {type(out).__name__}, not a tensor; pick the outputs: "
                "forward=lambda model, batch: model(...).logits"
            )
        return out

    return call


def _checked_batch_loss(batch_loss: BatchLoss) -> BatchLoss:
    def call(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        result = batch_loss(model, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"batch_loss must return (sum over items, weight), got {type(result).__name__}")
        if not isinstance(result[0], Tensor) or result[0].ndim:
            raise ValueError("batch_loss must return a scalar tensor as the sum over items")
        return result

    return call


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel or torch.compile."""
    for name in ("module", "_orig_mod"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and type(model).__name__ in _WRAPPERS:
            return _unwrapped(inner)
    return model


_WRAPPERS = {"DataParallel", "DistributedDataParallel", "OptimizedModule"}


def _chosen(model: nn.Module, patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Names of the parameters that match and are not frozen."""
    every = dict(model.named_parameters())  # tied parameters come once
    if not every:
        raise ValueError("the model has no parameters")
    names = [name for name in select(every, patterns) if every[name].requires_grad]
    if not names:
        raise ValueError(f"every parameter that matches {patterns!r} is frozen (requires_grad=False)")
    return tuple(names)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@contextlib.contextmanager
def _mode(model: nn.Module, mode: Mode, dropout: bool) -> Iterator[None]:
    """Evaluation mode, save for BatchNorm by batch statistics and dropout where they are asked for."""
    modules = list(model.modules())
    training = [m.training for m in modules]
    norms = [m for m in modules if isinstance(m, nn.modules.batchnorm._NormBase)] if mode == "train" else []
    tracking = [m.track_running_stats for m in norms]
    try:
        for m in modules:
            m.training = dropout and isinstance(m, nn.modules.dropout._DropoutNd)
        for norm in norms:  # without tracking the buffers are neither read nor written
            norm.training, norm.track_running_stats = True, False
        yield
    finally:
        for m, was in zip(modules, training, strict=True):
            m.training = was
        for norm, was in zip(norms, tracking, strict=True):
            norm.track_running_stats = was


@contextlib.contextmanager
def _no_fused_layers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Fused transformer and recurrent kernels off: they have no second derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    with contextlib.ExitStack() as stack:
        if recurrent and device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if recurrent and device.type == "cpu":
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


class _AttentionWatch(TorchFunctionMode):
    """Notices a call of scaled_dot_product_attention."""

    seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.seen = True
        return func(*args, **(kwargs or {}))
