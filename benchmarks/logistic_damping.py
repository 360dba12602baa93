"""Section 5 and figures 4 to 6 of seed 004: what less damping, or less movement along sharp directions, costs.

Softmax regression on 1,000 images of MNIST and of Fashion-MNIST, 500 steps of LanczosOPT at every damping and eta, and
gradient descent beside it, for every seed; then what the paper says of it, judged by the spread between seeds.

    python benchmarks/logistic_damping.py                                   the better part of an hour on one core
    python benchmarks/logistic_damping.py --judge benchmarks/results        the claims once more, from the runs on file
    python benchmarks/logistic_damping.py --page benchmarks/results docs    logistic_damping.md and its figures

A data set and seed that is done lies in --parts, and a run that was stopped goes on from there; so two processes can
share the work: --datasets MNIST and --datasets FashionMNIST, then once more without, which finds all parts and writes.
The data is found through RITZ_DATA or --data, a folder in torchvision's layout.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import reports
import torch

from ritz.papers import logistic_damping as study
from ritz.papers import logistic_damping_claims as judgement
from ritz.papers import logistic_damping_figure as figures
from ritz.papers.base import Claim
from ritz.papers.data.images import Data, load_images
from ritz.papers.experiment import plain_claim, write_result
from ritz.papers.experiments import find
from ritz.results import Estimate
from ritz.space import random_uniform

FILE = "logistic_damping.json"


# ----------------------------------------------------------------------------------------------- the run


def synthetic(name: str, num: int = 300) -> tuple[Data, Data]:
    """Noise of the images' shape, less from pixel to pixel, labelled by a random linear map: to see that all runs."""
    X = 2 * random_uniform(num * 784, (name, "images")).reshape(num, 784).float() - 1
    X = X * 0.8 ** torch.arange(784.0)
    y = (X @ (random_uniform(7840, (name, "map")).reshape(784, 10).float() - 0.5)).argmax(1)
    return (X[: num // 2], y[: num // 2]), (X[num // 2 :], y[num // 2 :])


def load(name: str, args: argparse.Namespace) -> tuple[Data, Data]:
    """The data where the work is done: float32 on a CPU, as the paper's, float64 where that is free."""
    if args.quick:
        return synthetic(name)
    return load_images(name, args.data, args.device, torch.float32 if args.device == "cpu" else torch.float64)


def part(name: str, seed: int, args: argparse.Namespace, about: dict[str, Any]) -> dict[str, Any]:
    """All runs of one data set and seed, from its file where it is done."""
    path = args.parts / f"{name}-{seed}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf8"))
    train, test = load(name, args)
    train = study.draw(train, seed, args.images)
    begin = time.perf_counter()
    options = {"steps": args.steps, "every": args.every}
    runs = [study.train_descent(train, test, seed, **options)]
    runs += study.train_lanczos(
        train, test, seed, args.dampings, args.etas, num_lanczos=args.num_lanczos, **options,
        progress=reports.say(f"steps, {name}, seed {seed}", 25),
    )  # fmt: skip
    found = {
        "dataset": name, "seed": seed, "images": [len(train[0]), len(test[0])],
        "seconds": round(time.perf_counter() - begin, 1), **about, "runs": judgement.plain(name, runs),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf8")
    return found


def collect(args: argparse.Namespace, about: dict[str, Any]) -> dict[str, Any]:
    """Every data set and seed, done or to be done, as one report."""
    parts = [part(name, seed, args, about) for seed in args.seeds for name in args.datasets]
    kept = ("dampings", "etas", "steps", "every", "num_lanczos", "seeds", "datasets")
    return {
        "settings": {key: getattr(args, key) for key in kept} | {"alpha": study.ALPHA},
        **{key: parts[-1][key] for key in about},
        "images": parts[-1]["images"],
        "seconds": {f"{found['dataset']}, seed {found['seed']}": found["seconds"] for found in parts},
        "meaning": study.MEANING,
        "references": [entry for name in args.datasets for entry in references(name, args)],
        "runs": sorted(
            (run for found in parts for run in found["runs"]), key=lambda run: args.datasets.index(run["dataset"])
        ),
    }


def references(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The step of LanczosOPT beside equation 9 with eigenpairs, at the start and along gradient descent."""
    path = args.parts / f"{name}-references.json"
    if not path.is_file():
        data, _ = load(name, args)
        options = {"num_lanczos": args.num_lanczos, "enough": 10 * args.num_lanczos}
        found = [
            study.compare_exact(study.draw(data, seed, args.images), seed, after, args.dampings, **options)
            for seed in args.seeds
            for after in (0, 2 * args.steps // 5)
        ]
        path.write_text(json.dumps([judgement.plain_reference(name, entry) for entry in found]), encoding="utf8")
    return json.loads(path.read_text(encoding="utf8"))


def judge(report: dict[str, Any]) -> dict[str, Any]:
    """The report with the claims that follow from its runs."""
    claims = judgement.claims(judgement.from_plain(report["runs"]))
    return {**report, "claims": [plain_claim(claim) for claim in claims.values()]}


def all_claims(report: dict[str, Any]) -> dict[judgement.Key, Claim]:
    """What follows from the runs, and from the comparison with eigenpairs."""
    references = judgement.from_plain_reference(report["references"])
    return judgement.claims(judgement.from_plain(report["runs"])) | judgement.reference_claims(references)


def as_result(report: dict[str, Any]) -> dict[str, Any]:
    """The report as `ritz reproduce damping logistic` would write it, but for the runs, which stay where they are."""
    (one,) = find("damping", "logistic")
    return {
        "paper": one.paper, "item": one.item, "title": one.title, "source": one.source,
        "setting": {"budget": "paper", "device": "cpu", "seeds": len(report["settings"]["seeds"]), "workers": 1},
        "seeds": report["settings"]["seeds"], "commit": report["commit"], "versions": {"torch": report["torch"]},
        "machine": report["machine"], "seconds": round(sum(report["seconds"].values()), 1), "recipes": [],
        "claims": [plain_claim(claim) for claim in judgement.claims(judgement.from_plain(report["runs"])).values()],
        "rows": [{"file": f"benchmarks/results/{FILE}", "page": "docs/logistic_damping.md"}],
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- the page


def page(folder: Path, target: Path) -> None:
    """The figures and the tables, from the result file."""
    report = reports.read(folder / FILE)
    results = judgement.from_plain(report["runs"])
    target.mkdir(parents=True, exist_ok=True)
    figures.heat_maps(results).savefig(target / "logistic_damping_grid.png", dpi=100)
    for name, runs in results.items():
        figures.curves(name, runs).savefig(target / f"logistic_damping_{name.lower()}.png", dpi=100)
    (target / "logistic_damping.md").write_text(PAGE.format(**facts(report, results)), encoding="utf8")


PAGE = """# Damping and sharp directions in softmax regression, over {num_seeds} seeds

Section 5 of seed 004 asks whether movement along the sharp directions makes a network generalise. It uses a convex
problem without any stochasticity: softmax regression (7,850 parameters) on {train:,} images of MNIST, repeated here on
Fashion-MNIST. Training takes {steps} full-batch steps at a learning rate α = {alpha:g}; {test:,} images are used for
testing. At each step, LanczosOPT computes {num_lanczos} Ritz pairs (λᵢ, φᵢ) of the Hessian and updates the weights by
equation 9,

    w ← w − α [ (1/η) Σ φᵢ φᵢᵀg / (λᵢ + δ) + (g − Σ φᵢ φᵢᵀg) / δ ]

A small damping δ favours the flat directions, which have no λᵢ. η = 3 and 10 (LOPT[3], LOPT[10]) reduce the movement
along the sharp directions. The paper shows one run of each. Here, each of {num_seeds} seeds has its own {train:,}
images and initial weights, shared by all runs of the seed. We report mean differences at equal seed with 95 % Student t
intervals. With so many intervals, some miss by chance alone.

**Choices.** The paper leaves the following open. The dampings are {grid}: at the largest, the learning rate along flat
directions, α/δ, is that of gradient descent; at the smallest, training overshoots. Pixels are mapped to [-1, 1]. We use
PyTorch's own initialisation, because at zero every eigenvalue occurs nine times, and Lanczos finds only one of them.
Each step starts Lanczos from a new random vector. All {num_lanczos} pairs are kept, as in the authors' code.

Written by `python benchmarks/logistic_damping.py --page benchmarks/results docs` from
`benchmarks/results/logistic_damping.json`: {machine}, torch {torch}, float32, {minutes:.0f} minutes for each data set
and seed on a shared machine; commit {commit}. The {runs_each} runs of LanczosOPT of a seed run in lock-step; a test
shows that the steps are those of `ritz.optim.LanczosOpt`.

![Error less that of the best run, by δ and η](logistic_damping_grid.png)

As in figure 4 of the paper: final errors, averaged over seeds, minus the lowest error of the panel (printed below its
title), in percentage points. Low damping is at the top.

![Errors along training, MNIST](logistic_damping_mnist.png)

![Errors along training, Fashion-MNIST](logistic_damping_fashionmnist.png)

As in figures 5 and 6: training error (dashed) and test error (solid), mean and range over seeds. Gradient descent at
the same α is grey. Errors below 0.1 % are not shown.

## Results

Lists are in the order of the dampings {grid}. They give means over seeds, in percentage points.

- **Less movement along sharp directions costs test error.** From η = 1 to 10, the test error changes by
  {MNIST_harm_test_error} on MNIST and by {FashionMNIST_harm_test_error} on Fashion-MNIST: little at the lowest damping,
  most in the middle. The statement that larger damping increases this harm is refuted from 0.1 to 1.
- **Generalisation.** The training error changes by {MNIST_harm_train_error}, and by {FashionMNIST_harm_train_error}.
  The remaining change is that of the gap: {MNIST_harm_gap}, and {FashionMNIST_harm_gap}. In the middle of the grid,
  where training comes close to its end along flat directions, generalisation is thus harmed more than training. At the
  ends of the grid, the seeds do not decide.
- **The effect of less damping is not monotone.** At η = 1 the test error is {MNIST_test_error} %, and
  {FashionMNIST_test_error} %: it is lowest at 0.1. The gap, {MNIST_gap} and {FashionMNIST_gap}, does rise from δ = 1 to
  0.01, because the training error falls. (The final ratio 1 + λ₁/δ does not rise with every decrease of δ, because λ₁
  falls, too.)
- **Overshooting.** At the lowest damping, the learning rate along flat directions is 100, and training overshoots: the
  loss climbs to {MNIST_peak} times its initial value on MNIST, {FashionMNIST_peak} on Fashion-MNIST (at 0.001 some runs
  climb, too). At η = 1, training still ends with all images separated, and with a test loss of {MNIST_test_loss} and
  {FashionMNIST_test_loss}, which the test error hardly shows.
- **There is no minimum.** In {MNIST_separated} and {FashionMNIST_separated} of {num_seeds} seeds a run separates its
  images, so the loss falls to 0 at infinity. (Also, adding one vector to all classes changes nothing.)
- **Converged pairs.** 50 Lanczos steps find the outliers, but not 50 eigenpairs: {MNIST_pairs} of the Ritz pairs have
  converged to 1e-6 of λ₁ on MNIST, {FashionMNIST_pairs} on Fashion-MNIST. At small damping, the distance between the
  step and that of equation 9 is about as long as the step itself (last table). η therefore acts on the Krylov space of
  a random vector: the outliers, and a sample of the rest.
- **Gradient descent** at the same learning rate ends at {MNIST_descent} % and {FashionMNIST_descent} %. LanczosOPT at δ
  = 1 is close, because along flat directions the two are the same. At 0.1 it is below gradient descent, at 0.001 and
  0.0001 above: there is a gap, and more damping closes it.

## Decisions made during the study

The fourth seed was added after the verdicts on three, to narrow the intervals. The definitions of a rise of the
training loss, of separated images, and of an outlier were fixed with results in view; the first definition of an
outlier would have found 15 and 16 of them at one seed of Fashion-MNIST. Where training overshoots (δ = 0.0001, some
runs at 0.001), runs are chaotic, and a different order of operations changes their test error by some points.

## The statements

Each statement of section 5 is split into claims, one for each damping, η or pair of them. The table counts how many of
them hold, are refuted, or are not decidable from {num_seeds} seeds. *Generalisation* is read as test error, and once
more as the gap, test error − training error.

{statements}

{second} beside {first}: {picture}; {opposed} hold on one and are refuted on the other. The statement that its test
error is higher holds: by {higher} points on average over the grid.

## The errors

Final errors in %, mean and standard deviation over seeds.

{errors}

## Less damping

Mean change of the test error and of the gap, in percentage points, from one damping to the next lower one, and from the
highest to the lowest. According to the paper, all of them rise. Bold: refuted; italics: not decidable.

{less_damping}

## Less movement along sharp directions

Mean change from one η to another. According to the paper, all of them rise.

{larger_eta}

How much more η = 3 and 10 add to the errors at one damping than at the next lower one. According to the paper, all of
them rise.

{graver}

## The step of LanczosOPT and equation 9

Equation 9 sums over eigenpairs, whereas LanczosOPT uses Ritz pairs. The table gives |difference| / |step| between its
step and that of the {num_lanczos} largest eigenpairs (from {enough} Lanczos steps, float64), for η = 1, at the start
and along gradient descent:

{equation_9}
"""

STATEMENTS = {  # families of claims, and what section 5 says
    "minimum": "the loss has a single global minimum",
    "outliers": "at most ten well-separated outliers",
    "converged": "50 Lanczos steps find the outliers",
    "equation 9": "LanczosOPT takes the step of equation 9, with the 50 largest eigenpairs",
    "ratio": "less damping raises the curvature ratio",
    "unstable": "a rate of 0.01 is too large for the lowest damping (section 6)",
    "damping test_error": "less damping: generalisation suffers (test error)",
    "damping gap": "less damping: test error suffers more than training error (section 6.3)",
    "eta test_error": "larger η: generalisation is worsened (test error)",
    "eta gap": "larger η: more harm to generalisation than to training",
    "graver train_error": "at larger δ the harm of η to training is graver",
    "graver test_error": "at larger δ the harm of η to testing is graver",
    "minimal": "at the two lowest δ, η leaves the training error as it is",
    "descent gap": "at the lowest δ the test error is above that of gradient descent (abstract)",
    "descent closed": "more damping closes that gap entirely (abstract)",
}


def family(key: judgement.Key) -> str:
    """The statement that a claim belongs to."""
    fine = " ".join(str(word) for word in key[1:3])
    return fine if fine in STATEMENTS else str(key[1])


def facts(report: dict[str, Any], results: judgement.Results) -> dict[str, Any]:
    """All that the page says and that was measured."""
    claims = all_claims(report)
    settings = report["settings"]
    first, second = results
    picture = claims["both", "picture"]
    return {
        **report, **settings, **dict(zip(("train", "test"), report["images"], strict=True)),
        "num_seeds": len(settings["seeds"]), "grid": listed(f"{damping:g}" for damping in settings["dampings"]),
        "runs_each": len(settings["dampings"]) * len(settings["etas"]), "enough": 10 * settings["num_lanczos"],
        "minutes": max(report["seconds"].values()) / 60, "first": first, "second": second,
        "higher": marked(claims["both", "higher"]),
        "picture": picture.evidence, "opposed": picture.measured or "none",
        "errors": error_table(results), "statements": statement_table(results, claims),
        "less_damping": damping_table(results, claims), "larger_eta": eta_table(results, claims),
        "graver": graver_table(results, claims), "equation_9": distance_table(results, claims),
        **findings(report, results, claims),
    }  # fmt: skip


def listed(words: Iterable[str]) -> str:
    *most, last = words
    return ", ".join(most) + f" and {last}" if most else last


def findings(report: dict[str, Any], results: judgement.Results, claims: dict[judgement.Key, Claim]) -> dict[str, Any]:
    """The numbers of the text, of each data set: lists by damping, ascending, and what is seen at the lowest."""
    found: dict[str, Any] = {}
    for name, runs in results.items():
        grid, (one, *_, ten) = judgement.dampings(runs), judgement.etas(runs)
        lists = {key: [judgement.final(runs, key, d, one) for d in grid] for key in ("test_error", "gap")}
        harms = {
            f"harm_{key}": [judgement.harm(runs, key, d, ten) for d in grid]
            for key in ("test_error", "gap", "train_error")
        }
        losses = [run.curves["train_loss"] for run in runs if run.damping == grid[0]]
        peaks = [float(loss.max() / loss[0]) for loss in losses]
        counts = [entry["converged"] for entry in report["references"] if entry["dataset"] == name]
        own = {key: listed(f"{float(x.mean()):.1f}" for x in values) for key, values in lists.items()}
        own |= {key: listed(f"{float(x.mean()):+.1f}" for x in values) for key, values in harms.items()}
        own |= {
            "peak": f"{min(peaks):.0f} to {max(peaks):.0f}",
            "test_loss": f"{float(judgement.final(runs, 'test_loss', grid[0], one).mean()):.0f}",
            "descent": spread(judgement.final(runs, "test_error", None, None)),
            "pairs": f"{min(counts)} to {max(counts)}",
            "separated": claims[name, "minimum"].measured,
            "outliers": claims[name, "outliers"].evidence,
        }
        found |= {f"{name}_{key}": value for key, value in own.items()}
    return found


def spread(values: torch.Tensor, digits: int = 2) -> str:
    return f"{values.mean():.{digits}f} ± {values.std():.{digits}f}"


def marked(claim: Claim) -> str:
    """A mean change with its interval; bold where refuted, in italics where it is not decidable."""
    assert isinstance(claim.measured, Estimate)
    low, high = claim.measured.interval()
    text = f"{float(claim.measured):+.2f} ({low:+.2f} to {high:+.2f})"
    return {"holds": text, "refuted": f"**{text}**", "not decidable": f"*{text}*"}[claim.verdict]


def table(head: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """Markdown; the first `words` columns are words, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def error_table(results: judgement.Results) -> str:
    """Training and test error of every run at the end, mean and standard deviation over seeds."""
    first = next(iter(results.values()))
    etas = judgement.etas(first)
    lines = []
    for name, runs in results.items():
        for damping in judgement.dampings(runs):
            cells = [spread(judgement.final(runs, key, damping, eta))
                     for eta in etas for key in ("train_error", "test_error")]  # fmt: skip
            lines.append([name, f"{damping:g}", *cells])
        own = [spread(judgement.final(runs, key, None, None)) for key in ("train_error", "test_error")]
        lines.append([name, "gradient descent", *own, *[""] * (2 * len(etas) - 2)])
    head = ["", "δ", *(f"{kind}, η = {eta:g}" for eta in etas for kind in ("training", "test"))]
    return table(head, lines)


def statement_table(results: judgement.Results, claims: dict[judgement.Key, Claim]) -> str:
    """How many claims of each statement hold, are refuted, are not decidable, for each data set."""
    lines = []
    for name, text in STATEMENTS.items():
        cells = []
        for dataset in results:
            found = [claim.verdict for key, claim in claims.items() if key[0] == dataset and family(key) == name]
            cells += [str(found.count(verdict)) for verdict in ("holds", "refuted", "not decidable")]
        lines.append([text, *cells])
    verdicts = [f"{verdict}, {name}" for name in results for verdict in ("holds", "refuted", "not decidable")]
    return table(["statement", *verdicts], lines)


def damping_table(results: judgement.Results, claims: dict[judgement.Key, Claim]) -> str:
    """Changes from one damping to the next lower, and from the highest to the lowest."""
    etas = judgement.etas(next(iter(results.values())))
    lines = []
    for name in results:
        pairs = [key[4:] for key in claims if key[:4] == (name, "damping", "test_error", etas[0])]
        for more, less in pairs:
            cells = [marked(claims[name, "damping", key, eta, more, less])
                     for key in ("test_error", "gap") for eta in etas]  # fmt: skip
            lines.append([name, f"{more:g} to {less:g}", *cells])
    head = ["", "δ", *(f"{what}, η = {eta:g}" for what in ("test error", "gap") for eta in etas)]
    return table(head, lines)


def eta_table(results: judgement.Results, claims: dict[judgement.Key, Claim]) -> str:
    """Changes from one eta to another at every damping."""
    lines = []
    for name, runs in results.items():
        for damping in judgement.dampings(runs):
            pairs = [key[4:] for key in claims if key[:4] == (name, "eta", "test_error", damping)]
            cells = [
                marked(claims[name, "eta", key, damping, *pair]) for key in ("test_error", "gap") for pair in pairs
            ]
            lines.append([name, f"{damping:g}", *cells])
    head = ["", "δ", *(f"{what}, η {low:g} to {high:g}" for what in ("test error", "gap") for low, high in pairs)]
    return table(head, lines)


def graver_table(results: judgement.Results, claims: dict[judgement.Key, Claim]) -> str:
    """How the harm of eta grows with damping."""
    etas = judgement.etas(next(iter(results.values())))[1:]
    lines = []
    for name in results:
        for less, more in [key[4:] for key in claims if key[:4] == (name, "graver", "train_error", etas[0])]:
            cells = [marked(claims[name, "graver", key, eta, less, more])
                     for key in ("train_error", "test_error") for eta in etas]  # fmt: skip
            lines.append([name, f"{less:g} to {more:g}", *cells])
    head = ["", "δ", *(f"{what}, η = {eta:g}" for what in ("training error", "test error") for eta in etas)]
    return table(head, lines)


def distance_table(results: judgement.Results, claims: dict[judgement.Key, Claim]) -> str:
    """How far the step is from equation 9, by damping."""
    grid = judgement.dampings(next(iter(results.values())))
    lines = []
    for name in results:
        for after in sorted({key[2] for key in claims if key[:2] == (name, "equation 9")}):
            found = [claims[name, "equation 9", after, damping] for damping in grid]
            lines.append([name, str(after), *(f"{float(claim.measured):.2f}" for claim in found)])  # type: ignore[arg-type]
    return table(["", "steps of gradient descent", *(f"δ = {damping:g}" for damping in grid)], lines)


# ----------------------------------------------------------------------------------------- command line


def main() -> None:
    parser = reports.parser(__doc__, "noise for images, two seeds, seconds: does it run?")
    parser.add_argument("--data", type=Path, help="folder with MNIST/raw and FashionMNIST/raw; else RITZ_DATA")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--datasets", nargs="+", default=list(study.DATASETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--dampings", type=float, nargs="+", default=list(study.DAMPINGS))
    parser.add_argument("--etas", type=float, nargs="+", default=list(study.ETAS))
    parser.add_argument("--images", type=int, default=study.NUM_TRAIN)
    parser.add_argument("--steps", type=int, default=study.STEPS)
    parser.add_argument("--every", type=int, default=study.EVERY)
    parser.add_argument("--num-lanczos", type=int, default=study.LANCZOS_STEPS)
    parser.add_argument("--parts", type=Path, default=Path("build/benchmarks/logistic_damping"))
    parser.add_argument("--judge", type=Path, metavar="RESULTS")
    parser.add_argument("--result", type=Path, nargs=2, metavar=("RESULTS", "OUT"), help="as `ritz reproduce` has it")
    args = parser.parse_args()
    if args.page:
        page(*args.page)
        return
    if args.judge:
        reports.write(judge(reports.read(args.judge / FILE)), args.judge / FILE)
        return
    if args.result:
        write_result(as_result(reports.read(args.result[0] / FILE)), args.result[1])
        return
    torch.set_flush_denormal(True)  # where an image is certain its probabilities are, and a CPU is slow with those
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            args.seeds, args.images, args.steps, args.every, args.num_lanczos = [0, 1], 100, 4, 2, 10
            args.dampings = [1e-3, 0.1, 1.0]
            args.parts, args.out = Path(folder), reports.QUICK
            torch.set_num_threads(1)  # so little work is slower on several threads, on a busy machine many times
        about = reports.about(args, ())
        del about["settings"]  # they are those of all parts
        report = collect(args, about)
    if set(args.datasets) == set(study.DATASETS):
        reports.write(judge(report), args.out / FILE)
    if args.quick:
        page(args.out, args.out)


if __name__ == "__main__":
    main()
