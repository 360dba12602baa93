"""Steps and their rates in seed 004 against closed forms and brute force."""

import math

import pytest
import torch

from ritz.papers import theory_steps as steps


@pytest.mark.parametrize(("share", "limit"), [(1.0, 2 * 1.9), (0.1, 2 * 1.9 / 0.1)])
def test_the_largest_stable_rate_with_momentum_is_the_closed_form(share, limit):
    assert steps.momentum_limit(share) == pytest.approx(limit, rel=1e-6)
    for rate, stays in ((0.99 * limit, True), (1.01 * limit, False)):
        w, m = 1.0, 0.0
        for _ in range(4000):
            m = 0.9 * m + share * w
            w -= rate * m
        assert (abs(w) < 1) == stays


def test_the_diagonal_is_below_the_norm_and_is_it_in_the_basis_of_the_matrix():
    H, B = steps._positive(8, seed=5), steps._positive(8, seed=6)
    half = torch.linalg.inv(torch.linalg.cholesky(B))  # another root: the spectrum is the same
    norm = float(torch.linalg.eigvalsh(half @ H @ half.T)[-1])
    values, vectors = torch.linalg.eigh(B)
    largest = max(float(v @ H @ v) / float(eta) for eta, v in zip(values, vectors.T, strict=True))
    assert steps._largest(H, B) == pytest.approx(largest / norm, rel=1e-9)
    assert steps._largest(H, B) < 1
    assert steps._largest(H, H @ H) == pytest.approx(1.0)


def test_entries_beside_the_norm_fall_as_a_random_matrix_has_it():
    *_, claim = steps.general_position()
    fall = math.sqrt(math.log(900) / 900) / math.sqrt(math.log(100) / 100)
    assert claim.measured == pytest.approx(fall, rel=0.3)


def test_averages_of_one_gradient_are_that_gradient():
    g = torch.tensor([2.0, -3.0])
    first, second = steps._averages([g])
    torch.testing.assert_close(first, g)
    torch.testing.assert_close(second, g.square())


def test_adam_moves_by_its_rate_at_first():
    torch.testing.assert_close(steps._adam_step([torch.tensor([2.0, -3.0])]), torch.tensor([-1e-3, 1e-3]))


def test_weight_decay_is_l2_regularisation_for_sgd_alone():
    gradients = [torch.tensor([1.0, 0.1]), torch.tensor([0.5, -0.1])]
    assert steps._decayed(torch.optim.SGD, gradients) < 1e-12
    assert steps._decayed(torch.optim.Adam, gradients) > 1e-4


def test_no_step_of_the_same_length_lowers_a_quadratic_loss_more_than_the_damped_one():
    assert steps._trust_region() > 0


def test_what_is_mended_holds_and_every_claim_says_why():
    claims = [claim for check in (steps.steps, steps.largest_rate, steps.general_position) for claim in check()]
    assert all(claim.paper == "seed 004" and claim.evidence for claim in claims)
    assert {claim.verdict for claim in claims if "corrected" in claim.where} == {"holds"}
