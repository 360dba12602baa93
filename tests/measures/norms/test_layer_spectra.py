"""Spectra of weight matrices: tails against samples of known laws and SciPy, bulks against noise and planted spikes."""

import math

import pytest
import torch
from cases import make, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ritz
from ritz.measures.norms.layer_spectra import layer_spectra
from ritz.measures.norms.matrix_laws import fit_bulk, fit_power_law


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pareto(alpha: float, num: int, seed: int) -> Tensor:
    """Samples of p(x) ~ x^-alpha, x >= 1, by inversion."""
    return torch.rand(num, generator=generator(seed)) ** (-1 / (alpha - 1))


def noise(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=generator(seed))


def planted(rows: int, columns: int, strengths: list[float], seed: int = 0) -> Tensor:
    """Noise of variance 1 and singular values of these sizes, in units of what noise alone reaches."""
    U = torch.linalg.qr(noise(rows, len(strengths), seed + 1)).Q
    V = torch.linalg.qr(noise(columns, len(strengths), seed + 2)).Q
    sizes = torch.tensor(strengths) * (rows**0.5 + columns**0.5)
    return noise(rows, columns, seed) + (U * sizes) @ V.T


def squares(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix).square()


def risk_of(*matrices: Tensor) -> ritz.Risk:
    """Linear layers that are never called, with these weights."""
    layers = [nn.Linear(m.shape[1], m.shape[0], bias=False, dtype=m.dtype) for m in matrices]
    with torch.no_grad():
        for layer, matrix in zip(layers, matrices, strict=True):
            layer.weight.copy_(matrix)
    return ritz.Risk(nn.Sequential(*layers), nn.MSELoss(), (torch.ones(1), torch.ones(1)))


# ------------------------------------------------------------------------------------------------ the tail


@pytest.mark.parametrize("alpha", [1.8, 2.5, 4.0])
def test_the_exponent_is_right_within_its_standard_error(alpha):
    fits = [fit_power_law(pareto(alpha, 300, seed)) for seed in range(60)]
    z = torch.tensor([(fit.alpha - alpha) / fit.stderr for fit in fits])
    assert abs(float(z.mean())) < 4 * 1.3 / math.sqrt(60)
    assert 0.7 < float(z.std()) < 1.6  # the choice of a threshold adds to the error
    assert float((z.abs() < 2).double().mean()) > 0.8


@given(alpha=st.floats(1.3, 5), seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_above_its_threshold_the_exponent_is_that_of_scipy(alpha, seed):
    from scipy.stats import kstest
    from scipy.stats import pareto as law

    x = pareto(alpha, 60, seed)
    fit = fit_power_law(x)
    tail = x[x >= fit.x_min].numpy()
    assert len(tail) == fit.num_tail
    shape, _, _ = law.fit(tail, floc=0, fscale=fit.x_min)
    assert fit.alpha == pytest.approx(shape + 1, rel=1e-5)
    assert fit.distance == pytest.approx(kstest(tail, law(fit.alpha - 1, scale=fit.x_min).cdf).statistic)
    assert fit.stderr == pytest.approx((fit.alpha - 1) / math.sqrt(len(tail)))


def test_the_threshold_is_that_of_the_least_distance():
    from scipy.stats import kstest
    from scipy.stats import pareto as law

    x = pareto(2.5, 40, 0).sort().values
    tails = [x[first:].numpy() for first in range(31)]  # at least ten values above
    distances = [
        kstest(tail, law(len(tail) / float(torch.as_tensor(tail / tail[0]).log().sum()), scale=tail[0]).cdf).statistic
        for tail in tails
    ]
    fit = fit_power_law(x)
    assert fit.distance == pytest.approx(min(distances))
    assert fit.x_min == pytest.approx(float(tails[distances.index(min(distances))][0]))


def test_the_threshold_is_found_where_a_tail_begins():
    body = 2 * torch.rand(1000, generator=generator(1))
    fit = fit_power_law(torch.cat([body, 3 * pareto(2.5, 500, 2)]))
    assert fit.x_min >= 3
    assert fit.num_tail > 250
    assert abs(fit.alpha - 2.5) < 3 * fit.stderr


def test_the_exponent_does_not_see_the_unit():
    x = pareto(2.5, 100, 0)
    first, second = fit_power_law(x), fit_power_law(1e6 * x)
    assert second.alpha == pytest.approx(first.alpha)
    assert second.x_min == pytest.approx(1e6 * first.x_min)


def test_equal_values_are_one_threshold():
    x = pareto(2.5, 50, 0)
    assert fit_power_law(x.repeat(2)).alpha == pytest.approx(fit_power_law(x.repeat(2).flip(0)).alpha)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(5), "at least 10 values"),
        (torch.cat([torch.zeros(1), torch.arange(1.0, 20)]), "positive and finite"),
        (torch.cat([torch.full((1,), math.inf), torch.arange(1.0, 20)]), "positive and finite"),
        (torch.full((20,), 3.0), "all values are 3: there is no tail"),
    ],
)
def test_values_without_a_tail_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(values)


# ------------------------------------------------------------------------------------------------ the bulk


@pytest.mark.parametrize("shape", [(10_000, 10), (20, 200), (100, 50), (60, 60)])
def test_half_of_the_law_lies_below_the_median_of_the_eigenvalues(shape):
    from scipy.integrate import quad

    bulk = fit_bulk(torch.full((min(shape),), 3.0), shape)
    unit, ratio = bulk.variance * max(shape), min(shape) / max(shape)
    low, high = unit * (1 - ratio**0.5) ** 2, unit * (1 + ratio**0.5) ** 2

    def below(x: float) -> float:
        return math.sqrt(max((high - x) * (x - low), 0.0)) / (2 * math.pi * ratio * unit * x)

    mass, _ = quad(below, max(low, 1e-14), 3.0, limit=400)
    assert mass == pytest.approx(0.5, abs=1e-6)
    assert bulk.edge == pytest.approx(high)
    ends, sides = (sum(size**power for size in shape) for power in (0.5, -0.5))
    assert bulk.threshold == pytest.approx(bulk.variance * (ends**2 + 2.0234 * ends * sides ** (1 / 3)), rel=1e-5)


@pytest.mark.parametrize("shape", [(200, 100), (100, 200), (120, 120), (400, 50)])
def test_noise_has_no_spikes(shape):
    found = [fit_bulk(squares(2 * noise(*shape, seed)), shape) for seed in range(12)]
    assert sum(bulk.num_spikes > 0 for bulk in found) <= 2  # one in a hundred each
    variance = torch.tensor([bulk.variance for bulk in found])
    assert float(variance.mean()) == pytest.approx(4.0, rel=0.02)
    top = torch.tensor([float(squares(2 * noise(*shape, seed))[0]) / found[seed].edge for seed in range(12)])
    assert float(top.mean()) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("shape", [(200, 100), (100, 200), (120, 120)])
def test_planted_spikes_are_counted(shape):
    found = [fit_bulk(squares(planted(*shape, [4.0, 3.0, 2.0], 10 * seed)), shape) for seed in range(12)]
    assert sum(bulk.num_spikes != 3 for bulk in found) <= 2
    assert sum(bulk.variance for bulk in found) / 12 == pytest.approx(1.0, rel=0.03)


def test_many_spikes_do_not_hide_each_other():
    shape = (200, 100)
    assert fit_bulk(squares(planted(*shape, [2.0 + i / 10 for i in range(30)])), shape).num_spikes == 30


def test_a_spike_that_is_too_weak_stays_in_the_bulk():
    shape = (200, 100)
    weak = (200 * 100) ** 0.25 / (200**0.5 + 100**0.5) / 2  # half of what leaves the bulk (Baik, Ben Arous, Peche 2005)
    assert fit_bulk(squares(planted(*shape, [weak])), shape).num_spikes == 0


def test_the_bulk_of_a_zero_matrix_is_empty():
    bulk = fit_bulk(torch.zeros(20), (20, 30))
    assert (bulk.variance, bulk.edge, bulk.num_spikes) == (0.0, 0.0, 0)


def test_a_number_of_eigenvalues_that_does_not_fit_the_shape_is_refused():
    with pytest.raises(ValueError, match=r"a matrix of shape \(20, 30\) has .* = 20 eigenvalues, got 10"):
        fit_bulk(torch.ones(10), (20, 30))


# ---------------------------------------------------------------------------------------------- all layers


def test_sizes_are_those_of_the_matrices():
    risk = problem("conv").risk()
    found = layer_spectra(risk)
    assert list(found.layers) == ["0.weight", "4.weight"]
    for name, layer in found.layers.items():
        W = risk.params()[name].flatten(1)
        values = torch.linalg.eigvalsh(W @ W.T if W.shape[0] <= W.shape[1] else W.T @ W)
        torch.testing.assert_close(layer.eigenvalues, values)
        assert layer.shape == tuple(W.shape)
        assert float(layer.log_norm) == pytest.approx(math.log10(float(W.square().sum())))
        assert float(layer.log_spectral_norm) == pytest.approx(2 * math.log10(float(torch.linalg.matrix_norm(W, 2))))
        assert float(layer.stable_rank) == pytest.approx(float(values.sum() / values[-1]))
    mean = sum(float(layer.log_norm) for layer in found.layers.values()) / 2
    assert float(found.log_norm) == pytest.approx(mean)
    assert found.log_norm.exact
    assert set(found.log_norm.parts) == set(found.layers)


def test_a_layer_with_too_few_eigenvalues_is_reported_with_the_reason():
    found = layer_spectra(risk_of(noise(80, 60), noise(60, 12)))
    for estimate in (found.alpha, found.alpha_hat, found.soft_rank, found.num_spikes):
        assert estimate.stop == "1 of 2 layers left out: 12 eigenvalues that are not 0, fewer than 50"
        assert math.isnan(float(estimate.parts["1.weight"]))
        assert "fewer than 50" in estimate.parts["1.weight"].stop
        assert float(estimate) == float(estimate.parts["0.weight"])
    assert found.log_norm.stop == "completed"
    assert layer_spectra(risk_of(noise(80, 60), noise(60, 12)), min_eigenvalues=12).alpha.stop == "completed"


def test_where_no_layer_is_large_enough_the_mean_is_not_a_number_and_says_why():
    found = layer_spectra(problem("mlp_relu").risk()).alpha
    assert math.isnan(float(found))
    assert found.stop == "2 of 2 layers left out: 4 eigenvalues that are not 0, fewer than 50"


def test_a_matrix_without_a_tail_has_a_bulk_all_the_same():
    orthogonal = torch.linalg.qr(noise(60, 60)).Q
    found = layer_spectra(risk_of(orthogonal))
    assert found.layers["0.weight"].tail is None
    assert "no tail to fit" in found.alpha.stop
    assert found.num_spikes.stop == "completed"


def test_round_off_is_not_an_eigenvalue():
    flat = (noise(80, 20) @ noise(20, 70, 1)).float()
    found = layer_spectra(risk_of(flat)).layers["0.weight"]
    assert int((found.eigenvalues > 0).sum()) == 20
    assert found.note == "20 eigenvalues that are not 0, fewer than 50"


def test_heavy_tails_noise_and_spikes_are_told_apart():
    U, V = torch.linalg.qr(noise(150, 100, 1)).Q, torch.linalg.qr(noise(100, 100, 2)).Q
    heavy = (U * pareto(2.5, 100, 3).sqrt()) @ V.T
    found = layer_spectra(risk_of(heavy, noise(100, 150), planted(150, 100, [5.0, 5.0])))
    tail, flat, spiked = found.layers.values()
    assert abs(tail.tail.alpha - 2.5) < 3 * tail.tail.stderr
    assert flat.tail.alpha > 4
    assert (float(flat.num_spikes), float(spiked.num_spikes)) == (0.0, 2.0)
    assert float(flat.soft_rank) > 0.9
    assert float(spiked.soft_rank) < 0.1
    for name, layer in found.layers.items():
        assert float(found.alpha_hat.parts[name]) == pytest.approx(layer.tail.alpha * float(layer.log_spectral_norm))


def test_the_error_of_the_mean_is_made_of_those_of_the_layers():
    found = layer_spectra(risk_of(noise(80, 60), noise(60, 70, 1)))
    parts = [float(e.stderr) for e in found.alpha.parts.values()]
    assert float(found.alpha.stderr) == pytest.approx(math.hypot(*parts) / 2)
    low, high = found.alpha.interval()
    assert low < float(found.alpha) < high
    assert not found.alpha.exact


def test_scaling_a_layer_moves_the_logarithms_and_nothing_else():
    W = planted(120, 80, [3.0])
    first, second = (layer_spectra(risk_of(m)) for m in (W, 10 * W))
    for name in ("alpha", "stable_rank", "soft_rank", "num_spikes"):
        assert float(getattr(first, name)) == pytest.approx(float(getattr(second, name)))
    for name in ("log_norm", "log_spectral_norm"):
        assert float(getattr(first, name)) + 2 == pytest.approx(float(getattr(second, name)))


def test_a_zero_matrix_has_a_rank_of_zero_and_a_logarithm_of_minus_infinity():
    found = layer_spectra(risk_of(torch.zeros(60, 70)))
    assert float(found.stable_rank) == 0.0
    assert float(found.log_norm) == -math.inf
    assert "0 eigenvalues that are not 0" in found.alpha.stop


def test_shared_weights_are_one_layer_and_frozen_ones_none():
    assert list(layer_spectra(make("language").risk()).layers) == ["embedding.weight", "qkv.weight"]
    assert list(layer_spectra(make("frozen").risk()).layers) == ["2.weight", "4.weight"]


def test_spectra_load_back_equal_and_draw_themselves(tmp_path):
    found = layer_spectra(risk_of(noise(80, 60), noise(60, 12), torch.zeros(5, 5)))
    assert ritz.load(found.save(tmp_path / "spectra")) == found
    ax = found.plot()
    assert found.plot(ax) is ax
    assert found != layer_spectra(risk_of(noise(80, 60, 1)))


def test_many_layers_have_shades_of_their_own_and_a_legend_that_fits():
    found = layer_spectra(risk_of(*(noise(8, 6, n) for n in range(30))))
    ax = found.plot()
    assert len({line.get_color() for line in ax.lines}) == 30
    assert len(ax.get_legend().get_texts()) <= 12
    assert len(repr(found)) < 400


def test_progress_counts_layers():
    seen = []
    layer_spectra(problem("mlp_relu").risk(), progress=lambda *args: seen.append(args))
    assert seen == [(1, 2), (2, 2)]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="min_eigenvalues must be at least 10, got 3"):
        layer_spectra(problem("mlp_relu").risk(), min_eigenvalues=3)
    with pytest.raises(ValueError, match="no chosen parameter has two or more dimensions"):
        layer_spectra(problem("mlp_relu").risk(params="*.bias"))
