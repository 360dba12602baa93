"""Numbers that JSON has none for, as words: "NaN", "Infinity" and "-Infinity", which JavaScript and Python read too."""

import math
from collections.abc import Mapping
from typing import Any

# as they are written, and as Python prints them, which older files have
WORDS = {
    "NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf,
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf,
}  # fmt: skip


def word(value: float) -> float | str:
    """A number, or the word for it where it is not finite.

    Example:
        >>> word(1.5), word(-math.inf)
        (1.5, '-Infinity')
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def in_words(tree: Any) -> Any:
    """Plain data as strict JSON takes it; `in_numbers` undoes it, but for tuples, which become lists.

    Example:
        >>> in_words({"loss": (1.0, math.inf)})
        {'loss': [1.0, 'Infinity']}
    """
    if isinstance(tree, Mapping):
        return {key: in_words(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [in_words(value) for value in tree]
    return word(tree) if isinstance(tree, float) else tree


def in_numbers(tree: Any) -> Any:
    """Data as it was before it was written, in either set of words.

    Example:
        >>> in_numbers([{"loss": [1.0, "Infinity", "-inf"], "stop": "finished"}])
        [{'loss': [1.0, inf, -inf], 'stop': 'finished'}]
    """
    if isinstance(tree, Mapping):
        return {key: in_numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [in_numbers(value) for value in tree]
    return WORDS.get(tree, tree) if isinstance(tree, str) else tree
