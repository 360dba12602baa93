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
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .storage import load, save, write_text

try:
    import fcntl
except ImportError:  # Windows: two processes in one folder are not kept apart there
    fcntl = None  # type: ignore[assignment]

FORMAT = 1  # version of the folder's format
RUNS = Path("ritz-runs")  # where numbered folders are made
HEADER, EVENTS, ARRAYS = "run.json", "events.jsonl", "arrays"

# what run.json has at least
_KEYS = (
    "command", "state", "stop", "settings", "fingerprint", "identity", "source", "weights", "subject", "seeds",
    "machine", "versions", "times", "results",
)  # fmt: skip
_PACKAGES = ("torch", "numpy", "scipy", "safetensors")


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
            folder: Of the run; None makes the next numbered one in ritz-runs, as ritz-runs/measure-3.
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
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            lock = held.enter_context(_locked(path))
            # as it is now that no other process has it
            there = _same(cls.open(path) if (path / HEADER).exists() else None, own)
            how = "started" if there is None else "gone on with"
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
            raise FileNotFoundError(f"{path} holds no run: there is no {HEADER} in it; name a folder that ritz wrote")
        try:
            header = json.loads(source.read_text(encoding="utf8"))
            if (found := header["format"]) == FORMAT:
                _ = [header[key] for key in _KEYS]
                _ = dict(header["identity"]), float(header["times"]["seconds"]), set(header["results"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{source} is damaged ({line_of(error)}); run again, into another folder") from error
        if found != FORMAT:
            raise ValueError(
                f"{source} has format {found!r}, of another version of ritz; this one (format {FORMAT}) cannot read "
                "it; use that version, or name another folder"
            )
        try:
            results = _load(path)
        except ValueError:
            if header["state"] != "running":
                raise
            results = {}  # killed between the two files of a save: what was known is lost, and nothing else
        if header["state"] == "done" and (missing := set(header["results"]) - set(results)):
            raise ValueError(f"{path} has lost its results ({', '.join(missing)}); run again, into another folder")
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
        with (self.folder / EVENTS).open("ab", buffering=0) as file:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def keep(self, **results: Any) -> None:
        """Write results by name, beside those that are there already; None takes one away."""
        merged = {**self.results, **results}
        self.results = {name: result for name, result in merged.items() if result is not None}
        save(self.results, self.folder / ARRAYS)
        tensors = self.folder / f"{ARRAYS}.safetensors"
        if not tensors.exists():  # a result without tensors: the folder has the same files all the same
            from safetensors.torch import save_file

            save_file({}, tensors)
        self.header["results"] = list(self.results)
        self._write()

    def end(self, state: str, stop: str) -> None:
        """Write how it ended."""
        self.header |= {"state": state, "stop": stop}
        self.header["times"] |= {"ended": _now(), "seconds": round(self.seconds, 3)}
        self.event("end", state=state, text=stop)
        self._write()
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
        lines = source.read_bytes().split(b"\n")[:-1] if source.exists() else []
        return [json.loads(line) for line in lines]

    def _write(self) -> None:
        write_text(self.folder / HEADER, json.dumps(self.header, indent=1, allow_nan=False) + "\n")


def _header(
    command: str, settings: Mapping[str, Any], identity: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What run.json says at the start."""
    return {
        "format": FORMAT, "command": command, "state": "running", "stop": "", "settings": plain(settings),
        "fingerprint": _digest(identity), "identity": identity, "source": None, "weights": [], "subject": {},
        "seeds": {}, "machine": {}, **plain(about), "versions": versions(),
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
        ValueError: ... holds thesis.tex and no run; name another folder with --out, nothing was written
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
        if other := sorted(entry.name for entry in path.iterdir()):
            raise ValueError(f"{path} holds {other[0]} and no run; name another folder with --out, nothing was written")
    here = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not here.is_dir():
        raise NotADirectoryError(f"{path} cannot be made: {here} is a file; name another folder with --out")
    _check_writable(here)
    return None


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to; name another folder with --out")


def _same(there: Run | None, identity: Mapping[str, Any]) -> Run | None:
    """The run that is there, if it is the one of this identity."""
    if there is not None and (apart := _difference(there.header["identity"], identity)):
        raise ValueError(f"{there.folder} holds another run: {apart}; name another folder with --out")
    return there


def _locked(path: Path) -> IO[bytes]:
    """events.jsonl of a folder, open and locked.

    Raises:
        BlockingIOError: If another process has it.
    """
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
    within.mkdir(parents=True, exist_ok=True)
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
        results: dict[str, Any] = load(path / ARRAYS)
    except Exception as error:  # torn, edited, or of another version: safetensors has errors of its own
        raise ValueError(f"the results in {path} cannot be read ({line_of(error)}); run again elsewhere") from error
    return results


def _mend(source: Path) -> None:
    """Cut off a torn last line."""
    if source.exists():
        text = source.read_bytes()
        if not text.endswith(b"\n"):
            source.write_bytes(text[: text.rfind(b"\n") + 1])


def _difference(there: Any, own: Any, where: str = "") -> str:
    """The first place in which two identities differ, in words; nothing where they are the same."""
    if isinstance(there, dict) and isinstance(own, dict):
        keys = list(dict.fromkeys([*there, *own]))
        apart = (_difference(there.get(key), own.get(key), f"{where}.{key}".strip(".")) for key in keys)
        return next(filter(None, apart), "")
    return "" if there == own else f"{where} is {_brief(there)} there and {_brief(own)} here"


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --------------------------------------------------------------------------------------------- provenance


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


def sha256(path: str | os.PathLike[str]) -> str:
    """The mark of a file.

    Example:
        >>> len(sha256(__file__))
        64
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git(folder: Path, *words: str) -> str | None:
    """What git says, or None where there is no repository or no git."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
        >>> plain({"out": Path("a/b"), "ends": (0.0, math.inf)})
        {'out': 'a/b', 'ends': [0.0, 'Infinity']}
    """
    if isinstance(tree, Mapping):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    if isinstance(tree, os.PathLike):
        return os.fspath(tree)
    if isinstance(tree, float) and not math.isfinite(tree):
        return "NaN" if math.isnan(tree) else "Infinity" if tree > 0 else "-Infinity"
    return tree
