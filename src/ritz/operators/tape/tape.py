"""A tape and its traversals."""

import copy
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from .layers import rule_of
from .rules import Pointwise, Reshaped, Rule, Step, Value, View
from .sinks import Place, Sink
from .writer import Writer

Rows = Mapping[str, Tensor]  # (k, *shape) by the name of a parameter
Dots = dict[Value | None, Tensor]


class Tape:
    """The operations between parameters and outputs at one point, and products with their derivatives.

    Args:
        fn: The outputs as a function of the parameters.
        params: The parameters by name.

    Raises:
        Untaped: If the function cannot be followed.

    Example:
        >>> tape = Tape(lambda p: 5 * p["w"] ** 2, {"w": torch.tensor([2.0, 3.0])})
        >>> tape.push({"w": torch.ones(1, 2)})[0].tolist()  # 10 w
        [[20.0, 30.0]]
        >>> image = {"w": torch.empty(1, 2)}
        >>> tape.pull(torch.tensor([[1.0, 0.0]]), image)
        >>> image["w"].tolist()
        [[20.0, 0.0]]
        >>> out, dots = tape.push({"w": torch.ones(1, 2)}, keep=True)
        >>> tape.bend(torch.zeros(1, 2), torch.tensor([1.0, 1.0]), dots, image)  # the Hessian of the sum is 10 I
        >>> image["w"].tolist()
        [[10.0, 10.0]]
    """

    def __init__(self, fn: Callable[[dict[str, Tensor]], Tensor], params: Mapping[str, Tensor]) -> None:
        with Writer(params) as writer:
            self.out = fn(dict(params))
        writer.check()
        self._leaves, end = writer.leaves, writer.find(self.out)
        self._wind([rule_of(step) for step in _needed(writer.steps, end)], end)

    def _wind(self, rules: Sequence[Rule], end: Value | None) -> None:
        self.rules, self.end = rules, end
        self._last, self._spare = _last_uses(rules, end), _spare(rules, end)
        self._shared: tuple[Tensor, Dots] | None = None  # a gradient in the outputs, and in every value

    def by(self, rules: Sequence[Rule], end: Value) -> "Tape":
        """A tape with the same parameters and outputs, but other operations between them."""
        other = copy.copy(self)
        other._wind(rules, end)
        return other

    def push(self, rows: Rows, keep: bool = False) -> tuple[Tensor, Dots]:
        """J v (k, *out.shape) for each row v, and with `keep` the tangents of all values."""
        dots: Dots = {value: rows[name] for name, value in self._leaves.items()}
        for rule, done, spare in zip(self.rules, self._last, self._spare, strict=True):
            found = rule.push(dots, spare)  # type: ignore[arg-type]
            dots.update((v, d) for v, d in zip(rule.step.outs, found, strict=True) if v is not None and d is not None)
            if not keep:
                for value in done:
                    dots.pop(value, None)
        if self.end is None:
            return self.out.new_zeros(len(next(iter(rows.values()))), *self.out.shape), dots
        return dots[self.end], dots

    def pull(self, bars: Tensor, into: Rows) -> None:
        """J'u for each of the cotangents (k, *out.shape), written into (k, *shape) tensors by name."""
        self._back(bars, into, {}, {})

    def bend(self, bars: Tensor, bar: Tensor, dots: Dots, into: Rows) -> None:
        """J'u + (d J' / dw . v) g: what `pull` gives, and the change of the pullback of g along the rows.

        Args:
            bars: The tangents u of g, (k, *out.shape).
            bar: The gradient g of a number in the outputs.
            dots: The tangents that `push` kept for the rows v; this call uses them up.
            into: (k, *shape) tensors by name.
        """
        if self._shared is None or not torch.equal(self._shared[0], bar):
            self._shared = bar, self.between(bar[None])
        self._back(bars, into, self._shared[1], dots)

    def between(self, bars: Tensor, wanted: Container[Value | None] | None = None) -> Dots:
        """Gradients (k, *shape) in the intermediate values, all or the wanted ones, but not in the parameters."""
        sinks: dict[Value | None, Sink] = {self.end: Sink(bars)}
        for rule in reversed(self.rules):
            outs = [sinks[v].total if v in sinks else None for v in rule.step.outs]
            into = [None if v.placed else sinks.setdefault(v, Sink()) for v in rule.step.inputs]
            if any(b is not None for b in outs) and any(s is not None for s in into):
                rule.pull(outs, into)
            if wanted is not None:
                for value in rule.step.outs:
                    if value not in wanted:
                        sinks.pop(value, None)
        return {value: sink.total for value, sink in sinks.items() if sink.total is not None}

    def _back(self, bars: Tensor, into: Rows, shared: Dots, dots: Dots) -> None:
        sinks: dict[Value | None, Sink] = {}
        for name, value in self._leaves.items():
            sinks[value] = Place(into[name])
        for rule in self.rules:
            if is_placed(rule):
                place = sinks[rule.step.inputs[0]]
                assert isinstance(place, Place)
                views = zip(rule.step.outs, rule.places(place.total), strict=True)
                sinks |= {value: Place(view, place) for value, view in views}
        sinks.setdefault(self.end, Sink()).add(bars)
        for rule in reversed(self.rules):
            if is_placed(rule):
                continue
            outs = rule.step.outs
            own = [sinks.pop(v, None) for v in outs]
            targets = [sinks.setdefault(v, Sink()) for v in rule.step.inputs]
            if any(sink is not None and sink.total is not None for sink in own):
                spare = all(sink is None or sink.own for sink in own)
                rule.pull([None if sink is None else sink.total for sink in own], targets, spare)
            given = [shared.get(v) for v in outs if v is not None]
            if any(b is not None for b in given):
                rule.bend([None if v is None else shared.get(v) for v in outs], dots, targets)  # type: ignore[arg-type]
            for value in outs:
                dots.pop(value, None)
        for value in self._leaves.values():
            sinks[value].close()  # type: ignore[attr-defined]

    @property
    def placed(self) -> bool:
        """Whether all parameters have a place in the image, and the output is not itself a parameter."""
        return self.end is not None and not self.end.placed and all(v.placed for v in self._leaves.values())

    @property
    def size(self) -> int:
        """Bytes of all tensors that the tape holds."""
        held = [v.tensor for rule in self.rules for v in (*rule.step.inputs, *rule.step.outs) if v is not None]
        held += [x for rule in self.rules for x in vars(rule).values() if isinstance(x, Tensor)]
        held += self._shared[1].values() if self._shared is not None else ()
        memory = [(x.untyped_storage(), x.numel() * x.element_size()) for x in held]
        return sum({storage._cdata: min(size, storage.nbytes()) for storage, size in memory}.values())


def is_placed(rule: Rule) -> TypeGuard[View]:
    """Whether the operation is a view of a parameter, whose gradient has a place in the image."""
    first = rule.step.outs[0]
    return isinstance(rule, View) and first is not None and first.placed


def _needed(steps: Sequence[Step], end: Value | None) -> list[Step]:
    """The steps that the outputs depend on."""
    wanted: set[Value | None] = {end} if end is not None else set()
    kept = []
    for step in reversed(steps):
        if any(v in wanted for v in step.outs if v is not None):
            kept.append(step)
            wanted.update(step.inputs)
    return kept[::-1]


def _last_uses(rules: Sequence[Rule], end: Value | None) -> list[list[Value]]:
    """For each rule, the values that no later rule needs."""
    seen: set[Value | None] = {end}
    found = []
    for rule in reversed(rules):
        own = {v for v in (*rule.step.inputs, *rule.step.outs) if v is not None and v not in seen}
        found.append(list(own))
        seen |= own
    return found[::-1]


def _spare(rules: Sequence[Rule], end: Value | None) -> list[bool]:
    """For each rule, whether it may overwrite the tangents of its argument: nothing else shares or needs them."""
    uses = Counter(v for rule in rules for v in rule.step.inputs)
    alone: set[Value | None] = set()
    found = []
    for rule in rules:
        single = len(rule.step.inputs) == 1 and uses[rule.step.inputs[0]] == 1
        taken = single and rule.step.inputs[0] in alone
        found.append(taken and isinstance(rule, Pointwise) and rule.straight)
        if rule.fresh or (taken and isinstance(rule, Reshaped)):
            alone.update(v for v in rule.step.outs if v is not end)
    return found
