"""What seed 004 says of the noise of batch Hessians, judged by what `noise_spectrum` measured.

Intervals are over batches where a number is one of a batch (seeds together), and over seeds where it is one of a run.
Theorems and lemmas are general, and are asked of networks small enough for all of X. What they say of a limit is asked
at the batch sizes in use as a question of ours (`Claim.ours`).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .base import Claim
from .noise_spectrum_learned import section_7
from .noise_spectrum_measures import NINE, TOP, summary
from .over_seeds import mean

_claim = partial(Claim, paper="seed 004")

MODEL = "as a model of batch Hessians"  # section 4.1; the theorem itself is about other matrices, and stands
STATES = {"start": "at the first weights", "trained": "after training"}

Row = Mapping[str, Any]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """All of them: lemma 2, lemma 3, the batch size, theorem 4, theorem 1, first weights and divergence, the gap.

    Raises:
        ValueError: If there are not two seeds or more of each part.
    """
    dense, runs = summary(rows, kind="dense"), summary(rows, kind="run")
    for name, part in (("dense", summary(dense, state="trained")), ("run", summary(runs, arm="flat"))):
        if len({row["seed"] for row in part}) < 2:
            raise ValueError(f"error bars need two seeds or more of the rows of kind {name!r}, got {len(part)}")
    found = [*_bounded(dense), *_normal(dense), *_by_size(dense)]
    for state in STATES:
        found += [*_semicircle(dense, state), *_conditions(dense, state)]
    return [*found, *_lanczos(runs), *_spikes(dense), *section_7(rows)]


def _at(row: Row, size: int) -> Row:
    """The spectra of a row at a batch size."""
    return next(part for part in row["spectra"] if part["size"] == size)


def _where(dense: Sequence[Row]) -> str:
    seeds = len({row["seed"] for row in dense})
    return f"{dense[0]['params']:,} parameters, {dense[0]['images']:,} images of Fashion-MNIST, {seeds} seeds"


# ------------------------------------------------------------------------------------------------- appendix A


def _bounded(dense: Sequence[Row]) -> list[Claim]:
    """Lemma 2 and a step of its proof."""
    parts = [row["bounds"] for row in dense]
    ratio = max(part["entry"] / (math.sqrt(part["dim"]) * part["lipschitz"]) for part in parts)
    sharp = max(part["entry"] / part["norm"] for part in parts)
    seen = f"Batches of {dense[0]['spikes']['size']}; {_where(dense)}, both states; L is the largest |eigenvalue| seen "
    seen += "at these weights."
    return [
        _claim(
            where="lemma 2", text="entries are bounded, |X_jk| <= sqrt(P) L: largest |X_jk| / (sqrt(P) L)",
            expected=1.0, relation="<=", measured=ratio,
            evidence=f"{seen} An entry is never larger than the norm: |X_jk| <= |X|, measured {sharp:.2g} of it, so "
            "that the factor sqrt(P) is not needed.",
        ),
        _claim(
            where="lemma 2, proof", text="the largest eigenvalue of X is smaller than L: |X| / L",
            expected=1.0, relation="<=", measured=max(part["norm"] / part["lipschitz"] for part in parts),
            evidence=f"{seen} The difference of two functions with constant L has the constant 2 L, not L: the step "
            "needs matrices that are nearly positive.",
        ),
    ]  # fmt: skip


def _normal(dense: Sequence[Row]) -> list[Claim]:
    """Lemma 3: the entries become normal. Kolmogorov's test for each, at Bonferroni's level."""
    found = []
    sizes = [part["size"] for part in dense[0]["entries"]]
    for state, words in STATES.items():
        mine = [row["entries"] for row in summary(dense, state=state)]
        for place in (sizes.index(dense[0]["spikes"]["size"]), len(sizes) - 1):
            parts = [entries[place] for entries in mine]
            middle = ", ".join(f"{part['kurtosis'][1]:.2g} (to {part['kurtosis'][2]:.2g})" for part in parts)
            found.append(
                _claim(
                    where="lemma 3", text="entries of X are normal at the batch sizes in use: share of entries for "
                    f"which this is rejected at B = {sizes[place]}, {words}", expected=0.05, relation="<=", ours=True,
                    measured=_average(parts, "rejected"),
                    evidence=f"{parts[0]['batches']} independent batches, {parts[0]['entries']} entries, Kolmogorov's "
                    f"test with mean and variance known, 5 % for all entries together (Bonferroni); singly "
                    f"{_average(parts, 'singly'):.2f} are rejected. Those rejected have {_share(parts)} of the "
                    f"variance. Excess kurtosis, median (and 90 % quantile) by seed: {middle}. It falls as 1 / B, as "
                    "the central limit theorem has it; the convergence is in law, not almost sure as printed.",
                )
            )  # fmt: skip
    first, last = (_average([row["entries"][place] for row in dense], "rejected") for place in (1, -1))
    found.append(
        _claim(
            where="lemma 3", text="entries of X become normal as B grows: share of entries for which this is "
            f"rejected at B = {sizes[-1]}, minus that at B = {sizes[1]}",
            expected=0.0, relation="<=", measured=last - first, evidence=f"{_where(dense)}, both states.",
        )
    )  # fmt: skip
    return found


def _average(parts: Sequence[Row], key: str) -> float:
    return math.fsum(part[key] for part in parts) / len(parts)


def _share(parts: Sequence[Row]) -> str:
    return f"{100 * _average(parts, 'rejected_weight'):.0f} %"


def _by_size(dense: Sequence[Row]) -> list[Claim]:
    """The factor 1 / B - 1 / N of lemma 3 and section 7.1."""
    found = []
    for state, words in STATES.items():
        mine = summary(dense, state=state)
        sizes = [part["size"] for part in mine[0]["spectra"]]
        cases = (("1 / B - 1 / N", 1 / mine[0]["images"], sizes[-1]), ("1 / B for small B", 0.0, sizes[1]))
        for text, other, last in cases:
            ends = sizes[0], last
            factor = (1 / ends[0] - other) / (1 / ends[1] - other)
            ratios = [_level(row, ends[0]) / _level(row, ends[1]) / factor for row in mine]
            found.append(
                _claim(
                    where="lemma 3, section 7.1",
                    text=f"the variance goes as {text}: Tr X^2 at B = {ends[0]} over that at {ends[1]}, divided by the "
                    f"predicted ratio, {words}", expected=1.0, tolerance=0.1, measured=mean(ratios),
                    evidence=f"{_where(dense)}; batches from 1,000 orders of blocks of {_smallest(dense)}, X against "
                    "the mean of all. Without replacement 1 / B - 1 / N is exact in the mean, whatever the law of X; "
                    "1 / B is its limit for small B.",
                )
            )  # fmt: skip
    return found


def _level(row: Row, size: int) -> float:
    return float(_at(row, size)["level"])


def _semicircle(dense: Sequence[Row], state: str) -> list[Claim]:
    """Theorem 4 and equation 7: the eigenvalues."""
    mine = summary(dense, state=state)
    sizes = [part["size"] for part in mine[0]["spectra"]]
    size = mine[0]["spikes"]["size"]

    def all_of(key: str, size: int = size) -> list[float]:
        return [value for row in mine for value in _at(row, size)[key]]

    along = ", ".join(f"{mean(all_of('kurtosis', s)).value:.0f} at B = {s}" for s in sizes)
    seen = f"{_where(dense)}, batches of {size}, all eigenvalues."
    claim = partial(_claim, where=f"theorem 4, equation 7, {MODEL}")
    few = f"Of Tr X^2, the {TOP} largest of {mine[0]['params']} eigenvalues have"
    return [
        claim(
            text=f"eigenvalues of X follow a semicircle: their kurtosis, {STATES[state]}", expected=2.0, tolerance=0.2,
            measured=mean(all_of("kurtosis")), evidence=f"{seen} By batch size: {along}.",
        ),
        claim(
            text="eigenvalues of X follow a semicircle: distance of the distribution functions, "
            f"{STATES[state]}", expected=0.02,
            relation="<=", measured=mean(all_of("distance")),
            evidence=f"{seen} Independent entries have about {3 / mine[0]['params']:.1g}. "
            f"{100 * mean(all_of('near_zero')).value:.0f} % of the eigenvalues are within 1 % of the edge from 0, "
            "where a semicircle has 1.3 %.",
        ),
        claim(
            text="eigenvalues of X end where a semicircle does: share of Tr X^2 beyond its edge, "
            f"{STATES[state]}", expected=0.02, relation="<=",
            measured=mean(all_of("outside")),
            evidence=f"{seen} {few} {mean(all_of('top')).value:.2f}, where a semicircle's have about "
            f"{4 * TOP / mine[0]['params']:.2g}; {mean(all_of('along')).value:.2f} lies along the {NINE} largest "
            "eigenvectors of H.",
        ),
    ]  # fmt: skip


def _conditions(dense: Sequence[Row], state: str) -> list[Claim]:
    """The conditions under which theorem 4 is proved."""
    mine = [row["dependence"] for row in summary(dense, state=state)]
    degenerate = (
        "In the proof's scaling the conditions are met by a law of width 0: with eigenvalues below L, "
        "sum_ij E X_ij^2 / P^2 <= L^2 / P goes to 0, and sigma_e with it."
    )
    excess = mean([value for part in mine for value in part["excess"]])
    spreads = ", ".join(f"{part['relative_spread']:.2f}" for part in mine)
    return [
        _claim(
            where="theorem 4, condition iii", text="rows of X have about the same variance: mean |row - mean| / mean, "
            f"{STATES[state]}", expected=0.0, tolerance=0.1, measured=min(part["row_spread"] for part in mine),
            evidence=f"{_where(dense)}, the smallest of them. The largest row has "
            f"{max(part['row_largest'] for part in mine):.0f} times the mean. {degenerate}",
        ),
        _claim(
            where="section 4.1, theorem 4, condition i",
            text="entries of X depend on each other only weakly: variance of Tr X^2 over that of independent normal "
            f"entries of the same variances, {STATES[state]}", expected=1.0, tolerance=1.0, measured=excess,
            evidence=f"{_where(dense)}, batches of {_smallest(dense)}. By seed, Tr X^2 varies by {spreads} of its "
            f"mean; independent entries of one variance would vary by {2 / dense[0]['params']:.1g}.",
        ),
    ]  # fmt: skip


def _smallest(dense: Sequence[Row]) -> int:
    return int(dense[0]["spectra"][0]["size"])


def _lanczos(runs: Sequence[Row]) -> list[Claim]:
    """The larger network."""
    found = [row["lanczos"] for row in summary(runs, arm="flat")]
    distance = min(part["least_distance"] for part in found)
    seen = f"Lanczos on the noise of one batch against {found[0]['images']:,} images, one batch for each of "
    seen += f"{len(found)} seeds; the distance of the distribution functions is {distance:.2f} at least."
    claim = partial(_claim, where=f"theorem 4, equation 7, {MODEL}", evidence=seen)
    return [
        claim(
            text="eigenvalues of X follow a semicircle: their kurtosis, 11,018 parameters after training", expected=2.0,
            tolerance=0.2, measured=mean([part["kurtosis"] for part in found]),
        ),
        claim(
            text="eigenvalues of X end where a semicircle does: share of Tr X^2 beyond its edge, 11,018 parameters "
            "after training", expected=0.02,
            relation="<=", measured=mean([part["outside"] for part in found]),
        ),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------- theorem 1


def _spikes(dense: Sequence[Row]) -> list[Claim]:
    """Eigenvalues and eigenvectors of batches after training."""
    found = []
    mine = [row["spikes"] for row in summary(dense, state="trained")]
    seen = f"{_where(dense)}, {len(mine[0]['values'])} batches of {mine[0]['size']} for each seed."
    for place in (0, 4):
        known = [part for part in mine if part["nu"][place] ** 2 > part["s2"]]  # those that the theorem is about
        shifts = [
            (values[place] - part["nu"][place]) * part["nu"][place] / part["s2"]
            for part in known
            for values in part["values"]
        ]
        found.append(
            _claim(
                where="theorem 1", text=f"eigenvalue {place + 1} of a batch is too large by s2 / nu, which agrees "
                "with the theorem: shift over s2 / nu", expected=1.0, tolerance=0.25, measured=mean(shifts), ours=True,
                evidence=f"{seen} One batch varies by {_spread(shifts):.2g} of these units, independent noise by "
                f"{_spread_of_theory(known, place):.2g}. Any noise makes the largest eigenvalue too large in the mean.",
            )
        )  # fmt: skip
        lost = [
            (1 - shares[place]) / (part["s2"] / part["nu"][place] ** 2) for part in known for shares in part["overlaps"]
        ]
        found.append(
            _claim(
                where=f"theorem 1, equation 8, {MODEL}",
                text=f"1 - |theta'phi|^2 = s2 / nu^2 for eigenvector {place + 1}: ratio", expected=1.0,
                tolerance=0.25, measured=mean(lost),
                evidence=f"{seen} Mean overlap {_average_of(mine, place):.2f}.",
            )
        )  # fmt: skip
    space, band = ([value for part in mine for value in part[key]] for key in ("space", "band"))
    chance = 10 / mine[0]["dim"]
    below = ", ".join(str(part["above"]) for part in mine)
    found += [
        _claim(
            where="section 4.1", text=f"sharp directions are better known than flat ones: share of a batch's first "
            f"{NINE} eigenvectors in the span of those of H, minus that of ten below nu = sqrt(s2) in theirs",
            expected=0.0, relation=">=", measured=mean([a - b for a, b in zip(space, band, strict=True)]),
            evidence=f"{seen} The first share is {mean(space).value:.2f}. One by one, the mean overlap of these {NINE} "
            f"is {math.fsum(_average_of(mine, place) for place in range(NINE)) / NINE:.2f}.",
        ),
        _claim(
            where="theorem 1, section 4.1",
            text="below nu = sqrt(s2) a batch tells nothing of a direction: share of ten eigenvectors just below it in "
            "the span of the same ten of H", expected=chance, tolerance=chance, measured=mean(band),
            evidence=f"{seen} Random directions would have {chance:.2g}. Eigenvalues above the threshold, by seed: "
            f"{below}.",
        ),
    ]  # fmt: skip
    return found


def _average_of(parts: Sequence[Row], place: int) -> float:
    """Mean overlap of one eigenvector."""
    return float(mean([shares[place] for part in parts for shares in part["overlaps"]]).value)


def _spread(values: Sequence[float]) -> float:
    """Standard deviation."""
    return float(mean(values).stderr) * math.sqrt(len(values))


def _spread_of_theory(parts: Sequence[Row], place: int) -> float:
    """By how much an outlier varies for independent noise, in units of s2 / nu; see `ritz.rmt.debias`."""
    found = []
    for part in parts:
        nu, s2 = part["nu"][place], part["s2"]
        found.append(math.sqrt(2 * s2 * (1 - s2 / nu**2) / part["dim"]) * nu / s2)
    return float(mean(found).value)
