"""The user's function and files of weights, by the functions that read them."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ritz
from ritz.cli.study import Code, fit_weights, placed, read_weights, weights_mark

FILE = Path("a.pt")


class Tied(nn.Module):
    """One matrix twice, BatchNorm, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def risk_of(model: nn.Module, **options) -> ritz.Risk:
    tokens = torch.arange(10) % 5
    return ritz.Risk(model, nn.CrossEntropyLoss(), (tokens, tokens.roll(1)), **options)


def test_tied_weights_go_by_one_name_and_buffers_come_along():
    model, other = Tied(), Tied()
    other.train()(torch.arange(5))  # its statistics have moved
    fitted = fit_weights(model, other.state_dict(), FILE)
    assert set(fitted) == set(other.state_dict()) - {"head.weight"}
    moved = risk_of(model).at(fitted)
    assert moved.loss() == pytest.approx(risk_of(other).loss(), rel=1e-12)
    once = {name: t for name, t in other.state_dict().items() if name != "head.weight"}  # as safetensors has it
    assert fit_weights(model, once, FILE).keys() == fitted.keys()


def test_tied_weights_that_are_not_equal_are_refused():
    state = {name: t.clone() for name, t in Tied().state_dict().items()}
    state["head.weight"] += 1
    with pytest.raises(ValueError, match=r"head.weight and embed.weight are one tensor in the model and two in"):
        fit_weights(Tied(), state, FILE)


def test_long_lists_of_names_are_cut():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    with pytest.raises(ValueError, match=r"missing: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight, 2.bias and 4 more;"):
        fit_weights(model, {"x": torch.ones(1)}, FILE)


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"holds no named tensors; save model.state_dict\(\)"):
        read_weights(tmp_path / "a.pt")


def test_a_risk_is_the_same_in_another_precision_and_its_own_is_left_alone():
    risk = risk_of(Tied())
    single = placed(risk, None, "float32")
    assert single.dtype == torch.float32
    assert single.loss() == pytest.approx(risk.loss(), rel=1e-5)
    assert risk.dtype == torch.float64
    assert placed(risk, None, None) is risk
    X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    shown = ritz.Risk(nn.Linear(3, 1), nn.MSELoss(), (X, X[:, :1]), batch_size=4)
    moved = placed(shown, "cpu", "float32")
    assert {batch.data[0].dtype for batch in moved.batches} == {torch.float32}
    assert [batch.size for batch in moved.batches] == [4, 2]


def test_another_weight_has_another_mark():
    risk = risk_of(Tied())
    same, other = risk.at({}), risk.at({"norm.running_mean": torch.ones(4)})
    assert weights_mark(same) == weights_mark(risk) != weights_mark(other)


def test_the_seed_decides_what_is_drawn_in_the_users_function(study):
    with Code(seed=1).open() as code:
        one, again = (weights_mark(code.risk("study.py:make_risk")) for _ in range(2))
        assert code.loaded[study / "study.py"].CALLS == ["risk", "risk"]  # loaded once, called twice
    with Code(seed=2).open() as code:
        assert one == again != weights_mark(code.risk("study.py:make_risk"))


def test_a_file_named_as_a_module_does_not_take_its_place(study):
    import random

    (study / "random.py").write_text((study / "study.py").read_text())
    with Code().open() as code:
        assert code.risk("random.py:make_risk").dim == 131
        assert sys.modules["random"] is random


def test_a_prefix_of_all_names_is_left_out_where_the_rest_fits():
    model = Tied()
    state = model.state_dict()
    for prefix in ("module.", "_orig_mod.", "model.", "net.module."):
        fitted = fit_weights(model, {f"{prefix}{name}": t for name, t in state.items()}, FILE)
        assert set(fitted) == set(state) - {"head.weight"}
    others = {"encoder.a": torch.ones(1), "encoder.b.c": torch.ones(1)}
    with pytest.raises(ValueError, match=r"not in the model: encoder.a, encoder.b.c; give weights"):
        fit_weights(model, others, FILE)


def test_whole_numbers_are_no_weights():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"no real numbers: weight is torch.int8, bias is torch.int8; give weights"):
        fit_weights(model, {name: t.to(torch.int8) for name, t in model.state_dict().items()}, FILE)


def test_the_current_folder_stays_what_it_was(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    text = "import os, ritz\nfrom torch import nn, zeros\nos.chdir('data')\ndef make():\n    os.chdir('/')\n"
    (tmp_path / "mover.py").write_text(
        f"{text}    return ritz.Risk(nn.Linear(2, 1), nn.MSELoss(), (zeros(3, 2), zeros(3, 1)))\n"
    )
    monkeypatch.chdir(tmp_path)
    code = Code()
    with code.open():
        code.risk("mover.py:make")
        assert Path.cwd() == tmp_path


def test_classes_are_not_among_the_functions_that_are_offered(tmp_path):
    (tmp_path / "study.py").write_text("class Net:\n    pass\n\n\ndef build():\n    return Net()\n")
    with Code().open() as code, pytest.raises(ValueError, match=r"has no function 'x'; there are: build$"):
        code.risk(f"{tmp_path / 'study.py'}:x")
