"""Tasks done elsewhere: what they say, give, and how they end, as it comes."""

import os
import signal
import time

import pool_cases as cases
import pytest
import torch

import ritz
from ritz import workers
from ritz.errors import StoppedError
from ritz.workers import RunFailed, as_they_come, gathered, submitted


@pytest.mark.usefixtures("forked")
def test_all_but_what_fails_is_done_and_said_as_it_comes(tmp_path):
    """One raises, one ends without a word, one is killed and done again, one tells how far it is."""
    (tmp_path / "begun").touch()
    tasks = {
        "bad": (cases.fail, (tmp_path / "begun",)),
        "lost": (cases.vanish, (tmp_path / "begun", tmp_path / "done")),
        "killed": (cases.killed_once, (tmp_path / "killed",)),
        "told": (cases.says, (3,)),
    }
    said = []
    found = dict(as_they_come(tasks, 2, told=lambda *words: said.append(words), threads=1))
    assert said == [("told", 0), ("told", 1), ("told", 2)]
    assert {name: str(outcome).splitlines()[0] for name, outcome in found.items()} == {
        "bad": "run 'bad' failed: ValueError: no good",
        "lost": "run 'lost' failed: its process ended with exit code 3",
        "killed": "again",
        "told": "3",
    }
    assert not torch.multiprocessing.active_children()


@pytest.mark.usefixtures("forked")
def test_what_is_under_way_when_the_work_is_to_stop_is_waited_for_and_nothing_more_is_begun(tmp_path):
    tasks = {"long": (cases.until_asked, (tmp_path / "begun",)), "never": (cases.says, (1,))}

    def stop(name, what):
        os.kill(os.getpid(), signal.SIGTERM)

    with ritz.stoppable():
        assert dict(as_they_come(tasks, 1, told=stop)) == {"long": "stopped by SIGTERM"}
        with pytest.raises(StoppedError, match="stopped by SIGTERM"):
            gathered(iter([]), tasks)


def test_jobs_come_as_they_are_done_and_are_cancelled_when_the_work_is_to_stop():
    class Job:
        def __init__(self, function, seconds):
            self.ready, self.function, self.cancelled = time.monotonic() + seconds, function, False

        def done(self):
            return time.monotonic() >= self.ready

        def result(self):
            return self.function(2.0)

        def cancel(self):
            self.cancelled = True

    jobs = []

    class Executor:
        def submit(self, function, seconds):
            jobs.append(Job(function, seconds))
            return jobs[-1]

    tasks = {"slow": (abs, (0.3,)), "quick": (abs, (0.0,)), "never": (abs, (1000.0,))}
    with ritz.stoppable():
        coming = submitted(tasks, Executor())
        assert [next(coming), next(coming)] == [("quick", 2.0), ("slow", 2.0)]
        workers.stopping.ask("stopped by the test")
        assert list(coming) == []
    assert [job.cancelled for job in jobs] == [False, False, True]


def test_the_first_failure_is_raised_with_the_others_as_notes():
    outcomes = [("a", RunFailed("a", "first\ntrace")), ("b", 1), ("c", RunFailed("c", "last\ntrace"))]
    with pytest.raises(RunFailed, match="run 'a' failed: first") as error:
        gathered(iter(outcomes), ["a", "b", "c"])
    assert error.value.__notes__ == ["run 'c' failed too: last"]
