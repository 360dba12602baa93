"""The conventions of torch.optim, one function for each: it raises where an optimiser does not keep to it."""

import contextlib
import copy
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from ..batches import seed_torch
from .trial import STEPS, Trial, generators, moves, require, settings, weights

_LONG = 200  # steps over which nothing may grow
_SLACK = 10  # tensors that may be there by chance, 8 bytes each

# ------------------------------------------------------------------------------------------------------ steps


def _descent(trial: Trial) -> None:
    """Thirty steps on one batch lower its loss."""
    model, optimizer = trial.start()
    before = float(trial.loss(model, 0).detach())
    after = float(trial.loss(trial.train(model, optimizer, [0] * 30), 0).detach())
    require(after < before, f"the loss of a batch goes from {before:.4g} to {after:.4g} in 30 steps on it")


def _closure(trial: Trial) -> None:
    """A closure is called with gradients on, its loss returned, and the step that of a plain loop."""
    plain = trial.train(*trial.start())
    model, optimizer = trial.start()
    losses: list[float] = []

    def closure() -> float:
        require(torch.is_grad_enabled(), "the closure is called with gradients off")
        optimizer.zero_grad()
        loss = trial.loss(model, len(losses))
        loss.backward()
        losses.append(float(loss.detach()))
        return loss  # type: ignore[return-value]  # torch says float, and means what a closure gives

    for index in range(STEPS):
        found: Any = optimizer.step(closure)
        require(len(losses) == index + 1, f"step(closure) calls it {len(losses) - index} times")
        require(found is not None, "step(closure) returns None, not the loss")
        value = float(torch.as_tensor(found).detach())
        require(value == losses[-1], f"step(closure) returns {value}, the loss is {losses[-1]}")
    trial.same(model, plain, "a run with closures is not that without")


def _zero_grad(trial: Trial) -> None:
    """zero_grad() leaves no gradients, and zeros with set_to_none=False."""
    model, optimizer = trial.start()
    trial.train(model, optimizer, [0])
    optimizer.zero_grad(set_to_none=False)
    grads = [p.grad for p in model.parameters()]
    require(all(g is not None and not g.any() for g in grads), "zero_grad(set_to_none=False) does not leave zeros")
    optimizer.zero_grad()
    require(all(p.grad is None for p in model.parameters()), "zero_grad() leaves gradients that are not None")


def _no_gradient(trial: Trial) -> None:
    """A step with no gradient at all changes nothing."""
    model, optimizer = trial.start()
    before = weights(trial.train(model, optimizer))
    for p in model.parameters():
        p.grad = None
    optimizer.step()
    trial.unchanged(model, before, "a step where every gradient is None")


def _frozen(trial: Trial) -> None:
    """A parameter that is frozen stays, and gets no gradient."""
    model, optimizer = trial.start(frozen="body.bias")
    before = weights(model)
    trial.train(model, optimizer)
    trial.unchanged(model, {"body.bias": before["body.bias"]}, "a frozen parameter is trained")
    frozen = model.get_parameter("body.bias")
    require(frozen.grad is None and not frozen.requires_grad, "a frozen parameter has a gradient or is thawed")
    require(not torch.equal(model.get_parameter("head.weight"), before["head.weight"]), "beside it nothing moves")


def _unused(trial: Trial) -> None:
    """A parameter that the loss does not depend on stays, whatever the weight decay."""
    model, optimizer = trial.start(spare=True)
    before = weights(model)
    trial.train(model, optimizer)
    spare = {name: value for name, value in before.items() if name.startswith("spare")}
    trial.unchanged(model, spare, "a parameter without a gradient is trained")
    require(not torch.equal(model.get_parameter("head.weight"), before["head.weight"]), "beside it nothing moves")


def _nonfinite(trial: Trial) -> None:
    """A gradient with a NaN changes no weight: the step is skipped, counted and told of, or refused.

    It is counted in the attribute `skipped`, which `state_dict` carries along.
    """
    model, optimizer = trial.start()
    before = weights(trial.train(model, optimizer))
    trial.backward(model, optimizer)
    grad = model.get_parameter("body.weight").grad
    assert grad is not None
    grad[0, 0] = torch.nan
    said, raised = "", False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer.step()
        except Exception as error:
            said, raised = str(error), True
            require(trial.nonfinite == "raise", f"a gradient with a NaN raises {type(error).__name__}: {error}")
    said = said or " ".join(str(w.message) for w in caught)
    trial.unchanged(model, before, "a gradient with a NaN was stepped along")
    require(raised or trial.nonfinite == "skip", "a gradient with a NaN does not raise")
    clear = any(word in said.lower() for word in ("finite", "nan"))
    require(clear, f"a gradient with a NaN is not reported, {said!r}: say that it is not finite")
    if trial.nonfinite == "skip":
        _counted(trial, optimizer)
    trial.train(model, optimizer)
    require(bool(moves(model, before).isfinite().all()), "after a gradient with a NaN good steps are not finite")
    require(bool(moves(model, before).any()), "after a gradient with a NaN nothing moves any more")


def _counted(trial: Trial, optimizer: Optimizer) -> None:
    """One step was skipped, and a state_dict says so."""
    count = getattr(optimizer, "skipped", None)
    require(count == 1, f"a step that was skipped is not counted: the optimiser's `skipped` is {count}, not 1")
    other: Any = trial.start()[1]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    require(other.skipped == 1, f"the count of skipped steps is {other.skipped} after load_state_dict, not 1")


# ------------------------------------------------------------------------------------------ groups, rates, state


def _split(optimizer: Optimizer, **settings: Any) -> Tensor:
    """Give the last parameter a group of its own; which one it is."""
    group = optimizer.param_groups[-1]
    last: Tensor = group["params"].pop()
    given = (group["param_names"].pop(), last) if "param_names" in group else last
    optimizer.add_param_group({"params": [given], **settings})
    return last


def _groups(trial: Trial) -> None:
    """Each group has a learning rate of its own."""
    plain, optimizer = trial.start()
    trial.train(plain, optimizer, [0])
    model, optimizer = trial.start()
    before = weights(model)
    last = _split(optimizer, lr=0.0)
    trial.train(model, optimizer, [0])
    (name,) = (name for name, p in model.named_parameters() if p is last)
    trial.unchanged(model, {name: before[name]}, "a group with lr=0 is trained")
    wanted = {**weights(plain), name: before[name]}
    trial.same(model, wanted, "a separate group for one parameter changes the step of others", trial.rtol)


def _empty_group(trial: Trial) -> None:
    """A group without parameters is taken, and changes nothing."""
    plain = trial.train(*trial.start())
    model, optimizer = trial.start()
    named = "param_names" in optimizer.param_groups[0]
    optimizer.add_param_group({"params": [], **({"param_names": []} if named else {})})
    trial.same(trial.train(model, optimizer), plain, "a run with an empty group is not that without")
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)


def _no_parameters(trial: Trial) -> None:
    """A model without parameters is refused with a ValueError, as torch does."""
    try:
        made = trial.make(nn.Flatten())
    except ValueError:
        return
    raise AssertionError(f"{type(made).__name__} accepts a model without parameters, and would silently train nothing")


def _scheduler(trial: Trial) -> None:
    """LambdaLR scales the step: half the rate, half as far, at the first step and later."""

    def moved(factors: tuple[float, ...]) -> Tensor:
        model, optimizer = trial.start()
        scheduler = LambdaLR(optimizer, lambda t: factors[min(t, len(factors) - 1)])
        before = weights(model)
        for index in range(len(factors)):
            before = weights(model)
            trial.train(model, optimizer, [index])
            scheduler.step()
        return moves(model, before)  # in the last step

    for when, past in (("first", ()), ("third", (1.0, 1.0))):
        whole, half = moved((*past, 1.0)), moved((*past, 0.5))
        apart = float((half - 0.5 * whole).norm() / whole.norm())
        require(apart <= trial.rtol, f"with half the rate by LambdaLR the {when} step is off from half by {apart:.2g}")


def _resume(trial: Trial) -> None:
    """A run goes on to the same bit from a state_dict on disk, in a new model and optimiser."""
    model, optimizer = trial.start()
    trial.train(model, optimizer, range(STEPS + 1))  # an odd number: not at the end of a short cycle
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # settings of groups go along, as a scheduler left them
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    require({"state", "param_groups"} <= set(saved["optimizer"]), "state_dict() lacks 'state' or 'param_groups'")
    resumed, other = trial.start()
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for run in ((model, optimizer), (resumed, other)):
        seed_torch(1)  # global generators are the user's to restore
        trial.train(*run, range(STEPS + 1, 3 * STEPS))
    trial.same(resumed, model, "a resumed run is not the straight one")


# --------------------------------------------------------------------------------------- in the loops of others


def _accumulation(trial: Trial) -> None:
    """Gradients of parts of a batch, added up, give the step of the whole batch."""
    whole = trial.train(*trial.start())
    model, optimizer = trial.start()
    for index in range(STEPS):
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            (trial.loss(model, index, part) / 2).backward()
        optimizer.step()
    trial.same(model, whole, "two halves of a batch are not the whole", trial.rtol)


def _scaler(trial: Trial) -> None:
    """A GradScaler changes nothing but round-off, and holds back a step with an infinite gradient."""
    plain = trial.train(*trial.start())
    model, optimizer = trial.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(trial.loss(model, index)).backward()
        if index % 2:  # as before clipping
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    trial.same(model, plain, "a run with a GradScaler is not that without", trial.rtol)
    before = weights(model)
    optimizer.zero_grad()
    scaler.scale(trial.loss(model, 0) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    trial.unchanged(model, before, "an infinite gradient under a GradScaler")
    require(scaler.get_scale() == 512.0, f"an infinite gradient leaves the scale at {scaler.get_scale()}, not halved")
    require(not getattr(optimizer, "skipped", 0), "a step that a GradScaler holds back is counted in `skipped` too")


def _copy(trial: Trial) -> None:
    """A deep copy of the model, AveragedModel's among them, runs apart from the optimiser."""
    plain = trial.train(*trial.start())
    model, optimizer = trial.start()
    averaged, before = AveragedModel(model), weights(model)
    clone, rows = copy.deepcopy(model), []
    for index in range(STEPS):
        trial.train(model, optimizer, [index])
        trial.loss(averaged, index + 1).backward()
        trial.loss(clone, index + 1).backward()
        averaged.update_parameters(model)
        rows.append(moves(model, before))
    trial.unchanged(clone, before, "the optimiser trains a copy of its model")
    trial.same(model, plain, "passes through a copy of the model change the run")
    off = float((moves(averaged.module, before) - torch.stack(rows).mean(0)).norm() / rows[-1].norm())
    require(off <= trial.rtol, f"AveragedModel is not the mean of the iterates, off by {off:.2g} of the way")


def _evaluation(trial: Trial) -> None:
    """Passes under no_grad and inference_mode between those of training change nothing."""
    plain = trial.train(*trial.start())
    model, optimizer = trial.start()

    def evaluate(index: int) -> None:
        with torch.no_grad():
            trial.loss(model, index)
        with torch.inference_mode():
            trial.loss(model, index + 1)

    for index in range(STEPS):
        optimizer.zero_grad()
        evaluate(index)
        loss = trial.loss(model, index)
        evaluate(index)
        loss.backward()
        evaluate(index)
        optimizer.step()
        require(torch.is_grad_enabled(), "gradients are off after a step")
    trial.same(model, plain, "a run with evaluations between is not that without")


def _inplace(trial: Trial) -> None:
    """A network with ReLU(inplace=True) is trained as one without."""
    plain = trial.train(*trial.start())
    found = trial.train(*trial.start(inplace=True))
    trial.same(found, plain, "ReLU(inplace=True) changes the run", trial.rtol)


# ----------------------------------------------------------------------------------------------- side effects


@contextlib.contextmanager
def _out_of_sight() -> Iterator[None]:
    """What is there already is not looked through inside: a heap takes seconds, what is new milliseconds."""
    if gc.get_freeze_count():  # in use by others
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _live() -> tuple[int, int]:
    """How many tensors there are, and how many bytes they hold."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    storages = [x.untyped_storage() for x in found if x.layout is torch.strided and x.device.type == "cpu"]
    return len(found), sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _memory(trial: Trial) -> None:
    """Two hundred steps leave no more tensors, and none larger, than the first twenty."""
    with _out_of_sight():
        model, optimizer = trial.start()
        trial.train(model, optimizer, range(20))
        count, size = _live()
        trial.train(model, optimizer, range(20, 20 + _LONG))
        more, larger = (now - then for now, then in zip(_live(), (count, size), strict=True))
    require(more <= _SLACK, f"{_LONG} steps leave {more} tensors more")
    require(larger <= 8 * _SLACK, f"{_LONG} steps leave {larger} bytes more in tensors")


def _rng(trial: Trial) -> None:
    """The global generators of torch, NumPy and Python are not used."""
    model, optimizer = trial.start()
    for who, steps in (("the first step", [0]), ("training", range(1, 2 * STEPS))):
        before = generators()
        trial.train(model, optimizer, steps)
        for whose, state in generators().items():
            require(state == before[whose], f"{who} draws from {whose}'s global generator")


def _gradients(trial: Trial) -> None:
    """A step leaves the gradients as they are, for what logs them or adds to them."""
    model, optimizer = trial.start()
    for index in range(STEPS):
        trial.backward(model, optimizer, index)
        before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        for name, (grad, value) in before.items():
            same = model.get_parameter(name).grad is grad and torch.equal(grad, value)
            require(same, f"a step writes to the gradient of {name}")


def _settings(trial: Trial) -> None:
    """What torch has set for the whole process, the default dtype say, stays as it is."""
    trial.train(*trial.start())
    for name, value in settings().items():
        require(value == trial.settings[name], f"{name} was {trial.settings[name]} and is {value} after training")


# By name, in the order in which they run: from what everything else rests on to side effects.
CHECKS: dict[str, Callable[[Trial], None]] = {
    "descent": _descent,
    "closure": _closure,
    "zero_grad": _zero_grad,
    "no_gradient": _no_gradient,
    "frozen": _frozen,
    "unused": _unused,
    "nonfinite": _nonfinite,
    "groups": _groups,
    "empty_group": _empty_group,
    "no_parameters": _no_parameters,
    "scheduler": _scheduler,
    "resume": _resume,
    "accumulation": _accumulation,
    "scaler": _scaler,
    "copy": _copy,
    "evaluation": _evaluation,
    "inplace": _inplace,
    "memory": _memory,
    "rng": _rng,
    "gradients": _gradients,
    "settings": _settings,
}
