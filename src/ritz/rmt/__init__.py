"""Random matrix theory of curvature noise: laws, edges, spikes, shrinkage.

A batch sees the curvature H + X. If X has independent entries, all that is said of it follows from one number, its
level s2 = Tr X^2 / P, which `ritz.curvature_noise` measures: where its bulk ends (`bulk_edge`), which eigenvalues are
signal (`outliers`), how large they truly are and how well their directions are known (`debias`), and how much to damp
(`shrinkage`). Whether X is such a matrix, `fit` tells. That of a network is not: docs/rmt.md has numbers.
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
