import json
import math

import pytest
import torch

import ritz
from ritz.measures.compare import Agreement, Comparison, Ranking
from ritz.measures.measure import Measurement
from ritz.papers import digits
from ritz.results import Estimate, from_samples

TINY = digits.Settings(
    epochs=3, hidden=(4,), weight_decays=(0.0, 5e-2), num_steps=60, num_probes=8, dtype=torch.float64
)


@pytest.fixture(scope="module")
def tiny() -> digits.Study:
    return digits.study(TINY)


def solution(weight_decay: float) -> torch.nn.Sequential:
    """The same training once more, which gives the same weights."""
    data, _ = digits.load_digits(dtype=torch.float64)
    return digits.train(data, weight_decay, TINY, lambda epoch: None)


def dense_hessian(model: torch.nn.Module, data: digits.Data) -> torch.Tensor:
    """Reverse mode twice, row by row."""
    loss = torch.nn.functional.cross_entropy(model(data[0]), data[1])
    params = list(model.parameters())
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, create_graph=True)])
    rows = [torch.autograd.grad(entry, params, retain_graph=True, materialize_grads=True) for entry in gradient]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


@pytest.mark.parametrize("number", [0, 1])
def test_every_measure_of_a_row_agrees_with_the_dense_hessian(tiny, number):
    weight_decay = TINY.weight_decays[number]
    row = tiny.rows[f"weight decay {weight_decay:g}"]
    model = solution(weight_decay)
    data, _ = digits.load_digits(dtype=torch.float64)
    values = torch.linalg.eigvalsh(dense_hessian(model, data))
    norm = float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
    trace, num = float(values.sum()), len(values)
    truth = {
        "trace": trace,
        "moment2": float(values.square().sum()),
        "spectral_norm": float(values.abs().max()),
        "weight_norm": norm,
        "metric_a_eq7": trace + norm**2 / 2,
        "metric_a": norm / 2 + trace / num,
    }
    assert truth.keys() == set(digits.MEASURES)
    for key, true in truth.items():
        estimate = row[key]
        low, high = estimate.interval(0.999)
        slack = 1e-9 * abs(true)
        assert low - slack <= true <= high + slack, key
        assert high - low < 0.2 * abs(true), key  # or the line above could not fail


def test_gaps_are_those_of_the_risks_and_of_counting(tiny):
    train_data, test_data = digits.load_digits(dtype=torch.float64)
    model = solution(0.0)
    risks = [ritz.Risk(model, torch.nn.CrossEntropyLoss(), data) for data in (train_data, test_data)]
    row = tiny.rows["weight decay 0"]
    assert math.isclose(row["train_loss"].value, risks[0].loss(), rel_tol=1e-12)
    assert math.isclose(row["gap_loss"].value, risks[1].loss() - risks[0].loss(), rel_tol=1e-9)
    wrong = [float((model(X).argmax(1) != y).double().mean()) for X, y in (train_data, test_data)]
    gap = row["gap_error"]
    assert math.isclose(gap.value, wrong[1] - wrong[0], rel_tol=1e-9)
    assert math.isclose(gap.stderr, math.sqrt(wrong[1] * (1 - wrong[1]) / 596), rel_tol=1e-9)


def test_solutions_share_their_start_their_batches_and_nothing_else(tiny):
    same, other = solution(0.0), solution(5e-2)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), solution(0.0).parameters(), strict=True))
    assert tiny.rows["weight decay 0.05"]["weight_norm"].value < tiny.rows["weight decay 0"]["weight_norm"].value
    assert not torch.equal(same[0].weight, other[0].weight)


def test_training_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    solution(0.0)
    assert torch.equal(before, torch.get_rng_state())


def test_the_split_is_fixed_and_covers_every_digit():
    (X, y), (X_test, y_test) = digits.load_digits()
    assert (len(X), len(X_test)) == (1200, 597)
    assert torch.equal(
        torch.cat([y, y_test]).bincount(), torch.tensor([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    )
    assert float(X.min()) == 0.0
    assert float(X.max()) == 1.0


# ------------------------------------------------------------------------------------------ findings


def made_study(*rows: tuple[float, float, float], spread: float = 1e-3) -> digits.Study:
    """Rows of (weight decay, gap in loss, value of every measure)."""
    noise = torch.linspace(-1, 1, 50)
    found = {}
    for weight_decay, gap, norm in rows:
        exact = {key: Estimate(name=key, value=norm, exact=True) for key in digits.MEASURES}
        gaps = from_samples("gap", gap + spread * noise * (1 + weight_decay))
        found[f"weight decay {weight_decay:g}"] = Measurement(estimates={"gap_error": gaps, "gap_loss": gaps, **exact})
    rankings = {key: Ranking(key=key, order=(), better="lower", steps=()) for key in digits.COLUMNS}
    return digits.Study(settings=digits.Settings(), comparison=Comparison(measurements=found, rankings=rankings))


def test_a_measure_that_rises_while_the_gap_falls_is_said_to_be_ordered_against_it():
    found = made_study(*((d, 1 - d, 1 + d) for d in (0.0, 0.1, 0.2)))
    assert found.comparison.agreement("trace") == Agreement(same=0, opposite=3, pairs=3)
    text = " ".join(digits.findings(found))
    assert "Ordered against it: Tr H, Tr H²" in text
    assert "Ordered as the gap" not in text
    assert "the sharper of the two solutions has the smaller gap" in text


def test_a_measure_that_falls_with_the_gap_is_said_to_be_ordered_as_the_gap():
    found = made_study(*((d, 1 - d, 1 - d) for d in (0.0, 0.1, 0.2)))
    text = " ".join(digits.findings(found))
    assert "Ordered as the gap: Tr H, Tr H²" in text
    assert "against" not in text
    assert "the sharper of the two solutions has the larger gap" in text


def test_a_measure_that_goes_up_and_down_is_neither():
    found = made_study(*((d, 1 - d, n) for d, n in ((0.0, 1.0), (0.1, 3.0), (0.2, 2.0))))
    assert found.comparison.agreement("trace") == Agreement(same=1, opposite=2, pairs=3)
    assert "Neither: Tr H" in " ".join(digits.findings(found))


def test_gaps_within_their_noise_order_nothing():
    found = made_study(*((d, 1 - 1e-3 * d, 1 + d) for d in (0.0, 0.5)), spread=10.0)
    assert found.comparison.agreement("trace").verdict == "undecided"
    text = " ".join(digits.findings(found))
    assert "within its own noise" in text
    assert "0 of 1 pairs" in text
    assert "too noisy to compare" in text


# --------------------------------------------------------------------------------------------- files


def test_the_files_hold_the_table_and_the_spectra(tiny, tmp_path):
    written = digits.save(tiny, tmp_path)
    assert [path.name for path in written] == ["table.json", "spectrum-0.json", "spectrum-0.05.json"]
    table = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert [row["weight_decay"] for row in table["rows"]] == [0.0, 5e-2]
    assert table["num_params"] == 310
    for key, estimate in tiny.rows["weight decay 0.05"].items():
        assert table["rows"][1][key]["value"] == float(estimate.value)
        assert table["rows"][1][key]["convention"] == estimate.convention != ""
    assert ritz.load(tmp_path / "spectrum-0.05") == tiny.rows["weight decay 0.05"].spectrum


@pytest.mark.parametrize("name", ["epochs", "batch_size", "num_steps", "num_probes"])
def test_a_count_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        digits.Settings(**{name: 0})


@pytest.mark.parametrize("weight_decays", [(), (1.0,), (0.0, -1.0)])
def test_weight_decays_that_cannot_be_compared_are_refused(weight_decays):
    with pytest.raises(ValueError, match="two or more weight decays"):
        digits.Settings(weight_decays=weight_decays)
