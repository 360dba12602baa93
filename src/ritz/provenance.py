"""What a number was made with: versions, machine, the user's file and its commit, and the commit of ritz itself."""

import contextlib
import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "scipy", "safetensors")
_PATIENCE = 10.0  # seconds for git, which may wait for a lock or a network disk


def versions() -> dict[str, str]:
    """Of ritz, Python and the packages that decide the numbers.

    Example:
        >>> versions()["ritz"] == ritz.__version__
        True
    """
    from . import __version__

    found = {"ritz": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a run was made on; no name of it.

    Example:
        >>> machine()["device"]
        'cpu'
    """
    import torch

    on_gpu = device.startswith("cuda")
    return {
        "system": f"{platform.system()} {platform.machine()}", "processor": _processor(), "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(), "device": device,
        "device_name": torch.cuda.get_device_name(device) if on_gpu else _processor(),
    }  # fmt: skip


def _processor() -> str:
    """The model's name, where the system tells it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def sha256(path: str | os.PathLike[str]) -> str:
    """The mark of a file.

    Example:
        >>> len(sha256(__file__))
        64
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------- commits


def source_of(file: str | os.PathLike[str], function: str) -> dict[str, Any]:
    """A file of the user's code: its place, its mark, and the commit it belongs to where there is one.

    Example:
        >>> sorted(source_of(__file__, "source_of"))
        ['clean', 'commit', 'file', 'function', 'sha256']
    """
    path = Path(file).absolute()
    commit = _git(path.parent, "rev-parse", "HEAD")
    changed = None if commit is None else _git(path.parent, "status", "--porcelain", "--", path.name)
    return {
        "file": str(path), "function": function, "sha256": sha256(path), "commit": commit,
        "clean": None if changed is None else not changed,
    }  # fmt: skip


@cache
def own_commit() -> str | None:
    """The commit of the package's checkout, and whether Python files are changed; None where it is no checkout.

    Other files, such as results that an earlier experiment has written, do not change what is computed.

    Example:
        >>> own_commit() is None or own_commit().partition(" + ")[2] in ("", "changes")
        True
    """
    here = Path(__file__)
    if not _git(here.parent, "ls-files", "--", here.name):  # installed within somebody else's repository, or no git
        return None
    commit = _git(here.parent, "rev-parse", "--short", "HEAD")
    changes = _git(here.parent, "status", "--porcelain", "--", ":(top)*.py")
    return commit + (" + changes" if changes else "") if commit else None


def _git(folder: Path, *words: str) -> str | None:
    """What git says, or None where there is no repository or no git."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
