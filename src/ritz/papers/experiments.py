"""The papers' experiments as one table: what each trains and measures, at which budget, and the claims that follow.

    smoke    the whole path on little data, in seconds: does it run?
    short    fewer epochs, seeds or images, in minutes; the claims say what was measured, not what would be
    paper    as published

A run writes `PAPER/ITEM.json`: settings, versions, machine, the rows that were measured and the claims with verdicts.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from ..results import Estimate
from ..storage import write_text
from . import affine, logistic_damping, logistic_damping_claims, mnist_mlp, mnist_mlp_claims
from .base import Claim
from .data.images import load_images
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
    """

    budget: Budget = "smoke"
    data: Path | None = None
    device: str = "cpu"
    seeds: int | None = None

    def __post_init__(self) -> None:
        if self.budget not in get_args(Budget):
            raise ValueError(f"budget must be one of {', '.join(get_args(Budget))}, got {self.budget!r}")
        if self.seeds is not None and self.seeds < 2:
            raise ValueError(f"error bars need two seeds or more, got {self.seeds}")
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


# --------------------------------------------------------------------------------------------------- experiments


def _affine(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    (X, y), _ = load_images("MNIST", setting.data, setting.device)
    train = (X + 1) / 2, y  # pixels in [0, 1]
    num = setting.pick(60, affine.NUM_IMAGES, affine.NUM_IMAGES)
    seeds = range(setting.num_seeds(2, 8, 8))
    rows = affine.study(train, seeds, num, partial(progress, "predictors"))
    return [dict(row) for row in rows], affine.claims(rows)


def _mlp(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    train, val, test = mnist_mlp.load_mnist(setting.data, setting.device)
    most = setting.pick(256, len(train[0]), len(train[0]))
    train, val, test = ((X[:most], y[:most]) for X, y in (train, val, test))
    trained = mnist_mlp.train_many(
        train, range(setting.num_seeds(2, 4, 20)), epochs=setting.pick(1, 10, 50),
        progress=partial(progress, "epochs"),
    )  # fmt: skip
    rows = mnist_mlp.measure_rows(
        trained, train, val, test, num_steps=setting.pick(5, 40, 100), num_probes=setting.pick(2, 4, 8),
        progress=partial(progress, "networks"),
    )  # fmt: skip
    return mnist_mlp_claims.plain(rows), mnist_mlp_claims.claims(rows)


def _logistic(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    dampings = logistic_damping.DAMPINGS if setting.budget != "smoke" else (0.01, 1.0)
    etas = logistic_damping.ETAS if setting.budget != "smoke" else (1.0, 10.0)
    steps, lanczos = setting.pick(4, 100, 500), setting.pick(6, 50, 50)
    results: dict[str, list[logistic_damping.Run]] = {}
    for name in ("MNIST", "FashionMNIST"):
        train, test = load_images(name, setting.data, setting.device)
        test = tuple(part[: setting.pick(200, 10_000, 10_000)] for part in test)  # type: ignore[assignment]
        results[name] = []
        for seed in range(setting.num_seeds(2, 2, 4)):
            own = logistic_damping.draw(train, seed, setting.pick(60, 1000, 1000))
            said = partial(progress, f"steps, {name}, seed {seed}")
            results[name].append(logistic_damping.train_descent(own, test, seed, steps=steps))
            results[name] += logistic_damping.train_lanczos(
                own, test, seed, dampings, etas, steps=steps, num_lanczos=lanczos, progress=said
            )
    rows = [row for name, runs in results.items() for row in logistic_damping_claims.plain(name, runs)]
    return rows, list(logistic_damping_claims.claims(results).values())


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment("false-friend", "mlp", "the network of 9,960 parameters on MNIST", "seed 000, figure 2", _mlp),
    Experiment("pac-bayes", "mlp", "the same network, at three weight decays", "seed 002, table 1", _mlp),
    Experiment("margins", "affine", "Hessian traces of an affine predictor", "seed 003, figure 2", _affine),
    Experiment("damping", "logistic", "LanczosOPT on softmax regression", "seed 004, figures 4 to 6", _logistic),
)

PAPERS = {
    "false-friend": ("seed 000", "seed 001"), "pac-bayes": ("seed 002",), "margins": ("seed 003",),
    "damping": ("seed 004",),
}  # fmt: skip


def find(paper: str, item: str | None = None, table: Sequence[Experiment] = EXPERIMENTS) -> list[Experiment]:
    """The experiments of a paper, by its name or number ("003"), or the one that is named.

    Raises:
        ValueError: If there is none; it names those that there are.

    Example:
        >>> [experiment.item for experiment in find("margins")]
        ['affine']
    """
    known: Mapping[str, list[str]] = {
        name: [experiment.item for experiment in table if experiment.paper == name]
        for name in dict.fromkeys(experiment.paper for experiment in table)
    }
    numbers = {seed.removeprefix("seed "): name for name, seeds in PAPERS.items() for seed in seeds}
    paper = numbers.get(paper, paper)
    if paper not in known:
        raise ValueError(f"no paper is called {paper!r}; there are {', '.join(known)}")
    if item is not None and item not in known[paper]:
        raise ValueError(f"{paper} has no experiment {item!r}; it has {', '.join(known[paper])}")
    return [one for one in table if one.paper == paper and item in (None, one.item)]


def reproduce(experiment: Experiment, setting: Setting, progress: Progress | None = None) -> Outcome:
    """Run one experiment."""
    start = time.perf_counter()
    rows, claims = experiment.run(setting, progress or (lambda what, done, total: None))
    own = [claim for claim in claims if claim.paper in PAPERS[experiment.paper]]
    return Outcome(experiment, setting, rows, own, time.perf_counter() - start)
