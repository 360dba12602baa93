"""Noise on the weights against closed forms: quadratic losses, and one-feature classifiers whose accuracy is Phi."""

import math

import pytest
import torch
from cases import mlp, truth
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn

import ritz
from ritz.errors import NonFiniteError, NumericalWarning, UnsupportedError
from ritz.measures.pacbayes.posterior import (
    Posterior,
    _Curve,
    accuracy_at,
    expected_loss,
    laplace_posterior,
    sigma_search,
)
from ritz.operators import DenseOperator


def regression() -> ritz.Risk:
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(12, 3, generator=g), torch.randn(12, 1, generator=g)
    return ritz.Risk(nn.Linear(3, 1, bias=False), nn.MSELoss(), (X, y)).at({"weight": torch.tensor([[2.0, -1.0, 3.0]])})


def one_feature() -> tuple[ritz.Risk, float, float]:
    """sign(2 x - 0.6) on 41 points, noise on slope and offset: accuracy mean_i Phi(y_i f_i / (s sqrt(x_i^2 + 1)))."""
    x = torch.linspace(-2, 2, 41)[:, None]
    y = (x > 0.3).double()
    risk = ritz.Risk(nn.Linear(1, 1), nn.BCEWithLogitsLoss(), (x, y))
    risk = risk.at({"weight": torch.tensor([[2.0]]), "bias": torch.tensor([-0.601])})
    margins = ((2 * y - 1) * (2 * x - 0.601) / (x.square() + 1).sqrt()).numpy()
    accuracy = float((margins > 0).mean())
    sigma = brentq(lambda s: norm.cdf(margins / s).mean() - (accuracy - 0.1), 1e-3, 10.0)
    return risk, accuracy, float(sigma)


# ------------------------------------------------------------------------------------------ posteriors


def covariance(q: Posterior, dim: int) -> Tensor:
    root = q.shape_noise(torch.eye(dim))  # row i is the image of e_i
    return root.T @ root


def test_noise_has_the_covariance_it_is_named_by():
    assert torch.allclose(covariance(Posterior(0.3), 4), 0.09 * torch.eye(4))
    U = torch.linalg.qr(torch.randn(5, 2, generator=torch.Generator().manual_seed(0))).Q
    q = Posterior(0.5, U, torch.tensor([4.0, 0.01]))
    assert torch.allclose(covariance(q, 5), 0.25 * (torch.eye(5) - U @ U.T) + (U * q.variances) @ U.T)


def test_with_all_eigenpairs_the_laplace_posterior_is_the_dense_inverse():
    G, n, sigma = truth("mlp_mse", "GGN"), 11, 0.7
    q = laplace_posterior(ritz.top_eigenpairs(DenseOperator(G), k=len(G)), n, sigma)
    assert torch.allclose(covariance(q, len(G)), torch.linalg.inv(n * G + torch.eye(len(G)) / sigma**2), atol=1e-9)


def test_the_rest_of_the_spectrum_narrows_the_rest_of_the_posterior():
    A = DenseOperator(torch.diag(torch.tensor([5.0, 0.5, 0.5])))
    q = laplace_posterior(ritz.top_eigenpairs(A, k=1), 10, 2.0, rest=0.5)
    assert torch.allclose(covariance(q, 3), torch.diag(1 / (10 * A.dense().diagonal() + 0.25)))


# --------------------------------------------------------------------------------------- expected loss


def test_the_expected_loss_of_a_quadratic_covers():
    """E L(w + u) = L(w) + Tr(H Sigma) / 2."""
    risk = regression()
    H = ritz.Hessian(risk).dense()
    U = torch.eye(3)[:, :1]
    for q in (Posterior(0.4), Posterior(0.2, U, torch.tensor([9.0]))):
        exact = risk.loss() + 0.5 * float((H * covariance(q, 3)).sum())
        found = [expected_loss(risk, q, num_draws=20, seed=seed) for seed in range(25)]
        hits = [e.interval()[0] <= exact <= e.interval()[1] for e in found]
        assert sum(hits) >= 21
        mean = sum(e.value for e in found) / 25
        assert mean == pytest.approx(exact, abs=found[0].stderr)


def test_a_number_is_an_isotropic_posterior():
    risk = regression()
    assert expected_loss(risk, 0.3, num_draws=4) == expected_loss(risk, Posterior(0.3), num_draws=4)


def test_pairs_take_the_slope_out_of_the_error():
    """(w + u)^2 at w = 100: one draw varies by 200 u, the mean of a pair by u^2."""
    X = torch.ones(1, 1)
    risk = ritz.Risk(nn.Linear(1, 1, bias=False), nn.MSELoss(), (X, 0 * X)).at({"weight": 100 * X})
    found = expected_loss(risk, 1.0, num_draws=40)
    assert len(found.samples) == 20
    assert found.stderr < 1.0
    assert abs(found.value - 10_001) < 3


def test_draws_are_the_keyed_probes_of_the_space():
    risk = regression()
    u = 0.5 * risk.space.probes([0, 1], 7, "normal", dtype=torch.float64)
    w = risk.space.join(risk.params())
    losses = [risk.at(w + sign * row).loss() for row in u for sign in (1, -1)]
    found = expected_loss(risk, 0.5, num_draws=4, seed=7)
    assert found.value == pytest.approx(sum(losses) / 4, rel=1e-12)
    assert found.seed == 7
    assert "4 draws in pairs" in found.convention


def test_progress_counts_the_draws():
    seen = []
    expected_loss(regression(), 0.1, num_draws=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_loss_that_overflows_is_named():
    X = torch.ones(1, 1)
    risk = ritz.Risk(nn.Linear(1, 1, bias=False), lambda out, y: out.exp().mean(), (X, X)).at({"weight": X})
    with pytest.raises(NonFiniteError, match=r"the loss is inf at draw 0, .* sigma = 1e\+06 is too large"):
        expected_loss(risk, 1e6, num_draws=2, seed=0)


# ---------------------------------------------------------------------------------------- sigma search


def test_sigma_of_a_one_feature_classifier_covers():
    risk, accuracy, exact = one_feature()
    found = [sigma_search(risk, num_draws=12, seed=seed) for seed in range(8)]
    hits = [e.interval()[0] <= exact <= e.interval()[1] for e in found]
    assert sum(hits) >= 6
    mean = sum(e.value for e in found) / len(found)
    assert mean == pytest.approx(exact, rel=0.25)
    assert f"E accuracy >= {accuracy:.4f} - 0.1" in found[0].convention


def test_sigma_is_the_last_one_that_these_draws_stand_and_the_noise_is_sigma_not_its_square():
    risk, accuracy, _ = one_feature()
    found = sigma_search(risk, 0.1, num_draws=5, seed=3)
    low, high = found.bracket
    assert found.value == low < high <= 1.001 * low
    w, u = risk.space.join(risk.params()), risk.space.probes(range(5), 3, "normal", dtype=torch.float64)

    def mean_accuracy(sigma: float) -> float:
        shares = [accuracy_at(risk, risk.space.split(w + sigma * row))[0] for row in u]
        return sum(shares) / 5

    assert mean_accuracy(low) >= accuracy - 0.1 > mean_accuracy(high)


def classifier(seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(40, 3, generator=g)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp([3, 8, 3], nn.ReLU)
    return model, X, model(X).argmax(1)


def test_a_step_at_the_target_does_not_make_sigma_sure():
    """Accuracies that fall evenly, but for one step of the ten draws' mean that is right where the target is."""
    curve = _Curve(one_feature()[0], 1.0, num_draws=10, seed=0, progress=None, num_steps=15)
    apart = torch.linspace(-0.04, 0.04, 10)
    for place, sigma in enumerate([1.0, 1.2, 1.4, 1.6, 1.8, 2.0]):
        curve.seen[sigma] = 0.9 - 0.02 * place + apart
    even = curve.error(0.85)
    curve.seen |= {1.49: 0.86 + apart, 1.51: 0.84 + apart}
    assert curve.error(0.85) == pytest.approx(even, rel=0.5)


def test_adaptive_sigma_does_not_see_a_rescaling_of_layers():
    model, X, y = classifier()
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
    p = risk.params()
    moved = risk.at({"0.weight": 16 * p["0.weight"], "0.bias": 16 * p["0.bias"], "2.weight": p["2.weight"] / 16})
    adaptive, plain = (
        [sigma_search(r, adaptive=how, num_draws=3, seed=1).value for r in (risk, moved)] for how in (True, False)
    )
    assert adaptive[0] == pytest.approx(adaptive[1], rel=1e-9)
    assert abs(plain[0] / plain[1] - 1) > 0.2


def test_sigma_grows_with_the_weights_and_is_not_capped():
    g = torch.Generator().manual_seed(0)
    X, w = torch.randn(40, 3, generator=g), torch.randn(4, 3, generator=g)
    data = X, (X @ w.T).argmax(1)
    risk = ritz.Risk(nn.Linear(3, 4, bias=False), nn.CrossEntropyLoss(), data).at({"weight": w})
    small, large = (sigma_search(risk.at({"weight": c * w}), num_draws=3).value for c in (1, 1024))
    assert large == pytest.approx(1024 * small, rel=1e-9)
    assert large > 2


def test_accuracy_that_no_noise_takes_away_is_said_aloud(tmp_path):
    """Weights of 0 are not moved by noise in proportion to them."""
    model = nn.Linear(1, 2)
    model.weight.data.zero_()
    model.bias.data[:] = torch.tensor([1.0, 0.0])
    data = torch.ones(4, 1), torch.zeros(4, dtype=torch.long)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data, params="weight")
    with pytest.warns(NumericalWarning, match="no sigma found: accuracy does not fall by"):
        found = sigma_search(risk, adaptive=True, num_draws=2)
    assert found.value == math.inf
    assert found.interval()[1] == math.inf
    assert ritz.load(found.save(tmp_path / "sigma")) == found


@pytest.mark.parametrize("drop", [0.3, 0.9])
def test_an_accuracy_no_better_than_a_guess_is_refused(drop):
    model, X, y = classifier()
    shuffled = torch.where(torch.arange(40) % 2 == 0, y, (y + 1) % 3)  # half of them are right
    with pytest.raises(UnsupportedError, match="no better than guessing among 3 classes"):
        sigma_search(ritz.Risk(model, nn.CrossEntropyLoss(), (X, shuffled)), drop)


def test_accuracy_that_the_least_noise_takes_away_is_said_aloud():
    X = torch.ones(1, 1)
    risk = ritz.Risk(nn.Linear(1, 2, bias=False), nn.CrossEntropyLoss(), (X, torch.tensor([0])))
    edge = risk.at({"weight": torch.tensor([[1.0 + 1e-13], [1.0]])})
    with pytest.warns(NumericalWarning, match="accuracy falls by more than 0.1 already at sigma ="):
        found = sigma_search(edge, num_draws=8)
    assert found.value == 0
    assert 0 < found.bracket[1] < 1e-5


def test_ignored_items_do_not_count_and_classes_count_the_same():
    X, y = torch.tensor([[1.0], [1.0], [-1.0], [1.0]]), torch.tensor([0, 0, 0, -100])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 10.0]))
    risk = ritz.Risk(nn.Linear(1, 2, bias=False), loss, (X, y))
    assert accuracy_at(risk, {"weight": torch.tensor([[1.0], [-1.0]])}) == (pytest.approx(2 / 3), 3)


def test_one_draw_has_no_error_and_progress_never_goes_back():
    risk, _, _ = one_feature()
    seen = []
    found = sigma_search(risk, num_draws=1, num_steps=4, progress=lambda done, total: seen.append((done, total)))
    assert math.isnan(found.stderr)
    assert [done for done, _ in seen] == list(range(1, found.products + 1))
    assert all(done <= total for done, total in seen)


def test_nothing_of_the_model_or_the_generators_moves():
    model, X, y = classifier()
    before = [p.detach().clone() for p in model.parameters()]
    model.train()
    state = torch.get_rng_state()
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
    sigma_search(risk, num_draws=2)
    expected_loss(risk, 0.1, num_draws=2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------ bad input


def pairs_of(*values: float) -> ritz.krylov.eigen.EigenPairs:
    return ritz.top_eigenpairs(DenseOperator(torch.diag(torch.tensor(values))), k=1, which="smallest")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Posterior(0.0), "sigma must be positive and finite, got 0.0"),
        (lambda: Posterior(1.0, torch.eye(2)), "both vectors and variances, or neither"),
        (lambda: Posterior(1.0, torch.eye(2), torch.ones(3)), r"expected vectors \(dim, k\) and variances \(k,\), got"),
        (lambda: Posterior(1.0, torch.eye(2), torch.tensor([1.0, 0.0])), "variances must be positive, got 0"),
        (
            lambda: laplace_posterior(pairs_of(-1.0, 2.0), 5),
            "needs a positive semi-definite matrix, but an eigenvalue is -1",
        ),
        (
            lambda: laplace_posterior(pairs_of(1.0, 2.0), 0),
            "num_samples must be at least 1 and rest not negative, got 0",
        ),
        (lambda: laplace_posterior(pairs_of(1.0, 2.0), 5, -1.0), "sigma must be positive and finite, got -1.0"),
        (lambda: expected_loss(regression(), -0.1), "sigma must be positive and finite, got -0.1"),
        (lambda: expected_loss(regression(), 0.1, num_draws=3), "num_draws must be even and at least 2, got 3"),
        (
            lambda: expected_loss(regression(), Posterior(1.0, torch.eye(2), torch.ones(2))),
            "the posterior has 2 dimensions, the risk 3 parameters",
        ),
        (lambda: sigma_search(one_feature()[0], 0.0), "drop must lie strictly between 0 and 1, got 0.0"),
        (lambda: sigma_search(one_feature()[0], num_draws=0), "num_draws and num_steps must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_what_has_no_accuracy_is_refused():
    with pytest.raises(UnsupportedError, match="accuracy needs classes and hard labels"):
        sigma_search(regression())
    X, y = torch.ones(2, 1), torch.zeros(2, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="accuracy needs at least two classes, this network has one"):
        sigma_search(ritz.Risk(nn.Linear(1, 1), nn.CrossEntropyLoss(), (X, y)))
