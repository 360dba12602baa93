"""Tapes of the batches of a risk: recorded when they are needed, and kept if that is safe and memory allows.

With a kept tape, later products need no forward pass of the batch, and no gradient, which all vectors share. Results
computed from all the data are kept under the same conditions (`Kept`).
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
Mark = Sequence[Tensor]  # numbers that change with a result whose other dependences are not known

SHARE, MOST = 0.25, 1 << 30  # part of the free memory, and bytes, that the tapes of one operator may take
FACTORS = 1 << 29  # bytes of tapes in factors: a fixed number, since their use changes the rounding of results
ROUNDING = 1e2  # times machine precision: marks that differ by less are equal
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class Tapes:
    """The tapes of one risk.

    Tapes are kept on a CPU, for cached data and models that consist of known modules only, whose calls are all the
    same, until a weight, a buffer, a setting of a module or a value of the data changes. Results do not depend on
    whether a tape was kept; a tape in factors changes only their rounding.

    Attributes:
        works: True until a forward pass turns out to be one that cannot be recorded.
        keeps: Whether tapes are kept.
        tried: Whether a tape was recorded.
        cuts: Whether the model reads `.data`, which is a constant for autograd and on a tape, while nested transforms
            of torch.func differentiate through it.
        hidden: Whether no tape works because only autograd knows the derivatives.

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
        self._factored: dict[Hashable, Tape | None] = {}  # None if samples affect each other
        self._grounds: Grounds | None = None  # all that the kept tapes depend on
        self._read: set[Hashable] = set()  # batches whose data is part of the grounds
        self._settings: Hashable = None

    def refresh(self) -> None:
        """To be called before a walk: drops the kept tapes if anything has changed."""
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
        """`product` of the tape of a batch; None if the forward pass cannot be recorded, or an operation fails.

        To be called inside `session`. If `held`, all other tensors of the model, is given, the tape is for this call
        only. If `straight`, a number of vectors, is given, only first derivatives along so many vectors are needed, and
        the tape may be one in factors.
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
            # an error of the model or the loss itself is raised again without a tape
            log.info("no tape, products by torch.func: %s", (str(error).splitlines() or [""])[0][:200])
            hidden = isinstance(error, Hidden)
        self._forget()  # outside the except block, whose traceback would hold the memory
        if not hidden:
            self._watched({**(held or {}), **params}, batch)  # recording may have stopped before `.data` was read
        self.works, self.hidden = False, hidden or self.cuts
        return None

    def _written(self, params: Params, batch: Batch, held: Params) -> Tape:
        output = self.risk.output if self.tried else self._watched
        self.tried = True
        return Tape(lambda p: output({**held, **p}, batch), params)

    def _watched(self, params: Params, batch: Batch) -> Tensor:
        """The outputs of the model; records in `cuts` whether it reads `.data`."""
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
        """The tape, or one in factors if that pays and the factors of all samples up to this batch fit into `FACTORS`.

        This does not depend on earlier products, so that a resumed run uses the same tapes.
        """
        tape = self._tape(params, batch)
        if not (self.keeps and pays(tape, batch.size, k)):
            return tape
        size, key = room_of(tape, batch.size), self._key(params, batch)
        if (batch.start / batch.size + 1) * size > FACTORS:
            return tape
        if key not in self._factored:
            if size > self._more:  # the rest is taken by batches that were cut in another way
                self._factored, self._more = {}, float(FACTORS)
            self._remember(key, batch)
            found = self._factored[key] = factored(tape, batch.size)
            self._more -= size if found else 0
        return self._factored[key] or tape

    def _remember(self, key: Hashable, batch: Batch) -> None:
        """Add all that a tape of this batch depends on to the grounds."""
        self._grounds = self._grounds or Grounds(self._settings, self._state())
        if key not in self._read:
            self._grounds.read(tensors_of(batch.data))
            self._read.add(key)

    @staticmethod
    def _key(params: Params, batch: Batch) -> Hashable:
        """The places of the tensors that a tape reads, and how often they were written to."""
        tensors = [*params.values(), *tensors_of(batch.data)]
        return batch.index, place_of(tensors), versions_of(tensors)

    def __getstate__(self) -> dict[str, Any]:  # tapes belong to this process
        return {"risk": self.risk}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _DataWatch(TorchFunctionMode):
    """Records whether `.data` was read."""

    seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or func == _DATA
        return func(*args, **(kwargs or {}))


class Kept(Generic[T]):
    """One result of a whole risk, kept as long as all that it depends on is the same.

    For models and losses of torch itself and cached data, this is checked: weights, buffers, class weights and settings
    of modules are compared by value, and so is the data up to a size; beyond that, torch's version counters are
    compared. For the user's own code, and for data that is read anew each time, it cannot be checked: the result is
    then computed in each call, unless the caller gives a mark that changes with it.

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
        """The current result. If ranks work together, all compute it, or none.

        Args:
            make: Computes the result.
            mark: Computes numbers that change with the result, in much less time.
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
        """Tensors that may be written to: weights, buffers, and weights of classes."""
        held = getattr(self.risk.output_loss, "__dict__", {}).values()
        return [*self.risk.state().values(), *(x for x in held if isinstance(x, Tensor))]


def _are_close(mark: Mark, other: Mark) -> bool:
    """Whether two marks are equal up to rounding, which differs between runs on a GPU."""
    pairs = list(zip(mark, other, strict=True))
    return all(a.shape == b.shape for a, b in pairs) and all(
        bool((a - b).norm() <= ROUNDING * torch.finfo(b.dtype).eps * b.norm()) for a, b in pairs
    )
