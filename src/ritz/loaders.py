"""Loaders that were made for one rank of several, as loaders of all the data.

A `DistributedSampler` gives each rank the same number of samples, and repeats some to that end: a mean over them is not
that over the data. ritz shares out the work itself and exactly, so it walks what the loader was made from.
"""

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

_SAME = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


def whole_of(data: Any, size: int) -> Any:
    """The data as every rank is to see it: a loader of a rank's share as a loader of the whole, in its own order.

    Known are torch's `DistributedSampler`, what Lightning Fabric makes of a loader, and what Accelerate does. With one
    rank a loader stays as it is.

    Raises:
        ValueError: If the whole cannot be told from what the loader says.

    Example:
        >>> from torch.utils.data import DataLoader, DistributedSampler
        >>> data = range(5)
        >>> loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
        >>> [batch.tolist() for batch in whole_of(loader, size=2)]
        [[0, 1], [2, 3], [4]]
    """
    if size == 1:
        return data
    if type(data).__name__ == "_FabricDataLoader":
        data = data._dataloader
    if not isinstance(data, DataLoader):
        return data
    if type(data).__name__ == "DataLoaderDispatcher" or type(data.dataset).__name__ == "IterableDatasetShard":
        raise ValueError(
            "this loader was shared out by Accelerate in a way that cannot be undone; give the loader as it was before "
            "accelerator.prepare"
        )
    if isinstance(data.dataset, IterableDataset):
        return data
    shards = data.batch_sampler
    if type(shards).__name__ == "BatchSamplerShard":
        return _again(data, batch_sampler=shards.batch_sampler)  # type: ignore[union-attr]
    if not _is_share(data):
        return data
    if type(shards) is not BatchSampler:
        raise ValueError(
            f"the loader has a DistributedSampler inside a {type(shards).__name__}, which hides the whole data; give a "
            "loader of the whole data, which ritz shares out among the ranks, or share=True"
        )
    return _again(data, batch_size=shards.batch_size, drop_last=shards.drop_last)


def _is_share(loader: "DataLoader[Any]") -> bool:
    """Whether the samples are those of one rank."""
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return any(isinstance(s, DistributedSampler) or "DistributedSampler" in type(s).__name__ for s in samplers)


def _again(loader: "DataLoader[Any]", **cut: Any) -> "DataLoader[Any]":
    """A loader of the same samples, in the order of the data set."""
    return DataLoader(loader.dataset, **cut, **{name: getattr(loader, name) for name in _SAME})
