"""Section 3.2.1 of seed 003: what Hessian traces of single samples cost, and what margins cost.

The paper took about 1.5 hours for the traces of all 60,000 images of MNIST with PyHessian, and 5 seconds for their
margins: 1,080 to 1. Here, on LeNet after an epoch, all ways are timed in turn in one process on one device, so that
ratios mean something though seconds do not:

    pyhessian   the package itself, one sample after another, where it is installed
    one by one  the same by our own words: one graph of the gradient per sample, then random signs v and v'Hv until the
                mean changes by less than 1e-3 (relative), 100 at most
    probes      `ritz.sample_traces` by as many random signs as that took on average, all samples of a batch at once
    exact       `ritz.sample_traces` without any randomness, all samples of a batch at once
    margins     a forward pass over the whole training set and f_y - max f, nothing else, in batches as those of `exact`

The first four have the same samples; `exact` also has more of them, for its fixed costs are what a few samples pay. To
what all 60,000 would take one is led by proportion: an extrapolation, and said to be one.
"""

import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..estimators.samples import sample_traces
from ..measures.study.correlation import pearson
from .base import Claim
from .data.images import Data
from .experiment import Progress, Rows, Setting, short
from .margins_along import recipe
from .margins_hutchinson import by_package, one_by_one
from .margins_points import drawn, load_grey, mean, risk_of
from .pieces import Pieces
from .train import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRINTED = 1.5 * 3600 / 5  # traces over margins
WHOLE = 60_000
AT_ONCE = 1000  # samples in a batch
FACTOR = math.log10(2)  # a ratio of times within a factor of two is the same

Ways = dict[str, tuple[float, Tensor]]  # seconds, and what came out

_claim = partial(Claim, paper="seed 003", where="section 3.2.1")


def run(setting: Setting, progress: Progress) -> tuple[Rows, list[Claim]]:
    """Train LeNet for an epoch, time all ways on random samples, several times; judge the ratios."""
    data = load_grey("MNIST", setting, setting.pick(360, WHOLE, WHOLE), setting.pick(50, 10_000, 10_000))
    model = train(recipe(0, 1), data, train_subset=1000).model
    num, many = setting.pick(3, 100, 500), setting.pick(20, 2000, 10_000)
    seeds = setting.seed_range(2, 4, 8)
    measure_once(model, data["train"], 2, 2, seed=-1)  # what is loaded and chosen on the first call is not timed
    rows, keep = list[dict[str, Any]](), Pieces(setting, "timing").keep
    for seed in seeds:
        work = partial(measure_once, num=num, many=many, seed=seed)
        rows.append(keep(f"seed {seed}", work, model, data["train"]))
        progress("repetitions", len(rows), len(seeds))
    return rows, claims(rows)


def measure_once(model: nn.Module, data: Data, num: int, many: int, seed: int) -> dict[str, Any]:
    """Seconds of each way for one sample, and how far its traces are from the exact ones."""
    some, more = (drawn(data, count, seed) for count in (num, many))
    probes, ways = _all_ways(model, some, seed)
    ways["exact, more samples"] = _timed(lambda: _exact(model, more))
    ways["margins"] = _timed(lambda: margins(model, data))
    counts = {"exact, more samples": len(more[0]), "margins": len(data[0])}
    row: dict[str, Any] = {"seed": seed, "samples": num, "more_samples": len(more[0]), "margins_of": len(data[0])}
    row |= {"probes": short(probes), "device": str(data[0].device)}
    row["per_sample"] = {name: short(seconds / counts.get(name, num)) for name, (seconds, _) in ways.items()}
    truth = ways["exact"][1]
    rough = ways.keys() & {"pyhessian", "one by one", "probes"}
    row["errors"] = {name: _error(ways[name][1], truth) for name in sorted(rough)}
    return row


def _all_ways(model: nn.Module, some: Data, seed: int) -> tuple[float, Ways]:
    """Traces of the same samples by each way, and how many random signs one sample took on average."""
    loop = _timed(lambda: one_by_one(model, some, seed))
    probes = float(loop[1][1].mean())
    ways: Ways = {"one by one": (loop[0], loop[1][0])}
    if importlib.util.find_spec("pyhessian") is not None:
        ways["pyhessian"] = _timed(lambda: by_package(model, some, seed))
    risk = risk_of(model, some)
    ways["probes"] = _timed(
        lambda: torch.as_tensor(sample_traces(risk, method="probes", num_probes=max(2, round(probes)), seed=0).value)
    )
    return probes, ways | {"exact": _timed(lambda: _exact(model, some))}


def _exact(model: nn.Module, data: Data) -> Tensor:
    return torch.as_tensor(sample_traces(risk_of(model, data, AT_ONCE), method="exact").value)


def margins(model: nn.Module, data: Data) -> Tensor:
    """f_y - max_(j != y) f_j of every sample, (N,), by as little work as it takes.

    Example:
        >>> margins(nn.Identity(), (torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]]), torch.tensor([0, 2]))).tolist()
        [1.0, -4.0]
    """
    found = []
    with torch.no_grad():
        for X, y in zip(data[0].split(AT_ONCE), data[1].split(AT_ONCE), strict=True):
            f, label = model(X), y[:, None]
            found.append(f.gather(1, label)[:, 0] - f.scatter(1, label, -math.inf).amax(1))
    return torch.cat(found)


def _timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds until the result is on the host."""
    start = time.perf_counter()
    found = work().cpu()
    return time.perf_counter() - start, found


def _error(estimates: Tensor, exact: Tensor) -> dict[str, float]:
    """Mean relative error, and r with the exact traces (NaN for fewer than three)."""
    relative = float(((estimates - exact).abs() / exact).mean())
    r = pearson(estimates.double(), exact.double(), resamples=1).value if len(exact) > 2 else math.nan
    return {"relative": short(relative), "r": short(r)}


# ---------------------------------------------------------------------------------------------- claims


def claims(rows: Rows) -> list[Claim]:
    """The ratio that the paper prints, beside those of PyHessian's way and of exact traces all at once."""
    package = all("pyhessian" in row["per_sample"] for row in rows)
    slow = "pyhessian" if package else "one by one"
    said = "PyHessian" if package else "PyHessian's rule, in our own loop"
    names = rows[0]["per_sample"]
    whole = {name: WHOLE * 10 ** float(mean(name, _logs(rows, name)).value) for name in names}
    about = (
        f"LeNet after one epoch; {len(rows)} repetitions on {rows[0]['device']}, {rows[0]['samples']} samples one by "
        f"one; all {WHOLE} would take, by proportion, "
    )
    about += ", ".join(f"{name} {seconds:.3g} s" for name, seconds in whole.items())
    r, relative = (mean(key, [row["errors"][slow][key] for row in rows]).value for key in ("r", "relative"))
    return [
        _claim(
            text=f"traces cost 1.5 h where margins cost 5 s: log10 of the ratio, {said}", expected=math.log10(PRINTED),
            tolerance=FACTOR, reference=0.0, measured=_ratio(rows, slow),
            evidence=f"{about}; these estimates are off by {100 * float(relative):.0f} % on average, r with the exact "
            f"traces {float(r):.3f}",
        ),
        _claim(
            text="exact traces, a batch at a time, cost as much more than margins: log10 of the ratio", ours=True,
            expected=math.log10(PRINTED), tolerance=FACTOR, reference=0.0, measured=_ratio(rows, "exact, more samples"),
            evidence=f"{about}; log10 of PyHessian's way over exact traces, on the same samples "
            f"{float(_ratio(rows, slow, 'exact').value):.2f}, with more samples "
            f"{float(_ratio(rows, slow, 'exact, more samples').value):.2f}",
        ),
    ]  # fmt: skip


def _ratio(rows: Rows, name: str, other: str = "margins") -> Any:
    """log10 of the seconds of one way over those of another, for one sample."""
    return mean(f"{name} / {other}", [a - b for a, b in zip(_logs(rows, name), _logs(rows, other), strict=True)])


def _logs(rows: Rows, name: str) -> list[float]:
    """log10 of the seconds of one sample, of every repetition."""
    return [math.log10(row["per_sample"][name]) for row in rows]


# ---------------------------------------------------------------------------------------------- figure


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Seconds of each way for one sample, every repetition."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6.5, 2.8), layout="constrained")
    ax = drawing.subplots()
    names = sorted(rows[0]["per_sample"], key=lambda name: -rows[0]["per_sample"][name])
    for row in rows:
        ax.plot([row["per_sample"][name] for name in names], range(len(names)), "o", ms=4, alpha=0.6, color="C0")
    ax.set(yticks=range(len(names)), yticklabels=names, xscale="log", xlabel="seconds for one sample")
    ax.grid(axis="x", alpha=0.3)
    return drawing
