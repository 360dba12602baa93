"""`ritz.measure`: the standard set against naive numbers, shared runs, and one measure failing among others."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

import ritz
from ritz import stopping
from ritz.measures.measure import Measurement, duration
from ritz.measures.registry import MEASURES, resolve
from ritz.measures.row import Measure
from ritz.measures.subject import HESSIAN_RUN, Settings, Subject
from ritz.report.figures import row_of_axes
from ritz.results import Estimate

STANDARD = [
    "train_loss",
    "train_error",
    "test_loss",
    "test_error",
    "gap_loss",
    "gap_error",
    "weight_norm",
    "distance",
    "trace",
    "trace_per_param",
    "frobenius_norm",
    "moment2_per_param",
    "spectral_norm",
    "lambda_max",
    "lambda_min",
    "effective_rank",
    "metric_a",
    "metric_a_eq7",
    "scaled_sharpness",
    "margin_median",
    "margin_q10",
    "margin_skewness",
    "aceht",
    "margin_bound",
]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def data(n: int = 30, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator)
    return X, (X[:, :3] + 0.5 * torch.randn(n, 3, generator=generator)).argmax(1)


def trained() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A network after some steps, and where it began."""
    model = network()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(data()[0]), data()[1]).backward()
        optimizer.step()
    return model, start


def risk_of(model: nn.Module, **options) -> ritz.Risk:
    return ritz.Risk(model, nn.CrossEntropyLoss(), data(), batch_size=16, **options)


def naive(model: nn.Module, start: dict[str, torch.Tensor]) -> dict[str, float]:
    """Every number of the standard set from the dense Hessian and plain formulas."""
    X, y = data()
    params = list(model.parameters())
    loss = F.cross_entropy(model(X), y)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, create_graph=True)])
    rows = [torch.autograd.grad(g, params, retain_graph=True) for g in gradient]
    H = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    lam = torch.linalg.eigvalsh(H)
    w = torch.cat([p.detach().flatten() for p in params])
    w0 = torch.cat([p.detach().flatten() for p in start.values()])
    with torch.no_grad():
        f, ft = model(X), model(data(20, 2)[0])
    yt = data(20, 2)[1]
    S = f.softmax(1)
    margin = f.gather(1, y[:, None])[:, 0] - f.scatter(1, y[:, None], -torch.inf).amax(1)
    soft = S.gather(1, y[:, None])[:, 0] - S.scatter(1, y[:, None], -torch.inf).amax(1)
    size = X.square().sum(1) + 1
    trace, square, P, top = float(lam.sum()), float(lam.square().sum()), len(w), float(lam[-1])
    train_error, test_error = (float((g.argmax(1) != labels).double().mean()) for g, labels in ((f, y), (ft, yt)))
    train_loss, test_loss = float(F.cross_entropy(f, y)), float(F.cross_entropy(ft, yt))
    return {
        "train_loss": train_loss, "train_error": train_error, "test_loss": test_loss, "test_error": test_error,
        "gap_loss": test_loss - train_loss, "gap_error": test_error - train_error,
        "weight_norm": float(w.norm()), "distance": float((w - w0).norm()),
        "trace": trace, "trace_per_param": trace / P, "frobenius_norm": math.sqrt(square),
        "moment2_per_param": square / P, "spectral_norm": float(lam.abs().max()), "lambda_max": top,
        "lambda_min": float(lam[0]), "effective_rank": trace**2 / square,
        "metric_a": float(w.norm()) / 2 + trace / P, "metric_a_eq7": trace + float(w.square().sum()) / 2,
        "scaled_sharpness": top * float(w.square().sum()),
        "margin_median": float(margin.quantile(0.5)), "margin_q10": float(margin.quantile(0.1)),
        "margin_skewness": float(stats.skew(margin.numpy())),
        "aceht": float((size * (1 - S.square().sum(1))).mean()),
        "margin_bound": float((size * (1 - soft.square())).mean()),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ the standard set


def test_the_standard_set_is_the_one_that_is_promised():
    assert {measure.key for measure in resolve("standard")} == set(STANDARD)


def test_every_number_of_the_standard_set_is_the_naive_one():
    model, start = trained()
    m = ritz.measure(risk_of(model), test=data(20, 2), init=start)
    assert not m.failures
    truth = naive(model, start)
    assert set(m) == set(STANDARD)
    for key in STANDARD:
        assert float(m[key].value) == pytest.approx(truth[key], rel=1e-8, abs=1e-10), key


def test_what_rough_products_leave_open_of_the_trace_is_left_open_of_the_effective_rank():
    """Every eigenvalue moved up, and every one moved down, as far as the products may be off."""
    risk = risk_of(trained()[0])
    whole = ritz.spectrum(ritz.Hessian(risk))
    off = 0.05 * float(whole.trace.value)
    subject = Subject(risk, Settings())
    subject.once(HESSIAN_RUN, lambda: replace(whole, rounding=off / math.sqrt(risk.dim), trace_rounding=off))
    low, high = MEASURES["effective_rank"].compute(subject).interval()
    for sign in (-1, 1):
        moved = whole.head + sign * off / risk.dim
        assert low < float(moved.sum()) ** 2 / float(moved.square().sum()) < high


def test_intervals_of_a_sampled_spectrum_hold_the_naive_numbers():
    """A network too large for the head to be the whole spectrum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    truth = naive(model, dict(model.named_parameters()))
    keys = [key for key in STANDARD if MEASURES[key].cost == "Hessian"]
    m = ritz.measure(risk_of(model), measures=keys, num_steps=40, num_probes=8)
    for key in keys:
        low, high = m[key].interval(0.999)
        slack = 1e-9 * abs(truth[key]) + 1e-12
        assert low - slack <= truth[key] <= high + slack, key


def test_the_whole_set_costs_little_more_than_its_spectrum_run():
    """Counted in forward passes of the model, which every product takes as many of."""

    class Counting(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            Counting.calls += 1
            return self.net(x)

    def calls(run) -> int:
        Counting.calls = 0
        run(ritz.Risk(Counting(), nn.CrossEntropyLoss(), data(), batch_size=30))
        return Counting.calls

    torch.manual_seed(0)
    alone = calls(lambda risk: ritz.spectrum(ritz.Hessian(risk, route="reverse"), 100, 8))
    whole = calls(lambda risk: ritz.measure(risk, test=data(20, 2)))
    assert whole <= 1.2 * alone + 20  # the check of two data sets, and the choice of a route


def test_the_same_seed_gives_the_same_numbers():
    model, _ = trained()
    first, second = (ritz.measure(risk_of(model), test=data(20, 2), num_steps=20) for _ in range(2))
    assert dict(first) == dict(second)


# ----------------------------------------------------------------------------------------- what may be asked


def test_what_was_not_given_is_named_and_the_rest_stands():
    m = ritz.measure(risk_of(network()))
    assert m.failures["gap_loss"] == "needs test="
    assert m.failures["distance"] == "needs init="
    assert len(m) == len(STANDARD) - 5
    with pytest.raises(KeyError, match="gap_loss failed: needs test="):
        m["gap_loss"]
    with pytest.raises(KeyError, match="path_norm was not asked for"):
        m["path_norm"]


def test_one_measure_failing_does_not_stop_the_others():
    def broken(subject):
        raise ZeroDivisionError("on purpose")

    own = Measure(
        key="own", formula="1 / 0", convention="", source="here", family="norms", cost="weights", compute=broken,
        reading="none",
    )  # fmt: skip
    m = ritz.measure(risk_of(network()), measures=[own, "weight_norm"])
    assert m.failures == {"own": "ZeroDivisionError: on purpose"}
    assert list(m) == ["weight_norm"]
    assert "on purpose" in str(m)


def test_a_measure_of_ones_own_goes_into_the_list():
    own = Measure(
        key="largest_weight", formula="max |w|", convention="", source="here", family="norms", cost="weights",
        compute=lambda s: Estimate(name="largest", value=float(s.weights.abs().max()), exact=True), reading="a line",
    )  # fmt: skip
    model = network()
    m = ritz.measure(risk_of(model), measures=[own])
    assert m["largest_weight"].value == max(float(p.detach().abs().max()) for p in model.parameters())
    assert "mean over 30 samples" in m["largest_weight"].convention


def test_a_run_that_fails_is_not_repeated_for_each_measure():
    model = network()
    calls = []

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return _OnlyOnce.apply(self.net(x), calls)

    m = ritz.measure(ritz.Risk(Broken(), nn.CrossEntropyLoss(), data()), measures=["trace", "lambda_max", "aceht"])
    assert set(m.failures) == {"trace", "lambda_max"}
    assert "aceht" in m
    tried = len(calls)
    ritz.measure(ritz.Risk(Broken(), nn.CrossEntropyLoss(), data()), measures=["trace"])
    assert len(calls) == 2 * tried


class _OnlyOnce(torch.autograd.Function):
    """An operation whose gradient fails, and counts how often it was asked for."""

    @staticmethod
    def forward(ctx, x, calls):
        ctx.calls = calls
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.calls.append(1)
        raise RuntimeError("no gradient here")


def test_batchnorm_in_train_mode_has_no_margins_of_its_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    m = ritz.measure(ritz.Risk(model, nn.CrossEntropyLoss(), data(), mode="train"), num_steps=10)
    assert {"margin_median", "margin_q10", "margin_skewness", "aceht", "margin_bound"} <= set(m.failures)
    assert "use mode='eval'" in m.failures["aceht"]
    assert {"trace", "train_loss", "train_error"} <= set(m)


def test_an_opaque_loss_has_curvature_and_no_margins():
    def total(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    m = ritz.measure(ritz.Risk(network(), data=[data()], batch_loss=total), num_steps=10)
    assert m["train_loss"].value == pytest.approx(risk_of(network()).loss())
    assert "batch_loss" in m.failures["train_error"]
    assert "trace" in m
    tested = ritz.measure(
        ritz.Risk(network(), data=[data()], batch_loss=total), test=[data(20, 2)], measures=["gap_loss"]
    )
    assert tested["gap_loss"].value == pytest.approx(risk_of(network()).on(data(20, 2)).loss() - m["train_loss"].value)
    assert tested["gap_loss"].interval() == (-math.inf, math.inf)


def test_one_class_and_one_sample_get_a_clear_answer():
    one_class = ritz.Risk(nn.Linear(4, 1), nn.CrossEntropyLoss(), (data()[0], torch.zeros(30, dtype=torch.long)))
    m = ritz.measure(one_class)
    assert "at least two classes" in m.failures["margin_median"]
    assert m["trace"].value == 0
    one_sample = ritz.measure(ritz.Risk(network(), nn.CrossEntropyLoss(), data(1)), test=data(1))
    assert one_sample["margin_median"].value == one_sample["margin_q10"].value
    assert "margin_skewness" in one_sample.failures


def test_all_points_wrong_is_measured_as_it_is():
    model = network()
    X = data()[0]
    y = model(X).argmin(1)
    m = ritz.measure(ritz.Risk(model, nn.CrossEntropyLoss(), (X, y)))
    assert m["train_error"].value == 1.0
    assert m["margin_median"].value < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measures": ["trac"]}, "no measure is named 'trac'; did you mean trace"),
        ({"measures": []}, "measures is empty"),
        ({"measures": 5}, "measures must be 'standard', 'all', or a list of keys and of Measures, got int"),
        ({"measures": ["trace", "trace"]}, "two measures have the same key"),
        ({"num_probes": 0}, "num_probes must be at least 1, got 0"),
        ({"sigma": 0.0}, "sigma must be positive and finite, got 0.0"),
        ({"init": torch.zeros(3)}, r"expected a flat vector \(dim=51,\), got \(3,\)"),
        ({"init": {"0.weight": torch.zeros(6, 4)}}, "the weights have no '0.bias'"),
        ({"test": (torch.ones(2, 4), torch.tensor([0, 7]))}, "the test data: label 7 is not one of the 3 classes"),
    ],
)
def test_bad_input_is_refused_before_any_work(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ritz.measure(risk_of(network()), **options)


def test_a_test_risk_at_other_weights_is_refused():
    with pytest.raises(ValueError, match="at other weights"):
        ritz.measure(risk_of(network()), test=risk_of(network(1)))
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk"):
        ritz.measure(network())
    with pytest.raises(TypeError, match="named tensors"):
        ritz.measure(risk_of(network()), init=network())


# --------------------------------------------------------------------------------------------- what is shown


def test_progress_says_how_long_first_and_ends_at_one():
    seen: list[tuple[str, float]] = []
    ritz.measure(risk_of(network()), test=data(), progress=lambda text, part: seen.append((text, part)))
    assert seen[0][0].startswith("24 measures, about ")
    parts = [part for _, part in seen]
    assert parts == sorted(parts)
    assert seen[-1] == ("done", 1.0)


@pytest.mark.parametrize(("seconds", "text"), [(0, "1 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")])
def test_a_duration_is_said_in_words(seconds, text):
    assert duration(seconds) == text


def test_a_measurement_is_saved_and_loaded_equal(tmp_path):
    m = ritz.measure(risk_of(network()), test=data(20, 2), num_steps=10)
    assert ritz.load(m.save(tmp_path / "m")) == m
    assert isinstance(ritz.load(tmp_path / "m"), Measurement)


def test_the_table_has_value_interval_convention_and_reading_of_every_row():
    m = ritz.measure(risk_of(network()), test=data(20, 2), measures=["trace", "gap_error", "distance"])
    table = m.table()
    assert [row[0] for row in table.rows] == ["trace", "gap_error"]
    assert all(cell for row in table.rows for cell in row)
    assert table.notes == ["not measured: distance: needs init="]
    assert repr(m) == str(m)
    assert "trace" in str(m)
    assert "<td>trace</td>" in m._repr_html_()


def test_layers_has_a_column_for_what_is_known_by_parameter():
    m = ritz.measure(risk_of(network()), measures=["trace", "weight_norm"])
    table = m.layers()
    assert [row[0] for row in table.rows][:2] == ["0.weight", "0.bias"]
    assert "trace" in table.header
    assert m.layers(["weight_norm"]).header == ("layer", "weight_norm")


def test_a_page_holds_the_table_and_the_figures(tmp_path):
    m = ritz.measure(risk_of(network()), test=data(20, 2), num_steps=10)
    text = m.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<summary>margin_bound</summary>" in text
    assert "Spectral density" in text


def test_a_measurement_is_a_figure_of_panels_or_its_first_panel_on_a_given_ax():
    m = ritz.measure(risk_of(network()), measures=["trace", "margin_median"], num_steps=10)
    drawn = m.plot().axes
    assert len(drawn) == 2
    _, axes = row_of_axes(2)
    assert m.plot(axes[1]) is axes[1]
    assert axes[1].get_xlabel() == drawn[0].get_xlabel() != ""
    assert axes[0].get_xlabel() == ""
    with pytest.raises(ValueError, match="nothing to draw: neither the spectrum of the Hessian nor margins"):
        ritz.measure(risk_of(network()), measures=["weight_norm"]).plot()


@pytest.mark.parametrize("value", [3.0, None, Estimate(name="x", value=math.nan, stop="no such number")])
def test_a_measure_that_gives_no_number_is_a_failure_and_not_the_end(value):
    own = Measure(
        key="own", formula="?", convention="", source="here", family="norms", cost="weights", reading="none",
        compute=lambda s: value,
    )  # fmt: skip
    m = ritz.measure(risk_of(network()), measures=[own, "weight_norm"])
    assert list(m) == ["weight_norm"]
    assert "no such number" in m.failures["own"] or "compute must return a ritz.Estimate" in m.failures["own"]


def test_weights_given_as_their_own_start_are_warned_of():
    risk = risk_of(network())
    with pytest.warns(ritz.errors.NumericalWarning, match="clone it before training"):
        ritz.measure(risk, init=risk.model.state_dict(), measures=["distance"])


def test_a_page_of_a_network_without_margins_is_drawn(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    m = ritz.measure(ritz.Risk(model, nn.CrossEntropyLoss(), data(), mode="train"), num_steps=5)
    assert m.to_html(tmp_path / "page.html").exists()


def test_one_number_for_each_of_many_is_shown_saved_and_not_ranked(tmp_path):
    own = Measure(
        key="each", formula="|w_i|", convention="one for each", source="here", family="norms", cost="weights",
        compute=lambda s: Estimate(name="each", value=s.weights.abs(), exact=True), reading="a line",
    )  # fmt: skip
    m = ritz.measure(risk_of(network()), measures=[own, "weight_norm"])
    assert m.table().rows[0][1].startswith("51 values, ")
    assert ritz.load(m.save(tmp_path / "m")) == m
    both = {"a": risk_of(network()), "b": risk_of(network(1))}
    assert list(ritz.compare(both, measures=[own, "weight_norm"]).rankings) == ["weight_norm"]
    assert {key for key, _ in ritz.audit(both["a"], measures=[own, "weight_norm"]).shifts} == {"weight_norm"}


def test_a_network_without_a_gradient_is_measured_with_progress_all_the_same():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return _OnlyOnce.apply(self.net(x), [])

    seen = []
    risk = ritz.Risk(Broken(), nn.CrossEntropyLoss(), data())
    m = ritz.measure(risk, measures=["aceht", "trace"], progress=lambda text, part: seen.append(text))
    assert (list(m), list(m.failures)) == (["aceht"], ["trace"])
    assert seen[0] == "2 measures"


def test_progress_never_goes_back_when_one_run_is_part_of_another():
    parts = []
    risk = risk_of(trained()[0])
    init = {name: p + 0.1 for name, p in risk.params().items()}
    ritz.measure(
        risk, init=init, measures=["certificate", "sigma", "top_log_product"], progress=lambda _, p: parts.append(p)
    )
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


def test_the_test_risk_must_have_every_weight_and_need_not_have_the_same_ones_chosen():
    model, other = network(), network()
    part = ritz.Risk(model, nn.CrossEntropyLoss(), data(), params="2.*")
    assert "gap_loss" in ritz.measure(part, test=risk_of(model).on(data(20, 2)), measures=["gap_loss"])
    for net in (model, other):
        net[0].weight.requires_grad_(False)
    with torch.no_grad():
        other[0].weight.add_(1.0)
    with pytest.raises(ValueError, match="at other weights"):
        ritz.measure(risk_of(model), test=risk_of(other).on(data(20, 2)))


def test_weights_of_zero_have_a_scaled_sharpness_of_zero():
    model = network()
    for p in model.parameters():
        nn.init.zeros_(p)
    assert ritz.measure(risk_of(model), measures=["scaled_sharpness"])["scaled_sharpness"].value == 0.0


def test_round_off_is_no_saddle():
    """A convex problem, singular because the classes may all be shifted: its smallest eigenvalue is 0."""
    torch.manual_seed(0)
    m = ritz.measure(ritz.Risk(nn.Linear(4, 3), nn.CrossEntropyLoss(), data()), measures=["lambda_min"])
    assert m["lambda_min"].value == 0.0
    assert m.spectrum.lambda_min.value != 0.0


def test_a_network_of_fewer_weights_than_eigenvalues_asked_for_has_a_log_product():
    X = torch.tensor([[1.0], [2.0]])
    m = ritz.measure(ritz.Risk(nn.Linear(1, 1, bias=False), nn.MSELoss(), (X, X)), measures=["top_log_product"])
    assert m["top_log_product"].value == pytest.approx(math.log(5.0))


def test_a_loss_that_is_never_negative_has_no_interval_below_zero():
    """A few items, one of them far off: Student t alone would reach below."""
    model = torch.nn.Linear(1, 1)
    X = torch.linspace(-1, 1, 12)[:, None]
    y = model(X).detach()
    y[0] += 3.0
    risk = ritz.Risk(model, torch.nn.MSELoss(), (X, y))
    found = ritz.measure(risk, test=(X, y), measures=["test_loss", "gap_loss"])
    assert found["test_loss"].interval()[0] == 0.0 < found["test_loss"].value
    assert found["gap_loss"].interval()[0] == pytest.approx(-found["test_loss"].value)


def test_what_one_forward_pass_gives_is_there_when_a_run_is_stopped_before_its_products():
    """Cheap measures are taken first, in whichever order they were asked for."""
    risk = ritz.Risk(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), (torch.eye(3), torch.tensor([0, 1, 0])))

    def enough(what: str, part: float) -> None:
        if what == "trace":
            stopping.ask("enough")

    with stopping.stoppable():
        found = ritz.measure(risk, measures=["trace", "margin_median", "weight_norm"], progress=enough)
    assert {"margin_median", "weight_norm"} <= set(found)
    assert found.stop == "enough"
