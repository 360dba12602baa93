"""Tables of text: for a terminal, for a notebook, for a page."""

import html
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table as RichTable

_GAP = 3  # between columns
_LINES = 3  # of a cell of text, about, until it stands better below its row


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. It prints itself to the width of the terminal, and as HTML in a notebook.

    Attributes:
        header: The names of the columns.
        rows: As many cells each.
        title: Above it.
        notes: Below it, a line each.
        numeric: Which columns are numbers, and stand to the right.
        styles: How a terminal shows cells of these words, such as {"holds": "green"}.

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
    styles: Mapping[str, str] = field(default_factory=dict)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        from rich.text import Text

        if self.title:
            yield Text(self.title, style="table.title")
        room = options.max_width - self._across(self._least())
        yield from [self._ruled(room)] if room >= 0 else self._stacked(options.max_width)
        for note in self.notes:
            yield Text(note, style="table.caption")

    def _wraps(self, place: int) -> bool:
        """Whether the cells of a column may be broken into lines: those of numbers may not, nor names of rows."""
        return place > 0 and place not in self.numeric

    def _widths(self) -> list[int]:
        """Columns of the screen that each column takes where nothing is broken."""
        from rich.cells import cell_len

        return [max(map(cell_len, cells)) for cells in zip(self.header, *self.rows, strict=True)]

    def _least(self) -> list[int]:
        """Columns in which it can be read: no number is cut, no word broken, no cell has more than a few lines."""
        from rich.cells import cell_len

        least = self._widths()
        for place in filter(self._wraps, range(len(least))):
            words = [word for row in (self.header, *self.rows) for word in row[place].split()]
            least[place] = min(least[place], max(12, -(-least[place] // _LINES), *map(cell_len, words)))
        return least

    def _across(self, widths: Iterable[int]) -> int:
        """Columns of this width beside each other."""
        return sum(width + _GAP for width in widths) - _GAP

    def _ruled(self, room: int) -> "RichTable":
        """All columns beside each other; what is left of the width goes to the texts that are broken into lines."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        widths, least = self._widths(), self._least()
        wanted = max(sum(widths) - sum(least), 1)
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for place, (name, whole, some) in enumerate(zip(self.header, widths, least, strict=True)):
            width = some + (whole - some) * min(room, wanted) // wanted
            justify: Literal["left", "right"] = "right" if place in self.numeric else "left"
            table.add_column(Text(name), justify=justify, width=width)
        for row in self.rows:
            table.add_row(*(Text(cell, style=self.styles.get(cell, "")) for cell in row))
        return table

    def _stacked(self, width: int) -> "Iterator[RenderableType]":
        """Where there is little room: longest texts first, what does not fit in its column stands below its row."""
        from rich.padding import Padding
        from rich.text import Text

        widths = self._widths()
        kept = list(range(len(widths)))
        for place in sorted(filter(self._wraps, kept), key=widths.__getitem__, reverse=True):
            if self._across(widths[p] for p in kept) > width:
                kept.remove(place)
        if self._across(widths[p] for p in kept) > width:
            kept = [0]
        below = [place for place in range(len(widths)) if place not in kept]

        def line(cells: Sequence[str], style: str = "") -> Text:
            texts = [Text(cells[place], style=self.styles.get(cells[place], style)) for place in kept]
            for text, place in zip(texts, kept, strict=True):
                text.align("right" if place in self.numeric else "left", max(widths[place], text.cell_len))
            whole = Text(" " * _GAP).join(texts)
            whole.rstrip()
            return whole

        yield line(self.header, "table.header")
        yield Text("─" * min(self._across(widths[p] for p in kept), width))
        for row in self.rows:
            yield line(row)
            told = [row[p] if len(below) == 1 else f"{self.header[p]}: {row[p]}" for p in below if row[p]]
            if told:
                yield Padding(Text("; ".join(told)), (0, 0, 0, 2), expand=False)

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
        """As an HTML table, whose page has the style."""
        return self._html("")

    def _repr_html_(self) -> str:
        """As a table of a notebook, which turns all that has no style of its own to the right, sentences too."""
        return self._html(' style="text-align: left"')

    def _html(self, left: str) -> str:
        """The table; `left` are attributes of what is no number."""

        def line(cells: Sequence[str], tag: str) -> str:
            kinds = [' class="number"' if place in self.numeric else left for place in range(len(cells))]
            scope = ' scope="col"' if tag == "th" else ""
            pairs = zip(cells, kinds, strict=True)
            return "".join(f"<{tag}{scope}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in pairs)

        caption = f"<caption{left}>{html.escape(self.title)}</caption>" if self.title else ""
        body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in self.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        head = f"<thead><tr>{line(self.header, 'th')}</tr></thead>"
        return f"<table>{caption}{head}\n<tbody>\n{body}\n</tbody></table>\n{notes}"
