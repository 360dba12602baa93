"""Many training runs of one experiment, each kept and resumed by itself: in turn, side by side, or on a cluster."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ..files import write_text
from ..nonfinite import in_numbers, in_words
from ..reading import damaged, read_json
from ..schema import fits
from ..workers import Task, gathered, side_by_side, submitted
from .checkpoints import log_of
from .experiment import Progress, Setting
from .loop import Data, Training
from .recipe import Recipe, describe
from .train import train

Finish = Callable[[Training, Recipe, Mapping[str, Data]], Mapping[str, Any]]


FOUND = "found.json"
_RUN = {"stop": str, "steps": int, "seconds": float}


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
    finish: Finish | None = None, progress: Progress | None = None, cut: bool = False, **options: Any,
) -> dict[str, Finished]:  # fmt: skip
    """Train every recipe; with `setting.runs` each run has a folder ITEM/NAME there, and is not made twice.

    One that `finish` has measured is read from its log and from what was found, and its checkpoint may be removed.

    With `setting.workers` above 1 so many processes of this machine train side by side, each with its own copy of the
    data where the data is; with `setting.executor` every run is a job of a cluster. Recipes, `finish` and options are
    then pickled, and `progress` counts runs.

    Args:
        recipes: By name, as folders are named.
        data: For all of them, as `train` takes it.
        setting: Where runs are kept, and how many at a time.
        item: Of the experiment.
        finish: finish(training, recipe, data) measures a network that is trained, as plain JSON. A function at the top
            of a module, or a partial of one with plain arguments: what it found is kept, and made anew for another.
        progress: Called as progress("steps, NAME", done, total), or as progress("runs", done, total).
        cut: Begin no run after `setting.until`, and leave those out of the answer; `setting.left` has their names. What
            is under way then is finished, and what is kept is read. Recipes are begun in their order.
        options: Of `train`.

    Raises:
        TypeError: If something that has to be pickled or described cannot be.
        ValueError: If seeds are added to a result (`setting.before`) that was trained otherwise.
        RunFailed: If a run failed in another process, with its name; those under way are finished first.

    Example:
        >>> from ritz.papers.recipe import on_parameters
        >>> sgd = partial(on_parameters, kind=torch.optim.SGD, lr=1.0)
        >>> recipe = Recipe(name="softmax", model=partial(torch.nn.Linear, 2, 2), optimizer=sgd, epochs=20)
        >>> data = {"train": (torch.eye(2), torch.tensor([0, 1]))}
        >>> train_all({"seed 0": recipe}, data, Setting(), item="toy")["seed 0"].last("train/accuracy")
        1.0
    """
    told = {f"{item}/{name}": _told(recipe) for name, recipe in recipes.items()}
    setting.check_recipes(told)
    kept = None if setting.runs is None else Path(setting.runs) / item
    folders = {name: None if kept is None else kept / name for name in recipes}
    apart = setting.executor is not None or setting.workers > 1
    if finish is not None and (kept is not None or apart):
        describe(finish, "finish")
    until = setting.until if cut else None
    left = [name for name in recipes if not _is_found(folders[name], finish)]
    found: dict[str, Finished | None] = {}
    in_time = not (cut and setting.time_is_up)
    if in_time and (setting.executor is not None or (apart and len(left) > 1)):
        counted = None if progress is None else partial(progress, "runs")
        with _written(data, None if setting.executor is None else kept) as source:
            given = (source, tuple(data), str(data["train"][0].device))
            tasks: dict[str, Task] = {
                name: (_one_apart, (given, name, recipes[name], folders[name], finish, options, until)) for name in left
            }
            if setting.executor is None:
                found = side_by_side(tasks, setting.workers, counted)
            else:
                found = gathered(submitted(tasks, setting.executor), tasks, counted)
    for name, recipe in recipes.items():
        if name not in found:
            said = None if progress is None else partial(progress, f"steps, {name}")
            late = until if name in left else None
            found[name] = _one(name, recipe, data, folders[name], finish, {**options, "progress": said}, late)
    setting.left.extend(name for name in recipes if found[name] is None)
    done = {name: run for name in recipes if (run := found[name]) is not None}
    setting.recipes.update({run: recipe for run, recipe in told.items() if run.removeprefix(f"{item}/") in done})
    return done


def _one(
    name: str, recipe: Recipe, data: Mapping[str, Data], folder: Path | None, finish: Finish | None,
    options: Mapping[str, Any], until: float | None,
) -> Finished | None:  # fmt: skip
    """One run, trained or read back; None where it is too late to begin."""
    if until is not None and time.time() >= until:
        return None
    try:
        if folder is not None and _is_found(folder, finish):
            rows, said = log_of(folder, recipe, data).rows, _said(folder)
            return Finished(name, recipe.seed, **said["run"], rows=rows, found=in_numbers(said["found"]))
        done = train(recipe, data, folder=folder, **options)
        run: dict[str, Any] = {"stop": done.stop, "steps": done.steps, "seconds": done.seconds}
        found = {} if finish is None else dict(finish(done, recipe, data))
        if folder is not None and finish is not None:
            text = json.dumps({"finish": describe(finish, "finish"), "run": run, "found": in_words(found)}, indent=1)
            write_text(folder / FOUND, text + "\n")
    except Exception as error:
        error.add_note(f"in run {name!r}")
        raise
    return Finished(name, recipe.seed, **run, rows=done.history.rows, found=found)


def _told(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain data; one that has something without a name in it, which no folder takes, by its seed."""
    try:
        return dict(describe(recipe))
    except TypeError:
        return {"seed": recipe.seed}


def _is_found(folder: Path | None, finish: Finish | None) -> bool:
    """Whether a run has ended, and what it gave was measured by the same function."""
    if folder is None or finish is None or not (folder / FOUND).exists():
        return False
    return bool(_said(folder).get("finish") == describe(finish, "finish"))


def _said(folder: Path) -> dict[str, Any]:
    """What a run that is measured has left behind; its weights are not needed any more."""
    remedy = "remove it, and it is measured again"
    said = read_json(folder / FOUND, remedy)
    run = said.get("run") if isinstance(said, dict) else None
    known = isinstance(run, dict) and run.keys() == _RUN.keys() and all(fits(run[k], kind) for k, kind in _RUN.items())
    if not known or not isinstance(said.get("found"), dict):
        damaged(folder / FOUND, "it does not say what was found", remedy)
    return dict(said)


# ------------------------------------------------------------------------------------------- in other processes


@contextmanager
def _written(data: Mapping[str, Data], folder: Path | None) -> Iterator[Path]:
    """The data as a file that other processes map into memory: once for all, however many runs there are."""
    from safetensors.torch import save_file

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="data-", dir=folder) as place:
        source = Path(place) / "data.safetensors"
        parts = {f"{name}/{part}": pair[part] for name, pair in data.items() for part in (0, 1)}
        save_file({name: part.detach().cpu().contiguous().clone() for name, part in parts.items()}, source)
        yield source


@lru_cache(maxsize=1)  # once for a process, and not for a run
def _read(source: Path, names: tuple[str, ...], device: str) -> dict[str, Data]:
    """The same data on the device."""
    from safetensors.torch import load_file

    parts = load_file(source, device=device)
    return {name: (parts[f"{name}/0"], parts[f"{name}/1"]) for name in names}


def _one_apart(
    given: tuple[Path, tuple[str, ...], str], name: str, recipe: Recipe, folder: Path | None, finish: Finish | None,
    options: Mapping[str, Any], until: float | None,
) -> Finished | None:  # fmt: skip
    """One run, in a process that is not this one."""
    return _one(name, recipe, _read(*given), folder, finish, options, until)
