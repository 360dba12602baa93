"""The block-diagonal part of a curvature matrix: products of all blocks in one walk over the data.

With v = (v_1, ..., v_G), one part for each group of parameters, the image is (H_11 v_1, ..., H_GG v_G). A product with
the whole v would mix the blocks, and G vectors with one part each would take G products. Instead, each batch has one
forward pass and one graph of the first gradient or of J'u, through which the part of each group is pulled back to that
group only.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..convolutions import SmoothConvolutions
from ..memory import is_shortage
from ..risk import Params, Risk
from ..space import ParamSpace
from .algebra import Derived
from .base import Operator
from .derivatives import gradients, missing_operation, pull, refuse_once_differentiable
from .gauss_newton import GGN, EmpiricalFisher, JacobianProduct
from .hessian import Hessian
from .risk_operator import RiskOperator

log = logging.getLogger(__name__)


def block_diagonal(base: Operator, groups: Mapping[str, Sequence[str]]) -> "BlockDiagonal | PaddedBlocks":
    """The diagonal blocks of a matrix for groups of its parameters, with zeros elsewhere.

    Args:
        base: The matrix.
        groups: Names of parameters by name of the group; parameters in no group are left out.

    Raises:
        ValueError: If a parameter does not exist, or is in two groups.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.tensor([[3.0]]), torch.zeros(1, 1)))
        >>> block_diagonal(ritz.Hessian(risk), {"w": ["weight"], "b": ["bias"]}).dense().tolist()  # 2 x x', x = (3, 1)
        [[18.0, 0.0], [0.0, 2.0]]
    """
    if not isinstance(base, Operator):
        raise TypeError(f"expected an operator such as ritz.Hessian(risk), got {type(base).__name__}")
    named = [name for names in groups.values() for name in names]
    if strange := [name for name in named if name not in base.space.names]:
        raise ValueError(f"no parameter is called {strange[0]!r}; there are: {', '.join(base.space.names[:20])}")
    if twice := [name for name in named if named.count(name) > 1]:
        raise ValueError(f"{twice[0]} is in two groups; put each parameter into one group only")
    if not named:
        raise ValueError("the groups contain no parameter; name at least one")
    whole = len(named) == len(base.space.names)
    part = base if whole else base.block(named)
    owned = {group: tuple(n for n in part.space.names if n in own) for group, own in groups.items() if len(own)}
    if isinstance(part, Hessian) or type(part) in (GGN, EmpiricalFisher):
        return BlockDiagonal(part, owned)  # type: ignore[arg-type]
    return PaddedBlocks(part, owned)


class PaddedBlocks(Derived):
    """The diagonal blocks of any matrix, from one product for each block, all in one call."""

    def __init__(self, base: Operator, groups: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(base)
        self.groups, self.positive = groups, base.positive

    def _rows(self, rows: Tensor) -> Tensor:
        return _cut(self.base.rows(_spread(rows, self.space, self.groups)), self.space, self.groups)

    def expect(self, products: int) -> None:
        """Announce one product for each block."""
        self.base.expect(len(self.groups) * products)

    def convention(self) -> str:
        return f"{len(self.groups)} diagonal blocks of {self.base.convention()}"


class BlockDiagonal(RiskOperator):
    """The diagonal blocks of a Hessian or a Gauss-Newton matrix, from one graph for each batch."""

    def __init__(self, base: "Hessian | JacobianProduct", groups: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(base.risk)
        self.base, self.groups = base, groups
        self.matrix, self.positive = base.matrix, base.positive
        self._shared = True  # until an operation turns out to have no second derivative
        self._batched = True  # whether all vectors are pulled back at once
        self._graph_seen = False

    def _like(self, risk: Risk) -> "BlockDiagonal":
        groups = {group: tuple(n for n in names if n in risk.names) for group, names in self.groups.items()}
        base: Any = self.base._like(risk)
        return BlockDiagonal(base, {group: names for group, names in groups.items() if names})

    def convention(self) -> str:
        return f"{len(self.groups)} diagonal blocks of {self.base.convention()}"

    def diagnose(self) -> None:
        """Raise the error of the whole matrix."""
        self.base.diagnose()

    def settle(self, rows: Tensor) -> None:
        """Decide as the whole matrix does."""
        self.base.settle(rows)

    def _batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        base = self.base
        if isinstance(base, Hessian) and base.route == "auto":
            base.batch_rows(params, batch, rows[:1])  # this product chooses the route
        whole = not base.risk.sharded  # weights of a sharded model are not part of the graph
        if self._shared and whole and (not isinstance(base, Hessian) or base.reversible(params, batch, rows[:1])):
            try:
                if isinstance(base, JacobianProduct):
                    return self._jacobians(base, params, batch, rows)
                return self._gradients(base, params, batch, rows)
            except RuntimeError as error:
                if is_shortage(error):
                    raise
                if (missing := missing_operation(error)) is None:
                    raise
                log.info("%s has no second derivative: each block takes a product of its own", missing)
                self._shared = False
        image, weight = base.batch_rows(params, batch, _spread(rows, self.space, self.groups))
        return _cut(image, self.space, self.groups), weight

    # -------------------------------------------------------------------------------- one graph for all groups

    def _gradients(self, base: RiskOperator, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Hessian blocks: d/dw_g of (dL/dw_g . v_g), all from the graph of one gradient."""
        smooth = SmoothConvolutions() if len(rows) == 1 else contextlib.nullcontext()
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            with smooth:
                total, weight = base.risk.total_and_weight(leaves, batch)
            self._check_graph(total)
            slopes = dict(zip(leaves, gradients(total, tuple(leaves.values()), create_graph=True), strict=True))
        image, where = torch.zeros_like(rows), self.space.slices
        for names in self.groups.values():
            live = [name for name in names if slopes[name].requires_grad]  # the rest do not depend on the weights
            if live:
                parts = [rows[:, where[name]].reshape(-1, *slopes[name].shape) for name in live]
                pulled = self._pull([slopes[name] for name in live], [leaves[name] for name in names], parts)
                for name, part in zip(names, pulled, strict=True):
                    image[:, where[name]] = part.reshape(len(rows), -1)  # a scalar has no dimensions to flatten
        return image, weight.detach()

    def _jacobians(self, base: JacobianProduct, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """J_g' M J_g v_g: J'u is linear in u, so J_g v_g is the gradient of v_g . J_g'u with respect to u."""
        loss, data = base.risk.output_loss, batch.data
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            out = base.risk.output(leaves, batch)
            self._check_graph(out)
            u = torch.zeros_like(out, requires_grad=True)
            backs = torch.autograd.grad(
                out, tuple(leaves.values()), u, create_graph=True, materialize_grads=True
            ) if out.requires_grad else tuple(leaves.values())  # fmt: skip
            pulled = dict(zip(leaves, backs, strict=True))
        held, image, where = out.detach(), torch.zeros_like(rows), self.space.slices
        for names in self.groups.values():
            live = [name for name in names if out.requires_grad and pulled[name].requires_grad]
            if not live:  # they do not reach the outputs
                continue
            parts = [rows[:, where[name]].reshape(-1, *pulled[name].shape) for name in live]
            (tangents,) = self._pull([pulled[name] for name in live], [u], parts)
            middles = torch.stack([loss.middle(base.kind, held, data, tangent, None) for tangent in tangents])
            for name, part in zip(live, self._pull([out], [leaves[name] for name in live], [middles]), strict=True):
                image[:, where[name]] = part.reshape(len(rows), -1)
        return image, loss.weight(held, data)

    def _check_graph(self, out: Tensor) -> None:
        """Search the graph once for functions that reverse mode would silently leave out."""
        if not self._graph_seen:
            refuse_once_differentiable(out)
            self._graph_seen = True

    def _pull(self, outputs: list[Tensor], inputs: list[Tensor], vectors: list[Tensor]) -> list[Tensor]:
        """`pull` with all vectors at once if that is possible; the graph is kept for the other groups."""
        if self._batched and len(vectors[0]) > 1:
            try:
                return pull(outputs, inputs, vectors, batched=True, keep_graph=True)
            except RuntimeError as error:
                if is_shortage(error) or missing_operation(error) is not None:
                    raise
                self._batched = False  # no batching rule: from here on one vector at a time
        return pull(outputs, inputs, vectors, batched=False, keep_graph=True)


# ---------------------------------------------------------------------------------- a product for each block


def _spread(rows: Tensor, space: ParamSpace, groups: Mapping[str, tuple[str, ...]]) -> Tensor:
    """Rows (k, dim) as (G k, dim), each with the part of one group."""
    spread = rows.new_zeros(len(groups), *rows.shape)
    for number, names in enumerate(groups.values()):
        for part in (space.slices[name] for name in names):
            spread[number, :, part] = rows[:, part]
    return spread.flatten(0, 1)


def _cut(image: Tensor, space: ParamSpace, groups: Mapping[str, tuple[str, ...]]) -> Tensor:
    """Rows (k, dim) from the images of `_spread`: of each image, the part of its own group."""
    apart = image.reshape(len(groups), -1, space.dim)
    found = torch.zeros_like(apart[0])
    for number, names in enumerate(groups.values()):
        for part in (space.slices[name] for name in names):
            found[:, part] = apart[number, :, part]
    return found
