"""The rest of the package at work on the networks."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ritz
from ritz import models
from ritz.losses import CrossEntropy


def images(channels: int, side: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, channels, side, side, generator=generator), torch.arange(size) % 3


def text(size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(5, (size, 7), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def little_gpt(**kwargs) -> nn.Sequential:
    return models.gpt(5, context=6, width=8, num_layers=1, num_heads=2, seed=0, **kwargs)


CASES = {
    "softmax_regression": (lambda: models.softmax_regression(3, seed=0), images(1, 28)),
    "mlp": (lambda: models.mlp(3, seed=0), images(1, 28)),
    "lenet5": (lambda: models.lenet5(3, seed=0), images(1, 28)),
    "all_cnn_c": (lambda: models.all_cnn_c(3, width=0.05, seed=0), images(3, 32)),
    "vgg16_bn": (lambda: models.vgg16_bn(3, width=0.05, seed=0), images(3, 32)),
    "resnet18": (lambda: models.resnet18(3, width=0.05, seed=0), images(3, 32)),
    "gpt": (little_gpt, text()),
}


def risk_of(name: str) -> ritz.Risk:
    build, data = CASES[name]
    return ritz.Risk(build(), nn.CrossEntropyLoss(), data)


def mean_loss(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    out, y = model.eval()(data[0]), data[1]
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def vector(dim: int) -> torch.Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CASES)
def test_a_hessian_product_is_the_derivative_of_the_gradient(name):
    build, data = CASES[name]
    model, risk = build(), risk_of(name)
    v = vector(risk.dim)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):  # the others cannot be differentiated twice
        params = list(model.parameters())
        grads = torch.autograd.grad(mean_loss(model, data), params, create_graph=True)
        truth = torch.autograd.grad(torch.cat([g.flatten() for g in grads]) @ v, params)
    torch.testing.assert_close(ritz.Hessian(risk) @ v, torch.cat([g.flatten() for g in truth]))


@pytest.mark.parametrize("name", CASES)
def test_a_quadratic_form_of_the_ggn_is_the_variance_of_the_outputs_change(name):
    # v' J' (diag p - p p') J v = Var_p (J v), J v by two backward passes, as the derivative of u' J v in u
    build, (x, _) = CASES[name]
    model, risk = build().eval(), risk_of(name)
    v, params = vector(risk.dim), list(model.parameters())
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        out = model(x)
        u = torch.zeros_like(out, requires_grad=True)
        grads = torch.autograd.grad(out, params, u, create_graph=True)
        (change,) = torch.autograd.grad(torch.cat([g.flatten() for g in grads]) @ v, u)
    p = out.detach().softmax(-1)
    truth = ((p * change**2).sum(-1) - (p * change).sum(-1) ** 2).mean()
    torch.testing.assert_close(v @ (ritz.GGN(risk) @ v), truth)


@pytest.mark.parametrize(
    "build",
    [
        lambda: models.lenet5(3, seed=0),
        lambda: models.all_cnn_c(3, width=0.05, seed=0),
        lambda: models.vgg16(3, width=0.05, seed=0),
        lambda: models.vgg16_bn(3, width=0.05, seed=0),
        lambda: models.preresnet164(3, width=0.125, seed=0),
        lambda: models.wide_resnet28_10(3, width=0.025, seed=0),
        lambda: models.resnet18(3, width=0.05, seed=0),
    ],
    ids=["lenet5", "all_cnn_c", "vgg16", "vgg16_bn", "preresnet164", "wide_resnet28_10", "resnet18"],
)
def test_kfac_moves_every_layer_against_its_gradient(build):
    model = build().train()
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    x, y = images(first.in_channels, 28 if first.in_channels == 1 else 32)
    with torch.random.fork_rng():  # dropout
        torch.default_generator.manual_seed(0)
        optimizer = ritz.optim.KFAC(model, lr=0.01, damping=0.1)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    along: Counter[str] = Counter()  # gradient times step; a layer's weight and bias are moved as one
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        along[name.rpartition(".")[0]] += float((p.grad * (p.detach() - before[name])).sum())
    assert max(along.values()) < 0, along


def test_kfac_trains_gpt():
    model, (x, y) = little_gpt(), text()
    optimizer = ritz.optim.KFAC(model, lr=0.05, damping=0.1, loss=CrossEntropy(class_dim=-1))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


def test_gpt_with_weights_apart_has_kronecker_factors():
    risk = ritz.Risk(little_gpt(tied=False), nn.CrossEntropyLoss(), text())
    v = vector(risk.dim)
    assert v @ (ritz.KFACOperator(risk) @ v) > 0


@pytest.mark.parametrize("name", ["lenet5", "all_cnn_c", "vgg16_bn", "resnet18"])
def test_per_sample_traces_of_a_network_that_is_piecewise_linear_are_exact(name):
    traces = ritz.sample_traces(risk_of(name))
    assert traces.exact
    build, (x, y) = CASES[name]
    single = ritz.Risk(build(), nn.CrossEntropyLoss(), (x[:1], y[:1]))
    truth = ritz.trace(ritz.GGN(single), method="exact").value
    torch.testing.assert_close(traces.value[0], torch.as_tensor(truth).to(traces.value))
