"""Every network: its published size, its shapes, where its weights come from, what it refuses."""

import copy
import inspect
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from ritz import models
from ritz.batches import isolated_rng
from ritz.papers.mnist_mlp import make_network
from ritz.sameness import is_static

PUBLISHED = {
    "softmax_regression": 7_850,
    "mlp": 9_960,
    "keskar_f1": 1_462_794,
    "lenet5": 61_706,
    "all_cnn_c": 1_387_108,
    "vgg16": 15_291_300,
    "vgg16_bn": 15_299_748,
    "preresnet164": 1_726_388,
    "wide_resnet28_10": 36_546_980,
    "resnet18": 11_173_962,
    "gpt": 809_856,
}
CONVOLUTIONAL = ("all_cnn_c", "vgg16", "vgg16_bn", "preresnet164", "wide_resnet28_10", "resnet18")
RESIDUAL = ("preresnet164", "wide_resnet28_10", "resnet18")
CLASSES = {"gpt": 65} | dict.fromkeys(("all_cnn_c", "vgg16", "vgg16_bn", "preresnet164", "wide_resnet28_10"), 100)
EVERY = pytest.mark.parametrize("name", models.__all__)


def build(name: str, **kwargs) -> nn.Module:
    return getattr(models, name)(**kwargs)


def small(name: str, **kwargs) -> nn.Module:
    """The network, narrow where it would be slow."""
    if name in CONVOLUTIONAL:
        kwargs = {"width": 0.25 if name == "preresnet164" else 0.1, **kwargs}  # narrower, channels die
    if name == "gpt":
        kwargs = {"width": 8, "context": 6, "num_layers": 2, "num_heads": 2, **kwargs}
    return build(name, **kwargs)


def inputs(name: str, size: int = 2) -> torch.Tensor:
    generator = None if torch.get_default_device().type == "meta" else torch.Generator().manual_seed(5)
    if name == "gpt":
        return torch.randint(7, (size, 6), generator=generator)
    return torch.randn(size, *((3, 32, 32) if name in CONVOLUTIONAL else (1, 28, 28)), generator=generator)


def shapes_alone(name: str, **kwargs) -> nn.Module:
    with torch.device("meta"):
        return build(name, **kwargs)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def states() -> tuple[bytes, bytes, object]:
    array = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), array[1].tobytes(), random.getstate()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


# ------------------------------------------------------------------------------------------------- sizes


def test_every_public_network_has_a_published_count_here():
    assert set(PUBLISHED) == set(models.__all__)


@EVERY
def test_without_arguments_it_has_exactly_the_published_parameters(name):
    assert count(shapes_alone(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("preresnet164", {"num_classes": 10}, 1_703_258),
        ("vgg16", {"num_classes": 10}, 15_245_130),
        ("vgg16_bn", {"num_classes": 10}, 15_253_578),
        ("resnet18", {"num_classes": 100}, 11_220_132),
        ("keskar_f1", {"in_features": 3072}, 2_634_250),
        ("lenet5", {"in_channels": 3, "image_size": 32}, 62_006),
        ("mlp", {"hidden": (100,)}, 79_510),
        ("gpt", {"tied": False}, 809_856 + 65 * 128),
    ],
)
def test_on_other_data_it_has_the_known_parameters(name, kwargs, expected):
    assert count(shapes_alone(name, **kwargs)) == expected


def test_the_published_wide_resnet_differs_by_its_convolutions_biases():
    model = shapes_alone("wide_resnet28_10")
    biases = sum(m.bias.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
    assert biases == 10_096
    assert count(model) - biases == 36_536_884


# ------------------------------------------------------------------------------------------------ shapes


@EVERY
def test_at_full_size_it_gives_one_output_for_each_class(name):
    with torch.device("meta"):
        out = build(name)(inputs(name))
    classes = CLASSES.get(name, 10)
    assert out.shape == ((2, 6, classes) if name == "gpt" else (2, classes))


@EVERY
def test_num_classes_is_the_first_argument_and_the_number_of_outputs(name):
    first = next(iter(inspect.signature(getattr(models, name)).parameters))
    assert first == "num_classes"
    assert small(name, num_classes=7, seed=0)(inputs(name)).shape[-1] == 7


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_in_channels_is_what_an_image_has(name):
    model = small(name, in_channels=2, seed=0)
    assert model(torch.zeros(2, 2, 32, 32)).shape == (2, CLASSES.get(name, 10))


@pytest.mark.parametrize("name", ["softmax_regression", "mlp", "keskar_f1"])
def test_a_dense_network_takes_images_and_rows_alike(name):
    model, x = small(name, seed=0).eval(), inputs(name)
    assert torch.equal(model(x), model(x.flatten(1)))


@EVERY
def test_the_gradient_reaches_every_parameter(name):
    model = small(name, num_classes=7, seed=0).eval()
    out = model(inputs(name, size=8))
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        assert p.grad.any(), key


@pytest.mark.parametrize("name", [name for name in models.__all__ if name not in (*RESIDUAL, "gpt")])
def test_it_is_made_of_torchs_own_layers(name):
    assert is_static(shapes_alone(name).modules())


# ----------------------------------------------------------------------------------------------- weights


@EVERY
def test_a_seed_gives_the_same_weights_and_leaves_the_global_generators_alone(name):
    before = states()
    first, again, other = small(name, seed=3), small(name, seed=3), small(name, seed=4)
    assert states() == before
    assert same(first, again)
    assert not same(first, other)


@EVERY
def test_without_a_seed_weights_come_from_torchs_generator(name):
    with isolated_rng(3):
        first, second = small(name), small(name)
    assert same(first, small(name, seed=3))
    assert not same(first, second)


@pytest.mark.gpu
@EVERY
def test_under_a_default_device_the_weights_are_made_there_and_its_generator_is_left_alone(name):
    with torch.device("cuda"):
        before = torch.cuda.get_rng_state()
        first, again = small(name, seed=3), small(name, seed=3)
        assert torch.equal(torch.cuda.get_rng_state(), before)
    assert {p.device.type for p in first.parameters()} == {"cuda"}
    assert same(first, again)


def test_the_mlp_is_the_network_of_the_reproduction_weight_for_weight():
    pairs = zip(models.mlp(seed=3).parameters(), make_network(3, torch.float64).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_batchnorm_does_not_change_the_other_first_weights_of_vgg():
    plain, normed = models.vgg16(width=0.1, seed=0), models.vgg16_bn(width=0.1, seed=0)
    layers = [[m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)] for model in (plain, normed)]
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(*layers, strict=True))


@pytest.mark.parametrize("name", ["vgg16", "vgg16_bn", "preresnet164"])
def test_convolutions_start_from_the_law_of_the_published_code(name):
    for conv in (m for m in build(name, width=0.5, seed=0).modules() if isinstance(m, nn.Conv2d)):
        expected = (2 / (conv.kernel_size[0] ** 2 * conv.out_channels)) ** 0.5
        spread = expected / (2 * conv.weight.numel()) ** 0.5  # standard error of a standard deviation
        assert abs(conv.weight.detach().std() - expected) < 5 * spread
        assert conv.bias is None or not conv.bias.any()


def test_all_cnn_c_starts_from_glorots_law_with_biases_of_a_tenth():
    for conv in (m for m in models.all_cnn_c(width=0.5, seed=0).modules() if isinstance(m, nn.Conv2d)):
        expected = (2 / (conv.kernel_size[0] ** 2 * (conv.in_channels + conv.out_channels))) ** 0.5
        assert abs(conv.weight.detach().std() - expected) < 5 * expected / (2 * conv.weight.numel()) ** 0.5
        assert conv.bias.eq(0.1).all()


def test_layers_that_feed_the_residual_sum_of_gpt_start_smaller():
    weights = dict(models.gpt(num_layers=2, seed=0).named_parameters())
    for name, p in weights.items():
        if p.ndim == 2:
            expected = 0.01 if name.endswith("out.weight") else 0.02  # sqrt(2 * 2) = 2
            assert abs(p.detach().std() - expected) < 5 * expected / (2 * p.numel()) ** 0.5
        else:
            assert p.eq(1.0 if name.endswith("norm.weight") else 0.0).all()


@EVERY
def test_weights_have_the_default_precision(name):
    torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in small(name, seed=0).parameters()} == {torch.float32}


# ------------------------------------------------------------------------------------------ copies, files


@EVERY
def test_copies_and_saved_weights_give_the_same_outputs(name):
    model, x = small(name, seed=0).eval(), inputs(name)
    out = model(x)
    loaded = small(name, seed=1).eval()
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(other(x), out)


def test_a_copy_of_gpt_stays_tied():
    model = copy.deepcopy(small("gpt", seed=0))
    assert model.head.weight is model.embedding.token.weight


# ----------------------------------------------------------------------------------------------- refusals


@EVERY
@pytest.mark.parametrize("classes", [0, -1, 2.5, True])
def test_a_senseless_number_of_classes_is_refused(name, classes):
    with pytest.raises(ValueError, match=f"num_classes must be a whole number of at least 1, got {classes}"):
        build(name, num_classes=classes)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_width_is_refused(name, width):
    with pytest.raises(ValueError, match=f"it must be finite and positive, got {width}"):
        build(name, width=width)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("mlp", {"hidden": (3, 0)}, r"hidden\[1\] must be a whole number of at least 1, got 0"),
        ("softmax_regression", {"in_features": 0}, "in_features must be"),
        ("lenet5", {"image_size": 30}, "images of side 28 or 32, got 30: resize them first"),
        ("lenet5", {"in_channels": 0}, "in_channels must be"),
        ("gpt", {"width": 10, "num_heads": 4}, "width = 10 cannot be shared by 4 heads"),
        ("gpt", {"num_layers": 0}, "num_layers must be"),
    ],
)
def test_a_senseless_size_is_refused(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(name, **kwargs)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match=r"the model has 6 positions, got 7 tokens; .* context=7"):
        small("gpt", seed=0)(torch.zeros(1, 7, dtype=torch.long))
