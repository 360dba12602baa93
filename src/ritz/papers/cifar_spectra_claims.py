"""What seeds 000 and 002 print of their networks on CIFAR-100, beside the rows of `cifar_spectra`.

The papers trained once, we train several seeds. A printed number is compared with the mean over seeds and its Student t
interval, only where the network is the published one, and refuted only by the whole training. What the papers are about
is an order: arms are compared at equal seed, a ratio by the mean of its logarithm, a difference as it is, and the
reference 1 or 0 says whether at least the direction is there. One seed has no interval and decides none of these; there
the direction alone is judged, on one network each as in the papers, by what the measurement leaves open. Runs that
diverged are left out and counted in the evidence; of those that were not begun nothing is said.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..results import Estimate
from .base import Claim
from .over_seeds import difference, mean, quotient, ratio

Row = Mapping[str, Any]

WEIGHT_DECAYS = (0.0, 1e-4, 5e-4)
ENDS = (WEIGHT_DECAYS[0], WEIGHT_DECAYS[-1])
EPOCHS, NUM_IMAGES = 300, 45_000  # of the papers' training
EFFECT = 0.25  # an effect is the printed one within a quarter of it

NAMES = {
    "lambda_max": "lambda_1",
    "trace_per_param": "Tr H / P",
    "moment2_per_param": "Tr H^2 / P",
    "ggn_trace": "Tr G",
    "weight_norm": "|w|",
    "metric_a": "a = |w| / 2",
    "metric_a_eq7": "a = Tr H + |w|^2 / 2",
    "train_accuracy": "training accuracy",
    "val_accuracy": "accuracy on the last 5,000",
    "test_accuracy": "accuracy on the test set",
    "gap_loss_val": "gap in loss to the last 5,000",
    "gap_loss_test": "gap in loss to the test set",
    "gap_error_val": "gap in error to the last 5,000",
    "gap_error_test": "gap in error to the test set",
}
CURVATURE = ("lambda_max", "trace_per_param", "moment2_per_param", "ggn_trace", "metric_a_eq7")

# what counts as the same number: a share of it, or percentage points
RELATIVE = {
    "lambda_max": 0.1, "trace_per_param": 0.2, "moment2_per_param": 0.3, "metric_a": 0.05, "metric_a_eq7": 0.05,
    "gap_loss_val": 0.1, "gap_loss_test": 0.1,
}  # fmt: skip
POINTS = 1.0


class Printed(NamedTuple):
    """A line of a table: where it stands, what it is, and its numbers by weight decay, None where there is none."""

    paper: str
    where: str
    key: str
    numbers: tuple[float | None, float | None, float | None]
    mode: str | None = None  # of BatchNorm; None as the network's figures are


def _table(where: str, **columns: tuple[float, float, float]) -> list[Printed]:
    """A table of seed 002; a gap can be to either set, the metric a in either convention."""
    same = {
        "gap_error": ("gap_error_val", "gap_error_test"),
        "gap_loss": ("gap_loss_val", "gap_loss_test"),
        "a": ("metric_a", "metric_a_eq7"),
    }
    return [
        Printed("seed 002", where, key, numbers)
        for column, numbers in columns.items()
        for key in same.get(column, (column,))
    ]


def _text(where: str, key: str, *numbers: float | None, mode: str | None = None) -> Printed:
    """Numbers of seed 000."""
    first, second, third = numbers
    return Printed("seed 000", where, key, (first, second, third), mode)


PRINTED = {
    "allcnn": [
        *_table(
            "table 2", gap_error=(32.40, 32.50, 31.14), gap_loss=(2.506, 2.463, 2.144),
            trace_per_param=(1.82e-3, 2.20e-3, 4.62e-3), moment2_per_param=(1.35e-2, 1.68e-2, 1.17e-1),
            lambda_max=(49, 66, 130), a=(45.2, 35.8, 23.0),
        ),
        _text("section 4", "train_accuracy", 86.3, 87.9, 86.0),
        _text("section 4", "gap_error_val", 32.4, 32.5, 31.1),
        _text("section 4", "gap_error_test", 32.4, 32.5, 31.1),
        _text("figure 3", "val_accuracy", None, None, 54.8),
        _text("figure 3", "test_accuracy", None, None, 54.8),
    ],
    "preresnet": [
        *_table(
            "table 4", gap_error=(27.2, 24.4, 23.11), gap_loss=(2.24, 1.16, 0.92),
            trace_per_param=(5.5e-5, 6.7e-4, 2.1e-3), moment2_per_param=(1.1e-5, 6e-4, 3.1e-3),
            lambda_max=(2.52, 11.49, 23.03), a=(160, 36.9, 22.06),
        ),
        _text("figure 4", "train_accuracy", 99.987, 99.985, 99.87),
        _text("figure 4", "test_accuracy", 72.78, 75.56, 76.76),
    ],
    "wideresnet": [
        *_table(
            "table 5", gap_error=(24.92, 20.68, 19.6), gap_loss=(2.08, 0.85, 0.79),
            trace_per_param=(9.4e-7, 6.7e-5, 1.1e-4), moment2_per_param=(2.3e-7, 1.3e-4, 3e-4),
            lambda_max=(1.69, 39.13, 40), a=(101, 21.9, 15.8),
        ),
        _text("figure 5", "train_accuracy", 99.984, 99.984, 99.982),
        _text("figure 5", "val_accuracy", 75.2, 79.5, 80.6),
        _text("figure 5", "test_accuracy", 75.2, 79.5, 80.6),
        _text("figure 8", "moment2_per_param", 9.8e-12, None, 4.9e-5, mode="eval"),
    ],
}  # fmt: skip
FIGURE = {"allcnn": "figure 3", "preresnet": "figure 4", "wideresnet": "figure 5"}
TABLE = {"allcnn": "table 2", "preresnet": "table 4", "wideresnet": "table 5"}
SETS = {"allcnn": "val", "preresnet": "test", "wideresnet": "val"}  # of which seed 000 prints accuracies


def decay_arm(weight_decay: float) -> str:
    """What the rows of a weight decay are called.

    Example:
        >>> decay_arm(5e-4)
        'decay 0.0005'
    """
    return f"decay {weight_decay:g}"


# ------------------------------------------------------------------------------------------------ numbers and words


def numbers(rows: Sequence[Row], key: str, arm: str, mode: str = "eval") -> dict[int, float]:
    """A number of every seed of an arm whose run has it; curvature as in `mode`.

    Example:
        >>> rows = [{"arm": "SGD", "seed": s, "eval": {"lambda_max": [5.0 + s, 4, 9]}} for s in range(2)]
        >>> numbers([*rows, {"arm": "SGD", "seed": 2}], "lambda_max", "SGD")  # the last one diverged
        {0: 5.0, 1: 6.0}
    """
    own = [row for row in rows if row["arm"] == arm]
    if key in CURVATURE:
        return {row["seed"]: float(row[mode][key][0]) for row in own if mode in row}
    return {row["seed"]: float(row[key]) for row in own if key in row}


def told(rows: Sequence[Row], arms: Sequence[str], mode: str | None = None) -> str:
    """What was run, for the evidence of a claim."""
    own = [row for row in rows if row["arm"] in arms]
    ended = [row for row in own if "train_accuracy" in row]
    lost = f", {len(own) - len(ended)} of {len(own)} runs diverged" if len(ended) < len(own) else ""
    seeds = f"{_many(len({row['seed'] for row in own}), 'seed')}, {own[0]['epochs']} of {EPOCHS} epochs{lost}"
    if not ended:
        return f"{own[0]['title']}: {seeds}"
    row, reached = ended[0], [row["train_accuracy"] for row in ended]
    name = row["title"] if row["published"] else f"a smaller network of the family of {row['title']}"
    text = (
        f"{name} with {row['parameters']:,} parameters: {seeds}, training accuracy from {min(reached):.1f} to "
        f"{max(reached):.1f} %"
    )
    if mode is None:
        return text
    how = f"; Hessian of {row['images']:,} training images, {row['lanczos_steps']} steps from "
    return text + how + _many(row["probes"], "vector") + (f", BatchNorm in {mode} mode" if "train" in row else "")


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def short_of(rows: Sequence[Row], key: str = "") -> str:
    """What the runs have not of what the papers had, for a number that only the whole training reaches.

    Example:
        >>> row = {"epochs": 8, "published": True, "images": 640, "title": "VGG-16-BN"}
        >>> short_of([row]), short_of([row], "lambda_max")
        ('8 of 300 epochs', '8 of 300 epochs; Hessian of 640 of 45,000 images')
    """
    row = next((row for row in rows if "images" in row), rows[0])
    parts = {
        f"{row['epochs']} of {EPOCHS} epochs": row["epochs"] < EPOCHS,
        f"a smaller network than {row['title']}": not row["published"],
        f"Hessian of {row.get('images', 0):,} of {NUM_IMAGES:,} images": key in CURVATURE
        and row.get("images", NUM_IMAGES) < NUM_IMAGES,
    }
    return "; ".join(part for part, there in parts.items() if there)


# ---------------------------------------------------------------------------------------------------------- claims


def decay_claims(rows: Sequence[Row]) -> list[Claim]:
    """Printed numbers, where the network is the published one, and what changes with weight decay, at equal seed.

    What is about a weight decay that was not run is left out.
    """
    if not rows:
        return []
    network, published, arms = str(rows[0]["network"]), rows[0]["published"], {row["arm"] for row in rows}

    def has(*decays: float) -> bool:
        return all(decay_arm(decay) in arms for decay in decays)

    found = _printed_claims(rows, network) if published else []
    found += _order_claims(rows, network) if has(*ENDS) else []
    if network == "allcnn" and has(0.0, 1e-4):
        found += [
            _change(rows, "seed 002", "table 3", key, (0.0, 1e-4), difference, low, high, "eval")
            for key, low, high in (("gap_error_test", 32.40, 32.50), ("gap_loss_test", 2.506, 2.463))
        ]
    if network != "allcnn" and has(5e-4):
        found += _stability_claims(rows)
    if network == "wideresnet":
        found += _evaluation_claims(rows) if has(*ENDS) else []
        found += _mode_claims(rows) if published else []
    pairs = set.intersection(*(set(numbers(rows, "weight_norm", decay_arm(decay))) for decay in ENDS))
    return found + (_pair_claims(rows, network, pairs.pop()) if len(pairs) == 1 else [])


def _mode(network: str) -> str:
    """That of the papers' figures and tables."""
    return "eval" if network == "allcnn" else "train"


def _printed_claims(rows: Sequence[Row], network: str) -> list[Claim]:
    found = []
    for line in PRINTED[network]:
        mode = line.mode or _mode(network)
        for decay, number in zip(WEIGHT_DECAYS, line.numbers, strict=True):
            if number is not None and any(row["arm"] == decay_arm(decay) for row in rows):
                at = f"weight decay {decay:g}"
                found.append(_value(rows, (line.paper, line.where), line.key, decay_arm(decay), at, number, mode))
    return found


def _value(
    rows: Sequence[Row], source: tuple[str, str], key: str, arm: str, at: str, number: float, mode: str
) -> Claim:
    """A printed number beside the mean over seeds."""
    return Claim(
        paper=source[0], where=source[1], text=f"{NAMES[key]} at {at}", expected=number,
        measured=mean(numbers(rows, key, arm, mode).values()),
        tolerance=RELATIVE[key] * abs(number) if key in RELATIVE else POINTS,
        evidence=told(rows, [arm], mode if key in CURVATURE else None), short_of=short_of(rows, key),
    )  # fmt: skip


def _order_claims(rows: Sequence[Row], network: str) -> list[Claim]:
    """From weight decay 0 to 5e-4: curvature, norm and gaps, with the printed change as what is expected."""
    lines = {line.key: line.numbers for line in reversed(PRINTED[network]) if line.mode is None}  # tables come first
    table, figure, mode = TABLE[network], FIGURE[network], _mode(network)
    numbered = f"{figure}, with the numbers of seed 002, {table}"  # those of the figure are not in the text

    def change(paper: str, where: str, key: str, how: Any, second: float = 5e-4) -> Claim:
        old, new = lines[key][0], lines[key][WEIGHT_DECAYS.index(second)]
        assert old is not None
        assert new is not None
        return _change(rows, paper, where, key, (0.0, second), how, old, new, mode)

    run = [decay for decay in WEIGHT_DECAYS[1:] if any(row["arm"] == decay_arm(decay) for row in rows)]
    found = [change("seed 000", numbered, "lambda_max", ratio, decay) for decay in run]
    found += [change("seed 000", numbered, f"gap_error_{SETS[network]}", difference)]
    if network != "allcnn":
        found += [change("seed 000", figure, f"{name}_accuracy", difference) for name in (SETS[network],)]
    found += [
        change("seed 002", table, key, ratio)
        for key in ("lambda_max", "trace_per_param", "moment2_per_param", "metric_a", "metric_a_eq7")
    ]
    return found + [
        change("seed 002", table, f"gap_{what}_{name}", difference)
        for what in ("loss", "error")
        for name in ("val", "test")
    ]


def _change(
    rows: Sequence[Row], paper: str, where: str, key: str, decays: tuple[float, float], how: Any, old: float,
    new: float, mode: str,
) -> Claim:  # fmt: skip
    """How a number changes from one weight decay to another, beside the change that is printed."""
    arms = [decay_arm(decay) for decay in decays]
    expected, reference = (new / old, 1.0) if how is ratio else (new - old, 0.0)
    kind = "times" if how is ratio else "difference"
    return Claim(
        paper=paper, where=where, text=f"{NAMES[key]} from weight decay {decays[0]:g} to {decays[1]:g}: {kind}",
        expected=expected, tolerance=EFFECT * abs(expected - reference), reference=reference,
        measured=how(*(numbers(rows, key, arm, mode) for arm in arms)),
        evidence=told(rows, arms, mode if key in CURVATURE else None),
    )  # fmt: skip


def _stability_claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 4 of seed 000: lambda_1 against 2 / learning rate."""
    arm = decay_arm(5e-4)
    about: dict[str, Any] = {
        "paper": "seed 000", "where": "section 4", "measured": mean(numbers(rows, "lambda_max", arm, "train").values()),
        "evidence": told(rows, [arm], "train"), "short_of": short_of(rows, "lambda_max"),
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


def _evaluation_claims(rows: Sequence[Row]) -> list[Claim]:
    """Figure 8 of seed 000: BatchNorm in evaluation mode."""
    arms = [decay_arm(decay) for decay in ENDS]
    printed = (("lambda_max", 1000.0), ("moment2_per_param", 4.9e-5 / 9.8e-12))
    return [
        Claim(
            paper="seed 000", where="figure 8", expected=times, tolerance=times / 2, reference=1.0,
            text=f"{NAMES[key]} in evaluation mode from weight decay 0 to 0.0005: times",
            measured=ratio(*(numbers(rows, key, arm, "eval") for arm in arms)), evidence=told(rows, arms, "eval"),
        )
        for key, times in printed
    ]  # fmt: skip


def _mode_claims(rows: Sequence[Row]) -> list[Claim]:
    """The annex of seed 000 finds another curvature in evaluation mode; which is the wider one it does not say."""
    found = []
    for arm in dict.fromkeys(row["arm"] for row in rows if "eval" in row):
        own = [row for row in rows if row["arm"] == arm and "eval" in row]
        apart = [quotient(*sorted(row[mode]["lambda_max"] for mode in ("eval", "train"))) for row in own]
        seen = "; ".join(
            f"{NAMES[key]} {mean(numbers(rows, key, arm, 'eval').values()).value:.3g} in evaluation mode, "
            f"{mean(numbers(rows, key, arm, 'train').values()).value:.3g} in train mode"
            for key in ("lambda_max", "moment2_per_param")
        )
        found.append(
            Claim(
                paper="seed 000", where="annex, figure 8",
                text=f"lambda_1 in evaluation mode is another than in train mode, weight {arm}: the larger over the "
                "smaller", expected=1 + RELATIVE["lambda_max"], relation=">=",
                measured=min(apart, key=lambda one: float(one.interval()[0])),
                evidence=f"{seen}; {told(rows, [arm], 'either')}",
            )
        )  # fmt: skip
    return found


def _pair_claims(rows: Sequence[Row], network: str, seed: int) -> list[Claim]:
    """Directions on the two networks of one seed, as the paper has them on one network each."""
    first, second = (
        next(row for row in rows if (row["seed"], row["arm"]) == (seed, decay_arm(decay))) for decay in ENDS
    )
    where = {_mode(network): FIGURE[network]} | ({"eval": "figure 8"} if network == "wideresnet" else {})
    change = f"from weight decay {ENDS[0]:g} to {ENDS[1]:g}, one network each: times"
    alone = "one seed, the interval is that of the measurement and not of another training; "

    def about(mode: str | None = None) -> dict[str, Any]:
        arms = [first["arm"], second["arm"]]
        return {"paper": "seed 000", "expected": 1.0, "evidence": alone + told([first, second], arms, mode)}

    found = [
        Claim(
            where=place, text=f"lambda_1{' in evaluation mode' if place == 'figure 8' else ''} rises {change}",
            relation=">=", measured=quotient(*(row[mode]["lambda_max"] for row in (first, second))), **about(mode),
        )
        for mode, place in where.items()
    ]  # fmt: skip
    norms = second["weight_norm"] / first["weight_norm"]
    return [*found, Claim(where="section 4", text=f"|w| falls {change}", relation="<=", measured=norms, **about())]


def optimiser_claims(rows: Sequence[Row]) -> list[Claim]:
    """Figure 6 of seed 000: Gadam is sharper than SGD and generalises better.

    Raises:
        ValueError: If there are not two seeds or more of each.
    """
    seeds = sorted({row["seed"] for row in rows})
    if len(seeds) < 2 or {(row["seed"], row["arm"]) for row in rows} != {
        (seed, arm) for seed in seeds for arm in ("SGD", "Gadam")
    }:
        raise ValueError(f"expected two seeds or more, each by SGD and by Gadam, got {len(rows)} rows")

    def pair(key: str, how: Any) -> Estimate:
        found: Estimate = how(*(numbers(rows, key, arm, "train") for arm in ("SGD", "Gadam")))
        return found

    def about(where: str, mode: str | None = None) -> dict[str, Any]:
        return {"paper": "seed 000", "where": where, "evidence": told(rows, ["SGD", "Gadam"], mode)}

    sharper: dict[str, Any] = {
        "text": "lambda_1, Gadam over SGD",
        "measured": pair("lambda_max", ratio),
        "reference": 1.0,
    }
    found = [
        Claim(expected=40.0, tolerance=10.0, **sharper, **about("section 5, figure 6", "train")),
        Claim(expected=30.0, tolerance=10.0, **sharper, **about("abstract", "train")),
        Claim(
            text="Tr H^2 / P, Gadam over SGD", expected=200.0, tolerance=100.0, reference=1.0,
            measured=pair("moment2_per_param", ratio), **about("section 5", "train"),
        ),
        Claim(
            text="accuracy on the test set, Gadam less SGD", expected=0.0, relation=">=",
            measured=pair("test_accuracy", difference), **about("figure 6c"),
        ),
        Claim(
            text="accuracy on the last 5,000, Gadam less SGD", expected=0.0, relation=">=",
            measured=pair("val_accuracy", difference), **about("figure 6c"),
        ),
        Claim(
            text="|w|, Gadam over SGD", expected=1.0, relation=">=", measured=pair("weight_norm", ratio),
            **about("section 5, figure 6c"),
        ),
    ]  # fmt: skip
    if not rows[0]["published"]:
        return found
    printed = (
        ("train_accuracy", "SGD", 99.64), ("train_accuracy", "Gadam", 99.81), ("moment2_per_param", "SGD", 1e-4),
        ("moment2_per_param", "Gadam", 0.02),
    )  # fmt: skip
    return found + [_value(rows, ("seed 000", "section 5"), key, arm, arm, x, "train") for key, arm, x in printed]
