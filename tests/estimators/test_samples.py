"""Per-sample traces against dense Hessians, one sample at a time."""

import gzip
import math
import time
from functools import partial

import cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sample_truth import (
    CE,
    CURVED,
    Outside,
    Residual,
    Rows,
    Stubborn,
    TimeFirst,
    Tokens,
    Twice,
    data,
    labels,
    mlp,
    randomised,
    seeded,
    true_hessians,
    true_traces,
)  # fmt: skip
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ritz.errors import NonFiniteError, UnsupportedError
from ritz.estimators import samples as module_under_test
from ritz.estimators.exact import exact_cost, exact_trace
from ritz.estimators.passes import fitting_pieces
from ritz.estimators.samples import sample_traces
from ritz.estimators.trace import trace
from ritz.losses import CrossEntropy
from ritz.operators import GGN, Hessian, footprint
from ritz.plan import Plan
from ritz.risk import Risk
from ritz.storage import load

torch.set_default_dtype(torch.float64)

PLAIN = {
    "MLP": (mlp(4, 5, 3), data(7, 4)),
    "MLP without biases": (nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)), data(7, 4)),
    "conv and max-pool": (
        nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 3, 2), nn.ReLU(inplace=True),
            nn.Flatten(), nn.Linear(3, 3),
        ),
        data(6, 1, 4, 4),
    ),
    "residual with BatchNorm": (Residual(), data(5, 2, 3, 3)),
    "grouped, dilated, strided": (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=2, groups=2), nn.ReLU(), nn.Conv2d(4, 4, 2, dilation=2, groups=4),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        ),
        data(5, 2, 6, 6),
    ),
    "one sample": (mlp(4, 5, 3), data(1, 4)),
    "parameters outside of layers": (Outside(), data(7, 4)),
    "a layer called twice": (Twice(), data(7, 4)),
    "time before samples": (TimeFirst(), data(7, 4)),
    "as many steps as samples": (TimeFirst(steps=3), data(3, 6)),
    "tokens as rows": (Rows(), data(7, 4)),
    "not to be vectorised": (Stubborn(), data(5, 4)),
    "layers without a rule": (
        nn.Sequential(nn.Unflatten(1, (4, 1)), nn.ConvTranspose1d(4, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)),
        data(6, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_exact_traces_are_those_of_dense_hessians(name):
    model, X = PLAIN[name]
    y = labels(len(X))
    found = sample_traces(Risk(randomised(model), CE, (X, y), batch_size=3), method="exact")
    assert found.exact
    assert found.value.shape == (len(X),)
    assert found.value.dtype == torch.float64
    assert not found.stderr.any()
    wanted = true_traces(model, CE, X, y)
    assert wanted.abs().min() > 1e-6
    torch.testing.assert_close(found.value, wanted, rtol=1e-9, atol=1e-12)


LOSSES = {
    "class weights": (nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.0])), labels(6)),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.3), labels(6)),
    "both": (nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.0]), label_smoothing=0.3), labels(6)),
    "soft targets": (CE, data(6, 3).softmax(-1)),
    "squared error": (nn.MSELoss(), data(6, 3)),
    "binary cross-entropy": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), (data(6, 3) > 0).double()),
    "a convex callable": (lambda out, y: (out - y).pow(4).sum(-1).mean(), data(6, 3)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_exact_traces(name):
    loss, y = LOSSES[name]
    model, X = randomised(mlp(4, 5, 3)), data(6, 4)
    risk = Risk(model, loss, (X, y), batch_size=4)
    found = sample_traces(risk)
    assert found.exact
    torch.testing.assert_close(found.value, true_traces(model, loss, X, y), rtol=1e-9, atol=1e-12)


def test_one_class_has_no_curvature():
    risk = Risk(randomised(mlp(4, 5, 1)), CE, (data(3, 4), torch.zeros(3, dtype=torch.long)))
    assert sample_traces(risk).value.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("weight", "smoothing"),
    [(None, 0.0), (torch.tensor([0.5, 2.0, 1.0]), 0.0), (torch.tensor([0.5, 0.0, 4.0]), 0.5)],
)
@pytest.mark.parametrize("method", ["exact", "probes"])
def test_a_sample_of_tokens_is_the_mean_over_those_that_are_not_masked(method, weight, smoothing):
    """As torch has it: smoothing gives a token of weight 0 a loss, which is part of the sum."""
    model, X, y = randomised(Tokens()), torch.randint(0, 5, (4, 5), generator=seeded(3)), labels(4, 5)
    y[0, 2:], y[1, 0] = -100, -100
    loss = CrossEntropy(weight, label_smoothing=smoothing, class_dim=-1)
    found = sample_traces(Risk(model, loss, (X, y), batch_size=3), method=method, num_probes=400)

    def mean(out, target):
        return F.cross_entropy(out.flatten(0, 1), target.flatten(), weight, label_smoothing=smoothing)

    wanted = true_traces(model, mean, X, y)
    if method == "exact":
        torch.testing.assert_close(found.value, wanted, rtol=1e-9, atol=1e-12)
    else:
        assert ((found.value - wanted).abs() < 4.5 * found.stderr).all()


@pytest.mark.parametrize("method", ["exact", "probes"])
def test_a_sample_without_weight_has_trace_zero_and_this_is_said(method):
    model, X, y = randomised(Tokens()), torch.randint(0, 5, (3, 4), generator=seeded(3)), labels(3, 4)
    y[1] = -100
    found = sample_traces(Risk(model, CrossEntropy(class_dim=-1), (X, y)), method=method)
    assert found.value[1] == 0
    assert found.value[0] > 0
    assert "1 samples have weight 0 and get trace 0" in found.convention


@pytest.mark.parametrize("loss", [CE, nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.0]))])
def test_the_weighted_mean_is_the_trace_of_the_hessian(loss):
    X, y = data(7, 4), labels(7)
    risk = Risk(randomised(mlp(4, 5, 3)), loss, (X, y), batch_size=3)
    weight = torch.ones(7) if loss.weight is None else loss.weight[y]
    mean = (weight * sample_traces(risk).value).sum() / weight.sum()
    torch.testing.assert_close(mean, Hessian(risk).dense().trace(), rtol=1e-9, atol=0)


def test_frozen_and_tied_parameters():
    model, X, y = randomised(mlp(4, 4, 4, 3)), data(5, 4), labels(5)
    model[2].weight = model[0].weight
    with pytest.raises(UnsupportedError, match=r"both depend on 0\.weight"):
        sample_traces(Risk(model, CE, (X, y)), method="exact")
    ggn = exact_trace(GGN(Risk(model, CE, (X, y), batch_size=2)))
    assert ggn[0] == pytest.approx(float(GGN(Risk(model, CE, (X, y))).dense().trace()), rel=1e-9)
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    found = sample_traces(Risk(model, CE, (X, y)), method="exact")
    torch.testing.assert_close(found.value, true_traces(model, CE, X, y), rtol=1e-9, atol=1e-12)


def test_the_order_is_that_of_the_data_for_any_batches():
    X, y = data(9, 4), labels(9)
    model = randomised(mlp(4, 5, 3))
    whole = sample_traces(Risk(model, CE, (X, y)))
    ragged = [(X[:4], y[:4]), (X[4:5], y[4:5]), (X[5:], y[5:])]
    loader = DataLoader(TensorDataset(X, y), batch_size=4)
    for parts in (Risk(model, CE, ragged), Risk(model, CE, loader), Risk(model, CE, (X, y), plan=Plan(micro_batch=2))):
        torch.testing.assert_close(sample_traces(parts).value, whole.value)


def test_the_layer_rules_are_used_where_they_apply_and_only_there():
    for name, by_layer in {"conv and max-pool": True, "tokens as rows": True, "residual with BatchNorm": True,
                           "a layer called twice": False, "time before samples": False,
                           "as many steps as samples": False, "layers without a rule": False}.items():  # fmt: skip
        model, X = PLAIN[name]
        risk = Risk(randomised(model), CE, (X, labels(len(X))), batch_size=3)
        squares = module_under_test.SquaredNorms(risk)
        with risk.session():
            batch = next(iter(risk.batches))
            roots = partial(risk.output_loss.roots, batch=batch.data, chunk=8)
            squares(risk.params(), batch, roots)
        assert squares.by_layer == by_layer, name


class Sorts(nn.Module):
    """Samples go through the layers in the order of their first entry, as recurrent networks want the longest first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.last(torch.relu(self.first(x[order])))[order.argsort()]


class SortsByMatrix(Sorts):
    """The same by a permutation matrix: no operation of it picks rows."""

    def forward(self, x):
        order = torch.eye(len(x)).to(x)[x[:, 0].argsort()]
        return order.T @ self.last(torch.relu(self.first(order @ x)))


class Turns(Sorts):
    """The same by turning the batch round, or not."""

    def forward(self, x):
        turned = x.flip(0) if x[0, 0] > x[-1, 0] else x
        out = self.last(torch.relu(self.first(turned)))
        return out if turned is x else out.flip(0)


@pytest.mark.parametrize("sorting", [Sorts, SortsByMatrix, Turns])
@pytest.mark.parametrize("size", [2, 3, 4, 6, 12])
def test_samples_that_a_model_sorts_keep_their_own_traces(size, sorting):
    """Also where few samples have few orders, and where those of the first batch are in order already."""
    model, X, y = randomised(sorting()), data(24, 4), labels(24)
    X[:size] = X[X[:size, 0].argsort()]
    for replay in (None, True):
        risk = Risk(model, CE, (X, y), batch_size=size, plan=Plan(replay=replay))
        found = sample_traces(risk, method="exact").value
        torch.testing.assert_close(found, true_traces(model, CE, X, y), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("largest", [1, 2_000, 1 << 24])
def test_a_cpu_takes_a_batch_in_pieces_whose_gradients_are_small(monkeypatch, largest):
    """2 x 4 x 4 numbers of 8 bytes after the first convolution, 3 cotangents: 768 bytes a sample."""
    model, X = PLAIN["conv and max-pool"]
    risk = Risk(randomised(model), CE, (X, labels(len(X))))
    monkeypatch.setattr(footprint, "LARGEST", largest)
    monkeypatch.setattr(footprint, "WORTH", 0)
    with risk.session():
        batch = next(iter(risk.batches))
        sizes = [piece.size for piece in fitting_pieces(risk, risk.params(), batch, 3)]
    assert sizes == {1: [1] * 6, 2_000: [2] * 3, 1 << 24: [6]}[largest]
    found = sample_traces(risk, method="exact").value
    torch.testing.assert_close(found, true_traces(model, CE, X, labels(len(X))), rtol=1e-9, atol=1e-12)
    assert exact_trace(Hessian(risk))[0] == pytest.approx(float(found.mean()), rel=1e-9)


def test_what_cannot_be_cut_or_has_pieces_of_its_own_stays_whole():
    X, y = data(6, 4), labels(6)
    for options in ({"dropout": True}, {"plan": Plan(micro_batch=2)}):
        risk = Risk(mlp(4, 5, 3), CE, (X, y), **options)
        with risk.session():
            batch = next(iter(risk.batches))
            assert fitting_pieces(risk, risk.params(), batch, 1 << 24) == [batch]


def test_dropout_masks_are_part_of_the_function():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3), nn.PReLU(), nn.Linear(3, 3))
    risk = Risk(randomised(model), CE, (data(4, 4), labels(4)), dropout=True)
    found = sample_traces(risk)
    assert found.exact
    assert float(found.value.mean()) == pytest.approx(float(Hessian(risk).dense().trace()), rel=1e-9)
    by_probes = sample_traces(risk, method="probes", num_probes=300)
    assert ((by_probes.value - found.value).abs() < 4.5 * by_probes.stderr).all()


# ------------------------------------------------------------------------------------------------ probes


@pytest.mark.parametrize("name", CURVED)
def test_probes_are_right_within_their_errors(name):
    model, X, y = randomised(CURVED[name]), data(6, 4), labels(6)
    found = sample_traces(Risk(model, CE, (X, y), batch_size=4), num_probes=200, seed=1)
    assert not found.exact
    assert found.stderr.shape == (6,)
    assert found.samples.shape == (200, 6)
    apart = (found.value - true_traces(model, CE, X, y)).abs()
    assert (apart < 4 * found.stderr).all()


@pytest.mark.parametrize("name", CURVED)
def test_every_single_probe_is_a_quadratic_form_of_the_sample_hessian(name):
    model, X, y = randomised(CURVED[name]), data(3, 4), labels(3)
    risk = Risk(model, CE, (X, y))
    found = sample_traces(risk, method="probes", num_probes=3, seed=7)
    hessians = true_hessians(model, CE, X, y)
    for k, v in enumerate(risk.space.probes(range(3), 7, dtype=torch.float64)):
        torch.testing.assert_close(found.samples[k], torch.stack([v @ H @ v for H in hessians]), rtol=1e-8, atol=1e-8)


def test_forward_mode_is_left_where_it_disagrees_with_reverse_mode(monkeypatch):
    risk = Risk(randomised(CURVED["tanh"]), CE, (data(5, 4), labels(5)))
    right = sample_traces(risk, num_probes=4)
    assert "forward route" in right.convention
    products = module_under_test.SampleProducts
    forward = products._forward
    monkeypatch.setattr(products, "_forward", lambda *args: 1.01 * forward(*args))
    slow = sample_traces(risk, num_probes=4)
    assert "reverse route" in slow.convention
    torch.testing.assert_close(slow.samples, right.samples)


def test_an_operation_without_forward_mode_is_taken_in_reverse():
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(data(3, 4, seed=9))

        def forward(self, x):
            return -CubedWithoutTangent.apply(x @ self.centres.T)

    model, X, y = Distances(), data(4, 4), labels(4)
    found = sample_traces(Risk(model, CE, (X, y)), num_probes=300)
    assert "reverse route" in found.convention
    assert ((found.value - true_traces(model, CE, X, y)).abs() < 4.5 * found.stderr).all()


class Cubed(nn.Module):
    """A cube between two layers, and a factor that is a constant where it is known without gradients."""

    def __init__(self, cube, scaled=False):
        super().__init__()
        self.inner, self.outer, self.cube, self.scaled = nn.Linear(4, 3), nn.Linear(3, 3), cube, scaled

    def forward(self, x):
        with torch.no_grad():
            factor = self.inner(x).abs().amax(1, keepdim=True) if self.scaled else 1.0
        return self.outer(self.cube.apply(self.inner(x) / factor))


def test_a_lone_route_that_forgets_a_term_is_refused():
    class Forgetful(CubedWithoutTangent):
        """Its backward pass does not say where it comes from."""

        @staticmethod
        def backward(ctx, grad):
            return 3 * ctx.saved_tensors[0].detach() ** 2 * grad

    with pytest.raises(UnsupportedError, match=r"by the reverse route.* are wrong: they disagree with differences"):
        sample_traces(Risk(randomised(Cubed(Forgetful)), CE, (data(4, 4), labels(4))), method="probes")


def test_a_lone_route_is_not_refused_for_what_runs_without_gradients():
    """Which differences see; true Hessians by two backward passes do not."""
    model, X, y = randomised(Cubed(CubedWithoutTangent, scaled=True)), data(4, 4), labels(4)
    found = sample_traces(Risk(model, CE, (X, y)), method="probes", num_probes=300)
    params = list(model.parameters())
    wanted = [cases.hessian_of(CE(model(X[i : i + 1]), y[i : i + 1]), params).trace() for i in range(4)]
    assert ((found.value - torch.stack(wanted)).abs() < 4.5 * found.stderr).all()


@pytest.mark.parametrize("dim", [0, 1, None])
def test_probes_of_normalised_weights_are_right_within_their_errors(dim):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3), dim=dim)
    model, X, y = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3)), data(4, 4), labels(4)
    risk = Risk(randomised(model), CE, (X, y), plan=Plan(chunk=32))
    found = sample_traces(risk, method="probes", num_probes=300)
    wanted = [
        Hessian(Risk(model, CE, (X[i : i + 1], y[i : i + 1])), route="difference").dense().trace() for i in range(4)
    ]
    assert ((found.value - torch.stack(wanted)).abs() < 4.5 * found.stderr).all()


class CubedWithoutTangent(torch.autograd.Function):
    """x^3 with a backward pass only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


@pytest.mark.parametrize("num_probes", [8, 30])
def test_intervals_cover_the_dense_value_as_often_as_they_say(num_probes):
    model, X, y = randomised(mlp(4, 6, 3, activation=nn.Tanh)), data(10, 4), labels(10)
    risk, wanted = Risk(model, CE, (X, y), plan=Plan(chunk=32)), true_traces(model, CE, X, y)
    hits = []
    for seed in range(100):
        low, high = sample_traces(risk, method="probes", num_probes=num_probes, seed=seed).interval(0.95)
        hits.append(((low <= wanted) & (wanted <= high)).double())
    assert 0.91 <= float(torch.stack(hits).mean()) <= 0.99


def test_probes_are_the_same_for_any_batches_and_belong_to_the_seed():
    X, y = data(9, 4), labels(9)
    model = randomised(mlp(4, 5, 3, activation=nn.Tanh))
    whole = sample_traces(Risk(model, CE, (X, y)), num_probes=10, seed=3)
    cut = sample_traces(Risk(model, CE, (X, y), batch_size=4, plan=Plan(chunk=3)), num_probes=10, seed=3)
    torch.testing.assert_close(cut.value, whole.value)
    other = sample_traces(Risk(model, CE, (X, y)), num_probes=10, seed=4)
    assert not torch.allclose(other.value, whole.value, rtol=1e-3)


def test_one_probe_has_no_error_bar():
    found = sample_traces(Risk(randomised(mlp(4, 5, 3)), CE, (data(3, 4), labels(3))), method="probes", num_probes=1)
    assert found.stderr.isnan().all()


def test_auto_compares_the_cost():
    model, X = randomised(mlp(4, 5, 9)), data(3, 4)
    risk = Risk(model, CE, (X, labels(3)))
    assert sample_traces(risk, num_probes=3).exact  # 9 backward passes against 3 probes
    assert not sample_traces(risk, num_probes=2).exact
    assert sample_traces(risk, num_probes=2, method="exact").products == 9


# ---------------------------------------------------------------------------------------------- refusals


def test_what_has_no_sample_traces_is_refused():
    X, y = data(6, 4), labels(6)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(UnsupportedError, match="BatchNorm in train mode couples"):
        sample_traces(Risk(model, CE, (X, y), mode="train"))
    with pytest.raises(UnsupportedError, match="batch_loss="):
        sample_traces(Risk(model, data=[(X, y)], batch_loss=lambda m, b: (m(b[0]).sum(), 6)))
    loader = DataLoader(TensorDataset(X, y), batch_size=2, shuffle=True)
    with pytest.raises(UnsupportedError, match=r"data=list\(loader\)"):
        sample_traces(Risk(model, CE, loader))
    assert sample_traces(Risk(model, CE, list(loader))).exact
    with pytest.raises(UnsupportedError, match="aten::tanh is not piecewise linear"):
        sample_traces(Risk(CURVED["tanh"], CE, (X, y)), method="exact")
    flat = Risk(Tokens(), CE, (torch.zeros(2, 3, dtype=torch.long), labels(2, 3)),
                forward=lambda m, b: m(b[0]).flatten(0, 1), target=lambda b: b[1].flatten())  # fmt: skip
    for method in ("auto", "exact", "probes"):
        with pytest.raises(UnsupportedError, match=r"outputs \(\d, 3\) for \d samples"):
            sample_traces(flat, method=method)


def test_bad_arguments_are_refused():
    risk = Risk(mlp(4, 3), CE, (data(3, 4), labels(3)))
    with pytest.raises(ValueError, match="method must be one of auto, exact, probes, got 'dense'"):
        sample_traces(risk, method="dense")
    with pytest.raises(ValueError, match="num_probes must be at least 1, got 0"):
        sample_traces(risk, num_probes=0)


def test_a_loss_that_is_not_convex_is_left_to_probes():
    X, y = data(4, 4), data(4, 3)
    model = randomised(mlp(4, 5, 3))
    risk = Risk(model, lambda out, y: (out - y).sin().sum(-1).mean(), (X, y))
    found = sample_traces(risk)
    assert not found.exact
    with pytest.raises(UnsupportedError, match="not convex"):
        sample_traces(risk, method="exact")


def test_a_loss_that_is_convex_for_the_first_samples_alone_is_left_to_probes():
    """log(1 + r^2) is convex up to r = 1: what it is for the rest is asked before any work."""
    X, y = data(6, 4), torch.zeros(6, 1)
    model = nn.Linear(4, 1)
    y[:] = model(X).detach()
    y[4:] += 5
    risk = Risk(model, lambda out, y: (out - y).square().log1p().mean(), (X, y), batch_size=2)
    found = sample_traces(risk, num_probes=1)
    assert not found.exact
    assert (found.value[4:] < 0).all()
    for A in (Hessian(risk), GGN(risk)):
        assert exact_cost(A) is None
        assert not trace(A, num_probes=4).exact
    with pytest.raises(UnsupportedError, match="not convex"):
        sample_traces(risk, method="exact")


def test_a_trace_that_is_not_finite_is_said():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 3))

        def forward(self, x):
            return (x @ self.w).abs().sqrt()

    with pytest.raises(NonFiniteError, match="trace of sample 0 is not finite"):
        sample_traces(Risk(Root(), CE, (data(3, 2), labels(3))))


def test_the_model_is_as_before_also_when_the_call_fails():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.left = nn.Linear(4, 3), 10**6

        def forward(self, x):
            self.left -= 1
            out = self.layer(x)
            if not self.left:
                raise RuntimeError("half-way")
            return out

    for method in ("exact", "probes"):
        model = Fails().train()
        rng = torch.get_rng_state()
        before = {name: p.clone() for name, p in model.named_parameters()}
        risk = Risk(model, CE, (data(12, 4), labels(12)), batch_size=1)
        risk.check()
        model.left = 9  # in the middle of the walk over the data
        with pytest.raises(RuntimeError, match="half-way"):
            sample_traces(risk, method=method)
        assert model.training
        assert not any(module._forward_hooks for module in model.modules())
        assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert torch.equal(torch.get_rng_state(), rng)


def test_progress_and_storage(tmp_path):
    seen = []
    risk = Risk(randomised(mlp(4, 5, 3)), CE, (data(6, 4), labels(6)), batch_size=2)
    found = sample_traces(risk, method="probes", num_probes=3, progress=lambda done, of: seen.append(done))
    assert seen == [1, 2, 3]
    assert load(found.save(tmp_path / "traces")) == found


def test_single_precision_is_right_to_its_digits():
    X, y = data(20, 1, 8, 8), labels(20)
    model = randomised(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)))
    wanted = sample_traces(Risk(model, CE, (X, y)))
    found = sample_traces(Risk(model, CE, (X, y), dtype=torch.float32))
    assert found.value.dtype == torch.float64
    assert "float32" in found.convention
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-4, atol=1e-6)
    assert math.isfinite(float(found.value.sum()))


def mnist(root, kind, skip):
    return np.frombuffer(gzip.open(root / "MNIST" / "raw" / f"train-{kind}-ubyte.gz").read(), np.uint8)[skip:].copy()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_of_mnist_through_lenet_takes_less_than_90_seconds(data_root):
    X = torch.from_numpy(mnist(data_root, "images-idx3", 16)).reshape(-1, 1, 28, 28).float() / 255
    y = torch.from_numpy(mnist(data_root, "labels-idx1", 8)).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip
    risk = Risk(model, CE, (X, y), dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        start = time.perf_counter()
        found = sample_traces(risk)
        seconds = time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)
    assert found.value.shape == (60_000,)
    assert found.exact
    assert seconds < 90
