"""Correlations against SciPy and brute force; their p-values are uniform and their intervals cover."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import ritz
from ritz.measures.study import resampling
from ritz.measures.study.correlation import (
    Correlation,
    kendall,
    margin_correlations,
    pearson,
    spearman,
    without_outliers,
)

EVERY = (pearson, spearman, kendall)
BY_SCIPY = {
    "pearson": lambda x, y: stats.pearsonr(x, y).statistic,
    "spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    "kendall": lambda x, y: stats.kendalltau(x, y).statistic,
}


def normal(n: int, rho: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """n points of a bivariate normal law with correlation rho."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    return x, rho * x + math.sqrt(1 - rho**2) * rng.standard_normal(n)


def tau_b(x, y) -> float:
    """From its definition, pair by pair."""
    agree = in_x = in_y = 0
    for i in range(len(x)):
        for j in range(i):
            dx, dy = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
            agree, in_x, in_y = agree + dx * dy, in_x + abs(dx), in_y + abs(dy)
    return agree / math.sqrt(in_x * in_y)


# ------------------------------------------------------------------------------------------------------------- values


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9))
def test_values_are_those_of_scipy_and_of_the_definition_ties_included(points):
    x, y = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert all("is constant" in f(x, y, resamples=1).reason for f in EVERY)
        return
    for f in EVERY:
        found = f(x, y, resamples=1)
        assert found.value == pytest.approx(BY_SCIPY[found.method](x, y), abs=1e-12)
    assert kendall(x, y, resamples=1).value == pytest.approx(tau_b(x, y), abs=1e-12)


@pytest.mark.parametrize("f", EVERY)
def test_tensors_estimates_and_lists_give_the_same(f):
    x, y = normal(9, 0.5, 0)
    truth = f(x, y)
    assert f(torch.tensor(x), torch.tensor(y)) == truth
    assert f(ritz.Estimate(name="x", value=torch.tensor(x)), list(y)) == truth


def test_large_numbers_do_not_overflow():
    x, y = normal(20, 0.5, 0)
    assert pearson(x * 1e300, y * 1e-300).value == pytest.approx(pearson(x, y).value, rel=1e-12)


@pytest.mark.parametrize("f", EVERY)
@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], "x is constant"),
        ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], "y is constant"),
        ([1.0], [2.0], "one point"),
        ([], [], "no points"),
        ([1.0, math.nan], [math.nan, 2.0], "no points"),
    ],
)
def test_where_there_is_no_correlation_the_reason_is_said(f, x, y, reason):
    found = f(x, y)
    assert math.isnan(found.value)
    assert math.isnan(found.p_value)
    assert found.reason == reason
    assert reason in str(found)
    assert all(math.isnan(end) for end in found.interval())


def test_infinite_values_have_an_order_but_no_pearson():
    x, y = [1.0, 2.0, math.inf, math.inf], [1.0, 2.0, 3.0, -math.inf]
    assert "x is infinite" in pearson(x, y).reason
    assert kendall(x, y).value == pytest.approx(tau_b([1, 2, 3, 3], [1, 2, 3, 0]))


@pytest.mark.parametrize("f", EVERY)
def test_pairs_with_a_missing_value_are_left_out_and_counted(f):
    x, y = normal(12, 0.5, 1)
    holed_x, holed_y = x.copy(), y.copy()
    holed_x[3], holed_y[3], holed_y[7] = math.nan, math.nan, math.nan
    found, whole = f(holed_x, holed_y), f(np.delete(x, [3, 7]), np.delete(y, [3, 7]))
    assert (found.n, found.missing, whole.missing) == (10, 2, 0)
    assert (found.value, found.p_value, found.interval()) == (whole.value, whole.p_value, whole.interval())


@pytest.mark.parametrize("f", EVERY)
def test_columns_of_two_lengths_are_refused(f):
    with pytest.raises(ValueError, match="x and y must have equal lengths, got 3 and 2"):
        f([1.0, 2.0, 3.0], [1.0, 2.0])


def test_a_matrix_and_no_resamples_are_refused():
    with pytest.raises(ValueError, match=r"x must be one-dimensional, got shape \(2, 2\)"):
        pearson(torch.eye(2), [1.0, 2.0])
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        kendall([1.0, 2.0], [1.0, 2.0], resamples=0)


# ----------------------------------------------------------------------------------------------------------- p-values


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7])
def test_the_p_value_of_few_points_is_kendalls_exact_one(n):
    x, y = normal(n, 0.5, n)
    found = kendall(x, y)
    assert found.p_method == "exact"
    assert found.p_value == pytest.approx(stats.kendalltau(x, y, method="exact").pvalue, abs=1e-12)
    assert found.smallest_p == pytest.approx(2 / math.factorial(n))


@pytest.mark.parametrize("f", EVERY)
@pytest.mark.parametrize("seed", range(3))
def test_the_exact_p_value_is_that_of_scipys_permutation_test_ties_included(f, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 3, 6).astype(float), rng.integers(0, 4, 6).astype(float)
    statistic = BY_SCIPY[f.__name__]
    truth = stats.permutation_test(
        (y,), lambda moved: abs(statistic(x, moved)), permutation_type="pairings", alternative="greater"
    )
    assert f(x, y).p_value == pytest.approx(truth.pvalue, abs=1e-12)


@pytest.mark.parametrize("n", [8, 12, 40])
def test_random_orders_give_the_exact_p_value_within_their_error(n):
    x, y = normal(n, 0.4, n)
    truth = stats.kendalltau(x, y, method="exact").pvalue
    found = kendall(x, y, resamples=1999)
    assert found.p_method == "monte carlo"
    assert abs(found.p_value - truth) < 4 * math.sqrt(truth * (1 - truth) / 1999) + 1 / 2000


def test_a_random_order_counts_the_one_that_was_seen():
    x = np.arange(12.0)
    found = kendall(x, x, resamples=99)
    assert found.p_value == found.smallest_p == 0.01  # (0 + 1) / (99 + 1), never 0


def test_ties_raise_the_smallest_p_value_that_is_possible():
    x, y = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [3.0, 1.0, 2.0, 5.0, 4.0, 6.0]
    found = kendall(x, y)
    assert found.smallest_p == pytest.approx(2 / math.comb(6, 3))
    assert found.p_value == pytest.approx(found.smallest_p)


@pytest.mark.parametrize("f", [pearson, spearman])
def test_p_values_are_uniform_where_there_is_no_relation(f):
    rng = np.random.default_rng(0)
    p = [f(rng.standard_normal(15), rng.exponential(size=15), resamples=99, seed=i).p_value for i in range(200)]
    spread = np.array(p) - rng.random(200) / 100  # p is a multiple of 1 / 100
    assert stats.kstest(spread, "uniform").pvalue > 0.02


def test_the_p_value_of_tau_is_rarely_small_where_there_is_no_relation():
    rng = np.random.default_rng(1)
    p = np.array([kendall(rng.random(9), rng.random(9), resamples=199, seed=i).p_value for i in range(200)])
    for alpha in (0.05, 0.2, 0.5):
        assert stats.binomtest(int((p <= alpha).sum()), 200, alpha, alternative="greater").pvalue > 0.01
    assert (p <= 0.5).mean() > 0.35  # and not by being large always


@pytest.mark.parametrize("f", EVERY)
def test_many_points_have_the_limit_of_the_permutation_test(f, monkeypatch):
    x, y = normal(200, 0.12, 5)
    whole = f(x, y, resamples=4999)
    monkeypatch.setattr(resampling, "LARGE", 100)
    part = f(x, y)
    assert (whole.p_method, part.p_method) == ("monte carlo", "limit")
    assert part.value == whole.value
    assert part.p_value == pytest.approx(whole.p_value, rel=0.15)
    assert part.interval() == pytest.approx(whole.interval(), abs=0.05)


def test_how_many_orders_are_drawn_at_once_changes_nothing(monkeypatch):
    x, y = normal(10, 0.3, 2)
    whole = kendall(x, y, resamples=101)
    monkeypatch.setattr(resampling, "CHUNK", 70)
    assert kendall(x, y, resamples=101) == whole


def test_a_seed_gives_the_same_numbers_and_another_one_others():
    x, y = normal(20, 0.3, 3)
    assert spearman(x, y, seed=1) == spearman(x, y, seed=1)
    assert spearman(x, y, seed=1).interval() != spearman(x, y, seed=2).interval()


def test_the_global_generators_and_the_inputs_are_left_alone():
    x, y = (torch.tensor(column) for column in normal(12, 0.5, 0))
    before, state, old = (x.clone(), y.clone()), torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    kendall(x, y)
    margin_correlations(x, y, torch.ones(12, dtype=torch.bool))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == old).all()  # noqa: NPY002


# ---------------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("n", [6, 20])
def test_intervals_hold_the_correlation_of_a_normal_law_as_often_as_they_say(n, rho):
    truths = {  # of the population
        "pearson": rho, "spearman": 6 / math.pi * math.asin(rho / 2), "kendall": 2 / math.pi * math.asin(rho)
    }  # fmt: skip
    inside = dict.fromkeys(truths, 0)
    for seed in range(100):
        x, y = normal(n, rho, 1000 + seed)
        for f in EVERY:
            found = f(x, y, resamples=1, seed=seed)
            low, high = found.interval(0.9)
            inside[found.method] += low <= truths[found.method] <= high
    assert min(inside.values()) >= 81  # 90 % less three standard deviations
    if n == 20:
        assert inside["pearson"] <= 97


def test_fishers_interval_is_scipys():
    x, y = normal(25, 0.6, 0)
    truth = stats.pearsonr(x, y).confidence_interval(0.9)
    assert pearson(x, y).interval(0.9) == pytest.approx((truth.low, truth.high))


@pytest.mark.parametrize("f", [spearman, kendall])
def test_points_in_perfect_order_do_not_have_an_interval_of_no_width(f):
    x = np.arange(8.0)
    low, high = f(x, x).interval()
    assert 0 < low < 0.9
    assert high == 1.0
    assert f(x, -x).interval() == pytest.approx((-1.0, -low), abs=0.05)
    assert f(x[:2], x[:2]).interval() == (-1.0, 1.0)


@pytest.mark.parametrize("f", EVERY)
def test_a_higher_level_gives_a_wider_interval_that_holds_the_value(f):
    found = f(*normal(15, 0.5, 4))
    (low, high), (lower, higher) = found.interval(0.8), found.interval(0.99)
    assert lower < low < found.value < high < higher
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 95"):
        found.interval(95)


def test_three_points_say_nothing_of_pearsons_r():
    assert pearson([1.0, 2.0, 3.0], [1.0, 2.0, 2.5]).interval() == (-1.0, 1.0)


# ------------------------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("f", EVERY)
def test_a_correlation_loads_back_equal(f, tmp_path):
    found = f(*normal(10, 0.5, 0))
    assert ritz.load(found.save(tmp_path / "c")) == found
    empty = f([], [])
    assert ritz.load(empty.save(tmp_path / "none")) == empty
    assert float(found) == found.value


def test_a_correlation_draws_itself():
    ax = kendall(*normal(10, 0.5, 0)).plot()
    assert ax.get_ylabel() == "kendall correlation, n = 10"


# ----------------------------------------------------------------------------------------- bounds against traces


def line_with_outliers(n: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """A noisy line and, first, five points far above it."""
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 3, n)
    y = 2 * x + 0.05 * rng.standard_normal(n)
    y[:5] += 10
    return torch.tensor(x), torch.tensor(y)


def test_outliers_are_those_of_scikit_learn_on_standardised_points():
    from sklearn.neighbors import LocalOutlierFactor
    from sklearn.preprocessing import StandardScaler

    x, y = line_with_outliers()
    points = StandardScaler().fit_transform(torch.stack([x, y], 1).numpy())
    truth = LocalOutlierFactor(n_neighbors=20).fit_predict(points) == 1
    some_x, some_y, kept = without_outliers(x, y)
    assert (kept.numpy() == truth).all()
    assert not kept[:5].any()
    assert torch.equal(some_x, x[kept])
    assert torch.equal(some_y, y[kept])


def test_outliers_do_not_depend_on_units():
    x, y = line_with_outliers()
    assert torch.equal(without_outliers(x, y)[2], without_outliers(1e-6 * x + 4, 1e5 * y)[2])


def test_outliers_among_few_or_missing_points():
    assert without_outliers([1.0, 50.0], [1.0, -3.0])[2].tolist() == [True, True]
    assert without_outliers([1.0, 2.0, math.nan], [1.0, 2.0, 3.0])[2].tolist() == [True, True, False]
    assert without_outliers([1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0])[2].all()
    with pytest.raises(ValueError, match="num_neighbors must be at least 1, got 0"):
        without_outliers([1.0], [1.0], num_neighbors=0)


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.neighbors", None)
    with pytest.raises(ImportError, match="ritz\\[study\\]"):
        without_outliers(*line_with_outliers())


def test_correct_and_incorrect_points_are_correlated_apart():
    x, y = line_with_outliers()
    correct = torch.arange(200) % 4 != 0
    y = torch.where(correct, y, -y)  # the other way for the wrong ones
    found = margin_correlations(y, x, correct)
    for group, mask in ((found.correct, correct), (found.incorrect, ~correct)):
        some_x, some_y, kept = without_outliers(x[mask], y[mask])
        assert group.pearson.value == pytest.approx(BY_SCIPY["pearson"](x[mask], y[mask]))
        assert group.spearman.value == pytest.approx(BY_SCIPY["spearman"](x[mask], y[mask]))
        assert group.filtered.value == pytest.approx(BY_SCIPY["pearson"](some_x, some_y))
        assert group.removed == int((~kept).sum()) > 0
        assert group.n == int(mask.sum())
    assert found.correct.filtered.value > 0.99 > found.correct.pearson.value
    assert found.incorrect.filtered.value < -0.99
    assert found.reliability == 1.0


def test_without_incorrect_points_there_is_no_r_unless_the_papers_convention_is_asked_for():
    x, y = line_with_outliers(30)
    correct = torch.ones(30, dtype=torch.bool)
    plain, paper = (margin_correlations(y, x, correct, zero_if_none=zero) for zero in (False, True))
    assert math.isnan(plain.incorrect.pearson.value)
    assert plain.incorrect.pearson.reason == "no points"
    assert paper.incorrect.pearson.value == paper.incorrect.filtered.value == paper.incorrect.spearman.value == 0.0
    assert "convention of seed 003" in str(paper)
    assert paper.correct == plain.correct


def test_probe_noise_in_the_traces_bounds_r():
    x = torch.linspace(1, 2, 50)
    noisy = ritz.Estimate(name="traces", value=x, stderr=torch.full((50,), float(x.std()) / 2))
    found = margin_correlations(noisy, x, torch.ones(50, dtype=torch.bool))
    assert found.reliability == pytest.approx(0.75)
    assert "probe noise keeps r under 0.866" in str(found)


def test_the_margin_study_loads_back_equal_and_draws_itself(tmp_path):
    x, y = line_with_outliers(60)
    found = margin_correlations(y, x, torch.arange(60) % 3 != 0)
    assert ritz.load(found.save(tmp_path / "m")) == found
    ax = found.plot()
    assert [text.get_text().split(":")[0] for text in ax.get_legend().get_texts()] == ["40 correct", "20 incorrect"]
    assert sum(len(points.get_offsets()) for points in ax.collections) == 60
    right = margin_correlations(y, x, torch.ones(60, dtype=torch.bool)).plot()
    assert len(right.get_legend().get_texts()) == 1  # nothing of what is not there


@pytest.mark.parametrize(
    ("correct", "message"),
    [(torch.ones(3), r"correct must be 3 booleans, .* got torch.float64"),
     (torch.ones(2, dtype=torch.bool), r"correct must be 3 booleans, .* of shape \(2,\)")],
)  # fmt: skip
def test_marks_that_are_not_one_truth_value_per_sample_are_refused(correct, message):
    with pytest.raises(ValueError, match=message):
        margin_correlations(torch.arange(3.0), torch.arange(3.0), correct)
    with pytest.raises(ValueError, match="bound and traces must have equal lengths, got 3 and 2"):
        margin_correlations(torch.arange(2.0), torch.arange(3.0), correct)


def test_correlations_differ_where_a_field_does():
    assert Correlation(method="kendall", value=0.5) != Correlation(method="kendall", value=0.6)
    assert Correlation(method="kendall", value=math.nan) == Correlation(method="kendall", value=math.nan)


@pytest.mark.parametrize("right", [1, 9])
def test_one_correct_or_one_incorrect_point_is_no_crash(right):
    correct = torch.arange(10) < right
    found = margin_correlations(torch.rand(10), torch.rand(10), correct)
    lone = found.correct if right == 1 else found.incorrect
    assert lone.pearson.reason == "one point"
