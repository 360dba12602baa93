"""The figure of the sub-sampling study: figure 2 of seed 002 against the size of the batch, and log-determinants."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .subsampling_logdet import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> "Figure":
    """Traces and squares of batches over those of all images; relative errors of log-determinants by method."""
    from matplotlib.figure import Figure

    moments, logdets = ([row for row in rows if row["kind"] == kind] for kind in ("moments", "logdet"))
    levels = list(dict.fromkeys(row["level"] for row in logdets))
    picture = Figure(figsize=(10, 6), layout="constrained", facecolor="white")
    upper, lower = picture.subfigures(2, 1, squeeze=False)[:, 0]
    for ax, (key, text) in zip(
        upper.subplots(1, 2), (("trace", "Tr A_B / Tr A"), ("square", "Tr A_B² / Tr A²")), strict=True
    ):
        _moments(ax, moments, key)
        ax.set_ylabel(text)
        ax.set_title("every batch, and means", fontsize=9)
    for ax, level in zip(lower.subplots(1, len(levels), squeeze=False)[0], levels, strict=True):
        _errors(ax, [row for row in logdets if row["level"] == level])
        ax.set_title(f"log |G + d I|, d = {level:g} λ₁", fontsize=9)
    return picture


def _moments(ax: "Axes", rows: Rows, key: str) -> None:
    """Every batch as a dot, their means, and what equation 12 predicts."""
    for shift, name in ((0.94, "H"), (1.06, "G")):
        own = [row for row in rows if row["matrix"] == name]
        color = "C0" if name == "H" else "C1"
        sizes = sorted({row["size"] for row in own})
        for row in own:
            ratios = [x / row[f"whole {key}"] for x in row[key]]
            ax.plot([row["size"] * shift] * len(ratios), ratios, ".", color=color, alpha=0.3, ms=4)
        at = [[row for row in own if row["size"] == size] for size in sizes]
        means = [statistics.fmean(x / row[f"whole {key}"] for row in group for x in row[key]) for group in at]
        ax.plot(sizes, means, "o-", color=color, label=f"A = {name}", ms=4)
        if key == "square":
            law = [statistics.fmean(1 + row["variance"] / row["size"] / row["whole square"] for row in g) for g in at]
            ax.plot(sizes, law, "--", color=color, label=f"1 + V / B Tr {name}²")
    ax.axhline(1, color="#999999", lw=0.8)
    if key == "square":
        ax.set_yscale("log")
    _sizes(ax, sorted({row["size"] for row in rows}), "images in a batch")
    ax.legend(frameon=False, fontsize=8)


def _sizes(ax: "Axes", sizes: list[int], label: str) -> None:
    """A logarithmic axis with the sizes that there are."""
    ax.set_xscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.xaxis.minorticks_off()
    ax.set_xlabel(label)


def _spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation of those that are numbers; NaN where there are not two."""
    kept = [x for x in values if math.isfinite(x)]
    return (statistics.fmean(kept), statistics.stdev(kept)) if len(kept) > 1 else (math.nan, math.nan)


def _errors(ax: "Axes", rows: Rows) -> None:
    """Mean relative error by size with the standard deviation over sub-samples; what is far off the axis is cut."""
    sizes = sorted({row["size"] for row in rows})
    for place, name in enumerate(METHODS):
        found = [
            _spread([float(x) / row["truth"] for row in rows if row["size"] == s for x in row["errors"][name]])
            for s in sizes  # a file has "nan" as text
        ]
        means, bars = zip(*found, strict=True)
        away = " (off the axis)" if all(abs(mean) > 1 for mean in means) else ""
        ax.errorbar([s * 1.04 ** (place - 2) for s in sizes], means, bars, fmt="o-", ms=4, capsize=2, label=name + away)
    ax.axhline(0, color="#999999", lw=0.8)
    ax.set_ylim(-1, 1)
    _sizes(ax, sizes, "images in a sub-sample")
    ax.set_ylabel("error over log |G / d + I|")
    ax.legend(frameon=False, fontsize=7)
