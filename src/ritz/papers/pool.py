"""Many training runs of one experiment, each kept and resumed by itself."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..storage import write_text
from .experiment import Progress, Setting
from .loop import Data, Training
from .recipe import Recipe
from .train import train

Finish = Callable[[Training, Recipe, Mapping[str, Data]], Mapping[str, Any]]


@dataclass(frozen=True)
class Finished:
    """One run, as plain data.

    Attributes:
        name: Of the run.
        seed: Of its recipe.
        stop: "finished", or "diverged: " and why.
        steps: How many were made.
        seconds: What they took.
        rows: All that was logged, one dictionary for each row.
        found: What `finish` measured.
    """

    name: str
    seed: int
    stop: str
    steps: int
    seconds: float
    rows: list[dict[str, float]]
    found: dict[str, Any] = field(default_factory=dict)

    def last(self, key: str) -> float:
        """The newest number of a name; NaN where there is none."""
        return next((row[key] for row in reversed(self.rows) if key in row), float("nan"))

    def curve(self, key: str) -> list[tuple[float, float]]:
        """(step, number) wherever there is one."""
        return [(row["step"], row[key]) for row in self.rows if key in row]


def train_all(
    recipes: Mapping[str, Recipe], data: Mapping[str, Data], setting: Setting, *, item: str,
    finish: Finish | None = None, progress: Progress | None = None, **options: Any,
) -> dict[str, Finished]:  # fmt: skip
    """Train every recipe; with `setting.runs` each run has a folder ITEM/NAME there, and is not made twice.

    Args:
        recipes: By name, as folders are named.
        data: For all of them, as `train` takes it.
        setting: Where runs are kept, and how many at a time.
        item: Of the experiment.
        finish: finish(training, recipe, data) measures a network that is trained, as plain JSON; functions with a name.
        progress: Called as progress("steps, NAME", done, total).
        options: Of `train`.
    """
    return {
        name: _one(name, recipe, data, setting, item, finish, progress, options) for name, recipe in recipes.items()
    }


def _one(
    name: str, recipe: Recipe, data: Mapping[str, Data], setting: Setting, item: str, finish: Finish | None,
    progress: Progress | None, options: Mapping[str, Any],
) -> Finished:  # fmt: skip
    """One run, trained or read back."""
    folder = None if setting.runs is None else Path(setting.runs) / item / name
    told = None if progress is None else partial(progress, f"steps, {name}")
    done = train(recipe, data, folder=folder, progress=told, **options)
    kept = None if folder is None else folder / "found.json"
    if finish is None:
        found: dict[str, Any] = {}
    elif kept is not None and kept.exists():
        found = json.loads(kept.read_text(encoding="utf8"))
    else:
        found = dict(finish(done, recipe, data))
        if kept is not None:
            write_text(kept, json.dumps(found, indent=1) + "\n")
    return Finished(name, recipe.seed, done.stop, done.steps, done.seconds, done.history.rows, found)
