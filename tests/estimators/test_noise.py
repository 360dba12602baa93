"""Curvature noise between batches, and unbiased moments from them, against per-sample dense Hessians."""

import math

import pytest
import torch
from torch import Tensor, nn

import ritz
from ritz.estimators.noise import _Groups, minibatch_moment


def make_risk(num: int = 48, **options: object) -> ritz.Risk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    X, y = torch.randn(num, 3), torch.randint(2, (num,))
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), **options)


def sample_hessians(risk: ritz.Risk, matrix: type = ritz.Hessian) -> Tensor:
    """(N, P, P)."""
    X, y = (torch.cat(parts) for parts in zip(*(batch.data for batch in risk.batches), strict=True))
    return torch.stack([matrix(risk.on((X[i : i + 1], y[i : i + 1]))).dense() for i in range(len(X))])


def sample_variance(each: Tensor) -> float:
    """S^2 = sum_i |h_i - mean|^2 / (N - 1): a batch of B has noise S^2 / B."""
    return float((each - each.mean(0)).square().sum() / (len(each) - 1))


@pytest.fixture(scope="module")
def risk() -> ritz.Risk:
    return make_risk()


@pytest.fixture(scope="module")
def hessians(risk: ritz.Risk) -> Tensor:
    return sample_hessians(risk)


@pytest.mark.parametrize(("num_batches", "batch_size"), [(2, 4), (6, 8), (12, 4)])
def test_the_noise_is_unbiased(risk, hessians, num_batches, batch_size):
    truth = sample_variance(hessians) / batch_size / risk.dim
    values = torch.tensor(
        [float(ritz.curvature_noise(risk, num_batches, batch_size, seed).value) for seed in range(80)]
    )
    assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / math.sqrt(80)


def test_the_empirical_target_is_the_noise_about_the_hessian_of_the_data(risk, hessians):
    """All partitions into 6 batches of 8: the mean of |H_b - H|^2 over batches, by brute force over seeds."""
    H = hessians.mean(0)
    truth = sample_variance(hessians) * (1 / 8 - 1 / 48) / risk.dim
    drawn = []
    for seed in range(200):
        rows = torch.randperm(48, generator=torch.Generator().manual_seed(seed))[:8]
        drawn.append(float((hessians[rows].mean(0) - H).square().sum()) / risk.dim)
    assert truth == pytest.approx(sum(drawn) / 200, rel=0.15)
    population = ritz.curvature_noise(risk, 6, 8)
    empirical = ritz.curvature_noise(risk, 6, 8, target="empirical")
    assert float(empirical.value) == pytest.approx(float(population.value) * (1 - 8 / 48))


def test_algorithm_1_as_printed_gives_noise_plus_signal(risk, hessians):
    """Seed 004 subtracts (v'Hv)^2, which is nothing, where |Hv|^2 is meant: the signal stays in."""
    H, P = hessians.mean(0), risk.dim
    batches = hessians.reshape(12, 4, P, P).mean(1)
    v = risk.space.probes(range(200), 0, "normal", dtype=torch.float64)
    v = v / v.norm(dim=1, keepdim=True)
    printed = ((batches @ v.T).square().sum((0, 1)) / 12 - (v * (v @ H)).sum(1).square()).mean()
    noise, signal = sample_variance(hessians) / 4 / P, float(H.square().sum()) / P
    assert float(printed) > noise + 0.7 * signal
    assert float(printed) == pytest.approx(noise + signal, rel=0.1)


def test_what_comes_free_is_right_too(risk, hessians):
    runs = [ritz.curvature_noise(risk, 6, 4, seed, num_probes=8, target="empirical").parts for seed in range(80)]
    X, y = (torch.cat(parts) for parts in zip(*(batch.data for batch in risk.batches), strict=True))
    gradients = torch.stack([risk.on((X[i : i + 1], y[i : i + 1])).gradient() for i in range(len(X))])
    truths = {
        "mean curvature": float(hessians.mean(0).trace()) / risk.dim,
        "second moment": float(hessians.mean(0).square().sum()) / risk.dim,
        "gradient noise": float((gradients - gradients.mean(0)).square().sum() / 47) * (1 / 4 - 1 / 48),
    }
    for key, truth in truths.items():
        values = torch.tensor([float(parts[key].value) for parts in runs])
        assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / math.sqrt(80), key


def test_the_ggn_has_its_own_noise(risk):
    each = sample_hessians(risk, ritz.GGN)
    truth = sample_variance(each) / 8 / risk.dim
    values = torch.tensor([float(ritz.curvature_noise(risk, 6, 8, s, curvature="ggn").value) for s in range(60)])
    assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / math.sqrt(60)


def test_the_interval_covers(risk, hessians):
    """Batches and probes both vary; 6 batches of 4 drawn from 48, so that they hardly overlap between seeds."""
    truth = sample_variance(hessians) / 4 / risk.dim
    hits = 0
    for seed in range(300):
        low, high = ritz.curvature_noise(risk, 6, 4, seed).interval(0.95)
        hits += low <= truth <= high
    assert 0.88 <= hits / 300 <= 0.995


def test_the_batch_stays_the_unit_when_it_is_taken_in_pieces(risk):
    whole = ritz.curvature_noise(risk, 6, 8)
    pieces = ritz.curvature_noise(make_risk(plan=ritz.Plan(micro_batch=3)), 6, 8)
    assert float(pieces.value) == pytest.approx(float(whole.value), rel=1e-10)


def test_identical_samples_have_no_noise():
    model = nn.Linear(2, 1)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.ones(16, 2), torch.zeros(16, 1)))
    e = ritz.curvature_noise(risk, 4, 4)
    assert float(e.value) == pytest.approx(0.0, abs=1e-20)


# -------------------------------------------------------------------------------- moments from mini-batches


def test_pairs_of_batches_give_an_unbiased_second_moment_and_single_ones_do_not(risk, hessians):
    truth = float(hessians.mean(0).square().sum())
    runs = [minibatch_moment(risk, 16, 4, seed) for seed in range(100)]
    pairs = torch.tensor([float(e.value) for e in runs])
    naive = torch.tensor([float(e.parts["naive"].value) for e in runs])
    assert abs(float(pairs.mean()) - truth) < 4 * float(pairs.std()) / 10
    # with replacement a batch of 4 has noise sum_i |h_i - h|^2 / N / 4 (seed 002, equation 12)
    bias = float((hessians - hessians.mean(0)).square().sum()) / 48 / 4
    assert abs(float(naive.mean()) - truth - bias) < 4 * float(naive.std()) / 10
    assert bias > 3 * float(naive.std()) / 10


def test_a_pair_is_the_same_when_its_batches_are_taken_in_pieces(risk):
    pieces = make_risk(plan=ritz.Plan(micro_batch=3))
    assert float(minibatch_moment(pieces, 4, 8).value) == pytest.approx(float(minibatch_moment(risk, 4, 8).value))


def test_disjoint_batches_are_biased(hessians):
    """Why the two batches of a pair are drawn independently: without replacement E Tr H_1 H_2 = Tr H^2 - S^2 / N."""
    truth = float(hessians.mean(0).square().sum())
    values = []
    for seed in range(2000):
        rows = torch.randperm(48, generator=torch.Generator().manual_seed(seed))
        values.append(float((hessians[rows[:24]].mean(0) * hessians[rows[24:]].mean(0)).sum()))
    mean = torch.tensor(values)
    error = float(mean.std()) / math.sqrt(2000)
    assert abs(float(mean.mean()) - (truth - sample_variance(hessians) / 48)) < 4 * error
    assert truth - float(mean.mean()) > 4 * error


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: ritz.curvature_noise(r, num_batches=1), "needs num_batches >= 2, got 1"),
        (lambda r: ritz.curvature_noise(r, 4, 100), r"4 \* 100 is more than the 48 samples"),
        (lambda r: ritz.curvature_noise(r, 4, 0), "must be at least 1, got 0"),
        (lambda r: ritz.curvature_noise(r, 4, 4, curvature="fisher"), "curvature must be"),
        (lambda r: ritz.curvature_noise(r, 4, 4, target="all"), "target must be"),
        (lambda r: minibatch_moment(r, 1, 4), "num_pairs must be at least 2"),
        (lambda r: minibatch_moment(r, 4, 4, curvature="fisher"), "curvature must be"),
        (lambda r: minibatch_moment(ritz.Hessian(r)), r"expected a ritz\.Risk, got Hessian"),
        (lambda r: ritz.sample_traces(ritz.Hessian(r)), r"expected a ritz\.Risk, got Hessian"),
        (lambda r: ritz.curvature_noise(ritz.Hessian(r)), r"expected a ritz\.Risk, got Hessian"),
    ],
)
def test_bad_arguments_are_refused(risk, call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(risk)


@pytest.mark.parametrize("num_probes", [4, 24])
def test_what_comes_free_covers_too(risk, hessians, num_probes):
    """Batches vary as well as probes: with many of these the batches are most of the error."""
    truths = {
        "mean curvature": float(hessians.mean(0).trace()) / risk.dim,
        "second moment": float(hessians.mean(0).square().sum()) / risk.dim,
    }
    hits = dict.fromkeys(truths, 0)
    for seed in range(60):
        parts = ritz.curvature_noise(risk, 6, 4, seed, num_probes=num_probes, target="empirical").parts
        for key, truth in truths.items():
            low, high = parts[key].interval()
            hits[key] += low <= truth <= high
    assert min(hits.values()) >= 53, hits


def test_batches_that_are_all_of_the_data_add_no_error_of_their_own(risk):
    """About the mean of the data themselves; about that of their distribution they do."""
    own, others = (
        ritz.curvature_noise(risk, 12, 4, num_probes=8, target=target).parts["mean curvature"]
        for target in ("empirical", "population")
    )
    assert own.value == others.value
    assert own.stderr == pytest.approx(float(own.samples.std()) / math.sqrt(8))
    assert others.stderr > 1.05 * own.stderr


def test_groups_of_batches_tell_how_much_their_mean_varies():
    """v'H_b v of each batch is a number: the variance of their mean is as from the numbers, but for the grouping."""
    torch.manual_seed(0)
    rows = torch.randn(2, 5)
    for num in (2, 8, 11):
        images, seen, halves = torch.randn(num, 3, 5), _Groups(), (_Groups(), _Groups())
        for at, image in enumerate(images):
            seen.add(image, torch.tensor(1.0))
            halves[at % 2].add(image, torch.tensor(1.0))
        numbers = (rows * images[:, :-1]).sum(2).mean(1)
        sizes = torch.tensor([len(numbers[group::8]) for group in range(min(num, 8))])
        means = torch.stack([numbers[group::8].mean() for group in range(min(num, 8))])
        truth = float((sizes / num * (means - numbers.mean()).square()).sum()) / (len(means) - 1)
        assert seen.variance(rows) == pytest.approx(truth)
        assert num > 8 or truth == pytest.approx(float(numbers.var()) / num)
        halves[0].merge(halves[1])
        torch.testing.assert_close(halves[0].mean, seen.mean)


@pytest.mark.parametrize("estimate", [ritz.curvature_noise, minibatch_moment])
def test_under_inference_mode_it_is_the_same(estimate):
    """Samples are picked before a model is called."""
    with torch.inference_mode():
        found = estimate(make_risk(), 4, 2)
    assert found == estimate(make_risk(), 4, 2)
