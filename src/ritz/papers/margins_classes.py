"""Section 6 of seed 003: does the Hessian have as many large eigenvalues as there are classes?

The paper cites Sagun et al. (2017): upon convergence there are as many positive eigenvalues as classes. It leaves the
matter to future work and does not say how to count. Here a network 784-100-C is trained on 1,000 images of each of the
first C digits, and the largest 2 C + 2 eigenvalues of its Hessian on them are counted in three ways:

    gap         those before the largest drop, the k with the largest lambda_k / lambda_(k + 1)
    edge        those above what noise between batches of 128 reaches (`ritz.rmt.edge_quantile`)
    positive    those above 0, as the sentence says

Of the last two rules 2 C + 2 stands for that many or more. The paper's claim is judged by the last, the others are
ours.

The loss has second derivatives in C - 1 directions of the outputs only, for softmax does not see a constant added to
all: so C - 1 is what the gap should find where each class gives one direction.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..estimators.noise import curvature_noise
from ..krylov.eigen import top_eigenpairs
from ..measures.outputs import sample_outputs
from ..models import mlp
from ..operators.hessian import Hessian
from ..rmt.edges import edge_quantile
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .loop import Training
from .margins_points import load_grey, mean, risk_of
from .pool import train_all
from .recipe import Recipe, on_parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN, LEARNING_RATE, BATCH_SIZE = 100, 0.1, 100
PER_CLASS = 1000
NOISE_BATCH = 128  # of the noise that an eigenvalue has to stand out of

_claim = partial(Claim, paper="seed 003", where="section 6")


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train on every number of classes, count, judge."""
    counts = {"smoke": (2, 3), "short": (2, 4, 6, 8, 10), "paper": tuple(range(2, 11))}[setting.budget]
    images = load_grey("MNIST", setting, setting.pick(1000, 60_000, 60_000))
    per_class, epochs = setting.pick(32, PER_CLASS, PER_CLASS), setting.pick(4, 40, 100)
    finish = partial(measured, batch=setting.pick(8, NOISE_BATCH, NOISE_BATCH))
    rows: Rows = []
    for classes in counts:
        data = {"train": first_classes(images["train"], classes, per_class)}
        recipes = {
            f"classes{classes}-seed{seed}": recipe(classes, seed, epochs) for seed in setting.seed_range(2, 4, 4)
        }
        runs = train_all(
            recipes, data, setting, item="classes", finish=finish, progress=progress, evaluate_every=epochs,
            checkpoint_every=epochs,
        )  # fmt: skip
        rows += [{"classes": classes, "seed": run.seed, **run.found} for run in runs.values()]
    return rows, claims(rows)


def first_classes(data: Data, classes: int, per_class: int) -> Data:
    """The first `per_class` images of each of the first `classes` classes.

    Example:
        >>> X, y = first_classes((torch.arange(6.0), torch.tensor([2, 0, 1, 0, 1, 0])), 2, 2)
        >>> X.tolist(), y.tolist()
        ([1.0, 2.0, 3.0, 4.0], [0, 1, 0, 1])
    """
    rows = torch.cat([(data[1] == label).nonzero().flatten()[:per_class] for label in range(classes)]).sort().values
    return data[0][rows], data[1][rows]


def recipe(classes: int, seed: int, epochs: int) -> Recipe:
    """784-100-C by SGD."""
    return Recipe(
        name=f"784-{HIDDEN}-{classes}", model=partial(mlp, classes, hidden=(HIDDEN,)), epochs=epochs, seed=seed,
        batch_size=BATCH_SIZE, optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=LEARNING_RATE),
    )  # fmt: skip


def measured(done: Training, recipe: Recipe, data: Mapping[str, Data], *, batch: int = NOISE_BATCH) -> dict[str, Any]:
    """The largest eigenvalues and how many stand out, by each of the three rules."""
    risk = risk_of(done.model, data["train"])
    outputs = sample_outputs(risk)
    classes = outputs.classes
    values = top_eigenpairs(Hessian(risk, route="reverse"), 2 * classes + 2, tol=1e-3, seed=recipe.seed).values
    noise = curvature_noise(risk, num_batches=8, batch_size=batch, seed=recipe.seed)
    edge = float(edge_quantile(noise, risk.dim).value)
    return {
        "train_loss": short(outputs.mean(outputs.loss)),
        "train_accuracy": short(100 * outputs.mean(outputs.correct.double())),
        "eigenvalues": [short(value) for value in values.tolist()],
        "edge_at": short(edge),
        "gap": before_the_gap(values),
        "edge": int((values > edge).sum()),
        "positive": int((values > 0).sum()),
    }


def before_the_gap(values: Tensor) -> int:
    """How many of the eigenvalues, from the largest down, come before their largest relative drop.

    What is not positive counts as the smallest positive number: the drop to it is the largest.

    Example:
        >>> before_the_gap(torch.tensor([5.0, 4.0, 3.0, 0.5, 0.4]))
        3
    """
    logs = values.double().clamp(min=torch.finfo(torch.float64).tiny).log()
    return int((logs[:-1] - logs[1:]).argmax()) + 1


# ---------------------------------------------------------------------------------------------- claims

RULES = {
    "positive": "above 0",
    "edge": f"above the edge of the noise of batches of {NOISE_BATCH}",
}


def claims(rows: Rows) -> list[Claim]:
    """As many outliers as classes: by each rule, how the number grows, and whether the drop is after C or C - 1."""
    seen = "; ".join(f"C = {c}: {_listed(rows, c, 'gap')}" for c in sorted({row["classes"] for row in rows}))
    found = [
        _claim(
            text="as many large eigenvalues as classes: number minus C, before the largest relative drop", expected=0.0,
            tolerance=0.5, measured=_over_seeds(rows, _excess), evidence=_spread(rows, "gap"), ours=True,
        )
    ]  # fmt: skip
    for key, how in RULES.items():
        found.append(_claim(
            text=f"as many eigenvalues as classes {how}: share of networks with C of them", expected=1.0, tolerance=0.1,
            measured=_over_seeds(rows, partial(_share, key=key)), evidence=_spread(rows, key), ours=key != "positive",
        ))  # fmt: skip
    found.append(_claim(
        text="the number of large eigenvalues grows by one with each class: slope, before the largest relative drop",
        expected=1.0, tolerance=0.25, reference=0.0, measured=_over_seeds(rows, _slope), evidence=seen, ours=True,
    ))  # fmt: skip
    found.append(_claim(
        text="the drop comes after the C-th eigenvalue: log of the drop there, minus the log of that after the "
        "(C - 1)-th", expected=0.0, relation=">=", measured=_over_seeds(rows, _later_drop), ours=True,
        evidence="softmax does not see a constant that is added to all outputs: C - 1 directions are left",
    ))  # fmt: skip
    return found


def _over_seeds(rows: Rows, number: Any) -> Any:
    """The mean over seeds of a number that each has from all its class counts."""
    seeds = sorted({row["seed"] for row in rows})
    return mean("", [number([row for row in rows if row["seed"] == seed]) for seed in seeds])


def _excess(own: Rows) -> float:
    return statistics.fmean(row["gap"] - row["classes"] for row in own)


def _share(own: Rows, key: str) -> float:
    return statistics.fmean(row[key] == row["classes"] for row in own)


def _slope(own: Rows) -> float:
    """Least squares of the count by the gap on the number of classes."""
    x, y = (torch.tensor([float(row[key]) for row in own], dtype=torch.float64) for key in ("classes", "gap"))
    return float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum())


def _later_drop(own: Rows) -> float:
    """log (lambda_C / lambda_(C + 1)) - log (lambda_(C - 1) / lambda_C), the mean over numbers of classes."""
    tiny = torch.finfo(torch.float64).tiny
    found = []
    for row in own:
        before, at, after = (math.log(max(row["eigenvalues"][row["classes"] + k], tiny)) for k in (-2, -1, 0))
        found.append((at - after) - (before - at))
    return statistics.fmean(found)


def _listed(rows: Rows, classes: int, key: str) -> str:
    return ", ".join(str(row[key]) for row in rows if row["classes"] == classes)


def _spread(rows: Rows, key: str) -> str:
    excess = [row[key] - row["classes"] for row in rows]
    exact, less = (sum(e == wanted for e in excess) for wanted in (0, -1))
    most = sum(row[key] == len(row["eigenvalues"]) for row in rows)
    seen = f"C in {exact} of {len(excess)} networks, C - 1 in {less}"
    return f"{seen}, 2 C + 2 or more, for no more are taken, in {most}" if most else seen


# ---------------------------------------------------------------------------------------------- figure


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """The largest eigenvalues for every number of classes, and how many come before the largest drop."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = drawing.subplots(1, 2)
    first = [row for row in rows if row["seed"] == 0]
    for place, row in enumerate(first):
        ranks = range(1, len(row["eigenvalues"]) + 1)
        colour = (0.1, 0.3 + 0.5 * place / len(first), 0.7)
        left.plot(ranks, row["eigenvalues"], "o-", ms=2.5, lw=0.8, color=colour, label=f"C = {row['classes']}")
        left.plot(row["classes"], row["eigenvalues"][row["classes"] - 1], "o", ms=7, mfc="none", color=colour)
    left.set(xlabel="rank; the ring is at C", ylabel="eigenvalue", yscale="log")
    left.legend(frameon=False, fontsize="small", ncols=2)
    counts = sorted({row["classes"] for row in rows})
    right.plot(counts, counts, "-", color="0.7", lw=0.8, label="C")
    right.plot(counts, [count - 1 for count in counts], "--", color="0.7", lw=0.8, label="C - 1")
    right.plot([row["classes"] for row in rows], [row["gap"] for row in rows], "o", ms=4, alpha=0.6, label="networks")
    right.set(xlabel="classes C", ylabel="eigenvalues before the largest drop")
    right.legend(frameon=False, fontsize="small")
    return drawing
