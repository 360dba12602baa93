"""The runs of `damping_cifar`, arm by arm: how far they came, which were lost, and in which seconds."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..results import Estimate
from .damping_cifar import CHANCE, Arm
from .experiment import Rows
from .over_seeds import share

PUBLISHED = "averages from the identity on and kl_clip 0.01 as published (here debiased, and 0.001)"


class Runs:
    """Rows by arm, in the order of their seeds."""

    def __init__(self, rows: Rows) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: row["seed"]):
            self.rows.setdefault(row["arm"], []).append(row)

    def of(self, arm: Arm | str) -> list[dict[str, Any]]:
        """The runs of an arm; none where none was begun in time."""
        return self.rows.get(_label(arm), [])

    def pairs(self, first: Arm | str, second: Arm | str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The runs of two arms at equal seed."""
        other = {row["seed"]: row for row in self.of(second)}
        return [(row, other[row["seed"]]) for row in self.of(first) if row["seed"] in other]

    def accuracy(self, arm: Arm | str, which: str = "test", share: float = 1.0) -> Tensor:
        """After a share of the epochs, one number for each seed."""
        return torch.tensor([accuracy(row, which, share) for row in self.of(arm)], dtype=torch.float64)

    def lost(self, arm: Arm | str) -> Estimate:
        """The share of lost runs among those that left chance; NaN where none did."""
        return share(row["state"] == "lost" for row in self.of(arm) if row["state"] != "at chance")

    def decided(self, *arms: Arm | str) -> bool:
        """Whether any run of these arms was trained."""
        return any(row["state"] == "trained" for arm in arms for row in self.of(arm))

    def short_of(self, arm: Arm) -> str:
        """What its runs have not of what the paper had, for a number that only the whole training reaches."""
        return "; ".join(filter(None, (self.epochs_short(arm), variant(arm))))

    def epochs_short(self, arm: Arm) -> str:
        """How many of the paper's epochs its runs have, where they have fewer; those that are lost need no more."""
        whole = arm.epochs[-1]
        ends = [row["epoch"][-1] for row in self.of(arm) if row["state"] != "lost"]
        return f"{max(ends)} of {whole} epochs" if ends and max(ends) < whole else ""

    def told(self, *arms: Arm | str) -> str:
        """What came of arms, for people."""
        return "; ".join(self._told(arm) for arm in arms)

    def _told(self, arm: Arm | str) -> str:
        own = self.of(arm)
        if not own:
            return f"{_label(arm)}: not run"
        means = ", ".join(
            f"{which} {float(self.accuracy(arm, which).mean()):.1f}" for which in ("train", "val", "test")
        )
        states = [row["state"] for row in own]
        trouble = ", ".join(f"{states.count(state)} {state}" for state in ("lost", "at chance") if state in states)
        length = str(max((row["epoch"][-1] for row in own if row["epoch"]), default=0))
        if isinstance(arm, Arm):
            length += f" of {arm.epochs[-1]}"
        how = f" in {own[0]['trained_in']}" if "trained_in" in own[0] else ""
        seeds = "1 seed" if len(own) == 1 else f"{len(own)} seeds"
        said = f"{own[0]['arm']}, {seeds}, {length} epochs{how}: {means} %"
        return ", ".join(filter(None, (said, trouble, learned(own))))


def learned(rows: Rows) -> str:
    """How far the dampings of runs have come: where they ended, and their mean over steps; nothing where they are flat.

    Example:
        >>> learned([{"damping": [0.03, end], "mean_damping": 0.031} for end in (0.033, 0.035)])
        'the damping ended at 0.034, mean 0.031, by 8 batches as in the published code'
        >>> learned([{"mean_damping": 0.03}])
        ''
    """
    ends = [row["damping"][-1] for row in rows if row.get("damping")]
    if not ends:
        return ""
    means = [row["mean_damping"] for row in rows if row.get("damping")]
    found = f"the damping ended at {sum(ends) / len(ends):.3g}, mean {sum(means) / len(means):.3g}"
    return f"{found}, by 8 batches as in the published code"


def _label(arm: Arm | str) -> str:
    return arm if isinstance(arm, str) else arm.label


def variant(arm: Arm) -> str:
    """What the paper's KFAC had and that of an arm has not.

    Example:
        >>> variant(Arm("SGD", 0.1)), variant(Arm("KFAC", 1e-3, 0.03, code=True)), variant(Arm("KFAC", 1e-3, 0.03))[:26]
        ('', '', 'averages from the identity')
    """
    return PUBLISHED if arm.method == "KFAC" and not arm.code else ""


def accuracy(row: Mapping[str, Any], which: str = "test", share: float = 1.0) -> float:
    """Of a run after a share of its epochs, in per cent; that of a guess where the run is lost.

    Example:
        >>> row = {"state": "trained", "test_accuracy": [10.0, 20.0, 25.0, 40.0]}
        >>> accuracy(row), accuracy(row, share=0.5), accuracy({**row, "state": "lost"})
        (40.0, 20.0, 1.0)
    """
    curve = row[f"{which}_accuracy"]
    return CHANCE if row["state"] == "lost" else float(curve[math.ceil(share * len(curve)) - 1])


def damping_at(row: Mapping[str, Any], share: float) -> float:
    """The damping that a run had after a share of its steps; NaN before the first refresh.

    Example:
        >>> row = {"steps": 100, "damping_step": [10, 20, 30], "damping": [1.0, 2.0, 3.0]}
        >>> [damping_at(row, share) for share in (0.05, 0.25, 1.0)]
        [nan, 2.0, 3.0]
    """
    points = zip(row.get("damping_step", ()), row.get("damping", ()), strict=True)
    return next((value for step, value in reversed(list(points)) if step <= share * row["steps"]), math.nan)


def at_time(row: Mapping[str, Any], seconds: float) -> float:
    """The test accuracy that a run had after so many seconds of training, linear between epochs, from chance on.

    Example:
        >>> row = {"state": "trained", "seconds": [10.0, 20.0], "test_accuracy": [11.0, 31.0]}
        >>> [at_time(row, seconds) for seconds in (5.0, 15.0, 99.0)]
        [6.0, 21.0, 31.0]
    """
    if row["state"] == "lost":
        return CHANCE
    points = [(0.0, CHANCE), *zip(row["seconds"], row["test_accuracy"], strict=True)]
    for (left, low), (right, high) in pairwise(points):
        if seconds <= right:
            return float(low + (high - low) * (seconds - left) / (right - left))
    return float(points[-1][1])


def between(rate: float, lost: Iterable[float]) -> Estimate:
    """The largest stable rate: from the largest at which every run was trained to the next at which one was lost.

    Example:
        >>> between(0.1, [0.3, 1.0]).interval(), between(1.0, []).interval()
        ((0.1, 0.3), (1.0, inf))
    """
    beyond = min((other for other in lost if other > rate), default=math.inf)
    return Estimate(name="rate", value=rate, bracket=(rate, beyond), convention="a rate of the grid, to the next lost")


def quotient(first: Estimate, second: Estimate, share: float = 1.0) -> float | Estimate:
    """share * first / second, and all that the grid leaves open; NaN where no rate of the second is stable.

    Example:
        >>> quotient(between(0.3, [1.0]), between(0.1, [0.3])).interval()
        (1.0, 10.0)
    """
    (low, high), (least, most) = (map(float, one.bracket or ()) for one in (first, second))
    if not least:
        return math.nan
    value = share * float(first.value) / float(second.value)
    return Estimate(name="ratio", value=value, bracket=(share * low / most, share * high / least))
