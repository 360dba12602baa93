"""The values that a search gets from the data, saved: after a kill, a search replays them and continues from there."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Saved, State

SMALL = 1 << 10  # elements of an answer that is kept with the others; a larger one gets its own file

_asking: ContextVar["Answers | None"] = ContextVar("asking", default=None)


class Answers:
    """The answers of one search, in order, each with its point.

    A restarted search that gets the same answers reaches the same points. If a point differs, all later answers are
    discarded. All answers stay on disk until the search is done, including gradients: 40 of them for a worst case.

    Example:
        >>> from ritz.checkpoint import Unsaved
        >>> answers, asked = Answers(Unsaved()), []
        >>> float(answers([torch.ones(2)], lambda: asked.append(1) or torch.tensor(3.0)))
        3.0
        >>> again = Answers(Unsaved())
        >>> again.known = answers.known
        >>> float(again([torch.ones(2)], lambda: asked.append(2) or torch.tensor(4.0))), asked
        (3.0, [1])
    """

    def __init__(self, saved: Saved) -> None:
        self.saved, self.number = saved, 0
        self.known: list[dict[str, Any]] = list((saved.latest or {}).get("answers", []))
        self._large: dict[str, Tensor] = {}  # by file name, those that are not on disk yet

    def __call__(self, point: Iterable[Tensor], ask: Callable[[], Tensor]) -> Tensor:
        """The result of `ask` for these weights, computed now or before.

        Raises:
            StoppedError: If a stop was requested; all answers are saved first.
        """
        number, self.number, mark = self.number, self.number + 1, _mark(point)
        if number < len(self.known) and self.known[number]["mark"] == mark:
            return self._told(**self.known[number])
        found = ask()
        own, file = found.detach().cpu().clone(), ""
        if own.numel() > SMALL:
            file = f"answer-{number}"
            while self.saved.has(file):  # remove discarded answers
                file += "-again"
            self._large[file] = own
        one = {"mark": mark, "told": None if file else own, "file": file, "device": str(found.device)}
        self.known[number:] = [one]
        self.saved.point(self._state)
        self._large = {name: x for name, x in self._large.items() if not self.saved.has(name)}
        return found

    def _told(self, mark: list[float], told: Tensor | None, file: str, device: str) -> Tensor:
        if told is None:
            told = self._large[file] if file in self._large else self.saved.settled(file)["told"]
        assert told is not None
        return told.to(device, copy=True)

    def _state(self) -> State:
        files = [one["file"] for one in self.known if one["file"]]
        return {"answers": self.known}, {file: partial(self._written, file) for file in files}

    def _written(self, file: str) -> dict[str, Tensor]:
        return {"told": self._large[file]}


def answered(point: Iterable[Tensor], ask: Callable[[], Tensor]) -> Tensor:
    """The result of `ask`; inside `recalled`, its earlier result if there is one.

    Example:
        >>> float(answered([torch.ones(2)], lambda: torch.tensor(3.0)))
        3.0
    """
    asking = _asking.get()
    return ask() if asking is None else asking(point, ask)


@contextlib.contextmanager
def recalled(saved: Saved) -> Iterator[None]:
    """Inside this context, answers are saved in a state, and those of a saved state are reused."""
    before = _asking.set(Answers(saved))
    try:
        yield
    finally:
        _asking.reset(before)


def _mark(point: Iterable[Tensor]) -> list[float]:
    """Numbers that identify the weights."""
    sums = [torch.stack([x.double().sum(), x.double().abs().sum()]) for x in point]
    return torch.stack(sums).cpu().flatten().tolist() if sums else []
