"""`ritz demo`: what is typed, shown and written; the study itself is in ritz.papers.digits."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .screen import INTERRUPTED, PLAIN_WIDTH, cell, new_console, reporting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..papers import digits

__all__ = ["INTERRUPTED", "PLAIN_WIDTH", "cell", "run"]

PAGE = "report.html"
TITLE = "One network, four weight decays"
SUBTITLE = "scikit-learn's digits: does a flatter solution generalise better?"
NOTE = (
    "± one standard error: of the digits for the gaps, of the probes for what comes from the Hessian H of the training "
    "loss; + to the end of a one-sided 95 % interval. a (eq. 7) = Tr H + ‖w‖²/2, a (tabulated) = ‖w‖/2 + Tr H / P."
)


def run(out: Path, seed: int, epochs: int, device: str) -> int:
    """The whole command; returns the exit status."""
    console = new_console()
    start = time.perf_counter()
    try:
        with reporting(console) as progress:
            progress("loading torch and scikit-learn", 0.0)
            try:
                settings = _prepared(out, seed, epochs, device)
            except (ImportError, OSError, ValueError) as error:
                print(f"ritz demo: {error}", file=sys.stderr)
                return 2
            found, figure = _study(settings, progress)
        _print(console, found)
        written = _write(found, figure, out)
    except KeyboardInterrupt:
        print("\nritz demo: stopped by the keyboard", file=sys.stderr)
        return INTERRUPTED
    console.print(f"\nwrote {', '.join(written)} to {out}/ in {time.perf_counter() - start:.0f} s")
    print(f"open {out / PAGE} in a browser")
    return 0


def _prepared(out: Path, seed: int, epochs: int, device: str) -> "digits.Settings":
    """What cannot work is found out here, before the training."""
    import torch

    from ..papers import digits, digits_figure
    from ..report.page import check_target

    digits.load_digits()
    digits_figure.colors(1)
    check_target(out / PAGE)
    out.mkdir(parents=True, exist_ok=True)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {device!r} here ({str(error).splitlines()[0]})") from error
    if "OMP_NUM_THREADS" not in os.environ:  # the user's word goes first
        torch.set_num_threads(1)  # matrices this small are multiplied fastest by one thread
    return digits.Settings(seed=seed, epochs=epochs, device=device)


def _study(settings: "digits.Settings", progress: "digits.Progress") -> "tuple[digits.Study, Figure]":
    """The one library call, and the figure."""
    from ..papers import digits, digits_figure

    found = digits.study(settings, progress)
    progress("drawing", 1.0)
    return found, digits_figure.draw(found)


def _write(found: "digits.Study", figure: "Figure", out: Path) -> list[str]:
    """The files, and in words what they are."""
    from ..papers import digits
    from ..report import build

    figure.savefig(out / "demo.png", dpi=110)
    digits.save(found, out)
    build(
        found.comparison, found.audit, title=TITLE, subtitle=SUBTITLE, notes=digits.findings(found),
        settings=digits.table(found)["settings"],
    ).write(out / PAGE)  # fmt: skip
    return [PAGE, "demo.png", "table.json", f"{len(found.rows)} spectra (ritz.load reads them)"]


def _print(console: Console, found: "digits.Study") -> None:
    """The table, measures down and solutions across, and the findings."""
    from ..papers import digits
    from ..results import affine

    num_params = digits.spectrum_of(found, found.ends[0]).dim
    sizes = f"{digits.NUM_TRAIN:,} training and {digits.NUM_TEST} test digits"
    table = Table(
        title=f"ReLU network of {num_params:,} parameters, {sizes}, {found.settings.epochs} epochs",
        title_justify="left", title_style="bold", caption=NOTE, caption_justify="left", box=SIMPLE_HEAD, pad_edge=False,
        show_edge=False,
    )  # fmt: skip
    table.add_column("weight decay")
    for weight_decay in found.rows:
        table.add_column(weight_decay, justify="right", no_wrap=True)
    errors = [float(row["train_error"].value) for row in found.rows.values()]
    table.add_row("train acc., %", *(f"{100 * (1 - error):.1f}" for error in errors))
    for key, name in digits.COLUMNS.items():
        scale = 100.0 if key == "gap_error" else 1.0  # per cent
        cells = [cell(affine(row[key], scale)) for row in found.rows.values()]
        table.add_row(name, *cells, end_section=key in ("gap_loss", "spectral_norm"))
    console.print()
    console.print(table)
    for sentence in digits.findings(found):
        console.print(f"\n{sentence}")
