"""What an experiment is: how it is set, what it gives, and how that is written.

    smoke    the whole path on little data, in seconds: does it run?
    short    fewer epochs, seeds or images, in minutes; the claims say what was measured, not what would be
    paper    as published

A run writes `PAPER/ITEM.json`: settings, versions, machine, the rows that were measured and the claims with verdicts.
"""

import json
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from ..results import Estimate
from ..storage import write_text
from .base import Claim
from .recipe import Budget

Progress = Callable[[str, int, int], None]  # (what, done, total)
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """How an experiment is run.

    Attributes:
        budget: How much of it.
        data: The folder with data sets, in torchvision's layout; None takes RITZ_DATA.
        device: Where to compute.
        seeds: How many, in the place of the budget's own number.
        runs: A folder for the training runs, which are kept there and resumed; None keeps nothing.
        workers: How many training runs at a time, each in a process of its own.
    """

    budget: Budget = "smoke"
    data: Path | None = None
    device: str = "cpu"
    seeds: int | None = None
    runs: Path | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        if self.budget not in get_args(Budget):
            raise ValueError(f"budget must be one of {', '.join(get_args(Budget))}, got {self.budget!r}")
        if self.seeds is not None and self.seeds < 2:
            raise ValueError(f"error bars need two seeds or more, got {self.seeds}")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise ValueError(f"device {self.device!r} is not to be had here: {str(error).splitlines()[0]}") from error

    def pick(self, smoke: int, short: int, paper: int) -> int:
        """The number for this budget."""
        return {"smoke": smoke, "short": short, "paper": paper}[self.budget]

    def num_seeds(self, smoke: int, short: int, paper: int) -> int:
        """How many seeds."""
        return self.seeds or self.pick(smoke, short, paper)


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper.

    Attributes:
        paper: "false-friend" (seeds 000 and 001), "pac-bayes" (002), "margins" (003) or "damping" (004).
        item: Its name within the paper.
        title: What it is.
        source: Where the papers have it.
        run: Setting and progress to the rows that were measured and the claims that follow.
    """

    paper: str
    item: str
    title: str
    source: str
    run: Callable[[Setting, Progress], tuple[Rows, list[Claim]]]


@dataclass(frozen=True)
class Outcome:
    """What came out."""

    experiment: Experiment
    setting: Setting
    rows: Rows
    claims: list[Claim]
    seconds: float

    def write(self, folder: Path) -> Path:
        """`folder`/PAPER/ITEM.json, whole or not at all."""
        target = folder / self.experiment.paper / f"{self.experiment.item}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(self.plain()), indent=1, ensure_ascii=False, allow_nan=False)
        return write_text(target, text + "\n")

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        from .. import __version__

        setting = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.setting).items()}
        cuda = self.setting.device.startswith("cuda")
        return {
            "paper": self.experiment.paper,
            "item": self.experiment.item,
            "source": self.experiment.source,
            "setting": setting,
            "versions": {"ritz": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": torch.cuda.get_device_name(self.setting.device) if cuda else f"{platform.machine()} CPU",
            "seconds": round(self.seconds, 1),
            "claims": [plain_claim(claim) for claim in self.claims],
            "rows": self.rows,
        }


def plain_claim(claim: Claim) -> dict[str, Any]:
    """A claim as JSON has it, with its verdict.

    Example:
        >>> plain_claim(Claim(paper="seed 003", where="figure 2", text="r", expected=0.97, measured=1.0))["verdict"]
        'refuted'
    """
    found: dict[str, Any] = {**vars(claim), "verdict": claim.verdict}
    if isinstance(claim.measured, Estimate):
        found["measured"] = _short(claim.measured.value)
        found["interval"] = [_short(end) for end in claim.measured.interval()]
    return found


def _short(value: Any) -> float:
    """Seven digits."""
    return float(f"{float(value):.7g}")


def _finite(node: Any) -> Any:
    """Plain data with "nan", "inf" and "-inf" for what JSON has no numbers for."""
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(item) for item in node]
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node
