"""PAC-Bayes: the metric of seed 002, Laplace's method, noise on the weights, bounds and certificates."""

from .bounds import (
    best_prior,
    kl_bernoulli,
    kl_inverse,
    mcallester,
    pacbayes_flatness,
    pacbayes_init,
    pacbayes_mag_init,
    pacbayes_mag_orig,
    pacbayes_orig,
    seeger,
)
from .certify import certificate
from .laplace import MetricConvention, empirical_risk_eq8, kl_eq6, laplace_evidence, laplace_kl, metric_a, metric_g_eq9
from .minibatch import minibatch_metric
from .posterior import Posterior, expected_loss, laplace_posterior, sigma_search

__all__ = [
    "MetricConvention",
    "Posterior",
    "best_prior",
    "certificate",
    "empirical_risk_eq8",
    "expected_loss",
    "kl_bernoulli",
    "kl_eq6",
    "kl_inverse",
    "laplace_evidence",
    "laplace_kl",
    "laplace_posterior",
    "mcallester",
    "metric_a",
    "metric_g_eq9",
    "minibatch_metric",
    "pacbayes_flatness",
    "pacbayes_init",
    "pacbayes_mag_init",
    "pacbayes_mag_orig",
    "pacbayes_orig",
    "seeger",
    "sigma_search",
]
