"""What commands show: progress with the time that is left, tables, numbers to the digits that their errors allow."""

import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from ..results import Estimate
    from ..tables import Table

Report = Callable[[str, float], None]  # (what is being done, part of the whole that is done)
Count = Callable[[str, int, int], None]  # (what, done, total)

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130  # exit statuses; the last as shells have it after Ctrl-C
PLAIN_WIDTH = 100  # of a table that goes to a file or a pipe
_WIDE = 140  # columns from which on there is room for conventions
_QUIET = 30.0  # seconds after which a stage that is still under way says so in a new plain line
_BRIEF = 0.5  # seconds in which stages that follow each other share a line
_SOONEST = 1.0  # seconds before which nothing is said of the time left
_SURE, _LATEST = 0.01, 60.0  # part of the whole that speed is told from, and seconds after which less has to do


def new_console() -> Console:
    """A console as wide as the terminal, or of a fixed width where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


@dataclass
class Clock:
    """How much time is left, by the time that the parts done so far have taken.

    The parts are shares of the expected cost, so the estimate is as good as that. The clock begins once a hundredth is
    done, or after a minute, since the first product also loads, traces and chooses; nothing is said in its
    first second.

    Example:
        >>> now = iter([0.0, 5.0, 6.0, 15.0]).__next__
        >>> clock = Clock(now)
        >>> clock.left(0.0), clock.left(0.1), clock.left(0.105), clock.left(0.3)
        (None, None, None, 35.0)
    """

    now: Callable[[], float] = time.perf_counter
    begun: float = 0.0
    first: float = 0.0  # what was done when it began
    since: float = 0.0  # when anything was done

    def left(self, part: float) -> float | None:
        """Seconds, or None where it is too early to say."""
        at = self.now()
        if self.first <= 0:
            self.since = at
        if self.first <= 0 or part < self.first or (self.first < _SURE and at - self.since < _LATEST):
            self.begun, self.first = at, part
        passed, done = at - self.begun, part - self.first
        if passed < _SOONEST or done <= 0 or (done < _SURE and passed < _LATEST):
            return None
        return passed * (1 - part) / done


def lasting(seconds: float | None) -> str:
    """The time left in words; nothing where it is not known.

    Example:
        >>> lasting(None), lasting(42.4), lasting(600)
        ('', 'about 42 s left', 'about 10 min left')
    """
    if seconds is None:
        return ""
    if seconds < 120:
        return f"about {max(seconds, 1):.0f} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 7200 else f"about {seconds / 3600:.1f} h left"


@contextmanager
def reporting(console: Console, quiet: bool = False) -> Iterator[Report]:
    """Progress as a bar with the time left on a terminal, as a line for each stage elsewhere; or not at all."""
    if quiet and not console.is_terminal:
        yield lambda text, part: None
    elif console.is_terminal:
        with _bar(console) as report:
            yield report
    else:
        yield _Lines()


@contextmanager
def counting(console: Console, quiet: bool = False) -> Iterator[Count]:
    """Progress of several things that are counted: a bar for each on a terminal, plain lines of each elsewhere."""
    if quiet and not console.is_terminal:
        yield lambda what, done, total: None
        return
    if not console.is_terminal:
        lines = defaultdict[str, _Lines](_Lines)
        yield lambda what, done, total: lines[what](f"{total} {what}", min(done / max(total, 1), 1.0))
        return
    with _new_bar(console) as bar:
        tasks: dict[str, tuple[TaskID, Clock]] = {}

        def count(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0, left=""), Clock()
            task, clock = tasks[what]
            part = min(done / max(total, 1), 1.0)
            bar.update(task, completed=part, left=lasting(clock.left(part)))

        yield count


@contextmanager
def _bar(console: Console) -> Iterator[Report]:
    clock = Clock()
    with _new_bar(console) as bar:
        task = bar.add_task("", total=1.0, left="")

        def report(text: str, part: float) -> None:
            bar.update(task, description=text, completed=part, left=lasting(clock.left(part)))

        yield report


def _new_bar(console: Console) -> Progress:
    room = min(34, console.width // 3)  # so that the bar stays where it is, and is not pushed out
    most = max(room, console.width - 46)
    columns = (
        TextColumn(f"{{task.description:<{room}.{most}}}", markup=False), BarColumn(), TaskProgressColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True)


class _Lines:
    """A line for each stage that is not over at once, and one now and then while it lasts."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.clock = now, Clock(now)
        self.seen: set[str] = set()
        self.said = -math.inf

    def __call__(self, text: str, part: float) -> None:
        left, at = lasting(self.clock.left(part)), self.now()
        if at - self.said >= (_QUIET if text in self.seen else 0.0 if part == 0 else _BRIEF):
            self.seen.add(text)
            self.said = at
            known = ", ".join(filter(None, (f"{part:.0%}" if part else "", left)))
            print(f"{text} ({known})" if known else text, flush=True)


@contextmanager
def no_stdout() -> Iterator[None]:
    """What is printed goes to stderr; also by programs that the user's code starts, which know only descriptors."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def quiet_fonts() -> Iterator[None]:
    """Without what matplotlib has to say of fonts that are not installed here."""
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def fitted(part: "Table | str", width: int) -> "Table | str":
    """A table without its conventions where there is little room: they are in the run folder, and readings are not."""
    if isinstance(part, str) or width >= _WIDE or "convention" not in part.header:
        return part
    at = list(part.header).index("convention")

    def cut(cells: Sequence[str]) -> list[str]:
        return [cell for place, cell in enumerate(cells) if place != at]

    numeric = [place - (place > at) for place in part.numeric if place != at]
    return replace(part, header=cut(part.header), rows=[cut(row) for row in part.rows], numeric=numeric)


def complain(command: str, text: str) -> None:
    """One line on stderr: `ritz measure: what is wrong; what to do`."""
    print(f"ritz {command}: {' '.join(text.split())}", file=sys.stderr, flush=True)


def cell(estimate: "Estimate") -> str:
    """A value to the digits its error allows, five at most; an eigenvalue, known from below, with its bound above."""
    value, error, sign = float(estimate.value), float(estimate.stderr), "±"
    if estimate.bracket is not None:
        error, sign = float(estimate.interval()[1]) - value, "+"
    if not error > 0 or not math.isfinite(error):
        open_above = sign == "+" and error == math.inf
        return f"{'≥' * open_above}{value:#.4g}"
    size = math.floor(math.log10(error))
    places = max(-size + (error < 2 * 10.0**size), 0)
    most = max(4 - math.floor(math.log10(max(abs(value), error))), 0)
    if places > most and error < 0.5 * 10.0**-most:
        return f"{value:.{most}f}{sign}{error:.0e}"
    places = min(places, most)
    value = round(value, places) + 0.0  # no minus before a zero
    return f"{value:.{places}f}{sign}{error:.{places}f}"
