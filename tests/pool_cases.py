"""What tests of the pool send to other processes, which import it by name: functions, data and recipes."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ritz import stopping, workers
from ritz.papers.loop import Data, Training
from ritz.papers.recipe import Key, Recipe, on_parameters
from ritz.space import random_uniform
from ritz.switches import matmul_precision

EPOCHS = 6


def some_data() -> dict[str, Data]:
    """Four batches of 8, on two sides of a line; the test data is a part of the same memory."""
    X = random_uniform(3 * 40, ("inputs",)).reshape(40, 3) * 2 - 1
    y = (X.sum(1) > 0).long()
    return {"train": (X[:32], y[:32]), "test": (X[32:], y[32:])}


def recipe(seed: int, hold: str = "") -> Recipe:
    """With dropout; it does not go beyond the second epoch while there is a file."""
    return Recipe(
        name=f"small, {seed}",
        model=network,
        optimizer=partial(on_parameters, kind=torch.optim.SGD, lr=0.5),
        augment=partial(held, path=hold) if hold else None,
        epochs=EPOCHS,
        batch_size=8,
        seed=seed,
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))


def held(x: Tensor, key: Key, path: str) -> Tensor:
    while key[1] > 1 and Path(path).exists():
        time.sleep(0.01)
    return x


def weight_sum(done: Training, recipe: Recipe, data: dict[str, Data], scale: float = 1.0) -> dict[str, Any]:
    """A number that depends on all weights, which process found it, and how torch is set there."""
    total = sum(float(p.detach().sum()) for p in done.model.parameters())
    torch_is = [str(torch.get_default_dtype()), torch.get_num_threads(), matmul_precision()]
    return {"sum": scale * total, "process": os.getpid(), "place": data["train"][0].data_ptr(), "torch": torch_is}


def refuse(done: Training, recipe: Recipe, data: dict[str, Data]) -> dict[str, float]:
    raise ValueError(f"seed {recipe.seed} is not liked")


def crowded(own: Path, other: Path) -> int:
    """Runs out of memory the first time, once another task is under way; gives the process the next time."""
    again = own.exists()
    own.touch()
    while not other.exists():
        time.sleep(0.01)
    if not again:
        raise torch.OutOfMemoryError("two are too many")
    return os.getpid()


def fail(begun: Path) -> None:
    """Once another task is under way."""
    while not begun.exists():
        time.sleep(0.01)
    raise ValueError("no good")


def vanish(begun: Path, done: Path) -> None:
    """End without a word, when all is done."""
    begun.touch()
    time.sleep(0.3)
    done.touch()
    os._exit(3)


def sleep(begun: Path) -> None:
    begun.touch()
    time.sleep(300)


def killed_once(mark: Path) -> str:
    """The system ends the process the first time, as it does where memory runs out."""
    if mark.exists():
        return "again"
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def says(times: int) -> int:
    for number in range(times):
        workers.tell(number)
    return times


def until_asked(begun: Path) -> str:
    """Tells that it has begun, and ends when it is asked to."""
    with stopping.stoppable(patient=True):
        workers.tell("begun")
        while not stopping.asked():
            time.sleep(0.01)
        return stopping.asked()
