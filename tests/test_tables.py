"""One table as text, Markdown and HTML."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from ritz.tables import Table

TABLE = Table(
    ("measure", "value", "reading"),
    [("trace", "12.5 ± 0.1", "small is called flat"), ("a|b", "3", "<b> is text & so is [bold]")],
    title="One network",
    notes=("a note",),
    numeric=(1,),
)


def test_text_has_a_line_for_each_row_and_numbers_to_the_right():
    lines = TABLE.text(width=80).splitlines()
    trace = next(line for line in lines if line.startswith("trace"))
    other = next(line for line in lines if line.startswith("a|b"))
    assert trace.index("0.1") + 3 == other.index("3") + 1  # the right edges meet
    assert "[bold]" in other  # text is not taken for markup
    assert lines[0] == "One network"
    assert lines[-1] == "a note"


def test_text_keeps_to_the_width():
    assert max(map(len, TABLE.text(width=44).splitlines())) <= 44


def measures():
    """A table as that of `ritz.measure`: numbers to the digits of their errors, and sentences about them."""
    rows = [
        ("moment2_per_param", "0.0095137 ± 0.0000031", "0.0095063 to 0.0095211", "what the columns 'Tr H^2' hold"),
        ("lambda_min", "-0.007454", "-0.007727 to -0.007454", "negative: a saddle, not a minimum of the training loss"),
    ]
    return Table(("measure", "value", "95 % interval", "reading"), rows, title="One network", numeric=(1, 2))


def test_where_there_is_room_each_row_is_a_line_or_three():
    assert len(measures().text(width=160).splitlines()) == 1 + 2 + 2
    assert len(measures().text(width=96).splitlines()) <= 2 + 1 + 2 * 3


def test_in_a_terminal_of_eighty_columns_a_long_text_stands_below_its_row():
    lines = measures().text(width=80).splitlines()
    assert lines[1].split() == ["measure", "value", "95", "%", "interval"]
    assert lines[3:5] == [
        "moment2_per_param   0.0095137 ± 0.0000031   0.0095063 to 0.0095211",
        "  what the columns 'Tr H^2' hold",
    ]


@pytest.mark.parametrize("width", [20, 30, 40, 52, 60, 80, 100, 140])
def test_no_number_is_cut_however_narrow_the_terminal(width):
    text = measures().text(width=width)
    for part in (*["0.0095137", "±", "0.0000031", "0.0095063", "0.0095211", "-0.007454", "-0.007727"], "lambda_min"):
        assert part in text
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_many_columns_of_numbers_stand_below_the_name_of_their_row_with_theirs():
    names = [f"seed-{number}" for number in range(40)]
    table = Table(("measure", "order", *names), [("trace", "cannot tell", *["3.25"] * 40)], numeric=range(2, 42))
    text = " ".join(table.text(width=80).split())
    assert "trace order: cannot tell; seed-0: 3.25; seed-1: 3.25;" in text
    assert text.endswith("seed-39: 3.25")


@pytest.mark.parametrize("width", [40, 120])
def test_words_have_their_colours_in_a_terminal_however_wide(width):
    rows = [("figure 2", "r between the bound and the traces, with traces estimated by probes", "refuted")]
    table = Table(("where", "claim", "verdict"), rows, styles={"refuted": "red"})
    console = Console(width=width, force_terminal=True, color_system="standard", file=io.StringIO())
    console.print(table)
    assert "\x1b[31mrefuted" in console.file.getvalue()


def test_titles_and_notes_are_not_taken_for_markup():
    table = Table(("a",), [("1",)], title="probes [seed] of [/tmp/x]", notes=("[conv1] has no rule",))
    lines = table.text(width=80).splitlines()
    assert (lines[0], lines[-1]) == ("probes [seed] of [/tmp/x]", "[conv1] has no rule")


def test_markdown_escapes_what_would_be_a_column():
    assert TABLE.markdown().splitlines()[3] == "| a\\|b | 3 | <b> is text & so is [bold] |"


def test_html_escapes_what_would_be_a_tag():
    page = TABLE.to_html()
    assert "&lt;b&gt; is text &amp; so is" in page
    assert '<td class="number">3</td>' in page
    assert '<th scope="col" class="number">value</th>' in page  # a screen reader says it before each number


def test_sentences_stand_to_the_left_in_a_notebook_and_a_page_has_no_style_in_its_tables():
    shown = TABLE._repr_html_()
    assert '<td style="text-align: left">small is called flat</td>' in shown
    assert '<td class="number">12.5 ± 0.1</td>' in shown
    assert "style" not in TABLE.to_html()


def test_a_table_leaves_the_generator_of_python_alone_also_the_first_time():
    code = (
        "import random; from ritz.tables import Table; before = random.getstate(); "
        "str(Table(('a',), [('1',)])); assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
