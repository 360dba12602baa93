"""The figure of the network of 9,960 parameters: its spectra as stems, and what is printed among our seeds."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .digits_figure import colors
from .mnist_mlp import WEIGHT_DECAYS
from .mnist_mlp_claims import NAMES, PRINTED, prediction_interval
from .softmax_figure import draw_stems

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("lambda_max", "metric_a", "val_accuracy")


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Every seed, the 95 % interval in which one more would fall, and the printed number; above, where rows have them,
    Ritz values and weights of one random vector, as seed 000 draws them.
    """
    from matplotlib.figure import Figure

    spectra = [row for row in rows if "ritz_values" in row]
    picture = Figure(figsize=(9, 5.4 if spectra else 3), layout="constrained", facecolor="white")
    parts = picture.subfigures(2 if spectra else 1, 1, squeeze=False)[:, 0]
    if spectra:
        panels = parts[0].subplots(1, len(spectra), sharex=True, sharey=True, squeeze=False)[0]
        for ax, row, shade in zip(panels, spectra, colors(len(spectra)), strict=True):
            draw_stems(ax, row, shade)
            ax.set_title(f"weight decay {row['weight_decay']:g}, seed {row['seed']}", fontsize=9)
        panels[0].set_ylabel("weight")
    for ax, key in zip(parts[-1].subplots(1, len(SHOWN)), SHOWN, strict=True):
        _beside(ax, rows, key)
    parts[-1].axes[0].legend(frameon=False, fontsize=7)
    return picture


def _beside(ax: "Axes", rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """One number at every weight decay."""
    for place, (decay, printed) in enumerate(zip(WEIGHT_DECAYS, PRINTED[key], strict=True)):
        values = [row[key][0] for row in rows if row["weight_decay"] == decay]
        said = [""] * 3 if place else ["where one more falls, 95 %", f"{len(values)} seeds", "printed"]
        ax.vlines(place, *prediction_interval(values), color="C0", alpha=0.3, lw=8, label=said[0])
        ax.plot([place] * len(values), values, "o", ms=3, color="C0", label=said[1])
        ax.plot(place, float(printed), "kx", ms=8, label=said[2])
    ax.set_xticks(range(len(WEIGHT_DECAYS)), [f"{decay:g}" for decay in WEIGHT_DECAYS])
    ax.set(xlabel="weight decay", ylabel=NAMES[key] + (", %" if key.endswith("accuracy") else ""))
