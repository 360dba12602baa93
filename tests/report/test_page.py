"""A page stands by itself."""

import re

import pytest

from ritz.report.figures import row_of_axes
from ritz.report.page import Page
from ritz.tables import Table


def page() -> Page:
    made = Page("A <title>", "of this & that")
    made.add(Table(("measure", "value"), [("trace", "3")]), "Numbers")
    return made


def test_a_page_has_its_title_tables_and_headings_in_order():
    text = page().to_html()
    assert "<title>A &lt;title&gt;</title>" in text
    places = [text.index(part) for part in ("<h1>", "of this &amp; that", "<h2>Numbers</h2>", "<td>trace</td>", "ritz")]
    assert places == sorted(places)


def test_a_page_fetches_nothing():
    made = page()
    made.draw(lambda: row_of_axes(2)[0])
    text = made.to_html()
    assert text.count("<svg") == 1
    assert not re.search(r'(src|href)="http', text)


def test_without_matplotlib_a_page_says_what_is_missing():
    def no_plot():
        raise ImportError("plots need matplotlib: pip install 'ritz[plot]'")

    made = page()
    made.draw(no_plot)
    assert "plots need matplotlib" in made.to_html()


@pytest.mark.parametrize("name", ["page.html", "folder/page.html"])
def test_a_page_is_written_whole(tmp_path, name):
    path = page().write(tmp_path / name)
    assert path.read_text(encoding="utf-8") == page().to_html()
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
