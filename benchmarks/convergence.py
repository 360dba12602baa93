"""Does curvature, and damping learned from its noise, train better? A small network on Fashion-MNIST, beside SGD, Adam.

A convolutional network on 10,000 images, every arm from the same starts and in the same orders of batches, so that arms
are compared seed by seed. The learning rate of each arm is the one of a fixed grid with the lowest loss on held-out
images at the end of training, from seeds of their own. Beside each learned damping runs a flat one at its mean.

    python benchmarks/convergence.py                                   half an hour of one core
    python benchmarks/convergence.py --page benchmarks/results docs    convergence.md and its figure, from the file

Each run is written as soon as it is done, and a run that is on file is not repeated. Fashion-MNIST is found through
RITZ_DATA or --data, a folder in torchvision's layout.
"""

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reports
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import ritz
from ritz.errors import NonFiniteError, NumericalWarning
from ritz.optim import KFAC, AutoDamping, BulkEdge, LedoitWolf, NoiseVariance, linear_decay
from ritz.papers.data.images import Data, load_images
from ritz.space import random_uniform

FILE = "convergence.json"
DAMPINGS = (0.003, 0.03, 0.3)
CLIP = 1e-3
TIMES = 2  # how much longer SGD and Adam run for the comparison at equal time
LONG = f", {TIMES} times as long"
EPS = 1e-2  # of Adam with large damping
QR = tuple(f"KFAC {DAMPINGS[1]:g}, kl_clip{end}" for end in (", qr", ""))  # these two run with more seeds
RATES = {
    "sgd": (0.003, 0.01, 0.03, 0.1, 0.3),
    "adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "adam_eps": (0.001, 0.003, 0.01, 0.03, 0.1),
    "kfac": (1 / 30, 0.1, 1 / 3, 1.0, 10 / 3),  # times the damping that it starts from
}
RULES: dict[str, Callable[[], Any]] = {
    "NoiseVariance": NoiseVariance, "LedoitWolf": LedoitWolf, "BulkEdge": BulkEdge
}  # fmt: skip
CHANCE = math.log(10)  # the loss of a guess
LOST = 10 * CHANCE  # a batch loss from which a run is given up


# ------------------------------------------------------------------------------------------------ the arms


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: Of the arm.
        family: Whose optimiser and grid of learning rates: a key of RATES.
        damping: KFAC's, at the start.
        rule: Of AutoDamping; None for a flat damping.
        streaming: Whether AutoDamping takes the training batches.
        options: More of KFAC.
        times: How many times as many epochs.
        rate_of: The arm whose learning rate it takes; None for its own.
        mean_of: The arm whose mean damping it takes, of the same seed.
        grid_only: Whether it is run on the grid alone.
    """

    name: str
    family: str
    damping: float = 0.0
    rule: str | None = None
    streaming: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    times: int = 1
    rate_of: str | None = None
    mean_of: str | None = None
    grid_only: bool = False

    @property
    def rates(self) -> tuple[float, ...]:
        """Its grid."""
        scale = self.damping if self.family == "kfac" else 1.0
        return tuple(float(f"{scale * rate:.1g}") for rate in RATES[self.family])

    def optimizer(self, model: nn.Module, lr: float, damping: float, seed: int) -> torch.optim.Optimizer:
        if self.family == "sgd":
            return torch.optim.SGD(model.parameters(), lr, momentum=0.9)
        if self.family == "adam":
            return torch.optim.Adam(model.parameters(), lr)
        if self.family == "adam_eps":
            return torch.optim.Adam(model.parameters(), lr, eps=EPS)
        return KFAC(model, lr, damping, seed=seed, **self.options)


def arms() -> list[Arm]:
    """All of them; one that takes something of another comes after it."""
    small, middle, _ = DAMPINGS
    plain = [Arm("SGD", "sgd"), Arm("Adam", "adam"), Arm(f"Adam, eps {EPS:g}", "adam_eps")]
    long = [Arm(f"{arm.name}{LONG}", arm.family, times=TIMES, rate_of=arm.name) for arm in plain[:2]]
    flat = [Arm(f"KFAC {d:g}", "kfac", d) for d in DAMPINGS]
    bare = [Arm(f"KFAC {d:g}, learned", "kfac", d, "NoiseVariance", grid_only=True) for d in DAMPINGS]
    bare += [Arm(f"KFAC {small:g}, {rule}", "kfac", small, rule, grid_only=True) for rule in ("LedoitWolf", "BulkEdge")]
    common = {"family": "kfac", "options": {"kl_clip": CLIP}}
    clip = [Arm(f"KFAC {d:g}, kl_clip", damping=d, **common) for d in DAMPINGS]
    auto = [Arm(f"{arm.name}, learned", damping=arm.damping, rule="NoiseVariance", **common) for arm in clip]
    means = [
        Arm(f"KFAC, kl_clip, flat at the mean from {arm.damping:g}", rate_of=arm.name, mean_of=arm.name, **common)
        for arm in auto
    ]
    rules = [Arm(f"{clip[0].name}, {r}", damping=small, rule=r, **common) for r in ("LedoitWolf", "BulkEdge")]
    qr = Arm(f"{clip[1].name}, qr", "kfac", middle, options={"kl_clip": CLIP, "refresh": "qr"}, rate_of=clip[1].name)
    streaming = Arm(
        f"{auto[1].name}, streaming", damping=middle, rule="NoiseVariance", streaming=True, rate_of=auto[1].name,
        **common,
    )  # fmt: skip
    return [*plain, *flat, *bare, *clip, *auto, *means, *rules, qr, streaming, *long]


EARLY = {  # how KFAC may begin
    "as it comes": {},
    "kl_clip": {"kl_clip": CLIP},
    "identity start": {"start": "identity"},
    "statistics every step, eigenvectors every 10": {"factor_every": 1, "inverse_every": 10},
    "both every step": {"factor_every": 1, "inverse_every": 1},
}


# ------------------------------------------------------------------------------------------------- one run


def network(seed: int) -> nn.Sequential:
    """Three convolutions that halve the image, and a linear layer: 11,018 parameters."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


@dataclass(frozen=True)
class Images:
    """What is trained on, what learning rates are chosen by, what is told."""

    train: Data
    val: Data
    test: Data


def images(args: argparse.Namespace) -> Images:
    if args.quick:
        X = 2 * random_uniform(args.images * 3 * 784, ("images",)).reshape(-1, 784).float() - 1
        y = (X @ (random_uniform(7840, ("map",)).reshape(784, 10).float() - 0.5)).argmax(1)
        train, test = (X[: 2 * args.images], y[: 2 * args.images]), (X[2 * args.images :], y[2 * args.images :])
        num_val = args.images
    else:
        train, test = load_images("FashionMNIST", args.data)
        num_val = 5000

    def part(data: Data, start: int, end: int) -> Data:
        return data[0][start:end].reshape(-1, 1, 28, 28), data[1][start:end]

    first = args.images
    return Images(part(train, 0, first), part(train, first, first + num_val), part(test, 0, len(test[0])))


def score(model: nn.Module, data: Data) -> tuple[float, float]:
    """Loss and error in per cent."""
    with torch.no_grad():
        outputs = torch.cat([model(x) for x in data[0].split(1000)])
    return float(cross_entropy(outputs, data[1])), 100 * float((outputs.argmax(1) != data[1]).float().mean())


def batches(num: int, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Rows of one batch after another, epoch after epoch; what is left over of an epoch is not used."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(num, generator=generator).split(size)[: num // size]


class Dampings:
    """AutoDamping of a run, and for the streaming one a second that looks at the same weights and changes nothing."""

    def __init__(self, arm: Arm, optimizer: Any, model: nn.Module, data: Data, args: argparse.Namespace) -> None:
        self.arm, self.own, self.other = arm, None, None
        self.aside = 0.0  # seconds of the second
        if arm.rule is None:
            return
        risk = ritz.Risk(model, nn.CrossEntropyLoss(), data)
        common = {"every": args.every, "batch_size": args.batch_size, "rule": RULES[arm.rule]()}
        self.own = AutoDamping(optimizer, risk, num_batches=args.num_batches, **common)
        if arm.streaming:
            idle = torch.optim.Adam(model.parameters(), eps=arm.damping)
            self.other = AutoDamping(idle, risk, num_batches=2 * args.num_batches, seed=1, **common)

    def step(self, batch: Data) -> None:
        if self.own is not None:
            self.own.step(batch if self.arm.streaming else None)
        if self.other is not None:
            start = time.process_time()
            self.other.step()
            self.aside += time.process_time() - start

    def told(self) -> dict[str, Any]:
        """Step, damping, noise and its standard error of every refresh."""
        keys = ("step", "damping", "noise", "noise_stderr")
        found = {"learned": self.own, "beside": self.other}
        return {name: [[row[key] for key in keys] for row in d.history] for name, d in found.items() if d is not None}


def train(
    arm: Arm, lr: float, seed: int, data: Images, args: argparse.Namespace, *, damping: float | None = None,
    epochs: int | None = None, marks: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """One run: how it ended, and losses on all training and test images at the epochs of `marks`."""
    model = network(seed)
    damping = arm.damping if damping is None else damping
    optimizer = arm.optimizer(model, lr, damping, seed)
    dampings = Dampings(arm, optimizer, model, data.train, args)
    epochs = args.epochs * arm.times if epochs is None else epochs
    each = len(data.train[0]) // args.batch_size
    schedule = LambdaLR(optimizer, linear_decay(epochs * each))
    row: dict[str, Any] = {"arm": arm.name, "seed": seed, "lr": lr, "steps": epochs * each, "lost": None}
    curve, seconds = [], 0.0
    rows = batches(len(data.train[0]), args.batch_size, seed)
    for epoch in range(1, epochs + 1):
        start = time.process_time()
        for step in range((epoch - 1) * each, epoch * each):
            picked = next(rows)
            batch = (data.train[0][picked], data.train[1][picked])
            if not one_step(model, optimizer, schedule, dampings, batch):
                row["lost"] = step
                break
        seconds += time.process_time() - start
        if row["lost"] is not None:
            break
        if epoch * args.epochs // epochs in marks and not epoch * args.epochs % epochs:
            found = (*score(model, data.train), *score(model, data.test))
            curve.append([epoch, seconds - dampings.aside, *found])
    row |= {"seconds": seconds - dampings.aside, "skipped": getattr(optimizer, "skipped", 0), **dampings.told()}
    if arm.family == "kfac":
        row["damping"] = damping
    if marks:
        return {**row, "curve": curve}
    val = score(model, data.val) if row["lost"] is None else None
    return {**row, "val": val, "loss": None if val is None else score(model, data.train)[0]}


def one_step(model: nn.Module, optimizer: Any, schedule: LambdaLR, dampings: Dampings, batch: Data) -> bool:
    """Whether the run goes on: one whose loss is ten times that of a guess is given up."""
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    if not float(loss.detach()) < LOST:
        return False
    loss.backward()
    optimizer.step()
    schedule.step()
    try:
        dampings.step(batch)
    except NonFiniteError:  # the weights are lost
        return False
    return True


# ------------------------------------------------------------------------------------------------- all runs


def measure(args: argparse.Namespace, report: dict[str, Any], keep: Callable[[], None]) -> None:
    """All that the report does not have yet, in order: how KFAC begins, learning rates, runs, more of two arms."""
    data = images(args)
    report["num_params"] = sum(p.numel() for p in network(0).parameters())
    report["num_images"] = [len(part[0]) for part in (data.train, data.val, data.test)]
    for key in ("growth", "early", "grid", "runs", "more"):
        report.setdefault(key, [])
    grow(args, data, report, keep)
    begin(args, data, report, keep)
    choose(args, data, report, keep)
    marks = sorted({1, args.epochs, *range(2, args.epochs, 2)})  # epochs of a run of common length
    todo = [(arm, seed, "runs") for seed in range(args.seeds) for arm in arms() if not arm.grid_only]
    pair = [arm for arm in arms() if arm.name in QR]
    todo += [(arm, seed, "more") for seed in range(args.seeds, args.qr_seeds) for arm in pair]
    done = {(row["arm"], row["seed"]) for row in report["runs"] + report["more"]}
    for arm, seed, key in todo:
        if (arm.name, seed) in done:
            continue
        damping = mean_damping(report, arm.mean_of, seed) if arm.mean_of else None
        row = train(arm, report["chosen"][arm.rate_of or arm.name], seed, data, args, damping=damping, marks=marks)
        report[key].append(row)
        keep()
        _say(row, row["curve"][-1] if row["curve"] else None)


def choose(args: argparse.Namespace, data: Images, report: dict[str, Any], keep: Callable[[], None]) -> None:
    """The learning rate of every arm that has its own: the lowest mean loss on held-out images, none lost."""
    done = {(row["arm"], row["lr"], row["seed"]) for row in report["grid"]}
    report["chosen"] = {}
    for arm in arms():
        if arm.rate_of is not None:
            continue
        rates = arm.rates[args.first_rate : args.last_rate]
        for lr in rates:
            num = args.grid_seeds if arm.family == "kfac" else args.plain_grid_seeds
            for seed in range(args.first_grid_seed, args.first_grid_seed + num):
                if (arm.name, lr, seed) not in done:
                    report["grid"].append(train(arm, lr, seed, data, args))
                    keep()
                    _say(report["grid"][-1], report["grid"][-1]["val"])
        report["chosen"][arm.name] = min(rates, key=lambda lr: grid_loss(report, arm.name, lr))
    keep()


def grid_loss(report: dict[str, Any], arm: str, lr: float) -> float:
    """Mean loss on held-out images; infinite if a run was lost."""
    found = [row for row in report["grid"] if row["arm"] == arm and row["lr"] == lr]
    return statistics.fmean(row["val"][0] for row in found) if all(row["val"] for row in found) else math.inf


def begin(args: argparse.Namespace, data: Images, report: dict[str, Any], keep: Callable[[], None]) -> None:
    """KFAC's first epoch with statistics and eigenvectors as often as that, at three pairs of damping and rate."""
    done = {(row["arm"], row["seed"], row["damping"]) for row in report["early"]}
    for seed in range(args.early_seeds):
        for name, options in EARLY.items():
            for damping, lr in ((0.01, 0.003), (0.01, 0.01), (0.1, 0.03)):
                arm = Arm(f"{name}, {lr:g}", "kfac", damping, options=options)
                if (arm.name, seed, damping) in done:
                    continue
                row = train(arm, lr, seed, data, args, epochs=1)
                report["early"].append({**row, "options": options})
                keep()
                _say(row, [row["loss"]])


def grow(args: argparse.Namespace, data: Images, report: dict[str, Any], keep: Callable[[], None]) -> None:
    """The largest eigenvalue of KFAC's matrix, from each of the first batches alone."""
    for seed in range(len(report["growth"]), args.early_seeds):
        model = network(seed)
        alone = {"factor_every": 1, "inverse_every": 1, "stat_decay": 0.0}
        optimizer = KFAC(model, 0.003, 0.01, seed=seed, **alone)
        largest = []
        for picked, _ in zip(batches(len(data.train[0]), args.batch_size, seed), range(31), strict=False):
            optimizer.zero_grad()
            cross_entropy(model(data.train[0][picked]), data.train[1][picked]).backward()
            optimizer.step()
            largest.append(max(float(values.max()) for values in optimizer.eigenvalues().values()))
        report["growth"].append({"seed": seed, "damping": 0.01, "lr": 0.003, "largest": largest})
        keep()


def mean_damping(report: dict[str, Any], arm: str, seed: int) -> float:
    """Over the steps of a run: each value counts from its refresh to the next."""
    (row,) = (row for row in report["runs"] if row["arm"] == arm and row["seed"] == seed)
    values, steps = [row["damping"], *(entry[1] for entry in row["learned"])], [e[0] for e in row["learned"]]
    ends = [*steps, row["steps"] if row["lost"] is None else row["lost"]]
    lengths = [end - start for start, end in zip([0, *steps], ends, strict=True)]
    return sum(v * n for v, n in zip(values, lengths, strict=True)) / max(sum(lengths), 1)


def _say(row: dict[str, Any], found: Sequence[float] | None) -> None:
    text = f"lost at step {row['lost']}" if not found else " ".join(f"{x:.3g}" for x in found if x is not None)
    print(f"{row['arm']}, lr {row['lr']:g}, seed {row['seed']}: {text} ({row['seconds']:.1f} s)", flush=True)


# ----------------------------------------------------------------------------------------- command line


def main() -> None:
    parser = reports.parser(__doc__, "noise for images, few steps, seconds: does it run?")
    parser.add_argument("--data", type=Path, help="folder with FashionMNIST/raw; RITZ_DATA where it is not given")
    parser.add_argument("--images", type=int, default=10_000, help="to train on")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--grid-seeds", type=int, default=1, help="of KFAC's grids")
    parser.add_argument("--plain-grid-seeds", type=int, default=3, help="of those of SGD and Adam: a fair baseline")
    parser.add_argument("--qr-seeds", type=int, default=12, help="of the two kinds of refresh")
    parser.add_argument("--early-seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=100, help="steps between refreshes of a learned damping")
    parser.add_argument("--num-batches", type=int, default=8, help="of a refresh")
    parser.set_defaults(first_rate=0, last_rate=None, first_grid_seed=100)
    args = parser.parse_args()
    if args.page:
        write_page(*args.page)
        return
    torch.set_num_threads(1)
    if args.quick:
        args.images, args.batch_size, args.epochs, args.every, args.num_batches = 64, 16, 1, 2, 2
        args.seeds, args.qr_seeds, args.early_seeds, args.plain_grid_seeds = 2, 3, 1, 1
        args.first_rate, args.last_rate = 1, 2
        args.out = reports.QUICK
        (args.out / FILE).unlink(missing_ok=True)
    kept = (
        "images", "batch_size", "epochs", "seeds", "qr_seeds", "grid_seeds", "plain_grid_seeds", "first_grid_seed",
        "early_seeds", "every", "num_batches",
    )  # fmt: skip
    about = reports.about(args, kept)
    about["settings"] |= {"dampings": list(DAMPINGS), "kl_clip": CLIP, "eps": EPS}
    settings = about["settings"]
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / FILE
    report = reports.read(target) if target.is_file() else {}
    more = {key: settings[key] for key in ("seeds", "qr_seeds")}  # a finished run may be made longer
    if report and report["settings"] | more != settings:
        raise SystemExit(f"{target} has runs with other settings, {report['settings']}: move it away, or give --out")
    report = about | {key: value for key, value in report.items() if key not in about}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # that a run is lost is told in its row
        measure(args, report, keep=lambda: reports.write(reports.rounded(report, ".6g"), target))
    if args.quick:
        write_page(args.out, args.out)


def write_page(folder: Path, target: Path) -> None:
    """The page and its figure; the module that makes them looks into this one."""
    from pages.convergence import page

    page(folder, target)


if __name__ == "__main__":
    main()
