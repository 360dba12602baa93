"""kill -9 at random moments and at operations on files: the same call goes on and ends in the same bits."""

import random

import pytest
from faults.trials import killed, names

POINTS = 20  # `make faults` tries more
JOBS = names()


@pytest.mark.parametrize("number", range(POINTS))
def test_a_run_that_is_killed_goes_on_and_ends_in_the_same_bits(number, server, wholes, tmp_path):
    job = JOBS[number % len(JOBS)]
    trial = killed(server, job, wholes[job], tmp_path / "run", random.Random(number))
    assert trial.survived, trial
