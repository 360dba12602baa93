"""A training run under way: its steps, its evaluations, and how it is kept and resumed."""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batches import isolated_rng
from ..errors import NonFiniteError
from ..loggers import Fanout, JSONLines, LoggerLike, Memory, read
from ..optim import AutoDamping, IterateAverage, TrainingLog
from ..plan import Plan
from ..reading import damaged
from ..risk import Risk
from ..space import random_bits, random_permutation
from ..switches import timed_convolutions
from .checkpoints import ELSEWHERE, Folder
from .recipe import Averaging, Recipe

Data = tuple[Tensor, Tensor]
Progress = Callable[[int, int], None]  # (steps done, steps in all)
Measure = Callable[[nn.Module, int], Mapping[str, float]]

FINISHED = "finished"


@dataclass(frozen=True, eq=False, kw_only=True)
class Training:
    """A run that has come to its end.

    Attributes:
        model: At the last weights, in evaluation mode.
        average: A copy at the average of the iterates with statistics of its own; None where nothing was averaged.
        along: Copies of the model after the epochs in `stops`, by the steps made until then, in evaluation mode.
        history: All that was logged, see `train`.
        optimizer, damping: As they are at the end; the damping is None where there is none.
        steps: How many were made.
        seconds: What the steps took, evaluation left out.
        stop: "finished", or "diverged: " and why.
    """

    model: nn.Module
    average: nn.Module | None
    along: Mapping[int, nn.Module]
    history: Memory
    optimizer: Optimizer
    damping: Any
    steps: int
    seconds: float
    stop: str

    @property
    def diverged(self) -> bool:
        """Whether the run was given up."""
        return self.stop != FINISHED


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is looked at along a run; nothing of it changes the weights."""

    log_every: int
    details_every: int | None
    evaluate_every: int
    checkpoint_every: int
    stops: tuple[int, ...]
    train_subset: int | None
    eval_batch: int
    measure: Measure | None
    progress: Progress | None


def initial(recipe: Recipe, device: torch.device | str = "cpu") -> nn.Module:
    """The network before training, for measures of the distance that it goes.

    Example:
        >>> from functools import partial
        >>> from ritz.papers.recipe import on_parameters
        >>> recipe = Recipe(name="", model=partial(nn.Linear, 2, 1), optimizer=on_parameters, epochs=1)
        >>> bool((initial(recipe).weight == initial(recipe).weight).all())
        True
    """
    with isolated_rng(recipe.seed):
        return recipe.model().to(device)


def batch_order(num: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
    """The order in which samples come in an epoch, the same on every device.

    Example:
        >>> batch_order(5, seed=0, epoch=0).sort().values.tolist()
        [0, 1, 2, 3, 4]
    """
    return random_permutation(num, ("batches", seed, epoch), device)


@torch.no_grad()
def evaluate(model: nn.Module, criterion: nn.Module, data: Data, batch_size: int = 1000) -> dict[str, float]:
    """Mean loss in evaluation mode, and accuracy where targets are classes; classes are dimension 1 of the outputs.

    The modules are left in the modes that they were in.

    Example:
        >>> model = nn.Linear(1, 2).requires_grad_(False)
        >>> _ = model.weight.copy_(torch.tensor([[1.0], [-1.0]])), model.bias.zero_()
        >>> evaluate(model, nn.CrossEntropyLoss(), (torch.tensor([[0.0], [3.0]]), torch.tensor([0, 1])))
        {'loss': 3.3478, 'accuracy': 0.5}
    """
    with _evaluating(model):
        outputs = torch.cat([model(x) for x in data[0].split(batch_size)])
    found = {"loss": float(criterion(outputs, data[1])), "accuracy": float(_accuracy(outputs, data[1]))}
    return {name: value for name, value in found.items() if name == "loss" or not math.isnan(value)}


def _forward(model: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model(x)
    return outputs, criterion(outputs, y)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and every module in its own afterwards: some may be frozen in it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


# -------------------------------------------------------------------------------------------------- the loop


class Loop:
    """A run under way."""

    def __init__(
        self,
        recipe: Recipe,
        data: Mapping[str, Data],
        options: Options,
        folder: str | os.PathLike[str] | None,
        logger: LoggerLike | None,
    ) -> None:
        self.recipe, self.data, self.options = recipe, data, options
        self.course = recipe.run(len(data["train"][0]))
        self.device = data["train"][0].device
        self.model = initial(recipe, self.device)
        self.criterion = recipe.loss()
        self.compiled = torch.compile(_forward, dynamic=False) if recipe.fast else _forward
        self.optimizer = recipe.optimizer(self.model, self.course)
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]
        span = self.course.epochs if recipe.schedule_by == "epoch" else self.course.num_steps
        self.factor = None if recipe.schedule is None else recipe.schedule(span)
        self.penalty = None if recipe.penalty is None else recipe.penalty(self.course)
        self.damping = self._make_damping()
        self.average = self._make_average(recipe.averaging)
        self.epoch, self.step, self.seconds, self.stop = 0, 0, 0.0, ""
        self.along: dict[int, nn.Module] = {}
        self.window: list[tuple[Tensor, Tensor, Tensor]] = []  # loss, penalty, accuracy of steps not yet logged
        self.history = Memory()
        self.folder = None if folder is None else Folder(folder, recipe, data)
        self._resume()
        files = [] if self.folder is None else [JSONLines(self.folder.log)]
        self.logger = Fanout(self.history, *files, *([] if logger is None else [logger]))
        self.details = self._make_details()

    def _make_damping(self) -> Any:
        if self.recipe.damping is None:
            return None
        plan = Plan(route="reverse")  # not the fastest that was found, which may be another the next time
        risk = Risk(self.model, self.criterion, self.data["train"], plan=plan)
        return self.recipe.damping(self.optimizer, risk, self.course)

    def _make_average(self, averaging: Averaging | None) -> IterateAverage | None:
        average: IterateAverage | None = getattr(self.optimizer, "average", None)
        if averaging is not None:
            if average is not None:
                raise ValueError(f"{type(self.optimizer).__name__} averages its iterates itself: leave averaging out")
            start: int | Literal["auto"] = "auto"
            if averaging.start != "auto":
                start = round(averaging.start * self.course.epochs)
            average = IterateAverage(self.model, start, averaging.every, patience=averaging.patience)
        if average is not None and average.start is None and "val" not in self.data:
            raise ValueError(f"start='auto' of averaging needs data['val'], got {', '.join(self.data)}")
        if average is not None and average.start is None and self.data["val"][1].is_floating_point():
            raise ValueError("start='auto' of averaging needs accuracy, but the targets of data['val'] are no classes")
        return average

    def _make_details(self) -> TrainingLog | None:
        if self.options.details_every is None:
            return None
        damping = self.damping if isinstance(self.damping, AutoDamping) else None
        log = TrainingLog(self.optimizer, self.logger, damping=damping, every=self.options.details_every)
        log.count = self.step
        return log

    # ------------------------------------------------------------------------------------------ along the run

    def run(self) -> Training:
        """All epochs that are left."""
        while not self.stop and self.epoch < self.course.epochs:
            key = int(random_bits(1, ("epoch", self.recipe.seed, self.epoch)))
            with isolated_rng(key, self.device), timed_convolutions(self.recipe.fast):
                self._train_epoch()
                self.epoch += 1
                if not self.stop:
                    self._close_epoch()
            if not self.stop and self.epoch in self.options.stops:
                self.along[self.step] = self._at(self.model.state_dict())
            if self.stop or self._due(self.options.checkpoint_every):
                self._keep()
        averaged = self.average is not None and self.average.num_averaged and not self.stop
        return Training(
            model=self.model.eval(),
            average=self.average.model if averaged and self.average is not None else None,
            along=self.along,
            history=self.history,
            optimizer=self.optimizer,
            damping=self.damping,
            steps=self.step,
            seconds=self.seconds,
            stop=self.stop or FINISHED,
        )

    def _at(self, weights: Mapping[str, Any]) -> nn.Module:
        """A network of its own, without what an optimiser hooks to the one that is trained."""
        model = initial(self.recipe, self.device)
        model.load_state_dict(weights)
        return model.eval()

    def _due(self, every: int) -> bool:
        return self.epoch % every == 0 or self.epoch == self.course.epochs

    def _train_epoch(self) -> None:
        """One pass over the training data."""
        start = self._clock()
        for x, y in self._batches():
            trouble = ""
            try:
                self._train_step(x, y)
            except NonFiniteError as error:
                trouble = str(error)
            self.step += 1
            if trouble or self.step % self.options.log_every == 0:
                self._flush()
            if trouble:
                self._give_up(trouble)
            if self.stop:
                break
            if self.options.progress is not None:
                self.options.progress(self.step, self.course.num_steps)
        self._flush()
        self.seconds += self._clock() - start

    def _batches(self) -> Iterator[Data]:
        """The batches of this epoch, augmented."""
        X, y = self.data["train"]
        seed, epoch = self.recipe.seed, self.epoch
        order = batch_order(len(X), seed, epoch, self.device)
        for number, rows in enumerate(order.split(self.recipe.batch_size)[: self.course.steps_per_epoch]):
            x = X[rows]
            yield x if self.recipe.augment is None else self.recipe.augment(x, (seed, epoch, number)), y[rows]

    def _train_step(self, x: Tensor, y: Tensor) -> None:
        self._set_mode()
        self._set_rates()
        self.optimizer.zero_grad()
        whole = len(x) == self.recipe.batch_size  # another size would be compiled for itself
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.fast):
            outputs, loss = (self.compiled if whole else _forward)(self.model, self.criterion, x, y)
        penalty = torch.zeros_like(loss) if self.penalty is None else self.penalty(self.model, x, y)
        (loss if self.penalty is None else loss + penalty).backward()
        self.window.append((loss.detach(), penalty.detach(), _accuracy(outputs.detach(), y)))
        self.optimizer.step()
        if self.damping is not None:
            self.damping.step(*([(x, y)] if self.recipe.streaming else []))
        if self.details is not None:
            self.details.step()

    def _set_mode(self) -> None:
        """Training mode as the recipe has it; evaluations leave the mode as it was."""
        mode = self.recipe.training_mode
        wanted = mode == "always" or (mode == "until_refresh" and not self.damping.history)
        if self.model.training != wanted:
            self.model.train(wanted)

    def _set_rates(self) -> None:
        """What LambdaLR does, but by a function of where the run is: there is no state to keep."""
        if self.factor is not None:
            factor = self.factor(self.epoch if self.recipe.schedule_by == "epoch" else self.step)
            for group, rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
                group["lr"] = rate * factor

    # ------------------------------------------------------------------------------------- what is looked at

    def _flush(self) -> None:
        """The steps since the last row as one row, and whether any of them was lost."""
        if not self.window:
            return
        values = torch.stack([part for row in self.window for part in row]).double().cpu().view(-1, 3)
        self.window = []
        loss, penalty, accuracy = values.mean(0).tolist()
        row = {"loss": loss}
        row |= {} if math.isnan(accuracy) else {"accuracy": accuracy}
        row |= {} if self.penalty is None else {"penalty": penalty}
        group = self.optimizer.param_groups[0]
        row["lr"] = float(group["lr"])
        row |= {} if self.damping is None else {"damping": float(group[self.damping.key])}
        self.logger.log(row, self.step)
        total = values[:, 0] + values[:, 1]
        lost = (~(total < self.recipe.loss_bound)).nonzero().flatten().tolist()
        if lost:
            number = self.step - len(total) + lost[0] + 1
            self._give_up(f"the loss of step {number} is {float(total[lost[0]]):g}")

    def _give_up(self, why: str) -> None:
        if not self.stop:
            self.stop = f"diverged: {why}"
            self.logger.log({"diverged": 1.0}, self.step)

    def _close_epoch(self) -> None:
        """Average, evaluate, log."""
        row = {"epoch": float(self.epoch), "seconds": self.seconds}
        try:
            if self.average is not None and self.recipe.averaging is not None:
                self.average.step()
        except NonFiniteError as error:
            self._give_up(str(error))
            return
        undecided = self.average is not None and self.average.start is None
        if self._due(self.options.evaluate_every) or undecided:
            row |= self._evaluations("", self.model)
            if self.average is not None and undecided:
                self.average.observe(row["val/accuracy"])
            if self.average is not None and self.average.num_averaged:
                self.average.refresh(self.data["train"])
                row |= self._evaluations("average/", self.average.model)
            if self.options.measure is not None:
                with _evaluating(self.model):
                    row |= self.options.measure(self.model, self.epoch)
        self.logger.log(row, self.step)

    def _evaluations(self, prefix: str, model: nn.Module) -> dict[str, float]:
        row: dict[str, float] = {}
        for name, data in self.data.items():
            part = self._subset(data) if name == "train" else data
            found = evaluate(model, self.criterion, part, self.options.eval_batch)
            row |= {f"{prefix}{name}/{key}": value for key, value in found.items()}
        return row

    def _subset(self, data: Data) -> Data:
        """The training samples that are evaluated on, the same ones each time."""
        num = self.options.train_subset
        if num is None or num >= len(data[0]):
            return data
        rows = random_permutation(len(data[0]), ("subset", self.recipe.seed), self.device)[:num]
        return data[0][rows], data[1][rows]

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    # ------------------------------------------------------------------------------------------ keep and resume

    def _parts(self) -> dict[str, Any]:
        """What has a state of its own. An average that belongs to the optimiser is kept with it."""
        own = self.average if self.recipe.averaging is not None else None
        parts = {"optimizer": self.optimizer, "penalty": self.penalty, "damping": self.damping, "average": own}
        return {name: part for name, part in parts.items() if part is not None}

    def _keep(self) -> None:
        if self.folder is None:
            return
        state: dict[str, Any] = {"epoch": self.epoch, "step": self.step, "seconds": self.seconds, "stop": self.stop}
        state |= {"log_bytes": self.folder.log.stat().st_size, "model": self.model.state_dict()}
        state["along"] = {str(step): model.state_dict() for step, model in self.along.items()}
        self.folder.keep(self.epoch, state | {name: part.state_dict() for name, part in self._parts().items()})

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        if self.folder is None:
            return
        state = self.folder.newest() or {"epoch": 0, "log_bytes": 0}
        if state["epoch"]:
            self._restore(state, self.folder)
        self.folder.begin(state["epoch"], state["log_bytes"], _machine(self.device))
        if not state["epoch"]:
            return
        self.history.rows += read(self.folder.log).rows if self.folder.log.exists() else []

    def _restore(self, state: Mapping[str, Any], folder: Folder) -> None:
        """Everything as it was kept; nothing in the folder is changed before all of it fits."""
        self.epoch, self.step, self.seconds, self.stop = (state[k] for k in ("epoch", "step", "seconds", "stop"))
        try:
            self.model.load_state_dict(state["model"])
            for name, part in self._parts().items():
                part.load_state_dict(state[name])
            for step, weights in state.get("along", {}).items():
                self.along[int(step)] = self._at(weights)
        except Exception as error:  # of whoever has a state: torch, an optimiser, a damping rule
            damaged(folder.path, error, ELSEWHERE)
        done = self.epoch - bool(self.stop)  # a run that was given up has not ended its last epoch
        for epoch in self.options.stops:
            if epoch <= done and epoch * self.course.steps_per_epoch not in self.along:
                raise ValueError(f"{folder.path} is past epoch {epoch} and has kept no copy of it: {ELSEWHERE}")


def _accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """The share of items whose class is right, on the device; NaN where targets are not classes."""
    if y.is_floating_point() or outputs.ndim != y.ndim + 1:
        return torch.full((), math.nan, dtype=torch.float64, device=y.device)
    return (outputs.argmax(1) == y).double().mean()


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
