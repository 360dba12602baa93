"""Trace, Frobenius norm and log-determinant of a symmetric matrix, each asked for by itself.

Where several are wanted, one `ritz.spectrum` run gives them all.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from ..checkpoint import Checkpoint
from ..fingerprints import resumable
from ..operators.algebra import Metered
from ..operators.base import Operator, full_precision
from ..results import Estimate, from_samples
from .exact import exact_cost, without_probes
from .forms import form_rule, square_rule, untold
from .journal import Journal
from .probing import (
    about,
    blocks,
    cut_to_support,
    deflated,
    image_squares,
    known,
    require_finite,
    rounded,
)
from .rounding import around
from .spectrum import spectrum

Method = Literal["auto", "hutchinson", "hutch++", "xtrace", "exact"]
Progress = Callable[[int, int], None]
_Run = Callable[[Journal, int, int], tuple[Estimate, float | None]]  # of a matrix, with so many probes of a seed

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

    Parts have plain Student t intervals. With few probes and large outliers, those of `ritz.spectrum` have better
    coverage.

    Below float64, two products on part of one batch are compared with products in float64, as for `ritz.spectrum` and
    once per operator. If they differ by more than 1e-4, intervals are widened by the possible error of the trace; the
    first batch represents all. An exact trace of a Hessian or a GGN in float32 is not widened, because no digits cancel
    in its sum of squares. Nothing is compared, and intervals do not include such errors, for matrices other than c H +
    d, with drawn labels or dropout, and for sharded models.

    Args:
        operator: The matrix.
        method: "hutchinson": mean of v'Av (Girard 1989, Hutchinson 1990).
            "hutch++": a third of the products finds the range of the large eigenvalues, a third computes their exact
            trace, and a third probes the rest (Meyer et al. 2021).
            "xtrace": each probe is measured outside the range found by the others (Epperly, Tropp and Webber 2024).
            The measurements share probes, so their spread underestimates the error by a factor of 1.1 to 1.7, which
            grows with the number of probes; their covariance is therefore estimated and added. Intervals of 95 %
            cover 91 to 99 % of the time, but 86 to 91 % where one large eigenvalue lies beside many that are equal.
            "exact": by backward passes over the roots of the loss, for the GGN and Fishers of any network and the
            Hessian of a piecewise-linear one; by dim products for a matrix that is not of a network.
            "auto": exact if that is cheaper, otherwise hutch++, or hutchinson for fewer than 6 probes.
        num_probes: Matrix-vector products to spend. As many as there are dimensions give the exact trace by hutch++ and
            xtrace.
        seed: Seed of the probes.
        progress: Called as progress(products done, products expected).
        checkpoint: A folder, or a `ritz.Checkpoint`, for the products, or for an exact trace the results of each batch.
            After a kill, the same call resumes.

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
    cost = exact_cost(operator) if method == "auto" else None
    if method == "auto":
        method = choose(operator.dim, cost, num_probes)
    runs: dict[str, _Run] = {"hutchinson": _hutchinson, "hutch++": _hutch_pp, "xtrace": _xtrace}
    run = partial(_exact, looked=cost is not None) if method == "exact" else runs[method]
    settings = {"method": method, "num_probes": num_probes, "seed": seed}
    with resumable(checkpoint, operator, "trace", settings) as saved:
        estimate: Estimate | None = saved.result
        if estimate is None:
            journal = Journal(operator, saved)
            journal.expect(0 if method == "exact" else num_probes)
            estimate = cut_to_support(operator, rounded(journal, *run(journal, num_probes, seed)))
            saved.finish(estimate)
    if progress is not None:
        progress(estimate.products, estimate.products)
    return estimate


def choose(dim: int, cost: int | None, num_probes: int, least: int = 6) -> Literal["exact", "hutch++", "hutchinson"]:
    """Exact where its `exact_cost` is no more than that of the probes; hutch++ where there are `least` or more.

    Example:
        >>> choose(50, None, 60), choose(50, 10, 30), choose(50, None, 30), choose(50, None, 5)
        ('exact', 'exact', 'hutch++', 'hutchinson')
    """
    if dim <= num_probes or (cost is not None and cost <= CHEAP_COTANGENTS * num_probes):
        return "exact"
    return "hutch++" if num_probes >= least else "hutchinson"


# ------------------------------------------------------------------------------------------------- the methods


def _exact(meter: Journal, num_probes: int, seed: int, looked: bool = False) -> tuple[Estimate, float | None]:
    found, how, norm = without_probes(meter, "parameter", num_probes, looked)
    told = about(meter, f"Tr, {how}", None)
    parts = known(meter, "trace", found, told)
    return Estimate(name="trace", value=math.fsum(found.tolist()), exact=True, parts=parts, **told), norm


def _hutchinson(meter: Metered, num_probes: int, seed: int) -> tuple[Estimate, float]:
    rows = meter.probes(range(num_probes), seed)
    image = meter.rows(rows)
    require_finite(meter, image)
    each = zip(rows.split(1), image.split(1), strict=True)  # one at a time: rows may fill the memory
    sums = torch.cat([meter.space.segment(row * own) for row, own in each]).double().cpu()  # (K, parameters)
    samples = sums.sum(1)
    rule = form_rule(rows, image, signs=True)
    told = about(meter, "Tr by Hutchinson's estimator", seed)
    norm = math.sqrt(image_squares(meter, rows, image) / num_probes)
    parts = blocks(meter, sums, seed, **untold(rule))
    return from_samples("trace", samples, **{"rule": rule} | untold(rule), parts=parts, **told), norm


def _hutch_pp(meter: Journal, num_probes: int, seed: int) -> tuple[Estimate, float | None]:
    if meter.dim <= num_probes:  # no more products, and few signs of few numbers may all be alike
        return _exact(meter, num_probes, seed)
    found = deflated(meter, num_probes, seed)
    head = float((found.basis * found.image).double().sum())
    sums = meter.space.segment(found.rows * found.tail).double().cpu()  # (K, parameters)
    samples = sums.sum(1)
    # v'QAQv for signs v, to which the diagonal of QAQ, as of a shifted matrix, adds no variance
    rule = form_rule(meter.probes(range(len(samples)), seed), found.tail, signs=True)
    sums = sums + meter.space.segment(found.head[None]).double().cpu()
    told = about(meter, "Tr by Hutch++", seed)
    parts = blocks(meter, sums, seed, **untold(rule))
    whole = from_samples("trace", samples, offset=head, **{"rule": rule} | untold(rule), parts=parts, **told)
    return whole, found.norm(meter)


def _xtrace(meter: Journal, num_probes: int, seed: int) -> tuple[Estimate, float | None]:
    """For every probe w_i: Tr in the range found by the others, plus w_i'(I - P_i) A (I - P_i) w_i, rescaled."""
    if meter.dim <= num_probes:
        return _exact(meter, num_probes, seed)
    num = num_probes // 2
    rows = meter.probes(range(num), seed, "normal")
    image = meter.rows(rows)  # (num, dim)
    require_finite(meter, image)
    norm = math.sqrt(image_squares(meter, rows, image) / num)
    q, r = torch.linalg.qr(image.double().T)  # (dim, num), (num, num)
    h = q.T @ meter.rows(q.T.to(rows)).double().T
    h = (h + h.T) / 2
    told = about(meter, "Tr by XTrace", seed)
    size = r.diagonal().abs()
    least = meter.dim * torch.finfo(r.dtype).eps * float(size.max())
    if float(size.min()) <= least:  # the others span the range of A but for round-off B, and Tr B <= sqrt(dim) ||B||_F
        value = float(h.trace())
        bracket = around(value, math.sqrt(meter.dim) * least)
        return Estimate(name="trace", value=value, bracket=bracket, exact=True, **told), norm
    forms, squares = (rows * image).double().sum(1), rows.double().square().sum(1)
    left_out = _LeftOut(meter.dim, q.T @ rows.double().T, r, h, forms, squares)
    samples = left_out.one()
    # samples share probes: the variance of their mean is var / num and, beyond it, their covariance
    var, shared = float(samples.var()), max(left_out.covariance(), 0.0)
    spread = math.sqrt(1 + shared * num / var) if var else 1.0
    return from_samples("trace", samples.cpu(), spread=spread, **told), norm


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

    A third of the products finds the range U of the large eigenvalues, a third computes its image, and a third probes
    the rest: ||A||^2 = 2 ||AU||^2 - ||U'AU||^2 + ||QAQ||^2 with Q = I - UU', exactly. `parts` are the norms of the rows
    of single parameters; their squares add up to the square of the total. Products that are far from those in float64
    cause a warning and wider intervals, as for `trace`.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)))
        >>> round(frobenius_norm(A, num_probes=12).value, 6)
        5.0
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    meter = Metered(operator)
    if operator.dim <= num_probes:
        return rounded(meter, *_dense_norm(meter))
    meter.expect(num_probes)
    found = deflated(meter, num_probes, seed)
    image = found.image.double()
    head = 2 * float(image.square().sum()) - float((image @ found.basis.double().T).square().sum())
    samples = found.tail.double().square().sum(1).cpu()
    # a parameter's rows S of the matrix: |SA|^2 = |SAU|^2 + |SAQ|^2
    shares = meter.space.segment(found.full.square()) + meter.space.segment(found.image.square()).sum(0)
    parts = blocks(meter, shares.double().cpu(), seed, "norm", power=0.5)
    told = about(meter, "||A||_F, not squared", seed)
    rule = square_rule(found.tail, head)
    whole = from_samples("Frobenius norm", samples, offset=head, power=0.5, rule=rule, parts=parts, **told)
    return rounded(meter, whole, found.norm(meter))


def _dense_norm(meter: Metered) -> tuple[Estimate, float]:
    dense = meter.dense()
    norm, squares = math.sqrt(image_squares(meter, torch.eye(meter.dim).to(dense), dense)), dense.double().square()
    told = about(meter, "||A||_F, not squared", None)
    parts = known(meter, "norm", meter.space.segment(squares.sum(0)[None])[0].sqrt(), told)
    return Estimate(name="Frobenius norm", value=float(squares.sum().sqrt()), exact=True, parts=parts, **told), norm


def logdet(operator: Operator, shift: float, num_steps: int = 100, num_probes: int = 8, seed: int = 0) -> Estimate:
    """log det(A + shift I): `ritz.spectrum(operator, ...).logdet(shift)`.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.eye(3, dtype=torch.float64))
        >>> round(logdet(A, shift=1.0).value / math.log(2), 6)
        3.0
    """
    return spectrum(operator, num_steps, num_probes, seed=seed).logdet(shift)
