"""Networks of convolutions one after another."""

from torch import nn

from .building import check_sizes, glorot_normal_, he_normal_, named, scaled, weights_from

_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: halve the image


def lenet5(
    num_classes: int = 10, *, in_channels: int = 1, image_size: int = 28, seed: int | None = None
) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling, 6-16-120-84-10: 61,706 parameters on MNIST.

    Seed 003 says "LeNet" and no more. This is the usual one of today: convolutions 5 x 5, each followed by pooling
    2 x 2, and three affine layers. MNIST's images are padded to 32 x 32, as LeCun's were; CIFAR-10's need none
    (`in_channels=3, image_size=32`: 62,006). The first weights are torch's.

    Args:
        num_classes: Outputs.
        in_channels: 1 for grey images, 3 for colours.
        image_size: Side of the square images, 28 or 32.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Raises:
        ValueError: If the side is another one.

    Example:
        >>> sum(p.numel() for p in lenet5().parameters())
        61706
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    if image_size not in (28, 32):
        raise ValueError(f"LeNet-5 takes images of side 28 or 32, got {image_size!r}: resize them first")
    with weights_from(seed):
        return named(
            conv1=nn.Conv2d(in_channels, 6, 5, padding=(32 - image_size) // 2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),  # 28 -> 14
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),  # 10 -> 5
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * 5 * 5, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, num_classes),
        )


def all_cnn_c(
    num_classes: int = 100, *, in_channels: int = 3, width: float = 1.0, seed: int | None = None
) -> nn.Sequential:
    """All-CNN-C (Springenberg et al. 2015), nine convolutions with biases: 1,387,108 parameters on CIFAR-100.

    The "9-layer CNN" of seed 000, figure 3, and seed 002, table 2, in the form of DeepOBS (Schneider et al. 2019), as
    in the authors' code: dropout 0.2 on the image and 0.5 after each stride, ReLU after the last convolution too, so
    that no output is negative, and TensorFlow's padding, where a stride of 2 pads right and below only. Weights start
    from Glorot's normal law, biases at 0.1.

    Args:
        num_classes: Outputs.
        in_channels: 3 for colours.
        width: Multiplies all channels; less than 1 for a quick try, which is not the paper's network.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> sum(p.numel() for p in all_cnn_c().parameters())
        1387108
    """
    check_sizes(num_classes=num_classes, in_channels=in_channels)
    a, b = scaled(96, width), scaled(192, width)
    plan = [(a, 3, 1), (a, 3, 1), (a, 3, 2), (b, 3, 1), (b, 3, 1), (b, 3, 2), (b, 3, 1), (b, 1, 1), (num_classes, 1, 1)]
    layers: dict[str, nn.Module] = {"dropout1": nn.Dropout(0.2)}
    with weights_from(seed):
        for i, (channels, kernel, stride) in enumerate(plan, 1):
            if stride == 2:
                layers[f"pad{i}"] = nn.ZeroPad2d((0, 1, 0, 1))
            padding = 1 if i in (1, 2, 4, 5) else 0  # the seventh takes 8 x 8 to 6 x 6
            conv = nn.Conv2d(in_channels, channels, kernel, stride, padding)
            layers[f"conv{i}"], layers[f"relu{i}"] = glorot_normal_(conv, bias=0.1), nn.ReLU()
            if stride == 2:
                layers[f"dropout{1 + i // 3}"] = nn.Dropout(0.5)
            in_channels = channels
    return named(**layers, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())


def vgg16(
    num_classes: int = 100, *, in_channels: int = 3, width: float = 1.0, seed: int | None = None
) -> nn.Sequential:
    """VGG-16 (Simonyan and Zisserman 2015) for 32 x 32 images: 15,291,300 parameters on CIFAR-100.

    The network of seed 004, which says "over 16 million": 13 convolutions 3 x 3 with biases, five max-poolings, and an
    affine head 512-512-512-100 with dropout 0.5 before its first two layers. With 10 classes 15,245,130 parameters. As
    in the authors' code, convolutions start from N(0, 2 / (9 C_out)) with bias 0, affine layers as torch's. Names of
    parameters are those of that code, "features.0.weight" and so on.

    Args:
        num_classes: Outputs.
        in_channels: 3 for colours.
        width: Multiplies all channels; less than 1 for a quick try, which is not the paper's network.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> with torch.device("meta"):  # shapes alone
        ...     sum(p.numel() for p in vgg16().parameters())
        15291300
    """
    return _vgg16(num_classes, in_channels, width, seed, batch_norm=False)


def vgg16_bn(
    num_classes: int = 100, *, in_channels: int = 3, width: float = 1.0, seed: int | None = None
) -> nn.Sequential:
    """VGG-16 with BatchNorm between convolution and ReLU: 15,299,748 parameters on CIFAR-100 (seed 000, figures 6, 7).

    All else is as in `vgg16`, the convolutions' biases included; at equal seed so are the first weights. BatchNorm
    starts with scale 1 and shift 0. With 10 classes 15,253,578 parameters.

    Args:
        num_classes: Outputs.
        in_channels: 3 for colours.
        width: Multiplies all channels; less than 1 for a quick try, which is not the paper's network.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> with torch.device("meta"):  # shapes alone
        ...     sum(p.numel() for p in vgg16_bn().parameters())
        15299748
    """
    return _vgg16(num_classes, in_channels, width, seed, batch_norm=True)


def _vgg16(num_classes: int, channels: int, width: float, seed: int | None, *, batch_norm: bool) -> nn.Sequential:
    check_sizes(num_classes=num_classes, in_channels=channels)
    features: list[nn.Module] = []
    with weights_from(seed):
        for published in _VGG16:
            if not published:
                features.append(nn.MaxPool2d(2))
                continue
            outputs = scaled(published, width)
            features.append(he_normal_(nn.Conv2d(channels, outputs, 3, padding=1)))
            if batch_norm:
                features.append(nn.BatchNorm2d(outputs))
            features.append(nn.ReLU(inplace=True))
            channels = outputs
        classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(channels, channels),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(channels, channels),
            nn.ReLU(inplace=True),
            nn.Linear(channels, num_classes),
        )
    return named(features=nn.Sequential(*features), flatten=nn.Flatten(), classifier=classifier)
