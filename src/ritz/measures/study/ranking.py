"""`ritz.study`: many runs in a table, and which measures predict the gap.

For every measure: Kendall's tau with the gap, its interval and the p-value of the permutation test, corrected for the
number of measures (Holm 1979); Spearman's rho; and how much of the relation remains when one hyper-parameter changes at
a time (`axes.py`). The p-value assumes that runs are exchangeable if there is no relation. Repeats of one setting are
not: `average=True` averages them to one run. Runs that stopped at different training losses also differ in that, so
compare runs with equal training loss.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...results import new_axes
from ...storage import Result
from ...tables import Table
from .axes import Granulated, Information, SignError, conditional_information, granulated_tau, sign_error
from .correlation import Correlation, kendall, spearman
from .runs import hint, read_runs, roles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Progress = Callable[[int, int], None]  # (measures done, all measures)
Verdict = Literal["predicts", "against", "cannot tell"]


@dataclass(frozen=True, eq=False, kw_only=True)
class StudyRow(Result):
    """The result of a study for one measure.

    Attributes:
        measure: Its name.
        turned: Whether its sign was flipped, because a larger value promises a smaller gap; everything below is then
            about -measure.
        kendall, spearman: Correlations with the gap, over all runs that have both values.
        adjusted_p: The p-value of tau after Holm's correction for the number of measures.
        granulated: tau if one hyper-parameter changes at a time; NaN without axes.
        sign_error: How often it changes in the wrong direction, in the worst environment; NaN without axes.
        information: The conditional information under the worst condition; None if not requested.
        verdict: "predicts" (a larger measure, a larger gap), "against" (a smaller gap) or "cannot tell".
        reason: The reason for the verdict.

    Example:
        >>> row = study({"gap_loss": [0.1, 0.2, 0.3, 0.5, 0.8], "norm": [9.0, 8.0, 6.0, 5.0, 1.0]})["norm"]
        >>> row.kendall.value, round(row.adjusted_p, 4), row.verdict
        (-1.0, 0.0167, 'against')
    """

    measure: str
    turned: bool
    kendall: Correlation
    spearman: Correlation
    granulated: Granulated
    sign_error: SignError
    information: Information | None = None
    adjusted_p: float = math.nan
    verdict: Verdict = "cannot tell"
    reason: str = ""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Study(Result, Mapping[str, StudyRow]):
    """The result of a study for all measures, best first: `study["trace"].verdict`.

    Attributes:
        rows: One row for each measure, by name, the largest tau first.
        target: Name of the column to predict.
        columns: The values of the measures and the target, (runs,) each, NaN if missing.
        errors: Their standard errors, NaN if unknown.
        axes: The hyper-parameters of the runs.
        level: Level of verdicts and intervals.
        left_out: Columns that are neither measure nor axis nor target, with the reason.
        notes: Limits of the study.

    Example:
        >>> runs = {"gap_loss": [0.1, 0.2, 0.3, 0.5, 0.8, 0.9], "trace": [1, 2, 3, 5, 8, 9], "norm": [4, 1, 5, 9, 2, 6]}
        >>> s = study(runs)
        >>> {name: row.verdict for name, row in s.items()}
        {'trace': 'predicts', 'norm': 'cannot tell'}
    """

    rows: Mapping[str, StudyRow]
    target: str
    columns: Mapping[str, Tensor]
    errors: Mapping[str, Tensor]
    axes: Mapping[str, tuple[Hashable, ...]]
    level: float
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, measure: str) -> StudyRow:
        if measure not in self.rows:
            raise KeyError(f"{measure} is not a measure of this study; it has: {', '.join(self.rows)}")
        return self.rows[measure]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def table(self) -> Table:
        """One line for each measure, best first, and the notes below."""
        informed = any(row.information for row in self.values())
        header = ["measure", "runs", "tau", f"{100 * self.level:.4g} % interval", "p", "p (Holm)", "rho"]
        header += [
            *(["Psi", "sign-error"] if self.axes else []),
            *(["CMI"] if informed else []),
            "verdict",
        ]
        lines = []
        for row in self.values():
            low, high = row.kendall.interval(self.level)
            line = [
                _label(row), str(row.kendall.n), _signed(row.kendall.value),
                "-" if math.isnan(low) else f"[{low:+.2f}, {high:+.2f}]", _share(row.kendall.p_value),
                _share(row.adjusted_p), _signed(row.spearman.value),
            ]  # fmt: skip
            line += [_signed(row.granulated.value), _share(row.sign_error.worst)] if self.axes else []
            line += [_share(row.information.value)] if row.information else []
            lines.append([*line, row.verdict])
        runs = len(self.columns[self.target])
        title = f"{self.target} over {runs} runs" + (f", axes {', '.join(self.axes)}" if self.axes else "")
        return Table(header, lines, title=title, notes=self.notes, numeric=range(1, len(header) - 1))

    def plot(self, ax: "Axes | Sequence[Axes] | None" = None, measures: Sequence[str] | None = None) -> "list[Axes]":
        """A panel per measure: all runs, the gap against the measure, and the monotone curve closest to them.

        Args:
            ax: One axes or several; a new grid of them if None.
            measures: Which measures to show; if None, all in the order of tau, as far as there are axes.
        """
        names = list(self.rows) if measures is None else [self[name].measure for name in measures]
        if ax is None:
            figure = new_axes().get_figure(root=True)
            assert figure is not None
            columns = min(len(names), 3)
            rows = -(-len(names) // columns)
            figure.clear()
            figure.set_size_inches(4 * columns, 3.2 * rows)
            panels = list(figure.subplots(rows, columns, squeeze=False).flat)
            for empty in panels[len(names) :]:
                empty.set_axis_off()
        else:
            panels = list(np.array(ax, dtype=object).flat)
            if measures is not None and len(panels) < len(names):
                raise ValueError(f"{len(names)} measures need {len(names)} axes, got {len(panels)}")
        drawn = list(zip(panels, names, strict=False))
        for panel, name in drawn:
            _scatter(panel, self, self.rows[name], legend=panel is panels[0])
        return [panel for panel, _ in drawn]


def study(
    table: Any,
    target: str = "gap_loss",
    axes: str | Sequence[str] | None = None,
    measures: str | Sequence[str] | None = None,
    *,
    higher_is_better: Collection[str] | None = None,
    average: bool = False,
    test_size: int | None = None,
    environments: Literal["settings", "values"] = "settings",
    min_effective: float = 12.0,
    information: bool = False,
    level: float = 0.95,
    resamples: int = 4999,
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Shows which measures predict the gap, from a table of many runs.

    A measure "predicts" if its tau is positive and its p-value, corrected for the number of measures, is below
    1 - level; it is "against" if tau is negative. In both cases the granulated tau must have the same sign. Otherwise
    the verdict is "cannot tell", and the row gives the reason.

    Args:
        table: A list of rows (mappings, results of `ritz.measure`), a dictionary of columns, a data frame, or the path
            of a CSV file. An empty or NaN cell is missing: that run is left out for that measure, and counted.
        target: The column to predict.
        axes: The columns of hyper-parameters, by name or glob. If None, columns of text or booleans that repeat.
        measures: The columns to judge, by name or glob. If None, all other numeric columns, except gaps, test values
            and seeds.
        higher_is_better: Measures for which a larger value promises a smaller gap; their sign is flipped. If None,
            those that `ritz.measures.MEASURES` marks so, such as margins.
        average: Average over the repeats of each setting of `axes` first.
        test_size, environments, min_effective: Settings of the sign-error; see `ritz.measures.sign_error`.
        information: Also compute the conditional information; see `ritz.measures.conditional_information`.
        level: Level of intervals; a corrected p-value must be below 1 - level.
        resamples, seed: Settings of the permutation tests and the bootstrap.
        progress: Called with (measures done, all measures).

    Example:
        >>> runs = [{"gap_loss": g, "trace": t} for g, t in [(0.1, 3.0), (0.2, 5.0), (0.3, 9.0)]]
        >>> found = study(runs)
        >>> found["trace"].kendall.value, found["trace"].verdict
        (1.0, 'cannot tell')
        >>> found.notes[0]
        '3 runs cannot decide: no p-value below 0.333 is possible'
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    runs = read_runs(table)
    names, settings, left_out = roles(runs, target, axes, measures)
    turned = _turned(names, higher_is_better)
    if average:
        if not settings:
            raise ValueError("average=True needs axes=, which say which runs are repeats of each other")
        runs = runs.averaged(settings)
    grid = {name: runs.labels[name] for name in settings}
    gap = runs.numbers[target]
    rows = []
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names))
        values = -runs.numbers[name] if name in turned else runs.numbers[name]
        rows.append(StudyRow(
            measure=name, turned=name in turned, kendall=kendall(values, gap, resamples=resamples, seed=seed),
            spearman=spearman(values, gap, resamples=resamples, seed=seed),
            granulated=granulated_tau(values, gap, grid) if grid else Granulated(value=math.nan),
            sign_error=sign_error(
                values, gap, grid, test_size=test_size, environments=environments, min_effective=min_effective
            ),
            information=conditional_information(values, gap, grid) if information else None,
        ))  # fmt: skip
    if progress is not None:
        progress(len(names), len(names))
    rows = _judged(rows, 1 - level)
    rows.sort(key=lambda row: (math.isnan(row.kendall.value), -row.kendall.value))
    kept = [target, *names]
    return Study(
        rows={row.measure: row for row in rows}, target=target, axes=grid, level=level, left_out=left_out,
        columns={name: torch.from_numpy(runs.numbers[name]) for name in kept},
        errors={name: torch.from_numpy(runs.errors[name]) for name in kept},
        notes=tuple(_notes(rows, grid, len(gap), 1 - level, resamples)),
    )  # fmt: skip


def _turned(names: Sequence[str], asked: Collection[str] | None) -> Collection[str]:
    """The measures whose larger values promise a smaller gap: those given, or else those that the registry marks so."""
    if asked is None:
        from ..registry import MEASURES

        return [name for name in names if name in MEASURES and MEASURES[name].better == "higher"]
    for name in asked:
        if name not in names:
            raise ValueError(f"higher_is_better: {name!r} is not a measure of the table; {hint(name, names)}")
    return asked


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number m: the k-th smallest times (m - k + 1), made non-decreasing (Holm 1979).

    NaN stays NaN and does not count.

    Example:
        >>> holm([0.01, 0.04, 0.03, math.nan])
        [0.03, 0.06, 0.06, nan]
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, reached = [math.nan] * len(p_values), 0.0
    for k, (p, i) in enumerate(order):
        reached = max(reached, min(p * (len(order) - k), 1.0))
        adjusted[i] = reached
    return adjusted


def _judged(rows: Sequence[StudyRow], alpha: float) -> list[StudyRow]:
    """The rows with corrected p-values, verdicts and reasons."""
    judged = []
    for row, p in zip(rows, holm([row.kendall.p_value for row in rows]), strict=True):
        tau, psi = row.kendall.value, row.granulated.value
        verdict: Verdict = "cannot tell"
        if math.isnan(p):
            reason = row.kendall.reason.replace("x is", "the measure is").replace("y is", "the target is")
        elif not p < alpha:
            reason = f"corrected p-value {p:.3g}, not below {alpha:.3g}"
        elif tau * psi < 1e-9:  # NaN passes: there are no axes, or no two runs that differ in one of them
            reason = f"tau is {tau:+.2f} over all runs, but {psi:+.2f} where one hyper-parameter moves at a time"
        else:
            verdict, reason = "predicts" if tau > 0 else "against", f"corrected p-value {p:.3g}"
        judged.append(replace(row, adjusted_p=p, verdict=verdict, reason=reason))
    return judged


def _notes(
    rows: Sequence[StudyRow], grid: Mapping[str, Sequence[Hashable]], runs: int, alpha: float, resamples: int
) -> list[str]:
    """The limits of the study as a whole, and those of single measures."""
    notes = []
    tested = [row for row in rows if not math.isnan(row.kendall.p_value)]
    smallest, how = min(((row.kendall.smallest_p, row.kendall.p_method) for row in tested), default=(1.0, "none"))
    corrected = min(smallest * len(tested), 1.0)
    if not tested or corrected >= alpha:
        many = f", {corrected:.3g} after correction for {len(tested)} measures" if len(tested) > 1 else ""
        ours = 1 / (resamples + 1) if how == "monte carlo" else 0.0  # this part would vanish with all orders
        few = (smallest - ours) * len(tested) < alpha
        who = "resamples are too few, raise them" if few else f"{runs} runs cannot decide"
        notes.append(f"{who}: no p-value below {smallest:.3g} is possible{many}")
    if grid:
        settings = len(set(zip(*grid.values(), strict=True)))
        if settings < runs:
            text = "p-values count repeats of a setting as independent runs; average=True does not"
            notes.append(f"{runs} runs at {settings} settings: {text}")
        if any(row.sign_error.too_small and not row.sign_error.environments for row in rows):
            notes.append("sign-error: every environment is too small; environments='values' pools them")
    for row in rows:
        if row.kendall.missing:
            notes.append(f"{row.measure}: {row.kendall.missing} of {runs} runs left out, no value")
        if math.isnan(row.adjusted_p) or "hyper-parameter" in row.reason:
            notes.append(f"{row.measure}: {row.reason}")
    return notes


def _label(row: StudyRow) -> str:
    return f"-{row.measure}" if row.turned else row.measure


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.2f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _scatter(ax: "Axes", found: Study, row: StudyRow, legend: bool) -> None:
    """The runs, their errors, and the monotone curve."""
    x, y = (found.columns[name].numpy() for name in (row.measure, found.target))
    dx, dy = (np.nan_to_num(found.errors[name].numpy()) for name in (row.measure, found.target))
    known = np.isfinite(x) & np.isfinite(y)
    x, y, dx, dy = x[known], y[known], dx[known], dy[known]
    if dx.any() or dy.any():
        ax.errorbar(x, y, xerr=dx, yerr=dy, fmt="none", ecolor="0.75", elinewidth=0.8, zorder=1)
    name, values = next(iter(found.axes.items()), ("", ()))
    different = sorted(set(values), key=lambda v: (isinstance(v, str), v)) if len(set(values)) <= 8 else []
    for number, value in enumerate(different):
        of = np.array([v == value for v in values])[known]
        shade = 0.85 * number / max(len(different) - 1, 1)
        ax.scatter(x[of], y[of], s=18, color=_shade(shade), label=f"{value}", zorder=2)
    if different and legend:
        ax.legend(title=name, frameon=False, fontsize="x-small", title_fontsize="x-small")
    if not different:
        ax.scatter(x, y, s=18, color=_shade(0.3), zorder=2)
    direction = -row.kendall.value if row.turned else row.kendall.value
    if len(x) > 1 and not math.isnan(direction):
        ax.plot(*_monotone(x, y, direction > 0), color="0.4", lw=1.0, drawstyle="steps-mid", zorder=1)
    if len(x) and x.min() > 0 and x.max() > 100 * x.min():
        ax.set_xscale("log")
    ax.set(xlabel=row.measure, ylabel=found.target)
    tau = f"tau {_signed(row.kendall.value)}" + (" (turned)" if row.turned else "")
    ax.set_title(f"{tau}, p {_share(row.adjusted_p)}: {row.verdict}", fontsize="medium")


def _shade(part: float) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](part)


def _monotone(x: "Array", y: "Array", rising: bool) -> "tuple[Array, Array]":
    """The least-squares fit to y that never falls (or never rises), by pooling adjacent violators."""
    places, inverse = np.unique(x, return_inverse=True)
    sign = 1.0 if rising else -1.0
    blocks: list[list[float]] = []  # mean, weight, places
    for place in range(len(places)):
        of = sign * y[inverse == place]
        blocks.append([float(of.mean()), float(len(of)), 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight, width = blocks.pop()
            last = blocks[-1]
            total = last[1] + weight
            blocks[-1] = [(last[0] * last[1] + mean * weight) / total, total, last[2] + width]
    fitted = np.concatenate([np.full(int(width), sign * mean) for mean, _, width in blocks])
    return places, fitted
