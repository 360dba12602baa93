"""torch's switches: which kernels it takes, and whether float32 is multiplied in TF32, with ten bits of mantissa."""

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch


def switches() -> tuple[Hashable, ...]:
    """What decides which kernels torch takes."""
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, matmul_precision(), convolution_precision(),
        torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def matmul_precision() -> Hashable:
    """How float32 matrices are multiplied on a GPU, as torch's switch has it."""
    return _precision(torch.backends.cuda, "matmul")


def convolution_precision() -> Hashable:
    """The same of convolutions."""
    return _precision(torch.backends.cudnn, "conv")


def is_tf32(precision: Hashable) -> bool:
    """Whether a switch, as these two give it, stands at ten bits of mantissa; "none" is torch's word for all of them.

    Example:
        >>> [is_tf32(precision) for precision in ("tf32", True, "ieee", "none", False)]
        [True, True, False, False, False]
    """
    return precision in ("tf32", True)


def multiplies_in_tf32(device: torch.device) -> bool:
    """Whether float32 may be multiplied with ten bits of mantissa there; convolutions are, by torch's default.

    Example:
        >>> multiplies_in_tf32(torch.device("cpu"))
        False
    """
    return device.type == "cuda" and any(map(is_tf32, (matmul_precision(), convolution_precision())))


def _precision(backend: Any, name: str) -> Hashable:
    found: Hashable = getattr(*_switch(backend, name), None)
    return found


def _switch(backend: Any, name: str) -> tuple[Any, str]:
    """torch's switch, by its new name where there is one: asking by the old one is an error once the new was used."""
    owner = getattr(backend, name, backend)
    return owner, "fp32_precision" if hasattr(owner, "fp32_precision") else "allow_tf32"


@contextlib.contextmanager
def _switched(tf32: bool, *switches: tuple[Any, str]) -> Iterator[None]:
    before = [getattr(*switch) for switch in switches]
    try:
        for owner, name in switches:
            setattr(owner, name, tf32 if name == "allow_tf32" else "tf32" if tf32 else "ieee")
        yield
    finally:
        for (owner, name), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


@contextlib.contextmanager
def tensor_cores(allowed: bool = True) -> Iterator[None]:
    """Float32 matrices on a GPU are multiplied in TF32: ten bits of mantissa, several times as fast.

    Example:
        >>> before = matmul_precision()
        >>> with tensor_cores():
        ...     matmul_precision() != before
        True
        >>> matmul_precision() == before
        True
    """
    with _switched(True, _switch(torch.backends.cuda, "matmul")) if allowed else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def all_digits() -> Iterator[None]:
    """Float32 on a GPU is not multiplied in TF32, neither in matrices nor in convolutions, where it is torch's default.

    Example:
        >>> with tensor_cores(), all_digits():
        ...     is_tf32(matmul_precision()), is_tf32(convolution_precision())
        (False, False)
    """
    with _switched(False, _switch(torch.backends.cuda, "matmul"), _switch(torch.backends.cudnn, "conv")):
        yield


@contextlib.contextmanager
def timed_convolutions(allowed: bool = True) -> Iterator[None]:
    """cuDNN tries its algorithms for each shape that is new, and keeps the fastest.

    Example:
        >>> with timed_convolutions():
        ...     torch.backends.cudnn.benchmark
        True
        >>> torch.backends.cudnn.benchmark
        False
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or allowed
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
