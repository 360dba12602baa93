"""Outliers against classes, and T_alpha: counts of planted spectra, dense truths, claims that can go either way."""

import json

import pytest
import torch
from torch import Tensor, nn

from ritz.papers import margins_classes, margins_points, margins_scaling
from ritz.papers.experiment import Setting
from ritz.papers.train import train


def drawn_images(name: str, root: object, device: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """Ten patterns with noise in the place of MNIST, pixels from -1 to 1."""
    g = torch.Generator().manual_seed(0)
    patterns, y = torch.rand(10, 784, generator=g), torch.arange(1000) % 10
    X = (patterns[y] + 0.3 * torch.rand(1000, 784, generator=g)) / 0.65 - 1
    return (X, y), (X[-100:], y[-100:])


# ---------------------------------------------------------------------------------------------- outliers


def spectrum(classes: int, outliers: int) -> list[float]:
    """2 C + 2 eigenvalues with a drop after some."""
    return [10.0 - 0.1 * k if k < outliers else 0.5 - 0.01 * k for k in range(2 * classes + 2)]


def counted(shift: int) -> list[dict[str, object]]:
    rows = []
    for seed in range(3):
        for classes in (3, 5, 7):
            values = spectrum(classes, classes + shift)
            found = margins_classes.before_the_gap(torch.tensor(values))
            rows.append({"seed": seed, "classes": classes, "eigenvalues": values, "gap": found, "edge": classes,
                         "positive": 2 * classes + 2})  # fmt: skip
    return rows


def verdicts(shift: int) -> list[str]:
    return [claim.verdict for claim in margins_classes.claims(counted(shift))]


def test_as_many_outliers_as_classes_would_hold_by_the_gap_and_not_by_the_sign():
    assert verdicts(0) == ["holds", "refuted", "holds", "holds", "holds"]


def test_the_papers_sentence_is_of_positive_eigenvalues_and_other_ways_to_count_are_ours():
    paper = [claim.text for claim in margins_classes.claims(counted(0)) if not claim.ours]
    assert paper == ["as many eigenvalues as classes above 0: share of networks with C of them"]


def test_one_outlier_less_is_refuted_though_it_grows_with_the_classes():
    assert verdicts(-1) == ["refuted", "refuted", "holds", "holds", "refuted"]


def test_a_count_that_ends_where_counting_does_is_told_as_one():
    claims = margins_classes.claims(counted(0))
    assert claims[1].evidence == "C in 0 of 9 networks, C - 1 in 0, 2 C + 2 or more, for no more are taken, in 9"
    assert claims[1].measured.value == 0.0  # no number that the limit would have made
    assert claims[2].evidence == "C in 9 of 9 networks, C - 1 in 0"


def test_a_negative_eigenvalue_is_behind_the_gap():
    assert margins_classes.before_the_gap(torch.tensor([3.0, 2.0, 1.0, -1.0])) == 3


def test_the_largest_eigenvalues_are_those_of_the_dense_hessian():
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(40, 1, 2, 2, generator=g), torch.arange(40) % 2
    recipe = margins_classes.recipe(2, 0, 1)
    recipe = type(recipe)(**{**vars(recipe), "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2))})
    done = train(recipe, {"train": (X, y)})
    found = margins_classes.measured(done, recipe, {"train": (X, y)}, batch=5)
    S = done.model(X).softmax(1).detach()
    Z = torch.cat([X.flatten(1), torch.ones(40, 1)], dim=1)
    M = torch.diag_embed(S) - S[:, :, None] * S[:, None]  # of an affine network, H = mean of M (x) z z'
    H = torch.einsum("nij,na,nb->iajb", M, Z, Z).reshape(10, 10) / 40
    torch.testing.assert_close(
        torch.tensor(found["eigenvalues"]), torch.linalg.eigvalsh(H).flip(0)[:6], atol=1e-3, rtol=1e-3
    )


def test_the_whole_path_of_the_classes_runs(monkeypatch):
    monkeypatch.setattr(margins_points, "load_images", drawn_images)
    rows, claims = margins_classes.run(Setting("smoke"), lambda *now: None)
    assert [(r["classes"], r["seed"], len(r["eigenvalues"])) for r in rows] == [
        (2, 0, 6), (2, 1, 6), (3, 0, 8), (3, 1, 8)
    ]  # fmt: skip
    assert len(claims) == 5
    json.dumps(rows)
    pytest.importorskip("matplotlib")
    assert len(margins_classes.figure(rows).axes) == 2


# ----------------------------------------------------------------------------------------------- T_alpha


def test_the_trace_of_a_trained_network_goes_to_zero_and_no_prediction_changes(monkeypatch):
    monkeypatch.setattr(margins_points, "load_images", drawn_images)
    rows, claims = margins_scaling.run(Setting("smoke"), lambda *now: None)
    assert len(rows) == 2 * 2 * len(margins_scaling.ALPHAS)
    assert {row["wrong"] for row in rows} == {0}
    assert [claim.verdict for claim in claims] == ["holds"] * 5
    margins = {row["alpha"]: row["margin_min"] for row in rows if row["seed"] == 0 and row["move"] == "all layers"}
    assert all(margin == pytest.approx(alpha * margins[1.0], rel=1e-4) for alpha, margin in margins.items())
    json.dumps(rows)
    pytest.importorskip("matplotlib")
    assert len(margins_scaling.figure(rows).axes) == 2


def test_curvature_that_stays_and_predictions_that_change_are_refuted():
    rows = [
        {
            "seed": seed,
            "move": name,
            "alpha": alpha,
            "wrong": 1,
            "changed": 1,
            "trace": 2.0 + 0.001 * seed * alpha,
            "lambda_max": 1.0,
        }
        for seed in (0, 1, 2)
        for name in margins_scaling.MOVES
        for alpha in margins_scaling.ALPHAS
    ]
    assert {claim.verdict for claim in margins_scaling.claims(rows)} == {"refuted"}
