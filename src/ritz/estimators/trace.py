"""Trace, Frobenius norm, diagonal and log-determinant of a symmetric matrix, each asked for by itself.

Where several are wanted, one `ritz.spectrum` run gives them all.
"""

import math
import os
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..checkpoint import Checkpoint
from ..errors import UnsupportedError
from ..fingerprints import resumable
from ..intervals import StudentT
from ..operators.algebra import Derived, Metered, Sum, project_out
from ..operators.base import Operator, full_precision
from ..operators.gauss_newton import GGN
from ..operators.hessian import Hessian
from ..operators.risk_operator import RiskOperator
from ..results import Estimate, from_samples
from ..space import row_dots
from .forms import form_rule, square_rule
from .journal import Journal
from .precision import coarse_products, compare_precisions, unscaled
from .rounding import around, widened_estimate
from .samples import exact_cost, exact_trace
from .spectrum import spectrum

Method = Literal["auto", "hutchinson", "hutch++", "xtrace", "exact"]
Progress = Callable[[int, int], None]

# a cotangent pulled back costs about a quarter of a Hessian product: 2 against 9 in units of a forward pass
CHEAP_COTANGENTS = 4


@full_precision()
def trace(
    operator: Operator,
    method: Method = "auto",
    num_probes: int = 30,
    seed: int = 0,
    *,
    progress: Progress | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
) -> Estimate:
    """Tr A, with its error; `parts` has the trace of the diagonal block of every parameter (not by XTrace).

    Parts carry plain Student t intervals: with few probes and large outliers those of `ritz.spectrum` cover better.

    In less than float64, two products on part of one batch are compared with those in float64, as for `ritz.spectrum`
    and once for an operator. Where they are off by more than 1e-4, intervals are widened by what the trace may be off;
    the first batch stands for all. An exact trace of a Hessian or a GGN in float32 is left as it is: in its sum of
    squares no digits cancel. Nothing is compared, and intervals leave such errors out, for matrices other than c H + d,
    with drawn labels or dropped units, and of sharded models.

    Args:
        operator: The matrix.
        method: "hutchinson": mean of v'Av (Girard 1989, Hutchinson 1990). "hutch++": a third of the products finds the
            range of the large eigenvalues, a third their exact trace, a third probes the rest (Meyer et al. 2021).
            "xtrace": each probe is measured outside the range found by the others (Epperly, Tropp and Webber 2024); the
            spread of the measurements, which share probes, is 1.1 to 1.7 times too small as an error, the more so the
            more probes, and their covariance is estimated and added.
            "exact": by backward passes over the roots of the loss, for the GGN and Fishers of any network and the
            Hessian of a piecewise-linear one; by dim products for a matrix of no network. "auto": exact where that is
            cheaper, else hutch++, or hutchinson below its 6 probes.
        num_probes: Matrix-vector products to spend.
        seed: Of the probes.
        progress: Called as progress(products done, products expected).
        checkpoint: A folder, or a `ritz.Checkpoint`, in which products are kept, and for an exact trace what each batch
            gave: after a kill the same call goes on.

    Raises:
        ValueError: If an argument is wrong, or the checkpoint is that of another call.
        StoppedError: If the run is stopped (`ritz.stoppable`) before its last product.

    Warns:
        NumericalWarning: If products are far from those in float64.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.arange(100.0, dtype=torch.float64)))
        >>> trace(A, "exact").value, trace(A, "hutchinson", num_probes=4).value  # signs are exact on a diagonal
        (4950.0, 4950.0)
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    least = {"hutch++": 6, "xtrace": 6}.get(method, 1)
    if num_probes < least:
        raise ValueError(f"{method} needs at least {least} probes, got num_probes={num_probes}")
    if method == "auto":
        method = _choose(operator, num_probes)
    run = {"exact": _exact, "hutchinson": _hutchinson, "hutch++": _hutch_pp, "xtrace": _xtrace}[method]
    settings = {"method": method, "num_probes": num_probes, "seed": seed}
    with resumable(checkpoint, operator, "trace", settings) as saved:
        estimate: Estimate | None = saved.result
        if estimate is None:
            journal = Journal(operator, saved)
            journal.expect(0 if method == "exact" else num_probes)
            estimate = _rounded(journal, *run(journal, num_probes, seed))
            saved.finish(estimate)
    if progress is not None:
        progress(estimate.products, estimate.products)
    return estimate


def _choose(operator: Operator, num_probes: int) -> Method:
    """Exact where it costs no more than the probes; hutch++ where there are probes enough for it."""
    cost = exact_cost(operator)
    if operator.dim <= num_probes or (cost is not None and cost <= CHEAP_COTANGENTS * num_probes):
        return "exact"
    return "hutch++" if num_probes >= 6 else "hutchinson"


def _about(meter: Metered, text: str, seed: int | None) -> dict[str, Any]:
    return {"products": meter.products, "seed": seed, "convention": f"{text}; {meter.base.convention()}"}


# -------------------------------------------------------------------------------------------- what rounding adds


def _squares(meter: Metered, rows: Tensor, image: Tensor) -> float:
    """The sum of |A v - d v|^2 over rows v with images A v, d the shift of A = c H + d: only H is rounded."""
    shift = unscaled(meter.base)[2]
    each = zip(rows[:, None], image[:, None], strict=True)  # one at a time: rows may fill the memory
    apart = (own.sub(row, alpha=shift) if shift else own for row, own in each)
    return float(sum(row_dots(own, own) for own in apart))


def _rounded(meter: Metered, estimate: Estimate, norm: float | None) -> Estimate:
    """With brackets as wide as the products are wrong.

    `norm` is ||H||_F for A = H + d, or what else is no less than the largest eigenvalue; None where no digits are lost.
    """
    seen = None if norm is None else compare_precisions(meter.base, estimate.seed or 0)
    if norm is None or seen is None or not seen.rough:
        return estimate
    seen.tell(meter.dtype)
    return widened_estimate(estimate, seen, norm)


def _loses_digits(operator: Operator) -> bool:
    """Whether an exact trace is wrong where products are.

    For the Hessian and the GGN it is a sum of squares, for cross-entropy of p_c |J'(e_c - p)|^2, in which no digits
    cancel: right to 1e-5 where products are half wrong (tests/estimators/test_rounding.py). Not with fewer digits.
    """
    base = unscaled(operator)[0]
    plain = isinstance(base, Hessian | GGN) and base.dtype == torch.float32 and not coarse_products(base.risk)
    return base is not None and not plain


# ------------------------------------------------------------------------------------------------- the methods


def _exact(meter: Metered, num_probes: int, seed: int) -> tuple[Estimate, float | None]:
    norm = None
    try:
        value, parts = exact_trace(meter.base, meter.walks if isinstance(meter, Journal) else None)
        meter.products, how = exact_cost(meter.base) or 0, "exact, by backward passes, counted as products"
        if _loses_digits(meter.base):
            norm = abs(value - unscaled(meter.base)[2] * meter.dim)  # the trace of a positive matrix
    except UnsupportedError:
        if _of_network(meter.base) and meter.dim > num_probes:
            raise
        dense = meter.dense()
        diagonal_ = dense.diagonal().double()
        norm = math.sqrt(_squares(meter, torch.eye(meter.dim).to(dense), dense))
        value, how = float(diagonal_.sum()), "exact, by dim products"
        parts = dict(zip(meter.space.names, meter.space.segment(diagonal_[None])[0].tolist(), strict=True))
    about = _about(meter, f"Tr, {how}", None)
    blocks = _known(meter, "trace", torch.tensor([parts[name] for name in meter.space.names]), about)
    return Estimate(name="trace", value=value, exact=True, parts=blocks, **about), norm


def _known(meter: Metered, name: str, values: Tensor, about: dict[str, Any]) -> dict[str, Estimate]:
    """One exact value for each parameter."""
    return {
        parameter: Estimate(name=f"{name} of {parameter}", value=float(value), exact=True, **about)
        for parameter, value in zip(meter.space.names, values, strict=True)
    }


def _of_network(operator: Operator) -> bool:
    """Whether a matrix is that of a risk, or rests on one: dim products are then out of the question."""
    if isinstance(operator, Sum) and _of_network(operator.right):
        return True
    return isinstance(operator, RiskOperator) or (isinstance(operator, Derived) and _of_network(operator.base))


def _hutchinson(meter: Metered, num_probes: int, seed: int) -> tuple[Estimate, float]:
    rows = meter.probes(range(num_probes), seed)
    image = meter.rows(rows)
    _require_finite(meter, image)
    each = zip(rows.split(1), image.split(1), strict=True)  # one at a time: rows may fill the memory
    blocks = torch.cat([meter.space.segment(row * own) for row, own in each]).double().cpu()  # (K, parameters)
    samples = blocks.sum(1)
    rule = form_rule(rows, image, float(samples.mean()), signs=True)
    about = _about(meter, "Tr by Hutchinson's estimator", seed)
    norm = math.sqrt(_squares(meter, rows, image) / num_probes)
    return from_samples("trace", samples, rule=rule, parts=_blocks(meter, blocks, seed), **about), norm


def _blocks(meter: Metered, samples: Tensor, seed: int, name: str = "trace", **fields: Any) -> dict[str, Estimate]:
    """One estimate for each parameter, from samples (K, parameters)."""
    what = {"trace": "trace of the diagonal block", "norm": "norm of the rows"}[name]
    about = _about(meter, f"{what} of one parameter", seed)
    return {
        parameter: from_samples(f"{name} of {parameter}", column, **fields, **about)
        for parameter, column in zip(meter.space.names, samples.T, strict=True)
    }


def _range(meter: Metered, num: int, seed: int) -> Tensor:
    """Orthonormal rows that span A times `num` random rows."""
    image = meter.rows(meter.probes(range(-num, 0), seed))
    _require_finite(meter, image)
    return _orthonormal(image)


def _orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows of the same span; directions that are only round-off are left out."""
    q, r = torch.linalg.qr(rows.T)
    size = r.diagonal().abs()
    return q[:, size > 1e-6 * size.max()].T if float(size.max()) else rows[:0]


def _hutch_pp(meter: Metered, num_probes: int, seed: int) -> tuple[Estimate, float]:
    basis = _range(meter, num_probes // 3, seed)
    image = meter.rows(basis) if len(basis) else basis
    head = float((basis * image).double().sum())
    rows = project_out(meter.probes(range(num_probes - 2 * (num_probes // 3)), seed), basis)
    full = meter.rows(rows)
    norm = math.sqrt(_squares(meter, basis, image) + _squares(meter, rows, full) / len(rows))
    tail = project_out(full, basis)
    _require_finite(meter, tail)
    blocks = meter.space.segment(rows * tail).double().cpu()  # (K, parameters)
    samples = blocks.sum(1)
    rule = form_rule(rows, tail, head + float(samples.mean()), signs=False)
    # the head's share of each block: Tr_l (U U'A + Q A U U') = sum_i u_il . (A u_i + Q A u_i)_l
    blocks = blocks + meter.space.segment(basis * (image + project_out(image, basis))).double().sum(0).cpu()
    about = _about(meter, "Tr by Hutch++", seed)
    return from_samples("trace", samples, offset=head, rule=rule, parts=_blocks(meter, blocks, seed), **about), norm


def _xtrace(meter: Metered, num_probes: int, seed: int) -> tuple[Estimate, float | None]:
    """For every probe w_i: Tr in the range found by the others, plus w_i'(I - P_i) A (I - P_i) w_i, rescaled."""
    num = num_probes // 2
    if meter.dim < num:
        return _exact(meter, num_probes, seed)
    rows = meter.probes(range(num), seed, "normal")
    image = meter.rows(rows)  # (num, dim)
    _require_finite(meter, image)
    norm = math.sqrt(_squares(meter, rows, image) / num)
    q, r = torch.linalg.qr(image.double().T)  # (dim, num), (num, num)
    h = q.T @ meter.rows(q.T.to(rows)).double().T
    h = (h + h.T) / 2
    about = _about(meter, "Tr by XTrace", seed)
    size = r.diagonal().abs()
    least = meter.dim * torch.finfo(r.dtype).eps * float(size.max())
    if float(size.min()) <= least:  # the others span the range of A but for round-off B, and Tr B <= sqrt(dim) ||B||_F
        value = float(h.trace())
        bracket = around(value, math.sqrt(meter.dim) * least)
        return Estimate(name="trace", value=value, bracket=bracket, exact=True, **about), norm
    forms, squares = (rows * image).double().sum(1), rows.double().square().sum(1)
    left_out = _LeftOut(meter.dim, q.T @ rows.double().T, r, h, forms, squares)
    samples = left_out.one()
    # samples share probes: the variance of their mean is var / num and, beyond it, their covariance
    var, shared = float(samples.var()), max(left_out.covariance(), 0.0)
    spread = math.sqrt(1 + shared * num / var) if var else 1.0
    return from_samples("trace", samples.cpu(), spread=spread, **about), norm


class _LeftOut:
    """What XTrace finds where probes are left out, with A W = Q R: their samples, and how these vary together.

    The range without probe i is that of Q (I - s_i s_i'), s_i the normalised i-th row of R^-1, and that without i and j
    is the complement of both s_i and s_j in it.

    Args:
        dim: Order of A.
        w: Q'W (K, K), a column for each probe, as in all that follows.
        r: R (K, K).
        h: Q'AQ (K, K).
        forms: w_i'A w_i of the whole probes (K,).
        squares: |w_i|^2 of the whole probes (K,).
    """

    def __init__(self, dim: int, w: Tensor, r: Tensor, h: Tensor, forms: Tensor, squares: Tensor) -> None:
        self.dim, self.num, self.r, self.h = dim, len(r), r, h
        s: Tensor = torch.linalg.inv(r).T
        self.s = s / torch.linalg.vector_norm(s, dim=0)
        self.c = w - self.s * (self.s * w).sum(0)  # a probe in the range of the others
        self.inside = h.trace() - (self.s * (h @ self.s)).sum(0)
        self.outside = forms - 2 * (self.c * r).sum(0) + (self.c * (h @ self.c)).sum(0)
        self.left = squares - self.c.square().sum(0)

    def one(self) -> Tensor:
        """x_i, the samples (K,)."""
        samples: Tensor = self.inside + self.outside * (self.dim - self.num + 1) / self.left
        return samples

    def two(self) -> Tensor:
        """x_ij, probe i measured outside the range of all but i and j (K, K); x_i where j leaves nothing to take out.

        By the unit row u = (s_j - g s_i) / n, g = s_i's_j, n^2 = 1 - g^2, which is taken out of the range and of c_i.
        """
        s, c, r, h = self.s, self.c, self.r, self.h
        g = s.T @ s
        apart = 1 - g.square() > 1e-10
        n2 = torch.where(apart, 1 - g.square(), 1.0)
        shs, chs = s.T @ h @ s, c.T @ h @ s
        uhu = (shs.diagonal() - 2 * g * shs + g.square() * shs.diagonal()[:, None]) / n2
        along = c.T @ s / n2  # u'c_i / n
        # n u'r_i and n u'h c_i; s_j'r_i is 0
        ur, uhc = -g * (s * r).sum(0)[:, None], chs - g * chs.diagonal()[:, None]
        outside = self.outside[:, None] + along * (2 * ur - 2 * uhc + along * n2 * uhu)
        left = self.left[:, None] + along.square() * n2
        found = self.inside[:, None] - uhu + outside * (self.dim - self.num + 2) / left
        return torch.where(apart, found, self.one()[:, None])

    def covariance(self) -> float:
        """That of two samples, without bias: the mean of (x_i - x_ij) (x_j - x_ji) over pairs.

        Whatever the other probes, x_i and x_ij have the trace t as their mean over probe i, on which x_ji does not
        depend: E (x_i - t) (x_ji - t) = E (x_ij - t) (x_ji - t) = 0, and E (x_i - t) (x_j - t) is left.
        """
        change = self.one()[:, None] - self.two()
        return float((change * change.T).sum()) / (self.num * (self.num - 1))


@full_precision()
def frobenius_norm(operator: Operator, num_probes: int = 30, seed: int = 0) -> Estimate:
    """||A||_F, not squared: the root of the unbiased Tr A^2.

    A third of the products finds the range U of the large eigenvalues, a third their images, a third probes the rest:
    ||A||^2 = 2 ||AU||^2 - ||U'AU||^2 + ||QAQ||^2 with Q = I - UU', exactly. `parts` are the norms of the rows of single
    parameters, whose squares add up to the square of the whole. Products that are far from those in float64 are told of
    and widen intervals, as for `trace`.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)))
        >>> round(frobenius_norm(A, num_probes=12).value, 6)
        5.0
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    meter = Metered(operator)
    third = num_probes // 3
    if operator.dim <= num_probes:
        return _rounded(meter, *_dense_norm(meter))
    meter.expect(num_probes)
    basis = _range(meter, third, seed) if third else meter.probes([0], seed)[:0]
    image = meter.rows(basis) if len(basis) else basis
    head = 2 * float(image.double().square().sum()) - float((image.double() @ basis.double().T).square().sum())
    rows = project_out(meter.probes(range(num_probes - 2 * third), seed), basis)
    full = meter.rows(rows)
    _require_finite(meter, full)
    tail = project_out(full, basis)
    samples = tail.double().square().sum(1).cpu()
    # a parameter's rows S of the matrix: |SA|^2 = |SAU|^2 + |SAQ|^2
    shares = (meter.space.segment(full.square()) + meter.space.segment(image.square()).sum(0)).double().cpu()
    parts = _blocks(meter, shares, seed, "norm", power=0.5)
    about = _about(meter, "||A||_F, not squared", seed)
    rule = square_rule(tail, head)
    norm = math.sqrt(_squares(meter, basis, image) + _squares(meter, rows, full) / len(rows))
    found = from_samples("Frobenius norm", samples, offset=head, power=0.5, rule=rule, parts=parts, **about)
    return _rounded(meter, found, norm)


def _dense_norm(meter: Metered) -> tuple[Estimate, float]:
    dense = meter.dense()
    norm, squares = math.sqrt(_squares(meter, torch.eye(meter.dim).to(dense), dense)), dense.double().square()
    about = _about(meter, "||A||_F, not squared", None)
    parts = _known(meter, "norm", meter.space.segment(squares.sum(0)[None])[0].sqrt(), about)
    return Estimate(name="Frobenius norm", value=float(squares.sum().sqrt()), exact=True, parts=parts, **about), norm


@full_precision()
def diagonal(operator: Operator, num_probes: int = 30, seed: int = 0) -> Estimate:
    """The diagonal (dim,), by the mean of v * (A v) over random signs v (Bekas, Kokiopoulou and Saad 2007).

    Each entry has its own standard error; `parts` are the sums over single parameters, with theirs. Exact, by dim
    products, where the matrix is no larger than `num_probes`. Products that are far from those in float64 are told of
    and widen intervals, as for `trace`; every entry's by as much, since of a single one the comparison says nothing.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
        >>> diagonal(A).value.tolist()
        [2.0, 3.0]
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    meter = Metered(operator)
    exact = operator.dim <= num_probes
    rows = (
        torch.eye(operator.dim, dtype=operator.dtype, device=operator.device)
        if exact
        else meter.probes(range(num_probes), seed)
    )
    meter.expect(len(rows))
    image = meter.rows(rows)
    norm = math.sqrt(_squares(meter, rows, image) / (1 if exact else num_probes))
    each = rows * image  # (K, dim)
    del image
    _require_finite(meter, each)
    about = _about(meter, "diagonal", None if exact else seed)
    if exact:
        value = each.sum(0).cpu()
        parts = _known(meter, "trace", meter.space.segment(value[None])[0], about)
        zero = torch.zeros_like(value)
        found = Estimate(name="diagonal", value=value, stderr=zero, exact=True, parts=parts, **about)
        return _rounded(meter, found, norm)
    stderr = each.std(0) / math.sqrt(num_probes) if num_probes > 1 else torch.full_like(each[0], math.nan)
    found = Estimate(
        name="diagonal", value=each.mean(0).cpu(), stderr=stderr.cpu(), rule=StudentT(num_probes - 1),
        parts=_blocks(meter, meter.space.segment(each).double().cpu(), seed), **about,
    )  # fmt: skip
    return _rounded(meter, found, norm)


def logdet(operator: Operator, shift: float, num_steps: int = 100, num_probes: int = 8, seed: int = 0) -> Estimate:
    """log det(A + shift I): `ritz.spectrum(operator, ...).logdet(shift)`.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.eye(3, dtype=torch.float64))
        >>> round(logdet(A, shift=1.0).value / math.log(2), 6)
        3.0
    """
    return spectrum(operator, num_steps, num_probes, seed=seed).logdet(shift)


def _require_finite(meter: Metered, rows: Tensor) -> None:
    if not bool(rows.isfinite().all()):
        meter.base.diagnose()
