"""A claim computes its verdict from what was stated and what was measured, and from nothing else."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ritz
from ritz import storage
from ritz.intervals import StudentT
from ritz.papers.base import Claim, claims_table
from ritz.results import Estimate


def claim(**fields):
    return Claim(
        **{"paper": "seed 000", "where": "equation 1", "text": "x", "expected": 1.0, "measured": 1.0, **fields}
    )


def noisy(value, stderr=1.0):
    """With an interval of about value -+ 2 stderr."""
    return Estimate(name="x", value=value, stderr=stderr, rule=StudentT(1000))


@pytest.mark.parametrize(
    ("relation", "measured", "verdict"),
    [
        ("=", 1.05, "holds"),
        ("=", 0.95, "holds"),
        ("=", 1.2, "refuted"),
        ("=", 0.8, "refuted"),
        ("<=", -9.0, "holds"),
        ("<=", 1.05, "holds"),
        ("<=", 1.2, "refuted"),
        (">=", 9.0, "holds"),
        (">=", 0.95, "holds"),
        (">=", 0.8, "refuted"),
        ("=", math.inf, "refuted"),
        (">=", math.inf, "holds"),
        ("=", math.nan, "cannot tell"),
        ("<=", math.nan, "cannot tell"),
    ],
)
def test_a_number_is_compared_give_or_take_the_tolerance(relation, measured, verdict):
    assert claim(relation=relation, measured=measured, tolerance=0.1).verdict == verdict


@pytest.mark.parametrize(
    ("relation", "value", "verdict"),
    [
        ("=", 1.0, "holds"),  # -1 to 3, all within 1 -+ 3
        ("=", 3.5, "cannot tell"),  # 1.5 to 5.5
        ("=", 7.0, "refuted"),  # 5 to 9
        ("<=", 1.0, "holds"),
        ("<=", 3.5, "cannot tell"),
        ("<=", 7.0, "refuted"),
        (">=", 7.0, "holds"),
        (">=", -1.5, "cannot tell"),
        (">=", -5.0, "refuted"),
    ],
)
def test_an_estimate_is_compared_by_its_whole_interval(relation, value, verdict):
    assert claim(relation=relation, measured=noisy(value), tolerance=3.0).verdict == verdict


def test_an_equality_measured_with_noise_needs_a_tolerance_to_hold():
    assert claim(measured=noisy(1.0)).verdict == "cannot tell"
    assert claim(measured=noisy(1.0, stderr=0.0)).verdict == "holds"


def test_one_probe_decides_nothing():
    alone = Estimate(name="x", value=5.0, stderr=math.nan, rule=StudentT(0))
    assert claim(measured=alone).verdict == "cannot tell"


@pytest.mark.parametrize(("measured", "verdict"), [(True, "holds"), (False, "refuted")])
def test_a_truth_value_is_compared_with_a_truth_value(measured, verdict):
    assert claim(expected=True, measured=measured).verdict == verdict


@given(
    value=st.floats(-5, 5), stderr=st.floats(0.01, 3), tolerance=st.floats(0, 3), relation=st.sampled_from(["<=", ">="])
)
def test_more_tolerance_never_refutes_and_less_error_never_blurs(value, stderr, tolerance, relation):
    order = ["refuted", "cannot tell", "holds"]
    before, after = (
        order.index(claim(measured=noisy(value, stderr), relation=relation, tolerance=t).verdict)
        for t in (tolerance, tolerance + 1)
    )
    assert after >= before
    decided = claim(measured=noisy(value, stderr), relation=relation, tolerance=tolerance).verdict
    sharper = claim(measured=noisy(value, stderr / 10), relation=relation, tolerance=tolerance).verdict
    assert decided in ("cannot tell", sharper)


def test_the_verdict_cannot_be_written_by_hand():
    with pytest.raises(dataclasses.FrozenInstanceError):
        claim().measured = 2.0
    with pytest.raises(TypeError, match="verdict"):
        claim(verdict="holds")


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"expected": "1"}, TypeError, r"expected must be a number or a bool, got str; use float\(x\)"),
        ({"measured": torch.tensor(1.0)}, TypeError, "measured must be a number, an Estimate or a bool, got Tensor"),
        ({"measured": None}, TypeError, "got NoneType"),
        ({"expected": True, "measured": 1.0}, TypeError, "a bool is compared with a bool, got True and 1"),
        ({"expected": 1.0, "measured": True}, TypeError, "a bool is compared with a bool, got 1.0 and yes"),
        ({"measured": Estimate(name="x", value=torch.ones(3))}, ValueError, "an estimate of 3; reduce it first"),
        ({"relation": "<"}, ValueError, "relation must be '=', '<=' or '>=', and '=' for a bool, got '<'"),
        ({"expected": True, "measured": True, "relation": ">="}, ValueError, "'=' for a bool, got '>='"),
        ({"expected": math.nan}, ValueError, "expected must be a number and tolerance >= 0, got nan"),
        ({"tolerance": -1.0}, ValueError, "got 1.0 and -1.0"),
        ({"tolerance": math.nan}, ValueError, "got 1.0 and nan"),
    ],
)
def test_what_cannot_be_judged_is_refused(fields, error, match):
    with pytest.raises(error, match=match):
        claim(**fields)


@pytest.mark.parametrize("measured", [0.5, True, noisy(3.0), Estimate(name="x", value=1.0, samples=torch.ones(4))])
def test_a_claim_comes_back_from_disk_equal(measured, tmp_path):
    made = claim(expected=isinstance(measured, bool) or 1.0, measured=measured, evidence="seen")
    assert ritz.load(made.save(tmp_path / "claim")) == made
    both = (made, claim(text="another"))
    assert ritz.load(storage.save(both, tmp_path / "claims")) == both
    assert made != dataclasses.replace(made, evidence="other")
    assert made != "claim"


# ------------------------------------------------------------------------------------------------- the table


def cells(table):
    """The rows of a Markdown table below its head."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_the_table_shows_what_is_allowed_and_what_was_measured():
    rows = cells(
        claims_table(
            [
                claim(expected=2, measured=2.0004, tolerance=0.001),
                claim(relation="<=", measured=noisy(7.0, 0.02)),
                claim(relation=">=", expected=0.0, measured=noisy(0.5)),
                claim(expected=True, measured=False),
            ]
        )
    )
    assert [row[2:] for row in rows] == [
        ["2 ± 0.001", "2", "holds"],
        ["≤ 1", "7.000 ± 0.020", "**refuted**"],
        ["≥ 0", "0.5 ± 1.0", "**cannot tell**"],
        ["yes", "no", "**refuted**"],
    ]
    assert rows[0][0] == "seed 000, equation 1"


def test_a_bar_in_a_text_does_not_cut_a_cell():
    (row,) = claims_table([claim(text="|w| >= 1")]).splitlines()[2:]
    assert "\\|w\\| >= 1" in row
    assert row.replace("\\|", "").count("|") == 6


def test_no_claims_give_a_table_of_no_rows():
    assert claims_table([]).splitlines()[1:] == ["| --- | --- | --- | --- | --- |"]


def test_only_claims_go_into_the_table():
    with pytest.raises(TypeError, match="expected claims, got str"):
        claims_table(["claim"])
