"""The figure of the stability study: lambda_1 over the bound of gradient descent, along training."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .digits_figure import colors
from .stability_claims import edge

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> "Figure":
    """A panel for each way to train, a line for each network, its colour the rate; then theorem 2."""
    shades = colors(4)
    from matplotlib.figure import Figure

    descents: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "descent":
            descents.setdefault((row["network"], row["batch"], row["momentum"]), []).append(row)
    columns = 3
    lines = -(-(len(descents) + 1) // columns)
    picture = Figure(figsize=(11, 3 * lines), layout="constrained", facecolor="white")
    axes = picture.subplots(lines, columns, squeeze=False).flatten()
    for ax, ((network, batch, momentum), own) in zip(axes, descents.items(), strict=False):
        _ratios(ax, own, shades)
        ax.set_title(
            f"{network}, {f'batches of {batch}' if batch else 'full batches'}, momentum {momentum:g}", fontsize=9
        )
    _ritz(axes[len(descents)], [row for row in rows if row["kind"] == "ritz"])
    for ax in axes[len(descents) + 1 :]:
        ax.set_axis_off()
    return picture


def _ratios(ax: "Axes", rows: Rows, shades: Any) -> None:
    """lambda_1 / (2 (1 + b) / a) of every network of one way to train."""
    rates = sorted({row["rate"] for row in rows})
    first = rows[0]["seed"]
    for row in rows:
        ratio = [float(x) / edge(row) for x in row["lambda_max"]]  # a file has "nan" as text
        label = f"a = {row['rate']:g}" if row["seed"] == first else None
        ax.plot(row["step"], ratio, color=shades[rates.index(row["rate"])], lw=1, label=label)
    ax.axhline(1, color="#999999", lw=0.8)
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("λ₁ over its bound")
    ax.legend(frameon=False, fontsize=8)


def _ritz(ax: "Axes", rows: Rows) -> None:
    """The error of the largest Ritz value and what theorem 2 allows."""
    for row in rows:
        color = "C0" if row["network"] == "MLP" else "C1"
        steps = range(1, len(row["error"]) + 1)
        label = row["network"] if row["seed"] == rows[0]["seed"] else None
        ax.plot(steps, row["error"], color=color, lw=1, label=label)
        ax.plot(steps, row["allowed"], color=color, lw=1, ls="--", label=f"{label}, theorem 2" if label else None)
    ax.set_yscale("log")
    ax.set_ylim(1e-15, 1e6)
    ax.set_xlabel("Lanczos steps")
    ax.set_ylabel("(λ₁ - θ₁) / λ₁")
    ax.legend(frameon=False, fontsize=7)
