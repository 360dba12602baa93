"""Tapes of the batches of a risk: written when they are needed, and kept where that is safe and memory allows.

A kept tape spares its batch the forward pass and the gradient that all vectors share, in later products as well.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from ...batches import Batch, tensors_of
from ...held import Snapshot
from ...memory import free_memory, is_shortage
from ...replay import place_of
from ...risk import Params, Risk
from .factors import factored, pays, room_of
from .rules import Hidden
from .tape import Tape

log = logging.getLogger(__name__)

T = TypeVar("T")

SHARE, MOST = 0.25, 1 << 30  # part of the free memory, and bytes, that the tapes of one operator may take
FACTORS = 1 << 29  # bytes of those in factors: the same everywhere, since they are rounded in their own way


class Tapes:
    """The tapes of one risk.

    They are kept on a CPU, for data that is cached and models of known modules alone, whose every call is the same:
    until a weight, a buffer, a setting of a module or the data changes. Numbers do not depend on whether one was kept,
    and those of one in factors by rounding alone.

    Example:
        >>> risk = Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(2, 1), torch.ones(2, 1)))
        >>> tapes, batch = Tapes(risk), next(iter(risk.batches))
        >>> tapes.refresh()
        >>> with risk.session():
        ...     first, second = (tapes.along(risk.params(), batch, lambda tape: tape) for _ in range(2))
        >>> first is second
        True
    """

    def __init__(self, risk: Risk) -> None:
        self.risk = risk
        self.works = not (risk.opaque or risk.sharded)  # until a forward pass turns out to be one that is not followed
        self.tried = self.hidden = False  # whether one was written; whether derivatives are known to autograd alone
        self.keeps = False
        self._forget()

    def _forget(self) -> None:
        self._room, self._more = 0.0, float(FACTORS)
        self._kept: dict[Hashable, Tape] = {}
        self._factored: dict[Hashable, Tape | None] = {}  # None where samples reach each other
        self._weights: Snapshot | None = None  # as of the tapes that are kept
        self._settings: Hashable = None

    def refresh(self) -> None:
        """To be called before a walk: what is not so any more is forgotten."""
        risk = self.risk
        cached = self.works and risk.device.type == "cpu" and risk.plan.cache is not False and risk.batches.cached
        keeps = cached and risk.static and not risk.dropout and not risk.replays
        settings = risk.settings() if keeps else None
        same = keeps and self.keeps and (self._weights is None or self._weights.compare(self._state())())
        if not (same and self._settings == settings):
            self._forget()
            self.keeps, self._settings = keeps, settings
            self._room = min(MOST, SHARE * (free_memory(risk.device) or 0.0)) if keeps else 0.0

    def _state(self) -> list[Tensor]:
        return list(self.risk.state().values())

    def along(
        self, params: Params, batch: Batch, product: Callable[[Tape], T], held: Params | None = None, straight: int = 0
    ) -> T | None:
        """`product` of the tape of a batch; None where the forward pass cannot be followed, or an operation fails.

        To be called inside `session`. With all other tensors of the model in `held` the tape is for this call alone.
        If it is for first derivatives alone, along so many vectors `straight`, it may be one in factors.
        """
        if not self.works:
            return None
        self.tried = True
        try:
            if held is not None:
                return product(self._written(params, batch, held))
            return product(self._in_factors(params, batch, straight) if straight else self._tape(params, batch))
        except (RuntimeError, TypeError, LookupError, AssertionError) as error:
            if is_shortage(error):
                raise
            # a model or a loss that is itself at fault fails again, without a tape
            log.info("no tape, products by torch.func: %s", (str(error).splitlines() or [""])[0][:200])
            self.works, self.hidden = False, isinstance(error, Hidden)
        self._forget()  # outside the except block, whose traceback would hold the memory
        return None

    def _written(self, params: Params, batch: Batch, held: Params) -> Tape:
        return Tape(lambda p: self.risk.output({**held, **p}, batch), params)

    def _tape(self, params: Params, batch: Batch) -> Tape:
        key = self._key(params, batch) if self.keeps else None
        if key in self._kept:
            return self._kept[key]
        tape = self._written(params, batch, {})
        if key is not None and (size := 2 * tape.size) <= self._room:  # values, and gradients in them
            self._remember()
            self._kept[key], self._room = tape, self._room - size
        return tape

    def _in_factors(self, params: Params, batch: Batch, k: int) -> Tape:
        """The tape, or another in factors where it pays and those of all samples up to here have room.

        What came before has no part in it: a run that is gone on with takes the same ones.
        """
        tape = self._tape(params, batch)
        if not (self.keeps and pays(tape, batch.size, k)):
            return tape
        size, key = room_of(tape, batch.size), self._key(params, batch)
        if (batch.start / batch.size + 1) * size > FACTORS:
            return tape
        if key not in self._factored:
            if size > self._more:  # which those of batches cut in another way have taken
                self._factored, self._more = {}, float(FACTORS)
            self._remember()
            found = self._factored[key] = factored(tape, batch.size)
            self._more -= size if found else 0
        return self._factored[key] or tape

    def _remember(self) -> None:
        self._weights = self._weights or Snapshot(self._state())

    @staticmethod
    def _key(params: Params, batch: Batch) -> Hashable:
        """Where the tensors are that it reads, and how often they were written to."""
        tensors = [*params.values(), *tensors_of(batch.data)]
        return batch.index, place_of(tensors), tuple(x._version for x in tensors)

    def __getstate__(self) -> dict[str, Any]:  # tapes belong to this process
        return {"risk": self.risk}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
