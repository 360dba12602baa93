"""The loss along lines and planes through weight space.

    line           t -> L(w + t d)
    interpolation  t -> L((1 - t) w + t w')
    plane          (s, t) -> L(w + s d + t e)

A picture of one or two dimensions out of P is no evidence of convexity, nor of a flat or a sharp minimum as a whole.
Along a random unit direction d'Hd has the mean Tr H / P: the negative eigenvalues, and the few large ones, are averaged
away, and a saddle looks like a bowl. What holds in all directions is in the spectrum (`ritz.spectrum`); a picture along
eigenvectors shows its extremes. Layers that are rescaled without changing the function stretch the picture along any
direction whose size does not follow the weights; filter normalisation makes up for some of that, not for all.
"""

from .directions import eigenvector_directions, filter_normalised, random_direction
from .paths import interpolate, line, plane, plane_through
from .pictures import Interpolation, Line, Plane

__all__ = [
    "Interpolation",
    "Line",
    "Plane",
    "eigenvector_directions",
    "filter_normalised",
    "interpolate",
    "line",
    "plane",
    "plane_through",
    "random_direction",
]
