"""Processes that work together, for tests.

One process loads torch and the functions to be run, and forks into the ranks of all process groups: loading is most of
the work. Each rank leaves in a file what its function returned.
"""

import gc
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Task(NamedTuple):
    """`size` ranks that run `function(*args)`; the test goes on when those that are `awaited` have ended."""

    name: str
    size: int
    function: str
    args: tuple[Any, ...] = ()
    awaited: Sequence[int] | None = None


class Launch:
    """Tasks in waves: those of one run side by side, and with the test; the ranks of one that are left are killed."""

    def __init__(self, waves: Sequence[Sequence[Task]], env: dict[str, str] | None = None) -> None:
        self.tasks, self.folder = {t.name: t for wave in waves for t in wave}, Path(tempfile.mkdtemp(prefix="ritz-"))
        path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
        common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {})}
        (self.folder / "waves").write_bytes(pickle.dumps([[tuple(task) for task in wave] for wave in waves]))
        with (self.folder / "err").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "ranks.py"), str(self.folder)], env=common, stdout=subprocess.DEVNULL,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout: float = 280.0) -> "Launch":
        """Until all is done."""
        try:
            self.process.wait(timeout)
        finally:
            self.stop()
        return self

    def stop(self) -> None:
        """No process is left behind."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()

    def results(self, name: str) -> list[Any]:
        """What each rank of a task returned; the failure of one is that of the test."""
        self.wait()
        task, found = self.tasks[name], []
        for rank in range(task.size) if task.awaited is None else task.awaited:
            file = self.folder / f"{name}.{rank}.out"
            assert file.exists(), (
                f"{name}: rank {rank} left nothing:\n{self._log(f'{name}.{rank}.err')}{self._log('err')}"
            )
            ok, value = pickle.loads(file.read_bytes())
            assert ok, f"{name}: rank {rank}:\n{value}"
            found.append(value)
        return found

    def codes(self, name: str) -> list[int]:
        """With which code each awaited rank ended."""
        task = self.tasks[name]
        ranks = range(task.size) if task.awaited is None else task.awaited
        return [int((self.folder / f"{name}.{rank}.code").read_text()) for rank in ranks]

    def log(self, name: str, rank: int) -> str:
        """What a rank wrote to stderr."""
        return self._log(f"{name}.{rank}.err")

    def _log(self, file: str) -> str:
        path = self.folder / file
        return path.read_text() if path.exists() else ""


def main(folder: Path) -> None:
    import torch

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    waves = [[Task(*fields) for fields in wave] for wave in pickle.loads((folder / "waves").read_bytes())]
    for module in {task.function.rpartition(".")[0] for wave in waves for task in wave}:
        importlib.import_module(module).warm()  # what is loaded when first used, forward mode say
    gc.freeze()  # a fork need not look at, and so copy, what is here already
    for wave in waves:
        ranks: dict[int, tuple[Task, int]] = {}
        for task in wave:
            for rank in range(task.size):
                pid = os.fork()
                if pid == 0:
                    sys.exit(work(folder, task, rank))  # as a program ends, not by os._exit
                ranks[pid] = task, rank
        watch(folder, ranks)


def watch(folder: Path, ranks: dict[int, tuple[Task, int]]) -> None:
    """Until every rank that is awaited has ended; the others are killed then."""
    while any(task.awaited is None or rank in task.awaited for task, rank in ranks.values()):
        pid, status = os.wait()
        task, rank = ranks.pop(pid)
        (folder / f"{task.name}.{rank}.code").write_text(str(os.waitstatus_to_exitcode(status)))
    for pid in ranks:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def work(folder: Path, task: Task, rank: int) -> int:
    """One rank, from its first breath to its last."""
    import torch.distributed as dist

    name = f"{task.name}.{rank}"
    with (folder / f"{name}.err").open("wb") as file:
        os.dup2(file.fileno(), 2)
    store = dist.FileStore(str(folder / f"{task.name}.store"), task.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.size)
    module, _, function = task.function.rpartition(".")
    try:
        result = True, getattr(importlib.import_module(module), function)(*task.args)
    except Exception:
        result = False, traceback.format_exc()
        sys.stderr.write(result[1])
    (folder / f"{name}.part").write_bytes(pickle.dumps(result))
    (folder / f"{name}.part").rename(folder / f"{name}.out")
    if result[0] and task.awaited is None:
        dist.destroy_process_group()
    return 0 if result[0] else 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
