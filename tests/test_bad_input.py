"""What cannot be measured is refused before any work, by a message that says what was given and what to do."""

import pytest
import torch
from torch import nn

import ritz
from ritz.errors import NonFiniteError
from ritz.estimators.noise import minibatch_moment

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 4, generator=G), torch.randint(3, (20,), generator=G)


def model():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def risk():
    return ritz.Risk(model(), CE, (X, Y))


@pytest.fixture
def H(risk):
    return ritz.Hessian(risk)


# ------------------------------------------------------------------------------------------- making a risk


class Dictionary(nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x)}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ritz.Risk("resnet", CE, (X, Y)), TypeError, "must be a torch.nn.Module, got str"),
        (lambda: ritz.Risk(nn.ReLU(), CE, (X, Y)), ValueError, "the model has no parameters"),
        (lambda: ritz.Risk(model().requires_grad_(False), CE, (X, Y)), ValueError, r"'\*' is frozen \(requires_grad"),
        (lambda: ritz.Risk(nn.LazyLinear(3), CE, (X, Y)), ValueError, "weight has no shape.*call the model on a batch"),
        (lambda: ritz.Risk(model().to("meta"), CE, (X, Y)), ValueError, "0.weight is on the meta device.*to_empty"),
        (lambda: ritz.Risk(model(), CE, (X, Y), params="head.*"), ValueError, "no parameter matches 'head"),
        (lambda: ritz.Risk(model(), CE, (X, Y), params=[]), ValueError, "list of patterns is empty"),
        (lambda: ritz.Risk(model(), CE), ValueError, "data is missing"),
        (lambda: ritz.Risk(model(), data=(X, Y)), ValueError, "exactly one of loss= and batch_loss"),
        (lambda: ritz.Risk(model(), CE, (X, Y), batch_loss=len), ValueError, "exactly one of loss= and batch_loss"),
        (
            lambda: ritz.Risk(model(), data=(X,), batch_loss=len, target=len),
            ValueError,
            "leave out forward= and target",
        ),
        (lambda: ritz.Risk(model(), CE, (X, Y), mode="Train"), ValueError, "'eval' or 'train', got 'Train'"),
        (lambda: ritz.Risk(model(), nn.MSELoss(reduction="sum"), (X, Y)), ValueError, "reduction='sum'"),
        (lambda: ritz.Risk(model(), CE, (X[:0], Y[:0])), ValueError, "the data is empty"),
        (lambda: ritz.Risk(model(), CE, (X, Y[:3])), ValueError, r"must have one length, got shapes \(20, 4\), \(3,\)"),
        (lambda: ritz.Risk(model(), CE, (X, Y), batch_size=-1), ValueError, "batch_size must be at least 1, got -1"),
        (lambda: ritz.Plan(chunk=0), ValueError, "chunk must be at least 1, got 0"),
        (lambda: ritz.Plan(micro_batch=0), ValueError, "micro_batch must be at least 1 or None, got 0"),
        (lambda: ritz.Plan(route="fast"), ValueError, "route must be one of auto, forward.*got 'fast'"),
    ],
)
def test_a_risk_that_cannot_be_is_refused_when_it_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ------------------------------------------------------------------------------------- before the first product

OPAQUE = {
    "a number": (lambda m, b: m(b[0]).sum(), TypeError, r"must return \(sum over items, weight\), got Tensor"),
    "a vector": (lambda m, b: (m(b[0]).sum(1), 3), ValueError, "a scalar tensor as the sum"),
    "negative": (lambda m, b: (m(b[0]).sum(), -3), ValueError, "batch 0, a count of items, must be >= 0, got -3.0"),
    "weightless": (lambda m, b: (m(b[0]).sum(), 0), ValueError, "add up to 0"),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_a_batch_loss_that_is_not_a_sum_and_a_weight_is_refused(name):
    batch_loss, error, message = OPAQUE[name]
    with pytest.raises(error, match=message):
        ritz.Hessian(ritz.Risk(model(), data=[(X, Y)], batch_loss=batch_loss)).dense()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ritz.Risk(model(), CE, []), ValueError, "the data is empty: there is no batch"),
        (
            lambda: ritz.Risk(model(), CE, (X, Y[:, None])),
            ValueError,
            r"targets \(20, 1\) do not fit outputs \(20, 3\)",
        ),
        (lambda: ritz.Risk(model(), MSE, (X, X[:, 0])), ValueError, r"targets \(20,\) must have the shape"),
        (lambda: ritz.Risk(model(), CE, (X, Y + 1)), ValueError, "label 3 is not one of the 3 classes"),
        (lambda: ritz.Risk(model(), CE, (X, Y * 0 - 100)), ValueError, "every target is ignored"),
        (lambda: ritz.Risk(model(), lambda o, y: o.sum(1), (X, Y)), ValueError, r"one number.*shape \(20,\)"),
        (lambda: ritz.Risk(model(), lambda o, y: o.sum(), (X, Y)), ValueError, "looks like a sum"),
        (lambda: ritz.Risk(model(), CE, [{"x": X, "y": Y}]), ValueError, "a batch is a dict.*forward=lambda"),
        (lambda: ritz.Risk(model(), CE, [X, Y]), ValueError, r"a batch is a tensor.*data=\(X, y\)"),
        (lambda: ritz.Risk(Dictionary(4, 3), CE, (X, Y)), TypeError, "returned a dict, not a tensor; pick the outputs"),
    ],
)
def test_data_and_losses_that_do_not_fit_are_refused_before_the_first_product(make, error, message):
    with pytest.raises(error, match=message):
        ritz.spectrum(ritz.Hessian(make()), num_steps=2, num_probes=1)


MEASURES = {
    "loss": lambda risk: risk.loss(),
    "gradient": lambda risk: risk.gradient(),
    "product": lambda risk: ritz.Hessian(risk) @ torch.ones(risk.dim),
    "spectrum": lambda risk: ritz.spectrum(ritz.Hessian(risk)),
    "trace": lambda risk: ritz.trace(ritz.GGN(risk)),
    "diagonal": lambda risk: ritz.diagonal(ritz.Hessian(risk)),
    "top_eigenpairs": lambda risk: ritz.top_eigenpairs(ritz.Hessian(risk), k=1),
    "solve": lambda risk: ritz.solve(ritz.GGN(risk) + 1.0, torch.ones(risk.dim)),
    "sample_traces": lambda risk: ritz.sample_traces(risk),
    "curvature_noise": lambda risk: ritz.curvature_noise(risk, num_batches=2, batch_size=2),
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", MEASURES)
def test_data_that_is_not_finite_is_found_and_its_batch_named(name, bad):
    x = X.clone()
    x[13, 2] = bad
    linear = nn.Linear(4, 3)  # no saturation: infinities stay
    with pytest.raises(NonFiniteError, match=r"the loss of batch 2 \(samples 10 to 14\) is nan"):
        MEASURES[name](ritz.Risk(linear, CE, (x, Y), batch_size=5))


@pytest.mark.parametrize("where", ["1.weight", "1.running_var", "0.bias"])
@pytest.mark.parametrize("name", MEASURES)
def test_weights_that_are_not_finite_are_named(name, where):
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    net[0].bias.requires_grad_(False)
    dict((*net.named_parameters(), *net.named_buffers()))[where].data[1] = float("inf")
    with pytest.raises(NonFiniteError, match=f"{where} is not finite; the network has diverged"):
        MEASURES[name](ritz.Risk(net, CE, (X, Y)))


# --------------------------------------------------------------------------------------------- arguments

CALLS = {
    "k": (lambda H: ritz.top_eigenpairs(H, k=100), "k=100 for dim=43"),
    "no k": (lambda H: ritz.top_eigenpairs(H, k=0), "k must lie between 1 and the dimension"),
    "which": (lambda H: ritz.top_eigenpairs(H, k=1, which="biggest"), "which must be one of.*got 'biggest'"),
    "spectrum probes": (lambda H: ritz.spectrum(H, num_probes=0), "at least 1, got 100 and 0"),
    "spectrum steps": (lambda H: ritz.spectrum(H, num_steps=0), "at least 1, got 0 and 8"),
    "spectrum tol": (lambda H: ritz.spectrum(H, tol=-1), "tol must be positive, got -1"),
    "spectrum products": (lambda H: ritz.spectrum(H, products=1), "products must be at least"),
    "reorthogonalize": (lambda H: ritz.spectrum(H, reorthogonalize="x"), "'locked', 'full' or 'none', got 'x'"),
    "trace probes": (lambda H: ritz.trace(H, "hutchinson", num_probes=0), "at least 1 probes, got num_probes=0"),
    "hutch++ probes": (lambda H: ritz.trace(H, "hutch++", num_probes=3), "at least 6 probes"),
    "trace method": (lambda H: ritz.trace(H, "magic"), "method must be one of auto.*got 'magic'"),
    "norm probes": (lambda H: ritz.frobenius_norm(H, num_probes=0), "num_probes must be at least 1, got 0"),
    "diagonal probes": (lambda H: ritz.diagonal(H, num_probes=0), "num_probes must be at least 1, got 0"),
    "no shift": (lambda H: ritz.logdet(H, shift=0.0), "shift must be positive, got 0.0"),
    "nan shift": (lambda H: ritz.logdet(H, shift=float("nan")), "shift must be positive, got nan"),
    "right side": (lambda H: ritz.solve(H + 1.0, torch.ones(3)), r"expected b of shape \(dim=43,\).*got \(3,\)"),
    "nan right side": (lambda H: ritz.solve(H + 1.0, torch.ones(43) / 0), "b has NaN or infinite entries"),
    "vector": (lambda H: H @ torch.ones(3), r"expected a vector \(dim=43,\) or columns \(dim, k\), got \(3,\)"),
    "block": (lambda H: H.block("nope"), "no parameter matches 'nope'; there are: 0.weight"),
    "route": (lambda H: ritz.Hessian(H.risk, route="fast"), "route must be one of forward.*got 'fast'"),
    "fisher samples": (lambda H: ritz.Fisher(H.risk, num_samples=0), "num_samples must be at least 1, got 0"),
    "sample probes": (lambda H: ritz.sample_traces(H.risk, num_probes=0), "num_probes must be at least 1, got 0"),
    "one batch": (lambda H: ritz.curvature_noise(H.risk, 1), "num_batches >= 2, got 1"),
    "many batches": (lambda H: ritz.curvature_noise(H.risk), r"16 \* 128 is more than the 20 samples"),
    "no batch size": (lambda H: ritz.curvature_noise(H.risk, batch_size=0), "at least 1, got 0 and 4"),
    "curvature": (lambda H: ritz.curvature_noise(H.risk, curvature="kfac"), "'hessian' or 'ggn', got 'kfac'"),
    "one pair": (lambda H: minibatch_moment(H.risk, num_pairs=1), "num_pairs must be at least 2"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_out_of_range_is_refused(H, name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(H)


@pytest.mark.parametrize("make", [ritz.Hessian, ritz.GGN, ritz.Fisher, ritz.EmpiricalFisher, ritz.GradientCovariance])
def test_a_matrix_of_a_model_needs_a_risk(make):
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Sequential"):
        make(model())


def test_a_product_takes_a_tensor(H):
    with pytest.raises(TypeError, match="tensor on the right of @, got list"):
        H @ [1.0]


def test_data_in_the_place_of_the_loss_is_named_and_not_printed():
    with pytest.raises(TypeError, match=r"a torch loss, a callable\(output, target\) or a ritz.Loss, got tuple$"):
        ritz.Risk(model(), (X, Y))


def test_an_operator_says_its_name_once(H, risk):
    assert repr(H) == "Hessian(dim=43, mean over 20 samples, eval mode, float64, auto route)"
    assert repr(ritz.GGN(risk)) == "GGN(dim=43, mean over 20 samples, eval mode, float64)"
    assert repr(H + 1.0).startswith("Shifted(dim=43, (Hessian, mean over")
