"""The Hessian of the risk, by one of three routes.

    forward      d/dt grad L(w + t v)      forward mode over reverse mode; K vectors share one gradient
    reverse      grad (grad L . v)         reverse mode twice; works for most operations
    difference   [grad L(w + e v) - grad L(w - e v)] / 2e      no second derivative needed; approximate

Cost in multiplications of a dense layer (gradient = 3): K products cost 3 + 6 K in reverse mode, and 2 + 6 K in forward
mode along a tape (`ritz.operators.tape`), or 6 K if the tape is kept. If a forward pass cannot be traced, forward mode
uses torch.func.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..convolutions import SmoothConvolutions
from ..errors import NumericalWarning, UnsupportedError, callers_level
from ..losses import CallableLoss, Loss
from ..memory import is_shortage
from ..plan import Route
from ..risk import Params, Risk
from .derivatives import gradients, missing_operation, pull, refuse_once_differentiable
from .risk_operator import RiskOperator
from .rows import difference_step, each_row, gathered
from .tape import Tape, Tapes

log = logging.getLogger(__name__)

ROUTES: tuple[Route, ...] = ("forward", "reverse", "difference")
_EXACT: tuple[Route, ...] = ("forward", "reverse")
_TRUST = 1e-2  # a product is right if its relative difference from central differences is at most this


class Hessian(RiskOperator):
    """H = d^2 L / dw^2, the Hessian of the mean loss.

    Args:
        risk: The risk.
        route: How products are computed. "auto" tries the exact routes on the first batch. If they agree, it keeps
            "forward" if the forward pass can be traced (`ritz.operators.tape`; on a GPU only if the first product is
            with several vectors). Otherwise it keeps "reverse", unless "forward" takes less than half the time. If the
            routes disagree, or only one works, each is compared with differences of the gradient and with its own
            transpose. If none is right, differences are used, with a `NumericalWarning`. After the first product,
            `route` and the convention name the route. A route that is named is used without these checks, except that
            "forward" by torch.func, whose derivatives may be wrong for an operation, is compared with "reverse" once,
            on the first batch, with a warning if they disagree.

    Raises:
        UnsupportedError: In a product, if an operation has no second derivative by the chosen route; the error names
            it.

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
        self.error: float | None = None  # relative error of differences; None if it was not measured
        self._batched = True  # whether reverse mode takes all vectors of a chunk at once
        self._graph_seen = False  # whether the graph was searched for functions that reverse mode silently leaves out
        self._tapes = Tapes(risk)
        self._compared = False  # whether forward mode by torch.func was compared with reverse mode
        self._reversible: bool | None = None  # whether reverse mode gives the same; None before it is tried

    def _like(self, risk: Risk) -> "Hessian":
        other = Hessian(risk, self.route)
        other._compared = self._compared
        return other

    def convention(self) -> str:
        good = "" if self.error is None else f", products good to {self.error:.0e}"
        return f"{super().convention()}, {self.route} route{good}"

    def _recipe(self) -> Hashable | None:
        known = self.route if self.route != "auto" else self.risk.routes.get(self.risk.names)
        # a product that compares routes reads numbers, and cannot be recorded
        settled = self._compared or self._tapes.works or self.route != "forward"
        return known if known in _EXACT and settled else None

    def settle(self, rows: Tensor) -> None:
        """All ranks try the routes on the same batch and use the timing of the first rank."""
        world, names = self.risk.world, self.risk.names
        self._tapes.refresh()
        if self.risk.sharded:
            self._settle_sharded(rows)
            return
        if self.route != "auto" or world.size == 1:
            return
        batch, error = next(iter(self.risk.batches)), None
        found = [self.risk.routes[names]] if names in self.risk.routes else []

        def look(params: Params, piece: Batch) -> tuple[Tensor, Tensor]:
            some = rows[: self._at_once(params, piece, rows)]
            found.extend([] if found else [self._choose(params, piece, some)])
            return rows[:1], rows.new_ones(())

        if world.any(not found):
            try:
                with self.risk.session():
                    self.risk._pieces(look, self.risk.params(), batch)
            except Exception as caught:
                error = caught
        self.route = world.agree("the choice of a route", error, found[0] if found else "auto")[0]
        self.risk.routes[names] = self.route

    def _settle_sharded(self, rows: Tensor) -> None:
        """A sharded model has only differences, whose error is measured from two steps on the first batch."""
        if self.route not in ("auto", "difference"):
            raise UnsupportedError(
                "the parameters of a model sharded by FSDP2 have no second derivative, and the "
                f"{self.route} route needs it; use route='difference', or ritz.GGN"
            )
        self.route = self.risk.routes[self.risk.names] = "difference"
        if self.error is None:
            self.error = self.difference_error(rows[0])

    def difference_error(self, row: Tensor) -> float:
        """The relative error of a central difference along a row (dim,), from steps of single and double length.

        The truncation error is proportional to the square of the step, so a third of the difference of the two is the
        error of the shorter step; round-off and kinks are included. It is measured on the first batch.

        Example:
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)))
            >>> Hessian(risk, route="difference").difference_error(torch.ones(2)) < 1e-3
            True
        """
        batch, params = next(iter(self.risk.batches)), self.risk.params()
        with self.risk.session():
            near, far = (self._stretched(params, batch, row, stretch) for stretch in (1.0, 2.0))
        near, far = self.world.sum(near), self.world.sum(far)
        size = float(near.norm())
        return float((near - far).norm()) / (3 * size) if size else 0.0

    def _stretched(self, params: Params, batch: Batch, row: Tensor, stretch: float) -> Tensor:
        """The difference on one batch, in pieces that fit in memory."""
        pieces = self.risk._pieces(lambda p, piece: self._difference(p, piece, row[None], stretch), params, batch)
        return torch.stack([image for image, _ in pieces]).sum(0)

    def _batch_rows(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.route == "auto":
            # one choice for all Hessians of this risk, so that their products do not differ because of timing
            self.route = self.risk.routes.get(self.risk.names) or self._choose(params, batch, rows)
            self.risk.routes[self.risk.names] = self.route
            self._compared = True
        try:
            found = self._by(self.route, params, batch, rows)
            if self.route == "forward" and not (self._compared or self._tapes.works):
                self._compared = True
                self._compare(params, batch)
            return found
        except RuntimeError as error:
            if (missing := missing_operation(error)) is None:
                raise
            raise UnsupportedError(
                f"operation {missing} has no second derivative by the {self.route} route; replace it in the model, or "
                "use route='auto', which takes another route if there is one"
            ) from error

    def _by(self, route: Route, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        return {"forward": self._forward, "reverse": self._reverse, "difference": self._difference}[route](
            params, batch, rows
        )

    def _compare(self, params: Params, batch: Batch) -> None:
        """Warn if forward mode by torch.func and reverse mode disagree on one vector; nothing if one of them fails."""
        row = self.probes([0], seed=0)
        try:
            forward, reverse = (self._by(route, params, batch, row)[0] for route in _EXACT)
        except RuntimeError:
            return
        if bool(forward.isfinite().all() & reverse.isfinite().all()) and not self._agree(forward, reverse):
            apart = float((forward - reverse).norm() / reverse.norm())
            self._say(
                f"forward and reverse products differ by {apart:.0e} of their size on the first batch, so one of them "
                "is wrong; use route='auto', which compares both with differences of the gradient"
            )

    def reversible(self, params: Params, batch: Batch, row: Tensor) -> bool:
        """Whether reverse mode gives the same as the chosen route, on this batch and row (1, dim); tried once.

        For callers that compute several products from the graph of one gradient.
        """
        if self.route != "forward":
            return self.route == "reverse"
        if self._reversible is None:
            try:
                forward, reverse = (self._by(route, params, batch, row)[0] for route in _EXACT)
                self._reversible = self._agree(forward, reverse)
            except RuntimeError as error:
                if is_shortage(error):
                    raise
                self._reversible = False
        return self._reversible

    def _forward(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        found = self._tapes.along(params, batch, lambda tape: self._taped(tape, batch, rows))
        return self._nested(params, batch, rows) if found is None else found

    def _taped(self, tape: Tape, batch: Batch, rows: Tensor, apart: bool = False) -> tuple[Tensor, Tensor]:
        """All vectors along one tape of the forward pass."""
        loss, out = self.risk.output_loss, tape.out.detach()
        tangents, dots = tape.push(self.space.split(rows), keep=True)
        slope, curve = loss_derivatives(loss, out, batch.data)
        bars = curve(tangents)
        image = gathered(self.space, rows, lambda into: tape.bend(bars, slope, dots, into), apart)
        return image, loss.weight(out, batch.data)

    def _nested(self, params: Params, batch: Batch, rows: Tensor, held: Params | None = None) -> tuple[Tensor, Tensor]:
        """With torch.func, which supports most operations."""

        def total(p: Params) -> tuple[Tensor, Tensor]:
            return self.risk.total_and_weight({**(held or {}), **p}, batch)

        def gradient(p: Params) -> tuple[Params, Tensor]:
            return torch.func.grad(total, has_aux=True)(p)  # type: ignore[no-any-return]

        def product(v: Params) -> tuple[Params, Tensor]:
            result: Any = torch.func.jvp(gradient, (params,), (v,), has_aux=True)
            return result[1], result[2]

        return each_row(product, self.space, rows)

    def _traced(self, params: Params, held: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        # two reverse passes cannot be compiled
        found = self._tapes.along(params, batch, lambda tape: self._taped(tape, batch, rows, apart=True), held)
        return self._nested(params, batch, rows, held) if found is None else found

    def _reverse(self, params: Params, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        single = len(rows) == 1  # without batching, which the fast convolutions do not support
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            with SmoothConvolutions() if single else contextlib.nullcontext():
                total, weight = self.risk.total_and_weight(leaves, batch)
            if not self._graph_seen:
                refuse_once_differentiable(total)
                self._graph_seen = True
            inputs = tuple(leaves.values())
            grads = gradients(total, inputs, create_graph=True)
        live = [i for i, g in enumerate(grads) if g.requires_grad]  # the rest do not depend on the weights
        if not live:
            return torch.zeros_like(rows), weight.detach()
        vectors = list(self.space.split(rows).values())
        outputs, vectors = [grads[i] for i in live], [vectors[i] for i in live]
        try:
            images = pull(outputs, inputs, vectors, batched=self._batched and not single)
        except RuntimeError as error:
            if is_shortage(error) or missing_operation(error) is not None or not self._batched or single:
                raise
            self._batched = False  # no batching rule, or a wrong one (group_norm's): from here on one vector at a time
            return self._reverse(params, batch, rows)
        return self.space.join(dict(zip(self.space.names, images, strict=True)), lead=1), weight.detach()

    def _difference(self, params: Params, batch: Batch, rows: Tensor, stretch: float = 1.0) -> tuple[Tensor, Tensor]:
        """[grad L(w + e v) - grad L(w - e v)] / 2e, with the step e scaled to the vector."""
        point = self.space.join(params)
        images = []
        for row in rows:
            step = difference_step(point, row, self.risk.coarsest, stretch)
            ahead, weight = self.risk.batch_gradient(self.space.split(point + step * row), batch)
            behind, _ = self.risk.batch_gradient(self.space.split(point - step * row), batch)
            images.append((ahead - behind) / (2 * step))
        return torch.stack(images), weight

    # ------------------------------------------------------------------------------------ the choice of a route

    def _choose(self, params: Params, batch: Batch, rows: Tensor) -> Route:
        """The fastest exact route that works on this batch and is right; if there is none, differences.

        The routes are tried on as many vectors as are requested, but on random signs, which leave no weight out.
        """
        rows = self.probes(range(len(rows)), seed=0)
        images: dict[Route, Tensor] = {}
        missing: dict[Route, str] = {}
        for route in _EXACT:
            try:
                images[route] = self._by(route, params, batch, rows)[0]
            except RuntimeError as error:
                if is_shortage(error):
                    raise
                missing[route] = missing_operation(error) or str(error).splitlines()[0][:200]
        if not images:
            # an error of the model itself is raised here
            near, far = (self._difference(params, batch, rows[:1], stretch)[0] for stretch in (1.0, 3.0))
            reason = "; ".join(sorted(set(missing.values())))
            self._warn(f"no exact Hessian product, because a second derivative is missing: {reason}", near, far)
            return "difference"
        if len(images) < 2 or not self._agree(*images.values()):
            return self._arbitrate(params, batch, tuple(images))
        best: Route = "forward"
        if not (self._tapes.works and (self.device.type == "cpu" or len(rows) > 1)):
            # Reverse mode is mostly faster than torch.func. Forward mode is chosen only if it takes less than half of
            # the time, which is seldom a close decision, so that two runs choose alike.
            forward, reverse = (_timed(partial(self._by, r, params, batch, rows), self.device) for r in _EXACT)
            best = "forward" if 2 * forward < reverse else "reverse"
        log.info("Hessian products by the %s route", best)
        return best

    def _arbitrate(self, params: Params, batch: Batch, routes: Collection[Route]) -> Route:
        """Of routes that disagree: one that is symmetric and, among these, nearest to differences of the gradient.

        Differences decide only as far as steps of two lengths agree, which they do not at a kink, and only if they are
        symmetric themselves: they see operations under torch.no_grad(), which autograd does not differentiate.
        """
        probes = self.probes([0, 1], seed=0)

        def images(by: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
            return torch.cat([by(probe)[0] for probe in probes.split(1)])  # every route can take one vector at a time

        found = {route: images(partial(self._by, route, params, batch)) for route in routes}
        finite = {route: image for route, image in found.items() if bool(image.isfinite().all())}
        if not finite:
            return next(iter(routes))  # the product itself raises the error
        truth, other = (images(partial(self._difference, params, batch, stretch=stretch)) for stretch in (1.0, 3.0))
        apart = {route: float((image - truth).norm()) for route, image in finite.items()}
        most = self._tolerance()
        uneven = {route: _asymmetry(image, probes) for route, image in finite.items()}
        even = {route: uneven[route] <= most * float(image.norm()) for route, image in finite.items()}
        best = min(finite, key=lambda route: (not even[route], apart[route]))
        doubt, scale = float((truth - other).norm()), max(float(truth.norm()), float(finite[best].norm()))
        tilt = _asymmetry(truth, probes)
        # if a model computes a part in fewer digits, products are slightly asymmetric, and differences even more so
        wrong = (not even[best] and tilt < uneven[best]) or apart[best] > max(10 * doubt, _TRUST * scale)
        if wrong and tilt <= min(10 * doubt + most * scale, _TRUST * scale):
            self._warn(f"{best} products are wrong: they disagree with differences of the gradient", truth, other)
            return "difference"
        if not even[best]:
            self._say(
                f"{best} products are not symmetric, by {uneven[best] / scale:.0e} of their size: the gradient of the "
                f"model is not that of any function, or a part of it is computed in fewer digits than {self.dtype}"
            )
        elif len(finite) == 2:
            why = "nearer to differences of the gradient" if all(even.values()) else "the one that is symmetric"
            self._say(f"forward and reverse products disagree; {best} is {why}")
        log.info("Hessian products by the %s route", best)
        return best

    def _agree(self, a: Tensor, b: Tensor) -> bool:
        return bool((a - b).norm() <= self._tolerance() * b.norm())

    def _warn(self, reason: str, near: Tensor, far: Tensor) -> None:
        """Warn that differences are used, with their error from two steps, which shows kinks as well as round-off."""
        digits = torch.finfo(self.risk.coarsest)
        error = max(digits.eps ** (2 / 3), float((near - far).norm() / near.norm().clamp_min(digits.tiny)))
        self._say(
            f"{reason}; using central differences of the gradient, with a relative error of about {error:.0e} where "
            "the loss is smooth, and more near a kink"
        )

    def _say(self, text: str) -> None:
        warnings.warn(text, NumericalWarning, stacklevel=callers_level())


def loss_derivatives(loss: Loss, out: Tensor, data: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Gradient of the batch's loss sum in the outputs, and its Hessian there as a function of tangents (k, ...)."""
    with torch.enable_grad():
        leaf = out.detach().requires_grad_()
        (slope,) = gradients(loss.total(leaf, data), [leaf], create_graph=isinstance(loss, CallableLoss))

    def curve(tangents: Tensor) -> Tensor:
        if isinstance(loss, CallableLoss):
            return pull([slope], [leaf], [tangents], batched=True)[0] if slope.requires_grad else 0 * tangents
        return torch.func.vmap(lambda u: loss.middle("ggn", out, data, u))(tangents)

    return slope.detach(), curve


def _asymmetry(images: Tensor, vectors: Tensor) -> float:
    """|u'Hv - v'Hu| for the images Hu and Hv of two random vectors: about |H - H'|, just as |Hu| is about |H|."""
    forms = images @ vectors.T
    return float((forms - forms.T).abs().max())


def _timed(fn: Callable[[], tuple[Tensor, Tensor]], device: torch.device) -> float:
    """Seconds of the faster of two calls; the routes have been called once before.

    On a CPU, the time of this process, which does not depend on other work on the machine.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times = []
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = clock()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - start)
    return min(times)
