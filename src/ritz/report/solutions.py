"""The section on one solution: key figures, and all measures with their error bars and readings."""

import math
from collections.abc import Sequence

from ..measures.measure import Measurement
from ..measures.registry import MEASURES
from ..measures.row import EVERY, NONE, SAME_FUNCTION
from ..results import Estimate
from .charts import interval
from .markup import Markup, element, joined
from .numerals import known, typeset, within
from .page import Block, Section
from .spectra import parts_chart

FAMILIES = {
    "gap": "Loss, error and gap",
    "sharpness": "Sharpness",
    "PAC-Bayes": "PAC-Bayes",
    "margins": "Margins",
    "norms": "Norms of the weights",
    "": "Of your own",
}
# the measures at the top of the page, if they were measured
KEY_FIGURES = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "test_error": "test error",
    "gap_loss": "gap in loss",
    "trace": "Tr H",
    "lambda_max": "largest eigenvalue",
    "lambda_min": "smallest eigenvalue",
    "effective_rank": "effective rank",
    "margin_median": "median margin",
    "weight_norm": "‖w‖",
}
_FINEST = 1e-3  # the smallest relative error that is visible in the small graphs


def tiles(figures: Sequence[tuple[str, Estimate]]) -> Markup:
    """Key figures, each with its interval.

    Example:
        >>> print(tiles([("Tr H", Estimate(name="trace", value=3.0, exact=True))]))
        <dl class="tiles"><div class="tile"><dt>Tr H</dt><dd class="value">3</dd><dd class="range">exact</dd></div></dl>
    """
    made = []
    for name, estimate in figures:
        value = element("dd", within(estimate), class_="value")
        range_ = element("dd", known(estimate), class_="range")
        made.append(element("div", element("dt", name), value, range_, class_="tile"))
    return element("dl", *made, class_="tiles")


def key_figures(found: Measurement) -> list[tuple[str, Estimate]]:
    """The measures that are shown at the top.

    Example:
        >>> trace = Estimate(name="trace", value=3.0, exact=True)
        >>> [name for name, _ in key_figures(Measurement(estimates={"trace": trace, "of my own": trace}))]
        ['Tr H']
    """
    return [(name, found[key]) for key, name in KEY_FIGURES.items() if key in found and not found[key].many]


def section(found: Measurement) -> Section:
    """A table of all measures by family, charts of values by layer, and a list of what could not be measured.

    Example:
        >>> trace = Estimate(name="trace", value=3.0, exact=True)
        >>> found = Measurement(estimates={"trace": trace}, failures={"distance": "needs init="})
        >>> section(found).blocks[-1]
        '<ul><li><span class="mono">distance</span>: needs init=</li></ul>'
    """
    blocks: list[Block] = [
        "Each number with its 95 % interval, its divisor, and how to read it. Click a name for its formula and source. "
        "Whiskers show the interval relative to the value, on the same scale for all.",
        _filter(len(found)), _table(found),
    ]  # fmt: skip
    blocks += _layers(found)
    if found.failures:
        reasons: dict[str, list[str]] = {}
        for key, why in found.failures.items():
            reasons.setdefault(why, []).append(key)
        blocks.append(element("h3", "Not measured"))
        rows = [
            element("li", element("span", ", ".join(keys), class_="mono"), f": {why}") for why, keys in reasons.items()
        ]
        blocks.append(element("ul", *rows))
    return Section("Measures", blocks)


def _filter(count: int) -> Markup:
    if count < 12:
        return Markup("")
    field = '<input type="search" data-filter="ritz-measures" placeholder="filter" aria-label="Filter the measures">'
    return element("p", Markup(field), class_="filter")


def _table(found: Measurement) -> Markup:
    """The table, a body for each family."""
    scale = Markup(
        '<svg class="strip" viewBox="0 0 132 18" role="img" aria-label="marks at ± 1, 10 and 100 per cent">'
        + "".join(f'<text x="{66 + 60 * side * place(x):.1f}" y="14">{100 * x:g}</text>' for side in (-1, 1)
                  for x in (0.01, 0.1, 1.0))
        + '<text x="66" y="14">± %</text></svg>'
    )  # fmt: skip
    names = (("measure", ""), ("value", "number"), ("95 % interval", "number"), (scale, "strip"), ("reading", ""))
    head = [element("th", name, scope="col", class_=kind or None) for name, kind in names]
    bodies = []
    for family, title in FAMILIES.items():
        keys = [key for key in found if (MEASURES[key].family if key in MEASURES else "") == family]
        if keys:
            heading = element("tr", element("th", title, scope="rowgroup", colspan=5), class_="family")
            bodies.append(element("tbody", heading, *(_row(found, key) for key in keys)))
    table = element("table", element("thead", element("tr", *head)), *bodies, id="ritz-measures", class_="stack")
    return element("div", table, class_="scroll", tabindex="0")


def _row(found: Measurement, key: str) -> Markup:
    estimate = found[key]
    value, range_, whiskers = typeset(estimate.shown()), "one for each", Markup("")
    if not estimate.many:
        range_, whiskers = known(estimate), strip(float(estimate.value), *interval(estimate))
    name = element("th", element("details", element("summary", key), _about(found, key)), scope="row")
    return element(
        "tr", name, element("td", value, class_="number"), element("td", range_, class_="number"),
        element("td", whiskers, class_="strip"),
        element("td", found.reading(key), element("small", found.conventions.get(key, "")), class_="reading"),
        data_row=True,
    )  # fmt: skip


def _about(found: Measurement, key: str) -> Markup:
    """The details of a measure, which a click on its name shows."""
    estimate, row = found[key], MEASURES.get(key)
    lines = [("convention", estimate.convention)]
    if row is not None:
        lines[:0] = [("formula", row.formula), ("source", row.source), ("unchanged by", _kept(row.unchanged))]
    if estimate.samples is not None:
        lines.append(("samples", f"{len(estimate.samples):,}"))
    if estimate.products:
        lines.append(("products", f"{estimate.products:,}"))
    return element("dl", *(joined(element("dt", name), element("dd", text)) for name, text in lines if text))


def _kept(unchanged: frozenset[str]) -> str:
    names = {EVERY: "all that keep the prediction", SAME_FUNCTION: "all that keep the function", NONE: "none"}
    return names.get(unchanged, ", ".join(sorted(unchanged)))


def place(relative: float) -> float:
    """The position of a relative error in the small graphs: 0 for none, 1 for 100 % or more, logarithmic between.

    Example:
        >>> place(0.0), round(place(0.1), 2), place(5.0)
        (0.0, 0.67, 1.0)
    """
    most = math.log1p(1 / _FINEST)
    return min(math.log1p(min(abs(relative), 1.0) / _FINEST) / most, 1.0)


def strip(value: float, low: float, high: float) -> Markup:
    """An interval relative to its value: a dot and its whiskers, which end at 100 %.

    Example:
        >>> 'class="error"' in strip(2.0, 1.9, 2.3), 'class="error"' in strip(2.0, 2.0, 2.0)
        (True, False)
    """
    marks = "".join(f"M{66 + 60 * side * place(x):.1f} 6v6" for side in (-1, 1) for x in (0.01, 0.1, 1.0))
    body = f'<path d="M6 9H126{marks}"/>'
    if value and math.isfinite(value):
        size = abs(value)
        ends = [side * place((end - value) / size) for side, end in ((-1, low), (1, high)) if not math.isnan(end)]
        if len(ends) == 2 and low < high:
            body += f'<path class="error" d="M{66 + 60 * ends[0]:.1f} 9H{66 + 60 * ends[1]:.1f}"/>'
        body += '<circle cx="66" cy="9" r="3.2"/>'
    return Markup(f'<svg class="strip" viewBox="0 0 132 18" aria-hidden="true">{body}</svg>')


def _layers(found: Measurement) -> list[Block]:
    """Charts of the measures that have values by layer, except those in the section on the spectrum."""
    own = set() if found.spectrum is None else {"trace", "moment2", "moment2_per_param", "trace_per_param"}
    charts = []
    for key, estimate in found.items():
        parts = {name: part for name, part in estimate.parts.items() if name in found.layer_names and not part.many}
        if len(parts) > 1 and key not in own:
            charts.append(parts_chart(key, found.conventions.get(key, key), parts))
    return [element("h3", "Layer by layer"), charts] if charts else []
