"""Layer rules against gradients taken one sample and one cotangent at a time."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ritz import layers
from ritz.captures import Capture
from ritz.errors import UnsupportedError
from ritz.layers import rule_of, sample_gradients

torch.set_default_dtype(torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and buffer away from its default, so that none is 0 or 1 by chance."""
    g = seeded(seed)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=g)
    for name, b in module.named_buffers():
        if b.is_floating_point():
            b.data = torch.rand(b.shape, generator=g) + (0.5 if "var" in name else 0.0)
    return module.eval()


def captured(module: nn.Module, x: torch.Tensor, num: int = 3) -> Capture:
    out = module(x)
    grad = torch.randn(num, *out.shape, generator=seeded(1))
    names = {own: f"layer.{own}" for own, _ in module.named_parameters()}
    return Capture("layer", module, x, grad, names, dict(module.named_buffers()))


def squares(capture: Capture, size: int) -> dict[str, torch.Tensor]:
    """Squares of per-sample gradients in full, (size, *shape): all rows of the other samples are cut away."""
    rows = len(capture.input) // size
    shapes = {name: getattr(capture.module, own).shape for own, name in capture.params.items()}
    found = {name: torch.zeros(size, *shape) for name, shape in shapes.items()}
    for i in range(size):
        own = slice(i * rows, (i + 1) * rows)
        for cotangent in capture.grad:
            capture.module.zero_grad()
            (capture.module(capture.input[own]) * cotangent[own]).sum().backward()
            for attribute, name in capture.params.items():
                found[name][i] += getattr(capture.module, attribute).grad.square()
    return found


def norms(capture: Capture, size: int) -> dict[str, torch.Tensor]:
    return {name: own.norms() for name, own in sample_gradients(capture, size).items()}


def entries(capture: Capture, size: int) -> dict[str, torch.Tensor]:
    return {name: own.entries() for name, own in sample_gradients(capture, size).items()}


def check(capture: Capture, size: int) -> None:
    truth = squares(capture, size)
    wanted = {name: own.flatten(1).sum(1) for name, own in truth.items()}
    torch.testing.assert_close(norms(capture, size), wanted, rtol=1e-10, atol=1e-10)
    wanted = {name: own.sum(0) for name, own in truth.items()}
    torch.testing.assert_close(entries(capture, size), wanted, rtol=1e-10, atol=1e-10)
    assert all(float(own.flatten(1).sum(1).min()) > 0 for own in truth.values())


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 4, shape, generator=seeded(2))


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(3))


CASES = {
    "linear": (nn.Linear(3, 4), data(5, 3)),
    "linear without bias": (nn.Linear(3, 4, bias=False), data(5, 3)),
    "linear on few tokens, by Gram matrices": (nn.Linear(7, 8), data(5, 2, 7)),
    "linear on many tokens, directly": (nn.Linear(3, 2), data(5, 9, 3)),
    "linear on a grid": (nn.Linear(3, 2), data(5, 2, 3, 3)),
    "linear on one token": (nn.Linear(3, 2), data(5, 1, 3)),
    "conv1d": (nn.Conv1d(2, 3, 3), data(5, 2, 8)),
    "conv2d": (nn.Conv2d(2, 3, 3), data(5, 2, 6, 7)),
    "conv2d by Gram matrices": (nn.Conv2d(6, 8, 3), data(5, 6, 4, 4)),
    "conv2d to one pixel": (nn.Conv2d(2, 3, (4, 3)), data(5, 2, 4, 3)),
    "conv3d": (nn.Conv3d(2, 3, 2), data(5, 2, 3, 4, 3)),
    "conv with stride": (nn.Conv2d(2, 3, 3, stride=2), data(5, 2, 8, 7)),
    "conv with padding": (nn.Conv2d(2, 3, 3, padding=(2, 1)), data(5, 2, 4, 5)),
    "conv with dilation": (nn.Conv2d(2, 3, (3, 2), dilation=(2, 3)), data(5, 2, 7, 7)),
    "conv with groups": (nn.Conv2d(4, 6, 3, groups=2), data(5, 4, 5, 5)),
    "depthwise conv": (nn.Conv2d(4, 4, 3, groups=4, padding=1), data(5, 4, 5, 5)),
    "conv with everything": (nn.Conv2d(4, 6, (3, 2), (2, 1), (2, 1), (2, 1), 2), data(5, 4, 9, 6)),
    "conv padded to the same size": (nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), data(5, 2, 6, 6)),
    "conv not padded": (nn.Conv2d(2, 3, 3, padding="valid"), data(5, 2, 5, 5)),
    "conv padded by reflection": (nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), data(5, 2, 5, 5)),
    "conv padded in a circle": (nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"), data(5, 2, 6)),
    "batch norm on features": (nn.BatchNorm1d(3), data(5, 3)),
    "batch norm on images": (nn.BatchNorm2d(3), data(5, 3, 4, 2)),
    "layer norm": (nn.LayerNorm(3), data(5, 4, 3)),
    "layer norm of two dimensions": (nn.LayerNorm((4, 3)), data(5, 4, 3)),
    "layer norm without bias": (nn.LayerNorm(3, bias=False), data(5, 3)),
    "group norm": (nn.GroupNorm(2, 4), data(5, 4, 3, 3)),
    "embedding": (nn.Embedding(4, 3), tokens(5, 6)),
    "embedding of one token": (nn.Embedding(4, 3), tokens(5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's word on the cost
@pytest.mark.parametrize("name", CASES)
def test_squares_of_samples_and_of_entries_are_those_of_per_sample_gradients(name):
    module, x = CASES[name]
    check(captured(randomised(module), x), len(x))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("embedding of one")])
def test_samples_may_have_several_rows_each(name):
    module, x = CASES[name]
    x = torch.cat([x, x.flip(0)])[:6]  # 3 samples of 2 rows
    check(captured(randomised(module), x), 3)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", CASES)
def test_a_small_workspace_changes_nothing(name, monkeypatch):
    module, x = CASES[name]
    capture = captured(randomised(module), x)
    whole = norms(capture, len(x)), entries(capture, len(x))
    monkeypatch.setitem(layers._WORKSPACE, "cpu", 100)
    torch.testing.assert_close((norms(capture, len(x)), entries(capture, len(x))), whole)


def test_only_chosen_parameters_are_looked_at():
    capture = captured(nn.Linear(3, 4), data(5, 3))
    part = Capture("layer", capture.module, capture.input, capture.grad, {"bias": "b"}, {})
    assert norms(part, 5).keys() == {"b"}
    torch.testing.assert_close(norms(part, 5)["b"], norms(capture, 5)["layer.bias"])


def test_rows_that_do_not_hold_the_samples_are_refused():
    with pytest.raises(UnsupportedError, match=r"the input \(5, 3\) of layer does not hold 2 samples"):
        sample_gradients(captured(nn.Linear(3, 4), data(5, 3)), 2)
    image = captured(nn.Conv2d(2, 2, 3), data(2, 5, 5))
    with pytest.raises(UnsupportedError, match="without a batch dimension"):
        sample_gradients(image, 2)


def test_normalisation_by_the_batch_is_refused():
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    with pytest.raises(UnsupportedError, match="normalises by the batch"):
        sample_gradients(captured(norm, data(5, 3)), 5)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_subclasses_and_replaced_forwards_have_no_rule():
    assert rule_of(nn.Linear(1, 1)) is not None
    assert rule_of(Doubled(1, 1)) is None
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: x
    assert rule_of(layer) is None
    assert rule_of(nn.Embedding(2, 2, max_norm=1.0)) is None
    assert rule_of(nn.Bilinear(1, 1, 1)) is None
    with pytest.raises(UnsupportedError, match="PReLU has no layer rule"):
        sample_gradients(captured(nn.PReLU(), data(5, 3)), 5)


@pytest.mark.parametrize("numbers", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 4), lambda: nn.Conv1d(3, 4, 2), lambda: nn.BatchNorm1d(3)])
def test_gradients_in_fewer_digits_than_inputs_are_squared_in_those_of_the_inputs(build, numbers):
    """As under autocast, where a layer takes float32 and gives 16-bit numbers."""
    module = randomised(build())
    wide = captured(module, data(5, 3, 4) if not isinstance(module, nn.Linear) else data(5, 3))
    wide = replace(wide, grad=wide.grad.to(numbers).double())
    narrow = replace(wide, input=wide.input.float(), grad=wide.grad.to(numbers))
    for name, found in sample_gradients(narrow, 5).items():
        truth = sample_gradients(wide, 5)[name]
        torch.testing.assert_close(found.norms().double(), truth.norms(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.entries().double(), truth.entries(), rtol=1e-5, atol=1e-6)
