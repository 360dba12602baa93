"""Walks over the data that are kept batch by batch, for what is found in one of them and may take hours."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch, mark_in_any_order
from ..checkpoint import Saved, State, Unsaved
from ..reducers import Reducer
from ..risk import Params, Progress, Risk


class Walks:
    """`Risk.fold` that goes on from where it was, when the same walks are made again in the same order.

    Ranks that work together keep what they have after each round of as many batches as there are ranks.

    Example:
        >>> from ritz.reducers import Mean
        >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), data, batch_size=1)
        >>> inputs = Walks(Unsaved()).fold(risk, lambda params, batch: (batch.data[0].sum(), torch.tensor(1.0)), Mean())
        >>> float(inputs)
        2.0
    """

    def __init__(self, saved: Saved) -> None:
        self._saved, self._number = saved, 0
        self._seen: list[dict[str, Any]] = list((saved.latest or {}).get("walks", []))  # by each walk that was begun

    def fold(
        self, risk: Risk, fn: Callable[[Params, Batch], tuple[Tensor, Tensor]], into: Reducer,
        progress: Progress | None = None,
    ) -> Any:  # fmt: skip
        """Walk the data once, or the rest of it; see `Risk.fold`.

        Raises:
            StoppedError: If the run is to stop before the end; with a checkpoint what was seen is saved by then.
        """
        if isinstance(self._saved, Unsaved):
            self._saved.point(self._state)
            return risk.fold(fn, into, progress=progress)
        number, self._number = self._number, self._number + 1
        rest, marks = iter(risk.batches), list[float]()
        if number < len(self._seen):
            before = self._seen[number]
            marks = [_mark(risk, batch) for batch in islice(rest, len(before["marks"]))]
            if marks == before["marks"]:
                vars(into).update(_placed(before["reducer"], risk.device))
            else:  # a loader that shuffles as it likes: some samples would count twice, and others not
                rest, marks = iter(risk.batches), []
        while batches := list(islice(rest, risk.world.size)):
            risk.fold(fn, into, batches=batches)
            marks += [_mark(risk, batch) for batch in batches]
            self._seen[number:] = [{"marks": list(marks), "reducer": dict(vars(into))}]
            if progress is not None:
                progress(len(marks), 0)
            self._saved.point(self._state)
        return into.result()

    def _state(self) -> State:
        return {"walks": self._seen}, {}


def _mark(risk: Risk, batch: Batch) -> float:
    """By which a batch is known again, where another process may meet the data in another order."""
    data = risk.batches
    return 0.0 if data.cached or data.ordered else mark_in_any_order([batch])


def _placed(tree: Any, device: torch.device) -> Any:
    """On the device, at addresses as fresh tensors have them: CPU kernels may round differently at others."""
    if isinstance(tree, Tensor):
        return tree.to(device, copy=True)
    if isinstance(tree, dict):
        return {name: _placed(each, device) for name, each in tree.items()}
    return [_placed(each, device) for each in tree] if isinstance(tree, list) else tree
