"""Sharpness from curvature, and from moving the weights."""

from .curvature import (
    epsilon_sharpness_quadratic,
    fisher_rao_norm,
    layer_spectral_norms,
    relative_flatness,
    stability_limit,
    taylor_shift,
    top_log_product,
)
from .perturbed import average_case_sharpness, epsilon_sharpness, logit_normalised, worst_case_sharpness

__all__ = [
    "average_case_sharpness",
    "epsilon_sharpness",
    "epsilon_sharpness_quadratic",
    "fisher_rao_norm",
    "layer_spectral_norms",
    "logit_normalised",
    "relative_flatness",
    "stability_limit",
    "taylor_shift",
    "top_log_product",
    "worst_case_sharpness",
]
