"""What seeds 000 and 002 print of the network of 9,960 parameters, judged by the spread between our seeds.

The papers trained once at each weight decay. Whether a number of theirs comes out is then whether it lies in the 95 %
prediction interval of our seeds (`prediction_interval`), and whether an order with weight decay is there whether the
mean change at equal seed is. Where a printed number can be read in two ways, the reading that is nearer to it is
judged and the other told in the evidence: held out are the last 5,000 images (seed 000 speaks of validation; the test
set gives other gaps), the column a of seed 002 is |w| / 2, and its traces are those of one random vector. `mnist_mlp`
trains and measures; benchmarks/mnist_mlp.py runs it all.
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

from ..results import Estimate
from .base import Claim
from .mnist_mlp import MEANING, WEIGHT_DECAYS, Row
from .over_seeds import difference, ratio

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
    "val_accuracy": ("94.4", "96.46", "96.7"),
    "gap_error": ("0.48", "0.51", "-0.05"),
    "gap_loss": ("0.024", "0.022", "0.007"),
}
FRIEND = {  # seed 000: of its figure 2 we have no numbers but those of seed 002
    "lambda_max": ("figure 2, if its run is that of seed 002, table 1", PRINTED["lambda_max"]),
    "val_accuracy": ("section 4", PRINTED["val_accuracy"]),
    "gap_error": ("section 4", ("0.48", "0.51", "0.04")),
}
OTHER = {  # what a printed number is less likely to be
    "val_accuracy": "test_accuracy",
    "gap_error": "gap_error_test",
    "gap_loss": "gap_loss_test",
    "metric_a": "metric_a_eq7",
}
ONE_PROBE = {"trace_per_param": "trace_probe", "moment2_per_param": "moment2_probe"}
EFFECT = 0.5  # how far, of what is printed, a change may be off
TIGHT, GOOD = 0.01, 0.1  # of lambda_1 and of a trace: the papers have no number
NUM_PARAMS = 9960
TRAINED = (  # where the papers contradict themselves, and what they leave open
    "784-10-100-10 has the printed 9,960 parameters, the papers' single hidden layer of 100 has 79,510; the last 5,000 "
    "of 60,000 images are held out, the papers do not say which"
)

PAIRS = tuple(combinations(WEIGHT_DECAYS, 2))
Way = tuple[int, int, int]  # for each of PAIRS: 1 up, -1 down, 0 nothing is said
ORDERS: dict[str, dict[str, tuple[str, Way]]] = {  # by paper: where it says what goes which way with weight decay
    "seed 000": {
        "lambda_max": ("section 4, figure 2", (1, 1, 1)),
        "trace_per_param": ("abstract", (1, 1, 1)),
        "moment2_per_param": ("abstract, the Frobenius norm", (1, 1, 1)),
        "weight_norm": ("section 4", (-1, -1, -1)),
        "val_accuracy": ("section 4", (1, 1, 1)),
        "train_accuracy": ("section 4", (1, -1, 0)),
        "gap_error": ("section 4, the smallest gap is where lambda_1 is largest", (0, -1, -1)),
    },
    "seed 002": {
        "lambda_max": ("section 5, table 1", (1, 1, 1)),
        "trace_per_param": ("table 1; section 5, no indicator of the gap, which falls", (-1, 0, 1)),
        "moment2_per_param": ("table 1; section 5, no indicator of the gap, which falls", (-1, 0, 1)),
        "weight_norm": ("table 1, a read as |w| / 2", (-1, -1, -1)),
        "metric_a_eq7": ("section 5, equation 7", (-1, -1, -1)),
        "gap_loss": ("section 5, table 1", (-1, -1, -1)),
        "gap_error": ("tables 1 and 3", (1, -1, -1)),
        "val_accuracy": ("section 5", (1, 1, 1)),
        "train_accuracy": ("section 5", (1, -1, 0)),
    },
}  # fmt: skip
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
    """Where one more value falls with probability `level`: mean -+ sqrt(t^2 s^2 (1 + 1 / n) + z^2 noise^2).

    Exact for normal values and noise 0. `noise` is the standard deviation that the new value has beyond ours, because
    it was measured with fewer probes or on other images. It is known, so it goes with the quantile z of a normal number
    where the spread of our values goes with Student's t; it too is taken as normal, though that of a trace leans to the
    right.

    Raises:
        ValueError: For fewer than two values, or a level that is not between 0 and 1.

    Example:
        >>> [round(end, 3) for end in prediction_interval([1.0, 2.0, 3.0])]  # 2 -+ 4.303 sqrt(4 / 3)
        [-2.968, 6.968]
    """
    from scipy.stats import norm, t

    if len(values) < 2:
        raise ValueError(f"a prediction interval needs two values or more, got {len(values)}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    data = torch.tensor(values, dtype=torch.float64)
    tail = 0.5 + level / 2
    spread = float(t.ppf(tail, len(values) - 1)) * math.sqrt(float(data.var()) * (1 + 1 / len(values)))
    width = math.hypot(spread, float(norm.ppf(tail)) * noise)
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
    """What a reference run gave and what seed 002 prints, beside our prediction intervals; then the orders.

    A number holds where it lies, to the digits it is written with, in the 95 % prediction interval of our seeds; what
    came from a single random vector is judged with the noise of such a vector, as we measured it. An order of two
    weight decays holds where the interval of the mean change at equal seed says so; in how many seeds it is there is
    in the evidence.

    Raises:
        ValueError: If the rows are not those of two seeds or more at each of the papers' weight decays.

    Example:
        >>> numbers = {key: [1.0, 0.0, 1.0, 1.0] for key in MEANING}
        >>> same = [{"seed": s, "weight_decay": decay, **numbers} for s in range(2) for decay in WEIGHT_DECAYS]
        >>> first = claims(from_plain(same))[0]
        >>> first.text, first.expected, first.measured, first.verdict
        ('|w| at weight decay 0: in the prediction interval of our seeds', 15.29, 1.0, 'refuted')
    """
    _check(rows)
    found = [
        inside(rows, key, weight_decay, text, paper="reference run", where="NumPy, one seed")
        for key, texts in REFERENCE.items()
        for weight_decay, text in zip(WEIGHT_DECAYS, texts, strict=True)
    ]
    for key, texts in PRINTED.items():
        where = "section 5" if key.endswith("accuracy") else "table 1"
        found += _printed(rows, key, texts, paper="seed 002", where=where)
    found += [_equation_7(rows), _one_vector(rows)]
    return found + _sizes(rows, "seed 002", ("val_accuracy",)) + _orders(rows, "seed 002")


def friend_claims(rows: Sequence[Row]) -> list[Claim]:
    """What seed 000 says of the network: its numbers in our prediction intervals, then what weight decay does.

    Raises:
        ValueError: As `claims`.

    Example:
        >>> numbers = {key: [1.0, 0.0, 1.0, 1.0] for key in MEANING}
        >>> same = [{"seed": s, "weight_decay": decay, **numbers} for s in range(2) for decay in WEIGHT_DECAYS]
        >>> [(claim.text, claim.verdict) for claim in friend_claims(from_plain(same))][::12][:2]
        [('lambda_1 at weight decay 0: in the prediction interval of our seeds', 'refuted'),
         ('lambda_1 from weight decay 0 to 0.0001: ratio', 'refuted')]
    """
    _check(rows)
    found: list[Claim] = []
    for key, (where, texts) in FRIEND.items():
        found += _printed(rows, key, texts, paper="seed 000", where=where)
    found += [
        inside(
            rows, "metric_a", weight_decay, text, name="|w| / 2", paper="seed 000", ours=True,
            where="figure 2, if its run is that of seed 002, which prints |w| / 2 as a",
        )
        for weight_decay, text in zip(WEIGHT_DECAYS, PRINTED["metric_a"], strict=True)
    ]  # fmt: skip
    found += _sizes(rows, "seed 000", ("lambda_max", "val_accuracy")) + _orders(rows, "seed 000")
    return found + _quadrature(rows)


def _check(rows: Sequence[Row]) -> None:
    have = sorted((row.seed, row.weight_decay) for row in rows)
    seeds = sorted({seed for seed, _ in have})
    if len(seeds) < 2 or have != [(seed, weight_decay) for seed in seeds for weight_decay in WEIGHT_DECAYS]:
        raise ValueError(f"expected two seeds or more, each once at weight decays {WEIGHT_DECAYS}, got {have}")


# ------------------------------------------------------------------------------------------------ numbers


def inside(
    rows: Sequence[Row], key: str, weight_decay: float, text: str, probe: str | None = None, name: str = "",
    **about: Any,
) -> Claim:  # fmt: skip
    """Whether a number, as it is written, lies in the prediction interval of our seeds.

    Args:
        rows, key, weight_decay: The numbers of our seeds, as for `column`.
        text: The number as it is written.
        probe: The key of the noise of one random vector, where the number came from one.
        name: Of the number, where that of its key says more than is meant.
        about: Fields of the claim.
    """
    values = column(rows, key, weight_decay)
    noise = 0.0 if probe is None else statistics.fmean(column(rows, probe, weight_decay))
    low, high = prediction_interval(values, noise=noise)
    rounding = 0.5 * 10.0 ** int(Decimal(text).as_tuple().exponent)
    how = "" if probe is None else ", by one random vector"
    seen = f"{len(values)} seeds from {min(values):.4g} to {max(values):.4g}; one more falls between {low:.4g} and "
    seen += f"{high:.4g} with probability 95 %{how}"
    if probe is not None:
        exact = " to ".join(f"{end:.4g}" for end in prediction_interval(values))
        seen += f", which errs by {noise / statistics.fmean(values):.0%}: this decides little. By many, {exact}"
    return Claim(
        text=f"{name or NAMES[key]} at weight decay {weight_decay:g}: in the prediction interval of our seeds{how}",
        expected=float(text), measured=statistics.fmean(values), tolerance=(high - low) / 2 + rounding,
        **({"evidence": seen} | about),
    )  # fmt: skip


def _printed(rows: Sequence[Row], key: str, texts: Sequence[str], **about: str) -> list[Claim]:
    """The numbers of one column, and in the evidence what it says against another reading of them."""
    found = []
    for weight_decay, text in zip(WEIGHT_DECAYS, texts, strict=True):
        claim = inside(rows, key, weight_decay, text, ONE_PROBE.get(key), **about)
        more = ""
        if key in OTHER:
            values = column(rows, OTHER[key], weight_decay)
            ends = " and ".join(f"{end:.4g}" for end in prediction_interval(values))
            more = f". {NAMES[OTHER[key]]}: {statistics.fmean(values):.4g}, one more between {ends}"
        if key == "val_accuracy" and weight_decay == 0:
            more += f". {_misprint(about['paper'])}"
        if key == "lambda_max":
            more += f". {TRAINED}"
        found.append(replace(claim, evidence=claim.evidence + more))
    return found


def _misprint(paper: str) -> str:
    """What is printed beside 94.4 does not agree with it."""
    gaps = FRIEND["gap_error"][1] if paper == "seed 000" else PRINTED["gap_error"]
    fits = [float(accuracy) + float(gap) for accuracy, gap in zip(PRINTED["val_accuracy"], gaps, strict=True)]
    return (
        f"94.4 may stand for 96.4: with the printed gaps the training accuracies are {fits[0]:.2f}, {fits[1]:.2f} and "
        f"{fits[2]:.2f} %, yet the text has the third below the first"
    )


def _equation_7(rows: Sequence[Row]) -> Claim:
    """Whether the column a is what section 5 says it is."""
    texts = PRINTED["metric_a"]
    parts = [
        statistics.fmean(column(rows, "metric_a_eq7", decay)) / float(text)
        for decay, text in zip(WEIGHT_DECAYS, texts, strict=True)
    ]
    return Claim(
        paper="seed 002", where="equation 7, table 1", expected=1.0, measured=parts[0], tolerance=EFFECT,
        text="the column a is Tr H + |w|^2 / 2, as equation 7 has it: ours over the printed at weight decay 0",
        evidence=f"by weight decay {', '.join(f'{x:.3g}' for x in parts)}; |w| / 2 is what is printed",
    )  # fmt: skip


def _one_vector(rows: Sequence[Row]) -> Claim:
    """Whether equation 7 is had accurately enough from one random vector to tell the weight decays apart."""
    first, last = WEIGHT_DECAYS[0], WEIGHT_DECAYS[-1]
    start, end = (_at(rows, "metric_a_eq7", decay) for decay in (first, last))
    noise = {seed: NUM_PARAMS * value for seed, value in _at(rows, "trace_probe", first).items()}
    return Claim(
        paper="seed 002", where="abstract, section 4.2", ours=True, expected=EFFECT, relation="<=",
        text="equation 7 by one random vector: standard deviation over its fall from weight decay 0 to 0.0005",
        measured=ratio({seed: start[seed] - end[seed] for seed in start}, noise),
        evidence=f"on all images it errs by {statistics.fmean(noise.values()):.0f}; at the cost of one step of SGD the "
        "vector has one batch, which errs more. A vector that two networks share would tell more of their difference",
    )  # fmt: skip


def _quadrature(rows: Sequence[Row]) -> list[Claim]:
    """Appendix C of seed 000: how tightly Lanczos quadrature bounds lambda_1, and how good its traces are."""
    widths = []
    for row in rows:
        low, high = map(float, row.values["lambda_max"].interval())
        widths.append((high - low) / abs(float(row.values["lambda_max"].value)))
    found = [
        Claim(
            paper="seed 000", where="appendix C", expected=TIGHT, relation="<=", measured=max(widths),
            text=f"Lanczos quadrature bounds lambda_1 tightly, read as to {TIGHT:.0%}: the widest interval of a "
            "network over lambda_1", evidence=f"{len(rows)} networks, by the residual of the Ritz pair",
        )
    ]  # fmt: skip
    for key, probe in ONE_PROBE.items():
        share = [float(row.values[probe].value) / abs(float(row.values[key].value)) for row in rows]
        found.append(
            Claim(
                paper="seed 000", where="appendix C", ours=True, expected=GOOD, relation="<=",
                measured=statistics.fmean(share), text=f"one random vector gives {NAMES[key]} well, read as to "
                f"{GOOD:.0%}: its standard deviation over {NAMES[key]}",
                evidence=f"{len(rows)} networks, from {min(share):.2f} to {max(share):.2f}; the paper does not say how "
                "many vectors, and its published code takes one",
            )
        )  # fmt: skip
    return found


# ----------------------------------------------------------------------------------------- changes and orders


def _at(rows: Sequence[Row], key: str, weight_decay: float) -> dict[int, float]:
    """One number by seed."""
    return {row.seed: float(row.values[key].value) for row in rows if row.weight_decay == weight_decay}


def change(rows: Sequence[Row], key: str, first: float, second: float) -> Estimate:
    """The mean change of a number at equal seed from one weight decay to another.

    Example:
        >>> data = [{"seed": s, "weight_decay": d, "metric_a": [7.0 + s * d, 0, 7, 9]} for s in (1, 2) for d in (0, 1)]
        >>> change(from_plain(data), "metric_a", 0, 1).value
        1.5
    """
    return difference(_at(rows, key, first), _at(rows, key, second))


def count(rows: Sequence[Row], key: str, first: float, second: float, sign: int) -> int:
    """In how many seeds a number goes up (sign 1) or down (-1), by more than an error that the two do not share."""
    start, end = ({row.seed: row.values[key] for row in rows if row.weight_decay == decay} for decay in (first, second))
    return sum(_beyond(start[seed], end[seed], sign) for seed in start)


def _beyond(first: Estimate, second: Estimate, sign: int) -> bool:
    """Whether the second lies above (sign 1) or below (-1) the first by more than an error that they do not share."""
    if float(first.stderr) > 0:  # sampled images and probes are common to both
        return sign * (float(second.value) - float(first.value)) > 0
    (low, high), (other_low, other_high) = first.interval(), second.interval()
    return bool(other_low > high if sign > 0 else other_high < low)


def _sizes(rows: Sequence[Row], paper: str, keys: Sequence[str]) -> list[Claim]:
    """From weight decay 0 to the others at equal seed, beside what is printed: ratios, for accuracies differences."""
    found = []
    for last, key in ((last, key) for last in (1, 2) for key in keys):
        old, new = (float(PRINTED[key][place]) for place in (0, last))
        start, end = (_at(rows, key, WEIGHT_DECAYS[place]) for place in (0, last))
        what = f"{NAMES[key]} from weight decay 0 to {WEIGHT_DECAYS[last]:g}"
        seen = f"allowed is {EFFECT:.0%} of the printed change to either side"
        about: dict[str, Any] = {"paper": paper, "where": FRIEND[key][0] if paper == "seed 000" else "section 5"}
        if key == "val_accuracy":  # the direction is a claim of its own
            found.append(Claim(
                text=f"{what}: percentage points, as printed", expected=new - old, measured=difference(start, end),
                tolerance=EFFECT * abs(new - old), evidence=f"{seen}. {_misprint(paper)}", **about,
            ))  # fmt: skip
        else:
            found.append(Claim(
                text=f"{what}: ratio", expected=new / old, measured=ratio(start, end), reference=1.0,
                tolerance=EFFECT * abs(new / old - 1), evidence=seen, **about,
            ))  # fmt: skip
    return found


def _orders(rows: Sequence[Row], paper: str) -> list[Claim]:
    """Which way the numbers go with weight decay, where a paper says so."""
    found = []
    for key, (where, ways) in ORDERS[paper].items():
        for (first, second), sign in zip(PAIRS, ways, strict=True):
            if sign:
                found.append(ordered(rows, key, first, second, sign, paper=paper, where=where))
    return found


def ordered(rows: Sequence[Row], key: str, first: float, second: float, sign: int, **about: Any) -> Claim:
    """Whether a number goes up (sign 1) or down (-1) from one weight decay to another in the mean over seeds."""
    start, end = (_at(rows, key, decay) for decay in (first, second))
    changes = [end[seed] - start[seed] for seed in start]
    way = "rises" if sign > 0 else "falls"
    seen = f"it {way} in {count(rows, key, first, second, sign)} of {len(start)} seeds; changes at equal seed from "
    seen += f"{min(changes):.3g} to {max(changes):.3g}"
    if key in OTHER:
        low, high = change(rows, OTHER[key], first, second).interval()
        seen += f". {NAMES[OTHER[key]]}: {float(low):.3g} to {float(high):.3g} in the mean"
    if key in ONE_PROBE and about.get("paper") == "seed 002":
        noise = statistics.fmean(column(rows, ONE_PROBE[key], first))
        seen += f". Printed are numbers of one random vector, whose standard deviation is {noise:.2g}"
    return Claim(
        text=f"{NAMES[key]} {way} from weight decay {first:g} to {second:g}: mean change", expected=0.0,
        measured=change(rows, key, first, second), relation=">=" if sign > 0 else "<=",
        **({"evidence": seen} | about),
    )  # fmt: skip


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
