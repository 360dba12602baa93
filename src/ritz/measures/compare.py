"""`ritz.compare`: which of several solutions a measure calls better, and whether the difference is significant.

Solutions of one problem are measured with common probes and on common test items, so the difference of two solutions is
taken probe by probe or item by item, and is known more accurately than either value.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..batches import checksums, tensors_of
from ..checkpoint import Checkpoint, as_checkpoint
from ..fingerprints import of_loss
from ..results import Estimate, reach
from ..risk import Risk
from ..storage import Result
from ..tables import Table
from .differences import MISS, as_found, difference, direction, probability, same
from .measure import Measurement, Progress, measure, on_test
from .registry import MEASURES, resolve
from .row import Measure
from .subject import as_vector

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_NAMED = 4  # pairs of solutions named in a sentence; the order shows all
_DRAWN = ("gap_loss", "trace", "spectral_norm", "metric_a")  # drawn by default if there are many measures


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranking(Result):
    """The order of the solutions by one measure.

    Attributes:
        key: The measure.
        order: Names of the solutions, the preferred one first, or the smallest first if the measure has no preference.
        better: Which values are said to go with a small gap.
        steps: The probability of the order of each pair of neighbours; one fewer than solutions.
        equal: Whether all values are equal.

    Example:
        >>> ranking = Ranking(key="trace", order=("a", "b", "c"), better="lower", steps=(0.999, 0.6))
        >>> ranking.verdict, str(ranking), round(ranking.probability, 3)
        ('prefers a; cannot tell b from c', 'a < b ~ c', 0.599)
    """

    key: str
    order: tuple[str, ...]
    better: str | None
    steps: tuple[float, ...]
    equal: bool = False

    @property
    def probability(self) -> float:
        """Lower bound on the probability that the whole order is right: 1 minus the sum of the steps' errors."""
        return max(1 - sum(1 - step for step in self.steps), 0.0)

    @property
    def sure(self) -> tuple[bool, ...]:
        """Which steps count as real: if all solutions are alike, some step is wrongly so in at most 5 % of cases."""
        return tuple(step >= 1 - MISS / 2 / len(self.steps) for step in self.steps)

    @property
    def verdict(self) -> str:
        """What the measure prefers, and which neighbours cannot be told apart."""
        if self.equal:
            return "all equal"
        if not any(self.sure):
            return "cannot tell"
        prefers = f"prefers {self.order[0]}" if self.better else f"{self.order[0]} is lowest"
        pairs = zip(pairwise(self.order), self.sure, strict=True)
        near = [f"{a} from {b}" for (a, b), sure in pairs if not sure]
        many = f"{len(near)} of {len(self.sure)} neighbours in the order apart"
        unsure = f"cannot tell {', '.join(near) if len(near) <= _NAMED else many}"
        if all(self.sure):
            return prefers
        return f"{prefers}; {unsure}" if self.sure[0] else unsure

    def __str__(self) -> str:
        sign = ">" if self.better == "higher" else "<"
        signs = [f" {sign} " if sure else " ~ " for sure in self.sure]
        return "".join(name + after for name, after in zip(self.order, [*signs, ""], strict=True))


@dataclass(frozen=True)
class Agreement:
    """How the order of solutions by a measure compares with their order by the outcome.

    Example:
        >>> Agreement(same=0, opposite=6, pairs=6).verdict, Agreement(same=5, opposite=0, pairs=6).verdict
        ('opposite', 'mixed')
    """

    same: int
    opposite: int
    pairs: int  # pairs of solutions whose outcomes differ by more than their noise

    @property
    def verdict(self) -> str:
        """same, opposite or mixed; undecided if no pair differs significantly in both the outcome and the measure."""
        if not self.same + self.opposite:
            return "undecided"
        return "same" if self.same == self.pairs else "opposite" if self.opposite == self.pairs else "mixed"


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison(Result, Mapping[str, Ranking]):
    """Solutions side by side: `c["trace"]` is their order by the trace.

    Attributes:
        measurements: The measurement of each solution, by its name.
        rankings: The order by each measure that all of them have.
        notes: Remarks needed to interpret it.
    """

    measurements: Mapping[str, Measurement]
    rankings: Mapping[str, Ranking]
    notes: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Ranking:
        if key not in self.rankings:
            raise KeyError(f"{key} was not measured on every solution; these were: {', '.join(self.rankings)}")
        return self.rankings[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rankings)

    def __len__(self) -> int:
        return len(self.rankings)

    def change(self, key: str, first: str, second: str) -> Estimate:
        """The value of `second` minus that of `first`, as a paired difference."""
        for name in (first, second):
            if name not in self.measurements:
                raise ValueError(f"no solution is named {name!r}; there are: {', '.join(self.measurements)}")
        if (key, first, second) not in self._changes:
            ends = (as_found(self.measurements[name][key]) for name in (first, second))
            self._changes[key, first, second] = difference(*ends)
        return self._changes[key, first, second]

    @cached_property
    def _changes(self) -> dict[tuple[str, str, str], Estimate]:
        """Changes computed so far: every measure is compared with the same changes of the outcome."""
        return {}

    def agreement(self, key: str, outcome: str = "gap_loss") -> Agreement:
        """In how many pairs of solutions measure and outcome change in the same or opposite directions, beyond noise.

        A measure for which a high value is called good counts with its sign flipped.
        """
        sign = -1 if self[key].better == "higher" else 1
        products = [
            sign * direction(self.change(key, a, b)) * outcomes
            for a, b in combinations(self.measurements, 2)
            if (outcomes := direction(self.change(outcome, a, b)))
        ]
        return Agreement(products.count(1), products.count(-1), len(products))

    def table(self, outcome: str | None = None) -> Table:
        """Each measure's verdict, order and values, and its agreement with the outcome if that is known.

        `outcome` is the key of a measure that was taken; by default the gap in loss.
        """
        if outcome is not None:
            self[outcome]  # raises an error with the keys there are
        known = outcome or ("gap_loss" if "gap_loss" in self.rankings else None)
        header = ["measure", "verdict", "order", *self.measurements, *([f"with {known}"] if known else [])]
        rows = []
        for key, ranking in self.rankings.items():
            values = [f"{float(m[key].value):.4g}" for m in self.measurements.values()]
            row = [key, ranking.verdict, str(ranking), *values]
            is_outcome = key in MEASURES and MEASURES[key].family == "gap"
            rows.append([*row, "" if is_outcome else self.agreement(key, known).verdict] if known else row)
        return Table(header, rows, notes=self.notes, numeric=range(3, 3 + len(self.measurements)))

    @overload
    def plot(self, keys: Sequence[str] | None = None, *, ax: None = None) -> "Figure": ...
    @overload
    def plot(self, keys: Sequence[str] | None = None, *, ax: "Axes") -> "Axes": ...
    def plot(self, keys: Sequence[str] | None = None, *, ax: "Axes | None" = None) -> "Figure | Axes":
        """The values of the solutions, each with its 95 % interval; one panel for each measure in `keys`.

        Without `keys`, up to four measures are shown. A given `ax` shows one measure, the first of them.
        """
        from ..report.figures import row_of_axes

        drawn = list(keys or self._drawn())
        if not drawn:
            raise ValueError("there is nothing to draw: no measure was taken on every solution")
        if ax is not None:
            if keys and len(drawn) > 1:
                raise ValueError(f"one ax shows one measure, got {', '.join(drawn)}; give one key, or no ax")
            return self._draw(drawn[0], ax)
        names = list(self.measurements)
        longest = max(map(len, names))
        figure, axes = row_of_axes(len(drawn), width=3.0 + 0.09 * longest / len(drawn), height=1.4 + 0.22 * len(names))
        for key, panel in zip(drawn, axes, strict=True):
            self._draw(key, panel).tick_params(axis="y", labelleft=panel is axes[0])
        return figure

    def _draw(self, key: str, ax: "Axes") -> "Axes":
        """One line for each solution, the first on top: there may be many, with long names."""
        found = [m[key] for m in self.measurements.values()]
        values, places = [float(e.value) for e in found], range(len(found))
        ax.errorbar(values, places, xerr=list(zip(*map(reach, found), strict=True)), fmt="o", capsize=3)
        ax.set(title=key, ylim=(len(found) - 0.5, -0.5))
        ax.set_yticks(places, list(self.measurements))
        ax.grid(axis="y", alpha=0.3)
        return ax

    def _drawn(self) -> list[str]:
        """The measures that are drawn by default: all if there are few."""
        there = list(self.rankings)
        usual = [key for key in _DRAWN if key in there]
        return there if len(there) <= len(_DRAWN) else usual or there[: len(_DRAWN)]

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page: the ranking and the values with their intervals; see `ritz.report`."""
        from ..report import build

        return build(self).write(path)


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
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Comparison:
    """Ranks solutions of one problem by each measure, and says when the error bars do not allow a ranking.

    Args:
        risks: The solutions by name, on the same training data.
        test: Test data for all of them, or a risk on test data for each, by name.
        init: The initial weights, if all solutions share them.
        measures, num_steps, num_probes, seed, sigma, progress: See `ritz.measure`.
        checkpoint: A folder, or a `ritz.Checkpoint`, in which each measurement is saved separately; see `ritz.measure`.

    Raises:
        ValueError: If there are fewer than two solutions, or they differ in training or test data.

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
    notes = check_solutions(risks)
    given = test if isinstance(test, Mapping) else dict.fromkeys(risks, test)
    if missing := [name for name in risks if name not in given]:
        raise ValueError(
            f"test= lacks {', '.join(missing)}; give the same test data for all solutions, or a risk for each name"
        )
    tests = {name: on_test(risk, given[name]) for name, risk in risks.items()}
    _check_data({name: one for name, one in tests.items() if one is not None}, "tested on different data")
    for risk in risks.values():  # check all before measuring the first
        risk.check()
        if init is not None:
            as_vector(risk, init)
    found: dict[str, Measurement] = {}
    kept = as_checkpoint(checkpoint)
    for name, risk in risks.items():

        def report(text: str, part: float, name: str = name) -> None:
            if progress is not None:
                progress(f"{name}: {text}", (len(found) + part) / len(risks))

        found[name] = measure(
            risk, tests[name], init, measures=rows, num_steps=num_steps, num_probes=num_probes, seed=seed, sigma=sigma,
            progress=report if progress is not None else None, checkpoint=kept and kept.within(name),
        )  # fmt: skip
        if found[name].stop != "completed":
            notes = (*notes, f"{found[name].stop} before all solutions were measured")
            break
    return ranked(found, rows, notes)


def ranked(found: Mapping[str, Measurement], rows: Sequence[Measure], notes: Sequence[str] = ()) -> Comparison:
    """Measured solutions, ordered by each measure that all of them have.

    Example:
        >>> data = torch.eye(2), torch.tensor([0, 1])
        >>> risk = ritz.Risk(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), data)
        >>> rows = resolve(["weight_norm"])
        >>> places = {"one": risk, "other": risk.at(2 * risk.space.join(risk.params()))}
        >>> str(ranked({name: measure(place, measures=rows) for name, place in places.items()}, rows)["weight_norm"])
        'one < other'
    """
    # a measure with many values per solution gives no order
    common = [row for row in rows if all(row.key in m and not m[row.key].many for m in found.values())]
    rankings = {row.key: _rank(row, found) for row in common} if len(found) > 1 else {}
    return Comparison(measurements=found, rankings=rankings, notes=tuple(notes))


def check_solutions(risks: Mapping[str, Risk]) -> tuple[str, ...]:
    """Notes on how the solutions differ, after a check that they solve one problem.

    Raises:
        ValueError: If there are fewer than two solutions, or they are not on the same data.

    Example:
        >>> data = torch.eye(2), torch.tensor([0, 1])
        >>> risk = ritz.Risk(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), data)
        >>> check_solutions({"one": risk, "other": risk.to(dtype=torch.float64)})
        ('one and other differ: CrossEntropy, eval mode, float32, and CrossEntropy, eval mode, float64',)
    """
    if not isinstance(risks, Mapping) or len(risks) < 2:
        raise ValueError("give two or more solutions by name: ritz.compare({'a': risk_a, 'b': risk_b})")
    for name, risk in risks.items():
        if not isinstance(risk, Risk):
            raise TypeError(f"{name} must be a ritz.Risk, got {type(risk).__name__}")
    _check_data(risks, "on different data")
    first, *others = risks
    notes = []
    for name in others:
        ours, theirs = (_kind(risks[one]) for one in (first, name))
        if ours != theirs:
            notes.append(f"{first} and {name} differ: {ours}, and {theirs}")
        elif not risks[first].opaque:
            one, other = (of_loss(risks[each].output_loss) for each in (first, name))
            if apart := [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]:
                notes.append(f"{first} and {name} differ in {', '.join(apart)} of their {one['class']}")
    if len({risk.space for risk in risks.values()}) > 1:
        notes.append("the networks differ, so their probes are not common: differences are as uncertain as both values")
    return tuple(notes)


def _kind(risk: Risk) -> str:
    """What two solutions of one problem should share besides the data: loss, mode, precision."""
    loss = "a batch_loss" if risk.opaque else type(risk.output_loss).__name__
    return f"{loss}, {risk.mode} mode, {str(risk.dtype).removeprefix('torch.')}"


def _check_data(risks: Mapping[str, Risk], what: str) -> None:
    """Refuse risks that do not have the same samples, in any order."""
    first, *others = risks or [""]
    for name in others:
        if not _same_data(risks[first], risks[name]):
            raise ValueError(
                f"{first} and {name} are {what}, so their measures cannot be compared; use ritz.measure on each"
            )


def _same_data(one: Risk, other: Risk) -> bool:
    """Whether two risks have the same samples, by checksums that allow for the precision of the data."""
    if one.batches is other.batches:
        return True
    if one.num_samples != other.num_samples:
        return False
    (ours, fine), (theirs, coarse) = (_sums(risk) for risk in (one, other))
    close = partial(torch.allclose, rtol=0.0, atol=8 * max(fine, coarse) * float(theirs.abs().max()))
    same = ours.shape == theirs.shape and (close(ours, theirs) or close(ours.sort().values, theirs.sort().values))
    return one.world.all(same)


def _sums(risk: Risk) -> tuple[Tensor, float]:
    """The checksums of all samples, and the precision of the data."""
    found, digits = [torch.zeros(1, dtype=torch.float64)], 1e-12
    for batch in risk.batches:
        found.append(checksums(batch).nan_to_num())
        digits = max([digits, *(torch.finfo(x.dtype).eps for x in tensors_of(batch.data) if x.is_floating_point())])
    return torch.cat(found), digits


def _rank(row: Measure, found: Mapping[str, Measurement]) -> Ranking:
    values = {name: as_found(m[row.key]) for name, m in found.items()}
    order = sorted(values, key=lambda name: float(values[name].value), reverse=row.better == "higher")
    steps = tuple(probability(values[a], values[b]) for a, b in pairwise(order))
    equal = all(same(values[a], values[b]) for a, b in pairwise(order))
    return Ranking(key=row.key, order=tuple(order), better=row.better, steps=steps, equal=equal)
