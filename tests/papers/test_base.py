"""A claim computes its verdict from what was stated and what was measured, and from nothing else."""

import dataclasses
import json
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
        ("=", math.nan, "not decidable"),
        ("<=", math.nan, "not decidable"),
    ],
)
def test_a_number_is_compared_give_or_take_the_tolerance(relation, measured, verdict):
    assert claim(relation=relation, measured=measured, tolerance=0.1).verdict == verdict


@pytest.mark.parametrize(
    ("relation", "value", "verdict"),
    [
        ("=", 1.0, "holds"),  # -1 to 3, all within 1 -+ 3
        ("=", 3.5, "not decidable"),  # 1.5 to 5.5
        ("=", 7.0, "refuted"),  # 5 to 9
        ("<=", 1.0, "holds"),
        ("<=", 3.5, "not decidable"),
        ("<=", 7.0, "refuted"),
        (">=", 7.0, "holds"),
        (">=", -1.5, "not decidable"),
        (">=", -5.0, "refuted"),
    ],
)
def test_an_estimate_is_compared_by_its_whole_interval(relation, value, verdict):
    assert claim(relation=relation, measured=noisy(value), tolerance=3.0).verdict == verdict


def test_an_equality_measured_with_noise_needs_a_tolerance_to_hold():
    assert claim(measured=noisy(1.0)).verdict == "not decidable"
    assert claim(measured=noisy(1.0, stderr=0.0)).verdict == "holds"


def test_one_probe_decides_nothing():
    alone = Estimate(name="x", value=5.0, stderr=math.nan, rule=StudentT(0))
    assert claim(measured=alone).verdict == "not decidable"


@pytest.mark.parametrize(
    ("relation", "expected", "reference", "measured", "verdict"),
    [
        ("=", 10.0, 0.0, 10.5, "holds"),
        ("=", 10.0, 0.0, 3.0, "holds in direction"),
        ("=", 10.0, 0.0, 90.0, "holds in direction"),  # too much of it
        ("=", 10.0, 0.0, math.inf, "holds in direction"),
        ("=", 10.0, 0.0, -3.0, "refuted"),
        ("=", 10.0, 0.0, 0.0, "refuted"),  # no difference where one was claimed, and no error bar
        ("=", 10.0, 0.0, math.nan, "not decidable"),
        ("=", 0.5, 1.0, 0.6, "holds"),
        ("=", -5.0, 1.0, 0.5, "holds in direction"),
        ("=", -5.0, 1.0, 1.0, "refuted"),
        (">=", 10.0, 0.0, 20.0, "holds"),
        (">=", 10.0, 0.0, 3.0, "holds in direction"),
        (">=", 10.0, 0.0, -3.0, "refuted"),
        ("<=", -10.0, 0.0, -3.0, "holds in direction"),
        ("<=", -10.0, 0.0, 3.0, "refuted"),
        ("=", 0.5, 0.0, -0.4, "holds"),  # the tolerance says that it is the same number
        ("=", 10.0, 0.0, noisy(10.0, 0.1), "holds"),
        ("=", 10.0, 0.0, noisy(10.0), "holds in direction"),  # 8 to 12: the number is open, the direction is not
        ("=", 10.0, 0.0, noisy(5.0), "holds in direction"),
        ("=", 10.0, 0.0, noisy(1.0), "not decidable"),  # -1 to 3
        ("=", 10.0, 0.0, noisy(-1.0), "not decidable"),
        ("=", 10.0, 0.0, noisy(-3.0), "refuted"),
        ("=", 0.5, 0.0, noisy(-1.5, 0.6), "not decidable"),  # -2.7 to -0.3, and -0.4 is allowed
        ("=", 10.0, 0.0, Estimate(name="x", value=5.0, stderr=math.nan, rule=StudentT(0)), "not decidable"),
    ],
)
def test_on_the_right_side_of_the_reference_a_claim_holds_in_direction(
    relation, expected, reference, measured, verdict
):
    made = claim(relation=relation, expected=expected, reference=reference, measured=measured, tolerance=1.0)
    assert made.verdict == verdict


@given(
    measured=st.floats(-5, 5), stderr=st.floats(0, 3), expected=st.floats(-5, 5), reference=st.floats(-5, 5),
    tolerance=st.floats(0, 3),
)  # fmt: skip
def test_a_reference_tells_direction_and_leaves_what_holds(measured, stderr, expected, reference, tolerance):
    fields = {"measured": noisy(measured, stderr), "expected": expected, "tolerance": tolerance}
    if expected == reference:
        return
    without, with_one = claim(**fields).verdict, claim(reference=reference, **fields).verdict
    assert (without == "holds") == (with_one == "holds")
    assert with_one != "refuted" or without == "refuted"
    mirrored = claim(measured=noisy(-measured, stderr), expected=-expected, tolerance=tolerance, reference=-reference)
    assert mirrored.verdict == with_one


def test_a_claim_that_was_saved_without_a_reference_is_read(tmp_path):
    path = claim(evidence="seen").save(tmp_path / "claim")
    tree = json.loads(path.read_text(encoding="utf8"))
    assert tree["result"]["fields"].pop("reference", "") is None
    del tree["checksum"]  # which files had none of then
    path.write_text(json.dumps(tree), encoding="utf8")
    assert ritz.load(path) == claim(evidence="seen")


@pytest.mark.parametrize(("measured", "verdict"), [(True, "holds"), (False, "refuted")])
def test_a_truth_value_is_compared_with_a_truth_value(measured, verdict):
    assert claim(expected=True, measured=measured).verdict == verdict


@given(
    value=st.floats(-5, 5), stderr=st.floats(0.01, 3), tolerance=st.floats(0, 3), relation=st.sampled_from(["<=", ">="])
)
def test_more_tolerance_never_refutes_and_less_error_never_blurs(value, stderr, tolerance, relation):
    order = ["refuted", "not decidable", "holds"]
    before, after = (
        order.index(claim(measured=noisy(value, stderr), relation=relation, tolerance=t).verdict)
        for t in (tolerance, tolerance + 1)
    )
    assert after >= before
    decided = claim(measured=noisy(value, stderr), relation=relation, tolerance=tolerance).verdict
    sharper = claim(measured=noisy(value, stderr / 10), relation=relation, tolerance=tolerance).verdict
    assert decided in ("not decidable", sharper)


@pytest.mark.parametrize(
    ("measured", "reference", "verdict"),
    [(65.0, None, "holds"), (40.0, None, "refuted"), (40.0, 30.0, "holds in direction"), (20.0, 30.0, "refuted")],
)
def test_what_is_short_of_the_paper_decides_nothing_whether_met_or_missed(measured, reference, verdict):
    about = {"paper": "", "where": "", "text": "", "expected": 65.3, "tolerance": 0.6, "reference": reference}
    assert Claim(measured=measured, short_of="15 of 300 epochs", **about).verdict == "not decidable"
    assert Claim(measured=measured, **about).verdict == verdict


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
        ({"reference": 1.0}, ValueError, "= 1, must be on one side of the reference, got 1; a claim of nothing but"),
        ({"reference": 0.0, "relation": "<="}, ValueError, "what is expected, <= 1, must be on one side"),
        ({"reference": 2.0, "relation": ">="}, ValueError, "what is expected, >= 1, must be on one side"),
        ({"reference": math.nan}, ValueError, "reference must be a finite number, got nan"),
        ({"reference": math.inf}, ValueError, "reference must be a finite number, got inf"),
        ({"reference": "0"}, ValueError, "reference must be a finite number, got '0'"),
        ({"reference": False}, ValueError, "a bool has no direction"),
        ({"expected": True, "measured": True, "reference": 0.0}, ValueError, "a bool has no direction"),
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
                claim(expected=-2.2, measured=-0.5, tolerance=0.5, reference=0),
            ]
        )
    )
    assert [row[2:] for row in rows] == [
        ["2 ± 0.001", "2", "holds"],
        ["≤ 1", "7.000 ± 0.020", "**refuted**"],
        ["≥ 0", "0.5 ± 1.0", "**not decidable**"],
        ["yes", "no", "**refuted**"],
        ["-2.2 ± 0.5 (< 0)", "-0.5", "holds in direction"],
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
