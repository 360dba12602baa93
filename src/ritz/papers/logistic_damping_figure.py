"""Figures 4 to 6 of seed 004, with our runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .logistic_damping import Run
from .logistic_damping_claims import Results, best, dampings, etas, final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {1.0: "#0072B2", 3.0: "#E69F00", 10.0: "#D55E00", None: "#555555"}  # by eta; None is gradient descent


def heat_maps(results: Results) -> "Figure":
    """Figure 4: error less that of the best run, for every damping and eta, training and test, means over seeds."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(10, 4.6), layout="constrained")
    axes = drawing.subplots(1, 2 * len(results), sharey=True)
    panels = [(name, key) for name in results for key in ("train_error", "test_error")]
    for ax, (name, key) in zip(axes, panels, strict=True):
        runs = results[name]
        rows, columns, least = dampings(runs), etas(runs), best(runs, key)
        table = [[float(final(runs, key, damping, eta).mean()) - least for eta in columns] for damping in rows]
        ax.imshow(table, cmap="Blues", aspect="auto", vmin=0, vmax=25)  # low damping above, as in the paper
        for y, line in enumerate(table):
            for x, value in enumerate(line):
                ax.text(x, y, f"{value:.1f}", ha="center", va="center", color="white" if value > 15 else "black")
        ax.set(xticks=range(len(columns)), xticklabels=[f"{eta:g}" for eta in columns], xlabel="η")
        ax.set(yticks=range(len(rows)), yticklabels=[f"{damping:g}" for damping in rows])
        kind = "training" if key == "train_error" else "test"
        ax.set_title(f"{name}\n{kind} error\nbest {least:.1f} %", fontsize=11)
    axes[0].set_ylabel("damping δ")
    return drawing


def curves(name: str, runs: Sequence[Run]) -> "Figure":
    """Figures 5 and 6: errors along training, a panel for each damping; the mean of seeds and their range."""
    from matplotlib.figure import Figure

    grid = dampings(runs)
    drawing = Figure(figsize=(10, 6.4), layout="constrained")
    axes = drawing.subplots(2, -(-len(grid) // 2), sharex=True, sharey=True, squeeze=False)
    for ax, damping in zip(axes.flat, grid, strict=False):
        for eta in [*etas(runs), None]:
            _lines(ax, [run for run in runs if run.eta == eta and run.damping in (damping, None)])
        ax.set_title(f"δ = {damping:g}", fontsize=11)
        ax.set(yscale="log", ylim=(0.09, 100), xlim=(0, runs[0].steps[-1]))
        ax.locator_params(axis="x", nbins=4, prune="upper")  # or labels of neighbours meet
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
        ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"{name}: error, %")
    for ax in axes[-1]:
        ax.set_xlabel("step")
    for ax in axes.flat[len(grid) :]:
        ax.set_axis_off()
    drawing.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return drawing


def _lines(ax: "Axes", runs: Sequence[Run]) -> None:
    """Training (dashed) and test error of the seeds of one setting."""
    eta = runs[0].eta
    colour, label = COLOURS.get(eta, "#009E73"), "GD" if eta is None else f"LOPT[{eta:g}]"
    for key, style in (("train_error", "--"), ("test_error", "-")):
        errors = torch.stack([run.curves[key] for run in runs])  # (seeds, points)
        ax.plot(runs[0].steps, errors.mean(0), style, color=colour, lw=1.4, label=f"{label}, {key.split('_')[0]}")
        ax.fill_between(runs[0].steps, errors.amin(0), errors.amax(0), color=colour, alpha=0.15, lw=0)
