"""Train, test and gap, in loss and in error, with the error of the test data alone."""

import dataclasses

import pytest
import torch
from scipy import stats
from torch import nn

import ritz
from ritz.errors import UnsupportedError
from ritz.intervals import StudentT
from ritz.measures.gap import gap, on_test_data, on_training_data
from ritz.measures.outputs import Outputs, sample_outputs


def found(n: int = 200, wrong: int = 20, seed: int = 0, **fields) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    margin = torch.where(torch.arange(n) < wrong, -1.0, 1.0)
    loss = -torch.rand(n, generator=generator).log()
    return Outputs(loss=loss, weight=torch.ones(n), margin=margin, classes=2, **fields)


def test_training_values_are_exact():
    e = on_training_data(found(), "error")
    assert (e.value, e.exact, e.interval()) == (0.1, True, (0.1, 0.1))
    assert on_training_data(found(), "loss").value == pytest.approx(float(found().loss.mean()))


def test_a_test_error_has_a_binomial_interval():
    e = on_test_data(found(), "error")
    truth = stats.binomtest(20, 200).proportion_ci(0.95, method="exact")
    assert e.value == pytest.approx(0.1)
    assert e.interval() == pytest.approx((truth.low, truth.high))


def test_a_test_loss_has_a_bootstrap_interval_about_as_wide_as_student_t():
    e = on_test_data(found(2000), "loss")
    low, high = e.interval()
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 1999) * e.stderr, rel=0.15)


def test_the_gap_is_as_uncertain_as_the_test_value():
    train, test = on_training_data(found(seed=1, wrong=0), "error"), on_test_data(found(), "error")
    e = gap(train, test)
    assert (e.value, e.stderr) == pytest.approx((0.1, test.stderr))
    assert e.interval() == pytest.approx(test.interval())
    assert "share, not in percent" in e.convention


def test_weights_of_items_count_in_the_loss():
    loss, weight = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([3.0, 1.0, 1.0, 1.0])
    e = on_test_data(dataclasses.replace(found(4), loss=loss, weight=weight), "loss")
    assert e.value == pytest.approx(0.5)
    assert float(e.samples.mean()) == pytest.approx(0.5)
    # the spread of a ratio of means, by its influence function
    assert e.stderr == pytest.approx(float((4 * weight * (loss - 0.5) / 6).std() / 2))


def test_a_mistake_counts_once_whatever_its_class_weighs():
    weighted = dataclasses.replace(found(4, wrong=1), weight=torch.tensor([3.0, 1.0, 1.0, 1.0]))
    e = on_test_data(weighted, "error")
    assert (e.value, on_training_data(weighted, "error").value) == (0.25, 0.25)
    assert e.interval() == pytest.approx(tuple(stats.binomtest(1, 4).proportion_ci(0.95, method="exact")))


def test_the_loss_of_a_few_items_is_as_uncertain_as_they_are_few():
    """Of 5 normal losses the bootstrap alone covers 88 % of the time."""
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for seed in range(200):
        few = dataclasses.replace(found(5), loss=torch.randn(5, generator=generator))
        low, high = on_test_data(few, "loss", seed=seed).interval()
        inside += low <= 0 <= high
    assert 0.92 <= inside / 200 <= 0.99


def test_the_loss_of_very_many_items_is_not_resampled():
    many = dataclasses.replace(found(2**17 + 1))
    assert isinstance(on_test_data(many, "loss").rule, StudentT)


def test_items_of_a_shuffled_loader_are_not_paired():
    assert on_test_data(found(ordered=False), "loss").samples is None


def test_one_test_item_has_no_error_bar():
    e = on_test_data(found(1, wrong=0), "loss")
    assert e.interval() == (-torch.inf, torch.inf)


def test_a_regression_has_a_loss_and_no_error():
    data = torch.ones(3, 2), torch.zeros(3, 1)
    seen = sample_outputs(ritz.Risk(nn.Linear(2, 1), nn.MSELoss(), data))
    assert on_training_data(seen, "loss").value >= 0
    with pytest.raises(UnsupportedError, match="needs classes and labels"):
        on_training_data(seen, "error")
