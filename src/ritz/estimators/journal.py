"""Products that are kept one by one, for estimators that need but few of them."""

import torch
from torch import Tensor

from ..checkpoint import Saved, State, Unsaved
from ..operators.algebra import Metered
from ..operators.base import Operator
from ..operators.risk_operator import RiskOperator
from .walks import Walks

_BLOCK = 8  # vectors multiplied between two saves where the operator has no chunk of its own


class Journal(Metered):
    """An operator under measurement whose products are kept, and read back when the same run is made again.

    A run that asks for the same products in the same order goes on from where it was; nothing else of it need be saved.
    It takes as much room on the disk as all images together.

    Example:
        >>> from ritz.checkpoint import Unsaved
        >>> from ritz.operators import DenseOperator
        >>> A = Journal(DenseOperator(torch.eye(2)), Unsaved())
        >>> A.rows(torch.ones(3, 2)).shape, A.products
        (torch.Size([3, 2]), 3)
    """

    def __init__(self, base: Operator, saved: Saved) -> None:
        super().__init__(base)
        self._saved, self._images = saved, list[Tensor]()
        self._known = int((saved.latest or {}).get("images", 0))
        self.walks = Walks(saved)  # for what is no product
        chunk = base.risk.plan.chunk if isinstance(base, RiskOperator) else _BLOCK
        self._block = chunk * max(1, _BLOCK // chunk)  # whole chunks, so that they are the same as without a pause

    def _rows(self, rows: Tensor) -> Tensor:
        if isinstance(self._saved, Unsaved):  # nothing is kept: all vectors in one walk over the data
            self._saved.point(self._state)
            return super()._rows(rows)
        return torch.cat([self._image(part) for part in rows.split(self._block)])

    def _image(self, rows: Tensor) -> Tensor:
        number = len(self._images)
        if number < self._known:
            image: Tensor = self._saved.settled(_name(number)).to(self.device)
            self.products += len(rows)
        else:
            self._saved.point(self._state)
            image = super()._rows(rows)
        self._images.append(image)
        return image

    def _state(self) -> State:
        settled = {_name(i): image for i, image in enumerate(self._images)}
        return {"images": len(self._images)}, settled


def _name(number: int) -> str:
    return f"image-{number}"
