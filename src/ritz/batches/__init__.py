"""Data -> batches: tensors, loaders and re-iterables as one sequence of numbered batches on the device.

A data set must be the same every time it is read, or the matrix would change between two products. Tensors and lists
are the same by construction. A loader is read twice on first use, and the two passes are compared: a loader that
augments is refused; one that only shuffles is accepted, and marked as having no fixed order.

If several ranks work together, all of them see one sequence of batches, no matter which rank holds a batch.
"""

from .batch import Batch, checksums, mark_in_any_order
from .generators import isolated_rng, seed_torch
from .sources import DEFAULT_BATCH_SIZE, is_tensors
from .trees import map_tensors, num_samples, on_host, only_tensors, skeleton, stack_batches, tensors_of, with_tensors
from .walk import Batches

__all__ = [
    "DEFAULT_BATCH_SIZE",
    "Batch",
    "Batches",
    "checksums",
    "is_tensors",
    "isolated_rng",
    "map_tensors",
    "mark_in_any_order",
    "num_samples",
    "on_host",
    "only_tensors",
    "seed_torch",
    "skeleton",
    "stack_batches",
    "tensors_of",
    "with_tensors",
]
