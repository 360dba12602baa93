"""Recipes: how a network is trained, as data that can be scaled, compared and written down.

    recipe = Recipe(
        name="VGG-16, KFAC, learned damping",
        model=vgg16,
        optimizer=partial(kfac, lr=1e-3, damping=0.03),
        damping=auto_damping,
        schedule=linear_decay,                      # of the number of epochs, so that it scales with them
        epochs=100,
    )
    train(scaled(recipe, "short"), {"train": (X, y), "test": (X_test, y_test)}, folder="runs/vgg16")

What has to be made anew for each run is a factory: a function with a name, or a `functools.partial` of one. So a recipe
has a fingerprint, and a folder of one is not mistaken for a folder of another.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim import KFAC, AutoDamping, Gadam, TracePenalty
from ..risk import Risk

Budget = Literal["smoke", "short", "paper"]
Mode = Literal["always", "until_refresh", "never"]
Unit = Literal["epoch", "step"]
Key = tuple[int, int, int]  # (seed, epoch, step within the epoch)
Factor = Callable[[float], float]

SMOKE_EPOCHS = 2
SHORT_SHARE = 0.1  # of the epochs, where a recipe does not say


@dataclass(frozen=True)
class Run:
    """What a factory may want to know of the run that it makes something for.

    Example:
        >>> Run(seed=0, epochs=300, steps_per_epoch=391).num_steps
        117300
    """

    seed: int
    epochs: int
    steps_per_epoch: int

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self.epochs * self.steps_per_epoch


@dataclass(frozen=True)
class Averaging:
    """An average of the weights at the ends of epochs (`ritz.optim.IterateAverage`).

    Attributes:
        start: The share of the epochs that go before, 161 / 300 in the papers; or "auto", when the accuracy on "val"
            has not been better for `patience` epochs.
        every: Epochs between two iterates that are averaged.
        patience: Of "auto".
    """

    start: float | Literal["auto"] = 161 / 300
    every: int = 1
    patience: int = 5

    def __post_init__(self) -> None:
        if self.start != "auto" and not 0 <= self.start < 1:
            raise ValueError(f"start is 'auto' or the share of epochs before averaging, in [0, 1), got {self.start!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is trained.

    Attributes:
        name: For people.
        model: Makes the network; its weights are drawn from the global generator, which is seeded for it.
        optimizer: optimizer(model, run); see `on_parameters`, `kfac` and `gadam`.
        epochs: How many.
        batch_size: Of training.
        drop_last: Whether a last batch that is short is left out.
        loss: Makes the loss, of (outputs, targets) and a mean over items.
        schedule: schedule(T) gives the factor of the learning rate at t, as `linear_decay` does; None for 1.
        schedule_by: Whether t and T count epochs, as the papers do, or steps.
        augment: augment(x, (seed, epoch, step)), on the device of the data and without any other randomness.
        averaging: Of the iterates; None for none, or for an optimiser that has its own.
        penalty: penalty(run) gives a term of the loss, of (model, x, y), such as `TracePenalty`.
        damping: damping(optimizer, risk, run) gives an `AutoDamping`, or its like; the risk has the training data.
        streaming: Whether the damping is shown the training batches.
        training_mode: When the network is in training mode, with dropout. In the code published with seed 004 it is
            so "until_refresh" of the learned damping, the first, and with flat damping "always". "never" is a control
            for both; BatchNorm then keeps the statistics that it has.
        loss_bound: A run with a loss that is not below this has diverged.
        fast: Forward and backward passes of training in bfloat16 (`torch.autocast`), compiled, and by the convolutions
            that cuDNN finds fastest. Weights, optimiser, evaluations and whatever is measured stay in float32. Not for
            optimisers with hooks, such as KFAC, nor with a penalty; on a GPU a run that was killed is then resumed
            closely, not to the bit.
        short_epochs: How many at the budget "short"; None for a tenth.
        seed: Of weights, batches, dropout and whatever the factories draw.

    Raises:
        ValueError: If a number or a name is out of range.

    Example:
        >>> recipe = Recipe(
        ...     name="softmax",
        ...     model=partial(nn.Linear, 64, 10),
        ...     optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=0.1),
        ...     epochs=50,
        ... )
        >>> scaled(recipe, "short").epochs
        5
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, Run], Optimizer]
    epochs: int
    batch_size: int = 128
    drop_last: bool = False
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss
    schedule: Callable[[float], Factor] | None = None
    schedule_by: Unit = "epoch"
    augment: Callable[[Tensor, Key], Tensor] | None = None
    averaging: Averaging | None = None
    penalty: Callable[[Run], Any] | None = None
    damping: Callable[[Optimizer, Risk, Run], Any] | None = None
    streaming: bool = False
    training_mode: Mode = "always"
    loss_bound: float = math.inf
    fast: bool = False
    short_epochs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, made in (("model", self.model), ("loss", self.loss)):
            if isinstance(made, nn.Module):
                raise TypeError(
                    f"{name} must be a function that makes one, because each run needs its own; got a "
                    f"{type(made).__name__}"
                )
        if isinstance(self.optimizer, Optimizer) or _is_optimizer(self.optimizer):
            raise TypeError(
                "optimizer is a function of (model, run): partial(on_parameters, kind=torch.optim.SGD, lr=0.1), see "
                "`kfac` and `gadam` too"
            )
        if self.epochs < 1 or self.batch_size < 1 or (self.short_epochs is not None and self.short_epochs < 1):
            raise ValueError(
                f"epochs, batch_size and short_epochs must be at least 1, got {self.epochs}, {self.batch_size} and "
                f"{self.short_epochs}"
            )
        if not self.loss_bound > 0:
            raise ValueError(f"loss_bound must be positive, got {self.loss_bound}")
        for name, kinds in (("schedule_by", Unit), ("training_mode", Mode)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}")
        if self.fast and (self.penalty is not None or _is_hooked(self.optimizer)):
            raise ValueError("fast is for plain training: neither a penalty nor KFAC goes with compiled passes")
        if self.damping is None and (self.streaming or self.training_mode == "until_refresh"):
            raise ValueError("streaming and training_mode='until_refresh' are for a damping that learns: there is none")

    def run(self, num_samples: int) -> Run:
        """The run on so many training samples."""
        if self.drop_last and num_samples < self.batch_size:
            raise ValueError(f"{num_samples} samples do not fill one batch of {self.batch_size}, and drop_last is set")
        steps = num_samples // self.batch_size if self.drop_last else math.ceil(num_samples / self.batch_size)
        return Run(seed=self.seed, epochs=self.epochs, steps_per_epoch=steps)


def _is_optimizer(made: Any) -> bool:
    """Whether an optimiser of torch was given as it is, which takes parameters and not a model."""
    kind = made.func if isinstance(made, partial) else made
    return isinstance(kind, type) and issubclass(kind, Optimizer)


def _is_hooked(made: Any) -> bool:
    """Whether it makes an optimiser that looks into the passes."""
    while isinstance(made, partial):
        made = made.func
    return made is kfac


def scaled(recipe: Recipe, budget: Budget) -> Recipe:
    """The recipe at a budget: fewer epochs, and all that is told in shares of them (schedule, averaging) with them.

    Intervals in steps, such as those of KFAC and AutoDamping, stay as they are.

    Args:
        recipe: As published.
        budget: "paper" as it is, "short" for minutes, "smoke" for two epochs at most.

    Example:
        >>> recipe = Recipe(name="", model=nn.Identity, optimizer=kfac, epochs=300, short_epochs=40)
        >>> [scaled(recipe, budget).epochs for budget in ("smoke", "short", "paper")]
        [2, 40, 300]
    """
    if budget not in get_args(Budget):
        raise ValueError(f"budget must be one of {', '.join(get_args(Budget))}, got {budget!r}")
    short = recipe.short_epochs or math.ceil(SHORT_SHARE * recipe.epochs)
    epochs = {"smoke": SMOKE_EPOCHS, "short": short, "paper": recipe.epochs}[budget]
    return replace(recipe, epochs=min(epochs, recipe.epochs))


def trained_in(recipe: Recipe) -> dict[str, str]:
    """What the row of a run says of a recipe that is `fast`; nothing of others.

    Example:
        >>> made = Recipe(name="", model=nn.Identity, optimizer=on_parameters, epochs=1, fast=True)
        >>> trained_in(made), trained_in(replace(made, fast=False))
        ({'trained_in': 'bfloat16'}, {})
    """
    return {"trained_in": "bfloat16"} if recipe.fast else {}


# ------------------------------------------------------------------------------------------------- factories


def on_parameters(model: nn.Module, run: Run, *, kind: Callable[..., Optimizer], **settings: Any) -> Optimizer:
    """An optimiser that takes parameters, as those of torch do.

    Example:
        >>> make = partial(on_parameters, kind=torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> make(nn.Linear(2, 1), Run(0, 1, 1)).param_groups[0]["momentum"]
        0.9
    """
    return kind(model.parameters(), **settings)


def kfac(model: nn.Module, run: Run, **settings: Any) -> KFAC:
    """`ritz.optim.KFAC`, with the seed of the run.

    Example:
        >>> partial(kfac, lr=1e-3, damping=0.1)(nn.Linear(2, 1), Run(0, 1, 1)).param_groups[0]["damping"]
        0.1
    """
    return KFAC(model, **{"seed": run.seed, **settings})


def gadam(
    model: nn.Module, run: Run, *, start: float = 161 / 300, kind: Callable[..., Gadam] = Gadam, **settings: Any
) -> Gadam:
    """`ritz.optim.Gadam` or GadamX, averaging once an epoch after a share `start` of the epochs.

    Example:
        >>> gadam(nn.Linear(2, 1), Run(seed=0, epochs=300, steps_per_epoch=10)).average.start
        1610
    """
    each = run.steps_per_epoch
    return kind(model.parameters(), start=round(start * run.epochs) * each, every=each, model=model, **settings)


def auto_damping(
    optimizer: Optimizer, risk: Risk, run: Run, *, preset: str = "recommended", **settings: Any
) -> AutoDamping:
    """`ritz.optim.AutoDamping` by one of its presets, with the seed of the run.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> risk = Risk(model, nn.MSELoss(), (torch.rand(1024, 1), torch.rand(1024, 1)))
        >>> make = partial(auto_damping, preset="published_code", every=10)
        >>> make(torch.optim.Adam(model.parameters()), risk, Run(0, 1, 1)).num_batches
        8
    """
    return AutoDamping.preset(preset, optimizer, risk, **{"seed": run.seed, **settings})


def trace_penalty(run: Run, *, eta: float, **settings: Any) -> TracePenalty:
    """`ritz.optim.TracePenalty`, with the seed of the run.

    Example:
        >>> trace_penalty(Run(seed=3, epochs=1, steps_per_epoch=1), eta=1e-4).seed
        3
    """
    return TracePenalty(eta, **{"seed": run.seed, **settings})


# ----------------------------------------------------------------------------------------------- fingerprints


def fingerprint(recipe: Recipe) -> str:
    """A short mark of all that a recipe says; functions and classes count by name.

    Raises:
        TypeError: If there is something in it that has no name of its own, such as a lambda.

    Example:
        >>> make = partial(on_parameters, kind=torch.optim.SGD, lr=0.1)
        >>> first = Recipe(name="", model=nn.Identity, optimizer=make, epochs=1)
        >>> fingerprint(first) == fingerprint(replace(first, optimizer=partial(make, lr=0.1)))
        True
        >>> fingerprint(first) == fingerprint(replace(first, optimizer=partial(make, lr=0.2)))
        False
    """
    text = json.dumps(describe(recipe), sort_keys=True)
    return hashlib.blake2b(text.encode("utf8"), digest_size=16).hexdigest()


def describe(value: Any, where: str = "recipe") -> Any:
    """A recipe, or a part of one, as plain JSON.

    Example:
        >>> describe(partial(nn.Linear, 2, bias=False))
        {'call': 'torch.nn.modules.linear.Linear', 'args': [2], 'keywords': {'bias': False}}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, tuple | list):
        return [describe(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(key): describe(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, partial):
        own = {"args": describe(value.args, where), "keywords": describe(value.keywords, where)}
        return {"call": describe(value.func, where), **own}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: describe(getattr(value, f.name), f"{where}.{f.name}") for f in fields(value)}
        return {"type": _named(type(value), where), **parts}
    return _named(value, where)


def _named(value: Any, where: str) -> str:
    """Where a function or a class lives."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    owner = getattr(value, "__self__", None)
    if isinstance(owner, type) and not isinstance(value, type):  # a class method, which subclasses share by name
        return f"{_named(owner, where)}.{value.__name__}"
    bound = owner is not None and not isinstance(owner, ModuleType)  # a method says nothing of its object's settings
    if not callable(value) or not module or not name or "<" in name or bound:
        kind = name or type(value).__name__
        raise TypeError(
            f"{where} has {kind}, which has no name to know it by when a run is resumed: use a function or a class at "
            "the top of a module, a functools.partial of one, or a dataclass"
        )
    return f"{module}.{name}"
