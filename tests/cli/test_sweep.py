"""`ritz compare --workers` and `--slurm`: the numbers of one process; what is done is kept, and not done twice."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults.jobs import bits

import ritz
from ritz import checkpoint, fingerprints, locks, workers
from ritz.checkpoint import Checkpoint
from ritz.cli import main, screen, sweep
from ritz.cli.specs import CompareSpec
from ritz.measures import MEASURES
from ritz.runs import Run

QUICK = ["--num-steps", "8", "--num-probes", "2", "--measures", "trace", "weight_norm", "train_loss"]
FILES = ["--weights", "a.safetensors", "b.safetensors", "c.pt"]
WORDS = ["compare", "study.py:make_risk", *FILES, *QUICK]
RITZ = str(Path(sys.executable).parent / "ritz")


class AutoExecutor:
    """submitit's, as far as it is used: a cluster of nothing, which does a job when its result is asked for."""

    def __init__(self, folder):
        self.jobs, self.folder, self.parameters = [], folder, {}
        AutoExecutor.made = self

    def update_parameters(self, **parameters):
        self.parameters |= parameters

    def submit(self, function, *args):
        self.jobs.append(Job(pickle.dumps((function, args))))
        return self.jobs[-1]


class Job:
    def __init__(self, sent):
        self.sent = sent

    def result(self):
        function, args = pickle.loads(self.sent)
        return pickle.loads(pickle.dumps(function(*args)))


@pytest.fixture
def slurm(monkeypatch):
    """The words that ask for a cluster; there is one in this process."""
    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(AutoExecutor=AutoExecutor))
    yield ["--slurm", "long"]
    sweep._prepared.cache_clear()


def found(folder):
    return bits(ritz.load(Path(folder) / "arrays"))


@pytest.fixture
def wanted(study):
    """What one process finds."""
    assert main([*WORDS, "--out", "one"]) == 0
    return found("one")


# -------------------------------------------------------------------------------------------- side by side


@pytest.mark.usefixtures("forked")
def test_processes_find_the_bits_of_one(wanted, capfd):
    assert main([*WORDS, "--workers", "2", "--out", "two", "--json"]) == 0
    tree = json.loads(capfd.readouterr().out)
    assert tree["result"]["rankings"]["weight_norm"]["order"] == ["a", "b", "c"]
    assert found("two") == wanted
    run = Run.open("two")
    assert {(event["solution"], event["key"]) for event in run.events() if event["event"] == "measure"} == {
        (name, key) for name in "abc" for key in ("trace", "weight_norm", "train_loss")
    }
    assert "workers" not in run.header["settings"]
    assert not (run.folder / "state").exists()


EVERY = """
from ritz import checkpoint, fingerprints

checkpoint.EVERY = 0.0
fingerprints.code = lambda: {}  # of files that may be changed while the tests run
"""


def wait_for(ready):
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def under_way(folder):
    """Whether two processes have begun, and one has taken steps of its run."""
    return len(list(folder.glob("state/*/lock"))) == 2 and any(folder.glob("state/*/Hessian-spectrum*/latest*"))


@pytest.mark.usefixtures("foreground", "forked")
def test_what_is_stopped_and_then_killed_goes_on_in_any_number_of_processes(study, monkeypatch, capfd):
    """The state of each solution is its own, whoever measures it."""
    for name, module in (("EVERY", checkpoint), ("code", fingerprints)):
        monkeypatch.setattr(module, name, getattr(module, name))
    (study / "study.py").write_text("import every\n" + (study / "study.py").read_text())
    (study / "every.py").write_text(EVERY)
    torch.set_default_dtype(torch.float32)  # as other processes have it
    words = ["compare", "study.py:slow", *FILES, "--num-steps", "8", "--num-probes", "2", "--measures", "trace"]
    words += ["--out", "run", "--workers", "2"]

    def interrupt():
        wait_for(lambda: under_way(study / "run"))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert main(words) == screen.INTERRUPTED
    said = capfd.readouterr().err
    assert "the same command with --out run goes on" in said
    assert "Traceback" not in said
    assert Run.open("run").state == "interrupted"

    with subprocess.Popen([RITZ, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        wait_for(lambda: under_way(study / "run") or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    owners = [locks.owner(path) or {} for path in (study / "run").rglob("lock")]
    wait_for(lambda: not any(locks.at_work(owner) for owner in owners))  # the workers end by themselves

    assert main(words[:-2]) == 0
    assert main([*words[:-4], "--out", "alone"]) == 0
    assert found("run") == found("alone")


# ---------------------------------------------------------------------------------------------- on a cluster


def test_every_solution_is_a_job(wanted, slurm):
    assert main([*WORDS, *slurm, "--out", "two"]) == 0
    assert found("two") == wanted
    made = AutoExecutor.made
    assert (len(made.jobs), made.folder, made.parameters["slurm_partition"]) == (3, Path("two/slurm"), "long")
    assert max(len(job.sent) for job in made.jobs) < 4000  # neither the model nor the data is among it


def test_one_that_fails_is_named_and_the_others_are_measured_and_not_measured_again(wanted, slurm, capsys, monkeypatch):
    real = sweep.checked

    def bad(risk):
        if float(risk.space.join(risk.params()).norm()) > 12:
            raise RuntimeError("no such kernel")
        return real(risk)

    monkeypatch.setattr(sweep, "checked", bad)
    assert main([*WORDS, *slurm, "--out", "two"]) == screen.FAILED
    said = capsys.readouterr()
    assert "ritz compare: c failed: RuntimeError: no such kernel; what is known is in two; the same command" in said.err
    assert "a < b" in said.out
    run = Run.open("two")
    assert run.state == "failed"
    assert list(run.results["comparison"].measurements) == ["a", "b"]
    monkeypatch.setattr(sweep, "checked", real)
    assert main([*WORDS, *slurm, "--out", "two"]) == 0
    assert len(AutoExecutor.made.jobs) == 1
    assert found("two") == wanted


def test_where_all_fail_nothing_is_compared_and_every_one_is_named(study, slurm, capsys, monkeypatch):
    def bad(risk):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(sweep, "checked", bad)
    assert main([*WORDS, *slurm, "--out", "two", "--json"]) == screen.FAILED
    said = capsys.readouterr()
    assert all(f"{name} failed: RuntimeError: no such kernel" in said.err for name in "abc")
    tree = json.loads(said.out)
    assert (tree["state"], tree["result"]["rankings"], tree["result"]["solutions"]) == ("failed", {}, {})


def test_a_job_that_is_cut_off_is_named_and_goes_on(wanted, slurm, capsys, monkeypatch):
    real, cut = MEASURES["trace"], []

    def stopped(subject):
        if len(cut) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        cut.append(subject)
        return real.compute(subject)

    monkeypatch.setitem(MEASURES, "trace", replace(real, compute=stopped))
    assert main([*WORDS, *slurm, "--out", "two"]) == screen.FAILED
    assert "ritz compare: b failed: stopped by SIGTERM" in capsys.readouterr().err
    assert main([*WORDS, *slurm, "--out", "two"]) == 0
    assert found("two") == wanted


def test_slurm_without_submitit_and_no_workers_are_refused(study, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main([*WORDS, "--slurm", "long"]) == 2
    assert "--slurm needs submitit, which is not installed: pip install submitit" in capsys.readouterr().err
    assert main([*WORDS, "--workers", "0"]) == 2
    assert "--workers must be at least 1, got 0" in capsys.readouterr().err
    assert not (study / "ritz-runs").exists()


# ----------------------------------------------------------------------------------------------- in a process


def given(study, **data):
    spec = CompareSpec(
        risk="study.py:make_risk", weights=(Path("a.safetensors"), Path("c.pt")), measures=("train_loss", "trace"),
        num_steps=8, num_probes=2,
    )  # fmt: skip
    known = {"study.py:make_risk": sweep.data_of(sweep._prepared(spec, study)[0]), **data}
    return sweep.Given(spec, Path("c.pt"), Checkpoint("state", every=0), known)


def test_where_memory_runs_out_beside_others_the_measure_is_taken_again(study, slurm, monkeypatch):
    real, tries = MEASURES["trace"], []

    def crowded(subject):
        tries.append(subject)
        if len(tries) < 3:
            raise torch.OutOfMemoryError("two are too many")
        return real.compute(subject)

    monkeypatch.setitem(MEASURES, "trace", replace(real, compute=crowded))
    monkeypatch.setattr(workers, "_beside", True)
    with pytest.raises(torch.OutOfMemoryError, match="no memory beside others"):
        sweep.measured_apart(given(study))
    monkeypatch.setattr(workers, "_beside", False)
    by_itself, _ = sweep.measured_apart(replace(given(study), state=Checkpoint("other")))
    assert by_itself.failures["trace"] == "OutOfMemoryError: two are too many"
    again, _ = sweep.measured_apart(given(study))
    assert not again.failures
    assert again["train_loss"] == by_itself["train_loss"]


def test_other_data_in_another_process_is_refused(study, slurm):
    wrong = {"study.py:make_risk": (40, 3.0)}
    with pytest.raises(
        ValueError, match=r"study.py:make_risk gives other data in each process: 40 samples .* seed every"
    ):
        sweep.measured_apart(given(study, **wrong))
