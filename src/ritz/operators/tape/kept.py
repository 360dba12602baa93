"""Tapes of the batches of a risk: written when they are needed, and kept where that is safe and memory allows.

A kept tape spares its batch the forward pass and the gradient that all vectors share, in later products as well. What
is computed from all the data is kept here too, on the same grounds.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...batches import Batch, tensors_of
from ...held import Grounds, versions_of
from ...losses import default_target
from ...memory import bytes_of, free_memory, is_shortage
from ...risk import Params, Risk
from ...sameness import place_of
from .factors import factored, pays, room_of
from .rules import Hidden
from .tape import Tape

log = logging.getLogger(__name__)

T = TypeVar("T")
Mark = Sequence[Tensor]  # numbers by which what is not known otherwise is known again

SHARE, MOST = 0.25, 1 << 30  # part of the free memory, and bytes, that the tapes of one operator may take
FACTORS = 1 << 29  # bytes of those in factors: the same everywhere, since they are rounded in their own way
ROUNDING = 1e2  # times machine precision: two marks that differ by less are the same
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class Tapes:
    """The tapes of one risk.

    They are kept on a CPU, for data that is cached and models of known modules alone, whose every call is the same:
    until a weight, a buffer, a setting of a module or a value of the data changes. Numbers do not depend on whether one
    was kept, and those of one in factors by rounding alone.

    Attributes:
        works: Until a forward pass turns out to be one that is not followed.
        keeps: Whether tapes are kept.
        tried: Whether one was written.
        cuts: Whether the model reads `.data`, which is a constant for autograd and along a tape: torch.func, where one
            transform is inside another, looks through it.
        hidden: Whether derivatives are known to autograd alone, where no tape works.

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
        self.works = not (risk.opaque or risk.sharded)
        self.tried = self.cuts = self.hidden = self.keeps = False
        self._forget()

    def _forget(self) -> None:
        self._room, self._more = 0.0, float(FACTORS)
        self._kept: dict[Hashable, Tape] = {}
        self._factored: dict[Hashable, Tape | None] = {}  # None where samples reach each other
        self._grounds: Grounds | None = None  # of all that are kept
        self._read: set[Hashable] = set()  # batches whose data is among them
        self._settings: Hashable = None

    def refresh(self) -> None:
        """To be called before a walk: what is not so any more is forgotten."""
        risk = self.risk
        cached = self.works and risk.device.type == "cpu" and risk.plan.cache is not False and risk.batches.cached
        keeps = cached and risk.static and not risk.dropout and not risk.replays
        settings = risk.settings() if keeps else None
        if not (keeps and self.keeps and (self._grounds is None or self._grounds.hold(settings, self._state()))):
            self._forget()
            self.keeps = keeps
            self._room = min(MOST, SHARE * (free_memory(risk.device) or 0.0)) if keeps else 0.0
        self._settings = settings

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
        try:
            if held is not None:
                return product(self._written(params, batch, held))
            return product(self._in_factors(params, batch, straight) if straight else self._tape(params, batch))
        except (RuntimeError, TypeError, LookupError, AssertionError) as error:
            if is_shortage(error):
                raise
            # a model or a loss that is itself at fault fails again, without a tape
            log.info("no tape, products by torch.func: %s", (str(error).splitlines() or [""])[0][:200])
            hidden = isinstance(error, Hidden)
        self._forget()  # outside the except block, whose traceback would hold the memory
        if not hidden:
            self._watched({**(held or {}), **params}, batch)  # to its end: a tape may have been given up before `.data`
        self.works, self.hidden = False, hidden or self.cuts
        return None

    def _written(self, params: Params, batch: Batch, held: Params) -> Tape:
        output = self.risk.output if self.tried else self._watched
        self.tried = True
        return Tape(lambda p: output({**held, **p}, batch), params)

    def _watched(self, params: Params, batch: Batch) -> Tensor:
        """What the model gives, with a look for `.data`."""
        with _DataWatch() as watch:
            out = self.risk.output(params, batch)
        self.cuts = watch.seen
        return out

    def _tape(self, params: Params, batch: Batch) -> Tape:
        key = self._key(params, batch) if self.keeps else None
        if key in self._kept:
            return self._kept[key]
        tape = self._written(params, batch, {})
        size = 2 * tape.size + bytes_of(tensors_of(batch.data))  # values, gradients in them, and a copy of the data
        if key is not None and size <= self._room:
            self._remember(key, batch)
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
            self._remember(key, batch)
            found = self._factored[key] = factored(tape, batch.size)
            self._more -= size if found else 0
        return self._factored[key] or tape

    def _remember(self, key: Hashable, batch: Batch) -> None:
        """What a tape of this batch stands on."""
        self._grounds = self._grounds or Grounds(self._settings, self._state())
        if key not in self._read:
            self._grounds.read(tensors_of(batch.data))
            self._read.add(key)

    @staticmethod
    def _key(params: Params, batch: Batch) -> Hashable:
        """Where the tensors are that it reads, and how often they were written to."""
        tensors = [*params.values(), *tensors_of(batch.data)]
        return batch.index, place_of(tensors), versions_of(tensors)

    def __getstate__(self) -> dict[str, Any]:  # tapes belong to this process
        return {"risk": self.risk}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _DataWatch(TorchFunctionMode):
    """Notices `.data`."""

    seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or func == _DATA
        return func(*args, **(kwargs or {}))


class Kept(Generic[T]):
    """One result of a whole risk, kept while all that it depends on is the same.

    That is known of models and losses that are torch's own and of data that is cached: weights, buffers and class
    weights are compared by value, settings of modules too, and the data up to a size; of more, torch's counts of writes
    are looked at. Of code of the user's, and of data that is walked anew each time, nothing is known: there the result
    is made for each call, unless a mark stands in for what is not known.

    Args:
        risk: The risk.
        most: Bytes of data that are compared by value.

    Example:
        >>> slope = torch.nn.LeakyReLU(0.5)
        >>> risk = Risk(torch.nn.Sequential(torch.nn.Linear(1, 1), slope), torch.nn.MSELoss(), (torch.ones(2, 1),) * 2)
        >>> gradient = Kept(risk)
        >>> first = gradient.get(risk.gradient)
        >>> gradient.get(risk.gradient) is first
        True
        >>> slope.negative_slope = 0.1
        >>> gradient.get(risk.gradient) is first
        False
    """

    def __init__(self, risk: Risk, most: int = MOST) -> None:
        self.risk, self.most = risk, most
        self._grounds: Grounds | None = None
        self._marked: Mark | None = None
        self._result: T

    def get(self, make: Callable[[], T], mark: Callable[[], Mark] | None = None) -> T:
        """The result as of now; where ranks work together all make it anew, or none.

        Args:
            make: Gives the result.
            mark: Gives numbers that change with the result, and takes much less time.
        """
        if not self.risk.world.all(self._stands(mark)):
            self._result = make()
            known = self._known()
            self._grounds = self._taken() if known or mark is not None else None
            self._marked = None if known or mark is None else mark()
        return self._result

    def _known(self) -> bool:
        loss = self.risk.output_loss
        own = type(loss).__module__.startswith("ritz.") and getattr(loss, "target", None) is default_target
        return own and self.risk.static and self.risk.batches.cached

    def _stands(self, mark: Callable[[], Mark] | None) -> bool:
        if self._grounds is None or not self._grounds.hold(self.risk.settings(), self._state()):
            return False
        return self._known() or (mark is not None and self._marked is not None and _are_close(mark(), self._marked))

    def _taken(self) -> Grounds:
        grounds, batches = Grounds(self.risk.settings(), self._state()), self.risk.batches
        data = [x for batch in batches.own() for x in tensors_of(batch.data)] if batches.cached else []
        (grounds.read if bytes_of(data) <= self.most else grounds.count)(data)
        return grounds

    def _state(self) -> list[Tensor]:
        """What may be written to: weights, buffers, and weights of classes."""
        held = getattr(self.risk.output_loss, "__dict__", {}).values()
        return [*self.risk.state().values(), *(x for x in held if isinstance(x, Tensor))]


def _are_close(mark: Mark, other: Mark) -> bool:
    """Whether two marks are the same but for rounding, which differs between runs on a GPU."""
    pairs = list(zip(mark, other, strict=True))
    return all(a.shape == b.shape for a, b in pairs) and all(
        bool((a - b).norm() <= ROUNDING * torch.finfo(b.dtype).eps * b.norm()) for a, b in pairs
    )
