"""Locks that name their owner: made and taken over in one step, by one process."""

import json
import os
import platform
import subprocess
import sys

import pytest

from ritz.locks import at_work, lock, owner, unlock

RACERS = 6
RACE = """
import os, sys, time
from pathlib import Path
from ritz.locks import lock

path, number = Path(sys.argv[1]), int(sys.argv[2])
start = time.time() + 0.3
for _ in range(number):
    if os.fork() == 0:
        time.sleep(max(0.0, start - time.time()))
        try:
            lock(path, "works in")
            said = "mine"
        except BlockingIOError:
            said = "refused"
        os.write(1, f"{os.getpid()} {said}\\n".encode())
        sys.stdin.read()  # alive until all have tried
        os._exit(0)
for _ in range(number):
    os.wait()
"""


def dead() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("stale", [True, False])
def test_of_many_processes_that_want_a_lock_one_has_it(stale, tmp_path):
    path = tmp_path / "lock"
    if stale:
        path.write_text(json.dumps({"process": dead(), "machine": platform.node(), "mark": "old"}))
    words = [sys.executable, "-c", RACE, str(path), str(RACERS)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as race:
        said = dict(race.stdout.readline().split() for _ in range(RACERS))  # by process
        holder = owner(path)
        race.communicate(timeout=30)
    assert sorted(said.values()) == ["mine", *["refused"] * (RACERS - 1)]
    assert said[str(holder["process"])] == "mine"


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
