"""Residual networks for 32 x 32 images: a stem, stages of sums body(x) + shortcut(x), a mean over the image, a head."""

from collections.abc import Callable

from torch import nn

from .building import Residual, check_sizes, he_normal_, named, scaled, weights_from

Block = Callable[[int, int, int], nn.Module]  # input channels, output channels, stride


def preresnet164(
    num_classes: int = 100, *, in_channels: int = 3, width: float = 1.0, seed: int | None = None
) -> nn.Sequential:
    """PreResNet-164 (He et al. 2016, Identity Mappings): 1,726,388 parameters on CIFAR-100.

    Seed 000, figure 4, and seed 002, table 4. Three stages of 18 bottlenecks, BN-ReLU-conv 1 x 1, BN-ReLU-conv 3 x 3,
    BN-ReLU-conv 1 x 1 of 16, 32, 64 channels and four times as many at the end; no convolution has a bias. The shortcut
    is the input itself, or a 1 x 1 convolution of it, before normalisation, where channels or size change. As in the
    code of Izmailov et al. (2018), on which the authors' is built, convolutions start from N(0, 2 / (k^2 C_out)), the
    head as torch's. With 10 classes 1,703,258 parameters.

    Args:
        num_classes: Outputs.
        in_channels: 3 for colours.
        width: Multiplies all channels; less than 1 for a quick try, which is not the paper's network.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> with torch.device("meta"):  # shapes alone
        ...     sum(p.numel() for p in preresnet164().parameters())
        1726388
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    base = [scaled(channels, width) for channels in (16, 32, 64)]
    with weights_from(seed):
        return named(
            stem=_conv(in_channels, base[0], 3),
            **_stages(_bottleneck, base[0], [4 * channels for channels in base], num_blocks=18),
            norm=nn.BatchNorm2d(4 * base[-1]),
            relu=nn.ReLU(inplace=True),
            **_head(4 * base[-1], num_classes),
        )


def wide_resnet28_10(
    num_classes: int = 100, *, in_channels: int = 3, width: float = 1.0, seed: int | None = None
) -> nn.Sequential:
    """WideResNet-28-10 (Zagoruyko and Komodakis 2016) with a bias in every convolution: 36,546,980 parameters.

    Seed 000, figure 5, and seed 002, table 5, on CIFAR-100. Three stages of four blocks, BN-ReLU-conv 3 x 3 twice, of
    160, 320, 640 channels. The published network has no biases and 36,536,884 parameters; the printed count is that of
    the code of Izmailov et al. (2018), followed here in the rest too: the stride is in the second convolution of a
    block, the 1 x 1 shortcut takes the input before normalisation, the last BatchNorm forgets at 0.9 (others at 0.1),
    dropout is 0, and all first weights are torch's, since that code never calls its own initialisation.

    Args:
        num_classes: Outputs.
        in_channels: 3 for colours.
        width: Multiplies all channels; less than 1 for a quick try, which is not the paper's network.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> with torch.device("meta"):  # shapes alone
        ...     sum(p.numel() for p in wide_resnet28_10().parameters())
        36546980
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    stem, *stages = (scaled(channels, width) for channels in (16, 160, 320, 640))
    with weights_from(seed):
        return named(
            stem=nn.Conv2d(in_channels, stem, 3, padding=1),
            **_stages(_wide_block, stem, stages, num_blocks=4),
            norm=nn.BatchNorm2d(stages[-1], momentum=0.9),
            relu=nn.ReLU(inplace=True),
            **_head(stages[-1], num_classes),
        )


def resnet18(
    num_classes: int = 10, *, in_channels: int = 3, width: float = 1.0, seed: int | None = None
) -> nn.Sequential:
    """ResNet-18 (He et al. 2016) for small images: 11,173,962 parameters on CIFAR-10, 11,220,132 on CIFAR-100.

    Four stages of two blocks, conv-BN-ReLU-conv-BN of 64, 128, 256, 512 channels without biases, ReLU after the sum.
    Where ImageNet's has a 7 x 7 convolution of stride 2 and pooling at the start, this has a 3 x 3 convolution, as is
    usual on CIFAR; the shortcut is a 1 x 1 convolution and BatchNorm where channels change. None of the seeds trains
    it. The first weights are torch's.

    Args:
        num_classes: Outputs.
        in_channels: 3 for colours.
        width: Multiplies all channels; less than 1 for a quick try, which is not the published network.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> with torch.device("meta"):  # shapes alone
        ...     sum(p.numel() for p in resnet18().parameters())
        11173962
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    stages = [scaled(channels, width) for channels in (64, 128, 256, 512)]
    with weights_from(seed):
        return named(
            stem=nn.Conv2d(in_channels, stages[0], 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(stages[0]),
            relu=nn.ReLU(inplace=True),
            **_stages(_basic_block, stages[0], stages, num_blocks=2),
            **_head(stages[-1], num_classes),
        )


def _stages(block: Block, channels: int, stages: list[int], num_blocks: int) -> dict[str, nn.Module]:
    """Blocks of the same channels; the first of each stage after the first one halves the image."""
    found: dict[str, nn.Module] = {}
    for i, outputs in enumerate(stages, 1):
        blocks = []
        for j in range(num_blocks):
            blocks.append(block(channels, outputs, 2 if i > 1 and j == 0 else 1))
            channels = outputs
        found[f"stage{i}"] = nn.Sequential(*blocks)
    return found


def _head(channels: int, num_classes: int) -> dict[str, nn.Module]:
    return {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels, num_classes)}


def _bottleneck(inputs: int, outputs: int, stride: int) -> nn.Module:
    inner = outputs // 4
    body = nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        _conv(inputs, inner, 1),
        nn.BatchNorm2d(inner),
        nn.ReLU(inplace=True),
        _conv(inner, inner, 3, stride),
        nn.BatchNorm2d(inner),
        nn.ReLU(inplace=True),
        _conv(inner, outputs, 1),
    )
    same = inputs == outputs and stride == 1
    return Residual(body, nn.Identity() if same else _conv(inputs, outputs, 1, stride))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return he_normal_(nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False))


def _wide_block(inputs: int, outputs: int, stride: int) -> nn.Module:
    body = nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, stride, padding=1),
    )
    same = inputs == outputs and stride == 1
    return Residual(body, nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride))


def _basic_block(inputs: int, outputs: int, stride: int) -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
    )
    shortcut: nn.Module = nn.Identity()
    if inputs != outputs or stride != 1:
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
    return nn.Sequential(Residual(body, shortcut), nn.ReLU(inplace=True))
