"""Random matrix theory of curvature noise: laws, edges, spikes, shrinkage.

A batch has the curvature H + X, with noise X. If the entries of X are independent, everything here follows from one
number, the noise level s2 = Tr X^2 / P that `ritz.curvature_noise` measures: where the bulk of X ends (`bulk_edge`),
which eigenvalues are signal (`outliers`), how large they truly are and how well their directions are known (`debias`),
and how much to damp (`shrinkage`). `fit` tells whether X is such a matrix. The X of a network is not: docs/rmt.md has
numbers.
"""

from .draws import wigner, wishart
from .edges import bbp_threshold, bulk_edge, edge_quantile
from .fitting import LawFit, fit
from .laws import MarchenkoPastur, Semicircle
from .outlying import Outliers, outliers
from .shrinking import Shrinkage, shrinkage
from .spikes import debias, overlap
from .tracy_widom import tracy_widom_cdf, tracy_widom_quantile

__all__ = [
    "LawFit",
    "MarchenkoPastur",
    "Outliers",
    "Semicircle",
    "Shrinkage",
    "bbp_threshold",
    "bulk_edge",
    "debias",
    "edge_quantile",
    "fit",
    "outliers",
    "overlap",
    "shrinkage",
    "tracy_widom_cdf",
    "tracy_widom_quantile",
    "wigner",
    "wishart",
]
