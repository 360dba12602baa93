"""Files that are whole: the one place that writes what must survive a kill, a full disk and a power cut.

A file is written beside its name, brought to the disk, and moved into place; then the folder is brought to the disk,
without which the move itself may be lost. Whoever removes what a new file replaces does so after that, so that at any
moment the disk holds the old or the new.
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

PART = ".part"  # how the name of a file ends that is being written


def replace(target: Path, write: Callable[[Path], Any]) -> Path:
    """Make or replace a file by what `write(path)` puts at the path it is given.

    Raises:
        OSError: If the disk is full or the folder cannot be written to; what was there before is as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     replace(Path(folder) / "a", lambda path: path.write_bytes(b"new")).read_bytes()
        b'new'
    """
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}{PART}")  # its own: two processes may save at once
    try:
        part.touch()
        mode = part.stat().st_mode
        try:
            write(part)
            part.chmod(mode)  # that of any new file: safetensors makes its own for the owner alone
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        except Exception as error:
            if (number := _system_error(error)) is None:
                raise
            raise OSError(number, os.strerror(number), str(target)) from error
        os.replace(part, target)
    except BaseException:  # a full disk: what there is of the part would keep it full
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
    return target


def write_text(target: Path, text: str) -> Path:
    """A file of text, whole or as it was before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(Path(folder) / "run.json", "{}").read_text()
        '{}'
    """
    return replace(target, lambda part: part.write_text(text, encoding="utf8"))


def sync_folder(folder: Path) -> None:
    """Bring to the disk which names a folder holds; nothing where the system has no such thing.

    Example:
        >>> sync_folder(Path("."))
    """
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:  # a file system that does not do this for folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(number)


def _system_error(error: Exception) -> int | None:
    """The number of an error of the system that does not name a file: in a write, or as safetensors speaks of it."""
    if isinstance(error, OSError):
        return error.errno if error.filename is None else None
    told = re.search(r"\(os error (\d+)\)", str(error))
    return None if told is None else int(told[1])
