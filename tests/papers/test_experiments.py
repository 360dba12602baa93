"""The table of experiments: every one runs at smoke budget, and what it writes can be read."""

import hashlib
import json
import math
import pickle
import subprocess
from dataclasses import replace

import pool_cases as cases
import pytest
import torch

from ritz import provenance, storage
from ritz.nonfinite import in_numbers
from ritz.papers import mnist_mlp, pieces
from ritz.papers.base import Claim
from ritz.papers.data import catalogue as data_sets
from ritz.papers.experiment import Experiment, Outcome, Setting, read_claim
from ritz.papers.experiments import EXPERIMENTS, PAPERS, find, reproduce
from ritz.papers.pool import train_all
from ritz.provenance import own_commit

TRAIN, HELD_OUT, TEST = 320, 100, 120  # images


def idx(values):
    """Bytes as an idx file has them."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.numpy().tobytes()


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """MNIST, Fashion-MNIST and CIFAR-100 of noise, as the official files have them, and the rows of these files."""
    root, g, rows = tmp_path_factory.mktemp("data"), torch.Generator().manual_seed(0), {}
    for name in ("MNIST", "FashionMNIST", "CIFAR100"):
        row = data_sets.DATASETS[name]
        parts = {}
        for part, num in (("train", TRAIN + HELD_OUT), ("test", TEST)):
            images = torch.randint(256, (num, math.prod(row.shape)), generator=g, dtype=torch.uint8)
            labels = torch.randint(row.classes, (num,), generator=g, dtype=torch.uint8)
            if row.form == "idx":
                raws = [idx(images.view(num, *row.shape[1:])), idx(labels)]
            else:
                raws = [pickle.dumps({b"data": images.numpy(), row.labels.encode(): labels.tolist()}, protocol=3)]
            parts[part] = []
            for file, raw in zip(getattr(row, part), raws, strict=True):
                (root / file.path).parent.mkdir(parents=True, exist_ok=True)
                (root / file.path).write_bytes(raw)
                parts[part].append(replace(file, md5=hashlib.md5(raw).hexdigest()))
        rows[name] = replace(row, train=tuple(parts["train"]), test=tuple(parts["test"]), held_out=HELD_OUT)
    return root, rows


@pytest.fixture
def folder(noise, monkeypatch):
    """The folder of these files, which pass for the official ones."""
    root, rows = noise
    monkeypatch.delenv("RITZ_DATA", raising=False)
    monkeypatch.setattr(data_sets, "DATASETS", {**data_sets.DATASETS, **rows})
    monkeypatch.setattr(mnist_mlp, "NUM_TRAIN", TRAIN)
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One folder for all training runs: what several experiments train is trained once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.filterwarnings("ignore:products in float32 are off")  # after a few steps from a random start
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: f"{one.paper}-{one.item}")
def test_an_experiment_runs_at_smoke_budget_and_is_written_whole(experiment, folder, runs, tmp_path):
    torch.set_default_dtype(torch.float32)  # what a user has
    outcome = reproduce(experiment, Setting("smoke", folder, runs=runs))
    assert outcome.claims
    assert all(claim.paper in PAPERS[experiment.paper] for claim in outcome.claims)
    target = outcome.write(tmp_path)
    written = json.loads(target.read_text(encoding="utf8"))
    assert target == tmp_path / experiment.paper / f"{experiment.item}.json"
    assert [claim["verdict"] for claim in written["claims"]] == [claim.verdict for claim in outcome.claims]
    assert written["setting"]["budget"] == "smoke"
    assert len(written["seeds"]) >= 2
    assert written["rows"]
    assert not list(target.parent.glob("*.part"))
    if experiment.figure is not None:
        experiment.figure(in_numbers(written["rows"]))


@pytest.mark.filterwarnings("ignore:products in float32 are off")
@pytest.mark.parametrize("paper", ["false-friend", "pac-bayes"])
def test_what_an_experiment_has_measured_is_not_measured_again(paper, folder, tmp_path, monkeypatch):
    setting = Setting("smoke", folder, runs=tmp_path / "runs")
    first = reproduce(*find("false-friend", "mlp"), setting)

    def refuse(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(mnist_mlp, "spectrum", refuse)
    monkeypatch.setattr(mnist_mlp, "gradients", refuse)
    again = reproduce(*find(paper, "mlp"), setting)  # both papers print this network: one is the other's
    assert again.rows == first.rows
    with pytest.raises(AssertionError, match="measured again"):  # others are trained beside them, and not refused
        reproduce(*find(paper, "mlp"), replace(setting, seeds=3))
    monkeypatch.setattr(pieces, "code", lambda patterns: {"ritz": "other"})
    with pytest.raises(AssertionError, match="measured again"):  # by other code it would be something else
        reproduce(*find(paper, "mlp"), setting)


def test_every_experiment_has_a_paper_and_a_name_of_its_own():
    assert {one.paper for one in EXPERIMENTS} <= set(PAPERS)
    assert len({(one.paper, one.item) for one in EXPERIMENTS}) == len(EXPERIMENTS)


def test_a_paper_is_known_by_its_number_too():
    assert find("003") == find("margins")


def test_what_is_not_there_is_refused_with_what_is():
    with pytest.raises(ValueError, match="no paper is called 'flatness'; there are false-friend, pac-bayes, margins"):
        find("flatness")
    with pytest.raises(ValueError, match="no paper is called 'mlp'; did you mean false-friend mlp or pac"):
        find("mlp")
    with pytest.raises(ValueError, match="margins has no experiment 'mlp'; it has affine"):
        find("margins", "mlp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "long"}, "budget must be one of smoke, short, paper"),
        ({"seeds": 1}, "two seeds or more, got 1"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"device": "gpu"}, "device 'gpu' is not available here"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not available here"),
    ],
)
def test_a_bad_setting_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Setting(**options)


def test_missing_images_are_told_of_before_any_work(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        reproduce(find("margins")[0], Setting("smoke", tmp_path / "nowhere"))


# ------------------------------------------------------------------------------------------------- what is written


def written(tmp_path, setting=None, rows=(), claims=()):
    outcome = Outcome(Experiment("margins", "x", "", "", None), setting or Setting(), list(rows), list(claims), 0.0)
    return json.loads(outcome.write(tmp_path).read_text(encoding="utf8"))


def test_a_result_says_what_was_trained_and_with_which_seeds(tmp_path):
    setting = Setting(runs=tmp_path / "runs", commit="abc1234")
    slow = {f"slow-{seed}": cases.recipe(seed) for seed in (0, 4)}
    fast = replace(cases.recipe(4), optimizer=replaced(cases.recipe(4).optimizer, lr=2.0))
    train_all({**slow, "fast": fast}, cases.some_data(), setting, item="x")
    found = written(tmp_path, setting, rows=[{"seed": 7}, {"loss": 1.0}])
    assert found["seeds"] == [0, 4, 7]
    assert found["commit"] == "abc1234"
    first, second = found["recipes"]
    assert first["runs"] == ["x/slow-0", "x/slow-4"]
    assert first["recipe"]["epochs"] == cases.EPOCHS
    assert first["recipe"]["optimizer.keywords.lr"] == 0.5
    assert second == {"runs": ["x/fast"], "differs": {"optimizer.keywords.lr": 2.0}}
    assert str(tmp_path) not in json.dumps(found)  # a folder is of one machine
    assert written(tmp_path, replace(setting))["recipes"] == []


def replaced(made, **keywords):
    return type(made)(made.func, *made.args, **{**made.keywords, **keywords})


def test_a_recipe_without_a_name_is_known_by_its_seed(tmp_path):
    setting = Setting()
    made = replace(cases.recipe(3), model=lambda: torch.nn.Linear(3, 2))
    train_all({"a": made}, cases.some_data(), setting, item="x")
    assert setting.recipes == {"x/a": {"seed": 3}}
    assert written(tmp_path, setting)["seeds"] == [3]


def test_a_row_and_a_claim_have_a_line_each(tmp_path):
    claims = [Claim(paper="seed 003", where="", text=text, expected=1.0, measured=0.0) for text in "ab"]
    written(tmp_path, rows=[{"seed": 0, "curve": [1, 2]}, {"seed": 1}], claims=claims)
    lines = (tmp_path / "margins" / "x.json").read_text(encoding="utf8").splitlines()
    assert '  {"seed": 0, "curve": [1, 2]},' in lines
    assert sum('"text"' in line for line in lines) == 2


def test_a_reference_is_written_where_there_is_one(tmp_path):
    about = {"paper": "seed 003", "where": "", "text": "", "expected": 1.0, "measured": 0.5}
    with_one, without = written(tmp_path, claims=[Claim(**about, reference=0.0), Claim(**about)])["claims"]
    assert (with_one["reference"], with_one["verdict"]) == (0.0, "holds in direction")
    assert "reference" not in without


@pytest.fixture
def asked():
    """git is asked anew, and nothing of it is left."""
    own_commit.cache_clear()
    yield
    own_commit.cache_clear()


@pytest.fixture
def git(monkeypatch, asked):
    """Answers in the place of git's."""
    answers = {"ls-files": "provenance.py", "rev-parse": "abc1234", "status": ""}

    def run(words, **_):
        if answers is None:
            raise FileNotFoundError("git")
        return subprocess.CompletedProcess(words, 0, stdout=answers[words[1]] + "\n")

    monkeypatch.setattr(provenance.subprocess, "run", run)
    return answers


@pytest.mark.parametrize(
    ("answers", "commit"),
    [
        ({}, "abc1234"),
        ({"status": " M x.py"}, "abc1234 + changes"),
        ({"ls-files": ""}, None),  # installed within another repository
        ({"ls-files": "", "rev-parse": ""}, None),
    ],
)
def test_the_commit_is_that_of_the_packages_own_checkout(git, answers, commit):
    git.update(answers)
    assert Setting().commit == commit
    assert Setting(commit="given").commit == "given"


def test_results_that_were_written_are_no_changes_and_python_files_are(monkeypatch, tmp_path, asked):
    def git(*words):
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit():
        own_commit.cache_clear()
        return own_commit()

    for file in ("src/own.py", "src/other/deep.py", "results/x.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1\n", encoding="utf8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "src" / "own.py"))
    head = git("rev-parse", "--short", "HEAD").strip()
    (tmp_path / "results" / "x.json").write_text("2\n", encoding="utf8")
    (tmp_path / "results" / "y.json").write_text("2\n", encoding="utf8")
    assert commit() == head
    for changed in ("src/other/deep.py", "benchmarks/new.py"):
        (tmp_path / changed).parent.mkdir(exist_ok=True)
        (tmp_path / changed).write_text("2\n", encoding="utf8")
        assert commit() == f"{head} + changes"
        git("stash", "-qu")


def test_without_git_there_is_no_commit(monkeypatch, asked):
    monkeypatch.setenv("PATH", "")
    assert Setting().commit is None


def test_what_is_not_finite_is_written_as_json(tmp_path):
    claims = [Claim(paper="seed 003", where="", text="é", expected=1.0, measured=math.nan)]
    rows = [{"seed": 0, "loss": [1.0, math.inf]}]
    target = Outcome(Experiment("margins", "x", "", "", None), Setting(), rows, claims, 0.0).write(tmp_path)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    written = json.loads(target.read_text(encoding="utf8"), parse_constant=refuse)
    assert written["rows"] == [{"seed": 0, "loss": [1.0, "Infinity"]}]
    assert in_numbers(written["rows"]) == rows
    assert written["claims"][0]["measured"] == "NaN"
    for claim in (written["claims"][0], {**written["claims"][0], "measured": "nan"}):  # as older files have it
        assert read_claim(claim).verdict == "not decidable"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    outcome = Outcome(Experiment("margins", "x", "", "", None), Setting(), [], [], 0.0)
    target = outcome.write(tmp_path)
    before = target.read_text()
    monkeypatch.setattr(storage.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        outcome.write(tmp_path)
    assert target.read_text() == before
