"""The library's words as they are typed here: `test=` is --test, and dtype=torch.float64 is --dtype float64.

Errors, notes and tables come from the library, which speaks of its own keywords. Those of ritz.Risk, such as mode= and
data=, stay as they are: the user's function has them.
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tables import Table

# what is not a matter of single words
_PHRASES = {
    "init is the same as the weights: if it is meant to be the start of training, clone it before training":
        "--init holds the very weights that are measured; give those that training began from",
    "take what `ritz.GGN` gives": "take `ritz spectrum --matrix ggn`",
    "or use ritz.Hessian": "or take `ritz spectrum --matrix hessian`",
    "set RITZ_DATA or give root=": "set RITZ_DATA or give --data",
    "measures is empty: give at least one": "--measures names none; give standard, all, or some by key",
}  # fmt: skip
_MEASURES = "ritz.measures.MEASURES lists them"
_KEYWORDS = "test|init|measures|params|products|tol|num_steps|num_probes"
_NUMBERS = "num_steps|num_probes|products|tol"
_CHECKED = "num_steps|num_probes|products|tol|seed|seeds|workers|epochs"
_RULES = (
    (re.compile(r"\bdtype=torch\.(\w+)"), r"--dtype \1"),
    (re.compile(r"\bdevice='([\w:]+)'"), r"--device \1"),
    (re.compile(rf"(?<![\w.(-])({_KEYWORDS})=(?![\w'\"(\[{{.])"), r"--\1"),
    (re.compile(rf"(?<![\w.-])({_NUMBERS})=(?=\d)"), r"--\1 "),
    (re.compile(rf"(?<![\w.-])({_CHECKED})(?= must be\b)"), r"--\1"),
    (re.compile(r"(?<![\w.-])(num_steps|num_probes)(?![\w=])"), r"--\1"),
    (re.compile(r'(?<![\w.-])(test|init) is "[^;]* there and null here'), r"--\1 was given there and not here"),
    (re.compile(r'(?<![\w.-])(test|init) is null there and "[^;]* here'), r"--\1 was given here and not there"),
    (
        re.compile(r'(?<![\w.-])solutions\.weights\.([^;]+?) is "[^;]* there and null here'),
        r"\1 is a solution there only",
    ),
    (
        re.compile(r'(?<![\w.-])solutions\.weights\.([^;]+?) is null there and "[^;]* here'),
        r"\1 is a solution here only",
    ),
    (
        re.compile(r'(?<![\w.-])solutions\.weights\.([^;]+?) is "[^;]* there and "[^;]* here'),
        r"\1 has other weights there",
    ),
    (re.compile(r"two measures have the same key: (.*)"), r"--measures has a key twice: \1; give each once"),
    (re.compile(r"--num_(steps|probes)"), r"--num-\1"),
)


def typed(text: str) -> str:
    """A sentence of the library in the words of the command.

    Example:
        >>> typed("not measured: distance: needs init="), typed("try dtype=torch.float64")
        ('not measured: distance: needs --init', 'try --dtype float64')
        >>> typed("num_probes must be at least 1, got 0"), typed("use mode='eval'")
        ('--num-probes must be at least 1, got 0', "use mode='eval'")
    """
    for phrase, ours in _PHRASES.items():
        text = text.replace(phrase, ours)
    if _MEASURES in text:
        from ..measures.registry import MEASURES

        text = text.replace(_MEASURES, f"there are: standard, all, {', '.join(MEASURES)}")
    for pattern, ours in _RULES:
        text = pattern.sub(ours, text)
    return text


def typed_notes(table: "Table") -> "Table":
    """A table with its notes in the words of the command; cells may hold names of the user's."""
    return replace(table, notes=[typed(note) for note in table.notes])
