"""Section 4 and appendix B.1 of seed 003: small against large batches on the network F1 of Keskar et al.

The paper trains the fully connected network with BatchNorm on MNIST by SGD with learning rate 0.1 and no momentum, for
10,000 steps with batches of 256 and of 4096 from the same seed. At the same training accuracy the small batch is
said to end flatter (Hessian trace), to generalise better, and to have margins that are larger on the whole, more skewed
to the left, and the smallest of which is smaller. Its explanation: the large batch has not had the time to maximise
margins, and training it longer would let it catch up. Table 1 is not in the text that we have: its numbers cannot be
compared, the order can.

Here every seed gives start and batches to both sizes, and differences are taken at equal seed. Epochs are whole and
short last batches are left out, so that steps are 10,062 and 9,996. "Longer" is 4 times the steps at the budget short
and 16 times at the budget paper. All curvature is that of the loss on all training images in evaluation mode, BatchNorm
with its running statistics: PyHessian's mode. Traces are exact, lambda_1 is a Ritz value and so a lower bound.
Fashion-MNIST stands beside as data of the same form that the paper does not have.

A confound that the comparison has by design: at equal steps the large batch has seen 16 times as many images, so "had
less time" is a statement about noise and step size, not about data.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..estimators.samples import sample_traces
from ..estimators.spectrum import spectrum
from ..measures.margins.summaries import margin_distribution
from ..measures.outputs import Outputs, sample_outputs
from ..models import keskar_f1
from ..operators.hessian import Hessian
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting
from .loop import Training
from .margins_points import NUM_POINTS, correlations, fit, load_grey, mean, paired, risk_of, short
from .pool import Finished, train_all
from .recipe import Recipe, on_parameters

LEARNING_RATE, STEPS = 0.1, 10_000
SMALL, LARGE = 256, 4096
DATA = ("MNIST", "FashionMNIST")
NOT_RUN = "appendix B.2, the networks on CIFAR-10: its files are not at hand, and CIFAR-100 is not what the paper has"
BINS = 60
AT_ONCE = 10_000  # images in one pass: so few batches that a GPU does not wait

_claim = partial(Claim, paper="seed 003")


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train small and large, and on MNIST large for longer; measure; judge."""
    sizes = {"small": setting.pick(8, SMALL, SMALL), "large": setting.pick(32, LARGE, LARGE)}
    steps, longer = setting.pick(6, STEPS, STEPS), setting.pick(2, 4, 16)
    finish = partial(measured, num=setting.pick(64, NUM_POINTS, NUM_POINTS), num_steps=setting.pick(2, 30, 60))
    rows: Rows = []
    for name in DATA[: setting.pick(1, 2, 2)]:
        data = load_grey(name, setting, setting.pick(64, 60_000, 60_000), setting.pick(50, 10_000, 10_000))
        kinds = {"small": steps, "large": steps} | ({"longer": longer * steps} if name == DATA[0] else {})
        recipes = {
            f"{name}-{kind}-seed{seed}": recipe(
                seed, sizes["small" if kind == "small" else "large"], total, len(data["train"][0])
            )
            for kind, total in kinds.items()
            for seed in range(setting.num_seeds(2, 3, 5))
        }
        runs = train_all(
            recipes, data, setting, item="batches", finish=finish, progress=progress, evaluate_every=20,
            checkpoint_every=20,
        )  # fmt: skip
        rows += [_row(name, run, recipes[run.name].batch_size) for run in runs.values()]
    return [*rows, {"kind": "not run", "why": NOT_RUN}], claims(rows)


def recipe(seed: int, batch_size: int, steps: int, num_images: int) -> Recipe:
    """F1 by SGD without momentum, for about so many steps, in whole epochs of whole batches.

    Example:
        >>> [recipe(0, size, 10_000, 60_000).run(60_000).num_steps for size in (256, 4096)]
        [10062, 9996]
    """
    return Recipe(
        name="F1", model=keskar_f1, batch_size=batch_size, drop_last=True, seed=seed,
        epochs=max(1, round(steps / (num_images // batch_size))),
        optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=LEARNING_RATE),
    )  # fmt: skip


def _row(name: str, run: Finished, batch_size: int) -> dict[str, Any]:
    kind = run.name.split("-")[1]
    about = {"data": name, "kind": kind, "batch_size": batch_size, "seed": run.seed, "steps": run.steps}
    about |= {"stop": run.stop, "seconds": round(run.seconds, 1)}
    return about | run.found | {"curve": [[step, short(100 - 100 * a)] for step, a in run.curve("test/accuracy")]}


def measured(
    done: Training, recipe: Recipe, data: Mapping[str, Data], *, num: int = NUM_POINTS, num_steps: int = 60
) -> dict[str, Any]:
    """Fit, curvature on all training images, margins of all of them, and how the two go together on `num`."""
    risk = risk_of(done.model, data["train"], batch_size=AT_ONCE)
    train, test = sample_outputs(risk), sample_outputs(risk.on(data["test"]))
    traces = sample_traces(risk, method="exact")
    lanczos = spectrum(Hessian(risk, route="reverse"), num_steps, 1, reorthogonalize="full")
    found: dict[str, Any] = fit(train, test)
    found |= {"test_error": short(100 - found["test_accuracy"])}
    found |= {"trace": short(float(torch.as_tensor(traces.value).mean()))}
    found |= {"lambda_max": short(float(lanczos.lambda_max.value)), **margins_of(train)}
    found |= correlations(done.model, data["train"], train, num, recipe.seed)
    if recipe.seed > 0:  # a figure shows one seed
        found |= {"points": None, "histogram": None}
    return found


def margins_of(outputs: Outputs) -> dict[str, Any]:
    """Least, quartiles and skewness of signed output margins, and their histogram.

    Example:
        >>> found = margins_of(Outputs(loss=torch.ones(3), weight=torch.ones(3), margin=torch.tensor([1.0, 2.0, 6.0])))
        >>> found["margin_min"], found["margin_median"], found["skewness"], sum(found["histogram"]["items"])
        (1.0, 2.0, 0.595170, 3.0)
    """
    distribution = margin_distribution(outputs)
    edges, right, wrong = distribution.histogram(BINS)
    box = distribution.box
    return {
        "margin_min": short(distribution.quantile(0.0)),
        "margin_q10": short(distribution.quantile(0.1)),
        "margin_median": short(box.median),
        "skewness": short(distribution.skewness),
        "box": [short(end) for end in (box.low, box.q1, box.median, box.q3, box.high)],
        "histogram": {
            "low": short(float(edges[0])),
            "high": short(float(edges[-1])),
            "items": (right + wrong).tolist(),
        },
    }


# ---------------------------------------------------------------------------------------------- claims

ORDERS = {  # what is said of the small batch against the large one: 1 more, -1 less
    "trace": (-1, "table 1", "Hessian trace: log of the ratio"),
    "lambda_max": (-1, "table 1", "lambda_1: log of the ratio"),
    "test_error": (-1, "table 1", "test error, percentage points"),
    "test_loss": (-1, "table 1", "test loss"),
    "margin_median": (1, "figure 4c", "median margin"),
    "margin_q10": (1, "figure 4a", "10 % quantile of margins, for it has fewer low ones"),
    "skewness": (-1, "figure 4c", "skewness of margins"),
    "margin_min": (-1, "figure 4c", "least margin"),
}
LOGS = ("trace", "lambda_max")
KINDS = ("small", "large", "longer")
SAME_ACCURACY = 0.1  # percentage points


def claims(rows: Rows) -> list[Claim]:
    """What the paper says of small and large batches, beside differences at equal seed."""
    logs = [{**row, **{key: math.log(max(row[key], 1e-30)) for key in LOGS}} for row in rows if row["kind"] in KINDS]
    found = []
    for name in dict.fromkeys(row["data"] for row in logs):
        own = [row for row in logs if row["data"] == name]
        found.append(_claim(
            where=_where(name, "table 1"), text=f"{name}: both reach the same training accuracy: difference in points",
            expected=0.0, tolerance=SAME_ACCURACY, measured=_change(own, "train_accuracy", "large", "small"),
            evidence=f"{_each(own, 'train_accuracy')}; training loss {_each(own, 'train_loss')}",
        ))  # fmt: skip
        found += [_ordered(own, name, key, "large", "small", *said) for key, said in ORDERS.items()]
        found += [_related(own, name, kind) for kind in ("small", "large")]
        if any(row["kind"] == "longer" for row in own):
            found += _catches_up(own, name)
    return found


def _where(name: str, where: str) -> str:
    """Nothing of Fashion-MNIST is in the paper: its statement is put to other data."""
    return where if name == DATA[0] else f"{where}, on other data"


def _ordered(own: Rows, name: str, key: str, first: str, second: str, sign: int, where: str, text: str) -> Claim:
    return _claim(
        where=_where(name, where), text=f"{name}: {text}, {second} less {first}, {'above' if sign > 0 else 'below'} 0",
        expected=0.0, relation=">=" if sign > 0 else "<=", measured=_change(own, key, first, second),
        evidence=_each(own, key),
    )  # fmt: skip


def _related(own: Rows, name: str, kind: str) -> Claim:
    picked = [row for row in own if row["kind"] == kind]
    rho = mean("rho", [row["margin"]["correct"]["rho"] for row in picked])
    return _claim(
        where=_where(name, "appendix B.1"),
        text=f"{name}: r of traces and ACEHT is 0.8 to 1 for correct points: {kind} batch",
        expected=0.8, relation=">=", measured=mean("r", [row["aceht"]["correct"]["filtered"] for row in picked]),
        evidence=f"{len(picked)} seeds, outliers removed; rank correlation of traces and output margins (figure 4a, "
        f"4b): {float(rho.value):.3f}",
    )  # fmt: skip


def _catches_up(own: Rows, name: str) -> list[Claim]:
    """The large batch for longer: does it come to where the small one is?"""
    steps = {row["kind"]: row["steps"] for row in own}
    said = f"{steps['longer']} steps against {steps['small']}"
    found = [
        _claim(
            where="section 4.2", text=f"{name}: trained longer, the large batch generalises as well as the small one: "
            "test error, longer less small, not above 0", expected=0.0, relation="<=", tolerance=0.02,
            measured=_change(own, "test_error", "small", "longer"), evidence=f"{said}; {_each(own, 'test_error')}",
        )
    ]  # fmt: skip
    for key in ("test_error", "trace", "margin_median", "skewness"):
        sign, _, text = ORDERS[key]
        found.append(_ordered(own, name, key, "large", "longer", sign, "section 4.2", text))
    return found


def _change(own: Rows, key: str, first: str, second: str) -> Any:
    changes: Tensor = paired(own, key, {"kind": first}, {"kind": second})
    return mean(f"change of {key}", changes.tolist())


def _each(own: Rows, key: str) -> str:
    """What every seed has, kind by kind, in the number's own unit."""
    parts = []
    for kind in dict.fromkeys(row["kind"] for row in own):
        values = [row[key] if key not in LOGS else math.exp(row[key]) for row in own if row["kind"] == kind]
        parts.append(f"{kind} {', '.join(f'{value:.4g}' for value in values)}")
    return "; ".join(parts)
