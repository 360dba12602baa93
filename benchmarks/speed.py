"""How fast is ritz beside its peers? The same models, data, precision and vectors for all; images are compared first.

    python benchmarks/speed.py products                             on a CPU, one thread, minutes
    python benchmarks/speed.py products --device cuda --compile --prepare 5 --only vgg16_bn --precisions tf32
    python benchmarks/speed.py spectrum --device cuda --compile     and traces, diagonals, sample_traces, steps,
                                                                    measure, first, scaling
    python benchmarks/speed.py products --device cuda --compile --prepare 5 --ahead build/ahead.json ...
                                                                    compiles alone: then --ahead build/ahead.json
    python benchmarks/speed.py --page benchmarks/results docs       speed.md and speed.png, from the files

Tools take turns in each round of one run, three rounds at least, and are told in gradients of the same batch in the
same process. What is too long to run whole is measured in part and marked as extrapolated. Peers are looked for among
the installed packages and in the folder of --peers; one that is absent or fails is named in the file. Every call writes
one file, OUT/speed_SUITE_DEVICE[_TAG].json, with versions, machine, commit and settings, anew whenever there is more to
tell. Cases can be run apart (--only vgg16_bn/Hessian/8, --tools 'ritz*', --tag): the page lists all files. A case that
runs out of memory or time (--limit, --patience, --budget) is told of, and the next one begins.
"""

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers.first import LENGTHS
from peers.page import page, target_table, time_table
from peers.prepare import COMPILED, FOLDER, NOTHING_KEPT, WIDTH, jobs_of, prepare
from peers.problems import KINDS
from peers.products import cases
from peers.rows import is_chosen
from peers.suites import SUITES
from peers.tools import missing, multiplied, versions

from ritz import provenance
from ritz.files import write_text

QUICK = {
    "problems": ["tiny"], "rounds": 3, "batches": 2, "steps": 10, "probes": 6, "samples": 256, "loop": 2, "limit": 5.0,
    "columns": [1, 8], "batch_size": 32, "images": 50_000, "precisions": ["float32"],
    "patience": 60.0, "budget": math.inf, "lengths": [8, 80],
}  # fmt: skip
CPU = {
    "problems": ["mlp", "narrow", "conv", "transformer"], "rounds": 7, "batches": 2, "steps": 30, "probes": 12,
    "samples": 4096, "loop": 5, "limit": 60.0, "columns": [1, 8], "batch_size": None, "images": 50_000,
    "precisions": ["float32"], "patience": math.inf, "budget": math.inf, "lengths": list(LENGTHS[:3]),
}  # fmt: skip
CUDA = CPU | {
    "problems": ["vgg16_bn"], "batches": 8, "steps": 100, "probes": 30, "samples": 59_904, "loop": 200,
    "precisions": ["tf32"], "patience": 200.0, "budget": 540.0, "limit": 10.0, "lengths": list(LENGTHS),
}  # fmt: skip
FEW = {"measure": 1, "first": 1}  # batches
SMALL = {  # on a CPU
    "spectrum": ["conv"], "traces": ["mlp", "conv"], "diagonals": ["mlp", "conv"],
    "measure": ["lenet5"], "steps": ["mlp", "conv"], "first": ["conv"],
}  # fmt: skip


def settled(args: argparse.Namespace) -> argparse.Namespace:
    """What was not said, by device; of networks those of --only."""
    args.threads = args.threads or (2 if args.suite == "sample_traces" else 1)
    usual: dict[str, Any] = QUICK if args.quick else (CUDA if args.device == "cuda" else CPU)
    said = {name for name in usual if getattr(args, name) is not None}
    for name, value in usual.items():
        if name not in said:
            setattr(args, name, value)
    if "problems" not in said:
        if args.only:
            args.problems = [name for name in KINDS if is_chosen(args.only, name)]
        elif usual is CPU:
            args.problems = SMALL.get(args.suite, args.problems)
    if "batches" not in said:
        args.batches = FEW.get(args.suite, args.batches)
    return args


def run(args: argparse.Namespace) -> Path:
    """One suite, written to one file; or what it needs compiled ahead, and what that took."""
    begin = time.perf_counter()
    args.left = lambda: args.budget - (time.perf_counter() - begin)
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    args.prepared = _prepared(args)
    if args.ahead and args.prepare:
        return _kept_ahead(args.ahead, args.prepared)
    names = (*QUICK, "only", "tools", "matrices", "device", "compile", "check", "threads")
    about = {
        "suite": args.suite,
        "settings": {name: _plain(getattr(args, name)) for name in names},
        "commit": args.commit or provenance.own_commit(),
        "versions": provenance.versions() | versions(),
        "machine": provenance.machine(args.device),
        "missing": missing(),
        "load": os.getloadavg()[0],  # processes that wanted a core when the run began
        "prepared": args.prepared,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    target: Path = args.out / f"speed_{args.suite}_{args.device}{'_' + args.tag if args.tag else ''}.json"
    args.keep = _keeper(target, about)
    with multiplied(args.precisions[-1]):
        report = about | SUITES[args.suite](args)
    report["seconds"] = time.perf_counter() - begin
    args.keep(report)
    print(time_table(report))
    if report["verdicts"]:
        print("\n" + target_table(report))
    print(f"\nwrote {target} after {report['seconds']:.0f} s")
    return target


def _prepared(args: argparse.Namespace) -> dict[str, Any] | None:
    """What was compiled ahead, where that was asked for, or was by an earlier call."""
    if args.ahead and not args.prepare:
        return json.loads(args.ahead.read_text(encoding="utf8"))  # type: ignore[no-any-return]
    if not args.prepare or args.suite not in ("products", "spectrum", "measure"):
        return None
    if args.suite == "products":
        jobs = jobs_of(args, cases(args))
    else:
        wanted = [(name, args.precisions[-1], "Hessian", WIDTH) for name in args.problems]
        plan = NOTHING_KEPT if args.suite == "spectrum" else {}
        jobs = [{**job, "plan": plan} for job in jobs_of(args, wanted) if job["tool"] == COMPILED]
    return prepare(jobs, args.prepare, min(args.patience, args.left()))


def _kept_ahead(target: Path, took: dict[str, Any]) -> Path:
    """What was compiled ahead, added to that of calls before it."""
    if target.exists():
        before = json.loads(target.read_text(encoding="utf8"))
        took = took | {"seconds": before["seconds"] + took["seconds"], "jobs": before["jobs"] + took["jobs"]}
    write_text(target, json.dumps(took, indent=1) + "\n")
    return target


def _keeper(target: Path, about: dict[str, Any]) -> Callable[..., None]:
    """Writes what there is; while tools take their turns once a second at most."""
    last = 0.0

    def keep(found: dict[str, Any], at_once: bool = True) -> None:
        nonlocal last
        if at_once or time.perf_counter() - last > 1:
            write_text(target, json.dumps(about | found, indent=1) + "\n")
            last = time.perf_counter()

    return keep


def _plain(value: Any) -> Any:
    """As JSON has it, which knows no infinity."""
    return None if value == math.inf else value


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=SUITES, default="products")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--problems", nargs="+", choices=KINDS, help="networks: see benchmarks/peers/problems.py")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="NETWORK[/MATRIX[/COLUMNS]], * for any")
    parser.add_argument("--tools", nargs="+", metavar="NAME", help="of products, * for any; gradients are always timed")
    parser.add_argument("--precisions", nargs="+", choices=("float32", "tf32"))
    parser.add_argument("--matrices", nargs="+", choices=("Hessian", "GGN"), default=["Hessian", "GGN"])
    parser.add_argument("--columns", nargs="+", type=int, help="vectors at a time")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--batches", type=int, help="of the part of the data that is timed")
    parser.add_argument("--images", type=int, help="of the whole data, to which times are extrapolated")
    parser.add_argument("--rounds", type=int, help="turns of each tool, three at least")
    parser.add_argument("--limit", type=float, help="seconds of one case after which no further round is begun")
    parser.add_argument("--patience", type=float, help="seconds for the first calls of one tool, compiling included")
    parser.add_argument("--budget", type=float, help="seconds of the whole call, after which nothing is begun")
    parser.add_argument("--steps", type=int, help="of Lanczos, in the suites spectrum and measure")
    parser.add_argument("--lengths", type=int, nargs="+", help="of jobs, in products, in the suite first")
    parser.add_argument("--probes", type=int, help="in the suite traces")
    parser.add_argument("--samples", type=int, help="in the suite sample_traces")
    parser.add_argument("--loop", type=int, help="samples of PyHessian's loop")
    parser.add_argument("--threads", type=int, help="of a CPU: 1, and 2 for sample_traces, unless said")
    parser.add_argument("--compile", action="store_true", help="compiled products too, tens of seconds for each")
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile ahead, by so many processes")
    parser.add_argument("--ahead", type=Path, metavar="FILE", help="what --prepare took: with it added to, else read")
    parser.add_argument("--no-check", dest="check", action="store_false", help="spare the product in float64")
    parser.add_argument("--peers", type=Path, action="append", default=[], help="folder of packages not installed")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument("--tag", default="", help="at the end of the file's name")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--page", type=Path, nargs=2, metavar=("RESULTS", "DOCS"))
    parser.add_argument("--quick", action="store_true", help="every suite on a tiny network, seconds: does it run?")
    return parser


def main() -> None:
    args = arguments().parse_args()
    if args.page:
        page(*args.page)
        return
    sys.path += [str(path) for path in args.peers]  # at the end: what is installed goes first
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(FOLDER.absolute()))  # kept from call to call
    warnings.filterwarnings("ignore", category=UserWarning)  # PyHessian's graphs of gradients
    if args.quick:
        args.out = Path("build/benchmarks")
        for suite in SUITES:
            run(settled(argparse.Namespace(**vars(args) | {"suite": suite})))
        page(args.out, args.out)
        return
    run(settled(args))


if __name__ == "__main__":
    main()
