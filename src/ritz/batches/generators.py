"""Seeding of the global generators, and those of loaders, whose states are restored afterwards."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def isolated_rng(seed: int | None = None, device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python on exit; if a seed is given, seed them inside.

    Example:
        >>> before = torch.get_rng_state()
        >>> with isolated_rng(seed=0):
        ...     _ = torch.rand(3), np.random.rand(3), random.random()
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
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
    """Seed the generator of the CPU and of one device; `torch.manual_seed` would seed all devices."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def own_generator(source: Any, seed: int) -> Iterator[None]:
    """If a loader has its own generator, seed it for one pass over the data, and restore it afterwards."""
    own = getattr(source, "generator", None)
    if not isinstance(own, torch.Generator):
        yield
        return
    state = own.get_state()
    try:
        own.manual_seed(seed)
        yield
    finally:
        own.set_state(state)
