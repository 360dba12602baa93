"""Linear shrinkage: the best of its kind on drawn matrices, the damping it amounts to, and its error bars."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ritz
from ritz import rmt
from ritz.results import from_samples

NUMBERS = st.floats(0.01, 100.0)


@pytest.mark.parametrize("target", [None, 1.0])
def test_no_other_weight_is_nearer_to_the_truth(target):
    """Mean squared error over draws of H + X, on a grid of weights; H has three large eigenvalues."""
    dim, s2, num = 80, 0.5, 40
    truth = torch.full((dim,), 0.2)
    truth[:3] = torch.tensor([8.0, 5.0, 2.0])
    mean, second = float(truth.mean()), float(truth.square().mean())
    found = rmt.shrinkage(s2 * (1 + 1 / dim), mean=mean, second=second, target=target)
    c = mean if target is None else target
    drawn = [rmt.wigner(dim, s2, seed=seed) + truth.diag() for seed in range(num)]

    def errors(beta: float) -> torch.Tensor:
        estimates = (beta * H + (1 - beta) * c * torch.eye(dim) for H in drawn)
        return torch.stack([(estimate - truth.diag()).square().sum() / dim for estimate in estimates])

    beta = found.beta.value
    best = errors(beta)
    assert float(best.mean()) == pytest.approx(found.error.value, abs=4 * float(best.std()) / math.sqrt(num))
    assert float(errors(1.0).mean()) == pytest.approx(s2 * (1 + 1 / dim), rel=0.02)
    for other in (0.0, beta - 0.1, beta - 0.03, beta + 0.03, 1.0):
        assert float((errors(other) - best).mean()) > 0
    spectrum = torch.linalg.eigvalsh(drawn[0])
    shrunk = torch.linalg.eigvalsh(beta * drawn[0] + (1 - beta) * c * torch.eye(dim))
    torch.testing.assert_close(found.apply(spectrum), shrunk)


@given(s2=NUMBERS, mean=NUMBERS, spread=NUMBERS, target=st.none() | NUMBERS)
def test_shrinking_is_damping_at_another_rate(s2, mean, spread, target):
    """(beta lambda + (1 - beta) c)^-1 = (lambda + delta)^-1 / beta (seed 004, equation 13)."""
    found = rmt.shrinkage(s2, mean=mean, second=mean**2 + spread, target=target)
    values = torch.tensor([0.0, 0.3, 7.0])
    beta, delta = found.beta.value, found.damping.value
    torch.testing.assert_close(1 / found.apply(values), 1 / (values + delta) / beta)
    assert 0 < beta < 1
    assert found.error.value < s2
    assert rmt.shrinkage(s2, mean=mean, second=mean**2 + spread).error.value <= found.error.value  # the best target


@given(s2=NUMBERS, mean=NUMBERS, spread=NUMBERS, scale=NUMBERS)
def test_damping_towards_the_mean_follows_the_scale_of_the_loss(s2, mean, spread, scale):
    """And equation 15 of seed 004 does not: it grows with the square."""
    second = mean**2 + spread
    ours = rmt.shrinkage(s2, mean=mean, second=second)
    scaled = rmt.shrinkage(s2 * scale**2, mean=mean * scale, second=second * scale**2)
    assert scaled.damping.value == pytest.approx(scale * ours.damping.value)
    assert scaled.beta.value == pytest.approx(ours.beta.value)
    flat = [rmt.shrinkage(s2 * k**2, mean=0.0, second=0.0, target=1.0).damping.value for k in (1.0, scale)]
    assert flat == pytest.approx([s2, s2 * scale**2])


def test_the_identity_as_target_gives_equation_15_for_a_flat_loss_only():
    assert rmt.shrinkage(0.1, mean=1e-6, second=1e-8, target=1.0).damping.value == pytest.approx(0.1, rel=1e-5)
    assert rmt.shrinkage(0.1, mean=0.5, second=1.0, target=1.0).damping.value == pytest.approx(0.1 / (1 - 1 + 1.0))
    assert rmt.shrinkage(0.1, mean=0.1, second=9.0, target=1.0).damping.value == pytest.approx(0.1 / 9.8)


def test_an_average_of_batches_needs_less():
    one, many = (rmt.shrinkage(2.0, mean=1.0, second=3.0, averaged=n) for n in (1.0, 39.0))
    assert many.damping.value == pytest.approx(one.damping.value / 39)


def test_without_noise_nothing_is_shrunk():
    found = rmt.shrinkage(0.0, mean=1.0, second=3.0)
    assert (found.beta.value, found.damping.value, found.error.value) == (1.0, 0.0, 0.0)
    assert found.beta.exact


def test_intervals_cover():
    """Linear regression, whose sample Hessians are 2 xx': batches that take all of the data, other ones each time."""
    dim, batch, num = 10, 10, 60
    X = torch.randn(100, dim, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.2, 3.0, dim).sqrt()
    each = 2 * X[:, :, None] * X[:, None, :]
    H = each.mean(0)
    s2 = float((each - H).square().sum()) / 99 * (1 / batch - 1 / 100) / dim
    truth = rmt.shrinkage(s2, mean=float(H.trace()) / dim, second=float(H.square().sum()) / dim)
    risk = ritz.Risk(nn.Linear(dim, 1, bias=False), nn.MSELoss(), (X, torch.zeros(100, 1)))
    hits = {"beta": 0, "damping": 0, "target": 0, "error": 0}
    for seed in range(num):
        noise = ritz.curvature_noise(risk, 10, batch, seed, num_probes=6, target="empirical")
        found = rmt.shrinkage(noise)
        for name in hits:
            low, high = getattr(found, name).interval()
            hits[name] += low <= getattr(truth, name).value <= high
    assert min(hits.values()) / num > 0.87, hits


def test_the_batches_count_as_well_as_the_probes():
    """The error of a measured noise level is larger than its probes show; that of the damping is too."""
    noise = from_samples("curvature noise", torch.tensor([1.0, 1.1, 0.9, 1.0]))
    parts = {
        "mean curvature": from_samples("mean curvature", torch.tensor([1.0, 1.05, 0.95, 1.0])),
        "second moment": from_samples("second moment", torch.tensor([4.0, 4.1, 3.9, 4.0])),
    }
    alone = rmt.shrinkage(replace(noise, parts=parts)).damping
    both = rmt.shrinkage(replace(noise, parts=parts, stderr=0.5)).damping
    assert both.value == alone.value == pytest.approx(1 / 3)
    beyond = 0.25 - noise.stderr**2
    assert both.stderr == pytest.approx(math.sqrt(alone.stderr**2 + beyond / 9), rel=1e-4)  # d delta / d s2 = 1 / 3
    assert both.rule.dof > alone.rule.dof == 3
    parts["second moment"] = replace(parts["second moment"], stderr=0.5)
    all_three = rmt.shrinkage(replace(noise, parts=parts, stderr=0.5)).damping
    beyond = 0.25 - float(parts["second moment"].samples.var()) / 4
    assert all_three.stderr == pytest.approx(math.sqrt(both.stderr**2 + beyond / 81), rel=1e-4)  # d delta / d m2 = -1/9


def test_two_batches_have_no_error_of_their_noise_nor_has_what_follows_from_it():
    g = torch.Generator().manual_seed(0)
    data = torch.randn(64, 3, generator=g), torch.randint(4, (64,), generator=g)
    noise = ritz.curvature_noise(ritz.Risk(nn.Linear(3, 4), nn.CrossEntropyLoss(), data), 2, 32)
    assert math.isnan(noise.stderr)
    found = rmt.shrinkage(noise)
    assert found.error.interval() == found.damping.interval() == (0.0, math.inf)
    assert found.beta.interval() == (0.0, 1.0)
    assert found.target.interval()[1] < math.inf  # it is the mean curvature, whose error is known


def test_shrinkage_is_saved_and_loaded_equal(tmp_path):
    found = rmt.shrinkage(1.0, mean=1.0, second=4.0)
    assert ritz.load(found.save(tmp_path / "shrinkage")) == found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rmt.shrinkage(1.0), r"Tr H / P and Tr H\^2 / P besides s2"),
        (lambda: rmt.shrinkage(1.0, mean=-0.1, second=1.0), "target of the shrinkage must be positive, got -0.1"),
        (lambda: rmt.shrinkage(1.0, mean=1.0, second=1.0), r"must be positive, got 0: the curvature equals the target"),
        (lambda: rmt.shrinkage(1.0, mean=1.0, second=2.0, averaged=0.5), "at least 1, got 0.5"),
        (lambda: rmt.shrinkage(-1.0, mean=1.0, second=2.0), "finite and not negative, got -1.0"),
    ],
)
def test_what_cannot_be_shrunk_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
