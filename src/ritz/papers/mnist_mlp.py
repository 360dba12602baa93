"""The network of 9,960 parameters on MNIST: table 1 of seed 002 and figure 2 of seed 000, over many seeds.

784-10-100-10 with ReLU, cross-entropy, SGD with momentum 0.9 on batches of 128 for 50 epochs, weight decay 0, 1e-4 and
5e-4 on all parameters. The papers say "a single hidden layer MLP", "a hidden layer of 100 units, parameter count 9960":
784-100-10 has 79,510 parameters, 784-10-100-10 has the 9,960 and is what we train. The size of a batch is ours, and so
are the images: the papers do not say on how many they train this network (seed 000 has 45,000 + 5,000 for softmax
regression), we train on 55,000.

The papers train each once. Here every seed gives a start and an order of batches that all its weight decays share, so
that they are compared at equal seed, and the spread between seeds says how far one more run may fall from the mean:

    mean +- t_(n-1) s sqrt(1 + 1 / n)        the prediction interval of `mnist_mlp_claims`

All networks are trained at once, as stacks of weights. H is the Hessian of the training loss without the penalty, on
all 55,000 training images. The papers' columns "Tr H" and "Tr H^2" are divided by P: undivided, their Tr H^2 would be
below lambda_1^2 in every row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import isolated_rng
from ..checkpoint import Checkpoint, Saved, State, Unsaved
from ..estimators.spectrum import spectrum
from ..fingerprints import mark
from ..measures.gap import gap, on_test_data, on_training_data
from ..measures.outputs import Outputs, sample_outputs
from ..operators.base import full_precision
from ..operators.hessian import Hessian
from ..plan import Plan
from ..results import Estimate, affine, derived
from ..risk import Params, Risk
from ..space import random_permutation
from .data.images import Data, load_images
from .pieces import Pieces
from .recipe import describe

Progress = Callable[[int, int], None]  # (done, total)
Make = Callable[[int, torch.dtype], nn.Sequential]  # seed and precision to a network of Linear layers, ReLU between

NUM_TRAIN = 55_000  # of the 60,000; the last 5,000 are held out
WEIGHT_DECAYS = (0.0, 1e-4, 5e-4)
LANCZOS_STEPS = 8  # of each probe: three are exact for Tr H^4, and lambda_1 is of the locked head

# what a row has, in the order of the table, and what it means
MEANING = {
    "weight_norm": "Euclidean norm of all weights and biases, not squared",
    "lambda_max": "largest eigenvalue of the Hessian of the training loss, penalty left out",
    "trace_per_param": "Tr H / P",
    "moment2_per_param": "Tr H^2 / P",
    "train_accuracy": "%, of the training images",
    "val_accuracy": "%, of the last 5,000 of the 60,000",
    "test_accuracy": "%, of the 10,000 test images",
    "train_loss": "mean cross-entropy of the training images",
    "gap_loss": "loss of the last 5,000 - training loss",
    "gap_error": "error of the last 5,000 - training error, percentage points",
    "gap_loss_test": "loss of the test images - training loss",
    "gap_error_test": "error of the test images - training error, percentage points",
    "metric_a": "|w| / 2 (what the tables of seed 002 hold)",
    "metric_a_eq7": "Tr H + |w|^2 / 2 (seed 002, equation 7)",
    "trace_probe": "standard deviation of Tr H / P by one random vector, sqrt(2 Tr H^2) / P",
    "moment2_probe": "standard deviation of Tr H^2 / P by one random vector, sqrt(2 Tr H^4) / P",
}


# -------------------------------------------------------------------------------------------------- data


def load_mnist(
    root: Path | str | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Data, Data, Data]:
    """MNIST as (first 55,000, last 5,000 of the training set, test set), pixels mapped to [-1, 1], images flat.

    Args:
        root: A folder in torchvision's layout, with MNIST/raw/*-ubyte or *-ubyte.gz; None takes RITZ_DATA.
        device, dtype: Where to put the images and in which precision.

    Raises:
        FileNotFoundError: If the files are not there.

    Example:
        >>> load_mnist("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz is in nowhere/MNIST/raw; ...
    """
    (X, y), test = load_images("MNIST", root, device, dtype)
    return (X[:NUM_TRAIN], y[:NUM_TRAIN]), (X[NUM_TRAIN:], y[NUM_TRAIN:]), test


# ---------------------------------------------------------------------------------------------- training


def make_network(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """784-10-100-10 with ReLU, PyTorch's own initialisation from a seed.

    Example:
        >>> sum(p.numel() for p in make_network(0).parameters())
        9960
    """
    with isolated_rng(seed):
        layers = [nn.Linear(a, b, dtype=dtype) for a, b in ((784, 10), (10, 100), (100, 10))]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def learning_rate(epoch: int, epochs: int, lr: float = 0.01, ratio: float = 0.01) -> float:
    """The papers' schedule (seed 000, A.2): lr up to half of training, linearly to `ratio` lr at 90 %, then constant.

    Example:
        >>> [round(learning_rate(epoch, 50), 6) for epoch in (0, 25, 35, 45, 49)]
        [0.01, 0.01, 0.00505, 0.0001, 0.0001]
    """
    return lr * (1 - (1 - ratio) * min(max((epoch / epochs - 0.5) / 0.4, 0.0), 1.0))


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """Networks of every seed and weight decay, as stacks of weights (seeds, weight decays, *shape).

    Example:
        >>> trained = Trained(seeds=(4, 7), weight_decays=(0.0,), weights={"b": torch.tensor([[[1.0]], [[2.0]]])})
        >>> trained.params(seed=7, weight_decay=0.0)
        {'b': tensor([2.])}
    """

    seeds: tuple[int, ...]
    weight_decays: tuple[float, ...]
    weights: Mapping[str, Tensor]

    def params(self, seed: int, weight_decay: float) -> Params:
        """The weights of one network, by the names of its own."""
        at = self.seeds.index(seed), self.weight_decays.index(weight_decay)
        return {name: stack[at] for name, stack in self.weights.items()}


@full_precision()
def train_many(
    data: Data,
    seeds: Sequence[int],
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
    *,
    epochs: int = 50,
    lr: float = 0.01,
    momentum: float = 0.9,
    batch_size: int = 128,
    make: Make = make_network,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train a network for every seed and weight decay, all at once, where the data is and in its precision.

    v <- momentum v + grad + weight_decay w,  w <- w - lr v, weights and biases alike: what torch.optim.SGD does to each
    network alone. A seed gives a start and, by a keyed permutation for each epoch, an order of batches.

    Args:
        data: Images (N, inputs), 784 for the default network, and labels (N,).
        seeds: One or more, all different.
        weight_decays: One or more, none negative, all different.
        epochs, lr, momentum, batch_size: Of SGD; the rate falls as `learning_rate` says. A last short batch is kept.
        make: The network of a seed: Linear layers with ReLU between them.
        checkpoint: Where the state is kept between epochs. The same call resumes, and ends in the same weights.
        progress: Called as progress(epochs done, epochs).

    Raises:
        ValueError: If an argument is out of range, the data does not fit the network, or the checkpoint is of another
            run.

    Example:
        >>> X, y = torch.linspace(-1, 1, 20 * 784).reshape(20, 784), torch.arange(20) % 10
        >>> trained = train_many((X, y), seeds=(0, 1), weight_decays=(0.0, 0.1), epochs=2, batch_size=8)
        >>> trained.weights["2.weight"].shape  # (seeds, weight decays, out, in)
        torch.Size([2, 2, 100, 10])
        >>> first, second = (trained.params(0, decay)["0.weight"].norm() for decay in (0.0, 0.1))
        >>> bool(second < first)
        True
    """
    X, y = data
    _check(data, seeds, weight_decays, epochs, batch_size, next(make(0, X.dtype).parameters()).shape[1])
    settings = {
        "seeds": list(seeds), "weight_decays": list(weight_decays), "epochs": epochs, "lr": lr, "momentum": momentum,
        "batch_size": batch_size,
    }  # fmt: skip
    weights = starts(make, X, seeds, len(weight_decays))
    velocity = {name: torch.zeros_like(w) for name, w in weights.items()}
    decays = torch.tensor(weight_decays, dtype=X.dtype, device=X.device)
    done = 0

    def state() -> State:
        return {"epoch": done, "weights": weights, "velocity": velocity}, {}

    with _opened(checkpoint, data, make, settings) as saved:
        if saved.latest is not None:
            done = saved.latest["epoch"]
            for stacks, kept in ((weights, saved.latest["weights"]), (velocity, saved.latest["velocity"])):
                stacks.update({name: w.to(X.device) for name, w in kept.items()})
        left = range(done, epochs)
        for epoch in left:
            rates = torch.full_like(decays, learning_rate(epoch, epochs, lr))
            order = torch.stack([batch_order(len(X), seed, epoch, X.device) for seed in seeds])  # (seeds, N)
            for rows in order.split(batch_size, dim=1):
                update(weights, velocity, gradients(weights, X[rows], y[rows]), rates, decays, momentum)
            done = epoch + 1
            saved.offer(state)
            if progress is not None:
                progress(done, epochs)
        if left:
            saved.write(*state())
    return Trained(seeds=tuple(seeds), weight_decays=tuple(weight_decays), weights=MappingProxyType(weights))


def _opened(
    checkpoint: Checkpoint | None, data: Data, make: Make, settings: Mapping[str, Any]
) -> AbstractContextManager[Saved]:
    """The state of this very training."""
    if checkpoint is None:
        return nullcontext(Unsaved())
    images, labels = (mark([part]) for part in data)
    of = {"images": images, "labels": labels, "make": describe(make, "make")}
    return checkpoint.open({"call": "train_many", **of, "settings": settings})


def starts(make: Make, like: Tensor, seeds: Sequence[int], copies: int) -> Params:
    """Every seed's initial weights, `copies` times each, as stacks (seeds, copies, *shape).

    Example:
        >>> stacks = starts(make_network, torch.empty(0), seeds=(0, 1), copies=3)
        >>> stacks["0.bias"].shape, bool((stacks["0.bias"][:, 0] == stacks["0.bias"][:, 2]).all())
        (torch.Size([2, 3, 10]), True)
    """
    networks = [make(seed, like.dtype).state_dict() for seed in seeds]
    stacks = {name: torch.stack([start[name] for start in networks])[:, None] for name in networks[0]}
    return {
        name: stack.expand(-1, copies, *stack.shape[2:]).contiguous().to(like.device) for name, stack in stacks.items()
    }


def gradients(weights: Mapping[str, Tensor], X: Tensor, y: Tensor) -> Params:
    """Gradients of the mean cross-entropy of every network on the batch of its seed, by the chain rule.

    With inputs h_l of layer l and delta = (softmax - one-hot) / batch at the end, dW_l = delta' h_l, db_l = sum delta,
    and delta goes back as (delta W_l) 1[h_l > 0].

    Args:
        weights: Stacks (seeds, copies, *shape) of Linear layers in their order, each a weight and then a bias.
        X, y: A batch for each seed, (seeds, batch, inputs) and (seeds, batch).

    Example:
        >>> weights = {"weight": torch.zeros(1, 1, 2, 1), "bias": torch.zeros(1, 1, 2)}
        >>> found = gradients(weights, torch.tensor([[[3.0]]]), torch.tensor([[0]]))
        >>> found["weight"].flatten().tolist(), found["bias"].flatten().tolist()
        ([-1.5, 1.5], [-0.5, 0.5])
    """
    names = list(weights)
    layers = list(zip(names[::2], names[1::2], strict=True))
    first, first_bias = layers[0]
    shape = weights[first].shape[1:3]  # (copies, outputs): the copies of a seed share their batch, and so one product
    z = (X @ weights[first].flatten(1, 2).mT).unflatten(2, shape).transpose(1, 2) + weights[first_bias][:, :, None]
    inputs = []
    for weight, bias in layers[1:]:
        inputs.append(z.relu())
        z = inputs[-1] @ weights[weight].mT + weights[bias][:, :, None]
    delta = z.softmax(-1)  # (seeds, copies, batch, classes)
    delta.scatter_(-1, y[:, None, :, None].expand(*delta.shape[:-1], 1), -1.0, reduce="add").div_(y.shape[1])
    found: Params = {}
    for (weight, bias), h in zip(layers[:0:-1], inputs[::-1], strict=True):
        found[weight], found[bias] = delta.mT @ h, delta.sum(2)
        delta = (delta @ weights[weight]) * (h > 0)
    found[first] = (delta.transpose(1, 2).flatten(2).mT @ X).unflatten(1, shape)
    found[first_bias] = delta.sum(2)
    return found


def update(
    weights: Params, velocity: Params, grads: Mapping[str, Tensor], rates: Tensor, decays: Tensor, momentum: float
) -> None:
    """One step of SGD on stacks, in place; the copies of a seed have rates and weight decays of their own, (copies,).

    Example:
        >>> weights, velocity = {"b": torch.tensor([[[1.0], [1.0]]])}, {"b": torch.zeros(1, 2, 1)}
        >>> update(weights, velocity, {"b": torch.ones(1, 2, 1)}, torch.tensor([0.5, 0.25]), torch.zeros(2), 0.9)
        >>> weights["b"].flatten().tolist()
        [0.5, 0.75]
    """
    for name, w in weights.items():
        rate, decay = (x.view(1, -1, *[1] * (w.ndim - 2)) for x in (rates, decays))
        velocity[name].mul_(momentum).add_(grads[name]).addcmul_(w, decay)
        w.addcmul_(velocity[name], rate, value=-1)


def batch_order(num: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
    """The order in which a network of this seed sees the samples in this epoch, the same on every device.

    Example:
        >>> batch_order(5, seed=0, epoch=0).sort().values.tolist()
        [0, 1, 2, 3, 4]
    """
    return random_permutation(num, ("mnist_mlp order", seed, epoch), device)


def _check(
    data: Data, seeds: Sequence[int], weight_decays: Sequence[float], epochs: int, batch_size: int, width: int
) -> None:
    X, y = data
    if X.ndim != 2 or X.shape[1] != width or y.shape != X.shape[:1] or not len(X):
        raise ValueError(f"expected images (N, {width}) and labels (N,), got {tuple(X.shape)} and {tuple(y.shape)}")
    if y.is_floating_point() or int(y.min()) < 0 or int(y.max()) > 9:
        raise ValueError(f"labels must be integers from 0 to 9, got {y.dtype} from {y.min()} to {y.max()}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"expected one or more seeds, all different, got {tuple(seeds)}")
    if not weight_decays or len(set(weight_decays)) < len(weight_decays) or min(weight_decays) < 0:
        raise ValueError(f"expected weight decays of at least 0, all different, got {tuple(weight_decays)}")
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs and batch_size must be at least 1, got {epochs} and {batch_size}")


# ------------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One network and what was measured on it, by the keys of `MEANING`."""

    seed: int
    weight_decay: float
    values: Mapping[str, Estimate]


def measure_rows(
    trained: Trained, train: Data, val: Data, test: Data, *, num_steps: int = LANCZOS_STEPS, num_probes: int = 8,
    batch_size: int = 5000, make: Make = make_network, pieces: Pieces | None = None, progress: Progress | None = None,
) -> tuple[Row, ...]:  # fmt: skip
    """One row for each network: the curvature from one Lanczos run on all of `train`, the rest from forward passes.

    Probes are the same for all networks, so that their differences are paired.

    Args:
        trained: The networks.
        train, val, test: Data; the Hessian is that of the loss on `train`.
        num_steps, num_probes: Of `ritz.spectrum`; three steps or more, for Tr H^4. More steps change no row; the
            spectrum as the papers show it, by 100 steps, is that of `softmax.stems`.
        batch_size: Images in one product; memory, not numbers.
        make: What made the networks.
        pieces: Where the row of each network is kept.
        progress: Called as progress(networks done, networks).

    Raises:
        ValueError: For fewer than three steps.

    Example:
        >>> data = torch.eye(784)[:4], torch.arange(4)
        >>> trained = train_many(data, seeds=[0], weight_decays=[0.0], epochs=1)
        >>> (row,) = measure_rows(trained, data, data, data, num_steps=3, num_probes=2)
        >>> row.values["gap_loss"].value, row.values["weight_norm"].exact
        (0.0, True)
    """
    if num_steps < 3:
        raise ValueError(f"num_steps must be at least 3, got {num_steps}: two steps do not give Tr H^4")
    keep = (pieces or Pieces()).keep
    measure = partial(measure_network, num_steps=num_steps, num_probes=num_probes, batch_size=batch_size, make=make)
    pairs = [(seed, weight_decay) for seed in trained.seeds for weight_decay in trained.weight_decays]
    rows: list[Row] = []
    for seed, weight_decay in pairs:
        name, params = f"seed {seed}, weight decay {weight_decay:g}", trained.params(seed, weight_decay)
        values = keep(name, measure, params, train, val, test)
        rows.append(Row(seed=seed, weight_decay=weight_decay, values=MappingProxyType(values)))
        if progress is not None:
            progress(len(rows), len(pairs))
    return tuple(rows)


def measure_network(
    params: Params, train: Data, val: Data, test: Data, *, num_steps: int, num_probes: int, batch_size: int, make: Make
) -> dict[str, Estimate]:
    """What is measured of one network, by the keys of `MEANING`; the arguments are those of `measure_rows`."""
    model = make(0, train[0].dtype).to(train[0].device)
    risk = Risk(model, nn.CrossEntropyLoss(), train, batch_size=batch_size, plan=Plan(route="reverse")).at(params)
    held_out = {name: sample_outputs(risk.on(data, batch_size)) for name, data in (("val", val), ("test", test))}
    found = _curvature(risk, num_steps, num_probes) | _fit(sample_outputs(risk), held_out)
    return {key: replace(found[key], name=key, convention=MEANING[key]) for key in MEANING}


def _curvature(risk: Risk, num_steps: int, num_probes: int) -> dict[str, Estimate]:
    """What follows from the weights and one run with the Hessian."""
    found = spectrum(Hessian(risk), num_steps, num_probes)
    norm = math.sqrt(sum(float(p.double().square().sum()) for p in risk.params().values()))

    def one_probe(moment: float) -> float:
        """Standard deviation of v'Av / P for one random v, with Tr A^2 = `moment`."""
        return math.sqrt(2 * moment) / found.dim

    return {
        "weight_norm": _known(norm),
        "metric_a": _known(norm / 2),
        "metric_a_eq7": affine(found.trace, 1.0, norm**2 / 2),
        "lambda_max": found.lambda_max,
        "trace_per_param": affine(found.trace, 1 / found.dim),
        "moment2_per_param": affine(found.moment(2), 1 / found.dim),
        "trace_probe": derived("", one_probe, found.moment(2)),
        "moment2_probe": derived("", one_probe, found.moment(4)),
    }


def _fit(train: Outputs, held_out: Mapping[str, Outputs]) -> dict[str, Estimate]:
    """Accuracy and gaps; what was trained on is known, what was held out stands for all images to come."""
    loss, error = on_training_data(train, "loss"), on_training_data(train, "error")
    found = {"train_loss": loss, "train_accuracy": affine(error, -100.0, 100.0)}
    for name, other in held_out.items():
        suffix = "" if name == "val" else f"_{name}"
        mistakes = on_test_data(other, "error")
        found[f"{name}_accuracy"] = affine(mistakes, -100.0, 100.0)
        found[f"gap_error{suffix}"] = affine(gap(error, mistakes), 100.0)
        found[f"gap_loss{suffix}"] = gap(loss, on_test_data(other, "loss"))
    return found


def _known(value: float) -> Estimate:
    """A number that nothing was sampled for."""
    return Estimate(name="", value=value, exact=True)
