"""CIFAR's official files are pickles of Python 2, and a pickle may call any function: so nothing is called here.

Beside numbers, strings, lists and dictionaries, a file of CIFAR asks for three names, all to rebuild one array of
bytes. They get stand-ins that keep the bytes; NumPy's own functions, which trust what they are given, are not run. Any
other name is refused.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...pickled import CarefulUnpickler
from ...reading import brief

DIMENSIONS = 4
LABELS = 1 << 31
AGAIN = "remove the file and download it again"


class _Array:
    """Stands in for numpy.ndarray: keeps the bytes of a uint8 array in rows."""

    tensor: Tensor

    def __init__(self, *_: object) -> None:
        """Empty, as NumPy's `_reconstruct` makes it."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, raw = state
        if type(shape) is not tuple or len(shape) > DIMENSIONS or not all(type(n) is int and n > 0 for n in shape):
            raise pickle.UnpicklingError("it holds an array without a shape")
        if not isinstance(kind, _Kind) or kind.name not in (b"u1", "u1") or by_columns or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of bytes, in rows")
        if len(raw) != math.prod(shape):
            raise pickle.UnpicklingError(f"it holds {len(raw)} bytes for an array {tuple(shape)}")
        self.tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(tuple(shape))


class _Kind:
    """Stands in for numpy.dtype: keeps its name."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: bytes have none."""


class _Restricted(CarefulUnpickler):
    """Knows the three names of an array, by either of NumPy's addresses, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name."""
        match module, name:
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct") | ("numpy", "ndarray"):
                return _Array
            case "numpy", "dtype":
                return _Kind
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of images needs")


def read_pickle(raw: bytes, labels: str, path: Path | str = "the pickle") -> tuple[Tensor, Tensor]:
    """Rows of bytes (N, D) and labels (N,) of a file of CIFAR, without running anything that it names.

    Args:
        raw: What the file holds.
        labels: Its entry with the labels: "labels", "fine_labels" or "coarse_labels".
        path: What errors call it.

    Raises:
        ValueError: If it is no such file, or asks for anything but numbers, strings, lists, dictionaries and arrays.

    Example:
        >>> read_pickle(b"cos\\nsystem\\n(S'echo'\\ntR.", "labels")
        Traceback (most recent call last):
        ValueError: the pickle is refused: it asks for os.system, which no file of images needs; remove the file ...
    """
    try:
        content = _Restricted(io.BytesIO(raw), len(raw)).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        why = brief(str(error) if isinstance(error, pickle.UnpicklingError) else error)
        raise ValueError(f"{path} is refused: {why}; {AGAIN}") from error
    if not isinstance(content, dict) or not {b"data", labels.encode()} <= content.keys():
        raise ValueError(f"{path} is not a file of CIFAR: it wants a dictionary with data and {labels}; {AGAIN}")
    images, numbers = content[b"data"], content[labels.encode()]
    tensor = getattr(images, "tensor", None) if isinstance(images, _Array) else None
    if tensor is None or tensor.ndim != 2 or not isinstance(numbers, list):
        raise ValueError(
            f"{path} is not a file of CIFAR: its data is no array of rows, or its {labels} no list; {AGAIN}"
        )
    if not all(type(number) is int and 0 <= number < LABELS for number in numbers) or len(numbers) != len(tensor):
        raise ValueError(
            f"{path} has {len(tensor)} images and {len(numbers)} {labels}, which must be as many integers; {AGAIN}"
        )
    return tensor, torch.tensor(numbers)
