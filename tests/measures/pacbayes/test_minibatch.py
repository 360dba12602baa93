"""The metric from one mini-batch: unbiased, with an interval that covers, for networks straight and curved."""

import math

import pytest
import torch
from cases import mlp, problem, truth
from torch import nn

import ritz
from ritz.errors import UnsupportedError
from ritz.measures.pacbayes import minibatch
from ritz.measures.pacbayes.minibatch import minibatch_metric

NUM_SEEDS = 60


def fitted(seed: int = 0, steps: int = 400) -> ritz.Risk:
    """A ReLU network that fits its data well: most samples are sure, few carry the curvature."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(600, 4, generator=g)
    y = (X[:, 0] + 0.5 * X[:, 1] ** 2 > 0.5).long() + (X[:, 2] > 1).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp([4, 16, 3], nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))


@pytest.fixture(scope="module")
def solution() -> tuple[ritz.Risk, float]:
    risk = fitted()
    return risk, float(ritz.sample_traces(risk).value.mean())


def test_its_error_bar_covers_on_a_fitted_network(solution):
    risk, trace = solution
    assert risk.loss() < 0.1
    found = [minibatch_metric(risk, 128, seed).parts["trace"] for seed in range(NUM_SEEDS)]
    hits = [e.interval()[0] <= trace <= e.interval()[1] for e in found]
    assert sum(hits) / NUM_SEEDS >= 0.85
    mean = sum(e.value for e in found) / NUM_SEEDS
    spread = math.sqrt(sum((e.value - mean) ** 2 for e in found) / (NUM_SEEDS - 1))
    assert abs(mean - trace) < 4 * spread / math.sqrt(NUM_SEEDS)  # no bias
    typical = sum(e.stderr for e in found) / NUM_SEEDS
    assert 0.6 < typical / spread < 1.6  # the error bar is as wide as the estimates are spread


def test_drawn_labels_do_not_cover_where_a_network_is_sure(monkeypatch):
    """Why signs: with p = 0.999 for every label, all curvature comes from labels that a batch hardly ever draws."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(400) % 2
    X = (2.0 * y - 1)[:, None] + 0.1 * torch.randn(400, 1, generator=g)
    model = nn.Linear(1, 2, bias=False)
    sure = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y)).at({"weight": torch.tensor([[-3.5], [3.5]])})
    trace = float(ritz.sample_traces(sure).value.mean())

    def coverage() -> float:
        found = [minibatch_metric(sure, 128, seed).parts["trace"].interval() for seed in range(NUM_SEEDS)]
        return sum(low <= trace <= high for low, high in found) / NUM_SEEDS

    assert coverage() > 0.88
    monkeypatch.setattr(minibatch, "_MOST_ROOTS", 0)
    assert "drawn labels" in minibatch_metric(sure).convention
    assert coverage() < 0.3


def test_it_is_the_metric_of_that_trace(solution):
    risk, _ = solution
    w = risk.space.join(risk.params())
    for convention, scale, offset in (("table", 1 / risk.dim, w.norm() / 2), ("eq7", 1.0, w.norm() ** 2 / 2)):
        a = minibatch_metric(risk, 64, 3, convention=convention)
        trace = a.parts["trace"]
        assert a.value == pytest.approx(scale * trace.value + float(offset), rel=1e-12)
        assert a.stderr == pytest.approx(scale * trace.stderr, rel=1e-12)
        low, high = trace.interval()
        assert a.interval() == pytest.approx((scale * low + float(offset), scale * high + float(offset)), rel=1e-9)
        assert a.seed == 3


@pytest.mark.parametrize("name", ["mlp_relu", "mlp_mse", "mlp_bce", "conv", "mlp_custom", "mlp_weighted", "pixels"])
@pytest.mark.parametrize("how", ["random signs", "drawn labels"])
def test_over_seeds_its_mean_is_the_trace_of_the_ggn(name, how, monkeypatch):
    """All samples each time, so that only the signs vary; one or many items a sample, weighted or not."""
    if how == "drawn labels":
        monkeypatch.setattr(minibatch, "_MOST_ROOTS", 0)
    if not problem(name).likelihood and how == "drawn labels":
        pytest.skip("a loss that is no likelihood has no labels to draw")
    risk = problem(name).risk()
    exact = float(truth(name, "GGN").trace())
    values = torch.tensor([minibatch_metric(risk, seed=seed).parts["trace"].value for seed in range(40)])
    assert abs(float(values.mean()) - exact) < 4 * float(values.std()) / math.sqrt(40) + 1e-9 * exact


def test_the_convention_says_whether_it_is_the_trace_of_the_hessian():
    straight, curved = (minibatch_metric(problem(name).risk()) for name in ("mlp_relu", "mlp_mse"))
    assert "Tr H = Tr GGN, one backward pass with random signs, 11 of the samples" in straight.convention
    assert "Tr GGN, not Tr H (aten::tanh is not piecewise linear" in curved.convention


def test_the_same_seed_gives_the_same_number_and_pieces_do_not_matter(solution, tmp_path):
    risk, _ = solution
    X, y = next(iter(risk.batches)).data
    one = minibatch_metric(risk.on((X, y)), 32, 5)
    model = risk.model
    cut = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), plan=ritz.Plan(micro_batch=7))
    assert minibatch_metric(risk.on((X, y)), 32, 5) == one == ritz.load(one.save(tmp_path / "a"))
    assert minibatch_metric(cut, 32, 5).value == pytest.approx(one.value, rel=1e-12)


def test_it_is_the_same_in_inference_mode():
    risk = problem("mlp_relu").risk()
    with torch.inference_mode():
        inside = minibatch_metric(risk)
    assert inside == minibatch_metric(risk)


def test_what_has_no_curvature_per_sample_is_refused():
    with pytest.raises(UnsupportedError, match="with batch statistics or dropout a single sample has no curvature"):
        minibatch_metric(problem("residual_train").risk())
    X = torch.ones(4, 2)
    model = nn.Linear(2, 1)
    opaque = ritz.Risk(model, data=[(X, X)], batch_loss=lambda model, batch: (model(batch[0]).square().sum(), 4))
    with pytest.raises(UnsupportedError, match="batch_loss"):
        minibatch_metric(opaque)


@pytest.mark.parametrize("size", [0, 1])
def test_fewer_than_two_samples_have_no_error_bar(size):
    with pytest.raises(ValueError, match=f"needs at least 2 samples, got batch_size={size}"):
        minibatch_metric(problem("mlp_relu").risk(), size)


def test_an_unknown_convention_is_refused_before_any_work():
    with pytest.raises(ValueError, match="convention must be 'table' or 'eq7', got 'eq8'"):
        minibatch_metric(problem("mlp_relu").risk(), convention="eq8")
