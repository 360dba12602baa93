"""Walks over batches, on a stand-in that has what a walk asks of a risk and nothing else."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

from ritz.batches import Batches
from ritz.comm import SELF
from ritz.memory import NoRoomError
from ritz.reducers import Concat, Mean
from ritz.shortcuts import Shortcuts
from ritz.walks import fold, pieces

VALUES = torch.arange(1.0, 11.0)


def walked(splittable=True, piece=None, batch_size=4):
    """Ten samples in batches of 4, 4 and 2."""
    device = torch.device("cpu")
    return SimpleNamespace(
        world=SELF, device=device, splittable=splittable, _piece=piece, _sharded=None, shortcuts=Shortcuts(),
        batches=Batches((VALUES[:, None], VALUES), batch_size=batch_size, device=device, dtype=None),
        params=lambda: {"scale": torch.tensor(2.0)}, session=contextlib.nullcontext,
    )  # fmt: skip


def scaled(params, batch):
    return params["scale"] * batch.data[1].sum(), torch.tensor(float(batch.size))


def fitting(most, sizes):
    """The values of a batch; memory is there for so many samples."""

    def work(batch):
        sizes.append(batch.size)
        if batch.size > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch.data[1], torch.tensor(float(batch.size))

    return work


def test_a_walk_asks_no_more_of_a_risk_than_it_says():
    assert float(fold(walked(), scaled, Mean())) == 2 * 5.5
    assert walked()._piece is None


def test_progress_counts_batches_and_knows_how_many_only_of_those_given():
    risk, seen = walked(), []
    fold(risk, scaled, Mean(), lambda *told: seen.append(told))
    some = list(risk.batches)[1:]
    assert float(fold(risk, scaled, Mean(), lambda *told: seen.append(told), iter(some))) == 2 * 7.5
    assert seen == [(1, 0), (2, 0), (3, 0), (1, 2), (2, 2)]


def test_a_walk_goes_on_in_the_pieces_that_fitted_and_the_result_is_in_the_order_of_data(caplog):
    risk, sizes = walked(), []
    work = fitting(3, sizes)
    with caplog.at_level(logging.WARNING, "ritz"):
        found = fold(risk, lambda params, batch: work(batch), Concat())
    assert torch.equal(found, VALUES)
    assert sizes == [4, 2, 2, 2, 2, 2]
    assert risk._piece == 2
    assert len(caplog.records) == 1


def test_what_is_held_for_speed_is_let_go_of_before_a_batch_is_cut():
    risk, sizes, held = walked(), [], ["recording"]
    risk.shortcuts.let_go = lambda: bool(held and held.pop())

    def work(batch):  # room for four samples, or for three beside a recording
        return fitting(4 - len(held), sizes)(batch)

    assert torch.equal(fold(risk, lambda params, batch: work(batch), Concat()), VALUES)
    assert sizes == [4, 4, 4, 2]
    assert risk._piece is None


def test_one_sample_that_does_not_fit_is_refused_and_one_at_a_time_is_remembered():
    risk, sizes = walked(), []
    with pytest.raises(NoRoomError, match="one sample at a time does not fit in memory"):
        pieces(risk, fitting(0, sizes), next(iter(risk.batches)))
    assert sizes == [4, 2, 1]
    assert risk._piece == 1


def test_a_batch_that_may_not_be_cut_is_refused_with_what_would_fit():
    risk = walked(splittable=False)
    with pytest.raises(NoRoomError, match="2 would fit: give data in batches of 2"):
        pieces(risk, fitting(2, []), next(iter(risk.batches)))
    assert risk._piece is None


def test_an_error_that_is_no_want_of_memory_passes():
    risk = walked(piece=2)
    with pytest.raises(KeyError, match="lost"):
        fold(risk, lambda params, batch: {}["lost"], Mean())
    assert risk._piece == 2
