"""The one table of measures. `ritz.measure`, the audit, comparisons, the docs page and the tests are made from it.

In it H is the Hessian of the mean training loss without a penalty, G the Gauss-Newton matrix, P the number of
parameters, N the number of samples, w the weights, S the softmax of the outputs f. To add your own measure, define a
`Measure` like these, and put it into the list that you give to `ritz.measure`.
"""

import difflib
from collections.abc import Iterable, Sequence

from ..tables import Table
from .row import EVERY, NONE, ORDER, SAME_FUNCTION, Measure
from .rows import gap, margins, norms, pacbayes, sharpness


def resolve(measures: str | Measure | Sequence[str | Measure]) -> list[Measure]:
    """The rows for "standard", "all", or a list of keys, measures and these two words.

    Example:
        >>> [measure.key for measure in resolve(["trace"])], len(resolve("standard"))
        (['trace'], 24)
        >>> len(resolve(["standard", "trace", "ggn_trace"]))  # the trace is standard already
        25
    """
    if not isinstance(measures, str | Measure | Iterable):
        wanted = "measures must be 'standard', 'all', or a list of keys and of Measures"
        raise TypeError(f"{wanted}, got {type(measures).__name__}")
    asked = [measures] if isinstance(measures, str | Measure) else list(measures)
    if not asked:
        raise ValueError("measures is empty: give at least one")
    sets = [row for row in MEASURES.values() if "all" in asked or ("standard" in asked and row.standard)]
    single = [one if isinstance(one, Measure) else _known(one) for one in asked if one not in ("standard", "all")]
    rows = [*sets, *(row for row in single if row not in sets)]
    if len({row.key for row in rows}) < len(rows):
        raise ValueError(f"two measures have the same key: {', '.join(row.key for row in rows)}")
    return rows


def _known(key: str) -> Measure:
    if key in MEASURES:
        return MEASURES[key]
    near = difflib.get_close_matches(str(key), [*MEASURES, "standard", "all"], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "ritz.measures.MEASURES lists them"
    raise ValueError(f"no measure is named {key!r}; {hint}")


def catalogue(family: str | None = None) -> Table:
    """The table of measures as text, for one family or for all.

    Example:
        >>> catalogue("norms").rows[0][:2]
        ('weight_norm *', '||w||')
    """
    header = ("measure", "formula", "convention", "source", "run", "unchanged by")
    rows = []
    for row in MEASURES.values():
        if family in (None, row.family):
            run = f"{row.cost}, needs {' and '.join(sorted(row.needs))}" if row.needs else row.cost
            key = f"{row.key} *" if row.standard else row.key
            kept = _INVARIANCE.get(row.unchanged) or ", ".join(sorted(row.unchanged))
            rows.append((key, row.formula, row.convention, row.source, run, kept))
    return Table(header, rows, notes=("* in the standard set",))


_INVARIANCE = {EVERY: "all", SAME_FUNCTION: "all that keep the function", ORDER: "permute", NONE: "none"}


def _table(*rows: Measure) -> dict[str, Measure]:
    found = {row.key: row for row in rows}
    assert len(found) == len(rows), "two measures have one name"
    return found


MEASURES = _table(*gap.ROWS, *norms.ROWS, *sharpness.ROWS, *pacbayes.ROWS, *margins.ROWS)
