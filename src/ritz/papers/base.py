"""Claims: what a paper says, what was measured, and whether the one bears out the other.

A claim is data. An experiment returns it, a test asserts it, a page prints it; one that does not hold is kept like any
other, with its evidence. The verdict is computed and never written by hand:

    holds               every value that the measurement leaves open is one that the claim allows
    holds in direction  not so, but every one lies on the claim's side of a reference: no difference, the ratio 1
    refuted             none is allowed; where there is a reference, none lies on the claim's side of it either
    not decidable       all else: the error bar does not decide, or the measurement is short of what the claim is about
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from ..results import Estimate, show
from ..storage import Result

Relation = Literal["=", "<=", ">="]
Verdict = Literal["holds", "holds in direction", "refuted", "not decidable"]

LEVEL = 0.95  # of the interval that has to lie within, or without, what a claim allows


@dataclass(frozen=True, eq=False, kw_only=True)
class Claim(Result):
    """One statement of a paper beside one measurement.

    The claim allows the numbers x with x = `expected`, x <= `expected` or x >= `expected`, give or take `tolerance`;
    the measurement leaves open the 95 % interval of an `Estimate`, or the one number. So an equality measured with
    noise holds only where the whole interval lies within the tolerance: an interval that merely contains the expected
    value is not decidable.

    A claim of a difference (`reference` 0) or of a ratio (`reference` 1) may miss the number and have the direction:
    with a `reference`, an interval strictly on the same side of it as `expected` holds in direction, and the claim is
    refuted only where no value on that side is left open.

    Attributes:
        paper: "seed 000", ...
        where: The equation, section, table or figure.
        text: What is claimed, and which number is compared.
        expected: A number, or a bool.
        measured: A number, an `Estimate` of one number, or a bool.
        tolerance: Absolute, not negative; what counts as the same number.
        relation: "=", "<=" or ">=".
        evidence: What was done and seen; for a refuted claim what is true instead.
        reference: The number on whose one side the claim is: above it where `expected` is above. None for a claim that
            has no direction; one that is of nothing but the direction is written with `relation`.
        short_of: What the paper had and this measurement had not, as "15 of 300 epochs", where the number cannot come
            out without it: the verdict is then "not decidable", be the number met or missed, for one that is met on the
            way has not been reached. It is for what training has to reach; orders and differences are judged on what
            was run, either way.
        ours: Whether it is a question of ours about what the paper shows (a control, another reading, a bound of our
            own), and no statement that the paper makes: such claims are counted apart.

    Raises:
        TypeError: If `expected` or `measured` is not of these kinds, or one is a bool and the other is not.
        ValueError: If the relation is unknown, a tolerance negative, a number to compare with NaN, or the reference is
            no finite number, not apart from `expected`, or one that the relation allows.

    Example:
        >>> claim = Claim(paper="seed 000", where="equation 1", text="dL = d'Hd", expected=1.0, measured=0.5)
        >>> claim.verdict
        'refuted'
        >>> noisy = Estimate(name="trace", value=3.0, stderr=0.1, rule=ritz.intervals.StudentT(7))  # 2.76 to 3.24
        >>> about = {"paper": "seed 002", "where": "equation 11", "text": "E Tr H_b = Tr H", "measured": noisy}
        >>> [Claim(expected=3.1, tolerance=t, **about).verdict for t in (0.5, 0.1)]
        ['holds', 'not decidable']
        >>> Claim(expected=2.0, relation="<=", **about).verdict
        'refuted'
        >>> [Claim(expected=4.0, tolerance=0.5, reference=r, **about).verdict for r in (None, 0.0, 3.0)]
        ['refuted', 'holds in direction', 'not decidable']
        >>> Claim(expected=65.3, short_of="15 of 300 epochs", **about).verdict
        'not decidable'
    """

    paper: str
    where: str
    text: str
    expected: float | bool
    measured: float | bool | Estimate
    tolerance: float = 0.0
    relation: Relation = "="
    evidence: str = ""
    reference: float | None = None
    short_of: str = ""
    ours: bool = False

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
        if self.reference is not None:
            self._check_reference(self.reference)

    def _check_reference(self, reference: float) -> None:
        """Refuse one that gives the claim no side."""
        if isinstance(self.expected, bool) or isinstance(reference, bool):
            raise ValueError("a bool has no direction: leave the reference out")
        if not isinstance(reference, int | float) or not math.isfinite(reference):
            raise ValueError(f"reference must be a finite number, got {reference!r}")
        above = self.expected > reference
        if self.expected == reference or self.relation == ("<=" if above else ">="):
            raise ValueError(
                f"what is expected, {self.relation} {self.expected:g}, must be on one side of the reference, got "
                f"{reference:g}; a claim of nothing but the direction is a relation, '<=' or '>=', without reference"
            )

    @property
    def verdict(self) -> Verdict:
        """The interval of what was measured against what the claim allows, and against the reference."""
        return "not decidable" if self.short_of else self._judged()

    def _judged(self) -> Verdict:
        """By the numbers alone."""
        if isinstance(self.measured, bool):
            return "holds" if self.measured == self.expected else "refuted"
        low, high = self._open()
        least = -math.inf if self.relation == "<=" else self.expected - self.tolerance
        most = math.inf if self.relation == ">=" else self.expected + self.tolerance
        if least <= low and high <= most:
            return "holds"
        outside = high < least or low > most  # NaN is neither
        if self.reference is not None:
            above = self.expected > self.reference
            if low > self.reference if above else high < self.reference:
                return "holds in direction"
            outside &= high <= self.reference if above else low >= self.reference
        return "refuted" if outside else "not decidable"

    def _open(self) -> tuple[float, float]:
        """The numbers that the measurement leaves open."""
        if isinstance(self.measured, Estimate):
            low, high = self.measured.interval(LEVEL)
            return float(low), float(high)
        return self.measured, self.measured

    @property
    def source(self) -> str:
        """Where the statement is, or what a question of ours is about.

        Example:
            >>> Claim(paper="seed 004", where="figure 12", text="", expected=0, measured=0, ours=True).source
            'ours, on seed 004, figure 12'
        """
        place = f"{self.paper}, {self.where}" if self.where else self.paper
        return f"ours, on {place}" if self.ours else place


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
        verdict = claim.verdict if claim.verdict.startswith("holds") else f"**{claim.verdict}**"
        rows.append((claim.source, claim.text, allowed(claim), shown(claim.measured), verdict))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def allowed(claim: Claim) -> str:
    """What a claim allows, as text, and on which side of the reference it is.

    Example:
        >>> about = {"paper": "seed 004", "where": "table 2", "text": "gain in accuracy", "measured": 0.1}
        >>> allowed(Claim(expected=2.2, tolerance=0.5, reference=0, **about))
        '2.2 ± 0.5 (> 0)'
    """
    sign = {"=": "", "<=": "≤ ", ">=": "≥ "}[claim.relation]
    slack = f" ± {claim.tolerance:.2g}" if claim.tolerance else ""
    side = ""
    if claim.reference is not None:
        side = f" ({'>' if claim.expected > claim.reference else '<'} {claim.reference:g})"
    return sign + shown(claim.expected) + slack + side


def shown(quantity: float | bool | Estimate) -> str:
    """A bool as yes or no, a number to the digits that its error allows."""
    if isinstance(quantity, bool):
        return "yes" if quantity else "no"
    if isinstance(quantity, Estimate):
        return show(float(quantity.value), float(quantity.stderr)).replace("+-", "±")
    return show(float(quantity))


def _size(estimate: Estimate) -> int:
    return estimate.value.numel() if isinstance(estimate.value, Tensor) else 1
