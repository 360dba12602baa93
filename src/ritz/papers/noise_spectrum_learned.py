"""What section 7.1 of seed 004 says of the noise before training and after divergence, and of learning it less.

The paper has VGG-16; what holds of smaller networks at their first weights, and how the damping itself depends on the
gap between refreshes, are questions of ours.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..results import Estimate
from .base import Claim
from .noise_spectrum_measures import summary
from .over_seeds import mean

_claim = partial(Claim, paper="seed 004", where="section 7.1")
PLACE = "section 7.1, by a network of 11,018 parameters on Fashion-MNIST in place of VGG-16"

LEAST_DAMPING = 1e-4  # of the paper's grid: a noise far below it changes nothing
LEVEL_LOST = math.log(10) - 0.05  # a loss from which a network of ten classes has learned nothing

Row = Mapping[str, Any]


def section_7(rows: Sequence[Row]) -> list[Claim]:
    """First weights, divergence, the gap between refreshes, and how long a noise stays what it is."""
    runs = summary(rows, kind="run")
    return [*_first_weights(rows), *_diverged(runs), *_gap(runs), *_along(runs)]


def _first_weights(rows: Sequence[Row]) -> list[Claim]:
    """That there is no noise before training."""
    first = summary(rows, kind="first weights")
    flat = summary(summary(rows, kind="run"), arm="flat")
    start, end = ([row[state]["noise"] for row in flat] for state in ("start", "end"))
    network = first[0]["network"]
    text = "the variance of the Hessian at the first weights is zero: Tr X^2 / P at B = {}, {}"
    dense = summary(rows, kind="dense")
    middle = dense[0]["spikes"]["size"]
    before, after = ([row["spikes"]["s2"] for row in summary(dense, state=state)] for state in ("start", "trained"))
    claim = partial(_claim, expected=LEAST_DAMPING, relation="<=")
    return [
        claim(
            text=text.format(128, network), measured=mean([row["noise"] for row in first]),
            evidence=f"{len(first)} seeds, batches of {first[0]['measured_at']} scaled to 128; beside the smallest "
            f"damping of the paper's grid. Not divided by P = {first[0]['params']:,}, Tr X^2 is "
            f"{mean([row['noise'] * row['params'] for row in first]).value:.2g}.",
        ),
        claim(
            text=text.format(128, "11,018 parameters"), measured=mean(start), ours=True,
            evidence=f"{len(start)} seeds, 16 batches and 4 probes. After training it is {mean(end).value:.2g}.",
        ),
        claim(
            text=text.format(middle, f"{dense[0]['params']:,} parameters"), measured=min(before), ours=True,
            evidence=f"From all of X; the smallest of {len(before)} seeds. In the mean it is "
            f"{mean(before).value:.2g}, and {mean(after).value:.2g} after training.",
        ),
    ]  # fmt: skip


def _diverged(runs: Sequence[Row]) -> list[Claim]:
    """That there is none after divergence."""
    mine = summary(runs, arm="diverged")
    ended = [row for row in mine if row["stop"] == "finished" and row["train_loss"] > LEVEL_LOST]
    lost = sum(row["stop"] != "finished" for row in mine)
    values = [row["end"]["noise"] for row in ended]
    return [
        _claim(
            where=PLACE, text="once a network has diverged the variance of the Hessian is zero: largest "
            "Tr X^2 / P of runs that ended with the loss of a guess", expected=LEAST_DAMPING, relation="<=",
            measured=max(values, default=math.nan),
            evidence=f"SGD at a rate of 0.8 on 11,018 parameters: of {len(mine)} runs {len(ended)} ended so, "
            f"{sum(value == 0 for value in values)} of them with exactly 0, and {lost} in NaN. Where "
            "all units are dead the outputs are the last biases alone, and H is the same for all samples.",
        )
    ]  # fmt: skip


def _gap(runs: Sequence[Row]) -> list[Claim]:
    """Results with a damping learned more often or less."""
    often, seldom = runs[0]["gaps"]
    arms = {gap: {row["seed"]: row for row in summary(runs, arm=f"gap {gap}")} for gap in (often, seldom)}
    seeds = [seed for seed in arms[often] if all(arm[seed]["stop"] == "finished" for arm in arms.values())]
    seen = f"KFAC on 11,018 parameters, {runs[0]['steps']} steps, {len(seeds)} pairs at equal seed."

    def apart(key: str, scale: float = 1.0) -> Estimate:
        return mean([scale * (arms[often][seed][key] - arms[seldom][seed][key]) for seed in seeds])

    text = f"results with gap {often} are those with gap {seldom}: difference in "
    claim = partial(_claim, where=PLACE, expected=0.0)
    flat = {row["seed"]: row for row in summary(runs, arm="flat")}
    more = mean([100 * (flat[seed]["test_accuracy"] - arms[seldom][seed]["test_accuracy"]) for seed in seeds])
    times = mean([arms[often][seed]["seconds"] / flat[seed]["seconds"] for seed in seeds])
    ratio = mean([_mean_damping(arms[often][seed]) / _mean_damping(arms[seldom][seed]) for seed in seeds])
    return [
        claim(
            text=text + "test error, points", tolerance=0.5, measured=apart("test_accuracy", -100.0),
            evidence=f"{seen} Gap {seldom} minus flat: {more.value:+.2f} points. Gap {often} takes {times.value:.1f} "
            "times as long as a flat damping.",
        ),
        claim(text=text + "training loss", tolerance=0.02, measured=apart("train_loss"), evidence=seen),
        _claim(
            text=f"ratio of mean learned dampings, gap {often} over gap {seldom}", expected=1.0,
            tolerance=0.1, measured=ratio, ours=True,
            evidence=f"{seen} Means over steps, the start value until the first refresh included: it comes at step "
            f"{often} or {seldom}, and the moving average, 0.7 at each refresh, spans as many times more steps.",
        ),
    ]  # fmt: skip


def _mean_damping(row: Row) -> float:
    """Over the steps of a run; until the first refresh it is what the rule adds to, the learned less the noise."""
    history = row["history"]
    start = history[0][1] - history[0][2]
    marks = [0.0, *(entry[0] for entry in history), float(row["steps"])]
    values = [start, *(entry[1] for entry in history)]
    total = math.fsum(value * (b - a) for value, a, b in zip(values, marks, marks[1:], strict=False))
    return total / float(row["steps"])


def autocorrelation(row: Row, lag: int, skip: int) -> float:
    """Of the logarithm of the noise along a run, refreshes that far apart, the first steps left out.

    Example:
        >>> history = [[step, 0.0, math.exp(math.sin(step)), 0.0] for step in range(1, 200)]
        >>> round(autocorrelation({"history": history}, 44, skip=0), 1)  # 44 is fourteen times pi
        1.0
    """
    kept = [entry for entry in row["history"] if entry[0] > skip and entry[2] > 0]
    x = torch.tensor([entry[2] for entry in kept], dtype=torch.float64).log()
    if len(x) <= lag + 2:
        return math.nan
    return float(torch.corrcoef(torch.stack([x[:-lag], x[lag:]]))[0, 1])


def _along(runs: Sequence[Row]) -> list[Claim]:
    """Whether a damping that is a gap old is still the right one."""
    often, seldom = runs[0]["gaps"]
    mine = summary(runs, arm=f"gap {often}")
    lag = seldom // often
    pairs = [(autocorrelation(row, 1, seldom), autocorrelation(row, lag, seldom)) for row in mine]
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    noisy = sorted(entry[3] / entry[2] for row in mine for entry in row["history"] if entry[2] > 0)
    seen = (
        f"Estimates every {often} steps after the first {seldom}, {len(mine)} runs; the standard error of one is "
        f"{noisy[len(noisy) // 2]:.2f} of its value (median). {often} steps apart they correlate by "
        f"{mean([near for near, _ in pairs]).value:.2f}."
    )
    return [
        _claim(
            text=f"refreshing every {seldom} steps loses nothing: correlation of the log noise "
            f"{seldom} steps apart minus that {often} steps apart", expected=0.0, tolerance=0.1,
            measured=mean([far - near for near, far in pairs]), evidence=seen, ours=True,
        )
    ]  # fmt: skip
