"""The networks against their published descriptions, and against the formulas written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ritz import models
from ritz.models.building import Residual


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


def sides(model: nn.Sequential) -> dict[str, tuple[int, ...]]:
    """Channels and sides of the image after each part."""
    found, x = {}, torch.empty(1, 3, 32, 32, device="meta")
    for name, part in model.named_children():
        x = part(x)
        found[name] = tuple(x.shape[1:])
    return found


def images(channels: int = 3, side: int = 32) -> Tensor:
    return torch.randn(4, channels, side, side, generator=torch.Generator().manual_seed(1))


def on_meta(build) -> nn.Sequential:
    with torch.device("meta"):
        return build()


# ------------------------------------------------------------------------------------------------ counts


def test_preresnet164_has_164_layers_with_weights_on_its_path():
    model = on_meta(models.preresnet164)
    blocks = [m for m in model.modules() if isinstance(m, Residual)]
    shortcuts = [b.shortcut for b in blocks if isinstance(b.shortcut, nn.Conv2d)]
    assert len(blocks) == 3 * 18
    assert len(convolutions(model)) - len(shortcuts) + 1 == 164
    assert [c.kernel_size[0] for c in convolutions(blocks[5])] == [1, 3, 1]
    assert [(c.in_channels, c.out_channels, c.stride[0]) for c in shortcuts] == [
        (16, 64, 1),
        (64, 128, 2),
        (128, 256, 2),
    ]
    assert all(c.bias is None for c in convolutions(model))


def test_preresnet164_halves_the_image_in_the_3_by_3_convolution_that_opens_a_stage():
    model = on_meta(models.preresnet164)
    strided = [(c.kernel_size[0], c.out_channels) for c in convolutions(model) if c.stride[0] == 2]
    assert sorted(strided) == [(1, 128), (1, 256), (3, 32), (3, 64)]
    found = sides(model)
    assert [found[f"stage{i}"] for i in (1, 2, 3)] == [(64, 32, 32), (128, 16, 16), (256, 8, 8)]


def test_wide_resnet_28_10_has_28_convolutions_all_with_biases():
    model = on_meta(models.wide_resnet28_10)
    shortcuts = [m.shortcut for m in model.modules() if isinstance(m, Residual) and isinstance(m.shortcut, nn.Conv2d)]
    assert len(convolutions(model)) == 28  # 1 + 3 * 4 * 2 + 3
    assert [(c.in_channels, c.out_channels, c.stride[0]) for c in shortcuts] == [
        (16, 160, 1),
        (160, 320, 2),
        (320, 640, 2),
    ]
    assert all(c.bias is not None for c in convolutions(model))
    found = sides(model)
    assert [found[f"stage{i}"] for i in (1, 2, 3)] == [(160, 32, 32), (320, 16, 16), (640, 8, 8)]


def test_the_stride_of_wide_resnet_is_in_the_second_convolution_of_the_first_block():
    model = on_meta(models.wide_resnet28_10)
    for stage in (model.stage2, model.stage3):
        strides = [[c.stride[0] for c in convolutions(block.body)] for block in stage]
        assert strides == [[1, 2], [1, 1], [1, 1], [1, 1]]


def test_only_the_last_batchnorm_of_wide_resnet_forgets_fast():
    model = on_meta(models.wide_resnet28_10)
    norms = [m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms == [0.1] * 24 + [0.9]


def test_resnet18_has_18_layers_with_weights_on_its_path():
    model = on_meta(models.resnet18)
    shortcuts = [m for m in convolutions(model) if m.kernel_size[0] == 1]
    assert len(convolutions(model)) - len(shortcuts) + 1 == 18
    assert [c.stride[0] for c in shortcuts] == [2, 2, 2]
    found = sides(model)
    assert [found[f"stage{i}"] for i in (1, 2, 3, 4)] == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


def test_vgg16_has_13_convolutions_and_3_affine_layers_named_as_in_the_published_code():
    model = on_meta(models.vgg16)
    assert [c.out_channels for c in convolutions(model)] == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert names == ["classifier.1", "classifier.4", "classifier.6"]
    assert [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)][:3] == [
        "features.0",
        "features.2",
        "features.5",
    ]
    assert sides(model)["features"] == (512, 1, 1)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]


def test_all_cnn_c_has_the_published_parameters_in_each_convolution():
    model = on_meta(models.all_cnn_c)
    sizes = [sum(p.numel() for p in c.parameters()) for c in convolutions(model)]
    assert sizes == [2_688, 83_040, 83_040, 166_080, 331_968, 331_968, 331_968, 37_056, 19_300]
    found = sides(model)
    assert [found[f"conv{i}"][1] for i in range(1, 10)] == [32, 32, 16, 16, 16, 8, 6, 6, 6]
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.2, 0.5, 0.5]
    assert list(found).index("dropout2") == list(found).index("relu3") + 1


# ---------------------------------------------------------------------------------------------- formulas


def tensorflow_same(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """A convolution with the padding that TensorFlow calls SAME: ceil(side / stride) outputs, the odd pixel last."""
    side, kernel, stride = x.shape[-1], conv.kernel_size[0], conv.stride[0]
    total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
    x = F.pad(x, 2 * (total // 2, total - total // 2))
    return F.conv2d(x, conv.weight, conv.bias, stride)


def test_all_cnn_c_is_nine_rectified_convolutions_with_tensorflows_padding():
    model, x = models.all_cnn_c(num_classes=5, width=0.1, seed=0).eval(), images()
    out = x
    for i, conv in enumerate(convolutions(model), 1):
        out = (F.conv2d(out, conv.weight, conv.bias) if i == 7 else tensorflow_same(out, conv)).relu()
    torch.testing.assert_close(model(x), out.mean((2, 3)))
    assert (model(x) >= 0).all()


def normalise(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    scale, shift = (p.view(1, -1, 1, 1) for p in (norm.weight, norm.bias))
    return scale * (x - mean) / (var + norm.eps).sqrt() + shift


def of_type(model: nn.Module, *types: type[nn.Module]) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, types)]


@pytest.mark.parametrize("build", [models.preresnet164, models.wide_resnet28_10])
def test_a_pre_activation_network_is_its_sums_written_out(build):
    model, x = build(num_classes=5, width=0.1, seed=0).train(), images()
    out = model.stem(x)
    for block in of_type(model, Residual):
        y = out
        for norm, conv in zip(of_type(block.body, nn.BatchNorm2d), convolutions(block.body), strict=True):
            padding = conv.kernel_size[0] // 2
            y = F.conv2d(normalise(y, norm).relu(), conv.weight, conv.bias, conv.stride, padding)
        cut = block.shortcut
        changed = isinstance(cut, nn.Conv2d)
        out = y + (F.conv2d(out, cut.weight, cut.bias, cut.stride) if changed else out)
    expected = normalise(out, model.norm).relu().mean((2, 3)) @ model.fc.weight.T + model.fc.bias
    torch.testing.assert_close(model(x), expected)


def test_resnet18_is_its_sums_written_out():
    model, x = models.resnet18(num_classes=5, width=0.1, seed=0).train(), images()
    out = normalise(model.stem(x), model.norm).relu()
    for block in of_type(model, Residual):
        (first, second), (a, b) = convolutions(block.body), of_type(block.body, nn.BatchNorm2d)
        y = normalise(F.conv2d(out, first.weight, None, first.stride, 1), a).relu()
        y = normalise(F.conv2d(y, second.weight, None, 1, 1), b)
        if not isinstance(block.shortcut, nn.Identity):
            conv, norm = block.shortcut
            out = normalise(F.conv2d(out, conv.weight, None, conv.stride), norm)
        out = (y + out).relu()
    expected = out.mean((2, 3)) @ model.fc.weight.T + model.fc.bias
    torch.testing.assert_close(model(x), expected)


def test_lenet5_is_its_formula():
    model, x = models.lenet5(seed=0), images(1, 28)
    out = F.max_pool2d(F.conv2d(F.pad(x, (2, 2, 2, 2)), model.conv1.weight, model.conv1.bias).relu(), 2)
    out = F.max_pool2d(F.conv2d(out, model.conv2.weight, model.conv2.bias).relu(), 2).flatten(1)
    out = (out @ model.fc1.weight.T + model.fc1.bias).relu()
    out = (out @ model.fc2.weight.T + model.fc2.bias).relu()
    torch.testing.assert_close(model(x), out @ model.fc3.weight.T + model.fc3.bias)


def test_biases_before_batchnorm_do_not_change_the_training_loss_of_keskars_network():
    model = models.keskar_f1(seed=0).train()
    F.cross_entropy(model(images(1, 28)), torch.arange(4)).backward()
    for name, p in model.named_parameters():
        size = p.grad.abs().max()
        assert (size < 1e-12) == (name in {f"fc{i}.bias" for i in range(1, 6)}), name


# -------------------------------------------------------------------------------------------------- gpt


def tokens(size: int = 3, length: int = 6) -> Tensor:
    return torch.randint(7, (size, length), generator=torch.Generator().manual_seed(2))


def little_gpt() -> nn.Sequential:
    return models.gpt(7, context=6, width=8, num_layers=2, num_heads=2, seed=0)


def attention(x: Tensor, module: nn.Module) -> Tensor:
    """Heads one by one, with the matrix of weights written out."""
    q, k, v = (x @ module.qkv.weight.T + module.qkv.bias).chunk(3, -1)
    heads = []
    for a, b, c in zip(*(part.chunk(module.num_heads, -1) for part in (q, k, v)), strict=True):
        scores = a @ b.mT / math.sqrt(a.shape[-1])
        past = torch.ones(scores.shape[-2:]).tril().bool()
        heads.append(scores.masked_fill(~past, -math.inf).softmax(-1) @ c)
    return torch.cat(heads, -1) @ module.out.weight.T + module.out.bias


def test_gpt_is_its_formula():
    model, x = little_gpt(), tokens()
    out = model.embedding.token.weight[x] + model.embedding.position.weight
    for block in model.blocks:
        out = out + attention(block.attention.body.norm(out), block.attention.body.attend)
        mlp = block.mlp.body
        out = out + F.gelu(mlp.norm(out) @ mlp.fc.weight.T + mlp.fc.bias, approximate="tanh") @ mlp.out.weight.T
        out = out + mlp.out.bias
    torch.testing.assert_close(model(x), model.norm(out) @ model.embedding.token.weight.T)


def test_gpt_does_not_see_what_comes_after():
    model, x = little_gpt(), tokens()
    changed = x.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 7
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert ((before - after)[:, 4:].abs().amax((0, 2)) > 1e-6).all()
