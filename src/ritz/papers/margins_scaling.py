"""Section 5 of seed 003 on a trained network: T_alpha makes it as flat as one likes and changes no prediction.

Corollary 5.2: where all training points are right, every second derivative of the loss goes to 0 along T_alpha, which
multiplies the outputs by alpha. The paper proves it and names two such maps; it has no numbers. Here a network
784-100-100-10 is trained until it has 2,000 images of MNIST right, and both maps are applied to it: the last layer
times alpha (`scale_output`), and all layers, biases with their cumulative powers (`scale_layers`). Traces are exact,
lambda_1 is a Ritz value, all in float64. `theory_scaling` has the lemmas, and what happens to wrong points.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..estimators.samples import sample_traces
from ..estimators.spectrum import spectrum
from ..measures.outputs import sample_outputs
from ..measures.transforms.moves import scale_layers, scale_output
from ..models import mlp
from ..operators.hessian import Hessian
from ..risk import Risk
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .loop import Training
from .margins_points import load_grey, mean, risk_of
from .pool import train_all
from .recipe import Recipe, on_parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN, LEARNING_RATE, BATCH_SIZE, NUM_IMAGES = (100, 100), 0.1, 20, 2000
ALPHAS = (1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
MOVES = {"last layer": scale_output, "all layers": scale_layers}
GONE = 1e-3  # of what it was

_claim = partial(Claim, paper="seed 003", where="section 5, corollary 5.2")


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train until all points are right, scale, measure, judge."""
    data = load_grey("MNIST", setting, setting.pick(100, NUM_IMAGES, NUM_IMAGES), setting.pick(100, 10_000, 10_000))
    epochs = setting.pick(30, 40, 40)
    recipes = {f"seed{seed}": recipe(seed, epochs) for seed in setting.seed_range(2, 3, 5)}
    runs = train_all(
        recipes, data, setting, item="scaling", finish=partial(measured, num_steps=setting.pick(3, 20, 30)),
        progress=progress, evaluate_every=epochs, checkpoint_every=epochs,
    )  # fmt: skip
    rows = [row for run in runs.values() for row in run.found["rows"]]
    return rows, claims(rows)


def recipe(seed: int, epochs: int) -> Recipe:
    """784-100-100-10 by SGD."""
    return Recipe(
        name="784-100-100-10", model=partial(mlp, hidden=HIDDEN), epochs=epochs, batch_size=BATCH_SIZE, seed=seed,
        optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=LEARNING_RATE),
    )  # fmt: skip


def measured(done: Training, recipe: Recipe, data: Mapping[str, Data], *, num_steps: int = 30) -> dict[str, Any]:
    """Curvature and margins along both maps."""
    train, test = ((X.double(), y) for X, y in (data["train"], data["test"]))
    risk = risk_of(copy.deepcopy(done.model).double(), train)
    rows = []
    for name, move in MOVES.items():
        for alpha in ALPHAS:
            moved = move(risk, alpha)
            rows.append({
                "seed": recipe.seed, "move": name, "alpha": alpha, **_sizes(moved, num_steps),
                "changed": _changed(risk, moved, train) + _changed(risk, moved, test),
            })  # fmt: skip
    return {"rows": rows}


def _sizes(risk: Risk, num_steps: int) -> dict[str, float]:
    outputs = sample_outputs(risk)
    traces = torch.as_tensor(sample_traces(risk, method="exact").value)
    lanczos = spectrum(Hessian(risk, route="reverse"), num_steps, 1, reorthogonalize="full")
    return {
        "wrong": int((~outputs.correct).sum()),
        "train_loss": short(outputs.mean(outputs.loss)),
        "margin_min": short(float(outputs.need("margin").min())),
        "trace": short(float(traces.mean())),
        "lambda_max": short(float(lanczos.lambda_max.value)),
    }


def _changed(risk: Risk, moved: Risk, data: Data) -> int:
    """How many samples of some data are classified otherwise."""
    with torch.no_grad():
        first, second = (torch.func.functional_call(r.model, dict(r.params()), (data[0],)) for r in (risk, moved))
    return int((first.argmax(1) != second.argmax(1)).sum())


# ---------------------------------------------------------------------------------------------- claims


def claims(rows: Rows) -> list[Claim]:
    """Flat at will, by either map, with the predictions that there were."""
    far = max(ALPHAS)
    wrong = sorted({row["wrong"] for row in rows})
    about = f"{len({row['seed'] for row in rows})} seeds; training points that are wrong: {', '.join(map(str, wrong))}"
    found = [
        _claim(
            where="section 5", text="T_alpha changes no prediction, of training and test images: number changed",
            expected=0, measured=sum(row["changed"] for row in rows),
            evidence=f"{about}; {sum(row['alpha'] != 1 for row in rows)} networks that were scaled",
        )
    ]  # fmt: skip
    for name in MOVES:
        own = [row for row in rows if row["move"] == name]
        for key, text in (("trace", "Tr H"), ("lambda_max", "lambda_1")):
            found.append(_claim(
                text=f"{text} goes to 0, {name}: its size at alpha = {far:g} over that at 1", expected=0.0,
                tolerance=GONE, measured=mean("ratio", _ratios(own, key, far)), evidence=f"{about}; {_along(own, key)}",
            ))  # fmt: skip
    return found


def _ratios(own: Rows, key: str, alpha: float) -> list[float]:
    """abs(number at alpha / number at 1), seed by seed."""
    start, end = ({row["seed"]: row[key] for row in own if row["alpha"] == a} for a in (1.0, alpha))
    return [abs(end[seed] / start[seed]) for seed in start]


def _along(own: Rows, key: str) -> str:
    """The course of the first seed."""
    first = [row for row in own if row["seed"] == own[0]["seed"]]
    return "first seed: " + ", ".join(f"{row[key]:.3g} at {row['alpha']:g}" for row in first)


# ---------------------------------------------------------------------------------------------- figure


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Trace and lambda_1 along both maps, every seed."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 3.4), layout="constrained")
    for ax, (key, text) in zip(drawing.subplots(1, 2), (("trace", "Tr H"), ("lambda_max", "λ₁")), strict=True):
        for place, name in enumerate(MOVES):
            for seed in sorted({row["seed"] for row in rows}):
                own = [row for row in rows if row["move"] == name and row["seed"] == seed and float(row[key]) > 0]
                label = name if seed == rows[0]["seed"] else None
                x, y = ([row[column] for row in own] for column in ("alpha", key))
                ax.plot(x, y, "o-", ms=3, lw=0.8, color=f"C{place}", label=label)
        ax.set(xlabel="α", ylabel=text, xscale="log", yscale="log")
        ax.legend(frameon=False, fontsize="small", title="scaled")
    return drawing
