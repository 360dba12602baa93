"""A page stands by itself."""

import base64
import hashlib
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ritz.report.charts import curve, thinned
from ritz.report.figures import row_of_axes
from ritz.report.markup import Markup, element
from ritz.report.page import Page
from ritz.tables import Table


def page() -> Page:
    made = Page("A <title>", "of this & that")
    made.add(Table(("measure", "value"), [("trace", "3")]), "Numbers")
    return made


def test_a_page_has_its_title_tables_and_headings_in_order():
    text = page().to_html()
    assert "<title>A &lt;title&gt;</title>" in text
    places = [
        text.index(part)
        for part in ("<h1>", "of this &amp; that", "<h2>Numbers</h2>", "<td>trace</td>", "Made by ritz")
    ]
    assert places == sorted(places)


def test_a_page_fetches_nothing():
    made = page()
    made.draw(lambda: row_of_axes(2)[0])
    text = made.to_html()
    assert text.count('<img alt="A &lt;title&gt;" src="data:image/svg+xml;base64,') == 1
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


def test_a_page_is_not_written_over_something_else(tmp_path):
    path = tmp_path / "page.html"
    page().write(path)
    page().write(path)  # over a page it is
    path.write_text("notes")
    with pytest.raises(FileExistsError, match="is not a page of ritz"):
        page().write(path)
    assert path.read_text() == "notes"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_the_policy_allows_the_pages_own_script_and_style_alone():
    text = page().to_html()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")
    for kind in ("script", "style"):
        inner = re.search(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)[1]
        mark = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{mark}'" in policy
    assert "style=" not in re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)


def test_sections_of_one_title_have_names_of_their_own():
    made = Page("Two")
    for _ in range(3):
        made.add(Table(("a",), [("1",)]), "Charts & tables")
    names = re.findall(r'<section id="([^"]*)"', made.to_html())
    assert len(set(names)) == 3
    assert re.findall(r'<a href="#(s-[^"]*)"', made.to_html()) == names


def test_elements_escape_text_and_attributes():
    made = element("td", "<b>", Markup("<i>x</i>"), title='"><script>', data_row=True, hidden=False)
    assert made == '<td title="&quot;&gt;&lt;script&gt;" data-row>&lt;b&gt;<i>x</i></td>'


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=400), st.integers(2, 50))
def test_a_thinned_curve_keeps_its_extremes(values, most):
    x, y = curve(range(len(values)), values, most)
    fine = [value for value in values if math.isfinite(value)]
    assert len(y) <= max(most, 2)
    assert x == sorted(x)
    if fine:
        assert {min(fine), max(fine)} <= set(y)


@given(st.integers(1, 300), st.integers(3, 60), st.integers(0, 99))
def test_thinned_points_hold_the_ends_and_are_not_too_many(count, most, seed):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    kept = thinned(count, values, most, first=values > 1)
    assert len(kept) <= max(most, 1)
    assert len(set(kept.tolist())) == len(kept)
    assert {int(values.argmin()), int(values.argmax())} <= set(kept.tolist())
