"""Data -> batches: tensors, loaders and re-iterables as one sequence of numbered batches on the device.

A data set must be the same every time it is walked, or the matrix would change between two products. Tensors and lists
are; a loader is walked twice on first use and compared: one that augments is refused, one that only shuffles is
accepted and remembered as having no fixed order.
"""

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .space import random_uniform

DEFAULT_BATCH_SIZE = 256


@dataclass(frozen=True)
class Batch:
    """One batch: the user's object with its tensors on the device, and its place in the data."""

    data: Any
    index: int  # number of the batch
    start: int  # number of its first sample in the data
    size: int  # samples

    def pieces(self, most: int) -> "list[Batch]":
        """This batch in pieces of at most `most` samples."""
        if most >= self.size:
            return [self]
        starts = range(0, self.size, most)
        return [
            Batch(
                map_tensors(self.data, lambda x, a=a: x[a : a + most] if _batched(x, self.size) else x),
                self.index,
                self.start + a,
                min(most, self.size - a),
            )
            for a in starts
        ]


    def take(self, rows: Tensor, index: int) -> "Batch":
        """A batch of some of the samples, in any order and with repeats."""
        return Batch(map_tensors(self.data, lambda x: x[rows]), index, index * len(rows), len(rows))


class Batches:
    """A re-iterable of `Batch`, cached on the device when it fits.

    Args:
        data: A tuple of tensors with one length (X, y), a DataLoader, or a re-iterable of batches.
        batch_size: For tensors only.
        cache: Keep batches on the device; None keeps them when they fit in a third of the free memory.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None,
        device: torch.device,
        dtype: torch.dtype | None,
        cache: bool | None = None,
    ) -> None:
        self.device, self.dtype, self.cache = device, dtype, cache
        self.source = _as_iterable(data, batch_size)
        self.trusted = isinstance(self.source, _TensorBatches | list | tuple)  # the same on every walk by construction
        self.ordered: bool | None = True if self.trusted else None  # None: not known before the first walk
        self.copies = device.type != "cpu" or not self.trusted  # else a kept batch is a view of the user's tensors
        self._kept: list[Batch] | None = None
        self._num_samples: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        self.prepare()
        if self._kept is not None:
            yield from self._kept
        else:
            yield from self._walk()

    @property
    def num_samples(self) -> int:
        """Samples in all."""
        self.prepare()
        assert self._num_samples is not None
        return self._num_samples

    @property
    def cached(self) -> bool:
        """Whether every batch is kept on the device."""
        self.prepare()
        return self._kept is not None

    def prepare(self) -> None:
        """The first walk: count, compare with a second one where that is needed, keep what fits."""
        if self._num_samples is not None:
            return
        kept: list[Batch] | None = [] if self.cache is not False else None
        room = _room(self.device) if self.cache is None else float("inf")
        sums, first, count = [], None, 0
        for batch in self._walk(seed=0):
            count = batch.start + batch.size
            if not self.trusted:
                sums.append(_checksums(batch))
                first = sums[0]
            if kept is not None:
                kept.append(batch)
                room -= _bytes(batch.data) if self.copies else 0
                kept = kept if room >= 0 else None
        if count == 0:
            raise ValueError("the data is empty: there is no batch with a sample in it")
        if not self.trusted and first is not None:
            self.ordered = self._same_twice(first, torch.cat(sums))
        self._kept, self._num_samples = kept, count

    def _same_twice(self, first: Tensor, sums: Tensor) -> bool:
        """Walk again: True if the order is the same, False if only the order differs; refused if the samples do."""
        again = self._walk(seed=1)
        start = _checksums(next(again))
        if _close(start, first):
            return True
        rest = [start] + [_checksums(batch) for batch in again]
        other = torch.cat(rest)
        if len(other) == len(sums) and _close(other.sort().values, sums.sort().values):
            return False
        raise ValueError(
            "two walks over the data gave different samples (augmentation, random padding or drop_last with shuffling), "
            "so every product would belong to another matrix; use a loader without augmentation, or fix one draw of it "
            "with data=list(loader)"
        )

    def _walk(self, seed: int | None = None) -> Iterator[Batch]:
        """Numbered batches on the device; the global generators are as before at every step of the walk."""
        start, iterator = 0, None
        index = 0
        while True:
            with isolated_rng(None if seed is None else 1_000_003 * seed + index):
                iterator = iter(self.source) if iterator is None else iterator
                data = next(iterator, _END)
            if data is _END:
                return
            size = num_samples(data)
            if size:
                yield Batch(self._place(data), index, start, size)
            start, index = start + size, index + 1

    def _place(self, data: Any) -> Any:
        """Tensors on the device, floating ones in the dtype of the run."""

        def place(x: Tensor) -> Tensor:
            dtype = self.dtype if self.dtype is not None and x.is_floating_point() else x.dtype
            return x.detach().to(self.device, dtype, non_blocking=True)

        return map_tensors(data, place)

    def sample(self, num_batches: int, batch_size: int, seed: int) -> list[Batch]:
        """Disjoint batches of samples drawn without replacement.

        Where the batches cannot be pooled (ragged tensors, a stream too large to keep), the user's own batches of that
        size are taken instead.
        """
        if num_batches * batch_size > self.num_samples:
            raise ValueError(
                f"num_batches * batch_size = {num_batches} * {batch_size} samples asked of {self.num_samples}; "
                "take fewer or smaller batches"
            )
        pool = self.pool()
        if pool is None:
            whole = [batch for batch in self if batch.size == batch_size]
            if len(whole) < num_batches:
                raise ValueError(
                    f"the data cannot be re-batched and has {len(whole)} batches of {batch_size} samples; "
                    f"{num_batches} were asked for: set batch_size to that of the loader"
                )
            return [whole[int(i)] for i in _shuffled(len(whole), seed)[:num_batches]]
        chosen = _shuffled(self.num_samples, seed)[: num_batches * batch_size].to(self.device)
        return [pool.take(rows, index) for index, rows in enumerate(chosen.split(batch_size))]

    def pool(self) -> Batch | None:
        """All samples as one batch, or None where they are not kept or do not stack."""
        if self._kept is None or not all(_all_batched(batch) for batch in self._kept):
            return None
        try:
            data = stack_batches([batch.data for batch in self._kept])
        except (RuntimeError, TypeError):
            return None
        return Batch(data, 0, 0, self.num_samples)


_END = object()


class _TensorBatches:
    """Tensors of one length, cut into batches; views, no copy."""

    def __init__(self, tensors: tuple[Tensor, ...], size: int) -> None:
        self.tensors, self.size = tensors, size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(x.split(self.size) for x in self.tensors), strict=True)


def _as_iterable(data: Any, batch_size: int | None) -> Iterable[Any]:
    """What the user gave as something that can be walked again and again."""
    if data is None:
        raise ValueError("data is missing: give (X, y) tensors, a DataLoader or a list of batches")
    if isinstance(data, Tensor):
        raise ValueError("data is a single tensor; give a tuple (X, y), or a list of batches")
    if isinstance(data, tuple) and data and all(isinstance(x, Tensor) for x in data):
        lengths = [len(x) if x.ndim else 0 for x in data]
        if len(set(lengths)) > 1:
            raise ValueError(f"data tensors differ in length: {', '.join(str(tuple(x.shape)) for x in data)}")
        if lengths[0] == 0:
            raise ValueError("the data is empty: tensors of length 0")
        return _TensorBatches(data, batch_size or DEFAULT_BATCH_SIZE)
    if batch_size is not None:
        raise ValueError("batch_size is for data given as tensors; a loader or list has its own batches")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError("data is a Dataset, which gives samples, not batches; wrap it in a DataLoader")
    if not hasattr(data, "__iter__"):
        raise TypeError(f"data must be (X, y) tensors, a DataLoader or a re-iterable of batches, got {type(data).__name__}")
    if isinstance(data, Iterator):
        raise ValueError("data can be walked only once (a generator or iterator); pass list(data)")
    return list(data) if isinstance(data, Sequence) and not isinstance(data, DataLoader) else data


# ------------------------------------------------------------------------------------- trees of tensors


def map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A nested batch with `fn` applied to each tensor; anything else is passed through."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(value, fn) for key, value in tree.items()}
        return type(tree)(mapped) if type(tree) is not dict else mapped  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, fn) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(value, fn) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclasses.replace(tree, **{f.name: map_tensors(getattr(tree, f.name), fn) for f in dataclasses.fields(tree)})
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a nested batch, in order."""
    found: list[Tensor] = []
    map_tensors(tree, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def stack_batches(batches: Sequence[Any]) -> Any:
    """Several batches as one, tensors joined along their first dimension."""
    columns = [iter(column) for column in zip(*(tensors_of(batch) for batch in batches), strict=True)]
    joined = iter([torch.cat(list(column)) for column in columns])
    return map_tensors(batches[0], lambda _: next(joined))


def num_samples(batch: Any) -> int:
    """The length of the first tensor that has one."""
    for x in tensors_of(batch):
        if x.ndim:
            return len(x)
    raise ValueError(f"cannot tell how many samples are in a batch without tensors: {type(batch).__name__}")


def _batched(x: Tensor, size: int) -> bool:
    return x.ndim > 0 and len(x) == size


def _all_batched(batch: Batch) -> bool:
    return all(_batched(x, batch.size) for x in tensors_of(batch.data))


def _bytes(data: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_of(data))


def _room(device: torch.device) -> float:
    """A third of the free memory of the device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 3
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 3
    except (ValueError, OSError, AttributeError):
        return 2.0**31


# ------------------------------------------------------------------------------------------- randomness


def _shuffled(size: int, seed: int) -> Tensor:
    """A keyed permutation of 0 ... size - 1."""
    return random_uniform(size, ("permutation", seed)).argsort()


def _checksums(batch: Batch) -> Tensor:
    """One number per sample that changes when the sample does: a fixed random weighting of its entries."""
    total = torch.zeros(batch.size, dtype=torch.float64)
    for x in tensors_of(batch.data):
        if _batched(x, batch.size):
            flat = x.reshape(batch.size, -1).double().cpu()
            total += flat @ random_uniform(flat.shape[1], ("checksum",))
    return total


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=0, equal_nan=True)


@contextlib.contextmanager
def isolated_rng(seed: int | None = None, device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python on the way out; seed them inside if asked to."""
    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
