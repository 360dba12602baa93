"""The theory of seed 003, *On Flat Minima, Large Margins and Generalizability*: figure 1, proposition 3.1, the bound.

S is the softmax of the outputs f, y the label. The paper's margin has absolute value bars, |S_y - max_(j != y) S_j|, so
that a wrong answer given with confidence has a large one. Section 5 is in `theory_scaling`.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..estimators.samples import sample_traces
from ..measures.study.correlation import spearman
from ..results import from_samples, new_axes
from ..risk import Risk
from .base import Claim
from .theory_networks import ROUND_OFF, classify, dense_hessian, deviation, labels, mlp, normal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_claim = partial(Claim, paper="seed 003")
_exact = partial(_claim, expected=0.0, tolerance=ROUND_OFF)  # of a relative error


def random_direction() -> tuple[Claim, ...]:
    """Section 2: Tr H is proportional to the expected rise of the loss, to second order, in a direction from N(w, I).

    E d'Hd / 2 = Tr H / 2 for any symmetric H, so the factor is 1/2 for every network.

    Example:
        >>> [claim.verdict for claim in random_direction()]
        ['holds']
    """
    ratios = []
    for seed in range(4):
        H = dense_hessian(classify(mlp((4, 6, 3), seed), normal((20, 4), seed), labels(20, 3, seed)))
        shifts = normal((20_000, len(H)), seed, name="shifts")
        ratios.append(0.5 * ((shifts @ H) * shifts).sum(1) / H.trace())
    return (
        _claim(
            where="section 2", text="the expected rise of the second-order loss in a direction from N(w, I) is a fixed "
            "multiple of Tr H: rise over Tr H, on average", expected=0.5, tolerance=0.025,
            measured=from_samples("rise over Tr H", torch.cat(ratios)),
            evidence="Four ReLU networks 4-6-3, 20,000 directions each: "
            f"{', '.join(f'{float(part.mean()):.3f}' for part in ratios)}.",
        ),
    )  # fmt: skip


# ----------------------------------------------------------------------------- figure 1: the confidence surface


def confidence_surface(num: int = 101) -> tuple[Tensor, Tensor, Tensor]:
    """1 - sum_j a_j^2 over the distributions a = (x, y, 1 - x - y) of three classes (figure 1).

    Args:
        num: Grid points from 0 to 1 on each axis, at least 2.

    Returns:
        x, y and the surface, (num, num) each; NaN where x + y > 1, which is no distribution.

    Example:
        >>> x, y, height = confidence_surface(4)  # in steps of 1/3
        >>> float(height[0, 0]), round(float(height[1, 1]), 4), bool(height[3, 3].isnan())
        (0.0, 0.6667, True)
    """
    if num < 2:
        raise ValueError(f"num must be at least 2, got {num}")
    steps = torch.arange(num, dtype=torch.float64)
    i, j = torch.meshgrid(steps, steps, indexing="ij")
    k = num - 1 - i - j  # whole numbers, so that the edge x + y = 1 is on the grid
    height = 1 - (i**2 + j**2 + k**2) / (num - 1) ** 2
    return i / (num - 1), j / (num - 1), torch.where(k >= 0, height, torch.nan)


def plot_confidence(ax: "Axes | None" = None, num: int = 101) -> "Axes":
    """Contours of the confidence surface; 0 in the corners, where one class is certain, and 2/3 in the middle.

    Example:
        >>> plot_confidence().get_xlabel()
        'probability of class 1'
    """
    ax = ax or new_axes()
    x, y, height = (part.numpy() for part in confidence_surface(num))
    filled = ax.contourf(x, y, height, levels=[i / 30 for i in range(21)], cmap="viridis")
    ax.plot([1 / 3], [1 / 3], "+", color="black")
    ax.annotate("1/3, 1/3, 1/3", (1 / 3, 1 / 3), (4, 4), textcoords="offset points", fontsize=8)
    ax.figure.colorbar(filled, ax=ax, label="1 − Σ a²", ticks=[0, 1 / 3, 2 / 3], format="%.2f")
    ax.set(xlabel="probability of class 1", ylabel="probability of class 2", aspect="equal")
    return ax


def confidence() -> tuple[Claim, ...]:
    """Section 3.1 and figure 1: 1 - sum S^2 is 0 where one class is certain, right or wrong, and largest at 1 / C.

    Example:
        >>> [claim.verdict for claim in confidence()]
        ['holds', 'holds']
    """
    x, y, height = confidence_surface(91)  # 1/3 is on the grid
    zero = height.abs() < 1e-12
    corners = {(float(a), float(b)) for a, b in zip(x[zero], y[zero], strict=True)}
    top = int(torch.where(height.isnan(), -1.0, height).argmax())
    place = float(x.flatten()[top]), float(y.flatten()[top])
    return (
        _claim(
            where="figure 1", text="1 - sum a^2 = 0 at the three corners of the simplex and nowhere else",
            expected=True, measured=corners == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)},
            evidence=f"{int((~height.isnan()).sum())} points of a grid.",
        ),
        _claim(
            where="figure 1", text="the largest value of 1 - sum a^2, three classes", expected=2 / 3,
            measured=float(height.flatten()[top]), tolerance=1e-12,
            evidence=f"At a = ({place[0]:.3f}, {place[1]:.3f}, {1 - sum(place):.3f}); 1 - 1/C in general.",
        ),
    )  # fmt: skip


# ----------------------------------------------------------------------------- proposition 3.1


def aceht(X: Tensor, outputs: Tensor) -> Tensor:
    """(|x|^2 + 1)(1 - sum_j S_j^2) for inputs X (N, d) and outputs (N, C): (N,).

    Example:
        >>> aceht(torch.ones(1, 3), torch.zeros(1, 2))
        tensor([2.])
    """
    return (X.square().sum(1) + 1) * (1 - outputs.softmax(1).square().sum(1))


def softmax_margin(outputs: Tensor, y: Tensor) -> Tensor:
    """S_y - max_(j != y) S_j with its sign, (N,).

    Example:
        >>> softmax_margin(torch.tensor([[0.0, 0.0, -100.0]]), torch.tensor([2]))
        tensor([-0.5000])
    """
    S = outputs.softmax(1)
    own = S.gather(1, y[:, None])[:, 0]
    return own - S.scatter(1, y[:, None], -1.0).max(1).values


def _affine() -> tuple[Risk, Tensor, Tensor, Tensor]:
    """An affine model, its inputs (300, 5), labels of which about half are wrong, and outputs (300, 4)."""
    X = normal((300, 5), seed=13) * torch.linspace(0.1, 2, 300, dtype=torch.float64)[:, None]
    model = mlp((5, 4), seed=13)
    with torch.no_grad():
        f = model(X)
    y = torch.where(normal((300,), seed=14) > 0, f.argmax(1), labels(300, 4, seed=15))
    return classify(model, X, y), X, y, f


def affine_trace() -> tuple[Claim, ...]:
    """Proposition 3.1: Tr H_i = (|x|^2 + 1)(1 - sum S^2) for an affine model; and its proof.

    Its proof prints the block of the biases as diag(S_i (1 - S_i)). The block is diag(S) - S S': off the diagonal there
    is -S_i S_j, which a trace does not see.

    Example:
        >>> [claim.verdict for claim in affine_trace()]
        ['holds', 'refuted', 'holds']
    """
    risk, X, y, f = _affine()
    traces = sample_traces(risk)
    block = dense_hessian(risk.restrict("0.bias").on((X[:1], y[:1])))
    S = f[0].softmax(0)
    return (
        _exact(
            where="proposition 3.1", text="Tr H_i = (|x|^2 + 1)(1 - sum S^2): largest relative error",
            measured=deviation(aceht(X, f), torch.as_tensor(traces.value)),
            evidence="An affine model of 5 inputs and 4 classes, 300 samples, half with random labels, against "
            "`sample_traces`.",
        ),
        _exact(
            where="appendix C.2", text="d2/db_i db_j = delta_ij S_i (1 - S_i): relative error",
            measured=deviation(torch.diag(S * (1 - S)), block),
            evidence="The first of these samples. Right on the diagonal, so the trace is not affected; the line "
            "above it has a minus sign too many.",
        ),
        _exact(
            where="appendix C.2, corrected", text="d2/db_i db_j = S_i (delta_ij - S_j): relative error",
            measured=deviation(torch.diag(S) - torch.outer(S, S), block), evidence="The same sample.",
        ),
    )  # fmt: skip


def margin_bound() -> tuple[Claim, ...]:
    """Sections 3.1 and 3.2: S_y >= margin, so ACEHT <= (|x|^2 + 1)(1 - margin^2).

    The first step fails for a wrong answer: |S_y - max S| may exceed S_y. The bound holds all the same, since the
    margin's size is at most max_j S_j, and sum S^2 >= max S^2. Section 3.2 prints |x| for |x|^2 + 1. The converse, for
    which the paper offers experiments, is a short calculation: sum S^2 <= max S, so margin >= 1 - 2 (1 - sum S^2).

    Example:
        >>> [claim.verdict for claim in margin_bound()]
        ['refuted', 'holds', 'holds', 'refuted', 'holds', 'holds']
    """
    _, X, y, f = _affine()
    S = f.softmax(1)
    signed = softmax_margin(f, y)
    size, own = signed.abs(), S.gather(1, y[:, None])[:, 0]
    flatness, impurity = aceht(X, f), 1 - S.square().sum(1)
    bound, printed = (X.square().sum(1) + 1) * (1 - size**2), X.norm(dim=1) * (1 - size**2)
    right, error = signed > 0, 1 - size**2 - impurity  # the error of the bound over |x|^2 + 1
    wrong = int((signed < 0).sum())
    seen = f"300 samples of an affine model, {wrong} of them wrong."
    return (
        _claim(
            where="section 3.1", text="S_y >= margin: largest excess of the margin", expected=0.0, relation="<=",
            measured=float((size - own).max()), tolerance=ROUND_OFF,
            evidence=f"{seen} Among the right ones it never fails; of the wrong ones it does for "
            f"{int((size > own + ROUND_OFF).sum())}.",
        ),
        _claim(
            where="section 3.1, corrected", text="ACEHT <= (|x|^2 + 1)(1 - margin^2), wrong points too: largest ratio",
            expected=1.0, relation="<=", measured=float((flatness / bound).max()), tolerance=ROUND_OFF, evidence=seen,
        ),
        _claim(
            where="section 3.1", text="the error of the bound is smaller where S_y is larger, right points: rank "
            "correlation, below 0", expected=0.0, relation="<=",
            measured=float(spearman(own[right], error[right], resamples=1).value),
            evidence=f"{seen} The right ones; ACEHT and bound over |x|^2 + 1.",
        ),
        _claim(
            where="section 3.2", text="ACEHT <= |x| (1 - margin^2): largest ratio", expected=1.0, relation="<=",
            measured=float((flatness / printed).max()), tolerance=ROUND_OFF,
            evidence=f"{seen} |x| stands for |x|^2 + 1, which is at least twice as large.",
        ),
        _claim(
            where="section 3.1, converse", text="flat points have large margins, |margin| >= 1 - 2 (1 - sum S^2): "
            "least difference", expected=0.0, relation=">=", measured=float((size - (1 - 2 * impurity)).min()),
            tolerance=ROUND_OFF, evidence=seen,
        ),
        _claim(
            where="section 3.1, converse", text="flat points may have a margin near -1, its sign kept: least margin "
            "+ 2 (1 - sum S^2)", expected=-0.9, relation="<=", measured=float((signed + 2 * impurity).min()), ours=True,
            evidence=f"{seen} Flatness does not know the label: a confident mistake is as flat as a confident answer.",
        ),
    )  # fmt: skip
