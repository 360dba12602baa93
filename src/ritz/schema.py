"""What a result from a file must look like: the types of its fields, and the shapes of tensors that belong together."""

import dataclasses
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union

from torch import Tensor

# Shapes of tensors by class and field: a letter is a size, the same one throughout a result, and "..." any shape, the
# same one throughout. Numbers, except where "?" says that they are yes or no. What is None, or no tensor, is passed by.
SHAPES: Mapping[str, Mapping[str, str]] = {
    "Estimate": {"value": "...", "stderr": "..."},
    "Bootstrap": {"means": "B"},
    "Tridiagonal": {"alpha": "k m", "beta": "k m", "norms2": "k"},
    "Spectrum": {"head": "r", "head_residuals": "r", "layer_samples": "t K l"},
    "Head": {"values": "r", "vectors": "r d", "residuals": "r", "residual_rows": "r d"},
    "EigenPairs": {"values": "k", "vectors": "d k", "residuals": "k", "converged": "? k"},
    "LawFit": {"nodes": "n", "weights": "n"},
    "Outliers": {"eigenvalues": "k"},
    "Line": {"losses": "n", "errors": "n", "coordinates": "n"},
    "Interpolation": {"losses": "n", "errors": "n", "coordinates": "n"},
    "Plane": {"losses": "x y", "errors": "x y", "x": "x", "y": "y", "points": "m two"},
    "LayerSpectrum": {"eigenvalues": "n"},
    "MarginDistribution": {"values": "n", "weight": "n", "correct": "? n"},
    "LayerMargins": {"values": "l n", "weight": "n", "correct": "? n", "spread": "l"},
    "MarginCorrelations": {"traces": "n", "bound": "n", "is_correct": "? n", "outlier": "? n"},
    "Outputs": dict.fromkeys(
        (
            "loss", "weight", "margin", "softmax_margin", "impurity", "slack", "confidence", "entropy", "slope",
            "input_norm2",
        ),
        "n",
    ),
}  # fmt: skip


def check_fields(cls: type, fields: Mapping[str, Any]) -> None:
    """Hold the fields of a result, by name, against its class.

    Raises:
        ValueError: If one is missing, unknown, or of another type or shape; it says which.

    Example:
        >>> check_fields(ritz.Estimate, {"name": "trace", "value": "three"})
        Traceback (most recent call last):
        ValueError: the value of Estimate is a str, not float | Tensor
    """
    known = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(f"{cls.__name__} has no {unknown[0]!r}")
    for name, field in known.items():
        if name in fields:
            hint = _hints(cls)[name]
            if not fits(fields[name], hint):
                raise ValueError(f"the {name} of {cls.__name__} is {_a(fields[name])}, not {_told(hint)}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{cls.__name__} lacks its {name}")
    sizes: dict[str, Any] = {}
    for name, shape in SHAPES.get(cls.__name__, {}).items():
        if isinstance(tensor := fields.get(name), Tensor):
            _check_shape(tensor, shape, sizes, f"the {name} of {cls.__name__}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value that was read is of the type that is declared; any sequence passes for a tuple or a list.

    Example:
        >>> fits(3, float), fits(True, int), fits({"a": (1.0, 2)}, Mapping[str, tuple[float, ...]]), fits(None, str)
        (True, False, True, False)
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in args)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in args)
    if hint in (int, float) or hint is bool:
        return isinstance(value, hint | int) and isinstance(value, bool) == (hint is bool)
    if origin is tuple and (len(args) != 2 or args[1] is not Ellipsis):
        return isinstance(value, list | tuple) and len(value) == len(args) and all(map(fits, value, args))
    if origin in (tuple, list, Sequence):
        return isinstance(value, list | tuple) and all(fits(item, args[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if hint is Hashable:
        return isinstance(value, Hashable)
    if getattr(hint, "_is_protocol", False):
        return all(callable(getattr(value, name, None)) for name in vars(hint) if not name.startswith("_"))
    return isinstance(value, hint)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _check_shape(tensor: Tensor, shape: str, sizes: dict[str, Any], what: str) -> None:
    logical, letters = shape.startswith("? "), shape.removeprefix("? ").split()
    if (tensor.dtype.itemsize > 1 or tensor.dtype.is_floating_point) == logical or tensor.is_complex():
        raise ValueError(f"{what} holds {tensor.dtype}")
    own: list[Any] = [tensor.shape] if letters == ["..."] else list(tensor.shape)
    if len(own) != len(letters):
        raise ValueError(f"{what} has {tensor.ndim} dimensions, not {len(letters)}")
    for letter, size in zip(letters, own, strict=True):
        if sizes.setdefault(letter, size) != size:
            raise ValueError(f"{what} has shape {tuple(tensor.shape)}, which does not fit the others")


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"a {name}" if not isinstance(value, Tensor) else f"a tensor {tuple(value.shape)}"


def _told(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    for prefix in ("collections.abc.", "typing.", "torch."):
        text = text.replace(prefix, "")
    return text
