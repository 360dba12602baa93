"""`ritz reproduce`: what is typed, shown and written; the experiments are in ritz.papers.experiments."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .demo import INTERRUPTED, PLAIN_WIDTH

if TYPE_CHECKING:
    from ..papers import experiment

STYLES = {"holds": "green", "refuted": "red", "cannot tell": "yellow"}


def run(
    paper: str | None, item: str | None, budget: str, out: Path, data: Path | None, device: str, seeds: int | None
) -> int:
    """The whole command; returns the exit status."""
    from ..papers import experiments
    from ..papers.experiment import Setting

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    if paper is None:
        _list(console)
        return 0
    try:
        setting = Setting(budget, data, device, seeds)  # type: ignore[arg-type]
        found = experiments.find(paper, item)
        out.mkdir(parents=True, exist_ok=True)  # now, and not after hours
        for one in found:
            with _shown(console) as progress:
                outcome = experiments.reproduce(one, setting, progress)
            _print(console, outcome)
            console.print(f"\nwrote {outcome.write(out)} after {outcome.seconds:.0f} s")
    except (OSError, ValueError) as error:
        print(f"ritz reproduce: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nritz reproduce: stopped by the keyboard; experiments that were done are written", file=sys.stderr)
        return INTERRUPTED
    return 0


def _list(console: Console) -> None:
    """What there is."""
    from ..papers import experiments

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("paper", "item", "what", "source"):
        table.add_column(name, no_wrap=name in ("paper", "item"))
    for one in experiments.EXPERIMENTS:
        table.add_row(one.paper, one.item, one.title, one.source)
    console.print(table)
    console.print("\nritz reproduce PAPER [ITEM] --budget smoke|short|paper")


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
        cells = (claim.where, claim.text, allowed(claim), shown(claim.measured))
        verdict = f"[{STYLES[claim.verdict]}]{claim.verdict}[/]"
        table.add_row(*map(escape, cells), verdict)
    console.print()
    console.print(table)
    counted = Counter[str](claim.verdict for claim in outcome.claims)
    console.print("\n" + ", ".join(f"{counted[verdict]} {verdict}" for verdict in STYLES if counted[verdict]))
    if setting.budget != "paper":
        console.print(f"The budget {setting.budget} is not that of the paper: the verdicts are about what was run.")


@contextmanager
def _shown(console: Console) -> "Iterator[experiment.Progress]":
    """Progress as a bar with the time left on a terminal, as one line for each stage elsewhere."""
    if not console.is_terminal:
        seen: set[str] = set()

        def line(what: str, done: int, total: int) -> None:
            if what not in seen:
                seen.add(what)
                print(f"{total} {what}", flush=True)

        yield line
        return
    columns = (
        TextColumn("{task.description:<34}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, object] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)  # type: ignore[arg-type]

        yield update
