"""v' H_i v for every sample of a batch, by products: what probes of sample traces are made of."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import UnsupportedError
from ..memory import is_shortage
from ..risk import Params, Risk
from .squares import refuse_rows

_AGREE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative difference of two products that count as the same


class SampleProducts:
    """v' H_i v for every sample of a batch and every row v: (k, size).

    forward: d^2/dt^2 loss_i(w + t v), forward mode twice; k rows share one pass.
    reverse: d/du of v' (sum_i u_i H_i v), reverse mode three times; for operations that forward mode gets wrong
    (LayerNorm, in some versions of torch) or does not know.
    """

    route = "not yet chosen"

    def __init__(self, risk: Risk) -> None:
        self.risk = risk

    def __call__(self, params: Params, batch: Batch, rows: Tensor) -> Tensor:
        by = self._forward if self.route == "forward" else self._reverse
        return torch.cat([by(params, batch, part) for part in rows.split(self.risk.plan.chunk)])

    def settle(self, row: Tensor) -> None:
        """Choose a route by the first batch, or a piece of it that fits; ranks choose as the first of them."""
        risk, error = self.risk, None
        found: list[str] = []

        def look(params: Params, piece: Batch) -> tuple[Tensor, Tensor]:
            found.append(self._choose(params, piece, row))
            return row, row.new_ones(())

        try:
            with risk.session():
                risk._pieces(look, risk.params(), next(iter(risk.batches)))
        except Exception as caught:
            error = caught
        self.route = risk.world.agree("the choice of a route", error, found[0] if found else "")[0]

    def _losses(self, params: Params, batch: Batch) -> Tensor:
        """Each sample's own loss, (size,)."""
        out = self.risk.output(params, batch)
        refuse_rows(out, batch)
        items = self.risk.output_loss.items(out, batch.data)
        total, weight = ((x.reshape(batch.size, -1).sum(1)) for x in (items.loss * items.weight, items.weight))
        return total / weight.where(weight != 0, 1.0)

    def _forward(self, params: Params, batch: Batch, rows: Tensor) -> Tensor:
        def along(p: Params, v: Params) -> Tensor:
            slope: Tensor = torch.func.jvp(lambda q: self._losses(q, batch), (p,), (v,))[1]
            return slope

        def form(v: Params) -> Tensor:
            bend: Tensor = torch.func.jvp(lambda p: along(p, v), (params,), (v,))[1]
            return bend

        forms: Tensor = torch.func.vmap(form, randomness="same")(self.risk.space.split(rows))
        return forms

    def _reverse(self, params: Params, batch: Batch, rows: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            losses = self._losses(leaves, batch)
            u = torch.ones_like(losses).requires_grad_()
            inputs = tuple(leaves.values())
            gradient = _gradient(losses @ u, inputs, create_graph=True)
            forms = []
            for row in rows:
                v = list(self.risk.space.split(row).values())
                product = _gradient(_dot(gradient, v), inputs, create_graph=True)  # sum_i u_i H_i v
                forms.append(_gradient(_dot(product, v), (u,))[0])
        return torch.stack(forms).detach()

    def _choose(self, params: Params, batch: Batch, row: Tensor) -> str:
        """Forward mode where it agrees with reverse mode on a few samples."""
        few = batch.head(4) if self.risk.splittable else batch
        tried: dict[str, Tensor] = {}
        errors: list[str] = []
        for route, by in (("reverse", self._reverse), ("forward", self._forward)):
            try:
                tried[route] = by(params, few, row)
            except RuntimeError as error:
                if is_shortage(error):
                    raise
                errors.append(str(error).splitlines()[0][:200])
        if not tried:
            raise UnsupportedError(f"no second derivative of the sample losses: {'; '.join(sorted(set(errors)))}")
        if len(tried) == 1:
            return next(iter(tried))
        apart, size = (tried["forward"] - tried["reverse"]).norm(), tried["reverse"].norm()
        return "forward" if bool(apart <= _AGREE.get(row.dtype, 0.1) * size) else "reverse"


def _gradient(scalar: Tensor, inputs: tuple[Tensor, ...], create_graph: bool = False) -> tuple[Tensor, ...]:
    """Gradient, zero where there is no dependence."""
    if not scalar.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(
        scalar, inputs, create_graph=create_graph, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def _dot(a: Iterable[Tensor], b: Iterable[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()
