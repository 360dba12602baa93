"""What one Krylov run says of a spectrum: every number with its sampling error and its bracket.

With r pairs locked and K probes of m steps in what is left (`estimators.spectrum`), for a function f of the matrix H of
order P,

    Tr f(H)  ~  sum_i f(theta_i)  +  (P - r) mean_k sum_j w_kj f(t_kj)

(stochastic Lanczos quadrature; Ubaru, Chen and Saad 2017; theorem 3 of seed 001). For f(t) = t and t^2 the split is
exact however good the locked pairs are. The spread over probes is the sampling error; what they have in common, the
depth of the quadrature and the coupling of head and tail, is a bracket. So is what the products themselves are off by
(`estimators.precision`), where that is more than round-off: the run then saw H + E in the place of H, with ||E|| at
most `rounding`, and every number is bracketed by how far E may move it.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import IndefiniteError, NumericalWarning
from ..intervals import ChiSquare, Exact, IntervalRule, Magnitude, RandomStart, StudentT, matched_dof
from ..krylov.lanczos import Tridiagonal
from ..krylov.quadrature import Quadrature
from ..results import Estimate, from_samples, new_axes
from ..storage import equal, save

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes

NOISE_MARGIN = 10.0  # a shift below this many times the noise of a product is refused


@dataclass(frozen=True, eq=False, kw_only=True)
class Spectrum:
    """The spectrum of a symmetric matrix of order `dim`, as one run saw it. Every number is an `Estimate`.

    Attributes:
        dim: Order of the matrix, P.
        head: Locked Ritz values (r,); all eigenvalues where `complete`.
        head_residuals: Their residual norms (r,).
        coupling: Spectral norm of the residual block between the locked pairs and the rest.
        ends: (smallest, its residual, largest, its residual) Ritz value of the head's whole block space, or empty.
        tail: The tridiagonals of the probes, or None where the head is complete.
        layers: Names of the parameters.
        layer_samples: Per probe and parameter, the trace of its diagonal block and the squared norm of its rows of the
            matrix, (2, K, len(layers)).
        positive: Whether the matrix is positive semi-definite by construction.
        noise: Relative round-off of one product.
        products, seed, stop, convention: See `Estimate`.
        rounding: By how much products in the precision of the run may move an eigenvalue; 0 where it is round-off.
        trace_rounding: By how much they may move the trace, of the whole or of one parameter.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> s = ritz.spectrum(DenseOperator(torch.diag(torch.tensor([3.0, 1.0, -1.0], dtype=torch.float64))))
        >>> round(s.trace.value, 6), round(s.moment(2).value, 6), round(s.mass(below=0.0).value, 6)
        (3.0, 11.0, 0.333333)
    """

    dim: int
    head: Tensor
    head_residuals: Tensor
    coupling: float
    ends: tuple[float, ...]
    tail: Tridiagonal | None
    layers: tuple[str, ...]
    layer_samples: Tensor
    positive: bool
    noise: float
    products: int
    seed: int
    stop: str
    convention: str
    rounding: float = 0.0
    trace_rounding: float = 0.0

    # ------------------------------------------------------------------------------------------- moments

    @property
    def trace(self) -> Estimate:
        """Tr H; `parts` are the traces of the diagonal blocks of single parameters, from the same products."""
        parts = self._parts("trace", self.layer_samples[0], "trace of the diagonal block of one parameter")
        return self._average(
            "trace", lambda t: t, float(self.head.sum()), "Tr H, sum of eigenvalues", parts=parts,
            slack=self.trace_rounding,
        )  # fmt: skip

    def moment(self, k: int) -> Estimate:
        """Tr H^k, free of depth error up to k = 2 m - 1.

        For k = 2 it is the unbiased squared Frobenius norm; `parts` are the shares of single parameters in it, the
        squared norms of their rows of the matrix, from the same products.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if self.tail is not None and k > max(2 * self.num_steps - 1, 2):
            raise ValueError(f"{self.num_steps} steps give moments up to {2 * self.num_steps - 1}, got k={k}")
        if k == 1:
            return self.trace
        head = float(self.head.pow(k).sum())
        if k == 2:  # exact for any orthonormal locked rows: 2 |HU|^2 - |U'HU|^2 + |QHQ|^2
            head += 2 * float(self.head_residuals.square().sum())
            parts = self._parts("squared norm", self.layer_samples[1], "squared norm of the rows of one parameter")
            return self._average(
                "moment 2", torch.square, head, "Tr H^2 = ||H||_F^2", support=(0.0, math.inf), parts=parts,
                slack=self._moved_power(2),
            )  # fmt: skip
        # second order in the coupling E: |Tr H^k - Tr (H - E)^k| <= k (k - 1) / 2 ||H||^(k-2) ||E||_F^2
        bound = float(self.spectral_norm.value) + self.coupling
        coupled = 0.0 if self.tail is None else float(self.head_residuals.square().sum())
        slack = k * (k - 1) * bound ** (k - 2) * coupled
        return self._average(f"moment {k}", lambda t: t**k, head, f"Tr H^{k}", slack=slack + self._moved_power(k))

    def _moved_power(self, k: int) -> float:
        """|Tr (H + E)^k - Tr H^k| <= k (||H|| + ||E||)^(k-2) (||H||_F + ||E||_F) ||E||_F, for k at least 2."""
        if not self.rounding:
            return 0.0
        size, norm = self._root_of_square() + self.rounding, float(self.spectral_norm.value) + self.rounding
        return k * norm ** (k - 2) * size * self.rounding

    def _root_of_square(self) -> float:
        """||H||_F, the value alone."""
        square = float((self.head.square() + 2 * self.head_residuals.square()).sum())
        if self.tail is not None:
            square += float(self._tail_samples(torch.square).mean())
        return math.sqrt(max(square, 0.0))

    @property
    def frobenius_norm(self) -> Estimate:
        """||H||_F, the root of `moment(2)`."""
        square = self.moment(2)
        value = math.sqrt(max(float(square.value), 0.0))
        stderr = float(square.stderr) / (2 * value) if value else 0.0
        bracket = (max(value - self.rounding, 0.0), value + self.rounding) if self.rounding else None
        return Estimate(
            name="Frobenius norm", value=value, stderr=stderr, samples=square.samples, power=0.5, exact=square.exact,
            bracket=bracket, rule=square.rule, **self._cost("||H||_F, not squared"),
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------- extremes

    @cached_property
    def lambda_max(self) -> Estimate:
        """Largest eigenvalue: the largest Ritz value, a bracket that holds an eigenvalue, and a one-sided interval."""
        return self._extreme(largest=True)

    @cached_property
    def lambda_min(self) -> Estimate:
        """Smallest eigenvalue, negative where the matrix is indefinite."""
        return self._extreme(largest=False)

    @property
    def spectral_norm(self) -> Estimate:
        """max |lambda|."""
        low, high = self.lambda_min, self.lambda_max
        top = high if float(high.value) >= -float(low.value) else low
        ends = sorted(abs(float(end)) for end in top.bracket) if top.bracket else None
        if top.bracket and float(top.bracket[0]) < 0 < float(top.bracket[1]):
            ends = [0.0, max(ends or [0.0])]
        both = isinstance(low.rule, RandomStart) and isinstance(high.rule, RandomStart)
        rule = Magnitude(low.rule, high.rule) if both else Exact()  # type: ignore[arg-type]
        return Estimate(
            name="spectral norm", value=abs(float(top.value)), bracket=(ends[0], ends[1]) if ends else None,
            exact=top.exact, rule=rule, **self._cost("max |lambda|"),
        )  # fmt: skip

    def _extreme(self, largest: bool) -> Estimate:
        name = "lambda max" if largest else "lambda min"
        cost = self._cost("largest eigenvalue" if largest else "smallest eigenvalue")
        sign = 1.0 if largest else -1.0
        if self.tail is None:
            value = float(self.head.max() if largest else self.head.min())
            return Estimate(name=name, value=value, bracket=self._around(value), exact=True, **cost)
        tail = self.tail.extremes()
        ritz = tail.largest if largest else tail.smallest
        residuals = tail.largest_residual if largest else tail.smallest_residual
        best = int((sign * ritz).argmax())
        # a Ritz pair of QHQ leaks at most the coupling into the locked rows
        found = [(float(ritz[best]), math.hypot(float(residuals[best]), self.coupling))]
        if self.ends:
            found.append((self.ends[2], self.ends[3]) if largest else (self.ends[0], self.ends[1]))
        value, residual = max(found, key=lambda pair: sign * pair[0])
        locked = self.head.tolist() or [-sign * math.inf]
        rule = RandomStart(
            dim=self.dim - len(self.head), num_steps=self.num_steps, num_probes=self.num_probes,
            spread=float(tail.largest.max() - tail.smallest.min()), reach=found[0][0],
            locked=max(locked) if largest else min(locked), slack=self.coupling + self.rounding, largest=largest,
        )  # fmt: skip
        low, high = (value, value + residual) if largest else (value - residual, value)
        bracket = (low - self.rounding, high + self.rounding)
        return Estimate(name=name, value=value, bracket=bracket, rule=rule, **cost)

    # --------------------------------------------------------------------------------- functions and masses

    @property
    def negative_trace(self) -> Estimate:
        """Sum of the negative eigenvalues, at most 0."""
        head = float(self.head.clamp(max=0).sum())
        text = "sum of negative eigenvalues"
        if self.tail is None:
            return self._average("negative trace", _negative, head, text, slack=self._nuclear_rounding())
        samples = self._tail_samples(_negative)
        low, high = self._negative_bounds(self.tail)
        # min(t, 0) is concave, so leaving the coupling out can only raise its trace; by |r|^2 / |theta| to second order
        slack = float((self.head_residuals.square() / self.head.abs().clamp(min=1e-300)).sum())
        moved = self._nuclear_rounding()
        return self._bracketed(
            "negative trace", samples, low - moved, high + moved, (head - slack, head), text, support=(-math.inf, 0.0)
        )

    def mass(self, below: float) -> Estimate:
        """The fraction of the eigenvalues that are at most `below`, between Chebyshev-Markov-Stieltjes bounds.

        m steps cannot tell where inside a node's reach an eigenvalue lies: the bracket does not close with more probes.
        """
        text = f"fraction of the {self.dim} eigenvalues <= {below:g}"
        if math.isnan(below):
            raise ValueError("below must be a number, got nan")
        if math.isinf(below):
            return Estimate(name="mass", value=float(below > 0), exact=True, **self._cost(text))
        # round-off decides on which side of the level an eigenvalue at it comes to lie
        near = 64 * self.noise * float(self.spectral_norm.value) + self.rounding
        if self.tail is None:
            under, over = (float((self.head <= below + side * near).double().mean()) for side in (-1, 1))
            bracket = (under, over) if under < over else None
            return Estimate(name="mass", value=over, bracket=bracket, exact=under == over, **self._cost(text))
        share = (self.dim - len(self.head)) / self.dim
        # by Weyl no eigenvalue of H is further than the coupling from one of the split matrix
        low = self.tail.mass_bounds(below - self.coupling - self.rounding)[0] * share
        high = self.tail.mass_bounds(below + self.coupling + self.rounding)[1] * share
        reach = self.coupling + near
        outliers = [float((self.head <= below + side * reach).sum()) / self.dim for side in (-1, 1)]
        return self._bracketed("mass", (low + high) / 2, low, high, outliers, text, support=(0.0, 1.0))

    def logdet(self, shift: float) -> Estimate:
        """log det(H + shift I), between Gauss-Radau and Gauss quadrature.

        The error of a short quadrature is the same for every probe, so their spread cannot see it; the bracket does.

        Raises:
            IndefiniteError: If the shift does not make the matrix positive; its `partial` is this spectrum.
            ValueError: If the shift drowns in the round-off of the products.
        """
        floor = self._check_shift(shift)

        def log(t: Tensor) -> Tensor:
            return (t + shift).clamp(min=0.1 * (floor + shift)).log()

        text = f"log det(H + {shift:g} I), natural logarithm"
        head = float((self.head + shift).log().sum())
        moved = self._nuclear_rounding() / (floor + shift)  # the derivative is (H + s)^-1
        if self.tail is None:
            bracket = self._around(head, moved)
            return Estimate(name="log-determinant", value=head, bracket=bracket, exact=True, **self._cost(text))
        low, high = (side * (self.dim - len(self.head)) for side in self.tail.bounds(log, floor))
        slack = self._lost_volume(shift, floor)
        return self._bracketed("log-determinant", high, low - moved, high + moved, (head - slack, head), text)

    def _lost_volume(self, shift: float, floor: float) -> float:
        """By how much leaving the coupling R out may raise log det(H + shift I): Fischer's inequality says it does.

        At most -log(1 - sum_i r_i^2 / ((theta_i + s) (floor + s))). For H >= 0 the rest T is at least R' Theta^-1 R,
        and then at most log det(s Theta + R R') - log det(s Theta) <= sum_i log(1 + r_i^2 / (s theta_i)), by Hadamard.
        """
        squares = self.head_residuals.square()
        lost = float((squares / (self.head + shift)).sum()) / (floor + shift)
        slack = -math.log1p(-lost) if lost < 1 else math.inf
        if self.positive and bool((self.head > 0).all()):
            slack = min(slack, float((squares / (shift * self.head)).log1p().sum()))
        return slack

    def soft_rank(self, shift: float) -> Estimate:
        """Tr H (H + shift I)^-1, how many directions stand out above `shift`, between Gauss-Radau and Gauss quadrature.

        Also called the effective dimension. It lies between 0 and the rank of a positive matrix.

        Raises:
            IndefiniteError, ValueError: As `logdet` does.
        """
        floor = self._check_shift(shift)

        def share(t: Tensor) -> Tensor:
            return t / (t + shift).clamp(min=0.1 * (floor + shift))

        text = f"Tr H (H + {shift:g} I)^-1"
        head = float(share(self.head).sum())
        moved = self._nuclear_rounding() * shift / (floor + shift) ** 2  # the derivative is s (H + s)^-2
        if self.tail is None:
            bracket = self._around(head, moved)
            return Estimate(name="soft rank", value=head, bracket=bracket, exact=True, **self._cost(text))
        low, high = (side * (self.dim - len(self.head)) for side in self.tail.bounds(share, floor))
        # leaving the coupling E out can only raise it, by at most s |(H + s)^-1| |E (D + s)^-1|_F^2, D without E; and,
        # as E has as many negative eigenvalues as locked pairs and the function is below 1, by less than their number
        least = floor + shift
        lost = (self.head_residuals.square() * ((self.head + shift) ** -2 + least**-2)).sum()
        slack = min(float(lost) * shift / least, float(len(self.head)) if self.positive else math.inf)
        ends = low - moved, high + moved
        return self._bracketed("soft rank", high, *ends, (head - slack, head), text, support=(-math.inf, self.dim))

    def density(self, grid: Tensor | None = None, width: float | None = None) -> Estimate:
        """The spectral density on a grid, smoothed by a normal kernel of standard deviation `width`.

        (1 / P) sum_i N(x - lambda_i, width^2), with pointwise intervals. The default width is the larger of 1 % of the
        range and range / num_steps, the finest that the quadrature resolves; a smaller one shows single nodes.

        Warns:
            NumericalWarning: If `width` is finer than that.
        """
        grid = self.default_grid() if grid is None else torch.atleast_1d(torch.as_tensor(grid)).double()
        low, high = self.range()
        finest = self._span() / self.num_steps if self.tail is not None else 0.0
        width = self._default_width() if width is None else float(width)
        if not width > 0:
            raise ValueError(f"width must be positive, got {width}")
        if width < finest * (1 - 1e-9):
            warnings.warn(
                f"width {width:g} is finer than {self.num_steps} steps resolve: what shows are nodes, not eigenvalues; "
                f"take at least {finest:.3g}, or more steps",
                NumericalWarning,
                stacklevel=2,
            )

        head = _smooth(grid, width, self.head, torch.full_like(self.head, 1 / self.dim))
        text = f"smoothed by a normal kernel of width {width:g}, pointwise"
        if self.tail is None:
            moved = self._moved_density(grid, width)
            bracket = ((head - moved).clamp(min=0), head + moved) if self.rounding else None
            return Estimate(
                name="density", value=head, stderr=torch.zeros_like(head), bracket=bracket, exact=True,
                **self._cost(text),
            )  # fmt: skip
        left = self.dim - len(self.head)
        rules = [self._gauss, self.tail.radau(high), self.tail.radau(low)]
        curves = [left / self.dim * _smooth(grid, width, rule.nodes, rule.weights) for rule in rules]  # (K, grid)
        samples = curves[0].mean(0)
        square = left / self.dim**2 * _smooth(grid, width, rules[0].nodes, rules[0].weights, power=2).mean(0)
        # rules of degree 2m - 1 and 2m differ by what is left of the depth error; a locked value by up to its residual
        depth = torch.stack([(curve.mean(0) - samples).abs() for curve in curves[1:]]).amax(0)
        depth = depth + _smooth(grid, width, self.head, self.head_residuals / self.dim, slope=True)
        depth = depth + self._moved_density(grid, width)
        value = head + samples
        stderr = torch.full_like(value, math.nan)  # of one probe nothing is known
        if self.num_probes > 1:
            stderr = curves[0].std(0, correction=1) / math.sqrt(self.num_probes)
        return Estimate(
            name="density", value=value, stderr=stderr, bracket=((value - depth).clamp(min=0), value + depth),
            rule=ChiSquare(matched_dof(self.num_probes, samples, square, left), offset=head), support=(0.0, math.inf),
            **self._cost(text),
        )  # fmt: skip

    # ------------------------------------------------------------------------------------- nodes and plots

    @property
    def nodes(self) -> Tensor:
        """All nodes, ascending: locked Ritz values and the Gauss nodes of every probe."""
        return self._measure()[0]

    @property
    def weights(self) -> Tensor:
        """The weight of each node; they sum to 1, a locked Ritz value has exactly 1 / P."""
        return self._measure()[1]

    def _measure(self) -> tuple[Tensor, Tensor]:
        nodes, weights = [self.head], [torch.full_like(self.head, 1 / self.dim)]
        if self.tail is not None:
            rule = self._gauss
            share = (self.dim - len(self.head)) / self.dim / self.num_probes
            nodes.append(rule.nodes.flatten())
            weights.append(rule.weights.flatten() * share)
        order = torch.cat(nodes).argsort()
        return torch.cat(nodes)[order], torch.cat(weights)[order]

    @property
    def num_steps(self) -> int:
        """Lanczos steps of the probes; 0 where none were needed."""
        return 0 if self.tail is None else self.tail.alpha.shape[1]

    @property
    def num_probes(self) -> int:
        """Probes; 0 where none were needed."""
        return 0 if self.tail is None else self.tail.alpha.shape[0]

    def range(self) -> tuple[float, float]:
        """Smallest and largest Ritz value."""
        return float(self.lambda_min.value), float(self.lambda_max.value)

    def _span(self) -> float:
        """Largest less smallest Ritz value; 0 where that is round-off."""
        low, high = self.range()
        return high - low if high - low > 64 * self.noise * max(abs(low), abs(high)) else 0.0

    def _default_width(self) -> float:
        """The larger of 1 % of the range and what the steps resolve; for one eigenvalue, 1 % of it."""
        low, high = self.range()
        finest = self._span() / self.num_steps if self.tail is not None else 0.0
        return max(finest, 0.01 * self._span()) or 0.01 * max(abs(low), abs(high)) or 1.0

    def default_grid(self, num: int = 512) -> Tensor:
        """Evenly spaced points over the range and 5 % or five widths beyond it."""
        low, high = self.range()
        margin = max(0.05 * self._span(), 5 * self._default_width())
        return torch.linspace(low - margin, high + margin, num, dtype=torch.float64)

    def plot(self, ax: "Axes | None" = None, *, width: float | None = None) -> "Axes":
        """The smoothed density on a logarithmic scale with its 95 % band, and the locked outliers as ticks."""
        ax = ax or new_axes()
        grid = self.default_grid()
        curve = self.density(grid, width)
        low, high = (torch.as_tensor(end) for end in curve.interval())
        (line,) = ax.plot(grid, curve.value)
        ax.fill_between(grid, low.nan_to_num(), high.nan_to_num(), alpha=0.25, color=line.get_color(), lw=0)
        ax.plot(
            self.head, torch.full_like(self.head, 0.02), "|", color=line.get_color(), transform=ax.get_xaxis_transform()
        )
        top = float(torch.as_tensor(curve.value).max())
        ax.set(yscale="log", ylim=(0.1 / self.dim / (float(grid[-1] - grid[0]) or 1.0), 3 * top))
        ax.set(xlabel="eigenvalue", ylabel="density")
        return ax

    def save(self, path: "str | os.PathLike[str]") -> Path:
        """Write `path`.json and `path`.safetensors; `ritz.load` reads them back equal."""
        return save(self, path)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        lines = [str(e) for e in (self.trace, self.frobenius_norm, self.lambda_max, self.lambda_min)]
        return "\n".join([f"spectrum of a matrix of order {self.dim}: {self.convention}", *lines])

    # --------------------------------------------------------------------------------------------- rounding

    def _around(self, value: float, moved: float | None = None) -> tuple[float, float] | None:
        """What a number that is known but for the products is bracketed by; None where they are right."""
        moved = self.rounding if moved is None else moved
        return (value - moved, value + moved) if moved else None

    def _nuclear_rounding(self) -> float:
        """||E||_*, by which a sum over eigenvalues of a function of slope 1 may move.

        Two probes do not see how many eigenvalues E has: they are taken to be spread as those of H are, by ||H||_* over
        ||H||_F. They may be wider spread; against that `rounding` is several times the norm that is expected.
        """
        if not self.rounding:
            return 0.0
        size = float(self.head.abs().sum())
        if self.tail is not None:
            size += float(self._tail_samples(torch.abs).mean())
        return self.rounding * size / (self._root_of_square() or 1.0)

    def _moved_density(self, grid: Tensor, width: float) -> Tensor:
        """How much the smoothed density changes where every eigenvalue moves by `rounding`."""
        if not self.rounding:
            return torch.zeros_like(grid)
        nodes, weights = self._measure()
        return _smooth(grid, width, nodes, self.rounding * weights, slope=True)

    # --------------------------------------------------------------------------------------------- within

    def _cost(self, text: str) -> dict[str, Any]:
        return {
            "products": self.products, "seed": self.seed, "stop": self.stop, "convention": f"{text}; {self.convention}"
        }  # fmt: skip

    @cached_property
    def _gauss(self) -> Quadrature:
        """The Gauss rules of the probes."""
        assert self.tail is not None
        return self.tail.gauss()

    def _parts(self, name: str, samples: Tensor, text: str) -> dict[str, Estimate]:
        """One estimate for each parameter, from samples (K, len(layers))."""
        exact: dict[str, Any] = {"exact": True, "rule": Exact(), "stderr": 0.0} if self.tail is None else {}
        moved = self.trace_rounding if name == "trace" else self._moved_power(2)
        return {
            layer: replace(
                from_samples(f"{name} of {layer}", column, **self._cost(text)),
                bracket=self._around(float(column.mean()), moved), **exact,
            )
            for layer, column in zip(self.layers, samples.T, strict=True)
        }  # fmt: skip

    def _tail_samples(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """(P - r) v' f(QHQ) v for each unit probe v, (K,)."""
        if f is torch.square and self.tail is not None:  # |QHQv|^2 is known after one step
            return (self.dim - len(self.head)) * (self.tail.alpha[:, 0].square() + self.tail.beta[:, 0].square())
        return (self.dim - len(self.head)) * self._gauss.integrate(f)

    def _average(
        self,
        name: str,
        f: Callable[[Tensor], Tensor],
        head: float,
        text: str,
        *,
        slack: float = 0.0,
        **fields: Any,
    ) -> Estimate:
        """The head's part plus the mean over probes; `slack` is what coupling and rounding may add or take."""
        if self.tail is None:
            bracket = self._around(head, slack)
            return Estimate(name=name, value=head, bracket=bracket, exact=True, **self._cost(text), **fields)
        samples = self._tail_samples(f)
        bracket = self._around(head + float(samples.mean()), slack)
        rule = self._rule(f, samples)
        return from_samples(name, samples, offset=head, bracket=bracket, rule=rule, **self._cost(text), **fields)

    def _rule(self, f: Callable[[Tensor], Tensor], samples: Tensor) -> IntervalRule:
        """Student t once outliers are locked; without, chi-square where f(H) is positive and so the mean is skewed."""
        assert self.tail is not None
        if self.ends or not (self.positive or f is torch.square):
            return StudentT(self.num_probes - 1)
        square = float(self._tail_samples(lambda t: f(t).square()).mean())
        return ChiSquare(matched_dof(self.num_probes, float(samples.mean()), square, self.dim))

    def _bracketed(
        self, name: str, samples: Tensor, low: Tensor, high: Tensor, head: float | tuple[float, float] | list[float],
        text: str, support: tuple[float, float] = (-math.inf, math.inf),
    ) -> Estimate:  # fmt: skip
        """Values between bounds, probe by probe: the bracket is their means, the error the largest of their errors."""
        below, above = head if isinstance(head, tuple | list) else (head, head)
        root = math.sqrt(len(samples))
        stderr = max(float(x.std()) for x in (samples, low, high)) / root if len(samples) > 1 else math.nan
        samples = samples + above
        return Estimate(
            name=name, value=float(samples.mean()), stderr=stderr, samples=samples,
            bracket=(float(low.mean()) + below, float(high.mean()) + above), rule=StudentT(len(samples) - 1),
            support=support, **self._cost(text),
        )  # fmt: skip

    def _negative_bounds(self, tail: Tridiagonal, num: int = 64) -> tuple[Tensor, Tensor]:
        """Bounds on (P - r) times the integral of min(t, 0): minus the area under the distribution function below 0."""
        # as far down as there may be eigenvalues: no further than the random-start bound, or half past the norm
        norm = math.sqrt(float(self._tail_samples(torch.square).mean()))
        bottom = max(float(self.lambda_min.interval()[0]), -1.5 * norm - self.coupling)
        if bottom >= 0:
            return torch.zeros(self.num_probes), torch.zeros(self.num_probes)
        levels = torch.linspace(bottom, 0.0, num + 1, dtype=torch.float64)
        under, over = tail.mass_bounds(levels[:, None])  # (num + 1, K)
        step = -bottom / num * (self.dim - len(self.head))
        return -step * over[1:].sum(0), -step * under[:-1].sum(0)

    def _check_shift(self, shift: float) -> float:
        """A lower bound on the spectrum that the shift covers."""
        # a Ritz value of a positive matrix may be negative by round-off, which the test of the shift below allows for
        floor = min(0.0, float(self.lambda_min.value)) if self.positive else float(self.lambda_min.interval(0.99)[0])
        if not shift > 0:
            raise ValueError(f"shift must be positive, got {shift}")
        if floor + shift <= 0:
            error = IndefiniteError(
                f"the matrix is indefinite, eigenvalues reach down to {floor:.3g}, and log det of H + {shift:g} I does "
                f"not exist; take a shift above {-floor:.3g}, or a positive matrix such as ritz.GGN"
            )
            error.partial = self  # the run is not lost
            raise error
        least = NOISE_MARGIN * max(self.noise * float(self.spectral_norm.value), self.rounding)
        if shift < least:
            raise ValueError(
                f"shift {shift:g} drowns in the round-off of the products; take at least {least:.2g}, or "
                "dtype=torch.float64"
            )
        return floor


def _smooth(grid: Tensor, width: float, nodes: Tensor, weights: Tensor, power: int = 1, slope: bool = False) -> Tensor:
    """sum_j w_j N(x - t_j)^power on the grid, or with the size of its slope in t_j: (..., m) -> (..., len(grid))."""
    z = (grid[:, None] - nodes[..., None, :]) / width
    kernel = torch.exp(-0.5 * z.square()) / (width * math.sqrt(2 * math.pi))
    if slope:
        kernel = kernel * (z.abs() + 0.1) / width  # at the top, where the slope is 0, the next order takes over
    return (kernel**power * weights[..., None, :]).sum(-1)


def _negative(t: Tensor) -> Tensor:
    return t.clamp(max=0.0)
