"""VGG-16 on CIFAR-100 with flat and learned damping: tables 1 and 2 and figures 9 and 11 to 15 of seed 004.

The paper trains VGG-16 without normalisation, batches of 128, no weight decay, momentum 0.9, the rate of equation 12 or
16, 300 epochs (the code published with it has 100 for KFAC, and so have we; "SGD on 3x as many" in section 7.2 agrees),
once each but for table 2 (5 seeds). Here every setting is an `Arm`,
every item of the paper a `Study` of arms, and all are trained by one loop on the same starts, batches and crops at
equal seed, so that differences are taken seed by seed. Runs are on the first 45,000 training images, as in the code
published with the paper; the last 5,000 (its "validation") and the 10,000 test images are both evaluated, and what is
compared is the accuracy on the test images, which are twice as many; the numbers of table 1 are of validation images.

Short budget: epochs shrink from 300 and 100 to 15 and 6, in which KFAC takes about as long as SGD, and rates fall by
steps, since a tenth of six epochs is no whole one. Table 2, which has no KFAC, has 50. Where arms are many SGD and Adam
have fewer, 8 in table 1 and 6 in figure 14; figure 9, whose network has BatchNorm, has 5: three seeds say more than
longer runs of two. Runs are begun seed by seed, all arms of the first one first; what has not begun by `Setting.until`
is left out, and claims are judged on the seeds that both of their arms have. KFAC renews eigenvectors by
`refresh="qr"`, which trained VGG-16 as full decompositions did (docs/refresh.md). At smoke the network has a 32nd of
the channels, and all intervals are shorter.

Which KFAC. In the published code averages start from the identity, steps are clipped at kl_clip 0.01, factors come
every 10 steps and eigenvectors every 100 (here, within the first hundred, more often). Learned damping comes with the
empirical Fisher matrix, without dropout from the first refresh on, and with rates times 1 + delta; flat damping with
drawn labels, with dropout, and with rates as they are. So what the paper compares differs in three things besides the
damping. `Arm(code=True)` is all of that. What is left of the identity is damping of its own for about 2,000 steps, most
of a short run. All other arms take debiased averages, kl_clip 0.001 (without it a debiased start loses runs:
docs/convergence.md), drawn labels and rates as they are, whether the damping is flat or learned: they differ in damping
and dropout alone. Without dropout a learned run has none from the first refresh on, as published, and a flat one never;
so that these differ in damping alone, `Arm(never=True)` is a learned run that never has it.

The learned damping is `AutoDamping.preset("published_code")`, 8 batches of the same 1,024 images every 100 steps, by
the estimate that was meant and not the one that is printed. Where flat damping at its start value is beside a learned
run, so is flat damping at its mean over steps and seeds, lost runs left out, rounded to two digits: those are trained
when the learned ones have ended. Figure 12 is four studies, so that each fits a short job: learned from 0.03; the same
with all arms without dropout; learned from 0.01; and all as published.

Not in the paper, and chosen here: the rates of table 2, for Adam the largest that trains with its default eps (section
6.3) and for Adam-D that of the same damping in table 1; Adam's default eps, 1e-8 as in the text where table 1 prints
1e-7; figure 9's damping; r = 0.01 in equation 16, as in the text, where the code has 0.1; and the grid of rates in
section 8, by factors of about 3.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from ..models import vgg16, vgg16_bn
from ..operators.hessian import Hessian
from ..optim import linear_decay, ramp_decay
from ..plan import Plan
from ..risk import Risk
from .cifar_spectra import built, load_data
from .data import DATASETS, augment
from .experiment import Progress, Rows, Setting, short
from .loop import Data, Training
from .pool import Finished, train_all
from .recipe import Mode, Recipe, auto_damping, kfac, on_parameters, trained_in
from .stability_noise import top_ritz_value

Method = Literal["SGD", "Adam", "AdamW", "KFAC"]
Epochs = tuple[int, int, int]  # at smoke, short and paper

LONG, THIRD, FADED = (1, 15, 300), (1, 6, 100), (1, 12, 100)  # the last: so that the identity has left the averages
BRIEF, RAMPED, NORMED = (1, 8, 300), (1, 6, 300), (1, 5, 300)  # table 1, figure 14, and figure 9 with BatchNorm
SIXTH = (1, 50, 300)  # table 2 and figure 2: in 15, SGD has hardly left chance
NORM = DATASETS["CIFAR100"].norm("vgg16")
GUESS = math.log(100)  # the loss of a network that knows nothing
LOST = 10 * GUESS  # a batch of this loss ends the run
CHANCE = 1.0  # per cent
DEAD = 1e-6  # outputs of a network that does not look at its images are apart by less
SMOKE_WIDTH = 1 / 32
MOST_POINTS = 100  # of a curve of dampings


@dataclass(frozen=True)
class Arm:
    """One setting of the paper, or a control of one.

    Attributes:
        method: AdamW is for the network with BatchNorm, figure 9; the others have none.
        lr: alpha.
        damping: delta, flat or to start from: Adam's eps, KFAC's damping.
        learned: Whether it learns.
        dropout: Whether there is dropout in training.
        never: Without dropout: that a learned run has none before its first refresh either.
        code: Whether KFAC, and what comes with learned damping, is as in the published code: see above.
        ramp: The rate of equation 16 in place of equation 12.
        weight_decay: Of AdamW.
        epochs: At each budget.

    Example:
        >>> Arm("KFAC", 1e-3, 0.03, learned=True, dropout=False).label
        'KFAC 0.001, learned from 0.03, no dropout'
    """

    method: Method
    lr: float
    damping: float = 0.0
    learned: bool = False
    dropout: bool = True
    never: bool = False
    code: bool = False
    ramp: bool = False
    weight_decay: float = 0.0
    epochs: Epochs = LONG

    @property
    def label(self) -> str:
        """What the arm is, in words; the key of its rows."""
        parts = [f"{self.method} {self.lr:g}"]
        if self.method != "SGD":
            parts.append(f"{'learned from' if self.learned else 'flat'} {self.damping:g}")
        notes = {
            "decay " + format(self.weight_decay, "g"): self.weight_decay > 0,
            "ramp": self.ramp,
            "no dropout": not self.dropout,
            "not even before the first refresh": self.never,
            "as published": self.code,
            "as long as KFAC": self.method == "SGD" and self.epochs == THIRD,
        }
        return ", ".join([*parts, *(note for note, there in notes.items() if there)])

    @property
    def mode(self) -> Mode:
        """When the network is in training mode."""
        if self.dropout:
            return "always"
        return "until_refresh" if self.learned and not self.never else "never"

    def at(self, damping: float) -> "Arm":
        """The same with flat damping.

        Example:
            >>> Arm("KFAC", 1e-3, 0.03, learned=True).at(0.05).label
            'KFAC 0.001, flat 0.05'
        """
        return replace(self, learned=False, never=False, damping=damping)


@dataclass(frozen=True)
class Study:
    """An item of the paper.

    Attributes:
        arms: What is trained, the most telling first.
        seeds: How many, at each budget.
        images: How many of the training images the Hessian is of, at each budget; none where it is not asked for.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, int, int] = (2, 3, 3)
    images: tuple[int, int, int] = (0, 0, 0)


def _kfac(damping: float, lr: float = 1e-3, **settings: Any) -> Arm:
    return Arm("KFAC", lr, damping, **{"epochs": THIRD, **settings})


SGD, ADAM, ADAM_D = Arm("SGD", 0.01), Arm("Adam", 4e-4, 1e-8), Arm("Adam", 1e-3, 5e-3)
SGD_THIRD = replace(SGD, epochs=THIRD)
TABLE2 = tuple(replace(arm, epochs=SIXTH) for arm in (SGD, ADAM_D, ADAM))
TABLE1 = {  # (lambda_1, accuracy) as printed
    Arm("Adam", 4e-4, 1e-7): (53.1, 62.9),
    Arm("Adam", 4e-4, 4e-4): (21.1, 64.5),
    Arm("Adam", 4e-4, 1e-3): (9.9, 63.5),
    Arm("Adam", 1e-3, 1e-3): (20.8, 64.4),
    ADAM_D: (9.1, 66.2),
    Arm("Adam", 1e-3, 8e-3): (2.4, 65.8),
    _kfac(0.1, 0.1): (6.7, 65.0),  # as the table has it
    _kfac(0.1, 0.01): (6.7, 65.0),  # as the text has it: delta / alpha is constant
    _kfac(1e-2, 1e-3): (20.8, 64.8),
    _kfac(1e-3, 1e-4): (48.2, 62.2),
    _kfac(3e-4, 1e-4): (527.2, 60.2),
    _kfac(1e-4, 1e-4): (711.3, 56.0),
}
LOW = (1e-4, 3e-4, 1e-3)  # alpha, 3 alpha and 10 alpha in figure 11
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
RAMP = Arm("Adam", 1e-4, 1e-4, ramp=True)
RAMP_LEARNED = replace(RAMP, learned=True, code=True)
SMALL_EPS, LARGE_EPS, DECAYS = 1e-8, 1e-3, (0.0, 0.25)
_TRIED: Epochs = (1, 2, 300)

STUDIES: dict[str, Study] = {
    "table2": Study(TABLE2, seeds=(2, 3, 5)),
    "figure12": Study((
        _kfac(0.03, learned=True), _kfac(0.03, learned=True, dropout=False), _kfac(0.1), _kfac(0.03), SGD_THIRD, SGD,
    )),
    "figure12-dropout": Study((
        _kfac(0.03, learned=True, dropout=False, never=True), _kfac(0.03, learned=True, dropout=False),
        _kfac(0.03, dropout=False),
    ), seeds=(2, 4, 4)),
    "figure12-low": Study((
        _kfac(0.01, learned=True), _kfac(0.01), _kfac(0.01, learned=True, dropout=False), _kfac(0.01, dropout=False),
    )),
    "figure12-code": Study((
        _kfac(0.03, learned=True, dropout=False, code=True, epochs=FADED), _kfac(0.1, code=True, epochs=FADED),
        _kfac(0.03, code=True, epochs=FADED), _kfac(0.03, learned=True, code=True, epochs=FADED), SGD,
    )),
    "table1": Study(
        tuple(replace(arm, epochs=BRIEF) if arm.method == "Adam" else arm for arm in TABLE1),
        images=(8, 640, 45_000),
    ),
    "figure11": Study((
        *(_kfac(start, 1e-4, learned=True) for start in LOW), *(_kfac(flat, 1e-4) for flat in (*LOW, 0.01, 0.1)),
    )),
    "figure13": Study((
        _kfac(1e-4, 1e-4, learned=True), _kfac(0.03, 1e-4, learned=True), _kfac(0.03, 1e-4), _kfac(0.1, 1e-4),
    )),
    "figure14": Study(tuple(replace(arm, epochs=RAMPED) for arm in (
        RAMP_LEARNED, RAMP, SGD, replace(RAMP_LEARNED, dropout=False), replace(RAMP_LEARNED, ramp=False), ADAM, ADAM_D,
        replace(RAMP, ramp=False),
    ))),
    "figure9": Study(tuple(
        Arm("AdamW", 1e-3, eps, weight_decay=decay, epochs=NORMED)
        for decay in DECAYS for eps in (SMALL_EPS, LARGE_EPS)
    )),
    "stable": Study(tuple(
        Arm(method, rate, 1.0 if method != "SGD" else 0.0, epochs=_TRIED)
        for method in ("SGD", "Adam", "KFAC") for rate in RATES
    )),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- recipes


def recipe(arm: Arm, seed: int, setting: Setting) -> Recipe:
    """How an arm is trained at a budget.

    Example:
        >>> made = recipe(SGD, seed=3, setting=Setting("short"))
        >>> made.epochs, made.batch_size, made.schedule_by, made.training_mode
        (15, 128, 'step', 'always')
    """
    fast = setting.fast and arm.method != "KFAC"
    network: Callable[..., nn.Module] = vgg16_bn if arm.method == "AdamW" else vgg16
    network = partial(built, network) if fast else network
    interval, batch = setting.pick(1, 100, 100), setting.pick(4, 128, 128)
    learner = partial(auto_damping, preset="published_code", every=interval, batch_size=batch, compensate_lr=arm.code)
    if setting.budget == "smoke":
        learner = partial(learner, num_batches=2)
    return Recipe(
        name=arm.label,
        model=partial(network, width=SMOKE_WIDTH) if setting.budget == "smoke" else network,
        optimizer=_optimizer(arm, setting),
        epochs=setting.pick(*arm.epochs),
        batch_size=setting.pick(8, 128, 128),
        schedule=ramp_decay if arm.ramp else linear_decay,
        schedule_by="epoch" if setting.budget == "paper" else "step",
        augment=partial(augment, norm=NORM),
        damping=learner if arm.learned else None,
        training_mode=arm.mode,
        loss_bound=LOST,
        fast=fast,
        seed=seed,
    )


def _optimizer(arm: Arm, setting: Setting) -> Callable[..., Optimizer]:
    """What makes the optimiser of an arm."""
    step = partial(on_parameters, fused=True) if setting.fast else on_parameters
    if arm.method == "SGD":
        return partial(step, kind=torch.optim.SGD, lr=arm.lr, momentum=0.9)
    if arm.method == "Adam":
        return partial(step, kind=Adam, lr=arm.lr, eps=arm.damping)
    if arm.method == "AdamW":
        return partial(step, kind=AdamW, lr=arm.lr, eps=arm.damping, weight_decay=arm.weight_decay)
    return partial(
        kfac,
        lr=arm.lr,
        damping=arm.damping,
        start="identity" if arm.code else "debiased",
        kl_clip=1e-2 if arm.code else 1e-3,
        fisher="empirical" if arm.code and arm.learned else "mc",
        factor_every=setting.pick(1, 10, 10),
        inverse_every=setting.pick(2, 100, 100),
        refresh="eigh" if setting.budget == "paper" else "qr",
    )


# ---------------------------------------------------------------------------------------------------- runs


def study(item: str, setting: Setting, progress: Progress) -> Rows:
    """Train all arms of an item, then those that follow from what was learned; one row for each run begun in time.

    Runs are shared between items: in one `setting.runs` folder SGD is trained once for table 2 and figure 12.

    Raises:
        ValueError: If there is no such item.
    """
    if item not in STUDIES:
        raise ValueError(f"there is no item {item!r}; there are {', '.join(STUDIES)}")
    plan, data = STUDIES[item], load_data("vgg16", setting)
    seeds = setting.seed_range(*plan.seeds)
    measured = partial(finish, images=setting.pick(*plan.images), num_steps=setting.pick(2, 12, 100))

    def trained(arms: Iterable[Arm]) -> Rows:
        each = {_folder(arm, seed, setting): (arm, recipe(arm, seed, setting)) for seed in seeds for arm in arms}
        least = min((made.epochs for _, made in each.values()), default=0)
        done = train_all(
            {name: made for name, (_, made) in each.items()}, data, setting, item=f"damping-cifar-{setting.budget}",
            finish=measured, progress=progress, cut=True, checkpoint_every=setting.pick(1, 1000, 10),
            evaluate_every=max(1, least // 10), train_subset=5000,
        )  # fmt: skip
        return [plain(each[name][0], run) | trained_in(each[name][1]) for name, run in done.items()]

    rows = trained(plan.arms)
    if item.startswith("figure12"):
        rows += trained(_controls(plan.arms, rows))
    return rows


def _folder(arm: Arm, seed: int, setting: Setting) -> str:
    return f"{re.sub('[^a-z0-9.]+', '-', arm.label.lower())}-{setting.pick(*arm.epochs)}-epochs-{seed}"


def _controls(arms: Sequence[Arm], rows: Rows) -> list[Arm]:
    """Flat arms at the means of those learned ones that have their start beside them; the rows are told the value.

    Not for those as published, which have more than their damping apart from flat ones.
    """
    there = {arm.label for arm in arms}
    found = {}
    for arm in arms:
        if arm.learned and not arm.code and arm.at(arm.damping).label in there:
            own = [row for row in rows if row["arm"] == arm.label]
            means = [row["mean_damping"] for row in own if row["state"] != "lost"] or [arm.damping]
            flat = arm.at(float(f"{sum(means) / len(means):.2g}"))
            found[flat.label] = flat
            for row in own:
                row["flat_at_mean"] = flat.label
    return [arm for label, arm in found.items() if label not in there]


def finish(
    training: Training, made: Recipe, data: Mapping[str, Data], *, images: int = 0, num_steps: int = 0
) -> dict[str, Any]:
    """What is asked of a trained network besides its log: its dampings, whether it is dead, lambda_1 of the Hessian.

    "spread" is how far outputs are apart between 64 training images: 0 where ReLUs let nothing through any more.

    Args:
        training, made, data: As `train_all` gives them.
        images: Of how many training images, the first ones, without augmentation and dropout; 0 for none.
        num_steps: Of Lanczos, from one random vector.
    """
    group = training.optimizer.param_groups[0]
    found: dict[str, Any] = {"mean_damping": float(group.get("damping", group.get("eps", 0.0)))}
    if training.damping is not None:
        history = training.damping.history
        found["mean_damping"] = mean_damping(history, training.damping.starts[0], training.steps)
        some = history[:: -(-len(history) // MOST_POINTS) or 1]
        found["damping_step"] = [int(entry["step"]) for entry in some]
        for key in ("damping", "noise", "noise_stderr"):
            found[key] = [short(entry[key], 5) for entry in some]
    X, y = data["train"]
    with torch.no_grad():
        outputs = training.model(X[:64])
    found["spread"] = short(float((outputs - outputs[:1]).abs().max()), 5)
    if images and not training.diverged:
        risk = Risk(training.model, made.loss(), (X[:images], y[:images]), batch_size=256, plan=Plan(route="reverse"))
        found |= {"lambda_max": top_ritz_value(Hessian(risk), num_steps), "images": images, "lanczos_steps": num_steps}
    return found


def mean_damping(history: Sequence[Mapping[str, float]], start: float, steps: int) -> float:
    """The mean over steps of a damping that is `start` until the first refresh.

    Example:
        >>> mean_damping([{"step": 100, "damping": 3.0}, {"step": 200, "damping": 9.0}], start=1.0, steps=250)
        3.4
    """
    changes = [(0.0, start), *((entry["step"], entry["damping"]) for entry in history)]
    ends = [*(step for step, _ in changes[1:]), steps]
    return sum(value * (end - begin) for (begin, value), end in zip(changes, ends, strict=True)) / max(steps, 1)


def plain(arm: Arm, run: Finished) -> dict[str, Any]:
    """A run as a row: curves by epoch, in per cent and seconds of training alone, and how it ended.

    A run is "lost" that was given up, or that ended at chance after it had been above it, after losses beyond that of a
    guess, or with a dead network; "at chance" is one that never got away from it and still may.
    """
    ends = [row for row in run.rows if "test/accuracy" in row]
    row: dict[str, Any] = {
        "arm": arm.label, "seed": run.seed, "stop": run.stop, "steps": run.steps, "run_seconds": short(run.seconds, 5),
        "epoch": [int(end["epoch"]) for end in ends], "seconds": [short(end["seconds"], 5) for end in ends],
        "train_loss": [short(end["train/loss"], 5) for end in ends],
    }  # fmt: skip
    for name in ("train", "val", "test"):
        row[f"{name}_accuracy"] = [short(100 * end[f"{name}/accuracy"], 5) for end in ends]
    peak = max((one["loss"] for one in run.rows if "loss" in one), default=math.nan)
    state = _state(run.stop, row["train_accuracy"], peak, run.found["spread"])
    return {**row, "peak_loss": short(peak, 5), "state": state, **run.found}


def _state(stop: str, accuracies: Sequence[float], peak: float, spread: float) -> str:
    if stop != "finished":
        return "lost"
    if accuracies[-1] >= 2 * CHANCE:
        return "trained"
    alive = max(accuracies) < 5 * CHANCE and peak < 1.2 * GUESS and spread > DEAD
    return "at chance" if alive else "lost"
