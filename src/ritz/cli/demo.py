"""`ritz demo`: what is typed, shown and written; the study itself is in ritz.papers.digits."""

import contextlib
import os
import sys
import time
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..tables import Table
from . import interrupts
from .screen import (
    DONE,
    FAILED,
    INTERRUPTED,
    PLAIN_WIDTH,
    REFUSED,
    cell,
    complain,
    new_console,
    no_stdout,
    quiet_fonts,
    reporting,
)
from .session import tree_of
from .words import typed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..papers import digits
    from ..runs import Run

__all__ = ["INTERRUPTED", "PLAIN_WIDTH", "cell", "run"]

PAGE = "report.html"
TITLE = "One network, four weight decays"
SUBTITLE = "scikit-learn's digits: does a flatter solution generalise better?"
NOTE = (
    "± one standard error: of the digits for the gaps, of the probes for what comes from the Hessian H of the training "
    "loss; + to the end of a one-sided 95 % interval. a (eq. 7) = Tr H + ‖w‖²/2, a (tabulated) = ‖w‖/2 + Tr H / P."
)


def run(out: Path, seed: int, epochs: int, device: str, dtype: str, json: bool) -> int:
    """The whole command; returns the exit status."""
    stdout, start = sys.stdout, time.perf_counter()
    with no_stdout() if json else contextlib.nullcontext():
        console = new_console()
        try:
            with reporting(console, quiet=json) as progress, quiet_fonts():
                progress("loading torch and scikit-learn", 0.0)
                kept, settings = _prepared(out, seed, epochs, device, dtype)
                again = kept.state == "done"
                found = _kept(kept, settings) if again else _studied(kept, settings, progress)
            if not json:
                _print(console, found)
        except KeyboardInterrupt:
            complain("demo", f"stopped by the keyboard; the same command starts again in {out}")
            return INTERRUPTED
        except Exception as error:
            return _failed(error)
    if json:
        from ..papers import digits

        print(dumps(tree_of(kept, digits.table(found)), allow_nan=False), file=stdout, flush=True)
        return DONE
    how = f"read back from {out}/" if again else f"wrote {', '.join(_written(found))} to {out}/"
    console.print(f"\n{how} in {time.perf_counter() - start:.0f} s")
    print(f"open {out / PAGE} in a browser")
    return DONE


def _failed(error: Exception) -> int:
    """One line and a status; a fault of ours is raised again."""
    from ..errors import NonFiniteError

    interrupts.check()
    if not isinstance(error, NonFiniteError | ImportError | OSError | ValueError):
        raise error
    complain("demo", typed(str(error)))
    return FAILED if isinstance(error, NonFiniteError) else REFUSED


def _prepared(out: Path, seed: int, epochs: int, device: str, dtype: str) -> "tuple[Run, digits.Settings]":
    """What cannot work is found out here, before the training; then there is a folder."""
    import torch

    from .. import provenance
    from ..papers import digits, digits_figure
    from ..runs import Run, check_folder

    digits.load_digits()
    digits_figure.colors(1)
    check_folder(out)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {device!r} here ({str(error).splitlines()[0]}); give cpu") from error
    settings = digits.Settings(seed=seed, epochs=epochs, device=device, dtype=getattr(torch, dtype))
    if "OMP_NUM_THREADS" not in os.environ:  # the user's word goes first
        torch.set_num_threads(1)  # matrices this small are multiplied fastest by one thread
    told = {**asdict(settings), "dtype": dtype}
    known = provenance.versions()
    run = Run.start(
        out, "demo", told, {"settings": told, "versions": {name: known[name] for name in ("ritz", "torch")}},
        seeds={"start": seed, "batches": seed, "probes": seed}, machine=provenance.machine(device),
        subject={"model": "Sequential", "convention": "scikit-learn's digits"},
    )  # fmt: skip
    return run, settings


def _studied(run: "Run", settings: "digits.Settings", progress: "digits.Progress") -> "digits.Study":
    """The one library call, its figure and its files."""
    from ..papers import digits, digits_figure

    told = ""

    def report(text: str, part: float) -> None:
        nonlocal told
        interrupts.check()
        text = text.partition(", about ")[0]  # the bar has the time left
        if text != told:
            run.event("progress", text=text, part=round(part, 4))
        told = text
        progress(text, part)

    with run:
        found = digits.study(settings, report)
        run.keep(comparison=found.comparison, audit=found.audit)
        report("drawing", 1.0)
        _write(found, digits_figure.draw(found), run.folder)
    return found


def _kept(run: "Run", settings: "digits.Settings") -> "digits.Study":
    """What the same run has found before."""
    from ..papers import digits

    return digits.Study(settings=settings, comparison=run.results["comparison"], audit=run.results["audit"])


def _write(found: "digits.Study", figure: "Figure", out: Path) -> None:
    """What there is beside the run itself: the page, the figure, the table, each spectrum by itself."""
    from ..papers import digits
    from ..report import build

    figure.savefig(out / "demo.png", dpi=110)
    digits.save(found, out)
    build(
        found.comparison, found.audit, title=TITLE, subtitle=SUBTITLE, notes=digits.findings(found),
        settings=digits.table(found)["settings"],
    ).write(out / PAGE)  # fmt: skip


def _written(found: "digits.Study") -> list[str]:
    """The files, in words."""
    return [PAGE, "demo.png", "table.json", f"{len(found.rows)} spectra (ritz.load reads them)"]


def _print(console: Console, found: "digits.Study") -> None:
    """The table, measures down and solutions across, and the findings."""
    from ..papers import digits
    from ..results import affine

    num_params = digits.spectrum_of(found, found.ends[0]).dim
    sizes = f"{digits.NUM_TRAIN:,} training and {digits.NUM_TEST} test digits"
    errors = [float(row["train_error"].value) for row in found.rows.values()]
    rows = [["train acc., %", *(f"{100 * (1 - error):.1f}" for error in errors)]]
    for key, name in digits.COLUMNS.items():
        scale = 100.0 if key == "gap_error" else 1.0  # per cent
        rows.append([name, *(cell(affine(row[key], scale)) for row in found.rows.values())])
    header = ["weight decay", *map(digits.decay_of, found.rows)]
    title = f"ReLU network of {num_params:,} parameters, {sizes}, {found.settings.epochs} epochs"
    console.print()
    console.print(Table(header, rows, title=title, notes=(NOTE,), numeric=range(1, len(header))))
    for sentence in digits.findings(found):
        console.print(f"\n{sentence}")
