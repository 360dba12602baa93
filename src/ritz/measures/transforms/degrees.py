"""How the tensors of a network scale when its parameters do: degrees of homogeneity.

Multiply each parameter p by c^e(p), c > 0. A tensor of the network that is then multiplied by c^d has degree d. Terms
of a sum need equal degrees, degrees of factors add up, ReLU and pooling keep them, a tanh or a softmax needs degree 0:

    y = relu(W x + b):      e(b) = e(W) + d(x),      d(y) = e(W) + d(x)

So every rescaling that keeps a network's function (Dinh et al. 2017, section 3), or multiplies its outputs (T_alpha,
section 5 of seed 003), is a choice of exponents that satisfies these rules. `tape.trace` records the rules of a network
once; here they are solved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Size

Exponent = Fraction | int
Degree = Exponent | None  # None: a tensor of zeros, which has every degree
Factor = tuple[int, Exponent]  # (value, power)

CONST, ZERO = 0, 1  # values that depend on no parameter; all others have greater numbers


@dataclass(frozen=True)
class Weight:
    """A parameter that multiplies, and its axes of input and output features, if it has them."""

    name: str
    into: int | None = None
    out: int | None = None
    groups: int = 1


@dataclass(frozen=True)
class Norm:
    """BatchNorm with running statistics: the value that it normalises, and the names of its buffers and gamma."""

    source: int
    mean: str
    var: str
    weight: str | None
    eps: float


@dataclass(frozen=True)
class Step:
    """value `out` = sum over terms of products of powers; the values in `fixed` act differently, and need degree 0."""

    op: str
    out: int
    terms: tuple[tuple[Factor, ...], ...]
    fixed: tuple[int, ...] = ()
    weights: tuple[Weight, ...] = ()
    norm: Norm | None = None

    @property
    def reads(self) -> frozenset[int]:
        """The values that the step uses."""
        return frozenset(value for term in self.terms for value, _ in term) | frozenset(self.fixed)


@dataclass(frozen=True)
class Tape:
    """A forward pass as steps. An operation that keeps the degree of its only argument is not a step."""

    steps: tuple[Step, ...]
    names: Mapping[int, str]  # values that are parameters, up to views and constant factors
    shapes: Mapping[str, Size]  # of parameters and buffers
    output: int

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Parameters that multiply, in the order of their first use."""
        first: dict[str, Weight] = {}
        for weight in (weight for step in self.steps for weight in step.weights):
            first.setdefault(weight.name, weight)
        return tuple(first.values())


class Conflict(Exception):
    """The exponents violate a rule; the message says which."""


@dataclass(frozen=True)
class Solution:
    """Exponents of parameters, the degree of the outputs that they give, and the norms that absorbed a scale."""

    exponents: Mapping[str, Exponent]
    output: Degree
    absorbed: tuple[Norm, ...] = ()

    def moved(self, exponent: Exponent) -> tuple[str, ...]:
        """The parameters with this exponent."""
        return tuple(name for name, own in self.exponents.items() if own == exponent)


def solve(
    tape: Tape, given: Mapping[str, Exponent], weigh: Callable[[Exponent], Exponent], *, absorb: bool = False
) -> Solution:
    """Complete some exponents so that all rules are satisfied.

    A parameter that is added takes the degree of the other terms, a parameter that multiplies a value of degree d takes
    `weigh(d)`; both are decided by its first use. All others have exponent 0.

    Args:
        tape: The rules.
        given: Exponents known beforehand.
        weigh: `lambda d: -d` cancels the scale of `given` at the next weight; `lambda d: 0` moves no other weight.
        absorb: Whether BatchNorm with running statistics may take an input of degree 1, as if they scaled with it.

    Raises:
        Conflict: If a rule is violated.

    Example:
        >>> layer = Step("aten::mm", 4, (((2, 1),),), weights=(Weight("first"),))  # h = relu(first @ x)
        >>> outer = Step("aten::mm", 5, (((4, 1), (3, 1)),), weights=(Weight("second"),))  # second @ h
        >>> tape = Tape((layer, outer), {2: "first", 3: "second"}, {}, output=5)
        >>> solve(tape, {"first": 1}, lambda d: -d).exponents
        {'first': 1, 'second': -1}
        >>> solve(tape, {}, lambda d: 1).output
        2
    """
    replay = _Replay(tape, dict(given), weigh, absorb)
    output = replay.run()
    return Solution(replay.found, output, tuple(replay.absorbed))


class _Replay:
    """One pass along a tape, which fills in unknown exponents."""

    def __init__(
        self, tape: Tape, found: dict[str, Exponent], weigh: Callable[[Exponent], Exponent], absorb: bool
    ) -> None:
        self.tape, self.found, self.weigh, self.absorb = tape, found, weigh, absorb
        self.absorbed: list[Norm] = []
        self.degrees: dict[int, Degree] = {CONST: 0, ZERO: None}

    def run(self) -> Degree:
        """The degree of the outputs."""
        for step in self.tape.steps:
            self.degrees[step.out] = self._step(step)
        return self._degree(self.tape.output)

    def _free(self, value: int) -> bool:
        name = self.tape.names.get(value)
        return name is not None and name not in self.found

    def _degree(self, value: int) -> Degree:
        name = self.tape.names.get(value)
        return self.degrees[value] if name is None else self.found.setdefault(name, 0)

    def _step(self, step: Step) -> Degree:
        for value in step.fixed:
            self._hold(step, value)
        weights = {weight.name for weight in step.weights}
        # biases: a free parameter that is a term by itself takes the degree of the other terms
        biases = {
            term: self.tape.names[term[0][0]]
            for term in step.terms
            if len(term) == 1 and self._free(term[0][0]) and self.tape.names[term[0][0]] not in weights
        }
        degrees = {self._product(term) for term in step.terms if term not in biases} - {None}
        if len(degrees) > 1:
            raise Conflict(f"{step.op} joins tensors that scale by c^{' and c^'.join(sorted(map(str, degrees)))}")
        common = degrees.pop() if degrees else None
        self.found.update(dict.fromkeys(biases.values(), common or 0))
        return 0 if common is None and biases else common

    def _product(self, term: Sequence[Factor]) -> Degree:
        """The degree of a product; free weights in it get their exponents from the rest."""
        free = {value: power for value, power in term if self._free(value)}
        total = self._total([pair for pair in term if pair[0] not in free])
        for value, power in free.items():
            share = self.weigh(total or 0)
            self.found[self.tape.names[value]] = share if power == 1 else share / Fraction(power)
            total = None if total is None else total + share
        return self._total(term)

    def _total(self, term: Sequence[Factor]) -> Degree:
        """The sum of degrees times powers."""
        parts = [None if (degree := self._degree(value)) is None else degree * power for value, power in term]
        return None if None in parts else sum(part for part in parts if part is not None)

    def _hold(self, step: Step, value: int) -> None:
        """Refuse a scale that an operation does not pass on."""
        degree = self._degree(value)
        if not degree:
            return
        if self.absorb and step.norm is not None and value == step.norm.source and degree == 1:
            self.absorbed.append(step.norm)
            return
        raise Conflict(f"{step.op} is not positively homogeneous")
