"""Section 6 of seed 002 on a network that a CPU trains: a grid of eta in L + eta Tr G, and Tr H in the place of Tr G.

The paper searches eta over 1e-4, 3e-4 and 5e-4 with one seed, by validation accuracy, for WideResNet-28-10 on CIFAR-100
at its best weight decay, and shows table 7 for the best. Here the network is the MLP of table 1, 9,960 parameters on
MNIST, with the split and the recipe of `mnist_mlp`: a stand-in, whose answers are its own. eta is 0 and five values
from 1e-5 to 1e-2, weight decay 0 and 5e-4, every seed has all of them from one start and with one order of batches, and
differences are taken at equal seed. The best eta is chosen by the mean accuracy on the 5,000 images held out, and what
is said of it is measured on the 10,000 test images, which choose nothing.

The penalty is `ritz.optim.TracePenalty`, one draw of signs on the whole of each batch, as in the paper. All networks of
one eta are one module, whose outputs are (batch, classes, seeds, weight decays): the trace of a sum of networks that
share no weight is the sum of their traces, and its gradient in the weights of one is that of its own trace.

The paper has Tr G for Tr H since training on Tr H diverged. One arm trains on Tr H at eta = 1e-3, and
`penalty_identity` compares the two traces, and their gradients, in double precision.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..estimators.samples import sample_traces
from ..operators.base import full_precision
from ..optim.penalty import Form, TracePenalty
from ..reading import read_tensors
from ..risk import Params, Risk
from ..storage import load, save
from . import mnist_mlp, penalty_identity
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .loop import evaluate
from .mnist_mlp import Trained
from .penalty_grid_claims import FORM_ETA, claims

DECAYS = (0.0, 5e-4)
ETAS = (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 1e-2)
ARMS: tuple[tuple[float, Form], ...] = (*((eta, "ggn") for eta in ETAS), (FORM_ETA, "hessian"))


class Stack(nn.Module):
    """The networks of several seeds and weight decays as one, which share the batch of their seed.

    Args:
        weights: Stacks (seeds, copies, *shape) of Linear layers in their order, as `mnist_mlp.starts` has them; the
            parameters are these tensors and no copies.

    Example:
        >>> weights = mnist_mlp.starts(mnist_mlp.make_network, torch.empty(0), seeds=(0, 1), copies=3)
        >>> Stack(weights)(torch.zeros(5, 2, 784)).shape  # (batch, seeds, 784) to (batch, classes, seeds, copies)
        torch.Size([5, 10, 2, 3])
    """

    def __init__(self, weights: Params) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights.values())

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all networks, the batch first and then the classes."""
        weights = list(self.weights)  # and no slices of the list, which would hold parameters of their own
        (first, bias), *others = zip(weights[::2], weights[1::2], strict=True)
        shape = first.shape[1:3]
        z: Tensor = (x.transpose(0, 1) @ first.flatten(1, 2).mT).unflatten(2, shape).transpose(1, 2) + bias[:, :, None]
        for weight, bias in others:
            z = z.relu() @ weight.mT + bias[:, :, None]
        return z.permute(2, 3, 0, 1)


@full_precision()
def train_penalised(
    data: Data, seeds: Sequence[int], eta: float, form: Form = "ggn", weight_decays: Sequence[float] = DECAYS, *,
    epochs: int = 50, batch_size: int = 128, progress: mnist_mlp.Progress | None = None,
) -> Trained:  # fmt: skip
    """`mnist_mlp.train_many` with eta Tr G, or eta Tr H, added to the loss; with eta = 0 it is that function's result.

    Args:
        data: Images (N, 784) and labels.
        seeds: Of starts and orders of batches, as there.
        eta, form: Of the penalty; one draw for a batch, of all of it.
        weight_decays: Of the networks of a seed.
        epochs, batch_size: As there; rate and momentum are its defaults.
        progress: Called as progress(epochs done, epochs).

    Example:
        >>> X, y = torch.linspace(-1, 1, 20 * 784).reshape(20, 784), torch.arange(20) % 10
        >>> trained = train_penalised((X, y), [0], 0.1, epochs=2, batch_size=8)
        >>> trained.weights["2.weight"].shape  # (seeds, weight decays, out, in)
        torch.Size([1, 2, 100, 10])
    """
    X, y = data
    weights = mnist_mlp.starts(mnist_mlp.make_network, X, seeds, len(weight_decays))
    velocity = {name: torch.zeros_like(w) for name, w in weights.items()}
    model, penalty = Stack(weights), TracePenalty(eta, 1.0, form, class_dim=1)
    decays = torch.tensor(weight_decays, dtype=X.dtype, device=X.device)
    networks = len(seeds) * len(weight_decays)
    for epoch in range(epochs):
        rates = torch.full_like(decays, mnist_mlp.learning_rate(epoch, epochs))
        order = torch.stack([mnist_mlp.batch_order(len(X), seed, epoch, X.device) for seed in seeds])
        for rows in order.split(batch_size, dim=1):
            images, labels = X[rows], y[rows]
            grads = mnist_mlp.gradients(weights, images, labels)
            if eta:
                each = labels.T[:, :, None].expand(-1, -1, len(weight_decays))
                term = networks * penalty(model, images.transpose(0, 1), each)  # a mean over networks too
                own = torch.autograd.grad(term, list(model.parameters()))
                grads = {name: grads[name] + extra for name, extra in zip(weights, own, strict=True)}
            mnist_mlp.update(weights, velocity, grads, rates, decays, 0.9)
        if progress is not None:
            progress(epoch + 1, epochs)
    return Trained(seeds=tuple(seeds), weight_decays=tuple(weight_decays), weights=weights)


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train every arm, measure every network, compare the two traces."""
    train, val, test = mnist_mlp.load_mnist(setting.data, setting.device)
    most = setting.pick(64, len(train[0]), len(train[0]))
    parts = {name: (X[:most], y[:most]) for name, (X, y) in {"train": train, "val": val, "test": test}.items()}
    epochs, seeds = setting.pick(1, 20, 50), setting.seed_range(2, 5, 8)
    rows: Rows = []
    for eta, form in ARMS:
        about = {"eta": eta, "form": form}
        said = partial(progress, f"epochs, eta {eta:g}, {form}")
        trained = _kept(
            setting, f"{form}-{eta:g}-{len(seeds)}-seeds-{epochs}-epochs-{most}",
            lambda eta=eta, form=form, said=said: train_penalised(
                parts["train"], seeds, eta, form, epochs=epochs, progress=said
            ),
        )  # fmt: skip
        found = measure(trained, parts, images=setting.pick(20, 2000, 2000))
        rows += [
            {"kind": "network", **about, **row, "images": len(parts["train"][0]), "epochs": epochs} for row in found
        ]
        if eta == 0:
            rows += _identities(trained, parts["train"], setting, progress)
    return rows, claims(rows)


def _identities(trained: Trained, train: Data, setting: Setting, progress: Progress) -> Rows:
    """Tr H beside Tr G: of the networks just trained, without weight decay, and of others with smooth parts."""
    columns = 20 if setting.budget == "smoke" else None
    options: dict[str, Any] = {
        "images": setting.pick(6, 20, 20), "draws": setting.pick(4, 200, 200), "columns": columns,
    }  # fmt: skip
    rows = []
    for seed in trained.seeds[: setting.pick(2, 3, 3)]:
        model = mnist_mlp.make_network(seed)
        model.load_state_dict(trained.params(seed, 0.0))
        rows.append({"network": "relu", **penalty_identity.compare(model, train, seed, **options)})
        epochs = setting.pick(1, 5, 5)
        for kind in penalty_identity.KINDS:
            progress(f"networks with {kind}", seed, len(trained.seeds))
            other = penalty_identity.trained(kind, train, seed, epochs)
            rows.append({"network": kind, **penalty_identity.compare(other, train, seed, **options)})
    return [{"kind": "identity", **row} for row in rows]


def _kept(setting: Setting, name: str, make: Any) -> Trained:
    """What was trained before, where runs are kept, or what is trained now."""
    if setting.runs is None:
        return make()  # type: ignore[no-any-return]
    path = Path(setting.runs) / "penalty-grid" / f"{name}.json"
    if not path.exists():
        save(_bare(path.with_suffix(".safetensors")) or dict(make().weights), path)
    weights = {key: w.to(setting.device) for key, w in load(path).items()}
    seeds = next(iter(weights.values())).shape[0]
    return Trained(seeds=tuple(range(seeds)), weight_decays=DECAYS, weights=weights)


def _bare(path: Path) -> dict[str, Tensor]:
    """What an earlier version has kept, without a checksum; nothing for tensors whose text a kill has lost."""
    tensors, words = read_tensors(path) if path.exists() else ({}, {})
    return {} if "text" in words else tensors


def measure(trained: Trained, parts: dict[str, Data], images: int) -> Rows:
    """Accuracies and losses of every network, in per cent, and Tr H of the loss on the first training images.

    The trace is exact, sample by sample; for these networks it is Tr G.

    Example:
        >>> data = torch.eye(784)[:4], torch.arange(4)
        >>> trained = train_penalised(data, [0], 0.0, epochs=1)
        >>> [row["weight_decay"] for row in measure(trained, {"train": data}, images=2)]
        [0.0, 0.0005]
    """
    rows = []
    X, y = parts["train"]
    for seed in trained.seeds:
        for decay in trained.weight_decays:
            model = mnist_mlp.make_network(seed, X.dtype).to(X.device)
            model.load_state_dict(trained.params(seed, decay))
            row: dict[str, Any] = {"seed": seed, "weight_decay": decay}
            for name, data in parts.items():
                found = evaluate(model, nn.CrossEntropyLoss(), data)
                row |= {f"{name}_accuracy": short(100 * found["accuracy"]), f"{name}_loss": short(found["loss"])}
            risk = Risk(model, nn.CrossEntropyLoss(), (X[:images], y[:images]), batch_size=1000)
            rows.append({**row, "trace": short(float(torch.as_tensor(sample_traces(risk).value).double().mean()))})
    return rows
