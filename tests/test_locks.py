"""Locks that name their owner: made and taken over in one step, by one process."""

import json
import os
import platform
import subprocess
import sys

import pytest

from ritz.locks import at_work, lock, owner, unlock

RACE = """
import sys, time
from pathlib import Path
from ritz.locks import lock

start, path = float(sys.argv[1]), Path(sys.argv[2])
time.sleep(max(0.0, start - time.time()))
try:
    lock(path, "works in")
    print("mine", flush=True)
    sys.stdin.read()  # alive until all have tried
except BlockingIOError:
    print("refused", flush=True)
"""


def dead() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("stale", [True, False])
def test_of_many_processes_that_want_a_lock_one_has_it(stale, tmp_path):
    import time

    path = tmp_path / "lock"
    if stale:
        path.write_text(json.dumps({"process": dead(), "machine": platform.node(), "mark": "old"}))
    words = [sys.executable, "-c", RACE, str(time.time() + 1.0), str(path)]
    racers = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    said = [racer.stdout.readline().strip() for racer in racers]
    holder = owner(path)
    for racer in racers:
        racer.communicate(timeout=30)
    assert sorted(said) == ["mine", *["refused"] * 5]
    assert holder["process"] == racers[said.index("mine")].pid


def test_a_lock_is_that_of_this_process_until_it_is_given_back(tmp_path):
    path = tmp_path / "lock"
    mark = lock(path, "works in")
    assert owner(path) == mark
    unlock(path, {**mark, "mark": "another"})
    assert path.exists()
    unlock(path, mark)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"process": "x", "machine": 3}'])
def test_a_lock_that_says_nothing_is_respected(text, tmp_path):
    (tmp_path / "lock").write_text(text)
    with pytest.raises(
        BlockingIOError, match=r"another process works in .*; if there is no such process any more, remove"
    ):
        lock(tmp_path / "lock", "works in")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_who_is_at_work():
    own = {"process": os.getpid(), "machine": platform.node()}
    assert not at_work(own)  # a run of this process that has ended
    assert at_work({**own, "machine": "elsewhere"})
    assert at_work({**own, "process": os.getppid()})
    assert not at_work({**own, "process": os.getppid(), "began": "0"})  # its number was another's
    assert not at_work({**own, "process": dead()})
