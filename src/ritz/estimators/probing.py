"""What estimators by probes have in common: the range of the large eigenvalues taken out, parts, rounding."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..operators.algebra import Derived, Metered, Sum, project_out
from ..operators.base import Operator
from ..operators.gauss_newton import GGN
from ..operators.hessian import Hessian
from ..operators.risk_operator import RiskOperator
from ..results import Estimate, from_samples
from ..space import row_dots
from .precision import coarse_products, compare_precisions, unscaled
from .rounding import widened_estimate


@dataclass(frozen=True)
class Deflated:
    """A third of the products finds the range U of the large eigenvalues, a third A U, a third probes the rest.

    With Q = I - UU', all vectors as rows.
    """

    basis: Tensor  # U (r, dim)
    image: Tensor  # A U (r, dim)
    rows: Tensor  # Q v of the probes v (K, dim)
    full: Tensor  # A Q v (K, dim)
    tail: Tensor  # Q A Q v (K, dim)

    @property
    def head(self) -> Tensor:
        """diag(UU'A + Q A UU') = sum_i u_i * (A u_i + Q A u_i), which no probe has a part in: (dim,)."""
        return (self.basis * (self.image + project_out(self.image, self.basis))).sum(0)

    def norm(self, meter: Metered) -> float:
        """An estimate of ||H||_F for A = c H + d, as rounding is measured by."""
        found = image_squares(meter, self.basis, self.image)
        return math.sqrt(found + image_squares(meter, self.rows, self.full) / len(self.rows))


def deflated(meter: Metered, num_probes: int, seed: int) -> Deflated:
    """So many products, in three parts (Meyer, Musco, Musco and Woodruff 2021)."""
    third = num_probes // 3
    basis = _range(meter, third, seed) if third else meter.probes([0], seed)[:0]
    image = meter.rows(basis) if len(basis) else basis
    rows = project_out(meter.probes(range(num_probes - 2 * third), seed), basis)
    full = meter.rows(rows)
    require_finite(meter, full)
    return Deflated(basis, image, rows, full, project_out(full, basis))


def _range(meter: Metered, num: int, seed: int) -> Tensor:
    """Orthonormal rows that span A times `num` random rows."""
    image = meter.rows(meter.probes(range(-num, 0), seed))
    require_finite(meter, image)
    return _orthonormal(image)


def _orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows of the same span; directions that are only round-off are left out."""
    q, r = torch.linalg.qr(rows.to(torch.promote_types(rows.dtype, torch.float32)).T)  # there is none of half precision
    size = r.diagonal().abs()
    return q[:, size > 1e-6 * size.max()].T.to(rows.dtype) if float(size.max()) else rows[:0]


def require_finite(meter: Metered, rows: Tensor) -> None:
    """What is known of the trouble, as an error, where images are not finite."""
    if not bool(rows.isfinite().all()):
        meter.base.diagnose()


# ----------------------------------------------------------------------------------------------- what is told


def about(meter: Metered, text: str, seed: int | None) -> dict[str, Any]:
    """Cost, seed and convention of an estimate."""
    return {"products": meter.products, "seed": seed, "convention": f"{text}; {meter.base.convention()}"}


def known(meter: Metered, name: str, values: Tensor, told: dict[str, Any]) -> dict[str, Estimate]:
    """One exact value for each parameter."""
    return {
        parameter: Estimate(name=f"{name} of {parameter}", value=float(value), exact=True, **told)
        for parameter, value in zip(meter.space.names, values, strict=True)
    }


def blocks(meter: Metered, samples: Tensor, seed: int, name: str = "trace", **fields: Any) -> dict[str, Estimate]:
    """One estimate for each parameter, from samples (K, parameters)."""
    what = {"trace": "trace of the diagonal block", "norm": "norm of the rows"}[name]
    told = about(meter, f"{what} of one parameter", seed)
    return {
        parameter: from_samples(f"{name} of {parameter}", column, **fields, **told)
        for parameter, column in zip(meter.space.names, samples.T, strict=True)
    }


def cut_to_support(operator: Operator, estimate: Estimate) -> Estimate:
    """A trace or a diagonal, and its parts, whose intervals do not go below 0 where the matrix is positive."""
    if not operator.positive or estimate.exact:
        return estimate
    support = (0.0, math.inf)
    parts = {name: replace(part, support=support) for name, part in estimate.parts.items()}
    return replace(estimate, support=support, parts=parts)


def of_network(operator: Operator) -> bool:
    """Whether a matrix is that of a risk, or rests on one: dim products are then out of the question."""
    if isinstance(operator, Sum) and of_network(operator.right):
        return True
    return isinstance(operator, RiskOperator) or (isinstance(operator, Derived) and of_network(operator.base))


# -------------------------------------------------------------------------------------------- what rounding adds


def image_squares(meter: Metered, rows: Tensor, image: Tensor) -> float:
    """The sum of |A v - d v|^2 over rows v with images A v, d the shift of A = c H + d: only H is rounded."""
    shift = unscaled(meter.base)[2]
    each = zip(rows[:, None], image[:, None], strict=True)  # one at a time: rows may fill the memory
    apart = (own.sub(row, alpha=shift) if shift else own for row, own in each)
    return float(sum(row_dots(own, own) for own in apart))


def rounded(meter: Metered, estimate: Estimate, norm: float | None) -> Estimate:
    """With brackets as wide as the products are wrong.

    `norm` is ||H||_F for A = H + d, or what else is no less than the largest eigenvalue; None where no digits are lost.

    Raises:
        NonFiniteError: If the number is none, as where squares of finite numbers are too large.
    """
    if not bool(torch.as_tensor(estimate.value).isfinite().all()):
        kind = str(meter.dtype).removeprefix("torch.")
        raise NonFiniteError(
            f"the {estimate.name} of the {meter.base.matrix} is not finite, though its products are: the "
            f"squares of intermediate numbers are too large for {kind}; scale the data, or use dtype=torch.float64"
        )
    seen = None if norm is None else compare_precisions(meter.base, estimate.seed or 0)
    if norm is None or seen is None or not seen.rough:
        return estimate
    seen.tell(meter.dtype)
    return widened_estimate(estimate, seen, norm)


def loses_digits(operator: Operator) -> bool:
    """Whether an exact trace is wrong where products are.

    For the Hessian and the GGN it is a sum of squares, for cross-entropy of p_c |J'(e_c - p)|^2, in which no digits
    cancel: right to 1e-5 where products are half wrong (tests/estimators/test_rounding.py). Not with fewer digits.
    """
    base = unscaled(operator)[0]
    plain = isinstance(base, Hessian | GGN) and base.dtype == torch.float32 and not coarse_products(base.risk)
    return base is not None and not plain
