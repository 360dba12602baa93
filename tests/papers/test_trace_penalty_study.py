"""Does the trace penalty help? What the paper's tables say, and what both arms give at equal seed."""

import json

import pytest
import torch

from ritz.papers import cifar_spectra, trace_penalty
from ritz.papers.experiment import Setting
from ritz.papers.recipe import fingerprint

MODES = ("in evaluation mode", "by batch statistics")


def images(name, root, device, split):
    """Noise in the place of CIFAR-100."""
    g = torch.Generator().manual_seed(len(split))
    return torch.randint(256, (20, 3, 32, 32), generator=g, dtype=torch.uint8), torch.randint(100, (20,), generator=g)


def rows_of(gains, traces=0.5, training=0.0):
    """A pair of rows for each gain in accuracy; the gap in loss narrows by a tenth of it."""
    rows = []
    for seed, gain in enumerate(gains):
        for arm in (trace_penalty.PLAIN, trace_penalty.PENALISED):
            other = arm == trace_penalty.PENALISED
            curvature = {"ggn_trace": [10.0 * (traces if other else 1.0)] * 3}
            rows.append({
                "arm": arm, "seed": seed, "title": "WideResNet-28-10", "published": True, "epochs": 300,
                "parameters": 1, "images": 1, "lanczos_steps": 1, "probes": 2, "eval": curvature, "train": curvature,
                "train_accuracy": 99.0 + training * other, "test_accuracy": 80.0 + seed + gain * other,
                "val_accuracy": 79.0 + seed + gain * other,
                **{f"gap_error_{name}": 20.0 - seed + (training - gain) * other for name in ("val", "test")},
                **{f"gap_loss_{name}": 1.0 - seed - gain / 10 * other for name in ("val", "test")},
            })  # fmt: skip
    return rows


def verdicts(rows):
    return {claim.text: claim.verdict for claim in trace_penalty.claims(rows)}


def test_the_printed_gain_is_not_significant_by_welchs_test():
    from scipy.stats import t, ttest_ind_from_stats

    gain = trace_penalty.printed_gain()
    test = ttest_ind_from_stats(*trace_penalty.WITH, 4, *trace_penalty.WITHOUT, 4, equal_var=False)
    assert gain.value / gain.stderr == pytest.approx(float(test.statistic))
    assert 2 * t.sf(float(test.statistic), gain.rule.dof) == pytest.approx(float(test.pvalue))
    assert test.pvalue > 0.05
    assert gain.interval()[0] < 0


def test_the_gain_is_judged_at_equal_seed():
    gain, tests = "accuracy on the test set, with the penalty minus without", []
    for gains in ((0.25, 0.28, 0.27, 0.26), (1.0, 1.1, 0.9, 1.0), (-0.5, -0.6, -0.4, -0.5), (-1.0, 2.0, 0.5, -0.5)):
        tests.append(verdicts(rows_of(gains))[gain])
    assert tests == ["holds", "holds in direction", "refuted", "not decidable"]  # seeds differ by more than the gain


def test_that_the_trace_falls_is_a_claim_of_its_own():
    text = "Tr G falls: with the penalty over without, BatchNorm by batch statistics"
    assert [verdicts(rows_of((0.1, 0.2), traces))[text] for traces in (0.5, 1.5)] == ["holds", "refuted"]


def test_that_training_accuracy_is_the_same_is_a_claim_of_its_own():
    text = "training accuracy, with the penalty minus without"
    assert [verdicts(rows_of((0.1, 0.2), 0.5, lost))[text] for lost in (0.0, -1.0)] == ["holds", "refuted"]


def test_a_penalty_that_costs_accuracy_may_narrow_the_gap():
    found = verdicts(rows_of((-1.0, -1.1, -0.9), training=-3.0))
    assert found["accuracy on the test set, with the penalty minus without"] == "refuted"
    assert found["gap in error to the test set, with the penalty minus without"] == "holds in direction"
    assert found["gap in loss to the test set, with the penalty minus without"] == "refuted"
    found = verdicts(rows_of((0.26, 0.28, 0.27)))
    for what in ("error", "loss"):
        assert found[f"gap in {what} to the last 5,000, with the penalty minus without"] == "holds"


def test_differences_are_judged_on_what_was_run_but_that_both_fit_alike_needs_all_of_training():
    rows = [{**row, "epochs": 8, "published": False} for row in rows_of((0.1, 0.2), training=-1.0)]
    claims = {claim.text: claim for claim in trace_penalty.claims(rows)}
    training, *printed = [claim for claim in claims.values() if claim.short_of]
    assert training.text == "training accuracy, with the penalty minus without"
    assert [claim.expected for claim in printed] == [80.75, 80.48, 99.992, 99.992]  # table 7
    assert {claim.verdict for claim in printed} == {"not decidable"}
    assert (training.verdict, training.short_of) == (
        "not decidable", "8 of 300 epochs; a smaller network than WideResNet-28-10"
    )  # fmt: skip
    assert "8 of 300 epochs" in training.evidence
    assert "the probe is of 25 % of each batch, eta is as published" in training.evidence
    ours = [claim.text.partition(", with ")[0] for claim in claims.values() if claim.ours]
    assert ours == [
        "accuracy on the test set",
        "gap in error to the test set",
        "gap in loss to the last 5,000",
        "gap in loss to the test set",
        *[f"Tr G falls: with the penalty over without, BatchNorm {how}" for how in MODES],
    ]


@pytest.mark.parametrize(("accuracy", "verdict"), [(80.6, "holds"), (78.0, "refuted")])
def test_the_printed_validation_accuracies_are_judged_on_the_last_5_000_after_the_whole_training(accuracy, verdict):
    rows = [{**row, "val_accuracy": accuracy + row["seed"] / 100} for row in rows_of((0.1, 0.2, 0.3))]
    found = verdicts(rows)
    for how in ("with", "without"):
        assert found[f"accuracy on the last 5,000, {how} the penalty"] == verdict


def test_claims_want_both_arms_of_two_seeds():
    with pytest.raises(ValueError, match="each with and without the penalty, got 3 rows"):
        trace_penalty.claims(rows_of((0.1, 0.2))[:-1])
    with pytest.raises(ValueError, match="two seeds or more"):
        trace_penalty.claims(rows_of((0.1,)))


@pytest.mark.filterwarnings("ignore:products in float32 are off")  # one step from a random start
def test_the_study_runs_at_smoke_budget_and_the_penalty_reaches_the_weights(monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(cifar_spectra, "load", images)
    setting = Setting("smoke", runs=tmp_path)
    rows, claims = trace_penalty.run(setting, lambda *args: None)
    assert [row["eta"] for row in rows] == [0.0, 1e-4] * 2
    assert all(row["stop"] == "finished" for row in rows)
    for plain, penalised in zip(rows[::2], rows[1::2], strict=True):
        assert plain["weight_norm"] != penalised["weight_norm"]
        assert plain["train"]["ggn_trace"][0] > 0
    assert len(claims) == 15
    assert "the probe is of 50 % of each batch" in claims[-1].evidence
    json.dumps(rows)
    folders = sorted(path.name for path in (tmp_path / "cifar-wideresnet").iterdir())
    assert folders == [f"{arm}-seed-{seed}" for arm in ("decay-0.0005", "eta-0.0001") for seed in (0, 1)]
    shared = json.loads((tmp_path / "cifar-wideresnet" / "decay-0.0005-seed-1" / "run.json").read_text())
    assert shared["fingerprint"] == fingerprint(cifar_spectra.sgd_recipe("wideresnet", setting, 1, 5e-4))
