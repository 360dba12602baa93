"""Data -> batches: tensors, loaders and re-iterables as one sequence of numbered batches on the device.

A data set must be the same every time it is walked, or the matrix would change between two products. Tensors and lists
are; a loader is walked twice on first use and compared: one that augments is refused, one that only shuffles is
accepted and remembered as having no fixed order.

Where several ranks work together, the data is one sequence of batches that all of them see, whoever holds them.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .comm import SELF, World
from .loaders import whole_of
from .memory import free_memory
from .space import random_permutation, random_uniform

DEFAULT_BATCH_SIZE = 256
COMPARED = 512  # samples of a loader that are looked at twice


@dataclass(frozen=True)
class Batch:
    """One batch: the user's object with its tensors on the device, and its place in the data."""

    data: Any
    index: int  # number of the batch
    start: int  # number of its first sample in the data
    size: int  # samples
    idle: bool = False  # walked to keep step with other ranks, and not counted

    def pieces(self, most: int) -> "list[Batch]":
        """This batch in pieces of at most `most` samples."""
        if most >= self.size:
            return [self]
        return [self._piece(a, min(most, self.size - a)) for a in range(0, self.size, most)]

    def parts(self, number: int) -> "list[Batch]":
        """This batch in `number` pieces as equal as can be, of at least one sample each."""
        ends = [self.size * i // number for i in range(number + 1)]
        return [self] if number == 1 else [self._piece(a, b - a) for a, b in itertools.pairwise(ends)]

    def _piece(self, first: int, size: int) -> "Batch":
        data = map_tensors(self.data, lambda x: x[first : first + size] if _batched(x, self.size) else x)
        return Batch(data, self.index, self.start + first, size, self.idle)

    def take(self, rows: Tensor, index: int) -> "Batch":
        """A batch of some of the samples, in any order and with repeats."""
        return Batch(map_tensors(self.data, lambda x: x[rows]), index, index * len(rows), len(rows))


class Batches:
    """A re-iterable of `Batch`, cached on the device when it fits.

    Args:
        data: A tuple of tensors with one length (X, y), a DataLoader, or a re-iterable of batches.
        batch_size: For tensors only.
        cache: Keep batches on the device; None keeps them when they fit in a third of the free memory.
        world: The ranks that work together.
        share: The data is this rank's share of the whole, and not the same on every rank. The whole is then the shares
            in the order of ranks; any of them may be empty.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None,
        device: torch.device,
        dtype: torch.dtype | None,
        cache: bool | None = None,
        world: World = SELF,
        share: bool = False,
    ) -> None:
        self.device, self.dtype, self.cache = device, dtype, cache
        self.world, self.share = world, share and world.size > 1
        data = data if self.share else whole_of(data, world.size)
        self.source = _as_iterable(data, batch_size, may_be_empty=self.share)
        self.trusted = isinstance(self.source, _TensorBatches | list | tuple)  # the same on every walk by construction
        self.ordered: bool | None = True if self.trusted else None  # None: not known before the first walk
        self.copies = not self._is_in_place()  # else a kept batch is a view of the user's tensors
        self._kept: list[Batch] | None = None
        self._num_samples: int | None = None
        self._held: list[tuple[int, int]] = []  # batches and samples of each rank, where each has a share

    def _is_in_place(self) -> bool:
        """Whether the data lies on the device already, as the run wants it."""
        if isinstance(self.source, _TensorBatches):
            return all(
                x.device == self.device and (self.dtype in (None, x.dtype) or not x.is_floating_point())
                for x in self.source.tensors
            )
        return self.trusted and self.device.type == "cpu" and self.dtype is None

    def __iter__(self) -> Iterator[Batch]:
        self.prepare()
        if self.share:
            yield from self._from_all()
        else:
            yield from self.own()

    def own(self) -> Iterator[Batch]:
        """The batches that this rank holds: its share, or all of them."""
        self.prepare()
        if self._kept is not None:
            yield from self._kept
        else:
            # another order on each rank would be another batch for each
            yield from self._walk(seed=None if self.world.size == 1 else 0)

    def first(self) -> Batch | None:
        """The first batch that this rank holds, the same one each time; None of a share without any."""
        self.prepare()
        return next(iter(self._kept) if self._kept is not None else self._walk(seed=0), None)

    def _from_all(self) -> Iterator[Batch]:
        """The batches of all shares, each passed round by the rank that holds it."""
        for rank, (count, _) in enumerate(self._held):
            own = self.own() if rank == self.world.rank else iter(())
            for _ in range(count):
                batch = next(own, None)
                sent = None if batch is None else (on_host(batch.data), batch.index, batch.start, batch.size)
                data, *place = self.world.of(rank, sent)  # type: ignore[misc]
                yield batch if batch is not None else Batch(self._place(data), *place)

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
        error = None
        found: tuple[list[Batch] | None, bool | None, int, int] = (None, None, 0, 0)
        try:
            found = self._first_walk()
        except Exception as caught:
            error = caught
        told = self.world.agree("the first walk over the data", error, self._seen(*found))
        self._settle(found[0], told)

    def _first_walk(self) -> tuple[list[Batch] | None, bool | None, int, int]:
        """Batches if they are to be kept, whether they come in a fixed order, samples and batches counted."""
        kept: list[Batch] | None = [] if self.cache is not False else None
        room = _room(self.device) if self.cache is None else float("inf")
        sums: list[Tensor] = []
        count, number = 0, 0
        for batch in self._walk(seed=0):
            count, number = batch.start + batch.size, batch.index + 1
            if not self.trusted:
                sums.append(checksums(batch))
            if kept is not None:
                kept.append(batch)
                room -= _bytes(batch.data) if self.copies else 0
                kept = kept if room >= 0 else None
        ordered = self.ordered
        if not self.trusted:
            ordered = self._same_twice(torch.cat(sums)) if sums else True
        return kept, ordered, count, number

    def _seen(self, kept: list[Batch] | None, ordered: bool | None, count: int, number: int) -> tuple[Any, ...]:
        """What the ranks tell each other of their first walks; the last entry is the same where the first batch is."""
        first = None
        if self.world.size > 1 and not self.share and count:
            first = kept[0] if kept else next(self._walk(seed=0))
        return kept is not None, ordered, count, number, 0.0 if first is None else float(checksums(first).sum())

    def _settle(self, kept: list[Batch] | None, told: list[tuple[Any, ...]]) -> None:
        """Take down what the first walk showed, as it is on all ranks together."""
        keeps, ordered, counts, numbers, marks = zip(*told, strict=True)
        whole = sum(counts) if self.share else counts[0]
        if not whole:
            raise ValueError("the data is empty: there is no batch with a sample in it")
        same = len({*counts}) == 1 and _close(torch.tensor(marks), torch.tensor(marks[:1]).expand(len(marks)))
        if not self.share and not same:
            raise ValueError(
                f"the data is not the same on every rank: they have {', '.join(map(str, counts))} samples, or others; "
                "give the whole data on each, which shares out the work, or share=True if each rank holds its own part"
            )
        self._held = list(zip(numbers, counts, strict=True)) if self.share else []
        index, start = self._offset()
        if kept is not None and self.share:
            kept = [dataclasses.replace(b, index=b.index + index, start=b.start + start) for b in kept]
        self._kept = kept if all(keeps) else None
        self.ordered, self._num_samples = all(ordered), whole

    def _offset(self) -> tuple[int, int]:
        """Batches and samples of the ranks before this one, where each has a share."""
        before = self._held[: self.world.rank]
        return sum(number for number, _ in before), sum(size for _, size in before)

    def _same_twice(self, sums: Tensor) -> bool:
        """Walk again: True if the order is the same, False if only the order differs; refused if the samples do.

        The first samples are enough for the same order: what augments or shuffles does not spare all of them.
        """
        again = map(checksums, self._walk(seed=1))
        other = sums[:0]
        for part in again:
            other = torch.cat([other, part])
            if len(other) >= COMPARED:
                break
        if _close(other, sums[: len(other)] if len(other) >= COMPARED else sums):
            return True
        other = torch.cat([other, *again])
        if _close(other.sort().values, sums.sort().values):
            return False
        raise ValueError(
            "two walks over the data gave different samples (augmentation, random padding, drop_last with shuffling): "
            "every product would belong to another matrix; use a loader without augmentation, or fix one draw of it "
            "with data=list(loader)"
        )

    def _walk(self, seed: int | None = None) -> Iterator[Batch]:
        """Numbered batches on the device; the global generators are as before at every step of the walk."""
        iterator, (index, start) = None, self._offset()
        with _own_generator(self.source, seed):
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
            moved = x.detach().to(self.device, dtype, non_blocking=True)
            return moved.clone() if moved.is_inference() else moved  # what is kept must be differentiable through

        with torch.inference_mode(False):
            return map_tensors(data, place)

    def sample(self, num_batches: int, batch_size: int, seed: int) -> list[Batch]:
        """Disjoint batches of samples drawn without replacement.

        Where the batches cannot be pooled (ragged tensors, a stream too large to keep), the user's own batches of that
        size are taken instead.
        """
        if num_batches < 1 or batch_size < 1:
            raise ValueError(f"num_batches and batch_size must be at least 1, got {num_batches} and {batch_size}")
        if num_batches * batch_size > self.num_samples:
            raise ValueError(
                f"num_batches * batch_size = {num_batches} * {batch_size} samples asked of {self.num_samples}; "
                "take fewer or smaller batches"
            )
        pool = self._own_pool()
        if not self.world.all(pool is not None):
            whole = [batch.index for batch in self if batch.size == batch_size]
            if len(whole) < num_batches:
                raise ValueError(
                    f"the data cannot be re-batched and has {len(whole)} batches of {batch_size} samples; "
                    f"{num_batches} were asked for: set batch_size to that of the loader"
                )
            picked = {whole[int(i)] for i in _shuffled(len(whole), seed)[:num_batches]}
            return [batch for batch in self if batch.index in picked]
        assert pool is not None
        chosen = _shuffled(self.num_samples, seed)[: num_batches * batch_size].to(self.device)
        if self.share:
            pool, chosen = self._collected(pool, chosen), torch.arange(len(chosen), device=self.device)
        return [pool.take(rows, index) for index, rows in enumerate(chosen.split(batch_size))]

    def _collected(self, pool: Batch, chosen: Tensor) -> Batch:
        """The chosen samples of all shares as one batch, in the order in which they were chosen."""
        places = ((chosen >= pool.start) & (chosen < pool.start + pool.size)).nonzero()[:, 0]
        data = on_host(pool.take(chosen[places] - pool.start, 0).data) if len(places) else None
        told = self.world.gather((places.tolist(), data))
        order = torch.tensor([place for own, _ in told for place in own]).argsort()
        whole = stack_batches([data for _, data in told if data is not None])
        return Batch(self._place(map_tensors(whole, lambda x: x[order])), 0, 0, len(chosen))

    def pool(self) -> Batch | None:
        """All samples as one batch, or None where they are not kept, do not stack or lie on several ranks."""
        return None if self.share else self._own_pool()

    def _own_pool(self) -> Batch | None:
        """All samples of this rank as one batch, which may be empty."""
        self.prepare()
        if self._kept is None or not all(_all_batched(batch) for batch in self._kept):
            return None
        if not self._kept:
            return Batch(None, 0, self._offset()[1], 0)
        try:
            data = stack_batches([batch.data for batch in self._kept])
        except (RuntimeError, TypeError):
            return None
        start = self._kept[0].start
        return Batch(data, 0, start, self._kept[-1].start + self._kept[-1].size - start)


_END = object()


class _TensorBatches:
    """Tensors of one length, cut into batches; views, no copy."""

    def __init__(self, tensors: tuple[Tensor, ...], size: int, may_be_empty: bool = False) -> None:
        lengths = {len(x) if x.ndim else 0 for x in tensors}
        if len(lengths) > 1:
            raise ValueError(f"data tensors differ in length: {', '.join(str(tuple(x.shape)) for x in tensors)}")
        if lengths == {0} and not may_be_empty:
            raise ValueError("the data is empty: tensors of length 0")
        if size < 1:
            raise ValueError(f"batch_size must be at least 1, got {size}")
        self.tensors, self.size = tensors, size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(x.split(self.size) for x in self.tensors), strict=True)


def _as_iterable(data: Any, batch_size: int | None, may_be_empty: bool = False) -> Iterable[Any]:
    """What the user gave as something that can be walked again and again."""
    if data is None:
        raise ValueError("data is missing: give (X, y) tensors, a DataLoader or a list of batches")
    if isinstance(data, Tensor):
        raise ValueError("data is a single tensor; give a tuple (X, y), or a list of batches")
    if isinstance(data, tuple) and any(isinstance(x, np.ndarray) for x in data):
        raise TypeError("data holds NumPy arrays; give tensors: (torch.as_tensor(X), torch.as_tensor(y))")
    if isinstance(data, Mapping):
        raise TypeError(f"data is one {type(data).__name__}; give a list of batches: [data]")
    if is_tensors(data):
        return _TensorBatches(data, DEFAULT_BATCH_SIZE if batch_size is None else batch_size, may_be_empty)
    if batch_size is not None:
        raise ValueError("batch_size is for data given as tensors; a loader or list has its own batches")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError("data is a Dataset, which gives samples, not batches; wrap it in a DataLoader")
    if not hasattr(data, "__iter__"):
        raise TypeError(
            f"data must be (X, y) tensors, a DataLoader or a re-iterable of batches, got {type(data).__name__}"
        )
    if isinstance(data, Iterator):
        raise ValueError("data can be walked only once (a generator or iterator); pass list(data)")
    return list(data) if isinstance(data, Sequence) and not isinstance(data, DataLoader) else data


def is_tensors(data: Any) -> bool:
    """Whether the data is a tuple of tensors, all samples in one."""
    return isinstance(data, tuple) and bool(data) and all(isinstance(x, Tensor) for x in data)


# ------------------------------------------------------------------------------------- trees of tensors


def map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A nested batch with `fn` applied to each tensor; anything else is passed through."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(value, fn) for key, value in tree.items()}
        if not isinstance(tree, dict):
            return type(tree)(mapped)  # type: ignore[call-arg]
        same = copy.copy(tree)  # a subclass may not be made from a dict, as defaultdict
        same.update(mapped)
        return same
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, fn) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(value, fn) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [f.name for f in dataclasses.fields(tree) if f.init]
        return dataclasses.replace(tree, **{name: map_tensors(getattr(tree, name), fn) for name in fields})
    return tree


def on_host(tree: Any) -> Any:
    """A nested batch with its tensors on the host, to be sent."""
    return map_tensors(tree, lambda x: x.detach().cpu())


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a nested batch, in order."""
    found: list[Tensor] = []
    map_tensors(tree, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def only_tensors(tree: Any) -> bool:
    """Whether a nested batch holds nothing but tensors, in tuples, lists and dictionaries."""
    if isinstance(tree, Mapping):
        return all(map(only_tensors, tree.values()))
    if isinstance(tree, tuple | list):
        return all(map(only_tensors, tree))
    return tree is None or isinstance(tree, Tensor)


def with_tensors(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """A nested batch with other tensors in the places of its own.

    Example:
        >>> with_tensors({"x": torch.zeros(1), "n": 3}, [torch.ones(1)])
        {'x': tensor([1.]), 'n': 3}
    """
    given = iter(tensors)
    return map_tensors(tree, lambda _: next(given))


def skeleton(tree: Any) -> str:
    """How a nested batch is put together, without its tensors: their order alone does not tell which is which.

    Example:
        >>> skeleton({"x": torch.zeros(1), "y": None})
        "{'x': '*', 'y': None}"
    """
    stars: Iterable[Any] = itertools.repeat("*")
    return repr(with_tensors(tree, stars))


def stack_batches(batches: Sequence[Any]) -> Any:
    """Several batches as one, tensors joined along their first dimension."""
    columns = [iter(column) for column in zip(*(tensors_of(batch) for batch in batches), strict=True)]
    return with_tensors(batches[0], [torch.cat(list(column)) for column in columns])


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
    free = free_memory(device)
    return 2.0**31 if free is None else free / 3


# ------------------------------------------------------------------------------------------- randomness


def _shuffled(size: int, seed: int) -> Tensor:
    """A keyed permutation of 0 ... size - 1."""
    return random_permutation(size, ("permutation", seed))


def checksums(batch: Batch) -> Tensor:
    """One number per sample that changes when the sample does: a fixed random weighting of its entries."""
    total = torch.zeros(batch.size, dtype=torch.float64)
    for x in tensors_of(batch.data):
        if _batched(x, batch.size):
            flat = x.reshape(batch.size, math.prod(x.shape[1:])).double().cpu()
            total += flat @ random_uniform(flat.shape[1], ("checksum",))
    return total


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order in which a checksum was added up."""
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if len(finite) else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12 * scale, equal_nan=True)


@contextlib.contextmanager
def _own_generator(source: Any, seed: int | None) -> Iterator[None]:
    """Put back a loader's own generator after a walk; seed it inside if asked to."""
    own = getattr(source, "generator", None)
    if not isinstance(own, torch.Generator):
        yield
        return
    state = own.get_state()
    try:
        if seed is not None:
            own.manual_seed(seed)
        yield
    finally:
        own.set_state(state)


@contextlib.contextmanager
def isolated_rng(seed: int | None = None, device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python on the way out; seed them inside if asked to."""
    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpu = device if device is not None and device.type == "cuda" else None
    cuda = None if gpu is None else torch.cuda.get_rng_state(gpu)
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            seed_torch(seed, device)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        if gpu is not None and cuda is not None:
            torch.cuda.set_rng_state(cuda, gpu)


def seed_torch(seed: int, device: torch.device | None = None) -> None:
    """Seed the generator of the CPU and of one device; `torch.manual_seed` would reach every other one as well."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
