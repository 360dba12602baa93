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
from pathlib import Path
from typing import Any

import reports
import torch

from ritz.papers import logistic_damping as study
from ritz.papers import logistic_damping_claims as judgement
from ritz.papers.data.images import Data, load_images
from ritz.papers.experiment import plain_claim, write_result
from ritz.papers.experiments import find
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


def as_result(report: dict[str, Any]) -> dict[str, Any]:
    """The report as `ritz reproduce damping logistic` would write it, but for the runs, which stay where they are."""
    (one,) = find("damping", "logistic")
    return {
        "paper": one.paper, "item": one.item, "title": one.title, "source": one.source,
        "setting": {"budget": "paper", "device": "cpu", "seeds": len(report["settings"]["seeds"]), "workers": 1},
        "seeds": report["settings"]["seeds"], "commit": report["commit"], "versions": {"torch": report["torch"]},
        "machine": report["machine"], "seconds": round(sum(report["seconds"].values()), 1), "recipes": [],
        "claims": judge(report)["claims"],
        "rows": [{"file": f"benchmarks/results/{FILE}", "page": "docs/logistic_damping.md"}],
    }  # fmt: skip


# ----------------------------------------------------------------------------------------- command line


def main() -> None:
    from pages.logistic_damping import page  # which looks into this script

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
