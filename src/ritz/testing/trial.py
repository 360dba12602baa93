"""A small problem to try an optimiser on: how runs are made, and how they are compared."""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batches import seed_torch

Make = Callable[[nn.Module], Optimizer]
NonFinite = Literal["skip", "raise"]

STEPS = 6  # of one run
_NUM_BATCHES, _BATCH_SIZE = 4, 8


class Network(nn.Module):
    """Two layers; where asked for, with an activation in place, or with a layer that is never called.

    Example:
        >>> Network(spare=True)(torch.zeros(8, 4, dtype=torch.float64)).shape
        torch.Size([8, 3])
    """

    def __init__(self, inplace: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.body, self.act, self.head = nn.Linear(4, 5), nn.ReLU(inplace), nn.Linear(5, 3)
        if spare:
            self.spare = nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Scores of three classes."""
        scores: Tensor = self.head(self.act(self.body(x)))
        return scores


class Trial:
    """The optimiser in question, the data, and how runs are made and compared.

    Example:
        >>> trial = Trial(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "skip", 1e-6)
        >>> trial.same(trial.train(*trial.start()), trial.train(*trial.start()), "two runs")
        >>> trial.same(trial.train(*trial.start(), [0]), trial.start()[0], "a step")
        Traceback (most recent call last):
        AssertionError: a step: body.weight is off by ...
    """

    def __init__(self, make: Make, nonfinite: NonFinite, rtol: float) -> None:
        self.make, self.nonfinite, self.rtol, self.settings = make, nonfinite, rtol, settings()
        generator = torch.Generator().manual_seed(0)
        shape = (_NUM_BATCHES, _BATCH_SIZE)
        self.inputs = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(3, shape, generator=generator)

    def start(self, *, frozen: str = "", **network: bool) -> tuple[nn.Module, Optimizer]:
        """A network, always with the same weights, and a new optimiser of it."""
        seed_torch(0)
        model = Network(**network)
        for name, p in model.named_parameters():
            p.requires_grad_(name != frozen)
        optimizer = self.make(model)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"make must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
        return model, optimizer

    def loss(self, model: nn.Module, index: int, part: slice = slice(None)) -> Tensor:
        """The mean loss of a batch, or of a part of it."""
        x, y = self.inputs[index % _NUM_BATCHES][part], self.labels[index % _NUM_BATCHES][part]
        return nn.functional.cross_entropy(model(x), y)

    def backward(self, model: nn.Module, optimizer: Optimizer, index: int = 0) -> None:
        """Gradients of one batch, in the place of earlier ones."""
        optimizer.zero_grad()
        self.loss(model, index).backward()

    def train(self, model: nn.Module, optimizer: Optimizer, steps: Iterable[int] = range(STEPS)) -> nn.Module:
        """One step on each of the batches given."""
        for index in steps:
            self.backward(model, optimizer, index)
            optimizer.step()
        return model

    def same(self, found: nn.Module, wanted: nn.Module | Mapping[str, Tensor], what: str, rtol: float = 0.0) -> None:
        """Compare all weights: to the bit, or by how far apart they are, relative to the way from the start."""
        known = weights(wanted) if isinstance(wanted, nn.Module) else wanted
        apart = {name: float((p - known[name]).norm()) for name, p in weights(found).items()}
        if not rtol:
            for name, distance in apart.items():
                require(distance == 0, f"{what}: {name} is off by {distance:.2g}")
            return
        seed_torch(0)
        way = float(moves(Network(), known).norm())
        for name, distance in apart.items():
            share = distance / way if way else distance
            require(share <= rtol, f"{what}: {name} is off by {share:.2g} of the way from the start, more than {rtol}")

    def unchanged(self, model: nn.Module, before: Mapping[str, Tensor], what: str) -> None:
        """Some weights are, to the bit, what they were."""
        now = weights(model)
        for name, value in before.items():
            require(torch.equal(now[name], value), f"{what}: {name} has changed")


def require(holds: bool, what: str) -> None:
    """Raise an AssertionError that says what, unless it holds.

    Example:
        >>> require(1 > 2, "1 is not more than 2")
        Traceback (most recent call last):
        AssertionError: 1 is not more than 2
    """
    if not holds:
        raise AssertionError(what)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights by name.

    Example:
        >>> list(weights(torch.nn.Linear(2, 1)))
        ['weight', 'bias']
    """
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moves(model: nn.Module, before: Mapping[str, Tensor]) -> Tensor:
    """How far all weights have gone, as one row.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> moves(model, weights(model))
        tensor([0., 0., 0.])
    """
    return torch.cat([(p - before[name]).flatten() for name, p in weights(model).items()])


def generators() -> dict[str, object]:
    """The states of the global random generators, by whose they are.

    Example:
        >>> before = generators()
        >>> _ = random.Random(0).random()  # one of its own
        >>> generators() == before
        True
    """
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002  (looked at, not drawn from)
    numpy = np.asarray(keys).tobytes(), int(position)
    return {"torch": torch.get_rng_state().numpy().tobytes(), "Python": random.getstate(), "NumPy": numpy}


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
}


def settings() -> dict[str, Any]:
    """What torch has set for the whole process, by name.

    Example:
        >>> settings()["the default dtype"]
        torch.float32
    """
    return {name: get() for name, (get, _) in _SETTINGS.items()}


@contextlib.contextmanager
def restored_settings() -> Iterator[None]:
    """Whatever is set inside, it is as before after.

    Example:
        >>> with restored_settings():
        ...     torch.set_default_dtype(torch.float64)
        >>> torch.get_default_dtype()
        torch.float32
    """
    before = settings()
    try:
        yield
    finally:
        for name, (get, put) in _SETTINGS.items():
            if get() != before[name]:
                put(before[name])
