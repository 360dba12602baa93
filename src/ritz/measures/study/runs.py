"""A table of runs, read from rows, columns, a CSV file, a data frame or results of `ritz.measure`."""

import csv
import difflib
import fnmatch
import math
import os
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...results import Estimate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


NO_MEASURE = {"gap_loss", "gap_error", "test_loss", "test_error", "seed"}  # targets, and what is not a measure


@dataclass(frozen=True)
class Runs:
    """Columns of equal length.

    Attributes:
        numbers: Columns in which every cell is a number or missing; NaN if missing.
        errors: Standard errors of the numbers; NaN if unknown.
        labels: All columns, also of numbers, as values that can be compared; None if missing.
        refused: Columns that are neither numbers nor labels, with the reason.

    Example:
        >>> runs = read_runs({"lr": [0.1, 0.1, 0.2], "gap": [1.0, 3.0, 5.0]})
        >>> len(runs), runs.averaged(["lr"]).numbers["gap"].tolist()
        (3, [2.0, 5.0])
    """

    numbers: "Mapping[str, Array]"
    errors: "Mapping[str, Array]"
    labels: Mapping[str, tuple[Hashable, ...]]
    refused: Mapping[str, str]

    def __len__(self) -> int:
        return len(next(iter(self.labels.values()), ()))

    def averaged(self, axes: Sequence[str]) -> "Runs":
        """One run for each setting of these axes: the mean over its repeats of the values that are known."""
        groups: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
        for i in range(len(self)):
            groups[tuple(self.labels[name][i] for name in axes)].append(i)
        members = list(groups.values())
        numbers = {name: np.array([_mean(column[m]) for m in members]) for name, column in self.numbers.items()}
        spread = {name: np.array([_joint_error(column[m]) for m in members]) for name, column in self.errors.items()}
        labels = {name: tuple(column[m[0]] for m in members) for name, column in self.labels.items() if name in axes}
        return Runs(numbers, spread, labels, self.refused)


def read_runs(table: Any) -> Runs:
    """The columns of a table.

    Args:
        table: Rows (mappings, results of `ritz.measure`, or objects with a mapping `values`) in a list or by name in a
            dictionary; columns in a dictionary; a data frame; or the path of a CSV file.

    Example:
        >>> runs = read_runs([{"trace": 1.5, "optimizer": "sgd"}, {"trace": None, "optimizer": "adam"}])
        >>> runs.numbers["trace"].tolist(), runs.labels["optimizer"]
        ([1.5, nan], ('sgd', 'adam'))
    """
    columns = _columns(table)
    lengths = {name: len(cells) for name, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"every column must have one value per run, got {lengths}")
    numbers, errors, labels, refused = {}, {}, {}, {}
    for name, cells in columns.items():
        values = [_number(cell) for cell in cells]
        if all(value is not None for value in values):
            numbers[name] = np.array(values, dtype=np.float64)
            errors[name] = np.array([_error(cell) for cell in cells])
            labels[name] = tuple(_label(value) for value in numbers[name].tolist())
            continue
        odd = next(cell for cell, value in zip(cells, values, strict=True) if value is None)
        try:
            labels[name] = tuple(None if cell is None or cell == "" else _plain(cell) for cell in cells)
        except TypeError:
            refused[name] = f"a {type(odd).__name__} is neither one number nor a label"
    return Runs(numbers, errors, labels, refused)


def roles(
    runs: Runs, target: str, axes: str | Sequence[str] | None, measures: str | Sequence[str] | None
) -> tuple[list[str], list[str], dict[str, str]]:
    """(measures, axes, why the other columns are neither).

    Example:
        >>> runs = read_runs({"gap_loss": [0.1, 0.2], "gap_error": [0.0, 0.1], "trace": [1, 2], "lr": [0.1, 0.2]})
        >>> roles(runs, "gap_loss", ["lr"], None)
        (['trace'], ['lr'], {'gap_error': 'not a measure by its name'})
    """
    if len(runs) < 2:
        raise ValueError(f"a study needs at least two runs, got {len(runs)}")
    if target not in runs.numbers:
        what = "is no column of numbers" if target in runs.labels else "is no column of the table"
        raise ValueError(f"target {target!r} {what}; {hint(target, runs.numbers)}")
    if np.isnan(runs.numbers[target]).all():
        raise ValueError(f"target {target!r} has no value in any run")
    if axes is None:
        words = [name for name, cells in runs.labels.items() if name not in runs.numbers and None not in cells]
        settings = [name for name in words if 1 < len(set(runs.labels[name])) < len(runs)]
    else:
        settings = [name for name in named(axes, runs.labels, "axes") if name != target]
    for name in settings:
        if None in runs.labels[name]:
            raise ValueError(f"every run needs a value of axis {name!r}; run {runs.labels[name].index(None)} has none")
    if measures is None:
        chosen, left_out = _all_measures(runs, {target, *settings})
    else:
        chosen = [name for name in named(measures, [*runs.labels, *runs.refused], "measures") if name != target]
        left_out = {name: "not asked for" for name in runs.numbers if name not in {target, *settings, *chosen}}
    for name in chosen:
        if name not in runs.numbers:
            raise ValueError(f"measure {name!r} must be a column of numbers; {hint(name, runs.numbers)}")
    if not chosen:
        raise ValueError(
            f"the table has no measure: no column of numbers besides target, axes and test values in {[*runs.labels]}"
        )
    return chosen, settings, {**runs.refused, **left_out}


def _all_measures(runs: Runs, taken: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Every column that can be a measure, and why the others cannot."""
    chosen, left_out = [], {}
    for name in (name for name in runs.labels if name not in taken):
        if name not in runs.numbers:
            left_out[name] = "text, and not named as an axis"
        elif name in NO_MEASURE:
            left_out[name] = "not a measure by its name"
        elif np.isnan(runs.numbers[name]).all():
            left_out[name] = "no run has a value"
        else:
            chosen.append(name)
    return chosen, left_out


def named(patterns: str | Sequence[str], columns: Collection[str], what: str) -> list[str]:
    """The columns that match names or glob patterns, in the order of the table.

    Example:
        >>> named("hp.*", ["hp.lr", "gap", "hp.width"], "axes")
        ['hp.lr', 'hp.width']
    """
    asked = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in asked:
        if not any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in columns):
            raise ValueError(f"{what}: the table has no column {pattern!r}; {hint(pattern, columns)}")
    return [name for name in columns if any(name == p or fnmatch.fnmatchcase(name, p) for p in asked)]


def hint(name: str, columns: Collection[str]) -> str:
    """Which columns there are, or which one was probably meant."""
    near = difflib.get_close_matches(name, columns, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(columns)}"


def _columns(table: Any) -> dict[str, list[Any]]:
    """The cells of every column."""
    if isinstance(table, str | os.PathLike):
        with Path(table).open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            return _of_rows(list(csv.DictReader(file)))
    if hasattr(table, "to_dict") and hasattr(table, "columns"):  # a data frame of any package
        table = table.to_dict("list")
    if isinstance(table, Mapping):
        if table and all(_as_row(row) is not None for row in table.values()):
            return _of_rows(list(table.values()))
        return {str(name): _cells(name, column) for name, column in table.items()}
    if isinstance(table, Sequence):
        return _of_rows(table)
    raise TypeError(
        f"a table is a list of rows, a dictionary of columns, a data frame or the path of a CSV file, "
        f"got a {type(table).__name__}"
    )


def _of_rows(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Columns from rows, with None for a row that lacks the column."""
    found = []
    for i, row in enumerate(rows):
        mapping = _as_row(row)
        if mapping is None:
            raise TypeError(f"run {i} must be a mapping from names to numbers, got a {type(row).__name__}")
        found.append({str(name): cell for name, cell in mapping.items()})
    names = dict.fromkeys(name for row in found for name in row)
    return {name: [row.get(name) for row in found] for name in names}


def _as_row(row: Any) -> Mapping[str, Any] | None:
    """A row as a mapping; for an object with a mapping `values`, including its other plain attributes."""
    if isinstance(row, Mapping):
        return {**dict.fromkeys(getattr(row, "failures", ())), **row}  # a failed measure is missing, not unknown
    values = getattr(row, "values", None)
    if not isinstance(values, Mapping):
        return None
    plain = {name: cell for name, cell in getattr(row, "__dict__", {}).items() if isinstance(cell, int | float | str)}
    return {**plain, **values}


def _cells(name: object, column: Any) -> list[Any]:
    if isinstance(column, str) or not hasattr(column, "__len__"):
        raise TypeError(f"column {name!r} must hold one value per run, got a {type(column).__name__}")
    return list(column.tolist() if hasattr(column, "tolist") else column)


def _number(cell: Any) -> float | None:
    """A cell as a float, NaN if it is empty; None if it is not a number."""
    if isinstance(cell, Estimate):
        cell = cell.value
    if isinstance(cell, Tensor | np.ndarray):
        if math.prod(cell.shape) != 1:
            return None
        cell = cell.item()
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return math.nan
    if isinstance(cell, bool | np.bool_):
        return None
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def _error(cell: Any) -> float:
    """The standard error of a cell, NaN if it has none."""
    return float(cell.stderr) if isinstance(cell, Estimate) else math.nan


def _label(value: float) -> Hashable:
    """A number as usually written, 8 and not 8.0; None if it is missing."""
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else value


def _plain(cell: Any) -> Hashable:
    """A label: text, a number, a truth value."""
    if isinstance(cell, Estimate | Tensor | np.ndarray | Mapping | list):
        raise TypeError
    return cell if isinstance(cell, str | bool | int | float) else str(cell)


def _mean(values: "Array") -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _joint_error(errors: "Array") -> float:
    """The standard error of a mean over independent runs, from the known errors: their squares add."""
    known = errors[~np.isnan(errors)]
    return float(np.sqrt((known**2).sum()) / len(known)) if len(known) else math.nan
