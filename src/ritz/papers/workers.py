"""Processes side by side on one machine, each of which does one task after another.

Python's own pool ends all processes when one is lost, and training with them. Here the others finish what they do, and
only then is the failure raised; when the parent is killed, its workers end themselves. Where memory runs out, there is
one process fewer from then on, and the task is done again.
"""

import logging
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection, parent_process
from operator import attrgetter
from typing import Any, Literal

import torch

log = logging.getLogger(__name__)

LEAVE = 10.0  # seconds that a process is given to end

Task = tuple[Callable[..., Any], tuple[Any, ...]]  # function and arguments
Done = Callable[[int, int], None]  # (done, total)
End = Literal["done", "failed", "no room"]


class RunFailed(RuntimeError):
    """A task that another process could not do.

    Attributes:
        name: Of the task.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"run {name!r} failed: {why}")
        self.name = name


def side_by_side(tasks: Mapping[str, Task], workers: int, done: Done | None = None) -> dict[str, Any]:
    """The results of all tasks by name, in their order, from so many processes.

    A process keeps what it has made at the top of a module between tasks; a task and its result are pickled. Workers
    have torch's settings of this process, but for the number of threads on the CPU, which is 1.

    Raises:
        TypeError: If a task cannot be pickled, before anything is started.
        RunFailed: If a task raised, or its process was lost; no task is begun after that, and those that were are
            finished first. One that runs out of memory beside others is not lost: it is done again, among fewer.

    Example:
        >>> side_by_side({"three": (divmod, (7, 2)), "four": (divmod, (9, 2))}, workers=1)
        {'three': (3, 1), 'four': (4, 1)}
    """
    sent = {name: _pickled(name, task) for name, task in tasks.items()}
    if done is not None:
        done(0, len(tasks))
    crew = [_Worker() for _ in range(min(workers, len(tasks)))]
    try:
        found = _share(crew, sent, done)
        for worker in crew:
            worker.dismiss()
    finally:
        for worker in crew:
            worker.end()
    return {name: found[name] for name in tasks}


def _share(crew: list["_Worker"], sent: Mapping[str, bytes], done: Done | None) -> dict[str, Any]:
    """Give each worker a task, and the next when it is done."""
    waiting, found, failed = list(sent), dict[str, Any](), None
    alone: set[str] = set()  # tasks that have the memory to themselves
    while True:
        if failed is None:
            for worker, name in list(zip((one for one in crew if one.name is None), waiting, strict=False)):
                waiting.remove(name)
                worker.give(name, sent[name])
                alone |= {name} if len(crew) == 1 else set()
        busy = {worker.pipe: worker for worker in crew if worker.name is not None}
        if not busy:
            break
        for pipe in connection.wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            name, end, answer = worker.take()
            if end == "done":
                found[name] = answer
            elif end == "no room" and name not in alone:
                waiting.insert(0, name)
                if len(crew) > 1:
                    log.warning("no memory for %d at a time, from here on %d: %s", len(crew), len(crew) - 1, name)
                    crew.remove(worker)
                    worker.end()  # and its memory is the others'
            elif failed is None:
                failed = RunFailed(name, answer)
            else:
                failed.add_note(f"run {name!r} failed too: {answer.splitlines()[0]}")
            if done is not None:
                done(len(found), len(sent))
    if failed is not None:
        raise failed
    return found


def _pickled(name: str, task: Task) -> bytes:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run {name!r} cannot be sent to another process: {error}; use functions and classes at the top of a "
            "module, partials of them, and plain values"
        ) from error


class _Worker:
    """One process, as its parent sees it."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.name: str | None = None  # of the task that it does
        self.idle = False
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_work, args=(far, _torch_settings()), daemon=True)
        self.process.start()
        far.close()  # so that the pipe ends with the process

    def give(self, name: str, task: bytes) -> None:
        self.name = name
        with suppress(OSError):  # where it is lost, `take` tells so
            self.pipe.send_bytes(task)

    def take(self) -> tuple[str, End, Any]:
        """The name of the task, how it ended, and its result or what went wrong."""
        name, self.name = self.name, None
        assert name is not None
        try:
            end, answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(LEAVE)
            code = self.process.exitcode
            return name, "failed", f"its process ended with exit code {code}" + " (killed)" * (code == -9)
        return name, end, answer

    def dismiss(self) -> None:
        """Tell it that there is no more to do."""
        self.idle = True
        with suppress(OSError):
            self.pipe.send_bytes(b"")

    def end(self) -> None:
        """Wait for it where it has no more to do, and end it whatever it does."""
        self.process.join(LEAVE if self.idle else 0)
        for end in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                end()
                self.process.join(LEAVE)
        self.pipe.close()


# --------------------------------------------------------------------------------------------- in the process


def _work(pipe: Any, settings: Mapping[str, Any]) -> None:
    """Do what comes through the pipe until nothing does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _set_torch(settings)
    while task := _next(pipe):
        try:
            function, args = pickle.loads(task)
            pipe.send(("done", function(*args)))
        except Exception as error:
            said = "".join(traceback.format_exception(error))
            end: End = "no room" if isinstance(error, torch.OutOfMemoryError) else "failed"
            pipe.send((end, f"{type(error).__name__}: {error}\n\n{said}"))


def _next(pipe: Any) -> Any:
    """The next task; nothing where the parent has gone."""
    try:
        return pipe.recv_bytes()
    except EOFError:
        return b""


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and one that trains on keeps the folder locked."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _torch_settings() -> dict[str, Any]:
    """What the numbers of a run depend on: torch's default dtype, and its switches by their names in torch.backends."""
    names = ["cudnn.benchmark", "cudnn.deterministic"]
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # once it was used, the old names may not be
        names += ["cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"]
    else:
        names += ["cuda.matmul.allow_tf32", "cudnn.allow_tf32"]
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "switches": {name: attrgetter(name)(torch.backends) for name in names},
    }


def _set_torch(settings: Mapping[str, Any]) -> None:
    """The same here."""
    torch.set_default_dtype(settings["dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    for name, value in settings["switches"].items():
        owner, _, last = name.rpartition(".")
        if attrgetter(name)(torch.backends) != value:
            setattr(attrgetter(owner)(torch.backends), last, value)
