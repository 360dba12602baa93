"""A spectrum to compare with a law: all eigenvalues, nodes with weights, or the result of a Krylov run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..results import Estimate, affine, from_samples

if TYPE_CHECKING:
    from ..estimators.quantities import Spectrum


def check_source(source: Any) -> None:
    """Refuse anything but a spectrum; the message has a hint for operators."""
    if not isinstance(source, Tensor) and not (hasattr(source, "head_residuals") and hasattr(source, "mass")):
        raise TypeError(
            f"expected a ritz.Spectrum or a tensor of eigenvalues, got {type(source).__name__}; for an operator, pass "
            "ritz.spectrum(operator)"
        )


@dataclass(frozen=True)
class Measured:
    """Nodes and weights that sum to one, and the run that they came from."""

    nodes: Tensor  # (n,) ascending
    weights: Tensor  # (n,)
    spectrum: "Spectrum | None" = None

    @classmethod
    def of(cls, source: "Spectrum | Tensor", weights: Tensor | None) -> "Measured":
        """From eigenvalues, nodes and weights, or a run.

        Raises:
            TypeError: If `source` is none of these.
            ValueError: If a number is not finite, the shapes do not fit, or a weight is negative or all are 0.
        """
        check_source(source)
        if not isinstance(source, Tensor):
            if weights is not None:
                raise ValueError("a Spectrum has its own weights; give weights= only together with a tensor of nodes")
            exact = source.tail is None
            return cls(source.nodes.double(), source.weights.double(), None if exact else source)
        nodes = source.detach().double().cpu()
        shares = torch.ones_like(nodes) if weights is None else weights.detach().double().cpu()
        if nodes.ndim != 1 or not len(nodes) or shares.shape != nodes.shape:
            raise ValueError(f"expected nodes and weights (n,), got {tuple(nodes.shape)} and {tuple(shares.shape)}")
        fair = bool((shares >= 0).all()) and float(shares.sum()) > 0
        if not (fair and bool(nodes.isfinite().all() & shares.isfinite().all())):
            raise ValueError("nodes and weights must be finite, no weight negative, and not all weights 0")
        order = nodes.argsort()
        order = order[shares[order] > 0]
        return cls(nodes[order], shares[order] / shares.sum())

    def mean(self, f: Callable[[Tensor], Tensor], name: str) -> Estimate:
        """Tr f(X) / P."""
        run = self.spectrum
        if run is None:
            return Estimate(name=name, value=float(self.weights @ f(self.nodes)), exact=True)
        assert run.tail is not None
        left = (run.dim - len(run.head)) / run.dim
        samples = left * run.tail.gauss().integrate(f)
        about: dict[str, Any] = {
            "products": run.products,
            "seed": run.seed,
            "stop": run.stop,
            "convention": run.convention,
        }
        return from_samples(name, samples, offset=float(f(run.head).sum()) / run.dim, **about)

    def moment(self, k: int) -> Estimate:
        """Tr X^k / P."""
        if self.spectrum is None or k > 2:
            return self.mean(lambda t: t**k, f"moment {k} / P")
        return affine(self.spectrum.moment(k), 1 / self.spectrum.dim, name=f"moment {k} / P", parts={})

    def standardised(self, most: int) -> list[Estimate]:
        """Tr ((X - c) / s)^k / P for k up to `most`, c the mean, s the deviation: so a large c costs no digits."""
        centre = float(self.weights @ self.nodes)
        spread = math.sqrt(float(self.weights @ (self.nodes - centre).square()))

        def power(k: int) -> Callable[[Tensor], Tensor]:
            return lambda t: ((t - centre) / spread) ** k

        return [self.mean(power(k), f"moment {k}") for k in range(1, most + 1)]

    def cdf(self, levels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The share of eigenvalues at or below each level: lower bound, value, upper bound, standard error.

        For a run, the bounds are those of Chebyshev, Markov and Stieltjes; no better ones follow from the run.
        """
        if self.spectrum is None:
            sums = torch.cat([torch.zeros(1, dtype=torch.float64), self.weights.cumsum(0)])
            share = sums[torch.searchsorted(self.nodes, levels, right=True)].clamp(max=1.0)
            return share, share, share, torch.zeros_like(share)
        found = [self.spectrum.mass(below=float(level)) for level in levels]
        rows = [(*(e.bracket or (e.value, e.value)), e.value, e.stderr) for e in found]
        low, high, value, stderr = torch.tensor(rows, dtype=torch.float64).T
        return low, value, high, stderr
