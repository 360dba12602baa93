"""The model as a risk sees it: how it is called, in which mode, through which kernels. All of it undone after."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from .batches import isolated_rng, tensors_of
from .errors import UnsupportedError
from .space import select
from .weight_norms import smooth_weight_norms
from .weights import first_names

Forward = Callable[[nn.Module, Any], Tensor]
BatchLoss = Callable[[nn.Module, Any], tuple[Tensor, Any]]
Mode = Literal["eval", "train"]

AVERAGING_WRAPPERS = frozenset({"DistributedDataParallel", "_FabricModule"})  # call what they wrap as it is
_WRAPPERS = AVERAGING_WRAPPERS | {"DataParallel", "OptimizedModule"}
# modules whose `training` flag switches dropout and nothing else
_DROPS = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# modules that store nothing on themselves in a forward pass
_TORCHS = frozenset(getattr(nn, name) for name in nn.modules.__all__)


def unwrapped(model: nn.Module, wrappers: Collection[str] = _WRAPPERS) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel, torch.compile, or what Fabric or Accelerate made."""
    for name in ("module", "_orig_mod"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and type(model).__name__ in wrappers:
            return unwrapped(inner, wrappers)
    return model


def chosen(model: nn.Module, patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Names of the parameters that match, tied ones by any of theirs, and are not frozen."""
    every = dict(model.named_parameters())  # tied parameters come once
    if not every:
        raise ValueError("the model has no parameters")
    for name, held in (*every.items(), *model.named_buffers()):
        if is_lazy(held):
            raise ValueError(
                f"{name} has no shape before the first call of its lazy layer: call the model on a batch once"
            )
        if held.is_meta:
            raise ValueError(
                f"{name} is on the meta device and holds no numbers: make it real, by model.to_empty(device=...)"
                " and load_state_dict"
            )
        if held.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} is a sparse tensor, {held.layout}: make it dense, by to_dense(), to study it"
            )
    names = [name for name in select(every, patterns, first_names(model)) if every[name].requires_grad]
    for name in names:
        if every[name].is_complex():
            raise UnsupportedError(
                f"{name} is complex, and curvature is that of real numbers: store torch.view_as_real of it and apply "
                "torch.view_as_complex in the forward pass, or leave it out with params="
            )
    if not names:
        raise ValueError(
            f"every parameter that matches {patterns!r} is frozen (requires_grad=False); choose others with params="
        )
    return tuple(names)


# --------------------------------------------------------------------------------------------------- calls


class Whole(nn.Module):
    """A module around the user's `fn(model, batch)`, so that `functional_call` reaches what it calls."""

    def __init__(self, model: nn.Module, fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self.fn = model, fn

    def forward(self, data: Any) -> Any:
        """What the user's function gives."""
        return self.fn(self.model, data)

    def at(self, state: Mapping[str, Tensor], data: Any) -> Any:
        """What it gives with these tensors in the place of the model's, by the first name of each.

        Tied ones are found here and not by `functional_call`, which replaces those of a module with two names twice,
        and then puts the replacement back in the place of the user's weights.
        """
        modules = list(self.model.named_modules())  # each once
        held = {
            f"{prefix}.{own}" if prefix else own: tensor
            for kind in ("_parameters", "_buffers")
            for prefix, module in modules
            for own, tensor in getattr(module, kind).items()
            if tensor is not None
        }
        first: dict[Tensor, str] = {}
        names = {name: first.setdefault(tensor, name) for name, tensor in held.items()}
        named = {f"model.{name}": state[shared] for name, shared in names.items() if shared in state}
        return functional_call(self, named, (data,), tie_weights=False)


class Caller:
    """The two ways to call the model: for its outputs, and for an opaque loss."""

    def __init__(self, model: nn.Module, forward: Forward | None, batch_loss: BatchLoss | None) -> None:
        self.plain = forward is None and batch_loss is None  # nothing but the model is called
        self.forward_only = Whole(model, _checked_forward(forward or _default_forward))
        self.whole = Whole(model, _checked_batch_loss(batch_loss)) if batch_loss is not None else self.forward_only


def _default_forward(model: nn.Module, batch: Any) -> Any:
    """model(*inputs) for a batch (inputs ..., target)."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return model(*batch[:-1])
    if isinstance(batch, Tensor):
        raise ValueError("a batch is a tensor, not (inputs, target); data given as tensors is a tuple: data=(X, y)")
    raise ValueError(
        f"a batch is a {type(batch).__name__}, not (inputs, target); say how the model reads it: "
        "forward=lambda model, batch: model(**batch).logits; for a causal language model of transformers, whose labels "
        "have to be shifted, ritz.integrations.transformers.causal_lm(model, batches)"
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


# --------------------------------------------------------------------------------------------------- modes


@contextlib.contextmanager
def studied(modules: Sequence[nn.Module], mode: Mode, dropout: bool, device: torch.device) -> Iterator[None]:
    """Mode set, kernels differentiable twice, hooks of backward passes away; all of it and the generators put back."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolated_rng(device=device))
        stack.enter_context(_kept_attributes(modules))
        stack.enter_context(_mode(modules, mode, dropout))
        stack.enter_context(_no_backward_hooks(modules))
        stack.enter_context(_plain_embeddings(modules))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_no_fused_layers(modules, device))
        # a cache would keep what a model casts of the weights, of each batch anew, until the end of a walk
        stack.enter_context(torch.autocast(device.type, enabled=False, cache_enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())  # each product switches on what it needs
        stack.enter_context(_no_checkpointing())
        stack.enter_context(smooth_weight_norms())
        yield


@contextlib.contextmanager
def _kept_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """What a forward pass stores on a module, as hooks of weight_norm store the weight, is the user's again after.

    So are lists, dictionaries and sets of a module, to which a pass may add activations, say: those of a product would
    be of no use, and tensors of torch.func are dead after it. What is of another class, if one derived from these, is
    left alone.
    """
    held = [
        (m.__dict__, dict(m.__dict__))
        for m in modules
        if m.__class__ not in _TORCHS or m._forward_pre_hooks or m._forward_hooks
    ]
    inside = [
        (value, value.copy())
        for _, before in held
        for name, value in before.items()
        if type(value) in (list, dict, set) and name not in _OF_EVERY_MODULE
    ]
    try:
        yield
    finally:
        for now, before in held:
            if len(now) != len(before) or any(now.get(name) is not value for name, value in before.items()):
                now.clear()
                now.update(before)
        for own, contents in inside:
            now_in, then_in = _entries(own), _entries(contents)
            if len(now_in) != len(then_in) or any(x is not was for x, was in zip(now_in, then_in, strict=True)):
                own.clear()
                own.extend(contents) if isinstance(own, list) else own.update(contents)


def _entries(own: Any) -> list[Any]:
    """All that a list, dictionary or set holds."""
    return [x for pair in own.items() for x in pair] if isinstance(own, dict) else list(own)


@contextlib.contextmanager
def _mode(modules: Sequence[nn.Module], mode: Mode, dropout: bool) -> Iterator[None]:
    """Evaluation mode, save for BatchNorm by batch statistics and dropout where they are asked for."""
    training = [m.training for m in modules]
    norms = [m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)] if mode == "train" else []
    tracking = [m.track_running_stats for m in norms]
    try:
        for m, was in zip(modules, training, strict=True):
            if was != (wanted := dropout and isinstance(m, _DROPS)):  # to ask is faster than to set
                m.training = wanted
        for norm in norms:  # without tracking the buffers are neither read nor written
            norm.training, norm.track_running_stats = True, False
        yield
    finally:
        for m, was in zip(modules, training, strict=True):
            if m.training != was:
                m.training = was
        for norm, was in zip(norms, tracking, strict=True):
            norm.track_running_stats = was


@contextlib.contextmanager
def _no_backward_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Hooks on backward passes belong to training: they could change a product, and torch.func cannot run them."""
    kinds = ("_backward_hooks", "_backward_pre_hooks")
    held = [(m, kind, getattr(m, kind)) for m in modules for kind in kinds if getattr(m, kind, None)]
    try:
        for m, kind, _ in held:
            setattr(m, kind, OrderedDict())
        yield
    finally:
        for m, kind, hooks in held:
            setattr(m, kind, hooks)


@contextlib.contextmanager
def _plain_embeddings(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The padding row of an embedding is a parameter like any other, and no row is renormalised in place.

    Gradients are dense, and those of the loss: not divided by how often a token occurs in the batch. With `padding_idx`
    reverse mode leaves the gradient of its row out and forward mode does not: the gradient is then that of no function,
    and products are not symmetric.
    """
    embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    held = [(m, kind, getattr(m, kind)) for m in embeddings for kind in _plain_settings(m)]
    try:
        for m, kind, _ in held:
            setattr(m, kind, _plain_settings(m)[kind])
        yield
    finally:
        for m, kind, value in held:
            setattr(m, kind, value)


def _plain_settings(module: nn.Module) -> dict[str, Any]:
    """What an embedding is set to while it is studied; the padding of a bag stays, which decides what is summed."""
    plain: dict[str, Any] = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    return plain | ({"padding_idx": None} if isinstance(module, nn.Embedding) else {})


@contextlib.contextmanager
def _no_checkpointing() -> Iterator[None]:
    """Activations are kept where the model would have them recomputed; other hooks on saved tensors are refused."""
    try:
        with straight_through(), torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING):
            yield
    except RuntimeError as error:
        if _CHECKPOINTING not in str(error):
            raise
        raise UnsupportedError(_CHECKPOINTING) from error


@contextlib.contextmanager
def straight_through() -> Iterator[None]:
    """Both ways of torch.utils.checkpoint keep activations, and recompute nothing in a backward pass.

    What is recomputed would see the model's own weights, not those it was called with, and torch's own operations.
    """
    held = {name: getattr(checkpoint, name) for name in _STRAIGHT}
    try:
        for name, straight in _STRAIGHT.items():
            setattr(checkpoint, name, straight)
        yield
    finally:
        for name, own in held.items():
            setattr(checkpoint, name, own)


class _StraightFunction:
    """In the place of the function that recomputes, with `use_reentrant=True`."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        """What the function gives."""
        return function(*args)


def _straight_generator(*_: Any, **__: Any) -> Iterator[None]:
    """In the place of what is done before and after, with `use_reentrant=False`."""
    yield


# looked up by torch.utils.checkpoint at each call; where another version has other names, nothing is replaced
_STRAIGHT = {
    name: straight
    for name, straight in (
        ("CheckpointFunction", _StraightFunction),
        ("_checkpoint_without_reentrant_generator", _straight_generator),
    )
    if hasattr(checkpoint, name)
}

_CHECKPOINTING = (
    "the model uses hooks on saved tensors, such as those of activation checkpointing or offloading, which would "
    "recompute with the wrong weights inside a product; switch them off (they are of no use in evaluation mode)"
)


@contextlib.contextmanager
def _no_fused_layers(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Fused transformer and recurrent kernels off: they have no second derivative."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in modules)
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    no_cudnn = recurrent and device.type == "cuda"
    with torch.backends.cudnn.flags(enabled=False) if no_cudnn else contextlib.nullcontext():
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            if recurrent:  # not by mkldnn.flags, which sets the precision of Intel's GPUs too, and warns of it
                torch._C._set_mkldnn_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            torch._C._set_mkldnn_enabled(onednn)


class ForwardWatch(TorchFunctionMode):
    """Notices what a forward pass does.

    Attributes:
        attends: By scaled_dot_product_attention, or the function around it in which a mode sees nothing.
        coarsest: The dtype of fewest digits that numbers were cast to, as language models do for their norms, or
            `dtype`: all that is computed is right to its digits and no more.

    Example:
        >>> with ForwardWatch(torch.float64) as watch:
        ...     _ = torch.ones(1, dtype=torch.float64).float().double()
        >>> watch.coarsest
        torch.float32
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.attends, self.coarsest = False, dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            self.attends = True
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and _is_coarser(out, self.coarsest):
            given = [x for x in tensors_of(args) if x.is_floating_point()]
            if any(_is_coarser(out, x.dtype) for x in given):
                self.coarsest = out.dtype
        return out


def _is_coarser(x: Tensor, dtype: torch.dtype) -> bool:
    return torch.finfo(x.dtype).eps > torch.finfo(dtype).eps
