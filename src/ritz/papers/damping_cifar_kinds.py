"""The kinds of claims that are made of runs of `damping_cifar`: numbers, differences, divergence and time."""

import math
from collections.abc import Iterable
from dataclasses import replace

from ..results import Estimate
from .base import Claim, Relation
from .damping_cifar import SGD, TABLE1, Arm
from .damping_cifar_runs import Runs, accuracy, at_time, variant
from .over_seeds import mean, ratio

PAPER = "seed 004"
BETTER = 0.01  # points: one of the 10,000 images
SAME_ACCURACY = 1.0  # points: two accuracies that the paper calls comparable
LEAST_SEEDS = 3  # of a mean that decides: two may agree by chance
QUICKLY = 1000  # steps, three of the paper's hundred epochs: what "very quickly diverges" is lost by then
THREE_TIMES = 2.5  # as many epochs, or more
SHARED = "seconds of runs that shared one device"
DIVERGING = ("KFAC 0.001, flat 0.01",)  # section 7.2 by its values, where table 1 has an accuracy


def over_seeds(values: Iterable[float], about: str) -> Estimate:
    """The mean over seeds; without an interval where they are too few."""
    numbers = [float(value) for value in values]
    found = mean(numbers, convention=f"{about}, mean over seeds")
    return found if len(numbers) >= LEAST_SEEDS else replace(found, stderr=math.nan)


def difference(
    runs: Runs, where: str, text: str, first: Arm | str, second: Arm | str, relation: Relation = ">=", *,
    expected: float = BETTER, tolerance: float = 0.0, reference: float | None = None, which: str = "test",
    share: float = 1.0, short_of: str = "", ours: bool = False,
) -> Claim:  # fmt: skip
    """One arm less another, in points at equal seed; what the paper says of its KFAC is short of it with another."""
    pairs = runs.pairs(first, second)
    change = [accuracy(one, which, share) - accuracy(two, which, share) for one, two in pairs]
    mean = over_seeds(change, f"points of {which} accuracy, at equal seed")
    between = f"from {min(change):+.2f} to {max(change):+.2f}" if change else "no seed of both"
    other = "" if ours else next(filter(None, (variant(arm) for arm in (first, second) if isinstance(arm, Arm))), "")
    return Claim(
        paper=PAPER, where=where, text=text, expected=expected, relation=relation, tolerance=tolerance,
        reference=reference, measured=mean if runs.decided(first, second) else math.nan,
        evidence=f"{between}. {runs.told(first, second)}", short_of=short_of or other, ours=ours,
    )  # fmt: skip


def faster(runs: Runs, where: str, text: str, first: Arm | str, second: Arm | str, *, ours: bool = False) -> Claim:
    """Ahead on the training images half-way."""
    text = f"{text}: training accuracy half-way"
    return difference(runs, where, text, first, second, which="train", share=0.5, ours=ours)


def diverges(
    runs: Runs, where: str, arm: Arm, expected: float = 1.0, *, quickly: bool = False, ours: bool = False
) -> Claim:
    """All runs are meant: a few cannot show it, but one that does otherwise refutes it.

    A run that is lost early is lost; one that is not may be so later, and is short of the paper's epochs. What diverges
    `quickly` is not short of epochs after so many steps.
    """
    word = "very quickly diverges" if quickly else "diverges" if expected else "trains"
    own = runs.of(arm)
    share = runs.lost(arm)
    early = float(share) == 1 if expected else float(share) > 0
    early |= quickly and min((row["steps"] for row in own), default=0) >= QUICKLY
    steps = f", {min(row['steps'] for row in own):,} steps and more" if own and quickly else ""
    twice = ""
    if expected and arm.label in DIVERGING:
        twice = f". Table 1 prints {TABLE1[arm][1]:g} % for this setting: the paper contradicts itself"
    return Claim(
        paper=PAPER, where=where, text=f"{arm.label}: {word}, share of lost runs", expected=expected,
        measured=share if len(own) >= LEAST_SEEDS else math.nan, evidence=f"{runs.told(arm)}{steps}{twice}", ours=ours,
        short_of="; ".join(filter(None, ("" if early else runs.epochs_short(arm), "" if ours else variant(arm)))),
    )  # fmt: skip


def more_epochs(runs: Runs, where: str, arm: Arm, *, ours: bool = False) -> Claim:
    """An arm less SGD, which in the paper has three times as many epochs."""
    own, base = (max((row["epoch"][-1] for row in runs.of(one) if row["epoch"]), default=0) for one in (arm, SGD))
    times = base / own if own and base else 3.0
    short = "" if ours or times >= THREE_TIMES else f"SGD on 3 times as many epochs (here {times:.3g})"
    text = f"{arm.label} - SGD on {times:.3g} times as many epochs (the paper: 3)"
    return difference(runs, where, text, arm, SGD, short_of=short, ours=ours)


def in_time(runs: Runs, where: str, arm: Arm) -> Claim:
    """A question of ours: an arm less SGD after as many seconds, those of the one that ended first."""
    pairs = runs.pairs(arm, SGD)
    ends = [min(row["run_seconds"] for row in pair) for pair in pairs]
    change = [at_time(row, end) - at_time(base, end) for (row, base), end in zip(pairs, ends, strict=True)]
    early = sum(base["run_seconds"] < row["run_seconds"] for row, base in pairs)
    mean = over_seeds(change, "points of test accuracy, at equal seed and seconds")
    own, other = (sum(pair[side]["run_seconds"] for pair in pairs) / max(len(pairs), 1) for side in (0, 1))
    return Claim(
        paper=PAPER, where=where, text=f"{arm.label} - SGD, at equal time", expected=BETTER, relation=">=",
        measured=mean if runs.decided(arm, SGD) else math.nan, ours=True,
        evidence=f"{SHARED}, not all with the same others, whole ones {own:.0f} and {other:.0f}; SGD had ended first "
        f"in {early} of {len(pairs)}, and the other counts as it was then. {runs.told(arm, SGD)}",
    )  # fmt: skip


def cost(runs: Runs, learned: Arm, flat: Arm) -> Claim:
    """What learning adds to the time of a step."""
    seconds = [{row["seed"]: row["run_seconds"] / row["steps"] for row in runs.of(arm)} for arm in (flat, learned)]
    enough = len(runs.pairs(learned, flat)) >= LEAST_SEEDS
    return Claim(
        paper=PAPER, where="section 7.1", expected=2.0, relation="<=", measured=ratio(*seconds) if enough else math.nan,
        text="learned damping at most doubles the time of an epoch: ratio, with the 8 batches every 100 steps of the "
        "published code", evidence=f"{SHARED}: a ratio of two runs has their noise. {runs.told(learned, flat)}",
        short_of="79 batches",
    )  # fmt: skip


def beside(runs: Runs, where: str, learned: Arm) -> list[Claim]:
    """Questions of ours: a learned arm beside flat ones at equal dropout, at its start and at its mean; or at both."""
    found = []
    start = learned.at(learned.damping).label
    mean = next((row["flat_at_mean"] for row in runs.of(learned)), start)
    for what, flat in {"start": start, "mean": mean}.items() if start != mean else [("start and mean", start)]:
        text = f"{learned.label} beats flat damping at its {what} ({flat})"
        found.append(difference(runs, where, text, learned, flat, ours=True))
        found.append(faster(runs, where, text, learned, flat, ours=True))
    late = "; the learned run has dropout until its first refresh, the flat one never"
    late = late if learned.mode == "until_refresh" else ""
    return [replace(claim, evidence=claim.evidence + late) for claim in found]


def dropout(runs: Runs, where: str, learned: Arm) -> Claim:
    """A question of ours: what the dropout is worth that only the published code leaves out."""
    text = f"{learned.label}: that the published code, not the text, trains it without dropout makes no difference: "
    return difference(
        runs, where, f"{text}without - with", replace(learned, dropout=False), replace(learned, dropout=True), "=",
        expected=0.0, tolerance=SAME_ACCURACY, ours=True,
    )  # fmt: skip
