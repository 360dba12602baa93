"""Means, differences and ratios over seeds: `ritz.papers.over_seeds`."""

import math

import pytest
import torch
from scipy.stats import binomtest, t

from ritz.papers.base import Claim
from ritz.papers.over_seeds import correlation, difference, geometric_mean, mean, ratio, share


def verdict(measured):
    return Claim(paper="", where="", text="", expected=2.0, reference=1.0, measured=measured).verdict


def test_a_mean_has_the_interval_of_student():
    values = [2.0, 3.0, 2.5, 4.0]
    found, half = mean(values), t.ppf(0.975, 3) * float(torch.tensor(values).std()) / 2
    assert found.value == pytest.approx(2.875)
    assert found.interval() == pytest.approx((2.875 - half, 2.875 + half))


@pytest.mark.parametrize("values", [{}, {0: 3.0}], ids=["no seed", "one seed"])
def test_fewer_than_two_seeds_decide_nothing(values):
    ones = dict.fromkeys(values, 1.0)
    for found in (mean(values.values()), difference(ones, values), ratio(ones, values)):
        assert verdict(found) == "not decidable"


def test_only_seeds_that_both_have_are_paired():
    first, second = {0: 1.0, 1: 2.0, 5: 9.0}, {1: 6.0, 0: 3.0, 7: 9.0}
    assert difference(first, second).value == 3.0
    assert ratio(first, second).value == pytest.approx(3.0)


def test_the_interval_of_a_geometric_mean_is_that_of_the_mean_logarithm():
    values = [2.0, 3.0, 2.5, 4.0]
    logs = torch.tensor(values).log()
    width = t.ppf(0.975, 3) * float(logs.std()) / 2
    expected = [float(logs.mean()) - width, float(logs.mean()) + width]
    assert [math.log(end) for end in geometric_mean(values).interval()] == pytest.approx(expected)


def test_a_ratio_of_traces_that_are_not_positive_is_not_decidable():
    found = ratio({0: 1.0, 1: 1.0}, {0: 2.0, 1: -1.0})
    assert math.isnan(found.value)
    assert verdict(found) == "not decidable"


@pytest.mark.parametrize("found", [[True] * 6, [False] * 5, [True, False, False], [True]])
def test_the_share_of_runs_has_the_interval_of_a_binomial_test(found):
    measured = share(found)
    assert measured.value == sum(found) / len(found)
    assert measured.interval() == pytest.approx(tuple(binomtest(sum(found), len(found)).proportion_ci()))


def test_a_share_of_no_runs_is_no_number():
    assert math.isnan(share([]).value)
    assert verdict(share([])) == "not decidable"


def test_the_interval_of_a_correlation_ends_at_one():
    values = [0.9, 0.93]
    assert correlation(values).interval() == (mean(values).interval()[0], 1.0)
    assert mean(values).interval()[1] > 1
    assert correlation(values[:1]).interval() == (-1.0, 1.0)  # one seed leaves all open
