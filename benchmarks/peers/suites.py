"""The suites: each returns rows (one a tool and a case) and verdicts (one a target)."""

import argparse
import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ritz

from . import tools
from .clock import Clock, middle
from .floor import ALONE, counted, floor_arms
from .problems import Problem, make
from .rows import Report, Row, is_peer, row_of, verdict
from .spectra import spectrum

AGREE = {"float32": 1e-3, "tf32": 2e-2}  # |A v - truth| / |truth|
BAR_8 = 2.5  # times the best peer, for networks without figures of their own
TARGETS = {("Hessian", 1): 2.3, ("Hessian", 8): 1.5, ("GGN", 1): 1.7, ("GGN", 8): 1.2}  # compiled gradients, VGG-16-BN


# ---------------------------------------------------------------------------------------------- products


def products(args: argparse.Namespace) -> Report:
    """One and eight products of one batch, in gradients of that batch."""
    rows: list[Row] = []
    for name in args.problems:
        problem = make(name, args.device, batch_size=args.batch_size)
        for precision in args.precisions:
            gradients = tools.gradient_arms(problem, args.compile or args.device == "cuda")
            for matrix, k in itertools.product(args.matrices, args.columns):
                with multiplied(precision):
                    rows += _products_of(args, problem, gradients, precision, matrix, k)
                print(f"  {name}, {precision}, {matrix}, {k}: {len(rows)} rows", flush=True)
                args.keep({"rows": rows, "verdicts": _product_verdicts(rows, args.device)})
    return {"rows": rows, "verdicts": _product_verdicts(rows, args.device)}


def _products_of(
    args: argparse.Namespace, problem: Problem, gradients: tools.Arms, precision: str, matrix: str, k: int
) -> list[Row]:
    draw = torch.Generator().manual_seed(2)
    V = torch.randn(problem.dim, k, generator=draw).to(args.device)
    known = tools.truth(problem, matrix, V[:, 0]) if args.check else None
    made = {**tools.ritz_arms(problem, matrix, args.compile), **tools.peer_arms(problem, matrix)}
    arms: dict[str, Callable[[], Any]] = {name: (lambda fn=fn: fn(V)) for name, fn in made.items()}
    arms |= floor_arms(problem, matrix, k) | gradients
    timed = Clock(args.device, args.rounds, args.limit).turns(arms)
    unit = {name: middle(timed[name]["seconds"], args.device) for name in timed if name.startswith("gradient")}
    found = []
    for tool, one in timed.items():
        each = 1 if tool.startswith("gradient") else k
        row = row_of("products", problem.name, tool, one, args.device, precision=precision, matrix=matrix, k=k)
        if tool == ALONE:
            row["counted"] = counted(problem, matrix)
        for name, seconds in unit.items():
            row[f"per {name}"] = row["seconds"] / each / seconds if row["seconds"] else None
        if known is not None and tool in made and not one["failed"]:
            row["error"] = float((made[tool](V)[:, 0] - known).norm() / known.norm())
        found.append(row)
    errors = [row["error"] for row in found if "error" in row]
    for row in found:
        if "error" in row:  # TF32 may be far from float64, and all tools with it
            row["agrees"] = row["error"] <= max(AGREE[precision], 2 * statistics.median(errors))
    return found


@contextlib.contextmanager
def multiplied(precision: str) -> Iterator[None]:
    """Float32 multiplied in float32 or in TF32, by convolutions as well; by the old switches, which compilers read."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def _product_verdicts(rows: list[Row], device: str) -> list[Row]:
    found = []
    cases = dict.fromkeys((r["case"], r["precision"], r["matrix"], r["k"]) for r in rows)
    for case, precision, matrix, k in cases:
        own = [r for r in rows if (r["case"], r["precision"], r["matrix"], r["k"]) == (case, precision, matrix, k)]
        ours = [r for r in own if r["tool"].startswith("ritz") and r["seconds"] and r.get("agrees", True)]
        peers = [r for r in own if is_peer(r["tool"]) and r["seconds"]]
        name = f"{case}, {precision}: {k} {matrix} product{'s' if k > 1 else ''}"
        if not ours:
            found.append(verdict(name, "any", None, None))
            continue
        usual = next(r for r in ours if r["tool"] == "ritz")
        # on a CPU what a user gets; on a GPU, where long runs are compiled, the way that is named
        best = usual if device == "cpu" else min(ours, key=lambda r: r["seconds"])
        if (case, precision) == ("vgg16_bn", "tf32"):
            value = best.get("per gradient, compiled")
            bar = TARGETS.get((matrix, k), math.inf)
            found.append(verdict(f"{name}, each, in compiled gradients", f"<= {bar}", value, value and value <= bar))
        if not peers:
            continue
        if device == "cpu":
            rival = [r for r in peers if r["tool"] == "curvlinops"] or peers
            times = rival[0]["seconds"] / usual["seconds"]
            bar = 1.5 if k >= 8 else 1.0
            found.append(verdict(f"{name}, times {rival[0]['tool']}", f">= {bar}", times, times >= bar))
        times = min(r["seconds"] for r in peers) / best["seconds"]
        bar = BAR_8 if device == "cuda" else 1.0
        found.append(verdict(f"{name}, times the best peer ({best['tool']})", f">= {bar}", times, times >= bar))
    return found


# ------------------------------------------------------------------------------------------------ traces


def traces(args: argparse.Namespace) -> Report:
    """Tr H with as many products: time, and distance from the exact trace."""
    rows: list[Row] = []
    for name in args.problems:
        problem = make(name, args.device, batch_size=args.batch_size)
        exact = float(ritz.trace(ritz.GGN(problem.to(torch.float64).risk()), method="exact").value)
        found: dict[str, float] = {}
        timed = Clock(args.device, args.rounds, args.limit).turns(_trace_arms(args, problem, found))
        for tool, one in timed.items():
            row = row_of("traces", name, tool, one, args.device, products=args.probes)
            if tool in found:
                row |= {"value": found[tool], "error": abs(found[tool] / exact - 1)}
            rows.append(row)
    return {"rows": rows, "verdicts": []}


def _trace_arms(args: argparse.Namespace, problem: Problem, found: dict[str, float]) -> dict[str, Callable[[], Any]]:
    arms: dict[str, Callable[[], Any]] = {}
    H = ritz.Hessian(problem.risk(compile=False))

    def add(tool: str, fn: Callable[[], float]) -> None:
        arms[tool] = lambda: found.__setitem__(tool, fn())

    for method in ("exact", "hutchinson", "hutch++", "xtrace"):
        add(f"ritz, {method}", lambda m=method: float(ritz.trace(H, method=m, num_probes=args.probes).value))
    absent = tools.missing()
    if "curvlinops" not in absent:
        import curvlinops

        model, batches = problem.flat()
        with tools.twice_differentiable():
            C = curvlinops.HessianLinearOperator(
                model, problem.loss, list(model.parameters()), batches, check_deterministic=False
            )
        most = args.probes // 3 * 3
        add("curvlinops, hutchinson", lambda: float(curvlinops.hutchinson_trace(C, args.probes)))
        add("curvlinops, hutch++", lambda: float(curvlinops.hutchpp_trace(C, most)))
        add("curvlinops, xtrace", lambda: float(curvlinops.xtrace(C, args.probes // 2 * 2)))
    if "hessian_eigenthings" not in absent:
        import hessian_eigenthings as he

        model, batches = problem.flat()
        E = he.HessianOperator(model, batches, he.supervised_loss(problem.loss))
        add("hessian_eigenthings, hutchinson", lambda: he.hutchinson(E, num_samples=args.probes, seed=0).estimate)
        add("hessian_eigenthings, hutch++", lambda: he.hutch_plus_plus(E, num_matvecs=args.probes, seed=0).estimate)
    return arms


# ----------------------------------------------------------------------------------------- sample traces


def sample_traces(args: argparse.Namespace) -> Report:
    """Tr H_i of every image by LeNet-5, beside PyHessian's loop over some of them."""
    size = args.batch_size or (256 if args.device == "cpu" else 4096)
    problem = make("lenet5", args.device, num_batches=-(-args.samples // size), batch_size=size)
    risk, count = problem.risk(), len(problem.batches) * size
    clock = Clock(args.device)
    ritz.sample_traces(risk.on(problem.batches[:1]))  # what is made for the first time
    ours = busy = math.inf
    for _ in range(3):  # the least: a neighbour on one of the cores holds up the thread on the other
        start, wall = clock.now(), time.perf_counter()
        found = ritz.sample_traces(risk)
        busy = min(busy, clock.now() - start)  # on a CPU: of all threads together
        ours = min(ours, time.perf_counter() - wall if args.device == "cpu" else busy)
    rows = [{"suite": "sample_traces", "case": "lenet5", "tool": "ritz", "seconds": ours, "samples": count,
             "each": ours / count, "busy": busy, "exact": found.exact, "job": ours / count * 60_000,
             "failed": "", "peak": None,
             "extrapolated": count < 60_000}]  # fmt: skip
    job = ours / count * 60_000
    verdicts = [] if args.device == "cuda" else [
        verdict("lenet5: 60,000 sample traces on this CPU, seconds by the wall", "<= 60", job, job <= 60)
    ]  # fmt: skip
    if "pyhessian" in tools.missing():
        return {"rows": rows, "verdicts": verdicts}
    from pyhessian import hessian

    model, _ = problem.flat()
    (X, y), values = problem.batches[0], []
    start = time.perf_counter()
    for i in range(args.loop):
        one = hessian(model, problem.loss, data=(X[i : i + 1], y[i : i + 1]), cuda=args.device == "cuda")
        values.append(statistics.fmean(one.trace()))
        model.zero_grad()
    theirs = (time.perf_counter() - start) / args.loop
    exact = found.value[: args.loop].tolist()
    off = statistics.fmean(abs(a / b - 1) for a, b in zip(values, exact, strict=True) if b)
    rows.append({"suite": "sample_traces", "case": "lenet5", "tool": "pyhessian", "seconds": theirs * args.loop,
                 "samples": args.loop, "each": theirs, "job": theirs * 60_000, "error": off, "failed": "", "peak": None,
                 "extrapolated": True})  # fmt: skip
    times = theirs * count / ours
    bar = 9000.0 if args.device == "cuda" else 1.0
    verdicts.append(verdict("lenet5: sample traces, times PyHessian's loop", f">= {bar:g}", times, times >= bar))
    return {"rows": rows, "verdicts": verdicts}


# ----------------------------------------------------------------------------------------- steps, measure


def steps(args: argparse.Namespace) -> Report:
    """One step of training by each optimiser, in steps of SGD."""
    rows: list[Row] = []
    for name in args.problems:
        arms = {tool: _step(args, name, tool) for tool in ("SGD", "Adam", "ritz KFAC", "ritz Gadam")}
        timed = Clock(args.device, args.rounds * 4, args.limit).turns(arms)
        unit = statistics.fmean(timed["SGD"]["seconds"])
        for tool, one in timed.items():
            row = row_of("steps", name, tool, one, args.device)
            if one["seconds"]:  # means: some steps are dearer than others
                row |= {"mean": statistics.fmean(one["seconds"]), "per SGD": statistics.fmean(one["seconds"]) / unit}
            rows.append(row)
    return {"rows": rows, "verdicts": []}


def _step(args: argparse.Namespace, name: str, tool: str) -> Callable[[], Any]:
    problem = make(name, args.device, batch_size=args.batch_size)
    model, (x, y) = problem.model.train(), problem.batches[0]
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9),
        "Adam": lambda: torch.optim.Adam(model.parameters(), 1e-4),
        "ritz KFAC": lambda: ritz.optim.KFAC(model, lr=1e-3, damping=1e-1),
        "ritz Gadam": lambda: ritz.optim.Gadam(model.parameters(), lr=1e-4, start=1),
    }
    optimizer = made[tool]()

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return step


def measure(args: argparse.Namespace) -> Report:
    """The standard set of measures, in runs of the spectrum that it is made of."""
    rows: list[Row] = []
    verdicts = []
    for name in args.problems:
        problem = make(name, args.device, num_batches=args.batches, batch_size=args.batch_size)
        init = {key: torch.zeros_like(p) for key, p in problem.model.named_parameters()}
        arms = {
            "ritz.spectrum": lambda p=problem: ritz.spectrum(
                ritz.Hessian(p.risk(route="reverse")), num_steps=args.steps
            ),
            "ritz.measure": lambda p=problem, start=init: ritz.measure(
                p.risk(route="reverse"), init=start, num_steps=args.steps
            ),
        }
        clock = Clock(args.device, 3, args.limit)
        timed = {tool: {"first": 0.0, "peak": None, "failed": "", "seconds": []} for tool in arms}
        for _ in range(3):
            for tool, fn in arms.items():
                timed[tool]["seconds"].append(clock.once(fn))
        rows += [row_of("measure", name, tool, one, args.device) for tool, one in timed.items()]
        times = rows[-1]["seconds"] / rows[-2]["seconds"]
        verdicts.append(verdict(f"{name}: standard measures, in runs of the spectrum", "<= 1.2", times, times <= 1.2))
    return {"rows": rows, "verdicts": verdicts}


# ----------------------------------------------------------------------------------------------- scaling


def scaling(args: argparse.Namespace) -> Report:
    """Cost against samples N, parameters P, vectors K and steps m: the slope in logarithms is 1 where it is linear."""
    rows: list[Row] = []
    verdicts = []
    for what, sizes in {"N": (2, 4, 8, 16), "P": (256, 512, 1024), "K": (8, 16, 32), "m": (5, 10, 20)}.items():
        clock, arms = Clock(args.device, args.rounds, args.limit), {}
        for size in sizes:
            arms[str(size)] = _scaled(args, what, size)
        timed = clock.turns(arms)
        for size in sizes:
            row = row_of("scaling", what, "ritz", timed[str(size)], args.device, size=size)
            rows.append(row)
        own = [r for r in rows if r["case"] == what and r["seconds"]]
        slope = _slope([math.log(r["size"]) for r in own], [math.log(r["seconds"]) for r in own])
        verdicts.append(verdict(f"slope of the cost in {what}", "<= 1.15", slope, slope <= 1.15))
    return {"rows": rows, "verdicts": verdicts}


def _scaled(args: argparse.Namespace, what: str, size: int) -> Callable[[], Any]:
    """A product, or a spectrum for m, with one size changed; P is the width of one hidden layer."""
    model = ritz.models.mlp(hidden=(size if what == "P" else 128,), seed=0).to(args.device)
    draw = torch.Generator().manual_seed(1)
    count = 256 * (size if what == "N" else 4)
    data = torch.randn(count, 784, generator=draw).to(args.device), torch.randint(10, (count,), generator=draw)
    risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (data[0], data[1].to(args.device)), batch_size=256)
    H = ritz.Hessian(risk, route="reverse")
    if what == "m":
        return lambda: ritz.spectrum(H, num_steps=size, num_probes=8, reorthogonalize="none")
    rows = torch.randn(size if what == "K" else 8, H.dim, generator=draw).to(args.device)
    return lambda: H.rows(rows)


def _slope(x: list[float], y: list[float]) -> float:
    return statistics.linear_regression(x, y).slope


SUITES: dict[str, Callable[[argparse.Namespace], Report]] = {
    "products": products, "spectrum": spectrum, "traces": traces, "sample_traces": sample_traces, "steps": steps,
    "measure": measure, "scaling": scaling,
}  # fmt: skip
