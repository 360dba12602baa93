"""The search for the largest loss near given weights: in a box by L-BFGS-B, in a ball by projected ascent.

Displacements of the weights are written in coordinates z of a chart, d = s * z, or d = A (s * z) in a subspace, in
which the box is |z_i| <= 1 and the ball |z| <= rho. Only values and exact gradients of the loss are used. The maximum
of a function that is not concave is not found with certainty: the result is the largest loss that was met.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...batches import Batch
from ...errors import NonFiniteError, WeightsMovedError
from ...reducers import Mean
from ...risk import Params, Risk
from ...space import ParamSpace, random_uniform, row_norms, row_products
from ..answers import answered

if TYPE_CHECKING:
    import numpy as np

Norm = Literal["l2", "linf"]
Tick = Callable[[int], None]
Point = tuple[float, Tensor, Tensor]  # loss, coordinates, gradient in them

SCOUTED = 3  # steps of a search from each of its starts

_MEMORY = 10  # rows of history of L-BFGS-B
# the unit of the gradient in L-BFGS-B, as a part of its mean size; on trained and untrained networks 10 iterations come
# within 1 % of what 50 give for 0.01 to 0.1, and fall 15 % short for 1
_UNIT = 0.03
_MOMENTUM = 0.25  # share of the last move in the next one (Croce and Hein 2020)
_RISES = 0.75  # share of the steps that must increase the loss, or the step size is halved


@dataclass(frozen=True)
class Chart:
    """Coordinates z of a displacement d of the weights: d = s * z, or A (s * z) in a subspace.

    Example:
        >>> chart = Chart(torch.tensor([2.0]), torch.tensor([[1.0, 3.0]]))
        >>> chart.shift(torch.ones(1)).tolist(), chart.pull(torch.ones(2)).tolist()
        ([2.0, 6.0], [8.0])
    """

    scale: Tensor | float  # s, (dim,) or (p,)
    basis: Tensor | None = None  # columns of A, as rows (p, dim)

    def shift(self, z: Tensor) -> Tensor:
        """The displacement, (dim,)."""
        return self.scale * z if self.basis is None else (self.scale * z) @ self.basis

    def pull(self, gradient: Tensor) -> Tensor:
        """The gradient in the coordinates, from that in the weights."""
        if self.basis is not None:
            gradient = row_products(self.basis, gradient[None])[:, 0].to(gradient)
        return self.scale * gradient


class Surface:
    """The mean loss, over the data or over some batches, as a function of coordinates; counts its evaluations."""

    def __init__(self, risk: Risk, chart: Chart, batches: Sequence[Batch] | None = None) -> None:
        self.risk, self.chart, self.batches = risk, chart, batches
        self.origin = risk.space.join(risk.params())
        self.evaluations = 0
        self._seen = risk.version()

    def loss(self, z: Tensor) -> float:
        """L at z."""
        params = self._params(z)
        return self._met(self._fold(params, lambda _, batch: self.risk.total_and_weight(params, batch)))

    def slope(self, z: Tensor) -> tuple[float, Tensor]:
        """L at z and its gradient in z, from one forward and one backward pass."""
        params = self._params(z)
        row = self._fold(params, lambda _, batch: self._total_and_gradient(params, batch))
        return self._met(row[0]), self.chart.pull(row[1:].to(self.origin))

    def _params(self, z: Tensor) -> Params:
        with torch.inference_mode(False):  # what is made here can then be differentiated in
            return self.risk.space.split(self.origin + self.chart.shift(z))

    def _fold(self, params: Params, fn: Callable[[Params, Batch], tuple[Tensor, Tensor]]) -> Tensor:
        self.evaluations += 1

        def ask() -> Tensor:
            return self.risk.fold(fn, Mean(), batches=self.batches)  # type: ignore[no-any-return]

        mean = answered(params.values(), ask) if self.batches is None else ask()  # of some batches it is soon there
        if self.risk.version() != self._seen:
            raise WeightsMovedError("the weights changed while the search was under way; measure a copy of the model")
        return mean

    def _total_and_gradient(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over a batch and its gradient, (1 + dim,), and the weight of the batch."""
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            total, weight = self.risk.total_and_weight(leaves, batch)
        head = total.detach()[None].to(self.origin)
        if not total.requires_grad:  # none of the chosen parameters is used
            return torch.cat([head, torch.zeros_like(self.origin)]), weight
        grads = torch.autograd.grad(total, tuple(leaves.values()), materialize_grads=True)
        return torch.cat([head, *(g.flatten() for g in grads)]), weight.detach()

    def _met(self, loss: Tensor) -> float:
        """The loss as a number; an error if it is not finite."""
        value = float(loss)
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the loss is {value} at a point of the search, though finite at the weights themselves; give a "
                "smaller rho or epsilon, or use float64"
            )
        return value


def random_point(space: ParamSpace, norm: Norm, index: int, seed: int, like: Tensor) -> Tensor:
    """Standard normal coordinates for "l2", uniform on (-1, 1) for "linf", keyed as probes are.

    Example:
        >>> space = ParamSpace(("w",), (torch.Size([1000]),))
        >>> z = random_point(space, "linf", 0, 0, torch.empty(0))
        >>> bool((z.abs() < 1).all()), bool(z.mean().abs() < 0.1), z.dtype
        (True, True, torch.float32)
    """
    if norm == "l2":
        return space.probes([index], seed, "normal", dtype=like.dtype, device=like.device)[0]
    named = zip(space.names, space.sizes, strict=True)
    parts = [random_uniform(size, (int(seed), index, name, "box"), like.device) for name, size in named]
    return torch.cat(parts).mul_(2).sub_(1).to(like.dtype)


# ------------------------------------------------------------------------------------------------- the box


def climb_box(surface: Surface, start: Tensor, iterations: int, tick: Tick) -> tuple[float, bool]:
    """The largest loss that L-BFGS-B meets in |z_i| <= 1, and whether it converged before its last iteration."""
    import numpy as np
    from scipy.optimize import Bounds, minimize

    met: list[float] = []
    unit = 0.0

    def objective(x: "np.ndarray[Any, Any]") -> tuple[float, "np.ndarray[Any, Any]"]:
        nonlocal unit
        # a copy: products of a CPU are rounded by where a vector lies, and numpy's lie anywhere
        loss, slope = surface.slope(torch.as_tensor(x).to(start, copy=True))
        # the first step is minus the gradient: in this unit it reaches the faces of the box, however flat the loss is
        unit = unit or _UNIT * float(slope.abs().mean()) or 1.0
        met.append(loss)
        return (met[0] - loss) / unit, (-slope / unit).double().cpu().numpy()

    options = {"maxiter": iterations, "maxcor": _MEMORY, "ftol": 0.0, "gtol": 0.0}
    box = Bounds(-np.ones(len(start)), np.ones(len(start)))
    first, ticks = start.double().cpu().numpy(), itertools.count(1)
    result = minimize(
        objective, first, jac=True, method="L-BFGS-B", bounds=box, callback=lambda x: tick(next(ticks)), options=options
    )
    tick(iterations)
    return max(met), bool(result.nit < iterations)


# ------------------------------------------------------------------------------------------------ the ball


@dataclass(frozen=True)
class Ball:
    """|z| <= rho in one of two norms.

    Example:
        >>> Ball(1.0, "l2").project(torch.tensor([3.0, 4.0])).tolist()
        [0.6, 0.8]
        >>> Ball(1.0, "linf").project(torch.tensor([3.0, 0.5])).tolist()
        [1.0, 0.5]
    """

    rho: float
    norm: Norm

    def project(self, z: Tensor) -> Tensor:
        """The nearest point of the ball."""
        if self.norm == "linf":
            return z.clamp(-self.rho, self.rho)
        length = float(row_norms(z[None]))
        return z * (self.rho / length) if length > self.rho else z

    def steepest(self, gradient: Tensor) -> Tensor:
        """The unit direction of steepest ascent; 0 if the gradient is 0."""
        if self.norm == "linf":
            return gradient.sign()
        length = float(row_norms(gradient[None]))
        return gradient / length if length else gradient

    def start(self, space: ParamSpace, index: int, seed: int, like: Tensor) -> Tensor:
        """A random point on the sphere, or in the box."""
        z = random_point(space, self.norm, -1 - index, seed, like)  # averages over draws take the indices from 0
        return self.rho * (self.steepest(z) if self.norm == "l2" else z)


def climb_ball(surface: Surface, ball: Ball, steps: int, num_starts: int, seed: int, tick: Tick) -> float:
    """The largest loss met in a ball minus that at its centre, by ascent from the centre and from random points.

    The first `SCOUTED` steps are made from each start, the others from the best point found by them: a loss has many
    local maxima on a sphere or a cube, and more steps towards one of them do not find another.
    """
    centre = torch.zeros_like(surface.origin)
    loss, gradient = surface.slope(centre)
    scouted = min(steps, SCOUTED) if num_starts > 1 else steps
    more = steps - scouted
    best = _ascend(surface, ball, (loss, centre, gradient), scouted, more > 0, tick)
    for number in range(1, num_starts):
        start = ball.start(surface.risk.space, number, seed, centre)
        level, slope = surface.slope(start)
        found = _ascend(surface, ball, (level, start, slope), scouted, more > 0, tick)
        best = found if found[0] > best[0] else best
    return _ascend(surface, ball, best, more, False, tick)[0] - loss


def _ascend(surface: Surface, ball: Ball, start: Point, steps: int, further: bool, tick: Tick) -> Point:
    """The highest point met by ascent from a start (APGD; Croce and Hein 2020, algorithm 1).

    The gradient of the last point is computed only if the ascent goes `further` from there.
    """
    best, (loss, z, gradient) = start, start
    before, step = z, 2 * ball.rho
    looks, rises, last_look, last_best = _looks(steps), 0, 0, -math.inf
    for number in range(1, steps + 1):
        ahead = ball.project(z + step * ball.steepest(gradient))
        if number > 1:
            ahead = ball.project(z + (1 - _MOMENTUM) * (ahead - z) + _MOMENTUM * (z - before))
        before, z, level = z, ahead, loss
        loss, gradient = surface.slope(z) if further or number < steps else (surface.loss(z), gradient)
        tick(surface.evaluations)
        rises += loss > level
        best = (loss, z, gradient) if loss > best[0] else best
        if number in looks:
            if rises < _RISES * (number - last_look) or best[0] <= last_best:
                step, (loss, z, gradient) = step / 2, best
                before = z
            rises, last_look, last_best = 0, number, best[0]
    return best


def _looks(steps: int) -> set[int]:
    """The steps after which the step size is checked: 0.22 of all, then at shrinking intervals (Croce and Hein)."""
    looks, at, gap = set(), 0.22, 0.22
    while at < 1:
        looks.add(math.ceil(at * steps))
        gap = max(gap - 0.03, 0.06)
        at += gap
    return looks
