"""The empirical risk: a model, a loss and data.

    L(w) = sum_i loss_i(w) / sum_i weight_i

Everything that ritz measures is a sum over items of something that can be computed for one batch: the loss, its
gradient, a product with a curvature matrix, a per-sample number. Only `Risk.fold` iterates over batches; the
implementation is in `walks`.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import walks
from .batches import Batch, Batches, is_tensors, map_tensors, seed_torch, tensors_of
from .captures import Capture, Recorder
from .comm import SELF, Group, world
from .diagnoses import refuse_gradient
from .errors import UnsupportedError
from .losses import CallableLoss, Loss, Target, as_loss
from .modes import BatchLoss, Caller, Forward, Mode, Whole, chosen, studied, unwrapped
from .plan import Plan, Route
from .reducers import Mean, Reducer
from .sameness import Settings, is_static
from .sharded import ShardedModel, is_sharded
from .shares import leader_of
from .shortcuts import Shortcuts
from .soundness import examine
from .space import ParamSpace, select
from .weights import Placed, Weights, first_names, modules_of

Params = dict[str, Tensor]
Progress = Callable[[int, int], None]  # (batches done, batches in all or 0 when not known)

T = TypeVar("T")


class Risk:
    """The mean loss of a model over data, as a function of its weights.

    Args:
        model: Any module. Its current weights are read at each use; the model is never changed. torch's version
            counters do not detect writes to `weight.data`, so copies in another precision miss them: write under
            `torch.no_grad()` instead. In the same way, results kept for products on a GPU miss data that are changed
            through `.data` or NumPy.
        loss: nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), a callable(output, target) that returns the
            mean over the batch, or a `ritz.Loss`.
        data: A tuple of tensors (X, y), a DataLoader, or a re-iterable of batches.
        forward: `forward(model, batch)` -> outputs, for batches that are not (inputs ..., target).
        target: `target(batch)`, if the target is not the last entry of a tuple or the "labels" of a dictionary.
        batch_loss: Instead of `loss`: `batch_loss(model, batch)` -> (sum over items, weight), for losses that are not a
            function of outputs (physics-informed ones). Such a risk has a Hessian but no Gauss-Newton matrix.
        params: Glob or globs of parameter names; frozen parameters are always excluded.
        mode: "eval", or "train" for BatchNorm with batch statistics (its running buffers stay unchanged).
        dropout: Keep the dropout of torch's own modules on, with one fixed mask per batch for all products.
        batch_size: For data given as tensors.
        dtype, device: Precision and device of the computation; those of the model by default.
        plan: How to compute.
        group: The ranks that work together, if `torch.distributed` is initialised (as with torchrun and one line):
            "world", a process group, or "self" for this process alone. All ranks run the same program with the same
            weights. Every rank has every result, for all the data.
        share: Under `group`: whether `data` is this rank's share of the data, of any size. If not, all ranks pass the
            same data, and the work is divided among them, exactly. With a `DistributedSampler` (or a loader made by
            Lightning Fabric or Accelerate), the whole data set is used, without the samples that it repeats.

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
        group: Group = "world",
        share: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if (loss is None) == (batch_loss is None):
            raise ValueError("give exactly one of loss= and batch_loss=")
        if batch_loss is not None and (forward is not None or target is not None):
            raise ValueError("batch_loss= calls the model itself: leave out forward= and target=")
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
        self.world = world(group)
        self._sharded = ShardedModel(self.model, self.world) if is_sharded(self.model) else None
        self._weights, self._settings = Weights(self.model, self._sharded), Settings()
        self.batches = self._batched(data, batch_size, share)
        self._checked: Hashable = None
        self._known: dict[str, Any] | None = None  # what does not change during a session, as it was asked for
        self._piece: int | None = self.plan.micro_batch  # shrinks when memory runs out
        self._writes: bool | None = None  # whether the model writes to its inputs; not known before the first call
        if self._piece is not None and not self.splittable:
            raise UnsupportedError(
                "micro_batch cannot be used here: with batch statistics, dropout or an opaque loss a batch stays whole"
            )
        self.routes: dict[tuple[str, ...], Route] = {}  # of Hessian products, by parameters, once they are chosen
        self.forward_modes: dict[tuple[str, ...], bool] = {}  # whether that of the outputs is right, once it was seen
        self.shortcuts = Shortcuts()  # shared by risks of the same outputs, as the routes are
        self.notes: tuple[str, ...] = ()
        self._total_weight: float | None = None  # of all items; not known before the data was looked at
        self.leaves_out = False  # whether the loss passes over items, as over padding, once the data was looked at
        self.coarsest = self.dtype  # of all that a forward pass computes in, once it was looked at

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
        """Whether the loss is an opaque `batch_loss`, not a function of outputs."""
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
        """Whether a batch may be split without changing the sum."""
        return self._loss is not None and self._loss.separable and self.mode == "eval" and not self.dropout

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded over ranks by FSDP2: it has outputs and gradients, but no second derivative."""
        return self._sharded is not None

    @property
    def home(self) -> torch.device:
        """Where vectors of weights are: with the weights, or for a sharded model in the memory of the host."""
        return torch.device("cpu") if self.sharded else self.device

    @property
    def replays(self) -> bool:
        """Whether products of batches are recorded, as `Plan.replay` says."""
        if self.plan.replay is False or self.dropout:  # masks belong to the batch
            return False
        return self.plan.replay or (self.device.type == "cuda" and self.static)

    @property
    def static(self) -> bool:
        """Whether each call of model and loss is known to be the same sequence of operations: nothing is the user's."""
        known = self._caller.plain and not isinstance(self._loss, CallableLoss)
        return known and self._once("static", lambda: is_static(self._modules()))

    def settings(self) -> Hashable:
        """What the modules are set to."""
        return self._once("settings", lambda: self._settings.of(self._modules()))

    def _modules(self) -> list[nn.Module]:
        """All of the model; a walk through them takes the host as long as much else of a product."""
        return self._once("modules", lambda: modules_of(self.model))

    def place(self) -> Hashable:
        """Where weights and buffers lie and what the modules are set to: what a recording depends on."""
        return self._once("place", lambda: (self.names, self._placed().place, self.settings()))

    def convention(self) -> str:
        """A mean over what, in which parameters, mode and precision: for the convention of every number.

        Example:
            >>> data = torch.eye(2), torch.tensor([0, -100])
            >>> risk = Risk(torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss(), data, params="bias")
            >>> risk.check()
            >>> risk.convention()
            'mean over 1 item of 2 samples, 3 of 9 parameters, eval mode, float32'
        """
        own = self.dim, sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        some = [] if own[0] == own[1] else [f"{own[0]} of {own[1]} parameters"]
        drops = ["dropout of torch's modules on"] if self.dropout else []
        kind = str(self.dtype).removeprefix("torch.")
        parts = [f"mean over {self._counted()}", *some, f"{self.mode} mode", *drops, kind]
        return ", ".join(parts + list(self.notes))

    def _counted(self) -> str:
        """What the mean is over: samples, their items where these are others, or both by their weights."""
        samples, weight = f"{self.num_samples} samples", self._total_weight
        if weight is None or abs(weight - self.num_samples) <= 1e-6 * weight:
            return samples
        if weight.is_integer():
            return f"{weight:.0f} item{'' if weight == 1 else 's'} of {samples}"
        return f"{samples} by weights that add up to {weight:.6g}"

    def __repr__(self) -> str:
        loss = "batch_loss" if self._loss is None else type(self._loss).__name__
        return f"Risk({type(self.model).__name__}, {self.dim:,} parameters, {loss}; {self.convention()})"

    def version(self) -> Hashable:
        """Changes whenever a weight or buffer does."""
        return self._weights.version()

    def params(self) -> Params:
        """The chosen parameters as they are now, detached, in the precision and on the device of the risk."""
        return self._placed().chosen

    def state(self) -> Params:
        """Every parameter and buffer as it is now, chosen or not, in the precision and on the device of the risk."""
        placed = self._placed()
        return {**placed.chosen, **placed.others}

    def _placed(self) -> Placed:
        """Chosen parameters and everything else, as of now."""
        return self._once("placed", lambda: self._weights.placed(self.names, self.device, self.dtype))

    def _once(self, what: str, look: Callable[[], T]) -> T:
        """What `look` finds; during a session, in which the model stays as it is, it looks once."""
        if self._known is None:
            return look()
        if what not in self._known:
            self._known[what] = look()
        found: T = self._known[what]
        return found

    # -------------------------------------------------------------------------- other weights, data, outputs

    def at(self, params: Mapping[str, Tensor] | Tensor) -> "Risk":
        """The same risk at other weights: named tensors for some or all of the parameters, or a flat vector (dim,)."""
        if isinstance(params, Tensor):
            if params.shape != (self.dim,):
                raise ValueError(f"expected a flat vector (dim={self.dim},), got {tuple(params.shape)}")
            params = self.space.split(params)
        moved = self._copy()
        moved._weights = self._weights.at(params)
        return moved

    def on(self, data: Any, batch_size: int | None = None, *, share: bool = False) -> "Risk":
        """The same risk on other data; `share` as for a new one."""
        other = self._copy()
        if isinstance(data, Batches):
            other.batches = data
        else:
            other.batches = self._batched(data, batch_size, share)
        return other

    def alone(self) -> "Risk":
        """The same risk for this process alone, if ranks work together: for work that only one rank does.

        If the data are a rank's share, this is the risk on that share.
        """
        if self.world.size == 1:
            return self
        other = self._copy()
        other.world, other.routes, other.forward_modes = SELF, dict(self.routes), dict(self.forward_modes)
        other.batches = other._batched(self.batches.source, None)
        return other

    def restrict(self, params: str | Sequence[str]) -> "Risk":
        """The same risk as a function of some of its parameters; the others are fixed."""
        part = self._copy()
        part.names = tuple(select(self.names, params, first_names(self.model)))
        return part

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Risk":
        """The same risk on another device or in another precision; the model and its weights are unchanged.

        Args:
            device: Device of the computation; unchanged if None.
            dtype: Precision of the computation and the data; unchanged if None.

        Raises:
            ValueError: If there is no such device here, or the dtype is no real floating-point one.

        Example:
            >>> risk = Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(2, 1), torch.ones(2, 1)))
            >>> risk.to(dtype=torch.float64).gradient().dtype, risk.dtype, risk.model.weight.dtype
            (torch.float64, torch.float32, torch.float32)
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point type such as torch.float64, got {dtype!r}")
        moved = self._copy()
        if device is not None:
            try:
                moved.device = torch.empty(0, device=device).device
            except (RuntimeError, AssertionError) as error:  # torch has both for a device that is not there
                why = str(error).partition("\n")[0][:160]
                raise ValueError(f"there is no device {str(device)!r} here ({why}); 'cpu' is always there") from error
        if dtype is not None:
            moved.dtype = moved.coarsest = moved._data_dtype = dtype
        moved.routes, moved.forward_modes, moved.shortcuts = {}, {}, Shortcuts()
        moved.batches = moved._batched(self.batches.source, None, self.batches.share)
        return moved

    def through(self, fn: Callable[[Tensor, Any], Tensor], note: str = "") -> "Risk":
        """The same risk with `fn(outputs, batch)` instead of the outputs; `note` is added to the convention."""
        _ = self.output_loss  # an opaque loss has no outputs
        plain = self._caller.forward_only.fn
        other = self._copy()
        other._caller = Caller(self.model, lambda model, batch: fn(plain(model, batch), batch), None)
        other.routes, other.forward_modes, other.shortcuts = {}, {}, Shortcuts()
        other.notes = (*self.notes, note) if note else self.notes
        return other

    def _batched(self, data: Any, batch_size: int | None, share: bool = False) -> Batches:
        """Data as batches; with batch statistics the batch is part of the function: tensors are one, unless said."""
        if self.mode == "train" and batch_size is None and is_tensors(data) and data[0].ndim:
            batch_size = len(data[0]) or None
        return Batches(
            data, batch_size=batch_size, device=self.device, dtype=self._data_dtype, cache=self.plan.cache,
            world=self.world, share=share,
        )  # fmt: skip

    def _copy(self) -> "Risk":
        """A risk that shares model, loss and batches, and has its own caches."""
        other = object.__new__(Risk)
        other.__dict__.update(self.__dict__)
        other._weights, other._checked, other._known = self._weights.again(), None, None
        other._total_weight = None
        return other

    # -------------------------------------------------------------------------------- one batch, as a function

    def output(self, params: Params, batch: Batch) -> Tensor:
        """The outputs of the model for a batch at the given parameters; call this inside `session`."""
        return self._call(params, batch, self._caller.forward_only)  # type: ignore[no-any-return]

    def total(self, params: Params, batch: Batch) -> Tensor:
        """The SUM of the loss over a batch."""
        if self._loss is None:
            return self._call(params, batch, self._caller.whole)[0]  # type: ignore[no-any-return]
        return self._loss.total(self.output(params, batch), batch.data)

    def weight(self, params: Params, batch: Batch) -> Tensor:
        """The weight that the sum over a batch is divided by."""
        return self.total_and_weight(params, batch)[1]

    def total_and_weight(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and weight from one forward pass."""
        return self._summed(self._call(params, batch, self._caller.whole), batch)

    def _summed(self, result: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and weight from what a call of the model gave."""
        if self._loss is None:
            total, weight = result
            return total, torch.as_tensor(weight, device=self.device, dtype=torch.float64)
        return self._loss.total(result, batch.data), self._loss.weight(result, batch.data)

    def _call(self, params: Params, batch: Batch, module: Whole) -> Any:
        """One functional call of the model, with frozen dropout masks where dropout is on."""
        if self._sharded is not None:
            with self._sharded.constant_at(self._weights.with_params(params)):
                return self._direct(batch, module)
        held, buffers = self._placed().others, self._once("buffers", lambda: set(dict(self.model.named_buffers())))
        # a forward pass may write to buffers, so it is given copies, unless the caller gave some
        state = {name: t.clone() if name in buffers and name not in params else t for name, t in held.items()}
        if self.dropout:
            seed_torch(batch.index, self.device)  # inside `session`, which puts the generators back
        # a model that writes to its inputs is given copies; whether it does is seen on the first call
        data = map_tensors(batch.data, Tensor.detach if self._writes is False else Tensor.clone)
        with torch.enable_grad():  # for a model that differentiates in its inputs; weights ask for it themselves
            result = module.at({**state, **params}, data)
        if self._writes is None:
            self._writes = any(t._version for t in tensors_of(data))
        return result

    def _direct(self, batch: Batch, module: nn.Module) -> Any:
        """A call of the model itself, as it is."""
        if self.dropout:
            seed_torch(batch.index, self.device)
        return module(map_tensors(batch.data, Tensor.clone))

    def pullback(self, params: Params, batch: Batch, cotangent: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """J'c (dim,) of a sharded model for the outputs' own cotangent c, and the weight of the batch.

        The sum over ranks is part of a backward pass there: one rank has it, and the others have zeros.
        """
        assert self._sharded is not None and self._loss is not None
        loss = self._loss

        def run() -> tuple[Tensor, Tensor, Tensor]:
            out: Tensor = self._direct(batch, self._caller.forward_only)
            with torch.no_grad():
                return out, cotangent(out.detach()) * (not batch.idle), loss.weight(out.detach(), batch.data)

        return self._led(*self._sharded.pullback(self._weights.with_params(params), self.space, run))

    def _led(self, vector: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """What is summed over ranks already, on one of them."""
        return (vector if self.world.rank == leader_of(self.batches) else torch.zeros_like(vector)).to(
            self.dtype
        ), weight

    def captured(
        self, params: Params, batch: Batch, cotangents: Callable[[Tensor], Iterable[Tensor]]
    ) -> tuple[Tensor, Iterator[list[Capture]]]:
        """One forward pass, and for each stack of cotangents the input and output gradient of every layer.

        Only modules with chosen parameters are captured; a module that is called twice appears twice. Call this inside
        `session`; the hooks are removed when it returns.

        Args:
            params: The chosen parameters.
            batch: The batch.
            cotangents: Given the outputs, stacks (r, *out.shape) of them, each one backward pass for r of them.

        Raises:
            UnsupportedError: If a chosen parameter reaches the outputs other than through a call of its module.

        Returns:
            The outputs, and one list of `Capture` for each stack.
        """
        if self.sharded:
            raise UnsupportedError(
                "the layers of a model sharded by FSDP2 cannot be observed: exact traces, sample traces and Kronecker "
                "factors need a model that is not sharded; use probes"
            )
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad(), Recorder(self.model, self.names) as recorder:
            out = self.output(leaves, batch)
        recorder.check(out, leaves)
        held = out.detach()
        return held, (recorder.captures(out, stack) for stack in cotangents(held))

    # ------------------------------------------------------------------------------------------ the loop

    def fold(
        self,
        fn: Callable[[Params, Batch], tuple[Tensor, Tensor]],
        into: Reducer,
        *,
        progress: Progress | None = None,
        batches: Sequence[Batch] | None = None,
    ) -> Any:
        """One pass over the data: `fn(params, batch)` -> (total, weight) for each batch, combined by a reducer.

        A batch that does not fit in memory is split in halves, and so are those after it. If ranks work together, each
        processes its share and all have the result; batches passed explicitly must be the same on all ranks.
        """
        return walks.fold(self, fn, into, progress, batches)

    def _pieces(
        self, fn: Callable[[Params, Batch], tuple[Tensor, Tensor]], params: Params, batch: Batch
    ) -> list[tuple[Tensor, Tensor]]:
        """`fn` on a batch, whole or in pieces as small as memory asks for."""
        return walks.pieces(self, partial(fn, params), batch)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The model as this risk uses it: mode set, kernels twice differentiable, generators restored afterwards."""
        outer = self._known
        modules = self._modules()
        with studied(modules, self.mode, self.dropout, self.device):
            self._known = {"modules": modules} if outer is None else outer
            try:
                yield
            finally:
                self._known = outer

    # ------------------------------------------------------------------------------------- loss, gradient

    def loss(self) -> float:
        """The mean loss over the data."""
        self.check()
        value: Tensor = self.fold(self.total_and_weight, Mean())
        return float(value)

    def gradient(self) -> Tensor:
        """The gradient of the mean loss, (dim,).

        Raises:
            NonFiniteError: If it is not finite; names the batch, the parameter and the dtype.
        """
        self.check()
        value: Tensor = self.fold(self.batch_gradient, Mean())
        if not bool(value.isfinite().all()):
            refuse_gradient(self)
        return value.to(self.dtype)

    def batch_gradient(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradient of the sum over one batch (dim,), and the weight of the batch."""
        if self._sharded is not None:

            def run() -> tuple[Tensor, Tensor, Tensor]:
                total, weight = self._summed(self._direct(batch, self._caller.whole), batch)
                return total, torch.zeros_like(total) if batch.idle else torch.ones_like(total), weight.detach()

            return self._led(*self._sharded.pullback(self._weights.with_params(params), self.space, run))
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():  # not by torch.func, inside which a model cannot differentiate in its inputs
            total, weight = self.total_and_weight(leaves, batch)
        if not total.requires_grad:  # none of the chosen parameters is used
            return total.new_zeros(self.dim), weight
        grads = torch.autograd.grad(total, tuple(leaves.values()), materialize_grads=True)
        return torch.cat([g.flatten() for g in grads]), weight.detach()

    # ------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Checks before any work: finite weights and losses, a loss that is a sum over items, a deterministic forward
        pass.

        Runs once for the current weights; costs one forward pass over the data.
        """
        key = self.version()
        if not self.world.all(key == self._checked):
            self.notes, self._total_weight, self.coarsest, self.leaves_out = examine(self)
            self._checked = key
