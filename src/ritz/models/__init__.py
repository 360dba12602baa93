"""The networks of the papers, with their published parameter counts.

Each is a function that takes the number of classes, and a seed where the weights are to be the same every time. What it
returns is an `nn.Sequential` of torch's own layers, save for residual sums and attention, which torch does not have as
layers of this kind.

| function | P | images or tokens | from |
| --- | --- | --- | --- |
| `softmax_regression()` | 7,850 | 784 numbers | seeds 000, 004 |
| `mlp()` | 9,960 | 784 numbers | seeds 000, 002 |
| `keskar_f1()` | 1,462,794 | 784 numbers | seed 003 |
| `lenet5()` | 61,706 | 1 x 28 x 28 | seed 003 |
| `all_cnn_c()` | 1,387,108 | 3 x 32 x 32 | seeds 000, 002 |
| `vgg16()` | 15,291,300 | 3 x 32 x 32 | seed 004 |
| `vgg16_bn()` | 15,299,748 | 3 x 32 x 32 | seeds 000, 004 |
| `preresnet164()` | 1,726,388 | 3 x 32 x 32 | seeds 000, 002 |
| `wide_resnet28_10()` | 36,546,980 | 3 x 32 x 32 | seeds 000, 002 |
| `resnet18()` | 11,173,962 | 3 x 32 x 32 | He et al. 2016 |
| `gpt()` | 809,856 | 64 tokens of 65 kinds | Radford et al. 2019 |

    >>> model = mlp(seed=0)
    >>> model(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
"""

from .convolutional import all_cnn_c, lenet5, vgg16, vgg16_bn
from .dense import keskar_f1, mlp, softmax_regression
from .residual import preresnet164, resnet18, wide_resnet28_10
from .transformer import gpt

__all__ = [
    "all_cnn_c",
    "gpt",
    "keskar_f1",
    "lenet5",
    "mlp",
    "preresnet164",
    "resnet18",
    "softmax_regression",
    "vgg16",
    "vgg16_bn",
    "wide_resnet28_10",
]
