"""The figure of the noise of batch Hessians: spectrum, batch size, entries, dampings along training."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import rmt
from .noise_spectrum_measures import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"start": "#E69F00", "trained": "#0072B2"}


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Four panels: eigenvalues beside the semicircle, s2 by batch size, kurtosis of entries, what was learned."""
    from matplotlib.figure import Figure

    dense = summary(rows, kind="dense")
    drawing = Figure(figsize=(10, 6.6), layout="constrained")
    (first, second), (third, fourth) = drawing.subplots(2, 2)
    _eigenvalues(first, dense)
    _levels(second, dense)
    _entries(third, dense)
    _dampings(fourth, summary(rows, kind="run"))
    for ax in (first, second, third, fourth):
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize="small")
    return drawing


def _eigenvalues(ax: "Axes", dense: Sequence[Mapping[str, Any]]) -> None:
    """Of the noise of one batch, in units of the root of its s2."""
    scaled = {}
    for state in COLOURS:
        row = summary(dense, state=state)[0]
        size = row["spikes"]["size"]
        values = torch.tensor(next(part["values"] for part in row["spectra"] if part["size"] == size))
        scaled[state] = values / values.square().mean().sqrt()
    end = 1.02 * max(float(values.abs().max()) for values in scaled.values())  # no eigenvalue is out of sight
    for state, colour in COLOURS.items():
        ax.hist(scaled[state], bins=121, range=(-end, end), density=True, histtype="step", color=colour, label=state)
    grid = torch.linspace(-2, 2, 200, dtype=torch.float64)[1:-1]
    ax.plot(grid, rmt.Semicircle(1.0).density(grid), "k--", lw=1.2, label="semicircle")
    ax.set(yscale="log", xlabel="eigenvalue of X / √s2", ylabel="density", title=f"noise of a batch of {size}")


def _levels(ax: "Axes", dense: Sequence[Mapping[str, Any]]) -> None:
    """s2 by batch size, and the line that lemma 3 says."""
    for state, colour in COLOURS.items():
        for row in summary(dense, state=state):
            sizes = [part["size"] for part in row["spectra"]]
            levels = [part["level"] for part in row["spectra"]]
            factors = [1 / size - 1 / row["images"] for size in sizes]
            label = state if row["seed"] == 0 else None
            ax.plot(sizes, levels, "o", color=colour, label=label)
            ax.plot(sizes, [levels[0] * f / factors[0] for f in factors], "--", color=colour, lw=1)
    ax.set(xscale="log", yscale="log", xlabel="batch size B", ylabel="s2 = Tr X² / P", title="dashed: 1 / B − 1 / N")
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()


def _entries(ax: "Axes", dense: Sequence[Mapping[str, Any]]) -> None:
    """How many entries are seen not to be normal."""
    for state, colour in COLOURS.items():
        for row in summary(dense, state=state):
            sizes = [part["size"] for part in row["entries"]]
            label = state if row["seed"] == 0 else None
            ax.plot(sizes, [part["rejected"] for part in row["entries"]], "o-", color=colour, lw=1.2, label=label)
    ax.set(xscale="log", ylim=(-0.02, 1.02), xlabel="batch size B", ylabel="share of entries", title="not normal")


def _dampings(ax: "Axes", runs: Sequence[Mapping[str, Any]]) -> None:
    """Along training, of all seeds."""
    for gap, colour in zip(runs[0]["gaps"], ("#D55E00", "#0072B2"), strict=True):
        for row in summary(runs, arm=f"gap {gap}"):
            steps, dampings = ([entry[place] for entry in row["history"]] for place in (0, 1))
            label = f"every {gap} steps" if row["seed"] == 0 else None
            ax.plot(steps, dampings, color=colour, lw=0.8, label=label)
    ax.set(yscale="log", xlabel="step", ylabel="damping", title="learned")
