"""Run folders: what is in them, what is refused, what a kill leaves."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch

import ritz
from ritz import runs
from ritz.cli import main
from ritz.provenance import machine, source_of, versions
from ritz.results import Estimate
from ritz.runs import Run, check_folder, plain

WORDS = ["measure", "study.py:make_risk", "--measures", "weight_norm", "--out", "run"]


def begin(folder, **settings):
    return Run.start(folder, "measure", settings, machine=machine())


def test_results_come_back_equal_and_none_takes_one_away(tmp_path):
    found = Estimate(name="trace", value=torch.arange(3.0), exact=True)
    with begin(tmp_path / "run") as run:
        run.keep(trace=found, other={"a": (1, None, math.inf)})
        run.keep(other=None)
    again = Run.open(tmp_path / "run")
    assert list(again.results) == ["trace"]
    assert again.results["trace"] == found
    assert again.header["results"] == ["trace"]
    assert again.header["versions"] == versions()
    assert again.header["times"]["ended"] >= again.header["times"]["started"]


def test_a_result_without_tensors_has_the_same_files(tmp_path):
    with begin(tmp_path / "run") as run:
        run.keep(loss=Estimate(name="loss", value=1.0, exact=True))
    assert (tmp_path / "run" / "arrays.safetensors").exists()
    assert ritz.load(tmp_path / "run" / "arrays")["loss"].value == 1.0


@pytest.mark.parametrize(
    ("error", "state", "stop"),
    [(KeyboardInterrupt(), "interrupted", "stopped by the keyboard"), (ValueError("a\nb"), "failed", "a b")],
)
def test_a_run_that_does_not_end_well_says_so(error, state, stop, tmp_path):
    with pytest.raises(type(error)), begin(tmp_path / "run"):
        raise error
    header = Run.open(tmp_path / "run").header
    assert (header["state"], header["stop"]) == (state, stop)


def test_a_run_that_was_killed_goes_on_with_what_it_had(tmp_path):
    killed = begin(tmp_path / "run", seed=0)
    killed.keep(loss=Estimate(name="loss", value=1.0, exact=True))
    with (tmp_path / "run" / "events.jsonl").open("ab") as file:
        file.write(b'{"seconds": 1.0, "ev')  # torn
    killed._let_go()  # as the system does
    with begin(tmp_path / "run", seed=0) as run:
        assert run.results["loss"].value == 1.0
    kinds = [(event["event"], event.get("text")) for event in run.events()]
    assert kinds == [
        ("start", "ritz measure started"), ("start", "ritz measure resumed"), ("end", "completed")
    ]  # fmt: skip


def test_a_run_that_was_killed_within_a_save_goes_on_from_nothing(tmp_path):
    killed = begin(tmp_path / "run", seed=0)
    killed.keep(loss=Estimate(name="loss", value=torch.zeros(3), exact=True))
    before = (tmp_path / "run" / "arrays.json").read_bytes()
    killed.keep(norms=Estimate(name="norms", value=torch.ones(4), exact=True))
    (tmp_path / "run" / "arrays.json").write_bytes(before)  # the tensors are new, the text is not
    killed._let_go()
    with begin(tmp_path / "run", seed=0) as run:
        assert run.results == {}
        run.keep(loss=Estimate(name="loss", value=torch.ones(4), exact=True))
    assert Run.open(tmp_path / "run").results["loss"].value.tolist() == [1.0] * 4


def test_a_run_that_was_killed_before_it_had_a_header_is_begun_anew(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    (tmp_path / "run" / "run.json.0e158fe5.part").write_text("{")
    with begin(tmp_path / "run", seed=0) as run:
        run.keep(loss=Estimate(name="loss", value=1.0, exact=True))
    assert Run.open(tmp_path / "run").state == "done"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "events.jsonl").write_text("somebody's log")
    with pytest.raises(ValueError, match=r"contains events\.jsonl but no run"):
        begin(tmp_path / "other", seed=0)


def test_events_are_lines_of_json_whatever_the_numbers(tmp_path):
    with begin(tmp_path / "run") as run:
        run.event("measure", key="trace", value=math.nan, stderr=math.inf)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["value"] == "NaN"
    assert json.loads(lines[1])["stderr"] == "Infinity"
    assert plain({"a": (-math.inf,)}) == {"a": ["-Infinity"]}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_an_end_that_the_disk_has_no_room_for_names_its_file(tmp_path):
    run = Run.start(tmp_path / "run", "spectrum", {})
    events = tmp_path / "run" / "events.jsonl"
    events.unlink()
    events.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        run.end("failed", "the disk is full")
    assert caught.value.filename == str(events)


def test_the_commit_of_the_users_file_is_known(tmp_path):
    file = tmp_path / "study.py"
    file.write_text("x = 1\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    names = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for words in (["init", "-q"], ["add", "study.py"], ["commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, env={**clean, **names})
    found = source_of(file, "f")
    assert len(found["commit"]) == 40
    assert found["clean"] is True
    file.write_text("x = 2\n")
    assert source_of(file, "f")["clean"] is False


def test_the_next_folder_is_numbered_and_none_is_used_twice(study, capsys):
    for _ in range(2):
        assert main([*WORDS[:-2]]) == 0
    assert sorted(path.name for path in (study / "ritz-runs").iterdir()) == ["measure-1", "measure-2"]


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(study, capsys):
    (study / "run").mkdir()
    (study / "run" / "thesis.tex").write_text("precious")
    assert main(WORDS) == 2
    error = capsys.readouterr().err
    assert error == (
        "ritz measure: run contains thesis.tex but no run; name another folder with --out, nothing was written\n"
    )
    assert [path.name for path in (study / "run").iterdir()] == ["thesis.tex"]


def test_a_run_of_another_command_is_refused(study, capsys):
    assert main(WORDS) == 0
    assert main(["spectrum", "study.py:make_risk", "--out", "run"]) == 2
    assert 'run holds another run: command is "measure" there and "spectrum" here' in capsys.readouterr().err
    assert Run.open("run").header["command"] == "measure"


def test_a_run_of_another_version_is_refused_and_left_alone(study, capsys):
    (study / "run").mkdir()
    text = '{"format": 99, "command": "measure"}'
    (study / "run" / "run.json").write_text(text)
    assert main(WORDS) == 2
    error = capsys.readouterr().err
    assert "run.json has format 99, of another version of ritz" in error
    assert "name another folder" in error
    assert len(error.splitlines()) == 1
    assert (study / "run" / "run.json").read_text() == text


def test_a_damaged_run_is_refused(study, capsys):
    assert main(WORDS) == 0
    whole = (study / "run" / "run.json").read_text()
    (study / "run" / "run.json").write_text(whole[:50])
    assert main(WORDS) == 2
    assert "run.json is damaged" in capsys.readouterr().err
    (study / "run" / "run.json").write_text(whole)
    (study / "run" / "run.json").write_text('{"format": 1}')
    assert main(WORDS) == 2
    assert "run.json is damaged (its command is missing, or not what it should be)" in capsys.readouterr().err
    (study / "run" / "run.json").write_text(whole)
    (study / "run" / "arrays.json").rename(study / "kept.json")
    assert main(WORDS) == 2
    assert "run has lost its results (measurement)" in capsys.readouterr().err
    (study / "run" / "arrays.json").write_text('{"format": 1')
    assert main(WORDS) == 2
    assert "the results in run cannot be read" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said_before_the_users_code_runs(study, capsys):
    (study / "file").write_text("")
    for out in ("file", "file/run"):
        assert main([*WORDS[:-1], out]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("ritz measure: file")
        assert "--out" in captured.err
        assert "your code" not in captured.out
    assert (study / "file").read_text() == ""


def test_a_folder_that_the_disk_refuses_is_named_with_the_remedy(study, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    assert main(WORDS) == 2
    error = capsys.readouterr().err
    assert error == "ritz measure: run cannot be made (No space left on device); name another folder with --out\n"


def test_a_folder_without_leave_to_write_is_refused_unless_its_run_is_done(tmp_path, monkeypatch):
    with begin(tmp_path / "done"):
        pass
    with pytest.raises(KeyboardInterrupt), begin(tmp_path / "interrupted"):
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for name in ("new", "interrupted"):
        with pytest.raises(PermissionError, match="cannot be written to; name another folder"):
            check_folder(tmp_path / name)
    assert begin(tmp_path / "done").state == "done"


def test_a_run_under_way_is_locked_against_a_second_one_and_its_end_lets_go(tmp_path):
    with begin(tmp_path / "run", seed=0) as run:
        before = (tmp_path / "run" / "run.json").read_bytes(), (tmp_path / "run" / "events.jsonl").read_bytes()
        with pytest.raises(BlockingIOError, match=r"another process is at work in .*run; wait for its end, or name"):
            begin(tmp_path / "run", seed=0)
        after = (tmp_path / "run" / "run.json").read_bytes(), (tmp_path / "run" / "events.jsonl").read_bytes()
        assert before == after
        run.end("interrupted", "for the test")
    with begin(tmp_path / "run", seed=0) as again:
        assert again.events()[-1]["text"] == "ritz measure resumed"


def test_a_second_process_is_refused_before_the_users_code_runs(study, capsys):
    with begin(study / "run"):
        assert main(WORDS) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "ritz measure: another process is at work in run; wait for its end, or name another folder with --out\n"
    )
    assert "your code" not in captured.out


def test_a_run_that_another_process_ended_meanwhile_is_read_back(tmp_path, monkeypatch):
    locked = runs._locked

    def late(path):
        with begin(tmp_path / "run", seed=0) as other:
            other.keep(loss=Estimate(name="loss", value=1.0, exact=True))
        return locked(path)

    def once(path):
        monkeypatch.setattr(runs, "_locked", locked)
        return late(path)

    monkeypatch.setattr(runs, "_locked", once)
    assert begin(tmp_path / "run", seed=0).results["loss"].value == 1.0


@pytest.mark.parametrize(
    ("key", "value"), [("results", None), ("results", 3), ("identity", 3), ("times", {"seconds": "?"}), ("times", [])]
)
def test_a_header_that_was_edited_is_damaged(key, value, tmp_path):
    with begin(tmp_path / "run") as run:
        pass
    (tmp_path / "run" / "run.json").write_text(json.dumps({**run.header, key: value}))
    with pytest.raises(ValueError, match=r"run.json is damaged \(.*\); run again, into another folder"):
        Run.open(tmp_path / "run")


def test_a_header_without_one_of_its_parts_is_damaged(tmp_path):
    with begin(tmp_path / "run") as run:
        pass
    for key in run.header:
        part = {name: value for name, value in run.header.items() if name != key}
        (tmp_path / "run" / "run.json").write_text(json.dumps(part))
        with pytest.raises(ValueError, match=rf"run.json is damaged \((its {key} is missing|.* of which {key})"):
            Run.open(tmp_path / "run")


def test_a_run_that_is_done_without_a_result_is_refused(study, capsys):
    assert main(WORDS) == 0
    header = json.loads((study / "run" / "run.json").read_text())
    (study / "run" / "run.json").write_text(json.dumps({**header, "results": []}))
    (study / "run" / "arrays.json").unlink()
    assert main(WORDS) == 2
    assert "run is marked as done but has no result; name another folder with --out" in capsys.readouterr().err


def test_a_folder_without_a_run_cannot_be_opened(tmp_path):
    with Run.start(tmp_path / "ritz-runs" / "measure-1", "measure", {}):
        for near in (tmp_path / "ritz-runs", tmp_path / "ritz-runs" / "measure-1" / "run.json"):  # as one may type
            with pytest.raises(FileNotFoundError, match=r"did you mean .*ritz-runs/measure-1[?]"):
                Run.open(near)
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no run.json in it; name a folder"):
        Run.open(tmp_path)
