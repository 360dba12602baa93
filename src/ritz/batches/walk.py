"""Data as a sequence of numbered batches on the device, the same on every walk; kept on the device if they fit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm import SELF, World
from ..loaders import whole_of
from ..memory import bytes_of, free_memory
from ..space import random_permutation
from .batch import Batch, checksums, is_batched, same_sums
from .generators import isolated_rng, own_generator
from .sources import TensorBatches, as_iterable
from .trees import map_tensors, num_samples, on_host, stack_batches, tensors_of

COMPARED = 512  # samples of a loader that are compared between two walks

_END = object()


class Batches:
    """A re-iterable of `Batch`, cached on the device when it fits.

    Args:
        data: A tuple of tensors with one length (X, y), a DataLoader, or a re-iterable of batches.
        batch_size: For tensors only.
        cache: Keep batches on the device; None keeps them when they fit in a third of the free memory.
        world: The ranks that work together.
        share: The data is this rank's share of the whole, and not the same on every rank. The whole then consists of
            the shares in the order of ranks; a share may be empty.

    Example:
        >>> data = torch.arange(5.0)[:, None], torch.arange(5)
        >>> batches = Batches(data, batch_size=2, device=torch.device("cpu"), dtype=None)
        >>> [(batch.index, batch.start, batch.size) for batch in batches], batches.num_samples, batches.cached
        ([(0, 0, 2), (1, 2, 2), (2, 4, 1)], 5, True)
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
        self.source = as_iterable(data, batch_size, may_be_empty=self.share)
        self.trusted = isinstance(self.source, TensorBatches | list | tuple)  # the same on every walk by construction
        self.ordered: bool | None = True if self.trusted else None  # None: not known before the first walk
        self.copies = not self._is_in_place()  # otherwise, kept batches are views of the user's tensors
        self._kept: list[Batch] | None = None
        self._num_samples: int | None = None
        self._held: list[tuple[int, int]] = []  # batches and samples of each rank, if each has a share

    def _is_in_place(self) -> bool:
        """Whether the data is already on the device, in the dtype of the run."""
        if isinstance(self.source, TensorBatches):
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
            # with one seed, a shuffling loader has the same order on each rank and in a resumed run
            yield from self._walk(seed=0)

    def first(self) -> Batch | None:
        """The first batch that this rank holds, the same one each time; None if its share is empty."""
        self.prepare()
        return next(iter(self._kept) if self._kept is not None else self._walk(seed=0), None)

    def _from_all(self) -> Iterator[Batch]:
        """The batches of all shares, each sent to all ranks by the rank that holds it."""
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
        """The first walk: count samples, compare with a second walk if that is needed, keep batches that fit."""
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
                room -= bytes_of(tensors_of(batch.data)) if self.copies else 0
                kept = kept if room >= 0 else None
        ordered = self.ordered
        if not self.trusted:
            ordered = self._same_twice(torch.cat(sums)) if sums else True
        return kept, ordered, count, number

    def _seen(self, kept: list[Batch] | None, ordered: bool | None, count: int, number: int) -> tuple[Any, ...]:
        """What the ranks tell each other about their first walks; the last entry identifies the first batch."""
        first = None
        if self.world.size > 1 and not self.share and count:
            first = kept[0] if kept else next(self._walk(seed=0))
        return kept is not None, ordered, count, number, 0.0 if first is None else float(checksums(first).sum())

    def _settle(self, kept: list[Batch] | None, told: list[tuple[Any, ...]]) -> None:
        """Store the results of the first walks of all ranks."""
        keeps, ordered, counts, numbers, marks = zip(*told, strict=True)
        whole = sum(counts) if self.share else counts[0]
        if not whole:
            raise ValueError("the data is empty: there is no batch with a sample in it")
        same = len({*counts}) == 1 and same_sums(torch.tensor(marks), torch.tensor(marks[:1]).expand(len(marks)))
        if not self.share and not same:
            raise ValueError(
                f"the data must be the same on every rank, but the ranks have {', '.join(map(str, counts))} samples, "
                "which differ in number or content; give the whole data on every rank, and ritz divides the work, or "
                "share=True if each rank holds its own part"
            )
        self._held = list(zip(numbers, counts, strict=True)) if self.share else []
        index, start = self._offset()
        if kept is not None and self.share:
            kept = [dataclasses.replace(b, index=b.index + index, start=b.start + start) for b in kept]
        self._kept = kept if all(keeps) else None
        self.ordered, self._num_samples = all(ordered), whole

    def _offset(self) -> tuple[int, int]:
        """Batches and samples of the ranks before this one, if each has a share."""
        before = self._held[: self.world.rank]
        return sum(number for number, _ in before), sum(size for _, size in before)

    def _same_twice(self, sums: Tensor) -> bool:
        """Walk again: True if the order is the same, False if only the order differs; error if the samples differ.

        Comparing the first samples is enough, because augmentation or shuffling changes some of them.
        """
        again = map(checksums, self._walk(seed=1))
        other = sums[:0]
        for part in again:
            other = torch.cat([other, part])
            if len(other) >= COMPARED:
                break
        if same_sums(other, sums[: len(other)] if len(other) >= COMPARED else sums):
            return True
        other = torch.cat([other, *again])
        if same_sums(other.sort().values, sums.sort().values):
            return False
        raise ValueError(
            "two walks over the data gave different samples (augmentation, random padding, drop_last with shuffling), "
            "so every product would belong to another matrix; use a loader without augmentation, or fix one draw of it "
            "with data=list(loader)"
        )

    def _walk(self, seed: int) -> Iterator[Batch]:
        """Numbered batches on the device; at every step of the walk, the global generators are restored."""
        iterator, (index, start) = None, self._offset()
        with own_generator(self.source, seed):
            while True:
                with isolated_rng(1_000_003 * seed + index):
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
            return moved.clone() if moved.is_inference() else moved  # autograd refuses inference tensors

        with torch.inference_mode(False):
            return map_tensors(data, place)

    def sample(self, num_batches: int, batch_size: int, seed: int) -> list[Batch]:
        """Disjoint batches of samples drawn without replacement.

        If the batches cannot be pooled (ragged tensors, a stream too large to keep), the user's own batches of that
        size are taken instead.
        """
        if num_batches < 1 or batch_size < 1:
            raise ValueError(f"num_batches and batch_size must be at least 1, got {num_batches} and {batch_size}")
        if num_batches * batch_size > self.num_samples:
            raise ValueError(
                f"num_batches * batch_size = {num_batches} * {batch_size} is more than the {self.num_samples} samples; "
                "take fewer or smaller batches"
            )
        pool = self._own_pool()
        if not self.world.all(pool is not None):
            whole = [batch.index for batch in self if batch.size == batch_size]
            if len(whole) < num_batches:
                raise ValueError(
                    f"the data cannot be re-batched, and has {len(whole)} batches of {batch_size} samples, but "
                    f"num_batches={num_batches}; set batch_size to that of the loader"
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
        return Batch(self._place(Batch(whole, 0, 0, len(order)).take(order, 0).data), 0, 0, len(chosen))

    def pool(self) -> Batch | None:
        """All samples as one batch; None if they are not kept, do not stack, or are on several ranks."""
        return None if self.share else self._own_pool()

    @torch.inference_mode(False)
    def _own_pool(self) -> Batch | None:
        """All samples of this rank as one batch, which may be empty."""
        self.prepare()
        if self._kept is None or not all(is_batched(x, b.size) for b in self._kept for x in tensors_of(b.data)):
            return None
        if not self._kept:
            return Batch(None, 0, self._offset()[1], 0)
        try:
            data = stack_batches([batch.data for batch in self._kept])
        except (RuntimeError, TypeError):
            return None
        start = self._kept[0].start
        return Batch(data, 0, start, self._kept[-1].start + self._kept[-1].size - start)


def _room(device: torch.device) -> float:
    """A third of the free memory of the device, in bytes."""
    free = free_memory(device)
    return 2.0**31 if free is None else free / 3


def _shuffled(size: int, seed: int) -> Tensor:
    """A keyed permutation of 0 ... size - 1."""
    return random_permutation(size, ("permutation", seed))
