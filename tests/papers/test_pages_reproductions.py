"""The pages of reproductions are made from the result files, say what was not run, and are those that are committed."""

import json
import math
import re
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ritz.papers import experiments, pages
from ritz.papers.base import Claim
from ritz.papers.catalogue import CATALOGUE, Shown
from ritz.papers.experiment import Experiment, Outcome, Setting, read_claim
from ritz.papers.experiments import EXPERIMENTS, PAPERS
from ritz.papers.highlights import HIGHLIGHTS, Highlight
from ritz.results import from_samples

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "results"
SCRIPT = ROOT / "benchmarks" / "reproductions.py"


def draw(rows):
    from matplotlib.figure import Figure

    assert any(row["loss"] == math.inf for row in rows)
    return Figure(figsize=(1, 1))


LENET = Experiment("margins", "lenet", "traces of LeNet", "seed 003, figure 3", None, draw)
AFFINE = Experiment("margins", "affine", "traces of an affine predictor", "seed 003, figure 2", None)
LATER = Experiment("damping", "later", "something else", "seed 004, figure 99", None)
TABLE = (LENET, AFFINE, LATER)


def mean(*values):
    return from_samples("mean", torch.tensor(values))


def outcome(experiment, *claims, **setting):
    common = {"paper": "seed 003", "where": "figure 2", "text": "r"}
    made = [Claim(**{**common, **claim}) for claim in claims]
    return Outcome(experiment, Setting(commit="abc1234", **setting), [{"seed": 0, "loss": math.inf}], made, 150.0)


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    outcome(
        AFFINE,
        {"expected": 1.0, "measured": 1.0},
        {"expected": 1.0, "measured": 0.5, "reference": 0.0, "tolerance": 0.1, "text": "|r|"},
        {"expected": 0.0, "relation": ">=", "measured": mean(0.1, -0.3, 0.2), "evidence": "word " * 100},
        {"expected": True, "measured": False},
        {"expected": 1.0, "measured": math.nan},
        budget="paper",
    ).write(folder)  # fmt: skip
    outcome(LENET, {"expected": 2.0, "measured": mean(1.0, 1.001), "relation": "<="}, budget="short").write(folder)
    return folder


def written(*args):
    """All pages, one after the other."""
    return "\n".join(pages.pages(*args).values())


def lines_of(text, start):
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith(start)
    ]


def test_the_page_begins_with_all_experiments_in_the_order_of_the_table(results, tmp_path):
    pages.write_pages(results, tmp_path / "docs", TABLE)
    text = (tmp_path / "docs" / "reproductions.md").read_text(encoding="utf8")
    first, second = lines_of(text, "| [")
    assert first[0] == "[margins lenet](reproductions_margins.md#margins-lenet)"
    assert second[0] == "[margins affine](reproductions_margins.md#margins-affine)"
    assert second[1:4] == ["seed 003, figure 2", "paper", "1"]
    assert second[5:] == ["abc1234", "2 min", "1", "1", "1", "2", ""]  # none is ours
    assert "6 claims of the papers in 2 experiments: 2 hold, 1 hold in direction, 1 are refuted, 2 are not dec" in text
    assert "## Not run" in text.splitlines()


def test_a_paper_has_a_page_of_its_own_with_a_section_for_each_experiment(results, tmp_path):
    pages.write_pages(results, tmp_path / "docs", TABLE)
    text = (tmp_path / "docs" / "reproductions_margins.md").read_text(encoding="utf8")
    assert text.splitlines()[0] == "# margins: seed 003"
    assert [line for line in text.splitlines() if line.startswith("#")][1:] == ["## margins lenet", "## margins affine"]
    assert "2 experiments; of the paper's claims 2 hold, 1 hold in direction, 1 refuted, 2 not decidable." in text
    assert "- [affine](#margins-affine): traces of an affine predictor" in text.splitlines()
    assert not (tmp_path / "docs" / "reproductions_damping.md").exists()


def test_the_page_of_false_friend_says_whose_supplement_seed_001_is(tmp_path):
    outcome(replace(AFFINE, paper="false-friend")).write(tmp_path)
    (text,) = (text for name, text in pages.pages(pages.read_results(tmp_path)).items() if "friend" in name)
    assert "the supplement of seed 002" in " ".join(text.split())


def test_every_claim_has_its_number_its_interval_and_its_verdict(results):
    text = written(pages.read_results(results, TABLE), TABLE)
    rows = lines_of(text[text.index("## margins affine") :], "| seed 003")
    assert [row[2:5] for row in rows] == [
        ["1", "1", "holds"],
        ["1 ± 0.1 (> 0)", "0.5", "holds in direction"],
        ["≥ 0", "0.00 (-0.66 to 0.66)", "**not decidable**"],
        ["yes", "no", "**refuted**"],
        ["1", "nan", "**not decidable**"],
    ]
    assert rows[1][1] == "\\|r\\|"
    assert rows[2][5].count("word") == 100


@pytest.mark.parametrize(
    ("measured", "interval", "text"),
    [
        (12.345, [12.1, 12.59], "12.35 (12.10 to 12.59)"),
        (1234.5, [1200.0, 1269.0], "1234 (1200 to 1269)"),
        (1e-9, [0.5e-9, 1.5e-9], "1e-09 (5e-10 to 1.5e-09)"),
        (2.0, [2.0, 2.0], "2"),
        (5.0, ["-inf", "inf"], "5 (too few seeds)"),
        (5.0, [0.0, "inf"], "5 (too few seeds)"),
        (5.0, [4.0, "inf"], "5 (4 to inf)"),
        ("nan", ["nan", "nan"], "no number"),
        (1.5, ["nan", "nan"], "1.5 (too few seeds)"),
    ],
)
def test_an_interval_is_shown_to_the_digits_that_matter(measured, interval, text):
    assert pages.measured({"measured": measured, "interval": interval}) == text


def test_a_figure_is_drawn_from_the_rows_as_they_were_measured(results, tmp_path):
    figure, *texts = pages.write_pages(results, tmp_path / "docs", TABLE)
    assert figure.name == "reproductions_margins_lenet.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in texts] == ["reproductions.md", "reproductions_margins.md"]
    text = "".join(path.read_text(encoding="utf8") for path in texts)
    assert "![traces of LeNet](reproductions_margins_lenet.png)" in text
    assert text.count("![") == 1


def test_what_was_not_run_is_listed_with_the_reason(results):
    catalogue = (
        Shown("C1", "margins", "figure 2", "affine", ("margins/affine",)),
        Shown("C4", "margins", "appendix B.2", "CIFAR-10", reason="not at hand"),
        Shown("C9", "margins", "figure 9", "nobody has written it", ("margins/nine",)),
    )
    text = written(pages.read_results(results, TABLE), TABLE, catalogue)
    assert lines_of(text[text.index("## Not run") :], "| margins") == [
        ["margins", "C4", "appendix B.2", "CIFAR-10", "not at hand"],
        ["margins", "C9", "figure 9", "nobody has written it", "no experiment here covers it"],
    ]
    assert lines_of(text, "| damping")[0][-1] == "`ritz reproduce damping later` has no result yet"
    everything = written(pages.read_results(results, TABLE), TABLE[:2], catalogue[:1])
    assert "Nothing: everything that the papers show is covered." in everything


def test_another_run_of_what_has_a_result_is_listed_too(results):
    catalogue = (Shown("C1", "margins", "figure 2", "affine", ("margins/affine", "damping/later")),)
    text = written(pages.read_results(results, TABLE), TABLE, catalogue)
    (row,) = lines_of(text[text.index("## Not run") :], "| damping")
    assert row[-2:] == [LATER.title, "`ritz reproduce damping later` has no result yet"]


def test_a_section_says_what_is_less_what_was_not_begun_and_where_the_rest_is(tmp_path):
    less = replace(AFFINE, short="ten images for twenty")
    setting = Setting("short")
    setting.left.append("sgd-1")
    rows = [{"file": "results/rows.json", "page": "docs/rows.md"}]
    Outcome(less, setting, rows, [], 1.0).write(tmp_path)
    text = " ".join(written(pages.read_results(tmp_path), (less,)).split())
    assert "Reduced from the paper budget: ten images for twenty." in text
    assert "1 runs not started in time." in text
    assert "on [a page of their own](rows.md), from `results/rows.json`" in text
    Outcome(less, Setting("paper"), [], [], 1.0).write(tmp_path)
    assert "ten images" not in written(pages.read_results(tmp_path), (less,))


def test_questions_of_ours_are_named_so_and_counted_apart(tmp_path):
    wrong = {"expected": 1.0, "measured": 2.0}
    outcome(AFFINE, {"expected": 1.0, "measured": 1.0}, wrong | {"ours": True}).write(tmp_path)
    text = written(pages.read_results(tmp_path, TABLE), TABLE)
    assert "1 claims of the papers in 1 experiments: 1 hold. Our own questions" in " ".join(text.split())
    (row,) = lines_of(text, "| ours, on seed 003")
    assert row[4] == "**refuted**"
    (summary,) = lines_of(text, "| [margins affine]")
    assert summary[-1].split() == ["|", "1"]


def test_many_claims_are_folded_away(tmp_path):
    outcome(AFFINE, *[{"expected": 1.0, "measured": 1.0}] * (pages.MANY + 1)).write(tmp_path)
    assert f"<summary>{pages.MANY + 1} claims</summary>" in written(pages.read_results(tmp_path, TABLE), TABLE)


def test_a_result_of_an_experiment_that_is_no_more_comes_last(results):
    outcome(replace(AFFINE, item="aaa")).write(results)
    assert [result["item"] for result in pages.read_results(results, TABLE)] == ["lenet", "affine", "aaa"]


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON"])
def test_a_file_that_is_no_result_is_refused(text, tmp_path):
    (tmp_path / "margins").mkdir()
    (tmp_path / "margins" / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is (damaged|not a result of `ritz reproduce`)"):
        pages.read_results(tmp_path)


def test_a_result_in_the_place_of_another_is_refused(results):
    (results / "margins" / "affine.json").rename(results / "margins" / "other.json")
    with pytest.raises(ValueError, match=r"other\.json has the result of margins/affine: name it PAPER/ITEM"):
        pages.read_results(results)


@pytest.mark.parametrize(
    "fields",
    [
        {"expected": True, "measured": True},
        {"expected": math.inf, "measured": 1.0, "reference": 0.0},
        {"expected": 1.0, "measured": math.nan},
        {"expected": 1.0, "measured": mean(0.5, 0.6, 0.9), "tolerance": 0.5, "relation": ">=", "evidence": "seen"},
        {"expected": -1.0, "measured": mean(0.5, 0.6, 0.9), "reference": 0.0},
        {"expected": 1.0, "measured": mean(0.5)},
    ],
)
def test_a_claim_that_is_read_has_the_verdict_that_was_written(fields, tmp_path):
    outcome(AFFINE, fields).write(tmp_path)
    (result,) = pages.read_results(tmp_path, TABLE)
    (claim,) = result["claims"]
    assert read_claim(claim).verdict == claim["verdict"]


# --------------------------------------------------------------------------------------------- the catalogue


def test_the_catalogue_has_all_that_was_counted():
    ids = {(row.paper, row.id) for row in CATALOGUE}
    assert len(ids) == len(CATALOGUE)
    for paper, start, last in (("false-friend", "A", 8), ("pac-bayes", "B", 3), ("margins", "C", 7)):
        assert {(paper, f"{start}{number}") for number in range(1, last + 1)} <= ids
    figures = " ".join(row.where for row in CATALOGUE if row.paper == "damping" and "figure" in row.where)
    assert set(map(int, re.findall(r"\d+", figures))) == {1, 2, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
    assert {row.paper for row in CATALOGUE} == set(PAPERS)


def test_what_nothing_is_about_has_a_reason():
    assert all(bool(row.items) != bool(row.reason) for row in CATALOGUE)


def test_every_experiment_is_about_something_in_the_catalogue():
    listed = {item for row in CATALOGUE for item in row.items}
    assert {f"{one.paper}/{one.item}" for one in EXPERIMENTS} <= listed


# -------------------------------------------------------------------------------------------- what is committed


@pytest.mark.skipif(not list(RESULTS.glob("*/*.json")), reason="no results are committed")
def test_the_committed_pages_are_what_the_committed_results_give():
    expected = pages.pages(pages.read_results(RESULTS))
    assert {name: (ROOT / "docs" / name).read_text(encoding="utf8") for name in expected} == expected


def test_the_page_begins_with_the_answers_to_what_is_asked_first(results):
    asked = Highlight("margins/affine", "One?", "r"), Highlight("damping/later", "Not run?", "r")
    text = written(pages.read_results(results, TABLE), TABLE, (), asked)
    (answer,) = lines_of(text, "| One?")
    assert answer[:2] == ["One?", "[r](reproductions_margins.md#margins-affine)"]
    assert "Not run?" not in text


def test_every_question_has_its_answer_in_the_committed_results():
    found = pages.read_results(RESULTS)
    unanswered = [one for one in HIGHLIGHTS if one.answer(found) is None]
    assert unanswered == []


@pytest.mark.parametrize(
    ("item", "asked", "claimed", "number", "told"),
    [
        (
            "stability",
            "One of seven",
            "bound is tight: median lambda_1 / (2 / a)",
            7,
            "it does in {}, and does not in {}.",
        ),
        (
            "logistic",
            "One of thirty",
            "test error - training error rises from damping",
            30,
            "it does in {}, and does not in {},",
        ),
        ("subsampling", "One of nine", "corrected by 1 / (B + b)", 9, "it can in {}, and cannot in {}."),
        ("batches", "Their rank correlation is", "MNIST: rank correlation of traces and output margins", 2, ""),
    ],
)
def test_a_question_about_one_of_many_claims_says_how_the_others_are(item, asked, claimed, number, told):
    (question,) = (one.question for one in HIGHLIGHTS if asked in one.question)
    (found,) = (one for one in pages.read_results(RESULTS) if one["item"] == item)
    verdicts = [one["verdict"] for one in found["claims"] if claimed in one["text"]]
    assert len(verdicts) == number
    assert told.format(verdicts.count("holds"), verdicts.count("refuted")) in question
    assert told or set(verdicts) == {"holds"}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_committed_result_is_small_and_its_verdicts_follow_from_its_numbers(path):
    assert path.stat().st_size < 1_000_000
    for claim in json.loads(path.read_text(encoding="utf8"))["claims"]:
        assert read_claim(claim).verdict == claim["verdict"], claim["text"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_committed_result_is_judged_by_the_code_of_today(path):
    result = json.loads(path.read_text(encoding="utf8"))
    said = [
        [(claim["text"], claim["verdict"]) for claim in one["claims"]] for one in (result, experiments.judge(result))
    ]
    assert said[0] == said[1]


@pytest.fixture
def script(monkeypatch):
    """The script, as it is typed; gives its exit status."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return end.value.code

    return run


def test_the_script_goes_on_after_a_failure_and_says_so(script, tmp_path, monkeypatch, capsys):
    def quick(setting, progress):
        progress("steps", 1, 1)
        return [{"seed": 0}], [Claim(paper="seed 003", where="", text="", expected=1.0, measured=setting.seeds)]

    def fail(setting, progress):
        raise ValueError("no good")

    made = (replace(LENET, run=fail), replace(AFFINE, run=quick))
    monkeypatch.setattr(experiments, "EXPERIMENTS", made)
    monkeypatch.setattr(experiments.find, "__defaults__", (None, made))
    words = ("--budget", "smoke", "--seeds", "3", "--commit", "abc", "--out", tmp_path)
    assert script(*words) == 1
    said = capsys.readouterr()
    assert "ValueError: no good" in said.err
    assert said.err.endswith("1 of 2 failed: margins/lenet\n")
    assert "1 refuted" in said.out
    written = json.loads((tmp_path / "margins" / "affine.json").read_text(encoding="utf8"))
    assert (written["claims"][0]["measured"], written["commit"]) == (3, "abc")
    assert script("--only", "margins/affine", *words) == 0
    assert "[1 of 1] margins/affine" in capsys.readouterr().out


def test_the_script_begins_nothing_when_time_is_up(script, tmp_path, monkeypatch, capsys):
    def cut(setting, progress):
        setting.left.append("late")
        return [{"seed": 0}], []

    made = (replace(AFFINE, run=cut), replace(LENET, run=lambda setting, progress: ([], [])))
    monkeypatch.setattr(experiments.find, "__defaults__", (None, made))
    words = ("--only", "margins/affine", "margins/lenet", "--budget", "smoke", "--out", tmp_path, "--until")
    assert script(*words, "600") == 0
    assert "time is up: 1 not begun: late" in capsys.readouterr().out
    assert json.loads((tmp_path / "margins" / "affine.json").read_text(encoding="utf8"))["left"] == ["late"]
    assert not (tmp_path / "margins" / "lenet.json").exists()  # without a row there is no result
    assert script(*words, "0") == 0
    assert capsys.readouterr().out.count("time is up: not run") == 2


def test_the_script_judges_anew_what_was_measured_and_changes_nothing_else(script, tmp_path, monkeypatch, capsys):
    def claims(rows, expected=2.0):
        return [Claim(paper="seed 003", where="", text="", expected=expected, measured=rows[0]["loss"])]

    rows = [{"seed": 0, "loss": math.inf}]
    made = replace(AFFINE, run=lambda *_: (rows, claims(rows)), claims=claims)
    target = experiments.reproduce(made, Setting(commit="abc")).write(tmp_path)
    before = json.loads(target.read_text(encoding="utf8"))
    monkeypatch.setattr(experiments.judge, "__defaults__", ((made,),))
    assert script("--judge", tmp_path) == 0
    assert capsys.readouterr().out == "nothing has changed\n"
    other = replace(made, claims=partial(claims, expected=math.inf))
    monkeypatch.setattr(experiments.judge, "__defaults__", ((other,),))
    assert script("--judge", tmp_path) == 0
    assert "1 refuted; now 1 holds" in capsys.readouterr().out
    after = json.loads(target.read_text(encoding="utf8"))
    assert [key for key in before if after[key] != before[key]] == ["claims"]


def test_what_a_run_is_short_of_comes_first_in_its_evidence(tmp_path):
    about = {"paper": "seed 003", "where": "", "text": "", "expected": 1.0, "measured": 0.5, "evidence": "x" * 900}
    outcome = Outcome(AFFINE, Setting(), [], [Claim(**about, short_of="15 of 300 epochs")], 0.0)
    outcome.write(tmp_path)
    assert "**not decidable** | Short of the paper: 15 of 300 epochs. " in written(pages.read_results(tmp_path))


def test_the_script_writes_the_page(script, results, tmp_path, monkeypatch):
    monkeypatch.setattr(pages.write_pages, "__defaults__", (TABLE,))
    assert script("--page", results, tmp_path / "docs") == 0
    assert (tmp_path / "docs" / "reproductions.md").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "margins/nothing"), "margins has no experiment 'nothing'"),
        (("--only", "nothing"), "no paper is called 'nothing'"),
        (("--seeds", "1"), "two seeds or more"),
    ],
)
def test_the_script_refuses_what_cannot_be_before_any_work(words, message, script, capsys):
    assert script(*words) == 2
    assert message in capsys.readouterr().err
