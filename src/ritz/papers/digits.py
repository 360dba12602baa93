"""Table 1 of seed 002 in small: one network, four weight decays, what the curvature says and how it generalises.

The same ReLU network is trained on scikit-learn's digits from the same start, on the same batches, at weight decay 0,
1e-4, 5e-4 and 5e-3. The paper finds that the gap in loss falls with weight decay while measures of sharpness rise, and
proposes a metric `a` that falls with it. As its equation 7 says and as its tables have it are two numbers:

    a (eq. 7)         Tr H + |w|^2 / 2
    a (as tabulated)  |w| / 2 + Tr H / P

H is the Hessian of the training loss without the penalty. Errors: of the probes for what comes from the spectrum, of
finite samples for the gaps. All solutions share probes and digits, so differences are taken pair by pair.
"""

import dataclasses
import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batches import isolated_rng
from ..estimators.quantities import Spectrum
from ..estimators.spectrum import spectrum
from ..intervals import StudentT
from ..operators.hessian import Hessian
from ..results import Estimate, from_samples
from ..risk import Risk

Data = tuple[Tensor, Tensor]  # inputs (N, 64) in [0, 1], labels (N,)
Progress = Callable[[str, float], None]  # (what is being done, part of the whole that is done)

NUM_TRAIN = 1200  # of 1,797
SPLIT_SEED = 0  # the split is the same whatever the seed of a run
TRAINING_SHARE = 0.3  # of the time of one solution, for the progress bar

# what the table has, in its order, and what each column means
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
MEANING = {
    "gap_error": "test error - train error, percentage points",
    "gap_loss": "test loss - train loss, mean cross-entropy",
    "trace": "sum of eigenvalues of the Hessian of the training loss, penalty left out",
    "moment2": "sum of squared eigenvalues, ||H||_F^2",
    "spectral_norm": "largest |eigenvalue|",
    "weight_norm": "Euclidean norm of all weights and biases, not squared",
    "metric_a_eq7": "Tr H + |w|^2 / 2 (seed 002, equation 7)",
    "metric_a": "|w| / 2 + Tr H / P (what the tables of seed 002 hold)",
}
SHARPNESS = ("trace", "moment2", "spectral_norm")
MEASURES = (*SHARPNESS, "weight_norm", "metric_a_eq7", "metric_a")


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
class Row:
    """One solution and what was measured on it."""

    weight_decay: float
    train_error: float
    train_loss: float
    values: Mapping[str, Estimate]  # by the keys of COLUMNS
    spectrum: Spectrum
    losses: tuple[Tensor, Tensor]  # per sample: train (N,), test (M,)
    mistakes: tuple[Tensor, Tensor]  # per sample, 100 where the label is wrong: train, test


@dataclass(frozen=True, eq=False, kw_only=True)
class Study:
    """All rows of the table, by rising weight decay."""

    settings: Settings
    rows: tuple[Row, ...]


# ------------------------------------------------------------------------------------- data and training


def load_digits(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Data, Data]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels in [0, 1], split once and for all into 1,200 and 597."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'ritz[demo]'") from error
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    X, y = (torch.as_tensor(pixels) / 16).to(dtype)[order].to(device), torch.as_tensor(labels)[order].to(device)
    return (X[:NUM_TRAIN], y[:NUM_TRAIN]), (X[NUM_TRAIN:], y[NUM_TRAIN:])


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


# ------------------------------------------------------------------------------------------ measurement


def measure(
    model: nn.Module, train_data: Data, test_data: Data, weight_decay: float, settings: Settings,
    progress: Callable[[int, int], None] | None = None,
) -> Row:  # fmt: skip
    """One row: gaps from one forward pass, all of the curvature from one Lanczos run."""
    (train_losses, train_wrong), (test_losses, test_wrong) = (
        _per_sample(model, train_data),
        _per_sample(model, test_data),
    )
    risk = Risk(model, nn.CrossEntropyLoss(), train_data, batch_size=len(train_data[0]))
    operator = Hessian(risk, route="reverse")  # named, because "auto" goes by the clock and a run is to be repeatable
    found = spectrum(operator, settings.num_steps, settings.num_probes, seed=settings.seed, progress=progress)
    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters()))
    values = {
        "gap_error": _gap("gap in error", train_wrong, test_wrong),
        "gap_loss": _gap("gap in loss", train_losses, test_losses),
        "trace": found.trace,
        "moment2": found.moment(2),
        "spectral_norm": found.spectral_norm,
        "weight_norm": Estimate(name="weight norm", value=norm, exact=True),
        "metric_a_eq7": _affine("a (eq. 7)", found.trace, 1.0, norm**2 / 2),
        "metric_a": _affine("a (tabulated)", found.trace, 1 / found.dim, norm / 2),
    }
    named = {key: dataclasses.replace(value, convention=MEANING[key]) for key, value in values.items()}
    return Row(
        weight_decay=weight_decay, train_error=float(train_wrong.mean()), train_loss=float(train_losses.mean()),
        values=MappingProxyType(named), spectrum=found, losses=(train_losses, test_losses),
        mistakes=(train_wrong, test_wrong),
    )  # fmt: skip


def _per_sample(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each sample, and 100 for each that is given a wrong label, (N,) both, float64."""
    X, y = data
    with torch.no_grad():
        out = model(X).double()
    return F.cross_entropy(out, y, reduction="none").cpu(), 100.0 * (out.argmax(1) != y).double().cpu()


def _gap(name: str, train_values: Tensor, test_values: Tensor) -> Estimate:
    """Mean over the test samples less mean over the training samples; for mistakes the error is binomial."""
    parts = (test_values, train_values)
    stderr = math.sqrt(sum(float(v.var(correction=0)) / len(v) for v in parts))
    value = float(test_values.mean() - train_values.mean())
    return Estimate(name=name, value=value, stderr=stderr, rule=StudentT(len(test_values) - 1))


def _affine(name: str, trace: Estimate, scale: float, offset: float) -> Estimate:
    """scale Tr H + offset. A Student t interval moves with it; that of a run without locked outliers would not."""
    samples = None if trace.samples is None else trace.samples * scale + offset
    return dataclasses.replace(
        trace, name=name, value=trace.value * scale + offset, stderr=trace.stderr * scale, samples=samples, parts={}
    )


def study(settings: Settings = Settings(), progress: Progress | None = None) -> Study:  # noqa: B008 (frozen)
    """Train and measure at every weight decay."""
    train_data, test_data = load_digits(settings.device, settings.dtype)
    rows: list[Row] = []

    def report(text: str, part: float) -> None:
        if progress is not None:
            weight_decay = settings.weight_decays[len(rows)]
            progress(f"weight decay {weight_decay:g}: {text}", (len(rows) + part) / len(settings.weight_decays))

    for weight_decay in settings.weight_decays:
        model = train(
            train_data, weight_decay, settings, lambda done: report("training", TRAINING_SHARE * done / settings.epochs)
        )
        rows.append(
            measure(
                model, train_data, test_data, weight_decay, settings,
                lambda done, total: report("spectrum", TRAINING_SHARE + (1 - TRAINING_SHARE) * done / total),
            )
        )  # fmt: skip
    return Study(settings=settings, rows=tuple(rows))


# --------------------------------------------------------------------------------------------- findings


def difference(first: Row, second: Row, key: str) -> Estimate:
    """What `second` has more of than `first`, pair by pair: the same digits, the same probes."""
    a, b = first.values[key], second.values[key]
    name = f"change of {a.name}"
    if key in ("gap_error", "gap_loss"):
        one, other = (first.losses, second.losses) if key == "gap_loss" else (first.mistakes, second.mistakes)
        return _gap(name, other[0] - one[0], other[1] - one[1])
    if a.samples is not None and b.samples is not None:
        return from_samples(name, b.samples - a.samples)
    ends = [tuple(float(end) for end in estimate.interval()) for estimate in (a, b)]
    bracket = (ends[1][0] - ends[0][1], ends[1][1] - ends[0][0])
    return Estimate(name=name, value=float(b.value) - float(a.value), bracket=bracket, exact=a.exact and b.exact)


def direction(change: Estimate) -> int:
    """1 for up, -1 for down, 0 where the 95 % interval of the change holds 0.

    Example:
        >>> [direction(Estimate(name="change", value=x, stderr=1.0, rule=StudentT(100))) for x in (-3.0, 1.0, 3.0)]
        [-1, 0, 1]
    """
    low, high = (float(end) for end in change.interval())
    return (low > 0) - (high < 0)


@dataclass(frozen=True)
class Agreement:
    """How the order of solutions by a measure compares with their order by the gap in loss.

    Example:
        >>> Agreement(same=0, opposite=6, pairs=6).verdict, Agreement(same=5, opposite=0, pairs=6).verdict
        ('opposite', 'mixed')
    """

    same: int
    opposite: int
    pairs: int  # of solutions whose gaps in loss differ by more than their noise

    @property
    def verdict(self) -> str:
        """same, opposite or mixed; undecided where no two gaps can be told apart."""
        if not self.pairs:
            return "undecided"
        return "same" if self.same == self.pairs else "opposite" if self.opposite == self.pairs else "mixed"


def agreement(found: Study, key: str) -> Agreement:
    """Pairs whose gap in loss is resolved, and in how many of them the measure goes the same or the other way."""
    products = [
        direction(difference(a, b, key)) * gap
        for a, b in combinations(found.rows, 2)
        if (gap := direction(difference(a, b, "gap_loss")))
    ]
    return Agreement(products.count(1), products.count(-1), len(products))


def findings(found: Study) -> list[str]:
    """What the numbers say, in sentences made from them."""
    first, last = found.rows[0], found.rows[-1]
    lines = [_change(first, last, "gap_loss", "", 3), _change(first, last, "gap_error", " points", 1)]
    ends = f"From weight decay {first.weight_decay:g} to {last.weight_decay:g} "
    verdicts = {key: agreement(found, key) for key in MEASURES}
    pairs = len(found.rows) * (len(found.rows) - 1) // 2
    told = next(iter(verdicts.values())).pairs
    order = f"{told} of {pairs} pairs of solutions differ in gap in loss by more than the noise of the digits."
    words = {"same": "Ordered as the gap", "opposite": "Ordered against it", "mixed": "Neither"}
    for verdict, text in words.items():
        keys = [COLUMNS[key] for key, value in verdicts.items() if value.verdict == verdict]
        order += f" {text}: {', '.join(keys)}." if keys else ""
    return [ends + "; ".join(lines) + ".", order, _sharpness(first, last)]


def _change(first: Row, last: Row, key: str, unit: str, digits: int) -> str:
    """One gap at both ends, the paired change, and whether it is more than noise."""
    change = difference(first, last, key)
    noise = "within its own noise" if direction(change) == 0 else "more than its noise"
    ends = " to ".join(f"{float(row.values[key].value):.{digits}f}" for row in (first, last))
    size = f"{float(change.value):+.{digits}f} ± {float(change.stderr):.{digits}f}{unit}"
    return f"the {first.values[key].name} goes from {ends}, by {size} digit for digit, {noise}"


def _sharpness(first: Row, last: Row) -> str:
    """The spectral norm against the gap in loss, between the ends."""
    norms = [float(row.values["spectral_norm"].value) for row in (first, last)]
    gap, norm = (direction(difference(first, last, key)) for key in ("gap_loss", "spectral_norm"))
    text = f"The spectral norm goes from {norms[0]:.3g} to {norms[1]:.3g}"
    if gap * norm < 0:
        text += ": the sharper of the two solutions has the smaller gap in loss"
    elif gap * norm > 0:
        text += ": the sharper of the two solutions has the larger gap in loss"
    else:
        text += ", which the gaps in loss are too noisy to compare with" if gap == 0 else ", no change to speak of"
    return f"{text}. This is one seed and {len(first.losses[1])} test digits."


# ------------------------------------------------------------------------------------------------ files


def table(found: Study) -> dict[str, Any]:
    """Settings, rows and findings as plain data."""
    settings = {**dataclasses.asdict(found.settings), "dtype": str(found.settings.dtype).removeprefix("torch.")}
    rows = [
        {"weight_decay": row.weight_decay, "train_error": row.train_error, "train_loss": row.train_loss}
        | {key: _plain(value) for key, value in row.values.items()}
        for row in found.rows
    ]
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    return {
        "settings": settings,
        "num_params": found.rows[0].spectrum.dim,
        "versions": versions,
        "rows": rows,
        "order_by_gap_in_loss": {key: dataclasses.asdict(agreement(found, key)) for key in MEASURES},
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


def save(found: Study, folder: Path) -> list[Path]:
    """Write table.json, and each spectrum for `ritz.load`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "table.json"
    target.write_text(json.dumps(table(found), indent=1) + "\n", encoding="utf-8")
    return [target, *(row.spectrum.save(folder / f"spectrum-{row.weight_decay:g}") for row in found.rows)]
