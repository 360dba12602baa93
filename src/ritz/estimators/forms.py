"""Intervals of means of quadratic forms v'Av over few probes v, from what their images say of the skew."""

import math

import torch
from torch import Tensor

from ..intervals import Affine, ChiSquare, Exact, Hull, IntervalRule, StudentT, matched_dof
from ..space import row_dots, row_products


def form_rule(rows: Tensor, image: Tensor, value: float, *, signs: bool) -> IntervalRule:
    """The interval of a mean of K quadratic forms v'Av: Student t, widened by a shifted chi-square of three moments.

    A few large eigenvalues make the mean skewed, which t does not know: a sum of K forms has cumulants K Tr A,
    2 K Tr A^2, 8 K Tr A^3. Those of b + c chi^2(nu) agree for nu = K (Tr A^2)^3 / (Tr A^3)^2 and c nu = K D with
    D = (Tr A^2)^2 / Tr A^3; nu is K for one dominant eigenvalue, and large, which is the normal interval, for none. The
    moments are free: with M = V A V' they are the mean |A v|^2 and the mean of M_ij M_jk M_ki over distinct probes. For
    signs the diagonal of A adds no variance. With 8 probes of a spiked matrix neither rule covers by itself, and both
    together do (tests/estimators/test_coverage.py).

    Args:
        rows: The probes (K, dim).
        image: A v for each (K, dim).
        value: The mean of the forms, and what is known besides.
        signs: Whether the probes are random signs.

    Example:
        >>> rows = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]])
        >>> form_rule(rows, rows, 2.0, signs=True).interval(2.0, 0.0, (2.0, 2.0), 0.95)  # the identity: nothing varies
        (2.0, 2.0)
    """
    num = len(rows)
    if num < 3:
        return StudentT(num - 1)
    forms = row_products(rows, image).cpu()  # (K, K)
    forms = (forms + forms.T) / 2
    square = float(torch.stack([row_dots(own, own) for own in image.split(1)]).mean())
    if not square > 0:
        return Exact()
    apart = (forms - torch.diag(forms.diagonal())) / math.sqrt(square)  # in units in which no power overflows
    skew = float((apart @ apart @ apart).trace()) / (num * (num - 1) * (num - 2))
    share = 1.0
    if signs:  # sum_i A_ii^2, from pairs of single-probe diagonals
        total, squares = torch.zeros_like(image[0]), torch.zeros((), dtype=torch.float64, device=image.device)
        for row, own in zip(rows, image, strict=True):  # one at a time: rows may fill the memory
            each = row * own
            total += each
            squares += row_dots(each, each)
        on_diagonal = float((row_dots(total, total) - squares) / (num * (num - 1)))
        share = math.sqrt(min(max(1 - on_diagonal / square, 0.0), 1.0))
    return skewed_rule(num, value, square, skew, share)


def skewed_rule(num: int, value: float, square: float, skew: float, share: float = 1.0) -> IntervalRule:
    """The interval of a mean of `num` forms from Tr A^2 and Tr A^3 / (Tr A^2)^(3/2), of which a share varies.

    See `form_rule`.

    Example:
        >>> skewed_rule(8, 1.0, 1.0, 1.0).rules  # one eigenvalue of 1: chi^2 with K degrees
        (StudentT(dof=7), ChiSquare(dof=8.0, offset=0.0))
    """
    dof = num / min(max(skew**2, 1e-9), 1.0)
    reach, sign = share * math.sqrt(square * dof / num), math.copysign(1.0, skew)
    skewed = ChiSquare(dof, offset=sign * value - reach)
    # skewed to the left it is the mirror image, in which a bracket lies the right way round
    return Hull((StudentT(num - 1), skewed if sign > 0 else Affine(skewed, -1.0)))


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
