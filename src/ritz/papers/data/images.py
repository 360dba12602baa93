"""MNIST and Fashion-MNIST from their official files, in torchvision's layout."""

import gzip
import math
import os
from pathlib import Path

import torch
from torch import Tensor

Data = tuple[Tensor, Tensor]  # images (N, 784) in [-1, 1], labels (N,)


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
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of bytes: it begins with {raw[:4].hex(' ')}, not 00 00 08")
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4)]
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"{path} holds {len(raw) - start} bytes, but its head says {shape}: a download was cut short?")
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).reshape(shape)


def load_images(
    name: str, root: Path | str | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Data, Data]:
    """A data set as (training set, test set), pixels mapped to [-1, 1], images flat.

    Args:
        name: Its folder: "MNIST" or "FashionMNIST".
        root: A folder in torchvision's layout, with NAME/raw/*-ubyte or *-ubyte.gz; None takes RITZ_DATA.
        device, dtype: Where to put the images and in which precision.

    Raises:
        FileNotFoundError: If the files are not there; it says where they were looked for.

    Example:
        >>> load_images("FashionMNIST", "nowhere")
        Traceback (most recent call last):
        FileNotFoundError: neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz is in nowhere/FashionMNIST...
    """
    root = root if root is not None else os.environ.get("RITZ_DATA")
    if root is None:
        raise FileNotFoundError(f"no folder with {name}: set RITZ_DATA or give root=, in torchvision's layout")
    parts: list[Data] = []
    for begin in ("train", "t10k"):
        stems = (f"{begin}-images-idx3-ubyte", f"{begin}-labels-idx1-ubyte")
        images, labels = (read_idx(_find(Path(root) / name / "raw", stem)) for stem in stems)
        pixels = images.flatten(1).to(device, dtype) / 127.5 - 1  # Normalize(.5, .5)
        parts.append((pixels, labels.to(device, torch.int64)))
    train, test = parts
    return train, test


def _find(folder: Path, stem: str) -> Path:
    """The file, as it is or gzipped."""
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"neither {stem} nor {stem}.gz is in {folder}; get the official files of {folder.parent.name}"
    )
