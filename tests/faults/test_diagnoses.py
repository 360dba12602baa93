"""A batch that does not fit, or whose numbers are not finite: what is said names how much fits, and where it began."""

import logging

import pytest
import torch
from cases import Calls
from torch import nn

import ritz
from ritz.cli import main
from ritz.errors import NonFiniteError, RitzError
from ritz.memory import NoRoomError, is_shortage

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3
CE = nn.CrossEntropyLoss()


class Tight(nn.Module):
    """Has room for so many samples, and fails in the words of a GPU or of a CPU."""

    def __init__(self, most, error=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.most, self.error = most, error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        self.sizes = Calls()

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise self.error
        return self.net(x)


def cpu_error():
    """What torch itself raises on a CPU."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


# --------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("most", "fits"), [(5, 4), (3, 2), (15, 8)])
def test_a_batch_that_must_stay_whole_is_refused_with_what_would_fit(most, fits):
    risk = ritz.Risk(Tight(most), CE, (X, Y), mode="train")
    with pytest.raises(NoRoomError, match=rf"a batch of 16 samples .*Tried to allocate 2 GiB.*; {fits} would fit"):
        risk.loss()
    again = ritz.Risk(Tight(most), CE, (X, Y), mode="train", batch_size=fits)  # as it was advised
    assert again.loss() > 0


def test_where_no_part_fits_that_is_said():
    """One sample would, and has no batch statistics."""
    with pytest.raises(NoRoomError, match="nor does a part of it: use mode='eval'"):
        ritz.Risk(Tight(1), CE, (X, Y), mode="train").loss()


def test_products_of_a_batch_that_must_stay_whole_are_refused_with_what_would_fit():
    model = Tight(16)
    risk = ritz.Risk(model, CE, (X, Y), mode="train", plan=ritz.Plan(route="reverse", cache=False))
    risk.check()
    model.most = 8
    with pytest.raises(NoRoomError, match="8 would fit: give data in batches of 8"):
        ritz.Hessian(risk).rows(torch.ones(2, risk.dim))


def test_one_sample_that_does_not_fit_is_refused_with_what_to_do():
    with pytest.raises(NoRoomError, match=r"one sample at a time does not fit in memory \(CUDA out of memory"):
        ritz.Risk(Tight(0), CE, (X, Y)).loss()


def test_smaller_pieces_are_said_once_and_remembered(caplog):
    model = Tight(5)
    risk = ritz.Risk(model, CE, (X, Y))
    with caplog.at_level(logging.WARNING, "ritz"):
        risk.loss()
    assert [record.getMessage() for record in caplog.records] == [
        f"out of memory: batches are now taken in pieces of {size} samples" for size in (8, 4)
    ]
    caplog.clear()
    model.sizes.clear()
    risk.gradient()
    assert not caplog.records
    assert max(model.sizes) == 4


def test_a_cpu_that_runs_out_of_memory_is_heard_too():
    error = cpu_error()
    assert not isinstance(error, torch.OutOfMemoryError)  # or there is no more need for this
    assert is_shortage(error)
    model = Tight(5, error)
    risk = ritz.Risk(model, CE, (X, Y))
    assert risk.loss() == pytest.approx(ritz.Risk(model.net, CE, (X, Y)).loss(), rel=1e-12)
    assert risk._piece == 4


def test_other_errors_are_no_want_of_memory():
    with pytest.raises(KeyError, match="lost"):
        ritz.Risk(Tight(5, KeyError("lost")), CE, (X, Y)).loss()


STUDY = """
import torch
from torch import nn
import ritz

class Tight(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
    def forward(self, x):
        if len(x) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.net(x)

def make(mode="eval"):
    torch.manual_seed(0)
    return ritz.Risk(Tight(), nn.CrossEntropyLoss(), (torch.randn(16, 4), torch.arange(16) % 3), mode=mode)

def whole():
    return make("train")
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    (tmp_path / "study.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)


def test_a_command_notes_smaller_pieces_and_says_what_would_fit(study, capfd):
    assert main(["measure", "study.py:make", "--measures", "train_loss", "--out", "run"]) == 0
    assert "note: out of memory: batches are now taken in pieces of 4 samples" in capfd.readouterr().out
    assert main(["measure", "study.py:whole", "--measures", "train_loss", "--out", "other"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ritz measure: a batch of 16 samples does not fit in memory")
    assert "4 would fit" in line
    assert not logging.getLogger("ritz").handlers


# ------------------------------------------------------------------------------------------------- not finite


class Layers(nn.Module):
    """Overflows in half precision between its layers, in one of them, or nowhere."""

    def __init__(self, where=""):
        super().__init__()
        self.first, self.second, self.where = nn.Linear(4, 6), nn.Linear(6, 3), where

    def forward(self, x):
        h = self.first(x)
        if self.where == "between":
            h = (h.half() * 6e4 * 6e4).to(h)
        return self.second(h)


def loss_of(model, x=X, loss=CE, **options):
    return ritz.Risk(model, loss, (x, Y), batch_size=5, **options).loss()


def test_data_that_is_not_finite_is_named():
    bad = X.clone()
    bad[12, 1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"batch 2 \(samples 10 to 14\) is nan: it is in the data .*\(float64\)"):
        loss_of(Layers(), bad)


def test_the_layer_whose_output_is_the_first_that_is_not_finite_is_named_with_its_dtype():
    x = X.clone()
    x[7] *= 1e30
    model = nn.Sequential(Layers(), nn.Tanh())
    model[0].first.weight.data *= 1e10
    with pytest.raises(
        NonFiniteError, match=r"batch 1 .* is nan: first not finite is the output of 0.first \(Linear, float32\)"
    ):
        loss_of(model, x, dtype=torch.float32)


def test_what_overflows_between_two_layers_is_named_by_the_one_it_goes_into():
    with pytest.raises(NonFiniteError, match=r"batch 0 .*what goes into second \(Linear, float64\)"):
        loss_of(Layers("between"))


def test_a_loss_that_is_itself_not_finite_is_named():
    with pytest.raises(NonFiniteError, match="outputs of all layers are finite, so that it is the loss that is not"):
        loss_of(Layers(), loss=lambda out, y: (out - out).mean().log())


def test_the_search_leaves_no_hooks_behind():
    model = Layers("between")
    with pytest.raises(NonFiniteError):
        loss_of(model)
    assert not any(module._forward_hooks for module in model.modules())


class Norm(nn.Module):
    """The norm of a vector that is zero for one sample: finite, and its derivative is not."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6, bias=False), nn.Linear(1, 3)

    def forward(self, x):
        return self.outer(self.inner(x).square().sum(1, keepdim=True).sqrt())


def test_a_gradient_that_is_not_finite_is_named_by_batch_layer_and_dtype():
    x = X.clone()
    x[11] = 0.0
    risk = ritz.Risk(Norm(), CE, (x, Y), batch_size=5)
    assert risk.loss() > 0
    with pytest.raises(
        NonFiniteError, match=r"the gradient of batch 2 is not finite, first in inner.weight \(float64\), though"
    ):
        risk.gradient()


def test_a_gradient_whose_sum_alone_overflows_is_an_error():
    """1e308 and 1e308."""
    model = nn.Linear(1, 1, bias=False)
    data = [(torch.full((1, 1), 1e308), torch.zeros(1, 1))] * 2
    risk = ritz.Risk(model, lambda out, y: (out * 1e-300).sum() * 1e300, data)
    with pytest.raises(RitzError, match="the gradient is not finite, though that of each batch is"):
        risk.gradient()
