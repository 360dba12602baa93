"""Distributions of numbers of single items: weighted quantiles, skewness, boxes and histograms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...results import new_axes
from ...storage import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REPORTED = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_ROUND_OFF = 8 * torch.finfo(torch.float64).eps  # relative spread of values that are all the same


def weighted_quantile(values: Tensor, weight: Tensor, q: float) -> float:
    """The q-quantile of weighted values, linearly interpolated.

    The k-th smallest value is placed at the middle of its weight, (w_1 + ... + w_k) - w_k / 2, scaled so that q = 0 is
    the smallest and q = 1 the largest. With equal weights this is (k - 1) / (n - 1), NumPy's default.

    Example:
        >>> weighted_quantile(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([2.0, 2.0, 2.0]), 0.75)
        2.5
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q must lie between 0 and 1, got {q}")
    order = weight.argsort(stable=True)
    order = order[values[order].argsort(stable=True)]  # equal values by weight: the order of the data does not matter
    v, w = values[order].double(), weight[order].double()
    middle = w.cumsum(0) - w / 2
    place = middle[0] + q * (middle[-1] - middle[0])
    above = int(torch.searchsorted(middle, place).clamp(0, len(v) - 1))
    low, high = float(v[max(above - 1, 0)]), float(v[above])
    if above == 0 or low == high or place == middle[above]:  # two infinite values have no difference
        return high
    if low == -math.inf:  # nor has one a finite distance
        return low
    part = float((place - middle[above - 1]) / (middle[above] - middle[above - 1]))
    return min(low + (high - low) * part, high)


def skewness(values: Tensor, weight: Tensor) -> float:
    """The third standardised moment of weighted values, as of a population.

    Raises:
        UnsupportedError: If all values are equal, which would give 0 / 0.

    Example:
        >>> round(skewness(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])), 6)
        -0.707107
    """
    share = (weight / weight.sum()).double()
    centred = values.double() - (share * values).sum()
    variance = (share * centred.square()).sum()
    if variance <= (_ROUND_OFF * values.abs().max()) ** 2:
        raise UnsupportedError(f"all {len(values)} margins are {float(values[0]):.6g}: their skewness is 0 / 0")
    return float((share * centred**3).sum() / variance**1.5)


@dataclass(frozen=True)
class Box:
    """What a box plot shows: quartiles, and whiskers at the last values within 1.5 interquartile ranges of the box.

    Example:
        >>> Box.of(torch.tensor([0.0, 1.0, 2.0, 3.0, 40.0]), torch.ones(5)).high
        3.0
    """

    low: float
    q1: float
    median: float
    q3: float
    high: float
    fliers: tuple[float, ...]  # the values beyond the whiskers, ascending

    @classmethod
    def of(cls, values: Tensor, weight: Tensor) -> "Box":
        """The box of weighted values."""
        q1, median, q3 = (weighted_quantile(values, weight, q) for q in (0.25, 0.5, 0.75))
        reach = 1.5 * (q3 - q1)
        inside = values[(values >= q1 - reach) & (values <= q3 + reach)]
        # between two values a quartile may lie outside of all that are within reach
        low, high = (min(float(inside.min()), q1), max(float(inside.max()), q3)) if len(inside) else (q1, q3)
        fliers = values[(values < low) | (values > high)].sort().values.tolist()
        return cls(low, q1, median, q3, high, tuple(fliers))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class MarginDistribution(Result):
    """The margins of all items, and statistics of their distribution (seed 003, figure 4c).

    Attributes:
        name: Label of the axis.
        values: The margins, (n,).
        weight: Weight of each item, (n,).
        correct: Whether its prediction is right, (n,) bool.
        convention: Which margins, over what.

    Example:
        >>> values = torch.tensor([3.0, 2.0, 1.0, -2.0])
        >>> margins = MarginDistribution(
        ...     name="margin", values=values, weight=torch.ones(4), correct=values > 0, convention="signed"
        ... )
        >>> margins.quantiles[0.5], margins.box.q3, margins.part(correct=False).values.tolist()
        (1.5, 2.25, [-2.0])
    """

    name: str
    values: Tensor
    weight: Tensor
    correct: Tensor
    convention: str

    @property
    def quantiles(self) -> Mapping[float, float]:
        """The smallest, 5 %, 10 %, quartiles, 90 %, 95 % and the largest."""
        return {q: self.quantile(q) for q in _REPORTED}

    @property
    def skewness(self) -> float:
        """The third standardised moment, of the population; see `margin_skewness`."""
        return skewness(self.values, self.weight)

    @property
    def box(self) -> Box:
        """Quartiles, whiskers and what lies beyond them."""
        return Box.of(self.values, self.weight)

    def quantile(self, q: float) -> float:
        """See `weighted_quantile`."""
        return weighted_quantile(self.values, self.weight, q)

    def part(self, correct: bool) -> "MarginDistribution":
        """The items that are predicted correctly, or the others.

        Raises:
            UnsupportedError: If there are no such items.
        """
        rows = self.correct == correct
        word = "right" if correct else "wrong"
        if not bool(rows.any()):
            raise UnsupportedError(f"none of the {len(rows)} items is predicted {word}")
        fields = {name: getattr(self, name)[rows] for name in ("values", "weight", "correct")}
        return replace(self, **fields, convention=f"{self.convention}; those predicted {word}")

    def histogram(self, bins: int = 50) -> tuple[Tensor, Tensor, Tensor]:
        """(edges (bins + 1,), weight of right predictions in each bin (bins,), of wrong ones (bins,))."""
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}")
        low, high = float(self.values.min()), float(self.values.max())
        pad = 0.0 if high > low else max(abs(low), 1.0) / 2  # one value: a bin around it
        edges = torch.linspace(low - pad, high + pad, bins + 1, dtype=torch.float64)
        place = (torch.searchsorted(edges, self.values.double(), right=True) - 1).clamp(0, bins - 1)
        parts = [torch.where(self.correct == side, self.weight, 0.0).double() for side in (True, False)]
        right, wrong = (torch.zeros(bins, dtype=torch.float64).index_add(0, place, part) for part in parts)
        return edges, right, wrong

    def plot(self, ax: "Axes | None" = None, *, kind: Literal["histogram", "box"] = "histogram") -> "Axes":
        """A histogram, wrong predictions on top of right ones, or box plots of all, right and wrong."""
        if kind not in ("histogram", "box"):
            raise ValueError(f"kind must be 'histogram' or 'box', got {kind!r}")
        ax = ax or new_axes()
        if kind == "box":
            return self._boxes(ax)
        edges, right, wrong = (x.numpy() for x in self.histogram())
        width = edges[1:] - edges[:-1]
        ax.bar(edges[:-1], right, width, align="edge", color="C0", label="right")
        if wrong.any():
            ax.bar(edges[:-1], wrong, width, bottom=right, align="edge", color="C1", hatch="///", label="wrong")
        ax.axvline(self.quantile(0.5), color="0.2", lw=1, label="median")
        ax.set(xlabel=self.name, ylabel="items", title=self._shape())
        ax.legend()
        return ax

    def _boxes(self, ax: "Axes") -> "Axes":
        sides = [(word, side) for word, side in (("right", True), ("wrong", False)) if (self.correct == side).any()]
        boxes = [drawn(self.part(side).box, word) for word, side in sides]
        ax.bxp([drawn(self.box, "all"), *boxes] if len(boxes) > 1 else boxes)
        ax.set(ylabel=self.name, title=self._shape())
        return ax

    def _shape(self) -> str:
        try:
            return f"skewness {self.skewness:.2f}"
        except UnsupportedError:
            return "all the same"


def drawn(box: Box, label: str) -> dict[str, Any]:
    """A box as matplotlib's `bxp` takes it."""
    ends = {"whislo": box.low, "q1": box.q1, "med": box.median, "q3": box.q3, "whishi": box.high}
    return {**ends, "fliers": list(box.fliers), "label": label}
