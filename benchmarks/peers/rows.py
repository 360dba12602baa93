"""Lines of the tables."""

from typing import Any

from . import tools
from .clock import middle

Row = dict[str, Any]
Report = dict[str, list[Row]]


def row_of(suite: str, case: str, tool: str, timed: dict[str, Any], device: str, **more: Any) -> Row:
    """One tool in one case, from what `Clock.turns` tells of it."""
    seconds = middle(timed["seconds"], device) if timed["seconds"] else None
    known = {"first": timed["first"], "peak": timed["peak"], "failed": timed["failed"], "all": timed["seconds"]}
    return {"suite": suite, "case": case, "tool": tool, "seconds": seconds, **known, **more}


def verdict(what: str, target: str, value: float | None, met: bool | None) -> Row:
    """One line of the table of targets; `met` None where it could not be measured."""
    word = "not measured" if value is None or met is None else ("met" if met else "missed")
    return {"what": what, "target": target, "value": value, "verdict": word}


def is_peer(tool: str) -> bool:
    """Whether a line is that of a peer."""
    return tool.partition(" ")[0].strip(",") in tools.PEERS
