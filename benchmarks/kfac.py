"""What do KFAC, the trace penalty and learned damping cost? Times of VGG-16 on CIFAR-100's shapes, against plain SGD.

All cases take turns in each round of one run, on noise of the right shape at batch 128, and are told as ratios to SGD
in the same round. KFAC's own steps are told apart by its intervals: plain, with statistics, with new eigenvectors.

    python benchmarks/kfac.py --device cuda                       minutes on an accelerator
    python benchmarks/kfac.py --page benchmarks/results docs      kfac.md and kfac.png, from the file
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reports
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ritz
from ritz.optim import KFAC, AutoDamping, TracePenalty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "kfac.json"
CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0 halves the image
PRECISIONS = {"default": (True, False), "tf32": (True, True), "float32": (False, False)}  # convolutions, products
Step = Callable[[], Any]


# --------------------------------------------------------------------------------------- network and data


def vgg16(width: float = 1.0, classes: int = 100, channels: int = 3) -> nn.Sequential:
    """VGG-16 without normalisation, a head of 512-512-512-100 with dropout: 15,291,300 parameters."""
    layers: list[nn.Module] = []
    inputs = channels
    for channels in CHANNELS:
        if not channels:
            layers.append(nn.MaxPool2d(2))
            continue
        outputs = int(width * channels)
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        nn.init.normal_(conv.weight, std=(2 / (9 * outputs)) ** 0.5)
        nn.init.zeros_(conv.bias)
        layers += [conv, nn.ReLU(inplace=True)]
        inputs = outputs
    head = [nn.Dropout(), nn.Linear(inputs, inputs), nn.ReLU(True), nn.Dropout(), nn.Linear(inputs, inputs)]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.ReLU(True), nn.Linear(inputs, classes))


class Bench:
    """A network of its own, the batches that it is shown in turn, and one step of training on them."""

    def __init__(self, args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(0)
        self.model = vgg16(args.width).to(args.device).train()
        self.batches = cycle(list(zip(*(part.split(args.batch_size) for part in data), strict=True)))
        self.device = args.device
        self.loss = torch.zeros(())

    def step(self, optimizer: torch.optim.Optimizer, penalty: Callable[..., Tensor] | None = None) -> Step:
        """One step of this network with that optimiser; `penalty(model, x, y, outputs)` is added to the loss."""

        def run(mark: Callable[[str], None] = lambda _: None) -> None:
            x, y = next(self.batches)
            optimizer.zero_grad()
            out = self.model(x)
            loss = cross_entropy(out, y)
            if penalty is not None:
                loss = loss + penalty(self.model, x, y, out)
            mark("forward")
            loss.backward()
            mark("backward")
            optimizer.step()
            mark("step")
            self.loss = loss.detach()

        return run


PENALTIES: dict[str, Callable[..., TracePenalty]] = {
    "GGN, all": lambda: TracePenalty(1e-6, fraction=1.0),
    "GGN, all, on_outputs": lambda: TracePenalty(1e-6, fraction=1.0),
    "GGN, a quarter": lambda: TracePenalty(1e-6),
    "GGN, a quarter, eager": lambda: TracePenalty(1e-6, replay=False),
    "Hessian, all": lambda: TracePenalty(1e-6, fraction=1.0, form="hessian"),
    "Hessian, a quarter": lambda: TracePenalty(1e-6, form="hessian"),
    "Hessian, a quarter, eager": lambda: TracePenalty(1e-6, form="hessian", replay=False),
}


def penalised(name: str) -> Callable[..., Tensor]:
    made = PENALTIES[name]()
    if name.endswith("on_outputs"):
        return lambda model, x, y, out: made.on_outputs(out, model)
    return lambda model, x, y, out: made(model, x, y if name.startswith("Hessian") else None)


# ------------------------------------------------------------------------------------------------- clocks


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def each(step: Step, num: int, device: str) -> list[float]:
    """Milliseconds of single steps, waiting after each."""
    found = []
    wait(device)
    for _ in range(num):
        start = time.perf_counter()
        step()
        wait(device)
        found.append(1e3 * (time.perf_counter() - start))
    return found


def together(step: Step, num: int, device: str) -> float:
    """Milliseconds a step, waiting after the last alone, as training does."""
    wait(device)
    start = time.perf_counter()
    for _ in range(num):
        step()
    wait(device)
    return 1e3 * (time.perf_counter() - start) / num


def phases(step: Step, num: int, device: str) -> dict[str, float]:
    """Milliseconds of the parts of a step, medians, waiting after each part."""
    found: dict[str, list[float]] = {}
    last = [0.0]

    def mark(name: str) -> None:
        wait(device)
        now = time.perf_counter()
        found.setdefault(name, []).append(1e3 * (now - last[0]))
        last[0] = now

    for _ in range(num):
        wait(device)
        last[0] = time.perf_counter()
        step(mark)
    return {name: statistics.median(values) for name, values in found.items()}


def profile(step: Step, num: int, device: str, most: int = 8) -> dict[str, Any]:
    """Milliseconds a step that the device is busy, and the operations that take most: name, milliseconds, calls."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU] + [activity.CUDA] * (device == "cuda")) as seen:
        for _ in range(num):
            step()
        wait(device)
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = [event for event in seen.key_averages() if event.key.startswith("aten::")]
    events.sort(key=lambda event: -getattr(event, key))
    return {
        "busy": sum(getattr(event, key) for event in events) / 1e3 / num,
        "operations": [[event.key, getattr(event, key) / 1e3 / num, event.count / num] for event in events[:most]],
    }


def memory(step: Step, num: int, device: str) -> dict[str, float] | None:
    """GiB held after some steps, and at their height."""
    if device != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(num):
        step()
    wait(device)
    return {"held": torch.cuda.memory_allocated() / 2**30, "peak": torch.cuda.max_memory_allocated() / 2**30}


# ----------------------------------------------------------------------------------------------- the run


def cases(args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Bench, Step, Any]]:
    """Name, network, step and optimiser of every training loop that is timed."""
    bench = Bench(args, data)
    plain = torch.optim.SGD(bench.model.parameters(), lr=1e-4, momentum=0.9)
    yield "SGD", bench, bench.step(plain), plain
    for name in PENALTIES:
        yield name, bench, bench.step(plain, penalised(name)), plain
    del plain  # what is not needed any more is not to count as KFAC's memory
    for refresh in ("eigh", "qr"):
        bench = Bench(args, data)
        optimizer = KFAC(
            bench.model, lr=1e-5, damping=0.1, refresh=refresh,
            factor_every=args.factor_every, inverse_every=args.inverse_every,
        )  # fmt: skip
        yield f"KFAC, {refresh}", bench, bench.step(optimizer), optimizer


def refreshes(args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, Step]:
    """All that AutoDamping does in as many steps as lie between two refreshes; nothing is trained."""
    bench = Bench(args, data)
    risk = ritz.Risk(bench.model, nn.CrossEntropyLoss(), data)
    made: dict[str, Step] = {}

    def add(name: str, streaming: bool, risk: ritz.Risk = risk, **settings: Any) -> None:
        optimizer = torch.optim.Adam(bench.model.parameters())
        damping = AutoDamping(optimizer, risk, every=args.inverse_every, batch_size=args.batch_size, **settings)

        def refresh() -> None:
            for _ in range(args.inverse_every):
                damping.step(next(bench.batches) if streaming else None)

        made[name] = refresh

    add("Hessian, default", streaming=False)
    add("GGN", streaming=False, curvature="ggn")
    add("Hessian, streaming", streaming=True)
    add("GGN, streaming", streaming=True, curvature="ggn")
    eager = ritz.Risk(bench.model, nn.CrossEntropyLoss(), data, plan=ritz.Plan(replay=False))
    add("Hessian, eager", streaming=False, risk=eager)
    return made


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Every precision in turn; `keep` gets the report after each."""
    torch.manual_seed(0)
    num = args.batch_size * 16
    data = (torch.randn(num, 3, 32, 32, device=args.device), torch.randint(100, (num,), device=args.device))
    report: dict[str, Any] = {"num_params": sum(p.numel() for p in vgg16(args.width).parameters()), "runs": {}}
    for precision in args.precisions:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = PRECISIONS[precision]
        start = time.perf_counter()
        if "memory" not in report:
            report["memory"] = memories(args, data)
        run = rounds(args, data)
        report["runs"][precision] = {**run, "seconds": round(time.perf_counter() - start, 1)}
        print(f"{precision}: {time.perf_counter() - start:.0f} s", flush=True)
        keep(report)
        _free(args.device)
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = PRECISIONS[args.precisions[0]]
    report["operations"] = operations(args, data)
    keep(report)


def memories(args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Of each case alone on the device; statistics and eigenvectors are made at KFAC's first step."""
    found: dict[str, Any] = {}
    for name, *loop in cases(args, data):
        _free(args.device)
        found[name] = memory(loop[1], 3, args.device)
    del loop  # it holds the last network and its factors
    for name, refresh in refreshes(args, data).items():
        _free(args.device)
        found[f"AutoDamping, {name}"] = memory(refresh, 1, args.device)
    return found


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def rounds(args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Times of all cases, round by round, and then where KFAC's go."""
    device, every = args.device, args.inverse_every
    loops = {name: (bench, step, optimizer) for name, bench, step, optimizer in cases(args, data)}
    windows = refreshes(args, data)
    for name, (_, step, _) in loops.items():  # KFAC has early refreshes in its first window
        together(step, every if name.startswith("KFAC") else args.warmup, device)
    for window in windows.values():
        window()
    steps: dict[str, list[list[float]]] = {name: [] for name in loops}
    means: dict[str, list[float]] = {name: [] for name in loops}
    damping: dict[str, list[float]] = {name: [] for name in windows}
    for _ in range(args.rounds):
        for name, (_, step, _) in loops.items():
            num = every if name.startswith("KFAC") or name == "SGD" else args.steps
            steps[name].append(each(step, num, device))
            means[name].append(together(step, num, device))
        for name, window in windows.items():
            damping[name].append(together(window, 1, device))
    for name, (bench, _, optimizer) in loops.items():
        if not bool(bench.loss.isfinite()) or getattr(optimizer, "skipped", 0):
            raise RuntimeError(f"{name}: the loss is not finite, or steps were skipped; the times mean nothing")
    summary = {name: summarise(name, steps, means, args) for name in loops}
    parts = {name: where(name, step, args) for name, (_, step, _) in loops.items()}
    return {"loops": summary, "damping": damping, "phases": parts}


def summarise(
    name: str, steps: dict[str, list[list[float]]], means: dict[str, list[float]], args: argparse.Namespace
) -> dict[str, Any]:
    """Medians, and ratios to SGD's of the same round."""
    base = [statistics.median(values) for values in steps["SGD"]]
    found: dict[str, Any] = {"mean": means[name], "ratio": _ratios(means[name], means["SGD"])}
    if not name.startswith("KFAC"):
        own = [statistics.median(values) for values in steps[name]]
        return {**found, "step": own, "step_ratio": _ratios(own, base)}
    kinds: dict[str, list[list[float]]] = {"plain": [], "statistics": [], "eigenvectors": []}
    for values in steps[name]:
        one = {
            "plain": [t for place, t in enumerate(values) if place % args.factor_every],
            "statistics": values[args.factor_every :: args.factor_every],
            "eigenvectors": values[:1],
        }
        for kind, times in one.items():
            kinds[kind].append(times)
    for kind, split in kinds.items():
        own = [statistics.median(values) for values in split]
        found[kind] = own
        found[f"{kind}_ratio"] = _ratios(own, base)
    own = [statistics.fmean(values) for values in steps[name]]
    return {**found, "step": own, "step_ratio": _ratios(own, [statistics.fmean(values) for values in steps["SGD"]])}


def _ratios(own: list[float], base: list[float]) -> list[float]:
    return [a / b for a, b in zip(own, base, strict=True)]


def where(name: str, step: Step, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The kinds of steps, taken apart by part of the loop; KFAC stands before a refresh here."""
    if not name.startswith("KFAC"):
        return {"plain": phases(step, min(args.steps, 5), args.device)}
    times = {"eigenvectors": phases(step, 1, args.device), "plain": phases(step, args.factor_every - 1, args.device)}
    return {**times, "statistics": phases(step, 1, args.device)}


def operations(args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """What the device does in a step of SGD, and in the three kinds of KFAC's from a fresh start."""
    loops = {name: step for name, _, step, _ in cases(args, data)}
    together(loops["SGD"], 2, args.device)
    found = {"SGD: plain": profile(loops["SGD"], 1, args.device)}
    step = loops["KFAC, eigh"]
    found["KFAC, eigh: eigenvectors"] = profile(step, 1, args.device)
    found["KFAC, eigh: plain"] = profile(step, 1, args.device)
    together(step, 2 * args.factor_every - 2, args.device)  # the second statistics have a refresh with them, so early
    found["KFAC, eigh: statistics"] = profile(step, 1, args.device)
    return found


# --------------------------------------------------------------------------------------------- the page


def page(folder: Path, target: Path) -> None:
    """The figure and the tables, from the result file."""
    report = reports.read(folder / FILE)
    target.mkdir(parents=True, exist_ok=True)
    figure(report).savefig(target / "kfac.png", dpi=100)
    tables = {
        "bars": bars(report),
        "loops": loops_table(report), "memory": memory_table(report),
        "where": "\n\n".join(where_table(report, name) for name in report["runs"]),
    }  # fmt: skip
    named = [PRECISION_NAMES[name] for name in report["runs"]]
    named += [f"*{name}* was not measured." for name in PRECISIONS if name not in report["runs"]]
    tables |= {"shares": damping_table(report), "busy": operations_table(report), "precisions": "\n".join(named)}
    tables["says"] = "" if " CPU, " in report["machine"] else SAYS  # it is about the committed run
    text = PAGE.format(**{**report, **report["settings"], **tables})
    (target / "kfac.md").write_text(text, encoding="utf8")


PRECISION_NAMES = {
    "default": "*default* is torch's precision: TF32 in convolutions, not in matrix products.",
    "tf32": "*tf32* allows TF32 in both.",
    "float32": "*float32* allows it in neither.",
}

PAGE = """# What training with curvature costs

The network is VGG-16 for CIFAR-100 without normalisation, P = {num_params:,}, with float32 weights and batches of
{batch_size}; the inputs are noise of the right shape. The unit is one step of SGD with momentum. KFAC runs at the
intervals of seed 004's authors: statistics every {factor_every} steps and eigenvectors every {inverse_every}. All times
include these refreshes. The training loop is plain: eager mode, contiguous layout, cuDNN's default choice of
algorithms.

All cases take turns in {rounds} rounds of one run. A ratio is relative to SGD in the same round; the tables give its
median over rounds, with minimum and maximum.

{precisions}

In both, KFAC's factors and its products with eigenvectors use TF32; the eigendecompositions do not.

Written by `python benchmarks/kfac.py --page benchmarks/results docs` from `benchmarks/results/kfac.json`: {machine},
torch {torch}, commit {commit}.

![Where a step of KFAC goes](kfac.png)

Milliseconds of an average step by purpose, measured with a synchronisation after each step. The dotted line is four
steps of SGD.

## Targets

{bars}

Each loop of {inverse_every} steps ({steps} for a penalty) is timed as a whole, with one synchronisation at the end. A
window of AutoDamping is all its work in {inverse_every} steps, timed alone; its share is relative to that many steps of
the loop. {says}
## The steps

Times in milliseconds. The column *whole loop* is the one used for the targets. The other columns synchronise with the
device after every step. They give medians over the steps of a round; for the average step of KFAC, refreshes included,
they give the mean.

{loops}

## Learned damping

Milliseconds for a window of {inverse_every} steps, and its share of the time of the loop.

{shares}

## Where the time goes

Milliseconds for the parts of a step, with a synchronisation after each part. A penalty is part of `forward`, and again
of `backward`. KFAC computes its statistics inside `backward`; eigenvectors and products with them are part of `step`.

{where} {busy}
## Memory

GiB on the device after three steps, and at the peak. Each case runs alone; images and weights are included.

{memory}
"""

SAYS = """
## Results

Except for the cells in bold, every target is met in both precisions. With a network of this size, the GPU waits for the
host, which launches its kernels one by one: SGD takes 4.8 ms per step, and the device is busy for 3.4 ms of them. The
remedy is therefore the same everywhere: the work of each step is recorded as a CUDA graph and replayed (`ritz.replay`).

- **Penalties.** In eager mode, a penalty on a quarter of the batch costs 5.6 steps of SGD in the GGN form and 12 in the
  Hessian form. Replayed, it costs 2.0 and 3.9. Convolutions use special derivative formulas (`ritz.convolutions`),
  because torch's second derivative in the weight is a convolution with a kernel as large as the image. `on_outputs`
  shares the graph of the user's forward pass, which cannot be recorded, and misses its target: if the host is the
  bottleneck, the call with its own forward pass is faster.
- **AutoDamping.** A refresh uses 4 batches: 8 products of 64 images with 4 probes. It takes 99 ms, compared with 480 ms
  for 100 steps of SGD. In eager mode it takes 232 ms.
- **KFAC with full eigendecompositions.** An average step takes 15.3 ms: 6.7 ms for eigenvectors and 1.6 ms for
  statistics. The step itself, with two products with eigenvectors on either side of each gradient, is replayed in TF32
  (`tf32=True`) and takes 1.6 ms of the device. Five decompositions run in parallel, each on its own stream and in its
  own thread, which the profiler below does not show. A step with new eigenvectors takes 692 ms. It took 924 ms in a run
  where the decompositions followed one another (`benchmarks/results/kfac-a3326dd.json`).
- **With `refresh="qr"`**, a step with new eigenvectors takes 181 ms; in that earlier run it took 350 ms. Eigenvectors
  are 1.6 ms of an average step of 9.7 ms.

**On a faster host, the ratios are higher**, because a faster host does not hide the work of the device. In the tf32
part of an earlier run (`benchmarks/results/kfac-30c6c76.json`), SGD took 3.7 ms, close to what the device needs, and
most targets were missed. KFAC took 15.9 and 10.0 ms with the same step, which is 4.3 and 2.7 steps of SGD. Penalties
cost 3.4 and 7.0 on the whole batch and 2.5 on a quarter; they have become some per cent cheaper since. Learned damping,
with 8 batches at that time, added 42 % to SGD. In the default part of that run, with SGD at 4.5 ms, the default calls
met all targets except the penalty on a quarter of the batch, at 2.1. KFAC has become cheaper since, as described above;
a penalty on such a host would still miss its target.

All of this applies to models that contain only torch.nn's modules, which are known to run the same operations at each
call. Other models run eagerly, unless `TracePenalty(replay=True)` and `Plan(replay=True)` declare that they may be
recorded. KFAC's step does not need this. A recording keeps the memory of its intermediate results, see below.
"""


def spread(values: list[float], digits: int = 2) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


BARS = (
    ("KFAC, full eigendecompositions", "KFAC, eigh", 4.0),
    ('KFAC, `refresh="qr"`', "KFAC, qr", 2.5),
    ("penalty, GGN, whole batch", "GGN, all", 3.3),
    ("penalty, GGN, whole batch, `on_outputs`", "GGN, all, on_outputs", 3.3),
    ("penalty, GGN, a quarter (default)", "GGN, a quarter", 2.0),
    ("penalty, GGN, a quarter, `replay=False`", "GGN, a quarter, eager", 2.0),
    ("penalty, Hessian, whole batch", "Hessian, all", 6.0),
    ("penalty, Hessian, a quarter", "Hessian, a quarter", 6.0),
    ("penalty, Hessian, a quarter, `replay=False`", "Hessian, a quarter, eager", 6.0),
)


def bars(report: dict[str, Any]) -> str:
    """What was promised and what was measured; bold is missed."""
    runs = report["runs"]
    lines = ["| in steps of SGD | target | " + " | ".join(runs) + " |", "| --- | ---: |" + " ---: |" * len(runs)]
    for title, name, bar in BARS:
        cells = [_judged(run["loops"][name]["ratio"], bar) for run in runs.values()]
        lines.append(f"| {title} | {bar:g} | " + " | ".join(cells) + " |")
    for loop, bar in (("SGD", 40.0), ("KFAC, eigh", 15.0)):
        for name in next(iter(runs.values()))["damping"]:
            cells = [_judged(shares(run, name, loop, report), bar, 0) for run in runs.values()]
            lines.append(f"| AutoDamping, {name}, % of {loop} | {bar:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\nBold: the target is missed."


def _judged(values: list[float], bar: float, digits: int = 2) -> str:
    text = spread(values, digits)
    return text if statistics.median(values) <= bar else f"**{text}**"


def shares(run: dict[str, Any], name: str, loop: str, report: dict[str, Any]) -> list[float]:
    every = report["settings"]["inverse_every"]
    return [100 * a / (b * every) for a, b in zip(run["damping"][name], run["loops"][loop]["mean"], strict=True)]


def loops_table(report: dict[str, Any]) -> str:
    lines = ["| | case | whole loop | single step | ratio of single steps |", "| --- | --- |" + " ---: |" * 3]
    for precision, run in report["runs"].items():
        for name, found in run["loops"].items():
            row = [spread(found["mean"]), spread(found["step"]), spread(found["step_ratio"])]
            lines.append(f"| {precision} | {name} | " + " | ".join(row) + " |")
            if "plain" not in found:
                continue
            for kind in ("plain", "statistics", "eigenvectors"):
                row = [spread(found[kind]), spread(found[f"{kind}_ratio"])]
                lines.append(f"| {precision} | {name}: a step with {kind} | | " + " | ".join(row) + " |")
    return "\n".join(lines).replace("a step with plain", "a step without refresh")


def damping_table(report: dict[str, Any]) -> str:
    loops = ("SGD", "KFAC, eigh", "KFAC, qr")
    lines = [
        "| | curvature | ms | " + " | ".join(f"% of {loop}" for loop in loops) + " |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    for precision, run in report["runs"].items():
        for name, times in run["damping"].items():
            row = [spread(times, 0), *(spread(shares(run, name, loop, report), 0) for loop in loops)]
            lines.append(f"| {precision} | {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def where_table(report: dict[str, Any], precision: str) -> str:
    lines = [f"| {precision} | forward | backward | step |", "| --- | ---: | ---: | ---: |"]
    for name, kinds in report["runs"][precision]["phases"].items():
        for kind, times in kinds.items():
            row = [f"{times[part]:.2f}" for part in ("forward", "backward", "step")]
            lines.append(f"| {name}: {kind} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def operations_table(report: dict[str, Any]) -> str:
    if "operations" not in report:
        return ""
    lines = ["\nMilliseconds for which the device is busy in a step, and with which operations, by torch's profiler.\n"]
    lines += [f"| {next(iter(report['runs']))} | busy | operations |", "| --- | ---: | --- |"]
    for name, found in report["operations"].items():
        named = ", ".join(f"{op.removeprefix('aten::')} {ms:.2f}" for op, ms, _ in found["operations"][:6])
        lines.append(f"| {name} | {found['busy']:.2f} | {named} |")
    return "\n".join(lines) + "\n"


def memory_table(report: dict[str, Any]) -> str:
    if not any(report["memory"].values()):
        return "Not measured: the run had no accelerator."
    lines = [f"| {next(iter(report['runs']))} | held | peak |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {found['held']:.2f} | {found['peak']:.2f} |" for name, found in report["memory"].items()]
    if not any(name.startswith("AutoDamping") for name in report["memory"]):
        lines.append("\nThe memory of AutoDamping was not measured.")
    return "\n".join(lines)


def pieces(run: dict[str, Any], name: str, settings: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of an average step, by what they are for."""
    found = {key: statistics.median(value) for key, value in run["loops"][name].items() if isinstance(value, list)}
    base = statistics.median(run["loops"]["SGD"]["step"])
    if name == "SGD":
        return {"the step of SGD": base}
    return {
        "the step of SGD": base,
        "products with eigenvectors": found["plain"] - base,
        "statistics": (found["statistics"] - found["plain"]) / settings["factor_every"],
        "new eigenvectors": (found["eigenvectors"] - found["statistics"]) / settings["inverse_every"],
    }


def figure(report: dict[str, Any]) -> "Figure":
    """The average step in pieces, a panel for each precision."""
    from matplotlib.figure import Figure

    runs = report["runs"]
    drawing = Figure(figsize=(3.2 * len(runs) + 0.6, 3.3), layout="constrained")
    axes = drawing.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    colors = dict(zip(pieces(runs[next(iter(runs))], "KFAC, eigh", report["settings"]), COLORS, strict=True))
    for ax, (precision, run) in zip(axes, runs.items(), strict=True):
        for place, name in enumerate(("SGD", "KFAC, eigh", "KFAC, qr")):
            bottom = 0.0
            for piece, height in pieces(run, name, report["settings"]).items():
                label = piece if place == 1 else None
                ax.bar(place, height, bottom=bottom, color=colors[piece], label=label, width=0.7)
                bottom += height
        ax.set(title=precision, xticks=range(3), xticklabels=("SGD", "KFAC\neigh", "KFAC\nqr"))
        ax.axhline(4 * statistics.median(run["loops"]["SGD"]["step"]), ls=":", color="0.3", lw=1)
        ax.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("milliseconds a step")
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return drawing


COLORS = ("#999999", "#56B4E9", "#009E73", "#D55E00")


# ----------------------------------------------------------------------------------------- command line


def main() -> None:
    parser = reports.parser(__doc__, "a thin network, few steps, seconds: does it run?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30, help="of each penalty in a round")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--factor-every", type=int, default=10)
    parser.add_argument("--inverse-every", type=int, default=100)
    parser.add_argument("--width", type=float, default=1.0, help="of the network")
    args = parser.parse_args()
    if args.page:
        page(*args.page)
        return
    if args.quick:
        args.rounds, args.steps, args.warmup, args.batch_size, args.width = 1, 1, 1, 4, 1 / 16
        args.factor_every, args.inverse_every, args.precisions = 3, 6, ["default"]
        args.out = reports.QUICK
        torch.set_num_threads(1)
    kept = ("device", "rounds", "steps", "warmup", "batch_size", "factor_every", "inverse_every", "width")
    about = reports.about(args, kept)
    measure(args, keep=lambda report: reports.write_tree(reports.rounded(about | report, ".4f"), args.out / FILE))
    if args.quick:
        page(args.out, args.out)


if __name__ == "__main__":
    main()
