"""The training log: each number against a closed form, a dense matrix or a run; and no trace of it on the run."""

import copy
import gc
import io
import math
import random

import pytest
import torch
from torch import Tensor, nn

import ritz
from ritz.errors import NonFiniteError, NumericalWarning
from ritz.loggers import Memory
from ritz.optim import KFAC, AutoDamping, Gadam, GadamX, LanczosOpt, LevenbergMarquardt, NoiseVariance, TrainingLog
from ritz.optim.diagnostics import bulk_share, direction_rates, rate_ratio, stable_rate
from ritz.optim.directions import adam_inverse_root, directions, inverse_root

SCALES = torch.tensor([0.5, 1.0, 2.0])
X, Y = math.sqrt(3) * torch.diag(SCALES), torch.tensor([[1.0], [-2.0], [0.5]])
EIGENVALUES = 2 * SCALES**2  # of the Hessian of mean squares: diag(0.5, 2, 8)


def linear(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=bias)


def risk_of(model: nn.Module, data=(X, Y), **keywords) -> ritz.Risk:
    return ritz.Risk(model, nn.MSELoss(), data, **keywords)


def step(model: nn.Module, optimizer, log=None, data=(X, Y)) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(data[0]), data[1])
    loss.backward()
    optimizer.step()
    if log is not None:
        log.step(loss)
    return loss.detach()


def logged(model: nn.Module, optimizer, steps: int = 1, **keywords) -> dict[str, float]:
    """The row of the last of some steps."""
    rows = Memory()
    log = TrainingLog(optimizer, rows, **{"every": 1, "curvature_every": steps, **keywords})
    for _ in range(steps):
        step(model, optimizer, log)
    return rows.rows[-1]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def kfac(model: nn.Module, **keywords) -> KFAC:
    chosen = {"lr": 0.1, "damping": 0.5, "loss": "mse", "fisher": "type2", "momentum": 0.0, **keywords}
    return KFAC(model, **chosen)


# ----------------------------------------------------------------------------------------- numbers against truth


@pytest.mark.parametrize(
    ("keywords", "gain"), [({}, 1.0), ({"momentum": 0.5}, 1.5), ({"momentum": 0.5, "nesterov": True}, 0.75)]
)
def test_every_number_of_gradient_descent_on_a_quadratic(keywords, gain):
    model = linear()
    before = flat(model)
    gradient = EIGENVALUES * before - 2 / 3 * (X.T @ Y)[:, 0]
    row = logged(model, torch.optim.SGD(model.parameters(), lr=0.1, **keywords), risk=risk_of(model))
    moved = 0.1 * gradient * (1.5 if "nesterov" in keywords else 1.0)
    wanted = {
        "step": 1,
        "loss": float(nn.functional.mse_loss(X @ before[:, None], Y)),
        "lr": 0.1,
        "gradient_norm": float(gradient.norm()),
        "step_norm": float(moved.norm()),
        "curvature/largest": 8.0,
        "stable_rate": 2 * gain / 8,
        "stable_rate/used": 0.1 * 8 / (2 * gain),
        "stable_rate/products": 0.0,
    }
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert set(row) - set(wanted) == {"curvature/residual", "curvature/products"}
    assert row["curvature/residual"] < 0.1
    assert row["curvature/products"] > 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, lambda p, **k: Gadam(p, start=0, **k)])
def test_every_number_of_the_first_step_of_adam(kind):
    """After one step the root of the second moment is the size of the gradient."""
    model = linear()
    optimizer = kind(model.parameters(), lr=0.01, eps=0.3, weight_decay=0.0, betas=(0.8, 0.99))
    row = logged(model, optimizer, risk=risk_of(model))
    sizes = model.weight.grad.flatten().abs()
    scales = sizes + 0.3
    top = float(torch.linalg.eigvalsh(torch.diag(EIGENVALUES / scales)).max())
    wanted = {
        "damping": 0.3,
        "sgd_rate": 0.01 / 0.3,
        "preconditioner/largest": float(sizes.max()),
        "preconditioner/smallest": float(sizes.min()),
        "rate_ratio": float(rate_ratio(sizes, 0.3)),
        "rate/min": 0.01 / float(scales.max()),
        "rate/median": 0.01 / float(scales.median()),
        "rate/max": 0.01 / float(scales.min()),
        "stable_rate": 2 * (1.8 / 0.2) / top,
        "stable_rate/used": 0.01 * top * 0.2 / (2 * 1.8),
    }
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-3)
    assert row["stable_rate/products"] > 0
    assert "bulk_share" not in row


def test_every_number_of_kfac_where_it_is_newton():
    """One linear layer under the squared error: its block is the Hessian."""
    model = linear()
    row = logged(model, kfac(model, momentum=0.9), risk=risk_of(model))
    rates = direction_rates(EIGENVALUES, 0.1, 0.5).value
    wanted = {
        "lr": 0.1,
        "lr_scale": 1.0,
        "damping": 0.5,
        "sgd_rate": 0.2,
        "preconditioner/largest": 8.0,
        "preconditioner/smallest": 0.5,
        "rate_ratio": 8.5,
        "rate/min": float(rates.min()),
        "rate/median": float(rates.median()),
        "rate/max": float(rates.max()),
        "stable_rate": 2 * 1.9 * 8.5 / 8,
        "stable_rate/used": 0.1 * 8 / (2 * 1.9 * 8.5),
        "curvature/largest": 8.0,
        "skipped": 0.0,
    }
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


def test_quantiles_of_rates_are_those_of_all_directions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    row = logged(model, optimizer, 3)
    root = adam_inverse_root(optimizer, risk_of(model))
    wanted = torch.quantile(0.01 * root**2, torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]), interpolation="nearest")
    found = torch.tensor([row[f"rate/{name}"] for name in ("min", "q10", "median", "q90", "max")])
    torch.testing.assert_close(found, wanted)
    assert row["rate_ratio"] == pytest.approx(row["rate/max"] / row["rate/min"])


def test_quantiles_of_very_many_directions_have_ranks_within_a_percent():
    weight = nn.Parameter(torch.zeros(200_000))
    optimizer, rows = torch.optim.Adam([weight], lr=0.01, eps=1e-3), Memory()
    log = TrainingLog(optimizer, rows, every=1)
    weight.grad = torch.linspace(0.0, 1.0, 200_000)[torch.randperm(200_000, generator=torch.Generator().manual_seed(0))]
    optimizer.step()
    log.step()
    (row,) = rows.rows
    assert (row["rate/min"], row["rate/max"]) == pytest.approx((0.01 / 1.001, 0.01 / 0.001))
    for name, share in (("q10", 0.9), ("median", 0.5), ("q90", 0.1)):
        assert 0.01 / row[f"rate/{name}"] - 1e-3 == pytest.approx(share, abs=0.01)


def test_lanczos_tells_the_ends_of_its_last_step():
    model = linear()
    row = logged(model, LanczosOpt(model.parameters(), risk_of(model), lr=0.1, damping=0.5, k=3), risk=risk_of(model))
    wanted = {"damping": 0.5, "sgd_rate": 0.2, "preconditioner/largest": 8.0, "preconditioner/smallest": 0.5}
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    assert "stable_rate" not in row


# --------------------------------------------------------------------------------- directions against real steps


def optimisers(model: nn.Module) -> dict:
    params = {"params": model.parameters(), "lr": 0.1}
    groups = [{"params": [p], "lr": 0.1 * 2**-i} for i, p in enumerate(model.parameters())]
    return {
        "kfac": lambda: kfac(model),
        "ekfac": lambda: kfac(model, ekfac=True),
        "adam": lambda: torch.optim.Adam(**params, eps=0.1),
        "amsgrad": lambda: torch.optim.AdamW(**params, eps=0.1, amsgrad=True, weight_decay=0.0),
        "gadamx": lambda: GadamX(**params, eps=0.1, weight_decay=0.0, start=0, p=0.2),
        "adam, groups": lambda: torch.optim.Adam(groups, eps=0.1),
        "sgd, groups": lambda: torch.optim.SGD(groups),
    }


@pytest.mark.parametrize("name", ["kfac", "ekfac", "adam", "amsgrad", "gadamx", "adam, groups", "sgd, groups"])
def test_the_root_applied_twice_to_the_gradient_is_the_step(name):
    """The first step of each has no momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = optimisers(model)[name]()
    before = flat(model)
    step(model, optimizer)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    root = inverse_root(optimizer, risk_of(model), lambda group: group["lr"])
    apply = root.inverse if callable(root.inverse) else root.inverse.mul
    torch.testing.assert_close(flat(model), before - root.rate * apply(apply(gradient[None]))[0])


@pytest.mark.parametrize("name", ["kfac", "ekfac", "adam", "amsgrad", "gadamx"])
def test_the_directions_of_an_optimiser_are_the_spectrum_of_what_it_does(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = optimisers(model)[name]()
    step(model, optimizer)
    risk = risk_of(model)
    root = inverse_root(optimizer, risk, lambda group: group["lr"]).inverse
    dense = root(torch.eye(risk.dim)) if callable(root) else torch.diag(root)
    found = torch.cat([part.damped.flatten() for part in directions(optimizer)]).sort().values
    torch.testing.assert_close(found, (1 / torch.linalg.eigvalsh(dense).square()).sort().values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "sgd, groups", "kfac", "nesterov"])
@pytest.mark.parametrize("share", [0.97, 1.03])
def test_a_run_diverges_just_where_the_stable_rate_is_used_up(kind, share):
    def made(model: nn.Module, lr: float):
        parts = [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": lr / 4}]
        return {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.3),
            "sgd, groups": lambda: torch.optim.SGD(parts, lr=lr, momentum=0.3),
            "nesterov": lambda: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.3, nesterov=True),
            "kfac": lambda: kfac(model, lr=lr, momentum=0.3, damping=5.0, stat_decay=0.0),
        }[kind]()

    model = linear(bias=True)
    row = logged(model, made(model, 1e-3), risk=risk_of(model), tol=1e-6)
    lr = share * 1e-3 / row["stable_rate/used"]
    assert row["stable_rate/used"] * row["stable_rate"] == pytest.approx(1e-3)
    model = linear(bias=True)
    optimizer = made(model, lr)
    losses = [float(step(model, optimizer)) for _ in range(400)]
    assert (losses[-1] > 10 * losses[0]) == (share > 1)


# ---------------------------------------------------------------------------------------------------- AutoDamping


def noisy(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 3, generator=generator) * torch.tensor([0.2, 1.0, 3.0]), torch.randn(
        64, 1, generator=generator
    )


def test_what_auto_damping_saw_is_written_at_the_step_where_it_saw_it():
    model, rows = linear(), Memory()
    optimizer = kfac(model)
    damping = AutoDamping(optimizer, risk_of(model, noisy()), every=3, batch_size=8)
    log = TrainingLog(optimizer, rows, damping=damping, every=4)
    for _ in range(9):
        step(model, optimizer)
        damping.step()
        log.step()
    assert rows.column("seen/noise") == ([3, 6, 9], [entry["noise"] for entry in damping.history])
    assert rows.column("seen/noise/stderr") == ([3, 6, 9], [entry["noise_stderr"] for entry in damping.history])
    assert rows.column("damping") == ([4, 8], [damping.history[0]["damping"], damping.history[1]["damping"]])
    assert rows.column("bulk_edge")[1] == [2 * math.sqrt(entry["noise"]) for entry in damping.history[:2]]


def test_the_share_in_the_bulk_is_that_of_the_step_in_the_eigenbasis():
    data, model, rows = noisy(), linear(), Memory()
    optimizer = kfac(model, stat_decay=0.0, factor_every=1, inverse_every=1)
    damping = AutoDamping(optimizer, risk_of(model, data), every=1, batch_size=8)
    log = TrainingLog(optimizer, rows, damping=damping, every=1)
    for number in range(3):
        delta = optimizer.param_groups[0]["damping"]
        step(model, optimizer, data=data)
        values, vectors = torch.linalg.eigh(
            ritz.Hessian(risk_of(model, data)).dense()
        )  # a quadratic: the same anywhere
        gradient = vectors.T @ model.weight.grad.flatten()
        damping.step()
        log.step()
        edge = 2 * math.sqrt(damping.history[-1]["noise"])
        truth = float(bulk_share(values, gradient, delta, edge))
        assert rows.rows[number]["bulk_share"] == pytest.approx(truth, rel=1e-6)
        assert 0 < truth < 1


def test_groups_with_dampings_of_their_own_have_names_of_their_own():
    model, rows = linear(bias=True), Memory()
    optimizer = kfac(model, groups=[{"params": "bias", "damping": 2.0}], diagonal=["bias"])
    damping = AutoDamping(optimizer, risk_of(model, noisy()), every=2, batch_size=8, per_group=True)
    log = TrainingLog(optimizer, rows, damping=damping, every=2)
    for _ in range(2):
        step(model, optimizer)
        damping.step()
        log.step()
    (row,) = rows.rows
    for index in (0, 1):
        assert row[f"damping/{index}"] == optimizer.param_groups[index]["damping"]
        assert row[f"seen/noise/{index}"] == damping.history[0][f"noise/{index}"]
        assert row[f"seen/noise/stderr/{index}"] == damping.history[0][f"noise_stderr/{index}"]
        assert row[f"bulk_edge/{index}"] == 2 * math.sqrt(row[f"seen/noise/{index}"])
    assert 0 <= row["bulk_share"] <= 1


@pytest.mark.parametrize("kind", ["adam", "kfac"])
def test_compensated_learning_rates_are_told_and_counted_in(kind):
    model, rows = linear(), Memory()
    optimizer = kfac(model) if kind == "kfac" else torch.optim.Adam(model.parameters(), lr=0.1, eps=0.5)
    damping = AutoDamping(optimizer, risk_of(model, noisy()), every=1, batch_size=8, compensate_lr=True)
    log = TrainingLog(optimizer, rows, damping=damping, every=1)
    step(model, optimizer)
    damping.step()
    log.step()
    (row,) = rows.rows
    delta = damping.history[0]["damping"]
    assert (row["lr"], row["damping"]) == (0.1, delta)
    assert row["lr_scale"] == pytest.approx(1 + delta)
    assert row["sgd_rate"] == pytest.approx(0.1 * (1 + delta) / delta)
    scale = row["preconditioner/smallest"] + delta
    assert row["rate/max"] == pytest.approx(0.1 * (1 + delta) / scale)


def test_a_number_that_a_rule_did_not_get_is_left_out():
    """A step that was not downhill has no reduction ratio."""
    model, rows = linear(), Memory()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, eps=0.5)
    damping = AutoDamping(optimizer, risk_of(model), every=1, rule=LevenbergMarquardt())
    log = TrainingLog(optimizer, rows, damping=damping, every=1)
    step(model, optimizer)
    damping.step((X, Y))
    log.step()
    assert math.isnan(damping.history[0]["reduction_ratio"])
    assert not [name for name, value in rows.rows[0].items() if math.isnan(value)]
    assert "seen/reduction_ratio" not in rows.rows[0]


# ------------------------------------------------------------------------------------------- what is not known


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.LBFGS])
def test_of_an_optimiser_that_is_not_known_the_rest_is_told(kind):
    model, rows = linear(), Memory()
    optimizer = kind(model.parameters(), lr=0.01)
    log = TrainingLog(optimizer, rows, risk=risk_of(model), every=1, curvature_every=1)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()
        return loss

    log.step(optimizer.step(closure))
    base = {"step", "loss", "lr", "gradient_norm", "step_norm"}
    base |= {"curvature/largest", "curvature/residual", "curvature/products"}
    assert set(rows.rows[0]) == base | ({"damping"} if kind is not torch.optim.LBFGS else set())
    assert not [name for name, value in rows.rows[0].items() if math.isnan(value)]


def test_before_the_first_step_and_without_gradients_only_settings_are_known():
    model, rows = linear(), Memory()
    log = TrainingLog(
        torch.optim.Adam(model.parameters(), eps=0.0), rows, risk=risk_of(model), every=1, curvature_every=1
    )
    log.step()
    assert set(rows.rows[0]) == {
        "step", "lr", "damping", "curvature/largest", "curvature/residual", "curvature/products",
    }  # fmt: skip


def test_an_optimiser_may_keep_its_learning_rate_to_itself():
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": None, "damping": 0.1})

        def step(self, closure=None):
            """Stands still."""

    model = linear()
    row = logged(model, Own(model.parameters()), risk=risk_of(model))
    assert "lr" not in row
    assert "sgd_rate" not in row
    assert (row["damping"], row["step_norm"]) == (0.1, 0.0)


def test_momenta_that_differ_have_no_stable_rate():
    model = linear(bias=True)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "momentum": 0.9}]
    row = logged(model, torch.optim.SGD(groups, lr=0.01), risk=risk_of(model))
    assert "stable_rate" not in row
    assert {"lr/0", "lr/1"} <= set(row)


def test_a_damping_for_each_block_is_told_by_block():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    row = logged(model, kfac(model, damping={"0": 0.5, "1": 2.0}))
    assert (row["damping/0"], row["damping/1"]) == (0.5, 2.0)
    assert "sgd_rate" not in row
    assert row["rate/max"] <= 0.1 / 0.5


def test_what_is_not_trained_has_no_part_in_the_stable_rate():
    model = linear(bias=True)
    row = logged(model, torch.optim.SGD([model.weight], lr=0.01), risk=risk_of(model))
    assert row["stable_rate"] == pytest.approx(2 / 8, rel=1e-3)
    assert row["curvature/largest"] > 8.01  # that of all parameters of the risk


# --------------------------------------------------------------------------------------------------- no trace


def snapshot(model: nn.Module, optimizer) -> list:
    state = optimizer.state_dict()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return [copy.deepcopy(state), copy.deepcopy(model.state_dict()), grads, hooks, model.training]


def equal(a, b) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def run(log_into, steps: int = 6, kind: str = "kfac"):
    """A network with dropout and batch normalisation, trained by KFAC or Adam, with or without a log."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 1))
    if kind == "kfac":
        optimizer = kfac(model, fisher="mc", factor_every=1, inverse_every=2, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    log = None
    if log_into is not None:
        log = TrainingLog(optimizer, log_into, risk=risk_of(model, noisy()), every=2, curvature_every=3)
    for _ in range(steps):
        step(model, optimizer, data=noisy())
        if log is not None:
            before, states = snapshot(model, optimizer), (torch.get_rng_state(), random.getstate())
            log.step(torch.tensor(1.0))
            assert equal(before, snapshot(model, optimizer))
            assert torch.equal(states[0], torch.get_rng_state())
            assert states[1] == random.getstate()
    return model, optimizer


@pytest.mark.parametrize("kind", ["kfac", "adam"])
def test_a_run_with_a_log_is_that_without_to_the_bit(kind):
    rows = Memory()
    watched, plain = run(rows, kind=kind), run(None, kind=kind)
    assert equal(snapshot(*watched), snapshot(*plain))
    assert [row["step"] for row in rows.rows] == [2, 3, 4, 6]


def test_a_logger_that_raises_does_not_touch_the_run():
    calls = []

    def fails(scalars, step):
        calls.append(step)
        if step == 4:
            raise OSError("disk full")

    model, plain = linear(), linear()
    optimizer, other = kfac(model), kfac(plain)
    log = TrainingLog(optimizer, fails, risk=risk_of(model), every=2, curvature_every=2)
    for number in range(1, 7):
        step(model, optimizer)
        if number == 4:
            with pytest.raises(OSError, match="disk full"):
                log.step()
        else:
            log.step()
        step(plain, other)
    assert calls == [2, 4, 6]
    assert equal(snapshot(model, optimizer), snapshot(plain, other))


def test_what_is_known_is_written_where_the_curvature_is_not_finite():
    model, rows = linear(), Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = ritz.Risk(model, lambda out, y: (out - y).square().mean() * math.nan, (X, Y))
    log = TrainingLog(optimizer, rows, risk=broken, every=1, curvature_every=1)
    with pytest.raises(NonFiniteError):
        step(model, optimizer, log)
    assert rows.rows[0]["lr"] == 0.1


def test_a_skipped_step_is_told():
    model, rows = linear(), Memory()
    optimizer = Gadam(model.parameters(), lr=0.1, start=0)
    log = TrainingLog(optimizer, rows, every=1)
    step(model, optimizer, log)
    model.weight.grad[0, 0] = math.nan
    with pytest.warns(NumericalWarning, match="skipped"):
        optimizer.step()
    log.step()
    assert rows.column("skipped") == ([1, 2], [0.0, 1.0])
    assert rows.rows[1]["step_norm"] == 0.0
    assert math.isnan(rows.rows[1]["gradient_norm"])


def test_a_step_that_a_scaler_held_back_has_no_length():
    model, rows = linear(), Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    log = TrainingLog(optimizer, rows, every=1)
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(X), Y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        log.step()
    assert rows.rows[0]["step_norm"] == pytest.approx(0.1 * rows.rows[0]["gradient_norm"])
    assert "step_norm" not in rows.rows[1]


def test_the_hook_of_a_log_goes_with_it():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = TrainingLog(optimizer, Memory())
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    del log
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks


def test_sparse_gradients_have_a_norm():
    embedding, rows = nn.Embedding(4, 2, sparse=True), Memory()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    log = TrainingLog(optimizer, rows, every=1)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    log.step()
    assert rows.rows[0]["gradient_norm"] == pytest.approx(math.sqrt(2 * 4 + 2 * 1))


def test_a_group_that_comes_after_the_step_has_no_part_in_its_length():
    model, added, rows = linear(), nn.Parameter(torch.ones(2)), Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = TrainingLog(optimizer, rows, every=1)
    step(model, optimizer)
    optimizer.add_param_group({"params": [added]})
    log.step()
    assert rows.rows[0]["step_norm"] == pytest.approx(0.1 * rows.rows[0]["gradient_norm"])


def test_groups_of_kfac_that_are_made_anew_after_the_step_leave_its_share_of_the_bulk():
    def share(regroup: bool) -> float:
        model, rows = linear(bias=True), Memory()
        optimizer = kfac(model, diagonal=["bias"], factor_every=1, inverse_every=1)
        damping = AutoDamping(optimizer, risk_of(model, noisy()), every=1, batch_size=8)
        log = TrainingLog(optimizer, rows, damping=damping, every=1)
        step(model, optimizer, data=noisy())
        damping.step()
        if regroup:  # the bias is now the first
            group = optimizer.param_groups[0]
            optimizer.add_param_group({"params": [(group["param_names"].pop(0), group["params"].pop(0))]})
        log.step()
        return rows.rows[0]["bulk_share"]

    assert 0 < share(regroup=True) == share(regroup=False) < 1


# ------------------------------------------------------------------------------------------------------- resuming


def test_a_resumed_run_writes_the_rows_of_the_straight_one():
    def made(seed: int):
        torch.manual_seed(seed)
        model, rows = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), Memory()
        optimizer, risk = kfac(model, momentum=0.9), risk_of(model, noisy())
        damping = AutoDamping(optimizer, risk, every=3, rule=NoiseVariance(), batch_size=8)
        return (
            model,
            optimizer,
            damping,
            TrainingLog(optimizer, rows, risk=risk, damping=damping, every=2, curvature_every=5),
            rows,
        )

    def train(model, optimizer, damping, log, rows, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X), Y)
            loss.backward()
            optimizer.step()
            damping.step()
            log.step(loss)
        return rows.rows

    straight = train(*made(0), 13)
    for cut in (3, 7):  # right after a refresh, and between
        first = made(0)
        rows = list(train(*first, cut))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in first[:4]], file)
        file.seek(0)
        second = made(5)
        for part, state in zip(second, torch.load(file, weights_only=True), strict=False):
            part.load_state_dict(state)
        rows += train(*second, 13 - cut)
        assert rows == straight


# ----------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"optimizer": 3}, TypeError, r"optimizer must be a torch\.optim\.Optimizer, got int"),
        ({"logger": 3}, TypeError, r"a logger must have a method log\(scalars, step\)"),
        ({"risk": 3}, TypeError, r"risk must be a ritz\.Risk, got int"),
        ({"every": 0}, ValueError, "every and curvature_every must be at least 1, got 0 and 1000"),
        ({"curvature": "fisher"}, ValueError, "curvature must be 'hessian' or 'ggn', got 'fisher'"),
        ({"damping": 0.1}, ValueError, "damping must be the AutoDamping of the same optimizer"),
        (
            {"risk": risk_of(linear())},
            ValueError,
            r"1 of the parameters that are trained are not among those of the risk; the first has shape \(1, 3\)",
        ),
    ],
)
def test_bad_settings_are_refused_and_leave_no_hook(keywords, error, message):
    own = torch.optim.SGD(linear().parameters(), lr=0.1)
    given = {"optimizer": own, "logger": Memory(), **keywords}
    with pytest.raises(error, match=message):
        TrainingLog(**given)
    assert not own._optimizer_step_pre_hooks


def test_the_damping_of_another_optimiser_is_refused():
    model = linear()
    one, two = (torch.optim.Adam(model.parameters()) for _ in range(2))
    damping = AutoDamping(one, risk_of(model, noisy()), batch_size=8)
    with pytest.raises(ValueError, match="damping must be the AutoDamping of the same optimizer"):
        TrainingLog(two, Memory(), damping=damping)


def test_the_stable_rate_of_adam_is_that_of_the_diagnostic():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.7, 0.99))
    row = logged(model, optimizer, 4, risk=risk_of(model), tol=1e-6, curvature="ggn")
    root = adam_inverse_root(optimizer, risk_of(model))
    truth = stable_rate(ritz.GGN(risk_of(model)), root, momentum=0.7, kind="average", tol=1e-6)
    assert row["stable_rate"] == pytest.approx(float(truth), rel=1e-6)
