"""A reader that leaves, as `head` does, or an encoding of few signs ends neither the work nor what it comes to."""

import io
import os
import sys

import pytest

from ritz.cli import main
from ritz.runs import Run

WORDS = ["measure", "study.py:make_risk", "--measures", "weight_norm", "trace", "--num-steps", "4", "--num-probes", "2"]


@pytest.fixture
def unread():
    """A stream into a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as stream:
        yield stream


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_run_whose_output_nobody_reads_is_done(more, study, unread, monkeypatch):
    monkeypatch.setattr(sys, "stdout", unread)
    assert main([*WORDS, *more, "--out", "run"]) == 0
    assert sys.stdout is unread
    run = Run.open("run")
    assert (run.state, run.header["stop"]) == ("done", "completed")
    assert set(run.results["measurement"]) == {"weight_norm", "trace"}


def test_an_error_that_nobody_reads_has_its_status(study, unread, monkeypatch):
    monkeypatch.setattr(sys, "stderr", unread)
    assert main(["measure", "study.py:nothing"]) == 2


def test_the_list_of_experiments_may_be_cut(unread, monkeypatch):
    monkeypatch.setattr(sys, "stdout", unread)
    assert main(["reproduce"]) == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_without_the_signs_of_tables_gets_plain_ones(encoding, study, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    words = ["spectrum", "study.py:make_risk", "--num-steps", "4", "--num-probes", "2", "--out", "run"]
    assert main(words) == 0
    shown = written.getvalue().decode(encoding)
    assert "####" in shown  # the bars of the density
    assert "±" in shown or "+-" in shown
    assert Run.open("run").state == "done"
