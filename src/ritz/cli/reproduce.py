"""`ritz reproduce`: what is typed, shown and written; the experiments are in ritz.papers.experiments."""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..reading import read_json
from ..tables import Table
from . import cluster
from .screen import DONE, INTERRUPTED, complain, counting, new_console, no_stdout
from .words import typed

if TYPE_CHECKING:
    from ..papers import experiment

STYLES = {"holds": "green", "holds in direction": "cyan", "refuted": "red", "not decidable": "yellow"}
BUDGETS = ("smoke", "short", "paper")  # from the shortest to the longest


def run(
    paper: str | None, item: str | None, out: Path, slurm: str | None = None, as_json: bool = False, more: bool = False,
    **setting: Any,
) -> int:  # fmt: skip
    """The whole command, with the settings of `Setting`; returns the exit status."""
    stdout, results = sys.stdout, list[Any]()
    with no_stdout() if as_json else contextlib.nullcontext():
        status = _run(paper, item, out, slurm, results, quiet=as_json, more=more, **setting)
    if as_json and status == DONE:
        print(json.dumps(results, allow_nan=False), file=stdout, flush=True)
    return status


def _run(
    paper: str | None, item: str | None, out: Path, slurm: str | None, results: list[Any], quiet: bool, more: bool,
    **setting: Any,
) -> int:  # fmt: skip
    """The command, whose results are put into a list as they come."""
    from ..papers import experiments
    from ..papers.experiment import Setting
    from ..papers.pages import read_result
    from ..workers import RunFailed

    console = new_console()
    if paper is None:
        results += _rows(out)
        if not quiet:
            _list(console, results, out)
        return DONE
    try:
        found = experiments.find(paper, item)
        before = [read_result(out, one) if more else None for one in found]
        targets = [out if more else _target(out, one, setting["budget"]) for one in found]
        made = Setting(**setting, before=before[0])
        if slurm is not None:
            cluster.check()
            if made.runs is None:
                raise ValueError("--slurm needs --runs, a folder that all machines of the cluster see")
            made = replace(made, executor=cluster.executor(slurm, made.runs / "slurm", made.device))
        for one, target, there in zip(found, targets, before, strict=True):
            target.mkdir(parents=True, exist_ok=True)  # now, and not after hours
            path = out / one.paper / f"{one.item}.json"
            if not quiet:
                _tell_place(console, path, target, first=more and there is None, apart=target != out)
        settings = [replace(made, before=there) for there in before]  # each its own, which notes its recipes
        for one, own, target in zip(found, settings, targets, strict=True):
            with counting(console, quiet) as progress:
                outcome = experiments.reproduce(one, own, progress)
            written = outcome.write(target)
            results.append(json.loads(written.read_text(encoding="utf8")))
            if not quiet:
                _print(console, outcome)
                console.print(f"\nwrote {written} after {outcome.seconds:.0f} s")
    except (OSError, ValueError) as error:
        complain("reproduce", typed(str(error)))
        return 2
    except RunFailed as error:
        told = "\n".join([str(error).rstrip(), *getattr(error, "__notes__", [])])
        print(f"ritz reproduce: {told}\nwith the same --runs the next call goes on from what is kept", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        how = "the same command goes on from there" if setting.get("runs") else "with --runs DIR a run can be resumed"
        told = f"stopped by the keyboard; experiments that were done are written; {how}"
        print(f"\nritz reproduce: {told}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _tell_place(console: Console, path: Path, target: Path, first: bool, apart: bool) -> None:
    """Where a result goes, if that is not what was meant by the words of the command alone."""
    if first:
        console.print(f"{path} does not exist, so --more adds to nothing: these are the first seeds")
    if apart:
        console.print(f"{path} has a result of a longer budget, which stays; this one goes to {target}")


def _target(out: Path, one: "experiment.Experiment", budget: str) -> Path:
    """The folder of a result: OUT, or OUT/BUDGET if a longer run's result stands in OUT, as in a checkout of ritz."""
    there = _standing(out, one).partition(":")[0]
    longer = there in BUDGETS and BUDGETS.index(there) > BUDGETS.index(budget)
    return out / budget if longer else out


def _rows(out: Path) -> list[dict[str, str]]:
    """What there is, and what of it has been run."""
    from ..papers import experiments

    return [
        {"paper": one.paper, "item": one.item, "what": one.title, "source": one.source, "standing": _standing(out, one)}
        for one in experiments.EXPERIMENTS
    ]


def _list(console: Console, rows: list[dict[str, str]], out: Path) -> None:
    """The same as a table."""
    header, note = ("paper", "item", "what", "source", "result"), f"result: the result in {out}, if there is one"
    console.print(Table(header, [list(row.values()) for row in rows], notes=(note,)))
    console.print("\nritz reproduce PAPER [ITEM] --budget smoke|short|paper")


def _standing(out: Path, one: "experiment.Experiment") -> str:
    """The result that there is of an experiment, in short."""
    path = out / one.paper / f"{one.item}.json"
    if not path.exists():
        return ""
    try:
        written = read_json(path)
        told = _told((claim.get("ours", False), claim["verdict"]) for claim in written["claims"])
        return f"{written['setting']['budget']}: {'; '.join(told)}"
    except (AttributeError, KeyError, TypeError, ValueError):
        return "not a result"


def _told(verdicts: Iterable[tuple[bool, str]]) -> list[str]:
    """How often there is each verdict: on what a paper states, and apart from it on questions of ours."""
    counted = Counter(verdicts)
    found = []
    for words, ours in (("", False), ("ours: ", True)):
        counts = [f"{counted[ours, verdict]} {verdict}" for verdict in STYLES if counted[ours, verdict]]
        found += [words + ", ".join(counts)] if counts else []
    return found


def _print(console: Console, outcome: "experiment.Outcome") -> None:
    """Every claim: what the paper has, what was measured, the verdict."""
    from ..papers.base import allowed
    from ..papers.experiment import plain_claim
    from ..papers.pages import measured

    own, setting = outcome.experiment, outcome.setting
    named = f"{own.paper} {own.item}: {own.title} ({own.source})"
    rows = []
    for claim in outcome.claims:
        text = claim.text + (f"; short of the paper: {claim.short_of}" if claim.short_of else "")
        where = f"ours, on {claim.where}" if claim.ours else claim.where
        rows.append((where, text, allowed(claim), measured(plain_claim(claim)), claim.verdict))
    header, title = ("where", "claim", "expected", "measured", "verdict"), f"{named}, budget {setting.budget}"
    console.print()
    console.print(Table(header, rows, title=title, numeric=(2, 3), styles=STYLES))
    for told in _told((claim.ours, claim.verdict) for claim in outcome.claims):
        console.print(f"\n{told}")
    if setting.budget == "smoke":
        console.print("The budget smoke shows that everything runs: its verdicts say nothing of the paper.")
    elif setting.budget != "paper":
        console.print(f"The budget {setting.budget} is not that of the paper: the verdicts are about what was run.")
