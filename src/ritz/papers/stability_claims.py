"""What seed 000 says of learning rates and Ritz values, beside the rows of `stability`."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Claim
from .over_seeds import geometric_mean

SEED = "seed 000"
NOTE = "section 4, note on the learning rate"
EDGE = (
    "The bound is of where training can stand still, not of the way there: lambda_1 comes to it, overshoots and is "
    "thrown back (the edge of stability of Cohen et al., 2021), until the loss is small and with it H"
)
TIGHT = 0.15  # a bound is tight where it is met to 15 %
Row = Mapping[str, Any]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Gradient descent, SGD, the rate that falls, theorem 2.

    Example:
        >>> one = {"kind": "descent", "network": "MLP", "batch": 0, "momentum": 0.0, "rate": 0.1, "images": 10,
        ...        "step": [0, 1, 2, 3], "lambda_max": [4.0, 24.0, 16.0, 18.0], "loss": [0.5] * 4, "variance": []}
        >>> found = claims([one | {"seed": 0}, one | {"seed": 1}])
        >>> [claim.verdict for claim in found]  # where it settles, on the way, and whether the bound is near
        ['holds', 'refuted', 'holds']
    """
    found: list[Claim] = []
    for own in _groups([row for row in rows if row["kind"] == "descent"]):
        found += _stochastic(own) if own[0]["batch"] else _whole(own)
    found += _flatter(rows)
    found += _falling([row for row in rows if row["kind"] == "falling"])
    found += _theorem([row for row in rows if row["kind"] == "ritz"])
    return found


def edge(row: Row) -> float:
    """2 (1 + b) / a: above it gradient descent with momentum b leaves a quadratic.

    Example:
        >>> edge({"rate": 0.1, "momentum": 0.0}), edge({"rate": 0.1, "momentum": 0.9})
        (20.0, 38.0)
    """
    return 2 * (1 + float(row["momentum"])) / float(row["rate"])


def peak(row: Row) -> float:
    """The largest lambda_1 on the way, the start left out."""
    return max((x for x in row["lambda_max"][1:] if math.isfinite(x)), default=math.nan)


def settled(row: Row) -> float:
    """The median of lambda_1 over the second half of training.

    Example:
        >>> settled({"lambda_max": [1.0, 50.0, 19.0, 20.0, 90.0]})
        20.0
    """
    late = row["lambda_max"][len(row["lambda_max"]) // 2 :]
    return statistics.median(late) if all(math.isfinite(x) for x in late) else math.nan


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in nothing but the seed."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in ("network", "batch", "momentum", "rate")), []).append(row)
    return list(found.values())


def _named(row: Row) -> str:
    batch = f"batches of {row['batch']}" if row["batch"] else "full batches"
    momentum = f", momentum {row['momentum']:g}" if row["momentum"] else ""
    return f"{row['network']}, {batch}{momentum}, a = {row['rate']:g}"


def _seen(own: Sequence[Row]) -> str:
    first = own[0]
    losses = ", ".join(f"{row['loss'][-1]:.3g}" for row in own)
    return f"{len(own)} seeds, {first['images']:,} images, {first['step'][-1]} steps; training loss at the end {losses}"


def _whole(own: Sequence[Row]) -> list[Claim]:
    """Gradient descent: where it settles, the largest on the way, and whether the bound is met."""
    limit, name = edge(own[0]), _named(own[0])
    what = "2 (1 + b) / a" if own[0]["momentum"] else "2 / a"
    above = [sum(x > limit for x in row["lambda_max"][1:]) / (len(row["step"]) - 1) for row in own]
    ends = ", ".join(f"{row['lambda_max'][-1] / limit:.3g}" for row in own)
    seen = f"{_seen(own)}; above the bound {statistics.fmean(above):.0%} of the time; at the end {ends}"
    about: dict[str, Any] = {"paper": SEED, "where": NOTE, "evidence": seen}
    rest = geometric_mean([settled(row) / limit for row in own])
    found = [
        Claim(
            text=f"{name}: median lambda_1 / ({what}) of the second half is at most 1", expected=1.0, relation="<=",
            measured=rest, **about,
        ),
        Claim(
            text=f"{name}: on the way too, largest lambda_1 / ({what}) is at most 1", expected=1.0, relation="<=",
            measured=geometric_mean([peak(row) / limit for row in own]), **(about | {"evidence": f"{seen}. {EDGE}"}),
        ),
        Claim(
            text=f"{name}: the bound is tight: median lambda_1 / ({what}) of the second half", expected=1.0,
            tolerance=TIGHT, measured=rest, **about,
        ),
    ]  # fmt: skip
    if own[0]["momentum"]:
        found.append(
            Claim(
                text=f"{name}: largest lambda_1 / (2 / a) is at most 1, as if there were no momentum", expected=1.0,
                relation="<=", measured=geometric_mean([peak(row) * row["rate"] / 2 for row in own]), **about,
            )
        )  # fmt: skip
    return found


def _stochastic(own: Sequence[Row]) -> list[Claim]:
    """SGD: the bound of gradient descent, and the stricter one, at the half and at the end together."""
    rate, name = own[0]["rate"], _named(own[0])
    looks = [[(top, noise) for _, top, noise in row["variance"]] for row in own]
    noises = ", ".join(f"{rate**2 * noise:.3g}" for look in looks for _, noise in look)
    seen = f"{_seen(own)}; a^2 lambda_1(Var) at the half and the end of each: {noises}; no point is stable above 1"
    about: dict[str, Any] = {"paper": SEED, "where": NOTE, "evidence": seen}
    # where no point is stable the least spread is at 1 / a, and that is what lambda_1 is held against
    near = [statistics.fmean(top * rate / (1 + math.sqrt(max(1 - rate**2 * v, 0.0))) for top, v in x) for x in looks]
    return [
        Claim(
            text=f"{name}: median lambda_1 / (2 / a) of the second half is at most 1", expected=1.0, relation="<=",
            measured=geometric_mean([settled(row) * rate / 2 for row in own]), **about,
        ),
        Claim(
            text=f"{name}: (1 - a lambda_1)^2 + a^2 lambda_1(Var) is at most 1", expected=1.0, relation="<=",
            measured=geometric_mean(
                statistics.fmean((1 - rate * top) ** 2 + rate**2 * v for top, v in x) for x in looks
            ), **about,
        ),
        Claim(
            text=f"{name}: the stricter bound is tight: lambda_1 over it", expected=1.0, tolerance=TIGHT,
            measured=geometric_mean(near), **about,
        ),
    ]  # fmt: skip


def _flatter(rows: Sequence[Row]) -> list[Claim]:
    """SGD finds flatter points than gradient descent at the same rate, at equal seed and number of steps."""
    found: list[Claim] = []
    descents = [row for row in rows if row["kind"] == "descent" and not row["momentum"]]
    for own in _groups([row for row in descents if row["batch"]]):
        key = (own[0]["network"], own[0]["rate"])
        whole = {row["seed"]: row for row in descents if not row["batch"] and (row["network"], row["rate"]) == key}
        if not whole:
            continue
        ratios = [settled(row) / settled(whole[row["seed"]]) for row in own]
        losses = ", ".join(f"{row['loss'][-1] / whole[row['seed']]['loss'][-1]:.3g}" for row in own)
        found.append(
            Claim(
                paper=SEED, where=NOTE, expected=1.0, relation="<=", measured=geometric_mean(ratios),
                text=f"{_named(own[0])}: flatter than gradient descent at this rate: ratio of the median lambda_1",
                evidence=f"{_seen(own)}; ratio of the losses {losses}",
            )
        )  # fmt: skip
    return found


def _falling(rows: Sequence[Row]) -> list[Claim]:
    """The papers' schedule ends at a hundredth of the rate."""
    if not rows:
        return []
    found = []
    for key, text, expected, relation in (
        ("first rate", "2 (1 + b) / a of the first rate is not over-reached", 1.0, "<="),
        ("rate", "after the rate has fallen by 100 the bound is not tight", 0.1, "<="),
    ):
        limits = [2 * (1 + row["momentum"]) / row[key] for row in rows]
        found.append(
            Claim(
                paper=SEED, where=NOTE, text=f"MLP as the papers train it: {text}: lambda_1 over it",
                expected=expected, relation=relation,  # type: ignore[arg-type]
                measured=geometric_mean([row["lambda_max"] / limit for row, limit in zip(rows, limits, strict=True)]),
                evidence=f"{len(rows)} seeds, {rows[0]['images']:,} images; bound {limits[0]:.4g}. The paper holds its "
                "ResNets' 23 to 40 at a = 0.1 against 20; with their momentum of 0.9 the bound is 38",
            )
        )  # fmt: skip
    return found


def _theorem(rows: Sequence[Row]) -> list[Claim]:
    """Theorem 2: breaches, counted."""
    found: list[Claim] = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        checks = sum(row["checks"] for row in own)
        needed, allowed = ([row[key] for row in own] for key in ("steps to 1 %", "steps to 1 %, allowed"))
        seen = (
            f"{checks} Ritz values of {len(own)} networks; lambda_1 to 1 % after {max(needed)} steps, "
            f"the bound is there after {max(allowed)}"
        )
        about: dict[str, Any] = {"paper": SEED, "where": "theorem 2", "expected": 0.0, "evidence": seen}
        texts = {
            "above": "theta_1 <= lambda_1",
            "below": "theta_1 >= lambda_1 - (lambda_1 - lambda_n) tan^2 / c^2",
            "smallest": "the smallest, with angle and gap of its own end",
            "smallest as printed": "the smallest, with angle and gap of lambda_1 as in equation 17",
        }
        crowded = ". The bottom of the spectrum is crowded and met later than the gap at the top would have it"
        for key, text in texts.items():
            if key not in own[0]:
                continue
            breaches = sum(row[key] for row in own)
            more = {"evidence": seen + crowded} if key == "smallest as printed" else {}
            found.append(Claim(text=f"{network}, {text}: how often not", measured=float(breaches), **(about | more)))
    return found
