"""Is a network affine in each single weight? Decided by the operations of a forward pass, never by module classes.

Within a linear region of its activations a network is multi-affine if every parameter enters each product at most
once: ReLU networks, max-pooling, residual branches, BatchNorm by running statistics. Then d^2 f / dw_j^2 = 0 for every
weight, the residual term of the Hessian has a zero diagonal, and

    Tr H = Tr GGN        exactly, for the mean and for every sample.

A tanh, a softmax, a LayerNorm, `x * x`, a gate or a tied weight breaks it. The forward pass is traced below autograd;
each tensor carries the set of chosen parameters that it depends on, and each operation must be on a list.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from .batches import tensors_of
from .captures import reachable, uses
from .reducers import Mean

if TYPE_CHECKING:
    from .batches import Batch
    from .risk import Params, Risk

Names = frozenset[str]
_NONE: Names = frozenset()


@dataclass(frozen=True)
class Linearity:
    """Whether a network is multi-affine, and if not, what breaks it.

    Example:
        >>> Linearity(False, "aten::tanh is not piecewise linear").holds
        False
    """

    holds: bool
    reason: str


def multi_affine(risk: "Risk") -> Linearity:
    """Whether the outputs are affine in each single chosen parameter, within a linear region.

    A forward pass over two samples is traced, and one over all data where code is the user's, which may take another
    way with other samples. Only chosen parameters count: what is frozen is a constant. The answer errs on the side of
    no: an operation that is not on the list is taken to be curved, and so is one with a gradient of its own.

    Example:
        >>> data = torch.ones(2, 3), torch.zeros(2, 1)
        >>> def verdict(activation):
        ...     model = torch.nn.Sequential(torch.nn.Linear(3, 4), activation, torch.nn.Linear(4, 1))
        ...     return multi_affine(ritz.Risk(model, torch.nn.MSELoss(), data))
        >>> verdict(torch.nn.ReLU()).holds
        True
        >>> verdict(torch.nn.Tanh())
        Linearity(holds=False, reason='aten::tanh is not piecewise linear in 0.bias')
    """
    _ = risk.output_loss  # a risk without outputs has no answer, and says so
    batch = next(iter(risk.batches))
    with risk.session():
        answers = [_of_batch(risk, risk.params(), batch.head(2) if risk.splittable else batch)]

    def look(params: "Params", batch: "Batch") -> tuple[Tensor, Tensor]:
        if answers[-1].holds:
            answers.append(_of_batch(risk, params, batch))
        nought = torch.zeros((), device=risk.device)
        return nought, nought + 1

    if not risk.static and risk.world.all(answers[0].holds):
        risk.fold(look, Mean())
    told = risk.world.gather(answers[-1])
    return next((answer for answer in told if not answer.holds), told[0])


def _of_batch(risk: "Risk", params: "Params", batch: "Batch") -> Linearity:
    """The answer for one batch, or a piece of one; to be called inside `session`."""
    # copies: two parameters that are views of one buffer are still two parameters
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    with torch.enable_grad(), _Trace(leaves) as trace:
        out = risk.output(leaves, batch)
    if trace.broken:
        return Linearity(False, trace.broken)
    for node in reachable(out):
        if isinstance(node, BackwardCFunction):  # its kernels may be seen by nobody, and its gradient be another's
            own = type(node).__name__.removesuffix("Backward")
            return Linearity(
                False, f"{own} has its own gradient, which may hide operations; replace it by operations of torch"
            )
    seen = trace.depends(out)
    hidden = [name for name, times in uses(out, leaves).items() if times and name not in seen]
    if hidden:
        return Linearity(False, f"an operation on {hidden[0]} is hidden from the trace")
    return Linearity(True, "every operation is piecewise linear in each single parameter")


class _Trace(TorchDispatchMode):
    """Follows through every operation which parameters a tensor depends on.

    Dependencies belong to storages, so that views and in-place operations are seen; a storage depends on all that was
    ever written to it. The first operation that is not multi-affine is noted; an error would be lost in TorchScript.
    """

    broken = ""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Any] = []  # a storage that is freed would give its address to another
        self._of: dict[int, Names] = {}
        for name, p in params.items():
            self._write(p, frozenset({name}))

    def depends(self, tree: Any) -> Names:
        """The parameters that floating-point tensors in a tree of arguments depend on."""
        found = [self._of.get(_key(x), _NONE) for x in tensors_of(tree) if _carries(x)]
        return frozenset().union(*found)

    def _write(self, x: Tensor, names: Names) -> None:
        self._kept.append(x.untyped_storage())
        self._of[_key(x)] = self._of.get(_key(x), _NONE) | names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names = self.depends((args, kwargs))
        result = func(*args, **kwargs)
        floats = [x for x in tensors_of(result) if _carries(x)]
        if names and (floats or func._schema.is_mutable):  # indices, masks and shapes are piecewise constant
            name = packet_name(func)
            if any(x.is_complex() for x in floats):
                self._break(f"{name} gives complex numbers")
            names = self._rule(name, args, names)
            for x in floats:
                self._write(x, names)
        return result

    def _rule(self, name: str, args: tuple[Any, ...], names: Names) -> Names:
        """What the result depends on; an operation that is not affine in each parameter is noted."""
        if name in CONSTANT:
            return _NONE
        if name in LINEAR:
            return names
        if name in FACTORS:
            self._disjoint(name, [args[i] for i in FACTORS[name](args) if i < len(args)])
            return names
        if name in CONSTANT_ARGUMENTS:
            fixed = [args[i] for i in CONSTANT_ARGUMENTS[name] if i < len(args)]
            if curved := self.depends(fixed):
                self._break(f"{name} is not piecewise linear in {min(curved)}")
            return names
        self._break(f"{name} is not piecewise linear in {min(names)}")
        return names

    def _disjoint(self, name: str, factors: Iterable[Any]) -> None:
        """A product is multi-affine if no parameter is in two of its factors."""
        before = _NONE
        for factor in factors:
            here = self.depends(factor)
            if common := before & here:
                self._break(f"{name} multiplies two factors that both depend on {min(common)}")
            before |= here

    def _break(self, reason: str) -> None:
        self.broken = self.broken or reason


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _carries(x: Tensor) -> bool:
    """Indices and masks are piecewise constant: they carry no dependency."""
    return x.is_floating_point() or x.is_complex()


def packet_name(func: Any) -> str:
    """`aten::add` for aten::add.Tensor and aten::add_.Scalar alike.

    Example:
        >>> packet_name(torch.ops.aten.relu_.default)
        'aten::relu'
    """
    name: str = func.name().split(".")[0]
    return name.removesuffix("_")


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Results that are the same whatever the values of the arguments.
CONSTANT = _aten(
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty "
    "new_empty_strided sym_size sym_stride"
)

# Linear or piecewise linear in all tensor arguments together.
LINEAR = _aten(
    # the same numbers elsewhere
    "view _unsafe_view _reshape_alias reshape view_as expand expand_as alias detach clone lift_fresh contiguous "
    "_to_copy to copy t transpose permute movedim swapaxes squeeze unsqueeze flatten unflatten ravel as_strided "
    "select slice narrow split split_with_sizes chunk unbind tensor_split unfold diagonal diag diag_embed tril triu "
    "flip roll rot90 repeat tile index index_select gather take take_along_dim masked_select index_put "
    "_index_put_impl _unsafe_index _unsafe_index_put index_add index_copy index_fill scatter scatter_add "
    "masked_fill masked_scatter select_scatter slice_scatter diagonal_scatter fill zero "
    "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle im2col col2im constant_pad_nd pad "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "embedding "
    # sums
    "add sub rsub neg positive sum mean cumsum cat concat stack hstack vstack trace nansum nan_to_num "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "native_dropout dropout feature_dropout alpha_dropout "
    # a choice among linear pieces
    "relu relu6 leaky_relu threshold hardtanh hardsigmoid hardshrink softshrink rrelu abs clamp clamp_min clamp_max "
    "clip max min amax amin maximum minimum fmax fmin aminmax cummax cummin sort topk kthvalue median nanmedian where "
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_unpool2d max_unpool3d "
    # piecewise constant
    "sign sgn floor ceil round trunc heaviside"
)


def _first_two(args: tuple[Any, ...]) -> tuple[int, ...]:
    return (0, 1)


def _second_and_third(args: tuple[Any, ...]) -> tuple[int, ...]:
    return (1, 2)


def _normalisation(args: tuple[Any, ...]) -> tuple[int, ...]:
    """(input, weight) for normalisation by fixed statistics; by those of the batch the input is counted twice."""
    training = args[5] if len(args) > 5 else True
    return (0, 0, 1, 3, 4, 4) if training else (0, 1, 3, 4, 4)


# Which arguments are multiplied with each other; the others are added. Listed twice: not affine in it by itself.
FACTORS: dict[str, Callable[[tuple[Any, ...]], tuple[int, ...]]] = {
    **dict.fromkeys(
        _aten(
            "mul multiply mm bmm mv dot vdot inner outer ger kron matmul linear cross linalg_cross linalg_vecdot "
            "convolution _convolution convolution_overrideable mkldnn_convolution cudnn_convolution "
            "miopen_convolution _slow_conv2d_forward slow_conv3d_forward _conv_depthwise2d conv_depthwise3d "
            "slow_conv_transpose2d slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d prelu _prelu_kernel "
            "mkldnn_linear"
        ),
        _first_two,
    ),
    **dict.fromkeys(_aten("addmm addmv addbmm baddbmm addr addcmul"), _second_and_third),
    **dict.fromkeys(_aten("native_batch_norm cudnn_batch_norm miopen_batch_norm"), _normalisation),
    **dict.fromkeys(_aten("_native_batch_norm_legit_no_training _batch_norm_no_update"), lambda args: (0, 1, 3, 4, 4)),
}

# Affine in the other arguments where these depend on no parameter.
CONSTANT_ARGUMENTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_aten("div divide true_divide"), (1,)),
    "aten::addcdiv": (2,),
    **dict.fromkeys(_aten("native_layer_norm layer_norm native_group_norm group_norm"), (0,)),
    "aten::_embedding_bag": (6,),
    "aten::lerp": (2,),
}
