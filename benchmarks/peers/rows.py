"""Lines of the tables, and cases that fail without the others."""

import argparse
import contextlib
import logging
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from . import tools
from .clock import Clock, OutOfTime, free_memory, middle, reason

Row = dict[str, Any]
Report = dict[str, list[Row]]


def row_of(suite: str, case: str, tool: str, timed: dict[str, Any], device: str, **more: Any) -> Row:
    """One tool in one case, from what `Clock.turns` tells of it."""
    seconds = middle(timed["seconds"], device) if timed["seconds"] else None
    known = {key: timed.get(key) for key in ("first", "begun", "peak", "reserved", "failed")}
    return {"suite": suite, "case": case, "tool": tool, "seconds": seconds, **known, "all": timed["seconds"], **more}


def verdict(what: str, target: str, value: float | None, met: bool | None) -> Row:
    """One line of the table of targets; `met` None where it could not be measured."""
    word = "not measured" if value is None or met is None else ("met" if met else "missed")
    return {"what": what, "target": target, "value": value, "verdict": word}


def is_peer(tool: str) -> bool:
    """Whether a line is that of a peer."""
    return tool.partition(" ")[0].strip(",") in tools.PEERS


def measured(row: Row) -> bool:
    """Whether a line is to be compared with others; a peer's whether it agrees or not, one of ritz's if it does."""
    return bool(row["seconds"]) and not row["failed"] and (is_peer(row["tool"]) or row.get("agrees", True))


def clock_of(args: argparse.Namespace) -> Clock:
    """The clock of a run, as its settings say."""
    return Clock(args.device, args.rounds, args.limit, args.patience, args.left)


def is_chosen(only: Sequence[str] | None, *case: Any) -> bool:
    """Whether a case, as ("conv", "Hessian", 8), is among those asked for: "conv", "*/GGN", "conv/Hessian/8"."""
    parts = [str(part) for part in case]
    wanted = (pattern.split("/") for pattern in only or ["*"])
    return any(all(map(fnmatchcase, parts, pattern)) for pattern in wanted)


@contextlib.contextmanager
def attempted(args: argparse.Namespace, rows: list[Row], **case: Any) -> Iterator[None]:
    """A case that fails, or for which memory or time does not suffice, is a line that says so; the next one begins."""
    try:
        yield
    except (Exception, OutOfTime) as error:
        rows.append({"suite": args.suite, **case, "tool": "", "seconds": None, "peak": None, "failed": reason(error)})
        print(f"  {' '.join(map(str, case.values()))} failed: {rows[-1]['failed']}", flush=True)
    free_memory(args.device)


def in_time(args: argparse.Namespace) -> None:
    """Whether there is time for another case.

    Raises:
        OutOfTime: If there is none.
    """
    if args.left() <= 0:
        raise OutOfTime("not begun: out of time")


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What ritz logs of compiling meanwhile: why it did not, or how long it took."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ritz.compilation")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
