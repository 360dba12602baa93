"""Figure 2 of seed 003: the identity holds to round-off, and estimates have the error that the paper shows."""

import pytest
import torch
from torch import nn

from ritz.papers import affine


def images(num: int = 40, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.rand(num, width, generator=g), torch.randint(10, (num,), generator=g)


def test_exact_traces_are_the_affine_trace_and_r_is_one():
    found = affine.compare(images(), seed=1, num=30)
    assert found["exact"] == pytest.approx(1.0, abs=1e-12)
    assert found["difference"] < 1e-12


def test_estimates_have_the_dense_trace_of_every_sample_as_their_mean():
    """The Hessian of each sample by double autograd, row by row."""
    X, y = images(3, 4)
    torch.manual_seed(0)
    model = nn.Linear(4, 10)
    dense = []
    for x, label in zip(X, y, strict=True):
        params = list(model.parameters())
        loss = nn.functional.cross_entropy(model(x[None]), label[None])
        grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, create_graph=True)])
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad(g, params, retain_graph=True)]) for g in grad]
        dense.append(torch.stack(rows).trace())
    draws = torch.stack([affine.estimates(model, X, 20, seed) for seed in range(200)]).double()
    z = (draws.mean(0) - torch.stack(dense)) / (draws.std(0) / len(draws) ** 0.5)
    assert z.abs().max() < 4


def test_seeds_draw_their_own_weights_and_images_and_repeat():
    data = images()
    assert affine.compare(data, 0, 20) == affine.compare(data, 0, 20)
    assert affine.compare(data, 0, 20)["estimated"] != affine.compare(data, 1, 20)["estimated"]


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
    rows = [{"exact": 0.9, "difference": 0.1, "estimated": r, "errors": -0.5} for r in (0.96, 0.9601)]
    assert [claim.verdict for claim in affine.claims(rows)] == ["refuted", "refuted", "refuted", "holds", "refuted"]
