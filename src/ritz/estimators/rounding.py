"""How far round-off may move what is said of a matrix.

Where products are off by more than intervals leave out (`precision`), a run saw H + E in the place of H, with ||E||_F
bounded: every number is bracketed by how far E may move it.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..intervals import Number, Pair
from ..results import Estimate
from .precision import Precision

if TYPE_CHECKING:
    from .quantities import Spectrum


@dataclass(frozen=True)
class Rounding:
    """How far E may move what is said of H, where a run saw H + E in the place of H; all 0 where products are right.

    Attributes:
        error: What ||E||_F is at most, and so the way that an eigenvalue moves.
        trace: What |Tr E| is at most, of the whole or of one parameter.
        norm: ||H||, the largest eigenvalue in size, as the run has it.
        frobenius: ||H||_F.
        nuclear: ||H||_*, the sum of the sizes of the eigenvalues.

    Example:
        >>> moved = Rounding(error=0.1, trace=0.2, norm=1.0, frobenius=2.0, nuclear=4.0)
        >>> round(moved.power(2), 6), round(moved.nuclear_error, 6), Rounding().power(2)  # 2 (2 + 0.1) 0.1
        (0.42, 0.2, 0.0)
    """

    error: float = 0.0
    trace: float = 0.0
    norm: float = 0.0
    frobenius: float = 0.0
    nuclear: float = 0.0

    def power(self, k: int) -> float:
        """|Tr (H + E)^k - Tr H^k| <= k (||H|| + ||E||)^(k-2) (||H||_F + ||E||_F) ||E||_F, for k at least 2."""
        norm: float = (self.norm + self.error) ** (k - 2)
        return k * norm * (self.frobenius + self.error) * self.error

    @property
    def nuclear_error(self) -> float:
        """||E||_*, by which a sum over eigenvalues of a function of slope 1 may move.

        Two probes do not see how many eigenvalues E has: they are taken to be spread as those of H are, by ||H||_* over
        ||H||_F. They may be wider spread; against that `error` is several times the norm that is expected.
        """
        return self.error * self.nuclear / (self.frobenius or 1.0)


def around(value: Number, moved: float) -> Pair | None:
    """The bracket of a number that is known but for what it may have been moved by; None where that is nothing.

    Example:
        >>> around(3.0, 1.0), around(3.0, 0.0)
        ((2.0, 4.0), None)
    """
    return (value - moved, value + moved) if moved else None


def widened(found: "Spectrum", seen: Precision) -> "Spectrum":
    """A spectrum with intervals as wide as the products are wrong, and a note of it in its convention."""
    rounding, trace_rounding = seen.errors(float(found.spectral_norm.value))
    convention = f"{found.convention}, {seen.note}"
    return replace(found, rounding=rounding, trace_rounding=trace_rounding, convention=convention)


def widened_estimate(found: Estimate, seen: Precision, norm: float) -> Estimate:
    """A trace, a norm or a diagonal with brackets as wide as the products are wrong, and so its parts.

    Args:
        found: What the products with H + E gave.
        seen: What they are off by.
        norm: ||H||_F, or what else is no less than the largest eigenvalue in size.

    Example:
        >>> found = Estimate(name="trace", value=3.0, exact=True)
        >>> low, high = widened_estimate(found, Precision(distance=0.01, norm=0.02, trace=0.05), 1.0).interval()
        >>> round(low, 3), round(high, 3)
        (2.862, 3.138)
    """
    error, trace_error = seen.errors(norm)
    # ||E||_F bounds what a norm moves by, of all rows or of some, and each entry of the diagonal
    moved = trace_error if found.name == "trace" else error
    of_parts = error if found.power != 1 else trace_error
    parts = {name: _bracketed(part, of_parts, seen.note) for name, part in found.parts.items()}
    return replace(_bracketed(found, moved, seen.note), parts=parts)


def _bracketed(estimate: Estimate, moved: float, note: str) -> Estimate:
    bracket = around(estimate.value, moved)
    if bracket is not None and estimate.power != 1:
        bracket = max(float(bracket[0]), 0.0), bracket[1]  # a norm
    return replace(estimate, bracket=bracket, convention=f"{estimate.convention}, {note}")
