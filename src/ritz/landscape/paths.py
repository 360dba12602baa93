"""The loss evaluated along lines and planes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..operators.hessian import Hessian
from ..reducers import Mean
from ..results import Estimate
from ..risk import Params, Progress, Risk
from ..space import ParamSpace, row_dots, row_norms
from ..weights import by_first_names
from .pictures import Interpolation, Line, Plane

Weights = Mapping[str, Tensor] | Tensor  # a state dict or named tensors, or a flat vector (dim,)
Coordinates = Tensor | Sequence[float]

_MARGIN = 0.25  # how far a plane through three solutions extends beyond them, relative to their spread


def line(
    risk: Risk,
    direction: Tensor,
    *,
    radius: float | None = None,
    num: int = 41,
    grid: Coordinates | None = None,
    derivatives: bool = True,
    progress: Progress | None = None,
) -> Line:
    """The loss along w + t d.

    Args:
        risk: The solution w, and the loss.
        direction: d (dim,), of any length: a coordinate is a multiple of d.
        radius: The coordinates go from -radius to radius; 1 if neither this nor `grid` is given.
        num: Number of points; odd, so that the solution itself is one of them.
        grid: Ascending coordinates, instead of `radius` and `num`.
        derivatives: Also compute slope and curvature at 0, which costs a gradient and a Hessian product.
        progress: Called as progress(points done, points).

    Raises:
        ValueError: If the direction or the grid cannot be used.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), torch.zeros(1, 1)))
        >>> seen = line(risk, torch.ones(1), num=3)  # (1 + t)^2
        >>> seen.losses.tolist(), seen.curvature.value, seen.second_difference.value
        ([0.0, 1.0, 4.0], 2.0, 2.0)
    """
    d = _direction(risk, direction)
    axis = _axis(radius, num, grid)
    risk.check()
    slope = curvature = None
    if derivatives:
        fields: dict[str, Any] = {"exact": True, "convention": f"not divided by ||d||^2; {risk.convention()}"}
        slope = Estimate(name="d'g", value=_dot(risk.gradient(), d), **fields)
        curvature = Estimate(name="d'Hd", value=_dot(Hessian(risk) @ d, d), products=1, **fields)
    here = risk.space.join(risk.params())
    points = (risk.space.split(here + t * d) for t in axis.tolist())
    losses, errors = _evaluate(risk, points, len(axis), progress)
    return Line(
        coordinates=axis, losses=losses, errors=errors, norm=_dot(d, d) ** 0.5, slope=slope, curvature=curvature,
        convention=risk.convention(),
    )  # fmt: skip


def interpolate(
    risk: Risk, other: Weights, *, num: int = 21, over: float = 0.0, progress: Progress | None = None
) -> Interpolation:
    """The loss from the risk's own solution to another of the same network (Goodfellow et al. 2015).

    Weights that are not among the chosen parameters move too if `other` contains different values for them, and count
    in the distance. Buffers in `other`, such as the running statistics of BatchNorm, are interpolated with the weights;
    beyond an end, they keep their values at that end. Buffers that `other` does not contain are those of the risk.
    Interpolated statistics belong to neither solution, so in evaluation mode they may cause a barrier by themselves
    (Jordan et al. 2023). With mode="train" they are not used.

    Args:
        risk: One end, and the loss.
        other: The other end: a state dict or named tensors for all chosen parameters, or a flat vector (dim,).
        num: Number of points from end to end.
        over: How far to continue beyond both ends, relative to the distance.
        progress: Called as progress(points done, points).

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> risk = ritz.Risk(model, lambda out, y: (out.square() - 1).square().mean(), (torch.ones(1, 1),) * 2)
        >>> found = interpolate(risk, torch.tensor([-1.0]), num=5)  # two minima, 1 and -1, of (w^2 - 1)^2
        >>> found.losses.tolist(), found.barrier.value
        ([0.0, 0.5625, 1.0, 0.5625, 0.0], 1.0)
    """
    if num < 3 or not 0 <= over < math.inf:
        raise ValueError(f"expected num >= 3 points and over >= 0, got num={num} and over={over}")
    mix = _Mix(risk, [other])
    beyond = round(over * (num - 1))
    axis = torch.arange(-beyond, num + beyond, dtype=torch.float64) / (num - 1)
    points = (mix(t[None]) for t in axis)
    losses, errors = _evaluate(risk, points, len(axis), progress)
    distance = float(row_norms(mix.apart)[0])
    return Interpolation(
        coordinates=axis, losses=losses, errors=errors, distance=distance, convention=risk.convention()
    )


def plane(
    risk: Risk,
    first: Tensor,
    second: Tensor,
    *,
    radius: float | tuple[float, float] | None = None,
    num: int | tuple[int, int] = (21, 21),
    grid: tuple[Coordinates, Coordinates] | None = None,
    progress: Progress | None = None,
) -> Plane:
    """The loss on w + s d + t e.

    Two random directions are orthogonal up to about 1 / sqrt(P). Other directions may shear the picture, see
    `Plane.cosine`.

    Args:
        risk: The solution w, and the loss.
        first, second: Directions d and e (dim,), of any length: a coordinate is a multiple of its direction.
        radius, num, grid: As for `line`: one value for both directions, or a pair.
        progress: Called as progress(points done, points).

    Raises:
        ValueError: If a direction or the grid cannot be used, or the directions are parallel.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)))
        >>> found = plane(risk, *torch.eye(2), num=3)  # (s^2 + t^2) / 2
        >>> found.losses.tolist(), found.minimum
        ([[1.0, 0.5, 1.0], [0.5, 0.0, 0.5], [1.0, 0.5, 1.0]], (0.0, 0.0, 0.0))
    """
    d, e = _direction(risk, first), _direction(risk, second)
    cosine = _dot(d, e) / math.sqrt(_dot(d, d) * _dot(e, e))
    if 1 - abs(cosine) < 1e-6:
        raise ValueError("the two directions are parallel: they span a line, not a plane; use line")
    x, y = (_axis(*given) for given in zip(_pair(radius), _pair(num), _pair(grid), strict=True))
    risk.check()
    here = risk.space.join(risk.params())
    points = (risk.space.split(here + s * d + t * e) for s in x.tolist() for t in y.tolist())
    losses, errors = _evaluate(risk, points, len(x) * len(y), progress)
    return _as_plane(risk, x, y, losses, errors, torch.zeros(1, 2, dtype=torch.float64), ("solution",), cosine)


def plane_through(
    risk: Risk,
    first: Weights,
    second: Weights,
    *,
    num: int | tuple[int, int] = (21, 21),
    progress: Progress | None = None,
) -> Plane:
    """The loss on the plane through three solutions: the risk's own and two others (Garipov et al. 2018).

    Coordinates are distances in weight space along the orthonormal axes that Gram-Schmidt makes of the two differences.
    Buffers that the others contain are interpolated with the weights, as in `interpolate`; outside the triangle they
    keep their values at its edge.

    Args:
        risk: One solution, and the loss.
        first, second: The others: state dicts, named tensors or flat vectors (dim,).
        num: Points along each axis.
        progress: Called as progress(points done, points).

    Raises:
        ValueError: If the three solutions lie on a line.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)))
        >>> plane_through(risk, torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])).points.tolist()
        [[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]]
    """
    counts = _pair(num)
    if min(counts) < 2:
        raise ValueError(f"num must be at least 2, got {num}")
    mix = _Mix(risk, [first, second])
    apart = mix.apart.double()
    across = float(apart[0].norm())
    along = float(apart[0] @ apart[1]) / across if across else 0.0
    height = float((apart[1] - along / across * apart[0]).norm()) if across else 0.0
    if not height > 1e-6 * max(across, float(apart[1].norm())):
        raise ValueError("the three solutions lie on a line: use interpolate, or another solution")
    corners = torch.tensor([[0.0, 0.0], [across, 0.0], [along, height]], dtype=torch.float64)
    x, y = (_cover(corners[:, axis], count) for axis, count in enumerate(counts))
    # the point p, q is s of the first difference and t of the second: p = s across + t along, q = t height
    points = (
        mix(torch.tensor([(p - q * along / height) / across, q / height], dtype=torch.float64))
        for p in x.tolist()
        for q in y.tolist()
    )
    losses, errors = _evaluate(risk, points, len(x) * len(y), progress)
    return _as_plane(risk, x, y, losses, errors, corners, ("solution", "first other", "second other"), 0.0)


# ------------------------------------------------------------------------------------------- evaluation


class _Mix:
    """All weights w + sum_i c_i (w_i - w) for a risk at w and other solutions w_i, with interpolated buffers."""

    def __init__(self, risk: Risk, others: Sequence[Weights]) -> None:
        moved = [_moved(risk, other) for other in others]
        for each in (risk, *moved):
            each.check()
        own, *theirs = (each.state() for each in (risk, *moved))
        different = {
            name: torch.stack([t, *(other[name] for other in theirs)])
            for name, t in own.items()
            if t.is_floating_point() and not all(torch.equal(t, other[name]) for other in theirs)
        }
        weights = {name for name, _ in risk.model.named_parameters()}
        self.held = {name: stack for name, stack in different.items() if name not in weights}
        names = tuple(name for name in own if name in weights and name in {*risk.names, *different})
        self.space = ParamSpace(names, tuple(own[name].shape for name in names))
        self.here, *there = (self.space.join(state) for state in (own, *theirs))
        self.apart = torch.stack([w - self.here for w in there])  # (k, dim)

    def __call__(self, coefficients: Tensor) -> dict[str, Tensor]:
        inside = coefficients.clamp(min=0)
        inside = inside / inside.sum().clamp(min=1)  # a variance extrapolated beyond an end could be negative
        share = torch.cat([1 - inside.sum()[None], inside])
        held = {name: torch.tensordot(share.to(stack), stack, 1) for name, stack in self.held.items()}
        return {**self.space.split(self.here + coefficients.to(self.apart) @ self.apart), **held}


def _moved(risk: Risk, weights: Weights) -> Risk:
    """The risk at another solution."""
    if isinstance(weights, Tensor):
        return risk.at(weights)
    if not isinstance(weights, Mapping):
        raise TypeError(f"another solution must be a state dict or a flat vector, got {type(weights).__name__}")
    weights = by_first_names(weights, risk.model)
    missing = [name for name in risk.names if name not in weights]
    if missing:
        raise ValueError(f"the other solution has no {missing[0]!r}; it has: {', '.join(list(weights)[:20])}")
    # a state dict may contain more than parameters and buffers
    known = {name for name, _ in (*risk.model.named_parameters(), *risk.model.named_buffers())}
    besides = set(risk.model.state_dict()) - known
    return risk.at({name: value for name, value in weights.items() if name not in besides})


def _evaluate(
    risk: Risk, points: Iterable[Mapping[str, Tensor]], total: int, progress: Progress | None
) -> tuple[Tensor, Tensor | None]:
    """Losses (total,) and, if there are classes, errors at the points; the caller has checked the risk."""
    classes = _has_classes(risk)
    rows = []
    for done, point in enumerate(points, 1):
        moved = risk.at(point)
        rows.append(moved.fold(_totals(moved, classes), Mean()).cpu())
        if progress is not None:
            progress(done, total)
    table = torch.stack(rows)
    losses = table[:, 0].nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)
    return losses, table[:, 1] if classes and not bool(table[:, 1].isnan().any()) else None


def _has_classes(risk: Risk) -> bool:
    """Whether the loss can tell right from wrong predictions, from the first batch."""
    if risk.opaque:
        return False
    batch = next(iter(risk.batches))
    batch = batch.head(1) if risk.splittable else batch
    with risk.session():
        items = risk.output_loss.items(risk.output(risk.params(), batch), batch.data)
    return items.margin is not None and items.probabilities is not None and items.probabilities.shape[-1] > 1


def _totals(risk: Risk, classes: bool) -> Callable[[Params, Batch], tuple[Tensor, Tensor]]:
    """For one batch: the sum of losses and, if there are classes, the number of errors, with their weights."""

    def plain(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        total, weight = risk.total_and_weight(params, batch)
        return total.double()[None], weight.double()[None]

    def labelled(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        out, loss = risk.output(params, batch), risk.output_loss
        items = loss.items(out, batch.data)
        if items.margin is None:  # a later batch has labels that are no classes
            wrong = out.new_tensor(math.nan)
        else:
            wrong = ((items.weight != 0) & ~(items.margin > 0)).sum()  # NaN counts as wrong
        counted = (items.weight != 0).sum()  # errors are not weighted by class
        weights = torch.stack([loss.weight(out, batch.data).double(), counted.double()])
        return torch.stack([loss.total(out, batch.data).double(), wrong.double()]), weights

    return labelled if classes else plain


def _as_plane(
    risk: Risk, x: Tensor, y: Tensor, losses: Tensor, errors: Tensor | None, points: Tensor, names: tuple[str, ...],
    cosine: float,
) -> Plane:  # fmt: skip
    """The plane from values in the order of evaluation."""
    shape = len(x), len(y)
    return Plane(
        x=x, y=y, losses=losses.reshape(shape), errors=None if errors is None else errors.reshape(shape),
        points=points, names=names, cosine=cosine, convention=risk.convention(),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- arguments


def _direction(risk: Risk, given: Tensor) -> Tensor:
    """The direction, after checking it, on the device and in the precision of the risk."""
    if not isinstance(given, Tensor) or given.shape != (risk.dim,):
        got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"a direction must be a flat vector (dim={risk.dim},), got {got}")
    d = given.detach().to(risk.device, risk.dtype)
    if not bool(d.isfinite().all()) or not bool(d.any()):
        raise ValueError("a direction must be finite and not zero")
    return d


def _axis(radius: float | None, num: int, grid: Coordinates | None) -> Tensor:
    """Coordinates (n,), float64, ascending."""
    if grid is not None:
        if radius is not None:
            raise ValueError("give either radius= or grid=, not both")
        axis = torch.as_tensor(grid, dtype=torch.float64).detach().cpu()
        if axis.ndim != 1 or len(axis) < 2 or not bool(axis.isfinite().all()) or not bool((axis.diff() > 0).all()):
            raise ValueError(f"grid must be at least two finite numbers in ascending order, got {axis.tolist()}")
        return axis
    radius = 1.0 if radius is None else float(radius)
    if not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive and finite, got {radius}")
    if num < 3 or num % 2 == 0:
        raise ValueError(f"num must be odd and at least 3, so that the solution itself is on the grid, got {num}")
    return (2 * torch.arange(num, dtype=torch.float64) / (num - 1) - 1) * radius


def _cover(values: Tensor, num: int) -> Tensor:
    """`num` coordinates over the range of some values and a margin around it."""
    low, high = float(values.min()), float(values.max())
    air = _MARGIN * (high - low)
    return torch.linspace(low - air, high + air, num, dtype=torch.float64)


def _pair(given: Any) -> tuple[Any, Any]:
    """The value for each direction."""
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(f"radius, num and grid must be one value or a pair, got {len(given)} values")
        return given
    return given, given


def _dot(left: Tensor, right: Tensor) -> float:
    return float(row_dots(left[None], right[None])[0])
