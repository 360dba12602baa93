"""The noise of a batch: the curvature of one batch minus the curvature of all data."""

from collections.abc import Iterator

from torch import Tensor

from ..batches import Batch, Batches
from ..errors import UnsupportedError
from ..risk import Risk
from .algebra import Derived
from .gauss_newton import GradientCovariance
from .risk_operator import RiskOperator


class _OneBatch(Batches):
    """One batch as data. It keeps its number and place in the whole, on which drawn labels and dropout masks depend."""

    def __init__(self, batch: Batch, whole: Batches) -> None:
        super().__init__([batch.data], batch_size=None, device=whole.device, dtype=whole.dtype, cache=True)
        self.batch = batch

    def __iter__(self) -> Iterator[Batch]:
        yield self.batch


class BatchNoise(Derived):
    """X = A_batch - A, for one batch of the data and a matrix A of the risk (seed 004, section 3).

    Args:
        operator: The Hessian of a risk, its GGN, a Fisher matrix or the covariance of gradients.
        index: Which batch.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[1.0]]), torch.zeros(1, 1)), (torch.tensor([[2.0]]), torch.zeros(1, 1))]
        >>> X = BatchNoise(ritz.Hessian(ritz.Risk(model, torch.nn.MSELoss(), data)), index=1)
        >>> X.dense().tolist()  # 8 for the batch, 5 for the mean
        [[3.0]]
    """

    def __init__(self, operator: RiskOperator | GradientCovariance, index: int) -> None:
        if not isinstance(operator, RiskOperator | GradientCovariance):
            raise TypeError(
                f"expected the Hessian, the GGN, a Fisher matrix or the covariance of gradients of a risk, which are "
                f"means over batches, got {type(operator).__name__}"
            )
        batches = operator.risk.batches
        found = [batch for batch in batches if batch.index == index]
        if not found:
            raise ValueError(f"there is no batch {index}; the data has {sum(1 for _ in batches)}, counted from 0")
        if not batches.ordered:
            raise UnsupportedError("the batches of a shuffling loader change; fix them with data=list(loader)")
        own = operator._like(Risk.on(operator.risk, _OneBatch(found[0], batches)))
        super().__init__(own - operator)
        self.matrix = f"noise of batch {index} of the {operator.matrix}"

    def _rows(self, rows: Tensor) -> Tensor:
        return self.base.rows(rows)

    def convention(self) -> str:
        return f"{self.matrix}; {self.base.convention()}"
