"""Intervals of shares, of skewed means and of rescaled numbers hold what they say."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from ritz.intervals import (
    Affine,
    Binomial,
    ChiSquare,
    CountedChiSquare,
    Exact,
    MatchedT,
    PairedShares,
    Reciprocal,
    StudentT,
)
from ritz.measures.gap import bootstrapped
from ritz.results import Estimate, affine, derived, from_samples


@pytest.mark.parametrize(("hits", "trials"), [(0, 1), (1, 1), (3, 10), (10, 10), (37, 500)])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_a_share_has_the_interval_of_clopper_and_pearson(hits, trials, level):
    found = Binomial(hits, trials).interval(hits / trials, 0.0, (0.0, 0.0), level)
    truth = stats.binomtest(hits, trials).proportion_ci(level, method="exact")
    assert found == pytest.approx((truth.low, truth.high), abs=1e-12)


def of_pairs(more: int, fewer: int, trials: int) -> tuple[float, float]:
    low, high = PairedShares(more, fewer, trials).interval(0.0, 0.0, (0.0, 0.0), 0.95)
    return float(low), float(high)


@pytest.mark.parametrize(("more", "fewer"), [(5, 0), (6, 0), (9, 1), (10, 1), (0, 8), (40, 22), (42, 22)])
def test_a_difference_of_paired_shares_leaves_zero_out_where_mcnemars_test_refuses_it(more, fewer):
    low, high = of_pairs(more, fewer, trials=200)
    square = (abs(more - fewer) - 1) ** 2 / (more + fewer)  # Edwards 1948
    assert (not low <= 0 <= high) == (stats.chi2.sf(square, 1) < 0.05)


@pytest.mark.parametrize("trials", [2, 7])
@pytest.mark.parametrize("odds", [(0.05, 0.0), (0.5, 0.5), (0.3, 0.1), (0.02, 0.9)])
def test_a_difference_of_paired_shares_is_covered_of_whatever_few_trials(trials, odds):
    counts = [(i, j) for i in range(trials + 1) for j in range(trials + 1 - i)]
    law = stats.multinomial(trials, [*odds, 1 - sum(odds)])
    held = [(low - 1e-12 <= odds[0] - odds[1] <= high + 1e-12) for low, high in (of_pairs(*c, trials) for c in counts)]
    assert sum(law.pmf([i, j, trials - i - j]) for (i, j), one in zip(counts, held, strict=True) if one) >= 0.95


def test_a_bootstrap_interval_covers_the_mean_of_skewed_losses():
    """Exponential losses, 40 items: plain percentiles fall short, the corrected ones come within a few per cent."""
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for seed in range(200):
        samples = -torch.rand(40, generator=generator).log()
        low, high = bootstrapped("loss", samples, seed=seed, num_draws=400).interval(0.9)
        inside += low <= 1.0 <= high
    assert 0.83 <= inside / 200 <= 0.96


def test_a_bootstrap_interval_agrees_with_scipy():
    samples = torch.tensor([0.1, 0.2, 0.2, 0.4, 0.5, 0.9, 1.5, 4.0])
    both = bootstrapped("loss", samples, num_draws=20_000)
    ours = dataclasses.replace(both, rule=both.rule.rules[0])  # without Student t
    theirs = stats.bootstrap(
        (samples.numpy(),),
        lambda x, axis: x.mean(axis=axis),
        n_resamples=20_000,
        method="BCa",
        random_state=np.random.default_rng(0),
    )
    assert ours.interval() == pytest.approx(tuple(theirs.confidence_interval), rel=0.03)


def test_the_same_seed_resamples_alike_and_equal_samples_need_none():
    samples = torch.arange(50.0).sqrt()
    assert bootstrapped("x", samples, seed=1) == bootstrapped("x", samples, seed=1)
    assert bootstrapped("x", samples, seed=1).interval() != bootstrapped("x", samples, seed=2).interval()
    constant = bootstrapped("x", torch.full((5,), 2.0))
    assert isinstance(constant.rule, StudentT)
    assert constant.interval() == (2.0, 2.0)


# ------------------------------------------------------------------------------------- rescaled and combined


@pytest.mark.parametrize("scale", [3.0, -0.5])
@pytest.mark.parametrize("rule", [StudentT(7), ChiSquare(12.0), Binomial(2, 9)])
def test_an_affine_estimate_has_the_moved_interval(scale, rule):
    e = Estimate(name="x", value=2 / 9, stderr=0.1, bracket=(0.2, 0.3), rule=rule, support=(0.0, 1.0))
    ends = sorted(scale * float(end) + 4.0 for end in e.interval(0.8))
    moved = affine(e, scale, 4.0, name="y")
    assert moved.interval(0.8) == pytest.approx(tuple(ends))
    assert (moved.name, moved.stderr) == ("y", pytest.approx(abs(scale) * 0.1))
    assert isinstance(moved.rule, StudentT | Affine)


def test_a_reciprocal_has_the_interval_turned_over_at_every_level():
    for level in (0.5, 0.95):
        low, high = StudentT(7).interval(4.0, 0.5, (4.0, 4.0), level)
        turned = Reciprocal(StudentT(7), 2.0).interval(0.5, 0.5 * 2 / 16, (0.5, 0.5), level)
        assert turned == pytest.approx((2 / high, 2 / low))
    assert Reciprocal(Exact(), 2.0).interval(0.5, 0.0, (0.4, float("inf")), 0.95) == (0.4, float("inf"))


def test_an_affine_estimate_moves_its_samples_and_scales_its_parts():
    e = from_samples(
        "trace", torch.tensor([1.0, 2.0, 6.0]), parts={"w": from_samples("trace of w", torch.tensor([1.0, 3.0]))}
    )
    moved = affine(e, 2.0, 1.0)
    assert moved.samples.tolist() == [3.0, 5.0, 13.0]
    assert moved.parts == {}  # who would get the offset?
    assert affine(e, 2.0).parts["w"].value == 4.0


@pytest.mark.parametrize(("power", "scale"), [(0.5, 1.0), (1.0, 0.0), (1.0, float("inf"))])
def test_what_cannot_be_moved_is_refused(power, scale):
    with pytest.raises(ValueError, match="power 1 and a scale that is not 0"):
        affine(Estimate(name="x", value=1.0, power=power), scale)


def test_a_derived_estimate_covers_a_ratio_of_means():
    """x is normal about 2 and y = x^2 / 2 + noise about 3: the ratio of the means with few probes."""
    generator = torch.Generator().manual_seed(0)
    inside, truth = 0, (0.5 * (4 + 0.25) + 1) / 2
    for _ in range(300):
        x = 2 + 0.5 * torch.randn(12, generator=generator)
        y = 0.5 * x.square() + 1 + 0.3 * torch.randn(12, generator=generator)
        low, high = derived("r", lambda a, b: b / a, from_samples("x", x), from_samples("y", y)).interval()
        inside += low <= truth <= high
    assert 0.91 <= inside / 300 <= 0.98


def test_a_linear_function_of_estimates_is_that_of_their_samples():
    x, y = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 5.0, 1.0])
    found = derived("sum", lambda a, b: a - 2 * b + 1, from_samples("x", x), from_samples("y", y))
    truth = from_samples("sum", x - 2 * y + 1)
    assert (found.value, found.stderr) == pytest.approx((truth.value, truth.stderr))
    torch.testing.assert_close(found.samples, truth.samples)


def test_exact_estimates_enter_as_constants_and_give_an_exact_one():
    two = Estimate(name="two", value=2.0, exact=True)
    both = derived("x", lambda a, b: a * b, two, two)
    assert (both.value, both.exact, both.interval()) == (4.0, True, (4.0, 4.0))
    mixed = derived("x", lambda a, b: a * b, two, from_samples("y", torch.tensor([1.0, 3.0])))
    assert (mixed.value, mixed.stderr, mixed.exact) == (4.0, 2.0, False)
    seeded = from_samples("y", torch.tensor([1.0, 3.0]), seed=3)
    assert derived("x", lambda a, b: a * b, two, seeded).seed == 3


def test_a_norm_enters_as_the_root_of_its_mean_square():
    square = torch.tensor([1.0, 9.0, 8.0])
    norm = from_samples("norm", square, power=0.5)
    found = derived("twice", lambda a: 2 * a, norm)
    assert found.value == pytest.approx(2 * 6**0.5)
    assert found.stderr == pytest.approx(2 * norm.stderr, rel=0.35)  # jackknife against delta method


def test_estimates_without_common_probes_are_refused():
    a, b = from_samples("a", torch.tensor([1.0, 2.0])), from_samples("b", torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match=r"common probes, got \[2, 3\] samples"):
        derived("x", lambda a, b: a, a, b)
    with pytest.raises(ValueError, match="common probes"):
        derived("x", lambda a: a, dataclasses.replace(a, samples=None))


def test_one_probe_gives_a_value_without_an_error():
    e = derived("x", lambda a: a**2, from_samples("a", torch.tensor([3.0])))
    assert e.value == 9.0
    assert e.interval() == (-float("inf"), float("inf"))


# ------------------------------------------------------------------------------------ means of forms, by moments


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize("count", [2.0, 3.0, 16.0, 5000.0])
def test_degrees_of_freedom_are_held_as_often_as_they_should_be(count, level):
    """A chi-square between its own quantiles has them inside, and one outside has not."""
    inside, outside = ((0.5 - level / 2) * factor for factor in (1.01, 0.99))
    for tail, held in ((inside, True), (1 - inside, True), (outside, False), (1 - outside, False)):
        seen = float(stats.chi2.ppf(tail, count))
        low, high = CountedChiSquare(1.0, seen, least=1.0).interval(seen, 0.0, (seen, seen), level)
        assert (low <= count <= high) is held


def test_many_degrees_of_freedom_have_the_normal_interval():
    unit, seen = 1e-3, 1e6
    low, high = CountedChiSquare(unit, seen, least=8.0).interval(5.0, 0.0, (5.0, 5.0), 0.95)
    half = 1.96 * unit * (2 * seen) ** 0.5
    assert (low, high) == pytest.approx((5.0 - half, 5.0 + half), rel=1e-3)


def test_eigenvalues_below_zero_have_the_mirror_image():
    below, above = (CountedChiSquare(unit, 3.0, least=2.0).interval(0.0, 0.0, (-1.0, 2.0), 0.9) for unit in (-0.5, 0.5))
    assert below == pytest.approx((1 - above[1], 1 - above[0]))


def test_a_standard_error_of_its_own_takes_the_place_of_the_spread():
    value, bracket = 1.0, (0.5, 1.5)
    assert MatchedT(7.0, 2.0).interval(value, 99.0, bracket, 0.9) == StudentT(7.0).interval(value, 2.0, bracket, 0.9)
