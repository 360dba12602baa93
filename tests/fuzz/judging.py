"""What may come of reading a damaged file: one sentence of a known class, or what the file says; and within bounds."""

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 5  # that one file may take
ROOM = 256 << 20  # bytes beyond what the process has that one file may take, whatever its length
SWELL = 200  # times its length
REMEDIES = ("again", "name ", "remove", "save", "run ", "give ", "use ", "get ")
STARTED = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "ctypes.dlopen")

_watching: list[str] | None = None
_hooked = False


class Wrong(AssertionError):
    """A reader did what none may."""


def _hook(event: str, _: Any) -> None:
    if _watching is not None and event in STARTED:
        _watching.append(event)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Note each program that is started, each connection that is made."""
    global _watching, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    _watching = []
    try:
        yield _watching
    finally:
        _watching = None


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    """Neither for ever nor more memory than there is."""

    def late(*_: object) -> None:
        raise Wrong(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + (4 << 30), hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _status(name: str) -> int:
    """A size of this process in bytes, as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def judge(read: Callable[[Path], Any], folder: Path, verify: Callable[[Any], None], canary: Path) -> str:
    """Read a folder; "loaded" or "refused", and anything else is `Wrong`."""
    length = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    peak, begun = _status("VmPeak"), time.perf_counter()
    with watched() as started:
        try:
            with limited():
                found = read(folder)
                outcome = "loaded"
        except Exception as error:
            if isinstance(error, Wrong):
                raise
            check_refusal(error, folder)
            outcome = "refused"
    if started or canary.exists():
        raise Wrong(f"it ran something: {started or canary}")
    if (grown := _status("VmPeak") - peak) > ROOM + SWELL * length:
        raise Wrong(f"{grown >> 20} MiB were asked for by a file of {length} bytes")
    if (spent := time.perf_counter() - begun) > SECONDS:
        raise Wrong(f"it took {spent:.1f} s")
    if outcome == "loaded":
        verify(found)
    return outcome


def check_refusal(error: Exception, folder: Path) -> None:
    """One sentence of a known class that names the file and what to do."""
    text = str(error)
    if not isinstance(error, ValueError | OSError) or isinstance(error, UnicodeError):
        raise Wrong(f"{type(error).__name__} got through: {text[:300]}") from error
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MemoryError) or "allocate memory" in str(chain) or "allocate 0x" in str(chain):
            raise Wrong(f"it ran out of memory: {text[:300]}") from error
        chain = chain.__cause__ or chain.__context__
    if "\n" in text or len(text) > 800:
        raise Wrong(f"more than a sentence, {len(text)} characters: {text[:300]}") from error
    names = [folder.name, *(path.name for path in folder.rglob("*"))]
    if not any(name in text for name in names):
        raise Wrong(f"no file is named: {text[:300]}") from error
    if not any(word in text for word in REMEDIES):
        raise Wrong(f"no remedy is named: {text[:300]}") from error
