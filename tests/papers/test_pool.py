"""Many runs: in turn, side by side or on a cluster they end alike; what was done is not lost, and not done twice."""

import json
import math
import os
import pickle
import platform
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pool_cases as cases
import pytest
import torch

from ritz import locks
from ritz.papers import checkpoints
from ritz.papers.experiment import Setting
from ritz.papers.pool import Finished, train_all
from ritz.switches import matmul_precision, tensor_cores
from ritz.workers import RunFailed, side_by_side

TESTS = Path(cases.__file__).parent


def recipes(num=2, **options):
    return {f"seed-{seed}": cases.recipe(seed, **options) for seed in range(num)}


def numbers(found):
    """All that was logged and found but times and processes."""
    return {
        name: ([{k: v for k, v in row.items() if k != "seconds"} for row in run.rows], run.found.get("sum"))
        for name, run in found.items()
    }


# ------------------------------------------------------------------------------------------------- in turn


def test_a_run_says_what_it_logged_and_found():
    seen = []
    found = train_all(
        recipes(), cases.some_data(), Setting(), item="x", finish=cases.weight_sum, progress=lambda *a: seen.append(a)
    )
    run = found["seed-1"]
    assert (run.name, run.seed, run.stop, run.steps) == ("seed-1", 1, "finished", 24)
    assert run.last("epoch") == cases.EPOCHS
    assert math.isnan(run.last("nothing"))
    assert [step for step, _ in run.curve("test/loss")] == [4, 8, 12, 16, 20, 24]
    assert run.found["sum"] != found["seed-0"].found["sum"]
    assert seen[0] == ("steps, seed-0", 1, 24)
    assert seen[-1] == ("steps, seed-1", 24, 24)


def test_a_run_that_is_kept_is_not_made_twice_and_measured_anew_only_by_another_function(tmp_path):
    setting = Setting(runs=tmp_path)
    run = partial(train_all, recipes(1), cases.some_data(), setting, item="x")
    first = run(finish=cases.weight_sum)["seed-0"]
    kept = tmp_path / "x" / "seed-0" / "found.json"
    written = kept.stat().st_mtime_ns
    assert run(finish=cases.weight_sum)["seed-0"] == first
    assert kept.stat().st_mtime_ns == written
    assert run(finish=partial(cases.weight_sum, scale=2.0))["seed-0"].found["sum"] == 2 * first.found["sum"]
    assert run()["seed-0"] == replace(first, found={})


def test_a_run_that_was_measured_needs_its_weights_no_more(tmp_path):
    """So that what many runs found fits into an e-mail, and goes on elsewhere."""
    run = partial(train_all, recipes(1), cases.some_data(), Setting(runs=tmp_path), item="x")
    first = run(finish=cases.weight_sum)["seed-0"]
    folder = tmp_path / "x" / "seed-0"
    for part in folder.glob("epoch-*"):
        part.unlink()
    assert run(finish=cases.weight_sum)["seed-0"] == first
    assert not list(folder.glob("epoch-*"))  # it was read, and not trained again
    again = run(finish=partial(cases.weight_sum, scale=2.0))  # which needs them
    assert numbers(again)["seed-0"] == (numbers({"seed-0": first})["seed-0"][0], 2 * first.found["sum"])
    assert list(folder.glob("epoch-*"))


def test_a_measured_run_of_another_recipe_or_of_other_data_is_refused(tmp_path):
    setting, how = Setting(runs=tmp_path), {"item": "x", "finish": cases.weight_sum}
    train_all(recipes(1), cases.some_data(), setting, **how)
    with pytest.raises(ValueError, match=r"folder of another run, recipe\.name is .small, 0. there"):
        train_all({"seed-0": cases.recipe(5)}, cases.some_data(), setting, **how)
    other = {name: (x + 1, y) for name, (x, y) in cases.some_data().items()}
    with pytest.raises(ValueError, match="folder of another run, data"):
        train_all(recipes(1), other, setting, **how)
    (tmp_path / "x" / "seed-0" / "run.json").unlink()
    with pytest.raises(ValueError, match=r"run\.json is damaged \(it is not there\)"):
        train_all(recipes(1), cases.some_data(), setting, **how)


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_begun_when_time_is_up_but_what_is_kept_is_read(tmp_path, workers):
    data, made, how = cases.some_data(), recipes(3), {"item": "x", "finish": cases.weight_sum}
    first = train_all({"seed-1": made["seed-1"]}, data, Setting(runs=tmp_path), **how)
    late = Setting(runs=tmp_path, workers=workers, until=0.0)
    assert numbers(train_all(made, data, late, cut=True, **how)) == numbers(first)
    assert (late.left, list(late.recipes)) == (["seed-0", "seed-2"], ["x/seed-1"])
    assert len(train_all(made, data, Setting(until=0.0), **how)) == 3  # nothing is cut that is not told to be


@pytest.mark.usefixtures("forked")
def test_processes_begin_nothing_either_when_time_is_up(monkeypatch):
    monkeypatch.setattr(Setting, "time_is_up", False)  # as it is when they are started
    late = Setting(workers=2, until=0.0)
    assert train_all(recipes(), cases.some_data(), late, item="x", cut=True) == {}
    assert late.left == ["seed-0", "seed-1"]


def test_an_error_names_the_run():
    with pytest.raises(ValueError, match="seed 0 is not liked") as error:
        train_all(recipes(), cases.some_data(), Setting(), item="x", finish=cases.refuse)
    assert error.value.__notes__ == ["in run 'seed-0'"]


def test_what_measures_must_have_a_name_where_it_is_kept(tmp_path):
    with pytest.raises(TypeError, match=r"finish has .*lambda.*no name"):
        train_all(recipes(), cases.some_data(), Setting(runs=tmp_path), item="x", finish=lambda *_: {})
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------- side by side


def test_processes_end_as_one_does_and_read_the_data_once_each():
    seen = []
    wanted = train_all(recipes(4), cases.some_data(), Setting(), item="x", finish=cases.weight_sum)
    with tensor_cores():
        precision = matmul_precision()
        found = train_all(
            recipes(4), cases.some_data(), Setting(workers=2), item="x", finish=cases.weight_sum,
            progress=lambda *a: seen.append(a),
        )  # fmt: skip
    assert list(found) == list(wanted)
    assert numbers(found) == numbers(wanted)
    processes = {run.found["process"] for run in found.values()}
    assert os.getpid() not in processes
    assert 1 <= len(processes) <= 2
    assert len({(run.found["process"], run.found["place"]) for run in found.values()}) == len(processes)
    assert seen == [("runs", done, 4) for done in range(5)]
    assert {tuple(run.found["torch"]) for run in found.values()} == {("torch.float64", 1, precision)}


@pytest.mark.usefixtures("forked")
def test_a_failure_is_told_by_name_when_the_others_are_done(tmp_path):
    """One raises; one is under way, and its process is lost when all but its last word is done; one is not begun."""
    begun, done, never = (tmp_path / name for name in ("begun", "done", "never"))
    tasks = {"bad": (cases.fail, (begun,)), "lost": (cases.vanish, (begun, done)), "never": (Path.touch, (never,))}
    with pytest.raises(RunFailed) as error:
        side_by_side(tasks, workers=2)
    said = {"bad": "ValueError: no good", "lost": "its process ended with exit code 3"}
    first = error.value.name  # "bad", unless this process was held up until both had ended
    assert f"run {first!r} failed: {said.pop(first)}" in str(error.value)
    assert error.value.__notes__ == [f"run {name!r} failed too: {how}" for name, how in said.items()]
    assert ("Traceback" in str(error.value)) == (first == "bad")
    assert done.exists()
    assert not never.exists()
    assert not torch.multiprocessing.active_children()


@pytest.mark.usefixtures("forked")
def test_where_memory_runs_out_fewer_go_on_side_by_side(tmp_path, caplog):
    a, b = tmp_path / "a", tmp_path / "b"
    tasks = {"a": (cases.crowded, (a, b)), "b": (cases.crowded, (b, a)), "c": (os.getpid, ())}
    found = side_by_side(tasks, workers=2)
    assert list(found) == ["a", "b", "c"]
    assert "no memory for 2 at a time, from here on 1" in caplog.text
    assert len(set(found.values())) == 1  # the one that is left does it all
    assert not torch.multiprocessing.active_children()


@pytest.mark.usefixtures("forked")
def test_one_that_runs_out_of_memory_alone_fails(tmp_path):
    other = tmp_path / "other"
    other.touch()
    with pytest.raises(RunFailed, match="run 'a' failed: OutOfMemoryError: two are too many"):
        side_by_side({"a": (cases.crowded, (tmp_path / "a", other))}, workers=2)


@pytest.mark.usefixtures("forked")
def test_the_keyboard_ends_the_workers(tmp_path):
    def interrupt():
        wait_for((tmp_path / "begun").exists)
        os.kill(os.getpid(), signal.SIGINT)

    start = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            side_by_side({"long": (cases.sleep, (tmp_path / "begun",))}, workers=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 100
    assert not torch.multiprocessing.active_children()


def test_what_cannot_be_pickled_is_refused_before_any_work(tmp_path):
    local = replace(cases.recipe(0), model=lambda: torch.nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"run 'local' cannot be sent to another process.*at the top of a module"):
        train_all({"local": local, **recipes(1)}, cases.some_data(), Setting(workers=2), item="x")


def test_recipes_can_be_pickled():
    made = cases.recipe(3, hold="x")
    again = pickle.loads(pickle.dumps(made))
    assert checkpoints.fingerprint(again) == checkpoints.fingerprint(made)


def test_no_runs_need_no_workers():
    assert train_all({}, cases.some_data(), Setting(workers=2), item="x") == {}


SCRIPT = """
import sys
from pathlib import Path
import torch
import pool_cases as cases
from ritz.papers.experiment import Setting
from ritz.papers.pool import train_all

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    recipes = {f"seed-{seed}": cases.recipe(seed, hold=sys.argv[1]) for seed in range(2)}
    setting = Setting(runs=Path(sys.argv[2]), workers=2)
    train_all(recipes, cases.some_data(), setting, item="x", finish=cases.weight_sum)
"""


def test_after_the_parent_is_killed_a_second_call_goes_on(tmp_path):
    script, runs, hold = tmp_path / "parent.py", tmp_path / "runs", tmp_path / "hold"
    script.write_text(SCRIPT, encoding="utf8")
    hold.touch()
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(hold), str(runs)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    folders = [runs / "x" / f"seed-{seed}" for seed in range(2)]
    wait_for(lambda: all((folder / "epoch-000002.json").exists() for folder in folders), parent)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    owners = [json.loads((folder / "lock").read_text(encoding="utf8")) for folder in folders]
    wait_for(lambda: not any(locks.at_work(owner) for owner in owners))  # the workers end by themselves
    hold.unlink()
    finish = {"item": "x", "finish": cases.weight_sum}
    found = train_all(recipes(hold=str(hold)), cases.some_data(), Setting(runs=runs), **finish)
    assert numbers(found) == numbers(train_all(recipes(), cases.some_data(), Setting(), **finish))
    for folder in folders:
        starts = json.loads((folder / "run.json").read_text(encoding="utf8"))["starts"]
        assert [start["epoch"] for start in starts] == [0, 2]
        assert not (folder / "lock").exists()


def wait_for(ready, parent=None):
    """Until it is, or until a minute has gone."""
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        assert parent is None or parent.poll() is None
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------- on a cluster


class Here:
    """A cluster of nothing: pickles a job as one would, and does it when the result is asked for."""

    def __init__(self):
        self.jobs = []

    def submit(self, function, *args):
        self.jobs.append(Job(pickle.dumps((function, args))))
        return self.jobs[-1]


class Job:
    def __init__(self, sent):
        self.sent, self.cancelled = sent, False

    def result(self):
        function, args = pickle.loads(self.sent)
        return function(*args)

    def cancel(self):
        self.cancelled = True


def test_an_executor_is_given_every_run_once(tmp_path):
    executor, seen = Here(), []
    setting = Setting(runs=tmp_path, executor=executor)
    run = partial(train_all, recipes(), cases.some_data(), setting, item="x", finish=cases.weight_sum)
    found = run(progress=lambda *a: seen.append(a))
    assert numbers(found) == numbers(
        train_all(recipes(), cases.some_data(), Setting(), item="x", finish=cases.weight_sum)
    )
    assert len(executor.jobs) == 2
    assert max(len(job.sent) for job in executor.jobs) < 4000  # the data is not among it
    assert seen == [("runs", done, 2) for done in range(3)]
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["seed-0", "seed-1"]
    assert numbers(run()) == numbers(found)
    assert len(executor.jobs) == 2


def test_pythons_own_executors_will_do(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        found = train_all(
            recipes(), cases.some_data(), Setting(runs=tmp_path, executor=executor), item="x", finish=cases.weight_sum
        )
    assert all(isinstance(run, Finished) for run in found.values())


def test_a_job_that_fails_is_told_by_name_when_all_are_done(tmp_path):
    setting = Setting(runs=tmp_path, executor=Here())
    bad = {"bad": replace(cases.recipe(7), batch_size=64, drop_last=True), **recipes(1)}
    with pytest.raises(RunFailed, match="run 'bad' failed: ValueError: 32 samples do not fill one batch") as error:
        train_all(bad, cases.some_data(), setting, item="x", finish=cases.weight_sum)
    assert isinstance(error.value.__cause__, ValueError)
    assert (tmp_path / "x" / "seed-0" / "found.json").exists()


def test_the_keyboard_cancels_the_jobs(tmp_path):
    class Stopped(Here):
        def submit(self, function, *args):
            job = super().submit(function, *args)
            job.result = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
            return job

    executor = Stopped()
    with pytest.raises(KeyboardInterrupt):
        train_all(recipes(), cases.some_data(), Setting(runs=tmp_path, executor=executor), item="x")
    assert [job.cancelled for job in executor.jobs] == [True, True]


def test_a_cluster_needs_a_folder_for_runs():
    with pytest.raises(ValueError, match="a folder that all its machines see: name it by --runs"):
        Setting(executor=Future())


# --------------------------------------------------------------------------------------------------- locks


def locked(path, **owner):
    """A folder of a run with somebody's lock."""
    folder = path / "run"
    folder.mkdir()
    (folder / "lock").write_text(json.dumps({"process": os.getpid(), "machine": platform.node(), "mark": "", **owner}))
    return folder


def open_folder(path):
    return checkpoints.Folder(path, cases.recipe(0), cases.some_data())


@pytest.mark.parametrize("owner", [{"process": 1}, {"machine": "elsewhere"}])
def test_a_folder_in_which_another_process_trains_is_refused(owner, tmp_path):
    folder = locked(tmp_path, **owner)
    who = f"process {owner.get('process', os.getpid())} on {owner.get('machine', platform.node())}"
    with pytest.raises(BlockingIOError, match=rf"{who} is training in .*run; if there is no such .* remove .*lock"):
        open_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_lock_that_says_nothing_yet_is_respected(tmp_path):
    folder = locked(tmp_path)
    (folder / "lock").write_text("")
    with pytest.raises(BlockingIOError, match="another process is training"):
        open_folder(folder)


def test_the_lock_of_a_dead_process_is_taken_over_and_given_back(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    owner = {"process": dead.pid, "machine": platform.node()}
    wait_for(lambda: not locks.at_work(owner))  # a zombie by then
    folder = locked(tmp_path, **owner)
    kept = open_folder(folder)
    assert json.loads((folder / "lock").read_text(encoding="utf8"))["process"] == os.getpid()
    del kept
    assert not (folder / "lock").exists()
    dead.wait()
    assert not locks.at_work(owner)


def test_in_one_process_the_later_one_has_the_lock(tmp_path):
    first = open_folder(tmp_path)
    second = open_folder(tmp_path)
    del first
    assert (tmp_path / "lock").exists()
    second.unlock()
    assert not (tmp_path / "lock").exists()


def test_a_run_leaves_no_lock_whether_it_ends_or_fails(tmp_path):
    setting = Setting(runs=tmp_path)
    train_all(recipes(1), cases.some_data(), setting, item="x")
    assert not list(tmp_path.rglob("lock"))

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_all(recipes(2), cases.some_data(), setting, item="y", progress=stop)
    assert not list(tmp_path.rglob("lock"))
