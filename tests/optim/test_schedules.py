"""Schedules against the printed formulas, case by case, and in the hands of torch's LambdaLR."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from ritz.optim import averaging_decay, linear_decay, ramp_decay

times, lengths = st.floats(0, 400), st.integers(1, 300)


@given(t=times, T=lengths, r=st.sampled_from([0.01, 0.1]))
def test_linear_decay_is_equation_12_of_seed_004(t, T, r):
    if t / T <= 0.5:
        expected = 1.0
    elif t / T <= 0.9:
        expected = 1 - (1 - r) * (t / T - 0.5) / 0.4
    else:
        expected = r
    assert linear_decay(T, r)(t) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(t=times, T=lengths, kappa=st.sampled_from([5.0, 2.0]), r=st.sampled_from([0.01, 0.1]))
def test_ramp_decay_is_equation_16_of_seed_004(t, T, kappa, r):
    if t / T <= 0.1:
        expected = 1.0
    elif t / T <= 0.3:
        expected = 1 + (kappa - 1) * (t / T - 0.1) / 0.2
    elif t / T <= 0.9:
        expected = kappa - (kappa - r) * (t / T - 0.3) / 0.6
    else:
        expected = r
    assert ramp_decay(T, kappa, r)(t) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(t=times, start=lengths, alpha=st.sampled_from([0.1, 5e-4]))
def test_averaging_decay_is_equation_22_of_seed_001_with_its_own_time(t, start, alpha):
    last = alpha / 2
    if t / start <= 0.5:
        expected = alpha
    elif t / start <= 0.9:
        expected = alpha * (1 - (1 - last / alpha) * (t / start - 0.5) / 0.4)
    else:
        expected = last
    assert alpha * averaging_decay(start)(t) == pytest.approx(expected, rel=1e-9)


def test_the_slope_of_equation_22_as_printed_would_jump():
    """t / T in place of t / T_avg: just before 0.9 T_avg the rate is not near alpha_avg."""
    T, start, t = 300, 161, 0.9 * 161 - 1e-9
    printed = 1 - (1 - 0.5) * (t / T - 0.5) / 0.4
    assert abs(printed - 0.5) > 0.4
    assert averaging_decay(start)(t) == pytest.approx(0.5)


def rates(scheduler: LambdaLR, num: int) -> list[float]:
    found = []
    for _ in range(num):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def scheduled(schedule) -> LambdaLR:
    return LambdaLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2), schedule)


def test_lambda_lr_counts_epochs_from_0():
    found = rates(scheduled(linear_decay(10)), 10)
    assert found == pytest.approx([0.2 * linear_decay(10)(epoch) for epoch in range(10)])
    assert found[5] == 0.2
    assert found[9] == pytest.approx(0.002)


def test_lambda_lr_saves_and_loads_a_schedule_with_its_state():
    whole = rates(scheduled(ramp_decay(10)), 10)
    first = scheduled(ramp_decay(10))
    rates(first, 4)
    second = scheduled(linear_decay(3))  # overwritten by what was saved
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert rates(second, 6) == whole[4:]


def test_a_schedule_pickles():
    assert pickle.loads(pickle.dumps(ramp_decay(10))) == ramp_decay(10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear_decay(0), "num_epochs must be a positive number of epochs or steps, got 0"),
        (lambda: ramp_decay(float("nan")), "num_epochs must be a positive"),
        (lambda: averaging_decay(-1), "start must be a positive"),
        (lambda: linear_decay(1, r=-0.1), "r multiplies the learning rate: it must be finite and not negative, got"),
        (lambda: ramp_decay(1, kappa=float("inf")), "kappa multiplies"),
        (lambda: averaging_decay(1, ratio=float("nan")), "ratio multiplies"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_is_no_scheduler_and_says_how_it_becomes_one():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(TypeError, match=r"number of epochs or steps, got SGD; .* LambdaLR\(optimizer, linear_decay"):
        linear_decay(optimizer, 300)
