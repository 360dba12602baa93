"""Figure 2 of seed 003: for an affine predictor the Hessian trace of a sample is its ACEHT.

With logits theta'x + b and softmax S the trace of a sample's Hessian is (|x|^2 + 1) (1 - sum_j S_j^2), the ACEHT of
proposition 3.1: an identity, so that the correlation r over 1,000 images of MNIST is 1. The paper has 0.97, from
Hutchinson's estimates, and lays the rest to the numerical method. Both are here: traces that are exact, and estimates
from as many random vectors as PyHessian's rule stops at.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..batches import isolated_rng
from ..estimators.samples import sample_traces
from ..measures.margins.summaries import sample_aceht
from ..measures.outputs import sample_outputs
from ..measures.study.correlation import pearson, spearman
from ..results import Estimate, from_samples
from ..risk import Risk
from ..space import random_permutation
from .base import Claim
from .data.images import Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[int, int], None]  # (done, total)

NUM_IMAGES = 1000
PRINTED = 0.97
SPREAD = 0.05  # of the arbitrary weights, which the paper does not state
PROBES = 36  # random vectors at which PyHessian's rule (relative change below 1e-3) stops here: 32 to 40


def compare(
    data: Data, seed: int, num: int = NUM_IMAGES, probes: int = PROBES, points: bool = False
) -> dict[str, Any]:  # fmt: skip
    """One predictor with random weights on random images: correlations of ACEHT with traces, exact and estimated.

    Returns:
        r with exact traces, the largest relative difference to them, r with estimates, and Spearman's rho between the
        size of their errors and the traces; with `points` every image's ACEHT and its two traces too.

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
    exact = _values(sample_traces(risk, method="exact")).to(predicted)
    rough = estimates(model, X, probes, seed).to(predicted)
    shown = {"aceht": predicted, "trace": exact, "estimate": rough}
    each = {name: [float(f"{x:.4g}") for x in values.tolist()] for name, values in shown.items()}
    return {
        "exact": pearson(predicted, exact, resamples=1).value,
        "difference": float(((predicted - exact).abs() / exact).max()),
        "estimated": pearson(predicted, rough, resamples=1).value,
        "errors": spearman((rough - exact).abs(), exact, resamples=1).value,
        **({"points": each} if points else {}),
    }


def estimates(model: nn.Linear, X: Tensor, probes: int, seed: int) -> Tensor:
    """Hutchinson's estimate of each sample's trace, (N,), from random signs of its own, as one computes them in turn.

    v'Hv = u'(diag S - S S')u with u = V (x, 1), V the signs as a matrix (classes, inputs + 1).

    Example:
        >>> model = nn.Linear(1, 2)
        >>> _ = nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        >>> abs(float(estimates(model, torch.tensor([[3.0]]), probes=4000, seed=0)) - 5) < 0.5  # (9 + 1) / 2
        True
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.cat([X, X.new_ones(len(X), 1)], dim=1).float()
    p = model(X).detach().softmax(1).float()
    found = []
    for x, s in zip(wide.split(_AT_ONCE), p.split(_AT_ONCE), strict=True):
        signs = torch.randint(0, 2, (len(x), probes * s.shape[1], x.shape[1]), generator=generator, dtype=torch.int8)
        u = ((2 * signs - 1).to(x) @ x[:, :, None]).reshape(len(x), probes, -1)
        found.append(((u.square() * s[:, None]).sum(2) - (u * s[:, None]).sum(2).square()).mean(1))
    return torch.cat(found)


_AT_ONCE = 25  # samples


def _values(traces: Estimate) -> Tensor:
    assert isinstance(traces.value, Tensor)
    return traces.value


def study(
    data: Data, seeds: Sequence[int], num: int = NUM_IMAGES, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """`compare` for every seed, with the points of the first."""
    found = []
    for done, seed in enumerate(seeds, 1):
        found.append({"seed": seed, **compare(data, seed, num, points=done == 1)})
        if progress is not None:
            progress(done, len(seeds))
    return found


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """What the paper says of figure 2, beside the rows of `study`; means over seeds with their errors.

    Example:
        >>> rows = [{"exact": 1.0, "difference": 1e-12, "estimated": r, "errors": 0.3} for r in (0.95, 0.96)]
        >>> [claim.verdict for claim in claims(rows)]
        ['holds', 'holds', 'refuted', 'not decidable', 'holds']
    """

    def mean(key: str) -> Estimate:
        return from_samples(key, torch.tensor([row[key] for row in rows], dtype=torch.float64))

    exact = min(row["exact"] for row in rows)
    seen = f"{len(rows)} predictors with weights of standard deviation {SPREAD:g}"
    paper, where = "seed 003", "figure 2"
    return [
        Claim(
            paper=paper, where="proposition 3.1", expected=1.0, tolerance=1e-6, measured=exact,
            text="r between ACEHT and the exact Hessian traces, least of all predictors", evidence=seen,
        ),
        Claim(
            paper=paper, where="proposition 3.1", expected=1e-6, relation="<=",
            measured=max(row["difference"] for row in rows), evidence=seen,
            text="ACEHT is the trace: largest relative difference of a sample",
        ),
        Claim(
            paper=paper, where=where, expected=PRINTED, tolerance=0.005, measured=exact,
            text="r = 0.97, with traces as they are",
            evidence="r is 1 by algebra: 0.97 is the error of the estimates",
        ),
        Claim(
            paper=paper, where=where, expected=PRINTED, tolerance=0.02, measured=mean("estimated"),
            text=f"r = 0.97, with traces estimated from {PROBES} random vectors",
            evidence="the weights and the number of random vectors of the paper are not known",
        ),
        Claim(
            paper=paper, where=where, expected=0.0, relation=">=", measured=mean("errors"),
            text="errors grow with the trace: rank correlation of |error| with the trace, positive",
            evidence=f"estimates from {PROBES} random vectors",
        ),
    ]  # fmt: skip


def figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Figure 2: traces against ACEHT for one predictor, as they are and as they are estimated; r of every predictor."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9.6, 3.2), layout="constrained", facecolor="white")
    panels = drawing.subplots(1, 3)
    empty: dict[str, list[float]] = {"aceht": [], "trace": [], "estimate": []}
    shown = next((row["points"] for row in rows if "points" in row), empty)
    kinds = {"trace": ("exact", "Hessian trace"), "estimate": ("estimated", f"estimate, {PROBES} random vectors")}
    for place, (ax, (name, (key, label))) in enumerate(zip(panels, kinds.items(), strict=False)):
        ax.scatter(shown["aceht"], shown[name], s=5, lw=0, alpha=0.5)
        ax.set(xlabel="ACEHT", ylabel=label)
        ax.set_title(f"one predictor, r = {rows[0][key]:.4f}", fontsize=9)
        panels[2].plot([place] * len(rows), [row[key] for row in rows], "o", ms=4)
    panels[2].axhline(PRINTED, color="k", lw=0.8, ls="--", label="printed")
    panels[2].set_xticks([0, 1], ["exact", "estimated"])
    panels[2].set(ylabel="r with ACEHT", xlim=(-0.5, 1.5))
    panels[2].set_title(f"every one of {len(rows)}", fontsize=9)
    panels[2].legend(frameon=False, fontsize=8)
    return drawing
