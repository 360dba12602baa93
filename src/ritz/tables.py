"""Tables of text: for a terminal, for a notebook, for a page."""

import html
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. It prints itself to the width of the terminal, and as HTML in a notebook.

    Attributes:
        header: The names of the columns.
        rows: As many cells each.
        title: Above it.
        notes: Below it, a line each.
        numeric: Which columns are numbers, and stand to the right.

    Example:
        >>> table = Table(("measure", "value"), [("trace", "3.1"), ("norm", "12")], numeric=(1,))
        >>> print(table.markdown())
        | measure | value |
        | --- | ---: |
        | trace | 3.1 |
        | norm | 12 |
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    numeric: Sequence[int] = ()

    def __rich__(self) -> "RichTable":
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title or None, caption="\n".join(self.notes) or None, box=box.SIMPLE_HEAD, title_justify="left",
            caption_justify="left", pad_edge=False, show_edge=False,
        )  # fmt: skip
        for place, name in enumerate(self.header):
            number = place in self.numeric
            table.add_column(Text(name), justify="right" if number else "left", no_wrap=number or place == 0)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def text(self, width: int | None = None) -> str:
        """As plain text, `width` columns wide; that of the terminal if not said, and 120 where there is none."""
        drawn = random.getstate()
        from rich.console import Console  # draws from Python's generator when it is loaded

        random.setstate(drawn)
        width = width or shutil.get_terminal_size((120, 40)).columns
        console = Console(
            width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
        )
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def markdown(self) -> str:
        """As a table of Markdown."""
        rule = ["---:" if place in self.numeric else "---" for place in range(len(self.header))]
        cells = [self.header, rule, *([cell.replace("|", "\\|") for cell in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)

    def to_html(self) -> str:
        """As an HTML table."""

        def line(cells: Sequence[str], tag: str) -> str:
            kinds = [' class="number"' if place in self.numeric else "" for place in range(len(cells))]
            return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in self.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        head = f"<thead><tr>{line(self.header, 'th')}</tr></thead>"
        return f"<table>{caption}{head}\n<tbody>\n{body}\n</tbody></table>\n{notes}"

    _repr_html_ = to_html
