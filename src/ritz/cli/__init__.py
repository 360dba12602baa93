"""The command line: parse, make one library call, write files. No numerics, and no torch before there is work to do."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from .allocation import keep_freed
from .interrupts import listening
from .pipes import lasting
from .specs import Common, CompareSpec, DoctorSpec, MeasureSpec, SpectrumSpec, Switch

DESCRIPTION = "The curvature of a neural network's loss: measured matrix-free, with error bars, and put to use."


def _demo(
    out: Annotated[Path, arg(metavar="DIR")] = Path("ritz-demo"),
    seed: int = 0,
    epochs: int = 100,
    device: str = "cpu",
    dtype: Literal["float32", "float64"] = "float32",
    json: Switch = False,
) -> int:
    """Train one small network on scikit-learn's digits at four weight decays and measure the curvature of each.

    Prints a table of gaps and measures with their errors, and the findings. Writes a run folder with a page for the
    browser, the table (JSON), the spectra and a figure. Takes less than a minute.

    Args:
        out: Folder of the run. A finished run is read back; a different run is refused.
        seed: Seed of the initial weights, the order of batches and the probes.
        epochs: Epochs of training for each weight decay.
        device: Device of the computation, cpu or cuda.
        dtype: Precision of training and measuring.
        json: Print one JSON object on stdout, and nothing else.
    """
    from .demo import run

    return run(out, seed, epochs, device, dtype, json)


def _reproduce(
    paper: Annotated[str | None, Positional, arg(metavar="[PAPER]", help_behavior_hint="(without: a list)")] = None,
    item: Annotated[str | None, Positional, arg(metavar="[ITEM]", help_behavior_hint="(without: all of them)")] = None,
    budget: Literal["smoke", "short", "paper"] = "short",
    out: Annotated[Path, arg(metavar="DIR")] = Path("results"),
    data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: RITZ_DATA)")] = None,
    device: str = "cpu",
    seeds: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the budget's)")] = None,
    workers: int = 1,
    runs: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: nothing is kept)")] = None,
    fast: Switch = False,
    more: Switch = False,
    slurm: Annotated[str | None, arg(metavar="PARTITION", help_behavior_hint="")] = None,
    commit: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: git's)")] = None,
    json: Switch = False,
) -> int:
    """Repeat a paper's experiments, and print its numbers, ours and the verdicts.

    Without a paper: list the experiments, and which results are in OUT. Writes OUT/PAPER/ITEM.json.

    Args:
        paper: false-friend, pac-bayes, margins or damping; or the number of a seed, 000 to 004.
        item: One experiment of the paper.
        budget: smoke (seconds: does it run?), short (minutes) or paper (as published).
        out: Folder of results; created if it does not exist. One of a longer budget stays, and this goes to OUT/BUDGET.
        data: Folder with the data sets in torchvision's layout.
        device: Device of the computation, cpu or cuda.
        seeds: Number of seeds.
        workers: Number of training runs at a time, each in its own process on the same device.
        runs: Folder in which training runs and measurements are kept: after a kill, the same command goes on from them.
        fast: Train in bfloat16 by compiled passes, if the method allows it; measure in float32. Results say so.
        more: Add seeds to the results that are in OUT, after those that they have, and judge all together.
        slurm: Train every run as a SLURM job of this partition; needs submitit, and --runs in a folder that all
            machines see. Data and measurements stay with this command.
        commit: Commit of the code, if git cannot tell.
        json: Print one JSON array of the results on stdout, and nothing else.
    """
    from .reproduce import run

    return run(
        paper, item, out, slurm, json, more, budget=budget, data=data, device=device, seeds=seeds, workers=workers,
        runs=runs, fast=fast, commit=commit,
    )  # fmt: skip


def _report(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: RUN/report.html)")] = None,
    json: Switch = False,
) -> int:
    """Write a run folder as one HTML page, which opens in any browser and fetches nothing.

    Args:
        run: Folder of the run, such as ritz-runs/measure-1.
        out: The page.
        json: Print one JSON object on stdout, and nothing else.
    """
    from .report import run as report

    return report(run, out, json)


def _run(spec: Common) -> int:
    """The command whose settings these are."""
    if isinstance(spec, MeasureSpec):
        from .measure import run as measure

        return measure(spec)
    if isinstance(spec, CompareSpec):
        from .compare import run as compare

        return compare(spec)
    if isinstance(spec, SpectrumSpec):
        from .spectrum import run as spectrum

        return spectrum(spec)
    assert isinstance(spec, DoctorSpec)
    from .doctor import run as doctor

    return doctor(spec)


def _version() -> int:
    """Print the version of ritz."""
    from .. import __version__

    print(f"ritz {__version__}")
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Run a command given as words, those of the process by default, and return its exit status."""
    if args is None:  # the process is the command's
        keep_freed()
    with lasting():
        try:
            with listening():
                return _main(args)
        except KeyboardInterrupt:  # outside the work of a command, which says what it has kept
            from .screen import INTERRUPTED

            print("\nritz: stopped by the keyboard before there was anything to keep", file=sys.stderr)
            return INTERRUPTED


COMMANDS: dict[str, Callable[..., int | Common]] = {
    "demo": _demo, "measure": MeasureSpec, "compare": CompareSpec, "spectrum": SpectrumSpec, "doctor": DoctorSpec,
    "reproduce": _reproduce, "report": _report, "version": _version,
}  # fmt: skip


def _main(args: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if args is None else args)
    typed = _version() if words == ["--version"] else _typed(words)
    return _run(typed) if isinstance(typed, Common) else typed


def _typed(words: list[str]) -> int | Common:
    """What the words ask for; a command is parsed by itself, so that a wrong option leads to the help of that one."""
    if words and words[0] in COMMANDS:
        return tyro.cli(COMMANDS[words[0]], prog=f"ritz {words[0]}", args=words[1:])
    app = tyro.extras.SubcommandApp()
    for name, command in COMMANDS.items():
        app.command(name=name)(command)
    typed: int | Common = app.cli(prog="ritz", description=DESCRIPTION, args=words)
    return typed
