"""What follows from the rows of `penalty_grid`: gains at the eta that held-out images choose, and Tr H beside Tr G."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..measures.study.correlation import spearman
from ..results import Estimate
from .base import Claim
from .experiment import Rows
from .over_seeds import HALF, correlation, difference, ratio, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED_ETA, PUBLISHED_DECAY = 1e-4, 5e-4  # table 7; at other weight decays it has no eta on CIFAR-100
GRID = "the paper has eta 1e-4, 3e-4 and 5e-4, with one seed, at the best of weight decays 0, 1e-4, 3e-4 and 5e-4"
FORM_ETA = 1e-3  # at which Tr H is trained on too
SAME = 0.25  # percentage points: as in `trace_penalty`
EXACT = 1e-10  # relative: rounding of double precision, over some ten thousand terms
CHANCE = 20.0  # per cent: a network of ten classes below this has learned nothing, or has lost it
PLACE = "the MLP on MNIST in place of WideResNet on CIFAR-100"

Row = Mapping[str, Any]
_claim = partial(Claim, paper="seed 002")


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Gains of the chosen and of the published eta at each weight decay, along the grid, and the two traces.

    The paper's weight decay comes first; gains at another one are questions of ours.

    Example:
        >>> rows = [
        ...     {"kind": "network", "form": "ggn", "eta": eta, "weight_decay": 0.0, "seed": seed,
        ...      "trace": 9 - 900 * eta, "images": 55_000, "epochs": 50, "train_accuracy": 99.0,
        ...      "train_loss": 0.1, "val_loss": 0.3, "test_loss": 0.3, "val_accuracy": 95 + 100 * eta,
        ...      "test_accuracy": 95 + seed - 100 * eta}
        ...     for seed in (0, 1) for eta in (0.0, 1e-4, 1e-3)
        ... ]
        >>> found = claims(rows)
        >>> found[0].text, found[0].verdict  # chosen on held-out images, judged on test images
        ('test accuracy, eta 0.001 minus 0 at weight decay 0: percentage points', 'refuted')
    """
    networks = [_with_gaps(row) for row in rows if row["kind"] == "network"]
    grid = [row for row in networks if row["form"] == "ggn"]
    found = []
    decays = dict.fromkeys(row["weight_decay"] for row in grid)
    for decay in sorted(decays, key=lambda decay: decay != PUBLISHED_DECAY):
        found += _gains([row for row in grid if row["weight_decay"] == decay], decay)
    hessian = [row for row in networks if row["form"] == "hessian"]
    found += _forms(grid, hessian) if hessian else []
    return found + _identities([row for row in rows if row["kind"] == "identity"])


def _with_gaps(row: Row) -> dict[str, Any]:
    """With the test error, and gaps of error, in percentage points, and of loss, from training to test images."""
    gaps = {"gap_error": row["train_accuracy"] - row["test_accuracy"], "gap_loss": row["test_loss"] - row["train_loss"]}
    return {**row, "test_error": 100 - row["test_accuracy"], **gaps}


def by_seed(rows: Sequence[Row], key: str, **about: Any) -> dict[int, float]:
    """One number of each seed, of the rows that have these entries."""
    return {row["seed"]: row[key] for row in rows if all(row[name] == value for name, value in about.items())}


def chosen(rows: Sequence[Row]) -> float:
    """The eta above 0 with the highest mean accuracy on held-out images; the smaller of two that are equal.

    Example:
        >>> chosen([{"eta": eta, "val_accuracy": value} for eta, value in ((0.0, 99.0), (0.1, 97.0), (1.0, 98.0))])
        1.0
    """
    etas: list[float] = sorted({row["eta"] for row in rows} - {0.0})
    return max(etas, key=lambda eta: statistics.fmean(row["val_accuracy"] for row in rows if row["eta"] == eta))


def _gains(rows: Sequence[Row], decay: float) -> list[Claim]:
    """At one weight decay."""
    best, etas = chosen(rows), sorted({row["eta"] for row in rows})
    seeds = sorted({row["seed"] for row in rows})
    told = f"{rows[0]['images']:,} images, {rows[0]['epochs']} epochs, {len(seeds)} seeds"
    where = f"section 6, by {PLACE}"

    def means(key: str, digits: int = 2) -> str:
        each = (statistics.fmean(row[key] for row in rows if row["eta"] == eta) for eta in etas)
        return ", ".join(f"{eta:g}: {value:.{digits}f}" for eta, value in zip(etas, each, strict=True))

    def claim(key: str, name: str, eta: float, relation: Any, digits: int = 2, **about: Any) -> Claim:
        pair = [by_seed(rows, key, eta=which) for which in (0.0, eta)]
        ratios = key == "trace"
        text = f"{name}, eta {eta:g} {'over' if ratios else 'minus'} 0 at weight decay {decay:g}"
        unit = "ratio" if ratios else "percentage points" if "loss" not in key else "nats"
        return _claim(
            where=where, text=f"{text}: {unit}", expected=1.0 if ratios else 0.0, relation=relation,
            measured=ratio(*pair) if ratios else difference(*pair),
            evidence=f"{told}; eta {best:g} is chosen by the mean accuracy on held-out images, by eta "
            f"{means('val_accuracy')}; mean {name} by eta {means(key, digits)}; {GRID}",
            **({"ours": True} if decay != PUBLISHED_DECAY else {}) | about,
        )  # fmt: skip

    found = [
        claim("test_accuracy", "test accuracy", best, ">="),
        claim("gap_error", "gap of test and training error", best, "<="),
        claim("gap_loss", "gap of test and training loss", best, "<=", 4, ours=True),
        claim("trace", "Tr H", best, "<=", 1, ours=True),
        claim("train_accuracy", "training accuracy", best, "=", tolerance=SAME, ours=True),
    ]
    if best != PUBLISHED_ETA and PUBLISHED_ETA in etas:
        found.append(claim("test_accuracy", "test accuracy", PUBLISHED_ETA, ">="))
    for key, name in (("gap_error", "gap of test and training error"), ("test_error", "test error")):
        ranks = correlation(_ranks([row for row in rows if row["seed"] == seed], key) for seed in seeds)
        found.append(
            _claim(
                where=where, ours=True, expected=0.0, relation=">=", measured=ranks,
                text=f"the smaller Tr H, the smaller the {name}, over eta at weight decay {decay:g}: rank correlation",
                evidence=f"{told}; mean test accuracy by eta {means('test_accuracy')}; mean Tr H {means('trace', 1)}",
            )
        )  # fmt: skip
    return found


def _ranks(rows: Sequence[Row], key: str) -> float:
    """The rank correlation of the trace and another number over the grid of one seed."""
    pair = [torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in ("trace", key)]
    return float(spearman(*pair, resamples=1).value)


def _forms(grid: Sequence[Row], hessian: Sequence[Row]) -> list[Claim]:
    """Training on Tr H beside training on Tr G."""
    eta = hessian[0]["eta"]
    found = []
    lost = [row["train_accuracy"] < CHANCE for row in hessian]
    least = min(row["train_accuracy"] for row in hessian)
    where = "section 6, on a network without BatchNorm"
    found.append(
        _claim(
            where=where, ours=True, expected=0.0, reference=HALF, measured=share(lost),
            text=f"training on L + eta Tr H, eta {eta:g}, does not diverge: share of networks at chance",
            evidence=f"{len(lost)} networks, {PLACE}; the least training accuracy is {least:.2f} %. The paper's "
            "network, whose training on Tr H diverged, has BatchNorm",
        )
    )  # fmt: skip
    for decay in dict.fromkeys(row["weight_decay"] for row in hessian):
        for key, name in (("test_accuracy", "test accuracy"), ("trace", "Tr H")):
            pair = [
                by_seed(rows, key, eta=eta, weight_decay=decay) for rows in (grid, hessian)
            ]  # fmt: skip
            how = "over" if key == "trace" else "minus"
            measured: Estimate = ratio(*pair) if key == "trace" else difference(*pair)
            means = [statistics.fmean(values.values()) for values in pair]
            found.append(
                _claim(
                    where=where, ours=True, expected=1.0 if key == "trace" else 0.0, measured=measured,
                    tolerance=0.1 if key == "trace" else SAME,
                    text=f"Tr G instead of Tr H changes nothing, eta {eta:g}, weight decay {decay:g}: {name} after "
                    f"Tr H {how} after Tr G",
                    evidence=f"{len(pair[0])} seeds, mean {name} {means[0]:.2f} with Tr G and {means[1]:.2f} with "
                    "Tr H; the traces are equal, what one random vector says of them is not",
                )
            )  # fmt: skip
    return found


def _identities(rows: Sequence[Row]) -> list[Claim]:
    """Whether the two traces and their gradients are the same, network by network."""
    found = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        traces = ", ".join(f"{row['trace_hessian']:.4g} and {row['trace_ggn']:.4g}" for row in own)
        spreads = {form: statistics.fmean(row[f"{form}_spread"] for row in own) for form in ("ggn", "hessian")}
        below = statistics.fmean(row["hessian_negative"] for row in own)
        first = own[0]
        part = "all" if first["columns"] == first["parameters"] else f"{first['columns']} of the"
        told = (
            f"{len(own)} trained networks, {part} {first['parameters']:,} diagonal entries in double precision on "
            f"{first['images']} images: Tr H and Tr G {traces}. One draw of the penalty on 128 images spreads by "
            f"{spreads['ggn']:.2f} of its mean for Tr G and {spreads['hessian']:.2f} for Tr H, "
            f"{100 * below:.0f} % of the latter below 0"
        )
        name = {"relu": "the ReLU network", "batchnorm": "with BatchNorm by the statistics of the batch"}.get(
            network, f"with {network} instead of ReLU"
        )
        for key, what in (("trace_gap", "Tr H is Tr G"), ("gradient_gap", "the gradient of Tr H is that of Tr G")):
            found.append(
                _claim(
                    where="section 6, Tr H -> Tr G", ours=True, expected=EXACT, relation="<=", evidence=told,
                    text=f"{what}, {name}: largest relative difference", measured=_largest(own, key),
                )
            )  # fmt: skip
    return found


def _largest(rows: Sequence[Row], key: str) -> float:
    return max((float(row[key]) for row in rows), default=math.nan)


def figure(rows: Rows) -> "Figure":
    """Test error, gap and trace against eta: means over seeds, every seed a dot; the ring is the chosen eta."""
    from matplotlib.figure import Figure

    networks = [_with_gaps(row) for row in rows if row["kind"] == "network"]
    grid = [row for row in networks if row["form"] == "ggn"]
    etas = sorted({row["eta"] for row in grid})
    least = min(eta for eta in etas if eta) / 10  # where 0 is drawn
    picture = Figure(figsize=(11, 3.6), layout="constrained", facecolor="white")
    panels = {
        "test_error": "test error, %", "gap_error": "gap of test and training error, points",
        "trace": "Tr H on training images",
    }  # fmt: skip
    for ax, (key, label) in zip(picture.subplots(1, 3), panels.items(), strict=True):
        for place, decay in enumerate(dict.fromkeys(row["weight_decay"] for row in grid)):
            own = [row for row in grid if row["weight_decay"] == decay]
            shift = 1.12 ** (2 * place - 1)
            at = {eta: statistics.fmean(row[key] for row in own if row["eta"] == eta) for eta in etas}
            ax.plot([(eta or least) * shift for eta in etas], list(at.values()), "-", color=f"C{place}",
                    label=f"weight decay {decay:g}")  # fmt: skip
            ax.plot([(row["eta"] or least) * shift for row in own], [row[key] for row in own], ".", ms=4,
                    color=f"C{place}", alpha=0.6)  # fmt: skip
            best = chosen(own)
            ax.plot([best * shift], [at[best]], "o", ms=10, mfc="none", color=f"C{place}")
        others = [row for row in networks if row["form"] == "hessian"]
        ax.plot([row["eta"] for row in others], [row[key] for row in others], "kx", ms=4, label="trained on Tr H")
        ax.set(xscale="log", xlabel="η", ylabel=label)
        ax.set_xticks([least, *etas[1:]], ["0", *(f"{eta:g}" for eta in etas[1:])], fontsize=7, rotation=45)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    for ax in (picture.axes[0], picture.axes[2]):
        ax.set_yscale("log")
    picture.axes[0].legend(frameon=False, fontsize=8)
    picture.suptitle("dots: every seed, lines: means, ring: η chosen on held-out images", fontsize=9)
    return picture
