"""Table 1 of seed 002 in small: one network, four weight decays, what the curvature says and how it generalises.

The same ReLU network is trained on scikit-learn's digits from the same start, on the same batches, at weight decay 0,
1e-4, 5e-4 and 5e-3. The paper finds that the gap in loss falls with weight decay while measures of sharpness rise, and
proposes a metric `a` that falls with it. As its equation 7 says and as its tables have it are two numbers:

    a (eq. 7)         Tr H + |w|^2 / 2
    a (as tabulated)  |w| / 2 + Tr H / P

H is the Hessian of the training loss without the penalty. Errors: of the probes for what comes from the spectrum, of
the test digits for the gaps. All solutions share probes and digits, so differences are taken pair by pair. The solution
with the most weight decay is audited: which measures move when the function, or the prediction, does not?
"""

import dataclasses
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..batches import isolated_rng
from ..estimators.quantities import Spectrum
from ..measures.audit import Audit, audit
from ..measures.compare import Comparison, compare
from ..measures.differences import direction
from ..measures.measure import Measurement
from ..plan import Plan
from ..results import Estimate
from ..risk import Risk
from .data.images import Data, Split, load

Progress = Callable[[str, float], None]  # (what is being done, part of the whole that is done)

NUM_TRAIN, NUM_TEST = 1200, 597
NAMED = "weight decay "  # how the name of a solution begins
TRAINING_SHARE, AUDIT_SHARE = 0.3, 0.15  # of the time, for the progress bar

# what the table has, in its order; the keys are those of ritz.measures
COLUMNS = {
    "gap_error": "gap in error, %",
    "gap_loss": "gap in loss",
    "trace": "Tr H",
    "moment2": "Tr H²",
    "spectral_norm": "‖H‖",
    "weight_norm": "‖w‖",
    "metric_a_eq7": "a (eq. 7)",
    "metric_a": "a (tabulated)",
}
MEASURES = ("trace", "moment2", "spectral_norm", "weight_norm", "metric_a_eq7", "metric_a")
AUDITED = ("test_loss", "test_error", "trace", "spectral_norm", "weight_norm", "metric_a_eq7", "margin_median")
TRANSFORMS = ("rescale", "scale_output")
AUDIT_STEPS = 30  # the outliers and averages that are audited need no more


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that decides the numbers of a study.

    Example:
        >>> Settings(epochs=0)
        Traceback (most recent call last):
        ValueError: epochs must be at least 1, got 0
    """

    seed: int = 0  # of the start, the order of batches and the probes
    epochs: int = 100
    weight_decays: tuple[float, ...] = (0.0, 1e-4, 5e-4, 5e-3)
    hidden: tuple[int, ...] = (32, 32)
    lr: float = 0.1  # decays linearly to a hundredth, as in the paper
    batch_size: int = 120
    num_steps: int = 100  # the paper's m
    num_probes: int = 8
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "num_steps", "num_probes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.weight_decays) < 2 or min(self.weight_decays) < 0:
            raise ValueError(f"expected two or more weight decays of at least 0, got {self.weight_decays}")


@dataclass(frozen=True, eq=False, kw_only=True)
class Study:
    """What was measured at each weight decay, by rising weight decay."""

    settings: Settings
    comparison: Comparison  # of solutions named by their weight decay
    audit: Audit | None = None  # of the solution with the most weight decay

    @property
    def rows(self) -> Mapping[str, Measurement]:
        """The solutions by name."""
        return self.comparison.measurements

    @property
    def ends(self) -> tuple[str, str]:
        """The names of the solutions with the least and the most weight decay."""
        names = list(self.rows)
        return names[0], names[-1]


# ------------------------------------------------------------------------------------- data and training


def load_digits(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Data, Data]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels in [0, 1], split once and for all into 1,200 and 597."""

    def part(split: Split) -> Data:
        images, labels = load("digits", device=device, split=split)
        return images.flatten(1).to(dtype) / 16, labels

    return part("train"), part("test")


def make_network(settings: Settings) -> nn.Sequential:
    """64 - hidden - 10 with ReLU between; the same start for the same seed."""
    widths = (64, *settings.hidden, 10)
    layers: list[nn.Module] = []
    with isolated_rng(settings.seed):
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following, dtype=settings.dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(settings.device)


def train(data: Data, weight_decay: float, settings: Settings, progress: Callable[[int], None]) -> nn.Sequential:
    """SGD with momentum 0.9 on cross-entropy + weight_decay |w|^2 / 2, all weights and biases alike."""
    X, y = data
    model = make_network(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=settings.epochs)
    order = torch.Generator().manual_seed(settings.seed)
    for epoch in range(settings.epochs):
        for index in torch.randperm(len(X), generator=order).to(X.device).split(settings.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(X[index]), y[index]).backward()
            optimizer.step()
        schedule.step()
        progress(epoch + 1)
    return model


def study(settings: Settings = Settings(), progress: Progress | None = None) -> Study:  # noqa: B008 (frozen)
    """Train at every weight decay and measure all solutions with the same probes, on the same digits."""
    train_data, test_data = load_digits(settings.device, settings.dtype)
    # the route is named, because "auto" goes by the clock and a run is to be repeatable
    plan = Plan(route="reverse")
    risks: dict[str, Risk] = {}

    def report(text: str, part: float) -> None:
        if progress is not None:
            progress(text, part)

    for weight_decay in settings.weight_decays:
        name = f"{NAMED}{weight_decay:g}"

        def trained(epoch: int, name: str = name) -> None:
            part = (len(risks) + epoch / settings.epochs) / len(settings.weight_decays)
            report(f"{name}: training", TRAINING_SHARE * part)

        model = train(train_data, weight_decay, settings, trained)
        risks[name] = Risk(model, nn.CrossEntropyLoss(), train_data, batch_size=len(train_data[0]), plan=plan)
    comparison = compare(
        risks, test_data, measures=[*COLUMNS, "train_loss", "train_error"], num_steps=settings.num_steps,
        num_probes=settings.num_probes, seed=settings.seed,
        progress=lambda text, part: report(text, TRAINING_SHARE + (1 - TRAINING_SHARE - AUDIT_SHARE) * part),
    )  # fmt: skip
    audited = audit(
        risks[name], test_data, measures=AUDITED, transforms=TRANSFORMS, seed=settings.seed,
        num_steps=min(settings.num_steps, AUDIT_STEPS), num_probes=settings.num_probes,
        progress=lambda text, part: report(f"audit, {text}", 1 - AUDIT_SHARE + AUDIT_SHARE * part),
    )  # fmt: skip
    return Study(settings=settings, comparison=comparison, audit=audited)


# --------------------------------------------------------------------------------------------- findings


def findings(found: Study) -> list[str]:
    """What the numbers say, in sentences made from them."""
    first, last = found.ends
    lines = [_change(found, "gap_loss", 1.0, "", 3), _change(found, "gap_error", 100.0, " points", 1)]
    verdicts = {key: found.comparison.agreement(key) for key in MEASURES}
    pairs = len(found.rows) * (len(found.rows) - 1) // 2
    told = next(iter(verdicts.values())).pairs
    order = f"{told} of {pairs} pairs of solutions differ in gap in loss by more than the noise of the digits."
    words = {"same": "Ordered as the gap", "opposite": "Ordered against it", "mixed": "Neither"}
    for verdict, text in words.items():
        keys = [COLUMNS[key] for key, value in verdicts.items() if value.verdict == verdict]
        order += f" {text}: {', '.join(keys)}." if keys else ""
    audited = [] if found.audit is None else [f"Audit at {last}, {text}" for text in found.audit.findings()]
    return [f"From {first} to {decay_of(last)} " + "; ".join(lines) + ".", order, _sharpness(found), *audited]


def _change(found: Study, key: str, scale: float, unit: str, digits: int) -> str:
    """One gap at both ends, the paired change, and whether it is more than noise."""
    change = found.comparison.change(key, *found.ends)
    noise = "within its own noise" if direction(change) == 0 else "more than its noise"
    ends = " to ".join(f"{scale * float(found.rows[name][key].value):.{digits}f}" for name in found.ends)
    size = f"{scale * float(change.value):+.{digits}f} ± {scale * float(change.stderr):.{digits}f}{unit}"
    return f"the {key.replace('_', ' in ')} goes from {ends}, by {size} image by image, {noise}"


def _sharpness(found: Study) -> str:
    """The spectral norm against the gap in loss, between the ends."""
    norms = [float(found.rows[name]["spectral_norm"].value) for name in found.ends]
    gap, norm = (direction(found.comparison.change(key, *found.ends)) for key in ("gap_loss", "spectral_norm"))
    text = f"The spectral norm goes from {norms[0]:.3g} to {norms[1]:.3g}"
    if gap * norm < 0:
        text += ": the sharper of the two solutions has the smaller gap in loss"
    elif gap * norm > 0:
        text += ": the sharper of the two solutions has the larger gap in loss"
    else:
        text += ", which the gaps in loss are too noisy to compare with" if gap == 0 else ", no change to speak of"
    return f"{text}. This is one seed and {NUM_TEST} test digits."


# ------------------------------------------------------------------------------------------------ files


def table(found: Study) -> dict[str, Any]:
    """Settings, rows and findings as plain data."""
    settings = {**dataclasses.asdict(found.settings), "dtype": str(found.settings.dtype).removeprefix("torch.")}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    return {
        "settings": settings,
        "num_params": spectrum_of(found, found.ends[0]).dim,
        "versions": versions,
        "rows": [
            {"weight_decay": float(decay_of(name))} | {key: _plain(value) for key, value in row.items()}
            for name, row in found.rows.items()
        ],
        "order_by_gap_in_loss": {key: dataclasses.asdict(found.comparison.agreement(key)) for key in MEASURES},
        "findings": findings(found),
    }


def _plain(value: Estimate) -> dict[str, Any]:
    low, high = (float(end) for end in value.interval())
    return {
        "value": float(value.value),
        "stderr": float(value.stderr),
        "interval": [low, high],
        "convention": value.convention,
    }


def decay_of(name: str) -> str:
    """The weight decay in the name of a solution.

    Example:
        >>> decay_of("weight decay 0.0005")
        '0.0005'
    """
    return name.removeprefix(NAMED)


def spectrum_of(found: Study, name: str) -> Spectrum:
    """The spectrum at one weight decay."""
    spectrum = found.rows[name].spectrum
    assert spectrum is not None, "every solution has one"
    return spectrum


def save(found: Study, folder: Path) -> list[Path]:
    """Write table.json, and each spectrum for `ritz.load`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "table.json"
    target.write_text(json.dumps(table(found), indent=1) + "\n", encoding="utf-8")
    return [target, *(spectrum_of(found, name).save(folder / f"spectrum-{decay_of(name)}") for name in found.rows)]
