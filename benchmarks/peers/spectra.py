"""The suite of spectra: products over a data set, and what a given error costs."""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import ritz

from . import accuracy, tools
from .accuracy import GIVEN, Truth
from .clock import Clock
from .problems import Problem, make
from .rows import Report, Row, is_peer, row_of, verdict

PRODUCTS = 800  # 100 steps of 8 probes
FEW = 2  # batches on which errors are measured
TARGET = 20  # times the best peer, to a given error


def spectrum(args: argparse.Namespace) -> Report:
    """100 steps of 8 probes over a data set, from products over a part of it; then what an error costs each tool."""
    rows: list[Row] = []
    verdicts: list[Row] = []
    for name in args.problems:
        problem = accuracy.learned(make(name, args.device, num_batches=args.batches, batch_size=args.batch_size))
        own, judged, each = _products(args, problem)
        rows, verdicts = rows + own, verdicts + judged
        args.keep({"rows": rows, "verdicts": verdicts})
        own, judged = _errors(args, replace(problem, batches=problem.batches[:FEW]), each)
        rows, verdicts = rows + own, verdicts + judged
        args.keep({"rows": rows, "verdicts": verdicts})
    return {"rows": rows, "verdicts": verdicts}


def _products(args: argparse.Namespace, problem: Problem) -> tuple[list[Row], list[Row], dict[str, float]]:
    """Rows, verdicts, and the seconds of one product with one vector over all images by each tool, the faster way."""
    images = len(problem.batches) * len(problem.batches[0][0])
    wide = torch.randn(problem.dim, 8, generator=torch.Generator().manual_seed(2)).to(args.device)
    H = ritz.Hessian(problem.risk(compile=args.compile))
    peers = tools.peer_arms(problem, "Hessian", ("curvlinops", "hessian_eigenthings", "pyhessian"))
    arms: dict[str, Callable[[], Any]] = {"ritz, 8 at a time": lambda: H @ wide}
    arms |= {f"{name}, one at a time": (lambda fn=fn: fn(wide[:, :1])) for name, fn in peers.items()}
    if "curvlinops" in peers:
        arms["curvlinops, 8 at a time"] = lambda: peers["curvlinops"](wide)
    timed = Clock(args.device, args.rounds, args.limit).turns(arms)
    rows, each = [], {}
    for tool, one in timed.items():
        row = row_of("spectrum", problem.name, tool, one, args.device, images=images)
        if row["seconds"]:
            row["each"] = row["seconds"] / (8 if "8 at" in tool else 1)
            row |= {"job": row["each"] * PRODUCTS * args.images / images, "extrapolated": True}
            name = tool.partition(",")[0]
            each[name] = min(each.get(name, row["job"]), row["job"] / PRODUCTS)
        rows.append(row)
    rivals = [seconds for name, seconds in each.items() if is_peer(name)]
    if not rivals or "ritz" not in each:
        return rows, [], each
    times = min(rivals) / each["ritz"]
    text = f"{problem.name}: {PRODUCTS} products over {args.images} images, times the best peer, extrapolated"
    return rows, [verdict(text, ">= 5", times, times >= 5)], each


def _errors(args: argparse.Namespace, problem: Problem, each: dict[str, float]) -> tuple[list[Row], list[Row]]:
    """What ritz and its peers find of a trained network, and what it takes to find it with a given error."""
    truth = Truth.of(problem)
    print(f"  {problem.name}: trace {truth.trace:.4g}, {truth.count} outliers above {truth.level:.3g}, "
          f"largest {truth.largest:.4g}", flush=True)  # fmt: skip
    found, ours, rest = _ritz_run(args, problem, truth)
    rows, plain = [ours], accuracy.run_probes(problem, truth, args.steps, args.device, args.limit / 2)
    reads = [read for own in plain.values() for read in own["read"]]
    for tool, own in plain.items():
        rows.append(_peer_row(args, problem, tool, own))
    if not reads or "ritz" not in each:
        return rows, _share_verdicts(ours, rest, each, args)
    reads += accuracy.plain_probes(problem, truth, args.steps)
    formula = accuracy.expected_errors(found, truth)
    rows.append(_error_row(problem, reads, formula))
    single = {what: min(error, rows[-1][f"{what}, error"]) for what, error in formula.items()}
    tail = accuracy.read_spectrum(found, truth)[1]
    verdicts = _share_verdicts(ours, rest, each, args)
    fixed = ours["products"] - ours["probes"] * args.steps
    for given in GIVEN:
        probes = accuracy.probes_needed(tail, given, least=2)
        products = fixed + probes * args.steps
        job = products * (each["ritz"] + rest / ours["products"])
        jobs = [_job_row(problem, "ritz.spectrum", given, probes, job, products)]
        probes = accuracy.probes_needed(single, given)
        for tool in (name for name, own in plain.items() if own["seconds"] and name in each):
            jobs.append(_job_row(problem, tool, given, probes, probes * args.steps * each[tool], probes * args.steps))
        rows += jobs
        if len(jobs) > 1:
            times = min(row["job"] for row in jobs[1:]) / job
            text = f"{problem.name}: trace and outliers to {given:.0%}, times the best peer, extrapolated"
            verdicts.append(verdict(text, f">= {TARGET}", times, times >= TARGET))
    return rows, verdicts


def _job_row(problem: Problem, tool: str, given: float, probes: int, job: float, products: int) -> Row:
    return {"suite": "spectrum", "case": problem.name, "tool": tool, "given error": given, "probes": probes,
            "products": products, "seconds": None, "job": job, "extrapolated": True, "failed": "",
            "peak": None}  # fmt: skip


def _ritz_run(args: argparse.Namespace, problem: Problem, truth: Truth) -> tuple[ritz.Spectrum, Row, float]:
    """One run, what is told of it, and the seconds that are no product's."""
    H = ritz.Hessian(problem.risk(compile=False))
    H @ torch.ones(H.dim, 8, dtype=H.dtype, device=H.device)  # what is made for the first time
    spent, plain, clock = 0.0, H._rows, Clock(args.device)

    def timed(rows: torch.Tensor) -> torch.Tensor:
        nonlocal spent
        start = clock.now()
        image = plain(rows)
        spent += clock.now() - start
        return image

    H._rows = timed  # type: ignore[method-assign]
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = clock.now()
    found = ritz.spectrum(H, num_steps=args.steps, num_probes=8)
    whole = clock.now() - start
    values = accuracy.read_spectrum(found, truth)[0]
    row = {
        "suite": "spectrum", "case": problem.name, "tool": "ritz.spectrum", "seconds": whole, "probes": 8,
        "products": found.products, "share of the rest": 1 - spent / whole, "failed": "",
        **{f"{what}, error": abs(value - 1) for what, value in values.items()}, "locked": len(found.head),
        "peak": torch.cuda.max_memory_allocated() if args.device == "cuda" else None, "truth": vars(truth),
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


def _share_verdicts(ours: Row, rest: float, each: dict[str, float], args: argparse.Namespace) -> list[Row]:
    """Bookkeeping and memory of the run."""
    found = []
    if "ritz" in each:
        share = rest / (rest + ours["products"] * each["ritz"])
        text = f"{ours['case']}: bookkeeping, part of the run over {args.images} images, extrapolated"
        found.append(verdict(text, "<= 0.05", share, share <= 0.05))
    if ours["peak"] is not None:
        peak = ours["peak"] / 2**30
        found.append(verdict(f"{ours['case']}: peak memory of the run, GiB", "<= 24", peak, peak <= 24))
    return found
