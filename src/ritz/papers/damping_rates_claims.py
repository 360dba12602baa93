"""What the rows of `damping_rates` say of rates and dampings, beside the sentences of seed 004.

The paper compares settings that it has chosen by a grid. Here the best of several settings is the one of the highest
mean accuracy on the 5,000 validation images, and what is compared is the accuracy on the test images, at equal seed: so
the best of many is not better by chance. A lost run counts as chance, 1 %.

"The largest learning rate with which Adam trains" at its usual eps is read as the rate of the highest mean training
accuracy: at larger ones it falls off long before runs are lost. "Larger rates" of Adam are those beyond it, and of SGD
those beyond the one that fits the training images best.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..measures.study.correlation import spearman
from ..results import Estimate
from .base import Claim
from .damping_cifar import Arm
from .damping_cifar_kinds import PAPER, SAME_ACCURACY, difference, faster
from .damping_cifar_runs import Runs
from .damping_rates import ADAM, DAMPED, DAMPINGS, FROM_ZERO, LEARNED, SGD, TRAINS, USUAL, study
from .experiment import Progress, Rows, Setting
from .over_seeds import HALF, correlation, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLACE = "by a network of 21,836 parameters in place of VGG-16"
LEAST_RATES = 3  # of a rank correlation
IDENTITY = (
    "as published, averages start from the identity, of which 0.95^(step / 10) is left as damping of its own, and "
    "steps are clipped"
)

_claim = partial(Claim, paper=PAPER)


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train the grid, and judge."""
    rows = study(setting, progress)
    return rows, claims(rows)


def claims(rows: Rows) -> list[Claim]:
    """Rates of SGD, dampings of Adam, learned dampings of Adam, and KFAC from a damping of near zero."""
    runs = Runs(rows)
    sgd, usual = _run(runs, SGD), fitted(runs, ADAM)
    found = _rates(runs, sgd)
    best = chosen(runs, sgd)
    if best is not None and usual is not None:
        found += [*_dampings(runs, best, usual), *_learned(runs, best, usual)]
    return found + _from_zero(runs)


def _run(runs: Runs, arms: Iterable[Arm]) -> list[Arm]:
    """Those that were run."""
    return [arm for arm in arms if runs.of(arm)]


def chosen(runs: Runs, arms: Iterable[Arm]) -> Arm | None:
    """The arm of the highest mean accuracy on validation images; None of none.

    Example:
        >>> rows = [{"arm": arm.label, "seed": 0, "state": "trained", "val_accuracy": [end]}
        ...         for arm, end in zip(SGD, (1.0, 9.0, 3.0))]
        >>> chosen(Runs(rows), SGD).label
        'SGD 0.003'
    """
    return max(_run(runs, arms), key=lambda arm: float(runs.accuracy(arm, "val").mean()), default=None)


def fitted(runs: Runs, arms: Iterable[Arm]) -> Arm | None:
    """The arm of the highest mean accuracy on training images; None where no run of any was trained.

    Example:
        >>> rows = [{"arm": arm.label, "seed": 0, "state": "trained", "train_accuracy": [end]}
        ...         for arm, end in zip(ADAM, (30.0, 60.0, 40.0))]
        >>> fitted(Runs(rows), ADAM).label
        'Adam 0.0003, flat 1e-08'
    """
    some = [arm for arm in _run(runs, arms) if runs.decided(arm)]
    return max(some, key=lambda arm: _mean(runs, arm, "train"), default=None)


def _mean(runs: Runs, arm: Arm, which: str) -> float:
    return float(runs.accuracy(arm, which).mean())


def _listed(runs: Runs, arms: Iterable[Arm]) -> str:
    """Mean accuracies on training and test images, arm by arm, and how many runs were lost or at chance."""
    told = []
    for arm in arms:
        states = [row["state"] for row in runs.of(arm)]
        trouble = "".join(f", {states.count(s)} {s}" for s in ("lost", "at chance") if s in states)
        told.append(f"{arm.label}: {_mean(runs, arm, 'train'):.1f} and {_mean(runs, arm, 'test'):.1f} %{trouble}")
    return f"training and test accuracy, means over seeds: {'; '.join(told)}"


# ------------------------------------------------------------------------------------------ figure 1b: rates


def _rates(runs: Runs, sgd: Sequence[Arm]) -> list[Claim]:
    """Larger rates optimise less well and generalise better."""
    best = fitted(runs, sgd)
    steady = [arm for arm in sgd if all(row["state"] == "trained" for row in runs.of(arm))]
    larger = [arm for arm in steady if best is not None and arm.lr > best.lr]
    if best is None or not larger:
        return []
    seen = f"; {_length(runs)}, {_listed(runs, sgd)}"
    text = "larger rates of SGD, where they optimise less well, generalise better: {} - {}"
    found = [
        _told(difference(runs, f"figure 1b, section 7.2, {PLACE}", text.format(arm.label, best.label), arm, best), seen)
        for arm in larger
    ]
    ranks = _claim(
        where="figure 1b", ours=True, expected=0.0, relation=">=", measured=_ranks(runs, steady), evidence=seen[2:],
        text="larger rates of SGD generalise better: rank correlation of rate and test accuracy, over rates that train",
    )  # fmt: skip
    return [*found, *([ranks] if len(steady) >= LEAST_RATES else [])]


def _ranks(runs: Runs, arms: Sequence[Arm]) -> Estimate:
    """The rank correlation of rate and test accuracy, seed by seed; seeds that lack a rate are left out."""
    curves: dict[int, list[tuple[float, float]]] = {}
    for arm in arms:
        for row in runs.of(arm):
            curves.setdefault(row["seed"], []).append((arm.lr, row["test_accuracy"][-1]))
    return correlation(
        float(spearman(*zip(*points, strict=True), resamples=1).value)
        for points in curves.values() if len(points) == len(arms)
    )  # fmt: skip


def _length(runs: Runs) -> str:
    """How long the training was, and on what."""
    row = next((row for rows in runs.rows.values() for row in rows if row["epoch"]), None)
    return "" if row is None else f"{row['images']:,} images, {max(row['epoch'])} epochs"


# ------------------------------------------------------------------------------------------ section 6.3: damping


def _dampings(runs: Runs, sgd: Arm, usual: Arm) -> list[Claim]:
    """At the rate that fits best with the usual eps, and beyond it."""
    where = f"section 6.3, {PLACE}"
    seen = f"; of Adam's rates {usual.label} fits best: {_listed(runs, _run(runs, ADAM))}"
    found = [_told(difference(runs, where, f"Adam under-performs SGD: {sgd.label} - {usual.label}", sgd, usual), seen)]
    tuned = chosen(runs, ADAM)
    if tuned is not None and tuned != usual:
        text = f"Adam under-performs SGD at the rate that generalises best, too: {sgd.label} - {tuned.label}"
        found.append(difference(runs, "section 6.3", text, sgd, tuned, ours=True))
    same = _run(runs, [arm for arm in DAMPED if arm.lr == usual.lr])
    best = chosen(runs, same)
    if best is not None:
        text = f"at the same rate more damping helps: {best.label} - {usual.label}"
        found.append(_told(difference(runs, where, text, best, usual), f"; {_listed(runs, same)}"))
        most = same[-1]
        if most.damping == DAMPINGS[-1] and most != best:
            text = f"over-damping harms: {best.label} - {most.label}"
            found.append(difference(runs, where, text, best, most))
    beyond = _run(runs, [arm for arm in (*ADAM, *DAMPED) if arm.lr > usual.lr])
    larger = chosen(runs, beyond)
    if larger is not None:
        found += [_unstable(runs, where, usual, beyond), *_matches(runs, where, larger, sgd)]
    return found


def _told(claim: Claim, more: str) -> Claim:
    return replace(claim, evidence=claim.evidence + more)


def _unstable(runs: Runs, where: str, usual: Arm, beyond: Sequence[Arm]) -> Claim:
    """Of the larger rates, those that optimise less well than the usual setting: how many are ahead on test images."""
    poor = [arm for arm in beyond if _mean(runs, arm, "train") < _mean(runs, usual, "train")]
    poor = [arm for arm in poor if any(row["state"] == "trained" for row in runs.of(arm))]
    ahead = [arm for arm in poor if _mean(runs, arm, "test") > _mean(runs, usual, "test")]
    names = ", ".join(arm.label.removeprefix("Adam ") for arm in ahead) or "none"
    return _claim(
        where=where, expected=HALF, relation=">=", measured=share(arm in ahead for arm in poor),
        text="at larger rates, many settings that optimise less well than the usual one generalise better, read as at "
        "least half of them", evidence=f"{len(ahead)} of {len(poor)} that left chance, by means over seeds: {names}. "
        f"{_listed(runs, (usual, *poor))}",
    )  # fmt: skip


def _matches(runs: Runs, where: str, best: Arm, sgd: Arm) -> list[Claim]:
    """At larger rates with larger damping, Adam is as good as SGD, and faster."""
    text = f"at a larger rate and damping Adam matches SGD or beats it: {best.label} - {sgd.label}"
    return [
        difference(runs, where, text, best, sgd, expected=0.0, tolerance=SAME_ACCURACY),
        faster(
            runs, where, f"at a larger rate and damping Adam converges faster: {best.label} - {sgd.label}", best, sgd
        ),
    ]


# ---------------------------------------------------------------------------------- section 7.3: learned damping


def _learned(runs: Runs, sgd: Arm, usual: Arm) -> list[Claim]:
    """Learned damping at larger rates beside the usual setting, SGD, and flat dampings."""
    where = f"section 7.3, {PLACE}"
    best = chosen(runs, [arm for arm in LEARNED if arm.lr > usual.lr])
    if best is None:
        return []
    name = best.label
    text = "a larger rate with learned damping {} the usual setting: {} - {}"
    found = [
        difference(runs, where, text.format("generalises better than", name, usual.label), best, usual),
        faster(runs, where, text.format("converges faster than", name, usual.label), best, usual),
        difference(
            runs, where, f"a larger rate with learned damping does not make up the gap with SGD: {name} - {sgd.label}",
            best, sgd, "<=", expected=0.0,
        ),
    ]  # fmt: skip
    flat = chosen(runs, [arm for arm in DAMPED if arm.lr > usual.lr])
    if flat is not None:
        text = f"learned damping is no better than a larger rate with a larger flat damping: {name} - {flat.label}"
        found.append(difference(runs, where, text, best, flat, "<=", expected=0.0))
    smaller = chosen(runs, [arm for arm in DAMPED if arm.lr == usual.lr])
    if smaller is not None:
        where, pair = f"figure 15, {PLACE}", f"{name} - {smaller.label}"
        text = f"learned damping with linear decay does not supersede a smaller rate with flat damping: {pair}"
        found.append(difference(runs, where, text, best, smaller, "<=", expected=0.0))
        text = f"learned damping with linear decay trains better than a smaller rate with flat damping: {pair}"
        text += ", training accuracy"
        found.append(difference(runs, where, text, best, smaller, which="train"))
    return found


# ------------------------------------------------------------------------------------------ section 7.1: near zero


def _from_zero(runs: Runs) -> list[Claim]:
    """KFAC does not train with a damping of near zero, and none is learned from there."""
    found = []
    for arm in _run(runs, FROM_ZERO):
        words = "from a damping of near zero none is learned" if arm.learned else "with a damping of near zero"
        note = f"; {IDENTITY}" if arm.code else ""
        found.append(
            _claim(
                where=f"section 7.1, {PLACE}" if arm.code else "section 7.1", ours=not arm.code, expected=1.0,
                reference=HALF, measured=share(row["state"] != "trained" for row in runs.of(arm)),
                text=f"{words}{', and' if arm.learned else ''} the network does not train ({arm.label}): share of runs "
                "lost or at chance",
                evidence=f"{runs.told(arm)}{note}; {_losses(runs, arm)}; beside it {runs.told(TRAINS)}",
            )
        )  # fmt: skip
    return found


def _losses(runs: Runs, arm: Arm) -> str:
    """Where training losses ended."""
    ends = [row["train_loss"][-1] for row in runs.of(arm) if row["train_loss"]]
    told = f", {statistics.fmean(ends):.2f} on average" if ends else ""
    return f"training loss at the end of those that were not given up{told}, {math.log(100):.2f} for a guess"


# ------------------------------------------------------------------------------------------ figure


def figure(rows: Rows) -> "Figure":
    """Accuracies by rate of SGD and of Adam with its usual eps, and those of Adam by rate and damping as two tables."""
    from matplotlib.figure import Figure

    runs = Runs(rows)
    drawing = Figure(figsize=(14, 4.2), layout="constrained")
    axes = drawing.subplots(1, 3)
    for place, (name, arms) in enumerate((("SGD", SGD), (f"Adam, eps {USUAL:g}", ADAM))):
        own = _run(runs, arms)
        for which, style in (("test", "o-"), ("train", "s:")):
            means = [_mean(runs, arm, which) for arm in own]
            axes[0].plot([arm.lr for arm in own], means, style, color=f"C{place}", ms=4, label=f"{name}, {which}")
            for arm, height in zip(own, means, strict=True):
                values = runs.accuracy(arm, which)
                axes[0].plot([arm.lr] * 2, [values.min(), values.max()], color=f"C{place}", lw=0.8)
                if any(row["state"] == "lost" for row in runs.of(arm)):
                    axes[0].plot([arm.lr], [height], "x", color="black", ms=8)
    axes[0].set(xscale="log", xlabel="learning rate", ylabel="accuracy, %", ylim=(-3, 105), title="x: a run is lost")
    axes[0].grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize="small", ncols=2, loc="upper center")
    for ax, which in zip(axes[1:], ("test", "train"), strict=True):
        _table(ax, runs, which)
    count = len({row["seed"] for row in rows})
    drawing.suptitle(f"means over {count} seeds, bars from the least to the most; {_length(runs)}", fontsize=9)
    return drawing


def _table(ax: "Axes", runs: Runs, which: str) -> None:
    """Adam's accuracy by rate and damping, flat and learned."""
    own = _run(runs, (*ADAM, *DAMPED, *LEARNED))
    rates = sorted({arm.lr for arm in own})
    kinds = sorted({(arm.learned, arm.damping) for arm in own})
    cells = [[math.nan] * len(rates) for _ in kinds]
    most = max(_mean(runs, arm, which) for arm in own)
    for arm in own:
        row, column = kinds.index((arm.learned, arm.damping)), rates.index(arm.lr)
        value = cells[row][column] = _mean(runs, arm, which)
        mark = " x" if any(one["state"] == "lost" for one in runs.of(arm)) else ""
        ink = "white" if value > 0.6 * most else "black"
        ax.text(column, row, f"{value:.1f}{mark}", ha="center", va="center", fontsize=8, color=ink)
    ax.imshow(cells, cmap="YlGn", aspect="auto", vmin=0.0)
    ax.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates], fontsize=8)
    ax.set_yticks(range(len(kinds)), [f"{'from ' if learned else ''}{eps:g}" for learned, eps in kinds], fontsize=8)
    words = {"test": "test", "train": "training"}[which]
    ax.set(
        xlabel="learning rate of Adam", ylabel="eps, flat or learned", title=f"{words} accuracy, %; x: a run is lost"
    )
