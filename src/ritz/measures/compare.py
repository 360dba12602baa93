"""`ritz.compare`: which of several solutions a measure calls better, and whether it can tell.

Solutions of one problem are measured with common probes and on common test items, so the difference of two of them is
taken probe by probe or item by item, and is known better than either value.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..intervals import StudentT
from ..results import Estimate, derived
from ..risk import Risk
from ..storage import equal, save
from ..tables import Table
from .measure import Measurement, Progress, measure
from .registry import resolve
from .row import Measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL = 0.95  # from which an order is called real


def difference(a: Estimate, b: Estimate) -> Estimate:
    """b - a: probe by probe where they share probes, else from both errors or both intervals.

    Example:
        >>> from ritz.results import from_samples
        >>> a, b = (from_samples("trace", torch.tensor(x)) for x in ([1.0, 5.0, 9.0], [2.0, 6.0, 10.1]))
        >>> print(difference(a, b))
        change of trace 1.033 +- 0.033
    """
    name = f"change of {a.name}"
    fields = {"convention": a.convention}
    if (a.exact and b.exact) or _paired(a, b):
        return derived(name, lambda x, y: y - x, a, b, **fields)
    value = float(b.value) - float(a.value)
    if a.bracket is None and b.bracket is None:
        stderr = math.hypot(float(a.stderr), float(b.stderr))
        return Estimate(name=name, value=value, stderr=stderr, rule=StudentT(_dof(a, b)), **fields)  # type: ignore[arg-type]
    (low_a, high_a), (low_b, high_b) = (map(float, e.interval((1 + LEVEL) / 2)) for e in (a, b))
    return Estimate(name=name, value=value, bracket=(low_b - high_a, high_b - low_a), **fields)  # type: ignore[arg-type]


def _paired(a: Estimate, b: Estimate) -> bool:
    """Whether sample k of both came from the same probe or item."""
    if a.exact or b.exact:
        return (a.samples if b.exact else b.samples) is not None
    return a.samples is not None and b.samples is not None and len(a.samples) == len(b.samples) and a.seed == b.seed


def _dof(a: Estimate, b: Estimate) -> float:
    """Degrees of freedom of the worse known of the two; of many items, where no rule says."""
    dofs = [e.rule.dof for e in (a, b) if not e.exact and isinstance(e.rule, StudentT)]
    return min(dofs, default=100.0)


def probability(a: Estimate, b: Estimate) -> float:
    """How sure it is that the true values are in the order of the estimates, between 0.5 and 1.

    Student t on the paired difference; where there are only intervals, what is left of the highest level at which they
    do not overlap. Equal exact values give 0.5.

    Example:
        >>> a, b = (Estimate(name="x", value=value, exact=True) for value in (1.0, 2.0))
        >>> probability(a, b), probability(a, a)
        (1.0, 0.5)
    """
    from scipy.stats import t

    change = difference(a, b)
    if change.exact or (change.value == 0 and not change.bracket):
        return 1.0 if change.value else 0.5
    if isinstance(change.rule, StudentT):
        stderr, dof = float(change.stderr), change.rule.dof
        if not dof > 0 or math.isnan(stderr):
            return 0.5
        return float(t.cdf(abs(float(change.value)) / stderr, dof)) if stderr else 1.0
    below, above = (a, b) if float(a.value) <= float(b.value) else (b, a)
    found = 0.5
    for miss in (0.2, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001):  # of each interval: together at most twice that
        if float(below.interval(1 - miss)[1]) < float(above.interval(1 - miss)[0]):
            found = 1 - 2 * miss
    return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranking:
    """The order of the solutions by one measure.

    Attributes:
        key: The measure.
        order: Names of solutions; the one that the measure calls best first, or the smallest where it says nothing.
        better: Which end is called better.
        steps: How sure each neighbour's place is, one less than solutions.

    Example:
        >>> ranking = Ranking(key="trace", order=("a", "b", "c"), better="lower", steps=(0.999, 0.6))
        >>> ranking.verdict, str(ranking), round(ranking.probability, 3)
        ('cannot tell b from c', 'a < b ~ c', 0.599)
    """

    key: str
    order: tuple[str, ...]
    better: str | None
    steps: tuple[float, ...]

    @property
    def probability(self) -> float:
        """That the whole order is real, at least: one less what each step may be wrong by."""
        return max(1 - sum(1 - step for step in self.steps), 0.0)

    @property
    def verdict(self) -> str:
        """The order, or which of the neighbours cannot be told apart."""
        if self.probability >= LEVEL:
            return f"{self.order[0]} is best" if self.better else "the order is real"
        unsure = [pair for pair, step in zip(pairwise(self.order), self.steps, strict=True) if step < LEVEL]
        if len(unsure) == len(self.steps):
            return "cannot tell"
        pairs = unsure or [min(zip(self.steps, pairwise(self.order), strict=True))[1]]
        return "cannot tell " + ", ".join(f"{a} from {b}" for a, b in pairs)

    def __str__(self) -> str:
        sign = ">" if self.better == "higher" else "<"
        signs = [f" {sign} " if step >= LEVEL else " ~ " for step in self.steps]
        return "".join(name + after for name, after in zip(self.order, [*signs, ""], strict=True))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and equal(self, other)


@dataclass(frozen=True)
class Agreement:
    """How the order of solutions by a measure compares with their order by the outcome.

    Example:
        >>> Agreement(same=0, opposite=6, pairs=6).verdict, Agreement(same=5, opposite=0, pairs=6).verdict
        ('opposite', 'mixed')
    """

    same: int
    opposite: int
    pairs: int  # of solutions whose outcomes differ by more than their noise

    @property
    def verdict(self) -> str:
        """same, opposite or mixed; undecided where no two outcomes can be told apart."""
        if not self.pairs:
            return "undecided"
        return "same" if self.same == self.pairs else "opposite" if self.opposite == self.pairs else "mixed"


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """Solutions side by side: `c["trace"]` is their order by the trace.

    Attributes:
        measurements: What was measured on each solution, by its name.
        rankings: The order by each measure that all of them have.
        notes: What should be known when reading it.
    """

    measurements: Mapping[str, Measurement]
    rankings: Mapping[str, Ranking]
    notes: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Ranking:
        if key not in self.rankings:
            raise KeyError(f"{key} was not measured on every solution; there are: {', '.join(self.rankings)}")
        return self.rankings[key]

    def change(self, key: str, first: str, second: str) -> Estimate:
        """What `second` has more of than `first`, paired."""
        return difference(self.measurements[first][key], self.measurements[second][key])

    def agreement(self, key: str, outcome: str = "gap_loss") -> Agreement:
        """In how many pairs that differ in outcome the measure goes the same or the other way, both beyond noise.

        A measure of which a high value is called good counts as its negative.
        """
        sign = -1 if self[key].better == "higher" else 1
        products = [
            sign * direction(self.change(key, a, b)) * outcomes
            for a, b in combinations(self.measurements, 2)
            if (outcomes := direction(self.change(outcome, a, b)))
        ]
        return Agreement(products.count(1), products.count(-1), len(products))

    def table(self, outcome: str = "gap_loss") -> Table:
        """Each measure's order, how sure it is, its verdict, and how it goes with the outcome where that is known."""
        known = outcome in self.rankings
        header = ("measure", *self.measurements, "order", "sure", "verdict", *(["with the gap"] if known else []))
        rows = []
        for key, ranking in self.rankings.items():
            values = [m[key].shown() for m in self.measurements.values()]
            row = [key, *values, str(ranking), f"{ranking.probability:.1%}", ranking.verdict]
            rows.append([*row, self.agreement(key, outcome).verdict] if known else row)
        return Table(header, rows, notes=self.notes, numeric=range(1, len(self.measurements) + 1))

    def plot(self, keys: Sequence[str] | None = None) -> "Figure":
        """The values of each solution with their 95 % intervals, a panel for each measure."""
        from ..report.figures import row_of_axes

        keys = list(keys or [key for key in ("gap_loss", "trace", "spectral_norm", "metric_a") if key in self.rankings])
        figure, axes = row_of_axes(len(keys), width=3.2)
        for key, ax in zip(keys, axes, strict=True):
            for name, found in self.measurements.items():
                replace(found[key], name=name).plot(ax)
            ax.set(title=key, ylabel="")
        return figure

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and equal(self, other)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `path`.json and `path`.safetensors; `ritz.load` reads them back equal."""
        return save(self, path)


def direction(change: Estimate) -> int:
    """1 for up, -1 for down, 0 where the 95 % interval of the change holds 0.

    Example:
        >>> [direction(Estimate(name="change", value=x, stderr=1.0, rule=StudentT(100))) for x in (-3.0, 1.0, 3.0)]
        [-1, 0, 1]
    """
    low, high = (float(end) for end in change.interval())
    return (low > 0) - (high < 0)


def compare(
    risks: Mapping[str, Risk],
    test: Any = None,
    init: Mapping[str, Tensor] | Tensor | None = None,
    *,
    measures: str | Sequence[str | Measure] = "standard",
    num_steps: int = 100,
    num_probes: int = 8,
    seed: int = 0,
    sigma: float = 1.0,
    progress: Progress | None = None,
) -> Comparison:
    """Ranks solutions of one problem by each measure, and says when it cannot tell.

    Args:
        risks: The solutions by name, on the same training data.
        test: Test data for all of them, or a risk on it for each, by name.
        init: Where all of them started, if from one place.
        measures, num_steps, num_probes, seed, sigma, progress: See `ritz.measure`.

    Raises:
        ValueError: If there are fewer than two, or they do not have the same number of samples.

    Example:
        >>> X, y = torch.eye(2), torch.tensor([0, 1])
        >>> models = {name: torch.nn.Linear(2, 2, bias=False) for name in ("small", "large")}
        >>> for name, size in (("small", 1.0), ("large", 5.0)):
        ...     models[name].weight.data = size * torch.eye(2)
        >>> risks = {name: ritz.Risk(model, torch.nn.CrossEntropyLoss(), (X, y)) for name, model in models.items()}
        >>> found = ritz.compare(risks, measures=["trace", "weight_norm"])
        >>> str(found["trace"]), str(found["weight_norm"])
        ('large < small', 'small < large')
    """
    rows = resolve(measures)
    notes = _check(risks)
    tests = test if isinstance(test, Mapping) else dict.fromkeys(risks, test)
    if missing := [name for name in risks if name not in tests]:
        raise ValueError(f"test= has nothing for {', '.join(missing)}; give test data for all, or a risk for each name")
    found: dict[str, Measurement] = {}
    for name, risk in risks.items():

        def report(text: str, part: float, name: str = name) -> None:
            if progress is not None:
                progress(f"{name}: {text}", (len(found) + part) / len(risks))

        found[name] = measure(
            risk, tests[name], init, measures=rows, num_steps=num_steps, num_probes=num_probes, seed=seed, sigma=sigma,
            progress=report if progress is not None else None,
        )  # fmt: skip
    common = [row for row in rows if all(row.key in m for m in found.values())]
    return Comparison(measurements=found, rankings={row.key: _rank(row, found) for row in common}, notes=notes)


def _check(risks: Mapping[str, Risk]) -> tuple[str, ...]:
    """What the reader should know; refused where it is not one problem."""
    if not isinstance(risks, Mapping) or len(risks) < 2:
        raise ValueError("give two or more solutions by name: ritz.compare({'a': risk_a, 'b': risk_b})")
    for name, risk in risks.items():
        if not isinstance(risk, Risk):
            raise TypeError(f"{name} must be a ritz.Risk, got {type(risk).__name__}")
    sizes = {name: risk.num_samples for name, risk in risks.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the solutions are on different data, {sizes} samples; measure each with ritz.measure")
    if len({risk.space for risk in risks.values()}) > 1:
        return ("the networks differ, so their probes are not common: differences are as uncertain as both values",)
    return ()


def _rank(row: Measure, found: Mapping[str, Measurement]) -> Ranking:
    values = {name: m[row.key] for name, m in found.items()}
    order = sorted(values, key=lambda name: float(values[name].value), reverse=row.better == "higher")
    steps = tuple(probability(values[a], values[b]) for a, b in pairwise(order))
    return Ranking(key=row.key, order=tuple(order), better=row.better, steps=steps)
