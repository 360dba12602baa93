"""Small runs that are killed, starved and poisoned. Each takes a folder and returns what it found."""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import ritz
from ritz import checkpoint, storage

Progress = Callable[..., None]

STUDY = """
import torch
from torch import nn

import ritz


def make_risk():
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, X[:, :3].argmax(1)), batch_size=16)
"""


def make_risk(seed: int = 0, width: int = 12, batch_size: int = 16) -> ritz.Risk:
    """191 parameters, more than the head takes whole; three batches, the last of another size, or more."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))
    X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, X[:, :3].argmax(1)), batch_size=batch_size)


def spectrum(folder: Path, progress: Progress, **options: Any) -> Any:
    H = ritz.Hessian(make_risk())
    return ritz.spectrum(
        H, 4, 4, products=options.pop("products", 60), progress=progress, checkpoint=folder / "state", **options
    )


def spectrum_full(folder: Path, progress: Progress) -> Any:
    return spectrum(folder, progress, reorthogonalize="full")


def spectrum_rounds(folder: Path, progress: Progress) -> Any:
    return spectrum(folder, progress, tol=0.2, products=110)


def top_eigenpairs(folder: Path, progress: Progress) -> Any:
    """Restarts a few times."""
    G = ritz.GGN(make_risk()) + 0.1
    return ritz.top_eigenpairs(G, 3, block=2, tol=1e-8, progress=progress, checkpoint=folder / "state")


def trace(folder: Path, progress: Progress) -> Any:
    return ritz.trace(ritz.Hessian(make_risk()), "hutch++", num_probes=48, checkpoint=folder / "state")


def trace_exact(folder: Path, progress: Progress) -> Any:
    """Two matrices, a walk over the data for each."""
    risk = make_risk(batch_size=4)
    return ritz.trace(ritz.GGN(risk) + ritz.EmpiricalFisher(risk), "exact", checkpoint=folder / "state")


def sample_traces(folder: Path, progress: Progress, **options: Any) -> Any:
    return ritz.sample_traces(
        make_risk(batch_size=4), num_probes=3, progress=progress, checkpoint=folder / "state", **options
    )


def measure(folder: Path, progress: Progress) -> Any:
    risk = make_risk()
    keys = ["train_loss", "weight_norm", "trace", "lambda_max", "effective_rank", "margin_q10", "top_log_product"]
    sizes = {"num_steps": 3, "num_probes": 4}
    return ritz.measure(risk, measures=keys, **sizes, progress=progress, checkpoint=folder / "state")


def compare(folder: Path, progress: Progress) -> Any:
    risks = {"first net": make_risk(0, width=3), "second net": make_risk(1, width=3)}
    sizes = {"num_steps": 4, "num_probes": 2}
    return ritz.compare(
        risks, measures=["trace", "train_loss"], **sizes, progress=progress, checkpoint=folder / "state"
    )


def block_spectra(folder: Path, progress: Progress, **options: Any) -> Any:
    """One layer is found whole."""
    H = ritz.Hessian(make_risk())
    return ritz.block_spectra(H, num_steps=10, num_probes=3, progress=progress, checkpoint=folder / "state", **options)


def block_spectra_full(folder: Path, progress: Progress) -> Any:
    return block_spectra(folder, progress, reorthogonalize="full")


def solve(folder: Path, progress: Progress) -> Any:
    """Two systems; one round of 24 steps and more."""
    G = ritz.GGN(make_risk()) + 1e-3
    b = G.probes(range(2), seed=0).T
    found = ritz.solve(G, b, tol=1e-4, progress=progress, checkpoint=folder / "state")
    names = ("x", "residuals", "converged", "num_steps", "products", "stop")
    return {name: getattr(found, name) for name in names}


def audit(folder: Path, progress: Progress) -> Any:
    keys = ["train_loss", "weight_norm", "trace", "lambda_max"]
    sizes = {"num_steps": 3, "num_probes": 2, "transforms": ["permute", "scale_output"]}
    return ritz.audit(make_risk(width=3), measures=keys, **sizes, progress=progress, checkpoint=folder / "state")


def write_weights(folder: Path) -> None:
    """The solutions of a sweep: whole or not there, also after a kill."""
    for seed, name in enumerate(("a.safetensors", "b.safetensors")):
        if not (folder / name).exists():
            save_file(make_risk(seed).model.state_dict(), folder / "part")
            (folder / "part").rename(folder / name)


def command(*words: str) -> Callable[[Path, Progress], Any]:
    """A command in a folder of its own; what it found is what its run folder holds."""

    def run(folder: Path, progress: Progress) -> Any:
        from ritz.cli import main

        (folder / "study.py").write_text(STUDY)
        write_weights(folder)
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            status = main([words[0], "study.py:make_risk", *words[1:], "--out", "run"])
        if status:
            raise SystemExit(status)
        return ritz.load(folder / "run" / "arrays")

    return run


JOBS: dict[str, Callable[[Path, Progress], Any]] = {
    "ritz.spectrum": spectrum,
    "ritz.spectrum, full": spectrum_full,
    "ritz.spectrum, rounds": spectrum_rounds,
    "ritz.top_eigenpairs": top_eigenpairs,
    "ritz.trace": trace,
    "ritz.trace, exact": trace_exact,
    "ritz.sample_traces": sample_traces,
    "ritz.measure": measure,
    "ritz.compare": compare,
    "ritz.block_spectra": block_spectra,
    "ritz.block_spectra, full": block_spectra_full,
    "ritz.solve": solve,
    "ritz.audit": audit,
    "ritz spectrum": command("spectrum", "--num-steps", "3", "--num-probes", "4"),
    "ritz measure": command("measure", "--measures", "trace", "train_loss", "--num-steps", "3", "--num-probes", "4"),
    "ritz compare": command(
        "compare", "--weights", "a.safetensors", "b.safetensors", "--measures", "trace", "train_loss", "--num-steps",
        "3", "--num-probes", "2",
    ),
}  # fmt: skip


def bits(found: Any) -> str:
    """A mark of every bit of a result but for the times."""
    tensors: dict[str, torch.Tensor] = {}
    tree = storage._encode(_timeless(found), "", tensors)
    mark = hashlib.blake2b(json.dumps(tree).encode(), digest_size=16)
    for _, tensor in sorted(tensors.items()):
        mark.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return mark.hexdigest()


def _timeless(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _timeless(each) for name, each in found.items()}
    if isinstance(found, ritz.measures.measure.Measurement):
        return replace(found, seconds={})
    if isinstance(found, ritz.measures.compare.Comparison):
        return replace(found, measurements=_timeless(dict(found.measurements)))
    if isinstance(found, ritz.measures.audit.Audit):
        return replace(found, before=_timeless(found.before), after=_timeless(dict(found.after)))
    return found


def run(name: str, folder: Path, every: float = 0.0) -> str:
    """A job in this process, with what it reports in a file; the mark of what it found."""
    checkpoint.EVERY = every
    told = (folder / "told").open("ab", buffering=0)

    def progress(*words: Any) -> None:
        if isinstance(words[0], int):
            told.write(f"{words[0]}\n".encode())

    with told:
        told.write(f"process {os.getpid()}\n".encode())
        return bits(JOBS[name](folder, progress))
