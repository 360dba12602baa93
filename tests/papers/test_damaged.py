"""Folders and files of the papers' experiments that are damaged, or were made by somebody else."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from ritz.papers import pages, pool
from ritz.papers.checkpoints import Folder
from ritz.papers.data import Archive, DataSet, File, load
from ritz.papers.data.pickles import read_pickle
from ritz.papers.recipe import Recipe, on_parameters
from ritz.papers.train import train
from ritz.storage import save

RECIPE = Recipe(
    name="tiny", model=partial(nn.Linear, 3, 2), optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=0.1),
    epochs=1, batch_size=4,
)  # fmt: skip
DATA = {"train": (torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 0]))}


@pytest.fixture
def folder(tmp_path):
    train(RECIPE, DATA, folder=tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", r"run\.json is damaged \(.*\); name another folder, or remove this one"),
        ("[1]", r"run\.json is damaged \(it does not say what is trained here\)"),
        ('{"starts": 3}', "it does not say what is trained here"),
        ('{"starts": [], "format": 9}', "is the folder of another run, format is 9 there and 1 here"),
    ],
)
def test_a_folder_with_another_header_is_refused(folder, text, match):
    (folder / "run.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        train(RECIPE, DATA, folder=folder)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (3, "it is no state of a training run"),
        ({"epoch": 1}, "no step is in it"),
        ({"epoch": "1"}, "no epoch is in it"),
    ],
)
def test_a_checkpoint_that_is_none_is_refused(folder, state, match):
    save(state, folder / "epoch-000001")
    with pytest.raises(ValueError, match=rf"epoch-000001\.json is damaged \({match}\); name another folder"):
        train(RECIPE, DATA, folder=folder)


def test_a_checkpoint_that_does_not_fit_leaves_the_log_alone(folder):
    state = {"epoch": 1, "step": 1, "log_bytes": 0, "seconds": 0.0, "stop": "", "model": {"weight": torch.ones(7)}}
    save(state, folder / "epoch-000001")
    log = (folder / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"run is damaged \(RuntimeError: .*state_dict.*\); name another folder"):
        train(RECIPE, DATA, folder=folder)
    assert (folder / "log.jsonl").read_bytes() == log


def test_what_a_link_leads_to_is_not_cut(folder, tmp_path):
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("mine")
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").symlink_to(thesis)
    opened = Folder(folder, RECIPE, DATA)
    with pytest.raises(ValueError, match=r"log\.jsonl is not a regular file"):
        opened.begin(1, 0, "cpu")
    opened.unlock()
    assert thesis.read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"finish": 1}',
        '{"found": {}}',
        '{"run": {"stop": "finished", "steps": 3, "seconds": 1.0}, "found": 3}',
        '{"run": {"stop": "finished", "steps": "3", "seconds": 1.0}, "found": {}}',
        '{"run": {"stop": "finished", "steps": 3}, "found": {}}',
    ],
)
def test_measurements_that_are_none_are_refused(tmp_path, text):
    (tmp_path / pool.FOUND).write_text(text)
    with pytest.raises(ValueError, match=r"is damaged \(.*\); remove it, and it is measured again"):
        pool._said(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"claims": 3}, "its claims is 3"),
        ({"seconds": "long"}, "its seconds is 'long'"),
        ({"setting": {}}, "KeyError: 'budget'"),
        ({"versions": {"torch": 2}}, "its versions has no torch"),
        ({"claims": [{"verdict": "good"}]}, "a verdict is 'good'"),
        ({"claims": [{"verdict": "holds"}]}, "TypeError"),
        ({"rows": [{"seed": 0}, 3]}, "its rows is"),
        ({"rows": [{"page": 3}]}, "a row's page is 3"),
        ({"rows": [{"page": "curves.md"}]}, "a row's page is 'curves.md'"),
    ],
)
def test_a_result_that_lacks_something_is_refused(tmp_path, change, match):
    good = {
        "paper": "margins", "item": "x", "source": "seed 003", "machine": "", "seconds": 1.0, "claims": [],
        "setting": {"budget": "smoke"}, "versions": {"torch": "2"}, "commit": None,
    }  # fmt: skip
    (tmp_path / "margins").mkdir()
    path = tmp_path / "margins" / "x.json"
    path.write_text(json.dumps(good))
    assert len(pages.read_results(tmp_path)) == 1
    path.write_text(json.dumps(good | change))
    with pytest.raises(
        ValueError, match=rf"x\.json is not a result of `ritz reproduce` \({match}.*\); remove it, or run"
    ):
        pages.read_results(tmp_path)


NOWHERE = Archive("none", "none", "", 0)
SMALL = DataSet(name="small", form="idx", shape=(1, 1, 2), train=(File("x", "", NOWHERE), File("y", "", NOWHERE)))
HEAD = bytes([0, 0, 8])


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (HEAD + bytes([0, 7]), b"", r"x has 0 dimensions by its head, \[\]\.\.\.; remove the file"),
        (HEAD + bytes([5]) + bytes(20), b"", "x has 5 dimensions by its head"),
        (HEAD + bytes([1]) + bytes(4), b"", "x has 1 dimensions by its head"),
        (HEAD + bytes([1, 0, 0, 0, 2, 1, 1]), HEAD + bytes([1, 0, 0, 0, 1, 1]), r"x, y of small hold images \(2,\)"),
    ],
)
def test_an_idx_file_that_cannot_be_is_refused(tmp_path, x, y, match):
    (tmp_path / "x").write_bytes(x)
    (tmp_path / "y").write_bytes(y)
    with pytest.raises(ValueError, match=match):
        load(SMALL, tmp_path, check=False)


@pytest.mark.parametrize("shape", [b"(I1000000000\nS'aaaa'\nt", b"I3\n", b"(I-1\nt", b"(I1\nI1\nI1\nI1\nI1\nt"])
def test_an_array_without_a_shape_takes_no_memory(shape):
    head = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n"
    raw = head + shape + b"cnumpy\ndtype\n(S'u1'\ntRI00\nS'aa'\ntb."
    with pytest.raises(ValueError, match="the pickle is refused: it holds an array without a shape; remove the file"):
        read_pickle(raw, "labels")
