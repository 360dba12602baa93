"""The figure of the softmax study: spectra as stems, one panel for each weight decay, and lambda_1 of every seed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .digits_figure import colors
from .mnist_mlp import WEIGHT_DECAYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Ritz values and weights of one random vector on the first split, as seed 000 draws them; lambda_1 below."""
    from matplotlib.figure import Figure

    shades, rows = colors(len(WEIGHT_DECAYS)), [row for row in rows if "reading" not in row]

    picture = Figure(figsize=(9, 5), layout="constrained", facecolor="white")
    upper, lower = picture.subfigures(2, 1, squeeze=False, height_ratios=[1.2, 1.0])[:, 0]
    first = rows[0]["split"]
    panels = upper.subplots(1, len(WEIGHT_DECAYS), sharex=True, sharey=True, squeeze=False)[0]
    for ax, decay, shade in zip(panels, WEIGHT_DECAYS, shades, strict=True):
        own = [row for row in rows if row["split"] == first and row["weight_decay"] == decay]
        draw_stems(ax, next(row for row in own if "ritz_values" in row), shade)
        ax.set_title(f"weight decay {decay:g}", fontsize=9)
    panels[0].set_ylabel("weight")
    _tops(lower.subplots(), rows)
    return picture


def draw_stems(ax: "Axes", row: Mapping[str, Any], shade: Any) -> None:
    """One spectrum, its weights on a logarithmic axis."""
    weights = [max(weight, 1e-12) for weight in row["ritz_weights"]]
    ax.vlines(row["ritz_values"], 1e-12, weights, color=shade, lw=1.2)
    ax.set_yscale("log")
    ax.set_xlabel("Ritz value of H")
    ax.text(0.97, 0.95, f"λ₁ = {row['lambda_max'][0]:.2f}", transform=ax.transAxes, ha="right", va="top", fontsize=9)


def _tops(ax: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """lambda_1 of every seed on each split, and what the paper prints."""
    from .softmax import PRINTED

    for place, decay in enumerate(WEIGHT_DECAYS):
        ax.plot(place, float(PRINTED["lambda_max"][place]), "kx", ms=8, label="printed" if place == 0 else None)
        for shift, split in enumerate(dict.fromkeys(row["split"] for row in rows)):
            own = [row for row in rows if row["split"] == split and row["weight_decay"] == decay]
            where = [place - 0.15 + 0.3 * shift] * len(own)
            label = f"{own[0]['images']:,} images" if place == 0 else None
            ax.plot(where, [row["lambda_max"][0] for row in own], "o", color=f"C{shift}", ms=4, label=label)
    ax.set_xticks(range(len(WEIGHT_DECAYS)), [f"{decay:g}" for decay in WEIGHT_DECAYS])
    ax.set_xlabel("weight decay")
    ax.set_ylabel("λ₁")
    ax.legend(frameon=False, fontsize=8)
