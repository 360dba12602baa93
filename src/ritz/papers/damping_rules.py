"""Rules for KFAC's damping on a network that a CPU trains: section 7.1 of seed 004.

The paper says that Levenberg and Marquardt's rule "does not give stable training for the VGG", and so compares flat
damping with learned damping alone; it learns from 10,000 examples as 79 batches of 128, and expects the same of all.
It shows neither. Its network is VGG-16 on CIFAR-100 for 100 epochs, which takes an accelerator. Here a stand-in, in the
style of VGG and without normalisation as that is, with 21,836 parameters on images of 16 x 16, is trained on 20,000
images of CIFAR-100 for 4 epochs: what is said here holds of it. All arms of a seed share start, batches, rate and
schedule, and begin at one damping:

    flat                      stays there
    learned, added            plus the noise of the curvature (`NoiseVariance`), as the published code has it
    learned, floor            the larger of the two, as the captions have it
    Levenberg-Marquardt       kfac-jax's form, every 5 steps, by the reduction of the loss on the training batch
    the same, sign as published     the sign of the foretold decrease as in the published code: a good step raises it
    Ledoit-Wolf, bulk edge    two rules of `ritz.optim` that keep the units of the loss, the start value as a floor
    flat and Levenberg-Marquardt, unclipped     without `kl_clip`, which else bounds every step

Rate, start value and kl_clip are those of `noise_spectrum` and docs/convergence.md, and were not searched for. Learned
dampings look at 4 batches of 128 every 25 steps, a probe for each.

How far an estimate from few batches is off is asked at the end of the flat runs: the Hessians of all batches of the
training set are multiplied by a few common probes, as in Algorithm 1 when it is corrected, and estimates from some of
the batches are held against the one from all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import isolated_rng
from ..operators.hessian import Hessian
from ..optim import linear_decay
from ..optim.rules import BulkEdge, DampingRule, LedoitWolf, LevenbergMarquardt, NoiseVariance, Seen
from ..optim.streaming import Stream
from ..plan import Plan
from ..results import Estimate
from ..risk import Risk
from ..space import random_permutation
from .base import Claim
from .damping_cifar import CHANCE, LOST, NORM, mean_damping
from .damping_rules_claims import FLAT, FLAT_FREE, LM, LM_FREE, LM_SIGN, claims
from .data import load
from .experiment import Progress, Rows, Setting, short
from .loop import Data, Training
from .noise_spectrum import CLIP, DAMPING, RATE
from .pool import Finished, train_all
from .recipe import Recipe, auto_damping, kfac

LEAST, MOST = 1e-8, 1e8  # bounds of Levenberg and Marquardt's damping
CHANNELS = (8, 8, 16, 16, 32)
DRAWS = 200  # of batches, for an estimate from some of them
MOST_POINTS = 100
_short = partial(short, digits=5)


@dataclass
class SignAsPublished(LevenbergMarquardt):
    """Levenberg and Marquardt's rule with the ratio's sign turned round, as in the code published with seed 004.

    Example:
        >>> rule = SignAsPublished(omega=0.5)
        >>> [rule.update(Seen(start=1.0, reduction_ratio=Estimate(name="", value=rho)), 5) for rho in (1.0, 0.9, -3.0)]
        [2.0, 4.0, 2.0]
    """

    def update(self, seen: Seen, step: int) -> float:
        """One factor up after a good step, one down after a bad one."""
        turned = Estimate(name="reduction ratio", value=-seen.need("reduction_ratio"))
        return super().update(replace(seen, reduction_ratio=turned), step)


@dataclass(frozen=True)
class Arm:
    """One rule.

    Attributes:
        label: The key of its rows.
        rule: What makes the damping; None for none.
        clip: KFAC's kl_clip.
    """

    label: str
    rule: DampingRule | None = None
    clip: float | None = CLIP

    @property
    def by_steps(self) -> bool:
        """Whether the rule looks at steps of the training batch, and not at the noise."""
        return isinstance(self.rule, LevenbergMarquardt)


_LM = LevenbergMarquardt(least=LEAST, most=MOST)
ARMS = (
    Arm(FLAT),
    Arm("learned, added", NoiseVariance()),
    Arm("learned, floor", NoiseVariance(combine="floor")),
    Arm(LM, _LM),
    Arm(LM_SIGN, SignAsPublished(least=LEAST, most=MOST)),
    Arm("Ledoit-Wolf", LedoitWolf()),
    Arm("bulk edge", BulkEdge()),
    Arm(FLAT_FREE, clip=None),
    Arm(LM_FREE, _LM, clip=None),
)


def network(channels: Sequence[int] = CHANNELS) -> nn.Sequential:
    """Means of 2 x 2 pixels, convolutions of 3 x 3 in pairs with maxima of 2 x 2 after each, and a linear layer.

    Example:
        >>> sum(p.numel() for p in network().parameters())
        21836
    """
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    inputs, size = 3, 16
    for place, outputs in enumerate(channels):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        inputs = outputs
        if place % 2 or place == len(channels) - 1:
            layers.append(nn.MaxPool2d(2))
            size //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * size**2, 100))


def recipe(arm: Arm, seed: int, setting: Setting) -> Recipe:
    """How an arm is trained at a budget.

    Example:
        >>> made = recipe(ARMS[3], seed=1, setting=Setting("short"))
        >>> made.epochs, made.streaming, made.damping.keywords["every"]
        (4, True, 5)
    """
    batch = setting.pick(8, 128, 128)
    every = setting.pick(1, 5, 5) if arm.by_steps else setting.pick(2, 25, 25)
    learner = partial(
        auto_damping, every=every, rule=arm.rule, batch_size=batch, num_batches=setting.pick(2, 4, 4)
    )  # fmt: skip
    return Recipe(
        name=arm.label,
        model=partial(network, (2, 2, 2) if setting.budget == "smoke" else CHANNELS),
        optimizer=partial(kfac, lr=RATE, damping=DAMPING, kl_clip=arm.clip),
        epochs=setting.pick(1, 4, 20),
        batch_size=batch,
        drop_last=True,
        schedule=linear_decay,
        schedule_by="step",
        damping=None if arm.rule is None else learner,
        streaming=arm.by_steps,
        loss_bound=LOST,
        seed=seed,
    )


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Every arm for every seed, seed by seed."""
    data = load_data(setting)
    seeds = setting.seed_range(2, 6, 6)  # as few as tell, by their share, what fails mostly
    recipes = {f"{arm.label}, seed {seed}": recipe(arm, seed, setting) for seed in seeds for arm in ARMS}
    measured = partial(finish, probes=setting.pick(2, 4, 8), size=setting.pick(8, 128, 128))
    done = train_all(
        recipes, data, setting, item=f"damping-rules-{setting.budget}", finish=measured, progress=progress, cut=True,
        train_subset=2000,
    )  # fmt: skip
    rows = [{"images": len(data["train"][0]), **plain(recipes[name].name, run)} for name, run in done.items()]
    return rows, claims(rows)


def load_data(setting: Setting) -> dict[str, Data]:
    """Normalised images and labels of CIFAR-100: the first 20,000, all 45,000 at budget "paper", and test images."""
    parts = {}
    for name, split, most in (
        ("train", "fit", setting.pick(32, 20_000, 45_000)), ("test", "test", setting.pick(32, 10_000, 10_000)),
    ):  # fmt: skip
        images, labels = load("CIFAR100", setting.data, setting.device, split)  # type: ignore[arg-type]
        parts[name] = NORM(images[:most]), labels[:most]
    return parts


# ------------------------------------------------------------------------------------------- what is measured


def finish(
    training: Training, made: Recipe, data: Mapping[str, Data], *, probes: int, size: int
) -> dict[str, Any]:  # fmt: skip
    """The course of the damping, and at the end of a flat run what few batches say of the noise."""
    found: dict[str, Any] = {"mean_damping": DAMPING, "last_damping": DAMPING}
    if training.damping is not None and training.damping.history:
        history = training.damping.history
        found["mean_damping"] = _short(mean_damping(history, training.damping.starts[0], training.steps))
        found["last_damping"] = _short(history[-1]["damping"])
        ends = [entry["damping"] for entry in history]
        found["at_bound"] = _short(sum(not LEAST < end < MOST for end in ends) / len(ends))
        if "reduction_ratio" in history[0]:
            ratios = sorted(entry["reduction_ratio"] for entry in history if not math.isnan(entry["reduction_ratio"]))
            found["median_ratio"] = _short(ratios[len(ratios) // 2]) if ratios else math.nan
            found["refreshes"], found["told"] = len(history), len(ratios)
        some = history[:: -(-len(history) // MOST_POINTS)]
        found["damping_step"] = [int(entry["step"]) for entry in some]
        found["damping"] = [_short(entry["damping"]) for entry in some]
    if made.name == FLAT and not training.diverged:
        found["noise"] = few_batches(training.model, data["train"], made.seed, probes, size)
    return found


def few_batches(model: nn.Module, data: Data, seed: int, probes: int, size: int) -> dict[str, Any]:
    """The noise Tr X^2 / P of a batch from some batches, beside that from all batches of the data.

    Args:
        model: Whose Hessian it is.
        data: Cut into batches at random, each image in one.
        seed: Of batches, probes and draws.
        probes: Common to all batches.
        size: Of a batch.

    Returns:
        "all", from all batches and probes; "probes", the standard deviation of one probe over "all"; "sizes" and, for
        each number of batches, "batches", the root mean square of what an estimate of one probe is off from that of the
        same probe with all batches, and "both", from "all"; "own", the standard deviation of one batch cut in halves
        with a probe of its own, over "all".

    Example:
        >>> X, y = torch.rand(64, 4), torch.arange(64) % 3
        >>> found = few_batches(nn.Linear(4, 3), (X, y), seed=0, probes=2, size=4)
        >>> found["sizes"], found["batches"][-1] < found["batches"][0]
        ([2, 4, 8, 15], True)
    """
    order = random_permutation(len(data[0]), ("few batches", seed), data[0].device)
    number = len(order) // size
    parts = [(data[0][rows], data[1][rows]) for rows in order[: number * size].split(size)]
    risk = Risk(model, nn.CrossEntropyLoss(), data, plan=Plan(route="reverse"))
    vectors = Hessian(risk).probes(range(probes), seed) / math.sqrt(risk.space.dim)
    images = torch.stack([Hessian(risk.on([part])).rows(vectors) for part in parts], 1).double()  # (probes, n, P)
    images -= images.mean(1, keepdim=True)
    gram = images @ images.mT
    whole = _variances(gram, torch.arange(number)[None])[:, 0]
    mean = float(whole.mean())
    sizes = [n for n in (2, 4, 8, 16, 32, 79) if n < number] if number > 79 else [2, 4, 8, number - 1]
    found: dict[str, Any] = {"all": _short(mean), "batches_in_all": number, "size": size, "sizes": sizes}
    found["probes"] = _short(float(whole.std() / mean))
    found |= {"batches": [], "both": []}
    with isolated_rng(seed):
        for n in sizes:
            draws = torch.stack([torch.randperm(number)[:n] for _ in range(DRAWS)])
            some = _variances(gram, draws)
            found["batches"].append(_short(float((some / whole[:, None] - 1).square().mean().sqrt())))
            found["both"].append(_short(float((some / mean - 1).square().mean().sqrt())))
    stream = Stream(risk, seed=seed)
    for index, part in enumerate(parts):
        stream.add(part, index)
    own = torch.tensor([sample[0] / size for sample in stream.samples], dtype=torch.float64)
    return {**found, "own": _short(float(own.std() / mean)), "own_mean": _short(float(own.mean()))}


def _variances(gram: Tensor, draws: Tensor) -> Tensor:
    """The variance between drawn batches, (probes, draws), from the inner products of all."""
    found = []
    for rows in draws:
        part = gram[:, rows][:, :, rows]
        sums = part.diagonal(dim1=1, dim2=2).sum(1) - part.sum((1, 2)) / len(rows)
        found.append(sums / (len(rows) - 1))
    return torch.stack(found, 1)


def plain(label: str, run: Finished) -> dict[str, Any]:
    """A run as a row; "lost" is one that was given up, "at chance" one that ended there."""
    ends = [row for row in run.rows if "test/accuracy" in row]
    row: dict[str, Any] = {
        "arm": label, "seed": run.seed, "stop": run.stop, "steps": run.steps, "run_seconds": _short(run.seconds),
        "epoch": [int(end["epoch"]) for end in ends], "seconds": [_short(end["seconds"]) for end in ends],
        "train_loss": [_short(end["train/loss"]) for end in ends],
    }  # fmt: skip
    for name in ("train", "test"):
        row[f"{name}_accuracy"] = [_short(100 * end[f"{name}/accuracy"]) for end in ends]
    last = row["train_accuracy"][-1] if ends else 0.0
    row["state"] = "lost" if run.stop != "finished" else "trained" if last >= 2 * CHANCE else "at chance"
    return {**row, **run.found}
