"""The theory of seeds 000 to 004 as runnable checks: every claim, the page that lists them, and its figure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from textwrap import fill
from typing import TYPE_CHECKING

from ..results import new_axes
from . import (
    theory_counts,
    theory_damping,
    theory_flatness,
    theory_margins,
    theory_noise,
    theory_pacbayes,
    theory_sampling,
    theory_scaling,
    theory_sharpness,
    theory_steps,
    theory_theorem,
)
from .base import Claim, claims_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Check = Callable[[], tuple[Claim, ...]]
Progress = Callable[[int, int], None]  # (checks done, checks in all)

FLATNESS, THEOREM = "Seeds 000 and 001: flatness", "Theorem 1 and its proof"
METRIC, SAMPLING = "Seed 002: the PAC-Bayes metric", "Seed 002: sub-sampling and the trace"
MARGINS, DAMPING = "Seed 003: margins", "Seed 004: damping"

# every check, by section of the page
CHECKS: dict[str, tuple[Check, ...]] = {
    FLATNESS: (
        theory_flatness.taylor,
        theory_flatness.random_shift,
        theory_flatness.deep_linear,
        theory_flatness.deep_linear_limit,
        theory_flatness.rescaling,
        theory_flatness.least_norm,
        theory_flatness.stability,
        theory_flatness.printed_norm,
        theory_sharpness.keskar,
        theory_sharpness.penalised,
        theory_sharpness.extreme_ritz_value,
        theory_sharpness.quadrature,
        theory_counts.parameters,
        theory_counts.products,
    ),
    THEOREM: (
        theory_theorem.theorem,
        theory_theorem.supplement,
        theory_theorem.what_holds,
        theory_theorem.proof,
        theory_theorem.exponent,
        theory_theorem.remark,
    ),
    METRIC: (
        theory_pacbayes.equation_4,
        theory_pacbayes.entropies,
        theory_pacbayes.equation_6,
        theory_pacbayes.equation_7,
        theory_pacbayes.equation_8,
        theory_pacbayes.invariance,
    ),
    SAMPLING: (
        theory_sampling.every_batch,
        theory_sampling.figure_2,
        theory_sampling.other_functions,
        theory_sampling.moments_needed,
        theory_sampling.pairs_of_batches,
        theory_sampling.trace_is_that_of_the_ggn,
        theory_sampling.negative_trace,
        theory_sampling.residual_start,
        theory_sampling.penalty_cost,
        theory_counts.metric,
        theory_counts.vectors,
    ),
    MARGINS: (
        theory_margins.random_direction,
        theory_margins.confidence,
        theory_margins.affine_trace,
        theory_margins.margin_bound,
        theory_scaling.lemmas,
        theory_scaling.scaling,
        theory_scaling.wrong_points,
        theory_scaling.layerwise,
    ),
    DAMPING: (
        theory_damping.shrinkage,
        theory_steps.steps,
        theory_damping.equation_15,
        theory_damping.algorithm_1,
        theory_damping.theorem_1,
        theory_noise.semicircle,
        theory_noise.convergence,
        theory_noise.fluctuations,
        theory_steps.largest_rate,
        theory_steps.general_position,
    ),
}

# what to take from each section
READINGS = {
    FLATNESS: "The example of section 2 has a wrong Hessian but a correct conclusion: along a ray of growing weights, "
    "the trace goes to 0 with the loss. This is not a general law, not even in the example.",
    THEOREM: "The theorem states that measures of sharpness go to 0 with the loss. Along T_alpha they do. In general "
    "they need not: the loss falls with the margin, and the margin can grow arbitrarily slowly compared with "
    "the weights. Keeping weights away from 0 does not help, because outputs may cancel. What holds is "
    "|H_i|_F ≤ loss_i max (|∇z_k|² + |∇²z_k|_F), z_k = f_k − f_y: measures of sharpness go to 0 wherever "
    "these derivatives grow more slowly than 1 / loss.",
    METRIC: "Equations 3 and 4 are correct. Equation 6 has the trace of H instead of the trace of its inverse, so "
    "neither it nor what follows from it is a divergence. The metric of equation 7 may still be useful, but "
    "it is not invariant under rescalings of layers, and no bound follows from it.",
    SAMPLING: "The trace may be estimated from a batch, but its square may not, as the paper says. Two batches drawn "
    "independently correct the square: `minibatch_moment`. Section 6 replaces Tr H by Tr G to avoid negative "
    "traces. With BatchNorm using batch statistics, as in the paper's networks, negative traces exist. For "
    "piecewise-linear networks without BatchNorm, the two traces are equal and neither is negative. A product with "
    "the Hessian costs about three gradients, so the metric costs more than a step of SGD; Tr G from one vector costs "
    "one gradient.",
    MARGINS: "Proposition 3.1 is exact for affine models. The margin bound also holds for wrong answers, though not by"
    " the printed step. Along T_alpha, the trace of a ReLU network goes to 0 whether its answers are right or"
    " wrong; norms of the Hessian can distinguish the two cases.",
    DAMPING: "Equations 5, 8, 13, 17 and A.3 are correct. Section 2.1 misprints Adam's matrix. Equation 15 is correct "
    "to leading order, but in units of the squared curvature, and equation 19 is correct as a bound. Lemma 2 needs the "
    "L of every sample, lemma 3 holds in law, and the semicircle is that of X / sqrt(P). Algorithm 1 as "
    "printed returns N times the sum of noise and signal; its corrected form is `ritz.curvature_noise`. In general "
    "position, the diagonal of a Hessian does not follow its norm.",
}

_TOP = """# The theory, checked

Seeds 000 to 004 argue with theorems, bounds and examples. Here, each of them is a function that computes both sides on
small networks in float64 and returns a `Claim`: the statement, the measurement, and a verdict that follows from the
two.

- *Holds* means that the measurement (or its 95 % interval, if it was sampled) lies inside the range that the claim
  allows.
- *Refuted* means that it lies outside.
- *Not decidable* means neither.

Where a statement fails as printed, *corrected* marks the version that holds. A number cannot prove a theorem, but it
can refute one.

In the tables, H is the Hessian of the mean loss, G the Gauss-Newton matrix, P the number of weights, p = w_1 w_2 w_3 X,
g the gradient of w_1 w_2 w_3, S the softmax, and T_alpha multiplies the last layer by alpha.

```python
from ritz.papers import theory

found = theory.sections([theory.METRIC])  # theory.sections() for all, in some seconds
print([claim for claim in found[theory.METRIC] if claim.verdict == "refuted"][0].evidence)
text = theory.page(found)  # theory.page() is this page
theory.draw().savefig("theory.png", dpi=100)
```

![The confidence surface of seed 003, and the trace along three paths on which the loss goes to 0](theory.png)

Left: figure 1 of seed 003, 1 − Σ a² over the distributions a of three classes. Right: theorem 1 of seed 000, the trace
along T_alpha, and along two other paths on which the loss also goes to 0.
"""


def sections(titles: Sequence[str] = tuple(CHECKS), progress: Progress | None = None) -> dict[str, tuple[Claim, ...]]:
    """The claims of each section of the page; all of them take some seconds.

    Example:
        >>> found = sections(["Seed 002: the PAC-Bayes metric"])
        >>> [claim.verdict for claim in found["Seed 002: the PAC-Bayes metric"][3:6]]
        ['holds', 'refuted', 'refuted']
    """
    unknown = [title for title in titles if title not in CHECKS]
    if unknown:
        raise ValueError(f"no section {unknown[0]!r}; there are: {'; '.join(CHECKS)}")
    total, done = sum(len(CHECKS[title]) for title in titles), 0
    found: dict[str, tuple[Claim, ...]] = {}
    for title in titles:
        found[title] = ()
        for check in CHECKS[title]:
            found[title] += check()
            done += 1
            if progress is not None:
                progress(done, total)
    return found


def page(found: Mapping[str, Sequence[Claim]] | None = None) -> str:
    """docs/theory.md: for each section what to take from it, its claims, and the evidence against those that fail.

    Args:
        found: From `sections`; made where it is not given.

    Example:
        >>> text = page(sections(["Seed 002: the PAC-Bayes metric"]))
        >>> text.splitlines()[0], "## Seed 002: the PAC-Bayes metric" in text
        ('# The theory, checked', True)
    """
    found = sections() if found is None else found
    every = list(chain.from_iterable(found.values()))
    count = f"Claims of the papers, corrected ones included: {_counted(claim for claim in every if not claim.ours)}."
    if any(claim.ours for claim in every):
        count += f" Our own questions: {_counted(claim for claim in every if claim.ours)}."
    parts = [_TOP, fill(count, 120) + "\n"]
    for title, claims in found.items():
        parts += [f"## {title}\n", fill(READINGS[title], 120) + "\n", claims_table(claims) + "\n"]
        parts.append("\n".join(_refutations(claims)) + "\n")
    return "\n".join(parts)


def _counted(claims: Iterable[Claim]) -> str:
    found = Counter(claim.verdict for claim in claims)
    open_ = f", {found['not decidable']} are not decidable" if found["not decidable"] else ""
    return f"{found.total()}, of which {found['holds']} hold and {found['refuted']} are refuted{open_}"


def _refutations(claims: Iterable[Claim]) -> list[str]:
    """What was seen where a claim does not hold."""
    return [
        f"- **{claim.where}**, {claim.verdict}: {claim.text}. {claim.evidence}"
        for claim in claims
        if claim.verdict != "holds"
    ]


def draw() -> "Figure":
    """The confidence surface (figure 1 of seed 003), and the trace against the loss along three paths (theorem 1).

    Example:
        >>> len(draw().axes)  # two panels and a colour bar
        3
    """
    new_axes()  # says what to install where matplotlib is absent
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    theory_margins.plot_confidence(left)
    _plot_paths(right)
    return figure


def _plot_paths(ax: "Axes") -> None:
    """Tr H against the loss, which falls to the right."""
    paths = {
        "along $T_α$": theory_theorem.scaling_path(),
        "w₁ = z exp z, w₂ = exp(−z)": theory_theorem.unbalanced_path(),
        "all |w| ≥ 1": theory_theorem.bounded_path(),
    }
    for (name, path), marker in zip(paths.items(), "os^", strict=True):
        ax.plot([p.loss for p in path], [p.sizes.trace for p in path], marker + "-", label=name)
    ax.set(xscale="log", yscale="log", xlabel="loss", ylabel="Tr H", xticks=[1, 1e-4, 1e-8, 1e-12])
    ax.invert_xaxis()
    ax.legend(frameon=False)
