"""What seeds 000 and 002 say of their networks on CIFAR-100, judged by the rows of `cifar_spectra`.

The papers trained once, we train several seeds. A printed number is compared with the mean over seeds and its Student t
interval, only where the network is the published one, and refuted only by the whole training. What the papers are about
is an order: with weight decay a solution is sharper and generalises better. Both halves are judged, at each step of
weight decay, at equal seed: a ratio by the mean of its logarithm, a difference as it is, and the reference 1 or 0 says
whether at least the direction is there. One seed has no interval and decides none of these; there the directions alone
are judged, curvature, norm, accuracy and gap alike, on one network each as in the papers, by what the measurement
leaves open. Runs that diverged are left out and counted in the evidence; of those that were not begun nothing is said.

Of the sets that are held out, the last 5,000 and the test set, the one that the papers name for a network is judged as
theirs, and the other as a question of ours. The column "a" of seed 002 is read as |w| / 2; of equation 7, which is what
the paper calls a, the direction alone is asked for. Seed 000 speaks of another curvature in evaluation mode for
WideResNet; for the other networks that is a question of ours.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .base import Claim
from .cifar_spectra_numbers import (
    CURVATURE,
    ENDS,
    FIGURE,
    HELD_OUT,
    NAMES,
    PRINTED,
    RATIOS,
    SET,
    TABLE,
    WEIGHT_DECAYS,
    Row,
    change_of,
    change_of_one,
    decay_arm,
    left_open,
    mean_of,
    numbers,
    of_set,
    printed_change,
    short_of,
    told,
)
from .over_seeds import quotient

Step = tuple[float, float]

STEPS: tuple[Step, ...] = (WEIGHT_DECAYS[:2], WEIGHT_DECAYS[1:], ENDS)
EFFECT = 0.25  # an effect is the printed one within a quarter of it, of a ratio's logarithm

# what counts as the same number: a share of it, or percentage points
RELATIVE = {
    "lambda_max": 0.1, "trace_per_param": 0.2, "moment2_per_param": 0.3, "metric_a": 0.05, "gap_loss_val": 0.1,
    "gap_loss_test": 0.1,
}  # fmt: skip
POINTS = 1.0
ROUGHLY = 0.1  # percentage points that leave a training accuracy "roughly constant"

RISES: dict[str, Any] = {"expected": 1.0, "relation": ">="}
FALLS: dict[str, Any] = {"expected": 1.0, "relation": "<="}
EVALUATION = " in evaluation mode"
READ = 'the paper\'s "Frobenius norm" is read as Tr H^2 / P, since |H|_F is at least lambda_1; '
AS_IT_SAYS = 'the paper\'s "Frobenius norm" as it stands, though |H|_F is at least lambda_1; '
NO_MODE = "the paper does not say in which mode BatchNorm is; "
SUPPLEMENT = "table 5 does not say in which mode BatchNorm is, seed 001, figure 6, has it in train mode; "
NOT_PRINTED = "53.9, which is not printed, is the printed 86.3 less 32.4; "
BY_ACCURACIES = "this gap is not printed: it is the printed training accuracy less the other; "
SHORTENED = "the learning rate falls within these few epochs; "
AVERAGED = "Gadam averages from 161/300 of the epochs on, batches are of 128: seed 000 names neither; "
AMENDED = 'the text says O(10^7) for 4.9e-5 against 9.8e-12, and "the regularised" for the one that is not; '


def times(expected: float) -> dict[str, Any]:
    """A claim's fields for a printed ratio: within a quarter of its logarithm, the nearer end on both sides.

    Example:
        >>> {key: round(value, 3) for key, value in times(16.0).items()}
        {'expected': 16.0, 'tolerance': 8.0, 'reference': 1.0}
    """
    nearer = expected ** (1 - EFFECT if expected > 1 else 1 + EFFECT)
    return {"expected": expected, "tolerance": abs(expected - nearer), "reference": 1.0}


def more(expected: float) -> dict[str, Any]:
    """The same for a printed difference."""
    return {"expected": expected, "tolerance": EFFECT * abs(expected), "reference": 0.0}


# -------------------------------------------------------------------------------------------------------- weight decays


def decay_claims(rows: Sequence[Row]) -> list[Claim]:
    """Printed numbers, where the network is the published one, and what changes with weight decay, at equal seed.

    What is about a weight decay that was not run is left out.
    """
    if not rows:
        return []
    network, published, arms = str(rows[0]["network"]), rows[0]["published"], {row["arm"] for row in rows}
    run = [step for step in STEPS if {decay_arm(decay) for decay in step} <= arms]
    alone = {step: _seeds(rows, step) for step in run if len(_seeds(rows, step)) == 1}
    found = _printed_claims(rows, network) if published else []
    for step in run:
        found += _step_claims(rows, network, step) if step not in alone else []
    found += _evaluation_claims(rows, network) if ENDS in run and ENDS not in alone else []
    found += _stability_claims(rows) if network != "allcnn" and decay_arm(5e-4) in arms else []
    return found + mode_claims(rows) + (_pair_claims(rows, network, alone[ENDS].pop()) if ENDS in alone else [])


def _seeds(rows: Sequence[Row], step: Step) -> set[int]:
    """Those of which there is a network at both ends of the step."""
    return set.intersection(*(set(numbers(rows, "train_accuracy", decay_arm(decay))) for decay in step))


def _mode(network: str) -> str:
    """That of the papers' figures and tables."""
    return "eval" if network == "allcnn" else "train"


def _printed_claims(rows: Sequence[Row], network: str) -> list[Claim]:
    found = []
    for line in PRINTED[network]:
        mode, note = line.mode or _mode(network), READ if line.mode else ""
        for decay, number in zip(WEIGHT_DECAYS, line.numbers, strict=True):
            if number is not None and any(row["arm"] == decay_arm(decay) for row in rows):
                at = f"weight decay {decay:g}"
                found.append(_value(rows, (line.paper, line.where), line.key, decay_arm(decay), at, number, mode, note))
    return found


def _value(
    rows: Sequence[Row], source: tuple[str, str], key: str, arm: str, at: str, number: float, mode: str, note: str = ""
) -> Claim:
    """A printed number beside the mean over seeds."""
    return Claim(
        paper=source[0], where=source[1], text=f"{NAMES[key]} at {at}", expected=number,
        measured=mean_of(rows, key, arm, mode),
        tolerance=RELATIVE[key] * abs(number) if key in RELATIVE else POINTS, short_of=short_of(rows, key),
        **of_set(rows[0]["network"], key, note + _seen(rows, key, [arm], mode)),
    )  # fmt: skip


def _step_claims(rows: Sequence[Row], network: str, step: Step) -> list[Claim]:
    """What is printed at both ends of a step: sharpness, then norm, accuracy and gap."""
    figure, table, whole = FIGURE[network], TABLE[network], step == ENDS
    numbered = f"{figure}, with the numbers of seed 002, {table}"  # those of the figure are not in the text
    gaps = "tables 2 and 3" if network == "allcnn" else table

    def change(paper: str, where: str, key: str) -> Claim:
        effect = (times if key in RATIOS else more)(printed_change(network, key, step, paper))
        note = _mode_note(network, paper) if key in CURVATURE else _derived(network, paper, key)
        return _change(rows, step, key, _mode(network), note=note, paper=paper, where=where, **effect)

    found = [change("seed 000", numbered, "lambda_max")]
    for source in (("seed 000", "section 4"), ("seed 002", "section 5")):
        if network == "wideresnet":
            found += _constant_claims(rows, step, *source) if whole else []
        elif network == "preresnet" or not whole:
            found.append(change(*source, "train_accuracy"))
    if whole:
        found += [change("seed 000", f"section 4, {figure}", f"{name}_accuracy") for name in HELD_OUT]
        found += [change("seed 000", "section 4", f"gap_error_{name}") for name in HELD_OUT]
        found += [_change(rows, step, "weight_norm", "eval", paper="seed 000", where="section 4", **FALLS)]
        found += _speed_claims(rows, network, step)
    elif network != "allcnn":
        found += [change("seed 000", f"section 4, {figure}", f"{SET[network]}_accuracy")]
    measures = ("lambda_max", "trace_per_param", "moment2_per_param", "metric_a")
    found += [change("seed 002", table, key) for key in measures]
    equation = f"equation 7, {table}"
    found += [_change(rows, step, "metric_a_eq7", _mode(network), paper="seed 002", where=equation, **FALLS)]
    return found + [
        change("seed 002", gaps, f"gap_{what}_{name}")
        for what in ("loss", "error")
        for name in (HELD_OUT if whole else (SET[network],))
    ]


def _speed_claims(rows: Sequence[Row], network: str, step: Step) -> list[Claim]:
    """With BatchNorm "L2 regularisation reduces convergence speed": the loss after as many epochs, less than all."""
    about: dict[str, Any] = {"expected": 0.0, "relation": ">=", "paper": "seed 000", "where": "section 4"}
    said = " after equal epochs, as weight decay slows convergence,"
    return [_change(rows, step, "train_loss", "eval", said, SHORTENED, **about)] if network != "allcnn" else []


def _mode_note(network: str, paper: str) -> str:
    """What a table or a figure leaves open of BatchNorm."""
    return {"preresnet": NO_MODE, "wideresnet": SUPPLEMENT if paper == "seed 002" else ""}.get(network, "")


def _derived(network: str, paper: str, key: str) -> str:
    """Which of the numbers that are expected of seed 000 is not printed."""
    if paper == "seed 000" and network == "allcnn" and key in ("val_accuracy", "test_accuracy"):
        return NOT_PRINTED
    return BY_ACCURACIES if paper == "seed 000" and network != "allcnn" and key.startswith("gap_error") else ""


def _constant_claims(rows: Sequence[Row], step: Step, paper: str, where: str) -> list[Claim]:
    """Training accuracy "remains roughly constant": what networks have that have learned their images."""
    about: dict[str, Any] = {"expected": 0.0, "tolerance": ROUGHLY, "short_of": short_of(rows)}
    return [_change(rows, step, "train_accuracy", "eval", paper=paper, where=where, **about)]


def _change(
    rows: Sequence[Row], step: Step, key: str, mode: str, said: str = "", note: str = "", **about: Any
) -> Claim:
    """How a number changes from one weight decay to another; `about` has what is expected."""
    arms = [decay_arm(decay) for decay in step]
    kind = "ratio" if key in RATIOS else "difference"
    return Claim(
        text=f"{NAMES[key]}{said} from weight decay {step[0]:g} to {step[1]:g}: {kind}",
        measured=change_of(rows, key, arms, mode),
        **of_set(rows[0]["network"], key, note + _seen(rows, key, arms, mode)), **about,
    )  # fmt: skip


def _seen(rows: Sequence[Row], key: str, arms: Sequence[str], mode: str) -> str:
    """What was run and, of lambda_1, how far it is known."""
    if key not in CURVATURE:
        return told(rows, arms)
    return told(rows, arms, mode) + (left_open(rows, arms, mode) if key == "lambda_max" else "")


def _stability_claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 4 of seed 000: lambda_1 against 2 / learning rate."""
    arm = decay_arm(5e-4)
    about: dict[str, Any] = {
        "paper": "seed 000", "where": "section 4", "measured": mean_of(rows, "lambda_max", arm, "train"),
        "evidence": _seen(rows, "lambda_max", [arm], "train"), "short_of": short_of(rows, "lambda_max"),
    }  # fmt: skip
    return [
        Claim(
            text="lambda_1 at weight decay 5e-4 is beyond 2 / 0.1, the limit of the first learning rate",
            expected=20.0, relation=">=", **about,
        ),
        Claim(
            text="lambda_1 at weight decay 5e-4 is less than half of 2 / 0.001, the limit of the last one",
            expected=1000.0, relation="<=", **about,
        ),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------- modes of BatchNorm


def _evaluation_claims(rows: Sequence[Row], network: str) -> list[Claim]:
    """BatchNorm in evaluation mode: figure 8 of seed 000, figure 1 of seed 002, and what tables may be in."""
    if network == "allcnn":
        return []

    def change(paper: str, where: str, key: str, **about: Any) -> Claim:
        return _change(rows, ENDS, key, "eval", EVALUATION, paper=paper, where=where, **about)

    tables = [
        change("seed 002", TABLE[network], key, ours=True, **RISES) for key in ("trace_per_param", "moment2_per_param")
    ]
    if network == "preresnet":
        figures = (("seed 000", FIGURE[network]), ("seed 002", TABLE[network]))
        return [change(*figure, "lambda_max", ours=True, **RISES) for figure in figures] + tables
    squares = times(4.9e-5 / 9.8e-12)
    return [
        change("seed 000", "figure 8", "lambda_max", **times(1000.0)),
        change("seed 000", "figure 8", "moment2_per_param", note=READ + AMENDED, **squares),
        change("seed 000", "figure 8", "frobenius_norm", note=AS_IT_SAYS, ours=True, **squares),
        change("seed 002", "figure 1", "lambda_max", **RISES),
        *(
            _change(
                rows, ENDS, key, "eval", paper="seed 002", where="figure 1", **more(printed_change(network, key, ENDS))
            )
            for key in (f"{name}_accuracy" for name in HELD_OUT)
        ),
        *tables,
    ]


def mode_claims(rows: Sequence[Row]) -> list[Claim]:
    """The annex of seed 000 finds another curvature in evaluation mode; which is the wider one it does not say."""
    own = [row for row in rows if {"eval", "train"} <= row.keys()]
    if not own:
        return []
    arms = list(dict.fromkeys(row["arm"] for row in own))
    apart = [quotient(*sorted(row[mode]["lambda_max"] for mode in ("eval", "train"))) for row in own]
    seen = "; ".join(
        f"{mean_of(rows, 'lambda_max', arm, 'eval').value:.3g} and "
        f"{mean_of(rows, 'lambda_max', arm, 'train').value:.3g} at {arm}"
        for arm in arms
    )
    return [
        Claim(
            paper="seed 000", where="annex, figure 8",
            text="lambda_1 differs between evaluation and train mode: larger over smaller value, where they are "
            "nearest", expected=1 + RELATIVE["lambda_max"], relation=">=",
            measured=min(apart, key=lambda one: float(one.interval()[0])),
            evidence=f"in evaluation and in train mode {seen}; {told(rows, arms, 'either')}",
            ours=own[0]["network"] != "wideresnet",
        )
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------- one network each


def _pair_claims(rows: Sequence[Row], network: str, seed: int) -> list[Claim]:
    """Directions on the two networks of one seed, as the papers have them on one network each.

    Not that of the gap in loss: how far the loss of other images may be from this one is not in the rows.
    """
    first, second = (
        next(row for row in rows if (row["seed"], row["arm"]) == (seed, decay_arm(decay))) for decay in ENDS
    )

    def one(
        key: str, rises: bool, where: str, mode: str = "eval", said: str = "", paper: str = "seed 000"
    ) -> Claim:  # fmt: skip
        kind, expected = ("ratio", 1.0) if key in RATIOS else ("difference", 0.0)
        error = "measurement" if key in RATIOS else "images"
        arms = [decay_arm(decay) for decay in ENDS]
        note = _mode_note(network, paper) if key in CURVATURE and not said else ""
        seen = f"one seed, with the error of the {error} and not that of another training; "
        return Claim(
            paper=paper, where=where, expected=expected, relation=">=" if rises else "<=",
            text=f"{NAMES[key]}{said} {'rises' if rises else 'falls'} from weight decay {ENDS[0]:g} to {ENDS[1]:g}, "
            f"one network each: {kind}", measured=change_of_one(first, second, key, mode),
            **of_set(network, key, note + seen + _seen([first, second], key, arms, mode)),
        )  # fmt: skip

    found = [one("lambda_max", True, FIGURE[network], _mode(network))]
    found += [one("lambda_max", True, "figure 8", "eval", EVALUATION)] if network == "wideresnet" else []
    found += [one("weight_norm", False, "section 4")]
    found += [one(f"{name}_accuracy", True, "section 4") for name in HELD_OUT]
    found += [one(f"gap_error_{name}", False, "section 4") for name in HELD_OUT]
    where, sharpness = f"section 5, {TABLE[network]}", ("lambda_max", "trace_per_param", "moment2_per_param")
    metric: dict[str, Any] = {"rises": False, "paper": "seed 002"}
    return [
        *found,
        *(one(key, True, where, _mode(network), paper="seed 002") for key in sharpness),
        one("metric_a", where=where, **metric),
        one("metric_a_eq7", where=f"equation 7, {TABLE[network]}", mode=_mode(network), **metric),
        *(one(f"gap_error_{name}", where=where, **metric) for name in HELD_OUT),
    ]


# ----------------------------------------------------------------------------------------------------------- optimisers


def against(
    rows: Sequence[Row], arms: Sequence[str], paper: str, where: str, key: str, mode: str = "train", said: str = "",
    note: str = "", **about: Any,
) -> Claim:  # fmt: skip
    """The second of two arms beside the first, at equal seed; `about` has what is expected."""
    first, second = arms
    return Claim(
        paper=paper, where=where, text=f"{NAMES[key]}{said}, {second} {'over' if key in RATIOS else 'minus'} {first}",
        measured=change_of(rows, key, arms, mode), evidence=note + _seen(rows, key, arms, mode), **about,
    )  # fmt: skip


def optimiser_claims(rows: Sequence[Row]) -> list[Claim]:
    """Figure 6 of seed 000: Gadam is sharper than SGD and generalises better.

    Raises:
        ValueError: If there are not two seeds or more of each.
    """
    seeds, arms = sorted({row["seed"] for row in rows}), ["SGD", "Gadam"]
    if len(seeds) < 2 or {(row["seed"], row["arm"]) for row in rows} != {(seed, arm) for seed in seeds for arm in arms}:
        raise ValueError(f"expected two seeds or more, each by SGD and by Gadam, got {len(rows)} rows")

    def pair(where: str, key: str, mode: str = "train", said: str = "", note: str = "", **about: Any) -> Claim:
        made = against(rows, arms, "seed 000", where, key, mode, said, note + AVERAGED, **about)
        return replace(made, **of_set("vgg", key, made.evidence))

    found = [
        pair("section 5, figure 6", "lambda_max", **times(40.0)),
        pair("abstract", "lambda_max", **times(30.0)),
        pair("figure 6", "lambda_max", "eval", EVALUATION, ours=True, **RISES),
        pair("section 5", "moment2_per_param", note=READ, **times(200.0)),
        pair("section 5", "frobenius_norm", note=AS_IT_SAYS, ours=True, **times(200.0)),
        pair("figure 6c", "val_accuracy", expected=0.0, relation=">="),
        pair("figure 6c", "test_accuracy", expected=0.0, relation=">="),
        pair("section 5", "train_accuracy", expected=0.17, tolerance=POINTS, short_of=short_of(rows)),
        pair("section 5, figure 6c", "weight_norm", **RISES),
        *mode_claims(rows),
    ]
    if not rows[0]["published"]:
        return found
    printed = (
        ("train_accuracy", "SGD", 99.64, ""), ("train_accuracy", "Gadam", 99.81, ""),
        ("moment2_per_param", "SGD", 1e-4, READ), ("moment2_per_param", "Gadam", 0.02, READ),
    )  # fmt: skip
    source = ("seed 000", "section 5")
    return found + [_value(rows, source, key, arm, arm, x, "train", note + AVERAGED) for key, arm, x, note in printed]
