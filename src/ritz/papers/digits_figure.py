"""The figure of the digits study: four spectra one above the other, and what was measured beside the gaps."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .digits import COLUMNS, Study, decay_of, spectrum_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

INK, FAINT = "#333333", "#d9d9d9"


def colors(number: int) -> "NDArray[np.float64]":
    """Colours in an order that prints in grey and that all eyes can tell apart, (number, 4)."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the figure needs matplotlib: pip install 'ritz[demo]'") from error
    shades: NDArray[np.float64] = matplotlib.colormaps["viridis"](np.linspace(0, 0.8, number))  # yellow is too pale
    return shades


def draw(found: Study) -> "Figure":
    """Densities with their 95 % bands on one scale, and every column of the table relative to its largest value."""
    shades = colors(len(found.rows))
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"font.size": 9, "text.color": INK, "axes.edgecolor": "#999999", "axes.labelcolor": INK}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 5.4), layout="constrained", facecolor="white")
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.0, 1.1])[0]
        _spectra(left, found, shades)
        _bars(right.subplots(), found, shades)
    return figure


def _spectra(part: "Figure", found: Study, shades: "NDArray[np.float64]") -> None:
    """One panel for each solution, all on the same axes and smoothed by the same width, so that shapes compare."""
    spectra = [spectrum_of(found, name) for name in found.rows]
    low, high = min(s.range()[0] for s in spectra), max(s.range()[1] for s in spectra)
    width = max((high - low) / 100, *((s.range()[1] - s.range()[0]) / max(s.num_steps, 1) for s in spectra))
    grid = torch.linspace(low - 4 * width, high + 4 * width, 800, dtype=torch.float64)
    one = 1 / spectra[0].dim / (width * (2 * torch.pi) ** 0.5)  # the height of a single eigenvalue
    axes = part.subplots(len(spectra), 1, sharex=True, sharey=True)
    for ax, name, spectrum, color in zip(axes, found.rows, spectra, shades, strict=True):
        curve = spectrum.density(grid, width)
        bottom, top = (torch.as_tensor(end).nan_to_num().clamp(min=1e-12) for end in curve.interval())
        value = torch.as_tensor(curve.value).clamp(min=1e-12)
        ax.fill_between(grid, bottom, top, color=color, alpha=0.25, lw=0)
        ax.plot(grid, value, color=color, lw=1.2)
        ax.plot(spectrum.head, torch.full_like(spectrum.head, 0.04), "|", color=color, ms=6,
                transform=ax.get_xaxis_transform())  # fmt: skip
        text = f"{name},  ‖H‖ = {float(spectrum.spectral_norm.value):.3g}"
        ax.text(0.985, 0.93, text, transform=ax.transAxes, ha="right", va="top")
        ax.set(yscale="log", ylim=(one / 30, 10.0 * float(value.max())), xlim=(float(grid[0]), float(grid[-1])))
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("eigenvalue of the Hessian of the training loss")
    part.supylabel("spectral density, 95 % band", fontsize=9)
    part.suptitle("Spectra of the four solutions; ticks: outliers found one by one", fontsize=10)


def _bars(ax: "Axes", found: Study, shades: "NDArray[np.float64]") -> None:
    """A group of bars for each column of the table, as long as the value is beside the largest of its group."""
    from matplotlib.patheffects import withStroke

    height, names = 0.8 / len(found.rows), []
    for place, (key, name) in enumerate(COLUMNS.items()):
        estimates = [row[key] for row in found.rows.values()]
        scale = max(abs(float(e.value)) for e in estimates) or 1.0
        names.append(f"{name}\n1.0 = {scale * (100 if name.endswith('%') else 1):.3g}")
        y = place + (np.arange(len(estimates)) - (len(estimates) - 1) / 2) * height
        values = np.array([float(e.value) for e in estimates]) / scale
        ends = np.array([[float(end) for end in e.interval()] for e in estimates]) / scale
        ax.barh(y, values, height * 0.92, color=shades)
        reach = np.stack([values - ends[:, 0], ends[:, 1] - values]).clip(min=0.0)
        _, _, (lines,) = ax.errorbar(values, y, xerr=reach, fmt="none", ecolor=INK, elinewidth=1.0)
        lines.set_path_effects([withStroke(linewidth=2.6, foreground="white")])  # seen on dark bars too
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    ax.set_xlabel("relative to the largest of its group; lines: 95 % intervals")
    ax.set_title("Gaps, and measures that are to foretell them", fontsize=10)
    ax.axhline(1.5, color=FAINT, lw=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    keys = [ax.barh([0], [0], color=color)[0] for color in shades]
    ax.legend(
        keys, [decay_of(name) for name in found.rows], title="weight decay", ncols=len(keys), frameon=False,
        loc="upper center", bbox_to_anchor=(0.5, -0.1),
    )  # fmt: skip
