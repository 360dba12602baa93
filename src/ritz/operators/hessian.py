"""The Hessian of the risk, by one of three routes.

    forward      d/dt grad L(w + t v)      forward mode over reverse mode; K vectors share one gradient
    reverse      grad (grad L . v)         reverse mode twice; widest coverage of operations
    difference   [grad L(w + e v) - grad L(w - e v)] / 2e      no second derivative needed; approximate

Counted in multiplications of a dense layer (gradient = 3): K products by either exact route cost 3 + 6 K.
"""

import logging
import re
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import NumericalWarning, UnsupportedError
from ..plan import Route
from ..risk import Params, Risk
from .base import RiskOperator

log = logging.getLogger(__name__)

ROUTES: tuple[Route, ...] = ("forward", "reverse", "difference")
_EXACT: tuple[Route, ...] = ("forward", "reverse")
# relative disagreement of two products that still count as the same
_AGREE = {torch.float64: 1e-8, torch.float32: 1e-2}


class Hessian(RiskOperator):
    """H = d^2 L / dw^2, the Hessian of the mean loss.

    Args:
        risk: The risk.
        route: How products are taken; "auto" tries the exact routes on the first batch and keeps the faster.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> import ritz
        >>> H = Hessian(ritz.Risk(model, torch.nn.MSELoss(), (X, torch.zeros(2, 1))))
        >>> H.dense().tolist()  # 2 X'X / N
        [[1.0, 0.0], [0.0, 4.0]]
    """

    matrix = "Hessian"

    def __init__(self, risk: Risk, route: Route | None = None) -> None:
        super().__init__(risk)
        wanted = route or risk.plan.route
        if wanted not in (*ROUTES, "auto"):
            raise ValueError(f"route must be one of {', '.join(ROUTES)} or auto, got {wanted!r}")
        self.route: Route = wanted

    def _like(self, risk: Risk) -> "Hessian":
        return Hessian(risk, self.route)

    def convention(self) -> str:
        return f"{super().convention()}, {self.route} route"

    def _batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.route == "auto":
            self.route = self._choose(params, batch, rows)
        try:
            return self._by(self.route, params, batch, rows)
        except RuntimeError as error:
            if (missing := _missing_operation(error)) is None:
                raise
            raise UnsupportedError(
                f"operation {missing} has no second derivative, which the {self.route} route needs; replace it in the "
                "model, or use route='difference'"
            ) from error

    def _by(self, route: Route, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        return {"forward": self._forward, "reverse": self._reverse, "difference": self._difference}[route](
            params, batch, rows
        )

    def _forward(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        def gradient(p: Params) -> tuple[Params, Tensor]:
            return torch.func.grad(self.risk.total_and_weight, has_aux=True)(p, batch)  # type: ignore[no-any-return]

        def product(v: Params) -> tuple[Params, Tensor]:
            _, image, weight = torch.func.jvp(gradient, (params,), (v,), has_aux=True)
            return image, weight

        images, weight = torch.func.vmap(product, out_dims=(0, None), randomness="same")(self.space.split(rows))
        return self.space.join(images, lead=1), weight

    def _reverse(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            total, weight = self.risk.total_and_weight(leaves, batch)
            inputs = tuple(leaves.values())
            grads = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
        live = [i for i, g in enumerate(grads) if g.requires_grad]  # the rest do not depend on the weights
        if not live:
            return torch.zeros_like(rows), weight.detach()
        vectors = list(self.space.split(rows).values())
        images = torch.autograd.grad(
            [grads[i] for i in live],
            inputs,
            [vectors[i] for i in live],
            is_grads_batched=True,
            allow_unused=True,
            materialize_grads=True,
        )
        # materialised zeros of unused parameters come without the batch dimension
        full = [image if image.ndim > p.ndim else p.new_zeros(len(rows), *p.shape) for image, p in zip(images, inputs)]
        return torch.cat([image.flatten(1) for image in full], dim=1).detach(), weight.detach()

    def _difference(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Truncation error ~ step^2, rounding ~ eps / step: the best step is eps^(1/3), relative to |w| / |v|."""
        point = self.space.join(params)
        scale = torch.finfo(self.dtype).eps ** (1 / 3) * point.norm().clamp(min=1.0)
        images = []
        for row in rows:
            step = scale / row.norm().clamp(min=torch.finfo(self.dtype).tiny)
            ahead, weight = self.risk.batch_gradient(self.space.split(point + step * row), batch)
            behind, _ = self.risk.batch_gradient(self.space.split(point - step * row), batch)
            images.append((ahead - behind) / (2 * step))
        return torch.stack(images), weight

    # ------------------------------------------------------------------------------------ the choice of a route

    def _choose(self, params: Params, batch: Batch, rows: Tensor) -> Route:
        """The fastest exact route that works on this batch; the difference where none does."""
        tried: dict[Route, tuple[float, Tensor]] = {}
        missing: dict[Route, str] = {}
        for route in _EXACT:
            try:
                tried[route] = _timed(lambda r=route: self._by(r, params, batch, rows)[0], self.device)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                missing[route] = _missing_operation(error) or str(error).splitlines()[0][:200]
        if not tried:
            reason = "; ".join(sorted(set(missing.values())))
            warnings.warn(
                f"no exact Hessian product: {reason}; using central differences of the gradient, with a relative error "
                f"of about {torch.finfo(self.dtype).eps ** (2 / 3):.0e}",
                NumericalWarning,
                stacklevel=2,
            )
            return "difference"
        if len(tried) == 2 and not self._agree(tried["forward"][1], tried["reverse"][1]):
            truth = self._by("difference", params, batch, rows)[0]
            apart = {route: float((image - truth).norm()) for route, (_, image) in tried.items()}
            best = min(apart, key=lambda route: apart[route])
            log.warning("forward and reverse products disagree; %s agrees with differences of the gradient", best)
            return best
        # forward mode unless reverse is clearly faster, so that noise in the timing does not move the choice
        quick = {route: seconds * (1.0 if route == "forward" else 1.15) for route, (seconds, _) in tried.items()}
        best = min(quick, key=lambda route: quick[route])
        log.info("Hessian products by the %s route", best)
        return best

    def _agree(self, a: Tensor, b: Tensor) -> bool:
        return bool((a - b).norm() <= _AGREE.get(self.dtype, 0.1) * b.norm())


def _timed(fn: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """Seconds of the better of two calls after a first one, and what it gave."""
    result = fn()
    times = []
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times), result


def _missing_operation(error: Exception) -> str | None:
    """The operation that torch says it cannot differentiate, if that is what the error is about."""
    text = str(error)
    if not re.search(r"not implemented|not supported|does not have a|doesn't have a|no derivative|not currently", text):
        return None
    found = re.search(r"(aten::\w+|'\w+Backward\w*'|\w+Backward\w*|derivative for '?([\w:]+))", text)
    return found.group(0).removeprefix("derivative for ").strip("'") if found else text.splitlines()[0][:120]
