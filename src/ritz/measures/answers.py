"""What a search asks of the data, and is told: one that was killed is told it again, and asks on from there."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Saved, State

SMALL = 1 << 10  # numbers of an answer that is kept with the others; a larger one has a file of its own

_asking: ContextVar["Answers | None"] = ContextVar("asking", default=None)


class Answers:
    """The answers of one search, in order, each with the point it was asked for.

    A search that is begun again comes to the same points by what it is told. Where it does not, what follows is
    forgotten. On the disk are all answers until the search is done, gradients too: 40 of them for a worst case.

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
        self._large: dict[str, Tensor] = {}  # by the names of their files, those that are not on the disk yet

    def __call__(self, point: Iterable[Tensor], ask: Callable[[], Tensor]) -> Tensor:
        """What `ask` gives for these weights, or gave before.

        Raises:
            StoppedError: If the run is to stop; what is known is saved by then.
        """
        number, self.number, mark = self.number, self.number + 1, _mark(point)
        if number < len(self.known) and self.known[number]["mark"] == mark:
            return self._told(**self.known[number])
        found = ask()
        own, file = found.detach().cpu().clone(), ""
        if own.numel() > SMALL:
            file = f"answer-{number}"
            while self.saved.has(file):  # of what is forgotten
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
    """What `ask` gives; inside `recalled` what it gave before, if this was asked before.

    Example:
        >>> float(answered([torch.ones(2)], lambda: torch.tensor(3.0)))
        3.0
    """
    asking = _asking.get()
    return ask() if asking is None else asking(point, ask)


@contextlib.contextmanager
def recalled(saved: Saved) -> Iterator[None]:
    """Answers that are given inside are kept in a state, and those of a state are given again."""
    before = _asking.set(Answers(saved))
    try:
        yield
    finally:
        _asking.reset(before)


def _mark(point: Iterable[Tensor]) -> list[float]:
    """By which weights are known again."""
    sums = [torch.stack([x.double().sum(), x.double().abs().sum()]) for x in point]
    return torch.stack(sums).cpu().flatten().tolist() if sums else []
