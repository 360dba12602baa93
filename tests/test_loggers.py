"""Loggers that need no other package: what is written is what is read, whatever cuts the writing short."""

import json
import logging
import math
import os
import signal
import subprocess
import sys

import pytest
import torch

from ritz.loggers import Fanout, JSONLines, Logger, Memory, as_logger, read

ROWS = [({"loss": 2.0, "rate/max": 0.1}, 10), ({"loss": 1.5}, 20), ({"damping": 1e-300}, 20)]


def filled(logger):
    for scalars, step in ROWS:
        logger.log(scalars, step)
    return logger


# ------------------------------------------------------------------------------------------------------ memory


def test_memory_keeps_rows_in_order_and_columns_over_the_rows_that_have_them():
    memory = filled(Memory())
    assert memory.rows == [{"step": step, **scalars} for scalars, step in ROWS]
    assert memory.names == ["loss", "rate/max", "damping"]
    assert memory.column("loss") == ([10, 20], [2.0, 1.5])
    assert memory.column("damping") == ([20], [1e-300])


def test_a_table_has_the_columns_asked_for_and_the_rows_that_have_any_of_them():
    table = filled(Memory()).table("damping", "rate/max")
    assert table.header == ("step", "damping", "rate/max")
    assert list(table.rows) == [("10", "", "0.1"), ("20", "1e-300", "")]
    assert len(filled(Memory()).table().rows) == 3


def test_a_column_that_no_row_has_is_refused():
    with pytest.raises(KeyError, match="no row has 'accuracy'; there are loss, rate/max, damping"):
        filled(Memory()).column("accuracy")
    with pytest.raises(KeyError, match="no row has 'accuracy'"):
        filled(Memory()).table("loss", "accuracy")
    with pytest.raises(KeyError, match="there are none"):
        Memory().column("loss")


def test_numbers_of_torch_become_plain_ones():
    memory = Memory()
    memory.log({"loss": torch.tensor(2.0), "count": True}, 3)
    assert [type(value) for value in memory.rows[0].values()] == [int, float, float]


@pytest.mark.parametrize("kind", [lambda folder: Memory(), lambda folder: JSONLines(folder / "log.jsonl")])
def test_a_scalar_named_step_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match="'step' is reserved for the step: give that scalar another name"):
        kind(tmp_path).log({"step": 1.0}, 1)


# -------------------------------------------------------------------------------------------------- JSON lines


def test_what_is_written_is_what_is_read(tmp_path):
    path = tmp_path / "runs" / "log.jsonl"  # the folder is made
    filled(JSONLines(path))
    assert read(path).rows == filled(Memory()).rows
    filled(JSONLines(path))  # a second run appends
    assert read(path).rows == filled(filled(Memory())).rows


def test_an_empty_log_has_no_rows(tmp_path):
    assert read(JSONLines(tmp_path / "log.jsonl").path).rows == []


def test_what_is_not_finite_is_written_in_words_that_any_reader_takes(tmp_path):
    log = JSONLines(tmp_path / "log.jsonl")
    log.log({"a": math.nan, "b": math.inf, "c": -math.inf}, 1)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(log.path.read_text(), parse_constant=refuse) == {
        "step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity",
    }  # fmt: skip
    row = read(log.path).rows[0]
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_a_line_torn_anywhere_is_dropped_on_reading_and_cut_off_before_the_next(tmp_path):
    path = tmp_path / "log.jsonl"
    whole = filled(JSONLines(path)).path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1  # of the last line
    for length in range(start, len(whole)):
        path.write_bytes(whole[:length])
        complete = length == len(whole) - 1  # but for the end of the line
        kept = filled(Memory()).rows[: 3 if complete else 2]
        assert read(path).rows == kept
        JSONLines(path).log({"loss": 1.0}, 30)
        assert read(path).rows == [*kept, {"step": 30, "loss": 1.0}]


def test_rows_are_on_disk_when_the_process_is_killed(tmp_path):
    path = tmp_path / "log.jsonl"
    script = (
        "import os, signal, sys\nfrom ritz.loggers import JSONLines\nlog = JSONLines(sys.argv[1])\n"
        "for step in range(5): log.log({'loss': step / 2}, step)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], env={**os.environ}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert read(path).column("loss") == ([0, 1, 2, 3, 4], [0.0, 0.5, 1.0, 1.5, 2.0])


def test_a_disk_that_takes_a_piece_of_a_line_does_not_spoil_the_next(tmp_path):
    resource = pytest.importorskip("resource")
    log = JSONLines(tmp_path / "log.jsonl")
    log.log({"loss": 2.0}, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 9, before[1]))  # bytes of any one file
    try:
        with pytest.raises(OSError, match="no room for a line of the log"):
            log.log({"loss": 1.0}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.log({"loss": 0.5}, 3)
    assert read(log.path).column("loss") == ([1, 3], [2.0, 0.5])


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"loss": 2.0}', '{"step": 1, "loss": "high"}', ""])
def test_a_line_in_the_middle_that_is_no_row_is_refused(line, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n' + line + '\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*log\.jsonl is not a row of numbers with a step"):
        read(path)


def test_a_file_of_something_else_is_not_written_to(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("to do: nothing")
    with pytest.raises(ValueError, match=r"notes\.txt is not a log of JSON lines, it starts with 'to do: nothing'"):
        JSONLines(path)
    assert path.read_text() == "to do: nothing"


# --------------------------------------------------------------------------------------- others, and several


class Run:
    """Takes rows as the run of Weights & Biases does."""

    def __init__(self) -> None:
        self.rows = []

    def log(self, data, step=None, commit=None):
        assert type(data) is dict
        self.rows.append((data, step))


class Writer:
    """Takes numbers as TensorBoard's writer does."""

    def __init__(self) -> None:
        self.rows = []

    def add_scalar(self, tag, value, step):
        self.rows.append((tag, value, step))


def test_the_loggers_of_others_are_taken_as_they_are_or_in_a_line():
    run, writer, metrics = Run(), Writer(), []

    def log_metrics(metrics_given, step=None):  # as MLflow's
        metrics.append((metrics_given, step))

    board = lambda scalars, step: [writer.add_scalar(k, v, step) for k, v in scalars.items()]  # noqa: E731
    filled(as_logger([run, board, log_metrics]))
    assert run.rows == metrics == ROWS
    assert writer.rows == [(name, value, step) for scalars, step in ROWS for name, value in scalars.items()]


def test_several_loggers_get_rows_of_their_own():
    class Spoils:
        def log(self, scalars, step):
            scalars.clear()

    memory = Memory()
    filled(Fanout(Spoils(), memory))
    assert memory.rows == filled(Memory()).rows


def test_a_logger_stays_itself():
    memory = Memory()
    assert as_logger(memory) is memory
    assert isinstance(as_logger(print), Logger)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"a logger must have a method log\(scalars, step\), .* or a list of loggers, got NoneType"),
        ("log.jsonl", "got str"),
        (Writer(), "got Writer"),
        (Memory, "got the class Memory, not one of its kind"),
        ([Memory(), 3], "got int"),
        (logging.getLogger("ritz"), "Python's logging takes messages, not numbers; give a function"),
    ],
)
def test_what_is_no_logger_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        as_logger(given)
