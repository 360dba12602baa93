"""The noise of real batch Hessians: section 4, section 7.1 and appendix A of seed 004, measured.

The paper takes X = H_batch - H for a matrix with a semicircle of eigenvalues (theorem 4), with normal entries (lemma 3)
of variance proportional to 1 / B - 1 / N, finds no noise at the first weights nor after divergence, and the same
results whether damping is learned every 10 steps or every 100. It shows no spectrum of X; its networks are too large
for one. Here, on Fashion-MNIST,

    dense    a convolutional network of 994 parameters, before and after training: X in full, for batches of 32 to 512
    larger   one of 11,018, by Lanczos; its noise at the first weights, after training, and after divergence
    VGG-16   the paper's network at its first weights, on CIFAR-100
    gap      the 11,018 trained by KFAC with a damping learned every 10 steps, every 100, and with a flat one

Where it differs from the paper: the networks that are taken apart or trained are small, and so is their data (2,048 and
10,000 images); H is that of all training images, not of the distribution; KFAC has `kl_clip`, without which it does not
survive its first steps here (docs/convergence.md); learned dampings come from the corrected estimator, 4 batches of 128
each time. Only the first weights of VGG-16 are the paper's own case.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import rmt
from ..errors import NonFiniteError
from ..estimators.noise import curvature_noise
from ..estimators.spectrum import spectrum
from ..models import lenet5, vgg16
from ..operators.hessian import Hessian
from ..operators.noise import BatchNoise
from ..results import Estimate
from ..risk import Risk
from ..space import random_permutation
from . import noise_spectrum_measures as measures
from .base import Claim
from .data import DATASETS, load
from .data.images import Data
from .experiment import Progress, Rows, Setting
from .loop import Training, initial
from .noise_spectrum_claims import claims
from .pieces import Pieces
from .pool import Finished, train_all
from .recipe import Recipe, auto_damping, kfac, on_parameters

BATCH = 128  # of training, and of the noise that a damping is learned from
RATE, DAMPING, CLIP = 3e-3, 0.03, 1e-3  # KFAC's: those of docs/convergence.md


def small(width: int = 8) -> nn.Sequential:
    """7 x 7 means of pixels, two convolutions that halve them, a linear layer: 994 parameters at width 8.

    Example:
        >>> sum(p.numel() for p in small().parameters())
        994
    """
    convolutions = [
        part for inputs in (1, width) for part in (nn.Conv2d(inputs, width, 3, stride=2, padding=1), nn.ReLU())
    ]
    return nn.Sequential(nn.AvgPool2d(4), *convolutions, nn.Flatten(), nn.Linear(4 * width, 10))


def larger() -> nn.Sequential:
    """Three convolutions that halve an image of 28 x 28, and a linear layer.

    Example:
        >>> sum(p.numel() for p in larger().parameters())
        11018
    """
    convolutions = [
        part
        for inputs, outputs in ((1, 8), (8, 16), (16, 32))
        for part in (nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU())
    ]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 10))


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """All four parts, and what follows."""
    train, test = (_images(setting, split) for split in ("train", "test"))
    rows = [*_dense(setting, train, progress), *_vgg(setting, train), *_gap(setting, train, test, progress)]
    return rows, claims(rows)


def _images(setting: Setting, split: Any) -> Data:
    """Fashion-MNIST, (N, 1, 28, 28), pixels in [-1, 1]."""
    X, y = load("FashionMNIST", setting.data, setting.device, split, check=False)
    return X.float() / 127.5 - 1, y


# ------------------------------------------------------------------------------------------------ in full


def _dense(setting: Setting, train: Data, progress: Progress) -> Rows:
    """The small network, a row for each seed, state and measure."""
    num = setting.pick(20, 1024, 2048)
    X, y = train
    model, optimizer = partial(small, width=setting.pick(3, 8, 8)), partial(on_parameters, kind=torch.optim.SGD, lr=0.1)
    recipes = {
        f"dense, seed {seed}": Recipe(
            name="small network, SGD", model=model, optimizer=partial(optimizer, momentum=0.9),
            epochs=setting.pick(1, 20, 20), batch_size=setting.pick(16, BATCH, BATCH), seed=seed,
        )
        for seed in setting.seed_range(2, 2, 2)
    }  # fmt: skip
    finish = partial(
        take_apart, block=setting.pick(4, 32, 32), middle=setting.pick(16, BATCH, BATCH),
        most=setting.pick(2, 8, 8), num_columns=setting.pick(3, 20, 20), num_batches=setting.pick(20, 1000, 1000),
    )  # fmt: skip
    runs = train_all(recipes, {"train": (X[:num], y[:num])}, setting, item="noise", finish=finish, progress=progress)
    return [
        {"kind": "dense", "seed": run.seed, "images": num, "loss": run.last("train/loss"), **row}
        for run in runs.values()
        for row in run.found["rows"]
    ]


def take_apart(
    training: Training, recipe: Recipe, data: Mapping[str, Data], *, block: int, middle: int, most: int,
    num_columns: int, num_batches: int,
) -> dict[str, Any]:  # fmt: skip
    """All that is measured of X before and after training.

    Args:
        training, recipe, data: Of the run.
        block: Samples of a block, the smallest batch.
        middle: The batch size at which spikes are looked at.
        most: Batches whose eigenvalues are found, for each size.
        num_columns: Of the Hessian, whose entries are looked at sample by sample; of each, as many entries.
        num_batches: That are drawn to see whether an entry is normal.
    """
    train, seed = data["train"], recipe.seed
    sizes = [size for size in (block * 4**k for k in range(4)) if size < len(train[0])]
    rows = []
    for state, model in (("start", initial(recipe, train[0].device)), ("trained", training.model)):
        blocks = measures.block_hessians(model, train, block)
        entries = _entries(model, train, blocks, num_columns, seed)
        rows.append(
            {
                "state": state,
                "params": blocks.shape[1],
                "spectra": measures.spectra(blocks, sizes, block, most, (seed, state)),
                "bounds": measures.bounds(blocks, middle, block),
                "dependence": measures.dependence(blocks),
                "spikes": measures.spikes(blocks, middle, block, 4 * most, (seed, state)),
                "entries": measures.normality(entries, [1, *sizes], num_batches, (seed, state)),
            }
        )
    return {"rows": rows}


def _entries(model: nn.Module, data: Data, blocks: Tensor, number: int, seed: int) -> Tensor:
    """Entries of the Hessian of each sample: `number` columns drawn, and as many entries of each; (N, number^2).

    Weights of dead units, whose diagonal entry is the same for all blocks, are not drawn.
    """
    live = (blocks.diagonal(dim1=1, dim2=2).var(0) > 0).nonzero().flatten().cpu()
    order = live[random_permutation(len(live), ("columns", seed))]
    found = measures.sample_columns(model, data, order[:number].tolist())
    return found[:, :, order[-number:].to(found.device)].flatten(1)


# ------------------------------------------------------------------------------------------ at the first weights


def _vgg(setting: Setting, train: Data) -> Rows:
    """The noise of the paper's network at its first weights; at smoke budget that of LeNet-5."""
    smoke = setting.budget == "smoke"
    X, y = train
    if not smoke:
        pixels, y = load("CIFAR100", setting.data, setting.device)
        X = DATASETS["CIFAR100"].norm("vgg16")(pixels[:1024])
    rows: Rows = []
    keep, size = Pieces(setting, "noise").keep, setting.pick(8, 16, 16)
    for seed in setting.seed_range(2, 2, 2):
        model = (lenet5(seed=seed) if smoke else vgg16(seed=seed)).to(setting.device)
        work = partial(_noise, size=size, num_batches=4, num_probes=2, seed=seed)
        found = keep(f"first weights, seed {seed}", work, model, (X[:1024], y[:1024]))
        about = {"kind": "first weights", "network": "LeNet-5" if smoke else "VGG-16", "seed": seed}
        rows.append({**about, "params": sum(p.numel() for p in model.parameters()), **_plain(found, size)})
    return rows


def _noise(model: nn.Module, data: Data, size: int, **options: Any) -> Estimate:
    return curvature_noise(Risk(model, nn.CrossEntropyLoss(), data), batch_size=size, **options)


def _plain(noise: Estimate, size: int) -> dict[str, float]:
    """The noise of a batch of 128, from that of a smaller one."""
    scale = size / BATCH
    return {"noise": scale * float(noise.value), "stderr": scale * float(noise.stderr), "measured_at": size}


# -------------------------------------------------------------------------------------------- learned dampings


def _gap(setting: Setting, train: Data, test: Data, progress: Progress) -> Rows:
    """Runs of KFAC, learned every few steps, every many, flat; and one of SGD that diverges."""
    num, most = setting.pick(64, 10_000, 10_000), setting.pick(64, 10_000, 10_000)
    data = {"train": (train[0][:num], train[1][:num]), "test": (test[0][:most], test[1][:most])}
    gaps = (2, 4) if setting.budget == "smoke" else (10, 100)
    common: dict[str, Any] = {
        "model": larger, "epochs": setting.pick(2, 4, 8), "batch_size": setting.pick(16, BATCH, BATCH),
        "drop_last": True,
    }  # fmt: skip
    step = partial(kfac, lr=RATE, damping=DAMPING, kl_clip=CLIP)
    sgd = partial(on_parameters, kind=torch.optim.SGD, lr=0.8, momentum=0.9)
    recipes = {}
    for seed in setting.seed_range(2, 3, 4):
        recipes[f"flat, seed {seed}"] = Recipe(name="flat", optimizer=step, seed=seed, **common)
        for gap in gaps:
            learn = partial(auto_damping, every=gap)
            recipes[f"gap {gap}, seed {seed}"] = Recipe(
                name=f"gap {gap}", optimizer=step, damping=learn, seed=seed, **common
            )
        recipes[f"diverged, seed {seed}"] = Recipe(name="diverged", optimizer=sgd, seed=seed, **{**common, "epochs": 1})
    look = partial(
        look_at,
        size=setting.pick(16, BATCH, BATCH),
        num_steps=setting.pick(4, 30, 30),
        images=setting.pick(32, 640, 640),
    )
    runs = train_all(recipes, data, setting, item="noise", finish=look, progress=progress, evaluate_every=100)
    return [_row(run, recipes[name].name, gaps) for name, run in runs.items()]


def look_at(
    training: Training, recipe: Recipe, data: Mapping[str, Data], *, size: int, num_steps: int, images: int
) -> dict[str, Any]:
    """What was learned along a run; of one that learned nothing the noise at both ends, and its shape by Lanczos."""
    if training.damping is not None:
        keys = ("step", "damping", "noise", "noise_stderr")
        return {"history": [[float(f"{row[key]:.5g}") for key in keys] for row in training.damping.history]}
    train = data["train"]
    found: dict[str, Any] = {}
    for state, model in (("start", initial(recipe, train[0].device)), ("end", training.model)):
        try:
            noise = _noise(model, train, size, num_batches=min(16, len(train[0]) // size), seed=recipe.seed)
        except NonFiniteError:  # weights that are lost
            noise = Estimate(name="curvature noise", value=float("nan"), stderr=float("nan"))
        found[state] = _plain(noise, size)
    if recipe.name == "flat":
        found["lanczos"] = _lanczos(
            training.model, (train[0][:images], train[1][:images]), size, num_steps, recipe.seed
        )
    return found


def _lanczos(model: nn.Module, data: Data, size: int, num_steps: int, seed: int) -> dict[str, Any]:
    """The shape of the noise of the first batch, without any matrix: value and bracket or standard error."""
    risk = Risk(model, nn.CrossEntropyLoss(), data, batch_size=size)
    fit = rmt.fit(
        spectrum(BatchNoise(Hessian(risk), 0), num_steps=num_steps, num_probes=2, seed=seed, reorthogonalize="full")
    )
    names = ("kurtosis", "skewness", "outside", "distance")
    found = {name: float(getattr(fit, name).value) for name in names}
    return {**found, "least_distance": float((fit.distance.bracket or (0.0, 0.0))[0]), "images": len(data[0])}


def _row(run: Finished, arm: str, gaps: tuple[int, int]) -> dict[str, Any]:
    keys = ("train/loss", "test/loss", "test/accuracy")
    ends = {key.replace("/", "_"): run.last(key) for key in keys}
    about = {"kind": "run", "arm": arm, "seed": run.seed, "stop": run.stop, "steps": run.steps, "gaps": list(gaps)}
    return {**about, "seconds": run.seconds, **ends, **run.found}


def figure(rows: Rows) -> Any:
    """Eigenvalues beside the semicircle, s2 by batch size, entries that are not normal, and dampings along training."""
    from .noise_spectrum_figure import draw

    return draw(rows)
