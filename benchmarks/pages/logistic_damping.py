"""The page of damping in softmax regression: figures, tables and text, all from the result file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import reports
import torch
from logistic_damping import FILE

from ritz.papers import logistic_damping_claims as judgement
from ritz.papers import logistic_damping_figure as figures
from ritz.papers.base import Claim
from ritz.results import Estimate


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

NAMES = {"train_error": "training error", "test_error": "test error", "gap": "gap"}


def family(key: judgement.Key) -> str:
    """The statement that a claim belongs to."""
    fine = " ".join(str(word) for word in key[1:3])
    return fine if fine in STATEMENTS else str(key[1])


def all_claims(report: dict[str, Any]) -> dict[judgement.Key, Claim]:
    """What follows from the runs, and from the comparison with eigenpairs."""
    references = judgement.from_plain_reference(report["references"])
    return judgement.claims(judgement.from_plain(report["runs"])) | judgement.reference_claims(references)


def facts(report: dict[str, Any], results: judgement.Results) -> dict[str, Any]:
    """All that the page says and that was measured."""
    claims = all_claims(report)
    settings = report["settings"]
    first, second = results
    picture, etas = claims["both", "picture"], judgement.etas(results[first])
    return {
        **report, **settings, **dict(zip(("train", "test"), report["images"], strict=True)),
        "num_seeds": len(settings["seeds"]), "grid": listed(f"{damping:g}" for damping in settings["dampings"]),
        "runs_each": len(settings["dampings"]) * len(settings["etas"]), "enough": 10 * settings["num_lanczos"],
        "minutes": max(report["seconds"].values()) / 60, "first": first, "second": second,
        "higher": marked(claims["both", "higher"]),
        "picture": picture.evidence, "opposed": picture.measured or "none",
        "errors": error_table(results), "statements": statement_table(results, claims),
        "less_damping": pairs_table(results, claims, "damping", ("test_error", "gap"), etas),
        "larger_eta": eta_table(results, claims),
        "graver": pairs_table(results, claims, "graver", ("train_error", "test_error"), etas[1:]),
        "equation_9": distance_table(results, claims),
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


def pairs_table(
    results: judgement.Results, claims: dict[judgement.Key, Claim], statement: str, errors: Sequence[str],
    etas: Sequence[float],
) -> str:  # fmt: skip
    """What a statement has of each pair of dampings, by error and eta."""
    lines = []
    for name in results:
        for pair in [key[4:] for key in claims if key[:4] == (name, statement, errors[0], etas[0])]:
            cells = [marked(claims[name, statement, key, eta, *pair]) for key in errors for eta in etas]
            lines.append([name, "{:g} to {:g}".format(*pair), *cells])
    return table(["", "δ", *(f"{NAMES[key]}, η = {eta:g}" for key in errors for eta in etas)], lines)


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


def distance_table(results: judgement.Results, claims: dict[judgement.Key, Claim]) -> str:
    """How far the step is from equation 9, by damping."""
    grid = judgement.dampings(next(iter(results.values())))
    lines = []
    for name in results:
        for after in sorted({key[2] for key in claims if key[:2] == (name, "equation 9")}):
            found = [claims[name, "equation 9", after, damping] for damping in grid]
            lines.append([name, str(after), *(f"{float(claim.measured):.2f}" for claim in found)])  # type: ignore[arg-type]
    return table(["", "steps of gradient descent", *(f"δ = {damping:g}" for damping in grid)], lines)
