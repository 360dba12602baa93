"""A training log: what an optimiser does to its steps, as plain numbers for any logger."""

import contextlib
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ..estimators.noise import Curvature
from ..krylov.eigen import top_eigenpairs
from ..loggers import LoggerLike, as_logger
from ..operators.algebra import DenseOperator
from ..operators.base import Operator, full_precision
from ..risk import Risk
from ..space import random_uniform
from .damping import AutoDamping
from .diagnostics import rate_ratio, sgd_rate, stable_rate
from .directions import directions, flat_scale, inverse_root, momentum_of
from .kfac import KFAC
from .lanczos_opt import LanczosOpt
from .streaming import MATRICES

_QUANTILES = {"q10": 0.1, "median": 0.5, "q90": 0.9}
_MANY = 2**16  # directions that quantiles are taken over: all of millions would cost more than a step


class TrainingLog:
    """Logs diagnostics of a training run at regular intervals.

        log = TrainingLog(optimizer, JSONLines("train.jsonl"), risk=risk, damping=damping)
        for batch in loader:
            ...
            optimizer.step()
            damping.step()
            log.step(loss)          # before zero_grad(), so that the gradient is there

    Quantities that are not defined for an optimiser are left out. Names end in /0, /1, ... if there are several
    parameter groups, and in /stderr for the standard error of a quantity.

    Every `every` steps, at the cost of about a step of the optimiser, and twice that for Adam:

        loss                      as given to `step`
        lr, lr_scale, damping     of the groups, as they are for the next step; `damping` is Adam's eps, and one for
                                  each block (damping/NAME) where KFAC has a mapping
        sgd_rate                  lr / damping, the rate along directions without curvature; KFAC, Adam, LanczosOpt
        gradient_norm             norm of the gradient on the parameters
        step_norm                 how far the last step went; 0 where it was skipped
        skipped                   steps skipped so far because the gradient was not finite; optimisers of ritz
        preconditioner/largest    extreme eigenvalues of what is inverted, without damping: KFAC's own, Adam's roots of
        preconditioner/smallest   second moments; the extreme Ritz values of LanczosOpt's last step
        rate_ratio                largest over smallest rate at one lr, (largest + damping) / (smallest + damping); seed
                                  004, equation 5; KFAC, Adam
        rate/min, rate/q10, rate/median, rate/q90, rate/max
                                  quantiles over directions of lr / (eigenvalue + damping), the inner ones of 65,536
                                  of them where there are more; KFAC, Adam
        bulk_share                share of the last step, squared, along eigenvectors of KFAC within the bulk
        bulk_edge                 where that ends, 2 sqrt(noise) of the last refresh of AutoDamping

    After each refresh of `AutoDamping`, the estimates that its rule received (`ritz.optim.Seen`):

        seen/noise, seen/trace, seen/second_moment, seen/reduction_ratio, each with seen/NAME/stderr

    Every `curvature_every` steps, with a risk, at the cost of products with its curvature:

        curvature/largest         the largest eigenvalue of the Hessian, or of the GGN
        curvature/residual        its error: there is an eigenvalue this near
        curvature/products        what it cost
        stable_rate               the largest stable learning rate on the quadratic of this curvature, under the
                                  optimiser's own preconditioner and momentum (`stable_rate`), weight decay not counted;
                                  of the largest lr, where groups differ; SGD, Adam, KFAC, and those of their kind; an
                                  upper bound of it where `max_products` cut the search, which warns
        stable_rate/used          lr over it: above 1, steps grow along the sharpest direction
        stable_rate/products      what it cost beyond that

    Weights, gradients, random generators and the factors of KFAC stay as they are. An error of the logger is raised
    after the step has been counted; training and log can go on from there.

    Args:
        optimizer: Any torch optimiser.
        logger: Anything that `ritz.loggers.as_logger` accepts: a logger, a function of (scalars, step), a list of them.
        risk: The risk whose curvature is measured; its parameters include all that the optimiser trains. None for none.
        damping: The AutoDamping of this optimiser, if there is one.
        every: Steps between two rows of cheap quantities.
        curvature_every: Steps between two measurements of the curvature.
        curvature: "hessian" or "ggn".
        tol, max_products, seed: Settings of the eigenvalues, as in `ritz.top_eigenpairs`.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> X, y = torch.diag(torch.tensor([1.0, 2.0])), torch.zeros(2, 1)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (X, y))  # H = diag(1, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        >>> rows = ritz.loggers.Memory()
        >>> log = TrainingLog(optimizer, rows, risk=risk, every=1, curvature_every=1)
        >>> loss = torch.nn.functional.mse_loss(model(X), y)
        >>> loss.backward()
        >>> optimizer.step()
        >>> log.step(loss)
        >>> {name: round(rows.rows[0][name], 4) for name in ("lr", "stable_rate", "stable_rate/used")}
        {'lr': 0.1, 'stable_rate': 0.75, 'stable_rate/used': 0.1333}
    """

    def __init__(
        self,
        optimizer: Optimizer,
        logger: LoggerLike,
        *,
        risk: Risk | None = None,
        damping: AutoDamping | None = None,
        every: int = 50,
        curvature_every: int = 1000,
        curvature: Curvature = "hessian",
        tol: float = 1e-2,
        max_products: int | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if every < 1 or curvature_every < 1:
            raise ValueError(f"every and curvature_every must be at least 1, got {every} and {curvature_every}")
        if curvature not in MATRICES:
            raise ValueError(f"curvature must be 'hessian' or 'ggn', got {curvature!r}")
        if damping is not None and getattr(damping, "optimizer", None) is not optimizer:
            raise ValueError("damping must be the AutoDamping of the same optimizer")
        if risk is not None:
            _check(risk, optimizer)
        self.optimizer, self.logger, self.risk, self.damping = optimizer, as_logger(logger), risk, damping
        self.every, self.curvature_every, self.curvature = every, curvature_every, curvature
        self.tol, self.max_products, self.seed = tol, max_products, seed
        self.count = 0
        self._refreshes = 0 if damping is None else len(damping.history)  # that were written, or were before
        self._before: list[tuple[Tensor, Tensor]] | None = None  # weights, as before a step that is written
        own = weakref.WeakMethod(self._remember)
        handle = optimizer.register_step_pre_hook(lambda *_: _call(own()))
        self._detach = weakref.finalize(self, handle.remove)

    def step(self, loss: Tensor | float | None = None) -> None:
        """To be called after each `optimizer.step()`, and after `damping.step()` where there is one."""
        self.count += 1
        before, self._before = self._before, None
        row: dict[str, float] = {}
        if self.count % self.every == 0:
            row |= {} if loss is None else {"loss": float(loss.detach() if isinstance(loss, Tensor) else loss)}
            row |= self._settings() | self._lengths(before) | self._preconditioner()
            row |= self._bulk(before)
        row |= self._seen()
        try:
            if self.risk is not None and self.count % self.curvature_every == 0:
                row |= self._curvature(self.risk)
        finally:
            if row:
                self.logger.log(row, self.count)

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs to write at the same steps."""
        return {"count": self.count, "refreshes": self._refreshes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.count, self._refreshes = state["count"], state["refreshes"]

    # ------------------------------------------------------------------------------------------- what is cheap

    def _remember(self) -> None:
        """The weights before a step that is written."""
        if (self.count + 1) % self.every == 0:
            self._before = [(p, p.detach().clone()) for p in _trained(self.optimizer)]

    def _end(self, index: int) -> str:
        """What names of a group end in."""
        return f"/{index}" if len(self.optimizer.param_groups) > 1 else ""

    def _factor(self, group: Mapping[str, Any]) -> float:
        """What the learning rate is multiplied by in a step."""
        if "lr_scale" not in group and self.damping is not None and self.damping.compensate_lr:
            return 1 + float(group[self.damping.key])  # by hooks around the step
        return float(group.get("lr_scale", 1.0))

    def _rate(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"]) * self._factor(group)

    def _settings(self) -> dict[str, float]:
        """Of the groups."""
        row: dict[str, float] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            end = self._end(index)
            known = group.get("lr") is not None
            if known:
                row[f"lr{end}"] = float(group["lr"])
            if "lr_scale" in group or self._factor(group) != 1:
                row[f"lr_scale{end}"] = self._factor(group)
            key = self.damping.key if self.damping is not None else "damping" if "damping" in group else "eps"
            given = group.get(key)
            if isinstance(given, Mapping):
                row |= {f"damping{end}/{name}": float(value) for name, value in given.items()}
            elif given is not None:
                row[f"damping{end}"] = float(given)
            flat = flat_scale(self.optimizer, group)
            if known and flat:
                row[f"sgd_rate{end}"] = float(sgd_rate(self._rate(group), flat))
        return row

    def _lengths(self, before: list[tuple[Tensor, Tensor]] | None) -> dict[str, float]:
        """Of the gradient and of the step."""
        row = {}
        found = [p.grad for p in _trained(self.optimizer) if p.grad is not None]
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in found]
        if grads:
            row["gradient_norm"] = float(get_total_norm(grads))
        if before is not None:
            row["step_norm"] = float(get_total_norm([p.detach() - q for p, q in before]))
        if hasattr(self.optimizer, "skipped"):
            row["skipped"] = float(self.optimizer.skipped)
        return row

    def _preconditioner(self) -> dict[str, float]:
        """Its extremes, and the rates along its directions."""
        if isinstance(self.optimizer, LanczosOpt) and self.optimizer.last:
            return {f"preconditioner/{end}": float(self.optimizer.last[end]) for end in ("largest", "smallest")}
        parts = [part for part in directions(self.optimizer) if part.values.numel()]
        if not parts:
            return {}
        row = {
            "preconditioner/largest": max(float(part.values.max()) for part in parts),
            "preconditioner/smallest": min(float(part.values.min()) for part in parts),
        }
        ends = torch.tensor([float(end) for part in parts for end in part.damped.aminmax()], dtype=torch.float64)
        if not bool(ends.min() > 0):  # Adam without eps, where no gradient has been
            return row
        rates = torch.cat([(self._rate(part.group) / part.damped).flatten().to(parts[0].damped) for part in parts])
        low, high = (float(end) for end in rates.aminmax())
        inner = zip(_QUANTILES, _quantiles(rates, list(_QUANTILES.values())), strict=True)
        row |= {"rate_ratio": float(rate_ratio(ends, 0.0)), "rate/min": low, "rate/max": high}
        return row | {f"rate/{name}": value for name, value in inner}

    @torch.no_grad()
    @full_precision()
    def _bulk(self, before: list[tuple[Tensor, Tensor]] | None) -> dict[str, float]:
        """The share of the last step in the bulk."""
        edges = self._edges()
        if not edges or before is None or not isinstance(self.optimizer, KFAC):
            return {}
        groups = self.optimizer.param_groups
        names = [name for group in groups for name in group["param_names"]]
        places = {name: index for index, group in enumerate(groups) for name in group["param_names"]}
        start = {id(p): q for p, q in before}  # groups may have been made anew since the step
        moved = {name: p - start[id(p)] for name, p in zip(names, _trained(self.optimizer), strict=True)}
        inside, total = 0.0, 0.0
        for block in self.optimizer.blocks.values():
            space, own = block.space(), list(block.unit.params.values())
            if space is not None:
                x = block.unit.gather(moved).to(space.values.dtype)
                x = x if space.left is None else space.left.mT @ x
                energy = (x if space.right is None else x @ space.right).square()
                total += float(energy.sum())
                inside += float(energy[space.values <= edges[places[own[0]] % len(edges)]].sum())
        row = {f"bulk_edge{self._end(index) if len(edges) > 1 else ''}": edge for index, edge in enumerate(edges)}
        return row | ({"bulk_share": inside / total} if total else {})

    def _edges(self) -> list[float]:
        """Of the bulk, 2 sqrt(noise), for all groups or for each."""
        last = self.damping.history[-1] if self.damping is not None and self.damping.history else {}
        names = ["noise", *(f"noise/{index}" for index in range(len(self.optimizer.param_groups)))]
        return [2 * math.sqrt(last[name]) for name in names if name in last]

    def _seen(self) -> dict[str, float]:
        """What AutoDamping has seen since the last row."""
        if self.damping is None or len(self.damping.history) == self._refreshes:
            return {}
        self._refreshes = len(self.damping.history)
        row = {}
        for name, value in self.damping.history[-1].items():
            what, _, index = name.partition("/")
            if what not in ("step", "damping") and not math.isnan(value):
                what = f"{what.removesuffix('_stderr')}/stderr" if what.endswith("_stderr") else what
                row["/".join(["seen", what, *([index] if index else [])])] = value
        return row

    # ------------------------------------------------------------------------------------------- what costs products

    def _curvature(self, risk: Risk) -> dict[str, float]:
        """The largest eigenvalue, and how far the learning rate is from where it would not be stable."""
        operator = MATRICES[self.curvature](risk)
        with self.optimizer.pause() if isinstance(self.optimizer, KFAC) else contextlib.nullcontext():
            pairs = top_eigenpairs(operator, 1, tol=self.tol, max_products=self.max_products, seed=self.seed)
            largest = float(pairs.values[0])
            row = {
                "curvature/largest": largest,
                "curvature/residual": float(pairs.residuals[0]),
                "curvature/products": float(pairs.products),
            }
            return row | self._stability(risk, operator, largest)

    def _stability(self, risk: Risk, operator: Operator, largest: float) -> dict[str, float]:
        """The largest stable rate, and how much of it is in use."""
        momentum = momentum_of(self.optimizer)
        root = inverse_root(self.optimizer, risk, self._rate) if momentum is not None else None
        if momentum is None or root is None:
            return {}
        rho, kind = momentum
        if root.inverse is None:  # the eigenvalue is known already, and the stable rate is that of a line
            line = DenseOperator(torch.tensor([[largest]], dtype=torch.float64))
            stable, products = float(stable_rate(line, momentum=rho, kind=kind)), 0
        else:
            about: Any = {"tol": self.tol, "max_products": self.max_products, "seed": self.seed}
            found = stable_rate(operator, root.inverse, momentum=rho, kind=kind, **about)
            stable, products = float(found), found.products
        return {"stable_rate": stable, "stable_rate/used": root.rate / stable, "stable_rate/products": float(products)}


def _quantiles(values: Tensor, shares: list[float]) -> list[float]:
    """Of the values, or of so many drawn from them that no rank is off by more than a percent."""
    if len(values) > _MANY:
        drawn = random_uniform(_MANY, ("quantiles", len(values)), values.device)
        values = values[(drawn * len(values)).long()]
    return [float(values.kthvalue(1 + round(share * (len(values) - 1))).values) for share in shares]


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _call(method: Any) -> None:
    """A method whose object may be gone."""
    if method is not None:
        method()


def _check(risk: Risk, optimizer: Optimizer) -> None:
    """Refuse a risk that does not hold what is trained."""
    if not isinstance(risk, Risk):
        raise TypeError(f"risk must be a ritz.Risk, got {type(risk).__name__}")
    own = dict(risk.model.named_parameters())
    held = {id(own[name]) for name in risk.names}
    apart = [tuple(p.shape) for p in _trained(optimizer) if p.requires_grad and id(p) not in held]
    if apart:
        raise ValueError(
            f"{len(apart)} of the parameters that are trained are not among those of the risk; the first has shape "
            f"{apart[0]}"
        )
