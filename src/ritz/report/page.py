"""One self-contained HTML page: text, tables, charts and figures in sections. It fetches nothing.

Style sheet and scripts are files of this package, which are written into the page. A Content-Security-Policy allows
only these, by their hashes: no other script, no style attribute, no request. Data is JSON, with "<" escaped, in a
script element that browsers do not run.
"""

import base64
import hashlib
import html
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write_text
from ..tables import Table
from .charts import Chart
from .markup import Markup, element, joined

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

SCRIPTS = ("scales.js", "drawing.js", "charts.js", "page.js")
_MOON = Markup(
    '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M8 0a8 8 0 1 0 0 16A8 8 0 0 0 8 0zm0 1.8v12.4a6.2 6.2 0 0 1 '
    '0-12.4z"/></svg>'
)

_GENERATOR = '<meta name="generator" content="ritz report">'  # identifies pages of ritz

Block = str | Markup | Table | Chart | Sequence[Chart]


@dataclass(frozen=True)
class Section:
    """A part of the page, with its place in the contents.

    Attributes:
        title: The heading.
        blocks: Paragraphs (text), markup, tables, charts, and lists of charts that are shown side by side.
        short: The name in the contents, if the heading is long.

    Example:
        >>> page = Page("Two numbers")
        >>> page.append(Section("Sums", ["1 + 1 < 3", Table(("sum",), [("2",)])]))
        >>> "<h2>Sums</h2><p>1 + 1 &lt; 3</p>" in page.to_html()
        True
    """

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)
    short: str = ""


class Page:
    """A title and sections in the order in which they are added.

    Example:
        >>> page = Page("Measures", "mean over 10 samples")
        >>> page.add(Table(("measure", "value"), [("trace", "3")]))
        >>> "<td>trace</td>" in page.to_html()
        True
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self.sections: list[Section] = []

    def append(self, section: Section) -> None:
        """Add a section at the end."""
        self.sections.append(section)

    def add(self, table: Table, heading: str = "") -> None:
        """Add your own table, with an optional heading."""
        self.append(Section(heading, [table]))

    def draw(self, plot: "Callable[[], Figure | SubFigure]", heading: str = "") -> None:
        """Add the matplotlib figure that `plot` returns; without matplotlib, add a line that says so."""
        try:
            figure = plot()
        except ImportError as error:
            self.append(Section(heading, [str(error)]))
            return
        text = io.StringIO()
        figure.figure.savefig(text, format="svg")
        data = base64.b64encode(text.getvalue().encode()).decode()
        picture = Markup(f'<img alt="{html.escape(heading or self.title)}" src="data:image/svg+xml;base64,{data}">')
        self.append(Section(heading, [element("figure", picture)]))

    def to_html(self) -> str:
        """The page as text."""
        charts: list[Chart] = []
        keys = self._keys()
        body = joined(*(_section(*pair, charts) for pair in zip(self.sections, keys, strict=True)))
        style, script = _static("page.css"), "\n".join(_static(name) for name in SCRIPTS)
        specs = [chart.spec(f"ritz-chart-{place}") for place, chart in enumerate(charts)]
        title = html.escape(self.title)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'{_GENERATOR}\n<meta name="referrer" content="no-referrer">\n<title>{title}</title>\n'
            f'<style>{style}</style>\n<script type="application/json" id="ritz-charts">{as_json(specs)}</script>\n'
            f"<script>{script}</script>\n</head>\n<body>{self._frame(body, keys)}</body>\n</html>\n"
        )

    def _keys(self) -> list[str]:
        """A unique id for each section; the prefix distinguishes it from the ids of the page itself."""
        keys: list[str] = []
        for section in self.sections:
            key = f"s-{slug(section.title)}"
            keys.append(key if key not in keys else f"{key}-{len(keys)}")
        return keys

    def _frame(self, body: Markup, keys: Sequence[str]) -> Markup:
        """Head, contents, sections and foot."""
        from .. import __version__

        theme = element("button", _MOON, id="ritz-theme", type="button", aria_label="Switch between light and dark")
        head = element(
            "header", element("p", "ritz report", class_="eyebrow"), element("h1", self.title),
            element("p", self.subtitle, class_="subtitle") if self.subtitle else "", theme,
        )  # fmt: skip
        links = [
            element("li", element("a", section.short or section.title, href=f"#{key}"))
            for section, key in zip(self.sections, keys, strict=True)
            if section.title
        ]
        nav = element("nav", element("ul", *links), aria_label="Contents") if len(links) > 1 else ""
        hint = element("noscript", element("p", "Charts need JavaScript, which is off; all tables are here."))
        skip = element("a", "To the results", class_="skip", href="#ritz-results")
        foot = element("footer", f"Made by ritz {__version__}. This page is one file and fetches nothing.")
        return joined(
            skip, element("div", head, nav, element("main", hint, body, id="ritz-results"), foot, class_="frame")
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, beside its name first and then into place.

        Raises:
            FileExistsError: If the file exists and is not a page of ritz; nothing is written.
        """
        target = check_target(Path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        return write_text(target, self.to_html())


def check_target(target: Path) -> Path:
    """The path, after checking that no file exists there, or a page of ritz, which may be overwritten.

    Raises:
        FileExistsError: If there is any other file.
    """
    if target.exists() and not _is_page(target):
        raise FileExistsError(f"{target} exists and is not a page of ritz: name another file, or remove it")
    return target


def _is_page(path: Path) -> bool:
    """Whether a file was written by `Page.write`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _GENERATOR.encode() in file.read(2000)


def slug(title: str) -> str:
    """The name of a section within the page.

    Example:
        >>> slug("Margins & boxes")
        'margins-boxes'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


def as_json(data: object) -> str:
    """JSON that is safe inside a script element.

    Example:
        >>> print(as_json(["</script>"]))
        ["\\u003c/script\\u003e"]
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(section: Section, key: str, charts: list[Chart]) -> Markup:
    heading = element("h2", section.title) if section.title else ""
    blocks = [_block(block, charts) for block in section.blocks]
    return element("section", heading, *blocks, id=key)


def _block(block: Block, charts: list[Chart]) -> Markup:
    if isinstance(block, Markup):
        return block
    if isinstance(block, str):
        return element("p", block)
    if isinstance(block, Table):
        return element("div", Markup(block.to_html()), class_="scroll", tabindex="0")
    if isinstance(block, Chart):
        charts.append(block)
        title = element("h3", block.title) if block.title else ""
        caption = element("figcaption", block.caption) if block.caption else ""
        return element("figure", title, caption, id=f"ritz-chart-{len(charts) - 1}", class_="chart")
    return element("div", *(_block(chart, charts) for chart in block), class_="charts")


def _static(name: str) -> str:
    """The text of a file of this package."""
    return resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """A policy that allows only this script, this style, and pictures inside the page."""

    def mark(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {mark(script)}; style-src {mark(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
