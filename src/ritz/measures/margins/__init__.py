"""Margins of the outputs, of the last layer's features and at the input of every layer."""

from .distribution import MarginDistribution
from .last_layer import aceht_features, sample_aceht_features
from .layers import LayerMargins, layer_margins
from .summaries import (
    aceht,
    calibration_error,
    inverse_margin,
    margin_bound,
    margin_distribution,
    margin_mean,
    margin_min,
    margin_quantile,
    margin_skewness,
    mean_confidence,
    mean_entropy,
    sample_aceht,
    sample_margin_bound,
    sample_margins,
)
from .trace_study import MarginStudy, margin_study

__all__ = [
    "LayerMargins",
    "MarginDistribution",
    "MarginStudy",
    "aceht",
    "aceht_features",
    "calibration_error",
    "inverse_margin",
    "layer_margins",
    "margin_bound",
    "margin_distribution",
    "margin_mean",
    "margin_min",
    "margin_quantile",
    "margin_skewness",
    "margin_study",
    "mean_confidence",
    "mean_entropy",
    "sample_aceht",
    "sample_aceht_features",
    "sample_margin_bound",
    "sample_margins",
]
