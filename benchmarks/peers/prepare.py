"""Compiling ahead: several processes at once fill the cache on disk that the one process which is timed reads.

A compilation takes most of a minute on one core. What is timed side by side must be in one process, but what it needs
compiled need not be compiled there: each job here is one function of one case, in a process of its own. What
that took, with a cold cache and other jobs beside it, is kept with the rows as "cold"; what is "begun" there are the
first calls in the process that is timed, which traces anew and finds the rest.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import ritz

COMPILED, GRADIENT = "ritz, compiled", "gradient, compiled"
ASKED = ("problem", "precision", "device", "batch_size", "tool", "matrix", "k", "plan")  # what a job is
CALLS = 2
WIDTH = 8  # vectors that a spectrum multiplies at a time
# of what vectors share: there is no room for it over all the data, to which times are extrapolated
NOTHING_KEPT = {"cache": False}
FOLDER = Path("build/inductor")  # of the cache, where the environment names none

Job = dict[str, Any]


def jobs_of(args: argparse.Namespace, cases: Iterable[tuple[str, str, str, int]]) -> list[Job]:
    """One for the products of each case and one for each gradient, those that take longest first."""
    found: dict[tuple[Any, ...], Job] = {}
    common = {"device": args.device, "batch_size": args.batch_size}
    for name, precision, matrix, k in cases:
        one = {"problem": name, "precision": precision, **common}
        if args.compile:
            found[name, precision, matrix, k] = {**one, "tool": COMPILED, "matrix": matrix, "k": k}
        found.setdefault((name, precision), {**one, "tool": GRADIENT})
    return sorted(found.values(), key=lambda job: (-job.get("k", 0), job.get("matrix", "") != "Hessian"))


def cold(prepared: dict[str, Any] | None, problem: str, tool: str, case: dict[str, Any]) -> float | None:
    """The seconds of first calls that found nothing in the cache, where they were prepared."""
    return next((job["first"] for job in _jobs(prepared, problem, tool, case)), None)


def _jobs(prepared: dict[str, Any] | None, problem: str, tool: str, case: dict[str, Any]) -> Iterator[Job]:
    """That of one tool in one case."""
    wanted = {"problem": problem, "tool": tool, **case}
    for job in (prepared or {}).get("jobs", []):
        if all(wanted.get(key) == job[key] for key in ("problem", "precision", "tool", "matrix", "k") if key in job):
            yield job


def failure(prepared: dict[str, Any] | None, problem: str, tool: str, case: dict[str, Any]) -> str:
    """Why something could not be compiled ahead, so that it is not tried again; with more memory it may be."""
    said = (job["failed"] for job in _jobs(prepared, problem, tool, case) if "OutOfMemory" not in job["failed"])
    return next(said, "")


def prepare(jobs: list[Job], workers: int, patience: float) -> dict[str, Any]:
    """Run jobs, so many at a time, and tell what they took; those for which memory did not suffice, once more alone."""
    folder = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(FOLDER.absolute())))
    was_there = folder.exists() and any(folder.iterdir())
    workers = max(1, min(workers, len(jobs)))
    threads = max(1, (os.cpu_count() or 1) // workers)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as told:
        pool = _Pool(threads, start + patience, Path(told))
        done = pool.run(jobs, workers)
        crowded = [job for job in done if "OutOfMemory" in job["failed"]]
        if crowded and workers > 1:
            again = pool.run([{key: job[key] for key in ASKED if key in job} for job in crowded], 1)
            done = [job for job in done if job not in crowded] + again
    return {
        "workers": workers, "compile threads of each": threads, "seconds": time.perf_counter() - start,
        "cache was empty": not was_there, "jobs": done,
    }  # fmt: skip


class _Pool:
    """Processes, some at a time, until a moment by the clock."""

    def __init__(self, threads: int, end: float, told: Path) -> None:
        here = str(Path(__file__).parent.parent)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths),
                            "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}  # fmt: skip
        self.end, self.told = end, told

    def run(self, jobs: list[Job], workers: int) -> list[Job]:
        waiting, done = list(jobs), []
        running: dict[subprocess.Popen[bytes], tuple[Job, Path]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < workers and time.perf_counter() < self.end:
                    process, out = self._start(waiting[0])
                    running[process] = waiting.pop(0), out
                late = time.perf_counter() > self.end
                done += [{**job, "first": None, "failed": "not begun: out of time"} for job in waiting if late]
                waiting = [] if late else waiting
                for process in [p for p in running if late or p.poll() is not None]:
                    job, out = running.pop(process)
                    done.append(job | _outcome(process, out))
                    print(f"  prepared {_named(done[-1])}", flush=True)
                time.sleep(0.1)
        finally:
            for process in running:
                _end(process)
        return done

    def _start(self, job: Job) -> tuple["subprocess.Popen[bytes]", Path]:
        command = [sys.executable, "-m", "peers.prepare", json.dumps(job)]
        out = self.told / f"{len(list(self.told.iterdir()))}.txt"
        with out.open("wb") as file:
            # in a session of its own, so that it ends with its compilers
            process = subprocess.Popen(
                command, env=self.environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        return process, out


def _outcome(process: "subprocess.Popen[bytes]", out: Path) -> dict[str, Any]:
    """What a worker told in its last line."""
    if process.poll() is None:
        _end(process)
        return {"first": None, "failed": "out of time"}
    lines = out.read_text(encoding="utf8", errors="replace").splitlines() or [""]
    try:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    except json.JSONDecodeError:
        return {"first": None, "failed": f"ended with {process.returncode}: {lines[-1][:160]}"}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """It and its compilers, which are given a moment to take back files that are half written."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=3)


def _named(job: Job) -> str:
    parts = (job["problem"], job["tool"], job.get("matrix", ""), str(job.get("k", "")))
    return f"{', '.join(filter(None, parts))}: {job['failed'] or format(job['first'], '.0f') + ' s'}"


def warm_up(H: ritz.Hessian) -> None:
    """What a run of the spectrum makes for the first time."""
    for _ in range(3):  # chosen, recorded, replayed
        H @ torch.ones(H.dim, WIDTH, dtype=H.dtype, device=H.device)


# ---------------------------------------------------------------------------------------------- the worker


def compile_one(job: Job) -> dict[str, Any]:
    """One function, called until it is compiled: the seconds of that, and what was said of them."""
    from . import tools
    from .clock import reason
    from .problems import make
    from .rows import heard

    found: dict[str, Any] = {"first": None, "failed": "", "said": []}
    try:
        problem = make(job["problem"], job["device"], batch_size=job["batch_size"])
        with tools.multiplied(job["precision"]), heard() as found["said"]:
            if job["tool"] == GRADIENT:
                found["first"] = _begun(tools.gradient_arms(problem, True)[GRADIENT], job["device"])
            else:
                own = tools.ours(problem, job["matrix"], compile=True, **job.get("plan", {}))
                V = tools.vectors(problem, job["k"])
                found["first"] = _begun(lambda: own(V), job["device"])
                if not own.way["compiled"]:
                    found["failed"] = next(reversed(found["said"]), "not compiled, taken as it is")
    except Exception as error:  # out of memory, or a compiler's own
        found["failed"] = reason(error)
    return found


def _begun(fn: Callable[[], Any], device: str) -> float:
    """Seconds by the wall of the first calls: at the first one a route may be chosen, so that the next is compiled."""
    start = time.perf_counter()
    for _ in range(CALLS):
        fn()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    print("\n" + json.dumps(compile_one(json.loads(sys.argv[1]))))
