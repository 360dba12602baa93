"""Flatness from curvature and from outputs: measures of a minimum without moving the weights.

With H the Hessian of the mean loss L, lambda_1 its largest eigenvalue and P its order,

    L(w + d) - L(w)  ~  g . d + d'H d / 2

so at distance rho from a minimum the rise is lambda_1 rho^2 / 2 at worst and Tr H rho^2 / (2 P) on average.
Equation 1 of seeds 000 and 002 prints both without the 1/2.
"""

import glob
import math
import os
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ...batches import Batch
from ...checkpoint import Checkpoint, as_checkpoint
from ...errors import UnsupportedError
from ...estimators.quantities import Spectrum
from ...estimators.trace import trace
from ...intervals import Hull, Reciprocal
from ...krylov.eigen import EigenPairs, top_eigenpairs
from ...losses.base import gradient
from ...operators.algebra import Derived
from ...operators.base import Operator, full_precision
from ...operators.hessian import Hessian
from ...reducers import Mean
from ...results import Estimate, affine
from ...risk import Params, Progress, Risk
from ...space import ParamSpace
from .perturbed import check_loss, check_positive, check_risk, cross_entropy_of

# -------------------------------------------------------------------------------------- from a known spectrum


def epsilon_sharpness_quadratic(lambda_max: Estimate, loss: float, epsilon: float = 1e-3) -> Estimate:
    """lambda_1 epsilon^2 / (2 (1 + L)): epsilon-sharpness to second order (Dinh et al. 2017).

    For an l2 ball of radius epsilon at a minimum. The box of Keskar et al. is larger, by its dimension: see
    `epsilon_sharpness`.

    Example:
        >>> top = ritz.Estimate(name="lambda max", value=8.0, exact=True)
        >>> epsilon_sharpness_quadratic(top, loss=1.0, epsilon=0.1).value
        0.02
    """
    check_positive("epsilon", epsilon)
    check_loss(loss)
    text = f"lambda_1 eps^2 / (2 (1 + L)), eps = {epsilon:g} in l2, L = {loss:.4g}, plain ratio and not times 100"
    return affine(
        lambda_max, epsilon**2 / (2 * (1 + loss)), name="quadratic epsilon-sharpness",
        convention=f"{text}; {lambda_max.convention}",
    )  # fmt: skip


def taylor_shift(spectrum: Spectrum, rho: float) -> Estimate:
    """rho^2 Tr H / (2 P): the mean rise of the loss over the sphere |d| = rho around a minimum, to second order.

    `parts["worst"]` is the largest rise, rho^2 lambda_1 / 2. Both are d'H d / 2; equation 1 of seeds 000 and 002 is
    twice that. Away from a minimum the gradient adds nothing to the mean rise, and up to rho |g| to the largest.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> s = ritz.spectrum(DenseOperator(torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))))
        >>> shift = taylor_shift(s, rho=2.0)
        >>> round(shift.value, 6), round(shift.parts["worst"].value, 6)
        (4.0, 6.0)
    """
    if not isinstance(spectrum, Spectrum):
        raise TypeError(f"expected the result of ritz.spectrum, got {type(spectrum).__name__}")
    check_positive("rho", rho)
    where = f"over |d| = {rho:g}, without the gradient; {spectrum.convention}"
    worst = affine(
        spectrum.lambda_max, rho**2 / 2, name="worst Taylor shift", convention=f"rho^2 lambda_1 / 2, largest {where}"
    )
    return affine(
        spectrum.trace, rho**2 / (2 * spectrum.dim), name="Taylor shift", parts={"worst": worst},
        convention=f"rho^2 Tr H / (2 P), mean {where}",
    )  # fmt: skip


def stability_limit(lambda_max: Estimate) -> Estimate:
    """2 / lambda_1: the learning rate above which gradient descent on the quadratic model diverges (seed 000, sec. 4).

    Infinite if no eigenvalue is positive. Its interval is 2 over the ends of that of lambda_1.

    Example:
        >>> stability_limit(ritz.Estimate(name="lambda max", value=20.0, exact=True)).value
        0.1
    """
    rule = Reciprocal(lambda_max.rule, 2.0)
    value, ends = float(lambda_max.value), lambda_max.bracket
    return Estimate(
        name="stability limit", value=rule.over(value), exact=lambda_max.exact, rule=rule, support=(0.0, math.inf),
        stderr=2 / value**2 * float(lambda_max.stderr) if value > 0 else 0.0,
        bracket=(rule.over(ends[1]), rule.over(ends[0])) if ends else None, products=lambda_max.products,
        seed=lambda_max.seed, stop=lambda_max.stop if value > 0 else "no eigenvalue is positive: there is no limit",
        convention=f"2 / lambda_1, plain gradient descent; {lambda_max.convention}",
    )  # fmt: skip


# ------------------------------------------------------------------------------------- from eigenvalues, blocks


def top_log_product(
    source: EigenPairs | Operator, k: int = 10, *, seed: int = 0, progress: Progress | None = None
) -> Estimate:
    """sum_{i <= k} log lambda_i over the k largest eigenvalues, the volume of a basin in its steep directions.

    The truncated log-determinant of Wu, Zhu and E (2017). An eigenvalue that is not above its own residual, or not
    above round-off, has no meaningful logarithm: it is left out, and the convention says how many were left out. Pairs
    of a search that was cut short are lower bounds, and the interval has no upper end.

    Args:
        source: The matrix, or its largest eigenpairs.
        k: Number of eigenvalues; fewer if the matrix is smaller.
        seed: Seed of the search for the pairs.
        progress: Called as progress(products done, most products).

    Raises:
        UnsupportedError: If none of the k is positive.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([4.0, 2.0, -3.0], dtype=torch.float64)))
        >>> product = top_log_product(A, k=3)
        >>> round(product.value / math.log(2), 6), product.convention.split(";")[0]
        (3.0, 'sum of log lambda_i over the 3 largest eigenvalues, 1 of them left out as not positive')
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if isinstance(source, EigenPairs):
        pairs = source
        if pairs.which != "largest" or len(pairs) < min(k, len(pairs.vectors)):
            raise ValueError(f"expected the {k} largest eigenpairs, got {len(pairs)} of which={pairs.which!r}")
    elif isinstance(source, Operator):
        pairs = top_eigenpairs(source, min(k, source.dim), seed=seed, progress=progress)
    else:
        raise TypeError(f"expected an operator or its eigenpairs, got {type(source).__name__}")
    values, residuals = pairs.values[:k], pairs.residuals[:k]
    floor = torch.finfo(pairs.vectors.dtype).eps * float(values.abs().max())
    kept = values > residuals.clamp(min=floor)
    if not bool(kept.any()):
        raise UnsupportedError(
            f"none of the {len(values)} largest eigenvalues is above round-off and its own residual, the largest is "
            f"{float(values[0]):.3g}, known to {float(residuals[0]):.2g}: their log-product does not exist"
        )
    values, residuals, left_out = values[kept], residuals[kept], int((~kept).sum())
    low, high = (float((values + side * residuals).log().sum()) for side in (-1, 1))
    if pairs.cut:  # larger ones may have been missed, and what was left out may be positive
        low, high = -math.inf if left_out else low, math.inf
    text = f"sum of log lambda_i over the {len(kept)} largest eigenvalues, {left_out} of them left out as not positive"
    return Estimate(
        name=f"top-{len(kept)} log-product", value=float(values.log().sum()), bracket=(low, high),
        exact=pairs.stop == "exact", products=pairs.products, seed=pairs.seed, stop=pairs.stop,
        convention=f"{text}; {pairs.convention}",
    )  # fmt: skip


def layer_spectral_norms(
    operator: Operator,
    *,
    tol: float = 1e-3,
    max_products: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Estimate:
    """max |lambda| of the diagonal block of every module, weight and bias together; the value is the largest of them.

    `parts` has one estimate for each module that directly holds chosen parameters, by its name; "root" is the model
    itself. The spectral norm of the whole matrix is at least the value, and at most the sum of the parts if the matrix
    is positive semi-definite.

    Each value is a lower bound. The interval extends upwards by the residual, or if `max_products` cut the search
    short, to the bound of its random start (`EigenPairs.extreme`), which is far away after a few steps. The bracket is
    that of the residual in any case: it holds an eigenvalue, of a search that was cut not surely the largest.

    Args:
        operator: The matrix.
        tol: Allowed residual, relative to the norm of the block.
        max_products: Largest number of products for each block; see `top_eigenpairs`.
        seed: Seed of the searches.
        progress: Called as progress(blocks done, blocks in all).
        checkpoint: A folder, or a `ritz.Checkpoint`, in which the search of each block keeps its state.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> X = torch.diag(torch.tensor([1.0, 2.0]))
        >>> H = ritz.Hessian(ritz.Risk(torch.nn.Sequential(model), torch.nn.MSELoss(), (X, torch.zeros(2, 1))))
        >>> norms = layer_spectral_norms(H)
        >>> round(norms.value, 4), list(norms.parts)
        (4.0, ['0'])
    """
    if not isinstance(operator, Operator):
        raise TypeError(f"expected an operator such as ritz.Hessian(risk), got {type(operator).__name__}")
    groups: dict[str, list[str]] = {}
    for name in operator.space.names:
        groups.setdefault(name.rpartition(".")[0] or "root", []).append(glob.escape(name))
    parts: dict[str, Estimate] = {}
    cut = False
    kept, search = as_checkpoint(checkpoint), partial(top_eigenpairs, k=1, which="magnitude", tol=tol, seed=seed)
    for done, (module, names) in enumerate(groups.items(), 1):
        block = operator.block(names)
        pairs = search(block, max_products=max_products, checkpoint=None if kept is None else kept.within(module))
        cut |= pairs.cut
        text = f"{'lower bound of ' * pairs.cut}max |lambda| of the diagonal block of {module}; {pairs.convention}"
        parts[module] = replace(pairs.extreme, name=f"spectral norm of {module}", convention=text)
        if progress is not None:
            progress(done, len(groups))
    top = max(parts.values(), key=lambda part: float(part.value))
    highest = max(float(part.bracket[1]) for part in parts.values() if part.bracket)
    rules = tuple(dict.fromkeys(part.rule for part in parts.values()))  # a part that is not the largest may yet be
    return replace(
        top, name="layer spectral norm", bracket=(top.value, highest), products=sum(p.products for p in parts.values()),
        rule=rules[0] if len(rules) == 1 else Hull(rules), exact=all(part.exact for part in parts.values()),
        stop=", ".join(sorted({p.stop for p in parts.values()})), parts=parts,
        convention=f"{'lower bound of the ' * cut}largest of max |lambda| over {len(parts)} diagonal blocks, a module "
        f"each; {operator.convention()}",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ relative flatness


@full_precision()
def relative_flatness(
    risk: Risk,
    layer: str | None = None,
    *,
    num_probes: int = 16,
    seed: int = 0,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Estimate:
    """Relative flatness of one layer, sum_{s,s'} <w_s, w_s'> Tr H_ss' (Petzka et al. 2021).

    w_s are the rows of the weight matrix W, one for each output, and H_ss' the blocks of its Hessian. It is the trace
    of (W W' x I) H, so Hutch++ applies: with W W' = F F' its probes are (F x I) z. It is invariant to rescalings of
    layers that keep the function. The rows of a convolution are its filters; the bias is not used.

    Args:
        risk: The risk.
        layer: Name of a module or of its weight; None takes the last nn.Linear with a chosen weight, in the order of
            `named_modules`.
        num_probes: Number of products. If the layer has no more weights than this, the value is exact.
        seed: Seed of the probes.
        checkpoint: A folder, or a `ritz.Checkpoint`, in which products are saved.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> risk = ritz.Risk(torch.nn.Sequential(model), torch.nn.MSELoss(), (torch.ones(1, 1), torch.zeros(1, 1)))
        >>> round(relative_flatness(risk).value, 4)  # w^2 H = 9 * 2
        18.0
    """
    check_risk(risk)
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    name = _weight_name(risk, layer)
    weight = risk.params()[name].flatten(1)  # (out, in)
    left, size, _ = torch.linalg.svd(weight.double(), full_matrices=False)
    factor = (left * size).to(weight)  # F (out, r) with F F' = W W' and r = min(out, in)
    operator = _Weighted(Hessian(risk.restrict(glob.escape(name))), factor, name, weight.shape[1])
    found = trace(operator, num_probes=num_probes, seed=seed, checkpoint=checkpoint)
    text = f"sum over rows s, s' of {name} of <w_s, w_s'> Tr H_ss', bias left out"
    return replace(found, name="relative flatness", parts={}, convention=f"{text}; {found.convention}")


class _Weighted(Derived):
    """(F x I)' H (F x I), of order r in, for the Hessian H of one weight (out, in) and a factor F (out, r)."""

    def __init__(self, base: Operator, factor: Tensor, name: str, inner: int) -> None:
        super().__init__(base)
        self.factor, self.inner = factor, inner
        self.space = ParamSpace((name,), (torch.Size([factor.shape[1], inner]),))

    def _rows(self, rows: Tensor) -> Tensor:
        moved = self.factor @ rows.reshape(len(rows), -1, self.inner)  # (k, out, in)
        image = self.base.rows(moved.flatten(1)).reshape(moved.shape)
        return (self.factor.T @ image).flatten(1)


def _weight_name(risk: Risk, layer: str | None) -> str:
    """The name of the layer's weight, which must be chosen and a matrix."""
    modules, own = dict(risk.model.named_modules()), {id(p): name for name, p in risk.model.named_parameters()}
    weights = {name: own.get(id(getattr(module, "weight", None)), "") for name, module in modules.items()}
    if layer is None:
        linear = [weights[name] for name, module in modules.items() if isinstance(module, nn.Linear)]
        found = next((name for name in reversed(linear) if name in risk.names), "")
    else:
        found = layer if layer in risk.names else weights.get(layer, "")
    if found not in risk.names or risk.params()[found].ndim < 2:
        fits = ", ".join(name for name, p in risk.params().items() if p.ndim > 1)
        wanted = "no nn.Linear has a chosen weight" if layer is None else f"{layer!r} has no chosen weight matrix"
        raise ValueError(f"{wanted}; name a layer by one of: {fits or 'none, there is no matrix among the parameters'}")
    return found


# ------------------------------------------------------------------------------------------------ Fisher-Rao


def fisher_rao_norm(risk: Risk, depth: int | None = None) -> Estimate:
    """The squared Fisher-Rao norm, depth^2 E <S(f) - e_y, f>^2 (Liang et al. 2019; depth is their L + 1).

    For a homogeneous network without biases it is w'F w, with F the empirical Fisher matrix; for any other network it
    is just this formula. `parts["model labels"]` is depth^2 E f'(diag S - S S') f, the same with labels drawn from the
    model: w'G w with the Gauss-Newton matrix. It takes one forward pass, and nothing is sampled.

    Args:
        risk: The risk of a classifier; class weights and label smoothing count as in the loss.
        depth: Number of weight layers; None counts the linear and convolutional modules, each once.

    Raises:
        UnsupportedError: If the loss is not cross-entropy.

    Example:
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0], [-1.0]]))
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.ones(1, 1), torch.tensor([0])))
        >>> S = torch.tensor([1.0, -1.0]).softmax(0)
        >>> bool(abs(fisher_rao_norm(risk).value - (S[0] - 1 - S[1]) ** 2) < 1e-6)
        True
    """
    check_risk(risk)
    loss = cross_entropy_of(risk, "the Fisher-Rao norm")
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    counted = sum(isinstance(module, kinds) for module in risk.model.modules()) if depth is None else depth
    if counted < 1:
        raise ValueError(
            f"depth must be at least 1, got {counted}"
            + ("; the model has no linear or convolutional module to count: give depth=" if depth is None else "")
        )
    risk.check()

    def both(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        out = risk.output(params, batch).detach()
        dim, _ = loss.layout(out, batch.data)
        weight = loss.items(out, batch.data).weight
        # w_i <dl_i / df, f>, one for each item
        forms = (gradient(lambda f: loss.total(f, batch.data), out) * out).movedim(dim, -1).flatten(0, -2).sum(-1)
        drawn = (out * loss.middle("ggn", out, batch.data, out)).sum()
        return torch.stack([(forms.square() / weight.where(weight > 0, torch.inf)).sum(), drawn]), weight.sum()

    means = risk.fold(both, Mean()).double() * counted**2
    how = "given" if depth is not None else "the number of linear and convolutional modules"

    def exact(name: str, value: Tensor, text: str) -> Estimate:
        convention = f"squared norm, {text}, depth = {counted}, {how}; {risk.convention()}"
        return Estimate(name=name, value=float(value), exact=True, support=(0.0, math.inf), convention=convention)

    drawn = exact("Fisher-Rao norm, model labels", means[1], "depth^2 E f'(diag S - S S') f")
    return replace(exact("Fisher-Rao norm", means[0], "depth^2 E <S - e_y, f>^2"), parts={"model labels": drawn})
