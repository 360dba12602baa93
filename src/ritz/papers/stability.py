"""The stability bounds of seed 000, section 4, and its theorem 2, on networks that are trained.

The section quotes: gradient descent at rate a must find lambda_1 <= 2 / a, and SGD minima that are flatter still. The
second bound came out garbled in print; it follows from E |w_{t+1}|^2 <= |w_t|^2 for the linearised dynamics of Wu et
al. (2018), (1 - a lambda_1)^2 + a^2 v <= 1, v = lambda_1(Var), Var = E X^2 the variance of the batch Hessian H + X:

    lambda_1 <= (1 + sqrt(1 - a^2 v)) / a,        and there is no stable point where a^2 v > 1

With momentum b the first is 2 (1 + b) / a, which is not in the paper. All are about points where training stands
still. Here the network of 9,960 parameters and softmax regression are trained on some thousand images of MNIST at
several constant rates, by full batches and by batches of 128 and 16; lambda_1 is followed along the way, and Var is
measured at the half and the end. The learning rate of the papers' own runs falls by 100, and one such run is beside.

Theorem 2, on the extreme Ritz value, is judged in `stability_ritz` on the same networks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..operators.base import full_precision
from ..operators.hessian import Hessian
from ..risk import Params, Risk
from . import mnist_mlp, softmax
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .mnist_mlp import Make, batch_order, gradients, learning_rate, starts, update
from .pieces import Pieces
from .stability_noise import HessianVariance, top_ritz_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETWORKS: dict[str, Make] = {"MLP": mnist_mlp.make_network, "softmax": softmax.make_network}


@dataclass(frozen=True)
class Descent:
    """One way to train: its network, the size of its batches (0: all images), momentum, and rates side by side."""

    network: str
    batch: int
    momentum: float
    rates: tuple[float, ...]


DESCENTS = (
    Descent("MLP", 0, 0.0, (0.025, 0.05, 0.1, 0.2)),
    Descent("MLP", 0, 0.9, (0.0125, 0.025, 0.05)),
    Descent("softmax", 0, 0.0, (0.05, 0.1, 0.2)),
    Descent("MLP", 128, 0.0, (0.025, 0.05, 0.1)),
    Descent("MLP", 16, 0.0, (0.025, 0.05, 0.1)),
    Descent("softmax", 128, 0.0, (0.05, 0.1, 0.2)),
)


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """All descents, the run whose rate falls, and the Ritz values; then the claims."""
    from . import stability_claims, stability_ritz

    num = setting.pick(64, 2000, 5000)
    (X, y), _, _ = mnist_mlp.load_mnist(setting.data, setting.device)
    data = X[:num], y[:num]
    seeds = tuple(setting.seed_range(2, 4, 4))
    steps, every = setting.pick(4, 800, 2000), setting.pick(2, 40, 50)
    rows, pieces = list[dict[str, Any]](), Pieces(setting, "stability")
    few = tuple(replace(descent, rates=descent.rates[:1]) for descent in DESCENTS[::2])
    for descent in DESCENTS if setting.budget != "smoke" else few:
        name = f"{descent.network}, batches of {descent.batch or num}, momentum {descent.momentum:g}"
        work = partial(descend, descent, seeds=seeds, steps=steps, every=every, lanczos_steps=setting.pick(4, 15, 15))
        rows += pieces.keep(name, work, data, progress=partial(progress, f"steps, {name}"))
    work = partial(falling, seeds=seeds, epochs=setting.pick(1, 50, 50))
    rows += pieces.keep("a rate that falls", work, data)
    progress("Ritz values", 0, 1)
    work = partial(stability_ritz.study, seeds=seeds, num_steps=setting.pick(4, 24, 24), epochs=setting.pick(1, 20, 20))
    rows += pieces.keep("Ritz values", work, data)
    return rows, stability_claims.claims(rows)


@full_precision()
def descend(
    descent: Descent, data: Data, seeds: Sequence[int], steps: int, every: int, *, lanczos_steps: int = 20,
    progress: mnist_mlp.Progress | None = None,
) -> Rows:  # fmt: skip
    """Train every seed at every rate, all at once; lambda_1 and loss every `every` steps, Var at the half and the end.

    The rate is constant, there is no weight decay, and a last short batch is left out.

    Returns:
        For each network a row with the curves, by step.

    Example:
        >>> X, y = torch.linspace(-1, 1, 20 * 784).reshape(20, 784), torch.arange(20) % 10
        >>> rows = descend(Descent("softmax", 0, 0.0, (0.001, 0.002)), (X, y), seeds=[0], steps=2, every=1)
        >>> [row["rate"] for row in rows], rows[0]["step"], rows[0]["loss"][2] < rows[0]["loss"][0]
        ([0.001, 0.002], [0, 1, 2], True)
    """
    X, y = data
    if not 0 <= descent.batch <= len(X):
        raise ValueError(f"batches must have 0 (all) to {len(X)} images, got {descent.batch}")
    make, lead = NETWORKS[descent.network], (len(seeds), len(descent.rates))
    weights = starts(make, X, seeds, lead[1])
    rates = torch.tensor(descent.rates, dtype=X.dtype, device=X.device)
    if not descent.batch:  # all share all images: one stack of copies, one product with the images
        weights = {name: w.flatten(0, 1)[None] for name, w in weights.items()}
        rates = rates.repeat(lead[0])
    velocity = {name: torch.zeros_like(w) for name, w in weights.items()}
    risk = Risk(make(0, X.dtype).to(X.device), nn.CrossEntropyLoss(), data, batch_size=5000)
    pieces = risk.on(data, batch_size=500)  # each sample has a vector of its own there
    rows: Rows = [
        {"kind": "descent", "network": descent.network, "batch": descent.batch, "momentum": descent.momentum,
         "rate": rate, "seed": seed, "images": len(X), "step": [], "lambda_max": [], "loss": [], "variance": []}
        for seed in seeds for rate in descent.rates
    ]  # fmt: skip
    batches = _batches(X, y, seeds, descent.batch)
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            late = step == steps or abs(2 * step - steps) < every  # the half and the end
            for row, params in zip(rows, _each(weights, lead), strict=True):
                _look(row, risk.at(params), step, lanczos_steps)
                if late and descent.batch:
                    _look_at_noise(row, pieces.at(params), lanczos_steps)
            if progress is not None:
                progress(step, steps)
        if step < steps:
            grads = gradients(weights, *next(batches))
            update(weights, velocity, grads, rates, torch.zeros_like(rates), descent.momentum)
    return rows


def _batches(X: Tensor, y: Tensor, seeds: Sequence[int], size: int) -> Iterator[Data]:
    """Batches (seeds, size, ...), epoch by epoch and without end; size 0 is all images, the same for all seeds."""
    epoch = 0
    while True:
        if size:
            order = torch.stack([batch_order(len(X), seed, epoch, X.device) for seed in seeds])
            yield from ((X[rows], y[rows]) for rows in order.split(size, dim=1) if rows.shape[1] == size)
        else:
            yield X[None], y[None]
        epoch += 1


def _each(weights: Mapping[str, Tensor], lead: tuple[int, int]) -> Iterator[Params]:
    """The weights of each network, by seed and then by rate."""
    stacks = {name: w.reshape(lead[0] * lead[1], *w.shape[2:]) for name, w in weights.items()}
    for at in range(lead[0] * lead[1]):
        yield {name: stack[at] for name, stack in stacks.items()}


def _look(row: dict[str, Any], risk: Risk, step: int, lanczos_steps: int) -> None:
    """lambda_1 and the loss on the way; NaN where the weights have left all bounds."""
    alive = all(bool(p.isfinite().all()) for p in risk.params().values())
    loss = risk.loss() if alive else math.nan
    row["step"].append(step)
    row["loss"].append(short(loss, 5))
    row["lambda_max"].append(
        short(top_ritz_value(Hessian(risk), lanczos_steps), 5) if math.isfinite(loss) else math.nan
    )


def _look_at_noise(row: dict[str, Any], risk: Risk, lanczos_steps: int) -> None:
    """(step, lambda_1, v); Var has few directions of note, and half the steps find the first."""
    alive = math.isfinite(row["loss"][-1])
    noise = top_ritz_value(HessianVariance(risk, row["batch"]), max(lanczos_steps // 2, 1)) if alive else math.nan
    row["variance"].append([row["step"][-1], row["lambda_max"][-1], short(noise, 5)])


def falling(data: Data, seeds: Sequence[int], epochs: int) -> Rows:
    """The MLP trained as the papers train it, at a rate that falls by 100: lambda_1 where it ends.

    Example:
        >>> X, y = torch.linspace(-1, 1, 20 * 784).reshape(20, 784), torch.arange(20) % 10
        >>> (row,) = falling((X, y), seeds=[0], epochs=10)
        >>> row["first rate"] / row["rate"]
        100.0
    """
    trained = mnist_mlp.train_many(data, seeds, (0.0,), epochs=epochs)
    model = mnist_mlp.make_network(0, data[0].dtype).to(data[0].device)
    risk = Risk(model, nn.CrossEntropyLoss(), data, batch_size=5000)
    return [
        {"kind": "falling", "network": "MLP", "batch": 128, "momentum": 0.9, "seed": seed, "images": len(data[0]),
         "rate": learning_rate(epochs - 1, epochs), "first rate": learning_rate(0, epochs),
         "lambda_max": short(top_ritz_value(Hessian(risk.at(trained.params(seed, 0.0))), 20), 5)}
        for seed in seeds
    ]  # fmt: skip


def figure(rows: Rows) -> "Figure":
    """lambda_1 over its bound along training, a panel for each way to train."""
    from .stability_figure import draw

    return draw(rows)
