"""A tracker: true numbers at the right steps, a bounded share of the time, and training that does not notice."""

import copy
import inspect
import json
import logging
import math
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ritz
from ritz.doctor import costs
from ritz.errors import NonFiniteError, NumericalWarning, RitzError
from ritz.integrations import track as module
from ritz.integrations.forecast import forecast
from ritz.integrations.track import Tracker, track
from ritz.loggers import JSONLines, Memory, read

CROSS_ENTROPY = nn.CrossEntropyLoss()


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    X, y = torch.randn(24, 3, generator=generator), torch.randint(3, (24,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, X, y


def dense(model, X, y):
    """The Hessian by two passes of autograd, row by row."""
    params = list(model.parameters())
    grads = torch.autograd.grad(CROSS_ENTROPY(model(X), y), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])
    rows = [torch.autograd.grad(g, params, retain_graph=True) for g in flat]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def train(model, X, y, optimizer, steps, after=lambda: None):
    for _ in range(steps):
        optimizer.zero_grad()
        CROSS_ENTROPY(model(X), y).backward()
        optimizer.step()
        after()


class Time:
    """A clock that is set by hand, and a measurement that takes so many seconds of it."""

    def __init__(self, monkeypatch, look=1.0):
        self.now, self.look = 100.0, look
        monkeypatch.setattr(module, "clock", lambda: self.now)
        monkeypatch.setattr(module, "measure", self.measure)
        monkeypatch.setattr(module, "forecast", lambda *args: self.look)

    def measure(self, risk, *args, measures, **kwargs):
        self.now += self.look
        estimate = ritz.Estimate(name="trace", value=1.0, exact=True, products=7)
        return ritz.measures.Measurement(estimates={"trace": estimate})


def risk_of(model, X, y, **keywords):
    return ritz.Risk(model, CROSS_ENTROPY, (X, y), **keywords)


# ---------------------------------------------------------------------------------------------- the numbers


def test_every_look_has_the_eigenvalues_of_the_dense_matrix_at_its_step():
    model, X, y = problem()
    truth = {}
    with track(risk_of(model, X, y), every=3, budget=1.0) as tracker:

        def after():
            if tracker.step() is not None:
                truth[tracker.count] = torch.linalg.eigvalsh(dense(model, X, y))

        train(model, X, y, torch.optim.SGD(model.parameters(), lr=0.5), 10, after)
    assert list(truth) == [3, 6, 9]
    for name, of in (("lambda_max", torch.max), ("lambda_min", torch.min), ("trace", torch.sum)):
        steps, values = tracker.record.column(f"curvature/hessian/{name}")
        assert steps == [3, 6, 9]
        assert values == pytest.approx([float(of(eigenvalues)) for eigenvalues in truth.values()], rel=1e-9)


def test_names_say_which_matrix_a_number_is_of_and_errors_stand_beside_them():
    model, X, y = problem()
    measures = ["trace", "ggn_trace", "ggn_lambda_max", "soft_rank", "weight_norm", "train_loss"]
    tracker = Tracker(risk_of(model, X, y), measures=measures)
    tracker.look()
    assert tracker.names == [
        "curvature/hessian/trace", "curvature/ggn/trace", "curvature/ggn/lambda_max", "curvature/ggn/soft_rank",
        "measures/weight_norm", "measures/train_loss",
    ]  # fmt: skip
    row = tracker.record.rows[0]
    assert all(f"{name}/stderr" in row for name in tracker.names)
    assert row["measures/train_loss"] == pytest.approx(CROSS_ENTROPY(model(X), y).item())
    assert row["track/products"] >= 1


def test_a_sampled_number_has_its_standard_error():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 3))  # 291 weights: not diagonalised in full
    X, y = torch.randn(30, 20), torch.randint(3, (30,))
    tracker = Tracker(risk_of(model, X, y), measures=["trace"])
    found = tracker.look()["trace"]
    row = tracker.record.rows[0]
    assert row["curvature/hessian/trace/stderr"] == found.stderr > 0
    assert abs(float(found.value) - float(dense(model, X, y).trace())) < 6 * found.stderr
    assert "±" in tracker.table().rows[0][1]


def test_an_error_that_is_not_known_is_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 3))
    risk = risk_of(model, torch.randn(30, 20), torch.randint(3, (30,)))
    tracker = Tracker(risk, measures=["trace"], num_probes=1)
    assert math.isnan(tracker.look()["trace"].stderr)
    assert "curvature/hessian/trace/stderr" not in tracker.record.rows[0]


def test_parameter_by_parameter_the_traces_add_up():
    model, X, y = problem()
    tracker = Tracker(risk_of(model, X, y), measures=["trace"], layers=True)
    tracker.look()
    row, matrix = tracker.record.rows[0], dense(model, X, y)
    parts = [row[f"curvature/hessian/trace/{name}"] for name, _ in model.named_parameters()]
    assert parts == pytest.approx([float(part.sum()) for part in matrix.diagonal().split([12, 4, 12, 3])])
    assert sum(parts) == pytest.approx(row["curvature/hessian/trace"])


def test_measures_of_test_data_and_of_the_start_are_taken():
    model, X, y = problem()
    init = copy.deepcopy(model.state_dict())
    train(model, X, y, torch.optim.SGD(model.parameters(), lr=0.5), 3)
    tracker = Tracker(risk_of(model, X, y), measures=["distance", "test_loss"], test=(X, y), init=init)
    tracker.look()
    moved = torch.cat([(p - init[name]).flatten() for name, p in model.named_parameters()]).norm()
    assert tracker.record.rows[0]["measures/distance"] == pytest.approx(float(moved.detach()))


def test_a_measure_of_ones_own_is_among_them():
    mine = ritz.measures.Measure(
        key="sixth", formula="", convention="", source="", family="norms", cost="weights", reading="",
        compute=lambda s: ritz.Estimate(name="sixth", value=6.0, exact=True),
    )  # fmt: skip
    tracker = Tracker(risk_of(*problem()), measures=["weight_norm", mine])
    tracker.look()
    assert tracker.record.column("measures/sixth") == ([0], [6.0])


# ------------------------------------------------------------------------------------------------- training


def noisy():
    """A network with all that a look could disturb: masks, batch statistics, its own generator."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "kfac": lambda model: ritz.optim.KFAC(model, lr=0.05, damping=0.1, factor_every=1, inverse_every=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same_to_the_bit_with_and_without_a_tracker(name):
    _, X, y = problem()
    ends = []
    for watched in (True, False):
        model = noisy()
        optimizer = OPTIMIZERS[name](model)
        tracker = track(risk_of(model, X, y), every=2, budget=1.0)
        train(model, X, y, optimizer, 6, tracker.step if watched else lambda: None)
        grads = [p.grad for p in model.parameters()]
        modes = [m.training for m in model.modules()]
        ends.append((list(model.state_dict().values()), grads, modes, torch.rand(3)))
        assert len(tracker.record.rows) == (3 if watched else 0)
    for one, other in zip(ends[0], ends[1], strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def test_the_weights_of_the_run_are_not_kept():
    model, X, y = problem()
    tracker = Tracker(risk_of(model, X, y), measures=["trace"])
    tracker.look()
    assert not [value for value in vars(tracker).values() if isinstance(value, torch.Tensor)]


# --------------------------------------------------------------------------------------------- share of time


def test_looks_that_would_go_over_the_budget_are_left_out_and_counted(monkeypatch, caplog):
    time = Time(monkeypatch, look=2.0)
    caplog.set_level(logging.INFO, "ritz.integrations.track")
    with track(risk_of(*problem()), every=10, measures=["trace"], budget=0.1) as tracker:
        for _ in range(100):
            time.now += 0.5
            tracker.step()
    # with what it takes, a look of 2 s is a tenth of the time after 18 s, the second after 36 s of training
    assert tracker.record.column("curvature/hessian/trace")[0] == [40, 80]
    assert tracker.skipped == 8
    assert tracker.record.rows[1]["track/skipped"] == 6
    assert tracker.share <= 0.1
    assert "8 more were due and left out: with about 2 s each" in str(tracker.table().notes)
    assert "no look at step 20" in caplog.text


@settings(deadline=None, max_examples=30)
@given(
    budget=st.floats(0.01, 1.0), look=st.floats(0.01, 50), step=st.floats(0.001, 5), every=st.integers(1, 7),
)  # fmt: skip
def test_the_share_is_within_the_budget_after_every_look(budget, look, step, every):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # where no look was within it
        time = Time(patch, look)
        with track(risk_of(*problem()), every, measures=["trace"], budget=budget) as tracker:
            for _ in range(60):
                time.now += step
                tracker.step()
        for row in tracker.record.rows:
            assert row["track/share"] <= budget * (1 + 1e-9)
        assert len(tracker.record.rows) + tracker.skipped == 60 // every
        if budget == 1.0:
            assert tracker.skipped == 0


def test_a_look_that_is_asked_for_is_made_whatever_it_costs_and_counts(monkeypatch):
    time = Time(monkeypatch, look=5.0)
    with track(risk_of(*problem()), every=1, measures=["trace"], budget=0.05) as tracker:
        time.now += 1.0
        tracker.look()
        tracker.look()
        time.now += 89.0
        assert tracker.step() is None
        assert tracker.spent == 10.0
        assert tracker.elapsed == 100.0


def test_time_outside_the_loop_does_not_count(monkeypatch):
    time = Time(monkeypatch)
    tracker = track(risk_of(*problem()), measures=["trace"])
    for _ in range(2):
        with tracker:
            time.now += 3.0
        time.now += 1000.0
    assert tracker.elapsed == 6.0


def test_the_clock_of_a_tracker_without_with_starts_at_the_first_step(monkeypatch):
    time = Time(monkeypatch, look=1.0)
    tracker = track(risk_of(*problem()), every=2, measures=["trace"], budget=0.5)
    time.now += 1000.0
    tracker.step()
    time.now += 3.0
    tracker.step()
    assert (tracker.elapsed, tracker.share) == (4.0, 0.25)


def test_what_no_budget_allows_is_said_when_training_ends(monkeypatch):
    time = Time(monkeypatch, look=100.0)
    tracker = track(risk_of(*problem()), every=2, measures=["trace"]).start()
    for _ in range(6):
        time.now += 1.0
        tracker.step()
    with pytest.warns(NumericalWarning, match="there was no look: 3 looks were due and left out: with about 100 s"):
        tracker.stop()
    assert (tracker.record.rows, tracker.spent) == ([], 0.0)


def test_a_forecast_counts_and_is_made_once(monkeypatch):
    time, asked = Time(monkeypatch, look=1.0), []

    def slow(risk, rows, num_steps, num_probes):
        asked.append((len(rows), num_steps, num_probes))
        time.now += 2.0
        return 1.0

    monkeypatch.setattr(module, "forecast", slow)
    with track(risk_of(*problem()), every=1, measures=["trace"], budget=0.2, num_steps=7) as tracker:
        for _ in range(12):
            time.now += 1.0
            tracker.step()
    assert asked == [(1, 7, 4)]
    assert tracker.record.column("track/share")[0] == [12]  # 3 of 15 s
    assert tracker.share == pytest.approx(0.2)


@pytest.mark.parametrize("keys", [["trace"], ["trace", "ggn_lambda_max"], ["epsilon_sharpness"]])
def test_a_forecast_is_of_the_size_of_the_look(keys, monkeypatch):
    monkeypatch.setattr(costs, "clock", time.process_time)  # on a busy machine
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))
    X, y = torch.randn(400, 20), torch.randint(3, (400,))
    risk = ritz.Risk(model, CROSS_ENTROPY, [(X[:200], y[:200]), (X[200:], y[200:])])
    rows = ritz.measures.registry.resolve(keys)
    ritz.measure(risk, measures=keys, num_steps=10, num_probes=4)  # what is done once only
    begin = time.process_time()
    ritz.measure(risk, measures=keys, num_steps=10, num_probes=4)
    truth = time.process_time() - begin
    assert truth / 10 < forecast(risk, rows, 10, 4) + 0.01 < 10 * truth + 0.02


def test_what_is_said_of_forecasts_is_what_was_measured():
    root = Path(__file__).parent.parent.parent
    report = json.loads((root / "benchmarks" / "results" / "forecast.json").read_text(encoding="utf8"))
    for text in (track.__doc__, (root / "docs" / "integrations.md").read_text(encoding="utf8")):
        for searched in (False, True):
            rows = [row for row in report["rows"] if (row["measures"] == "search") == searched]
            ratios = [ratio for row in rows for ratio in row["ratios"]]
            assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in " ".join(text.split())


def test_the_arguments_of_track_are_those_of_the_tracker():
    made, given = inspect.signature(Tracker), inspect.signature(track)
    assert made.parameters == given.parameters


def test_a_forecast_walks_one_batch_however_many_there_are():
    model, X, y = problem()
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(args[0].shape[-2]))
    batches = [(X[:5], y[:5]), (X[5:], y[5:])]
    risk = risk_of(model, *batches[0]).on(batches)
    risk.check()
    before = len(seen)
    forecast(risk, ritz.measures.registry.resolve(["trace"]), 10, 4)
    assert max(seen[before:]) == 5


# --------------------------------------------------------------------------------------------------- steps


def test_steps_of_a_loop_that_counts_by_itself_are_taken_as_they_are(monkeypatch):
    Time(monkeypatch)
    tracker = track(risk_of(*problem()), every=4, measures=["trace"], budget=1.0)
    for step in (1, 2, 2, 4, 4, 4, 7, 9):  # accumulation repeats a number, two optimisers pass one over
        tracker.step(step)
    assert tracker.record.column("curvature/hessian/trace")[0] == [4, 9]


def test_rows_go_to_every_logger(tmp_path, monkeypatch):
    Time(monkeypatch)
    memory, lines = Memory(), JSONLines(tmp_path / "track.jsonl")
    tracker = track(risk_of(*problem()), every=1, measures=["trace"], logger=[memory, lines], budget=1.0)
    tracker.step()
    tracker.step()
    assert memory.rows == read(lines.path).rows == tracker.record.rows
    assert [row["step"] for row in memory.rows] == [1, 2]


def test_the_record_makes_a_page(monkeypatch):
    Time(monkeypatch)
    tracker = track(risk_of(*problem()), every=1, measures=["trace"], budget=1.0)
    tracker.step()
    tracker.step()
    assert "Training" in [section.title for section in ritz.report.build(tracker.record).sections]


# --------------------------------------------------------------------------------------------- going wrong


def test_a_network_that_has_diverged_is_said_once_and_training_goes_on():
    model, X, y = problem()
    with track(risk_of(model, X, y), every=1, measures=["trace"], budget=1.0) as tracker:
        with torch.no_grad():
            model[0].weight.fill_(math.nan)
        with pytest.warns(NumericalWarning, match="the look at step 1 failed: 0.weight is not finite"):
            assert tracker.step() is None
        assert tracker.step() is None  # a second warning would be an error here
        with pytest.raises(NonFiniteError, match=r"0\.weight is not finite"):
            tracker.look()
    assert list(tracker.failures) == [1, 2]
    assert "the look at step 2 failed" in str(tracker.table().notes)


def test_a_network_that_has_no_such_measure_says_why():
    model = nn.Linear(2, 1)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)))
    with pytest.raises(RitzError, match="needs classes and labels"):
        Tracker(risk, measures=["margin_q10"]).look()
    tracker = Tracker(risk, measures=["margin_q10", "trace"])  # one that fails does not stop the others
    tracker.look()
    assert tracker.names == ["curvature/hessian/trace"]
    assert "margin_q10" in tracker.last.failures


def test_a_risk_that_is_not_sound_is_refused_before_training():
    model, X, y = problem()
    with torch.no_grad():
        model[0].bias.fill_(math.inf)
    with pytest.raises(NonFiniteError, match=r"0\.bias is not finite"), track(risk_of(model, X, y)):
        pass


@pytest.mark.parametrize("error", [OSError("no space"), ValueError("no space"), KeyError("no space")])
def test_a_logger_that_fails_is_named_once_and_neither_training_nor_the_row_is_lost(error, monkeypatch):
    Time(monkeypatch)

    def full(scalars, step):
        raise error

    tracker = track(risk_of(*problem()), every=2, measures=["trace"], logger=full, budget=1.0)
    tracker.step()
    named = rf"the logger \S*full failed at the row of step 2, .*{type(error).__name__}: .*no space"
    with pytest.warns(NumericalWarning, match=named):
        assert tracker.step() is not None
    tracker.step()
    assert tracker.step() is not None  # a second warning would be an error here
    assert [row["step"] for row in tracker.record.rows] == [2, 4]
    assert tracker.failures == {}  # the looks did happen


def test_a_logger_that_fails_does_not_keep_rows_from_the_others(monkeypatch):
    Time(monkeypatch)

    class Broken:
        def log(self, scalars, step):
            raise OSError("no space")

    memory = Memory()
    tracker = track(risk_of(*problem()), measures=["trace"], logger=[[Broken(), memory]])
    with pytest.warns(NumericalWarning, match=r"the logger \S*Broken failed at the row of step 0"):
        tracker.look()
    assert memory.rows == tracker.record.rows


def test_a_wish_to_stop_passes_through_the_logger(monkeypatch):
    Time(monkeypatch)

    def interrupted(scalars, step):
        raise KeyboardInterrupt

    tracker = track(risk_of(*problem()), every=1, measures=["trace"], logger=interrupted, budget=1.0)
    with pytest.raises(KeyboardInterrupt):
        tracker.step()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"every": 0}, "every must be at least 1 step, got 0"),
        ({"every": 0.5}, "every must be at least 1 step, got 0.5"),
        ({"budget": 0.0}, "budget, a share of the time, must be above 0 and at most 1, got 0.0"),
        ({"budget": 5}, "budget, a share of the time, must be above 0 and at most 1, got 5"),
        ({"measures": ["lamda_max"]}, "no measure is named 'lamda_max'; did you mean lambda_max"),
        ({"num_probes": 0}, "num_probes must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        track(risk_of(*problem()), **keywords)


def test_what_is_no_risk_or_no_logger_is_refused():
    with pytest.raises(TypeError, match=r"risk must be a ritz\.Risk, got Linear"):
        track(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="a logger must have a method log"):
        track(risk_of(*problem()), logger=3)


# ---------------------------------------------------------------------------------------- tables, going on


def test_a_table_has_a_row_for_each_look_and_refuses_a_name_that_is_not_there():
    model, X, y = problem()
    tracker = Tracker(risk_of(model, X, y), every=1, measures=["trace", "train_loss"], budget=1.0)
    train(model, X, y, torch.optim.SGD(model.parameters(), lr=0.1), 2, tracker.step)
    table = tracker.table()
    assert table.header == ("step", "hessian/trace", "train_loss")
    assert [row[0] for row in table.rows] == ["1", "2"]
    assert "2 looks took" in table.notes[0]
    assert tracker.table("measures/train_loss").header == ("step", "train_loss")
    with pytest.raises(KeyError, match="no row has 'loss'; there are"):
        tracker.table("loss")


def test_a_picture_has_a_line_for_each_name():
    pytest.importorskip("matplotlib")
    model, X, y = problem()
    tracker = Tracker(risk_of(model, X, y), every=1, measures=["trace", "lambda_max", "train_loss"], budget=1.0)
    train(model, X, y, torch.optim.SGD(model.parameters(), lr=0.1), 3, tracker.step)
    ax = tracker.plot()
    assert [line.get_label() for line in ax.lines] == ["curvature/hessian/trace", "curvature/hessian/lambda_max"]
    assert list(ax.lines[0].get_ydata()) == tracker.record.column("curvature/hessian/trace")[1]
    assert len(tracker.plot("measures/train_loss").lines) == 1


def test_a_resumed_run_looks_at_the_same_steps_and_has_the_whole_record(tmp_path, monkeypatch):
    def steps(tracker, time, count):
        with tracker:
            for _ in range(count):
                time.now += 1.0
                tracker.step()

    keywords = {"every": 3, "measures": ["trace"], "budget": 0.2}
    whole, time = track(risk_of(*problem()), **keywords), Time(monkeypatch, look=1.0)
    steps(whole, time, 40)
    first, time = track(risk_of(*problem()), **keywords), Time(monkeypatch, look=1.0)
    steps(first, time, 17)
    path = first.save(tmp_path / "tracker")
    time.now += 1e6  # a night
    again = track(risk_of(*problem()), **keywords)
    again.load_state_dict(ritz.load(path))
    steps(again, time, 23)
    assert again.record.rows == whole.record.rows
    assert (again.count, again.skipped, again.spent) == (whole.count, whole.skipped, whole.spent)
    assert again.skipped > 0


def test_the_state_is_plain_and_one_of_another_format_is_refused():
    tracker = Tracker(risk_of(*problem()), measures=["trace"])
    tracker.look()
    json.dumps(tracker.state_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="the state of a tracker must have format 1, got 2"):
        tracker.load_state_dict({"format": 2})
