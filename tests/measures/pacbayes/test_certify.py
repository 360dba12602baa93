"""The certificate: by hand, never below an error that is known, and refused where it would not hold."""

import math

import pytest
import torch
from cases import problem
from scipy.stats import norm
from torch import Tensor, nn

import ritz
from ritz.errors import UnsupportedError
from ritz.measures.pacbayes.bounds import best_prior, kl_inverse
from ritz.measures.pacbayes.certify import certificate
from ritz.measures.pacbayes.posterior import sigma_search

START = {"weight": torch.zeros(2, 1)}


def drawn(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """x normal, y the sign of x but for one label in ten."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 1, generator=g)
    wrong = torch.rand(num, generator=g) < 0.1
    return x, ((x[:, 0] > 0) ^ wrong).long()


def signs(data: tuple[Tensor, Tensor], size: float = 0.3) -> ritz.Risk:
    """The classifier sign(x), with weights of that size."""
    risk = ritz.Risk(nn.Linear(1, 2, bias=False), nn.CrossEntropyLoss(), data, batch_size=len(data[0]))
    return risk.at({"weight": torch.tensor([[-size], [size]])})


def test_the_certificate_by_hand():
    risk, sigma, draws, delta, prime = signs(drawn(300, 0)), 0.3, 20, 0.04, 0.02
    X, y = drawn(300, 0)
    # draws that the search for sigma has not seen, or they would not be independent of sigma
    u = risk.space.probes(range(2**20, 2**20 + draws), 5, "normal", dtype=torch.float64)
    weights = risk.space.join(risk.params()) + sigma * u  # (draws, 2)
    wrong = torch.stack([((X @ w[None]).argmax(1) != y).double().mean() for w in weights])
    prior = best_prior(0.3 * math.sqrt(2), 2, sigma)
    above = kl_inverse(float(wrong.mean()), math.log(2 / prime) / draws)
    kl = prior.kl + math.log(math.pi**2 * prior.j**2 / 6)
    value = kl_inverse(above, (kl + math.log(2 * math.sqrt(300) / delta)) / 300)
    found = certificate(risk, START, sigma=sigma, delta=delta, delta_prime=prime, num_draws=draws, seed=5)
    assert found.value == pytest.approx(value, rel=1e-12)
    assert found.parts["empirical error"].value == pytest.approx(float(wrong.mean()), rel=1e-12)
    assert found.parts["KL"].value == pytest.approx(prior.kl, rel=1e-9)
    assert found.parts["prior sigma"].value == pytest.approx(math.sqrt(prior.variance))
    assert found.parts["McAllester"].value >= value
    assert "holds with probability 0.94, n = 300, 20 draws" in found.convention
    assert found.stop == "completed"


@pytest.mark.parametrize("sigma", [0.05, 0.3])
def test_it_is_never_below_the_error_of_the_distribution(sigma):
    """x normal: a draw errs by 0.1, or by 0.9 where its two weights come out in the wrong order."""
    turned = float(norm.cdf(-2 * 0.3 / (sigma * math.sqrt(2))))
    truth = 0.1 + 0.8 * turned
    risks = [signs(drawn(1000, seed)) for seed in range(12)]
    bounds = [certificate(risk, START, sigma=sigma, num_draws=40, seed=seed).value for seed, risk in enumerate(risks)]
    assert min(bounds) > truth
    assert max(bounds) < 0.5 or turned > 0.05  # and it says something


def test_of_several_sigmas_the_best_is_taken_and_the_draws_are_paid_for_each():
    risk = signs(drawn(300, 1))
    sigmas = [0.02, 0.1, 1.0]
    alone = {s: certificate(risk, START, sigma=s, num_draws=30, delta_prime=0.01 / 3).value for s in sigmas}
    found = certificate(risk, START, sigma=sigmas, num_draws=30)
    assert found.value == pytest.approx(min(alone.values()), rel=1e-12)
    assert found.parts["sigma"].value == min(alone, key=alone.__getitem__)
    assert found.products == 90


def test_a_searched_sigma_is_taken_as_it_is():
    risk = signs(drawn(100, 2))
    sigma = sigma_search(risk, num_draws=4)
    assert certificate(risk, START, sigma=sigma, num_draws=5).parts["sigma"].value == sigma.value


def test_a_bound_that_promises_nothing_says_so():
    risk = signs(drawn(50, 3), size=30.0)
    found = certificate(risk, START, sigma=1e-4, num_draws=5)
    assert found.value == pytest.approx(1.0)
    assert found.stop == "vacuous: a guess among 2 classes errs 0.5"


def test_more_draws_and_a_nearer_start_give_a_better_bound():
    risk = signs(drawn(300, 4))
    few, many = (certificate(risk, START, sigma=0.05, num_draws=num).value for num in (5, 100))
    near = certificate(risk, risk.space.join(risk.params()), sigma=0.05, num_draws=100).value
    assert near < many < few


def test_the_start_is_a_state_dict_or_a_flat_vector(tmp_path):
    risk = signs(drawn(50, 5))
    named, flat = (certificate(risk, start, sigma=0.1, num_draws=3) for start in (START, torch.zeros(2)))
    assert named == flat == ritz.load(flat.save(tmp_path / "bound"))


def test_a_bound_of_some_parameters_names_its_condition_on_the_others():
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), drawn(20, 0))
    last = risk.restrict("2.*")
    some, every = (certificate(r, r.space.join(r.params()), sigma=0.3, num_draws=2) for r in (last, risk))
    assert "if the other 6 parameters were not made from these samples" in some.convention
    assert "if the other" not in every.convention


def test_progress_counts_all_draws():
    seen = []
    certificate(signs(drawn(20, 6)), START, sigma=[0.1, 0.2], num_draws=2, progress=lambda *at: seen.append(at))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_what_the_bound_is_not_for_is_refused():
    norms = problem("residual").risk()
    with pytest.raises(
        UnsupportedError, match=r"norm\.running_mean was computed from the training data and has no prior"
    ):
        certificate(norms, norms.params(), sigma=0.1)
    coupled = problem("residual_train").risk()
    with pytest.raises(UnsupportedError, match="predictions that do not depend on the batch"):
        certificate(coupled, coupled.params(), sigma=0.1)
    tokens = problem("language").risk()
    with pytest.raises(UnsupportedError, match="each sample holds 4 predictions, which are not independent"):
        certificate(tokens, tokens.params(), sigma=0.1)
    numbers = problem("mlp_mse").risk()
    with pytest.raises(UnsupportedError, match="accuracy needs classes and hard labels"):
        certificate(numbers, numbers.params(), sigma=0.1)


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"sigma": 0.0}, "sigma must be positive and finite, got 0.0"),
        ({"sigma": []}, r"at least one sigma and one draw, got sigma=\[\] and num_draws=100"),
        ({"num_draws": 0}, r"at least one sigma and one draw, got sigma=\[0.1\] and num_draws=0"),
        ({"delta": 1.0}, "delta must lie strictly between 0 and 1, got 1.0"),
        ({"delta_prime": 0.0}, "delta_prime must lie strictly between 0 and 1, got 0.0"),
        ({"delta": 0.7, "delta_prime": 0.5}, r"delta \+ delta_prime must lie strictly between 0 and 1, got 1.2"),
        ({"prior_scale": -1.0}, "sigma and scale must be positive and precision at least 1, got 0.1, -1.0 and 100"),
        ({"init": torch.zeros(3)}, r"expected a flat vector \(dim=2,\), got \(3,\)"),
        ({"init": {"weight": torch.zeros(1, 2)}}, r"weight has shape \(2, 1\), got \(1, 2\)"),
        ({"init": {"bias": torch.zeros(2)}}, "the weights have no 'weight'"),
    ],
)
def test_bad_input_is_refused(keywords, match):
    given = {"init": START, "sigma": 0.1, **keywords}
    with pytest.raises(ValueError, match=match):
        certificate(signs(drawn(20, 7)), **given)
