"""HTML with escaping: only `Markup`, which is made here, is inserted as it is; any other text is escaped."""

import html
from typing import Any


class Markup(str):
    """Text that is already HTML. `element` escapes any other text.

    Example:
        >>> element("p", "1 < 2, ", element("b", "so"))
        '<p>1 &lt; 2, <b>so</b></p>'
    """


def element(tag: str, *content: Any, **attributes: Any) -> Markup:
    """An element with its content and attributes, escaped; `class_` is class, a_b is a-b, None and False are left out.

    Example:
        >>> element("a", "x & y", href='#"', class_="link", hidden=True, title=None)
        '<a href="#&quot;" class="link" hidden>x &amp; y</a>'
    """
    named = []
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            named.append(f" {name}")
        elif value is not None and value is not False:
            named.append(f' {name}="{html.escape(str(value))}"')
    return Markup(f"<{tag}{''.join(named)}>{joined(*content)}</{tag}>")


def joined(*content: Any) -> Markup:
    """Pieces one after the other; those that are not markup are escaped.

    Example:
        >>> joined("<", Markup("<br>"), 3)
        '&lt;<br>3'
    """
    return Markup("".join(piece if isinstance(piece, Markup) else html.escape(str(piece)) for piece in content))
