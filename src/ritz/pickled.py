"""What `torch.save` wrote, read without running anything that it names, and without making room for what is not there.

`torch.load(..., weights_only=True)` calls only functions that it knows; but some of these make room for as much as a
file asks for. So a file is gone through once before, with stand-ins for all that it names, which hold the sizes that
they are given against the length of the file.
"""

import io
import math
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any, ClassVar

from .reading import check_size, damaged, refuse_irregular

_LEGACY = 5  # pickles in a file of old: magic number, version, system, content, keys of what follows


def read_pickled(path: str | os.PathLike[str]) -> Any:
    """What `torch.save` wrote, tensors on the host.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or holds more than tensors, numbers, text and containers of these.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"x": torch.zeros(2)}, folder + "/x.pt")
        ...     read_pickled(folder + "/x.pt")
        {'x': tensor([0., 0.])}
    """
    import torch

    path = Path(path)
    refuse_irregular(path)
    try:
        _rehearse(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own format
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is damaged, or contains more than tensors and is not loaded, since loading would run code in it; "
            "save only model.state_dict(), preferably as .safetensors"
        ) from error
    except Exception as error:  # a damaged file raises nearly anything
        damaged(path, error)


def _rehearse(path: Path) -> None:
    """Go through the pickles of a file, and through none of its numbers; an archive that would swell is refused."""
    length = path.stat().st_size
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                check_size(sum(member.file_size for member in archive.infolist()), length)
                for name in archive.namelist():
                    if name.endswith("data.pkl"):
                        _Rehearsal(io.BytesIO(archive.read(name)), length).load()
            return
        file.seek(0)
        for _ in range(_LEGACY):
            _Rehearsal(file, length).load()


class CarefulUnpickler(pickle._Unpickler):
    """Makes room for what is there only; written in Python, since the one in C believes what a file says of its sizes.

    Whoever derives from it says in `find_class` what the names in a pickle stand for.

    Example:
        >>> CarefulUnpickler(io.BytesIO(pickle.dumps([1, b"two"])), 100).load()
        [1, b'two']
    """

    def __init__(self, file: IO[bytes], length: int) -> None:
        super().__init__(_Capped(file, length), encoding="bytes")
        self.length = length

    def load_bytearray8(self) -> None:
        """Of the codes of a pickle the one whose room is made before it is filled."""
        raise pickle.UnpicklingError("it holds a buffer of bytes, which no file of tensors or images needs")

    dispatch: ClassVar[Any] = {**pickle._Unpickler.dispatch, pickle.BYTEARRAY8[0]: load_bytearray8}


class _Capped:
    """A file of which no more is asked for than its length: some make room for all that they are asked for."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self.file, self.length, self.readline = file, length, file.readline

    def read(self, size: int) -> bytes:
        """At most so many bytes."""
        return self.file.read(min(size, self.length))


class _Rehearsal(CarefulUnpickler):
    """Goes through a pickle and calls nothing but stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name, whatever it is: torch refuses those that it does not know."""
        length, rebuilds = self.length, name.startswith("_rebuild")
        makes_room = rebuilds or name.endswith(("bytearray", "Tensor", "Storage"))  # not a plain torch.Size

        class StandIn(_StandIn):
            def __new__(cls, *args: Any) -> Any:
                sizes = args[2:3] if rebuilds else args  # of (storage, offset, size, stride, ...)
                for size in (sizes, *(arg for arg in sizes if isinstance(arg, tuple))) if makes_room else ():
                    whole = [n for n in size if type(n) is int and n > 1]
                    check_size(math.prod(whole[:64]), length)
                return super().__new__(cls)

        return StandIn

    def persistent_load(self, pid: Any) -> Any:
        """A stand-in for numbers that lie outside the pickle: ("storage", kind, key, place, how many, ...)."""
        if isinstance(pid, tuple) and len(pid) > 4 and isinstance(pid[4], int):
            check_size(pid[4], self.length)
        return _StandIn()


class _StandIn(dict):  # type: ignore[type-arg]
    """Takes whatever a pickle puts into an object."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        """Nothing of it is kept."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def append(self, _: object) -> None:
        """As a list has it."""

    extend = add = append
