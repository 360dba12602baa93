"""What is shown while a command works."""

import io

import pytest
from rich.console import Console

from ritz.cli import screen
from ritz.tables import Table


def clock(*times):
    return iter(times).__next__


def test_the_time_left_is_not_told_by_what_came_before_the_work():
    left = screen.Clock(clock(0.0, 100.0, 102.0, 104.0)).left
    assert [left(part) for part in (0.0, 0.1, 0.2, 0.3)] == pytest.approx([None, None, 16.0, 14.0])  # a tenth takes 2 s


def test_the_first_product_which_also_chooses_a_route_does_not_count():
    for product in (0.01, 0.03):
        left = screen.Clock(clock(0.0, 1.0, 31.0, 32.0, 33.0)).left  # 30 s for it, then 1 s for each other
        told = [left(part) for part in (0.001, 0.001, *(0.001 + product * n for n in (1, 2, 3)))]
        assert told[:3] == [None, None, None]
        assert told[3:] == pytest.approx([(0.999 - product * n) / product for n in (2, 3)])


def test_a_run_of_hours_is_told_of_after_a_minute():
    left = screen.Clock(clock(0.0, 30.0, 61.0, 91.0)).left
    assert [left(part) for part in (0.0001, 0.001, 0.002, 0.003)] == [
        None,
        None,
        None,
        pytest.approx(0.997 * 61 / 0.002),
    ]


def test_a_bar_that_begins_again_begins_its_clock_again():
    left = screen.Clock(clock(0.0, 5.0, 6.0, 8.0)).left
    assert [left(part) for part in (0.5, 0.6, 0.1, 0.2)] == pytest.approx([None, 20.0, None, 16.0])


def test_plain_lines_are_few_and_have_the_time_left(capsys):
    lines = screen._Lines(clock(0, 0, 1, 1, 1.1, 1.1, 4, 4, 5, 5, 40, 40))
    for text, part in (
        ("loading", 0.0),
        ("trace", 0.1),
        ("norm", 0.15),
        ("trace", 0.4),
        ("trace", 0.5),
        ("trace", 0.9),
    ):
        lines(text, part)
    out = capsys.readouterr().out.splitlines()
    assert out == ["loading", "trace (10%)", "trace (90%, about 5 s left)"]


def test_a_terminal_gets_a_bar_and_a_pipe_with_json_nothing(capsys):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    with screen.reporting(terminal) as report:
        report("trace [of H]", 0.5)
    assert "trace [of H]" in terminal.file.getvalue()
    with screen.reporting(Console(file=io.StringIO()), quiet=True) as report:
        report("trace", 0.5)
    assert capsys.readouterr().out == ""


def test_the_part_that_is_done_is_seen_in_a_narrow_terminal():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=40)
    with screen.reporting(terminal) as report:
        report("weight decay 0.0005: spectral_norm of the blocks", 0.42)
    assert "42%" in terminal.file.getvalue()


def test_conventions_leave_a_narrow_table_and_readings_stay():
    table = Table(("measure", "value", "convention", "reading"), [("trace", "1", "sum", "flat")], numeric=(1, 3))
    narrow = screen.fitted(table, 100)
    assert list(narrow.header) == ["measure", "value", "reading"]
    assert [list(row) for row in narrow.rows] == [["trace", "1", "flat"]]
    assert list(narrow.numeric) == [1, 2]
    assert screen.fitted(table, 200) is table
    assert screen.fitted("a sentence", 10) == "a sentence"


def test_a_complaint_is_one_line(capsys):
    screen.complain("measure", "what\nis wrong;  what to do")
    assert capsys.readouterr().err == "ritz measure: what is wrong; what to do\n"


def test_counts_have_a_bar_each_on_a_terminal_and_lines_of_their_own_elsewhere(capsys):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    with screen.counting(terminal) as count:
        for what in ("steps, [a]", "steps, b"):
            count(what, 1, 4)
    for text in ("steps, [a]", "steps, b", "25%"):
        assert text in terminal.file.getvalue()
    with screen.counting(Console(file=io.StringIO())) as count:
        for done in (0, 1, 2):
            count("steps", done, 300)
            count("runs", done, 0)
    assert capsys.readouterr().out.splitlines() == ["300 steps", "0 runs"]
