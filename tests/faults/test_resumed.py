"""Runs with a state of their own: stopped, they go on; done, they are read back; another call is refused."""

import contextlib
import signal
import warnings

import pytest
import torch
from faults import jobs
from torch import nn

import ritz
from ritz import checkpoint
from ritz.checkpoint import Checkpoint
from ritz.errors import StateError, StoppedError
from ritz.estimators.walks import Walks
from ritz.fingerprints import resumable
from ritz.reducers import Concat, Mean

# the report at which it is asked to stop
STOPPED = {"ritz.block_spectra, full": 4, "ritz.solve": 3, "ritz.audit": 5, "ritz.sample_traces": 3}


@pytest.fixture(autouse=True)
def _every_product(monkeypatch):
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)


def stop_at(number):
    """A progress that asks to stop at a report."""
    seen = []

    def progress(*words):
        seen.append(words)
        if len(seen) == number:
            signal.raise_signal(signal.SIGTERM)

    return progress


@pytest.mark.parametrize("job", STOPPED)
def test_what_is_stopped_goes_on_and_what_is_done_is_read_back(job, tmp_path):
    wanted = jobs.bits(jobs.JOBS[job](tmp_path / "alone", lambda *words: None))
    cut = None
    with ritz.stoppable() as came, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a system that is not solved
        with contextlib.suppress(StoppedError):
            cut = jobs.JOBS[job](tmp_path / "run", stop_at(STOPPED[job]))
        assert came() == signal.SIGTERM
    assert cut is None or cut["stop"] == "stopped by SIGTERM"
    seen = []
    assert jobs.bits(jobs.JOBS[job](tmp_path / "run", lambda *words: seen.append(words))) == wanted
    assert jobs.bits(jobs.JOBS[job](tmp_path / "run", lambda *words: pytest.fail("nothing is left to do"))) == wanted
    assert seen


def test_a_solution_that_did_not_converge_says_so_again_when_it_is_read_back(tmp_path):
    A = ritz.GGN(jobs.make_risk()) + 1e-3
    for _ in range(2):
        with pytest.warns(ritz.errors.NumericalWarning, match="1 of 1 systems not solved"):
            found = ritz.solve(A, torch.ones(A.dim), max_steps=5, checkpoint=tmp_path / "state")
        assert (found.num_steps, found.products, found.stop) == (5, 6, "max_steps")


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.3), "label_smoothing is 0.0 there and 0.3 here"),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=2), "ignore_index is -100 there and 2 here"),
        (nn.CrossEntropyLoss(torch.ones(3)), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])), "class_weight is"),
        (nn.MultiMarginLoss(), nn.MultiMarginLoss(margin=2.0), "function.margin is 1.0 there and 2.0 here"),
    ],
)
def test_the_state_of_another_loss_is_refused(one, other, differs, tmp_path):
    model, data = nn.Linear(4, 3), (torch.eye(4), torch.tensor([0, 1, 2, 0]))
    ritz.measure(ritz.Risk(model, one, data), measures=["train_error"], checkpoint=tmp_path / "state")
    with pytest.raises(StateError, match=f"is of another run: .*loss.{differs}"):
        ritz.measure(ritz.Risk(model, other, data), measures=["train_error"], checkpoint=tmp_path / "state")


@pytest.mark.parametrize(
    ("call", "differs"),
    [
        (lambda A, b, state: ritz.solve(A, 2 * b, tol=0.1, checkpoint=state), "settings.b"),
        (lambda A, b, state: ritz.solve(A, b, tol=0.2, checkpoint=state), "settings.tol"),
        (lambda A, b, state: ritz.solve(A, b, tol=0.1, preconditioner=0.5 * A, checkpoint=state), "preconditioner"),
        (lambda A, b, state: ritz.block_spectra(A, num_steps=2, num_probes=1, checkpoint=state), "call"),
    ],
)
def test_the_state_of_another_call_is_refused(call, differs, tmp_path):
    A = ritz.GGN(jobs.make_risk()) + 1.0
    b = torch.ones(A.dim)
    ritz.solve(A, b, tol=0.1, checkpoint=tmp_path / "state")
    with pytest.raises(StateError, match=f"is of another run: .*{differs}"):
        call(A, b, tmp_path / "state")


@pytest.mark.parametrize("reducer", [Mean, Concat])
def test_walks_over_the_data_go_on_from_the_batch_in_hand(reducer, tmp_path):
    """The first of two walks is done, the second is left at its second batch of three."""
    risk, walked = jobs.make_risk(), []

    def sums(params, batch):
        walked.append(batch.index)
        return batch.data[0].sum(1) if reducer is Concat else batch.data[0].sum(), torch.tensor(float(batch.size))

    def twice(kept, progress=None):
        with resumable(kept, risk, "walks", {}) as saved:
            walks = Walks(saved)
            return [walks.fold(risk, sums, reducer(), progress) for _ in range(2)]

    wanted = twice(None)
    walked.clear()
    with ritz.stoppable(), pytest.raises(StoppedError, match="stopped by SIGTERM"):
        twice(Checkpoint(tmp_path / "state"), stop_at(5))
    assert walked == [0, 1, 2, 0, 1]
    found = twice(Checkpoint(tmp_path / "state"))
    assert walked == [0, 1, 2, 0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Restless:
    """The samples in another order on each walk, by a generator of its own."""

    def __init__(self):
        self.turn = 0

    def __iter__(self):
        self.turn += 1
        for place in torch.arange(6.0).roll(self.turn):
            yield place.reshape(1, 1), torch.zeros(1, 1)


def test_a_walk_over_data_in_no_order_counts_each_sample_once_when_it_goes_on(tmp_path):
    model = torch.nn.Linear(1, 1)
    risk = ritz.Risk(model, torch.nn.MSELoss(), Restless(), plan=ritz.Plan(cache=False))

    def walk(progress=None):
        with resumable(Checkpoint(tmp_path / "state"), risk, "walks", {}) as saved:
            sums = Walks(saved).fold(risk, lambda _, batch: (batch.data[0].sum(), torch.tensor(1.0)), Mean(), progress)
            return float(sums)

    with ritz.stoppable(), pytest.raises(StoppedError, match="stopped by SIGTERM"):
        walk(stop_at(3))
    assert walk() == 2.5
