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

This page shows what happens to a long run when its process is killed, its disk is full, or its numbers are not finite.

- **Kills.** `ritz.spectrum`, `block_spectra`, `trace`, `sample_traces`, `top_eigenpairs`, `solve`, `measure`, `compare`
  and `audit` take `checkpoint=folder`, and the commands save their state in the run folder. A kill loses at most one
  minute of work, or the current product if that takes longer. The same call, or command, resumes the run. On a CPU, the
  result is bitwise identical to that of an uninterrupted run.
- **Another run in the folder.** The state has a fingerprint of the weights, the data, the settings, the plan and the
  code. Another run in the same folder is refused, with an error that names both fingerprints and what differs.
- **Disk errors.** A damaged state, a full disk, or a folder that is not writable raises an error that says so. What was
  saved before remains unchanged.
- **Signals.** After SIGINT or SIGTERM, the current product is completed and the state is saved. The results so far are
  printed with the reason, and the exit status is 128 + the number of the signal. A second signal ends the process at
  once.
- **Non-finite numbers.** A loss, gradient or product that is NaN or infinite ends the run. The message names the batch,
  the layer or parameter, and the dtype. The run returns the results of the steps before.
- **Out of memory.** The batch is split in halves, or fewer vectors are processed at a time, on all ranks together and
  for the rest of the run. This is reported, and saved with the state. A batch that is part of the function, as with
  batch statistics, cannot be split: the error then says how many samples would fit.
- **Lost ranks.** If a rank is killed, asleep or frozen, the others name it within a minute, and the run ends.

## Killed and resumed

Each run is killed by SIGKILL one to three times, by the clock or before a random file operation (opening, moving,
removing, `fsync`), with a save after every product, and then left to finish. "Same bits" counts the runs whose result
was identical to that of an uninterrupted run, in all numbers and tensors except the times. "Products lost" is the
largest loss from one kill, in batched products, where the run reports them.

{kills}

## Disks that fail

Every file operation fails from a random one on. Then the disk works again, and the same call is repeated.

{disks}

## Fault injection in the tests

The tests inject more faults on every change. Each test is one fault and its required outcome.

{injected}

Made by `make faults` at commit {commit}: {count} runs, seed {seed}, {seconds:.0f} s on {machine}, torch {torch}.
"""
INJECTED = {
    "faults/test_diagnoses.py": "out of memory in one process; non-finite data, layers and gradients",
    "faults/test_numbers.py": "failing products, non-orthogonal bases, indefinite matrices, noise, signals",
    "faults/test_disk.py": "states that are damaged, or belong to another run or another process",
    "faults/test_resumed.py": "stops of every kind of run, and states of another call",
    "faults/test_signals.py": "SIGINT and SIGTERM to commands, once and twice",
    "cli/test_sweep.py": "stops, kills, failures and out of memory in sweeps",
    "faults/test_ranks.py": "ranks that are killed during a save, or run out of memory in a shared pass",
    "distributed/test_faults.py": "ranks that are killed, asleep or frozen; an error or out of memory on one rank",
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
    return rows_of(("fault", "runs", "reported, or finished", "same bits after"), rows)


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
    return rows_of(("fault", "where", "tests", "passed"), rows), all(tried == held for *_, tried, held in rows)


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
