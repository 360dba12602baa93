"""The common training loop: a run that is killed ends in the weights of one that is not, whatever it trains with."""

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from torch import nn

import ritz
from ritz.batches import isolated_rng
from ritz.loggers import Memory, read
from ritz.optim import GadamX, NoiseVariance, averaging_decay, linear_decay, ramp_decay
from ritz.papers import checkpoints
from ritz.papers.loop import batch_order, evaluate, initial
from ritz.papers.recipe import (
    Averaging,
    Recipe,
    Run,
    auto_damping,
    fingerprint,
    gadam,
    kfac,
    on_parameters,
    scaled,
    trace_penalty,
)
from ritz.papers.train import train
from ritz.space import random_uniform
from ritz.storage import equal

SIZES = {"train": 44, "val": 20, "test": 20}
EPOCHS, EACH = 4, 6  # 44 samples in batches of 8: five full ones and one of 4


def network() -> nn.Module:
    """Small, with BatchNorm and dropout."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3))


@cache
def data() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name, size in SIZES.items():
        X = random_uniform(5 * size, ("inputs", name)).reshape(size, 5) * 4 - 2
        found[name] = X, (X[:, 0] * X[:, 1]).sign().long() + (X[:, 2] > 0)
        found[name] = X, found[name][1].clamp(0, 2)
    return found


def jitter(x: torch.Tensor, key: tuple[int, int, int]) -> torch.Tensor:
    return x + 0.1 * random_uniform(x.numel(), ("jitter", *key), x.device).reshape(x.shape).to(x)


def averaged_decay(epochs: float) -> object:
    return averaging_decay(epochs / 2)


SGD = Recipe(
    name="SGD",
    model=network,
    optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    epochs=EPOCHS,
    batch_size=8,
    schedule=linear_decay,
    augment=jitter,
    seed=3,
)
KFAC = partial(kfac, lr=0.02, damping=0.1, factor_every=2, inverse_every=4)
ARMS = {
    "SGD": SGD,
    "SGD by steps": replace(SGD, schedule=partial(ramp_decay, kappa=2.0), schedule_by="step", drop_last=True),
    "SGD averaged": replace(SGD, averaging=Averaging(start=0.25), schedule=averaged_decay),
    "SGD averaged by val": replace(
        SGD,
        optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=2.0),  # so large that the accuracy falls back
        schedule=None,
        averaging=Averaging(start="auto", patience=1),
    ),
    "Adam": replace(SGD, optimizer=partial(on_parameters, kind=torch.optim.Adam, lr=0.01, amsgrad=True)),
    "Adam, learned eps": replace(
        SGD,
        optimizer=partial(on_parameters, kind=torch.optim.AdamW, lr=0.01),
        damping=partial(auto_damping, every=4, compensate_lr=True, num_batches=3, batch_size=6),
        training_mode="until_refresh",
    ),
    "KFAC": replace(SGD, optimizer=KFAC),
    "KFAC, learned": replace(SGD, optimizer=KFAC, damping=partial(auto_damping, every=4, num_batches=3, batch_size=8)),
    "KFAC, streaming, pairs": replace(
        SGD,
        optimizer=partial(KFAC, ekfac=True, kl_clip=1e-2, refresh="qr"),
        damping=partial(auto_damping, every=5, num_batches=2, stream="pairs", rule=NoiseVariance(decay=0.5)),
        streaming=True,
    ),
    "Gadam": replace(SGD, optimizer=partial(gadam, start=0.5, lr=0.01)),
    "GadamX": replace(SGD, optimizer=partial(gadam, start=0.25, lr=0.05, kind=GadamX)),
    "trace penalty": replace(SGD, penalty=partial(trace_penalty, eta=0.01, fraction=0.5)),
    "Hessian penalty": replace(SGD, model=plain, penalty=partial(trace_penalty, eta=0.01, form="hessian")),
    "all of it": replace(
        SGD,
        optimizer=KFAC,
        damping=partial(auto_damping, every=4, num_batches=3, batch_size=8),
        penalty=partial(trace_penalty, eta=0.01, fraction=0.5),
        averaging=Averaging(start=0.5),
    ),
}


class Killed(Exception):
    pass


@dataclass
class KillAt:
    """A callback for progress that raises at a step."""

    step: int

    def __call__(self, done: int, total: int) -> None:
        if done == self.step:
            raise Killed


@cache
def whole(arm: str):
    """The run without a kill, in no folder."""
    return train(ARMS[arm], data(), log_every=4)


def state(done) -> dict:
    average = {} if done.average is None else done.average.state_dict()
    return {"model": done.model.state_dict(), "average": average, "optimizer": done.optimizer.state_dict()}


def untimed(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def assert_same(done, other):
    assert equal(state(done), state(other))
    assert equal(untimed(done.history.rows), untimed(other.history.rows))
    assert (done.steps, done.stop) == (other.steps, other.stop)
    if done.damping is not None:
        assert equal(done.damping.history, other.damping.history)


# ------------------------------------------------------------------------------------------------------ resume


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_killed_again_and_again_ends_in_the_same_weights_to_the_bit(arm, tmp_path):
    for step in (2, 9, 12, 17, 20):  # within epochs, at the end of one before it is kept, and twice in one epoch
        with isolated_rng(step), pytest.raises(Killed):  # another state of the global generators each time
            train(ARMS[arm], data(), folder=tmp_path, log_every=4, progress=KillAt(step))
    done = train(ARMS[arm], data(), folder=tmp_path, log_every=4)
    assert done.stop == "finished"
    assert_same(done, whole(arm))
    assert equal(untimed(read(tmp_path / "log.jsonl").rows), untimed(whole(arm).history.rows))


def test_the_arms_are_put_to_use():  # else the test above would not say much
    assert whole("KFAC, learned").damping.history[-1]["noise"] > 0
    assert len(whole("KFAC, streaming, pairs").damping.history) == 4
    assert whole("KFAC, learned").damping.risk.plan.route == "reverse"  # never the fastest by the clock
    assert whole("Gadam").optimizer.average.num_averaged == 2
    assert whole("SGD averaged").average is not None
    assert whole("SGD averaged by val").average is not None
    assert whole("trace penalty").history.column("penalty")[1][0] > 0
    ends = [whole(arm).model.state_dict()["0.weight"] for arm in ("SGD", "KFAC", "KFAC, learned", "trace penalty")]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(ends, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["SGD", "Gadam", "KFAC, learned", "all of it"])
def test_a_killed_run_is_resumed_on_a_gpu(arm, tmp_path):
    on_gpu = {name: (X.cuda(), y.cuda()) for name, (X, y) in data().items()}
    before = torch.cuda.get_rng_state()
    for step in (9, 20):
        with pytest.raises(Killed):
            train(ARMS[arm], on_gpu, folder=tmp_path, log_every=4, progress=KillAt(step))
    done, other = train(ARMS[arm], on_gpu, folder=tmp_path, log_every=4), train(ARMS[arm], on_gpu, log_every=4)
    for a, b in zip(done.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # kernels may add up in another order
    assert torch.equal(torch.cuda.get_rng_state(), before)


FAST = replace(SGD, fast=True)
FAST_LEARNED = replace(
    FAST,
    optimizer=partial(on_parameters, kind=torch.optim.Adam, lr=0.01),
    damping=partial(auto_damping, every=4, num_batches=3, batch_size=6),
)


@pytest.fixture
def in_single(monkeypatch):
    """Networks and data in float32, from which autocast casts, and a compiler that writes no code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield {name: (X.float(), y) for name, (X, y) in data().items()}
    torch.set_default_dtype(before)


@pytest.mark.parametrize("recipe", [FAST, FAST_LEARNED], ids=["SGD", "Adam, learned eps"])
def test_a_fast_run_is_near_the_one_in_float32_and_measures_in_float32(recipe, in_single):
    seen = []

    def looked_at(model, average):
        seen.append(model(in_single["val"][0]).dtype)
        return {}

    fast = train(recipe, in_single, measure=looked_at)
    slow = train(replace(recipe, fast=False), in_single)
    losses = [torch.tensor(run.history.column("val/loss")[1]) for run in (fast, slow)]
    assert not torch.equal(*losses)  # bfloat16 has 8 bits
    torch.testing.assert_close(*losses, atol=0.05, rtol=0.05)
    assert {p.dtype for p in fast.model.parameters()} == {torch.float32} == set(seen)
    tested = evaluate(fast.model, nn.CrossEntropyLoss(), in_single["test"])
    assert fast.history.column("test/loss")[1][-1] == tested["loss"]


@pytest.mark.parametrize("recipe", [FAST, FAST_LEARNED], ids=["SGD", "Adam, learned eps"])
def test_a_killed_fast_run_is_resumed(recipe, in_single, tmp_path):
    for step in (3, 14):
        with pytest.raises(Killed):
            train(recipe, in_single, folder=tmp_path, log_every=4, progress=KillAt(step))
    assert_same(train(recipe, in_single, folder=tmp_path, log_every=4), train(recipe, in_single, log_every=4))
    with pytest.raises(ValueError, match="fast"):
        train(replace(recipe, fast=False), in_single, folder=tmp_path)


@pytest.mark.gpu
def test_a_fast_run_on_a_gpu_is_near_the_one_in_float32(in_single, monkeypatch):
    monkeypatch.undo()  # the real compiler
    on_gpu = {name: (X.cuda(), y.cuda()) for name, (X, y) in in_single.items()}
    fast, slow = (train(made, on_gpu) for made in (FAST, SGD))
    assert fast.history.column("val/loss")[1] == pytest.approx(slow.history.column("val/loss")[1], abs=0.05)
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("arm", ["Gadam", "KFAC, learned"])
def test_a_run_that_has_ended_is_read_back(arm, tmp_path):
    train(ARMS[arm], data(), folder=tmp_path, log_every=4)
    calls = []
    done = train(ARMS[arm], data(), folder=tmp_path, log_every=4, progress=lambda *at: calls.append(at))
    assert_same(done, whole(arm))
    assert calls == []


@pytest.mark.parametrize("victim", ["safetensors", "json"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(victim, tmp_path, monkeypatch):
    move = ritz.storage.os.replace

    def torn(source, target):
        if str(target).endswith(f"epoch-000003.{victim}"):
            raise Killed
        move(source, target)

    monkeypatch.setattr(ritz.storage.os, "replace", torn)
    with pytest.raises(Killed):
        train(ARMS["KFAC, learned"], data(), folder=tmp_path, log_every=4)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.glob("epoch-*.json")) == ["epoch-000002.json"]
    (tmp_path / f"epoch-000004.{victim}.0a1b2c3d.part").write_bytes(b"torn")
    (tmp_path / "run.json.0a1b2c3d.part").write_bytes(b"torn")
    done = train(ARMS["KFAC, learned"], data(), folder=tmp_path, log_every=4)
    assert_same(done, whole("KFAC, learned"))
    names = {"epoch-000004.json", "epoch-000004.safetensors", "log.jsonl", "run.json"}
    assert {p.name for p in tmp_path.iterdir()} == names  # what was torn is gone too


SCRIPT = """
import os, sys, torch
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
import small
from ritz.papers.train import train

def die(done, total):
    if done == 9:
        os._exit(9)

train(small.RECIPE, small.DATA, folder=sys.argv[1], log_every=4, progress=die)
"""
SMALL = """
from functools import partial
import torch
from torch import nn
from ritz.papers.recipe import Recipe, auto_damping, kfac

def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))

X = torch.linspace(-1, 1, 72).sin().reshape(24, 3)
DATA = {"train": (X, torch.arange(24) % 2)}
RECIPE = Recipe(name="small", model=network, optimizer=partial(kfac, lr=0.1, damping=0.1), epochs=3, batch_size=4,
                damping=partial(auto_damping, every=4, num_batches=2, batch_size=4))
"""


def test_a_process_that_dies_at_once_is_taken_up_by_another(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text(SMALL)
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    died = subprocess.run(run, cwd=tmp_path, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=False)
    assert died.returncode == 9
    monkeypatch.syspath_prepend(tmp_path)
    small = importlib.import_module("small")
    assert (tmp_path / "run" / "epoch-000001.json").exists()
    done = train(small.RECIPE, small.DATA, folder=tmp_path / "run", log_every=4)
    assert_same(done, train(small.RECIPE, small.DATA, log_every=4))


def test_checkpoints_may_be_rarer_than_epochs_and_logs_and_evaluations_do_not_change_a_run(tmp_path):
    options = {"checkpoint_every": 3, "evaluate_every": 2, "details_every": 5, "log_every": 7, "train_subset": 10}
    with pytest.raises(Killed):
        train(ARMS["all of it"], data(), folder=tmp_path, progress=KillAt(21), **options)
    assert (tmp_path / "epoch-000003.json").exists()
    done = train(ARMS["all of it"], data(), folder=tmp_path, **options)
    assert equal(done.model.state_dict(), whole("all of it").model.state_dict())
    assert done.history.column("val/loss")[0] == [2 * EACH, 4 * EACH]
    assert done.history.column("gradient_norm")[0] == [5, 10, 15, 20]


def test_who_worked_on_a_run_and_from_where_is_noted(tmp_path):
    with pytest.raises(Killed):
        train(SGD, data(), folder=tmp_path, progress=KillAt(8))
    train(SGD, data(), folder=tmp_path)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["fingerprint"] == fingerprint(SGD)
    assert [start["epoch"] for start in about["starts"]] == [0, 1]
    assert about["starts"][0]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        (replace(SGD, seed=4), "another run, recipe.seed is 3 there and 4 here"),
        (replace(SGD, schedule=ramp_decay), "recipe.schedule is .*linear_decay.* there and .*ramp_decay.* here"),
        (replace(SGD, optimizer=partial(SGD.optimizer, lr=0.2)), "recipe.optimizer.keywords.lr is 0.1 there and 0.2"),
        (replace(SGD, averaging=Averaging()), "recipe.averaging is null there"),
    ],
)
def test_a_folder_of_another_recipe_is_refused(recipe, match, tmp_path):
    train(SGD, data(), folder=tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=match):
        train(recipe, data(), folder=tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_folder_of_other_data_is_refused(tmp_path):
    train(SGD, data(), folder=tmp_path)
    X, y = data()["train"]
    with pytest.raises(ValueError, match=r"another run, data\.train is"):
        train(SGD, {**data(), "train": (X + 1, y)}, folder=tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoints and no run\.json"):
        train(SGD, data(), folder=tmp_path)


def test_images_that_differ_anywhere_but_in_a_corner_are_other_data():
    images = torch.zeros(4096, 9)
    others = images.clone()
    others[:, 4] = 1.0
    assert checkpoints._look(images) != checkpoints._look(others)
    assert checkpoints._look(others) == checkpoints._look(others.clone())


def test_a_log_of_something_else_is_not_cut_off(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl and no run\.json that says of what"):
        train(SGD, data(), folder=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    assert len(read(log).rows) == 1


def test_what_has_no_name_has_no_fingerprint_but_trains_without_a_folder(tmp_path):
    recipe = replace(SGD, model=lambda: nn.Linear(5, 3), epochs=1)
    with pytest.raises(TypeError, match=r"recipe\.model has .*<lambda>, which has no name"):
        train(recipe, data(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert train(recipe, data()).stop == "finished"
    with pytest.raises(TypeError, match=r"recipe\.augment has Linear, which has no name"):
        fingerprint(replace(SGD, augment=nn.Linear(1, 1)))


class Wide(nn.Linear):
    @classmethod
    def made(cls) -> nn.Module:
        return cls(5, 3)

    def shifted(self, x: torch.Tensor, key: tuple[int, int, int]) -> torch.Tensor:
        return self(x)


class Wider(Wide):
    pass


def test_a_method_is_known_by_its_class_and_not_without_the_settings_of_its_object():
    assert fingerprint(replace(SGD, model=Wide.made)) != fingerprint(replace(SGD, model=Wider.made))
    with pytest.raises(TypeError, match=r"recipe\.augment has Wide\.shifted, which has no name"):
        fingerprint(replace(SGD, augment=Wide(5, 5).shifted))
    assert fingerprint(replace(SGD, schedule=math.sqrt)) != fingerprint(replace(SGD, schedule=math.exp))


# ---------------------------------------------------------------------------------------------------- the loop


def test_sgd_is_the_loop_that_one_would_write_by_hand():
    X, y = data()["train"]
    recipe = replace(SGD, model=plain_without_dropout, epochs=2)
    model = initial(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, linear_decay(2))
    for epoch in range(2):
        order = batch_order(len(X), 3, epoch)
        for step, rows in enumerate(order.split(8)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(jitter(X[rows], (3, epoch, step))), y[rows]).backward()
            optimizer.step()
        schedule.step()
    done = train(recipe, data())
    assert equal(done.model.state_dict(), model.state_dict())


def plain_without_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def test_the_last_row_is_what_evaluation_of_the_model_gives():
    done = whole("SGD averaged")
    row = next(row for row in reversed(done.history.rows) if "epoch" in row)
    for prefix, model in (("", done.model), ("average/", done.average)):
        for name, (X, y) in data().items():
            with torch.no_grad():
                out = model.eval()(X)
            assert row[f"{prefix}{name}/loss"] == pytest.approx(float(nn.functional.cross_entropy(out, y)), rel=1e-12)
            assert row[f"{prefix}{name}/accuracy"] == pytest.approx(float((out.argmax(1) == y).double().mean()))
    assert row["epoch"] == EPOCHS


def test_the_average_has_batch_statistics_of_its_own():
    done = whole("SGD averaged")
    X, _ = data()["train"]
    hidden = done.average[0](X)
    torch.testing.assert_close(done.average[1].running_mean, hidden.mean(0), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(done.model[1].running_mean, hidden.mean(0))


def test_a_ragged_last_batch_is_kept_or_dropped():
    assert whole("SGD").steps == EPOCHS * 6
    assert whole("SGD by steps").steps == EPOCHS * 5


def test_rates_follow_the_schedule_by_epoch_or_by_step():
    steps, rates = train(SGD, data(), log_every=1).history.column("lr")
    assert len(steps) == EPOCHS * EACH
    wanted = [0.1 * linear_decay(EPOCHS)(epoch) for epoch in range(EPOCHS) for _ in range(EACH)]
    assert rates == pytest.approx(wanted)
    rates = train(ARMS["SGD by steps"], data(), log_every=1).history.column("lr")[1]
    assert rates == pytest.approx([0.1 * ramp_decay(20, 2.0)(step) for step in range(20)])


def test_dropout_is_on_until_the_first_refresh_always_or_never():
    def modes(mode):
        seen = []

        def look(module, *_):
            if torch.is_grad_enabled():
                seen.append(module.training)

        def model():
            net = network()
            net[3].register_forward_hook(look)
            return net

        recipe = replace(ARMS["Adam, learned eps"], model=model, training_mode=mode, epochs=2)
        damping = partial(auto_damping, every=4, num_batches=3, batch_size=6, curvature="hessian")
        train(replace(recipe, damping=damping if mode == "until_refresh" else None), data())
        return seen

    assert modes("always") == [True] * 12
    assert modes("never") == [False] * 12
    seen = modes("until_refresh")
    assert seen[:4] == [True] * 4
    assert not any(seen[4:])


def test_dropout_draws_anew_in_each_step_and_epoch():
    masks = []

    def model():
        net = plain()
        net[2].register_forward_hook(lambda module, _, out: masks.append(out == 0) if module.training else None)
        return net

    train(replace(SGD, model=model, epochs=2), data())
    full = [mask for mask in masks if len(mask) == 8]
    assert len(full) == 10
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(full, 2))


def test_a_run_leaves_the_global_generators_and_the_data_alone():
    before, copies = torch.get_rng_state(), {name: X.clone() for name, (X, _) in data().items()}
    with pytest.raises(Killed):
        train(ARMS["all of it"], data(), progress=KillAt(8))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(X, copies[name]) for name, (X, _) in data().items())


def test_another_seed_is_another_start_another_order_and_other_dropout():
    other = replace(SGD, seed=4)
    assert not equal(initial(SGD).state_dict(), initial(other).state_dict())
    assert not torch.equal(batch_order(44, 3, 0), batch_order(44, 4, 0))
    assert not torch.equal(batch_order(44, 3, 0), batch_order(44, 3, 1))


def test_progress_counts_steps_and_loggers_get_every_row():
    calls, rows = [], Memory()
    done = train(replace(SGD, epochs=2), data(), progress=lambda *at: calls.append(at), logger=rows, log_every=5)
    assert calls == [(step, 12) for step in range(1, 13)]
    assert rows.rows == done.history.rows
    assert done.history.column("loss")[0] == [5, 6, 10, 12]  # at the interval, and at the end of an epoch


def test_more_can_be_measured_after_each_epoch():
    seen = []

    def norm(model, epoch):
        seen.append((epoch, model.training))
        return {"norm": float(sum(p.detach().square().sum() for p in model.parameters()))}

    done = train(replace(SGD, epochs=3), data(), measure=norm, evaluate_every=2)
    assert seen == [(2, False), (3, False)]
    assert done.history.column("norm")[0] == [12, 18]
    assert equal(done.model.state_dict(), train(replace(SGD, epochs=3), data()).model.state_dict())


@pytest.mark.parametrize("arm", ["SGD", "KFAC"])
def test_copies_along_a_run_are_the_ends_of_shorter_runs(arm):
    recipe = replace(ARMS[arm], schedule=None)
    along = train(recipe, data(), stops=(1, 3)).along
    assert list(along) == [EACH, 3 * EACH]
    for epochs, model in zip((1, 3), along.values(), strict=True):
        assert equal(model.state_dict(), train(replace(recipe, epochs=epochs), data()).model.state_dict())
        assert not any(module.training or module._forward_hooks for module in model.modules())
    assert equal(train(recipe, data()).model.state_dict(), train(recipe, data(), stops=(1, 3)).model.state_dict())


def test_copies_along_a_run_outlast_a_kill(tmp_path):
    with pytest.raises(Killed):
        train(SGD, data(), folder=tmp_path, stops=(1, 4), progress=KillAt(2 * EACH + 1))
    expected = train(SGD, data(), stops=(1, 4)).along
    for _ in ("resumed", "read back"):
        along = train(SGD, data(), folder=tmp_path, stops=(1, 4)).along
        assert list(along) == [EACH, 4 * EACH]
        assert all(equal(along[step].state_dict(), expected[step].state_dict()) for step in along)
    with pytest.raises(ValueError, match="is past epoch 2 and has kept no copy of it: name another folder"):
        train(SGD, data(), folder=tmp_path, stops=(1, 2))


def test_a_run_that_is_given_up_has_the_copies_until_then(tmp_path):
    for _ in ("trained", "read back"):
        done = train(replace(SGD, augment=explode), data(), folder=tmp_path, stops=(1, 2, 3))
        assert done.diverged
        assert list(done.along) == [EACH]


def frozen_norm() -> nn.Module:
    model = network()
    model[1].eval()
    return model


def test_what_is_measured_leaves_frozen_modules_frozen():
    recipe = replace(SGD, model=frozen_norm, epochs=2)
    measured = train(recipe, data(), measure=lambda model, epoch: {"one": 1.0})
    assert equal(measured.model.state_dict(), train(recipe, data()).model.state_dict())
    assert int(measured.model[1].num_batches_tracked) == 0


def test_targets_that_are_not_classes_have_no_accuracy():
    recipe = replace(SGD, model=partial(nn.Linear, 5, 1), loss=nn.MSELoss, epochs=1, loss_bound=100.0)
    X, _ = data()["train"]
    done = train(recipe, {"train": (X, X[:, :1])})
    assert "accuracy" not in done.history.names
    assert "train/loss" in done.history.names


def test_evaluation_leaves_every_module_in_its_mode():
    model = network()
    model[1].eval()
    evaluate(model, nn.CrossEntropyLoss(), data()["val"], batch_size=7)
    assert [module.training for module in model] == [True, False, True, True, True]


# -------------------------------------------------------------------------------------------------- divergence


def explode(x: torch.Tensor, key: tuple[int, int, int]) -> torch.Tensor:
    return x * math.nan if key[1:] == (1, 2) else x


def test_a_loss_that_is_not_a_number_ends_the_run_and_is_recorded(tmp_path):
    recipe = replace(SGD, augment=explode)
    done = train(recipe, data(), folder=tmp_path, log_every=4)
    assert done.diverged
    assert done.stop == "diverged: the loss of step 9 is nan"  # six of the first epoch, and the third
    assert done.steps == 12  # found out when the row was due
    assert done.history.rows[-1] == {"step": 12, "diverged": 1.0}
    again = train(recipe, data(), folder=tmp_path, log_every=4)
    assert again.stop == done.stop
    assert again.steps == 12


def test_a_loss_above_the_bound_ends_the_run():
    wild = replace(SGD, optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=1e4), loss_bound=50.0)
    done = train(wild, data(), log_every=1)
    assert done.stop.startswith("diverged: the loss of step ")
    assert float(done.stop.split()[-1]) >= 50
    assert done.steps < 6
    assert train(replace(wild, loss_bound=math.inf), data()).steps > done.steps


def test_weights_that_a_damping_finds_lost_end_the_run():
    recipe = replace(SGD, optimizer=partial(on_parameters, kind=torch.optim.Adam, lr=0.1), augment=explode)
    done = train(replace(recipe, damping=partial(auto_damping, every=5, num_batches=3)), data(), log_every=50)
    assert done.stop == "diverged: the loss of step 9 is nan"
    assert done.steps == 10


def test_an_average_does_not_take_in_weights_that_are_lost():
    done = train(replace(ARMS["SGD averaged"], augment=explode), data(), log_every=50)
    assert done.diverged
    assert done.average is None


# ---------------------------------------------------------------------------------------- recipes and refusals


def test_a_budget_scales_epochs_and_with_them_schedule_and_averaging():
    paper = replace(ARMS["SGD averaged"], epochs=40, short_epochs=None)
    assert scaled(paper, "paper") == paper
    short = scaled(paper, "short")
    assert short.epochs == 4
    rates = train(short, data()).history.column("lr")[1]
    assert rates == pytest.approx([0.1 * averaging_decay(2)(epoch) for epoch in range(4)])
    assert scaled(paper, "smoke").epochs == 2
    assert scaled(replace(paper, epochs=1), "smoke").epochs == 1
    assert scaled(replace(paper, short_epochs=7), "short").epochs == 7
    with pytest.raises(ValueError, match="budget must be one of smoke, short, paper, got 'long'"):
        scaled(paper, "long")


def test_factories_take_the_seed_and_the_length_of_the_run():
    run = Run(seed=5, epochs=10, steps_per_epoch=7)
    assert trace_penalty(run, eta=1.0).seed == 5
    assert trace_penalty(run, eta=1.0, seed=6).seed == 6
    assert gadam(network(), run, start=0.5).average.start == 35
    assert SGD.run(44).num_steps == 24


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"epochs": 0}, "at least 1, got 0, 8 and None"),
        ({"batch_size": 0}, "at least 1"),
        ({"loss_bound": -1.0}, "loss_bound must be positive, got -1.0"),
        ({"schedule_by": "batch"}, "schedule_by must be one of epoch, step, got 'batch'"),
        ({"training_mode": "off"}, "training_mode must be one of always, until_refresh, never, got 'off'"),
        ({"training_mode": "until_refresh"}, "for a damping that learns"),
        ({"streaming": True}, "for a damping that learns"),
        ({"fast": True, "optimizer": KFAC}, "fast is for plain training"),
        ({"fast": True, "penalty": partial(trace_penalty, eta=0.01)}, "fast is for plain training"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        replace(SGD, **changes)


def test_bad_calls_are_refused_before_anything_is_made(tmp_path):
    path = tmp_path / "run"
    X, y = data()["train"]
    for bad, match in (
        ({}, "'train' among its names, got none"),
        ({"test": (X, y)}, "'train' among its names, got test"),
        ({"train": (X, y[1:])}, "train has 44 inputs and 43 targets"),
        ({"train": (X[:0], y[:0])}, "at least one"),
        ({"train": (X, y.to("meta"))}, "train has inputs on cpu, targets on meta; 'train' is on cpu"),
        ({"train": (X, y), "val": (X.to("meta"), y.to("meta"))}, "val has inputs on meta, .* 'train' is on cpu"),
    ):
        with pytest.raises(ValueError, match=match):
            train(SGD, bad, folder=path)
    for name in ("log_every", "details_every", "evaluate_every", "checkpoint_every", "train_subset", "eval_batch"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            train(SGD, data(), folder=path, **{name: 0})
    for stop in (0, EPOCHS + 1):
        with pytest.raises(ValueError, match=f"stops are epochs from 1 to {EPOCHS}, the last, got {stop}"):
            train(SGD, data(), folder=path, stops=(stop,))
    with pytest.raises(ValueError, match=r"44 samples do not fill one batch of 64, and drop_last is set"):
        train(replace(SGD, batch_size=64, drop_last=True), data(), folder=path)
    with pytest.raises(ValueError, match=r"needs data\['val'\], got train"):
        train(ARMS["SGD averaged by val"], {"train": (X, y)}, folder=path)
    with pytest.raises(ValueError, match=r"needs accuracy, but the targets of data\['val'\] are no classes"):
        train(ARMS["SGD averaged by val"], {"train": (X, y), "val": (X, X[:, :1])}, folder=path)
    with pytest.raises(ValueError, match="Gadam averages its iterates itself"):
        train(replace(ARMS["Gadam"], averaging=Averaging()), data(), folder=path)
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 161"):
        Averaging(start=161)
    assert not path.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear(2, 2)}, "model must be a function that makes one, .* got a Linear"),
        ({"loss": nn.CrossEntropyLoss()}, "loss must be a function that makes one, .* got a CrossEntropyLoss"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "optimizer is a function of"),
        ({"optimizer": torch.optim.Adam}, "optimizer is a function of"),
    ],
)
def test_things_in_the_place_of_what_makes_them_are_refused(changes, message):
    made = {"name": "", "model": partial(nn.Linear, 2, 2), "optimizer": on_parameters, "epochs": 1}
    with pytest.raises(TypeError, match=message):
        Recipe(**{**made, **changes})


@pytest.mark.parametrize("data", [(torch.ones(2, 2), torch.zeros(2)), {"train": torch.ones(2, 2)}])
def test_data_that_is_no_dictionary_of_pairs_is_refused(data):
    recipe = Recipe(name="", model=partial(nn.Linear, 2, 2), optimizer=on_parameters, epochs=1)
    with pytest.raises(TypeError, match="data is a dictionary of pairs of tensors"):
        train(recipe, data)
