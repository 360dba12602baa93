"""The figure of a study of `damping_cifar`: accuracies by epoch and by time, and the dampings that were learned."""

from typing import TYPE_CHECKING, Any

import numpy as np

from .experiment import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure(rows: Rows) -> "Figure":
    """Test accuracy (solid) and training accuracy (dotted) by epoch and by seconds; damping by step where one learned.

    Lines are means over the seeds that are not lost; a cross is where a lost run ended.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(row["arm"] for row in rows))
    shades = colormaps["tab10" if len(labels) <= 10 else "tab20"]
    colours = dict(zip(labels, shades(np.arange(len(labels)) % shades.N), strict=True))
    learned = [row for row in rows if row.get("damping")]
    panels = 3 if learned else 2
    drawing = Figure(figsize=(4.6 * panels, 4.2 + 0.14 * len(labels)), layout="constrained")
    axes = drawing.subplots(1, panels)
    for label in labels:
        own = [row for row in rows if row["arm"] == label]
        _curves(axes[0], own, "epoch", colours[label])
        _curves(axes[1], own, "seconds", colours[label])
    for ax, name in zip(axes, ("epoch", "seconds of training, runs side by side"), strict=False):
        ax.set(xlabel=name, ylabel="accuracy, %  (solid: test, dotted: training)")
    for row in learned:
        axes[2].plot(row["damping_step"], row["damping"], color=colours[row["arm"]], lw=1.0)
        axes[2].set(xlabel="step", ylabel="learned damping δ, every seed")
    values = [value for row in learned for value in row["damping"]]
    if values and max(values) > 3 * min(values):  # labels of a shorter range are hard to read on a logarithmic axis
        axes[2].set_yscale("log")
    for ax in axes:
        ax.grid(alpha=0.3)
    handles, _ = axes[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return drawing


def _curves(ax: "Axes", rows: Rows, key: str, colour: Any) -> None:
    """The runs of one arm: their mean, and where the lost ones were lost."""
    whole = [row for row in rows if row["state"] != "lost"]
    for which, style in (("test", "-"), ("train", ":")):
        points = [np.array([row[name] for row in whole]) for name in (key, f"{which}_accuracy")]
        x, y = (part.mean(0) if whole else np.array([]) for part in points)
        ax.plot(
            x,
            y,
            style,
            color=colour,
            lw=1.6 if which == "test" else 1.0,
            label=rows[0]["arm"] if style == "-" else None,
        )
    for row in rows:
        if row["state"] == "lost":
            end = row[key][-1] if row[key] else 0
            ax.plot([end], [row["test_accuracy"][-1] if row[key] else 1.0], "x", color=colour)
