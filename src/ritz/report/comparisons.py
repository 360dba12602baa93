"""The section on a comparison: several solutions side by side."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from ..measures.compare import Comparison
from ..measures.registry import MEASURES
from ..results import Estimate
from .charts import INKS, Chart, interval, points
from .markup import Markup, element
from .numerals import error, short
from .page import Block, Section
from .spectra import density_chart

_LONG = 24  # characters of a name that a page has room for
OUTCOME = "gap_loss"  # what the other measures are compared with
_FIRST = ("trace", "spectral_norm", "frobenius_norm", "metric_a")  # measures drawn against the gap first
_KINDS = {"same": "good", "opposite": "bad", "mixed": "unsure", "undecided": "unsure"}


def section(found: Comparison) -> Section:
    """Every measure with the values of all solutions on a small axis, its order and its verdict.

    Example:
        >>> X, y = torch.eye(2), torch.tensor([0, 1])
        >>> risk = ritz.Risk(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), (X, y))
        >>> half = risk.at({name: p / 2 for name, p in risk.params().items()})
        >>> found = section(ritz.compare({"whole": risk, "half": half}, measures=["weight_norm"]))
        >>> '<td class="reading">prefers half</td>' in found.blocks[2]
        True
    """
    names = list(found.measurements)
    found = shortened(found)
    blocks: list[Block] = [
        f"{len(names)} solutions of one problem, measured with common probes and on common items: differences are "
        "taken in pairs. Where the error bars do not allow an order, it says so.",
        element("p", *(_swatch(*pair, place) for place, pair in enumerate(zip(found.measurements, names, strict=True))),
                class_="legend"),
        _table(found),
    ]  # fmt: skip
    if found.notes:
        blocks.append(element("ul", *(element("li", note) for note in found.notes)))
    chart = _against(found)
    if chart is not None:
        blocks.append(chart)
    spectra = {name: m.spectrum for name, m in found.measurements.items() if m.spectrum is not None}
    if spectra:
        blocks.append(replace(density_chart(spectra), title="Spectral densities"))
    return Section("Comparison", blocks)


def summary(found: Comparison) -> list[str]:
    """The result of the comparison in sentences; empty if no test data were given.

    Example:
        >>> X, y = torch.eye(2), torch.tensor([0, 1])
        >>> model = torch.nn.Linear(2, 2)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (X, y))
        >>> same = risk.at({name: p.clone() for name, p in risk.params().items()})
        >>> summary(ritz.compare({"one": risk, "same": same}, (X, y), measures=["gap_loss", "weight_norm"]))
        ['By the gap in loss: all equal.', 'Beyond the error bars of both, no measure orders ... or against it.']
    """
    if OUTCOME not in found.rankings:
        return []
    found = shortened(found)
    words: dict[str, list[str]] = {}
    for key in found.rankings:
        if key not in MEASURES or MEASURES[key].family != "gap":
            words.setdefault(found.agreement(key, OUTCOME).verdict, []).append(key)
    told = [
        f"{name}: {', '.join(words[verdict])}."
        for verdict, name in (("same", "Ordered as the gap"), ("opposite", "Ordered against it"))
        if verdict in words
    ]
    none = "Beyond the error bars of both, no measure orders the solutions as the gap does or against it."
    return [f"By the gap in loss: {found[OUTCOME].verdict}.", " ".join(told) or none]


def shortened(found: Comparison) -> Comparison:
    """The same comparison, with names of solutions shortened as far as they remain different."""
    short = dict(zip(found.measurements, apart(list(found.measurements)), strict=True))
    return replace(
        found, measurements={short[name]: m for name, m in found.measurements.items()},
        rankings={
            key: replace(ranking, order=tuple(short[name] for name in ranking.order))
            for key, ranking in found.rankings.items()
        },
    )  # fmt: skip


def apart(names: Sequence[str]) -> list[str]:
    """Long names without the words with which all of them begin and end.

    Example:
        >>> apart(["resnet18_lr0.1_wd5e-4_seed0_last", "resnet18_lr0.1_wd5e-4_seed12_last"])
        ['…seed0…', '…seed12…']
        >>> apart(["seed0", "seed1"])
        ['seed0', 'seed1']
    """
    if len(names) < 2 or max(map(len, names)) <= _LONG:
        return list(names)
    words = [re.split(r"([\W_]+)", name) for name in names]  # words and the separators between them
    head, tail = _alike(words), _alike([each[::-1] for each in words])
    if min(map(len, words)) <= head + tail:
        return list(names)
    inner = ["".join(each[head : len(each) - tail]) for each in words]
    return [f"{'…' * bool(head)}{name}{'…' * bool(tail)}" for name in inner]


def _alike(rows: Sequence[Sequence[str]]) -> int:
    """The number of leading entries that all rows have in common."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))


def _swatch(name: str, whole: str, place: int) -> Markup:
    dot = Markup('<i class="points"></i>')
    title = whole if whole != name else None
    return element("span", dot, element("span", name), class_=f"key ink-{place % INKS}", title=title)


def _table(found: Comparison) -> Markup:
    outcome = OUTCOME if OUTCOME in found.rankings else None
    names = ["measure", "side by side", "verdict", *([f"with {outcome}"] if outcome else [])]
    head = [element("th", name, scope="col") for name in names]
    head += [element("th", name, scope="col", class_="number") for name in found.measurements]
    rows = [_row(found, key, outcome) for key in found.rankings]
    kind = "stack compared" + " many" * (len(found.measurements) > INKS)  # each row becomes a card
    table = element("table", element("thead", element("tr", *head)), element("tbody", *rows), class_=kind)
    return element("div", table, class_="scroll", tabindex="0")


def _row(found: Comparison, key: str, outcome: str | None) -> Markup:
    values = {name: m[key] for name, m in found.measurements.items()}
    cells = [
        element("td", short(float(e.value)), element("small", error(e)) if error(e) else "", class_="number",
                data_name=name)
        for name, e in values.items()
    ]  # fmt: skip
    last = []
    if outcome:
        is_outcome = key in MEASURES and MEASURES[key].family == "gap"
        verdict = "" if is_outcome else found.agreement(key, outcome).verdict
        word = element("span", verdict, class_=f"word {_KINDS[verdict]}") if verdict else ""
        last = [element("td", word)]
    return element(
        "tr", element("th", key, scope="row"), element("td", strip(values), class_="strip"),
        element("td", found[key].verdict, class_="reading"), *last, *cells, data_row=True,
    )  # fmt: skip


def strip(values: Mapping[str, Estimate]) -> Markup:
    """The values on one small axis from the lowest to the highest end, with their 95 % intervals.

    Example:
        >>> values = {name: Estimate(name="trace", value=value, exact=True) for name, value in (("a", 1.0), ("b", 2.0))}
        >>> strip(values).count("<circle")
        2
    """
    ends = [_ends(estimate) for estimate in values.values()]
    finite = [x for three in ends for x in three if math.isfinite(x)]
    if not finite:
        return Markup("")
    low, span = min(finite), (max(finite) - min(finite)) or 1.0

    def at(x: float) -> float:
        return 6 + 140 * min(max((x - low) / span, 0.0), 1.0) if not math.isnan(x) else 6

    body = '<path d="M4 9H148"/>'
    for place, (value, left, right) in enumerate(ends):
        if math.isfinite(value):
            y = 9 + 2.5 * (place % 3 - 1)
            whisker = f'<path class="error" d="M{at(left):.1f} {y}H{at(right):.1f}"/>' if left < right else ""
            body += f'<g class="ink ink-{place % INKS}">{whisker}<circle cx="{at(value):.1f}" cy="{y}" r="3.4"/></g>'
    return Markup(f'<svg class="strip wide" viewBox="0 0 152 18" aria-hidden="true">{body}</svg>')


def _ends(estimate: Estimate) -> tuple[float, float, float]:
    return float(estimate.value), *interval(estimate)


def _against(found: Comparison) -> Chart | None:
    """The gap against a measure that the reader selects, a point for each solution."""
    if OUTCOME not in found.rankings:
        return None
    keys = [key for key in found.rankings if key not in MEASURES or MEASURES[key].family != "gap"]
    if not keys:
        return None
    keys.sort(key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
    choices = [{"name": key, "x": {"label": key}, "series": _points(found, key)} for key in keys]
    return Chart(
        title="The gap in loss against a measure", label="Gap in loss against a measure, a point for each solution",
        x={"label": keys[0], "toggle": True}, y={"label": "test loss − training loss"}, series=_points(found, keys[0]),
        choices=choices, hover="point", zoom="xy",
        caption="With 95 % intervals, each by itself. A few solutions prove nothing about a measure.",
    )  # fmt: skip


def _points(found: Comparison, key: str) -> list[dict[str, object]]:
    series = []
    for place, (name, m) in enumerate(found.measurements.items()):
        (x, *across), (y, *up) = _ends(m[key]), _ends(m[OUTCOME])
        ends = {"xlow": across[:1], "xhigh": across[1:], "low": up[:1], "high": up[1:]}
        series.append(points(name, [x], [y], color=place % INKS, **ends))
    return series
