"""SIGINT and SIGTERM to commands: the product in hand ends, what is known is printed, the same command goes on."""

import json
import signal
import subprocess
import sys

import pytest
from faults import jobs

from ritz import checkpoint
from ritz.cli import main, session
from ritz.runs import Run

WEIGHTS = """
from safetensors.torch import save_file
for name in "ab":
    torch.manual_seed(ord(name))
    save_file(make_risk().model.state_dict(), f"{name}.safetensors")
"""
COMMANDS = {
    "spectrum": ["--num-steps", "10", "--num-probes", "4"],
    "measure": [
        "--measures",
        "train_loss",
        "trace",
        "lambda_max",
        "m_sharpness",
        "--num-steps",
        "6",
        "--num-probes",
        "4",
    ],
    "compare": ["--weights", "a.safetensors", "b.safetensors", "--measures", "trace", "--num-steps", "6"],
}


@pytest.fixture
def study(tmp_path, monkeypatch):
    (tmp_path / "study.py").write_text(jobs.STUDY)
    monkeypatch.chdir(tmp_path)
    exec(jobs.STUDY + WEIGHTS, {})
    return tmp_path


def words(command, out, *more):
    return [command, "study.py:make_risk", *COMMANDS[command], "--out", out, *more]


def stop_at(monkeypatch, text, part, number):
    """A signal when a command has come so far in a stage."""
    real, left = session.Session.report, [number]

    def report(self, told, done):
        if told.endswith(text) and done >= part and left:
            signal.raise_signal(left.pop())
        real(self, told, done)

    monkeypatch.setattr(session.Session, "report", report)


@pytest.mark.parametrize(
    ("command", "text", "part"),
    [
        ("spectrum", "Lanczos run", 0.85),
        ("measure", "trace", 0.2),
        ("compare", "trace", 0.9),
        ("measure", "m_sharpness", 0.0),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("foreground")
def test_a_command_that_is_stopped_prints_what_it_knows_and_goes_on(
    command, text, part, number, study, capfd, monkeypatch
):
    assert main(words(command, "whole")) == 0
    capfd.readouterr()
    with monkeypatch.context() as patch:
        stop_at(patch, text, part, number)
        assert main(words(command, "run", "--json")) == 128 + number
    out, err = capfd.readouterr()
    name = signal.Signals(number).name
    assert f"ritz {command}: stopping after the product in hand; once more stops at once" in err
    assert f"stopped by {name}" in err.splitlines()[-1]
    assert "the same command with --out run goes on" in err.splitlines()[-1]
    tree = json.loads(out)
    assert (tree["state"], tree["stop"][: len(name) + 11]) == ("interrupted", f"stopped by {name}")
    assert tree["result"]
    assert (study / "run" / "state").is_dir()
    assert main(words(command, "run")) == 0
    assert jobs.bits(Run.open("run").results) == jobs.bits(Run.open("whole").results)
    assert not (study / "run" / "state").exists()


def test_a_stop_before_the_first_numbers_shows_the_first_look(study, capfd, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, "Lanczos run", 0.0, signal.SIGTERM)
        assert main(words("spectrum", "run")) == 143
    out, err = capfd.readouterr()
    assert "stopped by SIGTERM at a first look" in err
    assert "lambda_max" in out


@pytest.mark.parametrize("closed", [False, True])
def test_a_command_whose_state_cannot_be_kept_ends_with_2_and_one_line(closed, study, capfd, monkeypatch):
    """Also where the end of the run cannot be written any more."""
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    real, left = checkpoint.save, [3]

    def full(tree, path):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(tree, path)

    def event(self, kind, **fields):
        if kind == "end":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        if closed:
            patch.setattr(Run, "event", event)
        assert main(words("measure", "run")) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("ritz measure: the state of the run cannot be kept in run/state/measurement")
    assert "(No space left on device); what was saved before is as it was" in line
    assert main(words("measure", "run")) == 0


@pytest.mark.usefixtures("foreground")
def test_a_second_signal_ends_the_process_at_once():
    code = "import ritz, signal, time\nwith ritz.stoppable():\n    signal.raise_signal(15)\n    time.sleep({})\n    {}"
    first = subprocess.run([sys.executable, "-c", code.format(0, "print('went on')")], capture_output=True, timeout=60)
    assert first.stdout == b"went on\n"
    second = subprocess.run([sys.executable, "-c", code.format(0, "signal.raise_signal(2)")], timeout=60)
    assert second.returncode == -signal.SIGINT


IGNORED = """
import ritz, signal

def ignored():
    signal.raise_signal(signal.SIGINT)  # ends the process, or raises, where it is not ignored
    return signal.getsignal(signal.SIGINT) == signal.SIG_IGN

said = [ignored()]
with ritz.stoppable() as came:
    said += [ignored(), came()]
    signal.raise_signal(signal.SIGTERM)
    said += [ignored(), came()]
print(*said, ignored())
"""


def test_a_job_in_the_background_goes_on_ignoring_the_keyboard():
    # without job control, as in a script, a shell starts such a job with SIGINT ignored
    words = ["sh", "-c", '"$0" -c "$1" & wait $!', sys.executable, IGNORED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True True 0 True 15 True\n", "")


def test_signals_are_as_before_after_and_other_threads_are_let_be():
    import threading

    import ritz
    from ritz import stopping

    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    with ritz.stoppable():
        assert stopping.listening()
        signal.raise_signal(signal.SIGTERM)
        assert stopping.asked() == "stopped by SIGTERM"
    assert stopping.asked() == ""
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    heard = []

    def inside():
        with ritz.stoppable() as number:
            heard.append((number(), stopping.listening()))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert heard == [(0, False)]
