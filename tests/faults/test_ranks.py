"""Ranks that keep their states together: after any kill they go on from the newest that all of them have."""

import re
from pathlib import Path

import pytest
import torch
from distributed import checks
from distributed.ranks import Launch, Task
from torch import nn

import ritz

MODES = ("locked", "full")
ROOMS = {"forward": (2, 9), "backward": (9, 2)}  # samples that rank 1 has memory for
pytestmark = pytest.mark.timeout(300)  # of all runs together


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    folders = {mode: str(root / mode) for mode in MODES}
    first = [Task(f"torn {mode}", 2, "faults.ranked.torn", (folders[mode], mode), awaited=(0,)) for mode in MODES]
    first += [Task(name, 2, f"faults.ranked.{name}", awaited=(0,)) for name in ("bereft", "frozen")]
    second = [Task(f"resumed {mode}", 2, "faults.ranked.resumed", (folders[mode], mode)) for mode in MODES]
    second += [Task("stopped", 2, "faults.ranked.stopped", (str(Path(root) / "stopped"),))]
    second += [Task(f"squeezed {where}", 2, "faults.ranked.squeezed", room) for where, room in ROOMS.items()]
    second += [Task(name, 2, f"faults.ranked.{name}", (str(root / name),)) for name in ("searched", "broken_off")]
    second += [Task("faulty", 2, "faults.ranked.faulty"), Task("rounded", 2, "faults.ranked.rounded")]
    made = Launch([first, second], env={"RITZ_PATIENCE": "4", "PYTHONSAFEPATH": "1"})
    yield made.wait()
    made.stop()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_which_one_has_not_the_newest_state_go_on_from_the_one_before(mode, launch):
    assert launch.results(f"torn {mode}") == ["RankError"]
    (at, ahead, *bits), (also_at, behind, *also) = launch.results(f"resumed {mode}")
    assert len(ahead) == 2  # the new one, and the one before, which is removed when all have the new one
    assert behind == ahead[:1]
    assert at == also_at
    assert len({*bits, *also}) == 1


def test_a_signal_to_one_rank_stops_all_of_them_at_the_same_step(launch):
    (stop, *bits), (other, *also) = launch.results("stopped")
    assert stop == other
    assert stop.startswith("stopped by SIGTERM after")
    assert len({*bits, *also}) == 1


def test_a_signal_to_one_rank_ends_the_search_of_a_measurement_on_all(launch):
    for stop, failures, again, whole in launch.results("searched"):
        assert stop == "stopped by SIGTERM"
        assert failures == {"worst_case_l2": "stopped by SIGTERM"}
        assert again == whole


def test_a_rank_that_dies_ends_a_measurement_and_not_one_measure(launch):
    (said,) = launch.results("bereft")
    assert re.match(r"rank 1 \(.*\) died in the midst of the run", said)


def test_a_rank_that_is_frozen_within_a_pass_of_a_sharded_model_is_named_and_the_others_end(launch):
    assert launch.codes("frozen") == [1]
    assert re.search(r"RankError: rank 1 \(.*\) has given no heartbeat for 4 s", launch.log("frozen", 0))


def test_a_run_by_differences_that_goes_on_has_the_error_of_its_first_vector(launch):
    for again, whole in launch.results("broken_off"):
        assert again == whole


@pytest.mark.parametrize("where", ROOMS)
def test_ranks_that_share_a_model_halve_together_when_the_memory_of_one_runs_out(where, launch):
    found = launch.results(f"squeezed {where}")
    whole = ritz.Risk(checks.network(width=16), nn.CrossEntropyLoss(), checks.samples())
    v = torch.ones(2, whole.dim)
    for each in found:
        assert each["piece"] == 1  # of nine, five, three in as many pieces on each rank
        assert each["seen"] <= 2
        assert each["kept"]
        assert not each["grads"]
        assert each["loss"] == pytest.approx(whole.loss(), rel=1e-12)
        torch.testing.assert_close(each["gradient"], whole.gradient())
        torch.testing.assert_close(each["ggn"], ritz.GGN(whole).rows(v), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(each["hessian"], ritz.Hessian(whole).rows(v), rtol=1e-6, atol=1e-7)


def test_a_failure_of_one_of_the_ranks_that_share_a_model_is_raised_by_all(launch):
    for found in launch.results("faulty"):
        assert found == "KeyError: 'the disk is full'"


def test_ranks_widen_intervals_as_one_does_where_products_have_few_digits(launch):
    first, second = launch.results("rounded")
    assert first == second
    together, shared, alone = first
    assert alone[0] > 1e-4 * alone[2]
    for found in (together, shared):
        assert found == pytest.approx(alone, rel=1e-2)  # what is off is the last digit of the largest eigenvalue
