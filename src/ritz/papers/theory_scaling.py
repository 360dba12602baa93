"""Section 5 of seed 003 and its lemmas: what T_alpha, which multiplies the outputs by alpha, does to the curvature.

Along it every second derivative of the loss goes to 0 where all answers are right: proposition 5.1 and corollary 5.2.
What it does to wrong answers depends on the activation.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from ..risk import Risk
from .base import Claim
from .theory_networks import (
    ROUND_OFF,
    classify,
    dense_hessian,
    derivatives,
    deviation,
    labels,
    last_layer,
    mlp,
    normal,
    outputs_of,
    scaled,
    sizes_of,
)

_claim = partial(Claim, paper="seed 003")
_exact = partial(_claim, expected=0.0, tolerance=ROUND_OFF)  # of a relative error
_gone = partial(_claim, expected=0.0, tolerance=1e-6)  # of what should have gone to 0

MARGINS = (1.0, 10.0, 40.0)  # of alpha times the outputs


def lemmas() -> tuple[Claim, ...]:
    """Lemmas C.1 and C.2, derivatives of the loss of alpha f, and lemma D.1: alpha^k S_i(alpha f) goes to 0, i != y.

        C.1   d_s = -alpha (d_s f_y - <d_s f, S>)
        C.2   d_t d_s = -alpha (d_t d_s f_y - <d_t d_s f, S> - <d_s f, alpha S * (d_t f - <d_t f, S>)>)

    Example:
        >>> [claim.verdict for claim in lemmas()]
        ['holds', 'holds', 'holds']
    """
    alpha, y, x = 1.7, 1, normal((3,), seed=16)
    risk = classify(mlp((3, 4, 3), seed=16, activation=nn.Tanh), x[None], torch.tensor([y]))
    f, J, K = derivatives(risk, x)
    S = (alpha * f).softmax(0)
    first = -alpha * (J[y] - S @ J)
    second = -alpha * (K[y] - torch.einsum("k,kij->ij", S, K) - torch.einsum("ki,k,kj->ij", J, alpha * S, J - S @ J))
    gradient, hessian = _autograd(risk, x, y, alpha)
    powers = [float(a**4 * (a * torch.tensor([1.0, 0.5, -2.0]).double()).softmax(0)[1]) for a in (1, 10, 100)]
    seen = f"A tanh network with {risk.dim} weights, alpha = 1.7."
    return (
        _exact(
            where="lemma C.1", text="the gradient of loss(alpha f): largest relative error",
            measured=deviation(first, gradient), evidence=seen,
        ),
        _exact(
            where="lemma C.2", text="the Hessian of loss(alpha f): largest relative error",
            measured=deviation(second, hessian), evidence=seen,
        ),
        _gone(
            where="lemma D.1", text="alpha^4 S_i(alpha f) at alpha = 100, f_y - f_i = 1/2", measured=powers[-1],
            evidence=f"alpha = 1, 10, 100: {', '.join(f'{p:.2g}' for p in powers)}. It rises first.",
        ),
    )  # fmt: skip


def _autograd(risk: Risk, x: Tensor, y: int, alpha: float) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian in the weights of the loss of alpha times the outputs, by automatic differentiation."""
    flat = risk.space.join(risk.params())

    def loss(w: Tensor) -> Tensor:
        out = functional_call(risk.model, risk.space.split(w), (x[None],))
        return nn.functional.cross_entropy(alpha * out, torch.tensor([y]))

    return grad(loss)(flat), jacrev(grad(loss))(flat)


def composed_hessian(risk: Risk, alpha: float) -> Tensor:
    """Second derivatives of the risk at T_alpha(w) in w, (dim, dim): the reading of proposition 5.1 in its proof.

    For T_alpha on the last layer it is A H A, with H the Hessian at T_alpha(w) and A = alpha on the last layer, else 1.

    Example:
        >>> X = normal((2, 3), seed=0)
        >>> risk = classify(mlp((3, 2), seed=0), X, labels(2, 2, seed=0))
        >>> deviation(composed_hessian(risk, 2.0), 4 * dense_hessian(last_layer(risk, 2.0))) < 1e-12
        True
    """
    moved = last_layer(risk, alpha)
    last = risk.space.names[-1].split(".")[0]
    scales = {
        name: torch.full_like(p, alpha if name.split(".")[0] == last else 1.0) for name, p in risk.params().items()
    }
    A = risk.space.join(scales)
    return A[:, None] * dense_hessian(moved) * A


def _one_point(right: bool, activation: type[nn.Module] = nn.ReLU) -> tuple[Risk, Tensor, float]:
    """A network 3-5-4-3 on one sample, labelled by the network's first choice or its second; its input, its margin."""
    model, x = mlp((3, 5, 4, 3), seed=18, activation=activation), normal((1, 3), seed=18)
    with torch.no_grad():
        best = model(x)[0].topk(2)
    margin = float(best.values[0] - best.values[1])
    return classify(model, x, best.indices[:1] if right else best.indices[1:]), x, margin


def _largest(H: Tensor) -> float:
    return float(H.abs().max())


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values)


def scaling() -> tuple[Claim, ...]:
    """Proposition 5.1 and corollary 5.2: along T_alpha, every second derivative of the loss of right points goes to 0.

    They hold in both readings: derivatives of the composed function, as the proof has it, and the Hessian at
    T_alpha(w). The largest output must be the only largest, which lemma D.1 says and the proposition leaves to its
    argmax: with a tie the composed derivatives grow as alpha^2.

    Example:
        >>> [claim.verdict for claim in scaling()]
        ['holds', 'holds', 'holds', 'refuted']
    """
    right, x, margin = _one_point(right=True)
    composed = [_largest(composed_hessian(right, m / margin)) for m in MARGINS]
    plain = [_largest(dense_hessian(last_layer(right, m / margin))) for m in MARGINS]
    data, least = _all_right()
    every = [_largest(dense_hessian(last_layer(data, m / least))) for m in MARGINS]
    best, second = outputs_of(right, x)[0].topk(2).indices.tolist()
    rows = [best if place == second else place for place in range(3)]  # the second output is made equal to the first
    tied = right.at({name: p[rows] for name, p in right.params().items() if name.startswith("4.")})
    ties = [_largest(composed_hessian(tied, a)) for a in (1.0, 10.0, 100.0)]
    return (
        _gone(
            where="proposition 5.1", text="derivatives of loss(T_alpha(w)) in w, a right point: largest at margin 40",
            measured=composed[-1], evidence=f"A ReLU network 3-5-4-3; margins 1, 10, 40: {_numbers(composed)}.",
        ),
        _gone(
            where="proposition 5.1", text="the Hessian at T_alpha(w), a right point: largest entry at margin 40",
            measured=plain[-1], evidence=f"The same point; margins 1, 10, 40: {_numbers(plain)}.",
        ),
        _gone(
            where="corollary 5.2", text="the Hessian at T_alpha(w), all points right: largest entry at least margin 40",
            measured=every[-1], evidence=f"{data.num_samples} samples; least margin 1, 10, 40: {_numbers(every)}.",
        ),
        _gone(
            where="proposition 5.1", text="derivatives of loss(T_alpha(w)) in w where two outputs tie: largest at "
            "alpha = 100", measured=ties[-1], ours=True,
            evidence=f"The two largest outputs made equal; alpha = 1, 10, 100: {_numbers(ties)}. Lemma D.1, on which "
            "the proof stands, rules a tie out; the proposition has to be read so too.",
        ),
    )  # fmt: skip


def _all_right() -> tuple[Risk, float]:
    """A network that has every label right, and the least margin of its outputs."""
    model, X = mlp((3, 5, 3), seed=19), normal((12, 3), seed=19)
    with torch.no_grad():
        f = model(X)
    best = f.topk(2, dim=1).values
    clear = best[:, 0] - best[:, 1] > 0.2
    return classify(model, X[clear], f[clear].argmax(1)), float((best[:, 0] - best[:, 1])[clear].min())


def wrong_points() -> tuple[Claim, ...]:
    """Appendix D: what T_alpha does to a wrong point, of which the proposition says nothing.

    The Gauss-Newton part goes to 0 as for a right one: the softmax becomes certain. The rest does not: the composed
    derivatives tend to alpha d2(f_c - f_y), c the answer. For a ReLU network the rest has no diagonal, so the trace
    goes to 0 whether answers are right or wrong: the trace cannot tell, norms can. With a smooth activation the trace
    grows.

    Example:
        >>> [claim.verdict for claim in wrong_points()]
        ['holds', 'holds', 'holds', 'holds']
    """
    wrong, x, margin = _one_point(right=False)
    far = MARGINS[-1] / margin
    f, _, K = derivatives(wrong, x[0])
    label, answer = int(f.argsort()[-2]), int(f.argmax())
    composed = composed_hessian(wrong, far)
    sizes = [sizes_of(last_layer(wrong, m / margin)) for m in MARGINS]
    smooth, _, gap = _one_point(right=False, activation=nn.Tanh)
    traces = [sizes_of(last_layer(smooth, m / gap)).trace for m in MARGINS]
    steps = "margins 1, 10, 40"
    return (
        _claim(
            where="appendix D", text="the Hessian at T_alpha(w) need not go to 0 at a wrong point: spectral norm at "
            "margin 40", expected=1.0, relation=">=", measured=sizes[-1].spectral,
            evidence=f"A ReLU network 3-5-4-3; {steps}: spectral norm {_numbers(s.spectral for s in sizes)}.",
        ),
        _claim(
            where="appendix D", text="derivatives of loss(T_alpha(w)) at a wrong point tend to alpha d2(f_c - f_y): "
            "relative error at margin 40", expected=0.0, measured=deviation(composed, far * (K[answer] - K[label])),
            tolerance=1e-9, evidence="The same point: what is left is the curvature of the network, not of the loss.",
            ours=True,
        ),
        _claim(
            where="appendix D", text="Tr H at T_alpha(w) goes to 0 at a wrong point of a ReLU network: at margin 40",
            expected=0.0, measured=sizes[-1].trace, tolerance=1e-6, ours=True,
            evidence=f"The same point; {steps}: trace {_numbers(s.trace for s in sizes)}. A network that is wrong "
            "everywhere can be made as flat, in trace, as one likes.",
        ),
        _claim(
            where="appendix D",
            text="Tr H at T_alpha(w) need not go to 0 at a wrong point of a network with tanh: |Tr H| at "
            "margin 40", expected=1.0,
            relation=">=", measured=abs(traces[-1]), evidence=f"{steps}: trace {_numbers(traces)}.", ours=True,
        ),
    )  # fmt: skip


def layerwise() -> tuple[Claim, ...]:
    """Section 5: scaling each layer of a ReLU network is another T_alpha, by homogeneity.

    Without biases. With them W_l and b_l times c give another function: b_l has to be multiplied by c^l, for its
    signal passes through fewer layers.

    Example:
        >>> [claim.verdict for claim in layerwise()]
        ['refuted', 'holds']
    """
    X = normal((10, 3), seed=20)
    risk = classify(mlp((3, 5, 4, 3), seed=20), X, labels(10, 3, seed=20))
    c, names = 1.7, risk.space.names
    target = c**3 * outputs_of(risk, X)
    same = outputs_of(scaled(risk, dict.fromkeys(names, c)), X)
    depth = {"0": 1, "2": 2, "4": 3}
    factors = {name: c ** depth[name[0]] if name.endswith("bias") else c for name in names}
    return (
        _exact(
            where="section 5", text="every layer times c gives c^3 f, biases included: relative error",
            measured=deviation(same, target), evidence="A ReLU network of three layers with biases, c = 1.7.",
        ),
        _exact(
            where="section 5, corrected",
            text="weights times c, biases of layer l times c^l give c^3 f: relative error",
            measured=deviation(outputs_of(scaled(risk, factors), X), target), evidence="The same network.",
        ),
    )  # fmt: skip
