"""One self-contained HTML page: tables and figures, nothing fetched from elsewhere."""

import html
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
caption { text-align: left; padding-bottom: 0.5rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.8rem 0.25rem 0; }
tr { border-bottom: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td:first-child { font-family: ui-monospace, monospace; white-space: nowrap; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; background: white; }
footer { margin-top: 3rem; font-size: 0.8rem; opacity: 0.7; }
"""


class Page:
    """A title, and tables and figures in the order in which they are added.

    Example:
        >>> page = Page("Measures", "mean over 10 samples")
        >>> page.add(Table(("measure", "value"), [("trace", "3")]))
        >>> "<td>trace</td>" in page.to_html()
        True
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self.blocks: list[str] = []

    def add(self, table: Table, heading: str = "") -> None:
        """A table, under a heading of its own if one is given."""
        self.blocks.append(f'{_heading(heading)}<div class="scroll">{table.to_html()}</div>')

    def draw(self, plot: "Callable[[], Figure | SubFigure]", heading: str = "") -> None:
        """The figure that `plot` makes, as SVG; without matplotlib a line that says so."""
        try:
            figure = plot()
        except ImportError as error:
            self.blocks.append(f"<p>{html.escape(str(error))}</p>")
            return
        text = io.StringIO()
        figure.figure.savefig(text, format="svg")
        svg = text.getvalue()
        self.blocks.append(f"{_heading(heading)}<figure>{svg[svg.index('<svg') :]}</figure>")

    def to_html(self) -> str:
        """The page as text."""
        from .. import __version__

        title, body = html.escape(self.title), "\n".join(self.blocks)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<p>{html.escape(self.subtitle)}</p>\n{body}\n"
            f"<footer>ritz {__version__}</footer></body></html>\n"
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, beside its name first and then into place."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_text(self.to_html(), encoding="utf-8")
        part.replace(target)
        return target


def _heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>\n" if text else ""
