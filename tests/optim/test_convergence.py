"""The convergence study: its script on small data, and what the page says against the runs on file."""

import argparse
import importlib
import json
import statistics
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "convergence.json"


@pytest.fixture(scope="module")
def study(script):
    return script("convergence")


@pytest.fixture(scope="module")
def page(study):
    return importlib.import_module("pages.convergence")


@pytest.fixture(scope="module")
def report():
    return json.loads(RESULTS.read_text(encoding="utf8"))


@pytest.fixture
def single():
    """The script trains in torch's default precision, float32."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


ARGS = argparse.Namespace(quick=True, images=32, batch_size=8, epochs=2, every=2, num_batches=2)


# ---------------------------------------------------------------------------------------------- the script


def test_an_arm_that_takes_something_of_another_comes_after_it(study):
    before = set()
    for arm in study.arms():
        assert {arm.rate_of, arm.mean_of} - {None} <= before
        assert arm.name not in before
        before.add(arm.name)


def test_two_arms_of_one_seed_share_the_start_and_the_order_of_batches(study, single):
    first, second = study.network(3), study.network(3)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    assert sum(p.numel() for p in first.parameters()) == 11_018
    orders = [study.batches(10, 4, seed) for seed in (0, 0, 1)]
    rows = [torch.stack([next(order) for _ in range(6)]) for order in orders]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert all(len(set(epoch.flatten().tolist())) == 8 for epoch in rows[0].split(2))  # two of ten are left over


def test_a_run_can_be_repeated_to_the_digit_and_tells_what_was_learned(study, single):
    data = study.images(ARGS)
    arm = next(arm for arm in study.arms() if arm.streaming)
    rows = [study.train(arm, 0.001, 0, data, ARGS, marks=[1, 2]) for _ in range(2)]
    assert [entry[2:] for entry in rows[0]["curve"]] == [entry[2:] for entry in rows[1]["curve"]]
    assert [entry[0] for entry in rows[0]["curve"]] == [1, 2]
    assert rows[0]["learned"] == rows[1]["learned"]
    assert [entry[0] for entry in rows[0]["beside"]] == [2, 4, 6, 8]
    assert rows[0]["learned"][0][1] == pytest.approx(arm.damping + rows[0]["learned"][0][2])


def test_the_second_look_of_the_streaming_arm_changes_nothing(study, single):
    data = study.images(ARGS)
    arm = next(arm for arm in study.arms() if arm.streaming)
    row = study.train(arm, 0.001, 0, data, ARGS, marks=[2])
    told = study.Dampings.step
    try:
        study.Dampings.step = lambda self, batch: self.own.step(batch)
        alone = study.train(arm, 0.001, 0, data, ARGS, marks=[2])
    finally:
        study.Dampings.step = told
    assert [entry[2:] for entry in row["curve"]] == [entry[2:] for entry in alone["curve"]]


def test_a_run_whose_loss_explodes_is_given_up_and_says_when(study, single):
    data = study.images(ARGS)
    row = study.train(study.arms()[0], 1e6, 0, data, ARGS, marks=[1, 2])
    assert row["lost"] in (1, 2)
    assert row["curve"] == []
    assert study.train(study.arms()[0], 1e6, 0, data, ARGS)["val"] is None


def test_a_mean_damping_counts_each_value_from_its_refresh_to_the_next(study):
    row = {"arm": "a", "seed": 0, "damping": 1.0, "learned": [[10, 3.0], [20, 5.0]], "steps": 40, "lost": None}
    assert study.mean_damping({"runs": [row]}, "a", 0) == pytest.approx((10 * 1 + 10 * 3 + 20 * 5) / 40)
    row |= {"lost": 25}
    assert study.mean_damping({"runs": [row]}, "a", 0) == pytest.approx((10 * 1 + 10 * 3 + 5 * 5) / 25)


def test_differences_are_of_the_same_seeds_and_leave_out_what_was_lost(page):
    def row(arm, seed, loss, lost=None):
        return {"arm": arm, "seed": seed, "lost": lost, "curve": [[1, 1.0, loss, 0.0, loss, 0.0]]}

    runs = [row("a", 0, 1.0), row("a", 1, 2.0), row("a", 2, 9.0, lost=5), row("b", 0, 0.5), row("b", 1, 1.0)]
    runs += [row("b", 2, 0.0), row("b", 3, 4.0)]
    found = page.paired({"runs": runs}, "a", "b", "train")
    assert float(found.value) == pytest.approx(0.75)
    assert float(found.stderr) == pytest.approx(0.25)
    assert page.paired({"runs": runs[2:]}, "a", "b", "train") is None


# ------------------------------------------------------------------------------------------------- results


def test_every_arm_on_file_ran_with_every_seed_at_its_chosen_rate(study, report):
    seeds = list(range(report["settings"]["seeds"]))
    assert len(seeds) >= 3
    for arm in study.arms():
        rows = [row for row in report["runs"] if row["arm"] == arm.name]
        assert [row["seed"] for row in rows] == ([] if arm.grid_only else seeds)
        assert {row["lr"] for row in rows} <= {report["chosen"][arm.rate_of or arm.name]}


def test_chosen_rates_are_those_of_the_lowest_held_out_loss(study, report):
    for arm, lr in report["chosen"].items():
        rates = {row["lr"] for row in report["grid"] if row["arm"] == arm}
        assert len(rates) == 5
        assert min(rates, key=lambda rate: study.grid_loss(report, arm, rate)) == lr


def test_no_seed_of_the_study_chose_a_rate(report):
    assert not {row["seed"] for row in report["grid"]} & {row["seed"] for row in report["runs"]}


def test_flat_controls_ran_at_the_mean_of_what_was_learned(study, report):
    for arm in study.arms():
        for row in report["runs"]:
            if row["arm"] == arm.name and arm.mean_of:
                assert row["damping"] == pytest.approx(study.mean_damping(report, arm.mean_of, row["seed"]), rel=1e-4)


def test_kfac_as_it_comes_is_lost_in_its_first_steps_and_a_clipped_one_is_not(page, report):
    found = page.beginnings(report)
    assert found["clipped"] == found["fresh"] == 0 < found["as_it_comes"]
    assert found["latest"] < report["settings"]["every"]  # before a learned damping has looked
    learned = [row for row in report["grid"] if row["arm"].endswith(", learned") and "kl_clip" not in row["arm"]]
    assert found["same"] == sum(row["lost"] is not None for row in learned) > 0
    assert all(row["largest"][20] > 100 * row["largest"][0] for row in report["growth"])
    assert not any(row["lost"] for row in report["grid"] if "kl_clip" in row["arm"])


def test_at_equal_epochs_kfac_is_ahead_and_at_equal_time_adam_has_caught_up(page, report):
    ends = {
        (other, key): page.paired(report, "KFAC 0.03, kl_clip", other, key).interval()
        for other in ("SGD", "Adam", f"Adam{page.LONG}")
        for key in ("train", "error")
    }
    assert ends["SGD", "train"][1] < 0
    assert ends["Adam", "train"][1] < 0
    assert ends["Adam", "error"][1] < 0
    assert ends[f"Adam{page.LONG}", "train"][0] > 0
    low, high = ends[f"Adam{page.LONG}", "error"]
    assert low < 0 < high


def test_no_learned_damping_had_a_lower_test_error_than_a_flat_one(page, report):
    for damping in page.DAMPINGS:
        own = f"KFAC {damping:g}, kl_clip, learned"
        for other in (f"KFAC {damping:g}, kl_clip", f"KFAC, kl_clip, flat at the mean from {damping:g}"):
            assert page.paired(report, own, other, "error").value > 0


def test_ledoit_wolf_stayed_at_its_start_and_the_bulk_edge_did_worse(page, report):
    flat = "KFAC 0.003, kl_clip"
    for key in page.KEYS:
        assert page.ended(report, f"{flat}, LedoitWolf", key) == page.ended(report, flat, key)
        assert page.paired(report, f"{flat}, BulkEdge", flat, key).interval()[0] > 0


def test_a_refresh_by_qr_trains_as_one_by_eigh(page, report):
    for key, most in (("train", 0.01), ("test", 0.01), ("error", 0.5)):
        low, high = page.refreshed(report, key).interval()
        assert -most < low < 0 < high < most
    assert statistics.fmean(page.ratios(report, page.QR[0])) < statistics.fmean(page.ratios(report, page.QR[1]))


def test_streaming_agrees_with_fresh_batches_after_the_first_window(page, report):
    rows = page.learned(report, "KFAC 0.03, kl_clip, learned, streaming")
    over = [
        sum(entry[2] for entry in row["learned"][1:]) / sum(entry[2] for entry in row["beside"][1:]) for row in rows
    ]
    low, high = page.mean(over).interval()
    assert 0.7 < low < 1 < high < 1.3
    assert page.streamed(report)["stream_low"] > 1


def test_the_page_is_the_one_that_the_file_gives(page, report):
    assert page.text(report) == (ROOT / "docs" / "convergence.md").read_text(encoding="utf8")
    picture = ROOT / "docs" / "convergence.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 250_000
