"""Intervals of means of quadratic forms v'Av over few probes v, from what their images say of the skew."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..intervals import ChiSquare, CountedChiSquare, Exact, Hull, IntervalRule, MatchedT, StudentT, matched_dof
from ..krylov.quadrature import Quadrature
from ..space import row_dots, row_products

_FEW = 64  # numbers of which two rows of random signs may be equal; of more they never are
_MANY = 1e6  # degrees of freedom from which on a law is taken to be the normal one


def form_rule(rows: Tensor, image: Tensor, *, signs: bool) -> IntervalRule:
    """The interval of a mean of K quadratic forms v'Av, from what the probes and their images know besides its spread.

    The mean has variance 2 Tr A^2 / K, and |A v|^2 tells Tr A^2: by all n numbers of each image, where the K forms by
    themselves have K - 1 degrees of freedom. See `moment_rule` for what is made of it. The higher moments are those of
    M = V A V' and N = V A^2 V', less their mean diagonals: Tr A^3 / Tr A^2 is <M, N> / <M, M>, exact for one dominant
    eigenvalue, and Tr A^4 is at most <N, N> / K (K - 1), which is right for one and at most (K + 2) / K too much.

    For random signs the diagonal of A adds no variance: that of v * (A v), summed over its entries, is the part of
    Tr A^2 that does, and the matrix counts for as much less.

    Args:
        rows: The probes (K, dim).
        image: A v for each (K, dim).
        signs: Whether the probes are random signs.

    Example:
        >>> rows = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]])
        >>> form_rule(rows, rows, signs=True).interval(2.0, 0.0, (2.0, 2.0), 0.95)  # the identity: nothing varies
        (2.0, 2.0)
    """
    num = len(rows)
    if num < 2:
        return StudentT(num - 1)
    if signs and alike(rows):
        return StudentT(0)
    forms, squares = row_products(rows, image).cpu(), row_products(image, image).cpu()  # (K, K)
    square = float(squares.diagonal().mean())
    if not 0 < square < math.inf:
        return StudentT(num - 1) if square else Exact()
    # in units in which no power overflows: Tr A^2 is 1
    first, second = (_deviator(x) for x in ((forms + forms.T) / (2 * math.sqrt(square)), squares / square))
    step = float((first * second).sum() / first.square().sum().clamp(min=1e-300))
    dof = num**2 * (num - 1) / max(float(second.square().sum()), 1e-9)
    free = min(_spread_of_entries(rows, image) / square, 1.0) if signs else 1.0
    norm = math.sqrt(free * square)
    return moment_rule(num, norm, step * norm, dof)


def moment_rule(num: int, norm: float, step: float, dof: float) -> IntervalRule:
    """The interval of a mean of `num` forms v'Av from ||A||_F and what is known of its higher moments.

    Two rules that together cover wherever few eigenvalues matter, and are both the normal interval where many do: t,
    with as many degrees of freedom as Tr A^2 is known by, and one for large eigenvalues of one sign, which make the
    mean skewed. That is told Tr A^2 a `num`-th larger than seen, for other eigenvalues beside one that dominates.

    Args:
        num: Probes.
        norm: ||A||_F, the part of it that varies.
        step: Tr A^3 / Tr A^2: the size of the eigenvalues that matter, positive or negative.
        dof: num (Tr A^2)^2 / Tr A^4, which is `num` for one eigenvalue.

    Example:
        >>> rule = moment_rule(8, norm=1.0, step=1.0, dof=8.0)  # one eigenvalue of 1
        >>> [round(end, 2) for end in rule.interval(1.0, 0.0, (1.0, 1.0), 0.95)]
        [-0.15, 2.27]
    """
    if not norm > 0:
        return Exact()
    raised = norm * math.sqrt((num + 1) / num)
    seen = min(num * (raised / step) ** 2, _MANY) if step else _MANY
    counted = CountedChiSquare(math.copysign(raised / math.sqrt(num * seen), step), seen, least=num)
    return Hull((MatchedT(min(max(dof, num), _MANY), norm * math.sqrt(2 / num)), counted))


def moment_rules(num: int, norm: Tensor, step: Tensor, dof: Tensor) -> IntervalRule:
    """`moment_rule` of each of several means.

    Example:
        >>> one = torch.ones(2, dtype=torch.float64)
        >>> low, high = moment_rules(8, one, one, 8 * one).interval(one, 0 * one, (one, one), 0.95)
        >>> [round(end, 2) for end in (*low.tolist(), *high.tolist())]
        [-0.15, -0.15, 2.27, 2.27]
    """
    raised = norm * math.sqrt((num + 1) / num)
    seen = (num * (raised / step).square()).nan_to_num(nan=_MANY).clamp(max=_MANY)  # 0 / 0 where nothing varies
    counted = CountedChiSquare(torch.copysign(raised / (num * seen).sqrt(), step), seen, least=num)
    return Hull((MatchedT(dof.clamp(num, _MANY), norm * math.sqrt(2 / num)), counted))


def centred_moments(rules: Quadrature, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The root of the second moment of f about its mean over all probes, and the third and fourth in its units.

    On the sphere a multiple of the identity adds nothing to the variance of a form. f takes nodes (K, ..., m), and the
    moments have the shape between; they are 0 where f does not vary.
    """
    largest = f(rules.nodes).abs().amax(-1).amax(0)
    unit = torch.where(largest > 0, largest, 1.0)[..., None]  # in which no square under- or overflows
    mean = rules.integrate(f).mean(0)[..., None]
    root = largest * rules.integrate(lambda t: ((f(t) - mean) / unit).square()).mean(0).sqrt()
    scale = torch.where(root > 0, root, 1.0)[..., None]
    cube, square = (rules.integrate(lambda t, k=k: ((f(t) - mean) / scale) ** k).mean(0) for k in (3, 4))  # type: ignore[misc]
    return root, cube, square


def alike(rows: Tensor) -> bool:
    """Whether all signs are those of the first row or their opposites, as of few numbers they may be: they are one.

    A single number is not asked: a form of its sign is exact.

    Example:
        >>> alike(torch.tensor([[1.0, -1.0], [-1.0, 1.0]])), alike(torch.tensor([[1.0, -1.0], [1.0, 1.0]]))
        (True, False)
    """
    return 1 < rows.shape[1] <= _FEW and bool((rows * rows[:, :1] == rows[:1] * rows[0, 0]).all())


def untold(rule: IntervalRule) -> dict[str, Any]:
    """Fields of a mean, and of its parts, whose probes are alike or only one: there is no error to tell."""
    return {"rule": rule, "spread": math.nan} if rule == StudentT(0) else {}


def _deviator(forms: Tensor) -> Tensor:
    """A square matrix less the mean of its diagonal."""
    return forms - forms.diagonal().mean() * torch.eye(len(forms), dtype=forms.dtype)


def _spread_of_entries(rows: Tensor, image: Tensor) -> float:
    """The variance of v * (A v) over probes, summed over entries: of signs without bias Tr A^2 off the diagonal."""
    mean = torch.zeros_like(image[0])
    for row, own in zip(rows, image, strict=True):  # one at a time: rows may fill the memory
        mean += row * own / len(rows)
    apart = (row * own - mean for row, own in zip(rows, image, strict=True))
    return float(sum(row_dots(each, each) for each in apart)) / (len(rows) - 1)


def square_rule(tail: Tensor, head: float) -> IntervalRule:
    """The interval of a mean of K forms v'B^2v: Student t, widened by a chi-square of matched degrees of freedom.

    Tr B^4 is the mean of (v_i'B^2v_j)^2 over pairs, raised by (K + 1) / (K - 1) for being known from few of them. Both
    rules together cover where t alone does not (tests/estimators/test_coverage.py).

    Args:
        tail: B v for each probe v (K, dim).
        head: What is known besides.

    Example:
        >>> square_rule(torch.eye(2), 0.0).rules[0]
        StudentT(dof=1)
    """
    num = len(tail)
    if num < 2:
        return StudentT(num - 1)
    forms = row_products(tail, tail).cpu()
    pairs = forms.square().sum() - forms.diagonal().square().sum()
    square = float(pairs) / (num * (num - 1)) * (num + 1) / (num - 1)
    dof = matched_dof(num, float(forms.diagonal().mean()), square, tail.shape[1])
    return Hull((StudentT(num - 1), ChiSquare(dof, head)))
