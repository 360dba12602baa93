"""The data sets of the papers: found, checked, read, downloaded, and augmented on the device.

    images, labels = load("CIFAR100", device="cuda", split="fit")   # bytes (45000, 3, 32, 32), labels (45000,)
    norm = DATASETS["CIFAR100"].norm("vgg16")
    x = norm(augment(images[rows], key=(seed, epoch, step)))

Files are looked for below `root=` or the folder that RITZ_DATA names, in torchvision's layout.
"""

from .augment import augment
from .catalogue import DATASETS, Archive, DataSet, File, Norm, find
from .download import download
from .images import Data, Split, load, load_images, read_idx
from .text import Text, all_windows, load_text, windows

__all__ = [
    "DATASETS",
    "Archive",
    "Data",
    "DataSet",
    "File",
    "Norm",
    "Split",
    "Text",
    "all_windows",
    "augment",
    "download",
    "find",
    "load",
    "load_images",
    "load_text",
    "read_idx",
    "windows",
]
