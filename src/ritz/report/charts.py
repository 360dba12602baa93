"""Charts as plain data for the page's script. Numbers are rounded, never NaN, and thinned if there are many."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..results import Estimate

DIGITS = 5  # of a number on a chart: a pixel needs three
MOST_POINTS = 3000  # of a cloud of points
INKS = 8  # colours of series in the style sheet
MOST_STEPS = 1200  # of a curve over training

Series = dict[str, Any]
Values = Tensor | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of the page.

    Attributes:
        title: Text above the chart.
        label: What the chart shows, for screen readers.
        x, y: Axes: label, log, toggle (whether log can be switched), floor, categories, tight, zero.
        series: Curves and points; see `line`, `points`, `bars` and `rug`.
        caption: Text below the chart.
        marks: Lines at one value: {"x": 0, "label": "0"}.
        hover: "x" reads all series at one place, "point" the nearest point.
        zoom: "x" or "xy".
        group: Charts of one group share crosshair and zoom.
        choices: Other series to choose from: {"name", "x", "series"}.
        height: In pixels, if it does not follow from the width.

    Example:
        >>> curve = line("loss", [0, 1], [2.0, 1.5])
        >>> chart = Chart(title="Loss", label="loss by step", x={"label": "step"}, y={"label": "loss"}, series=[curve])
        >>> chart.spec("chart-0")["series"][0]["y"]
        [2, 1.5]
    """

    title: str
    label: str
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    series: Sequence[Series]
    caption: str = ""
    marks: Sequence[Mapping[str, Any]] = ()
    hover: str = "x"
    zoom: str = "x"
    group: str = ""
    choices: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    height: int | None = None

    def spec(self, key: str) -> dict[str, Any]:
        """As the script takes it, under the name of its figure."""
        found: dict[str, Any] = {"id": key, "label": self.label, "x": dict(self.x), "y": dict(self.y)}
        found |= {"series": list(self.series), "marks": [dict(mark) for mark in self.marks], "hover": self.hover}
        found |= {"zoom": self.zoom, "group": self.group, "height": self.height}
        if self.choices:
            found["choices"] = [dict(choice) for choice in self.choices]
        return found


def number(value: float) -> float | int | None:
    """A number to so many digits as a chart needs; None for one that is not finite.

    Example:
        >>> number(3.14159265), number(2.0), number(math.nan)
        (3.1416, 2, None)
    """
    value = float(value)
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def numbers(values: Values) -> list[float | int | None]:
    """A column of numbers.

    Example:
        >>> numbers(torch.tensor([1.0, math.inf, 0.25]))
        [1, None, 0.25]
    """
    column = values.detach().double().flatten().tolist() if isinstance(values, Tensor) else values
    return [number(value) for value in column]


def line(
    name: str, x: Values, y: Values, low: Values | None = None, high: Values | None = None, **about: Any
) -> Series:
    """A curve with its band.

    Example:
        >>> line("loss", [0, 1], [2.0, 1.5], color=3)
        {'kind': 'line', 'name': 'loss', 'x': [0, 1], 'y': [2, 1.5], 'color': 3}
    """
    band = {} if low is None or high is None else {"low": numbers(low), "high": numbers(high)}
    return {"kind": "line", "name": name, "x": numbers(x), "y": numbers(y), **band, "color": 0, **about}


def points(name: str, x: Values, y: Values, **about: Any) -> Series:
    """Points; `low` and `high` are error bars up and down, `xlow` and `xhigh` across, `text` a word for each.

    Example:
        >>> points("trace", [3.0], [0], xlow=[2.5], xhigh=[math.inf])["xhigh"]
        [None]
    """
    ends = {key: numbers(about.pop(key)) for key in ("low", "high", "xlow", "xhigh") if about.get(key) is not None}
    return {"kind": "points", "name": name, "x": numbers(x), "y": numbers(y), **ends, "color": 0, **about}


def bars(name: str, edges: Values, y: Values, base: Values | None = None, **about: Any) -> Series:
    """A histogram, on top of another one.

    Example:
        >>> bars("wrong", [0, 1, 2], [3.0, 1.0], base=[10.0, 0.0])["base"]
        [10, 0]
    """
    under = {} if base is None else {"base": numbers(base)}
    return {"kind": "bars", "name": name, "edges": numbers(edges), "y": numbers(y), **under, "color": 0, **about}


def rug(name: str, x: Values, text: Sequence[str], **about: Any) -> Series:
    """Single values as ticks on the axis.

    Example:
        >>> rug("outliers", [1.5], ["± 0.1"])["x"]
        [1.5]
    """
    return {"kind": "rug", "name": name, "x": numbers(x), "text": list(text), "color": 0, **about}


def interval(estimate: Estimate) -> tuple[float, float]:
    """The 95 % interval as two numbers.

    Example:
        >>> interval(Estimate(name="trace", value=2.0, exact=True))
        (2.0, 2.0)
    """
    low, high = estimate.interval()
    return float(low), float(high)


def thinned(count: int, keep: Tensor, most: int = MOST_POINTS, first: Tensor | None = None) -> Tensor:
    """Which of `count` points to draw: at most `most`, with the same distribution as all points.

    Points are chosen evenly by their rank in `keep`, including both ends. Points marked in `first` are chosen before
    others, up to a third of `most`.

    Example:
        >>> thinned(5, torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0])).tolist()
        [0, 1, 2, 3, 4]
        >>> thinned(1000, torch.arange(1000.0), most=4).tolist()
        [0, 333, 666, 999]
    """
    if count <= most:
        return torch.arange(count)
    chosen = torch.zeros(count, dtype=torch.bool)
    if first is not None:
        some = first.nonzero()[:, 0]
        chosen[some[_even(len(some), min(len(some), most // 3))]] = True
    order = keep.argsort()
    chosen[order[_even(count, most - int(chosen.sum()))]] = True
    return chosen.nonzero()[:, 0]


def _even(count: int, most: int) -> Tensor:
    """`most` places from the first of `count` to the last."""
    return torch.linspace(0, count - 1, most).long() if most else torch.empty(0, dtype=torch.long)


def curve(x: Sequence[float], y: Sequence[float], most: int = MOST_STEPS) -> tuple[list[float], list[float]]:
    """A long curve, thinned to the smallest and the largest value of each stretch, so that no spike is lost.

    Example:
        >>> x, y = curve(range(1000), [0.0] * 500 + [9.0] + [0.0] * 499, most=10)
        >>> len(x) <= 10, max(y)
        (True, 9.0)
    """
    count = len(x)
    if count <= most:
        return list(x), list(y)
    kept: set[int] = set()
    stretches = max(most // 2, 1)
    for part in range(stretches):
        places = range(part * count // stretches, (part + 1) * count // stretches)
        fine = [place for place in places if math.isfinite(y[place])] or list(places)[:1]
        kept |= {min(fine, key=lambda place: y[place]), max(fine, key=lambda place: y[place])}
    ordered = sorted(kept)
    return [x[place] for place in ordered], [y[place] for place in ordered]
