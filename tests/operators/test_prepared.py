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
from ritz.operators.tape.kept import Kept

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
    s.risks["all"].shortcuts.let_go()


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
        assert len(H.risk.shortcuts.compilations) > 0
        assert change is _let_go or (len(H.risk.shortcuts.held) > 0 and len(H.risk.shortcuts.recordings) > 0)
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


# ------------------------------------------------------------------------------- what is computed from all the data


class Leaky(nn.Module):
    """A module of the user's, whose slope nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"slope": 0.1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(x, self.held["slope"])


class Case:
    """A small network and its data, both kinds of activation in it."""

    def __init__(self, users: bool) -> None:
        torch.manual_seed(0)
        self.slope = Leaky() if users else nn.LeakyReLU(0.1)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), self.slope, nn.Linear(6, 3))
        self.X, self.y, self.classes = torch.randn(12, 4), torch.arange(12) % 3, torch.ones(3)
        self.risk = ritz.Risk(self.model, nn.CrossEntropyLoss(self.classes), (self.X, self.y), batch_size=5)


def _slope(case: Case) -> None:
    if isinstance(case.slope, Leaky):
        case.slope.held["slope"] = 0.7
    else:
        case.slope.negative_slope = 0.7


def _numpy(x: torch.Tensor) -> None:
    shared = x.numpy()
    shared *= 2


SEEN: dict[str, Callable[[Case], object]] = {
    "a slope": _slope,
    "another module": lambda case: setattr(case.model, "2", nn.Tanh()),
    "a setting": lambda case: setattr(case.model[1], "eps", 1.0),
    "a hook": lambda case: case.model[2].register_forward_hook(lambda module, args, out: 2 * out),
    "another forward pass": lambda case: setattr(case.model[2], "forward", torch.sin),
    "a buffer": lambda case: case.model[1].running_var.mul_(2.0),
    "a weight": lambda case: torch.nn.init.ones_(case.model[0].weight),
    "a weight, not counted": lambda case: case.model[0].weight.data.mul_(1.5),
    "class weights": lambda case: case.classes.mul_(torch.tensor([1.0, 2.0, 5.0])),
    "inputs": lambda case: case.X.mul_(2.0),
    "inputs, not counted": lambda case: _numpy(case.X),
    "labels": lambda case: case.y.copy_((case.y + torch.arange(12)) % 3),
}
WHOLE: dict[str, Callable[[ritz.Risk], ritz.Operator]] = {
    "gradient covariance": ritz.GradientCovariance,
    "KFAC": lambda risk: ritz.KFACOperator(risk, "empirical"),
    "EKFAC": lambda risk: ritz.KFACOperator(risk, "empirical", ekfac=True),
}


@pytest.mark.parametrize("users", [False, True], ids=["torch's own", "a module of the user's"])
@pytest.mark.parametrize("change", SEEN)
@pytest.mark.parametrize("matrix", WHOLE)
def test_what_is_kept_of_the_whole_data_follows_each_change(matrix, change, users):
    case = Case(users)
    A = WHOLE[matrix](case.risk)
    before = A.dense()
    torch.testing.assert_close(A.dense(), before, rtol=0, atol=0)
    SEEN[change](case)
    after = WHOLE[matrix](case.risk).dense()
    assert (after - before).norm() > 1e-3 * before.norm()
    torch.testing.assert_close(A.dense(), after)
    torch.testing.assert_close(copy.deepcopy(A).dense(), after)


@pytest.fixture
def walks(monkeypatch) -> list[int]:
    """Counts walks over the data."""
    counted, fold = [0], ritz.Risk.fold

    def counting(self, *args, **keywords):
        counted[0] += 1
        return fold(self, *args, **keywords)

    monkeypatch.setattr(ritz.Risk, "fold", counting)
    return counted


@pytest.mark.parametrize("users", [False, True], ids=["torch's own", "a module of the user's"])
def test_factors_are_made_once_for_many_products(users, walks):
    C = ritz.KFACOperator(Case(users).risk, ekfac=True)
    C.dense()
    before = walks[0]
    for v in C.probes(range(5), seed=0):
        _ = C @ v, C.trace(), C.logdet(damping=1.0), C.inverse(damping=1.0) @ v
    assert walks[0] == before


@pytest.mark.parametrize(("users", "walked"), [(False, 1), (True, 2)], ids=["torch's own", "a module of the user's"])
def test_the_gradient_is_taken_once_where_nothing_is_the_users(users, walked, walks):
    C = ritz.GradientCovariance(Case(users).risk)
    v = C.probes([0], seed=0)
    C.rows(v)
    before = walks[0]
    C.rows(v)
    assert walks[0] == before + walked  # of the empirical Fisher, and of the gradient


@pytest.mark.parametrize("matrix", WHOLE)
def test_data_that_is_too_large_to_compare_is_followed_as_far_as_torch_counts(matrix, monkeypatch):
    monkeypatch.setattr(Kept, "_taken", _counting(Kept._taken))
    case = Case(users=False)
    A = WHOLE[matrix](case.risk)
    A.dense()
    case.X.mul_(2.0)
    torch.testing.assert_close(A.dense(), WHOLE[matrix](case.risk).dense())


def _counting(taken: Callable[[Kept], object]) -> Callable[[Kept], object]:
    def without_reading(self: Kept) -> object:
        self.most = 0
        return taken(self)

    return without_reading


def test_factors_of_data_that_is_not_kept_follow_the_model_by_its_first_samples(walks):
    case = Case(users=False)
    risk = ritz.Risk(case.model, nn.CrossEntropyLoss(), (case.X, case.y), plan=ritz.Plan(cache=False))
    C = ritz.KFACOperator(risk)
    C.dense()
    before = walks[0]
    C.dense()
    assert walks[0] == before
    case.slope.negative_slope = 0.7
    torch.testing.assert_close(C.dense(), ritz.KFACOperator(risk).dense())


@pytest.mark.parametrize("what", ["power", "scale"])
def test_factors_follow_a_loss_and_a_target_of_the_users(what):
    case, held = Case(users=False), {"power": 2.0, "scale": 1.0}
    loss = (lambda out, y: (out - y).abs().pow(held["power"]).mean()) if what == "power" else nn.MSELoss()
    data = case.X, torch.randn(12, 3)
    risk = ritz.Risk(case.model, loss, data, target=lambda batch: held["scale"] * batch[1])
    C = ritz.KFACOperator(risk, "empirical")
    before = C.dense()
    held[what] = 3.0
    after = ritz.KFACOperator(risk, "empirical").dense()
    assert (after - before).norm() > 1e-3 * before.norm()
    torch.testing.assert_close(C.dense(), after)
