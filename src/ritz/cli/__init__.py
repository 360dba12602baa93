"""The command line: parse, make one library call, write files. No numerics, and no torch before there is work to do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

DESCRIPTION = "The curvature of a neural network's loss: measured matrix-free, with error bars, and put to use."


def _demo(
    out: Path = Path("ritz-demo"),
    seed: int = 0,
    epochs: int = 100,
    device: str = "cpu",
) -> int:
    """Train one small network on scikit-learn's digits at four weight decays and measure the curvature of each.

    Prints a table of gaps and measures with their errors and what it says; writes the table (JSON), the spectra and a
    figure. Well under a minute.

    Args:
        out: Folder to write into; made if it is not there.
        seed: Of the start, the order of batches and the probes.
        epochs: Of training, for each weight decay.
        device: Where to compute, cpu or cuda.
    """
    from .demo import run

    return run(out, seed, epochs, device)


def _reproduce(
    paper: Positional[str | None] = None,
    item: Positional[str | None] = None,
    budget: Literal["smoke", "short", "paper"] = "short",
    out: Path = Path("results"),
    data: Path | None = None,
    device: str = "cpu",
    seeds: int | None = None,
) -> int:
    """Train what a paper trained, measure what it measured, and print its numbers, ours and the verdicts.

    Without a paper: the list of experiments. Writes OUT/PAPER/ITEM.json.

    Args:
        paper: false-friend, pac-bayes, margins or damping.
        item: One experiment of it; all of them if not said.
        budget: smoke (seconds: does it run?), short (minutes) or paper (as published).
        out: Folder to write into; made if it is not there.
        data: Folder with the data sets in torchvision's layout; RITZ_DATA if not said.
        device: Where to compute, cpu or cuda.
        seeds: How many, in the place of the budget's own number.
    """
    from .reproduce import run

    return run(paper, item, budget, out, data, device, seeds)


def _version() -> int:
    """Print the version of ritz."""
    from .. import __version__

    print(f"ritz {__version__}")
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Run a command given as words, those of the process by default, and return its exit status."""
    app = tyro.extras.SubcommandApp()
    app.command(name="demo")(_demo)
    app.command(name="reproduce")(_reproduce)
    app.command(name="version")(_version)
    status: int = app.cli(prog="ritz", description=DESCRIPTION, args=args)
    return status
