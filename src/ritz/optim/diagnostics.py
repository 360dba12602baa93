"""What a preconditioner does to the steps, in numbers: rates per direction, their ratio, the largest stable rate.

A method that divides by B + delta I moves along an eigenvector of B with the learning rate alpha / (lambda + delta).
Seed 004 reads off it how far flat directions, which are mostly noise, are favoured over sharp ones (equation 5), and
when a step is too long (equations 17 to 19).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from ..estimators.noise import Curvature
from ..estimators.quantities import Spectrum
from ..intervals import Reciprocal
from ..krylov.eigen import top_eigenpairs
from ..operators.algebra import Derived
from ..operators.base import Operator
from ..results import Estimate
from ..risk import Risk
from ..space import row_dots
from .streaming import MATRICES

Momentum = Literal["heavy_ball", "nesterov", "average"]
InverseRoot = Tensor | Callable[[Tensor], Tensor]


def rate_ratio(eigenvalues: Tensor | Spectrum, damping: float) -> Estimate:
    """(lambda_1 + delta) / (lambda_P + delta): how much faster the flattest direction is than the sharpest one.

    The estimated curvature learning-rate ratio of seed 004 (equation 5, with the rates of equation 11). 1 for gradient
    descent; it falls to 1 as damping grows.

    Args:
        eigenvalues: Eigenvalues of the preconditioner, all of them or the two extreme ones; or a spectrum, whose
            intervals of 95 % at both ends make that of the ratio.
        damping: delta.

    Raises:
        ValueError: If the damping does not lift the smallest eigenvalue above 0.

    Example:
        >>> print(rate_ratio(torch.tensor([0.0, 3.0, 9.0]), damping=1.0))
        curvature learning-rate ratio 10
    """
    if isinstance(eigenvalues, Spectrum):
        low, high = eigenvalues.lambda_min, eigenvalues.lambda_max
        small, large = float(low.value), float(high.value)
        _refuse_indefinite(small, damping)
        # to where the eigenvalues may lie, and not to where the Ritz values are: few steps have not reached the ends
        (least, most), (first, last) = ([float(end) for end in estimate.interval()] for estimate in (low, high))
        least = max(least, 0.0 if eigenvalues.positive else -damping)
        top = (last + damping) / (least + damping) if least + damping > 0 else math.inf
        bracket: tuple[float, float] | None = ((first + damping) / (most + damping), top)
        about: dict[str, Any] = {"products": low.products, "seed": low.seed, "convention": low.convention}
    else:
        small, large = float(eigenvalues.min()), float(eigenvalues.max())
        _refuse_indefinite(small, damping)
        bracket, about = None, {"exact": True}
    value = (large + damping) / (small + damping)
    return Estimate(
        name="curvature learning-rate ratio", value=value, bracket=bracket, support=(1.0, math.inf), **about
    )


def direction_rates(eigenvalues: Tensor, lr: float, damping: float, eta: float = 1.0, k: int = 0) -> Estimate:
    """alpha / (lambda_i + delta): the learning rate along each eigenvector (seed 004, equations 9 and 11).

    Args:
        eigenvalues: Eigenvalues of the preconditioner, (r,), sharpest first where `k` is given.
        lr, damping: alpha and delta.
        eta: What the rates of the first `k` are divided by (equation 9).

    Example:
        >>> direction_rates(torch.tensor([9.0, 1.0, 0.0]), lr=0.1, damping=1.0).value.tolist()
        [0.01, 0.05, 0.1]
    """
    _refuse_indefinite(float(eigenvalues.min()), damping)
    rates = lr / (eigenvalues.double() + damping)
    rates[:k] /= eta
    return Estimate(name="learning rates", value=rates, exact=True, convention="alpha / (lambda + delta)")


def sgd_rate(lr: float, damping: float) -> Estimate:
    """alpha / delta: the learning rate of the gradient descent that heavy damping comes to.

    It is also the rate along directions without curvature, under any damping.

    Example:
        >>> print(sgd_rate(lr=0.001, damping=0.1))
        SGD-equivalent learning rate 0.01
    """
    _refuse_indefinite(0.0, damping)
    return Estimate(name="SGD-equivalent learning rate", value=lr / damping, exact=True, convention="alpha / delta")


def bulk_share(eigenvalues: Tensor, gradient: Tensor, damping: float, edge: float) -> Estimate:
    """The share of the squared step that lies along eigenvectors with |lambda| <= edge: in the noise.

    Args:
        eigenvalues: Eigenvalues of the preconditioner, (r,).
        gradient: Its components along the same eigenvectors, (r,).
        damping: delta.
        edge: Edge of the bulk, 2 sqrt(noise) for `ritz.curvature_noise`.

    Example:
        >>> share = bulk_share(torch.tensor([9.0, 1.0]), torch.tensor([10.0, 2.0]), damping=1.0, edge=2.0)
        >>> print(share)  # the step is (1, 1)
        share of the step in the bulk 0.5
    """
    if eigenvalues.shape != gradient.shape or eigenvalues.ndim != 1:
        raise ValueError(
            f"expected eigenvalues and gradient of one shape (r,), got {tuple(eigenvalues.shape)} and "
            f"{tuple(gradient.shape)}"
        )
    _refuse_indefinite(float(eigenvalues.min()), damping)
    energy = (gradient.double() / (eigenvalues.double() + damping)).square()
    total = float(energy.sum())
    value = float(energy[eigenvalues.abs() <= edge].sum()) / total if total else math.nan
    return Estimate(
        name="share of the step in the bulk",
        value=value,
        exact=True,
        support=(0.0, 1.0),
        convention=f"squared norm along |lambda| <= {edge:g}",
    )


class Preconditioned(Derived):
    """B^-1/2 A B^-1/2, for a preconditioner B given by its inverse square root.

    Args:
        base: A.
        inverse_root: The diagonal of B^-1/2, (dim,), or a function that applies the symmetric B^-1/2 to rows (k, dim).

    Example:
        >>> from ritz.operators.algebra import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([2.0, 8.0])))
        >>> Preconditioned(A, torch.tensor([1.0, 0.5])).dense().diagonal().tolist()
        [2.0, 2.0]
    """

    def __init__(self, base: Operator, inverse_root: InverseRoot) -> None:
        super().__init__(base)
        if isinstance(inverse_root, Tensor):
            if inverse_root.shape != (base.dim,):
                raise ValueError(f"expected the diagonal of B^-1/2, (dim={base.dim},), got {tuple(inverse_root.shape)}")
            diagonal = inverse_root.to(base.device, base.dtype)
            self.apply: Callable[[Tensor], Tensor] = diagonal.mul
        else:
            self.apply = inverse_root
        self.positive = base.positive

    def _rows(self, rows: Tensor) -> Tensor:
        return self.apply(self.base.rows(self.apply(rows)))

    def convention(self) -> str:
        return f"preconditioned {self.base.convention()}"


def stable_rate(
    curvature: Operator,
    inverse_root: InverseRoot | None = None,
    *,
    momentum: float = 0.0,
    kind: Momentum = "heavy_ball",
    tol: float = 1e-3,
    max_products: int | None = None,
    seed: int = 0,
) -> Estimate:
    """The largest learning rate at which w <- w - alpha B^-1 g stays stable on the quadratic of this curvature.

    2 / lambda for lambda the largest eigenvalue of B^-1/2 H B^-1/2 (seed 004, equation 17), times what momentum allows:

        heavy ball (torch.optim.SGD, KFAC)      m <- rho m + g             1 + rho
        Nesterov                                                           (1 + rho) / (1 + 2 rho)
        average (Adam's first moment)           m <- rho m + (1 - rho) g   (1 + rho) / (1 - rho)

    The paper's bound by max_i |phi_i'H phi_i| / eta_i (equation 19) is an upper one, and equal only where B and H
    commute. Negative curvature has no stable rate and does not count.

    The value is 2 over the largest Ritz value, which is never too large. Where `max_products` has cut the search, the
    truth may lie well below it: the lower end of the interval is what a random start makes sure of, 0 after few steps.

    Args:
        curvature: H, `ritz.Hessian(risk)` say.
        inverse_root: B^-1/2, damping included: a diagonal (dim,), see `adam_inverse_root`, or a function of rows
            (k, dim). None is B = I.
        momentum: rho, or Adam's b1.
        kind: Which of the above.
        tol, max_products, seed: As in `ritz.top_eigenpairs`.

    Example:
        >>> from ritz.operators.algebra import DenseOperator
        >>> H = DenseOperator(torch.diag(torch.tensor([1.0, 4.0])))
        >>> float(stable_rate(H)), float(stable_rate(H, torch.tensor([1.0, 0.5]), momentum=0.5))
        (0.5, 3.0)
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
    gains = {
        "heavy_ball": 1 + momentum,
        "nesterov": (1 + momentum) / (1 + 2 * momentum),
        "average": (1 + momentum) / (1 - momentum),
    }
    if kind not in gains:
        raise ValueError(f"kind must be one of {', '.join(gains)}, got {kind!r}")
    operator = curvature if inverse_root is None else Preconditioned(curvature, inverse_root)
    pairs = top_eigenpairs(operator, 1, "largest", tol=tol, max_products=max_products, seed=seed)
    largest, residual = float(pairs.values[0]), float(pairs.residuals[0])

    rule = Reciprocal(pairs.extreme.rule, 2 * gains[kind])
    return Estimate(
        name="largest stable learning rate",
        value=rule.over(largest),
        bracket=(rule.over(largest + residual), rule.over(largest - residual)),
        rule=rule,
        exact=pairs.stop == "exact",
        products=pairs.products,
        seed=seed,
        stop=pairs.stop,
        support=(0.0, math.inf),
        convention=f"{kind} momentum {momentum:g}; {operator.convention()}",
    )


def reduction_ratio(
    risk: Risk, before: Tensor | Mapping[str, Tensor], *, damping: float = 0.0, curvature: Curvature | None = None
) -> Estimate:
    """rho = [L(w + d) - L(w)] / [g'd + d'(G + damping I)d / 2]: change of the loss over the change foretold.

    Near 1 where the quadratic model at w is good, below 0 where the loss went up instead of down (Martens and Grosse
    2015, section 6.5). NaN where the model foretells no decrease: the step was not downhill, or was none.

    Args:
        risk: At the weights after the step.
        before: The weights w before it, named or as a flat vector.
        damping: Damping of the quadratic model; 0 judges the curvature alone, as kfac-jax does.
        curvature: "ggn", or "hessian", which is the default where the loss is opaque.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(2, 1), torch.zeros(2, 1)))
        >>> float(reduction_ratio(risk.at(torch.tensor([0.5])), torch.tensor([1.0])))  # a quadratic loss
        1.0
    """
    matrix = MATRICES[curvature or ("hessian" if risk.opaque else "ggn")]
    start = risk.at(before)
    step = risk.space.join(risk.params()) - risk.space.join(start.params())
    slope, bend, square = (float(row_dots(x[None], step)) for x in (start.gradient(), matrix(start) @ step, step))
    foretold = slope + (bend + damping * square) / 2
    change = risk.loss() - start.loss()
    return Estimate(
        name="reduction ratio",
        value=change / foretold if foretold < 0 else math.nan,
        exact=True,
        products=1,
        convention=f"change of the loss over that of the quadratic model; {matrix.matrix}, {risk.convention()}",
    )


def _refuse_indefinite(smallest: float, damping: float) -> None:
    """Refuse to divide by what is not positive."""
    if not smallest + damping > 0:
        raise ValueError(
            f"damping {damping:g} does not lift the smallest eigenvalue, {smallest:.3g}, above 0: use more, or the "
            "eigenvalues of a positive matrix such as the GGN"
        )
