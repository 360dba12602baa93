"""Figure 3 and appendix B.1 of seed 003: Hessian traces of single samples against ACEHT and the margin bound.

The paper trains LeNet by SGD with a learning rate and a batch size that it does not state, takes 1,000 training points
of MNIST at the start, after 5,000 and after 10,000 steps, and finds r between 0.8 and 1 for points that are classified
correctly, rising with the training accuracy, and no correlation for the others. In appendix B.1 it finds the same for a
fully connected network with BatchNorm and batches of 256 and of 4096. Here (`COURSES`):

- LeNet has learning rate 0.05, without momentum, and batches of 120 images, so that 500 steps are an epoch.
- The network of the appendix is F1 of Keskar et al. with learning rate 0.1 and whole batches, as in `margins_batch`.
- An early stop is looked at too, which the paper does not show apart.
- Each seed is one run, looked at along the way.
- BatchNorm has its running statistics, as PyHessian takes a network in evaluation mode.

The last statement has theory against it. For a network that is affine in each single weight Tr H_i = sum_k p_k
|grad(f_k - sum_j p_j f_j)|^2, in which the label does not occur; nor does it in ACEHT. So right and wrong points obey
the same law, and r over the wrong ones can only be less where these are few or all alike. Estimates do not obey it:
those of wrong points have far more noise (see `margins_hutchinson`). So r is also taken over up to 1,000 wrong points
of the whole training set (`everywrong`), and for LeNet over right and wrong ones with traces by PyHessian's rule
(`ruled`), which is what the paper had. Where no training point is wrong the paper sets r to 0; here nothing is asked.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..estimators.samples import sample_traces
from ..measures.margins.summaries import sample_aceht
from ..measures.outputs import Outputs, sample_outputs
from ..measures.study.correlation import pearson, without_outliers
from ..models import keskar_f1, lenet5
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .loop import Training, initial
from .margins_hutchinson import one_by_one
from .margins_points import BOUND, NUM_POINTS, correlations, drawn, fit, load_grey, mean, mean_r, paired, risk_of
from .pool import train_all
from .recipe import Recipe, on_parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_RULED = 200  # of each kind, for PyHessian's rule takes one at a time
LEAST = 10  # points of a correlation
LOW, STRONG = 0.3, 0.8  # |r| below which there is "no correlation", and from which the paper speaks of one

_claim = partial(Claim, paper="seed 003")


@dataclass(frozen=True)
class Course:
    """A network along its training.

    Attributes:
        title: For people.
        model: Makes it.
        lr: Of SGD without momentum.
        batch_size: Images of a step.
        stops: The epochs after which it is looked at, by the paper but for the first.
        short_stops: At the budget short.
        where: Three places of the paper: r with ACEHT, r with the margin bound, both along training.
        seeds: How many, at budgets smoke, short and paper.
        ruled: Whether traces are taken by PyHessian's rule as well.
    """

    title: str
    model: Callable[[], nn.Module]
    lr: float
    batch_size: int
    stops: tuple[int, int, int]
    short_stops: tuple[int, int, int]
    where: tuple[str, str, str] = ("appendix B.1",) * 3
    seeds: tuple[int, int, int] = (2, 2, 4)
    ruled: bool = False


COURSES = {
    "lenet": Course(  # 500, 5,000 and 10,000 steps of 60,000 images
        "LeNet on MNIST", lenet5, 0.05, 120, (1, 10, 20), (1, 10, 20), ("figure 3a", "figure 3b", "figure 3c"),
        seeds=(2, 4, 8), ruled=True,
    ),
    "f1-small": Course("F1 on MNIST", keskar_f1, 0.1, 256, (1, 21, 43), (1, 5, 11)),  # 234, 4,914 and 10,062 steps
    "f1-large": Course("F1 on MNIST", keskar_f1, 0.1, 4096, (17, 357, 714), (17, 89, 179)),  # 238, 4,998 and 9,996
}  # fmt: skip


def run(item: str, setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train, look at the stops, judge; `partial(run, "lenet")` is an experiment."""
    course = COURSES[item]
    data = load_grey("MNIST", setting, setting.pick(360, 60_000, 60_000), setting.pick(200, 10_000, 10_000))
    stops = {"smoke": (1, 4), "short": course.short_stops, "paper": course.stops}[setting.budget]
    batch_size = min(course.batch_size, setting.pick(120, 60_000, 60_000))
    recipes = {f"seed{seed}": recipe(seed, stops[-1], item, batch_size) for seed in setting.seed_range(*course.seeds)}
    num, num_ruled = setting.pick(60, NUM_POINTS, NUM_POINTS), setting.pick(3, NUM_RULED, NUM_RULED)
    finish = partial(measured, num=num, num_ruled=num_ruled if course.ruled else 0)
    runs = train_all(
        recipes, data, setting, item=item, finish=finish, progress=progress, evaluate_every=stops[-1],
        checkpoint_every=max(1, stops[-1] // 10), stops=stops[:-1], train_subset=1000,
    )  # fmt: skip
    rows = [row for run in runs.values() for row in run.found["rows"]]
    return sorted(rows, key=lambda row: (row["seed"], row["steps"])), claims(item, rows)


def recipe(seed: int, epochs: int, item: str = "lenet", batch_size: int | None = None) -> Recipe:
    """A network by SGD with one learning rate, on whole batches.

    Example:
        >>> [recipe(0, epochs, "f1-large").run(60_000).num_steps for epochs in COURSES["f1-large"].stops]
        [238, 4998, 9996]
    """
    course = COURSES[item]
    return Recipe(
        name=course.title, model=course.model, epochs=epochs, batch_size=batch_size or course.batch_size, seed=seed,
        drop_last=True, optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=course.lr),
    )  # fmt: skip


def measured(
    done: Training,
    recipe: Recipe,
    data: Mapping[str, Data],
    *,
    num: int = NUM_POINTS,
    num_ruled: int = NUM_RULED,
) -> dict[str, Any]:
    """One row for the start of the run, one for each stop, and one for its end."""
    rows = []
    for steps, model in {0: initial(recipe, data["train"][0].device), **done.along, done.steps: done.model}.items():
        risk = risk_of(model, data["train"])
        row = {"seed": recipe.seed, "steps": steps, "stop": done.stop}
        outputs = sample_outputs(risk)
        row |= fit(outputs, sample_outputs(risk.on(data["test"])))
        row |= correlations(model, data["train"], outputs, num, recipe.seed)
        if steps == done.steps and num_ruled:
            row["ruled"] = ruled(model, data["train"], outputs, num_ruled, recipe.seed)
        if recipe.seed > 0:
            del row["points"]  # a figure shows one seed
        rows.append(row)
    return {"rows": rows}


def ruled(model: nn.Module, data: Data, outputs: Outputs, num: int, seed: int) -> dict[str, dict[str, float]]:
    """Traces by PyHessian's rule of `num` right points and of `num` wrong ones: how they go with ACEHT, how far off."""
    right = outputs.correct.to(data[0].device)
    found = {}
    for word, kind in (("correct", right), ("incorrect", ~right)):
        if int(kind.sum()) < 3:
            continue
        some = drawn((data[0][kind], data[1][kind]), num, seed)
        risk = risk_of(model, some)
        exact = torch.as_tensor(sample_traces(risk, method="exact").value)
        predicted = sample_aceht(sample_outputs(risk))
        rough, probes = one_by_one(model, some, seed)
        found[word] = {
            "n": len(exact),
            "r": short(pearson(predicted, rough, resamples=1).value),
            "filtered": short(pearson(*without_outliers(predicted, rough)[:2], resamples=1).value),
            "exact_r": short(pearson(predicted, exact, resamples=1).value),
            "error": short(float((rough - exact).abs().mean() / exact.mean())),
            "probes": short(float(probes.mean())),
            "negative": int((rough < 0).sum()),
        }
    return found


# ---------------------------------------------------------------------------------------------- claims


def claims(item: str, rows: Rows) -> list[Claim]:
    """What the paper says of figure 3 or of appendix B.1, beside means over seeds."""
    course = COURSES[item]
    steps = sorted({row["steps"] for row in rows})
    shown = [steps[0], *steps[2:]] if len(steps) > 2 else steps  # by the paper: the first stop is ours
    seeds = len({row["seed"] for row in rows})
    wrong = "section 3.2.1" if item == "lenet" else "appendix B"  # "the same results as in Section 3"
    seen = f"{seeds} seeds, SGD, learning rate {course.lr:g}, batches of {course.batch_size}, exact traces"
    found = []
    for place, (name, key) in enumerate((("ACEHT", "aceht"), ("the margin bound", "bound"))):
        note = f"; {BOUND}" if key == "bound" else ""
        for step in steps[1:]:
            found.append(_claim(
                where=course.where[place],
                text=f"r of traces and {name} for correct points is 0.8 to 1: after {step} steps",
                expected=STRONG, relation=">=", measured=_mean(rows, step, key, "correct", "filtered"),
                evidence=f"{seen}; outliers removed; with them {_listed(rows, step, key, 'correct', 'r')}{note}",
            ))  # fmt: skip
        found += [_incorrect(rows, s, name, key, seen, wrong) for s in steps if _values(rows, s, key, "incorrect", "r")]
        found += _everywrong(rows, steps[-1], name, key, seen, wrong)
        pairs = [(a, b, False) for a, b in pairwise(shown)]
        pairs += [(steps[1], steps[2], True)] if shown != steps else []
        found += [_rises(rows, a, b, name, key, course.where[2], ours) for a, b, ours in pairs if _learns(rows, a, b)]
    return [*found, _with_margins(rows, steps), *_by_the_rule(rows, steps[-1], wrong)]


def _learns(rows: Rows, first: int, second: int) -> bool:
    """Whether the training accuracy rises at all: "rises with it" asks nothing else."""
    return bool((paired(rows, "train_accuracy", {"steps": first}, {"steps": second}) > 0).any())


def _with_margins(rows: Rows, steps: Sequence[int]) -> Claim:
    """The output margin itself, with which the traces go by a curve; the figures of the paper have bounds on it."""
    course = [
        " and ".join(f"{float(_mean(rows, step, 'margin', 'correct', how).value):.3f}" for how in ("filtered", "rho"))
        for step in steps[1:]
    ]
    return _claim(
        where="abstract", text="r of traces and output margins for correct points is -1 to -0.8: after "
        f"{steps[-1]} steps", expected=-STRONG, relation="<=",
        measured=_mean(rows, steps[-1], "margin", "correct", "filtered"),
        evidence="outliers removed; r and rank correlation after "
        + ", ".join(f"{step} steps {both}" for step, both in zip(steps[1:], course, strict=True)),
    )  # fmt: skip


def _by_the_rule(rows: Rows, step: int, where: str) -> list[Claim]:
    """Right points correlate and wrong ones do not: with the paper's own kind of estimates."""
    found = []
    name = "ACEHT and traces by PyHessian's rule"
    for word, said, about in (
        ("correct", f"r of {name} for correct points is 0.8 to 1:", {"expected": STRONG, "relation": ">="}),
        ("incorrect", f"no correlation of {name} for incorrect points: r", {"expected": 0.0, "tolerance": LOW}),
    ):
        own = [row["ruled"][word] for row in rows if row["steps"] == step and word in row.get("ruled", {})]
        if not own:
            continue
        parts = {key: [one[key] for one in own] for key in ("r", "exact_r", "error", "probes", "negative", "n")}
        seen = {key: float(mean(key, values).value) for key, values in parts.items()}
        found.append(_claim(
            where=where, text=f"{said} after {step} steps",
            measured=mean_r("r", [one["filtered"] for one in own]), **about,
            evidence=f"{seen['n']:.0f} points of a seed, outliers removed; with them {seen['r']:.3f}, with exact "
            f"traces {seen['exact_r']:.3f}; mean error of an estimate {100 * seen['error']:.0f} % of the mean trace, "
            f"{seen['negative']:.0f} below 0, {seen['probes']:.0f} random vectors",
        ))  # fmt: skip
    return found


def _incorrect(rows: Rows, step: int, name: str, key: str, seen: str, where: str) -> Claim:
    counts = [row[key]["incorrect"]["n"] for row in rows if row["steps"] == step]
    enough = [count for count in counts if count >= LEAST]
    return _claim(
        where=where, text=f"no correlation of traces and {name} for incorrect points: r after {step} steps",
        expected=0.0, tolerance=LOW, measured=_mean(rows, step, key, "incorrect", "r"),
        evidence=f"{seen}; {len(enough)} of {len(counts)} seeds have {LEAST} wrong points or more, {min(enough)} to "
        f"{max(enough)}: {_listed(rows, step, key, 'incorrect', 'r')}, outliers kept",
    )  # fmt: skip


def _everywrong(rows: Rows, step: int, name: str, key: str, seen: str, where: str) -> list[Claim]:
    own = [row for row in rows if row["steps"] == step and row["everywrong"][key]["n"] >= LEAST]
    if not own:
        return []
    found = [row["everywrong"][key] for row in own]
    counts, few = ([one[field] for one in part] for part, field in ((found, "n"), (own, "incorrect")))
    why = {
        "aceht": "neither the trace nor ACEHT depends on the label, so wrong points obey the law of right ones",
        "bound": "the trace does not depend on the label, the bound does so by the size of the margin",
    }
    return [_claim(
        where=where, text=f"no correlation over wrong points of all training data: r of traces and {name} "
        f"after {step} steps", expected=0.0, tolerance=LOW, measured=mean_r("r", [one["r"] for one in found]),
        evidence=f"{seen}; {min(counts)} to {max(counts)} wrong points of a seed, for among the {NUM_POINTS} there are "
        f"{min(few)} to {max(few)}; outliers kept, without them "
        f"{float(mean('r', [one['filtered'] for one in found]).value):.3f}; {why[key]}",
    )]  # fmt: skip


def _rises(rows: Rows, first: int, second: int, name: str, key: str, where: str, ours: bool) -> Claim:
    """r and the training accuracy go up together, at equal seed."""
    flat = [{**row, "r": row[key]["correct"]["filtered"], "rho": row[key]["correct"]["rho"]} for row in rows]
    change, ranks, better = (
        paired(flat, name, {"steps": first}, {"steps": second}) for name in ("r", "rho", "train_accuracy")
    )
    start, end = (float(mean("r", [row["r"] for row in flat if row["steps"] == s]).value) for s in (first, second))
    return _claim(
        where=where, text=f"r with {name} rises with the training accuracy: change from {first} to {second} "
        "steps, correct points", expected=0.0, relation=">=", measured=mean("change of r", change.tolist()),
        evidence=f"r from {start:.3f} to {end:.3f}, rank correlation by {float(ranks.mean()):+.4f}; the training "
        f"accuracy by {float(better.min()):.2f} to {float(better.max()):.2f} points", ours=ours,
    )  # fmt: skip


def _values(rows: Rows, step: int, key: str, kind: str, how: str) -> list[float]:
    """Of the seeds that have points enough."""
    found = [row[key][kind] for row in rows if row["steps"] == step]
    return [one[how] for one in found if one["n"] >= LEAST and not math.isnan(one[how])]


def _mean(rows: Rows, step: int, key: str, kind: str, how: str) -> Any:
    return mean_r(f"r after {step} steps", _values(rows, step, key, kind, how))


def _listed(rows: Rows, step: int, key: str, kind: str, how: str) -> str:
    values = _values(rows, step, key, kind, how)
    return f"r from {min(values):.3f} to {max(values):.3f}" if values else f"nowhere {LEAST}, so that there is no r"


# ---------------------------------------------------------------------------------------------- figure


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Traces against ACEHT at every step of the first seed, and r along training for all seeds (figure 3)."""
    from matplotlib.figure import Figure

    shown = sorted((row for row in rows if "points" in row), key=lambda row: row["steps"])
    drawing = Figure(figsize=(3.2 * (len(shown) + 1), 3.4), layout="constrained")
    axes = drawing.subplots(1, len(shown) + 1)
    for ax, row in zip(axes, shown, strict=False):
        points = row["points"]
        for right, colour, word in ((1, "C0", "correct"), (0, "C1", "incorrect")):
            picked = [place for place, flag in enumerate(points["correct"]) if flag == right]
            if not row[word]:
                continue
            x, y = ([points[name][place] for place in picked] for name in ("aceht", "trace"))
            r = float(row["aceht"][word]["r"])
            label = f"{row[word]} {word}" + ("" if math.isnan(r) else f": r = {r:.2f}")  # a single point has none
            ax.scatter(x, y, s=6, lw=0, alpha=0.6, color=colour, label=label)
        title = f"{row['steps']} steps, {row['train_accuracy']:.1f} %"
        ax.set(xlabel="ACEHT", ylabel="Hessian trace of the sample", title=title)
        ax.legend(frameon=False, fontsize="small")
    _along(axes[-1], rows)
    return drawing


def _along(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """r of every seed along training, without outliers for right points, over all wrong points of the data."""
    for place, seed in enumerate(sorted({row["seed"] for row in rows})):
        own = sorted((row for row in rows if row["seed"] == seed), key=lambda row: row["steps"])
        steps = [row["steps"] for row in own]
        right = [float(row["aceht"]["correct"]["filtered"]) for row in own]
        wrong = [float(row["everywrong"]["aceht"]["r"]) for row in own]
        ax.plot(steps, right, "o-", ms=3, lw=0.8, color="C0", label=None if place else "correct")
        ax.plot(steps, wrong, "o-", ms=3, lw=0.8, color="C1", label=None if place else "incorrect")
    ax.axhline(STRONG, color="0.8", lw=0.8)
    ax.set(xlabel="steps", ylabel="r of traces and ACEHT", ylim=(-0.05, 1.05), title="every seed")
    ax.legend(frameon=False, fontsize="small")
