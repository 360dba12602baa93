"""Every optimiser of ritz keeps to the conventions of torch.optim, as torch's own do; what is left out says why."""

import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ritz
from ritz.optim import KFAC, Gadam, GadamX, LanczosOpt
from ritz.testing import CHECKS, check_optimizer

ALONG = {"nonfinite": "torch's optimisers step along a gradient that is not finite"}
DRAWN = {"accumulation": "labels are drawn for each pass: other ones for halves than for the whole"}
SCALED = {
    "accumulation": "its factors are made of the user's gradients: loss_scale says how those are scaled",
    "scaler": "its factors are made of the user's gradients: loss_scale=scaler.get_scale",
}
ONE_GROUP = {"groups": "eigenvectors span all parameters: one group alone"}


def kfac(**settings):
    """KFAC that renews factors and eigenvectors within the few steps of a check."""
    chosen = {"fisher": "type2", "factor_every": 2, "inverse_every": 4, "weight_decay": 1e-2, **settings}
    return lambda model: KFAC(model, lr=0.05, damping=0.1, **chosen)


def gadam(kind, **settings):
    return lambda model: kind(model.parameters(), start=3, model=model, weight_decay=0.1, **settings)


def lanczos(**settings):
    """Curvature on data of its own."""
    generator = torch.Generator().manual_seed(5)
    X, y = torch.randn(12, 4, generator=generator), torch.randint(3, (12,), generator=generator)

    def make(model: nn.Module) -> LanczosOpt:
        risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
        return LanczosOpt(model.parameters(), risk, lr=0.05, damping=0.5, k=2, **settings)

    return make


SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
OPTIMISERS = {
    "sgd": (lambda m: SGD(m.parameters(), lr=0.1), ALONG),
    "sgd, momentum": (lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1), ALONG),
    "sgd, named": (lambda m: SGD(m.named_parameters(), lr=0.1, nesterov=True, momentum=0.9), ALONG),
    "adamw": (lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1), ALONG),
    "adamw, fused": (lambda m: AdamW(m.parameters(), lr=0.01, fused=True), ALONG),
    "kfac": (kfac(), {}),
    "kfac, mc": (kfac(fisher="mc"), DRAWN),
    "kfac, empirical": (kfac(fisher="empirical"), SCALED),
    "kfac, ekfac": (kfac(ekfac=True, stagger=True, decoupled=True), {}),
    "kfac, qr": (kfac(refresh="qr"), {}),
    "ekfac, qr": (kfac(ekfac=True, refresh="qr"), {}),
    "gadam": (gadam(Gadam, lr=0.01), {}),
    "gadam, fused": (gadam(Gadam, lr=0.01, fused=True), {}),
    "gadamx": (gadam(GadamX, lr=0.01), {}),
    "lanczos": (lanczos(), ONE_GROUP),
    "lanczos, ggn from the gradient": (lanczos(curvature="ggn", start="grad"), ONE_GROUP),
}


NAMES = [pytest.param(name, marks=pytest.mark.slow if "ggn" in name else ()) for name in OPTIMISERS]


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_to_the_conventions_of_torch(name):
    make, skip = OPTIMISERS[name]
    report = check_optimizer(make, skip=skip)
    assert set(report.passed) | set(skip) == set(CHECKS)
    assert not set(report.passed) & set(skip)


@pytest.mark.parametrize("name", [name for name, (_, skip) in OPTIMISERS.items() if skip])
def test_what_is_left_out_would_not_hold(name):
    make, skip = OPTIMISERS[name]
    for check in skip:
        with pytest.raises(AssertionError, match=f": {check}: "):
            check_optimizer(make, skip={other: "not looked at" for other in CHECKS if other != check})


# ------------------------------------------------------------------------------------------ optimisers with a fault


class Right(Optimizer):
    """Heavy ball, careful of NaN: it passes all checks. Each subclass spoils one thing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.skipped = 0
        self.prepare(model)

    def state_dict(self):
        return {**super().state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "skipped"})
        self.skipped = state_dict["skipped"]

    def prepare(self, model: nn.Module) -> None:
        """For subclasses that look at the model."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        if self.usable([p.grad for p in params if p.grad is not None]):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.move(p, p.grad, group)
        return loss

    def usable(self, grads: list[Tensor]) -> bool:
        finite = all(bool(g.isfinite().all()) for g in grads)
        if not finite:
            self.skipped += 1
            warnings.warn("the gradient is not finite: the step is skipped", stacklevel=2)
        return finite

    def move(self, p: Tensor, grad: Tensor, group: dict) -> None:
        self.memory(p).mul_(0.5).add_(grad)
        p.sub_(self.rate(group) * self.memory(p))

    def memory(self, p: Tensor) -> Tensor:
        return self.state[p].setdefault("m", torch.zeros_like(p))

    def rate(self, group: dict) -> float:
        return group["lr"]

    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


class Climbs(Right):
    def rate(self, group):
        return -group["lr"]


class KeepsTheLoss(Right):
    def step(self, closure=None):
        super().step(closure)


class LeavesZeros(Right):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


class NeedsAGradient(Right):
    def usable(self, grads):
        return super().usable(grads) and bool(torch.stack([g.norm() for g in grads]).isfinite().all())


class DecaysTheFrozen(Right):
    def usable(self, grads):
        for p in self.params():
            p.mul_(1.0 if p.requires_grad else 0.9)
        return super().usable(grads)


class DecaysTheUnused(Right):
    def usable(self, grads):
        for p in self.params():
            p.mul_(0.9 if grads and p.grad is None and p.requires_grad else 1.0)
        return super().usable(grads)


class Careless(Right):
    def usable(self, grads):
        return True


class Mute(Right):
    def usable(self, grads):
        return all(bool(g.isfinite().all()) for g in grads)


class Uncounted(Right):
    def usable(self, grads):
        before, finite = self.skipped, super().usable(grads)
        self.skipped = before
        return finite


class CountsAnew(Right):
    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "skipped": 0})


class CountsForTheScaler(Right):
    """Looks at gradients as they come, before a GradScaler does."""

    def prepare(self, model):
        own = weakref.ref(self)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: own().look(p.grad))

    def look(self, grad):
        self.skipped += not bool(grad.isfinite().all())


class OneRateForAll(Right):
    def rate(self, group):
        return self.param_groups[0]["lr"]


class LooksAtTheFirst(Right):
    def usable(self, grads):
        return super().usable(grads) and all(group["params"][0] is not None for group in self.param_groups)


class TakesNothing(Right):
    def __init__(self, model):
        Optimizer.__init__(self, [{"params": list(model.parameters())}], {"lr": 0.1})
        self.skipped = 0


class HoldsTheFirstRate(Right):
    def rate(self, group):
        return group.setdefault("first", group["lr"])


class Forgets(Right):
    def prepare(self, model):
        self.own: dict[Tensor, Tensor] = {}

    def memory(self, p):
        return self.own.setdefault(p, torch.zeros_like(p))


class ForgetsTheRate(Right):
    def load_state_dict(self, state_dict):
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class CountsPasses(Right):
    """Divides by the number of backward passes, as if gradients were added up unscaled."""

    def prepare(self, model):
        self.passes = 0
        if params := list(model.parameters()):
            params[-1].register_post_accumulate_grad_hook(self.count)

    def count(self, p):
        self.passes += 1

    def usable(self, grads):
        self.passes, self.last = 0, max(self.passes, 1)
        return super().usable(grads)

    def rate(self, group):
        return group["lr"] / self.last


class TrustsTheScaler(Right):
    """Says that it knows of scaled gradients, and does not."""

    _step_supports_amp_scaling = True


class HooksItself(Right):
    """Its hook goes into copies of the model, where the copied optimiser lacks what it needs."""

    def prepare(self, model):
        self.seen = 0
        model.register_forward_hook(self.see)

    def see(self, module, args, output):
        self.seen += 1


class CountsEvaluations(Right):
    def prepare(self, model):
        self.seen = 0
        own = weakref.ref(self)
        model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else own().see())

    def see(self):
        self.seen += 1

    def rate(self, group):
        return group["lr"] / (1 + self.seen)


class HooksActivations(Right):
    """A full backward hook makes views of what goes in, which cannot be changed in place."""

    def prepare(self, model):
        for module in model.children():
            if not list(module.parameters()):
                module.register_full_backward_hook(lambda *_: None)


class Hoards(Right):
    def prepare(self, model):
        self.history: list[Tensor] = []

    def move(self, p, grad, group):
        super().move(p, grad, group)
        self.history.append(p.detach().clone())


class Swells(Right):
    """One tensor, which grows."""

    def prepare(self, model):
        self.history = torch.zeros(0)

    def usable(self, grads):
        self.history = torch.cat([self.history, torch.zeros(1)])
        return super().usable(grads)


class DrawsNumbers(Right):
    def usable(self, grads):
        torch.rand(1)
        return super().usable(grads)


class ScalesInPlace(Right):
    def move(self, p, grad, group):
        super().move(p, grad.mul_(0.5), group)


class SetsTheDtype(Right):
    def prepare(self, model):
        torch.set_default_dtype(torch.float32)


FAULTS = [
    (Climbs, "descent", r"the loss of a batch goes from .* to .* in 30 steps on it"),
    (KeepsTheLoss, "closure", r"step\(closure\) returns None, not the loss"),
    (LeavesZeros, "zero_grad", r"zero_grad\(\) leaves gradients that are not None"),
    (NeedsAGradient, "no_gradient", "raised RuntimeError: stack expects a non-empty TensorList"),
    (DecaysTheFrozen, "frozen", "a frozen parameter is trained: body.bias has changed"),
    (DecaysTheUnused, "unused", "a parameter without a gradient is trained: spare.weight has changed"),
    (Careless, "nonfinite", "a gradient with a NaN was stepped along: body.weight has changed"),
    (Mute, "nonfinite", "a gradient with a NaN is not reported, '': say that it is not finite"),
    (Uncounted, "nonfinite", "a step that was skipped is not counted: the optimiser's `skipped` is 0, not 1"),
    (CountsAnew, "nonfinite", "the count of skipped steps is 0 after load_state_dict, not 1"),
    (OneRateForAll, "groups", "a group with lr=0 is trained: head.bias has changed"),
    (LooksAtTheFirst, "empty_group", "raised IndexError: list index out of range"),
    (
        TakesNothing,
        "no_parameters",
        "TakesNothing accepts a model without parameters, and would silently train nothing",
    ),
    (HoldsTheFirstRate, "scheduler", "with half the rate by LambdaLR the third step is off from half by 0.5"),
    (Forgets, "resume", "a resumed run is not the straight one: body.weight is off by"),
    (ForgetsTheRate, "resume", "a resumed run is not the straight one: body.weight is off by"),
    (CountsPasses, "accumulation", "two halves of a batch are not the whole: body.weight is off by"),
    (TrustsTheScaler, "scaler", "a run with a GradScaler is not that without: body.weight is off by"),
    (CountsForTheScaler, "scaler", "a step that a GradScaler holds back is counted in `skipped` too"),
    (HooksItself, "copy", "raised AttributeError: 'HooksItself' object has no attribute 'seen'"),
    (CountsEvaluations, "evaluation", "a run with evaluations between is not that without: body.weight is off by"),
    (HooksActivations, "inplace", "raised RuntimeError: .* view and is being modified inplace"),
    (Hoards, "memory", "200 steps leave 800 tensors more"),
    (Swells, "memory", "200 steps leave 1600 bytes more in tensors"),
    (DrawsNumbers, "rng", "the first step draws from torch's global generator"),
    (ScalesInPlace, "gradients", "a step writes to the gradient of body.weight"),
    (SetsTheDtype, "settings", "the default dtype was torch.float64 and is torch.float32 after training"),
]


def test_the_optimiser_that_the_faults_are_put_into_has_none():
    report = check_optimizer(Right)
    assert report.passed == tuple(CHECKS)


def test_every_check_is_one_that_something_fails():
    assert {check for _, check, _ in FAULTS} == set(CHECKS)


@pytest.mark.parametrize(("kind", "check", "message"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_fails_the_check_made_for_it_and_no_other(kind, check, message):
    with pytest.raises(AssertionError, match=f"^{kind.__name__}: {check}: {message}"):
        check_optimizer(kind)  # the checks before it hold
    names = list(CHECKS)
    done = names[: names.index(check) + 1]
    assert check_optimizer(kind, skip=dict.fromkeys(done, "done")).passed == tuple(names[len(done) :])
