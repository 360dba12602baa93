"""The law of the largest eigenvalue against tables and drawn matrices."""

import math

import pytest
import torch

from ritz import rmt
from ritz.rmt.tracy_widom import DEVIATION, MEAN


def test_the_law_has_the_mean_and_the_variance_of_the_tables():
    x = torch.arange(-10.0, 7.0, 0.125)  # a smooth function that is constant at both ends: sums converge fast
    F = rmt.tracy_widom_cdf(x)
    assert bool((F.diff() > -1e-13).all())
    mean = float(x[-1]) - 0.125 * float(F.sum() - F[-1] / 2)  # E s = b - the integral of F up to b
    square = float(x[-1]) ** 2 - 0.125 * float((2 * x * F).sum() - x[-1] * F[-1])
    assert mean == pytest.approx(MEAN, abs=1e-4)
    assert math.sqrt(square - mean**2) == pytest.approx(DEVIATION, abs=2e-3)


def test_quantiles_are_those_of_the_tables():
    """Bejan 2005, table 4, and Johnstone 2001."""
    for level, truth in ((0.05, -3.1804), (0.5, -1.2686), (0.9, 0.4501), (0.95, 0.9793), (0.99, 2.0234)):
        assert rmt.tracy_widom_quantile(level) == pytest.approx(truth, abs=2e-4)


def test_far_out_the_law_is_0_and_1():
    assert rmt.tracy_widom_cdf(torch.tensor([-50.0, 50.0])).tolist() == pytest.approx([0.0, 1.0], abs=1e-13)


@pytest.mark.parametrize("kind", ["wigner", "wishart"])
def test_largest_eigenvalues_of_drawn_noise_follow_the_law(kind):
    dim, num = 120, 200
    if kind == "wigner":
        law, drawn = rmt.Semicircle(1.0), (rmt.wigner(dim, seed=seed) for seed in range(num))
    else:
        law, drawn = rmt.MarchenkoPastur(0.5), (rmt.wishart(dim, 2 * dim, seed=seed) for seed in range(num))
    top = torch.stack([torch.linalg.eigvalsh(matrix)[-1] for matrix in drawn])
    z = (top - law.edges[1]) / law.edge_scale(dim)
    # at this size the mean is off by some tenths of P^(-1/3)
    assert float(z.mean()) == pytest.approx(MEAN, abs=4 * DEVIATION / math.sqrt(num) + 0.15)
    assert float(z.std()) == pytest.approx(DEVIATION, rel=0.2)
    assert float((z < rmt.tracy_widom_quantile(0.9)).double().mean()) == pytest.approx(0.9, abs=0.08)


def test_levels_outside_are_refused():
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        rmt.tracy_widom_quantile(1.0)
    with pytest.raises(ValueError, match="further from 0 and 1 than float64 resolves"):
        rmt.tracy_widom_quantile(1 - 1e-16)
