"""The transforms themselves: see `ritz.transforms`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...risk import Params, Risk
from ...space import random_permutation
from .degrees import Conflict, Solution, solve
from .joints import Joint, layer_of, listed, pick
from .tape import trace
from .units import Units, units_of

# ------------------------------------------------------------------------------------------------ rescaling


def rescale(risk: Risk, factor: float, joint: Joint | int | str | None = None) -> Risk:
    """W_l, b_l <- c W_l, c b_l and W_(l+1) <- W_(l+1) / c, with the same function (Dinh et al. 2017, section 3).

    The block of the Hessian that belongs to layer l is divided by c^2, that of layer l + 1 multiplied by it.

    Args:
        risk: At the weights to start from.
        factor: c > 0.
        joint: One of `joints(risk)`, its index, or the name of its first layer; the first one by default.

    Raises:
        UnsupportedError: If there is no such joint, or the factor is too large or small for the precision.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1))
        >>> for p in model.parameters():
        ...     _ = torch.nn.init.ones_(p)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.zeros(1, 1)))
        >>> moved = rescale(risk, 4.0)
        >>> {name: float(p) for name, p in moved.params().items()}
        {'0.weight': 4.0, '0.bias': 4.0, '2.weight': 0.25, '2.bias': 1.0}
        >>> moved.loss() == risk.loss()
        True
    """
    c = _positive("factor", factor, risk.dtype)
    picked = pick(risk, joint)
    moved = _times(risk, dict.fromkeys(picked.up, c) | dict.fromkeys(picked.down, 1 / c))
    return _checked(risk, moved, 1.0, f"rescaling {picked} by {factor:g}")


# -------------------------------------------------------------------------------------------------- T_alpha


def scale_output(risk: Risk, alpha: float) -> Risk:
    """T_alpha by the last layer: W_L, b_L <- alpha W_L, alpha b_L, so that f -> alpha f (seed 003, section 5).

    No prediction changes: neither which output is largest nor a sign. If every point is classified correctly, the loss
    and every entry of its Hessian go to 0 as alpha grows (corollary 5.2). A misclassified point keeps the loss high,
    and with it the entries that come from the curvature of the network itself. The trace of a piecewise-linear network
    still goes to 0, because it is that of the Gauss-Newton matrix.

    Args:
        risk: At the weights to start from.
        alpha: Larger than 0.

    Raises:
        UnsupportedError: If the outputs are not positively homogeneous in any one layer, or the precision is too low.

    Example:
        >>> model = torch.nn.Linear(1, 2)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.ones(1, 1), torch.zeros(1, dtype=torch.long)))
        >>> bool((scale_output(risk, 2.0).params()["weight"] == 2 * model.weight).all())
        True
    """
    scale = _positive("alpha", alpha, risk.dtype)
    _ = risk.output_loss  # refuses a risk without outputs
    tape = trace(risk)
    reasons: dict[str, str] = {}
    for weight in reversed(tape.weights):
        try:
            solution = solve(tape, {weight.name: 1}, lambda degree: 0)
        except Conflict as conflict:
            reasons[layer_of(weight.name)] = str(conflict)
            continue
        if solution.output == 1:
            moved = _times(risk, _factors(solution, scale))
            return _checked(risk, moved, scale, f"scaling the outputs by {alpha:g}")
        reasons[layer_of(weight.name)] = "the outputs do not scale with it"
    raise UnsupportedError(f"the outputs are not positively homogeneous in any one layer: {listed(reasons)}")


def scale_layers(risk: Risk, alpha: float) -> Risk:
    """T_alpha by all layers: W_l <- alpha^(1/L) W_l, b_l <- alpha^(l/L) b_l, so that f -> alpha f (seed 003, sec. 5).

    A bias is added to a tensor that l layers have scaled, so its exponent is cumulative. The network must be a chain:
    if a residual join adds tensors of different depths, or a normalisation undoes the scale, there is no such map.

    Args:
        risk: At the weights to start from.
        alpha: Larger than 0.

    Raises:
        UnsupportedError: If the network is not a chain of positively homogeneous layers, or the precision is too low.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1))
        >>> for p in model.parameters():
        ...     _ = torch.nn.init.ones_(p)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.zeros(1, 1)))
        >>> {name: float(p) for name, p in scale_layers(risk, 4.0).params().items()}
        {'0.weight': 2.0, '0.bias': 2.0, '2.weight': 2.0, '2.bias': 4.0}
    """
    scale = _positive("alpha", alpha, risk.dtype)
    _ = risk.output_loss
    try:
        solution = solve(trace(risk), {}, lambda degree: 1)
    except Conflict as conflict:
        raise UnsupportedError(
            f"the layers cannot be scaled together, {conflict}: T_alpha by layers needs a chain without normalisation "
            "or residual joins; use scale_output"
        ) from None
    depth = solution.output
    if not depth or depth < 0:
        raise UnsupportedError("the outputs do not grow with the weights; use scale_output")
    moved = _times(risk, _factors(solution, scale, Fraction(depth)))
    return _checked(risk, moved, scale, f"scaling all layers by {alpha:g} in all")


def _factors(solution: Solution, scale: float, depth: Fraction = Fraction(1)) -> dict[str, float]:
    """scale^(exponent / depth) for every parameter that changes."""
    return {name: scale ** float(power / depth) for name, power in solution.exponents.items() if power}


# ------------------------------------------------------------------------------------------------ BatchNorm


def rescale_batchnorm(risk: Risk, factor: float, layer: str | None = None) -> Risk:
    """W, b <- c W, c b before a BatchNorm in evaluation mode, and its running statistics to match.

        mean <- c mean,   var <- c^2 var,   gamma <- gamma sqrt(c^2 var + eps) / (c sqrt(var + eps))

    The statistics are those that the scaled layer would give; gamma compensates eps, so that the function is the same
    for any eps, not only for small ones.

    Args:
        risk: At the weights to start from, with mode="eval".
        factor: c > 0.
        layer: The layer before the BatchNorm, by name; the first such layer by default.

    Raises:
        UnsupportedError: With batch statistics; if no layer feeds a BatchNorm and nothing else; if a BatchNorm has no
            gamma and eps is not negligible; if the precision is too low.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1, eps=3.0))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.zeros(1, 1)))
        >>> moved = rescale_batchnorm(risk, 3.0)  # gamma = sqrt(9 + 3) / (3 sqrt(1 + 3))
        >>> print(f"{float(moved.params()['1.weight']):.6f}")
        0.577350
    """
    c = _positive("factor", factor, risk.dtype)
    if risk.mode == "train":
        raise UnsupportedError(
            "with mode='train' BatchNorm uses the statistics of each batch: the scale before it cancels except for "
            "eps, which nothing can compensate exactly; use mode='eval'"
        )
    solution = _absorbed(risk, layer)
    state = risk.state()
    moved = _times(risk, _factors(solution, c))
    for norm in solution.absorbed:
        moved |= _times(risk, {norm.mean: c, norm.var: c * c})
        excess = _excess(state[norm.var], c, norm.eps)
        if norm.weight is not None:
            moved[norm.weight] = (state[norm.weight].double() * excess).to(risk.dtype)
        elif float((excess - 1).abs().max()) > _tolerance(risk.dtype):
            raise UnsupportedError(
                f"{norm.mean.rpartition('.')[0]} has no gamma to compensate eps = {norm.eps:g}, which is not "
                "small compared with its running variances; use BatchNorm with affine=True"
            )
    return _checked(risk, moved, 1.0, f"rescaling before BatchNorm by {factor:g}")


def _excess(var: Tensor, c: float, eps: float) -> Tensor:
    """sqrt(c^2 var + eps) / (c sqrt(var + eps)), float64."""
    var = var.double()
    return (c * c * var + eps).sqrt() / (c * (var + eps).sqrt())


def _absorbed(risk: Risk, layer: str | None) -> Solution:
    """The layer before a BatchNorm, and every norm that absorbs its scale."""
    tape = trace(risk)
    reasons: dict[str, str] = {}
    for weight in tape.weights:
        if layer not in (None, layer_of(weight.name)):
            continue
        try:
            solution = solve(tape, {weight.name: 1}, lambda degree: 0, absorb=True)
        except Conflict as conflict:
            reasons[layer_of(weight.name)] = str(conflict)
            continue
        names = [*solution.moved(1), *(norm.weight for norm in solution.absorbed)]
        if not solution.absorbed or solution.output:
            reasons[layer_of(weight.name)] = "it does not end in BatchNorm alone"
        elif layer is not None or not set(risk.names).isdisjoint(names):
            return solution
    which = "no layer is" if layer is None else f"{layer!r} is not"
    raise UnsupportedError(f"{which} followed by BatchNorm with running statistics: {listed(reasons)}")


# -------------------------------------------------------------------------------------------- permutations


def permute(risk: Risk, seed: int = 0, joint: Joint | int | str | None = None) -> Risk:
    """Puts the hidden units of a layer into another order: its rows, and everything that acts on or reads these units.

    This includes the parameters and running statistics of a BatchNorm in between, and all pixels of a channel if a
    linear layer reads a flattened image. Any activation that acts unit by unit is allowed. A measure that changes under
    a permutation depends on the order of the weights in memory.

    Args:
        risk: At the weights to start from.
        seed: Seed of the permutation, which is never the identity.
        joint: One of `joints(risk)`, its index, or the name of the layer whose units are permuted; by default the first
            layer that has hidden units.

    Raises:
        UnsupportedError: If the units are joined with others by a residual sum, belong to a grouped convolution, or
            are the outputs.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.zeros(1, 1)))
        >>> moved = permute(risk)
        >>> bool((moved.params()["2.weight"] == model[2].weight.flip(1)).all())
        True
    """
    candidates, reasons = _units(risk, joint)
    for units in candidates:
        try:
            return _permuted(risk, units, seed)
        except UnsupportedError as error:  # code between two layers may depend on the order of units
            reasons[layer_of(units.weight)] = str(error)
    raise UnsupportedError(f"no hidden units can be permuted: {listed(reasons)}")


def _permuted(risk: Risk, units: Units, seed: int) -> Risk:
    """The risk with these units in an order that the seed determines."""
    order = random_permutation(units.size, ("permute", int(seed), units.weight))
    if bool((order == torch.arange(units.size)).all()):
        order = order.roll(1)
    state = risk.state()
    order = order.to(risk.device)
    moved = {name: units.permuted(name, state[name], order) for name in units.axes}
    return _checked(risk, moved, 1.0, f"permuting the units of {layer_of(units.weight)}", rescaled=False)


def _units(risk: Risk, joint: Joint | int | str | None) -> tuple[list[Units], dict[str, str]]:
    """The candidate units, and why other layers have none; for a named normalisation, those of the layer before it."""
    tape = trace(risk)
    name = None if joint is None else joint if isinstance(joint, str) else pick(risk, joint).first
    named = [weight for weight in tape.weights if layer_of(weight.name) == name]
    if name is not None and not named:
        raise UnsupportedError(f"no layer {name!r} takes part in the outputs")
    makes = [weight for weight in named if weight.out is not None]
    inside = {weight.name for weight in named} if named else set(risk.names)
    found: list[Units] = []
    reasons: dict[str, str] = {}
    for weight in makes or tape.weights:
        try:
            units = units_of(tape, weight)
        except Conflict as conflict:
            reasons[layer_of(weight.name)] = str(conflict)
            continue
        if not inside.isdisjoint(units.axes):
            found.append(units)
    return found, reasons


# --------------------------------------------------------------------------------------------------- checks


def _positive(name: str, value: float, dtype: torch.dtype) -> float:
    """A checked factor: blocks of the curvature scale with its square, which must not overflow."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number larger than 0, got {value!r}")
    most = math.sqrt(torch.finfo(dtype).max * torch.finfo(dtype).eps)
    if not 1 / most <= value <= most:
        raise UnsupportedError(
            f"{name} = {value:g}: curvature scales with its square, which leaves the range of {dtype}; take a factor "
            f"between {1 / most:.1g} and {most:.1g}, or dtype=torch.float64"
        )
    return float(value)


def _tolerance(dtype: torch.dtype) -> float:
    """Largest effect of round-off on an output, relative to the largest: thousands of operations, each rounded once."""
    return min(2**12 * torch.finfo(dtype).eps, 0.05)


def _times(risk: Risk, factors: Mapping[str, float]) -> Params:
    """Tensors by name, each times a number.

    Raises:
        UnsupportedError: If the result leaves the range of the risk's precision.
    """
    state, limits = risk.state(), torch.finfo(risk.dtype)
    moved: Params = {}
    for name, factor in factors.items():
        before = float(state[name].abs().max()) if state[name].numel() else 0.0
        after = before * factor
        # below `tiny`, digits are lost
        if before and not limits.tiny / limits.eps <= after <= limits.max * limits.eps:
            raise UnsupportedError(
                f"{name} times {factor:.3g} would leave the range of {risk.dtype}: its largest entry would be "
                f"{after:.3g}; take a factor nearer to 1, or dtype=torch.float64"
            )
        moved[name] = (state[name].double() * factor).to(risk.dtype)
    return moved


def _checked(risk: Risk, moved: Params, scale: float, what: str, *, rescaled: bool = True) -> Risk:
    """The risk at the new tensors, after a check that its outputs on the first batch are `scale` times those before.

    Raises:
        UnsupportedError: If they are not.
    """
    after = risk.at(moved)
    batch = next(iter(risk.batches))
    with risk.session():
        wanted, got = ((r.total if r.opaque else r.output)(r.params(), batch).detach().double() for r in (risk, after))
    wanted = wanted * scale
    size, error = float(wanted.abs().max()), float((got - wanted).abs().max())
    if not error <= _tolerance(risk.dtype) * size:  # NaN too
        remedies = ["a factor nearer to 1"] * rescaled + ["dtype=torch.float64"] * (risk.dtype != torch.float64)
        coarse = f"{risk.dtype} is too coarse for it (take {' or '.join(remedies)}), or " if remedies else ""
        raise UnsupportedError(
            f"{what} has moved the outputs by {error:.2g}, of up to {size:.2g}: {coarse}the network depends on these "
            "weights in a way that its trace does not show, for example through compiled code, masks or another layout "
            "of its units"
        )
    return after


# ---------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Transform:
    """A transform as the audit uses it: `transform(risk, strength)` returns the risk at other weights.

    Example:
        >>> TRANSFORMS["scale_output"].keeps
        'prediction'
    """

    function: Callable[..., Risk]
    keeps: Literal["function", "prediction"]
    text: str

    def __call__(self, risk: Risk, strength: float) -> Risk:
        """The risk at other weights; the strength is a factor, or the seed of a permutation."""
        return self.function(risk, strength)


TRANSFORMS: Mapping[str, Transform] = MappingProxyType(
    {
        "rescale": Transform(rescale, "function", "a layer times c, the next one through c"),
        "batchnorm": Transform(rescale_batchnorm, "function", "the layer before a BatchNorm times c"),
        "permute": Transform(permute, "function", "hidden units in another order"),
        "scale_output": Transform(scale_output, "prediction", "the last layer times alpha"),
        "scale_layers": Transform(scale_layers, "prediction", "all layers together times alpha"),
    }
)
