"""What the figures of seed 004 say of VGG-16 on CIFAR-100, beside the runs of `damping_cifar`.

Tables and section 8 are in `damping_cifar_tables`, the kinds of claims that are made in `damping_cifar_kinds`.

Numbers are accuracies on the test images in per cent, means over seeds with 95 % intervals by Student's t; differences
are taken at equal seed. A run that was lost counts as chance, 1 %; where none of two arms has left chance, nothing is
decided. At the short budget a printed number cannot come out, and is not refuted (`Claim.short_of`); the claims that
decide are differences. A mean of fewer than three seeds decides nothing, and of runs that were not begun in time
nothing is said; pairs are those of the seeds that both arms have.

What the paper says of its own KFAC is decided by arms as published alone: debiased ones are short of it. In figure 12,
where both were run, what debiased ones do is a question of ours (`Claim.ours`), and so are flat damping at the start or
the mean of a learned one, equal dropout, equal epochs and equal time. Where the paper compares a learned damping
without dropout with a flat one with dropout, both comparisons are made: its own, and the one at equal dropout. What
"very quickly" diverges is asked of the first thousand steps, not of the whole training. Seconds are those of runs that
share one device with others, several at a time, so that they tell ratios, roughly, and no speeds.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from .base import Claim
from .damping_cifar import (
    ADAM,
    ADAM_D,
    DECAYS,
    LARGE_EPS,
    LOW,
    RAMP,
    RAMP_LEARNED,
    SGD,
    SGD_THIRD,
    SMALL_EPS,
    STUDIES,
    Arm,
    study,
)  # fmt: skip
from .damping_cifar_kinds import (
    BETTER,
    PAPER,
    SAME_ACCURACY,
    beside,
    cost,
    difference,
    diverges,
    dropout,
    faster,
    in_time,
    more_epochs,
    over_seeds,
)  # fmt: skip
from .damping_cifar_runs import Runs, accuracy, damping_at
from .damping_cifar_tables import stable, table1, table2
from .experiment import Progress, Rows, Setting

SAME_DAMPING = 0.2  # two trajectories that coincide: difference of their means, relative
DEBIASED = "with debiased averages"  # what is not in the published code is said to be so


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
        >>> [(claim.text, claim.verdict) for claim in claims("table2", rows)][3:6]  # printed: +3.4, +3.6 and +0.2
        [('SGD - Adam', 'refuted'), ('Adam-D - Adam', 'holds in direction'), ('Adam-D - SGD', 'not decidable')]
    """
    return _CLAIMS[item](Runs(rows))


# -------------------------------------------------------------------------------------------------- figure 12


def _figure12(runs: Runs) -> list[Claim]:
    where, high, low = f"figure 12, {DEBIASED}", _arm("figure12", 0.1), _arm("figure12", 0.03)
    learned = _arm("figure12", 0.03, learned=True)
    found = [diverges(runs, where, low, quickly=True, ours=True), diverges(runs, where, high, 0.0, ours=True)]
    for arm in (replace(learned, dropout=False), learned):
        text = f"{arm.label} - flat 0.1 with dropout"
        found.append(difference(runs, where, text, arm, high, ours=True))
        found.append(faster(runs, where, text, arm, high, ours=True))
        found.append(more_epochs(runs, where, arm, ours=True))
        found.append(difference(runs, where, f"{arm.label} - SGD, at equal epochs", arm, SGD_THIRD, ours=True))
        found.append(in_time(runs, where, arm))
    return [*found, *beside(runs, where, learned), dropout(runs, where, learned), cost(runs, learned, low)]


def _figure12_dropout(runs: Runs) -> list[Claim]:
    where, (never, late, _) = f"figure 12, {DEBIASED}, without dropout", STUDIES["figure12-dropout"].arms
    if never.label not in runs.rows:
        return []
    text = "dropout until the first refresh, as published, makes no difference: learned from 0.03 without - with"
    return [
        *beside(runs, where, never),
        difference(runs, where, text, never, late, "=", expected=0.0, tolerance=SAME_ACCURACY, ours=True),
    ]


def _figure12_low(runs: Runs) -> list[Claim]:
    where, learned = f"figure 12, {DEBIASED}", _arm("figure12-low", 0.01, learned=True)
    found = [diverges(runs, where, _arm("figure12-low", 0.01), quickly=True)]
    for arm in (replace(learned, dropout=False), learned):
        found += [diverges(runs, where, arm, 0.0), *beside(runs, where, arm)]
    return [*found, dropout(runs, where, learned)]


def _figure12_code(runs: Runs) -> list[Claim]:
    where, item = "figure 12, as published", "figure12-code"
    learned, high, low = _arm(item, 0.03, learned=True), _arm(item, 0.1), _arm(item, 0.03)
    found = [diverges(runs, where, low, quickly=True), diverges(runs, where, high, 0.0)]
    for arm in (replace(learned, dropout=False), learned):
        text = f"{arm.label} - flat 0.1 with dropout"
        found += [diverges(runs, where, arm, 0.0), difference(runs, where, text, arm, high)]
        found += [faster(runs, where, text, arm, high), more_epochs(runs, where, arm)]
        text = f"{arm.label} - flat 0.03 with dropout"
        found += [difference(runs, where, text, arm, low, ours=True), in_time(runs, where, arm)]
    found.append(dropout(runs, where, learned))
    found.append(difference(runs, where, f"{low.label} - flat 0.1, both with dropout", low, high, ours=True))
    note = '. Not as published: rates fall by steps, not epochs, and eigenvectors are renewed by refresh="qr"'
    return [replace(claim, evidence=claim.evidence + note) for claim in found]


# ------------------------------------------------------------------------------------------------ other figures


def _figure11(runs: Runs) -> list[Claim]:
    where, item = f"figure 11, {DEBIASED}", "figure11"
    learned = [_arm(item, start, learned=True) for start in LOW]
    flat = [arm for arm in STUDIES[item].arms if not arm.learned]
    there = [arm for arm in flat if runs.of(arm)] or flat[:1]
    best = max(there, key=lambda arm: float(runs.accuracy(arm, "train", 0.5).mean()))
    found = [diverges(runs, where, arm) for arm in flat[:2]]
    found += [diverges(runs, where, arm, 0.0) for arm in flat[3:]]
    note = '. The paper names no values here: it has "low" and "higher" ones'
    found = [replace(claim, evidence=claim.evidence + note) for claim in found]
    for arm in learned:
        found += [diverges(runs, where, arm, 0.0), faster(runs, where, f"{arm.label} - best flat one", arm, best)]
    for arm in learned[:2]:
        found.append(faster(runs, where, f"{arm.label} - from 10 alpha", arm, learned[2]))
    pairs = runs.pairs(*learned[:2])
    kept = [pair for pair in pairs if all(row["state"] != "lost" for row in pair)]
    means = [torch.tensor([pair[side]["mean_damping"] for pair in kept], dtype=torch.float64) for side in (0, 1)]
    return [
        *found,
        Claim(
            paper=PAPER, where=where, text="learned from alpha and from 3 alpha: the same damping, log ratio of means",
            expected=0.0, tolerance=SAME_DAMPING, measured=over_seeds((means[1] / means[0]).log(), "at equal seed"),
            evidence=f"{len(kept)} of {len(pairs)} pairs in which neither was lost. {runs.told(*learned[:2])}",
            short_of=runs.short_of(learned[0]),
        ),
    ]  # fmt: skip


def _figure13(runs: Runs) -> list[Claim]:
    where, item = f"figure 13, {DEBIASED}", "figure13"
    low, start = _arm(item, 1e-4, learned=True), _arm(item, 0.03, learned=True)
    flat, high = _arm(item, 0.03), _arm(item, 0.1)
    largest = [max(row["damping"]) if row.get("damping") else math.nan for row in runs.of(start)]
    name = f"{start.label} - {low.label}"
    return [
        difference(runs, where, f"{low.label} - {flat.label}", low, flat, "=", expected=0.0, tolerance=SAME_ACCURACY),
        faster(runs, where, f"{low.label} - {flat.label}", low, flat),
        faster(runs, where, f"{low.label} - {start.label}", low, start),
        difference(runs, where, f"{name}, in training", start, low, which="train"),
        difference(runs, where, name, start, low),
        difference(runs, where, f"{start.label} - {high.label}", start, high),
        difference(runs, where, f"{start.label} - {high.label}, in training", start, high, which="train"),
        Claim(
            paper=PAPER, where=where, text=f"{start.label}: the damping reaches 0.1: largest damping of a run",
            expected=0.1, tolerance=0.03, measured=over_seeds(largest, "largest damping"), evidence=runs.told(start),
            short_of=runs.short_of(start),
        ),
    ]  # fmt: skip


def _figure14(runs: Runs) -> list[Claim]:
    where, linear, flat = "figures 14 and 15", replace(RAMP_LEARNED, ramp=False), replace(RAMP, ramp=False)
    found = [diverges(runs, where, RAMP)]
    for arm in (replace(RAMP_LEARNED, dropout=False), RAMP_LEARNED):
        found += [diverges(runs, where, arm, 0.0), difference(runs, where, f"{arm.label} - SGD", arm, SGD)]
    low = "; the paper speaks of larger rates with learned damping, this one is lower than both"
    lower = [
        difference(runs, where, f"{linear.label} - Adam as it comes", linear, ADAM, ours=True),
        difference(
            runs, where, f"{linear.label} - a larger flat eps at a larger rate", linear, ADAM_D, "<=", expected=0.0,
            ours=True,
        ),
    ]  # fmt: skip
    return [
        *found,
        *(replace(claim, evidence=claim.evidence + low) for claim in lower),
        difference(runs, where, f"ramp - linear, {RAMP_LEARNED.label}", RAMP_LEARNED, linear),
        _particularly(runs, where, (RAMP_LEARNED, linear, RAMP, flat)),
        _early(runs, RAMP_LEARNED),
    ]


def _particularly(runs: Runs, where: str, arms: tuple[Arm, Arm, Arm, Arm]) -> Claim:
    """That the ramp does more for learned damping than for flat."""
    rows = [{row["seed"]: accuracy(row) for row in runs.of(arm)} for arm in arms]
    seeds = [seed for seed in rows[0] if all(seed in own for own in rows)]
    change = [rows[0][seed] - rows[1][seed] - rows[2][seed] + rows[3][seed] for seed in seeds]
    return Claim(
        paper=PAPER, where=where, text="the ramp helps learned damping more: ramp - linear, learned minus flat",
        expected=BETTER, relation=">=", measured=over_seeds(change, "points of test accuracy, at equal seed"),
        evidence=runs.told(*arms),
    )  # fmt: skip


def _early(runs: Runs, arm: Arm) -> Claim:
    """That the damping rises while the rate does, from a tenth to three tenths of the run."""
    logs = [math.log(damping_at(row, 0.3) / damping_at(row, 0.1)) for row in runs.of(arm)]
    return Claim(
        paper=PAPER, where="figure 15c", text=f"{arm.label}: the damping rises while the rate does, log of that at "
        "0.3 of the run over that at 0.1", expected=0.0, relation=">=", measured=over_seeds(logs, "log ratio"),
        evidence=runs.told(arm),
    )  # fmt: skip


def _figure9(runs: Runs) -> list[Claim]:
    found = []
    note = '; which dampings the paper took it does not say, and it calls the help in training "slight"'
    for decay in DECAYS:
        small, large = (Arm("AdamW", 1e-3, eps, weight_decay=decay) for eps in (SMALL_EPS, LARGE_EPS))
        text = f"larger damping improves, weight decay {decay:g}: {large.label} - {small.label}"
        found.append(difference(runs, "figure 9", text, large, small))
        found.append(difference(runs, "figure 9", f"{text}, in training", large, small, which="train"))
    return [replace(claim, evidence=claim.evidence + note) for claim in found]


def _arm(item: str, damping: float, *, learned: bool = False) -> Arm:
    """The KFAC arm of an item, with dropout."""
    wanted = ("KFAC", damping, learned, True)
    return next(a for a in STUDIES[item].arms if (a.method, a.damping, a.learned, a.dropout) == wanted)


_CLAIMS: dict[str, Callable[[Runs], list[Claim]]] = {
    "table2": table2, "figure12": _figure12, "figure12-dropout": _figure12_dropout, "figure12-low": _figure12_low,
    "figure12-code": _figure12_code,
    "table1": table1, "figure11": _figure11, "figure13": _figure13, "figure14": _figure14,
    "figure9": _figure9, "stable": stable,
}  # fmt: skip
