"""Equation 7 and appendix A of seed 004: the parts of which the claims are made, against closed forms."""

import math

import pytest
import torch

from ritz.papers import theory_noise as noise


def quantiles(num: int) -> torch.Tensor:
    """Of the semicircle on +-2, by bisection of its distribution function, written as an integral over an angle."""
    low, high = torch.zeros(num), torch.full((num,), math.pi)  # x = -2 cos t, F = (t - sin(2 t) / 2) / pi
    shares = (torch.arange(num) + 0.5) / num
    for _ in range(60):
        t = (low + high) / 2
        below = (t - (2 * t).sin() / 2) / math.pi < shares
        low, high = torch.where(below, t, low), torch.where(below, high, t)
    return -2 * low.cos()


def test_values_at_the_quantiles_of_a_semicircle_are_as_near_to_it_as_so_many_can_be():
    assert noise._distance(quantiles(50)) == pytest.approx(0.01, abs=1e-9)


def test_other_laws_are_far_from_it():
    assert noise._distance(torch.zeros(50)) == pytest.approx(0.5)
    assert noise._distance(0.5 * quantiles(50)) > 0.1
    assert noise._distance(quantiles(50) + 5) == pytest.approx(1.0)  # beyond the edge


def test_the_claims_name_both_the_printed_scale_and_the_right_one():
    printed, unscaled, mended, _ = noise.semicircle()
    assert float(printed.measured.value) == pytest.approx(2 / math.sqrt(2 * 400), rel=0.02)
    assert float(unscaled.measured.value) == pytest.approx(math.sqrt(400), rel=0.02)
    assert mended.verdict == "holds"


def test_sums_over_more_samples_move_on_as_the_central_limit_theorem_has_it():
    """S_n / sqrt(n) and S_4n / sqrt(4 n) have the correlation 1/2, so that their difference has variance 1."""
    moved, law, dependent, lindeberg = noise.convergence()
    assert moved.measured == pytest.approx(1, abs=0.1)
    assert law.measured < 0.03
    assert dependent.measured == pytest.approx(4 * math.exp(-0.5) / math.sqrt(2 * math.pi), rel=0.03)  # E |g^2 - 1|
    assert 0 < lindeberg.measured < 0.005  # 2 (4 phi(4) + Q(4)) = 0.0011, twice the variance on the diagonal
