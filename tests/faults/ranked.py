"""Ranks that work together and are killed, one of them between the two halves of a save."""

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist
from faults import jobs

import ritz
from ritz.checkpoint import Checkpoint, Saved

GIVEN = {"num_steps": 6, "num_probes": 4, "products": 90}


def warm() -> None:
    """All that is loaded when first used."""
    ritz.spectrum(ritz.Hessian(jobs.make_risk(), route="reverse"), 1, 1, products=20)


def spectrum(folder: str, mode: str, progress: Any = None) -> Any:
    H = ritz.Hessian(jobs.make_risk(), route="reverse")
    kept = Checkpoint(folder, every=0) if folder else None
    return ritz.spectrum(H, **GIVEN, reorthogonalize=mode, checkpoint=kept, progress=progress)


def torn(folder: str, mode: str) -> str:
    """Rank 1 dies when the others have written a state and it has not; they end with its name."""
    real, left = Saved._write_manifest, [7]

    def write(self: Saved, parts: Any) -> None:
        left[0] -= 1
        if dist.get_rank() == 1 and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, parts)

    Saved._write_manifest = write  # type: ignore[method-assign]
    try:
        spectrum(folder, mode)
    except ritz.errors.RitzError as error:
        return type(error).__name__
    return "went on"


def resumed(folder: str, mode: str) -> tuple[int, list[str], str, str]:
    """From which product the run goes on, which states there were, and what it finds, beside a run of its own."""
    rank, reports = Path(folder) / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}", []
    states = sorted(path.name for path in rank.glob("state-*.json"))
    found = spectrum(folder, mode, lambda done, _: reports.append(done))
    return reports[0], states, jobs.bits(found), jobs.bits(spectrum("", mode))


def stopped(folder: str) -> tuple[str, str, str]:
    """One rank hears a signal, and all stop."""

    def progress(done: int, _: int) -> None:
        if done > 40 and dist.get_rank() == 1 and not heard:
            heard.append(done)
            signal.raise_signal(signal.SIGTERM)

    heard: list[int] = []
    with ritz.stoppable():
        cut = spectrum(folder, "locked", progress)
    return cut.stop, jobs.bits(spectrum(folder, "locked")), jobs.bits(spectrum("", "locked"))
