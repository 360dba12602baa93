"""The network of 9,960 parameters on MNIST, over many seeds: do the papers' numbers come out?

Trains 784-10-100-10 for every seed at weight decay 0, 1e-4 and 5e-4, all at once, measures each network on all 55,000
training images, and judges what seed 002 prints in table 1 and what a reference run gave by the spread between seeds.

    python benchmarks/mnist_mlp.py --device cuda                       minutes on an accelerator, hours on a CPU
    python benchmarks/mnist_mlp.py --judge benchmarks/results          the claims once more, from the rows of the file
    python benchmarks/mnist_mlp.py --page benchmarks/results docs      mnist_mlp.md and mnist_mlp.png, from the file

MNIST is found through RITZ_DATA or --data, a folder in torchvision's layout.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reports
import torch

from ritz.papers import mnist_mlp as study
from ritz.papers import mnist_mlp_claims as judgement
from ritz.papers.base import Claim
from ritz.papers.experiment import plain_claim
from ritz.space import random_uniform

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "mnist_mlp.json"
PRINTED = judgement.PRINTED | {other: judgement.PRINTED[key] for key, other in judgement.OTHER.items()}
ORDERS = {  # what goes one way with weight decay at equal seed: 1 up, -1 down
    "lambda_max": 1, "weight_norm": -1, "metric_a_eq7": -1, "gap_loss": -1, "gap_loss_test": -1, "val_accuracy": 1,
    "test_accuracy": 1,
}  # fmt: skip


# ----------------------------------------------------------------------------------------------- the run


def synthetic(num: int = 600) -> tuple[study.Data, study.Data, study.Data]:
    """Noise of MNIST's shape, labelled by a random linear map, in three parts: enough to see that all of it runs."""
    X = 2 * random_uniform(num * 784, ("images",)).reshape(num, 784).float() - 1
    y = (X @ (random_uniform(7840, ("map",)).reshape(784, 10).float() - 0.5)).argmax(1)
    first, second, third = zip(X.split(num // 3), y.split(num // 3), strict=True)
    return first, second, third


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure every network."""
    train, val, test = synthetic() if args.quick else study.load_mnist(args.data, args.device)
    start = time.perf_counter()
    trained = study.train_many(train, range(args.seeds), epochs=args.epochs, progress=reports.say("epochs", 10))
    middle = time.perf_counter()
    rows = study.measure_rows(
        trained, train, val, test, num_steps=args.num_steps, num_probes=args.num_probes,
        batch_size=len(train[0]) if args.device == "cuda" else 5000, progress=reports.say("networks", 10),
    )  # fmt: skip
    seconds = {"training": middle - start, "measuring": time.perf_counter() - middle}
    return {
        "num_params": sum(stack[0, 0].numel() for stack in trained.weights.values()),
        "images": [len(part[0]) for part in (train, val, test)],
        "seconds": {key: round(value, 1) for key, value in seconds.items()},
        "meaning": study.MEANING,
        "columns": ["value", "standard error", "lower end", "upper end of the 95 % interval"],
        "rows": judgement.plain(rows),
    }


def judge(report: dict[str, Any]) -> dict[str, Any]:
    """The report with the claims that follow from its rows."""
    claims = judgement.claims(judgement.from_plain(report["rows"]))
    return {**report, "claims": [plain_claim(claim) for claim in claims]}


# --------------------------------------------------------------------------------------------- the page


def page(folder: Path, target: Path) -> None:
    """The figure and the tables, from the result file."""
    report = reports.read(folder / FILE)
    rows = judgement.from_plain(report["rows"])
    target.mkdir(parents=True, exist_ok=True)
    figure(rows).savefig(target / "mnist_mlp.png", dpi=100)
    (target / "mnist_mlp.md").write_text(PAGE.format(**facts(report, rows)), encoding="utf8")


PAGE = """# The papers' MNIST network over {seeds} seeds

Seeds 000 and 002 train a network of {num_params:,} parameters on MNIST, 784-10-100-10 with ReLU, once at each weight
decay, and print properties of its Hessian (seed 000, figure 2; seed 002, table 1). How much of this is due to the
network, and how much to the random seed? To find out, we train the network {seeds} times at each weight decay.

**Network.** The papers call it a single hidden layer MLP with a hidden layer of 100 units and 9,960 parameters. That is
a contradiction: 784-100-10 has 79,510 parameters. 784-10-100-10 has the printed number, and the printed λ₁.

**Training.** SGD with momentum 0.9, batches of 128 and {epochs} epochs. The learning rate is 0.01 for half of the
epochs and then falls linearly to a hundredth of that at 90 % (seed 000, A.2). Weight decay applies to all parameters.
We use PyTorch's own initialisation, with pixels mapped to [-1, 1]. For each seed, all weight decays share the initial
weights and the order of batches.

**Data.** The first {train:,} images of the training set are used for training, and the Hessian is that of their loss,
without the penalty. The last {val:,} images are held out; the official test set has {test:,}. The papers do not say
which images they train this network on; for softmax regression seed 000 has 45,000 and 5,000. The batch size is not in
the papers either.

**Verdicts.** The papers print numbers from single runs. Such a number *holds* if it lies in the 95 % prediction
interval of our seeds, mean ± t s √(1 + 1/n), to its printed digits. With many numbers, one in twenty may fall outside
by chance alone, and numbers of one network are correlated. The reference run is a separate run in NumPy with a single
seed.

Written by `python benchmarks/mnist_mlp.py --page benchmarks/results docs` from `benchmarks/results/mnist_mlp.json`:
{machine}, torch {torch}, {training:.0f} s of training for all {networks} networks together, {measuring:.0f} s of
measuring; commit {commit}. Each network is measured by `ritz.spectrum` with {num_probes} probes of {num_steps} steps.
The largest standard error of Tr H / P is {trace_error:.1g}, and the widest interval of λ₁ is {lambda_error:.1g}: both
are small compared with the spread between seeds.

![λ₁ and ‖w‖ against weight decay, a line for each seed](mnist_mlp.png)

Each line is one seed. Seed 002 does not print ‖w‖; the crosses are twice its `a`.

## Results

- **Reference run.** {reference_holds} of its {reference_all} numbers lie in our prediction intervals.
- **λ₁ depends on the seed, not only on the recipe.** At weight decay 0, it ranges from {lambda_low:.1f} to
  {lambda_high:.1f} over seeds. From weight decay 0 to 5e-4, it rises by {lambda_change:.1f} on average. The printed
  14.4, 15.0 and 17.8 lie within our intervals, all below our means of {lambda_means}.
- **Order at equal seed.** ‖w‖ falls at each step in every seed. λ₁ rises from 0 to 5e-4 in {ends} of {seeds} seeds,
  from 1e-4 to 5e-4 in {last}, and from 0 to 1e-4 in {first}: the small step raises it on average, but not in every
  seed. From 0 to 5e-4, the gap in loss falls in {gaps} of {seeds} seeds: the sharper solution has the smaller gap, as
  the papers say.
- **The metric.** The printed `a` agrees with ‖w‖ / 2 and not with equation 7: {a_means} here, 7.6, 7.2 and 6.1 in the
  paper, whereas Tr H + ‖w‖² / 2 is {eq7_means}. With Tr H / P added, which is {trace_mean:.3f}, it would agree as well.
  All of these fall with weight decay.
- **The trace.** The printed Tr H / P at weight decay 0 is 0.0182, above our interval, which ends at {trace_end:.4f}.
  The estimate from one random vector has a standard deviation of {trace_noise:.2g} there, which is more than the
  distance. With that noise, all three printed values hold, and single vectors do not determine their order.
- **Gaps and accuracies.** The printed gaps agree with those on images held out of the training set: all six hold there,
  and none holds for the test set, whose gaps are larger ({gap_val:.3f} and {gap_test:.3f} in loss at weight decay 0).
  The accuracies agree, too, with one exception: 94.4 % without weight decay, where our seeds have {accuracy_low:.2f} to
  {accuracy_high:.2f} %. The claim that weight decay raises the accuracy rests on this number. From 0 to 5e-4, our
  accuracy changes by {accuracy_change} points.

## The numbers

Mean and standard deviation over {seeds} seeds, and the 95 % prediction interval. Bold: refuted.

{numbers}

## The orders, at equal seed

In how many of {seeds} seeds each number changes in the stated direction, and its mean change with a 95 % interval.
Bold: not in every seed, or refuted on average; italics: not decidable.

{orders}
"""

HEADINGS = {
    "weight_norm": ("‖w‖", 2), "lambda_max": ("λ₁", 2), "trace_per_param": ("Tr H / P", 4),
    "moment2_per_param": ("Tr H² / P", 4), "train_accuracy": ("accuracy, training, %", 2),
    "val_accuracy": ("accuracy, last 5,000, %", 2), "test_accuracy": ("accuracy, test, %", 2),
    "gap_loss": ("gap in loss, last 5,000", 4), "gap_loss_test": ("gap in loss, test", 4),
    "gap_error": ("gap in error, last 5,000, points", 2), "gap_error_test": ("gap in error, test, points", 2),
    "metric_a": ("a = ‖w‖ / 2", 2), "metric_a_eq7": ("a = Tr H + ‖w‖² / 2", 1),
}  # fmt: skip


def facts(report: dict[str, Any], rows: Sequence[study.Row]) -> dict[str, Any]:
    """All that the page says and that was measured."""
    reference = [claim.verdict for claim in judgement.claims(rows) if claim.paper == "reference run"]
    at_zero = {key: judgement.column(rows, key, 0.0) for key in study.MEANING}
    lambda_counts = {pair: judgement.count(rows, "lambda_max", *pair, 1) for pair in judgement.PAIRS}
    changes = {key: judgement.change(rows, key, 0.0, 5e-4) for key in ORDERS}
    return {
        **report, **report["settings"], **report["seconds"], "networks": len(rows),
        **dict(zip(("train", "val", "test"), report["images"], strict=True)),
        "trace_error": max(float(row.values["trace_per_param"].stderr) for row in rows),
        "lambda_error": max(high - low for low, high in (row.values["lambda_max"].interval() for row in rows)),
        "reference_holds": reference.count("holds"), "reference_all": len(reference),
        "lambda_low": min(at_zero["lambda_max"]), "lambda_high": max(at_zero["lambda_max"]),
        "lambda_change": float(changes["lambda_max"]), "lambda_means": means(rows, "lambda_max", 1),
        "first": lambda_counts[0.0, 1e-4], "last": lambda_counts[1e-4, 5e-4], "ends": lambda_counts[0.0, 5e-4],
        "a_means": means(rows, "metric_a", 2), "eq7_means": means(rows, "metric_a_eq7", 0),
        "gaps": judgement.count(rows, "gap_loss", 0.0, 5e-4, -1),
        "trace_mean": statistics.fmean(at_zero["trace_per_param"]),
        "trace_end": judgement.prediction_interval(at_zero["trace_per_param"])[1],
        "trace_noise": statistics.fmean(at_zero["trace_probe"]), "gap_val": statistics.fmean(at_zero["gap_loss"]),
        "gap_test": statistics.fmean(at_zero["gap_loss_test"]), "accuracy_low": min(at_zero["val_accuracy"]),
        "accuracy_high": max(at_zero["val_accuracy"]), "accuracy_change": spread(changes["val_accuracy"], 2),
        "numbers": numbers(rows), "orders": orders(rows),
    }  # fmt: skip


def means(rows: Sequence[study.Row], key: str, digits: int) -> str:
    first, second, third = (
        f"{statistics.fmean(judgement.column(rows, key, decay)):.{digits}f}" for decay in study.WEIGHT_DECAYS
    )
    return f"{first}, {second} and {third}"


def spread(change: Any, digits: int) -> str:
    """A mean with its interval."""
    low, high = change.interval()
    return f"{float(change):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def marked(text: str, claim: Claim) -> str:
    return {"holds": text, "refuted": f"**{text}**", "not decidable": f"*{text}*"}[claim.verdict]


def numbers(rows: Sequence[study.Row]) -> str:
    """A line for each number and weight decay: ours, the reference run's, the printed one."""
    lines = ["| | weight decay | mean | s | 95 % of runs | reference run | seed 002 |", "| --- |" + " ---: |" * 6]
    for key, (heading, digits) in HEADINGS.items():
        for place, decay in enumerate(study.WEIGHT_DECAYS):
            values = judgement.column(rows, key, decay)
            low, high = judgement.prediction_interval(values)
            others = [
                marked(given[key][place], judgement.inside(rows, key, decay, given[key][place], paper="", where=""))
                if key in given else ""
                for given in (judgement.REFERENCE, PRINTED)
            ]  # fmt: skip
            cells = [f"{statistics.fmean(values):.{digits}f}", f"{statistics.stdev(values):.2g}"]
            cells += [f"{low:.{digits}f} to {high:.{digits}f}", *others]
            lines.append(f"| {heading if place == 0 else ''} | {decay:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def orders(rows: Sequence[study.Row]) -> str:
    """A line for each number and pair of weight decays."""
    lines = ["| | from | to | seeds | mean change |", "| --- | ---: | ---: | ---: | ---: |"]
    num = len({row.seed for row in rows})
    for key, sign in ORDERS.items():
        heading, digits = HEADINGS[key]
        for place, (first, second) in enumerate(judgement.PAIRS):
            seeds = judgement.count(rows, key, first, second, sign)
            mean = judgement.ordered(rows, key, first, second, sign, paper="", where="")
            name = f"{heading} {'rises' if sign > 0 else 'falls'}" if place == 0 else ""
            cells = [f"{first:g}", f"{second:g}", f"{seeds} of {num}" if seeds == num else f"**{seeds} of {num}**"]
            cells.append(marked(spread(mean.measured, digits), mean))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(rows: Sequence[study.Row]) -> "Figure":
    """lambda_1 and the weight norm against weight decay, a line for each seed; crosses are printed in seed 002."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 3.6), layout="constrained")
    places = range(len(study.WEIGHT_DECAYS))
    printed = {
        "lambda_max": [float(text) for text in judgement.PRINTED["lambda_max"]],
        "weight_norm": [2 * float(text) for text in judgement.PRINTED["metric_a"]],
    }
    labels = {"lambda_max": "λ₁", "weight_norm": "‖w‖"}
    for ax, (key, label) in zip(drawing.subplots(1, 2), labels.items(), strict=True):
        for seed in sorted({row.seed for row in rows}):
            series = [float(row.values[key].value) for row in rows if row.seed == seed]
            ax.plot(places, series, "-", color="#0072B2", alpha=0.45, lw=1, label="our seeds" if seed == 0 else None)
        ends = [judgement.prediction_interval(judgement.column(rows, key, decay)) for decay in study.WEIGHT_DECAYS]
        ax.fill_between(
            places, [low for low, _ in ends], [high for _, high in ends], color="#0072B2", alpha=0.12, lw=0,
            label="95 % prediction interval",
        )  # fmt: skip
        ax.plot(places, [float(text) for text in judgement.REFERENCE[key]], "o", color="#009E73", label="reference run")
        ax.plot(places, printed[key], "x", ms=8, mew=2, color="#D55E00", label="seed 002, table 1")
        ax.set(xticks=places, xticklabels=[f"{decay:g}" for decay in study.WEIGHT_DECAYS], xlabel="weight decay")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    drawing.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return drawing


# ----------------------------------------------------------------------------------------- command line


def main() -> None:
    parser = reports.parser(__doc__, "noise for images, two seeds, seconds: does it run?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="folder with MNIST/raw; RITZ_DATA where it is not given")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--num-steps", type=int, default=study.LANCZOS_STEPS)
    parser.add_argument("--num-probes", type=int, default=8)
    parser.add_argument("--judge", type=Path, metavar="RESULTS")
    args = parser.parse_args()
    if args.page:
        page(*args.page)
        return
    if args.judge:
        reports.write(judge(reports.read(args.judge / FILE)), args.judge / FILE)
        return
    if args.quick:
        args.seeds, args.epochs, args.num_probes = 2, 2, 2
        args.out = reports.QUICK
        torch.set_num_threads(1)  # so little work is slower on several threads, on a busy machine many times
    torch.backends.cuda.matmul.allow_tf32 = False
    kept = ("device", "seeds", "epochs", "num_steps", "num_probes")
    about = reports.about(args, kept)
    reports.write(judge(about | measure(args)), args.out / FILE)
    if args.quick:
        page(args.out, args.out)


if __name__ == "__main__":
    main()
