"""The figures of `damping_cifar`: accuracies by epoch and by time, dampings that were learned, and rates that train."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .damping_cifar import CHANCE, TABLE1
from .experiment import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure(rows: Rows) -> "Figure":
    """Test accuracy (solid) and training accuracy (dotted) by epoch and by seconds; what was learned, and lambda_1.

    Lines are means over the seeds that are not lost, bands reach from the least to the most of them; a cross is where a
    lost run ended.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(row["arm"] for row in rows))
    shades = colormaps["tab10" if len(labels) <= 10 else "tab20"]
    colours = dict(zip(labels, shades(np.arange(len(labels)) % shades.N), strict=True))
    learned = [row for row in rows if row.get("damping")]
    sharp = [row for row in rows if row.get("lambda_max", 0) > 0 and row["state"] == "trained"]
    panels = 2 + bool(learned) + bool(sharp)
    drawing = Figure(figsize=(4.6 * panels, 4.2 + 0.14 * len(labels)), layout="constrained")
    axes = drawing.subplots(1, panels)
    for label in labels:
        own = [row for row in rows if row["arm"] == label]
        _curves(axes[0], own, "epoch", colours[label])
        _curves(axes[1], own, "seconds", colours[label])
    for ax, name in zip(axes, ("epoch", "seconds of training, runs side by side"), strict=False):
        ax.set(xlabel=name, ylabel="accuracy, %  (solid: test, dotted: training)")
    count = len({row["seed"] for row in rows})
    seeds = f"means over {count} seeds, bands from the least to the most" if count > 1 else "one seed"
    drawing.suptitle(f"{seeds}; x: a lost run", fontsize=9)
    for row in learned:
        axes[2].plot(row["damping_step"], row["damping"], color=colours[row["arm"]], lw=1.0)
        axes[2].set(xlabel="step", ylabel="learned damping δ, every seed")
    values = [value for row in learned for value in row["damping"]]
    if values and max(values) > 3 * min(values):  # labels of a shorter range are hard to read on a logarithmic axis
        axes[2].set_yscale("log")
    if sharp:
        _sharpness(axes[-1], sharp, labels, colours)
    for ax in axes:
        ax.grid(alpha=0.3)
    handles, _ = axes[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return drawing


def _sharpness(ax: "Axes", rows: Rows, labels: Sequence[str], colours: Mapping[str, Any]) -> None:
    """lambda_1 of every network that was trained, arm by arm, and what table 1 prints."""
    printed = {arm.label: norm for arm, (norm, _) in TABLE1.items()}
    for place, label in enumerate(labels):
        own = [row["lambda_max"] for row in rows if row["arm"] == label]
        ax.plot(own, [place] * len(own), "o", ms=5, color=colours[label])
        if label in printed:
            ax.plot([printed[label]], [place], "kx", ms=7)
    about = f"{rows[0].get('images', 0):,} images, {rows[0].get('lanczos_steps', 0)} steps"
    ax.set(xscale="log", xlabel=f"λ₁, {about};  x: printed", ylabel="arms, as below")
    ax.set_yticks([])
    ax.invert_yaxis()


def _curves(ax: "Axes", rows: Rows, key: str, colour: Any) -> None:
    """The runs of one arm: their mean, and where the lost ones were lost."""
    whole = [row for row in rows if row["state"] != "lost"]
    for which, style in (("test", "-"), ("train", ":")):
        points = [np.array([row[name] for row in whole]) for name in (key, f"{which}_accuracy")]
        x, y = (part.mean(0) if whole else np.array([]) for part in points)
        if style == "-" and len(whole) > 1:
            ax.fill_between(x, points[1].min(0), points[1].max(0), color=colour, alpha=0.15, lw=0)
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


def rates(rows: Rows) -> "Figure":
    """Section 8: the test accuracy of every run against its rate; a cross is a lost run, a ring one at chance."""
    from matplotlib.figure import Figure

    marks = {"trained": "o", "at chance": "o", "lost": "x"}
    drawing = Figure(figsize=(6.4, 3.6), layout="constrained", facecolor="white")
    ax = drawing.subplots()
    for place, method in enumerate(dict.fromkeys(row["arm"].split()[0] for row in rows)):
        for row in rows:
            name, rate = row["arm"].split(",")[0].split()
            if name == method:
                end = row["test_accuracy"][-1] if row["test_accuracy"] else CHANCE
                filled = f"C{place}" if row["state"] != "at chance" else "none"
                x = float(rate) * 1.08 ** (place - 1)  # beside each other
                ax.plot([x], [end], marks[row["state"]], ms=6, color=f"C{place}", markerfacecolor=filled)
        ax.plot([], [], "o", color=f"C{place}", label=method)
    ax.axhline(CHANCE, color="#999999", lw=0.8)
    epochs = max((row["epoch"][-1] for row in rows if row["epoch"]), default=0)
    ax.set(xscale="log", xlabel="learning rate, damping 1", ylabel=f"test accuracy after {epochs} epochs, %")
    ax.set_title("every seed; ring: at chance, x: lost, line: chance", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    return drawing
