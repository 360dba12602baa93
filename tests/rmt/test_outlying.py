"""Outliers of drawn matrices: how many, with which error, from eigenvalues and from a Krylov run."""

import math

import pytest
import torch

import ritz
from ritz import rmt
from ritz.intervals import ChiSquare
from ritz.operators import DenseOperator

SPIKES = (5.0, 3.0, 2.0, -3.0)


def test_the_outliers_of_a_spiked_matrix_are_its_spikes():
    found = rmt.outliers(torch.linalg.eigvalsh(rmt.wigner(300, spikes=SPIKES)), 1.0)
    assert found.count.value == 4.0
    assert found.count.exact
    assert {side: part.value for side, part in found.count.parts.items()} == {"above": 3.0, "below": 1.0}
    assert found.eigenvalues.tolist() == sorted(found.eigenvalues.tolist(), reverse=True)
    low, high = found.spikes.interval(0.999)
    assert bool(((low < torch.tensor(SPIKES)) & (torch.tensor(SPIKES) < high)).all())
    assert found.spikes.parts["overlap"].value.shape == (4,)


def test_noise_alone_has_none_as_often_as_the_level_says():
    counts = [
        float(rmt.outliers(torch.linalg.eigvalsh(rmt.wigner(80, seed=seed)), 1.0, level=0.8).count)
        for seed in range(150)
    ]
    assert sum(count == 0 for count in counts) / 150 == pytest.approx(0.8, abs=0.12)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_counts_what_the_eigenvalues_count(seed):
    H = rmt.wigner(300, spikes=SPIKES, seed=seed)
    truth = rmt.outliers(torch.linalg.eigvalsh(H), 1.0)
    found = rmt.outliers(ritz.spectrum(DenseOperator(H), num_steps=60, num_probes=8, seed=seed), 1.0)
    assert found.threshold.value == truth.threshold.value
    low, high = found.count.interval()
    assert low <= truth.count.value <= high
    assert low >= 3  # those far out are certain
    close = truth.eigenvalues[: len(found.eigenvalues)] if len(found.eigenvalues) < 4 else truth.eigenvalues
    assert float(found.eigenvalues[0]) == pytest.approx(float(close[0]), rel=1e-3)


def test_a_short_run_does_not_claim_to_have_seen_all():
    """Four steps resolve no outlier, and their masses leave the number open."""
    H = rmt.wigner(200, spikes=SPIKES)
    short = ritz.spectrum(DenseOperator(H), num_steps=4, num_probes=4, reorthogonalize="full")
    found = rmt.outliers(short, 1.0)
    low, high = found.count.interval()
    assert low <= 4 <= high
    assert found.count.bracket[0] < found.count.bracket[1]


def test_a_run_that_found_all_eigenvalues_is_as_good_as_they_are():
    H = rmt.wigner(12, spikes=[8.0])
    found = rmt.outliers(ritz.spectrum(DenseOperator(H)), 1.0)
    assert found.count.value == rmt.outliers(torch.linalg.eigvalsh(H), 1.0).count.value == 1.0
    assert found.count.exact


def test_a_level_not_well_known_leaves_the_count_open():
    values = torch.linalg.eigvalsh(rmt.wigner(300, spikes=SPIKES))
    noise = ritz.Estimate(name="noise", value=1.0, stderr=math.sqrt(2 / 30), rule=ChiSquare(30.0))
    found = rmt.outliers(values, noise)
    assert found.count.value == 4.0
    low, high = found.count.bracket
    near, far = found.threshold.interval()
    assert low == float((values.abs() > far).sum())
    assert high == float((values.abs() > near).sum())
    assert low < 4 < high
    assert not found.count.exact


@pytest.mark.parametrize("call", [lambda A: rmt.outliers(A, 1.0), rmt.fit])
def test_an_operator_is_refused_with_what_to_do(call):
    with pytest.raises(TypeError, match=r"got DenseOperator; for an operator, pass ritz\.spectrum"):
        call(DenseOperator(torch.eye(3)))


def test_the_zero_matrix_has_none():
    found = rmt.outliers(torch.zeros(5), 1.0)
    assert found.count.value == 0.0
    assert len(found.eigenvalues) == len(found.spikes.value) == 0


def test_eigenvalues_in_single_precision_are_taken():
    assert rmt.outliers(torch.tensor([9.0, 0.0, 0.0], dtype=torch.float32), 1.0).count.value == 1.0


def test_outliers_are_saved_and_loaded_equal(tmp_path):
    found = rmt.outliers(torch.linalg.eigvalsh(rmt.wigner(50, spikes=SPIKES)), 1.0)
    assert ritz.load(found.save(tmp_path / "outliers")) == found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rmt.outliers(torch.eye(3), 1.0),
            r"\(P,\), got shape \(3, 3\); for a matrix, pass",
        ),
        (lambda: rmt.outliers(torch.tensor([math.nan]), 1.0), "one finite tensor"),
        (lambda: rmt.outliers(torch.ones(3), 1.0, level=1.0), "level must lie between 0 and 1, got 1.0"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
