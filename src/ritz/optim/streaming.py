"""Curvature noise from one batch at a time, training batches among them.

`ritz.curvature_noise` multiplies common probes by the curvatures of n batches at one point. Here each batch gives an
estimate of its own with a probe of its own, at the weights as they are at that step:

    halves   cut the batch in two, with curvatures A and B: |(A - B) v|^2 / 4 has the mean Tr X^2 / P of the whole
             batch, v'(A + B)v / 2 has Tr H / P and (A v)'(B v) has Tr H^2 / P; the cost is that of one product
    pairs    the same from two batches of successive steps, |(A - B) v|^2 / 2, for batches that cannot be cut; the step
             between them adds its own change of curvature

Both are free of bias, the second up to that step. A window with one probe and a variance over its batches would count
the change of the curvature over the whole window as noise, and one probe is a poor one: noise lives in few directions,
and the batches cannot tell how the probe lies to them. How training batches compare with others at the same weights is
measured in docs/convergence.md.
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..batches import Batch
from ..errors import UnsupportedError
from ..estimators.noise import Curvature
from ..intervals import ChiSquare
from ..operators.base import full_precision
from ..operators.gauss_newton import GGN
from ..operators.hessian import Hessian
from ..operators.risk_operator import RiskOperator
from ..reducers import Mean
from ..results import Estimate, from_samples
from ..risk import Params, Risk
from ..space import row_dots

Method = Literal["halves", "pairs"]

MATRICES: dict[Curvature, type[Hessian] | type[GGN]] = {"hessian": Hessian, "ggn": GGN}


class _Pending(NamedTuple):
    """The first half of a pair, waiting for the next batch."""

    image: Tensor  # (1, dim)
    probe: int  # which one
    size: int


class Stream:
    """Estimates of curvature noise from single batches, gathered until they are asked for.

    Args:
        risk: Whose model, loss and mode are used; its data are not.
        curvature: "hessian" or "ggn".
        method: "halves" or "pairs".
        seed: Seed of the probes.

    Example:
        >>> import ritz
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> X = torch.tensor([1.0, 2.0, 3.0, 4.0]).sqrt()[:, None]
        >>> stream = Stream(ritz.Risk(model, torch.nn.MSELoss(), (X, torch.zeros(4, 1))), seed=0)
        >>> stream.add((X, torch.zeros(4, 1)), index=0)  # curvatures of the halves: 3 and 7
        >>> round(stream.take()["noise"].value, 4)
        4.0
    """

    def __init__(
        self, risk: Risk, curvature: Curvature = "hessian", method: Method = "halves", *, seed: int = 0
    ) -> None:
        if method not in ("halves", "pairs"):
            raise ValueError(f"stream must be 'halves' or 'pairs', got {method!r}")
        if method == "halves" and not risk.splittable:
            raise UnsupportedError(
                "batches of this risk cannot be cut in halves (batch statistics, dropout or an opaque loss): "
                "use stream='pairs'"
            )
        self.risk, self.curvature, self.method, self.seed = risk, curvature, method, seed
        self.samples: list[tuple[float, float, float]] = []  # noise of a sample, v'Hv, |Hv|^2 without noise
        self.size = 0  # of the largest batch of the window: noise is told for batches of this size
        self.checked = False
        self._pending: _Pending | None = None

    @property
    def waiting(self) -> bool:
        """Whether the next batch completes a pair."""
        return self._pending is not None

    @full_precision()
    def add(self, data: Any, index: int) -> None:
        """One batch, at the weights as they are; `index` names the probe."""
        risk = self.risk.on([data])
        batch = next(iter(risk.batches))
        if not self.checked:
            risk.check()
            self.checked = True
        operator = MATRICES[self.curvature](risk)
        if self.method == "halves":
            self._halves(operator, batch, index)
        else:
            self._pair(operator, batch, index)

    def _halves(self, operator: RiskOperator, batch: Batch, index: int) -> None:
        if batch.size < 2:  # the end of an epoch, say: it tells nothing of noise
            return
        half = batch.size // 2
        rows = self._probe(operator, index)
        images = _images(operator, batch.pieces(half)[:2], rows)
        self._keep(rows[0], images[0], images[1], half, batch.size)

    def _pair(self, operator: RiskOperator, batch: Batch, index: int) -> None:
        first = self._pending
        index = index if first is None else first.probe
        rows = self._probe(operator, index)
        image = _images(operator, [batch], rows)
        if first is not None and first.size == batch.size:
            self._pending = None
            self._keep(rows[0], first.image[0].to(image), image[0], batch.size, batch.size)
        else:
            self._pending = _Pending(image, index, batch.size)

    def _probe(self, operator: RiskOperator, index: int) -> Tensor:
        """A random direction (1, dim) of length one: signs, cheaper to draw than normals and of no more variance."""
        return operator.probes([index], self.seed) / math.sqrt(operator.dim)

    def _keep(self, probe: Tensor, left: Tensor, right: Tensor, each: int, whole: int) -> None:
        """Images of two parts of `each` samples: noise falls as one over the size, so that of one sample is kept."""
        self.size = max(self.size, whole)
        apart, mean = left - right, (left + right) / 2
        pairs = (apart, apart), (probe, mean), (left, right)
        noise, form, square = torch.cat([row_dots(a[None], b[None]) for a, b in pairs]).tolist()
        self.samples.append((each / 2 * noise, form, square))

    def take(self) -> dict[str, Estimate]:
        """Noise, trace and second moment of what was gathered, each over P; the next window starts empty."""
        if not self.samples:
            raise ValueError(
                "no curvature noise without a batch of two samples or more, to be cut in halves, or two batches of one "
                "size, for stream='pairs'; give larger batches or batch_size="
            )
        values = torch.tensor(self.samples, dtype=torch.float64)  # (n, 3)
        values[:, 0] /= self.size
        which = f"batches of {self.size}, by {self.method}; {MATRICES[self.curvature].matrix}"
        self.samples, self.size = [], 0
        about: dict[str, Any] = {"products": len(values), "seed": self.seed}
        noise = from_samples(
            "curvature noise", values[:, 0], support=(0.0, math.inf), convention=f"Tr X^2 / P; {which}", **about
        )
        value, error = float(noise.value), float(noise.stderr)
        if error > 0:  # a mean of squares: chi-square with the degrees of freedom that its error asks for
            noise = replace(noise, rule=ChiSquare(min(2 * (value / error) ** 2, 1e9)))
        return {
            "noise": noise,
            "trace": from_samples("mean curvature", values[:, 1], convention=f"Tr H / P; {which}", **about),
            "second_moment": from_samples("second moment", values[:, 2], convention=f"Tr H^2 / P; {which}", **about),
        }

    def state_dict(self) -> dict[str, Any]:
        """What was gathered, and the batch that waits."""
        pending = None if self._pending is None else tuple(self._pending)
        return {"samples": list(self.samples), "size": self.size, "checked": self.checked, "pending": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.samples = [(row[0], row[1], row[2]) for row in state["samples"]]
        self.size, self.checked = state["size"], state["checked"]
        self._pending = None if state["pending"] is None else _Pending(*state["pending"])


def _images(operator: RiskOperator, batches: list[Batch], rows: Tensor) -> Tensor:
    """The curvature of each batch applied to one row, (n, dim)."""

    def image(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        return operator.batch_rows(params, batch, rows)

    images = torch.cat([operator.risk.fold(image, Mean(), batches=[batch]) for batch in batches])
    if not bool(images.isfinite().all()):
        operator.diagnose()
    return images
