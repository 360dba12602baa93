"""One row of the table of measures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..results import Estimate
from .subject import Subject

Family = Literal["gap", "norms", "sharpness", "PAC-Bayes", "margins"]
Cost = Literal["weights", "forward", "backward", "Hessian", "GGN", "search"]

# Names of ritz.transforms. Those of SAME_FUNCTION keep the function of the network, the others what it predicts.
SAME_FUNCTION = frozenset({"rescale", "batchnorm", "permute"})
EVERY = SAME_FUNCTION | {"scale_output", "scale_layers"}
ORDER = frozenset({"permute"})  # for measures of the weights that do not depend on the order of units
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Describes a measure: its formula, its cost, and which rescalings leave it unchanged.

    Attributes:
        key: The name of the measure.
        formula: The formula in the notation of the docs.
        convention: What it is divided by, whether it is squared, which matrix.
        source: The paper or other source.
        family: The kind of measure.
        cost: The run that it needs; runs are shared between measures.
        compute: The function, with a `Subject` as argument.
        reading: How to read it, in a line.
        better: The end that is said to go with a small gap; None if there is no such claim.
        unchanged: The transforms of `ritz.transforms` that leave it unchanged.
        needs: What is required in addition to the risk: "test", "init".
        standard: Whether it belongs to the standard set.
        gradients: For "backward" and "search", about how many gradients over the data it takes.

    Example:
        >>> print(ritz.measures.MEASURES["trace"].formula)
        Tr H
    """

    key: str
    formula: str
    convention: str
    source: str
    family: Family
    cost: Cost
    compute: Callable[[Subject], Estimate]
    reading: str
    better: Literal["lower", "higher"] | None = "lower"
    unchanged: frozenset[str] = ORDER
    needs: frozenset[str] = NONE
    standard: bool = False
    gradients: float = 0.0
