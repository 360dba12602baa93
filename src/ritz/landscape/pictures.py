"""The loss along lines and planes: frozen results that can be saved, loaded and plotted."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..results import Estimate, new_axes
from ..storage import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVELS = 24  # contours of a plane


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class _Picture(Result):
    """Losses on a grid, infinite where the loss is not finite, and 0-1 errors."""

    losses: Tensor
    errors: Tensor | None
    convention: str


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Line(_Picture):
    """The loss along a line through the weights.

    Attributes:
        coordinates: Multiples of the direction (num,), float64; 0 is the solution.
        losses: Mean losses (num,), float64; infinite where the loss is not finite.
        errors: Share of wrong predictions (num,), ties counted as wrong; None for a loss without classes.
        norm: Length of the direction.
        slope: d'g at 0, or None without derivatives.
        curvature: d'Hd at 0, not divided by ||d||^2, or None without derivatives.
        convention: Which loss was evaluated.
    """

    coordinates: Tensor
    norm: float
    slope: Estimate | None
    curvature: Estimate | None

    @property
    def second_difference(self) -> Estimate:
        """Curvature at 0 from the losses at 0 and at its two neighbours: d'Hd at the scale of the grid.

        It differs from `curvature` by what happens between those points: higher derivatives, or a kink of a ReLU.

        Raises:
            ValueError: If 0 is not an inner point of the grid.
        """
        place = (self.coordinates == 0).nonzero().flatten()
        if not len(place) or not 0 < (i := int(place[0])) < len(self.coordinates) - 1:
            raise ValueError("a second difference needs a grid with a point at 0 and neighbours on both sides of it")
        (a, _, b), (left, here, right) = self.coordinates[i - 1 : i + 2], self.losses[i - 1 : i + 2]
        value = 2 * ((right - here) / b + (left - here) / -a) / (b - a)
        return Estimate(
            name="second difference", value=float(value), exact=True,
            convention=f"of losses at {float(a):.3g}, 0 and {float(b):.3g}; {self.convention}",
        )  # fmt: skip

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The loss, the parabola of slope and d'Hd over it, and the error rate on an axis of its own."""
        ax = ax or new_axes()
        t, seen = self.coordinates, _gaps(self.losses)
        _draw_errors(ax, t, self.errors, seen)
        ax.plot(t, seen, lw=1.8, label="loss")
        here = seen[t == 0]
        if self.slope is not None and self.curvature is not None and len(here) and bool(here.isfinite()):
            fine = torch.linspace(float(t[0]), float(t[-1]), 401, dtype=torch.float64)
            parabola = here + fine * float(self.slope) + fine.square() * float(self.curvature) / 2
            bottom, top = _limits(seen)
            parabola[(parabola > top) | (parabola < bottom)] = math.nan
            label = f"slope and d'Hd = {float(self.curvature):.3g} at 0"
            ax.plot(fine, parabola, "--", color="black", lw=1.0, label=label)
            ax.set_ylim(bottom, top)
        ax.axvline(0.0, color="0.7", lw=0.8, zorder=0)
        ax.set(xlabel=f"coordinate along a direction of length {self.norm:.3g}", ylabel="loss")
        _legend_above(ax)
        return ax


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Interpolation(_Picture):
    """The loss on the straight line between two solutions.

    Attributes:
        coordinates: 0 is the risk's own solution and 1 the other (num,), float64.
        losses, errors, convention: See `Line`.
        distance: ||w' - w||.
    """

    coordinates: Tensor
    distance: float

    @property
    def barrier(self) -> Estimate:
        """How far the loss rises above the chord between its ends; a lower bound, as fine as the grid.

            max_t L(t) - [(1 - t) L(0) + t L(1)],    t in [0, 1]

        (Frankle et al. 2020; with the chord, Entezari et al. 2022). Its part "error" is the barrier of the error rate.
        """
        rises = {"loss": self._rise(self.losses)}
        if self.errors is not None:
            rises["error"] = self._rise(self.errors)
        text = f"largest rise above the chord on {len(self.coordinates)} points; {self.convention}"
        each = {
            key: Estimate(name=f"barrier in {key}", value=value, exact=True, convention=text)
            for key, value in rises.items()
        }
        return Estimate(name="barrier", value=rises["loss"], exact=True, convention=text, parts=each)

    def _rise(self, values: Tensor) -> float:
        inside = (self.coordinates >= 0) & (self.coordinates <= 1)
        t, y = self.coordinates[inside], values[inside]
        if not bool(y.isfinite().all()):
            return math.inf
        return float((y - (1 - t) * y[0] - t * y[-1]).max())

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The loss, the chord under its barrier, and the error rate on an axis of its own."""
        ax = ax or new_axes()
        t, seen = self.coordinates, _gaps(self.losses)
        _draw_errors(ax, t, self.errors, seen)
        ax.plot(t, seen, lw=1.8, label=f"loss, barrier {float(self.barrier):.3g}")
        ends = (t == 0) | (t == 1)
        ax.plot(t[ends], seen[ends], "o--", color="black", lw=1.0, ms=5, label="chord between the solutions")
        ax.set(xlabel=f"from one solution (0) to the other (1), {self.distance:.3g} apart", ylabel="loss")
        ax.set_ylim(*_limits(seen))
        _legend_above(ax)
        return ax


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Plane(_Picture):
    """The loss on a plane through the weights. It is no evidence of convexity, since P - 2 directions remain unseen.

    Attributes:
        x, y: Coordinates along the first and the second direction (nx,) and (ny,), float64.
        losses: (nx, ny): losses[i, j] is at x[i], y[j]; infinite where the loss is not finite.
        errors: Shares of wrong predictions (nx, ny); None for a loss without classes.
        points: Coordinates of the solutions in the plane (m, 2), the risk's own first.
        names: Names of these solutions.
        cosine: Cosine of the angle between the directions; the picture is sheared if it is not 0.
        convention: Which loss was evaluated, and along which directions.
    """

    x: Tensor
    y: Tensor
    points: Tensor
    names: tuple[str, ...]
    cosine: float

    @property
    def minimum(self) -> tuple[float, float, float]:
        """(x, y, loss) of the lowest point of the grid."""
        i, j = divmod(int(self.losses.argmin()), len(self.y))
        return float(self.x[i]), float(self.y[j]), float(self.losses[i, j])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Contours at geometrically spaced levels, the solutions as crosses, and the lowest grid point as a dot."""
        ax = ax or new_axes()
        seen = _gaps(self.losses)
        finite = seen[seen.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (1.0, 1.0)
        if high > low:
            _draw_contours(ax, self.x, self.y, seen, low, high)
        lowest = f"lowest of the grid: {self.minimum[2]:.3g}"
        ax.plot(*self.minimum[:2], "o", mfc="white", mec="black", ms=7, label=lowest, clip_on=False)
        for (x, y), name, mark in zip(self.points.tolist(), self.names, "x+1", strict=False):
            ax.plot(x, y, mark, color="crimson", ms=11, mew=2.2, label=name, zorder=4)
        if len(self.points) > 1:  # coordinates are distances
            ax.set_aspect("equal")
        ax.set(xlim=(float(self.x[0]), float(self.x[-1])), ylim=(float(self.y[0]), float(self.y[-1])))
        ax.set(xlabel="along the first direction", ylabel="along the second direction")
        _legend_above(ax)
        return ax


# ------------------------------------------------------------------------------------------------- drawing


def _gaps(losses: Tensor) -> Tensor:
    """Losses with NaN, which is drawn as a gap, in place of values that are not finite."""
    return losses.where(losses.isfinite(), math.nan)


def _limits(values: Tensor) -> tuple[float, float]:
    """The range of the finite values, with some space around it."""
    finite = values[values.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    air = 0.06 * (high - low) or 0.5
    return low - air, high + 2 * air


def _legend_above(ax: "Axes") -> None:
    """A legend above the axes, where it covers nothing."""
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize="small")


def _draw_errors(ax: "Axes", coordinates: Tensor, errors: Tensor | None, losses: Tensor) -> None:
    """The error rate in percent, on an axis to the right, with the gaps of the loss."""
    if errors is None:
        return
    right = ax.twinx()
    right.plot(coordinates, 100 * errors.where(losses.isfinite(), math.nan), color="tab:orange", lw=1.0, alpha=0.8)
    right.set_ylabel("error, %", color="tab:orange")
    right.set_ylim(0.0, max(right.get_ylim()[1], 1.0))  # if all errors are 0, they are drawn at the bottom
    ax.set_zorder(right.get_zorder() + 1)  # the loss is drawn over it
    ax.patch.set_visible(False)


def _draw_contours(ax: "Axes", x: Tensor, y: Tensor, losses: Tensor, low: float, high: float) -> None:
    """Filled contours, equally spaced in the logarithm if all losses are positive."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import LogLocator

    values = losses.T.numpy()
    if low > 0:
        levels = torch.logspace(math.log10(low), math.log10(high), _LEVELS, dtype=torch.float64)
    else:
        levels = torch.linspace(low, high, _LEVELS, dtype=torch.float64)
    levels[0], levels[-1] = low, high  # exactly, or round-off leaves a hole at the lowest point
    norm = (LogNorm if low > 0 else Normalize)(low, high)
    filled = ax.contourf(x.numpy(), y.numpy(), values, levels=levels.numpy(), norm=norm, cmap="viridis")
    ax.contour(x.numpy(), y.numpy(), values, levels=levels.numpy(), colors="white", linewidths=0.4, alpha=0.6)
    decades = LogLocator() if low > 0 and high > 100 * low else None
    ax.figure.colorbar(filled, ax=ax, label="loss", format="%.3g", ticks=decades)
