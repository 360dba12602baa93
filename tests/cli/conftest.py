"""A study of a user's own, in a folder of its own: what the commands are tried on."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

STUDY = """
import time

import torch
from torch import nn

import helper
import ritz

CALLS = []


def network():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def data(seed, n):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator)
    return X, X[:, :3].argmax(1)


def make_risk():
    CALLS.append("risk")
    print("a line that the user's code prints")
    return ritz.Risk(network(), nn.CrossEntropyLoss(), data(0, helper.SIZE))


def make_test_risk():
    return ritz.Risk(network(), nn.CrossEntropyLoss(), data(1, 30))


def other_model():
    return ritz.Risk(nn.Linear(4, 3), nn.CrossEntropyLoss(), data(1, 30))


def slow():
    def forward(model, batch):
        time.sleep(0.05)
        return model(batch[0])

    return ritz.Risk(network(), nn.CrossEntropyLoss(), data(0, 40), forward=forward)


def no_risk():
    return network()


def fails():
    raise KeyError("mnist")


def diverged():
    model = network()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    return ritz.Risk(model, nn.CrossEntropyLoss(), data(0, 40))


def misfit():
    return ritz.Risk(nn.Linear(7, 3), nn.CrossEntropyLoss(), data(0, 40))


def other_data():
    return ritz.Risk(network(), nn.CrossEntropyLoss(), (torch.ones(5, 7), torch.zeros(5, dtype=torch.long)))


def other_labels():
    return ritz.Risk(network(), nn.CrossEntropyLoss(), (torch.ones(5, 4), torch.full((5,), 7)))
"""


def weights(size: float = 1.0) -> dict[str, torch.Tensor]:
    """A state dict of the study's network."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    return {
        name: size * torch.randn(t.shape, generator=generator, dtype=torch.float32)
        for name, t in model.state_dict().items()
    }


@pytest.fixture
def state() -> Callable[[float], dict[str, torch.Tensor]]:
    """Weights of the network, by their size."""
    return weights


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with study.py and checkpoints of its network: a, b (safetensors) and c (torch.save)."""
    (tmp_path / "helper.py").write_text("SIZE = 40\n")
    (tmp_path / "study.py").write_text(STUDY)
    for name, size in (("a", 0.5), ("b", 1.0)):
        save_file(weights(size), tmp_path / f"{name}.safetensors")
    torch.save(weights(2.0), tmp_path / "c.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path
