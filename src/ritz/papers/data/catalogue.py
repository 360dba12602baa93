"""The table of data sets: their official files with checksums, where to get them, and how the papers use them.

Folders are torchvision's, so that what it has downloaded is found. The checksum of a file is of what it holds
uncompressed, because idx files go about compressed in several ways (Debian packs Fashion-MNIST anew); that of an
archive is of the bytes as they come from its server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Archive:
    """What a server gives: its name there, where it goes below the root, checksum and bytes.

    Example:
        >>> [archive.is_tar for archive in DATASETS["CIFAR10"].archives]
        [True]
    """

    remote: str
    path: str
    md5: str
    size: int

    @property
    def is_tar(self) -> bool:
        """Whether the files are packed inside, instead of the archive being the file itself, gzipped or not."""
        return self.path.endswith((".tar.gz", ".tgz"))


@dataclass(frozen=True)
class File:
    """A file below the root, the checksum of what it holds uncompressed, and the archive that it comes in.

    Example:
        >>> DATASETS["CIFAR100"].test[0].path
        'cifar-100-python/test'
    """

    path: str
    md5: str
    archive: Archive


@dataclass(frozen=True)
class Norm:
    """From bytes to the numbers that a network sees: (x / scale - mean) / std, each channel by its own.

    Example:
        >>> norm = Norm((0.5,), (0.5,))
        >>> norm(torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)).flatten().tolist()
        [-1.0, -0.6000000238418579, 1.0]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Images (N, channels, height, width) of bytes as `dtype`, on their device.

        Raises:
            ValueError: If the number of channels is not that of the mean.
        """
        if images.ndim != 4 or images.shape[1] != len(self.mean):
            raise ValueError(f"expected images (N, {len(self.mean)}, height, width), got {tuple(images.shape)}")
        # one number at a time: a tensor of them would be copied to the device, and the device waited for
        channels = [
            image.to(dtype, copy=True).div_(self.scale).sub_(mean).div_(std)
            for image, mean, std in zip(images.unbind(1), self.mean, self.std, strict=True)
        ]
        return torch.stack(channels, dim=1)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set of the papers.

    Args:
        name: What `load` and `download` call it: the name of its class in torchvision, where it has one.
        form: How its files are written.
        shape: Of one sample: (channels, height, width), or () for text.
        classes: How many.
        train, test: Files of the training and of the test set, in order; for idx files, images and labels.
        urls: Folders on servers that have its archives, tried in turn.
        elsewhere: Folders outside the root where a system keeps the files.
        labels: The entry of a pickle that holds the labels.
        held_out: How many samples, the last of the training set, are its "val"; the rest is its "fit".
        norms: Means and deviations by the network of `ritz.models` that is trained; "*" is any.

    Example:
        >>> data = DATASETS["CIFAR10"]
        >>> data.shape, data.classes, len(data.train), data.held_out
        ((3, 32, 32), 10, 5, 5000)
    """

    name: str
    form: Literal["idx", "pickle", "digits", "text"]
    shape: tuple[int, ...] = ()
    classes: int = 10
    train: tuple[File, ...] = ()
    test: tuple[File, ...] = ()
    urls: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    labels: str = ""
    held_out: int = 5000
    norms: Mapping[str, Norm] = field(default_factory=dict)

    @property
    def files(self) -> tuple[File, ...]:
        """All of them."""
        return self.train + self.test

    @property
    def archives(self) -> tuple[Archive, ...]:
        """What holds the files, each once."""
        return tuple(dict.fromkeys(file.archive for file in self.files))

    def norm(self, network: str = "*") -> Norm:
        """How the papers normalise it for a network.

        Raises:
            ValueError: If the papers do not train that network on it.

        Example:
            >>> DATASETS["CIFAR100"].norm("vgg16").mean
            (0.485, 0.456, 0.406)
            >>> DATASETS["MNIST"].norm("lenet5").mean
            (0.5,)
        """
        known = self.norms.get(network) or self.norms.get("*")
        if known is None:
            raise ValueError(f"{self.name} is normalised for {', '.join(self.norms) or 'no network'}, not {network!r}")
        return known


def find(name: str | DataSet) -> DataSet:
    """A row of the table by its name; a row of one's own is taken as it is.

    Raises:
        ValueError: If there is none of that name.

    Example:
        >>> find("CIFAR100").classes
        100
        >>> find("cifar")
        Traceback (most recent call last):
        ValueError: no data set is called 'cifar'; there are MNIST, FashionMNIST, CIFAR10, CIFAR100, digits, ...
    """
    if isinstance(name, DataSet):
        return name
    if name not in DATASETS:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(DATASETS)}")
    return DATASETS[name]


# ---------------------------------------------------------------------------------------------- the rows

HALF = Norm((0.5,), (0.5,))
IMAGENET = Norm((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # seeds 000, 002 and 004 for networks without shortcuts
CIFAR = Norm((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))  # seeds 000 and 002 for residual networks

# seed 003 does not say how it normalised CIFAR-10: CIFAR's own numbers for its networks
CIFAR_NORMS = MappingProxyType(
    {
        **dict.fromkeys(("all_cnn_c", "vgg16", "vgg16_bn"), IMAGENET),
        **dict.fromkeys(("preresnet164", "wide_resnet28_10", "resnet18", "lenet5", "keskar_f1"), CIFAR),
    }
)


def _idx(folder: str, *rows: tuple[str, str, str, int]) -> tuple[File, ...]:
    """Idx files and their gzipped selves: name without "-ubyte", md5 of the file, md5 and bytes of the archive."""
    return tuple(
        File(f"{folder}/{stem}-ubyte", md5, Archive(f"{stem}-ubyte.gz", f"{folder}/{stem}-ubyte.gz", packed_md5, size))
        for stem, md5, packed_md5, size in rows
    )


_CIFAR10 = Archive("cifar-10-python.tar.gz", "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170_498_071)
_CIFAR100 = Archive(
    "cifar-100-python.tar.gz", "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437
)
_SHAKESPEARE = Archive("input.txt", "text/tinyshakespeare.txt", "6fb458f1232090904fb40fe944165e91", 1_115_394)

_ROWS = (
    DataSet(
        name="MNIST",
        form="idx",
        shape=(1, 28, 28),
        train=_idx(
            "MNIST/raw",
            ("train-images-idx3", "6bbc9ace898e44ae57da46a324031adb", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("train-labels-idx1", "a25bea736e30d166cdddb491f175f624", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        ),
        test=_idx(
            "MNIST/raw",
            ("t10k-images-idx3", "2646ac647ad5339dbf082846283269ea", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("t10k-labels-idx1", "27ae3e4e09519cfbb04c329615203637", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        ),
        urls=("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        norms={"*": HALF},
    ),
    DataSet(
        name="FashionMNIST",
        form="idx",
        shape=(1, 28, 28),
        train=_idx(
            "FashionMNIST/raw",
            ("train-images-idx3", "f4a8712d7a061bf5bd6d2ca38dc4d50a", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            ("train-labels-idx1", "9018921c3c673c538a1fc5bad174d6f9", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
        ),
        test=_idx(
            "FashionMNIST/raw",
            ("t10k-images-idx3", "8181f5470baa50b63fa0f6fddb340f0a", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            ("t10k-labels-idx1", "15d484375f8d13e6eb1aabb0c3f46965", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
        urls=(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        elsewhere=("/usr/share/datasets/fashion-mnist",),  # Debian's package dataset-fashion-mnist
        norms={"*": HALF},
    ),
    DataSet(
        name="CIFAR10",
        form="pickle",
        shape=(3, 32, 32),
        train=(
            File("cifar-10-batches-py/data_batch_1", "c99cafc152244af753f735de768cd75f", _CIFAR10),
            File("cifar-10-batches-py/data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec", _CIFAR10),
            File("cifar-10-batches-py/data_batch_3", "54ebc095f3ab1f0389bbae665268c751", _CIFAR10),
            File("cifar-10-batches-py/data_batch_4", "634d18415352ddfa80567beed471001a", _CIFAR10),
            File("cifar-10-batches-py/data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb", _CIFAR10),
        ),
        test=(File("cifar-10-batches-py/test_batch", "40351d587109b95175f43aff81a1287e", _CIFAR10),),
        urls=("https://www.cs.toronto.edu/~kriz/",),
        labels="labels",
        norms=CIFAR_NORMS,
    ),
    DataSet(
        name="CIFAR100",
        form="pickle",
        shape=(3, 32, 32),
        classes=100,
        train=(File("cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d", _CIFAR100),),
        test=(File("cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc", _CIFAR100),),
        urls=("https://www.cs.toronto.edu/~kriz/",),
        labels="fine_labels",
        norms=CIFAR_NORMS,
    ),
    DataSet(name="digits", form="digits", shape=(1, 8, 8), held_out=200, norms={"*": Norm((0.0,), (1.0,), 16.0)}),
    DataSet(
        name="tinyshakespeare",
        form="text",
        classes=65,
        train=(File("text/tinyshakespeare.txt", "6fb458f1232090904fb40fe944165e91", _SHAKESPEARE),),
        urls=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
    ),
)
DATASETS: Mapping[str, DataSet] = MappingProxyType({row.name: row for row in _ROWS})
