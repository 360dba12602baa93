"""One process at a time: a file that names its owner, and that the next process takes over when the owner is dead.

The file appears with its content in one step, and is taken over in one step, so that a kill at any moment leaves none,
or one that says whose it was.
"""

import contextlib
import json
import os
import platform
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .reading import read_json
from .schema import fits

try:
    import fcntl
except ImportError:  # Windows: two processes that take over one lock in the same instant are not kept apart there
    fcntl = None  # type: ignore[assignment]

_ATTEMPTS = 5  # another process may take over the same lock, or end, in the same instant


def lock(path: Path, doing: str) -> dict[str, Any]:
    """Make the file that keeps other processes away, and return what it says.

    Args:
        path: Path of the file.
        doing: What an owner does in the folder, for the message: "is training in".

    Raises:
        BlockingIOError: If another process has it, or one of another machine, of which nothing is known.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mark = lock(Path(folder) / "lock", "works in")
        ...     unlock(Path(folder) / "lock", mark)
        ...     mark["process"] == os.getpid(), os.listdir(folder)
        (True, [])
    """
    own = {
        "process": os.getpid(), "machine": platform.node(), "began": _began(os.getpid()), "mark": secrets.token_hex(8)
    }  # fmt: skip
    found: dict[str, Any] | None = None
    for _ in range(_ATTEMPTS):
        with _written(path, own) as fresh:
            if _appeared(fresh, path) or _taken_over(fresh, path):
                return own
        found = owner(path)
        if found is not None and at_work(found):
            break
    who = "another process" if not found else f"process {found['process']} on {found['machine']}"
    raise BlockingIOError(f"{who} {doing} {path.parent}; if there is no such process any more, remove {path}")


def unlock(path: Path, mark: Mapping[str, Any]) -> None:
    """Remove the lock that has this mark, and no other; a forked process has a copy of the mark and no lock."""
    with contextlib.suppress(OSError):  # a folder that can no longer be written to: the next process takes it over
        if mark["process"] == os.getpid() and owner(path) == mark:
            path.unlink(missing_ok=True)


def owner(path: Path) -> dict[str, Any] | None:
    """What a lock says: None where it is gone, {} where it says nothing that can be read."""
    try:
        said = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    named = fits(said, dict[str, Any]) and fits(said.get("process"), int) and fits(said.get("machine"), str)
    return said if named and 0 < said["process"] < 1 << 31 else {}


def at_work(owner: Mapping[str, Any]) -> bool:
    """Whether another process that has a lock may be alive; of one on another machine nothing is known."""
    if not owner or owner["machine"] != platform.node():
        return True
    process = owner["process"]
    if process == os.getpid():  # a run of this process that has ended and is not yet collected
        return False
    if os.name == "nt":  # signal 0 is no question there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # there is one, of another user
        pass
    stat = _stat(process)
    if stat is None:
        return True
    zombie = stat[0] == "Z"  # killed, and nobody has asked after it: there in name only
    later = owner.get("began") not in (None, stat[19])  # another process by the same number
    return not (zombie or later)


def _stat(process: int) -> list[str] | None:
    """What Linux tells of a process, from its state on; None where there is no such file."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf8").rpartition(")")[2].split()
    except OSError:
        return None


def _began(process: int) -> str | None:
    stat = _stat(process)
    return None if stat is None else stat[19]


@contextlib.contextmanager
def _written(path: Path, own: Mapping[str, Any]) -> Iterator[Path]:
    """The content of a lock, in a file of its own beside it."""
    fresh = path.with_name(f"{path.name}.{own['mark']}.part")
    try:
        fresh.write_text(json.dumps(own), encoding="utf8")
        yield fresh
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def _appeared(fresh: Path, path: Path) -> bool:
    """Put the file in place if there is none."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            with path.open("x", encoding="utf8") as file:
                file.write(fresh.read_text(encoding="utf8"))
        except FileExistsError:
            return False
    return True


def _taken_over(fresh: Path, path: Path) -> bool:
    """Put the file in the place of one whose owner is dead; of several processes that try, one does."""
    if not path.is_file():  # gone, or something that is no lock
        return False
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        if fcntl is not None:
            # not `lockf`, which ends when the process closes any file of that path
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        found = owner(path)
        same = os.fstat(file.fileno()).st_ino == path.stat().st_ino  # else another process was quicker
        if same and found is not None and not at_work(found):
            os.replace(fresh, path)
            return True
    return False
