"""Whatever is done to a model between two products, those that are recorded, compiled or kept for are the products.

Random sequences of changes, each followed by products of several operators of one model, beside those of a copy of the
model by operators for which nothing is prepared.
"""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ritz
from ritz import compilation
from ritz.operators import risk_operator

PLAIN = ritz.Plan(cache=False, replay=False, compile=False)
MATRICES = {"Hessian": ritz.Hessian, "GGN": ritz.GGN}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4), nn.Softplus(), nn.Linear(4, 3)
    )


class Studied:
    """A model, its data, and operators that are asked again and again."""

    def __init__(self, draw: random.Random, replay: bool) -> None:
        self.draw, self.model = draw, network()
        self.data = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
        plan = ritz.Plan(compile=True, replay=replay, route="reverse")
        risk = ritz.Risk(self.model, nn.CrossEntropyLoss(), self.data, batch_size=3, plan=plan)
        self.risks = {"all": risk, "block": risk.restrict("4.*"), "train": self._in_training(risk)}
        self.operators = {(name, which): MATRICES[name](r) for name in MATRICES for which, r in self.risks.items()}

    def _in_training(self, risk: ritz.Risk) -> ritz.Risk:
        return ritz.Risk(self.model, nn.CrossEntropyLoss(), self.data, batch_size=3, mode="train", plan=risk.plan)

    def check(self) -> None:
        """Some operators, with one vector or a few."""
        for name, which in self.draw.sample(sorted(self.operators), 3):
            self.check_one(self.operators[name, which], name, which, self.draw.choice([1, 1, 2, 3]))

    def check_one(self, operator: ritz.Operator, name: str, which: str, k: int) -> None:
        """Two products in a row beside that of a copy of the model."""
        rows = operator.probes(range(k), seed=self.draw.randrange(100))
        plain = ritz.Risk(
            copy.deepcopy(self.model), nn.CrossEntropyLoss(), tuple(x.clone() for x in self.data), batch_size=3,
            mode=operator.risk.mode, plan=PLAIN, params="4.*" if which == "block" else "*",
        )  # fmt: skip
        wanted = MATRICES[name](plain).rows(rows)
        for _ in range(2):
            torch.testing.assert_close(operator.rows(rows), wanted, rtol=1e-9, atol=1e-12)


def weights(model: nn.Module, draw: random.Random) -> nn.Parameter:
    return draw.choice(list(model.parameters()))


def _counted(s: Studied) -> None:
    with torch.no_grad():
        weights(s.model, s.draw).mul_(1.1)


def _uncounted(s: Studied) -> None:
    weights(s.model, s.draw).data.mul_(0.9)


def _moved(s: Studied) -> None:
    p = weights(s.model, s.draw)
    p.data = 1.1 * p.data


def _loaded(s: Studied) -> None:
    s.model.load_state_dict(
        {name: 0.95 * x if x.is_floating_point() else x for name, x in s.model.state_dict().items()}
    )


def _another(s: Studied) -> None:
    layer = s.model[s.draw.choice([4, 6])]
    layer.weight = nn.Parameter(layer.weight.detach() * 1.1)


def _buffer(s: Studied) -> None:
    s.model[1].running_mean.add_(0.1)


def _buffer_uncounted(s: Studied) -> None:
    s.model[1].running_var.data.mul_(1.2)


def _setting(s: Studied) -> None:
    s.model[1].eps = s.draw.choice([1e-5, 0.1, 0.2])


def _module(s: Studied) -> None:
    s.model[2] = s.draw.choice([nn.Tanh, nn.Sigmoid, nn.Softplus])()


def _mode(s: Studied) -> None:
    s.model.train(s.draw.random() < 0.5)


def _data(s: Studied) -> None:
    s.data[0][s.draw.randrange(6)].add_(0.5)


def _nothing(s: Studied) -> None:
    pass


def _let_go(s: Studied) -> None:
    s.risks["all"].let_go()


CHANGES: list[Callable[[Studied], None]] = [
    _counted, _uncounted, _moved, _loaded, _another, _buffer, _buffer_uncounted, _setting, _module, _mode, _data,
    _nothing, _let_go,
]  # fmt: skip


@pytest.fixture
def prepared(monkeypatch):
    """As on a GPU: what is compiled is run here as it was traced, what vectors share is kept."""
    monkeypatch.setattr(compilation, "lowered", lambda graph: graph)
    monkeypatch.setattr(risk_operator, "KEPT_ON", ("cpu",))


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_each_change_is_seen(change):
    studied = Studied(random.Random(0), replay=True)
    H = studied.operators["Hessian", "all"]
    for _ in range(3):
        for _ in range(3):
            studied.check_one(H, "Hessian", "all", 1)
        assert len(compilation.compilations_of(H.risk.recordings)) > 0
        assert change is _let_go or (len(H.risk.held) > 0 and len(H.risk.recordings) > 0)
        change(studied)
    studied.check_one(H, "Hessian", "all", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_products_are_right_whatever_is_done_between_them(seed, replay):
    studied = Studied(random.Random(seed), replay)
    for _ in range(20):
        studied.check()
        studied.draw.choice(CHANGES)(studied)
    studied.check()
