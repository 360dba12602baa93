"""The networks of seeds 000 and 002 on CIFAR-100: weight decay against sharpness, and Gadam against SGD.

    allcnn       All-CNN-C             lr 0.01    seed 000, figure 3; seed 002, tables 2 and 3
    preresnet    PreResNet-164         lr 0.1     seed 000, figure 4; seed 002, tables 4 and 6
    wideresnet   WideResNet-28-10      lr 0.1     seed 000, figures 5 and 8; seed 002, tables 5 and 6
    preresnet-published, wideresnet-published     the same at their full sizes for fewer epochs
    vgg          VGG-16 with BatchNorm            seed 000, figure 6: SGD, lr 0.1, weight decay 5e-4, against Gadam, lr
                                                  5e-4, decoupled weight decay 0.25, iterates averaged from epoch 161 on
    vgg16        VGG-16                           seed 004, figure 2, which `damping_spectra` trains its own way

The papers train each once, for 300 epochs with momentum 0.9, at weight decays 0, 1e-4 and 5e-4, and take the Hessian of
the loss without the penalty on all training images by 100 Lanczos steps from one random vector. Tables 3 and 6 have no
numbers of their own. What the papers leave open is ours: batches of 128, crops and flips in training and none in the
Hessian, weight decay on all parameters, BatchNorm's statistics renewed before measuring, and the epoch from which Gadam
averages, 161 of 300, of which seed 000 says that its text has it. Here:

- A seed gives a start, an order of batches and the random vectors, which all arms share: they are compared at equal
  seed. Trained are the first 45,000 images, for the papers name no number of theirs on CIFAR-100. Held out are the last
  5,000, which are taken for a "validation" set, and the test set: both are measured, and that which the papers name for
  a network (`SET`) is judged as theirs.
- The network measured is the last one, of Gadam the average; accuracies too are those with renewed statistics.
- Curvature in evaluation mode and, with BatchNorm, by the statistics of batches of 128 as well. Figures 5 to 7 of seed
  000 and figure 6 of seed 001, by its numbering the supplement of seed 002, are in "batch norm train mode", the default
  of the authors' code; tables 4 and 5 and figure 4 do not say, and are taken to be so too. Figure 8 is in evaluation
  mode.
- Lanczos vectors are kept and reorthogonalised, as the papers do, from two random vectors, of networks at their full
  size from one as theirs. lambda_1 is then a Ritz value, a lower bound; the bound above it for random starts is some
  tens of percent away after ten steps and is kept beside it.
- Products are in float32 and not in TF32, torch's default for convolutions on a GPU, in which those of WideResNet-28-10
  are a tenth off. Rows say so in "precision"; the results of commits 0a84c2a and aa07102 are from before that, in TF32,
  and claims by them say so.
- What the text of seed 000 calls the Frobenius norm, 0.02 or 4.9e-5, is below lambda_1, which |H|_F cannot be: it is
  read as Tr H^2 / P, as the column "Tr H2" of seed 002. Rows have |H|_F too, and both readings are judged.
- At budget "short" ten epochs at most, not 300, with the schedule and the averaging shrunk with them, learning rates
  and weight decays as published. No network fits its training data then, and weight decay, which acts over
  lr * epochs, has done a thirtieth of its work. The Hessian is that of 1,280 images at most, which makes lambda_1 and
  Tr H^2 larger than those of all images. The residual networks are smaller ones of their families (`NETWORKS`): orders
  are judged on them, printed numbers are not.
- preresnet-published and wideresnet-published are the networks of 1,726,388 and 36,546,980 parameters at "short" too,
  one seed at weight decays 0 and 5e-4: two epochs, 256 images and 12 steps, few enough for two cores of a CPU, and four
  epochs, 1,280 images and 30 steps, for a GPU.
- Runs at several weight decays are begun seed by seed; what has not begun by `Setting.until` is left out, and claims
  are judged on the runs that there are.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ..batches import isolated_rng
from ..estimators.spectrum import spectrum
from ..estimators.trace import trace
from ..models import all_cnn_c, preresnet164, vgg16, vgg16_bn, wide_resnet28_10
from ..operators.gauss_newton import GGN
from ..operators.hessian import Hessian
from ..optim.schedules import PiecewiseLinear, averaging_decay, linear_decay
from ..plan import Plan
from ..results import Estimate, affine
from ..risk import Risk
from ..switches import all_digits
from . import cifar_spectra_claims as judgement
from .base import Claim
from .cifar_spectra_numbers import ENDS, EPOCHS, HELD_OUT, WEIGHT_DECAYS, decay_arm
from .data import DATASETS, augment, load
from .experiment import Progress, Rows, Setting, short
from .loop import Data, Training, batch_order, evaluate
from .pool import Finished, train_all
from .recipe import Budget, Recipe, Run, gadam, on_parameters, scaled, trained_in

T = TypeVar("T")
Mode = Literal["eval", "train"]
Split = Literal["fit", "val", "test"]
Decays = tuple[float, ...]

AVERAGED_FROM = 161 / 300  # the share of the epochs before Gadam's average
SPLITS: dict[str, Split] = {"train": "fit", "val": "val", "test": "test"}


@dataclass(frozen=True)
class Network:
    """A network of the papers and what each budget takes of it; triples are for smoke, short and paper.

    Attributes:
        title: For people.
        make: From `ritz.models`.
        lr: Of SGD.
        modes: In which its curvature is taken.
        short_epochs: At budget "short".
        width: Share of the channels.
        blocks: Residual blocks in each stage; 0 for all there are.
        images: The first so many of the training set, for the Hessian.
        steps: Of Lanczos.
        probes: Random vectors that it starts from.
        seeds: How many.
        decays: Weight decays of SGD.
    """

    title: str
    make: Callable[..., nn.Module]
    lr: float
    modes: tuple[Mode, ...]
    short_epochs: int
    width: tuple[float, float, float]
    blocks: tuple[int, int, int] = (0, 0, 0)
    images: tuple[int, int, int] = (8, 1280, 45_000)
    steps: tuple[int, int, int] = (3, 10, 100)
    probes: int = 2
    seeds: tuple[int, int, int] = (2, 3, 4)
    decays: tuple[Decays, Decays, Decays] = (WEIGHT_DECAYS, WEIGHT_DECAYS, WEIGHT_DECAYS)


BOTH: tuple[Mode, Mode] = ("eval", "train")
NETWORKS = {
    "allcnn": Network("All-CNN-C", all_cnn_c, 0.01, ("eval",), 10, (0.0625, 1, 1), steps=(3, 12, 100)),
    "preresnet": Network("PreResNet-164", preresnet164, 0.1, BOTH, 8, (0.125, 1, 1), (1, 3, 0), (8, 640, 45_000)),
    "preresnet-published": Network(
        "PreResNet-164", preresnet164, 0.1, BOTH, 2, (0.125, 1, 1), (1, 0, 0), (8, 256, 45_000), (3, 12, 100),
        probes=1, seeds=(2, 1, 4), decays=(ENDS, ENDS, WEIGHT_DECAYS),
    ),
    "wideresnet": Network(
        "WideResNet-28-10", wide_resnet28_10, 0.1, BOTH, 8, (0.02, 0.2, 1), (1, 0, 0), (8, 640, 10_000), (3, 10, 30)
    ),
    "wideresnet-published": Network(
        "WideResNet-28-10", wide_resnet28_10, 0.1, BOTH, 4, (0.02, 1, 1), (1, 0, 0), (8, 1280, 10_000), (3, 30, 30),
        probes=1, seeds=(2, 1, 4), decays=(ENDS, ENDS, WEIGHT_DECAYS),
    ),
    "vgg": Network("VGG-16-BN", vgg16_bn, 0.1, BOTH, 8, (0.03125, 1, 1)),
    "vgg16": Network(
        "VGG-16", vgg16, 0.01, ("eval",), 15, (0.03125, 1, 1), images=(8, 1280, 2560), steps=(3, 30, 30), probes=1,
        seeds=(2, 3, 5),
    ),
}  # fmt: skip


def _of(setting: Setting, triple: tuple[T, T, T]) -> T:
    return triple[get_args(Budget).index(setting.budget)]


# -------------------------------------------------------------------------------------- what is trained, and on what


def built(make: Callable[..., nn.Module], blocks: int = 0, **settings: Any) -> nn.Module:
    """A network whose kernels lie in memory with their channels last, for speed: the images in it follow them.

    With `blocks` a residual network has the first so many of each stage, which are the ones that change channels.

    Example:
        >>> count = lambda model: sum(p.numel() for p in model.parameters())
        >>> count(built(preresnet164)) - count(preresnet164()), count(built(preresnet164, 3))
        (0, 335348)
    """
    model = make(**settings)
    for name in ("stage1", "stage2", "stage3") if blocks else ():
        setattr(model, name, getattr(model, name)[:blocks])
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def model_of(network: str, setting: Setting) -> Callable[[], nn.Module]:
    """What makes the network at this budget.

    Example:
        >>> sum(p.numel() for p in model_of("allcnn", Setting("short"))().parameters())
        1387108
    """
    known = NETWORKS[network]
    return partial(built, known.make, _of(setting, known.blocks), width=float(_of(setting, known.width)))


def is_published(network: str, setting: Setting) -> bool:
    """Whether it is the network of the paper and not a smaller one.

    Example:
        >>> [is_published(name, Setting("short")) for name in NETWORKS]
        [True, False, True, False, True, True, True]
    """
    known = NETWORKS[network]
    return _of(setting, known.width) == 1 and not _of(setting, known.blocks)


def averaging(num_epochs: float) -> PiecewiseLinear:
    """The papers' schedule for averaged iterates, whose length is the time before averaging.

    Example:
        >>> [round(averaging(300)(t), 4) for t in (0, 161, 299)]
        [1.0, 0.5, 0.5]
    """
    return averaging_decay(AVERAGED_FROM * num_epochs)


def sgd_recipe(
    network: str, setting: Setting, seed: int, weight_decay: float, penalty: Callable[[Run], Any] | None = None
) -> Recipe:
    """A network trained by SGD, as both papers do, at this budget.

    Example:
        >>> made = sgd_recipe("allcnn", Setting("paper"), seed=0, weight_decay=1e-4)
        >>> made.epochs, made.batch_size, made.optimizer.keywords["lr"]
        (300, 128, 0.01)
    """
    step = partial(
        on_parameters, kind=torch.optim.SGD, lr=NETWORKS[network].lr, momentum=0.9, weight_decay=weight_decay
    )
    return _recipe(network, setting, seed, optimizer=step, schedule=linear_decay, penalty=penalty)


def gadam_recipe(setting: Setting, seed: int) -> Recipe:
    """VGG-16-BN by Gadam (seed 000, section 5).

    Example:
        >>> gadam_recipe(Setting("short"), seed=0).optimizer.keywords["weight_decay"]
        0.25
    """
    step = partial(gadam, lr=5e-4, weight_decay=0.25, start=AVERAGED_FROM)
    return _recipe("vgg", setting, seed, optimizer=step, schedule=averaging)


def _recipe(network: str, setting: Setting, seed: int, **settings: Any) -> Recipe:
    known = NETWORKS[network]
    full = Recipe(
        name=known.title, model=model_of(network, setting), epochs=EPOCHS, short_epochs=known.short_epochs,
        batch_size=setting.pick(8, 128, 128), seed=seed,
        augment=partial(augment, norm=DATASETS["CIFAR100"].norm(known.make.__name__)),
        fast=setting.fast and settings.get("penalty") is None, **settings,
    )  # fmt: skip
    return scaled(full, setting.budget)


def load_data(network: str, setting: Setting) -> dict[str, Data]:
    """CIFAR-100 as the network sees it: 45,000 images to train on, 5,000 held out, the test set; 16 each for smoke."""
    norm = DATASETS["CIFAR100"].norm(NETWORKS[network].make.__name__)
    found = {}
    for name, split in SPLITS.items():
        images, labels = load("CIFAR100", setting.data, setting.device, split)
        most = setting.pick(16, len(images), len(images))
        found[name] = norm(images[:most]), labels[:most]
    return found


# ------------------------------------------------------------------------------------------------------ measurement


def finish(
    training: Training, recipe: Recipe, data: Mapping[str, Data], *, images: int, steps: int, probes: int,
    modes: tuple[Mode, ...],
) -> dict[str, Any]:  # fmt: skip
    """What is measured on a trained network, or on its average where there is one, as plain JSON.

    Losses, accuracies and gaps in percent, |w|, the metric a, and for each mode the numbers of `curvature`. A run that
    diverged has none of them.
    """
    if training.diverged:
        return {}
    solution = training.model if training.average is None else training.average
    model = refreshed(solution, recipe, data["train"])
    norm = weight_norm(model)["weight_norm"]
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), **_fit(model, data)}
    found |= {"weight_norm": short(norm, 7), "metric_a": short(norm / 2, 7)}
    found |= {f"{name}_images": len(data[name][0]) for name in data}
    found |= {"images": images, "lanczos_steps": steps, "probes": probes, "precision": "float32"}
    part = data["train"][0][:images], data["train"][1][:images]
    for mode in modes:
        found[mode] = curvature(
            model, part, mode, batch_size=recipe.batch_size, steps=steps, probes=probes, seed=recipe.seed
        )
    return found


def refreshed(model: nn.Module, recipe: Recipe, data: Data) -> nn.Module:
    """A copy in evaluation mode whose BatchNorm statistics are means over one more epoch of augmented batches.

    Example:
        >>> recipe = Recipe(name="", model=nn.Identity, optimizer=on_parameters, epochs=1, batch_size=2)
        >>> data = torch.tensor([[1.0], [2.0], [3.0], [6.0]]), torch.zeros(4)
        >>> refreshed(nn.BatchNorm1d(1), recipe, data).running_mean.item()
        3.0
    """
    model = copy.deepcopy(model)
    order = batch_order(len(data[0]), recipe.seed, recipe.epochs, data[0].device)

    def batch(number: int, rows: Tensor) -> Tensor:
        x = data[0][rows]
        return x if recipe.augment is None else recipe.augment(x, (recipe.seed, recipe.epochs, number))

    with isolated_rng(recipe.seed, data[0].device):  # dropout draws
        update_bn((batch(number, rows) for number, rows in enumerate(order.split(recipe.batch_size))), model)
    return model.eval()


def curvature(
    model: nn.Module, data: Data, mode: Mode, *, batch_size: int, steps: int, probes: int, seed: int
) -> dict[str, Any]:
    """Numbers of one spectrum of the Hessian as [value, lower, upper], Tr G, and the Ritz values with their weights.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> data = torch.eye(2), torch.tensor([0, 1])  # H = 1/4 [1, -1; -1, 1] for each input, over 2
        >>> found = curvature(model, data, "eval", batch_size=2, steps=4, probes=2, seed=0)
        >>> round(found["lambda_max"][0], 6), round(sum(found["weights"]), 4)
        (0.25, 1.0)
    """
    risk = Risk(model, nn.CrossEntropyLoss(), data, mode=mode, batch_size=batch_size, plan=Plan(route="reverse"))
    with all_digits():
        found = spectrum(Hessian(risk), steps, probes, seed=seed, reorthogonalize="full")
        ggn_trace = trace(GGN(risk), "hutchinson", 2 * probes, seed)
    square = weight_norm(model)["weight_norm"] ** 2
    numbers = {
        "lambda_max": found.lambda_max,
        "lambda_min": found.lambda_min,
        "trace_per_param": affine(found.trace, 1 / found.dim),
        "moment2_per_param": affine(found.moment(2), 1 / found.dim),
        "frobenius_norm": found.frobenius_norm,
        "metric_a_eq7": affine(found.trace, 1.0, square / 2),
        "ggn_trace": ggn_trace,
    }
    stems = {"nodes": found.nodes.tolist(), "weights": found.weights.tolist()}
    return {key: _plain(number) for key, number in numbers.items()} | {
        key: [short(x, 5) for x in stem] for key, stem in stems.items()
    }


def weight_norm(model: nn.Module, epoch: int = 0) -> dict[str, float]:
    """|w| over all parameters, for the row of an epoch.

    Example:
        >>> layer = nn.Linear(4, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 3.0)
        >>> weight_norm(layer)
        {'weight_norm': 6.0}
    """
    squares = [p.detach().double().square().sum() for p in model.parameters()]
    return {"weight_norm": math.sqrt(float(torch.stack(squares).sum()))}


def _fit(model: nn.Module, data: Mapping[str, Data]) -> dict[str, float]:
    """Loss and accuracy, in percent, of every part, and the gaps to those held out."""
    seen = {name: evaluate(model, nn.CrossEntropyLoss(), part) for name, part in data.items()}
    found = {f"{name}_loss": fit["loss"] for name, fit in seen.items()}
    found |= {f"{name}_accuracy": 100 * fit["accuracy"] for name, fit in seen.items()}
    for name in HELD_OUT:
        found[f"gap_loss_{name}"] = seen[name]["loss"] - seen["train"]["loss"]
        found[f"gap_error_{name}"] = 100 * (seen["train"]["accuracy"] - seen[name]["accuracy"])
    return {key: short(value, 7) for key, value in found.items()}


def _plain(estimate: Estimate) -> list[float]:
    return [short(x, 7) for x in (estimate.value, *estimate.interval())]


# ------------------------------------------------------------------------------------------------------ experiments


def train_arms(
    network: str, arms: Mapping[str, Mapping[str, Any]], recipes: Mapping[tuple[str, int], Recipe], setting: Setting,
    progress: Progress, cut: bool = False,
) -> Rows:  # fmt: skip
    """Train and measure every (arm, seed), and give one row for each; `arms` has what rows of an arm say of it.

    Runs are kept under the name of the network, so that what one experiment has trained another finds. `cut` leaves out
    those that are not begun in time, as `train_all` does.
    """
    known = NETWORKS[network]
    measured = partial(
        finish, images=_of(setting, known.images), steps=_of(setting, known.steps), probes=known.probes,
        modes=known.modes,
    )  # fmt: skip
    names = {key: f"{key[0].replace(' ', '-')}-seed-{key[1]}" for key in recipes}
    runs = train_all(
        {names[key]: recipe for key, recipe in recipes.items()}, load_data(network, setting), setting,
        item=f"cifar-{network}", finish=measured, progress=progress, cut=cut, measure=weight_norm,
        evaluate_every=setting.pick(1, 2, 10), checkpoint_every=setting.pick(1, 1, 10),
    )  # fmt: skip
    name = network.removesuffix("-published")  # the claims are about the network, whichever item has it
    about = {"network": name, "title": known.title, "published": is_published(network, setting)}
    return [
        {
            **about,
            "arm": arm,
            **arms[arm],
            "seed": seed,
            "epochs": recipe.epochs,
            **trained_in(recipe),
            **_row(runs[names[arm, seed]]),
        }
        for (arm, seed), recipe in recipes.items()
        if names[arm, seed] in runs
    ]


def _row(run: Finished) -> dict[str, Any]:
    """A run and its curves by epoch."""
    prefix = "average/" if any("average/test/accuracy" in row for row in run.rows) else ""
    ends = [row for row in run.rows if "epoch" in row and "test/accuracy" in row]
    curve = {
        "epoch": [row["epoch"] for row in ends],
        "test_error": [short(100 * (1 - row.get(f"{prefix}test/accuracy", row["test/accuracy"])), 5) for row in ends],
        "weight_norm": [short(row.get("weight_norm", math.nan), 5) for row in ends],
    }
    return {"stop": run.stop, "steps": run.steps, "seconds": round(run.seconds, 2), **run.found, "curve": curve}


def run_decays(network: str, setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """A network at its weight decays; `partial(run_decays, "allcnn")` is an experiment."""
    known = NETWORKS[network]
    arms = {decay_arm(decay): {"weight_decay": decay} for decay in _of(setting, known.decays)}
    recipes = {
        (arm, seed): sgd_recipe(network, setting, seed, about["weight_decay"])
        for seed in setting.seed_range(*known.seeds)
        for arm, about in arms.items()
    }
    rows = train_arms(network, arms, recipes, setting, progress, cut=True)
    return rows, judgement.decay_claims(rows)


def run_optimisers(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """VGG-16-BN by SGD and by Gadam."""
    recipes = {}
    for seed in setting.seed_range(2, 3, 4):
        recipes["SGD", seed] = sgd_recipe("vgg", setting, seed, 5e-4)
        recipes["Gadam", seed] = gadam_recipe(setting, seed)
    arms = {"SGD": {"weight_decay": 5e-4}, "Gadam": {"weight_decay": 0.25}}
    rows = train_arms("vgg", arms, recipes, setting, progress)
    return rows, judgement.optimiser_claims(rows)
