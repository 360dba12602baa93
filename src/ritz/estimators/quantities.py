"""What one Krylov run says of a spectrum: every number with its sampling error and its bracket.

With r pairs locked and K probes of m steps in what is left (`estimators.spectrum`), for a function f of the matrix H of
order P,

    Tr f(H)  ~  sum_i f(theta_i)  +  (P - r) mean_k sum_j w_kj f(t_kj)

(stochastic Lanczos quadrature; Ubaru, Chen and Saad 2017; theorem 3 of seed 001). For f(t) = t and t^2 the split is
exact however good the locked pairs are. The spread over probes is the sampling error; what they have in common, the
depth of the quadrature and the coupling of head and tail, is a bracket. So is what the products themselves are off by
(`estimators.rounding`), where that is more than round-off: the run then saw H + E in the place of H, with ||E|| at
most `rounding`, and every number is bracketed by how far E may move it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..intervals import ChiSquare, Exact, Hull, IntervalRule, Magnitude, RandomStart, StudentT, matched_dof
from ..krylov.lanczos import BREAKDOWN
from ..krylov.quadrature import Quadrature, gauss, scale
from ..krylov.tridiagonal import Tridiagonal
from ..results import Estimate, from_samples
from ..storage import Result
from . import density, functions
from .forms import centred_moments, moment_rule
from .rounding import Rounding, around

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, kw_only=True)
class Spectrum(Result):
    """The spectrum of a symmetric matrix of order `dim`, from one run. Every number is an `Estimate`.

    Attributes:
        dim: Order of the matrix, P.
        head: Locked Ritz values (r,); all eigenvalues if `complete`.
        head_residuals: Their residual norms (r,).
        coupling: Spectral norm of the residual block between the locked pairs and the rest.
        ends: (smallest, its residual, largest, its residual) Ritz value of the head's whole block space, or empty.
        tail: The tridiagonal matrices of the probes, or None if the head is complete.
        layers: Names of the parameters.
        layer_samples: Per probe and parameter, the trace of its diagonal block and the squared norm of its rows of the
            matrix, (2, K, len(layers)).
        positive: Whether the matrix is positive semi-definite by construction.
        noise: Relative round-off of one product.
        products, seed, stop, convention: See `Estimate`.
        rounding: By how much products in the precision of the run may change an eigenvalue; 0 if only by round-off.
        trace_rounding: By how much they may change the trace, of the whole matrix or of one parameter.

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
            "trace", 1, float(self.head.sum()), "Tr H, sum of eigenvalues", parts=parts,
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
                "moment 2", 2, head, "Tr H^2 = ||H||_F^2", parts=parts, slack=self._moved.power(2),
            )  # fmt: skip
        # second order in the coupling E: |Tr H^k - Tr (H - E)^k| <= k (k - 1) / 2 ||H||^(k-2) ||E||_F^2
        bound = float(self.spectral_norm.value) + self.coupling
        coupled = 0.0 if self.tail is None else float(self.head_residuals.square().sum())
        slack = k * (k - 1) * bound ** (k - 2) * coupled
        return self._average(f"moment {k}", k, head, f"Tr H^{k}", slack=slack + self._moved.power(k))

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
        """Largest eigenvalue: the largest Ritz value theta, which is no larger, and a one-sided interval above it.

        The bracket [theta, theta + r] has the residual r of the Ritz vector: within r of theta, on either side, there
        is an eigenvalue, which need not be the largest.
        """
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
            return Estimate(name=name, value=value, bracket=around(value, self.rounding), exact=True, **cost)
        tail = self.tail.extremes()
        ritz = tail.largest if largest else tail.smallest
        residuals = tail.largest_residual if largest else tail.smallest_residual
        residuals = residuals + self._hidden
        best = int((sign * ritz).argmax())
        # a Ritz pair of QHQ leaks at most the coupling into the locked rows
        found = [(float(ritz[best]), math.hypot(float(residuals[best]), self.coupling))]
        if self.ends:
            found.append((self.ends[2], self.ends[3]) if largest else (self.ends[0], self.ends[1]))
        value, residual = max(found, key=lambda pair: sign * pair[0])
        locked = self.head.tolist() or [-sign * math.inf]
        rule = RandomStart(
            dim=self.dim - len(self.head), num_steps=self.num_steps, num_probes=self.num_probes,
            spread=float(tail.largest.max() - tail.smallest.min()), reach=found[0][0] + sign * float(self._blur.max()),
            locked=max(locked) if largest else min(locked), slack=self.coupling + self.rounding, largest=largest,
        )  # fmt: skip
        low, high = (value, value + residual) if largest else (value - residual, value)
        bracket = (low - self.rounding, high + self.rounding)
        return Estimate(name=name, value=value, bracket=bracket, rule=rule, **cost)

    # --------------------------------------------------------------------------------- functions and masses

    @property
    def negative_trace(self) -> Estimate:
        """Sum of the negative eigenvalues, at most 0."""
        return functions.negative_trace(self)

    def mass(self, below: float) -> Estimate:
        """The fraction of the eigenvalues that are at most `below`, between Chebyshev-Markov-Stieltjes bounds.

        m steps do not determine where around a node an eigenvalue lies, so the bracket does not close with more probes.
        """
        return functions.mass(self, below)

    def logdet(self, shift: float) -> Estimate:
        """log det(H + shift I), between Gauss-Radau and Gauss quadrature.

        The error of a short quadrature is the same for every probe. Their spread does not show it, but the bracket
        does.

        Raises:
            IndefiniteError: If the shift does not make the matrix positive; its `partial` is this spectrum.
            ValueError: If the shift is below the round-off of the products.
        """
        return functions.logdet(self, shift)

    def soft_rank(self, shift: float) -> Estimate:
        """Tr H (H + shift I)^-1, how many directions stand out above `shift`, between Gauss-Radau and Gauss quadrature.

        Also called the effective dimension. It lies between 0 and the rank of a positive matrix.

        Raises:
            IndefiniteError, ValueError: As `logdet` does.
        """
        return functions.soft_rank(self, shift)

    def density(self, grid: Tensor | None = None, width: float | None = None) -> density.Density:
        """The spectral density on a grid, smoothed by a normal kernel of standard deviation `width`.

        (1 / P) sum_i N(x - lambda_i, width^2), with pointwise intervals. The default width is the larger of 1 % of the
        range and range / num_steps, the finest that the quadrature resolves; a smaller one shows single nodes. The
        points are its `.grid`.

        Warns:
            NumericalWarning: If `width` is finer than that.
        """
        return density.smoothed(self, grid, width)

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

    def default_grid(self, num: int = 512) -> Tensor:
        """Evenly spaced points over the range and 5 % or five widths beyond it."""
        return density.default_grid(self, num)

    def plot(self, ax: "Axes | None" = None, *, width: float | None = None) -> "Axes":
        """The smoothed density on a logarithmic scale with its 95 % band, and the locked outliers as ticks."""
        return density.draw(self, ax, width)

    def __repr__(self) -> str:
        return f"Spectrum(dim={self.dim}, {self.trace}, {self.lambda_max}, {self.lambda_min}; {self.stop})"

    def __str__(self) -> str:
        lines = [str(e) for e in (self.trace, self.frobenius_norm, self.lambda_max, self.lambda_min)]
        return "\n".join([f"spectrum of a matrix of order {self.dim}: {self.convention}", *lines])

    # --------------------------------------------------------------------------------------------- within

    def _cost(self, text: str) -> dict[str, Any]:
        return {
            "products": self.products, "seed": self.seed, "stop": self.stop, "convention": f"{text}; {self.convention}"
        }  # fmt: skip

    @cached_property
    def _moved(self) -> Rounding:
        """How far the products may have moved the numbers."""
        if not self.rounding:
            return Rounding(trace=self.trace_rounding)
        nuclear = float(self.head.abs().sum())
        if self.tail is not None:
            nuclear += float(self._tail_samples(torch.abs).mean())
        return Rounding(
            self.rounding, self.trace_rounding, norm=float(self.spectral_norm.value), frobenius=self._root_of_square(),
            nuclear=nuclear,
        )  # fmt: skip

    @property
    def _round_off(self) -> float:
        """Of a product, in the place of the locked pairs: what the tail cannot tell from nothing."""
        return self.noise * float(self.head.abs().max()) if len(self.head) else 0.0

    @cached_property
    def _hidden(self) -> Tensor:
        """How large a beta was taken for round-off where a probe broke down, (K,); 0 where none was.

        The first entry of f(T) is even in beta, and so moves by at most beta^2 / 2 times the largest second derivative.
        """
        assert self.tail is not None
        alpha, beta, eps = self.tail.alpha, self.tail.beta, self.tail.eps
        taken = (BREAKDOWN * eps * scale(alpha, beta)).clamp(min=self._round_off)
        return torch.where((beta == 0).any(1), taken, 0.0)

    @property
    def _blur(self) -> Tensor:
        """How far from the nodes of each probe that broke down eigenvalues may lie, (K,).

        No more than 1 / 16 of its measure is further than 4 times the beta that is hidden (Chebyshev).
        """
        return 4 * self._hidden

    @cached_property
    def _gauss(self) -> Quadrature:
        """The Gauss rules of the probes."""
        assert self.tail is not None
        return self.tail.gauss()

    def _parts(self, name: str, samples: Tensor, text: str) -> dict[str, Estimate]:
        """One estimate for each parameter, from samples (K, len(layers))."""
        exact: dict[str, Any] = {"exact": True, "rule": Exact(), "stderr": 0.0} if self.tail is None else {}
        moved = self._moved.trace if name == "trace" else self._moved.power(2)
        return {
            layer: replace(
                from_samples(f"{name} of {layer}", column, **self._cost(text)),
                bracket=around(float(column.mean()), moved), **exact,
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
        degree: int,
        head: float,
        text: str,
        *,
        slack: float = 0.0,
        **fields: Any,
    ) -> Estimate:
        """Tr H^degree: head's part and mean over probes; `slack` is what coupling and rounding may add or take."""
        if self.tail is None:
            bracket = around(head, slack)
            return Estimate(name=name, value=head, bracket=bracket, exact=True, **self._cost(text), **fields)
        samples = self._tail_samples(torch.square if degree == 2 else lambda t: t**degree)
        bracket = around(head + float(samples.mean()), slack)
        rule = self._rule(degree, samples, head)
        support = (0.0 if self.positive or degree % 2 == 0 else -math.inf, math.inf)
        about = {"bracket": bracket, "rule": rule, "support": support, **self._cost(text), **fields}
        return from_samples(name, samples, offset=head, **about)

    def _rule(self, degree: int, samples: Tensor, head: float) -> IntervalRule:
        """What the moments of H^degree say of the mean's skew, which comes of large eigenvalues that are not locked.

        That asks for Tr H^(3 degree), to which steps of 1.5 `degree` are exact. Fewer have chi-square, with as many
        degrees of freedom as Tr H^(2 degree) says, where H^degree is positive. If they do not give that either, it is
        taken to be no less than the spread of the probes says, and chi-square widens Student t, as it does where
        H^degree may have both signs.
        """
        num, left = self.num_probes, self.dim - len(self.head)
        if 2 * self.num_steps >= 3 * degree:
            return self.rule_by_moments(lambda t: t**degree, self._continued, fourth=self.num_steps >= 2 * degree)
        mean, square = float(samples.mean()), self._left_over(2 * degree)
        known = self.num_steps >= degree
        if known and (self.positive or degree == 2):
            return ChiSquare(matched_dof(num, mean, square, left), head)
        if num == 1:
            return StudentT(0)
        # on the sphere the variance is 2 n / (n + 2) (Tr A^2 - (Tr A)^2 / n); raised for being known from few probes
        seen = (float(samples.var()) * (left + 2) / 2 + mean**2) / left * (num + 1) / (num - 1)
        most = square if known else max(square, seen)
        return Hull((StudentT(num - 1), ChiSquare(matched_dof(num, mean, most, left), head)))

    def rule_by_moments(
        self, f: Callable[[Tensor], Tensor], rules: Quadrature | None = None, fourth: bool = True
    ) -> IntervalRule:
        """The interval of Tr f(H), by `moment_rule`, from the moments of f(H) that quadrature rules have.

        Without the `fourth` it is taken for the largest that there is; of one eigenvalue it is K / (K + 2) of the
        square of the second. Rules of one node have no moments.
        """
        num, left, rules = self.num_probes, self.dim - len(self.head), rules or self._gauss
        if rules.nodes.shape[-1] == 1 or not bool(f(rules.nodes).isfinite().all()):
            return StudentT(num - 1)
        root, cube, square = map(float, centred_moments(rules, f))
        if not root:
            return Exact()
        return moment_rule(
            num, math.sqrt(left) * root, cube * root, num**2 / (num + 2) * left / square if fourth else num
        )

    def skewed_t(self, f: Callable[[Tensor], Tensor]) -> IntervalRule:
        """The interval of Tr f(H) for an f that is no power: Student t, widened by `rule_by_moments`."""
        return Hull((StudentT(self.num_probes - 1), self.rule_by_moments(f)))

    def _left_over(self, k: int) -> float:
        """Tr of the k-th power of what the head leaves over, the mean over probes; exact up to k = 2 m."""
        return (self.dim - len(self.head)) * float(self._continued.integrate(lambda t: t**k).mean())

    @cached_property
    def _continued(self) -> Quadrature:
        """Rules of one node more than Gauss, exact to degree 2 m: T continued by beta_m and any last entry."""
        assert self.tail is not None
        return gauss(torch.cat([self.tail.alpha, self.tail.alpha[:, :1]], dim=1), self.tail.beta)
