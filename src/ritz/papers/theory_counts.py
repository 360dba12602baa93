"""What seeds 000 and 002 count: the weights of their networks, and what products with a Hessian cost.

A cost is a number of multiplications and additions in products of matrices, counted by torch while small networks are
differentiated. Every function returns claims: what is printed, and beside what does not hold as printed, what does.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..models import all_cnn_c, mlp, preresnet164, softmax_regression, wide_resnet28_10
from ..optim.penalty import TracePenalty
from . import theory_networks as small
from .base import Claim
from .theory_networks import classify, dense_hessian, labels, normal

STEPS, IMAGES = 100, 50_000  # of Lanczos, section 5 of seed 002; the training images of CIFAR-100
TENS = 99
DEEP = (16,) * 9 + (3,)  # widths of a network
SEEN = "ReLU networks without biases, products of matrices counted"


def parameters() -> tuple[Claim, ...]:
    """Section 4 of seed 000: how many weights the networks have, by the networks of `ritz.models`.

    A single hidden layer of 100 units has 784 x 100 + 100 + 100 x 10 + 10 weights, not the printed 9,960. These are
    784 x 10 + 10 + 10 x 100 + 100 + 100 x 10 + 10: a hidden layer of 10 units before that of 100.

    Example:
        >>> [claim.verdict for claim in parameters()]
        ['holds', 'refuted', 'holds', 'holds', 'holds', 'holds', 'holds']
    """
    claim = partial(Claim, paper="seed 000", where="section 4")
    with torch.device("meta"):  # shapes alone
        cnn = all_cnn_c(100)
        single, double = mlp(hidden=(100,)), mlp(hidden=(10, 100))
        as_printed = (
            ("the softmax regression", softmax_regression(), 7_850, "784 x 10 weights and 10 biases."),
            ("All-CNN-C with 100 classes", cnn, 1_387_108, "Nine convolutions with biases, without BatchNorm."),
            ("PreResNet-164 with 100 classes", preresnet164(100), 1_726_388, "18 bottleneck blocks of each width."),
            ("WideResNet-28-10 with 100 classes", wide_resnet28_10(100), 36_546_980, "Every convolution has biases; "
             "without them there are 10,096 fewer."),
        )  # fmt: skip
    first, *others = (
        claim(
            text=f"{name} has {printed:,} weights: their number", expected=printed, measured=_weights(model),
            evidence=seen,
        )
        for name, model, printed, seen in as_printed
    )  # fmt: skip
    layers = sum(isinstance(layer, nn.Conv2d) for layer in cnn.modules())
    return (
        first,
        claim(
            text="an MLP with a single hidden layer of 100 units has 9,960 weights: their number", expected=9_960,
            measured=_weights(single), evidence="784-100-10 on the 784 pixels of MNIST.",
        ),
        claim(
            where="section 4, corrected", text="an MLP with hidden layers of 10 and of 100 units has 9,960 weights: "
            "their number", expected=9_960, measured=_weights(double),
            evidence="784-10-100-10, which is also what the published code has.",
        ),
        claim(
            text="the simple convolutional network has nine layers: convolutions of All-CNN-C", expected=9,
            measured=layers, evidence="Dropout and the mean over the image have no weights.",
        ),
        *others,
    )  # fmt: skip


def _weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def products() -> tuple[Claim, ...]:
    """Appendix B of seed 000: the cost of a product with the Hessian, and of Lanczos with re-orthogonalisation.

    Example:
        >>> [claim.verdict for claim in products()]
        ['holds', 'holds']
    """
    shapes = [(widths, num) for widths in (DEEP, (32,) * 4 + (3,), (64,) * 4 + (3,)) for num in (8, 32)]
    unit = [_operations(widths, num, "product") / (num * _size(widths)) for widths, num in shapes]
    claim = partial(Claim, paper="seed 000", where="appendix B", expected=1.0)
    return (
        claim(
            text="a Hessian-vector product costs O(N P): operations over N P, the largest over the smallest of six "
            "cases", tolerance=0.25, measured=max(unit) / min(unit),
            evidence=f"{SEEN}, 4 to 9 layers of 16 to 64 units, N of 8 and 32: from {min(unit):.1f} to {max(unit):.1f} "
            "times N P.",
        ),
        claim(
            text="m steps of Lanczos cost O(N P m), re-orthogonalisation included: its operations over those of the "
            "products", relation="<=", measured=2 * STEPS / (min(unit) * IMAGES),
            evidence=f"2 P m^2 beside {min(unit):.1f} N P m, at m = {STEPS} and N = {IMAGES:,}. It needs m well below "
            "N: with few samples the first is the larger one.",
        ),
    )  # fmt: skip


def metric() -> tuple[Claim, ...]:
    """Abstract and section 4.2 of seed 002: the metric costs as much as a step of SGD, and log |H| several epochs.

    v'Hv differentiates a gradient once more, over the graph of its forward and its backward pass: close to three
    gradients. Tr G from one vector of signs in the outputs is the square of one gradient.

    Example:
        >>> [claim.verdict for claim in metric()]
        ['refuted', 'holds', 'holds']
    """
    step, product, ggn = (_operations(DEEP, 8, what) for what in ("gradient", "product", "ggn"))
    seen = f"{SEEN}, nine layers of 16 units, a batch of 8."
    claim = partial(Claim, paper="seed 002")
    equal = partial(claim, expected=1.0, tolerance=0.25)
    return (
        equal(
            where="abstract, section 4.2", text="the metric costs as much as a single step of SGD: operations of v'Hv "
            "from one vector and one batch over those of the gradient", measured=product / step,
            evidence=f"{seen} The gradient is differentiated once more.",
        ),
        equal(
            where="abstract, section 4.2, corrected", text="the metric with Tr G in place of Tr H costs as much as a "
            "single step of SGD: operations of Tr G from one vector and one batch over those of the gradient",
            measured=ggn / step, evidence=f"{seen} The vector has signs in the outputs. For piecewise-linear networks "
            "Tr G is Tr H.",
        ),
        claim(
            where="section 4.2", text="equations 6 and 7 on all data cost several epochs of SGD, read as two or more: "
            "operations of one product with the Hessian over those of an epoch", expected=2.0, relation=">=",
            measured=product / step,
            evidence=f"{seen} Both go over all samples once. This is equation 7 by one vector, "
            "the cheapest case; log |H| needs many products.",
        ),
    )  # fmt: skip


def _size(widths: Sequence[int]) -> int:
    return sum(a * b for a, b in pairwise(widths))


def _operations(widths: Sequence[int], num: int, what: str) -> int:
    """Of a gradient, of a product with the Hessian or of Tr G from one vector, on one batch."""
    model = small.mlp(widths, seed=23, bias=False)
    x, y = normal((num, widths[0]), seed=23), labels(num, widths[-1], seed=23)
    params = list(model.parameters())
    signs = [normal(p.shape, seed=24, name=str(place)).sign() for place, p in enumerate(params)]

    def gradient(**about: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(nn.functional.cross_entropy(model(x), y), params, **about)

    run: dict[str, Callable[[], Any]] = {
        "gradient": gradient,
        "product": lambda: torch.autograd.grad(gradient(create_graph=True), params, signs),
        "ggn": lambda: TracePenalty(1.0).on_outputs(model(x), model),
    }
    with FlopCounterMode(display=False) as counter:
        run[what]()
    return int(counter.get_total_flops())


def vectors() -> tuple[Claim, ...]:
    """Section 4.2 of seed 002: how many random vectors a trace needs, by the bound that is quoted and by its variance.

    The bound of Roosta-Khorasani and Ascher for vectors of signs is 6 ln(2 / d) / e^2, for an error above e with a
    probability below d, whatever the matrix. The variance of one v'Hv is 2 sum_(i != j) H_ij^2.

    Example:
        >>> [claim.verdict for claim in vectors()]
        ['holds', 'holds', 'refuted']
    """
    risk = classify(small.mlp((4, 6, 5, 3), seed=11), normal((10, 4), seed=11), labels(10, 3, seed=11))
    H = dense_hessian(risk)
    variance = 2 * float((H - H.diagonal().diag()).square().sum()) / float(H.trace()) ** 2
    seen = f"A ReLU network with {risk.dim} weights, exact: one vector errs by {math.sqrt(variance):.0%} of Tr H."
    claim = partial(Claim, paper="seed 002", where="section 4.2")
    tens = partial(claim, expected=float(TENS), relation="<=")
    return (
        claim(
            text="bounds ask for hundreds of thousands of random vectors: their number, for an error of 1 % with a "
            "probability of 95 %", expected=1e5, relation=">=", measured=6 * math.log(2 / 0.05) / 0.01**2,
            evidence="6 ln(2 / 0.05) / 0.01^2, of Roosta-Khorasani and Ascher (2015). At 10 % it asks for 2,213.",
        ),
        tens(
            text="tens of random vectors suffice, read as fewer than a hundred: their number, for a standard deviation "
            "of 10 % of Tr H", measured=math.ceil(variance / 0.1**2), evidence=f"{seen} The paper states no accuracy.",
        ),
        tens(
            text="tens of random vectors suffice for the accuracy at which bounds ask for hundreds of thousands: their "
            "number, for a standard deviation of 1 % of Tr H", measured=math.ceil(variance / 0.01**2), ours=True,
            evidence=f"{seen} The bound is {6 * math.log(2 / 0.05) / variance:.0f} times what the variance asks for.",
        ),
    )  # fmt: skip
