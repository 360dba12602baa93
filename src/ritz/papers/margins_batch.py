"""Section 4 and appendix B.1 of seed 003: small against large batches on the network F1 of Keskar et al.

The paper trains the fully connected network with BatchNorm on MNIST by SGD with learning rate 0.1 and no momentum, for
10,000 steps with batches of 256 and of 4096 from the same seed. At the same training accuracy the small batch is
said to end flatter (Hessian trace), to generalise better, and to have margins that are larger on the whole, more skewed
to the left, and the smallest of which is smaller. Its explanation: the large batch has not had the time to maximise
margins, and training it longer would let it catch up. Appendix A with the network, table 1 and the skewness that figure
4c displays are not in the text that we have: the network is taken to be F1, as the paper repeats the experiment of
Keskar et al., and of the rest the order is compared, which the text states for the trace and the test error.

Here every seed gives start and batches to both sizes, and differences are taken at equal seed. Epochs are whole and
short last batches are left out, so that steps are 10,062 and 9,996. "Longer" is 4 times the steps at the budget short
and 16 times at the budget paper. All curvature is that of the loss on all training images in evaluation mode, BatchNorm
with its running statistics: PyHessian's mode. Traces are exact, lambda_1 is a Ritz value and so a lower bound. Margins
have their sign, where the paper takes their size: the two differ where a training point is wrong. They are not
normalised, as in the paper. Correlations of appendix B.1 are those at the end of training (`margins_along`: along it).
Fashion-MNIST stands beside as data of the same form that the paper does not have: what is asked of it is ours.

A confound that the comparison has by design: at equal steps the large batch has seen 16 times as many images, so "had
less time" is a statement about noise and step size, not about data. Hoffer et al., whom the paper cites for training
longer, give the large batch as many steps as the small one, which both have here from the start, and besides a larger
learning rate and BatchNorm over small parts of a batch, which is not done here.
"""

import math
import statistics
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
from ..results import Estimate
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .loop import Training
from .margins_points import BOUND, NUM_POINTS, correlations, fit, load_grey, mean, mean_r, paired, risk_of
from .pool import Finished, train_all
from .recipe import Recipe, on_parameters

LEARNING_RATE, STEPS = 0.1, 10_000
SMALL, LARGE = 256, 4096
DATA = ("MNIST", "FashionMNIST")
LONGER = 16  # times the steps, at the budget paper
NOT_RUN = "appendix B.2, on CIFAR-10, whose files are not at hand"
BINS = 60
AT_ONCE = 10_000  # images in one pass: so few batches that a GPU does not wait

_claim = partial(Claim, paper="seed 003")


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train small and large, and on MNIST large for longer; measure; judge."""
    sizes = {"small": setting.pick(8, SMALL, SMALL), "large": setting.pick(32, LARGE, LARGE)}
    steps, longer = setting.pick(6, STEPS, STEPS), setting.pick(2, 4, LONGER)
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
            for seed in setting.seed_range(2, 3, 5)
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
    "margin_q10": (1, "figure 4a", "10 % quantile of margins, as it has fewer low ones"),
    "skewness": (-1, "figure 4c", "skewness of margins"),
    "margin_min": (-1, "figure 4c", "least margin"),
}
UNNAMED = ("lambda_max", "test_loss")  # by the text: table 1 may have them
RELATED = (  # what goes with the traces of correct points: axis, which number, where, in words, the sign
    ("aceht", "filtered", "appendix B.1", "r of traces and ACEHT", 1),
    ("bound", "filtered", "appendix B.1", "r of traces and the margin bound", 1),
    ("margin", "filtered", "section 4.2, figures 4a and 4b", "r of traces and output margins", -1),
    ("margin", "rho", "figures 4a and 4b", "rank correlation of traces and output margins", -1),
)
NOTES = {"bound": f"; {BOUND}", "margin": "; section 4.2 has them correlate as in section 3, where r is 0.8 to 1"}
LOGS = ("trace", "lambda_max", "train_loss")
KINDS = ("small", "large", "longer")
MARGINS = ("margin_min", "margin_q10", "margin_median")
SAME_ACCURACY, SAME_ERROR = 0.1, 0.02  # percentage points; of the error two of 10,000 images
SAME_LOSS = math.log(2)  # "comparable": the text has no number
CLASSES = 10
CLOSE = 0.1  # to 1, of a softmax margin: the text has no number
STRONG = 0.8


def claims(rows: Rows) -> list[Claim]:
    """What the paper says of small and large batches, beside differences at equal seed."""
    logs = [{**row, **{key: math.log(max(row[key], 1e-30)) for key in LOGS}} for row in rows if row["kind"] in KINDS]
    found = []
    for name in dict.fromkeys(row["data"] for row in logs):
        own, other = [row for row in logs if row["data"] == name], name != DATA[0]
        found += _fits(own, name, other)
        asked = [key for key in ORDERS if not (other and key in UNNAMED)]
        found += [
            _ordered(own, name, key, "large", "small", *ORDERS[key], ours=other or key in UNNAMED) for key in asked
        ]
        related = RELATED[:2] if other else RELATED
        found += [_related(own, name, kind, *said, ours=other) for said in related for kind in ("small", "large")]
        if not other:
            found.append(_left_skewed(own, name))
            found += [_saturated(own, name, kind) for kind in ("small", "large")]
        if any(row["kind"] == "longer" for row in own):
            found += _catches_up(own, name)
    return found


def _fits(own: Rows, name: str, ours: bool) -> list[Claim]:
    """Both batch sizes have learned the training set alike."""
    return [
        _claim(
            where="section 4.1", text=f"{name}: both reach the same training accuracy: difference in points",
            expected=0.0, tolerance=SAME_ACCURACY, measured=_change(own, "train_accuracy", "large", "small"),
            evidence=_each(own, "train_accuracy"), ours=ours,
        ),
        _claim(
            where="section 4.1", text=f"{name}: both reach a comparable training loss, within a factor of two: log of "
            "the ratio, small minus large", expected=0.0, tolerance=SAME_LOSS,
            measured=_change(own, "train_loss", "large", "small"), evidence=_each(own, "train_loss"), ours=ours,
        ),
    ]  # fmt: skip


def _ordered(
    own: Rows, name: str, key: str, first: str, second: str, sign: int, where: str, text: str, ours: bool
) -> Claim:  # fmt: skip
    seen = _each(own, key)
    if key == "margin_min" and any(row[key] < 0 for row in own):
        seen += "; below 0 where a point is wrong: the paper takes the size of a margin, which is never so"
    return _claim(
        where=where, text=f"{name}: {text}, {second} minus {first}, {'above' if sign > 0 else 'below'} 0",
        expected=0.0, relation=">=" if sign > 0 else "<=", measured=_change(own, key, first, second), evidence=seen,
        ours=ours,
    )  # fmt: skip


def _related(
    own: Rows, name: str, kind: str, axis: str, how: str, where: str, text: str, sign: int, ours: bool
) -> Claim:  # fmt: skip
    """How closely the traces of one kind of network go with one quantity of a forward pass."""
    picked = [row[axis]["correct"] for row in own if row["kind"] == kind]
    r, rho = (float(mean(key, [one[key] for one in picked]).value) for key in ("r", "rho"))
    seen = f"{len(picked)} seeds, at the end of training, " + (
        f"outliers removed; with them {r:.3f}, rank correlation {rho:.3f}{NOTES.get(axis, '')}"
        if how == "filtered"
        else "all points"
    )
    return _claim(
        where=where, text=f"{name}: {text} is {'0.8 to 1' if sign > 0 else '-1 to -0.8'} for correct points: {kind} "
        "batch", expected=sign * STRONG, relation=">=" if sign > 0 else "<=",
        measured=mean_r(text, [one[how] for one in picked]), evidence=seen, ours=ours,
    )  # fmt: skip


def _left_skewed(own: Rows, name: str) -> Claim:
    values = [row["skewness"] for row in own if row["kind"] == "small"]
    return _claim(
        where="section 4.2", text=f"{name}: margins of the small batch are skewed to the left: skewness, below 0",
        expected=0.0, relation="<=", measured=mean("skewness", values), evidence=_each(own, "skewness"),
    )  # fmt: skip


def _saturated(own: Rows, name: str, kind: str) -> Claim:
    """How far from 1 a softmax margin can be, by the least output margin of all images."""
    picked = [row for row in own if row["kind"] == kind]
    least = min(row["margin_min"] for row in picked)
    bounds = softmax_bounds(least)
    loss = max(math.exp(row["train_loss"]) for row in picked)
    return _claim(
        where="section 4.1", text=f"{name}: at the end of training all softmax margins are very close to 1: the least, "
        f"{kind} batch", expected=1.0, tolerance=CLOSE,
        measured=Estimate(name="least softmax margin", value=sum(bounds) / 2, bracket=bounds),
        evidence=f"bounds by the outputs of {len(picked)} seeds, as softmax margins themselves are not kept: the least "
        f"output margin is {least:.3g}; the mean of the softmax margins is at least {1 - 2 * loss:.5f}, which is "
        "1 - 2 * training loss",
    )  # fmt: skip


def softmax_bounds(margin: float, classes: int = CLASSES) -> tuple[float, float]:
    """Between which numbers a softmax margin S_y - max_j S_j is, by the output margin m = f_y - max_j f_j.

    It is S_y (1 - e^-m), and 1 / S_y is from 1 + e^-m to 1 + (C - 1) e^-m: all other classes as the second, or none. Of
    a wrong point (m < 0) nothing is said, for the paper takes the size of a margin.

    Example:
        >>> outputs = torch.tensor([[5.0, 0.0, 0.0], [5.0, 0.0, -99.0]])
        >>> [round(float(row[0] - row[1]), 4) for row in outputs.softmax(1)]
        [0.9802, 0.9866]
        >>> [round(end, 4) for end in softmax_bounds(5.0, classes=3)]
        [0.9802, 0.9866]
    """
    if margin < 0:
        return 0.0, 1.0
    small = math.exp(-margin)
    return -math.expm1(-margin) / (1 + (classes - 1) * small), math.tanh(margin / 2)


def _catches_up(own: Rows, name: str) -> list[Claim]:
    """The large batch for longer: do its margins come to those of the small one, and its test error with them?"""
    steps = {row["kind"]: row["steps"] for row in own}
    times = round(steps["longer"] / steps["large"])
    said = f"{steps['longer']} steps against {steps['small']}"
    change = {key: paired(own, key, {"kind": "small"}, {"kind": "longer"}) for key in ("test_error", *MARGINS)}
    ahead = torch.stack([change[key] >= 0 for key in MARGINS]).all(0)
    beside = "; ".join(f"{key.replace('_', ' ')} {_means(own, key)}" for key in ("margin_median", "skewness", "trace"))
    not_above = partial(_claim, expected=0.0, relation="<=", tolerance=SAME_ERROR)
    found = [
        _claim(
            where="section 4.2", text=f"{name}: trained longer, the large batch has margins like the small one's: "
            "median margin, longer minus small, not below 0", expected=0.0, relation=">=",
            measured=mean("change of margin_median", change["margin_median"].tolist()),
            evidence=f"{said}; {_each(own, 'margin_median')}",
        ),
        not_above(
            where="abstract", text=f"{name}: large batches generalise worse because their margins are smaller: test "
            "error, longer minus small, once its margins are as large, not above 0",
            measured=mean("change of test_error", change["test_error"][ahead].tolist()),
            evidence=f"{said}; least, 10 % and median margin are as large in {int(ahead.sum())} of {len(ahead)} seeds; "
            f"test error {_each(own, 'test_error')}; means: {beside}",
        ),
        not_above(
            where="section 4.2", text=f"{name}: trained longer, the large batch generalises as well as the small one: "
            "test error, longer minus small, not above 0", measured=_change(own, "test_error", "small", "longer"),
            evidence=f"{said}; {_each(own, 'test_error')}",
            short_of=f"{times} times the steps, where the budget paper has {LONGER}" if times < LONGER else "",
        ),
    ]  # fmt: skip
    for key in ("test_error", "margin_median", "trace", "skewness", "test_loss"):
        sign, _, text = ORDERS[key]
        ours = key not in ("test_error", "margin_median")
        found.append(_ordered(own, name, key, "large", "longer", sign, "section 4.2", text, ours))
    return found


def _change(own: Rows, key: str, first: str, second: str) -> Any:
    changes: Tensor = paired(own, key, {"kind": first}, {"kind": second})
    return mean(f"change of {key}", changes.tolist())


def _each(own: Rows, key: str) -> str:
    """What every seed has, kind by kind, in the number's own unit."""
    return "; ".join(f"{kind} {', '.join(f'{x:.4g}' for x in values)}" for kind, values in _kinds(own, key).items())


def _means(own: Rows, key: str) -> str:
    return ", ".join(f"{kind} {statistics.fmean(values):.4g}" for kind, values in _kinds(own, key).items())


def _kinds(own: Rows, key: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in own:
        found.setdefault(row["kind"], []).append(math.exp(row[key]) if key in LOGS else row[key])
    return found
