"""How good and how dear is the noise of the curvature, as damping is learned from it? On a CPU, small networks.

Three questions: does the streaming estimate of `AutoDamping` agree with the full one, that has probes common to all
batches, and which of them errs less; do the 95 % intervals of `ritz.curvature_noise` hold the truth, on a network so
small that the truth is known from the Hessians of all samples; and what share of a training loop does AutoDamping take.

    python benchmarks/noise.py                                   minutes of one core
    python benchmarks/noise.py --page benchmarks/results docs    noise.md, from the file

Fashion-MNIST is found through RITZ_DATA or --data, a folder in torchvision's layout. --quick is on the digits of
scikit-learn, for seconds.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reports
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, vmap
from torch.nn.functional import cross_entropy

import ritz
from ritz.optim import KFAC, AutoDamping, Stream
from ritz.papers.data import Data, load

FILE = "noise.json"
OWN = "a probe for each batch"
BARS = {"SGD": 40, "KFAC": 15}  # per cent of a loop that AutoDamping may take
WAYS = {"drawn": False, "streaming": True}  # batches drawn for it, or the training batches
FULL = (16, 4)  # batches and probes of the full estimate, those of ritz.curvature_noise by default


# ------------------------------------------------------------------------------------------ data and networks


def images(args: argparse.Namespace) -> Data:
    """Pixels in [-1, 1], (n, 1, side, side), and labels."""
    pixels, labels = load("digits" if args.quick else "FashionMNIST", args.data, check=False)
    return pixels[: args.images].float() / (8.0 if args.quick else 127.5) - 1, labels[: args.images]


def network(side: int, seed: int) -> nn.Sequential:
    """Three convolutions that halve the image, and a linear layer: 11,018 parameters for images of 28 x 28."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        side = (side + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * side**2, 10))


def tiny(side: int, seed: int) -> nn.Sequential:
    """226 parameters on 4 x 4 means of pixels."""
    torch.manual_seed(seed)
    first = [nn.AvgPool2d(side // 4), nn.Flatten(), nn.Linear(16, 8)]
    return nn.Sequential(*first, nn.ReLU(), nn.Linear(8, 10)).double()


def order(data: Data, size: int, seed: int) -> Iterator[Data]:
    """One batch after another, epoch after epoch; what is left over of an epoch is not used."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(data[0]), generator=generator).split(size)[: len(data[0]) // size]:
            yield data[0][rows], data[1][rows]


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Data) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def risk_of(model: nn.Module, data: Data) -> ritz.Risk:
    return ritz.Risk(model, nn.CrossEntropyLoss(), data)


# ------------------------------------------------------------------------------------------- which estimate


def drawn(risk: ritz.Risk, num_batches: int, size: int, seed: int) -> ritz.Estimate:
    """What AutoDamping sees at a refresh by default, each batch with a probe of its own."""
    stream = Stream(risk, seed=seed)
    for index, batch in enumerate(risk.batches.sample(num_batches, size, seed)):
        stream.add(batch.data, index)
    return stream.take()["noise"]


def at_rest(args: argparse.Namespace, data: Data, steps: int) -> dict[str, Any]:
    """Estimates with other batches and probes at the same weights, those after so many steps of SGD."""
    model = network(data[0].shape[-1], 0)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    batches = order(data, args.batch_size, 0)
    for _ in range(steps):
        descend(model, optimizer, next(batches))
    risk, size = risk_of(model, data), args.batch_size
    kinds: dict[str, Callable[[int], ritz.Estimate]] = {OWN + ", 4 batches": lambda seed: drawn(risk, 4, size, seed)}
    for num_batches, num_probes in ((4, 1), (8, 1), FULL):
        name = f"{num_probes} common, {num_batches} batches"
        kinds[name] = lambda seed, n=num_batches, k=num_probes: ritz.curvature_noise(  # type: ignore[misc]
            risk, n, size, seed, num_probes=k
        )
    found = {name: [float(make(seed).value) for seed in range(args.repeats)] for name, make in kinds.items()}
    return {"steps": steps, "loss": risk.loss(), "estimates": found}


def along(args: argparse.Namespace, data: Data, seed: int) -> list[list[float]]:
    """Step, streaming estimate of the window that ends there, full estimate at that step; nothing is damped."""
    model = network(data[0].shape[-1], seed)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    risk, batches = risk_of(model, data), order(data, args.batch_size, seed)
    watch = AutoDamping(torch.optim.Adam(model.parameters()), risk, args.every, seed=seed)
    rows = []
    for step in range(1, args.steps + 1):
        batch = next(batches)
        descend(model, optimizer, batch)
        watch.step(batch)
        if step % args.every == 0:
            full = ritz.curvature_noise(risk, FULL[0], args.batch_size, seed=step, num_probes=FULL[1])
            rows.append([step, float(watch.seen[0].noise.value), float(full.value)])
    return rows


# ------------------------------------------------------------------------------------------------ coverage


def truth(model: nn.Module, data: Data, size: int) -> dict[str, float]:
    """Tr X^2 / P of batches of a size from the Hessian of each sample, and in how many directions it lies."""
    names = {name: p.detach() for name, p in model.named_parameters()}
    shapes = [p.shape for p in names.values()]
    flat = torch.cat([p.flatten() for p in names.values()])

    def loss(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = weights.split([shape.numel() for shape in shapes])
        own = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return cross_entropy(functional_call(model, own, (x[None],)), y[None])

    each = vmap(hessian(loss), in_dims=(None, 0, 0))
    num, dim = len(data[0]), len(flat)
    total, squares, square = torch.zeros(dim, dim).double(), 0.0, torch.zeros(dim, dim).double()
    for x, y in zip(data[0].double().split(100), data[1].split(100), strict=True):
        H = each(flat, x, y)  # (100, P, P)
        total += H.sum(0)
        squares += float(H.square().sum())
        square += torch.einsum("nij,njk->ik", H, H)
    spread = (square - total @ total / num) / (num - 1)  # E X^2 of single samples, trace: the sum of variances
    trace = float(spread.trace())
    assert math.isclose(trace, (squares - float(total.square().sum()) / num) / (num - 1), rel_tol=1e-9)
    return {"noise": trace / size / dim, "directions": trace**2 / float(spread.square().sum()), "dim": dim}


def coverage(args: argparse.Namespace, data: Data, steps: int) -> dict[str, Any]:
    """How often the 95 % interval holds the truth, and how wide it is, by batches and probes."""
    model, size = tiny(data[0].shape[-1], 0), args.small_batch
    data = data[0].double(), data[1]
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    batches = order(data, args.batch_size, 0)
    for _ in range(steps):
        descend(model, optimizer, next(batches))
    risk, known = risk_of(model, data), truth(model, data, size)
    rows = []
    for num_batches in args.num_batches:
        for num_probes in (None, *args.num_probes):

            def estimate(seed: int, n: int = num_batches, k: int | None = num_probes) -> ritz.Estimate:
                return (
                    drawn(risk, n, size, seed) if k is None else ritz.curvature_noise(risk, n, size, seed, num_probes=k)
                )

            found = [estimate(seed) for seed in range(args.draws)]
            ends = [estimate.interval(0.95) for estimate in found]
            rows.append(
                {
                    "batches": num_batches,
                    "probes": num_probes,
                    "covered": sum(float(low) <= known["noise"] <= float(high) for low, high in ends) / len(ends),
                    "ratio": statistics.fmean(float(one.value) for one in found) / known["noise"],
                    "spread": statistics.stdev(float(one.value) for one in found) / known["noise"],
                    "told": math.sqrt(statistics.fmean(float(one.stderr) ** 2 for one in found)) / known["noise"],
                }
            )
            print(steps, rows[-1], flush=True)
    return {"steps": steps, "loss": risk.loss(), "truth": known, "rows": rows}


# ---------------------------------------------------------------------------------------------------- costs


def loop(args: argparse.Namespace, data: Data, family: str, way: str, seed: int) -> list[float]:
    """CPU seconds of `every` steps without AutoDamping and of AutoDamping in them, after as many with its first work.

    KFAC's own refreshes are among the steps.
    """
    model = network(data[0].shape[-1], seed)
    if family == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    else:
        optimizer = KFAC(model, lr=3e-3, damping=0.03, kl_clip=1e-3, seed=seed)
    idle = torch.optim.Adam(model.parameters())  # SGD has nothing to damp
    damping = AutoDamping(idle if family == "SGD" else optimizer, risk_of(model, data), args.every)
    batches = order(data, args.batch_size, seed)
    for _ in range(2):
        own, start = 0.0, time.process_time()
        for _ in range(args.every):
            batch = next(batches)
            descend(model, optimizer, batch)
            before = time.process_time()
            damping.step(batch if WAYS[way] else None)
            own += time.process_time() - before
        steps = time.process_time() - start - own
    return [steps, own]


def costs(args: argparse.Namespace, data: Data) -> list[dict[str, list[float]]]:
    """Loops in turn, round after round."""
    rows = []
    for number in range(args.rounds):
        cases = [(family, way) for family in BARS for way in WAYS]
        rows.append({f"{family}/{way}": loop(args, data, family, way, seed=number) for family, way in cases})
        print({key: f"{100 * own / steps:.1f} %" for key, (steps, own) in rows[-1].items()}, flush=True)
    return rows


def measure(args: argparse.Namespace) -> dict[str, Any]:
    data = images(args)
    print("at rest", flush=True)
    rest = [at_rest(args, data, steps) for steps in (0, args.steps)]
    print("along training", flush=True)
    rows = {str(seed): along(args, data, seed) for seed in range(args.seeds)}
    return {
        "num_images": len(data[0]),
        "num_params": sum(p.numel() for p in network(data[0].shape[-1], 0).parameters()),
        "at_rest": rest,
        "along": rows,
        "coverage": [coverage(args, data, steps) for steps in (0, args.steps)],
        "costs": costs(args, data),
    }


# ---------------------------------------------------------------------------------------------- command line


def main() -> None:
    from pages.noise import page  # which looks into this script

    parser = reports.parser(__doc__, "little of everything on digits, seconds: does it run?")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--small-batch", type=int, default=32, help="of the network whose truth is known")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=100, help="steps between refreshes")
    parser.add_argument("--repeats", type=int, default=64, help="estimates of a kind at the same weights")
    parser.add_argument("--seeds", type=int, default=4, help="of the runs along which the two are compared")
    parser.add_argument("--draws", type=int, default=200, help="of intervals")
    parser.add_argument("--rounds", type=int, default=9, help="of timing")
    parser.add_argument("--costs", action="store_true", help="measure costs again, and keep those on file beside them")
    args = parser.parse_args()
    if args.page:
        page(*args.page)
        return
    args.num_batches, args.num_probes = [4, 16], [1, 2, 4, 8, 16]
    if args.quick:
        args.images, args.batch_size, args.steps, args.every, args.repeats = 400, 16, 16, 8, 3
        args.seeds, args.draws, args.rounds, args.small_batch = 2, 3, 2, 8
        args.num_batches, args.num_probes, args.out = [4], [1, 2], reports.QUICK
    torch.set_num_threads(1)
    if args.costs:
        report = reports.read(args.out / FILE)
        report |= {"first_costs": report["costs"], "costs": costs(args, images(args))}
        reports.write_tree(report, args.out / FILE)
        return
    start = time.process_time()
    names = ("batch_size", "small_batch", "lr", "steps", "every", "repeats", "seeds", "draws", "rounds")
    report = {
        **reports.about(args, names),
        "data": "scikit-learn's digits" if args.quick else "Fashion-MNIST",
        **measure(args),
        "seconds": time.process_time() - start,
    }
    reports.write_tree(report, args.out / FILE)
    if args.quick:
        page(args.out, args.out)


if __name__ == "__main__":
    main()
