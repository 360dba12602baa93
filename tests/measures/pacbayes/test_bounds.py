"""Bounds on an error against closed forms and brute force; the complexity measures by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammaln, xlogy
from scipy.stats import binom
from torch.distributions import Bernoulli, MultivariateNormal, Normal, kl_divergence

from ritz.intervals import StudentT
from ritz.measures.pacbayes.bounds import (
    best_prior,
    check_delta,
    kl_bernoulli,
    kl_inverse,
    mcallester,
    pacbayes_flatness,
    pacbayes_init,
    pacbayes_mag_init,
    pacbayes_mag_orig,
    pacbayes_orig,
    seeger,
)
from ritz.results import Estimate

shares = st.floats(0.0, 1.0)
budgets = st.one_of(st.floats(0.0, 50.0), st.sampled_from([1e-300, 1e-12, 1e300, math.inf]))


# ------------------------------------------------------------------------------------------ Bernoulli


@pytest.mark.parametrize(("q", "p"), [(0.3, 0.7), (1e-6, 0.5), (0.999, 0.001), (0.25, 0.25 + 1e-9)])
def test_kl_of_bernoullis_is_that_of_torch(q, p):
    truth = kl_divergence(Bernoulli(torch.tensor(q)), Bernoulli(torch.tensor(p)))
    assert kl_bernoulli(q, p) == pytest.approx(float(truth), rel=1e-6, abs=1e-16)


def test_kl_of_bernoullis_near_each_other_keeps_its_digits():
    q, apart = 0.25, 1e-9
    assert kl_bernoulli(q, q + apart) == pytest.approx(apart**2 / (2 * q * (1 - q)), rel=1e-6)


@pytest.mark.parametrize(
    ("q", "p", "truth"),
    [(0, 0, 0), (1, 1, 0), (0, 1, math.inf), (1, 0, math.inf), (0.5, 0, math.inf), (0.5, 1, math.inf)],
)
def test_kl_of_bernoullis_at_the_ends_is_0_or_infinite(q, p, truth):
    assert kl_bernoulli(q, p) == truth


@given(shares, budgets)
def test_the_inverse_is_the_last_number_within_the_budget(q, c):
    high, low = kl_inverse(q, c), kl_inverse(q, c, upper=False)
    assert 0 <= low <= q <= high <= 1
    # rounded outwards, so that one step inwards is within the budget; near c = 0 round-off of kl decides
    assert kl_bernoulli(q, max(q, math.nextafter(high, 0))) <= c + 1e-15
    assert kl_bernoulli(q, min(q, math.nextafter(low, 1))) <= c + 1e-15
    assert high == 1 or c == 0 or kl_bernoulli(q, high) >= c - 1e-15
    assert low == 0 or c == 0 or kl_bernoulli(q, low) >= c - 1e-15


@pytest.mark.parametrize("c", [1e-12, 0.1, 3.0])
def test_the_inverse_at_0_and_1_has_a_closed_form(c):
    assert kl_inverse(0.0, c) == pytest.approx(-math.expm1(-c), rel=1e-12)
    assert kl_inverse(1.0, c, upper=False) == pytest.approx(math.exp(-c), rel=1e-12)
    assert kl_inverse(1.0, c) == 1.0
    assert kl_inverse(0.0, c, upper=False) == 0.0


def test_the_inverse_of_nothing_and_of_everything():
    assert kl_inverse(0.3, 0.0) == kl_inverse(0.3, 0.0, upper=False) == 0.3
    assert kl_inverse(0.3, math.inf) == kl_inverse(0.3, 1e300) == 1.0
    assert kl_inverse(0.3, math.inf, upper=False) == 0.0


@given(st.floats(0.01, 0.99), st.floats(1e-6, 5.0))
def test_the_lower_inverse_mirrors_the_upper_one(q, c):
    assert kl_inverse(q, c, upper=False) == pytest.approx(1 - kl_inverse(1 - q, c), abs=1e-9)


# --------------------------------------------------------------------------------------- certificates


def test_mcallester_by_hand_has_delta_inside_the_logarithm():
    # ln(2 * 10 / 0.1) = ln 200; with the parenthesis misplaced, ln(2 * 10) / 0.1, it would be 30
    assert mcallester(0.2, 5.0, 100, 0.1) == pytest.approx(0.2 + math.sqrt((5 + math.log(200)) / 200), rel=1e-14)


def test_seeger_without_errors_by_hand():
    assert seeger(0.0, 5.0, 100, 0.1) == pytest.approx(1 - math.exp(-(5 + math.log(200)) / 100), rel=1e-12)


@given(shares, st.floats(0.0, 1e4), st.integers(1, 10**6), st.floats(1e-6, 0.999))
def test_the_kl_bound_is_never_above_mcallesters(error, kl, n, delta):
    assert error <= seeger(error, kl, n, delta) <= mcallester(error, kl, n, delta) + 1e-12


@pytest.mark.parametrize("n", [1, 2, 5, 8, 30, 200])
def test_maurers_constant_bounds_the_exponential_moment_for_every_n(n):
    """E exp(n kl(k/n || p)) = sum_k C(n, k) (k/n)^k (1 - k/n)^(n - k) <= 2 sqrt(n): where ln(2 sqrt(n)) comes from."""
    k = torch.arange(n + 1).numpy()
    logs = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + xlogy(k, k / n) + xlogy(n - k, 1 - k / n)
    moment = math.fsum(map(math.exp, logs))
    assert 1 < moment <= 2 * math.sqrt(n) * (1 + 1e-12)
    # and it is that expectation, for one p as for another
    p = 0.3
    mean = sum(binom.pmf(k, n, p) * [math.exp(n * kl_bernoulli(i / n, p)) for i in k])
    assert mean == pytest.approx(moment, rel=1e-9)


def test_with_prior_and_posterior_the_same_the_bound_fails_as_seldom_as_it_says():
    """KL = 0 is a test-set bound: exact binomial probabilities, no sampling."""
    n, delta = 50, 0.1
    for truth in (0.02, 0.3, 0.7):
        fails = [k for k in range(n + 1) if seeger(k / n, 0.0, n, delta) < truth]
        assert sum(binom.pmf(fails, n, truth)) <= delta


# --------------------------------------------------------------------------------------------- priors


def test_the_divergence_of_the_prior_is_that_of_torch():
    w, init, sigma = torch.tensor([0.3, -0.1, 0.2]), torch.tensor([0.1, 0.0, 0.1]), 0.05
    prior = best_prior(float((w - init).norm()), 3, sigma)
    q, p = MultivariateNormal(w, sigma**2 * torch.eye(3)), MultivariateNormal(init, prior.variance * torch.eye(3))
    assert prior.kl == pytest.approx(float(kl_divergence(q, p)), rel=1e-12)
    assert prior.variance == pytest.approx(0.1 * math.exp(-prior.j / 100), rel=1e-14)
    assert prior.penalty == pytest.approx(math.log(math.pi**2 * prior.j**2 / 6), rel=1e-14)


@pytest.mark.parametrize(("distance", "sigma"), [(3.0, 0.01), (0.0, 0.1), (0.5, 0.2), (1e-3, 1e-3)])
@pytest.mark.parametrize("dim", [2, 1000])
def test_the_prior_is_the_best_of_the_whole_grid(distance, sigma, dim):

    def total(j: int) -> float:
        v = 0.1 * math.exp(-j / 100)
        kl = 0.5 * (dim * (sigma**2 / v - 1 + math.log(v / sigma**2)) + distance**2 / v)
        return kl + math.log(math.pi**2 * j**2 / 6)

    prior = best_prior(distance, dim, sigma)
    assert prior.kl + prior.penalty == pytest.approx(total(prior.j), rel=1e-9)
    assert prior.kl + prior.penalty == pytest.approx(min(total(j) for j in range(1, 3000)), rel=1e-9)


def test_the_shares_of_the_union_bound_add_up_to_one():
    assert math.fsum(6 / (math.pi**2 * j**2) for j in range(1, 10**5)) == pytest.approx(1, abs=1e-4)


def test_a_posterior_wider_than_the_grid_gets_its_first_prior():
    assert best_prior(10.0, 4, 1.0).j == 1


# ------------------------------------------------------------------------------ complexity measures


W, INIT, N = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.5, 0.0, 0.5]), 400


def test_complexity_measures_by_hand():
    s = 0.2
    tail = math.log(N / s) + 10
    assert pacbayes_flatness(s).value == pytest.approx(25.0)
    assert pacbayes_init(s, W, INIT, N).value == pytest.approx(math.sqrt((4.25 / 0.16 + tail) / N), rel=1e-12)
    assert pacbayes_orig(s, W, N).value == pytest.approx(math.sqrt((5.25 / 0.16 + tail) / N), rel=1e-12)


@pytest.mark.parametrize("measure", ["init", "orig"])
def test_the_magnitude_aware_measures_are_half_the_divergence_from_the_best_prior(measure):
    s, epsilon = 0.7, 1e-3
    d = W - INIT if measure == "init" else W
    std = (epsilon**2 + s**2 * d.square()).sqrt()
    variance = (std.square() + d.square()).mean()  # of the prior that is least far
    kl = kl_divergence(Normal(d, std), Normal(torch.zeros(3), variance.sqrt())).sum()
    truth = math.sqrt((float(kl) / 2 + math.log(N / s) + 10) / N)
    found = pacbayes_mag_init(s, W, INIT, N) if measure == "init" else pacbayes_mag_orig(s, W, N)
    assert found.value == pytest.approx(truth, rel=1e-10)


def test_errors_and_brackets_of_sigma_move_along():
    sigma = Estimate(name="sigma", value=0.5, stderr=0.01, bracket=(0.5, 0.51), rule=StudentT(9))
    flat = pacbayes_flatness(sigma)
    assert flat.value == 4.0
    assert flat.stderr == pytest.approx(2 * 0.01 / 0.5**3, rel=1e-6)
    assert flat.bracket == pytest.approx((0.51**-2, 4.0))
    assert not flat.exact
    assert pacbayes_flatness(0.5).exact


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: kl_bernoulli(-0.1, 0.5), r"q must lie in \[0, 1\], got -0.1"),
        (lambda: kl_bernoulli(0.1, math.nan), r"p must lie in \[0, 1\], got nan"),
        (lambda: kl_inverse(0.1, -1.0), r"c must not be negative, got -1.0"),
        (lambda: kl_inverse(0.1, math.nan), r"c must not be negative, got nan"),
        (lambda: mcallester(1.5, 1.0, 10), r"error must lie in \[0, 1\], got 1.5"),
        (lambda: seeger(0.1, -1e-3, 10), r"kl, a divergence, must not be negative, got -0.001"),
        (lambda: seeger(0.1, 1.0, 0), r"num_samples must be at least 1, got 0"),
        (lambda: seeger(0.1, 1.0, 10, 0.0), r"delta must lie strictly between 0 and 1, got 0.0"),
        (lambda: check_delta(delta_prime=1.0), r"delta_prime must lie strictly between 0 and 1, got 1.0"),
        (lambda: best_prior(-1.0, 3, 0.1), r"distance must not be negative and dim must be at least 1, got -1.0 and 3"),
        (lambda: best_prior(1.0, 3, 0.0), r"sigma and scale must be positive and precision at least 1, got 0.0"),
        (lambda: pacbayes_init(0.1, W, INIT[:2], N), r"weights and init must have equal shapes, got \(3,\) and \(2,\)"),
        (lambda: pacbayes_orig(0.1, W, 0), r"num_samples must be at least 1, got 0"),
        (lambda: pacbayes_flatness(0.0), r"sigma must be positive and finite, got 0$"),
        (
            lambda: pacbayes_flatness(Estimate(name="sigma", value=math.inf, stop="no sigma found: it stands all")),
            r"sigma must be positive and finite, got inf \(no sigma found: it stands all\)",
        ),
    ],
)
def test_bad_input_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
