"""Claims: what a paper says, what was measured, and whether the one bears out the other.

A claim is data. An experiment returns it, a test asserts it, a page prints it; one that does not hold is kept like any
other, with its evidence. The verdict is computed and never written by hand:

    holds        every value that the measurement leaves open is one that the claim allows
    refuted      none is
    cannot tell  some are and some are not: the error bar does not decide
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from ..results import Estimate, show
from ..storage import equal, save

Relation = Literal["=", "<=", ">="]
Verdict = Literal["holds", "refuted", "cannot tell"]

LEVEL = 0.95  # of the interval that has to lie within, or without, what a claim allows


@dataclass(frozen=True, eq=False, kw_only=True)
class Claim:
    """One statement of a paper beside one measurement.

    The claim allows the numbers x with x = `expected`, x <= `expected` or x >= `expected`, give or take `tolerance`;
    the measurement leaves open the 95 % interval of an `Estimate`, or the one number. So an equality measured with
    noise holds only where the whole interval lies within the tolerance: an interval that merely contains the expected
    value cannot tell.

    Attributes:
        paper: "seed 000", ...
        where: The equation, section, table or figure.
        text: What is claimed, and which number is compared.
        expected: A number, or a bool.
        measured: A number, an `Estimate` of one number, or a bool.
        tolerance: Absolute, not negative; what counts as the same number.
        relation: "=", "<=" or ">=".
        evidence: What was done and seen; for a refuted claim what is true instead.

    Raises:
        TypeError: If `expected` or `measured` is not of these kinds, or one is a bool and the other is not.
        ValueError: If the relation is unknown, a tolerance negative, or a number to compare with NaN.

    Example:
        >>> claim = Claim(paper="seed 000", where="equation 1", text="dL = d'Hd", expected=1.0, measured=0.5)
        >>> claim.verdict
        'refuted'
        >>> noisy = Estimate(name="trace", value=3.0, stderr=0.1, rule=ritz.intervals.StudentT(7))  # 2.76 to 3.24
        >>> about = {"paper": "seed 002", "where": "equation 11", "text": "E Tr H_b = Tr H", "measured": noisy}
        >>> [Claim(expected=3.1, tolerance=t, **about).verdict for t in (0.5, 0.1)]
        ['holds', 'cannot tell']
        >>> Claim(expected=2.0, relation="<=", **about).verdict
        'refuted'
    """

    paper: str
    where: str
    text: str
    expected: float | bool
    measured: float | bool | Estimate
    tolerance: float = 0.0
    relation: Relation = "="
    evidence: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.expected, bool | int | float):
            raise TypeError(f"expected must be a number or a bool, got {type(self.expected).__name__}; use float(x)")
        if not isinstance(self.measured, bool | int | float | Estimate):
            kind = type(self.measured).__name__
            raise TypeError(f"measured must be a number, an Estimate or a bool, got {kind}; use float(x) or bool(x)")
        if isinstance(self.measured, Estimate) and _size(self.measured) != 1:
            raise ValueError(f"a claim is about one number, got an estimate of {_size(self.measured)}; reduce it first")
        if isinstance(self.expected, bool) != isinstance(self.measured, bool):
            raise TypeError(f"a bool is compared with a bool, got {self.expected!r} and {shown(self.measured)}")
        if self.relation not in get_args(Relation) or (isinstance(self.expected, bool) and self.relation != "="):
            raise ValueError(f"relation must be '=', '<=' or '>=', and '=' for a bool, got {self.relation!r}")
        if math.isnan(self.expected) or not self.tolerance >= 0:
            raise ValueError(f"expected must be a number and tolerance >= 0, got {self.expected} and {self.tolerance}")

    @property
    def verdict(self) -> Verdict:
        """Holds, refuted or cannot tell: the interval of what was measured against what the claim allows."""
        if isinstance(self.measured, bool):
            return "holds" if self.measured == self.expected else "refuted"
        low, high = self._open()
        least = -math.inf if self.relation == "<=" else self.expected - self.tolerance
        most = math.inf if self.relation == ">=" else self.expected + self.tolerance
        if least <= low and high <= most:
            return "holds"
        return "refuted" if high < least or low > most else "cannot tell"  # NaN is neither

    def _open(self) -> tuple[float, float]:
        """The numbers that the measurement leaves open."""
        if isinstance(self.measured, Estimate):
            low, high = self.measured.interval(LEVEL)
            return float(low), float(high)
        return self.measured, self.measured

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and equal(self, other)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the claim for `ritz.load`; a tuple of claims goes through `ritz.storage.save`."""
        return save(self, path)


def claims_table(claims: Iterable[Claim]) -> str:
    """Claims as a Markdown table: source, claim, expected, measured, verdict.

    Example:
        >>> claim = Claim(paper="seed 000", where="eq. 1", text="|dL| = d'Hd", expected=1, measured=0.5, tolerance=0.01)
        >>> print(claims_table([claim]))
        | source | claim | expected | measured | verdict |
        | --- | --- | --- | --- | --- |
        | seed 000, eq. 1 | \\|dL\\| = d'Hd | 1 ± 0.01 | 0.5 | **refuted** |
    """
    rows = [("source", "claim", "expected", "measured", "verdict"), ("---",) * 5]
    for claim in claims:
        if not isinstance(claim, Claim):
            raise TypeError(f"expected claims, got {type(claim).__name__}")
        verdict = claim.verdict if claim.verdict == "holds" else f"**{claim.verdict}**"
        source = f"{claim.paper}, {claim.where}"
        rows.append((source, claim.text, allowed(claim), shown(claim.measured), verdict))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def allowed(claim: Claim) -> str:
    """What a claim allows, as text."""
    sign = {"=": "", "<=": "≤ ", ">=": "≥ "}[claim.relation]
    slack = f" ± {claim.tolerance:.2g}" if claim.tolerance else ""
    return sign + shown(claim.expected) + slack


def shown(quantity: float | bool | Estimate) -> str:
    """A bool as yes or no, a number to the digits that its error allows."""
    if isinstance(quantity, bool):
        return "yes" if quantity else "no"
    if isinstance(quantity, Estimate):
        return show(float(quantity.value), float(quantity.stderr)).replace("+-", "±")
    return show(float(quantity))


def _size(estimate: Estimate) -> int:
    return estimate.value.numel() if isinstance(estimate.value, Tensor) else 1
