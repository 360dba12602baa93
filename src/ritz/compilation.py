"""Functions of tensors, traced to one graph of operations and put through torch.compile.

A product of second derivatives is thousands of small operations; a compiler joins those that pass over memory one after
another. It takes tens of seconds to do so, which pays in long runs alone: with "auto" a function is compiled when even
a compiler that gains nothing would make the whole run no more than a tenth longer.

The graph is traced below Python and torch.func, so that a model need not be one that torch.compile understands. What
Python decides on the way is fixed in it: that is for functions whose every call is the same sequence of operations.
"""

import contextlib
import importlib.util
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .partition import partition
from .switches import multiplies_in_tf32

log = logging.getLogger(__name__)

Function = Callable[..., tuple[Tensor, ...]]

BACKEND = "inductor"
AUTO_ON = ("cuda",)  # kinds of devices: on a CPU runs are the same to the bit, which a choice by the clock would end
SLOWER = 0.1  # by how much a compilation that gains nothing may lengthen a run
START, EACH = 20.0, 0.04  # seconds to compile: some at least, and for each operation
AGREE = {torch.float64: 1e-9, torch.float32: 1e-4}  # largest relative distance from the function as it is
LASTING = 8  # batches of another size, on end, after which it is the usual one
TIMED = range(2, 5)  # calls: not the first, in which libraries choose their algorithms, nor that which is recorded
WAITS = 0.2  # of the seconds of a call: a host that takes more to start it keeps the device waiting between kernels
AGREE_TF32 = 1e-2  # where float32 is multiplied with ten bits


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled function.

    Attributes:
        function: Tensors to tensors, those that `shared` gives at the end.
        waits: Whether the device waits for the host in it, so that a recording pays; one holds all memory that the
            function needs, whether it runs or not.
        shared: What does not depend on the first input, by all others; None where it is not computed apart.
    """

    function: Callable[..., Any]
    waits: bool = False
    shared: Callable[..., Any] | None = None

    def __call__(self, *inputs: Tensor, kept: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Of all inputs; `kept` is what `shared` gave of all but the first, where it is known."""
        if self.shared is not None and kept is None:
            kept = self.shared(*inputs[1:])
        return tuple(self.function(*inputs, *(kept or ())))


@dataclass
class _State:
    """What is known of one function."""

    calls: int = 0
    seconds: float | None = None  # of one call, as it is
    graph: Any = None
    compiled: Compiled | None = None
    refused: bool = False


@dataclass(frozen=True)
class Prospect:
    """What a run has cost so far and what is known to come: the ground on which "auto" decides.

    Example:
        >>> Prospect(spent=150.0, calls_left=100).pays(20.0, each=1.0), Prospect(spent=150.0).pays(20.0, each=1.0)
        (True, False)
    """

    spent: float = 0.0  # seconds
    calls_left: float = 0.0
    allowed: Callable[[], bool] = lambda: True  # whether each call is known to be the same sequence of operations

    def pays(self, cost: float, each: float) -> bool:
        """Whether `cost` seconds are a small part of the run, at `each` seconds a call."""
        return cost <= SLOWER * (self.spent + each * self.calls_left)


class Compilations:
    """Functions of tensors by key; one is compiled when that is worth it, checked, and kept only if it is faster.

    Args:
        most: Functions that are ever compiled; all others are run as they are.

    Example:
        >>> compilations = Compilations()
        >>> for x in (1.0, 2.0, 3.0):  # three calls are not worth a compilation
        ...     (y,) = compilations.run("square", lambda x: (x * x,), [torch.tensor([x])], Prospect(calls_left=3))
        >>> y.item(), len(compilations)
        (9.0, 0)
    """

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self._known: dict[Hashable, _State] = {}
        self._sizes: dict[Hashable, tuple[int, int, int]] = {}  # the usual one, the last one, how often on end

    def __len__(self) -> int:
        return sum(state.compiled is not None for state in self._known.values())

    def is_usual(self, family: Hashable, size: int) -> bool:
        """Whether batches of this size came first in their family, or many times on end since then.

        The others, as a ragged last one, stay as they are. All are of another size once memory has run out.

        Example:
            >>> compilations = Compilations()
            >>> [compilations.is_usual("Hessian", size) for size in (64, 64, 10, 64, *[32] * LASTING)]
            [True, True, False, True, False, False, False, False, False, False, False, True]
        """
        usual, other, times = self._sizes.get(family, (size, 0, 0))
        times = 0 if size == usual else times + 1 if size == other else 1
        if times == LASTING:
            usual, times = size, 0
        self._sizes[family] = usual, size, times
        return size == usual

    def find(
        self,
        key: Hashable,
        eager: Callable[[], tuple[Tensor, ...]],
        traced: Function,
        inputs: Sequence[Tensor],
        prospect: Prospect | None = None,
        exact: Callable[[], tuple[Tensor, ...]] | None = None,
        keeps: Callable[[int], bool] | None = None,
    ) -> Compiled | tuple[Tensor, ...]:
        """The compiled function where there is one, else the results of `eager`.

        Args:
            key: Names the function and all it depends on beside the values of its inputs.
            eager: The function of these inputs, as it is; its results are the truth for the compiled one.
            traced: Tensors to tensors, the same by operations that can be compiled.
            inputs: Inputs of `traced`.
            prospect: On which "auto" decides; None compiles at once.
            exact: The results in float64, or the first rows of them, asked for where compiled ones are far from
                those of `eager`: they may be as near to it as these are.
            keeps: Whether so many bytes, of what does not depend on the first input, would be kept between calls: it
                is compiled apart then. None where nothing is.
        """
        state = self._known.setdefault(key, _State())
        if state.compiled is not None:
            return state.compiled
        if state.refused:
            return eager()
        device = inputs[0].device
        begin = clock(device) if state.calls in TIMED else None
        results = eager()
        if begin is not None:
            state.seconds = min(clock(device) - begin, state.seconds or math.inf)
        state.calls += 1
        if prospect is None or self._pays(state, prospect, traced, inputs):
            self._compile(state, traced, inputs, results, exact, keeps, must_gain=prospect is not None)
        return results

    def run(
        self, key: Hashable, fn: Function, inputs: Sequence[Tensor], prospect: Prospect | None = None
    ) -> tuple[Tensor, ...]:
        """fn(*inputs), compiled or not."""
        found = self.find(key, lambda: fn(*inputs), fn, inputs, prospect, lambda: fn(*in_float64(inputs)))
        return found(*inputs) if isinstance(found, Compiled) else found

    def _pays(self, state: _State, prospect: Prospect, traced: Function, inputs: Sequence[Tensor]) -> bool:
        """Whether the seconds of a compilation are a small part of those of the run."""
        each = state.seconds
        if each is None or not prospect.pays(START, each):  # most runs end here, and are not traced
            return False
        if not prospect.allowed() or not _tools(inputs[0].device):
            log.info("not compiled: a model that may do other things at each call, or no compiler on this machine")
            state.refused = True
            return False
        if state.graph is None and not self._trace(state, traced, inputs):
            return False
        return prospect.pays(START + EACH * len(state.graph.graph.nodes), each)

    def _trace(self, state: _State, traced: Function, inputs: Sequence[Tensor]) -> bool:
        try:
            state.graph = trace(traced, inputs)
        except Exception as error:  # of any kind: for want of memory, from the user's model, from the tracer
            self._refuse(state, "cannot be traced", error)
        return state.graph is not None

    def _compile(
        self,
        state: _State,
        traced: Function,
        inputs: Sequence[Tensor],
        truth: tuple[Tensor, ...],
        exact: Callable[[], tuple[Tensor, ...]] | None,
        keeps: Callable[[int], bool] | None,
        must_gain: bool,
    ) -> None:
        if len(self) >= self.most:
            self._refuse(state, f"is one more than the {self.most} that are kept", None)
            return
        if state.graph is None and not self._trace(state, traced, inputs):
            return
        device = inputs[0].device
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():  # advice of compilers on torch's switches, which are the user's
                warnings.simplefilter("ignore")
                compiled = _lowered_parts(state.graph, inputs, keeps)
                found = compiled(*inputs)
                took = time.perf_counter() - start
                _spoil(device)
                kept = None if compiled.shared is None else compiled.shared(*inputs[1:])
                again = compiled(*inputs, kept=kept)
                begin = clock(device)
                last = compiled(*inputs, kept=kept)  # by what was kept, and timed: before, memory had to be asked for
                started = time.perf_counter() - begin
                seconds = clock(device) - begin
        except Exception as error:  # compilers fail in ways of their own
            self._refuse(state, "cannot be compiled", error)
            return
        apart = max(map(_distance, (*found, *again, *last), 3 * truth))
        agrees = apart <= _agreement(truth[0].dtype, device)
        if not agrees and (exact is None or not _as_good((found, again, last), truth, exact)):
            self._refuse(state, f"compiled, it is {apart:.1e} off", None)
            return
        if must_gain and state.seconds is not None and seconds > state.seconds:
            self._refuse(state, f"compiled, it takes {seconds:.2g} s in the place of {state.seconds:.2g} s", None)
            return
        log.info(
            "compiled in %.0f s: %.2g s a call, %.2g s to start it, %.1e from the function as it is",
            took, seconds, started, apart,
        )  # fmt: skip
        state.compiled, state.graph = replace(compiled, waits=started > WAITS * seconds), None

    def _refuse(self, state: _State, reason: str, error: BaseException | None) -> None:
        """Run as it is from here on."""
        said = "" if error is None else f": {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        log.info("not compiled, run as it is: the function %s%s", reason, said)
        state.refused, state.graph = True, None


def trace(fn: Function, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The operations of `fn` on tensors like these, derivatives and batching worked out, as one flat graph.

    Example:
        >>> graph = trace(lambda x: (torch.func.grad(lambda x: (x**3).sum())(x),), [torch.ones(2)])
        >>> graph(torch.tensor([1.0, 2.0]))[0].tolist()
        [3.0, 12.0]
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    graph = make_fx(fn, tracing_mode="real")(*inputs)
    _without_layout(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def lowered(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """A graph as what the compiler makes of it; tensors keep their sizes, so it is compiled once."""
    compiled: Callable[..., Any] = torch.compile(graph, backend=BACKEND, dynamic=False, fullgraph=True)
    return compiled


def _lowered_parts(
    graph: torch.fx.GraphModule, inputs: Sequence[Tensor], keeps: Callable[[int], bool] | None
) -> Compiled:
    """The graph compiled, what does not depend on the first input apart if it is to be kept."""
    if keeps is not None:
        try:
            parts = partition(graph, inputs)
        except Exception as error:  # an operation that cannot be taken apart from what it writes to
            log.info("compiled whole: %s: %s", type(error).__name__, (str(error).splitlines() or [""])[0][:200])
        else:
            if parts.size and keeps(parts.size):
                return Compiled(lowered(parts.own), shared=lowered(parts.shared))
    return Compiled(lowered(graph))


def _without_layout(graph: torch.fx.GraphModule) -> None:
    """A tangent copied to the layout of its primal, which compilers do not know, as a plain copy."""
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target is not aten.copy_.default:
            continue
        place, source = node.args[:2]
        if place.target is not aten._new_zeros_with_same_feature_meta.default:
            continue
        with graph.graph.inserting_before(node):
            plain = graph.graph.call_function(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
        node.replace_all_uses_with(plain)
        graph.graph.erase_node(node)


def in_float64(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors of floating point numbers in float64, others as they are.

    Example:
        >>> [x.dtype for x in in_float64([torch.ones(1), torch.arange(1)])]
        [torch.float64, torch.int64]
    """
    return [x.double() if x.is_floating_point() else x for x in tensors]


def _spoil(device: torch.device) -> None:
    """Leave NaN in memory of a GPU that torch keeps at hand: a function that reads what nobody wrote is found out."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        with contextlib.suppress(torch.OutOfMemoryError):
            # half of it, in one block; the bits are NaN in float32 too
            torch.full((kept // 16,), math.nan, dtype=torch.float64, device=device)


def _distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|; 0 where both are 0, infinite where a is not finite."""
    apart, size = float((a - b).double().norm()), float(b.double().norm())
    return math.inf if math.isnan(apart) else apart / size if size else apart


def _agreement(dtype: torch.dtype, device: torch.device) -> float:
    """How far a compiled function may be from the function as it is."""
    tf32 = dtype == torch.float32 and multiplies_in_tf32(device)
    return AGREE_TF32 if tf32 or dtype not in AGREE else AGREE[dtype]


def _as_good(
    found: Sequence[Sequence[Tensor]], plain: Sequence[Tensor], exact: Callable[[], tuple[Tensor, ...]]
) -> bool:
    """Whether results, of several calls, are as near to float64 as `plain` ones: in TF32 neither may be near."""
    if plain[0].dtype == torch.float64:
        return False
    try:
        truth = exact()
    except Exception:  # no room, or a model that knows its own precision alone
        return False

    def off(results: Sequence[Tensor]) -> float:
        return max(_distance(x[: len(t)] if t.ndim else x, t) for x, t in zip(results, truth, strict=True))

    return max(map(off, found)) <= 2 * off(plain) < math.inf


def _tools(device: torch.device) -> bool:
    """Whether the compiler has what it needs: Triton for a GPU, a C++ compiler for a CPU."""
    if BACKEND != "inductor":
        return True
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def clock(device: torch.device) -> float:
    """Seconds, after all that was asked of the device is done; not so while the user records on it.

    Example:
        >>> clock(torch.device("cpu")) <= time.perf_counter()
        True
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    return time.perf_counter()
