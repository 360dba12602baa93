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
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..files import write_text
from ..locks import lock, unlock
from ..loggers import Memory, read
from ..reading import damaged, differences, read_json, refuse_irregular
from ..schema import fits
from ..space import random_bits
from ..storage import load, save
from .recipe import Recipe, describe, fingerprint

FORMAT = 1
LOG = "log.jsonl"
ELSEWHERE = "name another folder, or remove this one"
_KEPT = {"epoch": int, "step": int, "log_bytes": int, "seconds": float, "stop": str, "model": Mapping[str, Tensor]}
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
        ...     print(sorted(p.name for p in folder.path.iterdir()))
        ['epoch-000002.json', 'epoch-000002.safetensors', 'lock', 'run.json']
    """

    def __init__(self, path: str | os.PathLike[str], recipe: Recipe, data: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.path = Path(path)
        own = _about(recipe, data)
        there = _read(self.path)
        if there is not None:
            _refuse_other(there, own, self.path)
        elif self._checkpoints() or self.log.exists():
            has = "checkpoints" if self._checkpoints() else self.log.name
            raise ValueError(f"{self.path} has {has} and no run.json that says of what: name another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        mark = lock(self.path / "lock", "is training in")
        self.unlock = weakref.finalize(self, unlock, self.path / "lock", mark)  # at the exit of the process at last
        self._about = {**own, "starts": [] if there is None else there["starts"]}
        self._write()

    @property
    def log(self) -> Path:
        """The file of the log."""
        return self.path / LOG

    def begin(self, epoch: int, log_bytes: int, machine: str) -> None:
        """Note who goes on from here, and cut off what was logged since."""
        if self.log.is_symlink() or self.log.exists():
            refuse_irregular(self.log, links=False)  # it is cut, and what a link leads to may not be ours
        versions = {"ritz": __version__, "torch": torch.__version__, "python": platform.python_version()}
        self._about["starts"].append({"epoch": epoch, **versions, "machine": machine})
        self._write()
        if self.log.exists() and self.log.stat().st_size > log_bytes:
            os.truncate(self.log, log_bytes)

    def newest(self) -> Any:
        """The state of the newest checkpoint; None where there is none.

        Raises:
            ValueError: If it is damaged, or no state of a training run.
        """
        whole = self._checkpoints()
        if not whole:
            return None
        state = load(whole[-1])
        if not isinstance(state, dict) or (wrong := [k for k, kind in _KEPT.items() if not fits(state.get(k), kind)]):
            what = f"no {wrong[0]} is in it" if isinstance(state, dict) else "it is no state of a training run"
            damaged(whole[-1], what, ELSEWHERE)
        return state

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


def log_of(path: Path, recipe: Recipe, data: Mapping[str, tuple[Tensor, Tensor]]) -> Memory:
    """What was logged in a folder of this very run, which is left as it is.

    Raises:
        ValueError: If the folder is that of another recipe, or of other data, or damaged.
    """
    there = _read(path)
    if there is None:
        damaged(path / "run.json", "it is not there", ELSEWHERE)
    _refuse_other(there, _about(recipe, data), path)
    return read(path / LOG)


def _about(recipe: Recipe, data: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """What is trained, and on what."""
    return {
        "format": FORMAT,
        "fingerprint": fingerprint(recipe),
        "recipe": describe(recipe),
        "data": {name: [_look(tensor) for tensor in pair] for name, pair in data.items()},
    }


def _read(path: Path) -> Any:
    source = path / "run.json"
    if not source.exists():
        return None
    said = read_json(source, ELSEWHERE)
    if not fits(said, Mapping[str, Any]) or not fits(said.get("starts"), list[dict[str, Any]]):
        damaged(source, "it does not say what is trained here", ELSEWHERE)
    return said


def _refuse_other(there: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on with something else."""
    for part in ("format", "recipe", "data"):
        if apart := differences(there.get(part), own[part], part, length=100):
            first = apart[0]
            raise ValueError(f"{path} is the folder of another run, {first}: name another folder, or remove this one")


def _look(tensor: Tensor) -> str:
    """Shape, type and a mark of some entries: cheap, and enough to tell data from other data."""
    some = tensor.detach().reshape(-1)
    if len(some) > _LOOKS:  # drawn, since evenly spread ones may all be one corner of the images, and black
        some = some[random_bits(_LOOKS, ("look",), some.device).remainder(len(some))]
    some = some.cpu().contiguous()
    mark = hashlib.blake2b(some.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {mark}"
