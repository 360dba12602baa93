"""What an experiment is: how it is set, what it gives, and how that is written.

    smoke    the whole path on little data, in seconds: does it run?
    short    fewer epochs, seeds or images, in minutes; the claims say what was measured, not what would be: a number
             that only the whole training reaches is `short_of` it, and decides nothing, met or missed
    paper    as published

A run writes `PAPER/ITEM.json`: settings, seeds, recipes, commit, versions, machine, the claims with their verdicts and
the rows that were measured.
"""

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

import torch

from ..files import write_text
from ..nonfinite import in_words
from ..provenance import own_commit
from ..results import Estimate
from .added import Result, next_seed, refuse_other_recipes, refuse_other_setting, together
from .base import Claim
from .grouping import flat, grouped
from .recipe import Budget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[str, int, int], None]  # (what, done, total)
Rows = list[dict[str, Any]]


class Executor(Protocol):
    """What can be given work to do elsewhere."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """A job, whose `result()` waits for what the function gives, or raises what it raised."""


@dataclass(frozen=True)
class Setting:
    """How an experiment is run.

    Attributes:
        budget: How much of it.
        data: The folder with data sets, in torchvision's layout; None takes RITZ_DATA.
        device: Where to compute.
        seeds: How many, in the place of the budget's own number.
        runs: A folder in which training runs and measurements are kept, and from which they are resumed; None keeps
            nothing.
        workers: How many training runs at a time, each in a process of its own.
        fast: Train in bfloat16 by compiled passes where a recipe allows it (`Recipe.fast`); rows and claims say so.
        executor: Takes every training run as a job, by `submit(function, *args)` whose answer has a `result()`: one of
            concurrent.futures, or submitit's AutoExecutor; needs `runs`. None trains here.
        until: The moment, as `time.time()` tells it, after which `train_all(cut=True)` begins no run; None for no end.
        commit: Of the code; None asks git, which knows where the package is a checkout.
        before: A result to which seeds are added, after those that it has; its file as it was read.
        recipes: What was trained, by name; `train_all` notes it here, as plain data.
        left: The names of runs that were not begun; `train_all` notes them here.
    """

    budget: Budget = "smoke"
    data: Path | None = None
    device: str = "cpu"
    seeds: int | None = None
    runs: Path | None = None
    workers: int = 1
    fast: bool = False
    executor: Executor | None = field(default=None, compare=False, repr=False)
    until: float | None = None
    commit: str | None = None
    before: Result | None = field(default=None, compare=False, repr=False)
    recipes: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    left: list[str] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.budget not in get_args(Budget):
            raise ValueError(f"budget must be one of {', '.join(get_args(Budget))}, got {self.budget!r}")
        least = 2 if self.before is None else 1
        if self.seeds is not None and self.seeds < least:
            raise ValueError(f"error bars need two seeds or more, got {self.seeds}")
        if self.before is not None:
            refuse_other_setting(self.before, self.budget, self.device)
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if self.executor is not None and self.runs is None:
            raise ValueError("runs of a cluster are kept in a folder that all its machines see: name it by --runs")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise ValueError(f"device {self.device!r} is not available here: {str(error).splitlines()[0]}") from error
        if self.commit is None:  # now: the files may be others when a long run has ended
            object.__setattr__(self, "commit", own_commit())

    def pick(self, smoke: int, short: int, paper: int) -> int:
        """The number for this budget."""
        return {"smoke": smoke, "short": short, "paper": paper}[self.budget]

    def seed_range(self, smoke: int, short: int, paper: int) -> range:
        """The seeds that are to be run.

        Example:
            >>> alike = {"seeds": [0, 1], "setting": {"budget": "smoke", "device": "cpu"}}
            >>> Setting().seed_range(2, 4, 8), Setting(seeds=1, before=alike).seed_range(2, 4, 8)
            (range(0, 2), range(2, 3))
        """
        first = 0 if self.before is None else next_seed(self.before)
        return range(first, first + (self.seeds or self.pick(smoke, short, paper)))

    def check_recipes(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse to train otherwise than the result was that seeds are added to."""
        if self.before is not None:
            refuse_other_recipes(self.before, {run: flat(recipe) for run, recipe in in_words(recipes).items()})

    @property
    def time_is_up(self) -> bool:
        """Whether no more runs are to be begun."""
        return self.until is not None and time.time() >= self.until


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper.

    Attributes:
        paper: "false-friend" (seeds 000 and 001), "pac-bayes" (002), "margins" (003) or "damping" (004).
        item: Its name within the paper.
        title: What it is.
        source: Where the papers have it.
        run: Setting and progress to the rows that were measured and the claims that follow.
        figure: Draws the rows, as they are read from the file; None where there is nothing to draw.
        claims: The claims that follow from the rows of a file; None where rows do not hold all that claims need.
        short: What is less at the budget short than at that of the paper, where the evidence does not say so.
    """

    paper: str
    item: str
    title: str
    source: str
    run: Callable[[Setting, Progress], tuple[Rows, list[Claim]]]
    figure: "Callable[[Rows], Figure] | None" = None
    claims: Callable[[Rows], list[Claim]] | None = None
    short: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came out."""

    experiment: Experiment
    setting: Setting
    rows: Rows
    claims: list[Claim]
    seconds: float

    def write(self, folder: Path) -> Path:
        """`folder`/PAPER/ITEM.json."""
        return write_result(self.plain(), folder)

    def plain(self) -> dict[str, Any]:
        """As JSON has it; folders are left out, which are of one machine."""
        from .. import __version__

        own = self.setting
        cuda = own.device.startswith("cuda")
        seeds = {row["seed"] for row in self.rows if "seed" in row} | {told["seed"] for told in own.recipes.values()}
        found = {
            "paper": self.experiment.paper,
            "item": self.experiment.item,
            "title": self.experiment.title,
            "source": self.experiment.source,
            "setting": {
                "budget": own.budget,
                "device": own.device,
                "seeds": own.seeds,
                "workers": own.workers,
                **({"fast": True} if any(told.get("fast") for told in own.recipes.values()) else {}),
            },
            "seeds": sorted(int(seed) for seed in seeds),
            "commit": own.commit,
            "versions": {"ritz": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": torch.cuda.get_device_name(own.device) if cuda else f"{platform.machine()} CPU",
            "seconds": round(self.seconds, 1),
            "recipes": grouped(own.recipes),
            **({"left": own.left} if own.left else {}),
            "claims": [plain_claim(claim) for claim in self.claims],
            "rows": self.rows,
        }
        return found if own.before is None else together(own.before, found)


def write_result(result: Mapping[str, Any], folder: Path) -> Path:
    """`folder`/PAPER/ITEM.json, whole or not at all, a line for each row and claim: changes can be read."""
    target = folder / result["paper"] / f"{result['item']}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    entries = []
    for key, value in in_words(result).items():
        inner = value if isinstance(value, list) and value and isinstance(value[0], dict) else None
        text = _json(value) if inner is None else "[\n  " + ",\n  ".join(map(_json, inner)) + "\n ]"
        entries.append(f" {_json(key)}: {text}")
    return write_text(target, "{\n" + ",\n".join(entries) + "\n}\n")


def _json(node: Any) -> str:
    return json.dumps(node, ensure_ascii=False, allow_nan=False)


def plain_claim(claim: Claim) -> dict[str, Any]:
    """A claim as JSON has it, with its verdict.

    Example:
        >>> plain_claim(Claim(paper="seed 003", where="figure 2", text="r", expected=0.97, measured=1.0))["verdict"]
        'refuted'
    """
    found: dict[str, Any] = {**vars(claim), "verdict": claim.verdict}
    for key, nothing in (("reference", None), ("short_of", ""), ("ours", False)):
        if found[key] == nothing:
            del found[key]
    if isinstance(claim.measured, Estimate):
        found["measured"] = short(claim.measured.value, 7)
        found["interval"] = [short(end, 7) for end in claim.measured.interval()]
    return found


def read_claim(plain: Mapping[str, Any]) -> Claim:
    """A claim as it is in a file, without what made the interval; the verdict follows from its numbers again.

    Example:
        >>> measured = Estimate(name="r", value=0.5, bracket=(0.2, 0.8))
        >>> claim = Claim(paper="", where="", text="", expected=1.0, measured=measured, reference=0.0)
        >>> read_claim(plain_claim(claim)).verdict
        'holds in direction'
    """
    fields = {key: value for key, value in plain.items() if key not in ("verdict", "interval")}
    for key in ("expected", "measured", "tolerance", "reference"):
        if isinstance(fields.get(key), str):  # "nan", "inf"
            fields[key] = float(fields[key])
    if "interval" in plain:
        low, high = (float(end) for end in plain["interval"])
        fields["measured"] = Estimate(name=plain["text"], value=float(plain["measured"]), bracket=(low, high))
    return Claim(**fields)


def short(value: Any, digits: int = 6) -> float:
    """A number to so many digits, as rows keep it.

    Example:
        >>> short(torch.tensor(0.1234567), 3), short(1234567.0, 5)
        (0.123, 1234600.0)
    """
    return float(f"{float(value):.{digits}g}")
