"""Numbers as a page has them: a minus that is one, powers of ten that are raised."""

import math
import re

from ..results import Estimate
from .charts import interval

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_POWER = re.compile(r"(\d(?:\.\d+)?)e([+-]\d+)")
_MINUS = re.compile(r"(?<![\w.])-(?=[\d.])")


def typeset(text: str) -> str:
    """Numbers within a text, as they are printed in a book.

    Example:
        >>> typeset("-1.500e-07 ± 2.0e-09"), typeset("0.0e+00 ± 7.7e-05")
        ('−1.500·10⁻⁷ ± 2.0·10⁻⁹', '0 ± 7.7·10⁻⁵')
    """

    def power(found: re.Match[str]) -> str:
        digits, ten = found[1], int(found[2])
        return "0" if float(digits) == 0 else f"{digits}·10{str(ten).translate(_RAISED)}"

    return _MINUS.sub("−", _POWER.sub(power, text))


def short(value: float) -> str:
    """A number as text, four digits.

    Example:
        >>> short(1234.5678), short(-0.00001234), short(math.inf), short(0.5)
        ('1,235', '−1.234·10⁻⁵', '∞', '0.5')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, power = f"{value:.3e}".split("e")
        return typeset(f"{float(digits):g}e{power}")
    return typeset(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")


def known(estimate: Estimate) -> str:
    """How well a number is known: its 95 % interval, or "exact".

    Example:
        >>> known(Estimate(name="trace", value=2.0, exact=True))
        'exact'
    """
    low, high = interval(estimate)
    return "exact" if low == high else f"{short(low)} to {short(high)}"
