"""The trace of the curvature as a term of the loss: unbiased, from one probe, on a part of the batch.

Seed 002, equation 13, trains on L(w) + eta Tr H(w), and where that diverged on L(w) + eta Tr G(w), with the trace of
one random probe. Both forms are here:

    GGN      Tr G = E_s |J' r|^2,   r = sum_c s_c root_c(f)   the roots of the loss Hessian M(f), with random signs
    Hessian  Tr H = E_v v' H v                                v of random signs in the weights

Sub-sampling the batch leaves both unbiased, so a quarter of it serves. The signs know nothing of the weights: the mean
of the gradient is the gradient of the mean. That fails for labels drawn from the model, whose distribution moves with
the weights.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..batches import isolated_rng, map_tensors, num_samples, only_tensors, skeleton, tensors_of, with_tensors
from ..convolutions import SmoothConvolutions
from ..errors import UnsupportedError
from ..modes import Forward, Whole, straight_through, unwrapped
from ..normalisations import SmoothNormalisations
from ..replay import Recordings
from ..sameness import is_static, place_of, settings_of
from ..space import ParamSpace, random_permutation
from ..weight_norms import normalises_weights, smooth_weight_norms
from .passes import unseen
from .penalty_losses import LossName, OutputLoss, wide

Form = Literal["ggn", "hessian"]

_UNREACHED = "the outputs do not depend on any parameter of the model that is trained: there is no trace to lower"
_DETACHED = (
    "the outputs have no graph to the parameters, as where they were made under torch.no_grad() or inference_mode(): "
    "make them with gradients on, or call penalty(model, x), which runs the model itself"
)


class TracePenalty:
    """eta times the trace of the curvature, to be added to a loss (seed 002, equation 13).

    A call draws its own part of the batch and its own random signs, keyed by the seed and the number of previous calls,
    and returns a scalar to differentiate. It does not change weights, gradients, buffers and generators. Hooks of an
    optimiser that recognise a training pass by its weights (such as those of `KFAC`) do not mistake its pass for one.
    The loss is the mean over items, as in torch, so the trace has the scale of the loss it is added to. Autocast
    applies to the forward pass of the GGN form; signs, norms and the whole Hessian form are at least float32. With
    gradient accumulation, each micro-batch has its own penalty, divided as its loss is. With batch statistics, the
    trace is that of the selected part of the batch alone. Activation checkpointing is bypassed. Normalisations of
    weights, and in the Hessian form of activations, are made of plain operations: torch's own have a wrong second or
    third derivative.

    Cost of a step of VGG-16, in operations of a step without penalty: 1.75 on a quarter of the batch, 4 on the full
    batch, 3 if it shares the forward pass of the loss (`on_outputs`); in the Hessian form 2.9 and 8.6. The same holds
    for the time if the device is busy. A small network waits for the host; `replay` is the remedy.

    Args:
        eta: The factor of the trace; seed 002 uses 1e-4.
        fraction: Share of the batch that is used, at least one sample.
        form: "ggn", or "hessian", which also needs targets. The Hessian of a network with batch statistics is refused:
            see `force`.
        loss: The loss of the penalty. "cross_entropy" ignores items labelled -100, if labels are given.
        class_dim: The dimension of the classes in an output; -1 for language models' (batch, tokens, classes). None
            means 1, and raises an error if outputs have more dimensions and no labels are given.
        forward: How the model reads `x`; by default model(x), model(*x) or model(**x) by the type of x.
        seed: Seed of samples and signs.
        replay: On a GPU, record the penalty and its gradient as one CUDA graph and replay it: the gradient is then
            computed in the call and returned by `backward`. Each call of the model must run the same sequence of
            operations for inputs of one shape. None records if this is known, which is the case if all modules are
            torch.nn's own; not under autocast, nor for inputs that require a gradient. A recording keeps the memory of
            a pass, and its result can be differentiated once.
        force: Allow the Hessian form with BatchNorm in training mode. There, weights w and c w of a layer give the same
            loss, so that Tr H(c w) = Tr H(w) / c^2: once the trace is negative, ever smaller weights lower the sum
            without end (seed 002, section 6, saw training diverge). The trace of the GGN is never negative.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x, y = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)
        >>> penalty = ritz.optim.TracePenalty(0.1, loss="mse")
        >>> round(float(penalty(model, x)), 4)  # 0.1 * 2 |x|^2
        5.0
        >>> loss = torch.nn.functional.mse_loss(model(x), y) + penalty(model, x)
        >>> loss.backward()
    """

    def __init__(
        self,
        eta: float,
        fraction: float = 0.25,
        form: Form = "ggn",
        *,
        loss: LossName = "cross_entropy",
        class_dim: int | None = None,
        forward: Forward | None = None,
        seed: int = 0,
        replay: bool | None = None,
        force: bool = False,
    ) -> None:
        if not math.isfinite(eta):
            raise ValueError(f"eta must be a finite number, got {eta}")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction is the share of the batch that is used, in (0, 1], got {fraction}")
        for name, value, kind in (("form", form, Form), ("loss", loss, LossName)):
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
        self.eta, self.fraction, self.form = eta, fraction, form
        self._loss = OutputLoss(loss, class_dim)
        self.forward, self.seed, self.replay, self.force = forward, seed, replay, force
        self.calls = 0
        self._recordings = Recordings(most=2)

    def __call__(self, model: nn.Module, x: Any, y: Tensor | None = None) -> Tensor:
        """eta Tr G, or eta Tr H, of the model on a part of this batch; the model is run once more, on that part.

        Args:
            model: Any module; the trace is over its parameters that are not frozen, in the mode it is in.
            x: Its inputs: a tensor, or a tuple or dictionary of tensors with the samples first.
            y: Targets: needed by the Hessian form; for cross-entropy they also tell which items do not count.

        Raises:
            ValueError: If the batch is empty, every parameter is frozen or targets are missing.
            UnsupportedError: If the Hessian form meets BatchNorm in training mode.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model comes first, penalty(model, x): expected a module, got {type(model).__name__}")
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # inside, a pass of the model can be differentiated
                return self(model, *map_tensors((x, y), _ordinary))
        model = unwrapped(model)
        params = _trainable(model)
        targets = self._hessian_targets(model, y) if self.form == "hessian" else None
        size = num_samples(x)
        if size == 0:
            raise ValueError("the batch is empty: there is nothing to take the trace of")
        labels = targets if targets is not None else self._loss.labels(y)
        call = self._next_call()
        rows = self._rows(size, call)
        data = map_tensors((x, labels), lambda t: _taken(t, rows, size))
        run = _Run(model, self.forward or _read, self.form)
        device = next(iter(params.values())).device
        origins = self._origins(params, call).to(device)
        with run.isolated(device):
            if self._replays(run, data, device):
                mean = self._replayed(run, params, data, origins)
            else:
                mean = self._mean(run, params, data, origins)
        if labels is None:
            return mean * self.eta
        part = data[1]  # items are not evenly spread over samples: the mean is over those of the whole batch
        share = 1.0 if rows is None else size / len(rows)
        items, every = (_as(mean, self._loss.num_items(y)) for y in (part, labels))
        return mean * (share * items / every) * self.eta

    def on_outputs(self, out: Tensor, model: nn.Module, y: Tensor | None = None) -> Tensor:
        """The same in the GGN form from the outputs of the pass that the loss has anyway, on all of the batch.

        Nothing is sub-sampled: a part of the outputs costs what the whole does. Where the host is the bottleneck, a
        call of `penalty(model, x)` that is replayed is faster. With `KFAC(fisher="empirical")` use that too: gradients
        of the penalty in shared outputs would count as those of the loss.

        Example:
            >>> model, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
            >>> out = model(x)
            >>> penalty = ritz.optim.TracePenalty(1e-4)
            >>> loss = torch.nn.functional.cross_entropy(out, torch.zeros(4).long()) + penalty.on_outputs(out, model)
            >>> loss.backward()

        Raises:
            UnsupportedError: If a weight is normalised by torch's weight_norm, and its direction is trained.
        """
        if self.form != "ggn":
            raise ValueError("outputs determine only the GGN; with form='hessian' call penalty(model, x, y)")
        if (normalised := normalises_weights(model)) is not None:
            raise UnsupportedError(
                f"the weight of {normalised or 'the model'} is normalised (weight_norm) by an operation of torch whose "
                "second derivative is wrong: call penalty(model, x), which runs the model by another one"
            )
        params = _trainable(unwrapped(model))
        self._check_output(out, self._loss.labels(y), _DETACHED)
        origins = self._origins(params, self._next_call()).to(out.device)
        with unseen():
            return self._pulled_back(out, params, self._loss.labels(y), origins) * self.eta

    def state_dict(self) -> dict[str, int]:
        """What decides the next draw."""
        return {"calls": self.calls, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another run stood."""
        self.calls, self.seed = int(state["calls"]), int(state["seed"])

    # ------------------------------------------------------------------------------------------- the two forms

    def _mean(self, run: "_Run", params: Mapping[str, Tensor], data: Any, origins: Tensor) -> Tensor:
        """The trace of the curvature of the mean over the items of these data, differentiable in the parameters."""
        x, y = data
        if self.form == "hessian":
            return self._curvature_along(run, params, x, y, origins)
        with torch.enable_grad():
            seen = {name: p.view_as(p) for name, p in params.items()}  # not the model's own, as far as hooks can tell
            out = run(seen, x)
        self._check_output(out, y)
        return self._pulled_back(out, seen, y, origins)

    def _pulled_back(self, out: Tensor, params: Mapping[str, Tensor], labels: Tensor | None, origins: Tensor) -> Tensor:
        """|J' r|^2, differentiable through J and through r, over the number of items."""
        keep = torch.is_grad_enabled()
        with torch.enable_grad(), torch.autocast(out.device.type, enabled=False):
            signs = _flat(out.numel()).signs(origins).view(out.shape)
            root = self._loss.random_root(out, signs, labels)
            leaves = list(params.values())
            pulled = torch.autograd.grad(
                out, leaves, root.to(out.dtype), retain_graph=True, create_graph=keep, allow_unused=True
            )
            if not (used := [wide(g) for g in pulled if g is not None]):
                raise ValueError(_UNREACHED)
            total: Tensor = _SquaredNorm.apply(*used)  # type: ignore[no-untyped-call]
        return total / _as(total, self._loss.num_items(out if labels is None else labels))

    def _curvature_along(self, run: "_Run", params: Mapping[str, Tensor], x: Any, y: Tensor, origins: Tensor) -> Tensor:
        """v' H v, differentiable; v of random signs."""
        space = ParamSpace.of(params)
        row = space.signs(origins).to(wide(next(iter(params.values()))).dtype)
        probe = space.split(row)

        def total(t: Tensor) -> Tensor:
            out = run({name: p + (t * probe[name]).to(p.dtype) for name, p in params.items()}, x)
            self._check_output(out, y)
            return self._loss.total(out, y)

        with torch.autocast(row.device.type, enabled=False):
            curvature = _second_derivative(total, row)
        return curvature / _as(curvature, self._loss.num_items(y))

    # ------------------------------------------------------------------------------------------- replay

    def _replays(self, run: "_Run", data: Any, device: torch.device) -> bool:
        """Whether the penalty is recorded; without a gradient to give out it is not worth it."""
        if self.replay is False or not torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
            return False
        if self.replay is None and (device.type != "cuda" or self.forward is not None or not is_static(run.modules)):
            return False
        return only_tensors(data) and not any(t.requires_grad for t in tensors_of(data))

    def _replayed(self, run: "_Run", params: Mapping[str, Tensor], data: Any, origins: Tensor) -> Tensor:
        """The same as `_mean`, its gradient made along with it."""

        def recorded(origins: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
                mean = self._mean(run, leaves, with_tensors(data, tensors), origins)
                grads = torch.autograd.grad(mean, tuple(leaves.values()), materialize_grads=True)
            return mean.detach(), *grads

        own = (t for m in run.modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
        place = place_of(own), settings_of(run.modules)
        key = (self.form, self._loss, tuple(params), place, skeleton(data))
        mean, *grads = self._recordings.run(key, recorded, [origins, *tensors_of(data)])
        known: Tensor = _Known.apply(mean, grads, *params.values())  # type: ignore[no-untyped-call]
        return known

    # ------------------------------------------------------------------------------------------- draws and checks

    def _next_call(self) -> int:
        self.calls += 1
        return self.calls - 1

    def _origins(self, params: Mapping[str, Tensor], call: int) -> Tensor:
        """What the signs of a call are made of: of outputs, or of weights."""
        if self.form == "hessian":
            return ParamSpace.of(params).origins(call, self.seed)
        return _flat(1).origins(call, self.seed)

    def _rows(self, size: int, call: int) -> Tensor | None:
        """Which samples of the batch, drawn without replacement; None for all of them."""
        num = max(1, round(self.fraction * size))
        if num == size:
            return None
        return random_permutation(size, ("penalty samples", self.seed, call))[:num]

    def _check_output(self, out: Any, labels: Tensor | None, without_graph: str = _UNREACHED) -> None:
        if not isinstance(out, Tensor):
            raise TypeError(
                f"the model returned a {type(out).__name__}, not a tensor; pick the outputs: "
                "TracePenalty(..., forward=lambda model, x: model(**x).logits)"
            )
        self._loss.check_output(out, labels)
        if self.form == "ggn" and not out.requires_grad:
            raise ValueError(without_graph)

    def _hessian_targets(self, model: nn.Module, y: Tensor | None) -> Tensor:
        """The targets, where the Hessian form may be used."""
        if y is None:
            raise ValueError("the Hessian depends on the targets: penalty(model, x, y); form='ggn' does without them")
        norms = [
            name
            for name, m in model.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and (m.training or m.running_mean is None)
        ]
        if norms and not self.force:
            raise UnsupportedError(
                f"{norms[0]!r} normalises by batch statistics: the loss does not depend on the scale of the weights "
                "before it, and a negative trace of the Hessian grows without bound as they shrink (seed 002 saw "
                "training diverge); use form='ggn', put BatchNorm into evaluation mode, or pass force=True"
            )
        return y


# ---------------------------------------------------------------------------------------------------- the model


class _Run:
    """The model at given weights, by operations that are right when differentiated as often as the form asks for.

    Buffers are copies, so batch statistics leave no trace.
    """

    def __init__(self, model: nn.Module, forward: Forward, form: Form) -> None:
        self.model, self.whole = model, Whole(model, forward)
        self.modules = list(model.modules())
        self.thrice = form == "hessian"  # twice for the trace, once more for its gradient

    def __call__(self, params: Mapping[str, Tensor], x: Any) -> Tensor:
        buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        norms = SmoothNormalisations() if self.thrice else contextlib.nullcontext()
        with straight_through(), smooth_weight_norms(), SmoothConvolutions(), norms:
            out: Tensor = self.whole.at({**buffers, **params}, x)
        return out

    @contextlib.contextmanager
    def isolated(self, device: torch.device) -> Iterator[None]:
        """Generators put back after; attention by kernels that can be differentiated again."""
        with isolated_rng(device=device), sdpa_kernel(SDPBackend.MATH):
            yield


class _Known(torch.autograd.Function):
    """A value whose gradients in the parameters are known already, as numbers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of a replayed penalty cannot be differentiated again (create_graph=True): make it with "
                "TracePenalty(..., replay=False)"
            )
        return None, None, *torch._foreach_mul(ctx.grads, grad)


class _SquaredNorm(torch.autograd.Function):
    """The sum of squares of several tensors, by a kernel for all in the place of some for each."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        if tensors[0].device.type == "cpu":  # where a norm in float32 loses digits
            squares = [x.square().sum() for x in tensors]
        else:
            squares = [norm.square() for norm in torch._foreach_norm(tensors)]
        return torch.stack([square.to(squares[0]) for square in squares]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return tuple(2 * grad.to(x) * x for x in tensors)
        return tuple(torch._foreach_mul(tensors, 2 * grad))


def _read(model: nn.Module, x: Any) -> Any:
    """The model on inputs as they come: one, several, or by name."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple | list) else model(x)


def _taken(x: Tensor, rows: Tensor | None, size: int) -> Tensor:
    """Some samples of a tensor that has them; the whole of one that has not."""
    return x if rows is None or not x.ndim or len(x) != size else x[rows.to(x.device)]


def _ordinary(x: Tensor) -> Tensor:
    """A tensor made under inference_mode() as one that a backward pass may keep."""
    return x.clone() if x.is_inference() else x


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    params: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError("every parameter of the model is frozen (requires_grad=False): there is no trace to lower")
    return params


def _flat(size: int) -> ParamSpace:
    """The outputs as one row, whose signs are drawn as those of weights are."""
    return ParamSpace(("penalty signs",), (torch.Size([size]),))


def _as(like: Tensor, number: Tensor | float) -> Tensor | float:
    """A number in the precision of what it is to be multiplied with."""
    return number.to(like) if isinstance(number, Tensor) else number


def _second_derivative(fn: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """fn''(0) of a scalar function, by two backward passes.

    Two forward derivatives are cheaper, but torch's are wrong for LayerNorm and for BatchNorm in training mode.
    """
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        t = like.new_zeros((), requires_grad=True)
        (slope,) = torch.autograd.grad(fn(t), t, create_graph=True)
        if not slope.requires_grad:  # fn is linear in t
            return torch.zeros_like(slope)
        second: Tensor = torch.autograd.grad(slope, t, create_graph=keep, materialize_grads=True)[0]
    return second
