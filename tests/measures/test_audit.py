"""`ritz.audit`: what moves when the function does not."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import ritz
from ritz.errors import UnsupportedError
from ritz.measures import elsewhere
from ritz.measures.audit import Audit, Shift
from ritz.measures.differences import as_found
from ritz.measures.elsewhere import FEW_STEPS, steps_elsewhere, turning
from ritz.measures.registry import MEASURES
from ritz.results import Estimate, from_samples


def data(n: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def plain() -> ritz.Risk:
    """A chain of ReLU layers, small enough for every eigenvalue to be known."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return ritz.Risk(model, nn.CrossEntropyLoss(), data())


def normalised() -> ritz.Risk:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5)
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU(), nn.Linear(5, 3))
    for _ in range(20):
        model(data()[0])
    model.eval()
    return ritz.Risk(model, nn.CrossEntropyLoss(), data())


@pytest.fixture(scope="module")
def found():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        init = {name: p + 0.1 for name, p in plain().params().items()}
        yield ritz.audit(plain(), test=data(200), init=init, strength=3.0)
    finally:
        torch.set_default_dtype(before)


# --------------------------------------------------------------------------------------------------- one shift


def test_a_shift_is_moved_unchanged_or_not_known():
    exact = [Estimate(name="x", value=value, exact=True) for value in (1.0, 1.001, 2.0)]
    assert Shift("x", "rescale", exact[0], exact[1]).verdict == "unchanged"
    assert Shift("x", "rescale", exact[0], exact[2]).verdict == "moved"
    noise = torch.linspace(-1, 1, 8)
    noisy = [from_samples("x", 1 + noise), from_samples("x", 1.1 - noise)]
    shift = Shift("x", "rescale", *noisy)
    assert (shift.verdict, str(shift)) == ("cannot tell", "?")


@pytest.mark.parametrize(
    ("before", "after", "text"), [(2.0, 5.0, "×2.5"), (1.0, -2.0, "1 → -2"), (0.0, 3.0, "0 → 3"), (3.0, 3.0, "=")]
)
def test_a_shift_is_shown_as_a_factor_where_there_is_one(before, after, text):
    a, b = (Estimate(name="x", value=value, exact=True) for value in (before, after))
    assert str(Shift("x", "rescale", a, b)) == text


def test_nothing_to_nothing_is_unchanged():
    zero = Estimate(name="x", value=0.0, exact=True)
    assert math.isnan(Shift("x", "rescale", zero, zero).factor)
    assert Shift("x", "rescale", zero, zero).verdict == "unchanged"


# -------------------------------------------------------------------------------------------------- the audit


def test_the_transforms_that_fit_the_network_are_done(found):
    assert list(found.after) == ["rescale", "permute", "scale_output", "scale_layers"]


def test_rescaling_before_batchnorm_is_no_matter_where_there_is_none_unless_it_is_asked_for(found):
    assert found.refused == {}
    assert "batchnorm" not in str(found)
    asked = ritz.audit(plain(), measures=["weight_norm"], transforms=["permute", "batchnorm"])
    assert "no layer is followed by BatchNorm" in asked.refused["batchnorm"]
    by_batches = ritz.Risk(normalised().model, nn.CrossEntropyLoss(), data(), mode="train")
    assert "statistics of each batch" in ritz.audit(by_batches, measures=["weight_norm"]).refused["batchnorm"]


def test_every_measure_moves_as_the_table_of_measures_says(found):
    for (key, name), shift in found.shifts.items():
        wanted = "unchanged" if name in MEASURES[key].unchanged else "moved"
        assert shift.verdict == wanted, (key, name, shift.factor)


def test_batchnorm_rescaling_moves_what_the_table_says():
    seen = ritz.audit(normalised(), transforms=["batchnorm"], strength=3.0)
    for (key, name), shift in seen.shifts.items():
        wanted = "unchanged" if name in MEASURES[key].unchanged else "moved"
        assert shift.verdict == wanted, (key, name, shift.factor)
    assert "trace" in seen.moved("batchnorm")


def test_flatness_moves_while_the_function_does_not(found):
    """Seed 000 after Dinh et al.: the same function is as sharp as one likes."""
    moved = set(found.moved("rescale"))
    assert {"trace", "frobenius_norm", "spectral_norm", "metric_a", "metric_a_eq7", "scaled_sharpness"} <= moved
    assert moved.isdisjoint({"train_loss", "train_error", "test_error", "gap_loss", "margin_median", "aceht"})


def test_a_factor_is_that_of_measuring_by_hand(found):
    risk = plain()
    moved = ritz.transforms.rescale(risk, 3.0)
    traces = [float(torch.trace(ritz.Hessian(r).dense())) for r in (risk, moved)]
    assert found.shifts["trace", "rescale"].factor == pytest.approx(traces[1] / traces[0], rel=1e-9)


def test_an_audit_prints_draws_saves_and_says_what_it_found(found, tmp_path):
    table = found.table()
    assert table.header == ("measure", "as it is", "rescale", "permute", "scale_output", "scale_layers")
    assert [row[0] for row in table.rows] == list(found.before)
    assert dict(zip(table.header, table.rows[0], strict=True))["rescale"] == "="
    assert len(found.findings()) == 4
    assert "the function is the same" in found.findings()[0]
    assert "trace" in str(found)
    assert len(found.plot().lines) == 9  # two for each transform, known and not, and one for no change
    assert "<svg" in found.to_html(tmp_path / "audit.html").read_text(encoding="utf-8")
    loaded = ritz.load(found.save(tmp_path / "audit"))
    assert isinstance(loaded, Audit)
    assert loaded == found


def test_progress_goes_over_all_places():
    seen: list[tuple[str, float]] = []
    ritz.audit(plain(), measures=["weight_norm"], transforms=["rescale"], progress=lambda *step: seen.append(step))
    assert [part for _, part in seen] == sorted(part for _, part in seen)
    assert seen[-1] == ("rescale: done", 1.0)


def test_bad_input_is_refused_before_any_work():
    with pytest.raises(ValueError, match="no transform is named 'rescaling'; there are: rescale"):
        ritz.audit(plain(), transforms=["rescaling"])
    for strength in (1.0, 0.0, -2.0, math.inf):
        with pytest.raises(ValueError, match="strength must be positive and not 1"):
            ritz.audit(plain(), strength=strength)
    smooth = ritz.Risk(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), nn.CrossEntropyLoss(), data())
    with pytest.raises(UnsupportedError, match="no transform applies to this network"):
        ritz.audit(smooth, transforms=["rescale", "scale_output"])


def test_noise_of_one_probe_is_not_taken_for_a_move():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 3))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data())
    pair = (ritz.measure(at, measures=["trace"], num_steps=5, num_probes=1)["trace"] for at in (risk, _permuted(risk)))
    assert Shift("trace", "permute", *pair).verdict == "cannot tell"


# ------------------------------------------------------------------------------- no more than verdicts need


def _permuted(risk: ritz.Risk) -> ritz.Risk:
    return ritz.transforms.permute(risk, 0)


def wide(middle: nn.Module | None = None) -> ritz.Risk:
    """Too many parameters for every eigenvalue to be found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), middle or nn.ReLU(), nn.Linear(16, 3))
    return ritz.Risk(model, nn.CrossEntropyLoss(), data())


def test_few_steps_give_each_measure_of_the_hessian_what_many_do():
    rows = [row for row in MEASURES.values() if row.cost == "Hessian"]
    assert steps_elsewhere(rows, 100) == FEW_STEPS < 100
    moved = ritz.transforms.rescale(wide(), 4.0)
    few, many = (ritz.measure(moved, measures=rows, num_steps=steps, num_probes=4) for steps in (FEW_STEPS, 100))
    assert few.spectrum.products < many.spectrum.products
    assert few.keys() == many.keys() == {row.key for row in rows}
    for key in few:
        assert float(few[key].value) == pytest.approx(float(many[key].value), rel=1e-6), key
        assert float(few[key].stderr) == pytest.approx(float(many[key].stderr), rel=1e-6, abs=1e-12), key


def test_a_measure_of_ones_own_has_all_steps():
    own = replace(MEASURES["trace"], key="mass", compute=lambda s: s.spectrum.mass(0.0))
    assert steps_elsewhere([MEASURES["trace"], own], 60) == 60
    found = ritz.audit(wide(), measures=["trace", own], transforms="rescale", num_steps=60, num_probes=2)
    assert found.after["rescale"].spectrum.num_steps == found.before.spectrum.num_steps == 60


def test_steps_that_leave_a_verdict_open_are_followed_by_all(monkeypatch):
    monkeypatch.setattr(elsewhere, "FEW_STEPS", 3)  # which bound no eigenvalue
    keys = ["lambda_min", "weight_norm"]
    asked = {"measures": keys, "num_steps": 40, "num_probes": 2}
    found = ritz.audit(wide(nn.Tanh()), transforms="scale_output", strength=0.25, **asked)
    after = found.after["scale_output"]
    assert after.spectrum.num_steps == 40
    assert list(after) == keys
    alone = ritz.measure(ritz.transforms.scale_output(wide(nn.Tanh()), 0.25), **asked)
    assert after["lambda_min"] == alone["lambda_min"]


def test_a_permutation_turns_the_hessian_and_one_run_serves_both():
    risk = wide(nn.Tanh())
    found = ritz.audit(risk, transforms="permute", num_steps=10, num_probes=2)
    assert found.turned["permute"] < 1e-12
    assert found.after["permute"].spectrum is found.before.spectrum
    assert found.moved("permute") == []
    assert {shift.verdict for shift in found.shifts.values()} == {"unchanged"}
    dense = [torch.linalg.eigvalsh(ritz.Hessian(at).dense()) for at in (risk, _permuted(risk))]
    torch.testing.assert_close(dense[0], dense[1], rtol=1e-9, atol=1e-12)  # as it says
    assert "H is in another order, to" in found.table().notes[0]
    assert found.table().notes[0].startswith("permute: hidden units in another order; the function is the same, and")


def test_what_does_more_than_turn_the_hessian_is_seen():
    risk = wide(nn.Tanh())
    assert turning(risk, _permuted(risk), _permuted) < 1e-12
    elsewhere_too = _permuted(risk).at({"2.bias": torch.tensor([0.1, 0.0, 0.0])})
    assert turning(risk, elsewhere_too, _permuted) > 1e-3
    assert turning(risk, ritz.transforms.rescale(wide(), 2.0), lambda at: ritz.transforms.rescale(at, 2.0)) == math.inf


def test_a_hessian_that_is_not_turned_is_measured_again(monkeypatch):
    monkeypatch.setattr("ritz.measures.audit.turning", lambda *_: 0.5)
    found = ritz.audit(wide(), measures=["trace"], transforms="permute", num_steps=10, num_probes=2)
    assert found.turned == {}
    assert found.after["permute"].spectrum is not found.before.spectrum


def test_what_was_measured_before_is_not_measured_again():
    risk, calls = wide(), []
    count = replace(MEASURES["trace"], key="counted", compute=lambda s: calls.append(s.risk) or s.spectrum.trace)
    rows, sized = ["weight_norm", count, "distance"], {"num_steps": 10, "num_probes": 2}
    known = ritz.measure(risk, measures=[*rows, "lambda_max"], **sized)
    found = ritz.audit(risk, measures=rows, before=known, transforms="rescale", **sized)
    assert [at is risk for at in calls] == [True, False]
    assert list(found.before) == ["weight_norm", "counted"]
    assert found.before.failures == {"distance": "needs init="}
    assert found.before["counted"] == known["counted"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_steps": 11},
            "before is a measurement of something else: its settings is .*num_steps=10.*; leave out before=",
        ),
        ({"measures": ["trace", "lambda_max"]}, "before lacks lambda_max; measure these too"),
    ],
)
def test_a_measurement_of_something_else_is_refused(options, message):
    risk, asked = wide(), {"measures": ["trace"], "num_steps": 10, "num_probes": 2}
    known = ritz.measure(risk, **asked)
    with pytest.raises(ValueError, match=message):
        ritz.audit(risk, before=known, **{**asked, **options})
    with pytest.raises(ValueError, match="its model is Sequential, 131 parameters, expected Sequential, 64 parameters"):
        ritz.audit(plain(), before=known, **asked)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (lambda risk: ritz.transforms.scale_output(risk, 2.0), "train_loss"),
        (lambda risk: ritz.transforms.rescale(risk, 2.0), "weight_norm"),
        (lambda risk: ritz.Risk(risk.model, nn.CrossEntropyLoss(label_smoothing=0.2), data()), "train_loss"),
    ],
)
def test_a_measurement_at_other_weights_or_of_another_loss_is_refused(other, key):
    risk, asked = wide(), {"measures": ["train_loss", "weight_norm"], "transforms": "rescale"}
    known = ritz.measure(other(risk), measures=["train_loss", "weight_norm"])
    with pytest.raises(ValueError, match=f"something else, such as other weights or another loss: its {key} is"):
        ritz.audit(risk, before=known, **asked)


def test_the_outputs_of_a_regression_are_not_scaled():
    risk = ritz.Risk(
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), nn.MSELoss(), (data()[0], torch.ones(24, 1))
    )
    found = ritz.audit(risk, measures=["weight_norm"])
    assert set(found.after) == {"rescale", "permute"}
    assert "regression" in found.refused["scale_output"]


def test_a_test_risk_of_other_weights_is_refused():
    with pytest.raises(ValueError, match="at other weights"):
        ritz.audit(plain(), test=ritz.transforms.rescale(plain(), 2.0))


def test_a_test_risk_keeps_its_own_way_to_read_its_data():
    risk = plain()
    X, y = data(50)
    test = ritz.Risk(
        risk.model, nn.CrossEntropyLoss(), [{"x": X, "labels": y}], forward=lambda model, batch: model(batch["x"])
    )
    found = ritz.audit(risk, test=test, measures=["test_loss"], transforms=["rescale", "scale_output"])
    assert found.before["test_loss"].value == pytest.approx(risk.on((X, y)).loss())
    verdicts = [found.shifts["test_loss", name].verdict for name in ("rescale", "scale_output")]
    assert verdicts == ["unchanged", "moved"]


def test_infinite_before_and_after_is_unchanged():
    infinite = Estimate(name="x", value=math.inf, exact=True)
    assert Shift("x", "rescale", infinite, infinite).verdict == "unchanged"


def test_a_search_that_finds_a_little_more_has_not_moved_for_sure():
    before, same, more, much = (
        as_found(Estimate(name="worst case", value=value, bracket=(value, math.inf)))
        for value in (1.0, 1.001, 1.1, 2.0)
    )
    verdicts = [Shift("x", "permute", before, after).verdict for after in (same, more, much)]
    assert verdicts == ["unchanged", "cannot tell", "moved"]
