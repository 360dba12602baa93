"""Norms of the weights: their size, their distance from the start, and how much each layer can stretch its input.

The path norm is in `paths.py`, the spectra of weight matrices in `layer_spectra.py`.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...intervals import Number
from ...results import Estimate
from ...risk import Progress, Risk
from ...space import row_norms
from ..subject import as_vector
from .linear_maps import Convolutions, linear_layers, weight_matrices


def weight_norm(risk: Risk, order: float = 2) -> Estimate:
    """||w||_2, or with order=math.inf max |w_i|, over the chosen parameters, including biases and those of BatchNorm.

    Its parts are the norms of each parameter. Rescaling a layer changes it, even if the function stays the same.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -4.0]]))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 1)))
        >>> weight_norm(risk).value, weight_norm(risk, order=math.inf).value
        (5.0, 4.0)
    """
    return _norm("weight norm", risk, risk.space.join(risk.params()), order, "")


def distance(risk: Risk, init: Mapping[str, Tensor] | Tensor, order: float = 2) -> Estimate:
    """||w - w_0||, the distance from the initial weights over the chosen parameters; parts as for `weight_norm`.

    Args:
        risk: The solution.
        init: w_0: a state dict or named tensors for all chosen parameters, or a flat vector (dim,).
        order: 2, or math.inf for the largest change of a single weight.

    Raises:
        ValueError: If a parameter is missing, has another shape, or is not finite.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, -4.0]]))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 1)))
        >>> distance(risk, {"weight": torch.tensor([[3.0, 0.0]])}).value
        4.0
    """
    start = as_vector(risk, init)
    if not bool(start.isfinite().all()):
        raise ValueError("init must be finite: give the weights that training began with")
    return _norm("distance", risk, risk.space.join(risk.params()).double() - start.double(), order, " less init")


def _norm(name: str, risk: Risk, vector: Tensor, order: float, whence: str) -> Estimate:
    """A norm of a vector (dim,), and of its part in each parameter."""
    if order not in (2, math.inf):
        raise ValueError(f"order must be 2 or math.inf, got {order}")

    def size(x: Tensor) -> float:
        x = x.double().flatten()
        return float(row_norms(x[None])[0] if order == 2 else x.abs().max())

    text = f"l{order:g} norm of {risk.dim} parameters{whence}, biases included, not squared"
    parts = {
        part: Estimate(name=f"{name} of {part}", value=size(x), exact=True, convention=text)
        for part, x in risk.space.split(vector).items()
    }
    return Estimate(name=name, value=size(vector), exact=True, convention=text, parts=parts)


# --------------------------------------------------------------------------------- what layers can stretch


def spectral_norms(
    risk: Risk,
    *,
    convolutions: Convolutions = "operator",
    tol: float = 1e-5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Estimate:
    """The largest singular value of each layer as a linear map, (layers,); its parts are the layers by name.

    Layers are the chosen weights of two or more dimensions, with shared ones counted once, and BatchNorm in evaluation
    mode, whose norm is max |gamma| / sqrt(var + eps); other normalisations are not linear maps. A convolution is
    measured as a map of images of the size that it gets in a forward pass (the largest, if it is called more than
    once), with its own stride, padding and groups, by Lanczos on A'A; its part "matrix" is the norm of its reshaped
    kernel.

    Args:
        risk: The solution.
        convolutions: "operator", or "matrix" to use the norm of the reshaped kernel instead, as many papers do.
        tol: Relative residual allowed in ||A||^2; it gives the bracket.
        seed: Seed of the start vectors.
        progress: Called as progress(layers done, layers).

    Raises:
        UnsupportedError: If a weight is computed from others (`torch.nn.utils.parametrize`), or if a convolution is
            not called as a module in a forward pass.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv1d(1, 1, 2, bias=False), torch.nn.Flatten(), torch.nn.Linear(2, 1))
        >>> with torch.no_grad():
        ...     for p in model.parameters():
        ...         _ = p.fill_(1.0)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1, 3), torch.ones(1, 1)))
        >>> norms = spectral_norms(risk)  # sqrt(3) of ((1, 1, 0), (0, 1, 1)), not sqrt(2) of (1, 1)
        >>> norms.value.tolist(), round(norms.parts["0.weight"].parts["matrix"].value, 5)
        ([1.73205, 1.41421], 1.41421)
    """
    layers = linear_layers(risk, convolutions)
    parts = {}
    for done, layer in enumerate(layers, 1):
        parts[layer.name] = layer.spectral_norm(tol, seed)
        if progress is not None:
            progress(done, len(layers))
    ends = [torch.tensor([float(e.interval()[side]) for e in parts.values()], dtype=torch.float64) for side in (0, 1)]
    value = torch.tensor([float(e.value) for e in parts.values()], dtype=torch.float64)
    return Estimate(
        name="spectral norms", value=value, stderr=torch.zeros_like(value), bracket=(ends[0], ends[1]),
        exact=all(e.exact for e in parts.values()), products=sum(e.products for e in parts.values()), seed=seed,
        convention=f"largest singular value of each layer, convolutions by {convolutions}, not squared", parts=parts,
    )  # fmt: skip


def log_spectral_product(risk: Risk, norms: Estimate | None = None) -> Estimate:
    """sum over layers of log ||A||^2, the squared product of spectral norms (Jiang et al. 2020, "log prod of spec").

    For a chain of layers with ReLUs between them, the root of its exponential bounds the Lipschitz constant; for
    branches that are added it does not. Multiplying one layer by c and the next by 1 / c does not change it. If two
    layers follow the first, both must be divided by c to keep the function, and that changes it.

    Args:
        risk: The solution.
        norms: The result of `spectral_norms` for this risk, if it is at hand.

    Example:
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0])))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 2)))
        >>> round(log_spectral_product(risk).value, 4)  # 2 log 3
        2.1972
    """
    norms = spectral_norms(risk) if norms is None else norms
    text = f"sum of log ||A||^2, natural logarithm; {norms.convention}"

    def logs(e: Estimate) -> tuple[float, float, float]:
        low, high = e.interval()
        return 2 * _log(float(low)), 2 * _log(float(e.value)), 2 * _log(float(high))

    rows = {name: logs(e) for name, e in norms.parts.items()}
    parts = {
        name: Estimate(name=f"log ||A||^2 of {name}", value=mid, bracket=(low, high), exact=norms.parts[name].exact)
        for name, (low, mid, high) in rows.items()
    }
    low, mid, high = (math.fsum(row[i] for row in rows.values()) for i in range(3))
    return Estimate(
        name="log spectral product", value=mid, bracket=(low, high), exact=norms.exact, products=norms.products,
        seed=norms.seed, convention=text, parts=parts,
    )  # fmt: skip


def stable_ranks(risk: Risk) -> Estimate:
    """sum over weights of ||W||_F^2 / ||W||^2, each between 1 and the rank of W; its parts are the weights by name.

    Weights of two or more dimensions, also of convolutions, are taken as matrices (out, rest) (Jiang et al. 2020,
    "fro over spec"). A weight of zeros has rank 0. Scaling a weight does not change its stable rank.

    Example:
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([2.0, 1.0])))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 2)))
        >>> stable_ranks(risk).value  # (4 + 1) / 4
        1.25
    """
    text = "||W||_F^2 / ||W||^2 of the weight as a matrix (out, rest)"
    parts = {}
    for layer in weight_matrices(risk):
        squares = torch.linalg.svdvals(layer.matrix).square()
        value = float(squares.sum() / squares[0]) if float(squares[0]) else 0.0
        parts[layer.name] = Estimate(name=f"stable rank of {layer.name}", value=value, exact=True, convention=text)
    total = math.fsum(float(e.value) for e in parts.values())
    return Estimate(name="stable ranks", value=total, exact=True, convention=f"sum over layers of {text}", parts=parts)


def spectral_complexity(
    risk: Risk, init: Mapping[str, Tensor] | Tensor | None = None, *, convolutions: Convolutions = "operator"
) -> Estimate:
    """The spectral complexity of Bartlett, Foster and Telgarsky 2017, equation 1.2; divide it by a margin.

        R = (prod_i ||A_i||) (sum_i (||A_i' - M_i'||_{2,1} / ||A_i||)^(2/3))^(3/2)

    ||B'||_{2,1} is the sum of the l2 norms of the rows of B. R is computed without the division, so a layer of zeros
    does no harm. Biases do not count, and activations are assumed to be 1-Lipschitz. Its parts are the terms
    ||A_i' - M_i'||_{2,1} prod_{j != i} ||A_j||; R is their l_{2/3} norm.

    Args:
        risk: The solution.
        init: The reference M, often the initial weights; 0 if not given. For BatchNorm, M is computed from the
            statistics of the risk.
        convolutions: "operator", or "matrix" to use reshaped kernels instead of maps of images.

    Example:
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0])))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 2)))
        >>> spectral_complexity(risk).value, spectral_complexity(risk, torch.tensor([3.0, 0.0, 0.0, 0.0])).value
        (4.0, 1.0)
    """
    layers = linear_layers(risk, convolutions)
    start = {} if init is None else {e.name: e for e in linear_layers(risk.at(as_vector(risk, init)), convolutions)}
    apart = [layer.weight - start[layer.name].weight if start else layer.weight for layer in layers]
    moves = [_log(float(layer.row_norms(move).sum())) for layer, move in zip(layers, apart, strict=True)]
    norms = [layer.spectral_norm(tol=1e-5, seed=0) for layer in layers]

    def complexity(sizes: list[Number]) -> tuple[Tensor, float]:
        logs = [_log(float(size)) for size in sizes]
        others = [math.fsum(logs[:i] + logs[i + 1 :]) for i in range(len(logs))]
        terms = torch.tensor([a + b for a, b in zip(moves, others, strict=True)], dtype=torch.float64)
        return terms.exp(), float((1.5 * (terms / 1.5).logsumexp(0)).exp())

    terms, value = complexity([e.value for e in norms])
    low, high = (complexity([e.interval()[side] for e in norms])[1] for side in (0, 1))
    return Estimate(
        name="spectral complexity", value=value, bracket=(low, high), exact=all(e.exact for e in norms),
        products=sum(e.products for e in norms), seed=0,
        convention=f"reference {'0' if init is None else 'init'}, convolutions by {convolutions}, no margin",
        parts={
            layer.name: Estimate(name=f"share of {layer.name}", value=float(term), exact=norm.exact)
            for layer, term, norm in zip(layers, terms, norms, strict=True)
        },
    )  # fmt: skip


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
