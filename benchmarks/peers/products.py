"""The suite of products: one and eight at a time, of one batch, in gradients of that batch."""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from . import tools
from .clock import Timed, at_most, middle
from .floor import ALONE, counted, floor_arms
from .prepare import COMPILED, cold, failure
from .problems import Problem, make
from .rows import Report, Row, attempted, clock_of, heard, in_time, is_chosen, is_peer, measured, row_of, verdict

AGREE = {"float32": 1e-3, "tf32": 2e-2}  # |A v - truth| / |truth|
TIMES = 2.5  # the best peer, on a GPU
TARGETS = {("Hessian", 1): 2.3, ("Hessian", 8): 1.5, ("GGN", 1): 1.7, ("GGN", 8): 1.2}  # compiled gradients, VGG-16-BN

Case = tuple[str, str, str, int]  # problem, precision, matrix, vectors


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Those that are asked for."""
    for case in itertools.product(args.problems, args.precisions, args.matrices, args.columns):
        name, _, matrix, k = case
        if is_chosen(args.only, name, matrix, k):
            yield case


def products(args: argparse.Namespace) -> Report:
    """One and eight products of one batch, in gradients of that batch."""
    rows: list[Row] = []
    for (name, precision), group in itertools.groupby(cases(args), lambda case: case[:2]):
        with attempted(args, rows, case=name, precision=precision):
            in_time(args)
            problem = make(name, args.device, batch_size=args.batch_size)
            gradients = tools.gradient_arms(problem, args.compile or args.device == "cuda")
            for *_, matrix, k in group:
                with attempted(args, rows, case=name, precision=precision, matrix=matrix, k=k):
                    in_time(args)
                    with tools.multiplied(precision):
                        _Measured(args, problem, gradients, precision, matrix, k).add_to(rows)
                    print(f"  {name}, {precision}, {matrix}, {k}: {len(rows)} rows", flush=True)
                args.keep(_report(rows, args.device))
    return _report(rows, args.device)


def _report(rows: list[Row], device: str) -> Report:
    return {"rows": rows, "verdicts": _verdicts(rows, device)}


class _Measured:
    """All tools in one case."""

    def __init__(
        self, args: argparse.Namespace, problem: Problem, gradients: tools.Arms, precision: str, matrix: str, k: int
    ) -> None:
        self.args, self.problem = args, problem
        self.case: dict[str, Any] = {"precision": precision, "matrix": matrix, "k": k}
        self.V = tools.vectors(problem, k)
        made: dict[str, tools.Product] = {
            **tools.ritz_arms(problem, matrix, args.compile),
            **tools.peer_arms(problem, matrix),
        }
        self.made = {name: fn for name, fn in made.items() if self._wanted(name)}
        self.refused = failure(args.prepared, problem.name, COMPILED, self.case) if COMPILED in self.made else ""
        if self.refused:
            del self.made[COMPILED]
        self.arms: dict[str, Callable[[], Any]] = {n: (lambda fn=fn: fn(self.V)) for n, fn in self.made.items()}
        self.arms |= {name: fn for name, fn in floor_arms(problem, matrix, k).items() if self._wanted(name)}
        self.arms |= gradients

    def _wanted(self, tool: str) -> bool:
        return any(fnmatchcase(tool, pattern) for pattern in self.args.tools or ["*"])

    def add_to(self, rows: list[Row]) -> None:
        """Timed, then held against the product in float64; what is known is kept all the while."""

        def keep(timed: Timed) -> None:
            self.args.keep(_report(rows + self._told(timed), self.args.device), at_once=False)

        with heard() as said:
            found = self._told(clock_of(self.args).turns(self.arms, keep))
        if self.refused:
            never = {"first": None, "seconds": [], "failed": f"compiled ahead: {self.refused}"}
            found.append(row_of("products", self.problem.name, COMPILED, never, self.args.device, **self.case))
        rows += found
        for row in found:
            if row["tool"] == COMPILED:
                row["said"] = said
        if self.args.check:
            with at_most(self.args.left()):
                self._judge(found)

    def _told(self, timed: Timed) -> list[Row]:
        device, k = self.args.device, self.case["k"]
        unit = {tool: middle(one["seconds"], device) for tool, one in timed.items()
                if tool.startswith("gradient") and one["seconds"]}  # fmt: skip
        found = []
        for tool, one in timed.items():
            row = row_of("products", self.problem.name, tool, one, device, **self.case)
            each = 1 if tool.startswith("gradient") else k
            if tool == ALONE:
                row["counted"] = counted(self.problem, self.case["matrix"])
            for name, seconds in unit.items():
                row[f"per {name}"] = row["seconds"] / each / seconds if row["seconds"] else None
            if isinstance(own := self.made.get(tool), tools.Ours):
                row["way"] = own.way
                if tool == COMPILED and row["first"] is not None and not row["failed"] and not own.way["compiled"]:
                    row["failed"] = "not compiled, taken as it is"
            row["cold"] = cold(self.args.prepared, self.problem.name, tool, self.case)
            found.append(row)
        return found

    def _judge(self, rows: list[Row]) -> None:
        """How far each is from the product in float64."""
        known = tools.truth(self.problem, self.case["matrix"], self.V[:, 0])
        for row in rows:
            if row["tool"] in self.made and row["seconds"] and not row["failed"]:
                image = self.made[row["tool"]](self.V)[:, 0]
                row["error"] = float((image - known).norm() / known.norm())
                del image
        errors = [row["error"] for row in rows if "error" in row]
        for row in rows:
            if "error" in row:  # TF32 may be far from float64, and all tools with it
                most = max(AGREE[self.case["precision"]], 2 * statistics.median(errors))
                row["agrees"] = row["error"] <= most


def _verdicts(rows: list[Row], device: str) -> list[Row]:
    found = []
    known = [row for row in rows if "k" in row]
    for case in dict.fromkeys((r["case"], r["precision"], r["matrix"], r["k"]) for r in known):
        own = [r for r in known if (r["case"], r["precision"], r["matrix"], r["k"]) == case]
        found += _verdicts_of(case, [r for r in own if measured(r)], device)
    return found


def _verdicts_of(case: Case, rows: list[Row], device: str) -> list[Row]:
    """Of what was measured in one case."""
    problem, precision, matrix, k = case
    name = f"{problem}, {precision}: {k} {matrix} product{'s' if k > 1 else ''}"
    ours = {r["tool"]: r for r in rows if r["tool"].startswith("ritz")}
    if not ours:
        return [verdict(name, "any", None, None)]
    # what a user gets in a short run or, on a GPU, in a long one: the way that is named
    usual = [ours[tool] for tool in ("ritz", COMPILED) if tool in ours and (tool == "ritz" or device == "cuda")]
    best = min(usual or ours.values(), key=lambda r: r["seconds"])
    found = []
    if (problem, precision) == ("vgg16_bn", "tf32"):
        value, bar = best.get("per gradient, compiled"), TARGETS.get((matrix, k), math.inf)
        text = f"{name}, each, in compiled gradients ({best['tool']})"
        found.append(verdict(text, f"<= {bar}", value, value and value <= bar))
    peers = [r for r in rows if is_peer(r["tool"])]
    if not peers:
        return found
    if device == "cpu":
        rival = next((r for r in peers if r["tool"] == "curvlinops"), peers[0])
        times, bar = rival["seconds"] / best["seconds"], 1.5 if k >= 8 else 1.0
        found.append(verdict(f"{name}, times {rival['tool']}", f">= {bar}", times, times >= bar))
    times, bar = min(r["seconds"] for r in peers) / best["seconds"], TIMES if device == "cuda" else 1.0
    found.append(verdict(f"{name}, times the best peer ({best['tool']})", f">= {bar}", times, times >= bar))
    return found
