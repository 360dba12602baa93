"""Sphinx: the pages of this folder as a site, with the reference from docstrings. `make docs` builds it."""

import importlib.metadata
import itertools
import re

project = "ritz"
author = "The ritz developers"
version = release = importlib.metadata.version("ritz")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"ritz {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"  # by docutils, in the page: the site fetches nothing
smartquotes_action = "D"  # dashes only: "eval" is code as often as not

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links to headings, as on the pages themselves

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are described once
python_maximum_signature_line_length = 100

TABLE_LINK = re.compile(r"^\| \[([^\]]+)\]\(([\w/-]+)\.md\)", re.MULTILINE)  # in a first column
SPAN = re.compile(r"(?<![\w`\\])`([^`\n]+)`(?!`)")
SECTION = re.compile(r"^(Args|Attributes|Example|Raises|Returns|Yields|Note|Warns):$")


def toctrees(index: str) -> str:
    """The navigation: for each heading of the index page, the pages that its table lists.

    The tables are what a reader of the file sees; nothing has to be said twice.
    """
    trees = []
    for part in re.split(r"^#+ ", index, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        pages = [f"{name} <{page}>" for name, page in TABLE_LINK.findall(text)]
        if pages:
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```"]))
    return "\n\n".join(trees)


def add_toctrees(app, docname, source):
    """Put the navigation behind an index page."""
    if docname.rpartition("/")[2] == "index":
        source[0] += "\n" + toctrees(source[0])


def as_restructured(lines: list[str]) -> list[str]:
    """A docstring of this house, which is plain text with code in single backticks, as reStructuredText.

    Code gets double backticks, what would be markup elsewhere (stars, bars, final underscores) is escaped, and a
    paragraph that is indented for itself is shown as it stands. Examples are left alone.
    """
    out: list[str] = []
    base = 0  # where the text of a section begins
    for filled, group in itertools.groupby(lines, key=lambda line: bool(line.strip())):
        paragraph = list(group)
        if SECTION.match(paragraph[0]):
            out.append(paragraph.pop(0))
            base = 4
        elif filled and not paragraph[0].startswith(" "):
            base = 0
        text = paragraph[0].lstrip() if paragraph else ""
        if text.startswith(">>>"):
            out += paragraph
        elif text and not text.startswith("- ") and len(paragraph[0]) - len(text) > base:
            out += [" " * base + "::", "", *paragraph]
        else:
            out += [_escaped(line) for line in paragraph]
    return out


def _escaped(text: str) -> str:
    """A line of prose with its code marked, and nothing else in it that is markup."""
    parts = SPAN.split(text)  # prose, code, prose, ...
    for place, part in enumerate(parts):
        if place % 2:
            glue = "\\ " if re.match(r"\w", parts[place + 1]) else ""  # what follows code directly: `Table`s
            parts[place] = f"``{part}``{glue}"
        else:
            parts[place] = re.sub(r"([\\*|`]|_(?!\w))", r"\\\1", part)
    return "".join(parts)


def mend_docstring(app, what, name, obj, options, lines):
    """Before napoleon reads the sections."""
    lines[:] = as_restructured(lines)


def formula(block: bool):
    """How a formula is written into a page."""

    def visit(self, node):
        from docutils.nodes import SkipNode
        from docutils.utils.math.latex2mathml import tex2mathml

        self.body.append(tex2mathml(node.astext(), as_block=block))
        raise SkipNode

    return visit, None


def setup(app):
    """Connect them."""
    app.add_html_math_renderer("mathml", formula(block=False), formula(block=True))
    app.connect("source-read", add_toctrees)
    app.connect("autodoc-process-docstring", mend_docstring, priority=100)
    return {"parallel_read_safe": True}
