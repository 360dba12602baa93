"""A product that is recorded and replayed is the product; on a CPU the recording is a call of the same function."""

import cases
import pytest
import torch
from graphs import taped
from torch import nn
from work import counted

import ritz
from ritz import replay
from ritz.plan import Plan

MATRICES = {
    "forward": lambda risk: ritz.Hessian(risk, route="forward"),
    "reverse": lambda risk: ritz.Hessian(risk, route="reverse"),
    "auto": lambda risk: ritz.Hessian(risk),
    "ggn": lambda risk: ritz.GGN(risk),
    "empirical": lambda risk: ritz.EmpiricalFisher(risk),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8, 3))


@pytest.fixture
def problem():
    model = network()
    data = torch.randn(10, 1, 4, 4), torch.randint(3, (10,))
    return model, data


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_replayed_products_are_the_eager_ones_while_weights_data_and_statistics_move(problem, matrix, mode):
    model, (X, y) = problem
    for step in range(4):
        data = [(X[:4] + step, y[:4]), (X[4:8] + step, y[4:8]), (X[8:] + step, y[8:])]  # one is ragged
        made = [MATRICES[matrix](risk_of(model, data, mode, replay)) for replay in (True, False)]
        rows = made[0].probes(range(1 + step % 2), seed=step)
        for _ in range(2):
            torch.testing.assert_close(*(operator.rows(rows) for operator in made), rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
            model[1].running_mean += 0.1


def risk_of(model: nn.Module, data: object, mode: str = "eval", replay: bool | None = True) -> ritz.Risk:
    return ritz.Risk(model, nn.CrossEntropyLoss(), data, mode=mode, plan=Plan(replay=replay))


@pytest.mark.parametrize("matrix", ["forward", "reverse", "ggn", "empirical"])
@pytest.mark.parametrize("name", cases.NAMES)
def test_what_is_recorded_neither_reads_a_number_nor_sends_one(monkeypatch, name, matrix):
    """A GPU refuses to record either."""
    A = MATRICES[matrix](cases.problem(name).risk(plan=Plan(cache=False)))
    rows, batch = A.probes([0, 1], seed=0), next(iter(A.risk.batches))
    with A.risk.session():
        A._batch_rows(A.risk.params(), batch, rows)  # tries and choices come first
        with counted(monkeypatch) as work:
            A._batch_rows(A.risk.params(), batch, rows)
    assert (work.looks, work.sent) == (0, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_at_other_weights_than_its_own_a_risk_records_nothing(problem, device):
    """A recording reads weights where they were."""
    model, (X, y) = problem
    G = ritz.GGN(risk_of(model.to(device), (X.to(device), y.to(device))))
    rows, batch = G.probes([0], seed=0), next(iter(G.risk.batches))
    with G.risk.session():
        here = G.risk.params()
        there = {name: 2 * p for name, p in here.items()}
        found = [G.batch_rows(params, batch, rows)[0] for _ in range(3) for params in (here, there)]
        with G.aside():
            wanted = [G.batch_rows(params, batch, rows)[0] for _ in range(3) for params in (here, there)]
    torch.testing.assert_close(found, wanted)
    assert len(G.risk.shortcuts.recordings) == 1


def test_a_recording_serves_all_batches_of_one_shape_and_all_risks_made_from_one(problem):
    model, (X, y) = problem
    risk = risk_of(model, [(X[:4], y[:4]), (X[4:8], y[4:8])])
    truth = ritz.GGN(risk_of(model, [(X[:4], y[:4])], replay=False))
    G = ritz.GGN(risk.on([(X[:4], y[:4])]))
    v = torch.randn(G.dim)
    for _ in range(3):
        torch.testing.assert_close(ritz.GGN(risk) @ v, ritz.GGN(risk_of(model, (X[:8], y[:8]), replay=False)) @ v)
        torch.testing.assert_close(G @ v, truth @ v)
    assert len(risk.shortcuts.recordings) == len(G.risk.shortcuts.recordings) == 1


def test_a_risk_at_other_weights_does_not_read_those_of_the_recording(problem):
    model, data = problem
    risk = risk_of(model, data)
    H, v = ritz.Hessian(risk), torch.randn(risk.dim)
    for _ in range(3):
        here = H @ v
    other = {name: 2 * p for name, p in risk.params().items()}
    for _ in range(3):
        torch.testing.assert_close(
            ritz.Hessian(risk.at(other)) @ v, ritz.Hessian(risk_of(model, data, replay=False).at(other)) @ v
        )
    torch.testing.assert_close(H @ v, here)


def test_a_risk_of_other_outputs_has_recordings_of_its_own(problem):
    model, data = problem
    v = torch.randn(ritz.GGN(risk_of(model, data)).dim)
    found = []
    for risk in (risk_of(model, data), risk_of(model, data, replay=False)):
        for _ in range(2):
            ritz.GGN(risk) @ v
        found.append(ritz.GGN(risk.through(lambda out, _: 3 * out)) @ v)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_graph_sees_changes_of_weights_modules_and_class_weights(problem, matrix, monkeypatch):
    monkeypatch.setattr(replay, "_recorded", taped)
    model, data = problem
    weight = torch.ones(3)
    model[0].requires_grad_(False)
    made = [
        MATRICES[matrix](ritz.Risk(model, nn.CrossEntropyLoss(weight), data, plan=Plan(replay=replays)))
        for replays in (True, False)
    ]
    for step in range(5):
        rows = made[0].probes(range(1), seed=step)
        for _ in range(2):
            torch.testing.assert_close(*(operator.rows(rows) for operator in made), rtol=1e-10, atol=1e-12)
        if step == 1:
            model[1].eps = 1.0
        if step == 2:
            model[0].weight = nn.Parameter(2 * model[0].weight.detach(), requires_grad=False)
        if step == 3:
            weight[0] = 3.0
    assert len(made[0].risk.shortcuts.recordings) > 1


@pytest.mark.parametrize(
    ("change", "replays"),
    [
        ({}, False),  # a CPU
        ({"plan": Plan(replay=True)}, True),
        ({"plan": Plan(replay=True), "dropout": True}, False),
    ],
    ids=["CPU", "asked for", "masks by batch"],
)
def test_when_products_are_recorded(problem, change, replays):
    model, data = problem
    assert ritz.Risk(model, nn.CrossEntropyLoss(), data, **change).replays is replays


def test_drawn_labels_belong_to_the_batch_and_are_not_recorded(problem):
    model, (X, y) = problem
    risk = risk_of(model, [(X[:5], y[:5]), (X[5:], y[5:])])
    for _ in range(3):
        F = ritz.Fisher(risk, num_samples=2, seed=3)
        truth = ritz.Fisher(risk_of(model, [(X[:5], y[:5]), (X[5:], y[5:])], replay=False), num_samples=2, seed=3)
        torch.testing.assert_close(F.dense(), truth.dense())
    assert len(risk.shortcuts.recordings) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("matrix", MATRICES)
def test_on_a_gpu_graphs_are_replayed_by_default_for_known_modules(problem, matrix):
    model, (X, y) = problem
    model.cuda().double()
    data = X.cuda().double(), y.cuda()
    risk, truth = (risk_of(model, data, replay=replay) for replay in (None, False))
    rows = ritz.GGN(risk).probes(range(2), seed=0)
    for _ in range(4):
        torch.testing.assert_close(MATRICES[matrix](risk).rows(rows), MATRICES[matrix](truth).rows(rows))
        with torch.no_grad():
            model[0].weight.mul_(1.1)
    assert len(risk.shortcuts.recordings) == 1
