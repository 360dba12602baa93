"""Tasks done elsewhere, their results as they come: by processes side by side on one machine, or as jobs of a cluster.

Python's own pool ends all processes when one is lost, and their work with them. Here the others finish what they do;
when the parent is killed, its workers end themselves. Where memory runs out, there is one process fewer from then on,
and the task is done again.
"""

import logging
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process, resource_tracker
from operator import attrgetter
from typing import Any, Literal

import torch

from . import stopping
from .memory import is_shortage

log = logging.getLogger(__name__)

LEAVE = 10.0  # seconds that a process is given to end
_WATCH = 0.2  # seconds between two looks at whether a job is done, or the work is to stop

Task = tuple[Callable[..., Any], tuple[Any, ...]]  # function and arguments
Done = Callable[[int, int], None]  # (done, total)
Told = Callable[[str, Any], None]  # (name of a task, what it says of itself by `tell`)
Outcomes = Iterator[tuple[str, Any]]  # (name of a task, its result or a RunFailed), as they come
End = Literal["done", "failed", "no room", "told"]


class RunFailed(RuntimeError):
    """A task that another process could not do.

    Attributes:
        name: Name of the task.
        why: What went wrong, in the first line; below it the traceback, where there is one.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"run {name!r} failed: {why}")
        self.name, self.why = name, why


def side_by_side(tasks: Mapping[str, Task], workers: int, done: Done | None = None) -> dict[str, Any]:
    """The results of all tasks by name, in their order, from so many processes; see `as_they_come`.

    Raises:
        TypeError: If a task cannot be pickled, before anything is started.
        RunFailed: If a task raised, or its process was lost; no task is begun after that, and those that were are
            finished first.

    Example:
        >>> side_by_side({"three": (divmod, (7, 2)), "four": (divmod, (9, 2))}, workers=1)
        {'three': (3, 1), 'four': (4, 1)}
    """
    return gathered(as_they_come(tasks, workers, go_on=False), tasks, done)


def gathered(outcomes: Outcomes, names: Collection[str], done: Done | None = None) -> dict[str, Any]:
    """All results by name, once they have come.

    Raises:
        RunFailed: The first failure, with the others as notes, when nothing more comes.
        StoppedError: If the work was stopped before all had come.

    Example:
        >>> gathered(iter([("b", 2), ("a", 1)]), ["a", "b"])
        {'a': 1, 'b': 2}
    """
    found, failed = dict[str, Any](), None
    if done is not None:
        done(0, len(names))
    for name, outcome in outcomes:
        if not isinstance(outcome, RunFailed):
            found[name] = outcome
        elif failed is None:
            failed = outcome
        else:
            failed.add_note(f"run {name!r} failed too: {outcome.why.splitlines()[0]}")
        if done is not None:
            done(len(found), len(names))
    if failed is not None:
        raise failed
    if len(found) < len(names):
        stopping.check()
    return {name: found[name] for name in names}


# ------------------------------------------------------------------------------------------- side by side


def as_they_come(
    tasks: Mapping[str, Task], workers: int, *, told: Told | None = None, threads: int = 1, go_on: bool = True
) -> Outcomes:
    """Each task's name with its result, or with the `RunFailed` that it ended in, from so many processes.

    A process keeps what it has made at the top of a module between tasks; a task and its result are pickled. Workers
    have torch's settings of this process, but for the number of threads. A task that runs out of memory beside others,
    or whose process the system kills, is not lost: it is done again, among fewer. When the work is to stop
    (`ritz.stopping`), nothing more is begun, and what is under way is sent SIGTERM and waited for.

    Args:
        tasks: By name.
        workers: Processes, at most as many as there are tasks.
        told: Called with what a task says of itself by `tell`.
        threads: Number of threads of torch, in each process.
        go_on: Whether tasks are begun after one has failed.

    Raises:
        TypeError: If a task cannot be pickled, before anything is started.
    """
    sent = {name: _pickled(name, task) for name, task in tasks.items()}
    return _from_crew(sent, workers, told, threads, go_on)


def _from_crew(sent: Mapping[str, bytes], workers: int, told: Told | None, threads: int, go_on: bool) -> Outcomes:
    crew = [_Worker(threads) for _ in range(min(workers, len(sent)))]
    try:
        yield from _share(crew, sent, told, threads, go_on)
        for worker in crew:
            worker.dismiss()
    finally:
        for worker in crew:
            worker.end()


def _share(
    crew: list["_Worker"], sent: Mapping[str, bytes], told: Told | None, threads: int, go_on: bool
) -> Outcomes:  # fmt: skip
    """Give each worker a task, and the next when it is done."""
    waiting, more = list(sent), True
    alone: set[str] = set()  # tasks that have the memory to themselves
    while True:
        if stopping.asked():
            more = False
            for worker in crew:
                worker.stop()
        for worker, name in list(zip((one for one in crew if one.name is None), waiting if more else [], strict=False)):
            waiting.remove(name)
            worker.give(name, sent[name], beside=len(crew) > 1)
            alone |= {name} if len(crew) == 1 else set()
        busy = {worker.pipe: worker for worker in crew if worker.name is not None}
        if not busy:
            break
        for pipe in connection.wait(list(busy), _WATCH if stopping.listening() else None):
            worker = busy[pipe]  # type: ignore[index]
            name, end, answer = worker.take()
            if end == "told":
                if told is not None:
                    told(name, answer)
            elif end == "no room" and name not in alone and more:
                waiting.insert(0, name)
                if fewer := len(crew) > 1:
                    log.warning("no memory for %d at a time, from here on %d: %s", len(crew), len(crew) - 1, name)
                _relieve(crew, worker, fewer, threads)
            else:
                more = more and (end == "done" or go_on)
                if more and waiting:
                    _relieve(crew, worker, False, threads)
                yield name, answer if end == "done" else RunFailed(name, answer)


def _relieve(crew: list["_Worker"], worker: "_Worker", fewer: bool, threads: int) -> None:
    """Leave out one of too many, whose memory is the others' then; one that is lost has a successor."""
    if fewer or not worker.process.is_alive():
        crew.remove(worker)
        worker.end()
        crew += [] if fewer else [_Worker(threads)]


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

    def __init__(self, threads: int) -> None:
        context = torch.multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.name: str | None = None  # of the task that it does
        self.idle = self.stopped = False
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_work, args=(far, _torch_settings(threads)), daemon=True)
        with _no_keyboard():
            self.process.start()
        far.close()  # so that the pipe ends with the process

    def give(self, name: str, task: bytes, beside: bool) -> None:
        self.name = name
        with suppress(OSError):  # where it is lost, `take` tells so
            self.pipe.send_bytes(bytes([beside]) + task)

    def take(self) -> tuple[str, End, Any]:
        """The name of the task, how it ended, and its result or what went wrong; or what it says of itself."""
        name = self.name
        assert name is not None
        try:
            end, answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(LEAVE)
            code = self.process.exitcode
            killed = code == -signal.SIGKILL  # by the system, as a rule, where memory runs out
            why = f"its process ended with exit code {code}" + " (killed)" * killed
            end, answer = ("no room" if killed else "failed"), why
        self.name = name if end == "told" else None
        return name, end, answer

    def stop(self) -> None:
        """Let it finish what cannot be cut."""
        if self.name is not None and not self.stopped:
            self.stopped = True
            self.process.terminate()

    def dismiss(self) -> None:
        """Tell it that there is no more to do."""
        self.idle = True
        with suppress(OSError):
            self.pipe.send_bytes(b"")

    def end(self) -> None:
        """Wait for it where it has no more to do, and end it whatever it does."""
        self.process.join(LEAVE if self.idle else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(LEAVE)
        self.pipe.close()


@contextmanager
def _no_keyboard() -> Iterator[None]:
    """Ctrl-C reaches all processes: one that is being started is not to hear it before `_work` sees to that."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which lets signals in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --------------------------------------------------------------------------------------------- in the process

_pipe: Any = None  # to the parent
_beside = False  # whether there are others


def tell(what: Any) -> None:
    """Say something to who has given the task; outside of such a process nobody hears it.

    Example:
        >>> tell("half of it is done")
    """
    if _pipe is not None:
        _pipe.send_bytes(pickle.dumps(("told", what)))


def beside_others() -> bool:
    """Whether this is one of several processes that share the memory.

    Example:
        >>> beside_others()
        False
    """
    return _beside


def _work(pipe: Any, settings: Mapping[str, Any]) -> None:
    """Do what comes through the pipe until nothing does."""
    global _pipe, _beside
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this one
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _set_torch(settings)
    _pipe = pipe
    while task := _next(pipe):
        _beside = bool(task[0])
        try:
            function, args = pickle.loads(task[1:])
            answer = pickle.dumps(("done", function(*args)))
        except Exception as error:
            said = "".join(traceback.format_exception(error))
            end: End = "no room" if is_shortage(error) else "failed"
            answer = pickle.dumps((end, f"{type(error).__name__}: {error}\n\n{said}"))
        pipe.send_bytes(answer)


def _next(pipe: Any) -> Any:
    """The next task; nothing where the parent has gone."""
    try:
        return pipe.recv_bytes()
    except EOFError:
        return b""


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and one that works on keeps the folder locked."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _torch_settings(threads: int) -> dict[str, Any]:
    """What the numbers of a run depend on: torch's default dtype, and its switches by their names in torch.backends."""
    names = ["cudnn.benchmark", "cudnn.deterministic"]
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # once it was used, the old names may not be
        names += ["cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"]
    else:
        names += ["cuda.matmul.allow_tf32", "cudnn.allow_tf32"]
    return {
        "threads": threads,
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "switches": {name: attrgetter(name)(torch.backends) for name in names},
    }


def _set_torch(settings: Mapping[str, Any]) -> None:
    """The same here."""
    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    for name, value in settings["switches"].items():
        owner, _, last = name.rpartition(".")
        if attrgetter(name)(torch.backends) != value:
            setattr(attrgetter(owner)(torch.backends), last, value)


# ----------------------------------------------------------------------------------------------- on a cluster


def submitted(tasks: Mapping[str, Task], executor: Any) -> Outcomes:
    """Each task's name with its result, or with the `RunFailed` that it ended in, from jobs of a cluster.

    Jobs that are not done when the work is to stop (`ritz.stopping`), or when nobody waits any more, are cancelled.

    Args:
        tasks: By name.
        executor: Has `submit(function, *args)`, whose answer has a `result()`, and may have `done()` and `cancel()`:
            one of concurrent.futures, or submitit's.
    """
    jobs = {name: executor.submit(function, *args) for name, (function, args) in tasks.items()}
    try:
        while jobs and not stopping.asked():
            ready = [name for name, job in jobs.items() if getattr(job, "done", lambda: True)()]
            for name in ready:
                outcome = _result(name, jobs[name])
                del jobs[name]
                yield name, outcome
            if not ready:
                time.sleep(_WATCH)
    finally:
        for job in jobs.values():
            getattr(job, "cancel", lambda: None)()


def _result(name: str, job: Any) -> Any:
    """What a job gave, or its failure."""
    try:
        return job.result()
    except Exception as error:
        failed = RunFailed(name, f"{type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed
