"""The noise of a batch: what the curvature of one batch has that the curvature of all data has not."""

from ..errors import UnsupportedError
from ..risk import Risk
from .algebra import Derived
from .base import Operator, RiskOperator


class BatchNoise(Derived):
    """X = A_batch - A, for one batch of the data and any curvature matrix A of the risk (seed 004, section 3).

    Args:
        operator: A matrix of a risk, `ritz.Hessian(risk)` say.
        index: Which batch.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[1.0]]), torch.zeros(1, 1)), (torch.tensor([[2.0]]), torch.zeros(1, 1))]
        >>> X = BatchNoise(ritz.Hessian(ritz.Risk(model, torch.nn.MSELoss(), data)), index=1)
        >>> X.dense().tolist()  # 8 for the batch, 5 for the mean
        [[3.0]]
    """

    def __init__(self, operator: RiskOperator, index: int) -> None:
        if not isinstance(operator, RiskOperator):
            raise TypeError(f"expected a matrix of a risk, got {type(operator).__name__}")
        risk = operator.risk
        found = [batch for batch in risk.batches if batch.index == index]
        if not found:
            raise ValueError(f"there is no batch {index}")
        if not risk.batches.ordered:
            raise UnsupportedError("the batches of a shuffling loader change; fix them with data=list(loader)")
        own: Operator = operator._like(Risk.on(risk, [found[0].data]))
        super().__init__(own - operator)
        self.matrix = f"noise of batch {index} of the {operator.matrix}"

    def _rows(self, rows):  # type: ignore[no-untyped-def]
        return self.base.rows(rows)

    def convention(self) -> str:
        return f"{self.matrix}; {self.base.convention()}"
