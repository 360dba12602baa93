"""The mathematics of seed 004 against closed forms and brute force."""

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


def test_what_is_mended_holds_and_every_claim_says_why():
    checks = (damping.shrinkage, damping.equation_15, damping.algorithm_1, damping.theorem_1)
    claims = [claim for check in checks for claim in check()]
    assert all(claim.paper == "seed 004" and claim.evidence for claim in claims)
    assert {claim.verdict for claim in claims if "corrected" in claim.where} == {"holds"}


def test_the_error_of_a_shrunk_matrix_is_that_of_the_matrices_written_out():
    true, batch, eye = damping._spiked(30), wigner(30, spikes=damping.SPIKES, seed=5), torch.eye(30)
    for beta in (0.0, 0.3, 1.0):
        difference = beta * batch + (1 - beta) * eye - true
        assert damping._shrunk_error(true, batch, beta) == pytest.approx(float((difference @ difference).trace() / 30))
