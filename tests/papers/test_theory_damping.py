"""The mathematics of seed 004 against closed forms and brute force."""

import math

import pytest
import torch

from ritz.papers import theory_damping as damping
from ritz.rmt import wigner


def test_the_best_damping_is_the_least_of_a_fine_grid():
    true = damping._spiked(60)
    batch = wigner(60, spikes=damping.SPIKES, seed=3)
    eye = torch.eye(60)

    def error(delta):
        beta = 1 / (1 + delta)
        return float((beta * batch + (1 - beta) * eye - true).square().sum())

    best = damping.best_damping(true, batch)
    assert min((delta / 1000 for delta in range(1, 4000)), key=error) == pytest.approx(best, abs=1e-3)


def test_the_best_damping_is_what_a_squared_target_gives_in_the_mean():
    dim = 200
    true = damping._spiked(dim)
    found = [damping.best_damping(true, wigner(dim, spikes=damping.SPIKES, seed=seed)) for seed in range(20)]
    apart = float((true - torch.eye(dim)).square().sum() / dim)
    assert sum(found) / 20 == pytest.approx(1 / apart, rel=0.03)
    assert apart != pytest.approx(1.0, rel=0.3)  # or the two could not be told apart


def test_the_printed_algorithm_has_the_mean_that_noise_and_signal_give():
    printed, divided, mended = damping.algorithm_1()
    dim, batches = 200, damping.BATCHES
    signal = sum(spike**2 for spike in damping.SPIKES) / dim
    noise = 1 + 1 / dim  # the diagonal has twice the variance
    low, high = printed.measured.interval()
    assert low < batches * (noise + signal) < high
    low, high = divided.measured.interval()
    assert low < noise + signal < high
    assert float(mended.measured.value) == pytest.approx(noise, abs=3 * float(mended.measured.stderr))


@pytest.mark.parametrize(("share", "limit"), [(1.0, 2 * 1.9), (0.1, 2 * 1.9 / 0.1)])
def test_the_largest_stable_rate_with_momentum_is_the_closed_form(share, limit):
    assert damping.momentum_limit(share) == pytest.approx(limit, rel=1e-6)
    for rate, stays in ((0.99 * limit, True), (1.01 * limit, False)):
        w, m = 1.0, 0.0
        for _ in range(4000):
            m = 0.9 * m + share * w
            w -= rate * m
        assert (abs(w) < 1) == stays


def test_the_diagonal_is_below_the_norm_and_is_it_in_the_basis_of_the_matrix():
    H, B = damping._positive(8, seed=5), damping._positive(8, seed=6)
    half = torch.linalg.inv(torch.linalg.cholesky(B))  # another root: the spectrum is the same
    norm = float(torch.linalg.eigvalsh(half @ H @ half.T)[-1])
    values, vectors = torch.linalg.eigh(B)
    largest = max(float(v @ H @ v) / float(eta) for eta, v in zip(values, vectors.T, strict=True))
    assert damping._largest(H, B) == pytest.approx(largest / norm, rel=1e-9)
    assert damping._largest(H, B) < 1
    assert damping._largest(H, H @ H) == pytest.approx(1.0)


def test_entries_beside_the_norm_fall_as_a_random_matrix_has_it():
    *_, claim = damping.general_position()
    fall = math.sqrt(math.log(900) / 900) / math.sqrt(math.log(100) / 100)
    assert claim.measured == pytest.approx(fall, rel=0.3)


def test_what_is_mended_holds_and_every_claim_says_why():
    checks = (damping.shrinkage, damping.equation_15, damping.algorithm_1, damping.theorem_1, damping.largest_rate)
    claims = [claim for check in checks for claim in check()]
    assert all(claim.paper == "seed 004" and claim.evidence for claim in claims)
    assert {claim.verdict for claim in claims if "corrected" in claim.where} == {"holds"}


def test_the_error_of_a_shrunk_matrix_is_that_of_the_matrices_written_out():
    true, batch, eye = damping._spiked(30), wigner(30, spikes=damping.SPIKES, seed=5), torch.eye(30)
    for beta in (0.0, 0.3, 1.0):
        difference = beta * batch + (1 - beta) * eye - true
        assert damping._shrunk_error(true, batch, beta) == pytest.approx(float((difference @ difference).trace() / 30))


def test_averages_of_one_gradient_are_that_gradient():
    g = torch.tensor([2.0, -3.0])
    first, second = damping._averages([g])
    torch.testing.assert_close(first, g)
    torch.testing.assert_close(second, g.square())


def test_adam_moves_by_its_rate_at_first():
    torch.testing.assert_close(damping._adam_step([torch.tensor([2.0, -3.0])]), torch.tensor([-1e-3, 1e-3]))


def test_weight_decay_is_l2_regularisation_for_sgd_alone():
    gradients = [torch.tensor([1.0, 0.1]), torch.tensor([0.5, -0.1])]
    assert damping._decayed(torch.optim.SGD, gradients) < 1e-12
    assert damping._decayed(torch.optim.Adam, gradients) > 1e-4


def test_no_step_of_the_same_length_lowers_a_quadratic_loss_more_than_the_damped_one():
    assert damping._trust_region() > 0
