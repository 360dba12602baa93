"""Other weights, the same function or the same predictions: see `ritz.measures.transforms`."""

from .measures.transforms import (
    TRANSFORMS,
    Joint,
    Transform,
    joints,
    permute,
    rescale,
    rescale_batchnorm,
    scale_layers,
    scale_output,
)

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
