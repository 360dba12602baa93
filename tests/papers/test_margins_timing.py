"""Timing: what is timed is right, and the verdicts follow the ratios."""

import importlib.util
import json
import math

import pytest
import torch
from torch import Tensor, nn

from ritz.measures.outputs import sample_outputs
from ritz.papers import margins_points, margins_timing
from ritz.papers.experiment import Setting


def drawn_images(name: str, root: object, device: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """Noise in the place of MNIST, pixels from -1 to 1."""
    g = torch.Generator().manual_seed(0)
    X, y = 2 * torch.rand(360, 784, generator=g) - 1, torch.randint(10, (360,), generator=g)
    return (X, y), (X[-50:], y[-50:])


def row(seed: int, slow: float, exact: float, package: bool = True) -> dict[str, object]:
    times = {
        "one by one": slow,
        "probes": 1.0,
        "exact": exact,
        "exact, more samples": exact,
        "margins": 1.0 + 0.01 * seed,
    }
    error = {"relative": 0.1, "r": 0.9}
    ways = {**times, "pyhessian": slow} if package else times
    return {"seed": seed, "samples": 3, "device": "cpu", "per_sample": ways, "errors": dict.fromkeys(ways, error)}


@pytest.mark.parametrize(
    ("slow", "exact", "wanted"),
    [
        (1080.0, 800.0, ["holds", "holds"]),
        (5000.0, 12.0, ["holds in direction", "holds in direction"]),
        (0.5, 0.1, ["refuted", "refuted"]),
    ],
)
def test_verdicts_follow_the_ratios(slow, exact, wanted):
    claims = margins_timing.claims([row(seed, slow, exact) for seed in range(3)])
    assert [claim.verdict for claim in claims] == wanted


def test_the_ratio_of_the_seconds_that_are_told_is_the_one_that_is_judged():
    first = margins_timing.claims([row(seed, 1000.0, 12.0) for seed in range(3)])[0]
    slow, fast = (float(first.evidence.split(f"{name} ")[1].split()[0]) for name in ("pyhessian", "margins"))
    assert math.log10(slow / fast) == pytest.approx(first.measured.value, abs=0.01)


def test_margins_are_those_of_the_outputs_over_several_batches(monkeypatch):
    monkeypatch.setattr(margins_timing, "AT_ONCE", 7)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    data = torch.randn(30, 1, 2, 2), torch.randint(3, (30,))
    truth = sample_outputs(margins_points.risk_of(model, data)).need("margin")
    torch.testing.assert_close(margins_timing.margins(model, data), truth)


def test_without_the_package_the_claim_says_whose_loop_it_was():
    texts = [margins_timing.claims([row(s, 9.0, 3.0, p) for s in range(2)])[0].text for p in (True, False)]
    assert texts[0].endswith(", PyHessian")
    assert texts[1].endswith("in our own loop")


def test_estimates_by_probes_are_near_the_exact_traces_of_the_same_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    data = torch.randn(30, 1, 2, 2), torch.randint(3, (30,))
    found = margins_timing.measure_once(model, data, 20, 30, seed=0)
    assert found["samples"] == 20
    assert found["more_samples"] == found["margins_of"] == 30
    assert 0 < found["errors"]["one by one"]["relative"] < 1
    assert found["errors"]["one by one"]["r"] > 0.5
    assert min(found["per_sample"].values()) > 0


def test_the_whole_path_runs(monkeypatch):
    monkeypatch.setattr(margins_points, "load_images", drawn_images)
    calls = []
    rows, claims = margins_timing.run(Setting("smoke"), lambda *now: calls.append(now))
    assert calls == [("repetitions", 1, 2), ("repetitions", 2, 2)]
    assert ("pyhessian" in rows[0]["per_sample"]) == (importlib.util.find_spec("pyhessian") is not None)
    assert [claim.where for claim in claims] == ["section 3.2.1"] * 2
    assert "by proportion" in claims[0].evidence
    json.dumps(rows)
    pytest.importorskip("matplotlib")
    assert len(margins_timing.figure(rows).axes) == 1
