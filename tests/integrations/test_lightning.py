"""Curvature and the optimisers of ritz in Lightning: the same as in a plain loop, whatever Lightning does around it."""

import copy
import csv
import importlib
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ritz
from ritz.errors import NumericalWarning
from ritz.integrations import lightning as ours
from ritz.loggers import Memory
from ritz.optim import KFAC, AutoDamping, Gadam, GadamX, IterateAverage, LanczosOpt, TracePenalty

STEPS = 6
MEASURES = ["trace", "lambda_max"]


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def risk_of(net):
    return ritz.Risk(net, nn.CrossEntropyLoss(), data())


class Training:
    """A network trained by all that ritz has for a loop, without a word on who calls it."""

    def __init__(self):
        self.net = network()
        self.optimizer = KFAC(self.net, lr=0.1, damping=0.1, factor_every=1, inverse_every=2)
        self.damping = AutoDamping(self.optimizer, risk_of(self.net), every=2)
        self.average = IterateAverage(self.net, start=2)
        self.penalty = TracePenalty(1e-3)

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y) + self.penalty(self.net, x)

    def state(self):
        damping = self.optimizer.param_groups[0]["damping"]
        return [*self.net.state_dict().values(), *self.average.model.state_dict().values(), torch.as_tensor(damping)]


def plain(batches, tracker=None):
    """The same in a loop of one's own."""
    training = Training()
    tracker = tracker or ritz.integrations.track.Tracker(risk_of(training.net), 2, measures=MEASURES, budget=1.0)
    for batch in batches:
        training.optimizer.zero_grad()
        training.loss(batch).backward()
        training.optimizer.step()
        training.damping.step()
        training.average.step()
        tracker.step()
    return training, tracker


# ----------------------------------------------------------------------------------- with a stand-in for it


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.logged = network(), []

    def log_dict(self, scalars, **how):
        self.logged.append((scalars, how))


def stand_in(**fields):
    logger = SimpleNamespace(rows=[])
    logger.log_metrics = lambda scalars, step: logger.rows.append((step, scalars))
    return SimpleNamespace(is_global_zero=True, global_step=0, current_epoch=0, loggers=[logger], **fields)


def make_risk(module):
    return risk_of(module.net)


def run(hooks, trainer, module, steps, per_epoch=100):
    hooks.on_train_start(trainer, module)
    for step in steps:
        trainer.global_step = step
        hooks.on_train_batch_end(trainer, module, None, None, 0)
        if step % per_epoch == 0:
            hooks.on_train_epoch_end(trainer, module)
            trainer.current_epoch += 1
    hooks.on_train_end(trainer, module)


def test_rows_go_to_the_loggers_of_the_trainer_and_can_be_monitored():
    trainer, module, memory = stand_in(), Module(), Memory()
    hooks = ours.CurvatureHooks(make_risk, every=2, budget=1.0, measures=MEASURES, logger=memory)
    run(hooks, trainer, module, [1, 1, 2, 2, 3, 4])  # gradients of two batches accumulate
    assert [step for step, _ in trainer.loggers[0].rows] == [2, 4]
    assert trainer.loggers[0].rows[0][1]["curvature/hessian/trace"] > 0
    assert [row["step"] for row in memory.rows] == [2, 4]
    assert module.logged[0][1] == {"logger": False, "on_step": True, "on_epoch": False}


def test_a_logger_of_the_trainer_that_fails_is_named_and_the_numbers_can_still_be_monitored():
    class Full:
        def log_metrics(self, metrics, step=None):
            raise OSError("no space")

    trainer, module = stand_in(), Module()
    trainer.loggers.insert(0, Full())
    hooks = ours.CurvatureHooks(make_risk, every=2, budget=1.0, measures=MEASURES)
    with pytest.warns(NumericalWarning, match=r"the logger \S*Full\.log_metrics failed at the row of step 2"):
        run(hooks, trainer, module, range(1, 5))
    assert [step for step, _ in trainer.loggers[1].rows] == [2, 4]
    assert len(module.logged) == 2


def test_epochs_count_where_that_is_asked_for():
    trainer, module = stand_in(), Module()
    hooks = ours.CurvatureHooks(make_risk, every_epochs=2, budget=1.0, measures=MEASURES)
    run(hooks, trainer, module, range(1, 13), per_epoch=3)
    assert [step for step, _ in trainer.loggers[0].rows] == [6, 12]
    assert module.logged[0][1] == {"logger": False, "on_step": False, "on_epoch": True}


def test_only_the_first_process_looks():
    trainer = stand_in()
    trainer.is_global_zero = False
    hooks = ours.CurvatureHooks(make_risk, every=1)
    run(hooks, trainer, Module(), [1, 2])
    assert hooks.tracker is None


def test_the_state_comes_before_training_begins_and_is_gone_on_from():
    first = ours.CurvatureHooks(make_risk, every=2, budget=1.0, measures=MEASURES)
    run(first, stand_in(), Module(), [1, 2, 3])
    again = ours.CurvatureHooks(make_risk, every=2, budget=1.0, measures=MEASURES)
    again.load_state_dict({})  # a checkpoint from before training
    again.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    run(again, stand_in(), Module(), [4])
    assert [row["step"] for row in again.tracker.record.rows] == [2, 4]


def test_a_run_resumed_from_a_checkpoint_without_a_state_looks_at_the_steps_of_the_straight_one():
    trainer = stand_in()
    trainer.global_step = 8
    hooks = ours.CurvatureHooks(make_risk, every=6, budget=1.0, measures=MEASURES)
    run(hooks, trainer, Module(), range(9, 14))
    assert [step for step, _ in trainer.loggers[0].rows] == [12]


def test_the_clock_stops_when_training_fails():
    trainer, module = stand_in(), Module()
    hooks = ours.CurvatureHooks(make_risk, every=2, measures=MEASURES)
    hooks.on_train_start(trainer, module)
    hooks.on_exception(trainer, module, KeyboardInterrupt())
    stopped = hooks.tracker.elapsed
    assert stopped > 0
    assert hooks.tracker.elapsed == stopped


def test_functions_are_called_once_for_each_step():
    calls = []
    hooks, trainer = ours.EachStepHooks(lambda: calls.append(1)), stand_in()
    hooks.on_train_start(trainer, None)
    for step in (0, 1, 1, 2):
        trainer.global_step = step
        hooks.on_train_batch_end(trainer, None, None, None, 0)
    assert len(calls) == 2


def test_bad_arguments_are_refused_before_training():
    with pytest.raises(TypeError, match=r"risk must be a ritz\.Risk, or a function .* got Sequential"):
        ours.CurvatureHooks(network())
    with pytest.raises(ValueError, match="every_epochs must be at least 1, got 0"):
        ours.CurvatureHooks(make_risk, every_epochs=0)
    with pytest.raises(ValueError, match="no measure is named 'tracy'"):
        ours.CurvatureHooks(make_risk, measures=["tracy"])
    with pytest.raises(TypeError, match=r"functions to call after each step, such as damping\.step, got NoneType"):
        ours.EachStepHooks(None)


def test_a_missing_package_and_an_unknown_name_are_said(monkeypatch):
    for host in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, host, None)
    monkeypatch.delitem(vars(ours), "CurvatureCallback", raising=False)
    with pytest.raises(ImportError, match="Lightning is not installed here"):
        ours.CurvatureCallback  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Curvature'; it has CurvatureCallback, EachStep"):
        ours.Curvature  # noqa: B018


# ------------------------------------------------------------------------------------------ with Lightning


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def host(request, monkeypatch):
    pytest.importorskip(request.param.split(".")[0], reason=f"{request.param} is not installed")
    found = importlib.import_module(request.param)
    for name in ("CurvatureCallback", "EachStep"):  # made anew of this host
        monkeypatch.delitem(vars(ours), name, raising=False)
    monkeypatch.setattr(ours, "_HOSTS", (request.param,))
    return found


quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def module_of(host, training):
    class Wrapped(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = training.net
            self.seen = []

        def training_step(self, batch, index):
            self.seen.append(batch)
            return training.loss(batch)

        def configure_optimizers(self):
            return training.optimizer

    return Wrapped()


def trainer_of(host, folder, callbacks, **keywords):
    keywords = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **keywords}
    return host.Trainer(
        accelerator="cpu", callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, log_every_n_steps=50, **keywords,
    )  # fmt: skip


def loader():
    return DataLoader(TensorDataset(*data()), batch_size=16)


@quiet
def test_training_in_lightning_is_that_of_a_plain_loop_to_the_bit(host, tmp_path):
    training = Training()
    module = module_of(host, training)
    watch = ours.CurvatureCallback(make_risk, every=2, budget=1.0, measures=MEASURES)
    after = ours.EachStep(training.damping.step, training.average.step)
    logger = host.loggers.CSVLogger(tmp_path)
    trainer = trainer_of(host, tmp_path, [watch, after], logger=logger)
    trainer.fit(module, loader())
    expected, tracker = plain(module.seen)
    assert len(module.seen) == STEPS
    for ours_, theirs in zip(training.state(), expected.state(), strict=True):
        assert torch.equal(ours_, theirs)
    for name in ("curvature/hessian/trace", "curvature/hessian/lambda_max"):
        assert watch.tracker.record.column(name) == tracker.record.column(name)
        assert float(trainer.callback_metrics[name]) == pytest.approx(tracker.record.column(name)[1][-1], rel=1e-6)
    with open(logger.log_dir + "/metrics.csv", encoding="utf8") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2", "4", "6"]


@quiet
def test_a_checkpoint_of_lightning_holds_the_tracker(host, tmp_path):
    def fit(epochs, path=None):
        torch.manual_seed(0)
        training = SimpleNamespace(net=network())
        training.optimizer = torch.optim.SGD(training.net.parameters(), lr=0.1)
        training.loss = lambda batch: nn.functional.cross_entropy(training.net(batch[0]), batch[1])
        watch = ours.CurvatureCallback(make_risk, every_epochs=1, budget=1.0, measures=MEASURES)
        trainer = trainer_of(host, tmp_path, [watch], max_epochs=epochs)
        trainer.fit(module_of(host, training), loader(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return watch.tracker.record

    whole = fit(3)
    fit(2)
    again = fit(3, tmp_path / "last.ckpt")
    assert again.column("curvature/hessian/trace") == whole.column("curvature/hessian/trace")
    assert len(again.rows) == 3


@quiet
def test_a_checkpoint_of_lightning_without_the_callback_keeps_the_grid_of_looks(host, tmp_path):
    def fit(epochs, callbacks, path=None):
        training = SimpleNamespace(net=network())
        training.optimizer = torch.optim.SGD(training.net.parameters(), lr=0.1)
        training.loss = lambda batch: nn.functional.cross_entropy(training.net(batch[0]), batch[1])
        trainer = trainer_of(host, tmp_path, callbacks, max_epochs=epochs)
        trainer.fit(module_of(host, training), loader(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")

    fit(1, [])  # 3 steps
    watch = ours.CurvatureCallback(make_risk, every=3, budget=1.0, measures=MEASURES)
    fit(3, [watch], tmp_path / "last.ckpt")
    assert watch.tracker.record.column("curvature/hessian/trace")[0] == [6, 9]


@quiet
def test_the_callbacks_can_be_copied_and_pickled(host):
    after = ours.EachStep(copy.copy)
    assert pickle.loads(pickle.dumps(after)).calls == (copy.copy,)
    assert isinstance(after, host.Callback)


# ---------------------------------------------------------------------------- every optimiser, both ways to step


def kfac(net):
    optimizer = KFAC(net, lr=0.1, damping=0.1, factor_every=1, inverse_every=2)
    return optimizer, [AutoDamping(optimizer, risk_of(net), every=2).step]


def gadam(net):
    return Gadam(net.parameters(), lr=0.01, start=1, model=net), []


def gadamx(net):
    return GadamX(net.parameters(), lr=0.1, start=1, model=net), []


def lanczos(net):
    return LanczosOpt(net.parameters(), risk_of(net), lr=0.1, damping=0.5, eta=2.0, k=4), []


def result(net, optimizer):
    average = optimizer.average.model.state_dict().values() if hasattr(optimizer, "average") else ()
    return [*net.state_dict().values(), *average, torch.as_tensor(optimizer.param_groups[0].get("damping", 0.0))]


def in_a_loop(make, batches, accumulate=1):
    """The weights after a plain loop over these batches."""
    net = network()
    optimizer, after = make(net)
    for number, (x, y) in enumerate(batches, start=1):
        (nn.functional.cross_entropy(net(x), y) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            for call in after:
                call()
    return result(net, optimizer)


def in_lightning(host, folder, make, manual, **settings):
    """The weights after the same in Lightning, and the batches it gave."""
    net = network()
    optimizer, after = make(net)

    class Module(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen, self.automatic_optimization = net, [], not manual

        def configure_optimizers(self):
            return optimizer

        def training_step(self, batch, index):
            self.seen.append(batch)
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if manual:
                theirs = self.optimizers()
                theirs.zero_grad()
                self.manual_backward(loss)
                theirs.step()
            return loss

    module = Module()
    watch = ours.CurvatureCallback(make_risk, every=2, budget=1.0, measures=["trace"])
    trainer_of(host, folder, [ours.EachStep(*after), watch], **settings).fit(module, loader())
    return result(net, optimizer), module.seen, watch.tracker


@quiet
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("make", [kfac, gadam, gadamx, lanczos], ids=lambda make: make.__name__)
def test_an_optimiser_does_in_lightning_what_it_does_in_a_loop(host, tmp_path, make, manual):
    found, seen, tracker = in_lightning(host, tmp_path, make, manual)
    assert len(seen) == STEPS
    assert [row["step"] for row in tracker.record.rows] == [2, 4, 6]
    for here, there in zip(found, in_a_loop(make, seen), strict=True):
        assert torch.equal(here, there)


@quiet
@pytest.mark.parametrize("make", [kfac, gadam], ids=lambda make: make.__name__)
def test_gradients_of_several_batches_are_one_step(host, tmp_path, make):
    found, seen, tracker = in_lightning(host, tmp_path, make, False, accumulate_grad_batches=3)
    assert len(seen) == STEPS
    assert [row["step"] for row in tracker.record.rows] == [2]
    for here, there in zip(found, in_a_loop(make, seen, accumulate=3), strict=True):
        assert torch.equal(here, there)


@quiet
def test_a_run_in_bfloat16_is_looked_at_in_the_precision_of_its_weights(host, tmp_path):
    """Autocast is Lightning's; a look switches it off."""
    found, seen, tracker = in_lightning(host, tmp_path, gadam, False, precision="bf16-mixed")
    net = network()
    net.load_state_dict(dict(zip(net.state_dict(), found, strict=False)))
    assert seen[0][0].dtype == found[0].dtype == torch.float64
    assert float(tracker.last["trace"]) == float(ritz.measure(risk_of(net), measures=["trace"])["trace"])
