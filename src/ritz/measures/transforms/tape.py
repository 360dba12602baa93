"""The rules by which a network scales, derived from the operations that it runs.

A forward pass is traced below autograd, so module classes, functional calls and custom forward functions are treated
alike. Each operation is written as a `Form`, a sum of products of powers of its arguments; an operation on no list is
taken to be curved. Values belong to storages, so views and in-place writes are followed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isinf
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...batches import tensors_of
from ...linearity import CONSTANT, LINEAR, packet_name
from ...risk import Params, Risk
from ...weight_norms import KERNEL, smooth_weight_norms
from .degrees import CONST, ZERO, Exponent, Factor, Norm, Step, Tape, Weight

Axes = tuple[int | None, int | None]  # dimensions of a factor along which features come in and go out


def trace(risk: Risk) -> Tape:
    """The tape of a forward pass over two samples, or over a whole batch where samples are coupled.

    It ends in the outputs; for a risk given as `batch_loss`, in the loss.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> tape = trace(ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(4, 2), torch.ones(4, 1))))
        >>> [step.op for step in tape.steps], [(w.name, w.into, w.out) for w in tape.weights]
        (['aten::addmm', 'aten::addmm'], [('0.weight', 1, 0), ('2.weight', 1, 0)])
    """
    batch = next(iter(risk.batches))
    if risk.splittable:
        batch = batch.head(2)
    # copies: two parameters that are views of one buffer are still two parameters
    state = {name: tensor.clone() for name, tensor in risk.state().items()}
    own = [name for name, _ in risk.model.named_parameters()]
    with risk.session(), smooth_weight_norms(KERNEL), _Tracer(state, own) as tracer:
        out = risk.total(state, batch) if risk.opaque else risk.output(state, batch)
    shapes = {name: tensor.shape for name, tensor in state.items()}
    return Tape(tuple(tracer.steps), tracer.names, shapes, tracer.value(out))


@dataclass(frozen=True)
class Form:
    """An operation as a sum of products: its arguments, tensors or numbers, in their places.

    Example:
        >>> Form.sum("x", 0.5).terms  # x + 0.5
        ((('x', 1),), ((0.5, 1),))
    """

    terms: tuple[tuple[tuple[Any, Exponent], ...], ...]
    fixed: tuple[Any, ...] = ()  # arguments in which it is not such a sum
    axes: Mapping[int, Axes] | None = None  # of each factor of the first term, where features are contracted
    groups: int = 1
    stats: tuple[Any, ...] | None = None  # (mean, variance, eps) of a BatchNorm of the first fixed argument

    @classmethod
    def sum(cls, *terms: Any) -> "Form":
        """One term for each argument; None arguments are skipped."""
        return cls(tuple(((x, 1),) for x in terms if x is not None))


# -------------------------------------------------------------------------------------------------- tracing


class _Tracer(TorchDispatchMode):
    """Writes the tape."""

    def __init__(self, state: Params, own: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.names = dict(enumerate(own, start=ZERO + 1))
        self._state = state
        self._named = {_key(tensor): name for name, tensor in state.items()}
        self._kept: list[Any] = []  # the address of a freed storage would be used again
        self._held: dict[int, int] = {}
        for value, name in self.names.items():
            self._write(state[name], value)

    def value(self, x: Any) -> int:
        """The value of a tensor or number; 0 and infinity stay the same at every scale."""
        if isinstance(x, Tensor):
            held = self._held.get(_key(x)) if _carries(x) else None
            if held is not None or x.ndim:
                return CONST if held is None else held
        size = float(abs(x))
        return ZERO if size == 0 or isinf(size) else CONST

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        slots = func._schema.arguments
        values = [args[i] if i < len(args) else kwargs.get(s.name, s.default_value) for i, s in enumerate(slots)]
        name = packet_name(func)
        form = RULES.get(name, _curved)(values)
        result = func(*args, **kwargs)
        floats = [x for x in tensors_of(result) if _carries(x)]
        rounds = not floats and tensors_of(result) and name not in COMPARISONS  # numbers made into integers
        if rounds or any(x.is_complex() for x in floats):
            form = _curved(values)
        value = self._record(name, form)
        for x in floats:
            if func._schema.is_mutable and not _covers_its_storage(x):  # the rest of the storage stays
                held = self._held.get(_key(x), CONST)
                self._write(x, self._combine("a write in place", [((held, 1),), ((value, 1),)]))
            else:
                self._write(x, value)
        return result

    def _write(self, x: Tensor, value: int) -> None:
        if value != CONST or _key(x) in self._held:
            self._kept.append(x.untyped_storage())
            self._held[_key(x)] = value

    def _record(self, op: str, form: Form) -> int:
        """The value of an operation's result."""
        terms = [tuple((self.value(x), power) for x, power in term) for term in form.terms]
        fixed = tuple(value for x in form.fixed if (value := self.value(x)) > ZERO)
        return self._combine(op, terms, fixed, tuple(self._weights(form)), self._norm(form))

    def _combine(
        self,
        op: str,
        terms: Sequence[tuple[Factor, ...]],
        fixed: tuple[int, ...] = (),
        weights: tuple[Weight, ...] = (),
        norm: Norm | None = None,
    ) -> int:
        """The value of a sum of products: an existing one if nothing changes its degree, else that of a new step."""
        live = [term for term in terms if not any(value == ZERO and power > 0 for value, power in term)]
        distinct = tuple(dict.fromkeys(tuple((v, power) for v, power in term if v > ZERO and power) for term in live))
        if not fixed and not weights and len(distinct) < 2:
            if not distinct:
                return ZERO
            if not distinct[0]:
                return CONST
            if len(distinct[0]) == 1 and distinct[0][0][1] == 1:
                return distinct[0][0][0]
        out = 2 + len(self.names) + len(self.steps)
        self.steps.append(Step(op, out, distinct, fixed, weights, norm))
        return out

    def _weights(self, form: Form) -> Iterator[Weight]:
        """The parameters that multiply; a parameter times a constant, entry by entry, counts as that parameter."""
        term = form.terms[0] if form.terms else ()
        live = [x for x, power in term if power and self.value(x) > ZERO]
        if any(self.value(x) == ZERO for x, _ in term) or (form.axes is None and len(live) < 2):
            return
        for place, (x, _) in enumerate(term):
            name = self.names.get(self.value(x))
            if name is not None:
                into, out = (form.axes or {}).get(place, (None, None))
                axis = _axis_finder(x, self._state[name])
                yield Weight(name, axis(into), axis(out), form.groups)

    def _norm(self, form: Form) -> Norm | None:
        """BatchNorm, if its statistics are buffers of the model."""
        if form.stats is None:
            return None
        mean, var = self._name(form.stats[0]), self._name(form.stats[1])
        if mean is None or var is None:
            return None
        gamma = self._name(form.terms[0][0][0]) if form.terms[0] else None
        return Norm(self.value(form.fixed[0]), mean, var, gamma, form.stats[2])

    def _name(self, x: Any) -> str | None:
        """The parameter or buffer that an argument is."""
        return self._named.get(_key(x)) if isinstance(x, Tensor) else None


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _carries(x: Tensor) -> bool:
    """Whether a tensor carries a scale: masks and indices do not, or the operation that made them was refused."""
    return x.is_floating_point() or x.is_complex()


def _covers_its_storage(x: Tensor) -> bool:
    return x.numel() * x.element_size() >= x.untyped_storage().nbytes()


def _axis_finder(view: Tensor, param: Tensor) -> Callable[[int | None], int | None]:
    """Maps a dimension of a view to that of the parameter, by size and stride; None if there is none."""
    own = list(zip(param.shape, param.stride(), strict=True))

    def find(dim: int | None) -> int | None:
        if dim is None or not -view.ndim <= dim < view.ndim:
            return None
        here = view.shape[dim], view.stride(dim)
        return own.index(here) if here in own else None

    return find


# ---------------------------------------------------------------------------------------------------- rules

Values = list[Any]
Rule = Callable[[Values], Form]


def _aten(names: str) -> list[str]:
    return [f"aten::{name}" for name in names.split()]


def _curved(values: Values) -> Form:
    return Form(((),), tuple(x for x in tensors_of(values) if _carries(x)))


def _every(values: Values) -> Form:
    return Form.sum(*(x for x in tensors_of(values) if _carries(x)))


def _none(values: Values) -> Form:
    return Form(())


def _constant(values: Values) -> Form:
    return Form(((),))


def _operands(*places: int) -> Rule:
    """A sum, or a choice, among arguments that may be numbers."""
    return lambda values: Form.sum(*(values[i] for i in places))


def _power(power: Exponent) -> Rule:
    return lambda values: Form((((values[0], power),),))


def _scatter(values: Values) -> Form:
    return Form.sum(values[0], values[3]) if len(values) == 4 else _curved(values)  # a fifth says how to reduce


def _pow(values: Values) -> Form:
    base, power = values[:2]
    if isinstance(power, int | float) and not isinstance(base, int | float):
        return Form((((base, Fraction(power)),),))
    return _curved(values)


def _length(values: Values) -> Form:
    return _power(0 if values[1] == 0 else 1)(values)  # the norm of order 0 counts


def _product(left: int, right: int, plus: int | None = None, axes: Mapping[int, Axes] | None = None) -> Rule:
    def rule(values: Values) -> Form:
        terms = [((values[left], 1), (values[right], 1))]
        rest = Form.sum(values[plus]).terms if plus is not None else ()
        return Form((*terms, *rest), axes=axes)

    return rule


def _quotient(values: Values) -> Form:
    if len(values) > 2 and values[2] is not None:  # rounding_mode
        return _curved(values)
    return Form((((values[0], 1), (values[1], -1)),))


def _convolution(values: Values) -> Form:
    x, weight, bias = values[:3]
    axes: Axes = (0, 1) if values[6] else (1, 0)  # transposed
    return replace(_product(0, 1, 2, {1: axes})([x, weight, bias]), groups=values[8])


def _prelu(values: Values) -> Form:
    return replace(Form.sum(values[0]), fixed=(values[1],))


def _weight_norm(values: Values) -> Form:
    return Form((((values[0], 0), (values[1], 1)),))  # g v / |v|


def _embedding(values: Values) -> Form:
    return Form((((values[0], 1),),), axes={0: (None, 1)})


def _normalised(weight: int, bias: int | None) -> Rule:
    """weight * (x by its own statistics) + bias."""

    def rule(values: Values) -> Form:
        scale = () if values[weight] is None else ((values[weight], 1),)
        shift = Form.sum(values[bias]).terms if bias is not None else ()
        return Form((scale, *shift), fixed=(values[0],), axes={})

    return rule


def _batch_norm(training: int | None, eps: int) -> Rule:
    def rule(values: Values) -> Form:
        form = _normalised(1, 2)(values)
        if training is not None and values[training]:
            return form
        return replace(form, fixed=(values[0], values[3], values[4]), stats=(values[3], values[4], values[eps]))

    return rule


_NOT_HOMOGENEOUS = _aten("relu6 hardsigmoid nan_to_num floor ceil round trunc heaviside pad alpha_dropout")

# Results that are the same at every common scale of the arguments.
COMPARISONS: dict[str, Rule] = {
    **dict.fromkeys(_aten("gt lt ge le eq ne"), _operands(0, 1)),
    **dict.fromkeys(_aten("argmax argmin argsort nonzero isnan isinf isfinite"), _operands(0)),
}
_MATRICES: dict[int, Axes] = {0: (-1, -2), 1: (-2, -1)}

RULES: dict[str, Rule] = {
    **dict.fromkeys(LINEAR - set(_NOT_HOMOGENEOUS), _every),
    **dict.fromkeys(_aten("unsafe_split unsafe_split_with_sizes unsafe_chunk"), _every),
    **dict.fromkeys(CONSTANT, _constant),
    # zeros, and memory that is still to be written
    **dict.fromkeys(
        _aten("zeros zeros_like new_zeros zero empty empty_like empty_strided new_empty new_empty_strided"), _none
    ),
    **dict.fromkeys(_aten("scalar_tensor"), _operands(0)),
    **dict.fromkeys(_aten("full full_like fill copy"), _operands(1)),
    **dict.fromkeys(_aten("new_full"), _operands(2)),
    # a sum, or a choice by size
    **dict.fromkeys(_aten("add sub rsub maximum minimum fmax fmin clamp_min clamp_max"), _operands(0, 1)),
    **dict.fromkeys(_aten("hardshrink softshrink"), _operands(0, 1)),
    **dict.fromkeys(_aten("clamp clip threshold hardtanh"), _operands(0, 1, 2)),
    **dict.fromkeys(_aten("where"), _operands(1, 2)),
    **dict.fromkeys(_aten("masked_fill constant_pad_nd"), _operands(0, 2)),
    **dict.fromkeys(_aten("index_fill"), _operands(0, 3)),
    "aten::scatter": _scatter,
    **COMPARISONS,
    # powers
    **dict.fromkeys(_aten("sign sgn"), _power(0)),
    **dict.fromkeys(_aten("square var"), _power(2)),
    **dict.fromkeys(_aten("sqrt"), _power(Fraction(1, 2))),
    **dict.fromkeys(_aten("rsqrt"), _power(Fraction(-1, 2))),
    **dict.fromkeys(_aten("reciprocal"), _power(-1)),
    **dict.fromkeys(_aten("norm linalg_vector_norm"), _length),
    "aten::std": _power(1),
    "aten::pow": _pow,
    # products
    **dict.fromkeys(_aten("mul multiply dot vdot inner outer ger"), _product(0, 1)),
    **dict.fromkeys(_aten("mm bmm matmul"), _product(0, 1, axes=_MATRICES)),
    **dict.fromkeys(_aten("addmm baddbmm addbmm"), _product(1, 2, 0, _MATRICES)),
    **dict.fromkeys(_aten("mv"), _product(0, 1, axes={0: (-1, -2), 1: (-1, None)})),
    **dict.fromkeys(_aten("addmv"), _product(1, 2, 0, {0: (-1, -2), 1: (-1, None)})),
    **dict.fromkeys(_aten("linear mkldnn_linear"), _product(0, 1, 2, {1: (-1, -2)})),
    **dict.fromkeys(_aten("addcmul addr"), _product(1, 2, 0)),
    **dict.fromkeys(_aten("div divide true_divide"), _quotient),
    **dict.fromkeys(_aten("convolution _convolution"), _convolution),
    **dict.fromkeys(_aten("prelu _prelu_kernel"), _prelu),
    "aten::embedding": _embedding,
    **dict.fromkeys(_aten("_weight_norm _weight_norm_interface"), _weight_norm),
    # normalisations
    **dict.fromkeys(_aten("native_batch_norm cudnn_batch_norm miopen_batch_norm"), _batch_norm(5, 7)),
    **dict.fromkeys(_aten("_native_batch_norm_legit_no_training _batch_norm_no_update"), _batch_norm(None, 6)),
    **dict.fromkeys(_aten("native_group_norm"), _normalised(1, 2)),
    **dict.fromkeys(_aten("native_layer_norm"), _normalised(2, 3)),
    **dict.fromkeys(_aten("_fused_rms_norm"), _normalised(2, None)),
}
