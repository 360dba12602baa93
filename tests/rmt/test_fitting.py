"""The fit of a law to a spectrum: right where the law holds, and able to say where it does not."""

import math

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import ritz
from ritz import rmt
from ritz.operators import BatchNoise, DenseOperator


def eigenvalues(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(matrix)


def correlated(dim: int, seed: int = 0) -> torch.Tensor:
    """Noise whose directions differ in size as a power law: D^(1/2) X D^(1/2), D_i = 1 / i."""
    root = torch.arange(1, dim + 1).to(torch.float64).rsqrt()
    return root[:, None] * rmt.wigner(dim, seed=seed) * root


@pytest.mark.parametrize("by", ["moments", "median"])
def test_noise_of_independent_entries_is_a_semicircle(by):
    for seed in range(3):
        fit = rmt.fit(eigenvalues(rmt.wigner(300, 2.0, seed=seed)), by=by)
        assert fit.law.s2 == pytest.approx(2.0, rel=0.05)
        assert fit.edge.value == pytest.approx(2 * math.sqrt(fit.law.s2))
        assert fit.distance.value < 5 / 300
        assert fit.kurtosis.value == pytest.approx(2.0, abs=0.05)
        assert fit.skewness.value == pytest.approx(0.0, abs=0.05)
        assert fit.outside.value < 0.03
        assert fit.distance.exact
    assert fit.expected() == pytest.approx({"skewness": 0.0, "kurtosis": 2.0})


def test_other_noise_is_told_from_a_semicircle():
    """By each of the numbers, at a size where the semicircle's own are below 5 / P, 0.05, 0.05 and 0.03."""
    fits = {
        "correlated": rmt.fit(eigenvalues(correlated(300))),
        "average of few": rmt.fit(eigenvalues(rmt.wishart(300, 100)) - 1.0),
    }
    assert fits["correlated"].kurtosis.value > 10
    assert fits["correlated"].outside.value > 0.5
    assert fits["correlated"].distance.value > 0.2
    assert fits["average of few"].skewness.value == pytest.approx(math.sqrt(3.0), rel=0.1)
    assert fits["average of few"].distance.value > 0.2


def test_the_median_does_not_see_outliers_and_the_moments_do():
    values = eigenvalues(rmt.wigner(300, spikes=[30.0, 20.0]))
    assert rmt.fit(values, by="median").law.s2 == pytest.approx(1.0, rel=0.1)
    assert rmt.fit(values).law.s2 == pytest.approx(1 + (30**2 + 20**2) / 300, rel=0.05)


@pytest.mark.parametrize("by", ["moments", "median"])
@pytest.mark.parametrize("num_samples", [50, 200, 800])
def test_averages_of_outer_products_follow_marchenko_and_pastur(by, num_samples):
    """With zeros, with an edge at 0, and without."""
    ratio = 200 / num_samples
    fit = rmt.fit(eigenvalues(rmt.wishart(200, num_samples, 1.5)), law="marchenko-pastur", ratio=ratio, by=by)
    assert fit.law.variance == pytest.approx(1.5, rel=0.1)
    assert fit.edge.value == pytest.approx(fit.law.edges[1])
    assert fit.distance.value < 0.03
    expected = fit.expected()
    assert expected["skewness"] == pytest.approx(math.sqrt(ratio))
    assert fit.skewness.value == pytest.approx(expected["skewness"], abs=0.1)
    assert fit.kurtosis.value == pytest.approx(expected["kurtosis"], rel=0.1)


@pytest.mark.parametrize("kind", ["independent", "correlated"])
def test_a_run_says_what_the_eigenvalues_say(kind):
    X = rmt.wigner(250, 2.0) if kind == "independent" else correlated(250)
    truth = rmt.fit(eigenvalues(X))
    found = rmt.fit(ritz.spectrum(DenseOperator(X), num_steps=24, num_probes=6))
    for name in ("variance", "edge", "skewness", "kurtosis"):
        low, high = getattr(found, name).interval(0.999)
        assert low <= getattr(truth, name).value <= high, name
    low, high = found.distance.interval()
    assert low <= truth.distance.value <= high
    assert high < 0.13 if kind == "independent" else low > 0.13
    assert found.kurtosis.samples.shape == (6,)
    assert found.outside.value == pytest.approx(truth.outside.value, abs=0.05)


def test_the_median_of_a_run_is_bracketed():
    X = rmt.wigner(150, 2.0)
    found = rmt.fit(ritz.spectrum(DenseOperator(X), num_steps=20, num_probes=4), by="median")
    low, high = found.variance.interval()
    assert low < rmt.fit(eigenvalues(X), by="median").law.s2 < high
    assert found.variance.bracket[0] < found.law.s2 < found.variance.bracket[1]


def test_a_run_that_found_all_eigenvalues_is_exact():
    X = rmt.wigner(12)
    found, truth = rmt.fit(ritz.spectrum(DenseOperator(X))), rmt.fit(eigenvalues(X))
    assert found.distance.exact
    assert found.distance.value == pytest.approx(truth.distance.value)
    assert found.kurtosis.value == pytest.approx(truth.kurtosis.value)


def test_weights_stand_for_repeated_eigenvalues():
    values = torch.tensor([-1.0, 0.0, 2.0])
    weighted = rmt.fit(values, torch.tensor([2.0, 1.0, 3.0]))
    repeated = rmt.fit(torch.tensor([2.0, -1.0, 0.0, 2.0, -1.0, 2.0]))
    for name in ("variance", "distance", "skewness", "kurtosis", "outside"):
        assert getattr(weighted, name).value == pytest.approx(getattr(repeated, name).value), name


def test_nodes_without_weight_are_none():
    found = rmt.fit(torch.tensor([-1.0, 0.0, 1.0, 100.0]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert found == rmt.fit(torch.tensor([-1.0, 0.0, 1.0]))
    with pytest.raises(ValueError, match="all eigenvalues are 1: a law needs eigenvalues that differ"):
        rmt.fit(torch.tensor([1.0, 1.0, 7.0]), torch.tensor([1.0, 1.0, 0.0]))


def test_the_shape_of_a_spectrum_is_seen_at_any_distance_from_zero_and_scale():
    """The eigenvalues of an average of a hundred million outer products are 1, but for a ten-thousandth."""
    law = rmt.MarchenkoPastur(1e-8)
    found = rmt.fit(law.quantile((torch.arange(500) + 0.5) / 500), law="marchenko-pastur", ratio=1e-8)
    assert found.expected() == {"skewness": pytest.approx(1e-4), "kurtosis": pytest.approx(2.0)}
    assert (found.skewness.value, found.kurtosis.value) == pytest.approx((1e-4, 2.0), abs=1e-3)
    values = torch.linspace(-1, 1, 50, dtype=torch.float64)
    shapes = [rmt.fit(x).kurtosis.value for x in (values, 1e-120 * values, 1e120 * values, values + 1e6)]
    assert shapes == pytest.approx(shapes[:1] * 4)


@pytest.mark.parametrize("law", [rmt.Semicircle(0.7), rmt.MarchenkoPastur(0.3, 2.0), rmt.MarchenkoPastur(4.0)])
def test_the_expected_shape_is_that_of_the_moments_of_the_law(law):
    m1, m2, m3, m4 = (law.moment(k) for k in range(1, 5))
    variance = m2 - m1**2
    wanted = {
        "skewness": (m3 - 3 * m1 * m2 + 2 * m1**3) / variance**1.5,
        "kurtosis": (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2,
    }
    options = {"law": "marchenko-pastur", "ratio": law.ratio} if isinstance(law, rmt.MarchenkoPastur) else {}
    assert rmt.fit(torch.tensor([0.0, 1.0, 3.0]), **options).expected() == pytest.approx(wanted)


def test_the_distance_of_two_points_is_known():
    """F is 0, 1/2, 1 with steps at -/+ 1; the semicircle of s2 = 1 has 1/3 - sqrt(3) / (4 pi) below -1."""
    fit = rmt.fit(torch.tensor([-1.0, 1.0]))
    below = 1 / 3 - math.sqrt(3) / (4 * math.pi)
    assert fit.law.s2 == 1.0
    assert fit.distance.value == pytest.approx(0.5 - below)
    assert fit.kurtosis.value == pytest.approx(1.0)  # the least there is
    assert fit.outside.value == 0.0


def test_the_noise_of_a_trained_network_is_no_semicircle():
    """A few directions have nearly all of it, most have next to none."""
    torch.manual_seed(0)
    X = torch.randn(300, 6)
    y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    noise = BatchNoise(ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=50)), 0)
    values = eigenvalues(noise.dense())
    fit = rmt.fit(values)
    drawn = rmt.fit(eigenvalues(rmt.wigner(len(values))))
    assert fit.kurtosis.value > 5 > 2 * drawn.kurtosis.value
    assert fit.distance.value > 0.15 > 2 * drawn.distance.value
    assert fit.outside.value > 0.4
    assert rmt.fit(values, by="median").law.s2 < 0.05 * fit.law.s2


def test_a_fit_draws_itself_and_prints_itself():
    fit = rmt.fit(eigenvalues(rmt.wigner(60, spikes=[4.0])))
    ax = fit.plot()
    assert ax.get_yscale() == "log"
    assert fit.plot(Figure().subplots(), bins=10).get_xlabel() == "eigenvalue"
    assert str(fit).startswith("Semicircle(s2=")
    assert "kurtosis" in str(fit)


def test_a_fit_is_saved_and_loaded_equal(tmp_path):
    for fit in (rmt.fit(eigenvalues(rmt.wigner(20))), rmt.fit(torch.arange(9.0), law="marchenko-pastur", ratio=0.5)):
        assert ritz.load(fit.save(tmp_path / "fit")) == fit
        assert fit != rmt.fit(eigenvalues(rmt.wigner(20, seed=1)))


SHORT = ritz.spectrum(DenseOperator(rmt.wigner(50)), num_steps=2, num_probes=2, reorthogonalize="full")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rmt.fit(torch.zeros(5)), "all eigenvalues are 0: a law needs eigenvalues that differ"),
        (lambda: rmt.fit(torch.full((5,), 3.0)), "all eigenvalues are 3"),
        (lambda: rmt.fit(torch.tensor([0.0, 0.0, 0.0, 1.0]), by="median"), "half of it lies at 0: take by='moments'"),
        (
            lambda: rmt.fit(-torch.arange(5.0), law="marchenko-pastur", ratio=1.0),
            "the scale of a marchenko-pastur law must be positive, this spectrum gives -2",
        ),
        (lambda: rmt.fit(torch.eye(2)), r"\(n,\), got \(2, 2\)"),
        (lambda: rmt.fit(torch.ones(2), torch.ones(3)), r"got \(2,\) and \(3,\)"),
        (lambda: rmt.fit(torch.ones(2), torch.tensor([1.0, -1.0])), "no weight negative"),
        (lambda: rmt.fit(torch.tensor([1.0, math.nan])), "nodes and weights must be finite"),
        (lambda: rmt.fit(torch.ones(2), law="wigner"), "'semicircle' or 'marchenko-pastur', got 'wigner'"),
        (lambda: rmt.fit(torch.ones(2), by="mode"), "'moments' or 'median', got 'mode'"),
        (
            lambda: rmt.fit(torch.ones(2), law="marchenko-pastur"),
            "needs ratio = P / n.*, got law='marchenko-pastur' and ratio=None",
        ),
        (lambda: rmt.fit(torch.ones(2), ratio=0.5), "no other law has it, got law='semicircle' and ratio=0.5"),
        (lambda: rmt.fit(SHORT, torch.ones(2)), "a Spectrum has its own weights"),
        (lambda: rmt.fit(SHORT), "at least 3 Lanczos steps, this spectrum has 2"),
    ],
)
def test_what_cannot_be_fitted_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
