"""Measures of the weights alone."""

import math

from ...results import Estimate
from .. import norms
from ..row import EVERY, NONE, SAME_FUNCTION, Measure
from ..subject import Subject


def _layer_spectra(s: Subject) -> norms.LayerSpectra:
    return s.once("layer spectra", lambda: norms.layer_spectra(s.risk))


def _spectral_norms(s: Subject) -> Estimate:
    return s.once("layer norms", lambda: norms.spectral_norms(s.risk))


ROWS = (
    Measure(
        key="weight_norm", formula="||w||", convention="Euclidean, not squared; all chosen parameters",
        source="seed 002, figure 1c; seed 000, figure 6c", family="norms", cost="weights",
        compute=lambda s: norms.weight_norm(s.risk), standard=True,
        reading="small after weight decay; with BatchNorm part of it changes nothing",
    ),
    Measure(
        key="distance", formula="||w - w_0||", convention="Euclidean, not squared", source="Neyshabur et al. 2017",
        family="norms", cost="weights", compute=lambda s: norms.distance(s.risk, s.start), standard=True,
        unchanged=NONE, needs=frozenset({"init"}), reading="how far training went from its start",
    ),
    Measure(
        key="weight_max", formula="max_i |w_i|", convention="largest entry", source="code of seed 002's authors",
        family="norms", cost="weights", compute=lambda s: norms.weight_norm(s.risk, math.inf),
        reading="depends on one large weight",
    ),
    Measure(
        key="log_spectral_product", formula="sum_l log ||A_l||^2", convention="A_l the layer as a linear map",
        source="Jiang et al. 2020", family="norms", cost="weights",
        compute=lambda s: norms.log_spectral_product(s.risk, _spectral_norms(s)),
        reading="bounds the logarithm of the squared Lipschitz constant of a chain",
    ),
    Measure(
        key="stable_ranks", formula="sum_l ||A_l||_F^2 / ||A_l||^2", convention="A_l the layer as a matrix",
        source="Neyshabur et al. 2018", family="norms", cost="weights", compute=lambda s: norms.stable_ranks(s.risk),
        unchanged=EVERY, reading="about how many directions the layers use",
    ),
    Measure(
        key="spectral_complexity", formula="prod_l ||A_l|| (sum_l (||A_l'||_{2,1} / ||A_l||)^(2/3))^(3/2)",
        convention="reference 0, not divided by a margin", source="Bartlett et al. 2017, equation 1.2", family="norms",
        cost="weights", compute=lambda s: norms.spectral_complexity(s.risk),
        reading="a margin bound when divided by the margin; loose on deep networks",
    ),
    Measure(
        key="path_norm", formula="sqrt(sum over paths of prod w^2)", convention="squared weights, biases too",
        source="Neyshabur et al. 2015", family="norms", cost="weights", compute=lambda s: norms.path_norm(s.risk),
        unchanged=SAME_FUNCTION, reading="a norm of the function's paths, invariant to the position of a factor",
    ),
    Measure(
        key="layer_alpha", formula="exponent of the tail of eig(W'W)",
        convention="mean over layers, maximum likelihood",
        source="Martin and Mahoney 2021", family="norms", cost="weights", compute=lambda s: _layer_spectra(s).alpha,
        unchanged=EVERY, reading="2 to 6 is called well trained; needs layers with many eigenvalues",
    ),
    Measure(
        key="layer_alpha_hat", formula="alpha log10 lambda_max(W'W)", convention="mean over layers",
        source="Martin et al. 2021", family="norms", cost="weights", compute=lambda s: _layer_spectra(s).alpha_hat,
        reading="the exponent weighed by the scale of the layer",
    ),
    Measure(
        key="layer_spikes", formula="number of eigenvalues of W'W that are too large for noise",
        convention="mean over layers; above the 99 % quantile of the largest of noise",
        source="Martin and Mahoney 2021", family="norms", cost="weights", better=None, unchanged=EVERY,
        compute=lambda s: _layer_spectra(s).num_spikes, reading="0 for a layer of noise",
    ),
)  # fmt: skip
