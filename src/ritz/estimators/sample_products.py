"""v' H_i v for every sample of a batch, by products: what probes of sample traces are made of."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import UnsupportedError
from ..memory import is_shortage
from ..operators.rows import difference_step
from ..risk import Params, Risk
from .squares import refuse_rows, same

_TRUST = 1e-2  # relative disagreement with differences that still counts as right


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

    def settle(self, rows: Tensor) -> None:
        """Choose a route by the first batch, or a piece of it that fits; ranks choose as the first of them."""
        risk, error = self.risk, None
        found: list[str] = []

        def look(params: Params, piece: Batch) -> tuple[Tensor, Tensor]:
            found.append(self._choose(params, piece, rows))
            return rows[:1], rows.new_ones(())

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
        added = items.loss * items.weight.where(items.weight != 0, 1.0)  # to the sum, also by an item without weight
        total, weight = (x.reshape(batch.size, -1).sum(1) for x in (added, items.weight))
        return total / weight.where(weight != 0, torch.inf)

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

    def _choose(self, params: Params, batch: Batch, rows: Tensor) -> str:
        """Forward mode where it agrees with reverse mode on a few samples, for several rows if there will be."""
        few = batch.head(4) if self.risk.splittable else batch
        tried: dict[str, Tensor] = {}
        errors: list[str] = []
        for route, by in (("reverse", self._reverse), ("forward", self._forward)):
            try:
                tried[route] = by(params, few, rows)
            except RuntimeError as error:
                if is_shortage(error):
                    raise
                errors.append(str(error).splitlines()[0][:200])
        if not tried:
            raise UnsupportedError(f"no second derivative of the sample losses: {'; '.join(sorted(set(errors)))}")
        if len(tried) == 1:
            ((route, forms),) = tried.items()
            self._refuse_wrong(route, forms[:1], params, few, rows[:1])
            return route
        return "forward" if same(tried["forward"], tried["reverse"], self.risk.coarsest) else "reverse"

    def _refuse_wrong(self, route: str, forms: Tensor, params: Params, few: Batch, row: Tensor) -> None:
        """Hold what no other route confirms against differences of the gradient.

        They count as far as two steps of other length agree, and where they are symmetric: what is done under
        torch.no_grad() they see, and autograd does not differentiate it.
        """
        other = self.risk.space.probes([1], 0, dtype=row.dtype, device=row.device)
        near, far = (self._differences(params, few, torch.cat([row, other]), stretch) for stretch in (1.0, 3.0))
        most = max(10 * float((near - far).abs().max()), _TRUST * float(near.abs().max()))
        symmetric = float((near - near.T).abs().max()) <= most
        if symmetric and abs(float(near[0, 0] - forms.sum())) > most:
            raise UnsupportedError(
                f"second derivatives of the sample losses by the {route} route, the only one that works, are wrong: "
                "they disagree with differences of the gradient; look for a custom backward that forgets a term, or "
                "take the trace of ritz.Hessian, which then uses differences"
            )

    def _differences(self, params: Params, batch: Batch, rows: Tensor, stretch: float) -> Tensor:
        """u' (sum_i H_i) v for all pairs of rows (k, dim), by central differences of the gradient: (k, k)."""
        space, images = self.risk.space, []
        point = space.join(params)
        for row in rows:
            step = difference_step(point, row, self.risk.coarsest, stretch)
            ahead, behind = (self._summed(space.split(point + e * row), batch) for e in (step, -step))
            images.append((ahead - behind) / (2 * step))
        return torch.stack(images) @ rows.T

    def _summed(self, params: Params, batch: Batch) -> Tensor:
        """The gradient of the sum of the sample losses, (dim,)."""
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            gradient = _gradient(self._losses(leaves, batch).sum(), tuple(leaves.values()))
        return self.risk.space.join(dict(zip(leaves, gradient, strict=True)))


def _gradient(scalar: Tensor, inputs: tuple[Tensor, ...], create_graph: bool = False) -> tuple[Tensor, ...]:
    """Gradient, zero where there is no dependence."""
    if not scalar.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(
        scalar, inputs, create_graph=create_graph, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def _dot(a: Iterable[Tensor], b: Iterable[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()
