"""Norms of the weights, of layers as linear maps and of paths; spectra of weight matrices."""

from .layer_spectra import LayerSpectra, LayerSpectrum, layer_spectra
from .matrix_laws import Bulk, PowerLaw, fit_bulk, fit_power_law
from .paths import path_norm
from .weights import distance, log_spectral_product, spectral_complexity, spectral_norms, stable_ranks, weight_norm

__all__ = [
    "Bulk",
    "LayerSpectra",
    "LayerSpectrum",
    "PowerLaw",
    "distance",
    "fit_bulk",
    "fit_power_law",
    "layer_spectra",
    "log_spectral_product",
    "path_norm",
    "spectral_complexity",
    "spectral_norms",
    "stable_ranks",
    "weight_norm",
]
