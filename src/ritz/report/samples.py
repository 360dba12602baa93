"""The sections on single items: the distribution of margins, and per-sample traces against margins."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import NonFiniteError, UnsupportedError
from ..measures.margins import MarginDistribution, MarginStudy, margin_distribution
from ..measures.margins.distribution import Box, weighted_quantile
from ..measures.outputs import Outputs
from ..measures.study.correlation import Correlation, spearman
from ..results import Estimate
from ..tables import Table
from .charts import Chart, Series, bars, line, numbers, points, thinned
from .numerals import short, typeset
from .page import Block, Section

BINS = 60
MOST_FLIERS = 150  # points beyond the whiskers of a box
STRETCHES = 24  # of the axis, for a running median
_WORDS = {True: "right", False: "wrong"}


def distributions(outputs: Outputs) -> list[MarginDistribution]:
    """The distributions of output and softmax margins, if items have them.

    Example:
        >>> margin = torch.tensor([1.0, 2.0, 6.0])
        >>> [d.name for d in distributions(Outputs(loss=torch.ones(3), weight=torch.ones(3), margin=margin))]
        ['output margin']
        >>> distributions(Outputs(loss=torch.ones(3), weight=torch.ones(3)))
        []
    """
    found = []
    for which in ("output", "softmax"):
        try:
            one = margin_distribution(outputs, which=which)
        except (UnsupportedError, NonFiniteError):
            continue
        if len(one.values) and bool(one.values.isfinite().all()):
            found.append(one)
    return found


def margins_section(found: list[MarginDistribution]) -> Section:
    """Histograms with box plots below them on the same axis, and quantiles.

    Example:
        >>> values = torch.tensor([3.0, 2.0, -1.0])
        >>> fields = {"values": values, "weight": torch.ones(3), "correct": values > 0}
        >>> print(margins_section([MarginDistribution(name="output margin", convention="signed", **fields)]).blocks[0])
        How far the right class is ahead of the best other one, for each of 3 items; 1 are predicted wrong, ...
    """
    wrong = int((~found[0].correct).sum())
    lead = (
        f"How far the right class is ahead of the best other one, for each of {len(found[0].values):,} items; "
        f"{wrong:,} are predicted wrong, and have a margin of 0 or less."
    )
    blocks: list[Block] = [lead]
    blocks.append([histogram(one, f"margin-{place}") for place, one in enumerate(found)])
    blocks.append([_boxes(one, f"margin-{place}") for place, one in enumerate(found)])
    names = [f"{100 * q:g} %" for q in found[0].quantiles]
    names[0], names[-1] = "smallest", "largest"
    rows = [(one.name, *(short(value) for value in one.quantiles.values())) for one in found]
    blocks.append(Table(("quantiles", *names), rows, numeric=range(1, len(names) + 1)))
    return Section("Margins", blocks)


def histogram(one: MarginDistribution, group: str = "") -> Chart:
    """The number of items by margin, with wrong predictions stacked on right ones.

    Example:
        >>> values = torch.tensor([3.0, 2.0, -1.0])
        >>> fields = {"values": values, "weight": torch.ones(3), "correct": values > 0}
        >>> chart = histogram(MarginDistribution(name="output margin", convention="signed", **fields))
        >>> {series["name"]: sum(series["y"]) for series in chart.series}
        {'right': 2, 'wrong': 1}
    """
    edges, right, wrong = one.histogram(BINS)
    series = [bars("right", edges, right, color=0)]
    if bool(wrong.any()):
        series.append(bars("wrong", edges, wrong, right, color=1))
    return Chart(
        title=f"{one.name.capitalize()}s", label=f"Histogram of the {one.name}", x=_axis(one),
        y={"label": "items", "toggle": True, "zero": True, "start": 0.5}, series=series, group=group,
        marks=[{"x": one.quantile(0.5), "label": "median"}], caption=one.convention,
    )  # fmt: skip


def _axis(one: MarginDistribution) -> dict[str, Any]:
    """The common axis of histogram and box plots."""
    edges = one.histogram(1)[0]
    pad = 0.02 * float(edges[1] - edges[0])
    return {"label": one.name, "low": float(edges[0]) - pad, "high": float(edges[1]) + pad}


def _boxes(one: MarginDistribution, group: str) -> Chart:
    """Box plots of all items, of right and of wrong predictions."""
    sides: dict[str, Box] = {"all": one.box}
    for side, word in _WORDS.items():
        if 0 < int((one.correct == side).sum()) < len(one.values):
            sides[word] = one.part(side).box
    series: list[Series] = []
    for row, (name, box) in enumerate(sides.items()):
        fliers = torch.tensor(box.fliers)
        kept = fliers[thinned(len(fliers), fliers, MOST_FLIERS)]
        quartiles = numbers([box.low, box.q1, box.median, box.q3, box.high])
        color = {"all": 7, "right": 0, "wrong": 1}[name]
        series.append(
            {"kind": "box", "name": name, "row": row, "box": quartiles, "fliers": numbers(kept), "color": color}
        )
    return Chart(
        title=f"{one.name.capitalize()}s, box plot", label=f"Box plots of the {one.name}", x=_axis(one),
        y={"categories": list(sides)}, series=series, hover="point", group=group,
        caption="Quartiles; whiskers at the last values within 1.5 interquartile ranges; points beyond them.",
    )  # fmt: skip


def paired(traces: Estimate, outputs: Outputs | None) -> list[MarginDistribution]:
    """The margins of the samples that have a trace; empty if the samples cannot be matched.

    Example:
        >>> outputs = Outputs(loss=torch.ones(3), weight=torch.ones(3), margin=torch.tensor([1.0, 2.0, 6.0]))
        >>> [len(paired(Estimate(name="traces", value=torch.ones(count)), outputs)) for count in (3, 4)]
        [1, 0]
    """
    if outputs is None or not outputs.ordered:
        return []
    count = torch.as_tensor(traces.value).numel()
    return [one for one in distributions(outputs) if len(one.values) == count]


def of_study(study: MarginStudy) -> MarginDistribution:
    """The margins of the samples that a study drew.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), (torch.eye(2), torch.tensor([0, 1])))
        >>> of_study(ritz.measures.margin_study(risk)).values.shape
        torch.Size([2])
    """
    found = study.margin
    return MarginDistribution(
        name="output margin", values=found.bound, weight=torch.ones(len(found.bound)), correct=found.is_correct,
        convention=study.convention,
    )  # fmt: skip


def traces_section(traces: Estimate, found: Sequence[MarginDistribution]) -> Section:
    """Per-sample traces against margins, or the traces only if there are no margins.

    Example:
        >>> traces = Estimate(name="sample traces", value=torch.tensor([1.0, 2.0]), exact=True)
        >>> print(traces_section(traces, []).blocks[0])
        The trace of the Hessian of each of 2 samples' own loss, exact.
    """
    values = torch.as_tensor(traces.value).double().flatten().cpu()
    error = "exact" if traces.exact else "from probes, each with its own error"
    lead = f"The trace of the Hessian of each of {len(values):,} samples' own loss, {error}."
    spread = values_chart(values, "How the traces are spread", "trace of the sample", "samples")
    if not found:
        return Section("Sample traces", [lead, spread])
    main = found[0]
    relation = spearman(main.values, values, resamples=499)
    charts = [cloud(one, values, _errors(traces)) for one in found]
    return Section("Sample traces", [lead, _told(relation), charts, spread])


def _told(relation: Correlation) -> str:
    """A sentence on the correlation of trace and margin, or why there is none."""
    if math.isnan(relation.value):
        return f"The correlation of trace and margin does not exist: {relation.reason or 'too few samples'}."
    low, high = relation.interval()
    ends = f"{low:.3f} and {high:.3f}"
    return typeset(f"Spearman's correlation of trace and margin is {relation.value:.3f}, with 95 % between {ends}.")


def _errors(traces: Estimate) -> Tensor | None:
    return None if traces.exact else torch.as_tensor(traces.stderr).double().flatten().cpu()


def cloud(margins: MarginDistribution, traces: Tensor, stderr: Tensor | None = None) -> Chart:
    """A point for every sample, or for a selection with the same distribution, and the median of all along the axis.

    Example:
        >>> values = torch.tensor([3.0, 2.0, -1.0])
        >>> fields = {"values": values, "weight": torch.ones(3), "correct": values > 0}
        >>> chart = cloud(MarginDistribution(name="output margin", convention="", **fields), torch.tensor([1.0, 2, 9]))
        >>> [(series["name"], series["y"]) for series in chart.series]
        [('right', [1, 2]), ('wrong', [9]), ('median', [2])]
    """
    kept = thinned(len(traces), margins.values, first=~margins.correct)
    series: list[Series] = []
    for side, word in _WORDS.items():
        rows = kept[margins.correct[kept] == side]
        if len(rows):
            text = [f"sample {row}" for row in rows.tolist()]
            if stderr is not None:
                text = [f"± {float(stderr[row]):.2g}, {name}" for row, name in zip(rows.tolist(), text, strict=True)]
            series.append(points(word, margins.values[rows], traces[rows], text=text, color=0 if side else 1))
    series.append(_median(margins, traces))
    thin = (
        f" {len(kept):,} of {len(traces):,} samples are drawn, wrong predictions first; curve and band use all."
        if len(kept) < len(traces)
        else ""
    )
    positive = bool((traces > 0).all())
    return Chart(
        title=f"Trace against {margins.name}", label=f"Trace of each sample against its {margins.name}",
        x={"label": margins.name}, y={"label": "trace", "log": positive, "toggle": True}, series=series, hover="point",
        zoom="xy", marks=[{"x": 0, "label": "0"}], height=360,
        caption=f"Curve: median in {STRETCHES} stretches of equal number, with quartiles.{thin}",
    )  # fmt: skip


def _median(margins: MarginDistribution, traces: Tensor) -> Series:
    """The median and the quartiles of the traces along the margins, over all items."""
    order = margins.values.argsort()
    pieces = [piece for piece in order.tensor_split(min(STRETCHES, max(len(order) // 8, 1))) if len(piece)]
    middle = [float(margins.values[piece].median()) for piece in pieces]
    quartiles: Mapping[float, list[float]] = {
        q: [weighted_quantile(traces[piece], torch.ones(len(piece)), q) for piece in pieces] for q in (0.25, 0.5, 0.75)
    }
    return line("median", middle, quartiles[0.5], quartiles[0.25], quartiles[0.75], color=8)


def values_chart(values: Tensor, title: str, label: str, count: str = "values") -> Chart:
    """A histogram of numbers; those that are not finite are left out, and the caption says so.

    Example:
        >>> chart = values_chart(torch.tensor([1.0, 2.0, math.nan]), "Values", "value")
        >>> sum(chart.series[0]["y"]), chart.caption
        (2, '1 that are not finite are left out.')
    """
    fine = values[values.isfinite()].double().flatten().cpu()
    left_out = values.numel() - len(fine)
    values = fine if len(fine) else torch.zeros(1, dtype=torch.float64)
    low, high = float(values.min()), float(values.max())
    pad = 0.0 if high > low else max(abs(low), 1.0) / 2
    edges = torch.linspace(low - pad, high + pad, BINS + 1, dtype=torch.float64)
    counts = torch.histogram(values, edges).hist
    return Chart(
        title=title, label=f"Histogram: {title}", x={"label": label, "tight": True},
        y={"label": count, "log": True, "toggle": True, "start": 0.5}, series=[bars(count, edges, counts)],
        marks=[{"x": float(values.mean()), "label": "mean"}], height=260,
        caption=f"{left_out:,} that are not finite are left out." if left_out else "",
    )  # fmt: skip
