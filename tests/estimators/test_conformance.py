"""Every estimator through the public conformance check: unbiased, covering, repeatable, saved and loaded equal."""

from functools import cache

import pytest
import torch
from matrices import OUTLIERS, POSITIVE, operator, rotated
from torch import nn

import ritz
from ritz.estimators.noise import minibatch_moment
from ritz.testing import check_estimator

SPIKED, DEFINITE = operator("outliers"), operator("positive")
TRACE, SQUARE = float(OUTLIERS.sum()), float(OUTLIERS.square().sum())


@cache
def spectrum(num_steps: int, seed: int) -> ritz.Spectrum:
    """Made once for all numbers that are read from it."""
    return ritz.spectrum(SPIKED, num_steps, 8, seed=seed)


SAMPLED = {
    "Hutchinson": (lambda seed: ritz.trace(SPIKED, "hutchinson", 12, seed), TRACE),
    "Hutch++": (lambda seed: ritz.trace(SPIKED, "hutch++", 24, seed), TRACE),
    "XTrace": (lambda seed: ritz.trace(SPIKED, "xtrace", 24, seed), TRACE),
    "the trace of a spectrum": (lambda seed: spectrum(3, seed).trace, TRACE),
    "Tr A^2 of a spectrum": (lambda seed: spectrum(3, seed).moment(2), SQUARE),
    "the trace without a head": (
        lambda seed: ritz.spectrum(DEFINITE, 3, 8, seed=seed, reorthogonalize="none").trace, float(POSITIVE.sum()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_averages_over_probes_conform(name):
    estimate, truth = SAMPLED[name]
    assert 0.91 <= check_estimator(estimate, truth, num_seeds=300) <= 0.99


@pytest.mark.parametrize("name", ["frobenius_norm", "diagonal"])
def test_other_averages_conform(name):
    truth = OUTLIERS.norm() if name == "frobenius_norm" else SPIKED.dense().diagonal()
    estimate = getattr(ritz, name)
    # the root of an unbiased square is not itself unbiased, and the entries of a diagonal have intervals of their own
    check_estimator(lambda seed: estimate(SPIKED, 24, seed), truth, num_seeds=150, unbiased=False, low=0.90, high=1.0)


BRACKETED = {
    "lambda max": (lambda s: s.lambda_max, OUTLIERS.max()),
    "lambda min": (lambda s: s.lambda_min, OUTLIERS.min()),
    "spectral norm": (lambda s: s.spectral_norm, OUTLIERS.abs().max()),
    "mass": (lambda s: s.mass(below=0.0), (OUTLIERS <= 0).double().mean()),
    "log-determinant": (lambda s: s.logdet(shift=6.0), (OUTLIERS + 6).log().sum()),
    "negative trace": (lambda s: s.negative_trace, OUTLIERS.clamp(max=0).sum()),
}


@pytest.mark.parametrize("name", BRACKETED)
def test_numbers_with_a_bracket_conform(name):
    pick, truth = BRACKETED[name]
    check_estimator(lambda seed: pick(spectrum(20, seed)), truth, num_seeds=60, unbiased=False, high=1.0)


def test_a_second_spectrum_of_a_seed_has_the_numbers_of_the_first():
    """Which the checks above, that share spectra, do not see."""
    again = ritz.spectrum(SPIKED, 20, 8, seed=0)
    for pick in (lambda s: s.trace, lambda s: s.moment(2), *(pick for pick, _ in BRACKETED.values())):
        assert pick(again) == pick(spectrum(20, 0))


def test_exact_values_conform():
    A = rotated(torch.tensor([3.0, 1.0, -2.0]))
    for estimate, truth in (
        (lambda seed: ritz.trace(A, "exact", seed=seed), 2.0),
        (lambda seed: ritz.spectrum(A, seed=seed).moment(2), 14.0),
        (lambda seed: ritz.frobenius_norm(A, seed=seed), 14.0**0.5),
    ):
        check_estimator(estimate, truth, num_seeds=3)


def test_estimates_from_batches_conform():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    X, y = torch.randn(60, 2), torch.randint(2, (60,))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
    each = torch.stack([ritz.Hessian(risk.on((X[i : i + 1], y[i : i + 1]))).dense() for i in range(60)])
    noise = float((each - each.mean(0)).square().sum()) / 59 / 3 / risk.dim
    # of its coverage test_noise.py tells more
    check_estimator(lambda seed: ritz.curvature_noise(risk, 10, 3, seed), noise, num_seeds=40, low=0.88, high=1.0)
    square = float(each.mean(0).square().sum())
    check_estimator(lambda seed: minibatch_moment(risk, 12, 6, seed), square, num_seeds=100, low=0.88, high=1.0)
