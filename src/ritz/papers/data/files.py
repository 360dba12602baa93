"""Finding the files of a data set, and trusting them: what a file holds is used once its checksum is right."""

import hashlib
import os
from pathlib import Path

from ...reading import content, inflate
from .catalogue import DataSet, File


def data_root(name: str, root: Path | str | None = None) -> Path:
    """The folder of all data sets: `root`, or what RITZ_DATA names.

    Raises:
        FileNotFoundError: If neither is given; it says how to get data set `name`.

    Example:
        >>> data_root("MNIST", "data").name
        'data'
    """
    root = root if root is not None else os.environ.get("RITZ_DATA") or None
    if root is None:
        raise FileNotFoundError(
            f"no folder with {name}: set RITZ_DATA or give root=, in torchvision's layout; {how_to_get(name, 'FOLDER')}"
        )
    return Path(root)


def how_to_get(name: str, root: Path | str) -> str:
    """What to do for the files of a data set: the command that downloads them.

    Example:
        >>> print(how_to_get("MNIST", "data"))
        get the official files of MNIST: python -c "from ritz.papers.data import download; download('MNIST', 'data')"
    """
    command = f"from ritz.papers.data import download; download({name!r}, {str(root)!r})"
    return f'get the official files of {name}: python -c "{command}"'


def locate(data: DataSet, file: File, root: Path | str | None = None) -> Path:
    """Where a file is, as it is or gzipped: below the root, or where a system keeps it.

    Raises:
        FileNotFoundError: If it is nowhere; it says where it was looked for and how to get it.

    Example:
        >>> from ritz.papers.data import DATASETS
        >>> locate(DATASETS["CIFAR100"], DATASETS["CIFAR100"].test[0], "nowhere")
        Traceback (most recent call last):
        FileNotFoundError: neither test nor test.gz is in nowhere/cifar-100-python; get the official files of ...
    """
    stem = Path(file.path).name
    elsewhere = [folder for folder in map(Path, data.elsewhere) if folder.is_dir()]
    # a system's folder serves where no root is named, too
    below = [] if root is None and elsewhere and not os.environ.get("RITZ_DATA") else [data_root(data.name, root)]
    folders = [top / Path(file.path).parent for top in below] + elsewhere
    for folder in folders:
        for path in (folder / stem, folder / f"{stem}.gz"):
            if path.is_file():
                return path
    places = " or ".join(map(str, folders))
    raise FileNotFoundError(
        f"neither {stem} nor {stem}.gz is in {places}; {how_to_get(data.name, below[0] if below else 'FOLDER')}"
    )


def read(path: Path) -> bytes:
    """What a file holds, uncompressed.

    Raises:
        ValueError: If it is gzipped and cut short or damaged, or no regular file.

    Example:
        >>> import gzip, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "text.gz"
        ...     _ = path.write_bytes(gzip.compress(b"to be"))
        ...     read(path)
        b'to be'
    """
    raw = content(path)
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return inflate(raw)
    except ValueError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}): remove it and download it again") from error


def verified(data: DataSet, file: File, root: Path | str | None = None) -> bytes:
    """What a file holds, uncompressed, once its checksum is found right.

    Raises:
        FileNotFoundError: If it is nowhere.
        ValueError: If its checksum is not the official one.

    Example:
        >>> import tempfile
        >>> from ritz.papers.data import DATASETS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (Path(folder) / "text").mkdir()
        ...     _ = (Path(folder) / "text" / "tinyshakespeare.txt").write_bytes(b"to be")
        ...     verified(DATASETS["tinyshakespeare"], DATASETS["tinyshakespeare"].train[0], folder)
        Traceback (most recent call last):
        ValueError: ...tinyshakespeare.txt is not the official file of tinyshakespeare: its md5 is ...
    """
    path = locate(data, file, root)
    raw = read(path)
    if (got := md5(raw)) != file.md5:
        raise ValueError(
            f"{path} is not the official file of {data.name}: its md5 is {got}, not {file.md5}; "
            "remove it and download it again"
        )
    return raw


def md5(content: bytes) -> str:
    """Checksum of bytes.

    Example:
        >>> md5(b"")
        'd41d8cd98f00b204e9800998ecf8427e'
    """
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def md5_of(path: Path) -> str:
    """Checksum of a file as it lies there.

    Example:
        >>> md5_of(Path("/dev/null"))
        'd41d8cd98f00b204e9800998ecf8427e'
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
