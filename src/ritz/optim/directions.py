"""What an optimiser divides a gradient by, direction by direction, as far as it is known.

A preconditioned method moves by w <- w - alpha B^-1 g, up to momentum. B is read from the optimiser's own state:

    KFAC            C + damping in the eigenbasis of its blocks
    Adam, AdamW     sqrt(v / (1 - b2^t)) + eps, and so for Gadam
    GadamX          (sqrt(v) + eps)^(2p) / sqrt(1 - b2^t)
    SGD             the identity
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..risk import Risk
from .adam import GadamX
from .diagnostics import InverseRoot, Momentum
from .groups import damping_of
from .kfac import KFAC

RateOf = Callable[[Mapping[str, Any]], float]  # the learning rate of a group that is in effect


class Directions(NamedTuple):
    """Some eigenvectors of B that share a parameter group."""

    group: Mapping[str, Any]
    values: Tensor  # eigenvalues without damping
    damped: Tensor  # and with it, in the same order


def directions(optimizer: Optimizer) -> list[Directions]:
    """All eigenvalues of B, in parts: block by block or parameter by parameter; none where B is not known, or I.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.Adam([weight], eps=1.0)
        >>> weight.grad = torch.tensor([3.0, 0.0])
        >>> optimizer.step()
        >>> (part,) = directions(optimizer)
        >>> part.values.tolist(), part.damped.tolist()
        ([3.0, 0.0], [4.0, 1.0])
    """
    if isinstance(optimizer, KFAC):
        return list(_of_kfac(optimizer))
    return [Directions(group, *_adams(state, group)) for _, group, state in _adam_states(optimizer)]


def _of_kfac(optimizer: KFAC) -> Iterator[Directions]:
    owners = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    names = {name: id(p) for group in optimizer.param_groups for name, p in _named(group)}
    for name, block in optimizer.blocks.items():
        space = block.space()
        if space is not None:
            group = owners[names[next(iter(block.unit.params.values()))]]
            yield Directions(group, space.values, space.values + damping_of(name, group))


def _adam_states(optimizer: Optimizer) -> Iterator[tuple[Tensor, Mapping[str, Any], Mapping[str, Any]]]:
    """Parameters that have squared gradients, with their group and state."""
    if isinstance(optimizer, Adam | AdamW):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if "exp_avg_sq" in optimizer.state.get(p, {}):
                    yield p, group, optimizer.state[p]


def _adams(state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Adam's B without eps and with it, for one parameter."""
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = (torch.view_as_real(square) if square.is_complex() else square).sqrt()
    correction = (1 - group["betas"][1] ** float(state["step"])) ** 0.5
    if "p" in group:  # GadamX
        power = 2 * group["p"]
        return root**power / correction, (root + group["eps"]) ** power / correction
    return root / correction, root / correction + group["eps"]


def flat_scale(optimizer: Optimizer, group: Mapping[str, Any]) -> float | None:
    """What B comes to along a direction without curvature; None where it is not one number.

    Example:
        >>> optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], eps=0.1)
        >>> flat_scale(optimizer, optimizer.param_groups[0])
        0.1
    """
    if "damping" in group and not isinstance(group["damping"], Mapping):
        return float(group["damping"])
    if isinstance(optimizer, Adam | AdamW) and not isinstance(optimizer, GadamX):
        return float(group["eps"])
    return None


def momentum_of(optimizer: Optimizer) -> tuple[float, Momentum] | None:
    """The momentum of an optimiser and its kind, for `stable_rate`; None where it is not known, or not one.

    Example:
        >>> momentum_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9))
        (0.9, 'heavy_ball')
    """
    known = {_momentum(optimizer, group) for group in optimizer.param_groups if group["params"]}
    return known.pop() if len(known) == 1 else None


def _momentum(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[float, Momentum] | None:
    if group.get("maximize"):
        return None
    if isinstance(optimizer, KFAC):
        return float(group["momentum"]), "heavy_ball"
    if isinstance(optimizer, Adam | AdamW):
        return float(group["betas"][0]), "average"
    if isinstance(optimizer, SGD) and not group["dampening"]:
        return float(group["momentum"]), "nesterov" if group["nesterov"] else "heavy_ball"
    return None


class Root(NamedTuple):
    """B^-1/2 of an optimiser, with what its learning rates are in."""

    inverse: InverseRoot | None  # None: the identity
    rate: float  # the largest of the groups; those of the others are in `inverse`, in proportion


def inverse_root(optimizer: Optimizer, risk: Risk, rate: RateOf) -> Root | None:
    """B^-1/2 in the order of the risk, 0 for what is not trained; None where it is not known or there is no step yet.

    Groups with learning rates of their own are counted in: sqrt(rate / largest rate) multiplies their rows. (Not for
    KFAC, whose blocks may lie in two groups.)

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1)))
        >>> groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.025}]
        >>> root = inverse_root(torch.optim.SGD(groups, lr=0.1), risk, lambda group: group["lr"])
        >>> root.inverse.tolist(), root.rate
        ([1.0, 0.5], 0.1)
    """
    rates = {rate(group) for group in optimizer.param_groups if group["params"]}
    largest, own = max(rates), dict(risk.model.named_parameters())
    if isinstance(optimizer, KFAC):
        known = len(rates) == 1 and directions(optimizer)
        return Root(_kfac_root(optimizer, risk, own), largest) if known else None
    damped = _diagonals(optimizer)
    if not damped or not all(bool((b > 0).all()) for b in damped.values()):
        return None
    if isinstance(optimizer, SGD) and len(rates) == 1 and all(id(own[name]) in damped for name in risk.names):
        return Root(None, largest)
    shares = {}
    for group in optimizer.param_groups:
        shares.update(dict.fromkeys(map(id, group["params"]), rate(group) / largest if largest else 1.0))
    rows = {name: torch.zeros(p.shape, dtype=risk.dtype, device=risk.device) for name, p in own.items()}
    for name in risk.names:
        key = id(own[name])
        if key in damped:
            rows[name] += (shares[key] / damped[key]).sqrt().reshape(own[name].shape).to(rows[name])
    return Root(risk.space.join({name: rows[name] for name in risk.names}), largest)


def adam_inverse_root(optimizer: Optimizer, risk: Risk) -> Tensor:
    """The diagonal of B^-1/2 for Adam and its kin, (dim,), in the order of the risk: B = sqrt(v / (1 - b2^t)) + eps.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.Adam(model.parameters(), eps=1.0)
        >>> model.weight.grad = torch.full((1, 1), 3.0)
        >>> optimizer.step()
        >>> adam_inverse_root(optimizer, ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1))))
        tensor([0.5000])
    """
    damped = _adam_diagonals(optimizer)
    own = dict(risk.model.named_parameters())
    for name in risk.names:
        if id(own[name]) not in damped:
            raise ValueError(
                f"{type(optimizer).__name__} holds no squared gradients of {name}; take a step first, and give a risk "
                "of the parameters that it trains"
            )
    return risk.space.join({name: damped[id(own[name])].rsqrt() for name in risk.names})


def _diagonals(optimizer: Optimizer) -> dict[int, Tensor]:
    """The diagonal of B by id of the parameter, where it has one."""
    if isinstance(optimizer, SGD):
        return {id(p): p.new_ones(p.shape) for group in optimizer.param_groups for p in group["params"]}
    return _adam_diagonals(optimizer)


def _adam_diagonals(optimizer: Optimizer) -> dict[int, Tensor]:
    return {id(p): _adams(state, group)[1] for p, group, state in _adam_states(optimizer)}


def _kfac_root(optimizer: KFAC, risk: Risk, own: Mapping[str, Tensor]) -> InverseRoot:
    names = {id(p): name for group in optimizer.param_groups for name, p in _named(group)}
    theirs = {name: names[id(own[name])] for name in risk.names if id(own[name]) in names}

    def image(row: Tensor) -> Tensor:
        parts = risk.space.split(row)
        found = optimizer.precondition({theirs[name]: parts[name].to(own[name]) for name in theirs}, power=-0.5)
        moved = {name: found[theirs[name]].to(row) for name in theirs if theirs[name] in found}
        return risk.space.join({name: moved.get(name, torch.zeros_like(part)) for name, part in parts.items()})

    return lambda rows: torch.stack([image(row) for row in rows])  # (k, dim)


def _named(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return zip(group["param_names"], group["params"], strict=True)
