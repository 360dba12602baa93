"""Time, in turns: on a shared machine a tool is compared with what ran beside it, not with what ran before."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Runs functions in turns and keeps their seconds.

    On a CPU these are of this process on one thread, which others on the machine lengthen least; on a GPU by the wall,
    after all that was asked of it is done.

    Args:
        device: "cpu" or "cuda".
        rounds: Times each function at least three times.
        limit: Seconds after which no further round is begun, three apart.
    """

    def __init__(self, device: str, rounds: int = 5, limit: float = 60.0) -> None:
        self.device, self.rounds, self.limit = device, max(3, rounds), limit

    def now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def once(self, fn: Callable[[], Any]) -> float:
        start = self.now()
        fn()
        return self.now() - start

    def turns(self, arms: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
        """Seconds of each function, a first call apart; one that fails is told of and left out."""
        found: dict[str, dict[str, Any]] = {}
        for name, fn in arms.items():
            found[name] = {"first": 0.0, "seconds": [], "peak": None, "failed": ""}
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                found[name]["first"] = self.once(fn)
                for _ in range(1 if self.device == "cpu" else 3):
                    self.once(fn)  # what is recorded is recorded now
            except Exception as error:  # out of memory, or an operation that a tool does not know
                found[name]["failed"] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
                )
            if self.device == "cuda":
                found[name]["peak"] = torch.cuda.max_memory_allocated()
        start = time.perf_counter()
        for number in range(self.rounds):
            if number >= 3 and time.perf_counter() - start > self.limit:
                break
            for name, fn in arms.items():
                if not found[name]["failed"]:
                    found[name]["seconds"].append(self.once(fn))
        return found


def middle(seconds: list[float], device: str) -> float:
    """The median on a GPU; on a shared CPU the least, which is the work without the neighbours."""
    return min(seconds) if device == "cpu" else statistics.median(seconds)
