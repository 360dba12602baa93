"""Whether the error bars of a number mean what they say."""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..results import Estimate
from ..storage import load
from .trial import require


def check_estimator(
    estimate_fn: Callable[[int], Estimate],
    truth: float | Tensor,
    *,
    num_seeds: int = 300,
    level: float = 0.95,
    low: float = 0.91,
    high: float = 0.99,
    unbiased: bool = True,
    rtol: float = 1e-8,
) -> float:
    """Check the error bars of an estimator over many seeds, against a known truth.

    An exact estimate must equal the truth and have no standard error. A sampled one must be right on average, to four
    standard errors of the mean over seeds (and the width of its bracket, where it has one), its interval must hold the
    truth neither too seldom nor too often, and its standard errors must be of the size of the spread of its values over
    seeds, to a factor of two and what so many seeds cannot tell. In both cases the same seed must give the same result,
    a saved one must load equal to itself, the samples must be those of the value, and products, seed and convention
    must be filled in.

    Args:
        estimate_fn: From a seed to an `Estimate`.
        truth: The number that is estimated, or a tensor of them; coverage is then the mean over its entries.
        num_seeds: Seeds 0 ... num_seeds - 1.
        level: Level of the interval.
        low: Smallest coverage allowed.
        high: Largest; 1.0 for quantities with one-sided bounds or brackets, which hold every time, and whose standard
            errors may then be too large.
        unbiased: Ask for the right mean; False where the value is a bound, as a Ritz value is of an eigenvalue.
        rtol: Relative error that counts as none, for exact estimates.

    Returns:
        The coverage, 1.0 for exact estimates.

    Raises:
        AssertionError: Names the first check that fails, with the size of the error.

    Example:
        >>> from ritz.operators import DenseOperator
        >>> side = torch.diag(torch.ones(49, dtype=torch.float64), 1)
        >>> A = DenseOperator(side + side.T + 2 * torch.eye(50, dtype=torch.float64))
        >>> coverage = check_estimator(lambda seed: ritz.trace(A, "hutchinson", 8, seed), 100.0)
        >>> 0.91 <= coverage <= 0.99
        True
    """
    if num_seeds < 2:
        raise ValueError(f"num_seeds must be at least 2, got {num_seeds}")
    goal = torch.as_tensor(truth).double().cpu()
    estimates = [estimate_fn(seed) for seed in range(num_seeds)]
    for estimate in (estimates[0], estimates[-1]):
        _check_record(estimate, goal)
        _check_nesting(estimate, level)
        _check_samples(estimate)
    name = estimates[0].name
    require(estimate_fn(0) == estimates[0], f"{name}: the same seed gives another result")
    _check_storage(estimates[0])
    values = torch.stack([torch.as_tensor(e.value).double().cpu() for e in estimates])  # (seeds, ...)
    errors = torch.stack([torch.as_tensor(e.stderr).double().cpu().expand(goal.shape) for e in estimates])
    exact = [e.exact for e in estimates]
    if any(exact):
        _check_exact(name, values[exact], errors[exact], goal, rtol)
    if all(exact) or (not bool(errors.any()) and _error(values, goal) <= rtol):  # sampled, and yet nothing was random
        return 1.0
    require(bool((values != values[0]).any()), f"{name}: every seed gives {values[0].flatten()[0]:.6g}; is it used?")
    if unbiased:
        _check_mean(estimates, values, goal)
    coverage = _check_coverage(estimates, goal, level, low, high)
    sampled = [not e for e in exact]
    averaged = bool(errors.any()) or not any(e.bracket for e in estimates)  # Ritz values have a bracket alone
    if averaged and sum(sampled) > 1:
        _check_stderr(name, values[sampled], errors[sampled], high)
    return coverage


def _error(values: Tensor, goal: Tensor) -> float:
    """The largest error, relative to the largest entry of the truth."""
    apart, size = float((values - goal).abs().max()), float(goal.abs().max())
    return apart / size if size else apart


def _check_record(estimate: Estimate, goal: Tensor) -> None:
    """What a number must say of itself."""
    name = estimate.name
    require(isinstance(estimate, Estimate), f"expected an Estimate, got {type(estimate).__name__}")
    shape = torch.as_tensor(estimate.value).shape
    require(shape == goal.shape, f"{name}: the value has shape {tuple(shape)}, the truth {tuple(goal.shape)}")
    require(bool(estimate.convention), f"{name}: convention is empty: say which matrix, divided by what")
    stderr = torch.as_tensor(estimate.stderr)
    require(bool((stderr >= 0).all()), f"{name}: stderr {stderr.flatten()[0]:.3g} is not a size")
    if not estimate.exact:
        require(estimate.products > 0, f"{name}: products is {estimate.products}: say what it cost")
        require(estimate.seed is not None, f"{name}: seed is None, though probes were drawn")


def _check_nesting(estimate: Estimate, level: float) -> None:
    """An interval at a lower level lies inside one at a higher."""
    outer, inner = (_ends(estimate, at) for at in (level, level / 2))
    require(bool((outer[0] <= outer[1]).all()), f"{estimate.name}: the interval ends before it begins")
    nested = bool((outer[0] <= inner[0]).all() and (inner[1] <= outer[1]).all())
    require(nested, f"{estimate.name}: the {level / 2:.0%} interval is not inside the {level:.0%} one")


def _check_samples(estimate: Estimate) -> None:
    """Comparisons are made sample by sample: what the samples say must be the value, or within its bracket."""
    if estimate.samples is None or estimate.many:
        return
    mean, power = float(estimate.samples.double().mean()), estimate.power
    found = mean if power == 1 else max(mean, 0.0) ** power
    ends = [float(end) for end in estimate.bracket or (estimate.value, estimate.value)]
    slack = 1e-6 * max(abs(found), float(estimate.samples.abs().max()) ** power)  # round-off
    holds = ends[0] - slack <= found <= ends[1] + slack
    require(holds, f"{estimate.name}: the value is {float(estimate.value):.6g}, its samples say {found:.6g}")


def _check_storage(estimate: Estimate) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            loaded = load(estimate.save(Path(folder) / "estimate"))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{estimate.name}: cannot be saved and loaded: {error}") from error
    require(loaded == estimate, f"{estimate.name}: what is loaded is not what was saved")


def _check_exact(name: str, values: Tensor, errors: Tensor, goal: Tensor, rtol: float) -> None:
    worst = float(errors.abs().max())
    require(worst == 0, f"{name}: exact, but with stderr {worst:.3g}")
    off = _error(values, goal)
    require(off <= rtol, f"{name}: exact, but with a relative error of {off:.2g}, more than {rtol:.2g}")


def _check_mean(estimates: Sequence[Estimate], values: Tensor, goal: Tensor) -> None:
    """The mean over seeds against the truth; of squares where the value is the root of an averaged square."""
    power = estimates[0].power
    raw, aim = values ** (1 / power), goal ** (1 / power)
    slack = torch.zeros_like(goal)
    for e in estimates:
        ends = [torch.as_tensor(end).double().cpu() ** (1 / power) for end in e.bracket or (e.value, e.value)]
        slack = slack + (ends[1] - ends[0]) / len(estimates)
    spread = raw.std(0) / math.sqrt(len(raw))
    # among n entries the largest deviate is expected at sqrt(2 log n)
    limit = 4 + math.sqrt(2 * math.log(goal.numel()))
    floor = 1e-9 * aim.abs()  # round-off
    excess = ((raw.mean(0) - aim).abs() - slack - floor).clamp(min=0) / spread.clamp(min=1e-300)
    worst = int(excess.argmax())
    require(
        float(excess.max()) <= limit,
        f"{estimates[0].name}: biased: the mean over {len(raw)} seeds is {raw.mean(0).flatten()[worst]:.6g}, the truth "
        f"{aim.flatten()[worst]:.6g}, {float(excess.max()):.1f} standard errors away",
    )


def _check_coverage(estimates: Sequence[Estimate], goal: Tensor, level: float, low: float, high: float) -> float:
    hits = []
    for estimate in estimates:
        lower, upper = _ends(estimate, level)
        hits.append(((lower <= goal) & (goal <= upper)).double().mean())
    coverage = float(torch.stack(hits).mean())
    what = f"{estimates[0].name}: the {level:.0%} interval covers the truth {coverage:.1%} of {len(hits)} times"
    require(coverage >= low, f"{what}, less than {low:.0%}: the error bars are too small")
    require(coverage <= high, f"{what}, more than {high:.0%}: the error bars are too large")
    return coverage


def _check_stderr(name: str, values: Tensor, errors: Tensor, high: float) -> None:
    """Standard errors (seeds, ...) against the spread of the values; where that is round-off there is none to meet."""
    from scipy.stats import chi2

    spread, size = values.std(0), errors.square().mean(0).sqrt()
    ratio = (size / spread)[size.isfinite() & (spread > 1e-9 * values.abs().amax(0))]
    if not ratio.numel():
        return
    dof, rare = len(values) - 1, 1e-4 / spread.numel()
    # how far off the spread of normal values may be by chance; the factor of two is for others
    least, most = (math.sqrt(float(q) / dof) for q in chi2.ppf((rare, 1 - rare), dof))
    smallest, largest = (float(end) for end in ratio.aminmax())
    what = f"times the spread of the values over {len(values)} seeds"
    require(smallest >= 0.5 / most, f"{name}: the standard error is {smallest:.2g} {what}: it is too small")
    require(largest <= 2 / least or high >= 1, f"{name}: the standard error is {largest:.2g} {what}: it is too large")


def _ends(estimate: Estimate, level: float) -> tuple[Tensor, Tensor]:
    lower, upper = (torch.as_tensor(end).double().cpu() for end in estimate.interval(level))
    return lower, upper
