"""The heartbeat of the ranks of a run: who has died, and who keeps the others waiting.

A thread of each process writes to the store of the process group, every other second, how often it has done so, how
much time of the processor the process has used, and for which sum over ranks the process waits. Who waits reads that of
the others: one whose count stands still is dead or frozen; one that uses no processor and does not wait either, stands
still; where all wait and none gets any further, they wait for one another. No clock is compared with that of another
machine.
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .errors import RankError

_BUSY = 0.02  # of a processor; less is idle
_KEY = "ritz/pulse/{}"


def patience() -> float:
    """Seconds for which a rank may give no sign of life: RITZ_PATIENCE, or 45.

    Example:
        >>> patience() > 0
        True
    """
    return float(os.environ.get("RITZ_PATIENCE", "45"))


@dataclass
class _Seen:
    """What was last seen of a rank, and when it last gave a sign of life."""

    beat: int
    cpu: float
    at: float
    alive: float
    moved: float  # when it last worked, or got to another wait
    wait: int = 0  # the number of the one it is in; 0 for none
    name: str = ""
    silent: bool = False


class Pulse:
    """The heartbeat of this process, and a look at that of others.

    Args:
        store: Store of the process group; a clone of it is used, since another thread may be waiting on the store
            itself.
        rank: Rank of this process, in the default group.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.rank, self.waits_begun, self.waiting = rank, 0, False
        self.interval = min(2.0, patience() / 8)
        copied = getattr(store, "clone", lambda: store)  # older versions of torch have none
        self._beats, self._reads = copied(), copied()
        self._seen: dict[int, _Seen] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ritz-pulse", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _beat(self) -> None:
        count = 0
        name = f"{socket.gethostname()}, process {os.getpid()}"
        while not self._stop.is_set():
            try:
                self._beats.set(_KEY.format(self.rank), f"{count}|{time.process_time():.3f}|{self._wait()}|{name}")
            except Exception:  # the store is gone, and with it those who could read this
                return
            count += 1
            self._stop.wait(self.interval)

    def _wait(self) -> int:
        return self.waits_begun if self.waiting else 0

    def stop(self) -> None:
        """No more heartbeats."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """While this process waits for the others."""
        self.waits_begun, self.waiting, self._seen = self.waits_begun + 1, True, {}
        try:
            yield
        finally:
            self.waiting = False

    @contextlib.contextmanager
    def watches(self, ranks: Sequence[int]) -> Iterator[None]:
        """While collectives of others are under way, FSDP2's, which nobody can leave: who is lost ends this process."""
        if self.waiting:  # and watches already
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ranks, over), name="ritz-watch", daemon=True)
        with self.waits():
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

    def _watch(self, ranks: Sequence[int], over: threading.Event) -> None:
        """Look at the others until it is over; they may wait for this process as long as it works."""
        cpu = time.process_time()
        while not over.wait(self.interval):
            before, cpu = cpu, time.process_time()
            if cpu - before > _BUSY * self.interval:
                for seen in self._seen.values():
                    seen.moved = time.monotonic()
            try:
                self.look(ranks)
            except RankError as error:
                if not over.is_set():
                    sys.stderr.write(f"{type(error).__name__}: {error}\n")
                    _leave()

    def look(self, ranks: Sequence[int]) -> None:
        """Raise if one of the ranks has given no sign of life for too long; to be called again and again."""
        limit = patience()
        for rank in ranks:
            if rank == self.rank:
                continue
            seen = self._read(rank)
            still = time.monotonic() - seen.alive
            if still > limit:
                raise abandoned(
                    f"rank {rank} ({seen.name or 'not heard of'}) has "
                    + (f"given no heartbeat for {still:.0f} s" if seen.silent else f"neither worked nor waited for "
                       f"{still:.0f} s")
                    + ", and the others wait for it; the run is over. Set RITZ_PATIENCE, in seconds, to wait longer"
                )  # fmt: skip
        self._look_for_knots(limit)

    def _look_for_knots(self, limit: float) -> None:
        """Raise if every rank there is waits, and none has got any further for too long."""
        seen = [self._read(rank) for rank in range(dist.get_world_size()) if rank != self.rank]
        still = min((time.monotonic() - one.moved for one in seen), default=0.0)
        if still > limit and all(one.wait for one in seen):
            raise abandoned(
                f"all ranks wait for one another, and none has got any further for {still:.0f} s: they have come "
                "apart. Every rank must make the same calls in the same order, and an error of one that is caught must "
                "be caught on all; for one rank by itself use Risk(..., group='self')"
            )

    def _read(self, rank: int) -> _Seen:
        """Take down what there is to be seen of a rank."""
        now = time.monotonic()
        seen = self._seen.setdefault(rank, _Seen(-1, 0.0, now, now, now))
        beat, cpu, wait, name = self._record(rank)
        seen.silent = beat == seen.beat
        if not seen.silent:
            works = seen.beat < 0 or cpu - seen.cpu > _BUSY * (now - seen.at)
            seen.alive = now if wait or works else seen.alive
            seen.moved = now if works or wait != seen.wait else seen.moved
            seen.beat, seen.cpu, seen.at, seen.wait, seen.name = beat, cpu, now, wait, name
        elif beat < 0:
            seen.alive = now  # it has not begun: the time limit of the process group is for that
        return seen

    def _record(self, rank: int) -> tuple[int, float, int, str]:
        key = _KEY.format(rank)
        try:
            if not self._reads.check([key]):
                return -1, 0.0, 0, ""
            beat, cpu, wait, name = self._reads.get(key).decode().split("|", 3)
        except Exception as error:
            raise abandoned(
                "the store of the process group is gone, and with it the rank or the launcher that held it; most "
                "likely rank 0 has died"
            ) from error
        return int(beat), float(cpu), int(wait), name

    def missing(self, ranks: Sequence[int], error: BaseException) -> RankError:
        """Whose death the error of a collective is about: those whose heartbeat has stopped."""
        others = [rank for rank in ranks if rank != self.rank]
        try:
            first = {rank: self._record(rank) for rank in others}
            time.sleep(3 * self.interval)
            dead = [f"rank {rank} ({first[rank][3]})" for rank in others if self._record(rank)[0] == first[rank][0]]
        except RankError as gone:
            return gone
        who = f"{' and '.join(dead)} died" if dead else "a rank broke off"
        return abandoned(f"{who} in the midst of the run; the run is over ({str(error).splitlines()[0][:160]})")


def abandoned(text: str) -> RankError:
    """The error, and an end of this process that does not wait for a collective that will not come."""
    global _leaving
    if not _leaving:
        _leaving = True
        atexit.register(_leave)
    return RankError(text)


_leaving = False


def _leave() -> None:
    """End now: the process group would be waited for in its destructor, half an hour and more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


_pulse: tuple[Any, Pulse] | None = None


def pulse() -> Pulse:
    """The one of the process group there is; begun when first asked for."""
    global _pulse
    group = dist.group.WORLD
    if _pulse is None or _pulse[0] is not group:
        if _pulse is not None:
            _pulse[1].stop()
        store = dist.distributed_c10d._get_default_store()
        _pulse = group, Pulse(store, dist.get_rank())
    return _pulse[1]
