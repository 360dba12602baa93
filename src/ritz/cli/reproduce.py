"""`ritz reproduce`: what is typed, shown and written; the experiments are in ritz.papers.experiments."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .screen import INTERRUPTED, counting, new_console

if TYPE_CHECKING:
    from ..papers import experiment

STYLES = {"holds": "green", "holds in direction": "cyan", "refuted": "red", "not decidable": "yellow"}
JOB_MINUTES, JOB_CPUS = 24 * 60, 4  # of a SLURM job; one that is cut off goes on at the next call


def run(paper: str | None, item: str | None, out: Path, slurm: str | None = None, **setting: Any) -> int:
    """The whole command, with the settings of `Setting`; returns the exit status."""
    from ..papers import experiments
    from ..papers.experiment import Setting
    from ..papers.workers import RunFailed

    console = new_console()
    if paper is None:
        _list(console, out)
        return 0
    try:
        found = experiments.find(paper, item)
        made = Setting(**setting)
        if slurm is not None:
            made = replace(made, executor=_cluster(slurm, made))
        out.mkdir(parents=True, exist_ok=True)  # now, and not after hours
        for one in found:
            with counting(console) as progress:
                outcome = experiments.reproduce(one, replace(made), progress)  # its own, which notes its recipes
            _print(console, outcome)
            console.print(f"\nwrote {outcome.write(out)} after {outcome.seconds:.0f} s")
    except (OSError, ValueError) as error:
        print(f"ritz reproduce: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        told = "\n".join([str(error).rstrip(), *getattr(error, "__notes__", [])])
        print(f"ritz reproduce: {told}\nwith the same --runs the next call goes on from what is kept", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nritz reproduce: stopped by the keyboard; experiments that were done are written", file=sys.stderr)
        return INTERRUPTED
    return 0


def _cluster(partition: str, setting: "experiment.Setting") -> Any:
    """A SLURM partition, as submitit has it."""
    try:
        import submitit  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ValueError("--slurm needs submitit, which is not installed: pip install submitit") from error
    if setting.runs is None:
        raise ValueError("--slurm needs --runs, a folder that all machines of the cluster see")
    executor = submitit.AutoExecutor(folder=setting.runs / "slurm")
    gpus = {"gpus_per_node": 1} if setting.device.startswith("cuda") else {}
    executor.update_parameters(
        name="ritz", slurm_partition=partition, timeout_min=JOB_MINUTES, cpus_per_task=JOB_CPUS, **gpus
    )
    return executor


def _list(console: Console, out: Path) -> None:
    """What there is, and what of it has been run."""
    from ..papers import experiments

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("paper", "item", "what", "source", f"in {out}"):
        table.add_column(name, no_wrap=name in ("paper", "item"))
    for one in experiments.EXPERIMENTS:
        table.add_row(one.paper, one.item, *map(escape, (one.title, one.source, _standing(out, one))))
    console.print(table)
    console.print("\nritz reproduce PAPER [ITEM] --budget smoke|short|paper")


def _standing(out: Path, one: "experiment.Experiment") -> str:
    """The result that there is of an experiment, in short."""
    path = out / one.paper / f"{one.item}.json"
    if not path.exists():
        return ""
    try:
        written = json.loads(path.read_text(encoding="utf8"))
        counted = Counter(claim["verdict"] for claim in written["claims"])
        return f"{written['setting']['budget']}: {_counts(counted)}"
    except (KeyError, TypeError, ValueError):
        return "not a result"


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{counted[verdict]} {verdict}" for verdict in STYLES if counted.get(verdict))


def _print(console: Console, outcome: "experiment.Outcome") -> None:
    """Every claim: what the paper has, what was measured, the verdict."""
    from ..papers.base import allowed, shown

    own, setting = outcome.experiment, outcome.setting
    named = f"{own.paper} {own.item}: {own.title} ({own.source})"
    table = Table(
        title=f"{named}, budget {setting.budget}", title_justify="left", title_style="bold", box=SIMPLE_HEAD,
        pad_edge=False, show_edge=False,
    )  # fmt: skip
    for name in ("where", "claim", "expected", "measured", "verdict"):
        table.add_column(
            name, justify="right" if name in ("expected", "measured") else "left", no_wrap=name == "verdict"
        )
    for claim in outcome.claims:
        text = claim.text + (f"; short of the paper: {claim.short_of}" if claim.short_of else "")
        cells = (claim.where, text, allowed(claim), shown(claim.measured))
        verdict = f"[{STYLES[claim.verdict]}]{claim.verdict}[/]"
        table.add_row(*map(escape, cells), verdict)
    console.print()
    console.print(table)
    counted = Counter[str](claim.verdict for claim in outcome.claims)
    console.print("\n" + _counts(counted))
    if setting.budget != "paper":
        console.print(f"The budget {setting.budget} is not that of the paper: the verdicts are about what was run.")
