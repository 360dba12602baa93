"""A process that has torch loaded and forks for each order: a run that is killed costs its own time and no more.

Orders and answers are lines of JSON. An order names a job, a folder, and at most one fault:

    {"after": 0.1}                  SIGKILL after so many seconds
    {"at": 17}                      SIGKILL before the 17th operation on a file
    {"error": "ENOSPC", "at": 17}   the 17th operation on a file, and all after it, fail so
    {"signals": [[0.1, 15]]}        signals after so many seconds
"""

import errno
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from faults import jobs

from ritz import fingerprints

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Operations:
    """Counts the operations on files of a folder, and makes one of them the last, or the first that fails."""

    def __init__(self, folder: Path, at: int = 0, error: str = "") -> None:
        self.folder, self.at, self.error, self.count = str(folder), at, error, 0

    def install(self) -> None:
        real = os.fsync

        def fsync(number: int) -> None:
            sys.audit("ritz.fsync", os.readlink(f"/proc/self/fd/{number}"))
            real(number)

        os.fsync = fsync
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES):
            return
        if event not in ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "ritz.fsync"):
            return
        path = os.fspath(args[0]) if isinstance(args[0], str | os.PathLike) else ""
        if not os.path.abspath(path).startswith(self.folder) or path.endswith("told"):
            return
        self.count += 1
        if self.at and self.count >= self.at:
            if not self.error:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(getattr(errno, self.error), os.strerror(getattr(errno, self.error)), path)


def child(order: dict[str, Any], out: int) -> None:
    """Do the job and write what came of it; does not return."""
    Path(order["folder"]).mkdir(parents=True, exist_ok=True)
    operations = Operations(Path(order["folder"]), order.get("at", 0), order.get("error", ""))
    operations.install()
    try:
        answer = {"bits": jobs.run(order["job"], Path(order["folder"]), order.get("every", 0.0))}
    except SystemExit as error:
        answer = {"status": error.code}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    with os.fdopen(out, "w") as file:
        json.dump({**answer, "operations": operations.count}, file)
    os._exit(0)


def carried_out(order: dict[str, Any]) -> dict[str, Any]:
    """Fork, disturb, wait; what the child said, which is nothing if it was killed."""
    read, write = os.pipe()
    begun = time.monotonic()
    process = os.fork()
    if not process:
        os.close(read)
        child(order, write)
    os.close(write)
    events = [*order.get("signals", []), *([[order["after"], signal.SIGKILL]] if "after" in order else [])]
    status = None
    for seconds, number in events:
        while status is None and time.monotonic() - begun < seconds:
            ended, code = os.waitpid(process, os.WNOHANG)
            status = code if ended else None
            time.sleep(0.001)
        if status is None:
            os.kill(process, number)
    with os.fdopen(read) as file:
        said = file.read()
    if status is None:
        _, status = os.waitpid(process, 0)
    return {
        **(json.loads(said) if said else {}), "killed": os.WIFSIGNALED(status), "seconds": time.monotonic() - begun
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    fingerprints.code()  # once: the files may change while the tests run
    for job in jobs.JOBS:  # load what they load, so that no child need
        with tempfile.TemporaryDirectory() as folder:
            jobs.run(job, Path(folder))
    gc.freeze()  # a fork need not look at, and so copy, what is here already
    for line in sys.stdin:
        sys.stdout.write(json.dumps(carried_out(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
