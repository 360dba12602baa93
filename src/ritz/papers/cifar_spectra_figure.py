"""The figure of the networks on CIFAR-100: Ritz values and their weights as stems, an arm beside the other."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .experiment import Rows

MODES = {"eval": "evaluation mode", "train": "batch statistics"}
STEM, OUTER = "#35618f", "#b0413e"


def figure(rows: "Rows") -> "Figure":
    """Spectra of one seed as in figures 3 to 8 of seed 000: a column for each arm, a row for each mode of BatchNorm.

    The height of a stem is the share of the eigenvalues that it stands for; the largest Ritz value is in red. Each
    panel has its own range, as in the papers, with the extreme values for ticks.

    Raises:
        ValueError: If no run has a spectrum.
    """
    from matplotlib.figure import Figure

    chosen = _one_seed(rows)
    modes = [mode for mode in MODES if all(mode in row for row in chosen)]
    size = (max(3.4 * len(chosen), 6.8), 0.6 + 2.4 * len(modes))
    drawn = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = drawn.subplots(len(modes), len(chosen), sharey=True, squeeze=False)
    for line, mode in zip(panels, modes, strict=True):
        for ax, row in zip(line, chosen, strict=True):
            _stems(ax, row[mode])
        line[0].set_ylabel(f"weight, {MODES[mode]}" if len(modes) > 1 else "weight")
    for ax, row in zip(panels[0], chosen, strict=True):
        ax.set_title(f"{row['arm']}, test accuracy {row['test_accuracy']:.1f} %", fontsize=10)
    for ax in panels[-1]:
        ax.set_xlabel("Ritz value of the Hessian")
    first = chosen[0]
    drawn.suptitle(
        f"{first['title'] if first['published'] else 'of the family of ' + first['title']}, {first['parameters']:,} "
        f"parameters, {first['epochs']} epochs, seed {first['seed']}, {first['images']:,} images; red: the largest",
        fontsize=10,
    )
    return drawn


def _one_seed(rows: "Rows") -> list[dict[str, Any]]:
    """The rows of the first seed that has spectra of most arms, in the order of all rows."""
    seeds = sorted({row["seed"] for row in rows})
    own = [[row for row in rows if row["seed"] == seed and "eval" in row] for seed in seeds]
    chosen = max(own, key=len, default=[])
    if not chosen:
        raise ValueError("there is no run with a spectrum: those that diverged have none")
    return chosen


def _stems(ax: "Axes", found: Mapping[str, Sequence[float]]) -> None:
    nodes, weights = found["nodes"], found["weights"]
    floor = 1e-10
    ax.vlines(nodes, floor, [max(weight, floor) for weight in weights], color=STEM, lw=1.0)
    top = max(range(len(nodes)), key=nodes.__getitem__)
    ax.vlines([nodes[top]], floor, [max(weights[top], floor)], color=OUTER, lw=1.6)
    low, high = min(nodes), max(nodes)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    ax.set(yscale="log", ylim=(floor, 3.0), xlim=(low - margin, high + margin))
    ticks = sorted({low, high} | ({0.0} if low < -0.1 * (high - low) and high > 0.1 * (high - low) else set()))
    ax.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    ax.spines[["top", "right"]].set_visible(False)
