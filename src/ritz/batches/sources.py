"""The kinds of data that users give, as something that can be read repeatedly; everything else is refused."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

DEFAULT_BATCH_SIZE = 256


class TensorBatches:
    """Tensors of one length, cut into batches; views, no copy."""

    def __init__(self, tensors: tuple[Tensor, ...], size: int, may_be_empty: bool = False) -> None:
        lengths = {len(x) if x.ndim else 0 for x in tensors}
        if len(lengths) > 1:
            raise ValueError(
                f"data tensors must have one length, got shapes {', '.join(str(tuple(x.shape)) for x in tensors)}"
            )
        if lengths == {0} and not may_be_empty:
            raise ValueError("the data is empty: its tensors have length 0; give at least one sample")
        if size < 1:
            raise ValueError(f"batch_size must be at least 1, got {size}")
        self.tensors, self.size = tensors, size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(x.split(self.size) for x in self.tensors), strict=True)


def as_iterable(data: Any, batch_size: int | None, may_be_empty: bool = False) -> Iterable[Any]:
    """The user's data as something that can be read repeatedly.

    Raises:
        TypeError, ValueError: If it cannot be, or does not consist of batches; the message says what to give instead.

    Example:
        >>> [x.tolist() for x, in as_iterable((torch.arange(3),), batch_size=2)]
        [[0, 1], [2]]
    """
    if data is None:
        raise ValueError("data is missing: give (X, y) tensors, a DataLoader or a list of batches")
    if isinstance(data, Tensor):
        raise ValueError("data is a single tensor; give a tuple (X, y), or a list of batches")
    if isinstance(data, tuple) and any(isinstance(x, np.ndarray) for x in data):
        raise TypeError("data holds NumPy arrays; give tensors: (torch.as_tensor(X), torch.as_tensor(y))")
    if isinstance(data, Mapping):
        raise TypeError(f"data is one {type(data).__name__}; give a list of batches: [data]")
    if is_tensors(data):
        return TensorBatches(data, DEFAULT_BATCH_SIZE if batch_size is None else batch_size, may_be_empty)
    if batch_size is not None:
        raise ValueError("batch_size is for data given as tensors; a loader or list has its own batches")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError("data is a Dataset, which gives samples, not batches; wrap it in a DataLoader")
    if not hasattr(data, "__iter__"):
        raise TypeError(
            f"data must be (X, y) tensors, a DataLoader or a re-iterable of batches, got {type(data).__name__}"
        )
    if isinstance(data, Iterator):
        raise ValueError("data can be read only once (a generator or iterator); pass list(data)")
    return list(data) if isinstance(data, Sequence) and not isinstance(data, DataLoader) else data


def is_tensors(data: Any) -> bool:
    """Whether the data is a tuple of tensors, each of which holds all samples.

    Example:
        >>> is_tensors((torch.zeros(3), torch.zeros(3))), is_tensors([(torch.zeros(3), torch.zeros(3))])
        (True, False)
    """
    return isinstance(data, tuple) and bool(data) and all(isinstance(x, Tensor) for x in data)
