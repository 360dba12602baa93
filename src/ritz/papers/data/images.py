"""Images and labels of the papers' data sets from their official files; MNIST's format; the papers' splits."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from .catalogue import DataSet, File, find
from .files import locate, read, verified
from .pickles import read_pickle

Data = tuple[Tensor, Tensor]  # images or rows of pixels, and labels (N,) int64
Split = Literal["train", "fit", "val", "test"]

DIGITS_TRAIN = 1200  # of scikit-learn's 1,797 digits
DIGITS_SEED = 0  # of their order: the file has them by writer
IDX_DIMENSIONS = 4
AGAIN = "remove the file and download it again"


def load(
    name: str | DataSet,
    root: Path | str | None = None,
    device: torch.device | str = "cpu",
    split: Split = "train",
    *,
    check: bool = True,
) -> Data:
    """Images (N, channels, height, width) as bytes and labels (N,) of one part of a data set, on a device.

    The last 5,000 of the training set are held out: "fit" has 55,000 images of MNIST and 45,000 of CIFAR, "val" the
    5,000 and "train" both. The papers do not say which images they hold out. Bytes stay bytes, a quarter of float32;
    `DATASETS[name].norm(...)` makes numbers of a batch.

    Args:
        name: "MNIST", "FashionMNIST", "CIFAR10", "CIFAR100" or "digits", or a row of one's own.
        root: A folder in torchvision's layout; None takes RITZ_DATA, and Debian's folder for Fashion-MNIST.
        device: Where to put both.
        split: "train", "fit", "val" or "test".
        check: Whether to compare checksums of files that are safe to read anyway; pickles are always compared.

    Raises:
        FileNotFoundError: If a file is missing; it says where it was looked for and how to get it.
        ValueError: If a file is not the official one, or there is no such data set or split.

    Example:
        >>> images, labels = load("digits", split="test")
        >>> images.shape, images.dtype, labels.shape
        (torch.Size([597, 1, 8, 8]), torch.uint8, torch.Size([597]))
    """
    data = find(name)
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {', '.join(get_args(Split))}, got {split!r}")
    if data.form == "text":
        raise ValueError(f"{data.name} is text and has no images: read it with load_text")
    images, labels = _READERS[data.form](data, root, split == "test", check)
    images = _fitted(images, labels, data, data.test if split == "test" else data.train)
    if split in ("fit", "val"):
        if len(images) <= data.held_out:
            raise ValueError(f"{data.name} has {len(images)} training images, so {data.held_out} cannot be held out")
        part = slice(-data.held_out) if split == "fit" else slice(-data.held_out, None)
        images, labels = images[part], labels[part]
    return images.to(device), labels.to(device, torch.int64)


def load_images(
    name: str, root: Path | str | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Data, Data]:
    """MNIST or Fashion-MNIST as (training set, test set), pixels mapped to [-1, 1], images flat; no checksums.

    Args:
        name: "MNIST" or "FashionMNIST".
        root: A folder in torchvision's layout, with NAME/raw/*-ubyte or *-ubyte.gz; None takes RITZ_DATA.
        device, dtype: Where to put the images and in which precision.

    Raises:
        FileNotFoundError: If the files are not there; it says where they were looked for.
        ValueError: If it is another data set.

    Example:
        >>> load_images("MNIST", "nowhere")
        Traceback (most recent call last):
        FileNotFoundError: neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz is in nowhere/MNIST/raw; ...
    """

    if find(name).form != "idx":
        raise ValueError(f"{name} is not of MNIST's kind, with grey pixels up to 255: read it with load")

    def part(split: Split) -> Data:
        images, labels = load(name, root, device, split, check=False)
        return images.flatten(1).to(dtype) / 127.5 - 1, labels  # Normalize(.5, .5)

    return part("train"), part("test")


def _fitted(images: Tensor, labels: Tensor, data: DataSet, files: Sequence[File]) -> Tensor:
    """The images in their shape, if that is theirs and each has a label of a class."""
    where = ", ".join(file.path for file in files)
    if images.ndim < 1 or labels.ndim != 1 or images[:1].numel() != math.prod(data.shape):
        raise ValueError(
            f"{where} of {data.name} hold images {tuple(images.shape)} and labels {tuple(labels.shape)}, not images "
            f"{data.shape} with a label each; {AGAIN}"
        )
    if len(images) != len(labels) or not bool(((labels >= 0) & (labels < data.classes)).all()):
        raise ValueError(
            f"{data.name} has {len(images)} images and {len(labels)} labels up to {int(labels.max())}; "
            f"wanted as many labels, of {data.classes} classes, in {where}; {AGAIN}"
        )
    return images.reshape(len(images), *data.shape)


# ---------------------------------------------------------------------------------------------- formats


def read_idx(path: Path) -> Tensor:
    """An idx file of bytes, gzipped or not, as a uint8 tensor of the shape that its head states.

    Raises:
        ValueError: If it is not an idx file of bytes, or its length does not fit its head.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "labels-idx1-ubyte"
        ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 0, 4]))
        ...     read_idx(path).tolist()
        [7, 0, 4]
    """
    return _idx(read(path), path)


def _idx(raw: bytes, path: Path | str) -> Tensor:
    """The tensor that an uncompressed idx file holds; errors call it `path`."""
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{path} is not an idx file of bytes: it begins with {raw[:4].hex(' ')}, not 00 00 08; {AGAIN}"
        )
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4)]
    if not 1 <= len(shape) <= IDX_DIMENSIONS or 0 in shape:
        raise ValueError(f"{path} has {len(shape)} dimensions by its head, {shape[:IDX_DIMENSIONS]}...; {AGAIN}")
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"{path} holds {len(raw) - start} bytes, but its head says {shape}: {AGAIN}")
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).reshape(shape)


def _read_idx_pair(data: DataSet, root: Path | str | None, test: bool, check: bool) -> Data:
    """Images and labels from a pair of idx files."""
    images, labels = (
        _idx(verified(data, file, root), file.path) if check else read_idx(locate(data, file, root))
        for file in (data.test if test else data.train)
    )
    return images, labels


def _read_pickles(data: DataSet, root: Path | str | None, test: bool, check: bool) -> Data:
    """Images and labels from one pickle after another; none is opened before its checksum is right."""
    files = data.test if test else data.train
    parts = [read_pickle(verified(data, file, root), data.labels, file.path) for file in files]
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)


def _read_digits(data: DataSet, root: Path | str | None, test: bool, check: bool) -> Data:
    """scikit-learn's digits, which come with its wheel, in one order for all."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'ritz[demo]'") from error
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(DIGITS_SEED))
    part = order[DIGITS_TRAIN:] if test else order[:DIGITS_TRAIN]
    return torch.as_tensor(pixels).to(torch.uint8)[part], torch.as_tensor(labels)[part]


_READERS = {"idx": _read_idx_pair, "pickle": _read_pickles, "digits": _read_digits}
