"""The command line: parse, make one library call, write files. No numerics, and no torch before there is work to do."""

from collections.abc import Sequence
from pathlib import Path

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


def _version() -> int:
    """Print the version of ritz."""
    from .. import __version__

    print(f"ritz {__version__}")
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Run a command given as words, those of the process by default, and return its exit status."""
    import tyro

    app = tyro.extras.SubcommandApp()
    app.command(name="demo")(_demo)
    app.command(name="version")(_version)
    status: int = app.cli(prog="ritz", description=DESCRIPTION, args=args)
    return status
