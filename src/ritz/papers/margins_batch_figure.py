"""Figure 4 of seed 003, with our runs: traces against margins, and the margins of small and large batches."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"small": "#E69F00", "large": "#0072B2", "longer": "#009E73"}


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """A line for each data set: traces against margins, histograms with box plots, test error along training."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["data"] for row in rows if "data" in row))
    drawing = Figure(figsize=(12, 3.6 * len(names)), layout="constrained")
    for line, name in zip(drawing.subplots(len(names), 3, squeeze=False), names, strict=True):
        own = [row for row in rows if row.get("data") == name]
        shown = [row for row in own if row.get("points")]
        _scatter(line[0], shown)
        _histograms(line[1], shown)
        _curves(line[2], own)
        line[0].set_title(f"{name}, seed {shown[0]['seed']}")
        line[1].set_title(f"all training images, seed {shown[0]['seed']}")
        line[2].set_title("every seed")
    return drawing


def _scatter(ax: "Axes", shown: Sequence[Mapping[str, Any]]) -> None:
    """Figures 4a and 4b: every point of one seed; a trace of 0 has no place on a logarithmic axis."""
    for row in shown:
        pairs = [(m, t) for m, t in zip(row["points"]["margin"], row["points"]["trace"], strict=True) if t > 0]
        x, y = zip(*pairs, strict=True)
        ax.scatter(x, y, s=6, lw=0, alpha=0.5, color=COLOURS[row["kind"]], label=row["kind"])
    ax.set(xlabel="output margin", ylabel="Hessian trace of the sample", yscale="log")
    ax.legend(frameon=False, fontsize="small")


def _histograms(ax: "Axes", shown: Sequence[Mapping[str, Any]]) -> None:
    """Figure 4c: the margins of all training images, box plots below."""
    top = max(max(row["histogram"]["items"]) for row in shown)
    for place, row in enumerate(shown):
        low, high, items = (row["histogram"][key] for key in ("low", "high", "items"))
        edges = [low + (high - low) * k / len(items) for k in range(len(items) + 1)]
        colour, label = COLOURS[row["kind"]], f"{row['kind']}: skewness {row['skewness']:.2f}"
        ax.stairs(items, edges, color=colour, fill=True, alpha=0.4, label=label)
        box = dict(zip(("whislo", "q1", "med", "q3", "whishi"), row["box"], strict=True))
        ax.bxp(
            [box], [-top * 0.1 * (place + 1)], widths=top * 0.06, orientation="horizontal", showfliers=False,
            manage_ticks=False, boxprops={"color": colour}, medianprops={"color": colour},
            whiskerprops={"color": colour}, capprops={"color": colour},
        )  # fmt: skip
    ax.set(xlabel="output margin", ylabel="training images")
    ax.set_yticks([tick for tick in ax.get_yticks() if 0 <= tick <= 1.05 * top])  # below are the boxes
    ax.legend(frameon=False, fontsize="small")


def _curves(ax: "Axes", own: Sequence[Mapping[str, Any]]) -> None:
    """Test error of every seed along training."""
    seen: set[str] = set()
    for row in sorted(own, key=lambda row: row["kind"] == "large"):  # above the longer one, which begins as it does
        steps, errors = zip(*row["curve"], strict=True)
        label = None if row["kind"] in seen else f"{row['kind']}, batches of {row['batch_size']}"
        ax.plot(steps, errors, "o-", ms=2, lw=0.8, color=COLOURS[row["kind"]], label=label)
        seen.add(row["kind"])
    ax.set(xlabel="steps", ylabel="test error, %", xscale="log")
    ax.legend(frameon=False, fontsize="small")
