"""The suite of first results: does `compile="auto"` make any job longer, and from which length on does compiling pay?

A job is so many Hessian products, eight at a time, of a matrix that was told how many are to come. Nothing is left of
earlier jobs: each has a risk of its own, and compilers a cache that is empty. Jobs are run to their end where that is
soon; of longer ones the first calls are run, in which the choice falls, and the rest is extrapolated from the last
three.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import tools
from .clock import at_most
from .problems import Problem, make
from .rows import Report, Row, attempted, in_time, verdict

LENGTHS = (8, 80, 800, 8_000, 80_000)  # products
AT_ONCE = 8
CALLS = 8  # at least, and as many after a compilation: the second is recorded, three are timed
REPEATS = 5  # of jobs that are soon done
SLOWER = 1.1  # what "auto" may take, in jobs that are not compiled


@dataclass(frozen=True)
class Course:
    """One job: the seconds of its calls, as far as it was run."""

    seconds: list[float]
    compiled: bool
    cut: bool  # before its end

    def total(self, products: int) -> float:
        """Of a job of that length, whether it was run to its end or not."""
        calls, known = -(-products // AT_ONCE), self.seconds
        left = max(0, calls - len(known))
        return sum(known[:calls]) + (left * self.each if left else 0.0)

    @property
    def each(self) -> float:
        """Seconds of a call when all is made that will be."""
        return statistics.median(self.seconds[-3:])

    @property
    def start(self) -> float:
        """Seconds that the first calls took longer."""
        known = self.seconds[:CALLS]
        return sum(known) - len(known) * self.each


def first(args: argparse.Namespace) -> Report:
    """Jobs of several lengths, compiled never, at once, or when "auto" thinks that it pays."""
    rows: list[Row] = []
    verdicts: list[Row] = []
    for name in args.problems:
        with attempted(args, rows, case=name), tools.multiplied(args.precisions[-1]):
            problem = make(name, args.device, num_batches=args.batches, batch_size=args.batch_size)
            V = tools.vectors(problem, AT_ONCE)
            tools.ours(problem, "Hessian", compile=False)(V)  # what the process itself does for the first time
            found = _Jobs(args, problem, V)
            for length in args.lengths:
                with attempted(args, rows, case=name, products=length):
                    in_time(args)
                    found.run(length)
                    rows += found.rows(length)
                    verdicts.append(found.verdict(length))
                args.keep({"rows": rows, "verdicts": verdicts})
            if args.compile or args.device == "cuda":
                with attempted(args, rows, case=name):
                    rows += found.at_once()
    return {"rows": rows, "verdicts": verdicts}


class _Jobs:
    """The jobs of one network."""

    def __init__(self, args: argparse.Namespace, problem: Problem, V: Tensor) -> None:
        self.args, self.problem, self.V = args, problem, V
        self.never: dict[int, list[Course]] = {}
        self.auto: dict[int, list[Course]] = {}

    def run(self, length: int) -> None:
        """Jobs of one length, in turns, again while that is soon done."""
        self.never[length], self.auto[length] = [], []
        known = next((own[0] for own in self.auto.values() if own and own[0].compiled), None)
        plain = next((own[0] for own in self.never.values() if own and own[0].cut), None)
        begin = time.perf_counter()
        while not self.auto[length] or (
            len(self.auto[length]) < REPEATS and time.perf_counter() - begin < self.args.limit
        ):
            # a job longer than one that was cut begins as that did; than one that was compiled, is compiled too
            self.never[length].append(plain or self._course(False, length))
            self.auto[length].append(known or self._course("auto", length))
            if plain and known:
                break

    def _course(self, choice: bool | str, length: int) -> Course:
        own, since = tools.ours(self.problem, "Hessian", compile=choice), 0
        seconds: list[float] = []
        own.operator.expect(length)
        calls, begin = -(-length // AT_ONCE), time.perf_counter()
        with _empty_cache(choice), at_most(min(self.args.patience, self.args.left())):
            while len(seconds) < calls:
                enough = len(seconds) - since >= CALLS
                if enough and time.perf_counter() - begin > self.args.limit:
                    break
                start = _now(self.args.device)
                own(self.V)
                seconds.append(_now(self.args.device) - start)
                if not since and own.way["compiled"]:
                    since = len(seconds)
        return Course(seconds, bool(since), len(seconds) < calls)

    def rows(self, length: int) -> list[Row]:
        return [self._row("compile=False", length, self.never), self._row("compile='auto'", length, self.auto)]

    def _row(self, tool: str, length: int, courses: dict[int, list[Course]]) -> Row:
        own, plain = courses[length], statistics.median(c.total(length) for c in self.never[length])
        total = statistics.median(c.total(length) for c in own)
        return {"suite": "first", "case": self.problem.name, "tool": tool, "products": length, "seconds": total,
                "all": [c.total(length) for c in own], "start": own[0].start, "each": own[0].each / AT_ONCE,
                "compiled": own[0].compiled, "per job as it is": total / plain, "calls": len(own[0].seconds),
                "extrapolated": len(own[0].seconds) * AT_ONCE < length, "failed": "", "peak": None}  # fmt: skip

    def verdict(self, length: int) -> Row:
        times = self._row("", length, self.auto)["per job as it is"]
        images = len(self.problem.batches) * len(self.problem.batches[0][0])
        text = f"{self.problem.name}: {length} products over {images} samples, 'auto' in jobs that are not compiled"
        return verdict(text, f"<= {SLOWER}", times, times <= SLOWER)

    def at_once(self) -> list[Row]:
        """Jobs that are compiled at their first call, by one that was run, and where they take as long as others."""
        longest = max(self.never)
        course = self._course(True, longest)
        rows = [self._row("compile=True", length, {length: [course]}) for length in self.never]
        plain = self.never[longest][0]
        gain = plain.each - course.each
        rows.append({
            "suite": "first", "case": self.problem.name, "tool": "break-even of compile=True", "seconds": None,
            "products": round(course.start / gain * AT_ONCE) if gain > 0 and course.compiled else None, "peak": None,
            "failed": "" if course.compiled else "not compiled, taken as it is", "extrapolated": True,
        })  # fmt: skip
        return rows


@contextlib.contextmanager
def _empty_cache(choice: bool | str) -> Iterator[None]:
    """For what may be compiled, nothing that was compiled before."""
    if choice is False:
        yield
        return
    from torch._inductor.utils import fresh_inductor_cache  # slow to import

    torch._dynamo.reset()
    with fresh_inductor_cache():
        yield


def _now(device: str) -> float:
    """By the wall: compilers work in processes of their own."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
