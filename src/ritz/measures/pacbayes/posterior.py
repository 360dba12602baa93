"""Noise on the weights: the expected loss of a normal posterior around them, and how wide it may be.

Equation 8 of seed 002 is meant to be the expected loss, which is sampled here; Jiang et al. (2020) ask how wide the
posterior may be before accuracy falls. sigma is always the standard deviation. Noise is keyed like probes, so two
solutions of one network get the same draws.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...batches import Batch
from ...errors import NonFiniteError, NumericalWarning, UnsupportedError, callers_level
from ...intervals import Exact, IntervalRule, StudentT
from ...krylov.eigen import EigenPairs
from ...operators.base import full_precision
from ...reducers import Mean
from ...results import Estimate, from_samples
from ...risk import Params, Progress, Risk
from ...space import row_products
from ..answers import answered

_REACH = 20  # doublings or halvings in search of a sigma
_CLOSE = 1e-3  # ten draws cannot resolve sigma within a bracket as narrow as this

# ------------------------------------------------------------------------------- the expected loss


@dataclass(frozen=True, eq=False)
class Posterior:
    """A normal distribution around the weights, with variance sigma^2 except along some orthonormal directions.

        N(w, sigma^2 (I - U U') + U diag(variances) U')

    Attributes:
        sigma: Standard deviation in every direction orthogonal to `vectors`.
        vectors: U, orthonormal columns (dim, k), or None.
        variances: Variances along these columns (k,), or None.

    Example:
        >>> one = Posterior(0.5, torch.eye(3)[:, :1], torch.tensor([4.0]))
        >>> one.shape_noise(torch.tensor([[1.0, 1.0, 1.0]])).tolist()
        [[2.0, 0.5, 0.5]]
    """

    sigma: float
    vectors: Tensor | None = None
    variances: Tensor | None = None

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        if (self.vectors is None) != (self.variances is None):
            raise ValueError("give both vectors and variances, or neither")
        if self.vectors is None or self.variances is None:
            return
        if self.vectors.ndim != 2 or self.variances.shape != (self.vectors.shape[1],):
            raise ValueError(
                f"expected vectors (dim, k) and variances (k,), got {tuple(self.vectors.shape)} and "
                f"{tuple(self.variances.shape)}"
            )
        if not bool((self.variances > 0).all()):
            raise ValueError(f"variances must be positive, got {float(self.variances.min()):g}")

    def shape_noise(self, rows: Tensor) -> Tensor:
        """Draws of w' - w, from standard normal rows (k, dim)."""
        if self.vectors is None or self.variances is None:
            return self.sigma * rows
        basis = self.vectors.to(rows)
        inner = row_products(rows, basis.T).to(rows)  # (k, num of vectors)
        return self.sigma * rows + (inner * (self.variances.to(rows).sqrt() - self.sigma)) @ basis.T


def laplace_posterior(pairs: EigenPairs, num_samples: int, sigma: float = 1.0, *, rest: float = 0.0) -> Posterior:
    """The Laplace posterior N(w, (N H + I / sigma^2)^-1) with H known by its top eigenpairs.

    Args:
        pairs: Largest eigenpairs of a positive matrix, the GGN: ritz.top_eigenpairs(ritz.GGN(risk)).
        num_samples: N, the number of items that the loss averages over.
        sigma: Standard deviation of the prior.
        rest: Value assumed for all other eigenvalues. With 0, the posterior in their directions is the prior; their
            mean, (Tr H - sum of values) / (P - k), is better.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> A = DenseOperator(torch.diag(torch.tensor([3.0, 0.0, 0.0])))
        >>> q = laplace_posterior(ritz.top_eigenpairs(A, k=1), num_samples=5)
        >>> q.sigma, [round(v, 4) for v in q.variances.tolist()]  # 1 / (5 * 3 + 1)
        (1.0, [0.0625])
    """
    check_sigma(sigma)
    if not num_samples >= 1 or not 0 <= rest < math.inf:
        raise ValueError(f"num_samples must be at least 1 and rest not negative, got {num_samples} and {rest}")
    if bool((pairs.values < -pairs.residuals).any()):
        raise ValueError(
            f"a Laplace posterior needs a positive semi-definite matrix, but an eigenvalue is "
            f"{float(pairs.values.min()):.3g} ({pairs.convention}); use ritz.top_eigenpairs(ritz.GGN(risk))"
        )
    precision = sigma**-2
    variances = 1 / (num_samples * pairs.values.clamp(min=0) + precision)
    return Posterior((num_samples * rest + precision) ** -0.5, pairs.vectors, variances)


@full_precision()
def expected_loss(
    risk: Risk,
    posterior: Posterior | float,
    *,
    num_draws: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> Estimate:
    """E L(w') for w' drawn from a normal posterior around the weights: the left side of equation 8 of seed 002 over -N.

    Draws come in pairs w + u and w - u, so that terms odd in u cancel; the standard error is over pairs.

    Args:
        risk: The solution.
        posterior: A `Posterior`, or the sigma of N(w, sigma^2 I).
        num_draws: An even number; each draw is one pass over the data.
        seed: Seed of the draws.
        progress: Called with (draws done, draws).

    Raises:
        NonFiniteError: If the loss of a draw is not finite.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 1), model.weight.detach().clone()))
        >>> low, high = expected_loss(risk, 0.5, num_draws=100).interval()  # E (0.5 z)^2
        >>> low < 0.25 < high
        True
    """
    posterior = posterior if isinstance(posterior, Posterior) else Posterior(float(posterior))
    if num_draws < 2 or num_draws % 2:
        raise ValueError(f"draws come in pairs: num_draws must be even and at least 2, got {num_draws}")
    if posterior.vectors is not None and len(posterior.vectors) != risk.dim:
        raise ValueError(f"the posterior has {len(posterior.vectors)} dimensions, the risk {risk.dim} parameters")
    risk.check()
    losses = []
    for draw, params in enumerate(around(risk, range(num_draws // 2), seed, posterior.shape_noise, both=True)):
        mean = _loss_at(risk, params)
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"the loss is {mean} at draw {draw}, though finite at the weights themselves: sigma = "
                f"{posterior.sigma:g} is too large, give a smaller one"
            )
        losses.append(mean)
        if progress is not None:
            progress(draw + 1, num_draws)
    pairs = torch.tensor(losses, dtype=torch.float64).reshape(-1, 2).mean(1)
    shape = "" if posterior.vectors is None else f", its own variance along {posterior.vectors.shape[1]} directions"
    text = f"mean loss over w' ~ N(w, sigma^2 I), sigma = {posterior.sigma:g}{shape}, {num_draws} draws in pairs"
    return from_samples("expected loss", pairs, seed=seed, convention=f"{text}; {risk.convention()}")


def _loss_at(risk: Risk, params: Params) -> float:
    def ask() -> Tensor:
        return risk.fold(lambda _, batch: risk.total_and_weight(params, batch), Mean())  # type: ignore[no-any-return]

    return float(answered(params.values(), ask))


def around(
    risk: Risk, indices: Sequence[int], seed: int, noise: Callable[[Tensor], Tensor], *, both: bool = False
) -> Iterator[Params]:
    """Parameters at w + u for each keyed draw u, and at w - u if `both`; one draw in memory at a time.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 1)))
        >>> up, down = around(risk, [0], 0, lambda z: 0.1 * z, both=True)
        >>> torch.allclose((up["weight"] + down["weight"]) / 2, model.weight)
        True
    """
    weights = risk.space.join(risk.params())
    for index in indices:
        z = risk.space.probes([index], seed, "normal", dtype=risk.dtype, device=risk.device)
        u = noise(z)[0]
        for sign in (1, -1) if both else (1,):
            yield risk.space.split(weights + sign * u)


# ------------------------------------------------------------------------------- how much noise accuracy allows


@full_precision()
def sigma_search(
    risk: Risk,
    drop: float = 0.1,
    *,
    adaptive: bool = False,
    num_draws: int = 10,
    num_steps: int = 15,
    seed: int = 0,
    progress: Progress | None = None,
) -> Estimate:
    """The largest sigma with E accuracy(w + sigma u) >= accuracy(w) - drop, u standard normal (Jiang et al. 2020).

    Starting from the size of a weight, sigma is doubled or halved until the answer is bracketed, then bisected on a
    logarithmic scale with the same draws at each step. The value is the lower end of the bracket; its standard error
    comes from that of the mean accuracy over draws.

    At a nominal 95 %, the interval covers 94 to 97 % for a network with 200 items, with 4 or 10 draws. It covers less
    with so few items that a single mistake costs as much accuracy as `drop`: with 11 items and a drop of 0.1, 68 % with
    4 draws, 71 to 80 % with 10 and 85 % with 30, since the draws in which a mistake happens are few.

    Args:
        risk: The solution on its training data.
        drop: How much accuracy may be lost.
        adaptive: Noise of standard deviation sigma |w_i|, in proportion to each weight, for the magnitude-aware
            measures; rescaling layers does not change the result.
        num_draws: Draws at each sigma; each is one pass over the data.
        num_steps: Largest number of bisections; they stop early once the bracket is within 0.1 %.
        seed: Seed of the draws.
        progress: Called with (passes done, passes expected).

    Warns:
        NumericalWarning: If no sigma is too large (the value is then infinite), or none is small enough (then 0).

    Example:
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> model.weight.data[:] = torch.tensor([[1.0], [-1.0]])
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), (torch.ones(1, 1), torch.tensor([0])))
        >>> sigma = sigma_search(risk, 0.25, num_draws=50, seed=1)  # accuracy Phi(sqrt(2) / sigma)
        >>> low, high = sigma.interval()
        >>> low < math.sqrt(2) / 0.6745 < high  # Phi(0.6745) = 0.75
        True
    """
    if not 0 < drop < 1:
        raise ValueError(f"drop must lie strictly between 0 and 1, got {drop}")
    if num_draws < 1 or num_steps < 1:
        raise ValueError(f"num_draws and num_steps must be at least 1, got {num_draws} and {num_steps}")
    classes = num_classes(risk)
    risk.check()
    weights = risk.space.join(risk.params())
    accuracy, items = accuracy_at(risk, risk.params())
    if accuracy - drop <= 1 / classes:
        raise UnsupportedError(
            f"accuracy {accuracy:.3g} minus drop={drop:g} is no better than guessing among {classes} classes, which "
            "any noise allows; give a smaller drop, or a network that has learned more"
        )
    curve = _Curve(risk, weights.abs() if adaptive else 1.0, num_draws, seed, progress, num_steps)
    start = 1.0 if adaptive else float(weights.double().square().mean().sqrt()) or 1.0
    low, high = curve.bracket(accuracy - drop, start)
    for _ in range(num_steps if low > 0 and high < math.inf else 0):
        if high <= (1 + _CLOSE) * low:
            break
        middle = math.sqrt(low * high)
        low, high = (middle, high) if curve(middle) >= accuracy - drop else (low, middle)
    scale = "sigma |w_i|" if adaptive else "sigma"
    text = (
        f"largest sigma with E accuracy >= {accuracy:.4f} - {drop:g}, noise of standard deviation {scale}, "
        f"{num_draws} draws, {items} items"
    )
    found = low > 0 and high < math.inf
    rule: IntervalRule = StudentT(num_draws - 1) if found else Exact()
    return Estimate(
        name="sigma", value=low if high < math.inf else math.inf, bracket=(low, high), support=(0.0, math.inf),
        seed=seed, products=curve.passes, stop=_verdict(low, high, drop), convention=f"{text}; {risk.convention()}",
        stderr=curve.error(accuracy - drop) if found else 0.0, rule=rule,
    )  # fmt: skip


class _Curve:
    """Accuracy under noise as a function of sigma, draw by draw; remembers its evaluations."""

    def __init__(
        self, risk: Risk, scale: Tensor | float, num_draws: int, seed: int, progress: Progress | None, num_steps: int
    ) -> None:
        self.risk, self.scale, self.num_draws, self.seed, self.progress = risk, scale, num_draws, seed, progress
        self.expected = num_draws * num_steps
        self.passes = 0
        self.seen: dict[float, Tensor] = {}  # accuracies (num_draws,) at each sigma

    def __call__(self, sigma: float) -> float:
        """The mean over draws."""
        found = []
        for params in around(self.risk, range(self.num_draws), self.seed, lambda z: sigma * self.scale * z):
            found.append(accuracy_at(self.risk, params)[0])
            self.passes += 1
            if self.progress is not None:
                self.progress(self.passes, max(self.expected, self.passes))
        self.seen[sigma] = torch.tensor(found, dtype=torch.float64)
        return float(self.seen[sigma].mean())

    def bracket(self, target: float, start: float) -> tuple[float, float]:
        """Two neighbours in a geometric sequence, accurate enough at the lower one; 0 or infinity if there is none."""
        low, high, sigma = 0.0, math.inf, start
        for _ in range(_REACH):
            if self(sigma) >= target:
                low, sigma = sigma, 2 * sigma
            else:
                high, sigma = sigma, sigma / 2
            if low and high < math.inf:
                break
        return low, high

    def error(self, target: float) -> float:
        """Standard error of the sigma at which the mean over draws falls below the target.

        Half the width of the interval in which the mean is within its own error of the target (Woodruff 1952). Unlike
        the jackknife, this is right even if the accuracy of every draw is a step function. A 95 % error is used, and
        the width divided by the same factor: the mean of few draws falls in steps, and with one standard error a step
        that happens to lie at the target would suggest that sigma is known exactly.
        """
        from scipy.stats import t

        if self.num_draws < 2:
            return math.nan
        places = sorted(self.seen)
        table = torch.stack([self.seen[sigma] for sigma in places])  # (places, draws)
        mean, error = table.mean(1), table.std(1) / math.sqrt(self.num_draws)
        reach = float(t.ppf(0.975, self.num_draws - 1))
        low, high = (_crossing(places, (mean + side * reach * error).tolist(), target) for side in (-1, 1))
        return (high - low) / (2 * reach)


def _crossing(places: Sequence[float], values: Sequence[float], target: float) -> float:
    """Where values first fall below the target, interpolated on a logarithmic scale; else the nearest end."""
    for place, (left, right) in enumerate(itertools.pairwise(values)):
        if left >= target > right:
            share = (left - target) / (left - right)
            return math.exp((1 - share) * math.log(places[place]) + share * math.log(places[place + 1]))
    return places[0] if values[0] < target else places[-1]


def _verdict(low: float, high: float, drop: float) -> str:
    """Why the search ended, with a warning if it found nothing."""
    if low and high < math.inf:
        return f"bracket within {high / low - 1:.1g}"
    if high < math.inf:
        stop = f"no sigma found: accuracy falls by more than {drop:g} already at sigma = {high:.3g}"
    else:
        stop = f"no sigma found: accuracy does not fall by {drop:g} up to sigma = {low:.3g}"
    warnings.warn(f"{stop}; give another drop", NumericalWarning, stacklevel=callers_level())
    return stop


def accuracy_at(risk: Risk, params: Params) -> tuple[float, int]:
    """The share of items with a positive margin, not weighted by class, and the number of items.

    Example:
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> data = torch.tensor([[1.0], [2.0], [-3.0]]), torch.tensor([0, 0, 0])
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), data)
        >>> share, items = accuracy_at(risk, {"weight": torch.tensor([[1.0], [-1.0]])})
        >>> round(share, 4), items
        (0.6667, 3)
    """

    def counts(_: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        items = risk.output_loss.items(risk.output(params, batch), batch.data)
        assert items.margin is not None
        seen = items.weight != 0
        return (seen & (items.margin > 0)).sum().double(), seen.sum().double()

    def ask() -> Tensor:
        mean = Mean()
        share = risk.fold(counts, mean)
        assert mean.weight is not None
        return torch.stack([share, mean.weight])

    share, items = answered(params.values(), ask).tolist()
    return share, int(items)


def num_classes(risk: Risk, *, one_item: bool = False) -> int:
    """The number of classes.

    Raises:
        UnsupportedError: If predictions are neither right nor wrong, or (with `one_item`) a sample has several.

    Example:
        >>> data = torch.ones(1, 4), torch.tensor([2])
        >>> num_classes(ritz.Risk(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), data))
        3
    """
    loss = risk.output_loss
    batch = next(iter(risk.batches))
    batch = batch.head(2) if risk.splittable else batch
    with risk.session():
        items = loss.items(risk.output(risk.params(), batch), batch.data)
    if items.margin is None or items.logits is None:
        raise UnsupportedError("accuracy needs classes and hard labels, which this loss does not have")
    if items.logits.shape[-1] < 2:
        raise UnsupportedError("accuracy needs at least two classes, this network has one")
    if one_item and len(items.margin) != batch.size:
        raise UnsupportedError(
            "the bound needs independent predictions, but each sample holds "
            f"{len(items.margin) // batch.size} predictions, which are not independent of each other"
        )
    return int(items.logits.shape[-1])


def check_sigma(sigma: float) -> None:
    """Refuse a standard deviation that is not positive and finite.

    Example:
        >>> check_sigma(0.0)
        Traceback (most recent call last):
        ValueError: sigma must be positive and finite, got 0.0
    """
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
