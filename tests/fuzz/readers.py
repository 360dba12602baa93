"""Every reader of files that the package has, with files that it reads and what they hold."""

import contextlib
import gzip
import json
import pickle
import platform
import random
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz import mutations
from fuzz.judging import Wrong
from torch import Tensor, nn

import ritz
from ritz import loggers, storage
from ritz.cli.study import read_weights
from ritz.doctor import Checkup, Finding
from ritz.locks import lock, unlock
from ritz.operators import DenseOperator
from ritz.papers import pages, pool
from ritz.papers.checkpoints import Folder
from ritz.papers.data import Archive, DataSet, File
from ritz.papers.data import load as load_data
from ritz.papers.data.pickles import read_pickle
from ritz.papers.recipe import Recipe, on_parameters
from ritz.papers.train import train
from ritz.report import of_run
from ritz.runs import Run

RESULTS = Path(__file__).parents[2] / "results"
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 3, generator=G), torch.randint(2, (6,), generator=G)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A reader under test.

    Attributes:
        name: Of what it reads.
        make: Writes a good folder.
        read: Reads it.
        verify: Raises `Wrong` if what was read is not whole, given what the good folder held.
        sealed: Whether a file carries a checksum: what loads after bytes were damaged is then what was saved.
        stems: Results in the folder, which a forger would seal again.
        extra: Hostile contents for a file besides damaged ones, given the canary.
        mutated: Which files are damaged.
    """

    name: str
    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    verify: Callable[[Any, Any], None]
    sealed: bool = False
    stems: Sequence[str] = ()
    extra: Callable[[Path], Sequence[bytes]] | None = None
    mutated: str = "*"
    good: dict[str, bytes] = field(default_factory=dict)

    @cache  # noqa: B019, one for each reader
    def prepared(self, scratch: Path) -> Any:
        """Write the good folder once, keep its bytes, and return what it holds."""
        place = scratch / "good" / self.name
        place.mkdir(parents=True)
        self.make(place)
        files = sorted(path for path in place.rglob("*") if path.is_file())
        self.good.update({path.relative_to(place).as_posix(): path.read_bytes() for path in files})
        return self.read(place)

    def __hash__(self) -> int:
        return hash(self.name)


def lay(folder: Path, files: Mapping[str, bytes]) -> None:
    """A folder with these files and no others."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, raw in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(raw)


def damage(reader: Reader, folder: Path, canary: Path, rng: random.Random) -> tuple[str, bool]:
    """Lay a good folder and damage it; in words, and whether a forger has sealed it again."""
    lay(folder, reader.good)
    name = rng.choice([name for name in reader.good if Path(name).match(reader.mutated)])
    path, raw = folder / name, reader.good[name]
    kind = rng.randrange(100)
    if kind < 6:
        return f"{name}: {mutations.odd_file(path, rng)}", True
    if kind < 14:
        other = rng.choice(list(reader.good))
        path.write_bytes(reader.good[other])
        return f"{name}: {other} in its place", True
    if kind < 35 and reader.extra is not None:
        number, hostile = rng.choice(list(enumerate(reader.extra(canary))))
        path.write_bytes(hostile)
        return f"{name}: hostile {number}", True
    how = rng.choice(mutations.BYTES)
    forged = False
    if kind >= 50:
        structure = {
            ".json": mutations.wrong_tree,
            ".jsonl": mutations.wrong_line,
            ".safetensors": mutations.wrong_head,
        }
        how = structure.get(path.suffix, how)
        forged = how is not mutations.wrong_line and how not in mutations.BYTES
    path.write_bytes(how(raw, rng))
    if forged and rng.randrange(4):
        for stem in reader.stems:
            mutations.resealed(folder, stem)
    return f"{name}: {how.__name__}{' and sealed' if forged else ''}", forged


# ------------------------------------------------------------------------------------------------- results


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@cache
def measurement() -> Any:
    risk = ritz.Risk(net(), nn.CrossEntropyLoss(), (X, Y))
    return ritz.measure(risk, test=risk.on((X[:4], Y[:4])), num_steps=6, num_probes=3)


@cache
def results() -> dict[str, Any]:
    """One of each kind."""
    spectrum = ritz.spectrum(ritz.Hessian(ritz.Risk(net(), nn.CrossEntropyLoss(), (X, Y))), num_steps=5, num_probes=3)
    optimizer = torch.optim.AdamW(net().parameters())
    part = ritz.Estimate(name="fc", value=1.0, stderr=0.5, samples=torch.arange(3.0))
    estimate = ritz.Estimate(
        name="trace", value=3.0, stderr=0.1, bracket=(2.0, 4.0), seed=3, convention="λ / N", parts={"fc": part}
    )
    claim = ritz.papers.base.Claim(paper="seed 000", where="table 1", text="a", expected=1.0, measured=estimate)
    tree = {"state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2, 3).T}}, "groups": optimizer.state_dict()}
    pairs = ritz.top_eigenpairs(ritz.GGN(ritz.Risk(net(), nn.CrossEntropyLoss(), (X, Y))), k=2)
    return {
        "number": ritz.Estimate(name="trace", value=3.0, exact=True), "estimate": estimate, "spectrum": spectrum,
        "claim": claim, "state": tree, "pairs": pairs, "measurement": measurement(),
    }  # fmt: skip


def loads_again(found: Any, _: Any, scratch: Path) -> None:
    """What was read can be saved, and is the same when it is read again."""
    if not storage.equal(storage.load(storage.save(found, scratch / "again")), found):
        raise Wrong("what was read is another thing when it is saved and read again")


def result_reader(name: str, scratch: Path) -> Reader:
    return Reader(
        name=f"result {name}", make=lambda folder: storage.save(results()[name], folder / "result"),
        read=lambda folder: storage.load(folder / "result"), verify=partial(loads_again, scratch=scratch), sealed=True,
        stems=("result",),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- weights


def check_tensors(found: Any, good: Any) -> None:
    """Named tensors, no larger than the file could hold."""
    if not isinstance(found, Mapping):
        return  # a tree of plain values: nothing was run, and whoever wants tensors refuses it
    held = sum(t.untyped_storage().nbytes() for t in found.values() if isinstance(t, Tensor))
    if held > 1 << 20:
        raise Wrong(f"{held} bytes came out of a file of a few hundred")


def save_tensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(net().state_dict(), folder / "net.safetensors")


def old_torch(folder: Path) -> None:
    torch.save(net().state_dict(), folder / "net.pt", _use_new_zipfile_serialization=False)


# ---------------------------------------------------------------------------------------------------- data

NOWHERE = Archive("none", "none", "", 0)
SMALL = DataSet(
    name="small", form="idx", shape=(1, 2, 3), classes=4, train=(File("x", "", NOWHERE), File("y", "", NOWHERE))
)


def idx(raw: Tensor) -> bytes:
    return bytes([0, 0, 8, raw.ndim]) + b"".join(struct.pack(">I", n) for n in raw.shape) + bytes(raw.flatten())


def save_idx(folder: Path) -> None:
    pixels = torch.randint(256, (9, 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    (folder / "x").write_bytes(idx(pixels))
    (folder / "y.gz").write_bytes(gzip.compress(idx(torch.arange(9, dtype=torch.uint8) % 4), mtime=0))


def check_images(found: Any, good: Any) -> None:
    images, labels = found
    if images.shape[1:] != good[0].shape[1:] or len(images) != len(labels) or not 0 <= int(labels.min()) <= 4:
        raise Wrong(f"images {tuple(images.shape)} and labels {tuple(labels.shape)}")


@cache
def swelling(_: Path) -> list[bytes]:
    """Heads that promise much, and a small file that holds much."""
    head = bytes([0, 0, 8])
    return [
        gzip.compress(bytes(64 << 20), 9), head + bytes([255]) + b"\xff" * 1020, head + bytes([0]) + b"\1",
        head + bytes([3]) + b"\0\0\0\0" + b"\xff" * 8, head + bytes([1]) + bytes(4), gzip.compress(b""),
    ]  # fmt: skip


def save_cifar(folder: Path) -> None:
    content = {b"data": np.arange(24, dtype=np.uint8).reshape(2, 12), b"labels": [3, 1], b"filenames": [b"a", b"b"]}
    (folder / "batch").write_bytes(pickle.dumps(content, protocol=3))


def read_cifar(folder: Path) -> tuple[Tensor, Tensor]:
    from ritz.reading import content

    return read_pickle(content(folder / "batch"), "labels", folder / "batch")


def check_rows(found: Any, good: Any) -> None:
    images, labels = found
    if images.ndim != 2 or images.dtype != torch.uint8 or labels.shape != images.shape[:1] or images.numel() > 5000:
        raise Wrong(f"rows {tuple(images.shape)} and labels {tuple(labels.shape)}")


# -------------------------------------------------------------------------------------------------- papers

RECIPE = Recipe(
    name="tiny", model=partial(nn.Linear, 3, 2), optimizer=partial(on_parameters, kind=torch.optim.Adam, lr=0.1),
    epochs=1, batch_size=6,
)  # fmt: skip
DATA = {"train": (X, Y)}


def save_training(folder: Path) -> None:
    train(RECIPE, DATA, folder=folder)


def read_training(folder: Path) -> Any:
    """Go on with a run that has ended: all that is kept of it is read."""
    done = train(RECIPE, DATA, folder=folder)
    return {"weights": done.model.state_dict(), "steps": done.steps, "rows": done.history.rows}


def check_training(found: Any, good: Any) -> None:
    shapes = [{name: t.shape for name, t in one["weights"].items()} for one in (found, good)]
    if shapes[0] != shapes[1] or not all(isinstance(row.get("step"), int) for row in found["rows"]):
        raise Wrong("a run with other weights, or rows without steps")


def read_folder(folder: Path) -> Any:
    opened = Folder(folder, RECIPE, DATA)
    try:
        return opened.newest()
    finally:
        opened.unlock()


def save_papers(folder: Path) -> None:
    source = RESULTS / "margins" / "affine.json"
    tree = json.loads(source.read_text(encoding="utf8"))
    (folder / "margins").mkdir()
    (folder / "margins" / "affine.json").write_text(json.dumps(tree | {"claims": tree["claims"][:2]}), encoding="utf8")


def read_papers(folder: Path) -> Any:
    return pages.pages(pages.read_results(folder), table=())


def save_run(folder: Path) -> None:
    folder.rmdir()
    spectrum, estimate = results()["spectrum"], results()["estimate"]
    rows = [{"step": step, "loss": 1.0 / (step + 1)} for step in range(3)]
    with Run.start(folder, "spectrum", {"num_steps": 5}, subject={"model": "Net", "num_params": 26}) as run:
        run.event("progress", text="head", part=0.5)
        checkup = Checkup(model="Net", convention="", findings=(Finding("linear", "ok", "<b>"),))
        run.keep(spectrum=spectrum, trace=estimate, training=rows, checkup=checkup.plain())


def read_run(folder: Path) -> Any:
    run = Run.open(folder)
    return run.header, run.results, run.events()


def check_run(found: Any, good: Any) -> None:
    header, kept, events = found
    if not isinstance(header, dict) or not isinstance(kept, dict) or not all(isinstance(e, dict) for e in events):
        raise Wrong("a run without a header, results or events")
    if header["state"] == "done" and set(kept) < set(header["results"]):
        raise Wrong("a run that is done has lost results")


def check_page(found: Any, good: Any) -> None:
    if not found.rstrip().endswith("</html>") or "\ud800" in found:
        raise Wrong("a page that is cut short")
    for script in ("<script>alert", "javascript:", "<b>linear"):
        if script in found:
            raise Wrong(f"{script} on the page")


A = DenseOperator(torch.diag(torch.linspace(-1, 3, 40)))


def save_state(folder: Path) -> None:
    """The state of a run that was killed on the way."""
    with contextlib.suppress(InterruptedError):
        ritz.spectrum(A, 8, 2, reorthogonalize="full", checkpoint=ritz.Checkpoint(folder, every=0), progress=_killed)
    (folder / "lock").unlink(missing_ok=True)


def _killed(done: int, _: int) -> None:
    if done > 10:
        raise InterruptedError


def read_state(folder: Path) -> Any:
    return ritz.spectrum(A, 8, 2, reorthogonalize="full", checkpoint=ritz.Checkpoint(folder, every=1e9))


def check_state(found: Any, good: Any) -> None:
    if found != good:
        raise Wrong("a run that was gone on with ends in another result")


def save_lock(folder: Path) -> None:
    """Of a process that is dead."""
    said = {"process": 1 << 22, "machine": platform.node(), "began": "1", "mark": "0"}  # more than Linux ever counts to
    (folder / "lock").write_text(json.dumps(said))


def read_lock(folder: Path) -> None:
    unlock(folder / "lock", lock(folder / "lock", "works in"))


def save_found(folder: Path) -> None:
    run = {"stop": "finished", "steps": 3, "seconds": 1.5}
    found = {"finish": {"call": "f"}, "run": run, "found": {"loss": 1.0, "rows": [1, 2]}}
    (folder / pool.FOUND).write_text(json.dumps(found))


def save_log(folder: Path) -> None:
    log = loggers.JSONLines(folder / "train.jsonl")
    for step in range(4):
        log.log({"loss": 1.0 / (step + 1), "norm": float("nan")}, step)


def check_log(found: Any, good: Any) -> None:
    for row in found.rows:
        if type(row.get("step")) is not int or not all(isinstance(value, float | int) for value in row.values()):
            raise Wrong(f"a row that is none: {row}")


def plain(found: Any, good: Any) -> None:
    """Nothing to be checked beyond that it came."""


@cache
def readers(scratch: Path) -> dict[str, Reader]:
    """By name."""
    made = [result_reader(name, scratch) for name in results()]
    made += [
        Reader(name="weights", make=save_tensors, read=lambda f: read_weights(f / "net.safetensors"),
               verify=check_tensors),
        Reader(name="weights of torch", make=lambda f: torch.save(net().state_dict(), f / "net.pt"),
               read=lambda f: read_weights(f / "net.pt"), verify=check_tensors, extra=mutations.hostile_archives),
        Reader(name="weights of old torch", make=old_torch, read=lambda f: read_weights(f / "net.pt"),
               verify=check_tensors, extra=mutations.hostile_pickles),
        Reader(name="idx", make=save_idx, read=lambda f: load_data(SMALL, f, check=False), verify=check_images,
               extra=swelling),
        Reader(name="cifar", make=save_cifar, read=read_cifar, verify=check_rows, extra=mutations.hostile_pickles),
        Reader(name="training folder", make=save_training, read=read_folder, verify=plain, stems=("epoch-000001",),
               mutated="[!l]*"),
        Reader(name="training run", make=save_training, read=read_training, verify=check_training,
               stems=("epoch-000001",)),
        Reader(name="run", make=save_run, read=read_run, verify=check_run, stems=("arrays",)),
        Reader(name="report", make=save_run, read=lambda f: of_run(f).to_html(), verify=check_page, stems=("arrays",)),
        Reader(name="state", make=save_state, read=read_state, verify=check_state, mutated="*[!k]"),
        Reader(name="lock", make=save_lock, read=read_lock, verify=plain),
        Reader(name="papers", make=save_papers, read=read_papers, verify=plain),
        Reader(name="measurements of a run", make=save_found, read=pool._said, verify=plain),
        Reader(name="log", make=save_log, read=lambda f: loggers.read(f / "train.jsonl"), verify=check_log),
    ]  # fmt: skip
    return {reader.name: reader for reader in made}


KINDS = ("number", "estimate", "spectrum", "claim", "state", "pairs", "measurement")
NAMES = [
    *(f"result {name}" for name in KINDS), "weights", "weights of torch", "weights of old torch", "idx", "cifar",
    "training folder", "training run", "run", "report", "state", "lock", "papers", "measurements of a run", "log",
]  # fmt: skip
