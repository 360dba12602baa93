"""A rank that dies, stands still, errs or has too little memory: the others know within the time limit."""

from collections import OrderedDict

import pytest
import torch
from distributed import checks
from torch import nn

pytestmark = pytest.mark.timeout(300)  # of all runs together, made for the first test; 30 s on two idle cores


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", r"rank 1 \(.*process \d+\) died in the midst of the run"),
        ("asleep", r"rank 1 \(.*\) has neither worked nor waited for 4 s"),
        ("frozen", r"rank 1 \(.*\) has given no heartbeat for 4 s"),
    ],
)
def test_a_rank_that_is_lost_is_named_to_the_others_in_time(launch, how, says):
    for kind, text, seconds in launch.results(how):
        assert kind == "RankError"
        with pytest.raises(RuntimeError, match=says):
            raise RuntimeError(text)
        assert seconds < 12


@pytest.mark.parametrize("how", ["killed", "asleep", "frozen"])
def test_who_was_left_behind_ends_as_failed_and_does_not_hang(launch, how):
    launch.results(how)
    assert launch.codes(how) == [1, 1]


def test_ranks_that_wait_for_one_another_are_told_so_and_do_not_hang(launch):
    found = launch.results("knotted")
    assert all(kind == "RankError" for kind, _, _ in found)
    assert any("all ranks wait for one another, and none has got any further" in text for _, text, _ in found)
    assert all(seconds < 20 for *_, seconds in found)
    assert launch.codes("knotted") == [1, 1, 1]


@pytest.fixture
def refused(launch):
    return launch.results("refusals")


def test_an_error_of_one_rank_is_raised_by_all(refused):
    assert [found["error of one"][:2] for found in refused] == [
        ("KeyError", f"'the disk is full' {note}") for note in ("on rank 1", "", "on rank 1")
    ]


def test_the_first_batch_that_is_not_finite_is_named_on_every_rank(refused):
    assert all(found["not finite"][0] == "NonFiniteError" for found in refused)
    assert all("the loss of batch 2 (samples 10 to 14) is nan" in found["not finite"][1] for found in refused)


def test_data_that_is_not_the_same_everywhere_is_refused(refused):
    assert all(found["other data"][0] == "ValueError" for found in refused)
    assert all("the ranks have 20, 21, 22 samples" in found["other data"][1] for found in refused)
    assert all("share=True" in found["other data"][1] for found in refused)


def test_weights_that_are_not_the_same_everywhere_are_refused(refused):
    assert all("rank 1 and rank 0 have different weights, first in 0.weight" in f["other weights"][1] for f in refused)


def test_training_whose_gradients_nobody_averages_is_refused(refused):
    assert all(found["gradients apart"][0] == "ValueError" for found in refused)
    assert all("average the gradients over ranks" in found["gradients apart"][1] for found in refused)


def test_a_group_of_ranks_may_work_without_the_others(refused):
    first, outside, last = refused
    assert first["some"] == last["some"] == pytest.approx(checks.risk().loss(), rel=1e-12)
    assert outside["some ranks"][:2] == (
        "ValueError", "this process is not one of the ranks of the group; make the risk on those that are ",
    )  # fmt: skip


def test_a_rank_may_work_by_itself(refused):
    assert len({found["alone"] for found in refused}) == 3


def test_ranks_that_make_different_calls_are_told_so(refused):
    assert all(found["in other places"][0] == "RankError" for found in refused)
    assert all("rank 0 at a walk for Risk.batch_gradient" in found["in other places"][1] for found in refused)
    assert all("rank 1 at a walk for Risk.total_and_weight" in found["in other places"][1] for found in refused)


def test_ranks_halve_together_when_the_memory_of_one_runs_out(launch):
    found = launch.results("memory")
    risk = checks.risk()
    assert [each["piece"] for each in found] == [2, 2, 2]
    for each in found:
        torch.testing.assert_close(each["gradient"], risk.gradient())
        torch.testing.assert_close(each["rows"], checks.ritz.GGN(risk).rows(torch.ones(2, risk.dim)))
        named = nn.Sequential(OrderedDict(inner=checks.network()))  # probes go by the names of parameters
        own = checks.ritz.Risk(named, nn.CrossEntropyLoss(), checks.samples(), batch_size=5)
        traces = checks.ritz.sample_traces(own, method="probes", num_probes=2)
        torch.testing.assert_close(each["samples"], traces.value, rtol=1e-6, atol=1e-9)
