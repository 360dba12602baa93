"""Learning rates over training: factors for torch's LambdaLR, piecewise linear in t / T.

A schedule is a small object, not a closure, so that LambdaLR saves and loads it with its own state. Epochs count from
0, as LambdaLR counts them; a schedule works just as well in steps, with T the number of steps, and at fractions of an
epoch.

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, ritz.optim.linear_decay(300))
"""

import itertools
import math
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class PiecewiseLinear:
    """A factor that is linear between points (t / span, factor) and constant before the first and after the last.

    Example:
        >>> rise = PiecewiseLinear(span=10, points=((0.0, 1.0), (0.5, 3.0)))
        >>> [rise(t) for t in (0, 2.5, 5, 10)]
        [1.0, 2.0, 3.0, 3.0]
    """

    span: float
    points: tuple[tuple[float, float], ...]

    def __call__(self, t: float) -> float:
        """The factor at time t."""
        place = t / self.span
        if place <= self.points[0][0]:
            return self.points[0][1]
        for (left, low), (right, high) in itertools.pairwise(self.points):
            if place <= right:
                return low + (high - low) * (place - left) / (right - left)
        return self.points[-1][1]


def linear_decay(num_epochs: float, r: float = 0.01) -> PiecewiseLinear:
    """1 for half of training, then linear to r at nine tenths, then r (seed 004, equation 12; seed 000, A.2).

    Args:
        num_epochs: T, the length of training, in epochs or in steps: whatever `scheduler.step()` counts.
        r: The last factor; 0.01 in both papers.

    Example:
        >>> decay = linear_decay(100)
        >>> [round(decay(t), 4) for t in (0, 50, 70, 90, 99)]
        [1.0, 1.0, 0.505, 0.01, 0.01]
    """
    return PiecewiseLinear(_positive("num_epochs", num_epochs), ((0.5, 1.0), (0.9, _factor("r", r))))


def ramp_decay(num_epochs: float, kappa: float = 5.0, r: float = 0.01) -> PiecewiseLinear:
    """1 for a tenth of training, up to kappa at three tenths, down to r at nine tenths, then r (seed 004, equation 16).

    Made for damping that learns: the larger rate makes up for a damping that is too large. With flat damping the paper
    sees it diverge.

    Args:
        num_epochs: T, as in `linear_decay`.
        kappa: The largest factor.
        r: The last factor: 0.01 in the paper's text, 0.1 in the code that was published with it.

    Example:
        >>> ramp = ramp_decay(100)
        >>> [round(ramp(t), 4) for t in (0, 10, 20, 30, 60, 90)]
        [1.0, 1.0, 3.0, 5.0, 2.505, 0.01]
    """
    points = ((0.1, 1.0), (0.3, _factor("kappa", kappa)), (0.9, _factor("r", r)))
    return PiecewiseLinear(_positive("num_epochs", num_epochs), points)


def averaging_decay(start: float, ratio: float = 0.5) -> PiecewiseLinear:
    """1 until half of the time before averaging, linear to `ratio` at nine tenths of it, then `ratio` for good.

    Equation 22 of seed 001 (A.2 of seed 000), where the slope is printed with t / T in place of t / T_avg: with that it
    would jump. Iterates to be averaged keep a large constant rate.

    Args:
        start: T_avg, when averaging starts; 161 of 300 epochs in the papers on averaging.
        ratio: alpha_avg / alpha_0.

    Example:
        >>> decay = averaging_decay(160)
        >>> [round(decay(t), 4) for t in (0, 80, 112, 144, 299)]
        [1.0, 1.0, 0.75, 0.5, 0.5]
    """
    return PiecewiseLinear(_positive("start", start), ((0.5, 1.0), (0.9, _factor("ratio", ratio))))


def _positive(name: str, value: float) -> float:
    if not isinstance(value, Real):
        raise TypeError(
            f"{name} is a number of epochs or steps, got {type(value).__name__}; a schedule is a factor for torch's "
            "scheduler: LambdaLR(optimizer, linear_decay(300))"
        )
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number of epochs or steps, got {value}")
    return value


def _factor(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} multiplies the learning rate: it must be finite and not negative, got {value}")
    return value
