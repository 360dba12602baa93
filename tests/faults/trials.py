"""Faults at random points, and what must hold after: the run goes on, loses one product, ends in the same bits."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from faults import jobs

SERVER = Path(__file__).with_name("server.py")


class Server:
    """The forking process; see server.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, job: str, folder: Path, **fault: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"job": job, "folder": str(folder), **fault}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=30)


@dataclass(frozen=True)
class Whole:
    """A job that was left alone."""

    bits: str
    seconds: float
    operations: int


def left_alone(server: Server, job: str, folder: Path) -> Whole:
    """What a job finds undisturbed, how long it takes, and how many operations on files it is made of."""
    found = server.ask(job, folder)
    shutil.rmtree(folder)
    assert "bits" in found, found
    return Whole(found["bits"], found["seconds"], found["operations"])


@dataclass(frozen=True)
class Trial:
    """What came of a job that was killed once or several times and then left to end."""

    job: str
    kills: tuple[str, ...]
    died: int  # kills that came before the end
    same: bool  # ended in the same bits
    lost: int | None  # products that were reported and had to be done again, at most, by one kill; None: not counted
    error: str = ""

    @property
    def survived(self) -> bool:
        return self.same and not self.error and (self.lost or 0) <= 1  # the product in hand


def killed(server: Server, job: str, whole: Whole, folder: Path, draw: random.Random) -> Trial:
    """Kill a job one to three times, by the clock or at an operation on a file, and let it end.

    A first kill that comes too late, as by the clock on a machine that has become faster, is drawn again.
    """
    kills, died, found, wanted = list[str](), 0, dict[str, Any](), draw.randint(1, 3)
    while len(kills) < wanted:
        if draw.random() < 0.5:
            fault: dict[str, Any] = {"after": draw.uniform(0, whole.seconds)}
        else:
            fault = {"at": draw.randint(1, whole.operations)}
        kills.append(", ".join(f"{key} {value:.4g}" for key, value in fault.items()))
        found = server.ask(job, folder, **fault)
        died += found["killed"]
        if "error" in found:
            shutil.rmtree(folder)
            return Trial(job, tuple(kills), died, False, None, found["error"])
        if not died:
            shutil.rmtree(folder)
            kills.clear()
    found = server.ask(job, folder)
    lost = repeated((folder / "told").read_text())
    shutil.rmtree(folder)
    return Trial(job, tuple(kills), died, found.get("bits") == whole.bits, lost, found.get("error", ""))


def repeated(told: str) -> int | None:
    """The most reports of one process that come again in the next: 1 where the product in hand was lost."""
    parts = [[int(line) for line in part.split("\n")[1:] if line] for part in told.split("process ")[1:]]
    if not any(parts):
        return None
    most = 0
    for before, after in itertools.pairwise(parts):
        if before and after:
            most = max(most, sum(number >= after[0] for number in before))
    return most


def names(prefix: str = "") -> list[str]:
    return [name for name in jobs.JOBS if name.startswith(prefix)]
