"""A risk is the mean over samples, however the data is cut, and a function of the chosen weights alone."""

import copy
import itertools
import logging
import math

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import Calls, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset

import ritz
from ritz.errors import NonFiniteError, UnsupportedError, WeightsMovedError
from ritz.operators import Metered
from ritz.reducers import Concat, Mean, Moments

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def network(*layers, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(make() for make in layers))


def small():
    return network(lambda: nn.Linear(4, 5), nn.Tanh, lambda: nn.Linear(5, 3))


X = draw(9, 4)
Y = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1])
DATA = (X, Y)


def gradient_of(value, params):
    return cases.rows_of(value, list(params))[0]


def hessian_of(model, value):
    return cases.hessian_of(value, [p for p in model.parameters() if p.requires_grad])


# ------------------------------------------------------------------------------------- any split is the same


@settings(max_examples=12)
@given(name=st.sampled_from(["mlp_weighted", "mlp_mse", "pixels", "language", "residual"]), data=st.data())
def test_any_split_gives_the_same_loss_gradient_and_products(name, data):
    """Class weights, ignored pixels and padded tokens included: a batch may even have nothing but padding."""
    problem = cases.problem(name)
    x, y = problem.data
    cuts = sorted(data.draw(st.sets(st.integers(1, len(x) - 1))))
    ends = [0, *cuts, len(x)]
    risk = problem.risk([(x[a:b], y[a:b]) for a, b in itertools.pairwise(ends)])
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        out = copy.deepcopy(problem.model).eval()(x)
    out = out.movedim(-1, 1) if name == "language" else out
    assert risk.loss() == pytest.approx(float(problem.loss(out, y)), rel=1e-12)
    torch.testing.assert_close(risk.gradient(), cases.dense_gradient(problem), rtol=1e-9, atol=1e-12)
    v = draw(risk.dim, seed=3)
    torch.testing.assert_close(ritz.Hessian(risk) @ v, cases.truth(name, "Hessian") @ v, rtol=1e-8, atol=1e-11)


def test_a_first_batch_of_nothing_but_ignored_targets_weighs_nothing():
    y = Y.clone()
    y[:4] = -100
    model = small()
    risk = ritz.Risk(model, CE, (X, y), batch_size=4)
    assert risk.loss() == pytest.approx(CE(model(X[4:]), y[4:]).item(), rel=1e-12)


def test_the_order_of_the_samples_does_not_matter():
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    risk, other = (ritz.Risk(small(), CE, data, batch_size=4) for data in (DATA, (X[order], Y[order])))
    torch.testing.assert_close(ritz.GGN(other).dense(), ritz.GGN(risk).dense())


def test_pieces_of_a_batch_give_the_same_numbers():
    whole, cut = (ritz.Risk(small(), CE, DATA, plan=ritz.Plan(micro_batch=size)) for size in (None, 2))
    assert cut.loss() == pytest.approx(whole.loss(), rel=1e-13)
    torch.testing.assert_close(cut.gradient(), whole.gradient())
    torch.testing.assert_close(ritz.Hessian(cut).dense(), ritz.Hessian(whole).dense())
    per_sample = whole.fold(items_of(whole), Concat())
    torch.testing.assert_close(cut.fold(items_of(cut), Concat()), per_sample)


def items_of(risk):
    def fn(params, batch):
        items = risk.output_loss.items(risk.output(params, batch), batch.data)
        return items.loss, items.weight.sum()

    return fn


# ------------------------------------------------------------------------------------ forward, target, batch_loss


class Masked(nn.Module):
    """Two inputs, one of them a mask, and an output that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.net = small()

    def forward(self, ids, mask):
        return {"logits": self.net(ids * mask)}


def test_forward_and_target_say_how_a_batch_is_read():
    with torch.random.fork_rng(devices=[]):
        model = Masked()
    mask = (draw(9, 4, seed=2) > 0).double()
    data = [{"ids": X[:4], "mask": mask[:4], "gold": Y[:4]}, {"ids": X[4:], "mask": mask[4:], "gold": Y[4:]}]
    risk = ritz.Risk(model, CE, data, forward=lambda m, b: m(b["ids"], b["mask"])["logits"], target=lambda b: b["gold"])
    truth = CE(model.net(X * mask), Y)
    assert risk.loss() == pytest.approx(truth.item(), rel=1e-12)
    torch.testing.assert_close(ritz.Hessian(risk).dense(), hessian_of(model, truth))


def test_several_inputs_before_the_target_are_passed_on():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()

        def forward(self, a, b):
            return self.net(a + b)

    model = Sum()
    assert ritz.Risk(model, CE, (X, 2 * X, Y)).loss() == pytest.approx(CE(model.net(3 * X), Y).item())


def physics(model, batch):
    """The residual of u' = -u, which needs a derivative in the inputs."""
    t = batch[0].requires_grad_()
    u = model(t)
    (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    return (slope + u).square().sum(), len(t)


def test_a_batch_loss_may_differentiate_in_its_inputs():
    model = network(lambda: nn.Linear(1, 4), nn.Tanh, lambda: nn.Linear(4, 1))
    t = torch.linspace(0, 1, 7)[:, None]
    risk = ritz.Risk(model, data=[(t[:3],), (t[3:],)], batch_loss=physics)
    total, weight = physics(model, (t.clone(),))
    assert risk.loss() == pytest.approx(float(total.detach() / weight), rel=1e-12)
    torch.testing.assert_close(risk.gradient(), gradient_of(total / weight, model.parameters()))
    torch.testing.assert_close(ritz.Hessian(risk).dense(), hessian_of(model, physics(model, (t.clone(),))[0] / weight))
    assert not t.requires_grad
    assert not any(batch.data[0].requires_grad for batch in risk.batches)


def test_a_forward_may_differentiate_in_its_inputs():
    model = network(lambda: nn.Linear(4, 3), nn.Tanh, lambda: nn.Linear(3, 1))

    def force(m, batch):
        x = batch[0].detach().requires_grad_()
        return torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]

    y = draw(9, 4, seed=5)
    risk = ritz.Risk(model, MSE, (X, y), forward=force, batch_size=4)
    truth = MSE(force(model, (X,)), y)
    torch.testing.assert_close(risk.gradient(), gradient_of(truth, model.parameters()))
    torch.testing.assert_close(ritz.Hessian(risk, route="reverse").dense(), hessian_of(model, truth))


def test_a_batch_loss_has_no_outputs_and_says_what_does_not_exist():
    risk = ritz.Risk(small(), data=[(X, Y)], batch_loss=lambda m, b: (F.cross_entropy(m(b[0]), b[1]) * 9, 9))
    assert risk.opaque
    for make in (ritz.GGN, ritz.Fisher, ritz.EmpiricalFisher, ritz.GradientCovariance):
        with pytest.raises(UnsupportedError, match=r"given as batch_loss=.*use ritz\.Hessian"):
            make(risk)


def test_the_weight_of_a_batch_loss_is_not_written_to():
    weight = torch.tensor(3.0)
    risk = ritz.Risk(
        small(), data=[(X[i : i + 3], Y[i : i + 3]) for i in (0, 3, 6)],
        batch_loss=lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="sum"), weight),
    )  # fmt: skip
    risk.loss()
    assert float(weight) == 3.0


# --------------------------------------------------------------------------------------------- parameters


class Odd(nn.Module):
    """A tied weight, a weight that is never used, one that is a single number, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.last = nn.Linear(4, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale)


def odd():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Odd()


@pytest.mark.parametrize("route", ["forward", "reverse"])
def test_frozen_unused_tied_and_scalar_parameters_are_handled(route):
    model = odd()
    risk = ritz.Risk(model, CE, DATA, batch_size=4)
    assert risk.names == ("unused", "scale", "first.weight", "first.bias", "second.bias", "last.weight")
    truth = CE(model(X), Y)
    torch.testing.assert_close(risk.gradient(), gradient_of(truth, [p for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(ritz.Hessian(risk, route=route).dense(), hessian_of(model, truth))


def test_a_module_of_two_names_has_the_right_hessian_and_stays_as_it_is():
    shared = network(lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4), nn.Tanh)
    model = nn.Sequential(shared, shared, nn.Linear(4, 3)).eval()
    held = [*model.parameters(), *model.buffers()]
    found = ritz.Hessian(ritz.Risk(model, CE, DATA, batch_size=4)).dense()
    ritz.optim.TracePenalty(0.1)(model, X)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], held, strict=True))
    torch.testing.assert_close(found, hessian_of(model, CE(model(X), Y)))


def test_globs_choose_parameters_and_restrict_chooses_among_them():
    model = small()
    whole = ritz.Risk(model, CE, DATA)
    part = ritz.Risk(model, CE, DATA, params=["2.*", "*.weight"])
    assert part.names == ("0.weight", "2.weight", "2.bias")
    last = whole.restrict("2.*")
    where = torch.cat([torch.arange(whole.dim)[whole.space.slices[name]] for name in last.names])
    torch.testing.assert_close(ritz.Hessian(last).dense(), ritz.Hessian(whole).dense()[where][:, where])
    assert whole.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    with pytest.raises(ValueError, match="no parameter matches '0"):
        last.restrict("0.*")


def test_a_risk_of_unused_parameters_alone_has_no_gradient():
    assert not ritz.Risk(odd(), CE, DATA, params="unused").gradient().any()


# ---------------------------------------------------------------------------------------- modes


def normed():
    return network(lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5), nn.Tanh, lambda: nn.Linear(5, 3))


@pytest.mark.parametrize("was_training", [True, False])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_mode_is_that_of_the_risk_and_not_of_the_model(mode, was_training):
    model = normed().train(was_training)
    with torch.no_grad():
        model[1].running_mean.normal_(generator=torch.Generator().manual_seed(0))
    buffers = copy.deepcopy(dict(model.named_buffers()))
    risk = ritz.Risk(model, CE, [(X[:5], Y[:5]), (X[5:], Y[5:])], mode=mode)
    H, loss = ritz.Hessian(risk).dense(), risk.loss()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert [m.training for m in model.modules()] == [was_training] * 5
    twin = copy.deepcopy(model).train(mode == "train")
    out = torch.cat([twin(X[:5]), twin(X[5:])])  # the batches are part of the function
    assert loss == pytest.approx(CE(out, Y).item(), rel=1e-12)
    torch.testing.assert_close(H, hessian_of(twin, CE(out, Y)))


def test_with_batch_statistics_tensors_are_one_batch_unless_said():
    model = normed()
    risk = ritz.Risk(model, CE, DATA, mode="train")
    assert risk.loss() == pytest.approx(CE(copy.deepcopy(model).train()(X), Y).item(), rel=1e-12)
    assert ritz.Risk(model, CE, DATA, mode="train", batch_size=5).loss() != pytest.approx(risk.loss(), rel=1e-6)
    pairs = ((X[:5], Y[:5]), (X[5:], Y[5:]))  # a tuple of batches is not tensors
    assert [b.size for b in ritz.Risk(model, CE, pairs, mode="train").batches] == [5, 4]


@pytest.mark.parametrize("keywords", [{"mode": "train"}, {"dropout": True}])
def test_a_batch_that_is_part_of_the_function_is_not_split(keywords):
    assert not ritz.Risk(normed(), CE, DATA, **keywords).splittable
    with pytest.raises(UnsupportedError, match="micro_batch cannot be used here"):
        ritz.Risk(normed(), CE, DATA, plan=ritz.Plan(micro_batch=2), **keywords)


def test_batch_statistics_of_a_shuffling_loader_are_refused():
    loader = DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True)
    with pytest.raises(UnsupportedError, match=r"mode='train' with a shuffling loader.*data=list\(loader\)"):
        ritz.Risk(normed(), CE, loader, mode="train").check()
    ritz.Risk(normed(), CE, list(loader), mode="train").check()


def dropping():
    return network(lambda: nn.Linear(4, 6), nn.Tanh, lambda: nn.Dropout(0.5), lambda: nn.Linear(6, 3))


def test_dropout_is_off_unless_asked_for():
    model = dropping().train()
    assert ritz.Risk(model, CE, DATA).loss() == pytest.approx(CE(model.eval()(X), Y).item(), rel=1e-12)


def test_dropout_that_is_asked_for_has_one_mask_per_batch():
    model = dropping()
    risk = ritz.Risk(model, CE, DATA, batch_size=5, dropout=True)
    twin = copy.deepcopy(model).train()
    with torch.random.fork_rng(devices=[]):
        out = []
        for index, x in enumerate(X.split(5)):
            torch.manual_seed(index)
            out.append(twin(x))
    truth = CE(torch.cat(out), Y)
    assert risk.loss() == pytest.approx(truth.item(), rel=1e-12)
    assert risk.loss() != pytest.approx(ritz.Risk(model, CE, DATA).loss(), rel=1e-3)
    assert "eval mode, dropout of torch's modules on" in risk.convention()
    for route in ("forward", "reverse"):
        H = ritz.Hessian(risk, route=route)
        torch.testing.assert_close(H.dense(), hessian_of(twin, truth))
        assert torch.equal(H @ draw(risk.dim), H @ draw(risk.dim))


@pytest.mark.parametrize("layer", [nn.MultiheadAttention, nn.LSTM])
def test_dropout_inside_attention_and_recurrent_layers_is_asked_for_as_well(layer):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            deep = {"num_heads": 2} if layer is nn.MultiheadAttention else {"hidden_size": 4, "num_layers": 2}
            self.layer = layer(4, dropout=0.5, batch_first=True, **deep)

        def forward(self, x):
            return self.layer(*[x] * (3 if layer is nn.MultiheadAttention else 1))[0].mean(1)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Inside()
    data = draw(5, 3, 4), draw(5, 4, seed=1)
    off, on = (ritz.Risk(model, MSE, data, dropout=dropout).loss() for dropout in (False, True))
    assert off == pytest.approx(MSE(model.eval()(data[0]), data[1]).item(), rel=1e-12)
    assert on != pytest.approx(off, rel=1e-6)


def test_a_buffer_that_the_forward_pass_writes_to_is_not_the_models():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.net(x)

    model = Counting()
    ritz.Risk(model, CE, DATA).loss()
    assert float(model.calls) == 0


# ------------------------------------------------------------------------------ other weights, data, precision


def test_live_weights_are_read():
    model = small()
    risk = ritz.Risk(model, CE, DATA)
    H, before = ritz.Hessian(risk), risk.loss()
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert risk.loss() == pytest.approx(CE(model(X), Y).item(), rel=1e-12)
    assert risk.loss() != pytest.approx(before, rel=1e-6)
    torch.testing.assert_close(H.dense(), hessian_of(model, CE(model(X), Y)))
    model[0].weight.data = torch.zeros(5, 4)
    assert risk.loss() == pytest.approx(CE(model(X), Y).item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_at_is_the_same_risk_at_other_weights(dtype):
    model = small()
    risk = ritz.Risk(model, CE, DATA, dtype=dtype)
    point = draw(risk.dim, seed=4)
    twin = copy.deepcopy(model)
    nn.utils.vector_to_parameters(point, twin.parameters())
    for moved in (risk.at(point), risk.at(risk.space.split(point)), risk.at(torch.zeros(risk.dim)).at(point)):
        assert moved.loss() == pytest.approx(CE(twin(X), Y).item(), rel=1e-5 if dtype else 1e-12)
    assert risk.loss() == pytest.approx(CE(model(X), Y).item(), rel=1e-5 if dtype else 1e-12)
    part = risk.at({"2.bias": torch.ones(3)})  # the rest is live
    with torch.no_grad():
        model[0].weight.mul_(3)
        model[2].bias.fill_(9)
    twin = copy.deepcopy(model)
    nn.init.ones_(twin[2].bias)
    assert part.loss() == pytest.approx(CE(twin(X), Y).item(), rel=1e-5 if dtype else 1e-12)


def test_at_keeps_its_own_copy_and_takes_buffers():
    model = normed()
    risk = ritz.Risk(model, CE, DATA)
    mean = torch.ones(5)
    moved = risk.at({"1.running_mean": mean})
    mean.zero_()
    twin = copy.deepcopy(model).eval()
    twin[1].running_mean.fill_(1)
    assert moved.loss() == pytest.approx(CE(twin(X), Y).item(), rel=1e-12)


def test_at_takes_the_state_dict_of_a_model_with_tied_weights():
    risk, other = ritz.Risk(odd(), CE, DATA), odd()
    with torch.no_grad():
        other.first.weight.mul_(1.5)
    state = other.state_dict()  # which has the tied weight under both of its names
    assert risk.at(state).loss() == pytest.approx(CE(other(X), Y).item(), rel=1e-12)
    assert risk.at({"second.weight": other.first.weight}).loss() == risk.at(state).loss()
    with pytest.raises(ValueError, match=r"first\.weight and second\.weight are one tensor .* give one of the two"):
        risk.at(state | {"second.weight": torch.zeros(4, 4)})


def test_a_tied_weight_is_chosen_by_any_of_its_names():
    model = odd()
    assert ritz.Risk(model, CE, DATA, params="second.*").names == ("first.weight", "second.bias")
    H = ritz.Hessian(ritz.Risk(model, CE, DATA))
    block = H.block(["second.weight", "last.*"])
    assert block.space.names == ("first.weight", "last.weight")
    torch.testing.assert_close(block.dense(), H.block(["first.weight", "last.weight"]).dense())
    with pytest.raises(ValueError, match=r"no parameter matches 'second\.weight'; there are: scale"):
        ritz.Risk(model, CE, DATA, params="scale").restrict("second.weight")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.zeros(3), r"expected a flat vector \(dim=43,\), got \(3,\)"),
        ({"0.weigth": torch.zeros(5, 4)}, "no parameter or buffer named '0.weigth'"),
        ({"0.weight": torch.zeros(4, 5)}, r"0.weight has shape \(5, 4\), got \(4, 5\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        ritz.Risk(small(), CE, DATA).at(weights)


def test_on_is_the_same_risk_on_other_data():
    model = small()
    risk = ritz.Risk(model, CE, DATA)
    other = risk.on((2 * X[:5], Y[:5]), batch_size=2)
    assert other.loss() == pytest.approx(CE(model(2 * X[:5]), Y[:5]).item(), rel=1e-12)
    assert (other.num_samples, risk.num_samples) == (5, 9)


def test_a_float32_model_is_studied_in_float64_when_asked():
    model = small().float()
    risk = ritz.Risk(model, CE, (X.float(), Y), dtype=torch.float64)
    twin = copy.deepcopy(model).double()
    H = ritz.Hessian(risk).dense()
    assert H.dtype == torch.float64
    torch.testing.assert_close(H, hessian_of(twin, CE(twin(X.float().double()), Y)), rtol=1e-12, atol=1e-14)
    assert model[0].weight.dtype == torch.float32


def test_a_run_is_told_when_the_weights_move():
    model = small()
    meter = Metered(ritz.Hessian(ritz.Risk(model, CE, DATA)))
    meter.rows(torch.ones(1, meter.dim))
    with torch.no_grad():
        model[2].bias.add_(1)
    with pytest.raises(WeightsMovedError, match="the weights changed while the run was under way"):
        meter.rows(torch.ones(1, meter.dim))


def test_a_run_at_some_other_weights_is_told_when_the_rest_move():
    model = small()
    meter = Metered(ritz.Hessian(ritz.Risk(model, CE, DATA).at({"2.bias": torch.zeros(3)})))
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(WeightsMovedError):
        meter.rows(torch.ones(1, meter.dim))


# --------------------------------------------------------------------------------------- out of memory


class Small(nn.Module):
    """A device that holds `most` samples, fewer while gradients are taken."""

    def __init__(self, most, most_in_products):
        super().__init__()
        self.net, self.most, self.most_in_products = small(), most, most_in_products
        self.sizes = Calls()

    def forward(self, x):
        self.sizes.append(len(x))
        in_product = torch._C._functorch.maybe_current_level() is not None or _get_current_dispatch_mode() is not None
        if len(x) > (self.most_in_products if in_product else self.most):
            raise torch.OutOfMemoryError("CUDA out of memory (as if)")
        return self.net(x)


@pytest.mark.parametrize(("most", "most_in_products"), [(3, 3), (9, 2)], ids=["everywhere", "in products"])
def test_a_batch_that_does_not_fit_is_taken_in_halves_and_so_are_those_after_it(most, most_in_products):
    model = Small(most, most_in_products)
    risk = ritz.Risk(model, CE, DATA)
    H = ritz.Hessian(risk, route="forward").dense()
    torch.testing.assert_close(H, hessian_of(model.net, CE(model.net(X), Y)))
    model.sizes.clear()
    risk.loss()
    assert max(model.sizes) <= most_in_products  # and not tried again


def test_the_batch_stays_the_unit_of_noise_when_memory_is_short():
    def between(model):
        risk = ritz.Risk(model, CE, DATA, batch_size=4)
        rows = draw(3, risk.dim)
        H = ritz.Hessian(risk, route="forward")
        return risk.fold(lambda params, batch: H.batch_rows(params, batch, rows), Moments())

    torch.testing.assert_close(between(Small(1, 1)), between(Small(9, 9)))


def test_a_sample_that_does_not_fit_is_an_error_and_so_is_a_batch_that_must_stay_whole():
    with pytest.raises(torch.OutOfMemoryError):
        ritz.Risk(Small(0, 0), CE, DATA).loss()
    with pytest.raises(torch.OutOfMemoryError):
        ritz.Risk(Small(3, 3), CE, DATA, mode="train").loss()


# ---------------------------------------------------------------------------------------------- checks


def test_a_loss_that_couples_samples_is_found_by_the_halves_of_a_batch():
    risk = ritz.Risk(small(), lambda out, y: out.var(0).sum(), DATA)
    with pytest.raises(ValueError, match=r"does not add up over samples: a batch of 9 gives.*batch_loss="):
        risk.loss()


def test_a_model_that_couples_samples_is_found_too():
    model = network(lambda: nn.Linear(4, 3), lambda: nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match="use mode='train' if BatchNorm couples them"):
        ritz.Risk(model, CE, DATA).loss()
    assert math.isfinite(ritz.Risk(model, CE, DATA, mode="train").loss())


def test_a_model_of_batches_that_cannot_be_cut_is_named():
    """The edges of a graph point to nodes that are not in its first half."""

    class Graph(nn.Linear):
        def forward(self, x, edges):
            return super().forward(x + x[edges[1]].sum(0))

    edges = torch.tensor([[0, 1], [3, 4]])
    risk = ritz.Risk(Graph(2, 2), CE, [(torch.randn(5, 2), edges, torch.arange(5) % 2)])
    with pytest.raises(ValueError, match=r"a batch of 5 samples, but not half of it \(index.*batch_loss="):
        risk.loss()


class Speech(nn.Module):
    """Outputs (steps, samples, classes), as CTC has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x):
        return self.layer(x).log_softmax(-1).transpose(0, 1)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_steps_before_samples_in_the_outputs_of_a_callable_loss_are_named(mode):
    """A batch would weigh as much as it has steps, whatever its size."""
    X, y = torch.randn(7, 5, 2), torch.randint(1, 4, (7, 2))
    lengths = torch.full((7,), 5), torch.tensor([1, 2, 1, 2, 2, 1, 2])

    def ctc(out, batch):
        return F.ctc_loss(out, *batch[1:])

    data, keywords = (X, y, *lengths), {"target": lambda batch: batch, "mode": mode, "batch_size": 3}
    steps_first = ritz.Risk(network(Speech), ctc, data, forward=lambda model, batch: model(batch[0]), **keywords)
    with pytest.raises(
        ValueError, match=r"outputs \(5, 3, 4\) for 3 samples seem to have.*in the second.*put samples first"
    ):
        steps_first.loss()
    samples_first = ritz.Risk(
        steps_first.model, lambda out, batch: F.ctc_loss(out.transpose(0, 1), *batch[1:]), data,
        forward=lambda model, batch: model(batch[0]).transpose(0, 1), **keywords,
    )  # fmt: skip
    each = F.ctc_loss(steps_first.model(X), y, *lengths, reduction="none") / lengths[1]
    assert samples_first.loss() == pytest.approx(each.mean().item())


def test_as_many_steps_as_samples_are_found_by_the_halves_of_a_batch():
    risk = ritz.Risk(
        network(Speech), lambda out, y: (out.mean(0) - y).square().mean(), (torch.randn(4, 4, 2), torch.randn(4, 4))
    )
    with pytest.raises(
        ValueError, match=r"half of a batch has the same weight as all of its 4 samples, 4: .*samples first"
    ):
        risk.loss()


def test_a_loss_that_is_a_sum_is_named():
    risk = ritz.Risk(small(), lambda out, y: F.cross_entropy(out, y, reduction="sum"), DATA)
    with pytest.raises(ValueError, match="looks like a sum over the batch; return the mean"):
        risk.loss()


def test_tokens_that_are_ignored_without_being_weighted_are_found():
    y = Y.clone()
    y[:3] = 0
    risk = ritz.Risk(small(), lambda out, y: F.cross_entropy(out, y, ignore_index=0), (X, y))
    with pytest.raises(ValueError, match="does not add up"):
        risk.loss()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_that_fits_its_data_is_not_taken_for_one_that_couples_samples(dtype):
    class Rounding(nn.Linear):
        """As a kernel does that adds up in another order when the batch is large."""

        def forward(self, x):
            return super().forward(x) * (1 + torch.finfo(x.dtype).eps * (len(x) > 5))

    model, x = Rounding(4, 3).to(dtype), X.to(dtype)
    risk = ritz.Risk(model, MSE, (x, F.linear(x, model.weight, model.bias).detach()))
    assert 0 < risk.loss() < torch.finfo(dtype).eps  # all of it is round-off


def test_a_forward_pass_that_is_random_is_refused():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn(x.shape))

    model = Noisy(4, 3)
    with pytest.raises(
        UnsupportedError, match=r"the forward pass is random.*functional dropout.*dropout=True, a batch has"
    ):
        ritz.Risk(model, CE, DATA).loss()
    H = ritz.Hessian(ritz.Risk(model, CE, DATA, dropout=True))
    assert torch.equal(H @ draw(H.dim), H @ draw(H.dim))


def test_hooks_on_saved_tensors_are_refused_before_they_give_back_something_else():
    class Offloading(nn.Linear):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x).tanh()

    risk = ritz.Risk(Offloading(4, 3), CE, DATA)
    with pytest.raises(UnsupportedError, match=r"hooks on saved tensors.*switch them off"):
        risk.gradient()


def test_checking_costs_nothing_while_the_weights_stay():
    model = Small(9, 9)
    risk = ritz.Risk(model, CE, DATA)
    risk.check()
    model.sizes.clear()
    risk.check()
    assert model.sizes == []


def test_progress_is_reported_batch_by_batch():
    seen = []
    risk = ritz.Risk(small(), CE, DATA, batch_size=4)
    risk.fold(risk.total_and_weight, Mean(), progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == [1, 2, 3]


def test_the_convention_says_samples_mode_and_precision():
    assert ritz.Risk(small(), CE, DATA).convention() == "mean over 9 samples, eval mode, float64"


def test_the_convention_says_what_the_mean_is_over_and_of_which_parameters():
    """Tokens that count, weights of classes, some of the parameters: each gives another number than all samples do."""
    ignoring = ritz.Risk(small(), CE, (X, torch.where(Y == 2, -100, Y)))
    assert "mean over 6 items of 9 samples" in ritz.trace(ritz.GGN(ignoring)).convention
    weighted = ritz.Risk(small(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.25])), DATA)
    assert "mean over 9 samples by weights that add up to 9.75" in ritz.trace(ritz.GGN(weighted)).convention
    block = ritz.Hessian(ritz.Risk(small(), CE, DATA)).block("2.*")
    assert "mean over 9 samples, 18 of 43 parameters, eval mode" in block.convention()
    assert "items" not in ignoring.on(DATA).convention()  # not known yet


def test_a_risk_says_what_it_is():
    said = repr(ritz.Risk(small(), CE, DATA))
    assert said == "Risk(Sequential, 43 parameters, CrossEntropy; mean over 9 samples, eval mode, float64)"


# --------------------------------------------------------------- kernels, wrappers and what the caller has switched


class Sequences(nn.Module):
    """A layer over sequences, then the mean over time."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x):
        h = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return self.head((h[0] if isinstance(h, tuple) else h).mean(1))


LAYERS = {
    "lstm": lambda: Sequences(nn.LSTM(2, 3, batch_first=True), 3),
    "gru": lambda: Sequences(nn.GRU(2, 2, batch_first=True), 2),
    "attention": lambda: Sequences(nn.MultiheadAttention(2, 2, batch_first=True), 2),
    "transformer": lambda: Sequences(nn.TransformerEncoderLayer(2, 2, 3, batch_first=True), 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_and_attention_layers_have_the_right_hessian(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LAYERS[name]()
    x = draw(9, 3, 2, seed=6)
    risk = ritz.Risk(model, CE, (x, Y), batch_size=5)
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    H = ritz.Hessian(risk).dense()
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled) == (fast, onednn)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            truth = hessian_of(model, CE(model.eval()(x), Y))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    torch.testing.assert_close(H, truth, rtol=1e-9, atol=1e-12)
    if name in ("lstm", "attention"):
        torch.testing.assert_close(ritz.GGN(risk).dense(), ritz.GGN(risk).dense().T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_fused_kernels_of_float32_do_not_stand_in_the_way(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LAYERS[name]().float()
    data = draw(9, 3, 2, seed=6).float(), Y
    single, double = (ritz.Risk(model, CE, data, dtype=dtype) for dtype in (torch.float32, torch.float64))
    v = draw(single.dim, seed=7)
    for route in ("forward", "reverse"):
        product = ritz.Hessian(single, route=route) @ v
        torch.testing.assert_close(product.double(), ritz.Hessian(double, route=route) @ v, rtol=1e-3, atol=1e-5)


def test_attention_is_noted_in_the_convention_and_said_once(caplog):
    risk = cases.problem("language").risk()
    with caplog.at_level(logging.INFO, logger="ritz"):
        risk.loss()
        risk.gradient()
    assert sum("math kernel" in record.message for record in caplog.records) == 1
    assert "attention by the math kernel" in risk.convention()


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad],
    ids=["no_grad", "inference_mode", "autocast", "enable_grad"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_caller_has_switched_does_no_harm(context, dtype):
    model = small().float()
    data = (X.float(), Y)
    truth = ritz.Hessian(ritz.Risk(model, CE, data, dtype=dtype)).dense()
    with context():
        risk = ritz.Risk(model, CE, data, dtype=dtype)
        inside = [ritz.Hessian(risk, route=route).dense() for route in ("forward", "reverse")]
        inside.append(ritz.Hessian(risk).dense())
        gradient, loss = risk.gradient(), risk.loss()
        ritz.GGN(risk).dense()
    for H in (*inside, ritz.Hessian(risk).dense()):  # and what was kept inside can be used outside
        torch.testing.assert_close(H, truth, rtol=1e-4, atol=1e-6)
        assert not H.requires_grad
    torch.testing.assert_close(gradient, risk.gradient())
    assert loss == risk.loss()


def test_tensors_made_in_inference_mode_can_be_data_and_weights():
    model = small()
    with torch.inference_mode():
        x, twin = X * 1.0, copy.deepcopy(model)
    truth = ritz.Hessian(ritz.Risk(model, CE, DATA)).dense()
    torch.testing.assert_close(ritz.Hessian(ritz.Risk(model, CE, (x, Y))).dense(), truth)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert p.is_inference() or p is not q
    torch.testing.assert_close(ritz.Hessian(ritz.Risk(twin, CE, (x, Y))).dense(), truth)


def test_a_vector_that_requires_a_gradient_is_only_a_vector():
    H = ritz.Hessian(ritz.Risk(small(), CE, DATA))
    assert not (H @ torch.ones(H.dim, requires_grad=True)).requires_grad


class OptimizedModule(nn.Module):
    """As torch.compile leaves it, by name and attribute."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner

    def forward(self, *args):
        raise AssertionError("the compiled code is not to be called")


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, OptimizedModule, lambda m: nn.DataParallel(OptimizedModule(m)), torch.compile]
)
def test_wrappers_are_taken_off(wrap):
    model = small()
    risk = ritz.Risk(wrap(model), CE, DATA)
    assert risk.model is model
    assert risk.names[0] == "0.weight"
    assert math.isfinite(risk.loss())


@pytest.mark.parametrize("wrap", [nn.DataParallel, OptimizedModule, lambda m: nn.DataParallel(OptimizedModule(m))])
def test_weights_go_by_the_names_that_a_wrapped_model_has_for_them(wrap):
    model = wrap(small())
    risk, named = ritz.Risk(model, CE, DATA), dict(model.named_parameters())
    half = {name: p.detach() / 2 for name, p in named.items()}
    assert risk.at(half).loss() == risk.at(torch.cat([p.flatten() for p in half.values()])).loss() != risk.loss()
    found = ritz.measure(risk, init=half, measures=["distance"])
    assert found["distance"].value == pytest.approx(float(torch.cat([p.flatten() for p in half.values()]).norm()))
    with pytest.raises(ValueError, match=r"no parameter or buffer named 'other\.0\.weight'"):
        risk.at({"other.0.weight": torch.zeros(5, 4)})


def test_a_model_that_asserts_the_size_of_its_batch_is_refused_as_one_that_couples_samples():
    class Fixed(nn.Linear):
        def forward(self, x):
            assert len(x) == len(X), "made for one size"
            return super().forward(x)

    with pytest.raises(ValueError, match=r"not half of it \(made for one size(.|\n)*dynamic"):
        ritz.Risk(Fixed(4, 3), CE, DATA).loss()


def test_hooks_on_backward_passes_do_not_touch_products_and_stay():
    model = small()
    truth = ritz.Hessian(ritz.Risk(model, CE, DATA)).dense()
    calls = []
    model[0].register_full_backward_hook(lambda m, gi, go: calls.append("module"))
    model[2].register_full_backward_pre_hook(lambda m, go: (2 * go[0],))
    model[0].weight.register_hook(lambda g: calls.append("weight"))
    risk = ritz.Risk(model, CE, DATA)
    for route in ("forward", "reverse"):
        torch.testing.assert_close(ritz.Hessian(risk, route=route).dense(), truth)
    risk.gradient(), ritz.GGN(risk).dense()
    assert calls == []
    CE(model(X.clone().requires_grad_()), Y).backward()
    assert set(calls) == {"module", "weight"}


def test_a_loss_that_reads_the_weights_by_itself_is_refused():
    model = nn.Linear(3, 1)

    def penalised(out, y):
        return (out - y).square().mean() + 0.5 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(UnsupportedError, match="the loss uses weights besides the outputs"):
        ritz.Risk(model, penalised, (torch.randn(5, 3), torch.randn(5, 1))).loss()


def test_an_infinite_buffer_is_a_mask_and_a_nan_is_not():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mask", torch.triu(torch.full((3, 3), -torch.inf), 1))

        def forward(self, x):
            return self.layer(x) @ self.mask.softmax(-1)

    model, data = Masked(), (torch.randn(4, 3), torch.randint(3, (4,)))
    assert ritz.Risk(model, nn.CrossEntropyLoss(), data).loss() > 0
    model.mask[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="mask is not finite"):
        ritz.Risk(model, nn.CrossEntropyLoss(), data).loss()


def test_an_embedding_that_renormalises_its_rows_is_not_changed():
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 2))
    before = model[0].weight.detach().clone()
    ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randint(5, (4, 2)), torch.randint(2, (4,)))).gradient()
    assert torch.equal(model[0].weight, before)
    assert model[0].max_norm == 0.1


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("params", ["0.*", "1.*"])
def test_a_forward_pass_that_writes_to_weights_is_refused_and_they_stay(params):
    model = network(lambda: Clamped(4, 4), lambda: nn.Linear(4, 3))
    before = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"the forward pass writes to 0.weight.*parametrize"):
        ritz.Risk(model, CE, DATA, params=params).gradient()
    assert torch.equal(model[0].weight, before)
    model(X)  # which clamps them: the next pass writes what is there
    ritz.Risk(model, CE, DATA, params=params).gradient()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("setting", [{"max_norm": 0.1}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_settings_of_an_embedding_that_are_for_training_have_no_part(kind, setting):
    """Gradient and curvature are those of the loss, whatever is done to them in training; the settings stay."""
    tokens, y = torch.tensor([[0, 1], [1, 1], [2, 4], [1, 3]]), torch.tensor([0, 1, 1, 0])

    def build(**settings):
        head = nn.Linear(6 if kind is nn.Embedding else 3, 2)
        middle = [nn.Flatten()] if kind is nn.Embedding else []
        return nn.Sequential(kind(5, 3, **settings), *middle, nn.Tanh(), head).double()

    model, plain = build(**setting), build()
    plain.load_state_dict(model.state_dict())
    found, truth = (ritz.Risk(m, CE, (tokens, y), batch_size=2) for m in (model, plain))
    torch.testing.assert_close(found.gradient(), truth.gradient())
    for matrix in () if kind is nn.EmbeddingBag else (ritz.GGN, ritz.Hessian):  # bags have no second derivative
        torch.testing.assert_close(matrix(found).dense(), matrix(truth).dense())
    assert torch.equal(model[0].weight, plain[0].weight)
    assert {name: getattr(model[0], name) for name in setting} == setting


def test_what_a_forward_pass_stores_on_a_module_is_the_users_again():
    """A weight that a hook computes, a counter, the last activations: as the user's own pass left them."""

    class Stores(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.last = nn.Linear(4, 3), 0, None
            self.every, self.by_name, self.sizes = [], {}, {0}

        def forward(self, x):
            self.calls += 1
            self.last = self.layer(x)
            self.shape = self.last.shape
            self.every.append(self.last)
            self.by_name["last"] = self.last
            self.sizes.add(len(x))
            return self.last

    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)), Stores())
    with torch.no_grad():
        model(X[:2])
    weight, last = model[0].weight, model[1].last
    G = ritz.GGN(ritz.Risk(model, CE, DATA))
    G @ torch.ones(G.dim)
    assert model[0].weight is weight
    assert model[1].last is last
    assert (model[1].calls, model[1].shape) == (1, (2, 3))
    assert [x is last for x in (*model[1].every, *model[1].by_name.values())] == [True, True]
    assert model[1].sizes == {0, 2}
    copy.deepcopy(model)


def test_a_loss_adds_up_to_the_digits_that_the_model_computes_with():
    """Kernels add up in another order for another number of samples: here a scale stands for that."""

    class Rough(nn.Linear):
        def forward(self, x):
            scale = 3.0 ** len(x)
            return (super().forward(x) * scale).to(self.inside).double() / scale

    model = Rough(2, 2).double()
    X, y = torch.randn(8, 2, dtype=torch.float64), torch.arange(8) % 2
    for model.inside, slack in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        loss = ritz.Risk(model, CE, (X, y)).loss()
        assert loss == pytest.approx(float(CE(model(X), y).detach()), rel=slack)


def test_weights_that_a_model_casts_by_autocast_are_not_kept_through_a_walk():
    """torch's cache is emptied where the outermost autocast ends, and that is the one around all batches."""
    seen = []

    class Cast(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                seen.append(torch.is_autocast_cache_enabled())
                return super().forward(x).float()

    risk = ritz.Risk(Cast(2, 2), CE, (torch.randn(4, 2), torch.arange(4) % 2), batch_size=2)
    assert risk.gradient().isfinite().all()
    assert not any(seen)
    assert torch.is_autocast_cache_enabled()


def test_a_complex_parameter_is_refused_with_what_to_do():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(UnsupportedError, match=r"phase is complex.*view_as_real"):
        ritz.Risk(model, CE, DATA)
    assert ritz.Risk(model, CE, DATA, params="0.*").dim == 6


def test_a_sparse_buffer_is_refused_with_what_to_do():
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"edges is a sparse tensor.*to_dense"):
        ritz.Risk(model, CE, (torch.ones(3, 2), torch.zeros(3, dtype=torch.long)))


def test_classes_that_are_masked_and_items_that_are_ignored_go_together():
    """An ignored item has no loss, even where the class that stands in its place has no probability."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x).masked_fill(torch.tensor([True, False, False]), -torch.inf)

    model = Masked()
    y = torch.tensor([1, -100, 2, 1, -100, 2, 2, 1, 1])
    risk = ritz.Risk(model, CE, (X, y))
    loss = F.cross_entropy(model(X), y)
    assert risk.loss() == pytest.approx(loss.item())
    torch.testing.assert_close(risk.gradient(), gradient_of(loss, model.parameters()))
    assert bool(ritz.GGN(risk).dense().isfinite().all())


def test_items_of_class_weight_0_that_smoothing_gives_a_loss_count_in_sums_alone_and_this_is_said():
    weight = torch.tensor([1.0, 0.0, 2.0])
    smooth, model = nn.CrossEntropyLoss(weight, label_smoothing=0.3), small()
    risk = ritz.Risk(model, smooth, DATA, batch_size=4)
    assert risk.loss() == pytest.approx(smooth(model(X), Y).item())  # as torch has it
    assert (
        "items of class weight 0 counted, by label smoothing, in sums and not in numbers of single" in risk.convention()
    )
    torch.testing.assert_close(risk.gradient(), gradient_of(smooth(model(X), Y), model.parameters()))
    # single items: those with a weight
    seen = Y != 1
    gradients = [
        gradient_of(smooth(model(x[None]), y[None]), model.parameters()) for x, y in zip(X[seen], Y[seen], strict=True)
    ]
    truth = sum(weight[y] * torch.outer(g, g) for g, y in zip(gradients, Y[seen], strict=True)) / weight[Y].sum()
    torch.testing.assert_close(ritz.EmpiricalFisher(risk).dense(), truth)
    assert ritz.trace(ritz.EmpiricalFisher(risk), "exact").value == pytest.approx(float(truth.trace()))
    factor = ritz.KFACOperator(risk, "empirical").factors()["2"][0][0]
    assert float(factor.trace()) == pytest.approx(float(truth.diagonal()[-3:].sum()))  # of the last bias
    without = ritz.Risk(model, smooth, (X[seen], Y[seen]))
    without.check()
    assert "label smoothing" not in without.convention()


# ------------------------------------------------------------------------- state, other outputs, inputs


def test_the_state_has_every_parameter_and_buffer_as_the_risk_sees_it():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    risk = ritz.Risk(model, nn.MSELoss(), (torch.randn(4, 2), torch.zeros(4, 3)), params="0.bias", dtype=torch.float32)
    moved = risk.at({"1.running_mean": torch.full((3,), 5.0)})
    assert set(moved.state()) == set(model.state_dict())
    assert moved.state()["1.running_mean"].tolist() == [5.0, 5.0, 5.0]
    assert moved.state()["0.weight"].dtype == torch.float32


def test_outputs_can_be_passed_through_a_function():
    model, data = nn.Linear(2, 3), (torch.randn(5, 2), torch.zeros(5, 3))
    risk = ritz.Risk(model, nn.MSELoss(), data)
    half = risk.through(lambda out, batch: out / 2, note="outputs halved")
    assert half.loss() == pytest.approx(risk.loss() / 4)
    assert "outputs halved" in half.convention()
    torch.testing.assert_close(ritz.Hessian(half).dense(), ritz.Hessian(risk).dense() / 4)
    opaque = ritz.Risk(model, data=[data], batch_loss=lambda model, batch: (model(batch[0]).sum(), len(batch[0])))
    with pytest.raises(UnsupportedError, match="outputs are not known"):
        opaque.through(lambda out, batch: out)


@pytest.mark.parametrize("batch_size", [5, 2])
def test_a_model_that_writes_to_its_inputs_does_not_write_to_the_data(batch_size):
    class Centring(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            return self.layer(x.sub_(1.0))

    model, X, y = Centring(), torch.randn(5, 2), torch.zeros(5, 1)
    before = X.clone()
    risk = ritz.Risk(model, nn.MSELoss(), (X, y), batch_size=batch_size)
    assert risk.loss() == pytest.approx(float((model.layer(X - 1) ** 2).mean().detach()))
    ritz.Hessian(risk).dense()
    assert torch.equal(X, before)


# --------------------------------------------------------------------------------------------- sessions


def test_during_a_session_the_model_is_looked_at_once_and_after_it_anew():
    problem = cases.make("residual")
    risk = problem.risk()
    with risk.session():
        first = risk.place(), risk.settings(), risk.params()
        with risk.session():  # one inside another is the same one
            assert (risk.place(), risk.settings()) == first[:2]
            assert risk.params() is first[2]
        assert risk.place() is first[0]
        moved = risk.at({"head.weight": 2 * risk.params()["head.weight"]})  # another risk, which looks by itself
        assert not torch.equal(moved.params()["head.weight"], first[2]["head.weight"])
    problem.model.norm.eps = 1.0
    problem.model.head.weight.data = 3 * problem.model.head.weight.data
    with risk.session():
        assert risk.settings() != first[1]
        assert risk.place() != first[0]
        assert torch.equal(risk.params()["head.weight"], problem.model.head.weight)


def test_the_version_follows_weights_buffers_and_those_that_are_set():
    model = cases.make("residual").model
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), cases.problem("residual").batches)
    other = risk.at({"head.weight": torch.zeros_like(model.head.weight)})
    seen = {risk.version()}
    for tensor in (model.head.weight, model.norm.running_mean, model.stem.bias):
        tensor.detach().add_(1)
        seen.add(risk.version())
    assert len(seen) == 4
    before = other.version()
    model.head.weight.detach().add_(1)  # which the other does not read
    assert other.version() == before
    model.head.bias.detach().add_(1)
    assert other.version() != before


class Cut(nn.Module):
    """A network whose forward pass ends the graph, as evaluation code does that was taken over into a model."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(4, 3), how

    def forward(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                return self.layer(x)
        out = self.layer(x).detach()
        return torch.from_numpy(out.numpy()) if self.how == "numpy" else out


@pytest.mark.parametrize("how", ["no_grad", "detach", "numpy"])
def test_outputs_that_are_cut_off_from_the_weights_are_refused_and_not_called_flat(how):
    risk = ritz.Risk(Cut(how), nn.CrossEntropyLoss(), (torch.randn(6, 4), torch.arange(6) % 3))
    with pytest.raises(ritz.errors.UnsupportedError, match="no derivative with respect to any parameter, so every"):
        ritz.trace(ritz.Hessian(risk))
