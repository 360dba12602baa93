"""What it costs on a CPU that the C library gives memory back and asks for it anew, and what is gained by keeping it.

glibc gives large blocks back to the system when they are dropped. `ritz` as a command keeps them
(`ritz.cli.allocation`); a program keeps them if MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_ are set before it begins.
Each network is measured in a process of its own without and with that, in turn, several rounds; told are the least
seconds of one thread, those of the system counted in, and the most memory that the process had.

    python benchmarks/allocation.py          minutes; writes benchmarks/results/allocation.json
    python benchmarks/allocation.py --quick  seconds: does it run?
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import reports
import torch
from torch import nn

import ritz
from ritz.cli.allocation import VARIABLES
from ritz.provenance import versions

FILE = "allocation.json"
NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], int]] = {  # what makes it, an input, classes
    "VGG-16-BN": (ritz.models.vgg16_bn, (3, 32, 32), 100),
    "All-CNN-C": (ritz.models.all_cnn_c, (3, 32, 32), 100),
    "PreResNet-164": (ritz.models.preresnet164, (3, 32, 32), 100),
    "F1": (ritz.models.keskar_f1, (784,), 10),
}
ARMS: dict[str, dict[str, str]] = {"given back": {}, "kept": VARIABLES}


def measured(name: str, batch_size: int, vectors: int) -> list[dict[str, Any]]:
    """Least seconds of a gradient and of products, in this process, by one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, shape, classes = NETWORKS[name]
    model, data = make(), (torch.randn(batch_size, *shape), torch.randint(classes, (batch_size,)))
    work: dict[str, Callable[[], Any]] = {"gradient": lambda: _gradient(model, data)}
    for mode in ("eval", "train"):
        risk = ritz.Risk(model, nn.CrossEntropyLoss(), data, mode=mode, batch_size=batch_size)
        H = ritz.Hessian(risk, "forward")
        for k in (1, vectors):
            rows = H.probes(range(k), seed=0)
            work[f"{mode} mode, Hessian, {k} at a time"] = lambda H=H, rows=rows: H.rows(rows)
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # noqa: E731
    return [{"network": name, "work": what, "seconds": _least(run), "GiB": peak()} for what, run in work.items()]


def _gradient(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()


def _least(run: Callable[[], Any], rounds: int = 2) -> float:
    run()
    seconds = []
    for _ in range(rounds):
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def apart(name: str, arm: str, batch_size: int, vectors: int) -> list[dict[str, Any]]:
    """The same in a process that begins so."""
    env = {key: value for key, value in os.environ.items() if key not in VARIABLES} | ARMS[arm]
    own = [sys.executable, __file__, "--only", name, "--batch-size", str(batch_size), "--vectors", str(vectors)]
    return json.loads(subprocess.run(own, env=env, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = reports.parser(__doc__, "one network, seconds: does it run?", page=False)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--vectors", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--names", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--only", choices=NETWORKS, help="one network, in this process, to stdout")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measured(args.only, args.batch_size, args.vectors)))
        return
    if args.quick:
        args.names, args.batch_size, args.rounds, args.out = ["F1"], 8, 1, reports.QUICK
    torch.set_num_threads(1)
    about, rows = reports.about(args, ("batch_size", "vectors", "rounds")), []
    for name in args.names:
        found: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in ARMS}
        for _ in range(args.rounds):
            for arm in ARMS:
                found[arm].append(apart(name, arm, args.batch_size, args.vectors))
        for place, first in enumerate(found["kept"][0]):
            row = {"network": name, "work": first["work"]}
            for arm, rounds in found.items():
                row[arm] = min(one[place]["seconds"] for one in rounds)
                row[f"{arm}, GiB"] = max(one[place]["GiB"] for one in rounds)
            row["ratio"] = row["given back"] / row["kept"]
            rows.append(row)
            print(f"{name}, {row['work']}: {row['given back']:.3g} s, kept {row['kept']:.3g} s", flush=True)
    reports.write({**about, "versions": versions(), "rows": reports.rounded(rows, ".4g")}, args.out / FILE)


if __name__ == "__main__":
    main()
