"""`ritz reproduce`, as it is typed."""

import json
import re
import sys
import types

import pytest

from ritz.cli import main
from ritz.papers import experiments
from ritz.papers.base import Claim
from ritz.papers.experiments import Experiment
from ritz.papers.over_seeds import share
from ritz.workers import RunFailed


@pytest.fixture
def seen():
    """The settings of experiments that were run."""
    return []


@pytest.fixture(autouse=True)
def three(monkeypatch, seen):
    """Three experiments that take no time: one fails for want of data, one is never run."""

    def quick(setting, progress):
        seen.append(setting)
        progress("steps", 1, 1)
        common = {"paper": "seed 003", "where": "figure 2"}
        claims = [
            Claim(**common, text="r [printed] = 0.97", expected=0.97, measured=1.0),
            Claim(**common, text="r = 1", expected=1.0, measured=share([True] * 6), reference=0.5),
            Claim(**common, text="accuracy", expected=65.0, measured=9.0, short_of="5 of 9 epochs"),
        ]
        return [{"seeds": setting.seeds}], claims

    def missing(setting, progress):
        raise FileNotFoundError("MNIST is not in nowhere; set RITZ_DATA")

    made = (
        Experiment("margins", "affine", "traces", "figure 2", quick),
        Experiment("margins", "lenet", "traces of LeNet", "figure 3", missing),
        Experiment("margins", "broken", "of which there is no good file", "", missing),
    )
    monkeypatch.setattr(experiments, "EXPERIMENTS", made)
    monkeypatch.setattr(experiments.find, "__defaults__", (None, made))


def test_it_prints_numbers_and_verdicts_and_writes_a_file(tmp_path, capsys):
    assert main(["reproduce", "margins", "affine", "--seeds", "3", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "r [printed] = 0.97" in text
    # folded into lines as wide as there is room for
    assert re.search(r"accuracy;.*short.*of.*the.*paper:.*5.*of.*9.*epochs", text, re.DOTALL)
    assert "1.00 (0.54 to 1.00)" in text  # what the verdict is by
    assert "1 holds in direction, 1 refuted, 1 not decidable" in text
    assert "budget short is not that of the paper" in text
    written = json.loads((tmp_path / "margins" / "affine.json").read_text(encoding="utf8"))
    assert written["rows"] == [{"seeds": 3}]


def test_json_is_one_array_of_what_is_written(tmp_path, capsys):
    words = ["reproduce", "margins", "affine", "--out", str(tmp_path), "--json"]
    assert main(words) == 0
    written = json.loads((tmp_path / "margins" / "affine.json").read_text(encoding="utf8"))
    assert json.loads(capsys.readouterr().out) == [written]
    assert main(["reproduce", "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["item"] for row in rows] == ["affine", "lenet", "broken"]
    assert rows[0]["standing"].startswith("short: 1 holds in direction")
    assert main(["reproduce", "margins", "lenet", "--out", str(tmp_path), "--json"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)


def test_seeds_are_added_to_the_result_that_there_is(tmp_path, seen, monkeypatch, capsys):
    def alike(setting, progress):
        seen.append(setting)
        rows = [{"seed": seed, "r": 0.97 + seed / 100} for seed in setting.seed_range(2, 2, 2)]
        return rows, judged(rows)

    def judged(rows):
        last = max(row["r"] for row in rows)
        return [Claim(paper="seed 003", where="", text="r, the largest", expected=1.0, relation="<=", measured=last)]

    table = (Experiment("margins", "affine", "traces", "", alike, claims=judged),)
    monkeypatch.setattr(experiments.find, "__defaults__", (None, table))
    words = ["reproduce", "margins", "affine", "--out", str(tmp_path), "--more"]
    assert main([*words, "--seeds", "1"]) == 2
    assert "error bars need two seeds or more, got 1" in capsys.readouterr().err  # there is no result yet
    for seeds in (2, 3, 1):
        assert main([*words, "--seeds", str(seeds)]) == 0
        said = "".join(capsys.readouterr().out.split())  # a terminal's lines may break anywhere
        assert ("affine.jsondoesnotexist,so--moreaddstonothing" in said) == (seeds == 2)
        assert ("1refuted" in said) == (seeds != 2)  # of the fifth seed on
    found = json.loads((tmp_path / "margins" / "affine.json").read_text(encoding="utf8"))
    assert [row["seed"] for row in found["rows"]] == found["seeds"] == [0, 1, 2, 3, 4, 5]
    assert [list(one.seed_range(2, 2, 2)) for one in seen] == [[0, 1], [2, 3, 4], [5]]
    assert [claim["verdict"] for claim in found["claims"]] == ["refuted"]  # by the last of all
    assert main([*words, "--seeds", "1", "--budget", "paper"]) == 2
    assert "it is of budget short, this is paper" in capsys.readouterr().err
    assert len(seen) == 3


def test_a_quick_run_does_not_take_the_place_of_a_long_one(tmp_path, capsys, seen):
    words = ["reproduce", "margins", "affine", "--out", str(tmp_path)]
    assert main(words) == 0
    before = (tmp_path / "margins" / "affine.json").read_bytes()
    assert main([*words, "--budget", "smoke"]) == 0
    said = "".join(capsys.readouterr().out.split())  # a terminal's lines may break anywhere
    assert f"affine.jsonhasaresultofalongerbudget,whichstays;thisonegoesto{tmp_path / 'smoke'}" in said
    quick = json.loads((tmp_path / "smoke" / "margins" / "affine.json").read_text(encoding="utf8"))
    assert quick["setting"]["budget"] == "smoke"
    assert (tmp_path / "margins" / "affine.json").read_bytes() == before
    assert main([*words, "--budget", "smoke", "--more"]) == 2  # it adds to a result of its own budget
    assert "it is of budget short, this is smoke" in capsys.readouterr().err
    assert len(seen) == 2
    assert main([*words, "--budget", "paper"]) == 0
    assert json.loads((tmp_path / "margins" / "affine.json").read_text(encoding="utf8"))["setting"]["budget"] == "paper"


def test_without_a_paper_it_lists_what_there_is_and_what_has_been_run(tmp_path, capsys):
    assert main(["reproduce", "margins", "affine", "--out", str(tmp_path)]) == 0
    (tmp_path / "margins" / "broken.json").write_text("{}")
    capsys.readouterr()
    assert main(["reproduce", "--out", str(tmp_path)]) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("margins")}
    assert "short: 1 holds in direction, 1 refuted" in " ".join(lines["affine"].split())
    assert "short" not in lines["lenet"]
    assert "not a result" in lines["broken"]


@pytest.mark.parametrize(
    ("claims", "standing"),
    [
        (
            [(False, "holds"), (True, "refuted"), (False, "holds"), (True, "holds")],
            "short: 2 holds; ours: 1 holds, 1 refuted",
        ),
        ([(True, "refuted")], "short: ours: 1 refuted"),
        ([(False, "refuted")], "short: 1 refuted"),
    ],
)
def test_the_list_counts_questions_of_ours_apart(claims, standing, tmp_path, capsys):
    told = [{"verdict": verdict, **({"ours": True} if ours else {})} for ours, verdict in claims]
    (tmp_path / "margins").mkdir()
    (tmp_path / "margins" / "affine.json").write_text(json.dumps({"setting": {"budget": "short"}, "claims": told}))
    (tmp_path / "margins" / "broken.json").write_text(json.dumps({"setting": {"budget": "short"}, "claims": [[]]}))
    assert main(["reproduce", "--out", str(tmp_path), "--json"]) == 0
    rows = {row["item"]: row["standing"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {"affine": standing, "lenet": "", "broken": "not a result"}


def test_help_names_the_papers_and_what_an_option_takes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for word in ("[PAPER]", "[ITEM]", "false-friend, pac-bayes, margins or damping", "--slurm PARTITION", "--runs DIR"):
        assert word in said
    assert "None" not in said


def test_workers_and_folders_reach_the_experiment(tmp_path, seen):
    words = ["--workers", "3", "--runs", str(tmp_path / "runs"), "--commit", "abc", "--budget", "smoke", "--fast"]
    assert main(["reproduce", "margins", "affine", *words, "--out", str(tmp_path)]) == 0
    (setting,) = seen
    assert (setting.workers, setting.runs, setting.budget, setting.executor) == (3, tmp_path / "runs", "smoke", None)
    assert setting.fast
    written = json.loads((tmp_path / "margins" / "affine.json").read_text(encoding="utf8"))
    assert written["commit"] == "abc"
    assert str(tmp_path) not in json.dumps(written)


class AutoExecutor:
    """submitit's, as far as it is used."""

    def __init__(self, folder):
        self.folder, self.parameters = folder, {}

    def update_parameters(self, **parameters):
        self.parameters |= parameters

    def submit(self, function, *args):
        raise AssertionError("nothing is trained here")


def test_slurm_is_an_executor_of_submitit(tmp_path, seen, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(AutoExecutor=AutoExecutor))
    words = ["margins", "affine", "--slurm", "long", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(["reproduce", *words]) == 0
    (setting,) = seen
    assert setting.executor.folder == tmp_path / "runs" / "slurm"
    assert setting.executor.parameters["slurm_partition"] == "long"
    assert "gpus_per_node" not in setting.executor.parameters


def test_slurm_without_submitit_or_without_a_folder_is_refused(tmp_path, monkeypatch, capsys):
    words = ["reproduce", "margins", "affine", "--slurm", "long", "--out", str(tmp_path)]
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(words) == 2
    assert "--slurm needs submitit, which is not installed: pip install submitit" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(AutoExecutor=AutoExecutor))
    assert main(words) == 2
    assert "--slurm needs --runs" in capsys.readouterr().err


def test_a_run_that_failed_in_another_process_ends_with_status_1(tmp_path, monkeypatch, capsys):
    def fail(*_):
        error = RunFailed("seed-1", "ValueError: no good\n\nTraceback")
        error.add_note("run 'seed-2' failed too: killed")
        raise error

    monkeypatch.setattr(experiments, "reproduce", fail)
    assert main(["reproduce", "margins", "affine", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    for part in ("run 'seed-1' failed: ValueError: no good", "run 'seed-2' failed too", "with the same --runs"):
        assert part in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flatness"], "no paper is called 'flatness'"),
        (["margins", "mlp"], "margins has no experiment 'mlp'"),
        (["margins", "lenet"], "MNIST is not in nowhere"),
        (["margins", "--seeds", "1"], "two seeds or more"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(words, message, tmp_path, capsys):
    assert main(["reproduce", *words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_told_of_before_any_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["reproduce", "margins", "affine", "--out", str(tmp_path / "file")]) == 2
    told = capsys.readouterr()
    assert "File exists" in told.err
    assert told.out == ""


def test_ctrl_c_ends_with_its_own_status(monkeypatch, tmp_path, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "reproduce", stop)
    assert main(["reproduce", "margins", "affine", "--out", str(tmp_path)]) == 130
    assert "stopped by the keyboard" in capsys.readouterr().err
