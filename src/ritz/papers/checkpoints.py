"""The folder of one training run: what is trained, how far it is, and what was logged.

run.json                        the recipe, its fingerprint, and the versions of all that worked on it
log.jsonl                       the numbers of the run
epoch-000007.json               the newest checkpoint, and its tensors
epoch-000007.safetensors
lock                            while a process is at work here: which, on which machine
"""

import hashlib
import json
import os
import platform
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..space import random_bits
from ..storage import load, save, write_text
from .recipe import Recipe, describe, fingerprint

FORMAT = 1
_LOOKS = 4096  # entries of a tensor that tell it from another


class Folder:
    """A run on disk; a folder that is not there yet is made.

    A checkpoint is whole when its .json is there, which is written last. The one before is kept until then. One process
    at a time may write: the folder is locked until the object is gone, and a process that was killed leaves a lock that
    the next one on the same machine takes over.

    Args:
        path: Of the folder.
        recipe: What is trained.
        data: The data by name, as `train` takes it.

    Raises:
        TypeError: If the recipe has no fingerprint.
        ValueError: If the folder is that of another recipe, or of other data.
        BlockingIOError: If another process is at work in it.

    Example:
        >>> import tempfile
        >>> from ritz.papers.recipe import Recipe, kfac
        >>> recipe = Recipe(name="", model=torch.nn.Identity, optimizer=kfac, epochs=3)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     folder = Folder(path, recipe, {"train": (torch.zeros(2, 1), torch.zeros(2))})
        ...     folder.keep(1, {"weights": torch.ones(2)})
        ...     folder.keep(2, {"weights": torch.zeros(2)})
        ...     print(folder.newest(), sorted(p.name for p in folder.path.iterdir()))
        {'weights': tensor([0., 0.])} ['epoch-000002.json', 'epoch-000002.safetensors', 'lock', 'run.json']
    """

    def __init__(self, path: str | os.PathLike[str], recipe: Recipe, data: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.path = Path(path)
        own = {
            "format": FORMAT,
            "fingerprint": fingerprint(recipe),
            "recipe": describe(recipe),
            "data": {name: [_look(tensor) for tensor in pair] for name, pair in data.items()},
        }
        there = self._read()
        if there is not None:
            _refuse_other(there, own, self.path)
        elif self._checkpoints() or self.log.exists():
            has = "checkpoints" if self._checkpoints() else self.log.name
            raise ValueError(f"{self.path} has {has} and no run.json that says of what: name another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        mark = _lock(self.path / "lock")
        self.unlock = weakref.finalize(self, _unlock, self.path / "lock", mark)  # at the exit of the process at last
        self._about = {**own, "starts": [] if there is None else there["starts"]}
        self._write()

    @property
    def log(self) -> Path:
        """The file of the log."""
        return self.path / "log.jsonl"

    def begin(self, epoch: int, log_bytes: int, machine: str) -> None:
        """Note who goes on from here, and cut off what was logged since."""
        versions = {"ritz": __version__, "torch": torch.__version__, "python": platform.python_version()}
        self._about["starts"].append({"epoch": epoch, **versions, "machine": machine})
        self._write()
        if self.log.exists() and self.log.stat().st_size > log_bytes:
            os.truncate(self.log, log_bytes)

    def newest(self) -> Any:
        """The state of the newest checkpoint; None where there is none."""
        whole = self._checkpoints()
        return load(whole[-1]) if whole else None

    def keep(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Write the state after an epoch, and then remove those before."""
        new = save(state, self.path / f"epoch-{epoch:06d}")
        torn = self.path.glob("run.json.*.part")
        for old in [*self._checkpoints(), *sorted(self.path.glob("epoch-*")), *torn]:  # a text goes before its tensors
            if old not in (new, new.with_suffix(".safetensors")):
                old.unlink(missing_ok=True)

    def _checkpoints(self) -> list[Path]:
        """The whole ones, in order."""
        return sorted(self.path.glob("epoch-*.json"))

    def _write(self) -> None:
        write_text(self.path / "run.json", json.dumps(self._about, indent=1) + "\n")

    def _read(self) -> Any:
        source = self.path / "run.json"
        return json.loads(source.read_text(encoding="utf8")) if source.exists() else None


def _lock(path: Path) -> dict[str, Any]:
    """Make the file that keeps other processes away, and return what it says."""
    own = {"process": os.getpid(), "machine": platform.node(), "mark": secrets.token_hex(8)}
    for _ in range(3):  # another process may take over the same lock, or end, in the same instant
        try:
            with path.open("x", encoding="utf8") as file:
                json.dump(own, file)
            return own
        except FileExistsError:
            owner = _owner(path)
            if owner is not None and _at_work(owner):
                break
            path.unlink(missing_ok=True)
    who = "another process" if not owner else f"process {owner['process']} on {owner['machine']}"
    raise BlockingIOError(f"{who} is training in {path.parent}; if there is no such process any more, remove {path}")


def _owner(path: Path) -> dict[str, Any] | None:
    """What a lock says: nothing where it is gone, {} where it is not written yet."""
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf8") or "{}")
    except FileNotFoundError:
        return None
    return said


def _at_work(owner: Mapping[str, Any]) -> bool:
    """Whether another process that has a lock may be alive; of one on another machine nothing is known."""
    if not owner or owner["machine"] != platform.node():
        return True
    if owner["process"] == os.getpid():  # a run of this process that has ended and is not yet collected
        return False
    if os.name == "nt":  # signal 0 is no question there
        return True
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # there is one, of another user
        pass
    try:  # one that was killed and that nobody has asked after is there in name only
        stat = Path(f"/proc/{owner['process']}/stat").read_text(encoding="utf8")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"


def _unlock(path: Path, mark: Mapping[str, Any]) -> None:
    """Remove the lock that this object made, and no other; a forked process has a copy of the object."""
    if mark["process"] == os.getpid() and _owner(path) == mark:
        path.unlink(missing_ok=True)


def _refuse_other(there: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on with something else."""
    for part in ("format", "recipe", "data"):
        apart = _difference(there[part], own[part], part)
        if apart:
            raise ValueError(f"{path} is the folder of another run, {apart}: name another folder, or remove this one")


def _difference(there: Any, own: Any, where: str) -> str:
    """The first place where two descriptions differ, in words; "" where they do not."""
    if isinstance(there, dict) and isinstance(own, dict):
        for key in [*own, *(key for key in there if key not in own)]:
            found = _difference(there.get(key), own.get(key), f"{where}.{key}")
            if found:
                return found
        return ""
    return "" if there == own else f"{where} is {json.dumps(there)} there and {json.dumps(own)} here"


def _look(tensor: Tensor) -> str:
    """Shape, type and a mark of some entries: cheap, and enough to tell data from other data."""
    some = tensor.detach().reshape(-1)
    if len(some) > _LOOKS:  # drawn, since evenly spread ones may all be one corner of the images, and black
        some = some[random_bits(_LOOKS, ("look",), some.device).remainder(len(some))]
    some = some.cpu().contiguous()
    mark = hashlib.blake2b(some.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {mark}"
