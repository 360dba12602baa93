"""The laws against quadrature, their limits and drawn matrices."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from ritz import rmt
from ritz.rmt.tracy_widom import DEVIATION, MEAN

LAWS = [
    rmt.Semicircle(0.7),
    rmt.MarchenkoPastur(0.3, 2.0),
    rmt.MarchenkoPastur(1.0),
    rmt.MarchenkoPastur(4.0, 0.5),
]
each_law = pytest.mark.parametrize("law", LAWS, ids=str)


def integral(law, f, to: float = math.pi) -> float:
    """Of f times the density, over the angle t with x = mid - half cos(t), where no edge is singular."""
    low, high = law.edges
    mid, half = (low + high) / 2, (high - low) / 2

    def inner(t: float) -> float:
        x = mid - half * math.cos(t)
        return f(x) * float(law.density(x)) * half * math.sin(t)

    return quad(inner, 0.0, to, epsabs=1e-12)[0]


@each_law
def test_the_density_has_the_mass_and_the_moments_of_the_law(law):
    assert integral(law, lambda x: 1.0) == pytest.approx(1 - law.zeros, abs=1e-9)
    for k in range(1, 6):
        assert integral(law, lambda x, k=k: x**k) == pytest.approx(law.moment(k), abs=1e-9)
    assert law.moment(0) == 1.0


@each_law
def test_the_distribution_function_is_the_integral_of_the_density(law):
    low, high = law.edges
    for angle in (0.3, 1.0, 2.0, 3.0):
        x = (low + high) / 2 - (high - low) / 2 * math.cos(angle)
        assert float(law.cdf(x)) == pytest.approx(law.zeros + integral(law, lambda x: 1.0, angle), abs=1e-9)
    assert law.cdf(torch.tensor([low - 9, high, high + 1])).tolist() == pytest.approx([0.0, 1.0, 1.0], abs=1e-12)


@each_law
def test_quantiles_invert_the_distribution_function(law):
    q = law.zeros + (1 - law.zeros) * torch.tensor([1e-6, 0.1, 0.5, 0.9, 1 - 1e-6])
    torch.testing.assert_close(law.cdf(law.quantile(q)), q, rtol=0, atol=1e-12)
    assert float(law.quantile(1.0)) == pytest.approx(law.edges[1])
    assert float(law.quantile(0.0)) == pytest.approx(0.0 if law.zeros else law.edges[0])


def test_half_of_the_zeros_is_zero():
    assert float(rmt.MarchenkoPastur(4.0).quantile(0.375)) == 0.0


def distance(values: torch.Tensor, law) -> float:
    """Kolmogorov's, for eigenvalues without ties."""
    num = len(values)
    steps = torch.arange(num + 1) / num
    truth = law.cdf(values)
    return max(float((steps[1:] - truth).abs().max()), float((truth - steps[:-1]).abs().max()))


def test_eigenvalues_of_a_wigner_matrix_follow_the_semicircle():
    """By the rigidity of eigenvalues the distance is a few 1 / P, not the 1 / sqrt(P) of independent draws."""
    for seed in range(4):
        assert distance(torch.linalg.eigvalsh(rmt.wigner(300, 2.0, seed=seed)), rmt.Semicircle(2.0)) < 5 / 300


@pytest.mark.parametrize("num_samples", [200, 800])
def test_eigenvalues_of_a_wishart_matrix_follow_marchenko_and_pastur(num_samples):
    for seed in range(4):
        values = torch.linalg.eigvalsh(rmt.wishart(200, num_samples, 1.5, seed=seed))
        assert distance(values, rmt.MarchenkoPastur(200 / num_samples, 1.5)) < 5 / 200


def test_moments_of_drawn_matrices_are_those_of_the_law():
    """E Tr X^2 / P = s2 (1 + 1 / P), E Tr X^4 / P = s2^2 (2 + 5 / P + 5 / P^2), for the normal ensemble."""
    dim = 60
    drawn = torch.stack([torch.linalg.eigvalsh(rmt.wigner(dim, 2.0, seed=seed)) for seed in range(300)])
    for k, truth in ((2, 2 * (1 + 1 / dim)), (4, 4 * (2 + 5 / dim + 5 / dim**2))):
        powers = drawn.pow(k).mean(1)
        assert float(powers.mean()) == pytest.approx(truth, abs=4 * float(powers.std()) / math.sqrt(300))
        assert rmt.Semicircle(2.0).moment(k) == pytest.approx(truth, rel=4 / dim)


def test_the_edge_of_the_mean_of_a_batch_is_twice_what_seed_004_says():
    """The mean of B matrices with entries of deviation sigma: 2 sigma sqrt(P / B), and not sigma sqrt(P / B)."""
    sigma, dim, batch, num = 0.3, 200, 16, 8
    generator = torch.Generator().manual_seed(0)
    each = torch.randn(num, batch, dim, dim, generator=generator).tril(-1) * sigma
    top = float(torch.linalg.eigvalsh((each + each.mT).mean(1))[:, -1].mean())
    law = rmt.Semicircle.of_entries(sigma, dim, batch)
    assert law.edges[1] == pytest.approx(2 * sigma * math.sqrt(dim / batch))
    truth, width = law.edges[1] + MEAN * law.edge_scale(dim), DEVIATION * law.edge_scale(dim)
    assert top == pytest.approx(truth, abs=4 * width / math.sqrt(num))
    assert law.threshold == pytest.approx(sigma * math.sqrt(dim / batch))
    assert top > 1.8 * law.threshold
    assert top < 0.01 * math.sqrt(2) * dim  # where equation 7, as printed, has its edge


def test_against_the_data_themselves_a_large_batch_has_less_noise():
    assert rmt.Semicircle.of_entries(1.0, 10, 50, 100).s2 == pytest.approx(10 * (1 / 50 - 1 / 100))


def test_the_noise_of_a_long_average_of_outer_products_becomes_a_semicircle():
    x = torch.linspace(-2.5, 2.5, 101)
    gaps = []
    for ratio in (1e-2, 1e-4):  # (S - 1) / sqrt(r)
        law = rmt.MarchenkoPastur(ratio)
        gaps.append(float((law.cdf(1 + math.sqrt(ratio) * x) - rmt.Semicircle(1.0).cdf(x)).abs().max()))
        central = law.moment(2) - 1, law.moment(3) - 3 * law.moment(2) + 2
        assert central == pytest.approx((ratio, ratio**2), rel=1e-6)  # s2 = r, skewness sqrt(r)
    assert gaps[0] < 0.02
    assert gaps[1] < 0.002


@given(nu=st.floats(1.01, 50.0), s2=st.floats(1e-6, 1e6), sign=st.sampled_from([-1.0, 1.0]))
def test_a_spike_is_found_again_from_its_outlier(nu, s2, sign):
    law = rmt.Semicircle(s2)
    spike = sign * nu * math.sqrt(s2)
    outlier = law.outlier(spike)
    assert abs(float(outlier)) > law.edges[1]
    assert float(law.spike(outlier)) == pytest.approx(spike, rel=1e-6)
    # d lambda / d nu is the squared overlap: perturbation theory, and theorem 1 of seed 004
    step = 1e-6 * spike
    slope = float(law.outlier(spike + step) - law.outlier(spike - step)) / (2 * step)
    assert float(law.overlap(spike)) == pytest.approx(slope, rel=1e-3, abs=1e-6)


@given(gap=st.floats(0.01, 50.0), ratio=st.floats(0.01, 20.0), variance=st.floats(1e-3, 1e3))
def test_a_population_eigenvalue_is_found_again_from_its_outlier(gap, ratio, variance):
    law = rmt.MarchenkoPastur(ratio, variance)
    spike = law.threshold * (1 + gap)
    outlier = law.outlier(spike)
    assert float(outlier) > law.edges[1]
    assert float(law.spike(outlier)) == pytest.approx(spike, rel=1e-5)
    assert 0 < float(law.overlap(spike)) < 1


@each_law
def test_below_the_threshold_there_is_nothing_to_see(law):
    weak = 0.9 * law.threshold
    assert float(law.outlier(weak)) == pytest.approx(law.edges[1])
    assert float(law.overlap(weak)) == 0.0
    assert float(law.spike(0.99 * law.edges[1])) == (0.0 if isinstance(law, rmt.Semicircle) else law.variance)
    assert float(law.overlap(law.threshold * (1 + 1e-9))) == pytest.approx(0.0, abs=1e-8)  # it grows from 0


@pytest.mark.parametrize(("dim", "num_samples"), [(150, 450), (300, 150)])
def test_outliers_and_overlaps_of_spiked_wishart_matrices_are_those_of_the_law(dim, num_samples):
    law = rmt.MarchenkoPastur(dim / num_samples)
    spikes = torch.tensor([6.0, 4.0]) * law.threshold / 1.5
    tops, overlaps = [], []
    for seed in range(30):
        values, vectors = torch.linalg.eigh(rmt.wishart(dim, num_samples, spikes=spikes.tolist(), seed=seed))
        tops.append(values[[-1, -2]])
        overlaps.append(vectors[[0, 1], [-1, -2]].square())
    for drawn, truth in ((torch.stack(tops), law.outlier(spikes)), (torch.stack(overlaps), law.overlap(spikes))):
        error = drawn.std(0) / math.sqrt(30)
        assert bool(((drawn.mean(0) - truth).abs() < 4 * error + truth * 3 / dim).all()), (drawn.mean(0), truth)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rmt.Semicircle(0.0), "must be positive and finite, got 0.0"),
        (lambda: rmt.Semicircle(math.nan), "must be positive and finite, got nan"),
        (
            lambda: rmt.Semicircle.of_entries(1.0, 10, 8, 8),
            "batch_size < num_samples, got dim = .*, batch_size = 8 and num_samples = 8",
        ),
        (lambda: rmt.MarchenkoPastur(-1.0), r"expected ratio \(columns / rows\) and variance positive"),
        (lambda: rmt.Semicircle(1.0).quantile(1.5), "level of a quantile must lie between 0 and 1, got 1.5"),
        (lambda: rmt.Semicircle(1.0).moment(-1), "order of the moment, must be at least 0, got -1"),
        (lambda: rmt.Semicircle(1.0).edge_scale(0), "must be at least 1, got 0"),
        (lambda: rmt.wigner(2, -1.0), "s2 must not be negative, got -1.0"),
        (lambda: rmt.wigner(2, spikes=[1.0, 2.0, 3.0]), "at most dim spikes, got dim = 2 and 3 spikes"),
        (lambda: rmt.wishart(2, 0), "num_samples >= 1 and variance > 0, got 0"),
        (lambda: rmt.wishart(2, 3, spikes=[-1.0]), r"must not be negative, got \[-1.0\]"),
    ],
)
def test_what_has_no_law_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first, again = rmt.wigner(5, seed=3), rmt.wigner(5, seed=3)
    rmt.wishart(5, 4)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)
