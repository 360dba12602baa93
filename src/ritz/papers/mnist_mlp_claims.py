"""What seeds 000 and 002 print of the network of 9,960 parameters, judged by the spread between our seeds.

The papers trained once at each weight decay. Whether a number of theirs comes out is then whether it lies in the 95 %
prediction interval of our seeds (`prediction_interval`), and whether an order with weight decay is there whether every
seed has it. `mnist_mlp` trains and measures; benchmarks/mnist_mlp.py runs it all.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch

from ..results import Estimate, from_samples
from .base import Claim
from .mnist_mlp import MEANING, WEIGHT_DECAYS, Row

# By weight decay, each as it is written: the last digit says how far it was rounded.
REFERENCE = {  # one seed by NumPy, the traces by 20 random signs
    "weight_norm": ("15.29", "14.46", "12.22"),
    "lambda_max": ("14.54", "15.14", "17.77"),
    "trace_per_param": ("0.0150", "0.0150", "0.0157"),
    "moment2_per_param": ("0.0803", "0.0848", "0.1067"),
    "train_accuracy": ("97.34", "97.28", "96.95"),
    "val_accuracy": ("96.42", "96.44", "96.36"),
    "gap_loss": ("0.041", "0.036", "0.017"),
}
PRINTED = {  # seed 002, table 1; the accuracies are in its text
    "lambda_max": ("14.4", "15.0", "17.8"),
    "trace_per_param": ("1.82e-2", "1.67e-2", "1.76e-2"),
    "moment2_per_param": ("1.20e-1", "1.04e-1", "1.63e-1"),
    "metric_a": ("7.6", "7.2", "6.1"),
    "metric_a_eq7": ("7.6", "7.2", "6.1"),
    "val_accuracy": ("94.4", "96.46", "96.7"),
    "test_accuracy": ("94.4", "96.46", "96.7"),
    "gap_error": ("0.48", "0.51", "-0.05"),
    "gap_error_test": ("0.48", "0.51", "-0.05"),
    "gap_loss": ("0.024", "0.022", "0.007"),
    "gap_loss_test": ("0.024", "0.022", "0.007"),
}
FRIEND = {  # seed 000: numbers in its section 4, and of its figure 2, whose spectra are those of seed 002, table 1
    "lambda_max": ("figure 2, with the numbers of seed 002, table 1", PRINTED["lambda_max"]),
    "metric_a": ("figure 2, with the numbers of seed 002, table 1", PRINTED["metric_a"]),
    "val_accuracy": ("section 4", PRINTED["val_accuracy"]),
    "test_accuracy": ("section 4", PRINTED["test_accuracy"]),
    "gap_error": ("section 4", ("0.48", "0.51", "0.04")),
    "gap_error_test": ("section 4", ("0.48", "0.51", "0.04")),
}
EFFECT = 0.5  # how far, of what is printed, a change may be off
ONE_PROBE = {"trace_per_param": "trace_probe", "moment2_per_param": "moment2_probe"}
ORDERS = {  # what goes one way with weight decay at equal seed: 1 up, -1 down
    "lambda_max": (1, "seed 000", "section 4, figure 2"),
    "weight_norm": (-1, "seed 002", "table 1"),
    "metric_a_eq7": (-1, "seed 002", "equation 7, table 1"),
    "gap_loss": (-1, "seed 002", "table 1"),
    "gap_loss_test": (-1, "seed 002", "table 1"),
    "val_accuracy": (1, "seed 002", "section 5"),
    "test_accuracy": (1, "seed 002", "section 5"),
}
NAMES = {
    "weight_norm": "|w|",
    "lambda_max": "lambda_1",
    "trace_per_param": "Tr H / P",
    "moment2_per_param": "Tr H^2 / P",
    "train_accuracy": "training accuracy",
    "val_accuracy": "accuracy on the last 5,000",
    "test_accuracy": "accuracy on the test set",
    "gap_loss": "gap in loss to the last 5,000",
    "gap_loss_test": "gap in loss to the test set",
    "gap_error": "gap in error to the last 5,000",
    "gap_error_test": "gap in error to the test set",
    "metric_a": "a = |w| / 2",
    "metric_a_eq7": "a = Tr H + |w|^2 / 2",
}


def prediction_interval(values: Sequence[float], level: float = 0.95, noise: float = 0.0) -> tuple[float, float]:
    """Where one more value falls with probability `level`: mean -+ t sqrt(s^2 (1 + 1 / n) + noise^2).

    Exact for normal values and noise 0. `noise` is the standard deviation that the new value has beyond ours, because
    it was measured with fewer probes; it too is taken as normal, though that of a trace leans to the right.

    Raises:
        ValueError: For fewer than two values, or a level that is not between 0 and 1.

    Example:
        >>> [round(end, 3) for end in prediction_interval([1.0, 2.0, 3.0])]  # 2 -+ 4.303 sqrt(4 / 3)
        [-2.968, 6.968]
    """
    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"a prediction interval needs two values or more, got {len(values)}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    data = torch.tensor(values, dtype=torch.float64)
    width = float(t.ppf(0.5 + level / 2, len(values) - 1)) * math.sqrt(
        float(data.var()) * (1 + 1 / len(values)) + noise**2
    )
    return float(data.mean()) - width, float(data.mean()) + width


def column(rows: Sequence[Row], key: str, weight_decay: float) -> list[float]:
    """One number of every seed at a weight decay.

    Example:
        >>> rows = from_plain([{"seed": s, "weight_decay": 0.0, "metric_a": [7.0 + s, 0, 7, 9]} for s in range(2)])
        >>> column(rows, "metric_a", 0.0)
        [7.0, 8.0]
    """
    return [float(row.values[key].value) for row in rows if row.weight_decay == weight_decay]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What a reference run gave and what the papers print, beside our prediction intervals; then the orders.

    A number holds where it lies, to the digits it is written with, in the 95 % prediction interval of our seeds. What
    came from a single random vector is judged a second time with the noise of such a vector, as we measured it. An
    order of two weight decays is judged twice: it holds where every seed has it, and it holds in the mean where the
    interval of the mean difference at equal seed says so. Gaps and accuracies are those on either of the two sets that
    can have been held out.

    Raises:
        ValueError: If the rows are not those of two seeds or more at each of the papers' weight decays.

    Example:
        >>> numbers = {key: [1.0, 0.0, 1.0, 1.0] for key in MEANING}
        >>> same = [{"seed": s, "weight_decay": decay, **numbers} for s in range(2) for decay in WEIGHT_DECAYS]
        >>> first = claims(from_plain(same))[0]
        >>> first.text, first.expected, first.measured, first.verdict
        ('|w| at weight decay 0', 15.29, 1.0, 'refuted')
    """
    _check(rows)
    found = [
        _inside(rows, "reference run", "NumPy, one seed", key, weight_decay, text)
        for key, texts in REFERENCE.items()
        for weight_decay, text in zip(WEIGHT_DECAYS, texts, strict=True)
    ]
    for key, texts in PRINTED.items():
        for weight_decay, text in zip(WEIGHT_DECAYS, texts, strict=True):
            where = "section 5" if key.endswith("accuracy") else "table 1"
            found.append(_inside(rows, "seed 002", where, key, weight_decay, text))
            if key in ONE_PROBE:
                found.append(_inside(rows, "seed 002", where, key, weight_decay, text, ONE_PROBE[key]))
    for key in ORDERS:
        for first, second in combinations(WEIGHT_DECAYS, 2):
            found += _ordered(rows, key, first, second)
    return found


def friend_claims(rows: Sequence[Row]) -> list[Claim]:
    """What seed 000 says of the network: its numbers in our prediction intervals, then how sharpness and norm part.

    Raises:
        ValueError: As `claims`.

    Example:
        >>> numbers = {key: [1.0, 0.0, 1.0, 1.0] for key in MEANING}
        >>> same = [{"seed": s, "weight_decay": decay, **numbers} for s in range(2) for decay in WEIGHT_DECAYS]
        >>> [(claim.text, claim.verdict) for claim in friend_claims(from_plain(same))][::18]
        [('lambda_1 at weight decay 0: in the prediction interval of our seeds', 'refuted'),
         ('lambda_1 from weight decay 0 to 0.0001: ratio', 'refuted')]
    """
    _check(rows)
    found = []
    for key, (where, texts) in FRIEND.items():
        for weight_decay, text in zip(WEIGHT_DECAYS, texts, strict=True):
            claim = _inside(rows, "seed 000", where, key, weight_decay, text)
            found.append(replace(claim, text=f"{claim.text}: in the prediction interval of our seeds"))
    for last in range(1, len(WEIGHT_DECAYS)):
        found += [_ratio(rows, key, last) for key in ("lambda_max", "metric_a")]
    for first, second in combinations(WEIGHT_DECAYS, 2):
        found += _ordered(rows, "lambda_max", first, second)
        found += _ordered(rows, "weight_norm", first, second, "seed 000")
    return found


def _ratio(rows: Sequence[Row], key: str, last: int) -> Claim:
    """From weight decay 0 to another at equal seed, beside the ratio of what is printed."""
    old, new = (float(PRINTED[key][place]) for place in (0, last))
    pairs = zip(*(column(rows, key, WEIGHT_DECAYS[place]) for place in (0, last)), strict=True)
    ratios = torch.tensor([end / start for start, end in pairs], dtype=torch.float64)
    return Claim(
        paper="seed 000", where=FRIEND[key][0], expected=new / old, reference=1.0,
        tolerance=EFFECT * abs(new / old - 1),
        text=f"{NAMES[key]} from weight decay 0 to {WEIGHT_DECAYS[last]:g}: ratio",
        measured=from_samples("ratio", ratios, convention="mean over seeds of the ratio at equal seed"),
        evidence=f"at equal seed from {ratios.min():.3f} to {ratios.max():.3f}",
    )  # fmt: skip


def _check(rows: Sequence[Row]) -> None:
    have = sorted((row.seed, row.weight_decay) for row in rows)
    seeds = sorted({seed for seed, _ in have})
    if len(seeds) < 2 or have != [(seed, weight_decay) for seed in seeds for weight_decay in WEIGHT_DECAYS]:
        raise ValueError(f"expected two seeds or more, each once at weight decays {WEIGHT_DECAYS}, got {have}")


def _inside(
    rows: Sequence[Row], paper: str, where: str, key: str, weight_decay: float, text: str, probe: str | None = None
) -> Claim:
    """Whether a number, as it is written, lies in the prediction interval of our seeds."""
    values = column(rows, key, weight_decay)
    noise = 0.0 if probe is None else statistics.fmean(column(rows, probe, weight_decay))
    low, high = prediction_interval(values, noise=noise)
    rounding = 0.5 * 10.0 ** int(Decimal(text).as_tuple().exponent)
    how = "" if probe is None else ", by one random vector"
    return Claim(
        paper=paper,
        where=where,
        text=f"{NAMES[key]} at weight decay {weight_decay:g}{how}",
        expected=float(text),
        measured=statistics.fmean(values),
        tolerance=(high - low) / 2 + rounding,
        evidence=f"{len(values)} seeds from {min(values):.4g} to {max(values):.4g}; one more falls between {low:.4g} "
        f"and {high:.4g} with probability 95 %{how}",
    )


def _ordered(rows: Sequence[Row], key: str, first: float, second: float, paper: str = "") -> list[Claim]:
    """Whether a number goes the way it is said to from one weight decay to another: in every seed, and in the mean."""
    sign, own, where = ORDERS[key]
    where = where if paper in ("", own) else f"figure 2, with seed 002, {where}"
    paper = paper or own
    start, end = ({row.seed: row.values[key] for row in rows if row.weight_decay == decay} for decay in (first, second))
    count = sum(_beyond(start[seed], end[seed], sign) for seed in start)
    changes = torch.tensor([float(end[seed].value) - float(start[seed].value) for seed in start], dtype=torch.float64)
    change = from_samples(f"change of {key}", changes, convention="mean over seeds of the difference at equal seed")
    text = f"{NAMES[key]} {'rises' if sign > 0 else 'falls'} from weight decay {first:g} to {second:g}"
    evidence = f"changes at equal seed from {changes.min():.3g} to {changes.max():.3g}"
    about: dict[str, Any] = {"paper": paper, "where": where, "evidence": evidence}
    return [
        Claim(text=f"{text}: how many of {len(start)} seeds", expected=len(start), measured=count, **about),
        Claim(text=f"{text}: mean change", expected=0.0, measured=change, relation=">=" if sign > 0 else "<=", **about),
    ]


def _beyond(first: Estimate, second: Estimate, sign: int) -> bool:
    """Whether the second lies above (sign 1) or below (-1) the first by more than an error that they do not share."""
    if float(first.stderr) > 0:  # sampled images and probes are common to both
        return sign * (float(second.value) - float(first.value)) > 0
    (low, high), (other_low, other_high) = first.interval(), second.interval()
    return bool(other_low > high if sign > 0 else other_high < low)


# ------------------------------------------------------------------------------------------------- files


def plain(rows: Sequence[Row], digits: int = 7) -> list[dict[str, Any]]:
    """Rows as plain data: for each key the value, its standard error and its 95 % interval."""
    return [
        {"seed": row.seed, "weight_decay": row.weight_decay}
        | {key: [float(f"{x:.{digits}g}") for x in (e.value, e.stderr, *e.interval())] for key, e in row.values.items()}
        for row in rows
    ]


def from_plain(data: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    """The rows that `plain` was given, each interval kept as a bracket.

    Example:
        >>> rows = from_plain([{"seed": 0, "weight_decay": 0.0, "lambda_max": [14.5, 0.0, 14.5, 14.6]}])
        >>> rows[0].values["lambda_max"].interval(), plain(rows)[0]["lambda_max"]
        ((14.5, 14.6), [14.5, 0.0, 14.5, 14.6])
    """
    return tuple(
        Row(
            seed=entry["seed"], weight_decay=entry["weight_decay"],
            values=MappingProxyType({
                key: Estimate(name=key, value=v[0], stderr=v[1], bracket=(v[2], v[3]), convention=MEANING[key])
                for key, v in entry.items() if key in MEANING
            }),
        )
        for entry in data
    )  # fmt: skip
