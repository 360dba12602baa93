"""The theory of seed 000, *Flatness is a False Friend*, before its theorem: equations 1, 3, 4, sections 1, 4 and 5.

Equation 2 is in `theory_sharpness`, the theorem and its proof are in `theory_theorem`. Every function returns claims:
what is printed, and beside what does not hold as printed, what does.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from ..results import from_samples
from ..risk import Risk
from .base import Claim
from .theory_networks import (
    ROUND_OFF,
    classify,
    dense_hessian,
    deviation,
    labels,
    mlp,
    normal,
    outputs_of,
    scaled,
    sizes_of,
)

VGG16_BN = 15_253_578  # weights of `ritz.models.vgg16_bn` with 10 classes

_claim = partial(Claim, paper="seed 000")
_exact = partial(_claim, expected=0.0, tolerance=ROUND_OFF)  # of a relative error
_gone = partial(_claim, expected=0.0, tolerance=1e-6)  # of what should have gone to 0


def taylor() -> tuple[Claim, ...]:
    """Equation 1 (of seed 002 as well): the change of the loss under a shift d, the gradient left out.

        printed   L(w + d) - L(w) ~ d'Hd          true   L(w + d) - L(w) ~ d'Hd / 2

    The mean of the changes under d and -d has no gradient term, so the ratio to d'Hd is 1/2 + O(|d|^2).

    Example:
        >>> [claim.verdict for claim in taylor()]
        ['refuted', 'holds']
    """
    risk = classify(mlp((4, 5, 3), seed=0, activation=nn.Tanh), normal((20, 4), seed=1), labels(20, 3, seed=2))
    flat = risk.space.join(risk.params())
    shift = normal((risk.dim,), seed=3, name="shift")
    shift = 0.01 * shift / shift.norm()
    rise = (risk.at(flat + shift).loss() + risk.at(flat - shift).loss()) / 2 - risk.loss()
    ratio = rise / float(shift @ dense_hessian(risk) @ shift)
    claim = partial(_claim, measured=ratio, tolerance=1e-3)
    seen = f"A tanh network with {risk.dim} weights and |d| = 0.01, mean of d and -d: ratio {ratio:.5f}."
    return (
        claim(
            where="equation 1", text="L(w + d) - L(w) ~ d'Hd: ratio of the two", expected=1.0,
            evidence=f"{seen} The 1/2 of Taylor's formula is missing, here and in seed 002; no ranking depends on it.",
        ),
        claim(
            where="equation 1, corrected", text="L(w + d) - L(w) ~ d'Hd / 2: ratio of the change of the loss to d'Hd",
            expected=0.5, evidence=seen,
        ),
    )  # fmt: skip


def random_shift() -> tuple[Claim, ...]:
    """Equation 1: for a shift in a random direction, d'Hd ~ Tr(H) / P |d|^2, since |phi_i'd|^2 concentrates at 1 / P.

    The mean is exact. But (phi_i'd)^2 is Beta(1/2, (P - 1)/2) for unit d: its standard deviation is sqrt(2) times its
    mean at any large P. What averages out is the sum over eigenvalues, to sqrt(2 Tr H^2) / Tr H, and for a spectrum
    with few outliers that stays large. Vectors of random signs (appendix B) spread as much.

    Example:
        >>> [claim.verdict for claim in random_shift()]
        ['holds', 'holds', 'refuted', 'refuted']
    """
    risk = classify(mlp((4, 5, 3), seed=0, activation=nn.Tanh), normal((20, 4), seed=1), labels(20, 3, seed=2))
    H = dense_hessian(risk)
    shifts = normal((20_000, risk.dim), seed=4, name="shifts")
    shifts = shifts / shifts.norm(dim=1, keepdim=True)
    forms = ((shifts @ H) * shifts).sum(1) * risk.dim / H.trace()
    values, vectors = torch.linalg.eigh(H)
    spread, of_signs = (
        float(overlaps.std() / overlaps.mean())
        for overlaps in ((directions @ vectors[:, -1]).square() for directions in (shifts, shifts.sign()))
    )
    return (
        _claim(
            where="equation 1", text="E d'Hd = Tr(H) / P for a random unit shift d: ratio of the two", expected=1.0,
            measured=from_samples("mean of d'Hd, in units of Tr H / P", forms), tolerance=0.05,
            evidence=f"20,000 directions; a single one has a relative standard deviation of {float(forms.std()):.2f}.",
        ),
        _claim(
            where="equation 1", text="d'Hd <= lambda_1 for a unit shift d: largest of 20,000 ratios", expected=1.0,
            relation="<=", measured=float((forms * H.trace() / risk.dim / values[-1]).max()),
            evidence="20,000 random directions; along the first eigenvector the two are equal.",
        ),
        _claim(
            where="equation 1", text="|phi_i'd|^2 concentrates at 1/P: standard deviation relative to the mean",
            expected=0.0, measured=spread, tolerance=0.1,
            evidence=f"P = {risk.dim}: {spread:.2f}; by the Beta law sqrt(2 (P - 1) / (P + 2)), 1.41 for large P.",
        ),
        _claim(
            where="appendix B", text="for a vector v of random signs |phi_i'v|^2 is about 1/N with high probability: "
            "standard deviation relative to the mean", expected=0.0, measured=of_signs, tolerance=0.1,
            evidence=f"N is the number of weights, {risk.dim}. The mean is 1/N, and the values spread by sqrt(2) times "
            "it at any large N.",
        ),
    )  # fmt: skip


# ------------------------------------------------------------------------------------- the deep linear example


class _Chain(nn.Module):
    """exp(w_1 w_2 w_3 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        product = self.w[0] * self.w[1] * self.w[2]  # prod() has wrong second derivatives near 0
        return torch.exp(product * x)


def _chain_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """Sum over inputs, and how many."""
    return model(batch[0]).sum(), float(len(batch[0]))


def deep_linear_risk(w: Tensor, x: float) -> Risk:
    """The risk L = exp(w_1 w_2 w_3 x) of section 2, at the weights w (3,).

    Example:
        >>> round(deep_linear_risk(torch.tensor([1.0, 2.0, 3.0]), x=-0.5).loss(), 6) == round(math.exp(-3), 6)
        True
    """
    data = (torch.tensor([x], dtype=torch.float64),)
    return Risk(_Chain(), data=data, batch_loss=_chain_loss).at({"w": w.double()})


def deep_linear_hessian(w: Tensor, x: float) -> Tensor:
    """The Hessian of exp(w_1 w_2 w_3 x), (3, 3).

        H = e^p (x^2 g g' + x O),   p = w_1 w_2 w_3 x,   g = (w_2 w_3, w_1 w_3, w_1 w_2),   O_ij = w_k off the diagonal

    Equation 3 prints e^p x g g'.

    Example:
        >>> deep_linear_hessian(torch.ones(3), x=-1.0) * math.e  # the identity: what is off the diagonal cancels
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    g = _cofactors(w)
    zero = torch.zeros_like(w[0])
    others = torch.stack([zero, w[2], w[1], w[2], zero, w[0], w[1], w[0], zero]).reshape(3, 3)
    return torch.exp(w.prod() * x) * (x**2 * torch.outer(g, g) + x * others)


def _cofactors(w: Tensor) -> Tensor:
    return torch.stack([w[1] * w[2], w[0] * w[2], w[0] * w[1]])


def deep_linear() -> tuple[Claim, ...]:
    """Equations 3 and 4: Hessian, trace and largest eigenvalue of exp(w_1 w_2 w_3 X), against the Hessian of `Risk`.

        printed   H = X e^p g g',   Tr H = lambda_1 = X |g|^2 e^p
        true      H = e^p (X^2 g g' + X O),   Tr H = X^2 |g|^2 e^p,   lambda_1 is not the trace

    Example:
        >>> [claim.verdict for claim in deep_linear()]
        ['refuted', 'holds', 'refuted', 'holds', 'refuted']
    """
    points = [(normal((3,), seed, "w"), float(normal((1,), seed, "x"))) for seed in range(10)]
    printed_error, true_error, printed_trace, true_trace = 0.0, 0.0, 0.0, 0.0
    for w, x in points:
        H = dense_hessian(deep_linear_risk(w, x))
        g, height = _cofactors(w), math.exp(float(w.prod()) * x)
        printed_error = max(printed_error, deviation(x * height * torch.outer(g, g), H))
        true_error = max(true_error, deviation(deep_linear_hessian(w, x), H))
        printed_trace = max(printed_trace, deviation(x * height * g.square().sum(), H.trace()))
        true_trace = max(true_trace, deviation(x**2 * height * g.square().sum(), H.trace()))
    unit = sizes_of(deep_linear_risk(torch.ones(3), x=-1.0))
    return (
        _exact(
            where="equation 3", text="H = X e^p g g': largest relative error of an entry", measured=printed_error,
            evidence="10 random points. X stands for X^2, and X w_k, the second derivative of p, is missing off the "
            "diagonal: what is printed is the Gauss-Newton part, divided by X.",
        ),
        _exact(
            where="equation 3, corrected", text="H = e^p (X^2 g g' + X O): largest relative error of an entry",
            measured=true_error, evidence="The same 10 points; O has w_k at the places i, j other than k.",
        ),
        _exact(
            where="equation 4", text="Tr H = X |g|^2 e^p: largest relative error", measured=printed_trace,
            evidence="The same 10 points. For X < 0 the printed trace is negative, which a sum of "
            "squares cannot be.",
        ),
        _exact(
            where="equation 4, corrected", text="Tr H = X^2 |g|^2 e^p: largest relative error", measured=true_trace,
            evidence="The same 10 points: O has no diagonal, so the trace is that of the Gauss-Newton part.",
        ),
        _claim(
            where="equation 4", text="Tr H = lambda_1: ratio of the two at w = (1, 1, 1), X = -1", expected=1.0,
            measured=unit.trace / unit.spectral, tolerance=ROUND_OFF,
            evidence="There H is the identity over e: three equal eigenvalues. The printed matrix has rank one.",
        ),
    )  # fmt: skip


def deep_linear_limit() -> tuple[Claim, ...]:
    """Section 2: as L goes to 0 the exponential beats the polynomial, so Tr H goes to 0.

    True along a ray w = t w_0, where Tr H = 3 t^4 e^(-t^3) at w_0 = (1, 1, 1), X = -1. False in general: at
    w = (z e^z, e^-z, 1) the loss is e^-z and Tr H = (z^2 e^(2z) + z^2 + e^(-2z)) e^-z.

    Example:
        >>> [claim.verdict for claim in deep_linear_limit()]
        ['holds', 'holds', 'refuted']
    """
    ray = [_followed(torch.full((3,), t, dtype=torch.float64)) for t in (1.0, 2.0, 3.0, 4.0)]
    skew = [
        _followed(torch.tensor([z * math.exp(z), math.exp(-z), 1.0], dtype=torch.float64)) for z in (1.0, 5.0, 15.0)
    ]
    power, root, far = 10, 0.5, 1e6
    return (
        _gone(
            where="section 2, footnote", text="x^n exp(-x^m) goes to 0 as x grows: its value at n = 10, m = 1/2, x = "
            "1e6", measured=math.exp(power * math.log(far) - far**root),
            evidence="At x = 400, where it is largest, it is 2e17: the exponential wins late.",
        ),
        _gone(
            where="section 2", text="Tr H goes to 0 with L, along w = t (1, 1, 1), X = -1: Tr H at t = 4",
            measured=ray[-1][1], evidence=f"t = 1, 2, 3, 4: {_path(ray)}.",
        ),
        _gone(
            where="section 2", text="Tr H goes to 0 with L, along w = (z e^z, e^-z, 1), X = -1: Tr H at z = 15",
            measured=skew[-1][1],
            evidence=f"z = 1, 5, 15: {_path(skew)}. The polynomial may grow as the exponential of the weights falls.",
        ),
    )  # fmt: skip


def _followed(w: Tensor) -> tuple[float, float]:
    """Loss and trace of the deep linear example at X = -1."""
    risk = deep_linear_risk(w, x=-1.0)
    return risk.loss(), sizes_of(risk).trace


def _path(points: list[tuple[float, float]]) -> str:
    return ", ".join(f"L = {loss:.2g} and Tr H = {trace:.2g}" for loss, trace in points)


# ------------------------------------------------------------------------------------- section 1 and section 4


def rescaling() -> tuple[Claim, ...]:
    """Section 1, after Dinh et al. (2017): any minimum becomes as sharp as one likes, the function unchanged.

    For a ReLU network W_1, b_1 times c and W_2 divided by c is the same function, and the diagonal blocks of the
    Hessian move by c^-2, c^2 and 1, so Tr H = Tr_1 / c^2 + c^2 Tr_2 + Tr_3. The norm of the weights moves too, and L2
    regularisation sees it (section 3 of seed 002). But one other c leaves the norm as it is, c = |W_2| / |W_1, b_1|,
    and
    L2 regularisation does not tell the two networks apart.

    Example:
        >>> [claim.verdict for claim in rescaling()]
        ['holds', 'holds', 'holds', 'refuted']
    """
    X = normal((20, 4), seed=5)
    risk = classify(mlp((4, 6, 3), seed=5), X, labels(20, 3, seed=5))
    c = 30.0
    moved = scaled(risk, {"0.weight": c, "0.bias": c, "2.weight": 1 / c})
    same = deviation(outputs_of(moved, X), outputs_of(risk, X))
    first, second, third = (float(dense_hessian(risk.restrict(p)).trace()) for p in ("0.*", "2.weight", "2.bias"))
    trace, before = sizes_of(moved).trace, first + second + third
    own = risk.params()
    even = float(own["2.weight"].norm() / torch.cat([own["0.weight"].flatten(), own["0.bias"]]).norm())
    swapped = scaled(risk, {"0.weight": even, "0.bias": even, "2.weight": 1 / even})
    norms = [float(one.space.join(one.params()).norm()) for one in (risk, moved, swapped)]
    seen = f"c = {c:g}: Tr H from {before:.3g} to {trace:.3g} while the outputs moved by {same:.0e}, relative."
    return (
        _claim(
            where="section 1", text="a rescaling that keeps the function makes H sharper: Tr H after over before",
            expected=10.0, relation=">=", measured=trace / before, evidence=seen,
        ),
        _exact(
            where="section 1", text="Tr H = Tr_1 / c^2 + c^2 Tr_2 + Tr_3: relative error",
            measured=deviation(first / c**2 + c**2 * second + third, trace), evidence=seen,
        ),
        _claim(
            where="section 1", text="such a rescaling changes the norm of the weights: |w| after over before, at least "
            "1.1", expected=1.1, relation=">=", measured=norms[1] / norms[0],
            evidence=f"c = {c:g}: |w| from {norms[0]:.3g} to {norms[1]:.3g}. So it changes the loss with L2 "
            "regularisation, as section 3 of seed 002 has it.",
        ),
        _claim(
            where="section 1", text="a rescaling that keeps the function and |w| keeps Tr H: Tr H after over before",
            expected=1.0, tolerance=0.01, measured=sizes_of(swapped).trace / before, ours=True,
            evidence=f"c = |W_2| / |W_1, b_1| = {even:.3g}: |w| stays {norms[2]:.3g}. L2 regularisation does not see "
            "such a rescaling.",
        ),
    )  # fmt: skip


def least_norm() -> tuple[Claim, ...]:
    """Section 1, and section 3 of seed 002, after Wilson et al. (2017): for simple problems descent ends at least norm.

    Least squares with more weights than samples, from w = 0: every gradient lies in the span of the samples, and of all
    solutions the one in that span is the shortest. From other first weights what is not in the span stays.

    Example:
        >>> [claim.verdict for claim in least_norm()]
        ['holds', 'refuted']
    """
    X, y = normal((4, 10), seed=8), normal((4,), seed=9)
    shortest = torch.linalg.pinv(X) @ y
    rate = 1 / float(torch.linalg.matrix_norm(X, 2)) ** 2
    ends = {}
    for start in (0.0, 1.0):
        w = torch.full((10,), start, dtype=torch.float64)
        for _ in range(2000):
            w = w - rate * X.T @ (X @ w - y)
        ends[start] = w
    text = "gradient descent without regularisation ends at the solution of least norm, from w = {:g}: relative error"
    seen = "Least squares with 4 samples and 10 weights, 2,000 steps; the error of the fit is below 1e-9"
    return (
        _claim(
            where="section 1, quoting Wilson et al. (2017)", text=text.format(0), expected=0.0, tolerance=1e-6,
            measured=deviation(ends[0.0], shortest), evidence=f"{seen}.",
        ),
        _claim(
            where="section 1, quoting Wilson et al. (2017)", text=text.format(1), expected=0.0, tolerance=1e-6,
            measured=deviation(ends[1.0], shortest), ours=True,
            evidence=f"{seen}. Networks do not start at 0.",
        ),
    )  # fmt: skip


def printed_norm() -> tuple[Claim, ...]:
    """Section 5 and figure 7: what is printed as the Frobenius norm after SGD is below an eigenvalue of that spectrum.

    |H|_F is at least lambda_1. As Tr H^2 / P, which the tables of seed 002 have, the number is possible.

    Example:
        >>> [claim.verdict for claim in printed_norm()]
        ['refuted', 'holds']
    """
    norm, largest = 1.43e-5, 3.296
    claim = partial(_claim, expected=1.0, relation=">=")
    return (
        claim(
            where="section 5, figure 7", measured=norm / largest,
            text="|H|_F >= lambda_1 by the printed numbers, VGG-16-BN by SGD on CIFAR-10: ratio of the two",
            evidence=f"The norm is printed as {norm:g}, and the spectrum of figure 7a ends at {largest:g}.",
        ),
        claim(
            where="section 5, figure 7, corrected", measured=math.sqrt(norm * VGG16_BN) / largest,
            text="|H|_F >= lambda_1 if Tr H^2 / P is printed: ratio of the two",
            evidence=f"With the {VGG16_BN:,} weights of VGG-16-BN |H|_F is {math.sqrt(norm * VGG16_BN):.1f}.",
        ),
    )  # fmt: skip


def stability() -> tuple[Claim, ...]:
    """Section 4: gradient descent with step s can rest only where lambda_1 <= 2 / s.

    Near a minimum the error along an eigenvector is multiplied by 1 - s lambda at each step. It says where descent with
    that step stays, nothing about lambda_1 after the step was lowered: the paper's own caveat.

    Example:
        >>> [claim.verdict for claim in stability()]
        ['holds']
    """
    X, y = normal((12, 4), seed=6), normal((12, 1), seed=7)
    model = nn.utils.skip_init(nn.Linear, 4, 1, bias=False, dtype=torch.float64)
    weights = torch.linalg.lstsq(X, y).solution.T
    risk = Risk(model, nn.MSELoss(), (X, y)).at({"weight": weights})
    largest = sizes_of(risk).spectral
    distances = {}
    for factor in (0.95, 1.05):
        w = weights.flatten() + 1e-3
        for _ in range(60):
            w = w - factor * 2 / largest * risk.at(w).gradient()
        distances[factor] = float((w - weights.flatten()).norm() / 2e-3)
    return (
        _claim(
            where="section 4", text="gradient descent stays at a minimum with lambda_1 < 2 / s and leaves others",
            expected=True, measured=distances[0.95] < 0.1 and distances[1.05] > 10,
            evidence="Least squares, 60 steps from near the minimum: the distance is multiplied by "
            f"{distances[0.95]:.2g} at s = 1.9 / lambda_1 and by {distances[1.05]:.3g} at s = 2.1 / lambda_1.",
        ),
    )  # fmt: skip
