"""Edges, spikes and overlaps with their errors, against drawn matrices."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ritz
from ritz import rmt
from ritz.intervals import Affine, ChiSquare, CountedChiSquare, Hull, MatchedT, StudentT
from ritz.results import from_samples
from ritz.rmt.edges import degrees

DRAWS = 60
DIM = 300
SPIKES = (4.0, 2.0, 1.5, -2.0)  # in units of sqrt(s2), which is 1
PLACES = (-1, -2, -3, 0)  # of their outliers among ascending eigenvalues


def measured(value: float, dof: float = 20.0) -> ritz.Estimate:
    """A noise level as `ritz.curvature_noise` gives it."""
    return ritz.Estimate(
        name="curvature noise", value=value, stderr=value * math.sqrt(2 / dof), rule=ChiSquare(dof),
        support=(0.0, math.inf), products=64, seed=7,
    )  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> tuple[Tensor, Tensor]:
    """Outliers and squared overlaps with the directions of the spikes, (DRAWS, 4) each."""
    values, overlaps = [], []
    for seed in range(DRAWS):
        w, V = torch.linalg.eigh(rmt.wigner(DIM, spikes=SPIKES, seed=seed))
        values.append(w[list(PLACES)])
        overlaps.append(V[range(4), list(PLACES)].square())
    return torch.stack(values), torch.stack(overlaps)


# ------------------------------------------------------------------------------------------------ edges


def test_the_edge_of_a_known_level_is_exact():
    for edge, truth in ((rmt.bulk_edge(0.25), 1.0), (rmt.bbp_threshold(0.25), 0.5)):
        assert edge.exact
        assert edge.value == pytest.approx(truth)
        assert edge.interval() == pytest.approx((truth, truth))


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_the_interval_of_the_edge_is_that_of_the_level_moved(level):
    noise = measured(0.25)
    edge = rmt.bulk_edge(noise)
    assert edge.interval(level) == pytest.approx([2 * math.sqrt(end) for end in noise.interval(level)])
    assert edge.stderr == pytest.approx(noise.stderr / math.sqrt(0.25))
    assert (edge.products, edge.seed) == (64, 7)
    assert "curvature noise" in edge.convention


def test_a_bracket_of_the_level_is_moved_along():
    noise = ritz.Estimate(name="variance", value=1.0, bracket=(0.25, 4.0))
    assert rmt.bulk_edge(noise).bracket == pytest.approx((1.0, 4.0))
    assert rmt.bulk_edge(noise).interval() == pytest.approx((1.0, 4.0))


def test_the_edge_of_what_a_network_measures_has_its_samples():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.randn(48, 4), torch.randint(3, (48,))))
    noise = ritz.curvature_noise(risk, 6, 8)
    edge = rmt.bulk_edge(noise)
    assert edge.value == pytest.approx(2 * math.sqrt(noise.value))
    assert edge.samples.shape == (4,)
    assert edge.interval()[0] < edge.value < edge.interval()[1]


def test_the_largest_eigenvalue_of_noise_stays_below_its_quantile_as_often_as_it_says():
    edge = rmt.edge_quantile(2.0, 100, level=0.9)
    tops = torch.stack([torch.linalg.eigvalsh(rmt.wigner(100, 2.0, seed=seed))[-1] for seed in range(200)])
    assert float((tops < edge.value).double().mean()) == pytest.approx(0.9, abs=0.07)
    assert float(tops.std()) == pytest.approx(edge.parts["width"].value, rel=0.2)


def test_the_edge_narrows_as_the_matrix_grows():
    widths = [rmt.edge_quantile(1.0, dim).value - 2 for dim in (1_000, 1_000_000)]
    assert widths[0] / widths[1] == pytest.approx(100)  # P^(2/3)


# ----------------------------------------------------------------------------------- spikes and overlaps


def test_outliers_lie_where_the_theorem_says(drawn):
    values, _ = drawn
    truth = rmt.Semicircle(1.0).outlier(torch.tensor(SPIKES))
    error = values.std(0) / math.sqrt(DRAWS)
    assert bool(((values.mean(0) - truth).abs() < 4 * error + 2 / DIM).all()), (values.mean(0), truth, error)


def test_overlaps_are_those_of_theorem_1_of_seed_004(drawn):
    _, overlaps = drawn
    truth = rmt.Semicircle(1.0).overlap(torch.tensor(SPIKES))
    error = overlaps.std(0) / math.sqrt(DRAWS)
    assert bool(((overlaps.mean(0) - truth).abs() < 4 * error + 5 / DIM).all()), (overlaps.mean(0), truth, error)
    # with the edge at sigma sqrt(P / B), as printed, s2 would be read off it four times too large
    printed = 1 - 4 / torch.tensor(SPIKES).square()
    assert bool(((overlaps.mean(0) - printed).abs() > 10 * error).all())


def test_a_spike_below_the_threshold_leaves_no_outlier_and_no_direction():
    tops, overlaps = [], []
    for seed in range(20):
        w, V = torch.linalg.eigh(rmt.wigner(DIM, spikes=[0.6], seed=seed))
        tops.append(float(w[-1]))
        overlaps.append(float(V[0, -1].square()))
    assert sum(tops) / 20 < rmt.edge_quantile(1.0, DIM).value
    assert sum(overlaps) / 20 < 20 / DIM


def test_debiasing_finds_the_spikes_with_the_error_it_says(drawn):
    values, _ = drawn
    strong = [0, 1, 3]  # that at 1.5 is near the edge at this size
    truth = torch.tensor(SPIKES)[strong]
    found = [rmt.debias(row[strong], 1.0, DIM) for row in values]
    spikes = torch.stack([e.value for e in found])
    stderr = torch.stack([e.stderr for e in found]).mean(0)
    assert bool(((spikes.mean(0) - truth).abs() < 4 * stderr / math.sqrt(DRAWS) + 3 / DIM).all())
    assert bool(((spikes.std(0) / stderr - 1).abs() < 0.3).all()), (spikes.std(0), stderr)
    hits = [(low <= truth) & (truth <= high) for low, high in (e.interval() for e in found)]
    assert float(torch.stack(hits).double().mean()) > 0.9
    raw = values.mean(0)[strong] - truth
    assert bool((raw.abs() > 0.8 * truth.abs().reciprocal()).all())  # left alone they are too large by s2 / nu


def test_the_error_of_the_noise_level_is_counted():
    """s2 from chi-square draws with 20 degrees of freedom, the outlier as it should be."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randn(160, 20, generator=generator).square().mean(1)
    found = [rmt.debias(2.5, measured(float(level))) for level in levels]
    for truth, name in ((2.0, "spike"), (0.75, "overlap")):
        ends = [(e if name == "spike" else e.parts["overlap"]).interval() for e in found]
        assert sum(low <= truth <= high for low, high in ends) / 160 == pytest.approx(0.95, abs=0.045)
    below = [rmt.debias(-2.5, measured(float(level))) for level in levels]
    assert [e.interval() for e in below] == [(-high, -low) for low, high in (e.interval() for e in found)]


def test_both_errors_are_counted_together(drawn):
    values, _ = drawn
    generator = torch.Generator().manual_seed(1)
    levels = torch.randn(DRAWS, 60, generator=generator).square().mean(1).tolist()
    truth = torch.tensor(SPIKES)[[0, 1, 3]]
    hits = []
    for row, level in zip(values, levels, strict=True):
        low, high = rmt.debias(row[[0, 1, 3]], measured(level, dof=60.0), DIM).interval()
        hits.append((low <= truth) & (truth <= high))
    assert float(torch.stack(hits).double().mean()) == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize("nu", [0.5, 1.05, 1.2, 1.5])
def test_intervals_cover_on_both_sides_of_the_threshold(nu):
    """At P = 100, where the outlier of a spike of 1.2 lies below the edge more often than above it."""
    tops = torch.stack([torch.linalg.eigvalsh(rmt.wigner(100, spikes=[nu], seed=seed))[-1] for seed in range(100)])
    low, high = rmt.debias(tops, 1.0, 100).interval()
    assert float(((low <= nu) & (nu <= high)).double().mean()) > 0.91


def test_where_the_outlier_may_belong_to_the_bulk_the_interval_says_so():
    noise = measured(1.0)
    found = rmt.debias(2.1, noise)
    assert found.interval()[0] == pytest.approx(-math.sqrt(noise.interval()[1]))
    assert found.parts["overlap"].interval()[0] == 0.0
    hidden = rmt.debias(1.0, noise).interval()
    assert hidden == pytest.approx((-math.sqrt(noise.interval()[1]), math.sqrt(noise.interval()[1])))


def test_errors_are_the_slopes_of_the_formula():
    noise, value = ritz.Estimate(name="s2", value=1.0, stderr=1e-6, rule=StudentT(9)), 2.5
    law = [rmt.Semicircle(1.0 + side * 1e-6) for side in (-1, 1)]
    found = rmt.debias(value, noise)
    spikes = [float(each.spike(value)) for each in law]
    shares = [float(each.overlap(spike)) for each, spike in zip(law, spikes, strict=True)]
    assert found.stderr == pytest.approx(abs(spikes[1] - spikes[0]) / 2, rel=1e-4)
    assert found.parts["overlap"].stderr == pytest.approx(abs(shares[1] - shares[0]) / 2, rel=1e-4)
    sampled = from_samples("lambda", torch.tensor([2.5 - 1e-6, 2.5 + 1e-6]))
    slope = float(law[0].spike(2.5 + 1e-6) - law[0].spike(2.5 - 1e-6)) / 2e-6
    assert rmt.debias(sampled, 1.0).stderr == pytest.approx(slope * sampled.stderr, rel=1e-4)


def test_a_residual_is_moved_along():
    value = ritz.Estimate(name="lambda", value=2.5, bracket=(2.4, 2.6))
    found = rmt.debias(value, 1.0)
    law = rmt.Semicircle(1.0)
    assert found.bracket == pytest.approx((float(law.spike(2.4)), float(law.spike(2.6))))
    assert found.parts["overlap"].bracket[0] < 0.75 < found.parts["overlap"].bracket[1]
    below = rmt.debias(replace(value, value=-2.5, bracket=(-2.6, -2.4)), 1.0)
    assert below.bracket == pytest.approx((-found.bracket[1], -found.bracket[0]))
    assert below.parts["overlap"].bracket == pytest.approx(found.parts["overlap"].bracket)


def test_within_the_bulk_a_spike_may_hide():
    found = rmt.debias(torch.tensor([1.9, 2.5]), 1.0)
    assert found.value.tolist() == pytest.approx([0.0, 2.0])
    assert [float(end[0]) for end in found.bracket] == [-1.0, 1.0]
    assert [float(end[1]) for end in found.bracket] == pytest.approx([2.0, 2.0])
    assert found.parts["overlap"].value.tolist() == pytest.approx([0.0, 0.75])


def test_without_noise_an_eigenvalue_is_its_own_spike():
    found = rmt.debias(torch.tensor([3.0, -1.0, 0.0]), 0.0, dim=10)
    assert found.value.tolist() == [3.0, -1.0, 0.0]
    assert found.stderr.tolist() == [0.0, 0.0, 0.0]
    assert found.parts["overlap"].value.tolist() == [1.0, 1.0, 0.0]
    assert rmt.bulk_edge(0.0).value == 0.0


def test_the_overlap_of_a_known_spike_moves_with_the_noise_level():
    noise = measured(0.25)
    found = rmt.overlap(-1.0, noise)
    low, high = noise.interval()
    assert found.value == pytest.approx(0.75)
    assert found.stderr == pytest.approx(noise.stderr)
    assert found.interval() == pytest.approx((1 - high, 1 - low))
    assert rmt.overlap(0.5, noise).value == 0.0
    assert rmt.overlap(0.0, 0.0).value == 0.0


def test_an_estimated_noise_level_leaves_open_on_which_side_of_the_threshold_a_spike_is():
    """Half of these levels come out above nu^2, where the overlap is 0 and yet not known to be."""
    truth, hits = 1 - 0.95, []
    for seed in range(200):
        normal = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = rmt.overlap(1.0, from_samples("noise", 0.95 + 0.3 * normal))
        low, high = found.interval()
        hits.append(low <= truth <= high and low <= found.value <= high)
    assert 0.91 <= sum(hits) / len(hits) <= 0.99
    assert rmt.overlap(0.2, from_samples("noise", 0.95 + 0.03 * normal)).stderr == 0.0  # far below


@pytest.mark.parametrize("nu", [math.nan, math.inf])
def test_a_spike_that_is_not_finite_is_refused(nu):
    with pytest.raises(ValueError, match="nu, the spike, must be finite, got"):
        rmt.overlap(nu, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rmt.bulk_edge(-1.0), "finite and not negative, got -1.0"),
        (lambda: rmt.debias(2.5, math.nan), "finite and not negative, got nan"),
        (lambda: rmt.debias(torch.tensor([1.0, math.inf]), 1.0), "eigenvalues must be finite"),
        (lambda: rmt.edge_quantile(1.0, 1, level=1e-6), "does not hold at dim = 1"),
        (lambda: rmt.debias(2.5, 1.0, dim=0), "must be at least 1, got 0"),
        (lambda: rmt.edge_quantile(1.0, 0), "must be at least 1, got 0"),
    ],
)
def test_bad_levels_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_degrees_of_freedom_are_those_of_the_rule_that_has_fewest():
    """A level whose interval is the wider of two is not one that is known."""
    assert degrees(Hull((StudentT(7), ChiSquare(20.0)))) == 7
    assert degrees(Affine(Hull((MatchedT(12.0, 1.0), CountedChiSquare(0.1, seen=9.0, least=4.0))), 2.0)) == 9
    assert degrees(Hull((MatchedT(12.0, 1.0), CountedChiSquare(0.1, seen=1.0, least=4.0)))) == 4
