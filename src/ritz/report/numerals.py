"""Numbers for a page: with true minus signs, and with powers of ten as superscripts."""

import math
import re

from ..results import Estimate, told_apart
from .charts import interval

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_POWER = re.compile(r"(\d(?:\.\d+)?)e([+-]\d+)")
_MINUS = re.compile(r"(?<![\w.])-(?=[\d.])")


def typeset(text: str) -> str:
    """A text whose numbers are typeset as in a book.

    Example:
        >>> typeset("-1.500e-07 ± 2.0e-09"), typeset("0.0e+00 ± 7.7e-05")
        ('−1.500·10⁻⁷ ± 2.0·10⁻⁹', '0 ± 7.7·10⁻⁵')
    """

    def power(found: re.Match[str]) -> str:
        digits, ten = found[1], int(found[2])
        return "0" if float(digits) == 0 else f"{digits}·10{str(ten).translate(_RAISED)}"

    return _MINUS.sub("−", _POWER.sub(power, text))


def short(value: float, digits: int = 4) -> str:
    """A number as text, with four digits or as many as requested.

    Example:
        >>> short(1234.5678), short(-0.00001234), short(math.inf), short(0.5), short(1234.5678, digits=6)
        ('1,235', '−1.234·10⁻⁵', '∞', '0.5', '1,234.57')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        return typeset(f"{float(mantissa):.{digits}g}e{power}")
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return typeset(f"{value:,.{max(places, 0)}f}" if abs(value) >= 1000 else f"{value:.{digits}g}")


def known(estimate: Estimate) -> str:
    """The 95 % interval of a number, with enough digits to distinguish its ends, or "exact".

    Example:
        >>> known(Estimate(name="trace", value=2.0, exact=True))
        'exact'
        >>> known(Estimate(name="trace", value=0.5, bracket=(0.499998, 0.500002)))
        '0.499998 to 0.500002'
    """
    low, high = interval(estimate)
    if math.isnan(low) or math.isnan(high):
        return "not known"
    return "exact" if low == high else f"{short(low, digits := told_apart(low, high))} to {short(high, digits)}"


def within(estimate: Estimate) -> str:
    """A number with the digits of its interval, or with four digits if a standard error is shown beside it.

    Example:
        >>> within(Estimate(name="trace", value=1251.82951, bracket=(1251.829498, 1251.829523)))
        '1,251.829510'
    """
    return short(float(estimate.value), 4 if estimate.stderr else told_apart(*interval(estimate)))


def error(estimate: Estimate) -> str:
    """The standard error of a number, "± 0.02"; empty if nothing was sampled, or the error is not known.

    Example:
        >>> error(Estimate(name="trace", value=2.0, stderr=0.0234))
        '± 0.023'
        >>> error(Estimate(name="trace", value=2.0, exact=True))
        ''
    """
    stderr = float(estimate.stderr)
    return f"± {short(stderr, digits=2)}" if math.isfinite(stderr) and stderr > 0 else ""
