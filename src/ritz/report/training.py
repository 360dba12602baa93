"""The section on a training log: loss, rates, damping and curvature, with one crosshair for all charts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..loggers import Memory
from .charts import MOST_STEPS, Chart, Series, curve, line
from .page import Section

MOST_CURVES = 8  # in one chart


@dataclass(frozen=True)
class Panel:
    """The scalars of one chart: its title, patterns of their names, the label of the axis, and a line at a value.

    Example:
        >>> Panel("Loss", ("loss", "*_loss")).log
        True
    """

    title: str
    patterns: tuple[str, ...]
    label: str = ""
    log: bool = True
    mark: float | None = None


PANELS = (
    Panel("Loss", ("loss", "*/loss", "loss/*", "*_loss"), "loss"),
    Panel("Learning rate and damping", ("lr", "lr/*", "lr_scale*", "damping*", "eps"), ""),
    Panel("Largest curvature", ("curvature/largest", "curvature/*/lambda_max"), "eigenvalue"),
    Panel("Trace", ("curvature/*/trace",), "sum of the eigenvalues"),
    Panel("Trace, parameter by parameter", ("curvature/*/trace/*",), "of the diagonal block"),
    Panel("Most negative curvature", ("curvature/*/lambda_min",), "eigenvalue"),
    Panel("How much of the stable rate is used", ("stable_rate/used",), "rate / stable rate", mark=1.0),
    Panel("Stable rate", ("stable_rate",), "rate"),
    Panel("Gradient and step", ("gradient_norm*", "step_norm*"), "norm"),
    Panel("Rates along directions", ("rate/*",), "rate"),
    Panel("Ratio of rates", ("rate_ratio",), "largest / smallest"),
    Panel("Preconditioner", ("preconditioner/*",), "eigenvalue"),
    Panel("Rate along flat directions", ("sgd_rate*",), "rate"),
    Panel("Share of the step in the bulk", ("bulk_share*",), "share", log=False),
    Panel("Edge of the bulk", ("bulk_edge*",), "eigenvalue"),
    Panel("What the damping rule saw", ("seen/*",), ""),
    Panel("Time spent on looking", ("track/share",), "share of all time", log=False),
)
_NOT_DRAWN = ("*/products", "skipped", "track/seconds", "track/skipped")


def section(log: Memory) -> Section:
    """A chart for each known kind of scalar, then one for each prefix of the remaining names.

    Example:
        >>> log = Memory()
        >>> log.log({"loss": 2.0, "lr": 0.1, "mine/a": 1.0, "mine/b": 2.0}, 10)
        >>> [chart.title for chart in section(log).blocks[1]]
        ['Loss', 'Learning rate and damping', 'mine']
    """
    left = [name for name in log.names if not any(fnmatchcase(name, pattern) for pattern in _NOT_DRAWN)]
    left = [name for name in left if _owner(name) not in left]
    charts = []
    for panel in (*PANELS, *_others(left)):
        names = [name for name in left if any(fnmatchcase(name, pattern) for pattern in panel.patterns)]
        left = [name for name in left if name not in names]
        chart = _chart(log, panel, names) if names else None
        if chart is not None:
            charts.append(chart)
    steps = [int(row["step"]) for row in log.rows]
    lead = f"{len(log.rows):,} rows from step {min(steps):,} to {max(steps):,}. All charts share the crosshair."
    spent = sum(value for row in log.rows for name, value in row.items() if name.endswith("/products"))
    skipped = max((row["skipped"] for row in log.rows if "skipped" in row), default=0.0)
    lead += f" Curvature cost {spent:,.0f} matrix-vector products." if spent else ""
    lead += f" {skipped:,.0f} steps were skipped because their gradient was not finite." if skipped else ""
    return Section("Training", [lead, charts])


def _others(left: Sequence[str]) -> list[Panel]:
    """A panel for each prefix of the names that match no panel."""
    known = [pattern for panel in PANELS for pattern in panel.patterns]
    names = [name for name in left if not any(fnmatchcase(name, pattern) for pattern in known)]
    first = dict.fromkeys(name.split("/")[0] for name in names)
    return [Panel(key, (_literal(key), f"{_literal(key)}/*"), log=False) for key in first]


def _literal(name: str) -> str:
    """A pattern that matches only this name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _owner(name: str) -> str | None:
    """The scalar of which this one is the error; None if it is not an error."""
    if name == "curvature/residual":
        return "curvature/largest"
    parts = name.split("/")
    if "stderr" not in parts[1:]:
        return None
    place = parts.index("stderr", 1)
    return "/".join([*parts[:place], *parts[place + 1 :]])


def _chart(log: Memory, panel: Panel, names: Sequence[str]) -> Chart | None:
    series = [_curve(log, name, color) for color, name in enumerate(names[:MOST_CURVES])]
    values = [y for one in series for y in one["y"] if y is not None]
    if not values:
        return None
    left_out = len(names) - len(series)
    thin = any(len(log.column(name)[0]) > MOST_STEPS for name in names)
    notes = [f"{left_out} more are not drawn." if left_out else "", "Thinned, spikes kept." if thin else ""]
    log_axis = panel.log and min(values) > 0 and max(values) > 3 * min(values)
    label = panel.label or (names[0] if len(names) == 1 else "")
    mark = [] if panel.mark is None else [{"y": panel.mark, "label": f"{panel.mark:g}", "within": True}]
    return Chart(
        title=panel.title, label=f"{panel.title} by step", x={"label": "step", "tight": True}, group="training",
        y={"label": label, "log": log_axis, "toggle": True}, series=series, marks=mark,
        caption=" ".join(note for note in notes if note), height=230,
    )  # fmt: skip


def _curve(log: Memory, name: str, color: int) -> Series:
    """One scalar along the steps, with its error if there is one."""
    steps, values = log.column(name)
    x, y = curve(steps, values)
    error = next((other for other in log.names if _owner(other) == name), None)
    if error is None:
        return line(name, x, y, color=color)
    errors = dict(zip(*log.column(error), strict=True))
    low, high = ([v + side * errors.get(int(s), math.nan) for s, v in zip(x, y, strict=True)] for side in (-1, 1))
    return line(name, x, y, low, high, color=color)
