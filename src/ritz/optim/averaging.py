"""Equal-weight averages of the iterates of any optimiser.

    w_avg <- w_avg + (w - w_avg) / n        once an epoch, or once a step, from a start onward

(Izmailov et al. 2018; Granziol, Wan and Roberts 2020, arXiv:2003.01247, whose Gadam is this over AdamW.) The running
mean is that of torch's AveragedModel. The average never feeds back: it is looked at in a copy of the model, or swapped
in for a while and always out again. A network with BatchNorm needs statistics of its own at the average: `refresh`.
"""

import contextlib
import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, update_bn

from ..batches import DEFAULT_BATCH_SIZE, is_tensors, isolated_rng, map_tensors
from ..errors import NonFiniteError, NumericalWarning, UnsupportedError, callers_level
from ..modes import Forward, Whole, unwrapped

_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# of a call under inference_mode(), as in the evaluation of a trainer: its tensors could not be written to outside
_written_later = torch.inference_mode(False)


class IterateAverage:
    """The mean of the weights during training, from a given start.

    Call `step` after each epoch, or after each step of the optimiser, and give `start` and `every` in the same unit.
    Weights are averaged after every `every`-th call beyond `start`. Sums are float32 for weights of lower precision.
    Buffers are those of the last averaged iterate; `refresh` recomputes those of BatchNorm.

    Args:
        source: A model, or an optimiser whose parameters are averaged. If the model is wrapped by
            DistributedDataParallel, DataParallel or torch.compile, the model inside is averaged, so that one rank can
            evaluate the average alone.
        start: Number of calls before averaging starts (T_avg; 161 of 300 epochs in the papers), or "auto": when
            `observe` has seen no better value for `patience` calls (Gadam-Auto).
        every: Calls between two averaged iterates.
        model: With an optimiser as source, the model that holds its parameters: needed for `model` and `refresh`.
        patience: Patience of "auto".
        mode: For "auto": whether "max" (an accuracy) or "min" (a loss) is better.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> average = ritz.optim.IterateAverage(model, start=1)
        >>> for value in (5.0, 1.0, 3.0):  # three epochs; the first is before the start
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     _ = average.step()
        >>> average.num_averaged, average.model.weight.item(), model.weight.item()
        (2, 2.0, 3.0)
        >>> with average.swapped():
        ...     model.weight.item()
        2.0
    """

    def __init__(
        self,
        source: nn.Module | Optimizer,
        start: int | Literal["auto"] = 0,
        every: int = 1,
        *,
        model: nn.Module | None = None,
        patience: int = 5,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if not isinstance(source, nn.Module | Optimizer):
            raise TypeError(f"average a model or the parameters of an optimiser, got {type(source).__name__}")
        if isinstance(source, nn.Module) and model is not None and model is not source:
            raise ValueError("two models were given: model= is for an optimiser as source")
        if start != "auto" and (not isinstance(start, int) or start < 0):
            raise ValueError(f"start must be 'auto' or a number of steps that is not negative, got {start!r}")
        if every < 1 or patience < 1:
            raise ValueError(f"every and patience must be at least 1, got {every} and {patience}")
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}")
        owner = source if isinstance(source, nn.Module) else model
        self._owner = None if owner is None else unwrapped(owner)
        self.source: nn.Module | Optimizer = source if isinstance(source, Optimizer) else unwrapped(source)
        self.every, self.patience, self.mode = every, patience, mode
        self.start = None if start == "auto" else start  # None: not decided yet
        if self._owner is not None:
            _check_owner(self._owner, self._live())
        self._count, self._best, self._waited = 0, -float("inf"), 0
        self._mean: AveragedModel | None = None
        self._statistics: dict[str, Tensor] = {}  # buffers that go with the average
        self._stale = False  # whether BatchNorm's are those of another network
        self._copy: nn.Module | None = None
        self._inside = False

    # ----------------------------------------------------------------------------------------------- training

    @property
    def num_averaged(self) -> int:
        """How many iterates the average holds."""
        return 0 if self._mean is None else int(self._mean.n_averaged)

    def step(self) -> bool:
        """Count one epoch or step, and average the weights if it is their turn; whether they were.

        Raises:
            NonFiniteError: If a weight is NaN or infinite. The average is left as it was.
        """
        if self._inside:
            raise RuntimeError("the average is swapped in and would be averaged with itself; leave swapped() first")
        self._count += 1
        if self.start is None or self._count <= self.start or (self._count - self.start) % self.every:
            return False
        self._update()
        return True

    def observe(self, metric: float) -> bool:
        """For start="auto": take note of a validation value; whether the start is decided.

        When `patience` values in a row have not been better than the best before them, the iterates from here on are
        averaged.
        """
        value = float(metric)
        if value != value:
            raise ValueError("the validation value is NaN: it cannot tell when to start; has training diverged?")
        value = value if self.mode == "max" else -value
        if self.start is None:
            better = value > self._best
            self._best, self._waited = (value, 0) if better else (self._best, self._waited + 1)
            if self._waited >= self.patience:
                self.start = self._count
        return self.start is not None

    def _live(self) -> dict[str, Tensor]:
        """The tensors that are averaged, by name; numbers that are no weights (quantised ones) are left alone."""
        if isinstance(self.source, nn.Module):
            named: dict[str, Tensor] = dict(self.source.named_parameters())
        else:
            every = [p for group in self.source.param_groups for p in group["params"]]
            named = {str(index): p for index, p in enumerate(every)}
        return {name: p for name, p in named.items() if p.is_floating_point() or p.is_complex()}

    @_written_later
    @torch.no_grad()
    def _update(self) -> None:
        live = self._live()
        bag = _Bag(live)
        for name, p in zip(live, bag.tensors, strict=True):
            if not p.isfinite().all():
                raise NonFiniteError(f"parameter {name!r} is not finite after count {self._count}; it is not averaged")
        if self._mean is None:
            self._mean = AveragedModel(bag)
        if len(bag.tensors) != len(_bag(self._mean).tensors):
            raise ValueError(
                f"{len(bag.tensors)} parameters are trained, but {len(_bag(self._mean).tensors)} were averaged; "
                "add parameter groups before averaging starts"
            )
        self._mean.update_parameters(bag)
        self._statistics = _clones(self._buffers())
        self._stale = self._owner is not None and any(_tracks(m) for m in self._owner.modules())

    def _buffers(self) -> dict[str, Tensor]:
        return {} if self._owner is None else dict(self._owner.named_buffers())

    # --------------------------------------------------------------------------------------------- evaluation

    @property
    def model(self) -> nn.Module:
        """A copy of the model at the average, in evaluation mode; the same object each time, renewed in place.

        Hooks bound to an optimiser and hooks on backward passes stay behind.

        Raises:
            RuntimeError: If nothing has been averaged yet.
            UnsupportedError: If there is no model, or it cannot be copied.
        """
        self._warn_if_stale()
        return self._placed()

    def refresh(self, data: Iterable[Any], *, forward: Forward | None = None) -> None:
        """Renew BatchNorm's running statistics for the average, by one pass over the data (torch's `update_bn`).

        Batches count alike, so they should be of one size; data without augmentation gives the statistics of the
        data that is evaluated. Only the copy in `model` sees the data.

        Args:
            data: (X, y) tensors, a loader or any batches; the first entry of a tuple is what the model reads.
            forward: forward(model, batch) for other batches.

        Raises:
            ValueError: If there is no batch.
        """
        model = self._placed()
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta, device = [m.momentum for m in norms], _device(model)
        count = 0

        def batches() -> Iterator[tuple[Any]]:
            nonlocal count
            for batch in _split(data):
                count += 1
                yield (map_tensors(batch, lambda x: x.to(device)),)  # update_bn takes the first entry of a tuple

        try:
            with isolated_rng(device=device):
                update_bn(batches(), Whole(model, forward or _read))
            if norms and not count:
                raise ValueError("the data is empty: there is no batch to take statistics of")
            self._statistics, self._stale = _clones(dict(model.named_buffers())), False
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            model.eval()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The model itself at the average, for the time of a `with` block; then all weights and buffers as before.

        What is trained inside is lost. Modes are the caller's: set model.eval() for an evaluation.
        """
        if self._inside:
            raise RuntimeError("the average is swapped in already")
        self._warn_if_stale()
        live, buffers = self._live(), self._buffers()
        kept, kept_buffers = _clones(live), _clones(buffers)
        try:
            self._inside = True
            _assign(live, self._averaged(live))
            _assign(buffers, self._statistics)
            yield
        finally:
            _assign(live, kept)
            _assign(buffers, kept_buffers)
            self._inside = False

    def _averaged(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The mean by name."""
        if self._mean is None:
            when = "observe() has not decided to start" if self.start is None else f"the start is after {self.start}"
            raise RuntimeError(f"nothing has been averaged yet: {self._count} counts, and {when}; see num_averaged")
        return dict(zip(names, _bag(self._mean).tensors, strict=True))

    def _warn_if_stale(self) -> None:
        if self._stale:
            message = "BatchNorm's running statistics are those of the last iterate, not of the average: call refresh()"
            warnings.warn(message, NumericalWarning, stacklevel=callers_level())

    @_written_later
    def _placed(self) -> nn.Module:
        """The copy with weights and buffers of the average."""
        mean = self._averaged(self._live())
        if self._owner is None:
            raise UnsupportedError(
                "the average is over an optimiser's parameters and knows no model: pass model=, or use swapped()"
            )
        if self._copy is None:
            self._copy = _copied(self._owner)
        own = {id(p): name for name, p in self._live().items()}
        of_model = {name: mean[own[id(p)]] for name, p in self._owner.named_parameters() if id(p) in own}
        others = {name: p for name, p in self._owner.named_parameters() if id(p) not in own}
        _assign(dict(self._copy.named_parameters()), {**of_model, **others})
        _assign(dict(self._copy.named_buffers()), self._statistics)
        return self._copy.eval()

    # ------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: counts, the decision to start, the mean and its statistics."""
        mean = {} if self._mean is None else self._averaged(self._live())
        state = {"count": self._count, "start": self.start, "best": self._best, "waited": self._waited}
        return {
            **state,
            "num_averaged": self.num_averaged,
            "mean": _clones(mean),
            "statistics": _clones(self._statistics),
            "stale": self._stale,
        }

    @_written_later
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run stood.

        Raises:
            ValueError: If the mean that was saved is of other parameters.
        """
        live, mean = self._live(), state["mean"]
        if mean and [(k, v.shape) for k, v in mean.items()] != [(k, v.shape) for k, v in live.items()]:
            raise ValueError(f"the average that was saved has parameters {_listed(mean)}, this one {_listed(live)}")
        self._count, self.start = state["count"], state["start"]
        self._best, self._waited = state["best"], state["waited"]
        self._statistics, self._stale, self._mean = _clones(state["statistics"]), state["stale"], None
        if mean:
            self._mean = AveragedModel(_Bag(live))
            _assign(dict(zip(live, _bag(self._mean).tensors, strict=True)), mean)
            self._mean.n_averaged.fill_(state["num_averaged"])


# ----------------------------------------------------------------------------------------------- tensors in bags


class _Bag(nn.Module):
    """Tensors as a module for AveragedModel, at least float32; wide ones are the live tensors themselves."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        wide = (p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in tensors.values())
        self.tensors = nn.ParameterList([nn.Parameter(p, requires_grad=False) for p in wide])


def _bag(mean: AveragedModel) -> _Bag:
    bag = mean.module
    assert isinstance(bag, _Bag)
    return bag


@torch.no_grad()
def _assign(to: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy by name, into what is there."""
    for name, value in values.items():
        to[name].copy_(value)


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in tensors.items()}


def _listed(tensors: Mapping[str, Tensor]) -> str:
    some = [f"{name} {tuple(x.shape)}" for name, x in list(tensors.items())[:6]]
    return ", ".join(some) + (", ..." if len(tensors) > 6 else "")


# ---------------------------------------------------------------------------------------------------- the model


def _check_owner(model: nn.Module, live: Mapping[str, Tensor]) -> None:
    """Refuse a model that does not hold what is averaged."""
    own = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in own for p in live.values())
    if strangers:
        raise ValueError(f"{strangers} of the {len(live)} parameters of the optimiser are not in the model given")


def _copied(model: nn.Module) -> nn.Module:
    """A deep copy without hooks that belong to an optimiser or to backward passes; the model itself is not touched."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for kind in _BACKWARD_HOOKS:
            memo[id(getattr(module, kind))] = OrderedDict()
        for hook in _forward_hooks(module):
            if isinstance(_holder(hook), Optimizer):
                memo[id(_holder(hook))] = _holder(hook)  # not copied along
    try:
        clone = copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise UnsupportedError(f"the model cannot be copied ({error}); evaluate inside swapped()") from error
    for module in clone.modules():
        for kind in _FORWARD_HOOKS:
            hooks = getattr(module, kind)
            for key in [key for key, hook in hooks.items() if isinstance(_holder(hook), Optimizer)]:
                del hooks[key]
    return clone


def _forward_hooks(module: nn.Module) -> list[Any]:
    return [hook for kind in _FORWARD_HOOKS for hook in getattr(module, kind).values()]


def _holder(hook: Any) -> Any:
    """What a hook is a method of, if it is one, also by functools.partial."""
    return getattr(getattr(hook, "func", hook), "__self__", None)


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _read(model: nn.Module, batch: Any) -> Any:
    """The model on the first entry of a batch."""
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _split(data: Any) -> Iterable[Any]:
    """(X, y) tensors in batches of about one size, since batches count alike; anything else is batches already."""
    if not is_tensors(data):
        return data  # type: ignore[no-any-return]
    parts = math.ceil(len(data[0]) / DEFAULT_BATCH_SIZE)
    return zip(*(x.tensor_split(parts) for x in data), strict=True) if parts else ()
