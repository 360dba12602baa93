"""One table as text, Markdown and HTML."""

import subprocess
import sys

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


def test_markdown_escapes_what_would_be_a_column():
    assert TABLE.markdown().splitlines()[3] == "| a\\|b | 3 | <b> is text & so is [bold] |"


def test_html_escapes_what_would_be_a_tag():
    page = TABLE.to_html()
    assert "&lt;b&gt; is text &amp; so is" in page
    assert '<td class="number">3</td>' in page
    assert page == TABLE._repr_html_()


def test_a_table_leaves_the_generator_of_python_alone_also_the_first_time():
    code = (
        "import random; from ritz.tables import Table; before = random.getstate(); "
        "str(Table(('a',), [('1',)])); assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
