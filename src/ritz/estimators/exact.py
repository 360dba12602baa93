"""Traces and diagonals without probes, by squares of backward passes.

For A = mean_i J_i' M_i J_i with M_i = sum_c s_c s_c' in the outputs of sample i, the GGN or a Fisher matrix,

    A_jj = mean_i sum_c (J_i' s_c)_j^2,        Tr A = mean_i sum_c ||J_i' s_c||^2,

C backward passes over the data. Where the network is affine in each single weight, the second derivative of every
output in every single weight is 0: the Hessian has the diagonal of the GGN, and its trace.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from ..batches import Batch
from ..checkpoint import Unsaved
from ..errors import UnsupportedError
from ..linearity import multi_affine
from ..losses import Loss
from ..operators.algebra import Block, Metered, Scaled, Shifted, Sum
from ..operators.base import Operator
from ..operators.gauss_newton import GGN, EmpiricalFisher, Fisher, GradientCovariance
from ..operators.hessian import Hessian
from ..operators.noise import BatchNoise
from ..reducers import Mean
from ..risk import Params, Risk
from ..space import ParamSpace
from .journal import Journal
from .passes import fitting_pieces
from .precision import unscaled
from .probing import image_squares, loses_digits, of_network, require_finite
from .squares import SquaredEntries, SquaredNorms, item_by_item, item_gradients, num_items, refuse_rows
from .walks import Walks

By = Literal["parameter", "entry"]  # a number for each parameter, the trace of its block, or the diagonal itself

_STACK = 2  # cotangents pulled back at once, in chunks: a tangent of a product holds twice the activations


def exact_trace(operator: Operator, walks: Walks | None = None, looked: bool = False) -> tuple[float, dict[str, float]]:
    """The trace without probes, by squared norms of backward passes; and its parts, parameter by parameter.

    It exists for the GGN and the Fishers of any network, for the Hessian of a multi-affine one, and for blocks, sums,
    multiples and shifts of these. A part is the trace of the diagonal block of one parameter. `walks` keeps what the
    batches gave; `looked` says that `exact_cost` was asked and there is one, which may have been a walk by itself.

    Raises:
        UnsupportedError: Where there is no such form; the message says why.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> X, y = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.zeros(2, 1)
        >>> exact_trace(ritz.Hessian(ritz.Risk(model, torch.nn.MSELoss(), (X, y))))  # 2 (||X||^2 / N + 1)
        (16.0, {'weight': 14.0, 'bias': 2.0})
    """
    if not looked:
        num_passes(operator, look=True)
    found = _exact(operator, "parameter", walks or Walks(Unsaved(operator.world)))
    parts = dict(zip(operator.space.names, found.tolist(), strict=True))
    return math.fsum(parts.values()), parts


def exact_diagonal(operator: Operator, walks: Walks | None = None, looked: bool = False) -> Tensor:
    """The diagonal (dim,) without probes, in float64: for the matrices that have an exact trace, at about its cost.

    Raises:
        UnsupportedError: Where there is no such form; the message says why.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> X, y = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.zeros(2, 1)
        >>> exact_diagonal(ritz.Hessian(ritz.Risk(model, torch.nn.MSELoss(), (X, y)))).tolist()  # 2 (X^2 / N, 1)
        [10.0, 4.0, 2.0]
    """
    if not looked:
        num_passes(operator, look=True)
    return _exact(operator, "entry", walks or Walks(Unsaved(operator.world)))


def without_probes(meter: Journal, by: By, num_probes: int, looked: bool) -> tuple[Tensor, str, float | None]:
    """The diagonal or its sums by backward passes, or by dim products where these are few or the matrix of no network.

    Args:
        meter: The matrix; passes count as products.
        by: What is asked for.
        num_probes: Products that may be spent on the matrix of a network that has no exact trace.
        looked: As for `exact_trace`.

    Returns:
        The numbers in float64, in words how they were come by, and the `norm` of `rounded`.
    """
    norm = None
    try:
        if by == "entry":
            found = exact_diagonal(meter.base, meter.walks, looked)
        else:
            parts = exact_trace(meter.base, meter.walks, looked)[1]
            found = torch.tensor(list(parts.values()), dtype=torch.float64)
        meter.products, how = num_passes(meter.base), "exact, by backward passes, counted as products"
        if loses_digits(meter.base):
            norm = abs(float(found.sum()) - unscaled(meter.base)[2] * meter.dim)  # the trace of a positive matrix
    except UnsupportedError:
        if of_network(meter.base) and meter.dim > num_probes:
            raise
        dense, how = meter.dense(), "exact, by dim products"
        require_finite(meter, dense)
        found = _summed(meter.space, dense.diagonal().double(), by)
        norm = math.sqrt(image_squares(meter, torch.eye(meter.dim).to(dense), dense))
    return found, how, norm


def _exact(operator: Operator, by: By, walks: Walks) -> Tensor:
    """The diagonal (dim,), or its sums (parameters,), of a matrix that has one: `num_passes` looks."""
    if isinstance(operator, GradientCovariance):
        mean = operator.risk.gradient().double()
        return _exact(operator.base, by, walks) - _summed(operator.space, mean.square(), by)
    if isinstance(operator, Scaled):
        return operator.factor * _exact(operator.base, by, walks)
    if isinstance(operator, Shifted):
        found = _exact(operator.base, by, walks)
        return found + operator.shift * _summed(operator.space, found.new_ones(operator.dim), by)
    if isinstance(operator, Sum):
        return _exact(operator.base, by, walks) + _exact(operator.right, by, walks)
    if isinstance(operator, Block):
        whole = operator.base.space
        parts = _exact(operator.base, by, walks).split(list(whole.sizes) if by == "entry" else 1)
        named = dict(zip(whole.names, parts, strict=True))
        return torch.cat([named[name] for name in operator.space.names])
    if isinstance(operator, Metered | BatchNoise):
        return _exact(operator.base, by, walks)
    assert isinstance(operator, Hessian | GGN | EmpiricalFisher | Fisher)
    return _of_risk(operator, by, walks)


def _summed(space: ParamSpace, vector: Tensor, by: By) -> Tensor:
    return vector if by == "entry" else space.segment(vector[None])[0]


def exact_cost(operator: Operator) -> int | None:
    """How many backward passes over the data an exact trace or diagonal takes; None where there is none.

    Example:
        >>> data = torch.ones(2, 3), torch.tensor([0, 1])
        >>> risk = ritz.Risk(torch.nn.Linear(3, 5), torch.nn.CrossEntropyLoss(), data)
        >>> exact_cost(ritz.GGN(risk)), exact_cost(ritz.EmpiricalFisher(risk))
        (5, 1)
    """
    try:
        return num_passes(operator, look=True)
    except UnsupportedError:
        return None


def num_passes(operator: Operator, look: bool = False) -> int:
    """How many backward passes over the data an exact trace or diagonal takes; with a `look` whether there is one.

    Raises:
        UnsupportedError: If there is none.
    """
    if isinstance(operator, Sum):
        return num_passes(operator.base, look) + num_passes(operator.right, look)
    if isinstance(operator, GradientCovariance):
        return num_passes(operator.base, look) + 1
    if isinstance(operator, Scaled | Shifted | Block | Metered | BatchNoise):
        return num_passes(operator.base, look)
    if not isinstance(operator, Hessian | GGN | EmpiricalFisher | Fisher):
        raise UnsupportedError(f"no exact trace is known for {type(operator).__name__}; use probes")
    risk = operator.risk
    if look:
        _refuse_inexact(operator)
    if isinstance(operator, Hessian | GGN):
        return num_roots(risk)
    batch, out = _small(risk)
    draws = operator.num_samples if isinstance(operator, Fisher) else 1
    return draws * num_items(risk.output_loss, out, batch)


def _of_risk(operator: Hessian | GGN | EmpiricalFisher | Fisher, by: By, walks: Walks) -> Tensor:
    risk, loss = operator.risk, operator.risk.output_loss
    risk.check()
    squares = SquaredEntries(risk) if by == "entry" else SquaredNorms(risk)
    chunk = stack_size(risk, num_passes(operator))

    def stacks(out: Tensor, batch: Batch) -> Iterable[Tensor]:
        if isinstance(operator, Hessian | GGN):
            return loss.roots(out, batch.data, chunk)
        if isinstance(operator, Fisher):
            own = operator._draws(out, batch) / math.sqrt(operator.num_samples)
        else:
            own = item_gradients(loss, out, batch)[None]
        return item_by_item(loss, own, out, batch, chunk)

    def piece_totals(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        found, out = squares(params, batch, lambda out: stacks(out, batch))
        return squares.total(found), loss.weight(out, batch.data)

    # draws belong to the batch
    each = piece_totals if isinstance(operator, Fisher) else squares.replayed(piece_totals, (type(operator), by, chunk))

    def totals(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        pieces = [each(params, own) for own in fitting_pieces(risk, params, batch, chunk)]
        squared, weight = (torch.stack(parts).sum(0) for parts in zip(*pieces, strict=True))
        return squared, weight

    found: Tensor = walks.fold(risk, totals, Mean())
    return found


def stack_size(risk: Risk, num: int) -> int:
    """How many of `num` cotangents are pulled back at once, in equal chunks.

    Example:
        >>> risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (torch.ones(1, 1), torch.ones(1, 1)))
        >>> stack_size(risk, 10), stack_size(risk, 20)  # by its plan 16 at most
        (10, 10)
    """
    return max(1, math.ceil(num / math.ceil(max(num, 1) / (_STACK * risk.plan.chunk))))


# ------------------------------------------------------------------------------------------ where there is none


def refuse_coupled(risk: Risk) -> Loss:
    """The loss of a risk whose samples have a curvature of their own.

    Raises:
        UnsupportedError: If they have not.
    """
    if risk.sharded:
        raise UnsupportedError(
            "the layers of a model sharded by FSDP2 cannot be observed, so it has neither exact traces nor sample "
            "traces; use probes: ritz.trace(ritz.GGN(risk), 'hutchinson')"
        )
    loss = risk.output_loss
    if risk.mode == "train" and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in risk.model.modules()):
        raise UnsupportedError(
            "BatchNorm in train mode couples the samples of a batch, so no sample has a curvature of its own; "
            "use mode='eval'"
        )
    if not loss.separable:
        raise UnsupportedError("this loss couples the samples of a batch, so no sample has a curvature of its own")
    return loss


def _refuse_inexact(operator: Hessian | GGN | EmpiricalFisher | Fisher) -> None:
    """Refuse a matrix whose diagonal is not a sum over samples of squares."""
    risk = operator.risk
    refuse_coupled(risk)
    risk.check()  # else what is wrong with it is met by the looks below, which do not name it
    if isinstance(operator, Hessian) and not (linearity := multi_affine(risk)).holds:
        raise UnsupportedError(f"the Hessian of this network has no exact trace: {linearity.reason}; use probes")
    if isinstance(operator, Hessian | GGN):
        refuse_unreal(risk)
    if isinstance(operator, Fisher):
        risk.batches.prepare()
        if not risk.batches.cached and not risk.batches.ordered:
            raise UnsupportedError("the Monte Carlo Fisher needs data in a fixed order, and this loader shuffles")


def _small(risk: Risk) -> tuple[Batch, Tensor]:
    """Two samples, where a batch may be split, and their outputs."""
    batch = next(iter(risk.batches))
    batch = batch.head(2) if risk.splittable else batch
    with risk.session():
        out = risk.output(risk.params(), batch)
    refuse_rows(out, batch)
    return batch, out


def num_roots(risk: Risk) -> int:
    """Backward passes for the GGN."""
    batch, out = _small(risk)
    return risk.output_loss.num_roots(out, batch.data)


def refuse_unreal(risk: Risk) -> None:
    """Ask for one root, so that a loss without real ones says so before the work: of all data if it may have both."""
    loss = risk.output_loss

    def ask(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        out = risk.output(params, batch)
        next(iter(loss.roots(out, batch.data, 1)))
        return out.new_zeros(()), loss.weight(out, batch.data)

    batch, out = _small(risk)
    next(iter(loss.roots(out, batch.data, 1)))
    if not loss.convex:
        risk.fold(ask, Mean())
