"""The table of experiments: every one runs at smoke budget, and what it writes can be read."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from ritz import storage
from ritz.papers.base import Claim
from ritz.papers.experiment import Experiment, Outcome, Setting
from ritz.papers.experiments import EXPERIMENTS, PAPERS, find, reproduce


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """MNIST and Fashion-MNIST of noise, as the official files have them."""
    monkeypatch.delenv("RITZ_DATA", raising=False)
    for name in ("MNIST", "FashionMNIST"):
        raw = tmp_path / name / "raw"
        raw.mkdir(parents=True)
        g = torch.Generator().manual_seed(0)
        for begin, num in (("train", 300), ("t10k", 300)):
            labels = torch.randint(10, (num,), generator=g, dtype=torch.uint8)
            shown = torch.randint(256, (num, 28, 28), generator=g, dtype=torch.uint8)
            head = bytes([0, 0, 8])
            sizes = [part.to_bytes(4, "big") for part in (num, 28, 28)]
            (raw / f"{begin}-labels-idx1-ubyte").write_bytes(head + bytes([1]) + sizes[0] + bytes(labels.tolist()))
            pixels = bytes(shown.flatten().tolist())
            (raw / f"{begin}-images-idx3-ubyte").write_bytes(head + bytes([3]) + b"".join(sizes) + pixels)
    return tmp_path


@pytest.mark.parametrize("item", ["affine", "logistic"])
def test_an_experiment_runs_at_smoke_budget_and_is_written_whole(folder, tmp_path, item):
    (experiment,) = [one for one in EXPERIMENTS if one.item == item]
    seen = []
    outcome = reproduce(experiment, Setting("smoke", folder), lambda *args: seen.append(args))
    assert outcome.claims
    assert all(claim.paper in PAPERS[experiment.paper] for claim in outcome.claims)
    assert seen[-1][1] == seen[-1][2]
    target = outcome.write(tmp_path / "results")
    written = json.loads(target.read_text(encoding="utf8"))
    assert target == tmp_path / "results" / experiment.paper / f"{item}.json"
    assert [claim["verdict"] for claim in written["claims"]] == [claim.verdict for claim in outcome.claims]
    assert written["setting"]["budget"] == "smoke"
    assert written["rows"]
    assert not list(target.parent.glob("*.part"))


@pytest.mark.parametrize("paper", ["false-friend", "pac-bayes"])
def test_the_network_of_the_papers_runs_at_smoke_budget_on_the_real_images(paper, monkeypatch):
    root = os.environ.get("RITZ_DATA")
    if root is None:
        pytest.skip("RITZ_DATA is not set: it names the folder with MNIST and the other data sets")
    outcome = reproduce(find(paper, "mlp")[0], Setting("smoke", Path(root)))
    assert len(outcome.rows) == 6
    assert {claim.paper for claim in outcome.claims} <= set(PAPERS[paper])


def test_every_experiment_has_a_paper_and_a_name_of_its_own():
    assert {one.paper for one in EXPERIMENTS} <= set(PAPERS)
    assert len({(one.paper, one.item) for one in EXPERIMENTS}) == len(EXPERIMENTS)


def test_a_paper_is_known_by_its_number_too():
    assert find("003") == find("margins")


def test_what_is_not_there_is_refused_with_what_is():
    with pytest.raises(ValueError, match="no paper is called 'flatness'; there are false-friend, pac-bayes, margins"):
        find("flatness")
    with pytest.raises(ValueError, match="margins has no experiment 'mlp'; it has affine"):
        find("margins", "mlp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "long"}, "budget must be one of smoke, short, paper"),
        ({"seeds": 1}, "two seeds or more, got 1"),
        ({"device": "gpu"}, "device 'gpu' is not to be had here"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not to be had here"),
    ],
)
def test_a_bad_setting_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Setting(**options)


def test_missing_images_are_told_of_before_any_work(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        reproduce(find("margins")[0], Setting("smoke", tmp_path / "nowhere"))


def test_what_is_not_finite_is_written_as_json(tmp_path):
    claims = [Claim(paper="seed 003", where="", text="é", expected=1.0, measured=math.nan)]
    rows = [{"seed": 0, "loss": [1.0, math.inf]}]
    target = Outcome(Experiment("margins", "x", "", "", None), Setting(), rows, claims, 0.0).write(tmp_path)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    written = json.loads(target.read_text(encoding="utf8"), parse_constant=refuse)
    assert written["rows"] == [{"seed": 0, "loss": [1.0, "inf"]}]
    assert written["claims"][0]["measured"] == "nan"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    outcome = Outcome(Experiment("margins", "x", "", "", None), Setting(), [], [], 0.0)
    target = outcome.write(tmp_path)
    before = target.read_text()
    monkeypatch.setattr(storage.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        outcome.write(tmp_path)
    assert target.read_text() == before
