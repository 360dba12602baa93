"""The section on an audit: which measures change when the function does not."""

import math

from ..measures.audit import TOLERANCE, Audit, Shift
from ..measures.transforms import TRANSFORMS
from .charts import Chart, points
from .markup import Markup, element
from .numerals import typeset
from .page import Block, Section

_KINDS = {"moved": "moved", "unchanged": "same", "cannot tell": "unsure"}


def section(audit: Audit) -> Section:
    """Findings, the table of shifts, the factors on one axis, and a description of each transform.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.eye(2), torch.tensor([0, 1])))
        >>> found = section(ritz.audit(risk, measures=["train_loss", "weight_norm"], transforms=["rescale"]))
        >>> '<td class="same" title="unchanged">=</td>' in found.blocks[2]
        True
    """
    blocks: list[Block] = [
        "The weights were changed so that the network computes the same function, or predicts the same labels, and "
        f"everything was measured again (factor {audit.strength:g}). A measure that changes depends on the weights, "
        "not only on the function.",
        element("ul", *(element("li", finding) for finding in audit.findings())), _table(audit),
        element("p", f"×c changed by that factor; = within {TOLERANCE:.0%}; ? unknown within the error bar; "
                "– not measured.", class_="note"),
    ]  # fmt: skip
    chart = _chart(audit)
    if chart is not None:
        blocks.append(chart)
    moves = [(name, f"{TRANSFORMS[name].text}; the {TRANSFORMS[name].keeps} is the same") for name in audit.after]
    moves += [(name, f"not applied: {why}") for name, why in audit.refused.items()]
    rows = [element("li", element("span", name, class_="mono"), f": {text}") for name, text in moves]
    return Section("What moves when the function does not", [*blocks, element("ul", *rows)], short="Audit")


def _table(audit: Audit) -> Markup:
    """A row for each measure, a column for each transform."""
    shifts = audit.shifts
    head = [element("th", name, scope="col") for name in ("measure", "as it is", *audit.after)]
    rows = []
    for key, estimate in audit.before.items():
        cells = [_cell(shifts.get((key, name))) for name in audit.after]
        rows.append(element("tr", element("th", key, scope="row"), element("td", typeset(estimate.shown())), *cells))
    table = element("table", element("thead", element("tr", *head)), element("tbody", *rows), class_="audit")
    return element("div", table, class_="scroll", tabindex="0")


def _cell(shift: Shift | None) -> Markup:
    if shift is None:
        return element("td", "–")
    return element("td", typeset(str(shift)), class_=_KINDS[shift.verdict], title=shift.verdict)


def _chart(audit: Audit) -> Chart | None:
    """The ratio after / before, for each measure that moved under some transform and has a factor."""
    factors = {
        place: shift.factor
        for place, shift in audit.shifts.items()
        if shift.verdict == "moved" and 0 < shift.factor < math.inf
    }
    keys = [key for key in audit.before if any(key == other for other, _ in factors)]
    if not keys:
        return None
    series = []
    for color, name in enumerate(audit.after):
        aside = 0.16 * (color - (len(audit.after) - 1) / 2)  # transforms with equal factors are drawn side by side
        own = [(factors[key, name], row + aside) for row, key in enumerate(keys) if (key, name) in factors]
        if own:
            series.append(points(name, [x for x, _ in own], [y for _, y in own], color=color))
    return Chart(
        title="By how much", label="Ratio after / before, for each measure that moved", hover="point",
        x={"label": "after / before", "log": True}, y={"categories": keys}, series=series,
        marks=[{"x": 1, "within": True, "label": "unchanged"}],
    )  # fmt: skip
