"""A run folder as a page."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..loggers import Memory
from ..measures.measure import Measurement
from ..reading import damaged
from ..runs import Run
from ..tables import Table
from .build import build, known_kinds
from .numerals import typeset
from .page import Page

if TYPE_CHECKING:
    from ..doctor import Checkup

_SETTINGS = (
    "command",
    "settings",
    "source",
    "weights",
    "subject",
    "seeds",
    "machine",
    "versions",
    "times",
    "fingerprint",
)


def of_run(folder: str | os.PathLike[str]) -> Page:
    """The page of a run folder: all results in it, its settings, and how the run ended.

    Raises:
        FileNotFoundError: If the folder contains no run.
        ValueError: If the run is of another version, damaged, or has no result.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Run.start(folder, "trace", {"num_probes": 4}) as run:
        ...         run.keep(trace=ritz.Estimate(name="trace", value=3.0, exact=True))
        ...     [section.title for section in of_run(folder).sections]
        ['Overview', 'Settings', 'How to cite']
    """
    run = Run.open(folder)
    try:
        page = _page(run)
    except Exception as error:  # results that were not written by ritz
        damaged(run.folder, error, "run again, into another folder")
    if page is None:
        raise ValueError(f"{run.folder} contains no result yet: wait for the end of the run, or name another folder")
    return page


def _page(run: Run) -> Page | None:
    """The page of all results; None if there is no result yet."""
    results: list[Any] = []
    notes = _state(run.header)
    for name, result in run.results.items():
        if name == "training":
            results.append(_log(result))
        elif name == "checkup" and isinstance(result, Mapping):
            checkup = _checkup(result)
            results += [_typeset(table) for table in checkup.tables()]
            if run.state == "done" or not checkup.healthy:
                notes.append(f"{checkup.verdict[0].upper()}{checkup.verdict[1:]}.")
        elif name == "measurements" and isinstance(result, Mapping):
            results += _measurements(result)
        elif isinstance(result, known_kinds()):
            results.append(result)
        else:
            notes.append(f"{name} is in the folder, but not on this page, because it is a {type(result).__name__}.")
    if not results:
        return None
    settings = {key: run.header[key] for key in _SETTINGS if run.header.get(key)}
    if isinstance(files := settings.get("weights"), list) and all(isinstance(file, Mapping) for file in files):
        settings["weights"] = {file.get("name"): {k: v for k, v in file.items() if k != "name"} for file in files}
    return build(*results, title=_title(run.header), subtitle=_subtitle(run.header), settings=settings, notes=notes)


def _state(header: Mapping[str, Any]) -> list[str]:
    """A note that the run is not complete; empty if it is."""
    if header["state"] == "done":
        return []
    stop = f": {header['stop']}" if header.get("stop") else ""
    return [f"This run is not complete ({header['state']}{stop}). The page shows what was known."]


def _title(header: Mapping[str, Any]) -> str:
    """The command and its subject; empty if the header names none."""
    name = _part(header, "source").get("function") or _part(header, "subject").get("model")
    return f"{str(header['command']).capitalize()}: {name}" if name else ""


def _part(header: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping in the header; empty if the entry is not a mapping."""
    part = header.get(name)
    return part if isinstance(part, Mapping) else {}


def _subtitle(header: Mapping[str, Any]) -> str:
    subject = _part(header, "subject")
    params = subject.get("num_params")
    told = [f"{subject['model']}, {params:,} parameters" if isinstance(params, int) and "model" in subject else ""]
    told += [str(subject.get("convention") or ""), _when(_part(header, "times").get("started"))]
    return "; ".join(part for part in told if part)


def _when(started: Any) -> str:
    """A time for people to read; empty if there is none."""
    try:
        return f"{datetime.fromisoformat(started).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (TypeError, ValueError):
        return ""


def _log(rows: Sequence[Mapping[str, float]]) -> Memory:
    """Rows of a training log."""
    memory = Memory()
    try:
        for row in rows:
            memory.log({name: value for name, value in row.items() if name != "step"}, int(row["step"]))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"its training log must be a list of rows with a step ({error})") from error
    return memory


def _checkup(found: Mapping[str, Any]) -> "Checkup":
    """The findings of `ritz doctor`."""
    from ..doctor import Checkup

    return Checkup.of(dict(found))


def _typeset(table: Table) -> Table:
    return replace(table, rows=[[typeset(cell) for cell in row] for row in table.rows])


def _measurements(found: Mapping[str, Measurement]) -> list[Any]:
    """The results of a comparison that was stopped: one measurement, or a table of several."""
    if len(found) < 2:
        return list(found.values())
    keys = list(dict.fromkeys(key for m in found.values() for key in m))
    rows = [[key, *(typeset(m[key].shown()) if key in m else "" for m in found.values())] for key in keys]
    return [Table(["measure", *found], rows, title="Measured so far", numeric=range(1, len(found) + 1))]
