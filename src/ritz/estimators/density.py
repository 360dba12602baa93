"""The spectral density on a grid: the nodes and weights of a run under a normal kernel, with pointwise intervals."""

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import NumericalWarning, callers_level
from ..intervals import IntervalRule, StudentT
from ..krylov.quadrature import Quadrature
from ..krylov.tridiagonal import Tridiagonal
from ..results import Estimate, new_axes
from .forms import centred_moments, moment_rules

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .quantities import Spectrum

_DECADES = 1e-8  # of the top: what is drawn of a density that is 0 almost everywhere


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Density(Estimate):
    """A smoothed density, known at some points.

    Attributes:
        grid: Where (num,), float64; `value` is the density there.
        width: Of the normal kernel.
    """

    grid: Tensor
    width: float

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The curve on a logarithmic scale with its 95 % band."""
        ax = ax or new_axes()
        low, high = (torch.as_tensor(end) for end in self.interval())
        (line,) = ax.plot(self.grid, self.value)
        ax.fill_between(self.grid, low.nan_to_num(), high.nan_to_num(), alpha=0.25, color=line.get_color(), lw=0)
        top = float(torch.as_tensor(self.value).max())
        if top > 0:
            ax.set(yscale="log", ylim=(_DECADES * top, 3 * top))
        ax.set(xlabel="eigenvalue", ylabel=f"density, smoothed over {self.width:.2g}")
        return ax


def smoothed(s: "Spectrum", grid: Tensor | None, width: float | None) -> Density:
    """(1 / P) sum_i N(x - lambda_i, width^2) at each x of the grid; see `Spectrum.density`."""
    grid = default_grid(s) if grid is None else torch.atleast_1d(torch.as_tensor(grid)).double()
    finest = _finest(s)
    width = default_width(s) if width is None else float(width)
    if not width > 0:
        raise ValueError(f"width must be positive, got {width}")
    if width < finest * (1 - 1e-9):
        warnings.warn(
            f"width {width:g} is finer than {s.num_steps} steps can resolve, so peaks may be nodes instead of "
            f"eigenvalues; use a width of at least {finest:.3g}, or more steps",
            NumericalWarning,
            stacklevel=callers_level(),
        )
    about = s._cost(f"smoothed by a normal kernel of width {width:g}, pointwise")
    head = _smooth(grid, width, s.head, torch.full_like(s.head, 1 / s.dim))
    # how much the curve changes where every eigenvalue moves by what the products may be off
    moved = _smooth(grid, width, s.nodes, s.rounding * s.weights, slope=True) if s.rounding else torch.zeros_like(grid)
    if s.tail is None:
        bracket = ((head - moved).clamp(min=0), head + moved) if s.rounding else None
        zero = torch.zeros_like(head)
        return Density(
            name="density", value=head, stderr=zero, bracket=bracket, exact=True, grid=grid, width=width, **about
        )  # fmt: skip
    curves, depth, rule = _sampled(s, s.tail, grid, width)
    value, depth = head + curves.mean(0), depth + moved
    stderr = torch.full_like(value, math.nan)  # of one probe nothing is known
    if s.num_probes > 1:
        stderr = curves.std(0, correction=1) / math.sqrt(s.num_probes)
    return Density(
        name="density", value=value, stderr=stderr, bracket=((value - depth).clamp(min=0), value + depth), rule=rule,
        support=(0.0, math.inf), grid=grid, width=width, **about,
    )  # fmt: skip


def _sampled(s: "Spectrum", tail: Tridiagonal, grid: Tensor, width: float) -> tuple[Tensor, Tensor, IntervalRule]:
    """Each probe's curve (K, grid), what the depth of quadrature and head may be off by (grid,), and the interval."""
    low, high = s.range()
    left = s.dim - len(s.head)
    rules = [s._gauss, tail.radau(high), tail.radau(low)]
    curves = [left / s.dim * _smooth(grid, width, rule.nodes, rule.weights) for rule in rules]  # (K, grid)
    samples = curves[0].mean(0)
    # rules of degree 2m - 1 and 2m differ by what is left of the depth error; a locked value by up to its residual
    depth = torch.stack([(curve.mean(0) - samples).abs() for curve in curves[1:]]).amax(0)
    depth = depth + _smooth(grid, width, s.head, s.head_residuals / s.dim, slope=True)
    return curves[0], depth, _by_moments(s, rules[0], grid, width)


def _by_moments(s: "Spectrum", rules: Quadrature, grid: Tensor, width: float) -> IntervalRule:
    """The interval at each point, from the moments of the kernel about it; see `Spectrum.rule_by_moments`.

    Among few large eigenvalues and many that one point sees alike the curve there is skewed to the left, since probes
    that have more of the former have less of the latter. Rules of one node have no moments.
    """
    num, left = s.num_probes, s.dim - len(s.head)
    if rules.nodes.shape[-1] == 1:
        return StudentT(num - 1)
    height = 1 / (s.dim * width * math.sqrt(2 * math.pi))  # of one eigenvalue
    apart = Quadrature(rules.nodes[:, None], rules.weights[:, None])  # (K, grid, m) with the kernel
    root, cube, square = centred_moments(apart, lambda t: torch.exp(-0.5 * ((grid[:, None] - t) / width).square()))
    dof = num**2 / (num + 2) * left / torch.where(square > 0, square, 1.0)
    return moment_rules(num, math.sqrt(left) * height * root, height * root * cube, dof)


def _smooth(grid: Tensor, width: float, nodes: Tensor, weights: Tensor, slope: bool = False) -> Tensor:
    """sum_j w_j N(x - t_j) on the grid, or with the size of its slope in t_j: (..., m) -> (..., len(grid))."""
    z = (grid[:, None] - nodes[..., None, :]) / width
    kernel = torch.exp(-0.5 * z.square()) / (width * math.sqrt(2 * math.pi))
    if slope:
        kernel = kernel * (z.abs() + 0.1) / width  # at the top, where the slope is 0, the next order takes over
    return (kernel * weights[..., None, :]).sum(-1)


# ---------------------------------------------------------------------------------------- grid, width, picture


def _span(s: "Spectrum") -> float:
    """Largest less smallest Ritz value; 0 where that is round-off."""
    low, high = s.range()
    return high - low if high - low > 64 * s.noise * max(abs(low), abs(high)) else 0.0


def _finest(s: "Spectrum") -> float:
    """The width that the steps resolve."""
    return _span(s) / s.num_steps if s.tail is not None else 0.0


def default_width(s: "Spectrum") -> float:
    """The larger of 1 % of the range and what the steps resolve; for one eigenvalue, 1 % of it."""
    low, high = s.range()
    return max(_finest(s), 0.01 * _span(s)) or 0.01 * max(abs(low), abs(high)) or 1.0


def default_grid(s: "Spectrum", num: int = 512) -> Tensor:
    """Evenly spaced points over the range and 5 % or five widths beyond it."""
    low, high = s.range()
    margin = max(0.05 * _span(s), 5 * default_width(s))
    return torch.linspace(low - margin, high + margin, num, dtype=torch.float64)


def draw(s: "Spectrum", ax: "Axes | None", width: float | None) -> "Axes":
    """The density on a logarithmic scale with its 95 % band, and the locked outliers as ticks."""
    curve = smoothed(s, default_grid(s), width)
    ax, grid = curve.plot(ax), curve.grid
    color = ax.get_lines()[-1].get_color()
    ax.plot(s.head, torch.full_like(s.head, 0.02), "|", color=color, transform=ax.get_xaxis_transform())
    top = float(torch.as_tensor(curve.value).max())
    ax.set(ylim=(0.1 / s.dim / (float(grid[-1] - grid[0]) or 1.0), 3 * top))
    return ax
