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
import textwrap
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
from ritz.results import from_samples

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


# -------------------------------------------------------------------------------------------------- the page


def within(values: list[float], digits: int = 2) -> str:
    """A mean with its 95 % interval by Student's t."""
    mean = from_samples("", torch.tensor(values, dtype=torch.float64))
    low, high = mean.interval(0.95)
    return f"{float(mean.value):.{digits}f} ({float(low):.{digits}f} to {float(high):.{digits}f})"


def rest_table(report: dict[str, Any]) -> str:
    lines = ["| after | estimate | products | ratio to full | standard deviation | per product |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for row in report["at_rest"]:
        *_, full = row["estimates"].values()
        level = statistics.fmean(full)
        for name, values in row["estimates"].items():
            batches = int(name.split()[-2])
            products = batches * (1 if name.startswith(OWN) else int(name.split()[0]))
            spread = statistics.stdev(values) / statistics.fmean(values)
            cells = f"{within([v / level for v in values])} | {spread:.2f} | {spread * math.sqrt(products):.2f}"
            lines.append(f"| {row['steps']} steps | {name} | {products} | {cells} |")
    return "\n".join(lines)


def windows(report: dict[str, Any]) -> dict[str, str]:
    """Streaming over full: the first windows, and the mean of the others of each seed."""
    runs = [[row[1] / row[2] for row in rows] for rows in report["along"].values()]
    rest = [ratio for run in runs for ratio in run[1:]]
    firsts = [run[0] for run in runs]
    return {
        "first": f"{min(firsts):.2f} to {max(firsts):.2f}",
        "rest": within([statistics.fmean(run[1:]) for run in runs]),
        "rest_spread": f"{statistics.stdev(rest):.2f}",
        "num_windows": str(len(rest)),
        "num_seeds": str(len(runs)),
    }


def coverage_table(part: dict[str, Any]) -> str:
    lines = ["| batches | probes | coverage, % | mean / truth | spread / truth | reported error / truth |"]
    lines.append("| ---: | --- | ---: | ---: | ---: | ---: |")
    for row in part["rows"]:
        probes = OWN if row["probes"] is None else f"{row['probes']} common"
        cells = f"{100 * row['covered']:.0f} | {row['ratio']:.3f} | {row['spread']:.2f} | {row['told']:.2f}"
        lines.append(f"| {row['batches']} | {probes} | {cells} |")
    return "\n".join(lines)


def verdict(report: dict[str, Any]) -> str:
    """What the tables of coverage say, by how many probes and batches."""
    rows = [row for part in report["coverage"] for row in part["rows"]]
    most = max(row["batches"] for row in rows)

    def held(name: str, keep: Callable[[dict[str, Any]], bool]) -> str:
        found = [100 * row["covered"] for row in rows if keep(row)]
        return f"{min(found):.0f} to {max(found):.0f} % {name}" if found else f"none {name}"

    parts = [
        held("with one common probe", lambda row: row["probes"] == 1),
        held("with 2 to 4", lambda row: row["probes"] in (2, 4)),
        held(f"with 8 or more and {most} batches", lambda row: (row["probes"] or 0) >= 8 and row["batches"] == most),
        held("with a probe for each of 4 batches", lambda row: row["probes"] is None and row["batches"] == 4),
        held(f"with a probe for each of {most}", lambda row: row["probes"] is None and row["batches"] == most),
    ]
    root = math.sqrt(report["settings"]["draws"])
    off = max(abs(row["ratio"] - 1) * root / row["spread"] for row in rows)
    text = (
        f"Over both tables, the coverage of a 95 % interval is: {'; '.join(parts)}. One common probe has an error that "
        "depends on its alignment with the few directions that contain the noise. The spread over batches does not "
        "show this error, so the reported error is too small, and more batches make this worse. The other intervals "
        "fall short because their standard error comes from few squares with a long tail, and the interval treats it "
        "as exact. No bias is visible: the mean that is farthest from the truth is "
        f"{off:.1f} of its standard errors away, and all means share their batches."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def shares(report: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Per cent of the steps of the same loop."""
    return {
        (family, way): [100 * row[f"{family}/{way}"][1] / row[f"{family}/{way}"][0] for row in report["costs"]]
        for family in BARS
        for way in WAYS
    }


def loops_apart(report: dict[str, Any]) -> str:
    """What a first run gave, which compared whole loops with AutoDamping and without."""
    rows = report.get("first_costs")
    if not rows:
        return "Nothing in the measurements was changed after the full run."
    texts = []
    for family in BARS:
        found = [100 * (row[f"{family}/{way}"] / row[f"{family}/None"] - 1) for row in rows for way in WAYS]
        texts.append(
            f"for {family} {statistics.median(found):.0f} % in the median ({min(found):.0f} to {max(found):.0f})"
        )
    text = (
        "The costs were measured twice. The first measurement compared whole loops with AutoDamping and without, in "
        f"turn, on a machine with other work: AutoDamping added {', '.join(texts)}. Loops differed from each other by "
        "more than the quantity of interest, so the second measurement timed AutoDamping within each loop. Everything "
        "else is from one run, whose number of repeats was set in advance, so that it takes minutes."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def cost_table(report: dict[str, Any]) -> str:
    lines = ["| loop | batches | target, % | AutoDamping adds, % | |", "| --- | --- | ---: | ---: | --- |"]
    for (family, way), found in shares(report).items():
        middle = statistics.median(found)
        kept = "met" if middle <= BARS[family] else "**missed**"
        told = f"{middle:.0f} ({min(found):.0f} to {max(found):.0f})"
        lines.append(f"| {family} | {way} | {BARS[family]} | {told} | {kept} |")
    return "\n".join(lines)


PAGE = """# The noise of the curvature: estimates, uncertainty and cost

`AutoDamping` estimates Tr X² / P, where X = H_batch − H (equation 15 of seed 004). By default, every {every} steps it
uses 4 batches: either drawn for this purpose or, when streaming, the training batches. Each batch is split in halves
and has its own probe. The alternative, as in the paper, uses probes that are common to all batches (`num_probes=`, and
`ritz.curvature_noise`).

Setting: batches of {batch_size}, {num_images:,} images of {data}, momentum 0.9, learning rate {lr:g}; {machine}, torch
{torch}, commit {commit}, {minutes:.0f} minutes in total. Written by `python benchmarks/noise.py --page
benchmarks/results docs` from `benchmarks/results/noise.json`.

## Do the estimates agree?

The network has three convolutions and a linear layer with ReLU, P = {num_params:,}. At fixed weights, each kind of
estimate is repeated {repeats} times with other batches and probes. *Full* is `ritz.curvature_noise` with its defaults,
{full_batches} batches and {full_probes} probes. The standard deviation is relative to the mean. The last column is the
standard deviation times the square root of the number of products: it compares estimates at equal work, and smaller is
better. The 95 % intervals use Student's t; they do not include the error of the full mean.

{rest_table}

During training, we compare the streaming estimate over a window of {every} steps with the full estimate at the end of
the window. The mean ratio over the windows of each of {num_seeds} seeds is {rest}. Single windows have a standard
deviation of {rest_spread} ({num_windows} windows). The first window of a run is excluded, because it covers the first
{every} steps, where the noise is different: its ratio is {first}.

## Do the intervals cover the truth?

This test uses a network of {dim} weights on {side} × {side} averaged pixels, with batches of {small_batch}. The truth
is known from the Hessian of each of the {num_images:,} samples: it is the sum of their variances, divided by the batch
size and P. With {draws} draws, a coverage of 95 % is determined to ± {error:.0f} points. *Spread* is the standard
deviation of the estimates, and *reported error* the root mean square of their standard errors. Batches are drawn
without replacement.

After {start_steps} steps (loss {start_loss:.2f}), the noise is {start_noise:.3g}, and (Tr S)² / Tr S² of S = E X² is
{start_directions:.1f} directions.

{start_table}

After {end_steps} steps (loss {end_loss:.2f}), the noise is {end_noise:.3g}, in {end_directions:.1f} directions.

{end_table}

{verdict}

## What does it cost?

The table shows the CPU time of AutoDamping in {every} steps of the network above, relative to the time of the steps
themselves, including KFAC's refreshes, on one thread. It shows the second {every} steps, so that one-time work is
excluded. The cases take turns over {rounds} rounds; given are the median, the minimum and the maximum.

{cost_table}

The targets apply to the defaults (4 batches, every 100 steps). The cost for a large network on an accelerator is on
[its own page](kfac.md). What a run gains from learned damping is on [another page](convergence.md), which used 8
batches.

## Changes made after seeing results

{decided}
"""


def facts(report: dict[str, Any]) -> dict[str, Any]:
    start, end = report["coverage"]
    found = {
        **report, **report["settings"], **windows(report), "rest_table": rest_table(report),
        "full_batches": FULL[0], "full_probes": FULL[1], "cost_table": cost_table(report), "dim": end["truth"]["dim"],
        "side": 4, "error": 196 * math.sqrt(0.95 * 0.05 / report["settings"]["draws"]), "decided": loops_apart(report),
        "minutes": report["seconds"] / 60, "verdict": verdict(report),
    }  # fmt: skip
    for name, part in (("start", start), ("end", end)):
        found |= {f"{name}_steps": part["steps"], f"{name}_loss": part["loss"], f"{name}_table": coverage_table(part)}
        found |= {f"{name}_{key}": part["truth"][key] for key in ("noise", "directions")}
    return found


def page(folder: Path, target: Path) -> None:
    report = reports.read(folder / FILE)
    target.mkdir(parents=True, exist_ok=True)
    (target / "noise.md").write_text(PAGE.format(**facts(report)), encoding="utf8")


# ---------------------------------------------------------------------------------------------- command line


def main() -> None:
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
