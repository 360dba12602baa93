"""Squares of per-sample gradients, for many cotangents, without the gradients where the layers allow it.

    ||J_i' s||^2        for every sample i of a batch, by parameter, summed over cotangents s in the outputs
    (J_i' s)_j^2        for every entry j of the parameters, summed over samples and cotangents

With the roots of the loss Hessian as cotangents these are traces and the diagonal of the GGN, with an item's own
gradient those of the empirical Fisher. A cotangent may touch one item (a sample, a token) of every sample, since
samples do not mix.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batches import Batch, tensors_of
from ..captures import Capture, asking, places_of_samples, told_apart
from ..errors import UnsupportedError
from ..layers import SampleGradients, sample_gradients, without_rule
from ..losses import CallableLoss, CrossEntropy, Loss
from ..memory import is_shortage
from ..risk import Params, Risk
from ..space import random_permutation, random_uniform
from .passes import replayed

Cotangents = Callable[[Tensor], Iterable[Tensor]]  # outputs -> stacks (r, *out.shape)
OfBatch = Callable[[Params, Batch], tuple[Tensor, Tensor]]

_GRADIENTS = {"cpu": 1 << 25}  # elements of per-sample gradients held at once
_AGREE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative difference of two results that count as the same


class SquaredGradients(ABC):
    """Squares of J_i' s, summed over cotangents s, for the samples i of a batch; see `SquaredNorms`, `SquaredEntries`.

    By the layer rules where they explain every parameter; else by per-sample gradients, which is exact as well.
    """

    def __init__(self, risk: Risk) -> None:
        self.risk = risk
        self.by_layer = without_rule(risk.model, risk.names) is None
        self._known = {1}  # batch sizes at which the layers were seen to keep samples apart
        self._vectorises: bool | None = None  # whether vmap over samples gives the same as one by one; tried once

    @abstractmethod
    def total(self, found: Tensor) -> Tensor:
        """The sum over samples of what was found for a batch."""

    @abstractmethod
    def _of_layer(self, gradients: SampleGradients) -> Tensor:
        """Of one parameter, by the rule of its layer."""

    @abstractmethod
    def _of_stack(self, gradients: Tensor) -> Tensor:
        """Of one parameter, by its gradients (r, size, *shape)."""

    @abstractmethod
    def _unused(self, parameter: Tensor, size: int) -> Tensor:
        """Of one parameter that plays no part."""

    @abstractmethod
    def _all(self, found: list[Tensor]) -> Tensor:
        """Of all parameters, from one after the other; in float64."""

    @abstractmethod
    def _joined(self, pieces: list[Tensor]) -> Tensor:
        """Of a batch, from pieces of it."""

    def __call__(self, params: Params, batch: Batch, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
        if self.by_layer:
            try:
                return self._layers(params, batch, cotangents)
            except UnsupportedError:  # a layer called twice, a parameter used elsewhere, time before samples
                self.by_layer = False
        return self._gradients(params, batch, cotangents)

    def replayed(self, fn: OfBatch, name: Hashable) -> OfBatch:
        """A function that calls this one and no other tensors than those of its batch; `name` is all it depends on.

        It is recorded where the plan says so, once the layers are known: from then on it is the same operations for
        all batches of one size, and nothing that they give is looked at.
        """

        def run(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
            if self.by_layer and batch.size in self._known and (self.risk.static or self._in_order(params, batch)):
                return replayed(self.risk, name, lambda own: fn(params, own), batch)
            return fn(params, batch)

        return run

    def _in_order(self, params: Params, batch: Batch) -> bool:
        """Whether a recording may be used for this batch, too: nothing that it gives is looked at."""
        if self.risk.replays and batch.size > 1:
            scales = _scales(batch, self.risk.device)
            try:
                found = self.risk.captured(params, batch, lambda out: [_scaled(out, scales)])[1]
                self.by_layer = not _moved(next(found), scales, self.risk.coarsest)
            except UnsupportedError:  # another way through the layers
                self.by_layer = False
        return self.by_layer

    def _layers(self, params: Params, batch: Batch, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
        known = batch.size in self._known
        parts = [] if known else told_apart(batch.size, self.risk.device)
        # code of the user may order rows by what is in them, in a way that the first batch did not show
        again = known and batch.size > 1 and not self.risk.static and not self.risk.replays
        scales = _scales(batch, self.risk.device) if again else None

        def stacks(out: Tensor) -> Iterable[Tensor]:
            refuse_rows(out, batch)
            looks = (asking(out, asked) for asked in parts) if scales is None else [_scaled(out, scales)]
            return itertools.chain(looks, cotangents(out))

        out, recorded = self.risk.captured(params, batch, stacks)
        for asked in parts:
            captures = next(recorded)
            _refuse_repeated(captures)
            _refuse_mixed(captures, asked)
        if scales is not None and (moved := _moved(next(recorded), scales, self.risk.coarsest)):
            raise UnsupportedError(f"{moved} does not keep the samples in order")
        self._known.add(batch.size)
        total = self._all([self._unused(p, batch.size) for p in params.values()])
        for captures in recorded:
            _refuse_repeated(captures)
            gradients = {name: own for each in captures for name, own in sample_gradients(each, batch.size).items()}
            total += self._all([
                self._of_layer(gradients[name]) if name in gradients else self._unused(p, batch.size)
                for name, p in params.items()
            ])  # fmt: skip
        return total, out

    def _gradients(self, params: Params, batch: Batch, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
        out = self.risk.output(params, batch)
        refuse_rows(out, batch)
        total = self._all([self._unused(p, batch.size) for p in params.values()])
        for stack in cotangents(out):
            if self._vectorises is None:
                self._vectorises = self.risk.splittable and self._tried(params, batch.head(2), stack[:, :2])
            by = self._vectorised if self._vectorises else self._one_by_one
            total += by(params, batch, stack)
        return total, out

    def _tried(self, params: Params, few: Batch, stack: Tensor) -> bool:
        """Whether a few samples get the same by vmap as one by one.

        Some operations cannot be vectorised, and the backward pass of cdist is so by a rule that is wrong.
        """
        noise = random_uniform(stack.numel(), ("vectorised",), stack.device).to(stack).reshape(stack.shape) + 0.5
        try:
            return same(self._vectorised(params, few, noise), self._one_by_one(params, few, noise), stack.dtype)
        except RuntimeError as error:
            if is_shortage(error):
                raise
            return False

    def _vectorised(self, params: Params, batch: Batch, stack: Tensor) -> Tensor:
        """Per-sample gradients by vjp of vmap over samples, each of which has weights of its own.

        vmap of vjp would be the same, but that with cotangents it is one vmap in another, in which the backward passes
        of some operations of torch are wrong: prelu, det, solve.
        """
        dims = tuple(0 if x.ndim and len(x) == batch.size else None for x in tensors_of(batch.data))

        def one(weights: Params, rows: tuple[Tensor, ...]) -> Tensor:
            sample = [x if dim is None else x[None] for x, dim in zip(rows, dims, strict=True)]
            return self.risk.output(weights, replace(batch.holding(sample), size=1))[0]

        def squares(rows: tuple[Tensor, ...], cotangents: Tensor) -> Tensor:
            size = cotangents.shape[1]
            own = {name: p.expand(size, *p.shape) for name, p in params.items()}
            pullback = torch.func.vjp(lambda own: torch.func.vmap(one, in_dims=(0, dims))(own, rows), own)[1]
            grads = torch.func.vmap(lambda cotangent: pullback(cotangent)[0])(cotangents)
            return self._all([self._of_stack(g) for g in grads.values()])

        room = _GRADIENTS.get(self.risk.device.type, 1 << 28)
        at_once = max(1, room // (len(stack) * self.risk.dim))
        pieces = zip(batch.pieces(at_once), stack.split(at_once, dim=1), strict=True)
        return self._joined([squares(tuple(tensors_of(piece.data)), cotangents) for piece, cotangents in pieces])

    def _one_by_one(self, params: Params, batch: Batch, stack: Tensor) -> Tensor:
        """Per-sample gradients one after the other; the other samples of a batch that cannot be split are masked."""
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        rows: list[Tensor] = []
        for piece in batch.pieces(1 if self.risk.splittable else batch.size):
            with torch.enable_grad():
                out = self.risk.output(leaves, piece)
            first = piece.start - batch.start
            for row, own in enumerate(stack[:, first : first + piece.size].unbind(1)):
                cotangents = out.new_zeros(len(stack), *out.shape)
                cotangents[:, row] = own
                grads = [_gradients(out, leaves, cotangent) for cotangent in cotangents]
                rows.append(self._all([self._of_stack(torch.stack(one)[:, None]) for one in zip(*grads, strict=True)]))
        return self._joined(rows)


class SquaredNorms(SquaredGradients):
    """||J_i' s||^2 of every sample and parameter: (size, parameters), float64."""

    def total(self, found: Tensor) -> Tensor:
        """(parameters,)."""
        return found.sum(0)

    def _of_layer(self, gradients: SampleGradients) -> Tensor:
        return gradients.norms()

    def _of_stack(self, gradients: Tensor) -> Tensor:
        return gradients.square().transpose(0, 1).flatten(1).sum(1, dtype=torch.float64)

    def _unused(self, parameter: Tensor, size: int) -> Tensor:
        return parameter.new_zeros(size)

    def _all(self, found: list[Tensor]) -> Tensor:
        return torch.stack(found, dim=1).double()

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        return torch.cat(pieces)


class SquaredEntries(SquaredGradients):
    """(J_i' s)_j^2 of every entry j, summed over the samples: (dim,), float64."""

    def total(self, found: Tensor) -> Tensor:
        """(dim,), as it is."""
        return found

    def _of_layer(self, gradients: SampleGradients) -> Tensor:
        return gradients.entries().flatten()

    def _of_stack(self, gradients: Tensor) -> Tensor:
        return gradients.square().sum((0, 1), dtype=torch.float64).flatten()

    def _unused(self, parameter: Tensor, size: int) -> Tensor:
        return parameter.new_zeros(parameter.numel())

    def _all(self, found: list[Tensor]) -> Tensor:
        return torch.cat(found).double()

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        return torch.stack(pieces).sum(0)


def same(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of computations in `dtype` are equal but for rounding.

    Example:
        >>> same(torch.ones(2), torch.tensor([1.0, 1.001]), torch.float32)
        True
    """
    return bool((a - b).norm() <= _AGREE.get(dtype, 0.1) * b.norm())


def _gradients(out: Tensor, leaves: Params, cotangent: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        out, tuple(leaves.values()), cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def _refuse_repeated(captures: list[Capture]) -> None:
    """Refuse a layer that is called twice: the gradients of its calls add up before they are squared."""
    for name, calls in Counter(capture.name for capture in captures).items():
        if calls > 1:
            raise UnsupportedError(f"{name} is called {calls} times")


def _refuse_mixed(captures: list[Capture], asked: Tensor) -> None:
    """Refuse layers whose rows are not the samples in their order."""
    for capture in captures:
        if "first" not in places_of_samples(capture.module, capture.grad[0], asked):
            raise UnsupportedError(f"{capture.name} does not keep the samples in order")


def _scales(batch: Batch, device: torch.device) -> Tensor:
    """A factor for each sample, 1/16 to 16, in an order of chance: (size,)."""
    return 2 ** (8 * random_permutation(batch.size, ("scales", batch.start), device) / batch.size - 4)


def _scaled(out: Tensor, scales: Tensor) -> Tensor:
    """Two cotangents (2, *out.shape) on the outputs of all samples; the second is the first times their factors."""
    plain = asking(out, scales > 0)
    return torch.cat([plain, plain * scales.to(plain).reshape(-1, *[1] * (out.ndim - 1))])


def _moved(captures: list[Capture], scales: Tensor, dtype: torch.dtype) -> str:
    """The layer whose rows are not the samples in their order, by the gradients for `_scaled` outputs; "" for none.

    In rows of another sample, or of several, the second is another multiple of the first. It takes fewer passes than
    telling all samples apart, and is enough where that was done in another batch.
    """
    for capture in captures:
        grad = capture.grad.to(torch.promote_types(capture.grad.dtype, torch.float32))
        if grad.shape[1] % len(scales):
            return capture.name
        plain, scaled = grad.reshape(2, len(scales), -1)
        plain = plain * scales.to(plain)[:, None]
        if not bool(((scaled - plain).norm(dim=1) <= _AGREE.get(dtype, 0.1) * plain.norm(dim=1)).all()):
            return capture.name
    return ""


def refuse_rows(out: Tensor, batch: Batch) -> None:
    """Refuse outputs whose first dimension is not the samples."""
    if out.ndim == 0 or len(out) != batch.size:
        raise UnsupportedError(
            f"the model gives outputs {tuple(out.shape)} for {batch.size} samples; the first dimension must be the "
            "samples: reshape them in forward=lambda model, batch: ..., or put a tensor whose length is the number of "
            "samples first in the batch"
        )


# ---------------------------------------------------------------------------------------- items of a sample


def sample_weights(loss: Loss, out: Tensor, batch: Batch) -> Tensor:
    """The weight of each sample, (size,): 1, or the sum over its items."""
    refuse_rows(out, batch)
    if isinstance(loss, CallableLoss):  # whose items are evaluated one by one
        return out.new_ones(batch.size)
    return loss.items(out, batch.data).weight.reshape(batch.size, -1).sum(1)


def num_items(loss: Loss, out: Tensor, batch: Batch) -> int:
    """Items per sample."""
    if isinstance(loss, CallableLoss):
        return 1
    return len(loss.items(out, batch.data).weight) // batch.size


def item_gradients(loss: Loss, out: Tensor, batch: Batch) -> Tensor:
    """sqrt(w_j) times the gradient of item j's loss, on its own outputs; all items at once (*out.shape)."""
    if isinstance(loss, CallableLoss):
        total, pullback = torch.func.vjp(lambda o: loss.total(o, batch.data), out)[:2]
        return pullback(torch.ones_like(total))[0]  # type: ignore[no-any-return]

    weight = loss.items(out, batch.data).weight
    pullback = torch.func.vjp(lambda o: loss.items(o, batch.data).loss, out)[1]
    return pullback(weight.sqrt())[0]  # type: ignore[no-any-return]


def item_by_item(loss: Loss, cotangents: Tensor, out: Tensor, batch: Batch, chunk: int) -> Iterator[Tensor]:
    """Cotangents (r, *out.shape) on one item of every sample at a time, in stacks: squares of items must not mix."""
    num = num_items(loss, out, batch)
    if num == 1:
        yield from cotangents.split(chunk)
        return
    if not isinstance(loss, CrossEntropy):
        raise UnsupportedError(
            f"which outputs belong to each of the {num} items of a sample is not known for {type(loss).__name__}; "
            "use probes"
        )
    dim, _ = loss.layout(out, batch.data)
    places = out.movedim(dim, -1).shape[1:-1]
    for part in torch.arange(num, device=out.device).split(max(1, chunk // len(cotangents))):
        one_hot = F.one_hot(part, num).to(out).reshape(len(part), 1, 1, *places).unsqueeze(dim + 2)
        yield (one_hot * cotangents).flatten(0, 1)
