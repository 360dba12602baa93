"""The loss along lines and planes through weight space.

    line           t -> L(w + t d)
    interpolation  t -> L((1 - t) w + t w')
    plane          (s, t) -> L(w + s d + t e)

A picture of one or two dimensions out of P is no evidence that the loss is convex, or that a minimum is flat or sharp
as a whole. Along a random unit direction the mean of d'Hd is Tr H / P: the negative eigenvalues and the few large ones
are averaged away, and a saddle looks like a bowl. The spectrum (`ritz.spectrum`) describes all directions; a picture
along eigenvectors shows its extremes. If layers are rescaled without changing the function, the picture is stretched
along any direction whose size does not follow the weights; filter normalisation corrects only a part of this.
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
