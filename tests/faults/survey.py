"""Tries many faults and writes docs/faults.md: what was done to runs, and what came of it.

python tests/faults/survey.py --kills 200 --out docs/faults.md
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from faults.trials import Server, Trial, Whole, killed, left_alone, names  # noqa: E402

from ritz import provenance  # noqa: E402

ERRORS = {"ENOSPC": "disk full", "EROFS": "read-only folder", "EIO": "disk that fails"}
PAGE = """# Faults

What happens to a long run when its process is killed, its disk is full, or its numbers are not finite.

- `ritz.spectrum`, `block_spectra`, `trace`, `sample_traces`, `top_eigenpairs`, `solve`, `measure`, `compare` and
  `audit` take `checkpoint=folder`, and the commands keep their state in the run folder. A kill loses one minute, or the
  product in hand if that takes longer; the same call, or command, goes on, and on a CPU ends in the same bits as a run
  that was left alone.
- The state has a fingerprint of the weights, the data, the settings, the plan and the code. Another run in the same
  folder is refused: both fingerprints are named, and what differs.
- A state that is damaged, a disk that is full, a folder that cannot be written to: an error that says so. What was
  saved before is as it was.
- SIGINT and SIGTERM let the product in hand end; the state is saved, what is known is printed with the reason, and the
  exit status is 128 + the number of the signal. A second one ends the process at once.
- A loss, gradient or product that is NaN or infinite ends the run with the batch, the layer or parameter and the dtype
  named; what the steps before it give is returned.
- Where memory runs out, a batch is taken in halves, or vectors fewer at a time, on all ranks together, and so from then
  on; that is said, and kept with the state. A batch that is part of the function, as with batch statistics, is not cut:
  the error says how many samples would fit.
- A rank that is killed, asleep or frozen is named to the others within a minute, and the run ends.

## Killed, and gone on with

Each run is killed by SIGKILL one to three times, by the clock or before a random operation on a file (opening, moving,
removing, `fsync`), with a save after every product, and then left to end. "Same bits" counts those that ended exactly
as the run that was left alone, all numbers and tensors but for the times; "products lost" is the most that one kill
cost, in batched products, where the run reports them.

{kills}

## Disks that fail

Every operation on files fails from a random one on; then the disk is well again and the same call is made.

{disks}

## Injected

What is tried besides, on every change; a test is one fault and what must come of it.

{injected}

Made by `make faults` at commit {commit}: {count} runs, seed {seed}, {seconds:.0f} s on {machine}, torch {torch}.
"""
INJECTED = {
    "faults/test_diagnoses.py": "memory that runs out, in one process; data, layers and gradients that are not finite",
    "faults/test_numbers.py": "products that break, bases not orthogonal, matrices not definite, noise, signals",
    "faults/test_disk.py": "states that are damaged, of another run, or another process's",
    "faults/test_resumed.py": "stops at every kind of run, and states of another call",
    "faults/test_signals.py": "SIGINT and SIGTERM to commands, once and twice",
    "cli/test_sweep.py": "stops, kills, failures and want of memory in sweeps",
    "faults/test_ranks.py": "ranks that are killed within a save, or run out of memory in a pass that they share",
    "distributed/test_faults.py": "ranks that are killed, asleep or frozen; errors and want of memory of one of them",
}


def rows_of(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def kill_table(trials: list[Trial]) -> str:
    """A row for each job, and one for all."""
    jobs = {f"`{job}`": [t for t in trials if t.job == job] for job in dict.fromkeys(t.job for t in trials)}
    rows: list[tuple[Any, ...]] = []
    for name, own in {**jobs, "all": trials}.items():
        lost = [trial.lost for trial in own if trial.lost is not None]
        counts = len(own), sum(t.died for t in own), sum(t.survived for t in own)
        rows.append((name, *counts, max(lost) if lost else ""))
    return rows_of(("run", "runs", "kills", "same bits", "products lost"), rows)


def disk_trials(server: Server, wholes: dict[str, Whole], folder: Path, draw: random.Random, num: int) -> str:
    """Runs on disks that fail, by error."""
    told, same, count = Counter[str](), Counter[str](), Counter[str]()
    for number in range(num):
        error, job = list(ERRORS)[number % len(ERRORS)], names()[number % len(names())]
        at = draw.randint(1, wholes[job].operations)
        found = server.ask(job, folder / "run", error=error, at=at)
        said = found.get("error", "") or str(found.get("status", ""))
        count[error] += 1
        told[error] += "as it was" in said or said == "2" or found.get("bits") == wholes[job].bits
        same[error] += server.ask(job, folder / "run").get("bits") == wholes[job].bits
        shutil.rmtree(folder / "run")
    rows = [(ERRORS[error], count[error], told[error], same[error]) for error in ERRORS]
    return rows_of(("fault", "runs", "said so, or were done", "same bits after"), rows)


def injected_table(folder: Path) -> tuple[str, bool]:
    """A row for each file of tests, and whether all held."""
    rows: list[tuple[Any, ...]] = []
    for file, what in INJECTED.items():
        report = folder / "tests.xml"
        words = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"tests/{file}"]
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, stdout=sys.stderr, check=False)
        suite = ElementTree.parse(report).getroot()[0]
        count, skipped, *bad = (int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors"))
        rows.append((what, f"`tests/{file}`", count - skipped, count - skipped - sum(bad)))
    return rows_of(("injected", "where", "tests", "held"), rows), all(tried == held for *_, tried, held in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--disks", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begun, draw = time.monotonic(), random.Random(given.seed)
    with Server() as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wholes = {job: left_alone(server, job, folder / "run") for job in names()}
        trials = []
        for number in range(given.kills):
            job = names()[number % len(names())]
            trials.append(killed(server, job, wholes[job], folder / "run", draw))
            if not trials[-1].survived:
                sys.stderr.write(f"{trials[-1]}\n")
        disks = disk_trials(server, wholes, folder, draw, given.disks)
        injected, held = injected_table(folder)
    machine, versions = provenance.machine(), provenance.versions()
    text = PAGE.format(
        kills=kill_table(trials), disks=disks, injected=injected, commit=provenance.own_commit() or "unknown",
        count=given.kills + given.disks,
        seed=given.seed, seconds=time.monotonic() - begun, torch=versions["torch"],
        machine=f"{machine['processor']}, one thread",
    )  # fmt: skip
    sys.stdout.write(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf8")
    return 0 if held and all(trial.survived for trial in trials) else 1


if __name__ == "__main__":
    raise SystemExit(main())
