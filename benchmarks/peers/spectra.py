"""The suite of spectra: products over a data set, and what a given error costs."""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import ritz

from . import accuracy, tools
from .accuracy import GIVEN, Truth
from .clock import Clock, Timed, at_most, free_memory, in_memory
from .prepare import NOTHING_KEPT, warm_up
from .problems import Problem, make
from .rows import Report, Row, attempted, clock_of, in_time, is_peer, row_of, verdict

PRODUCTS = 800  # 100 steps of 8 probes
FEW = {"cpu": 2, "cuda": 1}  # batches on which errors are measured
TARGET = 20  # times the best peer, to a given error
MEMORY = 24 * 2**30  # bytes in which ritz's own run has to do


def spectrum(args: argparse.Namespace) -> Report:
    """100 steps of 8 probes over a data set, from products over a part of it; then what an error costs each tool."""
    report: Report = {"rows": [], "verdicts": []}
    for name in args.problems:
        with attempted(args, report["rows"], case=name):
            in_time(args)
            problem = accuracy.learned(make(name, args.device, num_batches=args.batches, batch_size=args.batch_size))
            each, risk = _products(args, problem, report)
            args.keep(report)
            free_memory(args.device)
            few = replace(problem, batches=problem.batches[: FEW[args.device]])
            with at_most(args.left()):
                _errors(args, few, risk.on(few.batches), each, report)
        args.keep(report)
    return report


def _products(args: argparse.Namespace, problem: Problem, report: Report) -> tuple[dict[str, float], ritz.Risk]:
    """Adds to the report; the seconds of one product with one vector over all images by each tool, the faster way.

    And the risk by whose plan that is, which has what it compiled and recorded.
    """
    wide = tools.vectors(problem, 8)
    peers = tools.peer_arms(problem, "Hessian", ("curvlinops", "hessian_eigenthings", "pyhessian"))
    ours = {"ritz, 8 at a time": tools.ours(problem, "Hessian", compile=False, **NOTHING_KEPT)}
    if args.compile:
        ours["ritz, compiled, 8 at a time"] = tools.ours(problem, "Hessian", compile=True, **NOTHING_KEPT)
    arms: dict[str, Callable[[], Any]] = {tool: (lambda own=own: own(wide)) for tool, own in ours.items()}
    arms |= {f"{name}, one at a time": (lambda fn=fn: fn(wide[:, :1])) for name, fn in peers.items()}
    if "curvlinops" in peers:
        arms["curvlinops, 8 at a time"] = lambda: peers["curvlinops"](wide)
    before = len(report["rows"])

    def keep(timed: Timed) -> None:
        report["rows"][before:] = [_product_row(args, problem, tool, one) for tool, one in timed.items()]
        args.keep(report, at_once=False)

    keep(clock_of(args).turns(arms, keep))
    rows = report["rows"][before:]
    report["verdicts"] += _product_verdicts(args, problem.name, rows)
    each: dict[str, float] = {}
    for row in rows:
        if "job" in row:
            name = row["tool"].partition(",")[0]
            each[name] = min(each.get(name, math.inf), row["job"] / PRODUCTS)
    best = min((row for row in rows if row["tool"] in ours), key=lambda row: row.get("job", math.inf))
    return each, ours[best["tool"]].operator.risk


def _product_row(args: argparse.Namespace, problem: Problem, tool: str, one: dict[str, Any]) -> Row:
    """Products over a part of the data, and what they would take over all of it."""
    images = len(problem.batches) * len(problem.batches[0][0])
    row = row_of("spectrum", problem.name, tool, one, args.device, images=images)
    if row["seconds"]:
        row["each"] = row["seconds"] / (8 if "8 at" in tool else 1)
        row |= {"job": row["each"] * PRODUCTS * args.images / images, "extrapolated": True}
    return row


def _product_verdicts(args: argparse.Namespace, name: str, rows: list[Row]) -> list[Row]:
    """Against the faster way of the best peer, which is the target, and against that of peers' own spectra."""
    jobs = {row["tool"]: row["job"] for row in rows if row.get("job") and not row["failed"]}
    ours = [job for tool, job in jobs.items() if not is_peer(tool)]
    theirs = {tool: job for tool, job in jobs.items() if is_peer(tool)}
    single = [job for tool, job in theirs.items() if tool.endswith("one at a time")]
    text = f"{name}: {PRODUCTS} products over {args.images} images, times the best peer"
    found = []
    for rivals, how in ((list(theirs.values()), ""), (single, " one vector at a time, as in its own spectrum")):
        if ours and rivals:
            times = min(rivals) / min(ours)
            found.append(verdict(f"{text}{how}, extrapolated", ">= 5", times, times >= 5))
    return found


def _errors(
    args: argparse.Namespace, problem: Problem, risk: ritz.Risk, each: dict[str, float], report: Report
) -> None:
    """What ritz and its peers find of a trained network, and what it takes to find it with a given error."""
    with tools.multiplied("float32"):
        truth = Truth.of(problem)
    print(f"  {problem.name}: trace {truth.trace:.4g}, {truth.count} outliers above {truth.level:.3g}, "
          f"largest {truth.largest:.4g}", flush=True)  # fmt: skip
    found, ours, rest = _ritz_run(args, ritz.Hessian(risk), truth)
    ours["case"] = problem.name
    report["rows"].append(ours)
    pace = ours["each"] * args.images / sum(len(x) for x, _ in problem.batches)  # in the memory that it was given
    report["verdicts"] += _share_verdicts(ours, rest, pace, args)
    args.keep(report)
    plain = accuracy.run_probes(problem, truth, args.steps, args.device, args.limit / 2)
    reads = [read for own in plain.values() for read in own["read"]]
    report["rows"] += [_peer_row(args, problem, tool, own) for tool, own in plain.items()]
    args.keep(report)
    if not reads or "ritz" not in each:
        return
    reads += accuracy.plain_probes(ritz.Hessian(risk), truth, args.steps)
    formula = accuracy.expected_errors(found, truth)
    error = _error_row(problem, reads, formula)
    report["rows"].append(error)
    single = {what: min(value, error[f"{what}, error"]) for what, value in formula.items()}
    tail = accuracy.read_spectrum(found, truth)[1]
    fixed = ours["products"] - ours["probes"] * args.steps
    for given in GIVEN:
        probes = accuracy.probes_needed(tail, given, least=2)
        products = fixed + probes * args.steps
        job = products * (pace + rest / ours["products"])
        jobs = [_job_row(problem, "ritz.spectrum", given, probes, job, products)]
        probes = accuracy.probes_needed(single, given)
        for tool in (name for name, own in plain.items() if own["seconds"] and name in each):
            jobs.append(_job_row(problem, tool, given, probes, probes * args.steps * each[tool], probes * args.steps))
        report["rows"] += [*jobs, *_apart(problem, each, single["trace"], given, args.steps)]
        if len(jobs) > 1:
            times = min(row["job"] for row in jobs[1:]) / job
            text = f"{problem.name}: trace and outliers to {given:.0%}, times the best peer, extrapolated"
            report["verdicts"].append(verdict(text, f">= {TARGET}", times, times >= TARGET))


def _apart(problem: Problem, each: dict[str, float], single: float, given: float, steps: int) -> list[Row]:
    """What the trace by Hutchinson's estimator and the largest eigenvalues by one Lanczos run take, without a density.

    All tools have both; the error of one random vector is that of a probe of Lanczos quadrature.
    """
    probes = accuracy.probes_needed({"trace": single}, given)
    return [
        _job_row(problem, f"{tool}, no density", given, probes, (probes + steps) * seconds, probes + steps)
        for tool, seconds in each.items()
    ]


def _job_row(problem: Problem, tool: str, given: float, probes: int, job: float, products: int) -> Row:
    return {"suite": "spectrum", "case": problem.name, "tool": tool, "given error": given, "probes": probes,
            "products": products, "seconds": None, "job": job, "extrapolated": True, "failed": "",
            "peak": None}  # fmt: skip


def _ritz_run(args: argparse.Namespace, H: ritz.Hessian, truth: Truth) -> tuple[ritz.Spectrum, Row, float]:
    """One run, what is told of it, and the seconds that are no product's."""
    spent, plain, clock = 0.0, H._rows, Clock(args.device)

    def timed(rows: torch.Tensor) -> torch.Tensor:
        nonlocal spent
        start = clock.now()
        image = plain(rows)
        spent += clock.now() - start
        return image

    with in_memory(args.device, MEMORY):
        warm_up(H)
        H._rows = timed  # type: ignore[method-assign]
        free_memory(args.device)
        start = clock.now()
        found = ritz.spectrum(H, num_steps=args.steps, num_probes=8)
        whole = clock.now() - start
    values = accuracy.read_spectrum(found, truth)[0]
    row = {
        "suite": "spectrum", "case": "", "tool": "ritz.spectrum", "seconds": whole, "probes": 8,
        "products": found.products, "each": spent / found.products, "share of the rest": 1 - spent / whole,
        "failed": "", "memory given": MEMORY,
        **{f"{what}, error": abs(value - 1) for what, value in values.items()}, "locked": len(found.head),
        "peak": torch.cuda.max_memory_allocated() if args.device == "cuda" else None,
        "reserved": torch.cuda.max_memory_reserved() if args.device == "cuda" else None, "truth": vars(truth),
    }  # fmt: skip
    return found, row, whole - spent


def _peer_row(args: argparse.Namespace, problem: Problem, tool: str, own: dict[str, Any]) -> Row:
    """What a peer's probes gave, taken together."""
    row = {"suite": "spectrum", "case": problem.name, "tool": f"{tool}, density", "probes": len(own["seconds"]),
           "products": len(own["seconds"]) * args.steps, "seconds": sum(own["seconds"]), "failed": own["failed"],
           "peak": None, "read": own["read"]}  # fmt: skip
    for what in ("trace", "outliers", "largest"):
        values = [read[what] for read in own["read"]]
        value = (max(values) if what == "largest" else statistics.fmean(values)) if values else None
        row[f"{what}, error"] = None if value is None else abs(value - 1)
    return row


def _error_row(problem: Problem, reads: list[dict[str, float]], formula: dict[str, float]) -> Row:
    """The error of 1, 2 and 4 plain probes, those of all tools together."""
    row: Row = {"suite": "spectrum", "case": problem.name, "tool": "plain probes, root mean square", "probes": 1,
                "seconds": None, "failed": "", "peak": None, "by formula": formula}  # fmt: skip
    for what in ("trace", "outliers", "largest"):
        row[f"{what}, error"] = accuracy.rms(reads, what)
        row[f"{what}, of 1, 2 and 4"] = [accuracy.rms(reads, what, size) for size in (1, 2, 4)]
    return row


def _share_verdicts(ours: Row, rest: float, each: float, args: argparse.Namespace) -> list[Row]:
    """Bookkeeping and memory of the run, at so many seconds a product."""
    share = rest / (rest + ours["products"] * each)
    text = f"{ours['case']}: bookkeeping, part of the run over {args.images} images, extrapolated"
    found = [verdict(text, "<= 0.05", share, share <= 0.05)]
    if ours["peak"] is not None:
        peak = ours["reserved"] / 2**30  # recordings hold memory that no tensor has
        text = f"{ours['case']}: peak memory of the run, all that is held, GiB"
        found.append(verdict(text, f"<= {MEMORY / 2**30:.0f}", peak, ours["reserved"] <= MEMORY))
    return found
