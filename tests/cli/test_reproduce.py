"""`ritz reproduce`, as it is typed."""

import json

import pytest

from ritz.cli import main
from ritz.papers import experiments
from ritz.papers.base import Claim
from ritz.papers.experiments import Experiment


@pytest.fixture(autouse=True)
def two(monkeypatch):
    """Two experiments that take no time: one fails for want of data."""

    def quick(setting, progress):
        progress("steps", 1, 1)
        common = {"paper": "seed 003", "where": "figure 2"}
        claims = [
            Claim(**common, text="r [printed] = 0.97", expected=0.97, measured=1.0),
            Claim(**common, text="r = 1", expected=1.0, measured=1.0),
        ]
        return [{"seeds": setting.seeds}], claims

    def missing(setting, progress):
        raise FileNotFoundError("MNIST is not in nowhere; set RITZ_DATA")

    made = (
        Experiment("margins", "affine", "traces", "figure 2", quick),
        Experiment("margins", "lenet", "traces of LeNet", "figure 3", missing),
    )
    monkeypatch.setattr(experiments, "EXPERIMENTS", made)
    monkeypatch.setattr(experiments.find, "__defaults__", (None, made))


def test_it_prints_numbers_and_verdicts_and_writes_a_file(tmp_path, capsys):
    assert main(["reproduce", "margins", "affine", "--seeds", "3", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "r [printed] = 0.97" in text
    assert "1 holds, 1 refuted" in text
    assert "budget short is not that of the paper" in text
    written = json.loads((tmp_path / "margins" / "affine.json").read_text(encoding="utf8"))
    assert written["rows"] == [{"seeds": 3}]


def test_without_a_paper_it_lists_what_there_is(capsys):
    assert main(["reproduce"]) == 0
    assert "lenet" in capsys.readouterr().out


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
