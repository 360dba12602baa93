"""The section on spectra: density with its band, outliers, and the share of each parameter."""

from collections.abc import Mapping

import torch

from ..estimators.quantities import Spectrum
from ..results import Estimate
from ..tables import Table
from .charts import INKS, Chart, Series, interval, line, points, rug
from .numerals import typeset
from .page import Block, Section

GRID = 400  # points of a density
MANY = 20  # spectra; if there are more, each has fewer points
MOST_DRAWN = 150
MOST_SHOWN = 4  # spectra that are visible at first; a click shows the others
MOST_LAYERS = 40  # parameters of a chart


def section(spectra: Mapping[str, Spectrum]) -> Section:
    """The section on one spectrum, or on those of several matrices (blocks or solutions).

    Example:
        >>> from ritz.operators import DenseOperator
        >>> two = {name: ritz.spectrum(DenseOperator(size * torch.eye(3))) for name, size in (("a", 1.0), ("b", 2.0))}
        >>> print(section(two).blocks[0])
        How the 3 eigenvalues are spread: every eigenvalue was found. Dense matrix. 2 matrices share the axis; ...
    """
    first = next(iter(spectra.values()))
    blocks: list[Block] = [_lead(spectra), density_chart(spectra), _table(spectra)]
    outliers, layers = _outliers(first), _layers(first)
    blocks += [layers] if layers else []
    blocks += [outliers] if outliers is not None else []
    return Section("Spectrum", blocks)


def _lead(spectra: Mapping[str, Spectrum]) -> str:
    one = next(iter(spectra.values()))
    how = (
        "every eigenvalue was found" if one.tail is None
        else f"{one.num_probes} probes of {one.num_steps} Lanczos steps and {len(one.head)} locked outliers"
    )  # fmt: skip
    several = f" {len(spectra)} matrices share the axis; the legend switches them." if len(spectra) > 1 else ""
    ends = {name: s.stop for name, s in spectra.items() if not s.stop.startswith("complete")}
    ended = "".join(f" {_sentence(f'{name}: {stop}' if name else stop)}" for name, stop in ends.items())
    return f"How the {one.dim:,} eigenvalues are spread: {how}. {_sentence(one.convention)}{several}{ended}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "." if text else ""


def density_chart(spectra: Mapping[str, Spectrum]) -> Chart:
    """Densities on one axis, with 95 % bands and a tick for each eigenvalue that was found individually.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> chart = density_chart({"": ritz.spectrum(DenseOperator(torch.diag(torch.tensor([3.0, 1.0]))))})
        >>> [series["kind"] for series in chart.series], sorted(chart.series[1]["x"])
        (['line', 'rug'], [1, 3])
    """
    series: list[Series] = []
    floors = []
    drawn = dict(list(spectra.items())[:MOST_DRAWN])
    count = max(min(GRID, GRID * MANY // len(drawn)), GRID // 4)
    for place, (name, one) in enumerate(drawn.items()):
        grid = one.default_grid(count)
        curve = one.density(grid)
        low, high = (torch.as_tensor(end) for end in curve.interval())
        about = {"color": place % INKS, "hidden": place >= MOST_SHOWN}
        series.append(line(name or "density", grid, torch.as_tensor(curve.value), low, high, **about))
        if len(one.head):
            text = [typeset(f"± {residual:.1e}") for residual in one.head_residuals.tolist()]
            series.append(rug(name or "density", one.head, text, silent=True, **about))
        floors.append(0.1 / one.dim / (float(grid[-1] - grid[0]) or 1.0))
    cut = f" The first {len(drawn)} of {len(spectra)} are drawn." if len(drawn) < len(spectra) else ""
    own = ", each of its own width, so that peaks of single eigenvalues differ in height" if len(spectra) > 1 else ""
    return Chart(
        title="Spectral density", label=f"Spectral density of {', '.join(spectra) or 'the matrix'}",
        x={"label": "eigenvalue", "tight": True},
        y={"label": "density", "log": True, "toggle": True, "floor": min(floors), "zero": True}, series=series,
        marks=[{"x": 0, "label": "0"}], height=380,
        caption=f"Smoothed by a normal kernel no finer than the steps resolve{own}; the band contains the smoothed "
        "density at each point with 95 % probability. Ticks are eigenvalues that were found individually. Drag to "
        f"zoom, double-click to see all.{cut}",
    )  # fmt: skip


def _table(spectra: Mapping[str, Spectrum]) -> Table:
    """The main numbers of each spectrum, with their errors."""
    header = ["matrix", "order", "trace", "Frobenius norm", "largest", "smallest", "sum of negatives", "products"]
    rows = []
    for name, one in spectra.items():
        found = (one.trace, one.frobenius_norm, one.lambda_max, one.lambda_min, one.negative_trace)
        rows.append([name or "whole", f"{one.dim:,}", *(typeset(e.shown()) for e in found), f"{one.products:,}"])
    return Table(header, rows, numeric=range(1, len(header)))


def _outliers(one: Spectrum) -> Chart | None:
    """The locked eigenvalues by size."""
    if len(one.head) < 2 or one.tail is None:
        return None
    order = one.head.abs().argsort(descending=True)
    values, residuals = one.head[order], one.head_residuals[order]
    ranks = torch.arange(1, len(values) + 1)
    sides = []
    for name, color, chosen in (("positive", 0, values > 0), ("negative", 1, values < 0)):
        if bool(chosen.any()):
            size = values[chosen].abs()
            ends = {"low": (size - residuals[chosen]).clamp(min=0), "high": size + residuals[chosen]}
            sides.append(points(name, ranks[chosen], size, color=color, **ends))
    return Chart(
        title="Outliers", label="Absolute value of the locked eigenvalues by rank",
        x={"label": "rank"}, y={"label": "|eigenvalue|", "log": True, "toggle": True}, series=sides, hover="point",
        caption=f"The {len(values)} locked eigenvalues, largest first. Bars: an eigenvalue lies within this distance.",
        height=250,
    )  # fmt: skip


def _layers(one: Spectrum) -> list[Chart]:
    """The share of each parameter in the trace and in the squared norm."""
    if len(one.layers) < 2:
        return []
    shares = (
        ("Trace, parameter by parameter", "Tr H of the diagonal block", one.trace.parts),
        ("Squared norm, parameter by parameter", "squared norm of the rows", one.moment(2).parts),
    )
    return [parts_chart(title, label, dict(parts)) for title, label, parts in shares]


def parts_chart(title: str, label: str, parts: Mapping[str, Estimate]) -> Chart:
    """An estimate for each of many names; if there are too many, the largest, in the given order.

    Example:
        >>> parts = {name: Estimate(name=name, value=value, exact=True) for name, value in (("b", 1.0), ("a", 2.0))}
        >>> chart = parts_chart("Trace", "Tr H", parts)
        >>> chart.y["categories"], chart.series[0]["x"]
        (['b', 'a'], [1, 2])
    """
    ranked = sorted(parts, key=lambda name: -abs(float(parts[name].value)))
    kept = set(ranked[:MOST_LAYERS])
    shown = [name for name in parts if name in kept]
    ends = [interval(parts[name]) for name in shown]
    left_out = len(parts) - len(shown)
    return Chart(
        title=title, label=f"{title}, with 95 % intervals", hover="point",
        x={"label": label, "toggle": True}, y={"categories": shown}, marks=[{"x": 0, "within": True}],
        series=[
            points(
                "", [float(parts[name].value) for name in shown], list(range(len(shown))),
                xlow=[low for low, _ in ends], xhigh=[high for _, high in ends],
            )
        ],
        caption=f"The {len(shown)} largest of {len(parts)}." if left_out else "",
    )  # fmt: skip
