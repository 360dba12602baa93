"""The empirical risk: a model, a loss and data, and THE loop over mini-batches.

    L(w) = sum_i loss_i(w) / sum_i weight_i

Everything that ritz measures is a sum over items of something that one batch gives: the loss, its gradient, a product
with a curvature matrix, a per-sample number. `Risk.fold` walks the batches, and it alone.
"""

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .batches import Batch, Batches, is_tensors, map_tensors, seed_torch, tensors_of
from .errors import NonFiniteError, UnsupportedError
from .layers import Capture, Recorder
from .losses import CallableLoss, Loss, Target, as_loss
from .modes import AttentionWatch, BatchLoss, Caller, Forward, Mode, chosen, studied, unwrapped
from .plan import Plan, Route
from .reducers import Mean, Reducer
from .replay import Recordings, is_static, place_of, settings_of
from .space import ParamSpace, select

Params = dict[str, Tensor]
Progress = Callable[[int, int], None]  # (batches done, batches in all or 0 when not known)

log = logging.getLogger(__name__)


class Risk:
    """The mean loss of a model over data, as a function of its weights.

    Args:
        model: Any module. Its weights are read live; nothing of it is ever changed. Writing to `weight.data` goes
            unnoticed by torch's version counters, and so by copies in another precision: use `torch.no_grad()` instead.
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
        if batch_loss is not None and (forward is not None or target is not None):
            raise ValueError("batch_loss= calls the model itself: forward= and target= have no part in it")
        if mode not in ("eval", "train"):
            raise ValueError(f"mode must be 'eval' or 'train', got {mode!r}")
        self.model = unwrapped(model)
        self.names = chosen(self.model, params)
        first = dict(self.model.named_parameters())[self.names[0]]
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        self.mode, self.dropout, self.plan = mode, dropout, plan or Plan()
        self._loss = None if loss is None else as_loss(loss, target)
        self._caller = Caller(self.model, forward, batch_loss)
        self._data_dtype = dtype
        self.batches = self._batched(data, batch_size)
        self._override: Params | None = None
        self._state_key: Hashable = None
        self._state: tuple[Params, Params] = ({}, {})
        self._checked: Hashable = None
        self._piece: int | None = self.plan.micro_batch  # shrinks when memory runs out
        self._writes: bool | None = None  # whether the model writes to its inputs; not known before the first call
        if self._piece is not None and not self.splittable:
            raise UnsupportedError(
                "micro_batch cannot be used here: with batch statistics, dropout or an opaque loss a batch stays whole"
            )
        self.routes: dict[tuple[str, ...], Route] = {}  # of Hessian products, by parameters, once they are chosen
        self.recordings = Recordings()  # of products; shared by risks of the same outputs, as the routes are
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
                "margins and per-sample numbers do not exist for it; give loss= and forward=, or use ritz.Hessian"
            )
        return self._loss

    @property
    def splittable(self) -> bool:
        """Whether a batch may be cut without changing the sum."""
        return self._loss is not None and self._loss.separable and self.mode == "eval" and not self.dropout

    @property
    def replays(self) -> bool:
        """Whether products of batches are recorded, as `Plan.replay` says."""
        if self.plan.replay is False or self.dropout:  # masks belong to the batch
            return False
        known = self._caller.plain and not isinstance(self._loss, CallableLoss)
        return self.plan.replay or (self.device.type == "cuda" and known and is_static(self.model.modules()))

    def place(self) -> Hashable:
        """Where weights and buffers lie and what the modules are set to: what a recording depends on."""
        return self.names, place_of(self.state().values()), settings_of(self.model.modules())

    def convention(self) -> str:
        """Which data, which mode: for the convention of every number."""
        parts = [f"mean over {self.num_samples} samples", f"{self.mode} mode", str(self.dtype).removeprefix("torch.")]
        return ", ".join(parts + list(self.notes))

    def version(self) -> Hashable:
        """Changes whenever a weight or buffer does."""
        return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in self._live().values())

    def params(self) -> Params:
        """The chosen parameters as they are now, detached, in the precision and on the device of the risk."""
        return self._current()[0]

    def state(self) -> Params:
        """Every parameter and buffer as it is now, chosen or not, in the precision and on the device of the risk."""
        chosen, others = self._current()
        return {**chosen, **others}

    # -------------------------------------------------------------------------- other weights, data, outputs

    def at(self, params: Mapping[str, Tensor] | Tensor) -> "Risk":
        """The same risk at other weights: named tensors for some or all of the parameters, or a flat vector (dim,)."""
        if isinstance(params, Tensor):
            if params.shape != (self.dim,):
                raise ValueError(f"expected a flat vector (dim={self.dim},), got {tuple(params.shape)}")
            params = self.space.split(params)
        known = self._live()
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

    def through(self, fn: Callable[[Tensor, Any], Tensor], note: str = "") -> "Risk":
        """The same risk with `fn(outputs, batch)` in the place of the outputs; `note` goes into the convention."""
        _ = self.output_loss  # an opaque loss has no outputs
        plain = self._caller.forward_only.fn
        other = self._copy()
        other._caller = Caller(self.model, lambda model, batch: fn(plain(model, batch), batch), None)
        other.routes, other.recordings = {}, Recordings()
        other.notes = (*self.notes, note) if note else self.notes
        return other

    def _batched(self, data: Any, batch_size: int | None) -> Batches:
        """Data as batches; with batch statistics the batch is part of the function: tensors are one, unless said."""
        if self.mode == "train" and batch_size is None and is_tensors(data) and data[0].ndim:
            batch_size = len(data[0]) or None
        return Batches(data, batch_size=batch_size, device=self.device, dtype=self._data_dtype, cache=self.plan.cache)

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
        held, buffers = self._current()[1], {name for name, _ in self.model.named_buffers()}
        # a forward pass may write to buffers, so it is given copies, unless the caller gave some
        state = {name: t.clone() if name in buffers and name not in params else t for name, t in held.items()}
        state = {f"model.{name}": t for name, t in {**state, **params}.items()}
        if self.dropout:
            seed_torch(batch.index, self.device)  # inside `session`, which puts the generators back
        # a model that writes to its inputs is given copies; whether it does is seen on the first call
        data = map_tensors(batch.data, Tensor.detach if self._writes is False else Tensor.clone)
        with torch.enable_grad():  # for a model that differentiates in its inputs; weights ask for it themselves
            result = functional_call(module, state, (data,))
        if self._writes is None:
            self._writes = any(t._version for t in tensors_of(data))
        return result

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
            with torch.inference_mode(False):
                placed = {name: self._placed(t) for name, t in self._live().items()}
            self._state = ({n: placed[n] for n in self.names}, {n: t for n, t in placed.items() if n not in self.names})
            self._state_key = key
        return self._state

    def _live(self) -> Params:
        """Every parameter and buffer of the model as it is now, or as `at` says."""
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {**own, **(self._override or {})}

    def _placed(self, tensor: Tensor) -> Tensor:
        placed = tensor.detach().to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)
        return placed.clone() if placed.is_inference() else placed

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
        with studied(self.model, self.mode, self.dropout, self.device):
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
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():  # not by torch.func, inside which a model cannot differentiate in its inputs
            total, weight = self.total_and_weight(leaves, batch)
        if not total.requires_grad:  # none of the chosen parameters is used
            return total.new_zeros(self.dim), weight
        grads = torch.autograd.grad(total, tuple(leaves.values()), materialize_grads=True)
        return torch.cat([g.flatten() for g in grads]), weight.detach()

    # ------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Before any work: finite weights and losses, a loss that adds up, a forward pass that repeats itself.

        Done once for the weights as they are; costs one forward pass over the data.
        """
        key = self.version()
        if key == self._checked:
            return
        masks = {name for name, _ in self.model.named_buffers() if not name.endswith(("running_mean", "running_var"))}
        for name, tensor in (*self._current()[0].items(), *self._current()[1].items()):
            # a buffer may well be infinite, as a causal mask is, but not the statistics of a normalisation
            if bool(tensor.isnan().any() if name in masks else (~tensor.isfinite()).any()):
                raise NonFiniteError(f"{name} is not finite; the network has diverged, load other weights")
        if self.mode == "train" and not self.batches.ordered and not self._settled():
            raise UnsupportedError(
                "mode='train' with a shuffling loader: with batch statistics the batches are part of the function; "
                "fix them with data=list(loader)"
            )
        mean = Mean()
        self.fold(self._checked_total, mean)
        if mean.weight is None or not float(mean.weight) > 0:
            raise ValueError("the weights of the samples add up to 0: every target is ignored")
        self._checked = key

    def _settled(self) -> bool:
        """Whether the order of the data is known to be the same on every walk (counts and caches on first use)."""
        self.batches.prepare()
        return bool(self.batches.ordered)

    def _checked_total(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and weight of a batch, or of a piece of one, after a look at them."""
        first = batch.start == 0
        total, weight = self._watched(params, batch) if first else self._looked_at(params, batch)
        total = total.detach()
        if total.ndim:
            raise ValueError(f"the loss of a batch must be one number, got shape {tuple(total.shape)}")
        if not bool(torch.isfinite(total)):
            raise NonFiniteError(
                f"the loss of batch {batch.index} (samples {batch.start} to {batch.start + batch.size - 1}) is "
                f"{float(total)}; look for NaN or infinite inputs there, or a model that has diverged"
            )
        if not float(weight) >= 0:
            raise ValueError(f"the weight of batch {batch.index} is {float(weight)}; a weight counts items")
        if first:
            self._check_repeats(params, batch, total, weight)
            if self.splittable and batch.size > 1:
                self._check_halves(params, batch, total, weight)
        return total, weight

    def _looked_at(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and weight, and a look at values that products do not repeat: labels that are no class."""
        if self._loss is None:
            return self.total_and_weight(params, batch)
        out = self.output(params, batch)
        if hasattr(self._loss, "check"):
            self._loss.check(out, batch.data)
        return self._loss.total(out, batch.data), self._loss.weight(out, batch.data)

    def _refuse_hidden_weights(self, params: Params, batch: Batch) -> None:
        """Refuse a loss that reads the weights by itself: that part of it would be a constant in every product."""
        if self._loss is None:
            return
        out = self.output(params, batch).detach()
        with torch.enable_grad():
            total = self._loss.total(out, batch.data)
        if total.requires_grad:
            raise UnsupportedError(
                "the loss reads weights beside the outputs (a penalty, say), and products would not see that part; "
                "give batch_loss=lambda model, batch: (sum, weight), with the penalty computed from that model"
            )

    def _watched(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """The first batch, with a look for fused attention."""
        with AttentionWatch() as watch:
            result = self._looked_at(params, batch)
        self._refuse_hidden_weights(params, batch)
        if watch.seen and not self.notes:
            self.notes = ("attention by the math kernel",)
            log.info("attention runs through the math kernel inside products: fused ones have no second derivative")
        return result

    def _check_repeats(self, params: Params, batch: Batch, total: Tensor, weight: Tensor) -> None:
        again = self.total(params, batch).detach()
        if abs(float(again - total)) > self._slack(1.0, weight, float(total)):
            raise UnsupportedError(
                f"the same batch gave loss {float(total):.8g}, then {float(again):.8g}: the forward pass is random; "
                "dropout modules are switched off, so look for noise or functional dropout with training=True"
            )

    def _slack(self, factor: float, weight: Tensor, *totals: float) -> float:
        """Round-off between two ways to the same sum; an item of a fitted network may be all round-off."""
        sizes = sum(abs(t) for t in totals)
        return factor * _TOLERANCE.get(self.dtype, 1e-2) * sizes + 16 * torch.finfo(self.dtype).eps * float(weight)

    def _check_halves(self, params: Params, batch: Batch, total: Tensor, weight: Tensor) -> None:
        halves = [self.total_and_weight(params, half) for half in batch.pieces((batch.size + 1) // 2)]
        totals = [float(t.detach()) for t, _ in halves]
        parts = sum(totals)
        if abs(parts - float(total)) <= self._slack(1e3, weight, float(total), *totals):
            return
        means = [t / float(w) if w else 0.0 for t, (_, w) in zip(totals, halves, strict=True)]
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
