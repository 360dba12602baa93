"""Time, in turns: on a shared machine a tool is compared with what ran beside it, not with what ran before."""

import contextlib
import gc
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Timed = dict[str, dict[str, Any]]  # of each tool


class OutOfTime(BaseException):  # not an Exception: compilers and libraries catch those and go another way
    """What was waited for is not there in time."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Give up what runs here after so many seconds: between two steps of Python, not within a kernel.

    Raises:
        OutOfTime: When they are over, or if there are none.
    """
    if seconds <= 0:
        raise OutOfTime("out of time before it began")
    outer, start = signal.getitimer(signal.ITIMER_REAL)[0], time.perf_counter()
    if not math.isfinite(seconds) or 0 < outer <= seconds:  # one outside ends sooner
        yield
        return

    def over(*_: Any) -> None:
        raise OutOfTime(f"out of time after {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer - (time.perf_counter() - start)))


def reason(error: BaseException) -> str:
    """What went wrong, in a line."""
    said = str(error).splitlines()
    return str(error) if isinstance(error, OutOfTime) else f"{type(error).__name__}: {said[0][:160] if said else ''}"


class Clock:
    """Runs functions in turns and keeps their seconds.

    On a CPU these are of this process on one thread, which others on the machine lengthen least; on a GPU by the wall,
    after all that was asked of it is done.

    Args:
        device: "cpu" or "cuda".
        rounds: Times each function at least three times.
        limit: Seconds after which no further round is begun, three apart.
        patience: Seconds in which the first calls of a function, compiling included, must be done.
        left: Tells the seconds that the whole run has left; after that nothing is begun.
    """

    def __init__(
        self,
        device: str,
        rounds: int = 5,
        limit: float = 60.0,
        patience: float = math.inf,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.device, self.rounds, self.limit = device, max(3, rounds), limit
        self.patience, self.left = patience, left

    def now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def once(self, fn: Callable[[], Any]) -> float:
        start = self.now()
        fn()
        return self.now() - start

    def turns(self, arms: dict[str, Callable[[], Any]], keep: Callable[[Timed], Any] = lambda found: None) -> Timed:
        """Seconds of each function, a first call apart; one that fails or takes too long is told of and left out.

        Args:
            arms: By name.
            keep: Told what is known whenever there is more, after first calls and after every call of a round.
        """
        found: Timed = {}
        for name, fn in arms.items():
            found[name] = self._begun(fn)
            keep(found)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        start = time.perf_counter()
        for number in range(self.rounds):
            if number >= 3 and time.perf_counter() - start > self.limit:
                break
            for name, fn in arms.items():
                if not found[name]["failed"]:
                    self._again(found[name], fn)
                    keep(found)
        return found

    def _begun(self, fn: Callable[[], Any]) -> dict[str, Any]:
        """The first calls of one function, in which libraries choose, compilers compile and graphs are recorded."""
        one: dict[str, Any] = {
            "first": None,
            "begun": None,
            "seconds": [],
            "peak": None,
            "reserved": None,
            "failed": "",
        }
        free_memory(self.device)
        try:
            start = time.perf_counter()  # by the wall: compilers work in processes of their own
            with at_most(min(self.patience, self.left())):
                one["first"] = self.once(fn)
                for _ in range(1 if self.device == "cpu" else 3):
                    self.once(fn)
            one["begun"] = time.perf_counter() - start
        except (Exception, OutOfTime) as error:  # no time, no memory, or an operation that a tool does not know
            one["failed"] = reason(error)
        if self.device == "cuda":
            one["peak"], one["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return one

    def _again(self, one: dict[str, Any], fn: Callable[[], Any]) -> None:
        """One call more, taken again where memory had to be asked of the device, which the tools before it had."""
        asked = _asked(self.device)
        try:
            with at_most(self.left()):
                seconds = self.once(fn)
                one["seconds"].append(seconds if _asked(self.device) == asked else self.once(fn))
        except (Exception, OutOfTime) as error:
            if len(one["seconds"]) < 3:
                one["failed"] = reason(error)


def _asked(device: str) -> int:
    """How often memory was asked of a GPU."""
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if device == "cuda" else 0


def free_memory(device: str) -> None:
    """What nobody holds any more, given back; peaks are counted from here."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def in_memory(device: str, most: float) -> Iterator[None]:
    """As on a GPU of so many bytes: torch gives back what it keeps at hand, and if that is not enough runs out."""
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / torch.cuda.mem_get_info()[1]))
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def middle(seconds: list[float], device: str) -> float:
    """The median on a GPU; on a shared CPU the least, which is the work without the neighbours."""
    return min(seconds) if device == "cpu" else statistics.median(seconds)
