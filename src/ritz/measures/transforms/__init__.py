"""Other weights, the same function: reparametrisations that should not change a measure of generalisation.

    rescale             W, b of a layer times c, the next W divided by c                 Dinh et al. 2017, section 3
    rescale_batchnorm   W, b before a BatchNorm times c, its statistics with them        the function is the same
    permute             hidden units in another order                                    the function is the same
    scale_output        last layer times alpha: f -> alpha f                             seed 003, section 5, T_alpha
    scale_layers        W_l times alpha^(1/L), b_l times alpha^(l/L): f -> alpha f       seed 003, section 5, T_alpha

Each takes a `Risk` and returns one at other weights; the model itself does not change. Where a transform applies is
found by tracing the network (`tape`), and then checked: the outputs on the first batch, in the mode of the risk, must
be the same (or alpha times as large) up to round-off. Parameters that are frozen or not chosen also change if
necessary: `risk.names` says in which directions curvature is taken, not which network is studied.
"""

from .joints import Joint, joints
from .moves import TRANSFORMS, Transform, permute, rescale, rescale_batchnorm, scale_layers, scale_output

__all__ = [
    "TRANSFORMS",
    "Joint",
    "Transform",
    "joints",
    "permute",
    "rescale",
    "rescale_batchnorm",
    "scale_layers",
    "scale_output",
]
