"""The Jacobian of few outputs in two factors per layer: from parameters to the layer's results, and on to the outputs.

Let y be the results of an operation that reads parameters, y' their tangents for its own parameters only, and

    D [b, c] = d out [b, c] / d y [b]

for sample b and its output c. If samples do not affect each other, J v is the sum of D [b] y' [b] over these
operations, and J'u is the pullback of D [b]' u [b] to their parameters. To find all D takes one backward traversal for
each of the C outputs, once for all vectors. After that no tangent is multiplied with a weight: 2 of the 4 products of a
dense layer are left.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .layers import rule_of
from .rules import Bars, Dots, Matrices, Rule, Sinks, Step, Value
from .tape import Tape, is_placed

DEARER = 4  # cost of a multiplication with D (small matrices) relative to one with a weight
START = 1 << 14  # least cost of a product with D, in multiplications with a weight
ROUNDED = 2 / 3  # sums in another order may differ by this power of eps, relative to the largest


class Joint(Rule):
    """Outputs as a sum, c + D y sample by sample: the contribution of y and that of earlier operations."""

    def __init__(self, step: Step, factor: Tensor) -> None:
        super().__init__(step)
        self.factor = factor  # (B, C, n)

    def push(self, dots: Dots, spare: bool = False) -> Sequence[Tensor]:
        *others, dot = (dots[v] for v in self.step.inputs)
        by_sample = dot.reshape(len(dot), len(self.factor), -1).transpose(0, 1)  # (B, k, n)
        out = (by_sample @ self.factor.mT).transpose(0, 1).reshape(len(dot), *self.out.shape)
        return (sum(others, out),)

    def pull(self, bars: Bars, into: Sinks, spare: bool = False) -> None:
        (bar,), (*others, y) = bars, into
        for other in others:
            other.add(bar)
        k, size = len(bar), len(self.factor)
        found = bar.new_empty(k, size, self.factor.shape[-1])
        torch.bmm(bar.reshape(k, size, -1).transpose(0, 1), self.factor, out=found.transpose(0, 1))
        y.add(found.reshape(k, *self.step.inputs[-1].tensor.shape), own=True)


def pays(tape: Tape, size: int, k: int) -> bool:
    """Whether products with k vectors take less work in factors, including the first product, which finds them.

    It depends on counts only, not on time, so that the decision is the same each time.
    """
    if tape.out.device.type != "cpu" or tape.out.numel() % size or not tape.placed:
        return False
    walk = sum(rule.walk for rule in tape.rules if isinstance(rule, Matrices))
    num, readers = tape.out.numel() // size, _readers(tape)
    joints = size * len(readers) * START + DEARER * k * num * sum(rule.out.numel() for rule in readers)
    return num * walk + 2 * joints < 2 * k * walk


def room_of(tape: Tape, size: int) -> int:
    """Bytes of the factors, and of what the operations that read parameters hold besides."""
    return (tape.out.numel() // size + 3) * sum(rule.out.nbytes for rule in _readers(tape))


def factored(tape: Tape, size: int) -> Tape | None:
    """A tape for the same products in factors, for a batch of `size` samples; None if samples affect each other.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> tape = Tape(lambda p: torch.mm(torch.mm(x, p["v"]), p["w"]), {n: torch.ones(1, 1) for n in "vw"})
        >>> found = factored(tape, size=2)
        >>> found.push({"v": torch.full((1, 1, 1), 3.0), "w": torch.full((1, 1, 1), 5.0)})[0].tolist()  # x (3 + 5)
        [[[8.0], [16.0]]]
        >>> factored(Tape(lambda p: torch.ones(2, 2) @ (x * p["w"]), {"w": torch.ones(1)}), size=2)  # sums over samples
    """
    readers = _readers(tape)
    ends = _ends(tape.out, size)
    found = tape.between(ends, {v for rule in readers for v in rule.step.outs})
    rules: list[Rule] = [rule for rule in tape.rules if is_placed(rule)]
    before: list[Value] = []
    for rule in readers:
        y, *others = rule.step.outs
        factor = _apart(found.pop(y, None), ends[-1].reshape(size, -1))
        if y is None or factor is None or any(v in found for v in others):
            return None
        end = Value(tape.out)
        rules += rule_of(_held(rule.step)), Joint(Step(None, [], {}, [*before, y], [tape.out], [end]), factor)
        before = [end]
    return tape.by(rules, end)


def _readers(tape: Tape) -> list[Rule]:
    """The operations that read parameters, or views of them."""
    return [rule for rule in tape.rules if any(v.placed for v in rule.step.inputs) and not is_placed(rule)]


def _ends(out: Tensor, size: int) -> Tensor:
    """Cotangents (C + 1, *out.shape): one for each output, the same for all samples, and a random one."""
    num = out.numel() // size
    units = torch.eye(num, dtype=out.dtype).expand(size, num, num).transpose(0, 1)
    drawn = torch.randn(1, size, num, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    return torch.cat([units, drawn]).reshape(num + 1, *out.shape)


def _apart(bars: Tensor | None, drawn: Tensor) -> Tensor | None:
    """D (B, C, n) from the gradients in y; None unless D also gives the gradient for the cotangent `drawn` (B, C).

    It does not if samples affect the y of other samples, or if y does not have the samples in their order.
    """
    if bars is None or bars.dtype != drawn.dtype or bars[0].numel() % len(drawn):
        return None
    by_sample = bars.reshape(len(bars), len(drawn), -1)
    factor, seen = by_sample[:-1].transpose(0, 1), by_sample[-1]
    told = (drawn[:, None] @ factor)[:, 0]
    slack = torch.finfo(told.dtype).eps ** ROUNDED * told.abs().max()
    return factor.clone() if bool((told - seen).abs().max() <= slack) else None  # a view would hold the whole of `bars`


def _held(step: Step) -> Step:
    """The same operation as a function of its parameters only."""

    def put(x: object) -> object:
        if isinstance(x, list):
            return [put(y) for y in x]
        return x.tensor if isinstance(x, Value) and not x.placed else x

    inputs = [v for v in step.inputs if v.placed]
    kwargs = {name: put(x) for name, x in step.kwargs.items()}
    return Step(step.func, [put(x) for x in step.args], kwargs, inputs, step.results, step.outs)
