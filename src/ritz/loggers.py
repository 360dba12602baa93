"""Loggers: where the numbers of a run go. A logger is anything with `log(scalars, step)`.

    run = wandb.init(...)                                                       Weights & Biases, Trackio: as it is
    mlflow.log_metrics                                                          MLflow: the function, as it is
    lambda scalars, step: [writer.add_scalar(k, v, step) for k, v in scalars.items()]        TensorBoard's SummaryWriter

Here are those that need no other package: `Memory` and `JSONLines`; `Fanout` is for several at once.
"""

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .nonfinite import WORDS, word
from .reading import content, refuse_irregular
from .tables import Table

_PLACE = "step"  # the entry of a row that says when
_OPENING = b'{"step": '  # of every line


@runtime_checkable
class Logger(Protocol):
    """Whatever takes plain numbers by name at a step of a run.

    Example:
        >>> isinstance(Memory(), Logger)
        True
    """

    def log(self, scalars: dict[str, float], step: int, /) -> Any:
        """Take a row of numbers; what it returns is not looked at."""


Log = Callable[[dict[str, float], int], Any]
LoggerLike = Logger | Log | Iterable[Any]


class Memory:
    """Keeps all rows.

    Attributes:
        rows: One dictionary for each row, the step under "step".

    Example:
        >>> memory = Memory()
        >>> memory.log({"loss": 2.0}, 10)
        >>> memory.log({"loss": 1.5, "damping": 0.1}, 20)
        >>> memory.column("loss"), memory.column("damping")
        (([10, 20], [2.0, 1.5]), ([20], [0.1]))
        >>> print(memory.table().markdown())
        | step | loss | damping |
        | ---: | ---: | ---: |
        | 10 | 2 |  |
        | 20 | 1.5 | 0.1 |
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Keep a row."""
        self.rows.append(_row(scalars, step))

    @property
    def names(self) -> list[str]:
        """Of all scalars, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != _PLACE))

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one scalar, over the rows that have it.

        Raises:
            KeyError: If no row has it.
        """
        rows = [row for row in self.rows if name in row]
        if not rows or name == _PLACE:
            raise KeyError(f"no row has {name!r}; there are {', '.join(self.names) or 'none'}")
        return [int(row[_PLACE]) for row in rows], [row[name] for row in rows]

    def table(self, *names: str) -> Table:
        """All scalars, or those named, one row for each step that has any of them."""
        columns = names or tuple(self.names)
        for name in names:
            self.column(name)
        cells = [
            (str(row[_PLACE]), *(f"{row[name]:.6g}" if name in row else "" for name in columns))
            for row in self.rows
            if any(name in row for name in columns)
        ]
        return Table((_PLACE, *columns), cells, numeric=range(len(columns) + 1))


class JSONLines:
    """Appends each row to a file as one line of JSON, at once: a kill loses at most the line that was being written.

    The file is opened for each line and needs no closing. A torn last line, which a kill may leave, is cut off before
    the next is written, and passed over by `read`. JSON has no NaN and no infinities: they are the strings "NaN",
    "Infinity" and "-Infinity". A run that is resumed from an earlier step writes the steps since then once more.

    Args:
        path: Path of the file; it and its folder are created if they do not exist.

    Raises:
        ValueError: If the file is there and is not such a log.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = JSONLines(folder + "/train.jsonl")
        ...     log.log({"loss": 2.0, "rate": float("inf")}, 10)
        ...     print(log.path.read_text(), read(log.path).rows)
        {"step": 10, "loss": 2.0, "rate": "Infinity"}
         [{'step': 10, 'loss': 2.0, 'rate': inf}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() or self.path.is_symlink():
            refuse_irregular(self.path)
        with self.path.open("ab+") as file:
            _mend(file, self.path)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Append a row."""
        row = {name: word(value) for name, value in _row(scalars, step).items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            start = file.tell()
            if file.write(line) != len(line):  # a full disk takes a piece: the next line must not begin within it
                file.truncate(start)
                raise OSError(errno.ENOSPC, "no room for a line of the log", str(self.path))


class Fanout:
    """Hands each row to several loggers, in order.

    Args:
        *loggers: Whatever `as_logger` takes.

    Example:
        >>> first, second = Memory(), Memory()
        >>> Fanout(first, second).log({"loss": 2.0}, 10)
        >>> first.rows == second.rows == [{"step": 10, "loss": 2.0}]
        True
    """

    def __init__(self, *loggers: LoggerLike) -> None:
        self.loggers = tuple(as_logger(logger) for logger in loggers)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Hand a row on; each gets a copy of its own."""
        for logger in self.loggers:
            logger.log(dict(scalars), step)


class _Function:
    """A plain function as a logger."""

    def __init__(self, function: Log) -> None:
        self.function = function

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.function(dict(scalars), step)


def as_logger(logger: LoggerLike) -> Logger:
    """A logger of a logger, of a function of (scalars, step), or of a list of them.

    Raises:
        TypeError: For anything else; Python's own `logging` among it, whose `log` takes messages.

    Example:
        >>> as_logger(lambda scalars, step: print(step, scalars)).log({"loss": 2.0}, 10)
        10 {'loss': 2.0}
        >>> memory = Memory()
        >>> as_logger(memory) is memory
        True
    """
    if isinstance(logger, logging.Logger | logging.LoggerAdapter):
        raise TypeError(
            "Python's logging takes messages, not numbers; give a function, such as "
            "lambda scalars, step: logger.info('%d %s', step, scalars)"
        )
    if callable(getattr(logger, "log", None)) and not isinstance(logger, type):
        return logger  # type: ignore[return-value]
    if callable(logger) and not isinstance(logger, type):
        return _Function(logger)
    if isinstance(logger, list | tuple):
        return Fanout(*logger)
    made = f"the class {logger.__name__}, not one of its kind" if isinstance(logger, type) else type(logger).__name__
    raise TypeError(
        f"a logger must have a method log(scalars, step), or be a function of these two, or a list of loggers, got "
        f"{made}"
    )


def read(path: str | os.PathLike[str]) -> Memory:
    """The rows of a file that `JSONLines` wrote, as a `Memory`; a torn last line is passed over.

    Raises:
        ValueError: If a line before the last is not a row.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.jsonl"
        ...     _ = path.write_text('{"step": 10, "loss": 2.0}' + chr(10) + '{"step": 20, "lo')
        ...     read(path).rows
        [{'step': 10, 'loss': 2.0}]
    """
    memory, lines = Memory(), content(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        if row is not None:
            memory.rows.append(row)
        elif number < len(lines):  # what comes after the last end of a line is torn, or nothing
            raise ValueError(
                f"line {number} of {path} is not a row of numbers with a step: {_shown(line)}; remove that line"
            )
    return memory


def _row(scalars: Mapping[str, float], step: int) -> dict[str, float]:
    """Plain numbers, the step first."""
    if _PLACE in scalars:
        raise ValueError(f"{_PLACE!r} is reserved for the step: give that scalar another name")
    return {_PLACE: int(step), **{name: float(value) for name, value in scalars.items()}}


def _parsed(line: bytes) -> dict[str, float] | None:
    """A line as a row, or None where it is none."""
    try:
        row = json.loads(line)
        return _row({name: WORDS.get(value, value) for name, value in row.items() if name != _PLACE}, row[_PLACE])
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return None


def _mend(file: Any, path: Path) -> None:
    """Cut off a torn last line of a file open for reading and appending; end it where only its end is missing."""
    file.seek(0)
    text = file.read()
    first, last = text.partition(b"\n")[0], text.rpartition(b"\n")[2]
    if not first.startswith(_OPENING[: len(first)]) or not last.startswith(_OPENING[: len(last)]):
        raise ValueError(f"{path} is not a log of JSON lines, it starts with {_shown(first)}: name another file")
    if last and _parsed(last) is None:
        file.truncate(len(text) - len(last))
    elif last:
        file.write(b"\n")


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= 60 else text[:57] + "...")
