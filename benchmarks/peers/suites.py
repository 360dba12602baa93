"""The suites: each returns rows (one a tool and a case) and verdicts (one a target)."""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import ritz

from . import tools
from .clock import Clock, at_most, free_memory
from .estimates import diagonals, traces
from .first import first
from .prepare import warm_up
from .problems import Problem, make
from .products import products
from .rows import Report, Row, attempted, clock_of, in_time, row_of, verdict
from .spectra import spectrum

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

    args.keep({"rows": rows, "verdicts": verdicts})
    model, _ = problem.flat()
    (X, y), values = problem.batches[0], []
    start = time.perf_counter()
    for i in range(-1, args.loop):
        if i == 0:  # the one before, the last image, was what is made for the first time
            values, start = [], time.perf_counter()
        one = hessian(model, problem.loss, data=(X[i][None], y[i][None]), cuda=args.device == "cuda")
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
        with attempted(args, rows, case=name):
            in_time(args)
            rows += _steps_of(args, name)
        args.keep({"rows": rows, "verdicts": []})
    return {"rows": rows, "verdicts": []}


def _steps_of(args: argparse.Namespace, name: str) -> list[Row]:
    arms = {tool: _step(args, name, tool) for tool in ("SGD", "Adam", "ritz KFAC", "ritz Gadam")}
    timed = Clock(args.device, args.rounds * 4, args.limit, args.patience, args.left).turns(arms)
    unit = statistics.fmean(timed["SGD"]["seconds"])
    rows = []
    for tool, one in timed.items():
        row = row_of("steps", name, tool, one, args.device)
        if one["seconds"]:  # means: some steps are dearer than others
            row |= {"mean": statistics.fmean(one["seconds"]), "per SGD": statistics.fmean(one["seconds"]) / unit}
        rows.append(row)
    return rows


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
    verdicts: list[Row] = []
    for name in args.problems:
        with attempted(args, rows, case=name):
            in_time(args)
            problem = make(name, args.device, num_batches=args.batches, batch_size=args.batch_size)
            for label, choice in {"": False, ", compiled": True}.items():
                if choice is False or args.compile:
                    own = _measure_of(args, problem, label, compile=choice)
                    rows += own
                    verdicts += _measure_verdict(name, label, own)
                    args.keep({"rows": rows, "verdicts": verdicts})
    return {"rows": rows, "verdicts": verdicts}


def _measure_of(args: argparse.Namespace, problem: Problem, label: str, **plan: Any) -> list[Row]:
    """Both runs on one risk, whose products were taken before: what is made once is in neither."""
    risk = problem.risk(**plan)
    init = {key: torch.zeros_like(p) for key, p in problem.model.named_parameters()}
    took: list[dict[str, float]] = []
    arms: dict[str, Callable[[], Any]] = {
        f"ritz.spectrum{label}": lambda: ritz.spectrum(ritz.Hessian(risk), num_steps=args.steps),
        f"ritz.measure{label}": lambda: took.append(dict(ritz.measure(risk, init=init, num_steps=args.steps).seconds)),
    }
    clock = clock_of(args)
    with at_most(args.left()):
        first = clock.once(lambda: warm_up(ritz.Hessian(risk)))
    timed: dict[str, dict[str, Any]] = {
        tool: {"first": first, "peak": None, "failed": "", "seconds": []} for tool in arms
    }
    begin, number = time.perf_counter(), 0
    while number < (1 if args.device == "cuda" else 3) or (number < 3 and time.perf_counter() - begin < args.limit):
        for tool, fn in arms.items():
            free_memory(args.device)
            with at_most(args.left()):
                timed[tool]["seconds"].append(clock.once(fn))
            if args.device == "cuda":
                timed[tool]["peak"] = torch.cuda.max_memory_allocated()
        number += 1
    rows = [row_of("measure", problem.name, tool, one, args.device) for tool, one in timed.items()]
    rows[-1]["runs"] = took[-1]  # seconds of each run within it, the spectrum's among them
    return rows


def _measure_verdict(name: str, label: str, rows: list[Row]) -> list[Row]:
    spectrum, whole = rows
    times = whole["seconds"] / spectrum["seconds"]
    return [verdict(f"{name}: standard measures{label}, in runs of the spectrum", "<= 1.2", times, times <= 1.2)]


# ----------------------------------------------------------------------------------------------- scaling


def scaling(args: argparse.Namespace) -> Report:
    """Cost against samples N, parameters P, vectors K and steps m: the slope in logarithms is 1 where it is linear."""
    rows: list[Row] = []
    verdicts = []
    for what, sizes in {"N": (2, 4, 8, 16), "P": (256, 512, 1024), "K": (8, 16, 32), "m": (5, 10, 20)}.items():
        timed = clock_of(args).turns({str(size): _scaled(args, what, size) for size in sizes})
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
    "products": products, "spectrum": spectrum, "traces": traces, "diagonals": diagonals,
    "sample_traces": sample_traces, "steps": steps, "measure": measure, "first": first, "scaling": scaling,
}  # fmt: skip
