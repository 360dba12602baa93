"""What section 5 of seed 004 says of damping and sharp directions in softmax regression, judged over our seeds.

Every statement is about errors at the end of training, and is read as a difference of runs at equal seed: its mean over
seeds, with a Student t interval. `logistic_damping` makes the runs; benchmarks/logistic_damping.py does it all.

    generalisation suffers        test error rises; beside it, the gap, test error - training error
    harm of eta                   error at eta - error at eta = 1, same damping and seed; training error that is 0 at
                                  both dampings shows no harm, and says nothing of which is larger
    no or very minimal impact     within half a point of training error
    extremely low damping         the two lowest of the grid
    well-separated outliers       the Ritz values above the largest ratio of neighbours among the 20 largest, if it is
                                  2 or more; else there are none
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..results import Estimate
from .base import Claim
from .logistic_damping import CLASSES, MEANING, Reference, Run
from .over_seeds import geometric_mean, mean

Results = Mapping[str, Sequence[Run]]  # by data set
Key = tuple[Any, ...]

PAPER = "seed 004"
RISE = 0.005  # percentage points, half of one of 10,000 images: what is less is no rise
MINIMAL = 0.5  # percentage points of training error
SAME_STEP = 0.1  # distance of two steps over the length of one
CONVERGED = 0.01  # residual over largest Ritz value, as `LanczosOpt` has it
HEAD = 20  # Ritz values among which the outliers end
SEPARATED = 2.0  # the last outlier over what follows
NAMES = {"test_error": "test error", "train_error": "training error", "gap": "test error - training error"}


# ---------------------------------------------------------------------------------------------- numbers


def dampings(runs: Sequence[Run]) -> list[float]:
    """The grid, ascending.

    Example:
        >>> from types import SimpleNamespace as Entry
        >>> dampings([Entry(damping=1.0), Entry(damping=None), Entry(damping=0.1)])
        [0.1, 1.0]
    """
    return sorted({run.damping for run in runs if run.damping is not None})


def etas(runs: Sequence[Run]) -> list[float]:
    """The factors, ascending; the first is the one that others are compared with.

    Example:
        >>> from types import SimpleNamespace as Entry
        >>> etas([Entry(eta=3.0), Entry(eta=None), Entry(eta=1.0)])
        [1.0, 3.0]
    """
    return sorted({run.eta for run in runs if run.eta is not None})


def final(runs: Sequence[Run], key: str, damping: float | None, eta: float | None) -> Tensor:
    """A number at the end of training for every seed, in the order of seeds; "gap" is test less training error.

    Example:
        >>> entry = {"dataset": "MNIST", "damping": 0.1, "eta": 1.0, "steps": [0, 9], "values": [], "residuals": []}
        >>> curves = {"train_loss": [2, 1], "test_loss": [2, 1], "train_error": [90, 1], "test_error": [90, 9]}
        >>> runs = from_plain([{"seed": seed, **entry, **curves} for seed in (0, 1)])["MNIST"]
        >>> final(runs, "gap", 0.1, 1.0).tolist()
        [8.0, 8.0]
    """
    if key == "gap":
        return final(runs, "test_error", damping, eta) - final(runs, "train_error", damping, eta)
    found = {run.seed: run.final(key) for run in runs if run.damping == damping and run.eta == eta}
    return torch.tensor([found[seed] for seed in sorted(found)], dtype=torch.float64)


def harm(runs: Sequence[Run], key: str, damping: float, eta: float) -> Tensor:
    """How much larger than at the smallest eta a number is, at equal damping and seed.

    Example:
        >>> from types import SimpleNamespace as Entry
        >>> runs = [Entry(seed=0, damping=0.1, eta=eta, final=lambda key, eta=eta: 5 + eta) for eta in (1.0, 3.0)]
        >>> harm(runs, "test_error", 0.1, 3.0).tolist()
        [2.0]
    """
    return final(runs, key, damping, eta) - final(runs, key, damping, etas(runs)[0])


def best(runs: Sequence[Run], key: str) -> float:
    """The lowest mean over seeds of all runs of LanczosOPT.

    Example:
        >>> from types import SimpleNamespace as Entry
        >>> runs = [Entry(seed=0, damping=0.1, eta=eta, final=lambda key, eta=eta: 5 + eta) for eta in (1.0, 3.0)]
        >>> best(runs, "test_error")
        6.0
    """
    return min(float(final(runs, key, damping, eta).mean()) for damping in dampings(runs) for eta in etas(runs))


# ----------------------------------------------------------------------------------------------- claims


def claims(results: Results) -> dict[Key, Claim]:
    """Every statement of section 5, for every data set, by what it is about.

    Raises:
        ValueError: If a data set has not two seeds or more, all with the same grid.

    Example:
        >>> entry = {"dataset": "MNIST", "steps": [0, 9], "values": [3.0, 1.0], "residuals": [0.0, 0.0]}
        >>> entry |= {"train_loss": [2, 1], "test_loss": [2, 1], "train_error": [90, 1]}
        >>> grid = [(seed, damping, eta) for seed in (0, 1) for damping in (0.1, 1.0) for eta in (1.0, 3.0)]
        >>> runs = [{"seed": s, "damping": d, "eta": e, "test_error": [90, 9 + e], **entry} for s, d, e in grid]
        >>> found = claims(from_plain(runs))
        >>> found["MNIST", "eta", "test_error", 0.1, 1.0, 3.0].verdict
        'holds'
        >>> found["MNIST", "damping", "test_error", 1.0, 1.0, 0.1].verdict
        'refuted'
    """
    _check(results)
    found: dict[Key, Claim] = {}
    for dataset, runs in results.items():
        found |= {(dataset, *key): claim for key, claim in _of_one(dataset, runs).items()}
    if len(results) == 2:
        found |= _of_both(results, found)
    return found


def reference_claims(references: Mapping[str, Sequence[Reference]]) -> dict[Key, Claim]:
    """That LanczosOPT takes the step of equation 9, for every data set, damping and length of descent.

    Example:
        >>> near = [Reference(seed=seed, after=0, converged=9, distances={0.1: 0.01}) for seed in (0, 1)]
        >>> [claim.verdict for claim in reference_claims({"MNIST": near}).values()]
        ['holds']
    """
    found: dict[Key, Claim] = {}
    for dataset, entries in references.items():
        for after, damping in dict.fromkeys((entry.after, d) for entry in entries for d in entry.distances):
            own = [entry for entry in entries if entry.after == after]
            distances = torch.tensor([entry.distances[damping] for entry in own], dtype=torch.float64)
            counts = [entry.converged for entry in own]
            found[dataset, "equation 9", after, damping] = Claim(
                paper=PAPER, where="equation 9", text=f"{dataset}: after {after} steps of gradient descent the step at "
                f"damping {damping:g} is that of the 50 largest eigenpairs: |difference| / |step|", expected=0.0,
                tolerance=SAME_STEP, measured=mean(distances.tolist()),
                evidence=f"{min(counts)} to {max(counts)} of the 50 Ritz pairs have converged to 1e-6 of lambda_1",
            )  # fmt: skip
    return found


def _of_one(dataset: str, runs: Sequence[Run]) -> dict[Key, Claim]:
    """The statements about one data set."""
    single = {
        "minimum": _minimum,
        "outliers": _outliers,
        "converged": _converged,
        "ratio": _ratio,
        "unstable": _unstable,
    }
    found: dict[Key, Claim] = {(name,): judge(dataset, runs) for name, judge in single.items()}
    grid, factors = dampings(runs), etas(runs)
    for less, more in _pairs(grid):
        for key, eta in product(("test_error", "gap"), factors):
            found["damping", key, eta, more, less] = _damping(dataset, runs, key, eta, more, less)
        for key, eta in product(("train_error", "test_error"), factors[1:]):
            found["graver", key, eta, less, more] = _graver(dataset, runs, key, eta, less, more)
    for damping, (low, high), key in product(grid, _pairs(factors), ("test_error", "gap")):
        found["eta", key, damping, low, high] = _eta(dataset, runs, key, damping, low, high)
    for damping, eta in product(grid[:2], factors[1:]):
        found["minimal", damping, eta] = _minimal(dataset, runs, damping, eta)
    return found | _beside_descent(dataset, runs)


def _pairs(values: Sequence[float]) -> list[tuple[float, float]]:
    """Neighbours, and the two ends."""
    return list(dict.fromkeys([*pairwise(values), (values[0], values[-1])]))


def _of_both(results: Results, found: Mapping[Key, Claim]) -> dict[Key, Claim]:
    """The statements about the second data set beside the first."""
    first, second = results
    twins = [(claim.verdict, found[second, *key[1:]].verdict) for key, claim in found.items() if key[0] == first]
    same = sum(one == other for one, other in twins)
    opposed = sum({one, other} == {"holds", "refuted"} for one, other in twins)
    decided = sum("not decidable" not in pair for pair in twins)
    lowest = [best(runs, "test_error") for runs in results.values()]
    means = [torch.stack([final(runs, "test_error", d, e) for d in dampings(runs) for e in etas(runs)]).mean(0)
             for runs in results.values()]  # fmt: skip
    return {
        ("both", "picture"): Claim(
            paper=PAPER, where="section 5, figure 6", text=f"{second} paints an identical picture as {first}: "
            "statements that hold on one and are refuted on the other", expected=0, measured=opposed,
            evidence=f"of {len(twins)} statements {same} have the same verdict, and {decided} are decided on both",
        ),
        ("both", "higher"): Claim(
            paper=PAPER, where="section 5", text=f"test error of {second} - test error of {first}, mean over the grid",
            expected=0.0, relation=">=", measured=_mean(means[1] - means[0]),
            evidence=f"best runs {lowest[1]:.2f} and {lowest[0]:.2f} %; the paper has it slightly higher, how slightly "
            "is not said",
        ),
    }  # fmt: skip


def _damping(dataset: str, runs: Sequence[Run], key: str, eta: float, more: float, less: float) -> Claim:
    change = final(runs, key, less, eta) - final(runs, key, more, eta)
    where = "section 5, figure 4" if key == "test_error" else "section 6.3"
    text = f"{dataset}: {NAMES[key]} rises from damping {more:g} to {less:g} at eta {eta:g}"
    return _signed(where, text, change)


def _graver(dataset: str, runs: Sequence[Run], key: str, eta: float, less: float, more: float) -> Claim:
    change = harm(runs, key, more, eta) - harm(runs, key, less, eta)
    text = f"{dataset}: harm of eta {eta:g} to {NAMES[key]} is larger at damping {more:g} than at {less:g}"
    ends = [final(runs, key, damping, factor) for damping in (less, more) for factor in (etas(runs)[0], eta)]
    floor = all(not values.any() for values in ends)
    short = f"a {NAMES[key]} above 0 in any of these runs" if floor else ""
    return replace(_signed("section 5", text, change), short_of=short)


def _eta(dataset: str, runs: Sequence[Run], key: str, damping: float, low: float, high: float) -> Claim:
    change = final(runs, key, damping, high) - final(runs, key, damping, low)
    text = f"{dataset}: {NAMES[key]} rises from eta {low:g} to {high:g} at damping {damping:g}"
    return _signed("section 5, figures 4 to 6", text, change)


def _minimal(dataset: str, runs: Sequence[Run], damping: float, eta: float) -> Claim:
    change = harm(runs, "train_error", damping, eta)
    text = f"{dataset}: eta {eta:g} leaves the training error at damping {damping:g} as it is"
    return Claim(
        paper=PAPER, where="section 5, figure 4a", text=text, expected=0.0, tolerance=MINIMAL, measured=_mean(change),
        evidence=_seen(change),
    )  # fmt: skip


def _beside_descent(dataset: str, runs: Sequence[Run]) -> dict[Key, Claim]:
    """The gap to gradient descent, at the lowest damping and at the best; none where descent was not run."""
    if not any(run.damping is None for run in runs):
        return {}
    grid, eta = dampings(runs), etas(runs)[0]
    descent = final(runs, "test_error", None, None)
    gaps = {damping: final(runs, "test_error", damping, eta) - descent for damping in grid}
    least = min(grid, key=lambda damping: float(gaps[damping].mean()))
    listed = ", ".join(f"{damping:g}: {float(gap.mean()):+.2f}" for damping, gap in gaps.items())
    seen = f"by damping, mean over seeds, {listed}; the best is known by the same test images"
    text = f"{dataset}: test error of LanczosOPT - gradient descent, eta {eta:g}, "
    return {
        ("descent", "gap"): Claim(
            paper=PAPER, where="abstract, section 5", text=f"{text}at the lowest damping {grid[0]:g}: there is a gap",
            expected=RISE, relation=">=", measured=_mean(gaps[grid[0]]), evidence=seen,
        ),
        ("descent", "closed"): Claim(
            paper=PAPER, where="abstract, section 5", text=f"{text}at the best damping {least:g}: more damping closes "
            "the gap entirely", expected=0.0, relation="<=", measured=_mean(gaps[least]), evidence=seen,
        ),
    }  # fmt: skip


def _minimum(dataset: str, runs: Sequence[Run]) -> Claim:
    """Separable images have no minimum: along a separating direction the loss falls for ever."""
    separated = {run.seed for run in runs if run.final("train_error") == 0}
    return Claim(
        paper=PAPER, where="section 5", expected=0, measured=len(separated),
        text=f"{dataset}: the loss has a global minimum: seeds whose images a run separates, so that there is none",
        evidence=f"{len(separated)} of {len({run.seed for run in runs})} seeds have a run with training error 0: along "
        "its weights the loss falls to 0 and never gets there. Nor would a minimum be a single one: the same vector "
        "added to the weights of all classes changes nothing",
    )  # fmt: skip


def _outliers(dataset: str, runs: Sequence[Run]) -> Claim:
    counts = [outlier_count(run.values) for run in runs if run.damping is not None]
    return Claim(
        paper=PAPER, where="section 5", text=f"{dataset}: well-separated outliers, the most of all runs at the end",
        expected=CLASSES, relation="<=", measured=max(counts),
        evidence=f"none in {counts.count(0)} of {len(counts)} runs, {CLASSES - 1} in {counts.count(CLASSES - 1)}; what "
        "counts as an outlier was settled with results in view: docs/logistic_damping.md",
    )  # fmt: skip


def outlier_count(values: Tensor) -> int:
    """How many of the values (k,), descending and positive, stand apart from the rest.

    Example:
        >>> outlier_count(torch.tensor([9.0, 8.0, 1.0, 0.9])), outlier_count(torch.tensor([4.0, 3.0, 2.0]))
        (2, 0)
    """
    head = values[: HEAD + 1].clamp(min=1e-12)
    ratios = head[:-1] / head[1:]
    return int(ratios.argmax()) + 1 if float(ratios.max()) >= SEPARATED else 0


def _converged(dataset: str, runs: Sequence[Run]) -> Claim:
    own = [run for run in runs if run.damping is not None]
    worst = max(float((run.residuals[:CLASSES] / run.values[0]).max()) for run in own)
    none = sum(not outlier_count(run.values) for run in own)
    return Claim(
        paper=PAPER, where="section 5", text=f"{dataset}: 50 steps find the outliers: the largest residual of the 10 "
        "largest Ritz pairs, over lambda_1, at the end of all runs", expected=CONVERGED, relation="<=", measured=worst,
        evidence="by Lanczos' own bound, which is |H phi - lambda phi| but for round-off, 1e-7 of lambda_1 in float32; "
        f"{none} of {len(own)} runs have no outliers to find", short_of="outliers to find" if none == len(own) else "",
    )  # fmt: skip


def _ratio(dataset: str, runs: Sequence[Run]) -> Claim:
    """R = (lambda_1 + delta) / delta of equation 5, at the end of each run."""
    ratios = {(run.seed, run.eta, run.damping): 1 + float(run.values[0]) / run.damping
              for run in runs if run.damping is not None}  # fmt: skip
    factors = {
        (seed, eta, less): ratio / ratios[seed, eta, more]
        for (seed, eta, less), ratio in ratios.items()
        for lower, more in pairwise(dampings(runs))
        if lower == less
    }
    logs: dict[int, list[float]] = {}
    for (seed, _, _), factor in factors.items():
        logs.setdefault(seed, []).append(math.log(factor))
    return Claim(
        paper=PAPER, where="section 5", expected=1.0, relation=">=",
        measured=geometric_mean(math.exp(sum(own) / len(own)) for own in logs.values()),
        text=f"{dataset}: the curvature ratio 1 + lambda_1 / delta rises from one damping to the next lower: geometric "
        "mean of the factors, at the end", evidence=f"below 1 in {sum(factor < 1 for factor in factors.values())} of "
        f"{len(factors)}, where lambda_1 falls faster than delta; from {min(factors.values()):.3g} to "
        f"{max(factors.values()):.3g}. At equal weights it is an identity",
    )  # fmt: skip


def _unstable(dataset: str, runs: Sequence[Run]) -> Claim:
    least = dampings(runs)[0]
    peaks = [
        float(run.curves["train_loss"].max() / run.curves["train_loss"][0]) for run in runs if run.damping == least
    ]
    calm = [d for d in dampings(runs) if all(_calm(run) for run in runs if run.damping == d)]
    return Claim(
        paper=PAPER, where="section 6", expected=1.0, relation=">=", measured=min(peaks),
        text=f"{dataset}: at small delta a rate of 0.01 is too large: highest training loss at damping {least:g} over "
        "that of the start, least of all runs",
        evidence=f"up to {max(peaks):.3g} times; never above the start at dampings "
        + (", ".join(f"{d:g}" for d in calm) or "none"),
    )  # fmt: skip


def _calm(run: Run) -> bool:
    loss = run.curves["train_loss"]
    return float(loss.max()) <= float(loss[0])


def _signed(where: str, text: str, change: Tensor) -> Claim:
    """That a change is positive, in the mean over seeds."""
    return Claim(
        paper=PAPER,
        where=where,
        text=text,
        expected=RISE,
        relation=">=",
        measured=_mean(change),
        evidence=_seen(change),
    )


def _mean(change: Tensor) -> Estimate:
    return mean(change.tolist(), convention="percentage points, mean over seeds of differences at equal seed")


def _seen(change: Tensor) -> str:
    return f"{len(change)} seeds, from {change.min():+.2f} to {change.max():+.2f} points"


def _check(results: Results) -> None:
    grids = set()
    for dataset, runs in results.items():
        seeds = {run.seed for run in runs}
        if len(seeds) < 2:
            raise ValueError(f"{dataset}: error bars need two seeds or more, got {sorted(seeds)}")
        grid = {seed: frozenset((run.damping, run.eta) for run in runs if run.seed == seed) for seed in seeds}
        if len(runs) != sum(map(len, grid.values())) or len(set(grid.values())) > 1:
            raise ValueError(f"{dataset}: expected the same dampings and etas for every seed, each once")
        grids |= set(grid.values())
    if len(grids) != 1 or len(dampings(runs)) < 2 or len(etas(runs)) < 2:
        raise ValueError("expected one grid of two dampings and two etas or more for all data sets")


# ------------------------------------------------------------------------------------------------- files


def plain_reference(dataset: str, entry: Reference) -> dict[str, Any]:
    """A reference as plain data."""
    distances = {f"{damping:g}": float(f"{value:.5g}") for damping, value in entry.distances.items()}
    return {
        "dataset": dataset, "seed": entry.seed, "after": entry.after, "converged": entry.converged,
        "distances": distances,
    }  # fmt: skip


def from_plain_reference(data: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Reference, ...]]:
    """The references that `plain_reference` was given, by data set.

    Example:
        >>> one = {"dataset": "MNIST", "seed": 0, "after": 5, "converged": 9, "distances": {"0.1": 0.5}}
        >>> plain_reference("MNIST", from_plain_reference([one])["MNIST"][0]) == one
        True
    """
    found: dict[str, tuple[Reference, ...]] = {}
    for entry in data:
        distances = MappingProxyType({float(damping): value for damping, value in entry["distances"].items()})
        reference = Reference(
            seed=entry["seed"], after=entry["after"], converged=entry["converged"], distances=distances
        )
        found[entry["dataset"]] = (*found.get(entry["dataset"], ()), reference)
    return found


def plain(dataset: str, runs: Sequence[Run], digits: int = 5) -> list[dict[str, Any]]:
    """Runs as plain data, numbers to `digits` digits."""

    def short(values: Tensor) -> list[float]:
        return [float(f"{x:.{digits}g}") for x in values.tolist()]

    return [
        {"dataset": dataset, "seed": run.seed, "damping": run.damping, "eta": run.eta, "steps": list(run.steps)}
        | {key: short(curve) for key, curve in run.curves.items()}
        | {"values": short(run.values), "residuals": short(run.residuals)}
        for run in runs
    ]


def from_plain(data: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Run, ...]]:
    """The runs that `plain` was given, by data set."""
    found: dict[str, tuple[Run, ...]] = {}
    for entry in data:
        curves = {key: torch.tensor(entry[key], dtype=torch.float64) for key in MEANING}
        run = Run(
            seed=entry["seed"], damping=entry["damping"], eta=entry["eta"], steps=tuple(entry["steps"]),
            curves=MappingProxyType(curves), values=torch.tensor(entry["values"], dtype=torch.float64),
            residuals=torch.tensor(entry["residuals"], dtype=torch.float64),
        )  # fmt: skip
        found[entry["dataset"]] = (*found.get(entry["dataset"], ()), run)
    return found
