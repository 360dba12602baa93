"""J' M J: the Gauss-Newton matrix and the Fishers are one operator with different matrices M.

GGN              M = Hessian of the loss in the outputs
Fisher           M = mean of c c' over cotangents c of labels drawn from the model; E[Fisher] = GGN
EmpiricalFisher  M = c c' with c of the labels in the data: the mean of per-item gradient outer products
GradientCovariance   EmpiricalFisher - g g', the covariance of per-item gradients
"""

import contextlib
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import UnsupportedError
from ..losses import Kind, Uniforms
from ..memory import is_shortage
from ..risk import Params, Risk
from ..space import random_uniform, row_dots, row_products
from .algebra import Derived
from .base import Operator
from .derivatives import missing_operation, refuse_once_differentiable
from .risk_operator import RiskOperator
from .rows import difference_step, each_row, gathered
from .tape import Tape, Tapes
from .tape.kept import Kept

log = logging.getLogger(__name__)

# two computations of |J v|^2 count as equal up to this relative difference; round-off is about 1e-7 in float32
_AGREE = {torch.float64: 1e-8, torch.float32: 1e-3}


class JacobianProduct(RiskOperator):
    """(1 / W) sum_i J_i' M_i J_i; a subclass names the matrix M in the middle."""

    kind: Kind

    def __init__(self, risk: Risk) -> None:
        super().__init__(risk)
        self.positive = risk.output_loss.convex or self.kind != "ggn"
        self._forward_mode = True  # until an operation turns out to have no forward derivative, or a wrong one
        self._twice = False  # whether it is confirmed that the backward pass can be differentiated
        self._tapes = Tapes(risk)

    def _draws(self, out: Tensor, batch: Batch) -> Tensor | None:
        """Cotangents of drawn labels (S, *out.shape), for the Monte Carlo Fisher."""
        return None

    def settle(self, rows: Tensor) -> None:
        self._tapes.refresh()
        self._forward_mode = self._forward_mode and self.risk.forward_modes.get(self.risk.names, True)

    def _recipe(self) -> Hashable | None:
        return self._forward_mode

    def _batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.risk.sharded:
            return self._difference(params, batch, rows)
        if self._forward_mode:
            try:
                return self._forward(params, batch, rows)
            except RuntimeError as error:
                if is_shortage(error) or isinstance(error, UnsupportedError):
                    raise
                missing = missing_operation(error)
                if missing is None and len(rows) == 1:
                    raise
                # several vectors may fail where one does not; an error of the model itself is raised again below
                why = missing or str(error).partition("\n")[0][:200]
                log.info("no forward derivative of %s: %s products use reverse mode only", why, self.matrix)
            self._leave_forward_mode()
        try:
            return self._reverse(params, batch, rows)
        except RuntimeError as error:
            if (missing := missing_operation(error)) is None:
                raise
            raise UnsupportedError(
                f"operation {missing} has neither a forward derivative nor a second one, and {self.matrix} products "
                "need one of the two; replace it in the model, or give it a jvp"
            ) from error

    def _traced(self, params: Params, held: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        found = self._tapes.along(params, batch, lambda tape: self._taped(tape, batch, rows, apart=True), held)
        if found is None and self._tapes.hidden:  # such products use reverse mode and are not compiled
            return super()._traced(params, held, batch, rows)
        return self._nested(params, batch, rows, held) if found is None else found

    def _forward(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        tapes, found = self._tapes, None
        # in all other cases a tape costs the host more than it saves
        if len(rows) > 1 or tapes.keeps or tapes.cuts or not tapes.tried:
            found = tapes.along(params, batch, lambda tape: self._taped(tape, batch, rows), straight=len(rows))
        if found is None and tapes.hidden:  # forward mode would ignore torch.no_grad() and .data
            with contextlib.suppress(NotImplementedError):
                found = self._reverse(params, batch, rows)
        found = self._nested(params, batch, rows) if found is None else found
        return found if self._forward_mode else self._reverse(params, batch, rows)

    def _taped(self, tape: Tape, batch: Batch, rows: Tensor, apart: bool = False) -> tuple[Tensor, Tensor]:
        """All vectors along one tape of the forward pass: pushed forward, then pulled back."""
        loss, out = self.risk.output_loss, tape.out.detach()
        draws = self._draws(out, batch)
        tangents, _ = tape.push(self.space.split(rows))
        middle = torch.func.vmap(lambda u: loss.middle(self.kind, out, batch.data, u, draws))(tangents)

        def pull(u: Tensor) -> Tensor:
            return gathered(self.space, rows[: len(u)], lambda into: tape.pull(u, into), apart)

        if not (apart or self._settled()):
            self._confirm(lambda v: tape.push(self.space.split(v))[0], pull)
        return pull(middle), loss.weight(out, batch.data)

    def _settled(self) -> bool:
        """Whether to skip the comparison of forward with reverse mode: already done, or impossible while recording."""
        known = self.risk.names in self.risk.forward_modes
        return known or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def _confirm(self, push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor]) -> None:
        """Give up forward mode if it is not the transpose of reverse mode, which happens for some torch operations.

        v . J'u must be |u|^2 for u = J v. v has random signs, since a zero would leave a parameter out. Done once for
        the outputs of a risk.
        """
        v = self.probes([0], seed=0)
        u = push(v)
        squared, found = (float(row_dots(a, b)) for a, b in ((u.flatten(1), u.flatten(1)), (v, pull(u))))
        self.risk.forward_modes[self.risk.names] = True
        if abs(found - squared) > self._tolerance(_AGREE) * squared:
            log.info("a forward derivative of torch is wrong: %s products use reverse mode only", self.matrix)
            self._leave_forward_mode()

    def _confirm_reverse(self, push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor]) -> None:
        """Refuse a backward pass whose own derivative, which gives J v, is wrong, as with hooks of implicit layers.

        As for forward mode, v . J'u must be |u|^2 for u = J v.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        v = self.probes([0], seed=0)[0]
        u = push(v)
        squared, found = float((u * u).sum()), float((v * pull(u)).sum())
        if abs(found - squared) > self._tolerance(_AGREE) * squared:
            raise UnsupportedError(
                "the backward pass of the network cannot be differentiated (for example, because a hook changes the "
                f"gradients of an implicit layer), so {self.matrix} products would be wrong; use ritz.Hessian, "
                "ritz.KFACOperator, or exact traces and diagonals (method='exact'), which do not need it"
            )
        self._twice = True

    def _leave_forward_mode(self) -> None:
        self._forward_mode = self.risk.forward_modes[self.risk.names] = False

    def _nested(self, params: Params, batch: Batch, rows: Tensor, held: Params | None = None) -> tuple[Tensor, Tensor]:
        """With torch.func: J v by forward mode, J' u by reverse mode, all vectors in one batched product."""
        loss = self.risk.output_loss

        def outputs(p: Params) -> Tensor:
            return self.risk.output({**(held or {}), **p}, batch)

        def product(v: Params) -> tuple[Params, Tensor]:
            # one forward pass: the tangent is an auxiliary result, which is not differentiated again
            result: Any = torch.func.vjp(lambda p: torch.func.jvp(outputs, (p,), (v,)), params, has_aux=True)
            out, pullback, tangent = result
            image = loss.middle(self.kind, out, batch.data, tangent, self._draws(out, batch))
            return pullback(image)[0], loss.weight(out, batch.data)

        if held is None and not self._settled():
            self._confirm(
                lambda v: torch.func.jvp(outputs, (params,), (self.space.split(v[0]),))[1][None],
                lambda u: self.space.join(torch.func.vjp(outputs, params)[1](u[0])[0])[None],
            )
        return each_row(product, self.space, rows)

    def _difference(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """J v by a central difference of the outputs, J'u by an ordinary backward pass: for a sharded model."""
        point = self.space.join(params)
        images = []
        for row in rows:
            step = difference_step(point, row, self.risk.coarsest)
            ahead, behind = (self.risk.output(self.space.split(point + e * row), batch) for e in (step, -step))
            tangent = (ahead - behind) / (2 * step).to(ahead)

            def middle(out: Tensor, tangent: Tensor = tangent) -> Tensor:
                draws = self._draws(out, batch)
                return self.risk.output_loss.middle(self.kind, out, batch.data, tangent, draws)

            image, weight = self.risk.pullback(params, batch, middle)
            images.append(image)
        return torch.stack(images), weight

    def _reverse(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Without forward mode: J'u is linear in u, so J v is the gradient of v . J'u with respect to u."""
        loss = self.risk.output_loss
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            out = self.risk.output(leaves, batch)
            refuse_once_differentiable(out)
            if not out.requires_grad:  # no parameter reaches the outputs
                return torch.zeros_like(rows), loss.weight(out, batch.data)
            inputs = tuple(leaves.values())
            u = torch.zeros_like(out, requires_grad=True)
            pulled = torch.autograd.grad(out, inputs, u, create_graph=True, materialize_grads=True)
        live = [i for i, g in enumerate(pulled) if g.requires_grad]  # the rest do not reach the outputs
        held, images = out.detach(), []
        draws = self._draws(held, batch)

        def push(row: Tensor) -> Tensor:
            v = [part.clone() for part in self.space.split(row).values()]  # complex views need aligned pairs
            along = [pulled[i] for i in live], u, [v[i] for i in live]
            return torch.autograd.grad(*along, retain_graph=True, materialize_grads=True)[0]

        def pull(cotangent: Tensor) -> Tensor:
            back = torch.autograd.grad(out, inputs, cotangent, retain_graph=True, materialize_grads=True)
            return torch.cat([g.flatten() for g in back])

        if not self._twice:
            self._confirm_reverse(push, pull)
        for row in rows:
            images.append(pull(loss.middle(self.kind, held, batch.data, push(row), draws)))
        return torch.stack(images), loss.weight(held, batch.data)


class GGN(JacobianProduct):
    """The generalised Gauss-Newton matrix, G = (1 / W) sum_i J_i' (d^2 loss / d out^2) J_i.

    For cross-entropy it is the Fisher matrix, and for piecewise-linear networks Tr G = Tr H.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.tensor([[2.0]]), torch.tensor([0])))
        >>> GGN(risk).dense().tolist()  # x^2 (diag(p) - p p') with p = (1/2, 1/2)
        [[1.0, -1.0], [-1.0, 1.0]]
    """

    matrix, kind = "GGN", "ggn"

    def _like(self, risk: Risk) -> "GGN":
        return GGN(risk)


class EmpiricalFisher(JacobianProduct):
    """(1 / W) sum_i w_i g_i g_i' with g_i the gradient of item i's loss at its own label.

    This is not an estimate of the Fisher matrix, and it is zero if every item is fitted exactly.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)))
        >>> EmpiricalFisher(risk).dense().tolist()  # gradients 2 and 8
        [[34.0]]
    """

    matrix, kind = "empirical Fisher", "empirical"

    def _like(self, risk: Risk) -> "EmpiricalFisher":
        return EmpiricalFisher(risk)


class Fisher(JacobianProduct):
    """The Fisher matrix by Monte Carlo: labels drawn from the model, `num_samples` for each item.

    The draws depend on the seed and the position of an item in the data, so the matrix is the same in every product and
    for every split into batches. Its mean over seeds is the GGN.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.tensor([[2.0]]), torch.tensor([0])))
        >>> Fisher(risk, num_samples=1).dense().tolist()  # either label gives the same at p = (1/2, 1/2)
        [[1.0, -1.0], [-1.0, 1.0]]
    """

    matrix, kind = "Fisher", "fisher"

    def __init__(self, risk: Risk, num_samples: int = 1, seed: int = 0) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        super().__init__(risk)
        self.num_samples, self.seed = num_samples, seed

    def _like(self, risk: Risk) -> "Fisher":
        return Fisher(risk, self.num_samples, self.seed)

    def convention(self) -> str:
        return f"{super().convention()}, {self.num_samples} drawn labels per item, seed {self.seed}"

    def _rows(self, rows: Tensor) -> Tensor:
        if not self.risk.batches.cached and not self.risk.batches.ordered:
            raise UnsupportedError(
                "the Monte Carlo Fisher needs data in a fixed order, since drawn labels belong to places in it; this "
                "loader shuffles, and its data is too large to keep: switch shuffling off"
            )
        return super()._rows(rows)

    def _recipe(self) -> Hashable | None:
        return None  # drawn labels depend on the position in the data

    def _draws(self, out: Tensor, batch: Batch) -> Tensor:
        return torch.stack(
            [
                self.risk.output_loss.draw(out, batch.data, self._uniforms(number, batch))
                for number in range(self.num_samples)
            ]
        )

    def _uniforms(self, number: int, batch: Batch) -> Uniforms:
        """Random numbers keyed by (seed, draw, position in the data): the same however the data is cut."""

        def uniforms(count: int, stream: str) -> Tensor:
            start = batch.start * (count // batch.size)
            return random_uniform(count, ("fisher", self.seed, number, stream), self.risk.device, start)

        return uniforms


class GradientCovariance(Derived):
    """The covariance of per-item gradients: (1 / W) sum_i w_i (g_i - g)(g_i - g)', g the gradient of the risk.

    For models made of torch's own modules, the gradient is kept between products while nothing changes. For other
    models, and for data that are not kept, each product computes it again (`ritz.operators.tape.kept.Kept`).

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)))
        >>> GradientCovariance(risk).dense().tolist()  # gradients 2 and 8, mean 5
        [[9.0]]
    """

    positive = True

    def __init__(self, risk: Risk) -> None:
        super().__init__(EmpiricalFisher(risk))
        self.risk, self.matrix, self.positive = risk, "gradient covariance", True
        self._gradient = Kept[Tensor](risk)

    def _rows(self, rows: Tensor) -> Tensor:
        gradient = self._gradient.get(self.risk.gradient)
        along = row_products(rows, gradient[None]).to(rows.dtype)
        return self.base.rows(rows) - along * gradient

    def block(self, pattern: str | Sequence[str]) -> Operator:
        """The principal sub-matrix of the parameters whose names match."""
        return self._like(self.risk.restrict(pattern))

    def _like(self, risk: Risk) -> "GradientCovariance":
        return GradientCovariance(risk)

    def convention(self) -> str:
        return f"{self.matrix}, {self.risk.convention()}"
