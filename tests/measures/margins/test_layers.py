"""Layer margins against distances that are known, against gradients taken sample by sample, and under rescalings."""

import itertools
import math

import cases
import pytest
import torch
from cases import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ritz
from ritz.errors import NonFiniteError, UnsupportedError
from ritz.measures.margins.layers import LayerMargins, layer_margins
from ritz.measures.outputs import sample_outputs

CE = nn.CrossEntropyLoss
P = {"l2": 2.0, "l1": 1.0, "linf": math.inf}
DUAL = {"l2": 2.0, "l1": math.inf, "linf": 1.0}


def data(num=12, *shape, classes=3):
    return seeded(lambda: (torch.randn(num, *(shape or (4,))), torch.randint(classes, (num,))), seed=1)


def relu_net() -> nn.Sequential:
    return seeded(lambda: cases.mlp([4, 6, 5, 3], nn.ReLU))


def conv_net() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(3, 2, 1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    )


# ---------------------------------------------------------------------------------------------- distances


def norms(x: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.linalg.vector_norm(x, P[kind], dim=1)


@pytest.mark.parametrize("norm", ["l2", "l1", "linf"])
def test_for_two_classes_of_an_affine_network_it_is_the_distance_to_the_boundary(norm):
    """The step of that length along the steepest direction of the norm is on the boundary; no shorter step is."""
    model, (X, y) = seeded(lambda: nn.Linear(4, 2)), data(classes=2)
    found = layer_margins(ritz.Risk(model, CE(), (X, y)), norm=norm, normalise=False)
    distance = found.values[0]
    w = (model.weight[0] - model.weight[1]).detach()
    steepest = {"l2": w / w.norm(), "linf": w.sign(), "l1": torch.zeros(4)}[norm]
    if norm == "l1":
        steepest[w.abs().argmax()] = w[w.abs().argmax()].sign()
    towards = torch.where(y == 0, -1.0, 1.0)[:, None] * steepest  # of unit norm
    torch.testing.assert_close(norms(towards, norm), torch.ones(12))
    f = model(X + distance[:, None] * towards)
    torch.testing.assert_close(f[:, 0], f[:, 1], rtol=1e-9, atol=1e-9)
    random = seeded(lambda: torch.randn(500, 4))
    random = random / norms(random, norm)[:, None]
    shorter = X[:, None] + 0.999 * distance.abs()[:, None, None] * random  # (12, 500, 4)
    side = (model(shorter)[..., 0] > model(shorter)[..., 1]) == (model(X)[:, 0] > model(X)[:, 1])[:, None]
    assert side.all()


@pytest.mark.parametrize("norm", ["l2", "l1", "linf"])
@pytest.mark.parametrize("make", [relu_net, conv_net], ids=["linear", "conv"])
def test_margins_are_those_of_gradients_taken_one_by_one(make, norm):
    model = make()
    X, y = data(12, 4) if make is relu_net else data(12, 1, 6, 6)
    found = layer_margins(ritz.Risk(model, CE(), (X, y), batch_size=5), norm=norm, normalise=False)
    places = [i for i, m in enumerate(model) if isinstance(m, nn.Linear | nn.Conv2d)]
    assert found.layers == ("input", *(str(i) for i in places[1:]))
    for n, (x, label) in enumerate(zip(X, y.tolist(), strict=True)):
        for row, place in enumerate(places):
            h = model[:place](x[None]).detach().requires_grad_()
            f = model[place:](h)[0]
            rival = max((j for j in range(3) if j != label), key=f.tolist().__getitem__)
            (slope,) = torch.autograd.grad(f[label] - f[rival], h)
            truth = (f[label] - f[rival]).detach() / torch.linalg.vector_norm(slope.flatten(), DUAL[norm])
            assert float(found.values[row, n]) == pytest.approx(float(truth), rel=1e-9)


def test_the_spread_is_the_root_of_the_total_variation_of_the_layer():
    model, (X, y) = relu_net(), data()
    risk = ritz.Risk(model, CE(weight=torch.tensor([1.0, 2.0, 3.0])), (X, y), batch_size=5)
    plain, found = layer_margins(risk, normalise=False), layer_margins(risk)
    w = torch.tensor([1.0, 2.0, 3.0])[y]
    for row, place in enumerate((0, 2, 4)):
        h = model[:place](X).detach()
        mean = (w[:, None] * h).sum(0) / w.sum()
        truth = ((w * (h - mean).square().sum(1)).sum() / w.sum()).sqrt()
        assert float(found.spread[row]) == pytest.approx(float(truth), rel=1e-10)
    torch.testing.assert_close(found.values, plain.values / found.spread[:, None], rtol=1e-10, atol=0)
    assert plain.spread.tolist() == [1.0, 1.0, 1.0]


def test_a_spread_far_from_zero_keeps_its_digits():
    model, (X, y) = relu_net(), data()
    shifted = layer_margins(ritz.Risk(model, CE(), (X + 1e6, y)))
    assert float(shifted.spread[0]) == pytest.approx(float((X - X.mean(0)).square().sum(1).mean().sqrt()), rel=1e-8)


# -------------------------------------------------------------------------------------------- invariances


def rescaled(model: nn.Sequential, factors: tuple[float, float, float]) -> nn.Sequential:
    """Every layer times its factor, biases by all factors so far."""
    new, so_far = relu_net(), 1.0
    with torch.no_grad():
        for place, factor in zip((0, 2, 4), factors, strict=True):
            so_far *= factor
            new[place].weight.copy_(factor * model[place].weight)
            new[place].bias.copy_(so_far * model[place].bias)
    return new


@settings(max_examples=10)
@given(a=st.floats(0.01, 100), b=st.floats(0.01, 100), norm=st.sampled_from(["l2", "l1", "linf"]))
def test_scaling_a_layer_up_and_the_next_down_changes_nothing(a, b, norm):
    model, batch = relu_net(), data()
    before = layer_margins(ritz.Risk(model, CE(), batch), norm=norm)
    after = layer_margins(ritz.Risk(rescaled(model, (a, b, 1 / (a * b))), CE(), batch), norm=norm)
    torch.testing.assert_close(after.values, before.values, rtol=1e-8, atol=0)


@settings(max_examples=8)
@given(alpha=st.floats(0.01, 100))
def test_scaling_the_outputs_changes_nothing(alpha):
    model, batch = relu_net(), data()
    for layers in ((1.0, 1.0, alpha), (alpha, alpha, alpha)):
        before = layer_margins(ritz.Risk(model, CE(), batch))
        after = layer_margins(ritz.Risk(rescaled(model, layers), CE(), batch))
        torch.testing.assert_close(after.values, before.values, rtol=1e-8, atol=0)


def test_without_the_spread_hidden_margins_move_and_those_of_the_input_stay():
    model, batch = relu_net(), data()
    before, after = (
        layer_margins(ritz.Risk(m, CE(), batch), normalise=False) for m in (model, rescaled(model, (4.0, 0.25, 1.0)))
    )
    torch.testing.assert_close(after.values[0], before.values[0])
    torch.testing.assert_close(after.values[1], 4 * before.values[1])


@pytest.mark.parametrize("sizes", list(itertools.islice(cases.partitions(11), 5)))
def test_the_split_into_batches_makes_no_difference(sizes):
    problem = cases.problem("conv")
    whole, cut = (
        layer_margins(problem.risk(problem.data)),
        layer_margins(problem.risk(cases.split(*problem.data, sizes))),
    )
    torch.testing.assert_close(cut.values, whole.values, rtol=1e-9, atol=0)


# ------------------------------------------------------------------------------------------------ networks


def test_a_skip_connection_belongs_to_the_slope_of_the_layer_before_it():
    """The gradient is that of the tensor, along every way it takes."""

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x):
            h = torch.tanh(self.first(x))
            return self.head(h + torch.tanh(self.inner(h)))

    model, (X, y) = seeded(Skip), data()
    found = layer_margins(ritz.Risk(model, CE(), (X, y)), normalise=False)
    assert found.layers == ("input", "inner", "head")
    h = torch.tanh(model.first(X)).detach().requires_grad_()
    f = model.head(h + torch.tanh(model.inner(h)))
    own = f.gather(1, y[:, None])[:, 0]
    margin = own - f.scatter(1, y[:, None], -math.inf).amax(1)
    (slope,) = torch.autograd.grad(margin.sum(), h)
    torch.testing.assert_close(found.values[1], (margin / slope.norm(dim=1)).detach())


def test_a_layer_called_twice_is_there_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.inner(input=self.inner(self.stem(x).tanh()).tanh()).tanh())

    found = layer_margins(ritz.Risk(seeded(Twice), CE(), data()))
    assert found.layers == ("input", "inner", "inner (call 2)", "head")


def test_an_input_that_is_written_over_is_not_what_the_first_layer_takes():
    layers = seeded(lambda: (nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    X, y = data()
    shifted = nn.Sequential(nn.Threshold(0.5, 0.5, inplace=True), *layers)
    found = layer_margins(ritz.Risk(shifted, CE(), (X.clone(), y)), normalise=False)
    plain = layer_margins(ritz.Risk(nn.Sequential(*layers), CE(), (X.clamp(min=0.5), y)), normalise=False)
    assert found.layers == ("input", "1", "3")
    torch.testing.assert_close(found.values[1:], plain.values)
    assert (found.values[0].abs() >= found.values[1].abs()).all()  # no slope where the threshold cuts off


def test_a_network_called_by_a_function_of_ones_own_has_margins_at_its_layers():
    model, (X, y) = relu_net(), data()
    batches = [{"x": X, "labels": y}]
    own = ritz.Risk(model, CE(), batches, forward=lambda model, batch: model[2:](model[:2](batch["x"])))
    found, usual = layer_margins(own), layer_margins(ritz.Risk(model, CE(), (X, y)))
    assert found.layers == ("0", "2", "4")  # the root was never called
    torch.testing.assert_close(found.values, usual.values)


def test_tokens_with_one_label_have_margins_inside_whichever_parameters_are_chosen():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(5, 3)
            self.inner, self.beside = nn.Linear(4, 5), nn.Linear(4, 5)  # of one tensor, which has one slope

        def forward(self, tokens):
            h = self.table(tokens)
            return self.head((self.inner(h).tanh() + self.beside(h).relu()).mean(1))

    tokens = seeded(lambda: torch.randint(7, (12, 6)))
    model = seeded(Bag)
    every, some = (
        layer_margins(ritz.Risk(model, CE(), (tokens, data()[1]), params=params)) for params in ("*", "head.*")
    )
    assert every.layers == some.layers == ("inner", "beside", "head")
    assert every.values.isfinite().all()
    torch.testing.assert_close(some.values, every.values)
    torch.testing.assert_close(every.values[0], every.values[1])


@pytest.mark.parametrize("name", ["residual", "attention", "frozen", "unused"])
def test_other_networks_have_margins_with_the_sign_of_their_predictions(name):
    problem = cases.problem(name)
    found, plain = layer_margins(problem.risk()), sample_outputs(problem.risk())
    assert found.layers[0] == "input"
    assert (found.values.sign() == plain.margin.sign()).all()
    assert (found.correct == plain.correct).all()


def test_a_binary_network_with_one_logit_has_margins():
    X, y = data(classes=2)
    model = seeded(lambda: nn.Linear(4, 1))
    found = layer_margins(ritz.Risk(model, nn.BCEWithLogitsLoss(), (X, y[:, None].double())), normalise=False)
    f = model(X)[:, 0].detach()
    truth = torch.where(y == 1, f, -f) / model.weight.norm()
    torch.testing.assert_close(found.values[0], truth.detach())


def test_float32_networks_have_float64_margins_close_by():
    X, y = data()
    double = layer_margins(ritz.Risk(relu_net(), CE(), (X, y)))
    single = layer_margins(ritz.Risk(relu_net().float(), CE(), (X.float(), y)))
    assert single.values.dtype == torch.float64
    torch.testing.assert_close(single.values, double.values, rtol=1e-3, atol=1e-4)


def test_ignored_samples_are_left_out():
    X, y = data()
    y[3] = -100
    found = layer_margins(ritz.Risk(relu_net(), CE(), (X, y)))
    assert found.values.shape == (3, 11)


# ------------------------------------------------------------------------------------------------- results


def test_the_estimate_is_the_mean_of_the_medians(tmp_path):
    found = layer_margins(ritz.Risk(relu_net(), CE(), data()))
    median = found.median
    medians = [float(row.quantile(0.5)) for row in found.values]
    assert [part.value for part in median.parts.values()] == pytest.approx(medians, rel=1e-12)
    assert median.value == pytest.approx(sum(medians) / 3, rel=1e-12)
    assert median.exact
    assert "l2 distance, over sqrt(total variation of h)" in median.convention
    assert found.distribution("2").quantiles[0.5] == pytest.approx(medians[1])
    assert ritz.load(found.save(tmp_path / "layers")) == found
    assert isinstance(found, LayerMargins)


def test_layers_can_be_chosen():
    risk = ritz.Risk(relu_net(), CE(), data())
    assert layer_margins(risk, layers="input").layers == ("input",)
    assert layer_margins(risk, layers=["0", "4"]).layers == ("0", "4")
    torch.testing.assert_close(layer_margins(risk, layers="0").values, layer_margins(risk, layers="input").values)
    with pytest.raises(ValueError, match="no layer matches 'head'; there are input, 0, 2, 4"):
        layer_margins(risk, layers="head")
    with pytest.raises(ValueError, match="no layer is named '9'"):
        layer_margins(risk).distribution("9")


def test_layers_draw_themselves():
    ax = layer_margins(ritz.Risk(relu_net(), CE(), data())).plot()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["input", "2", "4"]
    assert ax.get_ylabel() == "normalised margin"


def test_progress_is_told_of_both_walks():
    seen = []
    layer_margins(
        ritz.Risk(relu_net(), CE(), data(), batch_size=5), progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == [1, 2, 3, 1, 2, 3]


# ----------------------------------------------------------------------------------------------- bad input


def test_dead_units_have_infinite_margins_and_no_median():
    model = relu_net()
    with torch.no_grad():
        model[2].bias.fill_(-1e6)
        model[4].bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    X, y = data()
    found = layer_margins(ritz.Risk(model, CE(), (X, y)), layers=["input", "2"])
    assert (found.values[:, y == 0] == math.inf).all()
    assert (found.values[:, y != 0] == -math.inf).all()
    with pytest.raises(UnsupportedError, match="most items have an infinite margin at input"):
        _ = found.median
    assert len(found.plot().lines) == 1  # the zero line: nothing else to draw
    with pytest.raises(UnsupportedError, match="4 is the same for every item"):
        layer_margins(ritz.Risk(model, CE(), (X, y)))


def test_an_item_on_the_boundary_has_margin_zero():
    model, (X, y) = relu_net(), data()
    with torch.no_grad():
        model[4].weight.zero_()
        model[4].bias.zero_()
    found = layer_margins(ritz.Risk(model, CE(), (X, y)))
    assert (found.values == 0).all()


def test_what_has_no_margin_of_its_own_is_refused():
    with pytest.raises(UnsupportedError, match=r"BatchNorm in train mode.*mode='eval'"):
        layer_margins(cases.problem("residual_train").risk())
    for name in ("language", "pixels"):
        with pytest.raises(UnsupportedError, match="give one label per sample"):
            layer_margins(cases.problem(name).risk())
    for name in ("mlp_mse", "mlp_soft", "mlp_custom"):
        with pytest.raises(UnsupportedError, match="labels of two classes or more"):
            layer_margins(cases.problem(name).risk())
    one = ritz.Risk(nn.Linear(4, 1), CE(), (data()[0], torch.zeros(12, dtype=torch.long)))
    with pytest.raises(UnsupportedError, match="labels of two classes or more"):
        layer_margins(one)
    with pytest.raises(ValueError, match="norm must be 'l2', 'l1' or 'linf', got 'l0'"):
        layer_margins(one, norm="l0")
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Linear"):
        layer_margins(nn.Linear(2, 2))


def test_an_infinite_margin_is_named():
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).index_fill(1, torch.tensor([1, 2]), -math.inf)

    X, _ = data()
    with pytest.raises(NonFiniteError, match="the margin of item 0 is infinite"):
        layer_margins(ritz.Risk(Masked(4, 3), CE(), (X, torch.zeros(12, dtype=torch.long))))


def test_layers_that_mix_the_samples_of_a_batch_are_refused():
    class First(nn.Module):
        """Time before samples inside."""

        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.inner(2 * x.transpose(0, 1)).mean(0))

    x, y = seeded(lambda: torch.randn(12, 6, 4)), data()[1]
    risk = ritz.Risk(seeded(First), CE(), (x, y))
    with pytest.raises(
        UnsupportedError, match=r"the input \(6, 12, 4\) of inner .*12 samples.*leave it out with layers="
    ):
        layer_margins(risk)
    assert layer_margins(risk, layers=["input", "head"]).layers == ("input", "head")


def test_layers_whose_sizes_change_from_batch_to_batch_are_refused():
    class Pooled(nn.Sequential):
        def forward(self, x):
            return super().forward(x.mean(1))

    x, y = seeded(lambda: torch.randn(12, 6, 4)), data()[1]
    risk = ritz.Risk(seeded(lambda: Pooled(nn.Linear(4, 3))), CE(), [(x[:6], y[:6]), (x[6:, :5], y[6:])])
    with pytest.raises(UnsupportedError, match="differ from batch to batch"):
        layer_margins(risk)
    assert layer_margins(risk, layers="0").layers == ("0",)


def test_the_model_is_left_as_it_was():
    class Fuse(nn.Module):
        on = False

        def forward(self, x):
            if self.on:
                raise RuntimeError("blown")
            return x

    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), Fuse(), nn.Linear(5, 3))
    model(data()[0]).sum().backward()
    model[0].register_forward_pre_hook(lambda module, args: None)

    def state():
        hooks = [list(h) for m in model.modules() for k, h in vars(m).items() if k.endswith("hooks")]
        tensors = [(t._version, t.requires_grad, t.tolist()) for t in model.state_dict(keep_vars=True).values()]
        grads = [p.grad.tolist() for p in model.parameters()]
        return hooks, tensors, grads, [m.training for m in model.modules()], torch.get_rng_state().tolist()

    before = state()
    risk = ritz.Risk(model, CE(), data())
    layer_margins(risk)
    risk.check()
    model[3].on = True
    with pytest.raises(RuntimeError, match="blown"):
        layer_margins(risk)
    assert state() == before
