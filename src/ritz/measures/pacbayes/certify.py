"""A bound on the error of a trained network on unseen data: PAC-Bayes with a prior around its initial weights."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...operators.base import full_precision
from ...results import Estimate, from_samples
from ...risk import Progress, Risk
from ..subject import as_vector
from .bounds import best_prior, check_delta, kl_inverse, mcallester, seeger
from .posterior import accuracy_at, around, check_sigma, num_classes

_FRESH = 1 << 20  # draws that no search for sigma has used: sigma must not depend on the draws of the bound


@full_precision()
def certificate(
    risk: Risk,
    init: Mapping[str, Tensor] | Tensor,
    *,
    sigma: float | Estimate | Sequence[float],
    delta: float = 0.05,
    delta_prime: float = 0.01,
    num_draws: int = 100,
    prior_scale: float = 0.1,
    prior_precision: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> Estimate:
    """A bound on the true 0-1 error of N(w, sigma^2 I), the classifier that draws its weights for every prediction.

    With probability 1 - delta - delta_prime over the samples and the draws (Dziugaite and Roy 2017),

        error <= kl_inverse( kl_inverse(e, ln(2 / delta') / M),  (KL + ln(pi^2 j^2 / 6) + ln(2 sqrt(n) / delta)) / n )

    where e is the mean error of M draws over the n samples, and the prior is N(init, v I) with v = c exp(-j / b) for
    the best j (`best_prior`). The inner inverse accounts for the finite number of draws. `parts` holds the empirical
    error, the KL, the prior's standard deviation and McAllester's bound.

    The bound holds if the samples are independent, and if nothing but w depends on them: neither `init`, nor parameters
    that are not among the chosen ones.

    Args:
        risk: The solution on all of its training data, without augmentation.
        init: The weights at initialisation, or others that do not depend on the data.
        sigma: Standard deviation of the noise, or several from which the best is taken; they then share delta_prime.
        delta: Probability with which the bound may fail because of the finite number of samples.
        delta_prime: Probability with which it may fail because of the finite number of draws.
        num_draws: M; each draw is one pass over the data. With 100 draws even an error of 0 counts as 0.05.
        prior_scale: c, see `best_prior`.
        prior_precision: b.
        seed: Seed of the draws.
        progress: Called with (draws done, draws at most).

    Raises:
        UnsupportedError: For a network with running statistics, which come from the data and have no prior.

    Example:
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> model.weight.data[:] = torch.tensor([[0.5], [-0.5]])
        >>> data = torch.ones(1000, 1), torch.zeros(1000, dtype=torch.long)
        >>> risk = ritz.Risk(model, torch.nn.CrossEntropyLoss(), data, batch_size=1000)
        >>> bound = certificate(risk, {"weight": torch.zeros(2, 1)}, sigma=0.1, num_draws=200)
        >>> round(bound.value, 3), round(bound.parts["KL"].value, 2), bound.parts["empirical error"].value
        (0.058, 3.92, 0.0)
    """
    sigmas = [float(s) for s in sigma] if isinstance(sigma, Sequence) else [float(sigma)]
    if not sigmas or num_draws < 1:
        raise ValueError(f"expected at least one sigma and one draw, got sigma={sigmas} and num_draws={num_draws}")
    for each in sigmas:
        check_sigma(each)
    check_delta(delta=delta, delta_prime=delta_prime, **{"delta + delta_prime": delta + delta_prime})
    start, classes = as_vector(risk, init), _certifiable(risk)
    risk.check()
    distance = float((risk.space.join(risk.params()).double() - start.double()).norm())
    found = []
    for number, each in enumerate(sigmas):
        prior = best_prior(distance, risk.dim, each, scale=prior_scale, precision=prior_precision)
        report = _later(progress, number * num_draws, len(sigmas) * num_draws)
        errors, size = _errors(risk, each, num_draws, seed, report)
        above = kl_inverse(float(errors.mean()), math.log(2 * len(sigmas) / delta_prime) / num_draws)
        bounds = [bound(above, prior.kl + prior.penalty, size, delta) for bound in (seeger, mcallester)]
        found.append((bounds, errors, each, prior, size))
    (value, linear), errors, width, prior, size = min(found, key=lambda row: row[0][0])
    guess, prior_sigma = 1 - 1 / classes, math.sqrt(prior.variance)
    text = (
        f"bound on the error of N(w, {width:g}^2 I), holds with probability {1 - delta - delta_prime:g}, n = {size}, "
        f"{num_draws} draws, prior N(init, {prior_sigma:.3g}^2 I)"
    )
    others = sum(p.numel() for p in risk.model.parameters()) - risk.dim
    text += f", if the other {others} parameters were not made from these samples" if others else ""
    exact = {"sigma": width, "prior sigma": prior_sigma, "KL": prior.kl, "McAllester": linear}
    parts = {name: Estimate(name=name, value=number, exact=True) for name, number in exact.items()}
    parts["empirical error"] = from_samples("empirical error", errors, seed=seed, support=(0.0, 1.0))
    return Estimate(
        name="certificate", value=value, seed=seed, support=(0.0, 1.0), products=len(sigmas) * num_draws, parts=parts,
        stop="completed" if value < guess else f"vacuous: a guess among {classes} classes errs {guess:.3g}",
        convention=f"{text}; {risk.convention()}",
    )  # fmt: skip


def _certifiable(risk: Risk) -> int:
    """The number of classes; refuses a risk to which the bound does not apply."""
    if not risk.splittable:
        raise UnsupportedError(
            "a bound needs predictions that do not depend on the batch; use mode='eval' and no dropout"
        )
    made = [name for name, _ in risk.model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if made:
        raise UnsupportedError(
            f"{made[0]} was computed from the training data and has no prior, so no bound covers it; fold the "
            "normalisation into the weights, or use a network without running statistics"
        )
    return num_classes(risk, one_item=True)


def _errors(risk: Risk, sigma: float, num_draws: int, seed: int, report: Progress | None) -> tuple[Tensor, int]:
    """The 0-1 error of each draw (num_draws,), and the number of samples."""
    errors, size = [], 0
    for params in around(risk, range(_FRESH, _FRESH + num_draws), seed, lambda z: sigma * z):
        share, size = accuracy_at(risk, params)
        errors.append(1 - share)
        if report is not None:
            report(len(errors), num_draws)
    return torch.tensor(errors, dtype=torch.float64), size


def _later(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of one part of several."""
    return None if progress is None else lambda done, _: progress(before + done, total)
