"""Does a measure order runs as the gap does when only a single hyper-parameter changes?

A correlation over all runs may come from one strong hyper-parameter that affects everything. The three answers below
use pairs of runs that differ in a single hyper-parameter, and the signs of the changes between the two runs:

    granulated tau      mean over axes of the mean tau over groups that differ in that axis only (Jiang et al. 2020)
    sign-error          1/2 E[1 - sgn dC sgn dG] in the worst environment (Dziugaite et al. 2020)
    information         min over conditions of I(V_C; V_G | U) / H(V_G | U), V the signs of pairs (Jiang et al. 2020)

C is the measure, G the gap. An axis is a hyper-parameter. Runs without a value (NaN) are left out.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from .correlation import Column, as_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Index = NDArray[np.intp]

Axes = Mapping[str, Sequence[Hashable]]  # the values of each hyper-parameter, one per run
Setting = tuple[Hashable, ...]

CHUNK = 1000  # number of runs whose pairs are compared at once


@dataclass(frozen=True, kw_only=True)
class Granulated:
    """Psi, the granulated tau.

    Attributes:
        value: Mean over the axes; NaN if no two runs differ in one axis only.
        axes: psi of each axis: the mean tau over its groups; NaN for an axis without groups.
        groups: Number of groups of each axis.

    Example:
        >>> granulated_tau([1.0, 2.0], [3.0, 4.0], {"lr": [0.1, 0.2]})
        Granulated(value=1.0, axes={'lr': 1.0}, groups={'lr': 1})
    """

    value: float
    axes: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SignError:
    """How often a measure changes in the wrong direction, by environment.

    Attributes:
        worst: The robust sign-error, that of the worst environment; NaN if none is large enough. A coin has 0.5.
        mean: Mean over environments.
        where: The worst environment.
        environments: Number of environments that were large enough.
        too_small: Number of environments that were not.

    Example:
        >>> found = sign_error([1.0, 2.0], [3.0, 4.0], {"lr": [0.1, 0.2]})
        >>> found.worst, found.too_small  # one pair is too few
        (nan, 1)
    """

    worst: float
    mean: float
    where: str = ""
    environments: int = 0
    too_small: int = 0


@dataclass(frozen=True, kw_only=True)
class Information:
    """What the sign of a measure's change tells about the sign of the gap's change, as a share of its entropy.

    Attributes:
        value: In [0, 1], under the worst condition; NaN if that entropy is 0.
        given: The hyper-parameters of that condition.

    Example:
        >>> conditional_information([3.0, 2.0, 1.0], [0.1, 0.2, 0.3], {})  # everything, though with the wrong sign
        Information(value=1.0, given=())
    """

    value: float
    given: tuple[str, ...] = ()


def granulated_tau(measure: Column, target: Column, axes: Axes) -> Granulated:
    """Psi = mean over axes i of psi_i, psi_i = mean over groups of tau (Jiang et al. 2020).

    A group holds the runs that agree in all axes but i; its tau is the mean of sgn dC sgn dG over pairs that differ in
    i, with ties counted as 0. Repeats of one setting are not compared with each other.

    Example:
        >>> axes = {"lr": [1, 1, 2, 2], "width": [8, 16, 8, 16]}
        >>> psi = granulated_tau([1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 3.0, 2.0], axes)
        >>> psi.axes  # the measure is right along lr, wrong along width
        {'lr': 1.0, 'width': -1.0}
        >>> psi.value
        0.0
    """
    c, g, known = _known(measure, target, axes)
    taus: dict[str, list[float]] = {name: [] for name in axes}
    codes = {name: _codes(axes[name]) for name in axes}
    for name, _, members in _groups(axes, known):
        value = codes[name][members]
        total, pairs = 0.0, 0
        for part in _pieces(np.arange(len(members))):
            apart = value[part][:, None] < value  # each pair once
            total += float(_agreement(c, g, members[part], members)[apart].sum())
            pairs += int(apart.sum())
        if pairs:
            taus[name].append(total / pairs)
    means = {name: float(np.mean(found)) if found else math.nan for name, found in taus.items()}
    present = [psi for psi in means.values() if not math.isnan(psi)]
    return Granulated(
        value=float(np.mean(present)) if present else math.nan,
        axes=means,
        groups={name: len(found) for name, found in taus.items()},
    )


def sign_error(
    measure: Column,
    target: Column,
    axes: Axes,
    *,
    test_size: int | None = None,
    environments: Literal["settings", "values"] = "settings",
    min_effective: float = 12.0,
) -> SignError:
    """1/2 E[1 - sgn dC sgn dG] over pairs of runs, in the worst environment (Dziugaite et al. 2020).

    An environment is a change of one hyper-parameter from one value to another. The weight of a pair says how surely
    its gaps differ: max(0, 1 - 2 exp(-2 n (dG / 2)^2))^2 for gaps in error on n test items (Hoeffding). Environments
    with an effective sample size (sum w)^2 / sum w^2 below `min_effective` do not count.

    Args:
        measure, target: One number per run.
        axes: The hyper-parameters of the runs.
        test_size: n, the number of items that the gap was measured on; None gives all pairs the same weight. The
            weights hold for gaps between -1 and 1, that is, gaps in error and not in loss.
        environments: "settings": all other hyper-parameters fixed at one setting, as in the paper; 12 pairs then need
            four seeds at one value and three at the other. "values": pooled over the settings of the others.
        min_effective: The smallest effective sample size; 12 in the paper.

    Example:
        >>> found = sign_error([1.0, 2.0, 3.0], [0.1, 0.3, 0.2], {"lr": [1, 2, 3]}, min_effective=1)
        >>> found.worst, found.where, round(found.mean, 4)
        (1.0, 'lr: 2 -> 3', 0.3333)
    """
    if environments not in ("settings", "values"):
        raise ValueError(f"environments must be 'settings' or 'values', got {environments!r}")
    c, g, known = _known(measure, target, axes)
    gaps = as_row(target, "target")
    if test_size is not None:
        _check_weights(test_size, gaps[known])
    sums: dict[tuple[Hashable, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # of w, w^2, w * error
    codes = {name: _codes(axes[name]) for name in axes}
    for name, others, members in _groups(axes, known):
        value = codes[name][members]
        for low, high in itertools.combinations(np.unique(value), 2):
            one, two = members[value == low], members[value == high]
            move = (name, axes[name][one[0]], axes[name][two[0]])
            entry = sums[(*move, others) if environments == "settings" else move]
            for part in _pieces(one):
                error = (1 - _agreement(c, g, part, two)) / 2
                weight = _hoeffding(gaps[part][:, None], gaps[two], test_size)
                for place, terms in enumerate((weight, weight**2, weight * error)):
                    entry[place] += float(terms.sum())
    errors = {env: e / w for env, (w, w2, e) in sums.items() if w2 > 0 and w * w / w2 >= min_effective - 1e-9}
    if not errors:
        return SignError(worst=math.nan, mean=math.nan, too_small=len(sums))
    worst = max(errors, key=lambda env: errors[env])
    return SignError(
        worst=errors[worst], mean=float(np.mean(list(errors.values()))), where=_say(worst, list(axes)),
        environments=len(errors), too_small=len(sums) - len(errors),
    )  # fmt: skip


def conditional_information(measure: Column, target: Column, axes: Axes, *, max_given: int = 2) -> Information:
    """min over S of I(V_C; V_G | U_S) / H(V_G | U_S) (Jiang et al. 2020, who take |S| <= 2).

    V is the sign of the change between two runs, U_S the values of the hyper-parameters S in both of them. A measure
    that only reflects one hyper-parameter tells nothing once that one is given. The information does not depend on the
    direction of a relation, and few pairs under a condition bias it upwards.

    Example:
        >>> axes = {"lr": [1, 1, 2, 2], "seed": [0, 1, 0, 1]}
        >>> conditional_information([1.0, 1.0, 2.0, 2.0], [1.0, 1.1, 2.0, 2.2], axes, max_given=1)
        Information(value=0.0, given=('lr',))
    """
    c, g, known = _known(measure, target, axes)
    c, g = c[known], g[known]
    codes = {name: _codes([axes[name][i] for i in known]) for name in axes}
    found = Information(value=math.nan)
    for size in range(min(max_given, len(axes)) + 1):
        for given in itertools.combinations(axes, size):
            setting = _codes(list(zip(*(codes[name].tolist() for name in given), strict=True)) or [()] * len(c))
            shared, total = _entropies(c, g, setting)
            if total > 1e-12 and not shared / total >= found.value:  # true for the first one, as found.value is NaN
                found = Information(value=max(shared / total, 0.0), given=given)
    return found


def _entropies(c: "Array", g: "Array", setting: "Index") -> tuple[float, float]:
    """I(V_C; V_G | U) and H(V_G | U) over all ordered pairs of runs, in nats."""
    kinds = int(setting.max()) + 1 if len(setting) else 1
    table = np.zeros(kinds * kinds * 9)
    for start in range(0, len(c), CHUNK):
        part = slice(start, start + CHUNK)
        signs = (3 * np.sign(c[part, None] - c) + np.sign(g[part, None] - g) + 4).astype(np.intp)
        cells = 9 * (kinds * setting[part, None] + setting) + signs
        apart = np.arange(len(c))[part, None] != np.arange(len(c))
        table += np.bincount(cells[apart], minlength=len(table))
    p = table.reshape(-1, 3, 3) / max(table.sum(), 1.0)  # (condition, sign of C, sign of G)

    def entropy(q: "Array") -> float:
        q = q[q > 0]
        return float(-(q * np.log(q)).sum())

    condition = entropy(p.sum((1, 2)))
    of_g = entropy(p.sum(1)) - condition
    return of_g + entropy(p.sum(2)) - entropy(p), of_g


def _known(measure: Column, target: Column, axes: Axes) -> "tuple[Array, Array, Index]":
    """Both columns as ranks (infinities allowed), and the runs that have both values."""
    from .resampling import ranks

    c, g = as_row(measure, "measure"), as_row(target, "target")
    lengths = {"measure": len(c), "target": len(g), **{name: len(values) for name, values in axes.items()}}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"every column must have one value per run, got {lengths}")
    known = np.flatnonzero(~(np.isnan(c) | np.isnan(g)))
    ordered = [np.zeros(len(c)), np.zeros(len(c))]
    for row, column in zip(ordered, (c, g), strict=True):
        row[known] = ranks(column[known])
    return ordered[0], ordered[1], known


def _groups(axes: Axes, known: "Index") -> "Iterator[tuple[str, Setting, Index]]":
    """For every axis the groups of runs that agree in all others: (axis, values of the others, runs)."""
    for name in axes:
        groups: dict[Setting, list[int]] = defaultdict(list)
        for i in known.tolist():
            groups[tuple(axes[other][i] for other in axes if other != name)].append(i)
        for others, members in groups.items():
            if len(members) > 1:
                yield name, others, np.array(members)


def _pieces(runs: "Index") -> "list[Index]":
    """Pieces of a list of runs, so small that the pairs of a piece with all others fit into memory."""
    return [runs[start : start + CHUNK] for start in range(0, len(runs), CHUNK)]


def _agreement(c: "Array", g: "Array", one: "Index", two: "Index") -> "Array":
    """sgn dC sgn dG between the runs of two lists, (len(one), len(two))."""
    signs: Array = np.sign(c[one][:, None] - c[two]) * np.sign(g[one][:, None] - g[two])
    return signs


def _codes(values: Sequence[Hashable]) -> "Index":
    """0, 1, ... for each different value: ascending for numbers, else in order of appearance."""
    different = list(dict.fromkeys(values))
    numbers = all(isinstance(value, int | float) for value in different)
    places = {value: i for i, value in enumerate(sorted(different) if numbers else different)}  # type: ignore[type-var]
    return np.array([places[value] for value in values], dtype=np.intp)


def _hoeffding(one: "Array", two: "Array", test_size: int | None) -> "Array":
    """The weight of each pair of gaps."""
    if test_size is None:
        return np.ones(np.broadcast_shapes(one.shape, two.shape))
    weight: Array = np.maximum(0.0, 1 - 2 * np.exp(-2 * test_size * ((one - two) / 2) ** 2)) ** 2
    return weight


def _check_weights(test_size: int, gaps: "Array") -> None:
    if test_size < 1:
        raise ValueError(f"test_size must be at least 1, got {test_size}")
    if len(gaps) and not np.abs(gaps).max() <= 1:
        raise ValueError(
            f"test_size needs gaps in error, between -1 and 1, got a gap of {np.abs(gaps).max():.4g}; "
            "give shares, not percent, or leave out test_size"
        )


def _say(environment: tuple[Hashable, ...], names: Sequence[str]) -> str:
    """`lr: 0.1 -> 0.2 (width = 64)`."""
    name, before, after, *rest = environment
    text = f"{name}: {before} -> {after}"
    if not rest:
        return text
    others = [other for other in names if other != name]
    fixed = ", ".join(f"{other} = {value}" for other, value in zip(others, rest[0], strict=True))  # type: ignore[call-overload]
    return f"{text} ({fixed})" if fixed else text
