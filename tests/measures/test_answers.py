"""A measurement that is killed within a search goes on within it: what the data said before is not asked for again."""

import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ritz
from ritz import checkpoint, walks
from ritz.checkpoint import Checkpoint
from ritz.measures import answers
from ritz.measures.answers import answered, recalled
from ritz.measures.registry import MEASURES

SEARCHES = (
    "sigma", "sigma_adaptive", "certificate", "expected_loss", "epsilon_sharpness", "epsilon_sharpness_subspace",
    "worst_case_l2", "worst_case_adaptive_linf", "normalised_sharpness", "average_case", "layer_spectral_norm",
    "relative_flatness", "ggn_trace",
)  # fmt: skip


class Killed(BaseException):
    """What no code of ritz may catch."""


LATE = 6  # walks before the kill at which answers are saved: to write all of them at every walk would take minutes


@pytest.fixture
def count(monkeypatch):
    """Counts walks over the data, and kills at one of them; the clock of checkpoints begins a few walks before that."""
    known = {"walks": 0, "last": -1}
    real = walks.fold

    def fold(*args, **keywords):
        known["walks"] += 1
        if known["walks"] == known["last"]:
            raise Killed
        return real(*args, **keywords)

    monkeypatch.setattr(walks, "fold", fold)
    clock = SimpleNamespace(monotonic=lambda: max(known["walks"] - known["last"] + LATE, 0))
    monkeypatch.setattr(checkpoint, "time", clock)
    return known


@cache
def learned() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A classifier that has learned, and its data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))
    X = torch.randn(40, 4)
    y = X[:, :3].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model, X, y


def fitted() -> tuple[ritz.Risk, dict[str, torch.Tensor]]:
    """Its risk, anew, and a start that it might have come from."""
    model, X, y = copy.deepcopy(learned())
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=16)
    return risk, {name: 0.5 * p.detach() for name, p in model.named_parameters()}


def measured(key: str, state: Checkpoint) -> ritz.measures.Measurement:
    risk, init = fitted()
    return ritz.measure(risk, init=init, measures=[key], checkpoint=state)


@pytest.fixture(scope="module")
def wholes():
    """By key: what a measurement finds that is left alone, and how often it walks over the data."""
    return {}


@pytest.mark.parametrize("large", [0, 1 << 10], ids=["in files of their own", "together"])
@pytest.mark.parametrize("key", SEARCHES)
def test_a_search_goes_on_where_it_was_killed(key, large, count, wholes, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "SMALL", large)
    if key not in wholes:
        wholes[key] = measured(key, Checkpoint(tmp_path / "whole", every=1e9)), count["walks"]
    whole, total = wholes[key]
    count["walks"], count["last"] = 0, total - 2
    with pytest.raises(Killed):
        measured(key, Checkpoint(tmp_path / "killed", every=1.0))
    count["walks"], count["last"] = 0, -1
    again = measured(key, Checkpoint(tmp_path / "killed", every=0.0))
    assert not again.failures
    assert again[key] == whole[key]
    anew = 6 if total > 12 else total  # checks of the first product or batch, what was under way, and the rest
    assert count["walks"] <= anew


def test_states_of_searches_are_removed_when_a_measurement_is_done(tmp_path):
    measured("sigma", Checkpoint(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_measure_of_the_users_that_gives_no_estimate_is_told_so(tmp_path):
    own = replace(MEASURES["expected_loss"], key="own", compute=lambda subject: 3.0)
    risk, _ = fitted()
    found = ritz.measure(risk, measures=[own], checkpoint=tmp_path)
    assert found.failures["own"] == "TypeError: compute must return a ritz.Estimate, got float"


def asked(saved, points: list[float], told: float) -> list[float]:
    with recalled(saved):
        return [float(answered([torch.tensor([p])], lambda: torch.tensor(told))) for p in points]


def test_what_follows_another_question_is_forgotten(tmp_path):
    for file, small in ((tmp_path / "together", 8), (tmp_path / "apart", 0)):
        with pytest.MonkeyPatch.context() as patch, Checkpoint(file, every=0.0).open({}) as saved:
            patch.setattr(answers, "SMALL", small)
            assert asked(saved, [1.0, 2.0, 3.0], told=7.0) == [7.0, 7.0, 7.0]
        with pytest.MonkeyPatch.context() as patch, Checkpoint(file, every=0.0).open({}) as saved:
            patch.setattr(answers, "SMALL", small)
            assert asked(saved, [1.0, 2.5, 3.0], told=8.0) == [7.0, 8.0, 8.0]
        with Checkpoint(file, every=0.0).open({}) as saved:
            assert asked(saved, [1.0, 2.5, 3.0, 4.0], told=9.0) == [7.0, 8.0, 8.0, 9.0]


def test_without_a_state_every_question_is_asked():
    assert float(answered([torch.ones(1)], lambda: torch.tensor(3.0))) == 3.0
