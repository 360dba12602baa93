"""Networks of fully connected layers: images are flattened, so (N, 1, 28, 28) and (N, 784) are both taken."""

from collections.abc import Sequence

from torch import nn

from .building import check_sizes, named, weights_from


def softmax_regression(num_classes: int = 10, *, in_features: int = 784, seed: int | None = None) -> nn.Sequential:
    """One affine layer, W x + b: 7,850 parameters on MNIST (seed 000, figure 1; seed 004, figures 4 to 6).

    The first weights are torch's, uniform in +-1 / sqrt(in_features); the papers say nothing of theirs.

    Args:
        num_classes: Outputs.
        in_features: Numbers in one input.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> sum(p.numel() for p in softmax_regression().parameters())
        7850
    """
    return mlp(num_classes, in_features=in_features, hidden=(), seed=seed)


def mlp(
    num_classes: int = 10, *, in_features: int = 784, hidden: Sequence[int] = (10, 100), seed: int | None = None
) -> nn.Sequential:
    """784-10-100-10 with ReLU and biases: 9,960 parameters on MNIST (seed 000, figure 2; seed 002, table 1).

    The papers say a single hidden layer of 100 units, and 9,960 parameters. 784-100-10 has 79,510; 784-10-100-10 has
    the printed count, and after training the printed lambda_1. The first weights are torch's, uniform in
    +-1 / sqrt(inputs of the layer).

    Args:
        num_classes: Outputs.
        in_features: Numbers in one input.
        hidden: Widths between the two.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> sum(p.numel() for p in mlp().parameters())
        9960
    """
    check_sizes(num_classes=num_classes, in_features=in_features, **{f"hidden[{i}]": n for i, n in enumerate(hidden)})
    return _dense((in_features, *hidden, num_classes), batch_norm=False, seed=seed)


def keskar_f1(num_classes: int = 10, *, in_features: int = 784, seed: int | None = None) -> nn.Sequential:
    """784-512-512-512-512-512-10, BatchNorm and ReLU after each hidden layer: 1,462,794 parameters on MNIST.

    Network F1 of Keskar et al. (2017, appendix B.1), which seed 003 trains with small and large batches. Layers have
    biases, as Keras' have; in training BatchNorm takes them out again, so that the loss does not depend on those of the
    hidden layers. Without them there would be 1,460,234 parameters. Seed 003 also has it on CIFAR-10
    (`in_features=3072`: 2,634,250). The first weights are torch's; BatchNorm starts with scale 1 and shift 0.

    Args:
        num_classes: Outputs.
        in_features: Numbers in one input.
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Example:
        >>> sum(p.numel() for p in keskar_f1().parameters())
        1462794
    """
    check_sizes(num_classes=num_classes, in_features=in_features)
    return _dense((in_features, *5 * [512], num_classes), batch_norm=True, seed=seed)


def _dense(sizes: Sequence[int], *, batch_norm: bool, seed: int | None) -> nn.Sequential:
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    last = len(sizes) - 1
    with weights_from(seed):
        for i in range(1, len(sizes)):
            layers[f"fc{i}"] = nn.Linear(sizes[i - 1], sizes[i])
            if i < last and batch_norm:
                layers[f"norm{i}"] = nn.BatchNorm1d(sizes[i])
            if i < last:
                layers[f"relu{i}"] = nn.ReLU()
    return named(**layers)
