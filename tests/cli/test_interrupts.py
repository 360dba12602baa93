"""Ctrl-C at moments at which Python drops it."""

import gc
import signal
import subprocess
import sys
import weakref

import pytest

from ritz.cli import main
from ritz.cli.interrupts import check, listening


class Thing:
    """Something that can be referred to weakly."""


def interrupt(*_):
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def heard():
    """SIGINT as a process in the foreground has it; one that runs tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def dropped() -> None:
    """Ctrl-C inside a callback, as importlib has one for each lock."""
    thing = Thing()
    reference = weakref.ref(thing, interrupt)
    del thing
    gc.collect()
    assert reference() is None


def test_a_dropped_interrupt_is_raised_at_the_next_check(heard, capsys):
    def work():
        with listening():
            dropped()
            check()
            pytest.fail("the check has passed")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_command_that_is_done_before_it_is_noticed_is_done(heard, capsys):
    with listening():
        dropped()
    assert capsys.readouterr().err == ""


def test_an_error_that_follows_from_it_is_not_what_is_told(heard):
    def work():
        with listening():
            dropped()
            raise ImportError("half a module")

    with pytest.raises(KeyboardInterrupt):
        work()


def test_other_errors_pass_and_the_handler_is_put_back(heard):
    with pytest.raises(ImportError), listening():
        raise ImportError("no module")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check()


def test_a_handler_of_somebody_else_is_left_alone(heard):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with listening():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupt()
        check()


CODE = """
import signal, sys, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)

class Thing: pass

class Finder:  # stands for a torch that takes its time
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            thing = Thing()
            keep.append(weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT)))
            del thing
            raise ImportError("half of torch")

keep = []
sys.meta_path.insert(0, Finder())
from ritz.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words", [["measure", "study.py:make_risk"], ["demo"], ["report", "run"], ["reproduce", "margins"]]
)
def test_ctrl_c_while_torch_is_loaded_ends_with_130_and_one_line(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "stopped by the keyboard" in line
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_before_a_command_has_begun_is_one_line(heard, capsys, monkeypatch):
    monkeypatch.setattr("ritz.cli._main", interrupt)
    assert main([]) == 130
    assert capsys.readouterr().err.strip() == "ritz: stopped by the keyboard before there was anything to keep"
