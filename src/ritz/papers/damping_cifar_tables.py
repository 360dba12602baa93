"""What seed 004 prints of VGG-16 on CIFAR-100: tables 1 and 2, and the largest stable rates of section 8.

Table 1 has accuracies on validation images, table 2 on test images, and so have the numbers that are put beside them.
Numbers are short of whole training; orders, of lambda_1 too, are judged on the runs that there are.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..models import vgg16
from .base import Claim
from .damping_cifar import ADAM, ADAM_D, RATES, SGD, STUDIES, TABLE1, Arm
from .damping_cifar_kinds import BETTER, DIVERGING, PAPER, SAME_ACCURACY, difference, diverges, faster, over_seeds
from .damping_cifar_runs import Runs, accuracy, between, quotient, variant
from .experiment import Rows
from .over_seeds import welch

TABLE2 = {SGD: (65.3, 0.6), ADAM_D: (65.5, 0.7), ADAM: (61.9, 0.4)}  # mean, and what is printed after +-
SPREAD = 0.7  # of an accuracy of table 1, which has one seed: what table 2 has after +-
STABLE = {"SGD": 0.01, "Adam": 0.12, "KFAC": 0.32}  # section 8
ONE_PLACE = 0.75  # relative: one place on a grid of factors of about 3


def _printed(runs: Runs, where: str, arm: Arm, expected: float, tolerance: float, which: str, note: str = "") -> Claim:
    return Claim(
        paper=PAPER, where=where, text=f"{arm.label}: accuracy", expected=expected, tolerance=tolerance,
        measured=over_seeds(runs.accuracy(arm, which), f"% of the {which} images"), evidence=runs.told(arm) + note,
        short_of=runs.short_of(arm),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- table 2


def table2(runs: Runs) -> list[Claim]:
    """Three accuracies, their differences, and who is ahead half-way."""
    found = [_printed(runs, "table 2", arm, mean, spread, "test") for arm, (mean, spread) in TABLE2.items()]
    pairs = {"SGD - Adam": (SGD, ADAM), "Adam-D - Adam": (ADAM_D, ADAM), "Adam-D - SGD": (ADAM_D, SGD)}
    for text, (one, other) in pairs.items():
        (first, plus), (second, minus) = TABLE2[one], TABLE2[other]
        expected, tolerance = round(first - second, 4), math.hypot(plus, minus)
        clear = expected > tolerance  # else the two are as good as each other, which only whole training shows
        found.append(
            difference(
                runs, "table 2, figure 1a" if one == SGD else "table 2", text, one, other, "=", expected=expected,
                tolerance=tolerance, reference=0.0 if clear else None, short_of="" if clear else runs.short_of(one),
            )
        )  # fmt: skip
    found.append(faster(runs, "section 6.3", "Adam-D converges faster than SGD: Adam-D - SGD", ADAM_D, SGD))
    found.append(faster(runs, "section 1", "Adam converges faster than SGD: Adam - SGD", ADAM, SGD))
    return [*found, *printed_claims(), _parameters()]


def printed_claims() -> list[Claim]:
    """What table 2 shows by its numbers alone, those of ImageNet too, +- taken as the spread of its runs.

    Example:
        >>> [claim.verdict for claim in printed_claims()]
        ['holds', 'holds', 'refuted', 'holds', 'holds']
    """
    sgd, damped, adam = TABLE2.values()
    match = '"match or even beat", of which this is the second; that it matches is so'
    cases = (
        ("SGD's lead over Adam on CIFAR-100", sgd, adam, 5, "table 2", ""),
        ("Adam-D's gain over Adam on CIFAR-100", damped, adam, 5, "table 2", ""),
        ("Adam-D's lead over SGD on CIFAR-100", damped, sgd, 5, "section 6.3, table 2", f"; the text has {match}"),
        ("Adam-D's lead over SGD on ImageNet", (76.6, 0.1), (75.7, 0.1), 3, "section 6.3, table 2", ""),
    )
    found = []
    for text, one, other, seeds, where, note in cases:
        gain = welch(one, other, seeds)
        low, high = gain.interval()
        found.append(
            Claim(
                paper=PAPER, where=where, text=f"by the printed numbers {text} is significant: 95 % interval above 0",
                expected=True, measured=bool(low > 0), ours=bool(note),
                evidence=f"{gain.value:.1f} between {low:.2f} and {high:.2f}, {seeds} seeds{note}",
            )
        )  # fmt: skip
    return [
        *found,
        Claim(
            paper=PAPER, where="section 6.3, table 2", text="by the printed numbers Adam-D is ahead of Adam on "
            "ImageNet: points of accuracy", expected=0.0, relation=">=", measured=round(76.6 - 74.04, 2),
            evidence="Adam was run once, so that no error can be given",
        ),
    ]  # fmt: skip


def _parameters() -> Claim:
    """That of section 6.2 which needs no training."""
    count = sum(parameter.numel() for parameter in vgg16().parameters())
    return Claim(
        paper=PAPER, where="section 6.2", text="VGG-16 has over 16 million parameters", expected=16e6, relation=">=",
        measured=count, evidence="of the published code's VGG-16 with 100 outputs; the paper prints no exact count",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- table 1


def table1(runs: Runs) -> list[Claim]:
    """Two numbers of every arm, what more damping does at one rate, and what a lower rate does at one delta / alpha."""
    found = []
    for arm, (norm, printed) in TABLE1.items():
        found.append(_printed(runs, "table 1", arm, printed, SPREAD, "val", _note(arm)))
        found.append(_norm(runs, arm, norm))
    rows = list(TABLE1)
    for one, other in pairwise(rows):
        if (one.method, one.lr) == (other.method, other.lr):  # each row of these pairs has the next damping
            small, large = sorted((one, other), key=lambda arm: arm.damping)
            found.append(_sharper(runs, "more damping, smaller lambda_1", small, large))
            better, worse = sorted((small, large), key=lambda arm: -TABLE1[arm][1])
            text = "more damping helps" if better == large else "over-damping harms"
            clear = TABLE1[better][1] - TABLE1[worse][1] > math.hypot(SPREAD, SPREAD)  # else the paper states no order
            where = "section 6.3, table 1" if clear else "table 1"
            text = f"{text}: {better.label} - {worse.label}"
            found.append(difference(runs, where, text, better, worse, ours=not clear))
    constant = [arm for arm in rows if arm.method == "KFAC" and math.isclose(arm.damping, 10 * arm.lr)]
    for more, less in pairwise(constant):
        found.append(_sharper(runs, "lower rate at constant delta / alpha, larger lambda_1", less, more))
    if len(constant) > 1:
        found += _constant_ratio(runs, constant[0], constant[-1])
    lowest = [arm for arm in rows if arm.method == "KFAC" and arm.lr == constant[-1].lr] if constant else []
    if len(lowest) > 1:
        found.append(_drop(runs, lowest[0], lowest[-1]))
        found += [diverges(runs, "section 6.3", arm, 0.0) for arm in lowest[1:]]  # "efficiently trains"
    return found


def _note(arm: Arm) -> str:
    """What else the paper says of an arm of table 1."""
    if arm.label in DIVERGING:
        return ". Section 7.2 has this setting diverge: the paper contradicts itself"
    if arm.method == "KFAC" and arm.damping == 0.1:
        which = "as the table has it" if arm.lr == 0.1 else "as the constant delta / alpha of the text needs it"
        return f". One entry of the table, with alpha {which}"
    return ""


def _norm(runs: Runs, arm: Arm, printed: float) -> Claim:
    norms = [norm for norm in map(_lambda, runs.of(arm)) if norm == norm]
    logs = [math.log(norm / printed) for norm in norms]
    return Claim(
        paper=PAPER, where="table 1", text=f"{arm.label}: lambda_1, log of its ratio to the printed {printed:g}",
        expected=0.0, tolerance=math.log(2), measured=over_seeds(logs, "log of lambda_1 over the printed"),
        evidence=f"{', '.join(f'{norm:.3g}' for norm in norms) or 'no run that was trained'}{_how(runs.of(arm))}. "
        f"{runs.told(arm)}{_note(arm)}", short_of=runs.short_of(arm),
    )  # fmt: skip


def _lambda(row: Mapping[str, Any]) -> float:
    """Of a network that has learned something: what others have is that of their start, or of nothing."""
    return float(row["lambda_max"]) if row["state"] == "trained" and row.get("lambda_max", 0) > 0 else math.nan


def _how(rows: Rows) -> str:
    row = next((row for row in rows if "lanczos_steps" in row), None)
    return f", by {row['lanczos_steps']} steps on {row['images']:,} of 45,000 images" if row else ""


def _sharper(runs: Runs, text: str, sharp: Arm, flat: Arm) -> Claim:
    """That one arm ends with a larger lambda_1 than another."""
    logs = [math.log(_lambda(one) / _lambda(two)) for one, two in runs.pairs(sharp, flat)]
    logs = [one for one in logs if one == one]
    return Claim(
        paper=PAPER, where="section 6.3, table 1", expected=0.0, relation=">=",
        text=f"{text}: log ratio, {sharp.label} over {flat.label}",
        measured=over_seeds(logs, "log of lambda_1 over lambda_1, at equal seed"), short_of=variant(sharp),
        evidence=f"at equal seed {', '.join(f'{one:.2f}' for one in logs) or 'none'}{_how(runs.of(sharp))}. "
        f"{runs.told(sharp, flat)}",
    )  # fmt: skip


def _constant_ratio(runs: Runs, high: Arm, low: Arm) -> list[Claim]:
    """From the highest rate to the lowest at constant delta / alpha: 35 % error to 37.8 %, at equal training."""
    where, name = "section 6.3, table 1", f"{high.label} - {low.label}"
    drop = round(TABLE1[high][1] - TABLE1[low][1], 4)
    text = f"lower rate at constant delta / alpha, training is unchanged: {name}, in training"
    unchanged = difference(
        runs,
        where,
        text,
        high,
        low,
        "=",
        expected=0.0,
        tolerance=SAME_ACCURACY,
        which="train",
        short_of=runs.short_of(low),
    )
    text = f"lower rate at constant delta / alpha, generalisation suffers: {name}"
    suffers = difference(
        runs, where, text, high, low, "=", expected=drop, tolerance=math.hypot(SPREAD, SPREAD), reference=0.0,
    )  # fmt: skip
    return [unchanged, suffers]


def _drop(runs: Runs, large: Arm, small: Arm) -> Claim:
    """That less damping costs more on test images than on training images."""
    change = [
        accuracy(one) - accuracy(two) - accuracy(one, "train") + accuracy(two, "train")
        for one, two in runs.pairs(large, small)
    ]
    return Claim(
        paper=PAPER, where="section 6.3", text=f"less damping costs more in test than in training accuracy, from "
        f"{large.label} to {small.label}", expected=BETTER, relation=">=", short_of=variant(large),
        measured=over_seeds(change, "points, at equal seed"), evidence=runs.told(large, small),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------- section 8


def stable(runs: Runs) -> list[Claim]:
    """The largest stable rates at damping 1, and their ratios.

    A rate is stable at which every seed has left chance, and is not at which one is lost; one at which seeds are still
    at chance says nothing.
    """
    found, largest, short = [], {}, {}
    for method, rate in STABLE.items():
        arms = [arm for arm in STUDIES["stable"].arms if arm.method == method]
        steady = [arm.lr for arm in arms if {row["state"] for row in runs.of(arm)} == {"trained"}]
        lost = [arm.lr for arm in arms if any(row["state"] == "lost" for row in runs.of(arm))]
        largest[method], short[method] = between(max(steady, default=0.0), lost), runs.short_of(arms[0])
        found.append(
            Claim(
                paper=PAPER, where="section 8", text=f"{method}: largest stable rate at damping 1", expected=rate,
                tolerance=rate * ONE_PLACE, measured=largest[method], short_of=short[method],
                evidence=f"of {', '.join(format(rate, 'g') for rate in RATES)}; {_states(runs, arms)}",
            )
        )  # fmt: skip
    notes = {
        "Adam": "m <- 0.9 m + 0.1 g moves a tenth as far as SGD's m <- 0.9 m + g: a ratio of 10 is no gain",
        "KFAC": "steps are clipped by kl_clip, which holds them down at any rate; those of SGD and Adam are not",
    }
    for method, other in (("Adam", "SGD"), ("KFAC", "SGD"), ("KFAC", "Adam")):
        printed = STABLE[method] / STABLE[other]
        found.append(
            Claim(
                paper=PAPER, where="section 8", text=f"{method}: its largest stable rate over that of {other}",
                expected=printed, tolerance=(printed - 1) * ONE_PLACE, reference=1.0,
                measured=quotient(largest[method], largest[other]), short_of=short[method],
                evidence=f"{notes[method]}; {_length(runs)}",
            )
        )  # fmt: skip
    tenth = Claim(
        paper=PAPER, where="section 8", text="Adam estimates sharp directions: its largest stable rate over ten times "
        "that of SGD, which its momentum alone gives", expected=1.0, relation=">=", ours=True,
        measured=quotient(largest["Adam"], largest["SGD"], 0.1), evidence=f"{notes['Adam']}; printed are 0.12 and "
        f"0.01, a ratio of 1.2 in this count; {_length(runs)}",
    )  # fmt: skip
    return [*found, tenth]


def _states(runs: Runs, arms: Sequence[Arm]) -> str:
    """How the runs ended, rate by rate."""
    told = []
    for arm in arms:
        states = [row["state"] for row in runs.of(arm)]
        told.append(f"{arm.lr:g}: " + (", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)) or "not run"))
    return f"{'; '.join(told)}. {_length(runs)}"


def _length(runs: Runs) -> str:
    own = [row for rows in runs.rows.values() for row in rows if row["epoch"]]
    epochs = max((row["epoch"][-1] for row in own), default=0)
    best = max((accuracy(row) for row in own), default=math.nan)
    fewest = min(map(len, runs.rows.values()), default=0)
    return f"{epochs} of 300 epochs, {fewest} seeds, test accuracies up to {best:.1f} %"
