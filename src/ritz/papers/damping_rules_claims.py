"""What follows from the rows of `damping_rules`: stability, accuracy by epochs and seconds, dampings and noise."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..results import Estimate
from .base import Claim
from .damping_cifar_runs import accuracy, at_time
from .experiment import Rows
from .over_seeds import HALF, geometric_mean, mean, ratio, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLAT, LM = "flat", "Levenberg-Marquardt"
ADDED = "learned, added"
LM_SIGN = f"{LM}, sign as published"
FLAT_FREE, LM_FREE = f"{FLAT}, unclipped", f"{LM}, unclipped"
PLACE = "a network of 21,836 parameters in place of VGG-16"
START = 0.03
ENOUGH = 0.1  # a tenth: an estimate that is off by no more is as good as that from all batches

Row = Mapping[str, Any]
_claim = partial(Claim, paper="seed 004")


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Stability of the rules, accuracies beside flat damping, and what few batches say of the noise.

    Example:
        >>> row = {"state": "trained", "steps": 9, "epoch": [1], "seconds": [2.0], "run_seconds": 2.0, "images": 90,
        ...        "train_accuracy": [40.0], "train_loss": [2.0], "last_damping": 1.0, "mean_damping": 1.0}
        >>> rows = [{**row, "seed": seed, "arm": arm, "test_accuracy": [end + seed], "at_bound": 0.0}
        ...         for seed in (0, 1) for arm, end in (("flat", 30.0), ("Levenberg-Marquardt", 31.0))]
        >>> [(claim.verdict, claim.ours) for claim in claims(rows)][:2]
        [('not decidable', False), ('not decidable', True)]
    """
    arms: dict[str, dict[int, Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], {})[row["seed"]] = row
    found = [*_stable(arms), *_beside(arms), *_courses(arms)]
    noises = [row["noise"] for row in arms.get(FLAT, {}).values() if "noise" in row]
    return found + (_few(noises) if noises else [])


def told(rows: Mapping[int, Row]) -> str:
    """An arm in words.

    Example:
        >>> told({0: {"arm": "flat", "state": "lost", "steps": 50, "last_damping": 0.03, "epoch": []}})
        'flat: 1 seeds, 1 lost by step 50; the damping ended at 0.03'
    """
    own = list(rows.values())
    states = [row["state"] for row in own]
    parts = [f"{own[0]['arm']}: {len(own)} seeds"]
    lost = sorted(row["steps"] for row in own if row["state"] == "lost")
    parts += [f"{len(lost)} lost by step {', '.join(map(str, lost))}"] if lost else []
    parts += [f"{states.count('at chance')} at chance"] if "at chance" in states else []
    kept = [row for row in own if row["epoch"] and row["state"] != "lost"]
    if kept:
        ends = {which: statistics.fmean(row[f"{which}_accuracy"][-1] for row in kept) for which in ("train", "test")}
        parts.append(f"{kept[0]['epoch'][-1]} epochs, training {ends['train']:.1f} and test {ends['test']:.1f} %")
    ends_at = ", ".join(f"{value:.2g}" for value in sorted({row["last_damping"] for row in own}))
    return f"{', '.join(parts)}; the damping ended at {ends_at}"


def _failed(rows: Mapping[int, Row]) -> Estimate:
    """The share of runs that are lost or at chance."""
    return share(row["state"] != "trained" for row in rows.values())


def _stable(arms: Mapping[str, Mapping[int, Row]]) -> list[Claim]:
    """Which rules lose runs."""
    found = []
    if LM in arms:
        found.append(
            _claim(
                where=f"section 7.1, by {PLACE}", expected=1.0, reference=HALF, measured=_failed(arms[LM]),
                text=f"{LM}'s damping does not give stable training: share of runs lost or at chance",
                evidence=told(arms[LM]),
            )
        )  # fmt: skip
    for arm, expected, text in (
        (FLAT, 0.0, "flat damping trains, from the same start value"),
        (LM_SIGN, 1.0, f"{LM}'s damping with the sign of the published code does not train"),
        (LM_FREE, 1.0, f"{LM}'s damping without kl_clip does not give stable training"),
        (FLAT_FREE, 1.0, "flat damping without kl_clip does not give stable training"),
    ):
        if arm in arms:
            found.append(
                _claim(
                    where="section 7.1", ours=True, expected=expected, reference=HALF, measured=_failed(arms[arm]),
                    text=f"{text}: share of runs lost or at chance", evidence=told(arms[arm]),
                )
            )  # fmt: skip
    return found


def _beside(arms: Mapping[str, Mapping[int, Row]]) -> list[Claim]:
    """Test accuracy of every rule less that of flat damping, at equal seed, epochs and seconds."""
    flat = arms.get(FLAT, {})
    pairs = {arm: own for arm, own in arms.items() if arm not in (FLAT, FLAT_FREE, LM_FREE)}
    found = []
    for arm, own in pairs.items():
        seeds = [seed for seed in own if seed in flat]
        about: dict[str, Any] = {"expected": 0.0, "relation": ">=", "ours": True}
        apart = [accuracy(own[seed]) - accuracy(flat[seed]) for seed in seeds]
        both = f"{told(own)}; {told(flat)}"
        found.append(
            _claim(
                where="section 7.1", text=f"{arm} minus flat at equal epochs: points of test accuracy",
                measured=mean(apart), evidence=both, **about,
            )
        )  # fmt: skip
        ends = [_common_end(own[seed], flat[seed]) for seed in seeds]
        apart = [at_time(own[s], end) - at_time(flat[s], end) for s, end in zip(seeds, ends, strict=True)]
        took = ratio(
            *({seed: rows[seed]["run_seconds"] / rows[seed]["steps"] for seed in seeds} for rows in (flat, own))
        )
        found.append(
            _claim(
                where="section 7.1", text=f"{arm} minus flat at equal seconds: points of test accuracy",
                measured=mean(apart),
                evidence=f"a step takes {float(took.value):.2f} times as long; {_seconds(own, flat)}",
                **about,
            )
        )  # fmt: skip
    return found


def _common_end(first: Row, second: Row) -> float:
    """The seconds of the run that ended first; one that is lost has no end to be compared at."""
    return min((row["run_seconds"] for row in (first, second) if row["state"] != "lost"), default=0.0)


def _seconds(own: Mapping[int, Row], flat: Mapping[int, Row]) -> str:
    """How even the clock was, and where in its schedule a slower run is."""
    each = [sorted(1000 * row["run_seconds"] / row["steps"] for row in rows.values()) for rows in (own, flat)]
    spans = " and ".join(f"from {span[0]:.0f} to {span[-1]:.0f} ms" for span in each)
    return (
        f"steps, and those of flat damping, took {spans} on a machine that others used too; the slower run is then in "
        "the midst of its schedule of rates"
    )


def _courses(arms: Mapping[str, Mapping[int, Row]]) -> list[Claim]:
    """Where the dampings go."""
    found = []
    for arm in (LM, LM_SIGN, LM_FREE):
        own = [row for row in arms.get(arm, {}).values() if "at_bound" in row]
        if own:
            ratios = [row["median_ratio"] for row in own if "median_ratio" in row]
            center = statistics.fmean(ratios) if ratios else math.nan
            more = f"; the median ratio of what the loss fell by to what was foretold is {center:.2f}"
            found.append(
                _claim(
                    where="section 7.1", ours=True, expected=0.0, measured=max(row["at_bound"] for row in own),
                    text=f"the damping of {arm} stays within its bounds: largest share of refreshes at a bound",
                    evidence=told(arms[arm]) + (more if ratios else ""),
                )
            )  # fmt: skip
    for arm in (LM, ADDED, "learned, floor", "Ledoit-Wolf", "bulk edge"):
        if arm in arms:
            ends = geometric_mean(row["mean_damping"] / START for row in arms[arm].values())
            found.append(
                _claim(
                    where="section 7.1", ours=True, expected=1.0, tolerance=ENOUGH, measured=ends,
                    text=f"the damping of {arm} stays where it began, {START:g}: its mean over steps, ratio",
                    evidence=told(arms[arm]),
                )
            )  # fmt: skip
    return found


def _few(noises: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """What some batches say of the noise, against all."""
    first = noises[0]
    most, number = first["sizes"][-1], first["batches_in_all"]

    def at(key: str, size: int) -> list[float]:
        return [one[key][one["sizes"].index(size)] for one in noises]

    by = ", ".join(f"{n}: {statistics.fmean(at('batches', n)):.3f}" for n in first["sizes"])
    probe = statistics.fmean(one["probes"] for one in noises)
    noise = ", ".join(f"{one['all']:.3g}" for one in noises)
    seen = (
        f"{len(noises)} trained networks, Tr X^2 / P {noise} from {number} batches of {first['size']}; one probe, by "
        f"number of batches {by}. One probe with all batches is off by {probe:.3f}"
    )
    claim = partial(_claim, relation="<=", evidence=seen)
    own = [one["own"] / 2 for one in noises]  # of four
    found = [
        claim(
            where=f"section 7.1, by {PLACE}", expected=ENOUGH, measured=mean(at("batches", most)),
            text=f"{most} batches give the noise that all batches give, one probe: relative error",
        ),
        claim(
            where="section 7.1", ours=True, expected=ENOUGH, measured=mean(at("both", most)),
            text=f"{most} batches and one probe give the noise that all batches and probes give: relative error",
        ),
    ]  # fmt: skip
    if 8 in first["sizes"]:
        found.append(
            claim(
                where="section 7.1, the published code", ours=True, expected=ENOUGH, measured=mean(at("batches", 8)),
                text="8 batches give the noise that all batches give, one probe: relative error",
            )
        )  # fmt: skip
    found.append(
        claim(
            where="section 7.1", ours=True, expected=1.0,
            measured=geometric_mean(a / b for a, b in zip(own, at("both", most), strict=True)),
            text=f"4 batches, each with its own probe, estimate the noise no worse than {most} with one: error ratio",
            evidence=f"{seen}. 4 with a probe each are off by {statistics.fmean(own):.3f}",
        )
    )  # fmt: skip
    return found


def figure(rows: Rows) -> "Figure":
    """Test accuracy by epoch and by seconds, dampings by step, and the error of estimates by number of batches."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(row["arm"] for row in rows))
    picture = Figure(figsize=(15, 4.6), layout="constrained", facecolor="white")
    axes = picture.subplots(1, 4)
    for place, label in enumerate(labels):
        own = [row for row in rows if row["arm"] == label]
        style: dict[str, Any] = {"color": f"C{place}", "lw": 1.2}
        for row in own:
            for ax, key in zip(axes, ("epoch", "seconds"), strict=False):
                ax.plot(row[key], row["test_accuracy"], **style)
                if row["state"] == "lost":
                    ax.plot([row[key][-1] if row[key] else 0], [1.0], "x", color=f"C{place}")
            points = row.get("damping_step", [0, row["steps"]]), row.get("damping", [row["last_damping"]] * 2)
            axes[2].plot(*points, **style)
        axes[0].plot([], [], label=label, **style)
    for row in rows:
        if "noise" in row:
            for key, mark in (("batches", "o-"), ("both", "s--")):
                axes[3].plot(row["noise"]["sizes"], row["noise"][key], mark, ms=4, color="C0" if mark == "o-" else "C1")
    axes[3].plot([], [], "o-", color="C0", label="from all batches, the same probe")
    axes[3].plot([], [], "s--", color="C1", label="from all batches and probes")
    axes[3].legend(frameon=False, fontsize=8)
    axes[0].set(xlabel="epoch", ylabel="test accuracy, %")
    axes[1].set(xlabel="seconds of training", ylabel="test accuracy, %")
    axes[2].set(xlabel="step", ylabel="damping δ", yscale="log")
    axes[3].set(xlabel="batches", ylabel="relative error of Tr X² / P", xscale="log", yscale="log")
    sizes = sorted({size for row in rows if "noise" in row for size in row["noise"]["sizes"]})
    axes[3].set_xticks(sizes, [str(size) for size in sizes])
    axes[3].set_xticks([], minor=True)
    for ax in axes:
        ax.grid(alpha=0.3)
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    picture.suptitle("every seed; x: a lost run", fontsize=9)
    return picture
