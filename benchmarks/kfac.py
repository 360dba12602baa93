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
from typing import Any

import reports
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ritz
from ritz.optim import KFAC, AutoDamping, TracePenalty

FILE = "kfac.json"
PRECISIONS = {"default": (True, False), "tf32": (True, True), "float32": (False, False)}  # convolutions, products
Step = Callable[[], Any]


# ------------------------------------------------------------------------------------------------ cases


class Bench:
    """A network of its own, the batches that it is shown in turn, and one step of training on them."""

    def __init__(self, args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(0)
        self.model = ritz.models.vgg16(width=args.width).to(args.device).train()
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
    num_params = sum(p.numel() for p in ritz.models.vgg16(width=args.width).parameters())
    report: dict[str, Any] = {"num_params": num_params, "runs": {}}
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


# ----------------------------------------------------------------------------------------- command line


def main() -> None:
    from pages.kfac import page  # which looks into this script

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
