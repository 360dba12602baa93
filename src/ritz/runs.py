"""Run folders: what was run, on what, with what result.

    run.json             command, settings, seeds, versions, machine, times, state and stop reason
    events.jsonl         one line for each thing that happened, as it happened
    arrays.json          the results, numbers and text      together what `ritz.load(folder + "/arrays")` reads:
    arrays.safetensors   the results, tensors               results by name

Nothing is overwritten. A folder that holds something else, or a run of something else, is refused; one that holds the
same run is gone on with, by one process at a time. Two runs are the same if their `identity` is.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .files import PART, replace, write_text
from .nonfinite import word
from .provenance import own_commit, versions
from .reading import brief, content, damaged, differences, parse_json, read_json, refuse_irregular
from .schema import fits
from .storage import load, save

try:
    import fcntl
except ImportError:  # Windows: two processes in one folder are not kept apart there
    fcntl = None  # type: ignore[assignment]

FORMAT = 1  # version of the folder's format
RUNS = Path("ritz-runs")  # where numbered folders are made
HEADER, EVENTS, ARRAYS = "run.json", "events.jsonl", "arrays"

# what run.json has at least
_KEYS = {
    "command": str, "state": str, "stop": str, "settings": Any, "fingerprint": str, "identity": dict[str, Any],
    "source": Any, "weights": Any, "subject": Any, "seeds": Any, "machine": Any, "versions": Any, "commit": Any,
    "times": dict[str, Any], "results": list[str],
}  # fmt: skip
_ELSEWHERE = "run again, into another folder"
_NAMED = 3  # runs that may have been meant
_REMOVED = "remove that line"


class Run:
    """A run and its folder. As a context it ends by itself: done, interrupted by the keyboard, or failed.

    Attributes:
        folder: Where it is.
        header: What run.json says.
        results: By name; what an earlier part of the same run has kept is there from the start.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "spectrum-1"
        >>> with Run.start(folder, "spectrum", {"num_steps": 10}) as run:
        ...     run.event("progress", text="head", part=0.1)
        ...     run.keep(trace=ritz.Estimate(name="trace", value=3.0, exact=True))
        >>> again = Run.open(folder)
        >>> again.state, again.results["trace"].value, [event["event"] for event in again.events()]
        ('done', 3.0, ['start', 'progress', 'end'])
    """

    def __init__(self, folder: Path, header: dict[str, Any], results: dict[str, Any]) -> None:
        self.folder, self.header, self.results = folder, header, results
        self._begun = time.perf_counter() - float(header["times"]["seconds"])
        self._lock: IO[bytes] | None = None  # held while it is under way; the end of the process, too, lets go of it

    # ---------------------------------------------------------------------------------------- begin, open

    @classmethod
    def start(
        cls,
        folder: str | os.PathLike[str] | None,
        command: str,
        settings: Mapping[str, Any],
        identity: Mapping[str, Any] | None = None,
        **about: Any,
    ) -> "Run":
        """Begin a run, or go on with the same one.

        Args:
            folder: Folder of the run; None creates the next numbered one in ritz-runs, such as ritz-runs/measure-3.
            command: What is run.
            settings: How it is run.
            identity: What makes it this run and no other, command included; command and settings if not said.
            **about: More for run.json, such as source, weights, subject, seeds and machine.

        Raises:
            ValueError: If the folder holds something else; it says what.
            OSError: If it cannot be written, or another process is at work in it.
        """
        own = plain({"command": command, **(identity or {"settings": settings})})
        path = numbered(command) if folder is None else Path(folder)
        there = _same(check_folder(path), own)
        if there is not None and there.state == "done":
            return there
        _make(path)
        with contextlib.ExitStack() as held:
            lock = held.enter_context(_locked(path))
            # as it is now that no other process has it
            there = _same(cls.open(path) if (path / HEADER).exists() else None, own)
            how = "started" if there is None else "resumed"
            run = there or cls(path, _header(command, settings, own, about), {})
            if run.state != "done":
                run._begin(how, lock)
                held.pop_all()
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Run":
        """A run that is there, to be read.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is of another version of the format, or damaged.
        """
        path = Path(folder)
        source = path / HEADER
        if not source.is_file():
            inside = sorted(str(run.parent) for run in path.glob(f"*/{HEADER}"))
            near = [str(path.parent)] if path.is_file() and (path.parent / HEADER).is_file() else inside
            meant = f"did you mean {' or '.join(near[:_NAMED])}?" if near else "name a folder that ritz wrote"
            raise FileNotFoundError(f"{path} holds no run: there is no {HEADER} in it; {meant}")
        header = read_json(source, _ELSEWHERE)
        if not isinstance(header, dict) or "format" not in header:
            damaged(source, "it does not say of which format it is", _ELSEWHERE)
        if (found := header["format"]) != FORMAT:
            raise ValueError(
                f"{source} has format {brief(repr(found), 40)}, of another version of ritz; this one (format {FORMAT}) "
                "cannot read it; use that version, or name another folder"
            )
        for key, kind in _KEYS.items():
            if key not in header or not fits(header[key], kind):
                damaged(source, f"its {key} is missing, or not what it should be", _ELSEWHERE)
        if not fits(header["times"].get("seconds"), float):
            damaged(source, "it does not say how long it took", _ELSEWHERE)
        try:
            results = _load(path)
        except ValueError:
            if header["state"] != "running":
                raise
            results = {}  # killed between the two files of a save: what was known is lost, and nothing else
        if header["state"] == "done" and (missing := set(header["results"]) - set(results)):
            names = brief(", ".join(sorted(missing)), 100)
            raise ValueError(f"{path} has lost its results ({names}); run again, into another folder")
        return cls(path, header, results)

    def _begin(self, how: str, lock: IO[bytes]) -> None:
        """Write that it is under way."""
        self._lock = lock
        self.header |= {"state": "running", "stop": ""}
        _mend(self.folder / EVENTS)
        self._write()
        self.event("start", text=f"ritz {self.header['command']} {how}")

    # --------------------------------------------------------------------------------------------- within

    @property
    def state(self) -> str:
        """running, done, interrupted or failed; a run that was killed still says that it is running."""
        return str(self.header["state"])

    @property
    def seconds(self) -> float:
        """Since the start; those of an earlier part included."""
        return time.perf_counter() - self._begun

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append a line to events.jsonl, at once."""
        row = {"seconds": round(self.seconds, 3), "event": kind, **plain(fields)}
        source = self.folder / EVENTS
        try:
            with source.open("ab", buffering=0) as file:
                file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        except OSError as error:
            error.filename = error.filename or str(source)  # which a full disk does not tell
            raise

    def keep(self, **results: Any) -> None:
        """Write results by name, beside those that are there already; None takes one away."""
        merged = {**self.results, **results}
        self.results = {name: result for name, result in merged.items() if result is not None}
        save(self.results, self.folder / ARRAYS)
        tensors = self.folder / f"{ARRAYS}.safetensors"
        if not tensors.exists():  # a result without tensors: the folder has the same files all the same
            from safetensors.torch import save_file

            replace(tensors, lambda part: save_file({}, part))
        self.header["results"] = list(self.results)
        self._write()

    def end(self, state: str, stop: str) -> None:
        """Write how it ended."""
        self.header |= {"state": state, "stop": stop}
        self.header["times"] |= {"ended": _now(), "seconds": round(self.seconds, 3)}
        try:
            self.event("end", state=state, text=stop)
            self._write()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.state != "running":
            return
        if error is None:
            self.end("done", "completed")
        elif isinstance(error, KeyboardInterrupt):
            self.end("interrupted", "stopped by the keyboard")
        else:
            self.end("failed", line_of(error))

    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl; a torn last one is passed over."""
        source = self.folder / EVENTS
        lines = content(source).split(b"\n")[:-1] if source.exists() else []
        found = [parse_json(line, f"line {number} of {source}", _REMOVED) for number, line in enumerate(lines, 1)]
        for number, row in enumerate(found, 1):
            if not isinstance(row, dict):
                damaged(f"line {number} of {source}", "it is no event", _REMOVED)
        return found

    def _write(self) -> None:
        write_text(self.folder / HEADER, json.dumps(self.header, indent=1, allow_nan=False) + "\n")


def _header(
    command: str, settings: Mapping[str, Any], identity: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What run.json says at the start."""
    return {
        "format": FORMAT, "command": command, "state": "running", "stop": "", "settings": plain(settings),
        "fingerprint": _digest(identity), "identity": identity, "source": None, "weights": [], "subject": {},
        "seeds": {}, "machine": {}, **plain(about), "versions": versions(), "commit": own_commit(),
        "times": {"started": _now(), "ended": None, "seconds": 0.0}, "results": [],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- folders


def check_folder(folder: str | os.PathLike[str]) -> Run | None:
    """The run that a folder holds, None where one can be begun; anything else is refused.

    Raises:
        ValueError: If something else is in it, or a run of another version.
        OSError: If it is not a folder, cannot be written, or another process is at work in it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     empty = check_folder(folder)
        ...     _ = Path(folder, "thesis.tex").write_text("...")
        ...     print(empty)
        ...     check_folder(folder)
        Traceback (most recent call last):
        ValueError: ... contains thesis.tex but no run; name another folder with --out, nothing was written
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; name a folder with --out")
    if path.is_dir():
        if (path / HEADER).exists():
            there = Run.open(path)
            if there.state != "done":
                _check_writable(path)
                _locked(path).close()
            return there
        if other := sorted(entry.name for entry in path.iterdir() if not _unborn(entry)):
            raise ValueError(
                f"{path} contains {other[0]} but no run; name another folder with --out, nothing was written"
            )
    here = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not here.is_dir():
        raise NotADirectoryError(f"{path} cannot be made: {here} is a file; name another folder with --out")
    _check_writable(here)
    return None


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # what no look at its parents shows: a full disk, a file system that is read only
        why = error.strerror or type(error).__name__
        raise type(error)(f"{folder} cannot be made ({why}); name another folder with --out") from error


def _unborn(entry: Path) -> bool:
    """Whether a file is what a run leaves that was killed before it had written what it is."""
    empty_log = entry.name == EVENTS and entry.is_file() and not entry.stat().st_size
    return empty_log or (entry.name.startswith(f"{HEADER}.") and entry.name.endswith(PART))


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to; name another folder with --out")


def _same(there: Run | None, identity: Mapping[str, Any]) -> Run | None:
    """The run that is there, if it is the one of this identity."""
    if there is not None and (apart := differences(there.header["identity"], identity)):
        raise ValueError(f"{there.folder} holds another run: {apart[0]}; name another folder with --out")
    return there


def _locked(path: Path) -> IO[bytes]:
    """events.jsonl of a folder, open and locked.

    Raises:
        BlockingIOError: If another process has it.
    """
    if (path / EVENTS).is_symlink() or (path / EVENTS).exists():
        refuse_irregular(path / EVENTS, links=False)  # it is written to, and what a link leads to may not be ours
    file = (path / EVENTS).open("ab")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BlockingIOError(
                f"another process is at work in {path}; wait for its end, or name another folder with --out"
            ) from None
        except OSError:  # a file system without locks
            pass
    return file


def numbered(command: str, within: Path = RUNS) -> Path:
    """The next folder of a command, made: ritz-runs/measure-1, ritz-runs/measure-2, ...

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [numbered("measure", Path(folder)).name for _ in range(3)]
        ['measure-1', 'measure-2', 'measure-3']
    """
    _make(within)
    taken = [entry.name.removeprefix(f"{command}-") for entry in within.glob(f"{command}-*")]
    number = max((int(tail) for tail in taken if tail.isdecimal()), default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):  # another process was quicker
            (within / f"{command}-{number}").mkdir()
            return within / f"{command}-{number}"


def _load(path: Path) -> dict[str, Any]:
    """What was kept, if anything was."""
    if not (path / f"{ARRAYS}.json").exists():
        return {}
    try:
        results = load(path / ARRAYS)
        if not fits(results, dict[str, Any]):
            raise ValueError("they have no names")
    except (ValueError, OSError) as error:
        raise ValueError(f"the results in {path} cannot be read ({line_of(error)}); run again elsewhere") from error
    return dict(results)


def _mend(source: Path) -> None:
    """Cut off a torn last line."""
    if source.exists():
        text = source.read_bytes()
        if not text.endswith(b"\n"):
            os.truncate(source, text.rfind(b"\n") + 1)


def _digest(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# ------------------------------------------------------------------------------------------------- as text


def line_of(error: BaseException) -> str:
    """An error in one line.

    Example:
        >>> line_of(KeyError("a")), line_of(ValueError("too large; take less" + chr(10) + "more"))
        ("KeyError: 'a'", 'too large; take less more')
    """
    from .errors import RitzError

    text = " ".join(str(error).split())
    speaks = isinstance(error, RitzError | ValueError | OSError) and not isinstance(error, UnicodeError)
    return text if text and speaks else f"{type(error).__name__}: {text}".removesuffix(": ")


def plain(tree: Any) -> Any:
    """A tree as JSON has it: paths and tuples as text and lists, what is not finite as "NaN" or "Infinity".

    Example:
        >>> plain({"out": Path("a/b"), "ends": (0.0, float("inf"))})
        {'out': 'a/b', 'ends': [0.0, 'Infinity']}
    """
    if isinstance(tree, Mapping):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    if isinstance(tree, os.PathLike):
        return os.fspath(tree)
    return word(tree) if isinstance(tree, float) else tree
