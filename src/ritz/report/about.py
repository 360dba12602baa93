"""The sections on the cost of a result, its settings, and how to cite it."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..measures.measure import Measurement
from ..measures.registry import MEASURES
from ..measures.subject import HESSIAN_RUN
from ..tables import Table
from .markup import Markup, element
from .numerals import short
from .page import Block, Section

_ABSTRACT = "The curvature of a neural network's loss, measured matrix-free, with error bars, in PyTorch"
_AUTHORS = "The ritz developers"


def cost_section(found: Measurement) -> Section:
    """The cost of the runs that the measures share.

    Example:
        >>> print(cost_section(Measurement(estimates={}, seconds={"forward pass": 2.0, "loss": 1.0})).blocks[0])
        3 seconds in runs that the measures share; a product takes about two to three gradients.
    """
    seconds = dict(found.seconds)
    total = sum(seconds.values()) or 1.0
    products = {HESSIAN_RUN: found.spectrum.products} if found.spectrum is not None else {}
    rows = [
        (name, *_part(spent, total), f"{products[name]:,}" if name in products else "")
        for name, spent in sorted(seconds.items(), key=lambda pair: -pair[1])
    ]
    table = Table(("run", "seconds", "share", "products"), rows, numeric=(1, 2, 3))
    lead = (
        f"{short(sum(seconds.values()), 3)} seconds in runs that the measures share; a product takes about two to "
        "three gradients."
    )
    return Section("Cost", [lead, element("div", Markup(table.to_html()), class_="scroll plain")])


def _part(spent: float, total: float) -> tuple[str, str]:
    """Seconds and their share of the total, as text."""
    seconds = short(spent, 3) if spent >= 1e-3 else "below 0.001"
    return seconds, f"{spent / total:.0%}" if spent >= 0.005 * total else "below 1%"


def settings_section(settings: Mapping[str, Any]) -> Section:
    """All settings; nested ones are named by their path.

    Example:
        >>> settings_section({"seed": 0}).blocks
        ['<dl class="pairs"><div><dt>seed</dt><dd>0</dd></div></dl>']
    """
    pairs = [element("div", element("dt", name), element("dd", value)) for name, value in flat(settings)]
    return Section("Settings", [element("dl", *pairs, class_="pairs")])


def flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of a nested mapping, in its order.

    Example:
        >>> list(flat({"seed": 0, "machine": {"cores": 2, "device": None}, "weights": ["a", "b"]}))
        [('seed', '0'), ('machine.cores', '2'), ('machine.device', 'none'), ('weights', 'a, b')]
    """
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from flat(value, name)
        else:
            yield name, _text(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)


def cite_section(keys: list[str]) -> Section:
    """How to cite ritz, and where the measures of this page come from.

    Example:
        >>> "Tr H" in cite_section(["trace"]).blocks[-1], "seed 000, section 1" in cite_section(["trace"]).blocks[-1]
        (False, True)
    """
    from .. import __version__

    entry = (
        f"@software{{ritz,\n  title   = {{ritz: {_ABSTRACT[0].lower()}{_ABSTRACT[1:]}}},\n"
        f"  author  = {{{{{_AUTHORS}}}}},\n  version = {{{__version__}}},\n  license = {{Apache-2.0}}\n}}"
    )
    copy = element("button", "copy", type="button", data_copy="ritz-bibtex")
    blocks: list[Block] = [
        f"ritz {__version__}. {_ABSTRACT}. Please also cite the source of each measure that you use.",
        element("pre", entry, id="ritz-bibtex"), copy,
    ]  # fmt: skip
    sources: dict[str, list[str]] = {}
    for key in keys:
        if key in MEASURES:
            sources.setdefault(MEASURES[key].source, []).append(key)
    if sources:
        rows = [
            element("tr", element("td", source), element("td", ", ".join(names), class_="mono"))
            for source, names in sorted(sources.items())
        ]
        head = element(
            "thead", element("tr", element("th", "source", scope="col"), element("th", "measures", scope="col"))
        )
        table = element("table", head, element("tbody", *rows), class_="plain")
        inner = element("details", element("summary", "Sources of the measures"), table)
        blocks.append(inner)
    return Section("How to cite", blocks, short="Cite")
