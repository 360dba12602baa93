"""The benchmark of TF32: what its rounding keeps, that choices are those of the network, and that its parts add up."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import ritz

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("single")


@pytest.fixture(scope="module")
def tf32(script):
    return script("tf32")


UNIT = 2.0**-10  # between the numbers from 1 to 2
LEAST = 2.0**-136  # between those below 2^-126


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1 + UNIT, 1 + UNIT),
        (1 + UNIT / 2, 1.0),  # ties go to the even one
        (1 + 3 * UNIT / 2, 1 + 2 * UNIT),
        (1 + UNIT / 2 + 2.0**-23, 1 + UNIT),
        (-1 - 3 * UNIT / 2, -1 - 2 * UNIT),
        (2 - UNIT / 2, 2.0),  # carried into the exponent
        (0.0, 0.0),
        (-0.0, -0.0),
        (LEAST, LEAST),
        (LEAST / 2, 0.0),
        (3 * LEAST / 2, 2 * LEAST),
        (-(2.0**-149), -0.0),
        (torch.finfo(torch.float32).max, math.inf),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (math.nan, math.nan),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_to_nearest_in_ten_bits(tf32, value, kept, dtype):
    found = tf32.rounded(torch.tensor([value], dtype=dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.tensor([kept], dtype=dtype), rtol=0, atol=0, equal_nan=True)
    assert math.copysign(1, found.item()) == math.copysign(1, kept)


def test_rounding_is_that_of_fractions(tf32):
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    fraction, exponent = torch.frexp(x)
    for bits in (4, 10, 22):
        nearest = torch.ldexp((fraction.double() * 2 ** (bits + 1)).round(), exponent - bits - 1)  # to even, too
        torch.testing.assert_close(tf32.rounded(x, bits).double(), nearest, rtol=0, atol=0)


def test_products_are_the_hessians_and_own_choices_change_nothing(tf32):
    problem = tf32.make(width=0.0625, batch=2)
    gradient, image, choices = tf32.products(problem)
    again = tf32.products(problem, choices)
    assert torch.equal(again[0], gradient)
    assert torch.equal(again[1], image)
    plain = tf32.problems.make("tf32", "cpu").to(torch.float64)
    assert not any(isinstance(module, tf32.Choice) for module in plain.model.modules())
    draw = torch.Generator().manual_seed(2)
    v = torch.cat([torch.randn(p.shape, generator=draw).double().flatten() for p in plain.model.parameters()])
    torch.testing.assert_close(image, ritz.Hessian(plain.risk(), route="reverse") @ v)


def test_all_passes_are_rounded(tf32):
    """Without choices, the error goes with the last bit."""
    smooth = tf32.CASES["GELU, average pooling"]
    problem = tf32.make(width=0.0625, batch=2, **smooth)
    coarse, fine = (tf32.compared(problem, bits)["all"] for bits in (8, 14))
    for key in ("gradient", "Hessian"):
        assert coarse[key] / fine[key] == pytest.approx(2**6, rel=0.5)


def test_quick_form_runs_and_its_parts_add_up(tf32, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tf32.reports, "QUICK", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tf32.py", "--quick"])
    tf32.main()
    assert "as it is" in capsys.readouterr().out
    report = json.loads((tmp_path / tf32.FILE).read_text(encoding="utf8"))
    assert {"settings", "commit", "versions", "machine", "rows"} <= set(report)
    (row,) = report["rows"]
    assert row["all"]["flips"] > 0
    assert len(row["shares"]) == 20  # 15 ReLU and 5 poolings
    for key in ("gradient", "Hessian"):
        both = math.hypot(row["arithmetic"][key], row["choices"][key])
        assert row["all"][key] == pytest.approx(both, rel=0.05)
        assert row["arithmetic"][key] < 0.1 * row["choices"][key]
        assert row["same choices"][key] < 0.1 * row["weights"][key]  # it is a jump


def test_what_the_page_says_is_in_the_file():
    told = (ROOT / "docs/concepts.md").read_text(encoding="utf8")
    told = told[told.index("`benchmarks/tf32.py`") : told.index("- **16-bit weights**")]
    report = json.loads((ROOT / "benchmarks/results/tf32.json").read_text(encoding="utf8"))
    rows = {row["case"]: row for row in report["rows"]}
    plain = rows["as it is"]
    for part in ("all", "arithmetic", "choices", "weights", "same choices"):
        assert f"{plain[part]['Hessian']:.2g}" in told
    for case, part in (("softplus, average pooling", "all"), ("trained", "all"), ("no BatchNorm", "float32")):
        assert f"{rows[case][part]['Hessian']:.2g}" in told
    assert rows["no BatchNorm"]["float32"]["flips"] == 1
    ten, twelve = (rows[f"32 images, {bits} bits"] for bits in (10, 12))
    assert 1.7 < ten["all"]["Hessian"] / twelve["all"]["Hessian"] < 2.5
    assert 3.5 < ten["arithmetic"]["Hessian"] / twelve["arithmetic"]["Hessian"] < 4.5
