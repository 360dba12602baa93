"""The state of a long run on disk, so that a kill at any moment loses one product or one minute.

    state-000012.json  what the run is (its fingerprint), and which files are its state
    latest-000012.*    what changes from save to save
    head-000007.*      what does not change any more: written once
    lock               while a process is at work here: which, on which machine

Files are never written twice. New ones are on the disk before a new state-*.json names them (`ritz.files`), and the one
before, and what it alone names, is removed after that: whatever the moment of a kill or of a power cut, there is one
that names files that are whole. Ranks that work together have a folder each, save at the same moments, remove the state
before when all have the new one, and go on from the newest that all have.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from . import stopping
from .comm import SELF, World
from .errors import StateError, StoppedError
from .files import PART, sync_folder, write_text
from .locks import lock, unlock
from .reading import differences, read_json
from .storage import load, save

FORMAT = 1
EVERY = 60.0  # seconds
MANIFEST, LOCK, LATEST = "state", "lock", "latest"
_OURS = re.compile(r"[\w-]+-\d{6}\.(json|safetensors)|.*\.part")
_RANKS = re.compile(r"rank-\d+-of-(\d+)")  # folders of ranks that work together
_NAMED = 4  # differences that are shown

Settled: TypeAlias = Mapping[str, Any]
State: TypeAlias = tuple[Mapping[str, Any], Settled]  # what changes; what is written once, or what gives it

_open: set[Path] = set()  # folders at work in this process, which a lock that names the process does not keep apart


class Checkpoint:
    """A folder for the state of a run. The same call with the same folder resumes, or returns the finished result.

    Args:
        folder: Created if it does not exist. A folder that contains something else is refused.
        every: Seconds of work that a kill may lose, by default 60; more only if one product takes longer. A save
            takes the time to write the vectors that are new since the last save; 0 saves after every product.

    Example:
        >>> import tempfile
        >>> from ritz.operators import DenseOperator
        >>> H = DenseOperator(torch.diag(torch.linspace(0, 1, 200)))
        >>> folder = tempfile.mkdtemp()
        >>> first = ritz.spectrum(H, 10, 4, checkpoint=ritz.Checkpoint(folder, every=0))
        >>> ritz.spectrum(H, 10, 4, checkpoint=folder) == first  # read back: it was done
        True
        >>> ritz.spectrum(H, 20, 4, checkpoint=folder)
        Traceback (most recent call last):
        ritz.checkpoint.UnfitStateError: ... is of another run: settings.num_steps is 10 there and 20 here; ...
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: float | None = None) -> None:
        self.folder, self.every = Path(folder), EVERY if every is None else every
        if not self.every >= 0:
            raise ValueError(f"every must be a number of seconds, 0 or more, got {every}")

    def within(self, name: str) -> "Checkpoint":
        """The checkpoint of a run inside this one, in a subfolder."""
        safe = re.sub(r"[^\w-]+", "-", name)[:60]
        return Checkpoint(
            self.folder / (safe if safe == name else f"{safe}-{zlib.crc32(name.encode()):08x}"), every=self.every
        )

    def remove(self) -> None:
        """Remove the state, where it is not needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def open(self, fingerprint: Mapping[str, Any], world: World = SELF) -> Iterator["Saved"]:
        """What is there of the run that has this fingerprint, to be gone on with, by one process at a time.

        Args:
            fingerprint: What the run depends on; a tree of plain values.
            world: The ranks that work together.

        Raises:
            ValueError: If the folder holds the state of another run, a state that cannot be read, or something else.
            OSError: If it cannot be written to, or another process is at work in it.
        """
        fingerprint = json.loads(json.dumps(fingerprint))  # as it will be read back
        folder = self.folder if world.size == 1 else self.folder / f"rank-{world.rank}-of-{world.size}"
        with contextlib.ExitStack() as held:
            with _together(world, "opening the checkpoint"):
                _refuse_other_ranks(self.folder, world.size)
                _refuse_foreign(folder)
                held.enter_context(_locked(folder))
            yield Saved(folder, self.every, fingerprint, world)


class Saved:
    """The state of a run that is under way; see `Checkpoint.open`.

    Attributes:
        latest: What changes from save to save, as it was found at the opening; None for a run that has not begun.
        about: Called at each save; what it returns is kept beside the rest, in `latest["choices"]`.
    """

    def __init__(self, folder: Path, every: float, fingerprint: Mapping[str, Any], world: World = SELF) -> None:
        self.folder, self.every, self.fingerprint, self.world = folder, every, fingerprint, world
        self.about: Callable[[], Any] = lambda: None
        self.parts: dict[str, str] = {}  # files by name
        self.number = self._newest()
        with _together(world, "reading the checkpoint"):
            if self.number is None:
                self.number = 0
                with _explained(folder):
                    self._write_manifest({})
            else:
                self.parts = _read(folder / _manifest(self.number), fingerprint)
            self.latest: dict[str, Any] | None = self._load(LATEST) if LATEST in self.parts else None
        self._clean()
        self._saved = self._met = time.monotonic()

    def _newest(self) -> int | None:
        """The number of the newest state that every rank has; None where no rank has any."""
        own = sorted(
            int(path.stem[-6:]) for path in self.folder.glob(f"{MANIFEST}-*.json") if _OURS.fullmatch(path.name)
        )
        all_ = self.world.gather(own)
        common = set(own).intersection(*all_)
        if not common and any(max(numbers, default=0) for numbers in all_):  # 0 holds nothing
            raise UnfitStateError(
                f"the states in {self.folder.parent} are not of one run: some ranks have no state, or the state of "
                "another run; remove the folder to begin anew"
            )
        return max(common, default=None)

    def settled(self, name: str) -> Any:
        """What was written once under a name.

        Raises:
            ValueError: If it cannot be read.
        """
        return self._load(name)

    def has(self, name: str) -> bool:
        """Whether something was written under a name."""
        return name in self.parts

    def point(self, make: Callable[[], State]) -> None:
        """Between two products: `offer` a state, and leave if the run is to stop.

        Raises:
            StoppedError: If the run is to stop; the state is saved by then.
            OSError: If the state cannot be written; the one before is as it was.
        """
        if wish := self.offer(make):
            raise StoppedError(f"{wish}; the state is in {self.folder}, and the same call resumes from there")

    def wish(self) -> str:
        """Why the run is to stop, or ""; ranks that can be stopped are stopped together."""
        if not stopping.listening():
            return ""
        return next(filter(None, self.world.gather(stopping.asked())), "")

    def offer(self, make: Callable[[], State]) -> str:
        """Save what `make` gives if it is time to, or if the run is to stop; why it is, or "".

        It is time when the next product, if it takes as long as the last, would end more than `every` seconds after
        the last save.
        """
        now = time.monotonic()
        lasted, self._met = now - self._met, now
        due = self.world.first(now - self._saved + lasted >= self.every)
        wish = self.wish()
        if wish or due:
            self.write(*make())
        return wish

    def write(self, latest: Mapping[str, Any], settled: Settled | None = None) -> None:
        """Save now. What is settled and there already is not written again; what is not named any more is removed."""
        tree = {**latest, "choices": self.about()}
        with _together(self.world, "writing the checkpoint"), _explained(self.folder):
            self._write_parts({LATEST: tree, **(settled or {})})
        self._clean()
        self.latest = {"result": tree.get("result"), "choices": tree["choices"]}  # the rest would hold its memory
        self._saved = self._met = time.monotonic()

    def _write_parts(self, contents: Settled) -> None:
        assert self.number is not None
        self.number += 1
        parts = {name: self.parts[name] for name in contents if name in self.parts and name != LATEST}
        for name, content in contents.items():
            if name not in parts:
                parts[name] = f"{name}-{self.number:06d}"
                save(content() if callable(content) else content, self.folder / parts[name])
        self._write_manifest(parts)

    @property
    def result(self) -> Any:
        """What the run found, if it is done; None if it is not."""
        return None if self.latest is None else self.latest.get("result")

    def finish(self, result: Any) -> None:
        """The run is done: keep what it found, and nothing else."""
        self.write({"result": result})

    def _load(self, name: str) -> Any:
        try:
            if name not in self.parts:
                raise ValueError(f"it does not name the file of {name}")
            return load(self.folder / self.parts[name])
        except (ValueError, OSError) as error:
            _refuse_damaged(self.folder, error)

    def _write_manifest(self, parts: Mapping[str, str]) -> None:
        assert self.number is not None
        tree = {"format": FORMAT, "fingerprint": self.fingerprint, "parts": parts}
        write_text(self.folder / _manifest(self.number), json.dumps(tree, indent=1) + "\n")
        self.parts = dict(parts)

    def _clean(self) -> None:
        """Remove files of ours that the state does not name: old ones, and what a kill left."""
        kept = {*self.parts.values(), LOCK, f"{MANIFEST}-{self.number:06d}"}
        with contextlib.suppress(OSError):  # a folder that is full or closed by now: the next save tries again
            for path in sorted(self.folder.iterdir(), key=lambda path: not path.name.startswith(MANIFEST)):
                if _OURS.fullmatch(path.name) and path.name.partition(".")[0] not in kept and path.is_file():
                    path.unlink(missing_ok=True)


class Unsaved(Saved):
    """A run that keeps nothing; it can be stopped all the same."""

    def __init__(self, world: World = SELF) -> None:
        self.latest, self.parts, self.about, self.world = None, {}, lambda: None, world

    def point(self, make: Callable[[], State]) -> None:
        """Leave if the run is to stop."""
        if wish := self.offer(make):
            raise StoppedError(wish)

    def offer(self, make: Callable[[], State]) -> str:
        """Why the run is to stop, or ""."""
        return self.wish()

    def write(self, latest: Mapping[str, Any], settled: Settled | None = None) -> None:
        """Nothing."""


def as_checkpoint(given: "Checkpoint | str | os.PathLike[str] | None") -> Checkpoint | None:
    """A folder or a checkpoint as a checkpoint.

    Example:
        >>> as_checkpoint("run").every
        60.0
    """
    if given is None or isinstance(given, Checkpoint):
        return given
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"checkpoint must be a folder or a ritz.Checkpoint, got {type(given).__name__}")
    return Checkpoint(given)


def digest(tree: Any) -> str:
    """The mark of a tree of plain values.

    Example:
        >>> digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
        True
    """
    return hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=8).hexdigest()


# ------------------------------------------------------------------------------------------------- refusals


def _read(source: Path, fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """The files by name of a state that is that of this run."""
    try:
        tree = read_json(source)
        found, there, parts = tree["format"], tree["fingerprint"], tree["parts"]
        if found == FORMAT and not all(isinstance(f, str) and _OURS.fullmatch(f"{f}.json") for f in parts.values()):
            raise ValueError("it names files that are not its own")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _refuse_damaged(source.parent, error)
    if found != FORMAT:
        raise UnfitStateError(
            f"the state in {source.parent} has format {found!r}, and this version of ritz reads format {FORMAT}; use "
            "the version that wrote it, or name another folder"
        )
    if apart := differences(there, fingerprint):
        raise UnfitStateError(
            f"the state in {source.parent} is of another run: {_some(apart)}; its fingerprint is "
            f"{digest(there)}, that of this call {digest(fingerprint)}; name another folder, or remove this one"
        )
    return dict(parts)


def _some(texts: list[str]) -> str:
    more = f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return "; ".join(texts[:_NAMED]) + more


class UnfitStateError(StateError, ValueError):
    """A state that cannot be read, or of another run."""


class UnkeptStateError(StateError, OSError):
    """A state that cannot be written."""


def _refuse_damaged(folder: Path, error: Exception) -> NoReturn:
    text = " ".join(str(error).split()) or type(error).__name__
    raise UnfitStateError(
        f"the state in {folder} cannot be read ({text}); nothing in it was changed: remove the folder to begin anew"
    ) from error


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder in which somebody keeps something else."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name a folder for the checkpoint")
    if folder.is_dir() and not any(folder.glob(f"{MANIFEST}-*.json")):
        other = sorted(p.name for p in folder.iterdir() if p.name != LOCK and not p.name.endswith(PART))
        if other:
            raise UnfitStateError(
                f"{folder} contains {other[0]} but no state of a run; name another folder for the checkpoint"
            )


def _refuse_other_ranks(folder: Path, size: int) -> None:
    """Refuse the state of another number of ranks: each has kept its part of the vectors."""
    kept = {1} if any(folder.glob(f"{MANIFEST}-*.json")) else set[int]()
    for path in folder.glob(f"rank-*/{MANIFEST}-*.json"):
        if of := _RANKS.fullmatch(path.parent.name):
            kept.add(int(of[1]))
    if other := sorted(kept - {size}):
        raise UnfitStateError(
            f"the state in {folder} is of another run: the number of ranks is {other[0]} there and {size} here; use "
            "the same number, or name another folder"
        )


def _manifest(number: int) -> str:
    return f"{MANIFEST}-{number:06d}.json"


@contextlib.contextmanager
def _together(world: World, what: str) -> Iterator[None]:
    """What goes wrong on one rank goes wrong on all."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    world.agree(what, failed, None)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """An error of the system with what it means for the run."""
    try:
        yield
    except BlockingIOError:  # says itself what it means
        raise
    except OSError as error:
        told = UnkeptStateError(
            f"the state of the run cannot be kept in {folder} ({error.strerror}); what was saved before is as it was: "
            "make room or give leave to write there, and the same call goes on, or name another folder"
        )
        told.errno = error.errno
        raise told from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made, and nobody else in it."""
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    own = folder.resolve()
    if own in _open:
        raise BlockingIOError(f"another run of this process keeps its state in {folder}; name another folder")
    with _explained(folder):
        mark = lock(folder / LOCK, "keeps the state of a run in")
    _open.add(own)
    try:
        yield
    finally:
        _open.discard(own)
        unlock(folder / LOCK, mark)
