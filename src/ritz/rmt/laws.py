"""Laws of the eigenvalues of noise: where the bulk lies, and how a spike and the outlier that it leaves are related.

    law                  noise                                          spike
    `Semicircle`         X symmetric, entries of variance s2 / P        added:       nu u u' + X
    `MarchenkoPastur`    S = Z'Z / n, rows of Z white, n x P            population:  covariance v I + (l - v) u u'

Both are limits for large P. A spike below the threshold of Baik, Ben Arous and Péché (2005) leaves no eigenvalue
outside of the bulk. A spike above it leaves an outlier that lies further out than the spike, and whose eigenvector
deviates from the direction of the spike by a known angle.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_HALVINGS = 60  # of an interval: a float64 has 53 bits


@dataclass(frozen=True)
class Semicircle:
    """Wigner's law of a symmetric P x P matrix, P large, whose entries have mean 0 and variance s2 / P.

        p(x) = sqrt(4 s2 - x^2) / (2 pi s2)    for |x| <= 2 sqrt(s2)

    s2 is the mean of the squared eigenvalues, Tr X^2 / P, which `ritz.curvature_noise` estimates. Equation 7 of seed
    004 has sqrt(2 P^2 - x^2) instead of the root, and its proof of theorem 1 puts the edge at sigma sqrt(P / B). With
    entries of variance sigma^2 / B the edge is 2 sigma sqrt(P / B) (see `of_entries`), and sigma sqrt(P / B) is the
    threshold of a spike.

    Example:
        >>> law = Semicircle(s2=1.0)
        >>> law.edges, law.threshold, law.moment(4), float(law.cdf(0.0))
        ((-2.0, 2.0), 1.0, 2.0, 0.5)
        >>> outlier = law.outlier(2.0)  # a spike of 2 shows as 2 + 1 / 2
        >>> float(outlier), float(law.spike(outlier)), float(law.overlap(2.0))
        (2.5, 2.0, 0.75)
    """

    s2: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.s2) and self.s2 > 0):
            raise ValueError(f"s2, the mean of the squared eigenvalues, must be positive and finite, got {self.s2}")

    @classmethod
    def of_entries(cls, sigma: float, dim: int, batch_size: int, num_samples: float = math.inf) -> "Semicircle":
        """The law if the entries of H_batch - H have variance sigma^2 (1 / B - 1 / N): s2 = P sigma^2 (1 / B - 1 / N).

        This is the correct form of equation 7 of seed 004, with the factor of its equation A.3. N is infinite if H is
        the curvature of the distribution that the data were drawn from.

        Example:
            >>> Semicircle.of_entries(sigma=0.1, dim=10_000, batch_size=100).edges  # 2 sigma sqrt(P / B)
            (-2.0, 2.0)
        """
        if not 1 <= batch_size < num_samples or dim < 1:
            raise ValueError(
                f"expected dim >= 1 and 1 <= batch_size < num_samples, got dim = {dim}, batch_size = {batch_size} and "
                f"num_samples = {num_samples}"
            )
        return cls(dim * sigma**2 * (1 / batch_size - 1 / num_samples))

    @property
    def edges(self) -> tuple[float, float]:
        """-2 sqrt(s2) and 2 sqrt(s2)."""
        return -2 * math.sqrt(self.s2), 2 * math.sqrt(self.s2)

    @property
    def zeros(self) -> float:
        """The share of eigenvalues that are exactly 0: none."""
        return 0.0

    def edge_scale(self, dim: int) -> float:
        """Width of the edge at finite P: (lambda_1 - 2 sqrt(s2)) / (sqrt(s2) P^(-2/3)) has the law of Tracy and Widom.

        For real symmetric matrices, beta = 1 (Tracy and Widom 1996); entries need not be normal (Soshnikov 1999).
        """
        return math.sqrt(self.s2) * math.pow(_order(dim), -2 / 3)

    def density(self, x: float | Tensor) -> Tensor:
        """sqrt(4 s2 - x^2) / (2 pi s2), 0 outside of the bulk."""
        return (4 * self.s2 - _double(x).square()).clamp(min=0.0).sqrt() / (2 * math.pi * self.s2)

    def cdf(self, x: float | Tensor) -> Tensor:
        """1 / 2 + x sqrt(4 s2 - x^2) / (4 pi s2) + asin(x / (2 sqrt(s2))) / pi."""
        z = (_double(x) / self.edges[1]).clamp(-1.0, 1.0)
        low, high = (1 + z).sqrt(), (1 - z).sqrt()
        return (z * low * high + 2 * torch.atan2(low, high)) / math.pi  # an arc sine loses digits at the edges

    def quantile(self, q: float | Tensor) -> Tensor:
        """The inverse of `cdf`."""
        return _invert(self.cdf, _level(q), *self.edges)

    def moment(self, k: int) -> float:
        """C_{k/2} s2^(k/2) with Catalan's numbers, 0 for odd k."""
        half = _power(k) // 2
        return 0.0 if k % 2 else math.comb(k, half) / (half + 1) * self.s2**half

    @property
    def threshold(self) -> float:
        """sqrt(s2): a spike nu leaves an outlier only if |nu| is above it."""
        return math.sqrt(self.s2)

    def outlier(self, nu: float | Tensor) -> Tensor:
        """The eigenvalue that the spike nu leads to: nu + s2 / nu above the threshold, else the edge on its side.

        (Benaych-Georges and Nadakuditi 2011, section 3.1.) The edge is 0 for nu = 0.
        """
        nu = _double(nu)
        seen = nu.abs() > self.threshold
        return torch.where(seen, nu + self.s2 / torch.where(seen, nu, 1.0), nu.sign() * self.edges[1])

    def spike(self, eigenvalue: float | Tensor) -> Tensor:
        """The spike behind an outlier: (lambda + sqrt(lambda^2 - 4 s2)) / 2, with the sign of lambda; 0 in the bulk."""
        return spike_behind(_double(eigenvalue), self.s2)

    def overlap(self, nu: float | Tensor) -> Tensor:
        """Squared cosine between the spike's direction and the outlier's eigenvector: 1 - s2 / nu^2, else 0.

        Theorem 1 of seed 004, where s2 is written P sigma^2 / B.
        """
        return spike_overlap(_double(nu), self.s2)


@dataclass(frozen=True)
class MarchenkoPastur:
    """The law of the P eigenvalues of Z'Z / n, Z of n rows and P columns with independent entries of variance v.

        p(x) = sqrt((b - x) (x - a)) / (2 pi r v x),    a, b = v (1 -/+ sqrt(r))^2,    r = P / n

    and, for r > 1, a share 1 - 1 / r of zeros (Marchenko and Pastur 1967). It is the law of a covariance of gradients,
    an empirical Fisher or a Gauss-Newton matrix that is an average of n outer products of white vectors. The deviation
    of such an average from its mean has s2 = r v^2 and skewness sqrt(r): a `Semicircle` only in the limit of r to 0.

    Example:
        >>> law = MarchenkoPastur(ratio=0.25)
        >>> law.edges, law.threshold, law.moment(2)
        ((0.25, 2.25), 1.5, 1.25)
        >>> outlier = law.outlier(2.0)
        >>> float(outlier), float(law.spike(outlier)), float(law.overlap(2.0))
        (2.5, 2.0, 0.6)
    """

    ratio: float
    variance: float = 1.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(x) and x > 0 for x in (self.ratio, self.variance)):
            raise ValueError(
                f"expected ratio (columns / rows) and variance positive and finite, got {self.ratio}, {self.variance}"
            )

    @property
    def edges(self) -> tuple[float, float]:
        """v (1 - sqrt(r))^2 and v (1 + sqrt(r))^2."""
        root = math.sqrt(self.ratio)
        return self.variance * (1 - root) ** 2, self.variance * (1 + root) ** 2

    @property
    def zeros(self) -> float:
        """The share of eigenvalues that are exactly 0."""
        return max(0.0, 1 - 1 / self.ratio)

    def edge_scale(self, dim: int) -> float:
        """Width of the upper edge at finite P = `dim`, n = P / r: Tracy and Widom's law in these units.

        v / n (sqrt(n) + sqrt(P)) (1 / sqrt(n) + 1 / sqrt(P))^(1/3) (Johnstone 2001).
        """
        columns, rows = math.sqrt(_order(dim)), math.sqrt(dim / self.ratio)
        return self.variance / rows**2 * (rows + columns) * math.cbrt(1 / rows + 1 / columns)

    def density(self, x: float | Tensor) -> Tensor:
        """sqrt((b - x) (x - a)) / (2 pi r v x), 0 outside of the bulk; the share of zeros is not part of it."""
        x = _double(x)
        low, high = self.edges
        inside = (x > low) & (x < high)
        safe = torch.where(inside, x, 1.0)
        root = ((high - safe) * (safe - low)).clamp(min=0.0).sqrt()
        return torch.where(inside, root / (2 * math.pi * self.ratio * self.variance * safe), 0.0)

    def cdf(self, x: float | Tensor) -> Tensor:
        """The share of zeros plus the integral of the density, in closed form."""
        given = _double(x)
        low, high = self.edges
        x = given.clamp(low, high)
        above, below = (x - low).sqrt(), (high - x).sqrt()
        first = 2 * torch.atan2(above, below)
        second = 2 * torch.atan2(math.sqrt(high) * above, math.sqrt(low) * below)
        area = above * below + (low + high) / 2 * first - math.sqrt(low * high) * second
        inside = area / (2 * math.pi * self.ratio * self.variance)
        return torch.where(given < 0, 0.0, (self.zeros + inside).clamp(0.0, 1.0))

    def quantile(self, q: float | Tensor) -> Tensor:
        """The inverse of `cdf`, 0 for q up to the share of zeros."""
        q = _level(q)
        found = _invert(self.cdf, q, *self.edges)
        return torch.where(q <= self.zeros, 0.0, found) if self.zeros else found

    def moment(self, k: int) -> float:
        """v^k sum_j r^j / (j + 1) C(k, j) C(k - 1, j), with Narayana's numbers."""
        terms = (self.ratio**j / (j + 1) * math.comb(k, j) * math.comb(k - 1, j) for j in range(_power(k)))
        return self.variance**k * (sum(terms) if k else 1.0)

    @property
    def threshold(self) -> float:
        """v (1 + sqrt(r)): a population eigenvalue above it leaves an outlier."""
        return self.variance * (1 + math.sqrt(self.ratio))

    def outlier(self, population: float | Tensor) -> Tensor:
        """The eigenvalue that a population eigenvalue l leads to: l (1 + r v / (l - v)) if l is above the threshold.

        At or below the threshold it is the upper edge (Baik and Silverstein 2006).
        """
        value = _double(population)
        seen = value > self.threshold
        safe = torch.where(seen, value, 2 * self.threshold)
        return torch.where(seen, safe * (1 + self.ratio * self.variance / (safe - self.variance)), self.edges[1])

    def spike(self, eigenvalue: float | Tensor) -> Tensor:
        """The population eigenvalue behind an outlier above the upper edge; otherwise v, which is no spike."""
        x = _double(eigenvalue) / self.variance
        mid = x + 1 - self.ratio
        root = (mid.square() - 4 * x).clamp(min=0.0).sqrt()
        return torch.where(_double(eigenvalue) > self.edges[1], self.variance * (mid + root) / 2, self.variance)

    def overlap(self, population: float | Tensor) -> Tensor:
        """Squared cosine of the eigenvectors: (1 - r v^2 / (l - v)^2) / (1 + r v / (l - v)), else 0 (Paul 2007)."""
        value = _double(population)
        seen = value > self.threshold
        gap = torch.where(seen, value / self.variance - 1, 1.0)
        return torch.where(seen, (1 - self.ratio / gap.square()) / (1 + self.ratio / gap), 0.0)


Law = Semicircle | MarchenkoPastur


def spike_behind(eigenvalue: Tensor, s2: float | Tensor) -> Tensor:
    """The inverse of nu + s2 / nu on the side of the eigenvalue, 0 where |eigenvalue| <= 2 sqrt(s2)."""
    gap = eigenvalue.square() - 4 * s2
    nu = eigenvalue.sign() * (eigenvalue.abs() + gap.clamp(min=0.0).sqrt()) / 2
    return torch.where(gap > 0, nu, 0.0)


def spike_overlap(nu: Tensor, s2: float | Tensor) -> Tensor:
    """1 - s2 / nu^2 where nu^2 > s2, else 0."""
    square = nu.square()
    seen = square > s2
    return torch.where(seen, 1 - s2 / torch.where(seen, square, 1.0), 0.0)


def _double(x: float | Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def _level(q: float | Tensor) -> Tensor:
    q = _double(q)
    if not bool(((q >= 0) & (q <= 1)).all()):
        raise ValueError(f"the level of a quantile must lie between 0 and 1, got {q.tolist()}")
    return q


def _order(dim: int) -> int:
    if dim < 1:
        raise ValueError(f"dim, the order of the matrix, must be at least 1, got {dim}")
    return dim


def _power(k: int) -> int:
    if k < 0:
        raise ValueError(f"k, the order of the moment, must be at least 0, got {k}")
    return k


def _invert(cdf: Callable[[Tensor], Tensor], q: Tensor, low: float, high: float) -> Tensor:
    """The point at which a rising function reaches q, by bisection."""
    below, above = torch.full_like(q, low), torch.full_like(q, high)
    for _ in range(_HALVINGS):
        mid = (below + above) / 2
        short = cdf(mid) < q
        below, above = torch.where(short, mid, below), torch.where(short, above, mid)
    return torch.where(q <= 0, low, torch.where(q >= 1, high, (below + above) / 2))
