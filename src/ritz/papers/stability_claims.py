"""What seed 000 says of learning rates and Ritz values, beside the rows of `stability`.

Its section 4 quotes that gradient descent must find lambda_1 <= 2 / a, that SGD satisfies a stricter bound, and that
this one is tight in deep learning. All else is asked by us: lambda_1 on the way, momentum, whether bounds are tight for
full batches and for softmax regression, and a falling rate, of which the paper speaks on its ResNets. The bounds are of
points where training can rest, so that a run that is not trained decides nothing: one whose last loss is above half of
its first.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
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
LOOSE = 0.5  # and not tight where lambda_1 is at most half of it
UNTRAINED = 0.5  # of the first loss
Row = Mapping[str, Any]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Gradient descent, SGD, the rate that falls, theorem 2.

    Example:
        >>> one = {"kind": "descent", "network": "MLP", "batch": 0, "momentum": 0.0, "rate": 0.1, "images": 10,
        ...        "step": [0, 1, 2, 3], "lambda_max": [4.0, 24.0, 16.0, 18.0], "loss": [2, 1, 1, 1], "variance": []}
        >>> found = claims([one | {"seed": 0}, one | {"seed": 1}])
        >>> [(claim.verdict, claim.ours) for claim in found]  # where it settles, on the way, whether the bound is near
        [('holds', False), ('refuted', True), ('holds', True)]
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


def _short_of(own: Sequence[Row]) -> str:
    """How many seeds are trained, where that is not all; a run that has blown up is not."""
    trained = sum(row["loss"][-1] <= UNTRAINED * row["loss"][0] for row in own)
    return "" if trained == len(own) else f"{trained} of {len(own)} seeds trained to half of the first loss"


def _whole(own: Sequence[Row]) -> list[Claim]:
    """Gradient descent: where it settles; and, as questions of ours, the largest on the way and whether it is tight."""
    limit, name = edge(own[0]), _named(own[0])
    momentum = bool(own[0]["momentum"])  # of which the paper says nothing
    what = "2 (1 + b) / a" if momentum else "2 / a"
    above = [sum(x > limit for x in row["lambda_max"][1:]) / (len(row["step"]) - 1) for row in own]
    ends = ", ".join(f"{row['lambda_max'][-1] / limit:.3g}" for row in own)
    seen = f"{_seen(own)}; above the bound {statistics.fmean(above):.0%} of the time; at the end {ends}"
    rest = geometric_mean([settled(row) / limit for row in own])
    claim = partial(Claim, paper=SEED, where=NOTE, expected=1.0)
    at_most = partial(claim, relation="<=")
    found = [
        at_most(
            text=f"{name}: median lambda_1 / ({what}) of the second half is at most 1", measured=rest,
            short_of=_short_of(own), ours=momentum, evidence=seen,
        )
    ]  # fmt: skip
    if momentum:
        peaks = geometric_mean([peak(row) * row["rate"] / 2 for row in own])
        text = f"{name}: largest lambda_1 / (2 / a) is at most 1, as if there were no momentum"
        found.append(at_most(text=text, measured=peaks, ours=True, evidence=seen))
    return [
        *found,
        at_most(
            text=f"{name}: on the way too, largest lambda_1 / ({what}) is at most 1", ours=True,
            measured=geometric_mean([peak(row) / limit for row in own]), evidence=f"{seen}. {EDGE}",
        ),
        claim(
            text=f"{name}: the bound is tight: median lambda_1 / ({what}) of the second half", tolerance=TIGHT,
            measured=rest, short_of=_short_of(own), ours=True, evidence=seen,
        ),
    ]  # fmt: skip


def _stochastic(own: Sequence[Row]) -> list[Claim]:
    """SGD: the bound of gradient descent, and the stricter one, at the half and at the end together."""
    rate, name = own[0]["rate"], _named(own[0])
    looks = [[(top, noise) for _, top, noise in row["variance"]] for row in own]
    noises = ", ".join(f"{rate**2 * noise:.3g}" for look in looks for _, noise in look)
    seen = f"{_seen(own)}; a^2 lambda_1(Var) at the half and the end of each: {noises}; no point is stable above 1"
    about: dict[str, Any] = {"paper": SEED, "where": NOTE, "evidence": seen, "short_of": _short_of(own)}
    found = [
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
    ]  # fmt: skip
    bounded = [[(top, v) for top, v in x if rate**2 * v <= 1] for x in looks]
    near = [statistics.fmean(top * rate / (1 + math.sqrt(1 - rate**2 * v)) for top, v in x) for x in bounded if x]
    left_out = sum(map(len, looks)) - sum(map(len, bounded))
    if near:
        more = f", and {left_out} of these looks, which have no bound, are left out" if left_out else ""
        about |= {"evidence": seen + more, "where": f"{NOTE}, quoting Wu et al. (2018)"}
        found.append(
            Claim(
                text=f"{name}: the stricter bound of SGD is tight: lambda_1 over the bound", expected=1.0,
                tolerance=TIGHT,
                measured=geometric_mean(near), ours=own[0]["network"] == "softmax", **about,
            )
        )  # fmt: skip
    return found


def _flatter(rows: Sequence[Row]) -> list[Claim]:
    """SGD finds flatter points than gradient descent at the same rate, at equal seed and number of steps."""
    found: list[Claim] = []
    descents = [row for row in rows if row["kind"] == "descent" and not row["momentum"]]
    for own in _groups([row for row in descents if row["batch"]]):
        key = (own[0]["network"], own[0]["rate"])
        whole = {row["seed"]: row for row in descents if not row["batch"] and (row["network"], row["rate"]) == key}
        if not whole:
            continue
        others = [whole[row["seed"]] for row in own]
        ratios = [settled(row) / settled(other) for row, other in zip(own, others, strict=True)]
        losses = ", ".join(f"{a['loss'][-1] / b['loss'][-1]:.3g}" for a, b in zip(own, others, strict=True))
        found.append(
            Claim(
                paper=SEED, where=NOTE, expected=1.0, relation="<=", measured=geometric_mean(ratios),
                text=f"{_named(own[0])}: SGD ends flatter than gradient descent at this rate: ratio of the median "
                "lambda_1",
                evidence=f"{_seen(own)}; ratio of the losses {losses}", short_of=_short_of(own) or _short_of(others),
            )
        )  # fmt: skip
    return found


def _falling(rows: Sequence[Row]) -> list[Claim]:
    """The papers' schedule ends at a hundredth of the rate; here on an MLP without weight decay, there on ResNets."""
    if not rows:
        return []
    name = f"MLP on {rows[0]['images']:,} images, no weight decay, rate {rows[0]['first rate']:g} falling by 100"
    found = []
    for key, text, expected in (
        ("first rate", "2 / a of the first rate is not over-reached", 1.0),
        ("rate", "2 / a of the last rate is not tight", LOOSE),
    ):
        found.append(
            Claim(
                paper=SEED, where=NOTE, text=f"{name}: {text}: lambda_1 over it", expected=expected, relation="<=",
                measured=geometric_mean([row["lambda_max"] * row[key] / 2 for row in rows]), ours=True,
                evidence=f"{len(rows)} seeds, momentum 0.9; bound {2 / rows[0][key]:.4g}. The paper's own case is "
                "another: its ResNets with weight decay, 23 to 40 at a = 0.1, over-reach 20; with their momentum of "
                "0.9 the bound is 38",
            )
        )  # fmt: skip
    return found


PRINTED_17 = (
    "Equation 17 prints lambda_m, the m-th largest, for lambda_n: so it holds for every matrix by interlacing, with or "
    "without its second term, and says nothing of the smallest. With lambda_n, and angle and gap of the other end, it "
    "fails: the bottom of the spectrum is crowded and met later than the gap at the top would have it"
)
END = "theta_m <= lambda_n + (lambda_1 - lambda_n) tan^2 / c^2"
THEOREM: dict[str, tuple[str, str, bool]] = {  # by key of the rows: where, text, whether the reading is ours
    "above": ("theorem 2", "theta_1 <= lambda_1", False),
    "below": (
        "theorem 2, tan^2 of the angle (printed: of theta_1)",
        "theta_1 >= lambda_1 - (lambda_1 - lambda_n) tan^2 / c^2", False,
    ),
    "smallest": ("equation 17, mended", f"{END}, angle and gap of lambda_n", True),
    "smallest as printed": ("equation 17, lambda_m read as lambda_n", f"{END}, angle and gap of lambda_1", True),
}  # fmt: skip


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
        for key, (where, text, ours) in THEOREM.items():
            if key in own[0]:
                found.append(
                    Claim(
                        paper=SEED, where=where, text=f"{network}, {text}: how often violated", expected=0.0, ours=ours,
                        measured=float(sum(row[key] for row in own)),
                        evidence=f"{checks} Ritz values. {PRINTED_17}" if key == "smallest as printed" else seen,
                    )
                )  # fmt: skip
    return found
