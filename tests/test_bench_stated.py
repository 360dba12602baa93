"""Figures that docstrings state: the script that counts them holds intervals against truths that are right."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import ritz

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


@pytest.fixture(scope="module")
def stated(script):
    return script("stated")


def test_the_shrinkage_of_the_pool_is_that_of_dense_hessians(stated):
    torch.manual_seed(0)
    X, y = torch.randn(12, 3), torch.randint(4, (12,))
    risk = ritz.Risk(nn.Linear(3, 4), nn.CrossEntropyLoss(), (X, y))
    each = torch.stack([ritz.Hessian(risk.on((x[None], c[None]))).dense() for x, c in zip(X, y, strict=True)])
    H, dim = each.mean(0), risk.dim
    s2 = float((each - H).square().sum()) / 12 / stated.BATCH_SIZE / dim
    truth = ritz.rmt.shrinkage(s2, mean=float(H.trace()) / dim, second=float(H.square().sum()) / dim)
    found = stated._true_shrinkage(risk, X)
    for name in ("beta", "damping", "error"):
        assert getattr(found, name).value == pytest.approx(getattr(truth, name).value)


def test_softmax_regression_is_at_its_minimum(stated):
    torch.manual_seed(0)
    X, y = torch.randn(40, 5), torch.randint(10, (40,))
    model = stated._minimum(X, y)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
    slope = risk.gradient() + stated.DECAY * risk.space.join(risk.params())
    assert float(slope.norm()) < 1e-4


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / f"stated_{name}.json").read_text())["rows"]


def test_five_times_the_squared_skewness_is_what_a_mean_of_losses_needs():
    """As the docstring of `ritz.measures.gap.bootstrapped` and docs/measures.md say."""
    enough = [row for row in rows("means") if row["samples"] >= 4.6 * row["skewness"] ** 2]
    assert len(enough) >= 9
    assert min(row["covers"] for row in enough) > 0.915
    few = [row["covers"] for row in rows("means") if row["skewness"] == 8 and row["samples"] <= 10]
    assert (min(few), max(few)) == pytest.approx((0.41, 0.65), abs=0.006)


def test_intervals_of_a_shrinkage_cover_as_its_docstring_says():
    found = rows("shrinkage")
    few = [row["error"] for row in found if row["batches"] <= 4]
    many = [row["error"] for row in found if row["batches"] >= 8]
    assert (min(few), max(few)) == pytest.approx((0.87, 0.91), abs=0.006)
    assert (min(many), max(many)) == pytest.approx((0.94, 0.97), abs=0.006)
    assert min(row["damping"] for row in found) > 0.915
    assert min(row["beta"] for row in found) > 0.94


def test_lambda_1_of_softmax_regression_depends_on_the_images():
    """As the docstring of `ritz.papers.softmax` says."""
    found = {row["images"]: round(row["lambda_max"], 2) for row in rows("softmax")}
    assert (found["the first"], found["the last"], found["from 5,000 on"]) == (15.62, 15.55, 15.92)
    drawn = [value for name, value in found.items() if name.startswith("drawn")]
    assert (min(drawn), max(drawn)) == (15.39, 15.59)
