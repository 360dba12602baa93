import dataclasses
import json
import math

import pytest
import torch

import ritz
from ritz.intervals import StudentT
from ritz.papers import digits
from ritz.results import Estimate

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
    row = tiny.rows[number]
    model = solution(row.weight_decay)
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
        estimate = row.values[key]
        low, high = estimate.interval(0.999)
        slack = 1e-9 * abs(true)
        assert low - slack <= true <= high + slack, key
        assert high - low < 0.2 * abs(true), key  # or the line above could not fail


def test_gaps_are_those_of_the_risks_and_of_counting(tiny):
    train_data, test_data = digits.load_digits(dtype=torch.float64)
    model = solution(0.0)
    risks = [ritz.Risk(model, torch.nn.CrossEntropyLoss(), data) for data in (train_data, test_data)]
    row = tiny.rows[0]
    assert math.isclose(row.train_loss, risks[0].loss(), rel_tol=1e-12)
    assert math.isclose(row.values["gap_loss"].value, risks[1].loss() - risks[0].loss(), rel_tol=1e-9)
    wrong = [float((model(X).argmax(1) != y).double().mean()) for X, y in (train_data, test_data)]
    gap = row.values["gap_error"]
    assert math.isclose(gap.value, 100 * (wrong[1] - wrong[0]), rel_tol=1e-9)
    binomial = 100 * math.sqrt(wrong[0] * (1 - wrong[0]) / 1200 + wrong[1] * (1 - wrong[1]) / 597)
    assert math.isclose(gap.stderr, binomial, rel_tol=1e-9)


def test_solutions_share_their_start_their_batches_and_nothing_else(tiny):
    same, other = solution(0.0), solution(5e-2)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), solution(0.0).parameters(), strict=True))
    assert tiny.rows[1].values["weight_norm"].value < tiny.rows[0].values["weight_norm"].value
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


def made_row(weight_decay: float, *, gap: float, norm: float, spread: float = 1e-3) -> digits.Row:
    """A row with a given gap in loss and the same value for every measure."""
    noise = torch.linspace(-1, 1, 50)
    train, test = torch.zeros(50), gap + spread * noise * (1 + weight_decay)
    exact = {key: Estimate(name=key, value=norm, exact=True) for key in digits.MEASURES}
    gaps = {key: Estimate(name=key.replace("_", " in "), value=gap) for key in ("gap_error", "gap_loss")}
    return digits.Row(
        weight_decay=weight_decay, train_error=0.0, train_loss=0.0, values={**gaps, **exact}, spectrum=None,
        losses=(train, test), mistakes=(train, test),
    )  # fmt: skip


def made_study(*rows: digits.Row) -> digits.Study:
    return digits.Study(settings=digits.Settings(), rows=rows)


def test_a_measure_that_rises_while_the_gap_falls_is_said_to_be_ordered_against_it():
    found = made_study(*(made_row(d, gap=1 - d, norm=1 + d) for d in (0.0, 0.1, 0.2)))
    assert digits.agreement(found, "trace") == digits.Agreement(same=0, opposite=3, pairs=3)
    text = " ".join(digits.findings(found))
    assert "Ordered against it: Tr H, Tr H²" in text
    assert "Ordered as the gap" not in text
    assert "the sharper of the two solutions has the smaller gap" in text


def test_a_measure_that_falls_with_the_gap_is_said_to_be_ordered_as_the_gap():
    found = made_study(*(made_row(d, gap=1 - d, norm=1 - d) for d in (0.0, 0.1, 0.2)))
    text = " ".join(digits.findings(found))
    assert "Ordered as the gap: Tr H, Tr H²" in text
    assert "against" not in text
    assert "the sharper of the two solutions has the larger gap" in text


def test_a_measure_that_goes_up_and_down_is_neither():
    rows = [made_row(d, gap=1 - d, norm=n) for d, n in ((0.0, 1.0), (0.1, 3.0), (0.2, 2.0))]
    assert digits.agreement(made_study(*rows), "trace") == digits.Agreement(same=1, opposite=2, pairs=3)
    assert "Neither: Tr H" in " ".join(digits.findings(made_study(*rows)))


def test_gaps_within_their_noise_order_nothing():
    found = made_study(*(made_row(d, gap=1 - 1e-3 * d, norm=1 + d, spread=10.0) for d in (0.0, 0.5)))
    assert digits.agreement(found, "trace").verdict == "undecided"
    text = " ".join(digits.findings(found))
    assert "within its own noise" in text
    assert "0 of 1 pairs" in text
    assert "too noisy to compare" in text


def test_a_difference_over_the_same_digits_is_known_better_than_either_gap():
    def row(shift: float) -> digits.Row:
        losses = torch.linspace(0, 5, 50)
        made = made_row(0.0, gap=0.0, norm=1.0)
        return dataclasses.replace(made, losses=(torch.zeros(50), losses * (1 + shift)))

    change = digits.difference(row(0.0), row(0.1), "gap_loss")
    assert math.isclose(change.value, 0.25, rel_tol=1e-6)
    assert change.stderr < 0.1 * float(torch.linspace(0, 5, 50).std() / math.sqrt(50)) * 1.01


def test_a_difference_of_probe_averages_is_taken_probe_by_probe():
    a, b = (
        Estimate(name="trace", value=float(s.mean()), stderr=9.0, samples=s, rule=StudentT(2))
        for s in (torch.tensor([1.0, 5.0, 9.0]), torch.tensor([2.0, 6.0, 10.0]))
    )
    rows = [dataclasses.replace(made_row(0.0, gap=0.0, norm=1.0), values={"trace": e}) for e in (a, b)]
    change = digits.difference(*rows, "trace")
    assert (change.value, change.stderr) == (1.0, 0.0)


# --------------------------------------------------------------------------------------------- files


def test_the_files_hold_the_table_and_the_spectra(tiny, tmp_path):
    written = digits.save(tiny, tmp_path)
    assert [path.name for path in written] == ["table.json", "spectrum-0.json", "spectrum-0.05.json"]
    table = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert [row["weight_decay"] for row in table["rows"]] == [0.0, 5e-2]
    assert table["num_params"] == 310
    for key, estimate in tiny.rows[1].values.items():
        assert table["rows"][1][key]["value"] == float(estimate.value)
        assert table["rows"][1][key]["convention"] == digits.MEANING[key]
    assert ritz.load(tmp_path / "spectrum-0.05") == tiny.rows[1].spectrum


@pytest.mark.parametrize("name", ["epochs", "batch_size", "num_steps", "num_probes"])
def test_a_count_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        digits.Settings(**{name: 0})


@pytest.mark.parametrize("weight_decays", [(), (1.0,), (0.0, -1.0)])
def test_weight_decays_that_cannot_be_compared_are_refused(weight_decays):
    with pytest.raises(ValueError, match="two or more weight decays"):
        digits.Settings(weight_decays=weight_decays)
