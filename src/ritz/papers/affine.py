"""Figure 2 of seed 003: for an affine predictor the Hessian trace of a sample is its ACEHT.

With logits theta'x + b and softmax S the trace of a sample's Hessian is (|x|^2 + 1) (1 - sum_j S_j^2), the ACEHT of
proposition 3.1: an identity, so that the correlation r over 1,000 images of MNIST is 1. The paper has 0.97, from
PyHessian's estimates, and lays the rest to the numerical method. Both are here: traces that are exact, and estimates by
PyHessian's rule, by which each sample stops drawing random vectors for itself.

How far estimates are from the line depends on what the paper does not state, the "arbitrarily chosen" weights and the
range of the pixels. Here weights have a standard deviation of 0.05 and pixels lie in [0, 1]. By the rule, on 300 images
and two seeds each, r is 0.92 to 0.96 for standard deviations from 0.005 to 0.5; with pixels in [-1, 1] it goes from 0.1
at 0.005 over 0.5 to 0.7 at 0.05 to 0.98 at 0.5, and below 0.1 errors hardly grow with the trace. So 0.97 is within
reach, and no number of one setting can refute it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..batches import isolated_rng
from ..estimators.samples import sample_traces
from ..measures.margins.summaries import sample_aceht
from ..measures.outputs import sample_outputs
from ..measures.study.correlation import pearson, spearman
from ..risk import Risk
from ..space import random_permutation
from .base import Claim
from .data.images import Data
from .margins_hutchinson import one_by_one
from .over_seeds import correlation, mean
from .pieces import Pieces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[int, int], None]  # (done, total)

NUM_IMAGES = 1000
PRINTED = 0.97
SPREAD = 0.05  # of the arbitrary weights, which the paper does not state


def compare(data: Data, seed: int, num: int = NUM_IMAGES, points: bool = False) -> dict[str, Any]:
    """One predictor with random weights on random images: correlations of ACEHT with traces, exact and estimated.

    Returns:
        r with exact traces, the largest relative difference to them, r with estimates by PyHessian's rule, Spearman's
        rho between the size of their errors and the traces, and how many random vectors a sample took, on average;
        with `points` every image's ACEHT and its two traces too.

    Example:
        >>> X = torch.arange(40, dtype=torch.float64).reshape(10, 4) / 40
        >>> found = compare((X, torch.arange(10)), seed=0, num=10)
        >>> abs(found["exact"] - 1) < 1e-9, found["difference"] < 1e-9
        (True, True)
    """
    if not 3 <= num <= len(data[0]):
        raise ValueError(f"a correlation needs 3 images or more, of the {len(data[0])} that there are, got {num}")
    rows = random_permutation(len(data[0]), ("affine images", seed))[:num].to(data[0].device)
    X, y = data[0][rows].double(), data[1][rows]
    with isolated_rng(seed):
        model = nn.Linear(X.shape[1], 10, dtype=torch.float64)
        nn.init.normal_(model.weight, std=SPREAD)
        nn.init.normal_(model.bias, std=SPREAD)
    risk = Risk(model.to(X.device), nn.CrossEntropyLoss(), (X, y))
    predicted = sample_aceht(sample_outputs(risk))
    exact = torch.as_tensor(sample_traces(risk, method="exact").value).to(predicted)
    ruled, probes = one_by_one(model, (X, y), seed).to(predicted)
    shown = {"aceht": predicted, "trace": exact, "estimate": ruled}
    each = {name: [float(f"{x:.4g}") for x in values.tolist()] for name, values in shown.items()}
    return {
        "exact": pearson(predicted, exact, resamples=1).value,
        "difference": float(((predicted - exact).abs() / exact).max()),
        "ruled": pearson(predicted, ruled, resamples=1).value,
        "errors": spearman((ruled - exact).abs(), exact, resamples=1).value,
        "probes": float(probes.mean()),
        **({"points": each} if points else {}),
    }


def study(
    data: Data, seeds: Sequence[int], num: int = NUM_IMAGES, pieces: Pieces | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """`compare` for every seed, with the points of the first."""
    found, keep = [], (pieces or Pieces()).keep
    for done, seed in enumerate(seeds, 1):
        work = partial(compare, seed=seed, num=num, points=done == 1)
        found.append({"seed": seed, **keep(f"seed {seed}", work, data)})
        if progress is not None:
            progress(done, len(seeds))
    return found


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """What the paper says of figure 2, beside the rows of `study`; means over seeds with their errors.

    Example:
        >>> about = {"exact": 1.0, "difference": 1e-12, "errors": 0.3, "probes": 36.0}
        >>> [claim.verdict for claim in claims([{**about, "ruled": r} for r in (0.95, 0.96)])]
        ['holds', 'holds', 'not decidable', 'holds']
    """
    seen = f"{len(rows)} predictors with weights of standard deviation {SPREAD:g}, pixels in [0, 1]"
    estimates = f"{seen}; {mean(row['probes'] for row in rows).value:.1f} random vectors of a sample, on average"
    paper, where = "seed 003", "figure 2"
    return [
        Claim(
            paper=paper, where="proposition 3.1", expected=1.0, tolerance=1e-6,
            measured=min(row["exact"] for row in rows), evidence=seen,
            text="r between ACEHT and the exact Hessian traces, smallest over predictors",
        ),
        Claim(
            paper=paper, where="proposition 3.1", expected=1e-6, relation="<=",
            measured=max(row["difference"] for row in rows), evidence=seen,
            text="ACEHT is the trace: largest relative difference of a sample",
        ),
        Claim(
            paper=paper, where=where, expected=PRINTED, tolerance=0.02,
            measured=correlation(row["ruled"] for row in rows), evidence=estimates,
            text="r = 0.97, with traces estimated by PyHessian's rule",
            short_of="weights and a range of pixels, which it does not state",
        ),
        Claim(
            paper=paper, where=where, expected=0.0, relation=">=", measured=correlation(row["errors"] for row in rows),
            text="errors grow with the trace: rank correlation of |error| with the trace, positive", evidence=estimates,
        ),
    ]  # fmt: skip


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Figure 2: traces against ACEHT for one predictor, as they are and as they are estimated; r of every predictor."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9.6, 3.2), layout="constrained", facecolor="white")
    panels = drawing.subplots(1, 3)
    empty: dict[str, list[float]] = {"aceht": [], "trace": [], "estimate": []}
    shown = next((row["points"] for row in rows if "points" in row), empty)
    kinds = {"trace": ("exact", "Hessian trace"), "estimate": ("ruled", "estimate by PyHessian's rule")}
    for place, (ax, (name, (key, label))) in enumerate(zip(panels, kinds.items(), strict=False)):
        ax.scatter(shown["aceht"], shown[name], s=5, lw=0, alpha=0.5)
        ax.set(xlabel="ACEHT", ylabel=label)
        ax.set_title(f"one predictor, r = {rows[0][key]:.4f}", fontsize=9)
        panels[2].plot([place] * len(rows), [row[key] for row in rows], "o", ms=4)
    panels[2].axhline(PRINTED, color="k", lw=0.8, ls="--", label="printed")
    panels[2].set_xticks([0, 1], ["exact", "PyHessian's rule"])
    panels[2].set(ylabel="r with ACEHT", xlim=(-0.5, 1.5))
    panels[2].set_title(f"every one of {len(rows)}", fontsize=9)
    panels[2].legend(frameon=False, fontsize=8)
    return drawing
