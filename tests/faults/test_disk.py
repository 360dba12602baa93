"""Full disks, closed folders, damaged and foreign states, two processes: a clear error, and what was saved is kept."""

import errno
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults import jobs

import ritz
from ritz import checkpoint, files, fingerprints
from ritz.checkpoint import Checkpoint, UnfitStateError, UnkeptStateError
from ritz.operators import DenseOperator
from ritz.reading import differences


class Killed(BaseException):
    """As by a signal: nothing of ritz catches it."""


def matrix() -> DenseOperator:
    values = torch.linspace(0, 1, 120) ** 4
    return DenseOperator(torch.diag(values))


def run(folder, at=None, operator=None, **options):
    """A spectrum, killed after some products."""

    def progress(done, _):
        if at is not None and done >= at:
            raise Killed

    given = {"num_steps": 6, "num_probes": 4, "products": 60, **options}
    kept = Checkpoint(folder, every=0)
    return ritz.spectrum(operator or matrix(), **given, progress=progress, checkpoint=kept)


@pytest.fixture
def state(tmp_path) -> Path:
    """The folder of a run that was killed in its tail."""
    with pytest.raises(Killed):
        run(tmp_path / "state", at=30)
    return tmp_path / "state"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def newest(folder: Path, stem: str, suffix: str) -> Path:
    return max(folder.glob(f"{stem}-*{suffix}"))


# --------------------------------------------------------------------------------------------- the disk


@pytest.mark.parametrize(("error", "at"), [("ENOSPC", 40), ("ENOSPC", 90), ("EROFS", 1), ("EIO", 60)])
def test_a_disk_that_fails_says_so_and_the_run_goes_on_when_it_is_well_again(error, at, server, wholes, tmp_path):
    found = server.ask("ritz.spectrum", tmp_path / "run", error=error, at=at)
    why = os.strerror(getattr(errno, error))
    said = (
        f"the state of the run cannot be kept in {tmp_path / 'run' / 'state'} ({why}); what was saved before is as it"
    )
    assert said in found["error"]
    assert server.ask("ritz.spectrum", tmp_path / "run")["bits"] == wholes["ritz.spectrum"].bits


def test_a_file_that_does_not_fit_leaves_the_state_before(state):
    before = content(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # safetensors, which has errors of its own, meets it first
    try:
        with pytest.raises(UnkeptStateError, match=r"cannot be kept in .*state \(File too large\)") as caught:
            run(state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert isinstance(caught.value, OSError)
    assert content(state) == before
    assert run(state) == run(state.with_name("other"))


def test_the_old_state_is_removed_when_the_new_one_is_on_the_disk(state, monkeypatch):
    calls = []
    real = {"replace": os.replace, "unlink": Path.unlink, "sync": files.sync_folder}
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(("put", Path(b).name)), real["replace"](a, b)))
    monkeypatch.setattr(files, "sync_folder", lambda f: (calls.append(("sync", "")), real["sync"](f)))
    monkeypatch.setattr(Path, "unlink", lambda p, **k: (calls.append(("remove", p.name)), real["unlink"](p, **k)))
    with pytest.raises(Killed):
        run(state, at=50)
    put = next(i for i, (kind, name) in enumerate(calls) if kind == "put" and name.startswith("state-"))
    removed = [i for i, (kind, name) in enumerate(calls) if kind == "remove" and name.startswith(("latest-", "state-"))]
    assert calls[put + 1] == ("sync", "")
    assert removed
    assert min(removed) > put + 1
    parts = [name for kind, name in calls[:put] if kind == "put"]
    assert any(name.startswith("latest-") for name in parts)  # what it names is there before it


# ------------------------------------------------------------------------------------- damaged, foreign


@pytest.mark.parametrize(
    ("stem", "suffix"), [("latest", ".safetensors"), ("latest", ".json"), ("head", ".safetensors")]
)
@pytest.mark.parametrize("how", ["cut", "turned", "gone"])
def test_a_damaged_state_is_refused_and_left_as_it_is(stem, suffix, how, state):
    path = newest(state, stem, suffix)
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        turned = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        path.write_bytes(data[: len(data) // 2] if how == "cut" else turned)
    before = content(state)
    with pytest.raises(
        UnfitStateError, match=r"the state in .*state cannot be read .* remove the folder to begin anew"
    ):
        run(state)
    assert content(state) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "fingerprint": {}, "parts": {"a": "/etc/x"}}']
)
def test_a_damaged_list_of_files_is_refused(text, state):
    newest(state, "state", ".json").write_text(text)
    with pytest.raises(UnfitStateError, match="cannot be read"):
        run(state)


@pytest.mark.parametrize("fault", ["cut", "another process"])
def test_a_run_within_a_measurement_whose_state_is_not_to_be_used_ends_the_measurement(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)

    def measured(progress=None):
        given = {"measures": ["train_loss", "trace", "lambda_max"], "num_steps": 4, "num_probes": 3}
        return ritz.measure(jobs.make_risk(), **given, progress=progress, checkpoint=tmp_path)

    def killed(text, part):
        if text == "trace" and part > 0.5:
            raise Killed

    with pytest.raises(Killed):
        measured(killed)
    (inner,) = tmp_path.glob("Hessian-spectrum*")
    if fault == "cut":
        path = newest(inner, "latest", ".safetensors")
        path.write_bytes(path.read_bytes()[:100])
    else:
        (inner / "lock").write_text(owner(process=1))
    before = content(inner)
    with pytest.raises((UnfitStateError, BlockingIOError), match="the state"):
        measured()
    assert content(inner) == before


def test_the_state_of_another_number_of_ranks_is_refused(state, tmp_path):
    with pytest.raises(UnfitStateError, match="the number of ranks is 1 there and 2 here; use the same number"):
        checkpoint._refuse_other_ranks(state, 2)
    both = tmp_path / "both"
    shutil.copytree(state, both / "rank-0-of-2")
    before = content(both / "rank-0-of-2")
    with pytest.raises(UnfitStateError, match="the number of ranks is 2 there and 1 here"):
        run(both)
    checkpoint._refuse_other_ranks(both, 2)
    assert content(both / "rank-0-of-2") == before


def changed(state, **parts):
    path = newest(state, "state", ".json")
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, **parts}))


def test_a_state_of_another_format_is_refused(state):
    changed(state, format=99)
    with pytest.raises(UnfitStateError, match="has format 99, and this version of ritz reads format 1"):
        run(state)


def test_a_state_of_another_torch_or_device_is_refused(state):
    tree = json.loads(newest(state, "state", ".json").read_text())["fingerprint"]
    tree["code"]["torch"], tree["matrix"]["base"]["device"] = "1.0", "cuda"
    changed(state, fingerprint=tree)
    here = fingerprints.code()["torch"]
    with pytest.raises(
        UnfitStateError, match=rf'device is "cuda" there and "cpu" here; .*torch is "1.0" there and "{here[:4]}'
    ):
        run(state)


def test_a_state_of_another_run_is_refused_with_both_fingerprints(state):
    with pytest.raises(
        UnfitStateError, match=r"settings.seed is 0 there and 3 here; its .* is \w{16}, that of .* \w{16};"
    ):
        run(state, seed=3)
    other = DenseOperator(2 * matrix().dense())
    with pytest.raises(UnfitStateError, match=r"matrix.base._matrix is .* there and .* here"):
        run(state, operator=other)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("weights", lambda risk: risk.at({"0.bias": torch.ones(12)})),
        ("data", lambda risk: risk.on((torch.zeros(40, 4), torch.zeros(40, dtype=torch.long)), 16)),
        ("data", lambda risk: risk.on(risk.batches.source.tensors, 10)),
        ("params", lambda risk: risk.restrict("0.*")),
    ],
)
def test_other_weights_data_or_parameters_are_another_run(what, change):
    risk = jobs.make_risk()
    one, two = (fingerprints.fingerprint(ritz.Hessian(r), "spectrum", {}) for r in (risk, change(risk)))
    apart = differences(one, two)
    assert any(f"risk.{what} is" in text for text in apart), apart


def test_the_same_risk_made_again_has_the_same_fingerprint():
    one, two = (fingerprints.fingerprint(ritz.Hessian(jobs.make_risk()) + 0.1, "trace", {}) for _ in range(2))
    assert one == two
    assert one != fingerprints.fingerprint(ritz.Hessian(jobs.make_risk()) + 0.2, "trace", {})


def test_where_a_function_lies_is_no_part_of_a_fingerprint():
    class Applied(torch.nn.Linear):
        def extra_repr(self):
            return f"fn={function}"

    marks = []
    for _ in range(2):
        function = object()  # at another place
        kept = [function, object()]
        risk = ritz.Risk(Applied(1, 1), torch.nn.MSELoss(), (torch.ones(2, 1), torch.ones(2, 1)))
        marks.append(fingerprints.of_risk(risk)["model"])
        assert kept
    assert marks[0] == marks[1]


def test_another_plan_is_another_run_and_another_route_is_refused(tmp_path):
    risk = jobs.make_risk()
    with pytest.raises(Killed):
        run(tmp_path, at=20, operator=ritz.Hessian(risk, route="reverse"))
    with pytest.raises(ValueError, match="its products use the reverse route, but this call asks for 'forward'"):
        run(tmp_path, operator=ritz.Hessian(risk, route="forward"))
    smaller = jobs.make_risk()
    smaller.plan = ritz.Plan(chunk=2)
    with pytest.raises(UnfitStateError, match=r"risk\.plan\.chunk is 8 there and 2 here"):
        run(tmp_path, operator=ritz.Hessian(smaller))


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"contains thesis\.tex but no state of a run"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(NotADirectoryError, match="is a file; name a folder"):
        run(tmp_path / "thesis.tex")


def test_what_a_kill_left_behind_is_removed(state):
    (state / "latest-000099.json").write_text("{")
    (state / "latest-000098.safetensors.1234.part").write_text("half")
    (state / "notes.txt").write_text("the user's own")
    whole = run(state.with_name("whole"))
    assert run(state) == whole
    kinds = sorted(path.name.partition("-")[0] for path in state.iterdir())
    assert kinds == ["latest", "latest", "notes.txt", "state"]


# ----------------------------------------------------------------------------------------- two processes


def owner(**said):
    return json.dumps({"process": os.getpid(), "machine": platform.node(), "began": None, "mark": "", **said})


@pytest.mark.parametrize("said", [{"process": 1}, {"machine": "elsewhere"}])
def test_a_state_that_another_process_has_is_refused_with_its_name(said, state):
    (state / "lock").write_text(owner(**said))
    before = content(state)
    who = f"process {said.get('process', os.getpid())} on {said.get('machine', platform.node())}"
    with pytest.raises(BlockingIOError, match=rf"{who} keeps the state of a run in .*; if there is no such .* remove"):
        run(state)
    assert content(state) == before


def test_the_lock_of_a_dead_process_is_taken_over_whoever_has_its_number_now(state):
    dead = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    for said in ({"process": dead.pid}, {"process": os.getppid(), "began": "0"}):
        (state / "lock").write_text(owner(**said))
        with pytest.raises(Killed):
            run(state, at=34)
    assert not (state / "lock").exists()


def test_two_runs_of_one_process_do_not_share_a_state(tmp_path):
    def inner(done, total):
        run(tmp_path)

    with pytest.raises(BlockingIOError, match="another run of this process keeps its state"):
        ritz.spectrum(matrix(), 6, 4, checkpoint=tmp_path, progress=inner)


# ------------------------------------------------------------------------------------------------ how often


def test_a_save_comes_before_the_next_product_would_end_too_late(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    written = []
    with Checkpoint(tmp_path, every=60).open({}) as saved:
        monkeypatch.setattr(saved, "write", lambda *state: (written.append(now[0]), setattr(saved, "_saved", now[0])))
        for seconds in [25.0] * 6 + [100.0] * 2 + [1.0] * 30:
            now[0] += seconds
            saved.offer(lambda: ({}, {}))
    # 25 + 25 s are followed by 25 more: saved at 50; each product of 100 s is saved; then once in 59 s
    assert written[:3] == [50.0, 100.0, 150.0]
    assert written[3:5] == [250.0, 350.0]
    assert written[5:] == []


def test_every_must_be_a_time(tmp_path):
    with pytest.raises(ValueError, match="every must be a number of seconds, 0 or more, got -1"):
        Checkpoint(tmp_path, every=-1)
    with pytest.raises(TypeError, match=r"a folder or a ritz\.Checkpoint, got int"):
        ritz.spectrum(matrix(), 2, 2, checkpoint=3)


def test_blocks_of_the_head_are_written_once(tmp_path, monkeypatch):
    sizes = []
    real = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda tree, path: (sizes.append(Path(path).name), real(tree, path))[1])
    run(tmp_path, products=None)
    blocks = [name.rpartition("-")[0] for name in sizes if name.startswith("block-")]
    assert len(blocks) == len(set(blocks)) == 12
    shutil.rmtree(tmp_path)
