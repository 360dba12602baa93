"""Damping rules, against averages by hand and against the shrinkage that simulated matrices ask for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ritz.optim.rules import (
    BulkEdge,
    Constant,
    LedoitWolf,
    LevenbergMarquardt,
    NoiseVariance,
    Seen,
)
from ritz.results import Estimate


def seen(start: float = 0.1, **values: float) -> Seen:
    return Seen(start=start, **{name: Estimate(name=name, value=value) for name, value in values.items()})


def wigner(dim: int, size: float, seed: int) -> Tensor:
    """A symmetric Gaussian matrix with E Tr X^2 / dim = size^2."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(dim, dim, generator=g)
    return (x + x.T) / math.sqrt(2 * (dim + 1)) * size


# ------------------------------------------------------------------------------------------ equation 15


def test_the_average_starts_from_the_first_estimate_and_keeps_seven_tenths_of_what_it_has():
    rule, average = NoiseVariance(), 0.5
    for noise in (0.5, 0.1, 0.9, 0.2):
        average = 0.7 * average + 0.3 * noise if noise != 0.5 else 0.5
        assert rule.update(seen(0.1, noise=noise), 1) == pytest.approx(0.1 + average)


def test_a_floor_is_the_larger_of_start_and_noise():
    assert NoiseVariance(combine="floor").update(seen(0.1, noise=0.02), 1) == 0.1
    assert NoiseVariance(combine="floor").update(seen(0.1, noise=0.3), 1) == pytest.approx(0.3)


def test_the_start_of_a_rule_goes_before_that_of_the_optimiser():
    assert NoiseVariance(start=1.0).update(seen(0.1, noise=0.25), 1) == 1.25


def test_an_average_over_batches_has_the_variance_that_the_rule_accounts_for():
    """The variance of m <- b m + (1 - b) x, run to its stationary state."""
    beta = 0.8
    g = torch.Generator().manual_seed(0)
    x, m = torch.randn(4000, 400, generator=g), torch.zeros(400)
    kept = []
    for row in x:
        m = beta * m + (1 - beta) * row
        kept.append(m)
    variance = float(torch.stack(kept[200:]).var())
    rule = NoiseVariance(start=0.0, account_for_ema=beta)
    assert rule.update(seen(noise=1.0), 1) == pytest.approx((1 - beta) / (1 + beta))
    assert variance == pytest.approx((1 - beta) / (1 + beta), rel=0.02)


def test_the_batch_factor_brings_noise_to_the_batch_size_of_training():
    rule = NoiseVariance(start=0.0, factor=32 / 128)  # estimated at 32, trained at 128
    assert rule.update(seen(noise=0.4), 1) == pytest.approx(0.1)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.floats(0, 0.99))
def test_the_damping_lies_between_the_estimates_it_was_made_of(noises, decay):
    rule = NoiseVariance(start=0.0, decay=decay)
    for noise in noises:
        damping = rule.update(seen(noise=noise), 1)
    assert min(noises) - 1e-12 <= damping <= max(noises) + 1e-12


def test_equation_15_depends_on_the_units_of_the_loss():
    """With the loss times c the matrix grows by c and the noise by c^2: the relative damping is another."""
    one, ten = (NoiseVariance(start=0.0).update(seen(noise=0.2 * c**2), 1) for c in (1.0, 10.0))
    assert ten / 10 == pytest.approx(10 * one)


# ------------------------------------------------------------------------------------------ Ledoit and Wolf


def spiked(dim: int = 60) -> Tensor:
    g = torch.Generator().manual_seed(1)
    q = torch.linalg.qr(torch.randn(dim, dim, generator=g)).Q
    values = torch.linspace(0.5, 1.5, dim)
    values[:3] = torch.tensor([8.0, 6.0, 4.0])
    return (q * values) @ q.T


def test_ledoit_wolf_damping_is_the_best_shrinkage_towards_the_mean_curvature():
    """beta H_b + (1 - beta) mu I against H, in mean square over draws of the noise, on a grid of beta."""
    H, dim, size = spiked(), 60, 1.2
    mu, eye = float(H.trace()) / dim, torch.eye(dim)
    draws = H + torch.stack([wigner(dim, size, seed) for seed in range(60)])
    grid = torch.linspace(0.05, 0.95, 91)
    errors = [float((b * draws + (1 - b) * mu * eye - H).square().sum()) for b in grid]
    best = float(grid[torch.tensor(errors).argmin()])
    rule = LedoitWolf(start=0.0)
    delta = rule.update(seen(noise=size**2, trace=mu, second_moment=float(H.square().sum()) / dim), 1)
    assert mu / (mu + delta) == pytest.approx(best, abs=0.011)  # beta of the damped matrix, to the grid


@given(st.floats(0.01, 100))
def test_ledoit_wolf_and_edge_damping_scale_with_the_loss(c):
    one = {"noise": 2.0, "trace": 1.0, "second_moment": 5.0}
    scaled = {"noise": 2.0 * c**2, "trace": c, "second_moment": 5.0 * c**2}
    for rule in (LedoitWolf, BulkEdge):
        assert rule(start=0.0).update(seen(**scaled), 1) == pytest.approx(c * rule(start=0.0).update(seen(**one), 1))


def test_a_signal_that_drowns_in_noise_has_bounded_damping():
    for second in (1.0, 0.5, 1.0 + 1e-9):  # a^2 = 0, below 0, next to 0
        assert LedoitWolf(start=0.0, most=50.0).update(seen(noise=1.0, trace=1.0, second_moment=second), 1) == 50.0


def test_no_noise_asks_for_no_damping():
    assert LedoitWolf(start=0.0).update(seen(noise=0.0, trace=0.0, second_moment=0.0), 1) == 0.0
    assert BulkEdge(start=0.0).update(seen(noise=0.0), 1) == 0.0


def test_estimates_are_averaged_before_they_are_divided():
    """A single second moment may be negative; its average is not."""
    rule = LedoitWolf(start=0.0, decay=0.5)
    rule.update(seen(noise=1.0, trace=1.0, second_moment=-2.0), 1)
    damping = rule.update(seen(noise=1.0, trace=1.0, second_moment=12.0), 2)
    assert damping == pytest.approx(1 / (5 - 1))


def test_ledoit_wolf_refuses_negative_curvature():
    with pytest.raises(ValueError, match="use curvature='ggn'"):
        LedoitWolf().update(seen(noise=1.0, trace=-0.1, second_moment=1.0), 1)


# ------------------------------------------------------------------------------------------ bulk edge


def test_two_roots_of_the_noise_are_the_edge_of_its_spectrum():
    X = wigner(800, 0.7, 0)
    noise = float(X.square().sum()) / 800
    damping = BulkEdge(c=2.0, start=0.0).update(seen(noise=noise), 1)
    assert damping == pytest.approx(float(torch.linalg.eigvalsh(X)[-1]), rel=0.03)


# ------------------------------------------------------------------------------------------ the others


def test_a_good_step_lowers_the_damping_and_a_bad_one_raises_it():
    """The sign that the code of seed 004 has wrong."""
    assert LevenbergMarquardt().update(seen(1.0, reduction_ratio=1.0), 5) == pytest.approx(0.9**5)
    assert LevenbergMarquardt().update(seen(1.0, reduction_ratio=-1.0), 5) == pytest.approx(0.9**-5)


@pytest.mark.parametrize(("ratio", "factor"), [(0.5, 1.0), (math.nan, 1.0), (-math.inf, 2.0), (0.24, 2.0), (0.76, 0.5)])
def test_a_fair_step_or_none_leaves_it(ratio, factor):
    assert LevenbergMarquardt(omega=0.5).update(seen(1.0, reduction_ratio=ratio), 5) == factor


def test_levenberg_marquardt_stays_within_its_bounds():
    rule = LevenbergMarquardt(start=1.0, omega=0.1, least=0.05, most=2.0)
    assert [rule.update(seen(reduction_ratio=1.0), 5) for _ in range(3)] == pytest.approx([0.1, 0.05, 0.05])
    assert [rule.update(seen(reduction_ratio=0.0), 5) for _ in range(3)] == pytest.approx([0.5, 2.0, 2.0])


def test_constant_is_constant():
    assert [Constant().update(seen(0.2), step) for step in (1, 2)] == [0.2, 0.2]
    assert Constant(0.5).update(seen(0.2), 1) == 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NoiseVariance(combine="max"), "combine must be 'add' or 'floor', got 'max'"),
        (lambda: NoiseVariance(decay=1.0), r"decay must lie in \[0, 1\), got 1.0"),
        (lambda: BulkEdge(account_for_ema=-0.1), r"account_for_ema must lie in \[0, 1\)"),
        (lambda: NoiseVariance(start=-1.0), "start must not be negative, got -1.0"),
        (lambda: BulkEdge(c=math.nan), "c must not be negative, got nan"),
        (lambda: LedoitWolf(most=-1.0), "most must not be negative"),
        (lambda: Constant(-0.1), "value must not be negative"),
        (lambda: LevenbergMarquardt(omega=1.0), "omega must lie between 0 and 1"),
        (lambda: LevenbergMarquardt(lower=0.8), "expected lower < upper and least < most"),
        (lambda: NoiseVariance().update(seen(0.1), 1), "noise was not measured"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
