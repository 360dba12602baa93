"""The small networks and data on which the papers' theory is checked: float64, keyed weights, no generator touched."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from ..operators.hessian import Hessian
from ..risk import Risk
from ..space import ParamSpace

ROUND_OFF = 1e-11  # relative, of an identity between float64 numbers


def normal(shape: Sequence[int], seed: int, name: str = "data") -> Tensor:
    """Independent standard normal numbers, the same on every machine; another name gives others.

    Example:
        >>> normal((2, 3), seed=0).shape, bool((normal((4,), seed=1) == normal((4,), seed=1)).all())
        (torch.Size([2, 3]), True)
    """
    space = ParamSpace((name,), (torch.Size(shape),))
    return space.split(space.probes([0], seed, "normal", dtype=torch.float64)[0])[name]


def mlp(
    sizes: Sequence[int],
    seed: int,
    *,
    bias: bool = True,
    activation: Callable[[], nn.Module] = nn.ReLU,
    rectified: bool = False,
) -> nn.Sequential:
    """A fully connected network with normal weights of variance 2 / fan-in and biases of variance 1 / 4.

    Args:
        sizes: Of input, hidden layers and output.
        seed: Of the weights.
        bias: The network of theorem 1 of seed 000 has none.
        activation: Between layers.
        rectified: Also after the last layer, as in theorem 1 of seed 000.

    Example:
        >>> mlp((3, 4, 2), seed=0)(normal((5, 3), seed=1)).shape
        torch.Size([5, 2])
    """
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(pairwise(sizes)):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(normal((outputs, inputs), seed, f"{place}.weight") * (2 / inputs) ** 0.5)
            if bias:
                layer.bias.copy_(normal((outputs,), seed, f"{place}.bias") / 2)
        layers += [layer, activation()]
    return nn.Sequential(*(layers if rectified else layers[:-1]))


def classify(model: nn.Module, X: Tensor, y: Tensor) -> Risk:
    """The mean cross-entropy of a model on inputs X (N, d) and labels y (N,)."""
    return Risk(model, nn.CrossEntropyLoss(), (X, y))


def labels(num: int, num_classes: int, seed: int) -> Tensor:
    """Labels (num,) that know nothing of the inputs.

    Example:
        >>> labels(4, 3, seed=0).max() < 3
        tensor(True)
    """
    return normal((num, num_classes), seed, "labels").argmax(1)


class Sizes(NamedTuple):
    """Three measures of sharpness of a symmetric matrix.

    Example:
        >>> Sizes.of(torch.diag(torch.tensor([3.0, -4.0])))
        Sizes(trace=-1.0, frobenius=5.0, spectral=4.0)
    """

    trace: float
    frobenius: float
    spectral: float

    @classmethod
    def of(cls, matrix: Tensor) -> "Sizes":
        """Of a dense matrix."""
        values = torch.linalg.eigvalsh(matrix)
        return cls(float(matrix.trace()), float(matrix.norm()), float(values.abs().max()))


def dense_hessian(risk: Risk) -> Tensor:
    """The whole Hessian of a risk, (dim, dim); by one route, so that no timing decides about the last digits.

    Example:
        >>> risk = classify(mlp((2, 2), seed=0, bias=False), torch.ones(1, 2, dtype=torch.float64), torch.tensor([0]))
        >>> H = dense_hessian(risk)
        >>> H.shape, bool((H - H.T).abs().max() < 1e-15)
        (torch.Size([4, 4]), True)
    """
    return Hessian(risk, route="reverse").dense()


def sizes_of(risk: Risk) -> Sizes:
    """Trace, Frobenius and spectral norm of the Hessian of a risk, from the whole matrix."""
    return Sizes.of(dense_hessian(risk))


def scaled(risk: Risk, factors: dict[str, float]) -> Risk:
    """The risk at weights multiplied by name; a name that is not given keeps its weights.

    Example:
        >>> risk = classify(mlp((2, 2), seed=0), normal((3, 2), seed=1), labels(3, 2, seed=2))
        >>> moved = scaled(risk, {"0.weight": 2.0})
        >>> bool((moved.params()["0.weight"] == 2 * risk.params()["0.weight"]).all())
        True
    """
    own = risk.params()
    return risk.at({name: own[name] * factor for name, factor in factors.items()})


def last_layer(risk: Risk, alpha: float) -> Risk:
    """T_alpha of seed 003, section 5: the last weight and bias times alpha, so that f becomes alpha f."""
    last = risk.space.names[-1].split(".")[0]
    return scaled(risk, {name: alpha for name in risk.space.names if name.split(".")[0] == last})


def outputs_of(risk: Risk, X: Tensor) -> Tensor:
    """The outputs (N, C) of the model at the weights of the risk, for inputs X (N, d).

    Example:
        >>> X = normal((3, 2), seed=1)
        >>> risk = classify(mlp((2, 2), seed=0), X, labels(3, 2, seed=2))
        >>> deviation(outputs_of(last_layer(risk, 3.0), X), 3 * outputs_of(risk, X)) < 1e-15
        True
    """
    found: Tensor = functional_call(risk.model, risk.params(), (X,))
    return found.detach()


def derivatives(risk: Risk, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (C,), their gradients (C, dim) and Hessians (C, dim, dim) in the weights, for one input x (d,).

    Example:
        >>> risk = classify(mlp((2, 2), seed=0), normal((3, 2), seed=1), labels(3, 2, seed=2))
        >>> [tuple(part.shape) for part in derivatives(risk, torch.ones(2, dtype=torch.float64))]
        [(2,), (2, 6), (2, 6, 6)]
    """
    flat = risk.space.join(risk.params())

    def f(w: Tensor) -> Tensor:
        found: Tensor = functional_call(risk.model, risk.space.split(w), (x[None],))[0]
        return found

    return f(flat).detach(), jacrev(f)(flat), jacrev(jacrev(f))(flat)


def deviation(value: Tensor | float, truth: Tensor | float) -> float:
    """The largest difference, relative to the largest entry of the truth.

    Example:
        >>> deviation(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
        0.25
    """
    value, truth = (torch.as_tensor(x, dtype=torch.float64) for x in (value, truth))
    return float((value - truth).abs().max() / truth.abs().max())
