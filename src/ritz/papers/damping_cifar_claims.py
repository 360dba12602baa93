"""What seed 004 says of VGG-16 on CIFAR-100, beside the runs of `damping_cifar`.

Numbers are accuracies on the test images in per cent, means over seeds with 95 % intervals by Student's t; differences
are taken at equal seed. A run that was lost counts as chance, 1 %; where none of two arms has left chance, nothing is
decided. At the short budget a printed number cannot come out, and is not refuted (`Claim.short_of`); the claims that
decide are differences. A mean of fewer than three seeds decides nothing, and of runs that were not begun in time
nothing is said; pairs are those of the seeds that both arms have. Nor is what the paper says of its own KFAC refuted by
one whose averages are debiased. Where the paper compares a learned damping without dropout with a flat one with
dropout, both comparisons are made: its own, and the one at equal dropout. Seconds are those of runs that share one
device with others, several at a time, so that they tell ratios, roughly, and no speeds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..results import Estimate
from .base import Claim, Relation
from .damping_cifar import (
    ADAM,
    ADAM_D,
    DECAYS,
    LARGE_EPS,
    LOW,
    RAMP,
    RAMP_LEARNED,
    RATES,
    SGD,
    SGD_THIRD,
    SMALL_EPS,
    STUDIES,
    TABLE1,
    Arm,
    study,
)  # fmt: skip
from .damping_cifar_runs import Runs, accuracy, at_time, between, quotient, variant
from .experiment import Progress, Rows, Setting
from .over_seeds import mean, ratio

PAPER = "seed 004"
TABLE2 = {SGD: (65.3, 0.6), ADAM_D: (65.5, 0.7), ADAM: (61.9, 0.4)}  # mean, and what is printed after +-
BETTER = 0.01  # points: one of the 10,000 images
SAME_ACCURACY = 1.0  # points: two accuracies that the paper calls comparable
SAME_DAMPING = 0.2  # two trajectories that coincide: difference of their means, relative
DEBIASED = "with debiased averages"  # what is not in the published code is said to be so
SHARED = "seconds of runs that shared one device"
STABLE = {"SGD": 0.01, "Adam": 0.12, "KFAC": 0.32}  # section 8
LEAST_SEEDS = 3  # of a mean that decides: two may agree by chance


def run(item: str, setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train what an item of the paper needs, and judge what the paper says of it.

    Args:
        item: A key of `damping_cifar.STUDIES`: "table2", "figure12", ...
        setting, progress: As any experiment takes them.
    """
    rows = study(item, setting, progress)
    return rows, claims(item, rows)


def claims(item: str, rows: Rows) -> list[Claim]:
    """What the paper says of an item, beside the rows that `damping_cifar.study` gave.

    Example:
        >>> ends = {SGD: 40.0, ADAM_D: 42.0, ADAM: 41.0}
        >>> curves = {"epoch": [1], "train_accuracy": [50.0], "val_accuracy": [40.0], "state": "trained"}
        >>> rows = [
        ...     {"arm": arm.label, "seed": seed, **curves, "test_accuracy": [end + seed / 10]}
        ...     for arm, end in ends.items()
        ...     for seed in range(3)
        ... ]
        >>> [(claim.text, claim.verdict) for claim in claims("table2", rows)][-2:]  # printed: +3.6 and +0.2
        [('Adam-D - Adam', 'holds in direction'), ('Adam-D - SGD', 'not decidable')]
    """
    return _CLAIMS[item](Runs(rows))


# -------------------------------------------------------------------------------------------- kinds of claims


def _mean(values: Tensor | Sequence[float], about: str) -> Estimate:
    """The mean over seeds; without an interval where they are too few."""
    found = mean(map(float, values), convention=f"{about}, mean over seeds")
    return found if len(values) >= LEAST_SEEDS else replace(found, stderr=math.nan)


def _difference(
    runs: Runs, where: str, text: str, first: Arm | str, second: Arm | str, relation: Relation = ">=", *,
    expected: float = BETTER, tolerance: float = 0.0, reference: float | None = None, which: str = "test",
    share: float = 1.0,
) -> Claim:  # fmt: skip
    """One arm less another, in points at equal seed."""
    pairs = runs.pairs(first, second)
    change = [accuracy(one, which, share) - accuracy(two, which, share) for one, two in pairs]
    mean = _mean(change, f"points of {which} accuracy, at equal seed")
    between = f"from {min(change):+.2f} to {max(change):+.2f}" if change else "no seed of both"
    return Claim(
        paper=PAPER, where=where, text=text, expected=expected, relation=relation, tolerance=tolerance,
        reference=reference, measured=mean if runs.decided(first, second) else math.nan,
        evidence=f"{between}. {runs.told(first, second)}",
    )  # fmt: skip


def _faster(runs: Runs, where: str, text: str, first: Arm | str, second: Arm | str) -> Claim:
    """Ahead on the training images half-way."""
    return _difference(runs, where, f"{text}: training accuracy half-way", first, second, which="train", share=0.5)


def _diverges(runs: Runs, where: str, arm: Arm, expected: float = 1.0) -> Claim:
    """A run that is lost early is lost; one that is not may be so later, and is short of the paper's epochs."""
    text = f"{arm.label}: {'diverges' if expected else 'trains'}, the share of runs that are lost"
    share = runs.lost(arm) if len(runs.of(arm)) >= LEAST_SEEDS else math.nan
    early = share == 1 if expected else share > 0
    return Claim(
        paper=PAPER, where=where, text=text, expected=expected, measured=share, evidence=runs.told(arm),
        short_of=variant(arm) if early else runs.short_of(arm),
    )  # fmt: skip


def _printed(runs: Runs, where: str, arm: Arm, expected: float, tolerance: float) -> Claim:
    return Claim(
        paper=PAPER, where=where, text=f"{arm.label}: accuracy", expected=expected, tolerance=tolerance,
        measured=_mean(runs.accuracy(arm), "% of the test images"), evidence=runs.told(arm),
        short_of=runs.short_of(arm),
    )  # fmt: skip


def _in_time(runs: Runs, where: str, arm: Arm) -> Claim:
    """An arm less SGD after as many seconds, those of the one that ended first."""
    pairs = runs.pairs(arm, SGD)
    ends = [min(row["run_seconds"] for row in pair) for pair in pairs]
    change = [at_time(row, end) - at_time(base, end) for (row, base), end in zip(pairs, ends, strict=True)]
    early = sum(base["run_seconds"] < row["run_seconds"] for row, base in pairs)
    mean = _mean(change, "points of test accuracy, at equal seed and seconds")
    own, other = (sum(pair[side]["run_seconds"] for pair in pairs) / max(len(pairs), 1) for side in (0, 1))
    return Claim(
        paper=PAPER, where=where, text=f"{arm.label} - SGD, at equal time", expected=BETTER, relation=">=",
        measured=mean if runs.decided(arm, SGD) else math.nan,
        evidence=f"{SHARED}, not all with the same others, whole ones {own:.0f} and {other:.0f}; SGD had ended first "
        f"in {early} of {len(pairs)}, and the other counts as it was then. {runs.told(arm, SGD)}",
    )  # fmt: skip


def _cost(runs: Runs, learned: Arm, flat: Arm) -> Claim:
    seconds = [{row["seed"]: row["run_seconds"] / row["steps"] for row in runs.of(arm)} for arm in (flat, learned)]
    enough = len(runs.pairs(learned, flat)) >= LEAST_SEEDS
    return Claim(
        paper=PAPER, where="section 7.1", expected=2.0, relation="<=", measured=ratio(*seconds) if enough else math.nan,
        text="learned damping at most doubles the time of an epoch: ratio, with the 8 batches every 100 steps of the "
        "published code (the text has 79)", evidence=f"{SHARED}: a ratio of two runs has their noise. "
        f"{runs.told(learned, flat)}",
    )  # fmt: skip


def _beside(runs: Runs, where: str, learned: Arm) -> list[Claim]:
    """A learned arm beside flat ones at equal dropout: at its start, and at its mean; once where these are one."""
    found = []
    start = learned.at(learned.damping).label
    mean = next((row["flat_at_mean"] for row in runs.of(learned)), start)
    for what, flat in {"start": start, "mean": mean}.items() if start != mean else [("start and mean", start)]:
        text = f"{learned.label} beats flat damping at its {what} ({flat})"
        found += [_difference(runs, where, text, learned, flat), _faster(runs, where, text, learned, flat)]
    late = "; the learned run has dropout until its first refresh, the flat one never"
    late = late if learned.mode == "until_refresh" else ""
    return [replace(claim, evidence=claim.evidence + late) for claim in found]


def _dropout(runs: Runs, where: str, learned: Arm) -> Claim:
    text = f"{learned.label}: that the published code, not the text, trains it without dropout makes no difference: "
    return _difference(
        runs, f"{where}, a control", f"{text}without - with", replace(learned, dropout=False),
        replace(learned, dropout=True), "=", expected=0.0, tolerance=SAME_ACCURACY,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- the items


def _table2(runs: Runs) -> list[Claim]:
    found = [_printed(runs, "table 2", arm, mean, spread) for arm, (mean, spread) in TABLE2.items()]
    for text, other in (("Adam-D - Adam", ADAM), ("Adam-D - SGD", SGD)):
        (first, one), (second, two) = TABLE2[ADAM_D], TABLE2[other]
        expected, tolerance = round(first - second, 4), math.hypot(one, two)
        clear = expected > tolerance  # else the two are as good as each other, which only whole training shows
        claim = _difference(
            runs, "table 2", text, ADAM_D, other, "=", expected=expected, tolerance=tolerance,
            reference=0.0 if clear else None,
        )  # fmt: skip
        found.append(claim if clear else replace(claim, short_of=runs.short_of(ADAM_D)))
    return found


def _figure12(runs: Runs) -> list[Claim]:
    where, high, low = f"figure 12, {DEBIASED}", _arm("figure12", 0.1), _arm("figure12", 0.03)
    learned = _arm("figure12", 0.03, learned=True)
    found = [_diverges(runs, where, low), _diverges(runs, where, high, 0.0)]
    for arm in (replace(learned, dropout=False), learned):
        found.append(_difference(runs, where, f"{arm.label} - flat 0.1 with dropout", arm, high))
        found.append(_faster(runs, where, f"{arm.label} - flat 0.1 with dropout", arm, high))
        found.append(_difference(runs, where, f"{arm.label} - SGD, of more epochs", arm, SGD))
        found.append(_difference(runs, where, f"{arm.label} - SGD, at equal epochs", arm, SGD_THIRD))
        found.append(_in_time(runs, where, arm))
    return [*found, *_beside(runs, where, learned), _dropout(runs, where, learned), _cost(runs, learned, low)]


def _figure12_dropout(runs: Runs) -> list[Claim]:
    where, arms = f"figure 12, {DEBIASED}, without dropout", STUDIES["figure12-dropout"].arms
    there = [arm for arm in arms if arm.learned and arm.label in runs.rows]
    return [claim for arm in there for claim in _beside(runs, where, arm)]


def _figure12_low(runs: Runs) -> list[Claim]:
    where, learned = f"figure 12, {DEBIASED}", _arm("figure12-low", 0.01, learned=True)
    found = [_diverges(runs, where, _arm("figure12-low", 0.01))]
    for arm in (replace(learned, dropout=False), learned):
        found += [_diverges(runs, where, arm, 0.0), *_beside(runs, where, arm)]
    return [*found, _dropout(runs, where, learned)]


def _figure12_code(runs: Runs) -> list[Claim]:
    where, item = "figure 12, as published", "figure12-code"
    learned, high, low = _arm(item, 0.03, learned=True), _arm(item, 0.1), _arm(item, 0.03)
    found = [_diverges(runs, where, low), _diverges(runs, where, high, 0.0)]
    for arm in (replace(learned, dropout=False), learned):
        found.append(_diverges(runs, where, arm, 0.0))
        found.append(_difference(runs, where, f"{arm.label} - flat 0.1 with dropout", arm, high))
        found.append(_difference(runs, where, f"{arm.label} - flat 0.03 with dropout", arm, low))
        found.append(_difference(runs, where, f"{arm.label} - SGD", arm, SGD))
        found.append(_in_time(runs, where, arm))
    return [*found, _dropout(runs, where, learned)]


def _table1(runs: Runs) -> list[Claim]:
    found = []
    for arm, (norm, accuracy_) in TABLE1.items():
        found.append(_printed(runs, "table 1", arm, accuracy_, 0.7))  # what table 2 has after +-
        norms = [_lambda(row) for row in runs.of(arm)]
        found.append(
            Claim(
                paper=PAPER, where="table 1", text=f"{arm.label}: lambda_1, as a ratio to the printed {norm:g}",
                expected=1.0, tolerance=0.5, measured=_mean([one / norm for one in norms], "lambda_1 over the printed"),
                evidence=f"{', '.join(f'{one:.3g}' for one in norms) or 'none'}{_how(runs.of(arm))}. {runs.told(arm)}",
                short_of=runs.short_of(arm),
            )
        )  # fmt: skip
    for more, less in pairwise(TABLE1):
        if (more.method, more.lr) == (less.method, less.lr):  # each row of these pairs has the next damping
            small, large = sorted((more, less), key=lambda arm: arm.damping)
            found.append(_sharper(runs, small, large))
    return found


def _lambda(row: Mapping[str, Any]) -> float:
    """Of a network that has learned something: what others have is that of their start, or of nothing."""
    return float(row["lambda_max"]) if row["state"] == "trained" and row.get("lambda_max", 0) > 0 else math.nan


def _how(rows: Rows) -> str:
    row = next((row for row in rows if "lanczos_steps" in row), None)
    return f", by {row['lanczos_steps']} steps on {row['images']:,} of 45,000 images" if row else ""


def _sharper(runs: Runs, small: Arm, large: Arm) -> Claim:
    logs = [math.log(_lambda(one) / _lambda(two)) for one, two in runs.pairs(small, large)]
    return Claim(
        paper=PAPER, where="section 6.3, table 1", expected=0.0, relation=">=",
        text=f"more damping, smaller lambda_1: log ratio, {small.label} over {large.label}",
        measured=_mean(logs, "log of lambda_1 over lambda_1, at equal seed"),
        evidence=f"at equal seed {', '.join(f'{one:.2f}' for one in logs) or 'none'}{_how(runs.of(small))}. "
        f"{runs.told(small, large)}",
    )  # fmt: skip


def _figure11(runs: Runs) -> list[Claim]:
    where, item = f"figure 11, {DEBIASED}", "figure11"
    learned = [_arm(item, start, learned=True) for start in LOW]
    flat = [arm for arm in STUDIES[item].arms if not arm.learned]
    there = [arm for arm in flat if runs.of(arm)] or flat[:1]
    best = max(there, key=lambda arm: float(runs.accuracy(arm, "train", 0.5).mean()))
    found = [_diverges(runs, where, arm) for arm in flat[:2]]
    for arm in learned:
        found += [_diverges(runs, where, arm, 0.0), _faster(runs, where, f"{arm.label} - best flat one", arm, best)]
    pairs = runs.pairs(*learned[:2])
    kept = [pair for pair in pairs if all(row["state"] != "lost" for row in pair)]
    means = [torch.tensor([pair[side]["mean_damping"] for pair in kept], dtype=torch.float64) for side in (0, 1)]
    return [
        *found,
        Claim(
            paper=PAPER, where=where, text="learned from alpha and from 3 alpha: the same damping, log ratio of means",
            expected=0.0, tolerance=SAME_DAMPING, measured=_mean((means[1] / means[0]).log(), "at equal seed"),
            evidence=f"means over runs {float(means[0].mean()):.3g} and {float(means[1].mean()):.3g}; "
            f"{len(kept)} of {len(pairs)} pairs in which neither was lost. {runs.told(*learned[:2])}",
        ),
    ]  # fmt: skip


def _figure13(runs: Runs) -> list[Claim]:
    where, item = f"figure 13, {DEBIASED}", "figure13"
    low, start = _arm(item, 1e-4, learned=True), _arm(item, 0.03, learned=True)
    flat, high = _arm(item, 0.03), _arm(item, 0.1)
    last = [row["damping"][-1] if row.get("damping") else math.nan for row in runs.of(start)]
    return [
        _difference(runs, where, f"{low.label} - {flat.label}", low, flat, "=", expected=0.0, tolerance=SAME_ACCURACY),
        _faster(runs, where, f"{low.label} - {flat.label}", low, flat),
        _difference(runs, where, f"{start.label} - {low.label}", start, low),
        _difference(runs, where, f"{start.label} - {high.label}", start, high),
        Claim(
            paper=PAPER, where=where, text=f"{start.label}: the damping reaches 0.1", expected=0.1, tolerance=0.03,
            measured=_mean(last, "damping at the end"), evidence=runs.told(start), short_of=runs.short_of(start),
        ),
    ]  # fmt: skip


def _figure14(runs: Runs) -> list[Claim]:
    where, linear = "figures 14 and 15", replace(RAMP_LEARNED, ramp=False)
    found = [_diverges(runs, where, RAMP)]
    for arm in (replace(RAMP_LEARNED, dropout=False), RAMP_LEARNED):
        found += [_diverges(runs, where, arm, 0.0), _difference(runs, where, f"{arm.label} - SGD", arm, SGD)]
    return [
        *found,
        _difference(runs, where, f"{linear.label} - Adam as it comes", linear, ADAM),
        _difference(
            runs, where, f"{linear.label} - a larger flat eps at a larger rate", linear, ADAM_D, "<=", expected=0.0
        ),
        _difference(runs, where, f"ramp - linear, {RAMP_LEARNED.label}", RAMP_LEARNED, linear),
    ]


def _figure9(runs: Runs) -> list[Claim]:
    found = []
    for decay in DECAYS:
        small, large = (Arm("AdamW", 1e-3, eps, weight_decay=decay) for eps in (SMALL_EPS, LARGE_EPS))
        text = f"larger damping improves, weight decay {decay:g}: {large.label} - {small.label}"
        found.append(_difference(runs, "figure 9", text, large, small))
        found.append(_difference(runs, "figure 9", f"{text}, in training", large, small, which="train"))
    return found


def _stable(runs: Runs) -> list[Claim]:
    """At damping 1 both are gradient descent but for the sharpest directions, and Adam's moment is an average.

    A rate is stable at which every seed has left chance, and is not at which one is lost; one at which seeds are still
    at chance says nothing.
    """
    where, found, largest = "section 8", [], {}
    for method, rate in STABLE.items():
        arms = [arm for arm in STUDIES["stable"].arms if arm.method == method]
        steady = [arm.lr for arm in arms if {row["state"] for row in runs.of(arm)} == {"trained"}]
        lost = [arm.lr for arm in arms if any(row["state"] == "lost" for row in runs.of(arm))]
        largest[method] = between(max(steady, default=0.0), lost)
        found.append(
            Claim(
                paper=PAPER, where=where, text=f"{method}: largest stable rate at damping 1", expected=rate,
                tolerance=rate * 0.75, measured=largest[method],  # one place on a grid of factors of about 3
                evidence=f"of {', '.join(format(rate, 'g') for rate in RATES)}; {runs.told(*arms)}",
                short_of=runs.short_of(arms[0]),
            )
        )  # fmt: skip
    text = "Adam estimates sharp directions: its largest stable rate over that of SGD, the tenth that its momentum is"
    note = "m <- 0.9 m + 0.1 g moves a tenth as far as SGD's m <- 0.9 m + g: at damping 1 a ratio of 10 is no gain"
    clip = "steps are clipped by kl_clip, as in the published code, which holds them down at any rate: SGD's are not"
    for method, share, said, told in (
        ("Adam", 0.1, text, note), ("KFAC", 1.0, "KFAC: its largest stable rate over that of SGD", clip)
    ):  # fmt: skip
        ratio = quotient(largest[method], largest["SGD"], share)
        found.append(
            Claim(
                paper=PAPER, where=where, text=said, expected=1.5, relation=">=", measured=ratio,
                evidence=f"{told}; {_length(runs)}",
            )
        )  # fmt: skip
    return found


def _length(runs: Runs) -> str:
    ends = [row["epoch"][-1] for own in runs.rows.values() for row in own if row["epoch"]]
    fewest = min(map(len, runs.rows.values()), default=0)
    return f"{max(ends, default=0)} of 300 epochs, {fewest} seeds; what the grid leaves open is in the interval"


def _arm(item: str, damping: float, *, learned: bool = False) -> Arm:
    """The KFAC arm of an item, with dropout."""
    wanted = ("KFAC", damping, learned, True)
    return next(a for a in STUDIES[item].arms if (a.method, a.damping, a.learned, a.dropout) == wanted)


_CLAIMS: dict[str, Callable[[Runs], list[Claim]]] = {
    "table2": _table2, "figure12": _figure12, "figure12-dropout": _figure12_dropout, "figure12-low": _figure12_low,
    "figure12-code": _figure12_code,
    "table1": _table1, "figure11": _figure11, "figure13": _figure13, "figure14": _figure14,
    "figure9": _figure9, "stable": _stable,
}  # fmt: skip
