"""Traces and diagonals: time for as many products, or for none, and distance from what is exact."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ritz

from . import tools
from .problems import Problem, make
from .rows import Report, Row, attempted, clock_of, in_time, row_of

Arms = dict[str, Callable[[], Any]]  # tool -> what it finds


def traces(args: argparse.Namespace) -> Report:
    """Tr H with as many products: time, and distance from the exact trace."""
    return _suite(args, _trace_arms, lambda risk: ritz.trace(ritz.GGN(risk), method="exact"))


def diagonals(args: argparse.Namespace) -> Report:
    """The diagonal of the GGN with as many products: time, and distance from the exact one."""
    return _suite(args, _diagonal_arms, lambda risk: ritz.diagonal(ritz.GGN(risk), method="exact"))


def _suite(
    args: argparse.Namespace, arms: Callable[[argparse.Namespace, Problem], Arms], exact: Callable[[ritz.Risk], Any]
) -> Report:
    rows: list[Row] = []
    for name in args.problems:
        with attempted(args, rows, case=name):
            in_time(args)
            problem = make(name, args.device, batch_size=args.batch_size)
            truth = torch.as_tensor(exact(problem.to(torch.float64).risk()).value)
            rows += _rows(args, name, arms(args, problem), truth)
        args.keep({"rows": rows, "verdicts": []})
    return {"rows": rows, "verdicts": []}


def _rows(args: argparse.Namespace, name: str, arms: Arms, truth: Tensor) -> list[Row]:
    found: dict[str, Tensor] = {}

    def kept(tool: str) -> None:
        found[tool] = torch.as_tensor(arms[tool]()).detach().cpu().double()

    rows = []
    for tool, one in clock_of(args).turns({tool: partial(kept, tool) for tool in arms}).items():
        row = row_of(args.suite, name, tool, one, args.device, products=None if "exact" in tool else args.probes)
        if tool in found:
            row["error"] = float((found[tool] - truth).norm() / truth.norm())
            row |= {} if truth.ndim else {"value": float(found[tool])}
        rows.append(row)
    return rows


def _trace_arms(args: argparse.Namespace, problem: Problem) -> Arms:
    H = ritz.Hessian(problem.risk(compile=False))
    arms: Arms = {
        f"ritz, {method}": partial(_value, ritz.trace, H, method=method, num_probes=args.probes)
        for method in ("exact", "hutchinson", "hutch++", "xtrace")
    }
    absent = tools.missing()
    if "curvlinops" not in absent:
        import curvlinops

        C = _theirs(problem, curvlinops.HessianLinearOperator)
        most = args.probes // 3 * 3
        arms["curvlinops, hutchinson"] = lambda: curvlinops.hutchinson_trace(C, args.probes)
        arms["curvlinops, hutch++"] = lambda: curvlinops.hutchpp_trace(C, most)
        arms["curvlinops, xtrace"] = lambda: curvlinops.xtrace(C, args.probes // 2 * 2)
    if "hessian_eigenthings" not in absent:
        import hessian_eigenthings as he

        model, batches = problem.flat()
        E = he.HessianOperator(model, batches, he.supervised_loss(problem.loss))
        arms["hessian_eigenthings, hutchinson"] = lambda: he.hutchinson(E, num_samples=args.probes, seed=0).estimate
        arms["hessian_eigenthings, hutch++"] = lambda: he.hutch_plus_plus(E, num_matvecs=args.probes, seed=0).estimate
    return arms


def _diagonal_arms(args: argparse.Namespace, problem: Problem) -> Arms:
    G = ritz.GGN(problem.risk(compile=False))
    arms: Arms = {
        f"ritz, {method}": partial(_value, ritz.diagonal, G, num_probes=args.probes, method=method)
        for method in ("exact", "hutchinson", "hutch++")
    }
    absent = tools.missing()
    if "curvlinops" not in absent:
        import curvlinops

        C = _theirs(problem, curvlinops.GGNLinearOperator)
        arms["curvlinops, hutchinson"] = lambda: curvlinops.hutchinson_diag(C, args.probes)
        arms["curvlinops, xdiag"] = lambda: curvlinops.xdiag(C, args.probes // 2 * 2)
    if "backpack" not in absent:
        arms["backpack, exact"] = _backpack(problem)
    return arms


def _value(estimator: Callable[..., ritz.results.Estimate], *args: Any, **keywords: Any) -> Any:
    return estimator(*args, **keywords).value


def _theirs(problem: Problem, kind: Any) -> Any:
    """A matrix of curvlinops."""
    model, batches = problem.flat()
    with tools.twice_differentiable():
        return kind(model, problem.loss, list(model.parameters()), batches, check_deterministic=False)


def _backpack(problem: Problem) -> Callable[[], Tensor]:
    """The diagonal of the GGN by BackPACK's extension, one batch after the other."""
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

    model, batches = problem.flat()
    own, loss = extend(model), extend(problem.loss)
    size = sum(len(y) for _, y in batches)

    def run() -> Tensor:
        total = torch.zeros(problem.dim, device=batches[0][1].device)
        for x, y in batches:
            with backpack(DiagGGNExact()):
                loss(own(x), y).backward()
            total += torch.cat([p.diag_ggn_exact.flatten() for p in own.parameters()]) * (len(y) / size)
        return total

    return run
