"""Figure 2 of seed 003: the identity holds to round-off, and estimates have the error that the paper shows."""

import pytest
import torch

from ritz.papers import affine


def images(num: int = 40, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.rand(num, width, generator=g), torch.randint(10, (num,), generator=g)


def test_exact_traces_are_the_affine_trace_and_r_is_one():
    found = affine.compare(images(), seed=1, num=30)
    assert found["exact"] == pytest.approx(1.0, abs=1e-12)
    assert found["difference"] < 1e-12


def test_estimates_are_those_of_the_rule_and_scatter_about_the_traces():
    found = affine.compare(images(), seed=1, num=30, points=True)
    assert 2 <= found["probes"] <= 100
    estimates, traces = (torch.tensor(found["points"][name]) for name in ("estimate", "trace"))
    assert abs(float(((estimates - traces) / traces).mean())) < 0.2
    assert found["ruled"] == pytest.approx(float(torch.corrcoef(torch.stack([estimates, traces]))[0, 1]), abs=1e-3)


def test_seeds_draw_their_own_weights_and_images_and_repeat():
    data = images()
    assert affine.compare(data, 0, 20) == affine.compare(data, 0, 20)
    assert affine.compare(data, 0, 20)["ruled"] != affine.compare(data, 1, 20)["ruled"]


def test_the_points_of_the_first_predictor_are_kept_and_drawn():
    rows = affine.study(images(), seeds=(4, 5), num=20)
    assert ["points" in row for row in rows] == [True, False]
    points = rows[0]["points"]
    assert points["aceht"] == pytest.approx(points["trace"], rel=1e-3)
    exact, rough, every = affine.figure(rows).axes
    assert len(exact.collections[0].get_offsets()) == len(rough.collections[0].get_offsets()) == 20
    assert every.get_ylabel() == "r with ACEHT"
    assert affine.figure(rows[1:]).axes  # a file of old has none


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match="3 images or more, of the 40 that there are, got 41"):
        affine.compare(images(), 0, 41)


def test_claims_can_go_either_way():
    rows = [{"exact": 0.9, "difference": 0.1, "ruled": r, "errors": -0.5, "probes": 30.0} for r in (0.9, 0.9001)]
    found = affine.claims(rows)
    assert [claim.verdict for claim in found] == ["refuted", "refuted", "not decidable", "refuted"]
    assert "does not state" in found[2].short_of  # whatever the number, it is that of weights of our own
