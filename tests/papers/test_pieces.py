"""Pieces of an experiment: made once, read back equal, and made anew where anything that they depend on has changed."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ritz.papers import pieces as pieces_of
from ritz.papers.experiment import Setting
from ritz.papers.pieces import Pieces
from ritz.results import Estimate

CALLS = []  # of `measured`


@pytest.fixture(autouse=True)
def nothing_called():
    CALLS.clear()


@pytest.fixture
def setting(tmp_path):
    return Setting(runs=tmp_path / "runs")


def measured(X, scale=1.0, progress=None):
    """Everything that a piece may hold."""
    CALLS.append(scale)
    if progress is not None:
        progress(1, 1)
    return {
        "sum": Estimate(name="sum", value=scale * float(X.sum()), stderr=0.5),
        "rows": [{"seed": 0, "curve": [1.0, float("nan")], "steps": (1, 2), "name": None}],
        "weights": scale * X,
    }


def test_a_piece_is_made_once_and_read_back_equal(setting):
    X = torch.arange(4.0)
    first = Pieces(setting, "toy").keep("seed 0", measured, X)
    again = Pieces(setting, "toy").keep("seed 0", measured, X)
    assert len(CALLS) == 1
    assert again["sum"] == first["sum"]
    assert repr(again["rows"]) == repr(first["rows"])  # NaN is not equal to itself
    assert torch.equal(again["weights"], first["weights"])


def test_pieces_of_other_names_and_other_experiments_stand_apart(setting):
    X = torch.arange(4.0)
    for item, name in (("toy", "seed 0"), ("toy", "seed 1, weight decay 0.0001"), ("other", "seed 0")):
        Pieces(setting, item).keep(name, measured, X)
    assert len(CALLS) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda setting, work, X: (setting, partial(measured, scale=2.0), X),
        lambda setting, work, X: (setting, work, X + 1),
        lambda setting, work, X: (setting, work, X.float()),
        lambda setting, work, X: (replace(setting, device="meta"), work, X),
    ],
    ids=["another setting", "other data", "another precision", "another device"],
)
def test_a_piece_is_made_anew_where_what_it_depends_on_has_changed(setting, change):
    X = torch.arange(4.0)
    Pieces(setting, "toy").keep("seed 0", measured, X)
    setting, work, X = change(setting, measured, X)
    found = Pieces(setting, "toy").keep("seed 0", work, X)
    assert len(CALLS) == 2
    assert float(found["sum"].value) == CALLS[1] * float(X.sum())
    Pieces(setting, "toy").keep("seed 0", work, X)
    assert len(CALLS) == 2  # the new one has taken the place of the old one


def test_a_piece_of_other_code_is_made_anew(setting, monkeypatch):
    for mark in ("old", "old", "new"):
        monkeypatch.setattr(pieces_of, "code", lambda patterns, mark=mark: {"ritz": mark})
        Pieces(setting, "toy").keep("seed 0", measured, torch.ones(2))
    assert len(CALLS) == 2


def test_a_module_counts_by_what_it_consists_of_and_by_its_weights(setting):
    def keep(model):
        Pieces(setting, "toy").keep("norm", norm, model)

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    keep(model)
    keep(model)
    assert len(CALLS) == 1
    keep(nn.Sequential(model[0], nn.Tanh()))
    assert len(CALLS) == 2
    with torch.no_grad():
        model[0].bias += 1
    keep(model)
    assert len(CALLS) == 3


def norm(model):
    CALLS.append(1.0)
    return float(sum(p.detach().norm() for p in model.parameters()))


def test_progress_is_called_and_makes_no_other_piece(setting):
    seen = []
    for _ in range(2):
        Pieces(setting, "toy").keep("seed 0", measured, torch.ones(2), progress=lambda *at: seen.append(at))
    assert seen == [(1, 1)]


def test_without_a_folder_for_runs_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for pieces in (Pieces(), Pieces(Setting(), "toy")):
        pieces.keep("seed 0", measured, torch.ones(2))
        assert pieces.training([0]) is None
    assert len(CALLS) == 2
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_no_piece(setting):
    with pytest.raises(RuntimeError, match="lost"):
        Pieces(setting, "toy").keep("seed 0", fail, torch.ones(2))
    Pieces(setting, "toy").keep("seed 0", measured, torch.ones(2))
    assert len(CALLS) == 1


def fail(X):
    raise RuntimeError("lost")


def test_a_function_without_a_name_is_refused_before_any_work(setting):
    with pytest.raises(TypeError, match=r"work has .*lambda.*, which has no name to know it by"):
        Pieces(setting, "toy").keep("seed 0", lambda X: CALLS.append(1.0), torch.ones(2))
    assert not CALLS


def test_a_damaged_piece_is_refused_by_the_name_of_its_file(setting):
    Pieces(setting, "toy").keep("seed 0", measured, torch.ones(2))
    file = setting.runs / "toy" / "seed 0.json"
    file.write_text(file.read_text(encoding="utf8").replace('"cpu"', '"gpu"'), encoding="utf8")
    with pytest.raises(ValueError, match="seed 0"):
        Pieces(setting, "toy").keep("seed 0", measured, torch.ones(2))
