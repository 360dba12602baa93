"""The variance of the Hessian between samples as a matrix, for the stability bound of SGD (seed 000, section 4).

    Var = (1 / N) sum_i H_i^2 - H^2

A batch of B out of N samples, drawn without replacement, has Hessian H + X with E X^2 = Var (N - B) / (B (N - 1)).
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from ..batches import Batch, map_tensors
from ..krylov.lanczos import lanczos
from ..operators.base import Operator
from ..operators.hessian import Hessian
from ..operators.risk_operator import RiskOperator
from ..risk import Params, Risk


class SquaredHessians(RiskOperator):
    """(1 / N) sum_i H_i^2, H_i the Hessian of one sample: two products for each.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> risk = Risk(model, torch.nn.MSELoss(), (torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)))
        >>> SquaredHessians(risk).dense().tolist()  # Hessians 2 and 8
        [[34.0]]
    """

    matrix = "mean of squared sample Hessians"
    positive = True

    def _batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        split, join = self.space.split, self.space.join

        def image(row: Tensor, data: object) -> Tensor:
            one = Batch(map_tensors(data, lambda x: x[None]), batch.index, batch.start, 1)
            slope = torch.func.grad(lambda p: self.risk.total(p, one))
            return join(torch.func.jvp(slope, (params,), (split(row),))[1])

        def squares(row: Tensor) -> Tensor:
            first = torch.func.vmap(image, in_dims=(None, 0))(row, batch.data)  # (batch, dim)
            return torch.func.vmap(image)(first, batch.data).sum(0)

        return torch.stack([squares(row) for row in rows]), self.risk.weight(params, batch)

    def _like(self, risk: Risk) -> "SquaredHessians":
        return SquaredHessians(risk)


class HessianVariance(Operator):
    """E X^2 for the noise X of a batch of `batch_size` samples, drawn without replacement.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> risk = Risk(model, torch.nn.MSELoss(), (torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)))
        >>> HessianVariance(risk, batch_size=1).dense().tolist()  # Hessians 2 and 8
        [[9.0]]
    """

    matrix = "variance of the batch Hessian"
    positive = True

    def __init__(self, risk: Risk, batch_size: int) -> None:
        if not 1 <= batch_size <= risk.num_samples or risk.num_samples < 2:
            raise ValueError(f"batch_size must lie between 1 and the {risk.num_samples} samples, got {batch_size}")
        self.squares, self.mean = SquaredHessians(risk), Hessian(risk)
        self.space, self.dtype, self.device = risk.space, risk.dtype, risk.device
        num = risk.num_samples
        self.factor = (num - batch_size) / (batch_size * (num - 1))

    def _rows(self, rows: Tensor) -> Tensor:
        return self.factor * (self.squares.rows(rows) - self.mean.rows(self.mean.rows(rows)))

    def version(self) -> Hashable:
        return self.mean.version()


def top_ritz_value(operator: Operator, num_steps: int, seed: int = 0) -> float:
    """The largest Ritz value after `num_steps` steps from one random vector: lambda_1 from below.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> top_ritz_value(DenseOperator(torch.diag(torch.tensor([5.0, 1.0, 0.0]))), num_steps=3)
        5.0
    """
    start = operator.probes([0], seed, "normal")
    found = lanczos(operator, start, min(num_steps, operator.dim), reorthogonalize="full").tridiagonal()
    return round(float(found.extremes().largest[0]), 9)
