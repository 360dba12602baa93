"""Numbers of the networks on CIFAR-100: what seeds 000 and 002 print, and what the rows of `cifar_spectra` have.

A number of a row is one of a training: what the random vectors of its Hessian draw is drawn anew with each seed, so the
spread over seeds has it. What lambda_1 leaves open is not like that. A Ritz value is a lower bound, [value, lower,
upper] is open upwards in every row, and the interval over seeds is widened by as much.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..intervals import StudentT
from ..results import Estimate
from .over_seeds import difference, geometric_mean, mean, quotient, ratio

Row = Mapping[str, Any]
Triple = tuple[float, float, float]

WEIGHT_DECAYS = (0.0, 1e-4, 5e-4)
ENDS = (WEIGHT_DECAYS[0], WEIGHT_DECAYS[-1])
EPOCHS = 300  # of the papers' training
NUM_IMAGES = 45_000  # that we train on; the papers name no number
HELD_OUT = {"val": 5_000, "test": 10_000}

NAMES = {
    "lambda_max": "lambda_1",
    "trace_per_param": "Tr H / P",
    "moment2_per_param": "Tr H^2 / P",
    "frobenius_norm": "|H|_F",
    "ggn_trace": "Tr G",
    "metric_a_eq7": "a = Tr H + |w|^2 / 2",
    "weight_norm": "|w|",
    "metric_a": "a = |w| / 2",
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
    "val_accuracy": "accuracy on the last 5,000",
    "test_accuracy": "accuracy on the test set",
    "gap_loss_val": "gap in loss to the last 5,000",
    "gap_loss_test": "gap in loss to the test set",
    "gap_error_val": "gap in error to the last 5,000",
    "gap_error_test": "gap in error to the test set",
}
CURVATURE = ("lambda_max", "trace_per_param", "moment2_per_param", "frobenius_norm", "ggn_trace", "metric_a_eq7")
RATIOS = (*CURVATURE, "weight_norm", "metric_a")  # what is compared by its ratio; all else by its difference


# ---------------------------------------------------------------------------------------------------- what is printed


class Printed(NamedTuple):
    """A line of a table: where it stands, what it is, and its numbers by weight decay, None where there is none."""

    paper: str
    where: str
    key: str
    numbers: tuple[float | None, float | None, float | None]
    mode: str | None = None  # of BatchNorm; None as the network's figures are


def _table(where: str, **columns: Triple) -> list[Printed]:
    """A table of seed 002; a gap can be to either set."""
    same = {"gap_error": ("gap_error_val", "gap_error_test"), "gap_loss": ("gap_loss_val", "gap_loss_test")}
    return [
        Printed("seed 002", where, key, numbers)
        for column, numbers in columns.items()
        for key in same.get(column, (column,))
    ]


def _text(where: str, key: str, *numbers: float | None, mode: str | None = None) -> Printed:
    """Numbers of seed 000."""
    first, second, third = numbers
    return Printed("seed 000", where, key, (first, second, third), mode)


def _training(*numbers: float) -> list[Printed]:
    """Training accuracies, which both papers print."""
    own = _text("section 4", "train_accuracy", *numbers)
    return [own, own._replace(paper="seed 002", where="section 5")]


# by seed 000, on a set that is held out; All-CNN-C's first two accuracies and the others' gaps are not printed, but
# training accuracy less the other
ACCURACY = {"allcnn": (53.9, 55.4, 54.8), "preresnet": (72.78, 75.56, 76.76), "wideresnet": (75.2, 79.5, 80.6)}
GAP = {"allcnn": (32.4, 32.5, 31.1), "preresnet": (27.207, 24.425, 23.11), "wideresnet": (24.784, 20.484, 19.382)}
PRINTED = {
    "allcnn": [
        *_table(
            "table 2", gap_error=(32.40, 32.50, 31.14), gap_loss=(2.506, 2.463, 2.144),
            trace_per_param=(1.82e-3, 2.20e-3, 4.62e-3), moment2_per_param=(1.35e-2, 1.68e-2, 1.17e-1),
            lambda_max=(49, 66, 130), metric_a=(45.2, 35.8, 23.0),
        ),
        *_training(86.3, 87.9, 86.0),
        _text("section 4", "gap_error_val", *GAP["allcnn"]),
        _text("section 4", "gap_error_test", *GAP["allcnn"]),
        _text("figure 3", "val_accuracy", None, None, 54.8),
        _text("figure 3", "test_accuracy", None, None, 54.8),
    ],
    "preresnet": [
        *_table(
            "table 4", gap_error=(27.2, 24.4, 23.11), gap_loss=(2.24, 1.16, 0.92),
            trace_per_param=(5.5e-5, 6.7e-4, 2.1e-3), moment2_per_param=(1.1e-5, 6e-4, 3.1e-3),
            lambda_max=(2.52, 11.49, 23.03), metric_a=(160, 36.9, 22.06),
        ),
        *_training(99.987, 99.985, 99.87),
        _text("section 4", "test_accuracy", *ACCURACY["preresnet"]),
    ],
    "wideresnet": [
        *_table(
            "table 5", gap_error=(24.92, 20.68, 19.6), gap_loss=(2.08, 0.85, 0.79),
            trace_per_param=(9.4e-7, 6.7e-5, 1.1e-4), moment2_per_param=(2.3e-7, 1.3e-4, 3e-4),
            lambda_max=(1.69, 39.13, 40), metric_a=(101, 21.9, 15.8),
        ),
        *_training(99.984, 99.984, 99.982),
        _text("section 4", "val_accuracy", *ACCURACY["wideresnet"]),
        _text("section 4", "test_accuracy", *ACCURACY["wideresnet"]),
        _text("figure 8", "moment2_per_param", 9.8e-12, None, 4.9e-5, mode="eval"),
    ],
}  # fmt: skip
FIGURE = {"allcnn": "figure 3", "preresnet": "figure 4", "wideresnet": "figure 5"}
TABLE = {"allcnn": "table 2", "preresnet": "table 4", "wideresnet": "table 5"}
# what the papers call the set that is held out: "Val", "validation set accuracies", or "testing performance"
SET = {"allcnn": "val", "preresnet": "test", "wideresnet": "val", "vgg": "val"}


def of_set(network: str, key: str, evidence: str) -> dict[str, Any]:
    """Of a claim its evidence, and that it is ours where its images are held out but not the set that is named.

    Example:
        >>> of_set("preresnet", "test_accuracy", "3 seeds"), of_set("preresnet", "gap_loss_val", "3 seeds")["ours"]
        ({'evidence': '3 seeds'}, True)
    """
    if not any(name in key.split("_") for name in HELD_OUT if name != SET[network]):
        return {"evidence": evidence}
    named = "validation" if SET[network] == "val" else "test"
    return {"evidence": f"the paper names the {named} set; {evidence}", "ours": True}


def printed_change(network: str, key: str, step: tuple[float, float], paper: str = "seed 002") -> float:
    """The printed ratio, or difference, from one weight decay to another; what seed 000 does not print is of seed 002.

    Example:
        >>> printed_change("wideresnet", "gap_error_val", ENDS), printed_change("allcnn", "metric_a", ENDS)
        (-5.32, 0.50885)
        >>> printed_change("wideresnet", "gap_error_val", ENDS, "seed 000")
        -5.402
    """
    lines = {line.key: line.numbers for line in reversed(PRINTED[network]) if line.mode is None}
    lines |= {f"{name}_accuracy": ACCURACY[network] for name in HELD_OUT}
    lines |= {f"gap_error_{name}": GAP[network] for name in HELD_OUT if paper == "seed 000"}
    old, new = (lines[key][WEIGHT_DECAYS.index(decay)] for decay in step)
    assert old is not None
    assert new is not None
    return round(new / old if key in RATIOS else new - old, 5)


def decay_arm(weight_decay: float) -> str:
    """What the rows of a weight decay are called.

    Example:
        >>> decay_arm(5e-4)
        'decay 0.0005'
    """
    return f"decay {weight_decay:g}"


# ---------------------------------------------------------------------------------------------------- what rows have


def numbers(rows: Sequence[Row], key: str, arm: str, mode: str = "eval") -> dict[int, float]:
    """A number of every seed of an arm whose run has it; curvature as in `mode`.

    Example:
        >>> rows = [{"arm": "SGD", "seed": s, "eval": {"lambda_max": [5.0 + s, 4, 9]}} for s in range(2)]
        >>> numbers([*rows, {"arm": "SGD", "seed": 2}], "lambda_max", "SGD")  # the last one diverged
        {0: 5.0, 1: 6.0}
    """
    return {seed: value for seed, (value, _, _) in _triples(rows, key, arm, mode).items()}


def _triples(rows: Sequence[Row], key: str, arm: str, mode: str) -> dict[int, Triple]:
    """The same as (value, lower, upper); what was not estimated has no ends but itself."""
    own = [row for row in rows if row["arm"] == arm]
    if key in CURVATURE:
        return {row["seed"]: tuple(map(float, row[mode][key])) for row in own if mode in row}  # type: ignore[misc]
    return {row["seed"]: (float(row[key]),) * 3 for row in own if key in row}


def mean_of(rows: Sequence[Row], key: str, arm: str, mode: str = "eval") -> Estimate:
    """The mean over seeds, and of lambda_1 what it leaves open.

    Example:
        >>> rows = [{"arm": "SGD", "seed": s, "eval": {"lambda_max": [5.0, 5.0, 9.0]}} for s in range(2)]
        >>> mean_of(rows, "lambda_max", "SGD").interval()
        (5.0, 9.0)
    """
    found = _triples(rows, key, arm, mode).values()
    if key != "lambda_max" or not found:
        return mean(value for value, _, _ in found)
    _, low, high = (sum(column) / len(found) for column in zip(*found, strict=True))
    return mean((value for value, _, _ in found), bracket=(low, high))


def change_of(rows: Sequence[Row], key: str, arms: Sequence[str], mode: str = "eval") -> Estimate:
    """How a number changes from one arm to another at equal seed, ratio or difference, and what lambda_1 leaves open.

    Example:
        >>> rows = [{"arm": arm, "seed": s, "eval": {"lambda_max": [x, x, 1.5 * x]}}
        ...         for arm, x in (("SGD", 5.0), ("Gadam", 20.0)) for s in range(2)]
        >>> found = change_of(rows, "lambda_max", ["SGD", "Gadam"])
        >>> round(found.value, 4), [round(end, 4) for end in found.interval()]
        (4.0, [2.6667, 6.0])
    """
    pair = [numbers(rows, key, arm, mode) for arm in arms]
    if key not in RATIOS:
        return difference(*pair)
    found = ratio(*pair)
    if key != "lambda_max":
        return found
    first, second = (_triples(rows, key, arm, mode) for arm in arms)
    left = [quotient(first[seed], second[seed]) for seed in first if seed in second]
    low, high = (
        float(end) * float(geometric_mean(float(one.interval()[side]) / float(one.value) for one in left).value)
        for side, end in enumerate(found.interval())
    )
    return replace(found, bracket=(low, high))


def change_of_one(first: Row, second: Row, key: str, mode: str = "eval") -> Estimate:
    """The same of two networks alone, with what the measurement leaves open and nothing of another training.

    Accuracies and gaps in error are those of so many images: their error is binomial, as if each network had images of
    its own, for what the two have in common is not in the rows.

    Example:
        >>> rows = [{"test_accuracy": accuracy, "test_images": 10_000} for accuracy in (50.0, 52.0)]
        >>> found = change_of_one(*rows, "test_accuracy")
        >>> found.value, [round(end, 2) for end in found.interval()]
        (2.0, [0.61, 3.39])
    """
    if key in CURVATURE:
        return quotient(first[mode][key], second[mode][key])
    if key in RATIOS:
        return quotient([first[key]] * 3, [second[key]] * 3)
    name = next(name for name in HELD_OUT if name in key)
    shares = [row[f"{name}_accuracy"] / 100 for row in (first, second)]
    trials = [row.get(f"{name}_images", HELD_OUT[name]) for row in (first, second)]
    variance = sum(share * (1 - share) / count for share, count in zip(shares, trials, strict=True))
    return Estimate(
        name="difference", value=second[key] - first[key], stderr=100 * math.sqrt(variance), rule=StudentT(math.inf)
    )


# ------------------------------------------------------------------------------------------------- what is said of them


def told(rows: Sequence[Row], arms: Sequence[str], mode: str | None = None) -> str:
    """What was run, for the evidence of a claim; with a mode of BatchNorm, of its curvature too."""
    own = [row for row in rows if row["arm"] in arms]
    ended = [row for row in own if "train_accuracy" in row]
    lost = f", {len(own) - len(ended)} of {len(own)} runs diverged" if len(ended) < len(own) else ""
    seeds = f"{_many(len({row['seed'] for row in own}), 'seed')}, {own[0]['epochs']} of {EPOCHS} epochs{lost}"
    if not ended:
        return f"{own[0]['title']}: {seeds}"
    row, reached = ended[0], [row["train_accuracy"] for row in ended]
    name = row["title"] if row["published"] else f"a smaller network of the family of {row['title']}"
    how = f" in {row['trained_in']}" if "trained_in" in row else ""
    text = (
        f"{name} with {row['parameters']:,} parameters: {seeds}{how}, training accuracy from {min(reached):.1f} to "
        f"{max(reached):.1f} % of {row.get('train_images', NUM_IMAGES):,} images (the paper names no number)"
    )
    if mode is None:
        return text
    how = f"; Hessian of {row['images']:,} training images, {row['lanczos_steps']} steps from "
    how += _many(row["probes"], "vector") + (", in TF32" if in_tf32(row) else "")
    return text + how + (f", BatchNorm in {mode} mode" if "train" in row else "")


def in_tf32(row: Row) -> bool:
    """Whether its products are in TF32: those from before rows had "precision" are, but for WideResNet at full size.

    Example:
        >>> row = {"network": "wideresnet", "published": False}
        >>> in_tf32(row), in_tf32(row | {"published": True}), in_tf32(row | {"precision": "float32"})
        (True, False, False)
    """
    return "precision" not in row and not (row.get("network") == "wideresnet" and row["published"])


def left_open(rows: Sequence[Row], arms: Sequence[str], mode: str) -> str:
    """How far lambda_1 may lie above its Ritz value, and between which ratios of two arms it would be if it did not.

    Example:
        >>> rows = [{"arm": "SGD", "seed": s, "eval": {"lambda_max": [5.0, 5.0, 6.0]}} for s in range(2)]
        >>> left_open(rows, ["SGD"], "eval")
        '; lambda_1 is open upwards by 20 %'
    """
    found = [row[mode]["lambda_max"] for row in rows if row["arm"] in arms and mode in row]
    most = max((upper / value - 1 for value, _, upper in found), default=0.0)
    if not most > 0:
        return ""
    text = f"; lambda_1 is open upwards by {100 * most:.0f} %"
    if len(arms) < 2 or len(found) < 4:
        return text
    low, high = ratio(*(numbers(rows, "lambda_max", arm, mode) for arm in arms)).interval()
    return f"{text}, by the spread over seeds alone {low:.3g} to {high:.3g}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def short_of(rows: Sequence[Row], key: str = "") -> str:
    """What the runs have not of what the papers had, for a number that only the whole training reaches.

    Example:
        >>> row = {"epochs": 8, "published": True, "images": 640, "title": "VGG-16-BN"}
        >>> short_of([row]), short_of([row], "lambda_max")
        ('8 of 300 epochs', '8 of 300 epochs; Hessian of 640 images, not of all training images')
    """
    row = next((row for row in rows if "images" in row), rows[0])
    parts = {
        f"{row['epochs']} of {EPOCHS} epochs": row["epochs"] < EPOCHS,
        f"a smaller network than {row['title']}": not row["published"],
        f"Hessian of {row.get('images', 0):,} images, not of all training images": key in CURVATURE
        and row.get("images", NUM_IMAGES) < row.get("train_images", NUM_IMAGES),
    }
    return "; ".join(part for part, there in parts.items() if there)
