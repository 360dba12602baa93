"""Sphinx: the pages of this folder as a site, with the reference from docstrings. `make docs` builds it."""

import importlib.metadata
import re

project = "ritz"
author = "The ritz developers"
version = release = importlib.metadata.version("ritz")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"ritz {release}"
html_copy_source = False

myst_heading_anchors = 4  # links to headings, as on the pages themselves
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are described once
python_maximum_signature_line_length = 100
nitpicky = False

TABLE_LINK = re.compile(r"^\| \[[^\]]+\]\(([\w/]+)\.md\)", re.MULTILINE)
SPAN = re.compile(r"(?<![\w`\\])`([^`\n]+)`(?!`)")
SECTION = re.compile(r"^(Args|Attributes|Example|Raises|Returns|Yields|Note|Warns):$")


def toctrees(index: str) -> str:
    """The navigation: for each heading of the index page, the pages that its table lists.

    The tables are what a reader of the file sees; nothing has to be said twice.
    """
    trees = []
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        pages = TABLE_LINK.findall(part)
        if pages:
            caption = part.partition("\n")[0]
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]))
    return "\n\n".join(trees)


def add_toctrees(app, docname, source):
    """Put the navigation behind the index page."""
    if docname == "index":
        source[0] += "\n" + toctrees(source[0])


def as_restructured(lines: list[str]) -> list[str]:
    """A docstring of this house, which is plain text with code in single backticks, as reStructuredText.

    Code gets double backticks, what would be markup elsewhere (stars, bars, final underscores) is escaped, and a
    paragraph that is indented for itself is shown as it stands. Examples are left alone.
    """
    out: list[str] = []
    base, shown = 0, False  # indent of the text of the section; within an indented paragraph
    for number, line in enumerate(lines):
        text = line.lstrip()
        indent = len(line) - len(text)
        before = lines[number - 1] if number else ""
        if indent == 0 and SECTION.match(text):
            base, shown = 4, False
            out.append(line)
            continue
        if text and indent == 0 and not before.strip():
            base = 0
        if text and not shown and not before.strip() and indent >= base + 2 and not text.startswith((">>>", "- ")):
            out += [" " * base + "::", ""]
            shown = True
        elif text and shown and indent <= base:
            shown = False
        out.append(line if shown or _is_example(lines, number) else " " * indent + _escaped(text))
    return out


def _is_example(lines: list[str], number: int) -> bool:
    """Whether a line belongs to a block that begins with a prompt."""
    while number and lines[number - 1].strip():
        number -= 1
    return lines[number].lstrip().startswith(">>>") or SECTION.match(lines[number].strip() or " ") is not None and (
        len(lines) > number + 1 and lines[number + 1].lstrip().startswith(">>>")
    )


def _escaped(text: str) -> str:
    """A line of prose with its code marked, and nothing else in it that is markup."""
    parts = SPAN.split(text)  # prose, code, prose, ...
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = f"``{part}``"
        else:
            parts[place] = re.sub(r"([\\*|`]|_(?!\w))", r"\\\1", part)
    return "".join(parts)


def mend_docstring(app, what, name, obj, options, lines):
    """Before napoleon reads the sections."""
    lines[:] = as_restructured(lines)


def setup(app):
    """Connect the two."""
    app.connect("source-read", add_toctrees)
    app.connect("autodoc-process-docstring", mend_docstring, priority=100)
    return {"parallel_read_safe": True}
