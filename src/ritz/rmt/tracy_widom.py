"""The law of Tracy and Widom for the largest eigenvalue of real symmetric noise (beta = 1).

    F_1(s) = det(1 - K_s),    K_s(x, y) = Ai(x + y + s)    on 0 < x, y < infinity

(Ferrari and Spohn 2005). Gauss-Legendre quadrature for the determinant converges exponentially (Bornemann 2010).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

_POINTS = 40  # of the quadrature: 13 digits
_REACH = 12.0  # Ai(12) is 1e-13
_ENDS = (-12.0, 12.0)  # the mass beyond these is too small for float64


def tracy_widom_cdf(s: float | Tensor) -> Tensor:
    """P[(lambda_1 - edge) / scale <= s] for large real symmetric noise; `Semicircle.edge_scale` gives the scale.

    Example:
        >>> [round(float(p), 4) for p in tracy_widom_cdf(torch.tensor([-1.2653, 0.9793, 2.0234]))]
        [0.5, 0.95, 0.99]
    """
    import numpy as np
    from scipy.special import airy

    s = torch.as_tensor(s, dtype=torch.float64)
    points, weights = np.polynomial.legendre.leggauss(_POINTS)
    flat = s.clamp(*_ENDS).reshape(-1, 1, 1).cpu().numpy()
    length = _REACH - np.minimum(flat, 0.0)  # the kernel is negligible if x + y + s is large
    x = (points[None, :, None] + 1) / 2 * length  # (n, m, 1)
    root = np.sqrt(weights[None, :, None] / 2 * length)
    kernel = root * airy(x + x.transpose(0, 2, 1) + flat)[0] * root.transpose(0, 2, 1)
    det: Tensor = torch.linalg.det(torch.eye(_POINTS, dtype=torch.float64) - torch.from_numpy(kernel))
    return det.clamp(0.0, 1.0).reshape(s.shape)


@lru_cache(maxsize=64)
def tracy_widom_quantile(level: float) -> float:
    """The inverse of `tracy_widom_cdf`.

    Example:
        >>> round(tracy_widom_quantile(0.95), 4), round(tracy_widom_quantile(0.99), 4)
        (0.9793, 2.0234)
    """
    from scipy.optimize import brentq

    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    low, high = _ENDS
    if level <= float(tracy_widom_cdf(low)) or level >= float(tracy_widom_cdf(high)):
        raise ValueError(f"level must be further from 0 and 1 than float64 resolves, got {level}")
    return float(brentq(lambda s: float(tracy_widom_cdf(s)) - level, low, high, xtol=1e-12))


MEAN, DEVIATION = -1.2065335745820, math.sqrt(1.607781034581)  # of the law (Bornemann 2010, table 10)
