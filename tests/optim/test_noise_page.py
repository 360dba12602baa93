"""The page on the noise of the curvature: its script on little data, and what it says against the file."""

import argparse
import json
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

import ritz

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "noise.json"


@pytest.fixture(scope="module")
def study(script):
    return script("noise")


@pytest.fixture(scope="module")
def page(script):
    return script("pages.noise")


@pytest.fixture(scope="module")
def report():
    return json.loads(RESULTS.read_text(encoding="utf8"))


def digits(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(num, 1, 8, 8, generator=generator), torch.randint(10, (num,), generator=generator)


# ------------------------------------------------------------------------------------------------ the script


def test_the_truth_is_the_spread_of_the_hessians_of_all_samples(study):
    model, data = study.tiny(8, 0), digits(7)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data)
    each = torch.stack([ritz.Hessian(risk.on((data[0][i : i + 1], data[1][i : i + 1]))).dense() for i in range(7)])
    found = study.truth(model, data, size=3)
    assert found["dim"] == 226
    assert found["noise"] == pytest.approx(float(each.var(0).sum()) / 3 / 226)
    spread = torch.einsum("nij,njk->ik", each - each.mean(0), each - each.mean(0)) / 6
    assert found["directions"] == pytest.approx(float(spread.trace() ** 2 / spread.square().sum()))


def test_an_estimate_from_batches_drawn_has_the_truth_as_its_mean(study):
    model, data = study.tiny(8, 0), digits(64)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data)
    values = [float(study.drawn(risk, 4, 4, seed).value) for seed in range(25)]
    error = statistics.stdev(values) / 5
    assert abs(statistics.fmean(values) - study.truth(model, data, 4)["noise"]) < 4 * error


def test_batches_of_an_epoch_are_disjoint_and_the_same_for_the_same_seed(study):
    data = torch.arange(10), torch.arange(10)
    first, second = ([next(rows)[0] for _ in range(4)] for rows in (study.order(data, 4, 0), study.order(data, 4, 0)))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({int(row) for batch in first[:2] for row in batch}) == 8


def test_the_loops_of_all_cases_are_timed(study):
    torch.set_default_dtype(torch.float32)
    args = argparse.Namespace(lr=0.1, every=4, batch_size=8, rounds=1)
    X, y = digits(32)
    (row,) = study.costs(args, (X.float(), y))
    assert set(row) == {f"{family}/{way}" for family in ("SGD", "KFAC") for way in ("drawn", "streaming")}
    assert all(seconds > 0 for both in row.values() for seconds in both)


# -------------------------------------------------------------------------------------------------- the page


def test_shares_are_those_of_the_steps_of_the_same_loop(page):
    row = {f"{family}/{way}": [4.0, 1.0] for family in ("SGD", "KFAC") for way in ("drawn", "streaming")}
    assert page.shares({"costs": [row]})["SGD", "drawn"] == pytest.approx([25.0])
    table = page.cost_table({"costs": [row]})
    assert "| SGD | drawn | 40 | 25 (25 to 25) | met |" in table
    assert "| KFAC | streaming | 15 | 25 (25 to 25) | **missed** |" in table


def test_what_a_first_run_gave_is_told_where_there_was_one(page):
    assert page.loops_apart({}).startswith("Nothing")
    row = {f"{family}/{way}": 2.0 for family in ("SGD", "KFAC") for way in ("drawn", "streaming")}
    text = page.loops_apart({"first_costs": [row | {"SGD/None": 1.6, "KFAC/None": 1.0}]})
    assert "for SGD 25 % in the median (25 to 25), for KFAC 100 %" in text.replace("\n", " ")


def test_the_file_has_all_that_the_page_tells(report):
    assert report["settings"]["every"] == 100
    assert [row["steps"] for row in report["at_rest"]] == [0, report["settings"]["steps"]]
    assert len(report["costs"]) == report["settings"]["rounds"] >= 5
    assert all(part["truth"]["dim"] == 226 for part in report["coverage"])
    assert all(0.9 < row["ratio"] < 1.1 for part in report["coverage"] for row in part["rows"])  # without bias


def test_the_page_is_the_one_that_the_file_gives(page, report):
    text = page.PAGE.format(**page.facts(report))
    assert text == (ROOT / "docs" / "noise.md").read_text(encoding="utf8")
